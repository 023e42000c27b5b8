"""torchtitan: a container of optimizers for the parts of a model, with the interface of torchtitan's container.

torchtitan's container makes Adam, AdamW and its own Muon; this one makes all optimizers of `tristep.optim`. It needs torch
only.
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
    """A container with one `tristep.optim.MultiOptimizer` for each part of a model under pipeline parallelism.

    Iterate over it to get the optimizers. It warns of a pattern that gets no parameter of these parts, which may be right if
    other ranks have other parts.

    Args:
        model_parts: the modules; a parameter has the same name in a part as in the whole model, and is in one part only.
        entries: (pattern, optimizer) or (pattern, optimizer, arguments), as for `MultiOptimizer`: a parameter gets the
            optimizer of the first pattern that it matches. Or torchtitan's `ParamGroupConfig`s, whose patterns are regular
            expressions to search in the name.
        **defaults: arguments for all optimizers whose entries do not give them.

    Attributes:
        optimizers: the `MultiOptimizer` of each part.
        model_parts: the modules.

    Raises:
        TypeError, ValueError: an invalid argument, or a parameter that matches no pattern.

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
        checked = [_entry(k, entry) for k, entry in enumerate(entries)]
        in_use = [_in_use(part, checked) for part in self.model_parts]
        for k, (pattern, _, arguments) in enumerate(checked):
            if not arguments.get("optional") and not any(k in indices for indices in in_use):
                warnings.warn(f"entries[{k}]: pattern {pattern!r} gets no parameter of these model parts", stacklevel=2)
        self.optimizers = [
            MultiOptimizer(part, [checked[k] for k in sorted(indices)], **defaults)
            for part, indices in zip(self.model_parts, in_use, strict=True)
        ]
        super().__init__()

    def __iter__(self) -> Iterator[MultiOptimizer]:
        return iter(self.optimizers)

    def __len__(self) -> int:
        return len(self.optimizers)

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient, each with its optimizer.

        Raises:
            ValueError: `closure` is given, which would have to evaluate all parts.
        """
        if closure is not None:
            raise ValueError("step(closure) of several model parts: call it without one, after the backward pass")
        super().step()

    def state_dict(self) -> dict[str, Any]:
        """Return all states and options under names such as "state.layer.weight.exp_avg", whatever the parts of the model.

        Before the first step it makes the states, by a step with learning rate 0, so that `dcp.load` can load into them.
        """
        flat: dict[str, Any] = {}
        for part, optimizer in zip(self.model_parts, self.optimizers, strict=True):
            flat |= get_optimizer_state_dict(part, optimizer, options=_FLAT)
        return {key: value for key, value in flat.items() if key not in self._groups_names()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load states and options from a result of `state_dict`, which may be of other parts of the model."""
        state = {**state_dict, **self._groups_names()}
        for part, optimizer in zip(self.model_parts, self.optimizers, strict=True):
            set_optimizer_state_dict(part, optimizer, state, options=_FLAT)

    def _groups_names(self) -> dict[str, list[str]]:
        """Return the entries with the parameters of each group, which depend on the parts and so are not saved."""
        return {
            f"param_groups.{name}.param_names": group["param_names"]
            for group in self.param_groups
            for name in group["param_names"]
        }

    def __repr__(self) -> str:
        return f"{type(self).__name__}([{', '.join(map(repr, self.optimizers))}])"


def _entry(k: int, entry: Any) -> tuple[Any, ...]:
    """Return pattern, class and arguments of an entry of `MultiOptimizer`, or of torchtitan's `ParamGroupConfig`."""
    if hasattr(entry, "optimizer_name"):
        entry = re.compile(entry.pattern), entry.optimizer_name, entry.optimizer_kwargs
    return checked_entry(k, entry)


def _in_use(part: torch.nn.Module, entries: Sequence[Any]) -> set[int]:
    """Return the indices of the entries that get a parameter of this part."""
    matchers = [matcher(pattern) for pattern, *_ in entries]
    layers = layers_of(part)
    indices = set()
    for name, tensor, _ in named_parameters(part):
        parameter = Parameter(name, tensor, layers.get(id(tensor)))
        indices |= {next((k for k, matches in enumerate(matchers) if matches(parameter)), -1)}
    return indices - {-1}
