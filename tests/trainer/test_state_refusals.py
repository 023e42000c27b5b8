"""Saved states that do not fit are refused before anything has changed."""

import copy
import math
import os
import re

import pytest
import torch
from saved_states import (
    MATRICES,
    WAYS,
    Averaged,
    Cautious,
    check_refused,
    make_gradients,
    make_params,
    make_trained,
    take_step,
)

from tristep import Trainer
from tristep.trainer.optimizer import Optimizer, base, register, settings


@pytest.fixture(autouse=True)
def _registered(clean_registry):
    register(Averaged)
    register(Cautious)


trained = pytest.fixture(make_trained)


def _other(shapes, dtype=torch.float32, optimizer="adam", kwargs=None):
    params = make_params(dtype, shapes=shapes)
    trainer = Trainer(params, optimizer, kwargs)
    take_step(trainer, params, make_gradients(params))
    return trainer


@WAYS
@pytest.mark.parametrize("before_the_first_step", [False, True])
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: _other({"body": (2, 3)}),
            "is of 1 parameters, 'body'; this trainer has 2, 'body', 'head': 'head' is in one",
        ),
        (lambda: _other({"body": (2, 3), "head": (2,), "tail": (1,)}), "is of 3 parameters, .*: 'tail' is in one of them"),
        (lambda: _other({"body": (2, 3), "Head": (2,)}), "is of 2 parameters, .*: 'Head', 'head' are in one of them"),
        (lambda: _other({"body": (3, 2), "head": (2,)}), r"'body' has shape \(3, 2\), in this trainer it has \(2, 3\)"),
        (lambda: _other({"body": (2, 3), "head": (2, 1)}), r"'head' has shape \(2, 1\), in this trainer it has \(2,\)"),
        (
            lambda: _other({"body": (2, 3), "head": (2,)}, torch.float64),
            "mean of 'body' is torch.float64; .*be torch.float32",
        ),
        (
            lambda: _other({"body": (2, 3), "head": (2,)}, optimizer="adamw"),
            "is of optimizer 'adamw', this trainer has 'adam'",
        ),
    ],
    ids=["fewer", "more", "names", "shape", "dimensions", "dtype", "optimizer"],
)
def test_states_of_another_model_are_refused(make, message, way, before_the_first_step, trained, tmp_path, everything):
    trainer, params = trained
    if before_the_first_step:
        params = make_params(shapes={"body": (2, 3), "head": (2,)})
        trainer = Trainer(params, "adam")
    other = make()
    check_refused(trainer, params, everything, lambda: way(other, trainer, tmp_path), ValueError, message)


def test_shapes_are_compared_where_there_are_no_states():
    """Plain SGD keeps none, but its counts belong to parameters too."""
    trainer = _other({"body": (2, 3)}, optimizer="sgd")
    with pytest.raises(ValueError, match=r"'body' has shape \(3, 2\), in this trainer it has \(2, 3\)"):
        trainer.load_state_dict(_other({"body": (3, 2)}, optimizer="sgd").state_dict())


def _without(key):
    def change(saved):
        del saved[key]

    return change


def _set(*path, value):
    def change(saved):
        *parents, last = path
        for key in parents:
            saved = saved[key]
        saved[last] = value

    return change


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (_without("counts"), ValueError, "saved state lacks counts"),
        (_set("format", value=None), ValueError, "has format None: this version of tristep reads format 1"),
        (_set("settings", value=[1]), TypeError, "settings must be a dict, got list"),
        (_set("settings", "learning_rat", value=1.0), ValueError, "settings that Adam does not know: learning_rat"),
        (_set("settings", "lr", value="fast"), TypeError, "setting 'lr' is 'fast': must be a number, such as .* 0.001"),
        (_set("settings", "multi_precision", value=1), TypeError, "'multi_precision' is 1: must be a bool"),
        (_set("settings", "beta1", value=[0.9]), TypeError, r"'beta1' is \[0.9\]: must be a number"),
        (_set("num_update", value=1.5), TypeError, "num_update=1.5: must be an integer"),
        (_set("counts", value={}), ValueError, "num_update is 2, but no parameter has a count: states are missing"),
        (_set("num_update", value=-1), ValueError, "num_update=-1: must be 0 or more"),
        (_set("counts", "body", value="2"), TypeError, "the count of 'body'='2': must be an integer"),
        (_set("num_update", value=10**30), ValueError, "must be 9,007,199,254,740,992 or less"),
        (_set("counts", "body", value=10**30), ValueError, "must be 9,007,199,254,740,992 or less"),
        (_set("counts", "tail", value=2), ValueError, "'tail' have a count or state, but are not among its parameters"),
        (
            _set("state", "head", "mean", value=[1.0, 2.0]),
            TypeError,
            "mean in the state of 'head' must be a tensor, got list",
        ),
        (
            _set("state", "head", "mean", value=torch.ones(3)),
            ValueError,
            r"mean of 'head' has shape \(3,\): for its p.* \(2,\)",
        ),
        (
            _set("state", "head", "mean", value=torch.ones(2).half()),
            ValueError,
            "mean of 'head' is torch.float16; .*float32",
        ),
        (_set("state", "head", value={"mean": torch.ones(2)}), ValueError, "'head' has 'mean'; its rule has 'mean', 'var'"),
        (
            _set("state", "head", "mom", value=torch.ones(2)),
            ValueError,
            "'head' has 'mean', 'var', 'mom'; its rule has 'mean'",
        ),
        (_without("state"), ValueError, "saved state lacks state"),
        (lambda saved: saved["state"].pop("head"), ValueError, "lacks the state of 'head': it must have all states or none"),
        (_set("lr_scheduler", value={"class": "Unheard", "kwargs": {}}), ValueError, "name='Unheard': no scheduler"),
        (_set("lr_scheduler", value={"class": "PolyScheduler", "kwargs": {}}), TypeError, "max_update"),
        (_set("lr_scheduler", value="slowly"), TypeError, "config='slowly': must be a mapping"),
    ],
)
def test_a_changed_dict_is_refused(change, error, message, trained, everything):
    trainer, params = trained
    saved = copy.deepcopy(trainer.state_dict())
    change(saved)
    check_refused(trainer, params, everything, lambda: trainer.load_state_dict(saved), error, message)


