"""`OPTIONS`, the table of the options of every `RuleOptimizer`: one row for each, with its check and its effects."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from ...kernels import TensorRule, storage, transforms
from ..validation import boolean, choice, integer, number
from .settings import Setting

STATE_DTYPES: dict[str, torch.dtype | None] = {"float32": None, "bfloat16": torch.bfloat16}
STATE_DTYPES |= dict(zip(("8bit", "4bit"), storage.PACKED, strict=True))
_OTHER_STATE_DTYPES = {"bf16": "bfloat16", "fp32": "float32"} | dict.fromkeys(("uint8", "int8", "8-bit", "8bits"), "8bit")
_OTHER_STATE_DTYPES |= dict.fromkeys(("uint4", "int4", "4-bit", "4bits"), "4bit")


class StepNumbers(NamedTuple):
    """A parameter's numbers at one step: update number, learning rate, weight decay, their product, all with multipliers."""

    t: int
    lr: Any
    wd: Any
    decay: Any


class Option(Setting[Any]):
    """An option of every `RuleOptimizer`: its check and its effects. `register_option` adds one.

    An option whose value is None or False is off. What follows from the transformed rule need not be said: which states
    begin as the weight, whether steps that count as no update leave the transform out (not if it adds states, which have to
    stay), and whether rules of whole tensors take it.

    Args:
        name: the name of the constructor argument and attribute.
        default: the default value of the argument.
        check: function of name, value and limits that returns the checked value; see `Setting`.
        of: the name of the option that this one modifies; without that option it has no effect.
        transform: function of (optimizer, rule, sync) that returns the rule changed by the option, where `sync` tells
            whether this step moves Lookahead's slow weights; None for options that do not change the rule.
        values: function of (optimizer, `StepNumbers`) that returns hyper-parameters that are not attributes.
        refuse: function of the optimizer that raises ValueError if the option contradicts its rule or other options.
        by_norm: whether the option limits a step by the norm of all gradients; see limits.py.
        by_row: whether rows of a sparse gradient can be updated on their own although the transform adds a reduction.
        **limits: further arguments of `check`. None is allowed if it is the default.
    """

    def __init__(
        self,
        name: str,
        default: Any,
        check: Callable[..., Any],
        *,
        of: str | None = None,
        transform: Callable[[Any, Any, bool], Any] | None = None,
        values: Callable[[Any, StepNumbers], Mapping[str, Any]] | None = None,
        refuse: Callable[[Any], None] | None = None,
        by_norm: bool = False,
        by_row: bool = False,
        **limits: Any,
    ) -> None:
        super().__init__(check, optional=default is None, **limits)
        self.name, self.default, self.of = name, default, of
        self.transform, self.values, self.refuse, self.by_norm, self.by_row = transform, values, refuse, by_norm, by_row

    @property
    def changes_rule(self) -> bool:
        """Whether the option changes the rule of the optimizer."""
        return self.by_norm or self.transform is not None

    def is_on(self, optimizer: Any) -> bool:
        """Return whether this option of the optimizer is on."""
        return vars(optimizer).get(self.name, self.default) not in (None, False)

    def takes(self, optimizer: Any) -> bool:
        """Return whether the option can be combined with the kind of rule that an optimizer has."""
        try:
            if self.transform is not None:
                self.transform(optimizer, optimizer.rule, True)
        except TypeError:
            return False
        except ValueError:  # which the rule, or another option, is the reason of
            return True
        return True


def _state_dtype(name: str, value: Any) -> str:
    return choice(name, value, STATE_DTYPES, other_names=_OTHER_STATE_DTYPES)


def _refuse_state_dtype(optimizer: Any) -> None:
    if optimizer.narrow is not None:
        check_state_dtype(optimizer.state_dtype, type(optimizer).__name__, optimizer.rule)


