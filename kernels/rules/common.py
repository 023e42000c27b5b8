"""What several families of rules share: how decay and clipping meet the gradient."""

from ..language import jit, tl


@jit
def clipped(g, clip):
    """`g` limited to [-clip, clip]; an infinite `clip` changes nothing, and NaN stays NaN."""
    return tl.where(g > clip, clip, tl.where(g < -clip, -clip, g))


@jit
def decayed_after_clip(w, g, wd, clip):
    """Clip first, then add the weight decay, which is never clipped (SGD and its kin)."""
    return clipped(g, clip) + wd * w


@jit
def decayed_before_clip(w, g, wd, clip):
    """Add the weight decay first, then clip both (Adam and RMSProp of MXNet 1.9.1)."""
    return clipped(g + wd * w, clip)


@jit
def sign(x):
    """-1, 0 or 1; 0 for 0 and for NaN."""
    return tl.where(x > 0.0, 1.0, tl.where(x < 0.0, -1.0, 0.0))
