"""The functions of `tl` for single numbers on the CPU, and the binding of a rule's function to them."""

from __future__ import annotations

import types
from typing import Any

import numpy as np

from ... import random
from ...language import Function
from .intrinsics import TO, bits_of_float, float_of_bits, jit

# Philox-4x32-10 in words of 32 bits; see random.py.
_M0, _M1 = map(np.uint64, random.MULTIPLIERS)
_K0, _K1 = map(np.uint64, random.KEYS)
_MASK, _34, _32, _8, _2, _1 = np.uint64(0xFFFFFFFF), *map(np.uint64, (34, 32, 8, 2, 1))
_STEP, _HALF, _QUARTER = np.float32(2.0**-24), np.float32(0.5), np.float32(0.25)
_S0, _S1, _S2, _S3, _S4 = map(np.float32, random.SINE)
_L0, _L1, _L2, _L3 = map(np.float32, random.LOGARITHM)
_ROOT_HALF, _LOG2 = np.int32(random.ROOT_HALF), np.float32(random.LOG2)


@jit
def _normal(key0, key1, index):
    k0, k1 = np.uint64(key0), np.uint64(key1)
    c0, c1 = np.uint64(index) >> _2 & _MASK, np.uint64(index) >> _34
    c2 = c3 = np.uint64(0)
    for _ in range(random.ROUNDS):
        product0, product1 = c0 * _M0, c2 * _M1
        c0, c1 = (product1 >> _32) ^ c1 ^ k0, product1 & _MASK
        c2, c3 = (product0 >> _32) ^ c3 ^ k1, product0 & _MASK
        k0, k1 = (k0 + _K0) & _MASK, (k1 + _K1) & _MASK
    first, second = (c2, c3) if index & 2 else (c0, c1)
    bits = np.int32(bits_of_float(np.float32(np.int32((first >> _8) + _1)) * _STEP))
    exponent = np.int32(bits - _ROOT_HALF) >> np.int32(23)
    mantissa = float_of_bits(np.uint32(bits - (exponent << np.int32(23))))
    s = (mantissa - np.float32(1)) / (mantissa + np.float32(1))
    square = s * s
    logarithm = np.float32(exponent) * _LOG2 + s * (_L0 + square * (_L1 + square * (_L2 + square * _L3)))
    radius = np.sqrt(np.float32(-2) * logarithm)
    turns = np.abs(np.float32(np.int32(second >> _8)) * _STEP - (_QUARTER if index & 1 else np.float32(0)))
    x = np.abs(turns - _HALF) - _QUARTER
    square = x * x
    return radius * x * (_S0 + square * (_S1 + square * (_S2 + square * (_S3 + square * _S4))))


# The functions of `tl`, on single numbers.
_ops = types.ModuleType("tristep_ops")
_ONE = np.float32(1)  # a plain 1 and a float32 would give a float64


def _op(name: str, fn: Any) -> None:
    setattr(_ops, name, jit(fn))


@jit
def _clamp(x, low, high):
    at_least = low if x < low else x  # computed before the second comparison, so that no branch is left
    return high if x > high else at_least


_op("abs", lambda x: np.abs(x))
_op("ceil", lambda x: np.ceil(x))
_op("cos", lambda x: np.cos(x))
_op("exp", lambda x: np.exp(x))
_op("exp2", lambda x: np.exp2(x))
_op("floor", lambda x: np.floor(x))
_op("log", lambda x: np.log(x))
_op("log2", lambda x: np.log2(x))
_op("maximum", lambda a, b: np.maximum(a, b))
_op("minimum", lambda a, b: np.minimum(a, b))
_op("rsqrt", lambda x: _ONE / np.sqrt(x))
_op("sigmoid", lambda x: _ONE / (_ONE + np.exp(-x)))
_op("sin", lambda x: np.sin(x))
_op("sqrt", lambda x: np.sqrt(x))
_op("where", lambda condition, a, b: a if condition else b)
_op("clamp", lambda x, low, high: _clamp(x, low, high))
_op("normal", lambda key0, key1, index: _normal(key0, key1, index))


def _of_type(scalar: type) -> types.ModuleType:
    ops = types.ModuleType("tristep_ops")
    vars(ops).update(vars(_ops), _number=TO[scalar], _literal=TO[scalar])  # in the arithmetic's type
    return ops


_OPS: dict[type, types.ModuleType] = {scalar: _of_type(scalar) for scalar in (np.float32, np.float64)}


def _compiled(fn: types.FunctionType) -> Any:
    fn.__module__ = __name__  # numba imports this module when it loads code from its cache; the rule's may be gone
    return jit(fn)


def bind(function: Function, scalar: type) -> Any:
    """Compile a rule's function for loops over numbers of the type `scalar`."""
    # numba types a literal as float64 or int64, and one literal would turn the whole rule's arithmetic into float64.
    return function.bind(f"numba {scalar.__name__}", _OPS[scalar], _compiled, scalar)
