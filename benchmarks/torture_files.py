"""For torture.py: attacks on files. Each is an endless iterator of attempts, which may raise Wrong or Silent."""

from __future__ import annotations

import json
import os
import pickle
import random
import resource
import shutil
import signal
import time
import warnings
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.torch
import torch
from torture_process import Child, Silent, Wrong, plain

from tristep import CheckpointManager, Trainer
from tristep.trainer import Sweep
from tristep.trainer.serialization.files import FORMAT
from tristep.viz import Run, RunSet

__all__ = ["KINDS", "check_clean", "checkpoints", "damage", "hostile", "kills"]

KINDS = ("states", "run", "runs", "sweep")
MOST_MEMORY = 2**27  # bytes that reading a bad file may take


def contents(kind: str, value: float, size: int) -> Any:
    """What is saved in a file of a kind: another `value` makes other contents, `size` says how large they are."""
    rng = np.random.default_rng(int(value))
    if kind == "states":
        param = torch.nn.Parameter(torch.ones(size))
        trainer = Trainer({"w": param}, "adam", {"learning_rate": 1e-3 * (1 + value)})
        param.grad = torch.from_numpy(rng.standard_normal(size, dtype=np.float32))
        trainer.step(1)
        return trainer
    if kind == "sweep":
        axes = {"wd": (0.0, value), "seed": (0, 1)}
        weights = {"0.weight": torch.from_numpy(rng.standard_normal((2, 2, size), dtype=np.float32))}
        return Sweep(axes, rng.random((2, 2, 5), np.float32), 5, {"loss": rng.random((2, 2))}, weights)
    runs = [Run(f"{value} {k}", ["w"], [0.0, 1.0], {"optimizer": "Adam"}) for k in range(1 if kind == "run" else 3)]
    for run in runs:
        for step in range(1, 9):
            run.add_scalars(step, {"loss": value / step})
        run.add_weights(1, {"w": rng.standard_normal(size, dtype=np.float32)})
    return runs[0] if kind == "run" else RunSet(runs)


def save(made: Any, path: Path) -> None:
    made.save_states(path) if isinstance(made, Trainer) else made.save(path)


def load(kind: str, path: Path, size: int) -> Any:
    """What a file has. A Trainer that does not take it is unchanged."""
    if kind != "states":
        return _plain({"run": Run, "runs": RunSet, "sweep": Sweep}[kind].load(path))  # type: ignore[attr-defined]
    trainer = contents(kind, 10**6, size)
    before = plain(trainer.state_dict())
    try:
        trainer.load_states(path)
    except BaseException:
        if plain(trainer.state_dict()) != before:
            raise Silent("a refused file has changed the Trainer") from None
        raise
    return plain(trainer.state_dict())


def _plain(loaded: Any) -> Any:
    if isinstance(loaded, RunSet):
        return [_plain(run) for run in loaded]
    if isinstance(loaded, Run):
        parts = loaded.scalars, loaded.tensors, loaded.histograms, loaded.weights
        series = [{name: [each.recent(), list(each.curve())] for name, each in part.items()} for part in parts]
        return plain([loaded.name, loaded.parameters, loaded.edges, loaded.notes, series])
    return plain(loaded)


def kept(kind: str, made: Any) -> Any:
    """What `load` gives of a file of this."""
    return _plain(made.state_dict() if kind == "states" else made)


def kills(kind: str, folder: Path, rng: random.Random, size: int = 20_000) -> Iterator[bool]:
    path, old = folder / kind, contents(kind, 0.0, size)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        save(old, path)
        times.append(time.perf_counter() - start)
    known, value = kept(kind, old), 0.0

    def run(there: int, made: Any) -> None:
        os.write(there, b"s")
        save(made, path)
        os.write(there, b"e")

    while True:
        value += 1
        made = contents(kind, value, size)
        child = Child(run, made)
        child.read()
        time.sleep(rng.random() * 1.2 * sorted(times)[2])
        child.send(signal.SIGKILL)
        said, _ = child.end()
        try:
            now = load(kind, path, size)
        except (ValueError, OSError) as error:
            save(old, path)
            raise Wrong(f"{kind}: {error}") from None
        if now not in (known, kept(kind, made)) or (b"e" in said and now == known):
            raise Silent(f"{kind}: neither what was there before nor what was saved")
        known = now
        yield b"e" not in said


