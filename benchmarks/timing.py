"""Steps timed in turns, and the file that keeps the results."""

from __future__ import annotations

import gc
import json
import os
import statistics
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from registry import Step, copy_step

SECONDS = {"cpu": 2.0, "cuda": 0.4}  # for which steps are called in turns
# µs. Hosts of GPUs differ by more than twice, and a step must not be called cold on the slow ones alone.
SHORT = {"cpu": 1000, "cuda": 5000}


def write(path: Path, results: Mapping[str, Any]) -> None:
    """Write the file whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    os.replace(part, path)


def race(
    name: str,
    steps: Mapping[str, Step],
    device: str,
    seconds: float | None = None,
    least: int = 20,
    copy: float | None = None,
) -> dict[str, Any]:
    """Time these in turns, and a copy of so many bytes with them; print a line, the first one's time against each."""
    share = 1.0
    if copy is not None:
        copying, share = copy_step(copy, device)
        steps = {**steps, "copy": copying}
    times, turns = in_turns(steps, device, seconds or SECONDS[device], least)
    first, *others = (other for other in steps if other != "copy")
    ratios = {f"{other} / {first}": times[other] / times[first] for other in others}
    found: dict[str, Any] = {"us": times, "turns": turns, **ratios}
    line = f"{name:28}{first} {times[first]:10.1f} µs"
    line += "".join(f", {other} x {times[other] / times[first]:.2f}" for other in others)
    cold = {other: times.get(f"{other} (first of ten)") for other in (first, *others)}
    if None not in cold.values():
        line += f"; first of ten {cold[first]:.1f} µs"
        line += "".join(f", x {cold[other] / cold[first]:.2f}" for other in others)  # type: ignore[operator]  # not None
    if (host := times.get(f"{first} (host)")) is not None:
        line += f"; host {host:.1f} µs"
    if copy is not None:
        found["of copy"] = times["copy"] / share / times[first]
        line += f"; {found['of copy']:.2f} of copy"
    print(line, flush=True)
    return found


def in_turns(steps: Mapping[str, Step], device: str, seconds: float, least: int = 20) -> tuple[dict[str, float], int]:
    """Median µs of each, called in turn for about this long, at least so many times; and how many times it was.

    A step that is shorter than `SHORT` is called ten times in a row, as in the loop that trains a small model; the
    first of these, which finds the processor's caches full of the others' code and data, stands under "(first of ten)". On
    a GPU "(host)" is the time until the call returned, before the wait for the device.
    """
    times: dict[str, list[float]] = {name: [] for name in steps}
    firsts: dict[str, list[float]] = {}
    hosts: dict[str, list[float]] = {} if device == "cpu" else {f"{name} (host)": [] for name in steps}
    for name, step in steps.items():
        end = time.perf_counter() + seconds / 4
        took = 0.0
        for k in range(5):
            if k > 1 and took > 100_000 and time.perf_counter() > end:
                break
            took, _ = once(step, device)
        if took < SHORT[device]:
            firsts[f"{name} (first of ten)"] = []
    turns, end = 0, time.perf_counter() + seconds
    while time.perf_counter() < end or turns < least:
        turns += 1
        for name, step in steps.items():
            first = firsts.get(f"{name} (first of ten)")
            if first is not None:
                first.append(once(step, device)[0])
            for _ in range(1 if first is None else 9):
                took, host = once(step, device)
                times[name].append(took)
                if hosts:
                    hosts[f"{name} (host)"].append(host)
    return {name: statistics.median(values) for name, values in (times | firsts | hosts).items()}, turns


def once(step: Step, device: str) -> tuple[float, float]:
    """µs of one step with the wait for the device, so that the larger share counts, and µs until the call returned."""
    if step.before is not None:
        step.before()
    if device != "cpu":
        torch.cuda.synchronize()
    begin = time.perf_counter()
    step.run()
    returned = time.perf_counter()
    if device != "cpu":
        torch.cuda.synchronize()
    return (time.perf_counter() - begin) * 1e6, (returned - begin) * 1e6


def release(*containers: Iterable[Any]) -> None:
    """Let go what these hold, and the memory with it."""
    for container in containers:
        container.clear()  # type: ignore[attr-defined]  # lists and dictionaries
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
