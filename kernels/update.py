"""`Update`: one rule applied to a list of tensors. Groups, tables and kernels are made once and reused at every step."""

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
    addresses_of,
    allowed_types,
    are_apart,
    check_apart,
    check_gradient,
    check_not_inference,
    check_tensors,
    companions_of,
    one_of_each_storage,
    rooms_of,
    sizes_of,
)
from .graphs import RecordedUpdate, current_recording
from .guards import GradLayouts, PointerGuard, Reference, gradient_references
from .language import Rule, TensorRule
from .launch import FIRST_STATE, GRADIENT, WEIGHT, Launch, group_keys, in_matrices
from .layouts import first_alike
from .messages import instance
from .metrics import MetricsBuffer
from .reductions import reduce_nothing, run_reduction, run_reductions


class Update:
    """One update rule on a fixed list of weights. Call it to take a step; the kernels and tables are made once.

    The arithmetic is float64 for float64 weights and float32 for all others ("the arithmetic's type").

    Args:
        rule: the update rule.
        weights: floating-point tensors of any shape and layout. Tensors that have moved are found again by `bind`.
        states: for each weight a tuple of state tensors, in the order of `rule.state`, in the arithmetic's type. States of
            an elementwise float32 rule may also be bfloat16, or packed: one-dimensional uint8 or int8, encoded by `storage`.
            If you give a state or master new memory through `.data`, make a new `Update`; the change is not noticed.
        masters: for each weight its master copy in the arithmetic's type, or None. A bfloat16 weight may instead have a
            split master: int16, the 16 bits that it lacks of float32, or int8, the upper 8 of these.
        engine: "triton", "cpu", "eager" or None, the best engine for each weight's device (see `choose_engine`).
        names: names of the weights in error messages; default "weights[0]", "weights[1]", ...
        seed: an integer rounds everything that is stored as bfloat16, in 24 bits or packed stochastically, with different
            random numbers for each weight and update; `storage.CodesOnly(seed)` only packed states; None (default) rounds
            to nearest.
        grad_scale_and_skip: float32 tensor [2], read on the device at every step: a factor for all gradients, applied in
            addition to rescale_grad, and a flag that skips the step if it is not 0. None (default) means 1 and 0.
        zero_grads: fill the gradients with zeros in the same pass, also when the step is skipped. Default: False.
        alike: for each weight the first one that is alike, as are its states and its master, if that is known.
        numbers: further tensors of the caller, such as step counts, whose memory and layout `is_in_place` compares; it then
            notices also if a state or a master gets other memory through `.data`. Default: None.

    Attributes:
        hyper: float64 array [n_weights, 1 + n_hyper (+ 1 with a seed)]: rescale_grad, the rule's hyper-parameters, and the
            number of the update. Write it before a step, or call `broadcast_hyper`.
        rng_offsets: int64 array [n_weights] that selects each weight's random numbers; default 0, 1, ... Write it before
            `bind`.
        active: list of bool, whether each weight has a bound gradient; None if all have one. A new list after a change.
        launches: number of native calls or GPU launches in one step, without the rule's reductions.
        all_reduce_global: function `(tensor, "sum" or "max") -> None` that reduces the results of reductions over all
            tensors across processes, in place and without waiting for the device. The tensor has the widest type of the
            device. None (default) in a single process.
        all_reduce_per_tensor: the same for the results of reductions over each tensor, [n_weights, n_values], when several
            processes hold shards of the tensors.
        reduces_like: with `all_reduce_global`, for an update without weights in a process whose others have some: a tensor
            with their device and the dtype of their arithmetic. The update then takes part in reductions over all tensors.
        begun: whether `begin` has begun the step that the next call finishes.
        raising: the launches whose rule may raise for the values of tensors; see `compute_ahead`. Set by `bind`.
        host_only: if True, a call only writes `hyper` into the tables and launches nothing, for steps that a CUDA graph
            replays. Default: False.

    Raises:
        TypeError, ValueError: a type, dtype, shape or device does not match the rule or the weight.
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
        alike: Sequence[int] | None = None,
        numbers: Sequence[torch.Tensor] | None = None,
    ) -> None:
        instance("rule", rule, (Rule, TensorRule), "made with @rule or @tensor_rule")
        if isinstance(rule, Rule) and rule.parts is not None:
            raise TypeError(f"rule {rule.name!r} has means over parts of tensors: choose it in a @rule_by_shape")
        self.rule = rule
        self._reduces = bool(rule.reductions)
        self.weights = list(weights)
        self.states = list(states)
        self.masters = [None] * len(self.weights) if masters is None else list(masters)
        self.engine = engine
        n_weights = len(self.weights)
        self.seed, self.rng_offsets = seed, np.arange(n_weights)
        self.grad_scale_and_skip, self.zero_grads, self.host_only = grad_scale_and_skip, zero_grads, False
        self.all_reduce_global: Callable[[torch.Tensor, str], None] | None = None
        self.all_reduce_per_tensor: Callable[[torch.Tensor, str], None] | None = None
        self.reduces_like: torch.Tensor | None = None
        self._hyper = np.zeros((n_weights, 1 + len(rule.hyper) + (seed is not None)))
        self._row: list[float] | None = None  # one row for all weights that `_hyper` does not have yet
        self._names = [f"weights[{i}]" for i in range(len(self.weights))] if names is None else list(names)
        self._groups: list[Launch] = []
        self._keys: list[Any] = []  # the group key of each weight
        self._shapes: list[torch.Size] = []
        self._watched: list[torch.Tensor] = []  # the weights, and all states, masters and numbers or one of each storage
        self._numbers = numbers
        self._guard: PointerGuard | None = None
        # The bound gradients: references, a guard of those that are not None, and the layouts of all.
        self._references: list[Reference] | None = None
        self._gradient_guard: PointerGuard | None = None
        self._layouts: GradLayouts | None = None
        self._pointers: np.ndarray | None = None  # of the bound gradients, if `_layouts` returned them
        self._bound_gradients: Sequence[Any] | None = None  # the gradients themselves, from `bind` to the step
        self._own = False
        self.begun = self._is_ahead = False
        self.raising: list[Launch] = []
        self._into: MetricsBuffer | None = None  # the last buffer that was checked to have enough rows
        self._touched: list[torch.Tensor] = []  # weights that have a gradient
        self.active: list[bool] | None = None
        if grad_scale_and_skip is not None and (
            grad_scale_and_skip.shape != (2,) or grad_scale_and_skip.dtype != torch.float32
        ):
            raise ValueError(
                f"grad_scale_and_skip is {grad_scale_and_skip.dtype} {tuple(grad_scale_and_skip.shape)}: "
                "must be torch.float32 (2,)"
            )
        counts = {"states": len(self.states), "masters": len(self.masters), "names": len(self._names)}
        for what, count in counts.items():
            if count != len(self.weights):
                raise ValueError(f"{count} {what} for {len(self.weights)} weights: there must be as many")
        self._alike = alike  # until `bind`
        devices: set[torch.device] = set()
        for i in sorted(set(self._first_alike() if alike is None else alike)):  # weights of equal kinds are checked once
            name, weight, row, master = self._names[i], self.weights[i], self.states[i], self.masters[i]
            check_tensors(rule, name, weight, row, master)
            if weight.device not in devices:
                choose_engine(weight.device, engine)
            devices.add(weight.device)
        for name, weight in itertools.compress(
            zip(self._names, self.weights, strict=True), map(torch.Tensor.is_inference, self.weights)
        ):
            check_not_inference(name, weight)

    @property
    def hyper(self) -> np.ndarray:
        if self._row is not None:
            self._hyper[:], self._row = self._row, None
        return self._hyper

    def broadcast_hyper(self, row: list[float]) -> None:
        """Use one row of hyper-parameters, `[rescale_grad, ...]`, for all weights: a faster `hyper[:] = row`."""
        self._row = row

    @property
    def launches(self) -> int:
        return len(self._groups)

    def engines(self) -> list[str]:
        """Return the names of the engines that the steps use, sorted."""
        rule = self.rule
        return sorted(
            {
                engine_for(rule.rule_for(weight.shape), weight.device, self.engine, in_matrices(rule, weight, row))
                for weight, row in zip(self.weights, self.states, strict=True)
            }
        )

    @property
    def references(self) -> list[Reference]:
        """Weak references to the bound gradients; for a weight without gradient, a function that returns None."""
        return [] if self._references is None else self._references

    @property
    def groups(self) -> list[Launch]:
        """The launches of a step. `bind` makes a new list if it has to group the weights again."""
        return self._groups

    def forget_gradients(self) -> None:
        """Drop the bound gradients; the next step needs `bind` first."""
        self._references = self._pointers = None

    def fits(self, master_dtype: Callable[[torch.Tensor], torch.dtype | None] | None = None) -> bool:
        """Return whether states and masters still match the weights, which may have been moved, converted or resized.

        Args:
            master_dtype: function from a weight to the dtype that its master must have, None for no master; default: the
                masters are not compared.
        """
        for i in sorted(set(self._first_alike())):
            weight, row, master = self.weights[i], self.states[i], self.masters[i]
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
        return True

    def _first_alike(self, *gradients: Sequence[Any]) -> list[int]:
        """Return for each weight the first one that is alike, as are its states, its master and its gradient."""
        if len(set(map(len, self.states))) > 1:  # wrong, as `check_tensors` says
            return list(range(len(self.weights)))
        return first_alike(self.weights, *zip(*self.states, strict=True), self.masters, *gradients)

    def rebind(self, gradients: Sequence[Any], *, own: bool = False, in_place: bool = False) -> bool:
        """Bind gradients quickly if no tensor needs a check; return False if `bind` has to be called instead.

        That is so if weights and states have not moved, and the gradients are the bound ones or have the same layouts.

        Args:
            gradients: for each weight its gradient, or None to skip the weight.
            own: whether each gradient is its weight's `.grad`.
            in_place: whether the caller has already asked `is_in_place`, with the answer True.
        """
        self.begun = self._is_ahead = False
        if not (in_place or self.is_in_place()):
            return False
        # A weight of another dtype may have the old one's address. If `own`, its gradient shows the new dtype, too.
        if not own and [weight.dtype for weight in self.weights] != [key[1] for key in self._keys]:
            return False
        layouts = self._layouts
        looks = layouts is not None and bool(layouts.compiled) and not self.zero_grads  # new ones are as fast
        same = not looks and self._are_bound(gradients, own)
        present = gradients if self.active is None else _present(gradients)
        if not (same and self._gradient_guard is not None and self._gradient_guard.passes(present)):
            pointers = active = None
            if layouts is not None and len(gradients) == len(self.weights):
                before = self._references or []
                pointers = layouts.pointers(gradients, own, None, before)
                if pointers is None:
                    active = [gradient is not None for gradient in gradients]
                    pointers = None if all(active) else layouts.pointers(gradients, own, active, before)
                same = same or (looks and layouts.are_same)
            if pointers is None or (pointers is not self._pointers and np.bitwise_or.reduce(pointers) & 15):
                return False
            if not (looks and same and pointers is self._pointers and active == self.active):
                self._take(gradients, own, same, pointers, active)
        elif layouts is not None and self.active is None and self._gradient_guard.compiled:
            layouts.compile(gradients)
        self._bound_gradients = gradients
        return True

    def _are_bound(self, gradients: Sequence[Any], own: bool) -> bool:
        references = self._references
        return (
            references is not None
            and own == self._own
            and len(gradients) == len(references)
            and (not references or references[0]() is gradients[0])  # quick answer if all are new
            and all(map(operator.is_, [reference() for reference in references], gradients))
        )

    def _take(
        self, gradients: Sequence[Any], own: bool, same: bool, pointers: np.ndarray, active: list[bool] | None
    ) -> None:
        """Bind recognized gradients at these addresses; `same`: whether they are the bound ones."""
        if self.zero_grads:
            self._check_gradients_apart(gradients)
        if not same:
            self._references, self._own = gradient_references(gradients), own
        self._activate(active)
        # Gradients that are new now are usually new at the next step, too: make a guard only once they stay.
        self._gradient_guard = PointerGuard(gradients if active is None else _present(gradients)) if same else None
        bound: list[Any] = self.references
        if active is not None:
            bound = [reference if wanted else None for reference, wanted in zip(bound, active, strict=True)]
        for group in self._groups:
            group.rebind(None if pointers is self._pointers else pointers, bound)
        self._pointers = pointers

    def _activate(self, active: list[bool] | None) -> None:
        if active != self.active:
            self.active = active
        self._touched = self.weights if active is None else list(itertools.compress(self.weights, active))

    def bind(self, gradients: Sequence[torch.Tensor | None], *, own: bool = False) -> None:
        """Check gradients and use them in the following steps. Changes no weight.

        They are kept alive only until the next step. Bind again to step with other gradients, or after they have moved.

        Args:
            gradients: for each weight its gradient, or None to skip the weight.
            own: whether each gradient is its weight's `.grad`, so that torch has checked its shape and device already.

        Raises:
            TypeError, ValueError: a gradient does not match its weight, or a weight its states.
        """
        if len(gradients) != len(self.weights):
            raise ValueError(f"{len(gradients)} gradients for {len(self.weights)} weights: there must be as many")
        if self.rebind(gradients, own=own):
            return
        if self.zero_grads:
            self._check_gradients_apart(gradients)
        self._layouts = self._references = self._pointers = None
        self._bind(gradients)
        self._own, self._bound_gradients = own, gradients
        plain = all(g.aligned and not g.sources and not g.copied for g in self._groups)
        if plain:  # a weight that never had a gradient is grouped as if its gradient had the weight's dtype
            pairs = zip(self.weights, gradients, strict=True)
            like = [weight if gradient is None else gradient for weight, gradient in pairs]
            if [tensor.dtype for tensor in like] == [key[2] for key in self._keys]:
                self._layouts = GradLayouts(like, own)
        if self._layouts is None:  # else a guard is made once gradients stay
            self._gradient_guard = PointerGuard(_present(gradients))

    def _bind(self, gradients: Sequence[torch.Tensor | None]) -> None:
        addresses = [
            addresses_of(self._names, self.weights),
            addresses_of((f"the gradient of {name}" for name in self._names), gradients),
        ]
        if self._alike is None:
            first = self._first_alike(gradients)
        else:
            first, self._alike = first_alike(self.weights, gradients, also=self._alike), None
        kinds = sorted(set(first))
        for i in kinds:
            name, weight, gradient = self._names[i], self.weights[i], gradients[i]
            if gradient is not None:
                check_gradient(name, weight, gradient)
            for tensor, shape in companions_of(self.rule, weight, self.states[i], self.masters[i]):
                if tensor.shape != shape:  # `.data` may have made the weight a part of its memory
                    raise ValueError(
                        f"{name} has shape {tuple(weight.shape)}, its state {tuple(tensor.shape)}: a weight may be moved or "
                        "converted between steps, but not change its shape"
                    )
                if tensor.device != weight.device:
                    raise ValueError(f"{name} is on {weight.device}, its state on {tensor.device}: must be on one device")
        shape_of = {i: self.weights[i].shape for i in kinds}
        shapes = list(map(shape_of.__getitem__, first))
        companions = [*zip(*self.states, strict=True), self.masters]
        addresses += [list(map(torch.Tensor.data_ptr, column)) for column in companions[:-1]]
        addresses.append([0 if master is None else master.data_ptr() for master in self.masters])
        starts = np.array(addresses, dtype=np.int64).reshape(len(addresses), len(first))
        sizes = sizes_of(first, [self.weights, gradients, *companions])
        if self.weights:  # else there are no columns of states
            self._check_room(sizes, gradients, companions)
        keys = group_keys(self.rule, first, starts, self.weights, gradients, self.states, self.masters)
        if self._keys:  # a skipped weight stays in the group where it was
            keys = [old if gradient is None else new for old, new, gradient in zip(self._keys, keys, gradients, strict=True)]
        if keys != self._keys or shapes != self._shapes or not self.is_in_place():
            members: dict[Any, list[int]] = {}
            if len(set(map(id, keys))) == 1:
                members[keys[0]] = list(range(len(keys)))
            else:
                for i, key in enumerate(keys):
                    members.setdefault(key, []).append(i)
            for indices in members.values():
                at = slice(None) if len(members) == 1 else indices
                if not are_apart(starts[:, at], sizes[:, at]):
                    self._check_apart(indices, gradients)
            self._groups = [self._launch(key, indices, starts, first) for key, indices in members.items()]
            self._watch(companions, starts)
            self._keys, self._shapes = keys, shapes
            self.raising = [group for group in self._groups if group.may_raise]
        active = [gradient is not None for gradient in gradients]
        self._references, self._gradient_guard = gradient_references(gradients), None
        self._activate(None if all(active) else active)
        for group in self._groups:
            group.bind(gradients, starts[GRADIENT], self._references, _alike_of(group.indices, first))

    def _check_room(
        self, sizes: np.ndarray, gradients: Sequence[torch.Tensor | None], companions: Sequence[Sequence[Any]]
    ) -> None:
        """Raise ValueError if a storage ends before its tensor does, as torch lets users resize storages.

        `sizes` has the bytes that weights, gradients and each of `companions`, columns of states and masters, reach over.
        """
        columns: Any = (self.weights, gradients, *companions)
        for what, tensors, needed in zip(("weight", "gradient", *self.rule.slots, "master"), columns, sizes, strict=True):
            for i in np.flatnonzero(needed > rooms_of(tensors)) if needed.any() else ():
                name = self._names[i] if what == "weight" else f"the {what} of {self._names[i]}"
                raise ValueError(
                    f"{name}, of shape {tuple(tensors[i].shape)}, has less memory than elements: its storage was freed or "
                    "made smaller, as by untyped_storage().resize_(); make it as large again"
                )

    def _check_gradients_apart(self, gradients: Sequence[Any]) -> None:
        """Raise ValueError if gradients that the step clears share memory."""
        named = [(f"the gradient of {name}", each) for name, each in zip(self._names, gradients, strict=True)]
        check_apart(
            [(name, each) for name, each in named if isinstance(each, torch.Tensor) and each.layout == torch.strided]
        )

    def _check_apart(self, members: Sequence[int], gradients: Sequence[torch.Tensor | None]) -> None:
        """Raise ValueError if tensors of one launch share memory; what is only read may be the weight or a state itself.

        An element is read before it is written, so that a gradient may be its weight, unless it is cleared.
        """
        written: list[tuple[str, torch.Tensor]] = []
        read: list[tuple[str, torch.Tensor]] = []
        changed = {*getattr(self.rule, "changed", self.rule.slots), *self.rule.kept, "master"}
        for i in members:
            name, weight = self._names[i], self.weights[i]
            companions = companions_of(self.rule, weight, self.states[i], self.masters[i])
            slots = [(slot, tensor) for slot, (tensor, _) in zip((*self.rule.slots, "master"), companions, strict=False)]
            own = [(name, weight), *((f"{slot} of {name}", tensor) for slot, tensor in slots if slot in changed)]
            others = [(f"{slot} of {name}", tensor) for slot, tensor in slots if slot not in changed]
            if (gradient := gradients[i]) is not None:
                (own if self.zero_grads else others).append((f"the gradient of {name}", gradient))
            places = {tensor.data_ptr() for _, tensor in own}
            written += own
            read += [pair for pair in others if pair[1].data_ptr() not in places]
        check_apart(written, read)

    def _launch(self, key: Any, indices: list[int], starts: np.ndarray, first: Sequence[int]) -> Launch:
        device, _, gradient_dtype, types, aligned, rule, in_order = key
        make = launch_class(engine_for(rule, device, self.engine, in_order), isinstance(rule, TensorRule))
        weights, masters = ([of[i] for i in indices] for of in (self.weights, self.masters))
        states = [self.states[i] for i in indices]
        if make.looks_at_tensors or rule.kept:  # else only at their addresses, which stay
            states = [tuple(map(torch.Tensor.detach, row)) for row in states]
            masters = [None if master is None else master.detach() for master in masters]
        places = list(map(self.rule.slots.index, rule.slots))
        if rule.slots != self.rule.slots:  # a rule for these shapes, which has some of the states
            states = [tuple(map(row.__getitem__, places)) for row in states]
        slots = [FIRST_STATE + place for place in places[: len(rule.state)]]
        slots = [WEIGHT, GRADIENT, *slots, *([] if types[-1] is None else [-1])]
        rows: Any = slice(None)
        if len(indices) < len(self.weights):
            rows = np.array(indices)
        launch: Launch = make(
            *(rule, weights, states, None if types[-1] is None else masters, gradient_dtype, aligned),
            *(self.seed, self.grad_scale_and_skip, self.zero_grads),
            *(indices, rows, self.rule.hyper, self.rng_offsets, starts[:, rows][slots]),
            _alike_of(indices, first),
        )
        launch.engine = self.engine
        return launch

    def is_in_place(self) -> bool:
        """Return whether weights and states have the addresses that they had when gradients were bound."""
        return self._guard is not None and self._guard.passes(self._watched)

    def _watch(self, companions: Sequence[Sequence[torch.Tensor | None]], addresses: np.ndarray) -> None:
        """Note the `addresses` of weights, gradients, and columns of states and masters; 0 for None."""
        kinds = set(map(type, self.masters))
        n_columns = len(companions) - (kinds == {type(None)})  # without the masters if there is none
        tensors: list[Any] = list(itertools.chain.from_iterable(companions[:n_columns]))
        pointers = addresses[FIRST_STATE : FIRST_STATE + n_columns].ravel().tolist()
        if n_columns == len(companions) and type(None) in kinds:
            there = [tensor is not None for tensor in tensors]
            tensors, pointers = list(itertools.compress(tensors, there)), list(itertools.compress(pointers, there))
        if self._numbers is None:
            # Aliases keep their memory if somebody assigns to the original's `.data`. They move only together with their
            # storage, as by share_memory_(), so it is enough to have and to watch one of each storage.
            anchors = one_of_each_storage(tensors, pointers)
            tensors, pointers = list(map(torch.Tensor.detach, anchors)), list(map(torch.Tensor.data_ptr, anchors))
        else:
            tensors, pointers = [*tensors, *self._numbers], [*pointers, *map(torch.Tensor.data_ptr, self._numbers)]
        self._watched = [*self.weights, *tensors]
        self._guard = PointerGuard(self._watched, [*addresses[WEIGHT].tolist(), *pointers])

    def __call__(self, into: MetricsBuffer | None = None) -> None:
        """Run one step with the bound gradients and the values in `hyper`.

        Args:
            into: a `MetricsBuffer`: compute its metric in the same pass, and write the values of weight i to row
                `rng_offsets[i]`. None (default) computes no metric.

        Raises:
            RuntimeError: no gradients are bound, or one of them has been deleted since; nothing has changed.
            ValueError: `into` was given, and the weights are on several devices or it has too few rows.
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
            self._refuse_to_capture_strided()
            recording.updates.append(RecordedUpdate(self))
        if into is not None and into is not self._into:
            self._check_rows(into)
        if self._bound_gradients is None:
            self._dereference()
        if self._reduces or self.raising:
            self._run_after_reductions(into)
        else:
            for group in self._groups:
                group.run(hyper, into)
        increment_version(self._touched)  # as `count_change`
        if self.zero_grads:
            increment_version(_present(self._bound_gradients or ()))
        self._bound_gradients = None

    @torch.no_grad()
    def begin(self) -> list[torch.Tensor]:
        """Begin a step: run the rule's first reduction, which is over all tensors.

        The caller joins the results over several updates; the next call finishes the step.

        Returns:
            The result of each launch, [n_weights, n_values] with equal rows, to be replaced in place.

        Raises:
            RuntimeError: as in a call.
        """
        if self._bound_gradients is None:
            self._dereference()
        for group in self._groups:
            group.begin(self.hyper)
        run_reduction(self._groups, 0)
        self.begun = True
        if not self._groups and self.reduces_like is not None:
            return [self.reduces_like.new_zeros(1, self.rule.reductions[0].n_values)]
        return [group.totals[0] for group in self._groups]

    def _dereference(self) -> None:
        """Hold the bound gradients for one more step; raise RuntimeError if some have been deleted."""
        self._bound_gradients = None if self._references is None else [reference() for reference in self._references]
        if self._bound_gradients is None or len(_present(self._bound_gradients)) < len(self._touched):
            raise RuntimeError("there are no gradients to step with, or some of them have been deleted: bind() them first")

    def repeats(self) -> list[tuple[np.ndarray, np.ndarray, Callable[[], None]]]:
        """Return what repeats the last step without any check, for simulations: only values may have changed since.

        No autograd graph may need the weights, the rule must have no reductions, gradients no scale, nothing may be rounded
        at random, and all tensors must be dense.

        Returns:
            For each launch: the hyper-parameters that it reads, to be written before; which rows of `hyper` they are; and
            the function that runs it.
        """
        return [(group.hyper, group.rows, group.unconditional()) for group in self._groups]

    def count_change(self) -> None:
        """Count a write to each updated weight, so that autograd notices if an older graph still needs its old value."""
        increment_version(self._touched)

    def total(self) -> torch.Tensor:
        """Return the result of the rule's first reduction, which must be over all tensors: a tensor without dimensions."""
        return self._groups[0].totals[0][0, 0]

    def compute_ahead(self) -> None:
        """Compute new values where a rule may raise, and write none of them; the next call finishes the step.

        A step of several updates calls it for all of them before the first writes.
        """
        if not self.raising or self._is_ahead:
            return
        if self._bound_gradients is None:
            self._dereference()
        with torch.no_grad():
            self._run_reductions()
            for group in self.raising:
                group.compute_ahead()
        self._is_ahead = True

    @torch.no_grad()
    def _run_after_reductions(self, into: MetricsBuffer | None) -> None:
        if self.raising:
            self.compute_ahead()
        else:
            self._run_reductions()
        self._is_ahead = False
        for group in reversed(self._groups):  # the last group read by the reductions is still in the cache
            group.run_rule(into)
            group.end()

    def _run_reductions(self) -> None:
        """Begin the step, unless `begin` has, and run the rule's reductions, if it has any."""
        hyper: Any = self.hyper if self._row is None or self.seed is not None else self._row
        for group in () if self.begun else self._groups:
            group.begin(hyper)
        joins = self.all_reduce_global, self.all_reduce_per_tensor
        if self._groups and self._reduces:
            run_reductions(self._groups, len(self.weights), *joins, self.begun)
        elif self.reduces_like is not None and self.all_reduce_global is not None:
            reduce_nothing(self.rule, self.reduces_like, self.all_reduce_global, self.begun)
        self.begun = False

    @property
    def keeps_numbers(self) -> bool:
        """Whether a CUDA graph of a step keeps some of its numbers, as those of a rule of whole tensors do."""
        return isinstance(self.rule, TensorRule)

    def graph_forms(self) -> list[Any]:
        """Return `graph_form` of all launches for the numbers in `hyper`."""
        if not self.keeps_numbers:
            return []
        for group in self._groups:
            group.write_hyper(self.hyper)
        return [group.graph_form() for group in self._groups]

    def _refuse_to_capture_strided(self) -> None:
        """Raise RuntimeError if torch's operations step a weight, because the compiled engines cannot walk its rows."""
        if not any(group.looks_at_tensors and group.parts is not None for group in self._groups):
            return
        rows = zip(self._names, self.weights, self.states, strict=True)
        strided = [
            f"{name} (shape {tuple(weight.shape)}, strides {weight.stride()})"
            for name, weight, states in rows
            if not in_matrices(self.rule, weight, states)
        ]
        raise RuntimeError(
            f"{', '.join(strided[:8])}: rule {self.rule.name!r} steps weights whose rows do not follow each other in "
            "memory, such as transposed or channels_last ones, by torch operations with numbers from the host, which a "
            "CUDA graph would never update; make the optimizer of weights that are .contiguous(), or of the model after "
            ".to(memory_format=torch.contiguous_format), or do not capture its steps"
        )

    def _check_rows(self, into: MetricsBuffer) -> None:
        if len({group.device for group in self._groups}) > 1:
            raise ValueError(
                "the weights are on several devices, so their metrics need several buffers: make an Update for each"
            )
        if self.rng_offsets.max(initial=-1) >= into.n_rows:
            raise ValueError(
                f"the buffer has {into.n_rows} rows, the offset of a weight is {self.rng_offsets.max()}: make n_rows larger"
            )
        self._into = into


def _alike_of(indices: Sequence[int], first: Sequence[int]) -> Sequence[int]:
    """Return for each of some weights the place in `indices` of the first of them that is alike."""
    if len(indices) == len(first):
        return first
    places: dict[int, int] = {}
    return [places.setdefault(first[i], k) for k, i in enumerate(indices)]


def _present(gradients: Sequence[Any]) -> list[Any]:
    return [gradient for gradient in gradients if gradient is not None]
