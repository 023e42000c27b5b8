"""What the GPU compilers make of the rules, read off the machine code; needs no GPU.

An interpreter of its own compiles them, since here Triton may be set to interpret kernels. Of the NVIDIA code (SASS) the
tests know: a label or its end closes a stretch of code, `@` starts an instruction that only some threads execute, and the
suffixes .64 and .128 are the bits of one access.
"""

import ast
import re
from functools import cache
from typing import NamedTuple

import pytest
from optimizer_table import TABLE

from tristep.kernels import Rule, rules
from tristep.kernels.language import OPS

TILE = pytest.importorskip("tristep.kernels.backends.triton.compile", reason="Triton has builds for Linux only").TILE

pytestmark = pytest.mark.slow

TARGETS = {
    "sm_80": ("cuda", 80, 32),
    "sm_90": ("cuda", 90, 32),
    "sm_100": ("cuda", 100, 32),
    "gfx942": ("hip", "gfx942", 64),
}
# And how many states each changes; the others are not written.
RULES = {name: len(found.changed) for name in rules.__all__ if isinstance(found := getattr(rules, name), Rule)}
# In the quick tier those that are least alike: arithmetic, words, numbers of states, sums.
OF_RULES = pytest.mark.parametrize(
    "rule", [pytest.param(name, marks=() if TABLE[name].quick else pytest.mark.sample(0)) for name in RULES]
)
SUMS = [(name, stage) for name in RULES for stage in range(len(getattr(rules, name).reductions))]
# On all targets those that differ most, and the language's ops, of which the others are made, too.
EVERYWHERE = ("adamw", "lamb", "sgld")
COMPILED = [(target, rule) for target in TARGETS for rule in RULES if target in ("sm_90", "gfx942") or rule in EVERYWHERE]
COMPILED_SUMS = [(target, *of) for target in TARGETS for of in SUMS if (target, of[0]) in COMPILED]
FLOAT64 = r"D(ADD|MUL|FMA|SETP|MNMX)\b.*|.*\.F64\b.*|MUFU\.\w*64H"  # instructions
SIZES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}


class Case(NamedTuple):
    """One kernel to compile: of a rule, or of its reduction with this number; `options` replace the engine's.

    `masters` may be the type of the master weights, `state` is that of the states. `measured` is with all that
    telemetry measures by default.
    """

    target: str = "sm_90"
    rule: str = "adam"
    weight: str = "float32"
    gradient: str = "float32"
    masters: bool | str = False
    aligned: bool = True
    stage: int | None = None
    state: str | None = None
    stochastic: bool = False
    measured: bool = False
    options: tuple[tuple[str, int], ...] = ()

    @property
    def name(self):
        return "-".join(str(value) for value in (*self[:-1], *(f"{key}={value}" for key, value in self.options)))


