"""`CpuLaunch`: run a rule over all tensors by one native call on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from ...language import Metric, Reduction, Rule
from ...launch import GRADIENT, Launch
from ...metrics import MetricsBuffer, RuleWithMetric, with_metric
from .driver import (
    GRADIENTS,
    IS_DOUBLE,
    LARGEST,
    N_TENSORS,
    N_TILES,
    N_VALUES,
    PARTIALS,
    TICKET,
    TILE,
    TILES,
    TOGETHER,
    TOTALS,
    adder,
    driver,
)
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
        self.finishes_sums = bool(self.sizes.all())  # tensors without elements have no address, and keep numbers, too
        n_tiles = len(self.tiles)
        self._threaded = self.n_elements >= PARALLEL_FROM and n_tiles > 1
        # The tensor and the first and last element of each tile, int64 [n_tiles, 3].
        starts = self.tiles[:, 1].astype(np.int64) * TILE
        ends = np.minimum(starts + TILE, self.sizes[self.tiles[:, 0]])
        self._spans = np.stack([self.tiles[:, 0], starts, ends], axis=1)
        self._kept_alive: list[Any] = []  # what loops have the addresses of
        self._reductions = [self._calls_of_reduction(stage) for stage in range(len(self.rule.reductions))]
        self._finishes = [self._finish_of(stage) if numbers else None for stage, numbers in enumerate(self.numbers)]
        self._run = self._call_of(self.rule)
        self._with_metric: tuple[Metric, Callable[[], None], np.ndarray, np.ndarray, Callable[[], None]] | None = None

    def run_reduction(self, stage: int) -> None:
        for call in self._reductions[stage]:
            call()

    def run_finished(self, stage: int) -> None:
        self.run_reduction(stage)
        finish = self._finishes[stage]
        assert finish is not None
        finish()

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
            partials, totals = np.zeros((len(self.tiles), len(metric.names))), np.zeros((len(rows), len(metric.names)))
            run = self._call_of(with_metric(self.rule, metric), partials)
            self._with_metric = metric, run, partials, totals, self._adding_up(partials, totals, metric.by)
        _, run, partials, totals, add_up = self._with_metric
        partials[:] = 0.0  # the metric of a skipped step
        self._run_unless_skipped(run)
        add_up()
        ring.numpy()[into.slot, rows] = totals

    def _calls_of_reduction(self, stage: int) -> list[Callable[[], None]]:
        reduction = self.rule.reductions[stage]
        if reduction.op != "mean":
            totals = self.totals[stage].numpy()
            partials, by = np.zeros((len(self.tiles), reduction.n_values)), (reduction.op,) * reduction.n_values
            together = reduction.scope == "global"
            return [self._call_of(reduction, partials), self._adding_up(partials, totals, by, together)]
        assert self.parts is not None
        means = MeansOnCpu(self.parts, stage, reduction, self.kept_addresses(stage), self.skipped.numpy())
        self._kept_alive.append(means)
        return [
            self._call_of(reduction, spans=means.spans, parts=means.addresses),
            self._call_of(reduction, spans=means.units, parts=means.addresses, finishes=True),
        ]

    def _adding_up(
        self, partials: np.ndarray, totals: np.ndarray, by: Sequence[str], together: bool = False
    ) -> Callable[[], None]:
        """Return a call that adds up the results of tiles, by "sum" or "max" for each value, of all tensors `together`."""
        add_up, largest = adder(), np.array([how == "max" for how in by], dtype=np.int64)
        arrays = self.addresses[GRADIENT], self._spans, partials, totals, largest
        shared = np.zeros(16, dtype=np.int64)
        shared[[GRADIENTS, TILES, PARTIALS, TOTALS, LARGEST]] = [array.ctypes.data for array in arrays]
        shared[[N_TENSORS, N_VALUES, N_TILES]] = *totals.shape, len(self._spans)
        shared[[TOGETHER, IS_DOUBLE]] = together, totals.dtype == np.float64
        where = shared.ctypes.data

        def run(arrays: Any = (*arrays, shared)) -> None:  # and keeps the arrays alive
            add_up(where)

        return run

    def _finish_of(self, stage: int) -> Callable[[], None]:
        """Return a call that finishes sums, of each tensor or, if they are of all, with the numbers of one."""
        reduction, n_tensors = self.rule.reductions[stage], len(self.sizes)
        kept, totals, results = self.kept_addresses(stage), self.totals[stage].numpy(), self.sums[stage].numpy()
        tables = totals, results, kept, self.skipped.numpy()
        spans = np.stack([np.arange(n_tensors), np.zeros(n_tensors), np.ones(n_tensors)], axis=1).astype(np.int64)
        spans = spans[:1] if reduction.scope == "global" else spans
        parts = np.array([table.ctypes.data for table in tables], dtype=np.int64)
        finish, gradients = self._call_of(reduction, spans=spans, parts=parts, finishes=True), self.addresses[GRADIENT]
        self._kept_alive.append(tables)

        def run() -> None:
            spans[0, 0] = (gradients != 0).argmax()
            finish()

        return run if reduction.scope == "global" else finish

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

        of_sums = finishes and isinstance(function, Reduction) and function.op != "mean"  # a few numbers of each tensor
        return run_parallel if self._threaded and not of_sums else run
