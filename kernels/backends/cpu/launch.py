"""`CpuLaunch`: run a rule over all tensors by one native call on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ...language import Metric, Reduction, Rule
from ...launch import GRADIENT, Launch
from ...metrics import MetricsBuffer, RuleWithMetric, with_metric
from .driver import TICKET, TILE, add_up, driver
from .loops import block_size, compiled_loop
from .means import MeansOnCpu
from .threads import PARALLEL_FROM, run_threads


class CpuLaunch(Launch):
    """A launch that runs in one native call, on several threads if there is enough work."""

    multiplies_on_host = True  # because the factor is on the host anyway

    @staticmethod
    def tile_for(elements: int, packed: bool = False) -> int:
        return TILE

    def _prepare(self) -> None:
        n_tiles = len(self.tiles)
        self._threaded = self.n_elements >= PARALLEL_FROM and n_tiles > 1
        # The tensor and the first and last element of each tile, int64 [n_tiles, 3].
        starts = self.tiles[:, 1].astype(np.int64) * TILE
        ends = np.minimum(starts + TILE, self.sizes[self.tiles[:, 0]])
        self._spans = np.stack([self.tiles[:, 0], starts, ends], axis=1)
        self._partials = [np.zeros((n_tiles, total.shape[1])) for total in self.totals]
        self._means: list[MeansOnCpu] = []
        self._reductions = [self._calls_of_reduction(stage) for stage in range(len(self.rule.reductions))]
        self._run = self._call_of(self.rule)
        self._with_metric: tuple[Metric, Callable[[], None], np.ndarray, np.ndarray] | None = None

    def run_reduction(self, stage: int) -> None:
        for call in self._reductions[stage]:
            call()
        reduction = self.rule.reductions[stage]
        if reduction.op == "mean":
            return
        how = np.full(reduction.n_values, reduction.op == "max"), reduction.scope == "global"
        add_up(self._partials[stage], self.tiles, self.addresses[GRADIENT], self.totals[stage].numpy(), *how)

    def compute(self) -> None:
        if self.grad_scale_and_skip is None:
            self._run()
        else:
            self._run_unless_skipped(self._run)

    def unconditional(self) -> Callable[[], None]:
        return self._run

    def _run_unless_skipped(self, run: Callable[[], None]) -> None:
        if self.grad_scale_and_skip is None or self.grad_scale_and_skip[1] == 0:
            run()
        elif self.zero_grads:
            self.zero_gradients()

    def compute_with_metric(self, into: MetricsBuffer, rows: np.ndarray) -> None:
        metric, ring = into.metric, into.ring(self.device)
        if self._with_metric is None or self._with_metric[0] is not metric:
            partials = np.zeros((len(self.tiles), len(metric.names)))
            run = self._call_of(with_metric(self.rule, metric), partials)
            self._with_metric = metric, run, partials, np.array([by == "max" for by in metric.by])
        _, run, partials, largest = self._with_metric
        partials[:] = 0.0  # the metric of a skipped step
        self._run_unless_skipped(run)
        totals = np.zeros((len(rows), len(largest)))
        add_up(partials, self.tiles, self.addresses[GRADIENT], totals, largest, False)
        ring.numpy()[into.slot, rows] = totals

    def _calls_of_reduction(self, stage: int) -> list[Callable[[], None]]:
        reduction = self.rule.reductions[stage]
        if reduction.op != "mean":
            return [self._call_of(reduction, self._partials[stage])]
        assert self.parts is not None
        means = MeansOnCpu(self.parts, stage, reduction)
        self._means.append(means)  # loops have the addresses of its arrays
        return [
            self._call_of(reduction, spans=means.spans, parts=means.addresses),
            self._call_of(reduction, spans=means.units, parts=means.addresses, finishes=True),
        ]

    def _call_of(
        self,
        function: Rule | Reduction | RuleWithMetric,
        partials: np.ndarray | None = None,
        spans: np.ndarray | None = None,
        parts: np.ndarray | None = None,
        finishes: bool = False,
    ) -> Callable[[], None]:
        """Return a call that runs `function`, or finishes its means, over all tiles or these spans."""
        compute = compiled_loop(self, function, finishes)
        address, call = driver()
        nothing = np.zeros((0, 0), dtype=self.hyper.dtype)
        sums = nothing if function.numbers_from is None else self.sums[function.numbers_from].numpy()
        partials = np.zeros((0, 0)) if partials is None else partials
        spans = self._spans if spans is None else spans
        parts = np.zeros(0, dtype=np.int64) if parts is None else parts
        arrays = (self.addresses, self.addresses[GRADIENT], self.sizes, self.hyper, spans, sums, partials, parts)
        widths = [len(self.sizes), self.hyper.shape[1], sums.shape[1], partials.shape[1], len(spans)]
        block = int(self.sizes.max(initial=1)) if finishes else block_size(function, self.storage)
        shared = np.array([0, *(array.ctypes.data for array in arrays), *widths, block, compute.address], dtype=np.int64)
        where, n_tiles = shared.ctypes.data, len(spans)

        def run_parallel(arrays: Any = arrays) -> None:  # and keeps the arrays alive
            shared[TICKET] = 0
            run_threads(address, where, min(torch.get_num_threads(), n_tiles))

        def run(arrays: Any = arrays) -> None:
            shared[TICKET] = 0
            call(where)

        return run_parallel if self._threaded else run
