"""MultiOptimizer: several optimizers of torch's interface in one, each for the parameters that match its pattern."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from .. import optimizer as gluon
from ..capture import CapturedStep
from ..interrupts import uninterrupted
from ..optimizer.patterns import Pattern, assign, layers_of, pattern_text, read_entry, table_text
from ..params import named_parameters
from ..registry import Registry
from . import adapters, ports
from .base import FusedOptimizer
from .groups import name_of
from .joined import JoinedOptimizers
from .saved import check_numbers, shown_states

_classes: Registry[type[torch.optim.Optimizer]] = Registry("optimizer of tristep.optim", torch.optim.Optimizer)
for _name in (*ports.__all__, *adapters.__all__):
    _class = getattr(ports, _name, None) or getattr(adapters, _name)
    if isinstance(_class, type) and issubclass(_class, torch.optim.Optimizer):
        _classes.register(_class, _name.lower())


class MultiOptimizer(JoinedOptimizers):
    """Several optimizers in one: each parameter gets that of the first pattern which it matches.

    It is a `torch.optim.Optimizer` with the groups and states of all, for schedulers, `GradScaler` and checkpoints; what is
    done to its `state` and `param_groups` is done to those of the optimizers.
    `print(optimizer)` shows what each parameter got.

    Args:
        params: a module, or pairs of name and parameter, as `module.named_parameters()` gives them.
        entries: (pattern, optimizer) or (pattern, optimizer, arguments): see `tristep.optimizer.patterns.matcher` for the
            patterns; an optimizer is the name of one of `tristep.optim`, in any case, or a class of torch's interface.
            `"optional": True` among the arguments allows the pattern to get no parameter, as where the ones that it names
            are frozen.
        **defaults: arguments of each, where its entry does not have them.

    Attributes:
        optimizers: in the order of the entries, of those that got a parameter.

    Raises:
        TypeError, ValueError: an argument that does not fit; a pattern that gets no parameter and is not
            optional, or a parameter that no pattern takes.

    Example:
        >>> import torch, tristep
        >>> net = torch.nn.Sequential(torch.nn.Embedding(8, 4), torch.nn.Linear(4, 4))
        >>> entries = [("layer==Embedding|ndim<2", "AdamW", {"lr": 1e-3}), ("*", torch.optim.Muon, {"lr": 0.02})]
        >>> optimizer = tristep.optim.MultiOptimizer(net, entries, weight_decay=0.1)
        >>> print(optimizer)
        parameter  shape   optimizer     lr  weight_decay  pattern
        0.weight   (8, 4)      AdamW  0.001           0.1  layer==Embedding|ndim<2
        1.weight   (4, 4)       Muon   0.02           0.1  *
        1.bias       (4,)      AdamW  0.001           0.1  layer==Embedding|ndim<2
    """

    def __init__(
        self,
        params: torch.nn.Module | Iterable[tuple[str, torch.Tensor]],
        entries: Iterable[Sequence[Any]],
        **defaults: Any,
    ) -> None:
        named = [(name, parameter) for name, parameter, _ in named_parameters(params)]
        found = [checked_entry(k, entry) for k, entry in enumerate(entries)]
        if not found:
            raise ValueError("entries=[]: must have at least one (pattern, optimizer)")
        layers = layers_of(params) if isinstance(params, torch.nn.Module) else None
        patterns = [pattern for pattern, _, _ in found]
        optional = {k for k, (_, _, arguments) in enumerate(found) if arguments.pop("optional", False)}
        chosen = assign(patterns, [name for name, _ in named], [parameter for _, parameter in named], layers, optional)
        self.optimizers, self._patterns = [], []
        for k, (pattern, make, arguments) in enumerate(found):
            own = [pair for pair, part in zip(named, chosen, strict=True) if part == k]
            if own:
                where = f"entries[{k}], {pattern_text(pattern)!r}"
                self.optimizers.append(_made(where, make, own, {**defaults, **arguments}))
                self._patterns.append(pattern_text(pattern))
        self._named = named
        super().__init__()

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {name: vars(self)[name] for name in ("_named", "_patterns")}

    def add_param_group(self, param_group: Any) -> None:
        """As torch's where there is one optimizer; of several nobody knows which is to have it.

        Raises:
            RuntimeError: there are several.
        """
        if self._agreed and len(self.optimizers) == 1:  # the base class's constructor calls it, too
            self.share()
            self.optimizers[0].add_param_group(param_group)
        else:
            super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """As torch's, with states as those of `FusedOptimizer.state_dict`."""
        self.share()
        with ExitStack() as stack:
            for optimizer in self.optimizers:
                if isinstance(optimizer, FusedOptimizer):
                    stack.enter_context(shown_states(optimizer))
            return super().state_dict()

    @uninterrupted
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what `state_dict` gave, of optimizers with the same groups.

        Raises:
            ValueError, TypeError: it does not fit; nothing has been changed.
        """
        before: list[tuple[Any, Any, Any]] = []
        parts: list[dict[str, Any]] = []

        def divide(_: Any, given: dict[str, Any]) -> dict[str, Any]:
            self.share()
            before.extend((each, each.state, each.param_groups) for each in (self, *self.optimizers))
            groups, rest = given["param_groups"], dict(given["state"])
            found, lengths = ([len(group["params"]) for group in each] for each in (groups, self.param_groups))
            if found != lengths:
                raise ValueError(f"state_dict has groups of {found} parameters, this optimizer has groups of {lengths}")
            owners = [self.owner_of(i, group) for i, group in enumerate(self.param_groups)]
            for k, optimizer in enumerate(self.optimizers):
                own = [group for group, owner in zip(groups, owners, strict=True) if owner == k]
                keys = list(rest) if len(self.optimizers) == 1 else [key for group in own for key in group["params"]]
                parts.append({"param_groups": own, "state": {key: rest.pop(key) for key in keys if key in rest}})
                if isinstance(optimizer, FusedOptimizer):
                    check_numbers(optimizer, parts[-1], optimizer._shown)
            return {**given, "state": rest}

        def load(_: Any) -> None:
            rest = vars(self)["state"]  # the base class has made new groups, too, which are the optimizers' affair
            _, self.state, self.param_groups = before[0]
            try:
                for optimizer, part in zip(self.optimizers, parts, strict=True):
                    optimizer.load_state_dict(part)
            except BaseException:
                for each, state, groups in before:
                    each.state, each.param_groups = state, groups
                raise
            if rest:
                self.state.update(rest)

        # The first hook comes after those of a user, who may change what is loaded; the second before them.
        hooks = (
            self.register_load_state_dict_pre_hook(divide),
            self.register_load_state_dict_post_hook(load, prepend=True),
        )
        try:
            super().load_state_dict(state_dict)  # type: ignore[arg-type]  # any mapping will do
        finally:
            for hook in hooks:
                hook.remove()

    def capture(self, fn: Callable[..., Any], *, warmup: int = 3) -> CapturedStep:
        """As `tristep.Trainer.capture`: a function that trains with this optimizer, as a CUDA graph.

        Raises:
            TypeError: one of the optimizers is none of tristep's.
            ValueError: one whose rule is none of single elements.
        """
        self.share()
        made = []
        for optimizer in self.optimizers:
            if not isinstance(optimizer, FusedOptimizer):
                raise TypeError(f"capture() with {type(optimizer).__name__}: it must be an optimizer of tristep.optim")
            made.append(optimizer.capture(fn, warmup=warmup))  # each refuses what it cannot
        return made[0]

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """A context in which the parameters have their averaged values, of those optimizers that keep averages.

        Raises:
            ValueError: none of them does; nothing has been changed.
        """
        self.share()
        with ExitStack() as stack:
            if not any(_enter_average(stack, optimizer) for optimizer in self.optimizers):
                raise ValueError("none of the optimizers keeps averaged weights: give one ema_decay=0.999, say")
            yield

    def table(self) -> list[tuple[str, ...]]:
        """What each parameter has got, as rows of texts, after a row of titles."""
        rows: list[tuple[str, ...]] = [("parameter", "shape", "optimizer", "lr", "weight_decay", "pattern")]
        self.share()
        found = {
            parameter: (name_of(group, i), group, k)
            for k, optimizer in enumerate(self.optimizers)
            for group in optimizer.param_groups
            for i, parameter in enumerate(group["params"])
        }
        for name, parameter in [*self._named, *((None, parameter) for parameter in found)]:
            if parameter in found:
                own, group, k = found.pop(parameter)
                numbers = [f"{float(group[key]):.6g}" if key in group else "" for key in ("lr", "weight_decay")]
                kind = type(self.optimizers[k]).__name__
                rows.append((name or own, str(tuple(parameter.shape)), kind, *numbers, self._patterns[k]))
        return rows

    def __str__(self) -> str:
        return table_text(self.table())

    def __repr__(self) -> str:
        pairs = zip(self._patterns, self.optimizers, strict=True)
        return f"{type(self).__name__}([{', '.join(f'({pattern!r}, {each!r})' for pattern, each in pairs)}])"


def optimizer_class(optimizer: str | type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    """The class that this means: a name, in any case, or a class of torch's interface.

    A name is that of a class of `tristep.optim`, or of a subclass of `tristep.optimizer.RuleOptimizer` that a user has
    registered, which is given torch's interface by `as_torch`.

    Raises:
        TypeError, ValueError: it is neither.
    """
    klass: Any = optimizer
    if isinstance(optimizer, str):
        klass = gluon.registered().get(optimizer.lower())
        if klass is not None and not klass.__module__.startswith(f"{gluon.__name__}."):
            return adapters.as_torch(klass)
        klass = _classes.lookup(optimizer)
    if not (isinstance(klass, type) and issubclass(klass, torch.optim.Optimizer)):
        raise TypeError(f"optimizer={optimizer!r} must be a name, such as 'AdamW', or a class of torch's interface")
    return klass


def checked_entry(k: int, entry: Any) -> tuple[Pattern, type[torch.optim.Optimizer], dict[str, Any]]:
    """The pattern, class and arguments of entry `k` of a `MultiOptimizer`.

    Raises:
        TypeError, ValueError: it is none.
    """
    pattern, chosen, arguments = read_entry(f"entries[{k}]", entry)
    try:
        return pattern, optimizer_class(chosen), arguments
    except (TypeError, ValueError) as error:
        raise type(error)(f"entries[{k}]: {error}") from None


def _made(where: str, make: Callable[..., Any], named: list[Any], arguments: dict[str, Any]) -> torch.optim.Optimizer:
    try:
        return make(named, **arguments)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{where}: {error}") from None


def _enter_average(stack: ExitStack, optimizer: Any) -> bool:
    """Show the averaged values of one optimizer's parameters, if it keeps any."""
    if not hasattr(optimizer, "averaged_weights"):
        return False
    try:
        stack.enter_context(optimizer.averaged_weights())
    except ValueError:
        return False
    return True
