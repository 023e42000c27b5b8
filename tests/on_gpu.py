"""Runs the tests that a GPU changes anything for, several files at once, with whatever pytest is there.

    python tests/on_gpu.py               all of them
    python tests/on_gpu.py FILE ...      those of these files

Of a file that failed the last lines are shown. Plugins and pinned versions may be missing there: warnings are no errors, and
parallel work is done by processes.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[1]
# The engines that a GPU's tensors get to, and what is marked as needing one.
SELECTION = ["-k", "triton or eager or gpu", "-m", "not packaging"]
OPTIONS = ["-q", "--cases=full", "-o", "addopts=--import-mode=importlib", "-W", "default"]
NOTHING_SELECTED = 5  # pytest's exit status


def main() -> int:
    files = [Path(name) for name in sys.argv[1:]]
    files = files or sorted((ROOT / "tests").glob("**/test_*.py"), key=lambda path: -path.stat().st_size)
    begin = time.perf_counter()
    workers = min(8, os.cpu_count() or 1)
    with ThreadPoolExecutor(workers) as pool:
        failed = sum(pool.map(run, files))
    print(f"{len(files)} files, {failed} failed, {time.perf_counter() - begin:.0f} s")
    return 1 if failed else 0


def run(file: Path) -> bool:
    """Whether a test of this file failed."""
    begin = time.perf_counter()
    found = subprocess.run(
        [sys.executable, "-m", "pytest", *OPTIONS, *SELECTION, str(file)], cwd=ROOT, capture_output=True, text=True
    )
    if found.returncode == NOTHING_SELECTED:
        return False
    lines = (found.stdout + found.stderr).strip().splitlines()
    print(f"{file.name}: {lines[-1] if lines else 'no output'}, {time.perf_counter() - begin:.0f} s in all", flush=True)
    if found.returncode:
        print("\n".join(lines[-60:]), flush=True)
    return bool(found.returncode)


if __name__ == "__main__":
    sys.exit(main())
