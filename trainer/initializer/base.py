"""`Initializer`, the base class of all initializers, their registry, and `InitDesc`, a parameter name with attributes."""

from __future__ import annotations

import inspect
import json
import logging
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import torch

from ..registry import Registry
from ..validation import boolean, instance

_Class = TypeVar("_Class", bound="type[Initializer]")
_RULES = {  # the first ending that matches decides
    "weight": "_init_weight",
    "bias": "_init_bias",
    "gamma": "_init_gamma",
    "beta": "_init_beta",
    "min": "_init_zero",
    "max": "_init_one",
    "weight_quantize": "_init_quantized_weight",
    "bias_quantize": "_init_zero",
    "running_mean": "_init_zero",
    "moving_mean": "_init_zero",
    "running_var": "_init_one",
    "moving_var": "_init_one",
    "moving_inv_var": "_init_zero",
    "moving_avg": "_init_zero",
}


class InitDesc(str):
    """Parameter name, a string with attributes that tell an initializer how to fill the parameter.

    Args:
        name: the parameter's name.
        attrs: mapping whose key "__init__" may hold the parameter's own initializer: a name, the JSON that
            `Initializer.dumps` returns, or an instance.
        global_init: the initializer of the whole model, for initializers that delegate to it (:class:`FusedRNN`).
        role: the ending that selects the rule instead of the name's ending, such as "gamma" for the weight of a norm; None
            means the name's ending.
        generator: the torch.Generator to draw from; None means torch's global generator.

    Raises:
        TypeError: `name` is not a string.

    >>> InitDesc("fc1_weight", {"__init__": "one"}).upper()
    'FC1_WEIGHT'
    """

    attrs: dict[str, Any]
    global_init: Any
    role: str | None
    generator: torch.Generator | None

    def __new__(  # noqa: PYI034  # typing has Self from Python 3.11 on
        cls,
        name: str,
        attrs: Mapping[str, Any] | None = None,
        global_init: Any = None,
        role: str | None = None,
        generator: torch.Generator | None = None,
    ) -> InitDesc:
        instance("name", name, str, "a parameter's name, a string", shown=True)
        desc = super().__new__(cls, name)
        desc.attrs, desc.global_init, desc.role, desc.generator = dict(attrs or {}), global_init, role, generator
        return desc


