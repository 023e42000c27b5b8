"""Metrics that the update itself computes, their composition with rules, and the buffer of results.

A metric sees an element's weight, gradient and new weight in the registers of the rule, so it costs arithmetic and almost no
memory traffic. `with_metric` composes rule and metric into one function; backends run it like the rule, reduce the values
over each tensor, and write them to a `MetricsBuffer`.
"""

from __future__ import annotations

import threading
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch

from . import streams
from .language import Metric, Rule, metric, tl
from .language.codegen import RuleSource
from .language.reduction import ElementwiseFunction
from .language.text import function_of_text
from .layouts import widest

_POWERS = tuple(2.0**k for k in range(-28, 3))
# The edges between the bins of a histogram. The bin from 0 to the smallest normal float32 number counts zeros.
EDGES = (*(-power for power in reversed(_POWERS)), 0.0, 2.0**-126, *_POWERS)
BINS = len(EDGES) + 1
SLOTS = 64  # steps in the ring on a GPU; half of them are copied to the host at a time


@metric(weight_square="sum")
def weight_square(w, g, new_w):
    """Square of the weight's norm before the update."""
    return (w * w,)


@metric(gradient_square="sum")
def gradient_square(w, g, new_w):
    """Square of the gradient's norm."""
    return (g * g,)


@metric(update_square="sum")
def update_square(w, g, new_w):
    """Square of the norm of the update, new weight - weight."""
    step = new_w - w
    return (step * step,)


@metric(gradient_times_update="sum")
def gradient_times_update(w, g, new_w):
    """Scalar product of the gradient and the update."""
    return (g * (new_w - w),)


@metric(weight_absmax="max")
def weight_absmax(w, g, new_w):
    """Largest absolute value of the weight before the update."""
    return (tl.abs(w),)


@metric(gradient_absmax="max")
def gradient_absmax(w, g, new_w):
    """Largest absolute value of the gradient."""
    return (tl.abs(g),)


@metric(update_absmax="max")
def update_absmax(w, g, new_w):
    """Largest absolute value of the update."""
    return (tl.abs(new_w - w),)


@metric(gradient_zeros="sum")
def gradient_zeros(w, g, new_w):
    """Number of elements of the gradient that are 0."""
    return (tl.where(g == 0.0, 1.0, 0.0),)


@metric(gradient_nonfinite="sum")
def gradient_nonfinite(w, g, new_w):
    """Number of elements of the gradient that are infinite or NaN."""
    return (tl.where(g - g == 0.0, 0.0, 1.0),)


@partial(Metric, by={"weight_unchanged": "sum"}, counts_unchanged=True)
def weight_unchanged(w, g, new_w):
    """Number of elements whose stored value did not change, because the update was lost in rounding.

    Backends count them. They compare the stored value before and after the update, after rounding: the weight together with
    a split master, or only the float32 master, if there is one. Numbers are compared bitwise, except that 0.0 equals -0.0
    and NaN always counts as changed.
    """
    return ()


_VALUES = {"weight": "w", "gradient": "g", "update": "new_w - w"}


@lru_cache(maxsize=len(_VALUES))
def histogram(what: str) -> Metric:
    """Return a metric for a histogram of "weight", "gradient" or "update"; `bins_of` converts its values to counts.

    Its values, `gradient_from_0` and so on, are the number of elements below the first edge, and for each edge the number
    of elements at or above it, which takes half the instructions of counting between two edges. NaN is not counted; use
    `gradient_nonfinite` for it.
    """
    counts = [f"tl.where(x < {EDGES[0]!r}, 1.0, 0.0)", *(f"tl.where(x >= {edge!r}, 1.0, 0.0)" for edge in EDGES)]
    name = f"{what}_histogram"
    text = f"def {name}(w, g, new_w):\n    x = {_VALUES[what]}\n    return {', '.join(counts)}\n"
    fn = function_of_text(name, text, {"tl": tl, "__name__": __name__})
    return Metric(fn, dict.fromkeys((f"{what}_from_{k}" for k in range(BINS)), "sum"))