MIXED = [
    Case(rule=rule, weight=weight, gradient=gradient, masters=masters)
    for rule in ("sgd", "adam", "rmsprop_centered")
    for weight, gradient, masters in [
        ("bfloat16", "bfloat16", False),
        ("bfloat16", "bfloat16", True),
        ("float16", "float16", True),
        ("bfloat16", "float32", True),
        ("float32", "bfloat16", False),
    ]
]
STORED = [
    Case(rule=rule, weight=weight, gradient=weight, masters=masters, state=state, stochastic=stochastic)
    for rule in ("sgd_momentum", "adamw", "adan")
    for weight, masters, state, stochastic in [
        ("float32", False, "bfloat16", False),
        ("float32", False, "bfloat16", True),
        ("bfloat16", False, None, True),
        ("bfloat16", False, "bfloat16", True),
        ("bfloat16", True, "bfloat16", False),
        ("bfloat16", "int16", None, False),
        ("bfloat16", "int16", "bfloat16", False),
        ("bfloat16", "bfloat16", "bfloat16", False),
        ("float16", "float16", None, False),
    ]
]
STORED_ELSEWHERE = [
    Case(target, "adamw", "bfloat16", "bfloat16", masters, True, None, "bfloat16", not masters)
    for target in TARGETS
    for masters in (False, "int16", "bfloat16")
]
STORED_SUMS = [Case(rule="lamb", weight="bfloat16", gradient="bfloat16", masters="int16", stage=0, state="bfloat16")]
PACKED = [
    Case(rule=rule, weight=weight, gradient=weight, masters=masters, state="uint8", stochastic=True)
    for rule in ("sgd_momentum", "adamw", "adan")
    for weight, masters in [("float32", False), ("bfloat16", False), ("bfloat16", "int16")]
]
PACKED_ELSEWHERE = [Case(target, "adamw", state="uint8", stochastic=True) for target in TARGETS]
PACKED_SUMS = Case(rule="lamb", stage=0, state="uint8")
MEASURED = [
    *(Case(rule=rule, measured=True) for rule in ("sgd", "heavy_ball", "adamw", "novograd")),
    Case(rule="adamw", weight="bfloat16", gradient="bfloat16", masters="int16", measured=True),
]
MEASURED_ELSEWHERE = [Case(target, "adamw", measured=True) for target in ("sm_100", "gfx942")]
EVERY_WORD = [Case(target, "every_word", kind, kind) for target in TARGETS for kind in ("float32", "float64")]
NO_ANGLES = Case(rule="every_word_but_sin_and_cos")
DOUBLE = Case(weight="float64", gradient="float64")
UNALIGNED = Case(aligned=False)
WIDE_AND_MIXED = Case(weight="bfloat16", gradient="bfloat16", options=(("num_warps", 4),))
FEW_REGISTERS = Case(options=(("maxnreg", 24),))
MANY_REGISTERS = Case(rule="rmsprop_centered", options=(("num_warps", 4),))
IN_A_CELL = [Case(target, "in_a_cell") for target in TARGETS]
CELL = """
from tristep.kernels import jit, rule, tl

@jit
def halved(x: float, factor=0.5):
    return x * factor

@rule
def in_a_cell(w: "a block", g, state, hyper):
    (mean,) = state
    (lr,) = hyper
    mean = halved(mean) + halved(g, 0.25)
    return w - tl.sqrt(lr) * tl.abs(mean), (mean,)
"""

COMPILE = """
import torch
from triton.backends.compiler import GPUTarget

from tristep.kernels import rules
from tristep.kernels.backends.triton import compile as gpu
from tristep.trainer import Telemetry

target, rule, weight, gradient, masters, aligned, stage, state, stochastic, measured, options = arguments
types = getattr(torch, weight), getattr(torch, gradient)
rule = globals().get(rule) or getattr(rules, rule)
masters = getattr(torch, masters) if isinstance(masters, str) else masters
state = None if state is None else getattr(torch, state)
measure = Telemetry()._measure if measured else None
usual = gpu.launch_options
gpu.launch_options = lambda *kinds: usual(*kinds) | dict(options)
try:
    compiled = gpu.compile_for(GPUTarget(*target), rule, *types, masters, aligned, stage, state, stochastic, measure)
finally:
    gpu.launch_options = usual
result = {"kind": target[0], "warps": compiled.metadata.num_warps, "shared": compiled.metadata.shared}
if target[0] == "hip":
    result["text"] = compiled.asm["amdgcn"]
elif target[1] == 90:
    result["usage"] = usage(compiled)
    result["text"], result["ptx"] = compiled.asm["sass"], compiled.asm["ptx"]
"""


