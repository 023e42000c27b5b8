"""Files of states, runs and sweeps: written whole or not at all, and refused, if they are damaged or made to do harm."""

import io
import json
import os
import random
import stat
import tracemalloc
import zipfile
import zlib
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from tristep import Trainer
from tristep.trainer import Sweep, checkpoint
from tristep.trainer.checkpoint import files

viz = pytest.importorskip("tristep.viz", reason="runs are pictures, too, which need matplotlib")
safetensors = pytest.importorskip("safetensors", reason="files need it")
pytest.importorskip("safetensors.torch", reason="files need it")

posix = pytest.mark.skipif(os.name != "posix", reason="needs POSIX files")


def _sweep(value=1.0):
    axes = {"wd": (0.0, 0.5), "seed": (0, 1)}
    rng = np.random.default_rng(1)
    weights = {"0.weight": torch.full((2, 2, 3), value), "1.bias": torch.arange(4.0).view(2, 2)}
    return Sweep(axes, rng.random((2, 2, 5), np.float32), 5, {"loss": rng.random((2, 2))}, weights)


def _runs(value=1.0):
    run = viz.Run("adam", ["w"], [0.0, 1.0], {"optimizer": "Adam"})
    for step in range(1, 9):
        run.add_scalars(step, {"loss": value / step})
    run.add_tensors([8], {"gradient": np.ones((1, 1, 3))})
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
        return repr([(*own, [(k, n, s.to_arrays()) for k in kinds for n, s in kinds[k].items()]) for *own, kinds in runs])
    return repr(vars(loaded) if isinstance(loaded, Sweep) else loaded)


SAVED = {
    "sweep": (_sweep, Sweep.save, Sweep.load),
    "runs": (_runs, viz.RunSet.save, viz.RunSet.load),
    "states": (_trainer, Trainer.save_states, checkpoint.read),
}
EACH = pytest.mark.parametrize(("make", "save", "load"), SAVED.values(), ids=SAVED)


@contextmanager
def cut_off(size):
    """Lets the system refuse longer files, as a full disk does; also a log that pytest writes to, so not beyond the save."""
    resource = pytest.importorskip("resource")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@EACH
