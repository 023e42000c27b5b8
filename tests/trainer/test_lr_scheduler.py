"""Learning-rate schedules: the numbers of MXNet and of papers, calls in any order, equality, printing, bad arguments."""

import copy
import json
import math
import pickle

import numpy as np
import pytest
from torch.optim import lr_scheduler as torchs

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
    WarmupStableDecayScheduler,
    create,
    from_config,
    from_torch,
    sequence,
)

# MXNet multiplies drop by drop, we take a power: some roundings apart, far below float32.
CLOSE = {"rtol": 1e-13, "atol": 1e-15}

WITH_BASE_LR = [
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
FROM_TORCH = [
    from_torch("StepLR", step_size=7, gamma=0.5, base_lr=0.7),
    from_torch(torchs.CosineAnnealingWarmRestarts, T_0=9, T_mult=2, base_lr=0.7),
    from_torch("MultiStepLR", milestones=(5, 30), gamma=0.5, base_lr=0.7),
]
SEQUENCES = [
    SequenceScheduler([CosineScheduler(10, base_lr=2.0, warmup_steps=4), PolyScheduler(20, base_lr=1)], starts=[15]),
    sequence(
        (CyclicScheduler(2, 3.0), 7),
        (from_torch("StepLR", step_size=3, base_lr=0.5), 20),
        (sequence((PolyScheduler(4), 2), PolyScheduler(9)), 9),
        FactorScheduler(9, 0.5),
    ),
]
EVERY = WITH_BASE_LR + FROM_TORCH + SEQUENCES
every_schedule = pytest.mark.parametrize("schedule", EVERY, ids=repr)


def _one_by_one(schedule, updates):
    return np.array([schedule(int(n)) for n in updates])


# ---- MXNet's numbers -------------------------------------------------------------------------------------------------


@pytest.mark.golden("lr_schedulers")
def test_equals_mxnet_called_in_order(golden):
    config, arrays = golden
    schedule = create(config["class"], **config["kwargs"])
    np.testing.assert_allclose(_one_by_one(schedule, range(201)), arrays["seq"], **CLOSE)
    shuffled = np.random.default_rng(1).permutation(201)
    np.testing.assert_allclose(_one_by_one(schedule, shuffled), arrays["seq"][shuffled], **CLOSE)


@pytest.mark.golden("lr_schedulers")
def test_new_schedule_equals_new_one_of_mxnet_up_to_max_update(golden):
    """Beyond max_update a new MXNet object answers base_lr instead of the final value."""
    config, arrays = golden
    updates = np.arange(min(201, config["kwargs"].get("max_update", 200) + 1))
    new = [create(config["class"], **config["kwargs"])(int(n)) for n in updates]
    np.testing.assert_allclose(new, arrays["fresh"][updates], **CLOSE)


# ---- what all schedules have in common -------------------------------------------------------------------------------


@every_schedule
def test_result_does_not_depend_on_earlier_calls(schedule):
    in_order, shuffled = _one_by_one(schedule, range(60)), np.random.default_rng(1).permutation(60)
    np.testing.assert_array_equal([copy.deepcopy(schedule)(int(n)) for n in shuffled], in_order[shuffled])
    np.testing.assert_array_equal(_one_by_one(pickle.loads(pickle.dumps(schedule)), shuffled), in_order[shuffled])


@every_schedule
def test_array_of_updates(schedule):
    updates = np.arange(60, dtype=np.uint8).reshape(6, 10)
    rates = schedule(updates)
    assert rates.dtype == np.float64
    assert rates.shape == updates.shape
    np.testing.assert_allclose(rates.ravel(), _one_by_one(schedule, range(60)), rtol=1e-14)
    assert schedule(updates[:0]).shape == (0, 10)
    assert all(type(schedule(n)) is float for n in (0, 20, np.int64(50)))


@every_schedule
def test_repr_and_config_make_an_equal_schedule(schedule):
    assert eval(repr(schedule), vars(lr_scheduler)) == schedule
    config = schedule.to_config()
    assert set(config) == {"class", "kwargs"}
    assert from_config(json.loads(json.dumps(config))) == schedule


@pytest.mark.parametrize("schedule", WITH_BASE_LR, ids=repr)
def test_new_base_lr_applies_to_warmup_and_rule(schedule):
    config = schedule.to_config()
    changed, config["kwargs"]["base_lr"] = from_config(config), 5.0
    changed.base_lr = 5.0
    made = from_config(config)
    assert changed == made != schedule
    updates = np.arange(60)
    np.testing.assert_array_equal(changed(updates), made(updates))
    assert (changed(updates) > schedule(updates)).any()


def test_equal_schedules_have_equal_hashes_which_base_lr_does_not_change():
    assert len({hash(schedule) for schedule in EVERY}) == len(EVERY)
    for schedule in EVERY:
        assert len({schedule, copy.deepcopy(schedule)}) == 1
    for schedule in WITH_BASE_LR + FROM_TORCH:
        same = copy.deepcopy(schedule)
        same.base_lr = 6.5
        assert same != schedule
        assert hash(same) == hash(schedule)


def test_equality_is_by_class_and_arguments():
    assert PolyScheduler(10) == PolyScheduler(max_update=10, base_lr=0.01)
    assert PolyScheduler(10) != PolyScheduler(11)
    assert PolyScheduler(10, pwr=2) != CosineScheduler(10)
    assert PolyScheduler(10) != "PolyScheduler(max_update=10)"


def test_repr_shows_what_differs_from_the_defaults():
    assert repr(FactorScheduler(10, 0.5, base_lr=0.01)) == "FactorScheduler(step=10, factor=0.5)"


def test_config_is_a_copy():
    schedule = MultiFactorScheduler([10, 30])
    schedule.to_config()["kwargs"]["step"].append(50)
    assert schedule.step == [10, 30]


# ---- each schedule's own numbers -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "updates", "rates"),
    [
        (FactorScheduler(10, 0.5, base_lr=0.8), [0, 10, 11, 20, 21], [0.8, 0.8, 0.4, 0.4, 0.2]),
        (MultiFactorScheduler([1, 4], 0.5, base_lr=0.8), [0, 1, 2, 4, 5], [0.8, 0.8, 0.4, 0.4, 0.2]),
        (FactorScheduler(1, 0.1, stop_factor_lr=0.003, base_lr=1.0), [4, 5, 10**6], [0.003] * 3),
        # A base_lr below the floor is kept until the first drop, as in MXNet.
        (FactorScheduler(10, 0.5, stop_factor_lr=0.1, base_lr=0.01), [0, 10, 11], [0.01, 0.01, 0.1]),
        (InverseSquareRootScheduler(1.0, timescale=100), [0, 300], [1.0, 0.5]),
        (PolyScheduler(10, base_lr=1.0, final_lr=0.25), [10, 11, 10**9], [0.25] * 3),
        (CosineScheduler(10, base_lr=1.0, final_lr=0.25), [10, 11, 10**9], [0.25] * 3),
        (OneCycleScheduler(100, 1.0, 0.2, div_factor=10, final_div_factor=10), [0, 20, 100, 1000], [0.1, 1.0, 0.01, 0.01]),
        (CosineRestartsScheduler(7, base_lr=0.3), [0, 7, 14, 21], [0.3] * 4),
        (CosineRestartsScheduler(7, 2, base_lr=0.3), [0, 7, 21, 49], [0.3] * 4),
        (CosineRestartsScheduler(7, 1.5, base_lr=0.3), [0, 7], [0.3] * 2),
        (
            PiecewiseScheduler([3, 5], [0.5, 2], base_lr=1, warmup_steps=1),
            range(8),
            [0.0, 1.0, 1.0, 1.0, 0.5, 0.5, 2.0, 2.0],
        ),
        (
            FactorScheduler(100, base_lr=1.0, warmup_steps=4, warmup_begin_lr=0.2, warmup_mode="constant"),
            range(5),
            [0.2, 0.2, 0.2, 0.2, 1.0],
        ),
    ],
    ids=repr,
)
def test_exact_values(schedule, updates, rates):
    assert schedule(np.array(updates)).tolist() == rates
    assert [schedule(n) for n in updates] == rates


