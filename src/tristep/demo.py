"""`python -m tristep demo`: one step of SGD checked by hand, then several optimizers on handwritten digits.

It needs the extra `demo`: scikit-learn for the images, matplotlib for the picture.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from tqdm import tqdm

from . import Trainer
from .kernels import choose_engine
from .trainer.lr_scheduler import CosineScheduler, FactorScheduler, MultiFactorScheduler, PolyScheduler
from .trainer.validation import choice, integer
from .viz import Figure, plot_training

BATCH = 64
TRAINING_IMAGES = 1347  # three quarters of 1,797
EPOCH = -(-TRAINING_IMAGES // BATCH)  # updates


def run(epochs: int = 15, out: str = "tristep-demo.png", engine: str | None = None, optimizers: Sequence[str] = ()) -> int:
    """Run the demo: print the step and a table, and write the picture. Check the arguments by `check` before.

    `optimizers` are names from `recipes`, in the order of the table; empty for all. Return the exit status: 0, or 1 if the
    first step was wrong.
    """
    device = find_device(engine)
    data = load(device)
    batches = make_batches(epochs)
    settings = recipes(len(batches))
    chosen = {name: settings[name] for name in optimizers or settings}

    print("1. One dense unit, a batch of 8, SGD with learning rate 1\n")
    if not first_step(device, engine):
        print("   These are not the same. Something is wrong here.")
        return 1
    print("   They match: the step is the one of Gluon's Trainer tutorial.\n")

    print(f"2. Handwritten digits: the same start and the same {len(batches)} batches for each optimizer\n")
    with _one_thread():
        runs = {name: train(name, settings, data, batches, engine) for name, settings in chosen.items()}
    print(f"\n{table(runs, chosen, choose_engine(device, engine))}\n")
    Path(out).write_bytes(picture(runs).png(dpi=150))
    print(f"Picture: {Path(out).resolve()}")
    return 0


class Run(NamedTuple):
    """The result of one training: values at each update, and the share of test images recognised, from 0 to 1."""

    losses: list[float]
    rates: list[float]
    seconds: list[float]  # in `Trainer.step` alone
    accuracy: float


def check(epochs: int, out: str, engine: str | None, optimizers: Sequence[str]) -> None:
    """Check the arguments of `run` before the training starts."""
    integer("epochs", epochs, low=1)
    for name in optimizers:
        choice("optimizers", name, recipes(EPOCH))
    choose_engine(find_device(engine), engine)
    if Path(out).suffix.lower() != ".png":
        raise ValueError(f"out={out!r}: the picture is a PNG, so its name must end in .png")
    if not Path(out).resolve().parent.is_dir():
        raise ValueError(f"out={out!r}: there is no folder {Path(out).resolve().parent}")


def find_device(engine: str | None = None) -> torch.device:
    """Return the GPU if there is one, and the engine is not "cpu"; else the CPU."""
    engine = engine or os.environ.get("TRISTEP_ENGINE")
    return torch.device("cuda" if torch.cuda.is_available() and engine != "cpu" else "cpu")


def first_step(device: torch.device, engine: str | None = None) -> bool:
    """Take and print one step of SGD, as Gluon's Trainer tutorial; return whether w became w - lr / batch * gradient."""
    torch.manual_seed(0)
    unit = nn.Linear(4, 1).to(device)
    trainer = Trainer(unit, "sgd", {"learning_rate": 1.0}, engine=engine)
    x, y = torch.rand(8, 4, device=device), torch.rand(8, 1, device=device)

    loss = (unit(x) - y).square().sum() / 2
    loss.backward()
    before, gradient = unit.weight.detach().clone(), unit.weight.grad
    assert gradient is not None
    trainer.step(batch_size=8)

    expected = before - 1.0 / 8 * gradient
    print("   weight before          ", *_words(before))
    print("   gradient               ", *_words(gradient))
    print("   weight after           ", *_words(unit.weight))
    print("   w - lr / batch * grad  ", *_words(expected))
    return torch.allclose(unit.weight, expected, rtol=1e-6, atol=1e-7)


