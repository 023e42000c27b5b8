"""Probes measure parameters at each step, by a Trainer's telemetry or by hooks of a torch optimizer.

A probe holds weak references only. A view that a notebook has displayed lives as long as the notebook, and so does its
recorder; the model must not.
"""

from __future__ import annotations

import copy
import math
import weakref
from typing import Any

import numpy as np
import torch

from ...kernels.storage import MasterKind, kind_of
from ...trainer import Telemetry, Trainer
from ...trainer.optim import shards
from ...trainer.optimizer import Optimizer, RuleOptimizer
from ...trainer.optimizer.multi import part_of
from ...trainer.validation import integer
from .copies import Copies
from .runs import Run

__all__ = ["OptimizerProbe", "TrainerProbe"]

QUANTITIES = (
    *("weight_norm", "gradient_norm", "update_norm", "update_ratio"),
    *("cosine", "gradient_absmax", "gradient_zeros", "gradient_nonfinite", "weight_unchanged"),
)
OF_HOOKS = QUANTITIES[:5]  # cheap enough to compute outside of the update
ROOM = 128  # steps that telemetry can hold on the device
GROWTH = 16  # the interval to the next histogram is the number of steps so far, divided by this
_ALONGSIDE: dict[MasterKind | None, str] = {
    MasterKind.FULL: "float32 master",
    MasterKind.SPLIT: "split master",
    MasterKind.SPLIT8: "24-bit master",
}


