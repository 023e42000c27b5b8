"""Learning-rate schedules: the numbers of MXNet, of papers and of torch; calls in any order, equality, bad arguments."""

import copy
import inspect
import json
import math
import pickle
import re

import numpy as np
import pytest
import torch
from torch.optim import lr_scheduler as torchs

from tristep import lr_scheduler as lr

# MXNet multiplies drop by drop, we take a power: some roundings apart, far below float32.
CLOSE = {"rtol": 1e-13, "atol": 1e-15}

WITH_BASE_LR = [
    lr.FactorScheduler(step=7, factor=0.3, stop_factor_lr=1e-3, base_lr=0.7),
    lr.FactorScheduler(30, 0.5, base_lr=1, warmup_steps=10, warmup_begin_lr=0.2, warmup_mode="constant"),
    lr.MultiFactorScheduler(step=(10, 30), factor=0.1, base_lr=0.3, warmup_steps=12),
    lr.PolyScheduler(max_update=40, pwr=0.5, final_lr=0.001, warmup_steps=5),
    lr.CosineScheduler(max_update=40, base_lr=3.0, final_lr=0.01, warmup_steps=25, warmup_begin_lr=0.5),
    lr.OneCycleScheduler(max_update=50, base_lr=0.7, anneal_strategy="linear"),
    lr.CosineRestartsScheduler(period=11, base_lr=0.7, final_lr=0.1, warmup_steps=3),
    lr.CosineRestartsScheduler(period=6, period_mult=1.5, base_lr=0.7),
    lr.WarmupStableDecayScheduler(50, 20, base_lr=0.7, final_lr=0.1, decay="sqrt", warmup_steps=10),
    lr.InverseSquareRootScheduler(base_lr=0.7, warmup_steps=10),
    lr.InverseSquareRootScheduler(base_lr=0.7, timescale=0.5, warmup_steps=4, warmup_begin_lr=0.2),
    lr.CyclicScheduler(step_up=5, max_lr=7.0, base_lr=0.7, mode="triangular2", warmup_steps=6),
    lr.CyclicScheduler(step_up=5, max_lr=7.0, base_lr=0.7, mode="exp_range", gamma=0.9),
    lr.ExponentialScheduler(factor=0.3, step=20.5, base_lr=0.7, warmup_steps=5),
    lr.PiecewiseScheduler(step=(10, 30), rates=(0.2, 0.4), base_lr=0.7, warmup_steps=2),
]
FROM_TORCH = [
    lr.from_torch("StepLR", step_size=7, gamma=0.5, base_lr=0.7),
    lr.from_torch("MultiStepLR", milestones=(5, 30), gamma=0.5, base_lr=0.7),
]
SEQUENCE = lr.sequence(
    (lr.CyclicScheduler(2, 3.0), 7),
    (lr.from_torch("StepLR", step_size=3, base_lr=0.5), 20),
    (lr.sequence((lr.PolyScheduler(4), 2), lr.CosineScheduler(10, base_lr=2.0, warmup_steps=4)), 9),
    lr.FactorScheduler(9, 0.5),
)
EVERY = [*WITH_BASE_LR, *FROM_TORCH, SEQUENCE]
every_schedule = pytest.mark.parametrize("schedule", EVERY, ids=repr)


def _one_by_one(schedule, updates):
    return np.array([schedule(int(n)) for n in updates])


@pytest.mark.golden("lr_schedulers")
def test_equals_mxnet_called_in_order(golden):
    config, arrays = golden
    schedule = lr.create(config["class"], **config["kwargs"])
    np.testing.assert_allclose(_one_by_one(schedule, range(201)), arrays["seq"], **CLOSE)
    # Beyond max_update a new MXNet object answers base_lr instead of the final value.
    updates = np.arange(min(201, config["kwargs"].get("max_update", 200) + 1))
    new = [lr.create(config["class"], **config["kwargs"])(int(n)) for n in updates]
    np.testing.assert_allclose(new, arrays["fresh"][updates], **CLOSE)


# ---- what all schedules have in common -------------------------------------------------------------------------------


