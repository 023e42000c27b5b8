"""Network: bytes and seconds of collectives among ranks, by the alpha-beta model."""

from __future__ import annotations

from typing import NamedTuple

from .links import Link


class Transfer(NamedTuple):
    """What a collective costs a rank.

    Attributes:
        wire: bytes that it sends; with nodes those that leave its node.
        inner: bytes that it sends within its node.
        seconds: how long it takes.
    """

    wire: float = 0.0
    inner: float = 0.0
    seconds: float = 0.0


class Network(NamedTuple):
    """Ranks and the links between them.

    Attributes:
        ranks: how many, >= 1.
        node: ranks in each node, a divisor of `ranks`; 1 where all links are alike.
        link: between ranks, or between nodes.
        inner: within a node.
    """

    ranks: int
    node: int
    link: Link
    inner: Link

    def ring(self, size: float, phases: int) -> Transfer:
        """Rings: one phase is a reduce-scatter or an all-gather of `size` bytes, two are an all-reduce."""
        node, nodes = self.node, self.ranks // self.node
        inner, wire = phases * (node - 1) / node * size, phases * (nodes - 1) / nodes * size / node
        seconds = phases * (node - 1) * self.inner.latency + inner / self.inner.bandwidth
        seconds += phases * (nodes - 1) * self.link.latency + wire / self.link.bandwidth
        return Transfer(wire, inner, seconds)

    def all_to_all(self, sent: float, gathered: float) -> Transfer:
        """An all-to-all of `sent` bytes and an all-gather of `gathered` bytes, every rank sending to every other."""
        n, size = self.ranks, sent + gathered
        hops = 1 if n <= 2 else 2  # two ranks only need one all-gather
        wire, inner = (n - self.node) / n * size, (self.node - 1) / n * size
        between = hops * (n - self.node) * self.link.latency + wire / self.link.bandwidth
        within = hops * (self.node - 1) * self.inner.latency + inner / self.inner.bandwidth
        return Transfer(wire, inner, max(between, within))

    def all_gather(self, size: float) -> Transfer:
        """Every rank sends `size` bytes of its own to every other."""
        between = (self.ranks - self.node) * (self.link.latency + size / self.link.bandwidth)
        within = (self.node - 1) * (self.inner.latency + size / self.inner.bandwidth)
        return Transfer((self.ranks - self.node) * size, (self.node - 1) * size, max(between, within))
