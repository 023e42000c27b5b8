"""Guards: detect changed data pointers, and gradients that were written since the last step.

A guard checks every tensor at every step, so it is a few passes of C functions over lists, or one compiled pass of `look`.
"""

from __future__ import annotations

import contextlib
import importlib
import operator
import sys
import weakref
from collections.abc import Callable, Sequence
from itertools import chain, compress
from typing import Any

import numpy as np
import torch
from torch.autograd.graph import increment_version

Reference = Callable[[], "torch.Tensor | None"]  # a weak reference, or `_missing`

_data_ptr, _stride, _numel, _dim = torch.Tensor.data_ptr, torch.Tensor.stride, torch.Tensor.numel, torch.Tensor.dim
_dtype, _device, _shape, _nbytes = map(operator.attrgetter, ("dtype", "device", "shape", "nbytes"))
_version = operator.attrgetter("_version")
# The compiled passes, once they are imported. That takes 0.01 s if numba is there already, 0.7 s if not, and half a second
# more the first time. So a process first makes so many checks, of which a step has a few; fewer with numba.
_look: Any = None
_checks, _SOME, _SOME_WITH_NUMBA = 0, 3_000, 100
_MANY = 16  # parameters from which on compiled passes collect their gradients faster than Python


def look_in_use() -> Any:
    """Return the module `look`; None at the beginning of a process, and where it does not work."""
    global _look, _checks
    if _checks <= _SOME:
        _checks += 1
        if _checks > (_SOME_WITH_NUMBA if "numba" in sys.modules else _SOME):
            _checks = _SOME + 1
            with contextlib.suppress(ImportError):  # no numba, or a torch without the interface
                _look = importlib.import_module(".backends.cpu.look", __package__)
    return _look


class _Guard:
    """Base class of guards that have what they remember once more for `look`, in `compiled`; False if it cannot have it."""

    compiled: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"compiled": None}  # it has addresses of its own memory

    def _compile(self, name: str, *objects: Any) -> None:
        """Make `compiled`, a class of `look`, once that is in use."""
        if self.compiled is None and (look := look_in_use()) is not None:
            try:
                self.compiled = getattr(look, name)(*objects)
            except ValueError:
                self.compiled = False


