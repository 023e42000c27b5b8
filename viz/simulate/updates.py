"""The quantities inside single updates (gradient, states and step), and the source of update rules."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ...kernels import Rule
from ...trainer.optimizer import Optimizer, RuleOptimizer, create
from ...trainer.validation import instance
from .candidates import one_optimizer
from .functions import Function
from .presets import named
from .trajectories import Simulation, one_start

__all__ = ["UpdateTrace", "rule_source", "trace_updates"]


@dataclass(frozen=True)
class UpdateTrace:
    """The quantities inside consecutive updates of one optimizer, as returned by `trace_updates`.

    Attributes:
        points: float32 [steps + 1, 2], the points before each update and after the last.
        losses: float32 [steps + 1], the function's values at the points.
        gradients: float32 [steps, 2], with the function's noise, if it has any.
        states: the states of the rule by name, each float32 [steps + 1, 2], before each update and after the last; a state
            with one number per tensor is [steps + 1].
        updates: float32 [steps, 2], the differences that were added to the point.
        preconditioners: float32 [steps, 2], the factor of each coordinate: minus the update, divided by the average "mean"
            of the gradients if the rule has one, else by the gradient. NaN where the divisor is 0. None if the rule has no
            nonnegative state, and so does not scale coordinates separately.
    """

    points: np.ndarray
    losses: np.ndarray
    gradients: np.ndarray
    states: dict[str, np.ndarray]
    updates: np.ndarray
    preconditioners: np.ndarray | None


def trace_updates(
    on: str | Function | Callable[[torch.Tensor], torch.Tensor],
    optimizer: Any,
    start: Any = None,
    steps: int = 1,
    *,
    seed: int = 0,
    engine: str | None = None,
) -> UpdateTrace:
    """Take steps from one point, and return the gradient, states, preconditioner and update of each step.

    Args:
        on, seed, engine: as for `simulate`.
        optimizer: a name, a dict of arguments with the name under "optimizer", an `Optimizer` or its class.
        start: one point (x, y); None for the function's own start.
        steps: the number of steps, >= 1.

    Raises:
        TypeError: the optimizer is not a `RuleOptimizer`; the states of other optimizers have no names.

    Example:
        >>> from tristep.viz import trace_updates
        >>> found = trace_updates("ill_conditioned_bowl", {"optimizer": "adam", "learning_rate": 0.1}, start=(1.0, 1.0))
        >>> found.gradients[0].tolist(), sorted(found.states), found.states["mean"].round(3).tolist()
        ([1.0, 100.0], ['mean', 'var'], [[0.0, 0.0], [0.10000000149011612, 10.0]])
    """
    simulation = Simulation(on, one_optimizer(optimizer), steps, seed=seed, engine=engine)
    steps, trained = simulation.steps, simulation.candidates[0].trainings[0]
    if not isinstance(trained, RuleOptimizer):
        raise TypeError(f"{simulation.candidates[0].name} is no optimizer by a rule, whose states have names")
    rule = trained.composed_rule
    points, losses = np.empty((steps + 1, 2), np.float32), np.empty(steps + 1, np.float32)
    gradients = np.empty((steps, 2), np.float32)
    by_slot: dict[str, list[np.ndarray]] = {name: [] for name in rule.slots}
    starts = np.array([one_start(simulation.function, start)], np.float32)
    for t, (x, y, loss, dx, dy) in enumerate(simulation.walk(starts)):
        points[t], losses[t : t + 1] = (x[0], y[0]), loss
        for name, state in zip(rule.slots, simulation.states(), strict=True):
            by_slot[name].append(state)
        if t < steps:
            gradients[t] = dx[0], dy[0]
    states = {name: np.stack(each) for name, each in by_slot.items()}
    with np.errstate(invalid="ignore"):  # of points that have diverged
        updates = np.diff(points, axis=0)
    preconditioners = None
    if isinstance(rule, Rule) and rule.nonnegative:
        direction = states["mean"][1:] if "mean" in rule.state and "mean" not in rule.full_precision else gradients
        with np.errstate(divide="ignore", invalid="ignore"):
            preconditioners = np.where(direction == 0, np.float32(np.nan), -updates / direction)
    return UpdateTrace(points, losses, gradients, states, updates, preconditioners)


def rule_source(optimizer: Any) -> str:
    """Return the source text of an optimizer's update rule, as it is compiled, with its docstring.

    Args:
        optimizer: a name, an `Optimizer` or its class.

    Raises:
        TypeError: the argument is not an optimizer of this library.
        OSError: the source cannot be found.

    Example:
        >>> from tristep.viz import rule_source
        >>> print(rule_source("sgd").splitlines()[1])
        def sgd(w, g, state, hyper):
    """
    kind = named(optimizer, {})[0] if isinstance(optimizer, str) else optimizer
    made = create(kind) if isinstance(kind, str) else kind() if isinstance(kind, type) else kind
    instance("optimizer", made, Optimizer, "a name, an Optimizer or its class")
    if isinstance(made, RuleOptimizer):
        return inspect.getsource(inspect.unwrap(made.rule.fn))
    return inspect.getsource(type(made).update)
