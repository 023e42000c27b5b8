"""Metrics that the update itself computes, their composition with rules, and the buffer of results.

A metric sees an element's weight, gradient and new weight in the registers in which the rule had them, so that it costs
arithmetic and next to no memory traffic. `with_metric` computes a metric after a rule, in the same text; backends run that
as they run the rule, and reduce the values over each tensor. `MetricsBuffer` is where they put them.
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
# Between the bins of a histogram. 0 and the least power that has all digits in float32 have zeros between them.
EDGES = (*(-power for power in reversed(_POWERS)), 0.0, 2.0**-126, *_POWERS)
BINS = len(EDGES) + 1
SLOTS = 64  # of a ring on a GPU: steps recorded there; half of them are copied to the host at a time


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
    """Square of the norm of what the update added."""
    step = new_w - w
    return (step * step,)


@metric(gradient_times_update="sum")
def gradient_times_update(w, g, new_w):
    """Scalar product of the gradient and what the update added."""
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
    """Largest absolute value of what the update added."""
    return (tl.abs(new_w - w),)


@metric(gradient_zeros="sum")
def gradient_zeros(w, g, new_w):
    """How many of the gradient's elements are 0."""
    return (tl.where(g == 0.0, 1.0, 0.0),)


@metric(gradient_nonfinite="sum")
def gradient_nonfinite(w, g, new_w):
    """How many of the gradient's elements are infinite or NaN: else their difference from themselves is 0."""
    return (tl.where(g - g == 0.0, 0.0, 1.0),)


@partial(Metric, by={"weight_unchanged": "sum"}, counts_unchanged=True)
def weight_unchanged(w, g, new_w):
    """How many elements are stored as they were: the update was smaller than half the distance to the next number.

    Compared is what has been loaded with what is stored, after rounding: the weight in its own type together with what is
    stored alongside; of a float32 master copy the copy alone, whose rounding the weight is. They are equal as numbers are,
    which is to the bit but for 0.0 and -0.0, which count as unchanged, and NaN, which never does. Backends count.
    """
    return ()


_VALUES = {"weight": "w", "gradient": "g", "update": "new_w - w"}


@lru_cache(maxsize=len(_VALUES))
def histogram(what: str) -> Metric:
    """A metric that `bins_of` makes counts between `EDGES` of: of the values of "weight", "gradient" or "update".

    Its values are called gradient_from_0 and so on: how many are below the first edge, and how many at each edge or above
    it, which takes half of the instructions of counting between two. NaN is in none; `gradient_nonfinite` counts both.
    """
    counts = [f"tl.where(x < {EDGES[0]!r}, 1.0, 0.0)", *(f"tl.where(x >= {edge!r}, 1.0, 0.0)" for edge in EDGES)]
    name = f"{what}_histogram"
    text = f"def {name}(w, g, new_w):\n    x = {_VALUES[what]}\n    return {', '.join(counts)}\n"
    fn = function_of_text(name, text, {"tl": tl, "__name__": __name__})
    return Metric(fn, dict.fromkeys((f"{what}_from_{k}" for k in range(BINS)), "sum"))


def bins_of(counts: np.ndarray) -> np.ndarray:
    """How many are between each two of `EDGES`, [..., BINS], of the values of `histogram`."""
    bins = counts.copy()
    bins[..., 1:-1] -= counts[..., 2:]
    return bins


@lru_cache(maxsize=64)
def joined(*metrics: Metric) -> Metric:
    """One metric that gives the values of several, one after the other."""
    if len(metrics) == 1:
        return metrics[0]
    metrics = tuple(sorted(metrics, key=lambda each: each.counts_unchanged))  # which is the last value
    lines, values = [], []
    for k, each in enumerate(metrics):
        found = [f"value_{k}_{j}" for j in range(len(each.names) - each.counts_unchanged)]
        lines += [f"    ({', '.join(found)},) = metric_{k}(w, g, new_w)\n"] if found else []
        values += found
    text = f"def joined(w, g, new_w):\n{''.join(lines)}    return {', '.join(values)},\n"
    names = {f"metric_{k}": each for k, each in enumerate(metrics)} | {"__name__": __name__}
    by = {name: how for each in metrics for name, how in zip(each.names, each.by, strict=True)}
    if len(by) < sum(len(each.names) for each in metrics):
        twice = sorted({name for each in metrics for name in each.names if sum(name in m.names for m in metrics) > 1})
        raise ValueError(f"measures: several of them give a value {twice[0]!r}: each needs a name of its own")
    return Metric(function_of_text("joined", text, names), by, metrics[-1].counts_unchanged)


