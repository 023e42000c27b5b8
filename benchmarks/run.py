"""Times tristep beside torch.optim, in one process and in turns, and writes what it saw as JSON.

    python benchmarks/run.py                 on the CPU: AdamW on four workloads, also with gradients clipped, every rule on
                                             16.8 M elements beside its peers, Muon on many matrices, the first step, and
                                             the host's cost of a launch through a pretended GPU
    python benchmarks/run.py --gpu           on the GPU: AdamW on four workloads, every rule on 2^28 elements, Muon on
                                             many matrices
    python benchmarks/run.py --only rules    one part: steps, clip, rules, matrices, first or host
    python benchmarks/run.py --out FILE      where the JSON goes

A time is the median of many steps after a warm-up. Ratios are what counts: machines differ and are noisy, but everything
in one table was timed in turns, so that a drift moves all of it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import registry
import torch

import tristep
from tristep.kernels import rules

Step = tuple[Callable[[], object], Callable[[], object]]  # what comes before, untimed, and what is timed
PARTS = ("steps", "clip", "rules", "matrices", "first", "host")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", action="store_true", help="measure on the GPU instead of the CPU")
    parser.add_argument("--only", choices=PARTS, help="measure one part only")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    arguments = parser.parse_args()
    device = "cuda" if arguments.gpu else "cpu"
    if arguments.gpu and not torch.cuda.is_available():
        parser.error("--gpu: torch sees no GPU here")
    parts = [arguments.only] if arguments.only else [part for part in PARTS if not (arguments.gpu and part == "host")]

    timed = {"steps": time_steps, "clip": time_clip, "rules": time_rules, "matrices": time_matrices}
    timed |= {"first": time_first, "host": time_host}
    results: dict[str, Any] = {"machine": machine(device)}
    print(results["machine"], "\n", sep="")
    for part in parts:
        results[part] = timed[part](device)
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
        print(f"written to {arguments.out}")


def machine(device: str) -> str:
    """One line about the machine and the versions."""
    versions = f"Python {platform.python_version()}, torch {torch.__version__}, tristep {tristep.__version__}"
    if device == "cuda":
        import triton

        return f"{torch.cuda.get_device_name()}, {versions}, triton {triton.__version__}"
    import numba

    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.split(":")[1].strip() for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        name = names[0] if names else name
    return f"{name}, {torch.get_num_threads()} threads, {platform.system()}, {versions}, numba {numba.__version__}"


def time_steps(device: str) -> dict[str, Any]:
    """A whole step of AdamW: `Trainer.step` beside `torch.optim.AdamW.step`."""
    found = {}
    for zero in (False, True):
        print(f"AdamW, µs per step, gradients {'new at every step, as after zero_grad()' if zero else 'kept in place'}")
        names: list[str] = []
        for workload in registry.CPU_WORKLOADS if device == "cpu" else registry.GPU_WORKLOADS:
            if zero and workload.elements > 1_000_000:
                continue
            steps = registry.adamw_steps(workload, device, zero)
            times, _ = in_turns(steps, device, seconds=3.0)
            if not names:
                names = list(steps)
                print(f"{'':26}" + "".join(f"{name:>16}" for name in names) + f"{'fused / tristep':>18}")
            ratio = times["torch fused"] / times["tristep"]
            print(f"{workload.name:26}" + "".join(f"{times[name]:16.1f}" for name in names) + f"{ratio:18.2f}")
            if all(f"{name} (first of ten)" in times for name in ("tristep", "torch fused")):
                cold = [times.get(f"{name} (first of ten)", times[name]) for name in names]
                print(f"{'    first of ten':26}" + "".join(f"{t:16.1f}" for t in cold) + f"{cold[1] / cold[0]:18.2f}")
            found[workload.name + (", new gradients" if zero else "")] = {"us": times, "torch fused / tristep": ratio}
        print()
    return found


def time_clip(device: str) -> dict[str, Any]:
    """A step of AdamW on gradients clipped by their norm together, beside torch's `clip_grad_norm_` and fused AdamW."""
    found = {}
    print("clipping by the norm and AdamW, µs per step, gradients kept in place")
    for workload in registry.CPU_WORKLOADS if device == "cpu" else registry.GPU_WORKLOADS:
        times, _ = in_turns(registry.clip_steps(workload, device), device, seconds=6.0)
        ratio, alone = times["tristep"] / times["torch fused"], times["clip alone"] / times["torch clip alone"]
        shown = ", ".join(f"{name} {value:.1f}" for name, value in times.items() if "first" not in name)
        print(f"{workload.name:26}{shown}: tristep / torch {ratio:.2f}, of clipping alone {alone:.2f}", flush=True)
        found[workload.name] = {"us": times, "tristep / torch": ratio, "clip alone, tristep / torch": alone}
    print()
    return found


