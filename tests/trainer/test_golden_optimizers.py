"""Optimizers and Trainer against runs of MXNet itself, on every engine. tests/golden/README.md describes the recordings."""

import json
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from tristep import Trainer, lr_scheduler
from tristep.trainer.optimizer import create, get_updater

GOLDEN = Path(__file__).parents[1] / "golden"
FOLDERS = {1: GOLDEN, 2: GOLDEN / "v2"}
DTYPES = {"float16": torch.float16, "float32": torch.float32, "float64": torch.float64}

# Advised in the README. MXNet rounds hyper-parameters to float32, even for float64 weights, whose steps are then off by
# some 1e-7; where a weight passes through zero that is no small part of it.
CLOSE = {
    torch.float16: {"rtol": 2e-3, "atol": 2e-3},
    torch.float32: {"rtol": 1e-4, "atol": 1e-5},
    torch.float64: {"rtol": 1e-5, "atol": 1e-6},
}

# The recordings of optimizers that are run here, of MXNet 1.9.1 and of 2.0.
OPTIMIZERS = {
    1: (
        *("sgd", "ccsgd", "nag", "signum", "dcasgd", "test", "adam", "adamax", "nadam", "adagrad", "groupadagrad"),
        *("adadelta", "rmsprop", "ftrl", "ftml", "lars", "lamb", "lbsgd"),
    ),
    2: (
        *("sgd", "nag", "signum", "dcasgd", "test", "adam", "adamw", "adabelief", "adamax", "nadam", "adagrad"),
        *("groupadagrad", "adadelta", "rmsprop", "ftrl", "ftml", "lars", "lamb", "lans"),
    ),
}
# Groups that are run in other files; sgld has moments of its noise only.
ELSEWHERE = {
    "lr_schedulers": "test_lr_scheduler.py",
    "sgld": "test_optimizers.py",
    **dict.fromkeys(("initializers", "initializers_random"), "test_initializer.py"),
    **dict.fromkeys(("gradient_compression", "gradient_compression_1bit"), "test_kvstore.py"),
}
# What 2.0 calls otherwise, and what decides only how it computes.
RENAMED = {
    "rmsprop": {"rho": "gamma1", "momentum": "gamma2"},
    **{name: {"epsilon": "eps"} for name in ("adagrad", "groupadagrad", "lars")},
}
QUICK_STEPS = 8
UNUSED = ("use_fused_step", "aggregate_num")

# Why groups, or single runs of a group, are left out.
OTHERWISE = "1.9.1, which is followed, computes otherwise"
STALE = "MXNet steps again with gradients that were used up, where the store updates"
NOT_RUN = {
    1: {"trainer_07": STALE},
    2: {
        **dict.fromkeys(("adadelta", "test", "adagrad_01", "adamax_00", "adamax_01", "dcasgd_01", "ftml_00"), OTHERWISE),
        **dict.fromkeys(("groupadagrad_00", "lars_00", "lars_02", "nadam_01", "nag_00", "rmsprop_01"), OTHERWISE),
        **dict.fromkeys(("sparse_02", "sparse_03", "sparse_04"), OTHERWISE),
        "trainer_06": STALE,
    },
}


def _is_run(version, config):
    """Whether the run is not among those that are left out, by group or by itself."""
    group = config["id"].rpartition("_")[0]
    return not {group, config["id"]} & set(NOT_RUN[version])


def _optimizer(config):
    """The optimizer of a recorded run; MXNet prints what is a warning here."""
    names = RENAMED.get(config["optimizer"], {})
    kwargs = {names.get(name, name): value for name, value in config["kwargs"].items() if name not in UNUSED}
    if (schedule := config["lr_scheduler"]) is not None:
        kwargs["lr_scheduler"] = lr_scheduler.create(schedule["class"], **schedule["kwargs"])
    if config["param_idx2name"] is not None:
        kwargs["param_idx2name"] = dict(enumerate(config["param_idx2name"]))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="learning_rate=.* replaces base_lr=")
        optimizer = create(config["optimizer"], **kwargs)
    for setter, given in ((optimizer.set_lr_mult, config["lr_mult"]), (optimizer.set_wd_mult, config["wd_mult"])):
        if given is not None:
            setter(dict(map(tuple, given)))
    return optimizer


