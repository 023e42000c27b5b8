"""The exception classes of a `Trainer`."""

from __future__ import annotations


class StaleGradientError(UserWarning, RuntimeError):
    """Raised when a step needs a gradient that was not written since the last step. A UserWarning, too, as in Gluon."""


class UpdateOnKVStoreError(AssertionError, RuntimeError):
    """Raised by `allreduce_grads` and `update` if the store updates the weights. An AssertionError, too, as in Gluon."""
