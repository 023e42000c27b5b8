"""Who runs a rule: triton on GPUs, numba on CPUs, eager torch anywhere. `Update` is one rule on a list of tensors.

The three engines share the table and the rule; this file decides which of them gets a group of tensors, and forms the
groups: tensors of one device and of the same types, aligned or not.
"""

from __future__ import annotations

import difflib
import itertools
import operator
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from typing import Any

import numpy as np
import torch
from torch.autograd.graph import increment_version

from . import storage
from .guards import GradLayouts, PointerGuard, Reference, gradient_references
from .language import Reduction, Rule, TensorRule, has_numba, has_triton
from .measures import Measurements
from .table import (
    GRADIENT,
    Recording,
    TensorTable,
    addresses_of,
    as_rows,
    compute_dtype,
    dense_strides,
    is_dense,
    is_wrapper,
    same_order,
    slot_shapes,
    widest,
)

__all__ = ["ENGINES", "Update", "check_memory", "choose_engine", "update"]

ENGINES = ("triton", "cpu", "eager")
_OTHER_NAMES = {"gpu": "triton", "cuda": "triton", "numba": "cpu", "native": "cpu", "torch": "eager"}
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_data_ptr = torch.Tensor.data_ptr


def choose_engine(device: torch.device, engine: str | None = None) -> str:
    """The engine for tensors on `device`.

    Args:
        device: where the tensors are.
        engine: "triton", "cpu", "eager", or None for the environment variable TRISTEP_ENGINE and, without that, the best
            there is: triton on a GPU, cpu (numba) on the CPU, eager elsewhere or where the library is missing.

    Raises:
        ValueError: no such engine, or it cannot work on this device.
        ModuleNotFoundError: the engine asked for needs a library that is not installed.
    """
    if engine is not None and not isinstance(engine, str):
        raise TypeError(
            f"engine={engine!r}: must be one of {', '.join(map(repr, ENGINES))}, or None, not {type(engine).__name__}"
        )
    asked = engine or os.environ.get("TRISTEP_ENGINE") or None
    gpu = device.type in ("cuda", "xpu")
    if asked is None:
        if gpu and has_triton():
            return "triton"
        return "cpu" if device.type == "cpu" and has_numba() else "eager"
    if asked not in ENGINES:
        close = [_OTHER_NAMES[asked]] if asked in _OTHER_NAMES else difflib.get_close_matches(asked, ENGINES, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        what = "engine" if engine else "TRISTEP_ENGINE"
        raise ValueError(f"{what}={asked!r}: must be one of {', '.join(map(repr, ENGINES))}, or None.{hint}")
    if asked == "triton":
        if not has_triton():
            raise ModuleNotFoundError("engine='triton' needs the package triton, which has builds for Linux only")
        if not gpu and os.environ.get("TRITON_INTERPRET") != "1":
            raise ValueError(
                f"engine='triton' needs tensors on a GPU, these are on {device}: move the model to a GPU, leave engine out, "
                "or set TRITON_INTERPRET=1 before Python starts to run the kernels slowly on the CPU"
            )
    if asked == "cpu":
        if device.type != "cpu":
            raise ValueError(f"engine='cpu' needs tensors on the CPU, these are on {device}: leave engine out")
        if not has_numba():
            raise ModuleNotFoundError("engine='cpu' needs the package numba: pip install numba, or engine='eager'")
    return asked


def update(
    rule: Rule | TensorRule,
    weights: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor | None],
    states: Sequence[Sequence[torch.Tensor]],
    hyper: Mapping[str, float] | Sequence[Mapping[str, float]],
    *,
    rescale_grad: float = 1.0,
    engine: str | None = None,
) -> None:
    """Apply `rule` once to every weight, in place. For repeated steps build an `Update` and keep it.

    Args:
        rule: the update rule.
        weights: floating-point tensors of any shape and layout.
        gradients: for each weight its gradient, of the same shape and any floating-point type; None leaves it alone.
        states: for each weight its state tensors in the order of `rule.state`: float64 for a float64 weight, else float32.
        hyper: values by the names of `rule.hyper`, for all weights or one mapping for each. `one_minus_x` may be left
            out where `x` is given.
        rescale_grad: what gradients are multiplied by first.
        engine: as for `choose_engine`.

    Raises:
        TypeError, ValueError: something does not fit; nothing is changed then.

    Example:
        >>> import torch
        >>> from tristep.kernels import rules, update
        >>> w = torch.ones(3)
        >>> update(rules.sgd, [w], [torch.ones(3)], [()], {"lr": 0.5, "wd": 0.0, "clip": float("inf")})
        >>> w
        tensor([0.5000, 0.5000, 0.5000])
    """
    each = [hyper] * len(weights) if isinstance(hyper, Mapping) else list(hyper)
    if not len(each) == len(gradients) == len(states) == len(weights):
        raise ValueError(
            f"{len(weights)} weights came with {len(gradients)} gradients, {len(states)} states and {len(each)} sets of "
            "hyper-parameters: there must be as many of each"
        )
    run = Update(rule, weights, [tuple(row) for row in states], engine=engine)
    for i, values in enumerate(each):
        run.hyper[i] = [rescale_grad, *hyper_values(rule, values)]
    run.bind(gradients)
    run()


def hyper_values(rule: Rule | TensorRule, values: Mapping[str, float]) -> list[float]:
    """The rule's hyper-parameters in order; `one_minus_x` is computed from `x`, in float64, where it is not given."""
    row = []
    for name in rule.hyper:
        if name in values:
            row.append(_number(rule, name, values[name]))
        elif name.startswith("one_minus_") and name[10:] in values:
            row.append(1.0 - _number(rule, name[10:], values[name[10:]]))
        else:
            raise TypeError(
                f"rule {rule.name!r} needs the hyper-parameter {name!r}; given were {', '.join(sorted(values)) or 'none'}"
            )
    return row


