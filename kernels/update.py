"""`Update`: one rule on a list of tensors. Groups, tables and kernels are made once and used at every step."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.autograd.graph import increment_version

from . import storage
from .backends import choose_engine, engine_for, launch_class
from .checks import (
    allowed_types,
    check_gradient,
    check_memory,
    check_own_memory,
    check_stack,
    check_tensors,
    companions_of,
    stack_length,
    tensor_kind,
)
from .graphs import RecordedUpdate, current_recording
from .guards import GradLayouts, PointerGuard, Reference, gradient_references
from .language import Rule, TensorRule
from .launch import Launch, group_key
from .metrics import MetricsBuffer
from .reductions import run_reductions


class Update:
    """One rule on a fixed list of weights: groups, tables and kernels are made once and used at every step.

    Args:
        rule: the update rule.
        weights: floating-point tensors of any shape and layout. They are read again if they have moved.
        states: for each weight its state tensors, in the order of `rule.state`, each in the arithmetic's type or, where that
            is float32 and the rule is elementwise, in bfloat16, or packed as `storage` has it, uint8 or int8 of one
            dimension.
            States and masters that are given other memory through `.data` are not followed: make another `Update` then.
        masters: for each weight its copy in the arithmetic's type, or None where there is none. Alongside a bfloat16 weight
            it may be int16, the bits that the weight lacks, or int8, the upper 8 of them (split masters), and alongside a
            16-bit weight of the weight's type, what rounding took off (Kahan's compensation).
        engine: as for `choose_engine`.
        names: what messages call the weights; default "weights[0]" and so on.
        seed: round stochastically what is stored as bfloat16, in 24 bits or packed, each update of each weight with random
            numbers of its own; `storage.CodesOnly(seed)` does so for packed states only, None (the default) for nothing.
        grad_scale_and_skip: float32 [2], read on the device at every step: a factor for all gradients in addition to
            rescale_grad, and whether (not 0) to skip the step. Default: None, as 1 and 0.
        zero_grads: fill the gradients with zeros in the same pass, those of a skipped step, too.
        stacked: whether each weight, with what belongs to it, is a stack of as many weights as its first axis is long, of
            which each has hyper-parameters of its own. The host does as much for it as for one weight. Not for the eager
            engine, nor for rules with per-tensor states.

    Attributes:
        hyper: float64 [n_weights, 1 + n_hyper], of stacks all that is in them, one after the other; rescale_grad and the
            rule's hyper-parameters, then, if there is a seed, the update's number. Write here before a step, or give one row
            for all to `broadcast_hyper`.
        rng_offsets: int64 [n_weights], by which weights have random numbers of their own; 0, 1, ... by default. Write here
            before `bind`.
        active: for each weight whether a gradient is bound to it; None if all have one. Another object once that changes.
        launches: native calls or GPU launches of a step, those of the rule's reductions not counted.
        all_reduce_global: called with what a reduction over all tensors has found, in the widest type that the device has,
            and "sum" or "max"; to put there, in place, what several processes have found together, without waiting for the
            device. None (the default) in a single process.
        all_reduce_per_tensor: the same for what a reduction over each tensor has found, [n_weights, n_values], where
            processes have parts of the tensors.
        host_only: whether a call only writes `hyper` into the tables and launches nothing, for steps whose kernels are
            replayed by a CUDA graph.

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
        grad_scale_and_skip: torch.Tensor | None = None,
        zero_grads: bool = False,
        stacked: bool = False,
    ) -> None:
        if not isinstance(rule, (Rule, TensorRule)):
            raise TypeError(f"rule must be made with @rule or @tensor_rule, got {type(rule).__name__}")
        self.rule = rule
        self._reduces = bool(rule.reductions)
        self.weights = list(weights)
        self.states = list(states)
        self.masters = [None] * len(self.weights) if masters is None else list(masters)
        self.engine = engine
        self.stacked = stacked
        n_weights = sum(map(stack_length, self.weights)) if stacked else len(self.weights)
        self.seed, self.rng_offsets = seed, np.arange(n_weights)
        self.grad_scale_and_skip, self.zero_grads, self.host_only = grad_scale_and_skip, zero_grads, False
        self.all_reduce_global: Callable[[torch.Tensor, str], None] | None = None
        self.all_reduce_per_tensor: Callable[[torch.Tensor, str], None] | None = None
        self._hyper = np.zeros((n_weights, 1 + len(rule.hyper) + (seed is not None)))
        self._row: list[float] | None = None  # what is to be in all rows of it, and is not there yet
        self._names = [f"weights[{i}]" for i in range(len(self.weights))] if names is None else list(names)
        self._groups: list[Launch] = []
        self._keys: list[Any] = []  # of the groups, by weight
        self._shapes: list[torch.Size] = []
        self._guard: PointerGuard | None = None  # of the weights, and one tensor of each memory that their states are in
        # The bound gradients: references, pointers and strides of those that are not missing, and the layouts of all.
        self._references: list[Reference] | None = None
        self._gradient_guard: PointerGuard | None = None
        self._layouts: GradLayouts | None = None
        self._alive: Sequence[Any] | None = None  # the gradients themselves, from `bind` to the step
        self._own = False
        self._into: MetricsBuffer | None = None  # what has rows enough
        self._touched: list[torch.Tensor] = []  # weights that have a gradient
        self.active: list[bool] | None = None
        if grad_scale_and_skip is not None and (
            grad_scale_and_skip.shape != (2,) or grad_scale_and_skip.dtype != torch.float32
        ):
            raise ValueError(
                f"control is {grad_scale_and_skip.dtype} {tuple(grad_scale_and_skip.shape)}: must be torch.float32 (2,)"
            )
        counts = {"states": len(self.states), "masters": len(self.masters), "names": len(self._names)}
        for what, count in counts.items():
            if count != len(self.weights):
                raise ValueError(f"{count} {what} for {len(self.weights)} weights: there must be as many")
        known: set[Any] = set()  # many weights are often views of one array: those alike are checked once
        for name, weight, row, master in zip(self._names, self.weights, self.states, self.masters, strict=True):
            kind = tensor_kind(weight, *row, master)
            if kind is None or kind not in known or weight.is_inference():
                if stacked:
                    check_stack(rule, name, weight, row, master, engine)
                else:
                    check_tensors(rule, name, weight, row, master)
                if weight.device not in known:
                    choose_engine(weight.device, engine)
                known.update((kind, weight.device))
        # Aliases, which stay as they are where somebody gives the tensors other memory. Only all that share a storage can
        # move then, as by share_memory_(), so that one of each tells.
        self._states = [tuple(state.detach() for state in row) for row in self.states]
        self._masters = [None if master is None else master.detach() for master in self.masters]
        companions = [*itertools.chain.from_iterable(self._states), *_present(self._masters)]
        anchors = {each.untyped_storage().data_ptr(): each for each in companions if each.numel()}
        self._watched = [*self.weights, *anchors.values()]

    @property
    def hyper(self) -> np.ndarray:
        if self._row is not None:
            self._hyper[:], self._row = self._row, None
        return self._hyper

    def broadcast_hyper(self, row: list[float]) -> None:
        """As `hyper[:] = row`, and quicker: one row of hyper-parameters for all weights."""
        self._row = row

    @property
    def launches(self) -> int:
        return len(self._groups)

    def engines(self) -> list[str]:
        """The engines in use, each once."""
        rules = [(self.rule.rule_for(weight.shape), weight.device) for weight in self.weights]
        return sorted({engine_for(rule, device, self.engine) for rule, device in rules})

    @property
    def references(self) -> list[Reference]:
        """Weak references to the bound gradients; functions that return None for weights that are skipped."""
        return [] if self._references is None else self._references

    @property
    def groups(self) -> list[Launch]:
        """The launches of a step; another list once they are formed again."""
        return self._groups

    def forget_gradients(self) -> None:
        """A step needs `bind` first then."""
        self._references = None

    def fits(self, master_dtype: Callable[[torch.Tensor], torch.dtype | None] | None = None) -> bool:
        """Whether states and masters still match the weights; a model may have been moved, converted or cut.

        Args:
            master_dtype: the type of the master that a weight is to have, or None; by default those have one that had one.
        """
        known: set[Any] = set()
        for weight, row, master in zip(self.weights, self.states, self.masters, strict=True):
            kind = tensor_kind(weight, *row, master)
            if kind is not None and kind in known:
                continue
            if master_dtype is not None and master_dtype(weight) != (None if master is None else master.dtype):
                return False
            pairs = zip(
                companions_of(self.rule, weight, row, master),
                allowed_types(self.rule, weight.dtype, weight.shape),
                strict=False,
            )
            if not all(
                tensor.device == weight.device
                and tensor.dtype in types
                and tensor.shape == shape
                and (tensor is master or tensor.dtype not in storage.PACKED or weight.is_contiguous())
                for (tensor, shape), types in pairs
            ):
                return False
            known.add(kind)
        return True

    def rebind(self, gradients: Sequence[Any], *, own: bool = False, in_place: bool = False) -> bool:
        """As `bind`, if that needs no check of each tensor: weights and states have not moved, and these are the bound
        gradients or others that differ in nothing but their pointers. Returns False where `bind` has to check.

        Quick: asked at every step.

        Args:
            gradients, own: as for `bind`.
            in_place: that the caller knows what `is_in_place` says.
        """
        if not (in_place or self.is_in_place()):
            return False
        # A weight of another type may be at the address of the last one. If `own`, its gradient has that type, too.
        if not own and [weight.dtype for weight in self.weights] != [key[1] for key in self._keys]:
            return False
        references = self._references
        same = (
            references is not None
            and own == self._own
            and len(gradients) == len(references)
            and (not references or references[0]() is gradients[0])  # where all are new, the first tells
            and all(map(operator.is_, [reference() for reference in references], gradients))
        )
        present = gradients if self.active is None else _present(gradients)
        if not (same and self._gradient_guard is not None and self._gradient_guard.passes(present)):
            pointers = active = None
            if self._layouts is not None and len(gradients) == len(self.weights):
                pointers = self._layouts.pointers(gradients, own)
                if pointers is None:
                    active = [gradient is not None for gradient in gradients]
                    pointers = None if all(active) else self._layouts.pointers(gradients, own, active)
            if pointers is None or np.bitwise_or.reduce(pointers) & 15:
                return False
            if self.zero_grads:
                check_own_memory(self._names, gradients)
            if not same:
                self._references, self._own = gradient_references(gradients), own
            self._activate(active)
            # Gradients that are new now will be new at the next step as a rule, so the guard waits until they are not.
            self._gradient_guard = PointerGuard(gradients if active is None else _present(gradients)) if same else None
            bound: list[Any] = self.references
            if active is not None:
                bound = [each if there else None for each, there in zip(bound, active, strict=True)]
            for group in self._groups:
                group.rebind(pointers, bound)
        self._alive = gradients
        return True

    def _activate(self, active: list[bool] | None) -> None:
        if active != self.active:
            self.active = active
        self._touched = self.weights if active is None else list(itertools.compress(self.weights, active))

    def bind(self, gradients: Sequence[torch.Tensor | None], *, own: bool = False) -> None:
        """Use these gradients in the next steps; None skips a weight. Checks everything, changes no weight.

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
            check_own_memory(self._names, gradients)
        self._layouts = self._references = None
        self._bind(gradients)
        self._own, self._alive = own, gradients
        plain = not self.stacked and all(g.aligned and not g.sources and not g.copied for g in self._groups)
        if plain:  # the group of a weight without a gradient expects one like the weight, unless it has had another
            pairs = zip(self.weights, gradients, strict=True)
            like = [weight if gradient is None else gradient for weight, gradient in pairs]
            if all(each.dtype == key[2] for each, key in zip(like, self._keys, strict=True)):
                self._layouts = GradLayouts(like, own)

    def _bind(self, gradients: Sequence[torch.Tensor | None]) -> None:
        known: set[Any] = set()
        for name, weight, gradient, row, master in zip(
            self._names, self.weights, gradients, self.states, self.masters, strict=True
        ):
            check_memory(name, weight)
            if gradient is not None:
                check_memory(f"the gradient of {name}", gradient)
            kind = tensor_kind(weight, gradient, *row, master)
            if kind is not None and kind in known:
                continue
            known.add(kind)
            if gradient is not None:
                check_gradient(name, weight, gradient)
            for tensor, shape in companions_of(self.rule, weight, row, master):
                if tensor.shape != shape:  # the weight may have been cut to a part of its memory
                    raise ValueError(
                        f"{name} has shape {tuple(weight.shape)}, its state {tuple(tensor.shape)}: a weight may be moved or "
                        "converted between steps, but not change its shape"
                    )
                if tensor.device != weight.device:
                    raise ValueError(f"{name} is on {weight.device}, its state on {tensor.device}: must be on one device")
        shapes = [weight.shape for weight in self.weights]
        states = [row[: len(self.rule.state)] for row in self.states]
        rows = zip(self.weights, gradients, states, self.masters, strict=True)
        keys = [(*group_key(*row, self.stacked), self.rule.rule_for(row[0].shape)) for row in rows]
        if self._keys:  # a skipped weight stays in the group where it was
            keys = [old if gradient is None else new for old, new, gradient in zip(self._keys, keys, gradients, strict=True)]
        if keys != self._keys or shapes != self._shapes or not self.is_in_place():
            members: dict[Any, list[int]] = {}
            for i, key in enumerate(keys):
                members.setdefault(key, []).append(i)
            self._groups = [self._launch(key, indices) for key, indices in members.items()]
            self._guard = PointerGuard(self._watched)
            self._keys, self._shapes = keys, shapes
        self._references, self._gradient_guard = gradient_references(gradients), PointerGuard(_present(gradients))
        active = [gradient is not None for gradient in gradients]
        self._activate(None if all(active) else active)
        for group in self._groups:
            group.bind(gradients, self._references)

    def _launch(self, key: Any, indices: list[int]) -> Launch:
        """That of these weights, which have this key in common."""
        device, _, gradient_dtype, types, aligned, rule = key
        make = launch_class(engine_for(rule, device, self.engine), isinstance(rule, TensorRule))
        weights, states, masters = ([of[i] for i in indices] for of in (self.weights, self._states, self._masters))
        rows: Any = slice(None)
        if len(indices) < len(self.weights):
            counts = list(map(len, self.weights)) if self.stacked else 1
            rows = np.flatnonzero(np.isin(np.repeat(np.arange(len(self.weights)), counts), indices))
        return make(
            *(rule, weights, states, None if types[-1] is None else masters, gradient_dtype, aligned),
            *(self.seed, self.grad_scale_and_skip, self.zero_grads, self.stacked),
            *(indices, rows, self.rule.hyper, self.rng_offsets),
        )

    def is_in_place(self) -> bool:
        """Whether weights and states are where they were when gradients were bound."""
        return self._guard is not None and self._guard.passes(self._watched)

    def __call__(self, into: MetricsBuffer | None = None) -> None:
        """Run one step with the bound gradients and the values in `hyper`.

        Args:
            into: where to put the values of its metric, of each weight in the row of its `rng_offsets`; see `MetricsBuffer`.

        Raises:
            RuntimeError: no gradients are bound, or one of them has been deleted since; nothing has changed.
            ValueError: weights on several devices, or more than `into` has rows for.
        """
        hyper: Any = self.hyper if self._row is None or self.seed is not None else self._row
        if self.host_only:
            for group in self._groups:
                group.write_hyper(hyper)
            self.count_change()
            return
        if (recording := current_recording.get()) is not None:
            if into is not None:
                raise RuntimeError("telemetry is written to another place at every step, which a CUDA graph cannot do")
            recording.updates.append(RecordedUpdate(self))
        if into is not None and into is not self._into:
            self._check_rows(into)
        if self._alive is None and not self._revive():
            raise RuntimeError("there are no gradients to step with, or some of them have been deleted: bind() them first")
        if not self._reduces:
            for group in self._groups:
                group.run(hyper, into)
        else:
            self._run_after_reductions(hyper, into)
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
        """Repeat the step right after a call, if only numbers have changed since then: nothing is checked.

        Whoever repeats steps calls `count_change` after the last one. The rule must have no reductions.

        Args:
            same: that `hyper` is as it was.
        """
        for group in self._groups:
            if same and not (group.sources or group.copied):
                group.compute()
            else:
                group.run(self.hyper)

    def count_change(self) -> None:
        """So that autograd notices, if a graph from before the step is still in use."""
        increment_version(self._touched)

    def total(self) -> torch.Tensor:
        """What the first of the rule's reductions, one over all tensors, has found: a tensor without dimensions."""
        return self._groups[0].totals[0][0, 0]

    @torch.no_grad()
    def _run_after_reductions(self, hyper: Any, into: MetricsBuffer | None) -> None:
        for group in self._groups:
            group.begin(hyper)
        run_reductions(
            self._groups, self.rule.reductions, len(self.weights), self.all_reduce_global, self.all_reduce_per_tensor
        )
        for group in reversed(self._groups):  # what the reductions have read last is still cached
            group.run_rule(into)
            group.end()

    def _check_rows(self, into: MetricsBuffer) -> None:
        if len({group.device for group in self._groups}) > 1:
            raise ValueError("weights on several devices, whose metrics cannot go into one buffer: make an Update of each")
        if self.rng_offsets.max(initial=-1) >= into.n_rows:
            raise ValueError(
                f"the buffer has {into.n_rows} rows, the offset of a weight is {self.rng_offsets.max()}: make them larger"
            )
        self._into = into


def _present(gradients: Sequence[Any]) -> list[Any]:
    return [gradient for gradient in gradients if gradient is not None]
