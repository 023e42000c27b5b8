"""LiveLoop: a training loop that runs while the notebook stays usable, and can be paused, steered and branched."""

from __future__ import annotations

import asyncio
import atexit
import contextvars
import copy
import inspect
import itertools
import signal
import threading
import time
import traceback
import types
import warnings
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from tqdm import tqdm

from ...kernels.messages import there_are
from ...trainer import CheckpointManager, Trainer
from ...trainer.loops.batch_step import BatchStep, check_captures
from ...trainer.loops.fitting import EpochBatches, check_batches, evaluate, saving_with
from ...trainer.loops.metrics import checked_metrics
from ...trainer.loops.snapshot import Snapshot as TrainerSnapshot
from ...trainer.loops.snapshot import parameters_of
from ...trainer.utils.interrupts import gets_signals, handled, restore_handlers, uninterrupted
from ...trainer.validation import boolean, choice, instance, integer, number
from ..record import Recorder, Run, RunSet
from ..record.scalars import ScalarBuffer, checked_scalars
from ..render.notebook import has_front_end, in_notebook, request, running_event_loop, show_below_cell, watch_cell
from ..views import FrameBudget, View
from .learning_rates import LearningRate, weakly
from .losses import LossWatch
from .names import TrainedNames
from .random_numbers import OwnNumbers
from .view import LiveView

__all__ = ["MODES", "LiveLoop", "Snapshot", "loops", "stop_loops"]

MODES = ("auto", "task", "thread", "block")
SLICE = 0.02  # seconds of steps, after which other code may run
TURNS = 8  # turns of the event loop between slices; a message to the kernel takes several
_loops: weakref.WeakSet[LiveLoop] = weakref.WeakSet()
_numbers = itertools.count()


@dataclass(frozen=True)
class Snapshot:
    """The complete state of a training after one of its steps; see `LiveLoop.snapshot`.

    Attributes:
        name: its name.
        step: the number of the step after which it was taken.
        run: the name of the run that was being recorded.
        state: the state, for `LiveLoop`.
    """

    name: str
    step: int
    run: str
    state: Mapping[str, Any] = field(repr=False, compare=False)


