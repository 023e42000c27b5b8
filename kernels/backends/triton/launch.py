"""`TritonLaunch`: update the tensors of a launch with one kernel on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from triton.compiler import CompiledKernel

from ... import storage, streams
from ...language import Metric, Reduction, Rule
from ...launch import Launch, tiles_of
from ...metrics import MetricsBuffer, RuleWithMetric, with_metric
from ...parts import walked_as
from .compile import (
    BLOCK,
    BLOCKS_OF_SUMS,
    WARP,
    kernel_constants,
    options_for,
    options_of,
    shape_of_pieces,
    target_of,
    tile_for,
    unit_for,
    unit_of_means,
)
from .kernels import sums_kernel, update_kernel
from .means import (
    ITEMS,
    TileSums,
    chunks_of,
    finish_kernel,
    finish_of,
    means_kernel,
    means_of_rows_kernel,
    sizes_of_means,
    together_for,
)
from .ops import bind
from .pieces import (
    Walk,
    lines_for,
    means_pieces_kernel,
    pieces_of,
    sums_pieces_kernel,
    update_pieces_kernel,
    walks_of,
)
from .reduce import finish_sums_kernel, totals_kernel
from .start import unhooked
from .upload import Uploader

TOTALS = 4096  # results of tiles that one program adds up
COPIES = 256  # tensors whose finished sums are stored at a time


class TritonLaunch(Launch):
    """A launch that keeps its tables on the GPU, uploads what has changed, and runs one kernel, or two if it has means."""

    tile_for = staticmethod(tile_for)

    def _prepare(self) -> None:
        self.finishes_sums = bool(self.sizes.all())  # tensors without elements have no address, and keep numbers, too
        self._upload = Uploader(self)
        self._addresses = _copied(self.addresses, self.device)
        self._sent: bytes | None = None
        self._sizes = _copied(self.sizes, self.device)
        self._walks = self._choose_walks()
        self._shapes = None if self.parts is None else _copied(self.parts.sizes, self.device)
        self._elsewhere = self.device.type == "cuda" and torch.cuda.device_count() > 1
        self._n_tiles = len(self.tiles)
        blocks = self.tile // BLOCK
        tiled = self._tiled(self.rule, blocks) if self.parts else [(self._walks[0], self.tiles)]
        self._update = self._calls_of(self.rule, tiled, blocks)
        self._with_metric: tuple[torch.Tensor, Callable[[], None], list[KernelCall]] | None = None
        self._kept_alive: list[Any] = []  # what kernels know the addresses of
        self._reductions = [self._calls_of_reduction(stage) for stage in range(len(self.rule.reductions))]

    def replace_weights(self, weights: Sequence[torch.Tensor]) -> None:
        now = self.addresses.tobytes()
        if weights and now != self._sent:
            addresses = streams.staged(torch.from_numpy(self.addresses), self.device)
            self._addresses.copy_(addresses, non_blocking=True)
            self._sent = now

    def run_reduction(self, stage: int, finishes: bool = False) -> None:
        with self._device():
            self._upload()
            if not self._n_tiles:
                self.totals[stage].zero_()  # totals of other tensors may have been added to them
                return
            for launch in self._reductions[stage][finishes]:
                launch()

    def run_finished(self, stage: int) -> None:
        self.run_reduction(stage, finishes=True)

    def upload(self) -> None:
        with self._device():
            self._upload()

    def compute(self) -> None:
        """Update the weights without waiting for the device."""
        if not self._n_tiles:
            return
        if self._elsewhere:
            with self._device():
                self._upload()
                self._update()
        else:
            self._upload()
            self._update()

    def compute_with_metric(self, into: MetricsBuffer, rows: np.ndarray) -> None:
        with self._device():
            ring = into.ring(self.device)
            if self._with_metric is None or self._with_metric[0] is not ring:
                self._with_metric = ring, *self._calls_of_metric(into.metric, ring, rows)
            _, update, totals = self._with_metric
            if self._n_tiles:
                self._upload()
                update()
            for pieces in totals[:-1]:
                pieces()
            totals[-1](into.slot)

    def hyper_on_device(self) -> torch.Tensor:
        """Return the hyper-parameters as they were last uploaded."""
        return self._upload.hyper.view(self.hyper.shape)

    @property
    def _types(self) -> tuple[torch.dtype, torch.dtype, torch.dtype]:
        return self.weight_dtype, self.gradient_dtype, self.dtype

    def _choose_walks(self) -> list[Walk]:
        rule = self.rule
        if self.parts is None:
            return [Walk(np.arange(len(self.sizes)), 0, self.aligned)]
        packed = any(map(storage.is_packed, self.storage.states))
        return walks_of(self.parts, self.aligned, unit_for(rule, self._types, self.storage), packed)

    def _device(self) -> Any:
        return streams.on_device(self.device) if self._elsewhere else nullcontext()

    def _tiled(self, function: Rule | Reduction | RuleWithMetric, blocks: int) -> list[tuple[Walk, np.ndarray]]:
        """Return the tiles of each walk, of so many blocks, or pieces."""
        tiled = []
        for walk in self._walks:
            if walk.unit:
                assert self.parts is not None
                width, _, _ = shape_of_pieces(function, self.rule, self._types, self.storage, walk.line)
                lines = lines_for(int(self.sizes[walk.tensors].sum()), width, walk.line)
                tiled.append((walk, pieces_of(self.parts, walk, lines, width)))
            else:
                sizes = np.zeros_like(self.sizes)
                sizes[walk.tensors] = self.sizes[walk.tensors]
                tiled.append((walk, tiles_of(sizes, blocks * BLOCK)))
        return tiled

    def _calls_of(
        self,
        function: Rule | Reduction | RuleWithMetric,
        tiled: list[tuple[Walk, np.ndarray]],
        blocks: int,
        partials: torch.Tensor | None = None,
    ) -> Callable[[], None]:
        """Return what launches a rule's kernel, or a reduction's, for all tiles; `partials` has a column for each."""
        sums = self._upload.hyper if function.numbers_from is None else self.sums[function.numbers_from]
        reduces, calls, first = isinstance(function, Reduction), [], 0
        n_partials = sum(len(tiles) for _, tiles in tiled)
        if self.rule.reductions and not reduces:
            # In reverse order, because the tiles that the reductions read last are still cached.
            tiled = [(walk, tiles[::-1]) for walk, tiles in tiled[::-1]]
        for walk, tiles in tiled:
            if not len(tiles):
                continue
            into = self._upload.hyper if partials is None else partials[:, first:]  # or any pointer: it is not used
            places = _copied(tiles, self.device)
            if partials is None:
                self._tiles = places  # of the update; of the last walk if there are several
            tables = self._addresses, self._upload.gradients, self._upload.hyper, self._sizes, places
            numbers: tuple[Any, ...] = len(self.sizes), n_partials
            first += len(tiles)
            given = function, self.rule, self._types, self.storage
            constants = kernel_constants(*given, self.aligned, self.zero_grads, walk)
            if walk.unit:
                kernel, numbers = sums_pieces_kernel if reduces else update_pieces_kernel, (*numbers, self._shapes)
                _, threads, _ = shape_of_pieces(*given, walk.line)
            else:
                kernel, numbers, threads = sums_kernel if reduces else update_kernel, (*numbers, blocks), 0
            options = options_for(function, self._types, self.storage, target_of(self.device), threads)
            arguments = *tables, sums, into, *numbers, self.grad_scale_and_skip
            calls.append(KernelCall(kernel, len(tiles), arguments, constants, options))
        return calls[0] if len(calls) == 1 else partial(_call_all, calls)

    def _calls_of_means(self, stage: int) -> list[Callable[[], None]]:
        reduction, parts = self.rule.reductions[stage], self.parts
        assert parts is not None
        target = target_of(self.device)
        constants = kernel_constants(reduction, self.rule, self._types, self.storage, self.aligned, False)
        layout = constants["LAYOUT"]
        width, threads, at_once = shape_of_pieces(reduction, self.rule, self._types, self.storage)
        unit = unit_of_means(reduction, self.rule, self._types, self.storage) if self.aligned else 1
        tiles = TileSums(parts, self._walks, reduction, width, unit, self.dtype, self.device)
        partials, states = _copied(tiles.addresses, self.device), _copied(self.kept_addresses(stage), self.device)
        self._kept_alive += [tiles, parts]
        sums = self._upload.hyper if reduction.numbers_from is None else self.sums[reduction.numbers_from]
        tables = self._addresses, self._upload.gradients, self._upload.hyper
        of_rows = tuple(int(walked_as(scope) == "row") for scope in reduction.scope)

        def call_of(kernel: Any, places: np.ndarray, *more: Any, threads: int = 0, **made: Any) -> KernelCall:
            arguments = *tables, self._sizes, _copied(places, self.device), sums, partials, len(self.sizes), *more
            options = options_for(reduction, self._types, self.storage, target, threads)
            return KernelCall(kernel, len(places), (*arguments, self.grad_scale_and_skip), made, options)

        shared = {name: constants[name] for name in ("FUNCTION", "ARGUMENTS")}
        calls: list[Callable[[], None]] = []
        for block, places in tiles.tiles.items():
            made = shared | {"LAYOUT": layout._replace(unit=block.unit, aligned=block.unit > 1), "OF_ROWS": of_rows}
            calls.append(call_of(means_kernel, places, self._shapes, threads=WARP, **made, BLOCK=block))
        for walk, places in tiles.pieces:
            made = kernel_constants(reduction, self.rule, self._types, self.storage, self.aligned, False, walk)
            made = shared | {"LAYOUT": made["LAYOUT"], "OF_ROWS": of_rows, "AT_ONCE": at_once}
            calls.append(call_of(means_pieces_kernel, places, self._shapes, threads=threads, **made))
        first, options = layout.first_part + 1, options_of(128, target)  # a gradient's row comes after the weight's
        function = None if reduction.finished is None else bind(reduction.finished, self.dtype)
        for scope in sorted(set(map(walked_as, reduction.scope))):
            counts, together = parts.counts[scope], together_for(tiles, scope)
            chunks = chunks_of(counts, ITEMS // together, counts, tiles.counts[scope])
            on_device = self._shapes, _copied(chunks, self.device), partials, states, self.skipped
            arguments = (*tables, *on_device, len(self.sizes))
            finish = finish_of(reduction, self.rule.hyper, first, scope)
            numbers = {"N_HYPER": self.hyper.shape[1], "TOGETHER": together, "ITEMS": ITEMS // together}
            made = {"FUNCTION": function, "FINISH": finish} | numbers
            calls.append(KernelCall(finish_kernel, len(chunks), arguments, made, options))
        if reduction.means:
            matrices, *sizes = sizes_of_means(parts, ITEMS)
            place = first + 2 + len(reduction.vectors)
            from_rows = tuple(place + reduction.kept.index(name) for name in reduction.means)
            to = tuple(place + reduction.n_own_results - len(reduction.means) + k for k in range(len(reduction.means)))
            made = {"FROM": from_rows, "TO": to, "TYPE": layout.compute}
            made |= dict(zip(("MATRICES", "ROWS"), sizes, strict=True))
            of_matrices = self._addresses, self._shapes, _copied(matrices, self.device), len(self.sizes)
            calls.append(KernelCall(means_of_rows_kernel, len(matrices), of_matrices, made, options))
        return calls

    def _calls_of_reduction(self, stage: int) -> list[list[Callable[[], None]]]:
        """Return what runs a reduction; if sums are finished, what does so without and with that."""
        reduction = self.rule.reductions[stage]
        if reduction.op == "mean":
            return [self._calls_of_means(stage)]
        n_tensors, n_values = self.totals[stage].shape
        blocks = max(self.tile // BLOCK, BLOCKS_OF_SUMS)
        tiled = self._tiled(reduction, blocks)
        firsts, rows, n_copies = _partials_of(tiled, n_tensors), _tensors_of(tiled), 1
        if reduction.scope == "global":
            firsts, rows, n_copies = firsts[[0, -1]], np.zeros(1, dtype=np.int64), n_tensors
        partials = torch.zeros(n_values, firsts[-1], dtype=self.dtype, device=self.device)
        by, totals = (reduction.op,) * n_values, self.totals[stage]
        sums = self._calls_of(reduction, tiled, blocks, partials)
        calls: list[list[Callable[[], None]]] = []
        calls.append([sums, *_calls_of_totals(partials, firsts, by, totals, rows, n_copies, 0)])
        if reduction.finished is not None:
            kept = _copied(self.kept_addresses(stage), self.device)
            tables = self._upload.gradients, self._upload.hyper, kept, self.skipped, n_tensors
            constants = {
                "FUNCTION": bind(reduction.finished, self.dtype),
                "N_VALUES": n_values,
                "N_KEPT": len(reduction.kept),
                "N_OWN": reduction.n_own_results,
                "N_RESULTS": reduction.n_scalar_results,
                "HYPER": tuple(1 + self.rule.hyper.index(name) for name in reduction.finish_hyper),
                "N_HYPER": self.hyper.shape[1],
                "OF_ALL": reduction.scope == "global",
                "COPIES": COPIES,
            }
            finish = tables, constants
            calls.append([sums, *_calls_of_totals(partials, firsts, by, self.sums[stage], rows, n_copies, finish=finish)])
        return calls

    def _calls_of_metric(
        self, metric: Metric, ring: torch.Tensor, rows: np.ndarray
    ) -> tuple[Callable[[], None], list[KernelCall]]:
        function, n_values = with_metric(self.rule, metric), ring.shape[-1]
        blocks = max(self.tile // BLOCK, BLOCKS_OF_SUMS)
        tiled = self._tiled(function, blocks)
        firsts, rows = _partials_of(tiled, len(rows)), rows[_tensors_of(tiled)]
        partials = torch.zeros(n_values, max(firsts[-1], 1), dtype=self.dtype, device=self.device)
        if self.rule.reductions:  # as in `_calls_of`
            firsts, rows = firsts[-1] - firsts[::-1], rows[::-1]
        update = self._calls_of(function, tiled, blocks, partials)
        return update, _calls_of_totals(partials, firsts, metric.by, ring, rows)


def _tensors_of(tiled: list[tuple[Walk, np.ndarray]]) -> np.ndarray:
    return np.concatenate([walk.tensors for walk, _ in tiled])


def _partials_of(tiled: list[tuple[Walk, np.ndarray]], n_tensors: int) -> np.ndarray:
    """Return the index of the first tile of each tensor, in the order of `_tensors_of`, and at last their number."""
    counts = np.bincount(np.concatenate([tiles[:, 0] for _, tiles in tiled]), minlength=n_tensors)
    return np.append(0, np.cumsum(counts[_tensors_of(tiled)]))


def _call_all(calls: list[KernelCall]) -> None:
    for call in calls:
        call()


class KernelCall:
    """A kernel with fixed arguments, called at every step; the contents of tensor arguments may change.

    The last arguments before the constants may be left out and passed to each call.
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
        self._compile_and_run = partial(kernel[self._grid], *arguments, **constants, **options)
        self._run: Any = None
        self._arguments, self._constants = tuple(arguments), tuple(constants.values())

    def __call__(self, *last: Any) -> None:
        if self._run is not None:
            self._run(*last, *self._constants)
        else:
            with unhooked():
                kernel = self._compile_and_run(*last)
            # The arguments are fixed, so later calls skip the JIT's launcher, which takes 20 µs to look at them.
            if isinstance(kernel, CompiledKernel):
                if not last:
                    self._arguments, self._constants = self._arguments + self._constants, ()
                self._run = partial(kernel[self._grid], *self._arguments)


