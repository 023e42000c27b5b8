"""Errors of a `Trainer` that are caught by name."""

from __future__ import annotations


class StaleGradientError(UserWarning, RuntimeError):
    """A parameter has had no backward pass since the last step. (Gluon raises UserWarning, which this is, too.)"""


class UpdateOnKVStoreError(AssertionError, RuntimeError):
    """Half a step was asked for where the store takes it as a whole. (Gluon raises AssertionError, which this is, too.)"""
