"""Races of optimizers on functions of two variables, with the library's own rules: paths, best rates, basins, inner steps.

All is plain arrays; the views draw them. The points of a race are the weights of many small trainings, which are updated as
any other weights are.
"""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from ..kernels import Rule
from ..trainer.arguments import choice, real, whole
from ..trainer.interrupts import interrupts_wait
from ..trainer.many import Many, make_optimizer
from ..trainer.optimizer import Optimizer, RuleOptimizer, create
from ..trainer.optimizer.counts import StepCounts
from .functions import Function, Minimum, function

__all__ = [
    "Basins",
    "InnerSteps",
    "Race",
    "Sensitivity",
    "Setting",
    "Simulation",
    "basin_map",
    "best_rates",
    "inner_steps",
    "rule_source",
    "settings_of",
    "simulate",
]

RATES = tuple(np.logspace(-4, 1, 41).tolist())  # among which a best one is looked for; eight in a decade
FAR = 100.0  # times half the drawn width from its middle: who gets there has diverged
ASTRAY = 2.0  # the same for `best_rates`, where that would be no good rate even if the path comes back
CHUNK = 16384  # points of a basin map at a time: what a step touches is to stay in a cache, but numpy's calls have a price
EVERY = 4  # steps of a basin map between two looks at who has arrived


@dataclass(frozen=True)
class Race:
    """What `simulate` found. The axes of its arrays are optimizers, values, starts, and steps from 0, the start itself.

    Attributes:
        function: what was raced on.
        names: of the optimizers.
        values: for each value what was varied, such as {"learning_rate": 0.1}; one empty dict if nothing was.
        learning_rates: float64 [n_optimizers, n_values], those in use at the first step; NaN of a callable without one.
        starts: float32 [n_starts, 2].
        paths: float32 [n_optimizers, n_values, n_starts, steps + 1, 2].
        losses: float32 [n_optimizers, n_values, n_starts, steps + 1], without noise.
        diverged: bool [n_optimizers, n_values, n_starts]: whether a path or loss became infinite or NaN, or a path got
            farther from the middle of what is drawn than 100 times half its size.
    """

    function: Function
    names: tuple[str, ...]
    values: tuple[dict[str, Any], ...]
    learning_rates: np.ndarray
    starts: np.ndarray
    paths: np.ndarray
    losses: np.ndarray
    diverged: np.ndarray

    @property
    def steps(self) -> int:
        return self.losses.shape[-1] - 1

    def __repr__(self) -> str:
        _, v, s, _ = self.losses.shape
        return f"<race on {self.function.name}: {', '.join(self.names)}; {v} values, {s} starts, {self.steps} steps>"


def simulate(
    on: str | Function | Callable[[torch.Tensor], torch.Tensor],
    optimizers: Any,
    start: Any = None,
    steps: int = 200,
    *,
    learning_rates: Sequence[float] | None = None,
    relative: bool = False,
    sweep: Mapping[str, Sequence[Any]] | None = None,
    seed: int = 0,
    engine: str | None = None,
) -> Race:
    """Let optimizers run on a function of two variables, each with all values of what is varied, from all starts.

    Args:
        on: as for `function`.
        optimizers: names, such as ["sgd", "adam"]; or a mapping from labels to what is to run: a dict of arguments, with the
            optimizer's name under "optimizer" unless that is the label; an `Optimizer` or its class; a class of torch's, or
            a functools.partial of one; or a callable `(point, gradient, state, lr) -> new point` of tensors [2], with
            a dict of its own as `state`. Instances, torch's and callables can be "optimizer" of a dict, too, with only a
            "learning_rate" beside it. The last two kinds are run one by one, which is slow.
        start: (x, y), or [n_starts, 2]; the function's own if left out.
        steps: >= 1.
        learning_rates: those to try, each with every optimizer; None for each one's own.
        relative: whether `learning_rates` are factors of each one's own.
        sweep: other arguments to try, as {"beta1": [0.5, 0.9]}; combined with each other and with the rates, the first
            named varying slowest and rates fastest.
        seed: of the function's noise, if it has any. At the same step from the same start all get the same noise.
        engine: as for `tristep.kernels.choose_engine`, on the CPU.

    Raises:
        TypeError, ValueError: what does not fit.

    Example:
        >>> from tristep.viz import simulate
        >>> race = simulate("ill_conditioned_bowl", ["sgd", "adam"], steps=100, learning_rates=[0.001, 0.01, 0.1])
        >>> race.paths.shape
        (2, 3, 1, 101, 2)
        >>> race.diverged[:, :, 0].tolist()
        [[False, False, True], [False, False, False]]
    """
    return Simulation(
        on, optimizers, steps, learning_rates=learning_rates, relative=relative, sweep=sweep, seed=seed, engine=engine
    ).run(start)


