"""MultiOptimizer: several optimizers with torch's interface in one, each for the parameters that match its pattern."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from .. import optimizer as gluon
from ..optimizer.patterns import Pattern, assign, layers_of, pattern_text, read_entry, table_text
from ..registry import Registry
from ..serialization import Loaded, announce, check_fit
from ..step.capture import CapturedStep
from ..step.params import named_parameters
from ..utils.interrupts import uninterrupted
from . import adapters, ports
from .base import FusedOptimizer
from .groups import name_of
from .joined import JoinedOptimizers
from .saved import check_numbers, check_sizes, fit_groups, shown_states

_classes: Registry[type[torch.optim.Optimizer]] = Registry(
    "optimizer of tristep.optim", torch.optim.Optimizer, contrib="optim"
)
for _name in (*ports.__all__, *adapters.__all__):
    _class = getattr(ports, _name, None) or getattr(adapters, _name)
    if isinstance(_class, type) and issubclass(_class, torch.optim.Optimizer):
        _classes.register(_class, _name.lower())


class MultiOptimizer(JoinedOptimizers):
    """One optimizer made of several: each parameter gets the optimizer of the first pattern that it matches.

    It is a `torch.optim.Optimizer` with the groups and states of all optimizers, for schedulers, `GradScaler` and
    checkpoints; changes of its `state` and `param_groups` reach the optimizers. `print(optimizer)` shows which optimizer
    each parameter has.

    Args:
        params: a module, or pairs of name and parameter, as from `module.named_parameters()`.
        entries: (pattern, optimizer) or (pattern, optimizer, arguments). For patterns see
            `tristep.optimizer.patterns.matcher`; an optimizer is the name of a class in `tristep.optim`, in any case, or a
            class with torch's interface. With `"optional": True` among the arguments the pattern may get no parameter, for
            example because its parameters are frozen.
        **defaults: arguments for all optimizers whose entries do not give them.

    Attributes:
        optimizers: the optimizers that have parameters, in the order of the entries.

    Raises:
        TypeError, ValueError: an invalid argument, a pattern that gets no parameter and is not optional, or a parameter that
            matches no pattern.

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
        checked = [checked_entry(k, entry) for k, entry in enumerate(entries)]
        if not checked:
            raise ValueError("entries=[]: must have at least one (pattern, optimizer)")
        layers = layers_of(params) if isinstance(params, torch.nn.Module) else None
        patterns = [pattern for pattern, _, _ in checked]
        optional = {k for k, (_, _, arguments) in enumerate(checked) if arguments.pop("optional", False)}
        chosen = assign(patterns, [name for name, _ in named], [parameter for _, parameter in named], layers, optional)
        self.optimizers, self._patterns = [], []
        for k, (pattern, klass, arguments) in enumerate(checked):
            members = [pair for pair, part in zip(named, chosen, strict=True) if part == k]
            if members:
                try:
                    self.optimizers.append(klass(members, **{**defaults, **arguments}))
                except (TypeError, ValueError) as error:
                    raise type(error)(f"entries[{k}], {pattern_text(pattern)!r}: {error}") from None
                self._patterns.append(pattern_text(pattern))
        self._remember_names(named)
        super().__init__()

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_named": self._names_now(), "_patterns": self._patterns}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "_named" in state:
            self._remember_names(state["_named"])

    def _remember_names(self, named: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Note the names of parameters, weakly, since groups may be taken out and freed."""
        self._named = [(name, weakref.ref(parameter)) for name, parameter in named]

    def _names_now(self) -> list[tuple[str, torch.Tensor]]:
        return [(name, parameter) for name, reference in self._named if (parameter := reference()) is not None]

    def add_param_group(self, param_group: Any) -> None:
        """Add a parameter group, as in torch, if there is a single optimizer.

        Raises:
            RuntimeError: there are several optimizers: patterns decide which one a parameter gets, at construction.
        """
        if self._agreed and len(self.optimizers) == 1:  # the base class's constructor calls it, too
            self.share()
            self.optimizers[0].add_param_group(param_group)
        else:
            super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return groups and states of all optimizers in torch's format, as `FusedOptimizer.state_dict` does for one."""
        self.share()
        with ExitStack() as stack:
            for optimizer in self.optimizers:
                if isinstance(optimizer, FusedOptimizer):
                    stack.enter_context(shown_states(optimizer))
            return super().state_dict()

    @uninterrupted
    def load_state_dict(  # type: ignore[override]  # torch's has no strict
        self, state_dict: Mapping[str, Any], *, strict: bool = True, settings: str = "file"
    ) -> Loaded | None:
        """Load groups and states from `state_dict` of a `MultiOptimizer` with the same groups.

        Args:
            state_dict: the result of `state_dict`.
            strict, settings: as in `FusedOptimizer.load_state_dict`; there must be as many groups. A parameter that another
                group's optimizer had starts anew.

        Returns:
            With `strict=False` the names of parameters: `loaded`, `anew` and `unused`; otherwise None.

        Raises:
            ValueError, TypeError: the groups differ, states are another optimizer's, or a number is invalid; nothing has
                been changed.
        """
        check_fit(strict, settings)
        loaded: list[Loaded] = []
        before: list[tuple[Any, Any, Any]] = []
        parts: list[dict[str, Any]] = []

        def divide(_: Any, saved: dict[str, Any]) -> dict[str, Any]:
            self.share()
            before.extend((each, each.state, each.param_groups) for each in (self, *self.optimizers))
            owners = [self.owner_of(i, group) for i, group in enumerate(self.param_groups)]
            if not strict:
                parts_of_groups = [self.optimizers[k] for k in owners]
                saved, found = fit_groups(self.param_groups, parts_of_groups, saved, settings)
                loaded.append(found)
            check_sizes(self.param_groups, saved)
            groups, unassigned = saved["param_groups"], dict(saved["state"])
            for k, optimizer in enumerate(self.optimizers):
                share = [group for group, owner in zip(groups, owners, strict=True) if owner == k]
                keys = list(unassigned) if len(self.optimizers) == 1 else [key for group in share for key in group["params"]]
                state = {key: unassigned.pop(key) for key in keys if key in unassigned}
                parts.append({"param_groups": share, "state": state})
                if isinstance(optimizer, FusedOptimizer):
                    check_numbers(optimizer, parts[-1], optimizer._shown)
            return {**saved, "state": unassigned}

        def load(_: Any) -> None:
            unassigned = vars(self)["state"]  # torch's method has made new groups, too; the optimizers load their own
            _, self.state, self.param_groups = before[0]
            try:
                for optimizer, part in zip(self.optimizers, parts, strict=True):
                    optimizer.load_state_dict(part)
            except BaseException:
                for changed, state, groups in before:
                    changed.state, changed.param_groups = state, groups
                raise
            if unassigned:
                self.state.update(unassigned)

        # The first hook runs after a user's hooks, which may change what is loaded; the second before them.
        hooks = (
            self.register_load_state_dict_pre_hook(divide),
            self.register_load_state_dict_post_hook(load, prepend=True),
        )
        try:
            super().load_state_dict(state_dict)  # type: ignore[arg-type]  # any mapping will do
        finally:
            for hook in hooks:
                hook.remove()
        for found in loaded:
            announce("states", found)
        return loaded[0] if loaded else None

    def capture(self, fn: Callable[..., Any], *, warmup: int = 3) -> CapturedStep:
        """Return a callable that runs a training function as a CUDA graph, which saves its work on the host.

        Args:
            fn: a function of tensors that takes one step of this optimizer; see `tristep.Trainer.capture`.
            warmup: the number of calls that run normally, >= 2.

        Returns:
            A callable with the arguments and results of `fn`. The next call overwrites the tensors that it returns.

        Raises:
            TypeError: `fn` is not callable, or an optimizer is not of `tristep.optim`.
            ValueError: the rule of an optimizer is of whole tensors and cannot be captured, as SOAP's cannot.
        """
        self.share()
        captured = []
        for optimizer in self.optimizers:
            if not isinstance(optimizer, FusedOptimizer):
                raise TypeError(f"capture() with {type(optimizer).__name__}: it must be an optimizer of tristep.optim")
            captured.append(optimizer.capture(fn, warmup=warmup))  # each checks its groups
        return captured[0]

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """Give parameters their averaged values inside this context, if their optimizer keeps an average.

        Raises:
            ValueError: no optimizer keeps an average; nothing has been changed.
            RuntimeError: on leaving, parameters were written to inside; their trained values are restored all the same.
        """
        self.share()
        with ExitStack() as stack:
            if not any(_enter_average(stack, optimizer) for optimizer in self.optimizers):
                raise ValueError("none of the optimizers keeps averaged weights: give one ema_decay=0.999, say")
            yield

    def table(self) -> list[tuple[str, ...]]:
        """Return a table of the optimizers by parameter, as rows of strings; the first row has the titles."""
        rows: list[tuple[str, ...]] = [("parameter", "shape", "optimizer", "lr", "weight_decay", "pattern")]
        self.share()
        places = {
            parameter: (name_of(group, i), group, k)
            for k, optimizer in enumerate(self.optimizers)
            for group in optimizer.param_groups
            for i, parameter in enumerate(group["params"])
        }
        for name, parameter in [*self._names_now(), *((None, parameter) for parameter in places)]:
            if parameter in places:
                name_in_group, group, k = places.pop(parameter)
                numbers = [f"{float(group[key]):.6g}" if key in group else "" for key in ("lr", "weight_decay")]
                kind = type(self.optimizers[k]).__name__
                rows.append((name or name_in_group, str(tuple(parameter.shape)), kind, *numbers, self._patterns[k]))
        return rows

    def __str__(self) -> str:
        return table_text(self.table())

    def __repr__(self) -> str:
        pairs = zip(self._patterns, self.optimizers, strict=True)
        return f"{type(self).__name__}([{', '.join(f'({pattern!r}, {each!r})' for pattern, each in pairs)}])"


def find(name: str) -> type[torch.optim.Optimizer] | None:
    """Return the class of this name, imported from `tristep.contrib` if need be; None if there is none."""
    return _classes.find(name)


def optimizer_class(optimizer: str | type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    """Return an optimizer class with torch's interface, by its name, in any case; a class is returned as it is.

    A name may be of a class in `tristep.optim`, or of a subclass of `tristep.optimizer.RuleOptimizer` that a user has
    registered, for which `as_torch` makes a class.
    """
    klass: Any = optimizer
    if isinstance(optimizer, str):
        klass = gluon.registered().get(optimizer.lower())
        if klass is not None and not klass.__module__.startswith((f"{gluon.__name__}.", "tristep.contrib.")):
            return adapters.as_torch(klass)
        klass = _classes.lookup(optimizer)
    if not (isinstance(klass, type) and issubclass(klass, torch.optim.Optimizer)):
        raise TypeError(f"optimizer={optimizer!r} must be a name, such as 'AdamW', or a class of torch's interface")
    return klass


def checked_entry(k: int, entry: Any) -> tuple[Pattern, type[torch.optim.Optimizer], dict[str, Any]]:
    """Return the pattern, the class and the arguments of entry `k` of a `MultiOptimizer`."""
    pattern, chosen, arguments = read_entry(f"entries[{k}]", entry)
    try:
        return pattern, optimizer_class(chosen), arguments
    except (TypeError, ValueError) as error:
        raise type(error)(f"entries[{k}]: {error}") from None


def _enter_average(stack: ExitStack, optimizer: Any) -> bool:
    """Enter `averaged_weights` of an optimizer; return False if it keeps no average."""
    if not hasattr(optimizer, "averaged_weights"):
        return False
    try:
        stack.enter_context(optimizer.averaged_weights())
    except ValueError:
        return False
    return True
