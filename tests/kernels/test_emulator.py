"""The compiled kernels of all rules and gradient codes, executed by the emulator in tests/gpu/gpu_emulator.

What they compute is what the cpu engine computes, whose loops another compiler has made; products of matrices are those of
float64. Each access to memory is inside a tensor and aligned, and no two threads race. That the emulator would notice is
shown by defects that are planted.
"""

import os
import re
import sys
from pathlib import Path

import pytest

from tristep.kernels import Rule, ShapedRule, rules
from tristep.kernels.backends import has_numba
from tristep.kernels.language import StagedRule

pytest.importorskip("triton", reason="Triton has builds for Linux only")
if not has_numba():
    pytest.skip("needs numba, whose loops are what the kernels are compared with", allow_module_level=True)

from gpu_emulator import captured
from gpu_emulator.cases import CodeCase, ProductCase, RuleCase, cases

pytestmark = pytest.mark.slow
TESTS = Path(__file__).parents[1]

COMPARE = """
from gpu_emulator import cases
from gpu_emulator.driver import install

emulator = install()
emulator.defects.clear()
kind, fields = arguments
case = getattr(cases, kind)(*fields)
result = *case.compare(), emulator.defects
"""

PLANTED = """
from gpu_emulator import planted

result = planted.EXPECTED, planted.find_all()
"""

LATE = """
from gpu_emulator import planted

result = planted.find_late()
"""

CAPTURED = """
from gpu_emulator import captured

result = captured.find_captured(*arguments)
"""


# Sums, guards, packed states, a code and a product.
QUICK = (
    RuleCase("lamb+agc+skipping+jointly"),
    RuleCase("adamw", control=(0.125, 0.0), zero_grads=True),
    RuleCase("sgd_momentum", state="uint8", seed=3),
    CodeCase("int8", 1025, "float16", residual=False),
    ProductCase((2, 144, 208), "bfloat16", "tn", True, 2),
)


FULL = pytest.mark.sample(0)  # of the full tier alone
CASES = [pytest.param(each, id=str(each), marks=() if each in QUICK else FULL) for each in cases()]


@pytest.mark.parametrize("case", CASES)
def test_kernels_compute_what_they_should(case, emulated):
    difference, where, defects = emulated.run(COMPARE, [type(case).__name__, list(case)])
    assert not defects, "\n".join(defects)
    assert difference <= case.limit, f"{difference:g} at {where}"


@pytest.mark.sample(0)
def test_planted_defects_are_found(emulated):
    expected, found = emulated.run(PLANTED)
    assert found.pop("nothing") == []
    assert found.keys() == expected.keys()
    missed = {name: found[name][:3] for name, words in expected.items() if not any(words in each for each in found[name])}
    assert not missed


def test_launches_and_copies_may_run_late(emulated):
    """The host waits before it overwrites a buffer that is still to be copied, and before it reads one."""
    assert emulated.run(LATE) == []


@pytest.mark.parametrize("case", [each if each == "clipped" else pytest.param(each, marks=FULL) for each in captured.CASES])
def test_captured_steps_are_replayed_late(case, emulated):
    """With the gradients, learning rates and weight decay of each step."""
    assert emulated.run(CAPTURED, [case]) == []


STEP = """
from types import SimpleNamespace

import numpy as np
import torch
from gpu_emulator.driver import ERRORS, install
from parity_steps import Step

from tristep.kernels import Update, rules

def run(rule, weights, gradients, states, hyper, masters):
    update = Update(rule, weights, states, masters, engine="triton")
    update.hyper[:] = np.reshape(hyper, update.hyper.shape)
    update.bind(gradients)
    update()

def tensor(array, dtype):
    return torch.as_tensor(array).to(dtype)

name, dtype, is_approximate = arguments
place = SimpleNamespace(run=run, tensor=tensor, is_approximate=is_approximate)
rule, dtype, emulator = getattr(rules, name), getattr(torch, dtype), install()
result = []
for error in ERRORS:
    emulator.set_error(error)
    try:
        Step(place, rule, [(), (0,), (3, 5), (1025,)], dtype, dtype).check(place)
    except AssertionError as wrong:
        result.append(f"{error}: {wrong}")
    finally:
        emulator.set_error(None)
"""

