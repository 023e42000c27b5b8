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
    """Return a communication hook with which `DistributedDataParallel` averages gradients by compressed messages.

    All ranks get the same bits. The hook keeps residuals, so make one for each module:
    `module.register_comm_hook(None, ddp_hook({...}))`. The first step is not compressed, since DDP makes its buckets anew
    after it.

    Args:
        compression_params: the type of the compression and its options; see `create_compressor`.
        group: the process group of the module; None for the default group.
        engine: the engine of encoding and decoding; see `tristep.kernels.choose_engine`.

    Returns:
        A function `hook(state, bucket)`, which ignores `state`. Its attribute `reduces` is a dict of the
        `CompressedAllReduce` of each bucket; to continue a training exactly, save their states with the model's.

    Raises:
        TypeError: `compression_params` is no dict, or an option has a wrong type.
        ValueError: the type or an option is unknown or out of range.
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
                warnings.warn(f"bucket {number} of DDP has other tensors now, so its residual is dropped", stacklevel=2)
            known_shapes[number] = shapes
            reduces[number] = CompressedAllReduce(
                compressor, values.numel(), device=values.device, group=group, engine=engine
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
        # DDP passes buckets in the same order on all ranks. Second collectives are started here, not when the first ones
        # happen to end, since ranks would then start them in different orders.
        if running:
            running[-1][0].advance()
        running.append((handle, future, values))
        if bucket.is_last():
            started = running.copy()
            running.clear()
            for bucket_handle, bucket_future, bucket_values in started:
                bucket_handle.wait()
                bucket_future.set_result(bucket_values.div_(ranks))
        return future

    hook.reduces = reduces  # type: ignore[attr-defined]
    return hook
