"""What the GPU compilers make of updates with other types of weights and states, and of measured ones; needs no GPU."""

import re

import pytest

BLOCK = pytest.importorskip("tristep.kernels.backends.triton.compile", reason="Triton has builds for Linux only").BLOCK

from machine_code import FLOAT64, RULES, SIZES, Case, compiled_code, fuses_nothing, spills_nothing  # noqa: E402

pytestmark = pytest.mark.slow


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
        ("bfloat16", "int8", None, True),
    ]
]
PACKED = [
    Case(rule=rule, weight=weight, gradient=weight, masters=masters, state="uint8", stochastic=True)
    for rule in ("sgd_momentum", "adamw", "adan")
    for weight, masters in [("float32", False), ("bfloat16", False), ("bfloat16", "int16"), ("bfloat16", "int8")]
]
PAIRS = [
    Case(rule="adamw", weight=weight, gradient=weight, masters=masters, state="int8", stochastic=True)
    for weight, masters in [("float32", False), ("bfloat16", False), ("bfloat16", "int8")]
]
PACKED_SUMS = Case(rule="lamb", stage=0, state="uint8")
MEASURED = [
    *(Case(rule=rule, measured=True) for rule in ("sgd", "heavy_ball", "adamw", "novograd")),
    Case(rule="adamw", weight="bfloat16", gradient="bfloat16", masters="int16", measured=True),
]
BYTES = SIZES | {"int16": 2, "int8": 1, "uint8": 1}


def elements_each(stored, rule):
    """Of a thread: 8 where nothing stored is wider than 16 bits, or of rules without states all has one width; or 4.

    Rules of more than three states always get 4.
    """
    widths = {BYTES[kind] for kind in stored}
    return 8 if RULES[rule] <= 3 and (max(widths) <= 2 or (len(widths) == 1 and not RULES[rule])) else 4


@pytest.fixture(scope="module")
def code(compiling):
    return compiled_code(compiling)


@pytest.mark.sample(1)
@pytest.mark.parametrize("case", [*MIXED, *STORED], ids=lambda case: case.name)
def test_no_spills_no_float64_few_registers_whatever_is_stored(case, code):
    spills_nothing(case, code)


@pytest.mark.sample(1)
@pytest.mark.parametrize("case", [*MIXED, *STORED], ids=lambda case: case.name)
def test_full_tiles_of_whatever_is_stored_take_one_access_per_tensor(case, code):
    """128 bits for 8 elements of 16 or 4 of 32, 64 for 4 of 16, 32 for 4 of 8; nothing else, nor in more pieces."""
    kernel = code(case)
    masters = {False: [], True: ["float32"]}.get(case.masters, [case.masters])
    states = [case.state or "float32"] * RULES[case.rule]
    stored = [case.weight, *masters, *states]
    names, each = [name for _, name in kernel.full_tile_path], elements_each([*stored, case.gradient], case.rule)
    assert kernel.warps * 32 * each == BLOCK
    assert sorted(name for name in names if name.startswith("STG")) == sorted(
        f"STG.E.{each * 8 * BYTES[kind]}" if each * BYTES[kind] > 4 else "STG.E" for kind in stored
    )
    weights = [] if case.masters is True else [case.weight]
    loaded = [*weights, case.gradient, *masters, *states]
    assert names.count("LDG.E.128") == sum(each * BYTES[kind] == 16 for kind in loaded)
    assert not [name for name in names if name.startswith("LDG") and "16" in name]


@pytest.mark.sample(1)
@pytest.mark.parametrize("case", PACKED, ids=lambda case: case.name)
def test_packed_states_take_one_access(case, code):
    """Single codes are loaded and stored where tiles are not full alone, and a thread takes 4 elements at a time.

    That one warp stores the scales of a block at once the emulator counts, in the docs' table of bytes.
    """
    kernel, changed = code(case), RULES[case.rule]
    each = elements_each([case.weight, case.gradient, case.state], case.rule)
    assert kernel.warps * 32 * each == BLOCK
    of_bytes = changed + (case.masters == "int8")
    assert kernel.count(r"LDG\.E\.U8.*") == kernel.count(r"STG\.E\.U8") == 4 * of_bytes
    # Triton 3.9 keeps an address outside of the registers next to a split master, and reads it once a block.
    spilled = [name for _, name in kernel.full_tile_path if re.match(r"(LDL|STL)\b", name)]
    assert spilled in ([], ["LDL"] * (case.masters == "int16"))
    assert kernel.count(FLOAT64) == 0
    assert 16 <= kernel.used("REG") <= (64 if changed <= 2 else 112)  # Adan keeps the scales and codes of four states


@pytest.mark.sample(1)
@pytest.mark.parametrize("case", PAIRS, ids=lambda case: case.name)
def test_states_of_4_bits_take_one_access(case, code):
    """Neighbouring threads access neighbouring bytes."""
    kernel = code(case)
    names = [name for _, name in kernel.full_tile_path]
    each = elements_each([case.weight, case.gradient, case.state], case.rule)
    assert kernel.warps * 32 * each == BLOCK
    accesses = ["LDG.E.U16", "STG.E.U16"] if each == 4 else ["LDG.E", "STG.E"]
    assert [names.count(name) for name in accesses] == [2 + (each == 8) * 2, 2 + (each == 8) * 2]
    assert not [name for name in names if re.match(r"(LDG|STG)\.E\.[US]8", name)]
    assert kernel.count(r"(LDL|STL)\b.*") == kernel.used("STACK") == kernel.used("LOCAL") == 0
    assert kernel.count(FLOAT64) == 0
    assert 16 <= kernel.used("REG") <= 64


@pytest.mark.sample(0)
def test_reductions_of_packed_states(code):
    sums = code(PACKED_SUMS)
    assert sums.count(r"LDG\.E\.U8.*") == 4 * 2
    assert sums.used("REG") <= 64


# Measured while updating. The barriers are those of sums over a block of threads.


@pytest.mark.sample(1)
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
    # With a split master old and new bits are kept for both halves; three blocks of 256 threads fit then.
    assert 16 <= kernel.used("REG") <= (80 if case.masters == "int16" else 64)
    assert kernel.count(r"BAR\.SYNC.*") <= 32  # both paths


@pytest.mark.sample(0)
@pytest.mark.parametrize("case", MEASURED, ids=lambda case: case.name)
def test_nothing_is_fused_with_measures(case, code):
    fuses_nothing(case, code)
