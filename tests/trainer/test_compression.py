"""The compressed all-reduce: MXNet's recorded sums, the same bits on all ranks, bytes as the codes say."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from compressed_sums import TYPES, Thirds, on_ranks, params_of

from tristep.kvstore import CompressedAllReduce, create_compressor, ddp_hook

N = 64 * 50 + 50 + 3 * 40 * 7


def _gradient(rank, step, n=N):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(-512, 512, (n,), generator=generator) / 256.0  # whose sums are exact


def _sums(kind, steps, feedback=True, exchange=None, engine=None, n=N, dtype=torch.float32):
    """Each step's sum, what is kept at the end, and how it went."""
    compressor = Thirds() if kind == "thirds" else create_compressor(params_of(kind))
    compressor.error_feedback = feedback
    reduce = CompressedAllReduce(compressor, n, engine=engine, exchange=exchange)
    found = []
    for step in range(steps):
        bucket = _gradient(dist.get_rank(), step, n).to(dtype)
        reduce.start(bucket).wait()
        found.append(bucket)
    return found, reduce.state_dict(), reduce.exchange


def _kept(states):
    """What the ranks keep back together."""
    total = torch.zeros(states[0]["numel"], dtype=torch.float64)
    for state in states:
        if state["worker"] is not None:
            total += state["worker"]
        if state["server"] is not None:
            part = total[state["rank"] * len(state["server"]) :][: len(state["server"])]
            part += state["server"][: len(part)]
    return total


@pytest.mark.sample(3)
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("kind", [*TYPES, "thirds"])
def test_all_ranks_get_the_same_bits_and_nothing_is_lost(kind, ranks, processes):
    """What was given out and what is kept back are together what came in, but for rounding."""
    steps = 4
    answers = on_ranks(processes, ranks, _sums, kind, steps)
    for found, _, _ in answers[1:]:
        assert all(map(torch.equal, found, answers[0][0]))
    states = [state for _, state, _ in answers]
    given = sum(each.double() for each in answers[0][0])
    came = sum(_gradient(rank, step).double() for rank in range(ranks) for step in range(steps))
    exact = kind in ("2bit", "1bit", "topk")
    torch.testing.assert_close(given + _kept(states), came, rtol=0, atol=0 if exact else 1e-4)
    assert any(state["worker"].any() for state in states) or kind == "fp16"
    assert answers[0][2] == ("all_gather" if ranks == 2 or kind == "topk" else "all_to_all")


def _parts(kind, sizes, steps, engine):
    """Each step's sum of this rank's part, its state, the bytes of a step; and whether buckets stayed as they were."""
    compressor, n, own = Thirds() if kind == "thirds" else create_compressor(params_of(kind)), sum(sizes), dist.get_rank()
    reduce = CompressedAllReduce(compressor, n, engine=engine, parts=sizes)
    found, untouched = [], True
    for step in range(steps):
        bucket, out = _gradient(own, step, n), torch.full((sizes[own],), torch.nan)
        reduce.start(*((bucket, out) if reduce.scatters else (bucket,))).wait()
        untouched &= torch.equal(bucket, _gradient(own, step, n))
        start = sum(sizes[:own])
        found.append(out if reduce.scatters else bucket[start : start + len(out)])
    return found, reduce.state_dict(), reduce.bytes_sent, untouched and reduce.scatters


