"""The tests that judge mutants: a snapshot of the working tree, what is known of its tests, and processes that run some."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import queue
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
TESTS = ("tests/kernels", "tests/trainer")
HELPERS = ("tests/gpu/", "tests/helpers/", "tests/oracles/")
CASES = {"quick": ("--cases", "quick"), "rest": ("--cases", "rest"), "full": ("--cases", "full")}
MEMORY = 16 * 2**30  # bytes that a test process may take: a mutant may ask for any number


class Suite:
    """The snapshot of the tree, what is known of its tests, and processes that run some of them."""

    def __init__(self, folder: Path, jobs: int, idle: float) -> None:
        self.folder, self.jobs, self.idle = folder, jobs, idle
        self.tree, self.verdicts = folder / "tree", folder / "verdicts.jsonl"
        self.lock, self.running, self.stopped = threading.Lock(), set[subprocess.Popen[bytes]](), False
        path = folder / "map.json"
        self.map: dict[str, Any] = {"tree": "", "tests": {}, "pass": []}  # of which tree, and which files passed as they are
        if path.exists():
            self.map = json.loads(path.read_text(encoding="utf-8"))

    def save(self) -> None:
        (self.folder / "map.json").write_text(json.dumps(self.map, indent=1), encoding="utf-8")

    def snapshot(self) -> None:
        """Copy the working tree. What is known of tests is forgotten where they, or what they test, have changed."""
        listing = subprocess.check_output(["git", "ls-files", "-coz", "--exclude-standard"], cwd=ROOT, text=True)
        found = hashlib.sha256()
        shutil.rmtree(self.tree, ignore_errors=True)
        for name in sorted(name for name in listing.split("\0") if name and os.path.lexists(ROOT / name)):
            (self.tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, self.tree / name, follow_symlinks=False)
            shared = name.startswith("tests/") and name.count("/") == 1
            if shared or name.startswith(("kernels/", "trainer/", *TESTS, *HELPERS)):
                found.update(f"{name}\0".encode() + (self.tree / name).read_bytes() + b"\0")
        tests = self.map["tests"] if self.map["tree"] == found.hexdigest() else {}
        self.map = {"tree": found.hexdigest(), "tests": tests, "pass": []}
        self.save()

    def test_files(self) -> list[str]:
        return [
            str(path.relative_to(self.tree)) for folder in TESTS for path in sorted((self.tree / folder).glob("test_*.py"))
        ]

    def each(self, function: Callable[[Any, Path], None], items: Iterable[Any]) -> None:
        """Call the function with each item and a copy of the snapshot, several at a time; an error ends all of them."""
        trees: queue.Queue[Path] = queue.Queue()
        for k in range(self.jobs):
            trees.put(self._copy(k))

        def call(item: Any) -> None:
            tree = trees.get()
            try:
                function(item, tree)
            finally:
                trees.put(tree)

        with ThreadPoolExecutor(self.jobs) as pool:
            futures = [pool.submit(call, item) for item in items]
            try:
                for future in futures:
                    future.result()
            except BaseException:
                with self.lock:
                    self.stopped = True
                    for process in self.running:
                        _end(process)
                pool.shutdown(cancel_futures=True)
                raise

    def _copy(self, k: int) -> Path:
        tree = self.folder / f"tree-{k}"
        shutil.rmtree(tree, ignore_errors=True)
        shutil.copytree(self.tree, tree, symlinks=True)
        command = [sys.executable, "-c", "import tristep; print(tristep.__file__)"]
        done = subprocess.run(command, env=self._environment(tree), cwd=tree, capture_output=True, text=True, check=True)
        if not done.stdout.startswith(str(tree)):
            raise RuntimeError(f"{done.stdout.strip()} was imported in place of {tree}'s own")
        return tree

    def _environment(self, tree: Path) -> dict[str, str]:
        one_thread = {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1", "PYTEST_XDIST_WORKER_COUNT": str(os.cpu_count())}
        folders = {"NUMBA_CACHE_DIR": str(self.folder / "numba"), "PYTHONPATH": str(tree / "src")}
        return os.environ | one_thread | folders

    def pytest(
        self, tree: Path, tier: str, tests: Sequence[str], environment: dict[str, str], stop: bool = True
    ) -> list[str]:
        """The tests that fail, only the first unless told not to `stop`, or what ended pytest itself."""
        command = [sys.executable, "-m", "pytest", *(["-x"] if stop else []), "-q", "--tb=short", "-p", "no:cacheprovider"]
        command += [f"--basetemp={tree}.tmp", *CASES[tier], *tests]
        log, settings = Path(f"{tree}.log"), self._environment(tree) | environment
        with log.open("wb") as out, self.lock:
            if self.stopped:
                raise KeyboardInterrupt
            process = subprocess.Popen(command, cwd=tree, env=settings, stdout=out, stderr=out, start_new_session=True)
            self.running.add(process)
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(process.pid, resource.RLIMIT_DATA, (MEMORY, MEMORY))
        hangs = self._wait(process, log)
        with self.lock:
            self.running.remove(process)
            if self.stopped:
                raise KeyboardInterrupt
        if hangs:
            return ["hangs"]
        text, code = log.read_text(encoding="utf-8", errors="replace"), process.returncode
        failures = [line.split(" ", 1)[1] for line in text.splitlines() if line.startswith(("FAILED ", "ERROR "))]
        if code in (0, 5):  # 5: these files have no tests of this tier
            return []
        crashed = code < 0 and -code not in (signal.SIGKILL, signal.SIGTERM)
        if code in (1, 2) or crashed or (code == 4 and "while loading conftest" in text):
            return [failure.split(" - ")[0] for failure in failures] or [f"exit code {code}"]
        raise RuntimeError(f"pytest ended with {code}: {' '.join(command)}\n{text[-3000:]}")

    def _wait(self, process: subprocess.Popen[bytes], log: Path) -> bool:
        """Wait for the end, or until no test has ended for too long, and say which; then end its children, too."""
        size, since = -1, time.monotonic()
        while process.poll() is None and time.monotonic() - since < self.idle:
            time.sleep(0.2)
            if log.stat().st_size != size:
                size, since = log.stat().st_size, time.monotonic()
        hangs = process.poll() is None
        _end(process)
        process.wait()
        return hangs

    def known(self) -> dict[tuple[str, str], dict[str, Any]]:
        """The verdicts so far, by the mutants' keys and the tiers."""
        lines = self.verdicts.read_text(encoding="utf-8").splitlines() if self.verdicts.exists() else []
        return {(found["key"], found["tier"]): found for found in map(json.loads, lines)}


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
