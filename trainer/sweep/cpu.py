"""Faster steps of many small copies on a CPU: one thread for little arithmetic, and softmax over few classes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import cross_entropy, log_softmax, nll_loss, softmax
from torch.overrides import TorchFunctionMode

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["ShortSoftmax", "ThreadLimit"]

ONE_THREAD_BELOW = 2e8  # floating-point operations of a step in its products, some 10 ms of one core
FEW = 16  # classes fill no vector of the processor


class ThreadLimit:
    """Lets one thread take the steps of little arithmetic, at which torch's threads only wait for each other.

    That is decided by what the first step multiplies, not by the clock, so that a sweep has the same numbers every time:
    some of torch's operations add up in another order with another number of threads. Afterwards torch has
    as many as before.

    Args:
        device: where the copies are.
    """

    def __init__(self, device: torch.device) -> None:
        self._before, self._counted = torch.get_num_threads(), device.type != "cpu"

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Around forward and backward of a step."""
        if self._counted:
            yield
            return
        from torch.utils.flop_counter import FlopCounterMode  # it imports triton

        with FlopCounterMode(display=False) as counter:
            yield
        self._counted = True
        if counter.get_total_flops() < ONE_THREAD_BELOW:
            torch.set_num_threads(1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        torch.set_num_threads(self._before)


class ShortSoftmax(TorchFunctionMode):
    """Takes softmax and its logarithm across another axis than the last where that one is short.

    Along a last axis that is shorter than a vector of the processor, torch's softmax on a CPU takes ten times as long as
    across one with others after it, and there are as many others as copies. The values are the same but for rounding.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is cross_entropy:
            return _cross_entropy(*args, **kwargs)
        if func in _SOFTMAX:
            return _softmax(func, *args, **kwargs)
        return func(*args, **kwargs)


_SOFTMAX = {softmax, torch.softmax, torch.Tensor.softmax, log_softmax, torch.log_softmax, torch.Tensor.log_softmax}


def _softmax(
    func: Callable[..., torch.Tensor], input: torch.Tensor, dim: int | None = None, *others: Any, **named: Any
) -> torch.Tensor:
    if input.dim() < 2 or dim not in (-1, input.dim() - 1) or input.shape[-1] >= FEW:
        return func(input, dim, *others, **named)
    return func(input.movedim(-1, 0).contiguous(), 0, *others, **named).movedim(0, -1)


def _cross_entropy(input: torch.Tensor, target: torch.Tensor, *others: Any, **named: Any) -> torch.Tensor:
    smoothed = named.get("label_smoothing", 0.0)
    if others or smoothed or input.dim() != 2 or input.shape[-1] >= FEW or target.is_floating_point():
        return cross_entropy(input, target, *others, **named)
    return nll_loss(_softmax(log_softmax, input, -1), target, **{k: v for k, v in named.items() if k != "label_smoothing"})