def _recorded_states(config, arrays):
    """Our states and master copy of each parameter, as MXNet recorded them; None for what it keeps elsewhere."""
    for i in range(len(config["shapes"])):
        states = [arrays[name] for name in sorted(arrays) if name.startswith(f"s_{i}_")]
        if config["optimizer"] == "lbsgd":  # whose sum of gradients is not recorded, nor a momentum of 0
            states = [None, *states, *[None] * (1 - len(states))]
        if config["kwargs"].get("centered") and "rho" in config["kwargs"]:
            states[:2] = states[1::-1]  # 2.0 keeps the mean first
        master = None
        if config["dtype"] == "float16":  # it comes first or last; the weight is what it rounds to
            rounded = [np.array_equal(state.astype(np.float16), arrays[f"w_{i}"][-1]) for state in states]
            master = states.pop(rounded.index(True))
        yield states, master


@pytest.mark.sample(4, "cpu")
@pytest.mark.sample(0, "triton")
@pytest.mark.golden(*OPTIMIZERS[1], where=lambda config: _is_run(1, config))
@pytest.mark.golden(*OPTIMIZERS[2], version=2, where=lambda config: _is_run(2, config))
def test_updater_equals_mxnet(golden, engine, device, monkeypatch, request):
    """In the quick tier the first steps, but all of a warm-up."""
    monkeypatch.setenv("TRISTEP_ENGINE", engine)  # get_updater has MXNet's signature, which knows no engines
    is_short = request.config.getoption("--cases") == "quick" and golden.config["optimizer"] != "lbsgd"
    _follow(golden, device, QUICK_STEPS if is_short else None)


@pytest.mark.sample(1, "cpu")
@pytest.mark.sample(0, "triton")
@pytest.mark.golden("sparse", where=lambda config: _is_run(1, config))
@pytest.mark.golden("sparse", version=2, where=lambda config: _is_run(2, config))
def test_sparse_gradients_equal_mxnet(golden, engine, device, monkeypatch):
    monkeypatch.setenv("TRISTEP_ENGINE", engine)
    _follow_sparse(golden, device)


def _follow_sparse(golden, device):
    config, arrays = golden
    names = RENAMED.get(config["optimizer"], {})
    updater = get_updater(
        create(config["optimizer"], **{names.get(name, name): value for name, value in config["kwargs"].items()})
    )
    weight = torch.tensor(arrays["w0_0"], device=device)
    for step in range(config["steps"]):
        rows = arrays["rows_0"][step].nonzero()
        values = torch.tensor(arrays["g_0"][step][rows], device=device)
        index = torch.tensor(np.array(rows), device=device)
        updater(0, torch.sparse_coo_tensor(index, values, weight.shape, check_invariants=True), weight)
        np.testing.assert_allclose(
            weight.cpu(), arrays["w_0"][step], **CLOSE[torch.float32], err_msg=f"weight after step {step}"
        )
    states = [arrays[name] for name in sorted(arrays) if name.startswith("s_0_")]
    for ours, theirs in zip(updater.states[0], states, strict=True):
        np.testing.assert_allclose(ours.cpu(), theirs, **CLOSE[torch.float32], err_msg="state")


