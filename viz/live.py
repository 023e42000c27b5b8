"""LiveLoop: a training loop that runs while the notebook stays usable, and can be paused, steered and branched."""

from __future__ import annotations

import asyncio
import contextvars
import copy
import inspect
import signal
import threading
import time
import traceback
import warnings
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from ..trainer import Trainer
from ..trainer.arguments import choice, real, whole
from ..trainer.fit import _place, _unpack
from ..trainer.snapshot import Snapshot as TrainerSnapshot
from ..trainer.snapshot import random_state, set_random_state
from .record import Recorder, Run, RunSet, Series
from .render.notebook import has_front_end, in_notebook, request, running_event_loop
from .scene import Axis, Button, Control, Layer, Panel, Scene, Text
from .views import FrameBudget, LossView, View

__all__ = ["LiveLoop", "LiveView", "Snapshot", "stop_loops"]

MODES = ("auto", "task", "thread", "block")
ENDED = ("stopped", "finished", "failed")
UNSEEN = 60.0  # seconds without a page that shows the view, after which that is told
SLICE = 0.02  # seconds of steps between two looks at what else there is to do
MOST_WAITING = 1000  # numbers on another device, before the loop waits for it where no picture does
MULTIPLIERS = [2.0 ** (k / 2) for k in range(-12, 13)]  # that the view's slider has; 1 is among them


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