def check_clean(kind: str, folder: Path) -> None:
    """After a save that was not killed, nothing is left of those that were."""
    save(contents(kind, 1.0, 10), folder / kind)
    left = [name for name in os.listdir(folder) if name.startswith(f".{kind}.")]
    if left:
        raise Wrong(f"{kind}: {len(left)} temporary files are left")


def damaged(data: bytes, rng: random.Random) -> bytes:
    """The bytes with one to three changes."""
    found = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        at, length = rng.randrange(max(len(found), 1)), rng.choice((1, 4, 16, 64, 512))
        part = found[at : at + length]
        how = rng.randrange(9)
        if how == 0 and found:
            found[at] ^= 1 << rng.randrange(8)
        elif how == 1 and found:
            found[at] = rng.randrange(256)
        elif how == 2:
            del found[at:]
        elif how == 3:
            del found[at : at + length]
        elif how == 4:
            found[at:at] = rng.randbytes(length)
        elif how == 5:
            found[at : at + length] = bytes(len(part))
        elif how == 6:  # copied to another place
            to = rng.randrange(len(found) + 1)
            found[to : to + length] = part
        elif how == 7:
            found += rng.randbytes(length)
        else:  # numbers in texts and headers
            digits = [i for i, byte in enumerate(found) if 48 <= byte < 58]
            if digits:
                found[rng.choice(digits)] = rng.choice(b"0123456789")
    return bytes(found)


def damage(kind: str, folder: Path, rng: random.Random, size: int = 50) -> Iterator[bool]:
    path, made = folder / kind, contents(kind, 3.0, size)
    save(made, path)
    data, expected = path.read_bytes(), kept(kind, made)
    while True:
        other = damaged(data, rng)
        path.write_bytes(other)
        try:
            now = load(kind, path, size)
        except ValueError:
            yield True
            continue
        except Silent:
            raise
        except BaseException as error:
            raise Wrong(f"{kind}: {type(error).__name__}: {error}") from error
        if now != expected:
            raise Silent(f"{kind}: other contents than were saved")
        yield False


