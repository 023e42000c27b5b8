"""Times what the notebook side waits for: races, basin maps, sweeps, pictures, what recording costs, long runs.

    python benchmarks/notebook.py                  all of it, about seven minutes on two cores
    python benchmarks/notebook.py --only sweep     some of the parts
    python benchmarks/notebook.py --out FILE       write JSON, too; of a file that is there, only the parts that are timed
                                                   change

The parts:

    race        41 rates x 8 optimizers x 200 steps: made ready and run, run again from another start as when it is dragged,
                and from there to the bytes that a browser gets
    basins      256 x 256 starts, 300 steps of Adam
    sweep       64 copies of a network against single runs of `Trainer`, and against `torch.func.vmap` with one
                `torch.optim` optimizer for all, which gives all of them the same rate
    pictures    redrawing by `viz.render.matplotlib.Picture` against matplotlib as notebooks commonly use it, see
                notebook_pictures.py
    dashboard   a frame of a live dashboard, from a new step to the bytes that a browser gets
    live        training that is recorded, in stretches with and without a dashboard of it, which `LiveLoop` redraws 4
                times a second at most, by both renderers of widgets; no page is open, but all that one would get is made
    curves      100,000 recorded steps as a picture
    recorder    training steps of a small GPT-2 in its 148 tensors, recorded at the default interval and not, in turns

Where several ways are compared they take turns. Each time stands twice: by the clock, and of all the process's threads on
the processor, which another program's load hardly changes; each is the least of several after a first one, which compiles.
What is added to something is the mean over many pairs, as a share, with its standard error below it. The goal is one for the
clock on an idle machine.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import notebook_pictures
import numpy as np
import torch
from run import machine, write
from torch import nn
from torch.func import functional_call, stack_module_state, vmap
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import tristep
from tristep import Trainer, viz
from tristep.demo import load, make_batches, network
from tristep.viz import Dashboard, FrameBudget, LiveLoop, LossView, Recorder, Run, TrajectoryView, basin_map, simulate
from tristep.viz.record.probes import QUANTITIES
from tristep.viz.simulate import RATES, Simulation

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
    results: dict[str, Any] = {}
    if arguments.out and arguments.out.exists():
        results = json.loads(arguments.out.read_text(encoding="utf-8"))
    results["machine"] = machine("cpu")
    print(results["machine"], f"load {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else "")
    print(f"{'':78}{'clock':>10}{'processor':>11}{'':14}goal")
    for name in arguments.only:
        found = PARTS[name]()
        results[name] = {"machine": results["machine"], "found": found}
        print(name)
        for row in found:
            goal = f"{row['goal']:g}" if "goal" in row else ""
            print(f"  {row['what']:<76}{row['clock']:10.4g}{row['processor']:11.4g} {row['unit']:<13}{goal}", flush=True)
        if arguments.out:  # after each part, so that a run that is cut off leaves what it has seen
            write(arguments.out, results)


class Time(NamedTuple):
    """Seconds by the clock, and those of all of the process's threads."""

    clock: float
    processor: float


def row(what: str, time: Time, unit: str, by: Time | None = None, goal: float | None = None) -> Row:
    """A line of the table: a time in seconds or milliseconds, or as a multiple of another."""
    clock, processor = (value * {"ms": 1e3}.get(unit, 1.0) for value in time)
    if by is not None:
        clock, processor = time.clock / by.clock, time.processor / by.processor
    own: Row = {"what": what, "clock": clock, "processor": processor, "unit": unit}
    return own if goal is None else own | {"goal": goal}


def trajectories() -> list[Row]:
    what = f"{len(RATES)} rates x {len(RACERS)} optimizers x 200 steps on Rosenbrock's function"
    simulation = Simulation("rosenbrock", RACERS, 200, learning_rates=RATES)
    view = TrajectoryView("rosenbrock", RACERS)
    places = itertools.cycle([(-1.0 + k / 20, 1.0) for k in range(20)])

    def drag() -> bytes:
        view.on_drag("start", 0, *next(places))
        return view.scene().to_bytes()

    return [
        row(what, fastest(lambda: simulate("rosenbrock", RACERS, steps=200, learning_rates=RATES), 20), "ms", goal=50),
        row(f"{what}, from another start", fastest(lambda: simulation.run(next(places)), 20), "ms", goal=50),
        row("the same, 41 factors of best rates, from the event to a scene's bytes", fastest(drag, 20), "ms", goal=50),
    ]


def basins() -> list[Row]:
    adam = {"optimizer": "adam", "learning_rate": 0.1}
    return [
        row(
            f"256 x 256 starts, 300 steps of Adam, {name}",
            fastest(lambda name=name: basin_map(name, adam, 256, 300), 5),
            "s",
            goal=goal,
        )
        for name, goal in (("himmelblau", 0.3), ("beale", None), ("ackley", None))
    ]