class LiveLoop:
    """Runs training steps, one after the other, and lets a person watch and steer them.

    What runs them is the `mode`:

    - "task": a task of asyncio in the background. The cell returns at once, and the notebook's widgets work, because the
      task lets go of the thread every 20 ms. Other cells run between the steps. Whatever thread asks for them, steps are
      taken in the event loop in which the loop was made, or first started.
    - "thread": a thread in the background, for steps that take longer than a person waits for a button.
    - "block": the cell itself, until the last step. "Run all" stays in order, and only the interrupt button steers.
    - "auto": "task" in a notebook that a person has open, else "block", as in nbclient, papermill and plain Python.

    However it runs, weights come out the same to the bit, paused or not. The interrupt button, or Ctrl-C, pauses after the
    step at hand; a second one breaks it off. A cell that runs meanwhile is interrupted as ever.

    Args:
        steps: a generator function or an iterator that takes one training step for each `next`, or a callable that takes
            one, until it returns False or raises StopIteration. It may yield or return the loss, or numbers by name.
        trainer: the `Trainer` or `torch.optim.Optimizer` in use; None: there are no rates to set and no snapshots.
        recorder: a `Recorder` of it. Its `step` is called with what the steps yield, unless they do so themselves. None: the
            numbers that they yield are kept, and the rate.
        stateful: what else training depends on, for snapshots: objects with `state_dict` and `load_state_dict`, such as a
            model with buffers, a scheduler of torch, a GradScaler. `steps` itself may have them, too. A generator has no
            such thing: after going back to a snapshot it goes on with the batches that come next.
        view: what is redrawn as it goes: a `View`, which has its own `FrameBudget`; "live" makes a `LiveView`, None draws
            nothing.
        mode: as above.
        frames_per_second: how often a "live" view is redrawn at most, > 0; less often where that would take over 5 % of the
            time.
        name: of the run, where there is no recorder.
        when_unseen: "go on", or "pause" once no page has shown the view for a minute, as after its tab has been closed. Its
            words say so in either case, when it is seen again. Widgets without a canvas cannot tell.

    Attributes:
        status: "ready", "running", "paused", "stopped", "finished" or "failed".
        n_steps: how many steps led to where it is.
        run: the `Run` being recorded.
        runs: all of them, a `RunSet`: a branch is a run of its own.
        snapshots: by name.
        exception: what ended it, if "failed".

    Raises:
        TypeError, ValueError: an argument that does not fit; the message says which and what is allowed.

    Example:
        >>> import torch, tristep
        >>> from tristep.viz import LiveLoop
        >>> net = torch.nn.Linear(2, 1)
        >>> trainer = tristep.Trainer(net, "sgd", {"learning_rate": 0.1})
        >>> def train():
        ...     for _ in range(20):
        ...         trainer.zero_grad()
        ...         loss = net(torch.ones(4, 2)).square().mean()
        ...         loss.backward()
        ...         trainer.step(1)
        ...         yield loss
        >>> loop = LiveLoop(train, trainer=trainer, view=None).start()
        >>> loop.wait(), loop.status, loop.n_steps
        (True, 'finished', 20)
    """

    def __init__(
        self,
        steps: Callable[[], Any] | Iterable[Any],
        *,
        trainer: Trainer | torch.optim.Optimizer | None = None,
        recorder: Recorder | None = None,
        stateful: Sequence[Any] = (),
        view: View | str | None = "live",
        mode: str = "auto",
        frames_per_second: float = 4.0,
        name: str = "run",
        when_unseen: str = "go on",
    ) -> None:
        if not callable(steps) and not isinstance(steps, Iterable):
            raise TypeError(
                f"steps is a {type(steps).__name__}: must be a generator function, an iterator or a callable that takes one"
            )
        if trainer is not None and not isinstance(trainer, (Trainer, torch.optim.Optimizer)):
            raise TypeError(f"trainer must be a Trainer, a torch.optim.Optimizer or None, got {type(trainer).__name__}")
        if recorder is not None and not isinstance(recorder, Recorder):
            raise TypeError(f"recorder must be a Recorder or None, got {type(recorder).__name__}")
        for i, each in enumerate(stateful):
            if not _is_stateful(each):
                raise TypeError(f"stateful[{i}] is a {type(each).__name__}: it needs state_dict and load_state_dict")
        if not (view is None or view == "live" or isinstance(view, View)):
            raise TypeError(f"view={view!r}: must be 'live', None or a View")
        budget = FrameBudget(most=real("frames_per_second", frames_per_second, above=0))
        self.mode = choice("mode", mode, MODES)
        self._pauses_unseen = choice("when_unseen", when_unseen, ("go on", "pause")) == "pause"
        self._unseen_from: int | None = None  # the step after which nobody was there any more
        self._clock: Callable[[], float] = time.monotonic
        self._steps, self._iterator = steps, _iterator(steps)
        self._rates = _rates(trainer)
        self._trainer, self.recorder = trainer, recorder
        self._stateful = [*stateful] + ([steps] if _is_stateful(steps) else [])
        self.status = "ready"
        self.n_steps = 0
        self.exception: BaseException | None = None
        self.run = Run(name) if recorder is None else recorder.run
        self.runs = RunSet([self.run])
        self.snapshots: dict[str, Snapshot] = {}
        self.cell: str | None = None
        self._left_off: dict[str, Snapshot] = {}  # by run, where it was when another one was gone on with
        self._multiplier = 1.0
        self._rate = self._rates.now() if self._rates is not None else None
        self._here: dict[str, tuple[list[int], list[Any]]] = {}  # numbers that are not in `run` yet
        self._waiting_for_device = 0  # how many of these are tensors on another device
        self._limit: int | None = None  # of steps until the next pause
        self._asked: str | None = None  # a status that is to be taken up after the step at hand
        self._interrupted = False
        self._rest = threading.Condition(threading.RLock())  # held to look at, or change, what steps change
        self._guests = 0
        self._stepping: int | None = None  # the thread of the step at hand
        self._turn = 0  # how often it has been set going; what ran before a pause must not run on after it
        self._waiting: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []
        self._event_loop = running_event_loop()  # of the task; what asks for steps may run in another one
        self._breakable = False  # whether a second interrupt breaks off what runs
        self._task: asyncio.Task[None] | None = None
        self._since = (0, 0.0)  # step and time when it began to run
        self.view: View | None = LiveView(self, budget=budget) if isinstance(view, str) else view

    @classmethod
    def fit(
        cls,
        net: torch.nn.Module,
        loss: Callable[[Any, Any], torch.Tensor],
        data: Iterable[Any],
        trainer: Trainer | torch.optim.Optimizer,
        *,
        num_epoch: int = 1,
        **options: Any,
    ) -> LiveLoop:
        """A loop that trains `net` for some epochs, as `tristep.fit` does; not started yet.

        Its snapshots have the model's buffers and the place in the data in them, as long as `data` depends on nothing but
        the random numbers of torch, NumPy and Python, and a generator of the loader's own.

        Args:
            net: the model, called with the inputs of a batch.
            loss: from outputs and labels to one number for each sample, or to their mean.
            data: batches (inputs, labels), iterated anew in every epoch.
            trainer: of the model's parameters.
            num_epoch: >= 1.
            **options: the other arguments of `LiveLoop`.

        Example:
            >>> import torch, tristep
            >>> from tristep.viz import LiveLoop
            >>> net = torch.nn.Linear(2, 1)
            >>> trainer = tristep.Trainer(net, "adam")
            >>> data = [(torch.ones(4, 2), torch.zeros(4, 1))]
            >>> loop = LiveLoop.fit(net, torch.nn.MSELoss(), data, trainer, num_epoch=3, view=None)
            >>> loop.start().n_steps
            3
        """
        if not isinstance(trainer, (Trainer, torch.optim.Optimizer)):
            raise TypeError(f"trainer must be a Trainer or a torch.optim.Optimizer, got {type(trainer).__name__}")
        steps = _Epochs(net, loss, data, trainer, whole("num_epoch", num_epoch, low=1))
        stateful = [net, *options.pop("stateful", ())]
        return cls(steps, trainer=trainer, stateful=stateful, **options)

    def start(self) -> LiveLoop:
        """Begin, and show the view where there is a notebook.

        Returns:
            The loop itself.

        Raises:
            RuntimeError: it has been started; or another loop trains with this trainer at this moment; or mode="task" where
                no event loop runs.
            Exception: with mode="block", what a step raised.
        """
        if self.status != "ready":
            raise RuntimeError(f"start() of a loop that is {self.status} already: resume() goes on with a paused one")
        if self.mode == "auto":
            self.mode = "task" if running_event_loop() is not None and has_front_end() else "block"
        if self.mode == "task":
            self._find_event_loop()
        self._refuse_two()
        self.cell = request().get("metadata", {}).get("cellId")
        _loops.add(self)
        later = self.mode == "block" and not has_front_end()  # a picture for the file: that of the end
        if not later:
            self._show()
        self._go()
        if later:
            self._show()
        self._raise_here()
        return self

    def pause(self) -> None:
        """Pause. When this returns the step at hand has ended; called in a step, it pauses after it."""
        self._ask("paused")

    def resume(self) -> None:
        """Go on after a pause.

        Raises:
            RuntimeError: there is nothing to go on with.
        """
        self._go_on(None)

    def step(self, n: int = 1) -> None:
        """Take some steps and pause again.

        Args:
            n: how many, >= 1.
        """
        self._go_on(whole("n", n, low=1))

    def stop(self) -> None:
        """End it. When this returns the step at hand has ended; a generator has been closed."""
        self._ask("stopped")

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the end. Of a task, the rest is run right here, since a cell that waits keeps the notebook busy.

        Args:
            timeout: in seconds; None: as long as it takes.

        Returns:
            Whether it has ended; False: the time is over, or it is paused.

        Raises:
            Exception: what a step raised.
            RuntimeError: called in a step.
        """
        if self._stepping == threading.get_ident():
            raise RuntimeError("wait() in a step, which it would wait for")
        if self.status == "ready":
            self.start()
        if self.status == "running" and self.mode != "thread" and self._is_here():
            self._run_here(timeout)
        elif self.status == "running":
            try:
                with self._rest:
                    self._rest.wait_for(lambda: self.status != "running", timeout)
            except KeyboardInterrupt:
                self.pause()
                self._say_paused()
        self._raise()
        return self.status in ENDED

    def __await__(self) -> Generator[Any, None, LiveLoop]:
        """Wait for the end, while the notebook stays usable. Raises what a step raised. Gives the loop."""
        return self._wait_for_end().__await__()

    @property
    def learning_rate(self) -> float | None:
        """That of the last step, or before the first the one to come; None without a trainer."""
        return self._rate

    def set_learning_rate(self, lr: float) -> None:
        """Set the rate for the coming steps, of the first group where there are several, which keep their proportions.

        Where a schedule decides it, this sets the multiplier that makes it this rate now.

        Args:
            lr: >= 0.

        Raises:
            ValueError: it is negative or no number, or a schedule is at 0, or there is no trainer.
        """
        lr = real("lr", lr, low=0)
        rates = self._needed("set_learning_rate")
        with self._at_rest():
            self._multiplier = rates.set(lr)
            self._rate = lr

    @property
    def multiplier(self) -> float:
        """What the rate of each step is multiplied by. It may be set at any time; 1 is as if it had never been.

        It acts while a step is taken and leaves neither schedule nor optimizer changed behind.
        """
        return self._multiplier

    @multiplier.setter
    def multiplier(self, value: float) -> None:
        value = real("multiplier", value, low=0)
        self._needed("multiplier")
        self._multiplier = value

    def snapshot(self, name: str | None = None) -> Snapshot:
        """Keep all that training depends on: weights, gradients, the optimizer's state, `stateful`, random numbers.

        It is a copy, on the devices where these are.

        Args:
            name: under which it is kept; None is "step 12", say. One of the same name is replaced.

        Raises:
            ValueError: there is no trainer.
        """
        self._needed("snapshot")
        with self._at_rest():
            if name is None:
                name = f"step {self.n_steps}"
            self.snapshots[name] = found = self._snapshot(name)
        return found

    def branch(
        self,
        name: str | None = None,
        at: str | Snapshot | None = None,
        *,
        learning_rate: float | None = None,
        multiplier: float | None = None,
    ) -> Run:
        """Go back to a snapshot and on from there as another run, whose settings may differ.

        Where the present run stands is kept, so that `pick` can go on with it. A loop that has ended is paused then.

        Args:
            name: of the new run; None is "branch 1", and so on.
            at: a snapshot or its name; None is here and now.
            learning_rate: as for `set_learning_rate`.
            multiplier: of the rate; None leaves it as it is.

        Returns:
            The new run.

        Raises:
            KeyError: there is no such snapshot.
            ValueError: a run of that name exists, or there is no trainer; nothing has been changed.

        Example, a comparison of two rates:

            loop.snapshot("fork")
            for rate in (0.1, 0.3):
                loop.branch(f"rate {rate}", "fork", learning_rate=rate)
                loop.step(100)
            loop.pick("rate 0.1")
            loop.resume()
        """
        self._needed("branch")
        names = [run.name for run in self.runs]
        if name is None:
            name = next(f"branch {k}" for k in range(1, len(names) + 2) if f"branch {k}" not in names)
        if name in names:
            raise ValueError(f"name={name!r}: there is a run of that name already")
        if isinstance(at, str) and at not in self.snapshots:
            known = ", ".join(map(repr, self.snapshots)) or "none"
            raise KeyError(f"at={at!r}: there is no snapshot of that name; there are {known}")
        if learning_rate is not None:
            real("learning_rate", learning_rate, low=0)
        if multiplier is not None:
            real("multiplier", multiplier, low=0)
        with self._at_rest():
            self._left_off[self.run.name] = here = self._snapshot(self.run.name)
            snapshot = here if at is None else self.snapshots[at] if isinstance(at, str) else at
            run = Run(name, self.run.parameters, self.run.edges, self.run.notes | {"branched from": _described(snapshot)})
            self._put_back(snapshot, run)
            self.runs.add(run)
            if multiplier is not None:
                self._multiplier = float(multiplier)
            if learning_rate is not None:
                self.set_learning_rate(learning_rate)
        self._refresh()
        return run

    def pick(self, name: str) -> Run:
        """Go on with a run that was left by `branch`, or by this, where it was left.

        Raises:
            KeyError: there is no such run.
        """
        run = self.runs[name]
        if run is not self.run:
            with self._at_rest():
                self._left_off[self.run.name] = self._snapshot(self.run.name)
                self._put_back(self._left_off.pop(name), run)
            self._refresh()
        return run

    @property
    def steps_per_second(self) -> float:
        """Since it began to run, or was resumed."""
        step, then = self._since
        return (self.n_steps - step) / max(self._clock() - then, 1e-9) if self.status == "running" else 0.0

    def __repr__(self) -> str:
        return f"LiveLoop({self.run.name!r}, {self.status}, {self.n_steps} steps, mode={self.mode!r})"

    # How it runs.

    def _go_on(self, limit: int | None) -> None:
        if self.status == "running":
            return
        if self.status == "ready":
            self._limit = limit
            self.start()
            return
        if self.status not in ("paused", "failed") or not self._renew():
            why = "its generator has been ended by the exception" if self.status in ("paused", "failed") else "it has ended"
            raise RuntimeError(f"there is nothing to go on with: {why}. branch() goes back to a snapshot where there is one")
        self._refuse_two()
        self._go(limit)
        self._raise_here()

    def _go(self, limit: int | None = None) -> None:
        if self.mode == "task":
            self._find_event_loop()
        with self._rest:
            if self.status == "running":  # by now; several threads may ask
                return
            self._limit = limit if limit is not None else self._limit
            self.exception, self._asked, self._interrupted, self._unseen_from = None, None, False, None
            self.status, self._turn = "running", self._turn + 1
            self._since = (self.n_steps, self._clock())
            turn = self._turn
        if self.mode == "block":
            self._run_here()
        elif self.mode == "thread":
            # With a copy of the context, or what a step prints finds no cell.
            run = contextvars.copy_context().run
            threading.Thread(target=run, args=(self._run_here,), name=f"LiveLoop {self.run.name}", daemon=True).start()
        elif self._event_loop is running_event_loop():
            self._make_task(turn)
        else:
            assert self._event_loop is not None
            self._event_loop.call_soon_threadsafe(self._make_task, turn)

    def _find_event_loop(self) -> None:
        """The one it was made in runs the task, as long as it runs itself; else the one that runs here."""
        if self._event_loop is None or not self._event_loop.is_running():
            self._event_loop = running_event_loop() or self._event_loop
        if self._event_loop is None or self._event_loop.is_closed():
            raise RuntimeError("mode='task' needs a running event loop, as a notebook has: use 'thread' or 'block'")

    def _make_task(self, turn: int) -> None:
        assert self._event_loop is not None
        if self._is_on(turn):
            self._task = self._event_loop.create_task(self._run_in_task(turn), name=f"LiveLoop {self.run.name}")

    def _run_here(self, timeout: float | None = None) -> None:
        until, turn = None if timeout is None else self._clock() + timeout, self._turn
        with self._pausing_interrupts():
            while self._is_on(turn) and (until is None or self._clock() < until):
                self._run_slice(turn, until)

    async def _run_in_task(self, turn: int) -> None:
        with _interrupts.paused(self):
            try:
                while self._is_on(turn):
                    with _interrupts.taken():
                        self._run_slice(turn)
                    await asyncio.sleep(0)
            except asyncio.CancelledError:  # the event loop ends
                self._ask("paused")
                raise

    def _run_slice(self, turn: int, until: float | None = None) -> None:
        end = self._clock() + SLICE
        while self._is_on(turn):
            self._take_step(turn)
            now = self._clock()
            if now >= end or (until is not None and now >= until):
                # A recorder looks at what it has by itself, as often as is worth it.
                if self.recorder is None and not 0 < self._waiting_for_device <= MOST_WAITING:
                    with self._at_rest():
                        self._flush()
                self._refresh(turn)
                self._look_around()
                break

    def _look_around(self) -> None:
        """Whether a page still shows the view."""
        if self.view is None or self.view.unseen < UNSEEN:
            return
        if self._unseen_from is None:
            self._unseen_from = self.n_steps
        if self._pauses_unseen:
            self._asked = self._asked or "paused"

    def _is_on(self, turn: int) -> bool:
        return self.status == "running" and self._turn == turn

    def _take_step(self, turn: int) -> None:
        with self._rest:
            self._rest.wait_for(lambda: self._guests == 0 and self._stepping is None)
            if not self._is_on(turn):
                return
            outcome = self._asked
            if outcome is None:
                self._stepping = threading.get_ident()
        try:
            if outcome is None:
                try:
                    self._breakable = True
                    value = self._next()
                finally:
                    self._breakable = False
                self._note(value)
                if self._limit is not None:
                    self._limit -= 1
                    outcome = "paused" if self._limit <= 0 else None
        except StopIteration:
            outcome = "finished"
        except KeyboardInterrupt:
            self._breakable = False
            outcome, self._interrupted = "paused", True
        except BaseException as error:
            outcome, self.exception = "failed", error
            if not isinstance(error, Exception):
                raise
        finally:
            with self._rest:
                self._stepping = None
                outcome = self._asked if outcome is None else outcome
                if outcome is not None:
                    self._set_status(outcome)
                self._rest.notify_all()
            if outcome is not None:
                self._settle()

    def _next(self) -> Any:
        if self._rates is None:
            return self._next_value()
        with self._rates.multiplied(self._multiplier):
            value = self._next_value()
            self._rate = self._rates.used()
        return value

    def _next_value(self) -> Any:
        if self._iterator is not None:
            return next(self._iterator)
        value = self._steps()  # type: ignore[operator]
        if value is False:
            raise StopIteration
        return value

    def _note(self, value: Any) -> None:
        self.n_steps += 1
        scalars = dict(value) if isinstance(value, Mapping) else {} if value is None or value is True else {"loss": value}
        if self._rate is not None:
            scalars.setdefault("learning_rate", self._rate)
        if self.recorder is not None:
            if self.recorder.due:
                self.recorder.step(**scalars)
            return
        for name, number in scalars.items():
            if isinstance(number, torch.Tensor):
                if number.numel() != 1:
                    raise ValueError(f"{name} has shape {tuple(number.shape)}: must be a single number")
                number = number.detach()
            if isinstance(number, torch.Tensor) and number.device.type != "cpu":
                number = number.clone().reshape(())  # it is asked for later, or the loop would wait for the device
                self._waiting_for_device += 1
            else:
                try:
                    number = float(number)
                except (TypeError, ValueError):
                    raise TypeError(f"{name} must be a number, got {number!r} ({type(number).__name__})") from None
            steps, values = self._here.setdefault(name, ([], []))
            steps.append(self.n_steps)
            values.append(number)

    def _flush(self) -> None:
        """Take all numbers into the run; those on another device together, at one synchronisation."""
        if self.recorder is not None:
            self.recorder.look()
        here, self._here, self._waiting_for_device = self._here, {}, 0
        there = [value for _, values in here.values() for value in values if isinstance(value, torch.Tensor)]
        known = iter(torch.stack([value.double() for value in there]).cpu().tolist() if there else ())
        for name, (steps, values) in here.items():
            numbers = [next(known) if isinstance(value, torch.Tensor) else value for value in values]
            self.run.scalars.setdefault(name, Series()).extend(steps, numbers)
        self.run.version += bool(here)

    def _set_status(self, status: str) -> None:
        """Take up a status between two steps. `_settle` is to follow, without the lock."""
        self.status, self._asked, self._limit = status, None, None
        if status in ENDED:
            if self.recorder is not None:
                self.recorder.flush()
            if status == "stopped" and isinstance(self._iterator, Generator):  # which may have something to clean up
                self._iterator.close()

    def _settle(self) -> None:
        """Show the status, and tell those who wait for it."""
        with self._at_rest():
            self._flush()
        self._refresh()
        if self._interrupted:
            self._interrupted = False
            if self.status == "paused":  # it may have been the last step
                self._say_paused()
        if self.status == "failed" and self.mode == "task" and self.view is None and self.exception is not None:
            traceback.print_exception(self.exception)
        with self._rest:
            self._rest.notify_all()
            waiting, self._waiting = self._waiting, []
        for loop, future in waiting:
            loop.call_soon_threadsafe(_set_done, future)

    def _ask(self, status: str) -> None:
        if self._stepping == threading.get_ident():
            self._asked = status
            return
        with self._at_rest():
            if not (self.status == "running" or (status == "stopped" and self.status in ("ready", "paused"))):
                return
            self._set_status(status)
        self._settle()

    @contextmanager
    def _at_rest(self) -> Iterator[None]:
        """A context between two steps, which wait meanwhile. In a step itself it changes nothing."""
        if self._stepping == threading.get_ident():
            yield
            return
        with self._rest:
            self._guests += 1
            try:
                self._rest.wait_for(lambda: self._stepping is None)
                yield
            finally:
                self._guests -= 1
                self._rest.notify_all()

    @contextmanager
    def _pausing_interrupts(self) -> Iterator[None]:
        """A context in which a first Ctrl-C pauses, and a second one, in the same step, breaks it off."""
        if not _gets_signals():
            yield
            return
        before = signal.signal(signal.SIGINT, lambda *_: self._interrupt())
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, signal.SIG_DFL if before is None else before)

    def _interrupt(self) -> None:
        """What a signal does, wherever the main thread is: it must not wait for anything."""
        if self.status != "running":
            return
        if self._interrupted and self._breakable and self._stepping == threading.get_ident():
            raise KeyboardInterrupt
        self._asked, self._interrupted = self._asked or "paused", True

    async def _wait_for_end(self) -> LiveLoop:
        if self.status == "ready":
            self.start()
        here = asyncio.get_running_loop()
        while True:
            with self._rest:
                if self.status in ENDED:
                    break
                future: asyncio.Future[None] = here.create_future()
                self._waiting.append((here, future))
            try:
                await future
            except asyncio.CancelledError:  # Ctrl-C in a cell that awaits
                if self.status == "running":
                    self.pause()
                    self._say_paused()
                raise
        self._raise()
        return self

    def _renew(self) -> bool:
        """Whether there are steps to come; a generator that an exception has ended is made anew by its function."""
        if isinstance(self._iterator, Generator) and inspect.getgeneratorstate(self._iterator) == inspect.GEN_CLOSED:
            if not inspect.isgeneratorfunction(self._steps):
                return False
            self._iterator = _iterator(self._steps)
        return True

    def _is_here(self) -> bool:
        here = running_event_loop()
        return self.mode == "block" or (here is not None and here is self._event_loop)

    def _raise(self) -> None:
        if self.status == "failed" and self.exception is not None:
            raise self.exception

    def _raise_here(self) -> None:
        if self.mode == "block":
            self._raise()

    def _say_paused(self) -> None:
        if _gets_signals():
            print(f"paused after step {self.n_steps}; loop.resume() goes on")

    def _refuse_two(self) -> None:
        for loop in list(_loops):
            same = self._trainer is not None and loop._trainer is self._trainer
            if same and loop is not self and loop.status == "running":
                raise RuntimeError(f"{loop!r} trains with this trainer at this moment: pause or stop it first")

    # What it shows.

    def _show(self) -> None:
        if self.view is not None and in_notebook():
            from IPython.display import display

            display(self.view)

    def _refresh(self, turn: int | None = None) -> None:
        """Let the view draw, now at any price; or if its budget allows, as long as this turn is on.

        A status is drawn after it has been taken up. So no frame of a running loop comes after that.
        """
        view = self.view
        if view is None:
            return
        try:
            if turn is None:
                view.display.refresh_at_once()
                return
            with view.display.drawing():
                if self._is_on(turn):
                    view.refresh()
        except Exception as error:  # a picture must not end hours of training
            self.view = None
            warnings.warn(f"the view cannot be drawn ({error!r}); training goes on without it", RuntimeWarning, stacklevel=2)

    # Snapshots.

    def _needed(self, what: str) -> _Rates:
        if self._rates is None:
            raise ValueError(f"{what} needs to know what trains: make the loop with trainer=..., a Trainer or an optimizer")
        return self._rates

    def _snapshot(self, name: str) -> Snapshot:
        rates = self._needed("snapshot")
        self._flush()
        state = {
            "source": TrainerSnapshot(rates.source),
            "gradients": [None if param.grad is None else param.grad.detach().clone() for param in rates.params()],
            "stateful": [copy.deepcopy(each.state_dict()) for each in self._stateful],
            "multiplier": self._multiplier,
            "recorded": 0 if self.recorder is None else self.recorder.last_step,
        }
        return Snapshot(name, self.n_steps, self.run.name, state)

    def _put_back(self, snapshot: Snapshot, run: Run) -> None:
        rates, state = self._needed("branch"), snapshot.state
        self._flush()
        if self.recorder is not None:
            self.recorder.flush()
        for each, own in zip(self._stateful, state["stateful"], strict=True):
            each.load_state_dict(copy.deepcopy(own))
        state["source"].restore()  # and last its random numbers, of which the others may have used some
        for param, gradient in zip(rates.params(), state["gradients"], strict=True):
            param.grad = None if gradient is None else gradient.clone()
        self._multiplier, self.n_steps, self.run, self._rate = state["multiplier"], snapshot.step, run, rates.now()
        if self.recorder is not None:
            self.recorder.record_into(run, state["recorded"])
        if self.status in ENDED and self._renew():
            self.status, self.exception = "paused", None


class LiveView(LossView):
    """Losses and learning rates of a live loop while it trains, and what steers it.

    Above them stands how far it is, how fast, and which share of the time drawing takes; if a step has raised an error,
    that. Buttons pause, resume, take one step, stop, keep a snapshot, and branch here; a slider sets the multiplier of the
    rate.

    Args:
        loop: a `LiveLoop`; one that is made with view="live" has this as its `view`.
        **settings: those of `LossView`.
    """

    def __init__(self, loop: LiveLoop, **settings: Any) -> None:
        self.loop = loop
        self._told = ""
        super().__init__(loop.runs, **settings)

    def scene(self) -> Scene:
        """The picture as data."""
        with self.loop._at_rest():  # nothing is recorded meanwhile
            self.loop._flush()
            self.runs = list(self.loop.runs)
            scene = super().scene()
        status = Panel(Axis("", 0, 1), Axis("", 0, 1), [Text(self.status(), 0.0, 0.5)], frame=False, columns=scene.grid[1])
        # Averages are as wide as fits, without a slider: as the run gets longer its values would change under one's hand.
        scene = _fixed(scene)
        controls = [*scene.controls]
        if self.loop._rates is not None:
            nearest = int(np.argmin([abs(value - self.loop.multiplier) for value in MULTIPLIERS]))
            controls.append(Control("multiplier", "learning rate ×", MULTIPLIERS, nearest, remote=True))
        named = [("pause", "Pause"), ("resume", "Resume"), ("step", "Step"), ("stop", "Stop")]
        if self.loop._rates is not None:
            named += [("snapshot", "Snapshot"), ("branch", "Branch here")]
        height = 0.45
        shares = scene.heights or [1.0] * scene.grid[0]
        return replace(
            scene,
            panels=[status, *(replace(panel, row=panel.row + 1) for panel in scene.panels)],
            controls=controls,
            buttons=[Button(name, label) for name, label in named],
            height=scene.height + height,
            heights=[height / scene.height * sum(shares), *shares],
        )

    def at_rest(self) -> AbstractContextManager[None]:
        """Between two steps: a step may draw, too, so nobody may have the view and wait for its end."""
        return self.loop._at_rest()

    def is_live(self) -> bool:
        """Whether the loop is running."""
        return self.loop.status == "running"

    def event_loop(self) -> asyncio.AbstractEventLoop | None:
        """The one that runs the steps."""
        return self.loop._event_loop

    def status(self) -> str:
        """How far the loop is, in words."""
        loop = self.loop
        words = [f"{loop.run.name}: {loop.status}", f"step {loop.n_steps:,}"]
        if loop.exception is not None:
            return f"{loop.run.name}: failed after step {loop.n_steps:,}\n{type(loop.exception).__name__}: {loop.exception}"
        if loop.status == "running":
            speed = loop.steps_per_second
            words.append(f"{speed:,.0f} steps/s" if speed >= 100 else f"{speed:.3g} steps/s")
        rate = loop.learning_rate
        if loop._rates is not None and loop.status in ("ready", "paused"):
            rate = loop._rates.now() * loop.multiplier  # that of the coming step, whatever has been set since the last one
        if rate is not None:
            multiplied = "" if loop.multiplier == 1 else f" (× {loop.multiplier:.3g})"
            words.append(f"learning rate {rate:.4g}{multiplied}")
        words.append(f"drawing {100 * self.cost:.1f} % of the time")
        if loop._unseen_from is not None:
            words.append(f"no page showed it after step {loop._unseen_from:,}")
        return ", ".join(words) + (f"\n{self._told}" if self._told else "")

    def describe(self) -> str:
        """How far the loop is, and what there is to be seen, in sentences."""
        return f"{self.status()}\n{super().describe()}"

    def description(self) -> str:
        """How far the loop is."""
        return self.status()

    def on_control(self, name: str, value: Any, index: int) -> None:
        """The multiplier of the rate."""
        if name == "multiplier":
            self.loop.multiplier = float(value)
            self.refresh()  # no step does it for a loop that is paused
        else:
            super().on_control(name, value, index)

    def on_button(self, name: str) -> None:
        """What the buttons do; what cannot be done is said in the picture."""
        act: dict[str, Callable[[], Any]] = {
            "pause": self.loop.pause,
            "resume": self.loop.resume,
            "step": self.loop.step,
            "stop": self.loop.stop,
            "snapshot": lambda: f"snapshot {self.loop.snapshot().name!r}",
            "branch": lambda: f"now in {self.loop.branch().name!r}",
        }
        if self.loop.mode in ("auto", "block") and running_event_loop() is not None:
            self.loop.mode = "task"  # here there is no cell to be blocked, and pressing a button must not last
        try:
            said = act[name]()
            self._told = said if isinstance(said, str) else ""
        except RuntimeError as error:
            self._told = str(error)
        self.refresh()


def _fixed(scene: Scene) -> Scene:
    """The scene with those controls only of which Python is told, the others as they are at first."""
    state = scene.state()

    def fixed(layer: Layer) -> Layer:
        arrays: dict[str, Any] = {name: layer.chosen(name, state) for name in layer.arrays}
        return replace(layer, by=(), **arrays) if layer.by else layer

    panels = [replace(panel, layers=[fixed(layer) for layer in panel.layers]) for panel in scene.panels]
    return replace(scene, panels=panels, controls=[control for control in scene.controls if control.remote])


class _Interrupts:
    """Takes Ctrl-C for the tasks of the main thread: it pauses them all.

    Between two slices, too, it does so where nobody else would take it: a kernel ignores it while no cell runs. While one
    does, the kernel puts a handler of its own in place, and afterwards back what was there, SIG_IGN or this.
    """

    def __init__(self) -> None:
        self._loops: list[LiveLoop] = []
        self._taken = 0

    def __call__(self, number: int, frame: Any) -> None:
        self._taken += 1
        for loop in sorted(self._loops, key=lambda loop: loop._breakable):  # last the one that may raise
            loop._interrupt()

    @contextmanager
    def paused(self, loop: LiveLoop) -> Iterator[None]:
        """A context in which an interrupt pauses this loop."""
        if not _gets_signals():
            yield
            return
        self._loops.append(loop)
        try:
            yield
        finally:
            self._loops.remove(loop)
            if not self._loops and signal.getsignal(signal.SIGINT) is self:
                signal.signal(signal.SIGINT, signal.SIG_IGN)

    @contextmanager
    def taken(self) -> Iterator[None]:
        """A context, of a slice, in which they come here whoever else would take them."""
        if not _gets_signals():
            yield
            return
        taken, before = self._taken, signal.signal(signal.SIGINT, self)
        try:
            yield
        finally:
            if before is not signal.SIG_IGN and before is not self:
                signal.signal(signal.SIGINT, signal.SIG_DFL if before is None else before)
                cell_awaits = callable(before) and before is not signal.default_int_handler and in_notebook()
                if self._taken != taken and cell_awaits:
                    signal.raise_signal(signal.SIGINT)  # which the cell is to have as well


_interrupts = _Interrupts()
_loops: weakref.WeakSet[LiveLoop] = weakref.WeakSet()  # all that have been started


def stop_loops(cell: str) -> None:
    """Stop the loops that this cell has started, as it is to run again."""
    for loop in list(_loops):
        if loop.cell == cell and loop.status in ("running", "paused"):
            loop.stop()


def _gets_signals() -> bool:
    return threading.current_thread() is threading.main_thread()


def _set_done(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _is_stateful(thing: Any) -> bool:
    return callable(getattr(thing, "state_dict", None)) and callable(getattr(thing, "load_state_dict", None))


def _iterator(steps: Any) -> Iterator[Any] | None:
    if inspect.isgeneratorfunction(steps):
        return steps()
    return iter(steps) if isinstance(steps, Iterable) else None


def _described(snapshot: Snapshot) -> str:
    return f"{snapshot.run}, step {snapshot.step}"


def _rates(trainer: Any) -> _Rates | None:
    if trainer is None:
        return None
    return _OfTrainer(trainer) if isinstance(trainer, Trainer) else _OfOptimizer(trainer)


class _OfTrainer:
    """Rate and parameters of a Trainer."""

    def __init__(self, trainer: Trainer) -> None:
        self.source = trainer

    def params(self) -> list[torch.Tensor]:
        return [param for replica in self.source.replicas for param in replica.params]

    def now(self) -> float:
        return self.source.learning_rate

    used = now

    def set(self, lr: float) -> float:
        """Set the rate; the multiplier that it needs, 1 where no schedule decides."""
        if self.source.optimizer.lr_scheduler is None:
            self.source.set_learning_rate(lr)
            return 1.0
        return _ratio(lr, self.now())

    @contextmanager
    def multiplied(self, multiplier: float) -> Iterator[None]:
        """A context whose steps take the rate times this; afterwards all is as it was, or as steps have set it."""
        optimizer = self.source.optimizer
        if multiplier == 1.0:
            yield
        elif optimizer.lr_scheduler is None:
            before, optimizer.lr = optimizer.lr, optimizer.lr * multiplier
            now = optimizer.lr
            try:
                yield
            finally:
                if optimizer.lr == now:
                    optimizer.lr = before
        else:
            schedule = optimizer.lr_scheduler
            multiplied = _Multiplied(schedule, multiplier)
            optimizer.lr_scheduler = multiplied
            try:
                yield
            finally:
                if optimizer.lr_scheduler is multiplied:
                    optimizer.lr_scheduler = schedule


class _Multiplied:
    """A schedule, times a number. What is asked of it otherwise, or set, is the schedule's."""

    def __init__(self, schedule: Callable[[int], float], multiplier: float) -> None:
        self.__dict__.update(_schedule=schedule, _multiplier=multiplier)

    def __call__(self, num_update: int) -> float:
        return self._schedule(num_update) * self._multiplier

    def __getattr__(self, name: str) -> Any:
        return getattr(self._schedule, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._schedule, name, value)


