"""`skip_above_percentile`: skip steps if the gradients' norm is far above a running percentile of earlier norms."""

from __future__ import annotations

from functools import cache

from ..language import Reduction, Rule, jit, tl
from ..language.codegen import RuleSource, tuple_text
from ..language.text import function_of_text
from ..rules.common import norm_of, total_square
from .base import ComposedReduction, Made, skipping, transformed

_KEPT = ("norm_percentile", "percentile_count", "step_taken")
_HYPER = ("skip_share", "skip_rate", "skip_factor", "skip_warmup", "skip_square")


def skip_above_percentile(rule: Rule) -> Rule:
    """Return the rule with steps skipped if the gradients' norm over all tensors exceeds `skip_factor` P.

    P is a running estimate of the norm that the fraction `skip_share` of norms does not exceed. The norm n of an update is
    compared with P from before the update, and then

        P <- P exp(skip_rate (skip_share - b)), b = 1 if n <= P, else 0

    After T updates log P has moved by skip_rate times the sum of skip_share - b. So if P stays within bounds, the fraction
    of norms with n <= P converges to skip_share as 1 / T, for any distribution of norms. Norms of skipped updates move P,
    too, so that it follows a lasting change of their level; each moves it by a factor of at most exp(skip_rate).

    Unlike the paper, which is given an initial P, this skips no step because of P in the first `skip_warmup` updates, and in
    the first half of these P is the geometric mean of all norms so far. A norm that is 0 or not finite does not change P. A
    step is also skipped if the sum of squares of the gradients is not finite or exceeds `skip_square`, which is infinite for
    no limit.

    `skip_factor`, `skip_share`, `skip_rate`, `skip_warmup` and `skip_square` are hyper-parameters. The per-tensor states,
    equal for all tensors, are `norm_percentile`, which is P; `percentile_count`, the number of norms so far; and
    `step_taken`, 1, or 0 if the last update was skipped. They change in skipped updates, too; those of `zclip` do not. With
    a `skip_rate` of 0 nothing is counted or estimated.

    Args:
        rule: an elementwise rule. Transforms that are applied after this one are not skipped.

    Source: Andrew et al. (2021), "Differentially Private Learning with Adaptive Clipping", arXiv 1905.03871, the geometric
    update, of one norm at a time and without noise. TensorFlow Federated's `ZeroingConfig` zeroes updates above a multiple
    of such an estimate.
    """
    return transformed(skip_above_percentile, _make, rule)


@jit
def followed(total, percentile, count, share, rate, factor, warmup, limit):
    """Return the new percentile, the number of norms, and 1 if a step with this sum of squares is taken, else 0."""
    norm = norm_of(total)
    is_finite = total - total == 0.0
    taken = is_finite & (total <= limit) & ((count < warmup) | (norm <= factor * percentile))
    learns = is_finite & (norm > 0.0) & (rate > 0.0)
    known = count + 1.0
    before = tl.where(count > 0.0, percentile, norm)
    mean = before * tl.exp((tl.log(norm) - tl.log(before)) / known)
    moved = before * tl.exp(rate * (share - tl.where(norm <= before, 1.0, 0.0)))
    new = tl.where(2.0 * count < warmup, mean, moved)
    return tl.where(learns, new, percentile), tl.where(learns, known, count), tl.where(taken, 1.0, 0.0)


@jit
def is_taken(flag):
    return flag > 0.5


@cache
def _watching(of: Reduction) -> Reduction:
    """Return a reduction with the states of the percentile, then the states, or else the sum, of a given reduction."""
    kept, more = of.kept or ("norm_square",), of.finish_hyper
    new = [f"new_{name}" for name in (*_KEPT, *kept)]
    followed_names, other_names = new[: len(_KEPT)], new[len(_KEPT) :]
    finished = f"finished(sums, {tuple_text(kept)}, {tuple_text(more)})" if of.finished else "(total,)"
    lines = [
        "total, = sums",
        f"{tuple_text((*_KEPT, *kept))} = kept",
        f"{tuple_text((*_HYPER, *more))} = hyper",
        f"{tuple_text(followed_names)} = followed({', '.join(('total', *_KEPT[:2], *_HYPER))})",
        f"{tuple_text(other_names)} = {finished}",
    ]
    taken = f"is_taken({followed_names[-1]})"
    chosen = [f"tl.where({taken}, {new}, {old})" for new, old in zip(other_names, kept, strict=True)]
    result = tuple_text([*followed_names, *chosen])
    text = "".join(f"    {line}\n" for line in (*lines, f"return {result}"))
    names = {"tl": tl, "followed": followed, "is_taken": is_taken, "finished": of.finished, "__name__": __name__}
    watching = ComposedReduction(of.fn, None, of.scope, op=of.op)
    watching.finish(function_of_text("percentile", f"def percentile(sums, kept, hyper):\n{text}", names))
    return watching


def _make(rule: Rule) -> Made:
    RuleSource(rule, *_KEPT, *_HYPER)  # refuses names that the rule has
    before = rule.reductions[0] if rule.knows_total else total_square
    made = skipping(rule, "skipping_spikes", is_taken, first=_watching(before), place=-1 - before.n_results)
    return made._replace(skip_by=_KEPT[-1])
