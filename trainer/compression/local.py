"""Gradient compression between the replicas of one process: "2bit" and "1bit", with error feedback for each replica."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ...kernels import Rule, Update, rules
from .base import check_float32, create_compressor

_RULES: dict[str, Rule] = {"2bit": rules.two_bit, "1bit": rules.one_bit}


def local_compression(compression_params: Any) -> tuple[str, float]:
    """Return the type, "2bit" or "1bit", and the threshold in `compression_params`; raise for any other."""
    compressor = create_compressor(compression_params)
    if compressor.type not in _RULES or not compressor.error_feedback:
        allowed = " or ".join(map(repr, _RULES))
        raise ValueError(f"{dict(compression_params)!r}: in one process compression is {allowed}, with error feedback")
    return compressor.type, compressor.threshold  # type: ignore[attr-defined]  # both types have one


class GradientCompression:
    """Compression of gradients by key and source (the number of a replica), with a residual for each pair of these.

    `compression_params` is {"type": "2bit" or "1bit", "threshold": 0.5}. `residuals`, by (key, source), is the dict that is
    used, not a copy.

    Source: MXNet 1.9.1 and 2.0, `gradient_compression`.
    """

    def __init__(self, compression_params: Mapping[str, Any], engine: str | None = None) -> None:
        self.type, self.threshold = local_compression(compression_params)
        self._engine = engine
        self.residuals: dict[tuple[Any, Any], torch.Tensor] = {}
        self._updates: dict[Any, Update] = {}

    def sent(self, keys: Sequence[Any], source: Any, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the gradients of a source, dense float32, after compression and decompression, and update the residuals.

        The next call with the same keys and source overwrites the returned tensors. A TypeError leaves residuals unchanged.
        """
        for key, gradient in zip(keys, gradients, strict=True):
            check_float32(key, gradient)
        bound_to = source, tuple(keys)
        update = self._updates.get(bound_to)
        if update is None or not self._fits(update, gradients):
            for key, gradient in zip(keys, gradients, strict=True):
                old = self.residuals.get((key, source))
                if old is None or old.shape != gradient.shape or old.device != gradient.device:
                    self.residuals[key, source] = torch.zeros_like(gradient, memory_format=torch.contiguous_format)
            states = [(self.residuals[key, source],) for key in keys]
            outputs = [torch.zeros_like(residual) for (residual,) in states]
            update = self._updates[bound_to] = Update(_RULES[self.type], outputs, states, engine=self._engine)
            update.hyper[:] = [1.0, self.threshold]
        update.bind(list(gradients))
        update()
        return update.weights

    @staticmethod
    def _fits(update: Update, gradients: Sequence[torch.Tensor]) -> bool:
        return all(
            output.shape == gradient.shape and output.device == gradient.device
            for output, gradient in zip(update.weights, gradients, strict=True)
        )
