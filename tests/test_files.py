"""Files of states, runs and sweeps: written whole or not at all, and refused, if they are damaged or made to do harm."""

import json
import os
import pickle
import random
import shutil
import stat
import sys
import tracemalloc
import zlib

import numpy as np
import pytest
import torch
from races import planted
from saved_states import check_refused, make_gradients, make_trained, take_step

from tristep import CheckpointManager, Trainer
from tristep.trainer import RaceResult, Sweep, serialization
from tristep.trainer.serialization import files

viz = pytest.importorskip("tristep.viz", reason="runs are pictures, too, which need matplotlib")
safetensors = pytest.importorskip("safetensors", reason="files need it")
pytest.importorskip("safetensors.torch", reason="files need it")

posix = pytest.mark.skipif(os.name != "posix", reason="needs POSIX files")


def _sweep(value=1.0):
    axes = {"wd": (0.0, 0.5), "seeds": (0, 1)}
    rng = np.random.default_rng(1)
    weights = {"0.weight": torch.full((2, 2, 3), value), "1.bias": torch.arange(4.0).view(2, 2)}
    return Sweep(axes, rng.random((2, 2, 5), np.float32), 5, {"loss": rng.random((2, 2))}, weights)


def _runs(value=1.0):
    run = viz.Run("adam", ["w"], [0.0, 1.0], {"optimizer": "Adam"})
    for step in range(1, 9):
        run.add_scalars(step, {"loss": value / step})
    run.add_tensors([8], {"gradient": np.ones((1, 1, 3))})
    run.add_tensors(np.arange(1, 2055), {"norm": np.full((2054, 1), value)})  # more than are kept as they are
    return viz.RunSet([run])


def _trainer(value=1.0):
    param = torch.nn.Parameter(torch.ones(3))
    trainer = Trainer({"w": param}, "sgd", {"momentum": 0.9})
    param.grad = torch.full((3,), value)
    trainer.step(1)
    return trainer


def _plain(loaded):
    """What was loaded, to be compared."""
    if isinstance(loaded, viz.RunSet):
        runs = [(run.name, run.parameters, run.notes, run.edges, run._kinds()) for run in loaded]
        return repr([(*own, [(k, n, s.curve()) for k in kinds for n, s in kinds[k].items()]) for *own, kinds in runs])
    return repr(vars(loaded) if isinstance(loaded, (Sweep, RaceResult)) else loaded)


SAVED = {
    "sweep": (_sweep, Sweep.save, Sweep.load),
    "runs": (_runs, viz.RunSet.save, viz.RunSet.load),
    "states": (_trainer, Trainer.save_states, serialization.read),
}
RACE = lambda: planted([[40, 60, 50], [20, None, 30]]), RaceResult.save, RaceResult.load
BOTH = pytest.mark.parametrize(("make", "save", "load"), [SAVED["runs"], SAVED["states"]], ids=["runs", "states"])


trained = pytest.fixture(make_trained)


# ---- written whole or not at all -------------------------------------------------------------------------------------