class PointerGuard(_Guard):
    """Detects tensors whose data pointers, sizes or strides have changed, as when one is cut or transposed in place.

    `pointers`: the data pointers, if they are known.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], pointers: list[int] | None = None) -> None:
        self._pointers = list(map(_data_ptr, tensors)) if pointers is None else pointers
        self._bytes = list(map(_nbytes, tensors))
        # A vector that keeps its pointer keeps its stride, so only tensors with more dimensions are compared.
        self._multidimensional = list(compress(range(len(tensors)), map((1).__lt__, map(_dim, tensors))))
        self._strides = [tensors[i].stride() for i in self._multidimensional]

    def passes(self, tensors: Sequence[torch.Tensor]) -> bool:
        if self.compiled:
            return self.compiled.are_in_place(tensors)
        try:
            unmoved = list(map(_data_ptr, tensors)) == self._pointers and list(map(_nbytes, tensors)) == self._bytes
            passed = unmoved and [tensors[i].stride() for i in self._multidimensional] == self._strides
        except (AttributeError, RuntimeError, TypeError):  # a tensor without memory, or None for a deleted one
            return False
        if passed:
            self._compile("Layouts", tensors)
        return passed


class MemberGuard(_Guard):
    """Detects whether lists have other items, or dictionaries other values. It keeps those of now alive."""

    def __init__(self, lists: Sequence[list[Any]], dicts: Sequence[dict[Any, Any]]) -> None:
        self._lists, self._dicts = list(lists), list(dicts)
        self._members = self._now()

    def passes(self) -> bool:
        if self.compiled:
            return self.compiled.are_same()
        now = self._now()
        passed = len(now) == len(self._members) and all(map(operator.is_, now, self._members))
        if passed:
            self._compile("Members", self._lists, self._dicts)
        return passed

    def _now(self) -> list[Any]:
        return [*chain.from_iterable(self._lists), *chain.from_iterable(each.values() for each in self._dicts)]


class GradLayouts(_Guard):
    """Recognizes new gradients that differ from these only in their pointers: same dtypes, strides and sizes.

    `own` means each is its weight's `.grad`, so that torch has checked its shape and device.
    """

    def __init__(self, gradients: Sequence[torch.Tensor], own: bool) -> None:
        self._own, self._layouts = own, _layouts(gradients, own)
        self._addresses = list(map(_data_ptr, gradients))
        self.are_same = False  # whether the last call, if compiled, found the very gradients of `before`
        self._single = list(compress(range(len(gradients)), map((1).__eq__, map(_numel, gradients))))

    def compile(self, gradients: Sequence[torch.Tensor]) -> None:
        """Recognize gradients faster from now on, if that is possible; these have been recognized."""
        self._compile("Layouts", gradients)

    def pointers(
        self,
        gradients: Sequence[Any],
        own: bool,
        present: Sequence[bool] | None = None,
        before: Sequence[Reference] = (),
    ) -> np.ndarray | None:
        """Return the data pointers of these gradients, int64 [n], or None if a layout, or `own`, differs from before.

        `present` tells which gradients are not None (default: all); the pointer of a missing one is 0. `before`: references
        to the gradients of the last call. If one of them has moved, its storage may have become too small, so the result is
        None.
        """
        if own != self._own:
            return None
        pointers = None
        if not self.compiled:
            pointers = self._pointers(gradients, present, before)
        elif (found := self.compiled.addresses(gradients, present is not None, before)) is not None:
            pointers, self.are_same = found
        # Autograd keeps a view with the negative bit only if its strides are the weight's. Such a view shows the imaginary
        # parts of complex numbers, which have gaps between them, so it has one element.
        if pointers is None:
            return None
        if self._single and any(gradients[i] is not None and gradients[i].is_neg() for i in self._single):
            return None
        if present is None and self.compiled is None:
            self.compile(gradients)
        return pointers

    def _pointers(
        self, gradients: Sequence[Any], present: Sequence[bool] | None, before: Sequence[Reference]
    ) -> np.ndarray | None:
        layouts: Sequence[Any] = self._layouts
        tensors = gradients
        if present is not None:
            tensors = list(compress(gradients, present))
            layouts = [list(compress(layout, present)) for layout in layouts]
        try:
            if any(map(operator.ne, _layouts(tensors, self._own), layouts)):
                return None
            addresses = list(map(_data_ptr, tensors))
        except (AttributeError, RuntimeError, TypeError):  # None, a sparse tensor, or one without memory
            return None
        if 0 in addresses and any(not tensor.data_ptr() and tensor.numel() for tensor in tensors):
            return None
        if present is not None:
            found = iter(addresses)
            addresses = [next(found) if there else 0 for there in present]
        rows = zip(addresses, self._addresses, before, gradients, strict=False)
        if any(now not in (0, then) and reference() is gradient for now, then, reference, gradient in rows):
            return None
        self._addresses = addresses
        return np.array(addresses, dtype=np.int64)


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
        self._versions: Sequence[int] = [-1] * len(parameters)

    def collect(self) -> list[Any]:
        return [parameter.grad for parameter in self._parameters]

    def collect_written(self) -> tuple[list[Any], Sequence[int]] | None:
        """Return all gradients and their versions if every parameter requires grad and has a written one; else None."""
        if len(self._parameters) >= _MANY and (look := look_in_use()) is not None:
            return look.written_gradients(self._parameters, self._used, self._versions)
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
        versions: Sequence[int] | None = None,
        references: list[Reference] | None = None,
    ) -> None:
        """Mark these gradients as used by a step; None marks a parameter that the step did not update.

        Callers that already have all versions and references, and no None, pass them.
        """
        if versions is not None and references is not None:
            self._used, self._versions = references, versions
            return
        used, counted = list(self._used), list(self._versions)
        for i, gradient in enumerate(gradients):
            if gradient is not None:
                used[i], counted[i] = weakref.ref(gradient), gradient._version
        self._used, self._versions = used, counted

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
    if _look is not None:
        return _look.references_to(gradients, _missing)
    try:
        return list(map(weakref.ref, gradients))
    except TypeError:
        return [_missing if gradient is None else weakref.ref(gradient) for gradient in gradients]


def _missing() -> None:
    return None
