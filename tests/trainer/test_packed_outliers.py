"""One huge gradient, or one that is not finite, with low-precision states: no other weight of its block notices.

The judges are float32 states and torch's optimizers.
"""

import math

import pytest
import torch
from stored_training import packs

import tristep
from tristep import Trainer
from tristep.kernels import storage

WHERE = 20, 77  # the outlier
# By row, which is a block: several outliers that are finite, or one that is not.
OUTLIERS = (
    {0: 1e15, 5: 1e19, 10: 1e22, 15: 1e30, WHERE[0]: 3e38, 25: -3e38},
    {WHERE[0]: math.inf},
    {WHERE[0]: -math.inf},
    {WHERE[0]: math.nan},
)
KINDS = ("8bit", "4bit", "bfloat16")


pytestmark = pytest.mark.usefixtures("quiet_numpy")


def gradients(outliers, steps=4):
    generator = torch.Generator().manual_seed(1)
    for k in range(steps):
        gradient = torch.randn(41, 128, generator=generator)
        if k == 1:
            for row, size in outliers.items():
                gradient[row, WHERE[1]] = size
        yield gradient


def weights():
    return torch.nn.Parameter(torch.randn(41, 128, generator=torch.Generator().manual_seed(0)))


def trained(name, state_dtype, outliers, engine, device, **options):
    """Where weights are finite after each step, and states after the last one."""
    param = torch.nn.Parameter(weights().detach().to(device))
    trainer = Trainer([param], name, {"learning_rate": 0.01, "state_dtype": state_dtype, **options}, engine=engine)
    found = {}
    for k, gradient in enumerate(gradients(outliers)):
        param.grad = gradient.to(device)
        trainer.step(1)
        found[f"weight after step {k}"] = param.detach().isfinite()
    nonnegative = trainer.optimizer.composed_rule.nonnegative
    for slot, state in trainer.state_dict()["state"]["0"].items():
        if storage.is_packed(state):
            state = storage.unpacked(state, param.shape, slot in nonnegative)
        found[slot] = state.isfinite()
    return found


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", list(packs()))
def test_what_is_finite_is_so_as_with_float32_states(name, device):
    """With weight decay, which brings a weight that is not finite into the next gradient."""
    options = {} if name == "rprop" else {"wd": 0.01}
    for outliers in OUTLIERS:
        expected = trained(name, None, outliers, "eager", device, **options)
        for kind in KINDS:
            found = trained(name, kind, outliers, "eager", device, **options)
            for what, finite in expected.items():
                assert torch.equal(found[what], finite), (kind, outliers, what)


@pytest.mark.sample(2)
@pytest.mark.sample(0, "cpu", "triton")
@pytest.mark.parametrize("size", [1e15, 1e21, 1e30, -3e38])
@pytest.mark.parametrize(
    ("name", "arguments"),
    [("SGD", {"momentum": 0.9}), ("Adam", {}), ("AdamW", {"weight_decay": 0.1})],
    ids=["SGD", "Adam", "AdamW"],
)
def test_the_outliers_weight_moves_as_torchs(name, arguments, size, engine, device, monkeypatch):
    """Its average of squares is infinite, as torch's; with the largest finite number Adam's steps would be huge."""
    monkeypatch.setenv("TRISTEP_ENGINE", engine)
    start, moved = weights().detach(), []
    for make, extra in ((getattr(torch.optim, name), {}), (getattr(tristep.optim, name), {"state_dtype": "8bit"})):
        param = torch.nn.Parameter(start.to(device, copy=True))
        optimizer = make([param], lr=1e-3, **arguments, **extra)
        for gradient in gradients({WHERE[0]: size}):
            param.grad = gradient.to(device)
            optimizer.step()
        moved.append(param.detach().cpu() - start)
    theirs, ours = moved
    torch.testing.assert_close(ours[WHERE], theirs[WHERE], rtol=0.2, atol=1e-3)
    others = torch.ones_like(start, dtype=torch.bool)
    others[WHERE] = False
    bound = float(theirs[others].abs().max())
    assert float(ours[others].abs().max()) < 2 * bound


@pytest.mark.sample(0, "cpu", "triton")
@pytest.mark.parametrize("kind", KINDS)
def test_skip_nonfinite_leaves_out_a_step_whose_norm_overflows(kind, engine, device):
    """Though each gradient is finite; below 1.8e19 the step is made, and all stays finite."""
    param = torch.nn.Parameter(weights().detach().to(device))
    options = {"learning_rate": 0.01, "state_dtype": kind, "skip_nonfinite": True}
    trainer = Trainer([param], "adamw", options, engine=engine)
    param.grad = next(gradients({})).to(device)
    trainer.step(1)
    for size, skips in ((1e30, True), (3e38, True), (math.inf, True), (math.nan, True), (1e18, False)):
        before = param.detach().clone()
        param.grad = torch.ones_like(param)
        param.grad[WHERE] = size
        trainer.step(1)
        assert torch.equal(param, before) == skips
    for what, finite in trained("adamw", kind, {3: 1e18}, engine, device, skip_nonfinite=True).items():
        assert bool(finite.all()), what