@pytest.mark.parametrize(
    ("schedule", "updates", "rates"),
    [
        (FactorScheduler(1, 0.1, stop_factor_lr=0.003, base_lr=1.0), [3], [0.01]),
        (FactorScheduler(10, 0.5, base_lr=0.8, warmup_steps=35), [34, 35], [0.8 * 34 / 35, 0.1]),
        (FactorScheduler(100, base_lr=1.0, warmup_steps=4, warmup_begin_lr=0.2), range(5), [0.2, 0.4, 0.6, 0.8, 1.0]),
        (OneCycleScheduler(100, 1.0, 0.2, div_factor=10, final_div_factor=10), [10], [0.55]),
        (
            OneCycleScheduler(100, 1.0, 0.5, div_factor=10, three_phase=True),
            [0, 25, 50, 75, 100],
            [0.1, 0.55, 1.0, 0.55, 0.1],
        ),
        (InterpolatedScheduler([15], [0.1], base_lr=1.0, warmup_steps=5), [*range(5), 100], [0, 0.2, 0.4, 0.6, 0.8, 0.1]),
        (InterpolatedScheduler([15], [0.1], "log", 1.0, 5), [*range(5), 100], [0, 0.2, 0.4, 0.6, 0.8, 0.1]),
    ],
    ids=repr,
)
def test_values(schedule, updates, rates):
    assert schedule(np.array(updates)) == pytest.approx(rates, rel=1e-14)


