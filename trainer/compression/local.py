"""Gradient compression between the replicas of one process: the rules "2bit" and "1bit", with a residual per replica."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ...kernels import Rule, Update, rules
from .base import check_float32, create_compressor

_RULES: dict[str, Rule] = {"2bit": rules.two_bit, "1bit": rules.one_bit}


def local_compression(compression_params: Any) -> tuple[str, float]:
    """Type and threshold out of `compression_params`.

    Raises:
        TypeError, ValueError: they do not fit, or are of a type that takes several processes.
    """
    found = create_compressor(compression_params)
    if found.type not in _RULES or not found.error_feedback:
        known = " or ".join(map(repr, _RULES))
        raise ValueError(f"{dict(compression_params)!r}: in one process compression is {known}, with error feedback")
    return found.type, found.threshold  # type: ignore[attr-defined]  # both have one


class GradientCompression:
    """Compresses gradients of several sources by key, each with a residual of its own.

    Args:
        compression_params: {"type": "2bit" or "1bit", "threshold": 0.5}.
        engine: as for `tristep.kernels.choose_engine`.

    Source: MXNet 1.9.1 and 2.0, `gradient_compression`.
    """

    def __init__(self, compression_params: Mapping[str, Any], engine: str | None = None) -> None:
        self.type, self.threshold = local_compression(compression_params)
        self._engine = engine
        self.residuals: dict[tuple[Any, Any], torch.Tensor] = {}  # by key and source
        self._updates: dict[Any, Update] = {}

    def sent(self, keys: Sequence[Any], source: Any, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """What is sent of these gradients: tensors that the next call for the same keys and source overwrites.

        Raises:
            TypeError: a gradient that is not dense float32; nothing has been changed.
        """
        for key, gradient in zip(keys, gradients, strict=True):
            check_float32(key, gradient)
        what = source, tuple(keys)
        update = self._updates.get(what)
        if update is None or not self._fits(update, gradients):
            for key, gradient in zip(keys, gradients, strict=True):
                old = self.residuals.get((key, source))
                if old is None or old.shape != gradient.shape or old.device != gradient.device:
                    self.residuals[key, source] = torch.zeros_like(gradient, memory_format=torch.contiguous_format)
            states = [(self.residuals[key, source],) for key in keys]
            room = [torch.zeros_like(residual) for (residual,) in states]
            update = self._updates[what] = Update(_RULES[self.type], room, states, engine=self._engine)
            update.hyper[:] = [1.0, self.threshold]
        update.bind(list(gradients))
        update()
        return update.weights

    @staticmethod
    def _fits(update: Update, gradients: Sequence[torch.Tensor]) -> bool:
        return all(
            room.shape == gradient.shape and room.device == gradient.device
            for room, gradient in zip(update.weights, gradients, strict=True)
        )
