"""The registers of many threads, each an array with an element for each thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .arithmetic import FLOATS, UNSIGNED
from .ptx import Operand

__all__ = ["Registers"]

_UNDEFINED = b"\xa5"  # in registers that have never been set: LLVM does not define halves that nobody reads


class Registers:
    """The values of operands.

    Args:
        n: threads.
        special: values of special registers, such as %tid.x.
        symbols: addresses by name.
        defect: called with a message of something wrong.

    Attributes:
        in_flight: names of those that wgmma will write later, which nothing else may use until it has.
    """

    def __init__(
        self, n: int, special: dict[str, np.ndarray], symbols: dict[str, int], defect: Callable[[str], None]
    ) -> None:
        self._n, self._special, self._symbols, self._defect = n, special, symbols, defect
        self._arrays: dict[str, np.ndarray] = {}
        self.in_flight: set[str] = set()

    def value(self, operand: Operand, kind: Any) -> Any:
        """An operand's value in a type: an array, or a number that all threads share."""
        if operand.kind in ("register", "special"):
            self._check(operand)
            found = (self._special if operand.kind == "special" else self._arrays).get(operand.value)
            if found is None:
                if operand.kind == "special":
                    raise NotImplementedError(f"the emulator does not know the register {operand.value}")
                found = np.frombuffer(_UNDEFINED * (self._n * 8), dtype=UNSIGNED[operand.bits])[: self._n]
            bits = 8 * np.dtype(kind).itemsize
            if 8 * found.dtype.itemsize > bits:  # the lower ones
                found = found.astype(UNSIGNED[bits])
            return found.view(kind) if found.dtype != kind else found
        if operand.kind == "integer":
            bits = 8 * np.dtype(kind).itemsize
            if kind == np.bool_:
                return np.bool_(operand.value)
            return UNSIGNED[bits](operand.value & ((1 << bits) - 1)).view(kind)
        if operand.kind == "float":
            return UNSIGNED[operand.bits](operand.value).view(FLOATS[operand.bits]).view(kind)
        if operand.value not in self._symbols:
            raise NotImplementedError(f"the emulator does not know the operand {operand.value!r}")
        return kind(self._symbols[operand.value])

    def values(self, operand: Operand, kind: Any) -> np.ndarray:
        """The same with an element for each thread."""
        return np.broadcast_to(self.value(operand, kind), (self._n,))

    def set(self, operand: Operand, value: Any, mask: np.ndarray | None) -> None:
        """Set a register of the threads in the mask, or of all."""
        self._check(operand)
        bits, value = UNSIGNED[operand.bits], np.asarray(value)
        if value.dtype.itemsize < np.dtype(bits).itemsize:  # signed numbers keep their sign
            value = value.astype(np.dtype(f"{value.dtype.kind}{np.dtype(bits).itemsize}"))
        value = value.view(bits) if value.dtype != bits else value
        value = value if value.shape == (self._n,) else np.broadcast_to(value, (self._n,))
        if mask is not None:
            value = np.where(mask, value, self._arrays.get(operand.value, bits(0)))
        self._arrays[operand.value] = value

    def guard(self, name: str) -> np.ndarray:
        """A predicate by its name."""
        return self._arrays[name]

    def _check(self, operand: Operand) -> None:
        if operand.value in self.in_flight:
            self._defect(f"{operand.value} is used before wgmma.wait_group")
