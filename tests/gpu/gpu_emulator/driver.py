"""A Triton driver whose GPU is the emulator. All above it is the real thing: Triton's JIT, and the project's launcher.

Kernels are compiled for sm_90 up to PTX, which is the "binary", so ptxas is not needed. Tensors are CPU tensors, and their
host addresses are the device's. Arguments are taken apart as Triton's C launcher does it, and checked: their types against
the kernel's signature, and their values against those that the kernel was specialised for.
"""

from __future__ import annotations

import os
import struct
import sys
import weakref
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget

from .arithmetic import rounded
from .machine import Launch
from .memory import Range, Ranges
from .ptx import Kernel
from .stream import Stream

__all__ = ["ERRORS", "Emulator", "install"]

_FORMATS = {
    "i1": "b",
    "i8": "b",
    "i16": "h",
    "i32": "i",
    "i64": "q",
    "u1": "B",
    "u8": "B",
    "u16": "H",
    "u32": "I",
    "u64": "Q",
}
_FORMATS |= {"fp32": "f", "fp64": "d"}
_POINTERS = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.uint8: "u8",
    torch.int8: "i8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.bool: "i1",
}


def _random_share(value: np.ndarray) -> np.ndarray:
    """A number in [-1, 1) for each value, the same for the same value, as an instruction's result is."""
    bits = np.ascontiguousarray(value, dtype=np.float64).view(np.uint64)
    return ((bits ^ bits >> np.uint64(29)) * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(11)) * 2.0**-52 - 1


# The errors of approximate instructions, as functions from exact results to parts of the largest error.
ERRORS: dict[str, Callable[[np.ndarray], Any]] = {
    "up": lambda value: 1.0,
    "down": lambda value: -1.0,
    "random": _random_share,
}


class Emulator:
    """What Triton 3.5 to 3.9 ask of a driver, and what is known of all launches.

    Attributes:
        launches: those that have been made.
        defects: what has been found wrong, each message once.
        stream: where launches are queued; None: they are run at once. See stream.py.
        edit: if not None, applied to the text of each kernel that is launched, to plant a defect.
        gpus: simulated GPUs, one of which launches are made on; None: there is one. See tests/simulated_gpus.py.
    """

    def __init__(self) -> None:
        self.launches: list[Launch] = []
        self.defects: list[str] = []
        self.stream: Stream | None = None
        self.edit: Callable[[str], str] | None = None
        self.gpus: Any = None
        self._error: str | None = None
        self._kernels: dict[str, Kernel] = {}  # by their text
        self._tables: weakref.WeakSet[Any] = weakref.WeakSet()
        self.utils = self  # Triton asks some of its questions there
        self.launcher_cls = partial(_Launcher, self)

    def set_error(self, error: str | None) -> None:
        """Let results of approximate instructions be as wrong as the manual allows: too large, too small, or at random.

        Args:
            error: one of `ERRORS`; None: they are rounded to the nearest.
        """
        self._error = error

    def approximate(self, value: np.ndarray, error: np.ndarray) -> np.ndarray:
        """float64 as float32, wrong as `set_error` says, by so much at most."""
        found = rounded(value, error)
        if self._error is None:
            return found
        with np.errstate(all="ignore"):  # half an ulp is left for rounding
            off = value + ERRORS[self._error](value) * np.maximum(
                error - np.spacing(np.abs(found)).astype(np.float64) / 2, 0
            )
        return np.where(np.isfinite(found) & (found != 0), off, found).astype(np.float32)

    def defect(self, message: str) -> None:
        """Note what is wrong."""
        if message not in self.defects:
            self.defects.append(message)

    def watch(self, table: Any) -> None:
        """Let kernels touch the tensors of a `Launch` of the product, as long as it lives."""
        self._tables.add(table)

    def ranges(self) -> Iterator[Range]:
        """The tensors of all tables, which kernels may touch in addition to their arguments."""
        for table in self._tables:
            yield from _ranges_of(table)

    def tensors(self) -> Iterator[Any]:
        """All tensors that tables work on now."""
        for table in self._tables:
            yield from (table.weights, table.states, table.masters)
            yield [None if gradient is None else gradient() for gradient in table.gradients]

    # What Triton asks.

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0 if self.gpus is None else self.gpus.current

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 232448}

    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple[Any, ...]:
        text = binary.decode()
        if text not in self._kernels:
            self._kernels[text] = Kernel(text, shared)
        return 1, self._kernels[text], 0, 0, 1024  # module, function, registers, spilled bytes, threads of a CTA at most

    def unload_module(self, module: int) -> None:
        pass


