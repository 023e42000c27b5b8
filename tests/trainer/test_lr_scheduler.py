"""Learning-rate schedules: MXNet's and torch's numbers, purity, printing and saving, and what is refused."""

import copy
import doctest
import json
import math
import pickle

import numpy as np
import pytest
import torch
from torch.optim import lr_scheduler as torchs

from tristep import Trainer
from tristep.trainer import lr_scheduler
from tristep.trainer.lr_scheduler import (
    CosineRestartsScheduler,
    CosineScheduler,
    CyclicScheduler,
    ExponentialScheduler,
    FactorScheduler,
    FunctionScheduler,
    InterpolatedScheduler,
    InverseSquareRootScheduler,
    LRScheduler,
    MultiFactorScheduler,
    OneCycleScheduler,
    PiecewiseScheduler,
    PolyScheduler,
    SequenceScheduler,
    TorchScheduler,
    WarmupStableDecayScheduler,
    create,
    from_config,
    from_torch,
    register,
    sequence,
    to_torch,
)

# MXNet multiplies drop by drop, we take a power: some roundings apart, far below float32.
CLOSE = {"rtol": 1e-13, "atol": 1e-15}

SCHEDULES = [
    FactorScheduler(step=7, factor=0.3, stop_factor_lr=1e-3, base_lr=0.7),
    FactorScheduler(30, 0.5, base_lr=1, warmup_steps=10, warmup_begin_lr=0.2, warmup_mode="constant"),
    MultiFactorScheduler(step=(10, 30), factor=0.1, base_lr=0.3, warmup_steps=12),
    PolyScheduler(max_update=40, pwr=0.5, final_lr=0.001, warmup_steps=5),
    CosineScheduler(max_update=40, base_lr=3.0, final_lr=0.01, warmup_steps=25, warmup_begin_lr=0.5),
    OneCycleScheduler(max_update=50, base_lr=0.7, pct_start=0.25, div_factor=10),
    OneCycleScheduler(max_update=50, base_lr=0.7, anneal_strategy="linear", three_phase=True),
    CosineRestartsScheduler(period=11, base_lr=0.7, final_lr=0.1, warmup_steps=3),
    CosineRestartsScheduler(period=6, period_mult=1.5, base_lr=0.7),
    WarmupStableDecayScheduler(50, 20, base_lr=0.7, warmup_steps=10),
    WarmupStableDecayScheduler(50, 20, base_lr=0.7, final_lr=0.1, decay="sqrt"),
    WarmupStableDecayScheduler(50, 50, base_lr=0.7, decay="cosine"),
    InverseSquareRootScheduler(base_lr=0.7, warmup_steps=10),
    InverseSquareRootScheduler(base_lr=0.7, timescale=0.5, warmup_steps=4, warmup_begin_lr=0.2),
    CyclicScheduler(step_up=4, step_down=9, max_lr=7.0, base_lr=0.7),
    CyclicScheduler(step_up=5, max_lr=7.0, base_lr=0.7, mode="triangular2", warmup_steps=6),
    CyclicScheduler(step_up=5, max_lr=7.0, base_lr=0.7, mode="exp_range", gamma=0.9),
    ExponentialScheduler(factor=0.9, base_lr=0.7, warmup_steps=5),
    ExponentialScheduler(factor=0.3, step=20.5, base_lr=0.7),
    PiecewiseScheduler(step=(10, 30), rates=(0.2, 0.4), base_lr=0.7, warmup_steps=2),
    InterpolatedScheduler(step=(10, 30), rates=(0.2, 0.4), base_lr=0.7, warmup_steps=2),
    InterpolatedScheduler(step=[3, 40.5], rates=[0.2, 1e-4], scale="log", base_lr=0.7),
]
WITHOUT_BASE_LR = [
    SequenceScheduler([CosineScheduler(10, base_lr=2.0, warmup_steps=4), PolyScheduler(20, base_lr=1)], starts=[15]),
    sequence(
        (CyclicScheduler(2, 3.0), 7),
        (from_torch("StepLR", step_size=3, base_lr=0.5), 20),
        (sequence((PolyScheduler(4), 2), PolyScheduler(9)), 9),
        FactorScheduler(9, 0.5),
    ),
]
FROM_TORCH = [
    from_torch("StepLR", step_size=7, gamma=0.5, base_lr=0.7),
    from_torch(torchs.CosineAnnealingWarmRestarts, T_0=9, T_mult=2, base_lr=0.7),
    from_torch("MultiStepLR", milestones=(5, 30), gamma=0.5, base_lr=0.7),
]
EVERY = SCHEDULES + WITHOUT_BASE_LR + FROM_TORCH


def _asked_one_by_one(schedule, updates):
    return np.array([schedule(int(n)) for n in updates])


@pytest.mark.golden("lr_schedulers")
def test_equals_mxnet_asked_in_order(golden):
    config, arrays = golden
    schedule = create(config["class"], **config["kwargs"])
    np.testing.assert_allclose(_asked_one_by_one(schedule, range(201)), arrays["seq"], **CLOSE)


@pytest.mark.golden("lr_schedulers")
def test_equals_mxnet_asked_fresh_up_to_max_update(golden):
    """Beyond max_update a fresh MXNet object answers base_lr instead of the final value."""
    config, arrays = golden
    updates = np.arange(min(201, config["kwargs"].get("max_update", 200) + 1))
    fresh = [create(config["class"], **config["kwargs"])(int(n)) for n in updates]
    np.testing.assert_allclose(fresh, arrays["fresh"][updates], **CLOSE)


@pytest.mark.golden("lr_schedulers")
def test_answers_do_not_depend_on_what_was_asked_before(golden):
    config, arrays = golden
    schedule = create(config["class"], **config["kwargs"])
    updates = np.random.default_rng(1).permutation(201)
    np.testing.assert_allclose(_asked_one_by_one(schedule, updates), arrays["seq"][updates], **CLOSE)


