"""Sharpness-aware minimization: the step up the gradient, before a second gradient is taken there."""

from ..language import jit, reduction, rule, tl


@jit
def scale(w, adaptive):
    """|w| where the ascent is adaptive, else 1."""
    return tl.where(adaptive > 0.0, tl.abs(w), 1.0)


@reduction(scope="global")
def ascent_square(w, g, state, hyper):
    """Sum of squares of the gradient, scaled by the weight if adaptive, over all tensors."""
    (adaptive,) = hyper
    scaled = scale(w, adaptive) * g
    return (scaled * scaled,)


@rule(reduction=ascent_square)
def ascent(w, g, state, hyper, sums):
    """w <- w + rho g / |g|, |g| over all tensors. Foret et al. (2021), eq. 2; adaptive: Kwon et al. (2021), eq. 8."""
    rho, adaptive = hyper
    (square,) = sums
    factor = scale(w, adaptive)
    return w + rho / (tl.sqrt(square) + 1e-12) * factor * factor * g, state