@BOTH
def test_a_save_that_is_cut_off_leaves_the_old_file(make, save, load, tmp_path):
    """The system refuses longer files, as a full disk does."""
    resource = pytest.importorskip("resource")
    path = tmp_path / "a"
    save(make(), path)
    old, limits = path.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(old) // 2, limits[1]))
    try:  # a log that pytest writes to is cut off, too, so nothing else happens here
        with pytest.raises(OSError, match="too large"):
            save(make(2.0), path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == old
    assert os.listdir(tmp_path) == ["a"]


def _fail(*_, **__):
    raise OSError("the disk is full")


@pytest.mark.parametrize("where", ["os.fsync", "os.replace", "torch.Tensor.cpu"])
def test_a_failure_while_writing_leaves_the_old_file(where, trained, tmp_path, monkeypatch, everything):
    trainer, params = trained
    trainer.save_states(tmp_path / "a")
    old = (tmp_path / "a").read_bytes()
    take_step(trainer, params, make_gradients(params))
    before = everything(trainer, params.values())
    with monkeypatch.context() as patch:
        patch.setattr(where, _fail)
        for name in ("a", "b"):
            with pytest.raises(OSError, match="the disk is full"):
                trainer.save_states(tmp_path / name)
    assert (tmp_path / "a").read_bytes() == old
    assert os.listdir(tmp_path) == ["a"]
    assert everything(trainer, params.values()) == before
    trainer.save_states(tmp_path / "a")
    assert (tmp_path / "a").read_bytes() != old


def test_contents_and_name_are_on_the_disk_before_a_save_ends(tmp_path, monkeypatch):
    done, fsync, replace = [], os.fsync, os.replace

    def noted(fd):
        done.append("folder" if stat.S_ISDIR(os.fstat(fd).st_mode) else "file")
        fsync(fd)

    monkeypatch.setattr("os.fsync", noted)
    monkeypatch.setattr("os.replace", lambda *args: (done.append("rename"), replace(*args)))
    _trainer().save_states(tmp_path / "a")
    assert done == ["file", "rename", "folder"]


@posix
def test_a_file_keeps_its_mode_and_a_link_stays_one(tmp_path):
    (tmp_path / "folder").mkdir()
    path, link, other = tmp_path / "folder" / "a", tmp_path / "link", tmp_path / "other"
    link.symlink_to("folder/a")
    other.write_bytes(b"")
    _trainer().save_states(link)
    assert path.stat().st_mode == other.stat().st_mode  # the mode of any new file
    path.chmod(0o640)
    _trainer(2.0).save_states(str(link))
    assert link.is_symlink()
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert repr(serialization.read(link)["state"]) == repr(_trainer(2.0).state_dict()["state"])
    assert os.listdir(tmp_path / "folder") == ["a"]


@posix
def test_what_a_killed_process_has_left_is_removed_and_nothing_else(tmp_path):
    fcntl = pytest.importorskip("fcntl")
    stale, living = (tmp_path / f".a.{digit * 32}.tmp" for digit in "ab")
    others = [tmp_path / name for name in (f".b.{'a' * 32}.tmp", f".a.{'a' * 31}.tmp", ".a.tmp")]
    for path in (stale, living, *others):
        path.write_bytes(b"half a file")
    with living.open("rb+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        _trainer().save_states(tmp_path / "a")
        assert not stale.exists()
        assert all(path.exists() for path in (living, *others))
    _trainer().save_states(tmp_path / "a")
    assert not living.exists()


@posix
def test_two_saves_at_once_leave_each_other_alone(tmp_path, monkeypatch):
    """Another one begins and ends while a file is being written."""
    fsync, trainers = os.fsync, [_trainer(2.0)]

    def save_another(fd):
        fsync(fd)
        if trainers:
            trainers.pop().save_states(tmp_path / "a")

    monkeypatch.setattr("os.fsync", save_another)
    _trainer().save_states(tmp_path / "a")
    assert repr(serialization.read(tmp_path / "a")["state"]) == repr(_trainer().state_dict()["state"])
    assert os.listdir(tmp_path) == ["a"]


@posix
@BOTH
def test_what_is_no_file_is_left_alone(make, save, load, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for name, error, message in (
        ("folder", IsADirectoryError, "folder': this is a folder, it must be the name of a file"),
        ("pipe", ValueError, "pipe': this is a device or a pipe, it must be the name of a file"),
        ("missing/a", FileNotFoundError, "='missing/a': there is no folder '.*missing'"),
    ):
        with pytest.raises(error, match=message):
            save(make(), name)
    for name in ("folder", "pipe"):
        with pytest.raises(ValueError, match="it is no file"):
            load(tmp_path / name)
    with pytest.raises(FileNotFoundError, match="there is no such file"):
        load(tmp_path / "missing")
    assert sorted(os.listdir(tmp_path)) == ["folder", "pipe"]


# ---- what is read ----------------------------------------------------------------------------------------------------


def test_other_programs_can_read_the_files(trained, tmp_path):
    trainer, _ = trained
    trainer.save_states(tmp_path / "a.safetensors")
    tensors = safetensors.torch.load_file(tmp_path / "a.safetensors")
    assert set(tensors) == {f'["{name}", "{slot}"]' for name in ("body", "head") for slot in ("mean", "var")}
    for key, tensor in tensors.items():
        name, slot = json.loads(key)
        assert torch.equal(tensor, trainer.state_dict()["state"][name][slot])
    with safetensors.safe_open(tmp_path / "a.safetensors", "numpy") as file:
        header = json.loads(file.metadata()["tristep"])
        np.testing.assert_array_equal(file.get_tensor('["head", "mean"]'), tensors['["head", "mean"]'].numpy())
    assert header["optimizer"] == "adam"
    assert header["settings"]["wd"] == 0.1
    assert header["lr_scheduler"]["class"] == "FactorScheduler"
    assert header["counts"] == {"body": 2, "head": 2}
    assert header["parameters"] == {"body": [2, 3], "head": [2]}
    sweep = _sweep()
    sweep.save(tmp_path / "b")
    assert torch.equal(safetensors.torch.load_file(tmp_path / "b")["weight 0.weight"], sweep.weights["0.weight"])


def test_damage_anywhere_is_found_or_changes_nothing(tmp_path):
    """Cut, or with bytes changed, removed or exchanged, at places all over the file."""
    (make, save, load), path, rng = SAVED["runs"], tmp_path / "a", random.Random(1)
    save(make(), path)
    whole, good = path.read_bytes(), _plain(load(path))
    noticed, tried = 0, 400
    for k in range(tried):
        broken = bytearray(whole)
        i, j = k * len(whole) // tried, rng.randrange(len(whole))
        if k % 5 == 0:
            del broken[i : i + 1 + j]
        elif k % 5 == 1:
            del broken[i:]
        elif k % 5 == 2:
            broken[i : i + 8], broken[j : j + 8] = broken[j : j + 8], broken[i : i + 8]
        else:
            broken[i] ^= rng.choice((0x01, 0x20, 0xFF))
        path.write_bytes(broken)
        try:
            assert _plain(load(path)) == good, k
        except ValueError as error:
            assert str(path) in str(error)  # noqa: PT017  # most must raise, a few need not: spaces fill up a header
            noticed += 1
    assert noticed > tried * 0.9
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(ValueError, match="damaged; checksums differ for "):
        load(path)


def test_a_tensor_of_another_type_or_shape_is_noticed_even_with_the_same_bytes(trained, tmp_path, everything):
    trainer, params = trained
    for old, new in ((b'"F32"', b'"I32"'), (b'"shape":[2,3]', b'"shape":[3,2]')):
        trainer.save_states(tmp_path / "a")
        whole = (tmp_path / "a").read_bytes()
        assert old in whole
        (tmp_path / "a").write_bytes(whole.replace(old, new, 1))
        load = lambda: trainer.load_states(tmp_path / "a")  # noqa: E731
        check_refused(trainer, params, everything, load, ValueError, r"damaged; checksums differ for \[\"body\", \"mean\"\]")


def test_a_file_that_is_replaced_at_any_line_of_loading_is_whole(tmp_path):
    """The old or the new one is loaded, never the header of the one with the tensors of the other."""
    param = torch.nn.Parameter(torch.zeros(3))
    trainer, saved = Trainer({"w": param}, "sgd", {"momentum": 0.9}, engine="eager"), []
    for k in range(2):
        param.grad = torch.ones(3)
        trainer.step(1)
        trainer.save_states(tmp_path / f"{k}")
        saved.append((trainer.optimizer.num_update, trainer.state_dict()["state"]["w"]["mom"].tolist()))
    found = []

    def trace(frame, event, _):
        nonlocal count
        if frame.f_code.co_filename != files.__file__:
            return None
        if event == "line":
            count += 1
            if count == line:
                shutil.copy(tmp_path / "1", tmp_path / "new")
                os.replace(tmp_path / "new", tmp_path / "states")
        return trace

    line = 0
    while True:
        count, line = 0, line + 1
        shutil.copy(tmp_path / "0", tmp_path / "states")
        sys.settrace(trace)
        try:
            trainer.load_states(tmp_path / "states")
        finally:
            sys.settrace(None)
        if count < line:
            break
        found.append((trainer.optimizer.num_update, trainer.state_dict()["state"]["w"]["mom"].tolist()))
        assert found[-1] in saved, f"replaced at line {line}"
    assert found[0] == saved[1]
    assert found[-1] == saved[0]


# ---- with right checksums, and other contents ------------------------------------------------------------------------


def _changed(path, change, **header_changes):
    """Writes a file again, by safetensors, after a change of the header and the tensors; its checksums are right."""
    tensors = safetensors.torch.load_file(path)
    with safetensors.safe_open(path, "pt") as file:
        header = json.loads(file.metadata()["tristep"])
    before = dict(tensors)
    if change is not None:
        change(header.get("about", header), tensors)
    for name in header["checksums"].keys() | tensors.keys():
        if name not in tensors:
            del header["checksums"][name]
        elif tensors[name] is not before.get(name):
            tensor = tensors[name]
            start = zlib.crc32(f"{tensor.dtype}{list(tensor.shape)}".encode())
            header["checksums"][name] = zlib.crc32(tensor.numpy().tobytes(), start)
    safetensors.torch.save_file(tensors, path, _metadata(json.dumps(header | header_changes)))


def _metadata(text):
    return {"tristep": text, "tristep checksum": str(zlib.crc32(text.encode()))}


def _sets(**changes):
    return lambda about, tensors: about.update(changes)


def _puts(name, values, dtype=torch.float32):
    return lambda about, tensors: tensors.update({name: torch.tensor(values, dtype=dtype)})


SERIES, LONG = "0/scalars/0", "0/tensors/0"
WRONG_SWEEPS = [
    _sets(axes=[]),
    _sets(axes=[["wd", [0.0, 0.5]], ["wd", [0, 1]]]),
    _sets(steps_per_epoch=0),
    _puts("losses", [[0.0] * 2] * 2),
    _puts("losses", [[[0] * 5] * 2] * 2, torch.int64),
    _puts("score loss", [0.0] * 3),
    _puts("weight 1.bias", [[0.0] * 2] * 3),
    _puts("more", [[0.0] * 2] * 2),
]
WRONG_RUNS = [
    lambda about, tensors: about["runs"].append(about["runs"][0]),
    lambda about, tensors: about["runs"][0]["series"].update(__dict__=[]),
    lambda about, tensors: about["runs"][0].update(name=5),
    lambda about, tensors: about["runs"][0].update(parameters="w"),
    lambda about, tensors: about["runs"][0].update(storage=["float32"] * 2),
    _puts(f"{SERIES}/counts", [10**9, 1], torch.int64),
    _puts(f"{SERIES}/recent_steps", [8, 7, 6, 5, 4, 3, 2, 1], torch.int64),
    _puts(f"{LONG}/counts", [2054, 1], torch.int64),
    _puts(f"{LONG}/low", [[0.0]] * 1027, torch.float64),
    _puts(f"{LONG}/first", [0] * 1027, torch.int64),
    _puts("more", [0.0]),
]


@pytest.mark.parametrize(
    ("kind", "change"), [("sweep", each) for each in WRONG_SWEEPS] + [("runs", each) for each in WRONG_RUNS]
)
def test_sweeps_and_runs_that_contradict_themselves_are_refused(kind, change, tmp_path):
    make, save, load = SAVED[kind]
    save(make(), tmp_path / "a")
    _changed(tmp_path / "a", lambda about, tensors: None)
    assert _plain(load(tmp_path / "a")) == _plain(make())
    _changed(tmp_path / "a", change)
    what = {"sweep": "a file that was written by Sweep.save", "runs": "a file of runs"}[kind]
    with pytest.raises(ValueError, match=f"not {what}, or a damaged one") as caught:
        load(tmp_path / "a")
    assert "damaged; " not in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "message"),
    [("float7", "'float7', which this torch does not have"), ("complex64", "it has torch.float64 for a tensor of")],
)
def test_tensors_of_types_that_cannot_be_are_refused(kind, message, tmp_path):
    files.write("path", tmp_path / "a", "any", {}, {"w": torch.ones(2, dtype=torch.complex128)})
    _changed(tmp_path / "a", None, dtypes={"w": kind})
    with pytest.raises(ValueError, match=message):
        files.read(tmp_path / "a", "any")


HEADER = {
    "format": 1, "kind": "states", "optimizer": "sgd", "settings": {}, "lr_scheduler": None, "num_update": 1,
    "counts": {"w": 1}, "parameters": {"w": [3]}, "layout": {}, "states of": [], "checksums": {},
}  # fmt: skip


@pytest.mark.parametrize(
    "header",
    [
        "[" * 1_000_000,
        "[]",
        {"format": 1, "kind": "states"},
        HEADER | {"checksums": {"w": 1}},
        HEADER | {"names": 5},
        HEADER | {"settings": {"momentum": [1]}},
        HEADER | {"layout": {"w": json.loads("[" * 52 + "]" * 52)}},
        HEADER | {"layout": {"w": {"a": []}}},
    ],
)
def test_states_that_say_nonsense_are_a_value_error(header, tmp_path):
    trainer = _trainer()
    before = repr(trainer.state_dict())
    text = json.dumps(header) if isinstance(header, dict) else header
    safetensors.torch.save_file({}, tmp_path / "a", _metadata(text))
    with pytest.raises(ValueError, match="a"):
        trainer.load_states(tmp_path / "a")
    assert repr(trainer.state_dict()) == before


def _described(*tensors):
    keys = "dtype", "shape", "data_offsets"
    return json.dumps({f"t{k}": dict(zip(keys, each, strict=True)) for k, each in enumerate(tensors)})


LIES = {  # about 8 bytes of data
    "length": (2**63, "{}"),
    "no text": (0, ""),
    "nested too deeply": (None, "[" * 100_000),
    "nested deeply": (None, '{"a": ' * 300 + "1" + "}" * 300),
    "more objects than text": (None, json.dumps([{}] * 400_000)),
    "no object": (None, "[]"),
    "type": (None, _described(("F12", [1], [0, 8]))),
    "size": (None, _described(("F32", [1], [0, 8]))),
    "no integer": (None, _described(("F32", [2.0], [0, 8]))),
    "negative": (None, _described(("F32", [-1, -2], [0, 8]))),
    "overlap": (None, _described(("F32", [2], [0, 8]), ("F32", [2], [0, 8]))),
    "too many bytes": (None, _described(("F32", [1], [0, 4]))),
    "more than memory": (None, _described(("F32", [1 << 40], [0, 1 << 42]))),
}


@pytest.mark.parametrize("lie", LIES)
def test_headers_that_lie_are_refused_before_they_fill_memory(lie, tmp_path):
    length, text = LIES[lie]
    (tmp_path / "a").write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text.encode() + bytes(8))
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="not a state file of tristep, or a damaged one"):
            serialization.read(tmp_path / "a")
        assert tracemalloc.get_traced_memory()[1] < 1 << 23
    finally:
        tracemalloc.stop()


