"""Resuming a training from the newest checkpoint of a folder that is whole."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .content import Trainer, agreed, check_weights, extra_states_of, group_of, load_content, tensors_of
from .folder import Checkpoint, Content, is_checkpoint, list_checkpoints, read_checkpoint


def resume(trainer: Trainer, folder: str | os.PathLike[str], net: Any = None, stateful: Sequence[Any] = ()) -> Checkpoint:
    """See `Trainer.resume`; `stateful` as for `CheckpointManager`."""
    tensors, extra, group = tensors_of(trainer, net), extra_states_of(trainer, net), group_of(trainer)
    path = Path(folder)
    if path.exists() and not path.is_dir():
        raise NotADirectoryError(f"folder={str(folder)!r}: this is a file, it must be a folder of checkpoints")
    found = _newest(folder)
    chosen = agreed(group, None if found is None else str(found.about.path))
    if chosen is None:
        return Checkpoint()
    if found is None or str(found.about.path) != chosen:
        found = read_checkpoint(Path(chosen))
    check_weights(tensors, found.model, net)
    load_content(trainer, tensors, extra, stateful, found)
    return found.about


def _newest(folder: str | os.PathLike[str]) -> Content | None:
    damaged: dict[Path, str] = {}
    paths = _paths(Path(folder))
    while paths:
        path = paths.pop()
        try:
            found = read_checkpoint(path)
        except (OSError, ValueError) as error:
            if path.exists():
                damaged[path] = f"{path.name}: {error}"
            else:  # somebody who saves here has removed it meanwhile: there is a newer one
                paths = [each for each in _paths(Path(folder)) if each not in damaged]
            continue
        if damaged:
            warnings.warn(
                f"folder={str(folder)!r}: {path.name} is resumed, newer ones are damaged. {next(iter(damaged.values()))}",
                stacklevel=5,
            )
        return found
    if damaged:
        raise ValueError(
            f"folder={str(folder)!r}: all of its {len(damaged)} checkpoints are damaged. {next(iter(damaged.values()))}"
        )
    return None


def _paths(folder: Path) -> list[Path]:
    """The one checkpoint that this is, or those in it."""
    return [folder] if is_checkpoint(folder) else list_checkpoints(folder)
