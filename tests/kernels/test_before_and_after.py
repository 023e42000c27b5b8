"""Two versions of the code are timed only where their kernels differ, and results name the kernels that ran."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton has builds for Linux only")

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
ROW = "AdamW, bfloat16, states 8-bit, stochastic"


def test_equal_kernels_are_not_timed():
    """The working tree against itself."""
    command = [sys.executable, BENCHMARKS / "packed_turns.py", ROOT, "--static", "--rows", ROW]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), *sys.path])}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 1
    assert "equal code: left out" in run.stdout
    assert "have equal code: nothing to compare" in run.stderr


WATCH = """
import sys
sys.path[:0] = [arguments[0]]
import environment, static_gpu
kernels = environment.Kernels("cuda")
try:
    compiled = [static_gpu.compile_for(static_gpu.GPUTarget("cuda", 90, 32), static_gpu.rules.sgd) for _ in range(2)]
finally:
    static_gpu.triton.knobs.compilation.listener = None
result = kernels.compiled, [environment.code_hash(each.asm["sass"]) for each in compiled]
"""


def test_results_name_the_kernels_that_were_compiled_or_in_the_cache(compiling):
    noted, hashes = compiling.run(WATCH, [str(BENCHMARKS)])
    assert [each["kernel"] for each in noted] == ["update_kernel"] * 2
    assert [each["sha256"] for each in noted] == hashes
    assert hashes[0] == hashes[1]


def test_turns_run_without_a_gpu(monkeypatch):
    """With the driver that runs nothing: both versions compile, launch, take turns, and say what ran."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    packed_turns = __import__("packed_turns")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    with packed_turns.Worker(ROOT, dry=True) as old, packed_turns.Worker(ROOT, dry=True) as new:
        code = new.ask("code", ROW)
        found = packed_turns.by_turns({"old": old, "new": new}, ROW, 4096)
    for version in found.values():
        assert len(version["turns"]) == packed_turns.TURNS
        assert [each["kernel"] for each in version["kernels"]] == ["update_kernel"]
        assert version["blocks of a program"] >= 1
    assert found["old"]["kernels"] == found["new"]["kernels"]
    assert len(code) == len(found["new"]["kernels"][0]["sha256"]) == 64


def test_rows_of_different_code_are_chosen(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    packed_turns = __import__("packed_turns")
    assert packed_turns.differing({"a": "1", "b": "2", "c": "3"}, {"a": "1", "b": "4", "c": "5"}) == ["b", "c"]
