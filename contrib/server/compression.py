"""Compression of what a worker pushes to servers, with residuals by key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ...kernels import compress
from ...trainer.compression import Compressor, create_compressor
from ...trainer.kvstore.base import Key
from .sharding import Entry, Shard


class PushCompression:
    """Encodes what goes to one server in one push as one message.

    Args:
        compression_params: as for `compressor_of`.
    """

    def __init__(self, compression_params: Mapping[str, Any]) -> None:
        self._compressor = compressor_of(compression_params)
        self._params = dict(compression_params)
        self._kept: dict[tuple[Key, int], torch.Tensor] = {}  # residuals by key and server; flat
        self._count = 0  # of messages to each server

    def check(self, keys: Sequence[Key], gradients: Sequence[torch.Tensor]) -> None:
        """Refuse gradients that cannot be compressed, and begin a push.

        Raises:
            TypeError: a gradient of another type.
        """
        for key, gradient in zip(keys, gradients, strict=True):
            if gradient.dtype not in compress.VALUES:
                kinds = ", ".join(map(str, compress.VALUES))
                raise TypeError(
                    f"the gradient of key {key!r} is {gradient.dtype}: compression takes {kinds}; convert the model"
                )
        self._count += 1

    def encode(self, shard: Shard, gradients: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], list[torch.Tensor]]:
        """What a server needs to decode the message, and the message, of a server's parts of the gradients."""
        device, step = gradients[0].device, self._count - 1
        names = [(key, shard.server) for key in shard.keys]
        values = torch.cat([gradient.detach().reshape(-1).to(device, torch.float32) for gradient in gradients])
        residual = None
        if self._compressor.error_feedback:
            for name, gradient in zip(names, gradients, strict=True):
                if name not in self._kept:
                    self._kept[name] = torch.zeros(gradient.numel(), device=device)
            residual = torch.cat([self._kept[name].to(device) for name in names])
        message = self._compressor.encode_with_feedback(values, residual, step)
        if residual is not None:
            self._kept.update(zip(names, residual.split([gradient.numel() for gradient in gradients]), strict=True))
        return (self._params, step, [(gradient.shape, gradient.dtype) for gradient in gradients]), [message]

    def residuals(self, entries: Mapping[Key, Entry]) -> dict[Key, torch.Tensor]:
        """Copies of the residuals, by key."""
        found = {}
        for key, entry in entries.items():
            parts = [self._kept.get((key, server)) for server, _, _ in entry.parts]
            if any(part is not None for part in parts):
                sizes = [stop - start for _, start, stop in entry.parts]
                flats = [torch.zeros(n) if part is None else part.cpu() for part, n in zip(parts, sizes, strict=True)]
                found[key] = torch.cat(flats).view(entry.shape)
        return found

    def load_residuals(
        self, saved: Mapping[Key, Mapping[str, torch.Tensor]], entries: Mapping[Key, Entry], rank: int, workers: int
    ) -> None:
        """Load the residuals of worker `rank`, and an equal share of those whose sources are no workers here."""
        if not self._compressor.error_feedback:
            return
        names = set(map(str, range(workers)))
        for key, sources in saved.items():
            own = torch.zeros(entries[key].shape.numel())
            for source, residual in sources.items():
                if source == str(rank):
                    own += residual.cpu().reshape(-1)
                elif source not in names:
                    own += residual.cpu().reshape(-1) / workers
            for server, start, stop in entries[key].parts:
                self._kept[key, server] = own[start:stop]


def compressor_of(compression_params: Any) -> Compressor:
    """The compressor of what a worker pushes to servers.

    Raises:
        TypeError, ValueError: `compression_params` do not fit, or are of a type that takes an all-reduce.
    """
    kind = compression_params.get("type") if isinstance(compression_params, Mapping) else None
    compressor = create_compressor(compression_params) if kind != "auto" else None
    if compressor is None or compressor.type == "powersgd":
        raise ValueError(
            f"compression_params={dict(compression_params)!r} for a parameter server: 'powersgd' and 'auto' are for "
            "processes that add up their gradients; use another type, such as 'int8', or kvstore='dist_sync'"
        )
    return compressor
