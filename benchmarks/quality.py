"""Trains small networks with weights and states stored in low precision, and compares the losses with those of float32.

    python benchmarks/quality.py                 all of it, about half an hour on two cores
    python benchmarks/quality.py --only digits   one network: digits, text or sources
    python benchmarks/quality.py --out FILE      where the JSON goes; default benchmarks/results/quality_cpu.json

"digits" is the demo's convolutional network on handwritten digits. "text" and "sources" are a small transformer that learns,
character by character, the English of Python's own reference manual (`pydoc_data.topics`), and the first 2 MB of the Python
library's source files, in the order of their names. Each way of storing gets the same starts and the same batches, one for
each seed. All networks compute in float32; bfloat16 weights are widened first, and their gradients are bfloat16. The loss is
that of the last epoch (digits), or of characters that were not trained on.

A ratio is the mean over the seeds of the loss divided by that of float32 from the same seed; after it stands its standard
error. Two trainings that differ by rounding alone part after some hundred steps, so no ratio is known better than that.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sysconfig
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch
from environment import machine
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

from tristep import Trainer
from tristep.trainer.lr_scheduler import CosineScheduler

RESULTS = Path(__file__).parent / "results" / "quality_cpu.json"
RANDOM = {"stochastic_rounding": True}
STORED: dict[str, tuple[torch.dtype, dict[str, Any]]] = {  # type of the weights, options
    "float32": (torch.float32, {}),
    "8-bit states": (torch.float32, {"state_dtype": "8bit"}),
    "4-bit states": (torch.float32, {"state_dtype": "4bit"}),
    "24-bit weights": (torch.bfloat16, {"multi_precision": "split8"}),
    "24-bit weights, 8-bit states": (torch.bfloat16, {"multi_precision": "split8", "state_dtype": "8bit"}),
    "24-bit weights, 4-bit states": (torch.bfloat16, {"multi_precision": "split8", "state_dtype": "4bit"}),
    "bfloat16, 8-bit states, stochastic": (torch.bfloat16, {"state_dtype": "8bit", **RANDOM}),
    "bfloat16, stochastic": (torch.bfloat16, {"state_dtype": "bfloat16", **RANDOM}),
    "bfloat16, nearest": (torch.bfloat16, {"state_dtype": "bfloat16"}),
}
CONTEXT, WIDTH, HEADS, LAYERS, BATCH, STEPS = 64, 64, 4, 2, 24, 900


class Task(NamedTuple):
    """A training: how to make the network, what it learns from, and for how long.

    `batch` gives inputs and targets of a step, `last` those of the final loss: how many steps' losses are averaged, or 0 for
    that of `held_out`.
    """

    network: Callable[[], nn.Module]
    batch: Callable[[], tuple[Tensor, Tensor]]
    steps: int
    last: int
    held_out: Callable[[], list[tuple[Tensor, Tensor]]]
    optimizer: dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=tuple(TASKS), help="train one network only")
    parser.add_argument("--stored", choices=tuple(STORED), action="append", help="this way of storing; may be repeated")
    parser.add_argument("--out", type=Path, default=RESULTS, help="JSON file to write; what is not trained stays in it")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    some = arguments.only or arguments.stored
    results: dict[str, Any] = json.loads(arguments.out.read_text(encoding="utf-8")) if some else {"seconds": 0}
    results["machine"] = machine("cpu")
    print(results["machine"])
    start = time.perf_counter()
    with ProcessPoolExecutor(os.cpu_count(), get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        for name in [arguments.only] if arguments.only else TASKS:
            seeds, chosen = range(TASKS[name][1]), arguments.stored or list(STORED)
            jobs = [(name, stored, seed) for stored in chosen for seed in seeds]
            found = dict(zip(jobs, pool.map(train, *zip(*jobs, strict=True)), strict=True))
            losses = {stored: [found[name, stored, seed] for seed in seeds] for stored in chosen}
            exact = losses.get("float32") or results[name]["float32"]["losses"]
            print(f"\n{name}, {len(seeds)} seeds\n  {'stored':<36} {'loss':>8} {'to float32':>11} {'+-':>7}")
            for stored, own in losses.items():
                ratios = [loss / to for loss, to in zip(own, exact, strict=True)]
                error = statistics.stdev(ratios) / math.sqrt(len(ratios))
                row = {"losses": own, "ratio": statistics.fmean(ratios), "standard error": error}
                results.setdefault(name, {})[stored] = row
                print(f"  {stored:<36} {statistics.fmean(own):8.4f} {row['ratio']:11.4f} {error:7.4f}", flush=True)
            arguments.out.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    results["seconds"] += round(time.perf_counter() - start)
    arguments.out.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    print(f"\n{results['seconds']} s; written to {arguments.out}")


def train(name: str, stored: str, seed: int) -> float:
    """The final loss of one training."""
    dtype, options = STORED[stored]
    torch.manual_seed(seed)
    task = TASKS[name][0](seed)
    net = task.network().to(dtype)
    trainer = Trainer(net, "adamw", {**task.optimizer, **options})
    losses = []
    for _ in range(task.steps):
        inputs, targets = task.batch()
        loss = cross_entropy(_widened(net, inputs), targets)
        trainer.zero_grad()
        loss.backward()
        trainer.step(1)
        losses.append(loss.item())
    with torch.no_grad():
        held_out = [cross_entropy(_widened(net, inputs), targets).item() for inputs, targets in task.held_out()]
    return statistics.fmean(losses[-task.last :] if task.last else held_out)


def _widened(net: nn.Module, inputs: Tensor) -> Tensor:
    parameters = {name: parameter.float() for name, parameter in net.named_parameters()}
    return functional_call(net, parameters, inputs)


def digits(seed: int, epochs: int = 6) -> Task:
    """The demo's network and batches."""
    from tristep import demo

    data = demo.load(torch.device("cpu"))
    generator = torch.Generator().manual_seed(seed)
    orders = [torch.randperm(demo.TRAINING_IMAGES, generator=generator).split(demo.BATCH) for _ in range(epochs)]
    batches = iter([batch for order in orders for batch in order])
    steps = epochs * demo.EPOCH

    def network() -> nn.Module:
        net = demo.network()
        torch.manual_seed(seed)  # which the demo has set
        for layer in net:
            if hasattr(layer, "reset_parameters"):
                layer.reset_parameters()
        return net

    def batch() -> tuple[Tensor, Tensor]:
        chosen = next(batches)
        return data["images"][chosen], data["labels"][chosen]

    schedule = CosineScheduler(max_update=steps, base_lr=0.003, final_lr=0.0001, warmup_steps=20)
    return Task(network, batch, steps, demo.EPOCH, list, {"wd": 0.1, "lr_scheduler": schedule})


