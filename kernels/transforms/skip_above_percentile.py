"""`skip_above_percentile`: no change where the gradients' norm is far above a running percentile of the norms before."""

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
    """The rule, but nothing changes where the gradients' norm over all tensors exceeds `skip_factor` times a percentile.

    That is a running estimate P of the norm which the share `skip_share` of norms does not exceed. With the norm n of an
    update, which is compared with P as it was before,

        P <- P exp(skip_rate (skip_share - b)), b = 1 if n <= P, else 0

    After T updates log P has moved by skip_rate times the sum of skip_share - b: where it stays between bounds, the share of
    norms with n <= P goes to skip_share as 1 / T, whatever their distribution is. Norms of skipped updates move P, too, so
    that it follows a lasting change of their level; none moves it by more than the factor exp(skip_rate), whatever its size.

    The start is not the paper's, which is given one: in the first `skip_warmup` updates none is skipped for P, and in the
    first half of these P is the geometric mean of all norms so far. A norm that is 0 or not finite moves nothing. Nothing
    changes either where the sum of squares is not finite or exceeds `skip_square`, as of `skip_large_updates`; infinity is
    for no such limit.

    All these are hyper-parameters. The per-tensor states, the same for all tensors, are `norm_percentile`, P;
    `percentile_count`, of how many norms it is; and `step_taken`, 1, or 0 if the last update was skipped. They change in
    skipped updates, too; those of `zclip` do not. With a `skip_rate` of 0 nothing is counted or estimated.

    Args:
        rule: an elementwise rule; what is composed after this is not skipped.

    Source: Andrew et al. (2021), "Differentially Private Learning with Adaptive Clipping", arXiv 1905.03871, the geometric
    update, of one norm at a time and without noise. TensorFlow Federated's `ZeroingConfig` zeroes updates above a multiple
    of such an estimate.
    """
    return transformed(skip_above_percentile, _make, rule)


@jit
def followed(total, percentile, count, share, rate, factor, warmup, limit):
    """The new percentile, how many norms there were, and whether a step with this sum of squares is taken: 1, or 0."""
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
    """A reduction to the sum of squares with what `followed` gives, and what this one keeps of it, if it keeps anything."""
    kept, more = of.kept or ("norm_square",), of.finish_hyper
    new = [f"new_{name}" for name in (*_KEPT, *kept)]
    own, others = new[: len(_KEPT)], new[len(_KEPT) :]
    lines = [
        "total, = sums",
        f"{tuple_text((*_KEPT, *kept))} = kept",
        f"{tuple_text((*_HYPER, *more))} = hyper",
        f"{tuple_text(own)} = followed({', '.join(('total', *_KEPT[:2], *_HYPER))})",
        f"{tuple_text(others)} = {f'finished(sums, {tuple_text(kept)}, {tuple_text(more)})' if of.finished else '(total,)'}",
    ]
    result = tuple_text([*own, *(f"tl.where(is_taken({own[-1]}), {a}, {b})" for a, b in zip(others, kept, strict=True))])
    text = "".join(f"    {line}\n" for line in (*lines, f"return {result}"))
    known = {"tl": tl, "followed": followed, "is_taken": is_taken, "finished": of.finished, "__name__": __name__}
    watching = ComposedReduction(of.fn, None, of.scope, op=of.op)
    watching.finish(function_of_text("percentile", f"def percentile(sums, kept, hyper):\n{text}", known))
    return watching


def _make(rule: Rule) -> Made:
    RuleSource(rule, *_KEPT, *_HYPER)  # refuses names that the rule has
    before = rule.reductions[0] if rule.knows_total else total_square
    made = skipping(rule, "skipping_spikes", is_taken, first=_watching(before), place=-1 - before.n_results)
    return made._replace(skip_by=_KEPT[-1])
