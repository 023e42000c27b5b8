"""The CPU engine: a rule compiled by numba into one native loop over the tensor table.

Imported only at the first step on CPU tensors, because numba takes a third of a second to import. One function, compiled
once, hands out the tiles of the table, and calls another with pieces of them. The source of that one depends on the number
of states, so it is generated, with the rule's own function called in its middle. It is written to the user's cache folder,
which lets numba keep the compiled code there too.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib.util
import os
import sys
import tempfile
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import llvmlite.binding
import numba
import numpy as np
import torch
from llvmlite import ir
from numba.extending import intrinsic

from . import random, storage
from .language import Measure, Reduction, Rule, is_forked
from .measures import Measured, Measurements, measured
from .storage import COMPENSATION, FULL, REMAINDER, Storage
from .table import FIRST_STATE, GRADIENT, WEIGHT, TensorTable

__all__ = ["NativeUpdate", "cache_folder"]

TILE = 65536  # elements of one call of the inner loop, and the unit of work of a thread
BLOCK = 4096  # elements that are summed in the arithmetic's type; longer sums of few-digit numbers drift by parts in 10^5
UNPACKED = 8192  # elements whose packed states are unpacked at a time; they stay in the second-level cache
PARALLEL_FROM = 100_000  # elements; below, handing work to a thread costs more than it saves

# A loop over six arrays needs more run-time checks against overlap than LLVM's default of 8 before it is vectorised.
llvmlite.binding.set_option("tristep", "-runtime-memory-check-threshold=64")

# Rules are computed as they are written, without fused multiply-add: of two products in a sum LLVM would fuse this or that
# one, depending on the loop around it, and a step that is measured would differ from one that is not. No speed is lost by
# it. It must be said, or a function is compiled with the options of its caller. Inlining is not left to LLVM, which shies
# away from large rules: a loop with a call in it is not vectorised (random numbers: 14 times slower).
_jit = numba.njit(fastmath=False, error_model="numpy", nogil=True, forceinline=True)
_jit_apart = numba.njit(error_model="numpy", nogil=True)


def _jit_variant(name: str) -> Any:
    """`_jit_apart` for one of several functions that a factory makes of one text, told apart by a name.

    Symbols of compiled code have the function's name and a number that counts functions in its process. Code of two variants
    that two processes have kept may have equal symbols, and a third process, which loads both, would run one for the other.
    """

    def decorate(fn: Any) -> Any:
        fn.__qualname__ = f"{fn.__qualname__}_{name}"
        return _jit_apart(fn)

    return decorate


def cached(decorator: Any, *arguments: Any, **options: Any) -> Any:
    """One of numba's decorators, which stores compiled code on disk where numba finds a folder to write to."""

    def decorate(fn: Any) -> Any:
        try:
            return decorator(*arguments, cache=True, **options)(fn)
        except RuntimeError:  # there is none, as in a container that is read-only
            return decorator(*arguments, **options)(fn)

    return decorate


# A sum is vectorised only if its terms may be taken in another order.
_SUMS = {"contract", "reassoc"}
_jit_exact = numba.njit(error_model="numpy", nogil=True, forceinline=True)  # to the bit what NumPy computes
_jit_sums = numba.njit(fastmath=_SUMS, error_model="numpy", nogil=True)

# What a loop is called with: int64 numbers, addresses among them, at these places. The threads share them. First the next
# tile to take, then where the table's arrays lie and how wide they are, how much a piece has, and what computes one.
TICKET, ADDRESSES, GRADIENTS, SIZES, HYPER, TILES, SUMS, PARTIALS = range(8)
N_TENSORS, N_HYPER, N_SUMS, N_VALUES, N_TILES, N_BLOCK, COMPUTE = range(8, 15)