@pytest.mark.parametrize("schedule", EVERY, ids=repr)
def test_an_array_of_updates_gives_an_array_of_rates(schedule):
    updates = np.arange(60, dtype=np.uint8).reshape(6, 10)
    rates = schedule(updates)
    assert rates.dtype == np.float64
    assert rates.shape == updates.shape
    np.testing.assert_allclose(rates.ravel(), _asked_one_by_one(schedule, range(60)), rtol=1e-14)
    assert schedule(updates[:0]).shape == (0, 10)


def test_an_int_gives_a_float():
    assert all(type(schedule(n)) is float for schedule in EVERY for n in (0, 20, np.int64(50)))


@pytest.mark.parametrize("schedule", EVERY, ids=repr)
def test_fresh_and_sequential_answers_agree(schedule):
    updates = np.random.default_rng(1).permutation(60)
    fresh = [copy.deepcopy(schedule)(int(n)) for n in updates]
    np.testing.assert_array_equal(fresh, _asked_one_by_one(schedule, range(60))[updates])
    np.testing.assert_array_equal(fresh, _asked_one_by_one(pickle.loads(pickle.dumps(schedule)), updates))


def _rates_of_torch(make, lr, count):
    """The rates of a torch run of so many updates, each followed by a step of the schedule."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(()))], lr=lr, momentum=0.9)
    schedule, rates = make(optimizer), []
    for _ in range(count):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return np.array(rates)


M = 80  # torch counts to the last update of a cycle, we to the one after the first


@pytest.mark.parametrize(
    ("ours", "torch_makes", "count"),
    [
        (
            OneCycleScheduler(M, 0.7, (0.25 * (M + 1) - 1) / M, 20, 1e3, strategy, three),
            lambda o, strategy=strategy, three=three: torchs.OneCycleLR(
                o,
                0.7,
                M + 1,
                pct_start=0.25,
                div_factor=20,
                final_div_factor=1e3,
                anneal_strategy=strategy,
                three_phase=three,
            ),
            M + 1,
        )
        for strategy in ("cos", "linear")
        for three in (False, True)
    ]
    + [
        (
            CosineRestartsScheduler(11, 1, 0.7, 0.1),
            lambda o: torchs.CosineAnnealingWarmRestarts(o, 11, eta_min=0.1),
            100,
        ),
        (CosineRestartsScheduler(5, 2, 0.7), lambda o: torchs.CosineAnnealingWarmRestarts(o, 5, 2), 200),
        (CosineScheduler(60, 0.7, 0.1), lambda o: torchs.CosineAnnealingLR(o, 60, 0.1), 61),
        (PolyScheduler(60, 0.7, 1.5), lambda o: torchs.PolynomialLR(o, 60, 1.5), 100),
        (CyclicScheduler(4, 7.0, 0.7, 9), lambda o: torchs.CyclicLR(o, 0.7, 7.0, 4, 9), 100),
        (
            CyclicScheduler(5, 7.0, 0.7, mode="triangular2"),
            lambda o: torchs.CyclicLR(o, 0.7, 7.0, 5, mode="triangular2"),
            100,
        ),
        (
            CyclicScheduler(5, 7.0, 0.7, mode="exp_range", gamma=0.97),
            lambda o: torchs.CyclicLR(o, 0.7, 7.0, 5, mode="exp_range", gamma=0.97),
            100,
        ),
        (ExponentialScheduler(0.9, base_lr=0.7), lambda o: torchs.ExponentialLR(o, 0.9), 60),
        (FunctionScheduler(math.exp, 0.7), lambda o: torchs.LambdaLR(o, math.exp), 20),
        (
            FactorScheduler(100, base_lr=0.7, warmup_steps=20, warmup_begin_lr=0.07),
            lambda o: torchs.LinearLR(o, 0.1, total_iters=20),
            60,
        ),
        (
            sequence((ExponentialScheduler(0.9, base_lr=0.7), 20), (CosineScheduler(30, 0.7), 25), PolyScheduler(20, 0.7)),
            lambda o: torchs.SequentialLR(
                o, [torchs.ExponentialLR(o, 0.9), torchs.CosineAnnealingLR(o, 30), torchs.PolynomialLR(o, 20, 2)], [20, 45]
            ),
            80,
        ),
        (  # MXNet's drops come one update later than torch's
            PiecewiseScheduler([9, 29], [0.07, 0.007], 0.7),
            lambda o: torchs.MultiStepLR(o, [10, 30], 0.1),
            60,
        ),
    ],
)
def test_equals_torch(ours, torch_makes, count):
    expected = _rates_of_torch(torch_makes, 0.7, count)
    np.testing.assert_allclose(ours(np.arange(count)), expected, rtol=1e-9, atol=1e-12)


def test_one_cycle_of_two_phases_or_three():
    two = OneCycleScheduler(100, 1.0, 0.2, div_factor=10, final_div_factor=10)
    assert [two(n) for n in (0, 20, 100, 1000)] == [0.1, 1.0, 0.01, 0.01]
    assert two(10) == pytest.approx(0.55)
    three = OneCycleScheduler(100, 1.0, 0.5, div_factor=10, three_phase=True)
    assert three(np.array([0, 25, 50, 75, 100])) == pytest.approx([0.1, 0.55, 1.0, 0.55, 0.1])


def test_a_restart_begins_at_the_top_exactly():
    for mult, restarts in ((1, [0, 7, 14, 21]), (2, [0, 7, 21, 49]), (1.5, [0, 7])):
        schedule = CosineRestartsScheduler(7, mult, base_lr=0.3)
        assert schedule(np.array(restarts)).tolist() == [0.3] * len(restarts)
        assert (schedule(np.array(restarts[1:]) - 1) < 0.05).all()


def test_the_rate_is_stable_until_it_decays():
    updates = np.arange(101)
    for decay, shape in {
        "linear": lambda t: 1 - t,
        "sqrt": lambda t: 1 - np.sqrt(t),
        "cosine": lambda t: 0.5 + 0.5 * np.cos(np.pi * t),
    }.items():
        schedule = WarmupStableDecayScheduler(100, 40, 2.0, 0.5, decay, warmup_steps=10)
        expected = np.where(updates < 10, updates / 5, 0.5 + 1.5 * shape(np.maximum(updates - 60, 0) / 40))
        np.testing.assert_allclose(schedule(updates), expected, rtol=1e-14)
        assert schedule(10**6) == 0.5


def test_the_rate_of_the_transformer():
    """The paper's own formula, for a width of 512 and a warm-up of 4000."""
    schedule = InverseSquareRootScheduler(base_lr=(512 * 4000) ** -0.5, warmup_steps=4000)
    n = np.arange(1, 20_000, 13)
    expected = 512**-0.5 * np.minimum(n**-0.5, n * 4000**-1.5)
    np.testing.assert_allclose(schedule(n), expected, rtol=1e-13)