def _number(rule: Rule | TensorRule, name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise TypeError(f"{name} of rule {rule.name!r} must be a number, got {value!r}") from None


class Update:
    """One rule on a fixed list of weights: groups, tables and engines are made once and used at every step.

    Args:
        rule: the update rule.
        weights: floating-point tensors of any shape and layout. They are read anew when they have moved.
        states: for each weight its state tensors, in the order of `rule.state`, each in the arithmetic's type or, where that
            is float32 and the rule is elementwise, in bfloat16, or packed as `storage` has it, uint8 of one dimension.
            States and masters that are given other memory through `.data` are not followed: make another `Update` then.
        masters: for each weight its copy in the arithmetic's type, or None where there is none. Beside a bfloat16 weight it
            may be int16, the bits that the weight lacks, and beside a 16-bit weight of its type, what rounding took off.
        engine: as for `choose_engine`.
        names: what messages call the weights; default "weights[0]" and so on.
        seed: round what is stored as bfloat16 or packed up or down with the probability of what is cut off, each update of
            each weight with numbers of its own; `storage.CodesOnly(seed)` so rounds packed states only, None nothing.
        control: float32 [2], read on the device at every step: a factor for all gradients besides rescale_grad, and whether
            (not 0) to leave everything as it is; None is 1 and 0.
        zero_grads: fill the gradients with zeros in the same pass, those of a step that is left out, too.
        stacked: whether each weight, with what belongs to it, is a stack of as many weights as its first axis is long, of
            which each has hyper-parameters of its own. It costs no more than one weight to look after. Not for the eager
            engine, nor for rules that keep numbers.

    Attributes:
        hyper: float64 [n_weights, 1 + n_hyper], of stacks all that is in them, one after the other; rescale_grad and the
            rule's hyper-parameters, then, if there is a seed, the update's number. Write here before a step, or give one row
            for all to `share`.
        places: int64 [n_weights], by which weights have random numbers of their own; 0, 1, ... Write here before `bind`.
        launches: native calls or GPU launches of a step, those of the rule's reductions not counted.
        across: called with what a reduction over all tensors has found, in the widest type that the device has, and "sum" or
            "max"; to put there, in place, what several processes have found together, without waiting for the device. None
            where this is the only one.
        across_each: the same for what a reduction over each tensor has found, [n_weights, n_values], where processes have
            parts of the tensors.
        prepares_only: whether a call takes over `hyper` and launches nothing, as the replay of a CUDA graph will do that.

    Raises:
        TypeError, ValueError: types or shapes that do not fit.
    """

    def __init__(
        self,
        rule: Rule | TensorRule,
        weights: Sequence[torch.Tensor],
        states: Sequence[tuple[torch.Tensor, ...]],
        masters: Sequence[torch.Tensor | None] | None = None,
        engine: str | None = None,
        names: Sequence[str] | None = None,
        seed: int | storage.CodesOnly | None = None,
        control: torch.Tensor | None = None,
        zero_grads: bool = False,
        stacked: bool = False,
    ) -> None:
        if not isinstance(rule, (Rule, TensorRule)):
            raise TypeError(f"rule must be made with @rule or @tensor_rule, got {type(rule).__name__}")
        if seed is not None and isinstance(rule, TensorRule):
            raise TypeError(f"seed={seed!r}: rule {rule.name!r} is one of whole tensors, which are rounded to the nearest")
        self.rule = rule
        self.weights = list(weights)
        self.states = list(states)
        self.masters = [None] * len(self.weights) if masters is None else list(masters)
        self.engine = engine
        self.stacked = stacked
        n_weights = sum(map(_length, self.weights)) if stacked else len(self.weights)
        self.seed, self.places = seed, np.arange(n_weights)
        self.control, self.zero_grads, self.prepares_only = control, zero_grads, False
        self.across: Callable[[torch.Tensor, str], None] | None = None
        self.across_each: Callable[[torch.Tensor, str], None] | None = None
        self._hyper = np.zeros((n_weights, 1 + len(rule.hyper) + (seed is not None)))
        self._row: list[float] | None = None  # what is to be in all rows of it, and is not there yet
        self._names = [f"weights[{i}]" for i in range(len(self.weights))] if names is None else list(names)
        self._groups: list[_Group] = []
        self._keys: list[Any] = []  # of the groups, by weight
        self._shapes: list[torch.Size] = []
        self._guard: PointerGuard | None = None  # of the weights
        # The bound gradients: references, pointers and strides of those that are not missing, and the layouts of all.
        self._references: list[Reference] | None = None
        self._gradient_guard: PointerGuard | None = None
        self._layouts: GradLayouts | None = None
        self._alive: Sequence[Any] | None = None  # the gradients themselves, from `bind` to the step
        self._own = False
        self._into: Measurements | None = None  # what has rows enough
        self._touched: list[torch.Tensor] = []  # weights that have a gradient
        if control is not None and (control.shape != (2,) or control.dtype != torch.float32):
            raise ValueError(f"control is {control.dtype} {tuple(control.shape)}: must be torch.float32 (2,)")
        counts = {"states": len(self.states), "masters": len(self.masters), "names": len(self._names)}
        for what, count in counts.items():
            if count != len(self.weights):
                raise ValueError(f"{count} {what} for {len(self.weights)} weights: there must be as many")
        known: set[Any] = set()  # many weights are often cut from one array: those alike are looked at once
        for name, weight, row, master in zip(self._names, self.weights, self.states, self.masters, strict=True):
            kind = _kind(weight, *row, master)
            if kind is None or kind not in known or weight.is_inference():
                if stacked:
                    _check_stack(rule, name, weight, row, master, engine)
                else:
                    _check(rule, name, weight, row, master)
                choose_engine(weight.device, engine)
                known.add(kind)
        # Aliases, which stay as they are where somebody gives the tensors other memory. Only all that share a storage can
        # move then, as by share_memory_(), so that one of each tells.
        self._states = [tuple(state.detach() for state in row) for row in self.states]
        self._masters = [None if master is None else master.detach() for master in self.masters]
        companions = [*itertools.chain.from_iterable(self._states), *_present(self._masters)]
        self._anchors = list({each.untyped_storage().data_ptr(): each for each in companions if each.numel()}.values())
        self._anchor_guard: PointerGuard | None = None

    @property
    def hyper(self) -> np.ndarray:
        if self._row is not None:
            self._hyper[:], self._row = self._row, None
        return self._hyper

    def share(self, row: list[float]) -> None:
        """As `hyper[:] = row`, and quicker: one row of hyper-parameters for all weights."""
        self._row = row

    @property
    def launches(self) -> int:
        return len(self._groups)

    def engines(self) -> list[str]:
        """The engines in use, each once."""
        return sorted({_engine(self.rule, weight.device, self.engine) for weight in self.weights})

    @property
    def references(self) -> list[Reference]:
        """Weak references to the bound gradients; functions that return None for weights that are skipped."""
        return [] if self._references is None else self._references

    def fits(self, master_dtype: Callable[[torch.Tensor], torch.dtype | None] | None = None) -> bool:
        """Whether states and masters still match the weights; a model may have been moved, converted or cut.

        Args:
            master_dtype: the type of the master that a weight is to have, or None; by default those have one that had one.
        """
        return self.is_in_place() or all(
            (master_dtype is None or master_dtype(weight) == (None if master is None else master.dtype))
            and all(
                tensor.device == weight.device
                and tensor.dtype in types
                and tensor.shape == shape
                and (tensor.dtype != torch.uint8 or weight.is_contiguous())
                for (tensor, shape), types in zip(
                    _companions(self.rule, weight, row, master), _types(self.rule, weight.dtype), strict=False
                )
            )
            for weight, row, master in zip(self.weights, self.states, self.masters, strict=True)
        )

    def rebind(self, gradients: Sequence[Any], *, own: bool = False) -> bool:
        """As `bind`, if that needs no close look: weights and states are where they were, and either these are the bound
        gradients, or others that differ in nothing but their pointers. Returns False where `bind` has to look.

        Quick: asked at every step.
        """
        if not self.is_in_place():
            return False
        same = self._is_bound(gradients, own)
        if not (same and self._gradient_guard is not None and self._gradient_guard.passes(_present(gradients))):
            pointers = None if self._layouts is None else self._layouts.pointers(gradients, own)
            if pointers is None or (pointers & 15).any():
                return False
            if self.zero_grads:
                self._check_own_memory(gradients)
            if not same:
                self._references, self._own = gradient_references(gradients), own
            # Gradients that are new now will be new at the next step as a rule, so the guard waits until they are not.
            self._gradient_guard = PointerGuard(gradients) if same else None
            self._touched = self.weights
            for group in self._groups:
                group.rebind(pointers, self.references)
        self._alive = gradients
        return True

    def bind(self, gradients: Sequence[torch.Tensor | None], *, own: bool = False) -> None:
        """Take these gradients for the coming steps; None skips a weight. Checks everything, changes no weight.

        They are kept alive until the next step only. To step again with other gradients, or with ones that have moved, bind
        again.

        Args:
            gradients: one for each weight.
            own: that each is its weight's `.grad`, whose shape and device torch has checked already.
        """
        if len(gradients) != len(self.weights):
            raise ValueError(f"{len(gradients)} gradients for {len(self.weights)} weights: there must be as many")
        if self.rebind(gradients, own=own):
            return
        if self.zero_grads:
            self._check_own_memory(gradients)
        self._layouts = self._references = None
        self._bind(gradients)
        self._own, self._alive = own, gradients
        plain = not self.stacked and all(g.table.aligned and not g.sources and not g.copied for g in self._groups)
        if plain and all(gradient is not None for gradient in gradients):
            self._layouts = GradLayouts(gradients, own)  # type: ignore[arg-type]  # all are there

    def _is_bound(self, gradients: Sequence[Any], own: bool) -> bool:
        """Whether these very tensors are the bound gradients."""
        if self._references is None or own != self._own or len(gradients) != len(self._references):
            return False
        return all(map(operator.is_, [reference() for reference in self._references], gradients))

    def _check_own_memory(self, gradients: Sequence[Any]) -> None:
        """Gradients that are to become zeros must not be those of another weight, that is yet to be updated."""
        owners: dict[Any, str] = {}
        for name, gradient in zip(self._names, gradients, strict=True):
            if isinstance(gradient, torch.Tensor) and gradient.layout == torch.strided and gradient.numel():
                first = owners.setdefault((gradient.device, gradient.data_ptr()), name)
                if first is not name:
                    raise ValueError(
                        f"{first} and {name} have one gradient in one place in memory, which zero_grads would clear after "
                        "the first: give each its own, by .clone(), or leave zero_grads out"
                    )

    def _bind(self, gradients: Sequence[torch.Tensor | None]) -> None:
        known: set[Any] = set()
        for name, weight, gradient, row, master in zip(
            self._names, self.weights, gradients, self.states, self.masters, strict=True
        ):
            check_memory(name, weight)
            if gradient is not None:
                check_memory(f"the gradient of {name}", gradient)
            kind = _kind(weight, gradient, *row, master)
            if kind is not None and kind in known:
                continue
            known.add(kind)
            if gradient is not None:
                _check_gradient(name, weight, gradient)
            for tensor, shape in _companions(self.rule, weight, row, master):
                if tensor.shape != shape:  # the weight may have been cut to a part of its memory
                    raise ValueError(
                        f"{name} has shape {tuple(weight.shape)}, its state {tuple(tensor.shape)}: a weight may be moved or "
                        "converted between steps, but not change its shape"
                    )
                if tensor.device != weight.device:
                    raise ValueError(f"{name} is on {weight.device}, its state on {tensor.device}: must be on one device")
        shapes = [weight.shape for weight in self.weights]
        states = [row[: len(self.rule.state)] for row in self.states]
        keys = [_group_key(*each, self.stacked) for each in zip(self.weights, gradients, states, self.masters, strict=True)]
        if self._keys:  # a skipped weight stays in the group where it was
            keys = [old if gradient is None else new for old, new, gradient in zip(self._keys, keys, gradients, strict=True)]
        if keys != self._keys or shapes != self._shapes or not self.is_in_place():
            members: dict[Any, list[int]] = {}
            for i, key in enumerate(keys):
                members.setdefault(key, []).append(i)
            self._groups = [_Group(self, key, indices) for key, indices in members.items()]
            self._guard, self._anchor_guard = PointerGuard(self.weights), PointerGuard(self._anchors)
            self._keys, self._shapes = keys, shapes
        self._references, self._gradient_guard = gradient_references(gradients), PointerGuard(_present(gradients))
        missing = any(gradient is None for gradient in gradients)
        touched = [w for w, gradient in zip(self.weights, gradients, strict=True) if gradient is not None]
        self._touched = touched if missing else self.weights
        for group in self._groups:
            group.bind(gradients, self._references)

    def is_in_place(self) -> bool:
        """Whether weights and states are where they were when gradients were bound."""
        weights, anchors = self._guard, self._anchor_guard
        return weights is not None and weights.passes(self.weights) and anchors is not None and anchors.passes(self._anchors)

    def __call__(self, into: Measurements | None = None) -> None:
        """Run one step with the bound gradients and the values in `hyper`.

        Args:
            into: where to put what its measure finds of each weight, in the row of its `places`; see `Measurements`.

        Raises:
            RuntimeError: no gradients are bound, or one of them has been deleted since; nothing has been changed.
            ValueError: weights on several devices, or more than `into` has rows for.
        """
        hyper: Any = self.hyper if self._row is None or self.seed is not None else self._row
        if self.prepares_only:
            for group in self._groups:
                group.take(hyper)
            self.count_change()
            return
        if Recording.current is not None:
            if into is not None:
                raise RuntimeError("telemetry is written to another place at every step, which a CUDA graph cannot do")
            Recording.current.updates.append(_Recorded(self))
        if into is not None and into is not self._into:
            self._check_rows(into)
        if self._alive is None and not self._revive():
            raise RuntimeError("there are no gradients to step with, or some of them have been deleted: bind() them first")
        if not self.rule.reductions:
            for group in self._groups:
                group.run(hyper, into)
        else:
            self._run_with_sums(hyper, into)
        self.count_change()
        if self.zero_grads:
            increment_version(_present(self._alive or ()))
        self._alive = None

    def _revive(self) -> bool:
        """Hold the bound gradients for one more step; False if some have been deleted."""
        if self._references is None:
            return False
        self._alive = [reference() for reference in self._references]
        return len(_present(self._alive)) == len(self._touched)

    def repeat(self, same: bool = False) -> None:
        """Run the step once more, right after a call, between which nothing but numbers has changed: nothing is checked.

        Whoever repeats steps calls `count_change` after the last one. The rule must have no reductions.

        Args:
            same: that `hyper` is as it was.
        """
        for group in self._groups:
            if same and not (group.sources or group.copied):
                group.execute()
            else:
                group.run(self.hyper)

    def count_change(self) -> None:
        """So that autograd notices, if a graph from before the step is still in use."""
        increment_version(self._touched)

    def total(self) -> torch.Tensor:
        """What the first of the rule's reductions, one over all tensors, has found: a tensor without dimensions."""
        return self._groups[0].execute.totals[0][0, 0]

    @torch.no_grad()
    def _run_with_sums(self, hyper: Any, into: Measurements | None) -> None:
        for group in self._groups:
            group.begin(hyper)
        for k, reduction in enumerate(self.rule.reductions):
            for group in self._groups:
                if "kept" in reduction.extras:
                    group.recall(k)
                group.execute.measure(k)
            if reduction.over == "all" and (len(self._groups) > 1 or self.across is not None):
                join_totals([group.execute.totals[k] for group in self._groups], reduction.by, self.across)
            if reduction.over == "tensor" and self.across_each is not None:
                self._join_each(k, reduction)
            if reduction.finished is not None:
                self._finish(k, reduction)
            if reduction.passes_on:
                for group in self._groups:
                    group.pass_on(k)
        for group in self._groups:
            group.execute_rule(into)
            group.end()

    def _join_each(self, stage: int, reduction: Reduction) -> None:
        """Add up what processes have found of their parts of each tensor, with one tensor for all groups."""
        device = self.weights[0].device
        found = torch.zeros(len(self.weights), reduction.n_values, dtype=widest(device.type), device=device)
        for group in self._groups:
            found[group.rows_on_device()] = group.execute.totals[stage].to(found)
        assert self.across_each is not None
        self.across_each(found, reduction.by)
        for group in self._groups:
            group.execute.totals[stage].copy_(found[group.rows_on_device()])

    def _check_rows(self, into: Measurements) -> None:
        if len({group.table.device for group in self._groups}) > 1:
            raise ValueError("weights on several devices, of which nothing can be measured together: make an Update of each")
        if self.places.max(initial=-1) >= into.n_rows:
            raise ValueError(
                f"the results have {into.n_rows} rows, a weight's place is {self.places.max()}: make them larger"
            )
        self._into = into

    def _finish(self, stage: int, reduction: Reduction) -> None:
        """Turn the sums of a reduction into the numbers that it keeps."""
        if reduction.over == "tensor":
            for group in self._groups:
                found, before = group.finished(stage, slice(None)), group.kept(stage)
                group.keep(stage, torch.where(group.active()[:, None], found, before))
            return
        for group in self._groups:  # any tensor's will do: all have the same sums and have kept the same
            if (i := group.first_active()) is not None:
                found = group.finished(stage, slice(i, i + 1))
                for each in self._groups:
                    each.keep(stage, found)
                return


def join_totals(totals: Sequence[torch.Tensor], by: str, across: Callable[[torch.Tensor, str], None] | None = None) -> None:
    """Put the sum, or maximum, over all groups into each row of each group's totals, whose rows are that of the group.

    `across` then adds up in place what several processes have found.
    """
    first = totals[0].device
    rows = torch.stack([total[0].to(widest(total.device.type)).to(first) for total in totals])
    together = rows.sum(dim=0) if by == "sum" else rows.amax(dim=0)
    if across is not None:
        across(together, by)
    if torch.float32 in {total.dtype for total in totals}:  # what is infinite for one of them is so for all
        narrow = together.float()
        together = torch.where(narrow.isfinite(), together, narrow.to(together))
    for total in totals:
        total.copy_(together)


class _Recorded:
    """An update in a CUDA graph: the groups whose kernels are in it, and where their gradients lie."""

    def __init__(self, update: Update) -> None:
        self.update, self._groups = update, update._groups
        self._gradients = [group.table.addresses[GRADIENT].copy() for group in self._groups]
        # Kept alive, since the graph reads and writes there.
        self._alive = [reference() for reference in update.references], [group.sources for group in self._groups]

    def holds(self) -> bool:
        """Whether the graph's kernels still work on the weights and states of the update."""
        return self.update._groups is self._groups and self.update.is_in_place()

    def upload(self) -> None:
        """Copy what the kernels read to the device; `hyper` has been taken over already."""
        for group, addresses in zip(self._groups, self._gradients, strict=True):
            group.table.addresses[GRADIENT] = addresses
            group.execute.upload()
        self.update._references = None  # so that a step without the graph looks for gradients anew


class _Group:
    """Tensors that go into one launch.

    Weights with gaps, and weights that have got other strides than their states since these were made, are updated in a
    dense copy, which is then written back.
    """

    @torch.inference_mode(False)  # what is made here outlives the step
    def __init__(self, owner: Update, key: Any, indices: list[int]) -> None:
        device, _, gradient_dtype, types, aligned = key
        has_masters = types[-1] is not None
        self.indices = indices
        counts = list(map(len, owner.weights)) if owner.stacked else [1] * len(owner.weights)
        self.rows: Any = slice(None)  # of `hyper`
        if len(indices) < len(owner.weights):
            every = np.repeat(np.arange(len(counts)), counts)
            self.rows = np.flatnonzero(np.isin(every, indices))
        stops = np.cumsum([counts[i] for i in indices]).tolist()
        self._spans = [slice(stop - counts[i], stop) for i, stop in zip(indices, stops, strict=True)]  # of each in the table
        self._seed, self._places, self._first = owner.seed, owner.places[self.rows], int(owner.stacked)
        self.originals = [owner.weights[i] for i in indices]
        masters = [owner._masters[i] for i in indices] if has_masters else None
        states = [owner._states[i] for i in indices]
        n = len(owner.rule.state) if isinstance(owner.rule, Rule) else 0  # whole tensors keep the order they have
        strides = [_strides(owner.weights[i], [*owner.states[i][:n], owner.masters[i]], owner.stacked) for i in indices]
        self.copied = [k for k, weight in enumerate(self.originals) if _needs_copy(weight, strides[k], self._first)]
        weights = list(self.originals)
        for k in self.copied:
            weights[k] = torch.empty_strided(weights[k].shape, strides[k], dtype=weights[k].dtype, device=device)
        make, tile = executor_for(_engine(owner.rule, device, owner.engine), isinstance(owner.rule, TensorRule))
        kinds = gradient_dtype, states, masters
        self.table = TensorTable(owner.rule, weights, *kinds, tile, aligned, owner.seed, owner.stacked)  # type: ignore[arg-type]
        self._control, self.table.zero_grads = owner.control, owner.zero_grads
        if owner.control is not None:
            self.table.control = owner.control.to(device)
        self.execute = make(self.table)
        self._empty = np.flatnonzero(self.table.sizes == 0).tolist()
        self.sources: list[tuple[torch.Tensor, Any]] = []  # dense copies, and functions giving what to copy
        self._active: tuple[list[bool], torch.Tensor] | None = None
        self._rows_on_device: Any = None
        stages = range(len(owner.rule.reductions))
        self._kept_rows = [as_rows(kept) if len((kept := self._kept(k))[0]) else None for k in stages]

    def bind(self, gradients: Sequence[torch.Tensor | None], references: Sequence[Any]) -> None:
        table, stacked = self.table, bool(self._first)
        self.sources, table.gradients = [], []
        for i, weight, span in zip(self.indices, table.weights, self._spans, strict=True):
            gradient, bound = gradients[i], references[i]
            if gradient is not None and _needs_copy(gradient, weight.stride(), self._first):
                with torch.inference_mode(False):
                    dense = torch.empty_strided(weight.shape, weight.stride(), dtype=gradient.dtype, device=gradient.device)
                self.sources.append((dense, bound))
                gradient, bound = dense, partial(itself, dense)
            table.gradients += [None if gradient is None else bound] * (span.stop - span.start)
            table.addresses[GRADIENT, span] = 0 if gradient is None else addresses_of([gradient], stacked)

    def rebind(self, pointers: np.ndarray, references: list[Reference]) -> None:
        """As `bind`, for gradients that differ from the bound ones in their pointers only."""
        self.table.addresses[GRADIENT] = pointers[self.rows]
        self.table.gradients = references if isinstance(self.rows, slice) else [references[i] for i in self.indices]  # type: ignore[assignment]

    def run(self, hyper: np.ndarray | list[float], into: Measurements | None = None) -> None:
        if self.sources or self.copied:
            with torch.no_grad():
                self.begin(hyper)
                self.execute_rule(into)
                self.end()
        else:
            self.take(hyper)
            self.execute_rule(into)

    def execute_rule(self, into: Measurements | None) -> None:
        """Update the weights and, where it is asked for, measure meanwhile."""
        if into is None:
            self.execute()
            return
        active = self.table.addresses[GRADIENT] != 0
        for k in self._empty:  # these may have no address
            active[k] = self.table.gradients[k] is not None
        self.execute.measured(into, self._places)
        into.mark(self._places[active])

    def take(self, hyper: np.ndarray | list[float]) -> None:
        """Put the hyper-parameters, or one row of them for all, into the table, and keys where rounding is stochastic."""
        if isinstance(hyper, list):
            self.table.fill(hyper)
        elif self._seed is None:
            self.table.hyper[:] = hyper[self.rows]
        else:
            self._take_with_keys(hyper, self._seed)
        if self._control is not None:
            self._take_control(self._control)

    def _take_control(self, control: torch.Tensor) -> None:
        own: Any = self.table.control
        if own is not control:  # on another device
            own.copy_(control, non_blocking=True)
        if self.execute.multiplies_on_host:
            self.table.hyper[:, 0] *= own.numpy()[0]

    def _take_with_keys(self, hyper: np.ndarray, seed: int | storage.CodesOnly) -> None:
        table = self.table
        values, width = hyper[self.rows], 1 + len(table.rule.hyper)
        table.hyper[:, :width] = values[:, :width]
        if table.storage.stochastic:
            table.hyper[:, width:] = storage.keys(seed, values[:, width], self._places)

    def begin(self, hyper: np.ndarray | list[float]) -> None:
        """Everything before the first look at the tensors."""
        table = self.table
        self.take(hyper)
        for dense, gradient in self.sources:
            dense.copy_(gradient())
        for k in self.copied:
            table.weights[k].copy_(self.originals[k])

    def end(self) -> None:
        """Everything after the weights have been updated."""
        for k in self.copied:
            if self.table.gradients[self._spans[k].start] is not None:
                self.originals[k].copy_(self.table.weights[k])
        if self.table.zero_grads:
            for _, gradient in self.sources:
                gradient().zero_()

    def rows_on_device(self) -> slice | torch.Tensor:
        """Which of the weights it has, to index a tensor that lies where they do."""
        if self._rows_on_device is None:
            whole = isinstance(self.rows, slice)
            self._rows_on_device = self.rows if whole else torch.from_numpy(self.rows).to(self.table.device)
        return self._rows_on_device

    def active(self) -> torch.Tensor:
        """Which tensors have a gradient."""
        found = [gradient is not None for gradient in self.table.gradients]
        if self._active is None or found != self._active[0]:
            self._active = found, torch.tensor(found, device="cpu").to(self.table.device, non_blocking=True)
        return self._active[1]

    def first_active(self) -> int | None:
        return next((i for i, gradient in enumerate(self.table.gradients) if gradient is not None), None)

    def kept(self, stage: int, rows: slice = slice(None)) -> torch.Tensor:
        """The numbers that a reduction keeps, [n_tensors, n]."""
        array = self._kept_rows[stage]
        return torch.stack([torch.stack(row) for row in self._kept(stage)[rows]]) if array is None else array[rows]

    def finished(self, stage: int, rows: slice) -> torch.Tensor:
        """What these tensors' sums turn the kept numbers into, [n_rows, n]."""
        table, reduction, kept = self.table, self.table.rule.reductions[stage], self.kept(stage, rows)
        assert reduction.finished is not None
        columns = [1 + table.rule.hyper.index(name) for name in reduction.finish_hyper]
        hyper = self.execute.hyper[rows]
        totals, own = self.execute.totals[stage][rows], tuple(hyper[:, column] for column in columns)
        new = reduction.finished(totals.unbind(1), kept.unbind(1), own)
        new = [torch.as_tensor(value, dtype=kept.dtype, device=kept.device).expand(len(kept)) for value in new]
        return torch.stack(new, dim=1)

    def keep(self, stage: int, new: torch.Tensor) -> None:
        """Make these the kept numbers, and what comes after the reduction gets."""
        if self.table.rule.skips_nonfinite:
            before = self.kept(stage)
            new = torch.where(self.execute.totals[0].isfinite(), new.to(before), before)
        if self.table.control is not None:
            before = self.kept(stage)
            new = torch.where(self.table.control[1] != 0, before, new.to(before))
        room = self.execute.sums[stage][:, : new.shape[1]]
        room[:] = new
        if (array := self._kept_rows[stage]) is not None:
            array.copy_(room)
        else:
            torch._foreach_copy_([number for row in self._kept(stage) for number in row], list(room.flatten().unbind()))

    def recall(self, stage: int) -> None:
        """Show a reduction the numbers that it has kept, and what is passed on to it."""
        reduction, execute = self.table.rule.reductions[stage], self.execute
        execute.sums[stage][:, : len(reduction.kept)] = self.kept(stage)
        if reduction.passes_on:
            execute.sums[stage][:, len(reduction.kept) :] = execute.sums[stage - 1]

    def _kept(self, stage: int) -> list[tuple[torch.Tensor, ...]]:
        rule = self.table.rule
        start = len(rule.state) + sum(len(earlier.kept) for earlier in rule.reductions[:stage])
        return [row[start : start + len(rule.reductions[stage].kept)] for row in self.table.states]

    def pass_on(self, stage: int) -> None:
        """Put the results of the reduction before this one behind its own."""
        reduction, execute = self.table.rule.reductions[stage], self.execute
        own = reduction.n_own_results
        if reduction.finished is None:
            execute.sums[stage][:, :own] = execute.totals[stage]
        execute.sums[stage][:, own:] = execute.sums[stage - 1]


def _strides(weight: torch.Tensor, companions: Sequence[torch.Tensor | None], stacked: bool = False) -> tuple[int, ...]:
    """Those in which the weight's elements are walked: its states' and master's, its own if it has neither and no gaps.

    Packed states are in C's order. In a stack there are no gaps in what is stacked, which `_check_stack` has seen to.
    """
    packed = False
    for companion in companions:
        if companion is not None and companion.dtype != torch.uint8:
            return companion.stride()
        packed |= companion is not None
    if stacked:
        return weight.stride()
    return torch.empty(weight.shape, device="meta").stride() if packed else dense_strides(weight)


def _needs_copy(tensor: torch.Tensor, strides: tuple[int, ...], first: int) -> bool:
    """Whether what lies in memory is not the tensor in the order of these strides, those of the axes from `first` on."""
    return tensor.is_neg() or not same_order(tensor.shape[first:], tensor.stride()[first:], strides[first:])


def itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _present(gradients: Sequence[Any]) -> list[Any]:
    return [gradient for gradient in gradients if gradient is not None]


def _engine(rule: Rule | TensorRule, device: torch.device, asked: str | None) -> str:
    """The engine for a rule; torch itself computes those of whole tensors, whatever was asked for."""
    chosen = choose_engine(device, asked)
    return "eager" if isinstance(rule, TensorRule) else chosen


def executor_for(engine: str, whole: bool) -> tuple[Any, int]:
    """The class that runs a table, and its tile. Imported here, so that nobody pays for an engine that is not used."""
    if engine == "triton":
        from . import gpu as triton_engine

        return triton_engine.TritonUpdate, triton_engine.TILE
    if engine == "cpu":
        from . import native

        return native.NativeUpdate, native.TILE
    from . import eager

    return eager.TensorUpdate if whole else eager.EagerUpdate, eager.TILE


def _group_key(
    weight: torch.Tensor,
    gradient: torch.Tensor | None,
    states: tuple[torch.Tensor, ...],
    master: torch.Tensor | None,
    stacked: bool,
) -> tuple[Any, ...]:
    tensors = [weight, *states] + ([] if gradient is None else [gradient]) + ([] if master is None else [master])
    # Strides other than the weight's mean that a fresh copy is made, and fresh memory is aligned.
    aligned = not reduce(operator.or_, map(_data_ptr, tensors)) & 15
    if stacked:
        aligned &= all(each.stride(0) * each.element_size() % 16 == 0 for each in tensors)
    return (
        weight.device,
        weight.dtype,
        weight.dtype if gradient is None else gradient.dtype,
        (*(state.dtype for state in states), None if master is None else master.dtype),
        aligned,
    )


def _kind(*tensors: Any) -> tuple[Any, ...] | None:
    """All that decides whether some tensors may be taken, but for their contents; None where only a close look tells."""
    try:
        return tuple(
            [
                None if tensor is None else (type(tensor), tensor.dtype, tensor.device, tensor.shape, tensor.stride())
                for tensor in tensors
            ]
        )
    except (AttributeError, RuntimeError):  # no tensor, or one without strides
        return None


def _check(rule: Rule | TensorRule, name: str, weight: Any, states: Sequence[Any], master: Any) -> None:
    if not isinstance(weight, torch.Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(weight).__name__}")
    if is_wrapper(weight):
        raise TypeError(f"{name} is a {type(weight).__name__}, made of other tensors: rule updates take plain ones")
    if weight.layout != torch.strided:
        raise TypeError(f"{name} is sparse ({weight.layout}), which rule updates do not take")
    if weight.is_inference():
        raise ValueError(
            f"{name} was made under torch.inference_mode(), where autograd is not told of changes: make it outside"
        )
    if weight.dtype not in DTYPES:
        raise TypeError(f"{name} is {weight.dtype}: must be one of {', '.join(map(str, DTYPES))}")
    if len(states) != len(rule.slots):
        raise ValueError(
            f"the state of {name} has {len(states)} tensors: rule {rule.name!r} has {len(rule.slots)} "
            f"({', '.join(rule.slots) or 'none'})"
        )
    overlapping = any(stride == 0 and size > 1 for stride, size in zip(weight.stride(), weight.shape, strict=True))
    if overlapping and weight.numel():
        raise ValueError(
            f"{name} has several elements in one place in memory (shape {tuple(weight.shape)}, strides {weight.stride()}), "
            "as expand() makes them: use .contiguous()"
        )
    strides = _strides(weight, [])
    for slot, (tensor, shape), types in zip(
        (*rule.slots, "master"), _companions(rule, weight, states, master), _types(rule, weight.dtype), strict=False
    ):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{slot} of {name} must be a tensor, got {type(tensor).__name__}")
        if tensor.dtype not in types or tensor.device != weight.device or tensor.shape != shape:
            packed = tensor.dtype == torch.uint8  # which has a shape of its own
            allowed = [kind for kind in types if (kind == torch.uint8) == packed] or types
            raise ValueError(
                f"{slot} of {name} is {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}: "
                f"must be {' or '.join(map(str, allowed))} {tuple(shape)} on {weight.device}"
            )
        if tensor.dtype == torch.uint8 and not weight.is_contiguous():
            raise ValueError(
                f"{slot} of {name} is packed, which must be that of a contiguous weight: strides {weight.stride()}"
            )
        if tensor.dtype == torch.uint8 and tensor.data_ptr() % 4:
            raise ValueError(
                f"{slot} of {name} is packed and begins {tensor.data_ptr() % 4} bytes after a multiple of 4: "
                "must begin at one, as float32 scales are in it; use .clone()"
            )
        if shape == weight.shape and not same_order(shape, tensor.stride(), strides):
            raise ValueError(f"{slot} of {name} has strides {tensor.stride()}: must have {strides}, the weight's")


def _check_stack(
    rule: Rule | TensorRule, name: str, stack: Any, states: Sequence[Any], master: Any, engine: str | None
) -> None:
    """As `_check`, of what is stacked: the first of each, which tells of the others."""
    together = [stack, *states, *([] if master is None else [master])]
    if not all(map(_length, together)):
        raise TypeError(
            f"{name} and its states must be stacks: tensors with an axis more than what is stacked, of length >= 1"
        )
    plain = isinstance(rule, Rule) and not rule.kept and all(each.dtype != torch.uint8 for each in together)
    if not plain or choose_engine(stack.device, engine) == "eager":
        raise ValueError(
            f"{name} is a stack, which the eager engine, rules of whole tensors or that keep numbers, and packed states do "
            "not go with: use unbind()"
        )
    first, *others = (each.detach()[0] for each in together)
    if not is_dense(first) or any(each.stride(0) == 0 < len(each) - 1 for each in together):
        raise ValueError(f"what is stacked in {name} has gaps, or lies in one place: strides {stack.stride()}")
    for each in together:
        if len(each) != len(stack):
            raise ValueError(f"{name} is a stack of {len(stack)}, with states or masters of {len(each)}: must be as many")
    _check(rule, name, first, others[: len(states)], None if master is None else others[-1])


def _length(stack: Any) -> int:
    """How much is stacked; 0 of what is no stack."""
    return len(stack) if isinstance(stack, torch.Tensor) and stack.dim() else 0


def _types(rule: Rule | TensorRule, weight: torch.dtype) -> tuple[tuple[torch.dtype, ...], ...]:
    """The types that a rule's slots, and last the master, may have beside a weight of this type; the usual one first."""
    usual = (compute_dtype(weight),)
    if not isinstance(rule, Rule) or usual[0] == torch.float64:
        return (usual,) * (len(rule.slots) + 1)
    masters = [kind for kind in (torch.int16, weight) if storage.kind_of(weight, kind) not in (None, storage.FULL)]
    states = [(*usual, torch.bfloat16, torch.uint8)] * len(rule.state)
    return (*states, *[usual] * len(rule.kept), (*usual, *masters))


def _companions(
    rule: Rule | TensorRule, weight: torch.Tensor, states: Sequence[torch.Tensor], master: torch.Tensor | None
) -> list[tuple[torch.Tensor, torch.Size]]:
    """A weight's states, kept numbers and master, each with the shape that it must have."""
    pairs = list(zip(states, slot_shapes(rule, weight.shape, states), strict=True))
    return pairs if master is None else [*pairs, (master, weight.shape)]


def check_memory(name: str, tensor: Any) -> None:
    """Refuse what has elements, but no memory in which they are."""
    try:
        address = tensor.data_ptr() if isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided else 1
    except RuntimeError:
        address = 0
    if address or not tensor.numel() or tensor.device.type == "meta":  # which has none anywhere, and counts all the same
        return
    if is_wrapper(tensor):
        raise TypeError(f"{name} is a {type(tensor).__name__}, made of other tensors: rule updates take plain ones")
    raise ValueError(
        f"{name} has no memory: it has been freed (untyped_storage().resize_(0)), is of a class that only stands for "
        "other tensors, or was made inside torch.vmap: use tensors that have their elements in memory"
    )


def _check_gradient(name: str, weight: torch.Tensor, gradient: Any) -> None:
    if not isinstance(gradient, torch.Tensor):
        raise TypeError(f"the gradient of {name} must be a tensor or None, got {type(gradient).__name__}")
    if gradient.layout != torch.strided:
        raise TypeError(
            f"the gradient of {name} is sparse ({gradient.layout}), which rule updates do not take: "
            "use sparse=False in the layer, or gradient.to_dense()"
        )
    if gradient.dtype not in DTYPES:
        raise TypeError(f"the gradient of {name} is {gradient.dtype}: must be one of {', '.join(map(str, DTYPES))}")
    if gradient.shape != weight.shape or gradient.device != weight.device:
        raise ValueError(
            f"the gradient of {name} is {tuple(gradient.shape)} on {gradient.device}: "
            f"its weight is {tuple(weight.shape)} on {weight.device}"
        )