# Rules that multiply errors of their quotients and roots.
SENSITIVE = ("ftml", "ftrl", "rmsprop_momentum", "rmsprop_centered", "adan")
COMPILED = [name for name in rules.__all__ if isinstance(getattr(rules, name), Rule)]
STEPS = [
    pytest.param(name, dtype, marks=() if name in SENSITIVE and dtype == "float32" else FULL)
    for name in COMPILED
    for dtype in ("float32", "bfloat16")
]


@pytest.mark.sample(1)
@pytest.mark.parametrize(("name", "dtype"), STEPS)
def test_steps_with_approximate_instructions_are_within_the_tolerance_of_gpus(name, dtype, emulated):
    """With errors as large as NVIDIA's manual allows, upwards, downwards and at random. Parity tests on a GPU take the same
    tolerance, that of approximations.py.
    """
    assert emulated.run(STEP, [name, dtype, True]) == []


BYTES = """
import torch
from gpu_emulator.driver import install
from tristep import Trainer

emulator, (dtype, options), n = install(), arguments, 2**14
param = torch.nn.Parameter(torch.randn(n).to(getattr(torch, dtype)))
trainer = Trainer([param], "adamw", eval(f"dict({options})"), engine="triton")
param.grad = torch.randn_like(param)
emulator.launches.clear()
trainer.step(1)
updater = trainer._updater
kept = [*updater.masters.values(), *(state for row in updater.states.values() for state in row)]
result = [
    sum(sum(launch.memory.footprint().values()) for launch in emulator.launches) / n,
    sum(tensor.nbytes for tensor in kept if tensor is not None) / n,
    [launch.memory.sectors["store"] - launch.memory.footprint()["store"] // 32 for launch in emulator.launches],
]
"""


def _rows_of_bytes():
    """The table in docs/build_optimizers.py: type, arguments, bytes moved and kept."""
    text, before = (TESTS.parent / "docs" / "build_optimizers.py").read_text(encoding="utf-8"), []
    for dtype, cell, *figures in re.findall(r"^  \| (float32|bfloat16) \| (.*) \| ([\d.]+) \| ([\d.]+) \|$", text, re.M):
        options = ["" if each == "none" else each for each in cell.replace("`", "").split(", or ")]
        if options[0].startswith("the same with "):
            options = [f"{each}, {options[0].removeprefix('the same with ')}" for each in before]
        else:
            before = options
        yield from ((dtype, each, *figures) for each in options)


ROWS = [pytest.param(*row, marks=() if row[1] == 'state_dtype="4bit"' else FULL) for row in _rows_of_bytes()]


@pytest.mark.parametrize(("dtype", "options", "moved", "kept"), ROWS)
def test_bytes_that_a_step_moves_and_keeps_are_those_of_the_docs(dtype, options, moved, kept, emulated):
    """What memory must move at least, counted in sectors of 32 bytes; the table of pointers adds 0.02 an element here.

    No two warps store parts of one sector: on an H200 steps with scales that were stored so took up to 1.5 times as long.
    """
    *found, stored_again = emulated.run(BYTES, [dtype, options])
    assert [f"{round(each, 1):g}" for each in found] == [moved, kept]
    assert set(stored_again) == {0}


