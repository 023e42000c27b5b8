"""What measures the parameters at each step: a Trainer's telemetry, or hooks of an optimizer."""

from __future__ import annotations

import copy
import math
from collections import deque
from typing import Any

import numpy as np
import torch

from ...kernels import streams
from ...kernels.storage import MasterKind, kind_of
from ...trainer import Telemetry, Trainer
from ...trainer.optimizer import Optimizer, RuleOptimizer
from ...trainer.optimizer.multi import part_of
from .runs import Run

__all__ = ["OptimizerProbe", "TrainerProbe", "copy_to_host"]

QUANTITIES = (
    *("weight_norm", "gradient_norm", "update_norm", "update_ratio"),
    *("cosine", "gradient_absmax", "gradient_zeros", "gradient_nonfinite", "weight_unchanged"),
)
OF_HOOKS = QUANTITIES[:5]  # those that are worth their price where no update measures them
ROOM = 128  # recorded steps that the device may be ahead
_ALONGSIDE: dict[MasterKind | None, str] = {
    MasterKind.FULL: "float32 master",
    MasterKind.SPLIT: "split master",
    MasterKind.SPLIT8: "24-bit master",
    MasterKind.KAHAN: "Kahan summation",
}


def copy_to_host(value: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event | None]:
    """A copy on the CPU that may still be on its way, and the event that says when it has arrived; None if it has."""
    if value.device.type != "cuda":
        return value.cpu(), None
    host = streams.pinned(*value.shape, dtype=value.dtype)
    host.copy_(value, non_blocking=True)
    return host, streams.record_event(value.device)


