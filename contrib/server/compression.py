"""Compression of a worker's pushes to the server, with residuals by key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ...kernels import compress
from ...trainer.compression import create_compressor
from ...trainer.kvstore.base import Key
from .transport import copy_all


class PushCompression:
    """Encodes the gradients of a push as one message.

    Args:
        compression_params: the arguments of `create_compressor`.

    Attributes:
        residuals: the sum of encoding errors of each key, float32 in the key's shape.
    """

    def __init__(self, compression_params: Mapping[str, Any]) -> None:
        self._compressor = create_compressor(compression_params)
        self._params = dict(compression_params)
        self.residuals: dict[Key, torch.Tensor] = {}

    def encode(self, keys: Sequence[Key], gradients: Sequence[torch.Tensor]) -> tuple[Any, list[torch.Tensor]]:
        """Encode the gradients of a push.

        Returns the data that the server needs to decode them, and the message in a list; None and the gradients themselves,
        if these have no elements.

        Raises:
            TypeError: a gradient has a dtype that cannot be compressed.
        """
        for key, gradient in zip(keys, gradients, strict=True):
            if gradient.dtype not in compress.VALUES:
                kinds = ", ".join(map(str, compress.VALUES))
                raise TypeError(
                    f"the gradient of key {key!r} is {gradient.dtype}: compression takes {kinds}; convert the model"
                )
        for key, gradient in zip(keys, gradients, strict=True) if self._compressor.error_feedback else ():
            residual = self.residuals.get(key)
            self.residuals[key] = (
                torch.zeros(gradient.shape, device=gradient.device) if residual is None else residual.to(gradient.device)
            )
        if not any(gradient.numel() for gradient in gradients):
            return None, list(gradients)
        device = gradients[0].device
        values = torch.cat([gradient.reshape(-1).to(device, torch.float32) for gradient in gradients])
        parts, residual = [], None
        if self._compressor.error_feedback:
            parts = [self.residuals[key].view(-1) for key in keys]
            residual = torch.cat([part.to(device) for part in parts])
        message = self._compressor.encode_with_feedback(values, residual)
        if residual is not None:
            copy_all(parts, residual.split([part.numel() for part in parts]))
        return (self._params, [(gradient.shape, gradient.dtype) for gradient in gradients]), [message]

    def load_residuals(self, saved: Mapping[Key, Mapping[str, torch.Tensor]], rank: int, workers: int) -> None:
        """Load the residuals of worker `rank`, and an equal share of residuals from sources that are not workers here."""
        self.residuals = {}
        for key, sources in saved.items() if self._compressor.error_feedback else ():
            shares = [
                residual.cpu() / (1 if source == str(rank) else workers)
                for source, residual in sources.items()
                if source == str(rank) or source not in map(str, range(workers))
            ]
            if shares:
                self.residuals[key] = torch.stack(shares).sum(dim=0)