def _follow(golden, device, most=None):
    """Compare each step with the recorded one, of all or of `most` steps; after all of them the states, too."""
    config, arrays = golden
    optimizer = _optimizer(config)
    updater = get_updater(optimizer)
    indices = list(range(len(config["shapes"])))
    weights = [torch.tensor(arrays[f"w0_{i}"], device=device) for i in indices]
    dtype = DTYPES[config["dtype"]]
    assert {weight.dtype for weight in weights} == {dtype}
    for step in range(config["steps"])[:most]:
        gradients = [torch.tensor(arrays[f"g_{i}"][step], device=device) for i in indices]
        if config["drive"] == "list":
            updater(indices, gradients, weights)
        else:
            for i in indices:
                updater(i, gradients[i], weights[i])
        for i in indices:
            np.testing.assert_allclose(
                weights[i].cpu(), arrays[f"w_{i}"][step], **CLOSE[dtype], err_msg=f"weight {i} after step {step}"
            )
        assert optimizer.learning_rate == pytest.approx(arrays["lr"][step], rel=1e-12)
    if most is not None and most < config["steps"]:
        return
    if config["optimizer"] != "test":  # 1.9.1 does not count its updates
        assert optimizer.num_update == config["num_update_end"]
    state_close = CLOSE[torch.float64 if dtype == torch.float64 else torch.float32]
    if config["optimizer"] == "lars" and dtype == torch.float16:  # norms of the master copy here, of the weight there
        state_close = CLOSE[dtype]
    for i, (states, master) in enumerate(_recorded_states(config, arrays)):
        assert len(updater.states[i]) == len(states)
        for ours, theirs in zip(updater.states[i], states, strict=True):
            if theirs is None:
                continue
            np.testing.assert_allclose(ours.cpu(), theirs, **state_close, err_msg=f"state of weight {i}")
        if master is None:
            assert i not in updater.masters
        else:
            np.testing.assert_allclose(updater.masters[i].cpu(), master, **state_close, err_msg=f"master of weight {i}")
            assert torch.equal(weights[i], updater.masters[i].half())


# Of 2.0 these are runs in which it and 1.9.1 compute the same.
@pytest.mark.sample(2, "cpu")
@pytest.mark.sample(0, "triton")
@pytest.mark.golden("trainer", where=lambda config: _is_run(1, config))
@pytest.mark.golden("trainer", version=2, where=lambda config: _is_run(2, config))
@pytest.mark.filterwarnings("ignore:compression_params=.* has no effect")  # of one device, which MXNet ignores as well
def test_trainer_equals_gluon(golden, engine, device, monkeypatch):
    """Real backward passes that write exactly the recorded gradients, in one copy of the model for each of its devices."""
    monkeypatch.setenv("TRISTEP_ENGINE", engine)  # for compression, too
    trainer = _drive(golden, engine, device)
    decided = golden.config["update_on_kvstore_decided"]
    store = getattr(trainer._sync, "store", None)
    assert (None if store is None else store.type) == golden.config["kvstore_created"]
    assert trainer._sync.updates == bool(decided)


class _Model(torch.nn.Module):
    def __init__(self, weights):
        super().__init__()
        self.params = torch.nn.ParameterList(weights)


