"""The first minutes on several GPUs: what NCCL and more than one device can show and nothing else, in parts that end.

    python tests/gpu/gpu_multi.py                        all parts, a process for each GPU
    python tests/gpu/gpu_multi.py --parts equal bytes    some of them
    python tests/gpu/gpu_multi.py --cpu --ranks 3        the same in processes of gloo on this machine's CPU, and smaller

Results go to benchmarks/results/gpu_multi.json as soon as a part ends; with --cpu only to a file that --out names. It needs
torch and Triton only: no numba, and no pytest.

    equal      training with all-reduce, ZeRO-1 and compressed gradients: ranks end with equal bits; the first two with the
               weights of torch.optim.SGD on the whole batch
    unequal    ZeRO-1 with a rule of whole tensors, whose ranks have parts of different sizes, against all-reduce
    capture    a captured step with a collective of its own, against the same steps without a graph; with a store it is
               refused
    overlap    how many buckets are on their way when backward ends, and what a step takes: without sums, with sums after
               backward, with sums in backward, and in torch's DDP
    bytes      what a rank hands to collectives in a step, and of gloo what it sends, next to what a ring needs
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "benchmarks"), str(ROOT / "tests" / "helpers" / "trainer")]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.multiprocessing as mp  # noqa: E402
from environment import conditions, machine  # noqa: E402
from torch import nn  # noqa: E402

import tristep  # noqa: E402
from tristep.trainer.kvstore.buckets import GradientBuckets  # noqa: E402
from tristep.trainer.utils import distributed  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "gpu_multi.json"
WAYS: dict[str, dict[str, Any]] = {
    "all-reduce": {"update_on_kvstore": False},
    "ZeRO-1": {"update_on_kvstore": True},
    **{
        f"{kind}, {how}": {"update_on_kvstore": update, "compression_params": {"type": kind}}
        for kind in ("int8", "fp16")
        for how, update in (("all-reduce", False), ("ZeRO-1", True))
    },
}
ADAMW = {"learning_rate": 1e-3, "wd": 0.01}
SGD = {"learning_rate": 0.05, "momentum": 0.9, "wd": 0.01}
STEPS, SAMPLES = 6, 24  # samples are those of all ranks in a step


def equal(device: torch.device, scale: int) -> dict[str, Any]:
    reference, found = _reference(device), {}
    for way, options in WAYS.items():
        weights = _train(device, "sgd", SGD, options)
        _same_on_all_ranks(weights, way)
        off = float((weights - reference).abs().max() / reference.abs().max())
        if "compression_params" not in options and not off < 1e-4:
            raise AssertionError(f"{way}: weights differ from torch.optim.SGD's by {off:.1e} of the largest")
        found[way] = {"off torch.optim.SGD": off}
    return found


def unequal(device: torch.device, scale: int) -> dict[str, Any]:
    found = {}
    for optimizer in ("lamb", "muon"):
        arguments = {"learning_rate": 0.01}
        expected, trainers = _train(device, optimizer, arguments, WAYS["all-reduce"]), list[tristep.Trainer]()
        weights = _train(device, optimizer, arguments, WAYS["ZeRO-1"], trainers.append)
        _same_on_all_ranks(weights, optimizer)
        parts = [bucket.parts for bucket in trainers[0]._sync._buckets.buckets]
        if not any(len(set(sizes)) > 1 for sizes in parts):
            raise AssertionError(f"{optimizer}: all parts are equal, {parts}")
        off = float((weights - expected).abs().max() / expected.abs().max())
        if not off < 1e-4:
            raise AssertionError(f"{optimizer}: ZeRO-1's weights differ from all-reduce's by {off:.1e} of the largest")
        found[optimizer] = {"parts": parts, "off all-reduce": off}
    return found


def capture(device: torch.device, scale: int) -> dict[str, Any]:
    found, recorded = [], False
    for captured in (True, False):
        net = _net(device)
        trainer = tristep.Trainer(net, "adamw", dict(ADAMW), kvstore=None)

        def train(x: torch.Tensor, y: torch.Tensor, net: Any = net, trainer: Any = trainer) -> torch.Tensor:
            trainer.zero_grad(set_to_none=False)
            loss = nn.functional.mse_loss(net(x), y, reduction="sum")
            loss.backward()
            for param in net.parameters():
                dist.all_reduce(param.grad)
            trainer.step(SAMPLES)
            return loss

        step: Any = trainer.capture(train) if captured else train
        for k in range(STEPS):
            trainer.set_learning_rate(1e-3 / (k + 1))
            step(*_batch(k, device))
        found.append(_weights(net))
        recorded = recorded or (captured and step.is_recorded)
    _same_on_all_ranks(found[0], "captured")
    off = float((found[0] - found[1]).abs().max() / found[1].abs().max())
    if not off < 1e-4:
        raise AssertionError(f"captured steps lead to other weights: they differ by {off:.1e} of the largest")
    if recorded != (device.type == "cuda"):
        raise AssertionError(f"recorded is {recorded} on {device}")
    net = _net(device)
    try:
        tristep.Trainer(net, "adamw", dict(ADAMW), kvstore="dist_sync").capture(lambda: None)
    except RuntimeError as error:
        refused = str(error)
    else:
        raise AssertionError("capture() with a store of several processes is not refused")
    return {"recorded": recorded, "off uncaptured": off, "with a store": refused}


def overlap(device: torch.device, scale: int) -> dict[str, Any]:
    x = torch.randn(4 * scale, 64 * scale, device=device)

    def network() -> nn.Module:
        torch.manual_seed(0)
        width = 64 * scale
        return nn.Sequential(*(layer for _ in range(12) for layer in (nn.Linear(width, width), nn.Tanh()))).to(device)

    summed, alone = network(), network()
    params = list(summed.parameters())
    limit = 4 * (64 * scale) ** 2  # bytes of a layer
    buckets = GradientBuckets(params, bucket_bytes=limit, first_bucket_bytes=limit)
    ddp = nn.parallel.DistributedDataParallel(network(), gradient_as_bucket_view=True, bucket_cap_mb=limit / 2**20)
    started: list[int] = []

    def in_backward() -> None:
        summed(x).square().mean().backward()
        started.append(sum(bucket.started for bucket in buckets.buckets))
        buckets.finish([True] * len(params))

    def afterwards() -> None:
        with buckets.accumulate():
            summed(x).square().mean().backward()
        buckets.finish([True] * len(params))

    ways: dict[str, tuple[nn.Module, Callable[[], None]]] = {
        "no sums": (alone, lambda: alone(x).square().mean().backward()),
        "sums after backward": (summed, afterwards),
        "sums in backward": (summed, in_backward),
        "torch DDP": (ddp, lambda: ddp(x).square().mean().backward()),
    }
    times: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(4 + 20):
        for way, (net, run) in ways.items():
            net.zero_grad()
            times[way].append(_slowest(run, device))
    n_buckets = len(buckets.buckets)
    if not started[-1] > 1:
        raise AssertionError(f"when backward ended {started[-1]} of {n_buckets} sums had been started")
    found: dict[str, Any] = {way: statistics.median(each[4:]) for way, each in times.items()}
    return {"ms": found, "buckets": n_buckets, "started in backward": started[-1]}


def bytes_sent(device: torch.device, scale: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    counters = _counters() if dist.get_backend() == "gloo" and device.type == "cpu" else None
    ranks = dist.get_world_size()
    for way, options in WAYS.items():
        net = _net(device, 4096 * scale)
        trainer = tristep.Trainer(net, "adamw", dict(ADAMW), kvstore="dist_sync", **options)
        handed, sent = [], []
        for k in range(3):
            x = torch.randn(4, 7, device=device)
            before = counters() if counters else 0
            with _counted() as given:
                trainer.zero_grad()
                net(x).square().sum().backward()
                trainer.step(SAMPLES)
            _wait(device)
            dist.barrier()
            if k:  # the first step compares ranks and sends weights
                handed.append(sum(given))
                sent.append(counters() - before if counters else 0)
        elements = sum(param.numel() for param in net.parameters())
        ring = 2 * (ranks - 1) / ranks * 4 * elements
        found[way] = {"handed": min(handed), "of a ring": min(handed) / ring}
        if counters:
            found[way] |= {"sent": min(sent), "sent of a ring": min(sent) / ring}
            if not 0.98 < min(sent) / min(handed) < 1.2:
                raise AssertionError(f"{way}: {min(handed):.0f} bytes were handed over, and {min(sent)} sent")
    return found


PARTS: dict[str, Callable[[torch.device, int], dict[str, Any]]] = {
    "equal": equal,
    "unequal": unequal,
    "capture": capture,
    "overlap": overlap,
    "bytes": bytes_sent,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--cpu", action="store_true", help="processes of gloo on the CPU")
    parser.add_argument("--ranks", type=int, help="processes; as many as there are GPUs, or 2 with --cpu")
    parser.add_argument("--out", type=Path, help=f"JSON file to write; by default {RESULTS.name}, with --cpu none")
    arguments = parser.parse_args()
    ranks = arguments.ranks or (2 if arguments.cpu else torch.cuda.device_count())
    if not arguments.cpu and ranks > torch.cuda.device_count():
        parser.error(f"--ranks {ranks}: torch sees {torch.cuda.device_count()} GPUs")
    if ranks < 2:
        parser.error(f"torch sees {ranks} GPUs: it takes two, or --cpu")
    out = arguments.out or (None if arguments.cpu else RESULTS)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    failures = mp.get_context("spawn").SimpleQueue()
    mp.spawn(_rank, (ranks, port, arguments.cpu, arguments.parts, out, failures), ranks)
    return 0 if failures.empty() else 1


def _rank(rank: int, ranks: int, port: int, on_cpu: bool, parts: list[str], out: Path | None, failures: Any) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(ranks))
    os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(ranks))
    device = torch.device("cpu") if on_cpu else torch.device("cuda", rank)
    if on_cpu:
        torch.set_num_threads(1)
    else:
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if on_cpu else "cpu:gloo,cuda:nccl", timeout=timedelta(minutes=3))
    kind = device.type
    results: dict[str, Any] = {"machine": machine(kind), "conditions": conditions(kind), "ranks": ranks, "parts": {}}
    results["backend"] = dist.get_backend()
    for name in parts:
        begin = time.perf_counter()
        try:
            found: dict[str, Any] = PARTS[name](device, 1 if on_cpu else 32)
        except AssertionError as error:  # the other ranks have found the same, as they compare equal numbers
            found = {"failed": str(error)}
            failures.put(name)
        found["seconds"] = round(time.perf_counter() - begin, 1)
        results["parts"][name] = found
        if rank == 0:
            print(f"{name}: {json.dumps(found)}", flush=True)
            if out is not None:
                out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        dist.barrier()
    dist.destroy_process_group()


def _net(device: torch.device, width: int = 40) -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Linear(7, width), nn.Tanh(), nn.Linear(width, 30), nn.Tanh(), nn.Linear(30, 2)
    return nn.Sequential(*layers).to(device)


def _batch(step: int, device: torch.device, whole: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's part of a batch, or all of it."""
    rank, ranks = (0, 1) if whole else (dist.get_rank(), dist.get_world_size())
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(SAMPLES, 7, generator=generator), torch.randn(SAMPLES, 2, generator=generator)
    part = slice(rank * SAMPLES // ranks, (rank + 1) * SAMPLES // ranks)
    return x[part].to(device), y[part].to(device)


def _weights(net: nn.Module) -> torch.Tensor:
    return torch.cat([param.detach().flatten() for param in net.parameters()])


def _train(
    device: torch.device,
    optimizer: str,
    arguments: dict[str, Any],
    options: dict[str, Any],
    look: Callable[[tristep.Trainer], None] | None = None,
) -> torch.Tensor:
    net = _net(device)
    trainer = tristep.Trainer(net, optimizer, dict(arguments), kvstore="dist_sync", **options)
    for k in range(STEPS):
        x, y = _batch(k, device)
        trainer.zero_grad()
        nn.functional.mse_loss(net(x), y, reduction="sum").backward()
        trainer.step(SAMPLES)
    if look is not None:
        look(trainer)
    return _weights(net)


def _reference(device: torch.device) -> torch.Tensor:
    """The weights of one process with the whole batch, and torch's optimizer."""
    net = _net(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)
    for k in range(STEPS):
        x, y = _batch(k, device, whole=True)
        optimizer.zero_grad()
        (nn.functional.mse_loss(net(x), y, reduction="sum") / SAMPLES).backward()
        optimizer.step()
    return _weights(net)


def _same_on_all_ranks(weights: torch.Tensor, what: str) -> None:
    every = [torch.empty_like(weights) for _ in range(dist.get_world_size())]
    dist.all_gather(every, weights)
    unlike = [rank for rank, each in enumerate(every) if not torch.equal(each, every[0])]
    if unlike:
        raise AssertionError(f"{what}: ranks {unlike} have other weights than rank 0")


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _slowest(run: Callable[[], None], device: torch.device) -> float:
    """What the slowest rank takes, in ms, with the wait for its device."""
    _wait(device)
    dist.barrier()
    begin = time.perf_counter()
    run()
    _wait(device)
    took = torch.tensor([1e3 * (time.perf_counter() - begin)], device=device)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return took.item()


@contextmanager
def _counted() -> Iterator[list[float]]:
    """The bytes that this rank has to send at least for each collective of tristep: its share of a ring, or messages."""
    found, ranks = list[float](), dist.get_world_size()
    share = (ranks - 1) / ranks

    def wrapped(size: Callable[..., float], real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **settings: Any) -> Any:
            found.append(size(*args, **settings))
            return real(*args, **settings)

        return call

    def of_parts(output: Any, values: Any, *args: Any, sizes: Any = None, **others: Any) -> float:
        own = values.nbytes / ranks if sizes is None else sizes[1][dist.get_rank()] * values.itemsize
        return float(values.nbytes - own)

    counted: dict[str, Callable[..., float]] = {
        "all_reduce": lambda values, *_, **__: 2 * share * values.nbytes,
        "reduce_scatter": lambda output, values, *_, **__: share * values.nbytes,
        "all_gather": lambda output, values, *_, **__: (ranks - 1) * values.nbytes,
        "all_to_all": of_parts,
    }
    with ExitStack() as stack:
        for name, size in counted.items():
            stack.enter_context(mock.patch.object(distributed, name, wrapped(size, getattr(distributed, name))))
        yield found


def _counters() -> Callable[[], int] | None:
    """A function that counts what this process has sent over TCP; None where the system does not count."""
    if not hasattr(socket, "TCP_INFO"):
        return None
    from sent_bytes import bytes_sent as counted

    return counted


if __name__ == "__main__":
    sys.exit(main())
