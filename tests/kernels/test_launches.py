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
loads = len(driver.loads)
for n in (1, 2, 3, 16, 17, 160):
    run = prepared(tensors(n), gradients := tensors(n))
    run()
result["kernels for other numbers"] = len(driver.loads) - loads
run = prepared(tensors(3), gradients := tensors(3), rules.sgd)
result["another rule"] = watched(run)

# a rule with sums: what each tile adds, what each tensor does, and the rule
weights, gradients = tensors(148), tensors(148)
run = prepared(weights, gradients, rules.lars)
result["sums"] = watched(run)
result["sums again"] = watched(run)
run.hyper[3, 1] = 0.25
result["sums, one rate changed"] = watched(run)
loads = len(driver.loads)
for n in (1, 2, 3, 16, 17, 160):
    run = prepared(tensors(n), gradients := tensors(n), rules.lars)
    run()
result["kernels of sums for other numbers"] = len(driver.loads) - loads
sizes = [1, 1024, 1025, 0, 5000]
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
measure = metrics.joined(metrics.weight_square, metrics.gradient_absmax, metrics.update_square)


def measured(run, into):
    into.begin_step()
    run(into)
    into.end_step()


weights, gradients = tensors(148), tensors(148)
run, into = prepared(weights, gradients), MetricsBuffer(measure, 148, 4)
result["measured"] = [watched(lambda: measured(run, into)) for _ in range(6)]
slots = [arguments[10] for name, _, arguments in driver.launches if name == "totals_kernel"][-6:]
result["slots"] = slots
result["then not measured"] = watched(run)
run.hyper[3, 1] = 0.25
result["measured, one rate changed"] = watched(lambda: measured(run, into))
loads = len(driver.loads)
for n in (1, 2, 3, 16, 17, 160):
    run = prepared(tensors(n), gradients := tensors(n))
    measured(run, MetricsBuffer(measure, n, 4))
result["kernels of measures for other numbers"] = len(driver.loads) - loads
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
    result["trainer, new gradients" if zero else "trainer"] = steps

for telemetry in (True, tristep.Telemetry(every=3)):
    parameters = [torch.nn.Parameter(torch.ones(8)) for _ in range(148)]
    trainer = tristep.Trainer(parameters, "adamw", engine="triton", telemetry=telemetry)
    for parameter in parameters:
        parameter.grad = torch.ones(8)
    steps = []
    for _ in range(6):
        torch._foreach_mul_([parameter.grad for parameter in parameters], 1.0)
        steps.append(watched(lambda: trainer.step(1)))
    result["telemetry" if telemetry is True else "telemetry of every third"] = steps

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
        found = [third_step(n, name, small, other, options, kind == "converted") for n in (12, 148)]
        result[f"{name}, {kind}"] = found

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
result["cells"], result["measures of cells"] = [], []
for cell, factor in [("<first>", "2.0"), ("<second>", "3.0")]:
    text, scope = CELL.replace("FACTOR", factor), {"__name__": "__main__"}
    linecache.cache[cell] = len(text), None, text.splitlines(keepends=True), cell
    exec(compile(text, cell, "exec"), scope)
    run = prepared(tensors(3), gradients := tensors(3), scope["mine"])
    result["cells"].append(watched(run)["compiled"])
    run, into = prepared(tensors(3), gradients := tensors(3), rules.sgd), MetricsBuffer(scope["found"], 3, 4)
    result["measures of cells"].append(watched(lambda: measured(run, into))["compiled"])

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


def test_one_launch_for_148_tensors(scenes):
    assert scenes["first"]["grids"] == [[148, 1, 1]]
    assert scenes["first"]["compiled"] == 1


def test_one_launch_for_each_pair_of_types(scenes):
    assert scenes["four kinds"]["grids"] == [[100, 1, 1], [30, 1, 1], [10, 1, 1], [8, 1, 1]]
    assert scenes["four kinds again"]["grids"] == scenes["four kinds"]["grids"]


def test_a_launch_has_a_program_for_each_tile(scenes):
    assert scenes["sizes"]["grids"] == [[1 + 1 + 2 + 0 + 5, 1, 1]]


@pytest.mark.parametrize("scene", ["no tensors", "empty tensors"])
def test_no_launch_for(scenes, scene):
    assert scenes[scene] == {"grids": [], "operations": [], "compiled": 0}


@pytest.mark.parametrize("scene", ["nothing changed", "and kept", "and kept too", "four kinds again"])
def test_nothing_is_copied_where_nothing_changed(scenes, scene):
    assert scenes[scene]["operations"] == []


def test_gradients_in_the_same_place_are_not_copied_again(scenes):
    """The counting itself can be seen here: writing them was 148 operations."""
    assert scenes["gradients written anew"]["operations"] == ["mul_"] * 148
    assert scenes["gradients written anew"]["grids"] == [[148, 1, 1]]


@pytest.mark.parametrize("scene", ["one rate changed", "other gradients", "four kinds, one rate of the second"])
def test_one_copy_where_something_changed(scenes, scene):
    assert scenes[scene]["operations"] == ["copy_"]


def test_the_device_has_what_is_bound(scenes):
    assert scenes["on the device"] == {"gradients": True, "hyper": True}


