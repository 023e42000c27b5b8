"""What the GPU compilers make of the rules, read off the machine code; needs no GPU.

The tests know of NVIDIA's code (SASS): an instruction's suffixes .64 and .128 are the bits of one access.
"""

import ast
import json
import re
from pathlib import Path

import pytest
from optimizer_table import TABLE

from tristep.kernels import Rule, rules

gpu = pytest.importorskip("tristep.kernels.backends.triton.compile", reason="Triton has builds for Linux only")
BLOCK, compile_for = gpu.BLOCK, gpu.compile_for

from machine_code import FLOAT64, RULES, TARGETS, Case, compiled_code, fuses_nothing, spills_nothing  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402

pytestmark = pytest.mark.slow


# In the quick tier those that are least alike: arithmetic, random numbers, many states, sums.
OF_RULES = pytest.mark.parametrize(
    "rule", [pytest.param(name, marks=() if TABLE[name].quick else pytest.mark.sample(0)) for name in RULES]
)
SUMS = [(name, stage) for name in RULES for stage in range(len(getattr(rules, name).reductions))]
NO_ANGLES = Case(rule="every_word_but_sin_and_cos")
UNALIGNED = Case(aligned=False)


def reads(function):
    """How many arrays a rule or reduction reads: the compilers drop what it only unpacks."""
    names = ast.walk(ast.parse(function.source).body[0])
    loaded = {node.id for node in names if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    states = function.used if isinstance(function, Rule) else function.state
    return sum(name in loaded for name in ("w", "g", *states))


@pytest.fixture(scope="module")
def code(compiling):
    return compiled_code(compiling)


@pytest.mark.sample(0)
@pytest.mark.parametrize("rule", ["every_word", "in_a_cell"])
@pytest.mark.parametrize("target", TARGETS)
def test_rules_of_ones_own_compile_for(target, rule, code):
    """Those of the product are compiled by test_triton_versions.py."""
    assert code(Case(target, rule)).threads in (128, 256)


NO_KERNEL = [
    (rules.muon, None, TypeError, "rule 'muon' updates whole tensors .* compile its `elementwise_rule`, adamw_of_vectors"),
    (rules.soap, None, TypeError, "rule 'soap' updates whole tensors by torch's operations and has no kernel of its own$"),
    (rules.group_adagrad, None, TypeError, r"compile one of its `rules.values\(\)`, adagrad_of_slices"),
    (next(iter(rules.adafactor.rules)), 0, ValueError, "kernels of means, as of 'adafactor_squares', depend on"),
    (rules.lamb, 1, ValueError, "stage=1: rule 'lamb' has 1 reductions, counted from 0"),
]


@pytest.mark.parametrize(("rule", "stage", "error", "message"), NO_KERNEL, ids=str)
def test_rules_without_a_kernel_say_what_there_is_to_compile(rule, stage, error, message):
    with pytest.raises(error, match=message):
        compile_for(GPUTarget("cuda", 90, 32), rule, stage=stage)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("rule", "stage"), SUMS)
def test_reductions_read_full_tiles_by_128_bit_accesses_only(rule, stage, code):
    """Without spills or float64. Threads exchange their sums through shared memory."""
    kernel = code(Case(rule=rule, stage=stage))
    path = [(predicated, name) for predicated, name in kernel.stretch_with(r"LDG\.E\.128") if name == "LDG.E.128"]
    assert not any(predicated for predicated, _ in path)
    assert len(path) == reads(getattr(rules, rule).reductions[stage]) * BLOCK // (kernel.warps * 32) // 4
    assert kernel.count(r"(LDL|STL)\b.*") == kernel.used("STACK") == kernel.used("LOCAL") == 0
    assert kernel.count(FLOAT64) == 0


@OF_RULES
def test_full_tiles_are_read_and_written_by_128_bit_accesses_only(rule, code):
    """Weight and states are read and written, the gradient is read; what else is read are addresses and hyper-parameters."""
    kernel = code(Case(rule=rule))
    accesses_each = BLOCK // (kernel.warps * 32) // 4
    path = [(predicated, name) for predicated, name in kernel.full_tile_path if name.startswith(("LDG", "STG"))]
    assert not any(predicated for predicated, _ in path)
    names = [name for _, name in path]
    assert names.count("LDG.E.128") == reads(getattr(rules, rule)) * accesses_each
    assert [name for name in names if name.startswith("STG")] == ["STG.E.128"] * ((1 + RULES[rule]) * accesses_each)


@OF_RULES
def test_arithmetic_takes_at_most_half_of_the_time_that_memory_takes(rule, code):
    """Of full tiles. An H200 starts 7.8 instructions for one element each while it moves a byte (33.5e12 / 4.3e12)."""
    kernel = code(Case(rule=rule))
    each = len(kernel.full_tile_path) * kernel.warps * 32 / BLOCK
    moved = 4 * (reads(getattr(rules, rule)) + 1 + RULES[rule])
    assert each <= TABLE[rule].budget * 7.8 * moved