class Initializer:
    """Base class of initializers, which fill a parameter by a rule that the ending of its name selects.

    ======================================================  ======================================
    ending of the name                                      rule
    ======================================================  ======================================
    weight                                                  `_init_weight`, which a subclass defines
    bias, beta                                              `_init_bias`, `_init_beta`: 0
    gamma                                                   `_init_gamma`: 1
    running_mean, moving_mean, moving_avg, moving_inv_var   `_init_zero`: 0
    running_var, moving_var                                 `_init_one`: 1
    min, max                                                `_init_zero`, `_init_one`: 0, 1
    weight_quantize                                         one random integer from -127 to 126
    bias_quantize                                           `_init_zero`: 0
    any other                                               `_init_default`: an error
    ======================================================  ======================================

    To define an initializer, write a subclass with `_init_weight(self, name, arr)`, and override further rules of the table
    if wanted. Fill the torch tensor `arr` in place; gradients are not recorded. Draw random numbers from `name.generator`,
    which is None for the global generator, so that results can be reproduced. Pass the constructor's arguments to
    `super().__init__` by name: `dumps`, `==` and `repr` use them.

    Args:
        **kwargs: the constructor arguments of the subclass.

    Raises:
        TypeError: the initializer is called on an object other than a tensor, or its rule returns another tensor.
        ValueError: the name's ending is not in the table.

    Source: MXNet 1.9.1, `python/mxnet/initializer.py`.

    >>> @register
    ... class Half(Initializer):
    ...     def _init_weight(self, name, arr):
    ...         arr[:] = 0.5
    >>> w = torch.zeros(2)
    >>> create("half")("fc_weight", w)
    >>> w
    tensor([0.5000, 0.5000])
    """

    registry: ClassVar[Registry[type[Initializer]]]

    def __init__(self, **kwargs: Any) -> None:
        self._kwargs = kwargs
        self._verbose = False
        self._print_func: Callable[[torch.Tensor], Any] = rms

    def __call__(self, desc: str, arr: torch.Tensor) -> None:
        """Fill a tensor in place by the rule for its name.

        Args:
            desc: the parameter's name, a string or an :class:`InitDesc`. If its `attrs` have "__init__", that initializer's
                weight rule fills the tensor instead, whatever the name ends in.
            arr: the tensor to fill.
        """
        instance(f"parameter {desc!r}:", arr, torch.Tensor, "a torch tensor")
        if not isinstance(desc, InitDesc):
            desc = InitDesc(desc)
        if desc.global_init is None:
            desc.global_init = self
        name = desc.role or desc
        rule, method = self, next((rule for ending, rule in _RULES.items() if name.endswith(ending)), "_init_default")
        if parameters_init := desc.attrs.get("__init__"):
            rule, method = as_initializer(f"parameter {str(desc)!r}: init", parameters_init), "_init_weight"
        with torch.no_grad():
            returned = getattr(rule, method)(desc, arr)
        if returned is not None and returned is not arr:
            raise TypeError(
                f"parameter {str(desc)!r}: {type(rule).__name__}.{method} returned {type(returned).__name__}, but it has to "
                "fill arr in place (arr[:] = ... or arr.copy_(...)) and return None"
            )
        if self._verbose:
            logging.getLogger(__name__).info(
                "initialized %s as %s: %s", desc, parameters_init or method.removeprefix("_init_"), self._print_func(arr)
            )

    def set_verbosity(self, verbose: bool = False, print_func: Callable[[torch.Tensor], Any] | None = None) -> Initializer:
        """Choose whether each filled tensor is logged, as one line at level INFO.

        Args:
            verbose: whether to log.
            print_func: function from a tensor to the value to log; None means the root mean square of its elements.

        Returns:
            The initializer itself.

        Raises:
            TypeError: `verbose` is not a bool.
        """
        self._verbose = boolean("verbose", verbose)
        self._print_func = print_func or rms
        return self

    def dumps(self) -> str:
        """Return the initializer as a JSON string `[name, arguments]`, from which `create` makes it again.

        The name of a class that is not registered includes its module's: `create` then finds it if it has been defined.

        Raises a TypeError if JSON cannot have one of the arguments. Warns with a UserWarning if the class's constructor has
        not passed one to `super().__init__`.

        >>> create("uniform", scale=2).dumps()
        '["uniform", {"scale": 2}]'
        """
        kind, named = type(self).__name__, (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        parameters = inspect.signature(type(self)).parameters.values()
        if lost := [each.name for each in parameters if each.kind in named and each.name not in self._kwargs]:
            warnings.warn(
                f"{kind}: {', '.join(lost)} will be lost, as its __init__ does not pass it to super().__init__ by name",
                stacklevel=2,
            )
        name = self.registry.name_of(type(self))
        try:
            return json.dumps([name if ":" in name else name.lower(), self._kwargs])
        except TypeError as error:
            raise TypeError(f"{self!r:.200} cannot be saved: {error}") from None

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other):
            return NotImplemented
        return self._kwargs == other._kwargs

    def __hash__(self) -> int:
        return hash(type(self))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self._kwargs.items())})"

    def _init_weight(self, name: InitDesc, arr: torch.Tensor) -> Any:
        raise NotImplementedError(f"{type(self).__name__}: a subclass must define _init_weight(self, name, arr)")

    def _init_zero(self, name: InitDesc, arr: torch.Tensor) -> Any:
        arr.zero_()

    def _init_one(self, name: InitDesc, arr: torch.Tensor) -> Any:
        arr.fill_(1)

    _init_bias = _init_beta = _init_zero
    _init_gamma = _init_one

    def _init_quantized_weight(self, name: InitDesc, arr: torch.Tensor) -> Any:
        device = arr.device if name.generator is None else name.generator.device
        arr.fill_(int(torch.randint(-127, 127, (), generator=name.generator, device=device)))

    def _init_default(self, name: InitDesc, arr: torch.Tensor) -> Any:
        raise ValueError(
            f"parameter {str(name)!r}: no rule for this name, which ends neither in weight, bias, gamma, beta, running_mean "
            "nor running_var: give the parameter an initializer of its own (parameter.init = 'normal', say), or define "
            "_init_default(self, name, arr) in a subclass of the initializer"
        )