def test_constants_change_one_update_after_the_step():
    schedule = PiecewiseScheduler([3, 5], [0.5, 2], base_lr=1, warmup_steps=1)
    assert schedule(np.arange(8)).tolist() == [0.0, 1.0, 1.0, 1.0, 0.5, 0.5, 2.0, 2.0]


def test_lines_between_rates_are_straight_on_either_scale():
    """A drop by 10 in as many updates, after a warm-up of 5."""
    n = np.arange(5, 16)
    linear = InterpolatedScheduler([15], [0.1], base_lr=1.0, warmup_steps=5)
    np.testing.assert_allclose(linear(n), 1.0 - 0.09 * (n - 5), rtol=1e-14)
    log = InterpolatedScheduler([15], [0.1], "log", base_lr=1.0, warmup_steps=5)
    np.testing.assert_allclose(log(n), 10.0 ** (-(n - 5) / 10), rtol=1e-14)
    for schedule in (linear, log):
        assert schedule(np.arange(5)).tolist() == [0.0, 0.2, 0.4, 0.6, 0.8]
        assert schedule(100) == pytest.approx(0.1, rel=1e-15)


def test_any_callable_is_a_schedule():
    asked = []

    def rate(n):
        asked.append(n)
        return 1 / (1 + n)

    parts = sequence((rate, 2), FunctionScheduler(rate, base_lr=0.5, warmup_steps=1))
    assert parts(np.array([[0, 1], [2, 3]])).tolist() == [[1.0, 0.5], [0.0, 0.5]]
    assert all(type(n) is int for n in asked)
    assert parts(4) == 0.25


@pytest.mark.parametrize(
    ("factory", "kwargs"),
    [
        (torchs.OneCycleLR, {"max_lr": 0.9, "total_steps": 40}),
        (torchs.CosineAnnealingWarmRestarts, {"T_0": 7, "T_mult": 2}),
        (torchs.CyclicLR, {"base_lr_": 0.1, "max_lr": 0.9, "step_size_up": 6}),
        (torchs.MultiStepLR, {"milestones": (5, 20), "gamma": 0.3}),
        ("ReduceByHand", {}),
    ],
    ids=str,
)
def test_a_torch_schedule_gives_the_same_updates_the_same_rates(factory, kwargs):
    if factory is torchs.CyclicLR:  # whose own base_lr would be taken for ours

        def make(optimizer):
            return torchs.CyclicLR(optimizer, 0.1, 0.9, step_size_up=6)

        ours = from_torch(make, base_lr=0.7)
    elif factory == "ReduceByHand":

        def make(optimizer):
            parts = [torchs.LinearLR(optimizer, 0.1, total_iters=10), torchs.ExponentialLR(optimizer, 0.9)]
            return torchs.ChainedScheduler(parts)

        ours = from_torch(make, base_lr=0.7)
    else:

        def make(optimizer):
            return factory(optimizer, **kwargs)

        ours = from_torch(factory, base_lr=0.7, **kwargs)
    expected = _rates_of_torch(make, 0.7, 40)
    assert ours(np.arange(1, 41)).tolist() == expected.tolist()
    assert ours(17) == expected[16]  # after later ones
    assert ours(0) == expected[0]


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


def test_training_by_a_torch_schedule_is_the_same_in_both_worlds():
    def with_torch(net):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.02)
        schedule = torchs.OneCycleLR(optimizer, 0.02, 25, cycle_momentum=False)
        return lambda: (optimizer.step(), schedule.step())

    def with_ours(net):
        schedule = from_torch("OneCycleLR", max_lr=0.02, total_steps=25)
        trainer = Trainer(net, "sgd", {"lr_scheduler": schedule})
        return lambda: trainer.step(1)

    torch.testing.assert_close(_train(with_ours), _train(with_torch), rtol=1e-12, atol=1e-14)


def test_training_by_one_of_our_schedules_is_the_same_in_both_worlds():
    schedule = CosineScheduler(25, base_lr=0.02, warmup_steps=5)

    def with_ours(net):
        trainer = Trainer(net, "sgd", {"lr_scheduler": schedule, "momentum": 0.0})
        return lambda: trainer.step(1)

    def with_torch(net):
        optimizer = torch.optim.SGD(net.parameters(), lr=9.0)
        driven = to_torch(schedule, optimizer)
        return lambda: (optimizer.step(), driven.step())

    torch.testing.assert_close(_train(with_ours), _train(with_torch), rtol=1e-12, atol=1e-14)


def _optimizer(**other):
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))]}, {"params": [torch.nn.Parameter(torch.zeros(1))], **other}]
    return torch.optim.SGD(groups, lr=9.0)


