"""Single updates from the inside: gradient, states and step, and the text of the rule."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ...kernels import Rule
from ...trainer.optimizer import Optimizer, RuleOptimizer, create
from ...trainer.presets import named
from .candidates import one_optimizer
from .functions import Function
from .trajectories import Simulation, one_start

__all__ = ["UpdateTrace", "rule_source", "trace_updates"]


@dataclass(frozen=True)
class UpdateTrace:
    """What went on inside some updates, one after the other, each read off the training itself.

    Attributes:
        points: float32 [steps + 1, 2].
        losses: float32 [steps + 1].
        gradients: float32 [steps, 2], with the function's noise, if it has any.
        states: for each state of the rule by name: float32 [steps + 1, 2], before each update and after the last; numbers
            that are kept for a whole tensor are [steps + 1].
        updates: float32 [steps, 2], what was added to the point.
        preconditioners: float32 [steps, 2], by what each coordinate was multiplied that the update is made of: the average
            "mean" of gradients where the rule has one, else the gradient. NaN where that is 0. None where the rule has no
            state that is never negative, and so nothing that scales coordinates one by one.
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
    """Take some steps from one point, and keep what an update consists of: gradient, states, preconditioner and step.

    Args:
        on, start, seed, engine: as for `simulate`, `start` being one point.
        optimizer: a name, a dict of arguments with "optimizer" among them, an `Optimizer` or its class.
        steps: >= 1.

    Raises:
        TypeError: the optimizer is none of ours, whose states have names.

    Example:
        >>> from tristep.viz import trace_updates
        >>> found = trace_updates("ill_conditioned_bowl", {"optimizer": "adam", "learning_rate": 0.1}, start=(1.0, 1.0))
        >>> found.gradients[0].tolist(), sorted(found.states), found.states["mean"].round(3).tolist()
        ([1.0, 100.0], ['mean', 'var'], [[0.0, 0.0], [0.10000000149011612, 10.0]])
    """
    simulation = Simulation(on, one_optimizer(optimizer), steps, seed=seed, engine=engine)
    steps, own = simulation.steps, simulation.candidates[0].trainings[0]
    if not isinstance(own, RuleOptimizer):
        raise TypeError(f"{simulation.candidates[0].name} is no optimizer by a rule, whose states have names")
    rule = own.composed_rule
    points, losses = np.empty((steps + 1, 2), np.float32), np.empty(steps + 1, np.float32)
    gradients = np.empty((steps, 2), np.float32)
    kept: dict[str, list[np.ndarray]] = {name: [] for name in rule.slots}
    starts = np.array([one_start(simulation.function, start)], np.float32)
    for t, (x, y, loss, dx, dy) in enumerate(simulation.walk(starts, simulation.noise(1))):
        points[t], losses[t : t + 1] = (x[0], y[0]), loss
        for name, state in zip(rule.slots, simulation.states(), strict=True):
            kept[name].append(state)
        if t < steps:
            gradients[t] = dx[0], dy[0]
    states = {name: np.stack(each) for name, each in kept.items()}
    updates = np.diff(points, axis=0)
    preconditioners = None
    if isinstance(rule, Rule) and rule.nonnegative:
        direction = states["mean"][1:] if "mean" in rule.state and "mean" not in rule.full_precision else gradients
        with np.errstate(divide="ignore", invalid="ignore"):
            preconditioners = np.where(direction == 0, np.float32(np.nan), -updates / direction)
    return UpdateTrace(points, losses, gradients, states, updates, preconditioners)


def rule_source(optimizer: Any) -> str:
    """The text of an optimizer's update rule, as it is compiled, with its docstring.

    Args:
        optimizer: a name, an `Optimizer` or its class.

    Raises:
        TypeError: it is none of ours.
        OSError: the source cannot be found.

    Example:
        >>> from tristep.viz import rule_source
        >>> print(rule_source("sgd").splitlines()[1])
        def sgd(w, g, state, hyper):
    """
    kind = named(optimizer, {})[0] if isinstance(optimizer, str) else optimizer
    own = create(kind) if isinstance(kind, str) else kind() if isinstance(kind, type) else kind
    if not isinstance(own, Optimizer):
        raise TypeError(f"optimizer must be a name, an Optimizer or its class, got {type(optimizer).__name__}")
    if isinstance(own, RuleOptimizer):
        return inspect.getsource(inspect.unwrap(own.rule.fn))
    return inspect.getsource(type(own).update)
