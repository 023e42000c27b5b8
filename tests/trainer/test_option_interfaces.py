"""Options with every optimizer whose rule is of single elements, and both kinds of decay."""

import pytest
import torch
from optimizer_table import TABLE
from option_training import SHAPES, parameters, train, trained

from tristep import Trainer, optimizer
from tristep.kernels import Rule

ELEMENTWISE = [name for name in optimizer.registered() if isinstance(optimizer.create(name).rule, Rule)]


@pytest.mark.sample(10)
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_every_optimizer_of_single_elements_takes_the_options(name, device):
    """To go all the way from the slow weights is no Lookahead at all; and what is left of a step is longer."""
    plain, _ = trained(device, name, {"wd": 0.0}, "eager", 6)
    params, trainer = trained(device, name, {"lookahead": 2, "lookahead_alpha": 1.0}, "eager", 6)
    torch.testing.assert_close(params, plain, rtol=1e-9, atol=1e-11)
    assert trainer.state_dict()["state"]["0"]["slow_weight"].shape == SHAPES[0]
    more = {"decoupled_wd": True, "wd": 0.1} if trainer.optimizer.couples_wd else {}
    params, _ = trained(device, name, {"cautious": True} | more, "eager", 6)
    assert all(param.isfinite().all() for param in params)
    if not TABLE[optimizer.create(name).rule.name].along_gradient:
        assert not torch.equal(params[0], plain[0])


@pytest.mark.parametrize(("name", "arguments"), [("nadam", {}), ("radam", {"decoupled": False}), ("asgd", {"lambd": 0.0})])
def test_optimizers_whose_rules_know_both_kinds_of_decay(name, arguments, device):
    """As if the decay were none, and taken off before the step."""
    params, _ = trained(device, name, arguments | {"wd": 0.1, "decoupled_wd": True})
    expected = parameters(device)
    trainer = Trainer(expected, name, arguments | {"learning_rate": 0.05})
    train(expected, lambda: _decay_and_step(expected, trainer))
    torch.testing.assert_close(params, expected, rtol=1e-9, atol=1e-11)


def _decay_and_step(params, trainer):
    with torch.no_grad():
        for param in params:
            param.mul_(1.0 - 0.05 * 0.1)
    trainer.step(1)
