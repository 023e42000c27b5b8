"""Two versions of the code are timed only where their kernels differ, and results name the kernels and commit that ran."""

import json
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


@pytest.fixture
def benchmark(monkeypatch):
    """Imports a module of benchmarks/."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    return __import__


@pytest.fixture
def packed_turns(benchmark):
    return benchmark("packed_turns")


@pytest.mark.sample(0)
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


@pytest.mark.sample(0)
def test_parts_are_timed_in_several_processes_without_a_gpu(benchmark, monkeypatch, tmp_path, capfd):
    repeated, out = benchmark("repeated"), tmp_path / "found.json"
    monkeypatch.setattr(repeated, "PLAN", {"steps": ("steps", "ResNet")})
    monkeypatch.setattr(sys, "argv", ["repeated.py", "--dry", "--processes", "2", "--out", str(out)])
    with pytest.raises(SystemExit, match="False"):
        repeated.main()
    (row,) = json.loads(out.read_text())["steps"]["found"].values()
    times = row["us"]["tristep"]
    assert 0 < times["least"] <= times["median"] <= times["most"]
    assert "of 1 kernels" in capfd.readouterr().out


def test_times_of_processes_are_medians_with_their_spread(benchmark):
    found = [{"row": {"workload": "1 x 8", "us": {"a": us}}} for us in (1.0, 2.0, 9.0)]
    found[0]["row"]["us"]["a (first of ten)"] = 4.0
    runs = [{"commit": "c", "seconds": i, "found": each} for i, each in enumerate(found)]
    summary = benchmark("repeated").summary(runs)
    us = {"a": {"median": 2.0, "least": 1.0, "most": 9.0}, "a (first of ten)": {"median": 4.0, "least": 4.0, "most": 4.0}}
    row = {"workload": "1 x 8", "us": us}
    assert summary == {"processes": 3, "commit": "c", "seconds": [0, 1, 2], "found": {"row": row}}


def test_results_name_the_commit_and_the_elements_of_a_program(benchmark):
    head = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    assert (benchmark("environment").commit() or "").removesuffix("-dirty") == head
    found = {"148 x 8": {}, "adamw": {"workload": "2^14 x 2^14"}, "muon": {"workload": "16 x 2,048 x 2,048"}}
    benchmark("run")._add_programs(found)
    assert [row.get("tile") for row in found.values()] == [1024, 2048, None]