class NativeUpdate:
    """Runs one table on the CPU in one native call, on several threads only where there is work enough."""

    looks_at_tensors = False  # but at memory
    multiplies_on_host = True  # gradients by the factor in the table's control, which is on the host anyway

    def __init__(self, table: TensorTable) -> None:
        self.table = table
        self._n_tiles = len(table.tiles)
        self._threaded = table.n_elements >= PARALLEL_FROM and self._n_tiles > 1
        self.totals, self.sums = table.room_for_sums()
        self._partials = [np.zeros((self._n_tiles, total.shape[1])) for total in self.totals]
        assert isinstance(table.rule, Rule)
        self._measure = [self._prepare(*each) for each in zip(table.rule.reductions, self._partials, strict=True)]
        self._run = self._prepare(table.rule)
        self._measured: tuple[Measure, Callable[[], None], np.ndarray, np.ndarray] | None = None

    def replace_weights(self, weights: Sequence[torch.Tensor]) -> None:
        """Work on other weights from now on, those at the table's addresses; the loop reads these anew every time."""

    def measure(self, stage: int) -> None:
        """Run the rule's reduction of this number; its results are then in `totals`, of shape [n_tensors, n_values].

        Those of one over all tensors are the same in each row.
        """
        self._measure[stage]()
        table, reduction = self.table, self.table.rule.reductions[stage]
        how = np.full(reduction.n_values, reduction.by == "max"), reduction.over == "all"
        _add_up(self._partials[stage], table.tiles, table.addresses[GRADIENT], self.totals[stage].numpy(), *how)

    def __call__(self) -> None:
        if self.table.control is None:
            self._run()
        else:
            self._run_unless_left_out(self._run)

    def _run_unless_left_out(self, run: Callable[[], None]) -> None:
        control = self.table.control
        if control is None or control[1] == 0:
            run()
        elif self.table.zero_grads:
            for bound in self.table.gradients:
                if bound is not None and (gradient := bound()) is not None:
                    gradient.zero_()

    @property
    def hyper(self) -> torch.Tensor:
        """The hyper-parameters, [n_tensors, n]."""
        return torch.from_numpy(self.table.hyper)

    def measured(self, into: Measurements, rows: np.ndarray) -> None:
        """As a call, and put what is measured meanwhile into these rows of the present slot."""
        table, measure, ring = self.table, into.measure, into.ring(self.table.device)
        if self._measured is None or self._measured[0] is not measure:
            partials = np.zeros((self._n_tiles, len(measure.names)))
            run = self._prepare(measured(table.rule, measure), partials)  # type: ignore[arg-type]  # a Rule
            self._measured = measure, run, partials, np.array([by == "max" for by in measure.by])
        _, run, partials, largest = self._measured
        partials[:] = 0.0  # which is what is found of a step that is left out
        self._run_unless_left_out(run)
        totals = np.zeros((len(rows), len(largest)))
        _add_up(partials, table.tiles, table.addresses[GRADIENT], totals, largest, False)
        ring.numpy()[into.slot, rows] = totals

    def _prepare(self, function: Rule | Reduction | Measured, partials: np.ndarray | None = None) -> Callable[[], None]:
        """A function without arguments that runs this one over the table."""
        table = self.table
        compute = _compiled(table, function)
        address, call = _driver()
        nothing = np.zeros((0, 0), dtype=table.hyper.dtype)
        sums = nothing if function.numbers_from is None else self.sums[function.numbers_from].numpy()
        partials = np.zeros((0, 0)) if partials is None else partials
        arrays = (table.addresses, table.addresses[GRADIENT], table.sizes, table.hyper, table.tiles, sums, partials)
        widths = [len(table.sizes), table.hyper.shape[1], sums.shape[1], partials.shape[1], self._n_tiles]
        block = _block(function, table.storage)
        shared = np.array([0, *(array.ctypes.data for array in arrays), *widths, block, compute.address], dtype=np.int64)
        where, n_tiles = shared.ctypes.data, self._n_tiles

        def run_threads(arrays: Any = arrays) -> None:  # and keeps the arrays alive
            shared[TICKET] = 0
            _run_threads(address, where, min(torch.get_num_threads(), n_tiles))

        def run(arrays: Any = arrays) -> None:
            shared[TICKET] = 0
            call(where)

        return run_threads if self._threaded else run


def cache_folder() -> Path:
    """Where generated loops and their compiled code are kept: NUMBA_CACHE_DIR, or tristep in the user's cache folder."""
    root = os.environ.get("NUMBA_CACHE_DIR")
    if root:
        return Path(root)
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA", "~/AppData/Local")
    elif sys.platform == "darwin":
        base = "~/Library/Caches"
    else:
        base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "tristep"


def _run_threads(function: int, shared: int, threads: int) -> None:
    """Call the C function at this address with `shared` on that many threads, and wait for all."""
    # A forked child has none of its parent's threads, for which OpenMP would wait forever.
    parallel = None if is_forked() else _openmp()
    if parallel is not None:
        parallel(function, shared, threads, 0)
        return
    call = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function)
    pool = _pool(max(threads - 1, 1))
    waiting = [pool.submit(call, shared) for _ in range(threads - 1)]
    call(shared)
    for future in waiting:
        future.result()


@cache
def _openmp() -> Any:
    """`GOMP_parallel` of the OpenMP library that torch itself runs on, or None where it has no such function.

    Its threads go on looking for work for some milliseconds after torch's own operations; threads of another library
    would have to share the cores with them (a quarter of the speed, seen on two cores).
    """
    file = "libtorch_cpu.dylib" if sys.platform == "darwin" else "libtorch_cpu.so"
    try:
        parallel: Any = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / file)).GOMP_parallel
    except (OSError, AttributeError):
        return None
    parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    parallel.restype = None
    return parallel


_pools: dict[tuple[int, int], ThreadPoolExecutor] = {}


def _pool(size: int) -> ThreadPoolExecutor:
    # Keyed by process, because a forked child has none of its parent's threads.
    key = (os.getpid(), size)
    if key not in _pools:
        _pools[key] = ThreadPoolExecutor(size, thread_name_prefix="tristep")
    return _pools[key]