class _Runs:
    """What runs something if it is unpickled."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self._path,)


def bad_files(rng: random.Random, mark: str) -> Iterator[bytes]:
    """Files that a sender made on purpose; unpickling one of them makes the folder `mark`."""

    def tensors(head: bytes, data: bytes = b"", length: int | None = None) -> bytes:
        return (len(head) if length is None else length).to_bytes(8, "little") + head + data

    def said(text: str) -> dict[str, str]:
        return {"tristep": text, "tristep checksum": f"{zlib.crc32(text.encode())}"}

    large, deep = rng.randrange(2**28, 2**30), rng.randrange(10**4, 10**6)
    nested = rng.choice((b"[", b'{"a":')) * deep
    says = said("{}")
    yield pickle.dumps(_Runs(mark))
    yield tensors(b"{}", length=rng.choice((large, 2**63, 2**64 - 1)))
    yield tensors(nested)
    for shape, end in ((large, 4), (1, 4 * large), (large, 4 * large)):
        described = {"__metadata__": says, "a": {"dtype": "F32", "shape": [shape], "data_offsets": [0, end]}}
        yield tensors(json.dumps(described).encode(), b"1234")
    yield tensors(json.dumps({"__metadata__": says}).encode())
    yield tensors(json.dumps({"__metadata__": said(nested.decode())}).encode())
    yield tensors(json.dumps({"__metadata__": said(f'{{"format": {FORMAT}, "about": {nested.decode()}')}).encode())
    yield b""
    yield rng.randbytes(rng.randrange(1, 4096))


def hostile(kind: str, folder: Path, rng: random.Random) -> Iterator[bool]:
    path, mark = folder / kind, folder / "unpickled"
    contents(kind, 0.0, 10)  # for the engine to have been imported

    def run(there: int) -> int:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        try:
            load(kind, path, 10)
        except ValueError:
            return 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
        return -1

    while True:
        for data in bad_files(rng, str(mark)):
            path.write_bytes(data)
            _, memory = Child(run).end()
            if mark.exists():
                mark.rmdir()
                raise Silent(f"{kind}: it was unpickled")
            if memory == -1:
                raise Silent(f"{kind}: taken for a good file: {data[:60]!r}")
            if memory > MOST_MEMORY:
                raise Wrong(f"{kind}: {memory >> 20} MiB for {data[:60]!r}")
            yield True


# ---- checkpoints -----------------------------------------------------------------------------------------------------

VALUES: list[Any] = [
    None,
    True,
    -1,
    10**400,
    2.5,
    "x",
    [],
    {},
    [[1]],
    {"tensor": "0"},
    {"tensor": "99"},
    {"dict": [[None, 1]]},
]


class _Checkpointed:
    """A training of two steps with a checkpoint of each, and everything that it would go on with."""

    def __init__(self, folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
        self.trainer = Trainer(self.net, "adam", engine="eager")
        self.manager = CheckpointManager(folder, self.trainer, self.net, asynchronous=False)
        self.saved = []
        for _ in range(2):
            self.step()
            self.manager.save({"loss": 1.0}, {"epoch": 1})
            self.saved.append(self.look())

    def step(self) -> None:
        self.net(torch.randn(4, 4)).sum().backward()
        self.trainer.step(4)
        self.trainer.zero_grad()

    def look(self) -> Any:
        randoms = torch.get_rng_state(), random.getstate(), np.random.get_state()  # noqa: NPY002
        return plain([self.net.state_dict(), self.trainer.state_dict(), *randoms])

    def resume(self) -> bool:
        """Whether it is refused; it has resumed one of the checkpoints then, or is as before."""
        before = self.look()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of damaged ones
                self.manager.resume()
        except ValueError:
            if self.look() != before:
                raise Silent("a refused checkpoint has changed something") from None
            return True
        return False


def _spoiled(path: Path, rng: random.Random) -> None:
    """Another value somewhere in what a file says, with checksums that are right."""
    tensors = safetensors.torch.load_file(path)
    with safetensors.safe_open(path, "pt") as file:
        root = {"": json.loads(file.metadata()["tristep"])}
    at: Any = root
    key: Any = ""
    while isinstance(at[key], dict | list) and at[key] and (key == "" or rng.random() < 0.8):
        at = at[key]
        key = rng.choice(list(at)) if isinstance(at, dict) else rng.randrange(min(len(at), 8))
    at[key] = rng.choice(VALUES)
    text = json.dumps(root[""])
    safetensors.torch.save_file(tensors, path, {"tristep": text, "tristep checksum": str(zlib.crc32(text.encode()))})


def checkpoints(how: str, folder: Path, rng: random.Random) -> Iterator[bool]:
    """A file of another checkpoint in one ("mixed"), or other values in it ("fields")."""
    folder = folder / "checkpoints"
    training, parts = _Checkpointed(folder), ("model", "trainer", "training")
    whole = {
        name: (folder / name).read_bytes() for name in (f"step-000000000{k}/{p}.safetensors" for k in (1, 2) for p in parts)
    }
    while True:
        for name, data in whole.items():
            (folder / name).write_bytes(data)
        training.step()
        if how == "mixed":
            chosen = rng.sample(parts, rng.choice((1, 2)))
            for part in chosen:
                shutil.copy(*(folder / f"step-000000000{k}" / f"{part}.safetensors" for k in (1, 2)))
        else:
            chosen = [rng.choice(parts)]
            _spoiled(folder / f"step-0000000002/{chosen[0]}.safetensors", rng)
        try:
            refused = training.resume()
        except Silent:
            raise
        except BaseException as error:
            raise Wrong(f"{chosen}: {type(error).__name__}: {error}") from error
        if how == "mixed" and (refused or training.look() != training.saved[0]):
            raise Silent(f"{chosen} of step 1 in the checkpoint of step 2: something else than step 1 was resumed")
        yield how == "mixed" or refused or training.look() == training.saved[0]
