"""Training steps in several gloo processes on this machine, compared with torch's DDP and ZeroRedundancyOptimizer.

    python benchmarks/distributed.py                    all of it, in two processes
    python benchmarks/distributed.py --ranks 4          in four
    python benchmarks/distributed.py --only mlp         one network: mlp, transformer or layers
    python benchmarks/distributed.py --json FILE        write the figures there, too

A step is forward, backward, the sum of the gradients over all ranks, and AdamW. All ways take their steps in turns in one
run, each on a copy of the same network; a time is the median over the rounds of the slowest rank's, a ratio the median over
the rounds of the ratio to the peer's time in the same round. Where other programs run, too, the ratio of the processors'
time of all ranks together says more.

Bytes are those that the loopback device counted while a way took its step, per rank, the least of all rounds, since other
programs may send, too. Next to them is what a ring needs: 2 (N - 1) / N times the bytes of all parameters.
"""

from __future__ import annotations

import argparse
import json
import operator
import os
import socket
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from environment import machine
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import tristep

PEER = {"buckets": "torch DDP", "sharded": "torch ZeRO"}
ADAMW = {"learning_rate": 1e-3, "wd": 0.01}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="processes; default 2")
    parser.add_argument("--rounds", type=int, default=15, help="steps of each way; default 15")
    parser.add_argument("--only", choices=tuple(NETWORKS), help="one network only")
    parser.add_argument("--json", type=Path, help="JSON file to write")
    arguments = parser.parse_args()
    results: dict[str, Any] = {"machine": machine("cpu"), "ranks": arguments.ranks}
    print(results["machine"])
    for name in [arguments.only] if arguments.only else NETWORKS:
        results[name] = _in_processes(name, arguments.ranks, arguments.rounds)
        _show(name, results[name])
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def _in_processes(name: str, ranks: int, rounds: int) -> dict[str, Any]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    answers = mp.get_context("spawn").SimpleQueue()
    mp.spawn(_measure, (name, ranks, rounds, port, answers), ranks)
    found: dict[str, Any] = answers.get()
    return found


def _measure(rank: int, name: str, ranks: int, rounds: int, port: int, answers: Any) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(ranks))
    dist.init_process_group("gloo")
    make, batch = NETWORKS[name]
    ways = {way: WAYS[way](make) for way in WAYS}
    inputs = batch(rank)
    times: dict[str, list[float]] = {way: [] for way in ways}
    busy: dict[str, list[float]] = {way: [] for way in ways}
    sent: dict[str, list[int]] = {way: [] for way in ways}
    for k in range(rounds + 3):
        for way, step in ways.items():
            dist.barrier()
            before = _sent_by_loopback()
            start, start_busy = time.perf_counter(), time.process_time()
            step(*inputs)
            slowest = torch.tensor([time.perf_counter() - start])
            together = torch.tensor([time.process_time() - start_busy])
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            dist.all_reduce(together)
            if k >= 3:  # buckets are created again, and kernels compiled, before
                times[way].append(slowest.item())
                busy[way].append(together.item())
                sent[way].append(_sent_by_loopback() - before)
    elements = sum(param.numel() for param in make().parameters())
    ring = 2 * (ranks - 1) / ranks * 4 * elements
    if rank == 0:
        found: dict[str, Any] = {"parameters": elements, "ring_bytes": ring}
        for way in ways:
            least = min(sent[way]) / ranks
            found[way] = {
                "seconds": statistics.median(times[way]),
                "busy_seconds": statistics.median(busy[way]),
                "bytes": least,
                "bytes_over_ring": least / ring,
            }
        for way, peer in PEER.items():
            ratios = [own / other for own, other in zip(times[way], times[peer], strict=True)]
            found[way]["time_over_peer"] = statistics.median(ratios)
            found[way]["busy_over_peer"] = statistics.median(map(operator.truediv, busy[way], busy[peer]))
            found[way]["quartiles"] = statistics.quantiles(ratios, n=4)[::2]
        answers.put(found)
    dist.barrier()
    dist.destroy_process_group()


