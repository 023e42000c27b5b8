"""Executes a launch: all threads of many CTAs at once, a register being an array with an element for each thread.

Control flow goes by basic blocks. Of the blocks that threads are at, the first in the text runs next, for those threads, so
that threads which have gone different ways meet again. At bar.sync threads wait for those of their CTA.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np

from .arithmetic import UNSIGNED, Approximate, compute, dtype_of
from .asynchronous import Copies, Products
from .memory import GlobalMemory, Ranges, SharedMemory, Threads
from .ptx import Block, Instruction, Kernel, unknown
from .registers import Registers

__all__ = ["Launch"]

_AT_ONCE, _SHARED_AT_ONCE = 1 << 15, 1 << 21  # threads, and bytes of shared memory
_DONE, _WAITING = 1 << 30, 1 << 20  # "blocks" of threads that have returned; added to the block after a barrier
_ORDERING = ("griddepcontrol", "fence", "membar")  # memory is in order here


class Launch:
    """One launch of a kernel.

    Args:
        kernel: what is launched.
        grid: CTAs in each of three directions.
        parameters: by name, as unsigned numbers.
        ranges: memory that the kernel may touch.
        defect: called with each message of something wrong.
        approximate: how results of approximate instructions are rounded.

    Attributes:
        issued: instructions by name, each counted once for each warp that issues it.
        memory: what it has read and written.
        ctas: how many there are.
    """

    def __init__(
        self,
        kernel: Kernel,
        grid: tuple[int, int, int],
        parameters: dict[str, int],
        ranges: Ranges,
        defect: Callable[[str], None],
        approximate: Approximate,
    ) -> None:
        self.kernel, self.grid, self.parameters, self.approximate = kernel, grid, parameters, approximate
        self._defect = defect
        self.memory = GlobalMemory(ranges, self.defect)
        self.issued: Counter[str] = Counter()
        self.ctas = grid[0] * grid[1] * grid[2]

    def run(self) -> None:
        at_once = max(min(_AT_ONCE // self.kernel.threads, _SHARED_AT_ONCE // max(self.kernel.shared, 1)), 1)
        with np.errstate(all="ignore"):
            for first in range(0, self.ctas, at_once):
                _Batch(self, first, min(at_once, self.ctas - first)).run()
            self.memory.find_races(self.kernel.threads)

    def defect(self, message: str, line: int = 0) -> None:
        place = f" [line {line} of the PTX: {self.kernel.line(line)[:120]}]" if line else ""
        self._defect(f"{self.kernel.name}{self.grid}: {message}{place}")


class _Batch:
    """Some CTAs of a launch, executed together."""

    def __init__(self, launch: Launch, first: int, ctas: int) -> None:
        self._launch, self._kernel, self._ctas = launch, launch.kernel, ctas
        per_cta = launch.kernel.threads
        self._n = ctas * per_cta
        self._ids = np.arange(self._n, dtype=np.int64) + first * per_cta
        self._epochs = np.zeros(self._n, dtype=np.int64)  # how often each thread has passed bar.sync
        self._at = np.zeros(self._n, dtype=np.int32)  # the block that each thread is at
        self._shared = SharedMemory(ctas, launch.kernel.shared, launch.defect)
        self._local = np.full((self._n, launch.kernel.local), 0xA5, dtype=np.uint8)
        thread, cta, (x, y, z) = self._ids % per_cta, self._ids // per_cta, launch.grid
        special = {"tid.x": thread, "tid.y": 0, "tid.z": 0, "ntid.x": per_cta, "laneid": thread & 31, "warpid": thread >> 5}
        special |= {"ctaid.x": cta % x, "ctaid.y": cta // x % y, "ctaid.z": cta // (x * y)}
        special |= {"nctaid.x": x, "nctaid.y": y, "nctaid.z": z}
        registers = {f"%{name}": np.broadcast_to(v, self._n).astype(np.uint32) for name, v in special.items()}
        symbols = {name: each.ctypes.data for name, each in launch.kernel.constants.items()}
        symbols |= {"global_smem": 0, "__local_depot0": 0}  # where shared memory begins, or a thread's own
        self._registers = Registers(self._n, registers, symbols, launch.defect)
        self._copies = Copies(self._registers, self._shared, launch.memory)
        self._products = Products(self._registers, self._shared)

    @property
    def _threads(self) -> Threads:
        return Threads(self._ids, self._epochs, self._kernel.threads)

    def run(self) -> None:
        while (block := int(self._at.min())) < _DONE:
            if block >= _WAITING:  # all that have not returned wait
                if not self._release():
                    raise RuntimeError(f"{self._kernel.name}: threads wait at barriers that others never reach")
                continue
            mask = self._at == block
            self._run_block(block, self._kernel.blocks[block], None if mask.all() else mask)

    def _run_block(self, number: int, block: Block, mask: np.ndarray | None) -> None:
        warps = self._n // 32 if mask is None else int(mask.reshape(-1, 32).any(axis=1).sum())
        for name, count in block.counts.items():
            self._launch.issued[name] += count * warps
        for each in block.body:
            self._execute(each, mask)
        here: Any = slice(None) if mask is None else mask
        end, after = block.end, number + 1 if number + 1 < len(self._kernel.blocks) else _DONE
        if end is None:
            self._at[here] = after
        elif end.parts[0] in ("ret", "exit") and end.guard is None:
            self._at[here] = _DONE
        elif end.parts[0] == "bra":
            taken = self._guarded(end, mask)
            self._at[here] = after
            self._at[slice(None) if taken is None else taken] = block.target
        elif end.guard is None and self._is_for_all(end):
            self._wait(end, mask, after)
        else:
            raise unknown(end)

    def _is_for_all(self, barrier: Instruction) -> bool:
        """Whether a barrier is for all threads of a CTA, which may be one warp."""
        (which, *others) = (operand.value for operand in barrier.operands)
        if barrier.parts[1] == "warp":
            return self._kernel.threads == 32 and not others and which & 0xFFFFFFFF == 0xFFFFFFFF
        return which == 0 and not others

    def _wait(self, barrier: Instruction, mask: np.ndarray | None, after: int) -> None:
        if mask is not None:
            arrived, live = (each.reshape(self._ctas, -1) for each in (mask, self._at < _DONE))
            if (arrived.any(axis=1) & (arrived != live).any(axis=1)).any():
                self._launch.defect("bar.sync that not all threads of a CTA reach together", barrier.line)
        self._at[slice(None) if mask is None else mask] = after + _WAITING
        self._release()

    def _release(self) -> bool:
        """Let the CTAs go on all of whose threads wait, or have returned; whether there are any."""
        at = self._at.reshape(self._ctas, -1)
        over = (at >= _WAITING).all(axis=1) & (at < _DONE).any(axis=1)
        go = np.repeat(over, self._kernel.threads) & (self._at < _DONE)
        self._at[go] -= _WAITING
        self._epochs = self._epochs + go
        return bool(over.any())

    def _guarded(self, each: Instruction, mask: np.ndarray | None) -> np.ndarray | None:
        """The threads of the mask that execute an instruction."""
        if each.guard is None:
            return mask
        guard = self._registers.guard(each.guard)
        guard = ~guard if each.negated else guard
        return guard if mask is None else guard & mask

    def _execute(self, each: Instruction, mask: np.ndarray | None) -> None:
        mask = self._guarded(each, mask)
        if mask is not None and not mask.any():
            return
        name = each.parts[0]
        if name in ("ld", "st"):
            self._access(each, mask)
        elif name == "mov":
            self._move(each, mask)
        elif name in ("shfl", "redux"):
            self._exchange(each, mask)
        elif name in ("ldmatrix", "stmatrix"):
            self._access_matrices(each, mask)
        elif name == "cp" and each.parts[1] == "async":
            self._copies.execute(each, mask, self._threads)
        elif name == "wgmma":
            self._products.execute(each, mask, self._threads)
        elif name == "fence" and each.parts[1:3] == ["proxy", "async"]:
            self._shared.fence(mask)
        elif name not in _ORDERING:
            if not each.operands:
                raise unknown(each)
            target, *sources = each.operands
            value = compute(each, lambda k, kind: self._registers.value(sources[k], kind), self._launch.approximate)
            for member, part in zip(target.value, value, strict=True) if target.kind == "vector" else ((target, value),):
                self._registers.set(member, part, mask)

    # Memory

    def _access(self, each: Instruction, mask: np.ndarray | None) -> None:
        """ld and st of parameters, and of global, shared and local memory."""
        loads, space, kind = each.parts[0] == "ld", each.parts[1].removesuffix("::cta"), dtype_of(each.parts[-1])
        data, place = each.operands if loads else each.operands[::-1]
        members, size = data.value if data.kind == "vector" else (data,), np.dtype(kind).itemsize
        if space == "param":
            value = self._launch.parameters[place.value.value] >> (8 * place.offset)
            self._registers.set(data, UNSIGNED[8 * size](value & ((1 << 8 * size) - 1)).view(kind), mask)
        elif space == "shared":
            address = self._registers.values(place.value, np.uint32).astype(np.int64) + place.offset
            if loads:
                found = self._shared.load(address, mask, size * len(members), self._threads, each.line)
                for k, member in enumerate(members):
                    part = np.ascontiguousarray(found.reshape(self._n, len(members), size)[:, k])
                    self._registers.set(member, part.view(kind).ravel(), mask)
            else:
                values = np.stack([self._registers.values(member, kind) for member in members], axis=1)
                self._shared.store(address, mask, values.view(np.uint8), self._threads, each.line)
        elif space == "global":
            address = self._registers.values(place.value, np.int64) + place.offset
            whole, memory = size * len(members), self._launch.memory
            allowed = memory.check("load" if loads else "store", address, mask, whole, self._threads, each.line)
            for k, member in enumerate(members):
                if loads:
                    self._registers.set(member, memory.load(address + k * size, allowed, size).view(kind), mask)
                else:
                    memory.store(
                        address + k * size, allowed, size, self._registers.values(member, kind).view(UNSIGNED[8 * size])
                    )
        elif space == "local":
            address = self._registers.values(place.value, np.uint32).astype(np.int64) + place.offset
            self._access_local(each, mask, members, address)
        else:
            raise unknown(each)

    def _access_local(self, each: Instruction, mask: np.ndarray | None, members: Any, address: np.ndarray) -> None:
        """ld and st of memory of a thread's own."""
        kind, have = dtype_of(each.parts[-1]), self._kernel.local
        lanes, size = np.arange(self._n) if mask is None else np.flatnonzero(mask), np.dtype(kind).itemsize
        wrong = (address[lanes] < 0) | (address[lanes] + size * len(members) > have)
        if wrong.any():
            self._launch.defect(f"local {each.parts[0]} at {address[lanes][wrong][0]} of {have} bytes", each.line)
            lanes = lanes[~wrong]
        for k, member in enumerate(members):
            place = lanes[:, None], address[lanes][:, None] + np.arange(k * size, (k + 1) * size)
            if each.parts[0] == "ld":
                found = np.zeros((self._n, size), dtype=np.uint8)
                found[lanes] = self._local[place]
                self._registers.set(member, found.view(kind).ravel(), mask)
            else:
                value = np.ascontiguousarray(self._registers.values(member, kind)).view(np.uint8).reshape(self._n, size)
                self._local[place] = value[lanes]

    def _access_matrices(self, each: Instruction, mask: np.ndarray | None) -> None:
        """ldmatrix and stmatrix: matrices of 8 rows of 8 numbers of 16 bits in shared memory.

        Lanes 8 k to 8 k + 7 have the addresses of matrix k's rows; each lane has two neighbours of a row of each matrix.
        """
        if each.parts[1:4] != ["sync", "aligned", "m8n8"] or each.parts[-1] != "b16":
            raise unknown(each)
        loads, lane = each.parts[0] == "ldmatrix", np.arange(32)
        members, place = each.operands if loads else each.operands[::-1]
        rows = (self._registers.values(place.value, np.uint32).astype(np.int64) + place.offset).reshape(-1, 32)
        if ((rows % 16 != 0) & (True if mask is None else mask.reshape(-1, 32))).any():
            self._launch.defect("row of a matrix is misaligned", each.line)
        if "trans" in each.parts:  # the two are neighbours of a column
            kind, places = np.uint16, [(2 * (lane % 4) + k, 2 * (lane // 4)) for k in range(2)]
        else:
            kind, places = np.uint32, [(lane // 4, 4 * (lane % 4))]
        for k, member in enumerate(members.value):
            address = np.stack([rows[:, 8 * k + row] + byte for row, byte in places], axis=-1).reshape(self._n, -1)
            size = np.dtype(kind).itemsize
            if loads:
                found = [self._shared.load(each_place, mask, size, self._threads, each.line) for each_place in address.T]
                self._registers.set(member, np.concatenate(found, axis=1).view(np.uint32).ravel(), mask)
            else:
                value = (
                    np.ascontiguousarray(self._registers.values(member, np.uint32)).view(np.uint8).reshape(self._n, -1, size)
                )
                for j, each_place in enumerate(address.T):
                    self._shared.store(each_place, mask, value[:, j], self._threads, each.line)

    def _move(self, each: Instruction, mask: np.ndarray | None) -> None:
        """mov, also between a register and the parts of one."""
        (target, source), kind = each.operands, dtype_of(each.parts[-1])
        if target.kind == "vector":  # the lowest bits first
            bits = 8 * np.dtype(kind).itemsize // len(target.value)
            for k, member in enumerate(target.value):
                if member.value != "_":
                    self._registers.set(
                        member, (self._registers.values(source, kind) >> kind(k * bits)).astype(UNSIGNED[bits]), mask
                    )
        elif source.kind == "vector":
            bits = 8 * np.dtype(kind).itemsize // len(source.value)
            parts = [self._registers.values(member, UNSIGNED[bits]).astype(kind) for member in source.value]
            self._registers.set(target, np.bitwise_or.reduce([part << kind(k * bits) for k, part in enumerate(parts)]), mask)
        else:
            self._registers.set(target, self._registers.value(source, kind), mask)

    def _exchange(self, each: Instruction, mask: np.ndarray | None) -> None:
        """shfl and redux: what the threads of a warp tell each other."""
        lanes = self._registers.values(each.operands[-1], np.uint32)
        if (lanes[slice(None) if mask is None else mask] != 0xFFFFFFFF).any():
            raise unknown(each)
        if mask is not None and (mask.reshape(-1, 32).any(axis=1) != mask.reshape(-1, 32).all(axis=1)).any():
            self._launch.defect(f"{each.name} that not all lanes of a warp reach together", each.line)
        kind, how = dtype_of(each.parts[-1]), each.parts[2]
        value = self._registers.values(each.operands[1], kind).reshape(-1, 32)
        if each.parts[0] == "redux" and how in _REDUCTIONS:
            self._registers.set(each.operands[0], np.repeat(_REDUCTIONS[how](value, axis=1).astype(kind), 32), mask)
        elif how == "bfly" and each.operands[2].kind == "integer" and each.operands[3].value == 31:
            self._registers.set(each.operands[0], value[:, np.arange(32) ^ each.operands[2].value].ravel(), mask)
        elif how == "idx" and each.operands[3].value == 31:
            lane = self._registers.values(each.operands[2], np.uint32).reshape(-1, 32) & np.uint32(31)
            self._registers.set(each.operands[0], np.take_along_axis(value, lane.astype(np.int64), axis=1).ravel(), mask)
        else:
            raise unknown(each)


_REDUCTIONS: dict[str, Any] = {
    "max": np.max,
    "min": np.min,
    "add": np.sum,
    "and": np.bitwise_and.reduce,
    "or": np.bitwise_or.reduce,
}