class Code:
    """The machine code of one kernel."""

    def __init__(self, code):
        self.warps, self.shared = code["warps"], code["shared"]
        self.text, self.usage, self.ptx = code.get("text", ""), code.get("usage", ""), code.get("ptx", "")

    @property
    def instructions(self):
        """(whether only some threads execute it, what it is called) of each, for SASS."""
        return _instructions(self.text)

    def count(self, pattern):
        return sum(re.fullmatch(pattern, name) is not None for _, name in self.instructions)

    @property
    def full_tile_path(self):
        """The instructions of the one stretch of code that stores several elements, of 32 bits or fewer, at once."""
        return self.stretch_with(r"STG\.E\.(64|128)")

    def stretch_with(self, pattern):
        """The instructions of the one stretch of code in which this is found."""
        found = [part for part in re.split(r"(?m)^\S*LBB\d+:$", self.text) if re.search(pattern, part)]
        assert len(found) == 1, f"{len(found)} stretches of code with {pattern}, of:\n{self.text}"
        return _instructions(found[0])

    def used(self, what):
        """An amount from the resource usage: REG, STACK, SHARED or LOCAL."""
        return int(re.search(rf"\b{what}:(\d+)", self.usage).group(1))


def reads(function):
    """How many arrays a rule or reduction reads: the compilers drop what it only unpacks."""
    names = ast.walk(ast.parse(function.source).body[0])
    loaded = {node.id for node in names if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    states = function.used if isinstance(function, Rule) else function.state
    return sum(name in loaded for name in ("w", "g", *states))


def _instructions(text):
    found = re.findall(r"(?m)^[^\t\n]*\t(@!?\w+ )?([A-Z][\w.]*)", text)
    return [(bool(predicate), name) for predicate, name in found]


@pytest.fixture(scope="module")
def code(compiling):
    """A function from a case to its code."""

    @cache
    def compiled(case):
        own = {"in_a_cell": CELL}.get(case.rule) or (_every_word(case.rule) if case.rule.startswith("every_word") else "")
        return Code(compiling.run(own + COMPILE, [TARGETS[case.target], *case[1:]]))

    return compiled


def _every_word(name):
    """The text of a rule that uses all ops of the language, or all but two."""
    calls = dict.fromkeys(OPS, "(w)") | {"where": "(w > g, w, 0.5)", "maximum": "(w, 0.5)", "minimum": "(w, 0.5)"}
    calls["normal"] = "(w, g, index)"
    left_out = ("sin", "cos") if name == "every_word_but_sin_and_cos" else ()
    text = " + ".join(f"tl.{word}{calls[word]}" for word in OPS if word not in left_out)
    return (
        f"from tristep.kernels import rule, tl\n\n@rule\ndef {name}(w, g, state, hyper, index):\n    return {text}, state\n"
    )


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("target", "rule"), [*COMPILED, *((target, own) for target in TARGETS for own in ("every_word", "in_a_cell"))]
)
def test_every_rule_compiles_for(target, rule, code):
    assert code(Case(target, rule)).warps in (4, 8)


@pytest.mark.sample(2)
@pytest.mark.parametrize(("target", "rule", "stage"), COMPILED_SUMS)
def test_every_reduction_compiles_for(target, rule, stage, code):
    assert code(Case(target, rule, stage=stage)).warps in (4, 8)


@pytest.mark.sample(3)
@pytest.mark.parametrize(("rule", "stage"), SUMS)
def test_reductions_read_full_tiles_by_128_bit_accesses_only(rule, stage, code):
    """Without spills, float64 or too many registers. Threads exchange their sums through shared memory."""
    kernel = code(Case(rule=rule, stage=stage))
    path = [(predicated, name) for predicated, name in kernel.stretch_with(r"LDG\.E\.128") if name == "LDG.E.128"]
    assert not any(predicated for predicated, _ in path)
    assert len(path) == reads(getattr(rules, rule).reductions[stage]) * TILE // (kernel.warps * 32) // 4
    assert kernel.count(r"(LDL|STL)\b.*") == kernel.used("STACK") == kernel.used("LOCAL") == 0
    assert kernel.count(FLOAT64) == 0
    assert 16 <= kernel.used("REG") <= 64