def _calls_of_totals(
    partials: torch.Tensor,
    firsts: np.ndarray,
    by: Sequence[str],
    totals: torch.Tensor,
    rows: np.ndarray,
    n_copies: int = 1,
    *slot: int,
    finish: tuple[tuple[Any, ...], dict[str, Any]] | None = None,
) -> list[KernelCall]:
    """Return the kernel calls that reduce the results of tiles, [n_values, n_tiles], by "sum" or "max" for each value.

    Result i reduces the tiles from `firsts[i]` to before `firsts[i + 1]`. It goes into `n_copies` rows, from `rows[i]` on,
    of `totals`, [n_slots, n_rows, n_values] or [n_rows, n_values]. If `slot`, an index into `totals`, is left out, the last
    call takes it. With `finish`, the further arguments and constants of its kernel, the results of that go into `totals`.
    """
    device, n_values, launches = partials.device, len(by), []
    largest = _copied(np.array([how == "max" for how in by], dtype=np.int32), device)
    options = options_of(256, target_of(device))

    def add(
        kernel: Any, programs: Any, firsts: np.ndarray, rows: np.ndarray, totals: torch.Tensor, *more: Any, **constants: Any
    ) -> None:
        arrays = [_copied(array.astype(np.int64), device) for array in (firsts, rows)]
        arguments = (partials, *arrays, largest, totals, partials.shape[1], *more)
        launches.append(KernelCall(kernel, programs, arguments, {**constants, "BLOCK": TOTALS}, options))

    while (counts := np.diff(firsts)).max() > TOTALS:
        pieces = tiles_of(counts, TOTALS)
        n = len(pieces)
        sums = torch.zeros(n_values, n, dtype=partials.dtype, device=device)
        starts = firsts[pieces[:, 0]] + pieces[:, 1] * TOTALS
        add(totals_kernel, (n, n_values), np.append(starts, firsts[-1]), np.arange(n), sums, n, 1, 1, n, 0)
        partials, firsts = sums, np.searchsorted(pieces[:, 0], np.arange(len(firsts)))
    if finish is None:
        sizes = totals.shape[-2], n_copies, n_values, 1
        add(totals_kernel, (len(rows), n_values), firsts, rows, totals, *sizes, *slot)
    else:
        tables, constants = finish
        add(finish_sums_kernel, len(rows), firsts, rows, totals, n_copies, *tables, **constants)
    return launches


def _copied(array: np.ndarray, device: torch.device) -> torch.Tensor:
    tensor = torch.from_numpy(array.copy())  # torch refuses negative strides
    return streams.staged(tensor, device).to(device, non_blocking=True, copy=True)