class TrainerProbe:
    """Reads the trainer's telemetry. A trainer without gets two that take turns, one of which also counts histograms."""

    def __init__(
        self, trainer: Trainer, every: int | None, histograms: tuple[str, ...], histogram_every: int | None
    ) -> None:
        self.source = weakref.ref(trainer)
        given = trainer.telemetry
        if given is not None and given.is_recorders:
            raise ValueError("source has another recorder: close() that one, or set trainer.telemetry = None, first")
        if histogram_every is not None:
            histogram_every = integer("histogram_every", histogram_every, low=1)
        self._has_own = given is None  # whether the recorder has made its telemetries, and takes them off again
        self._is_closed = False
        self._counting: Telemetry | None = None
        if given is None:
            self._plain = Telemetry(1 if every is None else every, ROOM, QUANTITIES)
            self._counting = Telemetry(1, ROOM, QUANTITIES, histograms) if histograms else None
            self._use(trainer)
        else:
            _check_telemetry(given, every, histograms, histogram_every)
            self._plain = given
        self._histogram_every = histogram_every
        self._start(0)
        self.names = list(self._plain.names)
        counts = any(name.endswith("_histogram") for telemetry in self._telemetries() for name in telemetry.quantities)
        self.edges = self._plain.edges if counts else np.zeros(0)
        indices = {id(param): index for index, param in trainer.optimizer.param_dict.items()}
        params = trainer._params
        self.storage = [_storage(part_of(trainer.optimizer, indices[id(param)]), param) for param in params]
        self.params = [weakref.ref(param) for param in params]

    def go_back(self, number: int) -> None:
        if self._has_own:  # new ones begin with the next step again
            self._plain = copy.copy(self._plain)
            self._counting = None if self._counting is None else copy.copy(self._counting)
            self._use(living(self.source))
        self._start(number)

    def described(self) -> str:
        return repr(living(self.source).optimizer)

    @property
    def every(self) -> int:
        return self._plain.every

    @property
    def number(self) -> int:
        trainer = self.source()
        return 0 if trainer is None else trainer.optimizer.num_update

    @property
    def scheduled(self) -> dict[str, float]:
        """The learning rate of the last update, and other numbers that have a schedule, by name."""
        optimizer = living(self.source).optimizer
        count = optimizer.num_update
        return {"learning_rate": optimizer.rate_at(count), **optimizer.scheduled_at(count)}

    def after_step(self) -> None:
        self._steps += 1
        if self._counting is not None:
            if self._steps == self._counted:  # the step that has just been counted
                self._counted += self._histogram_every or max(self._steps // GROWTH, 1)
            due = self._steps + 1 == self._counted
            living(self.source).telemetry = self._counting if due else self._plain

    def is_pressed(self) -> bool:
        """Return whether measurements should be read now, before the device has no room for more."""
        return self._steps % (ROOM // 2) == 0

    @property
    def pending(self) -> bool:
        return any(telemetry.pending for telemetry in self._telemetries())

    def read_into(self, run: Run) -> None:
        """Move measurements that have arrived into the run. Never waits."""
        # Series take steps in order, so a step waits for earlier ones of the other telemetry that have not arrived.
        readings, bound = [], None
        for i, telemetry in enumerate(self._telemetries()):
            arrays, self._places[i] = telemetry._read_from(self._places[i])
            if telemetry.pending:
                last = int(arrays["steps"].max(initial=self._last[i]))
                bound = last if bound is None else min(bound, last)
            readings.append(arrays)
        for i, arrays in enumerate(readings):
            if bound is not None:
                complete = arrays["steps"] <= bound
                self._places[i] -= np.count_nonzero(~complete)
                readings[i] = arrays = {name: array[complete] for name, array in arrays.items()}
            self._last[i] = int(arrays["steps"].max(initial=self._last[i]))
        if not readings:
            return
        steps = np.concatenate([arrays["steps"] for arrays in readings])
        if len(steps):
            order = np.argsort(steps)
            run.add_tensors(
                steps[order], {name: np.concatenate([arrays[name] for arrays in readings])[order] for name in QUANTITIES}
            )
        counts = {name: array for name, array in readings[-1].items() if array.ndim == 3}
        if counts and len(readings[-1]["steps"]):
            run.add_tensors(readings[-1]["steps"], counts)

    def flush(self) -> None:
        for telemetry in self._telemetries():
            telemetry.flush()

    def close(self) -> None:
        """Take the recorder's own telemetry off the trainer, or read no more of the trainer's."""
        trainer = self.source()
        if self._has_own and trainer is not None and trainer.telemetry in self._telemetries():
            trainer.telemetry = None
        self._is_closed = True

    def _start(self, number: int) -> None:
        """Read only what is measured from now on, after update `number`."""
        self._last = [number] * len(self._telemetries())  # for each, the last step that was read
        self._places = [telemetry._count() for telemetry in self._telemetries()]
        self._steps, self._counted = 0, 1

    def _use(self, trainer: Trainer) -> None:
        """Attach all telemetries to the trainer; the last one stays in use."""
        for telemetry in self._telemetries():
            trainer.telemetry = telemetry
            telemetry.is_recorders = True

    def _telemetries(self) -> list[Telemetry]:
        if self._is_closed:
            return []
        return [self._plain] + ([] if self._counting is None else [self._counting])


class OptimizerProbe:
    """Measures norms before and after every k-th step of a torch optimizer, in its step hooks."""

    edges = np.zeros(0)
    storage: tuple[str, ...] = ()

    def __init__(self, optimizer: torch.optim.Optimizer, every: int, module: torch.nn.Module | None = None) -> None:
        self.source, self.every = weakref.ref(optimizer), integer("every", every, low=1)
        self.number = 0
        self._rate: float | None = None  # of the last step; a scheduler may already have set the next rate
        params = [param for group in optimizer.param_groups for param in group["params"]]
        self.params = [weakref.ref(param) for param in params]
        module_names = {} if module is None else {id(param): name for name, param in module.named_parameters()}
        self.names = [
            module_names.get(id(param), name)
            for i, group in enumerate(optimizer.param_groups)
            for param, name in zip(
                group["params"],
                group.get("param_names", [f"{i}.{k}" for k in range(len(group["params"]))]),
                strict=True,
            )
        ]
        if module is not None and not module_names.keys() & {id(param) for param in params}:
            raise ValueError("module has none of the parameters that source steps: give the module that source was made for")
        self._before: dict[int, torch.Tensor] | None = None
        self._rows = Copies()
        self._hooks = [optimizer.register_step_pre_hook(self._begin), optimizer.register_step_post_hook(self._end)]

    def described(self) -> str:
        optimizer = living(self.source)
        settings = {key: value for key, value in optimizer.defaults.items() if value is not None}
        return f"{type(optimizer).__name__}({', '.join(f'{key}={value!r}' for key, value in settings.items())})"

    @property
    def scheduled(self) -> dict[str, float]:
        rate = float(living(self.source).param_groups[0]["lr"]) if self._rate is None else self._rate
        return {"learning_rate": rate}

    def go_back(self, number: int) -> None:
        self.number = number

    @torch.no_grad()
    def _begin(self, *_: Any) -> None:
        if self.number % self.every == 0:
            self._before = {i: shards.local(param.detach()).clone() for i, param in self._living().items()}

    @torch.no_grad()
    def _end(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self.number += 1
        self._rate = float(optimizer.param_groups[0]["lr"])
        if self._before is None:
            return
        params, before, self._before = self._living(), self._before, None
        moved = torch._foreach_sub([shards.local(params[i].detach()) for i in before], list(before.values()))
        norms = [torch._foreach_norm(tensors) for tensors in (list(before.values()), moved)]
        rows = [torch.full((4,), math.nan)] * len(self.params)
        for i, weight, update, change in zip(before, *norms, moved, strict=True):
            gradient = shards.local_gradient(self.names[i], params[i], params[i].grad)
            if gradient is None or gradient.layout != torch.strided:
                rows[i] = weight.new_full((4,), math.nan).float()
                continue
            norm = torch.linalg.vector_norm(gradient).to(weight)
            product = (gradient.to(change) * change).sum().to(weight)
            rows[i] = torch.stack([weight, norm, update, product]).float()
        self._add_up(rows, {i: shards.cut_among(param) for i, param in params.items()})
        weight, norm, update, product = torch.stack([row.to(rows[0].device) for row in rows]).unbind(1)
        row = torch.stack([weight, norm, update, update / weight, product / (norm * update)], dim=1)
        self._rows.add(self.number, row)

    @staticmethod
    def _add_up(rows: list[torch.Tensor], cuts: dict[int, shards.Cut]) -> None:
        """Replace the norms and products of shards by the whole tensors', in place. All ranks call this together."""
        for cut in dict.fromkeys(filter(None, cuts.values())):
            members = [i for i, each in cuts.items() if each == cut]
            sums = torch.stack([rows[i] for i in members]).double()
            sums[:, :3] = sums[:, :3].square()
            shards.add_up(sums, "sum", cut)
            sums[:, :3] = sums[:, :3].sqrt()
            for i, row in zip(members, sums.float(), strict=True):
                rows[i] = row

    def _living(self) -> dict[int, torch.Tensor]:
        return {i: param for i, ref in enumerate(self.params) if (param := ref()) is not None}

    def after_step(self) -> None:
        pass

    def is_pressed(self) -> bool:
        return False

    @property
    def pending(self) -> bool:
        return bool(self._rows)

    def read_into(self, run: Run) -> None:
        for number, row in self._rows.arrived():
            values = row.numpy()
            run.add_tensors([number], {name: values[None, :, k] for k, name in enumerate(OF_HOOKS)})

    def flush(self) -> None:
        self._rows.wait()

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()


def living(source: weakref.ref[Any]) -> Any:
    """Return the trainer or optimizer that a weak reference refers to; raise RuntimeError if it has been deleted."""
    target = source()
    if target is None:
        raise RuntimeError(
            "what this Recorder records is gone: a recorder does not keep its Trainer or optimizer; keep it in a variable"
        )
    return target


def _check_telemetry(
    telemetry: Telemetry, every: int | None, histograms: tuple[str, ...], histogram_every: int | None
) -> None:
    """Raise if the telemetry that a trainer was given does not measure what a recorder needs."""
    other = f", but source has telemetry with every={telemetry.every}: leave it out"
    lacking = [name for name in QUANTITIES if name not in telemetry.quantities]
    uncounted = [what for what in histograms if f"{what}_histogram" not in telemetry.quantities]
    for wrong, words in (
        (lacking, f"source has telemetry without {', '.join(lacking)}: add them to its metrics"),
        (telemetry.size < ROOM, f"source has telemetry of size={telemetry.size}: make one of size >= {ROOM}"),
        (every not in (None, telemetry.every), f"every={every!r}{other}"),
        (
            uncounted,
            f"histograms={histograms!r}, but source has telemetry without histograms of {', '.join(uncounted)}: "
            f"give it Telemetry(histograms={list(histograms)!r})",
        ),
        (histogram_every not in (None, telemetry.every), f"histogram_every={histogram_every!r}{other}"),
    ):
        if wrong:
            raise ValueError(f"{words}, or set trainer.telemetry = None, so that the recorder measures by itself")


def _storage(optimizer: Optimizer, weight: torch.Tensor) -> str:
    """Describe how a weight is stored, such as "bfloat16 with float32 master"."""
    words = str(weight.dtype).removeprefix("torch.")
    if not isinstance(optimizer, RuleOptimizer):
        return words
    kind = kind_of(weight.dtype, optimizer.master_dtype(weight))
    at_random = optimizer.stochastic_rounding and weight.dtype == torch.bfloat16
    more = [_ALONGSIDE[kind]] if kind in _ALONGSIDE else []
    more += ["stochastic rounding"] * (at_random and kind in (MasterKind.NONE, MasterKind.SPLIT8))
    return " with ".join([words, *([" and ".join(more)] if more else [])])
