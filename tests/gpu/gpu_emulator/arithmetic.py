"""What PTX instructions compute, on NumPy arrays with an element for each thread.

Floating point is IEEE 754's, each operation rounded by itself. A result that is NaN is the one NaN that NVIDIA's units make.
Approximate instructions are computed in float64 and rounded; `approximate` may put in the errors that the manual allows.
An instruction that is not known raises NotImplementedError with its line.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from .ptx import Instruction

__all__ = ["FLOATS", "UNSIGNED", "Approximate", "compute", "dtype_of", "rounded"]

Get = Callable[[int, Any], Any]  # the value of a source, by its number, in a type
Approximate = Callable[[np.ndarray, np.ndarray], np.ndarray]  # float64 as float32, wrong by so much at most

UNSIGNED = {1: np.bool_, 8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
FLOATS = {16: np.float16, 32: np.float32, 64: np.float64}
_NAN = {2: np.uint16(0x7FFF), 4: np.uint32(0x7FFFFFFF), 8: np.uint64(0x7FF8000000000000)}
# Functions and their largest error in ulps: PTX ISA, section 9.7.3 (ex2, sin and cos: 2 ulps at the magnitudes met here).
# 0: it is not given in ulps but relative to the result, as 2^-23.
_APPROXIMATE = {
    "sqrt": (np.sqrt, 0),
    "rsqrt": (lambda x: 1 / np.sqrt(x), 2),
    "rcp": (lambda x: 1 / x, 1),
    "ex2": (np.exp2, 2),
    "lg2": (np.log2, 1),
    "sin": (np.sin, 2),
    "cos": (np.cos, 2),
}
_ULPS_OF_QUOTIENTS = 2
_EXACT = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "sqrt": np.sqrt}
_INTEGER = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "neg": np.negative,
    "abs": np.abs,
    "max": np.maximum,
    "min": np.minimum,
}
_BITWISE = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "not": np.invert}
_EXTREMES = {
    ("max", True): np.maximum,
    ("max", False): np.fmax,
    ("min", True): np.minimum,
    ("min", False): np.fmin,
}
_COMPARISONS = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "lo": np.less,
    "ls": np.less_equal,
    "hi": np.greater,
    "hs": np.greater_equal,
}
_TO_INTEGRAL = {"rzi": np.trunc, "rni": np.rint, "rmi": np.floor, "rpi": np.ceil}


@cache
def dtype_of(name: str) -> Any:
    """NumPy's type of a type of PTX; an unsigned integer of its bits where there is none.

    Raises:
        NotImplementedError: there is no such type.
    """
    if not re.fullmatch(r"pred|bf16|(bf|f|s|u)16x2|[bsuf](8|16|32|64)", name):
        raise NotImplementedError(f"the emulator does not know the type {name!r}")
    if name == "pred":
        return np.bool_
    if name == "bf16" or name.endswith("x2"):
        return np.uint16 if name == "bf16" else np.uint32
    letter, bits = name[0], int(name[1:])
    return FLOATS[bits] if letter == "f" else np.dtype(f"{'i' if letter == 's' else 'u'}{bits // 8}").type


def rounded(value: np.ndarray, error: np.ndarray) -> np.ndarray:
    """An `Approximate` that rounds to the nearest."""
    return np.asarray(value).astype(np.float32)


def compute(each: Instruction, get: Get, approximate: Approximate = rounded) -> Any:
    """The value that an instruction gives its first operand."""
    name, parts = each.parts[0], each.parts
    if name not in _KNOWN:
        found = None
    elif name in _BY_NAME:
        found = _BY_NAME[name](each, get)
    elif name == "cvt":
        found = _convert(each, get)
    elif name in _BITWISE:
        found = _BITWISE[name](*_sources(each, get))
    elif parts[-1] in ("bf16", "bf16x2", "f16x2"):
        found = _sign_of_floats(each, get)
    elif parts[-1] in ("s16x2", "u16x2"):
        found = _integer_pairs(each, get)
    elif parts[-1][0] == "f":
        found = _float(each, _sources(each, get), approximate)
    elif parts[-1] == "pred":
        found = None
    else:
        found = _integer(each, get)
    if found is None:
        raise NotImplementedError(f"the emulator does not know {each.name!r}, line {each.line} of the PTX")
    return found


def _sources(each: Instruction, get: Get) -> list[Any]:
    kind = dtype_of(each.parts[-1])
    return [np.asarray(get(k, kind)) for k in range(len(each.operands) - 1)]


def _integer(each: Instruction, get: Get) -> Any:
    name, parts = each.parts[0], each.parts
    kind = np.dtype(dtype_of(parts[-1]))
    a, *others = _sources(each, get)[: 2 if "wide" in parts else None]
    if "wide" in parts or "hi" in parts:
        if name not in ("mul", "mad") or kind.itemsize == 8:
            return None
        wide = np.dtype(f"{kind.kind}{2 * kind.itemsize}").type
        product = a.astype(wide) * others[0].astype(wide)
        product = product if "wide" in parts else (product >> wide(8 * kind.itemsize)).astype(kind)
        return product if name == "mul" else product + get(2, product.dtype.type)
    if name in ("div", "rem"):
        (b,) = others
        quotient = a // b if kind.kind == "u" else (np.abs(a) // np.abs(b) * np.sign(a) * np.sign(b)).astype(kind)
        return quotient if name == "div" else a - quotient * b
    if name == "mad":
        return a * others[0] + others[1]
    return _INTEGER[name](a, *others) if name in _INTEGER else None


def _sign_of_floats(each: Instruction, get: Get) -> Any:
    """abs and neg of numbers of 16 bits, one or two in a register."""
    name, kind = each.parts[0], dtype_of(each.parts[-1])
    sign = kind(0x8000) if kind == np.uint16 else kind(0x80008000)
    if name not in ("abs", "neg"):
        return None
    return get(0, kind) & ~sign if name == "abs" else get(0, kind) ^ sign


def _integer_pairs(each: Instruction, get: Get) -> Any:
    """add, min and max of two integers of 16 bits in a register."""
    if each.parts[0] not in ("add", "min", "max"):
        return None
    kind = np.int16 if each.parts[-1] == "s16x2" else np.uint16
    a, b = np.broadcast_arrays(*_sources(each, get))
    return _INTEGER[each.parts[0]](*(np.ascontiguousarray(value).view(kind) for value in (a, b))).view(np.uint32)


def _select(each: Instruction, get: Get) -> Any:
    kind = dtype_of(each.parts[-1])
    return np.where(get(2, np.bool_), get(0, kind), get(1, kind))


def _shift(each: Instruction, get: Get) -> Any:
    kind = np.dtype(dtype_of(each.parts[-1]))
    bits, steps, value = 8 * kind.itemsize, np.asarray(get(1, np.uint32)), np.asarray(get(0, kind.type))
    least = np.minimum(steps, bits - 1).astype(kind)  # larger steps give nothing, or the sign
    found = value << least if each.parts[0] == "shl" else value >> least
    return found if kind.kind == "i" and each.parts[0] == "shr" else np.where(steps >= bits, kind.type(0), found)


def _permute_bytes(each: Instruction, get: Get) -> Any:
    if each.name != "prmt.b32":
        return None
    low, high, choice = (np.asarray(get(k, np.uint32)) for k in range(3))
    both, found = low.astype(np.uint64) | high.astype(np.uint64) << np.uint64(32), np.uint32(0)
    for k in range(4):
        pick = (choice >> np.uint32(4 * k)) & np.uint32(15)
        byte = (both >> ((pick & np.uint32(7)).astype(np.uint64) * np.uint64(8))).astype(np.uint32) & np.uint32(255)
        found = found | np.where(pick & np.uint32(8), (byte >> np.uint32(7)) * np.uint32(255), byte) << np.uint32(8 * k)
    return found


def _extract_bits(each: Instruction, get: Get) -> Any:
    if any(source.kind != "integer" for source in each.operands[2:]):
        return None
    kind = np.dtype(dtype_of(each.parts[-1]))
    start, length, bits = each.operands[2].value, each.operands[3].value, 8 * kind.itemsize
    if not 0 < length <= bits - start:
        return None
    return np.asarray(get(0, kind.type)) << kind.type(bits - start - length) >> kind.type(bits - length)


def _compare(each: Instruction, get: Get) -> Any:
    how, kind = each.parts[1], dtype_of(each.parts[-1])
    a, b = np.asarray(get(0, kind)), np.asarray(get(1, kind))
    if each.parts[-1] == "bf16":
        a, b = _widened(a), _widened(b)
    elif each.parts[-1] == "bf16x2":  # the lower halves, and the upper ones
        a, b = (np.stack(np.broadcast_arrays(_widened(x), (x & np.uint32(0xFFFF0000)).view(np.float32))) for x in (a, b))
    if a.dtype.kind == "f":
        if "ftz" in each.parts:
            a, b = _flushed(a), _flushed(b)
        unordered = np.isnan(a) | np.isnan(b)
        if how in ("nan", "num"):
            found = unordered if how == "nan" else ~unordered
        elif how in _COMPARISONS:
            found = _COMPARISONS[how](a, b) & ~unordered
        else:  # such as "ltu", which is true of NaN
            found = _COMPARISONS[how[:-1]](a, b) | unordered
    else:
        found = _COMPARISONS[how](a, b)
    return _BITWISE[each.parts[2]](found, get(2, np.bool_)) if len(each.operands) > 3 else found


_BY_NAME = {
    "bfe": _extract_bits,
    "prmt": _permute_bytes,
    "selp": _select,
    "setp": _compare,
    "shl": _shift,
    "shr": _shift,
}
_KNOWN = {"cvt", "fma", "div", "rem", "mad", *_BY_NAME, *_BITWISE, *_INTEGER, *_EXACT, *_APPROXIMATE}


def _float(each: Instruction, values: list[Any], approximate: Approximate) -> Any:
    name, parts, kind = each.parts[0], each.parts, values[0].dtype
    bits, ftz = UNSIGNED[8 * kind.itemsize], "ftz" in parts
    if name in ("abs", "neg"):  # of NaN, too, nothing but the sign
        sign = bits(1 << (8 * kind.itemsize - 1))
        found = (values[0].view(bits) & ~sign if name == "abs" else values[0].view(bits) ^ sign).view(kind)
        return _flushed(found) if ftz else found
    if ftz:
        values = [_flushed(value) for value in values]
    if name in ("max", "min"):
        a, b = np.broadcast_arrays(*values)
        merge = np.bitwise_and if name == "max" else np.bitwise_or  # -0 is less than 0
        zero = merge(a.view(bits), b.view(bits)).view(kind)
        return _with_nan(np.where((a == 0) & (b == 0), zero, _EXTREMES[name, "NaN" in parts](a, b)))
    if name in _APPROXIMATE and "approx" in parts and kind == np.float32:
        function, ulps = _APPROXIMATE[name]
        found = _approximated(function(values[0].astype(np.float64)), ulps, approximate)
    elif name == "rcp" and parts[1:] == ["approx", "ftz", "f64"]:  # of the upper half of the number, the upper half
        found = _upper_half(_flushed(1 / _upper_half(values[0])))
    elif name == "rsqrt" and kind == np.float64 and not ftz:
        found = 1 / np.sqrt(values[0])
    elif name == "div" and ("full" in parts or "approx" in parts):
        found = _approximated(values[0].astype(np.float64) / values[1].astype(np.float64), _ULPS_OF_QUOTIENTS, approximate)
    elif name == "fma" and "rn" in parts and kind != np.float16:
        found = _fused(*values)
    elif name in _EXACT and not {"sat", "rz", "rm", "rp"} & set(parts) and ("rn" in parts or name in ("add", "sub", "mul")):
        found = np.asarray(_EXACT[name](*values), dtype=kind)
    else:
        return None
    return _with_nan(_flushed(found) if ftz else found)


def _upper_half(x: np.ndarray) -> np.ndarray:
    """float64 numbers whose lower 32 bits have been set to 0."""
    return (np.ascontiguousarray(x).view(np.uint64) & np.uint64(0xFFFFFFFF00000000)).view(np.float64)


def _approximated(value: Any, ulps: float, approximate: Approximate) -> Any:
    size = np.abs(np.asarray(value))
    return approximate(value, ulps * np.spacing(size.astype(np.float32)).astype(np.float64) if ulps else size * 2.0**-23)


def _fused(a: Any, b: Any, c: Any) -> np.ndarray:
    """a * b + c, rounded once, as a sum that has been rounded to odd may be rounded again without harm.

    Source: Boldo and Melquiond (2008), "Emulation of a FMA and correctly rounded sums", fig. 4.
    """
    if a.dtype == np.float32:
        product = a.astype(np.float64) * b.astype(np.float64)  # 48 bits at most, so exact
        return _to_odd(*_two_sum(product, c.astype(np.float64))).astype(np.float32)
    (high, low), c = _two_product(a, b), np.asarray(c)
    inner, rest = _two_sum(c, low)
    outer, other = _two_sum(high, inner)
    found = outer + _to_odd(*_two_sum(rest, other))
    return np.where(np.isfinite(outer), found, a * b + c)


def _two_sum(a: Any, b: Any) -> tuple[Any, Any]:
    """The sum, and its error."""
    total = a + b
    rest = total - a
    return total, (a - (total - rest)) + (b - rest)


def _two_product(a: Any, b: Any) -> tuple[Any, Any]:
    """The product of float64, and its error."""
    (a_high, a_low), (b_high, b_low) = (_halves(each) for each in (a, b))
    product = a * b
    return product, ((a_high * b_high - product) + a_high * b_low + a_low * b_high) + a_low * b_low


def _halves(x: Any) -> tuple[Any, Any]:
    scaled = x * 134217729.0  # 2^27 + 1
    high = scaled - (scaled - x)
    return high, x - high


def _to_odd(total: Any, error: Any) -> np.ndarray:
    """A sum of float64 with an error, as that of its two neighbours whose last bit is 1."""
    total, error = np.broadcast_arrays(total, error)
    wrong = (error != 0) & ((np.ascontiguousarray(total).view(np.int64) & 1) == 0) & np.isfinite(total)
    return np.where(wrong, np.nextafter(total, np.where(error > 0, np.inf, -np.inf)), total)


def _convert(each: Instruction, get: Get) -> Any:
    flags, (to, of) = set(each.parts[1:-2]), each.parts[-2:]
    if flags & {"relu", "rz", "rm", "rp"} or ("sat" in flags and "f" in to) or (to == "bf16" and of not in ("f32", "bf16")):
        return None
    if to in ("f16x2", "bf16x2"):  # the first source into the upper half
        high, low = (_narrowed(get(k, np.float32), to[:-2]).astype(np.uint32) for k in range(2))
        return high << np.uint32(16) | low
    kind = np.dtype(dtype_of(to)).type
    value = np.asarray(get(0, dtype_of(of)))
    if of == "bf16":
        value = _widened(value)
        if to == "f32":
            return value
    if to == "bf16":
        return _narrowed(value, to)
    if "ftz" in flags and value.dtype == np.float32:
        value = _flushed(value)
    integral = next((_TO_INTEGRAL[flag] for flag in flags if flag in _TO_INTEGRAL), None)
    if value.dtype.kind != "f" or np.dtype(kind).kind == "f":
        found = (value if integral is None else integral(value)).astype(kind)
        return _with_nan(found) if value.dtype.kind == "f" else found
    return None if integral is None else _saturated(integral(value.astype(np.float64)), kind)


def _saturated(value: np.ndarray, kind: Any) -> np.ndarray:
    """Numbers without fractions as integers, limited to what the type has."""
    limits, nan = np.iinfo(kind), np.isnan(value)
    low, high = value <= float(limits.min), value >= float(limits.max)
    inside = np.where(low | high | nan, 0, value).astype(kind)
    found = np.where(low, limits.min, np.where(high, limits.max, inside)).astype(kind)
    return np.where(nan, kind(0) if limits.bits < 64 else np.uint64(1 << 63).view(kind), found)


def _narrowed(value: Any, to: str) -> np.ndarray:
    """The 16 bits of float32 numbers, rounded to the nearest and to even."""
    value = np.asarray(value)
    if to == "f16":
        return _with_nan(value.astype(np.float16)).view(np.uint16)
    bits = value.view(np.uint32)
    upper = (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(value), np.uint32(0x7FFF), upper).astype(np.uint16)


def _widened(bits: np.ndarray) -> np.ndarray:
    """bfloat16's bits as float32."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _with_nan(value: Any) -> np.ndarray:
    value = np.asarray(value)
    if not (wrong := np.isnan(value)).any():
        return value
    bits = _NAN[value.dtype.itemsize]
    return np.where(wrong, bits, value.view(bits.dtype)).view(value.dtype)


def _flushed(value: Any) -> Any:
    """Subnormal numbers as zeros of their sign."""
    value = np.asarray(value)
    small = np.abs(value) < np.finfo(value.dtype).tiny
    return np.where(small, np.copysign(value.dtype.type(0), value), value) if np.any(small) else value
