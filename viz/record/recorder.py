"""Recorder: records a training loop step by step, without making the device wait."""

from __future__ import annotations

import atexit
import time
import warnings
import weakref
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ...trainer import Trainer
from ...trainer.optim import shards
from .loggers import LOGGED, Loggers
from .probes import OptimizerProbe, TrainerProbe, living
from .runs import Run, readable
from .scalars import ScalarBuffer, checked_scalars
from .series import POINTS

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Recorder"]

SECONDS = 0.1  # between two looks at what has arrived


class Recorder:
    """Records a training run into a `Run`: numbers that it is told, and what each step does to each parameter.

    With a `Trainer` the update itself measures (see `tristep.Telemetry`); the recorder becomes its telemetry. With an
    optimizer of torch's interface norms are taken before and after some of its steps, which reads all weights and gradients
    again. Norms of a DTensor are those of the whole tensor, summed over its ranks: each of them needs a recorder then.

    Args:
        source: a `Trainer` or a `torch.optim.Optimizer`, which has not been recorded by another one.
        name: of the run.
        every: record the parameters at the first step and then at each k-th; None is 1 with a trainer, else 16.
        histograms: which of "weight", "gradient" and "update" to count by size, with a trainer whose engine can.
        histogram_every: at the first step and then at each k-th; such a step costs several times as much. None: at growing
            intervals, a sixteenth of the steps so far, which are 65 histograms in 200 steps and 130 in 10,000.
        weights: of which parameters, by name, to follow single elements: their places in the flattened parameter.
        notes: words about the run, by name.
        module: whose names the tensors of a `torch.optim.Optimizer` have. None: those that it was given, as by
            `named_parameters()`, or else "0.1" for the second one of its first group, say. A `Trainer` has its own.
        to: loggers that get the numbers, too: names of new .csv and .jsonl files; a `SummaryWriter`; a run of W&B or
            Trackio, or `mlflow`; or a function of a step and a dict. Each has a thread of its own; training does not wait.
        log_every: loggers get the first value of each series in each k steps.
        log_quantities: what loggers get of each parameter, as "gradient_norm/0.weight"; see `Telemetry`.

    Like a view, a recorder keeps what it has recorded and not the model: it refers to `source` weakly.

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
        histogram_every: int | None = None,
        weights: Mapping[str, Any] | None = None,
        notes: Mapping[str, str] | None = None,
        module: torch.nn.Module | None = None,
        to: Iterable[Any] = (),
        log_every: int = 1,
        log_quantities: Iterable[str] = LOGGED,
    ) -> None:
        if not isinstance(source, (Trainer, torch.optim.Optimizer)):
            raise TypeError(f"source must be a Trainer or a torch.optim.Optimizer, got {type(source).__name__}")
        if module is not None and (isinstance(source, Trainer) or not isinstance(module, torch.nn.Module)):
            raise TypeError(
                f"module must be a torch.nn.Module, got {type(module).__name__}"
                if not isinstance(source, Trainer)
                else "module names the tensors of an optimizer; a Trainer has names of its own: leave it out"
            )
        measuring: TrainerProbe | OptimizerProbe
        if isinstance(source, Trainer):
            measuring = TrainerProbe(source, 1 if every is None else every, tuple(histograms), histogram_every)
        else:
            if tuple(histograms):
                raise ValueError(
                    f"histograms={tuple(histograms)!r} need a Trainer, whose update counts them: leave them out"
                )
            measuring = OptimizerProbe(source, 16 if every is None else every, module)
        own = {"optimizer": measuring.described()} | dict(notes or {})
        try:
            self._watched = _watched(measuring, weights)
            loggers = Loggers(to, log_every, log_quantities)
        except BaseException:
            measuring.close()
            raise
        self._now = _Recording(Run(name, measuring.names, measuring.edges, own, measuring.storage), measuring, loggers)
        self._looked = time.monotonic()

    def step(self, **scalars: float | torch.Tensor) -> None:
        """Note that a step has been taken, and numbers of it, such as the loss. The learning rate is noted by itself.

        Args:
            **scalars: numbers by name, or tensors of one element, which may still be in the making on a device.

        Raises:
            TypeError, ValueError: a value that is no single number, or no step has been taken since the last call; nothing
                has been recorded then.
            RuntimeError: what is recorded is gone.
        """
        living(self._now.measuring.source)
        number = self._now.measuring.number
        if number <= self._now.last:
            raise ValueError(f"step() after update {number}, which has been recorded: call it once after each step")
        rate: dict[str, float | torch.Tensor] = {"learning_rate": self._now.measuring.learning_rate}
        values = rate | checked_scalars(scalars)
        self._now.last = number
        self._now.scalars.add(number, values)
        if self._watched:
            watched = self._watched.items()
            self._now.scalars.add(number, {name: _elements(param(), places) for name, (param, places) in watched})
        self._now.measuring.after_step()
        is_late = (
            bool(self._now.loggers) and number - self._now.sent >= POINTS // 2
        )  # the run has that many steps as they were
        if time.monotonic() - self._looked > SECONDS or self._now.measuring.is_pressed() or is_late:
            self.look()

    def note(self, **scalars: float | torch.Tensor) -> None:
        """Add numbers of the last step that `step` has noted, which are known later or seldom, such as "val_loss".

        Args:
            **scalars: as for `step`; none that this step has already.

        Raises:
            TypeError, ValueError: a value that is no single number, or there has been no step, or it has such a number.
        """
        values = checked_scalars(scalars)
        if not self._now.last:
            raise ValueError("note() before the first step: it adds to what step() has noted")
        self._now.scalars.flush(self._now.run)
        for name in values:
            series = self._now.run.scalars.get(name)
            if series is not None and len(series) and series.recent()[0][-1] >= self._now.last:
                raise ValueError(f"note() of {name!r}: step {self._now.last} has a number of this name already")
        self._now.scalars.add(self._now.last, values)

    @property
    def source(self) -> Trainer | torch.optim.Optimizer | None:
        """The Trainer or optimizer that is recorded; None if nothing else refers to it any more."""
        return self._now.measuring.source()

    @property
    def run(self) -> Run:
        """What has been recorded so far, all of it: as `flush`, this waits for what is still in the making on a device."""
        self.flush()
        return self._now.run

    @property
    def last_step(self) -> int:
        """The number of the last update that `step` has noted, 0 before the first."""
        return self._now.last

    @property
    def due(self) -> bool:
        """Whether there has been an update that `step` has not noted yet."""
        return self._now.measuring.number > self._now.last

    @property
    def pending(self) -> bool:
        """Whether something that has been recorded has not arrived in the run yet; `flush` waits for it."""
        return self._now.scalars.pending or self._now.measuring.pending

    def record_into(self, run: Run, last_step: int) -> None:
        """Go on in another run, after trainer or optimizer have been restored to where they were after `last_step`.

        Args:
            run: of the same parameters; it has nothing that comes later.
            last_step: the number of the last update, as `last_step` was then.

        Raises:
            ValueError: the run does not fit; nothing has been changed.
        """
        if run.parameters != self._now.run.parameters:
            raise ValueError(f"run {run.name!r} has other parameters than the one being recorded")
        if run.last_step is not None and run.last_step > last_step:
            raise ValueError(f"run {run.name!r} reaches to step {run.last_step}: it cannot go on after step {last_step}")
        self.flush()
        self._now.measuring.go_back(last_step)
        self._now.loggers.go_back(self._now.run, run, last_step)
        self._now.run, self._now.last, self._now.sent = run, last_step, last_step

    def look(self) -> None:
        """Take what has arrived from the device into the run. `step` does so now and then. Never waits."""
        self._looked = time.monotonic()
        self._now.look()

    def flush(self) -> None:
        """Wait for all that has been recorded, and take it into the run."""
        self._now.flush()

    def close(self) -> None:
        """`flush`, and leave trainer or optimizer as they were. Also at the end of a `with` block.

        Waits until loggers have all of it, and closes their files; what was given open stays open. A recorder with loggers
        that is not closed does so at the end of the program.

        Raises:
            RuntimeError: loggers did not log everything. At the end of a `with` block that ends by another error, a warning.
        """
        if problems := self._now.close():
            raise RuntimeError(problems)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        problems = self._now.close()
        if problems and kind is None:
            raise RuntimeError(problems)
        if problems:
            warnings.warn(problems, stacklevel=2)

    def __repr__(self) -> str:
        return f"Recorder({self._now.run!r})"


class _Recording:
    """What a recorder has got so far, which is finished at the end of the program if the recorder has not been closed.

    Args:
        run: what it is recorded into; another one later.
        measuring: where it comes from.
        loggers: where it goes to, too.

    Attributes:
        run, measuring, loggers: as above.
        last: the number of the last update that was noted.
        sent: up to which step loggers have all.
        scalars: what has not arrived in the run.
    """

    def __init__(self, run: Run, measuring: TrainerProbe | OptimizerProbe, loggers: Loggers) -> None:
        self.run, self.measuring, self.loggers = run, measuring, loggers
        self.last = self.sent = 0
        self.scalars = ScalarBuffer()
        if loggers:  # which may be closed at the end, too, by what was registered before
            atexit.register(self._end)

    def look(self) -> None:
        """See `Recorder.look`."""
        self.scalars.look(self.run)
        was_pending = self.measuring.pending  # asked before reading: what arrives in between is read the next time
        self.measuring.read_into(self.run)
        if self.loggers:
            self._send(was_pending)

    def flush(self) -> None:
        """See `Recorder.flush`."""
        self.scalars.flush(self.run)
        self.measuring.flush()
        self.measuring.read_into(self.run)
        if self.loggers:
            self._send(False)

    def close(self) -> str:
        """See `Recorder.close`; returns what went wrong."""
        atexit.unregister(self._end)
        try:
            self.flush()
        finally:
            self.measuring.close()
            problems = self.loggers.close(self.run, self.last)
        return "; ".join(problems)

    def _end(self) -> None:
        if problems := self.close():
            warnings.warn(problems, stacklevel=1)

    def _send(self, is_pending: bool) -> None:
        """Give loggers the steps of which everything is in the run."""
        steps = [self.last]
        if is_pending:
            steps.append(max((series.last_step or 0 for series in self.run.tensors.values()), default=0))
        if self.scalars.next_step is not None:
            steps.append(self.scalars.next_step - 1)
        self.sent = min(steps)
        self.loggers.send(self.run, self.sent)


def _elements(param: torch.Tensor | None, places: torch.Tensor) -> torch.Tensor:
    """The values of these elements now; NaN where the parameter is gone."""
    if param is None:
        return torch.full(places.shape, torch.nan)
    return shards.local(param.detach()).reshape(-1)[places]


def _watched(
    measuring: TrainerProbe | OptimizerProbe, weights: Mapping[str, Any] | None
) -> dict[str, tuple[weakref.ref[torch.Tensor], torch.Tensor]]:
    found = {}
    known = dict(zip(measuring.names, measuring.params, strict=True))
    for name, places in (weights or {}).items():
        if name not in known:
            raise ValueError(f"weights has {name!r}: must be one of {', '.join(map(repr, list(known)[:8]))}")
        numbers = np.atleast_1d(np.asarray(places))
        param = known[name]()
        if param is not None and shards.cut_among(param):
            raise ValueError(
                f"weights has {name!r}, of which each rank has a shard: elements of whole tensors can be followed"
            )
        assert param is not None  # its trainer or optimizer is being given to the recorder
        size = param.numel()
        if numbers.dtype.kind not in "iu" or numbers.ndim != 1 or ((numbers < 0) | (numbers >= size)).any():
            raise ValueError(f"weights[{name!r}]={places!r}: must be integers from 0 to {size - 1}")
        found[readable(name)] = known[name], torch.as_tensor(numbers, dtype=torch.int64, device=param.device)
    return found
