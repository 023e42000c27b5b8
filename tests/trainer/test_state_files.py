"""State files: whole or not at all, readable by others, and refused where they are damaged."""

import json
import os
import shutil
import sys
import zlib

import numpy as np
import pytest
import torch
from saved_states import Averaged, Cautious, check_refused, make_gradients, make_params, take_step, twins_of

from tristep import Trainer, lr_scheduler
from tristep.trainer import checkpoint
from tristep.trainer.checkpoint import files
from tristep.trainer.optimizer import register

safetensors = pytest.importorskip("safetensors", reason="files need it")
pytest.importorskip("safetensors.torch", reason="files need it")


@pytest.fixture(autouse=True)
def _registered(clean_registry):
    register(Averaged)
    register(Cautious)


@pytest.fixture
def trained():
    """A trainer after two steps, and its parameters."""
    params = make_params(shapes={"body": (2, 3), "head": (2,)})
    trainer = Trainer(params, "adam", {"wd": 0.1, "lr_scheduler": lr_scheduler.FactorScheduler(5, 0.5, base_lr=0.1)})
    for _ in range(2):
        take_step(trainer, params, make_gradients(params))
    return trainer, params


def test_other_programs_can_read_the_file(trained, tmp_path):
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


def test_file_names_may_be_strings_or_paths(trained, tmp_path, monkeypatch):
    trainer, params = trained
    monkeypatch.chdir(tmp_path)
    for name in (str(tmp_path / "a"), tmp_path / "b", "c"):
        trainer.save_states(name)
        other = Trainer(twins_of(params), "adam")
        other.load_states(name)
        assert other.optimizer.num_update == 2
    assert sorted(os.listdir()) == ["a", "b", "c"]


@pytest.mark.skipif(os.name != "posix", reason="needs POSIX file modes")
def test_the_file_has_the_mode_that_any_new_file_has(trained, tmp_path):
    (tmp_path / "other").write_bytes(b"")
    trained[0].save_states(tmp_path / "a")
    assert (tmp_path / "a").stat().st_mode == (tmp_path / "other").stat().st_mode


def _fail(*_, **__):
    raise OSError("the disk is full")


@pytest.mark.parametrize("where", ["os.fsync", "os.replace", "safetensors.torch.save"])
def test_a_failure_while_writing_leaves_the_old_file(where, trained, tmp_path, monkeypatch, everything):
    trainer, params = trained
    trainer.save_states(tmp_path / "a")
    old = (tmp_path / "a").read_bytes()
    take_step(trainer, params, make_gradients(params))
    before = everything(trainer, params.values())
    with monkeypatch.context() as patch:
        patch.setattr(where, _fail)
        with pytest.raises(OSError, match="the disk is full"):
            trainer.save_states(tmp_path / "a")
        with pytest.raises(OSError, match="the disk is full"):
            trainer.save_states(tmp_path / "b")
    assert (tmp_path / "a").read_bytes() == old
    assert os.listdir(tmp_path) == ["a"]
    assert everything(trainer, params.values()) == before
    trainer.save_states(tmp_path / "a")
    assert (tmp_path / "a").read_bytes() != old


def test_a_file_cut_off_by_the_system_leaves_the_old_one(trained, tmp_path):
    resource = pytest.importorskip("resource")
    trainer, params = trained
    trainer.save_states(tmp_path / "a")
    old = (tmp_path / "a").read_bytes()
    take_step(trainer, params, make_gradients(params))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(old) // 2, limits[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            trainer.save_states(tmp_path / "a")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (tmp_path / "a").read_bytes() == old
    assert os.listdir(tmp_path) == ["a"]


def test_saving_into_a_folder_that_is_not_there(trained, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"fname='.*missing/a': there is no folder '.*missing'"):
        trained[0].save_states(tmp_path / "missing" / "a")


def _no_file(path):
    path.unlink()


def _empty(path):
    path.write_bytes(b"")


def _text(path):
    path.write_text("these are no states\n" * 100)


def _folder(path):
    path.unlink()
    path.mkdir()


def _pickled(path):
    torch.save({"momentum": torch.ones(3)}, path)


def _weights(path):
    safetensors.torch.save_file({"body": torch.ones(2, 3)}, path)


