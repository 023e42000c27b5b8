"""Saved states: training goes on as if nothing had happened; damaged and unfitting ones are refused and change nothing."""

import copy
import json
import math
import os
import re
import zlib

import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch
from torch.nn import Parameter

from tristep import Trainer, lr_scheduler, rule
from tristep.kernels import reduction, tl
from tristep.trainer import checkpoint
from tristep.trainer.optimizer import SGD, Optimizer, RuleOptimizer, base, get_updater, register, settings

SHAPES = {"body": (3, 5), "scale": (), "head": (70,), "nothing": (0, 2)}
MATRICES = {"body": (3, 5), "column": (4, 1), "row": (1, 70), "nothing": (0, 2)}
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]

OPTIMIZERS = {
    "sgd": ("sgd", {"wd": 0.1}),
    "momentum": ("sgd", {"momentum": 0.9, "wd": 0.1}),
    "nag": ("nag", {"momentum": 0.9, "wd": 0.1}),
    "signum": ("signum", {"wd_lh": 0.1}),
    "sign sgd": ("signum", {"momentum": 0.0}),
    "adam": ("adam", {"beta1": 0.8, "clip_gradient": 0.5}),
    "adamw": ("adamw", {"wd": 0.1}),
    "adagrad": ("adagrad", {"eps": 0.01}),
    "rmsprop": ("rmsprop", {"clip_weights": 3.0}),
    "rmsprop centered": ("rmsprop", {"centered": True}),
    "adadelta": ("adadelta", {"wd": 0.1}),
    "adamax": ("adamax", {"wd": 0.1}),
    "nadam": ("nadam", {"schedule_decay": 0.1}),
    "adabelief": ("adabelief", {"wd": 0.1}),
    "sgld": ("sgld", {"seed": 3}),
    "dcasgd": ("dcasgd", {"lamda": 0.5}),
    "dcasgd momentum": ("dcasgd", {"lamda": 0.5, "momentum": 0.9}),
    "ftrl": ("ftrl", {"lamda1": 0.05}),
    "ftml": ("ftml", {"wd": 0.1}),
    "lars": ("lars", {"momentum": 0.9, "lr_scheduler": 0.5}),
    "lamb": ("lamb", {"upper_bound": 1.0, "wd": 0.1}),
    "lans": ("lans", {"wd": 0.1}),
    "lbsgd": ("lbsgd", {"momentum": 0.9, "batch_scale": 2, "updates_per_epoch": 1}),
    "lbsgd lars": ("lbsgd", {"momentum": 0.9, "batch_scale": 4, "warmup_strategy": "lars"}),
    "groupadagrad": ("groupadagrad", {"eps": 0.01}),
    "test": ("test", {"rescale_grad": -0.1}),
    "kept numbers": ("cautious", {"learning_rate": 0.1, "momentum": 0.5}),
    "mxnet's form": ("averaged", {"learning_rate": 0.1, "decay": 0.7}),
}


@pytest.fixture(autouse=True)
def _registered(clean_registry):
    register(Averaged)
    register(Cautious)


@reduction
def _squares(w, g, state, hyper):
    return (g * g,)


@_squares.finish
def _largest(sums, kept, hyper):
    (largest,) = kept
    (square,) = sums
    return (tl.maximum(0.75 * largest, square),)


@rule(reduction=_squares)
def cautious(w, g, state, hyper, sums):
    """m <- momentum m + g / sqrt(n), n the largest |g|^2 so far, which decays;  w <- w - lr m."""
    (mom,) = state
    lr, momentum = hyper
    (largest,) = sums
    mom = momentum * mom + g / tl.sqrt(largest + 1.0)
    return w - lr * mom, (mom,)


class Cautious(RuleOptimizer):
    """An optimizer whose rule keeps a number for each tensor."""

    rule = cautious

    def __init__(self, momentum=0.0, **kwargs):
        self.momentum = momentum
        super().__init__(**kwargs)


class Averaged(Optimizer):
    """An optimizer in MXNet's form, whose state is nested: a tuple with None, a tensor and a list."""

    def __init__(self, decay=0.5, **kwargs):
        super().__init__(**kwargs)
        self.decay, self.total = decay, 0.0

    def create_state(self, index, weight):
        return None, torch.zeros_like(weight), [torch.zeros((), dtype=torch.int64, device=weight.device)]

    def update(self, index, weight, grad, state):
        self._update_count(index)
        _, mean, counter = state
        counter[0] = counter[0] + 1
        self.total += 1.0
        mean.mul_(self.decay).add_(grad * self.rescale_grad)
        weight.sub_(self._get_lr(index) / float(counter[0]) * mean)


