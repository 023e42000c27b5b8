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


@pytest.mark.parametrize(("name", "arrays", "kept"), [("group_adagrad", 4, 2), ("adafactor", 6, 1502), ("came", 9, 3004)])
def test_rules_with_means_move_what_their_reductions_read(registry, name, arrays, kept):
    """As many arrays as docs/gpu.md says in bytes, and states of two rows and 1,500 columns, which are read and written."""
    step = registry.rule_step(name, registry.Workload("small", ((2, 1500),)), "cpu")
    assert step.moved == 4 * (arrays * 3000 + 2 * kept)


@pytest.mark.parametrize("name", ["2bit", "1bit"])
def test_torchs_operations_find_the_same_codes(registry, name):
    """Twice, so that what the first step has left is in the second."""
    steps = registry.coding_steps(name, 4096, "cpu")
    message = steps["tristep"].run.args[3]
    for _ in range(2):
        steps["tristep"].run()
        assert torch.equal(steps["torch"].run(), message[0])
    assert steps["tristep"].moved == 12 * 4096 + len(message[0])


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


def test_peers_are_left_out_where_their_library_is_missing(registry, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert registry.peer_steps("lion", registry.Workload("small", ((2, 3),)), "cpu") == {}


def test_models_have_as_many_parameters_as_published(benchmarks):
    workloads = benchmarks["workloads"]
    for shapes, tensors, elements in [
        (workloads.gpt2(), 148, 124_439_808),
        (workloads.resnet50(), 161, 25_557_032),
        (workloads.llama_shard(1), 291, 8_030_261_248),
        (workloads.llama_shard(8), 291, 8_030_261_248 // 8),
    ]:
        assert (len(shapes), workloads.Workload("", shapes).elements) == (tensors, elements)


@pytest.mark.sample(0)
@pytest.mark.slow
def test_all_parts_run_write_and_are_drawn(benchmarks, monkeypatch, tmp_path, capsys):
    workloads, run = benchmarks["workloads"], benchmarks["run"]
    small = (workloads.Workload("2 x 8", ((8,),) * 2), workloads.Workload("1 x 5,000", ((5000,),)))
    for name in ("STEPS", "TENSORS", "ELEMENTS", "TELEMETRY"):
        monkeypatch.setattr(workloads, name, {"cpu": small})
    for name in ("STORED", "RULES", "MUON"):
        monkeypatch.setattr(workloads, name, {"cpu": workloads.Workload("64 x 80", ((64, 80),))})
    monkeypatch.setattr(workloads, "MATRICES", (workloads.Workload("2 x 8 x 4", ((8, 4),) * 2),))
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


def test_rows_that_are_named_can_be_tried_without_a_gpu(benchmarks, monkeypatch, tmp_path):
    workloads, run = benchmarks["workloads"], benchmarks["run"]
    for name in ("STEPS", "TENSORS", "ELEMENTS", "TELEMETRY", "CHANGED", "STORED", "RULES", "MUON", "BUCKET"):
        monkeypatch.setattr(workloads, name, dict(getattr(workloads, name)))
    monkeypatch.setattr(run, "SECONDS", benchmarks["timing"].SECONDS)
    monkeypatch.setitem(run.SECONDS, "cpu", 2.0)
    monkeypatch.setitem(run.SECONDS, "cuda", 0.4)
    rows = "^(adafactor|came|group_adagrad|novograd|ResNet-50.*|after loading)$"
    monkeypatch.setattr("gc.collect", lambda: 0)  # which only steadies what is timed, and takes longest here
    out = tmp_path / "found.json"
    options = ["--only", "rules", "steps", "new", "changes", "--rows", rows]
    monkeypatch.setattr(sys, "argv", ["run.py", "--dry", "--out", str(out), *options])
    run.main()
    results = json.loads(out.read_text())
    assert list(results["rules"]["found"]) == ["adafactor", "came", "group_adagrad", "novograd"]
    for part in ("steps", "new"):
        assert list(results[part]["found"]) == ["ResNet-50, 161 tensors"]
        assert {"tristep", "tristep.optim", "torch fused"} <= results[part]["found"]["ResNet-50, 161 tensors"]["us"].keys()
    assert list(results["changes"]["found"]) == ["after loading"]
