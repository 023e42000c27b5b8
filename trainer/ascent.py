"""Sharpness-aware minimization, and evaluation with averaged weights: weights that are moved, and moved back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from ..kernels import rules
from .displaced import DisplacedWeights
from .optimizer import Updater
from .params import listed
from .step import Stepper

__all__ = ["ascend", "averaged_weights", "refuse_written"]


def ascend(stepper: Stepper, updater: Updater, rho: float, adaptive: bool) -> DisplacedWeights:
    """Move the weights of the only replica up their gradients, and use these up.

    Args:
        stepper, updater: those of the trainer.
        rho, adaptive: see `Trainer.ascend`.

    Returns:
        What restores the weights.

    Raises:
        StaleGradientError: some parameters have no fresh gradient; nothing has been changed.
    """
    stepper.check_initialized()
    choice, replica = stepper.choose(ignore_stale_grad=False), stepper.replicas[0]
    gradients = choice.collected[0].gradients if choice.chosen is None else replica.gradients(choice.chosen)
    ascended = DisplacedWeights(stepper.replicas)
    hyper = {"rho": rho, "adaptive": float(adaptive)}
    updater.apply(rules.ascent, hyper, range(len(replica.params)), replica.params, gradients)
    ascended.mark()
    replica.guard.use(gradients)
    return ascended


def refuse_written(names: list[str]) -> NoReturn:
    """The error for weights that were written to after `ascend`, which a step would overwrite."""
    raise RuntimeError(
        f"{listed(names)} written to between ascend() and step(), which would restore the weights from before: "
        "they stay as they have been written, and the ascent is forgotten; take gradients there, and step again"
    )


@contextmanager
def averaged_weights(stepper: Stepper, average: tuple[Any, Any]) -> Iterator[None]:
    """A context in which the replicas have their averaged weights.

    Args:
        stepper: that of the trainer.
        average: the rule that computes them, and its hyper-parameters.

    Raises:
        RuntimeError: on leaving, the weights were written to inside; they are restored.
    """
    stepper.start()
    stepper.sync.follow_weights()
    displaced = DisplacedWeights(stepper.replicas)
    if stepper.sync.updates:
        stepper.sync.apply(*average)
    else:
        for replica in stepper.replicas:
            replica.updater.apply(*average, range(len(replica.params)), replica.params)
    displaced.mark()
    try:
        yield
        written = displaced.written()
    finally:
        displaced.restore()
    if written:
        raise RuntimeError(
            f"{listed(written)} written to inside averaged_weights(), which shows an average and then restores the "
            "weights from before: these are there again, what was written is gone; write to weights outside"
        )