@every_schedule
def test_a_schedule_is_a_function_of_the_update_count(schedule):
    """In any order, for arrays, and of copies."""
    in_order, shuffled = _one_by_one(schedule, range(60)), np.random.default_rng(1).permutation(60)
    np.testing.assert_array_equal([copy.deepcopy(schedule)(int(n)) for n in shuffled], in_order[shuffled])
    np.testing.assert_array_equal(_one_by_one(pickle.loads(pickle.dumps(schedule)), shuffled), in_order[shuffled])
    updates = np.arange(60, dtype=np.uint8).reshape(6, 10)
    rates = schedule(updates)
    assert (rates.dtype, rates.shape, schedule(updates[:0]).shape) == (np.float64, (6, 10), (0, 10))
    np.testing.assert_allclose(rates.ravel(), in_order, rtol=1e-14)
    assert all(type(schedule(n)) is float for n in (0, 20, np.int64(50)))


@every_schedule
def test_repr_and_config_make_an_equal_schedule(schedule):
    assert eval(repr(schedule), vars(lr)) == schedule
    config = schedule.to_config()
    assert set(config) == {"class", "kwargs"}
    assert lr.from_config(json.loads(json.dumps(config))) == schedule
    assert [other for other in EVERY if other == schedule] == [schedule]


@pytest.mark.parametrize("schedule", WITH_BASE_LR, ids=repr)
def test_new_base_lr_applies_to_warmup_and_rule(schedule):
    config = schedule.to_config()
    changed, config["kwargs"]["base_lr"] = lr.from_config(config), 5.0
    changed.base_lr = 5.0
    made = lr.from_config(config)
    assert changed == made != schedule
    updates = np.arange(60)
    np.testing.assert_array_equal(changed(updates), made(updates))
    assert (changed(updates) > schedule(updates)).any()


def test_equal_schedules_have_equal_hashes_which_base_lr_does_not_change():
    for schedule in EVERY:
        assert len({schedule, copy.deepcopy(schedule)}) == 1
    for schedule in WITH_BASE_LR + FROM_TORCH:
        same = copy.deepcopy(schedule)
        same.base_lr = 6.5
        assert same != schedule
        assert hash(same) == hash(schedule)
    assert lr.PolyScheduler(10) == lr.PolyScheduler(max_update=10, base_lr=0.01) != "PolyScheduler(max_update=10)"
    assert repr(lr.FactorScheduler(10, 0.5, base_lr=0.01)) == "FactorScheduler(step=10, factor=0.5)"


# ---- each schedule's own numbers -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "updates", "rates"),
    [
        # A base_lr below the floor is kept until the first drop, as in MXNet.
        (lr.FactorScheduler(10, 0.5, stop_factor_lr=0.1, base_lr=0.01), [0, 10, 11], [0.01, 0.01, 0.1]),
        (lr.InverseSquareRootScheduler(1.0, timescale=100), [0, 300], [1.0, 0.5]),
        (lr.InverseSquareRootScheduler(1.0), [0, 3], [1.0, 0.5]),
        (lr.OneCycleScheduler(100, 1.0, 0.2, 10, 10), [0, 20, 100, 1000], [0.1, 1.0, 0.01, 0.01]),
        (lr.CosineRestartsScheduler(7, 1.5, base_lr=0.3), [0, 7], [0.3] * 2),
        (lr.PiecewiseScheduler([3, 5], [0.5, 2], 1, warmup_steps=1), range(7), [0.0, 1.0, 1.0, 1.0, 0.5, 0.5, 2.0]),
    ],
    ids=repr,
)
def test_exact_values(schedule, updates, rates):
    """What neither MXNet nor torch has."""
    assert schedule(np.array(updates)).tolist() == rates
    assert [schedule(n) for n in updates] == rates


DROPS = [lr.FactorScheduler(1, 0.7, 0.0, 0.3), lr.MultiFactorScheduler([*range(1, 40)], 0.1, 0.3)]


@pytest.mark.parametrize("schedule", DROPS, ids=lambda schedule: type(schedule).__name__)
def test_drops_are_products_as_in_mxnet(schedule):
    """MXNet multiplies its base_lr at each drop; a power of the factor has other last bits."""
    rate, rates = 0.3, []
    for _ in range(40):
        rates.append(rate)
        rate *= schedule.factor
    assert schedule(np.arange(1, 41)).tolist() == rates
    assert [schedule(n) for n in range(1, 41)] == rates


WARMING = {
    type(schedule): schedule.to_config()["kwargs"]
    for schedule in WITH_BASE_LR
    if "warmup_mode" in inspect.signature(type(schedule)).parameters
}
WARMING[lr.FunctionScheduler] = {"function": math.cosh}


