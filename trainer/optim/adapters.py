"""tristep's optimizers with torch's interface, and `as_torch`, which makes a torch class of any optimizer class."""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch

from ...kernels import Rule, TensorRule, rules, storage
from .. import optimizer as gluon
from ..optimizer.row_splits import needs_names, refuse_names
from ..optimizer.states import MASTER, State, apply_once
from ..utils.interrupts import uninterrupted
from ..validation import number, refuse_arguments
from . import ports, shards
from .base import FusedOptimizer
from .groups import Group, Numbers, as_real, held_master, is_evaluated, name_of, refuse_evaluated

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
    "StableAdamW",
    "Tiger",
    "as_torch",
]

# Arguments for which torch has other names or means: lr, weight_decay, schedulers, GradScaler, groups.
_NOT_OPTIONS = (
    *("self", "learning_rate", "wd", "rescale_grad", "lr_scheduler", "schedules", "begin_num_update"),
    *("param_idx2name", "param_dict"),
)
_WRITTEN = (
    "parameters were written to between eval() and train(), or inside averaged_weights(), where they have their averaged "
    "values: the trained values have been restored, and what was written is lost; write to parameters outside"
)
_TRAINED = "trained"  # the key of a parameter's trained value in its state, while it has its averaged value


def as_torch(klass: type[gluon.RuleOptimizer]) -> type[_OfRule]:
    """Make a `torch.optim.Optimizer` class of an optimizer class of `tristep.optimizer`, such as one with your own rule.

    The arguments of the new class are `lr`, `weight_decay`, `maximize` and, by name, the arguments of `klass`; a group may
    have its own values. Options that use a global norm (`clip_norm`, `skip_norm`, `skip_nonfinite`) use the norm over all
    groups with the same options. If `klass` keeps an average of the weights, or with `ema_decay`, `eval()` gives the
    parameters their averaged values until `train()`.

    Args:
        klass: a subclass of `tristep.optimizer.RuleOptimizer`.

    Returns:
        A subclass of `FusedOptimizer` with the name of `klass`.

    Raises:
        TypeError: `klass` is no subclass of `RuleOptimizer`.

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
    module = sys._getframe(1).f_globals["__name__"]  # the caller's, in which pickle will look for the class
    return type(klass.__name__, (_OfRule,), {"__module__": module}, of=klass)


def _common(klass: type[gluon.RuleOptimizer]) -> dict[str, Any]:
    """Return the defaults of `lr` and `weight_decay`, from `learning_rate` and `wd` of the class or its nearest base."""
    common = {"learning_rate": klass.default_learning_rate, "wd": 0.0}
    for base in reversed(klass.__mro__):
        if "__init__" in vars(base):
            arguments = inspect.signature(vars(base)["__init__"]).parameters
            defaults = {name: arguments[name].default for name in common if name in arguments}
            common |= {
                name: value for name, value in defaults.items() if value is not None and value is not inspect.Parameter.empty
            }
    return {"lr": common["learning_rate"], "weight_decay": common["wd"]}


class _OfRule(FusedOptimizer):
    """The base of the classes that `as_torch` makes; each group has a `RuleOptimizer` with the group's options.

    The `RuleOptimizer` gives the rule and the hyper-parameters. Its host state is stored in the group, under "carried". The
    group has the options `beta1`, `beta2`, ... twice, also as `betas`, which torch's schedulers know; a change of either
    takes effect at the next step.
    """

    __signature__: ClassVar[inspect.Signature]
    _counts_exactly = True
    _klass: ClassVar[type[gluon.RuleOptimizer]]
    _options: ClassVar[dict[str, Any]]
    _beta_names: ClassVar[tuple[str, ...]]  # the options in `betas`

    def __init_subclass__(cls, of: type[gluon.RuleOptimizer] | None = None) -> None:
        """Take arguments, options and docstring from the optimizer class `of`; None inherits them."""
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
        betas = [name for name in ("beta1", "beta2", "beta3") if options.get(name) is not None]
        cls._beta_names = tuple(betas) if len(betas) > 1 and "momentum" not in options else ()
        if cls._beta_names:
            default_betas = tuple(options[name] for name in betas)
            arguments.append(plain.replace(name="betas", default=default_betas, kind=keyword))
        summary = (of.__doc__ or of.__name__).splitlines()[0].partition(". ")[0].removesuffix(".")
        cls.__doc__ = (
            f"{summary}.\n\n"
            f"This is `tristep.optimizer.{of.__name__}` with the interface of `torch.optim.Optimizer`. Arguments: `lr`, "
            "`weight_decay`, `maximize`, and the other arguments of that class by name, as its docstring describes them."
        )
        cls.__signature__ = inspect.Signature(arguments)

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor | None = None,
        weight_decay: float | None = None,
        *,
        maximize: bool = False,
        **options: Any,
    ) -> None:
        allowed = ("lr", "weight_decay", "maximize", *self._options, *["betas"] * bool(self._beta_names))
        unknown = {name: value for name, value in options.items() if name not in allowed}
        refuse_arguments(type(self).__name__, unknown, allowed)
        common = {name: value for name, value in (("lr", lr), ("weight_decay", weight_decay)) if value is not None}
        if options.get("betas") is None:
            options.pop("betas", None)
        defaults = {**_common(self._klass), **common, "maximize": maximize, **self._options, **options}
        super().__init__(params, self._with_betas(defaults, options))

    def add_param_group(self, param_group: Group) -> None:
        if isinstance(param_group, Mapping) and {"betas", *self._beta_names}.intersection(param_group):
            filled = self._with_betas({**self.defaults, **param_group}, param_group)
            param_group = {**param_group, **{name: filled[name] for name in ("betas", *self._beta_names)}}
        super().add_param_group(param_group)

    def _check_group(self, group: Group) -> None:
        for name in ("lr", "weight_decay"):
            value = group[name]
            number(name, value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value, low=0)
        optimizer = self._of(group)
        if needs_names(getattr(optimizer, "split", None)):
            refuse_names(optimizer)
        for k, parameter in enumerate(group["params"]):
            name = name_of(group, k)
            if parameter.is_complex() and isinstance(self._rule(group), TensorRule):
                raise RuntimeError(f"{name} is {parameter.dtype}: {type(self).__name__} does not support complex parameters")
            if parameter.is_complex() and optimizer.narrow is not None:
                raise ValueError(f"state_dtype={group['state_dtype']!r}: {name} is complex; it must be None")
            optimizer.check_storage(name, parameter)
        if optimizer.host_state_names:
            group.setdefault("carried", optimizer.host_state())
        if group.get("adam_learning_rate") is not None:
            group.setdefault("first_lr", float(group["lr"]))

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            for name, default in self._options.items():  # options that states of torch's optimizers do not have
                group.setdefault(name, default)
        for name in ("_known", "_versions"):  # they refer to the groups and tensors of the original
            vars(self).pop(name, None)

    def __getstate__(self) -> dict[str, Any]:
        for group in self.param_groups:
            self._of(group)  # makes `beta1`, ... and `betas` equal, if either was changed
        return super().__getstate__()

    def _with_betas(self, group: Group, decisive: Iterable[str]) -> Group:
        """Return the group with equal `beta1`, ... and `betas`; the names in `decisive` determine the others."""
        if not self._beta_names:
            return group
        single = {name: group[name] for name in self._beta_names}
        if "betas" in decisive:
            betas = tuple(group["betas"]) if isinstance(group["betas"], (tuple, list)) else ()
            if len(betas) != len(single):
                raise ValueError(f"betas={group['betas']!r}: must be a tuple of {', '.join(single)}")
            for name, value in zip(single, betas, strict=True):
                if name in decisive and single[name] != value:
                    raise ValueError(f"{name}={single[name]!r} and betas={betas!r}: they must agree; give one of them only")
            single = dict(zip(single, betas, strict=True))
        return {**group, **single, "betas": tuple(single.values())}

    def _of(self, group: Group) -> gluon.RuleOptimizer:
        """Return the `RuleOptimizer` with this group's options."""
        cache: dict[int, Any] = self.__dict__.setdefault("_known", {})
        # An entry knows its group by the first parameter, weakly: groups may be taken out and freed.
        first = group["params"][0] if group["params"] else None
        known, cached_options, optimizer = cache.get(id(group), (_nothing, None, None))
        is_known = optimizer is not None and known() is first
        if self._beta_names and tuple(group["betas"]) != tuple(group[name] for name in self._beta_names):
            before = dict(zip(self._options, cached_options, strict=True)) if is_known else {}
            changed = {name for name in self._beta_names if name not in before or group[name] != before[name]}
            if tuple(group["betas"]) != tuple(before.get(name) for name in self._beta_names):
                changed.add("betas")
            group.update(self._with_betas(group, changed))
        options = [group[name] for name in self._options]
        if not is_known or cached_options != options:
            # Muon's `adam_learning_rate` keeps its ratio to the rate that the group was given.
            lr = float(group["first_lr" if "first_lr" in group else "lr"])
            numbers: dict[str, Any] = {"learning_rate": lr, "wd": float(group["weight_decay"])}
            optimizer = self._klass(**numbers, **dict(zip(self._options, options, strict=True)))
            for key in [key for key, (reference, *_) in cache.items() if reference() is None]:
                del cache[key]
            if first is None or isinstance(first, torch.Tensor):  # a saved group has keys in place of parameters
                cache[id(group)] = _nothing if first is None else weakref.ref(first), options, optimizer
        return optimizer

    def _rule(self, group: Group) -> Rule | TensorRule:
        return self._of(group).composed_rule

    def _narrow(self, group: Group) -> torch.dtype | None:
        return self._of(group).narrow

    def _on_host(self, group: Group) -> bool:
        return self._of(group).state_device is not None

    def _rounding(self, group: Group) -> int | storage.CodesOnly | None:
        return self._of(group).rounding

    def _master_dtype(self, group: Group, weight: torch.Tensor) -> torch.dtype | None:
        return self._of(group).master_dtype(weight)

    def _initial_numbers(self, group: Group, parameters: Sequence[torch.Tensor]) -> Mapping[str, float | Sequence[float]]:
        if self._of(group).shares_rows:
            return {"step": 0.0}
        members = [member for any_group in self.param_groups for member in any_group["params"]]
        places: dict[int, int] = {}
        for i, member in enumerate(members):
            places.setdefault(id(member), i)
        indices = [places[id(parameter)] for parameter in parameters]
        if "index" in getattr(self._rule(group), "extras", ()):  # each shard needs random numbers of its own
            own = map(shards.own_place, parameters)
            indices = [i + place * len(members) for i, place in zip(indices, own, strict=True)]
        return {"step": 0.0, "index": indices}

    def _from_torch(self, group: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
        rule, names = self._klass.rule, self._beta_names
        options: dict[str, Any] = {}
        if names and isinstance(betas := group.get("betas"), tuple) and len(betas) == len(names):
            options = {name: value for name, value in zip(names, betas, strict=True) if name not in group}
        if rule not in _TORCHS or "eps" not in group or "epsilon" in group:
            return options, {}
        if group.get("decoupled_weight_decay", rule is rules.adamw) is not (rule is rules.adamw) and group["weight_decay"]:
            return options, {}
        return {**options, "epsilon": group["eps"]}, {key: slot for slot, key in _TORCHS[rule]._keys.items()}

    def _initialize_states(self, group: Group, weight: torch.Tensor, states: Mapping[str, torch.Tensor]) -> None:
        self._of(group).start_state(weight, dict(states), lr=float(group["lr"]))

    def _starts_from_zeros(self, group: Group) -> bool:
        return self._of(group).starts_from_zeros

    def _row(self, group: Group, numbers: Numbers, rule: Rule | TensorRule, rounds: bool) -> list[float]:
        index = int(numbers["index"]) if "index" in numbers else None
        lr, wd = float(group["lr"]), float(group["weight_decay"])
        return self._of(group).row(int(numbers["step"]), lr, wd, index, rule)  # type: ignore[arg-type]

    def _only_makes_states(self) -> bool:
        if not issubclass(self._klass, (gluon.Ftrl, gluon.FTML)) or any(float(group["lr"]) for group in self.param_groups):
            return False  # only Ftrl and FTML divide by the rate
        gradients = [parameter.grad for group in self.param_groups for parameter in group["params"]]
        return not any(bool(shards.local(gradient).any()) for gradient in gradients if gradient is not None)

    def _begin(self, group: Group) -> None:
        refuse_evaluated("step()", [group])
        optimizer = self._of(group)
        if optimizer.host_state_names:
            optimizer.load_host_state(group.setdefault("carried", optimizer.host_state()))
        optimizer.begin_step(float(group["lr"]))

    def _end(self, group: Group) -> None:
        optimizer = self._of(group)
        if optimizer.host_state_names:
            group["carried"] = optimizer.host_state()

    @uninterrupted
    @torch.no_grad()
    def eval(self) -> None:
        """Give the parameters their averaged values until `train()`, in groups that keep an average.

        Evaluate schedule-free optimizers, and optimizers with `ema_decay`, with these values. Until `train()`, `step` raises
        an error, and `state_dict()` has the trained values, too, so that a saved training continues from them.
        """
        try:
            for group in self.param_groups:
                average = self._of(group).average_in_use()
                if average is not None and not is_evaluated(group):
                    group["train_mode"] = False
                    self._show_average(group, *average)
        except BaseException:
            self._show_trained()
            raise

    @uninterrupted
    def train(self) -> None:
        """Give the parameters back the values that they had before `eval()`, bit for bit.

        Raises:
            RuntimeError: the parameters were written to after `eval()`; their trained values are restored all the same.
        """
        if self._show_trained():
            raise RuntimeError(_WRITTEN)

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """Give the parameters their averaged values inside this context: it calls `eval()`, and `train()` on leaving.

        After a call of `eval()` it changes nothing.

        Raises:
            ValueError: the optimizer keeps no average; nothing has been changed.
            RuntimeError: on leaving, the parameters were written to inside; their trained values are restored all the same.
        """
        if not all(self._of(group).average_in_use() for group in self.param_groups):
            raise ValueError(f"{type(self).__name__} keeps no averaged weights: give it ema_decay=0.999, say")
        if any(map(is_evaluated, self.param_groups)):
            yield
            return
        written = False
        try:
            try:
                self.eval()
                yield
            finally:
                written = self._show_trained()
        except KeyboardInterrupt:  # it may have come before `_show_trained` let interrupts wait
            self._show_trained()
            raise
        if written:
            raise RuntimeError(_WRITTEN)

    def _evaluated(self) -> list[torch.Tensor]:
        """Return the parameters that have their averaged values now."""
        parameters = [parameter for group in self.param_groups if is_evaluated(group) for parameter in group["params"]]
        return [parameter for parameter in parameters if _TRAINED in self.state.get(parameter, ())]

    def _show_average(self, group: Group, rule: Rule, hyper: Mapping[str, float]) -> None:
        """Give a group's parameters their averaged values, and store their trained values."""
        slots = set(rule.slots)
        trained = [parameter for parameter in group["params"] if slots <= set(self.state.get(parameter, ()))]
        weights, states = [as_real(parameter).detach() for parameter in trained], list[State]()
        for parameter, weight in zip(trained, weights, strict=True):
            row = self.state[parameter]
            states.append({name: as_real(row[name]) for name in rule.slots})
            if (master := held_master(self, group, weight, row)) is not None and master.shape == weight.shape:
                states[-1][MASTER] = master
            row[_TRAINED] = parameter.detach().clone()
        apply_once(rule, hyper, weights, states)
        vars(self).setdefault("_versions", {}).update((parameter, parameter._version) for parameter in trained)

    @uninterrupted
    @torch.no_grad()
    def _show_trained(self) -> bool:
        """Undo `eval`; return whether parameters were written to since."""
        versions = vars(self).pop("_versions", {})
        written = False
        for parameter in self._evaluated():
            written |= versions.get(parameter, parameter._version) != parameter._version
            parameter.copy_(self.state[parameter].pop(_TRAINED))
        for group in self.param_groups:
            group.pop("train_mode", None)
        return written


def _nothing() -> None:
    """Stand for a weak reference where there is no object."""


# By rule: torch's optimizer with the same states under other names.
_TORCHS: dict[Any, type[FusedOptimizer]] = {rules.adam: ports.Adam, rules.adamw: ports.AdamW, rules.adamax: ports.Adamax}


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
