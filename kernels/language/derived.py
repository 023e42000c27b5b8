"""The names of hyper-parameters that a rule may use without anybody setting them. This is the one table of them.

| name | value | from |
|---|---|---|
| `lr`, `wd` | the parameter's learning rate and weight decay, with schedule and multipliers in them | `RuleOptimizer` |
| `decay` | `lr * wd`, the share of the weight that decoupled decay takes off | `RuleOptimizer` |
| `clip` | `clip_gradient`, infinite for no limit | `RuleOptimizer` |
| `one_minus_x` | 1 - x, formed in float64, so that it is rounded only once | `x` |
| `correctionN` | 1 / (1 - betaN^t), the bias correction of an average that starts at zero, at update t | `betaN` |
| `seen` | 0 at a parameter's first update, then 1 | `begin_num_update` |

N is a number or nothing: `correction` is that of `beta`. Every other name is an attribute of the optimizer, or what its
`hyper(t, lr, wd)` returns; what that returns under a name of this table replaces it, and is what others are derived from.
`kernels.update`, which counts no updates, derives `one_minus_x` only.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any, NamedTuple


class Derivation(NamedTuple):
    """How a hyper-parameter is derived.

    Attributes:
        source: the name of what it is derived from.
        compute: a function of the value of that and, where it counts, of the parameter's update count t, from 1.
        counts: whether it depends on t.
    """

    source: str
    compute: Callable[..., Any]
    counts: bool


@functools.cache
def derivation(name: str) -> Derivation | None:
    """How the hyper-parameter of this name is derived from another; None for one that is not.

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
    """Each of these names with its derivation; None is the derivation of an independent hyper-parameter."""
    return tuple((name, derivation(name)) for name in names)


# Each may get arrays, of the numbers of several optimizers or updates, where it can compute with them.


def _bias_correction(beta: Any, t: Any) -> Any:
    return 1.0 / (1.0 - beta**t)


def _seen(begin: Any, t: Any) -> Any:
    return float(t > begin + 1)