def text(seed: int, steps: int = STEPS) -> Task:
    """A transformer on the reference manual."""
    from pydoc_data import topics

    return on_characters("\n".join(topics.topics[name] for name in sorted(topics.topics)), seed, steps)


def sources(seed: int, steps: int = STEPS) -> Task:
    """A transformer on the library's sources."""
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    whole = "\n".join(path.read_text(encoding="utf-8", errors="replace") for path in paths)[: 2 * 2**20]
    return on_characters("".join(character for character in whole if character.isascii()), seed, steps)


def on_characters(whole: str, seed: int, steps: int) -> Task:
    """A transformer that predicts characters."""
    characters = {character: i for i, character in enumerate(sorted(set(whole)))}
    codes = torch.tensor([characters[character] for character in whole])
    kept = len(codes) // 10
    training, rest = codes[:-kept], codes[-kept:]
    generator = torch.Generator().manual_seed(seed)

    def windows(source: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
        both = torch.stack([source[start : start + CONTEXT + 1] for start in starts])
        return both[:, :-1], both[:, 1:].flatten()

    def batch() -> tuple[Tensor, Tensor]:
        return windows(training, torch.randint(0, len(training) - CONTEXT, (BATCH,), generator=generator))

    def held_out() -> list[tuple[Tensor, Tensor]]:
        return [windows(rest, starts) for starts in torch.arange(0, len(rest) - CONTEXT, CONTEXT).split(4 * BATCH)]

    schedule = CosineScheduler(max_update=steps, base_lr=0.003, final_lr=0.00015, warmup_steps=50)
    arguments = {"wd": 0.01, "epsilon": 1e-8, "lr_scheduler": schedule}
    return Task(lambda: Transformer(len(characters)), batch, steps, 0, held_out, arguments)


class Block(nn.Module):
    """Attention and two linear layers, each added to what it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.attention(self.before(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(scaled_dot_product_attention(*parts, is_causal=True).transpose(1, 2).flatten(-2))
        return x + self.down(gelu(self.up(self.between(x))))


class Transformer(nn.Module):
    """From characters, [n, CONTEXT], to scores of the next ones, [n CONTEXT, characters]."""

    def __init__(self, characters: int) -> None:
        super().__init__()
        self.characters, self.places = nn.Embedding(characters, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        for embedding in (self.characters, self.places):
            nn.init.normal_(embedding.weight, std=0.1)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.scores = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, characters, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.scores(self.norm(self.blocks(self.characters(x) + self.places.weight))).flatten(0, 1)


TASKS: dict[str, tuple[Callable[..., Task], int]] = {  # and numbers of seeds
    "digits": (digits, 10),
    "text": (text, 5),
    "sources": (sources, 5),
}


if __name__ == "__main__":
    main()
