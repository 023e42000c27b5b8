"""The language of update rules: `rule`, `jit` and the words of `tl`. Imports neither triton nor numba.

A rule is a few lines of arithmetic on values. What the values are is the engine's affair: blocks of a GPU
program (triton), numbers in a compiled loop (numba) or whole tensors (torch). So the same text must be
given another `tl` for each engine; that is all that `Function.bind` does. The `tl` of this file is the
torch one, complete in itself, which also makes every rule runnable where triton and numba are missing.
"""

from __future__ import annotations

import ast
import builtins
import difflib
import hashlib
import importlib.util
import inspect
import os
import sys
import textwrap
import types
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch

from . import random

__all__ = [
    "Function",
    "Measure",
    "Reduction",
    "Rule",
    "TensorRule",
    "has_numba",
    "has_triton",
    "jit",
    "measure",
    "reduction",
    "rule",
    "tensor_rule",
    "tl",
]


def rule(
    fn: Callable[..., Any] | None = None,
    *,
    sums: Reduction | None = None,
    exact: Sequence[str] = (),
    unsigned: Sequence[str] = (),
) -> Any:
    """Make an update rule of a function `(w, g, state, hyper) -> (new_w, new_state)`.

    `w` is the weight, `g` the gradient, already multiplied by `rescale_grad`, both in the arithmetic's type
    (float32, or float64 for float64 weights). The function's first lines unpack `state` and `hyper`; the names
    used there become the names of the state tensors and of the hyper-parameters. A rule without state returns
    `state` as it came. The body is assignments and, last, one `return`. It may use `+ - * /`, comparisons, `& | ~` on
    what these give, the functions of `tl`, and other functions marked with `jit`; for `if` there is `tl.where`.

    Args:
        fn: the function. It may have two more arguments, known by their names: `sums`, what the reduction gave for
            this tensor, and `index`, the element's number in its tensor, which random numbers are drawn by.
        sums: the reduction that runs before the rule, for rules that need norms: `@rule(sums=norms)`.
        exact: names of states that are never stored in fewer bits: those that are weights, or sums over all steps, to which
            a single step adds too little, or that nearly cancel each other.
        unsigned: names of states that are never negative, as averages of squares are: 8 bits can tell more of them apart.

    Raises:
        TypeError: the function is not of that form or uses a name that no engine would know.

    Example:
        >>> import tristep
        >>> from tristep.kernels import tl
        >>> @tristep.rule
        ... def sign_descent(w, g, state, hyper):
        ...     (lr,) = hyper
        ...     return w - lr * tl.where(g > 0.0, 1.0, -1.0), state
        >>> sign_descent.state, sign_descent.hyper
        ((), ('lr',))
    """
    if fn is None:
        return lambda fn: Rule(fn, sums, exact, unsigned)
    return Rule(fn, sums, exact, unsigned)


def reduction(
    fn: Callable[..., Any] | None = None,
    *,
    sums: Reduction | None = None,
    over: str = "tensor",
    passes_on: bool = False,
    by: str = "sum",
) -> Any:
    """Make a reduction of a function `(w, g, state, hyper) -> (a, b, ...)`, whose values are summed over each tensor.

    It is written as a rule is, and changes nothing. It unpacks those states of the rule that it needs, and hyper-parameters,
    the rule's or others. A rule made with `@rule(sums=it)` gets the sums, in the arithmetic's type.

    Args:
        fn: the function. It may have the further arguments `sums` and `index`, as a rule, or `kept` in place of `sums`: the
            numbers that its `finish` keeps, as the step before has left them.
        sums: a reduction that runs before this one and gives its `sums`.
        over: "tensor" sums over each tensor, "all" over all tensors of the update together.
        passes_on: what comes after it gets its results and, after them, those of `sums`.
        by: "sum", or "max" for the largest of values that are 0 or more, NaN if one of them is that.

    A second function, `@it.finish`, may turn the sums into numbers that are kept from step to step, one of each for each
    tensor, zero at first: `(sums, kept, hyper) -> new_kept`. It unpacks `kept` into their names, and its result takes the
    place of the sums. A tensor without gradient keeps its numbers; those of sums over all tensors are the same for all, made
    with the hyper-parameters of the first that has a gradient.
    """
    if over not in ("tensor", "all"):
        raise ValueError(f"over={over!r}: must be 'tensor' or 'all'")
    if by not in ("sum", "max"):
        raise ValueError(f"by={by!r}: must be 'sum' or 'max'")
    if fn is None:
        return lambda fn: Reduction(fn, sums, over, passes_on, by)
    return Reduction(fn, sums, over, passes_on, by)


