"""Trains a small language model by AdamW, Muon, Dion2 and NorDion2, at equal steps and at equal time.

    python benchmarks/muon_quality.py                          all of it
    python benchmarks/muon_quality.py --steps 120 --seeds 2    shorter and fewer trainings
    python benchmarks/muon_quality.py --optimizer Muon         this one and AdamW; may be repeated
    python benchmarks/muon_quality.py --draw                   draw the picture of the JSON file again
    python benchmarks/muon_quality.py --out FILE               where the JSON goes; the picture gets its name

The model is the transformer of `quality.py` on the reference manual of Python. The hidden matrices get the optimizer,
with weight decay and a cosine schedule; embeddings, scores and vectors get AdamW in all trainings. The rate of the hidden
matrices is the better of two on a start that is not among the others; halves of these were worse in an earlier run.

"Equal steps": every training takes as many steps. "Equal time": every training takes as many steps as AdamW's time allows;
its schedule ends there. The times are medians, measured by turns in one process with one thread. The loss is that of text
that was not trained on, the mean over the seeds; after it stands its standard error.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import time
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from environment import machine
from quality import text
from timing import write
from torch import nn
from torch.nn.functional import cross_entropy

from tristep import Trainer
from tristep.trainer.lr_scheduler import CosineScheduler
from tristep.viz.render.matplotlib.figure import Figure, quieten
from tristep.viz.style import INK, QUIET, line_style

RESULTS = Path(__file__).parent / "results" / "muon_quality_cpu.json"
STEPS, SEEDS, EVERY, TURNS = 250, 3, 25, 40
RATES = {"adamw": (0.006, 0.012)}
ORTHOGONAL = (0.04, 0.08)
OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "AdamW": ("adamw", {"beta2": 0.95}),
    "Muon": ("muon", {}),
    "Dion2, 1/2": ("dion2", {"fraction": 0.5}),
    "Dion2, 1/4": ("dion2", {"fraction": 0.25}),
    "NorMuon": ("normuon", {}),
    "NorDion2, 1/4": ("nordion2", {"fraction": 0.25}),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS, help="JSON file to write")
    parser.add_argument("--steps", type=int, default=STEPS, help="steps of a training")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="trainings of each kind, >= 2")
    parser.add_argument("--optimizer", choices=tuple(OPTIMIZERS), action="append", help="this one and AdamW only")
    parser.add_argument("--draw", action="store_true", help="only draw the picture again")
    arguments = parser.parse_args()
    if not arguments.draw:
        names = [name for name in OPTIMIZERS if name in ("AdamW", *(arguments.optimizer or OPTIMIZERS))]
        write(arguments.out, measured(names, arguments.steps, arguments.seeds))
    draw(json.loads(arguments.out.read_text(encoding="utf-8")), arguments.out.with_suffix(".png"))


def measured(names: list[str], n_steps: int, seeds: int) -> dict[str, Any]:
    """Train with these optimizers, print the table, and return what goes into the file."""
    torch.set_num_threads(1)
    start, found = time.perf_counter(), dict[str, Any]()
    results: dict[str, Any] = {"machine": machine("cpu"), "steps": n_steps, "seeds": seeds, "found": found}
    print(results["machine"])
    times = step_times(names)
    with ProcessPoolExecutor(os.cpu_count(), get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        tried = [(name, rate, n_steps, -1) for name in names for rate in rates(name)]
        losses = dict(zip(tried, pool.map(train, *zip(*tried, strict=True)), strict=True))
        best = {name: min(rates(name), key=lambda rate: losses[name, rate, n_steps, -1][-1]) for name in names}
        steps = {name: max(EVERY, round(n_steps * times["AdamW"]["whole"] / times[name]["whole"])) for name in names}
        jobs = [(name, best[name], n, seed) for name in names for n in {n_steps, steps[name]} for seed in range(seeds)]
        curves = dict(zip(jobs, pool.map(train, *zip(*jobs, strict=True)), strict=True))
    print(f"{'':<16}{'rate':>7}{'ms, step':>10}{'of it own':>10}{'equal steps':>20}{'equal time':>20}{'steps':>7}")
    for name in names:
        row = {"rate": best[name], "ms": times[name], "rates": {r: losses[name, r, n_steps, -1][-1] for r in rates(name)}}
        for what, n in (("equal steps", n_steps), ("equal time", steps[name])):
            each = [curves[name, best[name], n, seed] for seed in range(seeds)]
            row[what] = {
                "steps": n,
                "losses": [curve[-1] for curve in each],
                "curve": list(map(statistics.fmean, zip(*each, strict=True))),
            }
        found[name] = row
        texts = [with_error(row[what]["losses"]) for what in ("equal steps", "equal time")]
        ms = times[name]
        print(f"{name:<16}{best[name]:>7}{ms['whole']:>10.1f}{ms['own']:>10.1f}{texts[0]:>20}{texts[1]:>20}{steps[name]:>7}")
    results["seconds"] = round(time.perf_counter() - start)
    print(f"{results['seconds']} s")
    return results


def rates(name: str) -> tuple[float, ...]:
    return RATES.get(OPTIMIZERS[name][0], ORTHOGONAL)


def with_error(losses: list[float]) -> str:
    return f"{statistics.fmean(losses):.4f} +- {statistics.stdev(losses) / math.sqrt(len(losses)):.4f}"


def trainer_of(net: nn.Module, name: str, rate: float, steps: int) -> Trainer:
    """A Trainer whose hidden matrices have this optimizer at this rate."""
    kind, arguments = OPTIMIZERS[name]
    schedule = CosineScheduler(max_update=steps, final_lr=0.0, warmup_steps=steps // 20)
    rest = {"learning_rate": 0.003, "beta2": 0.95}
    entries = [("characters*|places*|scores*|ndim<2", "adamw", rest), ("*", kind, {"learning_rate": rate, **arguments})]
    return Trainer(net, entries, {"wd": 0.01, "lr_scheduler": schedule})


def train(name: str, rate: float, steps: int, seed: int) -> list[float]:
    """The loss of text that was not trained on, at every `EVERY` steps and at the end."""
    torch.manual_seed(seed)
    task = text(seed)
    net = task.network()
    trainer, held_out = trainer_of(net, name, rate, steps), task.held_out()
    losses = []
    for k in range(1, steps + 1):
        inputs, targets = task.batch()
        trainer.zero_grad()
        cross_entropy(net(inputs), targets).backward()
        trainer.step(1)
        if k % EVERY == 0 or k == steps:
            with torch.no_grad():
                losses.append(statistics.fmean(cross_entropy(net(inputs), targets).item() for inputs, targets in held_out))
    return losses


def step_times(names: list[str]) -> dict[str, dict[str, float]]:
    """The median milliseconds of a whole step of training, and of the optimizer's part of it, by turns."""
    task = text(0)
    nets = {name: task.network() for name in names}
    trainers = {name: trainer_of(net, name, rates(name)[0], STEPS) for name, net in nets.items()}
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for k in range(TURNS + 5):
        inputs, targets = task.batch()
        for name, net in nets.items():
            began = time.perf_counter()
            trainers[name].zero_grad()
            cross_entropy(net(inputs), targets).backward()
            middle = time.perf_counter()
            trainers[name].step(1)
            ended = time.perf_counter()
            if k >= 5:
                taken[name].append((middle - began, ended - middle))
    passes = statistics.median(first for each in taken.values() for first, _ in each)  # the same for all
    own = {name: statistics.median(second for _, second in each) for name, each in taken.items()}
    return {name: {"whole": 1e3 * (passes + own[name]), "own": 1e3 * own[name]} for name in names}


