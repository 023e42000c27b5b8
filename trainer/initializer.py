"""Initializers: what weights are before training, with MXNet's names, defaults and numbers, on torch tensors.

`initialize` fills a whole module. An initializer may also be called on one tensor, with its name: the name's ending decides
which of its rules is used, so that `Xavier()("fc_weight", w)` draws and `Xavier()("fc_bias", b)` gives zeros.

Order: `initialize`; the classes; making them by name; and, private, how torch's modules are read.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
import safetensors
import safetensors.torch
import torch

from .arguments import choice, did_you_mean, flag, number, real, whole

__all__ = [
    "Bilinear",
    "Constant",
    "FusedRNN",
    "InitDesc",
    "Initializer",
    "LSTMBias",
    "Load",
    "MSRAPrelu",
    "Mixed",
    "Normal",
    "One",
    "Orthogonal",
    "RNNFused",
    "Uniform",
    "Xavier",
    "Zero",
    "alias",
    "create",
    "initialize",
    "register",
    "registered",
]


def initialize(
    module: torch.nn.Module,
    initializer: str | Initializer | Mixed | Load = "uniform",
    generator: torch.Generator | None = None,
    *,
    init: str | Initializer | Mixed | Load | None = None,
    force_reinit: bool = True,
) -> None:
    """Fill the parameters of a module, and the running statistics of its norms.

    Every value is computed before the first is written, so after an error the module is as it was (and for a moment the
    parameters are in memory twice). Nothing is recorded for `backward`; gradients are left alone. A parameter that occurs in
    several places is filled once, under its first name.

    ==================================================================  ==================================================
    parameter                                                           value
    ==================================================================  ==================================================
    weight: any shape, as of linear, convolution and embedding layers   the initializer's own rule
    weight and bias of norms: batch, layer, group, instance, RMS, and   1 and 0
    other modules with "norm" in the name of their class whose weight
    has at most one dimension
    bias                                                                0
    running mean, running variance, count of batches of norms           0, 1, 0
    recurrent layers and cells: `weight_...`, `bias_...`                the initializer's own rule, 0
    `bias_k`, `bias_v` of MultiheadAttention                            0
    weight of PReLU                                                     0.25
    row `padding_idx` of an embedding                                   0, unless it is loaded
    others                                                              as their names end; see :class:`Initializer`
    ==================================================================  ==================================================

    A parameter may have an initializer of its own: an attribute `init`, a name or an :class:`Initializer`. Its own rule is
    then used, whatever the parameter is called; this is what the layers' arguments like `bias_initializer` are in Gluon.

    Args:
        module: the module, with all its submodules.
        initializer: a name, such as "xavier", an instance, or a :class:`Mixed` or :class:`Load`; by default Uniform(0.07).
        generator: what random numbers are drawn from; None means the global generator of each parameter's device. Values
            drawn with a generator do not depend on the parameters' device: a generator on the CPU serves all. Numbers are
            drawn in float32 (float64 for float64 parameters), parameter by parameter in the order of `named_parameters`.
        init: Gluon's name of `initializer`, in its place.
        force_reinit: must be True: torch's parameters have values from the start, which are always replaced.

    Raises:
        TypeError: an argument of a wrong type; a parameter that is not of a floating-point type.
        ValueError: no initializer has that name; a parameter has no shape yet, no memory, no rule for its name, or a shape
            that the rule does not fit. The message names it. Nothing has been changed.

    Source: MXNet 1.9.1, `Block.initialize` of Gluon.

    >>> net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    >>> initialize(net, Xavier(magnitude=2), torch.Generator().manual_seed(1))
    >>> net[0].bias.tolist(), net[1].weight.tolist()
    ([0.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0])
    """
    if not isinstance(module, torch.nn.Module):
        raise TypeError(
            f"module must be a torch.nn.Module, got {type(module).__name__}; for one tensor, call the initializer: "
            "create('xavier')(name, tensor)"
        )
    if init is not None:
        if initializer != "uniform":
            raise TypeError(f"init={init!r} beside initializer={initializer!r}: both name the initializer, give one of them")
        initializer = init
    if not flag("force_reinit", force_reinit):
        raise ValueError(
            "force_reinit=False: torch's parameters have values from the start, which are always replaced: leave it out, "
            "and call initialize() once"
        )
    if generator is not None and not isinstance(generator, torch.Generator):
        raise TypeError(f"generator={generator!r}: must be a torch.Generator or None, not {type(generator).__name__}")
    chosen = create(initializer)
    found = list(_found(module))
    _check_tensors(found)
    results = []
    for entry in found:
        if entry.role == _COUNT:
            result = chosen.param.get(entry.name, entry.tensor) if isinstance(chosen, Load) else 0
            results.append(torch.as_tensor(result, device=entry.tensor.device))
            continue
        values = entry.tensor.detach().clone(memory_format=torch.contiguous_format)
        attrs = {} if entry.own is None else {"__init__": entry.own}
        chosen(InitDesc(entry.name, attrs, _default_of(chosen), role=entry.role, generator=generator), values)
        if entry.padding_idx is not None and not isinstance(chosen, Load):
            values[entry.padding_idx] = 0
        results.append(values)
    with torch.no_grad():
        for entry, values in zip(found, results, strict=True):
            entry.tensor.copy_(values)


class InitDesc(str):
    """A parameter's name, with what an initializer should know besides; a string in every other respect.

    Args:
        name: the name.
        attrs: "__init__" in it is the parameter's own initializer: a name, what `dumps` gives, or an instance.
        global_init: the initializer for the whole model, for initializers that hand parts on (:class:`FusedRNN`).
        role: an ending that decides instead of the name's, such as "gamma" for the weight of a norm; None means the name's.
        generator: the torch.Generator to draw from; None means the global one.

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
        """Make one."""
        if not isinstance(name, str):
            raise TypeError(f"name={name!r}: must be a parameter's name, a string, not {type(name).__name__}")
        desc = super().__new__(cls, name)
        desc.attrs = dict(attrs or {})
        desc.global_init = global_init
        desc.role = role
        desc.generator = generator
        return desc