DTYPES = ("float32", "bfloat16")
SECTORS = """
from collections import Counter
from unittest import mock

import numpy
import torch
from gpu_emulator.driver import install
from parity_steps import draw, hyper_row

from tristep.kernels import Update, rules
from tristep.kernels.backends.triton import compile, pieces
from tristep.kernels.states import states_for

emulator, (name, dtype, shape) = install(), arguments
rule, dtype, rng = getattr(rules, name), getattr(torch, dtype), numpy.random.default_rng(0)
weight, gradient = (torch.as_tensor(draw(rng, rule, kind, shape)).to(dtype) for kind in ("weight", "gradient"))
states = states_for(rule, [weight])
update = Update(rule, [weight], states, engine="triton")
row = hyper_row(rule, 0, torch.float32)
update.hyper[:] = [row[each] for each in ("rescale_grad", *rule.hyper)]
with mock.patch.object(compile, "ENOUGH", 1), mock.patch.object(pieces, "ENOUGH", 1):  # for programs as of large tensors
    update.bind([gradient])
emulator.defects.clear()
emulator.launches.clear()
update()
memory = [launch.memory for launch in emulator.launches]
issued = sum((launch.issued for launch in emulator.launches), Counter())
large = {each.data_ptr(): each for each in (weight, gradient, *states[0]) if each.numel() == weight.numel()}
widths = {itemsize: set() for itemsize in (2, 4)}
for each in large.values():
    widths[each.itemsize] |= set().union(*(every.widths(each.data_ptr(), each.nbytes) for every in memory))
result = [
    32 * sum(sum(each.sectors.values()) for each in memory) / sum(sum(each.footprint().values()) for each in memory),
    {itemsize: sorted(found) for itemsize, found in widths.items()},
    32 / weight.numel() * sum(count for name, count in issued.items() if name.startswith(("div.s", "div.u", "rem"))),
    emulator.defects,
]
"""
MOST_SECTORS = 1.15  # of what memory must move at least
# Each warp loads all numbers of a tensor: of lars many beside 10 bytes an element, of a staged rule in three kernels.
MORE_SECTORS = {("lars", "bfloat16"): 1.23, **{(name, dtype): 1.25 for name in ("muon", "normuon") for dtype in DTYPES}}
# With more than two sums a thread has four elements, which are 8 bytes in 16 bits, as they are beside wider types.
FOUR_EACH = ("lars",)
WIDE, CONVOLUTION, PATCHES, ONES, HUNDRED, ODD = (
    (128, 512),
    (64, 64, 3, 3),
    (4096, 16),
    (256, 256, 1, 1),
    (640, 100),
    (2048, 33),
)
# Blocks of means leave lanes without a column, and rows that begin at no multiple of 16 bytes share sectors. In convolutions
# each element loads its column's number: the loads of a warp touch the same sectors, which are in the cache by then.
MORE_SECTORS_OF_SHAPES = {
    CONVOLUTION: {"float32": 1.45, "bfloat16": 2.0},
    HUNDRED: {"bfloat16": 1.3},
    ODD: {"float32": 1.35, "bfloat16": 1.45},
}
WALKED = [name for name in rules.__all__ if isinstance(getattr(rules, name), Rule | ShapedRule | StagedRule)]
TYPED = [(name, dtype, (2**14,) if isinstance(getattr(rules, name), Rule) else WIDE) for name in WALKED for dtype in DTYPES]
TYPED += [
    (name, dtype, shape)
    for shape in (CONVOLUTION, PATCHES, ONES, HUNDRED, ODD)
    for name in ("adafactor", "came", "group_adagrad")
    for dtype in DTYPES
]
IN_QUICK = ("adafactor", "float32", WIDE), ("came", "bfloat16", WIDE), ("adafactor", "float32", CONVOLUTION)
TYPED = [
    pytest.param(*each, id=f"{each[0]}-{each[1]}-{'x'.join(map(str, each[2]))}", marks=() if each in IN_QUICK else FULL)
    for each in TYPED
]


