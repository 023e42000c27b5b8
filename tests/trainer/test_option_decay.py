"""Weight decay that follows the schedule: `decay_schedule` against pytorch_optimizer's AdamC and formulas, and where the
peak of the learning rate is known.
"""

import copy

import numpy as np
import pytest
import torch
from option_training import parameters, train, trained

from tristep import Trainer, lr_scheduler, optimizer

SCHEDULES = {
    "cosine": lr_scheduler.CosineScheduler(12, base_lr=0.05, final_lr=0.001, warmup_steps=4, warmup_begin_lr=0.01),
    "one cycle": lr_scheduler.OneCycleScheduler(12, base_lr=0.05),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_squared_rate_like_the_reference(name, engine, device):
    """With a warm-up the first steps have the right peak already."""
    reference = pytest.importorskip("pytorch_optimizer", reason="the reference library is not installed")
    schedule = copy.deepcopy(SCHEDULES[name])
    options = {"wd": 2.0, "decoupled_wd": True, "decay_schedule": "squared", "epsilon": 1e-300}
    params, trainer = trained(device, "adam", {"learning_rate": None, "lr_scheduler": schedule, **options}, engine)
    expected = parameters(device)
    groups = [{"params": expected, "normalized": True}]
    peer = reference.AdamC(groups, lr=0.05, weight_decay=2.0, eps=1e-300)
    count = iter(range(1, 100))

    def step():
        peer.param_groups[0]["lr"] = schedule(next(count))
        peer.step()

    train(expected, step)
    torch.testing.assert_close(params, expected, rtol=1e-9, atol=1e-11)
    assert trainer.optimizer.settings()["decay_schedule"] == "squared"


@pytest.mark.parametrize("decay", [None, "relative", "squared"])
@pytest.mark.parametrize("peak", [0.05, 0.2])
def test_decay_by_the_formulas(decay, peak, engine, device):
    """Of gradients that are zero. Relative decay does not depend on the peak."""
    params = parameters(device)
    params[1].lr_mult, params[2].wd_mult = 0.5, 3.0
    schedule = lr_scheduler.PolyScheduler(8, base_lr=peak, pwr=1, warmup_steps=2)
    trainer = Trainer(params, "lion", {"wd": 0.1, "lr_scheduler": schedule, "decay_schedule": decay}, engine=engine)
    rates, start = [schedule(t) for t in range(1, 7)], [param.detach().clone() for param in params]
    for _ in rates:
        for param in params:
            param.grad = torch.zeros_like(param)
        trainer.step(1)
    decays = {None: rates, "relative": [lr / peak for lr in rates], "squared": [lr * lr / peak for lr in rates]}[decay]
    for param, before, mult in zip(params, start, (1.0, 0.5, 3.0, 1.0), strict=True):
        factor = np.prod([1 - mult * 0.1 * each for each in decays])
        torch.testing.assert_close(param.detach(), before * factor, rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", ["stableadamw", "adamw", "muon"])
def test_rules_that_decay_in_other_ways(name, device):
    """As if the weight decay had been set before each step; also of whole matrices."""
    schedule = lr_scheduler.CosineScheduler(12, base_lr=0.05)
    options = {"wd": 0.3, "decay_schedule": "squared", "lr_scheduler": schedule, "learning_rate": None}
    params, _ = trained(device, name, options, "eager")
    expected = parameters(device)
    trainer = Trainer(expected, name, {"lr_scheduler": copy.deepcopy(schedule)}, engine="eager")
    count = iter(range(1, 100))

    def step():
        trainer.optimizer.wd = 0.3 * schedule(next(count)) / 0.05
        trainer.step(1)

    train(expected, step)
    torch.testing.assert_close(params, expected, rtol=1e-12, atol=1e-14)


def test_a_rate_that_is_set_by_hand_needs_the_peak(device):
    params = parameters(device)
    trainer = Trainer(params, "lion", {"learning_rate": 0.1, "wd": 0.1, "decay_schedule": "relative"})
    before = [param.detach().clone() for param in params]
    for param in params:
        param.grad = torch.zeros_like(param)
    with pytest.raises(ValueError, match=r"decay_schedule='relative' with lr_scheduler=None: the peak .* give peak_lr"):
        trainer.step(1)
    assert trainer.optimizer.num_update == 0
    trainer.optimizer.peak_lr = 0.05
    with pytest.raises(ValueError, match=r"the learning rate is 0.1, above its peak 0.05: give a larger peak_lr"):
        trainer.step(1)
    assert all(map(torch.equal, params, before))
    trainer.optimizer.peak_lr = 0.2
    trainer.step(1)
    torch.testing.assert_close(params[0].detach(), before[0] * (1 - 0.1 * 0.5), rtol=1e-12, atol=0)


class Rising(lr_scheduler.CosineScheduler):
    def __call__(self, num_update):
        return 2.0 * super().__call__(num_update)


PEAKS = [
    lr_scheduler.FactorScheduler(3, factor=0.5, base_lr=0.5),
    lr_scheduler.FactorScheduler(3, factor=0.1, stop_factor_lr=0.7, base_lr=0.5),
    lr_scheduler.MultiFactorScheduler([3, 9], factor=0.5, base_lr=0.5, warmup_steps=2),
    lr_scheduler.PolyScheduler(30, base_lr=0.5, final_lr=0.1),
    lr_scheduler.CosineScheduler(30, base_lr=0.5, final_lr=0.8),
    lr_scheduler.CosineRestartsScheduler(10, base_lr=0.5),
    lr_scheduler.CyclicScheduler(5, max_lr=0.9, base_lr=0.5),
    lr_scheduler.ExponentialScheduler(0.5, base_lr=0.5),
    lr_scheduler.PiecewiseScheduler([3, 9], [0.7, 0.2], base_lr=0.5),
    lr_scheduler.InterpolatedScheduler([10, 30], [0.7, 0.2], base_lr=0.5),
    lr_scheduler.OneCycleScheduler(40, base_lr=0.5),
    lr_scheduler.WarmupStableDecayScheduler(30, 10, base_lr=0.5, warmup_steps=5),
    lr_scheduler.InverseSquareRootScheduler(base_lr=0.5, warmup_steps=5),
    lr_scheduler.sequence((lr_scheduler.PolyScheduler(9, base_lr=0.3), 9), lr_scheduler.PolyScheduler(9, base_lr=0.5)),
]


@pytest.mark.parametrize("schedule", PEAKS, ids=lambda schedule: type(schedule).__name__)
def test_the_peak_of_a_schedule_is_its_highest_rate(schedule):
    """Asked before any rate, and after all of them, which changes what some call `base_lr`."""
    peak = schedule.peak_lr
    assert peak == max(schedule(n) for n in range(60))
    assert schedule.peak_lr == peak


@pytest.mark.parametrize(
    "schedule",
    [
        Rising(10),
        lr_scheduler.FunctionScheduler(lambda n: 1.0),
        lr_scheduler.from_torch("StepLR", step_size=2),
        lr_scheduler.sequence((lr_scheduler.PolyScheduler(9), 9), lambda n: 1.0),
        lambda n: 0.1,
    ],
    ids=["a class of your own", "function", "torch's", "sequence", "lambda"],
)
def test_schedules_whose_peak_is_not_known_need_it(schedule):
    arguments = {"lr_scheduler": schedule, "decay_schedule": "squared"}
    with pytest.raises(ValueError, match="decay_schedule='squared' with lr_scheduler=.*: the peak .* is not known"):
        optimizer.create("adamw", **arguments)
    made = optimizer.create("adamw", **arguments, peak_lr=2.0, correct_bias=False)
    row = dict(zip(("rescale_grad", *made.rule.hyper), made.row(1, 1.0, 0.5), strict=True))
    assert row["decay"] == 1.0 * 0.5 * 1.0 / 2.0