class TrainerProbe:
    """Two telemetries that take turns: one for most steps, and one that has histograms, too."""

    def __init__(self, trainer: Trainer, every: int, histograms: tuple[str, ...], histogram_every: int) -> None:
        self._trainer = trainer
        if trainer.telemetry is not None:
            raise ValueError(
                "source has telemetry already, of its own or another recorder's: set trainer.telemetry = None first"
            )
        if not (isinstance(histogram_every, int) and histogram_every >= 1):
            raise ValueError(f"histogram_every={histogram_every!r}: must be an integer >= 1")
        self._plain = Telemetry(every, ROOM, QUANTITIES)
        self._counting = Telemetry(1, ROOM, QUANTITIES, histograms) if histograms else None
        self._histogram_every, self._steps = histogram_every, 0
        self._read = [0] * len(self._telemetries())  # the last step of each that was read
        trainer.telemetry = self._plain
        self.names = list(self._plain.names)
        self.params = list(self._plain._params)
        self.edges = self._plain.edges if histograms else np.zeros(0)
        indices = {id(param): index for index, param in trainer.optimizer.param_dict.items()}
        self.storage = [_storage(part_of(trainer.optimizer, indices[id(param)]), param) for param in self.params]
        if self._counting is not None:
            trainer.telemetry = self._counting

    def go_back(self, number: int) -> None:
        # New ones: those in use have steps in them that are not to be found again.
        self._plain = copy.copy(self._plain)
        self._counting = None if self._counting is None else copy.copy(self._counting)
        self._read, self._steps = [number] * len(self._telemetries()), 0
        for telemetry in self._telemetries():
            self._trainer.telemetry = telemetry

    def described(self) -> str:
        return repr(self._trainer.optimizer)

    @property
    def number(self) -> int:
        return self._trainer.optimizer.num_update

    @property
    def learning_rate(self) -> float:
        return self._trainer.learning_rate

    def after_step(self) -> None:
        self._steps += 1
        if self._counting is not None:
            due = self._steps % self._histogram_every == 0
            self._trainer.telemetry = self._counting if due else self._plain

    def is_pressed(self) -> bool:
        return self._steps % (ROOM // 2) == 0

    @property
    def pending(self) -> bool:
        return any(telemetry.pending for telemetry in self._telemetries())

    def read_into(self, run: Run) -> None:
        # In the order of steps: what comes after a step that is still on its way waits for it.
        found, bound = [], None
        for i, telemetry in enumerate(self._telemetries()):
            arrays = telemetry.read(after=self._read[i])
            if telemetry.pending:
                last = int(arrays["steps"].max(initial=self._read[i]))
                bound = last if bound is None else min(bound, last)
            found.append(arrays)
        for i, arrays in enumerate(found):
            if bound is not None:
                known = arrays["steps"] <= bound
                found[i] = arrays = {name: array[known] for name, array in arrays.items()}
            self._read[i] = int(arrays["steps"].max(initial=self._read[i]))
        steps = np.concatenate([arrays["steps"] for arrays in found])
        if len(steps):
            order = np.argsort(steps)
            run.add_tensors(
                steps[order], {name: np.concatenate([arrays[name] for arrays in found])[order] for name in QUANTITIES}
            )
        counts = {name: array for name, array in found[-1].items() if array.ndim == 3}
        if counts and len(found[-1]["steps"]):
            run.add_tensors(found[-1]["steps"], counts)

    def flush(self) -> None:
        for telemetry in self._telemetries():
            telemetry.flush()

    def close(self) -> None:
        if self._trainer.telemetry in self._telemetries():
            self._trainer.telemetry = None

    def _telemetries(self) -> list[Telemetry]:
        return [self._plain] + ([] if self._counting is None else [self._counting])


class OptimizerProbe:
    """Norms before and after some steps of an optimizer of torch's interface, by its hooks."""

    edges = np.zeros(0)
    storage: tuple[str, ...] = ()

    def __init__(self, optimizer: torch.optim.Optimizer, every: int, module: torch.nn.Module | None = None) -> None:
        if not (isinstance(every, int) and every >= 1):
            raise ValueError(f"every={every!r}: must be an integer >= 1")
        self._optimizer, self._every = optimizer, every
        self.number = 0
        self._rate: float | None = None  # of the last step; a scheduler may have set the next one's since
        self.params = [param for group in optimizer.param_groups for param in group["params"]]
        known = {} if module is None else {id(param): name for name, param in module.named_parameters()}
        self.names = [
            known.get(id(param), name)
            for i, group in enumerate(optimizer.param_groups)
            for param, name in zip(
                group["params"],
                group.get("param_names", [f"{i}.{k}" for k in range(len(group["params"]))]),
                strict=True,
            )
        ]
        if module is not None and not known.keys() & {id(param) for param in self.params}:
            raise ValueError("module has none of the parameters that source steps: give the module that source was made for")
        self._before: list[torch.Tensor] | None = None
        self._gradients: list[torch.Tensor | None] = []
        self._rows: deque[tuple[int, torch.Tensor, Any]] = deque()
        self._hooks = [optimizer.register_step_pre_hook(self._begin), optimizer.register_step_post_hook(self._end)]

    def described(self) -> str:
        settings = {key: value for key, value in self._optimizer.defaults.items() if value is not None}
        return f"{type(self._optimizer).__name__}({', '.join(f'{key}={value!r}' for key, value in settings.items())})"

    @property
    def learning_rate(self) -> float:
        return float(self._optimizer.param_groups[0]["lr"]) if self._rate is None else self._rate

    def go_back(self, number: int) -> None:
        self.number = number

    @torch.no_grad()
    def _begin(self, *_: Any) -> None:
        if self.number % self._every == 0:
            self._before = [param.detach().clone() for param in self.params]

    @torch.no_grad()
    def _end(self, *_: Any) -> None:
        self.number += 1
        self._rate = float(self._optimizer.param_groups[0]["lr"])
        if self._before is None:
            return
        before, self._before = self._before, None
        gradients = [param.grad for param in self.params]
        moved = torch._foreach_sub(list(self.params), before)
        norms = [torch._foreach_norm(tensors) for tensors in (before, moved)]
        rows = []
        for weight, update, change, gradient in zip(*norms, moved, gradients, strict=True):
            if gradient is None or gradient.layout != torch.strided:
                rows.append(weight.new_full((len(OF_HOOKS),), math.nan))
                continue
            norm = torch.linalg.vector_norm(gradient).to(weight)
            product = (gradient.to(change) * change).sum().to(weight)
            rows.append(torch.stack([weight, norm, update, update / weight, product / (norm * update)]))
        row = torch.stack([each.float().to(rows[0].device) for each in rows])
        self._rows.append((self.number, *copy_to_host(row)))

    def after_step(self) -> None:
        pass

    def is_pressed(self) -> bool:
        return False

    @property
    def pending(self) -> bool:
        return bool(self._rows)

    def read_into(self, run: Run) -> None:
        while self._rows and (self._rows[0][2] is None or self._rows[0][2].query()):
            number, row, _ = self._rows.popleft()
            values = row.numpy()
            run.add_tensors([number], {name: values[None, :, k] for k, name in enumerate(OF_HOOKS)})

    def flush(self) -> None:
        for _, _, event in self._rows:
            if event is not None:
                event.synchronize()

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()


def _storage(optimizer: Optimizer, weight: torch.Tensor) -> str:
    """How this weight is stored, in words."""
    words = str(weight.dtype).removeprefix("torch.")
    if not isinstance(optimizer, RuleOptimizer):
        return words
    kind = kind_of(weight.dtype, optimizer.master_dtype(weight))
    at_random = optimizer.stochastic_rounding and weight.dtype == torch.bfloat16
    more = [_ALONGSIDE[kind]] if kind in _ALONGSIDE else []
    more += ["stochastic rounding"] * (at_random and kind in (MasterKind.NONE, MasterKind.SPLIT8))
    return " with ".join([words, *([" and ".join(more)] if more else [])])
