"""tristep's own optimizers, and a user's, behind torch's interface: `as_torch` makes a class of each."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, ClassVar

import torch

from ...kernels import Rule, TensorRule, Update, storage
from .. import optimizer as gluon
from ..validation import did_you_mean, number
from . import shards
from .base import FusedOptimizer
from .groups import Group, Numbers, name_of
from .states import as_real

__all__ = [
    "ADOPT",
    "CAME",
    "DCASGD",
    "FTML",
    "LAMB",
    "LANS",
    "LARS",
    "MARS",
    "NAG",
    "SGLD",
    "SOAP",
    "AdEMAMix",
    "AdaBelief",
    "Adan",
    "Ftrl",
    "Grams",
    "Lion",
    "NorMuon",
    "NovoGrad",
    "Prodigy",
    "ScheduleFreeAdamW",
    "ScheduleFreeSGD",
    "Signum",
    "Sophia",
    "StableAdamW",
    "Tiger",
    "as_torch",
]

# What torch has other names or other ways for: lr, weight_decay, schedulers, GradScaler, groups.
_NOT_OPTIONS = (
    *("self", "learning_rate", "wd", "rescale_grad", "lr_scheduler", "begin_num_update", "param_idx2name", "param_dict"),
)


def as_torch(klass: type[gluon.RuleOptimizer]) -> type[_OfRule]:
    """A `torch.optim.Optimizer` class of an optimizer class of `tristep.optimizer`, such as one with a rule of your own.

    Its arguments are `lr` and `weight_decay`, `maximize`, and by name those of the class; each can be given for a group.
    What looks at all gradients (`clip_norm`, `zclip`, `skip_norm`, `skip_percentile`, `skip_nonfinite`) means those of all
    groups that have the same options on.

    Args:
        klass: a subclass of `RuleOptimizer`.

    Example:
        >>> import torch, tristep
        >>> from tristep.kernels import rules
        >>> class Plain(tristep.optimizer.RuleOptimizer):
        ...     rule = rules.sgd
        >>> net = torch.nn.Linear(2, 1)
        >>> optimizer = tristep.optim.as_torch(Plain)(net.parameters(), lr=0.1)
    """
    if not (isinstance(klass, type) and issubclass(klass, gluon.RuleOptimizer)):
        raise TypeError(f"klass={klass!r}: must be a subclass of tristep.optimizer.RuleOptimizer")
    module = sys._getframe(1).f_globals["__name__"]  # where it gets its name, for pickle to find it
    return type(klass.__name__, (_OfRule,), {"__module__": module}, of=klass)


def _common(klass: type[gluon.RuleOptimizer]) -> dict[str, Any]:
    return {"lr": klass.default_learning_rate, "weight_decay": 0.0}


class _OfRule(FusedOptimizer):
    """A group's options make one `RuleOptimizer`, which is asked for rule and hyper-parameters.

    Its host state, in addition to the states, is stored in the group, under "carried".
    """

    __signature__: ClassVar[inspect.Signature]
    _klass: ClassVar[type[gluon.RuleOptimizer]]
    _options: ClassVar[dict[str, Any]]

    def __init_subclass__(cls, of: type[gluon.RuleOptimizer] | None = None) -> None:
        """Take arguments and options from the optimizer class `of`; without one, keep those of the parent class."""
        super().__init_subclass__()
        if of is None:
            return
        options: dict[str, Any] = {}
        for base in of.__mro__:
            if "__init__" in vars(base) and base is not object:
                for name, parameter in inspect.signature(vars(base)["__init__"]).parameters.items():
                    if parameter.kind is not parameter.VAR_KEYWORD and name not in _NOT_OPTIONS:
                        options.setdefault(name, parameter.default)
        keyword = inspect.Parameter.KEYWORD_ONLY
        plain = inspect.Parameter("params", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        arguments = [plain, *(plain.replace(name=name, default=value) for name, value in _common(of).items())]
        arguments += [
            plain.replace(name=name, default=value, kind=keyword) for name, value in {"maximize": False, **options}.items()
        ]
        cls._klass, cls._options = of, options
        cls.__doc__ = f"`tristep.optimizer.{of.__name__}` as a `torch.optim.Optimizer`; see there."
        cls.__signature__ = inspect.Signature(arguments)

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor | None = None,
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        **options: Any,
    ) -> None:
        allowed = ("lr", "weight_decay", "maximize", *self._options)
        for name in options:
            if name not in allowed:
                raise TypeError(
                    f"{type(self).__name__} has no argument {name!r}; it has {', '.join(allowed)}."
                    f"{did_you_mean(name, allowed)}"
                )
        common = {**_common(self._klass), "weight_decay": weight_decay, "maximize": maximize}
        if lr is not None:
            common["lr"] = lr
        super().__init__(params, {**common, **self._options, **options})

    def add_param_group(self, param_group: Group) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            for name in ("lr", "weight_decay"):
                value = group[name]
                number(name, value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value, low=0)
            optimizer = self._of(group)
            optimizer.wd_at(0.0, 0.0)  # refuses what has no peak
            for k, parameter in enumerate(group["params"]):
                name = name_of(group, k)
                if parameter.is_complex() and optimizer.narrow is not None:
                    raise ValueError(f"state_dtype={group['state_dtype']!r}: {name} is complex; it must be None")
                optimizer.check_storage(name, parameter)
        except Exception:
            self.param_groups.pop()
            raise
        if optimizer.host_state_names:
            group.setdefault("carried", optimizer.host_state())

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            for name, default in self._options.items():  # those that came after it was saved
                group.setdefault(name, default)
        self.__dict__.pop("_known", None)  # of groups that are no more

    def _of(self, group: Group) -> gluon.RuleOptimizer:
        """The optimizer with this group's options."""
        known: dict[int, Any] = self.__dict__.setdefault("_known", {})
        options = [group[name] for name in self._options]
        owner, made_of, optimizer = known.get(id(group), (None, None, None))
        if owner is not group or made_of != options:
            numbers: dict[str, Any] = {"learning_rate": float(group["lr"]), "wd": float(group["weight_decay"])}
            optimizer = self._klass(**numbers, **dict(zip(self._options, options, strict=True)))
            known[id(group)] = group, options, optimizer
        return optimizer

    def _rule(self, group: Group) -> Rule | TensorRule:
        return self._of(group).composed_rule

    def _narrow(self, group: Group) -> torch.dtype | None:
        return self._of(group).narrow

    def _rounding(self, group: Group) -> int | storage.CodesOnly | None:
        return self._of(group).rounding

    def _master_dtype(self, group: Group, weight: torch.Tensor) -> torch.dtype | None:
        return self._of(group).master_dtype(weight)

    def _first_numbers(self, group: Group, parameter: torch.Tensor, state: Mapping[str, Any]) -> dict[str, float]:
        if self._klass.uniform_hyper:
            return {"step": 0.0}
        every = [other for each in self.param_groups for other in each["params"]]
        index = next(i for i, other in enumerate(every) if other is parameter)
        if "index" in getattr(self._rule(group), "extras", ()):  # shards are to have random numbers of their own
            index += shards.own_place(parameter) * len(every)
        return {"step": 0.0, "index": index}

    def _first_states(self, group: Group, weight: torch.Tensor, states: Mapping[str, torch.Tensor]) -> None:
        self._of(group).start_state(weight, tuple(states.values()))

    def _row(self, group: Group, numbers: Numbers) -> list[float]:
        index = int(numbers["index"]) if "index" in numbers else None
        return self._of(group).row(int(numbers["step"]), float(group["lr"]), float(group["weight_decay"]), index)

    def _begin(self, group: Group) -> None:
        optimizer = self._of(group)
        if optimizer.host_state_names:
            optimizer.load_host_state(group.setdefault("carried", optimizer.host_state()))
        optimizer.begin_step(float(group["lr"]))

    def _end(self, group: Group) -> None:
        optimizer = self._of(group)
        if optimizer.host_state_names:
            group["carried"] = optimizer.host_state()

    def _counted(self, group: Group) -> bool:
        return self._of(group).counts_as_step

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """A context in which the parameters have their averaged values, where the optimizer keeps an average.

        Afterwards they have those that they had before, to the bit.

        Raises:
            ValueError: the optimizer keeps no average; nothing has been changed.
            RuntimeError: on leaving, the parameters have been written to inside, as by a step, which is undone.
        """
        averages = [(group, self._of(group).average_in_use()) for group in self.param_groups]
        if not all(average for _, average in averages):
            raise ValueError(f"{type(self).__name__} keeps no averaged weights: give it ema_decay=0.999, say")
        before = [(parameter, parameter.detach().clone()) for group in self.param_groups for parameter in group["params"]]
        try:
            for group, average in averages:
                rule, hyper = average  # type: ignore[misc]
                trained = [each for each in group["params"] if set(rule.slots) <= set(self.state.get(each, ()))]
                weights = [as_real(parameter).detach() for parameter in trained]
                states = [tuple(as_real(self.state[parameter][name]) for name in rule.slots) for parameter in trained]
                update = Update(rule, weights, states)
                update.hyper[:] = [1.0, *(hyper[name] for name in rule.hyper)]
                gradients = [torch.zeros_like(weight) for weight in weights]
                update.bind(gradients)
                update()
            versions = [parameter._version for parameter, _ in before]
            yield
            written = [parameter._version for parameter, _ in before] != versions
        finally:
            with torch.no_grad():
                for parameter, old in before:
                    parameter.copy_(old)
        if written:
            raise RuntimeError(
                "parameters were written to inside averaged_weights(), as by a step, which shows an average and then "
                "restores the values from before: these are there again, what was written is gone; take steps outside"
            )


