"""What the benchmarks say of each rule: that it can be measured, and how many bytes it must move."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from tristep.kernels import rules

REGISTRY = Path(__file__).parents[2] / "benchmarks" / "registry.py"
# Arrays read and written by a step; a reduction reads its own once more.
ARRAYS = {
    "sgd": 3,
    "adamw": 7,
    "test": 4,  # its state is written only
    "lars": 3 + 2,
    "lars_momentum": 5 + 2,
    "lamb": 7 + 4,
    "lans": 7 + 1 + 4,
    "lbsgd_lars": 7 + 3,
    "lion": 5,
    "adan": 11,
    "averaged": 2,  # weight and gradient are not read, and its state is not written
    "toward": 3,
    "sophia_curvature": 5,
    "stable_adamw": 7 + 2,
    "mars": 9 + 2,
    "novograd": 5 + 1,
    "ascent": 3 + 2,
    "schedule_free_adamw": 7,
}


@pytest.fixture(scope="module")
def registry():
    spec = importlib.util.spec_from_file_location("tests_registry", REGISTRY)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look for it there
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.mark.parametrize("name", rules.__all__)
def test_every_rule_can_be_measured(registry, name):
    step, moved = registry.rule_step(name, registry.Workload("small", ((2, 1500), (7,))), "cpu")
    step()
    assert moved % 4 == 0
    if name in ARRAYS:
        assert moved == 4 * 3007 * ARRAYS[name]
    assert moved >= 2 * 4 * 3007


def test_a_rule_of_whole_tensors_moves_its_states_as_they_are(registry):
    """One number for each row, of which there are two, or for each element of a vector."""
    _, moved = registry.rule_step("group_adagrad", registry.Workload("small", ((2, 1500), (7,))), "cpu")
    assert moved == 4 * (3 * 3007 + 2 * (2 + 7))


@pytest.mark.parametrize("name", rules.__all__)
def test_peers_take_a_step_of_the_same_parameters(registry, name):
    if registry.PEERS.get(name, ("torch",))[0] == "pytorch_optimizer":
        pytest.importorskip("pytorch_optimizer", reason="not installed")
    steps = registry.peer_steps(name, registry.Workload("small", ((20, 15), (5, 7))), "cpu")
    assert bool(steps) == (name in registry.PEERS)
    for step in steps.values():
        params = step.__self__.param_groups[0]["params"]
        before = [param.detach().clone() for param in params]
        for _ in range(2):  # ADOPT's first moves no weight
            step()
        assert [param.shape for param in params] == [(20, 15), (5, 7)]
        assert not any(torch.equal(param, old) for param, old in zip(params, before, strict=True))


def test_peers_are_left_out_where_their_library_is_missing(registry, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert registry.peer_steps("lion", registry.Workload("small", ((2, 3),)), "cpu") == {}
