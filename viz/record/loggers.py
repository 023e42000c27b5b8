"""Send a run's numbers to loggers, each in a thread of its own, so that training never waits for one."""

from __future__ import annotations

import queue
import threading
import time
import warnings
import weakref
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np

from ...trainer.validation import integer
from .adapters import Adapter, adapter
from .probes import QUANTITIES
from .runs import Run
from .series import Series

__all__ = ["LOGGED", "Loggers"]

LOGGED = ("weight_norm", "gradient_norm", "update_ratio")  # of each parameter, unless others are asked for
ROOM = 8  # batches queued for a logger; further steps wait in the run, which keeps the last 2,048
PATIENCE = 60.0  # seconds; a logger that logs nothing for so long while it is being closed is given up


class Lot(NamedTuple):
    """A batch of steps for one logger.

    Each series has a row: its column names, the steps [n], and the values: [n] for one column, [n, n_names], or
    [n, n_names, n_bins] for histograms. `edges` are between the histograms' bins.
    """

    rows: list[tuple[list[str], np.ndarray, np.ndarray]]
    edges: np.ndarray


class Report:
    """The progress of one logger's thread."""

    def __init__(self) -> None:
        self.error: Exception | None = None  # the first exception
        self.failed = self.done = 0  # numbers of steps: that raised an exception, and in all


class Loggers:
    """The loggers of a recorder, which get the first value of each series in every window of `every` steps.

    If an argument is invalid, all files have been closed again.
    """

    def __init__(self, to: Iterable[Any], every: int, quantities: Iterable[str]) -> None:
        if isinstance(to, str) or not isinstance(to, Iterable):
            raise TypeError(f"to={to!r}: must be a list of loggers, such as [{to!r}]")
        integer("log_every", every, low=1)
        self._every, self._quantities = every, tuple(quantities)
        if isinstance(quantities, str) or not set(self._quantities) <= set(QUANTITIES):
            raise ValueError(f"log_quantities={quantities!r}: must be a list of some of {', '.join(QUANTITIES)}")
        self._loggers: list[_Logger] = []
        self._first: int | None = None
        try:
            for target in to:
                self._loggers.append(_Logger(adapter(target)))
        except BaseException:
            for logger in self._loggers:
                logger.adapter.close()
            raise

    def __bool__(self) -> bool:
        return bool(self._loggers)

    def send(self, run: Run, until: int) -> None:
        """Queue the run's new steps up to `until` for all loggers. Never waits; warns once for each logger that fails."""
        for logger in self._loggers:
            if not logger.queue.full():
                lot = self._lot(logger, run, until)
                if lot is not None:
                    logger.put(lot)
            logger.warn()

    def go_back(self, old: Run, run: Run, last_step: int) -> None:
        """Switch from the run `old` to `run`, which continues after `last_step`. No step is sent twice."""
        for logger in self._loggers:
            logger.lost += sum(len(each) - logger.seen.get(key, (0, 0))[0] for key, each in self._series(old).items())
            logger.seen = {key: (len(series), -1) for key, series in self._series(run).items()}
            logger.after = logger.last
            if logger.last > last_step:
                warnings.warn(
                    f"the recording goes back to step {last_step}, and {logger.adapter.name} already has steps up to "
                    f"{logger.last}: it gets none before {logger.last + 1}",
                    stacklevel=4,
                )

    def close(self, run: Run, until: int) -> list[str]:
        """Wait until all steps have been logged, close the files, and return messages about problems."""
        loggers, self._loggers = self._loggers, []
        return [problem for logger in loggers for problem in logger.close(self._lot(logger, run, until))]

    def _series(self, run: Run) -> dict[tuple[str, str], Series]:
        series_by_key = {("scalars", name): series for name, series in run.scalars.items()}
        series_by_key |= {("tensors", name): run.tensors[name] for name in self._quantities if name in run.tensors}
        return series_by_key | {("histograms", name): series for name, series in run.histograms.items()}

    def _lot(self, logger: _Logger, run: Run, until: int) -> Lot | None:
        """Return the steps up to `until` that the logger has not had yet; None if there are none."""
        rows: list[tuple[list[str], np.ndarray, np.ndarray]] = []
        for (kind, name), series in self._series(run).items():
            seen, window = logger.seen.get((kind, name), (0, -1))
            steps, values = series.since(seen)
            logger.lost += len(series) - seen - len(steps)
            end = int(np.searchsorted(steps, until, side="right"))
            steps, values, seen = steps[:end], values[:end], len(series) - len(steps) + end
            if len(steps):
                self._first = int(steps[0]) if self._first is None else self._first
                windows = (steps - self._first) // self._every
                chosen = (np.diff(windows, prepend=window) > 0) & (steps > logger.after)
                window = int(windows[-1])
                steps, values = steps[chosen], values[chosen]
            logger.seen[kind, name] = seen, window
            if len(steps) and (kind != "histograms" or logger.adapter.takes_histograms):
                logger.last = max(logger.last, int(steps[-1]))
                rows.append(([name] if kind == "scalars" else [f"{name}/{each}" for each in run.parameters], steps, values))
        return Lot(rows, run.edges) if rows else None


