"""`reduction`: define values that are summed over tensors, or averaged over rows and columns, before a rule runs."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from ..messages import instance
from .checks import check_names, names_behind, unpacked_names
from .function import Function
from .kinds import COMPARISON, INDEX, LITERAL, NUMBER, TUPLE

ALONG = ("row", "column", "slice")  # scopes of a mean; each divides a tensor into parts with a mean of their own


class Number(NamedTuple):
    """Where a function finds one of its `sums`.

    Attributes:
        scope: "tensor" for a number of the whole tensor; "row", "column", "slice" or "matrix" for one of a vector, which has
            a number for each row, column, slice or matrix of the tensor.
        place: index among the tensor's numbers, or among the rule's vectors.
    """

    scope: str
    place: int


def reduction(
    fn: Callable[..., Any] | None = None,
    *,
    reduction: Reduction | None = None,
    scope: str | Sequence[str] = "tensor",
    feeds_next: bool = False,
    op: str = "sum",
    means: Sequence[str] = (),
) -> Any:
    """Make a reduction from a function `(w, g, state, hyper) -> (a, b, ...)`: its values are summed over each tensor.

    The function is written like a rule. It unpacks the states of the rule that it needs, and hyper-parameters, which may be
    the rule's or new ones. A rule made with `@rule(reduction=norms)` receives the sums of the reduction `norms`.

    A second function, decorated with `@norms.finish`, may turn the sums into per-tensor states: scalars that persist from
    step to step and start at zero. It has the form `(sums, kept, hyper) -> (*new_kept, *more)` and unpacks `kept` into the
    names of these states. Its results replace the sums: the new states first, then numbers that are passed to the rule, but
    not kept. A tensor without gradient keeps its states. For a reduction over all tensors the results are equal for all,
    computed with the hyper-parameters of the first tensor that has a gradient.

    With `op="mean"` values are averaged over parts of each tensor, and the rule gets for each element the means of its
    parts: rows and columns of the matrices in the last two dimensions, or slices along the first dimension. The
    states that `finish` keeps are vectors then, of the shape of these means: the weight's with a size of 1 in the dimensions
    averaged over. Each result of `finish` is for the parts whose means and states it is computed from. A rule with such a
    reduction is used through `rule_by_shape`. docs/rules.md has an example of each.

    Args:
        fn: the function. It may have two more arguments: `sums`, the results of the reduction before it, or in its place
            `kept`, the per-tensor states that its `finish` returned in the previous step; and `index`, the element's index.
        reduction: a reduction that runs before this one and provides `sums`. Default: none.
        scope: "tensor" (default) sums over each tensor, "global" over all tensors of the update together. With `op="mean"`,
            for each value the parts that it is averaged over: "row", "column" or "slice"; "slice" not with others.
        feeds_next: whether the results of `reduction` are passed on, after this reduction's own. Default: False.
        op: "sum" (default), or "max", the largest of 0 and the values, which is NaN if any value is NaN; or "mean". A tensor
            without elements or gradient counts as 0.
        means: names of states of rows, given by `finish`, whose mean over the rows of each matrix is passed to the rule,
            after the other results. Default: none.

    Returns:
        The `Reduction`, or, if only keyword arguments are given, a decorator that makes it.

    Raises:
        TypeError: the function has another form or uses a name that backends do not know.
        ValueError: `scope` or `op` has another value, or they do not go together.

    Example:
        >>> import tristep
        >>> from tristep.kernels import reduction, tl
        >>> @reduction
        ... def norms(w, g, state, hyper):
        ...     return w * w, g * g
        >>> norms.n_values
        2
    """
    if op not in ("sum", "max", "mean"):
        raise ValueError(f"op={op!r}: must be 'sum', 'max' or 'mean'")
    if op == "mean":
        parts = (scope,) if isinstance(scope, str) else tuple(scope)
        if not parts or not set(parts) <= set(ALONG) or ("slice" in parts and set(parts) != {"slice"}):
            raise ValueError(
                f"scope={scope!r}: with op='mean' it must have 'row' or 'column' for each value, or 'slice' for each"
            )
        scope = parts
    elif scope not in ("tensor", "global"):
        raise ValueError(f"scope={scope!r}: must be 'tensor' or 'global', or with op='mean' 'row', 'column' or 'slice'")
    make = partial(Reduction, reduction=reduction, scope=scope, feeds_next=feeds_next, op=op, means=means)
    return make if fn is None else make(fn)


class ElementwiseFunction(Function):
    """A function of an element's weight, gradient, states and hyper-parameters.

    Attributes:
        state: names of the state tensors that it reads, in order.
        own_hyper: names of the hyper-parameters that it unpacks, in order.
        own_keys: names of those that are keys of `tl.normal`.
        extras: names of its further arguments: "sums" (or "kept", for a reduction) and "index".
        reduction: the reduction that runs before it, or None.
        reductions: all reductions that run before it, in order.
    """

    kind = "rule"
    stores_results = True  # whether what it returns is stored, for which a literal needs a type
    _NUMBERS: tuple[str, ...] = ("sums",)
    _kept_and_sums = False  # whether `kept` may have its per-tensor states followed by the results before it

    def __init__(self, fn: Callable[..., Any], reduction: Reduction | None = None) -> None:
        self.reduction = reduction
        super().__init__(fn)
        if reduction is not None:
            reduction._used_by = self.name

    def read(self) -> None:
        super().read()
        reduction, arguments = self.reduction, [argument.arg for argument in self.tree.args.args]
        further = [argument for argument in arguments[4:] if argument in self._NUMBERS][:1]
        if len(arguments) < 4 or arguments[4:] not in (further, [*further, "index"]):
            raise TypeError(
                f"{self.kind} {self.name!r} takes ({', '.join(arguments)}): it must have four arguments, "
                f"(w, g, state, hyper), and may have {' or '.join(self._NUMBERS)} and index after them, in this order"
            )
        instance(f"reduction of {self.name!r}", reduction, (Reduction, type(None)), "made with @reduction")
        self.reductions: tuple[Reduction, ...] = () if reduction is None else (*reduction.reductions, reduction)
        self.extras = tuple(arguments[4:])
        if ("sums" in self.extras) != (reduction is not None) and not (self._kept_and_sums and "kept" in self.extras):
            raise TypeError(
                f"{self.kind} {self.name!r} must take `sums` as an argument and name its reduction, "
                f"@{self.kind}(reduction=...), or neither"
            )
        self.state = unpacked_names(self.tree, arguments[2], may_return=True)
        self.own_hyper = unpacked_names(self.tree, arguments[3])
        numbers = [name for argument in further for name in unpacked_names(self.tree, argument)]
        check_names(self.tree, *self.state, *self.own_hyper, *numbers)
        if reduction is not None:
            if "kept" in reduction.extras and reduction.finished is None:
                raise TypeError(
                    f"reduction {reduction.name!r} takes kept, but keeps nothing: give it a @{reduction.name}.finish"
                )
            names = unpacked_names(self.tree, "sums")
            if names and len(names) != reduction.n_results:
                raise TypeError(
                    f"{self.kind} {self.name!r} unpacks {len(names)} sums ({', '.join(names)}): "
                    f"reduction {reduction.name!r} gives {reduction.n_results}"
                )
        kinds = [INDEX if argument == "index" else TUPLE for argument in arguments[2:]]
        self.read_kinds([NUMBER, NUMBER, *kinds], (COMPARISON, INDEX, *[LITERAL] * self.stores_results))
        if wrong := [names for names in self.draws if not names or not names <= set(self.own_hyper)]:
            others = ", ".join(sorted(wrong[0] - set(self.own_hyper))) or "literals alone"
            raise TypeError(
                f"{self.kind} {self.name!r} makes keys of tl.normal of {others}: they must be hyper-parameters, of which an "
                "optimizer makes keys for each tensor"
            )
        self.own_keys = tuple(name for name in self.own_hyper if any(name in names for names in self.draws))

    @property
    def numbers_from(self) -> int | None:
        """Index of the reduction in the rule that provides this function's `sums` or `kept`; None if it has neither."""
        return len(self.reductions) - 1 if self.reduction is not None else None

    @property
    def n_numbers(self) -> int:
        """Number of values that this function receives in `sums` or `kept`."""
        return 0 if self.reduction is None else self.reduction.n_results

    @property
    def numbers(self) -> list[Number]:
        """Where these values are, in their order."""
        return [] if self.reduction is None else self.reduction.results

    @property
    def vectors(self) -> list[str]:
        """The scopes of the vectors that the reductions before it result in, in order."""
        return [scope for stage in self.reductions for scope in stage.own_scopes if scope != "tensor"]