class RuleWithMetric(ElementwiseFunction):
    """A rule with a metric computed after it: it returns the new weight, the new states and the metric's values.

    Attributes:
        rule: the rule.
        metric: the metric.
    """

    kind = "rule with a metric"

    def __init__(self, fn: Any, rule: Rule, metric: Metric) -> None:
        super().__init__(fn, rule.reduction)
        self.rule, self.metric = rule, metric


def with_metric(rule: Rule, metric: Metric) -> RuleWithMetric:
    """The rule with this metric computed after it; the same object every time."""
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
    """The values of a metric in the last steps: backends write them, on the device; the host reads what has been copied.

    For each step there is `begin_step`, the step of an `Update` or several, and `end_step`. On a GPU the device has a ring
    of a few slots, half of which are copied to the host at a time, asynchronously, so that a step never waits.

    Args:
        metric: the metric.
        n_rows: how many tensors there are. An `Update` puts what it finds of each weight into the row of its `rng_offsets`.
        size: steps to keep. Each takes 8 bytes for each tensor and value.

    Attributes:
        count: how many steps there have been.
    """

    def __init__(self, metric: Metric, n_rows: int, size: int = 1024) -> None:
        self.metric, self.n_rows, self.size = metric, n_rows, size
        self._places = size + 1  # so that there are `size` of them to read while one is written
        self.count = 0
        self._sent = self._arrived = 0  # of these, the copy to the host has been started, and is over
        self._events: list[tuple[int, Any]] = []  # of copies that may not be over, with the number of steps sent by then
        self._pinned = False
        self._written = np.zeros((self._places, n_rows), dtype=bool)
        self._ring: torch.Tensor | None = None
        self._host: torch.Tensor | None = None  # [places, n_rows, n_values]; on a CPU it is the ring
        self._stream: Any = None  # on which the last step was, as who reads may be on another
        self._lock = threading.RLock()  # another thread may read while steps are taken

    @property
    def slot(self) -> int:
        """Which slot of the ring the present step is to be put into."""
        assert self._ring is not None
        return self.count % len(self._ring)

    def ring(self, device: torch.device) -> torch.Tensor:
        """The ring on this device, [n_slots, n_rows, n_values], in the widest type that it has.

        Raises:
            ValueError: something of this step has been put into a ring on another device.
        """
        if self._ring is None or self._ring.device != device:
            self._move(device)
        assert self._ring is not None
        return self._ring

    def begin_step(self) -> None:
        """Forget what an unfinished step may have left."""
        self._written[self.count % self._places] = False

    def mark(self, rows: np.ndarray) -> None:
        """These rows are being written in the present step."""
        self._written[self.count % self._places, rows] = True

    def end_step(self) -> bool:
        """Go on to the next slot; false if nothing has been put into this one, which is then used again."""
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
        """The numbers, from 0, of the steps that can be read now. `wait` for the last one."""
        if self._ring is self._host:
            return range(max(self.count - self.size, 0), self.count)
        with self._lock:
            self._send()
            if wait and self._events:
                self._events[-1][1].synchronize()
            self._look()
            return range(min(max(self._sent - self.size, 0), self._arrived), self._arrived)

    def values(self, steps: range) -> np.ndarray:
        """What was found in these steps, of those that have arrived: float64 [n_steps, n_rows, n_values].

        It is NaN for a tensor that was not updated.
        """
        if not steps:
            return np.empty((0, self.n_rows, len(self.metric.names)))
        assert self._host is not None
        places = np.arange(steps.start, steps.stop) % self._places
        found = self._host.numpy()[places].astype(np.float64)
        found[~self._written[places]] = np.nan
        return found

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
        """Start to copy to the host what has not been sent yet, on the steps' stream, behind the launches that find it."""
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
            if not self._pinned:  # these copies are over
                self._arrived = self.count
            elif self._sent < self.count:
                self._events.append((self.count, streams.record_event(self._ring.device)))
        self._sent = self.count

    def _look(self) -> None:
        """See which copies are over."""
        while self._events and self._events[0][1].query():
            self._arrived = self._events.pop(0)[0]
