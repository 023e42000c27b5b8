"""Times tristep against torch.optim and other peers, in one process and in turns; writes JSON and draws it.

    python benchmarks/run.py                 on the CPU, all parts: 8 minutes on two cores
    python benchmarks/run.py --gpu           on the GPU
    python benchmarks/run.py --only rules    one part or several
    python benchmarks/run.py --only rules steps --rows 'adafactor|ResNet'
                                             of these parts the rows whose names match
    python benchmarks/run.py --only steps --dry
                                             a few small tensors, to see that it runs; its times mean nothing
    python benchmarks/run.py --out FILE      where the JSON goes; of a file that is there, only the parts that are timed
                                             change. A picture of the same name goes next to it

The parts:

    steps       a whole step of AdamW on models and on many small tensors, against torch's three ways
    new         the same with new gradient tensors at every step, as after zero_grad(), where the host is what costs
    changes     steps for which something has changed: the first, one after loading states, one with gradients that come and
                go; and steps of many optimizers
    compiled    the same against torch.compile of torch's step
    growth      what a step costs as tensors, or the elements of one, become more
    clip        clipping by the norm of all gradients, and AdamW
    folded      the same with a scaled loss and an average of the weights
    telemetry   what each step does to each parameter, recorded or not
    stored      weights and states in low precision
    rules       every rule on one large matrix, against its peers
    matrices    Muon on many matrices
    products    X X^T by half of its blocks, against torch's whole product (GPU)
    compression gradients as codes of a few bits
    graph       whole training steps as CUDA graphs (GPU)
    memory      what a step of AdamW allocates (GPU)
    first       the first step of a process
    host        what the host pays for a launch, with a pretended GPU (CPU)

A time is the median of at least 20 steps after a warm-up, fewer on the CPU where they are slow. Ratios are what counts:
machines differ and are noisy, but everything in one line was timed in turns, so that a drift moves all of it. "of copy" is
the time of a copy that moves as many bytes as the step must, over the step's: on a GPU 1 is the most there can be. On a CPU
it may be more, because a copy's target is read, too, before it is written.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import registry
import torch
import workloads
from environment import Kernels, commit, conditions, machine, program_of
from registry import Step, copy_step
from timing import SECONDS, in_turns, race, release, write

import tristep
from tristep import Trainer
from tristep.kernels import compress, rules

Table = dict[str, dict[str, Any]]
_ALL = re.compile("")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", action="store_true", help="measure on the GPU instead of the CPU")
    parser.add_argument("--only", choices=PARTS, nargs="+", help="measure these parts only")
    parser.add_argument("--rows", type=re.compile, help=f"a pattern for names; for {', '.join(_BY_ROWS)}")
    parser.add_argument("--dry", action="store_true", help="time small tensors for a moment")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    arguments = parser.parse_args()
    if arguments.rows and not set(arguments.only or PARTS) <= set(_BY_ROWS):
        parser.error(f"--rows: name parts that have rows with --only: {', '.join(_BY_ROWS)}")
    if arguments.dry:
        workloads.shrink()
        SECONDS.update(dict.fromkeys(SECONDS, 0.0))
    device = "cuda" if arguments.gpu else "cpu"
    if arguments.gpu and not torch.cuda.is_available():
        parser.error("--gpu: torch sees no GPU here")
    results: dict[str, Any] = {}
    if arguments.out and arguments.out.exists():
        results = json.loads(arguments.out.read_text(encoding="utf-8"))
    results["machine"] = machine(device)
    print(results["machine"], "\n", sep="")
    kernels = Kernels(device)
    for part in arguments.only or [part for part in PARTS if part not in _NOT_ON[device]]:
        begin = time.perf_counter()
        found = PARTS[part](device, arguments.rows) if arguments.rows else PARTS[part](device)
        # Of a machine and a day of its own, since parts can be timed alone.
        results[part] = {"machine": results["machine"], "seconds": round(time.perf_counter() - begin, 1), "found": found}
        if device == "cuda":
            # Of earlier parts, too: what one of them has compiled is not compiled again.
            results[part] |= {"commit": commit(), "conditions": conditions(device), "kernels": list(kernels.compiled)}
            _add_programs(found)
        print()
        if arguments.out:  # after each part, so that a run that is cut off leaves what it has seen
            write(arguments.out, results)
        release()
    if arguments.out:
        print(f"written to {arguments.out}")
    if arguments.out and not arguments.rows:
        try:
            from plot import draw
        except ImportError as error:
            print(f"not drawn: {error}")
        else:
            draw(results, arguments.out.with_suffix(".png"))


def _add_programs(found: Table) -> None:
    """Add to the rows of elementwise rules how many elements a program takes."""
    tables = (workloads.STEPS, workloads.TENSORS, workloads.ELEMENTS, workloads.TELEMETRY)
    sized = [workload for table in tables for workload in table["cuda"]] + [workloads.RULES["cuda"]]
    elements = {workload.name: workload.elements for workload in sized}
    for name, row in found.items():
        if isinstance(row, dict) and (known := elements.get(row.get("workload", name))):
            row |= program_of(known, packed=False)


def time_steps(device: str, rows: re.Pattern[str] = _ALL) -> Table:
    """A whole step of AdamW: of `Trainer` and `tristep.optim`, against `torch.optim.AdamW.step`."""
    print("AdamW, gradients kept in place")
    names = ["tristep", "tristep.optim", "torch fused", "torch foreach", "torch loop"]
    found = {}
    for workload in filter(lambda each: rows.search(each.name), workloads.STEPS[device]):
        params = workloads.parameters(workload, device)
        large = workload.elements > 2**29  # where a loop, which is like foreach then, would only take memory
        steps = registry.adamw_steps(params, names[:4] if large else names)
        found[workload.name] = race(workload.name, steps, device, copy=steps["tristep"].moved)
        release(params, steps)
    return found


def time_new(device: str, rows: re.Pattern[str] = _ALL) -> Table:
    """The same, each step with gradients that are other tensors than those of the step before."""
    print("AdamW, new gradients at every step")
    found = {}
    for workload in workloads.STEPS[device]:
        if rows.search(workload.name) if rows is not _ALL else workload.elements <= 10_000_000:
            params = workloads.parameters(workload, device)
            found[workload.name] = race(
                workload.name,
                registry.adamw_steps(params, ["tristep", "tristep.optim", "torch fused", "torch foreach"], new=True),
                device,
            )
    return found


def time_changes(device: str, rows: re.Pattern[str] = _ALL) -> Table:
    """Where something is to be done that a step as the last one does not do."""
    print("AdamW, where something has changed")
    makers: dict[str, Callable[[Any], Any]] = {
        "Trainer": lambda params: Trainer(params, "adamw"),
        "tristep.optim": lambda params: tristep.optim.AdamW(params, lr=1e-3),
        "torch fused": lambda params: torch.optim.AdamW(params, lr=1e-3, fused=True),
    }

    def step(optimizer: Any) -> None:
        if isinstance(optimizer, Trainer):
            optimizer.step(1, ignore_stale_grad=True)
        else:
            optimizer.step()

    def with_gradients(params: list[torch.nn.Parameter], which: Callable[[int], bool] = lambda i: True) -> None:
        for i, param in enumerate(params):
            param.grad = torch.ones_like(param) if which(i) else None

    def first(make: Callable[[Any], Any], loads: bool) -> Step:
        params = workloads.parameters(workloads.CHANGED["first"], device)
        with_gradients(params)
        made = [make(params)]
        step(made[0])
        saved = made[0].state_dict()

        def before() -> None:
            with_gradients(params)
            made[:] = [made[0] if loads else make(params)]
            if loads:
                made[0].load_state_dict(saved)
            gc.collect()  # of earlier optimizers, which would be freed in this or that one's step

        return Step(lambda: step(made[0]), before)

    def by_turns(make: Callable[[Any], Any]) -> Step:
        params, turns = workloads.parameters(workloads.CHANGED["by turns"], device), itertools.count()
        made = make(params)

        def before() -> None:
            turn = next(turns)
            with_gradients(params, lambda i: (i + turn) % 2 == 0)

        return Step(lambda: step(made), before)

    def apart(make: Callable[[Any], Any]) -> Step:
        params = workloads.parameters(workloads.CHANGED["apart"], device)
        made = [make([param]) for param in params]
        return Step(lambda: [step(each) for each in made], partial(with_gradients, params))

    cases: dict[str, tuple[str, Callable[[Any], Step]]] = {
        "first step": ("first", partial(first, loads=False)),
        "after loading": ("first", partial(first, loads=True)),
        "gradients by turns": ("by turns", by_turns),
        "an optimizer each": ("apart", apart),
    }
    found = {}
    for what in filter(rows.search, cases):
        size, case = cases[what]
        steps = {name: case(make) for name, make in makers.items()}
        found[what] = race(f"{what}, {workloads.CHANGED[size].name}", steps, device)
    return found


def time_compiled(device: str) -> Table:
    """AdamW against torch's own compiler."""
    print("AdamW, against torch.compile(optimizer.step)")
    found = {}
    for workload in {"cpu": workloads.STEPS["cpu"][:1], "cuda": workloads.STEPS["cuda"][4:5]}[device]:
        params = workloads.parameters(workload, device)
        steps = registry.adamw_steps(params, ["tristep", "torch fused", "torch compiled"])
        begin = time.perf_counter()
        steps["torch compiled"].run()
        took = time.perf_counter() - begin
        print(f"    torch's first compiled step took {took:.1f} s")
        found[workload.name] = race(workload.name, steps, device) | {"compiled in s": took}
    return found