@pytest.mark.parametrize("klass", WARMING)
def test_every_schedule_warms_up_in_the_mode_that_it_is_given(klass):
    """MXNet's two formulas: constant, or a line from warmup_begin_lr to base_lr. After the warm-up they are the same."""
    kwargs = WARMING[klass] | {"base_lr": 0.5, "warmup_steps": 2, "warmup_begin_lr": 0.1}
    constant, linear = (klass(**kwargs | {"warmup_mode": mode}) for mode in ("constant", "linear"))
    assert constant(np.arange(2)) == pytest.approx([0.1, 0.1], rel=1e-14)
    assert linear(np.arange(2)) == pytest.approx([0.1, 0.3], rel=1e-14)
    np.testing.assert_array_equal(constant(np.arange(2, 60)), linear(np.arange(2, 60)))


@pytest.mark.parametrize(
    ("decay", "shape"),
    [("linear", lambda t: 1 - t), ("sqrt", lambda t: 1 - np.sqrt(t)), ("cosine", lambda t: 0.5 + 0.5 * np.cos(np.pi * t))],
)
def test_warmup_stable_decay(decay, shape):
    updates, schedule = np.arange(101), lr.WarmupStableDecayScheduler(100, 40, 2.0, 0.5, decay, warmup_steps=10)
    expected = np.where(updates < 10, updates / 5, 0.5 + 1.5 * shape(np.maximum(updates - 60, 0) / 40))
    np.testing.assert_allclose(schedule(updates), expected, rtol=1e-14)
    assert schedule(10**6) == 0.5


def test_schedule_of_the_transformer():
    """The paper's own formula, for a width of 512 and a warm-up of 4000."""
    schedule = lr.InverseSquareRootScheduler(base_lr=(512 * 4000) ** -0.5, warmup_steps=4000)
    n = np.arange(1, 20_000, 13)
    np.testing.assert_allclose(schedule(n), 512**-0.5 * np.minimum(n**-0.5, n * 4000**-1.5), rtol=1e-13)


def test_any_callable_is_a_schedule():
    asked = []

    def rate(n):
        asked.append(n)
        return 1 / (1 + n)

    parts = lr.sequence((rate, 2), lr.FunctionScheduler(rate, base_lr=0.5, warmup_steps=1))
    assert parts(np.array([[0, 1], [2, 3]])).tolist() == [[1.0, 0.5], [0.0, 0.5]]
    assert all(type(n) is int for n in asked)
    assert parts(4) == 0.25


# ---- torch's numbers -------------------------------------------------------------------------------------------------

M = 80  # torch counts to the last update of a cycle, we to the one after the first


