"""torch.distributed.checkpoint: a wrapper with which `dcp.save` and `dcp.load` take a `tristep.Trainer`."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..trainer import Trainer
from ..trainer.validation import instance

__all__ = ["TrainerState"]


class TrainerState:
    """Wraps a `tristep.Trainer` as a `Stateful` of `torch.distributed.checkpoint`: put it into the dict that is saved.

    `dcp.load` reads only entries that `state_dict` has already, and a trainer has no states before its first step. So the
    state is one entry, the bytes of a file of `Trainer.save_states`, which are checked when they are loaded. It is not
    sharded; for sharded states use the optimizers of `tristep.optim` with `torch.distributed.checkpoint.state_dict`.

    Args:
        trainer: the trainer. Save the model's weights separately.

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
        instance("trainer", trainer, Trainer, "a tristep.Trainer")
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        """Return the trainer's state as one entry, the bytes of a safetensors file; b"" on ranks that write no file."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "trainer.safetensors")
            self._trainer.save_states(path)
            return {"safetensors": path.read_bytes() if path.exists() else b""}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the trainer's state from a result of `state_dict`.

        Raises:
            TypeError, ValueError: `state_dict` has no bytes of a state file, is damaged, or does not fit the trainer;
                nothing has been changed.
        """
        value: Any = state_dict.get("safetensors")
        instance("saved state: 'safetensors'", value, bytes, "the bytes of a file")
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "trainer.safetensors")
            path.write_bytes(value)
            self._trainer.load_states(path)