def draw(results: Mapping[str, Any], path: Path) -> None:
    """Draw the losses over steps, and over time."""
    figure = Figure(12, 5.4)
    grid = figure.add_gridspec(1, 2, wspace=0.16)
    grid.update(left=0.065, right=0.985, top=0.8, bottom=0.11)
    figure.text(0.02, 0.94, "Muon and its fractions on a small language model", color=INK, fontsize=14, weight="bold")
    figure.text(0.02, 0.895, f"{results['machine']}; mean of {results['seeds']} seeds", color=QUIET, fontsize=8)
    for k, (what, label) in enumerate((("equal steps", "step"), ("equal time", "seconds"))):
        axes = figure.add_subplot(grid[0, k])
        quieten(axes, 8)
        for i, (name, row) in enumerate(results["found"].items()):
            found = row[what]
            steps = [min(EVERY * (n + 1), found["steps"]) for n in range(len(found["curve"]))]
            x = steps if label == "step" else [step * row["ms"]["whole"] / 1e3 for step in steps]
            text = f"{name}: {statistics.fmean(found['losses']):.3f}"
            axes.plot(x, found["curve"], label=text, linewidth=1.6, **line_style(i))
        ends = [each[-1] for row in results["found"].values() for each in (row[what]["curve"],)]
        axes.set_ylim(min(ends) - 0.05, max(ends) + 0.55)
        axes.set_title(what, loc="left", color=INK, fontsize=10)
        axes.set_xlabel(label, color=QUIET, fontsize=8)
        if k == 0:
            axes.set_ylabel("loss of text that was not trained on", color=QUIET, fontsize=8)
        axes.legend(frameon=False, fontsize=8)
    path.write_bytes(figure.png(100))
    print(f"drawn to {path}")


if __name__ == "__main__":
    main()
