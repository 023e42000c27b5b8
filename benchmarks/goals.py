"""What tristep is to reach, and what a run found of it: numbers of `run.py`'s JSON, each next to its goal.

python benchmarks/goals.py benchmarks/results/cpu.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["Goal", "judged"]

Parts = Mapping[str, Any]  # by name, what each part found


class Goal(NamedTuple):
    """A number that is to be at least, or at most, so large; None where the run did not measure it."""

    text: str
    find: Callable[[Parts], float | None]
    least: float | None = None
    most: float | None = None


def _step(workload: str, what: str) -> Callable[[Parts], float | None]:
    return lambda parts: parts["steps"][workload][what]


def _stored(name: str) -> Callable[[Parts], float | None]:
    return lambda parts: parts["stored"][name]["of copy"]


def _best_peer(parts: Parts) -> float | None:
    """The fastest 8-bit peer's time over tristep's."""
    peers = [row["us"] for name, row in parts["stored"].items() if name.startswith(("torchao", "bitsandbytes"))]
    return min(peers) / parts["stored"]["bf16, states 8-bit, stochastic"]["us"] if peers else None


def _clipped(*workloads: str) -> Callable[[Parts], float | None]:
    """tristep's time of clipping and stepping over torch's, the largest of these workloads."""
    return lambda parts: max(1 / parts["clip"][workload]["torch fused / tristep"] for workload in workloads)


def _worst_rule(parts: Parts) -> float | None:
    return min(row["of copy"] for name, row in parts["rules"].items() if name != "muon")


def _worst_against_foreach(parts: Parts) -> float | None:
    pairs = ((name, row["peers / tristep"].get("torch foreach")) for name, row in parts["rules"].items() if name != "muon")
    return min(ratio for _, ratio in pairs if ratio is not None)


def _worst_coding(what: str) -> Callable[[Parts], float | None]:
    return lambda parts: min(parts["compression"][name][what] for name in ("2bit", "1bit"))


_TINY, _SMALL, _RESNET, _GPT2 = "148 x 8", "1,000 x 1,024", "ResNet-50, 161 tensors", "GPT-2 124M, 148 tensors"
_FUSED = "torch fused / tristep"
GOALS = {
    "cuda": (
        Goal("AdamW, 1e9 elements, of copy", _step("1 x 1e9", "of copy"), least=0.95),
        Goal("AdamW, Llama 3 8B / 8, of copy", _step("Llama 3 8B / 8, 291 tensors", "of copy"), least=0.95),
        Goal("AdamW, GPT-2, of copy", _step(_GPT2, "of copy"), least=0.90),
        Goal("AdamW, ResNet-50, of copy", _step(_RESNET, "of copy"), least=0.75),
        Goal("AdamW, ResNet-50, torch fused / tristep", _step(_RESNET, _FUSED), least=1.5),
        Goal("AdamW, 1,000 x 1,024, torch fused / tristep", _step(_SMALL, _FUSED), least=10),
        Goal("AdamW, all bfloat16, of copy", _stored("bf16, states bf16"), least=0.92),
        Goal("AdamW, bfloat16 and 8-bit, of copy", _stored("bf16, states 8-bit, stochastic"), least=0.85),
        Goal("AdamW, bfloat16 and 8-bit, best peer / tristep", _best_peer, least=1.5),
        Goal(
            "stochastic rounding, on / off",
            lambda parts: parts["stored"]["the same, stochastic"]["us"] / parts["stored"]["bf16, states bf16"]["us"],
            most=1.03,
        ),
        Goal("clip and AdamW, 1e9 elements, of torch's time", _clipped("1 x 1e9"), most=0.8),
        Goal("clip and AdamW, ResNet-50, of torch's time", _clipped(_RESNET), most=0.6),
        Goal(
            "unscale, clip, AdamW and average, of torch's time",
            lambda parts: 1 / parts["folded"]["1 x 1e9"]["torch / tristep"],
            most=0.7,
        ),
        Goal(
            "telemetry on / off",
            lambda parts: max(row["with telemetry / tristep"] for row in parts["telemetry"].values()),
            most=1.03,
        ),
        Goal("the slowest rule, of copy", _worst_rule, least=0.9),
        Goal("the slowest rule compared with foreach, foreach / tristep", _worst_against_foreach, least=2),
        Goal(
            "most additional memory, MB", lambda parts: max(row["tristep"] for row in parts["memory"].values()), most=1.0
        ),
        Goal("first step, cold, s", lambda parts: parts["first"]["cold"], most=2.0),
        Goal("first step, compiled before, s", lambda parts: parts["first"]["cached"], most=0.05),
        Goal("gradients as codes of 2 bits or 1, of copy", _worst_coding("of copy"), least=0.85),
        Goal("gradients as codes of 2 bits or 1, torch / tristep", _worst_coding("torch / tristep"), least=5),
    ),
    "cpu": (
        *(
            Goal(f"AdamW, {name}, torch fused / tristep", _step(name, _FUSED), least=1.0)
            for name in ("6 tensors of an MLP", _TINY, _SMALL, "10,000 x 64", "100 x 100,000", "1 x 16.8 M", _RESNET)
        ),
        Goal(
            "clip and AdamW, of torch's time, four workloads",
            _clipped("6 tensors of an MLP", _TINY, "100 x 100,000", "1 x 16.8 M"),
            most=0.8,
        ),
        Goal("the slowest rule compared with foreach, foreach / tristep", _worst_against_foreach, least=1.0),
        Goal("launches of a step, 148 tensors", lambda parts: parts["host"]["launches_per_step"], most=1),
        Goal("host, gradients kept, µs", lambda parts: parts["host"]["host_us_per_step_stable_gradients"], most=10),
        Goal("host, new gradients, µs", lambda parts: parts["host"]["host_us_new_gradients"], most=40),
        Goal("compiling a kernel for sm_90, s", lambda parts: parts["host"]["s_to_compile_a_kernel"], most=0.25),
    ),
}  # fmt: skip


def judged(results: Mapping[str, Any], device: str) -> list[tuple[str, float, str, bool]]:
    """Of each goal of which there is a figure: its text, the figure, the goal as text, and whether it is reached."""
    parts = {name: part["found"] for name, part in results.items() if isinstance(part, Mapping) and "found" in part}
    found = []
    for goal in GOALS[device]:
        try:
            value = goal.find(parts)
        except KeyError:  # not measured in this run
            continue
        if value is not None:
            text = f"at least {goal.least:g}" if goal.least is not None else f"at most {goal.most:g}"
            reached = value >= goal.least if goal.least is not None else value <= goal.most  # type: ignore[operator]
            found.append((goal.text, value, text, reached))
    return found


def show(results: Mapping[str, Any], device: str) -> None:
    """Print what was judged."""
    for text, value, goal, reached in judged(results, device):
        print(f"{text:58}{value:10.3g}   {goal:16}{'reached' if reached else 'NOT reached'}")


if __name__ == "__main__":
    for name in sys.argv[1:]:
        file = Path(name)
        show(json.loads(file.read_text(encoding="utf-8")), "cuda" if file.stem.startswith("gpu") else "cpu")