def tensor_rule(
    fn: Callable[..., Any] | None = None,
    *,
    shapes: Callable[[torch.Size], Mapping[str, Sequence[int]]] | None = None,
    batched: bool = False,
) -> Any:
    """Make an update rule of whole tensors, `(w, g, state, hyper) -> (new_w, new_state)`, in plain torch operations.

    For what a rule cannot say because elements need each other: sums over rows, products of matrices. It runs on every
    device as it is written, one tensor at a time if it is not `batched`. `w` and `g` come in the arithmetic's type, and
    nothing may be changed in place.

    Args:
        fn: the function. Its first lines unpack `state` and `hyper` as those of a rule do.
        shapes: from the weight's shape to those of the states, by name; states that it leaves out have the weight's.
        batched: `w`, `g` and the states come as stacks, [n, *shape], of tensors that have shape, type and hyper-parameters
            in common, one or more of them. Each is to be updated as if it were alone, and results are stacks too.

    Example:
        >>> from tristep.kernels import tensor_rule
        >>> @tensor_rule
        ... def normalized(w, g, state, hyper):
        ...     (lr,) = hyper
        ...     return w - lr * g / g.norm(), state
    """
    if fn is None:
        return lambda fn: TensorRule(fn, shapes, batched)
    return TensorRule(fn, shapes, batched)


def measure(**by: str) -> Callable[[Callable[..., Any]], Measure]:
    """Make a measure of a function `(w, g, new_w) -> (a, b, ...)`: what is to be known of each tensor's update.

    It is written as a rule is, and changes nothing. It is called for each element with the weight from before the update,
    the gradient, already multiplied by `rescale_grad`, and the new weight, all three as the rule has them, in the
    arithmetic's type: what a rule does to the gradient, such as clipping, and what storing does to the weight, comes after.

    Args:
        **by: the names of the values that the function returns, in order, each with "sum", for its sum over the tensor, or
            "max", for the largest of values that are 0 or more, NaN if one of them is that.

    Raises:
        TypeError: the function is not of that form or uses a name that no engine would know.
        ValueError: neither "sum" nor "max".

    Example:
        >>> from tristep.kernels import measure, tl
        >>> @measure(grown="sum", longest_step="max")
        ... def growth(w, g, new_w):
        ...     return tl.where(tl.abs(new_w) > tl.abs(w), 1.0, 0.0), tl.abs(new_w - w)
        >>> growth.names
        ('grown', 'longest_step')
    """
    return lambda fn: Measure(fn, by)


def jit(fn: Callable[..., Any]) -> Function:
    """Mark a function that rules may call. It is compiled into each rule that uses it, on every engine."""
    return Function(fn)


def has_triton() -> bool:
    """Whether triton can be imported here (there is none for macOS and Windows). Does not import it."""
    return importlib.util.find_spec("triton") is not None


def has_numba() -> bool:
    """Whether numba can be imported here. Does not import it."""
    return importlib.util.find_spec("numba") is not None


_forked: list[bool] = []
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: _forked.append(True))


def is_forked() -> bool:
    """Whether this process was forked from one that had imported this: it has none of the threads of that one."""
    return bool(_forked)


