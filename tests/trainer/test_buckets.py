"""Gradients in buckets: sums over real processes, started while backward runs, whatever parameters a rank uses."""

from contextlib import ExitStack, contextmanager
from functools import partial
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from tristep.trainer.compression import CompressedAllReduce, Handle
from tristep.trainer.kvstore.buckets import GradientBuckets
from tristep.trainer.kvstore.compressed import compressed_sum
from tristep.trainer.utils import distributed


def _plain_net(width, depth):
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.Tanh())))


def _overlap():
    net = _plain_net(32, 8)
    params = list(net.parameters())
    events = []
    for i, param in enumerate(params):  # before those of the buckets
        param.register_post_accumulate_grad_hook(lambda _, i=i: events.append(("arrived", i)))
    buckets = GradientBuckets(params, bucket_bytes=9_000, first_bucket_bytes=4_000)
    flats, all_reduce = [], dist.all_reduce

    def noted(values, *args, **settings):
        started = [k for k, flat in enumerate(flats) if values is flat]
        events.extend(("started", k) for k in started)
        return all_reduce(values, *args, **settings)

    dist.all_reduce = noted
    for _ in range(2):
        events.clear()
        flats[:] = [bucket.flat for bucket in buckets.buckets]
        net(torch.ones(2, 32)).sum().backward()
        launched = list(events)
        buckets.finish([True] * len(params))
    dist.all_reduce = all_reduce
    return launched, [[member.param for member in bucket.members] for bucket in buckets.buckets]


def test_sums_are_started_before_backward_ends_and_in_one_order(processes):
    found = processes(2).run(_overlap)
    for events, members in found:
        started = [k for what, k in events if what == "started"]
        assert started == list(range(len(members)))  # all, as every parameter was used: nothing is left to finish()
        last_hook = max(place for place, (what, _) in enumerate(events) if what == "arrived")
        assert events.index(("started", 0)) < last_hook
        assert sum(place < last_hook for place, (what, _) in enumerate(events) if what == "started") == len(members) - 1
        assert sorted(i for bucket in members for i in bucket) == list(range(16))
        # The order in which gradients come: from the last layer to the first.
        assert [max(bucket) // 2 for bucket in members] == sorted((max(bucket) // 2 for bucket in members), reverse=True)
    assert found[0][1] == found[1][1]


def _views():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)).to(memory_format=torch.channels_last)
    params = list(net.parameters())
    buckets = GradientBuckets(params)
    net(torch.ones(1, 3, 8, 8)).sum().backward()
    buckets.finish([True] * 4)
    first = [param.grad for param in params]
    same_order = [grad.stride() == param.stride() for grad, param in zip(first, params, strict=True)]
    versions = [grad._version for grad in first]
    first[0].mul_(2.0)
    separate = [grad._version - before for grad, before in zip(first, versions, strict=True)]
    one_memory = {grad.untyped_storage().data_ptr() for grad in first}
    net.zero_grad()
    net(torch.ones(1, 3, 8, 8)).sum().backward()
    buckets.finish([True] * 4)
    return same_order, separate, len(one_memory), [param.grad is grad for param, grad in zip(params, first, strict=True)]


def test_a_gradient_is_a_lasting_view_with_its_own_version_and_order(processes):
    for same_order, separate, memories, lasting in processes(2).run(_views):
        assert all(same_order)
        assert separate == [1, 0, 0, 0]
        assert memories == 1
        assert all(lasting)


def _types():
    torch.manual_seed(0)
    params = [nn.Parameter(torch.ones(300, dtype=d)) for d in (torch.bfloat16, torch.float32, torch.float16, torch.float32)]
    converted = hasattr(params[0], "grad_dtype")
    if converted:
        params[0].grad_dtype = torch.float32
    by_hand = nn.Parameter(torch.ones(3))
    buckets = GradientBuckets([*params, by_hand])
    for step in range(2):
        for param in params:
            param.grad = None
        loss = sum((param.float() * (dist.get_rank() + 1 + step)).sum() for param in params)
        loss.backward()
        by_hand.grad = torch.full((3,), 5.0)
        counts = buckets.finish([False] * 4 + [dist.get_rank() == 1]).tolist()
    kinds = sorted({(str(bucket.flat.dtype), str(bucket.weight_dtype)) for bucket in buckets.buckets})
    values = [param.grad.float().numpy().copy() for param in (*params, by_hand)]
    return converted, counts, values, kinds