def recipes(updates: int) -> dict[str, dict[str, Any]]:
    """Return the arguments of each optimizer by name, for a training of so many updates, at least an epoch."""
    warm_up = updates // 10
    drops = (updates // 2, updates * 3 // 4)
    return {
        "sgd": {
            "momentum": 0.9,
            "lr_scheduler": CosineScheduler(max_update=updates, base_lr=0.1, final_lr=0.001, warmup_steps=warm_up),
        },
        "nag": {"momentum": 0.9, "lr_scheduler": PolyScheduler(max_update=updates, base_lr=0.08, pwr=1)},
        "adam": {"learning_rate": 0.006, "lr_scheduler": FactorScheduler(step=updates // 6, factor=0.6, base_lr=0.006)},
        "adamw": {
            "learning_rate": 0.01,
            "wd": 0.1,
            "lr_scheduler": CosineScheduler(max_update=updates, base_lr=0.01, final_lr=0.0001, warmup_steps=warm_up),
        },
        "rmsprop": {"learning_rate": 0.003, "lr_scheduler": MultiFactorScheduler(step=drops, factor=0.3, base_lr=0.003)},
        "adagrad": {"learning_rate": 0.05},
        "signum": {
            "learning_rate": 0.002,
            "lr_scheduler": CosineScheduler(max_update=updates, base_lr=0.002, final_lr=0.00002),
        },
    }


def load(device: torch.device) -> dict[str, torch.Tensor]:
    """Load scikit-learn's 1,797 digits, with a fixed split: images [n, 1, 8, 8] from 0 to 1, labels [n] from 0 to 9."""
    images, labels = load_digits(return_X_y=True)
    images = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    labels = torch.tensor(labels)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    training, test = order[:TRAINING_IMAGES], order[TRAINING_IMAGES:]
    return {
        "images": images[training].to(device),
        "labels": labels[training].to(device),
        "test images": images[test].to(device),
        "test labels": labels[test].to(device),
    }


def make_batches(epochs: int) -> list[torch.Tensor]:
    """Return the indices of the training images in each batch, always the same."""
    generator = torch.Generator().manual_seed(0)
    return [batch for _ in range(epochs) for batch in torch.randperm(TRAINING_IMAGES, generator=generator).split(BATCH)]


def network() -> nn.Module:
    """Make a small convolutional network, always with the same weights."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def train(
    name: str,
    settings: dict[str, Any],
    data: dict[str, torch.Tensor],
    batches: list[torch.Tensor],
    engine: str | None = None,
) -> Run:
    """Train the network with one optimizer on data from `load`, with the indices of the training images in each batch."""
    images, labels = data["images"], data["labels"]
    net = network().to(images.device)
    trainer = Trainer(net, name, settings, engine=engine)
    losses, rates, seconds = [], [], []
    for batch in tqdm(batches, desc=f"{name:>10}", unit=" updates", ncols=80, disable=None):
        loss = cross_entropy(net(images[batch]), labels[batch], reduction="sum")
        trainer.zero_grad()
        loss.backward()
        losses.append(loss.item() / len(batch))
        if images.is_cuda:
            torch.cuda.synchronize()  # so that only the step is timed
        start = time.perf_counter()
        trainer.step(batch_size=len(batch))
        if images.is_cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
        rates.append(trainer.learning_rate)
    with torch.no_grad():
        correct = net(data["test images"]).argmax(dim=1) == data["test labels"]
    return Run(losses, rates, seconds, correct.float().mean().item())


def table(runs: dict[str, Run], settings: dict[str, dict[str, Any]], engine: str) -> str:
    lines = [f"{'optimizer':<10} {'loss':>7} {'accuracy':>9} {'µs/step':>8}  {'engine':<7} learning rate"]
    for name, run in runs.items():
        loss, step = statistics.fmean(run.losses[-EPOCH:]), statistics.median(run.seconds) * 1e6
        rate = _described(settings[name])
        lines.append(f"{name:<10} {loss:>7.4f} {run.accuracy:>9.1%} {step:>8.0f}  {engine:<7} {rate}")
    lines += [
        "",
        "loss: mean over the last epoch; accuracy: on images not trained on; µs/step: median of trainer.step alone,",
        "whose first call, which compiles the rule, takes longer",
    ]
    return "\n".join(lines)


def picture(runs: dict[str, Run]) -> Figure:
    """Plot loss curves and learning rates, with accuracies in the legend."""
    named = {f"{name} {run.accuracy:.1%}": run for name, run in runs.items()}
    return plot_training(
        {name: run.losses for name, run in named.items()},
        {name: run.rates for name, run in named.items()},
        title="Handwritten digits: losses, and accuracies on the test set",
        ylabel=f"cross-entropy on batches of {BATCH}",
    )


@contextmanager
def _one_thread() -> Iterator[None]:
    """Use one CPU thread inside this context: as fast for a small network, and faster if other programs use the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _described(settings: dict[str, Any]) -> str:
    schedule = settings.get("lr_scheduler")
    if schedule is None:
        return f"{settings['learning_rate']:g}, constant"
    warm_up = f", warm-up {schedule.warmup_steps}" if schedule.warmup_steps else ""
    return f"{schedule.warmup_final_lr:g}, {type(schedule).__name__}{warm_up}"


def _words(values: torch.Tensor) -> list[str]:
    return [f"{value:8.5f}" for value in values.flatten().tolist()]
