"""Compressed gradients between the processes of a Trainer: the same bits on all ranks."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from rank_training import make_net, weights_after_steps
from torch import nn

import tristep

COMPRESSIONS = [
    {"type": "2bit", "threshold": 0.02},
    {"type": "1bit", "threshold": 0.0},
    *({"type": kind} for kind in ("fp16", "bf16", "int8", "int4", "sign", "topk", "randomk", "powersgd")),
]


def _compressed(params):
    """Weights of both ways to update."""
    found = []
    for update in (True, False):
        store = {"kvstore": "dist_sync", "compression_params": params, "update_on_kvstore": update}
        found.append(weights_after_steps("sgd", {"learning_rate": 0.01}, dtype=torch.float32, **store))
    return found


@pytest.mark.sample(4)
@pytest.mark.parametrize("params", COMPRESSIONS, ids=lambda params: params["type"])
def test_compressed_sums_are_the_same_on_all_ranks_whoever_updates(processes, params):
    found = processes(2).run(_compressed, params)
    plain = weights_after_steps("sgd", {"learning_rate": 0.01}, dtype=torch.float32)
    for rank in found:
        for weights in rank:
            np.testing.assert_array_equal(weights, found[0][0])
    assert np.isfinite(found[0][0]).all()
    assert not np.array_equal(found[0][0], plain)
    if params["type"] in ("fp16", "bf16", "int8"):
        np.testing.assert_allclose(found[0][0], plain, rtol=0, atol=2e-3)


def _two_bit():
    """What MXNet's 2bit sends, by NumPy, and what the trainer's gradients become."""
    net = make_net(torch.float32)
    trainer = tristep.Trainer(
        net,
        "sgd",
        {"learning_rate": 0.0},
        kvstore="dist_sync",
        update_on_kvstore=False,
        compression_params={"type": "2bit", "threshold": 0.25},
    )
    own, sums = [], []
    for step in range(4):
        gradients = [
            torch.randn(param.shape, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
            for param in net.parameters()
        ]
        for param, gradient in zip(net.parameters(), gradients, strict=True):
            param.grad = gradient.clone()
        trainer.allreduce_grads()
        own.append(torch.cat([gradient.flatten() for gradient in gradients]).numpy())
        sums.append(torch.cat([param.grad.flatten() for param in net.parameters()]).numpy().copy())
        trainer.update(1)
    return np.stack(own), np.stack(sums)


def test_two_bits_are_mxnets_on_every_rank(processes):
    found = processes(3).run(_two_bit)
    total = 0.0
    for own, _ in found:
        residual, sent = np.zeros_like(own[0]), []
        for gradient in own:
            x = residual + gradient
            sent.append(np.where(x >= 0.25, np.float32(0.25), np.where(x <= -0.25, np.float32(-0.25), np.float32(0))))
            residual = x - sent[-1]
        total = total + np.stack(sent)
    for _, sums in found:
        np.testing.assert_array_equal(sums, total)


def _kept_back(params):
    """Sums of all gradients so far, what was sent of them, and all that is kept back, after several steps."""
    # Most of a bucket is gaps here: a code that left its own sums there would soon drown the gradients.
    net = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 40))
    trainer = tristep.Trainer(
        net, "sgd", {"learning_rate": 0.0}, kvstore="dist_sync", update_on_kvstore=False, compression_params=params
    )
    total, sent = torch.zeros(0), torch.zeros(0)
    for step in range(30):
        gradients = []
        for param in net.parameters():
            generator = torch.Generator().manual_seed(100 * step + 10 * dist.get_rank() + param.numel() % 7)
            param.grad = torch.randn(param.shape, generator=generator)
            gradients.append(param.grad.flatten().clone())
        own = torch.cat(gradients)
        dist.all_reduce(own)
        trainer.allreduce_grads()
        found = torch.cat([param.grad.flatten() for param in net.parameters()])
        total, sent = (own, found.clone()) if step == 0 else (total + own, sent + found)
        trainer.update(1)
    residuals = trainer.state_dict()["residuals"]
    kept = torch.cat([sum(residuals[name].values()).flatten() for name, _ in net.named_parameters()])
    return total.numpy(), sent.numpy(), kept.numpy()


@pytest.mark.sample(4)
@pytest.mark.parametrize("params", COMPRESSIONS, ids=lambda params: params["type"])
def test_what_was_not_sent_is_kept_back_and_no_more(processes, params):
    (total, sent, kept), (other, same, _) = processes(2).run(_kept_back, params)
    np.testing.assert_array_equal(total, other)
    np.testing.assert_array_equal(sent, same)
    if params["type"] != "1bit":  # it sends ones, however small gradients are
        assert np.abs(kept).max() < 60
    np.testing.assert_allclose(sent + kept, total, rtol=0, atol=2e-4)
