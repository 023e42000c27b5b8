"""Differences from MXNet: docs/differences.md names a test for each; those of numbers that no other file has are here."""

import ast
import math
import re
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import Parameter

from tristep import Trainer, lr_scheduler, optimizer
from tristep.trainer.optimizer import DCASGD, FTML, LANS, LARS, SGD, SGLD, Adamax, AdamW, Ftrl, get_updater, registered
from tristep.trainer.optimizer import Test as AddingTest

FOLDER = Path(__file__).parent
PAGE = (FOLDER.parents[1] / "docs" / "differences.md").read_text(encoding="utf-8")
ROWS = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in PAGE.splitlines() if line.startswith("| ")]
ROWS = [row for row in ROWS if row[0] != "What"]

# ---- the page --------------------------------------------------------------------------------------------------------


def test_each_difference_has_a_reason_and_a_test_that_exists():
    assert len(ROWS) > 40
    folders = (FOLDER, FOLDER.with_name("kernels"), FOLDER.with_name("contrib"), FOLDER.parent)
    for row in ROWS:
        assert len(row) == 5
        assert all(row)
        file, name = re.fullmatch(r"`(test_\w+\.py)::(test_\w+)`", row[-1]).groups()
        path = next(each / file for each in folders if (each / file).exists())
        assert name in _functions(path), row[0]


@cache
def _functions(path):
    return [node.name for node in ast.parse(path.read_text(encoding="utf-8")).body if isinstance(node, ast.FunctionDef)]


# ---- numbers ---------------------------------------------------------------------------------------------------------


