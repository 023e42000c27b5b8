"""Options of all optimizers by rule: cautious steps, decoupled weight decay, Lookahead; with what else a step is about."""

import pytest
import torch
from option_training import parameters, train, trained

from tristep import Trainer

ALL = {"cautious": True, "lookahead": 3, "wd": 0.1, "decoupled_wd": True}


@pytest.mark.sample(1)
def test_multipliers_hold_for_steps_and_for_decay(engine, device):
    """Those of one parameter are as if all had had them."""
    params = parameters(device)
    params[1].lr_mult, params[1].wd_mult = 0.5, 3.0
    trainer = Trainer(params, "adam", {"learning_rate": 0.05, **ALL}, engine=engine)
    train(params, lambda: trainer.step(1))
    for i, arguments in [(0, {}), (1, {"learning_rate": 0.025, "wd": 0.3})]:
        expected, _ = trained(device, "adam", ALL | arguments, engine)
        torch.testing.assert_close(params[i], expected[i], rtol=1e-12, atol=1e-14)


@pytest.mark.sample(0, "cpu", "triton")
def test_every_parameter_synchronises_at_its_own_updates(engine, device):
    """One of two is left out now and then: each goes as if it were alone."""
    together = parameters(device)[:2]
    alone = parameters(device)[:2]
    arguments = {"learning_rate": 0.05, "momentum": 0.9, "lookahead": 3}
    trainer = Trainer(together, "sgd", arguments, engine=engine)
    trainers = [Trainer([param], "sgd", arguments, engine=engine) for param in alone]
    torch.manual_seed(3)
    for t in range(14):
        for i, (param, other) in enumerate(zip(together, alone, strict=True)):
            param.grad = other.grad = None
            if i == 0 or t % 4 != 1:
                param.grad = torch.randn(param.shape, dtype=torch.float64).to(device)
                other.grad = param.grad.clone()
                trainers[i].step(1)
        trainer.step(1, ignore_stale_grad=True)
        assert all(map(torch.equal, together, alone))
    assert list(trainer.optimizer.counts.values()) == [14, 10]


@pytest.mark.sample(0, "cpu", "triton")
@pytest.mark.parametrize("gap", [1, 3])
def test_other_gradients_between_synchronisations_are_the_ones_that_are_used(gap, engine, device):
    """Two rules share a plan: each must notice what was bound, moved or left out while the other one was in use."""
    params, expected = parameters(device), parameters(device)
    trainer = Trainer(params, "sgd", {"learning_rate": 0.1, "lookahead": 2, "lookahead_alpha": 1.0}, engine=engine)
    plain = Trainer(expected, "sgd", {"learning_rate": 0.1}, engine=engine)  # alpha 1 is no Lookahead at all
    torch.manual_seed(4)
    for t in range(12):
        for i, (param, other) in enumerate(zip(params, expected, strict=True)):
            new = torch.randn(param.shape, dtype=torch.float64).to(device)
            if t % gap == 0 or param.grad is None:
                param.grad, other.grad = new, new.clone()
            else:
                param.grad.copy_(new)
                other.grad.copy_(new)
            if t in (4, 5) and i == 1:
                param.grad = other.grad = None
        if t == 8:
            for param, other in zip(params, expected, strict=True):
                param.data, other.data = param.data.clone(), other.data.clone()
        trainer.step(1, ignore_stale_grad=True)
        plain.step(1, ignore_stale_grad=True)
        torch.testing.assert_close(params, expected, rtol=1e-12, atol=1e-14)


def test_optimizers_with_states_of_their_own_start_them_as_before(device):
    """DCASGD's last state is the weight at first; the slow weight comes after it."""
    params, _ = trained(device, "dcasgd", {"lookahead": 1, "lookahead_alpha": 1.0, "lamda": 0.5})
    expected, _ = trained(device, "dcasgd", {"lamda": 0.5})
    torch.testing.assert_close(params, expected, rtol=1e-12, atol=1e-14)


def test_sparse_gradients_take_masks_and_decay_but_no_slow_weights(device):
    table = torch.nn.Embedding(6, 2, sparse=True, device=device)
    rows = torch.tensor([1, 4], device=device)
    trainer = Trainer(table, "sgd", {"learning_rate": 0.5, "wd": 0.1, "cautious": True, "decoupled_wd": True})
    before = table.weight.detach().clone()
    table(rows).sum().backward()
    trainer.step(1)
    expected = before.clone()
    expected[rows] = before[rows] - 0.5 - 0.05 * before[rows]
    torch.testing.assert_close(table.weight.detach(), expected)
    trainer = Trainer(table, "sgd", {"lookahead": 2})
    table(rows).sum().backward()
    before = table.weight.detach().clone()
    with pytest.raises(ValueError, match="lookahead=2 for 'weight', whose gradient is sparse: .*must be None"):
        trainer.step(1)
    assert torch.equal(table.weight, before)
