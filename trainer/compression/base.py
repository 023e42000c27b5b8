"""The base class of compressors, which encode gradients as messages, and their registry."""

from __future__ import annotations

import abc
import inspect
from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

import torch

from ...kernels.messages import listed, there_are
from ..registry import Registry
from ..validation import boolean, choice, instance

option_name = "compression_params[{!r}]".format
_OTHER_NAMES = {
    "float16": "fp16", "half": "fp16", "bfloat16": "bf16", "8bit": "int8", "4bit": "int4", "signsgd": "sign",
    "top_k": "topk", "top-k": "topk",
}  # fmt: skip

_Class = TypeVar("_Class", bound="type[Compressor]")


class Compressor(abc.ABC):
    """Base class of gradient compressors, which encode values as messages of fewer bytes.

    A subclass defines `encode` and `decode`; marked with `register_compressor` it is used for
    `compression_params={"type": ...}`, whose other entries are the arguments of its `__init__`. The caller does the error
    feedback: it adds the part of the values that a message leaves out, the residual, to the next values. Residuals are saved
    with a trainer's states, attributes of a compressor are not.

    Attributes:
        registry: the registered classes by type.
        type: the name in `compression_params`; default the class's name in lower case.
        error_feedback: whether the residual is added to the next values; default True.
        keeps_nonfinite: whether an infinite or NaN value makes the sum non-finite on all ranks in the same step; default
            True. A loss scaler needs that to notice overflows, so it cannot be used with other compressors.
        exchange: "all_to_all" if each rank may encode one chunk of the bucket, and then the sum of that chunk; "all_gather"
            if a message must encode the whole bucket, so that each rank gets the messages of all ranks.
        reduce_algorithm: a subclass of `compression.reduce.ReduceAlgorithm` that sums buckets over the ranks; None for the
            one that works with any `encode` and `decode`.

    Example:
        >>> import torch
        >>> from tristep import kvstore
        >>> @kvstore.register_compressor
        ... class Halved(kvstore.Compressor):
        ...     def encode(self, values):
        ...         return values.to(torch.float16)
        ...     def decode(self, message, n):
        ...         return message.to(torch.float32)
        >>> kvstore.create_compressor({"type": "halved"}).encode(torch.ones(3))
        tensor([1., 1., 1.], dtype=torch.float16)
    """

    registry: ClassVar[Registry[type[Compressor]]]
    type = ""
    error_feedback = True
    keeps_nonfinite = True
    exchange = "all_to_all"
    reduce_algorithm: ClassVar[Any] = None

    @staticmethod
    def register(klass: _Class) -> _Class:
        """Register a compressor class under its `type`; a class decorator.

        A class that is registered under the same type is replaced, with a warning.
        """
        Compressor.registry.check(klass)
        if "type" not in vars(klass):
            klass.type = klass.__name__.lower()
        return Compressor.registry.register(klass, klass.type, stacklevel=3)

    @abc.abstractmethod
    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """Return a message that encodes the values.

        Args:
            values: float32 [n], on the device of the gradients, not to be changed: a chunk of a bucket, in which the
                gradients of many parameters follow each other.

        Returns:
            One tensor of any shape and dtype, which depend on n only. To send two, such as codes and scales, view both as
            bytes and concatenate them.
        """

    @abc.abstractmethod
    def decode(self, message: torch.Tensor, n: int) -> torch.Tensor:
        """Return the values, float32 [n], that a message of `encode` stands for."""

    def __repr__(self) -> str:
        settings = {name: value for name, value in vars(self).items() if not name.startswith("_")}
        return f"<compressor {self.type!r}{''.join(f', {name}={value!r}' for name, value in settings.items())}>"

    def encode_with_feedback(self, values: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        """Return a message of the values plus the residual, and set the residual to what the message leaves out.

        Args:
            values: float32 [n].
            residual: float32 [n], changed in place; None for no error feedback.
        """
        x = values if residual is None else values + residual
        message = self.encode(x)
        if residual is not None:
            keep_residual(x, self.decode(message, x.numel()), residual)
        return message


Compressor.registry = Registry(
    "compressor",
    Compressor,
    hint="A class of your own needs @tristep.kvstore.register_compressor",
    ignore_case=False,
    contrib="compressors",
)
register_compressor = Compressor.register


def registered_compressors() -> dict[str, type[Compressor]]:
    """Return all compressor classes by type; those of `tristep.contrib` are imported."""
    return Compressor.registry.everything()


def create_compressor(compression_params: Mapping[str, Any]) -> Compressor:
    """Return a new compressor of the type and with the options in `compression_params`.

    Args:
        compression_params: a dict of "type" and the options of that type:
            "2bit": `threshold`, > 0, default 0.5. "1bit": `threshold`, default 0.5.
            "fp16", "bf16", "int8", "int4", "sign": no options.
            "topk": `ratio`, in (0, 1], default 0.01, the fraction of values that is sent: the largest in magnitude.
            All types: `error_feedback`, default True.

    Raises:
        TypeError: `compression_params` is no dict, or an option has a wrong type.
        ValueError: the type or an option is unknown or out of range. (MXNet ignores unknown options.)
    """
    instance("compression_params", compression_params, Mapping, "a dict")
    registry = Compressor.registry
    if "type" not in compression_params:
        raise ValueError(f"compression_params needs 'type', one of {listed(map(repr, registry.names()))}")
    kind = compression_params["type"]
    klass = registry.find(kind) if isinstance(kind, str) else None
    if klass is None:
        names = registry.names()
        klass = registry[choice(option_name("type"), kind, names, other_names=_OTHER_NAMES, more=registry.hint)]
    parameters = inspect.signature(klass).parameters.values()
    options = ["type", "error_feedback", *(each.name for each in parameters if each.kind is not each.VAR_KEYWORD)]
    for key in compression_params:
        if key not in options:
            raise ValueError(f"compression_params has the key {key!r} for {klass.type!r}.{there_are(key, options)}")
    feedback = boolean(option_name("error_feedback"), compression_params.get("error_feedback", True))
    made = klass(**{key: value for key, value in compression_params.items() if key not in ("type", "error_feedback")})
    made.error_feedback = feedback
    return made


def check_float32(key: Any, gradient: torch.Tensor) -> None:
    """Raise TypeError unless the gradient is dense float32, which is all that stores compress, as in MXNet."""
    if gradient.layout != torch.strided or gradient.dtype != torch.float32:
        kind = gradient.dtype if gradient.layout == torch.strided else gradient.layout
        raise TypeError(f"the gradient of key {key!r} is {kind}: compression takes dense torch.float32")


def keep_residual(x: torch.Tensor, sent: torch.Tensor, residual: torch.Tensor) -> None:
    """Set the residual to `x - sent`, and to 0 where that is not finite, so that an overflow does not persist."""
    torch.sub(x, sent, out=residual).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