@OF_RULES
def test_full_tiles_are_read_and_written_by_128_bit_accesses_only(rule, code):
    """Weight and states are read and written, the gradient is read; what else is read are addresses and hyper-parameters."""
    kernel = code(Case(rule=rule))
    accesses_each = TILE // (kernel.warps * 32) // 4
    path = [(predicated, name) for predicated, name in kernel.full_tile_path if name.startswith(("LDG", "STG"))]
    assert not any(predicated for predicated, _ in path)
    names = [name for _, name in path]
    assert names.count("LDG.E.128") == reads(getattr(rules, rule)) * accesses_each
    assert [name for name in names if name.startswith("STG")] == ["STG.E.128"] * ((1 + RULES[rule]) * accesses_each)


@OF_RULES
def test_arithmetic_takes_at_most_half_of_the_time_that_memory_takes(rule, code):
    """Of full tiles. An H200 starts 7.8 instructions for one element each while it moves a byte (33.5e12 / 4.3e12)."""
    kernel = code(Case(rule=rule))
    each = len(kernel.full_tile_path) * kernel.warps * 32 / TILE
    moved = 4 * (reads(getattr(rules, rule)) + 1 + RULES[rule])
    assert each <= TABLE[rule].budget * 7.8 * moved


@OF_RULES
def test_the_other_path_checks_every_access(rule, code):
    """All narrow stores belong to it: one an element, each but the last behind a condition of its own."""
    kernel = code(Case(rule=rule))
    stores = [(predicated, name) for predicated, name in kernel.instructions if name == "STG.E"]
    assert len(stores) == (1 + RULES[rule]) * TILE // (kernel.warps * 32)
    assert sum(not predicated for predicated, _ in stores) <= 1  # threads without this last one have left before it


@OF_RULES
def test_no_spills_no_shared_memory_no_float64_few_registers(rule, code):
    _spills_nothing(Case(rule=rule), code)


@pytest.mark.sample(3)
@pytest.mark.parametrize("case", [*MIXED, *STORED], ids=lambda case: case.name)
def test_no_spills_no_shared_memory_no_float64_few_registers_whatever_is_stored(case, code):
    _spills_nothing(case, code)


def _spills_nothing(case, code):
    kernel = code(case)
    assert kernel.count(r"(LDL|STL)\b.*") == kernel.used("STACK") == kernel.used("LOCAL") == 0
    assert kernel.count(r"(LDS|STS|LDSM|STSM)\b.*") == kernel.used("SHARED") == kernel.shared == 0
    assert kernel.count(FLOAT64) == 0
    assert 16 <= kernel.used("REG") <= TABLE[case.rule].registers


@pytest.mark.sample(3)
@pytest.mark.parametrize("case", MIXED, ids=lambda case: case.name)
def test_full_tiles_of_mixed_widths_take_one_access_a_tensor(case, code):
    kernel = code(case)
    stored = [case.weight] + ["float32"] * (RULES[case.rule] + case.masters)
    loaded = [case.gradient] + ["float32"] * (RULES[case.rule] + case.masters) + [case.weight] * (not case.masters)
    names = [name for _, name in kernel.full_tile_path]
    assert kernel.warps * 32 * 4 == TILE
    stores = sorted(name for name in names if name.startswith("STG"))
    assert stores == sorted(f"STG.E.{4 * 8 * SIZES[kind]}" for kind in stored)
    assert names.count("LDG.E.128") == loaded.count("float32")
    assert not [name for name in names if name.startswith("LDG") and "16" in name]