def test_adamw_decays_when_gradients_are_multiplied_by_zero():
    weight, updater = torch.ones(3), get_updater(AdamW(learning_rate=0.5, wd=0.25, rescale_grad=0.0))
    updater(0, torch.full((3,), 7.0), weight)
    # The decay takes the bias-corrected rate.
    np.testing.assert_allclose(weight.numpy(), 1 - 0.5 * math.sqrt(0.001) / 0.1 * 0.25, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_states_of_16_bit_weights_are_float32(dtype, engine, device, monkeypatch):
    """A step of 2**-30 is no float16; after a million of them it would still be 0 there."""
    monkeypatch.setenv("TRISTEP_ENGINE", engine)
    updater = get_updater(SGD(learning_rate=2.0**-15, momentum=0.5))
    weight = torch.ones(3, dtype=dtype, device=device)
    for _ in range(2):
        updater(0, torch.full_like(weight, 2.0**-15), weight)
    (momentum,) = updater.states[0]
    assert momentum.dtype == torch.float32
    assert momentum.tolist() == [-1.5 * 2.0**-30] * 3


@pytest.mark.sample(0, "cpu", "triton")
def test_adamax_survives_gradients_of_zero(engine, device, monkeypatch):
    """MXNet 1.9.1 divides 0 by 0."""
    monkeypatch.setenv("TRISTEP_ENGINE", engine)
    weight, updater = torch.ones(3, device=device), get_updater(Adamax(learning_rate=0.5))
    updater(0, torch.tensor([0.0, 1.0, -2.0], device=device), weight)
    assert weight.tolist() == [1.0, pytest.approx(0.5), pytest.approx(1.5)]


@pytest.mark.sample(0, "cpu", "triton")
def test_lans_survives_gradients_of_zero(engine, device, monkeypatch):
    """MXNet 2.0 divides them by their norm. As with LAMB, what is left of the direction is momentum and decay."""
    monkeypatch.setenv("TRISTEP_ENGINE", engine)
    weight, updater = torch.tensor([3.0, -4.0], device=device), get_updater(LANS(learning_rate=0.5))
    updater(0, torch.zeros_like(weight), weight)
    assert weight.tolist() == [3.0, -4.0]
    updater(0, torch.tensor([1.0, 2.0], device=device), weight)
    assert weight.isfinite().all()
    assert (weight < torch.tensor([3.0, -4.0], device=device)).all()
    weight, updater = torch.tensor([3.0, -4.0], device=device), get_updater(LANS(learning_rate=0.5, wd=0.1))
    updater(0, torch.zeros_like(weight), weight)  # the decay alone, as long as the weight by LANS's own ratio
    assert weight.tolist() == pytest.approx([1.5, -2.0], rel=1e-6)


def test_dcasgd_has_momentum(engine, device, monkeypatch):
    """delta = g + wd w + lamda g^2 (w - previous), in the momentum of SGD."""
    monkeypatch.setenv("TRISTEP_ENGINE", engine)
    start = np.linspace(-1, 1, 8)
    weight = torch.tensor(start, dtype=torch.float32, device=device)
    updater = get_updater(DCASGD(learning_rate=0.1, momentum=0.9, lamda=0.5, wd=0.2))
    w, previous, m = start, start, 0.0
    for g in np.sin(np.arange(32.0)).reshape(4, 8):
        updater(0, torch.tensor(g, dtype=torch.float32, device=device), weight)
        m = 0.9 * m - 0.1 * (g + 0.2 * w + 0.5 * g**2 * (w - previous))
        w, previous = w + m, w
    np.testing.assert_allclose(weight.cpu().numpy(), w, rtol=1e-5, atol=1e-6)


def _sgld_steps(seed=0, order=(0, 1), engine=None, steps=2):
    """Where two weights are after some steps, whose gradients are zero."""
    updater = get_updater(SGLD(learning_rate=0.25, seed=seed))
    updater.engine = engine
    weights = [torch.zeros(4), torch.zeros(3, 2)]
    for _ in range(steps):
        for i in order:
            updater(i, torch.zeros_like(weights[i]), weights[i])
    return torch.cat([weight.flatten() for weight in weights])


def test_the_noise_of_sgld_comes_from_its_seed_parameter_and_count_alone():
    torch.manual_seed(1)
    once = _sgld_steps()
    torch.manual_seed(2)
    assert torch.equal(_sgld_steps(order=(1, 0)), once)
    for engine in ("cpu", "eager", "triton"):
        torch.testing.assert_close(_sgld_steps(engine=engine), once, rtol=1e-5, atol=1e-6)
    others = [_sgld_steps(seed=1), _sgld_steps(steps=3)]
    assert all(not torch.isclose(other, once).any() for other in others)
    assert len(once.unique()) == len(once)


def test_lars_measures_the_master_copy():
    """Of 1 + 2**-12, float16 keeps only the 1. The trust ratio makes steps of |w|, whatever the gradient."""
    updater = get_updater(LARS(learning_rate=1.0, eta=1.0, multi_precision=True))
    weight = torch.ones(1).half()
    updater(0, torch.full((1,), 0.5).half(), weight)
    assert updater.masters[0].item() == 0.0
    weight.fill_(1.0)
    updater.masters[0].fill_(1 + 2.0**-12)
    updater(0, torch.full((1,), 0.5).half(), weight)
    assert updater.masters[0].item() == 0.0  # a step of 1 would leave 2**-12


def test_lars_corrects_the_momentum_of_all_parameters_of_a_step():
    """MXNet does it for the first four."""
    weights = [torch.ones(2) for _ in range(9)]
    made = LARS(learning_rate=1.0, eta=1.0, momentum=0.5)
    updater = get_updater(made)
    for rate in (1.0, 0.5):
        made.set_learning_rate(rate)
        updater(list(range(9)), [torch.ones(2)] * 9, weights)
    # After the first step, of |w| / |g| = 1, weights are 0 and so scale no more.
    assert [weight.tolist() for weight in weights] == [[-(0.5 * 0.5 * 1 + 0.5)] * 2] * 9


def test_lbsgd_keeps_its_sum_of_gradients_with_the_state():
    trainer = Trainer([("w", Parameter(torch.zeros(2)))], "lbsgd", {"learning_rate": 1.0, "batch_scale": 2})
    trainer._params[0].grad = torch.ones(2)
    trainer.step(4)
    assert trainer.state_dict()["state"]["w"]["total"].tolist() == [0.25] * 2
    trainer._params[0].grad = torch.ones(2)
    trainer.step(1)  # of the mean, 0.625, at a rate that the warm-up has raised a little
    assert trainer._params[0].tolist() == [pytest.approx(-(1 + 2 / 160) * 0.625)] * 2


def test_the_optimizer_for_tests_counts():
    trainer = Trainer([Parameter(torch.ones(2))], AddingTest())
    trainer._params[0].grad = torch.ones(2)
    trainer.step(2)
    assert trainer.optimizer.num_update == 1
    assert trainer._params[0].tolist() == [1.5] * 2


def test_a_rate_given_to_ftrl_with_a_schedule_holds():
    schedule = lr_scheduler.FactorScheduler(10, base_lr=0.5)
    with pytest.warns(UserWarning, match="learning_rate=0.2 replaces base_lr=0.5"):
        assert Ftrl(learning_rate=0.2, lr_scheduler=schedule).learning_rate == 0.2


@pytest.mark.sample(8)
@pytest.mark.sample(2, "cpu")
@pytest.mark.sample(0, "triton")
@pytest.mark.parametrize("name", sorted(registered()))
def test_no_update_changes_the_gradient(name, engine, device, monkeypatch):
    monkeypatch.setenv("TRISTEP_ENGINE", engine)
    updater = get_updater(optimizer.create(name, rescale_grad=0.5, clip_gradient=0.25))
    weight, gradient = (torch.randn(4, 3, device=device) for _ in range(2))
    before = gradient.clone()
    for _ in range(2):
        updater(0, gradient, weight)
    assert torch.equal(gradient, before)


@pytest.mark.parametrize("make", [Ftrl, FTML])
def test_a_rate_of_zero_is_refused_where_it_divides(make, everything):
    params = {"a": Parameter(torch.ones(3)), "b": Parameter(torch.ones(3))}
    trainer = Trainer(params, make())
    for _ in range(2):
        for param in params.values():
            param.grad = torch.ones(3)
        if "lr_mult" in vars(params["b"]):
            break
        trainer.step(1)
        params["b"].lr_mult = 0.0
    before = everything(trainer, params.values())
    with pytest.raises(ValueError, match=f"a learning rate of 0, by schedule or lr_mult: {make.__name__} divides by it"):
        trainer.step(1)
    assert everything(trainer, params.values()) == before
