"""Attacks on what must never go wrong silently: files, steps and resumed trainings, with counts.

    python benchmarks/torture.py                   all attacks, as often as docs/reliability.md says; takes an hour or so
    python benchmarks/torture.py --scale 0.01      a hundredth of each
    python benchmarks/torture.py --only damage     some of them

Prints a table: how often each was tried; how often it came in the middle of what it attacks, or was noticed ("inside"); how
often the outcome was wrong (an unexpected error, a lost file, memory without bounds); how often it was silent (no error, and
other numbers). The exit code is 1 unless the last two are 0. What is tried follows from --seed and the attempt's number,
when a signal arrives does not. Needs fork().

    kills        a process that saves is killed at a random moment: the file is the old or the new one, whole
    damage       bytes of a file are changed, cut, moved: ValueError, or what was saved; a Trainer that refuses is unchanged
    checkpoints  a file of another checkpoint in one, or fields of other types: ValueError, and nothing has changed
    hostile      files made to fill memory, to run code or to confuse: ValueError, and 128 MiB at most
    layouts      weights and gradients get other strides and memory between steps: the numbers are those of torch.optim
    resumes      a training saved by one process goes on in another: to the bit as if it had not stopped
    loads        SIGINT at random moments of loading a checkpoint: all of it or nothing, and it is neither lost nor damage
    interrupts   SIGINT at random moments of a training: to the bit as without; "first" is while the engine is imported
"""

from __future__ import annotations

import argparse
import itertools
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from torture_files import KINDS, check_clean, checkpoints, damage, hostile, kills
from torture_process import Silent, Wrong
from torture_steps import first, interrupts, layouts, loads, resumes

Attack = Callable[[Path, random.Random], Iterator[bool]]
TRIES = {
    "first": 100,
    "kills": 1000,
    "damage": 5000,
    "hostile": 200,
    "checkpoints": 2000,
    "loads": 2000,
    "layouts": 5000,
    "resumes": 1000,
    "interrupts": 1000,
}
COLUMNS = ("tried", "inside", "wrong", "silent", "seconds")
MOST_FAILURES = 10  # of one attack, which ends then


def attacks() -> dict[str, list[tuple[str, Attack]]]:
    """The attacks by name, each with what it is made on. "first" comes before anything has imported the engine."""
    files = {"kills": kills, "damage": damage, "hostile": hostile}
    found: dict[str, list[tuple[str, Attack]]] = {"first": [("", first)]}
    found |= {name: [(kind, partial(attack, kind)) for kind in KINDS] for name, attack in files.items()}
    found["checkpoints"] = [(how, partial(checkpoints, how)) for how in ("mixed", "fields")]
    return found | {
        "loads": [("", loads)],
        "layouts": [("", layouts)],
        "resumes": [("", resumes)],
        "interrupts": [("", interrupts)],
    }


def attempts(name: str, attack: Attack, folder: Path, tries: int, seed: int, begin: int) -> dict[str, float]:
    """Make an attack so many times; what it came to, by `COLUMNS`."""
    counts, rng, start = dict.fromkeys(COLUMNS, 0.0), random.Random(), time.monotonic()
    running = attack(folder, rng)
    for number in itertools.count(begin):
        if counts["tried"] >= tries or counts["wrong"] + counts["silent"] >= MOST_FAILURES:
            break
        rng.seed(f"{seed} {name} {number}")
        counts["tried"] += 1
        try:
            counts["inside"] += next(running)
        except (Wrong, Silent) as error:
            what = "wrong" if isinstance(error, Wrong) else "silent"
            counts[what] += 1
            print(f"{name}, --begin {number}: {what}: {error}", file=sys.stderr, flush=True)
            running = attack(folder, rng)
    counts["seconds"] = time.monotonic() - start
    return counts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=TRIES, default=list(TRIES), metavar="ATTACK", help=", ".join(TRIES))
    parser.add_argument("--scale", type=float, default=1.0, help="share of the attempts, at least one of each is made")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--begin", type=int, default=0, help="number of the first attempt of each")
    given = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(1)  # a forked process has one
    print("| attack | on | tried | inside | wrong | silent | seconds |\n|---|---|---|---|---|---|---|", flush=True)
    failures = 0.0
    with tempfile.TemporaryDirectory() as folder:
        for name, parts in attacks().items():
            for kind, attack in parts if name in given.only else ():
                tries = max(1, round(TRIES[name] * given.scale))
                counts = attempts(f"{name} {kind}".strip(), attack, Path(folder), tries, given.seed, given.begin)
                if name == "kills":
                    check_clean(kind, Path(folder))
                print(f"| {name} | {kind} | {' | '.join(f'{counts[column]:.0f}' for column in COLUMNS)} |", flush=True)
                failures += counts["wrong"] + counts["silent"]
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
