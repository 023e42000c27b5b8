"""Large files are written in parts, and loaded from a mapping of the file: what memory that takes, and that it is right."""

import gc
import json
import os
import random
import subprocess
import sys
import warnings
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from saved_states import check_refused, make_gradients, make_params, make_trained, take_step

from tristep import CheckpointManager, Trainer, lr_scheduler, optimizer
from tristep.trainer import serialization
from tristep.trainer.serialization import files, mapping

safetensors = pytest.importorskip("safetensors", reason="files are compared with its")
pytest.importorskip("safetensors.torch", reason="files are compared with its")

posix = pytest.mark.skipif(os.name != "posix", reason="files are mapped on POSIX systems")
trained = pytest.fixture(make_trained)
SHAPES = [(), (0,), (1,), (7,), (8,), (50,), (1, 30), (30, 1), (3, 0, 2), (2, 3, 4), (1, 1, 20), (9, 2, 2)]
KINDS = [
    torch.bool, torch.uint8, torch.int16, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.uint64,
]  # fmt: skip


@pytest.fixture
def small_parts(monkeypatch):
    """Parts of seven elements, so that small tensors are handled as large ones are."""
    monkeypatch.setattr(mapping, "AT_A_TIME", 7)


def _values(shape, kind=torch.float32, seed=0):
    """A tensor of any bits, which a NaN may have, too."""
    count = torch.Size(shape).numel() * kind.itemsize
    data = np.random.default_rng(seed).integers(0, 2 if kind == torch.bool else 256, count, np.uint8)
    return torch.from_numpy(data).view(kind).reshape(shape) if count else torch.empty(shape, dtype=kind)


def _bytes(tensor):
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


# ---- parts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "expanded", "strided"])
def test_parts_have_all_elements_in_order_and_few_of_them(shape, layout, small_parts):
    tensor = torch.arange(torch.Size(shape).numel()).reshape(shape)
    if layout == "transposed":
        tensor = tensor.permute(tuple(reversed(range(tensor.dim()))))
    elif layout == "expanded":
        tensor = tensor.unsqueeze(0).expand(5, *shape)
    elif layout == "strided":
        tensor = torch.stack([tensor, tensor], dim=-1)[..., 1]
    parts = list(mapping.parts(tensor))
    assert torch.cat([part.reshape(-1) for part in parts]).tolist() == tensor.reshape(-1).tolist()
    assert max(part.numel() for part in parts) <= 7
    assert all(part.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr() for part in parts)
    copied = torch.zeros_like(tensor).contiguous()
    mapping.copy(copied, tensor)
    assert torch.equal(copied, tensor)


# ---- safetensors files -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_safetensors_reads_what_we_write_and_we_what_it_writes(kind, small_parts, tmp_path):
    """To the bit, for each shape and layout; safetensors has complex128 as pairs of numbers."""
    tensors = {f"{'ä' * k} {shape}": _values(shape, kind, k) for k, shape in enumerate(SHAPES)}
    tensors |= {
        "cols": _values((5, 6), kind).t(),
        "rows": _values((4, 3, 5), kind)[:, 1],
        "all": _values((3, 1), kind).expand(3, 9),
    }
    files.write("path", tmp_path / "ours", "any", {}, tensors)
    found = safetensors.torch.load_file(tmp_path / "ours")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        pairs = kind == torch.complex128
        assert found[name].dtype == (torch.float64 if pairs else kind)
        assert found[name].shape == ((*tensor.shape, 2) if pairs else tensor.shape)
        assert _bytes(found[name]) == _bytes(tensor)

    with safetensors.safe_open(tmp_path / "ours", "pt") as file:
        metadata = file.metadata()
    safetensors.torch.save_file(found, tmp_path / "theirs", metadata)
    for path in ("ours", "theirs"):
        for mapped in (False, True):
            _, again = files.read(tmp_path / path, "any", mapped=mapped)
            assert list(again) == list(tensors)
            for name, tensor in tensors.items():
                assert (again[name].dtype, again[name].shape) == (kind, tensor.shape)
                assert _bytes(again[name]) == _bytes(tensor)
                if kind != torch.complex128 or path == "ours":
                    assert mapping.is_mapped(again[name]) == (mapped and os.name == "posix" and tensor.numel() > 0)


