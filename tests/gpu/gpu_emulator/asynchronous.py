"""Copies and products that a thread starts and waits for later: cp.async and wgmma.

Each takes effect where its group is waited for, which is as late as a GPU may do it. Until then shared memory that is copied
to, and registers that are added to, have their old contents; to use them, or to overwrite what is read, is a defect.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from .memory import PIECE, GlobalMemory, SharedMemory, Threads
from .ptx import Instruction, Operand, unknown
from .registers import Registers

__all__ = ["Copies", "Products"]

_GROUP, _ROWS, _DEPTH = 128, 64, 16  # threads that compute a product together; its rows; products of each sum
_SWIZZLE_128 = 1  # in a descriptor: the 16 bytes k of row r of 128 bytes are at k ^ (r % 8)


@dataclass
class _Copy:
    target: np.ndarray  # addresses
    source: np.ndarray
    reads: np.ndarray  # threads whose copy reads; those of the others fill with zeros
    waiting: np.ndarray  # threads that have not waited for it yet
    group: np.ndarray  # its number, by thread
    size: int
    line: int


@dataclass
class _Product:
    each: Instruction
    a: np.ndarray  # addresses of pieces, [groups, ...]
    b: np.ndarray
    adds: np.ndarray  # whether it is added to what the registers have, by group of threads
    waiting: np.ndarray  # groups of threads that have not waited for it yet
    group: np.ndarray  # its number, by group of threads


class Copies:
    """cp.async of many threads: each waits for its own."""

    def __init__(self, registers: Registers, shared: SharedMemory, memory: GlobalMemory) -> None:
        self._registers, self._shared, self._memory = registers, shared, memory
        self._copies: list[_Copy] = []
        self._committed: Any = 0  # groups, by thread

    def execute(self, each: Instruction, mask: np.ndarray | None, threads: Threads) -> None:
        n = len(threads.ids)
        active = np.ones(n, dtype=bool) if mask is None else mask
        if each.parts[2] == "commit_group":
            self._committed = self._committed + active.astype(np.int64)
        elif each.parts[2] == "wait_group":
            self._wait(self._committed - each.operands[0].value, active, threads)
        elif each.parts[2:] == ["cg", "shared", "global"] and each.operands[2].value == PIECE:
            self._start(each, active, np.broadcast_to(self._committed, n), threads)
        else:
            raise unknown(each)

    def _start(self, each: Instruction, active: np.ndarray, group: np.ndarray, threads: Threads) -> None:
        to, of, size, *limit = each.operands
        target = self._registers.values(to.value, np.uint32).astype(np.int64) + to.offset
        source = self._registers.values(of.value, np.int64) + of.offset
        reads = active
        if limit:
            given = self._registers.values(limit[0], np.uint32)
            if not np.isin(given[active], (0, size.value)).all():
                raise unknown(each)
            reads = active & (given != 0)
        allowed = self._memory.check("load", source, reads, size.value, threads, each.line)
        self._shared.begin_copy(target, active, size.value, threads, each.line)
        self._copies.append(_Copy(target, source, allowed, active, group, size.value, each.line))

    def _wait(self, before: np.ndarray, active: np.ndarray, threads: Threads) -> None:
        for each in self._copies:
            now = each.waiting & active & (each.group < before)
            if not now.any():
                continue
            halves = [self._memory.load(each.source + 8 * k, each.reads & now, 8) for k in range(each.size // 8)]
            found = np.where((each.reads & now)[:, None], np.stack(halves, axis=1), np.uint64(0))
            self._shared.end_copy(each.target, now, found.view(np.uint8), threads, each.line)
            each.waiting = each.waiting & ~now
        self._copies = [each for each in self._copies if each.waiting.any()]


class Products:
    """wgmma of many groups of four warps: D = A B + D, with D in registers and A and B in shared memory."""

    def __init__(self, registers: Registers, shared: SharedMemory) -> None:
        self._registers, self._shared = registers, shared
        self._products: list[_Product] = []
        self._committed: Any = 0  # groups of products, by group of threads
        self._fenced: Any = False  # whether wgmma.fence has come after the last wait, by group of threads

    def execute(self, each: Instruction, mask: np.ndarray | None, threads: Threads) -> None:
        n = len(threads.ids) // _GROUP
        active = np.ones(n, dtype=bool)
        if mask is not None:
            together = mask.reshape(n, _GROUP)
            active = together.any(axis=1)
            if (active != together.all(axis=1)).any():
                self._shared.defect(f"{each.name} that not all threads of four warps reach together", each.line)
        if each.parts[1] == "fence":
            self._fenced = self._fenced | active
        elif each.parts[1] == "commit_group":
            self._committed = self._committed + active.astype(np.int64)
        elif each.parts[1] == "wait_group":
            self._wait(self._committed - each.operands[0].value, active, threads)
            self._fenced = self._fenced & ~active
        else:
            self._start(each, active, np.broadcast_to(self._committed, n), threads)

    def _start(self, each: Instruction, active: np.ndarray, group: np.ndarray, threads: Threads) -> None:
        known = re.fullmatch(r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k16\.f32\.(bf16|f16)\.\2", each.name)
        if known is None or [operand.value for operand in each.operands[4:6]] != [1, 1]:
            raise unknown(each)
        if not (self._fenced | ~active).all():
            self._shared.defect("wgmma without wgmma.fence after what the registers were used for", each.line)
        a, b = (
            self._pieces(each, operand, rows, bool(turned.value))
            for operand, rows, turned in zip(each.operands[1:3], (_ROWS, int(known[1])), each.operands[6:], strict=True)
        )
        adds = self._registers.values(each.operands[3], np.bool_).reshape(-1, _GROUP)[:, 0]
        for pieces in (a, b):
            self._shared.begin_products(pieces, active, threads, each.line)
        self._products.append(_Product(each, a, b, adds, active, group))
        self._registers.in_flight = self._in_flight()

    def _pieces(self, each: Instruction, operand: Operand, rows: int, turned: bool) -> np.ndarray:
        """The addresses of a matrix's pieces of 8 numbers, [groups, rows, 2] or, of a turned one, [groups, 16, rows / 8].

        Source: PTX ISA, section 9.7.15.5.1, "Shared memory matrix layout"; CUTLASS, cute/arch/mma_sm90_desc.hpp.
        """
        if operand.kind != "register" or operand.bits != 64:
            raise unknown(each)
        descriptors = self._registers.values(operand, np.uint64).astype(np.int64).reshape(-1, _GROUP)
        if (descriptors != descriptors[:, :1]).any():
            self._shared.defect("a descriptor of a matrix differs between threads of four warps", each.line)
        start, leading, stride = (((descriptors[:, 0] >> bit & 0x3FFF) << 4)[:, None, None] for bit in (0, 16, 32))
        rest = descriptors & ~np.int64(0x3FFF << 32 | 0x3FFF << 16 | 0x3FFF)
        if (rest != np.int64(_SWIZZLE_128) << np.int64(62)).any():
            raise unknown(each)
        row, column = np.ogrid[: _DEPTH if turned else rows, : rows // 8 if turned else 2]
        address = start + row // 8 * stride + row % 8 * 128 + column % 8 * 16 + column // 8 * leading
        return address ^ (address >> 7 & 7) << 4

    def _wait(self, before: np.ndarray, active: np.ndarray, threads: Threads) -> None:
        self._registers.in_flight = set()
        for each in self._products:
            now = each.waiting & active & (each.group < before)
            if now.any():
                self._finish(each, now, threads)
                each.waiting = each.waiting & ~now
        self._products = [each for each in self._products if each.waiting.any()]
        for each in self._products:  # others may still read what some have read
            for pieces in (each.a, each.b):
                self._shared.begin_products(pieces, each.waiting, threads, 0)
        self._registers.in_flight = self._in_flight()

    def _in_flight(self) -> set[str]:
        return {operand.value for each in self._products for operand in each.each.operands[0].value}

    def _finish(self, each: _Product, now: np.ndarray, threads: Threads) -> None:
        targets = each.each.operands[0].value
        a, b = (
            self._matrix(pieces, now, turned.value, each.each.parts[-1], threads)
            for pieces, turned in zip((each.a, each.b), each.each.operands[6:], strict=True)
        )
        place = _places(len(targets))
        have = np.stack([self._registers.values(target, np.float32) for target in targets]).reshape(len(targets), -1, _GROUP)
        total = np.zeros((len(now), _ROWS * b.shape[1]), dtype=np.float32)
        total[:, place] = np.where(each.adds[:, None, None], have.transpose(1, 0, 2), np.float32(0))
        total += np.matmul(a, b.transpose(0, 2, 1)).reshape(total.shape)
        mask = np.repeat(now, _GROUP)
        for target, values in zip(targets, total[:, place].transpose(1, 0, 2), strict=True):
            self._registers.set(target, values.ravel(), mask)

    def _matrix(self, pieces: np.ndarray, now: np.ndarray, turned: int, kind: str, threads: Threads) -> np.ndarray:
        """float32 [groups, rows, 16]."""
        bits = self._shared.end_products(pieces, now, threads).view(np.uint16)
        values = (bits.astype(np.uint32) << 16).view(np.float32) if kind == "bf16" else bits.view(np.float16)
        matrix = values.astype(np.float32).reshape(len(pieces), pieces.shape[1], -1)
        return matrix.transpose(0, 2, 1) if turned else matrix


def _places(registers: int) -> np.ndarray:
    """Where a product [64, n] has the number that a thread has in a register: [registers, threads].

    Source: PTX ISA, figure "WGMMA .m64nNk16 register fragment layout for accumulator matrix D".
    """
    register, thread = np.ogrid[:registers, :_GROUP]
    row = thread // 32 * 16 + thread % 32 // 4 + register // 2 % 2 * 8
    return row * (2 * registers) + register // 4 * 8 + thread % 4 * 2 + register % 2
