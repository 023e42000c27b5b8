"""Guards: detect changed data pointers, and gradients that were written since the last step.

A guard checks every tensor at every step, so it is a few passes of C functions over lists, about 70 ns for each tensor.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Sequence
from itertools import compress
from typing import Any

import numpy as np
import torch
from torch.autograd.graph import increment_version

Reference = Callable[[], "torch.Tensor | None"]  # a weak reference, or `_missing`

_data_ptr, _stride, _numel, _dim = torch.Tensor.data_ptr, torch.Tensor.stride, torch.Tensor.numel, torch.Tensor.dim
_dtype, _device, _shape = map(operator.attrgetter, ("dtype", "device", "shape"))
_version = operator.attrgetter("_version")


class PointerGuard:
    """Detects tensors whose data pointers or strides have changed, as when a matrix is transposed in place.

    `pointers`: the data pointers, if they are known.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], pointers: list[int] | None = None) -> None:
        self._pointers = list(map(_data_ptr, tensors)) if pointers is None else pointers
        # A vector that keeps its pointer keeps its stride, so only tensors with more dimensions are compared.
        self._multidimensional = list(compress(range(len(tensors)), map((1).__lt__, map(_dim, tensors))))
        self._strides = [tensors[i].stride() for i in self._multidimensional]

    def passes(self, tensors: Sequence[torch.Tensor]) -> bool:
        try:
            unmoved = list(map(_data_ptr, tensors)) == self._pointers
            return unmoved and [tensors[i].stride() for i in self._multidimensional] == self._strides
        except (RuntimeError, TypeError):  # a tensor without memory, or None for a deleted one
            return False


class GradLayouts:
    """Recognizes new gradients that differ from these only in their pointers: same dtypes, strides and sizes.

    `own` means each is its weight's `.grad`, so that torch has checked its shape and device.
    """

    def __init__(self, gradients: Sequence[torch.Tensor], own: bool) -> None:
        self._own, self._layouts = own, _layouts(gradients, own)
        self._single = list(compress(range(len(gradients)), map((1).__eq__, map(_numel, gradients))))

    def pointers(self, gradients: Sequence[Any], own: bool, present: Sequence[bool] | None = None) -> np.ndarray | None:
        """Return the data pointers of these gradients, int64 [n], or None if a layout, or `own`, differs from before.

        `present` tells which gradients are not None (default: all); the pointer of a missing one is 0.
        """
        if own != self._own:
            return None
        layouts: Sequence[Any] = self._layouts
        all_gradients = gradients
        if present is not None:
            gradients = list(compress(gradients, present))
            layouts = [list(compress(layout, present)) for layout in layouts]
        try:
            if any(map(operator.ne, _layouts(gradients, own), layouts)):
                return None
            addresses = list(map(_data_ptr, gradients))
        except (AttributeError, RuntimeError, TypeError):  # None, a sparse tensor, or one without memory
            return None
        if 0 in addresses and any(not gradient.data_ptr() and gradient.numel() for gradient in gradients):
            return None
        # Autograd keeps a view with the negative bit only if its strides are the weight's. Such a view shows the imaginary
        # parts of complex numbers, which have gaps between them, so it has one element.
        single = map(all_gradients.__getitem__, self._single)
        if self._single and any(gradient is not None and gradient.is_neg() for gradient in single):
            return None
        pointers = np.array(addresses, dtype=np.int64)
        if present is None:
            return pointers
        spread = np.zeros(len(present), dtype=np.int64)
        spread[np.array(present)] = pointers
        return spread


def _layouts(gradients: Sequence[Any], own: bool) -> tuple[list[Any], ...]:
    layouts = list(map(_dtype, gradients)), list(map(_stride, gradients))
    if own:  # `.data` may have made weight and gradient smaller parts of their memory
        return *layouts, list(map(_numel, gradients))
    return *layouts, list(map(_shape, gradients)), list(map(_device, gradients))


