"""The result of a race: its measurements, and comparisons computed from them."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ...trainer.serialization import files
from ...trainer.validation import choice, number
from .statistics import ratio_interval

MEASURES = ("steps", "samples", "seconds")


class Comparison(NamedTuple):
    """The comparison of an optimizer with the baseline.

    Attributes:
        name: the optimizer's name.
        ratio: the steps (samples, seconds) that it needs, divided by the baseline's: the geometric mean over seeds. NaN if
            one of the two has not reached the target from every seed, or reached it before the first step.
        low, high: the interval of the ratio; NaN for one seed.
        reached: the number of seeds from which it has reached the target.
        of: the number of seeds.
    """

    name: str
    ratio: float
    low: float
    high: float
    reached: int
    of: int


@dataclass(repr=False)
class RaceResult:
    """The result of `race`: arrays of measurements, and methods that compare the optimizers.

    Attributes:
        names: the names of the optimizers.
        baseline: the name of the optimizer that the others are compared with.
        target: the loss to reach.
        held_out: whether losses are of held-out data; otherwise they are means of training losses since the last
            measurement.
        seeds: the seeds of the race's trainings; the tuning has other seeds.
        measured: int64 [n_points], the numbers of steps after which losses were measured; the first is 0.
        losses: float32 [n_optimizers, n_seeds, n_points], the measured losses.
        samples: int64 [n_seeds, n_points], the numbers of samples seen at these points.
        searched: for each optimizer a dict from the name of a searched setting to its values, float64 [n_trials].
        tuning: float32 [n_optimizers, n_trials, n_tuning_seeds, n_points], the losses of the tuning's trainings.
        chosen: int64 [n_optimizers], the index of the trial whose settings each optimizer raced with.
        step_seconds: float64 [n_optimizers, n_rounds], seconds of a step, timed apart from the trainings.
        level: the confidence level of the intervals, in (0, 1).
        starts_equally: whether all seeds start from the same weights, because the function that makes the network seeds or
            loads them.
    """

    names: tuple[str, ...]
    baseline: str
    target: float
    held_out: bool
    seeds: tuple[int, ...]
    measured: np.ndarray
    losses: np.ndarray
    samples: np.ndarray
    searched: tuple[dict[str, np.ndarray], ...]
    tuning: np.ndarray
    chosen: np.ndarray
    step_seconds: np.ndarray
    level: float = 0.95
    starts_equally: bool = False

    def settings(self, name: str) -> dict[str, float]:
        """Return the searched settings with which an optimizer raced, by name.

        Raises:
            ValueError: there is no such optimizer.
        """
        i = self._index(name)
        return {key: float(values[self.chosen[i]]) for key, values in self.searched[i].items()}

    def needed(self, by: str = "steps") -> np.ndarray:
        """Return the steps, samples or seconds to the target, float64 [n_optimizers, n_seeds]; infinite if not reached.

        Seconds are steps times the least of `step_seconds`, which other work on the machine disturbs least. The trainings
        themselves run side by side and cannot be timed.

        Args:
            by: "steps", "samples" or "seconds".

        Raises:
            ValueError: `by` is none of the three.
        """
        choice("by", by, MEASURES)
        steps = steps_to(self.target, self.losses, self.measured)
        if by == "seconds":
            return steps * self.step_seconds.min(axis=1)[:, None]
        if by == "samples":
            columns = [
                np.interp(when, self.measured, seen, right=np.inf) for when, seen in zip(steps.T, self.samples, strict=True)
            ]
            return np.stack(columns, axis=1)
        return steps

    def compare(self, name: str, by: str = "steps") -> Comparison:
        """Compare an optimizer with the baseline, seed by seed.

        The bootstrap interval of the ratio is for this comparison alone: among many optimizers, some differ from the
        baseline by chance. For seconds it does not include the uncertainty of the timing.

        Args:
            name: the optimizer's name.
            by: "steps", "samples" or "seconds".

        Raises:
            ValueError: there is no such optimizer, or `by` is none of the three.
        """
        needed = self.needed(by)
        ours, theirs = needed[self._index(name)], needed[self._index(self.baseline)]
        reached, of = int(np.isfinite(ours).sum()), len(ours)
        if reached < of or not np.isfinite(theirs).all():
            return Comparison(name, math.nan, math.nan, math.nan, reached, of)
        # A target that the first measurement has reached takes no steps, and no ratio either.
        if not (ours > 0).all() or not (theirs > 0).all():
            return Comparison(name, math.nan, math.nan, math.nan, reached, of)
        return Comparison(name, *ratio_interval(ours, theirs, self.level), reached, of)

    def verdict(self, by: str = "steps") -> str:
        """Return the result in words, a line for each optimizer except the baseline, then `warnings`.

        A ratio is given only if both optimizers reached the target from every seed: a mean over the other seeds would only
        cover the seeds in which the optimizer was quick.
        """
        base = self.compare(self.baseline, by)
        lines = [why] if (why := self.missing_ratios()) else []
        lines += [self._in_words(self.compare(name, by), by, base) for name in self.names if name != self.baseline]
        if len(self.names) == 1:
            needed = np.median(self.needed(by))
            lines.append(f"{self.baseline} alone: {needed:.4g} {by} to the target, the median of {base.of} seeds.")
        return "\n".join([*lines, *self.warnings()])

    def missing_ratios(self) -> str:
        """Return the reason why there are no ratios, in words; empty if there are ratios."""
        needed = self.needed()
        base = needed[self._index(self.baseline)]
        of, reached = len(base), int(np.isfinite(base).sum())
        more = "A higher target or more steps are needed."
        if not np.isfinite(needed).any():
            return f"No optimizer reached the target {self.target:g} within {self.measured[-1]} steps: no ratios. {more}"
        if reached < of:
            return f"{self.baseline} reached the target in {reached} of {of} seeds: no ratios. {more}"
        if not (needed > 0).all():
            return f"The target {self.target:g} was reached before the first step: no ratios. Choose a lower one."
        return ""

    def warnings(self) -> list[str]:
        """Return warnings: of seeds with the same first weights, and of best learning rates at an end of what was tried."""
        warnings = []
        if self.starts_equally:
            warnings.append(
                "All seeds start from the same weights: make_model seeds or loads them itself, so the intervals leave out "
                "what first weights make. Without torch.manual_seed in it, each seed has its own."
            )
        for i, name in enumerate(self.names):
            rates = self.searched[i]["learning_rate"]
            place = int((rates < rates[self.chosen[i]]).sum())
            if len(rates) > 2 and place in (0, len(rates) - 1):
                end = "least" if place == 0 else "greatest"
                warnings.append(
                    f"{name}: the best learning rate, {rates[self.chosen[i]]:.3g}, is the {end} that was tried; "
                    "a wider range may do better."
                )
        return warnings

    def rows(self) -> list[dict[str, Any]]:
        """Return a dict for each optimizer, such as pandas takes: its settings, medians over seeds, and comparisons."""
        rows = []
        for i, name in enumerate(self.names):
            row: dict[str, Any] = {"optimizer": name, **self.settings(name)}
            for by in MEASURES:
                comparison = self.compare(name, by)
                row |= {by: float(np.median(self.needed(by)[i]))}
                row |= {f"{by} ratio": comparison.ratio, f"{by} low": comparison.low, f"{by} high": comparison.high}
            row |= {"reached": comparison.reached, "seeds": comparison.of}
            rows.append(row | {"final loss": float(np.median(self.losses[i, :, -1]))})
        return rows

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the result to a safetensors file, atomically.

        Raises:
            FileNotFoundError: there is no such folder.
        """
        about: dict[str, Any] = {"searched": [list(each) for each in self.searched]}
        about |= {
            name: getattr(self, name)
            for name in ("names", "baseline", "target", "held_out", "seeds", "level", "starts_equally")
        }
        arrays = {name: getattr(self, name) for name in _ARRAYS}
        for i, ranges in enumerate(self.searched):
            arrays |= {f"searched {i} {name}": values for name, values in ranges.items()}
        files.write_arrays("path", path, "race", about, arrays)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> RaceResult:
        """Return the result in a file that `save` wrote.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: the file is of another kind or damaged.
        """
        with files.contents("path", path, "a file that was written by RaceResult.save"):
            about, arrays = files.read_arrays(path, "race")
            searched = tuple(
                {str(name): arrays[f"searched {i} {name}"] for name in names} for i, names in enumerate(about["searched"])
            )
            result = cls(
                names=tuple(map(str, about["names"])),
                baseline=str(about["baseline"]),
                target=number("target", about["target"]),
                held_out=bool(about["held_out"]),
                seeds=tuple(map(int, about["seeds"])),
                searched=searched,
                level=number("level", about["level"], above=0, below=1),
                starts_equally=bool(about["starts_equally"]),
                **{name: arrays[name] for name in _ARRAYS},
            )
            result._check()
            return result

    def __str__(self) -> str:
        return f"{self.table()}\n\n{self.verdict()}"

    def __repr__(self) -> str:
        return f"<race of {', '.join(self.names)} to a loss of {self.target:g}, {len(self.seeds)} seeds>"

    def table(self) -> str:
        """Return a text table of what each optimizer needed, medians over seeds, and of the settings it raced with."""
        columns = ("samples", "ms a step", "seconds", "reached", "final loss", "raced with")
        rows = [["", "steps", f"of {self.baseline}'s", *columns]]
        for i, name in enumerate(self.names):
            comparison = self.compare(name)

            medians = [np.median(self.needed(by)[i]) for by in MEASURES]
            rows.append(
                [
                    name,
                    _figure(medians[0]),
                    "1" if name == self.baseline else with_interval(comparison),
                    _figure(medians[1]),
                    f"{1000 * self.step_seconds[i].min():.3g}",
                    _figure(medians[2]),
                    f"{comparison.reached} of {comparison.of}",
                    f"{np.median(self.losses[i, :, -1]):.4g}",
                    settings_text(self.settings(name)),
                ]
            )
        return _text_table(rows)

    def _in_words(self, comparison: Comparison, by: str, base: Comparison) -> str:
        if comparison.reached < comparison.of:
            return f"{comparison.name} reached the target in {comparison.reached} of {comparison.of} seeds: no ratio."
        if math.isnan(comparison.ratio):
            return f"{comparison.name} reached the target in all {comparison.of} seeds."
        words = f"{comparison.name} needs {with_interval(comparison)} of {self.baseline}'s {by}"
        if math.isnan(comparison.low):
            return f"{words}, from one seed: no interval."
        if comparison.low <= 1 <= comparison.high:
            return f"{words}: no difference is shown."
        return f"{words}: {'fewer' if comparison.high < 1 else 'more'}."

    def _index(self, name: str) -> int:
        return self.names.index(choice("name", name, self.names))

    def _check(self) -> None:
        n, seeds, points = len(self.names), len(self.seeds), len(self.measured)
        trials = len(next(iter(self.searched[0].values()))) if self.searched and self.searched[0] else 0
        shapes = {
            "measured": (points,), "losses": (n, seeds, points), "samples": (seeds, points), "chosen": (n,),
            "tuning": (n, trials, self.tuning.shape[2] if self.tuning.ndim == 4 else 0, points),
            "step_seconds": (n, self.step_seconds.shape[-1] if self.step_seconds.ndim else 0),
        }  # fmt: skip
        wrong = [
            f"{name} has shape {getattr(self, name).shape}"
            for name, shape in shapes.items()
            if getattr(self, name).shape != shape or 0 in shape
        ]
        if len(self.searched) != n or any(v.shape != (trials,) for ranges in self.searched for v in ranges.values()):
            wrong.append("what was searched does not fit the optimizers")
        if self.baseline not in self.names or not ((self.chosen >= 0) & (self.chosen < trials)).all():
            wrong.append("the baseline or the chosen trials are none of those that there are")
        if wrong:
            raise ValueError(wrong[0])