@pytest.mark.sample(3)
@pytest.mark.parametrize("case", STORED, ids=lambda case: case.name)
def test_full_low_precision_tiles_take_one_access_per_tensor(case, code):
    """64 bits for 4 elements of 16, 128 for 4 of 32; nothing else is written, nor read in more pieces."""
    kernel = code(case)
    masters = {False: [], True: ["float32"]}.get(case.masters, [case.masters])
    states = [case.state or "float32"] * RULES[case.rule]
    bits = [4 * 8 * (SIZES | {"int16": 2})[kind] for kind in (case.weight, *masters, *states)]
    names = [name for _, name in kernel.full_tile_path]
    assert kernel.warps * 32 * 4 == TILE
    assert sorted(name for name in names if name.startswith("STG")) == sorted(f"STG.E.{each}" for each in bits)
    weights = [] if case.masters is True else [case.weight]
    loaded = [*weights, case.gradient, *masters, *states]
    assert names.count("LDG.E.128") == loaded.count("float32")
    assert not [name for name in names if name.startswith("LDG") and "16" in name]


@pytest.mark.sample(3)
@pytest.mark.parametrize("case", [*STORED_ELSEWHERE, *STORED_SUMS], ids=lambda case: case.name)
def test_low_precision_compiles_everywhere_and_in_reductions(case, code):
    assert code(case).warps == 8


@pytest.mark.sample(2)
@pytest.mark.parametrize("case", PACKED, ids=lambda case: case.name)
def test_packed_states_take_one_access_for_4_codes(case, code):
    """Single codes are loaded and stored on the path of other than full tiles alone, once for each element of a thread.

    A block's largest number is found within a warp; the scales found go through shared memory once, 8 for a tile.
    """
    kernel, changed = code(case), RULES[case.rule]
    assert kernel.warps * 32 * 4 == TILE
    assert kernel.count(r"LDG\.E\.U8.*") == kernel.count(r"STG\.E\.U8") == 4 * changed
    assert kernel.count(r"REDUX\.MAX.*") == 2 * changed
    assert kernel.count(r"SHFL.*") == 0
    assert kernel.shared == TILE // 128 * 4
    assert kernel.count(r"LDS\b.*") == kernel.count(r"STS\b.*") == 2 * changed
    assert kernel.count(r"(LDL|STL)\b.*") == kernel.used("STACK") == kernel.used("LOCAL") == 0
    assert kernel.count(FLOAT64) == 0
    assert 16 <= kernel.used("REG") <= 64


@pytest.mark.sample(1)
@pytest.mark.parametrize("case", PACKED_ELSEWHERE, ids=lambda case: case.name)
def test_packed_states_compile_everywhere(case, code):
    assert code(case).warps == 8


def test_reductions_of_packed_states(code):
    sums = code(PACKED_SUMS)
    assert sums.count(r"LDG\.E\.U8.*") == 4 * 2
    assert sums.used("REG") <= 64


def test_random_rounding_costs_few_instructions(code):
    """Not those of Philox, 50 for each element and draw: there is one for the weight here."""
    plain, random = (
        len(code(Case(rule="adamw", weight="bfloat16", gradient="bfloat16", stochastic=stochastic)).full_tile_path)
        for stochastic in (False, True)
    )
    assert random - plain < 12 * 4


def test_float32_arithmetic_stays_float32_in_every_word(code):
    """But in CUDA's own sine and cosine, which reduce angles above 100,000 in float64."""
    assert code(NO_ANGLES).count(FLOAT64) == 0


# Measured while updating. The barriers are those of sums over a block of threads.


@pytest.mark.sample(2)
@pytest.mark.parametrize("case", MEASURED, ids=lambda case: case.name)
def test_measuring_reads_and_writes_nothing_twice_and_spills_nothing(case, code):
    kernel, plain = code(case), code(case._replace(measured=False))
    assert kernel.warps == 8
    wide = r"LDG\.E\.128|STG\.E\.(64|128)"
    path = [(predicated, name) for predicated, name in kernel.full_tile_path if re.fullmatch(wide, name)]
    usual = [name for _, name in plain.full_tile_path if re.fullmatch(wide, name)]
    assert not any(predicated for predicated, _ in path)
    assert sorted(name for _, name in path) == sorted(usual[:: 2 if plain.warps == 4 else 1])
    assert kernel.count(r"(LDL|STL)\b.*") == kernel.used("STACK") == kernel.used("LOCAL") == 0
    assert kernel.count(FLOAT64) == 0
    assert 16 <= kernel.used("REG") <= 64
    assert kernel.count(r"BAR\.SYNC.*") <= 32  # both paths


