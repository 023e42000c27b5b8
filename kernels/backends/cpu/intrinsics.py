"""numba's compilation options for loops, and bit operations that numba lacks."""

from __future__ import annotations

from typing import Any

import llvmlite.binding
import numba
import numpy as np
from llvmlite import ir
from numba.extending import intrinsic

# A loop over six arrays needs more run-time checks against overlap than LLVM's default of 8 before it is vectorised.
llvmlite.binding.set_option("tristep", "-runtime-memory-check-threshold=64")
# Rules are compiled without fused multiply-add: of two products in a sum, LLVM would fuse one or the other, depending on the
# surrounding loop, and a step with a metric would differ from one without. This costs no speed. `fastmath=False` must be
# explicit, or a function is compiled with its caller's options. Inlining is forced, because LLVM does not inline large
# rules, and a loop that contains a call is not vectorised (random numbers: 14 times slower).
jit = numba.njit(fastmath=False, error_model="numpy", nogil=True, forceinline=True)
jit_separate = numba.njit(error_model="numpy", nogil=True)


def jit_variant(name: str) -> Any:
    """`jit_separate` for functions that a factory makes several times from one source; `name` distinguishes them.

    Symbols of compiled code consist of the function's name and a counter of the process. Variants cached by two processes
    may have equal symbols, and a process that loads both would run one instead of the other.
    """

    def decorate(fn: Any) -> Any:
        fn.__qualname__ = f"{fn.__qualname__}_{name}"
        return jit_separate(fn)

    return decorate


# A sum is vectorised only if its terms may be taken in another order.
REORDERED = {"contract", "reassoc"}
jit_exact = numba.njit(error_model="numpy", nogil=True, forceinline=True)  # computes the same bits as NumPy
jit_sums = numba.njit(fastmath=REORDERED, error_model="numpy", nogil=True)


def _bits_as(to: Any, of: Any, kind: ir.Type) -> Any:
    """Return an intrinsic that reinterprets the bits of a number of type `of` as type `to`, which is `kind` in LLVM."""

    @intrinsic
    def cast(typingctx, value):
        def codegen(context, builder, signature, args):
            return builder.bitcast(args[0], kind)

        return to(of), codegen

    return cast


float_of_bits = _bits_as(numba.types.float32, numba.types.uint32, ir.FloatType())
bits_of_float = _bits_as(numba.types.uint32, numba.types.float32, ir.IntType(32))
double_of_bits = _bits_as(numba.types.float64, numba.types.uint64, ir.DoubleType())
_bits_of_double = _bits_as(numba.types.uint64, numba.types.float64, ir.IntType(64))


# The maximum of 0 and some numbers is computed on their bits, which have the same order for nonnegative numbers, with NaN
# above all. As numbers they would be compared one by one, because of NaN.
@jit
def larger_of_float(bits, value):
    own = np.uint32(bits_of_float(value) & np.uint32(0x7FFFFFFF))
    return max(np.uint32(bits), np.uint32(0) if value < 0 else own)


@jit
def larger_of_double(bits, value):
    own = np.uint64(_bits_of_double(value) & np.uint64(0x7FFFFFFFFFFFFFFF))
    return max(np.uint64(bits), np.uint64(0) if value < 0 else own)


@intrinsic
def float_of_half(typingctx, bits):
    def codegen(context, builder, signature, args):
        return builder.fpext(builder.bitcast(args[0], ir.HalfType()), ir.FloatType())

    return numba.types.float32(numba.types.uint16), codegen


@intrinsic
def half_of_float(typingctx, value):
    def codegen(context, builder, signature, args):
        return builder.bitcast(builder.fptrunc(args[0], ir.HalfType()), ir.IntType(16))

    return numba.types.uint16(numba.types.float32), codegen


same = jit(lambda x: x)
TO: dict[type, Any] = {np.float32: jit(lambda x: np.float32(x)), np.float64: jit(lambda x: np.float64(x))}