def time_growth(device: str) -> Table:
    """Many tensors, large tensors."""
    print("AdamW, as tensors and elements become more")
    found = {}
    for workload in (*workloads.TENSORS[device], *workloads.ELEMENTS[device]):
        params = workloads.parameters(workload, device)
        steps = registry.adamw_steps(params, ["tristep", "torch fused", "torch foreach"])
        found[workload.name] = race(workload.name, steps, device, SECONDS[device] / 2, copy=steps["tristep"].moved)
        found[workload.name] |= {"tensors": len(workload.shapes), "elements": workload.elements}
        release(params, steps)
    return found


def time_clip(device: str) -> Table:
    """A step of AdamW on gradients clipped by their norm together, against torch's `clip_grad_norm_` and fused AdamW."""
    print("clipping by the norm and AdamW, gradients kept in place")
    found = {}
    for workload in workloads.STEPS[device]:
        params = workloads.parameters(workload, device)
        steps = registry.clip_steps(params)
        result = race(workload.name, steps, device, 2 * SECONDS[device], copy=steps["tristep"].moved)
        result["clip alone, torch / tristep"] = result["us"]["torch clip alone"] / result["us"]["clip alone"]
        found[workload.name] = result
        release(params, steps)
    return found


def time_telemetry(device: str) -> Table:
    """A step of AdamW without telemetry and with it."""
    print("AdamW and telemetry, gradients kept in place")
    found = {}
    for workload in workloads.TELEMETRY[device]:
        params = workloads.parameters(workload, device)
        found[workload.name] = race(workload.name, registry.telemetry_steps(params), device, 2 * SECONDS[device])
    return found


