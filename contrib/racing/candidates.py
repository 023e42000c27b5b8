"""The optimizers of a race: their fixed arguments, and the ranges of those that are searched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ...trainer.loops.ensemble import make_optimizer
from ...trainer.optimizer import MultiOptimizer, Optimizer, create
from ...trainer.validation import instance, nonempty, number
from ...viz.simulate.presets import named

RATES = 30.0  # learning rates are searched from 1/30 to 30 times the usual one
ONE_MINUS, DECAYS = (0.02, 0.5), (1e-5, 1e-2)  # ranges of 1 - momentum and of weight decay
PREFIX = "one_minus_"


@dataclass(frozen=True)
class Candidate:
    """An optimizer of a race.

    Args:
        name: its label.
        kind: the name or class of the optimizer, or a list of (pattern, optimizer, arguments).
        fixed: the arguments that are not searched.
        ranges: the lowest and highest value of each searched argument, by name; "learning_rate" is the first.
    """

    name: str
    kind: Any
    fixed: Mapping[str, Any]
    ranges: Mapping[str, tuple[float, float]]

    def points(self, count: int, seed: int = 0) -> np.ndarray:
        """Return settings to try, float64 [count, n_ranges]: points of a Sobol sequence, log-uniform in the ranges.

        Candidates with equally many ranges get the same points of the unit cube.
        """
        low, high = np.log(np.array(list(self.ranges.values()), dtype=np.float64)).T
        unit = torch.quasirandom.SobolEngine(len(self.ranges), scramble=True, seed=seed).draw(count, dtype=torch.float64)
        return np.exp(low + (high - low) * unit.numpy())

    def make(self, point: Sequence[float] | np.ndarray) -> Optimizer:
        """Make an optimizer with the values of a point [n_ranges] for the searched arguments."""
        arguments = dict(self.fixed)
        for name, value in zip(self.ranges, map(float, point), strict=True):
            if name.startswith(PREFIX):
                arguments[name.removeprefix(PREFIX)] = 1.0 - value
            else:
                arguments[name] = value
        return _made(self.kind, arguments)

    def about(self) -> dict[str, Any]:
        """Return its settings as plain data, which `Store` compares with the settings of an earlier call.

        Raises:
            TypeError: a schedule cannot be told from others: it has a function that is not registered, for instance.
        """
        kind = self.kind.__name__ if isinstance(self.kind, type) else self.kind
        try:
            return {"optimizer": _plain(kind), "fixed": _plain(self.fixed), "searched": _plain(self.ranges)}
        except TypeError as error:
            raise TypeError(f"optimizers[{self.name!r}] with a folder: {error}") from None


def candidates_of(optimizers: Any) -> list[Candidate]:
    """Parse the argument `optimizers` of `race`.

    Args:
        optimizers: names or a dict, see `race`.

    Raises:
        TypeError, ValueError: an entry is invalid.
    """
    if isinstance(optimizers, Sequence) and not isinstance(optimizers, str) and all(isinstance(o, str) for o in optimizers):
        if len(set(optimizers)) < len(optimizers):
            raise ValueError(f"optimizers={optimizers!r}: a name occurs twice; give a dict with a label for each")
        optimizers = {name: {} for name in optimizers}
    instance(
        "optimizers", optimizers, Mapping, "a dict of names and arguments, such as {'adamw': {}, 'muon': {}}", shown=True
    )
    return [_candidate(*each) for each in nonempty("optimizers", optimizers, ": name at least one").items()]


def _candidate(name: Any, entry: Any) -> Candidate:
    where = f"optimizers[{name!r}]"
    if not isinstance(name, str) or not name:
        raise TypeError(f"optimizers has the key {name!r}: must be a name")
    if isinstance(entry, str) or (isinstance(entry, type) and issubclass(entry, Optimizer)):
        entry = {"optimizer": entry}
    entry = {} if entry is None else entry
    instance(where, entry, Mapping, "a dict of arguments; 'optimizer' in it is a name, a class or a list", shown=True)
    fixed = dict(entry)
    kind = fixed.pop("optimizer", name)
    kind = tuple(map(tuple, kind)) if isinstance(kind, list) else kind
    if isinstance(kind, str):
        kind, fixed = named(kind, fixed)
    ranges = {key: _range(f"{where}[{key!r}]", key, fixed.pop(key)) for key in list(fixed) if _is_pair(fixed[key])}
    middle = fixed.pop("learning_rate", None)
    try:
        probe = _made(kind, fixed | ({} if middle is None else {"learning_rate": middle}))
        if "learning_rate" not in ranges:
            schedule: Any = probe.lr_scheduler
            usual = number(
                "learning_rate", probe.lr if schedule is None else getattr(schedule, "base_lr", probe.lr), above=0
            )
            ranges = {"learning_rate": (usual / RATES, usual * RATES), **ranges}
    except (TypeError, ValueError) as error:
        raise type(error)(f"{where}: {error}") from None
    ranges = {"learning_rate": ranges.pop("learning_rate"), **ranges}
    if len(ranges) == 1:
        averaged = [key for key in ("momentum", "beta1") if key not in entry and 0 < _attribute(probe, key) < 1]
        if averaged:
            ranges[PREFIX + averaged[0]] = ONE_MINUS
        elif "wd" not in fixed:
            ranges["wd"] = DECAYS
    candidate = Candidate(name, kind, fixed, ranges)
    try:
        candidate.make([low for low, _ in ranges.values()])
        candidate.make([high for _, high in ranges.values()])
    except (TypeError, ValueError) as error:
        raise type(error)(f"{where}: {error}") from None
    return candidate


def _made(kind: Any, arguments: Mapping[str, Any]) -> Optimizer:
    if not isinstance(kind, tuple):
        return make_optimizer(kind, arguments)
    shared = dict(arguments)
    rate = shared.pop("learning_rate", None)
    if rate is None:
        return MultiOptimizer(kind, **shared)
    rates = [_rate_of(entry, shared) for entry in kind]
    scaled = [
        (entry[0], entry[1], {**(entry[2] if len(entry) > 2 else {}), "learning_rate": usual * rate / rates[-1]})
        for entry, usual in zip(kind, rates, strict=True)
    ]
    return MultiOptimizer(scaled, **shared)


def _rate_of(entry: tuple[Any, ...], shared: Mapping[str, Any]) -> float:
    arguments = dict(entry[2] if len(entry) > 2 else {})
    if not isinstance(entry[1], str):
        raise TypeError(f"{entry!r}: each training needs optimizers of its own, so give names and arguments")
    rate = arguments.get("learning_rate")
    if rate is None:
        rate = create(
            entry[1], **{k: v for k, v in {**shared, **arguments}.items() if k not in ("lr_scheduler", "schedules")}
        ).lr
    return number("learning_rate", rate, above=0)


def _is_pair(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and all(isinstance(v, (int, float)) for v in value)


def _range(where: str, name: str, pair: tuple[float, float]) -> tuple[float, float]:
    most = {"high": 1.0} if name.startswith(PREFIX) else {}
    low, high = (number(where, value, above=0, **most) for value in pair)
    if not low < high:
        raise ValueError(f"{where}={pair!r}: a pair is a range to search, so the first must be less than the second")
    return low, high


def _attribute(optimizer: Optimizer, name: str) -> float:
    value = getattr(optimizer, name, 0.0) if not isinstance(optimizer, MultiOptimizer) else 0.0
    return value if isinstance(value, float) else 0.0


def _plain(value: Any) -> Any:
    if hasattr(value, "to_config"):
        return value.to_config()
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if isinstance(value, (bool, int, float, str, type(None))):
        return value
    return getattr(value, "__qualname__", type(value).__qualname__)