class _Logger:
    """A logger, its thread, and its position in the run.

    Attributes:
        seen: for each series, by kind and name, how many values have been considered, and the last window of `every` steps.
        after: only steps later than this one are sent.
        lost: how many values had left the run before the logger had time for them.
    """

    def __init__(self, adapter: Adapter) -> None:
        self.adapter, self.report, self.seen = adapter, Report(), dict[tuple[str, str], tuple[int, int]]()
        self.last = self.after = -1
        self.lost, self._warned = 0, False
        self.queue: queue.Queue[Lot | None] = queue.Queue(ROOM)
        self._thread: threading.Thread | None = None

    def put(self, lot: Lot) -> None:
        """Queue a lot; the queue must have room. The thread starts with the first lot, and ends with the recorder."""
        if self._thread is None:
            self._thread = threading.Thread(
                target=_work, args=(self.adapter, self.queue, self.report), name="tristep logger", daemon=True
            )
            self._thread.start()
            weakref.finalize(self, _end, self.queue)
        self.queue.put(lot)

    def warn(self) -> None:
        if not self._warned and (self.report.error is not None or self.lost):
            self._warned = True
            error = self.report.error
            why = f"{type(error).__name__}: {error}" if error is not None else "it is slower than the training"
            warnings.warn(
                f"{self.adapter.name} does not log all steps ({why}); training goes on, and close() tells how many",
                stacklevel=5,
            )

    def close(self, last: Lot | None) -> list[str]:
        name, report = self.adapter.name, self.report
        if last is not None and self._thread is None:
            self.put(last)
            last = None
        if self._thread is not None:
            if not self._hurry([*([last] if last else []), None]):
                return [f"{name} has taken nothing for {PATIENCE:g} s: its last steps are missing"]
        try:
            self.adapter.close()
        except Exception as error:
            report.error = report.error or error
        problems = []
        if report.error is not None:
            what = f"{report.failed} steps are missing" if report.failed else "its last steps may be missing"
            problems.append(f"{name}: {what} ({type(report.error).__name__}: {report.error})")
        if self.lost:
            problems.append(
                f"{name}: {self.lost} values are missing, because it was slower than the training; log fewer steps"
            )
        return problems

    def _hurry(self, lots: list[Lot | None]) -> bool:
        """Queue the remaining lots and wait for the thread to end; return False if it makes no progress for `PATIENCE`."""
        assert self._thread is not None
        done, since = self.report.done, time.monotonic()
        while self._thread.is_alive() or lots:
            try:
                if lots:
                    self.queue.put(lots[0], timeout=0.1)
                    lots = lots[1:]
                else:
                    self._thread.join(0.1)
            except queue.Full:
                pass
            if self.report.done > done:
                done, since = self.report.done, time.monotonic()
            if time.monotonic() - since > PATIENCE:
                return False
        return True


def _end(lots: queue.Queue[Lot | None]) -> None:
    with suppress(queue.Full):
        lots.put_nowait(None)


def _work(adapter: Adapter, lots: queue.Queue[Lot | None], report: Report) -> None:
    """Log lots from the queue until it gives None. A logger's thread runs this."""
    while (lot := lots.get()) is not None:
        steps: dict[int, dict[str, float]] = {}
        counted: dict[int, list[tuple[str, np.ndarray]]] = {}
        for names, numbers, values in lot.rows:
            for step, row in zip(numbers.tolist(), values, strict=True):
                if values.ndim == 3:
                    recorded = [(name, counts) for name, counts in zip(names, row, strict=True) if np.isfinite(counts).all()]
                    counted.setdefault(step, []).extend(recorded)
                else:
                    steps.setdefault(step, {}).update(zip(names, np.atleast_1d(row).tolist(), strict=True))
        # The outer bins have no outer edge; loggers get the next power of 2.
        edges = np.concatenate([2 * lot.edges[:1], lot.edges, 2 * lot.edges[-1:]])
        for step in sorted({*steps, *counted}):
            try:
                if step in steps:
                    adapter.log(step, steps[step])
                for name, counts in counted.get(step, ()):
                    adapter.log_histogram(step, name, counts, edges)
            except Exception as error:
                report.error, report.failed = report.error or error, report.failed + 1
            report.done += 1
        try:
            adapter.flush()
        except Exception as error:
            report.error = report.error or error