def test_a_driven_torch_optimizer():
    optimizer = _optimizer(lr_mult=0.5)
    driven = to_torch(lambda n: 1 / n, optimizer)
    assert isinstance(driven, torchs.LRScheduler)
    for n in (1, 2, 3):
        assert driven.get_last_lr() == [1 / n, 0.5 / n]
        assert [group["lr"] for group in optimizer.param_groups] == [1 / n, 0.5 / n]
        optimizer.step()
        driven.step()
    state = driven.state_dict()
    assert "schedule" not in state
    other = _optimizer()
    resumed = to_torch(lambda n: 1 / n, other)
    resumed.load_state_dict(state)
    other.step()
    resumed.step()
    assert resumed.get_last_lr() == [1 / 5, 1 / 5]
    going_on = to_torch(lambda n: 1 / n, _optimizer(), last_epoch=3)
    assert going_on.get_last_lr() == [1 / 5, 1 / 5]


def _slower(optimizer):
    return torchs.LambdaLR(optimizer, lambda n: 1 / (1 + n))  # which cannot be pickled


def test_copies_of_a_torch_schedule_leave_behind_what_is_under_way():
    schedule = from_torch(_slower, base_lr=0.6)
    assert schedule(3) == pytest.approx(0.2)
    assert pickle.loads(pickle.dumps(schedule))(3) == schedule(3)


def test_a_new_base_lr_of_a_torch_schedule_starts_it_anew():
    schedule = from_torch("ExponentialLR", gamma=0.5, base_lr=0.8)
    assert schedule(3) == 0.2
    schedule.base_lr = 8.0
    assert [schedule(n) for n in (3, 1)] == [2.0, 8.0]


def test_a_torch_schedule_that_ends():
    schedule = from_torch("OneCycleLR", max_lr=1.0, total_steps=10)
    assert schedule(10) == pytest.approx(1.0 / 25 / 1e4)
    with pytest.raises(ValueError, match=r"num_update=15: the schedule of torch ends after update 11 \(Tried to step"):
        schedule(15)
    assert schedule(1) == pytest.approx(0.04)


def test_schedules_made_with_functions_are_saved_by_name(empty_registry):
    def halves(n):
        return 0.5**n

    def steps(optimizer, size):
        return torchs.StepLR(optimizer, size, 0.5)

    def made():
        return sequence((FunctionScheduler(halves, base_lr=2.0), 3), (halves, 2), from_torch(steps, size=2))

    with pytest.raises(
        TypeError, match="function of FunctionScheduler=<function .*: is not registered, so it cannot be saved"
    ):
        made().to_config()
    assert "<function" in repr(made())
    register(halves)
    register(steps)
    schedule = made()
    config = json.loads(json.dumps(schedule.to_config()))
    assert from_config(config) == schedule
    assert eval(repr(schedule), vars(lr_scheduler)) == schedule
    assert from_config(config)(np.arange(9)).tolist() == [2.0, 1.0, 0.5, 1.0, 0.5, 0.01, 0.01, 0.01, 0.005]
    lr_scheduler._functions.clear()
    with pytest.raises(ValueError, match="function='halves': no function is registered by that name"):
        from_config(config)


def test_a_trainer_saves_a_sequence_with_its_parts():
    net = torch.nn.Linear(2, 1)
    schedule = sequence((PolyScheduler(5, 0.1), 5), from_torch(torchs.ExponentialLR, gamma=0.9))
    trainer = Trainer(net, "sgd", {"lr_scheduler": schedule})
    resumed = Trainer(net, "sgd")
    resumed.load_state_dict(json.loads(json.dumps(trainer.state_dict())))
    assert resumed.optimizer.lr_scheduler == schedule


def test_a_sequence_has_no_rate_of_its_own():
    schedule = sequence((PolyScheduler(5), 5), PolyScheduler(5))
    assert not hasattr(schedule, "base_lr")
    with pytest.raises(AttributeError, match="set it on one of its schedulers"):
        schedule.base_lr = 0.5
    with pytest.warns(UserWarning, match="learning_rate=0.5 has no effect"):
        Trainer(torch.nn.Linear(2, 1), "sgd", {"lr_scheduler": schedule, "learning_rate": 0.5})
    schedule.schedulers[0].base_lr = 0.5
    assert schedule(0) == 0.5


def test_equal_schedules_have_equal_hashes_which_base_lr_does_not_change():
    assert len({hash(schedule) for schedule in EVERY}) == len(EVERY)
    for schedule in EVERY:
        same = copy.deepcopy(schedule)
        assert len({schedule, same}) == 1
    for schedule in SCHEDULES + FROM_TORCH:
        same = copy.deepcopy(schedule)
        same.base_lr = 6.5
        assert same != schedule
        assert hash(same) == hash(schedule)


@pytest.mark.parametrize("make", [PolyScheduler, CosineScheduler])
def test_the_final_value_lasts(make):
    schedule = make(max_update=10, base_lr=1.0, final_lr=0.25)
    assert schedule(10) == schedule(11) == schedule(10**9) == 0.25


def test_drops_come_one_update_after_the_step():
    factor = FactorScheduler(step=10, factor=0.5, base_lr=0.8)
    assert [factor(n) for n in (0, 10, 11, 20, 21)] == [0.8, 0.8, 0.4, 0.4, 0.2]
    multi = MultiFactorScheduler(step=[1, 4], factor=0.5, base_lr=0.8)
    assert [multi(n) for n in (0, 1, 2, 4, 5)] == [0.8, 0.8, 0.4, 0.4, 0.2]


def test_factor_stops_at_its_floor_exactly():
    schedule = FactorScheduler(step=1, factor=0.1, stop_factor_lr=0.003, base_lr=1.0)
    assert schedule(3) == pytest.approx(0.01)
    assert schedule(4) == schedule(5) == schedule(10**6) == 0.003


