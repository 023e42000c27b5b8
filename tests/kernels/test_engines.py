"""Which engine runs what, what it is given and refuses, and where the CPU engine keeps its compiled code."""

import itertools
import math
import os
import re
import subprocess
import sys

import numpy as np
import pytest
import torch

import tristep
from tristep.kernels import ENGINES, Update, backends, choose_engine, rules, update
from tristep.kernels.backends import has_numba, has_triton
from tristep.kernels.functional import hyper_values

F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
INF = math.inf
PLAIN = {"lr": 0.5, "wd": 0.0, "clip": INF}

needs_numba = pytest.mark.skipif(not has_numba(), reason="needs numba")
needs_triton = pytest.mark.skipif(not has_triton(), reason="Triton has builds for Linux only")


@pytest.fixture
def bare(monkeypatch):
    """No wishes in the environment; a function that makes libraries look as if they were not installed."""
    monkeypatch.delenv("TRISTEP_ENGINE", raising=False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    return lambda *names: [monkeypatch.setitem(sys.modules, name, None) for name in names]


# The choice.


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


@needs_numba
def test_the_environment_chooses_unless_the_argument_does(bare, monkeypatch):
    cpu = torch.device("cpu")
    monkeypatch.setenv("TRISTEP_ENGINE", "eager")
    assert choose_engine(cpu) == "eager"
    assert choose_engine(cpu, "cpu") == "cpu"
    weight = torch.ones(3)
    assert Update(rules.sgd, [weight], [()]).engines() == ["eager"]
    assert Update(rules.sgd, [weight], [()], engine="cpu").engines() == ["cpu"]
    monkeypatch.setenv("TRISTEP_ENGINE", "")
    assert choose_engine(cpu) == "cpu"


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


@pytest.mark.parametrize(
    ("asked", "hint"),
    [
        ("tritn", "Did you mean 'triton'?"),
        ("Eager", "Did you mean 'eager'?"),
        ("gpu", "Did you mean 'triton'?"),
        ("numba", "Did you mean 'cpu'?"),
        ("torch", "Did you mean 'eager'?"),
        ("xyz", "or None."),
    ],
)
def test_unknown_engines_are_refused_with_the_nearest_name(bare, monkeypatch, asked, hint):
    message = f"={asked!r}: must be one of 'triton', 'cpu', 'eager', or None."
    with pytest.raises(ValueError, match=re.escape(f"engine{message}")) as caught:
        choose_engine(torch.device("cpu"), asked)
    assert str(caught.value).endswith(hint)
    with pytest.raises(ValueError, match="^engine="):
        Update(rules.sgd, [torch.ones(3)], [()], engine=asked)
    monkeypatch.setenv("TRISTEP_ENGINE", asked)
    with pytest.raises(ValueError, match=re.escape(f"TRISTEP_ENGINE{message}")):
        choose_engine(torch.device("cpu"))


def test_engines_that_are_not_installed_are_refused(bare):
    bare("numba", "triton")
    with pytest.raises(ModuleNotFoundError, match="engine='triton' needs the package triton, which has builds for Linux"):
        choose_engine(torch.device("cuda"), "triton")
    with pytest.raises(
        ModuleNotFoundError, match="engine='cpu' needs the package numba: pip install numba, or engine='eager'"
    ):
        choose_engine(torch.device("cpu"), "cpu")
    with pytest.raises(ValueError, match="engine='cpu' needs tensors on the CPU, these are on cuda:1: leave engine out"):
        choose_engine(torch.device("cuda:1"), "cpu")


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
        update(
            rules.sgd_momentum,
            [weight],
            [place.tensor(slope, F32)],
            [[momentum]],
            values,
            rescale_grad=0.25,
            engine=place.engine,
        )
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
    """In float32, 1 - 0.999 would be off by a part in 10^5, and 1 - (1 - 1e-9) would be 0."""
    values = {"lr": 0.1, "wd": 0, "clip": INF, "beta1": x, "beta2": 0.5, "epsilon": 1e-8}
    row = dict(zip(rules.adam.hyper, hyper_values(rules.adam, values), strict=True))
    assert row["one_minus_beta1"] == 1.0 - float(x) != 0.0
    assert row["beta1"] == float(x)
    assert row["one_minus_beta2"] == 0.5
    assert all(type(value) is float for value in row.values())


def test_one_minus_x_may_be_given():
    values = {"lr": 0.1, "wd": 0, "clip": INF, "momentum": 0.9, "one_minus_momentum": 7.0, "wd_lh": 0.0}
    assert hyper_values(rules.signum, values) == [0.1, 0.0, INF, 0.9, 7.0, 0.0]


def test_one_minus_x_reaches_the_step_unrounded(place):
    """Of 1 - 1e-9 only 1e-9 is left in float32, and the average takes in that much of the gradient."""
    values = {"lr": 0.0, "wd": 0.0, "clip": INF, "momentum": 1 - 1e-9, "wd_lh": 0.0}
    weight, momentum = torch.zeros(1, device=place.device), torch.zeros(1, device=place.device)
    update(rules.signum, [weight], [torch.ones(1, device=place.device)], [(momentum,)], values, engine=place.engine)
    assert momentum.item() == pytest.approx(-1e-9, rel=1e-6)


def test_missing_hyper_parameters_are_named():
    with pytest.raises(TypeError, match="rule 'sgd' needs the hyper-parameter 'wd'; given were clip, lr"):
        hyper_values(rules.sgd, {"lr": 0.1, "clip": 1.0})
    with pytest.raises(TypeError, match="rule 'adam' needs the hyper-parameter 'beta1'; given were clip, lr, wd"):
        update(rules.adam, [torch.ones(1)], [torch.ones(1)], [(torch.ones(1), torch.ones(1))], PLAIN)
    with pytest.raises(TypeError, match="'one_minus_x'; given were none"):
        hyper_values(Stub("stub", ("one_minus_x",)), {})


class Stub:
    """As much of a rule as `hyper_values` looks at."""

    def __init__(self, name, hyper):
        self.name, self.hyper = name, hyper


def test_autograd_notices_a_step(place):
    """A graph from before the step would give gradients of another network."""
    weight = torch.ones(3, device=place.device, requires_grad=True)
    loss = (weight * weight).sum()
    update(rules.sgd, [weight], [torch.ones(3, device=place.device)], [()], PLAIN, engine=place.engine)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_autograd_notices_a_later_step_with_the_same_gradients(place):
    weight = torch.ones(3, device=place.device, requires_grad=True)
    weight.grad = torch.ones(3, device=place.device)
    run = Update(rules.sgd, [weight], [()], engine=place.engine)
    run.bind([weight.grad], own=True)
    for _ in range(3):
        run()
        loss = (weight * weight).sum()
    run()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_gradients_that_are_gone_cannot_be_stepped_with(place):
    """Neither those that were bound first nor others of the same layout. From `bind` to the step they are kept alive."""
    weight = torch.ones(3, device=place.device, requires_grad=True)
    run = Update(rules.sgd, [weight], [()], engine=place.engine)
    run.hyper[:] = [1.0, 0.5, 0.0, INF]
    for _ in range(2):
        weight.grad = torch.ones(3, device=place.device)
        run.bind([weight.grad], own=True)
        weight.grad = None
        run()
        with pytest.raises(RuntimeError, match="have been deleted"):
            run()
    assert weight.tolist() == [0.0, 0.0, 0.0]


def test_a_skipped_weight_leaves_autograd_in_peace(place):
    weights = [torch.ones(3, device=place.device, requires_grad=True) for _ in range(2)]
    losses = [(weight * weight).sum() for weight in weights]
    update(rules.sgd, weights, [None, torch.ones(3, device=place.device)], [(), ()], PLAIN, engine=place.engine)
    losses[0].backward()
    assert weights[0].grad.tolist() == [2.0, 2.0, 2.0]


# What is refused. Each row: what is changed of a good call, the error, and what its message must say.


def _ones(*shape, **options):
    return torch.ones(*shape or (3,), **options)


MOMENTUM = {"lr": 0.1, "wd": 0.0, "clip": INF, "momentum": 0.9}
CALLS = {
    "no rule": ({"rule": "sgd"}, TypeError, "rule must be made with @rule or @tensor_rule, got str"),
    "no tensor": ({"weights": [_ones(), [1.0]]}, TypeError, r"weights\[1\] must be a tensor, got list"),
    "a whole-number weight": (
        {"weights": [_ones(), _ones(dtype=torch.int64)]},
        TypeError,
        r"weights\[1\] is torch.int64: must be one of torch.float64, torch.float32, torch.float16, torch.bfloat16",
    ),
    "a complex weight": (
        {"weights": [_ones(), _ones(dtype=torch.complex64)]},
        TypeError,
        r"weights\[1\] is torch.complex64",
    ),
    "a sparse weight": (
        {"weights": [_ones(), _ones().to_sparse()]},
        TypeError,
        r"weights\[1\] is sparse \(torch.sparse_coo\)",
    ),
    "too few weights": ({"weights": [_ones()]}, ValueError, "1 weights came with 2 gradients, 2 states"),
    "too few gradients": ({"gradients": [_ones()]}, ValueError, "2 weights came with 1 gradients"),
    "too many states": ({"states": [(_ones(),)] * 3}, ValueError, "2 weights came with 2 gradients, 3 states"),
    "too few values": ({"hyper": [MOMENTUM]}, ValueError, "2 weights came with .* and 1 sets of hyper-parameters"),
    "a missing state": (
        {"states": [(_ones(),), ()]},
        ValueError,
        r"the state of weights\[1\] has 0 tensors: rule 'sgd_momentum' has 1 \(mom\)",
    ),
    "a state for a rule without": (
        {"rule": rules.sgd},
        ValueError,
        r"the state of weights\[0\] has 1 tensors: rule 'sgd' has 0 \(none\)",
    ),
    "a state that is no tensor": (
        {"states": [(_ones(),), (0.0,)]},
        TypeError,
        r"mom of weights\[1\] must be a tensor, got float",
    ),
    "a state of another type": (
        {"states": [(_ones(),), (_ones(dtype=F64),)]},
        ValueError,
        r"mom of weights\[1\] is torch.float64 \(3,\) on cpu: must be torch.float32 or torch.bfloat16 \(3,\) on cpu",
    ),
    "a state of 16 bits": (
        {"weights": [_ones(), _ones(dtype=BF16)], "states": [(_ones(),), (_ones(dtype=F16),)]},
        ValueError,
        r"mom of weights\[1\] is torch.float16 .*must be torch.float32 or torch.bfloat16",
    ),
    "a state of another shape": (
        {"states": [(_ones(),), (_ones(1, 3),)]},
        ValueError,
        r"\(1, 3\) on cpu: must be .* \(3,\)",
    ),
    "a state elsewhere": ({"states": [(_ones(),), (_ones(device="meta"),)]}, ValueError, r"on meta: must be .* on cpu"),
    "a state of other strides": (
        {
            "weights": [_ones(), _ones(2, 3)],
            "gradients": [_ones(), _ones(2, 3)],
            "states": [(_ones(),), (_ones(3, 2).T,)],
        },
        ValueError,
        r"mom of weights\[1\] has strides \(1, 2\): must have \(3, 1\), the weight's",
    ),
    "a gradient that is no tensor": (
        {"gradients": [_ones(), 1.0]},
        TypeError,
        r"gradient of weights\[1\] must be a tensor or",
    ),
    "a sparse gradient": (
        {"gradients": [_ones(), _ones().to_sparse()]},
        TypeError,
        r"the gradient of weights\[1\] is sparse \(torch.sparse_coo\).*sparse=False in the layer",
    ),
    "a whole-number gradient": (
        {"gradients": [_ones(), _ones(dtype=torch.int32)]},
        TypeError,
        r"the gradient of weights\[1\] is torch.int32: must be one of torch.float64",
    ),
    "a gradient of another shape": (
        {"gradients": [_ones(), _ones(1)]},
        ValueError,
        r"the gradient of weights\[1\] is \(1,\) on cpu: its weight is \(3,\) on cpu",
    ),
    "a gradient elsewhere": (
        {"gradients": [_ones(), _ones(device="meta")]},
        ValueError,
        r"is \(3,\) on meta: its weight is",
    ),
    "a value that is no number": (
        {"hyper": MOMENTUM | {"lr": "fast"}},
        TypeError,
        "lr of rule 'sgd_momentum' must be a number, got 'fast'",
    ),
}


@pytest.mark.parametrize("what", CALLS)
def test_refused_before_anything_changes(what):
    changed, error, message = CALLS[what]
    good = {
        "rule": rules.sgd_momentum,
        "weights": [_ones(), _ones()],
        "gradients": [_ones(), _ones()],
        "states": [(_ones(),), (_ones(),)],
        "hyper": MOMENTUM,
    }
    arguments = good | changed
    with pytest.raises(error, match=message):
        update(**arguments, engine="eager")
    for tensor in [arguments["weights"][0], *arguments["states"][0]]:
        assert tensor.tolist() == [1.0, 1.0, 1.0]
    update(**good, engine="eager")  # but for the change it would have run
    assert good["weights"][0].tolist() != [1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"states": [()]}, ValueError, "1 states for 2 weights: there must be as many"),
        ({"masters": [None]}, ValueError, "1 masters for 2 weights"),
        ({"names": ["a", "b", "c"]}, ValueError, "3 names for 2 weights"),
        ({"masters": [None, _ones(dtype=F64)]}, ValueError, "master of weights.1. is torch.float64"),
        ({"masters": [None, _ones(4)]}, ValueError, r"master of weights.1. is torch.float32 \(4,\)"),
        ({"masters": [None, 1.0]}, TypeError, "master of weights.1. must be a tensor, got float"),
        ({"masters": [None, _ones(4)], "names": ["head", "body"]}, ValueError, "master of body is"),
    ],
    ids=lambda value: "" if isinstance(value, type) else None,
)
def test_an_update_refuses(arguments, error, message):
    good = {"rule": rules.sgd, "weights": [_ones(), _ones(dtype=BF16)], "states": [(), ()]}
    Update(**good)
    with pytest.raises(error, match=message):
        Update(**good | arguments)


