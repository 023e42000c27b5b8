"""Learning-rate schedules and torch's: equal numbers, torch's schedules for our optimizers, and ours for torch's."""

import math
import pickle

import numpy as np
import pytest
import torch
from torch.optim import lr_scheduler as torchs

from tristep import Trainer
from tristep.trainer.lr_scheduler import (
    CosineRestartsScheduler,
    CosineScheduler,
    CyclicScheduler,
    ExponentialScheduler,
    FactorScheduler,
    FunctionScheduler,
    OneCycleScheduler,
    PiecewiseScheduler,
    PolyScheduler,
    TorchScheduler,
    from_torch,
    sequence,
    to_torch,
)

M = 80  # torch counts to the last update of a cycle, we to the one after the first


def _rates_of_torch(make, lr, count):
    """The learning rates of a torch run of so many updates, each followed by a step of the schedule."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(()))], lr=lr, momentum=0.9)
    schedule, rates = make(optimizer), []
    for _ in range(count):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return np.array(rates)


def _one_cycle(strategy, three):
    def make(o):
        options = {"pct_start": 0.25, "div_factor": 20, "final_div_factor": 1e3}
        return torchs.OneCycleLR(o, 0.7, M + 1, anneal_strategy=strategy, three_phase=three, **options)

    return OneCycleScheduler(M, 0.7, (0.25 * (M + 1) - 1) / M, 20, 1e3, strategy, three), make, M + 1


def _cyclic(**options):
    ours = CyclicScheduler(5, 7.0, 0.7, **options)
    return ours, lambda o: torchs.CyclicLR(o, 0.7, 7.0, 5, **options), 100


def _sequential(o):
    parts = [torchs.ExponentialLR(o, 0.9), torchs.CosineAnnealingLR(o, 30), torchs.PolynomialLR(o, 20, 2)]
    return torchs.SequentialLR(o, parts, [20, 45])


@pytest.mark.parametrize(
    ("ours", "make", "count"),
    [
        *(_one_cycle(strategy, three) for strategy in ("cos", "linear") for three in (False, True)),
        (CosineRestartsScheduler(11, 1, 0.7, 0.1), lambda o: torchs.CosineAnnealingWarmRestarts(o, 11, eta_min=0.1), 100),
        (CosineRestartsScheduler(5, 2, 0.7), lambda o: torchs.CosineAnnealingWarmRestarts(o, 5, 2), 200),
        (CosineScheduler(60, 0.7, 0.1), lambda o: torchs.CosineAnnealingLR(o, 60, 0.1), 61),
        (PolyScheduler(60, 0.7, 1.5), lambda o: torchs.PolynomialLR(o, 60, 1.5), 100),
        (CyclicScheduler(4, 7.0, 0.7, 9), lambda o: torchs.CyclicLR(o, 0.7, 7.0, 4, 9), 100),
        _cyclic(mode="triangular2"),
        _cyclic(mode="exp_range", gamma=0.97),
        (ExponentialScheduler(0.9, base_lr=0.7), lambda o: torchs.ExponentialLR(o, 0.9), 60),
        (FunctionScheduler(math.exp, 0.7), lambda o: torchs.LambdaLR(o, math.exp), 20),
        (
            FactorScheduler(100, base_lr=0.7, warmup_steps=20, warmup_begin_lr=0.07),
            lambda o: torchs.LinearLR(o, 0.1, total_iters=20),
            60,
        ),
        (
            sequence((ExponentialScheduler(0.9, base_lr=0.7), 20), (CosineScheduler(30, 0.7), 25), PolyScheduler(20, 0.7)),
            _sequential,
            80,
        ),
        # MXNet's drops come one update later than torch's.
        (PiecewiseScheduler([9, 29], [0.07, 0.007], 0.7), lambda o: torchs.MultiStepLR(o, [10, 30], 0.1), 60),
    ],
)
def test_equals_torch(ours, make, count):
    np.testing.assert_allclose(ours(np.arange(count)), _rates_of_torch(make, 0.7, count), rtol=1e-9, atol=1e-12)


# ---- torch's schedules -----------------------------------------------------------------------------------------------


def _cyclic_of_torch(optimizer):  # whose own base_lr would be taken for ours
    return torchs.CyclicLR(optimizer, 0.1, 0.9, step_size_up=6)


def _chained(optimizer):
    return torchs.ChainedScheduler([torchs.LinearLR(optimizer, 0.1, total_iters=10), torchs.ExponentialLR(optimizer, 0.9)])


@pytest.mark.parametrize(
    ("factory", "kwargs"),
    [
        (torchs.OneCycleLR, {"max_lr": 0.9, "total_steps": 40}),
        (torchs.CosineAnnealingWarmRestarts, {"T_0": 7, "T_mult": 2}),
        (torchs.MultiStepLR, {"milestones": (5, 20), "gamma": 0.3}),
        (_cyclic_of_torch, {}),
        (_chained, {}),
    ],
    ids=["one cycle", "warm restarts", "steps", "cyclic", "chained"],
)
def test_schedule_of_torch_has_the_same_learning_rates(factory, kwargs):
    ours = from_torch(factory, base_lr=0.7, **kwargs)
    expected = _rates_of_torch(lambda optimizer: factory(optimizer, **kwargs), 0.7, 40)
    assert ours(np.arange(1, 41)).tolist() == expected.tolist()
    assert ours(17) == expected[16]  # after later ones
    assert ours(0) == expected[0]


def _slower(optimizer):
    return torchs.LambdaLR(optimizer, lambda n: 1 / (1 + n))  # which cannot be pickled


def test_schedule_of_torch_is_pickled_without_its_recording():
    schedule = from_torch(_slower, base_lr=0.6)
    assert schedule(3) == pytest.approx(0.2)
    assert pickle.loads(pickle.dumps(schedule))(3) == schedule(3)


def test_new_base_lr_restarts_a_schedule_of_torch():
    schedule = from_torch("ExponentialLR", gamma=0.5, base_lr=0.8)
    assert schedule(3) == 0.2
    schedule.base_lr = 8.0
    assert [schedule(n) for n in (3, 1)] == [2.0, 8.0]


def test_schedule_of_torch_that_ends():
    schedule = from_torch("OneCycleLR", max_lr=1.0, total_steps=10)
    assert schedule(10) == pytest.approx(1.0 / 25 / 1e4)
    with pytest.raises(ValueError, match=r"num_update=15: the schedule of torch ends after update 11 \(Tried to step"):
        schedule(15)
    assert schedule(1) == pytest.approx(0.04)


# ---- training --------------------------------------------------------------------------------------------------------


def _train(make_step):
    """The weights of a small regression after 25 updates."""
    torch.manual_seed(3)
    net = torch.nn.Linear(4, 3).double()
    x, y = torch.randn(8, 4).double(), torch.randn(8, 3).double()
    step = make_step(net)
    for _ in range(25):
        net.zero_grad()
        ((net(x) - y) ** 2).sum().backward()
        step()
    return torch.cat([p.detach().flatten() for p in net.parameters()])


def _with_ours(schedule):
    def make_step(net):
        trainer = Trainer(net, "sgd", {"lr_scheduler": schedule})
        return lambda: trainer.step(1)

    return make_step


def _with_torch(lr, make):
    def make_step(net):
        optimizer = torch.optim.SGD(net.parameters(), lr=lr)
        schedule = make(optimizer)
        return lambda: (optimizer.step(), schedule.step())

    return make_step


COSINE = CosineScheduler(25, base_lr=0.02, warmup_steps=5)


@pytest.mark.parametrize(
    ("ours", "lr", "make"),
    [
        (
            from_torch("OneCycleLR", max_lr=0.02, total_steps=25),
            0.02,
            lambda optimizer: torchs.OneCycleLR(optimizer, 0.02, 25, cycle_momentum=False),
        ),
        (COSINE, 9.0, lambda optimizer: to_torch(COSINE, optimizer)),
    ],
    ids=["from_torch", "to_torch"],
)
def test_training_with_tristep_equals_training_with_torch(ours, lr, make):
    torch.testing.assert_close(_train(_with_ours(ours)), _train(_with_torch(lr, make)), rtol=1e-12, atol=1e-14)


def _two_groups(**options):
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))]}, {"params": [torch.nn.Parameter(torch.zeros(1))], **options}]
    return torch.optim.SGD(groups, lr=9.0)


def test_to_torch_sets_each_group_and_resumes():
    optimizer = _two_groups(lr_mult=0.5)
    schedule = to_torch(lambda n: 1 / n, optimizer)
    assert isinstance(schedule, torchs.LRScheduler)
    for n in (1, 2, 3):
        assert schedule.get_last_lr() == [1 / n, 0.5 / n]
        assert [group["lr"] for group in optimizer.param_groups] == [1 / n, 0.5 / n]
        optimizer.step()
        schedule.step()
    state = schedule.state_dict()
    assert "schedule" not in state
    other = _two_groups()
    resumed = to_torch(lambda n: 1 / n, other)
    resumed.load_state_dict(state)
    other.step()
    resumed.step()
    assert resumed.get_last_lr() == [1 / 5, 1 / 5]
    assert to_torch(lambda n: 1 / n, _two_groups(), last_epoch=3).get_last_lr() == [1 / 5, 1 / 5]


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: from_torch("StpLR"), ValueError, "factory='StpLR': neither .*Did you mean 'StepLR'"),
        (lambda: from_torch(3), TypeError, "factory=3: must be a class of torch.optim.lr_scheduler, or a function"),
        (lambda: from_torch("StepLR"), TypeError, "step_size"),
        (lambda: from_torch(lambda o: 3), TypeError, "returned 3, which is not a torch"),
        (lambda: from_torch("ReduceLROnPlateau"), TypeError, "ReduceLROnPlateau needs losses.*set_learning_rate"),
        (lambda: TorchScheduler("StepLR", 3), TypeError, "kwargs=3: must be a dict"),
        (
            lambda: from_torch(torchs.StepLR(_two_groups(), 3)),
            TypeError,
            r"is bound to its optimizer already; give its class and its arguments, from_torch\(StepLR, ...\)",
        ),
        (
            lambda: from_torch("LambdaLR", lr_lambda=math.exp).to_config(),
            TypeError,
            r"kwargs of TorchScheduler\['lr_lambda'\] is a function, which cannot be saved",
        ),
        (lambda: to_torch(0.1, _two_groups()), TypeError, "scheduler=0.1: must be a schedule"),
        (lambda: to_torch(abs, [torch.zeros(1)]), TypeError, "optimizer must be a torch.optim.Optimizer, got list"),
        (lambda: to_torch(abs, _two_groups(), -2), ValueError, "last_epoch=-2: must be -1 or more"),
    ],
)
def test_bad_arguments_are_named(make, error, message):
    with pytest.raises(error, match=message):
        make()
