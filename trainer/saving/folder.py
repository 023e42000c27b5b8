"""The folder of checkpoints: one folder for each, which is whole as soon as it has its name."""

from __future__ import annotations

import math
import os
import re
import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .. import checkpoint, files
from .packing import pack, unpack

__all__ = ["Checkpoint", "Content", "best_of", "list_checkpoints", "prune", "read_checkpoint", "write_checkpoint"]

fcntl: Any = import_module("fcntl") if os.name == "posix" else None
_NAME = re.compile(r"step-(\d{10,})(?:-(\d+))?")  # the step, and how often that step has been saved before
_HIDDEN = re.compile(r"\.(step-.*)\.[0-9a-f]{32}\.tmp")  # being written, or removed
_MODEL, _STATES, _REST = "model.safetensors", "trainer.safetensors", "training.safetensors"
_OF_RANK = {"random", "stateful", "buffers"}
_FORMAT = 1


class Checkpoint(NamedTuple):
    """One checkpoint.

    Attributes:
        step: after how many updates it was saved; 0 where there is none.
        metrics: by name.
        metadata: the user's.
        path: its folder; None where there is none.
    """

    step: int = 0
    metrics: dict[str, float] = {}  # noqa: RUF012  # never changed
    metadata: Any = None
    path: Path | None = None


class Content(NamedTuple):
    """What is in a checkpoint.

    Attributes:
        about: its place and what it says about itself.
        model: the model's tensors by name.
        states: as `Trainer.state_dict`.
        ranks: of each process the states of random generators and of others, and the buffers of its replicas.
    """

    about: Checkpoint
    model: dict[str, torch.Tensor]
    states: dict[str, Any]
    ranks: list[dict[str, Any]]


def list_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of a folder, from the oldest to the newest. Empty where there is no folder."""
    if not folder.is_dir():
        return []
    entries = [(_NAME.fullmatch(entry.name), entry) for entry in folder.iterdir() if entry.is_dir()]
    found = [(int(match[1]), int(match[2] or 0), entry) for match, entry in entries if match]
    return [entry for _, _, entry in sorted(found)]


def read_about(path: Path) -> Checkpoint:
    """What a checkpoint says about itself.

    Raises:
        FileNotFoundError, ValueError: it is no checkpoint, or damaged.
    """
    with files.contents("checkpoint", path / _REST, "a part of a checkpoint"):
        return _about(path, files.read_header(path / _REST))


def read_checkpoint(path: Path) -> Content:
    """All of a checkpoint, on the CPU. No more memory is taken than the files have bytes.

    Raises:
        FileNotFoundError, ValueError: it is no checkpoint, or damaged.
    """
    with files.contents("checkpoint", path / _REST, "a part of a checkpoint"):
        header, tensors = _tensors(path / _REST)
        about, ranks = _about(path, header), unpack(header["ranks"], tensors)
        if not (isinstance(ranks, list) and ranks and all(set(rank) == _OF_RANK for rank in ranks)):
            raise ValueError("it does not have the states of generators")
    with files.contents("checkpoint", path / _MODEL, "a part of a checkpoint"):
        _, model = _tensors(path / _MODEL)
    return Content(about, model, checkpoint.read(path / _STATES), ranks)


def write_checkpoint(folder: Path, content: Content) -> Checkpoint:
    """Write a checkpoint, which appears with its name once it is complete and on the disk.

    Leftovers of killed processes are removed first.

    Raises:
        OSError: the system's own; there is no new checkpoint.
    """
    with _locked(folder):
        _remove_leftovers(folder)
        step = content.about.step
        same = [_NAME.fullmatch(path.name) for path in list_checkpoints(folder)]
        earlier = [int(match[2] or 0) for match in same if match and int(match[1]) == step]
        name = f"step-{step:010}" + (f"-{max(earlier) + 1}" if earlier else "")
        hidden = _hidden(folder, name)
        hidden.mkdir()
        try:
            rest: dict[str, torch.Tensor] = {}
            header = {
                "format": _FORMAT,
                "step": step,
                "metrics": content.about.metrics,
                "metadata": content.about.metadata,
                "ranks": pack(content.ranks, rest, "ranks"),
            }
            files.write_tensors("folder", hidden / _MODEL, {}, content.model)
            checkpoint.write(hidden / _STATES, content.states)
            files.write_tensors("folder", hidden / _REST, header, rest)
            os.rename(hidden, folder / name)
        except BaseException:
            shutil.rmtree(hidden, ignore_errors=True)
            raise
        files.sync_folder(folder)
        for path in list_checkpoints(folder):  # the same step, saved again
            if (match := _NAME.fullmatch(path.name)) and int(match[1]) == step and path.name != name:
                _remove(path)
    return content.about._replace(path=folder / name)


def prune(folder: Path, keep: int | None, best: tuple[str, str] | None) -> None:
    """Remove all but the newest `keep` checkpoints, and the best one by a metric, (name, "min" or "max")."""
    if keep is None:
        return
    with _locked(folder):
        paths = list_checkpoints(folder)
        spared = set(paths[-keep:])
        if best is not None and len(paths) > keep:
            found = best_of([about for about in map(about_or_none, paths) if about is not None], *best)
            spared |= set() if found is None or found.path is None else {found.path}
        for path in paths:
            if path not in spared:
                _remove(path)


def best_of(checkpoints: Sequence[Checkpoint], name: str, mode: str) -> Checkpoint | None:
    """The one with the smallest or largest metric of this name, of equal ones the newest; NaN is never the best."""
    ranked = [one for one in checkpoints if not math.isnan(one.metrics.get(name, math.nan))]
    sign = 1 if mode == "min" else -1
    return min(reversed(ranked), key=lambda one: sign * one.metrics[name], default=None)


def about_or_none(path: Path) -> Checkpoint | None:
    """What a checkpoint says about itself, None of a damaged one."""
    try:
        return read_about(path)
    except (OSError, ValueError):
        return None


def _about(path: Path, header: Mapping[str, Any] | None) -> Checkpoint:
    if header is None or header.get("format") != _FORMAT:
        raise ValueError(
            f"it has format {None if header is None else header.get('format')!r}: this version of tristep reads format "
            f"{_FORMAT}; it may come from a newer version"
        )
    step, metrics = header["step"], header["metrics"]
    if type(step) is not int or step < 0 or not isinstance(metrics, dict):
        raise ValueError("its step or its metrics are of another type")
    return Checkpoint(step, {name: float(value) for name, value in metrics.items()}, header["metadata"], path)


def _tensors(path: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    found = files.read_tensors(path)
    if found is None:
        raise ValueError("a safetensors file from elsewhere")
    return found


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """A context that other processes, and threads, wait for before they write here."""
    folder.mkdir(parents=True, exist_ok=True)
    if fcntl is None:
        yield
        return
    with open(folder / ".lock", "ab") as file:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _hidden(folder: Path, name: str) -> Path:
    return folder / f".{name}.{uuid.uuid4().hex}.tmp"


def _remove(path: Path) -> None:
    """Remove a checkpoint: first its name, so that no part of one is ever taken for one."""
    hidden = _hidden(path.parent, path.name)
    os.rename(path, hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def _remove_leftovers(folder: Path) -> None:
    """Whoever holds the lock is the only one who writes here."""
    for entry in folder.iterdir():
        if _HIDDEN.fullmatch(entry.name):
            shutil.rmtree(entry, ignore_errors=True)
