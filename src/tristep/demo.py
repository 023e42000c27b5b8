"""The demo, which is also the shortest tour: one step checked by hand, then several optimizers on handwritten digits.

`python -m tristep demo` runs it. It needs the `notebook` extra, for the images (scikit-learn) and for the picture.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from tqdm import tqdm

from . import Trainer
from .kernels import choose_engine
from .trainer.lr_scheduler import CosineScheduler, FactorScheduler, MultiFactorScheduler, PolyScheduler
from .viz import plot_training

BATCH = 64
TRAINING_IMAGES = 1347  # three quarters of 1,797


def run(epochs: int, out: str, engine: str | None = None, optimizers: Sequence[str] | None = None) -> int:
    """Do both parts; returns the exit status, 1 where the first step was not what it must be.

    Args:
        epochs: passes over the training images, >= 1.
        out: where to put the picture.
        engine: as for `Trainer`.
        optimizers: names from `recipes`; None for all of them.

    Raises:
        ValueError, ModuleNotFoundError: no such optimizer, or an engine that cannot work here.
    """
    device = torch.device("cuda" if torch.cuda.is_available() and engine != "cpu" else "cpu")
    used = choose_engine(device, engine)
    data = load(device)
    batches = make_batches(epochs)
    chosen = recipes(len(batches))
    if optimizers:
        for name in optimizers:
            if name not in chosen:
                raise ValueError(f"--optimizers {name}: the demo knows {', '.join(chosen)}")
        chosen = {name: chosen[name] for name in optimizers}

    print("1. One dense unit, a batch of 8, SGD with learning rate 1\n")
    if not first_step(device, engine):
        print("   These are not the same. Something is wrong here.")
        return 1
    print("   The same: the update is what Gluon's tutorial says.\n")

    print(f"2. {len(chosen)} optimizers, the same start and the same {len(batches)} batches of handwritten digits\n")
    runs = {name: train(name, settings, data, batches, engine) for name, settings in chosen.items()}
    print(f"\n{table(runs, chosen, used)}\n")

    figure = plot_training(
        {name: run["losses"] for name, run in runs.items()},
        {name: run["rates"] for name, run in runs.items()},
        {name: f"test accuracy {run['accuracy']:.1%}" for name, run in runs.items()},
        title="A small convolutional network learns handwritten digits",
        ylabel=f"cross-entropy on batches of {BATCH}",
    )
    figure.savefig(out, dpi=150)
    print(f"Picture: {Path(out).resolve()}")
    return 0


def first_step(device: torch.device, engine: str | None = None) -> bool:
    """Gluon's first lesson about its trainer: after one step the weight is w - lr / batch * gradient."""
    torch.manual_seed(0)
    unit = nn.Linear(5, 1).to(device)
    trainer = Trainer(unit, "sgd", {"learning_rate": 1.0}, engine=engine)

    loss = unit(torch.rand(8, 5, device=device)).square().sum()
    loss.backward()
    before, gradient = unit.weight.detach().clone(), unit.weight.grad
    trainer.step(batch_size=8)

    expected = before - 1.0 / 8 * gradient
    print("   weight before          ", *_words(before))
    print("   gradient               ", *_words(gradient))
    print("   weight after           ", *_words(unit.weight))
    print("   w - lr / batch * grad  ", *_words(expected))
    return torch.allclose(unit.weight, expected, rtol=1e-6, atol=1e-7)


def recipes(updates: int) -> dict[str, dict[str, Any]]:
    """Optimizers and their settings, for a training of that many updates."""
    warm_up = updates // 10
    return {
        "sgd": {
            "momentum": 0.9,
            "lr_scheduler": CosineScheduler(max_update=updates, base_lr=0.1, final_lr=0.001, warmup_steps=warm_up),
        },
        "nag": {"momentum": 0.9, "lr_scheduler": PolyScheduler(max_update=updates, base_lr=0.08, pwr=1)},
        "adam": {"lr_scheduler": FactorScheduler(step=max(updates // 6, 1), factor=0.6, base_lr=0.006)},
        "adamw": {
            "wd": 0.1,
            "lr_scheduler": CosineScheduler(max_update=updates, base_lr=0.01, final_lr=0.0001, warmup_steps=warm_up),
        },
        "rmsprop": {
            "lr_scheduler": MultiFactorScheduler(
                step=[max(updates // 2, 1), max(updates * 3 // 4, 2)], factor=0.3, base_lr=0.003
            )
        },
        "adagrad": {"learning_rate": 0.05},
        "signum": {"momentum": 0.9, "lr_scheduler": CosineScheduler(max_update=updates, base_lr=0.002, final_lr=0.00002)},
    }


def load(device: torch.device) -> dict[str, torch.Tensor]:
    """1,797 images of 8 x 8 pixels from scikit-learn, split once and for all."""
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
    """Which training images make up each batch."""
    generator = torch.Generator().manual_seed(0)
    return [batch for _ in range(epochs) for batch in torch.randperm(TRAINING_IMAGES, generator=generator).split(BATCH)]


def network() -> nn.Module:
    """A small convolutional network, always with the same weights."""
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
) -> dict[str, Any]:
    """Train the network with one optimizer: losses and rates of all updates, the test accuracy, seconds of the steps."""
    images, labels = data["images"], data["labels"]
    net = network().to(images.device)
    trainer = Trainer(net, name, settings, engine=engine)
    losses, rates, seconds = [], [], []
    for batch in tqdm(batches, desc=f"{name:>10}", unit=" updates", ncols=80):
        loss = cross_entropy(net(images[batch]), labels[batch], reduction="sum")
        trainer.zero_grad()
        loss.backward()
        losses.append(loss.item() / len(batch))  # waits for the device too, so that only the step is timed
        start = time.perf_counter()
        trainer.step(batch_size=len(batch))
        if images.is_cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
        rates.append(trainer.learning_rate)
    with torch.no_grad():
        right = net(data["test images"]).argmax(dim=1) == data["test labels"]
    return {"losses": losses, "rates": rates, "accuracy": right.float().mean().item(), "seconds": seconds}


def table(runs: dict[str, dict[str, Any]], settings: dict[str, dict[str, Any]], engine: str) -> str:
    """The results in lines of text. The final loss is the mean over the last epoch, the time the median step's."""
    epoch = -(-TRAINING_IMAGES // BATCH)
    lines = [f"{'optimizer':<10} {'final loss':>10} {'test accuracy':>14} {'µs/step':>8}  {'engine':<7} learning rate"]
    for name, run in runs.items():
        schedule = settings[name].get("lr_scheduler")
        rate = f"{run['rates'][0]:g}, constant" if schedule is None else f"{schedule.base_lr:g}, {type(schedule).__name__}"
        if schedule is not None and schedule.warmup_steps:
            rate += f", warm-up {schedule.warmup_steps}"
        loss, step = statistics.fmean(run["losses"][-epoch:]), statistics.median(run["seconds"]) * 1e6
        lines.append(f"{name:<10} {loss:>10.4f} {run['accuracy']:>14.1%} {step:>8.0f}  {engine:<7} {rate}")
    return "\n".join(lines)


def _words(values: torch.Tensor) -> list[str]:
    return [f"{value:8.5f}" for value in values.flatten().tolist()]
