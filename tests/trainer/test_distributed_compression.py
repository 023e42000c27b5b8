"""Compressed gradients between the processes of a Trainer: the same bits on all ranks."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from rank_training import make_net, train, weights_after_steps, weights_of
from torch import nn

import tristep

COMPRESSIONS = [
    {"type": "2bit", "threshold": 0.02},
    {"type": "1bit", "threshold": 0.0},
    *({"type": kind} for kind in ("fp16", "bf16", "int8", "int4", "sign", "topk")),
]


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


class _Crossed(nn.Module):
    """Backward computes the gradients in another order than that of the parameters. Most of a bucket are gaps."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.last, self.scale = nn.Linear(40, 2), nn.Parameter(torch.ones(3))
        self.first, self.middle = nn.Linear(7, 40), nn.Linear(40, 40)

    def forward(self, x):
        return self.last(self.middle(self.first(x).tanh()).tanh()) * self.scale.sum()


def _in_the_middle(params, update, path):
    """Weights after each of 6 steps; and after steps 4 to 6 by new trainers that load states saved after the third."""
    settings = {"kvstore": "dist_sync", "update_on_kvstore": update, "compression_params": params}
    arguments = {"learning_rate": 0.02, "momentum": 0.9}
    straight, net, trainer = train("sgd", arguments, 3, torch.float32, net=_Crossed(), **settings)
    weights = [param.detach().clone() for param in net.parameters()]
    trainer.save_states(path)
    straight = np.concatenate([straight, train("sgd", arguments, 3, torch.float32, False, 3, net, trainer, **settings)[0]])
    again = _Crossed()
    with torch.no_grad():
        for param, weight in zip(again.parameters(), weights, strict=True):
            param.copy_(weight)
    resumed = tristep.Trainer(again, "sgd", dict(arguments), **settings)
    resumed.load_states(path)
    return straight, train("sgd", arguments, 3, torch.float32, False, 3, again, resumed, **settings)[0]


@pytest.mark.sample(4)
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("update", [True, False], ids=["ZeRO-1", "all-reduce"])
@pytest.mark.parametrize("params", [None, *COMPRESSIONS], ids=lambda params: params["type"] if params else "plain")
def test_a_training_resumed_in_the_middle_has_the_same_bits(processes, tmp_path, params, update, ranks):
    for straight, resumed in processes(ranks).run(_in_the_middle, params, update, tmp_path / "states"):
        np.testing.assert_array_equal(resumed, straight[3:])


def _kept_and_applied(params, fails):
    """Weights that rate 1 has changed, what is kept back, the gradients' sums; and whether a step left gradients alone.

    With `fails` the second step fails at its learning rate, after gradients have been summed, and is repeated.
    """

    def rate(num_update):
        if broken:
            raise ValueError("no rate yet")
        return 1.0

    net, broken = _Crossed(), False
    for param in net.parameters():
        nn.init.zeros_(param)
    trainer = tristep.Trainer(net, "sgd", {"lr_scheduler": rate}, kvstore="dist_sync", compression_params=params)
    total, untouched = torch.zeros(0), True
    for step in range(3):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        gradients = [torch.randn(param.shape, generator=generator) for param in net.parameters()]
        for param, gradient in zip(net.parameters(), gradients, strict=True):
            param.grad = gradient.clone()
        if fails and step == 1:
            broken = True
            with pytest.raises(ValueError, match="no rate yet"):
                trainer.step(1)
            broken = False
        trainer.step(1)
        if not (fails and step == 1):
            untouched &= all(map(torch.equal, [param.grad for param in net.parameters()], gradients))
        own = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(own)
        total = own if step == 0 else total + own
    residuals = trainer.state_dict()["residuals"]
    kept = torch.cat([sum(residuals[name].values()).flatten() for name, _ in net.named_parameters()])
    return weights_of(net), kept.numpy(), total.numpy(), untouched


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("params", COMPRESSIONS, ids=lambda params: params["type"])
def test_sharded_steps_apply_what_is_not_kept_back_and_leave_gradients_alone(processes, params, fails):
    found = processes(3).run(_kept_and_applied, params, fails)
    for weights, kept, total, untouched in found:
        np.testing.assert_array_equal(weights, found[0][0])
        np.testing.assert_allclose(kept - weights, total, rtol=0, atol=2e-5)
        assert untouched is (params["type"] != "topk")  # which sums whole buckets in place


def _of_owners(params):
    settings = {"kvstore": "dist_sync", "compression_params": params}
    return weights_after_steps("muon", {"learning_rate": 0.01}, dtype=torch.float32, net=_Crossed(), **settings)


@pytest.mark.parametrize("kind", ["bf16", "int8"])
def test_a_matrix_with_one_owner_gets_compressed_sums(processes, kind):
    """Parts of ranks differ here, as each parameter belongs to one rank."""
    plain = weights_after_steps("muon", {"learning_rate": 0.01}, dtype=torch.float32, net=_Crossed())
    found = processes(3).run(_of_owners, {"type": kind})
    for weights in found:
        np.testing.assert_array_equal(weights, found[0])
    np.testing.assert_allclose(found[0], plain, rtol=0, atol=5e-3)
