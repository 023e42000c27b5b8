"""The Trainer: skipped and frozen parameters, and steps that fail."""

import functools

import pytest
import torch
from trainer_cases import backward_with, fails_and_changes_nothing, one_step_rates, reach_both, reach_head

import tristep
from tristep import Trainer


def test_ignoring_stale_gradients_leaves_their_parameters_alone(net, trainer, everything):
    reach_both(net)
    trainer.step(1)
    body = list(net["body"].parameters())
    for _ in range(3):
        before, states = [param.detach().clone() for param in body], trainer.state_dict()["state"]
        momenta = {name: states[name]["mom"].clone() for name in ("body.weight", "body.bias", "head.weight")}
        head = net["head"].weight.detach().clone()
        reach_head(net)
        trainer.step(1, ignore_stale_grad=True)
        states = trainer.state_dict()["state"]
        assert all(torch.equal(param, old) for param, old in zip(body, before, strict=True))
        assert torch.equal(states["body.weight"]["mom"], momenta["body.weight"])
        assert torch.equal(states["body.bias"]["mom"], momenta["body.bias"])
        assert not torch.equal(states["head.weight"]["mom"], momenta["head.weight"])
        assert not torch.equal(net["head"].weight, head)
    assert trainer.state_dict()["counts"] == {"body.weight": 1, "body.bias": 1, "head.weight": 4, "head.bias": 4}
    assert trainer.optimizer.num_update == 4
    fails_and_changes_nothing(trainer, net.parameters(), everything, "'body.weight'")


def test_all_parameters_of_a_step_have_one_rate(params, gradients):
    """A schedule is asked once for a step, for the largest count in it, also for parameters that lag behind."""
    trainer = Trainer(params, "sgd", {"lr_scheduler": lambda num_update: float(num_update)})
    backward_with(params[:2], gradients[:2])
    trainer.step(1, ignore_stale_grad=True)
    assert one_step_rates(trainer, params) == pytest.approx([2, 2, 2], rel=1e-5)
    assert list(trainer.optimizer.counts.values()) == [2, 2, 1]


@pytest.mark.parametrize("left", ["as it was", "written to", "zeroed by the module", "none"])
def test_parameters_frozen_later_are_left_alone_whatever_gradient_they_have(net, trainer, left):
    for _ in range(2):
        reach_both(net)
        trainer.step(1)
    net["body"].requires_grad_(False)
    before = [param.clone() for param in net["body"].parameters()]
    for _ in range(2):
        for param in net["body"].parameters():
            if left == "written to":
                param.grad.add_(1.0)
            elif left == "none":
                param.grad = None
        if left == "zeroed by the module":
            net.zero_grad(set_to_none=False)
        reach_both(net)
        trainer.step(1)
    assert all(torch.equal(param, old) for param, old in zip(net["body"].parameters(), before, strict=True))
    assert trainer.state_dict()["counts"] == {"body.weight": 2, "body.bias": 2, "head.weight": 4, "head.bias": 4}
    net["body"].requires_grad_(True)
    net.zero_grad()
    reach_both(net)
    trainer.step(1)
    assert trainer.state_dict()["counts"]["body.weight"] == 3
    assert not torch.equal(net["body"].bias, before[1])


@pytest.mark.parametrize("face", ["Trainer", "tristep.optim"])
def test_gradients_that_are_there_by_turns(face, engine, device, monkeypatch):
    """Any of them may be missing at any step, and have other strides. torch.optim skips those parameters, too."""
    monkeypatch.setenv("TRISTEP_ENGINE", engine)
    generator = torch.Generator().manual_seed(0)
    shapes = [(3, 5), (7,), (0,), (), (4, 2), (130,)]
    starts = [torch.randn(shape, generator=generator) for shape in shapes]
    ours, theirs = ([torch.nn.Parameter(start.clone().to(where)) for start in starts] for where in (device, "cpu"))
    decay = 0.0 if face == "Trainer" else 0.1  # MXNet corrects the rate of the decay, too
    expected = torch.optim.AdamW(theirs, lr=0.01, weight_decay=decay)
    if face == "Trainer":
        trainer = Trainer(ours, "adamw", {"learning_rate": 0.01, "epsilon": 1e-8}, engine=engine)
        step = functools.partial(trainer.step, 1, ignore_stale_grad=True)
    else:
        step = tristep.optim.AdamW(ours, lr=0.01, weight_decay=decay).step
    for k in range(12):
        there = torch.rand(len(shapes), generator=generator) < (0.5 if k else 1.0)
        for present, mine, other in zip(there, ours, theirs, strict=True):
            gradient = torch.randn(other.shape, generator=generator) if present else None
            other.grad = gradient
            if present and k == 7 and gradient.dim() == 2:
                gradient = gradient.t().contiguous().t()
            mine.grad = None if gradient is None else gradient.to(device)
        expected.step()
        step()
        for mine, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(mine.detach().cpu(), other.detach(), rtol=1e-5, atol=1e-6)
