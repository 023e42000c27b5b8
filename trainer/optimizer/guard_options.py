"""GuardOptions: the options of optimizers against gradients that are too large, or not finite. See `TransformOptions`."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ...kernels import Rule, transforms
from ..validation import boolean, integer, number
from .base import Optimizer

__all__ = ["GuardOptions", "square_limit"]

_SKIP_RATE = 0.2  # what Andrew et al. recommend


class GuardOptions(Optimizer):
    """The options of a `RuleOptimizer` against gradients that are too large, or not finite.

    Args:
        clip_norm: multiply the gradients by min(1, clip_norm / (norm + 1e-6)), with the global norm of all gradients of a
            step, after `rescale_grad` and before `clip_gradient`, > 0; None means never. `.grad` is not changed.
        zclip: clip the gradients to a lower norm where their global norm is a spike, one that exceeds the running mean of
            the norms before by more than so many running standard deviations, > 0, 2.5 in the paper; None means never. With
            `clip_norm`, to that at most (Kumar et al. 2025, "ZClip", arXiv 2504.02507; `kernels.transforms.zclip`).
        zclip_decay: what mean and variance keep of themselves at each update, in [0, 1).
        zclip_warmup: updates in which norms are counted and not yet compared, >= 1.
        agc: adaptive gradient clipping by whole tensors: multiply each gradient by min(1, agc max(|w|, 0.001) / |g|), after
            `clip_norm` and `zclip`, > 0; None means never (Brock et al. 2021, "High-Performance Large-Scale Image
            Recognition Without Normalization", eq. 3, with norms of tensors. The paper's are those of rows and filters, as
            in `kernels.clip_adaptively_`).
        skip_norm: skip steps whose global gradient norm, before it is clipped, exceeds this, > 0; None means never. It is
            compared in float32. Everything else is as of `skip_nonfinite`, which this includes.
        skip_percentile: skip steps whose global gradient norm, before it is clipped, exceeds `skip_factor` times a running
            estimate of this percentile p of the norms, in (0, 100), such as 95; None means never. Each norm above the
            estimate multiplies it by exp(0.002 p), each other one by exp(-0.002 (100 - p)), those of skipped steps, too:
            where all norms become r times as large, about ln(r / skip_factor) / (0.002 p) steps are skipped, and then none
            (Andrew et al. 2021, "Differentially Private Learning with Adaptive Clipping", arXiv 1905.03871;
            `kernels.transforms.skip_above_percentile`). Norms that are 0 or not finite change nothing of it. Everything else
            is as of `skip_nonfinite`, which this includes.
        skip_factor: how many times the percentile a norm may be, >= 1. With 1, 100 - p percent of all steps are skipped.
        skip_warmup: steps in which the percentile is estimated and nothing skipped for it, >= 1.
        skip_nonfinite: skip steps whose gradients contain NaN or infinity, or have an infinite sum of squares: no weight and
            no state changes. A skipped step is counted, since the host does not synchronize with the device.
        **kwargs: those of `Optimizer`.
    """

    counts_as_step: bool = True  # whether a step counts as an update

    def __init__(
        self,
        *,
        clip_norm: float | None = None,
        zclip: float | None = None,
        zclip_decay: float = 0.97,
        zclip_warmup: int = 25,
        agc: float | None = None,
        skip_norm: float | None = None,
        skip_percentile: float | None = None,
        skip_factor: float = 2.0,
        skip_warmup: int = 50,
        skip_nonfinite: bool = False,
        **kwargs: Any,
    ) -> None:
        self.clip_norm = None if clip_norm is None else number("clip_norm", clip_norm, above=0)
        self.zclip = None if zclip is None else number("zclip", zclip, above=0)
        self.zclip_decay = number("zclip_decay", zclip_decay, low=0, below=1)
        self.zclip_warmup = integer("zclip_warmup", zclip_warmup, low=1)
        self.agc = None if agc is None else number("agc", agc, above=0)
        self.skip_norm = None if skip_norm is None else number("skip_norm", skip_norm, above=0)
        self.skip_percentile = None
        if skip_percentile is not None:
            self.skip_percentile = number("skip_percentile", skip_percentile, above=0, below=100)
        self.skip_factor = number("skip_factor", skip_factor, low=1)
        self.skip_warmup = integer("skip_warmup", skip_warmup, low=1)
        self.skip_nonfinite = boolean("skip_nonfinite", skip_nonfinite)
        self._skips_overflow = False  # as `skip_nonfinite`, where a loss scaler needs it
        super().__init__(**kwargs)

    @property
    def has_guards(self) -> bool:
        """Whether any of these options is on."""
        given = self.clip_norm, self.zclip, self.agc, self.skip_norm, self.skip_percentile
        return self.skip_nonfinite or self._skips_overflow or any(option is not None for option in given)

    def guard_values(self) -> dict[str, float]:
        """The hyper-parameters of these options, where they are not plain attributes."""
        values = {"skip_square": math.inf if self.skip_norm is None else square_limit(self.skip_norm)}
        if self.skip_percentile is not None:
            values |= {"skip_share": self.skip_percentile / 100, "skip_rate": _SKIP_RATE}
            if not self.counts_as_step:
                values |= {"skip_rate": 0.0, "skip_factor": math.inf, "skip_square": math.inf}
        if self.zclip is not None and not self.counts_as_step:
            values |= {"zclip": math.inf, "zclip_decay": 1.0, "zclip_warmup": 0.0, "clip_norm": math.inf}
        elif self.clip_norm is None:
            values["clip_norm"] = math.inf  # of zclip
        return values

    def _with_clipping(self, rule: Rule) -> Rule:
        """The rule on clipped gradients, but what counts as no update is not clipped."""
        if self.agc is not None and self.counts_as_step:
            rule = transforms.agc(rule)
        if self.zclip is not None:  # keeps states
            return transforms.zclip(rule)
        return transforms.clip_by_global_norm(rule) if self.clip_norm is not None and self.counts_as_step else rule

    def _with_skipping(self, rule: Rule) -> Rule:
        if self.skip_percentile is not None:  # keeps states
            return transforms.skip_above_percentile(rule)
        if self.skip_norm is not None and self.counts_as_step:
            return transforms.skip_large_updates(rule)
        skips = self.skip_nonfinite or self._skips_overflow or self.skip_norm is not None
        return transforms.apply_if_finite(rule) if skips else rule

    def _hidden(self) -> tuple[str, ...]:
        off = [] if self.zclip is not None else ["zclip_decay", "zclip_warmup"]
        off += [] if self.skip_percentile is not None else ["skip_factor", "skip_warmup"]
        return (*super()._hidden(), *off, *([] if self.skip_nonfinite else ["skip_nonfinite"]))


def square_limit(norm: float) -> float:
    """What squares of norms are compared with: just below the middle of two numbers of float32, so that a square and that
    square rounded to float32 give the same answer, whatever the types of tensors and ranks are.
    """
    with np.errstate(over="ignore"):
        limit = np.float32(norm * norm)
    if not np.isfinite(limit):
        return math.inf
    middle = (float(limit) + float(np.nextafter(limit, np.float32(np.inf)))) / 2
    return float(np.nextafter(middle, 0.0))