class Simulation:
    """What `simulate` does, made ready once for races from many starts one after the other, as when a start is dragged.

    Args:
        on, optimizers, steps, learning_rates, relative, sweep, seed, engine: as for `simulate`.

    Raises:
        TypeError, ValueError: what does not fit.

    Example:
        >>> from tristep.viz.simulate import Simulation
        >>> simulation = Simulation("ill_conditioned_bowl", ["sgd", "adam"], steps=100, learning_rates=[0.001, 0.01])
        >>> simulation.run((1.0, 1.0)).paths.shape, simulation.run((2.0, 1.0)).starts.tolist()
        ((2, 2, 1, 101, 2), [[2.0, 1.0]])
    """

    def __init__(
        self,
        on: str | Function | Callable[[torch.Tensor], torch.Tensor],
        optimizers: Any,
        steps: int = 200,
        *,
        learning_rates: Sequence[float] | None = None,
        relative: bool = False,
        sweep: Mapping[str, Sequence[Any]] | None = None,
        seed: int = 0,
        engine: str | None = None,
    ) -> None:
        self.function = function(on)
        self.steps, self._seed, self._engine = whole("steps", steps, low=1), whole("seed", seed, low=0), engine
        self._values, self._relative = _values(learning_rates, sweep), relative
        self._given = _named(optimizers)
        self._entrants: list[_Entrant] | None = self._enter()
        self._runners: list[_Runner] = []
        self._n_starts = 0

    def run(self, start: Any = None) -> Race:
        """The race from (x, y), or from [n_starts, 2]; from the function's own start if left out."""
        where, steps, starts = self.function, self.steps, _starts(self.function, start)
        entrants = self._make_ready(starts)
        runners = self._runners
        n, v, s = len(entrants), len(self._values), len(starts)
        noise = _noise(where, self._seed, steps, s)
        points = np.empty((steps + 1, 2, n * v * s), np.float32)
        losses = np.empty((steps + 1, n * v * s), np.float32)
        evaluate = where.evaluator((n * v * s,))
        x, y = np.empty(n * v * s, np.float32), np.empty(n * v * s, np.float32)
        stops = np.cumsum([runner.size for runner in runners])
        parts = [slice(stop - runner.size, stop) for runner, stop in zip(runners, stops, strict=True)]
        for t in range(steps + 1):
            for runner, part in zip(runners, parts, strict=True):
                runner.read(x[part], y[part])
            points[t, 0], points[t, 1] = x, y
            losses[t], *slopes = evaluate(x, y)
            if t == steps:
                break
            if noise is not None:
                for slope, each in zip(slopes, noise[t], strict=True):
                    slope.reshape(-1, s)[:] += each
            with interrupts_wait():  # once for all runners, each of which would do it
                for runner, part in zip(runners, parts, strict=True):
                    runner.step(slopes[0][part], slopes[1][part])

        order = [entrant for kind in (True, False, None) for entrant in entrants if entrant.together is kind]
        back = [order.index(entrant) for entrant in entrants]  # no two are equal
        paths = np.ascontiguousarray(points.reshape(steps + 1, 2, n, v, s).transpose(2, 3, 4, 0, 1)[back])
        found = np.ascontiguousarray(losses.reshape(steps + 1, n, v, s).transpose(1, 2, 3, 0)[back])
        rates = np.array([entrant.rates for entrant in entrants])
        names = tuple(entrant.name for entrant in entrants)
        values = tuple(map(dict, self._values))
        return Race(where, names, values, rates, starts, paths, found, _diverged(where, paths, found))

    def _enter(self) -> list[_Entrant]:
        return [_Entrant(name, given, self._values, self._relative) for name, given in self._given.items()]

    def _make_ready(self, starts: np.ndarray) -> list[_Entrant]:
        """Put all runners at their starts: those of the race before where that can be done, else new ones."""
        entrants = self._entrants
        if self._runners:
            if entrants is not None and len(starts) == self._n_starts and all(r.restart(starts) for r in self._runners):
                return entrants
            entrants = None  # they have run
        self._entrants = entrants = self._enter() if entrants is None else entrants
        self._runners, self._n_starts = [], len(starts)
        for together in (True, False):
            trainings = [each for entrant in entrants if entrant.together is together for each in entrant.trainings]
            if trainings:
                self._runners.append(_Trainings(trainings, starts, together, self._engine))
        self._runners += [_OneByOne(entrant.trainings, starts) for entrant in entrants if entrant.together is None]
        return entrants


@dataclass(frozen=True)
class Sensitivity:
    """How the loss depends on the learning rate, and each optimizer's best one.

    Attributes:
        names: of the optimizers.
        learning_rates: float64 [n_rates].
        losses: float32 [n_optimizers, n_rates, n_starts], of each start; infinite where it diverged, or, with known minima,
            went astray: to twice as far from the middle of the map as its edge, or as its start beyond that.
        quartiles: float32 [n_optimizers, n_rates, 3], over starts: a quarter, half and three quarters of them are not above.
        best: float64 [n_optimizers], the rate whose median is the least; NaN where all are infinite.
        race: the paths at all of these rates.
    """

    names: tuple[str, ...]
    learning_rates: np.ndarray
    losses: np.ndarray
    quartiles: np.ndarray
    best: np.ndarray
    race: Race


