"""TrainingSteps: takes the steps of a loop, records what they yield, and lets the view follow."""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ...trainer import CheckpointManager, Trainer
from ...trainer.interrupts import gets_signals
from ..record import Recorder
from ..views import View
from .learning_rates import LearningRate
from .recording import StepRecording
from .runner import StepRunner
from .saving import StepSaving
from .screen import Screen
from .steps import StepSource, is_stateful

__all__ = ["TrainingSteps", "check_arguments", "say_paused"]


class TrainingSteps:
    """What a `StepRunner` listens to, made of the parts of a loop."""

    def __init__(self, source: StepSource, rate: LearningRate, recording: StepRecording, saving: StepSaving) -> None:
        self._source, self._rate, self._recording, self._saving = source, rate, recording, saving

    def attach(self, runner: StepRunner, screen: Screen, loop: Any) -> None:
        """Work for this runner, and show what it does. The `LiveLoop` lives as long as it runs."""
        self._runner, self._screen, self._loop = runner, screen, loop

    def take_step(self) -> Any:
        """Take one step at the multiplied learning rate. StopIteration: there are no more."""
        return self._rate.take(self._source.take)

    def record(self, value: Any) -> None:
        """Note what the step has yielded, and save if it is time."""
        self._recording.note(self._runner.n_steps, value, self._rate.last)
        self._saving.after_step(value)

    def after_slice(self, turn: int) -> None:
        """Some steps have been taken, and the next ones wait for this: let the view follow."""
        if self._recording.recorder is None:
            with self._runner.gate.at_rest():
                self._recording.look()
        self._screen.refresh(turn)
        self._screen.look_around()
        if self._loop.control.cell_is_gone():
            self._runner.ask_later("stopped")

    def on_end(self, status: str) -> None:
        """Wait for what has been recorded and saved, and close a generator that is not at its end."""
        self._recording.finish()
        try:
            self._saving.end(status)
        except Exception as error:
            self._runner.status, self._runner.exception = "failed", error
        if status == "stopped":
            self._source.close()
        self._loop.control.release()

    def on_status(self, interrupted: bool) -> None:
        """Another status has been taken up, after an interrupt or not: show it."""
        runner = self._runner
        with runner.gate.at_rest():
            self._recording.flush()
        self._screen.refresh()
        if interrupted and runner.status == "paused":  # it may have been the last step
            say_paused(runner.n_steps)
        unseen = self._loop.mode == "task" and self._screen.view is None
        if runner.status == "failed" and unseen and runner.exception is not None:
            traceback.print_exception(runner.exception)


def say_paused(step: int) -> None:
    """Print that an interrupt has paused the loop, where the person is who has interrupted it."""
    if gets_signals():
        print(f"paused after step {step}; loop.resume() goes on")


def check_arguments(steps: Any, trainer: Any, recorder: Any, stateful: Sequence[Any], view: Any, checkpoint: Any) -> None:
    """Refuse what a `LiveLoop` cannot be made of."""
    if not callable(steps) and not isinstance(steps, Iterable):
        raise TypeError(
            f"steps is a {type(steps).__name__}: must be a generator function, an iterator or a callable that takes one"
        )
    if trainer is not None and not isinstance(trainer, (Trainer, torch.optim.Optimizer)):
        raise TypeError(f"trainer must be a Trainer, a torch.optim.Optimizer or None, got {type(trainer).__name__}")
    if recorder is not None and not isinstance(recorder, Recorder):
        raise TypeError(f"recorder must be a Recorder or None, got {type(recorder).__name__}")
    for i, each in enumerate(stateful):
        if not is_stateful(each):
            raise TypeError(f"stateful[{i}] is a {type(each).__name__}: it needs state_dict and load_state_dict")
    if not (checkpoint is None or isinstance(checkpoint, CheckpointManager)):
        raise TypeError(f"checkpoint must be a CheckpointManager or None, got {type(checkpoint).__name__}")
    if checkpoint is not None and checkpoint.trainer is not trainer:
        raise ValueError("checkpoint is a CheckpointManager of another trainer than the loop's")
    if not (view is None or view == "live" or isinstance(view, View)):
        raise TypeError(f"view={view!r}: must be 'live', None or a View")