class _Launcher:
    """As Triton's own launcher: one for each compiled kernel, called with a grid and all arguments."""

    def __init__(self, emulator: Emulator, source: Any, metadata: Any) -> None:
        self._emulator, self._threads, self._attributes = emulator, metadata.num_warps * 32, source.attrs
        self._signature = list(source.signature.items())
        self._constants = {(k,) if isinstance(k, int) else k: value for k, value in source.constants.items()}

    def __call__(self, x: int, y: int, z: int, stream: Any, kernel: Kernel, *rest: Any) -> None:
        arguments = rest[4:]  # two sets of metadata and two hooks come first
        emulator = self._emulator

        def defect(message: str) -> None:
            emulator.defect(f"{kernel.name}: {message}")

        if len(arguments) != len(self._signature):
            defect(f"launched with {len(arguments)} arguments, the kernel has {len(self._signature)}")
        buffers: list[Range] = []
        values: list[int] = []
        for place, ((name, kind), argument) in enumerate(zip(self._signature, arguments, strict=False)):
            if kind == "constexpr":
                compiled = self._constants.get((place,), argument)
                plain = type(compiled) is type(argument) and isinstance(argument, int | float | str | tuple)
                if plain and compiled != argument:
                    defect(f"compiled for {name}={compiled!r}, launched with {argument!r}")
                continue
            values.append(_bits(name, kind, argument, buffers, defect))
            for attribute, number in self._attributes.get((place,), []):
                if attribute == "tt.divisibility" and values[-1] % number:
                    defect(f"{name}={values[-1]:#x} is not a multiple of {number}, which the kernel was compiled for")
        values += [0, 0]  # scratch memory, of which there is none
        if len(values) != len(kernel.parameters):
            defect(f"{len(values)} values for {len(kernel.parameters)} parameters")
        if kernel.threads != self._threads:
            defect(f"launched with {self._threads} threads, compiled for {kernel.threads}")
        if not (0 < x < 2**31 and 0 < y < 65536 and 0 < z < 65536):
            defect(f"a grid of {(x, y, z)} is not possible")
            return
        if emulator.edit is not None:
            kernel = Kernel(emulator.edit(kernel.text), kernel.shared)
        parameters = dict(zip(kernel.parameters, values, strict=False))
        constants = (Range(each.ctypes.data, each.nbytes, name) for name, each in kernel.constants.items())
        ranges = Ranges([*emulator.ranges(), *buffers, *constants])

        def run(alive: Any = None) -> None:
            launch = Launch(kernel, (x, y, z), parameters, ranges, emulator.defect, emulator.approximate)
            emulator.launches.append(launch)
            launch.run()

        if emulator.gpus is not None:
            emulator.gpus.launch(run, arguments)
        elif emulator.stream is None:
            run()
        else:  # what it uses stays alive until then, as a GPU's memory is used again in the stream's order
            emulator.stream.add(partial(run, (arguments, list(emulator.tensors()))))


def _bits(name: str, kind: str, argument: Any, buffers: list[Range], defect: Callable[[str], None]) -> int:
    """An argument as an unsigned number. The memory of a tensor is added to `buffers`."""
    if kind[0] == "*":
        if argument is None or isinstance(argument, int):
            return argument or 0
        if _POINTERS[argument.dtype] != kind[1:].removeprefix("k"):
            defect(f"{name} is a pointer to {kind[1:]}, given was a tensor of {argument.dtype}")
        elements = argument.numel()
        if not argument.is_contiguous():
            elements = argument.untyped_storage().nbytes() // argument.element_size() - argument.storage_offset()
        buffers.append(Range(argument.data_ptr(), elements * argument.element_size(), name))
        return argument.data_ptr()
    try:
        return int.from_bytes(struct.pack("<" + _FORMATS[kind], argument), "little")
    except struct.error as error:
        defect(f"{name}={argument!r} is no {kind}: {error}")
        return 0


