"""Mutation test of the test suite: does its quick tier notice what the full one notices?

Small faults (`mutants.py`) are put into copies of the product, one at a time: a sign, a comparison, a constant, a statement
left out. A tier that fails then has killed the mutant. The quick tier is to kill at least 95 % of those that the full one
kills.

    python benchmarks/mutation.py map        once: which functions each test file calls, and how long it takes
    python benchmarks/mutation.py run        judge the mutants; takes hours, may be interrupted and started again
    python benchmarks/mutation.py table      the verdicts as a Markdown table; exit code 1 if the goal is missed
    python benchmarks/mutation.py show       what survived, as diffs

All work on the snapshot of the working tree that `map` takes, in the folder --cache. What is known already is not looked for
again: `map` starts again where tests or product have changed, verdicts are kept in verdicts.jsonl by the text of the mutated
file, for you to remove when tests have changed. The mutants depend on --seed; fewer of them (--count) are the first of more.

A mutant meets only the test files that call its function. What is compiled Python does not call: it meets each file that
runs an engine, code outside of functions all. The quick tier's survivors meet the rest of the full tier in one tree:
a test that passes with all of them would pass with each; one that fails is run again with each alone.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import importlib.util
import json
import os
import shutil
import signal
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from mutants import GROUPS, Mutant, mutants
from mutation_suite import Suite

GOAL = 0.95
# The test files that a mutant of a group meets first, in addition to those named like its module.
FIRST = {
    "rules": ("parity", "golden_optimizers", "optimizers", "modern"),
    "storage": ("storage", "packed", "eight_bits", "low_precision", "stochastic_rounding"),
    "engines": ("engines", "layouts", "threads", "parity", "reductions"),
    "optimizers": ("optimizers", "golden_optimizers", "options", "modern"),
}
HEAD = 6  # test files that have a process of their own before the others, whose collection alone takes 10 s
# What backends/cpu builds into its loops from storage, apart from constants. numba's cache does not notice when it changes.
BUILT_IN = ("exponents",)

_short = partial(textwrap.shorten, width=60, placeholder="...")
_SITE = (
    "import sys\nsys.path.insert(0, {folder!r})\nfrom mutants import record\ndel sys.path[0]\nrecord({tree!r}, {out!r})\n"
)


def make_map(suite: Suite, files: Sequence[str]) -> int:
    """Run test files one by one, all of their cases, and keep what they call; 1 if one of them fails."""
    suite.folder.mkdir(parents=True, exist_ok=True)
    suite.snapshot()
    failed = []

    def one(file: str, tree: Path) -> None:
        site, out, start = Path(f"{tree}.site"), Path(f"{tree}.called"), time.monotonic()
        site.mkdir(exist_ok=True)
        out.unlink(missing_ok=True)
        text = _SITE.format(folder=str(Path(__file__).parent), tree=str(tree), out=str(out))
        (site / "sitecustomize.py").write_text(text, encoding="utf-8")
        path = f"{site}:{tree / 'src'}"  # child processes record what they call, too
        failures = suite.pytest(tree, "full", [file], {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"})
        seconds = round(time.monotonic() - start, 1)
        called = sorted(set(out.read_text(encoding="utf-8").split()))
        with suite.lock:
            print(f"{file}: {seconds} s, {len(called)} functions {failures}", flush=True)
            if failures:
                failed.append(file)
            else:
                suite.map["tests"][file] = {"seconds": seconds, "called": called}
                suite.save()

    suite.each(one, [file for file in files or suite.test_files() if file not in suite.map["tests"]])
    return 1 if failed else 0


def run(suite: Suite, wanted: Sequence[Mutant]) -> int:
    """Judge the mutants that have no verdict yet: by the quick tier, and those that survive by the rest of the full one."""
    known, tests = suite.known(), suite.map["tests"]
    kills = Counter((found["file"], found["by"].split("::")[0]) for found in known.values() if found["killed"])
    print(f"{len(wanted)} mutants, {len(tests)} of {len(suite.test_files())} test files are mapped", flush=True)

    def note(mutant: Mutant, tier: str, by: str, seconds: float = 0.0) -> None:
        found = mutant._asdict() | {"tier": tier, "killed": bool(by), "by": by, "seconds": round(seconds, 1)}
        with suite.lock:
            known[mutant.key, tier] = found
            kills[mutant.file, by.split("::")[0]] += bool(by)
            with suite.verdicts.open("a", encoding="utf-8") as file:
                file.write(json.dumps(found) + "\n")
            print(f"{tier}: {mutant.file}:{mutant.line} {mutant.kind}: {by or 'survived'}, {seconds:.0f} s", flush=True)

    def tests_of(group: Sequence[Mutant]) -> list[str]:
        """The test files that they meet, first those likely to fail, then the fast ones and those that did."""

        def rank(file: str) -> tuple[bool, float]:
            name = Path(file).stem.removeprefix("test_")
            likely = any(name in FIRST[mutant.group] or name.startswith(Path(mutant.file).stem) for mutant in group)
            return not likely, tests[file]["seconds"] / (1 + sum(kills[mutant.file, file] for mutant in group))

        return sorted((file for file in tests if any(mutant.is_met(tests[file]["called"]) for mutant in group)), key=rank)

    @contextlib.contextmanager
    def mutated(group: Sequence[Mutant], tree: Path) -> Iterator[dict[str, str]]:
        """These mutants in the tree; the environment that its tests need."""
        numba = Path(f"{tree}.numba")  # a cache of their own, where they must not find what was compiled before
        files = {mutant.file: (suite.tree / mutant.file).read_bytes() for mutant in group}
        try:
            for file, source in files.items():
                for mutant in sorted((m for m in group if m.file == file), key=lambda m: -m.start):
                    source = mutant.applied(source)
                _write(tree / file, source)
            yield {"NUMBA_CACHE_DIR": str(numba)} if any(map(_changes_loops, group)) else {}
        finally:
            for file, source in files.items():
                _write(tree / file, source)
            shutil.rmtree(numba, ignore_errors=True)

    def baseline(files: Sequence[str], tree: Path) -> None:
        if failures := suite.pytest(tree, "quick", files, {}):
            raise RuntimeError(f"the suite must pass before anything is mutated: {failures[0]}, see {tree}.log")

    def quick(mutant: Mutant, tree: Path) -> None:
        start, files, failures = time.monotonic(), tests_of([mutant]), list[str]()
        with mutated([mutant], tree) as environment:
            for part in (files[:HEAD], files[HEAD:]):
                if part and not failures:
                    failures = suite.pytest(tree, "quick", part, environment)
        note(mutant, "quick", failures[0] if failures else "", time.monotonic() - start)

    def rest(group: Sequence[Mutant]) -> None:
        """Judge mutants that do not overlap: each test file with all, then what failed there with each alone."""
        failed: dict[str, list[str]] = {}  # the tests of a file that fail with all of them, or the file itself

        def together(files: Sequence[str], tree: Path) -> None:
            with mutated(group, tree) as environment:
                for file in files:
                    failures = suite.pytest(tree, "rest", [file], environment, stop=False)
                    with suite.lock:
                        print(f"rest of {file} with {len(group)}: {len(failures)} failures", flush=True)
                        if failures:
                            failed[file] = failures if failures[0].startswith(file) else [file]

        def alone(mutant: Mutant, tree: Path) -> None:
            start, failures = time.monotonic(), list[str]()
            met = [test for file in tests_of([mutant]) for test in failed.get(file, ())]
            with mutated([mutant], tree) as environment:
                if met:
                    failures = suite.pytest(tree, "rest", met, environment)
            note(mutant, "rest", failures[0] if failures else "", time.monotonic() - start)

        slowest = sorted(tests_of(group), key=lambda file: -tests[file]["seconds"])
        suite.each(together, [part for k in range(suite.jobs) if (part := slowest[k :: suite.jobs])])
        suite.each(alone, group)

    if suite.map["pass"] != sorted(tests):
        slowest = sorted(tests, key=lambda file: -tests[file]["seconds"])
        suite.each(baseline, [part for k in range(suite.jobs) if (part := slowest[k :: suite.jobs])])
        suite.map["pass"] = sorted(tests)
        suite.save()
    suite.each(quick, [mutant for mutant in wanted if (mutant.key, "quick") not in known])
    left = [mutant for mutant in wanted if not known[mutant.key, "quick"]["killed"] and (mutant.key, "rest") not in known]
    for group in _apart(left):
        rest(group)
    return 0


def _changes_loops(mutant: Mutant) -> bool:
    scope, constant = mutant.scope, not mutant.scope.function
    built_in = mutant.group == "storage" and (constant or scope.name in BUILT_IN)
    return built_in or mutant.file.startswith("kernels/backends/cpu/")


def _write(path: Path, source: bytes) -> None:
    """Write a module; what Python compiled of it before could look as new as the text, which is often as long as before."""
    path.write_bytes(source)
    Path(importlib.util.cache_from_source(path)).unlink(missing_ok=True)


def _apart(left: Sequence[Mutant]) -> list[list[Mutant]]:
    """The mutants in groups in which none changes what another one of the same file does."""
    groups: list[list[Mutant]] = []
    for mutant in left:
        for group in groups:
            if all(o.file != mutant.file or o.end <= mutant.start or mutant.end <= o.start for o in group):
                group.append(mutant)
                break
        else:
            groups.append([mutant])
    return groups


def table(suite: Suite, wanted: Sequence[Mutant]) -> int:
    """Print the table; 1 if the quick tier kills too few of those that the full one kills, 2 if verdicts are missing."""
    known = suite.known()
    counts = {group: Counter(_fate(known, mutant) for mutant in wanted if mutant.group == group) for group in GROUPS}
    whole = sum(counts.values(), Counter())
    print("| group | mutants | killed by quick | killed by full only | survived both | quick / full |")
    print("|---|---|---|---|---|---|")
    for group, count in (*counts.items(), ("all", whole)):
        cells = (group, count.total(), count["quick"], count["full only"], count["survived"], f"{_ratio(count):.1%}")
        print(f"| {' | '.join(map(str, cells))} |")
    missed = [mutant for mutant in wanted if _fate(known, mutant) == "full only"]
    if missed:
        print("\nKilled by the full tier only:\n")
    for mutant in missed:
        what = f"`{_short(mutant.old)}` -> `{_short(mutant.new)}`"
        print(f"- `{mutant.file}:{mutant.line}` {what}, by `{known[mutant.key, 'rest']['by']}`")
    if whole["no verdict"]:
        print(f"\n{whole['no verdict']} mutants have no verdict yet")
        return 2
    return 0 if _ratio(whole) >= GOAL else 1


def _fate(known: dict[tuple[str, str], dict[str, Any]], mutant: Mutant) -> str:
    quick, rest = (known.get((mutant.key, tier)) for tier in ("quick", "rest"))
    if quick is not None and quick["killed"]:
        return "quick"
    if quick is None or rest is None:
        return "no verdict"
    return "full only" if rest["killed"] else "survived"


def _ratio(count: Counter[str]) -> float:
    return count["quick"] / max(count["quick"] + count["full only"], 1)


def show(suite: Suite, wanted: Sequence[Mutant]) -> int:
    """Print what survived the quick tier, as diffs, with its fate."""
    known = suite.known()
    for mutant in wanted:
        fate, source = _fate(known, mutant), (suite.tree / mutant.file).read_bytes()
        if fate != "quick" and (mutant.key, "quick") in known:
            old, new = (text.decode().splitlines() for text in (source, mutant.applied(source)))
            print(f"# {mutant.group}, {mutant.kind}: {fate}")
            print("\n".join(difflib.unified_diff(old, new, mutant.file, mutant.file, n=1, lineterm="")), end="\n\n")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("map", "run", "table", "show"))
    parser.add_argument("files", nargs="*", help="of map: these test files only")
    parser.add_argument(
        "--cache", type=Path, default=Path.home() / ".cache" / "tristep-mutation", help="default: %(default)s"
    )
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, help="processes at a time (default: one for each core)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=208, help="mutants, as many of each group (default: 208)")
    parser.add_argument(
        "--idle", type=float, default=900, help="seconds without a test's end that make a hang (default: 900)"
    )
    given = parser.parse_intermixed_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    suite = Suite(given.cache.resolve(), given.jobs, given.idle)
    if given.command == "map":
        return make_map(suite, given.files)
    if not suite.map["tests"]:
        parser.error("make a map first")
    wanted = mutants(suite.tree, given.seed, given.count)
    if given.command == "run":
        return run(suite, wanted)
    return (table if given.command == "table" else show)(suite, wanted)


if __name__ == "__main__":
    sys.exit(main())