@pytest.mark.parametrize(("name", "dtype", "shape"), TYPED)
def test_warps_touch_few_sectors_and_threads_access_16_bytes(name, dtype, shape, emulated):
    """Of every rule's kernels together, at the size that programs have for large tensors; and nothing divides integers."""
    sectors, widths, divisions, defects = emulated.run(SECTORS, [name, dtype, shape])
    assert not defects
    more = MORE_SECTORS_OF_SHAPES.get(shape, {}).get(dtype, MORE_SECTORS.get((name, dtype), MOST_SECTORS))
    assert sectors <= more
    by_element = {4, 2} if shape in MORE_SECTORS_OF_SHAPES else set()  # in blocks of means
    assert set(widths["4"]) <= {16} | by_element
    assert set(widths["2"]) <= by_element | ({8, 16} if widths["4"] or name in FOUR_EACH else {16})
    assert divisions < 0.1  # of an element: in a loop they would be an eighth


STAGED = """
import torch
from gpu_emulator.driver import install
from tristep import Trainer

emulator, (name, dtype, options) = install(), arguments
param = torch.nn.Parameter(torch.randn(128, 512).to(getattr(torch, dtype)))
trainer = Trainer([param], name, options, engine="triton")
param.grad = torch.randn_like(param)
emulator.launches.clear()
trainer.step(1)
result = sum(sum(launch.memory.footprint().values()) for launch in emulator.launches) / param.numel()
"""


@pytest.mark.parametrize("name", ["muon", "normuon"])
@pytest.mark.parametrize(
    ("dtype", "options"),
    [("float32", {}), ("float32", {"clip_norm": 1.0}), ("bfloat16", {}), ("bfloat16", {"state_dtype": "bfloat16"})],
    ids=str,
)
def test_bytes_around_the_products_of_matrices_are_those_of_the_docs(name, dtype, options, emulated):
    """Beside what torch's operations read and write."""
    found = emulated.run(STAGED, [name, dtype, options])
    option = "".join(f"`{key}={value!r}`" for key, value in options.items())
    text = (TESTS.parent / "docs" / "gpu.md").read_text(encoding="utf-8")
    assert f"| {dtype}{', ' * bool(option)}{option} | {found:.0f} |" in text


SMOKE = """
import gpu_smoke
from gpu_emulator.driver import install

install().set_error(arguments)
try:
    result = {name: gpu_smoke.PARTS[name]("cpu") for name in ("rules", "optimizers", "storage", "products")}
finally:
    install().set_error(None)
"""


@pytest.mark.sample(0)
@pytest.mark.parametrize("error", [None, "up", "down", "random"])
def test_the_smoke_test_of_gpus_passes_on_the_emulator(error, emulated):
    """Those of its parts that need no streams."""
    found = emulated.run(SMOKE, error)
    assert found["rules"]["cases"] > 100
    assert found["optimizers"]["cases"] == 10
    assert found["products"]["cases"] == 18


# Tests that ask for the triton engine. Triton's interpreter runs these everywhere else.
XDIST = ("PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT", "PYTEST_XDIST_TESTRUNUID")
FILES = (
    *("grad_scale_and_skip", "language", "layouts", "metrics", "norms", "packed", "parity", "random"),
    *("reduction_state", "reductions", "stochastic_rounding", "storage", "symmetric", "compress"),
    *("limited", "transforms", "transforms_weights", "weight_unchanged"),
)


@pytest.mark.sample(0)
@pytest.mark.parametrize("error", [None, "random"], ids=["exact", "approximate"])
@pytest.mark.parametrize("name", FILES)
def test_tests_of_kernels_pass_on_the_emulator(name, error, fresh_python):
    """Also with instructions as approximate as on a GPU."""
    chosen = "triton and not (words_mean_what_they_mean_in_numpy and float64)"
    command = ["-m", "pytest", "-p", "gpu_emulator.plugin", "-p", "no:cacheprovider", "-q", "--cases", "quick", "-k", chosen]
    path = os.pathsep.join([str(TESTS.parent / "src"), *sys.path])
    errors = {} if error is None else {"GPU_EMULATOR_ERROR": error}
    said = fresh_python(*command, TESTS / "kernels" / f"test_{name}.py", PYTHONPATH=path, unset=XDIST, **errors)
    assert re.search(r"\d+ passed", said)
    assert int(re.search(r"on the emulator: (\d+) launches", said)[1]) > 0