class Reduction(ElementwiseFunction):
    """Values summed over each tensor before a rule runs, made by `reduction`.

    Attributes:
        n_values: number of values that it sums.
        scope: "tensor" or "global"; for means a tuple of the scope of each value.
        op: "sum", "max" or "mean".
        feeds_next: whether the results of the reduction before it are passed on after its own.
        means: names of states of rows whose means over each matrix are results, too.
        finished: the function given to `finish`, or None.
        kept: names of its per-tensor states, or of its states of rows, columns or slices.
        own_scopes: the scope of each of its own results, "tensor" also for one that is equal for all tensors.
    """

    kind = "reduction"
    stores_results = False
    _NUMBERS = ("sums", "kept")

    def __init__(
        self,
        fn: Callable[..., Any],
        reduction: Reduction | None = None,
        scope: str | tuple[str, ...] = "tensor",
        feeds_next: bool = False,
        op: str = "sum",
        means: Sequence[str] = (),
    ) -> None:
        self.scope = scope
        self.op = op
        self.means = tuple(means)
        self.feeds_next = feeds_next and reduction is not None
        self.finished: Function | None = None
        self._used_by: str | None = None
        super().__init__(fn, reduction)

    def read(self) -> None:
        super().read()
        returned = self.tree.body[-1].value  # type: ignore[attr-defined]
        if not isinstance(returned, ast.Tuple) or not returned.elts:
            raise TypeError(f"reduction {self.name!r} must end by returning a tuple of values, such as `return (g * g,)`")
        self.n_values = len(returned.elts)
        self.kept: tuple[str, ...] = ()
        self.finish_hyper: tuple[str, ...] = ()
        self.own_scopes: tuple[str, ...] = ("tensor",) * self.n_values
        if isinstance(self.scope, tuple):
            if "kept" in self.extras:
                raise TypeError(f"reduction {self.name!r} takes kept, which reductions with op='mean' cannot")
            if len(self.scope) != self.n_values:
                raise TypeError(
                    f"reduction {self.name!r} returns {self.n_values} values, and scope={self.scope!r} is for "
                    f"{len(self.scope)}: must be as many"
                )
            self.own_scopes = self.scope
        if self.finished is not None:
            self._read_finish(self.finished)

    def finish(self, fn: Callable[..., Any]) -> Function:
        """Decorate the function that computes per-tensor states from the sums, `(sums, kept, hyper) -> (*new_kept, *more)`.

        It unpacks `kept` into the names of the states. Its results replace the sums; see `reduction`.

        Raises:
            TypeError: the reduction has such a function already, or a rule uses it, or the function has another form.
        """
        function = Function(fn)
        if self.finished is not None or self._used_by is not None:
            why = f"{self._used_by!r} uses it already" if self.finished is None else f"it has one, {self.finished.name!r}"
            raise TypeError(f"reduction {self.name!r} cannot be given {function.name!r} to finish it: {why}")
        if self._read:
            self._read_finish(function)
        self.finished = function
        return function

    def _read_finish(self, function: Function) -> None:
        arguments = [argument.arg for argument in function.tree.args.args]
        if len(arguments) != 3:
            raise TypeError(f"{function.name!r} takes ({', '.join(arguments)}): it must be (sums, kept, hyper)")
        sums, kept, hyper = (unpacked_names(function.tree, argument) for argument in arguments)
        if sums and len(sums) != self.n_values:
            raise TypeError(
                f"{function.name!r} unpacks {len(sums)} sums ({', '.join(sums)}): "
                f"reduction {self.name!r} gives {self.n_values}"
            )
        returned = function.tree.body[-1].value  # type: ignore[attr-defined]
        read = unpacked_names(self.tree, "kept") if "kept" in self.extras else ()
        if read and read != kept:
            raise TypeError(
                f"{function.name!r} unpacks {arguments[1]} into {', '.join(kept) or 'nothing'}: reduction {self.name!r} has "
                f"{', '.join(read)}"
            )
        n_new = len(returned.elts) if isinstance(returned, ast.Tuple) else 0
        if not kept or len(set(kept)) < len(kept) or n_new < len(kept):
            raise TypeError(
                f"{function.name!r} must unpack {arguments[1]} into the names of one number or more, and end by returning a "
                f"tuple of as many or more, as in `return (new_{', new_'.join(kept) or 'number'},)`"
            )
        function.read_kinds([TUPLE] * 3, (COMPARISON, LITERAL))
        self.kept, self.finish_hyper = kept, hyper
        self.own_scopes = ("tensor",) * n_new
        if isinstance(self.scope, tuple):
            self.own_scopes = self._scopes_of(function, sums, kept)
            of_rows = [name for name, scope in zip(kept, self.own_scopes, strict=False) if scope == "row"]
            if unknown := [name for name in self.means if name not in of_rows]:
                raise TypeError(f"means={self.means!r}: reduction {self.name!r} has no state of rows {unknown[0]!r}")
            self.own_scopes += ("matrix",) * len(self.means)

    def _scopes_of(self, function: Function, sums: tuple[str, ...], kept: tuple[str, ...]) -> tuple[str, ...]:
        """Return the scope of each result of the function that finishes means, which its text must show."""
        behind = names_behind(function.tree)
        known = dict(zip(sums, self.scope, strict=False))
        for name, names in zip(kept, behind, strict=False):
            known |= dict.fromkeys([name], next((known[other] for other in sums if other in names), ""))
        scopes = [{known[name] for name in names if name in known} for names in behind]
        if wrong := [k for k, each in enumerate(scopes) if len(each) != 1 or "" in each]:
            found = sorted(scopes[wrong[0]] - {""})
            raise TypeError(
                f"result {wrong[0]} of {function.name!r} is computed from means over {found}: it must "
                "be from means and states of rows, or of columns, or of slices alone, and from one mean at least"
            )
        return tuple(scope for (scope,) in scopes)

    @property
    def numbers_from(self) -> int | None:
        return len(self.reductions) if "kept" in self.extras else super().numbers_from

    @property
    def n_numbers(self) -> int:
        if "kept" not in self.extras:
            return super().n_numbers
        return len(self.kept) + (self.reduction.n_results if self.reduction is not None else 0)

    @property
    def numbers(self) -> list[Number]:
        before = [] if self.reduction is None else self.reduction.results
        if "kept" not in self.extras:
            return before
        n = len(self.kept)
        own = [Number("tensor", k) for k in range(n)]
        return own + [number._replace(place=n + number.place) if number.scope == "tensor" else number for number in before]

    @property
    def reads(self) -> tuple[str, ...]:
        """The arguments, among "w", "g" and "state", that its values depend on."""
        arguments = [argument.arg for argument in self.tree.args.args]
        names = {node.id for line in self.tree.body for node in ast.walk(line) if isinstance(node, ast.Name)}
        return tuple(what for what, name in zip(("w", "g", "state"), arguments, strict=False) if name in names)

    @property
    def n_own_results(self) -> int:
        """Number of its own results: what its `finish` returns, and means, or without one its sums."""
        return len(self.own_scopes)

    @property
    def n_results(self) -> int:
        """Number of results that it passes to the rule: its own and, if it feeds the next, those before it."""
        passed_on = self.reduction.n_results if self.reduction is not None and self.feeds_next else 0
        return self.n_own_results + passed_on

    @property
    def n_scalar_results(self) -> int:
        """Number of its results that are one for the whole tensor."""
        return sum(number.scope == "tensor" for number in self.results)

    @property
    def results(self) -> list[Number]:
        """Where its results are, in their order."""
        n_vectors, n_scalars, results = len(self.vectors), 0, []
        passed_on = self.reduction.results if self.reduction is not None and self.feeds_next else []
        for scope in (*self.own_scopes, *(number.scope for number in passed_on if number.scope == "tensor")):
            results.append(Number(scope, n_scalars if scope == "tensor" else n_vectors))
            n_scalars, n_vectors = n_scalars + (scope == "tensor"), n_vectors + (scope != "tensor")
        own, scalars = results[: self.n_own_results], iter(results[self.n_own_results :])
        return own + [next(scalars) if number.scope == "tensor" else number for number in passed_on]