def bins_of(counts: np.ndarray) -> np.ndarray:
    """Turn the cumulative counts of `histogram`, elements at or above each edge, into a count for each bin, [..., BINS]."""
    bins = counts.copy()
    bins[..., 1:-1] -= counts[..., 2:]
    return bins


@lru_cache(maxsize=64)
def joined(*metrics: Metric) -> Metric:
    """Return one metric that computes the values of several, in order; the same object for the same metrics."""
    if len(metrics) == 1:
        return metrics[0]
    metrics = tuple(sorted(metrics, key=lambda metric: metric.counts_unchanged))  # backends add this value last
    lines, values = [], []
    for k, each in enumerate(metrics):
        new = [f"value_{k}_{j}" for j in range(len(each.names) - each.counts_unchanged)]
        lines += [f"    ({', '.join(new)},) = metric_{k}(w, g, new_w)\n"] if new else []
        values += new
    text = f"def joined(w, g, new_w):\n{''.join(lines)}    return {', '.join(values)},\n"
    names = {f"metric_{k}": each for k, each in enumerate(metrics)} | {"__name__": __name__}
    by = {name: how for each in metrics for name, how in zip(each.names, each.by, strict=True)}
    if len(by) < sum(len(each.names) for each in metrics):
        twice = sorted({name for each in metrics for name in each.names if sum(name in m.names for m in metrics) > 1})
        raise ValueError(f"measures: several of them give a value {twice[0]!r}: each needs another name")
    return Metric(function_of_text("joined", text, names), by, metrics[-1].counts_unchanged)


class RuleWithMetric(ElementwiseFunction):
    """A rule with a metric: a function that returns the new weight, the new states and the metric's values."""

    kind = "rule with a metric"
    stores_results = False  # but for those of the rule, which has given them a type

    def __init__(self, fn: Any, rule: Rule, metric: Metric) -> None:
        super().__init__(fn, rule.reduction)
        self.rule, self.metric = rule, metric


def with_metric(rule: Rule, metric: Metric) -> RuleWithMetric:
    """Return the rule with this metric computed after it; the same object for the same arguments."""
    key = with_metric, metric
    if key not in rule.made_of_it:
        text = RuleSource(rule, metric=metric)
        (stepped,) = text.new("stepped")
        first = text.arguments()
        lines = text.step(stepped, text.call())
        result = f"{stepped}, {text.returned()}, {text['metric']}({text.w}, {text.g}, {stepped})"
        rule.made_of_it[key] = RuleWithMetric(text.define("with_metric", first, lines, result), rule, metric)
    return rule.made_of_it[key]