NOT_ONE = "or a damaged one"
FOREIGN = {  # what is at the path, and what loading states, runs and a sweep says
    "text": (lambda path: path.write_text("these are no states\n" * 100), [NOT_ONE] * 3),
    "pickle": (lambda path: torch.save({"momentum": torch.ones(3)}, path), [NOT_ONE] * 3),
    "weights": (
        lambda path: safetensors.torch.save_file({"w": torch.ones(3)}, path),
        [
            f"not {what}, or a damaged one .*it is a safetensors file of another program"
            for what in ("a state file of tristep", "a file of runs", "a file that was written by Sweep.save")
        ],
    ),
    "states": (lambda path: _trainer().save_states(path), [None, "of states, not of runs", "of states, not of sweep"]),
    "runs": (lambda path: _runs().save(path), ["of runs, not of states", None, "of runs, not of sweep"]),
    "sweep": (lambda path: _sweep().save(path), ["of sweep, not of states", "of sweep, not of runs", None]),
    "optimizer": (
        lambda path: (_trainer().save_states(path), _changed(path, _sets(optimizer="adam"))),
        [r"is of optimizer 'adam', this trainer has 'sgd': .*Trainer\(params, 'adam'", NOT_ONE, NOT_ONE],
    ),
}


@pytest.mark.parametrize("what", FOREIGN)
def test_files_of_another_kind_are_refused(what, tmp_path, everything):
    write, messages = FOREIGN[what]
    path, trainer = tmp_path / "a", _trainer()
    write(path)
    before = everything(trainer, [])
    for load, message in zip((trainer.load_states, viz.RunSet.load, Sweep.load), messages, strict=True):
        if message is None:
            load(path)
            continue
        with pytest.raises(ValueError, match=message):
            load(path)
        assert everything(trainer, []) == before