def time_folded(device: str) -> Table:
    """All that comes after the backward pass of a mixed-precision training, in one pass and as torch's functions."""
    print("unscaling, looking for overflows, clipping, AdamW and an average of the weights")
    found = {}
    for workload in workloads.STEPS[device]:
        params = workloads.parameters(workload, device)
        steps = registry.folded_steps(params, device)
        found[workload.name] = race(workload.name, steps, device, copy=steps["tristep"].moved)
        release(params, steps)
    return found


def time_graph(device: str) -> Table:
    """A training step of a small network as a CUDA graph."""
    print("training an MLP of 20 layers of 64, forward and backward too")
    return {"MLP": race("MLP", registry.training_steps(device), device)}


def time_stored(device: str) -> Table:
    """AdamW, how weights and states are stored."""
    workload = workloads.STORED[device]
    print(f"AdamW on {workload.name}, weights and states in low precision")
    steps = dict(registry.stored_steps(workload, device))
    copy, share = copy_step(28 * workload.elements, device, most=2e9)
    times, turns = in_turns(steps | {"copy": copy}, device, SECONDS[device], least=10 if device == "cpu" else 20)
    found = {}
    for name, step in steps.items():
        assert step.moved is not None
        of_copy = times["copy"] / share * (step.moved / (28 * workload.elements)) / times[name]
        per_element = step.moved / workload.elements
        print(f"{name:34}{times[name]:12.1f} µs  {per_element:6.2f} bytes an element  {of_copy:5.2f} of copy")
        found[name] = {"us": times[name], "bytes an element": per_element, "of copy": of_copy, "turns": turns}
        if device == "cuda" and name in registry.STORED:
            packed = registry.STORED[name][1].get("state_dtype") in ("8bit", "4bit")
            found[name] |= program_of(workload.elements, packed)
    return found


