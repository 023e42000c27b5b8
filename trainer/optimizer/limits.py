"""Limits by the norm of all gradients of a step: what the options ask for, and `Limiter`, which has what steps keep."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ...kernels import Update, transforms
from ...kernels.language import Limit
from ...kernels.layouts import compute_dtype
from ...kernels.reductions import Join, join_totals
from ...kernels.rules import spikes
from ...kernels.transforms.limited import factor_of

NUMBERS: tuple[str, ...] = spikes.state
OWN, JOINT = ("clip_norm", "skip_square"), ("clip_norm_of_all", "skip_square_of_all")  # names of hyper-parameters
_SKIP_RATE = 0.2  # recommended by Andrew et al.


def limit_of(optimizer: Any) -> tuple[bool, bool] | None:
    """Return `skips` and `told` of `transforms.limited` for the next step; None if nothing is limited."""
    spikes_skip, counts = optimizer.skip_percentile is not None, optimizer.counts_as_step
    skips = optimizer.skip_nonfinite or optimizer._skips_overflow or optimizer.skip_norm is not None or spikes_skip
    told = counts and (optimizer.zclip is not None or spikes_skip)
    if skips or told or (counts and optimizer.clip_norm is not None):
        return skips, told
    return None


def limited(rule: Any, optimizer: Any, names: tuple[str, str] = OWN) -> Any:
    """Return the rule with the limits that an optimizer's options ask for; `names` has those of its two hyper-parameters."""
    limit = limit_of(optimizer)
    return rule if limit is None else transforms.limited(rule, *limit, names)


def limit_values(optimizer: Any, names: tuple[str, str] = OWN) -> dict[str, float]:
    if not optimizer.counts_as_step:
        return dict.fromkeys(names, math.inf)
    norm, skip_norm = optimizer.clip_norm, optimizer.skip_norm
    return {
        names[0]: math.inf if norm is None else norm,
        names[1]: math.inf if skip_norm is None else square_limit(skip_norm),
    }


def square_limit(norm: float) -> float:
    """Return the limit for the square of a norm: just below the middle between the float32 norm^2 and the next float32.

    A square in float64 and the same rounded to float32 lie on one side of it, so ranks with different dtypes decide alike.
    """
    with np.errstate(over="ignore"):
        limit = np.float32(norm * norm)
    if not np.isfinite(limit):
        return math.inf
    middle = (float(limit) + float(np.nextafter(limit, np.float32(np.inf)))) / 2
    return float(np.nextafter(middle, 0.0))