def _params(dtype=torch.float32, device="cpu", shapes=SHAPES):
    return {name: Parameter(torch.randn(shape, device=device).to(dtype)) for name, shape in shapes.items()}


def _twins(params):
    return {name: Parameter(param.detach().clone()) for name, param in params.items()}


def _gradients(params):
    return {name: torch.randn_like(param) for name, param in params.items()}


def _step(trainer, params, gradients, batch_size=2):
    for name, param in params.items():
        param.grad = gradients[name].clone().to(param.dtype)
    trainer.step(batch_size)


def _equal(params, others):
    return all(torch.equal(param, others[name]) for name, param in params.items())


def _by_file(trainer, other, tmp_path):
    trainer.save_states(tmp_path / "a.states")
    other.load_states(tmp_path / "a.states")


def _by_dict(trainer, other, tmp_path):
    other.load_state_dict(trainer.state_dict())


WAYS = pytest.mark.parametrize("way", [_by_file, _by_dict], ids=["file", "dict"])


# ---- training goes on ------------------------------------------------------------------------------------------------


@WAYS
@pytest.mark.parametrize("multi_precision", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_goes_on_to_the_bit(name, dtype, multi_precision, way, tmp_path, everything):
    optimizer, kwargs = OPTIMIZERS[name]
    kwargs = kwargs | {"multi_precision": multi_precision}
    if "lr_scheduler" in kwargs:  # the rate falls at every step
        kwargs["lr_scheduler"] = lr_scheduler.FactorScheduler(1, kwargs["lr_scheduler"], base_lr=0.5)
    shapes = MATRICES if optimizer == "groupadagrad" else SHAPES
    params = _params(dtype, shapes=shapes)
    trainer = Trainer(params, optimizer, kwargs)
    for _ in range(3):
        _step(trainer, params, _gradients(params))
    resumed = _twins(params)
    other = Trainer(resumed, optimizer, kwargs)
    way(trainer, other, tmp_path)
    now = everything(trainer, []), everything(other, [])
    assert now[0] == now[1]
    for _ in range(3):
        gradients = _gradients(params)
        _step(trainer, params, gradients)
        _step(other, resumed, gradients)
        assert _equal(params, resumed)
    assert everything(trainer, []) == everything(other, [])
    assert not _equal(params, _params(dtype, shapes=shapes))
    assert {tuple(state.shape) for state in trainer.state_dict()["state"]["body"].values()} <= {(3, 5), (3, 1), ()}


def test_what_is_carried_besides_states_goes_on_too(tmp_path):
    """Nadam's product of momenta, the rate that LARS has seen last, and the seed of SGLD."""
    for name, kwargs, attributes in (
        ("nadam", {}, {"m_schedule": pytest.approx((0.9 * (1 - 0.5 * 0.96**0.004)) ** 2, rel=1e-12)}),
        ("lars", {"learning_rate": 0.25, "momentum": 0.5}, {"last_lr": 0.25, "ratio": 1.0}),
        ("sgld", {"seed": 7}, {"seed": 7}),
    ):
        params = {"a": Parameter(torch.ones(2)), "b": Parameter(torch.ones(2))}
        trainer, other = Trainer(params, name, kwargs), Trainer(_twins(params), name)
        _step(trainer, params, _gradients(params))
        _by_file(trainer, other, tmp_path)
        for attribute, value in attributes.items():
            assert getattr(trainer.optimizer, attribute) == getattr(other.optimizer, attribute) == value


@pytest.mark.parametrize("first", ["nadam", "lars"])
def test_what_is_carried_from_before_the_first_step_makes_a_used_trainer_new(first):
    params = _params()
    new, used = Trainer(params, first), Trainer(_twins(params), first)
    _step(used, {name: used._params[i] for i, name in enumerate(used._names)}, _gradients(params))
    assert used.optimizer.host_state() != new.optimizer.host_state()
    used.load_state_dict(new.state_dict())
    assert used.optimizer.host_state() == new.optimizer.host_state()


@WAYS
def test_every_engine_reads_what_every_engine_wrote(engine, device, way, tmp_path):
    params = _params(device=device)
    trainer = Trainer(params, "adam", {"wd": 0.1}, engine=engine)
    _step(trainer, params, _gradients(params))
    resumed = _twins(params)
    other = Trainer(resumed, "adam", engine="eager")
    way(trainer, other, tmp_path)
    gradients = _gradients(params)
    _step(trainer, params, gradients)
    _step(other, resumed, gradients)
    for name, param in params.items():
        torch.testing.assert_close(resumed[name], param, rtol=1e-6, atol=1e-7)


@WAYS
@pytest.mark.parametrize(
    "schedule",
    [
        lr_scheduler.FactorScheduler(2, 0.5, base_lr=0.1),
        lr_scheduler.MultiFactorScheduler([1, 4], 0.5, base_lr=0.1),
        lr_scheduler.PolyScheduler(7, base_lr=0.1, warmup_steps=4),
        lr_scheduler.CosineScheduler(7, base_lr=0.1, final_lr=0.01),
    ],
    ids=lambda schedule: type(schedule).__name__,
)
def test_a_schedule_goes_on_in_its_middle(schedule, way, tmp_path):
    params = _params()
    trainer = Trainer(params, "adam", {"lr_scheduler": copy.deepcopy(schedule)})
    for _ in range(3):
        _step(trainer, params, _gradients(params))
    resumed = _twins(params)
    other = Trainer(resumed, "adam")
    way(trainer, other, tmp_path)
    assert other.optimizer.lr_scheduler == schedule
    assert other.optimizer.lr_scheduler is not trainer.optimizer.lr_scheduler
    for n in range(4, 9):
        gradients = _gradients(params)
        _step(trainer, params, gradients)
        _step(other, resumed, gradients)
        assert other.learning_rate == trainer.learning_rate == schedule(n)
    assert _equal(params, resumed)


@WAYS
def test_settings_and_counts_become_the_saved_ones(way, tmp_path):
    params = _params()
    trainer = Trainer(params, "sgd", {"learning_rate": 0.3, "momentum": 0.5, "wd": 0.25, "begin_num_update": 7})
    _step(trainer, params, _gradients(params))
    for param in list(params.values())[1:]:
        param.grad = torch.ones_like(param)
    trainer.step(1, ignore_stale_grad=True)
    trainer.set_learning_rate(0.4)
    other = Trainer(_twins(params), "sgd", {"learning_rate": 9.0, "lr_scheduler": None})
    way(trainer, other, tmp_path)
    assert other.optimizer.settings() == trainer.optimizer.settings()
    assert (other.learning_rate, other.optimizer.momentum, other.optimizer.wd) == (0.4, 0.5, 0.25)
    assert other.state_dict()["counts"] == {"body": 8, "head": 9, "nothing": 9, "scale": 9} == trainer.state_dict()["counts"]
    assert other.optimizer.num_update == 9


def test_the_optimizer_stays_the_same_object_and_multipliers_stay(tmp_path):
    params = _params()
    trainer = Trainer(params, "sgd", {"learning_rate": 1.0})
    _step(trainer, params, _gradients(params))
    trainer.save_states(tmp_path / "a")
    other, optimizer = _twins(params), SGD()
    second = Trainer(other, optimizer)
    other["body"].lr_mult = 0.5
    optimizer.set_lr_mult({1: 3.0})
    second.load_states(tmp_path / "a")
    assert second.optimizer is optimizer
    assert other["body"].lr_mult == 0.5
    assert optimizer.lr_mult == {1: 3.0}
    before = {name: param.detach().clone() for name, param in other.items()}
    _step(second, other, {name: torch.ones_like(param) for name, param in other.items()}, batch_size=1)
    moved = {name: float((before[name] - other[name].detach()).mean()) for name in ("body", "head", "scale")}
    assert moved == pytest.approx({"body": 0.5, "head": 3.0, "scale": 1.0}, rel=1e-5)  # in the order of names: body, head


@WAYS
def test_a_state_from_before_the_first_step_makes_a_used_trainer_new(way, tmp_path):
    params = _params()
    new, used = Trainer(params, "adam"), Trainer(_params(), "adam", {"begin_num_update": 2})
    for _ in range(3):
        _step(used, {name: used._params[i] for i, name in enumerate(used._names)}, _gradients(params))
    way(new, used, tmp_path)
    assert used.optimizer.num_update == 0
    assert set(used.state_dict()["counts"].values()) == {0}
    resumed = {name: used._params[i] for i, name in enumerate(used._names)}
    with torch.no_grad():
        for name, param in resumed.items():
            param.copy_(params[name])
    gradients = _gradients(params)
    _step(new, params, gradients)
    _step(used, resumed, gradients)
    assert _equal(params, resumed)


def test_a_trainer_can_go_back_to_what_it_saved(tmp_path):
    params = _params()
    trainer = Trainer(params, "adam")
    _step(trainer, params, _gradients(params))
    trainer.save_states(tmp_path / "a")
    start, gradients = _twins(params), [_gradients(params) for _ in range(3)]
    ends = []
    for _ in range(2):
        trainer.load_states(tmp_path / "a")
        with torch.no_grad():
            for name, param in params.items():
                param.copy_(start[name])
        for row in gradients:
            _step(trainer, params, row)
        ends.append(_twins(params))
    assert _equal(*ends)


def test_an_updater_without_a_trainer_can_go_back_too():
    updater, names = get_updater(SGD(learning_rate=1.0, momentum=0.5)), ["w"]
    weight = torch.zeros(2)
    updater([0], [torch.ones(2)], [weight])
    saved = copy.deepcopy(checkpoint.collect(updater, names, [weight]))
    for _ in range(2):
        weight.fill_(-1.0)
        updater([0], [torch.ones(2)], [weight])
        assert weight.tolist() == [-2.5] * 2
        checkpoint.restore(updater, names, [weight], saved)


def test_a_loaded_dict_is_copied():
    params = _params()
    trainer = Trainer(params, "adam")
    _step(trainer, params, _gradients(params))
    other = Trainer(_twins(params), "adam")
    other.load_state_dict(trainer.state_dict())
    before = other.state_dict()["state"]["head"]["mean"].clone()
    _step(trainer, params, _gradients(params))
    assert torch.equal(other.state_dict()["state"]["head"]["mean"], before)


@WAYS
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("multi_precision", [False, True])
@pytest.mark.parametrize("name", ["adam", "averaged"])
def test_a_model_converted_before_loading_goes_on_like_one_converted_while_training(
    way, dtype, multi_precision, name, tmp_path
):
    """States are float32 for both types. With multi_precision, master copies come and go with the type."""
    for first, second in ((torch.float32, dtype), (dtype, torch.float32)):
        one = torch.nn.ParameterDict(_params(first))
        kwargs = {"wd": 0.1, "multi_precision": multi_precision}
        trainer = Trainer(one, name, kwargs)
        for _ in range(2):
            _step(trainer, dict(one), _gradients(one))
        other = copy.deepcopy(one)
        one.to(second)
        other.to(second)
        resumed = Trainer(other, name, kwargs)
        way(trainer, resumed, tmp_path)
        for _ in range(2):
            gradients = _gradients(one)
            _step(trainer, dict(one), gradients)
            _step(resumed, dict(other), gradients)
        assert {param.dtype for param in other.values()} == {second}
        assert _equal(dict(one), dict(other))


@WAYS
def test_memory_formats_may_differ(way, tmp_path):
    weight = Parameter(torch.randn(2, 3, 4, 5))
    trainer = Trainer([("w", weight)], "adam")
    _step(trainer, {"w": weight}, {"w": torch.randn(2, 3, 4, 5)})
    other = Parameter(weight.detach().clone().to(memory_format=torch.channels_last))
    resumed = Trainer([("w", other)], "adam")
    way(trainer, resumed, tmp_path)
    assert resumed.state_dict()["state"]["w"]["var"].stride() == other.stride() != weight.stride()
    gradient = torch.randn(2, 3, 4, 5)
    _step(trainer, {"w": weight}, {"w": gradient})
    _step(resumed, {"w": other}, {"w": gradient})
    assert torch.equal(weight, other)


def test_switching_momentum_on_before_saving():
    params = _params()
    trainer = Trainer(params, "sgd")
    _step(trainer, params, _gradients(params))
    trainer.optimizer.momentum = 0.5
    resumed = _twins(params)
    other = Trainer(resumed, "sgd")
    other.load_state_dict(trainer.state_dict())
    for _ in range(2):
        gradients = _gradients(params)
        _step(trainer, params, gradients)
        _step(other, resumed, gradients)
    assert _equal(params, resumed)


@rule
def with_a_state_called_master(w, g, state, hyper):
    """m <- m + g;  w <- w - lr m."""
    (master,) = state
    (lr,) = hyper
    master = master + g
    return w - lr * master, (master,)


def test_a_rules_state_may_have_any_name():
    class Confusing(RuleOptimizer):
        rule = with_a_state_called_master

    params = {"w": Parameter(torch.ones(3, dtype=torch.float16))}
    trainer = Trainer(params, Confusing(learning_rate=0.25, multi_precision=True))
    resumed = _twins(params)
    other = Trainer(resumed, Confusing(multi_precision=True))
    for those, one in ((params, trainer), (resumed, other)):
        if one is other:
            other.load_state_dict(trainer.state_dict())
            with torch.no_grad():
                resumed["w"].copy_(params["w"])
        _step(one, those, {"w": torch.ones(3)}, batch_size=1)
    assert params["w"].tolist() == [0.75] * 3
    assert resumed["w"].tolist() == [0.75 - 0.25 * 2] * 3


def test_states_in_mxnets_form_keep_their_nesting(tmp_path):
    params = _params()
    trainer = Trainer(params, "averaged")
    _step(trainer, params, _gradients(params))
    other = Trainer(_twins(params), "averaged")
    _by_file(trainer, other, tmp_path)
    nothing, mean, counter = other._updater.states[0]
    assert nothing is None
    assert type(other._updater.states[0]) is tuple
    assert type(counter) is list
    assert counter[0].dtype == torch.int64
    assert torch.equal(mean, trainer._updater.states[0][1])
    assert other.optimizer.total == 4.0


def _falling(num_update):
    return 0.1 / num_update


@pytest.mark.parametrize(
    "schedule", [_falling, lr_scheduler.FunctionScheduler(_falling, base_lr=1.0)], ids=["plain", "FunctionScheduler"]
)
def test_a_plain_callable_is_not_saved_but_must_be_there(tmp_path, everything, schedule):
    params = _params()
    trainer = Trainer(params, "sgd", {"lr_scheduler": schedule})
    _step(trainer, params, _gradients(params))
    trainer.save_states(tmp_path / "a")
    for kwargs in ({}, {"lr_scheduler": lr_scheduler.PolyScheduler(10)}):
        without = Trainer(_twins(params), "sgd", kwargs)
        before = everything(without, [])
        with pytest.raises(ValueError, match="had a plain callable as its lr_scheduler, .* this trainer has (None|Poly)"):
            without.load_states(tmp_path / "a")
        assert everything(without, []) == before
    other = Trainer(_twins(params), "sgd", {"lr_scheduler": schedule})
    other.load_states(tmp_path / "a")
    assert other.optimizer.lr_scheduler is schedule
    assert other.learning_rate == 0.1
    plain = Trainer(params, "sgd", {"learning_rate": 0.7})
    other.load_state_dict(plain.state_dict())
    assert other.learning_rate == 0.7


def test_lazy_models_are_run_before_their_states_are_loaded(tmp_path):
    def make():
        net = torch.nn.Sequential(torch.nn.LazyLinear(4), torch.nn.Linear(4, 1))
        return net, Trainer(net, "adam")

    (net, trainer), (later, other) = make(), make()
    other.load_state_dict(trainer.state_dict())  # nothing to compare yet
    net(torch.ones(2, 3)).sum().backward()
    trainer.step(2)
    trainer.save_states(tmp_path / "a")
    with pytest.raises(ValueError, match="'0.weight', '0.bias' of params not initialized yet: run the model once"):
        other.load_states(tmp_path / "a")
    later(torch.ones(2, 3))
    other.load_states(tmp_path / "a")
    assert set(other.state_dict()["counts"].values()) == {1}


# ---- the file --------------------------------------------------------------------------------------------------------


@pytest.fixture
def trained():
    """A trainer after two steps, and its parameters."""
    params = _params(shapes={"body": (2, 3), "head": (2,)})
    trainer = Trainer(params, "adam", {"wd": 0.1, "lr_scheduler": lr_scheduler.FactorScheduler(5, 0.5, base_lr=0.1)})
    for _ in range(2):
        _step(trainer, params, _gradients(params))
    return trainer, params


def test_other_programs_can_read_the_file(trained, tmp_path):
    trainer, _ = trained
    trainer.save_states(tmp_path / "a.safetensors")
    tensors = safetensors.torch.load_file(tmp_path / "a.safetensors")
    assert set(tensors) == {f'["{name}", "{slot}"]' for name in ("body", "head") for slot in ("mean", "var")}
    for key, tensor in tensors.items():
        name, slot = json.loads(key)
        assert torch.equal(tensor, trainer.state_dict()["state"][name][slot])
    with safetensors.safe_open(tmp_path / "a.safetensors", "numpy") as file:
        header = json.loads(file.metadata()["tristep"])
        np.testing.assert_array_equal(file.get_tensor('["head", "mean"]'), tensors['["head", "mean"]'].numpy())
    assert header["optimizer"] == "adam"
    assert header["settings"]["wd"] == 0.1
    assert header["lr_scheduler"]["class"] == "FactorScheduler"
    assert header["counts"] == {"body": 2, "head": 2}
    assert header["parameters"] == {"body": [2, 3], "head": [2]}


def test_file_names_may_be_strings_or_paths(trained, tmp_path, monkeypatch):
    trainer, params = trained
    monkeypatch.chdir(tmp_path)
    for name in (str(tmp_path / "a"), tmp_path / "b", "c"):
        trainer.save_states(name)
        other = Trainer(_twins(params), "adam")
        other.load_states(name)
        assert other.optimizer.num_update == 2
    assert sorted(os.listdir()) == ["a", "b", "c"]


@pytest.mark.skipif(os.name != "posix", reason="needs POSIX file modes")
def test_the_file_has_the_mode_that_any_new_file_has(trained, tmp_path):
    (tmp_path / "other").write_bytes(b"")
    trained[0].save_states(tmp_path / "a")
    assert (tmp_path / "a").stat().st_mode == (tmp_path / "other").stat().st_mode


def _fail(*_, **__):
    raise OSError("the disk is full")


@pytest.mark.parametrize("where", ["os.fsync", "os.replace", "safetensors.torch.save"])
def test_a_failure_while_writing_leaves_the_old_file(where, trained, tmp_path, monkeypatch, everything):
    trainer, params = trained
    trainer.save_states(tmp_path / "a")
    old = (tmp_path / "a").read_bytes()
    _step(trainer, params, _gradients(params))
    before = everything(trainer, params.values())
    with monkeypatch.context() as patch:
        patch.setattr(where, _fail)
        with pytest.raises(OSError, match="the disk is full"):
            trainer.save_states(tmp_path / "a")
        with pytest.raises(OSError, match="the disk is full"):
            trainer.save_states(tmp_path / "b")
    assert (tmp_path / "a").read_bytes() == old
    assert os.listdir(tmp_path) == ["a"]
    assert everything(trainer, params.values()) == before
    trainer.save_states(tmp_path / "a")
    assert (tmp_path / "a").read_bytes() != old


def test_a_file_cut_off_by_the_system_leaves_the_old_one(trained, tmp_path):
    resource = pytest.importorskip("resource")
    trainer, params = trained
    trainer.save_states(tmp_path / "a")
    old = (tmp_path / "a").read_bytes()
    _step(trainer, params, _gradients(params))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(old) // 2, limits[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            trainer.save_states(tmp_path / "a")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (tmp_path / "a").read_bytes() == old
    assert os.listdir(tmp_path) == ["a"]


def test_saving_into_a_folder_that_is_not_there(trained, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"fname='.*missing/a': there is no folder '.*missing'"):
        trained[0].save_states(tmp_path / "missing" / "a")


# ---- what is refused -------------------------------------------------------------------------------------------------


def _refused(trainer, params, everything, load, error, message):
    params = list(params.values())
    before = everything(trainer, params)
    with pytest.raises(error, match=message):
        load()
    assert everything(trainer, params) == before


def _no_file(path):
    path.unlink()


def _empty(path):
    path.write_bytes(b"")


def _text(path):
    path.write_text("these are no states\n" * 100)


def _folder(path):
    path.unlink()
    path.mkdir()


def _pickled(path):
    torch.save({"momentum": torch.ones(3)}, path)


def _weights(path):
    safetensors.torch.save_file({"body": torch.ones(2, 3)}, path)


def _with_header(**changes):
    """A file that is whole, but says something else."""

    def rewrite(path):
        tensors = safetensors.torch.load_file(path)
        with safetensors.safe_open(path, "pt") as file:
            header = json.loads(file.metadata()["tristep"])
        text = json.dumps(header | changes)
        metadata = {"tristep": text, "tristep checksum": str(zlib.crc32(text.encode()))}
        safetensors.torch.save_file(tensors, path, metadata)

    return rewrite


@pytest.mark.parametrize(
    ("spoil", "error", "message"),
    [
        (_no_file, FileNotFoundError, "fname='.*a.states': there is no such file"),
        (_empty, ValueError, "fname='.*a.states': not a state file of tristep, or a damaged one"),
        (_text, ValueError, "fname='.*a.states': not a state file of tristep, or a damaged one"),
        (_folder, ValueError, "fname='.*a.states': not a state file of tristep, or a damaged one"),
        (_pickled, ValueError, "fname='.*a.states': not a state file of tristep, or a damaged one"),
        (_weights, ValueError, "fname='.*a.states': a safetensors file, but not one that Trainer.save_states wrote"),
        (_with_header(format=2), ValueError, "saved state has format 2: this version of tristep reads format 1; .*newer"),
        (
            _with_header(optimizer="sgd"),
            ValueError,
            r"is of optimizer 'sgd', this trainer has 'adam': .*Trainer\(params, 'sgd'",
        ),
    ],
    ids=["missing", "empty", "text", "folder", "pickle", "weights", "format", "optimizer"],
)
def test_what_is_no_state_file_is_refused(spoil, error, message, trained, tmp_path, everything):
    trainer, params = trained
    path = tmp_path / "a.states"
    trainer.save_states(path)
    spoil(path)
    _refused(trainer, params, everything, lambda: trainer.load_states(path), error, message)


def test_a_file_cut_anywhere_is_refused(trained, tmp_path, everything):
    trainer, params = trained
    trainer.save_states(tmp_path / "a")
    whole = (tmp_path / "a").read_bytes()
    for length in [*range(0, len(whole), 29), len(whole) - 1]:
        (tmp_path / "a").write_bytes(whole[:length])
        with pytest.raises(ValueError, match="fname=.*: not a state file of tristep, or a damaged one"):
            checkpoint.read(tmp_path / "a")
    _refused(trainer, params, everything, lambda: trainer.load_states(tmp_path / "a"), ValueError, "damaged")


def test_a_tensor_of_another_type_or_shape_is_noticed_even_with_the_same_bytes(trained, tmp_path, everything):
    trainer, params = trained
    for old, new in ((b'"F32"', b'"I32"'), (b'"shape":[2,3]', b'"shape":[3,2]')):
        trainer.save_states(tmp_path / "a")
        whole = (tmp_path / "a").read_bytes()
        assert old in whole
        (tmp_path / "a").write_bytes(whole.replace(old, new, 1))
        load = lambda: trainer.load_states(tmp_path / "a")  # noqa: E731
        _refused(trainer, params, everything, load, ValueError, "damaged; checksums differ for")


@pytest.mark.parametrize("flip", [0x01, 0x20, 0xFF])
def test_a_flipped_byte_is_noticed_wherever_it_is(flip, trained, tmp_path, everything):
    """Or it changes nothing, as the spaces do that fill up a safetensors header."""
    trainer, params = trained
    trainer.save_states(tmp_path / "a")
    whole = (tmp_path / "a").read_bytes()
    good = repr(checkpoint.read(tmp_path / "a"))
    noticed = 0
    for position in range(len(whole)):
        broken = bytearray(whole)
        broken[position] ^= flip
        (tmp_path / "a").write_bytes(broken)
        try:
            assert repr(checkpoint.read(tmp_path / "a")) == good, position
        except ValueError as error:
            assert "fname=" in str(error)  # noqa: PT017  # most positions must raise, a few need not
            noticed += 1
    assert noticed >= len(whole) - 8
    broken = bytearray(whole)
    broken[-5] ^= flip
    (tmp_path / "a").write_bytes(broken)
    load = lambda: trainer.load_states(tmp_path / "a")  # noqa: E731
    _refused(
        trainer, params, everything, load, ValueError, r"damaged; checksums differ for \[\"(head|body)\", \"(mean|var)\"\]"
    )


def _other(shapes, dtype=torch.float32, optimizer="adam", kwargs=None):
    params = _params(dtype, shapes=shapes)
    trainer = Trainer(params, optimizer, kwargs)
    _step(trainer, params, _gradients(params))
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
        params = _params(shapes={"body": (2, 3), "head": (2,)})
        trainer = Trainer(params, "adam")
    other = make()
    _refused(trainer, params, everything, lambda: way(other, trainer, tmp_path), ValueError, message)


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
        (_set("num_update", value=-1), ValueError, "num_update=-1: must be 0 or more"),
        (_set("counts", "body", value="2"), TypeError, "the count of 'body'='2': must be an integer"),
        (_set("counts", "tail", value=2), ValueError, "'tail' have a count or state, but are not among its parameters"),
        (_set("state", "head", "mean", value=[1.0, 2.0]), TypeError, "mean of 'head' must be a tensor, got list"),
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
        (lambda saved: saved["state"].pop("head"), ValueError, "lacks the state of 'head': it must have that of all"),
        (_set("lr_scheduler", value={"class": "Unheard", "kwargs": {}}), ValueError, "name='Unheard': no scheduler"),
        (_set("lr_scheduler", value={"class": "PolyScheduler", "kwargs": {}}), TypeError, "max_update"),
        (_set("lr_scheduler", value="slowly"), TypeError, "config='slowly': must be a mapping"),
    ],
)
def test_a_changed_dict_is_refused(change, error, message, trained, everything):
    trainer, params = trained
    saved = copy.deepcopy(trainer.state_dict())
    change(saved)
    _refused(trainer, params, everything, lambda: trainer.load_state_dict(saved), error, message)