_loops: dict[tuple[Any, ...], Any] = {}
_compile_lock = threading.Lock()


def _compiled(table: TensorTable, function: Rule | Reduction | Measured) -> Any:
    """What computes this function on a piece of a tile: the table's rule, also measured, or a reduction before it."""
    zero_grads = table.zero_grads and not isinstance(function, Reduction)
    key: Any = (function, table.rule, table.weight_dtype, table.gradient_dtype, table.storage, zero_grads)
    with _compile_lock:
        if key not in _loops:
            _loops[key] = _compile(*key)
        return _loops[key]


# Philox-4x32-10 in words of 32 bits; see random.py.
_M0, _M1 = map(np.uint64, random.MULTIPLIERS)
_K0, _K1 = map(np.uint64, random.KEYS)
_MASK, _32, _8, _1 = np.uint64(0xFFFFFFFF), np.uint64(32), np.uint64(8), np.uint64(1)
_STEP, _HALF, _QUARTER = np.float32(2.0**-24), np.float32(0.5), np.float32(0.25)
_S0, _S1, _S2, _S3, _S4 = map(np.float32, random.SINE)
_L0, _L1, _L2, _L3 = map(np.float32, random.LOGARITHM)
_ROOT_HALF, _LOG2 = np.int32(random.ROOT_HALF), np.float32(random.LOG2)


@_jit
def _normal(key0, key1, index):
    k0, k1 = np.uint64(key0), np.uint64(key1)
    c0, c1 = np.uint64(index) & _MASK, np.uint64(index) >> _32
    c2 = c3 = np.uint64(0)
    for _ in range(random.ROUNDS):
        product0, product1 = c0 * _M0, c2 * _M1
        c0, c1 = (product1 >> _32) ^ c1 ^ k0, product1 & _MASK
        c2, c3 = (product0 >> _32) ^ c3 ^ k1, product0 & _MASK
        k0, k1 = (k0 + _K0) & _MASK, (k1 + _K1) & _MASK
    bits = np.int32(_bits_of_float(np.float32(np.int32((c0 >> _8) + _1)) * _STEP))
    exponent = np.int32(bits - _ROOT_HALF) >> np.int32(23)
    mantissa = _float_of_bits(np.uint32(bits - (exponent << np.int32(23))))
    s = (mantissa - np.float32(1)) / (mantissa + np.float32(1))
    square = s * s
    logarithm = np.float32(exponent) * _LOG2 + s * (_L0 + square * (_L1 + square * (_L2 + square * _L3)))
    radius = np.sqrt(np.float32(-2) * logarithm)
    x = np.abs(np.float32(np.int32(c1 >> _8)) * _STEP - _HALF) - _QUARTER
    square = x * x
    return radius * x * (_S0 + square * (_S1 + square * (_S2 + square * (_S3 + square * _S4))))


# The words of `tl`, on single numbers.
_words = types.ModuleType("tristep_words")
_ONE = np.float32(1)  # a plain 1 beside a float32 would give a float64


def _word(name: str, fn: Any) -> None:
    setattr(_words, name, _jit(fn))


_word("abs", lambda x: np.abs(x))
_word("ceil", lambda x: np.ceil(x))
_word("cos", lambda x: np.cos(x))
_word("exp", lambda x: np.exp(x))
_word("exp2", lambda x: np.exp2(x))
_word("floor", lambda x: np.floor(x))
_word("log", lambda x: np.log(x))
_word("log2", lambda x: np.log2(x))
_word("maximum", lambda a, b: np.maximum(a, b))
_word("minimum", lambda a, b: np.minimum(a, b))
_word("rsqrt", lambda x: _ONE / np.sqrt(x))
_word("sigmoid", lambda x: _ONE / (_ONE + np.exp(-x)))
_word("sin", lambda x: np.sin(x))
_word("sqrt", lambda x: np.sqrt(x))
_word("where", lambda condition, a, b: a if condition else b)
_word("normal", lambda key0, key1, index: _normal(key0, key1, index))


def _for_type(scalar: type) -> Any:
    """How a rule's function becomes a numba function of that type of numbers."""

    def wrap(fn: types.FunctionType) -> Any:
        # numba takes a literal for a float64 or int64, and one literal would draw the whole rule into float64.
        def typed(value: Any) -> Any:
            if type(value) is tuple:
                return tuple(map(typed, value))
            return scalar(value) if type(value) in (float, int) else value

        fn.__code__ = fn.__code__.replace(co_consts=typed(fn.__code__.co_consts))
        fn.__defaults__ = typed(fn.__defaults__)
        fn.__module__ = __name__  # numba imports this module when it loads code from its cache; the rule's may be gone
        return _jit(fn)

    return wrap


_INT64, _INT32, _FLOAT64 = (np.empty(0, dtype=kind) for kind in (np.int64, np.int32, np.float64))


@intrinsic
def _pointer(typingctx, address, like):
    def codegen(context, builder, signature, args):
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return numba.types.CPointer(like.dtype)(address, like), codegen