def best_rates(
    on: str | Function | Callable[[torch.Tensor], torch.Tensor],
    optimizers: Any,
    start: Any = None,
    steps: int = 200,
    *,
    learning_rates: Sequence[float] = RATES,
    judged_by: str = "final",
    repeats: int = 1,
    seed: int = 0,
    engine: str | None = None,
) -> Sensitivity:
    """Try many rates with each optimizer, so that a race may be one of each at its best.

    Args:
        on, optimizers, start, steps, seed, engine: as for `simulate`.
        learning_rates: to try; by default 41 from 0.0001 to 10.
        judged_by: "final", the loss after the last step, or "best", the least of all steps.
        repeats: how often to start from each start, >= 1; only where the gradients are noisy do they differ.

    Example:
        >>> from tristep.viz import best_rates, simulate
        >>> found = best_rates("ill_conditioned_bowl", ["sgd"], learning_rates=[0.001, 0.01, 0.1])
        >>> float(found.best[0])
        0.01
        >>> at_best = {name: {"learning_rate": rate} for name, rate in zip(found.names, found.best)}
        >>> fair = simulate("ill_conditioned_bowl", at_best)
    """
    judged_by, repeats = choice("judged_by", judged_by, ("final", "best")), whole("repeats", repeats, low=1)
    starts = np.repeat(_starts(function(on), start), repeats, axis=0)
    race = simulate(on, optimizers, starts, steps, learning_rates=learning_rates, seed=seed, engine=engine)
    with np.errstate(invalid="ignore"):
        losses = race.losses[..., -1] if judged_by == "final" else np.fmin.reduce(race.losses, axis=-1)
    lost = race.diverged | np.isnan(losses)
    if race.function.minima:  # which are in what is drawn: no leap over them and back is to win
        begun = _farthest(race.function, race.starts[:, None])
        lost |= _farthest(race.function, race.paths) > ASTRAY * np.maximum(begun, 1)
    losses = np.where(lost, np.float32(np.inf), losses)
    ordered = np.sort(losses, axis=-1)
    n = losses.shape[-1]
    quartiles = ordered[..., [max(0, -(-n * k // 4) - 1) for k in (1, 2, 3)]]
    rates = np.array([value["learning_rate"] for value in race.values])
    median = quartiles[..., 1]
    best = np.where(np.isinf(median).all(axis=1), np.nan, rates[median.argmin(axis=1)])
    return Sensitivity(race.names, rates, losses, quartiles, best, race)


@dataclass(frozen=True)
class Basins:
    """Which minimum is reached from where.

    Attributes:
        function: what the optimizer ran on.
        x, y: float32 [n], the coordinates of the starts.
        minima: those that are told apart: the function's own, or, where it has none, those that were found.
        reached: int8 [n, n], by y and x: the place in `minima` of the one that the path ends at; -1 where it ends at none.
        steps: int32 [n, n], after how many steps the path was near that minimum for the first time, as looked at every 4
            steps; -1 where it ends at none.
        tolerance: how near is near, a distance.
    """

    function: Function
    x: np.ndarray
    y: np.ndarray
    minima: tuple[Minimum, ...]
    reached: np.ndarray
    steps: np.ndarray
    tolerance: float


def basin_map(
    on: str | Function | Callable[[torch.Tensor], torch.Tensor],
    optimizer: Any,
    n: int = 256,
    steps: int = 300,
    *,
    tolerance: float | None = None,
    seed: int = 0,
    engine: str | None = None,
) -> Basins:
    """Start from every point of a grid over the drawn part, and see at which minimum each path ends.

    Args:
        on, seed, engine: as for `simulate`.
        optimizer: one of what `simulate` takes: a name, a dict of arguments with "optimizer" among them, and so on.
        n: points in each direction, >= 2.
        steps: >= 1.
        tolerance: how near a minimum a path must end, > 0; by default a hundredth of the larger side.

    Example:
        >>> from tristep.viz import basin_map
        >>> found = basin_map("himmelblau", {"optimizer": "adam", "learning_rate": 0.1}, n=32)
        >>> sorted(set(found.reached.flatten().tolist()))
        [0, 1, 2, 3]
    """
    where, n, steps = function(on), whole("n", n, low=2), whole("steps", steps, low=1)
    side = max(high - low for low, high in (where.xlim, where.ylim))
    near = side / 100 if tolerance is None else real("tolerance", tolerance, above=0)
    label = optimizer if isinstance(optimizer, str) else "optimizer"
    xs, ys = np.linspace(*where.xlim, n, dtype=np.float32), np.linspace(*where.ylim, n, dtype=np.float32)
    starts = np.stack(np.meshgrid(xs, ys), axis=-1).reshape(-1, 2)
    ends = np.empty_like(starts)
    looks = np.array([t for t in range(steps + 1) if t % EVERY == 0 or t == steps])
    waited = np.zeros((len(where.minima), len(starts)), np.int32)  # looks until it was near
    parts = [slice(first, min(first + CHUNK, len(starts))) for first in range(0, len(starts), CHUNK)]
    snapshots: list[list[np.ndarray]] = [[] for _ in parts]
    noise = _noise(where, seed, steps, len(starts))

    runner: _Runner | None = None
    for k, part in enumerate(parts):
        chunk = starts[part]
        away = np.ones((len(where.minima), len(chunk)), bool)  # whether it has never been near
        count = len(chunk)
        if runner is None or count != runner.size or not runner.restart(chunk):
            own = _Entrant(label, {} if isinstance(optimizer, str) else optimizer, [{}], False)
            if own.together is None:
                runner = _OneByOne(own.trainings, chunk)
            else:
                runner = _Trainings(own.trainings, chunk, own.together, engine)
            evaluate, near_one = where.evaluator((count,)), _Near(count, near)
            x, y = np.empty(count, np.float32), np.empty(count, np.float32)
        for t in range(steps + 1):
            runner.read(x, y)
            if t % EVERY == 0 or t == steps:
                for minimum, never, looked in zip(where.minima, away, waited[:, part], strict=True):
                    np.greater(never, near_one(x, y, minimum), out=never)  # it was never near, and is not now
                    np.add(looked, never, out=looked)
                if not where.minima:
                    snapshots[k].append(np.stack([x, y]))
            if t == steps:
                break
            _, dx, dy = evaluate(x, y)
            if noise is not None:
                dx, dy = dx + noise[t, 0, part], dy + noise[t, 1, part]
            runner.step(dx, dy)
        ends[part, 0], ends[part, 1] = x, y

    minima, arrivals = where.minima, np.append(looks, steps + 1)[waited].astype(np.int32)
    if not minima:
        minima = _found_minima(where, starts, ends, near)
        arrivals = _arrivals(minima, snapshots, steps, near)
    reached, when = np.full(len(starts), -1, np.int8), np.full(len(starts), -1, np.int32)
    nearest = np.full(len(starts), np.inf, np.float32)
    for i, minimum in enumerate(minima):
        distance = np.hypot(ends[:, 0] - np.float32(minimum.x), ends[:, 1] - np.float32(minimum.y))
        mine = (distance <= near) & (distance < nearest)
        reached[mine], when[mine], nearest[mine] = i, arrivals[i][mine], distance[mine]
    return Basins(where, xs, ys, minima, reached.reshape(n, n), when.reshape(n, n), near)


@dataclass(frozen=True)
class InnerSteps:
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


def inner_steps(
    on: str | Function | Callable[[torch.Tensor], torch.Tensor],
    optimizer: Any,
    start: Any = None,
    steps: int = 1,
    *,
    seed: int = 0,
    engine: str | None = None,
) -> InnerSteps:
    """Take some steps from one point, and keep what an update consists of: gradient, states, preconditioner and step.

    Args:
        on, start, seed, engine: as for `simulate`, `start` being one point.
        optimizer: a name, a dict of arguments with "optimizer" among them, an `Optimizer` or its class.
        steps: >= 1.

    Raises:
        TypeError: the optimizer is none of ours, whose states have names.

    Example:
        >>> from tristep.viz import inner_steps
        >>> found = inner_steps("ill_conditioned_bowl", {"optimizer": "adam", "learning_rate": 0.1}, start=(1.0, 1.0))
        >>> found.gradients[0].tolist(), sorted(found.states), found.states["mean"].round(3).tolist()
        ([1.0, 100.0], ['mean', 'var'], [[0.0, 0.0], [0.10000000149011612, 10.0]])
    """
    where, steps = function(on), whole("steps", steps, low=1)
    starts = _starts(where, start)
    if len(starts) != 1:
        raise ValueError(f"start has {len(starts)} points: must be one, (x, y)")
    label = optimizer if isinstance(optimizer, str) else "optimizer"
    entrant = _Entrant(label, {} if isinstance(optimizer, str) else optimizer, [{}], False)
    own = entrant.trainings[0]
    if not isinstance(own, RuleOptimizer):
        raise TypeError(f"{entrant.name} is no optimizer by a rule, whose states have names")
    runner = _Trainings([own], starts, False, engine)
    noise, evaluate = _noise(where, seed, steps, 1), where.evaluator((1,))
    points, losses = np.empty((steps + 1, 2), np.float32), np.empty(steps + 1, np.float32)
    gradients = np.empty((steps, 2), np.float32)
    rule = own.composed_rule
    kept: dict[str, list[np.ndarray]] = {name: [] for name in rule.slots}
    x, y = np.empty(1, np.float32), np.empty(1, np.float32)
    for t in range(steps + 1):
        runner.read(x, y)
        points[t] = x[0], y[0]
        for name, state in zip(rule.slots, runner.states(0), strict=True):
            kept[name].append(state.detach().float().numpy().copy())
        losses[t : t + 1], dx, dy = evaluate(x, y)
        if t < steps:
            if noise is not None:
                dx, dy = dx + noise[t, 0], dy + noise[t, 1]
            gradients[t] = dx[0], dy[0]
            runner.step(dx, dy)
    states = {name: np.stack(each) for name, each in kept.items()}
    updates = np.diff(points, axis=0)
    preconditioners = None
    if isinstance(rule, Rule) and rule.nonnegative:
        direction = states["mean"][1:] if "mean" in rule.state and "mean" not in rule.full_precision else gradients
        with np.errstate(divide="ignore", invalid="ignore"):
            preconditioners = np.where(direction == 0, np.float32(np.nan), -updates / direction)
    return InnerSteps(points, losses, gradients, states, updates, preconditioners)


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
    own = create(optimizer) if isinstance(optimizer, str) else optimizer() if isinstance(optimizer, type) else optimizer
    if not isinstance(own, Optimizer):
        raise TypeError(f"optimizer must be a name, an Optimizer or its class, got {type(optimizer).__name__}")
    if isinstance(own, RuleOptimizer):
        return inspect.getsource(inspect.unwrap(own.rule.fn))
    return inspect.getsource(type(own).update)


class Setting(NamedTuple):
    """A hyper-parameter, for a slider.

    Attributes:
        name: of the argument.
        default: its default.
        low, high: the slider's ends.
        scale: "log", for positive numbers; "zero and log", the same with 0 before it; "below one", for decays of averages,
            whose distance from 1 is what counts; "above one", the same on the other side; "linear"; "whole"; or "flag".
        values: the slider's positions, increasing, the default among them.
    """

    name: str
    default: Any
    low: Any
    high: Any
    scale: str
    values: tuple[Any, ...]


def settings_of(optimizer: str | type[Optimizer]) -> list[Setting]:
    """The hyper-parameters of an optimizer that a slider can move, found by asking its constructor.

    Arguments come in the constructor's order, then `wd` where it may be other than 0. Names of strategies, and numbers that
    may be missing, are left out.

    Args:
        optimizer: a registered name, or a class.

    Raises:
        ValueError: no optimizer is registered by that name.

    Example:
        >>> from tristep.viz import settings_of
        >>> [(setting.name, setting.default, setting.scale) for setting in settings_of("adam")]
        ... # doctest: +NORMALIZE_WHITESPACE
        [('learning_rate', 0.001, 'log'), ('beta1', 0.9, 'below one'), ('beta2', 0.999, 'below one'),
         ('epsilon', 1e-08, 'log'), ('lazy_update', True, 'flag'), ('wd', 0.0, 'zero and log')]
    """
    plain = create(optimizer) if isinstance(optimizer, str) else optimizer()
    klass = type(plain)
    used = set(plain.rule.hyper) if isinstance(plain, RuleOptimizer) else {"lr", "wd"}
    own = klass.__init__ not in (RuleOptimizer.__init__, Optimizer.__init__)
    parameters = inspect.signature(klass.__init__).parameters.items() if own else ()
    defaults = {argument: parameter.default for argument, parameter in parameters}
    if "learning_rate" in defaults or (not own and "lr" in used):
        defaults["learning_rate"] = plain.lr
    if used & {"wd", "decay"}:
        defaults["wd"] = plain.wd
    found = [_setting(klass, argument, each) for argument, each in defaults.items() if isinstance(each, (bool, int, float))]
    return [setting for setting in found if len(setting.values) > 1]


# What takes part in a race.
class _Entrant:
    """One optimizer with all values of what is varied: a training for each.

    Attributes:
        together: whether a training's starts may be one weight, as rules of single elements let them; None where `Many` does
            not update them.
        trainings: for each value an optimizer, or what `_OneByOne` takes.
        rates: for each value the learning rate.
    """

    def __init__(self, name: str, given: Any, values: Sequence[Mapping[str, Any]], relative: bool) -> None:
        self.name = name
        self.together: bool | None = None
        self.trainings: list[Any] = []
        self.rates: list[float] = []
        known: Mapping[str, Any] = {}
        makes: list[Any] = []  # those that are no copies of others
        plain = 1.0  # what rates of copies are relative to
        for value in values:
            before = makes[-1] if makes and _differ_in_rate(value, known) else None
            if isinstance(before, Optimizer) and before.lr_scheduler is None:
                own = _fresh_copy(before)
                own.lr = value["learning_rate"] * plain if relative else value["learning_rate"]  # which has been checked
                rate = own.lr
            else:
                own, rate = self._make(given, value, relative)
                known = value
                makes.append(own)
                if relative and isinstance(own, Optimizer) and own.lr_scheduler is None:
                    plain = self._make(given, {k: v for k, v in value.items() if k != "learning_rate"}, False)[0].lr
            self.trainings.append(own)
            self.rates.append(rate)
        if isinstance(makes[0], Optimizer):
            self.together = all(map(_is_elementwise, makes))

    def _make(self, given: Any, value: Mapping[str, Any], relative: bool) -> tuple[Any, float]:
        others = {k: v for k, v in value.items() if k != "learning_rate"}
        rate = value.get("learning_rate")
        if isinstance(given, type) and issubclass(given, Optimizer):
            given = {"optimizer": given}
        if isinstance(given, Mapping):
            kind = given.get("optimizer", self.name)
            if isinstance(kind, str) or (isinstance(kind, type) and issubclass(kind, Optimizer)):
                return self._ours(dict(given), others, rate, relative)
            for name in given:
                if name not in ("optimizer", "learning_rate"):
                    raise TypeError(f"{self.name}: {name} is for names and classes of optimizers, not for {kind!r}")
            if "learning_rate" in given:
                own_rate = given["learning_rate"]
                rate, relative = own_rate if rate is None else rate * own_rate if relative else rate, False
            given = kind
        if isinstance(given, Optimizer):
            if others:
                raise TypeError(
                    f"{self.name} is an optimizer that is made already, so {next(iter(others))} cannot be varied"
                )
            own = copy.deepcopy(given)
            if rate is not None:
                rate = rate * (own.lr if own.lr_scheduler is None else own.lr_scheduler.base_lr) if relative else rate  # type: ignore[attr-defined]
                _set_rate(own, real("learning_rate", rate, low=0))
            return own, own.rate_at(1)
        partial = given if isinstance(given, functools.partial) else functools.partial(given) if callable(given) else None
        if partial is not None and isinstance(partial.func, type) and issubclass(partial.func, torch.optim.Optimizer):
            before = partial.keywords.get("lr", _default(partial.func, "lr"))
            chosen = before if rate is None else rate * before if relative else rate
            keywords = {} if chosen is None else {"lr": chosen}
            return _Torch(functools.partial(partial, **keywords, **others)), float("nan") if chosen is None else float(
                chosen
            )
        if partial is not None:
            if others:
                raise TypeError(f"{self.name} is a plain callable, so {next(iter(others))} cannot be varied")
            before = _default(partial, "lr")
            before = 0.01 if before is None else before
            chosen = before if rate is None else rate * before if relative else rate
            return _Plain(partial, chosen), chosen
        raise TypeError(
            f"{self.name}: must be a dict of arguments, an Optimizer or its class, a class of torch.optim or a "
            f"callable, got {type(given).__name__}"
        )

    def _ours(
        self, arguments: dict[str, Any], others: dict[str, Any], rate: float | None, relative: bool
    ) -> tuple[Any, float]:
        kind = arguments.pop("optimizer", self.name)
        if rate is not None and relative:
            plain = make_optimizer(kind, arguments | others)
            rate *= plain.lr if plain.lr_scheduler is None else plain.lr_scheduler.base_lr  # type: ignore[attr-defined]
        own = make_optimizer(kind, arguments | others | ({} if rate is None else {"learning_rate": rate}))
        return own, own.rate_at(1)


def _differ_in_rate(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    if "learning_rate" not in a or a.keys() != b.keys():
        return False
    return len(a) == 1 or all(a[k] is b[k] for k in a if k != "learning_rate")


def _fresh_copy(own: Optimizer) -> Optimizer:
    """Another one of the same settings; neither has updated anything yet."""
    other = object.__new__(type(own))  # copy.copy takes ten times as long, which there are hundreds of
    vars(other).update(vars(own), step_counts=StepCounts(own.begin_num_update))
    return other


def _set_rate(own: Optimizer, rate: float) -> None:
    schedule: Any = own.lr_scheduler
    if schedule is None:
        own.set_learning_rate(rate)
    elif hasattr(schedule, "base_lr"):
        schedule.base_lr = rate
    else:
        raise TypeError(f"learning_rates beside {schedule!r}, which decides the rate and has no base_lr")


class _Torch(NamedTuple):
    """A torch optimizer, as a function that makes one of parameters."""

    make: Callable[..., torch.optim.Optimizer]


class _Plain(NamedTuple):
    """A plain callable from point, gradient, state and rate to the new point."""

    update: Callable[..., torch.Tensor]
    rate: float


class _Trainings:
    """Points as the weights of trainings, which `Many` steps. Each has all starts in one weight, or one for each.

    Attributes:
        size: how many points there are.
    """

    def __init__(self, optimizers: Sequence[Optimizer], starts: np.ndarray, together: bool, engine: str | None) -> None:
        if not together:
            optimizers = [copy.deepcopy(each) for each in optimizers for _ in range(len(starts))]
        n, count = len(optimizers), len(starts)
        self.size = n * count if together else n
        # Rows that begin at multiples of 16 bytes, so that all go into one launch.
        width = count + count % 2 if together else 2
        weights, gradients = np.zeros((2, n, 2, width), np.float32)
        if together:
            self._points, self._slopes = weights[:, :, :count], gradients[:, :, :count]
        else:
            weights, gradients = weights[:, 0], gradients[:, 0]
            self._points, self._slopes = weights[:, :, None], gradients[:, :, None]
        self._set(starts)
        self._many = Many(optimizers, [torch.from_numpy(weights)], engine, stacked=True)
        self._given = [torch.from_numpy(gradients)]
        self._steps: Iterator[None] | None = None  # those after the first

    def restart(self, starts: np.ndarray) -> bool:
        """Begin anew at as many starts; False where it cannot be done."""
        self._set(starts)
        return self._many.restart()

    def _set(self, starts: np.ndarray) -> None:
        count, n = len(starts), len(self._points)
        if self._points.shape[-1] == count:
            self._points[:] = starts.T
        else:
            self._points[:, :, 0] = np.tile(starts, (n // count, 1))

    def read(self, x: np.ndarray, y: np.ndarray) -> None:
        """Put where the points are into these arrays [size]."""
        n = len(self._points)
        x.reshape(n, -1)[:], y.reshape(n, -1)[:] = self._points[:, 0], self._points[:, 1]

    def step(self, dx: np.ndarray, dy: np.ndarray) -> None:
        n = len(self._points)
        self._slopes[:, 0], self._slopes[:, 1] = dx.reshape(n, -1), dy.reshape(n, -1)
        if self._steps is None:
            self._many.step(self._given)
            self._steps = self._many.steps()
        else:
            next(self._steps)

    def states(self, training: int) -> tuple[torch.Tensor, ...]:
        return self._many.updaters[training].states[0]


class _OneByOne:
    """Points that are updated each by itself, by torch's optimizers or plain callables."""

    def __init__(self, made: Sequence[Any], starts: np.ndarray) -> None:
        self.size = len(made) * len(starts)
        self._points = [torch.from_numpy(start.copy()) for _ in made for start in starts]
        self._steps: list[Callable[[], object]] = []
        for i, point in enumerate(self._points):
            own = made[i // len(starts)]
            if isinstance(own, _Torch):
                point.requires_grad_()
                self._steps.append(own.make([point]).step)
            else:
                self._steps.append(functools.partial(_move, own, point, {}))

    def restart(self, starts: np.ndarray) -> bool:
        return False  # what they carry on is theirs

    def read(self, x: np.ndarray, y: np.ndarray) -> None:
        x[:], y[:] = torch.stack(self._points).detach().numpy().T

    def step(self, dx: np.ndarray, dy: np.ndarray) -> None:
        gradients = torch.from_numpy(np.stack([dx, dy], axis=-1))
        for point, gradient, step in zip(self._points, gradients, self._steps, strict=True):
            point.grad = gradient
            step()


_Runner = _Trainings | _OneByOne


@torch.no_grad()
def _move(own: _Plain, point: torch.Tensor, state: dict[str, Any]) -> None:
    new = own.update(point.clone(), point.grad, state, own.rate)
    if not isinstance(new, torch.Tensor) or new.shape != (2,):
        what = f"shape {tuple(new.shape)}" if isinstance(new, torch.Tensor) else type(new).__name__
        raise ValueError(f"the callable gave {what}: it must return the new point, a tensor of shape (2,)")
    point.copy_(new)


def _is_elementwise(own: Any) -> bool:
    """Whether the elements of a weight are updated independently of each other, and of their places."""
    rule = own.composed_rule if isinstance(own, RuleOptimizer) else None
    return isinstance(rule, Rule) and not rule.reductions and "index" not in rule.extras


def _named(optimizers: Any) -> dict[str, Any]:
    if isinstance(optimizers, str):
        optimizers = [optimizers]
    if isinstance(optimizers, Mapping):
        found = dict(optimizers)
    elif isinstance(optimizers, Sequence):
        found = {}
        for each in optimizers:
            label = each if isinstance(each, str) else getattr(each, "__name__", type(each).__name__).lower()
            if label in found:
                raise ValueError(f"optimizers: {label!r} is there twice; give a mapping from labels of your own")
            found[label] = {} if isinstance(each, str) else each
    else:
        raise TypeError(f"optimizers must be names or a mapping from labels, got {type(optimizers).__name__}")
    if not found:
        raise ValueError("optimizers is empty: name at least one")
    return found


def _starts(where: Function, start: Any) -> np.ndarray:
    try:
        starts = np.array(where.start if start is None else start, dtype=np.float32)
    except (TypeError, ValueError):
        raise TypeError(f"start={start!r}: must be (x, y) or an array [n_starts, 2]") from None
    starts = starts[None] if starts.ndim == 1 else starts
    if starts.ndim != 2 or starts.shape[1] != 2 or not len(starts) or not np.isfinite(starts).all():
        raise ValueError(f"start has shape {np.shape(start)}: must be (x, y) or [n_starts, 2], finite")
    return starts


def _values(rates: Sequence[float] | None, sweep: Mapping[str, Sequence[Any]] | None) -> list[dict[str, Any]]:
    axes = {name: list(values) for name, values in (sweep or {}).items()}
    if rates is not None:
        if "learning_rate" in axes:
            raise ValueError("learning_rate is given twice, in sweep and in learning_rates: leave one out")
        axes["learning_rate"] = [real("learning_rates", rate, low=0) for rate in rates]
    for name, values in axes.items():
        if not values:
            raise ValueError(f"{name}: no values to try")
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


def _noise(where: Function, seed: int, steps: int, n_starts: int) -> np.ndarray | None:
    """What is added to gradients, [steps, 2, n_starts]."""
    if not where.noise:
        return None
    draw = np.random.default_rng([where.seed, seed]).standard_normal((n_starts, steps, 2), dtype=np.float32)
    return np.ascontiguousarray(draw.transpose(1, 2, 0)) * np.float32(where.noise)


def _diverged(where: Function, paths: np.ndarray, losses: np.ndarray) -> np.ndarray:
    return ~(_farthest(where, paths) <= FAR) | ~np.isfinite(losses.max(axis=-1))


def _farthest(where: Function, paths: np.ndarray) -> np.ndarray:
    """How far paths [..., steps, 2] get from the middle of what is drawn, in halves of its width or height."""
    found = np.float32(0.0)
    with np.errstate(invalid="ignore", over="ignore"):
        for k, (low, high) in enumerate((where.xlim, where.ylim)):
            away = np.abs(paths[..., k] - np.float32((low + high) / 2)).max(axis=-1)
            found = np.maximum(found, away / np.float32((high - low) / 2))
    return found


class _Near:
    """As `_near`, again and again, with room that is made once."""

    def __init__(self, count: int, distance: float) -> None:
        self._dx, self._dy = np.empty((2, count), np.float32)
        self._found = np.empty(count, bool)
        self._most = np.float32(distance * distance)

    def __call__(self, x: np.ndarray, y: np.ndarray, minimum: Minimum) -> np.ndarray:
        dx, dy = self._dx, self._dy
        with np.errstate(over="ignore", invalid="ignore"):
            np.subtract(x, np.float32(minimum.x), out=dx)
            np.subtract(y, np.float32(minimum.y), out=dy)
            np.multiply(dx, dx, out=dx)
            np.multiply(dy, dy, out=dy)
            np.add(dx, dy, out=dx)
            return np.less_equal(dx, self._most, out=self._found)


def _near(x: np.ndarray, y: np.ndarray, minimum: Minimum, distance: float) -> np.ndarray:
    return _Near(len(x), distance)(x, y, minimum)


def _found_minima(where: Function, starts: np.ndarray, ends: np.ndarray, near: float) -> tuple[Minimum, ...]:
    """Where paths have come to rest in a dent, the lowest first: a minimum for each place within twice the tolerance."""
    evaluate = where.evaluator((len(ends),))
    with np.errstate(all="ignore"):
        drawn = evaluate(*np.ascontiguousarray(starts.T))[0]
        depth = float(np.nanmedian(drawn) - np.nanmin(drawn)) if np.isfinite(drawn).any() else 0.0
        x, y = np.ascontiguousarray(ends.T)
        value, dx, dy = (each.copy() for each in evaluate(x, y))
        # As far as the tolerance reaches, the function falls by no more than a thousandth of its usual height.
        left = np.flatnonzero(np.isfinite(value) & (np.hypot(dx, dy) * near <= 1e-3 * depth))
    angles = np.arange(8) * (np.pi / 4)
    ring = where.evaluator((8,))
    left = left[np.argsort(value[left], kind="stable")]
    found: list[Minimum] = []
    while len(left) and len(found) < 100:
        best = left[0]
        around = (x[best] + near * np.cos(angles)).astype(np.float32), (y[best] + near * np.sin(angles)).astype(np.float32)
        here = Minimum(float(x[best]), float(y[best]), float(value[best]))
        if (ring(*around)[0] >= value[best]).all():  # and it is no saddle
            found.append(here)
        left = left[~_near(x[left], y[left], here, 2 * near)]
    return tuple(found)


def _arrivals(minima: Sequence[Minimum], snapshots: Sequence[Sequence[np.ndarray]], steps: int, near: float) -> np.ndarray:
    times = [t for t in range(steps + 1) if t % EVERY == 0 or t == steps]
    found = []
    for minimum in minima:
        parts = []
        for seen in snapshots:
            inside = np.stack([_near(x, y, minimum, near) for x, y in seen])
            parts.append(np.where(inside.any(axis=0), np.array(times)[inside.argmax(axis=0)], steps + 1))
        found.append(np.concatenate(parts))
    return np.array(found, dtype=np.int32)


def _default(call: Callable[..., Any], name: str) -> Any:
    parameter = inspect.signature(call).parameters.get(name)
    default = None if parameter is None or parameter.default is parameter.empty else parameter.default
    return float(default) if isinstance(default, (int, float, torch.Tensor)) else None


# Sliders.
_BELOW_ONE = (0.0, 0.3, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.92, 0.95, 0.965, 0.98, 0.99, 0.995, 0.998, 0.999, 0.9995, 0.9999)


def _setting(klass: type[Optimizer], name: str, default: Any) -> Setting:
    takes = functools.partial(_takes, klass, name)
    if isinstance(default, bool):
        return Setting(name, default, False, True, "flag", (False, True))
    if isinstance(default, int) and not takes(0.5):
        counts = [each for each in (0, 1, 2, 3, 4, 5, 6, 8, 10, 16, 20, 32, 50, 64, 100, 1000, 10_000) if takes(each)]
        high = max(20, 4 * default)
        return _positions(name, default, [each for each in counts if each <= high], "whole")
    if not takes(1.0) and takes(0.5) and not takes(-0.5):
        return _positions(name, default, [each for each in _BELOW_ONE if takes(each)], "below one")
    if default < 0 or (takes(-0.5) and not takes(0.5)):
        return _positions(
            name, default, [each for each in (-1.0, -0.9, -0.7, -0.6, -0.5, -0.3, -0.1) if takes(each)], "linear"
        )
    if default == 0:
        values = [0.0, *(m * 10.0**k for k in range(-5, 0) for m in (1, 2, 5)), 1.0]
        return _positions(name, default, [each for each in values if takes(each)], "zero and log")
    if not takes(1.0) and takes(2.0):
        return _positions(
            name, default, [float(f"{1 + (default - 1) * 10 ** (k / 4):.4g}") for k in range(-4, 5)], "above one"
        )
    each_decade = 8 if name == "learning_rate" else 4
    wide = (3 if name == "learning_rate" or default < 0.1 else 1) * each_decade
    grid = [default * 10 ** (k / each_decade) for k in range(-wide, wide + 1)]
    return _positions(
        name, default, [default if each == default else float(f"{each:.4g}") for each in grid if takes(each)], "log"
    )


def _positions(name: str, default: Any, values: Sequence[Any], scale: str) -> Setting:
    ordered = tuple(sorted({*values, default}))
    return Setting(name, default, ordered[0], ordered[-1], scale, ordered)


def _takes(klass: type[Optimizer], name: str, value: Any) -> bool:
    """Whether the constructor accepts this."""
    try:
        klass(**{name: value})
    except (TypeError, ValueError):
        return False
    return True
