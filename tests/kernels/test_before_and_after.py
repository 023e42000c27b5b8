"""Two versions of the code are timed only where their kernels differ, and results name the kernels that ran."""

import os
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton has builds for Linux only")

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
ROW = "AdamW, bfloat16, states 8-bit, stochastic"


@pytest.fixture
def packed_turns(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    return __import__("packed_turns")


def test_turns_run_without_a_gpu(packed_turns):
    """With the driver that runs nothing: both versions compile the same code, launch, take turns, and say what ran."""
    with packed_turns.Worker(ROOT, dry=True) as old, packed_turns.Worker(ROOT, dry=True) as new:
        code = new.ask("code", ROW)
        assert old.ask("code", ROW) == code
        found = packed_turns.by_turns({"old": old, "new": new}, ROW, 4096)
    for version in found.values():
        assert len(version["turns"]) == packed_turns.TURNS
        assert [each["kernel"] for each in version["kernels"]] == ["update_kernel"]
        assert version["blocks of a program"] >= 1
    assert found["old"]["kernels"] == found["new"]["kernels"]
    assert len(code) == len(found["new"]["kernels"][0]["sha256"]) == 64
