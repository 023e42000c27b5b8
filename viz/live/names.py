"""The names of a notebook under which a loop's steps find what they train, and whether these still mean the same."""

from __future__ import annotations

import dis
import functools
import inspect
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from ...trainer import Trainer
from ...trainer.loops.snapshot import parameters_of
from .learning_rates import weakly

__all__ = ["TrainedNames"]

READS, WRITES = ("LOAD_GLOBAL", "LOAD_NAME"), ("STORE_GLOBAL", "STORE_NAME")


class TrainedNames:
    """The global names that code reads, and that are bound to a trainer, an optimizer or a network with its parameters.

    Names that the code binds itself are left out. There are only weak references to what they are bound to.

    Args:
        code: the code of the steps; None for none. Functions of the same namespace that it names are looked into, too.
        namespace: its global names.
        trainer: the trainer or optimizer that the loop was given; None if it was given none.
    """

    def __init__(self, code: types.CodeType | None, namespace: Mapping[str, Any], trainer: Any = None) -> None:
        self._namespace = namespace
        codes = [] if code is None else _codes(code, namespace)
        instructions = [(each.opname, each.argval) for part in codes for each in dis.get_instructions(part)]
        read = {name for opname, name in instructions if opname in READS}
        read -= {name for opname, name in instructions if opname in WRITES}
        bound = {name: namespace[name] for name in sorted(read) if name in namespace}
        trainers = {name: each for name, each in bound.items() if isinstance(each, (Trainer, torch.optim.Optimizer))}
        steppers = [*trainers.values(), *([] if trainer is None else [trainer])]
        trained = {id(parameter) for each in steppers for parameter in parameters_of(each)}
        nets = {name: each for name, each in bound.items() if isinstance(each, torch.nn.Module)}
        nets = {name: net for name, net in nets.items() if any(id(each) in trained for each in net.parameters())}
        self._living = {name: weakly(each) for name, each in (trainers | nets).items()}

    @classmethod
    def of(cls, steps: Any, trainer: Any) -> TrainedNames:
        """Return the names in a function, method, partial or generator; none in what else may be stepped."""
        while isinstance(steps, functools.partial):
            steps = steps.func
        if isinstance(steps, types.GeneratorType) and steps.gi_frame is not None:
            return cls(steps.gi_code, steps.gi_frame.f_globals, trainer)
        for each in (steps, inspect.getattr_static(steps, "__call__", None)):
            function = getattr(each, "__func__", each)
            if isinstance(function, types.FunctionType):
                return cls(function.__code__, function.__globals__, trainer)
        return cls(None, {})

    def changed(self) -> str:
        """Say which name is bound to something else now; "" if none is."""
        for name, living in self._living.items():
            if living() is None or self._namespace.get(name) is not living():
                return f"{name!r} is no longer what this loop was given, and it trains nothing else: make a new loop"
        return ""


def _codes(code: types.CodeType, namespace: Mapping[str, Any]) -> Iterator[types.CodeType]:
    """Yield code, the code of functions within it, and that of functions of the namespace that it names."""
    waiting, seen = [code], set[types.CodeType]()
    while waiting:
        now = waiting.pop()
        if now in seen:
            continue
        seen.add(now)
        yield now
        named: Iterable[Any] = (namespace.get(name) for name in now.co_names)
        functions = (each for each in named if isinstance(each, types.FunctionType) and each.__globals__ is namespace)
        waiting += [function.__code__ for function in functions]
        waiting += [each for each in now.co_consts if isinstance(each, types.CodeType)]
