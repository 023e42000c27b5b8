"""Rules with reductions, and what runs and checks them, for tests."""

# ruff: noqa: RUF059  # a rule names all its states and sums, whether it needs them or not

import numpy as np

from tristep.kernels import jit, reduction, rule, tl


@jit
def everywhere(w, value):
    return tl.where(w == w, value, value)


def tensors(place, shapes, dtype, gradient_dtype=None, seed=0):
    rng = np.random.default_rng(seed)
    weights = [place.tensor(rng.normal(size=shape), dtype) for shape in shapes]
    return weights, [place.tensor(rng.normal(size=shape), gradient_dtype or dtype) for shape in shapes]


@reduction
def longest(w, g, state, hyper):
    return (g * g,)


@longest.finish
def longest_norm(sums, kept, hyper):
    """The largest norm so far, forgotten little by little, and the number of steps."""
    norm, steps = kept
    (fading,) = hyper
    (square,) = sums
    return tl.maximum(fading * norm, tl.sqrt(square)), steps + 1.0


@rule(reduction=longest)
def by_longest(w, g, state, hyper, sums):
    """w <- w - lr g / the largest norm so far."""
    lr, fading = hyper
    norm, steps = sums
    return w - lr * g / norm, state