class LiveLoop:
    """A training loop that can be watched, paused, steered and branched while the notebook stays usable.

    The `mode` says what runs the steps:

    - "task": an asyncio task in the background. The cell returns at once, and widgets work, because the task yields to the
      event loop every 20 ms. Other cells run between steps. Steps always run in the event loop in which the `LiveLoop` was
      made or first started, whichever thread resumes it.
    - "thread": a background thread, for steps that take so long that buttons would not respond.
    - "block": the cell itself, until the last step. "Run all" stays in order, and only the interrupt button steers.
    - "auto": "task" in a notebook that someone has open, else "block", as in nbclient, papermill and plain Python.

    Weights are bitwise the same in all modes, paused or not. A loop keeps its place in torch's random numbers when other
    code draws between its steps, a thread only while it is paused; not in NumPy's and Python's. The interrupt button, or
    Ctrl-C, pauses after the current step; a second interrupt breaks the step off. A cell that runs meanwhile is interrupted
    as usual.

    A loop trains what it was given: it stops before a step that would use another trainer, optimizer or network, because a
    name of the notebook that the steps read has been bound anew. A cell that is run again stops the loop that it made
    before. Outside of cells, a loop is stopped by a loop of a new function with the same name. A loop that starts or resumes
    stops a running loop with the same trainer or view, and both views say so; `loops()` lists the loops that exist. A loop
    that has ended does not keep its model and trainer alive: keep them in variables to `branch` afterwards.

    Args:
        steps: the training: a generator function or iterator that takes one step for each `next`, or a callable that takes
            one step, until it returns False or raises StopIteration, or that returns such an iterator. Steps may yield or
            return the loss, or numbers by name. A callable that takes several steps of the trainer in its first call is a
            generator function that lacks its `yield`: the loop fails with an error that says so.
        trainer: the `Trainer` or `torch.optim.Optimizer` in use; None means that rates cannot be set and there are no
            snapshots.
        recorder: a `Recorder` of the trainer. Its `step` is called with what the steps yield, unless the steps call it. None
            records the numbers that the steps yield, and the learning rate.
        stateful: further objects that training depends on, with `state_dict` and `load_state_dict`, for snapshots, such as a
            model with buffers, a torch scheduler or a GradScaler. `steps` itself may have these methods, too. A generator
            has none: after returning to a snapshot it continues with the next batches.
        view: the view that is redrawn during training and gets the controls: a `View`, such as `Dashboard(recorder)`;
            "live" for a `LossView`; None for no view.
        mode: "auto", "task", "thread" or "block", see above.
        frames_per_second: the highest rate of redrawing the view, > 0; it falls where drawing would take over 5 % of the
            time.
        name: the name of the run, if there is no recorder.
        stop_at_nan: whether the loop fails with FloatingPointError when a loss is infinite or NaN and weights are, too,
            which no later step mends. This is noticed when the loss has been recorded, within 0.1 s if it is on the CPU.
            May be set.
        checkpoint: a `CheckpointManager` of the trainer. `start` continues from the newest checkpoint in its folder;
            checkpoints are saved at the manager's interval, after SIGTERM, and at the end.

    Attributes:
        status: "ready", "running", "paused", "stopped", "finished" or "failed".
        n_steps: the number of steps that led to the current weights.
        run: the `Run` being recorded.
        runs: all runs, as a `RunSet`; each branch is a run.
        snapshots: the snapshots by name.
        exception: the exception that ended the loop, if it "failed".
        view: the `LiveView` that shows the loop; None if there is none.
        rate: the `LearningRate`, with its multiplier.
        remark: says what has replaced this loop or what it trains, or which loop this one has stopped; "" if neither.
        clock: the function that tells the time, in seconds.

    Raises:
        TypeError, ValueError: an argument is invalid; the message names it and says what is allowed.

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
        stop_at_nan: bool = True,
        checkpoint: CheckpointManager | None = None,
    ) -> None:
        _check_arguments(steps, trainer, recorder, stateful, view, checkpoint)
        budget = FrameBudget(most=number("frames_per_second", frames_per_second, above=0))
        self._mode = choice("mode", mode, MODES)
        self.stop_at_nan = boolean("stop_at_nan", stop_at_nan)
        self.status, self.n_steps, self.clock = "ready", 0, time.monotonic
        self.exception: BaseException | None = None
        self.remark = ""
        # These decide which thread may step: see `at_rest` and the methods after it.
        self._changed = threading.Condition(threading.RLock())
        self._guests = 0
        self._stepping: int | None = None  # the thread of the current step
        self._turn = 0  # how often it was started or resumed; code of an earlier turn must not step any more
        self._limit: int | None = None  # how many steps to take before the next pause
        self._requested: str | None = None  # the status to change to after the current step
        self._interrupted = self._is_breakable = self._is_replaced = False
        self._since = (0, 0.0)  # step and time of the last start or resume
        self.event_loop = running_event_loop()
        self._task: asyncio.Task[None] | None = None
        self._numbers = OwnNumbers()
        # The objects being trained. A notebook keeps what it has displayed, so an ended loop has only weak references.
        objects = [*stateful, *([steps] if _is_stateful(steps) else [])]
        self._model = [each for each in (trainer, checkpoint, *objects) if each is not None]
        self._living = list(map(weakly, self._model))
        self._stateful, self._checkpoint = list(map(weakly, objects)), weakly(checkpoint)
        self._source, self._iterator = steps, _iterator(steps)
        self.names = TrainedNames.of(steps, trainer)
        self._saving: ExitStack | None = None
        self.rate, self.recorder = LearningRate(trainer), recorder
        self.run = Run(name) if recorder is None else recorder.run
        self._scalars = ScalarBuffer()  # used if there is no recorder
        self.runs, self.snapshots = RunSet([self.run]), dict[str, Snapshot]()
        self._left_off: dict[str, Snapshot] = {}  # for each other run, its state when it was left
        self._watch = LossWatch(self.run)
        self.view = None if view is None else LiveView(self, view if isinstance(view, View) else None, budget=budget)
        self._shown_by: str | None = None  # the execution of a cell that has shown the view
        self.cell: str | None = request().get("metadata", {}).get("cellId")  # the id of the notebook cell that made the loop
        self._run_of_cell = request().get("header", {}).get("msg_id")
        self._cell_is_gone, self.number = watch_cell(), next(_numbers)
        self._replace_earlier()
        _loops.add(self)

    @classmethod
    def fit(
        cls,
        net: torch.nn.Module,
        loss: Callable[[Any, Any], torch.Tensor],
        data: Iterable[Any],
        trainer: Trainer | torch.optim.Optimizer,
        *,
        epochs: int = 1,
        eval_data: Iterable[Any] | None = None,
        eval_metric: Any = None,
        capture: bool | str = False,
        **options: Any,
    ) -> LiveLoop:
        """Make a loop that trains `net` for some epochs, as `tristep.fit` does. It is not started yet.

        Snapshots include the model's buffers and the position in the data, provided that `data` depends only on the random
        numbers of torch, NumPy and Python, and on a generator of the loader.

        Args:
            net: the model, called with the inputs of a batch.
            loss: a function of outputs and labels that returns one number for each sample, or their mean.
            data: batches (inputs, labels), iterated again in every epoch.
            trainer: the trainer or optimizer of the model's parameters.
            epochs: the number of epochs, >= 1.
            eval_data: held-out batches, evaluated after each epoch; `data` must have a length then. An epoch's last step
                yields "val_loss" and, for each metric, "val_" and its name, too.
            eval_metric: metrics to compute on `eval_data`, such as "accuracy"; see `tristep.fit`.
            capture: whether to record steps as a CUDA graph on a GPU: False, True or "auto", as for `tristep.fit`. The
                status says why that cannot be.
            **options: other arguments of `LiveLoop`.

        Returns:
            The loop.

        Raises:
            TypeError, ValueError: an argument is invalid; the message names it.

        Example:
            >>> import torch, tristep
            >>> from tristep.viz import LiveLoop
            >>> net = torch.nn.Linear(2, 1)
            >>> trainer = tristep.Trainer(net, "adam")
            >>> data = [(torch.ones(4, 2), torch.zeros(4, 1))]
            >>> loop = LiveLoop.fit(net, torch.nn.MSELoss(), data, trainer, epochs=3, view=None)
            >>> loop.start().n_steps
            3
        """
        instance("trainer", trainer, (Trainer, torch.optim.Optimizer), "a Trainer or a torch.optim.Optimizer")
        epochs, metrics = integer("epochs", epochs, low=1), checked_metrics(eval_metric)
        check_captures(capture)
        if eval_data is None and metrics:
            raise ValueError("eval_metric without eval_data: there is nothing to evaluate on")
        if eval_data is not None:
            check_batches("eval_data", eval_data)
        batches = EpochBatches(data)
        if eval_data is not None and batches.length is None:
            raise TypeError("data has no length, so nobody knows which step ends an epoch: give a DataLoader or a list")
        living_net, living_trainer = (
            weakly(net),
            weakly(trainer),
        )  # the loop itself keeps them alive as long as it needs them

        def steps() -> Iterator[Any]:
            step = BatchStep(living_trainer(), living_net(), loss, capture)
            while batches.epoch < epochs:
                for batch in batches:
                    _, mean, _, _ = step(batch)
                    if step.why and (loop := made()) is not None:
                        loop.remark = f"no CUDA graph: {step.why}"
                    if eval_data is None or batches.batch != batches.length:
                        yield mean
                    else:
                        means = evaluate(living_net(), loss, eval_data, metrics)
                        yield {"loss": mean} | {f"val_{name}": each for name, each in means.items()}

        stateful = [net, *options.pop("stateful", ()), batches]
        loop = cls(steps, trainer=trainer, stateful=stateful, **options)
        made = weakref.ref(loop)
        return loop

    @property
    def mode(self) -> str:
        """The mode; "auto" becomes "task" or "block" when the loop starts."""
        return self._mode

    @mode.setter
    def mode(self, mode: str) -> None:
        self._mode = choice("mode", mode, MODES)

    def start(self) -> LiveLoop:
        """Start training, and show the view if there is a notebook.

        Returns:
            The loop itself.

        Raises:
            RuntimeError: the loop has been started before, or mode="task" without a running event loop.
            Exception: with mode="block", the exception of a step.
        """
        if self.status != "ready":
            raise RuntimeError(f"start() of a loop that is {self.status} already: resume() goes on with a paused one")
        self._go_on(None)
        return self

    def pause(self) -> None:
        """Pause after the current step, and wait for its end. Called within a step, it returns at once."""
        self._take_up("paused")

    def resume(self) -> None:
        """Continue after a pause or a failed step.

        Raises:
            RuntimeError: there are no more steps, or the model is gone.
        """
        self._go_on(None)

    def step(self, n: int = 1) -> None:
        """Take `n` steps, and pause again.

        Args:
            n: the number of steps, >= 1.
        """
        self._go_on(integer("n", n, low=1))

    def stop(self) -> None:
        """End the loop after the current step, and wait for that. A generator is closed."""
        self._take_up("stopped")

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the end of the loop, and start it first if need be.

        A task's remaining steps are run by this call, because a cell that waits would block the task.

        Args:
            timeout: the longest time to wait, in seconds; None for no limit.

        Returns:
            Whether the loop has ended; False if the time is over or the loop is paused.

        Raises:
            Exception: the exception of a step.
            RuntimeError: it is called within a step.
        """
        if self._stepping == threading.get_ident():
            raise RuntimeError("wait() in a step, which it would wait for")
        if self.status == "ready":
            self.start()
        here = running_event_loop()
        try:
            if self.mode == "block" or (self.mode == "task" and here is not None and here is self.event_loop):
                self._run_here(self._turn, timeout)
            else:
                with self._changed:
                    self._changed.wait_for(lambda: self.status != "running", timeout)
        except KeyboardInterrupt:
            self._pause_and_say()
        self._raise()
        return self.has_ended

    def __await__(self) -> Generator[Any, None, LiveLoop]:
        """Wait for the end while the notebook stays usable. Returns the loop, or raises the exception of a step."""
        return self._wait_for_end().__await__()

    @property
    def has_ended(self) -> bool:
        """Whether the loop has finished, failed or been stopped."""
        return self.status in ("stopped", "finished", "failed")

    @property
    def can_go_on(self) -> bool:
        """Whether the loop can be started or resumed."""
        if self.status == "failed":
            return not (self._is_replaced or (self._is_closed and isinstance(self._source, Iterable)))
        return self.status in ("ready", "paused")

    @property
    def steps_per_second(self) -> float:
        """The speed since the loop was last started or resumed; 0 if it is not running."""
        step, then = self._since
        return (self.n_steps - step) / max(self.clock() - then, 1e-9) if self.status == "running" else 0.0

    @property
    def learning_rate(self) -> float | None:
        """The learning rate of the last step; before the first step, the upcoming one. None without a trainer."""
        return self.rate.last

    def set_learning_rate(self, lr: float) -> None:
        """Set the learning rate from the next step on.

        With several parameter groups this is the rate of the first one; the others keep their proportions. With a schedule
        it sets the multiplier that makes the scheduled rate equal to `lr` now.

        Args:
            lr: the learning rate, >= 0.

        Raises:
            ValueError: `lr` is negative or not a number, the scheduled rate is 0, or there is no trainer.
        """
        lr = number("lr", lr, low=0)
        self.rate.needed("set_learning_rate")
        with self.at_rest():
            self.rate.set(lr)

    @property
    def multiplier(self) -> float:
        """The factor of each step's learning rate, which may be set at any time; 1 has no effect.

        It is applied during a step only, and changes neither the schedule nor the optimizer.
        """
        return self.rate.multiplier

    @multiplier.setter
    def multiplier(self, value: float) -> None:
        value = number("multiplier", value, low=0)
        self.rate.needed("multiplier")
        self.rate.multiplier = value

    def snapshot(self, name: str | None = None) -> Snapshot:
        """Copy everything that training depends on: weights, gradients, optimizer state, `stateful`, random numbers.

        Copies stay on the devices of their tensors.

        Args:
            name: the name of the snapshot; None means a name such as "step 12". A snapshot of the same name is replaced.

        Returns:
            The snapshot, which is also in `snapshots`.

        Raises:
            ValueError: there is no trainer.
        """
        self.rate.needed("snapshot")
        with self.at_rest():
            name = f"step {self.n_steps}" if name is None else name
            self.snapshots[name] = snapshot = self._take_snapshot(name)
            return snapshot

    def branch(
        self,
        name: str | None = None,
        at: str | Snapshot | None = None,
        *,
        learning_rate: float | None = None,
    ) -> Run:
        """Return to a snapshot and continue from it as a new run, optionally with another learning rate.

        The state of the current run is kept, so that `pick` can continue it. A loop that has ended is paused afterwards.

        Args:
            name: the name of the new run; None means "branch 1", "branch 2", ...
            at: a snapshot or its name; None means the current state.
            learning_rate: the learning rate of the new run, >= 0; None leaves it as it is.

        Returns:
            The new run.

        Raises:
            KeyError: the snapshot does not exist.
            ValueError: a run of that name exists, or there is no trainer; nothing has changed.
            RuntimeError: the loop has ended and its model is gone, or another loop has replaced it.

        Example, a comparison of two rates:

            loop.snapshot("fork")
            for rate in (0.1, 0.3):
                loop.branch(f"rate {rate}", "fork", learning_rate=rate)
                loop.step(100)
            loop.pick("rate 0.1")
            loop.resume()
        """
        self.rate.needed("branch")
        names = [run.name for run in self.runs]
        if name is None:
            name = next(f"branch {k}" for k in itertools.count(1) if f"branch {k}" not in names)
        if name in names:
            raise ValueError(f"name={name!r}: there is a run of that name already")
        if isinstance(at, str) and at not in self.snapshots:
            raise KeyError(f"at={at!r}: there is no snapshot of that name.{there_are(at, self.snapshots)}")
        rate = None if learning_rate is None else number("learning_rate", learning_rate, low=0)
        with self.at_rest():
            self._keep_model()
            here = self._take_snapshot(self.run.name)
            snapshot = here if at is None else self.snapshots[at] if isinstance(at, str) else at
            origin = f"{snapshot.run}, step {snapshot.step}"
            old = self.run
            new = Run(name, old.parameters, old.edges, old.notes | {"branched from": origin}, old.storage, old.layers)
            self._restore(snapshot, new, here)
            if rate is not None:
                self.rate.set(rate)
        self._draw()
        return new

    def pick(self, name: str) -> Run:
        """Continue a run at the state in which `branch` or `pick` left it.

        Args:
            name: the name of the run.

        Returns:
            The run.

        Raises:
            KeyError: the run does not exist.
            RuntimeError: the loop has ended and its model is gone, or another loop has replaced it.
        """
        run = self.runs[name]
        if run is not self.run:
            with self.at_rest():
                self._keep_model()
                here = self._take_snapshot(self.run.name)
                self._restore(self._left_off.pop(name), run, here)
            self._draw()
        return run

    def take_in(self, wait: bool = True) -> None:
        """Move the numbers that steps have yielded into the run.

        Args:
            wait: whether to wait for numbers that are still on a device. With a recorder this never waits.
        """
        if self.recorder is not None:
            self.recorder.poll()
        elif wait:
            self._scalars.flush(self.run)
        else:
            self._scalars.poll(self.run)

    def _ipython_display_(self) -> None:
        """Show the view, unless `start` has shown it in this cell already."""
        if not self._show(again=False):
            raise NotImplementedError  # tells IPython to show `repr` instead

    def _display_(self) -> Any:
        """Return what marimo shows as the value of a cell."""
        return repr(self) if self.view is None else self.view._display_()

    def __repr__(self) -> str:
        return f"LiveLoop({self.run.name!r}, {self.status}, {self.n_steps} steps, mode={self.mode!r})"

    # Which thread may step: one, in the current turn, if no other status has been requested and there is no guest.

    @contextmanager
    def at_rest(self) -> Iterator[None]:
        """Return a context during which no step runs. Within a step it does nothing."""
        if self._stepping == threading.get_ident():
            yield
            return
        with self._changed:
            self._guests += 1
            try:
                self._changed.wait_for(lambda: self._stepping is None)
                yield
            finally:
                self._guests -= 1
                self._changed.notify_all()

    def _is_on(self, turn: int) -> bool:
        return self.status == "running" and self._turn == turn

    def _take_step(self, turn: int) -> None:
        """Wait until a step may be taken, take it if the turn is still current, and set the status that follows."""
        with self._changed:
            self._changed.wait_for(lambda: self._guests == 0 and self._stepping is None)
            if not self._is_on(turn):
                return
            replaced = self.names.changed()
            if replaced:
                self.remark, self._requested = replaced, "stopped"
            steps = self._requested is None
            self._stepping = threading.get_ident() if steps else None
        status: str | None = None
        try:
            if steps:
                status = self._take_one()
        except BaseException as error:
            status, self.exception = "failed", error
            raise
        finally:
            with self._changed:
                self._stepping = None if steps else self._stepping
                if status in (None, "paused"):
                    status = self._requested or status
                if status is not None:
                    self._set_status(status)
                self._changed.notify_all()
            if status is not None:
                self._tell()
            if replaced and self.view is None:  # where nothing else shows the remark
                print(f"{self.run.name}: {self.status} after step {self.n_steps:,}: {replaced}")

    def _take_one(self) -> str | None:
        """Take a step; return the status that follows, or None to continue."""
        try:
            try:
                self._is_breakable = True
                with self.rate.applied() as taken:
                    value = next(self._iterator)
            finally:
                self._is_breakable = False
            # A loop that another one has stopped meanwhile may have seen that one's steps.
            is_alone = self._requested != "stopped"
            if self.n_steps == 0 and taken() > 1 and is_alone and not isinstance(self._source, Iterable):
                _refuse_without_yield(self._source, taken())
            self.n_steps += 1
            self._note(value)
        except StopIteration:
            return "finished"
        except KeyboardInterrupt:
            self._interrupted = True
            return "paused"
        except Exception as error:
            self.exception = error
            return "failed"
        if self._limit is not None:
            self._limit -= 1
        return "paused" if self._limit == 0 else None

    def _take_up(self, status: str) -> None:
        """Change to "paused" or "stopped" after the current step, and wait for that. Within a step it returns at once."""
        if self._stepping == threading.get_ident():
            self._requested = status
            return
        with self.at_rest():
            if not (self.status == "running" or (status == "stopped" and self.status in ("ready", "paused"))):
                return
            self._set_status(status)
        self._tell()

    def _set_status(self, status: str) -> None:
        """Change the status between two steps. The caller calls `_tell` afterwards, without the lock."""
        if self.mode == "thread":
            self._numbers.end()
        try:
            self.take_in()  # who waits for the new status, in another thread, finds the numbers of all steps
            if status in ("finished", "paused") and (error := self._bad_loss()) is not None:
                status, self.exception = "failed", error
        finally:
            self.status, self._requested, self._limit = status, None, None
        if not self.has_ended:
            return
        if self.recorder is not None:
            self.recorder.flush()
        try:
            self._end_saving()
        except Exception as error:
            self.status, self.exception = "failed", error
        if status == "stopped" and isinstance(self._iterator, Generator):
            self._iterator.close()  # so that it can clean up
        self._model = []

    def _tell(self) -> None:
        interrupted, self._interrupted = self._interrupted, False
        self._draw()
        if interrupted and self.status == "paused":  # and not "finished" by its last step
            self._say_paused()
        if self.status == "failed" and self.mode == "task" and self.view is None:  # where nothing else shows the exception
            traceback.print_exception(self.exception)

    def _interrupt(self) -> bool:
        """React to a signal, without waiting; return whether to break off the current step."""
        if self.status != "running":
            return False
        if self._interrupted and self._is_breakable and self._stepping == threading.get_ident():
            return True
        self._requested, self._interrupted = self._requested or "paused", True
        return False

    def _handle(self, *_: object) -> None:
        if self._interrupt():
            raise KeyboardInterrupt

    # The modes: what takes steps, in slices of time.

    def _go_on(self, limit: int | None) -> None:
        """Start or resume, for `limit` steps if it is not None."""
        if self.status == "running":
            return
        begins = self.status == "ready"
        if begins:
            if self.mode == "auto":
                self.mode = "task" if running_event_loop() is not None and has_front_end() else "block"
            for loop in list(_loops):
                if loop._cell_is_gone():
                    loop.stop()
        else:
            why = "it has ended"
            if self.status in ("paused", "failed"):
                self._keep_model()
                why = "" if self._renew() else "its generator has been ended by the exception"
            if why:
                raise RuntimeError(
                    f"there is nothing to go on with: {why}. branch() goes back to a snapshot where there is one"
                )
        if replaced := self.names.changed():
            self.remark = replaced
            self.stop()
            raise RuntimeError(f"there is nothing to go on with: {replaced}")
        event_loop = self._own_event_loop() if self.mode == "task" else None
        self._stop_others()
        with self._turn_of_numbers():  # which notes where a loop that starts has to go on
            self._begin_saving(resumes=begins)
        later = begins and self.mode == "block" and not has_front_end()  # a static picture: show only the last state
        if begins and not later:
            self._show()
        with self._changed:
            if self.status == "running":  # another thread has just resumed it
                return
            self._limit, self.exception, self._requested, self._interrupted = limit, None, None, False
            self.status, self._turn = "running", self._turn + 1
            self._since = (self.n_steps, self.clock())
            turn = self._turn
            if self.mode == "thread":  # others may draw at any time: it shares with them until it pauses
                self._numbers.begin()
        if event_loop is not None and event_loop is running_event_loop():
            self._make_task(turn)
        elif event_loop is not None:
            event_loop.call_soon_threadsafe(self._make_task, turn)
        elif self.mode == "thread":
            atexit.unregister(_pause_threads)  # last in, first out: before recorders end
            atexit.register(_pause_threads)
            # With a copy of the context, so that what a step prints appears in its cell.
            run = contextvars.copy_context().run
            threading.Thread(target=run, args=(self._run_here, turn), name=f"LiveLoop {self.run.name}", daemon=True).start()
        else:
            self._run_here(turn)
            if later:
                self._show()
            self._raise()

    def _own_event_loop(self) -> asyncio.AbstractEventLoop:
        """Return the event loop for the task: the one in which this loop was made, or else the one running here."""
        if self.event_loop is None or not self.event_loop.is_running():
            self.event_loop = running_event_loop() or self.event_loop
        if self.event_loop is None or self.event_loop.is_closed():
            raise RuntimeError("mode='task' needs a running event loop, as a notebook has: use 'thread' or 'block'")
        return self.event_loop

    def _make_task(self, turn: int) -> None:
        if self._is_on(turn):
            self._task = asyncio.get_running_loop().create_task(self._run_in_task(turn), name=f"LiveLoop {self.run.name}")

    async def _run_in_task(self, turn: int) -> None:
        try:
            while self._is_on(turn):
                with _taking_interrupts(), self._turn_of_numbers():
                    self._run_slice(turn)
                for _ in range(TURNS):
                    if not self._is_on(turn):  # `await loop` may return now, so the task must end
                        return
                    await asyncio.sleep(0)
        except asyncio.CancelledError:  # the event loop ends
            self.pause()
            raise
        finally:
            if gets_signals() and not any(loop.mode == "task" for loop in _loops if loop.status == "running"):
                if signal.getsignal(signal.SIGINT) is _interrupt_tasks:
                    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def _run_here(self, turn: int, timeout: float | None = None) -> None:
        until = None if timeout is None else self.clock() + timeout
        # A progress bar, in a terminal only.
        progress = tqdm(
            desc=self.run.name, initial=self.n_steps, unit=" steps", disable=None if self.mode == "block" else True
        )
        numbers = nullcontext() if self.mode == "thread" else self._turn_of_numbers()
        with handled(self._handle), progress, numbers:
            while self._is_on(turn) and (until is None or self.clock() < until):
                self._run_slice(turn, until)
                losses = self.run.scalars.get("loss")
                if losses is not None and len(losses):
                    progress.set_postfix_str(f"loss {losses.recent()[1][-1]:.4g}", refresh=False)
                progress.update(self.n_steps - progress.n)

    def _run_slice(self, turn: int, until: float | None = None) -> None:
        """Take steps for `SLICE` seconds, or until the time `until`, while the turn is current; then update the view."""
        end = self.clock() + SLICE
        while self._is_on(turn):
            self._take_step(turn)
            now = self.clock()
            if now >= end or (until is not None and now >= until):
                break
        if not self._is_on(turn):  # an ended loop keeps the error that has ended it, whatever arrived last
            return
        if self.recorder is None:
            with self.at_rest():
                self.take_in(wait=False)
        error = self._bad_loss()
        self._draw(turn)
        asked = None if error is None else "failed"
        self.exception = self.exception if error is None else error
        asked = "stopped" if self._cell_is_gone() else asked  # then nothing refers to the loop any more
        self._requested = self._requested or asked

    @contextmanager
    def _turn_of_numbers(self) -> Iterator[None]:
        """Return a context in which torch's random numbers are the loop's; other threads are kept out of their change."""
        with ExitStack() as turn:
            with self.at_rest():
                turn.enter_context(self._numbers.turn())
            try:
                yield
            finally:
                with self.at_rest():
                    turn.close()

    async def _wait_for_end(self) -> LiveLoop:
        if self.status == "ready":
            self.start()
        try:
            while not self.has_ended:
                # Poll, because the kernel handles an interrupt only when its event loop has something to do.
                await asyncio.sleep(SLICE)
        except asyncio.CancelledError:  # Ctrl-C in a cell that awaits
            self._pause_and_say()
            raise
        self._raise()
        return self

    def _pause_and_say(self) -> None:
        if self.status == "running":
            self.pause()
            self._say_paused()

    def _say_paused(self) -> None:
        if gets_signals():  # the thread in which the user interrupted it
            print(f"paused after step {self.n_steps}; loop.resume() goes on")

    def _raise(self) -> None:
        if self.status == "failed" and self.exception is not None:
            raise self.exception

    # Other loops.

    def _replace_earlier(self) -> None:
        """Stop the loop made by an earlier execution of this cell; outside of cells, by a function of the same name."""
        for other in list(_loops):
            if other.cell is None and self.cell is None:
                is_earlier = _is_redefined(other._source, self._source)
            else:
                is_earlier = other.cell == self.cell and other._run_of_cell != self._run_of_cell
            if is_earlier:
                other._give_way()
                if other.n_steps and other.status == "stopped":
                    self.remark = f"instead of the loop that this cell has made before, stopped after step {other.n_steps:,}"

    def _give_way(self) -> None:
        """Stop for good, and release everything that was trained."""
        self.remark = "its cell has been run again, and another loop has taken its place"
        self.stop()
        self._is_replaced, self._model = True, []
        self._source = self._iterator = iter(())
        self.snapshots.clear()
        self._left_off.clear()
        if self.exception is not None:
            self.exception.__traceback__ = None  # its frames refer to what was trained

    def _stop_others(self) -> None:
        """Stop running loops with this loop's trainer or view, so that only the last one steps."""
        mine = {"trainer": self.rate.trainer, "view": None if self.view is None else self.view.of}
        for other in loops():
            its = {"trainer": other.rate.trainer, "view": None if other.view is None else other.view.of}
            shared = next((what for what in mine if mine[what] is not None and mine[what] is its[what]), None)
            if other is not self and other.status == "running" and shared is not None:
                other.remark = f"loop {self.run.name!r} has begun with its {shared}"
                other.stop()
                self.remark = f"loop {other.run.name!r} with the same {shared} was stopped after step {other.n_steps:,}"

    # Drawing, recording, saving and snapshots; all but drawing happen between two steps.

    def _show(self, again: bool = True) -> bool:
        """Show the view if there is a notebook, and return whether it is shown.

        With `again`, show it even if this execution of the cell has shown it.
        """
        if self.view is None:
            return False
        run = request().get("header", {}).get("msg_id")
        if not again and run is not None and run == self._shown_by:
            return True
        self._shown_by = run
        return show_below_cell(self.view)

    def _draw(self, turn: int | None = None) -> None:
        """Redraw the view: at once, or with a `turn` only if the view's budget allows and the turn is current.

        A new status is drawn after it has been set, so no frame of a running loop can follow.
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

    def _note(self, value: Any) -> None:
        """Record what a step has yielded: numbers by name, a loss, or nothing (None, True). Saves if a checkpoint is due."""
        numbers = dict(value) if isinstance(value, Mapping) else {} if value is None or value is True else {"loss": value}
        recorded = numbers if self.rate.last is None else {"learning_rate": self.rate.last} | numbers
        if self.recorder is None:
            self._scalars.add(self.n_steps, checked_scalars(recorded))
        elif self.recorder.due:
            self.recorder.step(**recorded)
        manager = self._checkpoint()
        if manager is not None and self._saving is not None:
            metrics = {name: one for name, one in numbers.items() if _is_number(one)}
            manager.step(metrics if manager.metric is None or manager.metric in metrics else None)

    def _bad_loss(self) -> FloatingPointError | None:
        """Return the error if losses that have arrived since the last call are not finite, and weights neither."""
        self._watch = self._watch if self._watch.run is self.run else LossWatch(self.run)
        bad, trainer = self._watch.find_nonfinite(), self.rate.trainer
        if bad is None or not self.stop_at_nan:
            return None
        if trainer is not None and all(torch.isfinite(each.detach()).all() for each in parameters_of(trainer)):
            return None
        name, step, value = bad
        words = f"{name} is {value:g} at step {step:,}"
        words += "" if trainer is None else ", and weights are not finite, which no later step mends"
        return FloatingPointError(f"{words}. LiveLoop(..., stop_at_nan=False) goes on")

    def _begin_saving(self, resumes: bool) -> None:
        """Begin to save checkpoints and to note SIGTERM. With `resumes`, first load the newest checkpoint."""
        manager = self._checkpoint()
        if manager is None or self._saving is not None:
            return
        objects = (each() for each in self._stateful)
        with ExitStack() as saving:
            saving.enter_context(saving_with(manager, [each for each in objects if each is not manager.net]))
            if resumes:
                self.n_steps = manager.resume().step
            self._saving = saving.pop_all()

    def _end_saving(self) -> None:
        """Save a last checkpoint, unless the loop has failed, and wait until it is written."""
        manager, saving, self._saving = self._checkpoint(), self._saving, None
        if manager is None or saving is None:
            return
        with saving, self._turn_of_numbers():
            if self.status != "failed" and manager.saved_step != manager.trainer.optimizer.num_update:
                manager.save()

    def _keep_model(self) -> None:
        """Hold strong references to model and trainer again, to continue training.

        Raise RuntimeError if they have been deleted, or another loop has replaced this one.
        """
        model = [living() for living in self._living]
        gone = "what this loop has trained is gone. A loop that has ended does not keep it"
        if self._is_replaced or any(each is None for each in model):
            raise RuntimeError(f"there is nothing to go on with: {self.remark if self._is_replaced else gone}")
        self._model = model

    @property
    def _is_closed(self) -> bool:
        return isinstance(self._iterator, Generator) and inspect.getgeneratorstate(self._iterator) == inspect.GEN_CLOSED

    def _renew(self) -> bool:
        """Make a new generator if the old one has ended, if possible; return whether there may be more steps."""
        if self._is_closed and not isinstance(self._source, Iterable):
            self._iterator = _iterator(self._source)
        return not self._is_closed

    def _take_snapshot(self, name: str) -> Snapshot:
        self.take_in()
        with self._numbers.turn():
            snapshot = TrainerSnapshot(self.rate.needed("snapshot"))
        state = {
            "trainer": snapshot,
            "gradients": [None if param.grad is None else param.grad.detach().clone() for param in snapshot.params],
            "stateful": [copy.deepcopy(each().state_dict()) for each in self._stateful],
            "multiplier": self.rate.multiplier,
            "recorded": 0 if self.recorder is None else self.recorder.last_step,
        }
        return Snapshot(name, self.n_steps, self.run.name, state)

    @uninterrupted
    def _restore(self, snapshot: Snapshot, run: Run, left: Snapshot) -> None:
        """Restore a snapshot and record into `run`. `left` is the state of the current run. An ended loop is paused."""
        state = snapshot.state
        with self._numbers.turn():
            for each, saved in zip(self._stateful, state["stateful"], strict=True):
                each().load_state_dict(copy.deepcopy(saved))
            state["trainer"].restore()  # last, because loading the others may use random numbers
        for param, gradient in zip(state["trainer"].params, state["gradients"], strict=True):
            param.grad = None if gradient is None else gradient.clone()
        self.rate.multiplier, self.n_steps = state["multiplier"], snapshot.step
        self.rate.last = self.rate.now
        self._left_off[left.run], self.run = left, run
        if all(run is not each for each in self.runs):
            self.runs.add(run)
        if self.recorder is not None:
            self.recorder.record_into(run, state["recorded"])
        if self.has_ended and self._renew():
            self.status, self.exception = "paused", None
        elif self.has_ended:
            self._model = []


class Loops(list[Any]):
    """A list of loops, shown as text; in a notebook each has a Stop button."""

    def __repr__(self) -> str:
        return "\n".join(map(_in_words, self)) or "no loop is running or paused"

    def _ipython_display_(self) -> None:
        if not self or not has_front_end():
            raise NotImplementedError  # tells IPython to show `repr` instead
        import ipywidgets as widgets
        from IPython.display import display

        display(widgets.VBox([_row(widgets, loop) for loop in self]))


def loops() -> Loops:
    """Return all live loops that are running or paused, in the order in which they were made.

    Example:
        >>> from tristep import viz
        >>> for loop in viz.loops():
        ...     loop.stop()
    """
    active = [loop for loop in _loops if loop.status in ("running", "paused")]
    return Loops(sorted(active, key=lambda loop: loop.number))


def stop_loops(cell: str | None = None) -> None:
    """Stop the loops made by the cell with this id; None stops all loops."""
    for loop in loops():
        if cell in (None, loop.cell):
            loop.stop()


def _pause_threads() -> None:
    """Pause threads at the end of the program: one that is cut off within a torch operation would abort the process."""
    for loop in loops():
        if loop.mode == "thread":
            loop.pause()


def _in_words(loop: LiveLoop) -> str:
    return f"{loop.run.name}: {loop.status}, step {loop.n_steps:,}, mode {loop.mode!r}"


def _row(widgets: Any, loop: LiveLoop) -> Any:
    button, label = widgets.Button(description="Stop"), widgets.Label(_in_words(loop))

    def stop(_: Any) -> None:
        loop.stop()
        button.disabled, label.value = True, _in_words(loop)

    button.on_click(stop)
    return widgets.HBox([button, label])


_interrupts = [0]  # the number of SIGINTs handled by `_interrupt_tasks`


def _interrupt_tasks(number: int, frame: Any) -> None:
    """Pause loops that run as tasks; the handler of SIGINT while there are any."""
    _interrupts[0] += 1
    broken_off = [loop._interrupt() for loop in list(_loops) if loop.mode == "task"]
    if any(broken_off):
        raise KeyboardInterrupt


@contextmanager
def _taking_interrupts() -> Iterator[None]:
    """Handle SIGINT during a slice of a task, and also after it if nothing else handles it, as in an idle kernel.

    While a cell runs, the kernel has its own handler. Afterwards it restores the earlier one: SIG_IGN, or this one.
    """
    if not gets_signals():
        yield
        return
    count, before = _interrupts[0], signal.signal(signal.SIGINT, _interrupt_tasks)
    try:
        yield
    finally:
        if before is not signal.SIG_IGN and before is not _interrupt_tasks:
            restore_handlers({signal.SIGINT: before})
            cell_awaits = callable(before) and before is not signal.default_int_handler and in_notebook()
            if _interrupts[0] != count and cell_awaits:
                signal.raise_signal(signal.SIGINT)  # interrupt the cell, too


def _iterator(steps: Any) -> Iterator[Any]:
    if isinstance(steps, Iterable):
        return iter(steps)
    return steps() if inspect.isgeneratorfunction(steps) else _called(steps)


def _called(step: Callable[[], Any]) -> Iterator[Any]:
    """Yield the results of a callable until it returns False or raises StopIteration; if it makes an iterator, its items."""
    try:
        while (value := step()) is not False:
            if isinstance(value, Iterator):
                yield from value
                return
            yield value
    except StopIteration:
        return


def _refuse_without_yield(steps: Any, taken: int) -> None:
    """Raise the error about a callable whose first call has taken `taken` steps of the trainer."""
    name = getattr(steps, "__name__", type(steps).__name__)
    raise ValueError(
        f"steps: one call of {name}() has taken {taken:,} steps of the trainer. LiveLoop calls a function once for each "
        "step, and can pause and draw between calls only: write `yield loss` after the line with trainer.step(...) or "
        "optimizer.step(), in the loop over the batches"
    )


def _is_redefined(steps: Any, newer: Any) -> bool:
    """Return whether `newer` is a function that has replaced `steps` under its name, as when a cell is run again."""
    if not (isinstance(steps, types.FunctionType) and isinstance(newer, types.FunctionType)) or steps is newer:
        return False
    name, namespace = steps.__qualname__, steps.__globals__
    return newer.__globals__ is namespace and newer.__qualname__ == name and namespace.get(name) is newer


def _is_stateful(thing: Any) -> bool:
    return callable(getattr(thing, "state_dict", None)) and callable(getattr(thing, "load_state_dict", None))


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _check_arguments(steps: Any, trainer: Any, recorder: Any, stateful: Sequence[Any], view: Any, checkpoint: Any) -> None:
    results = (torch.Tensor, str, Mapping)  # can be iterated, but are what a step returns
    if not callable(steps) and (isinstance(steps, results) or not isinstance(steps, Iterable)):
        called = isinstance(steps, torch.Tensor) or _is_number(steps) or steps is None
        raise TypeError(
            f"steps={steps!r:.80}: must be a generator function, an iterator or a callable that takes one step"
            + "; give the function itself, such as LiveLoop(step) instead of LiveLoop(step())" * called
        )
    instance("trainer", trainer, (Trainer, torch.optim.Optimizer, type(None)), "a Trainer, a torch.optim.Optimizer or None")
    instance("recorder", recorder, (Recorder, type(None)), "a Recorder or None")
    for i, each in enumerate(stateful):
        if not _is_stateful(each):
            raise TypeError(f"stateful[{i}] is a {type(each).__name__}: it needs state_dict and load_state_dict")
    instance("checkpoint", checkpoint, (CheckpointManager, type(None)), "a CheckpointManager or None")
    if checkpoint is not None and checkpoint.trainer is not trainer:
        raise ValueError("checkpoint is a CheckpointManager of another trainer than the loop's")
    if view != "live":
        instance("view", view, (View, type(None)), "'live', None or a View", shown=True)
