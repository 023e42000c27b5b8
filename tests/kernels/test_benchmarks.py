"""The benchmarks: that every rule can be measured, how many bytes it must move, and that all parts run and are drawn.

What they find of so small tensors means nothing, and is not looked at.
"""

import json
import math
import sys
from pathlib import Path

import pytest
import torch
from optimizer_table import TABLE

from tristep.kernels import rules

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def _compiling_nothing(monkeypatch):
    """Which engine is timed changes neither what is written nor how many bytes move."""
    monkeypatch.setenv("TRISTEP_ENGINE", "eager")


@pytest.fixture(scope="module")
def benchmarks():
    """The modules by name."""
    sys.path.insert(0, str(BENCHMARKS))
    names = ("workloads", "registry", "timing", "run", "plot")
    try:
        yield {name: __import__(name) for name in names}
    finally:
        sys.path.remove(str(BENCHMARKS))
        for name in names:
            del sys.modules[name]


@pytest.fixture(scope="module")
def registry(benchmarks):
    return benchmarks["registry"]


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", rules.__all__)
def test_every_rule_can_be_measured(registry, name):
    step = registry.rule_step(name, registry.Workload("small", ((2, 1500), (7,))), "cpu")
    step.run()
    moved = step.moved
    assert moved % 4 == 0
    if TABLE[name].arrays is not None:
        assert moved == 4 * 3007 * TABLE[name].arrays
    assert moved >= 2 * 4 * 3007


@pytest.mark.sample(8)
@pytest.mark.parametrize("name", rules.__all__)
def test_peers_take_a_step_of_the_same_parameters(registry, name):
    steps = registry.peer_steps(name, registry.Workload("small", ((20, 15), (5, 7))), "cpu")
    if not steps and TABLE[name].benchmarked:
        pytest.importorskip("pytorch_optimizer", reason="not installed")
    assert bool(steps) == TABLE[name].benchmarked
    for step in steps.values():
        params = step.run.__self__.param_groups[0]["params"]
        before = [param.detach().clone() for param in params]
        for _ in range(2):  # ADOPT's first moves no weight
            step.run()
        assert [param.shape for param in params] == [(20, 15), (5, 7)]
        assert not any(torch.equal(param, old) for param, old in zip(params, before, strict=True))


@pytest.mark.sample(0)
@pytest.mark.slow
def test_all_parts_run_write_and_are_drawn(benchmarks, monkeypatch, tmp_path, capsys):
    workloads, run = benchmarks["workloads"], benchmarks["run"]
    small = (workloads.Workload("2 x 8", ((8,),) * 2), workloads.Workload("1 x 5,000", ((5000,),)))
    for name in ("STEPS", "TENSORS", "ELEMENTS", "TELEMETRY"):
        monkeypatch.setattr(workloads, name, {"cpu": small})
    for name in ("STORED", "RULES", "MUON"):
        monkeypatch.setattr(workloads, name, {"cpu": workloads.Workload("64 x 80", ((64, 80),))})
    monkeypatch.setattr(workloads, "MATRICES", {"cpu": (workloads.Workload("2 x 8 x 4", ((8, 4),) * 2),)})
    monkeypatch.setattr(workloads, "CHANGED", dict.fromkeys(workloads.CHANGED, small[0]))
    monkeypatch.setattr(workloads, "BUCKET", {"cpu": 8192})
    monkeypatch.setattr(rules, "__all__", ["sgd", "lion", "muon"])
    monkeypatch.setitem(run.SECONDS, "cpu", 0.01)
    out = tmp_path / "found.json"
    parts = [part for part in run.PARTS if part not in ("memory", "graph", "first", "host", "compiled")]
    monkeypatch.setattr(sys, "argv", ["run.py", "--out", str(out), "--only", *parts])
    run.main()
    results = json.loads(out.read_text())
    assert set(results) == {"machine", *parts}
    assert (tmp_path / "found.png").read_bytes()[:4] == b"\x89PNG"
    assert list(results["steps"]["found"]) == ["2 x 8", "1 x 5,000"]
    for row in results["steps"]["found"].values():
        times = row["us"]
        assert set(times) >= {"tristep", "torch fused", "torch foreach", "torch loop", "copy"}
        assert row["torch fused / tristep"] == times["torch fused"] / times["tristep"]
        assert row["turns"] >= 20
        assert all(map(math.isfinite, times.values()))
    assert list(results["rules"]["found"]) == ["sgd", "lion", "muon"]
    assert "of copy" in capsys.readouterr().out

    # A part that is timed alone leaves the others as they were.
    before = results["rules"]
    monkeypatch.setattr(sys, "argv", ["run.py", "--out", str(out), "--only", "new"])
    run.main()
    after = json.loads(out.read_text())
    assert after["rules"] == before
    assert after["new"] != results["new"]