def test_messages_call_weights_by_their_names():
    run = Update(rules.sgd, [_ones(), _ones()], [(), ()], names=["head.weight", "head.bias"])
    with pytest.raises(ValueError, match="the gradient of head.bias is"):
        run.bind([_ones(), _ones(2)])
    with pytest.raises(ValueError, match="1 gradients for 2 weights: there must be as many"):
        run.bind([_ones()])


def test_a_refused_gradient_leaves_the_bound_ones(place):
    weight, good = torch.zeros(3, device=place.device), torch.ones(3, device=place.device)
    run = Update(rules.sgd, [weight], [()], engine=place.engine)
    run.hyper[:] = [1.0, 1.0, 0.0, INF]
    run.bind([good])
    with pytest.raises(ValueError, match="the gradient of"):
        run.bind([torch.ones(4, device=place.device)])
    run()
    assert weight.tolist() == [-1.0, -1.0, -1.0]


def test_states_fit_until_a_weight_is_converted_or_cut(place):
    weight = torch.zeros(4, 2, device=place.device)
    run = Update(rules.sgd_momentum, [weight], [(torch.zeros_like(weight),)], engine=place.engine)
    assert run.fits()
    assert not run.fits(lambda weight: F32)  # it has no master
    assert run.fits(lambda weight: None)
    weight.data = torch.zeros(4, 2, device=place.device)  # moved
    assert run.fits()
    weight.data = torch.zeros(3, 2, device=place.device)
    assert not run.fits()
    weight.data = torch.zeros(4, 2, device=place.device, dtype=F64)
    assert not run.fits()
    weight.data = torch.zeros(4, 2, device=place.device, dtype=F16)  # computed in float32 too
    assert run.fits()