@OF_RULES
def test_nothing_is_fused(rule, code):
    """So that a rule's arithmetic is what it is written as."""
    _fuses_nothing(Case(rule=rule), code)


@pytest.mark.sample(1)
@pytest.mark.parametrize("case", MEASURED, ids=lambda case: case.name)
def test_nothing_is_fused_with_measures(case, code):
    _fuses_nothing(case, code)


def _fuses_nothing(case, code):
    assert " fma." not in code(case).ptx.replace("\t", " ")
    assert re.search(r"\bmul\.rn\.f32|\badd\.rn\.f32|\bsub\.rn\.f32", code(case).ptx) or case.rule == "averaged"


@pytest.mark.sample(1)
@pytest.mark.parametrize("case", MEASURED_ELSEWHERE, ids=lambda case: case.name)
def test_measuring_compiles_everywhere(case, code):
    assert code(case).warps == 8


# Each of these is something that a test above forbids, made on purpose: it must be seen.


def test_float64_is_seen(code):
    kernel = code(DOUBLE)
    assert kernel.count(r"D(ADD|MUL|FMA)\b.*") > 10
    assert kernel.count(FLOAT64) > 10


def test_unaligned_tensors_are_not_read_by_wide_accesses(code):
    kernel = code(UNALIGNED)
    assert ".128" not in kernel.text
    assert kernel.count(r"STG\.E") == 2 * 3 * TILE // (kernel.warps * 32)


def test_an_exchange_through_shared_memory_is_seen(code):
    kernel = code(WIDE_AND_MIXED)
    assert kernel.count(r"(LDS|STS)\b.*") > 0
    assert kernel.shared > 0


def test_spills_are_seen(code):
    kernel = code(FEW_REGISTERS)
    assert kernel.used("REG") <= 24
    assert kernel.count(r"(LDL|STL)\b.*") > 0


def test_too_many_registers_are_seen(code):
    assert code(MANY_REGISTERS).used("REG") > 64


# AMD.


@pytest.mark.sample(8)
@OF_RULES
def test_on_amd_wide_accesses_no_spills_no_shared_memory_no_float64(rule, code):
    """A wave has 64 threads, so that 8 warps leave each of them 2 elements of a tile and 4 warps 4: 64 or 128 bits."""
    kernel = code(Case("gfx942", rule))
    assert re.findall(r"(?m)^\s*ds_\w+|^\s*scratch_\w+|^\s*v_\w+_f64\w*", kernel.text) == []
    for amount in ("vgpr_spill_count", "sgpr_spill_count", "private_segment_fixed_size", "group_segment_fixed_size"):
        assert re.findall(rf"\.{amount}:\s*(\d+)", kernel.text) == ["0"], amount
    each, written = TILE // (kernel.warps * 64), 1 + RULES[rule] - TABLE[rule].unwritten
    stores = re.findall(r"(?m)^\s*(global_store_\w+|buffer_store_\w+|flat_store_\w+)", kernel.text)
    assert stores.count(f"global_store_dwordx{each}") == written
    assert stores.count("global_store_dword") == len(stores) - written == (1 + RULES[rule]) * each
    loads = re.findall(rf"(?m)^\s*global_load_dwordx{each}\b", kernel.text)
    assert len(loads) >= reads(getattr(rules, rule)) - TABLE[rule].unwritten


def test_float64_is_seen_on_amd(code):
    assert re.findall(r"(?m)^\s*v_\w+_f64\w*", code(Case("gfx942", "every_word", "float64", "float64")).text)
