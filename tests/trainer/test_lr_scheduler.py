"""Learning-rate schedules: MXNet's numbers, purity, printing and saving, and what is refused."""

import doctest
import json
import math

import numpy as np
import pytest

from tristep.trainer import lr_scheduler
from tristep.trainer.lr_scheduler import (
    CosineScheduler,
    FactorScheduler,
    LRScheduler,
    MultiFactorScheduler,
    PolyScheduler,
    create,
    from_config,
    register,
)

# MXNet multiplies drop by drop, we take a power: some roundings apart, far below float32.
CLOSE = {"rtol": 1e-13, "atol": 1e-15}

SCHEDULES = [
    FactorScheduler(step=7, factor=0.3, stop_factor_lr=1e-3, base_lr=0.7),
    FactorScheduler(30, 0.5, base_lr=1, warmup_steps=10, warmup_begin_lr=0.2, warmup_mode="constant"),
    MultiFactorScheduler(step=(10, 30), factor=0.1, base_lr=0.3, warmup_steps=12),
    PolyScheduler(max_update=40, pwr=0.5, final_lr=0.001, warmup_steps=5),
    CosineScheduler(max_update=40, base_lr=3.0, final_lr=0.01, warmup_steps=25, warmup_begin_lr=0.5),
]


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


@pytest.mark.parametrize("schedule", SCHEDULES, ids=repr)
def test_an_array_of_updates_gives_an_array_of_rates(schedule):
    updates = np.arange(60, dtype=np.uint8).reshape(6, 10)
    rates = schedule(updates)
    assert rates.dtype == np.float64
    assert rates.shape == updates.shape
    np.testing.assert_allclose(rates.ravel(), _asked_one_by_one(schedule, range(60)), rtol=1e-14)
    assert schedule(updates[:0]).shape == (0, 10)


def test_an_int_gives_a_float():
    assert all(type(schedule(n)) is float for schedule in SCHEDULES for n in (0, 20, np.int64(50)))


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


@pytest.mark.parametrize("schedule", SCHEDULES, ids=repr)
def test_repr_evaluates_to_an_equal_schedule(schedule):
    assert eval(repr(schedule), vars(lr_scheduler)) == schedule


def test_repr_shows_what_differs_from_the_defaults():
    assert repr(FactorScheduler(10, 0.5, base_lr=0.01)) == "FactorScheduler(step=10, factor=0.5)"


@pytest.mark.parametrize("schedule", SCHEDULES, ids=repr)
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
    with pytest.raises(ValueError, match=r"name='cosin': .*Did you mean 'cosine'\?"):
        create("cosin", max_update=3)
    with pytest.raises(ValueError, match="there are cosine, factor, multifactor, poly"):
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
    monkeypatch.setattr(lr_scheduler, "_registry", dict(lr_scheduler._registry))


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
        (lambda: LRScheduler(warmup_steps=1.0), TypeError, r"warmup_steps=1.0: must be a whole number, not float"),
        (lambda: LRScheduler(warmup_steps=True), TypeError, "warmup_steps=True: must be a whole number, not bool"),
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
        (lambda: PolyScheduler(10.0), TypeError, "max_update=10.0: must be a whole number, not float"),
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
        (lambda: CosineScheduler("10"), TypeError, "max_update='10': must be a whole number, not str"),
        (
            lambda: CosineScheduler(5, warmup_steps=6),
            ValueError,
            "warmup_steps=6: must be less than max_update=5",
        ),
        (lambda: CosineScheduler(5)(-1), ValueError, "num_update=-1: must be 0 or more"),
        (lambda: CosineScheduler(5)(1.5), TypeError, "num_update=1.5: must be a whole number"),
        (lambda: CosineScheduler(5)(np.array([3, -2])), ValueError, "num_update holds -2"),
        (lambda: CosineScheduler(5)(np.array([0.5])), TypeError, "num_update has dtype float64"),
    ],
)
def test_bad_arguments_are_named(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_a_bad_base_lr_leaves_the_old_one():
    schedule = CosineScheduler(10, base_lr=0.5, warmup_steps=2, warmup_begin_lr=0.1)
    with pytest.raises(ValueError, match="warmup_begin_lr=0.1: must not exceed base_lr=0.05"):
        schedule.base_lr = 0.05
    assert schedule.base_lr == 0.5


def test_docstring_examples(empty_registry):
    failed, attempted = doctest.testmod(lr_scheduler)
    assert attempted > 10
    assert failed == 0