def _show(name: str, found: dict[str, Any]) -> None:
    print(f"{name}: {found['parameters']:,} parameters, a ring sends {found['ring_bytes'] / 1e6:.1f} MB")
    for way in WAYS:
        figures = found[way]
        line = f"  {way:11} {1e3 * figures['seconds']:8.1f} ms"
        line += f"  {figures['bytes'] / 1e6:8.1f} MB, {figures['bytes_over_ring']:.4f} of a ring's"
        if way in PEER:
            low, high = figures["quartiles"]
            line += f"; time {figures['time_over_peer']:.3f} of {PEER[way]}'s ({low:.3f} to {high:.3f}), "
            line += f"processors' {figures['busy_over_peer']:.3f}"
        print(line)


def _sent_by_loopback() -> int:
    for line in Path("/proc/net/dev").read_text(encoding="ascii").splitlines():
        device, _, figures = line.partition(":")
        if device.strip() == "lo":
            return int(figures.split()[8])
    raise RuntimeError("there is no loopback device in /proc/net/dev")


Make = Callable[[], nn.Module]
Step = Callable[[Tensor, Tensor], None]


def _trainer(make: Make, sharded: bool = False) -> Step:
    net = make()
    trainer = tristep.Trainer(net, "adamw", dict(ADAMW), kvstore="dist_sync", update_on_kvstore=sharded)

    def step(x: Tensor, y: Tensor) -> None:
        net.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        trainer.step(dist.get_world_size())

    return step


def _ddp(make: Make, zero: bool = False) -> Step:
    net = DistributedDataParallel(make(), gradient_as_bucket_view=True)
    settings: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.01, "fused": True}
    adamw: torch.optim.Optimizer
    if zero:
        adamw = ZeroRedundancyOptimizer(net.parameters(), torch.optim.AdamW, **settings)
    else:
        adamw = torch.optim.AdamW(net.parameters(), **settings)

    def step(x: Tensor, y: Tensor) -> None:
        net.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        adamw.step()

    return step


def _mlp() -> nn.Module:
    torch.manual_seed(0)
    layers = [layer for _ in range(9) for layer in (nn.Linear(1200, 1200), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(1200, 10))


def _transformer() -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(384, 6, 1536, dropout=0.0, batch_first=True, norm_first=True)
    return nn.Sequential(
        nn.Embedding(4096, 384), nn.TransformerEncoder(layer, 6, enable_nested_tensor=False), _Last(), nn.Linear(384, 4096)
    )


def _layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(16, 16) for _ in range(150)))


class _Last(nn.Module):
    """The last place of a sequence."""

    def forward(self, x: Tensor) -> Tensor:
        return x[:, -1]


def _random(shape: tuple[int, ...], classes: int, tokens: int = 0) -> Callable[[int], tuple[Tensor, Tensor]]:
    def batch(rank: int) -> tuple[Tensor, Tensor]:
        torch.manual_seed(rank)
        x = torch.randint(tokens, shape) if tokens else torch.randn(shape)
        return x, torch.randint(classes, shape[:1])

    return batch


NETWORKS: dict[str, tuple[Make, Callable[[int], tuple[Tensor, Tensor]]]] = {
    "mlp": (_mlp, _random((32, 1200), 10)),
    "transformer": (_transformer, _random((4, 32), 4096, tokens=4096)),
    "layers": (_layers, _random((4, 16), 16)),  # where the host's work for each parameter is what costs
}
WAYS: dict[str, Callable[[Make], Step]] = {
    "buckets": _trainer,
    "torch DDP": _ddp,
    "sharded": partial(_trainer, sharded=True),
    "torch ZeRO": lambda make: _ddp(make, zero=True),
}

if __name__ == "__main__":
    main()
