"""Norms of lists of tensors, and clipping by them: one pass to reduce and one to scale, for any number of tensors.

The order of sums depends on the tensors alone, neither on the number of threads nor on the run. Nothing waits for the
device. The plan for a list is made once and reused for lists of equal dtypes, sizes and strides; it keeps no tensor alive.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.autograd.graph import increment_version

from . import streams
from .backends import choose_engine, launch_class
from .checks import check_list
from .graphs import current_recording
from .guards import GradLayouts
from .language import Rule, reduction, rule, tl
from .launch import GRADIENT, WEIGHT, Launch, itself
from .layouts import is_dense
from .reductions import join_totals
from .rules.common import clip_coefficient, total_square

EPSILON = 1e-6  # torch.nn.utils.clip_grad_norm_'s


@torch.no_grad()
def global_norm(tensors: Iterable[torch.Tensor], ord: float = 2) -> torch.Tensor:
    """Return the norm of all tensors together, as if they were one vector.

    Args:
        tensors: dense floating-point tensors of any dtypes, shapes and strides; an empty list has the norm 0.
        ord: 1, 2 (default) or inf.

    Returns:
        A tensor without dimensions on the device of the first tensor: float64 if a tensor is float64, else float32.

    Raises:
        TypeError: an element is not a dense floating-point tensor.
        ValueError: `ord` has another value, or a tensor has no memory or overlaps itself.

    Example:
        >>> import torch
        >>> from tristep.kernels import global_norm
        >>> global_norm([torch.tensor([3.0]), torch.tensor([4.0])])
        tensor(5.)
    """
    with _taken("tensors", _rule_of(ord), tensors) as plan:
        return plan.norm(ord)


def clip_by_global_norm_(tensors: Iterable[torch.Tensor], max_norm: float, ord: float = 2) -> torch.Tensor:
    """Multiply all tensors by min(1, max_norm / (norm + 1e-6)), in place, and return their norm before clipping.

    `norm` is the norm of all tensors together. If it is not finite, the elements become 0 or NaN.

    Args:
        tensors: dense floating-point tensors of any dtypes, shapes and strides.
        max_norm: upper limit for the norm.
        ord: 1, 2 (default) or inf.

    Returns:
        The norm, a tensor without dimensions, as `global_norm` returns it.

    Raises:
        TypeError: an element is not a dense floating-point tensor, or `max_norm` is no number.
        ValueError: `ord` has another value, or a tensor has no memory or overlaps itself.

    Source: Pascanu et al. (2013), "On the difficulty of training recurrent neural networks", alg. 1; numbers of torch.
    """
    return scale_to_norm_("tensors", tensors, max_norm, ord)


@torch.no_grad()
def scale_to_norm_(
    argument: str,
    tensors: Iterable[torch.Tensor],
    max_norm: float,
    ord: float = 2,
    epsilon: float = EPSILON,
    decide: Callable[[torch.Tensor], bool] | None = None,
) -> torch.Tensor:
    """Multiply all tensors by min(1, max_norm / (norm + epsilon)), in place, and return their norm before clipping.

    `argument` names the tensors in errors. If `decide` returns False for the norm, nothing is scaled.
    """
    chosen, max_norm = _rule_of(ord), _number("max_norm", max_norm)
    with _taken(argument, chosen, tensors) as plan:
        norm = plan.norm(ord)
        if decide is None or decide(norm):
            plan.apply([max_norm, epsilon])
    return norm


# The tensor is both weight and gradient of these rules, which compute the new weight from the weight alone: a loop that
# reads one array and writes another is not vectorized if the two overlap.


@reduction(scope="global")
def total_size(w, g, state, hyper):
    """Sum of the absolute values of all tensors, |g|: their 1-norm."""
    return (tl.abs(g),)


@reduction(scope="global", op="max")
def largest_size(w, g, state, hyper):
    """Largest absolute value of all tensors, |g|: their infinity norm."""
    return (tl.abs(g),)


@rule(reduction=total_square)
def _clipped_2(w, g, state, hyper, sums):
    max_norm, epsilon = hyper
    (square,) = sums
    return w * clip_coefficient(tl.sqrt(square), max_norm, epsilon), state


@rule(reduction=total_size)
def _clipped_1(w, g, state, hyper, sums):
    max_norm, epsilon = hyper
    (size,) = sums
    return w * clip_coefficient(size, max_norm, epsilon), state


@rule(reduction=largest_size)
def _clipped_inf(w, g, state, hyper, sums):
    max_norm, epsilon = hyper
    (size,) = sums
    return w * clip_coefficient(size, max_norm, epsilon), state


_RULES: dict[float, Rule] = {1.0: _clipped_1, 2.0: _clipped_2, math.inf: _clipped_inf}


class _Plan:
    """One of these rules on lists of tensors of fixed dtypes, sizes and strides. Holds no tensors after `release`."""

    def __init__(self, rule: Rule, tensors: Sequence[torch.Tensor]) -> None:
        self._rule = rule
        self._tensors: Sequence[torch.Tensor] = []
        self._shapes = [tensor.shape for tensor in tensors]
        self._devices = list(map(_device, tensors))
        self._gapped = [i for i, tensor in enumerate(tensors) if tensor.is_neg() or not is_dense(tensor)]
        self._contiguous = not self._gapped and all(map(_is_contiguous, tensors))
        self._layouts = GradLayouts(tensors, own=True) if tensors else None
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        dense = self._dense(tensors)
        self._aligned = np.array([tensor.data_ptr() % 16 == 0 for tensor in dense], dtype=bool)
        members: dict[Any, list[int]] = {}
        for i, tensor in enumerate(dense):
            members.setdefault((tensor.device, tensor.dtype, bool(self._aligned[i])), []).append(i)
        self._launches: list[Launch] = []
        for (device, dtype, aligned), indices in members.items():
            make = launch_class(choose_engine(device))
            weights, none = [dense[i] for i in indices], [()] * len(indices)
            rows = slice(None) if len(indices) == len(tensors) else np.array(indices)
            self._launches.append(make(rule, weights, none, None, dtype, aligned, indices=indices, rows=rows))
            self._launches[-1].hyper[:, 0] = 1.0
            self._launches[-1].release()
        self._bind(dense, np.array([tensor.data_ptr() for tensor in dense], dtype=np.int64))
        self._dtype = torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32

    def take(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Use these tensors until `release`; return False if they differ from the plan's dtypes, sizes or strides."""
        if self._layouts is None or (addresses := self._layouts.pointers(tensors, own=True)) is None:
            return False
        if list(map(_device, tensors)) != self._devices:
            return False
        if self._contiguous:  # in another shape the same strides may leave gaps
            if not all(map(_is_contiguous, tensors)):
                return False
        elif [t.shape for t in tensors] != self._shapes or any(t.is_neg() for t in tensors):
            return False
        if self._gapped:
            tensors = self._dense(tensors)
            addresses = np.array([tensor.data_ptr() for tensor in tensors], dtype=np.int64)
        if (((addresses & 15) == 0) != self._aligned).any():
            self._copies = []
            return False
        self._bind(tensors, addresses)
        return True

    def release(self) -> None:
        self._copies = []
        self._tensors = []
        for launch in self._launches:
            launch.release()

    def norm(self, ord: float) -> torch.Tensor:
        for launch in self._launches:
            launch.run_reduction(0)
        if not self._launches:
            return torch.zeros((), dtype=torch.float32)
        if len(self._launches) > 1:
            join_totals([launch.totals[0] for launch in self._launches], self._rule.reductions[0].op)
        totals = [launch.totals[0][0, 0] for launch in self._launches]
        total = next(total for total in totals if total.dtype == self._dtype)
        norm = total.sqrt() if ord == 2 else total.clone()
        return norm if norm.get_device() == self._devices[0] else norm.to(self._tensors[0].device)

    def apply(self, hyper: Sequence[float]) -> None:
        """Update the tensors with these hyper-parameters and the last norm."""
        for launch in reversed(self._launches):  # the last launch read by the reduction is still in the cache
            launch.hyper[:, 1:] = hyper
            launch.compute()
        for tensor, copy in self._copies:
            tensor.copy_(copy)
        if self._copies:  # copy_ has counted the writes to these
            increment_version([t for i, t in enumerate(self._tensors) if i not in self._gapped])
        else:
            increment_version(self._tensors)

    def _dense(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the tensors, with a dense copy in place of each that has gaps."""
        dense = [tensor.detach() for tensor in tensors]
        for i in self._gapped:
            dense[i] = dense[i].resolve_neg().clone(memory_format=torch.contiguous_format)
            self._copies.append((tensors[i], dense[i]))
        return dense

    def _bind(self, tensors: Sequence[torch.Tensor], addresses: np.ndarray) -> None:
        self._tensors = tensors
        for launch in self._launches:
            launch.addresses[WEIGHT] = launch.addresses[GRADIENT] = addresses[launch.rows]
            launch.replace_weights([tensors[i] for i in launch.indices])
            launch.gradients = [partial(itself, tensors[i]) for i in launch.indices] if launch.looks_at_tensors else []


_PLAIN = {torch.Tensor, torch.nn.Parameter}
_lock = threading.RLock()  # plans are shared, and hold one list at a time
_plans: dict[Any, list[_Plan]] = {}
_MOST = 8  # largest number of plans for one key, and of keys, in the cache


def _plan(rule: Rule, tensors: Sequence[torch.Tensor], argument: str) -> _Plan:
    """Return a plan that has taken these tensors, a cached one if possible."""
    if not set(map(type, tensors)) <= _PLAIN:
        check_list(argument, tensors)
    key: Any = (rule, len(tensors))
    if tensors:
        device = tensors[0].device
        stream = streams.current(device)  # two streams must not share a plan's totals
        if current_recording.get() is not None or streams.is_capturing(device):
            raise RuntimeError(
                "norms and clipping of lists cannot be captured in a CUDA graph, as their lists may change: use the "
                "optimizer's clip_norm, or torch.nn.utils.clip_grad_norm_"
            )
        key = (*key, choose_engine(device), stream)
    cached = _plans.get(key, ())
    for plan in cached:
        if plan.take(tensors):
            return plan
    check_list(argument, tensors)
    plan = _Plan(rule, tensors)
    if tensors:
        if len(_plans) >= _MOST and key not in _plans:
            _plans.pop(next(iter(_plans)))
        _plans[key] = [plan, *cached[: _MOST - 1]]
    return plan


@contextmanager
def _taken(argument: str, rule: Rule, tensors: Iterable[torch.Tensor]) -> Iterator[_Plan]:
    """Return a context that yields a plan holding these tensors, under the lock."""
    if isinstance(tensors, torch.Tensor) or not isinstance(tensors, Iterable):
        hint = ": put it into a list" if isinstance(tensors, torch.Tensor) else ""
        raise TypeError(f"{argument} must be a list of tensors, got {type(tensors).__name__}{hint}")
    with _lock:
        plan = _plan(rule, list(tensors), argument)
        try:
            yield plan
        finally:
            plan.release()


_is_contiguous = torch.Tensor.is_contiguous
_device = torch.Tensor.get_device


def _rule_of(ord: Any) -> Rule:
    try:
        return _RULES[float(ord)]
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"ord={ord!r}: must be 1, 2 or inf") from None


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise TypeError(f"{name}={value!r}: must be a number, not {type(value).__name__}") from None
