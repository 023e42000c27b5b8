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


def other_numbers(rule, is_measured=False):
    for n in (1, 2, 3, 16, 17, 160):
        run = prepared(tensors(n), gradients := tensors(n), rule)
        measured(run, MetricsBuffer(measure, n, 4)) if is_measured else run()


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
# the arguments that the JIT launches with, and those of all later launches
arguments = [arguments for _, _, arguments in driver.launches]
parameters = len(importlib.import_module("tristep.kernels.backends.triton.kernels").update_kernel.arg_names)
result["arguments"] = {
    "parameters": parameters,
    "counts": sorted({len(those) for those in arguments}),
    "alike": all(all(a is b or a == b for a, b in zip(those, arguments[0])) for those in arguments[1:]),
    "launches": len(arguments),
}
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

# sizes: tiles of 1,024 elements
sizes = [1, 1024, 1025, 0, 5000]
run = prepared([torch.ones(size) for size in sizes], gradients := [torch.ones(size) for size in sizes])
result["sizes"] = watched(run)

# nothing at all
result["no tensors"] = watched(prepared([], []))
result["empty tensors"] = watched(prepared(tensors(3, 0), gradients := tensors(3, 0)))

# another number of tensors needs no other kernel
result["other numbers"] = watched(lambda: other_numbers(rules.adamw))
run = prepared(tensors(3), gradients := tensors(3), rules.sgd)
result["another rule"] = watched(run)

# a rule with sums: what each tile adds, what each tensor does, and the rule
weights, gradients = tensors(148), tensors(148)
run = prepared(weights, gradients, rules.lars)
result["sums"] = watched(run)
result["sums again"] = watched(run)
run.hyper[3, 1] = 0.25
result["sums, one rate changed"] = watched(run)
result["sums, other numbers"] = watched(lambda: other_numbers(rules.lars))
run = prepared([torch.ones(size) for size in sizes], gradients := [torch.ones(size) for size in sizes], rules.lars)
result["sums, sizes"] = watched(run)
result["sums of empty tensors"] = watched(prepared(tensors(3, 0), gradients := tensors(3, 0), rules.lars))
size = 4096 * 4096 + 1  # of which a program takes 4,096 for sums, and 2,048 for the rule
run = prepared([torch.empty(size), torch.empty(3)], gradients := [torch.empty(size), torch.empty(3)], rules.lars)
result["sums, more than a program adds up"] = watched(run)
run = prepared(tensors(5), gradients := tensors(5), rules.lans)
run()
result["sums of sums"] = watched(run)

# measured: one launch more, for what its tiles have found of each tensor
weights, gradients = tensors(148), tensors(148)
run, into = prepared(weights, gradients), MetricsBuffer(measure, 148, 4)
first, *others = [watched(lambda: measured(run, into)) for _ in range(6)]
result["measured"], result["measured again"] = first, {"alike": all(each == others[0] for each in others), **others[0]}
result["slots"] = {"of the ring": [arguments[10] for name, _, arguments in driver.launches if name == "totals_kernel"][-6:]}
result["then not measured"] = watched(run)
run.hyper[3, 1] = 0.25
result["measured, one rate changed"] = watched(lambda: measured(run, into))
result["measured, other numbers"] = watched(lambda: other_numbers(rules.adamw, True))
run, into = prepared(tensors(3, 0), gradients := tensors(3, 0)), MetricsBuffer(measure, 3, 4)
result["measured, empty tensors"] = watched(lambda: measured(run, into))
run, into = prepared(tensors(5), gradients := tensors(5), rules.lars), MetricsBuffer(measure, 5, 4)
result["measured, with sums"] = watched(lambda: measured(run, into))

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
    # the first two also build the table, and try out once whether torch can be asked about many tensors at a time
    result[name] = {"alike": all(step == steps[2] for step in steps[2:]), **steps[2]}
    result[f"{name}, first steps"] = {"grids": [step["grids"] for step in steps[:2]]}

for telemetry in (True, tristep.Telemetry(every=3)):
    parameters = [torch.nn.Parameter(torch.ones(8)) for _ in range(148)]
    trainer = tristep.Trainer(parameters, "adamw", engine="triton", telemetry=telemetry)
    for parameter in parameters:
        parameter.grad = torch.ones(8)
    steps = []
    for _ in range(6):
        torch._foreach_mul_([parameter.grad for parameter in parameters], 1.0)
        steps.append(watched(lambda: trainer.step(1)))
    if telemetry is True:
        result["telemetry"] = {"alike": all(step == steps[2] for step in steps[2:]), **steps[2]}
    else:
        result["telemetry of every third"] = {"launches": [len(step["grids"]) for step in steps]}

# per-tensor states, of which each of two groups has some, in turns: of two types of weights, and of packed states; and such
# as are converted
def third_step(n, name, one, other, options, convert):
    kinds = [one if i % 3 == 1 or i % 4 == 0 else other for i in range(n)]
    parameters = [torch.nn.Parameter(torch.ones(size, dtype=dtype)) for size, dtype in kinds]
    trainer = tristep.Trainer(parameters, name, options, engine="triton")
    for k in range(3):
        for parameter in parameters:
            parameter.data = parameter.data.double() if convert and k == 1 else parameter.data
            parameter.grad = torch.ones_like(parameter)
        found = watched(lambda: trainer.step(1))
    return {"launches": len(found["grids"]), "operations": found["operations"]}


