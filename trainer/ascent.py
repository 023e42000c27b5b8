"""Sharpness-aware minimization, and evaluation with averaged weights: weights that are moved, and moved back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

from ..kernels import Rule, rules
from .displaced import DisplacedWeights
from .interrupts import interrupts_wait
from .optimizer import Optimizer, RuleOptimizer, Updater
from .optimizer.multi import part_of, parts_of
from .params import listed
from .step import Stepper

__all__ = ["ascend", "averaged_weights", "averages_of", "refuse_written"]


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


def averages_of(optimizer: Optimizer) -> list[tuple[Rule, dict[str, float], list[int]]]:
    """The rules that compute averaged weights, with their hyper-parameters and the indices of the parameters.

    Raises:
        ValueError: the optimizer, or each of several, keeps no average.
    """
    found = []
    for part in parts_of(optimizer):
        average = part.average_in_use() if isinstance(part, RuleOptimizer) else None
        if average is not None:
            found.append((*average, [i for i in optimizer.param_names if part_of(optimizer, i) is part]))
    if not found:
        names = " and ".join(type(part).__name__ for part in parts_of(optimizer))
        raise ValueError(f"{names} keeps no averaged weights: give it ema_decay=0.999, say")
    return found  # type: ignore[return-value]  # a Trainer's indices are integers


@contextmanager
def averaged_weights(stepper: Stepper, averages: Sequence[tuple[Any, Any, list[int]]]) -> Iterator[None]:
    """A context in which the replicas have their averaged weights.

    Args:
        stepper: that of the trainer.
        averages: as `averages_of` gives them.

    Raises:
        RuntimeError: on leaving, the weights were written to inside; they are restored.
    """
    stepper.start()
    stepper.sync.follow_weights()
    displaced = DisplacedWeights(stepper.replicas)
    try:
        try:
            with interrupts_wait():
                if stepper.sync.updates:
                    for average in averages:
                        stepper.sync.apply(*average)
                else:
                    for replica in stepper.replicas:
                        for rule, hyper, indices in averages:
                            replica.updater.apply(rule, hyper, indices, [replica.params[i] for i in indices])
                displaced.mark()
            yield
            written = displaced.written()
        finally:
            displaced.restore()
    except KeyboardInterrupt:  # which may have come just before that lets interrupts wait
        displaced.restore()
        raise
    if written:
        raise RuntimeError(
            f"{listed(written)} written to inside averaged_weights(), which shows an average and then restores the "
            "weights from before: these are there again, what was written is gone; write to weights outside"
        )