def test_tensors_are_aligned_and_in_the_order_of_safetensors(tmp_path):
    tensors = {f"{name}{kind}": _values((3,), kind) for name in "ba" for kind in (torch.int8, torch.float64, torch.bfloat16)}
    files.write("path", tmp_path / "a", "any", {}, tensors)
    whole = (tmp_path / "a").read_bytes()
    length = int.from_bytes(whole[:8], "little")
    described = json.loads(whole[8 : 8 + length])
    metadata = described.pop("__metadata__")
    expected = safetensors.torch.save(tensors, metadata)
    start = 8 + int.from_bytes(expected[:8], "little")
    assert (8 + length) % 16 == 0
    assert json.loads(expected[8:start]) == described | {"__metadata__": metadata}
    assert whole[8 + length :] == expected[start:]


@pytest.mark.parametrize("spaces", [0, 8])
def test_complex128_is_copied_from_any_place_in_a_file(spaces, tmp_path):
    """Into other strides, for which torch needs multiples of 16 bytes, and crashes at others."""
    values = torch.complex(torch.arange(6.0).double(), torch.ones(6).double()).view(2, 3)
    files.write("path", tmp_path / "a", "any", {}, {"one": torch.ones(1, dtype=torch.float64), "values": values})
    whole = (tmp_path / "a").read_bytes()
    length = int.from_bytes(whole[:8], "little")
    (tmp_path / "a").write_bytes(
        (length + spaces).to_bytes(8, "little") + whole[8 : 8 + length] + b" " * spaces + whole[8 + length :]
    )
    _, tensors = files.read(tmp_path / "a", "any", mapped=True)
    assert mapping.is_mapped(tensors["values"]) == (os.name == "posix" and not spaces)
    assert tensors["values"].data_ptr() % 16 == 0
    copied = torch.zeros(3, 2, dtype=torch.complex128).t()
    mapping.copy(copied, tensors["values"])
    assert torch.equal(copied, values)


# ---- memory ----------------------------------------------------------------------------------------------------------


def test_no_write_and_no_copy_is_larger_than_a_part(small_parts, tmp_path, monkeypatch):
    """Whatever the layout: what a file is given at once, and what is made contiguous for it."""
    tensors = {"flat": torch.ones(1000), "columns": torch.ones(30, 40).t(), "all": torch.ones(1, 1).expand(50, 9)}
    written, made, replace, contiguous = [], [], files.replace, torch.Tensor.contiguous

    class Counting:
        def __init__(self, file):
            self.file, self.seek = file, file.seek

        def write(self, data):
            written.append(len(data))
            return self.file.write(data)

    def noted(tensor, *args, **kwargs):
        if tensor.device.type != "meta":
            made.append(tensor.numel())
        return contiguous(tensor, *args, **kwargs)

    monkeypatch.setattr(
        files, "replace", lambda argument, path, write: replace(argument, path, lambda f: write(Counting(f)))
    )
    monkeypatch.setattr(torch.Tensor, "contiguous", noted)
    files.write("path", tmp_path / "a", "any", {}, tensors)
    *parts, header = written
    assert sum(parts) == 4 * (1000 + 1200 + 450)
    assert max(parts) <= 4 * 7
    assert max(made) <= 7
    assert header < 1000


@posix
def test_nothing_is_read_into_memory_to_load_states(trained, tmp_path, monkeypatch):
    trainer, params = trained
    trainer.save_states(tmp_path / "a")
    saved = _states(trainer)
    take_step(trainer, params, make_gradients(params))
    places = {key: tensor.data_ptr() for key, tensor in _tensors(trainer)}
    monkeypatch.setattr(files, "bytearray", lambda size: pytest.fail(f"{size} bytes are read"), raising=False)
    trainer.load_states(tmp_path / "a")
    assert _states(trainer) == saved
    assert {key: tensor.data_ptr() for key, tensor in _tensors(trainer)} == places  # no new states are made either