def sweep() -> list[Row]:
    rows = []
    data = load(torch.device("cpu"))
    all_batches = [(data["images"][each], data["labels"][each]) for each in make_batches(2)]
    networks = (("MLP of 64-32-10", mlp, 42, 12.0), ("the demo's convolutional network", network, 6, None))
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
        rows.append(row(f"1 run by Trainer, {name}, {steps} steps", times["single"], "ms"))
        rows.append(row(shown, times["sweep"], "ms"))
        rows.append(row(shown, times["sweep"], "single runs", by=times["single"], goal=goal))
        rows.append(row(f"{shown}, vmap and torch.optim.Adam", times["torch"], "ms"))
    return rows


def pictures() -> list[Row]:
    goals = {"live loss": 6.0, "paths on a landscape": 12.0}
    return [
        row(f"{found['picture']}, {found['inches']} inches: {words}", Time(*times), "ms", goal=goals[name] if ours else None)
        for found in notebook_pictures.rows()
        for name in [found["picture"]]
        for how, words, ours in (
            ("ours", "drawn again by Picture", True),
            ("anew", "a new figure, saved", False),
            ("data", "a kept figure, saved", False),
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

        rows.append(row(f"a frame of a dashboard, {tensors} tensors, 5,000 steps", fastest(frame, 20), "ms", goal=12.5))
    return rows


def live() -> list[Row]:
    """Two long trainings; each shows its dashboard in every second stretch of it, and so is its own comparison."""
    rows = []
    for name, make, steps in (("the demo's network", demo_steps, 150), ("GPT-2's 148 tensors", gpt2_steps, 4)):
        for renderer, words in (("canvas", "as data for a canvas"), ("ipywidgets", "as PNG for ipywidgets")):
            watched = Watched(*make(), steps, renderer)
            more, error = watched.run(48)
            rows.append(row(f"{steps} training steps, {name}, recorded", watched.plain, "ms"))
            rows.append(row(f"what a live dashboard adds, {name}, {words}", more, "of it", goal=0.05))
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
            rows.append(row(f"100,000 steps, {name}, as a PNG file", drawn, "s", goal=1.0))
            page = fastest(lambda view=view, name=name: view.html(Path(folder) / f"{name}.html"), 3)
            rows.append(row(f"100,000 steps, {name}, as a page", page, "s", goal=1.0))
    return rows


def recorder() -> list[Row]:
    """What training steps take more when they are recorded, as a share; the same models, batches and optimizers."""
    rows = []
    for name, steps, pairs in (("Trainer", 4, 24), ("torch.optim.AdamW", 16, 10)):
        plain, recorded = (training(name, steps, recorded) for recorded in (False, True))
        took, more, error = added(plain, recorded, pairs)
        each = f"every {steps} steps" if name != "Trainer" else "every step"
        rows.append(row(f"{steps} training steps, GPT-2's 148 tensors at width {WIDTH}, {name}", took, "ms"))
        rows.append(row(f"what recording all norms adds, {name}, {each}", more, "of it", goal=0.03))
        rows.append(row("  the standard error of that", error, "of it"))
    return rows


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
    whole = ("gradient_zeros", "gradient_nonfinite")
    run.add_tensors(
        steps, {name: np.zeros(shape) if name in whole else np.exp(rng.normal(-3, 1, shape)) for name in QUANTITIES}
    )
    for step, noise in zip(steps.tolist(), rng.random(len(steps)).tolist(), strict=True):
        run.add_scalars(step, {"loss": 3 / step**0.3 + 0.1 * noise, "learning_rate": 1e-3})


class Watched:
    """A recorded training with a live dashboard by a renderer of widgets, which in some of its stretches is not drawn.

    Attributes:
        plain: the mean time of a stretch without the dashboard.
        rate: how many frames its widget gets in a second of the others.
    """

    def __init__(self, step: Callable[[], torch.Tensor], trainer: Trainer, steps: int, renderer: str) -> None:
        self._step, self._trainer, self._steps = step, trainer, steps
        self._recorder = Recorder(trainer)
        self._frames, self._hidden = 0, 0.0
        viz.set_renderer(renderer)
        # Its budget does not see the time in which it is not drawn.
        budget = FrameBudget(most=4, clock=lambda: time.perf_counter() - self._hidden)
        self._view = Dashboard(self._recorder, budget=budget)
        widget = self._view.widget()
        shown, trait = (widget, "payload") if renderer == "canvas" else (widget.children[0], "value")
        shown.observe(self._count, trait)
        self._loop = LiveLoop(self._losses, trainer=trainer, recorder=self._recorder, view=self._view, mode="block")
        self.plain = self.rate = Time(0.0, 0.0)

    def run(self, pairs: int) -> tuple[Time, Time]:
        """What the dashboard adds, as a share, and its standard error."""
        self._order, self._times = orders(pairs + 1), {False: [], True: []}  # type: ignore[var-annotated]
        self._loop.start()
        plain, shown = (np.array(self._times[each][1:]) for each in (False, True))  # the first compile
        self.plain = Time(*plain.mean(axis=0))
        self.rate = Time(*(self._frames / shown.sum(axis=0)))
        return share(plain, shown)

    def _losses(self) -> Iterator[torch.Tensor]:
        for number, drawn in enumerate(self._order):
            self._loop.view = self._view if drawn else None
            if number == 2:
                self._frames = 0
            clock, processor = time.perf_counter(), time.process_time()
            for _ in range(self._steps):
                yield self._step()
            took = Time(time.perf_counter() - clock, time.process_time() - processor)
            self._times[drawn].append(took)
            self._hidden += 0.0 if drawn else took.clock
        self._loop.view = None

    def _count(self, change: object) -> None:
        self._frames += 1


def demo_steps() -> tuple[Callable[[], torch.Tensor], Trainer]:
    """A function that takes a step of the demo's training, and the trainer."""
    torch.manual_seed(0)
    net, data = network(), load(torch.device("cpu"))
    trainer = Trainer(net, "adam", {"learning_rate": 1e-3})
    batches = itertools.cycle([(data["images"][each], data["labels"][each]) for each in make_batches(2)])

    def step() -> torch.Tensor:
        images, labels = next(batches)
        loss = cross_entropy(net(images), labels)
        trainer.zero_grad()
        loss.backward()
        trainer.step(1)
        return loss

    return step, trainer


def gpt2_steps(by: str = "Trainer") -> tuple[Callable[[], torch.Tensor], Any]:
    """A function that takes a step of a small GPT-2, and the trainer or torch's optimizer."""
    torch.manual_seed(0)
    net = SmallGPT2()
    tokens = torch.randint(VOCABULARY, (4, 129))
    source: Any
    if by == "Trainer":
        source = Trainer(net, "adamw", {"learning_rate": 1e-4})
        update = partial(source.step, 1)
    else:
        source = torch.optim.AdamW(net.parameters(), lr=1e-4)
        update = source.step

    def step() -> torch.Tensor:
        loss = cross_entropy(net(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        source.zero_grad()
        loss.backward()
        update()
        return loss

    return step, source


def training(by: str, count: int, recorded: bool) -> Callable[[], object]:
    """A function that takes so many steps of a small GPT-2."""
    step, source = gpt2_steps(by)
    note = Recorder(source) if recorded else None

    def steps() -> None:
        for _ in range(count):
            loss = step()
            if note is not None:
                note.step(loss=loss)
            else:
                loss.item()

    return steps


WIDTH, HEADS, BLOCKS, VOCABULARY, PLACES = 192, 6, 12, 4096, 128


class Block(nn.Module):
    """One of GPT-2's blocks, 12 tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attend, self.join = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (each.unflatten(-1, (HEADS, -1)).transpose(1, 2) for each in self.attend(self.first(x)).chunk(3, dim=-1))
        x = x + self.join(scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.second(x))))


class SmallGPT2(nn.Module):
    """GPT-2's 148 tensors (Radford et al. 2019), narrower, with fewer words; the head shares the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(PLACES, WIDTH)
        self.blocks, self.last = nn.Sequential(*(Block() for _ in range(BLOCKS))), nn.LayerNorm(WIDTH)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens) + self.places.weight[: tokens.shape[1]]
        return self.last(self.blocks(x)) @ self.words.weight.T


def fastest(run: Callable[[], object], times: int) -> Time:
    """The fastest run, after one that is not timed."""
    return in_turns({"": run}, times)[""]


def in_turns(ways: Mapping[str, Callable[[], object]], times: int) -> dict[str, Time]:
    """The fastest run of each way, all taken in turns."""
    found = dict.fromkeys(ways, Time(float("inf"), float("inf")))
    for turn in range(times + 1):
        for name, run in ways.items():
            clock, processor = time.perf_counter(), time.process_time()
            run()
            took = Time(time.perf_counter() - clock, time.process_time() - processor)
            if turn:
                found[name] = Time(*map(min, found[name], took))
    return found


def added(plain: Callable[[], object], more: Callable[[], object], pairs: int) -> tuple[Time, Time, Time]:
    """The mean time of `plain`, what `more` takes above that, as a share, and the standard error of the share."""
    times: dict[bool, list[Time]] = {False: [], True: []}
    for second in orders(pairs + 1):
        clock, processor = time.perf_counter(), time.process_time()
        (more if second else plain)()
        times[second].append(Time(time.perf_counter() - clock, time.process_time() - processor))
    first, other = (np.array(times[each][1:]) for each in (False, True))  # the first ones compile
    return Time(*first.mean(axis=0)), *share(first, other)


def orders(pairs: int) -> list[bool]:
    """Which of two is to run, so many times each: in turns, and each as often before the other as after it."""
    return [bool((k + k // 2) % 2) for k in range(2 * pairs)]


def share(plain: np.ndarray, more: np.ndarray) -> tuple[Time, Time]:
    """By how much times [pairs, 2] are above others, as a share of these, and its standard error."""
    apart = more - plain
    error = apart.std(axis=0, ddof=1) / np.sqrt(len(apart))
    return Time(*(apart.mean(axis=0) / plain.mean(axis=0))), Time(*(error / plain.mean(axis=0)))


PARTS: dict[str, Callable[[], list[Row]]] = {
    "race": trajectories,
    "basins": basins,
    "sweep": sweep,
    "pictures": pictures,
    "dashboard": dashboard,
    "live": live,
    "curves": curves,
    "recorder": recorder,
}


if __name__ == "__main__":
    main()