@cached(numba.njit)
def _add_up(partials, tiles, gradients, totals, largest, together):
    """The sums, or maxima, over the tiles of each tensor or of all, in their order; skipped tensors count as 0."""
    found = np.zeros(totals.shape)
    for j in range(tiles.shape[0]):
        if gradients[tiles[j, 0]] != 0:
            row = 0 if together else tiles[j, 0]
            for k in range(found.shape[1]):
                found[row, k] = np.maximum(found[row, k], partials[j, k]) if largest[k] else found[row, k] + partials[j, k]
    for i in range(found.shape[0]):
        for k in range(found.shape[1]):
            totals[i, k] = found[0 if together else i, k]


@intrinsic
def _take_ticket(typingctx, counter):
    """The number at this address, which is then one more; never the same for two threads."""

    def codegen(context, builder, signature, args):
        return builder.atomic_rmw("add", args[0], ir.Constant(ir.IntType(64), 1), "monotonic")

    return numba.types.int64(numba.types.CPointer(numba.types.int64)), codegen


@intrinsic
def _call(typingctx, address, shared, tensor, tile, start, n):
    """Call the C function at this address with the numbers that follow."""

    def codegen(context, builder, signature, args):
        kinds = [argument.type for argument in args[1:]]
        function = builder.inttoptr(args[0], ir.FunctionType(ir.VoidType(), kinds).as_pointer())
        builder.call(function, args[1:])
        return context.get_dummy_value()

    int64 = numba.types.int64
    return numba.types.void(int64, numba.types.CPointer(int64), int64, int64, int64, int64), codegen


@cache
def _driver() -> tuple[int, Callable[[int], None]]:
    """The loop over the tiles of a table: its address, and it as what Python calls with the address of what it works on.

    numba's own calls take longer over their arguments than a small table takes to run.
    """
    shared = numba.types.CPointer(numba.types.int64)
    address = cached(numba.cfunc, numba.types.void(shared), error_model="numpy")(_drive).address
    return address, ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)


def _drive(shared):
    # No number of another file stands here, since numba's cache would not notice that it has changed.
    gradients, sizes = _pointer(shared[GRADIENTS], _INT64), _pointer(shared[SIZES], _INT64)
    tiles, partials = _pointer(shared[TILES], _INT32), _pointer(shared[PARTIALS], _FLOAT64)
    n_values, block = shared[N_VALUES], shared[N_BLOCK]
    j = _take_ticket(shared)
    while j < shared[N_TILES]:
        t, tile = np.int64(tiles[2 * j]), np.int64(tiles[2 * j + 1])
        if gradients[t] != 0:
            for k in range(n_values):
                partials[j * n_values + k] = 0.0
            end = min((tile + 1) * TILE, sizes[t])
            for start in range(tile * TILE, end, block):
                _call(shared[COMPUTE], shared, t, j, start, min(block, end - start))
        j = _take_ticket(shared)


@intrinsic
def _float_of_bits(typingctx, bits):
    def codegen(context, builder, signature, args):
        return builder.bitcast(args[0], ir.FloatType())

    return numba.types.float32(numba.types.uint32), codegen


@intrinsic
def _bits_of_float(typingctx, value):
    def codegen(context, builder, signature, args):
        return builder.bitcast(args[0], ir.IntType(32))

    return numba.types.uint32(numba.types.float32), codegen


@intrinsic
def _double_of_bits(typingctx, bits):
    def codegen(context, builder, signature, args):
        return builder.bitcast(args[0], ir.DoubleType())

    return numba.types.float64(numba.types.uint64), codegen


@intrinsic
def _bits_of_double(typingctx, value):
    def codegen(context, builder, signature, args):
        return builder.bitcast(args[0], ir.IntType(64))

    return numba.types.uint64(numba.types.float64), codegen


# The largest number of 0 or more is found among the bits, which are in the same order, with NaN above all. As numbers they
# would be compared one by one, for the sake of NaN.
@_jit
def _larger_of_float(bits, value):
    return max(np.uint32(bits), np.uint32(_bits_of_float(value) & np.uint32(0x7FFFFFFF)))


@_jit
def _larger_of_double(bits, value):
    return max(np.uint64(bits), np.uint64(_bits_of_double(value) & np.uint64(0x7FFFFFFFFFFFFFFF)))


@intrinsic
def _float_of_half(typingctx, bits):
    def codegen(context, builder, signature, args):
        return builder.fpext(builder.bitcast(args[0], ir.HalfType()), ir.FloatType())

    return numba.types.float32(numba.types.uint16), codegen


@intrinsic
def _half_of_float(typingctx, value):
    def codegen(context, builder, signature, args):
        return builder.bitcast(builder.fptrunc(args[0], ir.HalfType()), ir.IntType(16))

    return numba.types.uint16(numba.types.float32), codegen


@_jit
def _load_bfloat16(bits):
    return _float_of_bits(np.uint32(bits) << np.uint32(16))


