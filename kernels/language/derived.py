"""The hyper-parameters that are computed from others, so that a rule may use them by name.

| name | value | computed by or from |
|---|---|---|
| `lr`, `wd` | the parameter's learning rate and weight decay, with schedule and multipliers in them | `RuleOptimizer` |
| `decay` | `lr * wd`, the fraction of the weight that decoupled decay subtracts | `RuleOptimizer` |
| `clip` | `clip_gradient`, infinite for no limit | `RuleOptimizer` |
| `one_minus_x` | 1 - x, formed in float64, so that it is rounded only once | `x` |
| `correctionN` | 1 / (1 - betaN^t), the bias correction of an average that starts at zero, at update t | `betaN` |
| `seen` | 0 at a parameter's first update, then 1 | `begin_num_update` |

N is a number or nothing: `correction` belongs to `beta`. Every other name is an attribute of the optimizer, or a key of the
dictionary that its `hyper(t, lr, wd)` returns. If that dictionary has a name of this table, its value is used, also to
derive others. `kernels.update`, which counts no updates, derives `one_minus_x` only.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any, NamedTuple


class Derivation(NamedTuple):
    """The derivation of a hyper-parameter from another one.

    Attributes:
        source: name of the hyper-parameter from which it is derived.
        compute: function of the source's value and, if `counts`, of the parameter's update count t, which starts at 1.
        counts: whether it depends on t.
    """

    source: str
    compute: Callable[..., Any]
    counts: bool


@functools.cache
def derivation(name: str) -> Derivation | None:
    """Return how the hyper-parameter of this name is derived from another, or None if it is independent.

    Example:
        >>> from tristep.kernels.language import derivation
        >>> derivation("correction2").source
        'beta2'
    """
    if name.startswith("one_minus_"):
        return Derivation(name.removeprefix("one_minus_"), functools.partial(operator.sub, 1.0), counts=False)
    number = name.removeprefix("correction")
    if name.startswith("correction") and (not number or number.isdecimal()):
        return Derivation(f"beta{number}", _bias_correction, counts=True)
    if name == "seen":
        return Derivation("begin_num_update", _seen, counts=True)
    return None


@functools.cache
def derivations(names: tuple[str, ...]) -> tuple[tuple[str, Derivation | None], ...]:
    """Return each name with its derivation; None for an independent hyper-parameter."""
    return tuple((name, derivation(name)) for name in names)


# The arguments may be arrays, with the values of several optimizers or updates.


def _bias_correction(beta: Any, t: Any) -> Any:
    return 1.0 / (1.0 - beta**t)


def _seen(begin: Any, t: Any) -> Any:
    return float(t > begin + 1)
