"""Resuming a training from the newest checkpoint of a folder that is whole."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .content import agreed, check_weights, group_of, load_content, tensors_of
from .folder import Checkpoint, Content, list_checkpoints, read_checkpoint

if TYPE_CHECKING:
    from ..trainer import Trainer

__all__ = ["resume"]


def resume(trainer: Trainer, folder: str | os.PathLike[str], net: Any = None, stateful: Sequence[Any] = ()) -> Checkpoint:
    """See `Trainer.resume`; `stateful` as for `CheckpointManager`."""
    tensors, group = tensors_of(trainer, net), group_of(trainer)
    path = Path(folder)
    if path.exists() and not path.is_dir():
        raise NotADirectoryError(f"folder={str(folder)!r}: this is a file, it must be a folder of checkpoints")
    found = _newest(folder, [path] if path in list_checkpoints(path.parent) else list_checkpoints(path))
    chosen = agreed(group, None if found is None else str(found.about.path))
    if chosen is None:
        return Checkpoint()
    if found is None or str(found.about.path) != chosen:
        found = read_checkpoint(Path(chosen))
    check_weights(tensors, found.model, net)
    load_content(trainer, tensors, stateful, found.model, found.states, found.ranks)
    return found.about


def _newest(folder: Any, paths: Sequence[Path]) -> Content | None:
    damaged = []
    for path in reversed(paths):
        try:
            found = read_checkpoint(path)
        except (OSError, ValueError) as error:
            damaged.append(f"{path.name}: {error}")
            continue
        if damaged:
            warnings.warn(
                f"folder={str(folder)!r}: {path.name} is resumed, newer ones are damaged. {damaged[0]}", stacklevel=4
            )
        return found
    if damaged:
        raise ValueError(f"folder={str(folder)!r}: all of its {len(damaged)} checkpoints are damaged. {damaged[0]}")
    return None
