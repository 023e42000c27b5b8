"""torchtitan: a container of optimizers for the parts of a model, with the interface of its own and names for DCP.

It needs torch only. torchtitan's container makes Adam, AdamW and its own Muon; this one all optimizers of `tristep.optim`.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict

from ..trainer.optim import MultiOptimizer
from ..trainer.optim.joined import JoinedOptimizers
from ..trainer.optim.multi import checked_entry
from ..trainer.optimizer.patterns import Parameter, layers_of, matcher
from ..trainer.params import named_parameters

__all__ = ["Optimizers"]

_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


class Optimizers(JoinedOptimizers):
    """One `tristep.optim.MultiOptimizer` for each part of a model, as pipeline parallelism cuts it.

    Args:
        model_parts: modules; a parameter has the same name in a part as in the whole model, and is in one part only.
        entries: (pattern, optimizer, arguments) as for `MultiOptimizer`, first match first; or torchtitan's
            `ParamGroupConfig`s, whose patterns are regular expressions that are found in the name.
        **defaults: arguments of each, where its entry does not have them.

    Attributes:
        optimizers: one for each part, as iterating over the container gives them.

    Raises:
        TypeError, ValueError: an argument that does not fit, or a parameter that no pattern takes.
        UserWarning: a pattern that gets no parameter of these parts, as may be right where other ranks have other parts.

    Example:
        >>> import torch
        >>> from tristep.integrations.torchtitan import Optimizers
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
        >>> optimizers = Optimizers([net], [("ndim<2", "adamw"), ("*", "muon", {"lr": 0.02})], lr=0.001)
        >>> sorted(optimizers.state_dict())[0]
        'param_groups.0.bias.amsgrad'

    Source: torchtitan's `OptimizersContainer`.
    """

    optimizers: list[MultiOptimizer]

    def __init__(self, model_parts: Sequence[torch.nn.Module], entries: Iterable[Any], **defaults: Any) -> None:
        self.model_parts = list(model_parts)
        given = [_entry(k, entry) for k, entry in enumerate(entries)]
        chosen = [_in_use(part, given) for part in self.model_parts]
        for k, (pattern, *_) in enumerate(given):
            if not given[k][2].get("optional") and not any(k in each for each in chosen):
                warnings.warn(f"entries[{k}]: pattern {pattern!r} gets no parameter of these model parts", stacklevel=2)
        self.optimizers = [
            MultiOptimizer(part, [given[k] for k in sorted(each)], **defaults)
            for part, each in zip(self.model_parts, chosen, strict=True)
        ]
        super().__init__()

    def __iter__(self) -> Iterator[MultiOptimizer]:
        return iter(self.optimizers)

    def __len__(self) -> int:
        return len(self.optimizers)

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Let each optimizer update its parameters that have a gradient.

        Raises:
            ValueError: there is a closure, which would have to evaluate all parts.
        """
        if closure is not None:
            raise ValueError("step(closure) of several model parts: call it without one, after the backward pass")
        super().step()

    def state_dict(self) -> dict[str, Any]:
        """All states and options by names that do not depend on how the model is cut: "state.layer.weight.exp_avg".

        Before the first step it creates the states, by a step at a rate of 0, so that `dcp.load` has something to load into.
        """
        found: dict[str, Any] = {}
        for part, optimizer in zip(self.model_parts, self.optimizers, strict=True):
            found |= get_optimizer_state_dict(part, optimizer, options=_FLAT)
        return {key: value for key, value in found.items() if key not in self._groups_names()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what `state_dict` gave, of these parts or of others."""
        state = {**state_dict, **self._groups_names()}
        for part, optimizer in zip(self.model_parts, self.optimizers, strict=True):
            set_optimizer_state_dict(part, optimizer, state, options=_FLAT)

    def _groups_names(self) -> dict[str, list[str]]:
        """Which parameters are in a group together, which depends on how the model is cut, and so is not saved."""
        return {
            f"param_groups.{name}.param_names": group["param_names"]
            for group in self.param_groups
            for name in group["param_names"]
        }

    def __repr__(self) -> str:
        return f"{type(self).__name__}([{', '.join(map(repr, self.optimizers))}])"


def _entry(k: int, entry: Any) -> tuple[Any, ...]:
    """An entry of `MultiOptimizer`, also of what is torchtitan's."""
    if hasattr(entry, "optimizer_name"):
        entry = re.compile(entry.pattern), entry.optimizer_name, entry.optimizer_kwargs
    return checked_entry(k, entry)


def _in_use(part: torch.nn.Module, entries: Sequence[Any]) -> set[int]:
    """Which entries get a parameter of this part."""
    matchers = [matcher(pattern) for pattern, *_ in entries]
    layers = layers_of(part)
    found = set()
    for name, parameter, _ in named_parameters(part):
        asked = Parameter(name, parameter, layers.get(id(parameter)))
        found |= {next((k for k, matches in enumerate(matchers) if matches(asked)), -1)}
    return found - {-1}
