"""The eager backend: runs rules as torch operations on any device; the reference for the other backends."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from .. import storage, streams
from ..graphs import current_recording
from ..language import StagedRule
from ..launch import Launch, itself
from ..layouts import widest
from ..metrics import MetricsBuffer
from ..transforms.limited import factor_of
from . import computed_by
from .triton.upload import CAPTURED

TILE = 65536  # elements; on a CPU, a rule's temporaries of this size stay in its caches
ALONE = 16384  # elements; torch divides longer sums among threads, and the number of threads would affect the result
JOIN_UP_TO = 4096  # elements; smaller tensors with equal hyper-parameters are computed as one


class Limit(NamedTuple):
    """The limits up to which tensors of equal shape are stacked and updated together, as bytes of temporaries.

    These are the weight, the gradient and the states, old and new: 24 bytes an element for Muon in float32.
    """

    tensor: int  # tensors that need more are updated alone
    stack: int  # a stack needs at most this


# Stacking copies the tensors, which pays while the calls for a matrix cost more than its arithmetic: CPU time is a tenth for
# 32 x 64, half for 128 x 128, and not lower from 256 x 256 on, where the memory pages of large new tensors cost more. This
# was not measured on a GPU, which waits for the calls of larger matrices, too: there only the memory is limited.
STACKS_ON_CPU, STACKS_ELSEWHERE = Limit(24 * 2**16, 24 * 2**18), Limit(2**28, 2**28)


class MetricTotals:
    def __init__(self, into: MetricsBuffer, launch: Launch) -> None:
        ring, metric = into.ring(launch.device), into.metric
        self._slot, self._metric, self._scale_and_skip = ring[into.slot], metric, launch.grad_scale_and_skip
        self._totals = torch.zeros(len(launch.weights), len(metric.names), dtype=ring.dtype, device=ring.device)
        self._largest = torch.tensor([by == "max" for by in metric.by], device=ring.device)

    def take(self, i: int, seen: Sequence[Any], stored: Sequence[torch.Tensor], values: Sequence[Any]) -> None:
        """Compute the metric on a stretch of tensor `i`.

        `seen` are weight, gradient and new weight in the arithmetic's dtype, `stored` the weight and its master, `values`
        their new values.
        """
        w, computed = seen[0], list(self._metric(*seen))
        if self._metric.counts_unchanged:
            pairs = zip(stored, values, strict=True)
            new = [value.to(old) if isinstance(value, torch.Tensor) else old.new_tensor(value) for old, value in pairs]
            computed.append(storage.combined(*stored) == storage.combined(*new))
        wide = [torch.as_tensor(value, dtype=w.dtype, device=w.device).expand(w.shape) for value in computed]
        reduced = [value.amax() if by == "max" else sum_of(value) for value, by in zip(wide, self._metric.by, strict=True)]
        total, more = self._totals[i], torch.stack(reduced).to(self._totals.dtype)
        total[:] = torch.where(self._largest, torch.maximum(total, more), total + more)

    def put(self, rows: np.ndarray) -> None:
        """Write all totals to these rows of the ring; a skipped step counts as 0."""
        if self._scale_and_skip is not None:
            self._totals = torch.where(self._scale_and_skip[1] != 0, 0.0, self._totals)
        self._slot[torch.from_numpy(rows).to(self._slot.device)] = self._totals


class _TorchLaunch(Launch):
    """The common part of the eager launches of elementwise rules and of rules of whole tensors."""

    looks_at_tensors = True
    _recordable = False  # whether a recorded graph reads its numbers from the device
    _metric_totals: MetricTotals | None = None

    @staticmethod
    def tile_for(elements: int, packed: bool = False) -> int:
        return TILE

    def write_hyper(self, hyper: np.ndarray | list[float]) -> None:
        if not (self._recordable and current_recording.get()) and streams.is_capturing(self.device):
            raise RuntimeError(CAPTURED)
        super().write_hyper(hyper)

    def compute_with_metric(self, into: MetricsBuffer, rows: np.ndarray) -> None:
        self._metric_totals = MetricTotals(into, self)
        try:
            self.compute()
            self._metric_totals.put(rows)
        finally:
            self._metric_totals = None

    def _factor(self, i: int) -> Any:
        rescale = float(self.hyper[i, 0])
        return rescale if self.grad_scale_and_skip is None else self.grad_scale_and_skip[0].to(self.dtype) * rescale

    def _random_bits(self, i: int, start: int, value: torch.Tensor, slot: int) -> torch.Tensor:
        """Return random bits for stochastic rounding of `value`, the elements of tensor `i` from `start` on."""
        low, high = self.hyper[i, -2:].tolist()
        index = torch.arange(start, start + value.numel(), device=self.device)
        return storage.random_bits(low, high, index, slot).view(value.shape)

    def _store(self, i: int, start: int, seen: tuple[Any, ...], stored: list[torch.Tensor], states: list[Any]) -> None:
        """Store new values of tensor `i` from element `start` on, split or rounded as stored, and compute the metric.

        `seen` are the weight and the gradient that the rule got, and the new weight, `stored` the weight and its master, if
        any, and `states` (number, stored state, new value) of each changed state that is not packed.
        """
        kind, w, n_states = self.storage.master, seen[2], len(self.rule.state)
        at_random = self.storage.stochastic and not self.storage.codes_only
        values: list[Any] = [w] * len(stored)
        if kind not in (storage.MasterKind.NONE, storage.MasterKind.FULL):
            value = self._spread(w, stored[0])
            to_24 = at_random and kind == storage.MasterKind.SPLIT8
            random = self._random_bits(i, start, value, n_states) if to_24 else None
            values = list(storage.split(value, kind, random))
        rows = [*zip([n_states if kind == storage.MasterKind.NONE else None, None], stored, values, strict=False), *states]
        for k, (slot, place, value) in enumerate(rows):
            if at_random and place.dtype == torch.bfloat16 and slot is not None:
                value = self._spread(value, place)
                rows[k] = slot, place, storage.rounded_at_random(value, self._random_bits(i, start, value, slot))
        values = [value for *_, value in rows]
        if self._metric_totals is not None:
            measured = seen, stored, values[: len(stored)]
            self._metric_totals.take(i, *([_vector(tensor) for tensor in tensors] for tensors in measured))
        _write([place for _, place, _ in rows], values, self.grad_scale_and_skip)

    def _pack(self, i: int, start: int, k: int, value: torch.Tensor, places: Sequence[torch.Tensor]) -> None:
        """Encode new values of state `k` of tensor `i` from element `start` on, into `places`: codes and scales."""
        random = self._random_bits(i, start, value, k).view(-1) if self.storage.stochastic else None
        unsigned = self.rule.state[k] in self.rule.nonnegative
        packed = storage.encode(value.reshape(-1), unsigned, random, self.storage.states[k])
        for place, new in zip(places, packed, strict=True):
            place.copy_(new if self.grad_scale_and_skip is None else _chosen(self.grad_scale_and_skip, place, new))

    def _spread(self, value: Any, like: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(value, dtype=self.dtype, device=self.device).expand(like.shape)


class EagerLaunch(_TorchLaunch):
    """Runs an elementwise rule as torch operations: large CPU tensors in tiles, small tensors concatenated.

    A rule with means gets tensors in their own shape, with those of rows and columns to be broadcast.
    """

    def _prepare(self) -> None:
        self._walked = _flat if self.parts is None else itself
        self.replace_weights(self.weights)
        self._masters = None if self.masters is None else [self._walked(master) for master in self.masters]
        self._states = [dict(zip(self.rule.state, map(self._walked, row), strict=False)) for row in self.states]
        self._vectors: list[list[torch.Tensor]] = [[] for _ in self.weights]  # of each tensor, in the rule's order

    def replace_weights(self, weights: Sequence[torch.Tensor]) -> None:
        self._weights = [self._walked(weight.detach()) for weight in weights]

    def run_reduction(self, stage: int) -> None:
        reduction = self.rule.reductions[stage]
        if reduction.op == "mean":
            self._run_means(stage)
            return
        largest, totals = reduction.op == "max", self.totals[stage].zero_()
        for i, gradient, part in self._parts():
            values = reduction(*self._arguments(reduction, i, gradient, part))
            spread = [
                torch.as_tensor(value, dtype=totals.dtype, device=totals.device).expand(gradient.shape).reshape(-1)
                for value in values
            ]
            if largest:
                totals[i] = torch.maximum(totals[i], torch.stack([value.amax() for value in spread]))
            else:
                totals[i] += torch.stack([sum_of(value) for value in spread])
        if reduction.scope == "global":
            totals[:] = totals.amax(dim=0) if largest else totals.sum(dim=0, dtype=widest(totals.device))

    def _run_means(self, stage: int) -> None:
        reduction, parts, n_before = self.rule.reductions[stage], self.parts, len(self.rule.reductions[stage].vectors)
        assert parts is not None
        for i, gradient, part in self._parts():
            values = reduction(*self._arguments(reduction, i, gradient, part))
            results = [
                _mean_over(scope, self._spread(value, gradient))
                for value, scope in zip(values, reduction.scope, strict=True)
            ]
            if reduction.finished is not None:
                kept, numbers = parts.kept[stage][i], dict(zip(self.rule.hyper, self._numbers(i), strict=True))
                hyper = tuple(numbers[name] for name in reduction.finish_hyper)
                results = list(reduction.finished(tuple(results), tuple(kept), hyper))
                means = [results[reduction.kept.index(name)].mean(-2, keepdim=True) for name in reduction.means]
                for old, new in zip(kept, results, strict=False):
                    old.copy_(torch.where(self.skipped[0] != 0, old, new))
                results += means
            self._vectors[i][n_before:] = results

    @torch.no_grad()
    def compute(self) -> None:
        rule = self.rule
        small = []
        for i, gradient, part in self._parts():
            if self.sizes[i] <= JOIN_UP_TO and not rule.extras:
                small.append((i, gradient))
            else:
                arguments = self._arguments(rule, i, gradient, part)
                w, states = rule(*arguments)
                self._keep(i, part, arguments[:2], w, states)
        joined: dict[tuple[float, ...], list[Any]] = {}
        for i, gradient in small:
            joined.setdefault(tuple(self.hyper[i, : self.width].tolist()), []).append((i, gradient))
        for members in joined.values():
            self._compute_joined(members)
        if self.zero_grads:
            self.zero_gradients()

    def _parts(self) -> Iterator[tuple[int, torch.Tensor, slice]]:
        """Yield (tensor's index, gradient of a piece, slice of the piece)."""
        gradients = [None if gradient is None else gradient() for gradient in self.gradients]
        for i, gradient in enumerate(gradients):
            if gradient is not None:
                if self.parts is not None:
                    if self.sizes[i]:
                        yield i, gradient, slice(None)
                    continue
                step = TILE if self.device.type == "cpu" else max(int(self.sizes[i]), 1)
                flat = _flat(gradient)
                for start in range(0, int(self.sizes[i]), step):
                    yield i, flat[start : start + step], slice(start, start + step)

    def _arguments(self, function: Any, i: int, gradient: torch.Tensor, part: slice) -> tuple[Any, ...]:
        rule = self.rule
        states = tuple(self._state(i, name, part) for name in function.state)
        hyper = dict(zip(rule.hyper, self._numbers(i), strict=True))
        extras: list[Any] = []
        if function.numbers_from is not None:
            scalars, vectors = self.sums[function.numbers_from][i].unbind(), self._vectors[i]
            numbers = function.numbers
            extras.append(tuple(scalars[place] if scope == "tensor" else vectors[place] for scope, place in numbers))
        if "index" in function.extras:
            start = part.start or 0
            extras.append(torch.arange(start, start + gradient.numel(), device=self.device).view(gradient.shape))
        return (
            self._weight(i, part),
            gradient.to(self.dtype) * self._factor(i),
            states,
            tuple(hyper[name] for name in function.own_hyper),
            *extras,
        )

    def _compute_joined(self, members: list[tuple[int, torch.Tensor]]) -> None:
        w = torch.cat([self._weight(i) for i, _ in members])
        g = torch.cat([gradient for _, gradient in members]).to(self.dtype) * self._factor(members[0][0])
        used = self.rule.used
        states = tuple(
            torch.cat([self._state(i, name) for i, _ in members]) if name in used else self._states[members[0][0]][name]
            for name in self.rule.state
        )
        before = w
        w, states = self.rule(w, g, states, self._numbers(members[0][0]))
        w = self._spread(w, before)  # a rule may return one number for all elements
        states = tuple(
            self._spread(state, before) if name in self.rule.changed else state
            for name, state in zip(self.rule.state, states, strict=True)
        )
        start = 0
        for i, gradient in members:
            part = slice(start, start + gradient.numel())
            self._keep(i, slice(None), (before[part], g[part]), w[part], tuple(state[part] for state in states))
            start = part.stop

    def _numbers(self, i: int) -> tuple[torch.Tensor, ...]:
        """Return the hyper-parameters of a tensor; a rule computes with them in its dtype, as on other backends."""
        return torch.from_numpy(self.hyper[i, 1 : self.width]).unbind()

    def _weight(self, i: int, part: slice = slice(None)) -> torch.Tensor:
        master = None if self._masters is None else self._piece(self._masters[i], part)
        return storage.combined(self._piece(self._weights[i], part), master)

    def _state(self, i: int, name: str, part: slice = slice(None)) -> torch.Tensor:
        state = self._states[i][name]
        if storage.is_packed(state):
            start, stop, _ = part.indices(int(self.sizes[i]))
            n, unsigned = stop - start, name in self.rule.nonnegative
            decoded = storage.decode(*self._packed(state, i, part), unsigned, state.dtype, n)
            return decoded if self.parts is None else decoded.view(self.weights[i].shape)
        return self._piece(state, part).to(self.dtype)

    def _piece(self, tensor: torch.Tensor, part: slice) -> torch.Tensor:
        """Return a part of a tensor as it is walked; the whole, which may have no dimensions, for a rule with means."""
        return tensor[part] if self.parts is None else tensor

    def _packed(self, state: torch.Tensor, i: int, part: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Return views of the codes and the scales of a part, which must begin at the start of a block."""
        n = int(self.sizes[i])
        codes, scales = storage.pieces(state, n)
        start, stop, _ = part.indices(n)
        per_byte = 8 // storage.CODES[state.dtype][0].bits  # elements
        return codes[start // per_byte : -(-stop // per_byte)], scales[start // storage.BLOCK : -(-stop // storage.BLOCK)]

    def _keep(self, i: int, part: slice, inputs: tuple[Any, ...], w: torch.Tensor, states: tuple[torch.Tensor, ...]) -> None:
        """Store a new weight and new states; `inputs` are the weight and the gradient that the rule got."""
        start, states_of, rows = part.start or 0, self._states[i], []
        weight = self._piece(self._weights[i], part)
        for k, (name, value) in enumerate(zip(self.rule.state, states, strict=True)):
            if storage.is_packed(states_of[name]) and name in self.rule.changed:
                self._pack(i, start, k, self._spread(value, weight), self._packed(states_of[name], i, part))
            elif name in self.rule.changed:
                rows.append((k, self._piece(states_of[name], part), value))
        masters = [] if self._masters is None else [self._piece(self._masters[i], part)]
        self._store(i, start, (*inputs, w), [weight, *masters], rows)


class WholeLaunch(_TorchLaunch):
    """Runs a rule of whole tensors, one tensor after the other; stacks small tensors of equal shape and hyper-parameters."""

    def _prepare(self) -> None:
        # By shape, whether the rule left a copy of the gradient unchanged; only then it gets later gradients without a copy.
        self._leaves_gradients: dict[torch.Size, bool] = {}
        # Shapes for which the rule was seen to leave weights and states unchanged; until then it gets copies.
        self._leaves_others: set[torch.Size] = set()
        self.may_raise = not self.rule.never_raises
        self._ahead: list[Any] | None = None  # what `_stepped` has returned, from `compute_ahead` to `compute`
        pairs = zip(self.weights, self.states, strict=True)
        elements = [2 * weight.numel() + sum(state.numel() for state in states) for weight, states in pairs]
        self._temporaries = [2 * self.dtype.itemsize * number for number in elements]  # bytes, see `Limit`
        self._packed = [k for k, state in enumerate(self.states[0]) if storage.is_packed(state)]  # of every tensor
        # Split masters and stochastic rounding store each tensor by itself.
        at_random = self.storage.stochastic and not self.storage.codes_only
        self._stores_each = at_random or self.storage.master not in (storage.MasterKind.NONE, storage.MasterKind.FULL)

    def _random_bits(self, i: int, start: int, value: torch.Tensor, slot: int) -> torch.Tensor:
        if not isinstance(self.rule, StagedRule) or slot < len(self.rule.state):
            return super()._random_bits(i, start, value, slot)
        low, high = other_key(self.hyper[i, -2:]).tolist()  # the weight is rounded in the last stage, which has no states
        return storage.random_bits(low, high, torch.arange(value.numel(), device=self.device)).view(value.shape)

    def run_reduction(self, stage: int) -> None:
        """Run a global reduction, which for these rules depends on the gradients only, limited as earlier ones say."""
        reduction, totals = self.rule.reductions[stage], self.totals[stage].zero_()
        for i, bound in enumerate(self.gradients):
            if bound is not None and (gradient := bound()) is not None:
                g = gradient.to(self.dtype) * self._factor(i)
                hyper = dict(zip(self.rule.hyper, self.hyper[i, 1 : self.width].tolist(), strict=True))
                for limit, sums in zip(self.rule.limits[:stage], self.sums, strict=False):
                    g = g * factor_of(limit, sums[i, 0], hyper)
                values = reduction(g, g, (), ())  # it ignores the weight
                totals[i] = torch.stack([sum_of(value.reshape(-1)) for value in values])
        totals[:] = totals.sum(dim=0, dtype=widest(totals.device))

    @torch.no_grad()
    def compute_ahead(self) -> None:
        self._ahead = None
        self._ahead = list(self._steps(self._active_rows()))

    @torch.no_grad()
    def compute(self) -> None:
        steps, self._ahead = self._steps(self._active_rows()) if self._ahead is None else self._ahead, None
        for members, *results in steps:
            self._keep_stack(members, *results)
        if self.zero_grads:
            self.zero_gradients()

    def _active_rows(self) -> list[int]:
        """Return the indices of the tensors that have elements and a gradient."""
        return [i for i, gradient in enumerate(self.gradients) if gradient is not None and self.sizes[i]]

    def _steps(self, active: list[int]) -> Iterator[tuple[Any, ...]]:
        """Yield for each stack of these tensors its indices, and what `_stepped` returns."""
        bound: list[Any] = self.gradients
        gradients = {i: bound[i]() for i in active}
        for members in self._stacks(active) if self.rule.batched else [[i] for i in active]:
            yield members, *self._stepped(members, [gradients[i] for i in members])

    def _stepped(self, members: list[int], gradients: list[Any]) -> tuple[torch.Tensor, Any, Any, torch.Tensor, list[Any]]:
        """Return the old weight, the gradient, the old states, and the new weight and states of a stack of tensors."""
        scale_and_skip = self.grad_scale_and_skip
        weights = [self.weights[i].detach() for i in members]
        masters = None if self.masters is None else [self.masters[i] for i in members]
        read = weights if masters is None else list(map(storage.combined, weights, masters))
        rescale, hyper = self._factor(members[0]), self.hyper[members[0], 1 : self.width].tolist()
        one = len(members) == 1
        make = _only if one else torch.stack
        g = make(gradients).to(self.dtype)
        if scale_and_skip is not None:  # decompositions raise for non-finite values
            g = torch.where(scale_and_skip[1] != 0, torch.zeros_like(g), g * rescale)
        elif rescale != 1.0:  # allocating a large tensor costs more than computing with it
            g = g * rescale
        old = tuple(make([self._read(i, k) for i in members]) for k in range(len(self.states[0])))
        before = make(read).to(self.dtype)
        compute: Any = partial(computed_by, self.engine, self.rule if one else self.rule.compute)
        if self.sums:
            numbers = tuple(number for sums in reversed(self.sums) for number in sums[members[0]].unbind())
            compute = partial(_with_sums, compute, numbers)
        if g.shape not in self._leaves_others:
            before, old = before.clone(), tuple(state.clone() for state in old)
        versions = [_version(tensor) for tensor in (before, *old)]
        if g is gradients[0]:
            w, new = self._computed_with(g, compute, before, old, tuple(hyper))
        else:
            w, new = compute(before, g, old, tuple(hyper))
        if (after := [_version(tensor) for tensor in (before, *old)]) != versions:
            self._refuse_in_place(g.shape, [a != b for a, b in zip(after, versions, strict=True)])
        self._leaves_others.add(g.shape)
        if scale_and_skip is not None:
            w = _chosen(scale_and_skip, before, w)
        return before, g, old, w, list(new)

    def _keep_stack(
        self, members: list[int], before: torch.Tensor, g: Any, old: Any, w: torch.Tensor, new: list[Any]
    ) -> None:
        """Store what `_stepped` has returned for these tensors."""
        scale_and_skip, one = self.grad_scale_and_skip, len(members) == 1
        weights = [self.weights[i].detach() for i in members]
        masters = None if self.masters is None else [self.masters[i] for i in members]
        states = list(zip(*(self.states[i] for i in members), strict=True))  # by name
        written = [weights] if masters is None else [weights, masters]
        if self._stores_each:
            changed = [k for k in range(len(new)) if new[k] is not old[k]]
            for m, i in enumerate(members):
                of_one = (before, g, w, *new) if one else tuple(stack[m] for stack in (before, g, w, *new))
                for k in set(changed).intersection(self._packed):
                    self._pack(i, 0, k, of_one[3 + k], storage.pieces(self.states[i][k], of_one[3 + k].numel()))
                stored = [weights[m], *([] if masters is None else [masters[m]])]
                rows = [(k, self.states[i][k], of_one[3 + k]) for k in changed if k not in self._packed]
                self._store(i, 0, of_one[:3], stored, rows)
            return
        if self._metric_totals is not None:
            for k, i in enumerate(members):
                all_three = tuple(stack.flatten() if one else stack[k].flatten() for stack in (before, g, w))
                stored = [tensors[k].flatten() for tensors in written]
                self._metric_totals.take(i, all_three, stored, [all_three[2]] * len(stored))
        for k in reversed(self._packed):
            if new[k] is not old[k]:
                for i, value in zip(members, [new[k]] if one else new[k].unbind(), strict=True):
                    self._pack(i, 0, k, value, storage.pieces(self.states[i][k], value.numel()))
            del states[k], new[k]
        old = tuple(tensor for k, tensor in enumerate(old) if k not in self._packed)
        if one:
            _write([tensor for (tensor,) in (*written, *states)], [*[w] * len(written), *new], scale_and_skip)
        else:
            places, values = [*written, *states], [*[w] * len(written), *new]
            if scale_and_skip is not None:
                values = [
                    _chosen(scale_and_skip, torch.stack(list(place)), v) for place, v in zip(places, values, strict=True)
                ]
            _write_stacks(places, values, [*[None] * len(written), *old])

    def _computed_with(self, g: torch.Tensor, compute: Any, before: torch.Tensor, old: Any, hyper: tuple[float, ...]) -> Any:
        """Run the rule with the user's gradient, or with a copy until the rule is known not to write to it."""
        copies = not self._leaves_gradients.get(g.shape, False)
        gradient = g.clone() if copies else g
        version = _version(gradient)
        result = compute(before, gradient, old, hyper)
        written = version is None or gradient._version != version
        if copies:
            self._leaves_gradients[g.shape] = not written
        elif written and version is not None:
            raise RuntimeError(
                f"tensor rule {self.rule.name!r} has changed a gradient in place, which it has not done before: it must do "
                "so at every step or never; write g = g * ... instead of g.mul_(...). No weight has been changed by it"
            )
        return result

    def _refuse_in_place(self, shape: torch.Size, changed: list[bool]) -> None:
        names = ", ".join(itertools.compress(("w", *self.rule.state), changed))
        late = " It has not done so before: the tensor itself has been changed." if shape in self._leaves_others else ""
        raise RuntimeError(
            f"tensor rule {self.rule.name!r} has changed {names} in place: it must return new tensors, such as w - step "
            f"instead of w.sub_(step).{late or ' Nothing has been changed by it'}"
        )

    def _read(self, i: int, k: int) -> torch.Tensor:
        state = self.states[i][k]
        if not storage.is_packed(state):
            return state.to(self.dtype)
        return storage.unpacked(state, self.weights[i].shape, self.rule.state[k] in self.rule.nonnegative)

    def _stacks(self, active: list[int]) -> list[list[int]]:
        """Return lists of the indices of tensors that are updated together."""
        limit = STACKS_ON_CPU if self.device.type == "cpu" else STACKS_ELSEWHERE
        members: dict[Any, list[int]] = {}
        for i in active:
            small = self._temporaries[i] <= limit.tensor
            alike = self.weights[i].shape, self.hyper[i, : self.width].tobytes()
            members.setdefault(alike if small else i, []).append(i)
        stacks = []
        for group in members.values():
            most = max(1, limit.stack // self._temporaries[group[0]])
            stacks += [group[start : start + most] for start in range(0, len(group), most)]
        return stacks


def other_key(halves: np.ndarray) -> np.ndarray:
    """Return both halves of another key, for the last stage of a staged rule."""
    return 0xFFFF - halves


def _mean_over(scope: str, value: torch.Tensor) -> torch.Tensor:
    """Return the means over the parts of a tensor, in the shape of their states."""
    if scope == "slice":
        return value.mean(tuple(range(1, value.dim())), keepdim=True) if value.dim() > 1 else value
    return value.mean(-1 if scope == "row" else -2, keepdim=True)


def sum_of(value: torch.Tensor) -> torch.Tensor:
    """Return the sum of a vector; the result does not depend on the number of threads."""
    if value.device.type != "cpu" or len(value) <= ALONE:
        return torch.sum(value)
    return torch.stack([torch.sum(piece) for piece in value.split(ALONE)]).sum()


def _with_sums(compute: Any, sums: tuple[torch.Tensor, ...], w: Any, g: Any, states: Any, hyper: Any) -> Any:
    return compute(w, g, states, hyper, sums)


def _version(tensor: torch.Tensor) -> int | None:
    """Return how often a tensor was written to; torch does not count it for tensors of inference mode."""
    return None if tensor.is_inference() else tensor._version


def _only(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the only tensor of a list, in place of `torch.stack`."""
    return tensors[0]


def _write_stacks(old: list[Any], new: list[torch.Tensor], args: list[torch.Tensor | None]) -> None:
    """Copy each new stack to its tensors, except for states that the rule returned unchanged, the same object as `args`."""
    for tensors, stack, arg in zip(old, new, args, strict=True):
        if stack is not arg:
            torch._foreach_copy_(list(tensors), list(stack.unbind()))


def _write(old: list[torch.Tensor], new: list[Any], scale_and_skip: torch.Tensor | None = None) -> None:
    """Copy each new value to its tensor; clone values first that share memory with a tensor to be written."""
    if scale_and_skip is not None:
        new = [_chosen(scale_and_skip, place, value) for place, value in zip(old, new, strict=True)]
    places = {tensor.untyped_storage().data_ptr() for tensor in old}
    for k, value in enumerate(new):
        if isinstance(value, torch.Tensor) and value.untyped_storage().data_ptr() in places:
            new[k] = value.clone()
    for tensor, value in zip(old, new, strict=True):
        tensor[...] = value


def _chosen(scale_and_skip: torch.Tensor, old: torch.Tensor, new: Any) -> torch.Tensor:
    """Return the old value if the step is skipped, else the new one; only the device knows whether it is skipped."""
    return torch.where(scale_and_skip[1] != 0, old, torch.as_tensor(new, device=old.device).to(old.dtype))


def _vector(value: Any) -> Any:
    return value.flatten() if isinstance(value, torch.Tensor) else value


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.as_strided((tensor.numel(),), (1,))
