"""Read, write and remove checkpoints in a folder, of which one training at a time has the lock."""

from __future__ import annotations

import errno
import math
import os
import re
import shutil
import socket
import threading
import uuid
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..serialization import Loaded, files, state
from ..serialization.nesting import pack, unpack
from ..utils.random_state import check_random_state

fcntl: Any = import_module("fcntl") if os.name == "posix" else None
_NAME = re.compile(r"step-(\d{10,})(?:-(\d+))?")  # the step, and the number of earlier saves of this step
_HIDDEN = re.compile(r"\.(step-.*)\.[0-9a-f]{32}\.tmp")  # a checkpoint that is being written or removed
_MODEL, _STATES, _REST = "model.safetensors", "trainer.safetensors", "training.safetensors"
_PART = "a part of a checkpoint"
_KINDS = {_MODEL: "weights", _STATES: state.KIND, _REST: "training"}
_IDENTITY = "checkpoint"  # all of a checkpoint's files have the same
_OF_RANK = {"random", "stateful", "extra", "buffers"}


class Checkpoint(NamedTuple):
    """The description of a checkpoint.

    Attributes:
        step: the number of updates after which it was saved; 0 if nothing has been saved.
        metrics: the metrics that were saved with it, by name.
        metadata: the user's data that were saved with it.
        path: the folder of the checkpoint; None if nothing has been saved.
        weights, states: after `resume` with `strict=False`, the names of weights and buffers, and of parameters, that were
            loaded, start anew or were not used; otherwise None.
    """

    step: int = 0
    metrics: dict[str, float] = {}  # noqa: RUF012  # never changed
    metadata: Any = None
    path: Path | None = None
    weights: Loaded | None = None
    states: Loaded | None = None


class Content(NamedTuple):
    """All of a checkpoint."""

    about: Checkpoint
    model: dict[str, torch.Tensor]  # weights and buffers by name
    states: dict[str, Any]  # what `Trainer.state_dict` returned
    ranks: list[dict[str, Any]]  # for each process what `Training.collect` returned
    identity: str | None = None  # the random id of its files; None before they are written


class Claim:
    """A lock on a folder: no other process saves there, and one training of this process at a time.

    The file `path` is locked while it is open. A lock of `lockf` stays with the process that has taken it.
    """

    def __init__(self, path: Path) -> None:
        self.trainer: Callable[[], Any] = lambda: None  # a weak reference to the trainer whose checkpoints are saved
        self.writing = threading.Lock()  # for the threads that write
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        if fcntl is None:
            return
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN):  # a file system without locks
                return
            who = os.read(self._descriptor, 200).decode(errors="replace") or "another process"
            self.close()
            raise RuntimeError(
                f"folder={str(path.parent)!r}: {who} saves checkpoints here. The checkpoints of two processes "
                "would be confused: give each process its own folder, or end the other one, or close its CheckpointManager"
            ) from None
        os.ftruncate(self._descriptor, 0)
        os.write(self._descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode())

    def is_present(self, path: Path) -> bool:
        """Return whether this is the folder's present lock: the folder may have been removed and made again."""
        return path.exists() and os.path.samestat(os.fstat(self._descriptor), path.stat())

    def close(self) -> None:
        """Let others save here. In a forked process this does not release the lock of its parent."""
        os.close(self._descriptor)


_claims: dict[str, Claim] = {}  # by real path


def claim(folder: Path, trainer: Any, before: Claim | None) -> Claim:
    """Take the lock of a folder, made if need be, which no other process gets until this one ends or calls `disclaim`.

    The trainer takes over from another one of this process. `before` is what the last call for this trainer returned, None
    if there was none; raise RuntimeError if another trainer has taken over since.
    """
    folder.mkdir(parents=True, exist_ok=True)
    key, path = os.path.realpath(folder), folder / ".lock"
    if key in _claims and not _claims[key].is_present(path):
        _claims.pop(key).close()
    if key not in _claims:
        _claims[key] = Claim(path)
    held = _claims[key]
    if held is before and held.trainer() not in (trainer, None):
        raise RuntimeError(
            f"folder={str(folder)!r}: another trainer of this process has begun to save here, and checkpoints of two "
            "trainings in one folder would be confused: give each its own folder"
        )
    held.trainer = weakref.ref(trainer)
    return held


def disclaim(folder: Path, trainer: Any) -> None:
    """Release the lock of a folder, if this trainer has it."""
    key = os.path.realpath(folder)
    if key in _claims and _claims[key].trainer() is trainer:
        _claims.pop(key).close()


