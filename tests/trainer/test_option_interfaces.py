"""Options of optimizers: by torch's interface, off, copied, with user-defined optimizers, and what is refused."""

import math

import pytest
import torch
from optimizer_table import TABLE
from option_training import SHAPES, parameters, train, trained

from tristep import Trainer, optimizer
from tristep.kernels import Rule, rule

ELEMENTWISE = [name for name in optimizer.registered() if isinstance(optimizer.create(name).rule, Rule)]


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_every_optimizer_of_single_elements_takes_the_options(name, device):
    """To go all the way from the slow weights is no Lookahead at all; and what is left of a step is longer."""
    plain, _ = trained(device, name, {"wd": 0.0}, "eager")
    params, trainer = trained(device, name, {"lookahead": 2, "lookahead_alpha": 1.0}, "eager")
    torch.testing.assert_close(params, plain, rtol=1e-9, atol=1e-11)
    assert trainer.state_dict()["state"]["0"]["slow_weight"].shape == SHAPES[0]
    more = {"decoupled_wd": True, "wd": 0.1} if trainer.optimizer.couples_wd else {}
    params, _ = trained(device, name, {"cautious": True} | more, "eager")
    assert all(param.isfinite().all() for param in params)
    if not TABLE[optimizer.create(name).rule.name].along_gradient:
        assert not torch.equal(params[0], plain[0])


REFUSED = {
    "muon": ({"cautious": True}, TypeError, "cautious=True: Muon has a rule of whole tensors"),
    "adafactor": ({"lookahead": 5}, TypeError, "lookahead=5: Adafactor has a rule of whole tensors"),
    "adamw": (
        {"decoupled_wd": True},
        ValueError,
        "decoupled_wd=True: AdamW decays the weights apart from the gradient already",
    ),
    "adagrad": ({"decoupled_wd": True}, ValueError, "AdaGrad decays the weights apart from the gradient already"),
    "stableadamw": ({"decoupled_wd": True}, ValueError, "StableAdamW decays the weights apart from the gradient already"),
    "radam": ({"decoupled_wd": True}, ValueError, "RAdam decays the weights apart from the gradient already"),
    "rprop": ({"decoupled_wd": True}, ValueError, "decoupled_wd=True: Rprop has no weight decay, so it must be False"),
    "adam": ({"cautious": 1}, TypeError, "cautious=1: must be True or False"),
    "nag": ({"lookahead": 0}, ValueError, "lookahead=0: must be 1 or more"),
    "ftml": ({"lookahead": 2.5}, TypeError, "lookahead=2.5: must be an integer"),
    "nadam": ({"lookahead_alpha": 0.0}, ValueError, "lookahead_alpha=0.0: must be .*greater than 0"),
    "lion": ({"lookahead_alpha": 1.5}, ValueError, "lookahead_alpha=1.5: must be .*1 or less"),
    "lamb": ({"look_ahead": 5}, TypeError, "LAMB has no argument 'look_ahead'.*Did you mean 'lookahead'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_is(name):
    arguments, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        optimizer.create(name, **arguments)


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


def test_signum_without_momentum_has_decoupled_decay_only():
    optimizer.create("signum", decoupled_wd=True)
    with pytest.raises(ValueError, match="Signum decays the weights apart"):
        optimizer.create("signum", momentum=0.0, decoupled_wd=True)


@rule
def _unnamed(w, g, state, hyper):
    lr, missing = hyper
    return w - lr * missing * g, state


def test_a_missing_hyper_parameter_is_named_with_the_composed_rule(device):
    class Lacking(optimizer.RuleOptimizer):
        rule = _unnamed

        def hyper(self, t, lr, wd):
            return {}

    param = torch.nn.Parameter(torch.ones(2, device=device))
    param.grad = torch.ones_like(param)
    with pytest.raises(TypeError, match="rule '_unnamed_lookahead' needs 'missing', which Lacking lacks"):
        Trainer([param], Lacking(lookahead=1)).step(1)
    assert math.isclose(param.sum().item(), 2.0)
