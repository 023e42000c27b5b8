"""Gradient compression for torch's DistributedDataParallel, as a communication hook."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from .allreduce import CompressedAllReduce, Handle
from .base import create_compressor


def ddp_hook(
    compression_params: Mapping[str, Any], group: Any = None, engine: str | None = None
) -> Callable[[Any, Any], torch.futures.Future[torch.Tensor]]:
    """A hook by which `DistributedDataParallel` averages gradients over compressed messages, the same bits on all ranks.

    It keeps residuals, so make one for each module: `module.register_comm_hook(None, ddp_hook({...}))`. The
    first step is not compressed, since DDP creates its buckets again after that.

    Args:
        compression_params: as for `create_compressor`.
        group: the process group of the module; None for the default one.
        engine: as for `tristep.kernels.choose_engine`.

    Returns:
        `hook(state, bucket)`, which ignores `state`. Its attribute `reduces` has the `CompressedAllReduce` of each bucket.
        Save their states with the model's, if training is to go on as it would have.

    Raises:
        TypeError, ValueError: `compression_params` do not fit.
    """
    running = _Running(compression_params, group, engine)

    def hook(state, bucket):  # DDP refuses annotations that are strings
        return running(bucket)

    hook.reduces = running.reduces  # type: ignore[attr-defined]
    return hook


class _Running:
    def __init__(self, compression_params: Mapping[str, Any], group: Any, engine: str | None) -> None:
        self._compressor, self._group, self._engine = create_compressor(compression_params), group, engine
        self.reduces: dict[int, CompressedAllReduce] = {}  # by the number of the bucket
        self._shapes: dict[int, list[torch.Size]] = {}
        self._begun = False
        self._running: list[tuple[Handle, Any, torch.Tensor]] = []

    def __call__(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        ranks, values = dist.get_world_size(self._group), bucket.buffer()
        if not self._begun:
            self._begun = bucket.is_last()
            values.div_(ranks)
            work = dist.all_reduce(values, group=self._group, async_op=True)
            return work.get_future().then(lambda done: done.value()[0])
        handle = self._reduce_of(bucket).start(values)
        future: Any = torch.futures.Future(devices=[values.device] if values.is_cuda else None)
        # Buckets come in the same order on all ranks. Their second collectives are started here, not when the first ones
        # happen to be over, or ranks would start them in different orders.
        if self._running:
            self._running[-1][0].advance()
        self._running.append((handle, future, values))
        if bucket.is_last():
            running, self._running = self._running, []
            for handle, future, values in running:
                handle.wait()
                future.set_result(values.div_(ranks))
        return future

    def _reduce_of(self, bucket: dist.GradBucket) -> CompressedAllReduce:
        number, values = bucket.index(), bucket.buffer()
        shapes = [gradient.shape for gradient in bucket.gradients()]
        known = self.reduces.get(number)
        if known is None or self._shapes[number] != shapes:
            if known is not None:
                warnings.warn(f"bucket {number} of DDP has other tensors now: what was kept back is dropped", stacklevel=2)
            self._shapes[number] = shapes
            self.reduces[number] = CompressedAllReduce(
                self._compressor, values.numel(), shapes, device=values.device, group=self._group, engine=self._engine
            )
        return self.reduces[number]