class _OfOptimizer:
    """Rate and parameters of an optimizer of torch's interface."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.source = optimizer
        self._used: float | None = None

    def params(self) -> list[torch.Tensor]:
        return [param for group in self.source.param_groups for param in group["params"]]

    def now(self) -> float:
        return float(self.source.param_groups[0]["lr"])

    def used(self) -> float:
        return self.now() if self._used is None else self._used

    def set(self, lr: float) -> float:
        """Set the rate; the multiplier that it needs, 1 where no schedule decides."""
        groups, now = self.source.param_groups, self.now()
        if any("initial_lr" in group for group in groups):  # which a scheduler of torch has put there
            return _ratio(lr, now)
        for group in groups:
            group["lr"] = lr * (float(group["lr"]) / now) if now else lr
        return 1.0

    @contextmanager
    def multiplied(self, multiplier: float) -> Iterator[None]:
        """As above. A scheduler of torch makes rates from rates, so it must never see the multiplied ones."""
        before: list[Any] = []

        def begin(*_: Any) -> None:
            groups = self.source.param_groups
            before[:] = [group["lr"] for group in groups]
            if multiplier != 1.0:
                for group in groups:
                    group["lr"] = group["lr"] * multiplier
            self._used = self.now()

        def end(*_: Any) -> None:
            for group, lr in zip(self.source.param_groups, before, strict=False):
                group["lr"] = lr
            before.clear()

        self._used = None
        hooks = [self.source.register_step_pre_hook(begin), self.source.register_step_post_hook(end)]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            if before:  # the step failed between the two
                end()


_Rates = _OfTrainer | _OfOptimizer


def _ratio(lr: float, scheduled: float) -> float:
    if scheduled == 0:
        raise ValueError(f"lr={lr!r}: the schedule's rate is 0 here, which no multiplier makes another one; step on first")
    return lr / scheduled


class _Epochs:
    """Training steps over some epochs, with a place in the data that can be gone back to."""

    def __init__(self, net: torch.nn.Module, loss: Any, data: Iterable[Any], trainer: Any, num_epoch: int) -> None:
        self._net, self._loss, self._data, self._trainer, self._num_epoch = net, loss, data, trainer, num_epoch
        self._generators = [own for own in (getattr(data, "generator", None),) if own is not None]
        self._epoch, self._batch = 0, 0
        self._batches: Iterator[Any] | None = None
        self._random: Any = None  # when the epoch began

    def __iter__(self) -> _Epochs:
        return self

    def __next__(self) -> torch.Tensor:
        inputs, labels = _unpack("data", self._next_batch(), _place(self._net))
        value = self._loss(self._net(*inputs), labels)
        size = len(inputs[0])
        if value.shape not in (torch.Size(), torch.Size([size])):
            raise ValueError(
                f"loss gave shape {tuple(value.shape)} for a batch of {size}: it must give one number for each sample, "
                f"shape ({size},), or their mean, shape ()"
            )
        self._trainer.zero_grad()
        if isinstance(self._trainer, Trainer):
            value.sum().backward()
            self._trainer.step(size if value.dim() else 1)
        else:
            value.mean().backward()
            self._trainer.step()
        return value.detach().mean()

    def _next_batch(self) -> Any:
        while self._epoch < self._num_epoch:
            if self._batches is None:
                self._random = random_state(), [own.get_state() for own in self._generators]
                self._batches, self._batch = iter(self._data), 0
            try:
                batch = next(self._batches)
            except StopIteration:
                if self._batch == 0:
                    raise ValueError(
                        f"data gave no batch in epoch {self._epoch + 1}: it must be iterable anew in every epoch"
                    ) from None
                self._batches, self._epoch = None, self._epoch + 1
                continue
            self._batch += 1
            return batch
        raise StopIteration

    def state_dict(self) -> dict[str, Any]:
        begun = self._batches is not None
        own = [generator.get_state() for generator in self._generators]
        return {"epoch": self._epoch, "batch": self._batch if begun else None, "random": self._random, "own": own}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._epoch, self._batches = state["epoch"], None
        if state["batch"] is not None:
            self._random = state["random"]
            set_random_state(self._random[0])
            for generator, own in zip(self._generators, self._random[1], strict=True):
                generator.set_state(own)
            self._batches = iter(self._data)
            for self._batch in range(1, state["batch"] + 1):
                next(self._batches)
        for generator, own in zip(self._generators, state["own"], strict=True):
            generator.set_state(own)
