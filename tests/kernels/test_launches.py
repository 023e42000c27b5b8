"""How often the triton engine launches, copies and compiles: on a driver that counts and runs nothing, so without a GPU.

A fresh interpreter plays all scenes with `benchmarks/fake_driver.py`, since here Triton may be set to interpret kernels.
Operations of torch are counted by torch itself; in a step, each would be a launch or a copy of its own.
"""

import json
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton has builds for Linux only")

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

SCENES = '''
import importlib, json, linecache, math, sys, warnings

warnings.simplefilter("error")  # some Triton warns of options that are left to it

import torch
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, sys.argv[1])
import fake_driver
import triton
from triton.backends.nvidia.compiler import CUDABackend

# Nothing runs the kernels, so they need no machine code; those with some are in another folder.
triton.knobs.cache.dir += "/emulator"
CUDABackend.make_cubin = lambda self, source, metadata, options, capability: source.encode()
driver = fake_driver.install()
import tristep
from tristep.kernels import MetricsBuffer, Update, metrics, rules

F32, F64, F16, BF16 = torch.float32, torch.float64, torch.float16, torch.bfloat16


class Operations(TorchDispatchMode):
    """Notes the name of each operation of torch."""

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.seen.append(operation.overloadpacket.__name__)
        return operation(*args, **(kwargs or {}))

    seen = []


def watched(run):
    """What one call launches, on how many programs, which operations of torch it makes, and what it compiles."""
    launches, loads, Operations.seen = len(driver.launches), len(driver.loads), []
    with Operations():
        run()
    return {
        "grids": [grid for _, grid, _ in driver.launches[launches:]],
        "operations": Operations.seen,
        "compiled": len(driver.loads) - loads,
    }


def prepared(weights, gradients, rule=rules.adamw):
    states = [tuple(torch.zeros(w.shape, dtype=F64 if w.dtype == F64 else F32) for _ in rule.state) for w in weights]
    run = Update(rule, weights, states, engine="triton")
    run.hyper[:] = 0.5
    run.bind(gradients)
    return run


def tensors(n, size=8, dtype=F32):
    return [torch.ones(size, dtype=dtype) for _ in range(n)]


measure = metrics.joined(metrics.weight_square, metrics.gradient_absmax, metrics.update_square)


def measured(run, into):
    into.begin_step()
    run(into)
    into.end_step()


result = {}

# 148 tensors of one kind
weights, gradients = tensors(148), tensors(148)
run = prepared(weights, gradients)
result["first"] = watched(run)
result["nothing changed"] = watched(run)
run.hyper[3, 1] = 0.25
result["one rate changed"] = watched(run)
result["and kept"] = watched(run)
result["gradients written anew"] = watched(lambda: [gradient.mul_(2.0) for gradient in gradients] and run())
others = tensors(148)
run.bind(others)
result["other gradients"] = watched(run)
result["and kept too"] = watched(run)
arguments = [arguments for _, _, arguments in driver.launches]
# what the device then has
result["on the device"] = {
    "gradients": arguments[0][1].tolist() == [gradient.data_ptr() for gradient in others],
    "hyper": torch.equal(arguments[0][2], torch.from_numpy(run.hyper).flatten().float()),
}

# several kinds
kinds = [(F32, F32)] * 100 + [(BF16, BF16)] * 30 + [(F32, BF16)] * 10 + [(F64, F64)] * 8
weights = [torch.ones(8, dtype=kind) for kind, _ in kinds]
gradients = [torch.ones(8, dtype=kind) for _, kind in kinds]
run = prepared(weights, gradients)
result["four kinds"] = watched(run)
result["four kinds again"] = watched(run)
run.hyper[120, 1] = 0.25
result["four kinds, one rate of the second"] = watched(run)

# a rule with sums: what each tile adds, what each tensor does, and the rule
weights, gradients = tensors(148), tensors(148)
run = prepared(weights, gradients, rules.lars)
result["sums"] = watched(run)
result["sums again"] = watched(run)
run.hyper[3, 1] = 0.25
result["sums, one rate changed"] = watched(run)

# measured: one launch more, for what its tiles have found of each tensor
weights, gradients = tensors(148), tensors(148)
run, into = prepared(weights, gradients), MetricsBuffer(measure, 148, 4)
first, *others = [watched(lambda: measured(run, into)) for _ in range(6)]
result["measured"], result["measured again"] = first, {"alike": all(each == others[0] for each in others), **others[0]}
result["then not measured"] = watched(run)

# a trainer: parameter groups, multipliers and schedules are rows of one table
for zero in (False, True):
    parameters = [torch.nn.Parameter(torch.ones(8)) for _ in range(148)]
    for k, parameter in enumerate(parameters):
        parameter.lr_mult, parameter.wd_mult = 0.5 + k, float(k % 3)
    trainer = tristep.Trainer(parameters, "adamw", {"learning_rate": 0.1, "wd": 0.01}, engine="triton")
    steps = []
    for k in range(6):
        if k == 0 or zero:
            for parameter in parameters:
                parameter.grad = torch.ones(8)
        trainer.set_learning_rate(0.1 / (k + 1))
        torch._foreach_mul_([parameter.grad for parameter in parameters], 1.0)
        steps.append(watched(lambda: trainer.step(1)))
    name = "trainer, new gradients" if zero else "trainer"
    result[name] = {"alike": all(step == steps[2] for step in steps[2:]), **steps[2]}

parameters = [torch.nn.Parameter(torch.ones(8)) for _ in range(148)]
trainer = tristep.Trainer(parameters, "adamw", engine="triton", telemetry=True)
for parameter in parameters:
    parameter.grad = torch.ones(8)
steps = []
for _ in range(4):
    torch._foreach_mul_([parameter.grad for parameter in parameters], 1.0)
    steps.append(watched(lambda: trainer.step(1)))
result["telemetry"] = {"alike": steps[2] == steps[3], **steps[2]}

# rules and measures of one name, as a cell of a notebook that is changed and run again makes them
CELL = """from tristep.kernels import metric, rule

@rule
def mine(w, g, state, hyper):
    (lr,) = hyper
    return w - FACTOR * lr * g, state

@metric(found="sum")
def found(w, g, new_w):
    return (FACTOR * g,)
"""
result["cells"] = {"rules": [], "measures": []}
for cell, factor in [("<first>", "2.0"), ("<second>", "3.0")]:
    text, scope = CELL.replace("FACTOR", factor), {"__name__": "__main__"}
    linecache.cache[cell] = len(text), None, text.splitlines(keepends=True), cell
    exec(compile(text, cell, "exec"), scope)
    run = prepared(tensors(3), gradients := tensors(3), scope["mine"])
    result["cells"]["rules"].append(watched(run)["compiled"])
    run, into = prepared(tensors(3), gradients := tensors(3), rules.sgd), MetricsBuffer(scope["found"], 3, 4)
    result["cells"]["measures"].append(watched(lambda: measured(run, into))["compiled"])

json.dump(result, sys.stdout)
'''