@_jit
def _store_bfloat16(value):
    # To the nearest and to even, NaN kept a NaN; the same integers as on the GPU.
    bits = _bits_of_float(np.float32(value))
    nearest = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    nan = (bits >> np.uint32(16)) | np.uint32(0x40)
    return np.uint16(nan if (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000) else nearest)


@_jit
def _load_float16(bits):
    return _float_of_half(bits)


@_jit
def _store_float16(value):
    return _half_of_float(np.float32(value))


_H0, _H1, _H2 = map(np.uint32, storage.HASH)
_NAN_ABOVE, _POSITIVE = np.uint32(0x7F800000), np.uint32(0x7FFFFFFF)


@_jit
def _key(low, high, salt):
    return np.uint32(np.uint32(low) + (np.uint32(high) << np.uint32(16)) + np.uint32(salt))


@_jit
def _random(key, index):
    h = np.uint32(np.uint32(np.uint32(index) * _H0) ^ key)
    h = np.uint32(np.uint32(h ^ (h >> np.uint32(16))) * _H1)
    return np.uint32(np.uint32(h ^ (h >> np.uint32(15))) * _H2)


@_jit
def _store_at_random(value, key, index):
    h = _random(key, index)
    bits = _bits_of_float(np.float32(value))
    nan = (bits >> np.uint32(16)) | np.uint32(0x40)
    cut = np.uint32(bits + (h >> np.uint32(16))) >> np.uint32(16)
    return np.uint16(nan if (bits & _POSITIVE) > _NAN_ABOVE else cut)


# A weight and what stands beside it: the bits that the weight lacks, or what rounding took off; see storage.py.
@_jit
def _joined(high, low):
    return _float_of_bits(np.uint32((np.uint32(high) << np.uint32(16)) + np.uint32(np.int32(np.int16(low)))))


@_jit
def _high(value):
    bits = _bits_of_float(np.float32(value))
    nan = (bits >> np.uint32(16)) | np.uint32(0x40)
    return np.uint16(nan if (bits & _POSITIVE) > _NAN_ABOVE else np.uint32(bits + np.uint32(0x8000)) >> np.uint32(16))


@_jit
def _low(value):
    bits = _bits_of_float(np.float32(value))
    return np.uint16(np.uint32(0) if (bits & _POSITIVE) > _NAN_ABOVE else bits & np.uint32(0xFFFF))


@_jit
def _lost(value, rounded):
    lost = np.float32(value) - rounded
    return lost if np.abs(lost) < np.float32(np.inf) else np.float32(0)


@_jit
def _lost_bfloat16(value, rounded):
    # What is not finite becomes 0 by a mask: one more choice beside that of the first rounding halves the loop's speed.
    bits = _bits_of_float(np.float32(value) - _load_bfloat16(rounded))
    finite = np.uint32(np.int32(np.int32(bits & _POSITIVE) - np.int32(_NAN_ABOVE)) >> np.int32(31))
    bits = bits & finite
    return np.uint16((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))


@_jit
def _lost_float16(value, rounded):
    return _store_float16(_lost(value, _load_float16(rounded)))


def _packing(unsigned: bool) -> tuple[Any, Any, Any]:
    """How packed states are read and written, to the nearest or at random; see storage.py."""
    block, cut = storage.BLOCK, np.int32(storage.CUT)
    levels = np.int32(storage.LEVELS[unsigned])
    base = np.int32((127 << 23 >> storage.CUT) - storage.LEVELS[unsigned])
    zero, stretch = np.float32(storage.zero_level(unsigned)), storage.stretch(unsigned)
    range_, half, top = np.float32(1) - zero, np.int32(1 << (storage.CUT - 1)), base + levels
    none, least, infinite, nan = np.float32(0), np.int32(0x00800000), np.int32(0x7F800000), np.float32(np.nan)
    kind = "unsigned" if unsigned else "signed"

    @_jit_exact
    def unpack_block(codes, scale, values):
        for i in range(codes.size):
            code = np.int32(codes[i])
            size = code if unsigned else code & np.int32(127)
            number = (_float_of_bits(np.uint32((size + base) << cut)) - zero) * stretch * scale
            sign = np.uint32(0 if unsigned else (code & np.int32(128)) << np.int32(24))
            values[i] = _float_of_bits(_bits_of_float(number) | sign)

    @_jit_exact
    def largest(values):
        bits = np.int32(0)
        for i in range(values.size):  # in the order of the bits, in which NaN is the largest
            bits = max(bits, np.int32(_bits_of_float(values[i]) & _POSITIVE))
        return bits

    @_jit_exact
    def pack_level(number, level):
        code = np.int32(level - base)
        if unsigned:
            code = np.int32(max(code, np.int32(number != none)))
        else:
            code |= np.int32(_bits_of_float(number) >> np.uint32(24)) & np.int32(128)
        return np.uint8(code if level <= top else np.int32(0))

    @_jit_exact
    def pack_block(values, codes, shrunk, key, start):
        for i in range(codes.size):
            level = min(np.int32(_bits_of_float(np.abs(values[i] * shrunk) + zero)), infinite)  # of some NaN it is more
            codes[i] = pack_level(values[i], np.int32(level + half) >> cut)

    @_jit_exact
    def pack_block_at_random(values, codes, shrunk, key, start):
        for i in range(codes.size):
            level = min(np.int32(_bits_of_float(np.abs(values[i] * shrunk) + zero)), infinite)
            random = _random(key, start + i) >> np.uint32(13)
            codes[i] = pack_level(values[i], np.int32(level + np.int32(random & np.uint32(0x7FFF0) | np.uint32(8))) >> cut)

    def packing(pack_one):
        @_jit_variant(f"{kind}_{pack_one.py_func.__name__}")
        def pack(values, codes, scales, key, start):
            for k in range(scales.size):
                piece = slice(k * block, min(k * block + block, codes.size))
                bits = largest(values[piece])
                scale = _float_of_bits(np.uint32(bits)) if bits >= least else none
                shrunk = range_ / scale if bits >= least and bits < infinite else none
                scales[k] = scale if bits < infinite else nan
                pack_one(values[piece], codes[piece], shrunk, key, start + k * block)

        return pack

    @_jit_variant(kind)
    def unpack(codes, scales, values):
        for k in range(scales.size):
            piece = slice(k * block, min(k * block + block, codes.size))
            unpack_block(codes[piece], scales[k], values[piece])

    return unpack, packing(pack_block), packing(pack_block_at_random)


