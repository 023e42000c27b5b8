"""Runs the tests that a GPU changes anything for, several files at once, with whatever pytest is there.

    python tests/gpu/on_gpu.py                    all of them
    python tests/gpu/on_gpu.py --cases quick      fewer cases of each test, as `make test` runs
    python tests/gpu/on_gpu.py --shard 1/4        a quarter of the files, those of equal total size
    python tests/gpu/on_gpu.py FILE ...           those of these files

Results go to benchmarks/results/gpu_tests.json as soon as a file's tests have ended; files that have passed for this commit
are not run again, unless they are named. Of a file that failed the last lines are shown. Plugins and pinned versions may be
missing there: warnings are no errors, and parallel work is done by processes.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "gpu_tests.json"
# The engines that a GPU's tensors get to, and what is marked as needing one.
SELECTION = ["-k", "triton or eager or gpu"]
# By folder of tests, the package that they need: without it they are left out. With None they always are, as a GPU changes
# nothing for them.
FOLDERS = {"packaging": None, "browser": None, "viz": None, "integrations": "IPython"}
# Those of these files only compile, for all GPUs, or use a pretended one.
NOT_FOR_GPUS = {
    "test_before_and_after.py",
    "test_emulator.py",
    "test_start.py",
    "test_triton_versions.py",
}
# The files with most cases begin first, each in several processes where pytest-xdist is there.
LONGEST = ["test_parity.py", "test_differences.py"]
OPTIONS = ["-q", "-rs", "--bare", "-o", "addopts=--import-mode=importlib", "-W", "default"]
NOTHING_SELECTED = 5  # pytest's exit status


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--cases", help="full or quick", default="full")
    parser.add_argument("--shard", help="such as 1/4", default="1/1")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    results = Results(arguments.out, arguments.cases)
    files = arguments.files
    if not files:
        chosen = with_tests(filter(is_wanted, (ROOT / "tests").glob("**/test_*.py")), arguments.cases)
        files = [file for file in shard(chosen, arguments.shard) if not results.has_passed(file)]
    files = sorted(files, key=lambda file: (file.name not in LONGEST, -file.stat().st_size))
    begin = time.perf_counter()
    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        failed = sum(pool.map(lambda file: run(file, results, arguments.cases), files))
    print(f"{len(files)} files, {failed} failed, {time.perf_counter() - begin:.0f} s")
    return 1 if failed else 0


def is_wanted(file: Path) -> bool:
    """Whether a GPU changes anything for the tests of this file's folder, and what they need is there."""
    folder = file.parent.name
    if file.name in NOT_FOR_GPUS:
        return False
    if folder not in FOLDERS:
        return True
    needed = FOLDERS[folder]
    if needed is None:
        return False
    found = importlib.util.find_spec(needed) is not None
    if not found:
        print(f"{file.name}: left out, as it needs {needed}", flush=True)
    return found


def with_tests(files: Iterable[Path], cases: str) -> list[Path]:
    """Return the files in which a test is selected, or which cannot be read; importing torch for the others takes longer."""
    names = {_name(file): file for file in sorted(files)}
    command = [sys.executable, "-m", "pytest", *OPTIONS, *SELECTION, f"--cases={cases}", "--collect-only", "-rE", *names]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if found.returncode not in (0, 2, NOTHING_SELECTED):  # 2: some file cannot be read, which its own run will show
        raise SystemExit(f"the tests cannot be collected:\n{found.stdout[-2000:]}{found.stderr[-2000:]}")
    ids = (line.removeprefix("ERROR ").split("::")[0].split(" - ")[0] for line in found.stdout.splitlines())
    return [names[name] for name in dict.fromkeys(ids) if name in names]


def shard(files: list[Path], which: str) -> list[Path]:
    """The k-th of n lists of files that are about equally long, the largest files first.

    Raises:
        ValueError: `which` is no "k/n" with k from 1 to n.
    """
    k, _, n = which.partition("/")
    if not (k.isdecimal() and n.isdecimal() and 1 <= int(k) <= int(n)):
        raise ValueError(f"--shard {which}: must be k/n with k from 1 to n, such as 1/4")
    lists: list[list[Path]] = [[] for _ in range(int(n))]
    for file in sorted(files, key=lambda path: -path.stat().st_size):
        min(lists, key=lambda each: sum(path.stat().st_size for path in each)).append(file)
    return lists[int(k) - 1]


class Results:
    """What each file's tests have given for this commit, in a file that is always complete."""

    def __init__(self, path: Path, cases: str) -> None:
        command = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
        commit = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
        known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        of = {"commit": commit, "cases": cases}
        self._path, self._lock = path, threading.Lock()
        self._found: dict[str, Any] = known if of.items() <= known.items() else of | {"files": {}}

    def has_passed(self, file: Path) -> bool:
        return self._found["files"].get(_name(file), {}).get("passed", False)

    def add(self, file: Path, passed: bool, summary: str, seconds: float) -> None:
        with self._lock:
            self._found["files"][_name(file)] = {"passed": passed, "summary": summary, "seconds": round(seconds, 1)}
            written = self._path.with_suffix(".new")
            written.write_text(json.dumps(self._found, indent=1) + "\n", encoding="utf-8")
            written.replace(self._path)


def run(file: Path, results: Results, cases: str) -> bool:
    """Whether a test of this file failed."""
    begin = time.perf_counter()
    command = [sys.executable, "-m", "pytest", *OPTIONS, *SELECTION, f"--cases={cases}", str(file)]
    if file.name in LONGEST and importlib.util.find_spec("xdist"):
        command += ["-n", "8"]
    threads = {"OMP_NUM_THREADS": "2", "NUMBA_NUM_THREADS": "2"}  # as many of these run at once
    found = subprocess.run(command, cwd=ROOT, env=os.environ | threads, capture_output=True, text=True)
    lines = (found.stdout + found.stderr).strip().splitlines()
    # Plugins may say more after pytest's last line.
    told = [line for line in lines if re.search(r"\d (passed|failed|skipped|deselected|errors?)\b.* in \d", line)]
    summary, seconds = told[-1] if told else "no output", time.perf_counter() - begin
    failed = found.returncode not in (0, NOTHING_SELECTED)
    results.add(file, not failed, summary, seconds)
    if found.returncode != NOTHING_SELECTED:
        print(f"{file.name}: {summary}, {seconds:.0f} s in all", flush=True)
    if failed:
        print("\n".join(lines[-60:]), flush=True)
    return failed


def _name(file: Path) -> str:
    return str(file.resolve().relative_to(ROOT))


if __name__ == "__main__":
    sys.exit(main())
