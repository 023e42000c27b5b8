"""How far a step on a GPU may be off because its instructions for quotients and square roots are approximate.

Rules are compiled to `div.full.f32`, which is wrong by 2 ulps at most, and `sqrt.approx.ftz.f32`, whose relative error is
2^-23 at most (NVIDIA, "Parallel Thread Execution ISA", floating-point instructions, div and sqrt). How these errors are
multiplied depends on the rule and on its numbers. So the step is taken by torch in float64, once more for each quotient and
root in it, with that one changed by its largest error; the changes of the results are added up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tristep.kernels import tl

__all__ = ["spread"]

# Largest relative errors. An ulp is 2^-23 of a power of 2.
ERRORS = {"div": 2 * 2.0**-23, "reciprocal": 2 * 2.0**-23, "sqrt": 2.0**-23}


def spread(step: Callable[[], Sequence[torch.Tensor]]) -> list[torch.Tensor]:
    """The sums of what each approximate quotient and root of a step may change of its results.

    Args:
        step: takes a step in float64 on tensors of its own, always the same, and returns what it has changed.
    """
    with patch.object(type(tl), "sqrt", lambda _, x: torch.as_tensor(x, dtype=torch.float64).sqrt()):  # not NumPy's
        with _Changed(None) as counted:
            exact = step()
        others = []
        for k in range(counted.n):
            with _Changed(k):
                others.append(step())
    found = [torch.zeros_like(each) for each in exact]
    for other in others:
        for total, a, b in zip(found, exact, other, strict=True):
            total += (a - b).abs().nan_to_num(0.0, 0.0, 0.0)
    return found


class _Changed(TorchDispatchMode):
    """Changes the k-th result of an operation that is approximate on GPUs; counts these."""

    def __init__(self, k: int | None) -> None:
        super().__init__()
        self._k, self.n = k, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found, name = func(*args, **(kwargs or {})), func.overloadpacket.__name__.removesuffix("_")
        if name in ERRORS and found.is_floating_point():
            if self.n == self._k:
                found *= 1 + ERRORS[name]
            self.n += 1
        return found