def _of_one(fn: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A word of one value, which may be a hyper-parameter: on torch tensors these are plain numbers."""

    def word(self: _TorchLanguage, x: Any) -> Any:
        return fn(self._tensor(x))

    return word


class _TorchLanguage:
    """What a rule may call, on torch tensors. Triton's names and meanings; each engine brings all of them.

    Args:
        dtype: the arithmetic's type, which numbers take where torch could not tell.
    """

    abs = _of_one(torch.abs)
    ceil = _of_one(torch.ceil)
    cos = _of_one(torch.cos)
    exp = _of_one(torch.exp)
    exp2 = _of_one(torch.exp2)
    floor = _of_one(torch.floor)
    log = _of_one(torch.log)
    log2 = _of_one(torch.log2)
    rsqrt = _of_one(torch.rsqrt)
    sigmoid = _of_one(torch.sigmoid)
    sin = _of_one(torch.sin)
    sqrt = _of_one(torch.sqrt)

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def normal(self, key0: float, key1: float, index: torch.Tensor) -> torch.Tensor:
        """A standard normal number for each index, always the same for the same keys (integers below 2^24)."""
        return random.normal(int(key0), int(key1), index).to(self._dtype)

    def where(self, condition: Any, a: Any, b: Any) -> Any:
        """`a` where the condition holds, else `b`, element by element."""
        condition = torch.as_tensor(condition, device=_device_of(condition))
        return torch.where(condition, self._tensor(a, condition.device), self._tensor(b, condition.device))

    def maximum(self, a: Any, b: Any) -> Any:
        """The larger of two values."""
        return torch.maximum(self._tensor(a, _device_of(a, b)), self._tensor(b, _device_of(a, b)))

    def minimum(self, a: Any, b: Any) -> Any:
        """The smaller of two values."""
        return torch.minimum(self._tensor(a, _device_of(a, b)), self._tensor(b, _device_of(a, b)))

    def _tensor(self, value: Any, device: torch.device | str = "cpu") -> torch.Tensor:
        if isinstance(value, torch.Tensor):
            return value
        return torch.full((), value, dtype=self._dtype, device=device)  # made on the device, which is not waited for


def _device_of(*values: Any) -> torch.device | str:
    """Where the tensors among these are; not torch's default device, which is for what its users make."""
    return next((value.device for value in values if isinstance(value, torch.Tensor)), "cpu")


_TORCH = {dtype: _TorchLanguage(dtype) for dtype in (torch.float32, torch.float64)}
tl: Any = _TORCH[torch.float32]
WORDS = tuple(name for name in vars(_TorchLanguage) if not name.startswith("_"))


class Function:
    """A function of values that can be bound to any engine's language. Immutable; made by `jit`.

    Attributes:
        name: the function's name.
        source: its text with that of every function it calls; two functions with equal sources compute the same.
    """

    def __init__(self, fn: Callable[..., Any]) -> None:
        if not isinstance(fn, types.FunctionType):
            raise TypeError(f"@jit and @rule take a plain Python function, got {type(fn).__name__}")
        self.fn = fn
        self.name = fn.__name__
        self.__module__ = fn.__module__  # where pickle is to look for it
        self._bound: dict[str, Any] = {}
        self._tree = _parse(fn)
        _check_form(self._tree)
        self._callees = _resolve(fn, self._tree)

    @cached_property
    def source(self) -> str:
        parts = [ast.unparse(self._tree)]
        parts += [callee.source for callee in self._callees.values()]
        return "\n\n".join(parts)

    def bind(self, language: str, namespace: Any, wrap: Callable[[types.FunctionType], Any]) -> Any:
        """This function with `tl` replaced by `namespace`, it and its callees wrapped by `wrap`; kept under `language`."""
        if language not in self._bound:
            names = dict(self.fn.__globals__)
            names.update({name: callee.bind(language, namespace, wrap) for name, callee in self._callees.items()})
            names.update({name: namespace for name, value in names.items() if _is_language(value)})
            copy = types.FunctionType(self.fn.__code__, names, self.name, self.fn.__defaults__)
            # Triton 3.5 tells functions in a kernel apart by module and name alone: another text needs another name.
            digest = hashlib.sha256(self.source.encode()).hexdigest()[:16]
            copy.__module__, copy.__qualname__ = self.fn.__module__, f"{self.fn.__qualname__}_{digest}"
            self._bound[language] = wrap(copy)
        return self._bound[language]

    def __call__(self, first: torch.Tensor | tuple[torch.Tensor, ...], *others: Any) -> Any:
        """Compute on torch tensors, at once, in the first one's type (float32 or float64)."""
        dtype = (first if isinstance(first, torch.Tensor) else first[0]).dtype
        if dtype not in _TORCH:
            raise TypeError(f"{self.name!r} computes in torch.float32 or torch.float64, its first argument is {dtype}")
        return self.bind(f"torch {dtype}", _TORCH[dtype], lambda fn: fn)(first, *others)

    def __repr__(self) -> str:
        return f"<{type(self).__name__.lower()} {self.name}>"

    def __reduce__(self) -> str | tuple[Any, ...]:
        return self.fn.__qualname__  # by reference, as functions are: pickle sees to it that this name leads here


class _OverTensors(Function):
    """A function of an element's weight, gradient, states and hyper-parameters.

    Attributes:
        state: names of the state tensors that it reads, in order.
        own_hyper: names of the hyper-parameters that it unpacks, in order.
        extras: which of "sums" (or, a reduction, "kept") and "index" it takes besides.
        sums: the reduction that runs before it, or None.
    """

    kind = "rule"
    _NUMBERS: tuple[str, ...] = ("sums",)
    _kept_and_sums = False  # whether it may take as `kept` what it keeps and, after that, what comes before it

    def __init__(self, fn: Callable[..., Any], sums: Reduction | None = None) -> None:
        super().__init__(fn)
        arguments = [argument.arg for argument in self._tree.args.args]
        further = [argument for argument in arguments[4:] if argument in self._NUMBERS][:1]
        if len(arguments) < 4 or arguments[4:] not in (further, [*further, "index"]):
            raise TypeError(
                f"{self.kind} {self.name!r} takes ({', '.join(arguments)}): it must have four arguments, "
                f"(w, g, state, hyper), and may have {' or '.join(self._NUMBERS)} and index after them, in this order"
            )
        if sums is not None and not isinstance(sums, Reduction):
            raise TypeError(f"sums of {self.name!r} must be made with @reduction, got {type(sums).__name__}")
        self.extras = tuple(arguments[4:])
        if ("sums" in self.extras) != (sums is not None) and not (self._kept_and_sums and "kept" in self.extras):
            raise TypeError(
                f"{self.kind} {self.name!r} must take `sums` as an argument and name its reduction, @{self.kind}(sums=...), "
                "or neither"
            )
        self.sums = sums
        self.state = _unpacked_names(self._tree, arguments[2], may_return=True)
        self.own_hyper = _unpacked_names(self._tree, arguments[3])
        if sums is not None:
            if "kept" in sums.extras and sums.finished is None:
                raise TypeError(f"reduction {sums.name!r} takes kept, but keeps nothing: give it a @{sums.name}.finish")
            sums._used_by = self.name
            names = _unpacked_names(self._tree, "sums")
            if names and len(names) != sums.n_results:
                raise TypeError(
                    f"{self.kind} {self.name!r} unpacks {len(names)} sums ({', '.join(names)}): "
                    f"reduction {sums.name!r} gives {sums.n_results}"
                )

    @property
    def reductions(self) -> tuple[Reduction, ...]:
        """Those that run before it, the first one first."""
        return () if self.sums is None else (*self.sums.reductions, self.sums)

    @property
    def numbers_from(self) -> int | None:
        """Which of the rule's reductions has the numbers of each tensor that it gets; None if it gets none."""
        return len(self.reductions) - 1 if self.sums is not None else None

    @property
    def n_numbers(self) -> int:
        """How many numbers of each tensor it gets."""
        return 0 if self.sums is None else self.sums.n_results


class Rule(_OverTensors):
    """An update rule, made by `rule`.

    Attributes:
        state: names of the state tensors, in order.
        kept: names of the numbers that are kept for each tensor, in order.
        hyper: names of the hyper-parameters: those that it unpacks, then those that only its reductions need.
        sums: the reduction that runs before it, or None.
        changed: names of the states that it returns otherwise than they came; engines do not write the others.
        used: names of the states that it reads or changes; the others may as well not be there.
        exact: names of the states that are never stored in fewer bits.
        unsigned: names of the states that are never negative.
        knows_total: whether its first reduction is the sum of squares of the gradient over all tensors, which it gets last.
        skips_nonfinite: whether nothing is to be kept either of a step for which that sum is not finite.
    """

    knows_total = skips_nonfinite = False

    def __init__(
        self,
        fn: Callable[..., Any],
        sums: Reduction | None = None,
        exact: Sequence[str] = (),
        unsigned: Sequence[str] = (),
    ) -> None:
        super().__init__(fn, sums)
        for argument, names in {"exact": exact, "unsigned": unsigned}.items():
            if unknown := [name for name in names if name not in self.state]:
                raise TypeError(f"{argument}={tuple(names)!r}: rule {self.name!r} has no state {unknown[0]!r}")
        self.exact, self.unsigned = tuple(exact), tuple(unsigned)
        argument = self._tree.args.args[2].arg
        _check_return(self._tree, argument, self.state)
        as_they_came = _returned_as_they_came(self._tree, argument, self.state)
        read = _names_read(self._tree, self.state)
        self.changed = tuple(name for name in self.state if name not in as_they_came)
        self.made_of_it: dict[Any, Any] = {}  # by compose.py and measures.py
        self.used = tuple(name for name in self.state if name in self.changed or name in read)
        self.kept = tuple(name for stage in self.reductions for name in stage.kept)
        needed = (name for stage in self.reductions for name in (*stage.own_hyper, *stage.finish_hyper))
        self.hyper = tuple(dict.fromkeys((*self.own_hyper, *needed)))
        for stage in self.reductions:
            if unknown := [name for name in stage.state if name not in self.state]:
                raise TypeError(
                    f"reduction {stage.name!r} unpacks {unknown[0]!r} from state: rule {self.name!r} has only "
                    f"{', '.join(self.state) or 'none'}"
                )
        if len(set(self.kept)) < len(self.kept) or set(self.kept) & set(self.state):
            raise TypeError(f"rule {self.name!r}: the names of its states and kept numbers must differ, all of them")

    @property
    def slots(self) -> tuple[str, ...]:
        """The names of all that is kept from step to step: the state tensors, then one number each."""
        return self.state + self.kept

    def shapes(self, shape: torch.Size) -> list[torch.Size]:
        """The shapes of all that is kept of a weight of this shape."""
        return [shape] * len(self.state) + [torch.Size()] * len(self.kept)

    def __repr__(self) -> str:
        return f"<rule {self.name}: state ({', '.join(self.slots)}), hyper ({', '.join(self.hyper)})>"


class TensorRule:
    """An update rule of whole tensors, made by `tensor_rule`.

    Attributes:
        name: the function's name.
        state: names of the state tensors, in order.
        hyper: names of the hyper-parameters, in order.
        batched: whether its function takes stacks of tensors.
    """

    kept: tuple[str, ...] = ()
    reductions: tuple[Reduction, ...] = ()
    skips_nonfinite = False

    def __init__(
        self,
        fn: Callable[..., Any],
        shapes: Callable[[torch.Size], Mapping[str, Sequence[int]]] | None = None,
        batched: bool = False,
    ) -> None:
        if not isinstance(fn, types.FunctionType):
            raise TypeError(f"@tensor_rule takes a plain Python function, got {type(fn).__name__}")
        self.fn = fn
        self.name = fn.__name__
        self.__doc__, self.__module__ = fn.__doc__, fn.__module__
        tree = _parse(fn)
        arguments = [argument.arg for argument in tree.args.args]
        if len(arguments) != 4:
            raise TypeError(f"tensor rule {self.name!r} takes ({', '.join(arguments)}): it must be (w, g, state, hyper)")
        self.state = _unpacked_names(tree, arguments[2], may_return=True)
        self.hyper = _unpacked_names(tree, arguments[3])
        self.batched = batched
        self._shapes = shapes
        self._how: tuple[Any, ...] | None = None

    @property
    def slots(self) -> tuple[str, ...]:
        """The names of all that is kept from step to step."""
        return self.state

    def shapes(self, shape: torch.Size) -> list[torch.Size]:
        """The states' shapes for a weight of this shape."""
        own = {} if self._shapes is None else self._shapes(shape)
        return [torch.Size(own.get(name, shape)) for name in self.state]

    def __call__(self, w: torch.Tensor, g: torch.Tensor, state: Any, hyper: Any) -> Any:
        """The new weight and states of one tensor."""
        if not self.batched:
            return self.fn(w, g, state, hyper)
        w, state = self.fn(w[None], g[None], tuple(old[None] for old in state), hyper)
        return w[0], tuple(new[0] for new in state)

    def with_shapes(
        self, shapes: Callable[[torch.Size], Mapping[str, Sequence[int]]], how: tuple[Callable[..., Any], tuple[Any, ...]]
    ) -> TensorRule:
        """The same rule with states of other shapes; `how`, a function and arguments, makes it again for pickle."""
        other = TensorRule(self.fn, shapes, self.batched)
        other._how = how
        return other

    def __repr__(self) -> str:
        return f"<tensor rule {self.name}: state ({', '.join(self.state)}), hyper ({', '.join(self.hyper)})>"

    def __reduce__(self) -> str | tuple[Any, ...]:
        return self._how or self.fn.__qualname__  # by reference, as functions are


class Reduction(_OverTensors):
    """Values summed over each tensor before a rule runs, made by `reduction`.

    Attributes:
        n_values: how many values it sums.
        over: "tensor" or "all".
        by: "sum" or "max".
        passes_on: whether the results of the reduction before it follow its own.
        finished: the function given to `finish`, or None.
        kept: names of the numbers that it keeps for each tensor.
    """

    kind = "reduction"
    _NUMBERS = ("sums", "kept")

    def __init__(
        self,
        fn: Callable[..., Any],
        sums: Reduction | None = None,
        over: str = "tensor",
        passes_on: bool = False,
        by: str = "sum",
    ) -> None:
        super().__init__(fn, sums)
        returned = self._tree.body[-1].value  # type: ignore[attr-defined]
        if not isinstance(returned, ast.Tuple) or not returned.elts:
            raise TypeError(f"reduction {self.name!r} must end by returning a tuple of values, such as `return (g * g,)`")
        self.n_values = len(returned.elts)
        self.over = over
        self.by = by
        self.passes_on = passes_on and sums is not None
        self.finished: Function | None = None
        self.kept: tuple[str, ...] = ()
        self.finish_hyper: tuple[str, ...] = ()
        self._used_by: str | None = None

    def finish(self, fn: Callable[..., Any]) -> Function:
        """Decorator: what becomes of the sums, `(sums, kept, hyper) -> new_kept`. See `reduction`."""
        function = Function(fn)
        arguments = [argument.arg for argument in function._tree.args.args]
        if len(arguments) != 3:
            raise TypeError(f"{function.name!r} takes ({', '.join(arguments)}): it must be (sums, kept, hyper)")
        if self.finished is not None or self._used_by is not None:
            why = f"{self._used_by!r} uses it already" if self.finished is None else f"it has one, {self.finished.name!r}"
            raise TypeError(f"reduction {self.name!r} cannot be given {function.name!r} to finish it: {why}")
        sums, kept, hyper = (_unpacked_names(function._tree, argument) for argument in arguments)
        if sums and len(sums) != self.n_values:
            raise TypeError(
                f"{function.name!r} unpacks {len(sums)} sums ({', '.join(sums)}): "
                f"reduction {self.name!r} gives {self.n_values}"
            )
        returned = function._tree.body[-1].value  # type: ignore[attr-defined]
        read = _unpacked_names(self._tree, "kept") if "kept" in self.extras else ()
        if read and read != kept:
            raise TypeError(
                f"{function.name!r} unpacks {arguments[1]} into {', '.join(kept) or 'nothing'}: reduction {self.name!r} has "
                f"{', '.join(read)}"
            )
        if not kept or len(set(kept)) < len(kept) or not isinstance(returned, ast.Tuple) or len(returned.elts) != len(kept):
            raise TypeError(
                f"{function.name!r} must unpack {arguments[1]} into the names of one number or more, and end by returning a "
                f"tuple of as many, as in `return (new_{', new_'.join(kept) or 'number'},)`"
            )
        self.finished, self.kept, self.finish_hyper = function, kept, hyper
        return function

    @property
    def numbers_from(self) -> int | None:
        return len(self.reductions) if "kept" in self.extras else super().numbers_from

    @property
    def n_numbers(self) -> int:
        if "kept" not in self.extras:
            return super().n_numbers
        return len(self.kept) + (self.sums.n_results if self.sums is not None else 0)

    @property
    def reads(self) -> tuple[str, ...]:
        """Which of "w", "g" and "state" its values are made of."""
        arguments = [argument.arg for argument in self._tree.args.args]
        names = {node.id for line in self._tree.body for node in ast.walk(line) if isinstance(node, ast.Name)}
        return tuple(what for what, name in zip(("w", "g", "state"), arguments, strict=False) if name in names)

    @property
    def n_own_results(self) -> int:
        """How many numbers it finds."""
        return self.n_values if self.finished is None else len(self.kept)

    @property
    def n_results(self) -> int:
        """How many numbers the rule gets."""
        passed_on = self.sums.n_results if self.sums is not None and self.passes_on else 0
        return self.n_own_results + passed_on


class Measure(Function):
    """What is to be known of each tensor's update, made by `measure`.

    Attributes:
        names: of its values, in order.
        by: how each is gathered, "sum" or "max".
    """

    def __init__(self, fn: Callable[..., Any], by: Mapping[str, str]) -> None:
        super().__init__(fn)
        arguments = [argument.arg for argument in self._tree.args.args]
        if len(arguments) != 3:
            raise TypeError(f"measure {self.name!r} takes ({', '.join(arguments)}): it must be (w, g, new_w)")
        returned = self._tree.body[-1].value  # type: ignore[attr-defined]
        if not isinstance(returned, ast.Tuple) or not returned.elts or len(returned.elts) != len(by):
            raise TypeError(
                f"measure {self.name!r} returns {ast.unparse(returned)!r}: it must end by returning a tuple of as many "
                f'values as @measure({", ".join(by)}) names, as in `return (g * g,)` after @measure(square="sum")'
            )
        for name, how in by.items():
            if how not in ("sum", "max"):
                raise ValueError(f"{name}={how!r} of measure {self.name!r}: must be 'sum' or 'max'")
        self.names, self.by = tuple(by), tuple(by.values())


def _parse(fn: types.FunctionType) -> ast.FunctionDef:
    try:
        text = textwrap.dedent(inspect.getsource(fn))
    except (OSError, TypeError) as error:
        raise TypeError(
            f"the source of {fn.__name__!r} cannot be found, and the GPU compiler reads it: "
            "define it in a file or in a notebook cell, not through exec or python -c"
        ) from error
    try:
        tree = ast.parse(text).body[0]
    except SyntaxError:  # a line from the middle of something
        tree = ast.Pass()
    if not isinstance(tree, ast.FunctionDef):
        raise TypeError(f"{fn.__name__!r} must be written with def")
    tree.decorator_list, tree.returns = [], None
    for argument in tree.args.args:
        argument.annotation = None
    return tree


# What all engines understand alike. `%` has another sign on a GPU, `x += y` changes the tensors of an eager step where
# they lie, `and` and `if` would ask a whole block of numbers for one answer, and so on.
_FORMS = (ast.Return, ast.Name, ast.Constant, ast.Tuple, ast.Attribute)
_OPERATORS = (
    *(ast.Add, ast.Sub, ast.Mult, ast.Div, ast.USub),
    *(ast.BitAnd, ast.BitOr, ast.Invert),
    *(ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE),
)


def _check_form(tree: ast.FunctionDef) -> None:
    """An error for whatever some engine would not know, or know otherwise than another."""
    plain = ast.arguments(posonlyargs=[], args=tree.args.args, kwonlyargs=[], kw_defaults=[], defaults=tree.args.defaults)
    if ast.dump(tree.args) != ast.dump(plain):
        raise TypeError(f"{tree.name!r} takes ({ast.unparse(tree.args)}): only plain arguments are possible")
    if ast.get_docstring(tree) is not None:
        tree.body = tree.body[1:]
    if not tree.body or not isinstance(tree.body[-1], ast.Return) or tree.body[-1].value is None:
        raise TypeError(f"{tree.name!r} must end by returning something")
    for node in (node for statement in tree.body for node in ast.walk(statement)):
        if isinstance(node, ast.BinOp | ast.UnaryOp):
            known = isinstance(node.op, _OPERATORS)
        elif isinstance(node, ast.Compare):
            known = len(node.ops) == 1 and isinstance(node.ops[0], _OPERATORS)
        elif isinstance(node, ast.Assign):  # up to 3.6 Triton takes no tuple in the tuple of names
            target = node.targets[0]
            nested = isinstance(target, ast.Tuple) and any(isinstance(each, ast.Tuple) for each in target.elts)
            known = len(node.targets) == 1 and not nested
        elif isinstance(node, ast.Call):
            known = isinstance(node.func, ast.Name) or (isinstance(node.func, ast.Attribute) and not node.keywords)
        else:
            known = isinstance(node, _FORMS) or not isinstance(node, ast.stmt | ast.expr)
        if not known:
            raise TypeError(
                f"{tree.name!r} contains {ast.unparse(node).splitlines()[0]!r}, which not all engines understand alike: "
                "a rule is made of assignments and, last, one return; it may use + - * /, single comparisons, & | ~ on what "
                "these give, the functions of tl (tl.where for a choice), and functions marked with @jit"
            )
    if sum(isinstance(node, ast.Return) for node in tree.body) > 1:
        raise TypeError(f"{tree.name!r} returns more than once: its last line must be its only return")


def _is_language(value: Any) -> bool:
    # A notebook may say `import triton.language as tl`, which means the same.
    return value is tl or (value is not None and value is sys.modules.get("triton.language"))


def _resolve(fn: types.FunctionType, tree: ast.FunctionDef) -> dict[str, Function]:
    """The functions that `fn` calls, by the names it knows them by; an error for names that engines cannot know."""
    local = {argument.arg for argument in tree.args.args}
    local |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    callees: dict[str, Function] = {}
    if fn.__code__.co_freevars:
        raise TypeError(
            f"{fn.__name__!r} uses {', '.join(fn.__code__.co_freevars)} of an enclosing function: "
            "define what it needs at the top level of the module or cell, or pass it as a hyper-parameter"
        )
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            if not isinstance(node.value, ast.Name) or node.value.id in local:
                raise TypeError(f"{fn.__name__!r} uses {ast.unparse(node)}: values have no attributes that all engines know")
            if _is_language(fn.__globals__.get(node.value.id)) and node.attr not in WORDS:
                close = difflib.get_close_matches(node.attr, WORDS, n=2)
                hint = f" Did you mean {' or '.join(close)}?" if close else ""
                raise TypeError(f"{fn.__name__!r} uses tl.{node.attr}; rules know {', '.join(WORDS)}.{hint}")
        if not isinstance(node, ast.Name) or node.id in local:
            continue
        value = fn.__globals__.get(node.id, getattr(builtins, node.id, None))
        if isinstance(value, Function):
            callees[node.id] = value
        elif not _is_language(value):
            hint = f". Did you mean tl.{node.id}?" if node.id in WORDS else ""
            raise TypeError(
                f"{fn.__name__!r} uses the name {node.id!r} ({type(value).__name__}), which engines do not know: "
                f"a rule may use its arguments, tl, and functions marked with @jit; pass numbers as hyper-parameters{hint}"
            )
    return callees


def _unpacked_names(tree: ast.FunctionDef, argument: str, may_return: bool = False) -> tuple[str, ...]:
    """The names that an argument is unpacked into; none if it is not used, or only returned where that is allowed."""
    for statement in tree.body:
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Name):
            target = statement.targets[0]
            if statement.value.id == argument and isinstance(target, ast.Tuple):
                if all(isinstance(element, ast.Name) for element in target.elts):
                    return tuple(ast.unparse(element) for element in target.elts)
    used = any(isinstance(node, ast.Name) and node.id == argument for node in ast.walk(tree))
    if used and not (may_return and not _uses_beyond_return(tree, argument)):
        raise TypeError(
            f"{tree.name!r} must unpack {argument} into names on a line of its own, "
            f"such as `first, second = {argument}` or `(only,) = {argument}`"
        )
    return ()


