"""Diagnose recorded runs: sentences that say what looks wrong, with the numbers that show it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from .runs import Run
from .series import NEVER, Curve
from .statistics import LARGEST, quantiles, trailing_means

__all__ = ["Finding", "diagnose", "findings", "nonfinite_gradients"]

# Thresholds. Healthy runs, of which the tests have some, stay below them.
HIGH_RATIO, TIMES_MEDIAN = 0.03, 30.0  # a tensor's ratio of update to weight, and that ratio over all tensors' median
TOO_HIGH, TOO_LOW = 0.1, 1e-7  # the median of these ratios over all tensors
GROWN, FASTER = 15.0, 5.0  # growth of a weight's norm, and that growth over all tensors' median
SPIKE, RARE = 10.0, 4.0  # a gradient norm over the median nearby, and over the 95 % quantile nearby
NEARBY = 50  # points
SILENT = 0.999  # the share of zeros in a layer's outputs
STALLED = 0.5  # the share of a tensor's elements with a gradient that do not change, at half of the steps
FEWEST, FEWEST_TENSORS = 10, 4  # points, and tensors, below which nothing is compared
MOST = 5  # sentences of one kind
AT_RANDOM = "stochastic rounding"  # occurs in `Run.storage`


def diagnose(run: Run) -> list[str]:
    """Return sentences about what looks wrong in a run, the worst first; an empty list for a healthy run.

    They report non-finite gradients and losses, tensors with a gradient of 0, layers with outputs of 0, updates that are too
    large for their weights or are lost in rounding, weights that blow up, spikes of the gradient norm, and losses that rise,
    never fell, or stand still.

    Args:
        run: the recording, complete or not. Quantities that it lacks are not judged.

    Example:
        >>> from tristep.viz import Run, diagnose
        >>> run = Run()
        >>> for step in range(1, 60):
        ...     run.add_scalars(step, {"loss": 1 / step if step < 50 else float("nan")})
        >>> diagnose(run)
        ['loss: not finite first at step 50, 10 steps in all']
    """
    return [finding.words for finding in findings(run)]


class Finding(NamedTuple):
    """A problem of a run, and where it shows.

    `parameter` is the first tensor concerned, None if it concerns no single tensor; `step` is one of the steps, if any.
    """

    words: str
    parameter: str | None = None
    step: int | None = None


def findings(run: Run) -> list[Finding]:
    """Return what `diagnose` says as `Finding`s, which also name a tensor and a step."""
    results = [*_not_finite(run), *_bad_losses(run)]
    if _only_skipped(run):
        return results  # all other symptoms follow from that
    for quantity, judge in JUDGES:
        series = run.tensors.get(quantity)
        if series is not None and len(series):
            curve = series.curve()
            if len(curve.first) >= FEWEST and curve.high.shape[1]:
                results += judge(run, curve)
    if run.activations is not None:  # whose tensors are layers, no parameters that a view could select
        results += [finding._replace(parameter=None) for finding in findings(run.activations)]
    return results + list(_losses(run))


def nonfinite_gradients(run: Run) -> tuple[Curve, np.ndarray] | None:
    """Find infinite and NaN gradients.

    Return a curve of the run, and for each of its points and each parameter whether it has such gradients, bool
    [n_points, n_parameters]; None if neither counts of them nor gradient norms have been recorded.
    """
    for quantity in ("gradient_nonfinite", "gradient_norm"):
        series = run.tensors.get(quantity)
        if series is not None and len(series):
            curve = series.curve()
            if quantity == "gradient_nonfinite":
                return curve, curve.high > 0
            # A tensor that never gets a gradient has no finite norm.
            return curve, (curve.nonfinite > 0) & np.isfinite(curve.high).any(axis=0)
    return None


def _not_finite(run: Run) -> Iterator[Finding]:
    counts = nonfinite_gradients(run)
    if counts is None or not counts[1].any():
        return
    curve, bad = counts
    is_counted = len(run.tensors.get("gradient_nonfinite", ())) > 0
    first = run.tensors["gradient_nonfinite"].first_positive if is_counted else run.tensors["gradient_norm"].first_nonfinite
    earliest = np.where(bad.any(axis=0), first, NEVER)
    indices = np.flatnonzero(earliest == earliest.min())
    tensors = [run.parameters[i] for i in indices]
    where = repr(tensors[0])
    if len(tensors) > 1:
        where += " and 1 other tensor" if len(tensors) == 2 else f" and {len(tensors) - 1} other tensors"
    step = int(earliest.min())
    if _only_skipped(run):
        number = len(run.tensors["update_norm"])
        steps = "the only step, which was" if number == 1 else f"each of {number:,} steps, which were all"
        words = f"gradients: not finite in {where} at {steps} skipped: no weight has changed"
        yield Finding(words, tensors[0], step)
        return
    elements, k = "", int(np.searchsorted(curve.last, step))
    if is_counted and len(tensors) == 1 and curve.first[k] == curve.last[k]:  # a longer block has the largest count only
        number = int(curve.high[k, indices[0]])
        elements = " (1 element)" if number == 1 else f" ({number} elements)"
    yield Finding(f"gradients: not finite first at step {step:,} in {where}{elements}", tensors[0], step)


def _only_skipped(run: Run) -> bool:
    counts, updates = nonfinite_gradients(run), run.tensors.get("update_norm")
    if counts is None or updates is None or not len(updates):
        return False
    sizes = updates.curve().high  # NaN for a tensor without a gradient
    return bool(counts[1].any(axis=1).all() and (sizes == 0).any() and not (sizes > 0).any())


def _bad_losses(run: Run) -> Iterator[Finding]:
    loss = run.scalars.get("loss")
    if loss is not None and len(loss):
        curve = loss.curve()
        bad = curve.nonfinite > 0
        if bad.any():
            number, first = int(curve.nonfinite.sum()), int(loss.first_nonfinite)
            plural = "1 step" if number == 1 else f"{number:,} steps"
            words = f"loss: not finite first at step {first:,}, {plural} in all"
            yield Finding(words, None, first)


def _at(curve: Curve, k: int) -> str:
    """Name the steps of point `k`; which of them has its minimum or maximum is not known."""
    first, last = curve.first[k], curve.last[k]
    return f"step {first:,}" if first == last else f"a step from {first:,} to {last:,}"


def _dead(run: Run, curve: Curve) -> Iterator[Finding]:
    zero = (curve.high == 0) & (curve.nonfinite == 0)
    # How many points at the end are 0 without a break.
    run_of_zeros = np.where(zero.all(axis=0), len(zero), zero[::-1].argmin(axis=0))
    enough = max(FEWEST, len(zero) // 4)
    dead = run_of_zeros >= enough
    if dead.all():
        first = int(curve.first[len(zero) - run_of_zeros.min()])
        yield Finding(f"gradients: all are 0 since step {first:,}", None, first)
        return
    alive = np.any(curve.high[-enough:] > 0, axis=0)
    # Consecutive tensors: a layer that blocks gradients blocks them for all layers before it.
    groups = [group for group in np.split(np.arange(len(dead)), np.flatnonzero(np.diff(dead)) + 1) if dead[group[0]]]
    for group in groups[:MOST]:
        names = [run.parameters[i] for i in group]
        first = int(curve.first[len(zero) - run_of_zeros[group].min()])
        since = f"from step {first:,} to {curve.last[-1]:,}"
        later = np.flatnonzero(alive[group[-1] :])
        looked = f"; the first behind that gets one is {run.parameters[group[-1] + later[0]]}" if later.size else ""
        if len(names) == 1:
            words = f"{names[0]}: its gradient is 0 {since}: nothing reaches it{looked}"
        else:
            some = f"{names[0]} and {names[1]}" if len(names) == 2 else f"{names[0]} to {names[-1]}, {len(names)} tensors"
            words = f"{some}: their gradients are 0 {since}: nothing reaches them{looked}"
        yield Finding(words, names[0], first)
    if len(groups) > MOST:
        yield Finding(f"{sum(map(len, groups[MOST:]))} more tensors have a gradient of 0")


def _ratios(run: Run, curve: Curve) -> Iterator[Finding]:
    ratios = curve.high
    # Judged by quarters: a rate that is too high makes the weights grow, which lowers the ratio, so that a mean over the run
    # would hide it.
    quarters = np.array_split(np.arange(len(ratios)), 4)
    typical = np.concatenate([quantiles(ratios[quarter].T, (0.5,)) for quarter in quarters])
    finite = np.isfinite(typical)
    if not finite[-1].any():
        return
    median = quantiles(typical, (0.5,))[0]  # of all tensors, in each quarter
    with np.errstate(invalid="ignore", divide="ignore"):
        times = np.where(finite & (median[:, None] > 0), typical / median[:, None], 0.0)
    times[~(typical > HIGH_RATIO)] = 0.0
    norms = run.tensors.get("update_norm")
    if norms is not None and len(norms) == len(run.tensors["update_ratio"]):
        # A weight near 0, such as a bias, has a large ratio although its updates are no larger than usual.
        sizes = np.concatenate([quantiles(norms.curve().high[quarter].T, (0.5,)) for quarter in quarters])
        times[~(sizes > 3 * quantiles(sizes, (0.5,)).T)] = 0.0
    worst = times.max(axis=0)
    for i in sorted(np.flatnonzero(worst > TIMES_MEDIAN), key=lambda i: -worst[i])[:MOST]:
        peaks = [(np.nanmax(ratios[quarter, i]), q) for q, quarter in enumerate(quarters) if times[q, i] > TIMES_MEDIAN]
        q = max(peaks)[1]
        k = quarters[q][int(np.nanargmax(ratios[quarters[q], i]))]
        words = (
            f"{run.parameters[i]}: update ratio {ratios[k, i]:.1g} at {_at(curve, k)}, then usually "
            f"{typical[q, i]:.1g}, {times[q, i]:.0f} times the median of all tensors ({median[q]:.1g}): "
            "its learning rate is too high"
        )
        yield Finding(words, run.parameters[i], int(curve.last[k]))
    moving = ratios[ratios > 0]  # a tensor without a gradient need not move
    if median[-1] > TOO_HIGH:
        yield Finding(
            f"updates: half of all tensors change by over {median[-1]:.1g} of themselves each step: the rate is high"
        )
    elif not moving.size:
        yield Finding("updates: all are 0: no weight changes")
    elif (overall := float(np.median(moving))) < TOO_LOW:
        yield Finding(
            f"updates: half of all tensors change by under {overall:.1g} of themselves each step: they hardly move"
        )


def _stalls(run: Run, curve: Curve) -> Iterator[Finding]:
    """Find weights that do not change although they have gradients: updates that are lost in rounding."""
    zeros, updates = (run.tensors.get(quantity) for quantity in ("gradient_zeros", "update_norm"))
    if zeros is None or updates is None or not len(zeros) == len(updates) == len(run.tensors["weight_unchanged"]):
        return
    half = len(curve.mean) // 2  # judge the second half, because learning rates often begin at 0
    zero, unchanged = zeros.curve().mean[half:], curve.mean[half:]
    with np.errstate(invalid="ignore", divide="ignore"):
        # A lower bound: most elements without a gradient, as of an embedding, do not change, but momentum moves some.
        shares = (unchanged - zero) / (1 - zero)
    shares[~(updates.curve().high[half:] > 0)] = np.nan  # a learning rate of 0, or a skipped step
    typical = quantiles(shares.T, (0.5,))[0]
    storage = np.array(run.storage or [""] * len(typical))
    stalled = [(i, storage[i]) for i in np.argsort(-typical, kind="stable") if typical[i] >= STALLED]
    stalled = [(i, kind) for i, kind in stalled if AT_RANDOM not in kind]  # rounding errors average out over steps
    for kind in dict.fromkeys(kind for _, kind in stalled):
        members = [i for i, each in stalled if each == kind]
        named = [f"{100 * typical[i]:.0f} % of {run.parameters[i]}" for i in members[:MOST]]
        if len(members) > MOST:
            others = f"{len(members) - MOST} other tensor{'s' * (len(members) > MOST + 1)}"
            named.append(f"{100 * typical[members[-1]]:.0f} % or more of {others}")
        some = f"{', '.join(named[:-1])} and {named[-1]}" if len(named) > 1 else named[0]
        words = (
            f"weights: updates are lost in rounding{', in ' * bool(kind)}{kind}: usually {some} do not change at a step, "
            f"though their gradients are not 0: {_remedy(kind)}"
        )
        yield Finding(words, run.parameters[members[0]])


def _remedy(storage: str) -> str:
    if storage == "bfloat16":
        return (
            'keep masters (multi_precision=True, "remainder" or "split8"), round stochastically (stochastic_rounding=True), '
            "or raise the learning rate"
        )
    return f"{'keep masters (multi_precision=True), or ' * (storage == 'float16')}raise the learning rate"


def _growth(run: Run, curve: Curve) -> Iterator[Finding]:
    """Find weights that blow up. Ratios of update to weight miss them, as they fall while a weight grows."""
    finite = np.isfinite(curve.low)
    first, columns = finite.argmax(axis=0), np.arange(finite.shape[1])
    start = np.where(finite.any(axis=0), curve.low[first, columns], np.nan)
    if (start > 0).sum() < FEWEST_TENSORS:
        return  # too few for a typical value
    # A bias that begins at 0 may grow to the size that weights begin with.
    usual = float(np.median(start[start > 0]))
    largest = np.where(finite, curve.high, -np.inf)
    peak = largest.argmax(axis=0)
    high = largest[peak, columns]
    growth, median = high / np.fmax(start, usual), float(np.median(high[start > 0] / start[start > 0]))
    for i in sorted(np.flatnonzero(growth > max(GROWN, FASTER * median)), key=lambda i: -growth[i])[:MOST]:
        words = (
            f"{run.parameters[i]}: its norm grows from {start[i]:.2g} at {_at(curve, first[i])} to "
            f"{high[i]:.3g} at {_at(curve, peak[i])}, while half of all tensors grow {median:.2g} times at "
            "most: it blows up"
        )
        yield Finding(words, run.parameters[i], int(curve.last[peak[i]]))


def _spikes(run: Run, curve: Curve) -> Iterator[Finding]:
    norms = curve.high
    with np.errstate(over="ignore"):
        total = np.sqrt(np.nansum(norms.astype(np.float64) ** 2, axis=1))
    padded = np.pad(total, NEARBY // 2, mode="reflect" if len(total) > NEARBY // 2 else "edge")
    nearby, often = quantiles(np.lib.stride_tricks.sliding_window_view(padded, NEARBY + 1), (0.5, 0.95))
    with np.errstate(divide="ignore", invalid="ignore"):
        times = np.where(nearby > 0, total / nearby, 0.0)
    # Late in training most norms are small, but not those of the few batches that are still misclassified.
    spikes = np.flatnonzero((times > SPIKE) & (total > RARE * often))
    if spikes.size:
        k = int(spikes[times[spikes].argmax()])
        worst = run.parameters[int(np.nanargmax(norms[k]))]
        more = f"; {spikes.size} such points in all" if spikes.size > 1 else ""
        words = (
            f"gradients: norm {total[k]:.2g} at {_at(curve, k)}, {times[k]:.0f} times the median nearby, most of it "
            f"in {worst!r}: a spike{more}"
        )
        yield Finding(words, worst, int(curve.last[k]))


def _losses(run: Run) -> Iterator[Finding]:
    series = run.scalars.get("loss")
    if series is None or len(series) < 2 * FEWEST:
        return
    curve = series.curve()
    shown = np.abs(curve.mean) < LARGEST
    number = int(shown.sum())
    if number < 2 * FEWEST:
        return
    tenth = (curve.last[-1] - curve.first[0] + 1) / 10
    middle = curve.last[shown][number // 2]
    shown &= curve.last >= curve.first[0] + tenth - 1  # before, an average is one of fewer steps
    steps, losses, means = curve.last[shown], curve.mean[shown], trailing_means(curve, [tenth])[0, shown]
    first, last, k = float(means[0]), float(means[-1]), int(means.argmin())
    best = float(means[k])
    noise = float(np.std(losses - means))
    if last > best + max(0.5 * (first - best), 4 * noise) and last > 1.5 * abs(best):
        yield Finding(f"loss: {last:.3g} at the end, after {best:.3g} at step {steps[k]:,}: it rises", None, int(steps[k]))
    elif first - best < max(0.02 * abs(first), noise / 4) and number >= 5 * FEWEST:
        yield Finding(f"loss: {first:.3g} at first and {last:.3g} at the end: it has not fallen")
    else:
        since = int(np.flatnonzero(means <= best + min(0.01 * (first - best), 0.05 * abs(best)))[0])
        if steps[since] < middle and number >= 5 * FEWEST:
            words = f"loss: {means[since]:.3g} at step {steps[since]:,} and {last:.3g} at the end: it stands still"
            yield Finding(words, None, int(steps[since]))


def _silent(run: Run, curve: Curve) -> Iterator[Finding]:
    """Find layers all of whose outputs are 0, as those of ReLUs that no input reaches any more."""
    zero = curve.low >= SILENT
    run_of_zeros = np.where(zero.all(axis=0), len(zero), zero[::-1].argmin(axis=0))
    silent = np.flatnonzero(run_of_zeros >= max(FEWEST, len(zero) // 4))
    for i in silent[:MOST]:
        first = int(curve.first[len(zero) - run_of_zeros[i]])
        share = 100 * float(curve.low[len(zero) - run_of_zeros[i] :, i].min())
        words = (
            f"{run.parameters[i]}: {share:.4g} % of its outputs are 0 from step {first:,} to {curve.last[-1]:,}: the layer "
            "is dead; a lower learning rate or another start keeps it alive"
        )
        yield Finding(words, run.parameters[i], first)
    if len(silent) > MOST:
        yield Finding(f"{len(silent) - MOST} more layers have outputs of 0")


# Which quantities are judged, in this order, if they have enough points.
JUDGES: tuple[tuple[str, Callable[[Run, Curve], Iterator[Finding]]], ...] = (
    ("gradient_norm", _dead),
    ("update_ratio", _ratios),
    ("weight_unchanged", _stalls),
    ("weight_norm", _growth),
    ("gradient_norm", _spikes),
    ("activation_zeros", _silent),
)
