"""Gradient compression with error feedback, as rules whose new weight is the message and whose state is the residual.

Seide et al. (2014), "1-bit stochastic gradient descent", section 3.1; numbers of MXNet 1.9.1 (2bit) and 2.0 (1bit).
"""

from ..language import rule, tl


@rule(full_precision=("residual",))
def two_bit(w, g, state, hyper):
    """A threshold, its negative, or nothing. One threshold at most is sent at a time, the rest later."""
    (residual,) = state
    (threshold,) = hyper
    x = residual + g
    sent = tl.where(x >= threshold, threshold, tl.where(x <= -threshold, -threshold, 0.0))
    return sent, (x - sent,)


@rule(full_precision=("residual",))
def one_bit(w, g, state, hyper):
    """1 or -1, whatever the threshold."""
    (residual,) = state
    (threshold,) = hyper
    x = residual + g
    sent = tl.where(x > threshold, 1.0, -1.0)
    return sent, (x - sent,)