def test_restart_jumps_back_from_near_the_final_value():
    for mult, restarts in ((1, [7, 14, 21]), (2, [7, 21, 49]), (1.5, [7])):
        assert (CosineRestartsScheduler(7, mult, base_lr=0.3)(np.array(restarts) - 1) < 0.05).all()


@pytest.mark.parametrize(
    ("decay", "shape"),
    [
        ("linear", lambda t: 1 - t),
        ("sqrt", lambda t: 1 - np.sqrt(t)),
        ("cosine", lambda t: 0.5 + 0.5 * np.cos(np.pi * t)),
    ],
)
def test_warmup_stable_decay(decay, shape):
    updates, schedule = np.arange(101), WarmupStableDecayScheduler(100, 40, 2.0, 0.5, decay, warmup_steps=10)
    expected = np.where(updates < 10, updates / 5, 0.5 + 1.5 * shape(np.maximum(updates - 60, 0) / 40))
    np.testing.assert_allclose(schedule(updates), expected, rtol=1e-14)
    assert schedule(10**6) == 0.5


def test_schedule_of_the_transformer():
    """The paper's own formula, for a width of 512 and a warm-up of 4000."""
    schedule = InverseSquareRootScheduler(base_lr=(512 * 4000) ** -0.5, warmup_steps=4000)
    n = np.arange(1, 20_000, 13)
    expected = 512**-0.5 * np.minimum(n**-0.5, n * 4000**-1.5)
    np.testing.assert_allclose(schedule(n), expected, rtol=1e-13)


@pytest.mark.parametrize(
    ("scale", "shape"), [("linear", lambda n: 1.0 - 0.09 * (n - 5)), ("log", lambda n: 10.0 ** (-(n - 5) / 10))]
)
def test_interpolation_on_either_scale(scale, shape):
    """A drop by 10 in as many updates, after a warm-up of 5."""
    n = np.arange(5, 16)
    np.testing.assert_allclose(InterpolatedScheduler([15], [0.1], scale, 1.0, 5)(n), shape(n), rtol=1e-14)


def test_any_callable_is_a_schedule():
    asked = []

    def rate(n):
        asked.append(n)
        return 1 / (1 + n)

    parts = sequence((rate, 2), FunctionScheduler(rate, base_lr=0.5, warmup_steps=1))
    assert parts(np.array([[0, 1], [2, 3]])).tolist() == [[1.0, 0.5], [0.0, 0.5]]
    assert all(type(n) is int for n in asked)
    assert parts(4) == 0.25


