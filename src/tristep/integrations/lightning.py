"""Lightning: a callback that records and shows the training; `configure_optimizers` may return any optimizers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

try:
    from lightning.pytorch import Callback
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "tristep.integrations.lightning needs lightning, which is missing: pip install lightning", name=error.name
    ) from error

if TYPE_CHECKING:
    from ..viz import Recorder, Run, View

__all__ = ["TristepCallback"]


class TristepCallback(Callback):
    """A callback that records a training of `lightning.Trainer`, and shows it live in a notebook.

    It records the loss that `training_step` returns, as a mean over accumulated batches, and after each validation the
    numbers of `self.log` by name. Norms of gradients are taken after clipping. Skipped steps, as with float16, are not
    recorded. After a resumed checkpoint, steps have Lightning's numbers.

    Args:
        name: the name of the run.
        every: record the parameters at the first step and then at every k-th, which reads all weights and gradients.
        view: the view in a notebook: "live" for a `tristep.viz.Dashboard`, a function or class that makes a `View` of the
            `tristep.viz.Recorder`, or None.
        optimizer: the index of the recorded optimizer, if `configure_optimizers` returns several.

    Raises:
        TypeError: `view` is something else.
    """

    def __init__(
        self,
        name: str = "run",
        *,
        every: int = 16,
        view: Callable[[Recorder], View] | str | None = "live",
        optimizer: int = 0,
    ) -> None:
        from .recording import FollowedTraining  # needs the `notebook` extra

        self._followed = FollowedTraining(name, every, view)
        self._optimizer = optimizer
        self._loss: torch.Tensor | None = None

    @property
    def run(self) -> Run:
        """The recorded `tristep.viz.Run`. Raises RuntimeError before training has begun."""
        return self._followed.run

    @property
    def view(self) -> View | None:
        """The `View` in the notebook, or None."""
        return self._followed.view

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        optimizers = trainer.optimizers
        if not 0 <= self._optimizer < len(optimizers):
            raise ValueError(f"optimizer={self._optimizer}: configure_optimizers returned {len(optimizers)}, counted from 0")
        self._loss = None
        last_step = trainer.global_step // len(optimizers)  # Lightning counts the steps of all optimizers
        self._followed.begin(optimizers[self._optimizer], pl_module, last_step, trainer.is_global_zero)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if loss is not None:  # already divided by the number of accumulated batches
            self._loss = loss.detach() if self._loss is None else self._loss + loss.detach()
        recorder = self._followed.recorder
        if recorder is not None and recorder.due:
            self._followed.step(**({} if self._loss is None else {"loss": self._loss}))
            self._loss = None

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        recorder = self._followed.recorder
        if trainer.sanity_checking or recorder is None or not recorder.last_step:
            return
        step, run = recorder.last_step, recorder.run
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items() if name not in _OWN}
        recorded = {name for name, series in run.scalars.items() if series.last_step == step}
        run.add_scalars(step, {name: value for name, value in metrics.items() if name not in recorded})

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._followed.end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._followed.end()


_OWN = ("loss", "learning_rate")  # recorded at each step
