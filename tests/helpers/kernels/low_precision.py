"""Numbers, their roundings to 16 bits by integers, and updates of one tensor, for tests."""

import math

import numpy as np
import torch

from tristep.kernels import rule

# No numbers below the normal ones: Triton's interpreter reads such bfloat16 as 0.
SPECIAL = [0.0, -0.0, math.inf, -math.inf, math.nan, 3.4e38, -3.4e38, 1.2e-38, -1.2e-38, 1.00390625, 1.01171875, -1.00390625]


@rule
def take(w, g, state, hyper):
    """All of it is a copy, so that nothing but loads and stores decides what comes out."""
    first, second = state  # noqa: RUF059  # names it
    return g, (w, first)


@rule(full_precision=("slow",))
def slowly(w, g, state, hyper):
    fast, slow = state
    return w - fast, (g, slow + g)


def as_bfloat16(values):
    """float32 numbers rounded to the nearest bfloat16, ties to even."""
    return _nearest(values, 16, lambda bits: (bits & np.uint32(1 << 16)) != 0)


def in_24_bits(values):
    """float32 numbers rounded to the nearest with no bits in the lowest 8, ties away from zero."""
    return _nearest(values, 8, lambda bits: True)


def _nearest(values, dropped, ties_go_up):
    """Rounded to numbers without so many of the lowest bits: of the two neighbours, by comparing distances."""
    bits = np.asarray(values, dtype=np.float32).view(np.uint32)
    lower = bits >> np.uint32(dropped) << np.uint32(dropped)
    down, up = lower.view(np.float32), (lower + np.uint32(1 << dropped)).view(np.float32)  # infinity, above the largest
    exact, low, high = (np.asarray(x, dtype=np.float64) for x in (values, down, up))
    high = np.where(np.isinf(high), np.sign(high) * 2.0**128, high)  # what the next number would be
    with np.errstate(invalid="ignore"):
        nearer, tie = np.abs(exact - high) < np.abs(exact - low), np.abs(exact - high) == np.abs(exact - low)
    return np.where(np.isfinite(exact), np.where(nearer | (tie & ties_go_up(bits)), up, down), values).astype(np.float32)


def numbers(seed, shape, scale=1.0):
    """float32 numbers of many sizes, the special ones among them."""
    rng = np.random.default_rng(seed)
    values = rng.normal(size=shape) * scale * 2.0 ** rng.integers(-20, 20, shape)
    flat = values.reshape(-1)
    count = min(flat.size, len(SPECIAL))
    flat[:count] = SPECIAL[:count]
    with np.errstate(over="ignore"):
        return values.astype(np.float32)


def same(tensor, expected):
    """Equal as numbers, signs of zeros included; NaN is NaN."""
    got = tensor.detach().cpu().to(torch.float32).numpy()
    np.testing.assert_array_equal(got, expected)
    np.testing.assert_array_equal(np.signbit(got[~np.isnan(got)]), np.signbit(expected[~np.isnan(expected)]))


def bits(tensor):
    return tensor.detach().cpu().contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize])


def tensors(place, arrays, dtype):
    return [torch.tensor(np.asarray(array, dtype=np.float32)).to(dtype).to(place.device) for array in arrays]