PEAKS = """
import sys, torch, tristep
from pathlib import Path
from tristep.trainer.serialization import mapping

folder, mapping.AT_A_TIME = Path(sys.argv[1]), 1 << 17

def peak(act):
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    act()
    print((status("VmHWM") - before) / size)

def status(name):
    lines = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[name].split()[0]) * 1024

params = {f"w{i}": torch.nn.Parameter(torch.ones(512, 1024)) for i in range(8)}
params["columns"] = torch.nn.Parameter(torch.ones(2048, 2048).t())
trainer = tristep.Trainer(params, "adam", engine="eager")
for param in params.values():
    param.grad = torch.ones_like(param)
trainer.step(1)
trainer.save_states(folder / "a")  # imports
trainer.load_states(folder / "a")
size = (folder / "a").stat().st_size
peak(lambda: trainer.save_states(folder / "a"))
peak(lambda: trainer.load_states(folder / "a"))
manager = tristep.CheckpointManager(folder / "run", trainer, asynchronous=False, sigterm=False)
size *= 1.5
peak(manager.save)
peak(lambda: trainer.resume(folder / "run"))
"""


def test_the_peaks_of_memory_are_those_that_docs_say(tmp_path):
    """In units of the file: less than a quarter above what is promised; a second copy of anything would be 0.67 or more."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        pytest.skip("this system does not tell peaks of memory")
    command = [sys.executable, "-c", PEAKS, str(tmp_path)]
    save, load, manager, resume = map(
        float, subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    )
    assert save < 0.25
    assert load < 0.25
    assert manager < 1.25
    assert resume < 0.25


# ---- loaded from a mapping -------------------------------------------------------------------------------------------


def _tensors(trainer):
    return [((name, slot), t) for name, slots in trainer.state_dict()["state"].items() for slot, t in slots.items()]


def _states(trainer):
    return {key: (tensor.dtype, tuple(tensor.shape), _bytes(tensor)) for key, tensor in _tensors(trainer)}


class Lists(optimizer.Optimizer):
    """An optimizer of a user, with states in lists."""

    def create_state(self, index, weight):
        return [torch.zeros_like(weight), (torch.ones_like(weight),)]

    def update(self, index, weight, grad, state):
        self._update_count(index)
        state[0].add_(grad)
        state[1][0].mul_(2)
        weight.detach().sub_(state[0])


def _net(dtype=torch.float32):
    torch.manual_seed(3)
    net = torch.nn.Sequential(
        torch.nn.Conv2d(2, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.Flatten(), torch.nn.Linear(200, 50)
    )
    return net.to(dtype).to(memory_format=torch.channels_last)


def _step(trainer, net):
    trainer.zero_grad()
    for k, param in enumerate(net.parameters()):
        param.grad = torch.linspace(-1, 1 + k, param.numel(), dtype=param.dtype).view(param.shape)
    trainer.step(1)


CASES = {
    "8-bit": ("adam", {"state_dtype": "8bit"}, torch.float32),
    "split": ("sgd", {"momentum": 0.9, "multi_precision": "remainder"}, torch.bfloat16),
    "per tensor": ("prodigy", {}, torch.float32),
    "lists": (Lists, {}, torch.float32),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("new", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_states_are_loaded_to_the_bit_and_nothing_keeps_the_file(case, new, monkeypatch, tmp_path):
    """What is written over a file afterwards changes nothing: all has been copied."""
    monkeypatch.setattr(mapping, "AT_A_TIME", 999)  # some tensors have several parts and a rest
    kind, options, dtype = CASES[case]
    make = lambda: kind(learning_rate=0.1) if isinstance(kind, type) else kind  # noqa: E731
    net = _net(dtype)
    trainer = Trainer(net, make(), None if isinstance(kind, type) else options, engine="eager")
    _step(trainer, net)
    trainer.save_states(tmp_path / "a")
    saved, weights = _states(trainer), {name: tensor.clone() for name, tensor in net.state_dict().items()}
    _step(trainer, net)
    expected = _states(trainer), {name: _bytes(tensor) for name, tensor in net.state_dict().items()}
    if new:
        net = _net(dtype)
        trainer = Trainer(net, make(), None if isinstance(kind, type) else options, engine="eager")
    net.load_state_dict(weights)
    trainer.load_states(tmp_path / "a")
    gc.collect()
    assert not mapping._mappings
    with open(tmp_path / "a", "r+b") as file:
        file.write(bytes((tmp_path / "a").stat().st_size))
    assert _states(trainer) == saved
    _step(trainer, net)
    assert (_states(trainer), {name: _bytes(tensor) for name, tensor in net.state_dict().items()}) == expected


@pytest.mark.parametrize("before", ["state_dtype", "multi_precision", "rule"])
def test_states_of_another_form_are_made_anew(before, tmp_path):
    """As without a mapping: `load_state_dict` with the tensors of the file."""
    first, second = {"state_dtype": ({}, {"state_dtype": "bfloat16"}), "rule": ({"momentum": 0.9}, {}),
                     "multi_precision": ({"multi_precision": True}, {"multi_precision": False})}[before]  # fmt: skip
    kind, dtype = ("sgd", torch.float32) if before == "rule" else ("adam", torch.bfloat16)
    net = _net(dtype if before == "multi_precision" else torch.float32)
    trainer = Trainer(net, kind, first, engine="eager")
    _step(trainer, net)
    trainer.save_states(tmp_path / "a")
    found = []
    for load in (Trainer.load_states, lambda trainer, path: trainer.load_state_dict(serialization.read(path))):
        other = Trainer(net, kind, second, engine="eager")
        _step(other, net)
        load(other, tmp_path / "a")
        found.append(_states(other))
    assert found[0] == found[1]


def test_a_state_dict_that_somebody_keeps_is_overwritten_by_no_other_dict(trained):
    trainer, _ = trained
    kept = trainer.state_dict()
    before = {key: _bytes(tensor) for key, tensor in _tensors(trainer)}
    other = Trainer(make_params(shapes={"body": (2, 3), "head": (2,)}), "adam", {"wd": 0.1})
    trainer.load_state_dict(
        other.state_dict() | {"state": {n: {s: t + 1 for s, t in v.items()} for n, v in kept["state"].items()}}
    )
    assert {(name, slot): _bytes(t) for name, slots in kept["state"].items() for slot, t in slots.items()} == before


def test_a_state_that_is_refused_late_has_overwritten_nothing(tmp_path, everything):
    """The schedule of the second optimizer is a function, which the trainer that loads does not have."""
    made = []
    for schedule in (lambda step: 0.1, lr_scheduler.FactorScheduler(5, 0.5, base_lr=0.1)):
        params = {name: torch.nn.Parameter(torch.ones(4)) for name in ("a", "b")}
        several = [("a", optimizer.Adam()), ("*", optimizer.SGD(momentum=0.9, lr_scheduler=schedule))]
        made.append((Trainer(params, several, engine="eager"), params))
        for param in params.values():
            param.grad = torch.full((4,), float(len(made)))
        made[-1][0].step(1)
    (first, _), (second, params) = made
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        first.save_states(tmp_path / "a")
    check_refused(second, params, everything, lambda: second.load_states(tmp_path / "a"), ValueError, "callable")


def test_damage_at_any_place_is_refused_before_anything_changes(trained, tmp_path, everything):
    """One bit, at both ends of each part of the file and at random; or a byte more or less there."""
    trainer, params = trained
    path = tmp_path / "a"
    trainer.save_states(path)
    whole, rng = path.read_bytes(), random.Random(4)
    take_step(trainer, params, make_gradients(params))
    length = 8 + int.from_bytes(whole[:8], "little")
    described = json.loads(whole[8:length])
    text = described["__metadata__"]["tristep"]
    inside = [whole.index(each) for each in (b"checksums", b"tristep checksum", b'"F32"', b"data_offsets", b'"shape"')]
    starts = {length + end for about in described.values() for end in about.get("data_offsets", ())}
    places = {0, 7, 8, length - 1, len(whole) - 1, *inside, *starts, *(start - 1 for start in starts)} - {len(whole)}
    places |= {whole.index(f": {checksum}".encode()) + 2 for checksum in json.loads(text)["checksums"].values()}
    places |= set(rng.sample(range(len(whole)), 60))
    for place in sorted(places):
        flipped = bytearray(whole)
        flipped[place] ^= 1 << rng.randrange(8)
        for broken in (
            bytes(flipped),
            whole[:place],
            whole[:place] + whole[place + 1 :],
            whole[:place] + b"\0" + whole[place:],
        ):
            path.write_bytes(broken)
            check_refused(trainer, params, everything, lambda: trainer.load_states(path), ValueError, "fname='.*a'")
    path.write_bytes(whole)
    trainer.load_states(path)


def test_an_unaligned_file_is_read(trained, tmp_path):
    """Of another program, or made to do harm: torch's operations expect tensors at multiples of their size."""
    trainer, params = trained
    trainer.save_states(tmp_path / "a")
    saved = _states(trainer)
    whole = (tmp_path / "a").read_bytes()
    length = int.from_bytes(whole[:8], "little")
    (tmp_path / "a").write_bytes((length + 1).to_bytes(8, "little") + whole[8 : 8 + length] + b" " + whole[8 + length :])
    take_step(trainer, params, make_gradients(params))
    trainer.load_states(tmp_path / "a")
    assert _states(trainer) == saved