def test_a_save_that_is_cut_off_leaves_the_old_file(make, save, load, tmp_path):
    path = tmp_path / "a"
    save(make(), path)
    old = path.read_bytes()
    with cut_off(len(old) // 2), pytest.raises(OSError, match="too large"):
        save(make(2.0), path)
    assert path.read_bytes() == old
    assert os.listdir(tmp_path) == ["a"]


@EACH
def test_contents_and_name_are_on_the_disk_before_a_save_ends(make, save, load, tmp_path, monkeypatch):
    done, fsync, replace = [], os.fsync, os.replace

    def noted(fd):
        done.append("folder" if stat.S_ISDIR(os.fstat(fd).st_mode) else "file")
        fsync(fd)

    monkeypatch.setattr("os.fsync", noted)
    monkeypatch.setattr("os.replace", lambda *args: (done.append("rename"), replace(*args)))
    save(make(), tmp_path / "a")
    assert done == ["file", "rename", "folder"]


@posix
@EACH
def test_a_file_keeps_its_mode_and_a_link_stays_one(make, save, load, tmp_path):
    (tmp_path / "folder").mkdir()
    path, link = tmp_path / "folder" / "a", tmp_path / "link"
    link.symlink_to("folder/a")
    save(make(), link)
    path.chmod(0o640)
    save(make(2.0), link)
    assert link.is_symlink()
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert _plain(load(link)) == _plain(load(path))
    assert os.listdir(tmp_path / "folder") == ["a"]


@posix
@EACH
def test_what_a_killed_process_has_left_is_removed_and_nothing_else(make, save, load, tmp_path):
    fcntl = pytest.importorskip("fcntl")
    stale, living = (tmp_path / f".a.{digit * 32}.tmp" for digit in "ab")
    others = [tmp_path / name for name in (f".b.{'a' * 32}.tmp", f".a.{'a' * 31}.tmp", ".a.tmp")]
    for path in (stale, living, *others):
        path.write_bytes(b"half a file")
    with living.open("rb+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        save(make(), tmp_path / "a")
        assert not stale.exists()
        assert all(path.exists() for path in (living, *others))
    save(make(), tmp_path / "a")
    assert not living.exists()


@posix
@EACH
def test_what_is_no_file_is_left_alone(make, save, load, tmp_path):
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(IsADirectoryError, match="folder': this is a folder, it must be the name of a file"):
        save(make(), tmp_path / "folder")
    with pytest.raises(ValueError, match="pipe': this is a device or a pipe, it must be the name of a file"):
        save(make(), tmp_path / "pipe")
    for name in ("folder", "pipe"):
        with pytest.raises(ValueError, match="it is no file"):
            load(tmp_path / name)
    with pytest.raises(FileNotFoundError, match="there is no such file"):
        load(tmp_path / "missing")
    assert sorted(os.listdir(tmp_path)) == ["folder", "pipe"]


@EACH
def test_damage_is_found_or_changes_nothing(make, save, load, tmp_path):
    """Cut anywhere, with bytes changed, removed, repeated or exchanged."""
    path, rng = tmp_path / "a", random.Random(1)
    save(make(), path)
    whole = path.read_bytes()
    good = _plain(load(path))
    found, tried = 0, 200
    for k in range(tried):
        broken = bytearray(whole)
        i, j = sorted(rng.sample(range(len(whole)), 2))
        if k % 5 == 0:
            del broken[i:j]
        elif k % 5 == 1:
            del broken[i:]
        elif k % 5 == 2:
            broken[i : i + 8], broken[j : j + 8] = broken[j : j + 8], broken[i : i + 8]
        else:
            broken[i] ^= 1 << rng.randrange(8)
        path.write_bytes(broken)
        try:
            assert _plain(load(path)) == good, k
        except ValueError as error:
            assert str(path) in str(error)  # noqa: PT017  # most must raise, a few need not
            found += 1
    assert found > tried * 0.8


def _npz(path, compression=zipfile.ZIP_DEFLATED, **members):
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, data in members.items():
            archive.writestr(f"{name}.npy", data)


def _npy(array):
    file = io.BytesIO()
    np.lib.format.write_array(file, np.asarray(array), allow_pickle=False)
    return file.getvalue()


def _text(text):
    return _npy(np.frombuffer(text.encode(), np.uint8))


@pytest.mark.parametrize("load", [Sweep.load, viz.RunSet.load, viz.Run.load])
def test_files_that_would_fill_memory_are_refused_before_they_do(load, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "SMALL", 1 << 22)
    path = tmp_path / "a.npz"
    zeros = _npy(np.zeros(1 << 24, np.uint8))
    header = np.lib.format.magic(1, 0) + (118).to_bytes(2, "little")
    lie = header + b"{'descr': '<f8', 'fortran_order': False, 'shape': (4294967296,), }".ljust(117) + b"\n"
    made = [
        {"losses": zeros},
        {"tristep": zeros},
        {"losses": lie},
        {"tristep": _text("[" * 1_000_000)},
        {"tristep": _text('{"kind": "runs"}' + " " * (1 << 22))},
    ]
    for members in made:
        _npz(path, **members)
        tracemalloc.start()
        try:
            with pytest.raises(ValueError, match="a.npz"):
                load(path)
            assert tracemalloc.get_traced_memory()[1] < 1 << 23
        finally:
            tracemalloc.stop()


@pytest.mark.parametrize("load", [Sweep.load, viz.RunSet.load])
def test_nothing_is_unpickled(load, tmp_path):
    class Harm:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "harm"),)

    for name in ("about", "header", "losses", "tristep"):
        np.savez(tmp_path / "a.npz", **{name: np.array([Harm()], dtype=object)})
        with pytest.raises(ValueError, match="a.npz"):
            load(tmp_path / "a.npz")
    assert not (tmp_path / "harm").exists()


def _states(header, tensors=None):
    text = json.dumps(header) if isinstance(header, dict) else header
    tensors = tensors or {}
    return safetensors.torch.save(tensors, {"tristep": text, "tristep checksum": str(zlib.crc32(text.encode()))})


HEADER = {
    "format": 1, "optimizer": "sgd", "settings": {}, "lr_scheduler": None, "num_update": 1, "counts": {"w": 1},
    "parameters": {"w": [3]}, "layout": {}, "states of": [], "checksums": {},
}  # fmt: skip


@pytest.mark.parametrize(
    "header",
    [
        "[" * 1_000_000,
        "[]",
        "{}",
        {"format": 1},
        *[HEADER | {key: 5} for key in HEADER if key != "num_update"],
        *[HEADER | {key: {"w": {"w": []}}} for key in HEADER if key != "lr_scheduler"],
        HEADER | {"checksums": {"w": 1}},
        HEADER | {"states of": [["w"]]},
        HEADER | {"num_update": 10**30},
        HEADER | {"counts": {"w": 10**30}},
        HEADER | {"lr_scheduler": {"class": "FactorScheduler", "kwargs": {"nothing": 1}}},
        HEADER | {"settings": {"momentum": [1]}},
        HEADER | {"layout": {"w": json.loads("[" * 400 + "]" * 400)}},
        HEADER | {"states of": ["w"], "layout": {"w": {"a": [], "b": []}}},
    ],
)
@pytest.mark.sample(12)
def test_states_that_say_nonsense_are_a_value_error(header, tmp_path):
    trainer = _trainer()
    before = repr(trainer.state_dict())
    (tmp_path / "a").write_bytes(_states(header))
    with pytest.raises(ValueError, match="a"):
        trainer.load_states(tmp_path / "a")
    assert repr(trainer.state_dict()) == before


