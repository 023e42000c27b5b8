"""Errors in ulps: how far a tensor may be from what NumPy found with more digits, and where it is farthest."""

import numpy as np
import torch

__all__ = ["assert_close", "numpy_of", "ulp"]

# The bits of the mantissa, and the exponent of the smallest normal number.
_FORMATS = {
    torch.float64: (52, -1022),
    torch.float32: (23, -126),
    torch.float16: (10, -14),
    torch.bfloat16: (7, -126),
}


def ulp(x, dtype):
    """The distance between neighbouring numbers of this type about x."""
    mantissa, smallest = _FORMATS[dtype]
    exponent = np.where(x == 0, smallest, np.frexp(x)[1] - 1)
    return np.ldexp(np.ones_like(x), np.maximum(exponent, smallest) - mantissa)


def numpy_of(tensor):
    """The tensor in the widest type that NumPy computes in here: float64, or 80 bits on x86."""
    return tensor.detach().cpu().double().numpy().astype(np.longdouble)


def assert_close(got, expected, *, arithmetic, scale=None, ulps=2, slack=0.0, what=""):
    """Assert that `got` is `expected`, up to the rounding that a step in type `arithmetic` cannot avoid.

    The tolerance is 2 ulps of the arithmetic's type, taken at the largest operand. A step is some four to eight operations,
    each of which is half an ulp off at most, but most of these errors belong to terms much smaller than the result, and
    they seldom all point one way. Where the tensor's own type is narrower, the result is rounded once more, by half an ulp
    of that type. Where one is NaN or infinite, so must be the other.

    Args:
        got: the tensor, in the type in which it is stored.
        expected: array of what it should hold, in more digits.
        arithmetic: the type that was computed in.
        scale: array, the size of the largest operand; default that of `expected` itself.
        ulps: how many.
        slack: number or array, added to the tolerance.
        what: what to call it in the message.
    """
    assert got.shape == expected.shape, f"{what}: shape {tuple(got.shape)}, expected {expected.shape}"
    if not expected.size:
        return
    scale = np.abs(expected) if scale is None else np.maximum(scale, np.abs(expected))
    actual = numpy_of(got)
    limit = torch.finfo(got.dtype).max
    with np.errstate(all="ignore"):
        # What is beyond the largest number by half an ulp or more is stored as infinite.
        beyond = np.abs(expected) >= limit + ulp(np.longdouble(limit), got.dtype) / 2
        expected = np.where(beyond, np.copysign(np.inf, expected), expected)
        allowed = ulps * ulp(scale, arithmetic) + slack
        if torch.finfo(got.dtype).bits < torch.finfo(arithmetic).bits:
            allowed = allowed + ulp(np.maximum(np.abs(expected), np.abs(actual)), got.dtype) / 2
        error = np.abs(actual - expected)
    regular = np.isfinite(actual) & np.isfinite(expected)
    same = (actual == expected) | (np.isnan(actual) & np.isnan(expected))
    wrong = np.where(regular, error > allowed, ~same)
    if not wrong.any():
        return
    share = np.where(wrong, np.where(regular, error / allowed, np.inf), -1.0)
    worst = np.unravel_index(np.argmax(share), share.shape)
    raise AssertionError(
        f"{what or 'result'}: {np.count_nonzero(wrong)} of {wrong.size} {got.dtype} values are off; the worst, at "
        f"{tuple(map(int, worst))}, is {actual[worst]!s} and should be {expected[worst]!s}: off by {error[worst]:.3g}, "
        f"allowed are {allowed[worst]:.3g}, which is {ulps} ulps of {arithmetic} at {scale[worst]:.6g}"
        + (f" and half an ulp of {got.dtype}" if got.dtype != arithmetic else "")
    )