class GradGuard:
    """Remembers which gradients steps have used, to find gradients that were written since (fresh gradients).

    A gradient counts as written if it is another tensor than the one used, or if torch has counted a write to it. The guard
    keeps no gradient alive.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], names: Sequence[str]) -> None:
        self._parameters, self._names = list(parameters), list(names)
        self._used: list[Reference] = [_missing] * len(parameters)
        self._versions = [-1] * len(parameters)

    def collect(self) -> list[Any]:
        return [parameter.grad for parameter in self._parameters]

    def collect_written(self) -> tuple[list[Any], list[int]] | None:
        """Return all gradients and their versions if every parameter requires grad and has a written one; else None."""
        gradients = [parameter.grad for parameter in self._parameters if parameter.requires_grad]
        try:
            versions = list(map(_version, gradients))
        except (AttributeError, RuntimeError):  # None, or an inference tensor
            return None
        if len(gradients) < len(self._parameters):
            return None
        if any(map(operator.eq, versions, self._versions)):
            used = [reference() for reference in self._used]
            if any(map(operator.is_, used, gradients)) and not all(self._are_other(gradients, versions)):
                return None
        return gradients, versions

    def written(self, gradients: Sequence[torch.Tensor | None]) -> list[bool]:
        """Return for each parameter whether it requires grad and its gradient was written since a step used it."""
        for name, gradient in zip(self._names, gradients, strict=True):
            if gradient is not None and gradient.is_inference():
                raise ValueError(
                    f"the gradient of {name!r} was made under torch.inference_mode(), where torch does not count writes, "
                    "so that no step can tell whether it is fresh: call backward() outside, or under torch.no_grad()"
                )
        versions = [-1 if gradient is None else gradient._version for gradient in gradients]
        wanted = [p.requires_grad and gradient is not None for p, gradient in zip(self._parameters, gradients, strict=True)]
        return [a and b for a, b in zip(wanted, self._are_other(gradients, versions), strict=True)]

    def use(
        self,
        gradients: Sequence[torch.Tensor | None],
        versions: list[int] | None = None,
        references: list[Reference] | None = None,
    ) -> None:
        """Mark these gradients as used by a step; None marks a parameter that the step did not update.

        Callers that already have all versions and references, and no None, pass them.
        """
        if versions is not None and references is not None:
            self._used, self._versions = references, versions
            return
        self._used, self._versions = list(self._used), list(self._versions)
        for i, gradient in enumerate(gradients):
            if gradient is not None:
                self._used[i], self._versions[i] = weakref.ref(gradient), gradient._version

    def snapshot(self) -> Any:
        return self._used, self._versions

    def restore(self, snapshot: Any) -> None:
        self._used, self._versions = snapshot

    def _are_other(self, gradients: Sequence[Any], versions: Sequence[int]) -> list[bool]:
        return [
            gradient is not used() or version != before
            for gradient, used, version, before in zip(gradients, self._used, versions, self._versions, strict=True)
        ]


def copy_all(into: list[torch.Tensor], values: list[torch.Tensor], non_blocking: bool = False) -> None:
    """Copy and count the writes, which `torch._foreach_copy_` does not do on a GPU."""
    torch._foreach_copy_(into, values, non_blocking=non_blocking)
    increment_version(into)


def zero_all(tensors: list[torch.Tensor]) -> None:
    """Fill with zeros and count the writes, which `torch._foreach_zero_` does not do on a GPU."""
    torch._foreach_zero_(tensors)
    increment_version(tensors)


def gradient_references(gradients: Sequence[torch.Tensor | None]) -> list[Reference]:
    """Return weak references to gradients; for None a function that returns None."""
    try:
        return list(map(weakref.ref, gradients))
    except TypeError:
        return [_missing if gradient is None else weakref.ref(gradient) for gradient in gradients]


def _missing() -> None:
    return None