small, kinds = (8, F32), {"alike": (8, F32), "types": (8, BF16), "packed": (4096, F32), "converted": (8, F32)}
for name in ("novograd", "prodigy"):
    for kind, other in kinds.items() if name == "novograd" else [("alike", small)]:
        options = {"state_dtype": "8bit"} if kind == "packed" else {}
        few, many = [third_step(n, name, small, other, options, kind == "converted") for n in (12, 148)]
        result[f"{name}, {kind}"] = {"alike": few == many, "few": len(many["operations"]) <= 20 * many["launches"], **many}

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

# votes of one rank, which Triton makes a constant of
from tristep.kernels import compress
code = compress.CODES["2bit"]
votes, values = torch.zeros(1, code.votes_size(1024, 1), dtype=torch.uint8), torch.zeros(1000)
result["votes of one rank"] = watched(lambda: compress.decode_votes(code, 1, votes, values, 0.5, "triton"))

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
    # The first launch goes through Triton's JIT, which binds arguments to the kernel's parameters; the others bypass it.
    "arguments": {"parameters": 16, "counts": [16], "alike": True, "launches": 7},
    "on the device": {"gradients": True, "hyper": True},
    # A launch for each pair of types, of which the first kernel was there.
    "four kinds": {"grids": KINDS, "compiled": 3},
    "four kinds again": {"grids": KINDS, **NOTHING},
    "four kinds, one rate of the second": {"operations": ["copy_"], "compiled": 0},
    # A program for each tile.
    "sizes": {"grids": _grids(1 + 1 + 2 + 0 + 5), "compiled": 0},
    "no tensors": {"grids": [], **NOTHING},
    "empty tensors": {"grids": [], **NOTHING},
    "other numbers": {"compiled": 0},
    "another rule": {"compiled": 1},
    # What a launch finds its kernel by in Triton 3.5 are the functions' names.
    "cells": {"rules": [1, 1], "measures": [1, 1]},
    # Per-tensor state takes three launches for each group of one type, and as many operations of torch as for few tensors.
    "novograd, alike": {"alike": True, "few": True, "launches": 3},
    "novograd, types": {"alike": True, "few": True, "launches": 6},
    "novograd, packed": {"alike": True, "few": True, "launches": 6},
    "novograd, converted": {"alike": True, "few": True, "launches": 3},
    "prodigy, alike": {"alike": True, "few": True, "launches": 3},
    "votes of one rank": {"grids": _grids(1)},
    # Launches: sums of tiles, sums of tensors, and the rule; a reduction that uses another's sums takes two more.
    "sums": {"grids": SUMS, "compiled": 3},
    "sums again": {"grids": SUMS, **NOTHING},
    "sums, one rate changed": {"grids": SUMS, "operations": ["copy_"], "compiled": 0},
    "sums of sums": {"grids": _grids(5, (5, 2), 5, (5, 5), 5), **NOTHING},
    "sums of empty tensors": {"grids": []},
    "sums, other numbers": {"compiled": 0},
    # A program for each 4,096 elements, and another launch for each 4,096 of these.
    "sums, sizes": {"grids": _grids(1 + 1 + 1 + 0 + 2, (5, 3), 9)},
    "sums, more than a program adds up": {"grids": _grids(4097 + 1, (2 + 1, 3), (2, 3), 8193 + 1), "compiled": 0},
    # One launch more, with a program for each tensor and value, and the slot of the ring as its argument.
    "measured": {"grids": MEASURED, "compiled": 2},
    "measured again": {"alike": True, "grids": MEASURED, **NOTHING},
    "slots": {"of the ring": [0, 1, 2, 3, 4, 0]},
    "then not measured": {"grids": _grids(148), "operations": []},
    "measured, one rate changed": {"operations": ["copy_"]},
    "measured, other numbers": {"compiled": 0},
    "measured, empty tensors": {"grids": _grids((3, 3))},
    "measured, with sums": {"grids": _grids(5, (5, 3), 5, (5, 3))},
    "telemetry": {"alike": True, "grids": _grids(148, (148, 10)), "operations": ["copy_"], "compiled": 0},
    "telemetry of every third": {"launches": [2, 1, 1, 2, 1, 1]},
    # With another learning rate at each step, and multipliers for each parameter.
    "trainer": {"alike": True, "grids": _grids(148), "operations": ["copy_"], "compiled": 0},
    "trainer, first steps": {"grids": [_grids(148)] * 2},
    "trainer, new gradients": {"alike": True, "grids": _grids(148), "operations": ["copy_"], "compiled": 0},
    "trainer, new gradients, first steps": {"grids": [_grids(148)] * 2},
}


@pytest.mark.parametrize("scene", EXPECTED)
def test_launches_copies_and_kernels_of(scenes, scene):
    found, expected = scenes[scene], EXPECTED[scene]
    assert {name: found[name] for name in expected} == expected


def test_every_scene_is_looked_at(scenes):
    assert scenes.keys() == EXPECTED.keys()