def check_state_dtype(value: Any, name: str, rule: Any) -> None:
    """Raise ValueError if a rule has no state that could be stored in low precision; `name` is the optimizer's."""
    if not set(rule.state) - set(rule.full_precision):
        why = "as all its states are weights or sums over all steps" if rule.state else "as it has no states"
        if isinstance(rule, TensorRule):
            why = "none of whose states is stored otherwise"
        raise ValueError(f"state_dtype={value!r}: must be None for {name}, {why}")


def state_device(name: str, value: Any) -> str:
    return choice(name, str(value) if isinstance(value, torch.device) else value, ("cpu",))


def _refuse_decoupled(optimizer: Any) -> None:
    if not optimizer.couples_wd:
        decays = {"wd", "decay", *optimizer.decoupled_weight_decay} & set(optimizer.rule.hyper)
        why = "decays the weights apart from the gradient already" if decays else "has no weight decay"
        raise ValueError(f"decoupled_wd=True: {type(optimizer).__name__} {why}, so it must be False")


def _refuse_cautious_wd(optimizer: Any) -> None:
    if optimizer.has_decoupled_wd:
        return
    why = "has no weight decay" if "wd" not in optimizer.rule.hyper else "adds its weight decay to the gradient"
    hint = "it must be False" + (", or give decoupled_wd=True, too" if optimizer.couples_wd else "")
    raise ValueError(f"cautious_wd=True: {type(optimizer).__name__} {why}; {hint}")


def _of_rule(transform: Callable[[Any], Any]) -> Callable[[Any, Any, bool], Any]:
    return lambda optimizer, rule, sync: transform(rule)


def _beside_decay(transform: Callable[[Any, tuple[str, ...]], Any], *decay: str) -> Callable[[Any, Any, bool], Any]:
    """Return an option's `transform` that also passes the names of decoupled-decay hyper-parameters, including `decay`."""
    return lambda optimizer, rule, sync: transform(rule, (*optimizer.decoupled_weight_decay, *decay))


# In the order of composition: the first is innermost.
# fmt: off
OPTIONS = [
    Option("agc", None, number, above=0, transform=_of_rule(transforms.agc)),
    Option("clip_norm", None, number, above=0, by_norm=True),
    Option("cautious", False, boolean, transform=_beside_decay(transforms.cautious), by_row=True),
    Option("decoupled_wd", False, boolean, transform=_of_rule(transforms.decoupled_weight_decay), refuse=_refuse_decoupled,
           values=lambda optimizer, step: {"wd": 0.0, "decay": 0.0, "decoupled_decay": step.decay}),
    Option("cautious_wd", False, boolean, transform=_beside_decay(transforms.cautious_weight_decay, "decoupled_decay"),
           refuse=_refuse_cautious_wd),
    Option("lookahead", None, integer, low=1,
           transform=lambda optimizer, rule, sync: transforms.lookahead(rule, sync),
           values=lambda optimizer, step: {"sync": float((step.t - optimizer.begin_num_update) % optimizer.lookahead == 0)}),
    Option("lookahead_alpha", 0.5, number, above=0, high=1, of="lookahead"),
    Option("ema_decay", None, number, low=0, below=1, transform=_of_rule(transforms.ema)),
    Option("skip_norm", None, number, above=0, by_norm=True),
    Option("skip_nonfinite", False, boolean, by_norm=True),
    Option("state_dtype", None, _state_dtype, refuse=_refuse_state_dtype),
    Option("state_device", None, state_device),
    Option("stochastic_rounding", False, boolean),
    Option("rounding_seed", 0, integer, low=0, of="stochastic_rounding"),
]
# fmt: on


def options_in_use(optimizer: Any) -> tuple[str, ...]:
    """Return the names of the options that are on, in the order of `OPTIONS`; equal tuples are the same object.

    `skip_nonfinite` also counts as on if a loss scaler needs it.
    """
    return _interned(
        tuple(
            option.name
            for option in OPTIONS
            if option.of is None
            and (option.is_on(optimizer) or (option.name == "skip_nonfinite" and optimizer._skips_overflow))
        )
    )


@functools.cache
def _interned(names: tuple[str, ...]) -> tuple[str, ...]:
    return names
