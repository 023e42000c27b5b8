"""estimate_cost: bytes, memory and time of a training step on many GPUs with each strategy."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from ...kernels.compress import CODES, TILE
from ...trainer.optimizer import Optimizer
from ...trainer.validation import boolean, integer, number
from .links import Link, Network, Transfer, parse_link
from .strategy import Strategy, format_seconds
from .update import UpdateCost

BACKWARD = 2 / 3  # share of the backward pass in forward and backward: two matrix products for each one of the forward
TOPK, RANK = 0.01, 4  # the share that "topk" sends; the rank of "powersgd"


def estimate_cost(
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
    update_on_kvstore: bool = False,
) -> list[Strategy]:
    """Estimate bytes, memory and time of a step with each strategy, by a model. Nothing is allocated.

    Args:
        params: the number of parameters (assumed to be square matrices of 4096 rows, and a vector of the rest), a module, or
            tensors or shapes.
        gpus: the number of ranks, >= 1.
        link: the link between ranks: a name in `LINKS`, a bandwidth in GB/s, text such as "12.5,30us", or a `Link`.
        optimizer, optimizer_params: the arguments of `Trainer`; the optimizer must be a `RuleOptimizer`.
        weights: the dtype of weights and gradients: "float32" (default), "bfloat16", "float16" or "float64". A module and
            tensors have their own.
        gpus_per_node: the number of ranks in each node, a divisor of `gpus`; None if all links are alike. Plain collectives
            then go first within nodes and then between them, and each GPU has its own link; compressed messages go directly
            to their rank.
        inner: the link within a node, in the forms of `link`.
        memory: the bandwidth of a GPU's memory: a name in `MEMORIES` or GB/s, also as text.
        compute_ms: milliseconds of forward and backward. Two thirds are backward, which hides communication that only needs
            gradients. Default: None, which hides nothing, and leaves both out of the time.
        servers: the number of servers of the parameter server. Default: 1.
        update_on_kvstore: whether the strategies with compression shard updates, as ZeRO-1 does, instead of updating all
            weights on each rank. Default: False.

    Returns:
        A `Strategy` for each way to train; the plain all-reduce is the first.

    Raises:
        TypeError, ValueError: an argument is invalid.

    Example:
        >>> import tristep
        >>> rows = tristep.estimate_cost(124.4e6, 8, "pcie4")
        >>> round(rows[0].wire / 1e6)
        871
    """
    network = Network(
        integer("gpus", gpus, low=1),
        1 if gpus_per_node is None else integer("gpus_per_node", gpus_per_node, low=1),
        parse_link(link, "link"),
        parse_link(inner, "inner"),
    )
    if network.ranks % network.node:
        raise ValueError(f"gpus_per_node={gpus_per_node!r}: must be a divisor of gpus={gpus!r}")
    compute = 0.0 if compute_ms is None else number("compute_ms", compute_ms, low=0) / 1e3
    servers = integer("servers", servers, low=1)
    update = UpdateCost(params, optimizer, optimizer_params, weights, memory)
    return _Estimator(network, update, compute, servers, boolean("update_on_kvstore", update_on_kvstore)).strategies()


class _Estimator:
    def __init__(self, network: Network, update: UpdateCost, compute: float, servers: int, shards: bool) -> None:
        self.network, self.update, self.compute, self.servers, self.shards = network, update, compute, servers, shards
        self.ranks, self.w = network.ranks, update.weight_bytes

    def strategies(self) -> list[Strategy]:
        all_reduce, zero1 = self._all_reduce(), self._zero1()
        plain = zero1 if self.shards else all_reduce
        return [
            all_reduce,
            zero1,
            self._zero3(),
            self._parameter_server(),
            *(_with_verdict(row, plain) for row in (*self._coded(), self._topk(), self._powersgd())),
        ]

    def _strategy(
        self,
        name: str,
        kvstore: str,
        transfers: Sequence[tuple[Transfer, float]],
        update: float,
        codes: float = 0.0,
        *,
        weights: float | None = None,
        gradients: float | None = None,
        states: float | None = None,
        buffers: float = 0.0,
        residuals: float = 0.0,
        environment: str = "",
    ) -> Strategy:
        """Sum a strategy's costs. `transfers`: costs of collectives, each with the share of `compute` that may hide it."""
        wire, inner, seconds = (sum(transfer[k] for transfer, _ in transfers) for k in range(3))
        hidden = 0.0
        for share in {share for _, share in transfers}:
            together = sum(transfer.seconds for transfer, each in transfers if each == share)
            hidden += min(together, share * self.compute)
        exposed = seconds - hidden
        return Strategy(
            name=name,
            kvstore=kvstore,
            wire=wire,
            inner=inner,
            weights=self.w if weights is None else weights,
            gradients=self.w if gradients is None else gradients,
            states=self.update.state_bytes if states is None else states,
            buffers=buffers,
            residuals=residuals,
            communication=seconds,
            codes=codes,
            update=update,
            exposed=exposed,
            step=exposed + codes + update + self.compute,
            environment=environment,
        )

    def _all_reduce(self) -> Strategy:
        transfers = [(self.network.ring(self.w, 2), BACKWARD)]
        return self._strategy("all-reduce", _arguments(False), transfers, self.update.seconds())

    def _zero1(self) -> Strategy:
        return self._strategy(
            "ZeRO-1",
            _arguments(True),
            [(self.network.ring(self.w, 1), BACKWARD), (self.network.ring(self.w, 1), 0.0)],
            self.update.seconds(1 / self.ranks),
            states=self.update.sharded_state_bytes(self.ranks),
            buffers=self.w / self.ranks if self.ranks > 1 else 0.0,
        )

    def _zero3(self) -> Strategy:
        shard = self.w / self.ranks
        return self._strategy(
            "ZeRO-3 (FSDP)",  # without the memory of the layer that is being computed, which is gathered
            "",
            [(self.network.ring(self.w, 1), 1 - BACKWARD), (self.network.ring(self.w, 2), BACKWARD)],
            self.update.seconds(1 / self.ranks),
            weights=shard,
            gradients=shard,
            states=self.update.sharded_state_bytes(self.ranks),
        )

    def _parameter_server(self) -> Strategy:
        """Assume that all workers send at once, so each server's link carries the messages of all."""
        link, workers = self.network.link, max(1.0, self.ranks / self.servers)
        push = Transfer(self.w, 0.0, self.servers * link.latency + workers * self.w / link.bandwidth)
        pull = Transfer(0.0, 0.0, push.seconds)  # sent by the servers
        return self._strategy(
            f"parameter server ({self.servers})",
            "kvstore='dist_async'",
            [(push, BACKWARD), (pull, 0.0)],
            self.update.seconds(1 / self.servers) * self.ranks,  # an update for each worker's gradients
            states=0.0,
            environment="" if self.servers == 1 else f"TRISTEP_NUM_SERVERS={self.servers}",
        )

    def _compressed(
        self,
        name: str,
        params: Mapping[str, Any],
        transfer: Transfer,
        moved: float,
        buffers: float,
        residuals: float,
    ) -> Strategy:
        """Return training with compressed sums. `moved`: the bytes that compressing and adding up read and write."""
        several, transfers, share = self.ranks > 1, [(transfer, BACKWARD)], 1.0
        if self.shards:
            transfers.append((self.network.ring(self.w, 1), 0.0))  # the new weights
            share = 1 / self.ranks
        return self._strategy(
            name,
            f"{_arguments(self.shards)}, compression_params={dict(params)!r}",
            transfers,
            self.update.seconds(share),
            moved / self.update.memory if several else 0.0,
            states=self.update.sharded_state_bytes(self.ranks) if self.shards else None,
            buffers=buffers if several else 0.0,
            residuals=residuals if several else 0.0,
        )

    def _coded(self) -> Iterable[Strategy]:
        """Yield the strategies with compressors that send a code for each value."""
        n, ranks = self.update.n, self.ranks
        feedback = 8 * n  # the residual, read and written
        for name, code in CODES.items():
            sent = gathered = n * code.size(TILE) / TILE
            if self.shards:  # each rank adds up its part, and keeps the sum
                shard = self.w / ranks
                moved = self.w + feedback + 2 * sent + shard
                yield self._compressed(
                    name, {"type": name}, self.network.all_to_all(sent, 0.0), moved, 2 * sent + shard, 4.0 * n
                )
                continue
            votes = code.vote is not None and ranks > 2  # the sum of votes is sent back, uncompressed
            if votes:
                gathered = n * code.vote_bits(ranks) / 8
            moved = self.w + feedback + sent  # coding
            residuals = 4.0 * n
            if ranks > 2:
                moved += sent + gathered / ranks  # adding up all ranks' parts
                if not votes:
                    moved, residuals = moved + feedback / ranks, residuals + 4 * n / ranks
                moved += gathered + self.w  # decoding
                buffers = 2 * sent + gathered + gathered / ranks
            else:
                moved += ranks * sent + self.w
                buffers = (1 + ranks) * sent
            transfer = self.network.all_to_all(sent, gathered)
            yield self._compressed(name, {"type": name}, transfer, moved, buffers, residuals)

    def _topk(self) -> Strategy:
        n, ranks = self.update.n, self.ranks
        sent = 8.0 * math.ceil(TOPK * n)  # indices and values
        # Finding the largest values reads all about twice; the sum is written, and values are added at all ranks' indices.
        moved = self.w + 8 * n + (8.0 * n + 4.0 * n + 2 * ranks * sent)
        params, buffers = {"type": "topk", "ratio": TOPK}, (1 + ranks) * sent
        return self._compressed(f"topk {TOPK:.0%}", params, self.network.all_gather(sent), moved, buffers, 4.0 * n)

    def _powersgd(self) -> Strategy:
        n, values, matrices = self.update.n, 0, 0
        for tensor in self.update.tensors:
            rows, columns = (
                (tensor.shape[0], tensor.numel() // tensor.shape[0]) if tensor.dim() > 1 and tensor.numel() else (0, 0)
            )
            factors = RANK * (rows + columns)
            if 0 < factors < tensor.numel():
                values, matrices = values + factors, matrices + tensor.numel()
            else:
                values += tensor.numel()
        moved = self.w + 8 * n + 12.0 * matrices  # two products that read a matrix each, and one that writes it
        params, transfer = {"type": "powersgd", "rank": RANK}, self.network.ring(4.0 * values, 2)
        return self._compressed(f"powersgd {RANK}", params, transfer, moved, 4.0 * values, 4.0 * n)


def _arguments(shards: bool) -> str:
    """Return the arguments of a `Trainer` of synchronous processes."""
    return f"kvstore='dist_sync', update_on_kvstore={shards}"


def _with_verdict(row: Strategy, plain: Strategy) -> Strategy:
    saved = plain.step - row.step
    if saved <= 0:
        verdict = "on this link compression costs more than it saves"
    else:
        verdict = f"saves {format_seconds(saved)} of {format_seconds(plain.step)} a step ({saved / plain.step:.0%})"
    return dataclasses.replace(row, verdict=verdict)