class Sophia(_OfRule, of=gluon.Sophia):
    @contextmanager
    def estimating(self, scale: float = 1.0) -> Iterator[None]:
        """A context in which a step takes its gradients for the curvature and leaves the weights as they are.

        Args:
            scale: the number of samples or tokens in the batch, > 0.
        """
        with ExitStack() as stack:
            for group in self.param_groups:
                stack.enter_context(self._of(group).estimating(scale))  # type: ignore[attr-defined]
            yield


class AdaBelief(_OfRule, of=gluon.AdaBelief): ...


class Adan(_OfRule, of=gluon.Adan): ...


class AdEMAMix(_OfRule, of=gluon.AdEMAMix): ...


class ADOPT(_OfRule, of=gluon.ADOPT): ...


class CAME(_OfRule, of=gluon.CAME): ...


class DCASGD(_OfRule, of=gluon.DCASGD): ...


class FTML(_OfRule, of=gluon.FTML): ...


class Ftrl(_OfRule, of=gluon.Ftrl): ...


class Grams(_OfRule, of=gluon.Grams): ...


class LAMB(_OfRule, of=gluon.LAMB): ...


class LANS(_OfRule, of=gluon.LANS): ...


class LARS(_OfRule, of=gluon.LARS): ...


class Lion(_OfRule, of=gluon.Lion): ...


class MARS(_OfRule, of=gluon.MARS): ...


class NAG(_OfRule, of=gluon.NAG): ...


class NorMuon(_OfRule, of=gluon.NorMuon): ...


class NovoGrad(_OfRule, of=gluon.NovoGrad): ...


class Prodigy(_OfRule, of=gluon.Prodigy): ...


class ScheduleFreeAdamW(_OfRule, of=gluon.ScheduleFreeAdamW): ...


class ScheduleFreeSGD(_OfRule, of=gluon.ScheduleFreeSGD): ...


class SGLD(_OfRule, of=gluon.SGLD): ...


class Signum(_OfRule, of=gluon.Signum): ...


class SOAP(_OfRule, of=gluon.SOAP): ...


class StableAdamW(_OfRule, of=gluon.StableAdamW): ...


class Tiger(_OfRule, of=gluon.Tiger): ...