def _ranges_of(table: Any) -> Iterator[Range]:
    """The memory of a table's tensors, by its addresses."""
    sizes, states = table.sizes, list(table.storage.states)
    rows = [sizes * kind.itemsize for kind in (table.weight_dtype, table.gradient_dtype, *states)]
    for k, kind in enumerate(states):
        if kind in (torch.uint8, torch.int8):  # codes, the latter two to a byte, and after them the scales of blocks of 128
            codes = sizes if kind == torch.uint8 else -(-sizes // 2)
            rows[2 + k] = -(-codes // 16) * 16 + -(-sizes // 128) * 4
    if table.storage.master:
        rows.append(sizes * table.masters[0].element_size())
    named = [(f"row {row}", *pair) for row, pair in enumerate(zip(table.addresses, rows, strict=False))]
    for k, kept in enumerate(zip(*(row[len(states) :] for row in table.states), strict=True)):
        addresses, lengths = [each.data_ptr() for each in kept], [each.nbytes for each in kept]
        named.append((f"kept {k}", np.array(addresses), np.array(lengths)))
    if table.parts is not None:
        named += _of_parts(table)
    for name, addresses, lengths in named:
        for i, (address, length) in enumerate(zip(addresses.tolist(), lengths.tolist(), strict=True)):
            if address:
                yield Range(address, length, f"{name} of tensor {i}")


def _of_parts(table: Any) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """The memory that means over parts of tensors are in: names, addresses and bytes by tensor."""
    parts = table.parts
    for k, (vector, scope) in enumerate(zip(parts.vectors, parts.scopes, strict=True)):
        yield f"vector {k}", parts.addresses_in(vector, scope), parts.counts[scope] * vector.element_size()
    for sums in table._kept_alive:
        for k, room in enumerate(getattr(sums, "_rooms", ())):
            ends = np.append(sums.addresses[k][1:], room.data_ptr() + room.nbytes)
            yield f"sums of tiles {k}", sums.addresses[k], ends - sums.addresses[k]


@cache
def install() -> Emulator:
    """Make an emulator Triton's device, and let tristep's triton engine take CPU tensors, for this process's lifetime.

    A second call returns the emulator of the first.

    Raises:
        RuntimeError: TRITON_INTERPRET is set; kernels are then not compiled at all.
    """
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise RuntimeError("TRITON_INTERPRET=1: unset it, the interpreter knows no drivers")
    from triton.backends.nvidia.compiler import CUDABackend

    from tristep.kernels import choose_engine as choose
    from tristep.kernels import norms  # noqa: F401  # so that all modules that choose are there
    from tristep.kernels.backends.triton import launch

    emulator = Emulator()
    # Apart from real machine code, for which Triton's keys are the same.
    triton.knobs.cache.dir = os.path.join(triton.knobs.cache.dir, "emulator")
    CUDABackend.make_cubin = lambda self, source, metadata, options, capability: source.encode()  # type: ignore[method-assign]
    triton.runtime.driver.set_active(emulator)

    def choose_engine(device: torch.device, engine: str | None = None) -> str:
        asked = engine or os.environ.get("TRISTEP_ENGINE")
        return "triton" if asked == "triton" else choose(device, asked)

    for name, module in list(sys.modules.items()):
        if name.startswith("tristep.") and vars(module).get("choose_engine") is choose:
            vars(module)["choose_engine"] = choose_engine
    prepare = launch.TritonLaunch._prepare

    def watched(self: Any) -> None:
        emulator.watch(self)
        prepare(self)

    launch.TritonLaunch._prepare = watched  # type: ignore[method-assign]
    return emulator
