"""Kernels keep to the numbers of instructions in benchmarks/results/static_gpu.json; see benchmarks/static_gpu.py."""

import json
from pathlib import Path

import pytest

triton = pytest.importorskip("triton", reason="Triton has builds for Linux only")

pytestmark = pytest.mark.slow
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
PAGE = BENCHMARKS.parent / "docs" / "gpu.md"
TABLE = json.loads((BENCHMARKS / "results" / "static_gpu.json").read_text(encoding="utf-8"))
KNOWN = TABLE["kernels"]
MORE = 1.1  # as ptxas may choose otherwise

MEASURE = """
import sys
folder, name = arguments
sys.path[:0] = [folder]
import static_gpu
result = sorted(static_gpu.KERNELS) if name is None else static_gpu.measure(name)
"""


def test_all_kernels_of_the_table_are_known(compiling):
    assert compiling.run(MEASURE, [str(BENCHMARKS), None]) == sorted(KNOWN)


def test_the_page_has_the_table():
    rows = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.split(" |")[0].lstrip("| ") in KNOWN]
    assert rows == [
        f"| {name} | {row['instructions']:.0f} | {row['registers']} | {row['bytes']:.1f} | {row['in_flight_KiB']:.0f} | "
        + " | ".join(f"{margin:.2f}" for margin in row["margin"].values())
        + " |"
        for name, row in KNOWN.items()
    ]


@pytest.mark.sample(4)
@pytest.mark.skipif(triton.__version__ != TABLE["triton"], reason="the table is of another Triton")
@pytest.mark.parametrize("name", KNOWN)
def test_instructions_stay_within_the_table(name, compiling):
    found, known = compiling.run(MEASURE, [str(BENCHMARKS), name]), KNOWN[name]
    assert found["instructions"] <= MORE * known["instructions"]
    assert found["registers"] <= max(64, known["registers"])
    assert found["in_flight_KiB"] >= min(32, known["in_flight_KiB"])  # of each SM, which an H100 needs for its bandwidth
    assert found["bytes"] == pytest.approx(known["bytes"])