def test_drops_inside_the_warmup_take_effect_when_it_ends():
    schedule = FactorScheduler(step=10, factor=0.5, base_lr=0.8, warmup_steps=35)
    assert schedule(34) == pytest.approx(0.8 * 34 / 35)
    assert schedule(35) == pytest.approx(0.1)


def test_warmup_modes():
    linear = FactorScheduler(100, base_lr=1.0, warmup_steps=4, warmup_begin_lr=0.2)
    assert [linear(n) for n in range(5)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    constant = FactorScheduler(100, base_lr=1.0, warmup_steps=4, warmup_begin_lr=0.2, warmup_mode="constant")
    assert [constant(n) for n in range(5)] == [0.2, 0.2, 0.2, 0.2, 1.0]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=repr)
def test_a_new_base_lr_holds_for_warmup_and_rule(schedule):
    config = schedule.to_config()
    changed, config["kwargs"]["base_lr"] = from_config(config), 5.0
    changed.base_lr = 5.0
    made = from_config(config)
    assert changed == made != schedule
    updates = np.arange(60)
    np.testing.assert_array_equal(changed(updates), made(updates))
    assert (changed(updates) > schedule(updates)).any()


@pytest.mark.parametrize("schedule", EVERY, ids=repr)
def test_repr_evaluates_to_an_equal_schedule(schedule):
    assert eval(repr(schedule), vars(lr_scheduler)) == schedule


def test_repr_shows_what_differs_from_the_defaults():
    assert repr(FactorScheduler(10, 0.5, base_lr=0.01)) == "FactorScheduler(step=10, factor=0.5)"


@pytest.mark.parametrize("schedule", EVERY, ids=repr)
def test_config_survives_json(schedule):
    config = schedule.to_config()
    assert from_config(json.loads(json.dumps(config))) == schedule
    assert set(config) == {"class", "kwargs"}


def test_config_is_a_copy():
    schedule = MultiFactorScheduler([10, 30])
    schedule.to_config()["kwargs"]["step"].append(50)
    assert schedule.step == [10, 30]


def test_equality_is_by_class_and_arguments():
    assert PolyScheduler(10) == PolyScheduler(max_update=10, base_lr=0.01)
    assert PolyScheduler(10) != PolyScheduler(11)
    assert PolyScheduler(10, pwr=2) != CosineScheduler(10)
    assert PolyScheduler(10) != "PolyScheduler(max_update=10)"


@pytest.mark.parametrize("name", ["MultiFactorScheduler", "multifactorscheduler", "MultiFactor", "multifactor"])
def test_create_by_any_spelling(name):
    assert create(name, step=[3], base_lr=0.1) == MultiFactorScheduler([3], base_lr=0.1)


def test_create_names_the_nearest():
    with pytest.raises(ValueError, match=r"name='cosin': .*Did you mean 'cosine' or 'cosinerestarts'\?"):
        create("cosin", max_update=3)
    with pytest.raises(
        ValueError, match="there are cosine, cosinerestarts, cyclic, exponential, factor, .*, poly, sequence"
    ):
        create("zzz")
    with pytest.raises(TypeError, match="name=3: must be the name"):
        create(3)


def test_create_refuses_unknown_arguments():
    with pytest.raises(TypeError, match="max_updates"):
        create("cosine", max_updates=3)


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        ("poly", TypeError, "must be a mapping"),
        ({"class": "PolyScheduler"}, ValueError, r"has the keys \['class'\]"),
        ({"class": "PolyScheduler", "kwargs": [3]}, TypeError, r"config\['kwargs'\]=\[3\]"),
        ({"class": "MyScheduler", "kwargs": {}}, ValueError, "needs @register"),
    ],
)
def test_from_config_refuses_what_to_config_does_not_make(config, error, message):
    with pytest.raises(error, match=message):
        from_config(config)


@pytest.fixture
def empty_registry(monkeypatch):
    """Registrations of a test end with it."""
    for names in ("_registry", "_functions"):
        monkeypatch.setattr(lr_scheduler, names, dict(getattr(lr_scheduler, names)))


def test_a_user_schedule_prints_saves_and_warms_up(empty_registry):
    @register
    class Sawtooth(LRScheduler):
        def __init__(self, period, **kwargs):
            super().__init__(**kwargs)
            self.period = period

        def __call__(self, num_update):
            if num_update < self.warmup_steps:
                return self.get_warmup_lr(num_update)
            return self.base_lr * (1 - num_update % self.period / self.period)

    schedule = create("sawtooth", period=4, base_lr=0.8, warmup_steps=2)
    assert [schedule(n) for n in range(6)] == pytest.approx([0.0, 0.4, 0.4, 0.2, 0.8, 0.6])
    assert repr(schedule) == "Sawtooth(period=4, base_lr=0.8, warmup_steps=2)"
    assert from_config(json.loads(json.dumps(schedule.to_config()))) == schedule


class Stateful(LRScheduler):
    """As MXNet's documents write schedules, and as its own FactorScheduler works: it changes as it is asked."""

    def __init__(self, step, factor, stop_factor_lr=1e-8, **kwargs):
        super().__init__(**kwargs)
        self.step, self.factor, self.stop_factor_lr = step, factor, stop_factor_lr
        self.count = 0

    def __call__(self, num_update):
        if num_update < self.warmup_steps:
            return self.get_warmup_lr(num_update)
        while num_update > self.count + self.step:
            self.count += self.step
            self.base_lr *= self.factor
            if self.base_lr < self.stop_factor_lr:
                self.base_lr = self.stop_factor_lr
        return self.base_lr


WARMUPS = [{}, {"warmup_steps": 5, "warmup_begin_lr": 0.05}]


