"""Compressors: how gradients are encoded as messages, and the compressors by name."""

from __future__ import annotations

import abc
import inspect
from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

import torch

from ..registry import Registry
from ..validation import boolean, choice, did_you_mean

option_name = "compression_params[{!r}]".format
_OTHER_NAMES = {
    "float16": "fp16", "half": "fp16", "bfloat16": "bf16", "8bit": "int8", "4bit": "int4", "signsgd": "sign",
    "top_k": "topk", "top-k": "topk", "random_k": "randomk", "random-k": "randomk", "power_sgd": "powersgd",
}  # fmt: skip

_Class = TypeVar("_Class", bound="type[Compressor]")


class Compressor(abc.ABC):
    """Encodes values as messages. A subclass marked with `register_compressor` is known by its `type`.

    A subclass defines `encode` and `decode`. The caller does the error feedback: it adds what a message leaves out, the
    residual, to the next values. The other entries of `compression_params` are arguments of the subclass's `__init__`.

    Attributes:
        registry: the registered classes by type.
        type: its name in `compression_params`; by default that of the class, in lower case.
        error_feedback: whether what a message leaves out is added to the next values; default True.
        keeps_nonfinite: whether an infinite or NaN value makes the sum non-finite on all ranks in the same step; default
            True. A loss scaler, which notices overflows by that, is refused with other compressors.
        exchange: "all_to_all" if ranks may encode a chunk each, and the sums of chunks again; "all_gather" if a
            message must encode the whole bucket; then all ranks get the messages of all ranks.
        reduce_algorithm: a subclass of `compression.reduce.ReduceAlgorithm` by which buckets are summed over ranks; None for
            the one that works with any `encode` and `decode`.

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
        """Class decorator: make a compressor known by its `type`.

        Another class of that type is replaced, with a warning.
        """
        Compressor.registry.check(klass)
        if "type" not in vars(klass):
            klass.type = klass.__name__.lower()
        return Compressor.registry.register(klass, klass.type, stacklevel=3)

    @abc.abstractmethod
    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """A message, one tensor of any type whose size follows from that of the values, float32 [n]."""

    @abc.abstractmethod
    def decode(self, message: torch.Tensor, n: int) -> torch.Tensor:
        """The n values, float32 [n], of a message of `encode`."""

    def __repr__(self) -> str:
        settings = {name: value for name, value in vars(self).items() if not name.startswith("_")}
        return f"<compressor {self.type!r}{''.join(f', {name}={value!r}' for name, value in settings.items())}>"

    def encode_with_feedback(self, values: torch.Tensor, residual: torch.Tensor | None, step: int) -> torch.Tensor:
        """A message of the values plus the residual; the residual is then replaced by what this message leaves out.

        Args:
            values: float32 [n].
            residual: float32 [n]; None for no error feedback.
            step: how many messages there have been before.
        """
        x = values if residual is None else values + residual
        message = self.encode_step(x, step)
        if residual is not None:
            keep_residual(x, self.decode_step(message, x.numel(), step), residual)
        return message

    def encode_step(self, values: torch.Tensor, step: int) -> torch.Tensor:
        """`encode`, for compressors whose messages depend on the number of the step."""
        return self.encode(values)

    def decode_step(self, message: torch.Tensor, n: int, step: int) -> torch.Tensor:
        """`decode` of a message of `encode_step`."""
        return self.decode(message, n)


Compressor.registry = Registry("compressor", Compressor, ignore_case=False, group="tristep.compressors")
register_compressor = Compressor.register


def registered_compressors() -> dict[str, type[Compressor]]:
    """The compressors by type."""
    return Compressor.registry.everything()


def create_compressor(compression_params: Mapping[str, Any]) -> Compressor:
    """The compressor that `compression_params` asks for.

    Args:
        compression_params: "type", and the options of that type:
            "2bit": `threshold`, above 0, default 0.5. "1bit": `threshold`, default 0.5.
            "fp16", "bf16", "int8", "int4", "sign": nothing.
            "topk": `ratio`, above 0 and at most 1, default 0.01: the fraction of values that is sent, the
                largest in magnitude.
            "randomk": `ratio`; `seed`, default 0, of the random indices, the same on all ranks.
            "powersgd": `rank`, default 4, of the matrices that are sent; `seed`, default 0, of the first ones.
            All: `error_feedback`, default True.

    Raises:
        TypeError, ValueError: they do not fit. (MXNet takes "2bit" and "1bit", and ignores what it does not know.)
    """
    if not isinstance(compression_params, Mapping):
        raise TypeError(f"compression_params must be a dict, got {type(compression_params).__name__}")
    registry = Compressor.registry
    if "type" not in compression_params:
        raise ValueError(f"compression_params needs 'type', one of {', '.join(map(repr, registry.names()))}")
    kind = compression_params["type"]
    klass = registry.find(kind) if isinstance(kind, str) else None
    if klass is None:
        klass = registry[choice(option_name("type"), kind, registry.names(), other_names=_OTHER_NAMES)]
    known = ["type", "error_feedback", *inspect.signature(klass).parameters]
    for key in compression_params:
        if key not in known:
            hint = did_you_mean(key, known) if isinstance(key, str) else ""
            allowed = ", ".join(map(repr, known))
            raise ValueError(f"compression_params has the key {key!r}: {klass.type!r} takes {allowed}.{hint}")
    feedback = boolean(option_name("error_feedback"), compression_params.get("error_feedback", True))
    made = klass(**{key: value for key, value in compression_params.items() if key not in ("type", "error_feedback")})
    made.error_feedback = feedback
    return made


def check_float32(key: Any, gradient: torch.Tensor) -> None:
    """Refuse what is not dense float32: sums by key are compressed as MXNet does it."""
    if gradient.layout != torch.strided or gradient.dtype != torch.float32:
        kind = gradient.dtype if gradient.layout == torch.strided else gradient.layout
        raise TypeError(f"the gradient of key {key!r} is {kind}: compression takes dense torch.float32")


def keep_residual(x: torch.Tensor, sent: torch.Tensor, residual: torch.Tensor) -> None:
    """Store what a message leaves out in the residual; 0 where that is non-finite, so that an overflow does not persist."""
    torch.sub(x, sent, out=residual).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