def test_later_launches_have_the_arguments_of_the_first(scenes):
    """The first goes through Triton's JIT, which binds them to the kernel's parameters; the others bypass it."""
    found = scenes["arguments"]
    assert found == {"parameters": 16, "counts": [16], "alike": True, "launches": 7}


def test_other_values_and_other_numbers_of_tensors_compile_nothing(scenes):
    for scene in ("nothing changed", "one rate changed", "other gradients", "four kinds again", "sizes"):
        assert scenes[scene]["compiled"] == 0
    assert scenes["kernels for other numbers"] == 0
    assert scenes["four kinds"]["compiled"] == 3  # the first of them was there
    assert scenes["another rule"]["compiled"] == 1


@pytest.mark.parametrize("scene", ["cells", "measures of cells"])
def test_functions_of_one_name_have_kernels_of_their_own(scenes, scene):
    """What a launch finds its kernel by in Triton 3.5 are the functions' names."""
    assert scenes[scene] == [1, 1]


@pytest.mark.parametrize(
    ("name", "kind"), [*(("novograd", kind) for kind in ("alike", "types", "packed", "converted")), ("prodigy", "alike")]
)
def test_per_tensor_state_costs_no_launches_for_each_tensor(scenes, name, kind):
    """Three launches for each group, of which those of several types are two, and as many operations of torch as for few."""
    few, many = scenes[f"{name}, {kind}"]
    assert many == few
    groups = 2 if kind in ("types", "packed") else 1
    assert many["launches"] == 3 * groups
    assert len(many["operations"]) <= 40 * groups


def test_votes_of_one_rank(scenes):
    assert scenes["votes of one rank"]["grids"] == [[1, 1, 1]]


def test_a_rule_with_sums_takes_three_launches_and_copies_no_more_than_others(scenes):
    """For the sums of tiles, those of tensors, and the rule; where one reduction uses another's sums, two more."""
    grids = [[148, 1, 1], [148, 3, 1], [148, 1, 1]]
    assert scenes["sums"]["grids"] == grids
    assert scenes["sums"]["compiled"] == 3
    assert scenes["sums again"] == {"grids": grids, "operations": [], "compiled": 0}
    assert scenes["sums, one rate changed"] == {"grids": grids, "operations": ["copy_"], "compiled": 0}
    assert scenes["sums of sums"]["grids"] == [[5, 1, 1], [5, 2, 1], [5, 1, 1], [5, 5, 1], [5, 1, 1]]
    assert scenes["sums of sums"]["operations"] == []
    assert scenes["sums of sums"]["compiled"] == 0
    assert scenes["sums of empty tensors"]["grids"] == []
    assert scenes["kernels of sums for other numbers"] == 0


def test_sums_take_a_program_for_each_4096_elements_and_another_launch_for_each_4096_of_these(scenes):
    assert scenes["sums, sizes"]["grids"] == [[1 + 1 + 1 + 0 + 2, 1, 1], [5, 3, 1], [9, 1, 1]]
    found = scenes["sums, more than a program adds up"]
    assert found["grids"] == [[4097 + 1, 1, 1], [2 + 1, 3, 1], [2, 3, 1], [8193 + 1, 1, 1]]
    assert found["compiled"] == 0


def test_a_measured_update_takes_one_launch_more(scenes):
    """With a program for each tensor and value, and the slot of the ring as its argument."""
    first, *others = scenes["measured"]
    assert first["grids"] == [[148, 1, 1], [148, 3, 1]]
    assert first["compiled"] == 2
    for step in others:
        assert step == {"grids": [[148, 1, 1], [148, 3, 1]], "operations": [], "compiled": 0}
    assert scenes["slots"] == [0, 1, 2, 3, 4, 0]
    assert scenes["then not measured"]["grids"] == [[148, 1, 1]]
    assert scenes["then not measured"]["operations"] == []
    assert scenes["measured, one rate changed"]["operations"] == ["copy_"]
    assert scenes["kernels of measures for other numbers"] == 0
    assert scenes["measured, empty tensors"]["grids"] == [[3, 3, 1]]
    assert scenes["measured, with sums"]["grids"] == [[5, 1, 1], [5, 3, 1], [5, 1, 1], [5, 3, 1]]


def test_a_trainers_telemetry_takes_one_launch_more_in_steps_that_it_records(scenes):
    for step in scenes["telemetry"][2:]:
        assert step == {"grids": [[148, 1, 1], [148, 10, 1]], "operations": ["copy_"], "compiled": 0}
    grids = [len(step["grids"]) for step in scenes["telemetry of every third"]]
    assert grids == [2, 1, 1, 2, 1, 1]


@pytest.mark.parametrize("scene", ["trainer", "trainer, new gradients"])
def test_a_trainers_step_is_one_copy_and_one_launch(scenes, scene):
    """With another learning rate at each step, and multipliers for each parameter.

    The first two steps also build the table, and try out once whether torch can be asked about many tensors at a time.
    """
    assert [step["grids"] for step in scenes[scene][:2]] == [[[148, 1, 1]]] * 2
    for step in scenes[scene][2:]:
        assert step == {"grids": [[148, 1, 1]], "operations": ["copy_"], "compiled": 0}