Initializer.registry = Registry(
    "initializer",
    Initializer,
    argument="initializer",
    hint="The classes Load and Mixed have no names; a class of your own needs @tristep.initializer.register",
    contrib="initializers",
)


def register(klass: _Class) -> _Class:
    """Register an initializer class under its name, for `create`; a class decorator.

    Names are looked up in any case. Registering a second class of the same name replaces the first, with a warning.

    Args:
        klass: a subclass of :class:`Initializer`.

    Returns:
        `klass`, unchanged.

    Raises:
        TypeError: `klass` is not a subclass of :class:`Initializer`.
    """
    return Initializer.registry.register(klass, stacklevel=3)


def alias(*names: str) -> Callable[[_Class], _Class]:
    """Return a class decorator that registers an initializer under further names.

    Args:
        *names: the further names. Put the decorator above `@register`.

    Raises:
        TypeError: a name is not a string.
        ValueError: the decorated class is not registered.

    >>> @alias("seven")
    ... @register
    ... class Sevens(Initializer):
    ...     def _init_weight(self, name, arr):
    ...         arr.fill_(7)
    >>> create("seven") == create("sevens")
    True
    """
    for name in names:
        instance("@alias: name", name, str, "a string", ", as in @alias('other_name')", shown=True)

    def decorate(klass: _Class) -> _Class:
        if klass not in Initializer.registry.values():
            raise ValueError(f"@alias{names!r}: {klass!r} is not registered: put @alias above @register")
        return Initializer.registry.register(klass, *names, stacklevel=3)

    return decorate


def registered() -> dict[str, type[Initializer]]:
    """Return all registered initializer classes by name, including aliases; those of `tristep.contrib` are imported."""
    return Initializer.registry.everything()


def as_initializer(argument: str, value: Any, kwargs: Mapping[str, Any] | None = None) -> Initializer:
    """Return an initializer made from a name, with `kwargs`, or from JSON; return an instance unchanged.

    `argument` is the argument name to show in messages; `kwargs` are allowed with a name only.
    """
    if isinstance(value, Initializer):
        return value
    hint = f"; write {value.__name__}() for an instance" if isinstance(value, type) else ""
    instance(argument, value, str, "a name, such as 'xavier', or an Initializer", hint, shown=True)
    if value.lstrip()[:1] in ("[", "{"):
        if kwargs:
            raise TypeError(f"arguments with JSON: {', '.join(kwargs)}; write them into the JSON")
        value, kwargs = _from_json(value)
        return Initializer.registry.named(value)(**kwargs)
    return Initializer.registry.lookup(value)(**(kwargs or {}))


def needs(fits: bool, name: str, arr: torch.Tensor, words: str) -> None:
    """Raise ValueError unless a tensor's shape fits its initializer; `words` say what that needs, and what to do."""
    if not fits:
        raise ValueError(f"parameter {str(name)!r}: has shape {tuple(arr.shape)}, {words}")


def draw(name: InitDesc, arr: torch.Tensor, shape: Sequence[int], kind: str, scale: float) -> torch.Tensor:
    """Return random numbers for the parameter `arr` from `name.generator`: float64 if `arr` is, otherwise float32.

    `kind` is "uniform" between -scale and scale, or "normal" with mean 0 and standard deviation scale. Without a generator
    they are drawn on the parameter's device.
    """
    generator, dtype = name.generator, torch.float64 if arr.dtype == torch.float64 else torch.float32
    values = torch.empty(tuple(shape), dtype=dtype, device=arr.device if generator is None else generator.device)
    if kind == "uniform":
        return values.uniform_(-scale, scale, generator=generator)
    return values.normal_(0, scale, generator=generator)


def rms(arr: torch.Tensor) -> float:
    """Return the root mean square of a tensor's elements, 0 for an empty tensor."""
    return float(arr.double().norm() / math.sqrt(max(arr.numel(), 1)))


def _from_json(text: str) -> tuple[str, dict[str, Any]]:
    try:
        data = json.loads(text)
    except ValueError as error:
        raise ValueError(f"initializer={text!r}: is not JSON ({error})") from None
    if isinstance(data, dict):
        data = [data.pop("initializer", None), data]
    if not (len(data) == 2 and isinstance(data[0], str) and isinstance(data[1], dict)):
        raise ValueError(f"initializer={text!r}: must be [name, arguments], or an object with the name under 'initializer'")
    return data[0], data[1]
