"""`TritonUpdate`: runs a table on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from triton.compiler import CompiledKernel

from ... import streams
from ...language import Metric, Reduction, Rule
from ...metrics import MetricsBuffer, RuleWithMetric, with_metric
from ...table import TensorTable
from .compile import BLOCK, kernel_constants, options_for, tile_for
from .kernels import sums_kernel, update_kernel
from .reduce import metrics_kernel, totals_kernel
from .upload import Uploader

__all__ = ["Launch", "TritonUpdate"]

TOTALS = 4096  # tiles whose metrics are added up at a time


class TritonUpdate:
    """Runs one table on a GPU: keeps its arrays on the device, copies what has changed, launches once."""

    tile_for = staticmethod(tile_for)
    looks_at_tensors = multiplies_on_host = False  # but at memory, and on the device

    def __init__(self, table: TensorTable) -> None:
        assert isinstance(table.rule, Rule)
        self.table, self._rule = table, table.rule
        self._upload = Uploader(table)
        self._addresses = _copied(table.addresses, table.device)
        self._sent: bytes | None = None
        self._sizes = _copied(table.sizes, table.device)
        self._tiles = _copied(table.tiles, table.device)
        self.totals, self.sums = table.room_for_sums()
        self._elsewhere = table.device.type == "cuda" and torch.cuda.device_count() > 1
        self._n_tiles = len(table.tiles)
        self._update = self._launcher(update_kernel, self._rule)
        self._with_metric: tuple[torch.Tensor, Launch, Launch] | None = None
        self._reductions = [self._sums_launcher(stage) for stage in range(len(self._rule.reductions))]

    def replace_weights(self, weights: Sequence[torch.Tensor]) -> None:
        """Work on other weights from now on, those at the table's addresses."""
        now = self.table.addresses.tobytes()
        if weights and now != self._sent:
            addresses = streams.staged(torch.from_numpy(self.table.addresses), self.table.device)
            self._addresses.copy_(addresses, non_blocking=True)
            self._sent = now

    def run_reduction(self, stage: int) -> None:
        """Launch the rule's reduction of this number; its results are then in `totals`, of shape [n_tensors, n_values].

        Those of one over all tensors are the same in each row.
        """
        with self._device():
            self._upload()
            if not self._n_tiles:
                self.totals[stage].zero_()  # they may have been added to those of other tensors
                return
            for launch in self._reductions[stage]:
                launch()

    def upload(self) -> None:
        """Copy over what has changed, on the current stream."""
        with self._device():
            self._upload()

    def __call__(self) -> None:
        """Launch on the current stream of the table's device. Never waits for the device."""
        if not self._n_tiles:
            return
        if self._elsewhere:
            with self._device():
                self._upload()
                self._update()
        else:
            self._upload()
            self._update()

    def update_with_metrics(self, into: MetricsBuffer, rows: np.ndarray) -> None:
        """As a call, and write the values of the metric to these rows of the current slot: one more launch."""
        with self._device():
            ring = into.ring(self.table.device)
            if self._with_metric is None or self._with_metric[0] is not ring:
                self._with_metric = ring, *self._metric_launchers(into.metric, ring, rows)
            _, update, totals = self._with_metric
            if self._n_tiles:
                self._upload()
                update()
            totals(into.slot)

    @property
    def hyper(self) -> torch.Tensor:
        """The hyper-parameters as they are on the device since the last upload, [n_tensors, n]."""
        return self._upload.hyper.view(self.table.hyper.shape)

    def _device(self) -> Any:
        return streams.on_device(self.table.device) if self._elsewhere else nullcontext()

    def _launcher(
        self, kernel: Any, function: Rule | Reduction | RuleWithMetric, partials: tuple[torch.Tensor, ...] = ()
    ) -> Launch:
        table = self.table
        sums = self._upload.hyper if function.numbers_from is None else self.sums[function.numbers_from]
        partials = partials or (self._upload.hyper,)  # a pointer that nothing is done with
        arguments = (self._addresses, self._upload.gradients, self._upload.hyper, self._sizes, self._tiles, sums, *partials)
        types = table.weight_dtype, table.gradient_dtype, table.dtype
        constants = kernel_constants(function, self._rule, types, table.storage, table.aligned, table.zero_grads)
        options = options_for(function, types, table.storage)
        numbers = len(table.sizes), table.tile // BLOCK, table.grad_scale_and_skip
        return Launch(kernel, self._n_tiles, (*arguments, *numbers), constants, options)

    def _sums_launcher(self, stage: int) -> tuple[Launch, Launch]:
        table, reduction = self.table, self._rule.reductions[stage]
        n_tensors, n_values = self.totals[stage].shape
        partials = torch.zeros(n_values, self._n_tiles, dtype=table.dtype, device=table.device)
        together = reduction.scope == "global"
        bounds = [0, n_tensors] if together else np.arange(n_tensors + 1)
        firsts = _copied(np.searchsorted(table.tiles[:, 0], bounds).astype(np.int64), table.device)
        return (
            self._launcher(sums_kernel, reduction, (partials,)),
            Launch(
                totals_kernel,
                1 if together else n_tensors,
                (partials, firsts, self.totals[stage], self._n_tiles, n_tensors),
                {"N_VALUES": n_values, "LARGEST": reduction.op == "max", "TOGETHER": together, "BLOCK": 1024},
                {"enable_fp_fusion": False},
            ),
        )

    def _metric_launchers(self, metric: Metric, ring: torch.Tensor, rows: np.ndarray) -> tuple[Launch, Launch]:
        table = self.table
        function, (_, n_rows, n_values) = with_metric(self._rule, metric), ring.shape
        partials = torch.zeros(n_values, max(self._n_tiles, 1), dtype=table.dtype, device=table.device)
        firsts = np.searchsorted(table.tiles[:, 0], np.arange(len(rows) + 1)).astype(np.int64)
        largest = np.array([by == "max" for by in metric.by], dtype=np.int32)
        arrays = (_copied(array, table.device) for array in (firsts, rows.astype(np.int64), largest))
        arguments = (partials, *arrays, ring, partials.shape[1], n_rows)
        return (
            self._launcher(update_kernel, function, (partials,)),
            Launch(
                metrics_kernel,
                (len(rows), n_values),
                arguments,
                {"BLOCK": TOTALS},
                {"num_warps": 8, "enable_fp_fusion": False},
            ),
        )


class Launch:
    """One kernel with fixed arguments; the contents of tensors among them may change.

    The last ones before the constants may be given at each call.
    """

    def __init__(
        self,
        kernel: Any,
        programs: int | tuple[int, int],
        arguments: Any,
        constants: dict[str, Any],
        options: dict[str, Any],
    ) -> None:
        self._grid = (programs, 1, 1) if isinstance(programs, int) else (*programs, 1)
        self._first = partial(kernel[self._grid], *arguments, **constants, **options)
        self._again: Any = None
        self._arguments, self._rest = tuple(arguments), tuple(constants.values())

    def __call__(self, *last: int) -> None:
        if self._again is not None:
            self._again(*last, *self._rest)
        else:
            kernel = self._first(*last)
            # The arguments stay, so nothing is left for the JIT's launcher to find out every time, which takes it 20 µs.
            if isinstance(kernel, CompiledKernel):
                if not last:
                    self._arguments, self._rest = self._arguments + self._rest, ()
                self._again = partial(kernel[self._grid], *self._arguments)


def _copied(array: np.ndarray, device: torch.device) -> torch.Tensor:
    return streams.staged(torch.from_numpy(array), device).to(device, non_blocking=True, copy=True)
