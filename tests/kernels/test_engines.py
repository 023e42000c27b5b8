"""Which engine is chosen, with which numbers it is called, and what autograd notices of a step."""

import math
import sys

import numpy as np
import pytest
import torch

import tristep
from tristep.kernels import ENGINES, Update, backends, choose_engine, rules, update
from tristep.kernels.backends import has_numba, has_triton
from tristep.kernels.functional import hyper_values

F64, F32 = torch.float64, torch.float32
INF = math.inf

PLAIN = {"lr": 0.5, "wd": 0.0, "clip": INF}

needs_numba = pytest.mark.skipif(not has_numba(), reason="needs numba")

needs_triton = pytest.mark.skipif(not has_triton(), reason="Triton has builds for Linux only")


@pytest.fixture
def bare(monkeypatch):
    """No wishes in the environment, a Triton that runs; a function that makes libraries look as if not installed."""
    monkeypatch.setattr(backends, "_problem_of_triton", lambda device: "")
    monkeypatch.delenv("TRISTEP_ENGINE", raising=False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    return lambda *names: [monkeypatch.setitem(sys.modules, name, None) for name in names]


@needs_numba
@needs_triton
@pytest.mark.parametrize(
    ("device", "missing", "expected"),
    [
        ("cpu", [], "cpu"),
        ("cuda", [], "triton"),  # ROCm's devices have that name too
        ("cuda:3", [], "triton"),
        ("xpu", [], "triton"),
        ("mps", [], "eager"),
        ("meta", [], "eager"),
        ("cpu", ["numba"], "eager"),
        ("cpu", ["triton"], "cpu"),
        ("cuda", ["triton"], "eager"),
        ("cuda", ["numba"], "triton"),
        ("cpu", ["numba", "triton"], "eager"),
    ],
)
def test_the_best_engine_there_is(bare, device, missing, expected):
    bare(*missing)
    assert choose_engine(torch.device(device)) == expected


@needs_triton
def test_a_numba_that_cannot_be_imported_is_done_without_on_gpus(monkeypatch):
    """As one that is made for another NumPy, of which Python knows that it is there, and whose import fails."""
    monkeypatch.setattr(backends, "has_numba", lambda: True)
    monkeypatch.setitem(sys.modules, "numba", None)
    weight = torch.ones(3, device="cuda" if torch.cuda.is_available() else "cpu")
    parameter = torch.nn.Parameter(weight)
    trainer = tristep.Trainer([parameter], "sgd", {"learning_rate": 0.5}, engine="triton")

    for _ in range(3):
        parameter.grad = torch.ones_like(weight)
        trainer.step(1)
    assert parameter.tolist() == [-0.5] * 3


@needs_triton
def test_triton_takes_cpu_tensors_only_to_interpret_kernels(bare, monkeypatch):
    with pytest.raises(ValueError, match="engine='triton' needs tensors on a GPU, these are on cpu: .*TRITON_INTERPRET=1"):
        choose_engine(torch.device("cpu"), "triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert choose_engine(torch.device("cpu"), "triton") == "triton"


@pytest.mark.parametrize("name", ENGINES)
def test_every_engine_is_taken_at_its_name(name, bare, monkeypatch):
    if {"triton": not has_triton(), "cpu": not has_numba()}.get(name, False):
        pytest.skip("not installed")
    device = torch.device("cuda" if name == "triton" else "cpu")
    assert choose_engine(device, name) == name
    monkeypatch.setenv("TRISTEP_ENGINE", name)
    assert choose_engine(device) == name
    assert choose_engine(device, "eager") == "eager"  # the argument comes first


@needs_numba
def test_the_environment_names_an_engine_for_the_devices_that_it_works_on(bare, monkeypatch):
    """As a store on the CPU may be there for replicas on GPUs; an argument is for the tensors that it comes with."""
    for named, device, expected in [("triton", "cpu", "cpu"), ("cpu", "meta", "eager"), ("", "cpu", "cpu")]:
        monkeypatch.setenv("TRISTEP_ENGINE", named)
        assert choose_engine(torch.device(device)) == expected
        if named:
            with pytest.raises(ValueError, match=f"engine='{named}' needs tensors on"):
                choose_engine(torch.device(device), named)
    monkeypatch.setenv("TRISTEP_ENGINE", "eager")
    weight = torch.ones(3)
    assert Update(rules.sgd, [weight], [()]).engines() == ["eager"]
    assert Update(rules.sgd, [weight], [()], engine="cpu").engines() == ["cpu"]


WITHOUT = """
import sys
sys.modules.update(dict.fromkeys(["numba", "llvmlite", "triton"]))
import math, torch
from tristep.kernels import Update, rules
weights, gradients = [torch.ones(3), torch.ones(5000)], [torch.ones(3), torch.ones(5000)]
run = Update(rules.sgd_momentum, weights, [(torch.zeros(3),), (torch.zeros(5000),)])
run.hyper[:] = [1.0, 0.25, 0.0, math.inf, 0.5]
run.bind(gradients)
run()
assert run.rebind(gradients)
run()
weights[1].data = weights[1].clone()
assert not run.rebind(gradients)
print(run.engines(), *(weight.unique().tolist() for weight in weights))
"""


@pytest.mark.sample(0)
def test_without_any_compiler_steps_are_eager(fresh_python, tmp_path):
    script = tmp_path / "without.py"
    script.write_text(WITHOUT, encoding="utf-8")
    assert fresh_python(script, unset=["TRISTEP_ENGINE"]).split() == ["['eager']", "[0.375]", "[0.375]"]


# update() and hyper-parameters.
def test_one_update_by_names(place):
    """Momentum SGD as torch.optim.SGD computes it, from a gradient that is divided by the batch size."""
    start, slope = [1.0, -2.0, 3.0], [8.0, 4.0, -2.0]
    weight, momentum = place.tensor(start, F32), torch.zeros(3, device=place.device)
    values = {"lr": 0.1, "wd": 0.5, "clip": INF, "momentum": 0.9}
    judge = torch.nn.Parameter(torch.tensor(start, dtype=F64))
    optimizer = torch.optim.SGD([judge], lr=0.1, weight_decay=0.5, momentum=0.9)
    for _ in range(3):
        gradients = [place.tensor(slope, F32)]
        update(rules.sgd_momentum, [weight], gradients, [[momentum]], values, rescale_grad=0.25, engine=place.engine)
        judge.grad = torch.tensor(slope, dtype=F64) * 0.25
        optimizer.step()
    torch.testing.assert_close(weight.cpu().double(), judge.detach(), rtol=1e-6, atol=0)


def test_each_weight_may_have_values_of_its_own(place):
    weights = [torch.zeros(2, device=place.device) for _ in range(3)]
    gradients = [torch.ones(2, device=place.device), None, torch.ones(2, device=place.device)]
    values = [PLAIN | {"lr": rate} for rate in (1.0, 2.0, 3.0)]
    update(rules.sgd, weights, gradients, [(), (), ()], values, engine=place.engine)
    assert [weight.tolist() for weight in weights] == [[-1.0, -1.0], [0.0, 0.0], [-3.0, -3.0]]


@pytest.mark.parametrize("x", [0.999, 0.9, 0.1, 1 - 1e-9, np.float32(0.999)])
def test_one_minus_x_is_formed_in_float64(x):
    """In float32, 1 - 0.999 would be off by a part in 10^5, and 1 - (1 - 1e-9) would be 0. It may be given instead."""
    values = {"lr": 0.1, "wd": 0, "clip": INF, "beta1": x, "beta2": 0.5, "epsilon": 1e-8}
    row = dict(zip(rules.adam.hyper, hyper_values(rules.adam, values), strict=True))
    assert row["one_minus_beta1"] == 1.0 - float(x) != 0.0
    assert row["beta1"] == float(x)
    assert row["one_minus_beta2"] == 0.5
    assert all(type(value) is float for value in row.values())
    values = {"lr": 0.1, "wd": 0, "clip": INF, "momentum": x, "one_minus_momentum": 7.0, "wd_lh": 0.0}
    assert hyper_values(rules.signum, values) == [0.1, 0.0, INF, float(x), 7.0, 0.0]


def test_one_minus_x_reaches_the_step_unrounded(place):
    """Of 1 - 1e-9 only 1e-9 is left in float32, and the average takes in that much of the gradient."""
    values = {"lr": 0.0, "wd": 0.0, "clip": INF, "momentum": 1 - 1e-9, "wd_lh": 0.0}
    weight, momentum = torch.zeros(1, device=place.device), torch.zeros(1, device=place.device)
    update(rules.signum, [weight], [torch.ones(1, device=place.device)], [(momentum,)], values, engine=place.engine)
    assert momentum.item() == pytest.approx(-1e-9, rel=1e-6)


def test_autograd_notices_each_step_of_a_weight_that_is_not_skipped(place):
    """A graph from before the step would give gradients of another network. Later steps may have the same gradients."""
    weight, skipped = (torch.ones(3, device=place.device, requires_grad=True) for _ in range(2))
    weight.grad = torch.ones(3, device=place.device)
    run = Update(rules.sgd, [weight, skipped], [(), ()], engine=place.engine)
    run.hyper[:] = [1.0, 0.5, 0.0, INF]
    run.bind([weight.grad, None], own=True)
    for step in range(4):
        loss, other = (weight * weight).sum(), (skipped * skipped).sum()
        run()
        if step in (0, 3):
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()
    other.backward()
    assert skipped.grad.tolist() == [2.0, 2.0, 2.0]
