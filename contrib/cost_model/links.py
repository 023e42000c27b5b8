"""Links between ranks, with nominal, given or measured figures, and the costs of collectives on them."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from ...kernels.messages import one_of
from ...trainer.validation import integer, number


class Link(NamedTuple):
    """A rank's link, on which it sends to one other rank at a time and receives as much.

    Attributes:
        bandwidth: bytes per second in each direction, > 0.
        latency: seconds from one message of a chain to the next, >= 0.
        name: the link's name. Default: "".
        measured: whether the figures have been measured; otherwise they are nominal. Default: False.
    """

    bandwidth: float
    latency: float
    name: str = ""
    measured: bool = False


# Nominal bandwidths in one direction times an assumed efficiency. Latencies are from NCCL's model of a ring's step (nccl:
# src/graph/tuning.cc, hwLat, Ring, Simple: NVLink 3.4, PCI 5.7, network 14 us); Ethernet's is an assumption for TCP, about
# twice the network's.
LINKS = {
    link.name: link
    for link in (
        Link(450e9 * 0.8, 3.4e-6, "nvlink"),  # NVIDIA's H100 SXM data sheet: NVLink, 900 GB/s in both directions together
        Link(31.5e9 * 0.8, 5.7e-6, "pcie4"),  # PCI-SIG: 16 lanes of 16 GT/s, 128b/130b coded
        Link(50e9 * 0.9, 14e-6, "ib400"),  # NVIDIA's ConnectX-7 data sheet: NDR InfiniBand, 400 Gb/s for each GPU
        Link(12.5e9 * 0.85, 30e-6, "eth100"),  # IEEE 802.3: 100 Gb/s Ethernet, for each GPU
    )
}


def parse_link(link: str | float | Link, argument: str = "link") -> Link:
    """Return the link that a user's argument describes.

    Args:
        link: a name in `LINKS`, a bandwidth in GB/s, text such as "12.5" (GB/s) or "12.5,30us" (with a latency in s, ms, us
            or ns; us without a unit), or a `Link`.
        argument: the name of `link` in messages. Default: "link".

    Raises:
        TypeError, ValueError: `link` is none of these.
    """
    if isinstance(link, Link):
        number(f"{argument}.bandwidth", link.bandwidth, above=0)
        number(f"{argument}.latency", link.latency, low=0)
        return link
    if isinstance(link, str) and link.strip().lower() in LINKS:
        return LINKS[link.strip().lower()]
    if not isinstance(link, str):
        return Link(number(argument, link, above=0) * 1e9, 0.0, f"{link:g} GB/s")
    bandwidth_text, _, latency = link.partition(",")
    latency = latency.strip()
    unit = next((unit for unit in ("us", "ms", "ns", "s") if latency.endswith(unit)), "")
    try:
        values = float(bandwidth_text), float(latency.removesuffix(unit) or 0.0)
    except ValueError:
        raise ValueError(
            f"{argument}={link!r}:{one_of(link, LINKS)}, or GB/s with or without a latency, such as '12.5' or '12.5,30us'"
        ) from None
    bandwidth = number(f"{argument}={link!r}: the bandwidth", values[0], above=0) * 1e9
    scale = {"s": 1.0, "ms": 1e-3, "": 1e-6, "us": 1e-6, "ns": 1e-9}[unit]
    return Link(bandwidth, number(f"{argument}={link!r}: the latency", values[1], low=0) * scale, link)


def measure_link(group: Any = None, sizes: Sequence[int] = (2**12, 2**15, 2**18, 2**21, 2**24), repeats: int = 5) -> Link:
    """Measure latency and bandwidth between the processes of a group by all-reduces; all of them must call it.

    The figures minimize the squared relative errors of a ring's time, 2 (N - 1) latency + 2 (N - 1) / N bytes / bandwidth,
    to the best time of each size. They are equal on all ranks. With NCCL they are for the current devices.

    Args:
        group: a process group of torch.distributed with at least two ranks. Default: None, the default group.
        sizes: at least two different numbers of bytes.
        repeats: the number of timings of each size. Default: 5.

    Raises:
        RuntimeError: there is no process group.
        ValueError: there is only one rank, or there are too few sizes.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError("measure_link() needs a process group: start with torchrun, and call init_process_group() before")
    ranks = dist.get_world_size(group)
    if ranks < 2:
        raise ValueError("measure_link() in a group of one process: there is no link to measure; start two or more")
    if len({integer("sizes", size, low=4) for size in sizes}) < 2:
        raise ValueError(f"sizes={sizes!r}: must be at least two different numbers")
    cuda = "nccl" in dist.get_backend(group)
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    best = torch.full((len(sizes),), math.inf, dtype=torch.float64)
    for k, size in enumerate(sizes):
        values = torch.zeros(size // 4, device=device)
        for _ in range(1 + integer("repeats", repeats, low=1)):  # the first one makes connections
            dist.all_reduce(torch.zeros(1, device=device), group=group)  # synchronizes the ranks
            if cuda:
                torch.cuda.synchronize()
            start = time.perf_counter()
            dist.all_reduce(values, group=group)
            if cuda:
                torch.cuda.synchronize()
            best[k] = min(best[k].item(), time.perf_counter() - start)
    times = best.to(device)
    dist.all_reduce(times, dist.ReduceOp.MAX, group=group)
    seconds = times.cpu().numpy()
    steps = 2 * (ranks - 1)
    terms = np.stack([np.full(len(sizes), steps), steps / ranks * np.array([size // 4 * 4 for size in sizes])], axis=1)
    terms = terms / seconds[:, None]
    (latency, per_byte), *_ = np.linalg.lstsq(terms, np.ones(len(sizes)), rcond=None)
    if latency < 0 or per_byte <= 0:  # noise has hidden one of the two: fit the other alone
        column = 1 if latency < 0 else 0
        alone = float(terms[:, column].sum() / (terms[:, column] ** 2).sum())
        latency, per_byte = (0.0, alone) if latency < 0 else (alone, 1e-15)
    return Link(float(1.0 / per_byte), float(latency), f"{dist.get_backend(group)} as it is here", measured=True)


class Transfer(NamedTuple):
    """The cost of a collective for a rank.

    Attributes:
        wire: bytes that the rank sends; with nodes, bytes that leave its node.
        inner: bytes that the rank sends within its node.
        seconds: the duration.
    """

    wire: float = 0.0
    inner: float = 0.0
    seconds: float = 0.0


class Network(NamedTuple):
    """Ranks and the links between them.

    Attributes:
        ranks: the number of ranks, >= 1.
        node: the number of ranks in each node, a divisor of `ranks`; 1 if all links are alike.
        link: the link between ranks, or between nodes.
        inner: the link within a node.
    """

    ranks: int
    node: int
    link: Link
    inner: Link

    def ring(self, size: float, phases: int) -> Transfer:
        """Return the cost of a ring: 1 phase is a reduce-scatter or an all-gather of `size` bytes, 2 are an all-reduce."""
        node, nodes = self.node, self.ranks // self.node
        inner, wire = phases * (node - 1) / node * size, phases * (nodes - 1) / nodes * size / node
        seconds = phases * (node - 1) * self.inner.latency + inner / self.inner.bandwidth
        seconds += phases * (nodes - 1) * self.link.latency + wire / self.link.bandwidth
        return Transfer(wire, inner, seconds)

    def all_to_all(self, sent: float, gathered: float) -> Transfer:
        """Return the cost of an all-to-all of `sent` bytes and an all-gather of `gathered` bytes, sent directly; 0: none."""
        n, size = self.ranks, sent + gathered
        hops = 1 if n <= 2 or not gathered else 2  # two ranks only need one all-gather
        wire, inner = (n - self.node) / n * size, (self.node - 1) / n * size
        between = hops * (n - self.node) * self.link.latency + wire / self.link.bandwidth
        within = hops * (self.node - 1) * self.inner.latency + inner / self.inner.bandwidth
        return Transfer(wire, inner, max(between, within))

    def all_gather(self, size: float) -> Transfer:
        """Return the cost of an all-gather of `size` bytes per rank, sent directly to each rank."""
        between = (self.ranks - self.node) * (self.link.latency + size / self.link.bandwidth)
        within = (self.node - 1) * (self.inner.latency + size / self.inner.bandwidth)
        return Transfer((self.ranks - self.node) * size, (self.node - 1) * size, max(between, within))