@pytest.mark.parametrize(
    ("optimizer", "slot", "wrong", "right"),
    [
        ("groupadagrad", "history", (3, 5), (3, 1)),
        ("groupadagrad", "history", (3,), (3, 1)),
        ("cautious", "largest", (1,), ()),
    ],
)
def test_states_of_other_shapes_than_the_weights_are_checked_too(optimizer, slot, wrong, right, everything):
    params = _params(shapes=MATRICES)
    trainer = Trainer(params, optimizer)
    _step(trainer, params, _gradients(params))
    saved = copy.deepcopy(trainer.state_dict())
    saved["state"]["body"][slot] = torch.zeros(wrong)
    message = re.escape(f"{slot} of 'body' has shape {wrong}: for its parameter's (3, 5) it must have {right}")
    _refused(trainer, params, everything, lambda: trainer.load_state_dict(saved), ValueError, message)


@pytest.mark.parametrize("wrong", [None, [1, 2], "a.states"])
def test_what_is_no_dict_is_refused(wrong, trained, everything):
    trainer, params = trained
    load = lambda: trainer.load_state_dict(wrong)  # noqa: E731
    _refused(trainer, params, everything, load, TypeError, "state_dict must be a dict, as Trainer.state_dict gives it, got")


def test_a_nesting_that_does_not_fit_its_tensors_is_refused(everything):
    params = _params()
    trainer = Trainer(params, "averaged")
    _step(trainer, params, _gradients(params))
    for change in (_set("layout", "head", value=["0", "1"]), lambda saved: saved["layout"].pop("head")):
        saved = copy.deepcopy(trainer.state_dict())
        change(saved)
        load = lambda saved=saved: trainer.load_state_dict(saved)  # noqa: E731
        _refused(trainer, params, everything, load, ValueError, "'head' has '1', '2.0', its layout is")