@pytest.mark.parametrize("error", ["map", "system"])
def test_a_file_system_without_mappings_is_read(error, trained, tmp_path, monkeypatch):
    trainer, params = trained
    trainer.save_states(tmp_path / "a")
    saved = _states(trainer)
    take_step(trainer, params, make_gradients(params))

    def refuse(*_):
        raise OSError("no such device")

    monkeypatch.setattr(*((mapping.mmap, "mmap", refuse) if error == "map" else (mapping.os, "name", "nt")))
    _, tensors = files.read(tmp_path / "a", "states", mapped=True)
    assert not any(map(mapping.is_mapped, tensors.values()))
    trainer.load_states(tmp_path / "a")
    assert _states(trainer) == saved


def test_a_checkpoint_keeps_no_file_either(small_parts, tmp_path):
    """Weights, buffers, states and what else is saved, of a model and of another object."""

    class Averages:
        def __init__(self):
            self.mean = torch.zeros(20)

        def state_dict(self):
            return {"mean": self.mean}

        def load_state_dict(self, state):
            self.mean = state["mean"]  # kept as it is

    found = []
    for k in range(2):
        net, averages = _net(), Averages()
        trainer = Trainer(net, "adam", engine="eager")
        with CheckpointManager(tmp_path / "run", trainer, net, stateful=[averages], sigterm=False) as manager:
            if k:
                manager.resume()
            else:
                _step(trainer, net)
                averages.mean += 5
                net[1].running_mean += 2
                manager.save()
        if k:
            for path in (tmp_path / "run").glob("*/*"):
                with open(path, "r+b") as file:
                    file.write(bytes(path.stat().st_size))
        weights = {name: _bytes(tensor) for name, tensor in net.state_dict().items()}
        found.append((_states(trainer), weights, _bytes(averages.mean)))
    assert found[0] == found[1]


def test_the_checksum_of_the_header_is_right_whatever_its_length(tmp_path):
    """Room is left for the longest numbers; shorter ones leave spaces, which JSON allows."""
    lengths = set()
    for value in range(60):
        files.write("path", tmp_path / "a", "any", {"value": value}, {"w": torch.full((2,), value)})
        whole = (tmp_path / "a").read_bytes()
        header = whole[8 : 8 + int.from_bytes(whole[:8], "little")].decode()
        lengths.add(len(header.rstrip(" ")))
        metadata = json.loads(header)["__metadata__"]
        assert metadata["tristep checksum"] == str(zlib.crc32(metadata["tristep"].encode()))
        assert files.read(tmp_path / "a", "any")[0] == {"format": files.FORMAT, "value": value}
    assert len(lengths) > 1
