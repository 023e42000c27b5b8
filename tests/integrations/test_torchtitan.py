"""tristep.integrations.torchtitan: parts of a model are trained, saved and loaded as the whole is."""

import doctest
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import tristep
import tristep.integrations.torchtitan
from tristep.integrations.torchtitan import Optimizers

ENTRIES = [("2.*", "lion", {"lr": 0.01}), ("ndim<2", "adamw"), ("*", "muon", {"lr": 0.02})]


def _net():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))


def _parts(net, cut):
    """Modules of these layers, each by its name in the whole."""
    parts = [torch.nn.Module() for _ in cut]
    for part, names in zip(parts, cut, strict=True):
        for name in names:
            part.add_module(name, net[int(name)])
    return parts


def _train(net, optimizer, steps=2):
    for _ in range(steps):
        optimizer.zero_grad()
        net(torch.ones(3, 4)).square().sum().backward()
        optimizer.step()


def test_parts_are_trained_as_the_whole():
    whole, cut = _net(), _net()
    _train(whole, tristep.optim.MultiOptimizer(whole, ENTRIES, lr=0.001))
    optimizers = Optimizers(_parts(cut, ["01", "2"]), ENTRIES, lr=0.001)
    assert [[type(each).__name__ for each in one.optimizers] for one in optimizers] == [["AdamW", "Muon"], ["Lion"]]
    _train(cut, optimizers)
    assert all(map(torch.equal, cut.parameters(), whole.parameters()))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")
def test_a_checkpoint_fits_other_parts(tmp_path):
    net = _net()
    optimizers = Optimizers(_parts(net, ["01", "2"]), ENTRIES, lr=0.001)
    _train(net, optimizers)
    dcp.save({"model": net.state_dict(), "optimizer": optimizers}, checkpoint_id=tmp_path)
    _train(net, optimizers)

    other = _net()
    fresh = Optimizers(_parts(other, ["0", "12"]), ENTRIES, lr=0.5)
    dcp.load({"model": other.state_dict(), "optimizer": fresh}, checkpoint_id=tmp_path)
    names = [group["param_names"] for group in fresh.param_groups]
    assert names == [["0.bias"], ["0.weight"], ["2.weight", "2.bias"], ["1.bias"], ["1.weight"]]
    assert [group["lr"] for group in fresh.param_groups] == [0.001, 0.02, 0.01, 0.001, 0.02]
    _train(other, fresh)
    assert all(map(torch.equal, other.parameters(), net.parameters()))


def test_asking_for_states_before_the_first_step_changes_no_weights():
    net = _net()
    keys = set(Optimizers([net], ENTRIES, lr=0.001).state_dict())
    assert {"state.0.bias.exp_avg", "state.1.weight.momentum_buffer", "state.2.weight.mean"} <= keys
    assert all(map(torch.equal, net.parameters(), _net().parameters()))


@dataclass
class _Config:
    """As torchtitan's ParamGroupConfig."""

    pattern: str
    optimizer_name: str
    optimizer_kwargs: dict[str, Any] = field(default_factory=dict)


def test_torchtitans_configurations_are_regular_expressions():
    groups = [_Config(r"\.bias$", "AdamW", {"lr": 0.01}), _Config(".*", "SGD", {"lr": 0.1})]
    (optimizer,) = Optimizers([_net()], groups)
    assert [each.defaults["lr"] for each in optimizer.optimizers] == [0.01, 0.1]
    assert [len(group["params"]) for group in optimizer.param_groups] == [3, 3]


def test_schedules_and_hooks_of_torch():
    net, calls = _net(), []
    optimizers = Optimizers(_parts(net, ["01", "2"]), ENTRIES, lr=0.001)
    optimizers.register_step_pre_hook(lambda *_: calls.append("before"))
    schedules = [torch.optim.lr_scheduler.LambdaLR(each, lambda step: 0.5**step) for each in optimizers]
    for _ in range(2):
        _train(net, optimizers, 1)
        for schedule in schedules:
            schedule.step()
    assert calls == ["before", "before"]
    assert [group["lr"] for group in optimizers.param_groups] == [0.00025, 0.005, 0.0025]


def test_what_is_refused():
    net = _net()
    with pytest.raises(ValueError, match=r"no pattern takes '0.weight', '1.weight', '2.weight'"):
        Optimizers([net], [("ndim<2", "adamw")])
    with pytest.raises(TypeError, match=r"entries\[1\]='adamw': must be \(pattern, optimizer\)"):
        Optimizers([net], [("ndim<2", "adamw"), "adamw"])
    with pytest.warns(UserWarning, match=r"entries\[0\]: pattern '\*embed\*' gets no parameter of these model parts"):
        optimizers = Optimizers([net], [("*embed*", "adamw"), ("*", "sgd", {"lr": 0.1})])
    with pytest.raises(ValueError, match="call it without one"):
        optimizers.step(lambda: None)
    with pytest.raises(RuntimeError, match="make a new one"):
        optimizers.add_param_group({"params": []})


def test_the_docstrings_example():
    result = doctest.testmod(tristep.integrations.torchtitan)
    assert result.attempted > 0
    assert result.failed == 0