def test_states_that_cannot_be_saved_are_named(tmp_path):
    class Strange(Optimizer):
        def create_state(self, index, weight):
            return {"mean": torch.zeros_like(weight)}

        def update(self, index, weight, grad, state):
            self._update_count(index)

    params = _params()
    trainer = Trainer(params, Strange())
    _step(trainer, params, _gradients(params))
    with pytest.raises(TypeError, match="a state to save is None, a tensor, or a tuple or list of such; got dict"):
        trainer.save_states(tmp_path / "a")
    assert os.listdir(tmp_path) == []


def test_a_step_after_a_refused_load_is_as_without_it(trained, tmp_path):
    trainer, params = trained
    resumed = _twins(params)
    other = Trainer(resumed, "adam")
    other.load_state_dict(trainer.state_dict())
    with pytest.raises(ValueError, match="saved state lacks"):
        other.load_state_dict({"format": 1})
    gradients = _gradients(params)
    _step(trainer, params, gradients)
    _step(other, resumed, gradients)
    assert _equal(params, resumed)


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
        ("lr", -0.1, "saved state: learning_rate=-0.1: must be finite and 0 or more"),
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
    setattr(other.optimizer, setting, value)
    _refused(trainer, params, everything, lambda: way(other, trainer, tmp_path), ValueError, re.escape(message))


@pytest.mark.parametrize("where", ["num_update", "counts"])
def test_counts_that_no_training_reaches_are_refused(where, trained, everything):
    trainer, params = trained
    saved = copy.deepcopy(trainer.state_dict())
    saved[where] = 10**30 if where == "num_update" else {"body": 10**30, "head": 1}
    load = lambda: trainer.load_state_dict(saved)  # noqa: E731
    _refused(trainer, params, everything, load, ValueError, "must be 9,007,199,254,740,992 or less")