def _with_header(**changes):
    """A file that is whole, but says something else."""

    def rewrite(path):
        tensors = safetensors.torch.load_file(path)
        with safetensors.safe_open(path, "pt") as file:
            header = json.loads(file.metadata()["tristep"])
        text = json.dumps(header | changes)
        metadata = {"tristep": text, "tristep checksum": str(zlib.crc32(text.encode()))}
        safetensors.torch.save_file(tensors, path, metadata)

    return rewrite


@pytest.mark.parametrize(
    ("spoil", "error", "message"),
    [
        (_no_file, FileNotFoundError, "fname='.*a.states': there is no such file"),
        (_empty, ValueError, "fname='.*a.states': not a state file of tristep, or a damaged one"),
        (_text, ValueError, "fname='.*a.states': not a state file of tristep, or a damaged one"),
        (_folder, ValueError, "fname='.*a.states': not a state file of tristep, or a damaged one"),
        (_pickled, ValueError, "fname='.*a.states': not a state file of tristep, or a damaged one"),
        (_weights, ValueError, "fname='.*a.states': a safetensors file, but not one that Trainer.save_states wrote"),
        (_with_header(format=2), ValueError, "saved state has format 2: this version of tristep reads format 1; .*newer"),
        (
            _with_header(optimizer="sgd"),
            ValueError,
            r"is of optimizer 'sgd', this trainer has 'adam': .*Trainer\(params, 'sgd'",
        ),
    ],
    ids=["missing", "empty", "text", "folder", "pickle", "weights", "format", "optimizer"],
)
def test_what_is_no_state_file_is_refused(spoil, error, message, trained, tmp_path, everything):
    trainer, params = trained
    path = tmp_path / "a.states"
    trainer.save_states(path)
    spoil(path)
    check_refused(trainer, params, everything, lambda: trainer.load_states(path), error, message)


def test_a_file_cut_anywhere_is_refused(trained, tmp_path, everything):
    trainer, params = trained
    trainer.save_states(tmp_path / "a")
    whole = (tmp_path / "a").read_bytes()
    for length in [*range(0, len(whole), 29), len(whole) - 1]:
        (tmp_path / "a").write_bytes(whole[:length])
        with pytest.raises(ValueError, match="fname=.*: not a state file of tristep, or a damaged one"):
            checkpoint.read(tmp_path / "a")
    check_refused(trainer, params, everything, lambda: trainer.load_states(tmp_path / "a"), ValueError, "damaged")


def test_a_tensor_of_another_type_or_shape_is_noticed_even_with_the_same_bytes(trained, tmp_path, everything):
    trainer, params = trained
    for old, new in ((b'"F32"', b'"I32"'), (b'"shape":[2,3]', b'"shape":[3,2]')):
        trainer.save_states(tmp_path / "a")
        whole = (tmp_path / "a").read_bytes()
        assert old in whole
        (tmp_path / "a").write_bytes(whole.replace(old, new, 1))
        load = lambda: trainer.load_states(tmp_path / "a")  # noqa: E731
        check_refused(trainer, params, everything, load, ValueError, "damaged; checksums differ for")


@pytest.mark.parametrize("flip", [0x01, 0x20, 0xFF])
def test_a_flipped_byte_is_noticed_wherever_it_is(flip, trained, tmp_path, everything):
    """Or it changes nothing, as the spaces do that fill up a safetensors header."""
    trainer, params = trained
    trainer.save_states(tmp_path / "a")
    whole = (tmp_path / "a").read_bytes()
    good = repr(checkpoint.read(tmp_path / "a"))
    noticed = 0
    for position in range(len(whole)):
        broken = bytearray(whole)
        broken[position] ^= flip
        (tmp_path / "a").write_bytes(broken)
        try:
            assert repr(checkpoint.read(tmp_path / "a")) == good, position
        except ValueError as error:
            assert "fname=" in str(error)  # noqa: PT017  # most positions must raise, a few need not
            noticed += 1
    assert noticed >= len(whole) - 8
    broken = bytearray(whole)
    broken[-5] ^= flip
    (tmp_path / "a").write_bytes(broken)
    load = lambda: trainer.load_states(tmp_path / "a")  # noqa: E731
    check_refused(
        trainer, params, everything, load, ValueError, r"damaged; checksums differ for \[\"(head|body)\", \"(mean|var)\"\]"
    )


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
