"""notes: what a look at a recorded run tells about its health, in sentences with the numbers that they rest on."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from .runs import Curve, Run

__all__ = ["notes", "quantiles", "smoothed"]

# From when on something is worth a sentence. Healthy runs stay below; the tests have some.
HIGH_RATIO, TIMES_MEDIAN = 0.03, 30.0  # of a tensor's update to its weight, and of that to the median of all tensors
TOO_HIGH, TOO_LOW = 0.1, 1e-7  # of the median of all tensors
SPIKE = 10.0  # times the median of the gradient norms nearby
NEARBY = 50  # points
LARGEST = 1e38  # what is beyond counts as not finite
FEWEST = 10  # points, for whatever is compared


def notes(run: Run) -> list[str]:
    """Sentences on what looks wrong in a run, the worst first; none for one that looks well.

    They tell of gradients and losses that are not finite, of tensors with a gradient of 0, of updates far larger than their
    weights allow, of spikes of the gradients' norm, and of losses that rise, never fell, or have come to stand still.

    Args:
        run: with what has been recorded of it so far; what it lacks is not judged.

    Example:
        >>> from tristep.viz import Run, notes
        >>> run = Run()
        >>> for step in range(1, 60):
        ...     run.add_scalars(step, {"loss": 1 / step if step < 50 else float("nan")})
        >>> notes(run)
        ['loss: not finite first at step 50, 10 steps in all']
    """
    return [*_not_finite(run), *_dead(run), *_ratios(run), *_spikes(run), *_losses(run)]


def smoothed(values: np.ndarray, widths: Sequence[float]) -> np.ndarray:
    """Averages around each value, weighted by a bell. What is not finite becomes NaN, and counts for nothing.

    Args:
        values: [n].
        widths: the bells' standard deviations, in values, each >= 0.

    Returns:
        float64 [n_widths, n].
    """
    values = np.asarray(values, dtype=np.float64)
    there = np.abs(values) < LARGEST
    filled, result = np.where(there, values, 0.0), np.where(there, values, np.nan)[None].repeat(len(widths), axis=0)
    for i, width in enumerate(widths):
        # Not by way of frequencies: a loss of 1e30 would reach all others by its rounding.
        reach = min(math.ceil(4 * width), len(values))
        if reach > 0:
            bell = np.exp(-0.5 * (np.arange(-reach, reach + 1) / width) ** 2)
            total, weight = (np.convolve(each, bell)[reach : reach + len(values)] for each in (filled, there.astype(float)))
            result[i] = np.divide(total, weight, out=np.full(len(values), np.nan), where=there)
    return result


def quantiles(values: np.ndarray, shares: Sequence[float]) -> np.ndarray:
    """Of each row's values that are not NaN the one that this share of them is below; NaN where there is none.

    Args:
        values: [n, m].
        shares: in [0, 1].

    Returns:
        [n_shares, n].
    """
    ordered = np.sort(values, axis=1)  # NaN comes last
    number = (~np.isnan(values)).sum(axis=1)
    places = np.rint(np.multiply.outer(np.asarray(shares), np.maximum(number - 1, 0))).astype(np.int64)
    return ordered[np.arange(len(values)), places] if values.shape[1] else np.full((len(shares), len(values)), np.nan)


def _not_finite(run: Run) -> Iterator[str]:
    counts = run.tensors.get("gradient_nonfinite")
    norms = run.tensors.get("gradient_norm")
    if counts is not None and len(counts):
        curve = counts.curve()
        bad = curve.high > 0
    elif norms is not None and len(norms):
        curve = norms.curve()
        bad = curve.nonfinite > 0
        bad &= ~bad.all(axis=0)  # a tensor without a gradient has no norm either
    else:
        bad = np.zeros((0, 0), dtype=bool)
    if bad.any():
        k = int(bad.any(axis=1).argmax())
        tensors = [run.parameters[i] for i in np.flatnonzero(bad[k])]
        others = f" and {len(tensors) - 1} other tensors" if len(tensors) > 1 else ""
        elements = f" ({curve.high[k][bad[k]].max():.0f} elements)" if counts is not None and not others else ""
        yield f"gradients: not finite first at step {curve.first[k]:,} in {tensors[0]!r}{others}{elements}"
    loss = run.scalars.get("loss")
    if loss is not None and len(loss):
        curve = loss.curve()
        bad = curve.nonfinite > 0
        if bad.any():
            number = int(curve.nonfinite.sum())
            plural = "1 step" if number == 1 else f"{number:,} steps"
            yield f"loss: not finite first at step {curve.first[bad.argmax()]:,}, {plural} in all"


def _dead(run: Run) -> Iterator[str]:
    found = _tensor(run, "gradient_norm")
    if found is None:
        return
    curve, norms = found
    zero = (norms == 0) & (curve.nonfinite == 0)
    # Points at the end that are 0 without a break.
    run_of_zeros = np.where(zero.all(axis=0), len(zero), zero[::-1].argmin(axis=0))
    dead = run_of_zeros >= max(FEWEST, len(zero) // 4)
    if dead.all():
        yield f"gradients: all are 0 since step {curve.first[len(zero) - run_of_zeros.min()]:,}"
        return
    for i in np.flatnonzero(dead)[:5]:
        since, last = curve.first[len(zero) - run_of_zeros[i]], curve.last[-1]
        yield f"{run.parameters[i]}: its gradient is 0 from step {since:,} to {last:,}: nothing reaches it"
    if dead.sum() > 5:
        yield f"{dead.sum() - 5} more tensors have a gradient of 0"


def _ratios(run: Run) -> Iterator[str]:
    found = _tensor(run, "update_ratio")
    if found is None:
        return
    curve, ratios = found
    # By quarters of the run: weights that begin with a rate too high for them soon are large enough for it.
    quarters = np.array_split(np.arange(len(ratios)), 4)
    typical = np.concatenate([quantiles(ratios[quarter].T, (0.5,)) for quarter in quarters])
    known = np.isfinite(typical)
    if not known[-1].any():
        return
    median = quantiles(typical, (0.5,))[0]  # of all tensors, in each quarter
    with np.errstate(invalid="ignore", divide="ignore"):
        times = np.where(known, typical / median[:, None], 0.0)
    times[~(typical > HIGH_RATIO)] = 0.0
    if (norms := _tensor(run, "update_norm")) is not None and len(norms[1]) == len(ratios):
        # A weight near 0, such as a bias, has a large ratio by itself; its updates are as small as those of others.
        sizes = np.concatenate([quantiles(norms[1][quarter].T, (0.5,)) for quarter in quarters])
        times[~(sizes > 3 * quantiles(sizes, (0.5,)).T)] = 0.0
    worst = times.max(axis=0)
    for i in sorted(np.flatnonzero(worst > TIMES_MEDIAN), key=lambda i: -worst[i])[:5]:
        peaks = [(np.nanmax(ratios[quarter, i]), q) for q, quarter in enumerate(quarters) if times[q, i] > TIMES_MEDIAN]
        q = max(peaks)[1]
        k = quarters[q][int(np.nanargmax(ratios[quarters[q], i]))]
        yield (
            f"{run.parameters[i]}: update ratio {ratios[k, i]:.1g} at step {curve.last[k]:,}, then usually "
            f"{typical[q, i]:.1g}, {times[q, i]:.0f} times the median of all tensors ({median[q]:.1g}): "
            "its learning rate is too high"
        )
    overall = float(quantiles(ratios.reshape(1, -1), (0.5,))[0, 0])
    if median[-1] > TOO_HIGH:
        yield f"updates: half of all tensors change by over {median[-1]:.1g} of themselves each step: the rate is high"
    elif 0 <= overall < TOO_LOW:
        yield f"updates: half of all tensors change by under {overall:.1g} of themselves each step: they hardly move"


def _spikes(run: Run) -> Iterator[str]:
    found = _tensor(run, "gradient_norm")
    if found is None:
        return
    curve, norms = found
    with np.errstate(over="ignore"):
        total = np.sqrt(np.nansum(norms.astype(np.float64) ** 2, axis=1))
    padded = np.pad(total, NEARBY // 2, mode="reflect" if len(total) > NEARBY // 2 else "edge")
    nearby = np.median(np.lib.stride_tricks.sliding_window_view(padded, NEARBY + 1), axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        times = np.where(nearby > 0, total / nearby, 0.0)
    spikes = np.flatnonzero(times > SPIKE)
    if spikes.size:
        k = int(spikes[times[spikes].argmax()])
        worst = run.parameters[int(np.nanargmax(norms[k]))]
        more = f"; {spikes.size} such points in all" if spikes.size > 1 else ""
        yield (
            f"gradients: norm {total[k]:.2g} at step {curve.last[k]:,}, {times[k]:.0f} times the median nearby, most of it "
            f"in {worst!r}: a spike{more}"
        )


def _losses(run: Run) -> Iterator[str]:
    series = run.scalars.get("loss")
    if series is None or len(series) < 2 * FEWEST:
        return
    curve = series.curve()
    there = np.abs(curve.mean) < LARGEST
    steps, losses = curve.last[there], curve.mean[there]
    if len(losses) < 2 * FEWEST:
        return
    (means,) = smoothed(losses, [len(losses) / 50])
    first, last, k = float(means[0]), float(means[-1]), int(means.argmin())
    best = float(means[k])
    noise = float(np.std(losses - means))
    if last > best + max(0.5 * (first - best), 4 * noise) and last > 1.5 * abs(best):
        yield f"loss: {last:.3g} at the end, after {best:.3g} at step {steps[k]:,}: it rises"
    elif first - best < max(0.02 * abs(first), noise / 4) and len(losses) >= 5 * FEWEST:
        yield f"loss: {first:.3g} at first and {last:.3g} at the end: it has not fallen"
    else:
        since = int(np.flatnonzero(means <= best + min(0.01 * (first - best), 0.05 * abs(best)))[0])
        if since < len(losses) // 2 and len(losses) >= 5 * FEWEST:
            yield f"loss: {means[since]:.3g} at step {steps[since]:,} and {last:.3g} at the end: it stands still"


def _tensor(run: Run, quantity: str) -> tuple[Curve, np.ndarray] | None:
    """A quantity of all tensors over enough points, the largest value of each point."""
    series = run.tensors.get(quantity)
    if series is None or not len(series):
        return None
    curve = series.curve()
    return (curve, curve.high) if len(curve.first) >= FEWEST and curve.high.shape[1] else None
