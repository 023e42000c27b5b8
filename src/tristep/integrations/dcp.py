"""torch.distributed.checkpoint: what makes a `tristep.Trainer` part of such a checkpoint."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..trainer import Trainer

__all__ = ["TrainerState"]


class TrainerState:
    """A `tristep.Trainer` for `dcp.save` and `dcp.load`, which take it in a dict, by a name: a `Stateful`, as they call it.

    `dcp.load` reads what a `state_dict` has already, and a trainer has no states before its first step; so its state is one
    entry, the file of `Trainer.save_states`. It is as complete and as checked as that, and is not sharded: for models whose
    states have to be, use the optimizers of `tristep.optim`, which `torch.distributed.checkpoint.state_dict` knows.

    Args:
        trainer: the trainer; the model's weights are saved by themselves.

    Raises:
        TypeError: `trainer` is no `tristep.Trainer`.

    Example:
        >>> import tempfile, torch, tristep
        >>> import torch.distributed.checkpoint as dcp
        >>> from tristep.integrations.dcp import TrainerState
        >>> net = torch.nn.Linear(2, 1)
        >>> trainer = tristep.Trainer(net, "adam")
        >>> state = {"net": net.state_dict(), "trainer": TrainerState(trainer)}
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = dcp.save(state, checkpoint_id=folder)
        ...     dcp.load(state, checkpoint_id=folder)
    """

    def __init__(self, trainer: Trainer) -> None:
        if not isinstance(trainer, Trainer):
            raise TypeError(f"trainer must be a tristep.Trainer, got {type(trainer).__name__}")
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        """All of it as one value: the bytes of a safetensors file, empty on ranks that write none."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "trainer.safetensors")
            self._trainer.save_states(path)
            return {"safetensors": path.read_bytes() if path.exists() else b""}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what `state_dict` gave.

        Raises:
            TypeError, ValueError: it is something else, damaged, or does not fit the trainer; nothing has been changed.
        """
        value = state_dict.get("safetensors")
        if not isinstance(value, bytes):
            raise TypeError(f"saved state has {type(value).__name__} as 'safetensors': must be the bytes of a file")
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "trainer.safetensors")
            path.write_bytes(value)
            self._trainer.load_states(path)