class MetricsBuffer:
    """The values of a metric in the last steps: backends write them on the device, the host reads them later.

    For each step call `begin_step`, run one or several `Update`s with this buffer, and call `end_step`. On a GPU the values
    go into a ring of a few slots, half of which are copied to the host at a time, asynchronously, so that no step waits.

    Args:
        metric: the metric.
        n_rows: number of tensors. An `Update` writes the values of weight i to row `rng_offsets[i]`.
        size: number of steps to keep, default 1024. Each takes 8 bytes for each tensor and value.

    Attributes:
        count: number of steps so far.
    """

    def __init__(self, metric: Metric, n_rows: int, size: int = 1024) -> None:
        self.metric, self.n_rows, self.size = metric, n_rows, size
        self._places = size + 1  # `size` places to read while one is written
        self.count = 0
        self._sent = self._arrived = 0  # steps for which the copy to the host has started, and has finished
        self._events: list[tuple[int, Any]] = []  # for each pending copy the number of steps sent, and its event
        self._pinned = False
        self._written = np.zeros((self._places, n_rows), dtype=bool)
        self._ring: torch.Tensor | None = None
        self._host: torch.Tensor | None = None  # [places, n_rows, n_values]; on a CPU the ring itself
        self._stream: Any = None  # the stream of the last step; a reader may use another
        self._lock = threading.RLock()  # another thread may read while steps are taken

    @property
    def slot(self) -> int:
        """Index of the ring's slot for the present step."""
        assert self._ring is not None
        return self.count % len(self._ring)

    def ring(self, device: torch.device) -> torch.Tensor:
        """Return the ring on this device, [n_slots, n_rows, n_values], in the widest dtype of the device.

        Raises:
            ValueError: this step has already written values on another device.
        """
        if self._ring is None or self._ring.device != device:
            self._move(device)
        assert self._ring is not None
        return self._ring

    def begin_step(self) -> None:
        """Start a step; drop the values of a step that was not ended."""
        self._written[self.count % self._places] = False

    def mark(self, rows: np.ndarray) -> None:
        """Mark these rows as written in the present step."""
        self._written[self.count % self._places, rows] = True

    def end_step(self) -> bool:
        """End the step; return False if nothing was written, so that the step does not count."""
        if not self._written[self.count % self._places].any():
            return False
        with self._lock:
            self.count += 1
            if self._pinned:
                self._stream = streams.current(self._ring.device)  # type: ignore[union-attr]
            if self._ring is not self._host and self.count - self._sent >= max(len(self._ring) // 2, 1):  # type: ignore[arg-type]
                self._send()
        return True

    def arrived(self, wait: bool = False) -> range:
        """Return the range of steps, counted from 0, that can be read now. If `wait`, wait until the last one can."""
        if self._ring is self._host:
            return range(max(self.count - self.size, 0), self.count)
        with self._lock:
            self._send()
            if wait and self._events:
                self._events[-1][1].synchronize()
            self._look()
            return range(min(max(self._sent - self.size, 0), self._arrived), self._arrived)

    def values(self, steps: range) -> np.ndarray:
        """Return the values of these steps, float64 [n_steps, n_rows, n_values]; NaN for a tensor that was not updated.

        Args:
            steps: part of the range that `arrived` returns.
        """
        if not steps:
            return np.empty((0, self.n_rows, len(self.metric.names)))
        assert self._host is not None
        places = np.arange(steps.start, steps.stop) % self._places
        values = self._host.numpy()[places].astype(np.float64)
        values[~self._written[places]] = np.nan
        return values

    def _move(self, device: torch.device) -> None:
        if self._written[self.count % self._places].any():
            raise ValueError(
                f"weights on {device} cannot share a metrics buffer with others on another device: all must be on one"
            )
        if self._ring is not None:
            self.arrived(wait=True)
        shape, before = (self.n_rows, len(self.metric.names)), self._host
        self._pinned = streams.is_asynchronous(device)
        make = streams.pinned if self._pinned else partial(torch.empty, device="cpu")
        self._host = make(self._places, *shape, dtype=widest(device))
        if before is not None:
            self._host.copy_(before)
        self._ring = self._host
        if self._pinned or device.type != "cpu":  # the host cannot read the device's memory
            self._ring = torch.empty(min(self._places, SLOTS), *shape, dtype=self._host.dtype, device=device)
        self._sent, self._arrived, self._stream = self.count, self.count, None

    @torch.no_grad()
    def _send(self) -> None:
        """Start copying new steps to the host, on the stream of the steps, after their launches."""
        assert self._ring is not None
        assert self._host is not None
        self._look()
        start = self._sent
        with streams.on_stream(self._stream):
            while start < self.count:
                slot, place = start % len(self._ring), start % self._places
                n = min(self.count - start, len(self._ring) - slot, self._places - place)
                self._host[place : place + n].copy_(self._ring[slot : slot + n], non_blocking=self._pinned)
                start += n
            if not self._pinned:  # these copies have finished
                self._arrived = self.count
            elif self._sent < self.count:
                self._events.append((self.count, streams.record_event(self._ring.device)))
        self._sent = self.count

    def _look(self) -> None:
        while self._events and self._events[0][1].query():
            self._arrived = self._events.pop(0)[0]
