"""Trains two small networks by two workers that compress their gradients, and compares what the networks learned.

    python benchmarks/compression_quality.py                 all of it, over an hour on two cores
    python benchmarks/compression_quality.py --only digits   one network: digits or text
    python benchmarks/compression_quality.py --seeds 1       fewer trainings
    python benchmarks/compression_quality.py --out FILE      where the JSON goes

The networks and batches are those of `quality.py`, but training is longer (40 epochs, 8,100 steps): with 1 % of the values
sent at a time, a value waits for a hundred steps on average. Each batch is cut into two halves, one for each worker, in one
process: a worker encodes the gradient of its half, with what was left of earlier ones or without, and both messages are
decoded and averaged, which is what `CompressedAllReduce` does for two ranks.

Every way gets the same starts, batches and rates, which are not tuned for it; the threshold of "2bit" is, by the accuracy of
a few trainings from the first of these starts, since gradients here are means over a batch, and far smaller than MXNet's
default of 0.5: that flatters it a little. "adamw" is how
`quality.py` trains; "sgd", with momentum 0.9, is what error feedback is proved for.

Accuracy is the share of test images recognised (digits), or of next characters of text that was not trained on (text), the
mean over the seeds. The goal is to be at most 0.01 below that without compression.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from environment import machine
from quality import TASKS
from timing import write
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from tristep import Trainer
from tristep.kvstore import create_compressor
from tristep.trainer.lr_scheduler import CosineScheduler

RESULTS = Path(__file__).parent / "results" / "compression_quality_cpu.json"
WORKERS = 2
SEEDS = {"digits": 5, "text": 2}
LENGTHS = {"digits": 40, "text": 8100}  # epochs; steps
OPTIMIZERS = {"digits": ("sgd", "adamw"), "text": ("adamw",)}
RATE = 0.03  # of "sgd"
THRESHOLDS = {("digits", "sgd"): 0.2, ("digits", "adamw"): 0.05, ("text", "adamw"): 0.01}  # of "2bit"
WAYS: dict[str, dict[str, Any]] = {"uncompressed": {}} | {
    kind + ("" if feedback else ", no feedback"): {"type": kind, "error_feedback": feedback}
    for kind in ("2bit", "sign", "int8", "topk")
    for feedback in (True, False)
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=tuple(TASKS), help="train one network only")
    parser.add_argument("--optimizer", choices=("adamw", "sgd"), help="train by this optimizer only")
    parser.add_argument("--seeds", type=int, help="trainings of each kind")
    parser.add_argument("--out", type=Path, default=RESULTS, help="JSON file to write")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, Any] = {"machine": machine("cpu")}
    print(results["machine"])
    start = time.perf_counter()
    with ProcessPoolExecutor(os.cpu_count(), get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        for name in [arguments.only] if arguments.only else TASKS:
            for optimizer in [arguments.optimizer] if arguments.optimizer else OPTIMIZERS[name]:
                seeds = range(arguments.seeds or SEEDS[name])
                jobs = [(name, optimizer, way, seed) for way in WAYS for seed in seeds]
                found = dict(zip(jobs, pool.map(train, *zip(*jobs, strict=True)), strict=True))
                threshold = THRESHOLDS[name, optimizer]
                print(f"\n{name}, {optimizer}, {len(seeds)} seeds; threshold of 2bit {threshold}")
                print(f"  {'':<22}{'accuracy':>9}{'to uncompressed':>17}")
                means = {way: statistics.fmean(found[name, optimizer, way, seed] for seed in seeds) for way in WAYS}
                for way, mean in means.items():
                    print(f"  {way:<22}{mean:9.4f}{mean - means['uncompressed']:+17.4f}", flush=True)
                settings = {"threshold of 2bit": threshold, "seeds": len(seeds)}
                results[f"{name}, {optimizer}"] = settings | {"accuracy": means}
    results["seconds"] = round(time.perf_counter() - start)
    write(arguments.out, results)
    print(f"\n{results['seconds']} s; written to {arguments.out}")


def train(name: str, optimizer: str, way: str, seed: int) -> float:
    """The accuracy after one training."""
    torch.manual_seed(seed)
    task = TASKS[name][0](seed, LENGTHS[name])
    net = task.network()
    settings = task.optimizer
    if optimizer == "sgd":
        schedule = CosineScheduler(task.steps, RATE, final_lr=RATE / 100, warmup_steps=task.steps // 20)
        settings = {"momentum": 0.9, "lr_scheduler": schedule}
    trainer = Trainer(net, optimizer, settings)
    threshold = {"threshold": THRESHOLDS[name, optimizer]} if WAYS[way].get("type") == "2bit" else {}
    exchange = Exchange(WAYS[way] | threshold, sum(parameter.numel() for parameter in net.parameters()))
    params = list(net.parameters())
    for _ in range(task.steps):
        inputs, targets = task.batch()
        found = []
        for part in zip(inputs.tensor_split(WORKERS), targets.tensor_split(_starts(inputs, targets)), strict=True):
            for parameter in params:
                parameter.grad = None
            cross_entropy(net(part[0]), part[1]).backward()
            found.append(torch.cat([parameter.grad.flatten() for parameter in params]))  # type: ignore[union-attr]
        average = exchange(found)
        for parameter, gradient in zip(params, average.split([each.numel() for each in params]), strict=True):
            parameter.grad = gradient.view_as(parameter)
        trainer.step(1)
    return accuracy(net, held_out(name, task))


class Exchange:
    """The average of the workers' gradients as all of them get it."""

    def __init__(self, params: dict[str, Any], n: int) -> None:
        self.compressor = create_compressor(params) if params else None
        self.residuals = torch.zeros(WORKERS, n)

    def __call__(self, gradients: list[Tensor]) -> Tensor:
        if self.compressor is None:
            return torch.stack(gradients).mean(dim=0)
        total = torch.zeros_like(gradients[0])
        for gradient, residual in zip(gradients, self.residuals, strict=True):
            x = gradient + residual
            sent = self.compressor.decode(self.compressor.encode(x), x.numel())
            if self.compressor.error_feedback:
                residual.copy_(x - sent)
            total += sent
        return total / WORKERS


def _starts(inputs: Tensor, targets: Tensor) -> tuple[int, ...]:
    """Where the targets of each worker but the first begin: there may be several for each input."""
    each, ends = len(targets) // len(inputs), [len(part) for part in inputs.tensor_split(WORKERS)]
    return tuple(each * sum(ends[:k]) for k in range(1, WORKERS))


def held_out(name: str, task: Any) -> Iterable[tuple[Tensor, Tensor]]:
    """What the accuracy is taken of."""
    if name == "text":
        return task.held_out()
    from tristep import demo

    data = demo.load(torch.device("cpu"))
    return [(data["test images"], data["test labels"])]


@torch.no_grad()
def accuracy(net: nn.Module, batches: Iterable[tuple[Tensor, Tensor]]) -> float:
    """The share of targets that get the largest score."""
    right = [(net(inputs).argmax(dim=1) == targets).float() for inputs, targets in batches]
    return torch.cat(right).mean().item()


if __name__ == "__main__":
    main()
