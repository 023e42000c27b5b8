"""`CpuUpdate`: runs a table on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from ...language import Metric, Reduction, Rule
from ...metrics import MetricsBuffer, RuleWithMetric, with_metric
from ...table import GRADIENT, TensorTable
from .driver import TICKET, TILE, add_up, driver
from .loops import block_size, compiled_loop
from .threads import PARALLEL_FROM, run_threads

__all__ = ["CpuUpdate"]


def tile_for(elements: int) -> int:
    """Elements of a tile, of a table of this many."""
    return TILE


class CpuUpdate:
    """Runs one table on the CPU in one native call, on several threads if there is enough work."""

    tile_for = staticmethod(tile_for)
    looks_at_tensors = False  # but at memory
    multiplies_on_host = True  # gradients by the factor in the table's grad_scale_and_skip, which is on the host anyway

    def __init__(self, table: TensorTable) -> None:
        self.table = table
        self._n_tiles = len(table.tiles)
        self._threaded = table.n_elements >= PARALLEL_FROM and self._n_tiles > 1
        self.totals, self.sums = table.room_for_sums()
        self._partials = [np.zeros((self._n_tiles, total.shape[1])) for total in self.totals]
        assert isinstance(table.rule, Rule)
        self._reductions = [self._prepare(*each) for each in zip(table.rule.reductions, self._partials, strict=True)]
        self._run = self._prepare(table.rule)
        self._with_metric: tuple[Metric, Callable[[], None], np.ndarray, np.ndarray] | None = None

    def replace_weights(self, weights: Sequence[torch.Tensor]) -> None:
        """Work on other weights from now on, those at the table's addresses; the loop reads these again every time."""

    def run_reduction(self, stage: int) -> None:
        """Run the rule's reduction of this number; its results are then in `totals`, of shape [n_tensors, n_values].

        Those of one over all tensors are the same in each row.
        """
        self._reductions[stage]()
        table, reduction = self.table, self.table.rule.reductions[stage]
        how = np.full(reduction.n_values, reduction.op == "max"), reduction.scope == "global"
        add_up(self._partials[stage], table.tiles, table.addresses[GRADIENT], self.totals[stage].numpy(), *how)

    def __call__(self) -> None:
        if self.table.grad_scale_and_skip is None:
            self._run()
        else:
            self._run_unless_skipped(self._run)

    def _run_unless_skipped(self, run: Callable[[], None]) -> None:
        grad_scale_and_skip = self.table.grad_scale_and_skip
        if grad_scale_and_skip is None or grad_scale_and_skip[1] == 0:
            run()
        elif self.table.zero_grads:
            for bound in self.table.gradients:
                if bound is not None and (gradient := bound()) is not None:
                    gradient.zero_()

    @property
    def hyper(self) -> torch.Tensor:
        """The hyper-parameters, [n_tensors, n]."""
        return torch.from_numpy(self.table.hyper)

    def update_with_metrics(self, into: MetricsBuffer, rows: np.ndarray) -> None:
        """As a call, and write the values of the metric to these rows of the current slot."""
        table, metric, ring = self.table, into.metric, into.ring(self.table.device)
        if self._with_metric is None or self._with_metric[0] is not metric:
            partials = np.zeros((self._n_tiles, len(metric.names)))
            run = self._prepare(with_metric(table.rule, metric), partials)  # type: ignore[arg-type]  # a Rule
            self._with_metric = metric, run, partials, np.array([by == "max" for by in metric.by])
        _, run, partials, largest = self._with_metric
        partials[:] = 0.0  # which is the metric of a skipped step
        self._run_unless_skipped(run)
        totals = np.zeros((len(rows), len(largest)))
        add_up(partials, table.tiles, table.addresses[GRADIENT], totals, largest, False)
        ring.numpy()[into.slot, rows] = totals

    def _prepare(
        self, function: Rule | Reduction | RuleWithMetric, partials: np.ndarray | None = None
    ) -> Callable[[], None]:
        """A function without arguments that runs this one over the table."""
        table = self.table
        compute = compiled_loop(table, function)
        address, call = driver()
        nothing = np.zeros((0, 0), dtype=table.hyper.dtype)
        sums = nothing if function.numbers_from is None else self.sums[function.numbers_from].numpy()
        partials = np.zeros((0, 0)) if partials is None else partials
        arrays = (table.addresses, table.addresses[GRADIENT], table.sizes, table.hyper, table.tiles, sums, partials)
        widths = [len(table.sizes), table.hyper.shape[1], sums.shape[1], partials.shape[1], self._n_tiles]
        block = block_size(function, table.storage)
        shared = np.array([0, *(array.ctypes.data for array in arrays), *widths, block, compute.address], dtype=np.int64)
        where, n_tiles = shared.ctypes.data, self._n_tiles

        def run_parallel(arrays: Any = arrays) -> None:  # and keeps the arrays alive
            shared[TICKET] = 0
            run_threads(address, where, min(torch.get_num_threads(), n_tiles))

        def run(arrays: Any = arrays) -> None:
            shared[TICKET] = 0
            call(where)

        return run_parallel if self._threaded else run
