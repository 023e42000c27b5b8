"""benchmarks/torture.py at a small scale: no attack ends wrong or silent."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


def _tortured(*arguments):
    program = f"""
import sys
sys.path.insert(0, {str(BENCHMARKS)!r})
import torture
sys.exit(torture.main())"""
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)


@pytest.mark.sample(0)
@pytest.mark.parametrize(
    ("attacks", "rows"),
    [
        (["damage", "checkpoints", "loads", "interrupts"], 8),
        (["kills"], 4),
        (["first", "hostile", "layouts", "resumes"], 7),
    ],
)
def test_nothing_is_wrong_or_silent(attacks, rows):
    done = _tortured("--scale", "0.002", "--only", *attacks)
    assert done.returncode == 0, done.stdout + done.stderr
    found = [[cell.strip() for cell in line.strip("|").split("|")] for line in done.stdout.splitlines()[2:]]
    assert len(found) == rows
    assert all(int(tried) >= 1 and wrong == silent == "0" for _, _, tried, _, wrong, silent, _ in found)
