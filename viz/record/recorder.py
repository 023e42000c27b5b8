"""Recorder: records a training loop step by step, without blocking the device."""

from __future__ import annotations

import atexit
import time
import warnings
import weakref
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ...kernels.messages import one_of
from ...trainer import Trainer
from ...trainer.optim import shards
from ...trainer.validation import instance
from .activations import ActivationProbe
from .loggers import LOGGED, Loggers
from .probes import OptimizerProbe, TrainerProbe, living
from .runs import Run, readable
from .scalars import ScalarBuffer, checked_scalars
from .series import POINTS

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Recorder"]

SECONDS = 0.1  # between two calls of `poll`


class Recorder:
    """Records a training run: the numbers passed to `step`, and what each step does to each parameter.

    With a `Trainer`, the fused update measures the parameters (see `tristep.Telemetry`). A trainer that was made with
    telemetry keeps it, and the recorder reads it; `telemetry=True` measures all that is needed. A trainer without telemetry
    gets the recorder's, until `close`. With a torch optimizer, norms are computed before and after every k-th step, which
    reads all weights and gradients again. Norms of a DTensor are those of the whole tensor, summed over ranks, so every rank
    needs a recorder.

    Args:
        source: a `Trainer` or a `torch.optim.Optimizer` without another recorder. It is referenced weakly: a recorder keeps
            what it has recorded, and not the model.
        name: the name of the run.
        every: measure the parameters at the first step and then at every k-th, >= 1. None means as the trainer's telemetry
            does, 1 for a trainer without, and 16 for a torch optimizer.
        histograms: which of "weight", "gradient" and "update" to count in histograms; only with a trainer. If that has
            telemetry with histograms, all of these are recorded.
        histogram_every: count histograms at the first step and then at every k-th; such a step costs several times as much.
            None means growing intervals, a sixteenth of the steps so far: 65 histograms in 200 steps, 130 in 10,000.
        weights: single elements to follow: for each parameter name, their indices in the flattened parameter.
        activations: a module, such as the network: of the output of each of its layers the mean, the deviation and the share
            of zeros are measured, at the steps at which parameters are, in the last forward pass before the step. Layers are
            modules without children; functions such as `torch.relu` are none. `ActivationsView` draws them. A forward pass
            that torch has compiled, or a CUDA graph, is not seen; a warning says so.
        notes: facts about the run as text, by name, for its pictures.
        module: names the parameters of a torch optimizer. None means the names that the optimizer got from
            `named_parameters()`, or else group and index: "0.1" is the second parameter of the first group. Not with a
            `Trainer`, which has names.
        to: loggers that also get the numbers: the name of a new .csv or .jsonl file; a `SummaryWriter`; a run of W&B; or
            a function of a step and a dict. Each has its own thread; training never waits.
        log_every: loggers get the first value of each series in every window of this many steps, >= 1.
        log_quantities: the quantities of each parameter that loggers get, under names such as "gradient_norm/0.weight"; see
            `Telemetry` for all quantities.

    Raises:
        TypeError, ValueError: an argument is invalid; the message names it.

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
        activations: torch.nn.Module | None = None,
        notes: Mapping[str, str] | None = None,
        module: torch.nn.Module | None = None,
        to: Iterable[Any] = (),
        log_every: int = 1,
        log_quantities: Iterable[str] = LOGGED,
    ) -> None:
        instance("source", source, (Trainer, torch.optim.Optimizer), "a Trainer or a torch.optim.Optimizer")
        if module is not None and (isinstance(source, Trainer) or not isinstance(module, torch.nn.Module)):
            raise TypeError(
                f"module must be a torch.nn.Module, got {type(module).__name__}"
                if not isinstance(source, Trainer)
                else "module names the tensors of an optimizer; a Trainer has names of its own: leave it out"
            )
        measuring: TrainerProbe | OptimizerProbe
        if isinstance(source, Trainer):
            measuring = TrainerProbe(source, every, tuple(histograms), histogram_every)
        else:
            if tuple(histograms):
                raise ValueError(
                    f"histograms={tuple(histograms)!r} need a Trainer, whose update counts them: leave them out"
                )
            measuring = OptimizerProbe(source, 16 if every is None else every, module)
        notes = {"optimizer": measuring.described()} | dict(notes or {})
        layers = None
        try:
            self._watched = _watched(measuring, weights)
            if activations is not None:
                instance("activations", activations, torch.nn.Module, "a module, such as the network")
                layers = ActivationProbe(activations, measuring.every)
            loggers = Loggers(to, log_every, log_quantities)
        except BaseException:
            measuring.close()
            if layers is not None:
                layers.close()
            raise
        run = Run(name, measuring.names, measuring.edges, notes, measuring.storage, () if layers is None else layers.names)
        self._now = _Recording(run, measuring, layers, loggers)
        self._looked = time.monotonic()

    def step(self, *unnamed: float | torch.Tensor, **scalars: float | torch.Tensor) -> None:
        """Record the step that has just been taken. Call it once after each step.

        The learning rate is recorded, too, and the values of a Trainer's `schedules` by the names of their settings.

        Args:
            *unnamed: refused: a number needs a name, as in `step(loss=loss)`.
            **scalars: numbers of the step by name, such as the loss, or tensors of one element. Tensors on a GPU are copied
                asynchronously.

        Raises:
            TypeError, ValueError: a value has no name or is not a single number, or no step has been taken since the last
                call; nothing has been recorded.
            RuntimeError: the trainer or optimizer has been deleted.
        """
        _check_names("step", unnamed)
        living(self._now.measuring.source)
        number = self._now.measuring.number
        if number <= self._now.last:
            raise ValueError(f"step() after update {number}, which has been recorded: call it once after each step")
        values: dict[str, float | torch.Tensor] = {**self._now.measuring.scheduled, **checked_scalars(scalars)}
        self._now.last = number
        self._now.scalars.add(number, values)
        if self._watched:
            watched = self._watched.items()
            self._now.scalars.add(number, {name: _elements(param(), places) for name, (param, places) in watched})
        self._now.measuring.after_step()
        if self._now.layers is not None:
            self._now.layers.after_step(number)
        # A run keeps the last `POINTS` steps unchanged; loggers must get a step before it leaves them.
        is_late = bool(self._now.loggers) and number - self._now.sent >= POINTS // 2
        if time.monotonic() - self._looked > SECONDS or self._now.measuring.is_pressed() or is_late:
            self.poll()

    def note(self, *unnamed: float | torch.Tensor, **scalars: float | torch.Tensor) -> None:
        """Add numbers to the last recorded step, for values that are known later or rarely, such as "val_loss".

        Args:
            *unnamed: refused, as by `step`.
            **scalars: numbers by name, as for `step`.

        Raises:
            TypeError, ValueError: a value has no name or is not a single number, no step has been recorded yet, or the step
                already has a number of this name.
        """
        _check_names("note", unnamed)
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
        """The Trainer or optimizer that is recorded; None if it has been deleted."""
        return self._now.measuring.source()

    @property
    def run(self) -> Run:
        """The complete recording so far. Waits until all values have arrived from the device, as `flush` does."""
        self.flush()
        return self._now.run

    @property
    def last_step(self) -> int:
        """The number of the last recorded update; 0 before the first."""
        return self._now.last

    @property
    def due(self) -> bool:
        """Whether the last update has not been recorded by `step` yet."""
        return self._now.measuring.number > self._now.last

    @property
    def pending(self) -> bool:
        """Whether recorded values are still on their way from the device; `flush` waits for them."""
        layers = self._now.layers
        return self._now.scalars.pending or self._now.measuring.pending or (layers is not None and layers.pending)

    def record_into(self, run: Run, last_step: int) -> None:
        """Continue the recording in another run, after the trainer or optimizer has been restored to an earlier state.

        Args:
            run: a run with the same parameters and without steps after `last_step`.
            last_step: the number of the last update before the restored state.

        Raises:
            ValueError: the run has other parameters, other layers or later steps; nothing has changed.
        """
        if run.parameters != self._now.run.parameters or run.layers != self._now.run.layers:
            raise ValueError(f"run {run.name!r} has other parameters or layers than the one being recorded")
        if run.last_step is not None and run.last_step > last_step:
            raise ValueError(f"run {run.name!r} reaches to step {run.last_step}: it cannot go on after step {last_step}")
        self.flush()
        self._now.measuring.go_back(last_step)
        if self._now.layers is not None:
            self._now.layers.start()
        self._now.loggers.go_back(self._now.run, run, last_step)
        self._now.run, self._now.last, self._now.sent = run, last_step, last_step

    def poll(self) -> None:
        """Move values that have arrived from the device into the run, without waiting. `step` calls it every 0.1 s."""
        self._looked = time.monotonic()
        self._now.poll()

    def flush(self) -> None:
        """Wait for all values on their way from the device, and move them into the run."""
        self._now.flush()

    def close(self) -> None:
        """Flush, detach from the trainer or optimizer, and finish the loggers. The end of a `with` block does the same.

        Waits until the loggers have logged everything, and closes files that were opened for them; loggers that the user
        opened stay open. A recorder with loggers that is never closed does this at the end of the program.

        Raises:
            RuntimeError: a logger did not log everything. If a `with` block ends by another exception, this is a warning.
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
    """The state of a recorder. It is apart from the `Recorder` so that a function at exit can finish it.

    Loggers have all steps up to `sent`; `scalars` have not arrived in the run, which `record_into` replaces.
    """

    def __init__(
        self, run: Run, measuring: TrainerProbe | OptimizerProbe, layers: ActivationProbe | None, loggers: Loggers
    ) -> None:
        self.run, self.measuring, self.layers, self.loggers = run, measuring, layers, loggers
        self.last = self.sent = 0
        self.scalars = ScalarBuffer()
        if loggers:  # functions registered before this one may close them later, at exit
            atexit.register(self._end)

    def poll(self) -> None:
        self.scalars.poll(self.run)
        was_pending = self.measuring.pending  # asked before reading: what arrives in between is read the next time
        self.measuring.read_into(self.run)
        self._read_layers()
        if self.loggers:
            self._send(was_pending)

    def flush(self) -> None:
        self.scalars.flush(self.run)
        self.measuring.flush()
        self.measuring.read_into(self.run)
        if self.layers is not None:
            self.layers.flush()
        self._read_layers()
        if self.loggers:
            self._send(False)

    def _read_layers(self) -> None:
        if self.layers is not None and self.run.activations is not None:
            self.layers.read_into(self.run.activations)

    def close(self) -> str:
        """Flush, detach, and close the loggers; return messages about problems, or ""."""
        atexit.unregister(self._end)
        try:
            self.flush()
        finally:
            self.measuring.close()
            if self.layers is not None:
                self.layers.close()
            problems = self.loggers.close(self.run, self.last)
        return "; ".join(problems)

    def _end(self) -> None:
        if problems := self.close():
            warnings.warn(problems, stacklevel=1)

    def _send(self, is_pending: bool) -> None:
        """Send loggers the steps whose values have all arrived in the run."""
        steps = [self.last]
        if is_pending:
            steps.append(max((series.last_step or 0 for series in self.run.tensors.values()), default=0))
        if self.scalars.next_step is not None:
            steps.append(self.scalars.next_step - 1)
        self.sent = min(steps)
        self.loggers.send(self.run, self.sent)


