"""Functions shared by several families of rules: weight decay, clipping and norms."""

from ..language import jit, reduction, tl


@jit
def clipped(g, clip):
    """Clamp `g` to [-clip, clip]; an infinite `clip` changes nothing, and NaN stays NaN."""
    return tl.clamp(g, -clip, clip)


@jit
def weighted(factor, x):
    """Return factor x, or 0 if the factor is 0, also for a non-finite `x`, such as a weight of -inf used as a mask."""
    return tl.where(factor == 0.0, 0.0, factor * x)


@jit
def clip_coefficient(norm, max_norm, epsilon):
    """Return the factor that scales a norm down to `max_norm`: 1 if the norm is smaller, NaN if it is NaN."""
    return tl.minimum(max_norm / (norm + epsilon), 1.0)


@jit
def norm_of(square):
    """Return the root of a sum of squares. Small sums are scaled by powers of two, as a GPU's root of a subnormal is 0."""
    small = square < 1e-30
    return tl.sqrt(square * tl.where(small, 18446744073709551616.0, 1.0)) * tl.where(small, 2.3283064365386963e-10, 1.0)


@jit
def squares(x):
    """Return x^2 and (2^-64 x)^2, whose sums `norm_of_both` takes: a sum of the first overflows for norms above 1.8e19."""
    small = x * 5.421010862427522e-20
    return x * x, small * small


@jit
def norm_of_both(square, small_square):
    """Return the norm from the two sums of `squares`. Each comparison is false for NaN."""
    return tl.where(square <= 3e38, norm_of(square), tl.sqrt(small_square) * 18446744073709551616.0)


@reduction(scope="global")
def total_square(w, g, state, hyper):
    """Sum of squares of the gradient over all tensors."""
    return (g * g,)


@jit
def decayed_after_clip(w, g, wd, clip):
    """Clip first, then add the weight decay, which is never clipped (SGD and its variants)."""
    return clipped(g, clip) + weighted(wd, w)


@jit
def decayed_before_clip(w, g, wd, clip):
    """Add the weight decay first, then clip the sum (Adam and RMSProp of MXNet 1.9.1)."""
    return clipped(g + weighted(wd, w), clip)


@jit
def sign(x):
    """Return -1, 0 or 1; 0 for 0 and for NaN."""
    return tl.where(x > 0.0, 1.0, tl.where(x < 0.0, -1.0, 0.0))