def _after_fork() -> None:
    while _claims:
        _claims.popitem()[1].close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder, from the oldest to the newest; none if the folder does not exist."""
    if not folder.is_dir():
        return []
    entries = [(_NAME.fullmatch(entry.name), entry) for entry in folder.iterdir() if is_checkpoint(entry)]
    numbered = [(int(match[1]), int(match[2] or 0), entry) for match, entry in entries if match]
    return [entry for _, _, entry in sorted(numbered)]


def is_checkpoint(path: Path) -> bool:
    """Return whether a folder has any file of a checkpoint; other programs' folders may have names of checkpoints."""
    return any((path / name).is_file() for name in _KINDS)


def step_of(path: Path) -> int | None:
    """Return the step in the name of a checkpoint's folder; None if it has another name."""
    match = _NAME.fullmatch(path.name)
    return None if match is None else int(match[1])


def checkpoints(folder: Path) -> list[Checkpoint]:
    """Return the checkpoints in a folder that are not damaged, from the oldest to the newest."""
    abouts = []
    for path in list_checkpoints(folder):
        with suppress(OSError, ValueError), files.contents("checkpoint", path / _REST, _PART):
            abouts.append(_about(path, _read(path / _REST, with_tensors=False)[0]))
    return abouts


def newest(folder: Path) -> Content | None:
    """Read the newest checkpoint in a folder, or the one that the folder itself is. None: there is no checkpoint.

    Warn if newer ones cannot be read; raise ValueError if none can.
    """
    errors: dict[Path, str] = {}
    while paths := [each for each in _paths(folder) if each not in errors]:
        path = paths[-1]
        try:
            content = read_checkpoint(path)
        except (OSError, ValueError) as error:
            if path.exists():  # if not, somebody who saves here has removed it meanwhile: there is a newer one
                errors[path] = f"{path.name}: {error}"
            continue
        if errors:
            warnings.warn(
                f"folder={str(folder)!r}: {path.name} is resumed, newer ones cannot be read. {next(iter(errors.values()))}",
                stacklevel=5,
            )
        return content
    if errors:
        raise ValueError(
            f"folder={str(folder)!r}: none of its {len(errors)} checkpoints can be read. {next(iter(errors.values()))}"
        )
    return None


def read_checkpoint(path: Path) -> Content:
    """Read a checkpoint, with the tensors of the model and the states in mapped files."""
    with files.contents("checkpoint", path / _REST, _PART):
        header, tensors = _read(path / _REST)
        about, ranks = _about(path, header), unpack(header["ranks"], tensors)
        if not (isinstance(ranks, list) and ranks):
            raise ValueError("it does not have the states of generators")
        for rank in ranks:
            _check_rank(rank)
    with files.contents("checkpoint", path / _MODEL, _PART):
        of_model, model = _read(path / _MODEL, mapped=True)
    states = state.read(path / _STATES, mapped=True)
    identity = header.get(_IDENTITY)
    if not (identity == of_model.get(_IDENTITY) == states.pop(_IDENTITY, None) is not None):
        raise ValueError(
            f"checkpoint={str(path)!r}: its files are of different checkpoints, as after a copy that was mixed up"
        )
    return Content(about, model, states, ranks, identity)


def write_checkpoint(folder: Path, content: Content) -> Checkpoint:
    """Write a checkpoint. It gets its name when it is complete and on the disk; after an error there is no new checkpoint.

    Leftovers of killed processes are removed first: the caller has the folder's lock, so nobody else writes there.
    """
    for entry in folder.iterdir():
        if _HIDDEN.fullmatch(entry.name):
            shutil.rmtree(entry, ignore_errors=True)
    step, identity = content.about.step, uuid.uuid4().hex
    names = [_NAME.fullmatch(entry.name) for entry in folder.iterdir()]
    earlier = [int(match[2] or 0) for match in names if match and int(match[1]) == step]
    name = f"step-{step:010}" + (f"-{max(earlier) + 1}" if earlier else "")
    hidden = _hidden(folder, name)
    hidden.mkdir()
    try:
        tensors: dict[str, torch.Tensor] = {}
        header = {
            _IDENTITY: identity,
            "step": step,
            "metrics": content.about.metrics,
            "metadata": content.about.metadata,
            "ranks": pack(content.ranks, tensors, "ranks"),
        }
        files.write("folder", hidden / _MODEL, _KINDS[_MODEL], {_IDENTITY: identity}, content.model)
        state.write(hidden / _STATES, {**content.states, _IDENTITY: identity})
        files.write("folder", hidden / _REST, _KINDS[_REST], header, tensors)
        os.rename(hidden, folder / name)
    except BaseException:
        shutil.rmtree(hidden, ignore_errors=True)
        raise
    files.sync_folder(folder)
    for path in list_checkpoints(folder):  # the same step, saved again
        if step_of(path) == step and path.name != name:
            _remove(path)
    return content.about._replace(path=folder / name)