@OF_RULES
def test_no_spills_no_float64_few_registers_no_shared_memory_for_full_tiles(rule, code):
    spills_nothing(Case(rule=rule), code)


@pytest.mark.sample(0)
def test_float32_arithmetic_stays_float32_in_every_word(code):
    """But in CUDA's own sine and cosine, which reduce angles above 100,000 in float64."""
    assert code(NO_ANGLES).count(FLOAT64) == 0


@OF_RULES
def test_nothing_is_fused(rule, code):
    """So that a rule's arithmetic is what it is written as."""
    fuses_nothing(Case(rule=rule), code)


def test_unaligned_tensors_are_not_read_by_wide_accesses(code):
    kernel = code(UNALIGNED)
    assert ".128" not in kernel.text
    assert kernel.count(r"STG\.E") == 2 * 3 * BLOCK // (kernel.warps * 32)


# AMD.


@pytest.mark.sample(1)
@OF_RULES
def test_on_amd_wide_accesses_no_spills_no_float64(rule, code):
    """Of 128 bits each: a wave has 64 threads, of which a block has half as many as it has warps elsewhere."""
    kernel = code(Case("gfx942", rule))
    assert re.findall(r"(?m)^\s*scratch_\w+|^\s*v_\w+_f64\w*", kernel.text) == []
    full = [part for part in re.split(r"(?m)^\.LBB\d+_\d+:", kernel.text) if "global_store_dwordx" in part]
    assert not [part for part in full if re.search(r"(?m)^\s*ds_", part)]
    for amount in ("vgpr_spill_count", "sgpr_spill_count", "private_segment_fixed_size"):
        assert re.findall(rf"\.{amount}:\s*(\d+)", kernel.text) == ["0"], amount
    each, written = BLOCK // kernel.threads, 1 + RULES[rule]
    stores = re.findall(r"(?m)^\s*(global_store_\w+|buffer_store_\w+|flat_store_\w+)", kernel.text)
    assert stores.count("global_store_dwordx4") == written * each // 4
    assert stores.count("global_store_dword") == len(stores) - written * each // 4 == (1 + RULES[rule]) * each
    loads = re.findall(r"(?m)^\s*global_load_dwordx4\b", kernel.text)
    assert len(loads) >= reads(getattr(rules, rule)) * each // 4


PIECES = """
import json, subprocess, sys, tempfile
sys.path.insert(0, sys.argv[1])
import fake_driver
import torch
import triton

driver, found = fake_driver.install(), {}

def load(name, binary, shared, device):
    with tempfile.NamedTemporaryFile() as file:
        file.write(binary)
        file.flush()
        tools = [triton.knobs.nvidia.cuobjdump.path, "-res-usage"], [triton.knobs.nvidia.nvdisasm.path, "-c"]
        said = [subprocess.run([*tool, file.name], capture_output=True, text=True, check=True).stdout for tool in tools]
    found.setdefault(name, []).append(said)
    return 1, 1, 0, 0, 1024

driver.load_binary = load
from tristep.kernels import Update, rules
from tristep.kernels.states import states_for

weight = torch.ones(*map(int, sys.argv[3:]))
rule = getattr(rules, sys.argv[2])
run = Update(rule, [weight], states_for(rule, [weight]), engine="triton")
run.hyper[:] = 1.0
run.bind([torch.ones_like(weight)])
run()
print(json.dumps(found))
"""


# Wide rows, rows of one matrix side by side, and several matrices side by side, with the registers of two rules at most.
LINES = {"wide": ((64, 256), 64, 128), "rows": ((1024, 24), 64, 96), "matrices": ((256, 3, 4), 80, 160)}


@pytest.mark.sample(0)
@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize("rule", ["adafactor", "came", "group_adagrad"])
def test_pieces_take_few_registers_and_no_barrier(rule, line, fresh_python):
    """But one for each result of a sum over the piece, at its end. Means of narrow rows are summed up by a single warp."""
    folder, (shape, *most) = Path(__file__).parents[2] / "benchmarks", LINES[line]
    shape = (1024, 24) if line == "matrices" and rule == "group_adagrad" else shape  # it has slices, of one matrix
    found = json.loads(fresh_python("-c", PIECES, folder, rule, *shape, unset=("TRITON_INTERPRET",)))
    kinds = {name.removesuffix("_kernel"): codes for name, codes in found.items() if re.search("pieces|means_k", name)}
    means = "means_pieces" if line == "wide" else "means"
    assert kinds.keys() == {means, "update_pieces"} | ({"sums_pieces"} if rule != "group_adagrad" else set())
    for kind, codes in kinds.items():
        for usage, text in codes:
            assert int(re.search(r"REG:(\d+)", usage)[1]) <= most[rule == "came"]
            assert "STACK:0 " in usage
            assert not re.search(r"\b(LDL|STL)\b", text)
            assert len(re.findall(r"\bLDG\.\S*128\b", text)) >= (2 if kind == "update_pieces" else 1)
            assert kind in ("sums_pieces", "means") or not re.search(r"\bBAR\b", text)