# The folder of compiled code.

STEP = """
import importlib.util, math, sys
from pathlib import Path
import torch
import numba.core.event
recorder = numba.core.event.RecordingListener()
numba.core.event.register("numba:compile", recorder)
from tristep.kernels import Update, rules
from tristep.kernels.backends.cpu import loops

def step(rule=rules.sgd):
    '''One step of little work, and one for threads.'''
    for size in (3, 200_000):
        weight, gradient = torch.ones(size), torch.ones(size)
        run = Update(rule, [weight], [()], engine="cpu")
        run.hyper[:] = [1.0, 0.25, 0.0, math.inf][: run.hyper.shape[1]]
        run.bind([gradient])
        run()
        assert weight.unique().tolist() == [0.75], weight
"""
REPORT = """
print(len(loops.loops), any(event.is_start for _, event in recorder.buffer))
"""


@pytest.fixture
def native_script(tmp_path, fresh_python):
    """A function that runs a script after STEP, with this cache folder, and gives the words it printed."""
    count = 0

    def run(text, cache):
        nonlocal count
        count += 1
        script = tmp_path / f"script_{count}.py"
        script.write_text(STEP + text, encoding="utf-8")
        return fresh_python(script, NUMBA_CACHE_DIR=str(cache), PYTHONDONTWRITEBYTECODE="1").split()

    return run