_ARRAYS = ("measured", "losses", "samples", "tuning", "chosen", "step_seconds")


def steps_to(target: float, losses: np.ndarray, measured: np.ndarray) -> np.ndarray:
    """Return the steps after which losses [..., n_points] reach the target, float64 [...]; infinite if they do not.

    The loss is interpolated between the first measurement at or below the target and the one before. Without that, steps
    would be multiples of the measurement interval, and equal multiples from every seed would feign an interval of width 0.
    """
    reached = losses <= target
    place = reached.argmax(axis=-1)
    before = np.maximum(place - 1, 0)
    high, low = (np.take_along_axis(losses, k[..., None], axis=-1)[..., 0].astype(np.float64) for k in (before, place))
    falls = np.isfinite(high) & (high > target) & (low <= target)  # not so from the start, or from what is not a number
    share = np.divide(high - target, high - low, out=np.ones_like(high), where=falls)
    steps = measured[before] + share * (measured[place] - measured[before])
    return np.where(reached.any(axis=-1), steps, np.inf)


def _text_table(rows: Sequence[Sequence[str]]) -> str:
    """Return the cells as a text table; the first and the last column are left-aligned, all others right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    left = (0, len(widths) - 1)
    lines = ([cell.ljust(widths[k]) if k in left else cell.rjust(widths[k]) for k, cell in enumerate(row)] for row in rows)
    return "\n".join("  ".join(line).rstrip() for line in lines)


def with_interval(compared: Comparison) -> str:
    """Return a comparison's ratio and interval as text; "-" if there is no ratio."""
    if math.isnan(compared.ratio):
        return "-"
    return f"{compared.ratio:.2f}" + ("" if math.isnan(compared.low) else f" [{compared.low:.2f}, {compared.high:.2f}]")


def _figure(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:,.0f}" if math.isfinite(value) else "not reached"


def settings_text(settings: Mapping[str, float]) -> str:
    """Return settings as text, such as "learning rate 0.1, 1 - beta1 0.05"."""
    names = (name.replace("one_minus_", "1 - ").replace("wd", "weight decay").replace("_", " ") for name in settings)
    return ", ".join(f"{name} {value:.3g}" for name, value in zip(names, settings.values(), strict=True))
