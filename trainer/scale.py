"""What training on many GPUs costs, by a model: bytes on the wire, memory and time of a step, for each way to do it.

A message takes the link's latency and its bytes over the bandwidth (the alpha-beta model); a kernel takes the bytes that it
reads and writes over the memory's bandwidth. Memory follows from the optimizer's own rule and storage. `plan` makes the rows
of a table, `table` writes them, and `measure_link` finds latency and bandwidth of the processes there are.

Left out: what a network does under load, that buckets have latencies of their own, activations, and the arithmetic of rules
of whole matrices.

Sources: Thakur et al. (2005), "Optimization of collective communication operations in MPICH" (the costs of collectives);
Rajbhandari et al. (2020), "ZeRO" (what is kept where).
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from ..kernels import Rule, storage
from ..kernels.compress import CODES, TILE
from .optimizer import Optimizer, RuleOptimizer, create
from .validation import choice, did_you_mean, integer, number

__all__ = ["LINKS", "MEMORIES", "Link", "Strategy", "measure_link", "parse_link", "plan", "table"]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
OTHER_NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp64": "float64"}
SIDE = 4096  # of the square matrices that a bare number of parameters is taken to be
BACKWARD = 2 / 3  # its share of forward and backward: two products of matrices for each one


class Link(NamedTuple):
    """What a rank sends through, to one other rank at a time, while it receives as much.

    Attributes:
        bandwidth: bytes per second in each direction, > 0.
        latency: seconds from one message of a chain to the next, >= 0.
        name: what it is called.
        measured: whether the figures are measured here, or nominal.
    """

    bandwidth: float
    latency: float
    name: str = ""
    measured: bool = False


# Nominal figures in one direction times the efficiency that is taken for it. Latencies are those that NCCL's own model of a
# ring takes for a step (nccl: src/graph/tuning.cc, hwLat, Ring, Simple: NVLink 3.4, PCI 5.7, network 14 us); that of
# Ethernet is an assumption for TCP, about twice as much.
LINKS = {
    link.name: link
    for link in (
        Link(450e9 * 0.8, 3.4e-6, "nvlink"),  # NVIDIA's H100 SXM data sheet: NVLink, 900 GB/s in both directions together
        Link(31.5e9 * 0.8, 5.7e-6, "pcie4"),  # PCI-SIG: 16 lanes of 16 GT/s, 128b/130b coded
        Link(50e9 * 0.9, 14e-6, "ib400"),  # NVIDIA's ConnectX-7 data sheet: NDR InfiniBand, 400 Gb/s for each GPU
        Link(12.5e9 * 0.85, 30e-6, "eth100"),  # IEEE 802.3: 100 Gb/s Ethernet, for each GPU
    )
}
# Bytes per second: the data sheets' memory bandwidths, times 0.9, about what a copy reaches (an H200: 4.3 of 4.8 TB/s).
MEMORIES = {"a100": 2.039e12 * 0.9, "h100": 3.35e12 * 0.9, "h200": 4.8e12 * 0.9, "b200": 8.0e12 * 0.9}


TOPK, RANK = 0.01, 4  # the share that "topk" sends; the rank of "powersgd"


@dataclasses.dataclass(frozen=True)
class Strategy:
    """One way to train, and what a step of it costs a rank by the model. Bytes and seconds.

    Attributes:
        name: what it does.
        kvstore: the arguments of `Trainer` that ask for it; empty where tristep has no such store.
        wire: bytes that a rank sends in a step; with nodes those that leave its node.
        inner: bytes that a rank sends within its node, if there are nodes.
        weights, gradients, states, buffers, residuals: bytes of memory; `states` with masters, `residuals` what compression
            keeps back for later steps.
        communication: seconds on the wire.
        codes: seconds of compressing and adding up.
        update: seconds of the optimizer.
        exposed: seconds of communication that the given backward pass does not hide.
        step: seconds: exposed communication, codes, update, and forward and backward if given.
        verdict: for compression whether it pays, beside the plain all-reduce.
    """

    name: str
    kvstore: str
    wire: float
    inner: float
    weights: float
    gradients: float
    states: float
    buffers: float
    residuals: float
    communication: float
    codes: float
    update: float
    exposed: float
    step: float
    verdict: str = ""

    @property
    def memory(self) -> float:
        """Bytes of memory of a rank, in all."""
        return self.weights + self.gradients + self.states + self.buffers + self.residuals


def plan(
    params: float | torch.nn.Module | Iterable[Any],
    gpus: int,
    link: str | float | Link,
    *,
    optimizer: str | Optimizer = "adam",
    optimizer_params: Mapping[str, Any] | None = None,
    weights: str = "float32",
    gpus_per_node: int | None = None,
    inner: str | float | Link = "nvlink",
    memory: str | float = "h100",
    compute_ms: float | None = None,
    servers: int = 1,
) -> list[Strategy]:
    """What a step costs with each strategy, by the model of this file. Nothing is allocated.

    Args:
        params: how many parameters (taken to be square matrices of 4096, and a vector of the rest), a module, or tensors or
            shapes.
        gpus: ranks, >= 1.
        link: between ranks: a name of `LINKS`, a bandwidth in GB/s, text such as "12.5,30us", or a `Link`.
        optimizer, optimizer_params: as for `Trainer`; an optimizer that is a rule.
        weights: the type of weights and gradients: "float32", "bfloat16", "float16" or "float64"; of a module or of tensors
            it is their own.
        gpus_per_node: ranks in each node, a divisor of `gpus`; None where all links are alike. Plain collectives then go
            first within nodes and then between them, each GPU with a link of its own; compressed messages go straight to
            their rank.
        inner: the link within a node.
        memory: a GPU's memory, a name of `MEMORIES` or GB/s, also as text.
        compute_ms: milliseconds of forward and backward, of which two thirds are backward, behind which communication that
            needs no more than gradients hides; None hides nothing and counts neither.
        servers: processes of the parameter server.

    Returns:
        One `Strategy` for each: plain first.

    Raises:
        TypeError, ValueError: an argument that does not fit.

    Example:
        >>> import tristep
        >>> rows = tristep.plan(124.4e6, 8, "pcie4")
        >>> round(rows[0].wire / 1e6)
        871
    """
    model = _Model(
        params, gpus, link, optimizer, optimizer_params, weights, gpus_per_node, inner, memory, compute_ms, servers
    )
    return model.rows()


class _Cost(NamedTuple):
    wire: float = 0.0
    inner: float = 0.0
    seconds: float = 0.0


class _Model:
    def __init__(
        self,
        params: Any,
        gpus: Any,
        link: Any,
        optimizer: Any,
        optimizer_params: Any,
        weights: Any,
        gpus_per_node: Any,
        inner: Any,
        memory: Any,
        compute_ms: Any,
        servers: Any,
    ) -> None:
        self.ranks = integer("gpus", gpus, low=1)
        self.link, self.inner = parse_link(link, "link"), parse_link(inner, "inner")
        self.node = 1 if gpus_per_node is None else integer("gpus_per_node", gpus_per_node, low=1)
        if self.ranks % self.node:
            raise ValueError(f"gpus_per_node={gpus_per_node!r}: must be a divisor of gpus={gpus!r}")
        self.memory = _memory(memory)
        self.compute = None if compute_ms is None else number("compute_ms", compute_ms, low=0) / 1e3
        self.servers = integer("servers", servers, low=1)
        dtype = DTYPES[choice("weights", weights, DTYPES, other_names=OTHER_NAMES)]
        self.optimizer: Any = create(optimizer, **dict(optimizer_params or {}))
        if not isinstance(self.optimizer, RuleOptimizer):
            raise TypeError(f"optimizer={optimizer!r}: must be one that is a rule, since memory follows from the rule")
        self.tensors = _tensors(params, dtype)
        for i, tensor in enumerate(self.tensors):
            self.optimizer.check_storage(f"params[{i}]", tensor)
        self.n = sum(tensor.numel() for tensor in self.tensors)
        self.w = float(sum(tensor.numel() * tensor.itemsize for tensor in self.tensors))
        self.s = self._state_bytes(self.tensors)

    def rows(self) -> list[Strategy]:
        plain = self._plain()
        return [
            plain,
            self._sharded(),
            self._all_sharded(),
            self._served(),
            *(self._judged(row, plain) for row in self._coded()),
        ]

    def _state_bytes(self, tensors: Sequence[torch.Tensor]) -> float:
        """Bytes of states and masters, as the optimizer makes them."""
        made = self.optimizer.states_for(tensors)
        masters = [(tensor, self.optimizer.master_dtype(tensor)) for tensor in tensors]
        beside = sum(tensor.numel() * dtype.itemsize for tensor, dtype in masters if dtype is not None)
        return float(sum(state.numel() * state.itemsize for row in made for state in row) + beside)

    def _own_state_bytes(self) -> float:
        """Those of one rank of `ranks` that each have a part of every parameter, or, of whole matrices, some of them."""
        if self.ranks == 1 or not isinstance(self.optimizer.composed_rule, Rule):
            return self.s / self.ranks
        kinds: dict[torch.dtype, int] = {}
        for tensor in self.tensors:
            kinds[tensor.dtype] = kinds.get(tensor.dtype, 0) + tensor.numel()
        return self._state_bytes([torch.empty(-(-n // self.ranks), dtype=kind, device="meta") for kind, n in kinds.items()])

    def _update_seconds(self, share: float = 1.0) -> float:
        """What an update reads and writes, over the memory's bandwidth."""
        rule, total = self.optimizer.composed_rule, 0.0
        for reduction in rule.reductions if isinstance(rule, Rule) else ():
            total += (
                ("w" in reduction.reads) * self.w + ("g" in reduction.reads) * self.w + ("state" in reduction.reads) * self.s
            )
        total += self.w + 2 * self.s  # gradients, states and masters
        for tensor in self.tensors:
            master = self.optimizer.master_dtype(tensor)
            through_master = master is not None and storage.kind_of(tensor.dtype, master) == storage.MasterKind.FULL
            total += tensor.numel() * tensor.itemsize * (1 if through_master else 2)
        return total * share / self.memory

    def _chain(self, size: float, phases: int) -> _Cost:
        """Rings: one phase is a reduce-scatter or an all-gather of so many bytes, two are an all-reduce."""
        node, nodes = self.node, self.ranks // self.node
        inner, wire = phases * (node - 1) / node * size, phases * (nodes - 1) / nodes * size / node
        seconds = phases * (node - 1) * self.inner.latency + inner / self.inner.bandwidth
        seconds += phases * (nodes - 1) * self.link.latency + wire / self.link.bandwidth
        return _Cost(wire, inner, seconds)

    def _straight(self, forth: float, back: float) -> _Cost:
        """An all-to-all of so many bytes and an all-gather of so many, every rank sending to every other."""
        n, size = self.ranks, forth + back
        hops = 1 if n <= 2 else 2  # two ranks only need one all-gather
        wire, inner = (n - self.node) / n * size, (self.node - 1) / n * size
        between = hops * (n - self.node) * self.link.latency + wire / self.link.bandwidth
        within = hops * (self.node - 1) * self.inner.latency + inner / self.inner.bandwidth
        return _Cost(wire, inner, max(between, within))

    def _row(
        self,
        name: str,
        kvstore: str,
        costs: Sequence[tuple[_Cost, float]],
        update: float,
        codes: float = 0.0,
        *,
        weights: float | None = None,
        gradients: float | None = None,
        states: float | None = None,
        buffers: float = 0.0,
        residuals: float = 0.0,
    ) -> Strategy:
        """`costs` are those of each collective, with the share of forward and backward that may hide it."""
        wire, inner, seconds = (sum(cost[k] for cost, _ in costs) for k in range(3))
        hidden = 0.0
        for share in {share for _, share in costs}:
            together = sum(cost.seconds for cost, each in costs if each == share)
            hidden += min(together, share * (self.compute or 0.0))
        exposed = seconds - hidden
        return Strategy(
            name=name,
            kvstore=kvstore,
            wire=wire,
            inner=inner,
            weights=self.w if weights is None else weights,
            gradients=self.w if gradients is None else gradients,
            states=self.s if states is None else states,
            buffers=buffers,
            residuals=residuals,
            communication=seconds,
            codes=codes,
            update=update,
            exposed=exposed,
            step=exposed + codes + update + (self.compute or 0.0),
        )

    def _plain(self) -> Strategy:
        costs = [(self._chain(self.w, 2), BACKWARD)]
        return self._row("all-reduce", "kvstore='dist_sync'", costs, self._update_seconds())

    def _sharded(self) -> Strategy:
        own = self.w / self.ranks
        return self._row(
            "ZeRO-1",
            "kvstore='dist_sync', update_on_kvstore=True",
            [(self._chain(self.w, 1), BACKWARD), (self._chain(self.w, 1), 0.0)],
            self._update_seconds(1 / self.ranks),
            states=self._own_state_bytes(),
            buffers=own if self.ranks > 1 else 0.0,
        )

    def _all_sharded(self) -> Strategy:
        own = self.w / self.ranks
        return self._row(
            "ZeRO-3 (FSDP)",  # besides, the layer at hand is there as a whole
            "",
            [(self._chain(self.w, 1), 1 - BACKWARD), (self._chain(self.w, 2), BACKWARD)],
            self._update_seconds(1 / self.ranks),
            weights=own,
            gradients=own,
            states=self._own_state_bytes(),
        )

    def _served(self) -> Strategy:
        """All workers at once: each server's link carries what all of them send to it."""
        crowd = max(1.0, self.ranks / self.servers)
        way = _Cost(self.w, 0.0, self.servers * self.link.latency + crowd * self.w / self.link.bandwidth)
        back = _Cost(0.0, 0.0, way.seconds)  # sent by the servers
        return self._row(
            f"parameter server ({self.servers})",
            "kvstore='dist_async'",
            [(way, BACKWARD), (back, 0.0)],
            self._update_seconds(1 / self.servers) * self.ranks,  # one for each worker's gradients
            states=0.0,
        )

    def _coded(self) -> Iterable[Strategy]:
        n, ranks, memory = self.n, self.ranks, self.memory
        update, feedback = self._update_seconds(), 8 * n  # the residual, read and written
        for name, code in CODES.items():
            forth = back = n * code.size(TILE) / TILE
            votes = code.vote is not None and ranks > 2  # then the sum of the votes itself is sent back
            if votes:
                back = n * code.vote_bits(ranks) / 8
            moved = self.w + feedback + forth  # coding
            residuals = 4.0 * n
            if ranks > 2:
                moved += forth + back / ranks  # adding up a part of all ranks
                if not votes:
                    moved, residuals = moved + feedback / ranks, residuals + 4 * n / ranks
                moved += back + self.w  # decoding
            else:
                moved += ranks * forth + self.w
            yield self._row(
                name,
                f"compression_params={{'type': '{name}'}}",
                [(self._straight(forth, back), BACKWARD)],
                update,
                moved / memory if ranks > 1 else 0.0,
                buffers=(2 * forth + back + back / ranks if ranks > 2 else (1 + ranks) * forth) if ranks > 1 else 0.0,
                residuals=residuals if ranks > 1 else 0.0,
            )
        for name, size, cost, moved in self._chosen():
            yield self._row(
                name,
                f"compression_params={{'type': '{name.split()[0]}'}}",
                [(cost, BACKWARD)],
                update,
                (self.w + feedback + moved) / memory if ranks > 1 else 0.0,
                buffers=size if ranks > 1 else 0.0,
                residuals=4.0 * n if ranks > 1 else 0.0,
            )

    def _chosen(self) -> Iterable[tuple[str, float, _Cost, float]]:
        """For those that send no code of every value: name, bytes of buffers, cost, and bytes that kernels move besides."""
        n, ranks, node = self.n, self.ranks, self.node
        count = math.ceil(TOPK * n)
        sent = 8.0 * count  # places and values
        between = (ranks - node) * (self.link.latency + sent / self.link.bandwidth)
        within = (node - 1) * (self.inner.latency + sent / self.inner.bandwidth)
        cost = _Cost((ranks - node) * sent, (node - 1) * sent, max(between, within))
        # finding the largest reads all twice or so; the sum is written, and added to at the places of all
        yield f"topk {TOPK:.0%}", (1 + ranks) * sent, cost, 8.0 * n + 4.0 * n + 2 * ranks * sent
        values = matrices = 0
        for tensor in self.tensors:
            rows, columns = (
                (tensor.shape[0], tensor.numel() // tensor.shape[0]) if tensor.dim() > 1 and tensor.numel() else (0, 0)
            )
            factors = RANK * (rows + columns)
            if 0 < factors < tensor.numel():
                values, matrices = values + factors, matrices + tensor.numel()
            else:
                values += tensor.numel()
        # two products that read a matrix each, and the one that writes it
        yield f"powersgd {RANK}", 4.0 * values, self._chain(4.0 * values, 2), 12.0 * matrices

    def _judged(self, row: Strategy, plain: Strategy) -> Strategy:
        saved = plain.step - row.step
        if saved <= 0:
            verdict = "on this link compression costs more than it saves"
        else:
            verdict = f"saves {_seconds(saved)} of {_seconds(plain.step)} a step ({saved / plain.step:.0%})"
        return dataclasses.replace(row, verdict=verdict)


def parse_link(link: str | float | Link, argument: str = "link") -> Link:
    """A link by its name, by GB/s, or as text "GB/s" or "GB/s,latency", the latency in us or with "s", "ms", "us" or "ns".

    Args:
        argument: what messages call it.

    Raises:
        TypeError, ValueError: it is none.
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
        near = did_you_mean(link, LINKS)
        raise ValueError(
            f"{argument}={link!r}: must be one of {', '.join(map(repr, LINKS))}, or GB/s with or without a latency, such as "
            f"'12.5' or '12.5,30us'.{near}"
        ) from None
    bandwidth = number(f"{argument}={link!r}: the bandwidth", values[0], above=0) * 1e9
    scale = {"s": 1.0, "ms": 1e-3, "": 1e-6, "us": 1e-6, "ns": 1e-9}[unit]
    return Link(bandwidth, number(f"{argument}={link!r}: the latency", values[1], low=0) * scale, link)


def measure_link(group: Any = None, sizes: Sequence[int] = (2**12, 2**15, 2**18, 2**21, 2**24), repeats: int = 5) -> Link:
    """Latency and bandwidth of the processes of a group, from all-reduces of several sizes; to be called by all of them.

    The least squares of the relative errors of 2 (N - 1) latency + 2 (N - 1) / N bytes / bandwidth, the ring's time, to the
    best time of each size; the same numbers on all ranks. With NCCL it is that between the current devices.

    Args:
        group: a process group of torch.distributed, of two ranks at least; None for the default one.
        sizes: bytes, two different ones at least.
        repeats: how often each is timed.

    Raises:
        RuntimeError: there is no process group.
        ValueError: one rank only, or too few sizes.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError("measure_link() needs a process group: start with torchrun, and call init_process_group() before")
    ranks = dist.get_world_size(group)
    if ranks < 2:
        raise ValueError("measure_link() in a group of one process: there is no link to measure; start two or more")
    if len({integer("sizes", size, low=4) for size in sizes}) < 2:
        raise ValueError(f"sizes={sizes!r}: must be two different ones at least")
    cuda = "nccl" in dist.get_backend(group)
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    best = torch.full((len(sizes),), math.inf, dtype=torch.float64)
    for k, size in enumerate(sizes):
        values = torch.zeros(size // 4, device=device)
        for _ in range(1 + integer("repeats", repeats, low=1)):  # the first one makes connections
            dist.all_reduce(torch.zeros(1, device=device), group=group)  # so that all begin together
            if cuda:
                torch.cuda.synchronize()
            start = time.perf_counter()
            dist.all_reduce(values, group=group)
            if cuda:
                torch.cuda.synchronize()
            best[k] = min(best[k].item(), time.perf_counter() - start)
    times = best.to(device)
    dist.all_reduce(times, dist.ReduceOp.MAX, group=group)
    found = times.cpu().numpy()
    steps = 2 * (ranks - 1)
    terms = np.stack([np.full(len(sizes), steps), steps / ranks * np.array([size // 4 * 4 for size in sizes])], axis=1)
    terms = terms / found[:, None]
    (latency, per_byte), *_ = np.linalg.lstsq(terms, np.ones(len(sizes)), rcond=None)
    if latency < 0 or per_byte <= 0:  # noise has hidden one of the two: the other one alone
        column = 1 if latency < 0 else 0
        alone = float(terms[:, column].sum() / (terms[:, column] ** 2).sum())
        latency, per_byte = (0.0, alone) if latency < 0 else (alone, 1e-15)
    return Link(float(1.0 / per_byte), float(latency), f"{dist.get_backend(group)} as it is here", measured=True)


def table(rows: Sequence[Strategy]) -> str:
    """The rows as text, one line for each, and below what is to be said of compression."""
    nodes, overlap = any(row.inner for row in rows), any(row.exposed != row.communication for row in rows)
    columns: list[tuple[str, Any]] = [("strategy", lambda row: row.name), ("sent", lambda row: _bytes(row.wire))]
    if nodes:
        columns.append(("in node", lambda row: _bytes(row.inner)))
    columns += [
        ("weights", lambda row: _bytes(row.weights)),
        ("grads", lambda row: _bytes(row.gradients)),
        ("states", lambda row: _bytes(row.states)),
        ("buffers", lambda row: _bytes(row.buffers)),
        ("residuals", lambda row: _bytes(row.residuals)),
        ("memory", lambda row: _bytes(row.memory)),
        ("wire", lambda row: _seconds(row.communication)),
    ]
    if overlap:
        columns.append(("exposed", lambda row: _seconds(row.exposed)))
    columns += [(name, lambda row, name=name: _seconds(getattr(row, name))) for name in ("codes", "update", "step")]
    cells = [[title for title, _ in columns]] + [[show(row) for _, show in columns] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in cells]
    verdicts = [f"{row.name.ljust(widths[0])}  {row.verdict}" for row in rows if row.verdict]
    return "\n".join([*lines, "", *verdicts])


def _memory(memory: Any) -> float:
    """Bytes per second of a memory, by its name or in GB/s."""
    if isinstance(memory, str):
        try:
            memory = float(memory)
        except ValueError:
            return MEMORIES[choice("memory", memory, MEMORIES)]
    return number("memory", memory, above=0) * 1e9


def _tensors(params: Any, dtype: torch.dtype) -> list[torch.Tensor]:
    """Tensors without memory, of the shapes and types of the parameters."""
    if isinstance(params, torch.nn.Module):
        params = list(params.parameters())
    if isinstance(params, (int, float)) and not isinstance(params, bool):
        n = number("params", params, low=1)
        if n != int(n):
            raise ValueError(f"params={params!r}: must be an integer number of parameters")
        n = int(n)
        side = min(SIDE, math.isqrt(n))
        count, rest = divmod(n, side * side)
        shapes: list[Any] = [(side, side)] * count + ([(rest,)] if rest else [])
    elif isinstance(params, (str, torch.Tensor)) or not isinstance(params, Iterable):
        raise TypeError(f"params={params!r}: must be a number, a module, or tensors or shapes, not {type(params).__name__}")
    else:
        shapes = list(params)
    if not shapes:
        raise ValueError("params is empty: there is nothing to train")
    tensors = []
    for i, each in enumerate(shapes):
        if isinstance(each, torch.Tensor):
            tensors.append(torch.empty_like(each, device="meta"))
            continue
        try:
            tensors.append(torch.empty([integer(f"params[{i}]", size, low=0) for size in each], dtype=dtype, device="meta"))
        except TypeError:
            raise TypeError(f"params[{i}]={each!r}: must be a tensor or a shape") from None
    return tensors


def _bytes(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < 999.5 or unit == "TB":
            return f"{count:.3g} {unit}" if count else "-"
        count /= 1000
    raise AssertionError


def _seconds(value: float) -> str:
    if not value:
        return "-"
    return (
        f"{value:.3g} s" if value >= 0.9995 else f"{value * 1e3:.3g} ms" if value >= 0.9995e-3 else f"{value * 1e6:.3g} us"
    )