def test_types_are_mixed_and_gradients_may_be_wider_or_written_by_hand(processes):
    for converted, counts, values, kinds in processes(2).run(_types):
        assert counts == [2, 2, 2, 2, 1]
        assert all((each == 5).all() for each in values)  # 2 + 3, and 5 of rank 1 alone
        wide = "torch.float32" if converted else "torch.bfloat16"
        assert (wide, "torch.bfloat16") in kinds
        assert ("torch.float16", "torch.float16") in kinds


def _only_halves():
    params = [nn.Parameter(torch.ones(10, dtype=torch.bfloat16)) for _ in range(2)]
    buckets = GradientBuckets(params)
    for param in params[: 1 + dist.get_rank()]:
        param.grad = torch.full_like(param, 3.0)
    counts = buckets.finish([param.grad is not None for param in params])
    return str(counts.dtype), counts.tolist(), [param.grad.float().tolist()[0] for param in params]


def test_counts_are_exact_where_gradients_are_not(processes):
    for dtype, counts, values in processes(3).run(_only_halves):
        assert (dtype, counts, values) == ("torch.float32", [3, 2], [9.0, 6.0])


class _Halves(nn.Module):
    """Layers that backward reaches in another order on other ranks, and one that rank 1 does not use."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.left, self.right, self.last = (_plain_net(32, 3) for _ in range(3))

    def forward(self, x, rank):
        first, second = (self.left, self.right) if rank % 2 else (self.right, self.left)
        x = second(first(x))
        return x if rank == 1 else self.last(x)


_COLLECTIVES = "all_reduce", "all_gather", "all_to_all"


def _compressed_overlap(kind, scatter):
    rank, net = dist.get_rank(), _Halves()
    params, events = list(net.parameters()), []
    for param in params:
        param.register_post_accumulate_grad_hook(lambda _: events.append("arrived"))
    reducer = partial(compressed_sum, compression_params={"type": kind}, group=None, engine="eager", scatter=scatter)
    sizes = {"bucket_bytes": 9_000, "first_bucket_bytes": 4_000}
    buckets = GradientBuckets(params, reducer=reducer, scatter=scatter, **sizes)
    with ExitStack() as stack:
        for name in _COLLECTIVES:
            real = getattr(distributed, name)

            def noted(values, *args, name=name, real=real, **settings):
                events.append((name, values.numel()))
                return real(values, *args, **settings)

            stack.enter_context(mock.patch.object(distributed, name, noted))
        start = buckets.start_sum
        stack.enter_context(mock.patch.object(buckets, "start_sum", lambda each: (events.append("started"), start(each))[1]))
        for step in range(3):
            net.zero_grad()
            loss = net(torch.ones(2, 32) * (1 + step + rank), rank).sum()
            own = torch.autograd.grad(loss, params, retain_graph=True, allow_unused=True)
            events.clear()
            loss.backward()
            in_backward = list(events)
            buckets.finish([param.grad is not None for param in params])
    own = [None if each is None else each.numpy() for each in own]
    return in_backward, list(events), own, [None if each.grad is None else each.grad.numpy().copy() for each in params]


@pytest.mark.sample(1)
@pytest.mark.parametrize(("kind", "scatter"), [("fp16", False), ("int8", False), ("fp16", True)])
def test_later_collectives_of_compressed_sums_are_started_in_backward_and_in_one_order(processes, kind, scatter):
    """Three ranks, of which one uses the layers in another order and leaves one out, so that it starts all in `finish`."""
    found = processes(3).run(_compressed_overlap, kind, scatter)
    orders = [[each for each in events if each != "arrived"] for _, events, *_ in found]
    assert orders[0] == orders[1] == orders[2]
    in_backward, _, _, sums = found[0]
    assert in_backward.count("arrived") == 18
    during = in_backward[: max(k for k, each in enumerate(in_backward) if each == "arrived")]
    started, collectives = during.count("started"), sum(each not in ("started", "arrived") for each in during)
    assert started >= 2
    assert collectives == started if scatter else collectives > started
    assert "started" not in found[1][0]
    if scatter or kind != "fp16":
        return
    for k, total in enumerate(sums):
        wanted = sum(own[k].astype(np.float64) for _, _, own, _ in found if own[k] is not None)
        np.testing.assert_allclose(total, wanted, rtol=0, atol=4e-3 * max(1.0, np.abs(wanted).max()))
        assert all(total.tobytes() == rank[3][k].tobytes() for rank in found)


class _Stream:
    """As a stream of a GPU, of which only what it waits for is known."""

    def __init__(self, log):
        self.log = log

    def wait_stream(self, other):
        self.log.append(("wait", self, other))


def _on_streams():
    """A pass whose gradients are computed on two streams, as of a model that has used both in its forward pass.

    How often a stream has waited for another one, and how many gradients it has kept from the stream that they are of.
    """
    log, kept = [], {}
    usual, one, two = (_Stream(log) for _ in range(3))
    here, net = [usual], _plain_net(40, 4)
    where = {param: (one, two)[k % 2] for k, param in enumerate(net.parameters())}
    for param, stream in where.items():
        param.register_post_accumulate_grad_hook(lambda _, stream=stream: here.__setitem__(0, stream))
    buckets = GradientBuckets(net.parameters(), bucket_bytes=10_000, first_bucket_bytes=10_000)
    start = buckets.start_sum

    def start_sum(bucket):
        log.append(("start", bucket, here[0]))
        return start(bucket)

    def record_stream(gradient, stream):
        kept.update({param: stream for param in where if param.grad is gradient})

    with (
        mock.patch("tristep.kernels.streams.current", side_effect=lambda _: here[0]),
        mock.patch.object(buckets, "start_sum", start_sum),
        mock.patch.object(torch.Tensor, "record_stream", record_stream),
    ):
        for _ in range(2):  # the first makes the buckets
            log.clear()
            kept.clear()
            net.zero_grad()
            net(torch.ones(2, 40)).sum().backward()
            here[0] = usual
            buckets.finish([True] * len(where))
    params, waited, checked = list(net.parameters()), [], 0
    for what, first, second in log:
        if what == "wait":
            waited.append((first, second))
            continue
        used = {where[params[member.param]] for member in first.members}
        assert set(waited) == {(second, stream) for stream in used if stream is not second}
        others = [params[member.param] for member in first.members if where[params[member.param]] is not second]
        assert all(kept.get(param) is second for param in others)
        checked += len(waited)
        waited = []
    return checked, len(kept)


def test_a_sum_waits_for_the_streams_on_which_its_gradients_were_computed(processes):
    for waits, kept in processes(2).run(_on_streams):
        assert waits > 1
        assert kept >= waits


def _compressed_beside():
    """What is done on which stream: the log of waits, starts and advances."""
    log = []
    usual, hooks, side = (_Stream(log) for _ in range(3))
    names, here, net = {usual: "usual", hooks: "hooks", side: "side"}, [usual], _plain_net(40, 8)
    for param in net.parameters():
        param.register_post_accumulate_grad_hook(lambda _: here.__setitem__(0, hooks))
    reducer = partial(compressed_sum, compression_params={"type": "fp16"}, group=None, engine="eager")
    buckets = GradientBuckets(net.parameters(), bucket_bytes=10_000, first_bucket_bytes=10_000, reducer=reducer)
    start, advance = CompressedAllReduce.start, Handle.advance

    @contextmanager
    def on_stream(stream):
        before, here[0] = here[0], stream
        yield
        here[0] = before

    def noted(what, real):
        def call(self, *args):
            log.append((what, here[0]))
            return real(self, *args)

        return call

    with (
        mock.patch("tristep.kernels.streams.current", side_effect=lambda _: here[0]),
        mock.patch("tristep.kernels.streams.new_stream", return_value=side),
        mock.patch("tristep.kernels.streams.on_stream", on_stream),
        mock.patch.object(CompressedAllReduce, "start", noted("start", start)),
        mock.patch.object(Handle, "advance", noted("advance", advance)),
    ):
        for _ in range(2):  # the first makes the buckets
            log.clear()
            net(torch.ones(2, 40)).sum().backward()
            n_in_backward, here[0] = len(log), usual
            buckets.finish([True] * 16)
    return [(each[0], *map(names.get, each[1:])) for each in log], n_in_backward


def test_compressed_sums_wait_on_a_stream_of_their_own(processes):
    """Backward's stream waits for none of them; the stream of `finish` waits once, after all of them."""
    for log, n_in_backward in processes(3).run(_compressed_beside):
        assert {each[1] for each in log if each[0] != "wait"} == {"side"}
        starts = [k for k, each in enumerate(log) if each[0] == "start"]
        assert len(starts) > 2
        assert all(log[k - 1] == ("wait", "side", "hooks") for k in starts)
        assert ("advance", "side") in log[:n_in_backward]
        assert not any(each[:2] == ("wait", "hooks") for each in log)
        assert [k for k, each in enumerate(log) if each == ("wait", "usual", "side")] == [len(log) - 1]