_PACKING = tuple(map(_packing, (False, True)))

# How each type lies in memory, and how it is read and written.
_MEMORY = {torch.float64: "f8", torch.float32: "f4", torch.float16: "u2", torch.bfloat16: "u2"}
_LOAD = {torch.float16: _load_float16, torch.bfloat16: _load_bfloat16}
_STORE = {torch.float16: _store_float16, torch.bfloat16: _store_bfloat16}
_same = _jit(lambda x: x)
_TO: dict[type, Any] = {np.float32: _jit(lambda x: np.float32(x)), np.float64: _jit(lambda x: np.float64(x))}


def _compile(
    function: Rule | Reduction | Measured,
    rule: Rule,
    weight_dtype: torch.dtype,
    gradient_dtype: torch.dtype,
    stored: Storage,
    zero_grads: bool,
) -> Any:
    dtype = torch.float64 if weight_dtype == torch.float64 else torch.float32
    scalar = np.float64 if dtype == torch.float64 else np.float32
    source = _loop_source(function, rule, weight_dtype, stored, zero_grads)
    names = {
        "function": function.bind(f"numba {scalar.__name__}", _words, _for_type(scalar)),
        "load_weight": _same if stored.beside == FULL else _LOAD.get(weight_dtype, _same),
        "store_weight": _STORE.get(weight_dtype, _same),
        "load_gradient": _LOAD.get(gradient_dtype, _TO[scalar]),
        "load_bfloat16": _load_bfloat16,
        "store_bfloat16": _store_bfloat16,
        "store_at_random": _store_at_random,
        **dict(zip(("unpack", "pack", "pack_at_random"), _PACKING[0], strict=True)),
        **dict(zip(("unpack_unsigned", "pack_unsigned", "pack_at_random_unsigned"), _PACKING[1], strict=True)),
        "empty": np.empty,
        "float32": np.float32,
        "key_of": _key,
        "joined": _joined,
        "high_bits": _high,
        "low_bits": _low,
        "lost": _lost_bfloat16 if weight_dtype == torch.bfloat16 else _lost_float16,
        "pointer": _pointer,
        "carray": numba.carray,
        "INT64": _INT64,
        "FLOAT64": _FLOAT64,
        "WEIGHT": np.empty(0, dtype=_MEMORY[weight_dtype]),
        "GRADIENT": np.empty(0, dtype=_MEMORY[gradient_dtype]),
        "REAL": np.empty(0, dtype=_MEMORY[dtype]),
        "HALF": np.empty(0, dtype="u2"),
        "BYTE": np.empty(0, dtype="u1"),
        "ZERO": scalar(0),
        "NOTHING": np.dtype(f"u{scalar(0).itemsize}").type(0),
        "larger": _larger_of_double if dtype == torch.float64 else _larger_of_float,
        "number": _double_of_bits if dtype == torch.float64 else _float_of_bits,
        "maximum": np.maximum,
        "entry": _entry(*[numba.types.int64] * 4, fastmath=False if isinstance(function, Rule) else _SUMS),
    }
    # numba's cache does not see the functions that a cached one calls: everything that decides goes into the file name.
    key = repr((source, function.source, str(weight_dtype), str(gradient_dtype), stored, _engine_text()))
    name = f"{function.name}_{hashlib.sha256(key.encode()).hexdigest()[:16]}"
    module = _import_generated(name, source, names)
    if module is None:  # no folder to write to: compile in memory, every time anew
        exec(compile(source, f"<tristep {name}>", "exec"), names)
        return names["compute"]
    return module.compute


