"""Counter-based random numbers: Philox-4x32-10 (Salmon et al. 2011, table 2) on torch tensors.

The same keys and index give the same number on every backend, in any order and after resuming, because there is no
stream of random numbers. Triton has this generator built in; the CPU backend has its own copy in 32-bit integers.
"""

from __future__ import annotations

import torch

from . import roots

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEYS = (0x9E3779B9, 0xBB67AE85)  # added to the two keys in each round
ROUNDS = 10
# sin(2 pi x) = x (SINE[0] + SINE[1] x^2 + SINE[2] x^4 + ...) on [-1/4, 1/4], relative error 6e-9 at most. A library's sine
# would first reduce the angle in float64, which only large angles need.
SINE = (6.283185273792462, -41.34167747863813, 81.60223125157768, -76.57499226895557, 39.71091809046951)
# log((1 + s) / (1 - s)) = s (LOGARITHM[0] + LOGARITHM[1] s^2 + ...) for |s| <= 3 - 2 sqrt(2), relative error 7e-10. That is
# enough for numbers between sqrt(1/2) and sqrt(2), to which powers of two reduce all others. Compilers would call a
# library's logarithm once for each number, and two libraries do not agree to the last bit.
LOGARITHM = (1.9999999986223487, 0.6666681589989991, 0.3997479851652358, 0.2992559261551535)
ROOT_HALF = 0x3F3504F3  # the bits of sqrt(1/2) as a float32
LOG2 = 0.6931471805599453
_MASK = 0xFFFFFFFF


def normal(key0: int, key1: int, index: torch.Tensor) -> torch.Tensor:
    """Return a standard normal float32 number for each index >= 0, int64, always the same for the same 32-bit keys.

    Box and Muller (1958): Philox makes four words for `index // 4`; cosine and sine of two words make two numbers.
    """
    words = _philox(key0, key1, index >> 2)
    first, second = (torch.where((index & 2) == 0, words[k], words[k + 2]) for k in (0, 1))
    radius = roots.sqrt(-2.0 * _logarithm(((first >> 8) + 1).to(torch.float32) * 2.0**-24))
    # Turns in [0, 1), less a quarter for odd indices, as sin(2 pi x) = cos(2 pi turns).
    x = torch.abs(((second >> 8).to(torch.float32) * 2.0**-24 - 0.25 * (index & 1)).abs() - 0.5) - 0.25  # exact
    return radius * x * _sine_over(x * x)


def _logarithm(x: torch.Tensor) -> torch.Tensor:
    """Return the natural logarithm of float32 numbers > 0 that are not subnormal."""
    bits = x.view(torch.int32)
    exponent = (bits - ROOT_HALF) >> 23
    mantissa = (bits - (exponent << 23)).view(torch.float32)
    s = (mantissa - 1.0) / (mantissa + 1.0)
    square = s * s
    value = LOGARITHM[-1] * square
    for coefficient in LOGARITHM[-2:0:-1]:
        value = (value + coefficient) * square
    return exponent.to(torch.float32) * LOG2 + s * (value + LOGARITHM[0])


def _sine_over(square: torch.Tensor) -> torch.Tensor:
    """Return sin(2 pi x) / x for x in [-1/4, 1/4], given its square."""
    value = SINE[-1] * square
    for coefficient in SINE[-2:0:-1]:
        value = (value + coefficient) * square
    return value + SINE[0]


def _philox(key0: int, key1: int, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    c0, c1 = index & _MASK, (index >> 32) & _MASK
    c2 = c3 = torch.zeros_like(index)
    for _ in range(ROUNDS):
        high0, low0 = _multiplied(c0, MULTIPLIERS[0])
        high1, low1 = _multiplied(c2, MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ key0, low1, high0 ^ c3 ^ key1, low0
        key0, key1 = (key0 + KEYS[0]) & _MASK, (key1 + KEYS[1]) & _MASK
    return c0, c1, c2, c3


def _multiplied(word: torch.Tensor, factor: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the upper and lower 32 bits of a product of 32-bit words, without a 64-bit unsigned type."""
    low = word * (factor & 0xFFFF)  # below 2^48
    high = word * (factor >> 16) + (low >> 16)  # below 2^49
    return high >> 16, ((high << 16) | (low & 0xFFFF)) & _MASK
