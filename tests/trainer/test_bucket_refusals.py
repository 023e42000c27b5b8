"""Gradients in buckets: mistakes, parameters that are frozen, and a single rank."""

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from tristep.trainer.kvstore.buckets import GradientBuckets


def _plain_net(width, depth):
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.Tanh())))


def _mistakes():
    messages = []

    def fail(function):
        try:
            function()
        except Exception as error:
            messages.append(f"{type(error).__name__}: {error}")
        else:
            messages.append("")

    net = _plain_net(8, 2)
    params = list(net.parameters())
    names = [name for name, _ in net.named_parameters()]
    buckets = GradientBuckets(params, names)

    def backward():
        net(torch.ones(1, 8)).sum().backward()

    backward()
    fail(backward)  # 0: a second backward, before there are buckets
    buckets.discard()
    for _ in range(2):  # what was discarded leaves nothing behind
        net.zero_grad()
        backward()
        buckets.finish([True] * 4)
    net.zero_grad()
    backward()
    fail(backward)  # 1: and with them
    buckets.discard()
    net.zero_grad()
    backward()
    params[0].grad.mul_(2.0)
    fail(lambda: buckets.finish([True] * 4))  # 2: a gradient is scaled on its way
    buckets.discard()
    net.zero_grad()
    backward()
    params[0].grad = torch.zeros(8, 8)
    fail(lambda: buckets.finish([True] * 4))  # 3: or replaced
    buckets.discard()
    net.zero_grad()
    backward()
    buckets.finish([True] * 4)
    right = params[0].grad.numpy().copy()

    rank = dist.get_rank()
    other = GradientBuckets([nn.Parameter(torch.zeros(3 + rank))], ["w"])
    fail(other.broadcast_weights)  # 4
    embedding = nn.Embedding(5, 2, sparse=True)
    sparse = GradientBuckets(list(embedding.parameters()), ["table"])
    embedding(torch.tensor([1])).sum().backward()
    fail(lambda: sparse.finish([True]))  # 5
    return messages, right


def test_mistakes_say_what_to_do(processes):
    net = _plain_net(8, 2)
    net(torch.ones(1, 8)).sum().backward()
    for messages, right in processes(2).run(_mistakes):
        for message in messages[:2]:
            assert message.startswith("RuntimeError: a second gradient for '")
            assert "accumulate()" in message
        assert "'0.weight' was written to" in messages[2]
        assert "allreduce_grads()" in messages[2]
        assert "'0.weight' was replaced" in messages[3]
        assert (
            "ranks differ: parameter number 0 is 'w' torch.float32 (3,) on rank 0 and 'w' torch.float32 (4,)" in messages[4]
        )
        assert "TypeError: the gradient of 'table' is sparse" in messages[5]
        np.testing.assert_array_equal(right, 2 * net[0].weight.grad.numpy())


def _frozen_later():
    net = _plain_net(16, 4)
    params = list(net.parameters())
    net[0].requires_grad_(False)
    buckets = GradientBuckets(params, bucket_bytes=1, first_bucket_bytes=1)
    found = []
    for step in range(7):
        net[0].requires_grad_(step >= 3)
        net[4].requires_grad_(step < 2)
        net.zero_grad()
        net(torch.ones(1, 16)).sum().backward()
        counts = buckets.finish([param.grad is not None for param in params]).tolist()
        sent = sum(not bucket.idle for bucket in buckets.buckets)
        found.append((counts, sent, [None if p.grad is None else p.grad.numpy().copy() for p in params]))
    return found


def test_parameters_may_be_frozen_and_unfrozen(processes):
    net = _plain_net(16, 4)
    for found in processes(2).run(_frozen_later):
        for step, (counts, _, gradients) in enumerate(found):
            net.zero_grad()
            net(torch.ones(1, 16)).sum().backward()
            frozen = ([0, 1] if step < 3 else []) + ([4, 5] if step >= 2 else [])
            assert counts == [0 if i in frozen else 2 for i in range(8)]
            for i, (gradient, param) in enumerate(zip(gradients, net.parameters(), strict=True)):
                if i in frozen:
                    assert gradient is None
                else:
                    np.testing.assert_allclose(gradient, 2 * param.grad.numpy(), rtol=1e-6)
        # Every parameter has a bucket of its own, and those that are frozen are not sent, after two rounds in which all
        # ranks learn of it.
        assert [sent for _, sent, _ in found] == [6, 6, 6, 8, 6, 6, 6]


def _alone():
    net = _plain_net(8, 2)
    params = list(net.parameters())
    group = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    buckets = GradientBuckets(params, group=group)
    for _ in range(3):  # nothing is ever on its way, so gradients may add up as they like
        net(torch.ones(1, 8)).sum().backward()
    params[3].grad.mul_(2.0)
    counts = buckets.finish([False, False, False, True]).tolist()
    return counts, params[0].grad.numpy().copy()


def test_one_rank_alone_sends_nothing(processes):
    net = _plain_net(8, 2)
    net(torch.ones(1, 8)).sum().backward()
    for counts, gradient in processes(2).run(_alone):
        assert counts == [1] * 4
        np.testing.assert_allclose(gradient, 3 * net[0].weight.grad.numpy(), rtol=1e-6)
