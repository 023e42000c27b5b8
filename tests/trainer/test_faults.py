"""Faults of synchronous processes: each ends in an error that says what is wrong, on all that are left, in time.

In groups of their own, with a short time limit, so that the processes themselves go on to the next test; but those that are
killed are started for it.
"""

import os
import re
import signal
import socket
import subprocess
import sys
import time
import traceback
from datetime import timedelta
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from rank_training import weights_of
from torch import nn

import tristep
from tristep import CheckpointManager
from tristep.kvstore import CollectiveStore
from tristep.trainer.kvstore.buckets import GradientBuckets
from tristep.trainer.utils import distributed

LIMIT = 3  # seconds that a rank waits for the others
GRACE = 1.5  # seconds that those who have noticed wait for each other
SAMPLES = 12  # of a step, over all ranks
WAYS = pytest.mark.parametrize("update", [True, False])


def _net(width=16, dtype=torch.float32):
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, width), nn.Tanh(), nn.Linear(width, 2)).to(dtype)


def _trainer(net, update, ranks=None, name="sgd", arguments=None, **settings):
    """A trainer of a group of its own, of these ranks or of all; all processes must call it."""
    group = dist.new_group(ranks, timeout=timedelta(seconds=LIMIT))
    if ranks is not None and dist.get_rank() not in ranks:
        return None
    store = CollectiveStore(group=group)
    arguments = {"learning_rate": 0.05, "momentum": 0.9} if arguments is None else arguments
    # Eager, since to compile a kernel may take longer than others wait here.
    return tristep.Trainer(net, name, arguments, kvstore=store, update_on_kvstore=update, engine="eager", **settings)