@pytest.mark.parametrize("warmup", WARMUPS, ids=["at once", "warm-up"])
def test_base_lr_is_the_present_rate_and_may_be_set_as_in_mxnet(warmup):
    """The next rate is the one that was set, until the next drop; MXNet's loop is the judge."""
    given = {"step": 3, "factor": 0.1, "base_lr": 1.0, **warmup}
    theirs, ours = Stateful(**given), FactorScheduler(**given)
    several = MultiFactorScheduler([3 * k for k in range(1, 20)], 0.1, base_lr=1.0, **warmup)
    for n in range(1, 30):
        rate = pytest.approx(theirs(n), rel=1e-12)
        assert (ours(n), several(n)) == (rate, rate)
        rate = pytest.approx(theirs.base_lr, rel=1e-12)
        assert (ours.base_lr, several.base_lr) == (rate, rate)
        if n in (8, 12, 20):
            for schedule in (theirs, ours, several):
                schedule.base_lr = 0.5
            assert ours(n) == several(n) == 0.5
            restored = from_config(json.loads(json.dumps(ours.to_config())))
            assert restored == ours
            np.testing.assert_array_equal(restored(np.arange(n, 40)), ours(np.arange(n, 40)))
        if n == 16:
            for schedule in (theirs, ours, several):
                schedule.base_lr *= 0.5
    assert ours.warmup_final_lr == theirs.warmup_final_lr == 1.0
    assert repr(ours).count("base_lr=1.0") == 1  # as it was made


@pytest.mark.parametrize(
    "state", [{"_kept": 1}, {"step": 7}, {"since": 1}, {"since": -1, "base_lr": 0.1}, {"__class__": "x"}]
)
def test_a_state_that_no_schedule_saves_is_refused(state):
    config = FactorScheduler(step=5, factor=0.5, base_lr=0.1).to_config()
    with pytest.raises((TypeError, ValueError), match=next(iter(state)) + "|base_lr"):
        lr_scheduler.from_config(config | {"state": state})


@pytest.mark.parametrize("warmup", WARMUPS, ids=["at once", "warm-up"])
def test_a_schedule_that_changes_as_it_is_asked_trains_and_goes_on_after_loading(warmup, empty_registry, tmp_path):
    """Its rate may fall below the beginning of the warm-up."""
    register(Stateful)

    def trainer(schedule):
        return Trainer([torch.nn.Parameter(torch.ones(2))], "sgd", {"lr_scheduler": schedule})

    def rates(trainer, count):
        found = []
        for _ in range(count):
            trainer._params[0].grad = torch.ones(2)
            trainer.step(1)
            found.append(trainer.learning_rate)
        return found

    given = {"step": 2, "factor": 0.1, "base_lr": 1.0, **warmup}
    judge, first = FactorScheduler(**given), trainer(Stateful(**given))
    expected = [judge(n) for n in range(1, 13)]
    assert rates(first, 8) == pytest.approx(expected[:8], rel=1e-12)
    again = trainer(Stateful(**given))
    first.save_states(tmp_path / "states")
    again.load_states(tmp_path / "states")
    assert again.optimizer.lr_scheduler.count == first.optimizer.lr_scheduler.count > 0
    assert rates(again, 4) == pytest.approx(expected[8:], rel=1e-12)
    assert rates(first, 4) == pytest.approx(expected[8:], rel=1e-12)


def test_a_user_schedule_without_its_arguments_prints_but_does_not_save():
    class Hidden(LRScheduler):
        def __init__(self, period):
            super().__init__()
            self._period = period

    assert "Hidden object" in repr(Hidden(3))
    with pytest.raises(TypeError, match="Hidden has no attribute 'period'"):
        Hidden(3).to_config()


def test_register_refuses_what_it_cannot_keep(empty_registry):
    with pytest.raises(TypeError, match="must be a subclass of LRScheduler"):
        register(dict)
    with pytest.raises(ValueError, match="'PolyScheduler' is taken by tristep.trainer.lr_scheduler"):
        register(type("PolyScheduler", (LRScheduler,), {}))


def test_registering_a_class_again_replaces_it(empty_registry):
    def define(rate):
        @register
        class Fixed(LRScheduler):
            def __call__(self, num_update):
                return rate

    define(1.0)
    define(2.0)  # as when a notebook cell is run twice
    assert create("fixed")(0) == 2.0


