"""RankAgreement: sees that all ranks have the same model and settings, and take the same steps."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ...kernels import streams
from ..dist_utils import check_alike, check_same
from ..optimizer import Optimizer

__all__ = ["RankAgreement"]

_MOST_EXACT = 2**12  # ranks, whose flags have exact sums in float32


class RankAgreement:
    """Compares what ranks do. Arguments are as those of `CollectiveSync`; `ranks` is how many there are."""

    def __init__(
        self, group: Any, ranks: int, names: Sequence[str], params: Sequence[torch.Tensor], optimizer: Optimizer
    ) -> None:
        self._group, self._ranks = group, ranks
        self._names, self._params, self._optimizer = names, params, optimizer
        self._last: dict[str, Any] = {}  # the optimizer's settings in the last step
        # Counts and flags of the last step, their copy on the host, and what is trained.
        self._late: tuple[torch.Tensor, Any, torch.Tensor] | None = None

    def check_start(self, settings: Mapping[str, Any]) -> None:
        """See that all ranks have the same model, optimizer and settings.

        Raises:
            ValueError: they have not; on all ranks.
        """
        optimizer = self._optimizer
        check_alike("parameter", dict(zip(self._names, self._params, strict=True)), self._group)
        classes = {"optimizer": type(optimizer).__name__, "lr_scheduler": type(optimizer.lr_scheduler).__name__}
        described = _described({**settings, **classes, **_settings(optimizer)})
        trained = {f"requires_grad of {n}": str(p.requires_grad) for n, p in zip(self._names, self._params, strict=True)}
        check_same("setting", described | trained, self._group, self._params[0].device)

    def flags(self) -> list[int]:
        """Of the step just taken, for `GradientBuckets.flag_slots`: with the next gradients ranks compare them."""
        self._last = _settings(self._optimizer)
        digest = zlib.crc32(repr(self._last).encode())
        return [number for part in (digest & 63, digest >> 6 & 63) for number in (part, part * part)]

    def counts(
        self, fresh: Sequence[bool], counts: torch.Tensor, flag_sums: torch.Tensor, ignore_stale_grad: bool
    ) -> list[int]:
        """On how many ranks each gradient was fresh, without waiting for a GPU where this rank had all of them.

        Then it is not known yet whether another one lacked some, which that one knows and tells its user; here it is found
        out a step later.

        Raises:
            ValueError, RuntimeError: the last step was not the same on all ranks.
        """
        if self._late is not None:
            late, event, trained = self._late
            self._late = None
            event.synchronize()
            late, sums = late[: len(self._names)], late[len(self._names) :]
            self._check_flags(sums, counts.is_cuda)
            missing = [repr(self._names[i]) for i in torch.nonzero(trained & (late < self._ranks)).flatten().tolist()]
            if missing:
                raise RuntimeError(
                    f"in the last step another rank had no fresh gradient for {', '.join(missing[:8])}: its weights are no "
                    "longer those of this one; load saved states and weights, or start again"
                )
        complete = all(new or not param.requires_grad for new, param in zip(fresh, self._params, strict=True))
        if not (counts.is_cuda and complete):
            self._check_flags(flag_sums, counts.is_cuda)
            return [int(count) for count in counts.tolist()]
        if not ignore_stale_grad:
            trained = torch.tensor([param.requires_grad for param in self._params])
            found = torch.cat([counts, flag_sums])
            host = streams.pinned(*found.shape, dtype=found.dtype)
            host.copy_(found, non_blocking=True)
            self._late = host, streams.record_event(counts.device), trained
        return [self._ranks] * len(fresh)

    def _check_flags(self, flag_sums: torch.Tensor, late: bool) -> None:
        """See that all ranks have taken the last step alike: sums of squares are least where all numbers are equal."""
        sums = flag_sums.tolist()
        pairs = zip(sums[::2], sums[1::2], strict=True)
        if self._ranks > _MOST_EXACT or all(self._ranks * square == total * total for total, square in pairs):
            return
        if not late:  # all ranks are here
            check_same("setting of the last step", _described(self._last), self._group, self._params[0].device)
        raise RuntimeError(
            "in the last step ranks had other batch sizes, learning rates or other settings of the optimizer: their weights "
            "are no longer what they should be; load saved states and weights, or start again"
        )


def _settings(optimizer: Optimizer) -> dict[str, Any]:
    """The settings of an optimizer that must be the same on all ranks."""
    return optimizer.settings() | {"num_update": optimizer.num_update}


def _described(settings: Mapping[str, Any]) -> dict[str, str]:
    return {name: repr(value) for name, value in settings.items()}