def time_rules(device: str) -> dict[str, Any]:
    """Every rule on one large tensor: its own bytes over its time, as a share of torch's fused AdamW and of a copy.

    And its peers' times over its own.
    """
    workload = registry.RULE_WORKLOAD[device]
    print(
        f"Every rule, {workload.name}: bytes per second, relative to torch's fused AdamW and a copy; peers' times over its"
    )
    source = torch.randn(workload.elements, device=device)
    target = torch.empty_like(source)
    common: dict[str, Step] = {
        "torch fused AdamW": registry.adamw_steps(workload, device, only="torch fused")["torch fused"],
        "copy": (registry.nothing, lambda: target.copy_(source)),
    }
    found = {}
    for name in rules.__all__:
        own = registry.rule_workload(name, device)
        step, moved = registry.rule_step(name, own, device)
        peers = registry.peer_steps(name, own, device)
        steps = {"tristep": (registry.nothing, step)} | {peer: (registry.nothing, each) for peer, each in peers.items()}
        times, turns = in_turns(common | steps, device, seconds=1.5, least=7)
        rate = moved / times["tristep"]
        to_fused = rate / (28 * workload.elements / times["torch fused AdamW"])
        to_copy = rate / (8 * workload.elements / times["copy"])
        ratios = {peer: times[peer] / times["tristep"] for peer in peers}
        print(
            f"{name:20}{times['tristep']:12.1f} µs{rate / 1e3:8.1f} GB/s{to_fused:7.2f} of fused AdamW's{to_copy:6.2f} of a "
            f"copy's  {turns:4} turns  " + ", ".join(f"{peer} {ratio:.2f}" for peer, ratio in ratios.items()),
            flush=True,
        )
        found[name] = {
            "workload": own.name,
            "us": times["tristep"],
            "bytes": moved,
            "turns": turns,
            "rate / fused AdamW": to_fused,
            "rate / copy": to_copy,
            "peers / tristep": ratios,
        }
    print()
    return found


def time_matrices(device: str) -> dict[str, Any]:
    """A whole step of Muon on many matrices of one shape: `Trainer.step` beside `torch.optim.Muon.step`."""
    print("Muon, µs per step, gradients kept in place")
    found = {}
    for workload in registry.MATRIX_WORKLOADS:
        times, turns = in_turns(registry.muon_steps(workload, device), device, seconds=3.0, least=5)
        ratio = times["torch"] / times["tristep"]
        print(
            f"{workload.name:26}{times['tristep']:16.1f}{times['torch']:16.1f}   torch / tristep {ratio:.2f}  {turns} turns"
        )
        found[workload.name] = {"us": times, "torch / tristep": ratio, "turns": turns}
    print()
    return found


def time_first(device: str) -> dict[str, float]:
    """The first step of a new process, without and with compiled code in the cache folder."""
    code = (
        "import time, torch, tristep\n"
        f"net = torch.nn.Linear(16, 4, device={device!r})\n"
        f"net(torch.ones(1, 16, device={device!r})).sum().backward()\n"
        "begin = time.perf_counter()\n"
        "tristep.Trainer(net, 'adam').step(1)\n"
        "print(time.perf_counter() - begin)\n"
    )
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"NUMBA_CACHE_DIR": folder, "TRITON_CACHE_DIR": folder}
        for name in ("cold", "cached"):
            run = subprocess.run([sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True)
            found[name] = float(run.stdout)
            print(f"first step of a process, {name:6}: {found[name]:.2f} s")
    print()
    return found


def time_host(device: str) -> dict[str, Any]:
    """What a step of the triton engine costs the host, and how often it launches: no GPU works, only the host is timed."""
    script = Path(__file__).with_name("fake_driver.py")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run([sys.executable, str(script)], env=environment, check=True, capture_output=True, text=True)
    found = json.loads(run.stdout)
    print("triton engine through a pretended driver, Adam, 148 tensors:")
    for name, value in found.items():
        print(f"    {name:40}{value}")
    print()
    return found


def in_turns(steps: Mapping[str, Step], device: str, seconds: float, least: int = 20) -> tuple[dict[str, float], int]:
    """Median µs of each, called in turn for about this long, at least so many times; and how many times it was.

    A step that is shorter than a millisecond is called ten times in a row, as in the loop that trains a small model; the
    first of these, which finds the processor's caches full of the others' code and data, stands under "(first of ten)".
    """
    times: dict[str, list[float]] = {name: [] for name in steps}
    firsts: dict[str, list[float]] = {}
    for name, (before, step) in steps.items():
        end = time.perf_counter() + seconds / 4
        for k in range(5):
            if k > 1 and time.perf_counter() > end:
                break
            before()
            took = once(step, device)
        if took < 1000:
            firsts[f"{name} (first of ten)"] = []
    turns, end = 0, time.perf_counter() + seconds
    while time.perf_counter() < end or turns < least:
        turns += 1
        for name, (before, step) in steps.items():
            first = firsts.get(f"{name} (first of ten)")
            if first is not None:
                before()
                first.append(once(step, device))
            for _ in range(1 if first is None else 9):
                before()
                times[name].append(once(step, device))
    return {name: statistics.median(values) for name, values in (times | firsts).items()}, turns


def once(step: Callable[[], object], device: str) -> float:
    if device == "cpu":
        begin = time.perf_counter()
        step()
        return (time.perf_counter() - begin) * 1e6
    # Waiting for the device on both sides, so that the host's share counts too where it is the larger one.
    torch.cuda.synchronize()
    begin = time.perf_counter()
    step()
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) * 1e6


if __name__ == "__main__":
    main()
