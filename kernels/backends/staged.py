"""`StagedLaunch`: run the elementwise parts of a staged rule on an engine, and what is between them in torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from .. import storage
from ..graphs import current_recording, for_all_steps
from ..language.staged_rule import OF_MATRICES, TO_BFLOAT16
from ..launch import GRADIENT, WEIGHT, itself
from ..reductions import limit_factor, run_reductions
from . import choose_engine, computed_by, launch_class
from .eager import STACKS_ELSEWHERE, Limit, WholeLaunch, other_key

# As for rules of whole tensors, but here nothing is copied, so stacks on a CPU are limited by what its caches hold.
STACKS_ON_CPU = Limit(12 * 2**16, 12 * 2**18)
FORMS = 8  # ways to stack, by which tensors have gradients, that a launch keeps


class Matrix(NamedTuple):
    """A matrix in the memory of a tensor.

    Attributes:
        tensor: the tensor's index in the launch.
        offset: elements of the tensor before it.
        weight, states, master: views of it; the states by their names.
    """

    tensor: int
    offset: int
    weight: torch.Tensor
    states: dict[str, torch.Tensor]
    master: torch.Tensor | None


class StagedLaunch(WholeLaunch):
    """Runs a staged rule on stacks of equal matrices, which engines find in the memory of weights, gradients and states.

    Some weights take their steps in torch, as in `WholeLaunch`: those in float64 or in another order than C's, those with
    blocks of rows that are apart, and those with several matrices if they are rounded at random.
    """

    _recordable = True

    def _prepare(self) -> None:
        super()._prepare()
        names, hyper = (*self.rule.middle[1], "split"), self.rule.hyper
        self._deciding = [1 + hyper.index(name) for name in names]  # the numbers that the matrices of a stack share
        self._found: dict[tuple[int, int], list[Matrix] | None] = {}  # by tensor and `split`
        self._stacked: dict[Any, tuple[list[Stack], list[int]]] = {}  # by the gradients that there are, and the numbers
        self._sums: Any = None  # of limits, a launch of all tensors
        # For the last stage: no scale, and whether the step is skipped.
        skips = self.grad_scale_and_skip is not None or any(limit.skips for limit in self.rule.limits)
        self.control = torch.tensor([1.0, 0.0], device=self.device) if skips else None

    def run_reduction(self, stage: int) -> None:
        self._add_up()
        self._sums.run_reduction(stage)
        self.totals[stage].copy_(self._sums.totals[stage])

    def _add_up(self) -> None:
        """Make the launch that runs the rule's reductions over all gradients, and write its tables."""
        if self._sums is None:
            make, states = launch_class(choose_engine(self.device, self.engine)), [()] * len(self.weights)
            self._sums = make(
                *(self.rule.summed, self.weights, states, None, self.gradient_dtype, self.aligned),
                *(None, self.grad_scale_and_skip),
            )
        sums = self._sums
        sums.addresses[GRADIENT], sums.hyper[:, 0] = self.addresses[GRADIENT], self.hyper[:, 0]
        sums.multiply_on_host()

    @torch.no_grad()
    def compute(self) -> None:
        stacks, others = self._divided()
        for stack in stacks:
            old = None if self._metric_totals is None else [*stack.stored(self)]
            stack.run(self)
            if old is not None:
                self._measure(old, stack.stored(self))
        for members, *results in self._steps(others):
            self._keep_stack(members, *results)
        if self.zero_grads:
            for i in others:
                self.gradients[i]().zero_()  # type: ignore[misc,union-attr]

    def upload(self) -> None:
        if self.rule.limits:
            self._add_up()
            self._sums.upload()
        for stack in self._divided()[0]:
            stack.upload(self)

    def graph_form(self) -> Any:
        """Return which matrices are stacked, and the numbers that are not read from the device."""
        _, others = self._divided()
        if others:
            shapes = sorted({(tuple(self.weights[i].shape), self.weights[i].stride()) for i in others})
            raise RuntimeError(
                f"rule {self.rule.name!r} steps weights of (shape, strides) {', '.join(map(str, shapes[:8]))} by torch "
                "operations with numbers from the host, which a CUDA graph would never update, because they are "
                f"{self.weight_dtype}, not contiguous, split into rows that are apart, or several matrices in low precision "
                "that is rounded at random; make the optimizer of other weights, or do not capture its steps"
            )
        return self._form

    @property
    def _form(self) -> tuple[bytes, bytes]:
        return (self.addresses[GRADIENT] != 0).tobytes(), self.hyper[:, self._deciding].tobytes()

    def _divided(self) -> tuple[list[Stack], list[int]]:
        """Return the stacks, and the indices of the tensors with gradients that are in none."""
        form = self._form
        if form not in self._stacked:
            if current_recording.get() is not None:
                raise RuntimeError(
                    "a CUDA graph is recorded of a step in which other matrices have gradients than in the calls before it: "
                    "give capture() more warm-up calls, or always the same parameters gradients"
                )
            members: dict[Any, list[Matrix]] = {}
            others, limit = [], STACKS_ON_CPU if self.device.type == "cpu" else STACKS_ELSEWHERE
            for i in self._active_rows():
                split = int(self.hyper[i, self._deciding[-1]])
                if (i, split) not in self._found:
                    self._found[i, split] = self._matrices_in(i, split)
                if (matrices := self._found[i, split]) is None:
                    others.append(i)
                    continue
                for matrix in matrices:
                    alike = matrix.weight.shape, self.hyper[i, self._deciding].tobytes()
                    is_large = temporaries(*alike[0]) > limit.tensor
                    members.setdefault((i, matrix.offset) if is_large else alike, []).append(matrix)
            stacks = []
            for matrices in members.values():
                most = max(1, limit.stack // temporaries(*matrices[0].weight.shape))
                stacks += [Stack(self, matrices[k : k + most]) for k in range(0, len(matrices), most)]
            if len(self._stacked) == FORMS:
                del self._stacked[next(iter(self._stacked))]
            self._stacked[form] = stacks, others
        return self._stacked[form]

    def _measure(self, old: Iterable[Any], new: Iterable[Any]) -> None:
        """Compute the metric on matrices, given what `Stack.stored` yielded before and after their step."""
        assert self._metric_totals is not None
        for (i, stored, gradient), (_, values, _) in zip(old, new, strict=True):
            seen = storage.combined(*stored), gradient.to(self.dtype) * self._factor(i), storage.combined(*values)
            measured = seen, stored, values
            self._metric_totals.take(i, *([each.flatten() for each in tensors] for tensors in measured))

    def _matrices_in(self, i: int, split: int) -> list[Matrix] | None:
        """Return the matrices in a tensor, None if an engine cannot walk them."""
        weight, how = self.weights[i], self.rule.how
        names = (*self.rule.before.state, *self.rule.middle[0])
        tensors: dict[str, Any] = dict(zip(self.rule.state, self.states[i], strict=True))
        tensors = {name: tensors[name] for name in names} | {"weight": weight}
        if self.masters is not None:
            tensors["master"] = self.masters[i]
        if self.dtype == torch.float64 or not all(tensor.is_contiguous() for tensor in tensors.values()):
            return None
        found = {
            name: [tensor]
            if storage.is_packed(tensor)
            else [matrix for block in how.blocks(tensor.detach()[None], split) for matrix in block]
            for name, tensor in tensors.items()
        }
        n = len(found["weight"])
        if (self.storage.stochastic and n > 1) or any(len(matrices) != n for matrices in found.values()):
            return None  # random numbers are drawn by the element's index in its tensor
        if any(
            matrix.untyped_storage().data_ptr() != tensors[name].untyped_storage().data_ptr()
            for name, matrices in found.items()
            for matrix in matrices
        ):
            return None
        start = weight.storage_offset()
        rows = [dict(zip(found, row, strict=True)) for row in zip(*found.values(), strict=True)]
        return [Matrix(i, row["weight"].storage_offset() - start, row["weight"], row, row.get("master")) for row in rows]


def temporaries(rows: int, columns: int) -> int:
    """Return the bytes of the iteration's temporaries: two matrices, and four of its products by itself."""
    return 4 * rows * columns + 8 * min(rows, columns) ** 2


class Stack:
    """The stages of matrices [n, rows, columns] in the memory of tensors.

    The normalized matrices are the weights of the first rule and, stepped, the gradients of the last one.
    """

    def __init__(self, of: StagedLaunch, matrices: list[Matrix]) -> None:
        rule, weights, n = of.rule, [matrix.weight for matrix in matrices], len(matrices)
        self._matrices, self._shape = matrices, (n, *weights[0].shape)
        self._dtype = rule.how.dtype_for(weights[0][None])
        self._rows = np.array([matrix.tensor for matrix in matrices])
        self._offsets = np.array([matrix.offset for matrix in matrices])
        before, after, (own, of_function) = rule.normalized, rule.after, rule.middle
        self._own = [[matrix.states[name] for matrix in matrices] for name in own]
        states = [tuple(matrix.states[name] for name in before.state) for matrix in matrices]
        masters = None if of.masters is None else [matrix.master for matrix in matrices]
        x = torch.empty(self._shape, dtype=self._dtype, device=of.device)
        apart = n == 1 or weights[0].numel() % 8 == 0  # then each matrix begins at a multiple of 16 bytes
        aligned = of.aligned and apart and not (self._offsets % 8).any()
        make, control = launch_class(choose_engine(of.device, of.engine)), of.grad_scale_and_skip
        seed = of.seed if of.storage.stochastic else None
        narrow = any(state.dtype != torch.float32 for state in (states[0] if states else ()))
        self._before = make(
            *(before, list(x), states, None, of.gradient_dtype, aligned),
            *(seed if narrow else None, control, of.zero_grads),
        )
        self._after = make(after, weights, [()] * n, masters, self._dtype, aligned, seed, of.control)
        self._before.release()  # keeps no `x` alive
        self._places = [
            (
                [1 + of.rule.hyper.index(name) for name in launch.rule.hyper if name not in OF_MATRICES],
                [1 + k for k, name in enumerate(launch.rule.hyper) if name not in OF_MATRICES],
            )
            for launch in (self._before, self._after)
        ]
        rounds_first = rule.how.rounds_first(weights[0][None])
        self._before.hyper[:, 1 + before.hyper.index("splitter")] = TO_BFLOAT16 if rounds_first else 0.0
        self._ratio = 1 + after.hyper.index("ratio")
        self._numbers = of.hyper[self._rows[0], [1 + of.rule.hyper.index(name) for name in of_function]].tolist()
        self._room: tuple[torch.Tensor, torch.Tensor] | None = None  # kept for a graph
        self._at = 0

    def run(self, of: StagedLaunch) -> None:
        room = self._room
        if room is None:
            x = torch.empty(self._shape, dtype=self._dtype, device=of.device)
            room = x, torch.empty_like(x)
            if for_all_steps.get():
                self._room = room
        self._write(of)
        x, spare = room
        before, after = self._before, self._after
        before.weights, before.gradients = [x], [of.gradients[matrix.tensor] for matrix in self._matrices]
        if self._at != (start := x.data_ptr()):
            before.addresses[WEIGHT] = self._addresses_in(x)
            before.replace_weights([x])
            self._at = start
        if of.rule.limits:
            before.totals[0].copy_(of.totals[0][:1].expand(len(self._matrices), -1))
        run_reductions([before], len(self._matrices), None, None, begun=bool(of.rule.limits))
        before.compute()
        if (control := of.control) is not None:
            self._tell_skipped(of, control)
        states = [torch.stack(column) for column in self._own]
        step, ratio, new = computed_by(of.engine, of.rule.between, x, spare, states, self._numbers)
        after.addresses[GRADIENT], after.gradients = self._addresses_in(step), [partial(itself, step)]
        after.hyper[:, self._ratio] = ratio
        after.compute()
        if self._room is None:
            before.weights, after.gradients = [], []
        for column, old, value in zip(self._own, states, new, strict=True):
            chosen = value if control is None else torch.where(control[1] != 0, old, value)
            torch._foreach_copy_(column, list(chosen.unbind()))

    def _tell_skipped(self, of: StagedLaunch, control: torch.Tensor) -> None:
        """Let the last stage know whether the step is skipped, as a limit or the caller says."""
        given, flag = of.grad_scale_and_skip, control[1:]
        if given is not None:
            flag.copy_(given[1:])
        for stage, limit in enumerate(of.rule.limits):
            if limit.skips:
                factor: Any = limit_factor(self._before, stage)
                flag.copy_((factor < 0.0) | (flag != 0.0) if given is not None else factor < 0.0)

    def upload(self, of: StagedLaunch) -> None:
        self._write(of)
        self._before.upload()
        self._after.upload()

    def stored(self, of: StagedLaunch) -> Iterator[tuple[int, list[torch.Tensor], torch.Tensor]]:
        """Yield for each matrix its tensor's index, copies of the weight and its master, and of the gradient."""
        for matrix in self._matrices:
            stored = [matrix.weight] if matrix.master is None else [matrix.weight, matrix.master]
            bound: Any = of.gradients[matrix.tensor]
            gradient = bound().view(-1)[matrix.offset :][: matrix.weight.numel()]
            yield matrix.tensor, [each.clone() for each in stored], gradient.clone()

    def _addresses_in(self, stack: torch.Tensor) -> np.ndarray:
        return stack.data_ptr() + np.arange(len(stack)) * (stack.stride(0) * stack.itemsize)

    def _write(self, of: StagedLaunch) -> None:
        """Write the gradients' addresses, and the numbers of both launches."""
        rows, before, after = self._rows, self._before, self._after
        before.addresses[GRADIENT] = of.addresses[GRADIENT, rows] + self._offsets * of.gradient_dtype.itemsize
        for launch, (places, to) in zip((before, after), self._places, strict=True):
            launch.hyper[:, to] = of.hyper[rows[:, None], places]
            if launch.storage.stochastic:
                launch.hyper[:, -2:] = of.hyper[rows, -2:]
        before.hyper[:, 0], after.hyper[:, 0] = of.hyper[rows, 0], 1.0
        before.multiply_on_host()
        if after.storage.stochastic:
            after.hyper[:, -2:] = other_key(after.hyper[:, -2:])
