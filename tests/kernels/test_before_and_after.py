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


def test_equal_kernels_are_not_timed(packed_turns, monkeypatch, capsys):
    class Same:
        def __init__(self, tree, dry):
            pass

        def ask(self, what, row):
            return {"code": "one hash"}[what]

        __enter__, __exit__ = (lambda self: self), (lambda self, *error: None)

    monkeypatch.setattr(packed_turns, "Worker", Same)
    monkeypatch.setattr(sys, "argv", ["packed_turns.py", str(ROOT), "--rows", ROW])
    with pytest.raises(SystemExit, match="have equal code: nothing to compare"):
        packed_turns.main()
    assert "equal code: left out" in capsys.readouterr().out
    versions = {"older": "123", "old": "143", "new": "145"}
    code = {name: dict(zip("abc", hashes, strict=True)) for name, hashes in versions.items()}
    assert packed_turns.differing(code) == ["b", "c"]


WATCH = """
import sys
sys.path[:0] = [arguments[0]]
import environment, triton
from triton.backends.compiler import GPUTarget
from tristep.kernels import rules
from tristep.kernels.backends.triton.compile import compile_for
kernels = environment.Kernels("cuda")
try:
    compiled = [compile_for(GPUTarget("cuda", 90, 32), rules.sgd) for _ in range(2)]
finally:
    triton.knobs.compilation.listener = None
result = kernels.compiled, [environment.code_hash(each.asm["sass"]) for each in compiled]
"""


def test_results_name_the_kernels_that_were_compiled_or_in_the_cache(compiling):
    noted, hashes = compiling.run(WATCH, [str(BENCHMARKS)])
    assert [each["kernel"] for each in noted] == ["update_kernel"] * 2
    assert [each["sha256"] for each in noted] == hashes
    assert hashes[0] == hashes[1]


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