def _backward(net, step, rank, ranks):
    generator = torch.Generator().manual_seed(step)
    part = slice(rank * SAMPLES // ranks, (rank + 1) * SAMPLES // ranks)
    x, y = torch.randn(SAMPLES, 5, generator=generator)[part], torch.randn(SAMPLES, 2, generator=generator)[part]
    net.zero_grad()
    (net(x) - y).square().sum().backward()


def _steps(net, trainer, first, last, ranks, rank=None):
    for step in range(first, last):
        _backward(net, step, dist.get_rank() if rank is None else rank, ranks)
        trainer.step(SAMPLES)


def _said(call):
    """The error of a call, its cause, and the seconds that it took."""
    begin = time.monotonic()
    with pytest.raises(RuntimeError) as caught:
        call()
    return str(caught.value), str(caught.value.__cause__), time.monotonic() - begin


def _never_steps(update, first):
    """Rank 1 does not come to a step, until the others have given up."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    net = _net()
    trainer = _trainer(net, update)
    done = 0 if first else 2
    _steps(net, trainer, 0, done, ranks)
    before, found = weights_of(net), None
    dist.barrier()
    if rank != 1:
        with mock.patch.object(distributed, "_GRACE", GRACE):
            found = _said(lambda: _steps(net, trainer, done, done + 1, ranks))
    dist.barrier()
    again = _said(lambda: _steps(net, trainer, done, done + 1, ranks))
    dist.barrier()
    return found, again, np.array_equal(before, weights_of(net))


@pytest.mark.sample(0)
@WAYS
@pytest.mark.parametrize("first", [True, False], ids=["first", "later"])
def test_a_rank_that_does_not_step_is_named_in_time(processes, update, first):
    found = processes(3).run(_never_steps, update, first)
    for rank in (0, 2):
        (text, cause, seconds), (again, none, _), unchanged = found[rank]
        assert text.startswith("rank 1 of 3 is missing: it has ended, hangs, or makes other calls than this one (")
        assert "start again with saved weights and load_states()" in text
        assert cause != "None"
        assert seconds < LIMIT + GRACE + 5
        assert (again, none) == (text, "None")
        assert unchanged
    _, (text, cause, seconds), unchanged = found[1]
    assert text.startswith("the 3 ranks are not at the same call: one came too late for the others, or makes other calls")
    assert unchanged


DIFFERENT = [
    ("number", "parameter number 3 is '2.bias' torch.float32 (2,) on rank 0 and nothing on rank 1 (of 4 and 3)"),
    ("name", "parameter number 0 is '0.weight' torch.float32 (16, 5) on rank 0 and 'first.weight' torch.float32 (16, 5)"),
    ("shape", "parameter number 0 is '0.weight' torch.float32 (16, 5) on rank 0 and '0.weight' torch.float32 (17, 5)"),
    ("dtype", "parameter number 0 is '0.weight' torch.float32 (16, 5) on rank 0 and '0.weight' torch.float64 (16, 5)"),
    ("layout", "'0.weight' torch.float32 (16, 5) on rank 0 and '0.weight' torch.float32 (16, 5) with strides (1, 16)"),
    ("frozen", "'requires_grad of 0.bias' True on rank 0 and 'requires_grad of 0.bias' False on rank 1"),
    ("optimizer", "'optimizer' 'SGD' on rank 0 and 'optimizer' 'Adam' on rank 1"),
    ("rate", "'lr' 0.05 on rank 0 and 'lr' 0.5 on rank 1"),
    ("multiplier", "'lr_mult of 0.weight' 1.0 on rank 0 and 'lr_mult of 0.weight' 2.0 on rank 1"),
    ("compression", "'compression_params' None on rank 0 and 'compression_params' {'type': '2bit'} on rank 1"),
    ("schedules", "'schedules' [[]] on rank 0 and 'schedules' [['wd']] on rank 1"),
    ("update", "'update_on_kvstore' True on rank 0 and 'update_on_kvstore' False on rank 1"),
]


def _transpose_in_memory(weight):
    weight.data = weight.data.t().contiguous().t()  # the same values


def _different(update):
    """What each of these differences on rank 1 makes a step say, and whether a weight has changed."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    found = []
    for what, _ in DIFFERENT:
        odd = what if rank == 1 else ""
        net = _net(17 if odd == "shape" else 16, torch.float64 if odd == "dtype" else torch.float32)
        if odd == "layout":
            _transpose_in_memory(net[0].weight)
        net[0].bias.requires_grad = odd != "frozen"
        net[0].weight.lr_mult = 2.0 if odd == "multiplier" else None
        named = list(net.named_parameters())[: 3 if odd == "number" else 4]
        if odd == "name":
            named = [(name.replace("0.", "first."), param) for name, param in named]
        arguments = {"learning_rate": 0.5 if odd == "rate" else 0.05, "momentum": 0.9}
        name, arguments = ("adam", {"learning_rate": 0.05}) if odd == "optimizer" else ("sgd", arguments)
        if odd == "schedules":
            arguments["schedules"] = {"wd": lambda count: 0.0}
        settings = {"compression_params": {"type": "2bit"}} if odd == "compression" else {}
        here = (rank == 0) if what == "update" else update
        trainer = _trainer(named, here, None, name, arguments, **settings)
        before = weights_of(net)
        net(torch.ones(1, 5, dtype=net[0].weight.dtype)).sum().backward()
        with pytest.raises(ValueError, match="ranks differ") as caught:
            trainer.step(ranks)
        found.append((str(caught.value), np.array_equal(before, weights_of(net))))
    return found


@WAYS
def test_ranks_that_differ_are_refused_on_all_before_a_weight_has_changed(processes, update):
    for answers in processes(2).run(_different, update):
        for (what, expected), (text, unchanged) in zip(DIFFERENT, answers, strict=True):
            assert expected in text, what
            assert unchanged, what


def _other_layout_later(name, update, steps):
    """The masters after training, where a weight is transposed in memory on rank 1 before some of the steps."""
    rank = dist.get_rank()
    net = _net(dtype=torch.bfloat16)
    trainer = _trainer(net, update, None, name, {"learning_rate": 0.05, "multi_precision": True})
    for step in range(4):
        if rank == 1 and step in steps:
            _transpose_in_memory(net[0].weight)
        generator = torch.Generator().manual_seed(10 * step + rank)
        for param in net.parameters():
            param.grad = torch.randint(-8, 9, param.shape, generator=generator).to(param.dtype)
        trainer.step(SAMPLES)
    if rank == 1 and steps:
        assert not net[0].weight.is_contiguous()
    return [
        weight.numpy().copy()
        for weight in (*trainer.float32_weights().values(), *(param.detach().float() for param in net.parameters()))
    ]


@pytest.mark.parametrize(("name", "update"), [("adam", False), ("muon", False), ("muon", True)])
def test_a_layout_that_changes_on_one_rank_changes_no_number(processes, name, update):
    expected, _ = processes(2).run(_other_layout_later, name, update, [])
    for found in processes(2).run(_other_layout_later, name, update, [1, 2, 3]):
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_array_equal(one, other)


def _other_layout_of_cut_weights():
    net = _net()
    trainer = _trainer(net, True)
    _steps(net, trainer, 0, 2, dist.get_world_size())
    _transpose_in_memory(net[0].weight)
    with pytest.raises(ValueError, match="the strides of a parameter have changed since the first step"):
        _steps(net, trainer, 2, 3, dist.get_world_size())


def test_cut_weights_keep_their_layout(processes):
    processes(2).run(_other_layout_of_cut_weights)


class _Plain(tristep.optimizer.Optimizer):
    def update(self, index, weight, grad, state):
        self._update_count(index)
        weight.sub_(grad * (self.rescale_grad * self._get_lr(index)))


CUBIC, QUINTIC = (1.5, -0.5, 0.0), (1.875, -1.25, 0.375)
OPTIMIZERS = {
    "sgd": lambda: ("sgd", {"learning_rate": 0.05, "momentum": 0.9}),
    "adamw": lambda: ("adamw", {"wd": 0.1}),
    "scheduled": lambda: ("sgd", {"lr_scheduler": tristep.lr_scheduler.FactorScheduler(100, 0.5, base_lr=0.05)}),
    "scheduled decay": lambda: (
        "adamw",
        {"schedules": {"wd": tristep.lr_scheduler.FactorScheduler(100, 0.5, base_lr=0.05)}},
    ),
    "muon": lambda: ("muon", {"coefficients": [CUBIC], "split": {"*weight": 2}}),
    "a user's": lambda: (_Plain(), {}),
    "several": lambda: ([("*weight", "muon"), ("*", _Plain())], {}),
}


def _set(name, value):
    return lambda net, trainer: setattr(trainer.optimizer, name, value)


def _mark(layer, kind, name, value):
    return lambda net, trainer: setattr(getattr(net[layer], kind), name, value)


# What rank 1 does before the second step, in a training by which optimizer, and what all ranks then say of ranks 0 and 1.
UNLIKE = {
    "batch": ("sgd", None, "rescale_grad", 1 / SAMPLES, 1 / (SAMPLES - 1)),
    "rate": ("sgd", lambda net, trainer: trainer.set_learning_rate(0.06), "lr", 0.05, 0.06),
    "momentum": ("sgd", _set("momentum", 0.8), "momentum", 0.9, 0.8),
    "schedule": (
        "scheduled",
        lambda _, trainer: trainer.optimizer.lr_scheduler.start_from(0.06),
        "lr of 0.weight",
        0.05,
        0.06,
    ),
    "schedule of decay": (
        "scheduled decay",
        lambda _, trainer: trainer.optimizer.schedules["wd"].start_from(0.06),
        "wd",
        0.05,
        0.06,
    ),
    "multiplier": ("sgd", _mark(2, "weight", "lr_mult", 2.0), "lr_mult of 2.weight", 1.0, 2.0),
    "decay": ("adamw", _mark(2, "bias", "wd_mult", 0.5), "wd_mult of 2.bias", 1.0, 0.5),
    "by name": ("sgd", lambda _, trainer: trainer.optimizer.set_lr_mult({"0.bias": 0}), "lr_mult of 0.bias", 1.0, 0.0),
    "coefficients": ("muon", _set("coefficients", [QUINTIC]), "coefficients", (CUBIC,), (QUINTIC,)),
    "user's class": ("a user's", _mark(2, "weight", "lr_mult", 2.0), "lr_mult of 2.weight", 1.0, 2.0),
    "one of several": ("several", _mark(2, "weight", "lr_mult", 2.0), "lr_mult of 2.weight", 1.0, 2.0),
    "a user's of several": ("several", _mark(2, "bias", "lr_mult", 2.0), "lr_mult of 2.bias", 1.0, 2.0),
    **{f"nothing: {name}": (name, None, None, None, None) for name in OPTIMIZERS},
}


def _unlike(update, what):
    """In the second step rank 1 has another setting; in which step there is an error, and what it says."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    optimizer, change, *_ = UNLIKE[what]
    net = _net()
    trainer = _trainer(net, update, None, *OPTIMIZERS[optimizer]())
    net[0].weight.of_rank = rank  # an attribute that no optimizer reads
    for step in range(6):
        is_odd = rank == 1 and step == 1
        if is_odd and change is not None:
            change(net, trainer)
        _backward(net, step, rank, ranks)
        try:
            trainer.step(SAMPLES - 1 if is_odd and what == "batch" else SAMPLES)
        except ValueError as error:
            return step, str(error)
    return step, ""


@WAYS
@pytest.mark.parametrize("what", UNLIKE)
def test_ranks_that_take_a_step_differently_learn_of_it_in_the_next(processes, update, what):
    *_, setting, here, there = UNLIKE[what]
    for step, text in processes(2).run(_unlike, update, what):
        if setting is None:
            assert (step, text) == (5, "")
        else:
            assert step == 2
            assert f"is {setting!r} {here!r} on rank 0 and {setting!r} {there!r} on rank 1" in text
            assert text.startswith("ranks differ: setting of the last step number")


def _frozen_on_one_rank(update, names, freezes):
    """Rank 1 freezes or unfreezes parameters, each with a bucket of its own, before the third step; what that step says."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    net = _net()
    for name in names:
        net.get_parameter(name).requires_grad_(freezes)
    with mock.patch.dict(GradientBuckets.__init__.__kwdefaults__, {"bucket_bytes": 1, "first_bucket_bytes": 1}):
        trainer = _trainer(net, update)
        _steps(net, trainer, 0, 2, ranks)
    before = weights_of(net)
    if rank == 1:
        for name in names:
            net.get_parameter(name).requires_grad_(not freezes)
    with pytest.raises(ValueError, match="ranks differ") as caught:
        _steps(net, trainer, 2, 3, ranks)
    np.testing.assert_array_equal(weights_of(net), before)
    return str(caught.value)


@WAYS
@pytest.mark.parametrize("names", [["0.bias"], ["0.weight", "0.bias", "2.weight"]], ids=len)
@pytest.mark.parametrize("freezes", [True, False])
def test_a_rank_that_freezes_or_unfreezes_parameters_alone_is_named_on_all(processes, update, names, freezes):
    one, other = (f"{names[0]!r} requires_grad={trained}" for trained in (freezes, not freezes))
    expected = f"is {one} on rank 0 and {other} on rank 1"
    for text in processes(2).run(_frozen_on_one_rank, update, names, freezes):
        assert expected in text


def _not_a_number(update, settings, compression_params):
    """The third step's gradients have NaN on rank 1; weights after each step."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    net = _net()
    arguments = {"learning_rate": 0.05, "momentum": 0.9} | settings
    trainer = _trainer(net, update, None, "sgd", arguments, compression_params=compression_params)
    after = []
    for step in range(5):
        _backward_with_nan(net, step, rank, ranks) if step == 2 and rank == 1 else _backward(net, step, rank, ranks)
        trainer.step(SAMPLES)
        after.append(weights_of(net))
    return np.stack(after)


def _backward_with_nan(net, step, rank, ranks):
    handle = net[0].register_forward_hook(lambda module, inputs, output: output * torch.nan)
    _backward(net, step, rank, ranks)
    handle.remove()


@WAYS
def test_nan_on_one_rank_is_nan_on_all_or_leaves_the_step_out_on_all(processes, update):
    first, second = processes(2).run(_not_a_number, update, {}, None)
    np.testing.assert_array_equal(first, second)
    assert np.isfinite(first[:2]).all()
    assert np.isnan(first[2:]).all()
    first, second = processes(2).run(_not_a_number, update, {"skip_nonfinite": True}, None)
    np.testing.assert_array_equal(first, second)
    assert np.isfinite(first).all()
    np.testing.assert_array_equal(first[2], first[1])
    assert (first[3] != first[2]).any()
    for kind in ("2bit", "int8", "topk"):
        first, second = processes(2).run(_not_a_number, update, {}, {"type": kind})
        np.testing.assert_array_equal(first, second)


# ---- what one rank cannot load ----------------------------------------------------------------------------------------

LOADS = {
    "load_states": lambda trainer, net, folder, saved: trainer.load_states(folder / "states"),
    "load_state_dict": lambda trainer, net, folder, saved: trainer.load_state_dict(saved["states"]),
    "load_float32_weights": lambda trainer, net, folder, saved: trainer.load_float32_weights(saved["weights"]),
    "resume": lambda trainer, net, folder, saved: trainer.resume(folder / "run", net),
    "manager": lambda trainer, net, folder, saved: CheckpointManager(folder / "run", trainer, net).resume(),
    "store": lambda trainer, net, folder, saved: saved["store"].load_optimizer_states(folder / "store"),
}
# What is wrong with what one rank loads, by which method, with words of its error.
UNLOADABLE = [
    ("missing", "load_states store", "no such file"),
    ("missing", "load_state_dict", "format None"),
    ("missing", "load_float32_weights", "lacks"),
    ("missing", "resume", "no such file"),
    ("missing on rank 0", "resume", "rank 0 has no checkpoint there, rank 1 has step-0000000001"),
    ("damaged", "load_states resume manager store", "damaged"),
    ("damaged", "load_state_dict", "saved state lacks"),
    ("damaged", "load_float32_weights", "dense tensor"),
    ("of another model", "load_states load_state_dict load_float32_weights store", "shape"),
    ("of another training", "manager", "another checkpoint than rank 0's"),
]


def _save_for_loads(folder, wrong):
    """Save a short training of one process for all of `LOADS`; return what is loaded from memory."""
    width, size = (17, 4) if wrong == "of another model" else (16, 3)
    net, store = _net(width), tristep.kvstore.create("local")
    trainer = tristep.Trainer(net, "sgd", {"learning_rate": 0.05, "momentum": 0.9}, engine="eager")
    _steps(net, trainer, 0, 1, 1, 0)
    store.init("w", torch.ones(size))
    store.set_optimizer(tristep.optimizer.SGD(momentum=0.9))
    store.push("w", torch.ones(size))
    saved = {"states": trainer.state_dict(), "weights": trainer.float32_weights()}
    folder.mkdir()
    if wrong.startswith("missing"):
        return {"states": {}, "weights": {}}
    trainer.save_states(folder / "states")
    store.save_optimizer_states(folder / "store")
    with CheckpointManager(folder / "run", trainer, net) as manager:
        manager.save()
    if wrong == "damaged":
        for path in (folder / "states", folder / "store", *folder.rglob("*.safetensors")):
            os.truncate(path, path.stat().st_size - 1)
        return {"states": {"format": saved["states"]["format"]}, "weights": dict.fromkeys(saved["weights"], 1.0)}
    return saved


def _unloadable(update, folder):
    """What methods raise where one rank cannot load, and whether training goes on as if nobody had tried."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    wrongs = ["", *dict.fromkeys(wrong for wrong, *_ in UNLOADABLE)]
    saved = {wrong: _save_for_loads(folder / f"{wrong} {rank}", wrong) for wrong in wrongs}
    dist.barrier()
    net = _net()
    _steps(net, _trainer(net, update), 0, 3, ranks)
    expected, found = weights_of(net), []
    for wrong, methods, _ in UNLOADABLE:
        for k, method in enumerate(methods.split()):
            begun = k % 2  # how many steps there are before, and another rank in turn
            net, odd = _net(), (rank + k) % 2 == (0 if wrong == "missing on rank 0" else 1)
            trainer = _trainer(net, update)
            _steps(net, trainer, 0, begun, ranks)
            store = CollectiveStore(group=trainer._sync.group)
            store.init("w", torch.zeros(3))
            store.set_optimizer(tristep.optimizer.SGD(momentum=0.9))
            which = wrong if odd else ""
            try:
                LOADS[method](trainer, net, folder / f"{which} 0", saved[which] | {"store": store})
                text = "nothing"
            except (ValueError, TypeError, FileNotFoundError) as error:
                text = str(error)
            _steps(net, trainer, begun, 3, ranks)
            found.append((wrong, method, odd, text, np.array_equal(weights_of(net), expected) and not store._updater.state))
    return found


@WAYS
def test_what_one_rank_cannot_load_is_an_error_on_all_and_changes_nothing(processes, update, tmp_path):
    words = {(wrong, method): text for wrong, methods, text in UNLOADABLE for method in methods.split()}
    for rank, found in enumerate(processes(2).run(_unloadable, update, tmp_path)):
        assert len(found) == len(words)
        for wrong, method, odd, text, unchanged in found:
            case = (rank, method, wrong, text)
            assert words[wrong, method] in text, case
            named = not odd and wrong != "missing on rank 0"
            assert text.startswith(f"rank {1 - rank} of 2 cannot load, and nothing has been changed") == named, case
            assert unchanged, case


# ---- killed processes ------------------------------------------------------------------------------------------------

PROGRAM = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("test_faults", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
module.be_several(int(sys.argv[2]), sys.argv[3])
"""
STAGES = [(5, False, "inside"), (4, True, "between"), (3, True, "inside")]  # ranks, who updates, when one is killed


def be_several(ranks, folder):
    """Copies of this process, each a rank, which have loaded everything once; prints how they ended."""
    torch.set_num_threads(1)
    members = []
    for rank in range(ranks):
        pid = os.fork()
        if pid == 0:
            os.environ["RANK"] = str(rank)
            try:
                be_killed(folder)
            except BaseException:
                traceback.print_exc()
            os._exit(1)
        members.append(pid)
    print([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in members])


def be_killed(folder):
    """In each stage some ranks train, and the last one is killed: between backward and step, or inside communication."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    distributed._GRACE, rank = GRACE, dist.get_rank()
    nets = [_net() for _ in STAGES]
    trainers = [_trainer(net, update, list(range(ranks))) for net, (ranks, update, _) in zip(nets, STAGES, strict=True)]
    meetings = [dist.new_group(list(range(ranks))) for ranks in (5, 4, 3, 2)]
    for net, trainer, meeting, (ranks, update, when) in zip(nets, trainers, meetings, STAGES, strict=False):
        dist.barrier(group=meeting)  # some have learned of the last stage's end sooner than others
        _steps(net, trainer, 0, 3, ranks)
        trainer.save_states(f"{folder}/states {ranks}")
        if rank == 0:
            torch.save(net.state_dict(), f"{folder}/weights {ranks}")
        _steps(net, trainer, 3, 4, ranks)
        if rank == ranks - 1:
            if when == "inside":  # as backward sends the sums, or as updated weights are gathered
                name = "all_to_all_single" if update else "all_reduce"
                setattr(dist, name, _killing(getattr(dist, name), 2 if update else 1))
                _steps(net, trainer, 4, 5, ranks)
            _backward(net, 4, rank, ranks)
            os.kill(os.getpid(), signal.SIGKILL)
        # What was sent before may be enough for some of the others, who learn of it in the next step.
        text, _, seconds = _said(lambda net=net, trainer=trainer, ranks=ranks: _steps(net, trainer, 4, 6, ranks))
        again, *_ = _said(lambda net=net, trainer=trainer, ranks=ranks: _steps(net, trainer, 6, 7, ranks))
        with open(f"{folder}/said {rank}", "a", encoding="utf-8") as file:
            print(seconds < LIMIT + GRACE + 5, again == text, text, file=file)
    dist.barrier(group=meetings[-1])  # rank 0 keeps the store
    os._exit(0)  # some of the groups are beyond a clean end


def _killing(function, count):
    """A collective that kills this process when it has been started for the nth time."""

    def call(*args, **settings):
        nonlocal count
        count -= 1
        work = function(*args, **settings)
        if count <= 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return work

    return call


def _resumed(ranks, update, folder):
    """The trajectory from the saved states on, and that of a run that nothing has happened to."""
    resumed, whole = _net(), _net()
    resumed.load_state_dict(torch.load(f"{folder}/weights {ranks}"))
    trainer = _trainer(resumed, update)
    trainer.load_states(f"{folder}/states {ranks}")
    _steps(resumed, trainer, 3, 6, ranks)
    _steps(whole, _trainer(whole, update), 0, 6, ranks)
    return weights_of(resumed), weights_of(whole)


@pytest.mark.sample(0)
def test_a_killed_rank_is_named_on_all_that_are_left_and_saved_states_go_on(processes, tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    settings = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "5", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", PROGRAM, __file__, "5", str(tmp_path)]
    done = subprocess.run(command, env=os.environ | settings, capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines()[-1:] == ["[0, 0, -9, -9, -9]"], done.stderr  # after what Gloo says of its connections
    for rank in range(4):
        lines = (tmp_path / f"said {rank}").read_text(encoding="utf-8").splitlines()
        assert len(lines) == sum(rank < ranks - 1 for ranks, _, _ in STAGES)
        for (ranks, _, _), line in zip(STAGES, lines, strict=False):
            found = re.match(r"True True ranks? ([\d, ]+) of (\d) (is|are) missing: ", line)
            assert found, line
            named = set(map(int, found[1].split(", ")))  # a slow one may be among them
            assert ranks - 1 in named
            assert rank not in named
            assert int(found[2]) == ranks
    ranks, update, _ = STAGES[-1]
    for weights, expected in processes(ranks).run(_resumed, ranks, update, tmp_path):
        np.testing.assert_array_equal(weights, expected)