def test_the_base_class_has_no_rule():
    with pytest.raises(NotImplementedError, match=r"must define __call__\(num_update\)"):
        LRScheduler()(0)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: PolyScheduler(10, base_lr="0.1"), TypeError, "base_lr='0.1': must be a number, not str"),
        (lambda: PolyScheduler(10, base_lr=True), TypeError, "base_lr=True: must be a number, not bool"),
        (lambda: PolyScheduler(10, base_lr=None), TypeError, "base_lr=None: must be a number, not NoneType"),
        (
            lambda: PolyScheduler(10, base_lr=-0.1),
            ValueError,
            "base_lr=-0.1: must be finite and 0 or more",
        ),
        (lambda: PolyScheduler(10, base_lr=math.nan), ValueError, "base_lr=nan: must be finite"),
        (lambda: PolyScheduler(10, base_lr=math.inf), ValueError, "base_lr=inf: must be finite"),
        (lambda: LRScheduler(warmup_steps=1.0), TypeError, r"warmup_steps=1.0: must be an integer, not float"),
        (lambda: LRScheduler(warmup_steps=True), TypeError, "warmup_steps=True: must be an integer, not bool"),
        (lambda: LRScheduler(warmup_steps=-1), ValueError, "warmup_steps=-1: must be 0 or more"),
        (lambda: LRScheduler(warmup_begin_lr=0.1), ValueError, "warmup_begin_lr=0.1: .*exceed base_lr=0.01"),
        (lambda: LRScheduler(warmup_begin_lr=-1), ValueError, "warmup_begin_lr=-1: must be finite and 0 or more"),
        (
            lambda: LRScheduler(warmup_mode="cosine"),
            ValueError,
            "warmup_mode='cosine': must be one of 'linear', 'con",
        ),
        (lambda: FactorScheduler(0), ValueError, "step=0: must be finite and 1 or more"),
        (lambda: FactorScheduler("10"), TypeError, "step='10': must be a number, not str"),
        (lambda: FactorScheduler(10, factor=1.1), ValueError, "factor=1.1: .*0 or more and 1 or less"),
        (lambda: FactorScheduler(10, factor=-0.1), ValueError, "factor=-0.1: .*0 or more and 1 or less"),
        (
            lambda: FactorScheduler(10, stop_factor_lr=None),
            TypeError,
            "stop_factor_lr=None: must be a number",
        ),
        (lambda: MultiFactorScheduler(10), TypeError, "step=10: must be a list or tuple"),
        (lambda: MultiFactorScheduler([]), ValueError, r"step=\[\]: must hold at least one"),
        (lambda: MultiFactorScheduler([5, 5]), ValueError, r"step=\[5, 5\]: must be strictly increasing"),
        (
            lambda: MultiFactorScheduler([0, 5]),
            ValueError,
            r"step\[0\]=0: must be finite and 1 or more",
        ),
        (lambda: MultiFactorScheduler([1, "5"]), TypeError, r"step\[1\]='5': must be a number"),
        (lambda: MultiFactorScheduler([5], 2), ValueError, "factor=2: .*1 or less"),
        (lambda: PolyScheduler(10.0), TypeError, "max_update=10.0: must be an integer, not float"),
        (lambda: PolyScheduler(0), ValueError, "max_update=0: must be 1 or more"),
        (lambda: PolyScheduler(10, pwr=-1), ValueError, "pwr=-1: must be finite and 0 or more"),
        (
            lambda: PolyScheduler(10, final_lr=-1),
            ValueError,
            "final_lr=-1: must be finite and 0 or more",
        ),
        (
            lambda: PolyScheduler(5, warmup_steps=5),
            ValueError,
            "warmup_steps=5: must be less than max_update=5",
        ),
        (lambda: CosineScheduler("10"), TypeError, "max_update='10': must be an integer, not str"),
        (
            lambda: CosineScheduler(5, warmup_steps=6),
            ValueError,
            "warmup_steps=6: must be less than max_update=5",
        ),
        (lambda: OneCycleScheduler(0), ValueError, "max_update=0: must be 1 or more"),
        (lambda: OneCycleScheduler(9, pct_start=1), ValueError, "pct_start=1: .*greater than 0 and less than 1"),
        (lambda: OneCycleScheduler(9, pct_start=0.6, three_phase=True), ValueError, "pct_start=0.6: .*0.5 or less"),
        (lambda: OneCycleScheduler(9, div_factor=0.5), ValueError, "div_factor=0.5: must be finite and 1 or more"),
        (
            lambda: OneCycleScheduler(9, anneal_strategy="cosine"),
            ValueError,
            "anneal_strategy='cosine': .*Did you mean 'cos'",
        ),
        (lambda: OneCycleScheduler(9, three_phase=1), TypeError, "three_phase=1: must be True or False"),
        (lambda: CosineRestartsScheduler(0), ValueError, "period=0: must be finite and 1 or more"),
        (lambda: CosineRestartsScheduler(5, 0.5), ValueError, "period_mult=0.5: must be finite and 1 or more"),
        (lambda: CosineRestartsScheduler(5, final_lr=-1), ValueError, "final_lr=-1: must be finite and 0 or more"),
        (
            lambda: WarmupStableDecayScheduler(10, 8, warmup_steps=3),
            ValueError,
            "decay_steps=8: must be at most 7, max_update=10 less warmup_steps=3",
        ),
        (lambda: WarmupStableDecayScheduler(10, 0), ValueError, "decay_steps=0: must be 1 or more"),
        (lambda: WarmupStableDecayScheduler(10, 5, decay="exp"), ValueError, "decay='exp': must be one of 'linear'"),
        (lambda: InverseSquareRootScheduler(timescale=0), ValueError, "timescale=0: must be finite and greater than 0"),
        (lambda: InverseSquareRootScheduler(-0.1), ValueError, "base_lr=-0.1: must be finite and 0 or more"),
        (lambda: CyclicScheduler(0, 1.0), ValueError, "step_up=0: must be finite and 1 or more"),
        (lambda: CyclicScheduler(5, 1.0, step_down=0.5), ValueError, "step_down=0.5: must be finite and 1 or more"),
        (lambda: CyclicScheduler(5, 0.1, 0.2), ValueError, "base_lr=0.2: must not exceed max_lr=0.1"),
        (
            lambda: CyclicScheduler(5, 0.3, 0.2, warmup_steps=2, warmup_begin_lr=0.25),
            ValueError,
            "warmup_begin_lr=0.25: must not exceed base_lr=0.2",
        ),
        (lambda: CyclicScheduler(5, -1), ValueError, "max_lr=-1: must be finite and 0 or more"),
        (lambda: CyclicScheduler(5, 1, mode="square"), ValueError, "mode='square': must be one of 'triangular'"),
        (lambda: CyclicScheduler(5, 1, gamma=2), ValueError, "gamma=2: .*1 or less"),
        (lambda: ExponentialScheduler(1.5), ValueError, "factor=1.5: .*1 or less"),
        (lambda: ExponentialScheduler(0.5, step=0), ValueError, "step=0: must be finite and greater than 0"),
        (lambda: PiecewiseScheduler([5, 3], [1, 1]), ValueError, r"step=\[5, 3\]: must be strictly increasing"),
        (lambda: PiecewiseScheduler([3], [-1]), ValueError, r"rates\[0\]=-1: must be finite and 0 or more"),
        (lambda: PiecewiseScheduler([3], [1, 2]), ValueError, r"rates=\[1, 2\]: must hold as many .*, 1"),
        (lambda: PiecewiseScheduler([3], 1), TypeError, "rates=1: must be a list or tuple of rates"),
        (lambda: InterpolatedScheduler([5, 3], [1, 1]), ValueError, r"step=\[5, 3\]: must be strictly increasing"),
        (lambda: InterpolatedScheduler([3], [1, 2]), ValueError, r"rates=\[1, 2\]: must hold as many .*, 1"),
        (
            lambda: InterpolatedScheduler([3], [0.0], "log"),
            ValueError,
            r"rates=\[0.0\]: must all be above 0",
        ),
        (lambda: InterpolatedScheduler([3], [1.0], "log", 0), ValueError, "base_lr=0: must be above 0 with scale='log'"),
        (lambda: InterpolatedScheduler([3], [1.0], "exp"), ValueError, "scale='exp': must be one of 'linear', 'log'"),
        (lambda: InterpolatedScheduler([3], [1.0], warmup_steps=3), ValueError, r"step=\[3\]: must begin after warmup_st"),
        (lambda: FunctionScheduler(3), TypeError, "function=3: must be a callable"),
        (lambda: FunctionScheduler("no_such"), ValueError, "function='no_such': no function is registered"),
        (lambda: FunctionScheduler(lambda n: -n)(3), ValueError, r"function\(3\)=-3: must be finite and 0 or more"),
        (lambda: FunctionScheduler(lambda n: None)(np.arange(2)), TypeError, r"function\(0\)=None: must be a number"),
        (lambda: SequenceScheduler(PolyScheduler(5), []), TypeError, "schedulers=Poly.*: must be a list or tuple"),
        (lambda: SequenceScheduler([], []), ValueError, r"schedulers=\[\]: must hold at least one"),
        (lambda: SequenceScheduler([PolyScheduler(5), 0.1], [3]), TypeError, r"schedulers\[1\]=0.1: must be a callable"),
        (lambda: SequenceScheduler([PolyScheduler(5)], [3]), ValueError, r"starts=\[3\]: must hold one .* but the first, 0"),
        (lambda: SequenceScheduler([abs, abs], [2.5]), TypeError, r"starts\[0\]=2.5: must be an integer"),
        (lambda: SequenceScheduler([abs, abs, abs], [4, 4]), ValueError, r"starts=\[4, 4\]: must be strictly increasing"),
        (lambda: sequence(), ValueError, "parts: must hold at least one schedule"),
        (lambda: sequence(abs, abs), TypeError, r"parts\[0\]=<.*: must be a pair of a schedule and its number"),
        (lambda: sequence((abs, 0), abs), ValueError, r"parts\[0\]\[1\]=0: must be 1 or more"),
        (lambda: sequence((abs, 3), (abs, 3)), TypeError, r"parts\[1\]=.*: the last must be a schedule alone"),
        (lambda: from_torch("StpLR"), ValueError, "factory='StpLR': neither .*Did you mean 'StepLR'"),
        (lambda: from_torch(3), TypeError, "factory=3: must be a class of torch.optim.lr_scheduler, or a function"),
        (lambda: from_torch("StepLR"), TypeError, "step_size"),
        (lambda: from_torch(lambda o: 3), TypeError, "gave 3, which is no torch"),
        (lambda: from_torch("ReduceLROnPlateau"), TypeError, "ReduceLROnPlateau needs losses.*set_learning_rate"),
        (lambda: TorchScheduler("StepLR", 3), TypeError, "kwargs=3: must be a dict"),
        (
            lambda: from_torch(torchs.StepLR(_optimizer(), 3)),
            TypeError,
            r"is bound to its optimizer already; give its class and its arguments, from_torch\(StepLR, ...\)",
        ),
        (
            lambda: from_torch("LambdaLR", lr_lambda=math.exp).to_config(),
            TypeError,
            r"kwargs of TorchScheduler\['lr_lambda'\] is a function, which cannot be saved",
        ),
        (lambda: to_torch(0.1, _optimizer()), TypeError, "scheduler=0.1: must be a schedule"),
        (lambda: to_torch(abs, [torch.zeros(1)]), TypeError, "optimizer must be a torch.optim.Optimizer, got list"),
        (lambda: to_torch(abs, _optimizer(), -2), ValueError, "last_epoch=-2: must be -1 or more"),
        (lambda: register(lambda n: n), TypeError, "has no name to be found by"),
        (lambda: CosineScheduler(5)(-1), ValueError, "num_update=-1: must be 0 or more"),
        (lambda: CosineScheduler(5)(1.5), TypeError, "num_update=1.5: must be an integer"),
        (lambda: CosineScheduler(5)(np.array([3, -2])), ValueError, "num_update holds -2"),
        (lambda: CosineScheduler(5)(np.array([0.5])), TypeError, "num_update has dtype float64"),
    ],
)
def test_bad_arguments_are_named(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_a_bad_base_lr_leaves_the_old_one():
    cyclic = CyclicScheduler(5, max_lr=1.0, base_lr=0.5)
    with pytest.raises(ValueError, match="base_lr=2.0: must not exceed max_lr=1.0"):
        cyclic.base_lr = 2
    assert cyclic.base_lr == 0.5
    schedule = CosineScheduler(10, base_lr=0.5, warmup_steps=2, warmup_begin_lr=0.1)
    with pytest.raises(ValueError, match="warmup_begin_lr=0.1: must not exceed base_lr=0.05"):
        schedule.base_lr = 0.05
    assert schedule.base_lr == 0.5


def test_docstring_examples(empty_registry):
    failed, attempted = doctest.testmod(lr_scheduler)
    assert attempted > 10
    assert failed == 0
