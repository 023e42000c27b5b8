"""Gradient compression for torch's DistributedDataParallel, as a communication hook."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from ...trainer.compression import CompressedAllReduce, Handle, create_compressor


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
    compressor, begun = create_compressor(compression_params), False
    reduces: dict[int, CompressedAllReduce] = {}  # by the number of the bucket
    known_shapes: dict[int, list[torch.Size]] = {}
    running: list[tuple[Handle, Any, torch.Tensor]] = []

    def reduce_of(bucket: dist.GradBucket) -> CompressedAllReduce:
        number, values = bucket.index(), bucket.buffer()
        shapes = [gradient.shape for gradient in bucket.gradients()]
        if known_shapes.get(number) != shapes:
            if number in reduces:
                warnings.warn(f"bucket {number} of DDP has other tensors now: what was kept back is dropped", stacklevel=2)
            known_shapes[number] = shapes
            reduces[number] = CompressedAllReduce(
                compressor, values.numel(), shapes, device=values.device, group=group, engine=engine
            )
        return reduces[number]

    def hook(state, bucket):  # DDP refuses annotations that are strings
        nonlocal begun
        ranks, values = dist.get_world_size(group), bucket.buffer()
        if not begun:
            begun = bucket.is_last()
            values.div_(ranks)
            work = dist.all_reduce(values, group=group, async_op=True)
            return work.get_future().then(lambda done: done.value()[0])
        handle = reduce_of(bucket).start(values)
        future = torch.futures.Future(devices=[values.device] if values.is_cuda else None)
        # Buckets come in the same order on all ranks. Their second collectives are started here, not when the first ones
        # happen to be over, or ranks would start them in different orders.
        if running:
            running[-1][0].advance()
        running.append((handle, future, values))
        if bucket.is_last():
            started = running.copy()
            running.clear()
            for own_handle, own_future, own_values in started:
                own_handle.wait()
                own_future.set_result(own_values.div_(ranks))
        return future

    hook.reduces = reduces  # type: ignore[attr-defined]
    return hook
