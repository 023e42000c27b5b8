"""Saved states that do not fit are refused before anything has changed."""

import copy
import re

import pytest
import torch
from saved_states import (
    MATRICES,
    Averaged,
    Cautious,
    check_refused,
    make_gradients,
    make_params,
    make_trained,
    take_step,
)

from tristep import Trainer
from tristep.trainer.optimizer import base, register, settings


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


@pytest.mark.parametrize("before_the_first_step", [False, True])
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: _other({"body": (2, 3)}),
            "is of 1 parameters, 'body'; this trainer has 2, 'body', 'head': 'head' is in one",
        ),
        (lambda: _other({"body": (3, 2), "head": (2,)}), r"'body' has shape \(3, 2\), in this trainer it has \(2, 3\)"),
        (
            lambda: _other({"body": (2, 3), "head": (2,)}, torch.float64),
            "mean of 'body' is torch.float64; .*be torch.float32",
        ),
        (
            lambda: _other({"body": (2, 3), "head": (2,)}, optimizer="adamw"),
            "is of optimizer 'adamw', this trainer has 'adam'",
        ),
    ],
    ids=["names", "shape", "dtype", "optimizer"],
)
def test_states_of_another_model_are_refused(make, message, before_the_first_step, trained, everything):
    trainer, params = trained
    if before_the_first_step:
        params = make_params(shapes={"body": (2, 3), "head": (2,)})
        trainer = Trainer(params, "adam")
    saved = make().state_dict()
    check_refused(trainer, params, everything, lambda: trainer.load_state_dict(saved), ValueError, message)


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
        (_set("settings", "lr", value="fast"), TypeError, "setting 'lr' is 'fast': must be a number, such as .* 0.001"),
        (_set("counts", value={}), ValueError, "num_update is 2, but no parameter has a count: states are missing"),
        (_set("num_update", value=-1), ValueError, "num_update=-1: must be 0 or more"),
        (_set("counts", "tail", value=2), ValueError, "'tail' have a count or state, but are not among its parameters"),
        (
            _set("state", "head", "mean", value=torch.ones(3)),
            ValueError,
            r"mean of 'head' has shape \(3,\): for its p.* \(2,\)",
        ),
        (_set("state", "head", value={"mean": torch.ones(2)}), ValueError, "'head' has 'mean'; its rule has 'mean', 'var'"),
        (lambda saved: saved["state"].pop("head"), ValueError, "lacks the state of 'head': it must have all states or none"),
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


def test_a_nesting_that_does_not_fit_its_tensors_is_refused(everything):
    params = make_params()
    trainer = Trainer(params, "averaged")
    take_step(trainer, params, make_gradients(params))
    for change in (_set("layout", "head", value=["0", "1"]), lambda saved: saved["layout"].pop("head")):
        saved = copy.deepcopy(trainer.state_dict())
        change(saved)
        load = lambda saved=saved: trainer.load_state_dict(saved)  # noqa: E731
        check_refused(trainer, params, everything, load, ValueError, "'head' has '1', '2.0', its layout is")


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
        ("beta2", 2.0, "saved state: beta2=2.0: must be finite and 0 or more and less than 1"),
    ],
)
def test_settings_that_the_constructor_refuses_are_refused(setting, value, message, trained, everything):
    trainer, params = trained
    saved = copy.deepcopy(trainer.state_dict())
    saved["settings"][setting] = value
    check_refused(trainer, params, everything, lambda: trainer.load_state_dict(saved), ValueError, re.escape(message))


def _several():
    """A trainer of three optimizers, two of them of one kind, after a step."""
    params = make_params(shapes={"body": (2, 3), "head": (2,), "tail": (2,)})
    trainer = Trainer(params, [("body", "adam"), ("head", "sgd"), ("*", "sgd")], {"clip_norm": 1.0})
    take_step(trainer, params, make_gradients(params))
    return trainer, params


def _exchanged(saved):
    one, other = saved["optimizers"][1:]
    one["names"], other["names"] = other["names"], one["names"]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda saved: saved["optimizers"][1].pop("names"), ValueError, r"optimizers\[1\] must have lr_scheduler, names, "),
        (_set("optimizers", 1, "settings", "momentum", value=-1.0), ValueError, "saved state: momentum=-1.0"),
        (_exchanged, ValueError, r"'head' belongs to optimizers\[1\] in the saved state or here, not in both"),
        (lambda saved: saved["settings"].pop("clip_norm"), ValueError, "must be clip_norm, skip_nonfinite and perhaps"),
    ],
)
def test_what_several_optimizers_cannot_have_saved_is_refused(change, error, message, everything):
    trainer, params = _several()
    saved = copy.deepcopy(trainer.state_dict())
    change(saved)
    check_refused(trainer, params, everything, lambda: trainer.load_state_dict(saved), error, message)


BUCKETS = {"ranks": 2, "order": [1, 0], "trained": [True, True], "reducers": ["int8"]}


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"buckets": BUCKETS | {"order": [0, 0]}}, ValueError, r"order of buckets is \[0, 0\]"),
        ({"buckets": BUCKETS | {"ranks": 0}}, ValueError, "ranks of buckets=0"),
        ({"reducers": {"0": {"scale": 1}}}, TypeError, r"scale in reducers\['0'\] must be a tensor"),
    ],
)
def test_buckets_that_no_training_of_several_processes_has_saved_are_refused(change, error, message, trained, everything):
    trainer, params = trained
    saved = trainer.state_dict()
    trainer.load_state_dict(saved | {"buckets": BUCKETS})  # of two processes
    check_refused(trainer, params, everything, lambda: trainer.load_state_dict(saved | change), error, message)
