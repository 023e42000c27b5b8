"""Recorder: writes down what a training loop does, step by step, without making the device wait."""

from __future__ import annotations

import copy
import time
from collections import deque
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..trainer import Telemetry, Trainer
from .runs import Run, Series

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Recorder"]


QUANTITIES = (
    *("weight_norm", "gradient_norm", "update_norm", "update_ratio"),
    *("cosine", "gradient_absmax", "gradient_zeros", "gradient_nonfinite"),
)
OF_HOOKS = QUANTITIES[:5]  # those that are worth their price where no update measures them
ROOM = 128  # recorded steps that the device may be ahead
SECONDS = 0.1  # between two looks at what has arrived


class Recorder:
    """Records a training run into a `Run`: numbers that it is told, and what each step does to each parameter.

    With a `Trainer` the update itself measures (see `tristep.Telemetry`); the recorder becomes its telemetry. With an
    optimizer of torch's interface norms are taken before and after some of its steps, which reads all weights and gradients
    again.

    Args:
        source: a `Trainer` or a `torch.optim.Optimizer`, which has not been recorded by another one.
        name: of the run.
        every: record the parameters at the first step and then at each k-th; None is 1 with a trainer, else 16.
        histograms: which of "weight", "gradient" and "update" to count by size, with a trainer whose engine can.
        histogram_every: at the first step and then at each k-th; such a step costs several times as much.
        weights: of which parameters, by name, to follow single elements: their places in the flattened parameter.
        notes: words about the run, by name.

    Example:
        >>> import torch, tristep
        >>> from tristep.viz import Recorder
        >>> net = torch.nn.Linear(2, 1)
        >>> trainer = tristep.Trainer(net, "sgd", {"learning_rate": 0.5})
        >>> recorder = Recorder(trainer)
        >>> for _ in range(3):
        ...     trainer.zero_grad()
        ...     loss = net(torch.ones(4, 2)).sum()
        ...     loss.backward()
        ...     trainer.step(batch_size=4)
        ...     recorder.step(loss=loss / 4)
        >>> recorder.run.tensors["gradient_norm"].curve().mean
        array([[1.4142135, 1.       ],
               [1.4142135, 1.       ],
               [1.4142135, 1.       ]], dtype=float32)
    """

    def __init__(
        self,
        source: Trainer | torch.optim.Optimizer,
        name: str = "run",
        *,
        every: int | None = None,
        histograms: Iterable[str] = (),
        histogram_every: int = 100,
        weights: Mapping[str, Any] | None = None,
        notes: Mapping[str, str] | None = None,
    ) -> None:
        if not isinstance(source, (Trainer, torch.optim.Optimizer)):
            raise TypeError(f"source must be a Trainer or a torch.optim.Optimizer, got {type(source).__name__}")
        self._measuring: _OfTrainer | _OfOptimizer
        if isinstance(source, Trainer):
            self._measuring = _OfTrainer(source, 1 if every is None else every, tuple(histograms), histogram_every)
        else:
            if tuple(histograms):
                raise ValueError(
                    f"histograms={tuple(histograms)!r} need a Trainer, whose update counts them: leave them out"
                )
            self._measuring = _OfOptimizer(source, 16 if every is None else every)
        measuring = self._measuring
        own = {"optimizer": measuring.described()} | dict(notes or {})
        self._run = Run(name, measuring.names, measuring.edges, own)
        try:
            self._watched = _watched(measuring, weights)
        except BaseException:
            measuring.close()
            raise
        self._last = 0
        self._here: dict[str, tuple[list[int], list[float]]] = {}  # numbers that are not in the run yet
        self._later: deque[tuple[int, str, torch.Tensor, Any]] = deque()
        self._looked = time.monotonic()

    def step(self, **scalars: float | torch.Tensor) -> None:
        """Note that a step has been taken, and numbers of it, such as the loss. The learning rate is noted by itself.

        Args:
            **scalars: numbers by name, or tensors of one element, which may still be in the making on a device.

        Raises:
            TypeError, ValueError: a value that is no single number, or no step has been taken since the last call; nothing
                has been recorded then.
        """
        number = self._measuring.number
        if number <= self._last:
            raise ValueError(f"step() after update {number}, which has been recorded: call it once after each step")
        here: dict[str, float] = {"learning_rate": self._measuring.learning_rate}
        there: dict[str, torch.Tensor] = {}
        for name, value in scalars.items():
            if isinstance(value, torch.Tensor):
                if value.numel() != 1:
                    raise ValueError(f"{name} has shape {tuple(value.shape)}: must be a single number")
                if value.device.type == "cpu":
                    here[name] = float(value.detach())
                else:
                    there[name] = value.detach().reshape(())
            else:
                try:
                    here[name] = float(value)
                except (TypeError, ValueError):
                    raise TypeError(f"{name} must be a number, got {value!r} ({type(value).__name__})") from None
        self._last = number
        for name, value in here.items():
            steps, values = self._here.setdefault(name, ([], []))
            steps.append(number)
            values.append(value)
        for name, value in there.items():
            self._send(number, name, value)
        for name, (parameter, places) in self._watched.items():
            self._send(number, name, parameter.detach().reshape(-1)[places])
        self._measuring.after_step()
        if time.monotonic() - self._looked > SECONDS or self._measuring.is_pressed():
            self.look()

    @property
    def run(self) -> Run:
        """What has been recorded so far, all of it: as `flush`, this waits for what is still in the making on a device."""
        self.flush()
        return self._run

    @property
    def last_step(self) -> int:
        """The number of the last update that `step` has noted, 0 before the first."""
        return self._last

    @property
    def due(self) -> bool:
        """Whether there has been an update that `step` has not noted yet."""
        return self._measuring.number > self._last

    @property
    def pending(self) -> bool:
        """Whether something that has been recorded has not arrived in the run yet; `flush` waits for it."""
        return bool(self._here or self._later) or self._measuring.pending

    def record_into(self, run: Run, last_step: int) -> None:
        """Go on in another run, after trainer or optimizer have been put back to where they were after `last_step`.

        Args:
            run: of the same parameters; it has nothing that comes later.
            last_step: the number of the last update, as `last_step` was then.

        Raises:
            ValueError: the run does not fit; nothing has been changed.
        """
        if run.parameters != self._measuring.names:
            raise ValueError(f"run {run.name!r} has other parameters than the one being recorded")
        if run.last_step is not None and run.last_step > last_step:
            raise ValueError(f"run {run.name!r} reaches to step {run.last_step}: it cannot go on after step {last_step}")
        self.flush()
        self._measuring.go_back(last_step)
        self._run, self._last = run, last_step

    def look(self) -> None:
        """Take what has arrived from the device into the run. `step` does so now and then. Never waits."""
        self._looked = time.monotonic()
        self._put_numbers()
        while self._later and (self._later[0][3] is None or self._later[0][3].query()):
            self._take(*self._later.popleft()[:3])
        self._measuring.read_into(self._run)

    def flush(self) -> None:
        """Wait for all that has been recorded, and take it into the run."""
        self._put_numbers()
        while self._later:
            number, name, value, event = self._later.popleft()
            if event is not None:
                event.synchronize()
            self._take(number, name, value)
        self._measuring.flush()
        self._measuring.read_into(self._run)

    def close(self) -> None:
        """`flush`, and leave trainer or optimizer as they were. Also at the end of a `with` block."""
        self.flush()
        self._measuring.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Recorder({self._run!r})"

    def _put_numbers(self) -> None:
        for name, (steps, values) in self._here.items():
            self._run.scalars.setdefault(name, Series()).extend(steps, values)
        if self._here:
            self._run.version += 1
        self._here = {}

    def _send(self, number: int, name: str, value: torch.Tensor) -> None:
        if value.device.type == "cuda":
            host = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
            host.copy_(value, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
            self._later.append((number, name, host, event))
        else:
            self._later.append((number, name, value.cpu(), None))

    def _take(self, number: int, name: str, value: torch.Tensor) -> None:
        if value.ndim == 0:
            self._run.add_scalars(number, {name: float(value)})
        else:
            self._run.add_weights(number, {name: value.float().numpy()})


class _OfTrainer:
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


class _OfOptimizer:
    """Norms before and after some steps of an optimizer of torch's interface, by its hooks."""

    edges = np.zeros(0)

    def __init__(self, optimizer: torch.optim.Optimizer, every: int) -> None:
        if not (isinstance(every, int) and every >= 1):
            raise ValueError(f"every={every!r}: must be an integer >= 1")
        self._optimizer, self._every = optimizer, every
        self.number = 0
        self._rate: float | None = None  # of the last step; a scheduler may have set the next one's since
        self.params = [param for group in optimizer.param_groups for param in group["params"]]
        self.names = [
            name
            for i, group in enumerate(optimizer.param_groups)
            for name in group.get("param_names", [f"{i}.{k}" for k in range(len(group["params"]))])
        ]
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
        none = torch.full((), float("nan"))
        gradients = [param.grad for param in self.params]
        moved = torch._foreach_sub(list(self.params), before)
        norms = [torch._foreach_norm(tensors) for tensors in (before, moved)]
        rows = []
        for weight, update, change, gradient in zip(*norms, moved, gradients, strict=True):
            if gradient is None or gradient.layout != torch.strided:
                rows.append(torch.stack([none.to(weight)] * len(OF_HOOKS)))
                continue
            norm = torch.linalg.vector_norm(gradient).to(weight)
            product = (gradient.to(change) * change).sum().to(weight)
            rows.append(torch.stack([weight, norm, update, update / weight, product / (norm * update)]))
        row = torch.stack([each.float().to(rows[0].device) for each in rows])
        if row.device.type == "cuda":
            host = torch.empty(row.shape, pin_memory=True)
            host.copy_(row, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
            self._rows.append((self.number, host, event))
        else:
            self._rows.append((self.number, row.cpu(), None))

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


def _watched(measuring: _OfTrainer | _OfOptimizer, weights: Mapping[str, Any] | None) -> dict[str, tuple[Any, torch.Tensor]]:
    found = {}
    known = dict(zip(measuring.names, measuring.params, strict=True))
    for name, places in (weights or {}).items():
        if name not in known:
            raise ValueError(f"weights has {name!r}: must be one of {', '.join(map(repr, list(known)[:8]))}")
        numbers = np.atleast_1d(np.asarray(places))
        size = known[name].numel()
        if numbers.dtype.kind not in "iu" or numbers.ndim != 1 or ((numbers < 0) | (numbers >= size)).any():
            raise ValueError(f"weights[{name!r}]={places!r}: must be integers from 0 to {size - 1}")
        found[name] = known[name], torch.as_tensor(numbers, dtype=torch.int64, device=known[name].device)
    return found