def _kept(folder):
    return sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())


@needs_numba
def test_another_process_compiles_nothing_again(native_script, tmp_path):
    cache = tmp_path / "cache"
    assert native_script(f"step()\n{REPORT}", cache) == ["1", "True"]
    kept = _kept(cache)
    assert sorted({path.suffix for path in kept}) == [".nbc", ".nbi", ".py"]
    assert native_script(f"step()\n{REPORT}", cache) == ["1", "False"]
    assert _kept(cache) == kept


MODULE = """
from tristep.kernels import rule

@rule
def mine(w, g, state, hyper):
    (lr,) = hyper
    return w - {}lr * g, state
"""
LOAD = """
spec = importlib.util.spec_from_file_location("{name}", {path!r})
module = importlib.util.module_from_spec(spec)
sys.modules["{name}"] = module
spec.loader.exec_module(module)
step(module.mine)
"""


@pytest.mark.sample(0)
@needs_numba
def test_kept_code_does_not_need_the_module_that_the_rule_was_in(native_script, tmp_path):
    """A rule's text decides; the file may since have been renamed."""
    cache = tmp_path / "cache"
    for name, compiled in [("first_name", "True"), ("second_name", "False")]:
        path = tmp_path / f"{name}.py"
        path.write_text(MODULE.format(""), encoding="utf-8")
        report = native_script(LOAD.format(name=name, path=str(path)) + REPORT, cache)
        assert report == ["1", compiled]
        path.unlink()