@pytest.mark.parametrize(
    ("optimizer", "slot", "wrong", "right"),
    [
        ("groupadagrad", "history", (3, 5), (3, 1)),
        ("groupadagrad", "history", (3,), (3, 1)),
        ("cautious", "largest", (1,), ()),
    ],
)
def test_states_of_other_shapes_than_the_weights_are_checked_too(optimizer, slot, wrong, right, everything):
    params = make_params(shapes=MATRICES)
    trainer = Trainer(params, optimizer)
    take_step(trainer, params, make_gradients(params))
    saved = copy.deepcopy(trainer.state_dict())
    saved["state"]["body"][slot] = torch.zeros(wrong)
    message = re.escape(f"{slot} of 'body' has shape {wrong}: for its parameter's (3, 5) it must have {right}")
    check_refused(trainer, params, everything, lambda: trainer.load_state_dict(saved), ValueError, message)


@pytest.mark.parametrize("wrong", [None, [1, 2], "a.states"])
def test_what_is_no_dict_is_refused(wrong, trained, everything):
    trainer, params = trained
    load = lambda: trainer.load_state_dict(wrong)  # noqa: E731
    check_refused(
        trainer, params, everything, load, TypeError, "state_dict must be a dict, as Trainer.state_dict gives it, got"
    )


def test_a_nesting_that_does_not_fit_its_tensors_is_refused(everything):
    params = make_params()
    trainer = Trainer(params, "averaged")
    take_step(trainer, params, make_gradients(params))
    for change in (_set("layout", "head", value=["0", "1"]), lambda saved: saved["layout"].pop("head")):
        saved = copy.deepcopy(trainer.state_dict())
        change(saved)
        load = lambda saved=saved: trainer.load_state_dict(saved)  # noqa: E731
        check_refused(trainer, params, everything, load, ValueError, "'head' has '1', '2.0', its layout is")


def test_states_that_cannot_be_saved_are_named(tmp_path):
    class Strange(Optimizer):
        def create_state(self, index, weight):
            return {"mean": torch.zeros_like(weight)}

        def update(self, index, weight, grad, state):
            self._update_count(index)

    params = make_params()
    trainer = Trainer(params, Strange())
    take_step(trainer, params, make_gradients(params))
    with pytest.raises(TypeError, match="a state must be None, a tensor, or a tuple or list of these; got dict"):
        trainer.save_states(tmp_path / "a")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("name", sorted(base.registered()))
@pytest.mark.sample(12)
def test_every_optimizer_takes_back_its_own_settings(name):
    """The constructor is asked whether it would take them."""
    made = base.create(name)
    before = repr(made.settings())
    settings.check_settings(made, made.settings())
    assert repr(made.settings()) == before


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("lr", math.nan, "saved state: lr=nan: must be finite"),
        ("lr", -0.1, "saved state: lr=-0.1: must be finite and 0 or more"),
        ("beta2", 2.0, "saved state: beta2=2.0: must be finite and 0 or more and less than 1"),
        ("wd", -0.5, "saved state: wd=-0.5: must be finite and 0 or more"),
        ("epsilon", math.inf, "saved state: epsilon=inf: must be finite"),
        ("ema_decay", 1.5, "saved state: ema_decay=1.5: must be finite"),
        ("begin_num_update", -1, "saved state: begin_num_update=-1: must be 0 or more"),
    ],
)
@WAYS
def test_settings_that_the_constructor_refuses_are_refused(setting, value, message, way, trained, tmp_path, everything):
    trainer, params = trained
    other = _other({"body": (2, 3), "head": (2,)})
    vars(other.optimizer)[setting] = value  # past all checks
    check_refused(trainer, params, everything, lambda: way(other, trainer, tmp_path), ValueError, re.escape(message))