@pytest.mark.sample(3)
@pytest.mark.sample(0, "triton")
@pytest.mark.parametrize("sizes", [(2048, 2048, 2048), (1280, 0, 3000), (5000,), (384, 384)], ids=str)
@pytest.mark.parametrize("kind", [*TYPES, "thirds"])
def test_sums_of_parts_go_one_way_and_lose_nothing(kind, sizes, engine, processes):
    ranks, n, steps = len(sizes), sum(sizes), 3
    answers = on_ranks(processes, ranks, _parts, kind, sizes, steps, engine)
    given = torch.cat([sum(each.double() for each in found) for found, *_ in answers])
    came = sum(_gradient(rank, step, n).double() for rank in range(ranks) for step in range(steps))
    exact = kind in ("2bit", "1bit", "topk")
    torch.testing.assert_close(given + _kept([state for _, state, *_ in answers]), came, rtol=0, atol=0 if exact else 1e-4)
    for rank, (_, state, sent, scattered) in enumerate(answers):
        assert scattered is (kind != "topk")
        if scattered:  # whole tiles of the other ranks' parts, once, and what is kept of its own bucket
            bits = 8 if kind == "thirds" else FIRST[kind]
            tile = 1 if kind == "thirds" else 1024
            assert state["server"] is None
            assert sent == sum(-(-size // tile) * tile * bits / 8 for other, size in enumerate(sizes) if other != rank)


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["2bit", "int8", "sign", "bf16", "topk"])
def test_buckets_in_low_precision_and_of_few_elements(kind, processes):
    for n, dtype in ((10, torch.float32), (4000, torch.bfloat16)):
        answers = on_ranks(processes, 3, _sums, kind, 2, True, None, None, n, dtype)
        for found, _, _ in answers:
            assert found[0].dtype == dtype
            assert all(map(torch.equal, found, answers[0][0]))


def _golden(kind, threshold, gradients, exchange):
    rank, reduce, found = dist.get_rank(), None, []
    for step in gradients:
        bucket = torch.from_numpy(step[rank].reshape(-1).copy())
        params = {"type": kind, "threshold": threshold}
        reduce = reduce or CompressedAllReduce(params, bucket.numel(), exchange=exchange)
        reduce.start(bucket).wait()
        found.append((bucket.numpy(), reduce.state_dict()["worker"].numpy()))
    return found


def _several(config):
    return config["devices"] > 1 and config["optimizer"] is None


@pytest.mark.golden("gradient_compression", where=_several)
@pytest.mark.golden("gradient_compression_1bit", version=2, where=_several)
@pytest.mark.parametrize("exchange", ["all_to_all", "all_gather"])
def test_sums_are_those_that_mxnet_recorded(exchange, golden, processes):
    """Each of its devices as a rank."""
    config, arrays = golden
    answers = on_ranks(processes, config["devices"], _golden, config["type"], config["threshold"], arrays["g"], exchange)
    for rank, found in enumerate(answers):
        for step, (total, residual) in enumerate(found):
            np.testing.assert_array_equal(total, arrays["pulled"][step].reshape(-1))
            np.testing.assert_array_equal(residual, arrays["residual"][step][rank].reshape(-1))


FIRST = {"2bit": 2, "1bit": 1, "int8": 8 + 32 / 128, "int4": 4 + 32 / 128, "sign": 1 + 32 / 128, "fp16": 16, "bf16": 16}


@pytest.mark.parametrize(
    ("entry", "value", "message"),
    [
        ("type", "int4", "state has type='int4': this all-reduce has 'int8'"),
        ("numel", 7, "state has numel=7: this all-reduce has"),
        ("rank", 1, "state has rank=1: this all-reduce has 0"),
        ("ranks", 3, "state has ranks=3: this all-reduce has 1"),
    ],
)
def test_states_of_others_are_refused(entry, value, message):
    reduce = CompressedAllReduce({"type": "int8"}, N)
    reduce.start(_gradient(0, 0)).wait()
    saved = reduce.state_dict()
    with pytest.raises(ValueError, match=message):
        reduce.load_state_dict(saved | {"worker": torch.zeros(N), entry: value})
    assert torch.equal(reduce.state_dict()["worker"], saved["worker"])
    reduce.load_state_dict(saved | {"worker": torch.zeros(N)})
    assert not reduce.state_dict()["worker"].any()


def _not_finite(kind):
    reduce = CompressedAllReduce(params_of(kind), 4096)
    found = []
    for step in range(3):
        bucket = torch.ones(4096)
        if step == 0 and dist.get_rank() == 1:
            bucket[5] = float("nan")
        reduce.start(bucket).wait()
        found.append(bucket)
    return found


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", ["fp16", "bf16", "int8", "int4", "sign", "topk"])
def test_one_ranks_nan_is_seen_by_all_and_is_over_with_the_step(kind, processes):
    for found in on_ranks(processes, 3, _not_finite, kind):
        assert found[0].isnan().any()
        assert found[1].isfinite().all()
        assert found[2].isfinite().all()


def _averaged(params, steps):
    torch.manual_seed(dist.get_rank())
    layers = (torch.nn.Linear(30, 300), torch.nn.Tanh(), torch.nn.Linear(300, 300), torch.nn.Tanh(), torch.nn.Linear(300, 2))
    net = torch.nn.Sequential(*layers)
    module = torch.nn.parallel.DistributedDataParallel(net, bucket_cap_mb=0.2)
    hook = ddp_hook(params) if params else None
    if hook is not None:
        module.register_comm_hook(None, hook)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.2)
    torch.manual_seed(50)
    inputs = torch.randn(64, 30)
    targets = (inputs[:, :2] > 0).float()
    mine = slice(dist.get_rank(), None, 2)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = torch.nn.functional.binary_cross_entropy_with_logits(module(inputs[mine]), targets[mine])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    weights = torch.cat([parameter.detach().view(-1) for parameter in net.parameters()])
    return weights, losses, len(hook.reduces) if hook is not None else 0


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", ["int8", "fp16", "topk"])
def test_ddp_averages_over_compressed_messages(kind, processes):
    """The mean, as DDP without a hook finds it (fp16: nearly to the digit), the same bits on both ranks; and it learns."""
    (weights, losses, buckets), (other, *_) = on_ranks(processes, 2, _averaged, params_of(kind), 40)
    assert torch.equal(weights, other)
    assert losses[-1] < 0.7 * losses[0]
    assert buckets > 1
    if kind == "fp16":
        (plain, *_), _ = on_ranks(processes, 2, _averaged, None, 40)
        torch.testing.assert_close(weights, plain, rtol=0, atol=2e-4)


# In one process.


def _start_twice():
    reduce = CompressedAllReduce({"type": "int8"}, 5000)
    reduce.start(torch.ones(5000))
    for call in (lambda: reduce.start(torch.ones(5000)), reduce.state_dict, lambda: reduce.load_state_dict({})):
        with pytest.raises(RuntimeError, match="the sum of the last bucket is not complete: wait for its handle first"):
            call()
    reduce.finish()
    reduce.start(torch.ones(5000)).wait()


def test_what_is_under_way_is_waited_for(processes):
    on_ranks(processes, 2, _start_twice)
