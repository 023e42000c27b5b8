"""Kernels keep to the numbers of instructions in benchmarks/results/static_gpu.json; see benchmarks/static_gpu.py."""

import json
import os
import sys
from pathlib import Path

import pytest

triton = pytest.importorskip("triton", reason="Triton has builds for Linux only")

pytestmark = pytest.mark.slow
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
PAGE = BENCHMARKS.parent / "docs" / "gpu.md"
TABLE = json.loads((BENCHMARKS / "results" / "static_gpu.json").read_text(encoding="utf-8"))
KNOWN, GPUS, VERSIONS = TABLE["kernels"], TABLE["gpus"], TABLE["versions"]
PACKED = [name for name in KNOWN if "states 8-bit" in name or "states 4-bit" in name]
TARGETS = ("sm_75", "sm_80", "sm_90", "sm_100")
FULL = pytest.mark.sample(0)  # of the full tier alone, which compiles longer
MORE = 1.1  # as ptxas may choose otherwise

# Kernels with less in flight than these GPUs need for their bandwidth; docs/gpu.md says why.
LESS = {
    "AdamW, float32, states 8-bit, stochastic": {"B200"},
    "AdamW, bfloat16, states 8-bit, stochastic": {"B200"},
    "AdamW, bfloat16, states 4-bit, stochastic": {"B200"},
    "AdamW, bfloat16, 24-bit master, states 4-bit, stochastic": {"B200"},
    "SGLD, float32": {"B200"},
    "AdamW, bfloat16, split master, telemetry": {"H200", "B200"},
    "AdamW, float32, telemetry and histograms": {"H200", "B200"},
}

# One kernel keeps an address outside of the registers, and reads it once a block.
SPILLS = "3.9.0", "AdamW, bfloat16, split master, states 8-bit, stochastic"

MEASURE = """
import sys
folder, name, target = arguments
sys.path[:0] = [folder]
import static_gpu
result = sorted(static_gpu.KERNELS) if name is None else static_gpu.measure(name, target)
"""


def test_all_kernels_of_the_table_are_known(compiling):
    assert compiling.run(MEASURE, [str(BENCHMARKS), None, None]) == sorted(KNOWN)


def test_the_page_has_the_table():
    expected = [_row(name, found) for name, found in KNOWN.items()]
    rows = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.split(" |")[0].lstrip("| ") in KNOWN]
    assert [row for row in rows if row.count("|") == expected[0].count("|")] == expected


def test_the_page_has_the_table_of_versions():
    rows = [f"| {name} | {' | '.join(_cell(counts[name]) for counts in VERSIONS.values())} |" for name in KNOWN]
    assert list(VERSIONS) == ["3.6.0", "3.5.1", "3.7.1", "3.8.0", TABLE["triton"]]
    assert set(rows) <= set(PAGE.read_text(encoding="utf-8").splitlines())


def _cell(counts):
    return f"{counts['registers']} / {counts['barriers']} / {counts['in_flight_KiB']:.0f} / {counts['instructions']:.0f}"


@pytest.mark.parametrize("version", VERSIONS)
def test_packed_states_exchange_scales_alone_in_the_table(version):
    """At most 64 registers, two barriers a state, its scales alone in shared memory, and enough in flight for an H200."""
    for name in PACKED:
        found = VERSIONS[version][name]
        assert found["registers"] <= 64, name
        assert found["spilled"] <= (2 if (version, name) == SPILLS else 0), name
        assert found["barriers"] == 4, name
        assert found["exchanged"] <= 4, name
        assert found["in_flight_KiB"] >= GPUS["H200"]["in_flight_KiB"], name


COUNT = """
import json, sys
sys.path[:0] = [sys.argv[1]]
import static_gpu
print(json.dumps([static_gpu.triton.__version__, static_gpu.measure(sys.argv[2])]))
"""


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", [pytest.param(name, marks=() if "float32" in name else FULL) for name in PACKED])
@pytest.mark.parametrize("version", [version for version in VERSIONS if version != TABLE["triton"]])
def test_other_versions_stay_within_the_table(version, name, fresh_python):
    folder = Path(sys.prefix) / f"triton-{version}"
    if not folder.exists():
        pytest.skip(f"{folder} is missing, which `make test` installs")
    paths = os.pathsep.join([str(folder), str(BENCHMARKS.parent / "src"), *sys.path])
    caches = Path(os.environ["TRITON_CACHE_DIR"]).parent
    environment = {"PYTHONPATH": paths, "TRITON_CACHE_DIR": str(caches / f"triton-{version}")}
    said = fresh_python("-c", COUNT, BENCHMARKS, name, unset=("TRITON_INTERPRET",), **environment)
    used, found = json.loads(said.splitlines()[-1])
    known = VERSIONS[version][name]
    assert used == version
    assert [found[each] for each in ("barriers", "exchanged", "spilled")] == [
        known[each] for each in ("barriers", "exchanged", "spilled")
    ]
    assert found["registers"] <= 64
    assert found["instructions"] <= MORE * known["instructions"]
    assert found["in_flight_KiB"] >= known["in_flight_KiB"] / MORE


def _row(name, found):
    hopper = found["sm_90"]
    cells = [name, f"{hopper['instructions']:.0f}", str(hopper["registers"]), f"{hopper['bytes']:.1f}"]
    cells += [f"{found[target]['in_flight_KiB']:.0f}" for target in TARGETS]
    cells += [f"{found[gpu['target']]['margin'][each]:.2f}" for each, gpu in GPUS.items()]
    return f"| {' | '.join(cells)} |"


@pytest.mark.parametrize("name", KNOWN)
def test_enough_is_in_flight_in_the_table(name):
    assert _lacking(KNOWN[name]) == LESS.get(name, set())


def _lacking(found):
    """The GPUs for whose bandwidth a kernel has too little in flight."""
    return {name for name, gpu in GPUS.items() if gpu["target"] in found and _too_little(gpu, found[gpu["target"]])}


def _too_little(gpu, of_target):
    return of_target["in_flight_KiB"] < gpu["in_flight_KiB"]


@pytest.mark.sample(1)
@pytest.mark.skipif(triton.__version__ != TABLE["triton"], reason="the table is of another Triton")
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name == "SGD, float32" else FULL) for name in KNOWN])
def test_instructions_stay_within_the_table(name, target, compiling):
    found, known = compiling.run(MEASURE, [str(BENCHMARKS), name, target]), KNOWN[name][target]
    assert found["instructions"] <= MORE * known["instructions"]
    assert found["registers"] <= max(64, known["registers"])
    assert _lacking({target: found}) <= LESS.get(name, set())
    assert found["in_flight_KiB"] >= min(known["in_flight_KiB"] / MORE, 32)
    assert found["bytes"] == pytest.approx(known["bytes"])