def _check_return(tree: ast.FunctionDef, argument: str, states: tuple[str, ...]) -> None:
    """An error unless the rule returns a weight and its states, as far as that can be seen in the text."""
    returned = tree.body[-1].value  # type: ignore[attr-defined]
    if isinstance(returned, ast.Call):
        return
    fits = isinstance(returned, ast.Tuple) and len(returned.elts) == 2
    if fits and not isinstance(second := returned.elts[1], ast.Call):
        if isinstance(second, ast.Tuple):
            fits = len(second.elts) == len(states)
        else:
            fits = isinstance(second, ast.Name) and second.id == argument
    if not fits:
        example = "".join(f"new_{name}, " for name in states).strip()
        raise TypeError(
            f"rule {tree.name!r} returns {ast.unparse(returned)!r}: it must return the new weight and a tuple of the "
            f"{len(states)} new state{'s' * (len(states) != 1)}, as in `return w, {f'({example})' if states else argument}`"
        )


def _returned_as_they_came(tree: ast.FunctionDef, argument: str, states: tuple[str, ...]) -> set[str]:
    """The states that a rule returns in their places as it unpacked them, as far as that can be seen in the text."""
    stored = [node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
    returned = tree.body[-1].value  # type: ignore[attr-defined]
    if not isinstance(returned, ast.Tuple):
        return set()
    second = returned.elts[1]
    if isinstance(second, ast.Name) and second.id == argument and argument not in stored:
        return set(states)
    if not isinstance(second, ast.Tuple):
        return set()
    places = zip(states, second.elts, strict=True)
    return {name for name, new in places if isinstance(new, ast.Name) and new.id == name and stored.count(name) == 1}


def _names_read(tree: ast.FunctionDef, states: tuple[str, ...]) -> set[str]:
    """The names that a rule reads, other than to return states in their own places."""
    returned = tree.body[-1].value  # type: ignore[attr-defined]
    second = returned.elts[1] if isinstance(returned, ast.Tuple) else None
    places = zip(states, second.elts, strict=True) if isinstance(second, ast.Tuple) else ()
    passed = {id(new) for name, new in places if isinstance(new, ast.Name) and new.id == name}
    names = (node for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load))
    return {node.id for node in names if id(node) not in passed}


def _uses_beyond_return(tree: ast.FunctionDef, argument: str) -> bool:
    """Whether `argument` is used other than as the second value of a return."""
    returned = {
        id(node.value.elts[1])
        for node in ast.walk(tree)
        if isinstance(node, ast.Return) and isinstance(node.value, ast.Tuple) and len(node.value.elts) == 2
    }
    return any(isinstance(node, ast.Name) and node.id == argument and id(node) not in returned for node in ast.walk(tree))