def _check_names(method: str, unnamed: tuple[Any, ...]) -> None:
    if unnamed:
        example = {"step": "loss=loss", "note": "val_loss=loss"}[method]
        values = ", ".join(f"{value!r:.80}" for value in unnamed)
        raise TypeError(f"{method}({values}): give each number by its name, such as {method}({example})")


def _elements(param: torch.Tensor | None, places: torch.Tensor) -> torch.Tensor:
    """Return the current values of elements of a parameter; NaN if it has been deleted."""
    if param is None:
        return torch.full(places.shape, torch.nan)
    return shards.local(param.detach()).reshape(-1)[places]


def _watched(
    measuring: TrainerProbe | OptimizerProbe, weights: Mapping[str, Any] | None
) -> dict[str, tuple[weakref.ref[torch.Tensor], torch.Tensor]]:
    watched = {}
    params = dict(zip(measuring.names, measuring.params, strict=True))
    for name, places in (weights or {}).items():
        if name not in params:
            raise ValueError(f"weights has {name!r}:{one_of(name, params)}")
        numbers = np.atleast_1d(np.asarray(places))
        param = params[name]()
        if param is not None and shards.cut_among(param):
            raise ValueError(
                f"weights has {name!r}, of which each rank has a shard: elements of whole tensors can be followed"
            )
        assert param is not None  # the recorder has just got its trainer or optimizer
        size = param.numel()
        if numbers.dtype.kind not in "iu" or numbers.ndim != 1 or ((numbers < 0) | (numbers >= size)).any():
            raise ValueError(f"weights[{name!r}]={places!r}: must be integers from 0 to {size - 1}")
        watched[readable(name)] = params[name], torch.as_tensor(numbers, dtype=torch.int64, device=param.device)
    return watched
