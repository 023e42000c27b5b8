"""Sharpness-aware minimization: the ascent step, after which a second gradient is taken."""

from ..language import jit, reduction, rule, tl
from .common import norm_of_both, squares


@jit
def scale(w, adaptive):
    """Return |w| if the ascent is adaptive, else 1."""
    return tl.where(adaptive > 0.0, tl.abs(w), 1.0)


@reduction(scope="global")
def ascent_square(w, g, state, hyper):
    """Sum the squares of the gradient over all tensors; the gradient is multiplied by |w| if the ascent is adaptive."""
    (adaptive,) = hyper
    square, small_square = squares(scale(w, adaptive) * g)
    return square, small_square


@rule(reduction=ascent_square)
def ascent(w, g, state, hyper, sums):
    """w <- w + rho g / |g| with the norm of all tensors. Foret et al. (2021), eq. 2; adaptive: Kwon et al. (2021), eq. 8."""
    rho, adaptive = hyper
    square, small_square = sums
    factor = scale(w, adaptive)
    return w + rho * (factor * factor * (g / (norm_of_both(square, small_square) + 1e-12))), state
