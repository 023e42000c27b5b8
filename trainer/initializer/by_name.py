"""Load and Mixed, initializers that decide by a parameter's whole name; and `create`, which makes any initializer."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ...kernels.messages import did_you_mean
from ..validation import boolean, instance
from .base import Initializer, as_initializer, needs


def create(initializer: Any, **kwargs: Any) -> Any:
    """Construct an initializer from its name or from JSON.

    Args:
        initializer: a registered name in any case, such as "xavier" or "Zeros"; the JSON that `dumps` returns,
            `["xavier", {"magnitude": 2}]`, or a JSON object, `{"initializer": "xavier", "magnitude": 2}`. An instance is
            returned unchanged.
        **kwargs: the arguments of the class; allowed with a plain name only.

    Raises:
        TypeError: `initializer` is neither a string nor an instance, the class has no argument of that name, or arguments
            come with an instance or JSON.
        ValueError: no initializer is registered under that name, an argument is out of range, or the JSON is damaged.

    >>> create("msraprelu", slope=0)
    MSRAPrelu(factor_type='avg', slope=0)
    """
    made = initializer if isinstance(initializer, Mixed | Load) else as_initializer("initializer", initializer, kwargs)
    if kwargs and not isinstance(initializer, str):
        raise TypeError(f"arguments with an instance: {', '.join(kwargs)}; give them to {type(made).__name__}")
    return made


class Load:
    """Initializer that copies each parameter's value from a file or dict, by the parameter's name.

    Args:
        param: mapping from parameter names to tensors or arrays; or the path of a file written by safetensors
            (`.safetensors`), NumPy (`.npz`) or `torch.save` (`.pt`, `.pth`, `.bin`, `.ckpt`; read without running code).
            The prefixes "arg:" and "aux:" of MXNet's names are removed.
        default_init: the initializer of parameters that have no value in `param`; None means that they raise ValueError.
        verbose: whether to log a line at level INFO for each parameter.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: the file has another extension or is damaged; when called, the shapes of value and parameter differ, or a
            parameter has no value and there is no `default_init`.
        FileNotFoundError: the file does not exist.

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
        instance("param", param, Mapping, "a mapping from names to values, or a file's path")
        self.param: dict[str, torch.Tensor] = {}
        for name, value in param.items():
            instance("param: name", name, str, "a string", shown=True)
            try:
                self.param[re.sub("^(arg|aux):", "", name)] = torch.as_tensor(value).detach()
            except (TypeError, ValueError, RuntimeError):
                raise TypeError(f"param[{name!r}]: must be a tensor or an array, got {type(value).__name__}") from None
        self.default_init = None if default_init is None else create(default_init)
        self.verbose = boolean("verbose", verbose)

    def __call__(self, name: str, arr: torch.Tensor) -> None:
        """Fill the tensor `arr` in place with the value that `param` has under `name`, or by `default_init`."""
        value = self.param.get(str(name))
        if value is None:
            if self.default_init is None:
                raise ValueError(
                    f"parameter {str(name)!r}: has no value in param.{did_you_mean(str(name), self.param)} Add it, or give "
                    "Load a default_init for parameters without a value"
                )
            self.default_init(name, arr)
        else:
            what = "take the value out of param and give Load a default_init, or load it into a model of its shapes"
            needs(value.shape == arr.shape, name, arr, f"its value in param {tuple(value.shape)}: {what}")
            with torch.no_grad():
                arr.copy_(value)
        if self.verbose:
            logging.getLogger(__name__).info("%s %s", name, "initialized by default" if value is None else "loaded")

    def __repr__(self) -> str:
        return f"Load({len(self.param)} values, default_init={self.default_init!r})"


class Mixed:
    """Initializer that delegates to one of several initializers, chosen by the parameter's name.

    The first pattern that matches the beginning of the name decides. The chosen initializer then applies its rule for the
    name's ending, so even a Constant fills a bias with zeros. To fill a bias otherwise, set the parameter's attribute
    `init`.

    Args:
        patterns: list or tuple of regular expressions, matched from the beginning of the name: "bias" does not match
            "fc1.bias", ".*bias" does.
        initializers: list or tuple of initializers or their names, one for each pattern.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: the arguments differ in length, or a pattern is not a regular expression; when called, no pattern matches
            the name.

    Source: MXNet 1.9.1, `Mixed`.

    >>> mixed = Mixed(["fc1", ".*"], ["zeros", Constant(3)])
    >>> w = torch.ones(2)
    >>> mixed("fc2.weight", w)
    >>> w
    tensor([3., 3.])
    """

    def __init__(self, patterns: Sequence[str], initializers: Sequence[str | Initializer | Mixed | Load]) -> None:
        for argument, values in (("patterns", patterns), ("initializers", initializers)):
            instance(argument, values, (list, tuple), "a list or tuple", shown=True)
        if len(patterns) != len(initializers):
            raise ValueError(
                f"patterns and initializers must have equal lengths, got {len(patterns)} and {len(initializers)}"
            )
        self.map: list[tuple[re.Pattern[str], Any]] = []
        for i, (pattern, initializer) in enumerate(zip(patterns, initializers, strict=True)):
            instance(f"patterns[{i}]", pattern, str, "a regular expression, a string", shown=True)
            try:
                self.map.append((re.compile(pattern), create(initializer)))
            except re.error as error:
                raise ValueError(f"patterns[{i}]={pattern!r}: is not a regular expression ({error})") from None

    def __call__(self, name: str, arr: torch.Tensor) -> None:
        """Fill the tensor `arr` in place by the initializer of the first pattern that matches `name`."""
        for pattern, initializer in self.map:
            if pattern.match(name):
                return initializer(name, arr)
        raise ValueError(
            f"parameter {str(name)!r}: none of the patterns {[pattern.pattern for pattern, _ in self.map]} matches the "
            "beginning of its name: add '.*' with an initializer as the last"
        )

    def __repr__(self) -> str:
        return f"Mixed({[pattern.pattern for pattern, _ in self.map]!r}, {[init for _, init in self.map]!r})"


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
            from safetensors.torch import load_file  # here, because nothing else needs it

            return load_file(path)
        if kind == ".npz":
            with np.load(path, allow_pickle=False) as stored:
                return dict(stored)
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # each of the libraries has its own
        raise ValueError(f"param={str(path)!r}: cannot be read ({error})") from error