def _rates_of_torch(make, rate, count):
    """The learning rates of a torch run of so many updates, each followed by a step of the schedule."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(()))], lr=rate, momentum=0.9)
    schedule, rates = make(optimizer), []
    for _ in range(count):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return np.array(rates)


def _one_cycle(strategy):
    def make(o):
        options = {"pct_start": 0.25, "div_factor": 20, "final_div_factor": 1e3}
        return torchs.OneCycleLR(o, 0.7, M + 1, anneal_strategy=strategy, **options)

    return lr.OneCycleScheduler(M, 0.7, (0.25 * (M + 1) - 1) / M, 20, 1e3, strategy), make, M + 1


def _cyclic(*down, **options):
    return (
        lr.CyclicScheduler(5, 7.0, 0.7, *down, **options),
        lambda o: torchs.CyclicLR(o, 0.7, 7.0, 5, *down, **options),
        100,
    )


def _sequential(o):
    parts = [torchs.ExponentialLR(o, 0.9), torchs.CosineAnnealingLR(o, 30), torchs.PolynomialLR(o, 20, 2)]
    return torchs.SequentialLR(o, parts, [20, 45])


SEQUENTIAL = (lr.ExponentialScheduler(0.9, base_lr=0.7), 20), (lr.CosineScheduler(30, 0.7), 25), lr.PolyScheduler(20, 0.7)


@pytest.mark.parametrize(
    ("ours", "make", "count"),
    [
        *(_one_cycle(strategy) for strategy in ("cos", "linear")),
        (lr.CosineRestartsScheduler(11, 1, 0.7, 0.1), lambda o: torchs.CosineAnnealingWarmRestarts(o, 11, eta_min=0.1), 100),
        (lr.CosineRestartsScheduler(5, 2, 0.7), lambda o: torchs.CosineAnnealingWarmRestarts(o, 5, 2), 200),
        (lr.CosineScheduler(60, 0.7, 0.1), lambda o: torchs.CosineAnnealingLR(o, 60, 0.1), 61),
        (lr.PolyScheduler(60, 0.7, 1.5), lambda o: torchs.PolynomialLR(o, 60, 1.5), 100),
        _cyclic(9),
        _cyclic(mode="triangular2"),
        _cyclic(mode="exp_range", gamma=0.97),
        (lr.FunctionScheduler(math.exp, 0.7), lambda o: torchs.LambdaLR(o, math.exp), 20),
        (
            lr.FactorScheduler(100, base_lr=0.7, warmup_steps=20, warmup_begin_lr=0.07),
            lambda o: torchs.LinearLR(o, 0.1, total_iters=20),
            60,
        ),
        (lr.sequence(*SEQUENTIAL), _sequential, 80),
        # MXNet's drops come one update later than torch's.
        (lr.PiecewiseScheduler([9, 29], [0.07, 0.007], 0.7), lambda o: torchs.MultiStepLR(o, [10, 30], 0.1), 60),
    ],
)
def test_equals_torch(ours, make, count):
    np.testing.assert_allclose(ours(np.arange(count)), _rates_of_torch(make, 0.7, count), rtol=1e-9, atol=1e-12)


def _cyclic_of_torch(optimizer):  # whose own base_lr would be taken for ours
    return torchs.CyclicLR(optimizer, 0.1, 0.9, step_size_up=6)


def _slower(optimizer):
    return torchs.LambdaLR(optimizer, lambda n: 1 / (1 + n))  # which cannot be pickled


def _chained(optimizer):
    return torchs.ChainedScheduler([torchs.LinearLR(optimizer, 0.1, total_iters=10), torchs.ExponentialLR(optimizer, 0.9)])


@pytest.mark.parametrize(
    ("factory", "kwargs"),
    [
        (torchs.OneCycleLR, {"max_lr": 0.9, "total_steps": 40}),
        (torchs.MultiStepLR, {"milestones": (5, 20), "gamma": 0.3}),
        (_cyclic_of_torch, {}),
        (_chained, {}),
        (_slower, {}),
    ],
)
def test_schedule_of_torch_has_the_same_learning_rates(factory, kwargs):
    ours = lr.from_torch(factory, base_lr=0.7, **kwargs)
    expected = _rates_of_torch(lambda optimizer: factory(optimizer, **kwargs), 0.7, 40)
    assert ours(np.arange(1, 41)).tolist() == expected.tolist()
    assert ours(17) == expected[16]  # after later ones
    assert ours(0) == expected[0]
    assert pickle.loads(pickle.dumps(ours))(17) == expected[16]


def test_new_base_lr_restarts_a_schedule_of_torch():
    schedule = lr.from_torch("ExponentialLR", gamma=0.5, base_lr=0.8)
    assert schedule(3) == 0.2
    schedule.base_lr = 8.0
    assert [schedule(n) for n in (3, 1)] == [2.0, 8.0]


def test_schedule_of_torch_that_ends():
    schedule = lr.from_torch("OneCycleLR", max_lr=1.0, total_steps=10)
    assert schedule(10) == pytest.approx(1.0 / 25 / 1e4)
    with pytest.raises(ValueError, match=r"num_update=15: the schedule of torch ends after update 11 \(Tried to step"):
        schedule(15)
    assert schedule(1) == pytest.approx(0.04)


def _two_groups(**options):
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))]}, {"params": [torch.nn.Parameter(torch.zeros(1))], **options}]
    return torch.optim.SGD(groups, lr=9.0)


def test_to_torch_sets_each_group_and_resumes():
    optimizer = _two_groups(lr_mult=0.5)
    schedule = lr.to_torch(lambda n: 1 / n, optimizer)
    assert isinstance(schedule, torchs.LRScheduler)
    for n in (1, 2, 3):
        assert schedule.get_last_lr() == [1 / n, 0.5 / n]
        assert [group["lr"] for group in optimizer.param_groups] == [1 / n, 0.5 / n]
        optimizer.step()
        schedule.step()
    state = schedule.state_dict()
    assert "schedule" not in state
    other = _two_groups()
    resumed = lr.to_torch(lambda n: 1 / n, other)
    resumed.load_state_dict(state)
    other.step()
    resumed.step()
    assert resumed.get_last_lr() == [1 / 5, 1 / 5]
    assert lr.to_torch(lambda n: 1 / n, _two_groups(), last_epoch=3).get_last_lr() == [1 / 5, 1 / 5]


# ---- bad arguments ---------------------------------------------------------------------------------------------------

# By scheduler: arguments that it takes, and for each argument what it refuses as "argument=value: must ...".
WARMUP = {"warmup_steps": [1.0, True, -1], "warmup_begin_lr": [0.1, -1], "warmup_mode": ["cosine"]}
RATES = {"base_lr": ["0.1", True, None, -0.1, math.nan, math.inf], "final_lr": [-1]}
REFUSED = {
    "factor": ({"step": 10}, {"step": [0, "10"], "factor": [1.1, -0.1], "stop_factor_lr": [None]} | WARMUP),
    "multifactor": ({"step": [5]}, {"step": [10, [], [5, 5]], "factor": [2]}),
    "poly": ({"max_update": 10}, {"max_update": [10.0, 0], "pwr": [-1], "warmup_steps": [10]} | RATES),
    "cosine": ({"max_update": 10}, {"max_update": ["10"], "warmup_steps": [11], "final_lr": [-1]}),
    "onecycle": (
        {"max_update": 9},
        {"max_update": [0], "pct_start": [1], "div_factor": [0.5], "final_div_factor": [0]},
    ),
    "cosinerestarts": ({"period": 5}, {"period": [0], "period_mult": [0.5], "final_lr": [-1]}),
    "warmupstabledecay": (
        {"max_update": 10, "decay_steps": 7, "warmup_steps": 3},
        {"decay_steps": [8, 0], "decay": ["exp"], "final_lr": [-1]},
    ),
    "inversesquareroot": ({}, {"timescale": [0], "base_lr": [-0.1]}),
    "cyclic": (
        {"step_up": 5, "max_lr": 1},
        {"step_up": [0], "step_down": [0.5], "base_lr": [2.0], "max_lr": [-1], "mode": ["square"], "gamma": [2]},
    ),
    "exponential": ({"factor": 0.5}, {"factor": [1.5], "step": [0]}),
    "piecewise": ({"step": [3], "rates": [1]}, {"step": [[5, 3]], "rates": [[1, 2], 1]}),
    "function": ({}, {"function": [3]}),
    "sequence": ({"schedulers": [abs, abs, abs], "starts": [3, 4]}, {"schedulers": [abs, []], "starts": [[4], [4, 4]]}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_values_are_named(name):
    takes, refused = REFUSED[name]
    for argument, values in refused.items():
        for value in values:
            with pytest.raises((TypeError, ValueError), match=re.escape(f"{argument}={value!r}:") + ".* must"):
                lr.create(name, **{**takes, argument: value})


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: lr.FunctionScheduler(lambda n: -n)(3), ValueError, r"function\(3\)=-3: must be finite and 0 or more"),
        (lambda: lr.CosineScheduler(5)(-1), ValueError, "num_update=-1: must be 0 or more"),
        (lambda: lr.from_torch("ReduceLROnPlateau"), TypeError, "ReduceLROnPlateau needs losses.*set_learning_rate"),
        (
            lambda: lr.from_torch(torchs.StepLR(_two_groups(), 3)),
            TypeError,
            r"is bound to its optimizer already; give its class and arguments, from_torch\(StepLR, ...\)",
        ),
        (
            lambda: lr.from_torch("LambdaLR", lr_lambda=math.exp).to_config(),
            TypeError,
            r"kwargs of TorchScheduler\['lr_lambda'\] is a function, which cannot be saved",
        ),
    ],
)
def test_bad_arguments_are_named(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_bad_base_lr_leaves_the_former_one():
    cyclic = lr.CyclicScheduler(5, max_lr=1.0, base_lr=0.5)
    with pytest.raises(ValueError, match="base_lr=2.0: must not exceed max_lr=1.0"):
        cyclic.base_lr = 2
    assert cyclic.base_lr == 0.5
    schedule = lr.CosineScheduler(10, base_lr=0.5, warmup_steps=2, warmup_begin_lr=0.1)
    with pytest.raises(ValueError, match="warmup_begin_lr=0.1: must not exceed base_lr=0.05"):
        schedule.base_lr = 0.05
    assert schedule.base_lr == 0.5
