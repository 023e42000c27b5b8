"""NumberTensors: update counts, and other numbers of parameters, that are tensors in an optimizer's `state`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ...kernels.layouts import is_wrapper

if TYPE_CHECKING:
    from .base import FusedOptimizer

__all__ = ["NumberTensors"]

_data_ptr = torch.Tensor.data_ptr


class NumberTensors:
    """One number of each parameter. The tensors in `state` are the truth, whoever made them and wherever they are moved.

    The optimizer's own tensors share an array, which NumPy owns, so a step reads and writes all of them at once. A tensor
    that the user put in, or moved to other memory (`share_memory_`, `set_`, `.data`, a queue), is read and written alone.

    Args:
        optimizer: has the parameters.
        parameters: in order.
        name: the key in `state[parameter]`.
        first: the number of each parameter that has none in its state yet.

    Attributes:
        array: [n], the numbers after `read`.
        apart: places of the tensors that have memory of their own, which `write` is for.
    """

    def __init__(
        self, optimizer: FusedOptimizer, parameters: Sequence[torch.Tensor], name: str, first: Sequence[float]
    ) -> None:
        rows = [optimizer.state[parameter] for parameter in parameters]
        values = [
            number if row.get(name) is None or getattr(row[name], "is_meta", False) else float(row[name])
            for row, number in zip(rows, first, strict=True)
        ]
        ranges = [(array.ctypes.data, array.ctypes.data + array.nbytes) for array in optimizer._number_arrays]
        dtype = np.float64 if torch.get_default_dtype() == torch.float64 else np.float32
        self.array: np.ndarray = np.array(values, dtype=dtype)
        optimizer._number_arrays = [*optimizer._number_arrays, self.array]
        with torch.inference_mode(False):  # they outlive the step
            # Each has a storage of its own, so that it is pickled without the others.
            new = [torch.from_numpy(self.array[i : i + 1].reshape(())) for i in range(len(values))]
        self._own_pointers = self._pointers = list(map(_data_ptr, new))
        for row, own in zip(rows, new, strict=True):
            tensor = row.get(name)
            if not _is_writable(tensor):
                row[name] = own
            elif (optimizer._is_copy and not tensor.is_shared()) or any(a <= tensor.data_ptr() < b for a, b in ranges):
                tensor.data = own
        self._tensors: list[torch.Tensor] = [row[name] for row in rows]
        self.apart: list[int] = []

    def read(self) -> None:
        """Take the numbers from the tensors."""
        pointers = list(map(_data_ptr, self._tensors))
        if pointers != self._pointers:
            self._pointers = pointers
            self.apart = [i for i, own in enumerate(self._own_pointers) if pointers[i] != own]
        if self.apart:
            self.array[self.apart] = [self._tensors[i].item() for i in self.apart]

    def write(self, changed: Sequence[Any], counted: bool) -> None:
        """Write the numbers to the tensors.

        Args:
            changed: indices of `array` that have changed.
            counted: each has grown by 1, which is added to what a tensor has: another process may count in it, too.
        """
        written = np.zeros(len(self.array), dtype=bool)
        for rows in changed:
            written[rows] = True
        places = [i for i in self.apart if written[i]]
        tensors = [self._tensors[i] for i in places]
        if counted and tensors:
            torch._foreach_add_(tensors, 1)
        elif tensors:
            torch._foreach_copy_(tensors, list(torch.from_numpy(self.array[places]).unbind()))


def _is_writable(value: Any) -> bool:
    """Whether a step can count in it. Numbers, and tensors on devices, which a step would wait for, are replaced."""
    return (
        isinstance(value, torch.Tensor)
        and not is_wrapper(value)
        and value.device.type == "cpu"
        and value.layout == torch.strided
        and value.numel() == 1
        and not value.is_inference()
    )