@cache
def _engine_text() -> str:
    """The modules whose functions and constants are compiled into a loop besides the rule."""
    return "".join(Path(str(module)).read_text(encoding="utf-8") for module in (__file__, storage.__file__, random.__file__))


def _entry(*numbers: Any, fastmath: Any = False) -> Any:
    """Make a C function of one that takes the address of int64 numbers, and numbers of these types."""
    signature = numba.types.void(numba.types.CPointer(numba.types.int64), *numbers)
    return cached(numba.cfunc, signature, error_model="numpy", fastmath=fastmath)


def _import_generated(name: str, source: str, names: dict[str, Any]) -> types.ModuleType | None:
    folder = cache_folder()
    path = folder / f"{name}.py"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.read_text(encoding="utf-8") != source:
            # Whole or not at all, since several processes may write the same file.
            with tempfile.NamedTemporaryFile("w", dir=folder, suffix=".tmp", delete=False, encoding="utf-8") as file:
                file.write(source)
            os.replace(file.name, path)
    except OSError:
        return None
    spec = importlib.util.spec_from_file_location(f"tristep_generated_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    vars(module).update(names)
    sys.modules[module.__name__] = module
    with _alone(path):
        spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """A context for one process at a time, so that of several ranks one compiles and the others find what it has written.

    It locks the file, where that can be done. A process that ends gives its lock back.
    """
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(ImportError, OSError):
            import fcntl

            fcntl.flock(stack.enter_context(open(path, "rb")), fcntl.LOCK_EX)
        yield


def _stored_as(stored: Storage, rule: Rule, name: str) -> torch.dtype:
    return stored.states[rule.state.index(name)]


def _stores(rule: Rule, weight_dtype: torch.dtype, stored: Storage, states: list[str], halves: list[str]) -> list[str]:
    """The lines that store an element's new values."""

    def at_random(value: str, salt: int) -> str:
        return f"store_at_random({value}, key_of(key0, key1, {salt * storage.SALT & 0xFFFFFFFF}), start + i)"

    if stored.beside == REMAINDER:
        lines = ["w[i] = high_bits(value)", "m[i] = low_bits(value)"]
    elif stored.beside == COMPENSATION:
        lines = ["rounded = store_weight(value)", "w[i] = rounded", "m[i] = lost(value, rounded)"]
    elif stored.stochastic and not stored.codes_only and weight_dtype == torch.bfloat16 and not stored.beside:
        lines = [f"w[i] = {at_random('value', 0)}"]
    else:
        lines = ["w[i] = store_weight(value)"]
    for k, name in enumerate(rule.state):
        if name in rule.changed:
            new = f"new[{k}]"
            if states[k] in halves:
                stochastic = stored.stochastic and not stored.codes_only
                new = at_random(new, 1 + k) if stochastic else f"store_bfloat16({new})"
            lines.append(f"{states[k]}[i] = {new}")
    return [*lines, "m[i] = value"] if stored.beside == FULL else lines


def _address(row: int) -> str:
    """Where the tensor of this row of the table begins."""
    return f"addresses[{row} * shared[{N_TENSORS}] + t]"


def _where_packed(row: int) -> tuple[str, str]:
    """The codes and the scales of the elements from `start` on, of the state whose addresses are in this row."""
    codes = _address(row)
    scales = f"{codes} + (pointer(shared[{SIZES}], INT64)[t] + 15) // 16 * 16 + start // {storage.BLOCK} * 4"
    return (
        f"carray(pointer({codes} + start, BYTE), n)",
        f"carray(pointer({scales}, REAL), (n + {storage.BLOCK - 1}) // {storage.BLOCK})",
    )


def _unpack_lines(rule: Rule, names: dict[str, str], packed: list[str], row: dict[str, int]) -> tuple[str, str]:
    """The lines that make room for unpacked states, and those that unpack them."""
    room = unpack = ""
    for s in packed:
        room += f"\n    {s} = empty(n, float32)"
        codes, scales = _where_packed(row[s])
        kind = "_unsigned" * (names[s] in rule.unsigned)
        unpack += f"\n    unpack{kind}({codes}, {scales}, {s})"
    return room, unpack


def _pack_lines(rule: Rule, states: list[str], packed: list[str], row: dict[str, int], key: int | None) -> str:
    """The lines that pack what has changed. `key` is where a key begins, if rounding is stochastic."""
    lines = ""
    for k, name in enumerate(rule.state):
        if states[k] in packed and name in rule.changed:
            codes, scales = _where_packed(row[states[k]])
            kind = "_at_random" * (key is not None) + "_unsigned" * (name in rule.unsigned)
            salt = (1 + k) * storage.SALT & 0xFFFFFFFF
            given = "0" if key is None else f"key_of(hyper[{key}], hyper[{key + 1}], {salt})"
            lines += f"\n    pack{kind}({states[k]}, {codes}, {scales}, {given}, start)"
    return lines


def _block(function: Rule | Reduction | Measured, stored: Storage) -> int:
    """How many elements the inner loop takes at a time."""
    if torch.uint8 in stored.states and not isinstance(function, Reduction):
        return UNPACKED
    return TILE if isinstance(function, Rule) else BLOCK


def _gathered_by(function: Reduction | Measured) -> tuple[str, ...]:
    return function.measure.by if isinstance(function, Measured) else (function.by,) * function.n_values


def _loop_source(
    function: Rule | Reduction | Measured,
    rule: Rule,
    weight_dtype: torch.dtype,
    stored: Storage,
    zero_grads: bool = False,
) -> str:
    """The text of what computes a piece of a tile: `n` elements from `start` on of tensor `t`, whose tile is the `j`-th."""
    states = [f"s{k}" for k in range(len(function.state))]
    arrays = ["w", "g", *states] + (["m"] if stored.beside else [])
    kinds = {s: _stored_as(stored, rule, name) for s, name in zip(states, function.state, strict=True)}
    halves = [s for s in states if kinds[s] == torch.bfloat16]
    packed = [s for s in states if kinds[s] == torch.uint8]
    like = {"w": "WEIGHT", "g": "GRADIENT", **dict.fromkeys(halves, "HALF")}
    if stored.beside in (REMAINDER, COMPENSATION):
        like["m"] = "HALF"
    row = {"w": WEIGHT, "g": GRADIENT, "m": FIRST_STATE + len(rule.state)}
    row |= {s: FIRST_STATE + rule.state.index(name) for s, name in zip(states, function.state, strict=True)}
    given = "".join(
        f"\n    {a} = pointer({_address(row[a])} + start * {like.get(a, 'REAL')}.itemsize, {like.get(a, 'REAL')})"
        for a in arrays
        if a not in packed
    )
    hyper = "".join(f"h{k}, " for k in range(len(function.own_hyper)))
    given += "".join(f"\n    h{k} = hyper[{1 + rule.hyper.index(name)}]" for k, name in enumerate(function.own_hyper))
    if function.n_numbers:
        given += f"\n    sums = pointer(shared[{SUMS}] + t * shared[{N_SUMS}] * REAL.itemsize, REAL)"
        given += "".join(f"\n    sum{k} = sums[{k}]" for k in range(function.n_numbers))
    sums = "".join(f"sum{k}, " for k in range(function.n_numbers))
    weight = {
        FULL: "load_weight(m[i])",
        REMAINDER: "joined(w[i], m[i])",
        COMPENSATION: "load_weight(w[i]) + load_weight(m[i])",
    }.get(stored.beside, "load_weight(w[i])")
    read = "".join(f"load_bfloat16({s}[i]), " if s in halves else f"{s}[i], " for s in states)
    values = (
        f"{weight}, load_gradient(g[i]) * rescale, ({read}), ({hyper})"
        + (f", ({sums})" if function.n_numbers else "")
        + (", start + i" if "index" in function.extras else "")
    )
    n = 1 + len(rule.hyper)  # where a key begins
    if stored.stochastic and not isinstance(function, Reduction):
        given += f"\n    key0, key1 = hyper[{n}], hyper[{n + 1}]"
    before = after = ""
    lines = [] if isinstance(function, Reduction) else _stores(rule, weight_dtype, stored, states, halves)
    if isinstance(function, Rule):
        lines.insert(0, f"value, new = function({values})")
    else:
        result = "each" if isinstance(function, Reduction) else "value, new, each"
        lines.insert(0, f"{result} = function({values})")
        largest = [by == "max" for by in _gathered_by(function)]
        before = "".join(f"\n    a{k} = {'NOTHING' if most else 'ZERO'}" for k, most in enumerate(largest))
        lines += [f"a{k} = larger(a{k}, each[{k}])" if most else f"a{k} += each[{k}]" for k, most in enumerate(largest)]
        after = f"\n    partials = pointer(shared[{PARTIALS}] + j * shared[{N_VALUES}] * FLOAT64.itemsize, FLOAT64)"
        for k, most in enumerate(largest):
            together = f"maximum(partials[{k}], number(a{k}))" if most else f"partials[{k}] + a{k}"
            after += f"\n    partials[{k}] = {together}"
    lines += ["g[i] = 0"] * zero_grads
    inner = "\n        ".join(lines)
    pack = (
        "" if isinstance(function, Reduction) else _pack_lines(rule, states, packed, row, n if stored.stochastic else None)
    )
    room, unpack = _unpack_lines(rule, dict(zip(states, function.state, strict=True)), packed, row)
    return f'''"""Generated by tristep from {function.kind} {function.name}; safe to delete."""


@entry
def compute(shared, t, j, start, n):
    addresses = pointer(shared[{ADDRESSES}], INT64)
    hyper = pointer(shared[{HYPER}] + t * shared[{N_HYPER}] * REAL.itemsize, REAL)
    rescale = hyper[0]{given}{room}{unpack}{before}
    for i in range(n):
        {inner}{after}{pack}
'''