@needs_numba
@pytest.mark.sample(0)
def test_a_rule_changed_in_its_file_is_compiled_anew(native_script, tmp_path):
    cache, path = tmp_path / "cache", tmp_path / "mine.py"
    for factor in ("", "1.0 * "):
        path.write_text(MODULE.format(factor), encoding="utf-8")
        assert native_script(LOAD.format(name="mine", path=str(path)) + REPORT, cache) == ["1", "True"]


@pytest.mark.sample(0)
@needs_numba
def test_a_folder_that_cannot_be_made_is_done_without(native_script, tmp_path):
    (tmp_path / "file").write_text("not a folder", encoding="utf-8")
    assert native_script(f"step()\n{REPORT}", tmp_path / "file" / "cache") == ["1", "True"]
    assert (tmp_path / "file").read_text(encoding="utf-8") == "not a folder"


READ_ONLY = """
import numba.core.caching

def refuse(self):
    raise PermissionError("read-only")

numba.core.caching._CacheLocator.ensure_cache_path = refuse
"""


@pytest.mark.sample(0)
@needs_numba
def test_folders_that_cannot_be_written_to_are_done_without(fresh_python, native_script, tmp_path):
    """As in a container that is read-only, also where the package itself lies. The second time, loops are there as text."""
    cache, script = tmp_path / "cache", tmp_path / "read_only.py"
    for _ in range(2):
        script.write_text(f"{READ_ONLY}{STEP}step()\n{REPORT}", encoding="utf-8")
        assert fresh_python(script, NUMBA_CACHE_DIR=str(cache)).split() == ["1", "True"]
        assert {path.suffix for path in _kept(cache)} == {".py"}