def _changed(path, change):
    """Rewrites a file with other contents, whose checksums are right."""
    kind = json.loads(np.load(path)["tristep"].tobytes())["kind"]
    about, arrays = files.read_npz(path, kind)
    change(about, arrays)
    files.write_npz("path", path, kind, about, arrays)


@pytest.mark.parametrize(
    "change",
    [
        lambda about, arrays: about.update(axes=[]),
        lambda about, arrays: about.update(axes=[["wd", [0.0, 0.5]], ["wd", [0, 1]]]),
        lambda about, arrays: about.update(axes=[["wd", 5], ["seed", [0, 1]]]),
        lambda about, arrays: about.update(steps_per_epoch=0),
        lambda about, arrays: about.update(scores=["accuracy"]),
        lambda about, arrays: arrays.update(losses=np.zeros((2, 2))),
        lambda about, arrays: arrays.update(losses=np.zeros((2, 2, 5), "U3")),
        lambda about, arrays: arrays.update({"score loss": np.zeros(3)}),
        lambda about, arrays: arrays.update({"weight 1.bias": np.zeros((3, 2))}),
        lambda about, arrays: arrays.update(more=np.zeros((2, 2))),
    ],
)
@pytest.mark.sample(4)
def test_sweeps_that_contradict_themselves_are_refused(change, tmp_path):
    _sweep().save(tmp_path / "a")
    _changed(tmp_path / "a", change)
    with pytest.raises(ValueError, match="not a file that was written by Sweep.save, or a damaged one"):
        Sweep.load(tmp_path / "a")


@pytest.mark.parametrize(
    "change",
    [
        lambda about, arrays: about["runs"].append(about["runs"][0]),
        lambda about, arrays: about["runs"][0]["series"].update(__dict__=[]),
        lambda about, arrays: about["runs"][0].update(name=5),
        lambda about, arrays: about["runs"][0].update(parameters="w"),
        lambda about, arrays: arrays.update({"0/scalars/0/counts": np.array([10**9, 1])}),
        lambda about, arrays: arrays.update({"0/scalars/0/low": arrays["0/scalars/0/low"].astype(np.float32)}),
        lambda about, arrays: arrays.update({"0/scalars/0/recent_steps": arrays["0/scalars/0/recent_steps"][::-1].copy()}),
        lambda about, arrays: arrays.update({"0/scalars/0/mean": np.zeros((8, 2))}),
        lambda about, arrays: arrays.update(more=np.zeros(3)),
    ],
)
@pytest.mark.sample(4)
def test_runs_that_contradict_themselves_are_refused(change, tmp_path):
    _runs().save(tmp_path / "a")
    _changed(tmp_path / "a", change)
    with pytest.raises(ValueError, match="not a file of runs, or a damaged one"):
        viz.RunSet.load(tmp_path / "a")


def test_what_compresses_very_well_is_saved_so_that_it_can_be_loaded(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "SMALL", 1 << 16)
    run = viz.Run("zeros", ["w"])
    run.add_tensors(np.arange(1, 101), {"gradient": np.zeros((100, 40, 64))})
    run.save(tmp_path / "a")
    assert len(viz.Run.load(tmp_path / "a").histograms["gradient"]) == 100


def test_files_of_earlier_versions_are_loaded(tmp_path):
    sweep, runs = _sweep(), _runs()
    about = {"format": 1, "steps_per_epoch": 5, "scores": ["loss"], "axes": [["wd", [0.0, 0.5]], ["seed", [0, 1]]]}
    arrays = {"score loss": sweep.scores["loss"]} | {f"weight {k}": v.numpy() for k, v in sweep.weights.items()}
    np.savez_compressed(tmp_path / "a", about=np.array(json.dumps(about)), losses=sweep.losses, **arrays)
    assert _plain(Sweep.load(tmp_path / "a.npz")) == _plain(sweep)

    (run,) = runs
    arrays, names = {}, {}
    for kind, members in run._kinds().items():
        names[kind] = list(members)
        for k, series in enumerate(members.values()):
            arrays |= {f"0/{kind}/{k}/{part}": array for part, array in series.to_arrays().items()}
    own = {"name": "adam", "parameters": ["w"], "edges": [0.0, 1.0], "notes": {"optimizer": "Adam"}, "series": names}
    header = json.dumps({"tristep runs": 1, "runs": [own]}).encode()
    np.savez_compressed(tmp_path / "b", header=np.frombuffer(header, dtype=np.uint8), **arrays)
    assert _plain(viz.RunSet.load(tmp_path / "b.npz")) == _plain(runs)
