"""Guards: have data pointers changed, and which gradients have been written since the last step?

A step asks this about every tensor, so a guard is a few passes of C functions over lists, some 70 ns for each tensor, and
uses nothing but torch's public interface.
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

_data_ptr, _stride, _numel = torch.Tensor.data_ptr, torch.Tensor.stride, torch.Tensor.numel
_dtype, _device, _shape = map(operator.attrgetter, ("dtype", "device", "shape"))
_version = operator.attrgetter("_version")


class PointerGuard:
    """Detects tensors whose data pointers or strides have changed, as when a matrix is transposed in place.

    Args:
        tensors: strided tensors.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._pointers = list(map(_data_ptr, tensors))
        # Vectors that keep their pointers keep their strides: compared are those of tensors with more dimensions.
        self._layered = [i for i, tensor in enumerate(tensors) if tensor.dim() > 1]
        self._strides = [tensors[i].stride() for i in self._layered]

    def passes(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether these tensors have the pointers and strides of those that were given first."""
        try:
            unmoved = list(map(_data_ptr, tensors)) == self._pointers
            return unmoved and [tensors[i].stride() for i in self._layered] == self._strides
        except (RuntimeError, TypeError):  # a tensor that has no memory; None, instead of one that has died
            return False


class GradLayouts:
    """Types, strides and sizes of gradients: if these are unchanged, new gradients differ in their pointers only.

    Args:
        gradients: strided tensors.
        own: whether each is its weight's `.grad`, whose shape and device torch has checked.
    """

    def __init__(self, gradients: Sequence[torch.Tensor], own: bool) -> None:
        self._own, self._layouts = own, _layouts(gradients, own)
        self._single = [i for i, gradient in enumerate(gradients) if gradient.numel() == 1]

    def pointers(self, gradients: Sequence[Any], own: bool, present: Sequence[bool] | None = None) -> np.ndarray | None:
        """int64 [n], the data pointers of these gradients; None if one has another layout.

        Args:
            gradients: as many as those before.
            own: as for the class.
            present: for each whether it is there, where some are missing; the pointer of one that is not is 0.
        """
        if own != self._own:
            return None
        layouts: Sequence[Any] = self._layouts
        everything = gradients
        if present is not None:
            gradients = list(compress(gradients, present))
            layouts = [list(compress(each, present)) for each in layouts]
        try:
            if any(map(operator.ne, _layouts(gradients, own), layouts)):
                return None
            found = list(map(_data_ptr, gradients))
        except (AttributeError, RuntimeError, TypeError):  # None, a sparse tensor, or one that has no memory
            return None
        if 0 in found and any(not gradient.data_ptr() and gradient.numel() for gradient in gradients):
            return None
        # Autograd leaves a view with the negative bit as it is only if its strides are the weight's. It is made of the
        # imaginary parts of complex numbers, between which there are gaps, so it can have one element only.
        if self._single and any(each is not None and each.is_neg() for each in map(everything.__getitem__, self._single)):
            return None
        pointers = np.array(found, dtype=np.int64)
        if present is None:
            return pointers
        spread = np.zeros(len(present), dtype=np.int64)
        spread[np.array(present)] = pointers
        return spread


def _layouts(gradients: Sequence[Any], own: bool) -> tuple[list[Any], ...]:
    layouts = list(map(_dtype, gradients)), list(map(_stride, gradients))
    if own:  # a weight may have been cut to a part of its memory, and its gradient with it
        return *layouts, list(map(_numel, gradients))
    return *layouts, list(map(_shape, gradients)), list(map(_device, gradients))


class GradGuard:
    """Remembers which gradients steps have used, to tell which have been written since.

    A gradient counts as written if it is another tensor than the one used, or if torch has counted a write to it. It keeps
    no gradient alive.

    Args:
        parameters: whose `.grad` are asked about.
        names: what messages call the parameters.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], names: Sequence[str]) -> None:
        self._parameters, self._names = list(parameters), list(names)
        self._used: list[Reference] = [_missing] * len(parameters)
        self._versions = [-1] * len(parameters)

    def collect(self) -> list[Any]:
        """The gradient of each parameter, or None."""
        return [parameter.grad for parameter in self._parameters]

    def collect_written(self) -> tuple[list[Any], list[int]] | None:
        """All gradients and their versions, if every parameter requires one and has one that was written; else None."""
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
        """For each parameter whether it requires a gradient and has one that was written since it was used.

        Raises:
            ValueError: a gradient is an inference tensor, whose writes torch does not count.
        """
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
        """Take note that a step has used these gradients; None for parameters that it has left alone.

        Args:
            gradients: of the parameters.
            versions: of all of them, if they are known and none is missing.
            references: to all of them, if they are known and none is missing.
        """
        if versions is not None and references is not None:
            self._used, self._versions = references, versions
            return
        self._used, self._versions = list(self._used), list(self._versions)
        for i, gradient in enumerate(gradients):
            if gradient is not None:
                self._used[i], self._versions[i] = weakref.ref(gradient), gradient._version

    def snapshot(self) -> Any:
        """What it remembers, for `restore`."""
        return self._used, self._versions

    def restore(self, snapshot: Any) -> None:
        """Remember what it did when the snapshot was taken."""
        self._used, self._versions = snapshot

    def _are_other(self, gradients: Sequence[Any], versions: Sequence[int]) -> list[bool]:
        """For each gradient whether it is another tensor than the one used, or has another version."""
        return [
            gradient is not used() or version != before
            for gradient, used, version, before in zip(gradients, self._used, versions, self._versions, strict=True)
        ]


def copy_all(into: list[torch.Tensor], values: list[torch.Tensor], non_blocking: bool = False) -> None:
    """Copy each value to its tensor, such that torch counts the write; of lists of a GPU's tensors it counts none."""
    torch._foreach_copy_(into, values, non_blocking=non_blocking)
    increment_version(into)


def zero_all(tensors: list[torch.Tensor]) -> None:
    """Fill tensors with zeros, such that torch counts the write, as `copy_all` does."""
    torch._foreach_zero_(tensors)
    increment_version(tensors)


def gradient_references(gradients: Sequence[torch.Tensor | None]) -> list[Reference]:
    """Weak references to gradients; for a missing one a function that returns None."""
    try:
        return list(map(weakref.ref, gradients))
    except TypeError:
        return [_missing if gradient is None else weakref.ref(gradient) for gradient in gradients]


def _missing() -> None:
    return None