@pytest.mark.sample(0)
@needs_numba
def test_a_damaged_loop_is_written_again(native_script, tmp_path):
    cache = tmp_path / "cache"
    assert native_script(f"step()\n{REPORT}", cache) == ["1", "True"]
    for path in cache.glob("*.py"):
        path.write_text("raise SystemExit('damaged')", encoding="utf-8")
    assert native_script(f"step()\n{REPORT}", cache)[0] == "1"


MESSAGES = """
from tristep.kernels import compress

def check(*names):
    values = torch.linspace(-1, 1, 3000)
    for name in names:
        found = []
        for engine in ("cpu", "eager"):
            code = compress.CODES[name]
            messages = torch.zeros(1, code.size(code.chunk(3000, 1)), dtype=torch.uint8)
            compress.encode(code, values, None, messages, 0.25, engine)
            read = torch.zeros(3000)
            compress.decode(code, messages, read, 0.25, engine)
            found += [messages, read]
        assert torch.equal(found[0], found[2]) and torch.equal(found[1], found[3]), name
"""


@pytest.mark.sample(0)
@needs_numba
def test_functions_of_one_name_that_two_processes_have_kept_are_told_apart(native_script, tmp_path):
    """Of 1, 2 and 4 bits, whose functions are one text, and have symbols of one number as each process begins anew."""
    for names in (["1bit"], ["2bit"], ["int4"], ["1bit", "2bit", "int4"], ["int4", "2bit", "1bit"]):
        native_script(f"{MESSAGES}\ncheck(*{names})", tmp_path / "cache")


@needs_numba
def test_no_two_compiled_functions_have_one_name():
    from tristep.kernels.backends.cpu import low_precision
    from tristep.kernels.compress import cpu

    packing = [*low_precision.PACKING, *cpu.PACKING.values()]
    functions = {id(each.py_func): each.py_func for each in itertools.chain(*packing)}
    assert len({(each.__module__, each.__qualname__) for each in functions.values()}) == len(functions) > 8


@pytest.mark.sample(0)
@needs_numba
def test_processes_may_write_the_same_code_at_once(native_script, tmp_path):
    """They are made to wait for each other just before the first step."""
    cache, script = tmp_path / "cache", tmp_path / "together.py"
    script.write_text(f"{STEP}print('ready', flush=True)\nsys.stdin.readline()\nstep()\n{REPORT}", encoding="utf-8")
    children = [
        subprocess.Popen(
            [sys.executable, str(script)],
            env=os.environ | {"NUMBA_CACHE_DIR": str(cache)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(3)
    ]
    try:
        assert [child.stdout.readline() for child in children] == ["ready\n"] * 3
        for child in children:
            child.stdin.write("go\n")
            child.stdin.flush()
        results = [child.communicate(timeout=200) for child in children]
    finally:
        for child in children:
            child.kill()
            child.communicate()
    assert [(child.returncode, error) for child, (_, error) in zip(children, results, strict=True)] == [(0, "")] * 3
    assert not [path for path in _kept(cache) if path.suffix not in (".nbc", ".nbi", ".py")]
    assert native_script(f"step()\n{REPORT}", cache) == ["1", "False"]


@needs_numba
@pytest.mark.parametrize(
    ("platform", "variables", "expected"),
    [
        ("linux", {}, "home/.cache/tristep"),
        ("linux", {"XDG_CACHE_HOME": "/elsewhere"}, "/elsewhere/tristep"),
        ("darwin", {}, "home/Library/Caches/tristep"),
        ("win32", {}, "home/AppData/Local/tristep"),
        ("win32", {"LOCALAPPDATA": "/local"}, "/local/tristep"),
        ("linux", {"NUMBA_CACHE_DIR": "/numba", "XDG_CACHE_HOME": "/elsewhere"}, "/numba"),
    ],
)
def test_where_compiled_code_is_kept(monkeypatch, tmp_path, platform, variables, expected):
    from tristep.kernels.backends.cpu import disk_cache

    for name in ("NUMBA_CACHE_DIR", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("USERPROFILE", str(tmp_path / "home"))
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "platform", platform)
    assert disk_cache.cache_folder() == tmp_path / expected