@pytest.fixture(scope="module")
def scenes(fresh_python, tmp_path_factory):
    """What happened in each scene."""
    folder = tmp_path_factory.mktemp("launches")
    (folder / "scenes.py").write_text(SCENES, encoding="utf-8")
    return json.loads(fresh_python(folder / "scenes.py", BENCHMARKS, unset=["TRITON_INTERPRET"]))


def _grids(*programs):
    return [[*each, 1] if isinstance(each, tuple) else [each, 1, 1] for each in programs]


NOTHING = {"operations": [], "compiled": 0}
KINDS, SUMS = _grids(100, 30, 10, 8), _grids(148, (148, 3), 148)
MEASURED = _grids(148, (148, 3))
EXPECTED = {
    "first": {"grids": _grids(148), "compiled": 1},
    "nothing changed": {"grids": _grids(148), **NOTHING},
    "one rate changed": {"operations": ["copy_"], "compiled": 0},
    "and kept": NOTHING,
    "gradients written anew": {"grids": _grids(148), "operations": ["mul_"] * 148},  # so operations are seen, and no copy
    "other gradients": {"operations": ["copy_"], "compiled": 0},
    "and kept too": NOTHING,
    "on the device": {"gradients": True, "hyper": True},
    # A launch for each pair of types, of which the first kernel was there.
    "four kinds": {"grids": KINDS, "compiled": 3},
    "four kinds again": {"grids": KINDS, **NOTHING},
    "four kinds, one rate of the second": {"operations": ["copy_"], "compiled": 0},
    # What a launch finds its kernel by in Triton 3.5 are the functions' names.
    "cells": {"rules": [1, 1], "measures": [1, 1]},
    # Launches: sums of tiles, sums of tensors, and the rule.
    "sums": {"grids": SUMS, "compiled": 3},
    "sums again": {"grids": SUMS, **NOTHING},
    "sums, one rate changed": {"grids": SUMS, "operations": ["copy_"], "compiled": 0},
    # One launch more, with a program for each tensor and value.
    "measured": {"grids": MEASURED, "compiled": 2},
    "measured again": {"alike": True, "grids": MEASURED, **NOTHING},
    "then not measured": {"grids": _grids(148), "operations": []},
    "telemetry": {"alike": True, "grids": _grids(148, (148, 10)), "operations": ["copy_"], "compiled": 0},
    # With another learning rate at each step, and multipliers for each parameter.
    "trainer": {"alike": True, "grids": _grids(148), "operations": ["copy_"], "compiled": 0},
    "trainer, new gradients": {"alike": True, "grids": _grids(148), "operations": ["copy_"], "compiled": 0},
}


@pytest.mark.parametrize("scene", EXPECTED)
def test_launches_copies_and_kernels_of(scenes, scene):
    found, expected = scenes[scene], EXPECTED[scene]
    assert {name: found[name] for name in expected} == expected
