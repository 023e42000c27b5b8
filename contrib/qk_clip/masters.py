"""The optimizers of the weights that are scaled: their masters are scaled, too, and some optimizers are refused."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from ...trainer import Trainer
from ...trainer.optim import FusedOptimizer
from ...trainer.optim.joined import JoinedOptimizers
from ...trainer.optimizer.multi import part_of

# These keep another copy of each weight, or compute it anew from sums, so that their next step would undo a clip.
_REBUILD = {"FTML", "Ftrl", "ScheduleFreeAdamW", "ScheduleFreeSGD"}


class Holder(NamedTuple):
    """A Trainer or an optimizer of `tristep.optim`, with the key of each parameter in its `float32_weights`."""

    source: Any
    keys: Mapping[torch.Tensor, Any]


def holders(trainer: Any, scaled: Mapping[torch.Tensor, str]) -> list[Holder]:
    """Return what holds the masters of parameters, if they have any.

    Args:
        trainer: the argument of `QKClip`.
        scaled: the names of the parameters that are scaled.

    Raises:
        TypeError: `trainer` is neither a Trainer nor an optimizer of `tristep.optim`.
        ValueError: an optimizer of these parameters would undo the scaling; or `trainer` has none of them, or float64
            weights.
    """
    found = [holder for holder in _all_holders(trainer) if not holder.keys.keys().isdisjoint(scaled)]
    if not found and isinstance(trainer, (Trainer, FusedOptimizer)):
        raise ValueError("trainer has none of the weights that are scaled: is it the one of another model?")
    for holder in found:
        if any(parameter.dtype == torch.float64 for parameter in holder.keys):
            raise ValueError(
                "trainer has float64 weights, which would be rounded to float32: leave it out, as they have no masters"
            )
        for parameter, name in scaled.items():
            if parameter in holder.keys and (culprit := _culprit(holder, parameter)) is not None:
                raise ValueError(
                    f"trainer: {culprit} of {name!r} keeps another copy of the weight, so that its next step would undo a "
                    "clip; give these parameters another optimizer, or leave their modules out by skip="
                )
    return found


class Wholes:
    """The parameters that `holders` have, in float32 and with the precision of their masters, to be scaled and put back."""

    def __init__(self, holders: Collection[Holder]) -> None:
        self._read = [(holder, holder.source.float32_weights()) for holder in holders]

    def by_parameter(self) -> dict[torch.Tensor, torch.Tensor]:
        return {parameter: read[key] for holder, read in self._read for parameter, key in holder.keys.items()}

    def put_back(self) -> None:
        for holder, read in self._read:
            holder.source.load_float32_weights(read)


def _all_holders(trainer: Any) -> Iterator[Holder]:
    if isinstance(trainer, Trainer):
        rows = [zip(replica.params, replica.names, strict=True) for replica in trainer.replicas]
        yield Holder(trainer, {parameter: name for row in rows for parameter, name in row})
    elif isinstance(trainer, JoinedOptimizers):
        for optimizer in trainer.optimizers:
            if isinstance(optimizer, (FusedOptimizer, JoinedOptimizers)):  # torch's own have no masters
                yield from _all_holders(optimizer)
    elif isinstance(trainer, FusedOptimizer):
        yield Holder(trainer, {each: each for group in trainer.param_groups for each in group["params"]})
    elif trainer is not None:
        raise TypeError(
            f"trainer is a {type(trainer).__name__}: must be a Trainer or an optimizer of tristep.optim; leave it out for "
            "others, which keep no masters"
        )


def _culprit(holder: Holder, parameter: torch.Tensor) -> str | None:
    """Return what would undo the scaling of a parameter, such as "lookahead=5"; None if nothing would."""
    source = holder.source
    if isinstance(source, Trainer):
        source = part_of(source.optimizer, source.replicas[0].names.index(holder.keys[parameter]))
        lookahead = getattr(source, "lookahead", None)
    else:
        groups = (group for group in source.param_groups if any(each is parameter for each in group["params"]))
        lookahead = next(groups).get("lookahead")
    if lookahead is not None:
        return f"lookahead={lookahead!r}"
    return next((each.__name__ for each in type(source).__mro__ if each.__name__ in _REBUILD), None)
