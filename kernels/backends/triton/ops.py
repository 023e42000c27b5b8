"""What `tl` means in a rule on Triton: dtypes, the functions that differ from Triton's own, and `bind`."""

from __future__ import annotations

import types
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl

from ... import random
from ...language import Function

TYPES = {
    torch.float64: tl.float64,
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
}


@triton.jit
def maximum(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _minimum(a, b):
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _clamp(x, low, high):
    return _minimum(maximum(x, low), high)


_S0, _S1, _S2, _S3, _S4 = map(tl.constexpr, random.SINE)
_L0, _L1, _L2, _L3 = map(tl.constexpr, random.LOGARITHM)
_ROOT_HALF, _LOG2 = tl.constexpr(random.ROOT_HALF), tl.constexpr(random.LOG2)


@triton.jit
def _normal(key0, key1, index):
    # The compiler computes the words once for 4 elements of a thread, and the radius once for two.
    group = index >> 2
    seed = tl.cast(key0, tl.uint64) | (tl.cast(key1, tl.uint64) << 32)  # a key may be a literal
    zero = (group * 0).to(tl.uint32)
    word0, word1, word2, word3 = tl.philox(seed, group.to(tl.uint32), (group >> 32).to(tl.uint32), zero, zero)
    first = tl.where((index & 2) == 0, word0, word2)
    second = tl.where((index & 2) == 0, word1, word3)
    bits = (((first >> 8) + 1).to(tl.float32) * 5.9604644775390625e-08).to(tl.int32, bitcast=True)
    exponent = (bits - _ROOT_HALF) >> 23
    mantissa = (bits - (exponent << 23)).to(tl.float32, bitcast=True)
    s = (mantissa - 1.0) / (mantissa + 1.0)
    square = s * s
    logarithm = exponent.to(tl.float32) * _LOG2 + s * (_L0 + square * (_L1 + square * (_L2 + square * _L3)))
    radius = tl.sqrt(-2.0 * logarithm)
    turns = tl.abs((second >> 8).to(tl.float32) * 5.9604644775390625e-08 - tl.where((index & 1) == 0, 0.0, 0.25))
    x = tl.abs(turns - 0.5) - 0.25
    square = x * x
    return radius * x * (_S0 + square * (_S1 + square * (_S2 + square * (_S3 + square * _S4))))


@triton.jit
def _float32(x):
    return x.to(tl.float32)


@triton.jit
def _float64(x):
    return x.to(tl.float64)


@triton.jit
def _float32_of(x):
    return tl.full((), x, tl.float32)


@triton.jit
def _float64_of(x):
    return tl.full((), x, tl.float64)


def _ops_of(**more: Any) -> types.ModuleType:
    # Rules get this module as `tl`: Triton's functions, except those that would drop a NaN. Triton's are looked up at each
    # access, because the interpreter replaces them while a kernel runs.
    ops = types.ModuleType("tristep_ops")
    vars(ops).update(
        clamp=_clamp, maximum=maximum, minimum=_minimum, normal=_normal, __getattr__=partial(getattr, tl), **more
    )
    return ops


_OPS = {
    torch.float32: _ops_of(_number=_float32, _literal=_float32_of),
    torch.float64: _ops_of(_number=_float64, _literal=_float64_of),
}


def _jit(fn: types.FunctionType) -> Any:
    fn.__globals__["_language"] = tl  # the interpreter searches the globals for it
    return triton.jit(fn)


def bind(function: Function, dtype: torch.dtype = torch.float32) -> Any:
    """Return a rule, reduction or metric as a Triton function that kernels can call, for arithmetic in this dtype."""
    # Triton rounds literals to float32 where a function has no other arguments, as in tl.where(g > 0.0, 0.1, 0.2).
    return function.bind(f"triton {dtype}", _OPS[dtype], _jit, reads_source=True, typed=dtype == torch.float64)