class Limiter:
    """Decides on the factor of a step's gradients, from running statistics of norms, for `zclip` and `skip_percentile`.

    The other limits follow from the present norm alone, and rules compute them by themselves; see `transforms.limited`.
    """

    def __init__(self, optimizer: Any, engine: str | None = None) -> None:
        self.optimizer, self._engine = optimizer, engine
        self.control: torch.Tensor | None = None  # `grad_scale_and_skip` of the updates
        self._control: torch.Tensor | None = None  # the same with a factor of 1, since the sum is of scaled gradients
        self._memory: torch.Tensor | None = None  # the factor, then `NUMBERS`
        self._update: Update | None = None
        self._total: torch.Tensor | None = None  # the sum that the update reads
        self._seen: torch.Tensor | None = None  # the sum of the last `look`

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | dict.fromkeys(("control", "_control", "_update", "_total", "_seen"))

    def use_control(self, control: torch.Tensor | None) -> None:
        """Use the `grad_scale_and_skip` of the updates, so that a step that it skips leaves no trace; or None."""
        if control is not self.control:
            self.control, self._update = control, None

    def numbers(self) -> dict[str, torch.Tensor]:
        """Return `NUMBERS` by name, tensors without dimensions that steps change; {} before the first step."""
        return {} if self._memory is None else dict(zip(NUMBERS, self._memory[1:].unbind(), strict=True))

    def state(self) -> dict[str, float]:
        """Return a copy of `numbers`. Waits for the device."""
        return {} if self._memory is None else dict(zip(NUMBERS, self._memory[1:].tolist(), strict=True))

    @torch.inference_mode(False)
    def load(self, numbers: Mapping[str, Any], like: torch.Tensor | None = None) -> None:
        """Continue from the result of `state` or `numbers`, or a part of it; the rest is 0.

        The numbers go to the device of the weight `like`; without it, the next step moves them.
        """
        self._memory = self._update = None
        if numbers:
            values = [float(numbers.get(name, 0.0)) for name in NUMBERS]
            self._memory = torch.tensor([0.0, *values], dtype=torch.float64, device="cpu")
            if like is not None:
                self._memory = self._memory.to(like.device, compute_dtype(like.dtype))

    def undo(self) -> Callable[[], None]:
        """Return a function that restores the present numbers."""
        memory = self._memory
        before = None if memory is None else memory.clone()

        def restore() -> None:
            if before is not None and self._memory is memory:
                self._memory.copy_(before)  # type: ignore[union-attr]  # it is not None, as `before` is not
            else:
                self._memory, self._update = before, None

        return restore

    def total(self) -> torch.Tensor | None:
        """Return the sum of squares of the gradients of the last step that `replace` or `look` has seen."""
        _, told = limit_of(self.optimizer) or (False, False)
        return self.numbers()["norm_square"] if told else self._seen

    @torch.no_grad()
    def replace(self, totals: Sequence[torch.Tensor]) -> None:
        """Learn from a sum of squares, and replace it by the factor of the gradients, -1 to skip the step.

        `totals`: the same sum several times, in tensors [n, 1].
        """
        factor = self._factor(totals[0][0])
        for total in totals:
            total.copy_(factor)

    def look(self, updates: Sequence[Update], more: Sequence[torch.Tensor], all_reduce: Join | None) -> None:
        """Begin a step of several updates that have this limit together; the next call of each update finishes its step.

        `more`: sums of squares [1, 1] of gradients that no update has; they become the sum of all, or the factor.
        """
        totals = [*(total for update in updates for total in update.look()), *more]
        join_totals(totals, "sum", all_reduce)
        self._seen = totals[0][0, 0]
        if (limit_of(self.optimizer) or (False, False))[1]:
            self.replace(totals)

    def factor_of(self, number: torch.Tensor) -> torch.Tensor:
        """Return the factor of the gradients, negative to skip the step, given what `look` has made of a sum."""
        skips, told = limit_of(self.optimizer) or (False, False)
        limit = Limit(told, skips, OWN[: 1 + skips])
        values = {name: number.new_tensor(value) for name, value in limit_values(self.optimizer).items()}
        return factor_of(limit, number, values)

    def _factor(self, total: torch.Tensor) -> torch.Tensor:
        if self._update is None or self._total is None or self._total.data_ptr() != total.data_ptr():
            self._prepare(total)
        update: Any = self._update
        if self._control is not None:
            self._control[1:].copy_(self.control[1:])  # type: ignore[index]
        update.broadcast_hyper(self._row())
        update.bind([self._total])
        update()
        return update.weights[0]

    def host_step(self) -> None:
        """Do the host's part of a decision that a CUDA graph replays."""
        if (update := self._update) is not None:
            update.host_only = True
            try:
                update.broadcast_hyper(self._row())
                update()
            finally:
                update.host_only = False

    def _prepare(self, total: torch.Tensor) -> None:
        memory = self._memory
        with torch.inference_mode(False):
            if memory is None:
                memory = torch.zeros(1 + len(NUMBERS), dtype=total.dtype, device=total.device)
            self._memory = memory.to(total.device, total.dtype)
            self._total, control = total.detach(), None
            if self.control is not None:
                control = torch.tensor([1.0, 0.0], dtype=torch.float32, device=total.device)
            self._control = control
            weight, *states = self._memory.split(1)
            self._update = Update(spikes, [weight], [tuple(states)], engine=self._engine, grad_scale_and_skip=control)

    def _row(self) -> list[float]:
        optimizer = self.optimizer
        skips, _ = limit_of(optimizer) or (False, False)
        zclip, percentile = optimizer.zclip, optimizer.skip_percentile
        values = {
            **limit_values(optimizer),
            "zclip": math.inf if zclip is None else zclip,
            "one_minus_zclip_decay": 0.0 if zclip is None else 1.0 - optimizer.zclip_decay,
            "zclip_warmup": optimizer.zclip_warmup,
            "skips": float(skips),
            "skip_share": 0.5 if percentile is None else percentile / 100,
            "skip_rate": 0.0 if percentile is None else _SKIP_RATE,
            "skip_factor": math.inf if percentile is None else optimizer.skip_factor,
            "skip_warmup": optimizer.skip_warmup,
        }
        return [1.0, *(values[name] for name in spikes.hyper)]