class Initializer:
    """Base class of the initializers: which rule a name calls for.

    ======================================================  ======================================
    ending of the name                                      rule
    ======================================================  ======================================
    weight                                                  `_init_weight`, the class's own
    bias, beta                                              `_init_bias`, `_init_beta`: 0
    gamma                                                   `_init_gamma`: 1
    running_mean, moving_mean, moving_avg, moving_inv_var   `_init_zero`: 0
    running_var, moving_var                                 `_init_one`: 1
    min, max                                                `_init_zero`, `_init_one`: 0, 1
    weight_quantize                                         one integer from -127 to 126 throughout
    bias_quantize                                           `_init_zero`: 0
    any other                                               `_init_default`: an error
    ======================================================  ======================================

    For an initializer of your own, write a subclass with `_init_weight(self, name, arr)`, and others of these if wanted.
    `arr` is a torch tensor, to be filled in place; gradients are not recorded. To be reproducible, draw from
    `name.generator`, which is None for the global generator. Hand the constructor's arguments to `super().__init__` by
    name, so that `dumps`, `==` and printing know them.

    Args:
        **kwargs: the arguments that a subclass was made with.

    Raises:
        TypeError: called on something that is no tensor.
        ValueError: there is no rule for the name.

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

    def __init__(self, **kwargs: Any) -> None:
        self._kwargs = kwargs
        self._verbose = False
        self._print_func: Callable[[torch.Tensor], Any] = _size

    def __call__(self, desc: str, arr: torch.Tensor) -> None:
        """Fill `arr` in place by the rule for its name.

        Args:
            desc: the name, or an :class:`InitDesc`.
            arr: the tensor. With `attrs["__init__"]` in `desc`, that initializer's own rule fills it.
        """
        if not isinstance(arr, torch.Tensor):
            raise TypeError(f"parameter {desc!r}: must be a torch tensor, got {type(arr).__name__}")
        desc = _described(desc, self)
        rule, method = self, _rule_for(desc.role or desc)
        if own := desc.attrs.get("__init__"):
            made = create(own)
            if not isinstance(made, Initializer):
                raise TypeError(f"parameter {str(desc)!r}: its own initializer must be an Initializer, got {made!r}")
            rule, method = made, "_init_weight"
        with torch.no_grad():
            returned = getattr(rule, method)(desc, arr)
        if returned is not None and returned is not arr:
            raise TypeError(
                f"parameter {str(desc)!r}: {type(rule).__name__}.{method} returned {type(returned).__name__}, but it has to "
                "fill arr in place (arr[:] = ... or arr.copy_(...)) and return None"
            )
        if self._verbose:
            logging.getLogger(__name__).info(
                "initialized %s as %s: %s", desc, own or method.removeprefix("_init_"), self._print_func(arr)
            )

    def set_verbosity(self, verbose: bool = False, print_func: Callable[[torch.Tensor], Any] | None = None) -> Initializer:
        """Log a line at level INFO for each tensor that is filled.

        Args:
            verbose: whether to.
            print_func: what is logged of a tensor; None means norm / sqrt(number of elements).

        Returns:
            The initializer.
        """
        self._verbose = flag("verbose", verbose)
        self._print_func = print_func or _size
        return self

    def dumps(self) -> str:
        """The initializer as JSON, `[name, arguments]`, from which `create` makes it again.

        >>> Xavier().dumps()
        '["xavier", {"rnd_type": "uniform", "factor_type": "avg", "magnitude": 3}]'
        """
        return json.dumps([type(self).__name__.lower(), self._kwargs])

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

    def _init_bias(self, name: InitDesc, arr: torch.Tensor) -> Any:
        arr.zero_()

    def _init_gamma(self, name: InitDesc, arr: torch.Tensor) -> Any:
        arr.fill_(1)

    def _init_beta(self, name: InitDesc, arr: torch.Tensor) -> Any:
        arr.zero_()

    def _init_zero(self, name: InitDesc, arr: torch.Tensor) -> Any:
        arr.zero_()

    def _init_one(self, name: InitDesc, arr: torch.Tensor) -> Any:
        arr.fill_(1)

    def _init_quantized_weight(self, name: InitDesc, arr: torch.Tensor) -> Any:
        device = arr.device if name.generator is None else name.generator.device
        arr.fill_(int(torch.randint(-127, 127, (), generator=name.generator, device=device)))

    def _init_default(self, name: InitDesc, arr: torch.Tensor) -> Any:
        raise ValueError(
            f"parameter {str(name)!r}: no rule for a name that ends neither in weight, bias, gamma, beta, running_mean nor "
            "running_var: give the parameter an initializer of its own (parameter.init = 'normal', say), or define "
            "_init_default(self, name, arr) in a subclass of the initializer"
        )


_registry: dict[str, type[Initializer]] = {}
_Class = TypeVar("_Class", bound=type[Initializer])


def register(klass: _Class) -> _Class:
    """Class decorator: make an initializer known by its name, in lower case. A second one of that name replaces the first.

    Raises:
        TypeError: not a subclass of :class:`Initializer`.
    """
    if not (isinstance(klass, type) and issubclass(klass, Initializer)):
        raise TypeError(f"@register takes a subclass of Initializer, got {klass!r}")
    _enter(klass.__name__, klass)
    return klass


def alias(*names: str) -> Callable[[_Class], _Class]:
    """Class decorator: make a registered initializer known by further names.

    >>> @alias("seven")
    ... @register
    ... class Sevens(Initializer):
    ...     def _init_weight(self, name, arr):
    ...         arr.fill_(7)
    >>> create("seven") == create("sevens")
    True
    """
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"@alias takes names, strings, got {name!r}; write @alias('other_name')")

    def decorate(klass: _Class) -> _Class:
        if klass not in _registry.values():
            raise ValueError(f"@alias{names!r}: {klass!r} is not registered: put @alias above @register")
        for name in names:
            _enter(name, klass)
        return klass

    return decorate


def registered() -> dict[str, type[Initializer]]:
    """The initializers by name, aliases among them."""
    return dict(sorted(_registry.items()))


def create(initializer: Any, **kwargs: Any) -> Any:
    """Make an initializer by name.

    Args:
        initializer: such as "xavier" or "Zeros", in any case; the JSON of `dumps`, `["xavier", {"magnitude": 2}]`, or of an
            object, `{"initializer": "xavier", "magnitude": 2}`; an instance is returned as it is.
        **kwargs: the class's arguments, beside a plain name.

    Raises:
        TypeError: neither a name nor an instance; arguments that the class does not have, or beside an instance or JSON.
        ValueError: no initializer has that name, an argument is out of its range, or the JSON is damaged.

    >>> create("msraprelu", slope=0)
    MSRAPrelu(factor_type='avg', slope=0)
    """
    if isinstance(initializer, (Initializer, Mixed, Load)):
        if kwargs:
            raise TypeError(f"arguments beside an instance: {', '.join(kwargs)}; give them to {type(initializer).__name__}")
        return initializer
    if not isinstance(initializer, str):
        hint = f"; write {initializer.__name__}() for an instance" if isinstance(initializer, type) else ""
        raise TypeError(
            f"initializer={initializer!r}: must be a name, such as 'xavier', or an Initializer, "
            f"not {type(initializer).__name__}{hint}"
        )
    name = initializer
    if initializer.lstrip()[:1] in ("[", "{"):
        if kwargs:
            raise TypeError(f"arguments beside JSON: {', '.join(kwargs)}; write them into it")
        name, kwargs = _from_json(initializer)
    if name.lower() not in _registry:
        raise ValueError(
            f"initializer={name!r}: no initializer is registered by that name; there are {', '.join(sorted(_registry))}, "
            f"and the classes Load and Mixed.{did_you_mean(name.lower(), _registry)} A class of your own needs "
            "@tristep.initializer.register"
        )
    return _registry[name.lower()](**kwargs)


def _enter(name: str, klass: type[Initializer]) -> None:
    known = _registry.get(name.lower())
    if known is not None and (known.__module__, known.__qualname__) != (klass.__module__, klass.__qualname__):
        warnings.warn(f"initializer {name.lower()!r} now means {klass!r}, before {known!r}", stacklevel=3)
    _registry[name.lower()] = klass


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


@alias("zeros")
@register
class Zero(Initializer):
    """Weights are 0.

    Source: MXNet 1.9.1, `Zero`.

    >>> w = torch.ones(2)
    >>> Zero()("fc_weight", w)
    >>> w
    tensor([0., 0.])
    """

    def __init__(self) -> None:
        super().__init__()

    def _init_weight(self, name: InitDesc, arr: torch.Tensor) -> None:
        arr.zero_()


@alias("ones")
@register
class One(Initializer):
    """Weights are 1.

    Source: MXNet 1.9.1, `One`.

    >>> w = torch.zeros(2)
    >>> One()("fc_weight", w)
    >>> w
    tensor([1., 1.])
    """

    def __init__(self) -> None:
        super().__init__()

    def _init_weight(self, name: InitDesc, arr: torch.Tensor) -> None:
        arr.fill_(1)


@register
class Constant(Initializer):
    """Weights have a given value.

    Args:
        value: a number, or an array of them (tensor, NumPy array or nested lists) whose shape is the weight's, or expands to
            it by the rules of broadcasting.

    Raises:
        TypeError: not numbers.
        ValueError: the shapes do not fit.

    Source: MXNet 1.9.1, `Constant`.

    >>> w = torch.zeros(2, 3)
    >>> Constant([1, 2, 3])("fc_weight", w)
    >>> w
    tensor([[1., 2., 3.],
            [1., 2., 3.]])
    """

    def __init__(self, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            value = value.detach().cpu().double().numpy()
        if np.ndim(value):
            array = np.asarray(value)
            if array.dtype.kind not in "fiu":
                raise TypeError(f"value={value!r}: must be a number or an array of numbers")
            value = array.tolist()
        else:
            value = number("value", value)
        super().__init__(value=value)
        self.value = value

    def _init_weight(self, name: InitDesc, arr: torch.Tensor) -> None:
        values = torch.as_tensor(self.value, dtype=torch.float64)
        try:
            expanded = values.expand(arr.shape)
        except RuntimeError:
            raise ValueError(
                f"parameter {str(name)!r}: has shape {tuple(arr.shape)}, to which a value of shape {tuple(values.shape)} "
                "does not expand: give Constant a number, or an array of the parameter's shape"
            ) from None
        arr.copy_(expanded)


@register
class Uniform(Initializer):
    """Weights are drawn from the uniform distribution between -scale and scale. The default of `initialize`.

    Args:
        scale: the largest size of a weight, >= 0.

    Source: MXNet 1.9.1, `Uniform`.

    >>> w = torch.zeros(100)
    >>> Uniform(0.5)("fc_weight", w)
    >>> bool(w.abs().max() <= 0.5)
    True
    """

    def __init__(self, scale: float = 0.07) -> None:
        self.scale = real("scale", scale, low=0)
        super().__init__(scale=number("scale", scale))

    def _init_weight(self, name: InitDesc, arr: torch.Tensor) -> None:
        arr.copy_(_drawn(name, arr, arr.shape, "uniform", self.scale))


@register
class Normal(Initializer):
    """Weights are drawn from the normal distribution of mean 0.

    Args:
        sigma: the standard deviation, >= 0.

    Source: MXNet 1.9.1, `Normal`.

    >>> w = torch.zeros(100)
    >>> Normal(sigma=2)("fc_weight", w)
    >>> 1 < float(w.std()) < 3
    True
    """

    def __init__(self, sigma: float = 0.01) -> None:
        self.sigma = real("sigma", sigma, low=0)
        super().__init__(sigma=number("sigma", sigma))

    def _init_weight(self, name: InitDesc, arr: torch.Tensor) -> None:
        arr.copy_(_drawn(name, arr, arr.shape, "normal", self.sigma))


@register
class Orthogonal(Initializer):
    """Weights whose rows, or columns where these are fewer, are orthogonal and of length `scale`.

    The weight is seen as a matrix W with shape[0] rows. A random matrix of its size is decomposed into U S V, and W is
    `scale` times U or V, whichever has the size of W. The signs of U's columns, or V's rows, are then drawn, since those of
    a decomposition are no random ones (in MXNet, which keeps them, all 2 × 2 matrices are reflections). So W W^T = scale^2 I
    where rows are not more than columns, else W^T W = scale^2 I. The time grows with the cube of the shorter side: a second
    or so for 1000.

    Args:
        scale: length of a row or column.
        rand_type: the random matrix is "uniform" between -1 and 1, or "normal".

    Raises:
        ValueError: the weight has no dimension.

    Source: Saxe, McClelland and Ganguli, "Exact solutions to the nonlinear dynamics of learning in deep linear neural
    networks" (2014); MXNet 1.9.1, `Orthogonal`.

    >>> w = torch.zeros(2, 3)
    >>> Orthogonal(scale=1)("fc_weight", w)
    >>> torch.allclose(w @ w.T, torch.eye(2), atol=1e-6)
    True
    """

    def __init__(self, scale: float = 1.414, rand_type: str = "uniform") -> None:
        self.scale = real("scale", scale)
        self.rand_type = choice("rand_type", rand_type, ("uniform", "normal"))
        super().__init__(scale=number("scale", scale), rand_type=rand_type)

    def _init_weight(self, name: InitDesc, arr: torch.Tensor) -> None:
        if arr.dim() == 0:
            raise ValueError(
                f"parameter {str(name)!r}: has no dimension; Orthogonal needs rows: give it another initializer"
            )
        if arr.numel() == 0:
            return
        shape = (arr.shape[0], arr.numel() // arr.shape[0])
        matrix = _drawn(name, arr, shape, self.rand_type, 1.0)
        if matrix.device.type != "mps":  # which has no float64
            matrix = matrix.double()
        left, _, right = torch.linalg.svd(matrix, full_matrices=False)
        signs = torch.where(_drawn(name, arr, (min(shape),), "uniform", 1.0) < 0, -self.scale, self.scale)
        arr.copy_((left * signs if left.shape == shape else right * signs[:, None]).reshape(arr.shape))


@register
class Xavier(Initializer):
    """Weights of a size that keeps that of activations and gradients from layer to layer.

    ::

        uniform     U(-s, s)     s = sqrt(magnitude / factor)
        gaussian    N(0, s^2)
        factor      (fan_in + fan_out) / 2, fan_in or fan_out, for "avg", "in" and "out"
        fan_in      shape[1] * product of shape[2:]
        fan_out     shape[0] * product of shape[2:]

    These are the shapes of torch's linear and convolution layers as well as MXNet's. Transposed convolutions, in both
    libraries of shape (in, out, ...), are taken by shape, too; for them the two fans change places.

    Args:
        rnd_type: "uniform" or "gaussian".
        factor_type: "avg", "in" or "out".
        magnitude: > 0. With 3 and "uniform" it is the distribution of Glorot and Bengio; with 3 and "gaussian" the
            variance is three times theirs.

    Raises:
        ValueError: the weight has fewer than two dimensions.

    Source: Glorot and Bengio, "Understanding the difficulty of training deep feedforward neural networks" (2010),
    equation 16; MXNet 1.9.1, `Xavier`.

    >>> w = torch.zeros(6, 4)
    >>> Xavier(factor_type="in", magnitude=1)("fc_weight", w)
    >>> bool(w.abs().max() <= 0.5)
    True
    """

    def __init__(self, rnd_type: str = "uniform", factor_type: str = "avg", magnitude: float = 3) -> None:
        self.rnd_type = choice("rnd_type", rnd_type, ("uniform", "gaussian"))
        self.factor_type = choice("factor_type", factor_type, ("avg", "in", "out"))
        self.magnitude = real("magnitude", magnitude, above=0)
        super().__init__(rnd_type=rnd_type, factor_type=factor_type, magnitude=number("magnitude", magnitude))

    def _init_weight(self, name: InitDesc, arr: torch.Tensor) -> None:
        if arr.dim() < 2:
            raise ValueError(
                f"parameter {str(name)!r}: has shape {tuple(arr.shape)}, but {type(self).__name__} needs two dimensions or "
                "more, to know how many inputs and outputs there are: give the parameter an initializer of its own "
                "(parameter.init = 'uniform', say)"
            )
        if arr.numel() == 0:
            return
        size = math.prod(arr.shape[2:])
        fan_out, fan_in = (side * size for side in arr.shape[:2])
        factor = {"avg": (fan_in + fan_out) / 2, "in": fan_in, "out": fan_out}[self.factor_type]
        kind = "uniform" if self.rnd_type == "uniform" else "normal"
        arr.copy_(_drawn(name, arr, arr.shape, kind, math.sqrt(self.magnitude / factor)))


@register
class MSRAPrelu(Xavier):
    """Weights for layers with PReLU or ReLU: Xavier, gaussian, of magnitude 2 / (1 + slope^2).

    Args:
        factor_type: as in :class:`Xavier`.
        slope: the initial slope of PReLU for negative inputs; 0 is ReLU.

    Raises:
        ValueError: the weight has fewer than two dimensions.

    Source: He et al., "Delving deep into rectifiers" (2015), equation 15; MXNet 1.9.1, `MSRAPrelu`.

    >>> MSRAPrelu(slope=0).magnitude
    2.0
    """

    def __init__(self, factor_type: str = "avg", slope: float = 0.25) -> None:
        super().__init__("gaussian", factor_type, 2.0 / (1 + real("slope", slope) ** 2))
        self.slope = number("slope", slope)
        self._kwargs = {"factor_type": factor_type, "slope": self.slope}


@register
class Bilinear(Initializer):
    """Weights of a transposed convolution that enlarges an image by linear interpolation.

    ::

        (1 - |x / f - c|) * (1 - |y / f - c|)     at row y and column x of every plane
        f = ceil(width / 2),  c = (2 f - 1 - f mod 2) / (2 f)

    Raises:
        ValueError: the weight is not four-dimensional.

    Source: MXNet 1.9.1, `Bilinear`, where f and c of the width serve both axes; the kernel is that of Long, Shelhamer and
    Darrell, "Fully convolutional networks for semantic segmentation" (2015), section 3.3.

    >>> w = torch.zeros(1, 1, 1, 4)
    >>> Bilinear()("up_weight", w)
    >>> w.flatten().tolist()
    [0.0625, 0.1875, 0.1875, 0.0625]
    """

    def __init__(self) -> None:
        super().__init__()

    def _init_weight(self, name: InitDesc, arr: torch.Tensor) -> None:
        if arr.dim() != 4:
            raise ValueError(
                f"parameter {str(name)!r}: has shape {tuple(arr.shape)}, but Bilinear is for four dimensions, those of a "
                "2-d (transposed) convolution: give other parameters another initializer, by Mixed or by parameter.init"
            )
        half = math.ceil(arr.shape[3] / 2)
        if half == 0:
            return
        centre = (2 * half - 1 - half % 2) / (2.0 * half)
        rows, columns = (1 - np.abs(np.arange(side) / half - centre) for side in arr.shape[2:])
        arr.copy_(torch.from_numpy(rows[:, None] * columns))


@register
class LSTMBias(Initializer):
    """The bias of an LSTM: 0, but for the forget gate, whose is `forget_bias`.

    The forget gate is the second quarter, in MXNet (i, f, c, o) and in torch (i, f, g, o). As the biases' own rule is to be
    used, it is made their own initializer: `lstm.bias_ih_l0.init = LSTMBias(1.0)`. Torch and MXNet both add two biases.

    Args:
        forget_bias: the value for the forget gate.

    Raises:
        ValueError: the length is no multiple of 4.

    Source: Jozefowicz, Zaremba and Sutskever, "An empirical exploration of recurrent network architectures" (2015);
    MXNet 1.9.1, `LSTMBias`.

    >>> lstm = torch.nn.LSTM(3, 1)
    >>> lstm.bias_ih_l0.init = LSTMBias(1.0)
    >>> initialize(lstm, "xavier")
    >>> lstm.bias_ih_l0.tolist(), lstm.bias_hh_l0.tolist()
    ([0.0, 1.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0])
    """

    def __init__(self, forget_bias: float = 1.0) -> None:
        self.forget_bias = number("forget_bias", forget_bias)
        super().__init__(forget_bias=self.forget_bias)

    def _init_weight(self, name: InitDesc, arr: torch.Tensor) -> None:
        if arr.dim() == 0 or arr.shape[0] % 4:
            raise ValueError(
                f"parameter {str(name)!r}: has shape {tuple(arr.shape)}, but LSTMBias needs four gates, a first dimension "
                "that is a multiple of 4: give it to biases of LSTMs only"
            )
        arr.zero_()
        quarter = arr.shape[0] // 4
        arr[quarter : 2 * quarter] = self.forget_bias


_GATES = {  # as MXNet names them, in the order of MXNet, cuDNN and torch
    "rnn_relu": ("",),
    "rnn_tanh": ("",),
    "lstm": ("_i", "_f", "_c", "_o"),
    "gru": ("_r", "_z", "_o"),
}


@register
class FusedRNN(Initializer):
    """All parameters of a recurrent network, each gate's matrix and bias by itself.

    It fills MXNet's one vector of a fused network: weights by layer, direction and source (input, hidden), then biases in
    the same order. In `initialize` it fills torch's recurrent layers and cells, whose parameters hold the same matrices
    one by one; there `num_layers` and `bidirectional` have no effect.

    Args:
        init: the initializer of the pieces, or its name or JSON; None means that of the whole model, or else Uniform(0.07).
            Biases of forget gates of an LSTM are `forget_bias`, whatever it says.
        num_hidden: size of the hidden state.
        num_layers: number of layers.
        mode: "rnn_relu", "rnn_tanh", "lstm" or "gru".
        bidirectional: whether there are two directions.
        forget_bias: for both biases of an LSTM, so that their sum is twice this, as in MXNet.

    Raises:
        ValueError: a shape that is none of such a network.

    Source: MXNet 1.9.1, `FusedRNN`.

    >>> lstm = torch.nn.LSTM(3, 1)
    >>> initialize(lstm, FusedRNN("orthogonal", num_hidden=1, num_layers=1, mode="lstm"))
    >>> lstm.bias_ih_l0.tolist()
    [0.0, 1.0, 0.0, 0.0]
    """

    def __init__(
        self,
        init: str | Initializer | None,
        num_hidden: int,
        num_layers: int,
        mode: str,
        bidirectional: bool = False,
        forget_bias: float = 1.0,
    ) -> None:
        self.init = None if init is None else _inner("init", init)
        self.num_hidden = whole("num_hidden", num_hidden, low=1)
        self.num_layers = whole("num_layers", num_layers, low=1)
        self.mode = choice("mode", mode, _GATES)
        self.bidirectional = flag("bidirectional", bidirectional)
        self.forget_bias = number("forget_bias", forget_bias)
        super().__init__(
            init=None if self.init is None else self.init.dumps(),
            num_hidden=self.num_hidden,
            num_layers=self.num_layers,
            mode=mode,
            bidirectional=bidirectional,
            forget_bias=self.forget_bias,
        )

    def _init_weight(self, name: InitDesc, arr: torch.Tensor) -> None:
        values = torch.zeros_like(arr, memory_format=torch.contiguous_format)
        if arr.dim() == 1:
            directions = 2 if self.bidirectional else 1
            for piece, part in _vector_parts(name, values, self.mode, self.num_layers, self.num_hidden, directions, None):
                self._fill(name, f"{piece.place}_{piece.source}", piece.kind, part)
        elif _part_of(name) == "weight_hr":
            self._piece(name, name, values)
        else:
            self._fill(name, name, "weight", self._gates_of(name, values))
        arr.copy_(values)

    def _init_bias(self, name: InitDesc, arr: torch.Tensor) -> None:
        values = torch.zeros_like(arr, memory_format=torch.contiguous_format)
        self._fill(name, name, "bias", self._gates_of(name, values))
        arr.copy_(values)

    def _gates_of(self, name: InitDesc, values: torch.Tensor) -> torch.Tensor:
        rows = len(_GATES[self.mode]) * self.num_hidden
        if values.dim() == 0 or values.shape[0] != rows:
            raise ValueError(
                f"parameter {str(name)!r}: has shape {tuple(values.shape)}, but {self!r} is for {rows} rows: use it for "
                "that network only, by Mixed or by parameter.init"
            )
        return values

    def _fill(self, name: InitDesc, prefix: str, kind: str, values: torch.Tensor) -> None:
        gates = _GATES[self.mode]
        for gate, part in zip(gates, values.chunk(len(gates)), strict=True):
            piece = f"{prefix}{gate}_{kind}"
            if self.mode == "lstm" and piece.endswith("_f_bias"):
                part.fill_(self.forget_bias)
            else:
                self._piece(name, piece, part, role=kind)

    def _piece(self, name: InitDesc, piece: str, part: torch.Tensor, role: str = "weight") -> None:
        init = self.init or name.global_init
        if init is None or isinstance(init, FusedRNN):
            init = Uniform()
        init(InitDesc(piece, None, name.global_init, role=role, generator=name.generator), part)


@register
class RNNFused(Initializer):
    """All parameters of a recurrent network, each kind with an initializer of its own.

    It fills MXNet's one vector of a fused network: weights by layer, direction and source (input, hidden, projection),
    then biases in the same order. In `initialize` it fills torch's recurrent layers and cells; there `num_layers`,
    `state_size`, `bidirectional` and `projection_size` have no effect.

    Args:
        mode: "rnn_relu", "rnn_tanh", "lstm" or "gru".
        num_layers: number of layers.
        state_size: size of the hidden state.
        bidirectional: whether there are two directions.
        projection_size: size of the projection of an LSTM's state; None means no projection.
        i2h_weight_initializer, h2h_weight_initializer, h2r_weight_initializer: for the matrices from input to hidden, from
            hidden to hidden, and to the projection, each for all gates at once. None means the initializer of the whole
            model, or else Uniform(0.07).
        i2h_bias_initializer, h2h_bias_initializer: for the biases, by their own rules, such as "lstmbias"; None means zeros.

    Raises:
        ValueError: a shape that is none of such a network.

    Source: MXNet 2.0, `RNNFused`; it hands matrices on as vectors, so that Xavier does not work there.

    >>> w = torch.ones(2 * (3 + 2 + 2))
    >>> RNNFused("rnn_tanh", 1, 2, i2h_weight_initializer="zeros", h2h_weight_initializer="ones")("rnn_weight", w)
    >>> w.tolist()
    [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    """

    def __init__(
        self,
        mode: str,
        num_layers: int,
        state_size: int,
        bidirectional: bool = False,
        projection_size: int | None = None,
        i2h_weight_initializer: str | Initializer | None = None,
        h2h_weight_initializer: str | Initializer | None = None,
        i2h_bias_initializer: str | Initializer | None = None,
        h2h_bias_initializer: str | Initializer | None = None,
        h2r_weight_initializer: str | Initializer | None = None,
    ) -> None:
        self.mode = choice("mode", mode, _GATES)
        self.num_layers = whole("num_layers", num_layers, low=1)
        self.state_size = whole("state_size", state_size, low=1)
        self.bidirectional = flag("bidirectional", bidirectional)
        self.projection_size = None if projection_size is None else whole("projection_size", projection_size, low=1)
        if self.projection_size and mode != "lstm":
            raise ValueError(f"projection_size={projection_size!r}: only an LSTM has a projection, so it must be None")
        given = {
            "i2h_weight": i2h_weight_initializer,
            "h2h_weight": h2h_weight_initializer,
            "i2h_bias": i2h_bias_initializer,
            "h2h_bias": h2h_bias_initializer,
            "h2r_weight": h2r_weight_initializer,
        }
        self._of = {part: None if init is None else _inner(f"{part}_initializer", init) for part, init in given.items()}
        super().__init__(
            mode=mode,
            num_layers=self.num_layers,
            state_size=self.state_size,
            bidirectional=bidirectional,
            projection_size=self.projection_size,
            **{f"{part}_initializer": None if init is None else init.dumps() for part, init in self._of.items()},
        )

    def _init_weight(self, name: InitDesc, arr: torch.Tensor) -> None:
        values = torch.zeros_like(arr, memory_format=torch.contiguous_format)
        if arr.dim() == 1:
            sizes = (self.num_layers, self.state_size, 2 if self.bidirectional else 1, self.projection_size)
            for piece, part in _vector_parts(name, values, self.mode, *sizes):
                self._fill(name, f"{piece.source}_{piece.kind}", part)
        else:
            self._fill(name, self._known(name), values)
        arr.copy_(values)

    def _init_bias(self, name: InitDesc, arr: torch.Tensor) -> None:
        self._fill(name, self._known(name), arr)

    def _known(self, name: InitDesc) -> str:
        part = _part_of(name)
        if part is None:
            raise ValueError(
                f"parameter {str(name)!r}: is none of a recurrent layer (weight_ih..., bias_hh... and so on), and RNNFused "
                "is for these: use it for that network only, by Mixed or by parameter.init"
            )
        kind, source = part.split("_")
        return f"{ {'ih': 'i2h', 'hh': 'h2h', 'hr': 'h2r'}[source] }_{kind}"

    def _fill(self, name: InitDesc, part: str, values: torch.Tensor) -> None:
        init = self._of[part]
        if init is None and part.endswith("bias"):
            init = Zero()
        elif init is None:
            init = name.global_init if name.global_init and not isinstance(name.global_init, RNNFused) else Uniform()
        init(InitDesc(f"{name}:{part}", None, name.global_init, role="weight", generator=name.generator), values)


class Load:
    """Takes values from a file or a dict, by name.

    Args:
        param: values by parameter name: a mapping to tensors or arrays, or the path of a file of safetensors, of NumPy
            (`.npz`) or of `torch.save` (`.pt`, `.pth`, `.bin`, `.ckpt`; read without running code). Prefixes "arg:" and
            "aux:" of MXNet's names are taken off.
        default_init: the initializer for parameters without a value; None means that there must be none.
        verbose: log a line at level INFO for each parameter.

    Raises:
        TypeError: an argument of a wrong type.
        ValueError: a file of another kind or damaged, a shape that differs from the parameter's, or a parameter without a
            value and no `default_init`. The message names it.
        FileNotFoundError: there is no such file.

    Source: MXNet 1.9.1, `Load`.

    >>> w, b = torch.zeros(2), torch.ones(2)
    >>> load = Load({"arg:fc_weight": [1.0, 2.0]}, default_init=Uniform())
    >>> load("fc_weight", w), load("fc_bias", b)
    (None, None)
    >>> w, b
    (tensor([1., 2.]), tensor([0., 0.]))
    """

    def __init__(
        self,
        param: str | os.PathLike[str] | Mapping[str, Any],
        default_init: str | Initializer | Mixed | None = None,
        verbose: bool = False,
    ) -> None:
        if isinstance(param, (str, os.PathLike)):
            param = _read(Path(param))
        if not isinstance(param, Mapping):
            raise TypeError(f"param must be a mapping from names to values, or a file's path, got {type(param).__name__}")
        self.param: dict[str, torch.Tensor] = {}
        for name, value in param.items():
            if not isinstance(name, str):
                raise TypeError(f"param: names must be strings, got {name!r} ({type(name).__name__})")
            try:
                self.param[re.sub("^(arg|aux):", "", name)] = torch.as_tensor(value).detach()
            except (TypeError, ValueError, RuntimeError):
                raise TypeError(f"param[{name!r}]: must be a tensor or an array, got {type(value).__name__}") from None
        self.default_init = None if default_init is None else create(default_init)
        self.verbose = flag("verbose", verbose)

    def __call__(self, name: str, arr: torch.Tensor) -> None:
        """Fill `arr` in place with the value of that name."""
        value = self.param.get(str(name))
        if value is None:
            if self.default_init is None:
                raise ValueError(
                    f"parameter {str(name)!r}: has no value in param.{did_you_mean(str(name), self.param)} Add it, or give "
                    "Load a default_init for parameters without a value"
                )
            self.default_init(name, arr)
        elif value.shape != arr.shape:
            raise ValueError(
                f"parameter {str(name)!r}: has shape {tuple(arr.shape)}, its value in param {tuple(value.shape)}: "
                "take the value out of param and give Load a default_init, or load it into a model of its shapes"
            )
        else:
            with torch.no_grad():
                arr.copy_(value)
        if self.verbose:
            logging.getLogger(__name__).info("%s %s", name, "initialized by default" if value is None else "loaded")

    def __repr__(self) -> str:
        return f"Load({len(self.param)} values, default_init={self.default_init!r})"


class Mixed:
    """Chooses an initializer by the parameter's name.

    The first pattern that fits the beginning of the name decides; the initializer chosen then goes by the name's ending, as
    always: a Constant chosen for a bias gives zeros. (For another bias, give the parameter an `init` of its own.)

    Args:
        patterns: regular expressions. They are held against the beginning of the name, so "bias" does not fit "fc1.bias",
            and ".*bias" does.
        initializers: as many initializers, or their names.

    Raises:
        TypeError: an argument of a wrong type.
        ValueError: as many patterns as initializers there are not; a pattern is no regular expression; no pattern fits.

    Source: MXNet 1.9.1, `Mixed`.

    >>> mixed = Mixed(["fc1", ".*"], ["zeros", Constant(3)])
    >>> w = torch.ones(2)
    >>> mixed("fc2.weight", w)
    >>> w
    tensor([3., 3.])
    """

    def __init__(self, patterns: Sequence[str], initializers: Sequence[str | Initializer | Mixed | Load]) -> None:
        for argument, values in (("patterns", patterns), ("initializers", initializers)):
            if not isinstance(values, (list, tuple)):
                raise TypeError(f"{argument}={values!r}: must be a list or tuple")
        if len(patterns) != len(initializers):
            raise ValueError(f"patterns and initializers must be as many, got {len(patterns)} and {len(initializers)}")
        self.map: list[tuple[re.Pattern[str], Any]] = []
        for i, (pattern, initializer) in enumerate(zip(patterns, initializers, strict=True)):
            if not isinstance(pattern, str):
                raise TypeError(f"patterns[{i}]={pattern!r}: must be a regular expression, a string")
            try:
                self.map.append((re.compile(pattern), create(initializer)))
            except re.error as error:
                raise ValueError(f"patterns[{i}]={pattern!r}: is no regular expression ({error})") from None

    def __call__(self, name: str, arr: torch.Tensor) -> None:
        """Fill `arr` in place, by the initializer for its name."""
        for pattern, initializer in self.map:
            if pattern.match(name):
                return initializer(name, arr)
        raise ValueError(
            f"parameter {str(name)!r}: none of the patterns {[pattern.pattern for pattern, _ in self.map]} fits the "
            "beginning of its name: add '.*' with an initializer as the last"
        )

    def __repr__(self) -> str:
        return f"Mixed({[pattern.pattern for pattern, _ in self.map]!r}, {[init for _, init in self.map]!r})"


_COUNT = "num_batches_tracked"
_RULES = {  # first ending that fits decides
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
_NORMS = (
    torch.nn.modules.batchnorm._NormBase,  # batch and instance norms
    torch.nn.LayerNorm,
    torch.nn.GroupNorm,
    torch.nn.RMSNorm,
)
_RECURRENT = (torch.nn.RNNBase, torch.nn.RNNCellBase)


class _Found(NamedTuple):
    """A tensor of a module, and what is to be done with it."""

    name: str
    tensor: torch.Tensor
    role: str | None
    own: Any = None  # its own initializer
    padding_idx: int | None = None


class _Piece(NamedTuple):
    """A part of the vector of a fused recurrent network."""

    place: str  # "l0", "r0", "l1", ...: direction and layer
    source: str  # "i2h", "h2h" or "h2r"
    kind: str  # "weight" or "bias"
    shape: tuple[int, ...]


def _rule_for(name: str) -> str:
    return next((rule for ending, rule in _RULES.items() if name.endswith(ending)), "_init_default")


def _described(desc: str, initializer: Initializer) -> InitDesc:
    if not isinstance(desc, InitDesc):
        return InitDesc(desc, global_init=initializer)
    if desc.global_init is None:
        desc.global_init = initializer
    return desc


def _inner(argument: str, init: Any) -> Initializer:
    """An initializer of pieces, which has to be saved with what it belongs to."""
    made = create(init)
    if not isinstance(made, Initializer):
        raise TypeError(f"{argument}={init!r}: must be an Initializer or its name, not {type(made).__name__}")
    return made


def _default_of(chosen: Any) -> Initializer | None:
    """What fills a whole model: of Mixed and Load the initializers that they choose say so themselves."""
    return chosen if isinstance(chosen, Initializer) else None


def _size(arr: torch.Tensor) -> float:
    return float(arr.double().norm() / math.sqrt(max(arr.numel(), 1)))


_Shape: TypeAlias = Sequence[int]


def _drawn(name: InitDesc, arr: torch.Tensor, shape: _Shape, kind: str, scale: float) -> torch.Tensor:
    """Random numbers for `arr`: uniform within ±scale, or normal with that standard deviation."""
    generator = name.generator
    values = torch.empty(
        tuple(shape),
        dtype=torch.float64 if arr.dtype == torch.float64 else torch.float32,
        device=arr.device if generator is None else generator.device,
    )
    if kind == "uniform":
        return values.uniform_(-scale, scale, generator=generator)
    return values.normal_(0, scale, generator=generator)


def _vector_parts(
    name: str, vector: torch.Tensor, mode: str, layers: int, hidden: int, directions: int, projection: int | None
) -> Iterator[tuple[_Piece, torch.Tensor]]:
    """The pieces of a fused network's vector, which are views of it."""
    rows = len(_GATES[mode]) * hidden
    out = projection or hidden

    def pieces(inputs: int) -> list[_Piece]:
        places = [(layer, direction) for layer in range(layers) for direction in "lr"[:directions]]
        weights, biases = [], []
        for layer, direction in places:
            place = f"{direction}{layer}"
            weights.append(_Piece(place, "i2h", "weight", (rows, inputs if layer == 0 else out * directions)))
            weights.append(_Piece(place, "h2h", "weight", (rows, out)))
            if projection:
                weights.append(_Piece(place, "h2r", "weight", (projection, hidden)))
            biases += [_Piece(place, source, "bias", (rows,)) for source in ("i2h", "h2h")]
        return weights + biases

    fixed = sum(math.prod(piece.shape) for piece in pieces(0))
    inputs, rest = divmod(vector.numel() - fixed, rows * directions)
    if rest or inputs < 1:
        raise ValueError(
            f"parameter {str(name)!r}: has {vector.numel()} elements, which no network with mode={mode!r}, {layers} layers "
            f"of {hidden}, {directions} directions and projection {projection} has ({fixed} plus a multiple of "
            f"{rows * directions}): make the initializer with the network's sizes"
        )
    found = pieces(inputs)
    parts = vector.split([math.prod(piece.shape) for piece in found])
    return ((piece, part.view(piece.shape)) for piece, part in zip(found, parts, strict=True))


def _part_of(name: str) -> str | None:
    """Which parameter of torch's recurrent layers this is: "weight_ih", "bias_hh", ..., without layer and direction."""
    fit = re.match(r"(weight_(ih|hh|hr)|bias_(ih|hh))(_l\d+)?(_reverse)?$", name.rsplit(".", 1)[-1])
    return fit and fit[1]


def _read(path: Path) -> Mapping[str, Any]:
    kind = path.suffix.lower()
    if kind not in (".safetensors", ".npz", ".pt", ".pth", ".bin", ".ckpt"):
        raise ValueError(
            f"param={str(path)!r}: must end in .safetensors, .npz, .pt, .pth, .bin or .ckpt; otherwise give a dict"
        )
    if not path.is_file():
        raise FileNotFoundError(f"param={str(path)!r}: there is no such file")
    try:
        if kind == ".safetensors":
            return safetensors.torch.load_file(path)
        if kind == ".npz":
            with np.load(path, allow_pickle=False) as stored:
                return dict(stored)
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # each of the libraries has its own
        raise ValueError(f"param={str(path)!r}: cannot be read ({error})") from error


def _found(module: torch.nn.Module) -> Iterator[_Found]:
    """The tensors of a module that `initialize` fills, each once."""
    seen = set()
    for prefix, child in module.named_modules():
        for leaf, tensor in child.named_parameters(recurse=False):
            if id(tensor) not in seen:
                seen.add(id(tensor))
                own = vars(tensor).get("init")
                if own is None and leaf == "weight" and isinstance(child, torch.nn.PReLU):
                    own = Constant(0.25)
                padding_idx = getattr(child, "padding_idx", None) if _is_embedding(child) and leaf == "weight" else None
                yield _Found(_joined(prefix, leaf), tensor, _role(child, leaf, tensor), own, padding_idx)
        if isinstance(child, _NORMS):
            for leaf, tensor in child.named_buffers(recurse=False):
                if leaf in ("running_mean", "running_var", _COUNT) and id(tensor) not in seen:
                    seen.add(id(tensor))
                    yield _Found(_joined(prefix, leaf), tensor, leaf)


def _joined(prefix: str, leaf: str) -> str:
    return f"{prefix}.{leaf}" if prefix else leaf


def _is_embedding(child: torch.nn.Module) -> bool:
    return isinstance(child, (torch.nn.Embedding, torch.nn.EmbeddingBag))


def _role(child: torch.nn.Module, leaf: str, tensor: torch.Tensor) -> str | None:
    """The ending that says what a parameter is, where its name does not."""
    if isinstance(child, _NORMS) or "norm" in type(child).__name__.lower():
        if leaf == "weight" and (isinstance(child, _NORMS) or _is_lazy(tensor) or tensor.dim() <= 1):
            return "gamma"
        if leaf == "bias":
            return "beta"
    if isinstance(child, _RECURRENT):
        return leaf.split("_")[0]
    if isinstance(child, torch.nn.MultiheadAttention) and leaf in ("bias_k", "bias_v"):
        return "bias"
    return None


def _is_lazy(tensor: torch.Tensor) -> bool:
    return torch.nn.parameter.is_lazy(tensor)


def _check_tensors(found: Sequence[_Found]) -> None:
    lazy = [repr(entry.name) for entry in found if _is_lazy(entry.tensor)]
    if lazy:
        few = ", ".join(lazy[:8]) + (f" and {len(lazy) - 8} more" if len(lazy) > 8 else "")
        raise ValueError(f"parameters without a shape yet: {few}: run the model once on an example before initialize")
    for name, tensor, role, *_ in found:
        if tensor.is_meta:
            raise ValueError(
                f"parameter {name!r}: is on the meta device, so has no memory: call module.to_empty(device=...) first"
            )
        if tensor.is_inference():
            raise ValueError(
                f"parameter {name!r}: was made in inference mode, and cannot be written to: make the module outside"
            )
        if role != _COUNT and not tensor.is_floating_point():
            raise TypeError(
                f"parameter {name!r}: is {tensor.dtype}, but initializers fill floating-point parameters: initialize the "
                "submodules that have these"
            )