def _drive(golden, engine, device):
    config, arrays = golden
    n, devices = len(config["shapes"]), range(config["ndev"])
    grad_req = config.get("grad_req", ["write"] * n)
    models = [_Model([torch.tensor(arrays[f"w0_{i}"], device=device) for i in range(n)]) for _ in devices]
    for model in models:
        for i, param in enumerate(model.params):
            param.requires_grad_(grad_req[i] != "null")
            for multiplier in ("lr_mult", "wd_mult"):
                if multiplier in config:
                    setattr(param, multiplier, config[multiplier][i])
    arguments = {name: value for name, value in config["optimizer_params"].items() if value is not None}
    if "sched" in config:
        arguments["lr_scheduler"] = lr_scheduler.create(config["sched"]["class"], **config["sched"]["kwargs"])
    trainer = Trainer(
        models,
        config["optimizer"],
        arguments,
        kvstore=config["kvstore"],
        compression_params=config.get("compression"),
        update_on_kvstore=config.get("update_on_kvstore"),
        engine=engine,
    )
    rates = dict(map(tuple, config.get("set_lr", [])))
    for step in range(config["steps"]):
        if step in rates:
            trainer.set_learning_rate(rates[step])
        fresh = [i for i in range(n) if "fresh" not in config or config["fresh"][step][i]]
        for d, model in enumerate(models):
            for i in fresh:
                if "zero_grad" not in config:  # "write": backward replaces the gradient
                    model.params[i].grad = None
            losses = [(model.params[i] * torch.tensor(arrays[f"g_{i}"][step, d], device=device)).sum() for i in fresh]
            if losses and any(loss.requires_grad for loss in losses):
                sum(losses).backward()
        batch_size, ignore_stale = config["batch"][step], config.get("ignore_stale", False)
        if "manual_clip" in config:
            trainer.allreduce_grads()
            for model in models:
                for param in model.params:
                    param.grad.clamp_(-config["manual_clip"], config["manual_clip"])
            trainer.update(batch_size, ignore_stale)
        else:
            trainer.step(batch_size, ignore_stale)
        if "zero_grad" in config:
            trainer.zero_grad(set_to_none=False)
        for d, model in enumerate(models):
            for i, param in enumerate(model.params):
                np.testing.assert_allclose(
                    param.detach().cpu(),
                    arrays[f"w_{i}"][step, d],
                    **CLOSE[torch.float32],
                    err_msg=f"weight {i} of copy {d} after step {step}",
                )
        assert trainer.learning_rate == pytest.approx(arrays["lr"][step], rel=1e-12)
    return trainer


# ---- what is left out, and why ---------------------------------------------------------------------------------------


def _manifest(version):
    return json.loads((FOLDERS[version] / "manifest.json").read_text(encoding="utf-8"))["groups"]


@pytest.mark.parametrize("version", [1, 2])
def test_every_recording_is_run_or_left_out_for_a_reason(version):
    groups = _manifest(version)
    assert {entry["file"] for entry in groups.values() if "file" in entry} == {
        p.name for p in FOLDERS[version].glob("*.npz")
    }
    run = {*OPTIMIZERS[version], *ELSEWHERE, "trainer", "sparse"}
    left_out = {name for name in NOT_RUN[version] if name in groups}
    assert run & set(groups) | left_out == set(groups)
    assert not set(OPTIMIZERS[version]) - set(groups)
    single = {config["id"] for name in run & set(groups) for config in groups[name]["configs"]}
    assert set(NOT_RUN[version]) - left_out <= single


def _left_out(*reasons):
    """The recorded runs that are left out for these reasons."""
    cases = []
    for version, names in NOT_RUN.items():
        wanted = {name for name, reason in names.items() if reason in reasons}
        for group, entry in _manifest(version).items():
            cases += [(version, config) for config in entry["configs"] if {group, config["id"]} & wanted]
    assert cases
    return cases


def test_what_is_run_elsewhere_is_run_there():
    for group, file in ELSEWHERE.items():
        text = Path(__file__).with_name(file).read_text(encoding="utf-8")
        assert f'pytest.mark.golden("{group}"' in text


def _of_ids(version, reason):
    ids = {config["id"] for v, config in _left_out(reason) if v == version}
    return lambda config: config["id"] in ids


@pytest.mark.golden("lars", version=2, where=lambda config: config["id"] == "lars_02")
def test_without_its_correction_the_momentum_of_lars_is_that_of_2_0(golden, device):
    config = golden.config | {"kwargs": golden.config["kwargs"] | {"momentum_correction": False}}
    _follow(golden._replace(config=config), device)


@pytest.mark.golden("trainer", where=_of_ids(1, STALE))
@pytest.mark.golden("trainer", version=2, where=_of_ids(2, STALE))
def test_gradients_that_were_used_up_are_not_used_again(golden, device):
    """ignore_stale_grad=True leaves parameters alone here; on a store that updates, MXNet updates them again."""
    assert golden.config["ignore_stale"]
    assert golden.config["update_on_kvstore_decided"]
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        _drive(golden, None, device)
