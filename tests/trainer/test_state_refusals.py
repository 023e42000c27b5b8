"""Saved states that do not fit are refused before anything has changed."""

import copy
import os
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
        (_set("settings", value=[1]), TypeError, "settings must be a dict, got list"),
        (_set("settings", "learning_rat", value=1.0), ValueError, "settings that Adam does not know: learning_rat"),
        (_set("settings", "lr", value="fast"), TypeError, "setting 'lr' is 'fast': must be a number, such as .* 0.001"),
        (_set("settings", "multi_precision", value=1), TypeError, "'multi_precision' is 1: must be a bool"),
        (_set("parameters", "body", value=[2.0, 3]), TypeError, r"the shape of 'body' is \[2.0, 3\]: must be a list of int"),
        (_set("counts", value={}), ValueError, "num_update is 2, but no parameter has a count: states are missing"),
        (_set("num_update", value=-1), ValueError, "num_update=-1: must be 0 or more"),
        (_set("num_update", value=10**30), ValueError, "must be 9,007,199,254,740,992 or less"),
        (_set("counts", "body", value=10**30), ValueError, "must be 9,007,199,254,740,992 or less"),
        (_set("counts", 3, value=2), TypeError, "names in counts must be strings, got 3"),
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
        (_set("state", "head", value={"mean": torch.ones(2)}), ValueError, "'head' has 'mean'; its rule has 'mean', 'var'"),
        (lambda saved: saved["state"].pop("head"), ValueError, "lacks the state of 'head': it must have all states or none"),
        (_set("lr_scheduler", value={"class": "Unheard", "kwargs": {}}), ValueError, "name='Unheard': no scheduler"),
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


def test_what_is_no_dict_is_refused(trained, everything):
    trainer, params = trained
    load = lambda: trainer.load_state_dict([1, 2])  # noqa: E731
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
        ("beta2", 2.0, "saved state: beta2=2.0: must be finite and 0 or more and less than 1"),
        ("ema_decay", 1.5, "saved state: ema_decay=1.5: must be finite"),
        ("begin_num_update", -1, "saved state: begin_num_update=-1: must be 0 or more"),
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
        (_set("optimizers", value={}), TypeError, "optimizers must be a list, got dict"),
        (lambda saved: saved["optimizers"][1].pop("names"), ValueError, r"optimizers\[1\] must have lr_scheduler, names, "),
        (_set("optimizers", 1, "more", value={}), ValueError, r"optimizers\[1\] must have .*, and nothing else"),
        (_set("optimizers", 1, "settings", value=[]), TypeError, r"settings of optimizers\[1\] must be a dict, got list"),
        (_set("optimizers", 1, "settings", "momentum", value=-1.0), ValueError, "saved state: momentum=-1.0"),
        (_set("optimizers", 1, "names", value=[1]), TypeError, r"names of optimizers\[1\] must be a list of strings"),
        (_exchanged, ValueError, r"'head' belongs to optimizers\[1\] in the saved state or here, not in both"),
        (lambda saved: saved["settings"].pop("clip_norm"), ValueError, "must be clip_norm, skip_nonfinite and perhaps"),
        (_set("settings", "clip_norm", value=-1.0), ValueError, "saved state: clip_norm=-1.0"),
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
        ({"buckets": 3}, TypeError, "buckets must be a dict"),
        ({"buckets": {"ranks": 2}}, ValueError, "buckets has 'ranks': it must have ranks, order, trained and reducers"),
        ({"buckets": BUCKETS | {"order": [0, 0]}}, ValueError, r"order of buckets is \[0, 0\]"),
        ({"buckets": BUCKETS | {"trained": [1, 1]}}, ValueError, r"trained of buckets is \[1, 1\]"),
        ({"buckets": BUCKETS | {"ranks": 0}}, ValueError, "ranks of buckets=0"),
        ({"buckets": BUCKETS | {"reducers": "int8"}}, TypeError, "reducers of buckets is int8"),
        ({"reducers": {"0": torch.zeros(1)}}, TypeError, r"reducers\['0'\] must be a dict"),
        ({"reducers": {"0": {"scale": 1}}}, TypeError, r"scale in reducers\['0'\] must be a tensor"),
    ],
)
def test_buckets_that_no_training_of_several_processes_has_saved_are_refused(change, error, message, trained, everything):
    trainer, params = trained
    saved = trainer.state_dict()
    trainer.load_state_dict(saved | {"buckets": BUCKETS})  # of two processes
    check_refused(trainer, params, everything, lambda: trainer.load_state_dict(saved | change), error, message)


def test_a_nesting_of_fifty_is_taken_and_of_more_refused(everything):
    params = make_params()
    trainer = Trainer(params, "averaged")
    take_step(trainer, params, make_gradients(params))

    def nested(depth):
        saved = copy.deepcopy(trainer.state_dict())
        layout = saved["layout"]["head"]
        for _ in range(depth):
            layout = [layout]
        return saved | {"layout": saved["layout"] | {"head": layout}}

    inside = 2  # lists and tuples of the optimizer's own state
    trainer.load_state_dict(nested(50 - inside))
    load = lambda: trainer.load_state_dict(nested(50 - inside + 1))  # noqa: E731
    check_refused(trainer, params, everything, load, ValueError, "the layout of 'head' is no nesting of a state")
