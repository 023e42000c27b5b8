"""Snapshots of a training, and runs that branch from them."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...trainer.interrupts import uninterrupted
from ...trainer.snapshot import Snapshot as TrainerSnapshot
from ..record import Run, RunSet
from .learning_rates import LearningRate
from .recording import StepRecording
from .runner import StepRunner
from .steps import weakly

__all__ = ["Branches", "Snapshot"]


@dataclass(frozen=True)
class Snapshot:
    """All that training depends on, of one moment, as `LiveLoop.snapshot` took it.

    Attributes:
        name: its name.
        step: after which step.
        run: the name of the run.
    """

    name: str
    step: int
    run: str
    state: Mapping[str, Any] = field(repr=False, compare=False)


class Branches:
    """The runs of a loop, and the moments of training that it can go back to. Its methods are called between two steps.

    Args:
        runner, rate, recording: those of the loop.
        stateful: what else training depends on, with `state_dict` and `load_state_dict`; referred to weakly.

    Attributes:
        runs: all of them.
        snapshots: by name.
    """

    def __init__(self, runner: StepRunner, rate: LearningRate, recording: StepRecording, stateful: Sequence[Any]) -> None:
        self.runs = RunSet([recording.run])
        self.snapshots: dict[str, Snapshot] = {}
        self._runner, self._rate, self._recording = runner, rate, recording
        self._stateful = list(map(weakly, stateful))
        self._left_off: dict[str, Snapshot] = {}  # by run, where it was when another one was gone on with

    def new_name(self, name: str | None) -> str:
        """This name, or a new one for None.

        Raises:
            ValueError: a run of that name exists.
        """
        names = [run.name for run in self.runs]
        if name is None:
            return next(f"branch {k}" for k in range(1, len(names) + 2) if f"branch {k}" not in names)
        if name in names:
            raise ValueError(f"name={name!r}: there is a run of that name already")
        return name

    def find(self, at: str | Snapshot | None) -> Snapshot | None:
        """A snapshot by its name; None is none.

        Raises:
            KeyError: there is no such snapshot.
        """
        if not isinstance(at, str):
            return at
        if at not in self.snapshots:
            known = ", ".join(map(repr, self.snapshots)) or "none"
            raise KeyError(f"at={at!r}: there is no snapshot of that name; there are {known}")
        return self.snapshots[at]

    def keep(self, name: str | None) -> Snapshot:
        """Take a snapshot under this name, or that of the step."""
        name = f"step {self._runner.n_steps}" if name is None else name
        self.snapshots[name] = found = self._take(name)
        return found

    @uninterrupted
    def begin(self, name: str, at: Snapshot | None) -> Run:
        """Go on from a snapshot, None is here and now, in a new run."""
        run = self._recording.run
        self._left_off[run.name] = here = self._take(run.name)
        snapshot = here if at is None else at
        notes = run.notes | {"branched from": f"{snapshot.run}, step {snapshot.step}"}
        new = Run(name, run.parameters, run.edges, notes, run.storage)
        self._restore(snapshot, new)
        self.runs.add(new)
        return new

    @uninterrupted
    def pick(self, run: Run) -> None:
        """Go on with a run where it was left."""
        current = self._recording.run
        self._left_off[current.name] = self._take(current.name)
        self._restore(self._left_off.pop(run.name), run)

    def forget(self) -> None:
        """Drop all moments to which it could go back."""
        self.snapshots.clear()
        self._left_off.clear()

    def _take(self, name: str) -> Snapshot:
        rates = self._rate.needed("snapshot")
        self._recording.flush()
        state = {
            "source": TrainerSnapshot(rates.source),
            "gradients": [None if param.grad is None else param.grad.detach().clone() for param in rates.params()],
            "stateful": [copy.deepcopy(each().state_dict()) for each in self._stateful],
            "multiplier": self._rate.multiplier,
            "recorded": self._recording.last_step,
        }
        return Snapshot(name, self._runner.n_steps, self._recording.run.name, state)

    def _restore(self, snapshot: Snapshot, run: Run) -> None:
        rates, state = self._rate.needed("branch"), snapshot.state
        self._recording.flush()
        self._recording.finish()
        for each, own in zip(self._stateful, state["stateful"], strict=True):
            each().load_state_dict(copy.deepcopy(own))
        state["source"].restore()  # and last its random numbers, of which the others may have used some
        for param, gradient in zip(rates.params(), state["gradients"], strict=True):
            param.grad = None if gradient is None else gradient.clone()
        self._rate.multiplier, self._rate.last = state["multiplier"], rates.now()
        self._runner.n_steps = snapshot.step
        self._recording.go_on_in(run, state["recorded"])
