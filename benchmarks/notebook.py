"""Times what the notebook side waits for: races of optimizers, basin maps, sweeps.

    python benchmarks/notebook.py                  all of it, about a minute on two cores
    python benchmarks/notebook.py --only sweep     some of the parts: race, basins, sweep
    python benchmarks/notebook.py --out FILE       write JSON, too

Times are the smallest of several runs after a first one, which compiles; beside each stands its goal, where there is one. A
sweep is compared with single runs of `Trainer` from the same run, taken in turns with it, and with torch's own way to train
many copies, `torch.func.vmap` and one `torch.optim` optimizer for all, which gives all of them the same rate.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from run import machine
from torch import nn
from torch.func import functional_call, stack_module_state, vmap
from torch.nn.functional import cross_entropy

import tristep
from tristep import Trainer
from tristep.demo import load, make_batches, network
from tristep.viz import basin_map, simulate
from tristep.viz.simulate import RATES

Row = dict[str, Any]

RACERS: dict[str, dict[str, Any]] = {
    "sgd": {},
    "momentum": {"optimizer": "sgd", "momentum": 0.9},
    "nag": {"momentum": 0.9},
    "adam": {},
    "adamw": {},
    "rmsprop": {},
    "adagrad": {},
    "lion": {},
}
COPIES = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=tuple(PARTS), default=list(PARTS), help="measure these parts only")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    arguments = parser.parse_args()
    results: dict[str, Any] = {"machine": machine("cpu")}
    print(results["machine"], f"load {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else "")
    for name in arguments.only:
        results[name] = PARTS[name]()
        print(f"\n{name}")
        for row in results[name]:
            goal = f"goal {row['goal']:g}" if "goal" in row else ""
            print(f"  {row['what']:<72} {row['value']:9.4g} {row['unit']:<12} {goal}")
    if arguments.out:
        arguments.out.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


def race() -> list[Row]:
    ms = 1e3 * fastest(lambda: simulate("rosenbrock", RACERS, steps=200, learning_rates=RATES), 20)
    what = f"{len(RATES)} rates x {len(RACERS)} optimizers x 200 steps on Rosenbrock's function"
    return [{"what": what, "value": ms, "unit": "ms", "goal": 50}]


def basins() -> list[Row]:
    adam = {"optimizer": "adam", "learning_rate": 0.1}
    return [
        {"what": f"256 x 256 starts, 300 steps of Adam, {name}", "value": seconds, "unit": "s"} | goal
        for name, goal in (("himmelblau", {"goal": 0.3}), ("beale", {}), ("ackley", {}))
        if (seconds := fastest(lambda name=name: basin_map(name, adam, 256, 300), 5))
    ]


def sweep() -> list[Row]:
    rows = []
    data = load(torch.device("cpu"))
    all_batches = [(data["images"][each], data["labels"][each]) for each in make_batches(2)]
    networks = (("MLP of 64-32-10", mlp, 42, {"goal": 12.0}), ("the demo's convolutional network", network, 6, {}))
    for name, make, steps, goal in networks:
        batches = all_batches[:steps]
        ways: dict[str, Callable[[], object]] = {
            "single": lambda make=make, batches=batches: single(make, batches),
            "sweep": lambda make=make, batches=batches: tristep.sweep(
                make, cross_entropy, batches, grid={"learning_rate": rates()}
            ),
            "torch": lambda make=make, batches=batches: torch_way(make, batches),
        }
        times = in_turns(ways, 5 if make is mlp else 2)
        shown = f"{COPIES} copies, {name}, {steps} steps"
        rows.append({"what": f"1 run by Trainer, {name}, {steps} steps", "value": 1e3 * times["single"], "unit": "ms"})
        rows.append({"what": shown, "value": 1e3 * times["sweep"], "unit": "ms"})
        rows.append({"what": shown, "value": times["sweep"] / times["single"], "unit": "single runs"} | goal)
        rows.append({"what": f"{shown}, vmap and torch.optim.Adam", "value": 1e3 * times["torch"], "unit": "ms"})
    return rows


PARTS: dict[str, Callable[[], list[Row]]] = {"race": race, "basins": basins, "sweep": sweep}


def mlp() -> nn.Module:
    """A small MLP for the demo's images."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def rates() -> list[float]:
    return [1e-4 * 1.1**k for k in range(COPIES)]


def single(make: Callable[[], nn.Module], batches: list[Any]) -> None:
    net = make()
    trainer = Trainer(net, "adam", {"learning_rate": 1e-3})
    losses = []
    for images, labels in batches:
        loss = cross_entropy(net(images), labels)
        trainer.zero_grad()
        loss.backward()
        trainer.step(1)
        losses.append(loss.detach())
    torch.stack(losses).tolist()


def torch_way(make: Callable[[], nn.Module], batches: list[Any]) -> None:
    models = [make() for _ in range(COPIES)]
    weights, buffers = stack_module_state(models)  # type: ignore[arg-type]
    optimizer = torch.optim.Adam(weights.values(), lr=1e-3)

    def loss(own: Any, kept: Any, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return cross_entropy(functional_call(models[0], (own, kept), (images,)), labels)

    losses = []
    for images, labels in batches:
        values = vmap(loss, in_dims=(0, 0, None, None))(weights, buffers, images, labels)
        optimizer.zero_grad()
        values.sum().backward()
        optimizer.step()
        losses.append(values.detach())
    torch.stack(losses).tolist()


def fastest(run: Callable[[], object], times: int) -> float:
    """Seconds of the fastest run, after one that is not timed."""
    return in_turns({"": run}, times)[""]


def in_turns(ways: dict[str, Callable[[], object]], times: int) -> dict[str, float]:
    """Seconds of the fastest run of each way, all taken in turns."""
    found = dict.fromkeys(ways, float("inf"))
    for turn in range(times + 1):
        for name, run in ways.items():
            start = time.perf_counter()
            run()
            if turn:
                found[name] = min(found[name], time.perf_counter() - start)
    return found


if __name__ == "__main__":
    main()
