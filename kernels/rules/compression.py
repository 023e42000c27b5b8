"""Gradient compression with error feedback, as rules: the new weight is the message, the state is the residual.

Seide et al. (2014), "1-bit stochastic gradient descent", section 3.1; matches MXNet 1.9.1 (2bit) and 2.0 (1bit).
"""

from ..language import rule, tl


@rule(full_precision=("residual",))
def two_bit(w, g, state, hyper):
    """Send the threshold, its negative, or 0 for each element, and keep the difference for the next message."""
    (residual,) = state
    (threshold,) = hyper
    x = residual + g
    sent = tl.where(x >= threshold, threshold, tl.where(x <= -threshold, -threshold, 0.0))
    return sent, (x - sent,)


@rule(full_precision=("residual",))
def one_bit(w, g, state, hyper):
    """Send 1 for each element above the threshold, else -1, and keep the difference for the next message."""
    (residual,) = state
    (threshold,) = hyper
    x = residual + g
    sent = tl.where(x > threshold, 1.0, -1.0)
    return sent, (x - sent,)