def time_rules(device: str, rows: re.Pattern[str] = _ALL) -> Table:
    """Every rule on one large tensor: its own bytes over its time, as a share of torch's fused AdamW and of a copy.

    And its peers' times over its own.
    """
    workload = workloads.RULES[device]
    print(
        f"every rule, {workload.name}: bytes per second, relative to torch's fused AdamW and a copy; peers' times over its"
    )
    common = registry.adamw_steps(workloads.parameters(workload, device), ["torch fused"])
    common["copy"], _ = copy_step(8 * workload.elements, device)
    found = {}
    for name in filter(rows.search, rules.__all__):
        own = registry.rule_workload(name, device)
        peers = registry.peer_steps(name, own, device)
        steps = {"tristep": registry.rule_step(name, own, device)} | peers
        times, turns = in_turns(common | steps, device, SECONDS[device] * 0.7, least=7 if device == "cpu" else 20)
        moved: Any = steps["tristep"].moved
        rate = moved / times["tristep"]
        to_fused = rate / (28 * workload.elements / times["torch fused"])
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
            "of copy": to_copy,
            "peers / tristep": ratios,
        }
        release(peers, steps)
    return found


def time_matrices(device: str, rows: re.Pattern[str] = _ALL) -> Table:
    """A whole step of Muon on many matrices of one shape: `Trainer.step` against `torch.optim.Muon.step`."""
    print("Muon, gradients kept in place")
    return {
        workload.name: race(workload.name, registry.muon_steps(workload, device), device, least=5)
        for workload in workloads.MATRICES[device]
        if rows.search(workload.name)
    }


def time_products(device: str, rows: re.Pattern[str] = _ALL) -> Table:
    """X X^T in float16 and bfloat16: half of its blocks computed, and torch's whole product."""
    from tristep.kernels.backends.triton.symmetric import symmetric_product

    print("X X^T")
    found = {}
    for workload in workloads.STACKS[device]:
        for dtype in (torch.float16, torch.bfloat16):
            name = f"{workload.name}, {str(dtype).removeprefix('torch.')}"
            if rows.search(name):
                x = torch.randn(len(workload.shapes), *workload.shapes[0], device=device).to(dtype)
                steps = {
                    "tristep": Step(partial(symmetric_product, None, x, x.mT)),
                    "torch": Step(partial(torch.bmm, x, x.mT)),
                }
                found[name] = race(name, steps, device)
    return found


def time_compression(device: str) -> Table:
    """Quantising, error feedback and packing of one bucket in one pass, against torch's operations."""
    n = workloads.BUCKET[device]
    print(f"{n:,} gradients as codes, with error feedback, packed")
    found = {}
    for name in compress.CODES:
        steps = registry.coding_steps(name, n, device)
        found[name] = race(name, steps, device, SECONDS[device], 7 if device == "cpu" else 20, steps["tristep"].moved)
        release(steps)
    return found


def measure_memory(device: str) -> Table:
    """How much more memory a step of AdamW needs while it runs than before and after it."""
    print("most memory that a step of AdamW needs in addition to what stays, MB")
    found = {}
    for workload in workloads.STEPS[device]:
        if workload.elements < 2**29:
            params = workloads.parameters(workload, device)
            steps = registry.adamw_steps(params, ["tristep", "torch fused", "torch foreach"])
            extra = {}
            for name, step in steps.items():
                for _ in range(3):
                    assert step.before is not None
                    step.before()
                    torch.cuda.synchronize()
                    torch.cuda.reset_peak_memory_stats()
                    before = torch.cuda.memory_allocated()
                    step.run()
                    torch.cuda.synchronize()
                extra[name] = (torch.cuda.max_memory_allocated() - before) / 1e6
            print(f"{workload.name:28}" + ", ".join(f"{name} {value:.2f}" for name, value in extra.items()))
            found[workload.name] = extra
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
    return found


PARTS: dict[str, Callable[..., Any]] = {
    "steps": time_steps,
    "new": time_new,
    "changes": time_changes,
    "clip": time_clip,
    "telemetry": time_telemetry,
    "folded": time_folded,
    "stored": time_stored,
    "growth": time_growth,
    "matrices": time_matrices,
    "products": time_products,
    "compression": time_compression,
    "graph": time_graph,
    "memory": measure_memory,
    "first": time_first,
    "host": time_host,
    "rules": time_rules,
    "compiled": time_compiled,
}
_BY_ROWS = ("steps", "new", "changes", "rules", "matrices", "products")  # whose functions take a pattern
_NOT_ON = {"cpu": ("memory", "graph", "products"), "cuda": ("host",)}


if __name__ == "__main__":
    main()