# ---- bad arguments ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: PolyScheduler(10, base_lr="0.1"), TypeError, "base_lr='0.1': must be a number, not str"),
        (lambda: PolyScheduler(10, base_lr=True), TypeError, "base_lr=True: must be a number, not bool"),
        (lambda: PolyScheduler(10, base_lr=None), TypeError, "base_lr=None: must be a number, not NoneType"),
        (lambda: PolyScheduler(10, base_lr=-0.1), ValueError, "base_lr=-0.1: must be finite and 0 or more"),
        (lambda: PolyScheduler(10, base_lr=math.nan), ValueError, "base_lr=nan: must be finite"),
        (lambda: PolyScheduler(10, base_lr=math.inf), ValueError, "base_lr=inf: must be finite"),
        (lambda: LRScheduler(warmup_steps=1.0), TypeError, r"warmup_steps=1.0: must be an integer, not float"),
        (lambda: LRScheduler(warmup_steps=True), TypeError, "warmup_steps=True: must be an integer, not bool"),
        (lambda: LRScheduler(warmup_steps=-1), ValueError, "warmup_steps=-1: must be 0 or more"),
        (lambda: LRScheduler(warmup_begin_lr=0.1), ValueError, "warmup_begin_lr=0.1: .*exceed base_lr=0.01"),
        (lambda: LRScheduler(warmup_begin_lr=-1), ValueError, "warmup_begin_lr=-1: must be finite and 0 or more"),
        (lambda: LRScheduler(warmup_mode="cosine"), ValueError, "warmup_mode='cosine': must be one of 'linear', 'con"),
        (lambda: FactorScheduler(0), ValueError, "step=0: must be finite and 1 or more"),
        (lambda: FactorScheduler("10"), TypeError, "step='10': must be a number, not str"),
        (lambda: FactorScheduler(10, factor=1.1), ValueError, "factor=1.1: .*0 or more and 1 or less"),
        (lambda: FactorScheduler(10, factor=-0.1), ValueError, "factor=-0.1: .*0 or more and 1 or less"),
        (lambda: FactorScheduler(10, stop_factor_lr=None), TypeError, "stop_factor_lr=None: must be a number"),
        (lambda: MultiFactorScheduler(10), TypeError, "step=10: must be a list or tuple"),
        (lambda: MultiFactorScheduler([]), ValueError, r"step=\[\]: must hold at least one"),
        (lambda: MultiFactorScheduler([5, 5]), ValueError, r"step=\[5, 5\]: must be strictly increasing"),
        (lambda: MultiFactorScheduler([0, 5]), ValueError, r"step\[0\]=0: must be finite and 1 or more"),
        (lambda: MultiFactorScheduler([1, "5"]), TypeError, r"step\[1\]='5': must be a number"),
        (lambda: MultiFactorScheduler([5], 2), ValueError, "factor=2: .*1 or less"),
        (lambda: PolyScheduler(10.0), TypeError, "max_update=10.0: must be an integer, not float"),
        (lambda: PolyScheduler(0), ValueError, "max_update=0: must be 1 or more"),
        (lambda: PolyScheduler(10, pwr=-1), ValueError, "pwr=-1: must be finite and 0 or more"),
        (lambda: PolyScheduler(10, final_lr=-1), ValueError, "final_lr=-1: must be finite and 0 or more"),
        (lambda: PolyScheduler(5, warmup_steps=5), ValueError, "warmup_steps=5: must be less than max_update=5"),
        (lambda: CosineScheduler("10"), TypeError, "max_update='10': must be an integer, not str"),
        (lambda: CosineScheduler(5, warmup_steps=6), ValueError, "warmup_steps=6: must be less than max_update=5"),
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
        (lambda: PiecewiseScheduler([3], 1), TypeError, "rates=1: must be a list or tuple of learning rates"),
        (lambda: InterpolatedScheduler([5, 3], [1, 1]), ValueError, r"step=\[5, 3\]: must be strictly increasing"),
        (lambda: InterpolatedScheduler([3], [1, 2]), ValueError, r"rates=\[1, 2\]: must hold as many .*, 1"),
        (lambda: InterpolatedScheduler([3], [0.0], "log"), ValueError, r"rates=\[0.0\]: must all be above 0"),
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
        (lambda: CosineScheduler(5)(-1), ValueError, "num_update=-1: must be 0 or more"),
        (lambda: CosineScheduler(5)(1.5), TypeError, "num_update=1.5: must be an integer"),
        (lambda: CosineScheduler(5)(np.array([3, -2])), ValueError, "num_update holds -2"),
        (lambda: CosineScheduler(5)(np.array([0.5])), TypeError, "num_update has dtype float64"),
    ],
)
def test_bad_arguments_are_named(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_bad_base_lr_leaves_the_former_one():
    cyclic = CyclicScheduler(5, max_lr=1.0, base_lr=0.5)
    with pytest.raises(ValueError, match="base_lr=2.0: must not exceed max_lr=1.0"):
        cyclic.base_lr = 2
    assert cyclic.base_lr == 0.5
    schedule = CosineScheduler(10, base_lr=0.5, warmup_steps=2, warmup_begin_lr=0.1)
    with pytest.raises(ValueError, match="warmup_begin_lr=0.1: must not exceed base_lr=0.05"):
        schedule.base_lr = 0.05
    assert schedule.base_lr == 0.5