def prune(folder: Path, keep: int | None, best: tuple[str, str] | None, newest: Path | None) -> None:
    """Remove all checkpoints but `newest`, the last `keep` (None: all), and the best by a metric and "min" or "max".

    Damaged ones do not count, and only folders that certainly are checkpoints are removed.
    """
    if keep is None:
        return
    abouts = checkpoints(folder)
    spared = {about.path for about in abouts[-keep:]} | {newest}
    if best is not None and len(abouts) > keep and (best_about := best_of(abouts, *best)) is not None:
        spared.add(best_about.path)
    for about in abouts:
        if about.path is not None and about.path not in spared:
            _remove(about.path)


def best_of(checkpoints: Sequence[Checkpoint], name: str, mode: str) -> Checkpoint | None:
    """Return the checkpoint with the smallest ("min") or largest metric, the newest of equal ones; NaN is never the best."""
    ranked = [about for about in checkpoints if not math.isnan(about.metrics.get(name, math.nan))]
    sign = 1 if mode == "min" else -1
    return min(reversed(ranked), key=lambda about: sign * about.metrics[name], default=None)


def _paths(folder: Path) -> list[Path]:
    """Return the folder itself if it is a checkpoint, and otherwise the checkpoints in it."""
    return [folder] if is_checkpoint(folder) else list_checkpoints(folder)


def _about(path: Path, header: Mapping[str, Any]) -> Checkpoint:
    step, metrics = header["step"], header["metrics"]
    for fits, words in (
        (type(step) is int and step >= 0 and isinstance(metrics, dict), "its step or its metrics are of another type"),
        (all(type(value) in (int, float) for value in metrics.values()), "its metrics are no numbers"),
        (step_of(path) in (step, None), f"it is of step {step}, its folder has the name of another step"),
    ):
        if not fits:
            raise ValueError(words)
    return Checkpoint(step, {name: float(value) for name, value in metrics.items()}, header["metadata"], path)


def _check_rank(rank: Any) -> None:
    """Raise ValueError if `Training.collect` cannot have returned `rank`."""
    stateful, extra, buffers = rank["stateful"], rank["extra"], rank["buffers"]
    named = [isinstance(each, dict) and all(isinstance(name, str) for name in each) for each in (*extra, *buffers)]
    for fits, words in (
        (set(rank) == _OF_RANK, "it does not have the states of generators"),
        (
            all(isinstance(each, list) for each in (stateful, extra, buffers)),
            "its other objects, extra states or buffers are no list",
        ),
        (
            buffers and len(extra) in (0, len(buffers)),
            "it does not have the buffers, and extra states or none, of each replica",
        ),
        (all(isinstance(each, dict) for each in stateful), "the state of another object is no dict"),
        (all(named), "the buffers of a replica are no dict by name"),
        (all(isinstance(each, torch.Tensor) for by in buffers for each in by.values()), "its buffers are no tensors"),
    ):
        if not fits:
            raise ValueError(words)
    check_random_state(rank["random"], with_gpus=False)


def _read(path: Path, with_tensors: bool = True, mapped: bool = False) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    return files.read(path, _KINDS[path.name], with_tensors, mapped)


def _hidden(folder: Path, name: str) -> Path:
    return folder / f".{name}.{uuid.uuid4().hex}.tmp"


def _remove(path: Path) -> None:
    """Remove a folder if it is a whole checkpoint with nothing else in it. It loses its name first."""
    try:
        if path.is_symlink() or not set(os.listdir(path)) <= set(_KINDS):
            return
        for each in path.iterdir():
            _read(each, with_tensors=False)
    except (OSError, ValueError, LookupError, TypeError):
        return  # damaged, or another program's
    hidden = _hidden(path.parent, path.name)
    os.rename(path, hidden)
    shutil.rmtree(hidden, ignore_errors=True)