@pytest.mark.parametrize("kind", [*SAVED, "race", "checkpoint"])
def test_a_file_of_another_format_is_refused_with_both_numbers(kind, tmp_path):
    """Also where nothing else of it is as this version knows it."""
    number = files.FORMAT + 1
    other = f"it has format {number}: this version of tristep reads format {files.FORMAT}; load it with the version"
    if kind == "checkpoint":
        trainer = _trainer()
        with CheckpointManager(tmp_path / "a", trainer, sigterm=False) as manager:
            manager.save()
        for path in (tmp_path / "a" / "step-0000000001").iterdir():
            whole = path.read_bytes()
            _changed(path, None, format=number)
            with pytest.raises(ValueError, match=rf"none of its 1 checkpoints can be read. .*{path.name}': {other}"):
                manager.resume()
            path.write_bytes(whole)
        assert manager.resume().step == 1
        return
    make, save, load = {**SAVED, "race": RACE}[kind]
    save(make(), tmp_path / "a")
    for changes in ({}, {"checksums": 5, "kind": "any"}):
        _changed(tmp_path / "a", None, format=number, **changes)
        with pytest.raises(ValueError, match=f"={str(tmp_path / 'a')!r}: {other}"):
            load(tmp_path / "a")


def test_a_state_dict_of_another_format_is_refused_with_both_numbers(trained, everything):
    trainer, params = trained
    for number in (files.FORMAT + 1, None):
        load = lambda number=number: trainer.load_state_dict({**trainer.state_dict(), "format": number})  # noqa: E731
        message = f"saved state has format {number}: this version of tristep reads format {files.FORMAT}; load it"
        check_refused(trainer, params, everything, load, ValueError, message)


@pytest.mark.parametrize("load", [Sweep.load, viz.RunSet.load, serialization.read])
def test_nothing_is_unpickled(load, tmp_path):
    class Harm:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "harm"),)

    for write in (lambda path: path.write_bytes(pickle.dumps(Harm())), lambda path: torch.save({"w": Harm()}, path)):
        write(tmp_path / "a")
        with pytest.raises(ValueError, match="a', or a damaged one|a': not "):
            load(tmp_path / "a")
    assert not (tmp_path / "harm").exists()
