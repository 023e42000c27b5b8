"""outside_dynamo: a decorator for methods that `torch.compile` must not trace."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")


def outside_dynamo(method: Callable[P, T]) -> Callable[P, T]:
    """Decorate a method so that `torch.compile` breaks its graph there and runs it eagerly, as with torch's optimizers."""

    @wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if torch.compiler.is_compiling():  # torch.compiler.disable imports the compiler, so only then
            return torch.compiler.disable(method)(*args, **kwargs)
        return method(*args, **kwargs)

    return call
