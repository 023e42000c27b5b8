"""Times what the notebook side waits for: races, sweeps, pictures, what recording costs, long runs.

    python benchmarks/notebook.py                  all of it, about ten minutes on two cores
    python benchmarks/notebook.py --only sweep     some of the parts
    python benchmarks/notebook.py --out FILE       write JSON, too; of a file that is there, only the parts that are timed
                                                   change

The parts:

    race        41 rates x 8 optimizers x 200 steps: made ready and run, run again from another start as when it is dragged,
                and from there to the bytes that a browser gets
    sweep       64 copies of a network against single runs of `Trainer`, and against `torch.func.vmap` with one
                `torch.optim` optimizer for all, which gives all of them the same rate
    pictures    redrawing by `viz.render.matplotlib.Picture` against matplotlib as notebooks commonly use it, see
                notebook_pictures.py
    dashboard   a frame of a live dashboard, from a new step to the bytes that a browser gets, and its first PNG
    live        training that is recorded, in stretches with and without a dashboard of it, which `LiveLoop` redraws 4
                times a second at most, by both renderers of widgets; no page is open, but all that one would get is made
    curves      100,000 recorded steps as a picture
    recorder    training steps of a small GPT-2 in its 148 tensors, recorded at the default interval and not, in turns
    loggers     logging as many numbers as such a step has, by each of the loggers that are installed, and such training with
                and without each logger, in turns

Where several ways are compared they take turns. Each time stands twice: by the clock, and of all the process's threads on
the processor, which another program's load hardly changes; each is the least of several after a first one, which compiles.
What is added to something is the mean over many pairs, as a share, with its standard error below it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import notebook_pictures
import numpy as np
import torch
from environment import machine
from notebook_timing import Row, Time, Watched, added, fastest, in_turns, row
from notebook_training import WIDTH, demo_steps, gpt2_steps, training
from timing import write
from torch import nn
from torch.func import functional_call, stack_module_state, vmap
from torch.nn.functional import cross_entropy

import tristep
from tristep import Trainer
from tristep.demo import load, make_batches, network
from tristep.viz import Dashboard, LossView, Run, TrajectoryView, simulate
from tristep.viz.record.loggers import LOGGED, Loggers
from tristep.viz.record.probes import QUANTITIES
from tristep.viz.render.matplotlib import Picture
from tristep.viz.simulate import RATES, Simulation

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
    results: dict[str, Any] = {}
    if arguments.out and arguments.out.exists():
        results = json.loads(arguments.out.read_text(encoding="utf-8"))
    results["machine"] = machine("cpu")
    print(results["machine"], f"load {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else "")
    print(f"{'':78}{'clock':>10}{'processor':>11}")
    for name in arguments.only:
        found = PARTS[name]()
        results[name] = {"machine": results["machine"], "found": found}
        print(name)
        for line in found:
            print(f"  {line['what']:<76}{line['clock']:10.4g}{line['processor']:11.4g} {line['unit']}", flush=True)
        if arguments.out:  # after each part, so that a run that is cut off leaves what it has seen
            write(arguments.out, results)


def trajectories() -> list[Row]:
    what = f"{len(RATES)} rates x {len(RACERS)} optimizers x 200 steps on Rosenbrock's function"
    simulation = Simulation("rosenbrock", RACERS, 200, learning_rates=RATES)
    view = TrajectoryView("rosenbrock", RACERS)
    places = itertools.cycle([(-1.0 + k / 20, 1.0) for k in range(20)])

    def drag() -> bytes:
        view.on_drag("start", 0, *next(places))
        return view.scene().to_bytes()

    return [
        row(what, fastest(lambda: simulate("rosenbrock", RACERS, steps=200, learning_rates=RATES), 20), "ms"),
        row(f"{what}, from another start", fastest(lambda: simulation.run(next(places)), 20), "ms"),
        row("the same, 41 factors of best rates, from the event to a scene's bytes", fastest(drag, 20), "ms"),
    ]


def sweep() -> list[Row]:
    rows = []
    data = load(torch.device("cpu"))
    all_batches = [(data["images"][each], data["labels"][each]) for each in make_batches(2)]
    networks = (("MLP of 64-32-10", mlp, 42), ("the demo's convolutional network", network, 6))
    for name, make, steps in networks:
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
        rows.append(row(f"1 run by Trainer, {name}, {steps} steps", times["single"], "ms"))
        rows.append(row(shown, times["sweep"], "ms"))
        rows.append(row(shown, times["sweep"], "single runs", by=times["single"]))
        rows.append(row(f"{shown}, vmap and torch.optim.Adam", times["torch"], "ms"))
    return rows


def pictures() -> list[Row]:
    return [
        row(f"{found['picture']}, {found['inches']} inches: {words}", Time(*times), "ms")
        for found in notebook_pictures.rows()
        for how, words in (
            ("ours", "drawn again by Picture"),
            ("anew", "a new figure, saved"),
            ("data", "a kept figure, saved"),
        )
        for times in [(found[f"{how}, ms"] / 1e3, found[f"{how}, ms of the processor"] / 1e3)]
    ]


def dashboard() -> list[Row]:
    """A twentieth of the time between frames, at 4 a second, is what a frame may take; else `FrameBudget` draws fewer."""
    rows = []
    for tensors in (12, 148):
        run = long_run(5000, tensors)
        view = Dashboard(run)
        number = itertools.count(5001)

        def frame(run: Run = run, view: Dashboard = view, number: Any = number) -> bytes:
            add(run, np.array([next(number)]))
            return view.scene().to_bytes()

        rows.append(row(f"a frame of a dashboard, {tensors} tensors, 5,000 steps", fastest(frame, 20), "ms"))
        first = fastest(lambda view=view: Picture(view.scene()).png(), 5)
        rows.append(row(f"its first image for ipywidgets, {tensors} tensors", first, "ms"))
    return rows


def live() -> list[Row]:
    """Two long trainings; each shows its dashboard in every second stretch of it, and so is its own comparison."""
    rows = []
    for name, make, steps in (("the demo's network", demo_steps, 150), ("GPT-2's 148 tensors", gpt2_steps, 4)):
        for renderer, words in (("canvas", "as data for a canvas"), ("ipywidgets", "as PNG for ipywidgets")):
            watched = Watched(*make(), steps, renderer)
            more, error = watched.run(48)
            rows.append(row(f"{steps} training steps, {name}, recorded", watched.plain, "ms"))
            rows.append(row(f"what a live dashboard adds, {name}, {words}", more, "of it"))
            rows.append(row("  the standard error of that", error, "of it"))
            rows.append(row(f"frames of it, {name}, {words}", watched.rate, "a second"))
    return rows


def curves() -> list[Row]:
    run = long_run(100_000, 12)
    with tempfile.TemporaryDirectory() as folder:
        rows = []
        for view in (LossView(run), Dashboard(run)):
            name = type(view).__name__
            picture = Path(folder) / f"{name}.png"
            drawn = fastest(lambda view=view, picture=picture: view.figure().savefig(picture), 3)
            rows.append(row(f"100,000 steps, {name}, as a PNG file", drawn, "s"))
            page = fastest(lambda view=view, name=name: view.html(Path(folder) / f"{name}.html"), 3)
            rows.append(row(f"100,000 steps, {name}, as a page", page, "s"))
    return rows


def recorder() -> list[Row]:
    """What training steps take more when they are recorded, as a share; the same models, batches and optimizers."""
    rows = []
    for name, steps, pairs in (("Trainer", 4, 24), ("torch.optim.AdamW", 16, 10)):
        plain, recorded = (training(name, steps, recorded) for recorded in (False, True))
        took, more, error = added(plain, recorded, pairs)
        each = f"every {steps} steps" if name != "Trainer" else "every step"
        rows.append(row(f"{steps} training steps, GPT-2's 148 tensors at width {WIDTH}, {name}", took, "ms"))
        rows.append(row(f"what recording all norms adds, {name}, {each}", more, "of it"))
        rows.append(row("  the standard error of that", error, "of it"))
    return rows


def loggers() -> list[Row]:
    """What logging takes of a training step: a loss, a rate and three numbers of each of 148 tensors, at each step.

    First all that a recorder's loggers do, in the thread of training and in their own, from a run to the files that are
    closed, without W&B's own process. Then what training steps take more, by training with and without a logger in turns.
    """
    steps, rows, number = 64, [], itertools.count()

    def log(make: Callable[[int], Any]) -> None:
        turn = next(number)
        run = Run("run", [f"h.{i // 12}.{i % 12}.weight" for i in range(148)])
        add(run, np.arange(turn * steps, (turn + 1) * steps) + 1)
        assert not Loggers([make(turn)], 1, LOGGED).close(run, (turn + 1) * steps)

    with tempfile.TemporaryDirectory() as folder:
        targets = log_targets(Path(folder))
        ways = {name: lambda make=make: log(make) for name, make in targets.items()}
        times = in_turns({"training": training("Trainer", 4, True), **ways}, 10)
        rows.append(row(f"4 recorded training steps, GPT-2's 148 tensors at width {WIDTH}", times["training"], "ms"))
        step = Time(*(time / 4 for time in times["training"]))
        for name in targets:
            took = Time(*(time / steps for time in times[name]))
            rows.append(row(f"logging a step, {name}", took, "ms"))
            rows.append(row(f"logging a step, {name}", took, "of a step", by=step))
        for name, make in log_targets(Path(folder)).items():
            more, error = logged(lambda turn, make=make: training("Trainer", 4, True, [make(turn)]))
            rows.append(row(f"what logging each step adds to recorded steps, {name}", more, "of it"))
            rows.append(row("  the standard error of that", error, "of it"))
    return rows


def logged(make: Callable[[int], Callable[[], object]], models: int = 8, pairs: int = 6) -> tuple[Time, Time]:
    """What a logger adds, as a share, and its standard error, over pairs of models: where one lies in memory counts, too."""
    found = np.array([added(training("Trainer", 4, True), make(-1 - turn), pairs)[1] for turn in range(models)])
    return Time(*found.mean(axis=0)), Time(*(found.std(axis=0, ddof=1) / np.sqrt(models)))


def log_targets(folder: Path) -> dict[str, Callable[[int], Any]]:
    """Loggers by name, those that are installed: functions of the number of the turn."""
    found: dict[str, Callable[[int], Any]] = {
        "a .csv file": lambda turn: folder / f"{turn}.csv",
        "a .jsonl file": lambda turn: folder / f"{turn}.jsonl",
    }
    if find_spec("tensorboard"):
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(folder)
        found["TensorBoard"] = lambda turn: writer
    if find_spec("wandb"):
        import wandb

        run = wandb.init(dir=folder, mode="offline", settings=wandb.Settings(silent=True))

        def wandb_run(turn: int) -> Any:
            """Each training, of a negative turn, begins with step 1 again, and W&B takes no step of a run twice."""
            if turn >= 0:
                return run
            return wandb.init(dir=folder, mode="offline", reinit="create_new", settings=wandb.Settings(silent=True))

        found["W&B, offline"] = wandb_run
    return found


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


def long_run(steps: int, tensors: int) -> Run:
    """A run of so many steps that has all that a recorder writes down."""
    run = Run("run", [f"h.{i // 12}.{i % 12}.weight" for i in range(tensors)])
    for first in range(1, steps + 1, 5000):
        add(run, np.arange(first, min(first + 5000, steps + 1)))
    return run


def add(run: Run, steps: np.ndarray) -> None:
    rng, shape = np.random.default_rng(int(steps[0])), (len(steps), len(run.parameters))
    whole = ("gradient_zeros", "gradient_nonfinite", "weight_unchanged")
    run.add_tensors(
        steps, {name: np.zeros(shape) if name in whole else np.exp(rng.normal(-3, 1, shape)) for name in QUANTITIES}
    )
    for step, noise in zip(steps.tolist(), rng.random(len(steps)).tolist(), strict=True):
        run.add_scalars(step, {"loss": 3 / step**0.3 + 0.1 * noise, "learning_rate": 1e-3})


PARTS: dict[str, Callable[[], list[Row]]] = {
    "race": trajectories,
    "sweep": sweep,
    "pictures": pictures,
    "dashboard": dashboard,
    "live": live,
    "curves": curves,
    "recorder": recorder,
    "loggers": loggers,
}


if __name__ == "__main__":
    main()
