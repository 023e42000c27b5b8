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
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from tqdm import tqdm

from ...trainer import CheckpointManager, Trainer
from ...trainer.checkpoint.snapshot import Snapshot as TrainerSnapshot
from ...trainer.fitting import EpochBatches, check_batches, evaluate, saving_with, train_on
from ...trainer.interrupts import gets_signals, give_back, handled, uninterrupted
from ...trainer.metrics import checked_metrics
from ...trainer.validation import choice, integer, number
from ..record import Recorder, Run, RunSet
from ..record.scalars import ScalarBuffer, checked_scalars
from ..render.notebook import has_front_end, in_notebook, request, running_event_loop, show_below_cell, watch_cell
from ..views import FrameBudget, View
from .learning_rates import LearningRate, weakly
from .view import LiveView

__all__ = ["MODES", "LiveLoop", "Snapshot", "loops", "stop_loops"]

MODES = ("auto", "task", "thread", "block")
SLICE = 0.02  # seconds of steps between two looks at what else there is to do
TURNS = 8  # of the event loop between two slices, several of which a message to the kernel takes
UNSEEN = 60.0  # seconds without a page that shows the view, after which that is told
_loops: weakref.WeakSet[LiveLoop] = weakref.WeakSet()
_numbers = itertools.count()


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
      task releases the thread every 20 ms. Other cells run between the steps. Whatever thread asks for them, steps are
      taken in the event loop in which the loop was made, or first started.
    - "thread": a thread in the background, for steps that take longer than a person waits for a button.
    - "block": the cell itself, until the last step. "Run all" stays in order, and only the interrupt button steers.
    - "auto": "task" in a notebook that a person has open, else "block", as in nbclient, papermill and plain Python.

    However it runs, weights come out the same to the bit, paused or not. The interrupt button, or Ctrl-C, pauses after the
    current step; a second one breaks it off. A cell that runs meanwhile is interrupted as ever.

    A cell that is run again, and makes a loop again, stops the one that it made before. Without cells, a loop gives way to a
    loop of a new function of the same name. A loop that starts or resumes stops a running one that trains with the same
    trainer, or draws in the same view, and both views say so; `loops()` lists those there are. A loop that has ended does
    not keep what it has trained: keep net and trainer to `branch` after that.

    Args:
        steps: a generator function or an iterator that takes one training step for each `next`, or a callable that takes
            one, until it returns False or raises StopIteration. It may yield or return the loss, or numbers by name.
        trainer: the `Trainer` or `torch.optim.Optimizer` in use; None: there are no rates to set and no snapshots.
        recorder: a `Recorder` of it. Its `step` is called with what the steps yield, unless they do so themselves. None: the
            numbers that they yield are kept, and the rate.
        stateful: what else training depends on, for snapshots: objects with `state_dict` and `load_state_dict`, such as a
            model with buffers, a scheduler of torch, a GradScaler. `steps` itself may have them, too. A generator has no
            such thing: after going back to a snapshot it goes on with the batches that come next.
        view: what is redrawn as it goes, and gets the controls: a `View`, such as `Dashboard(recorder)`; "live" is a
            `LossView`, None draws nothing.
        mode: as above.
        frames_per_second: how often the view is redrawn at most, > 0; less often where that would take over 5 % of the time.
        name: of the run, where there is no recorder.
        when_unseen: "go on", or "pause" once no page has shown the view for a minute, as after its tab has been closed. Its
            words say so in either case, when it is seen again. Widgets without a canvas cannot tell.
        checkpoint: a `CheckpointManager` of this trainer. `start` continues from the newest checkpoint in its folder; after
            that steps are saved when its interval is over or a signal has come, and at the end.

    Attributes:
        status: "ready", "running", "paused", "stopped", "finished" or "failed".
        n_steps: how many steps led to where it is.
        run: the `Run` being recorded.
        runs: all of them, a `RunSet`: a branch is a run of its own.
        snapshots: by name.
        exception: what ended it, if "failed".
        view: the `LiveView` that shows it; None: nothing does.
        rate: the `LearningRate`, with its multiplier.
        remark: which loop has taken the place of this one, or has given way to it; empty for none.
        unseen_from: the step after which no page showed the view any more; None while one does.
        clock: what tells the time, in seconds.

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
        checkpoint: CheckpointManager | None = None,
    ) -> None:
        _check_arguments(steps, trainer, recorder, stateful, view, checkpoint)
        budget = FrameBudget(most=number("frames_per_second", frames_per_second, above=0))
        self._mode = choice("mode", mode, MODES)
        self._pauses_unseen = choice("when_unseen", when_unseen, ("go on", "pause")) == "pause"
        self.status, self.n_steps, self.clock = "ready", 0, time.monotonic
        self.exception: BaseException | None = None
        self.remark = ""
        self.unseen_from: int | None = None
        # Who may step: see `at_rest` and what follows it.
        self._changed = threading.Condition(threading.RLock())
        self._guests = 0
        self._stepping: int | None = None  # the thread of the current step
        self._turn = 0  # how often it has been set going; what ran before a pause must not run on after it
        self._limit: int | None = None  # how many steps it takes until the next pause
        self._asked: str | None = None  # a status that is to be taken up after the current step
        self._interrupted = self._is_breakable = self._is_replaced = False
        self._since = (0, 0.0)  # step and time when it began to run
        self.event_loop = running_event_loop()
        self._task: asyncio.Task[None] | None = None
        # What is trained. A notebook keeps whatever it has displayed, so a loop that has ended refers to it weakly only.
        own = [*stateful, *([steps] if _is_stateful(steps) else [])]
        self._model = [each for each in (trainer, checkpoint, *own) if each is not None]
        self._living = list(map(weakly, self._model))
        self._stateful, self._checkpoint = list(map(weakly, own)), weakly(checkpoint)
        self._source, self._iterator = steps, _iterator(steps)
        self._saving: ExitStack | None = None
        self.rate, self.recorder = LearningRate(trainer), recorder
        self.run = Run(name) if recorder is None else recorder.run
        self._scalars = ScalarBuffer()  # where there is no recorder
        self.runs, self.snapshots = RunSet([self.run]), dict[str, Snapshot]()
        self._left_off: dict[str, Snapshot] = {}  # by run, where it was when another one was gone on with
        self.view = None if view is None else LiveView(self, view if isinstance(view, View) else None, budget=budget)
        self._shown_by: str | None = None  # the run of a cell
        self.cell: str | None = request().get("metadata", {}).get("cellId")  # the id of the notebook cell that makes it
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
        num_epoch: int = 1,
        eval_data: Iterable[Any] | None = None,
        eval_metric: Any = None,
        **options: Any,
    ) -> LiveLoop:
        """A loop that trains `net` for some epochs, as `tristep.fit` does; not started yet.

        Its snapshots have the model's buffers and the place in the data in them, as long as `data` depends on nothing but
        the random numbers of torch, NumPy and Python, and a generator of the loader's own.

        Args:
            net: the model, called with the inputs of a batch.
            loss: from outputs and labels to one number for each sample, or to their mean.
            data: batches (inputs, labels), iterated again in every epoch.
            trainer: of the model's parameters.
            num_epoch: >= 1.
            eval_data, eval_metric: as for `tristep.fit`. The last step of an epoch then yields "val_loss" and "val_" with
                the names of the metrics, too; `data` must have a length.
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
        num_epoch, metrics = integer("num_epoch", num_epoch, low=1), checked_metrics(eval_metric)
        if eval_data is None and metrics:
            raise ValueError("eval_metric without eval_data: there is nothing to evaluate on")
        if eval_data is not None:
            check_batches("eval_data", eval_data)
        batches = EpochBatches(data)
        if eval_data is not None and batches.length is None:
            raise TypeError("data has no length, so nobody knows which step ends an epoch: give a DataLoader or a list")
        living_net, living_trainer = weakly(net), weakly(trainer)  # the loop keeps them as long as it needs them

        def steps() -> Iterator[Any]:
            while batches.epoch < num_epoch:
                for batch in batches:
                    _, mean, _, _ = train_on(living_trainer(), living_net(), loss, batch)
                    if eval_data is None or batches.batch != batches.length:
                        yield mean
                    else:
                        found = evaluate(living_net(), loss, eval_data, metrics)
                        yield {"loss": mean} | {f"val_{name}": each for name, each in found.items()}

        stateful = [net, *options.pop("stateful", ()), batches]
        return cls(steps, trainer=trainer, stateful=stateful, **options)

    @property
    def mode(self) -> str:
        """What runs it; "auto" until it has been started."""
        return self._mode

    @mode.setter
    def mode(self, mode: str) -> None:
        self._mode = choice("mode", mode, MODES)

    def start(self) -> LiveLoop:
        """Begin, and show the view where there is a notebook.

        Returns:
            The loop itself.

        Raises:
            RuntimeError: it has been started; or mode="task" where no event loop runs.
            Exception: with mode="block", what a step raised.
        """
        if self.status != "ready":
            raise RuntimeError(f"start() of a loop that is {self.status} already: resume() goes on with a paused one")
        self._go_on(None)
        return self

    def pause(self) -> None:
        """Pause. When this returns the current step has ended; called in a step, it pauses after it."""
        self._take_up("paused")

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
        self._go_on(integer("n", n, low=1))

    def stop(self) -> None:
        """End it. When this returns the current step has ended; a generator has been closed."""
        self._take_up("stopped")

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
        """Wait for the end, while the notebook stays usable. Raises what a step raised. Gives the loop."""
        return self._wait_for_end().__await__()

    @property
    def has_ended(self) -> bool:
        """Whether it has finished, failed or been stopped."""
        return self.status in ("stopped", "finished", "failed")

    @property
    def can_go_on(self) -> bool:
        """Whether there may be steps to come."""
        if self.status == "failed":
            return not (self._is_replaced or (self._is_closed and isinstance(self._source, Iterable)))
        return self.status in ("ready", "paused")

    @property
    def steps_per_second(self) -> float:
        """Since it began to run, or was resumed."""
        step, then = self._since
        return (self.n_steps - step) / max(self.clock() - then, 1e-9) if self.status == "running" else 0.0

    @property
    def learning_rate(self) -> float | None:
        """That of the last step, or before the first the one to come; None without a trainer."""
        return self.rate.last

    def set_learning_rate(self, lr: float) -> None:
        """Set the rate for the coming steps, of the first group where there are several, which keep their proportions.

        Where a schedule decides it, this sets the multiplier that makes it this rate now.

        Args:
            lr: >= 0.

        Raises:
            ValueError: it is negative or no number, or a schedule is at 0, or there is no trainer.
        """
        lr = number("lr", lr, low=0)
        self.rate.needed("set_learning_rate")
        with self.at_rest():
            self.rate.set(lr)

    @property
    def multiplier(self) -> float:
        """What the rate of each step is multiplied by. It may be set at any time; 1 is as if it had never been.

        It acts while a step is taken and leaves neither schedule nor optimizer changed behind.
        """
        return self.rate.multiplier

    @multiplier.setter
    def multiplier(self, value: float) -> None:
        value = number("multiplier", value, low=0)
        self.rate.needed("multiplier")
        self.rate.multiplier = value

    def snapshot(self, name: str | None = None) -> Snapshot:
        """Keep all that training depends on: weights, gradients, the optimizer's state, `stateful`, random numbers.

        It is a copy, on the devices where these are.

        Args:
            name: under which it is kept; None is "step 12", say. One of the same name is replaced.

        Raises:
            ValueError: there is no trainer.
        """
        self.rate.needed("snapshot")
        with self.at_rest():
            name = f"step {self.n_steps}" if name is None else name
            self.snapshots[name] = found = self._take_snapshot(name)
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
            RuntimeError: the loop has ended, and what it trained is gone, or another loop has taken its place.

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
            known = ", ".join(map(repr, self.snapshots)) or "none"
            raise KeyError(f"at={at!r}: there is no snapshot of that name; there are {known}")
        rate = None if learning_rate is None else number("learning_rate", learning_rate, low=0)
        factor = None if multiplier is None else number("multiplier", multiplier, low=0)
        with self.at_rest():
            self._keep_model()
            here = self._take_snapshot(self.run.name)
            snapshot = here if at is None else self.snapshots[at] if isinstance(at, str) else at
            origin = f"{snapshot.run}, step {snapshot.step}"
            old = self.run
            new = Run(name, old.parameters, old.edges, old.notes | {"branched from": origin}, old.storage)
            self._restore(snapshot, new, here)
            self.rate.multiplier = self.rate.multiplier if factor is None else factor
            if rate is not None:
                self.rate.set(rate)
        self._draw()
        return new

    def pick(self, name: str) -> Run:
        """Go on with a run that was left by `branch`, or by this, where it was left.

        Raises:
            KeyError: there is no such run.
            RuntimeError: as for `branch`.
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
        """Take what steps have yielded into the run; of a recorder, or if it must not wait, what has arrived."""
        if self.recorder is not None:
            self.recorder.look()
        elif wait:
            self._scalars.flush(self.run)
        else:
            self._scalars.look(self.run)

    def _ipython_display_(self) -> None:
        """Show the view, unless this cell has shown it already in `start`."""
        if not self._show(again=False):
            raise NotImplementedError  # by which IPython is told to show the words of `repr`

    def _display_(self) -> Any:
        """What marimo shows as the value of a cell."""
        return repr(self) if self.view is None else self.view._display_()

    def __repr__(self) -> str:
        return f"LiveLoop({self.run.name!r}, {self.status}, {self.n_steps} steps, mode={self.mode!r})"

    # Who may step: one thread, in the turn that is on, while nobody has asked for another status and no guest is there.

    @contextmanager
    def at_rest(self) -> Iterator[None]:
        """A context between two steps, which wait meanwhile. In a step itself it changes nothing."""
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
        """Take a step as soon as that may be, if it still may be then, and take up the status to which it leads."""
        with self._changed:
            self._changed.wait_for(lambda: self._guests == 0 and self._stepping is None)
            if not self._is_on(turn):
                return
            steps = self._asked is None
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
                    status = self._asked or status
                if status is not None:
                    self._set_status(status)
                self._changed.notify_all()
            if status is not None:
                self._tell()

    def _take_one(self) -> str | None:
        """Take a step; the status that it leads to, None if it runs on."""
        try:
            try:
                self._is_breakable = True
                with self.rate.applied():
                    value = next(self._iterator)
            finally:
                self._is_breakable = False
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
        """Take up "paused" or "stopped": when this returns the current step has ended; called in a step, after it."""
        if self._stepping == threading.get_ident():
            self._asked = status
            return
        with self.at_rest():
            if not (self.status == "running" or (status == "stopped" and self.status in ("ready", "paused"))):
                return
            self._set_status(status)
        self._tell()

    def _set_status(self, status: str) -> None:
        """Take up a status between two steps. `_tell` is to follow, without the lock."""
        self.status, self._asked, self._limit = status, None, None
        if not self.has_ended:
            return
        if self.recorder is not None:
            self.recorder.flush()
        try:
            self._end_saving()
        except Exception as error:
            self.status, self.exception = "failed", error
        if status == "stopped" and isinstance(self._iterator, Generator):
            self._iterator.close()  # which may have something to clean up
        self._model = []

    def _tell(self) -> None:
        """Show the status."""
        interrupted, self._interrupted = self._interrupted, False
        with self.at_rest():
            self.take_in()
        self._draw()
        if interrupted and self.status == "paused":  # it may have been the last step
            self._say_paused()
        if self.status == "failed" and self.mode == "task" and self.view is None:  # where no one may ever ask
            traceback.print_exception(self.exception)

    def _interrupt(self) -> bool:
        """What a signal does, wherever the main thread is: it must not wait. Whether the step is to be broken off."""
        if self.status != "running":
            return False
        if self._interrupted and self._is_breakable and self._stepping == threading.get_ident():
            return True
        self._asked, self._interrupted = self._asked or "paused", True
        return False

    def _handle(self, *_: object) -> None:
        if self._interrupt():
            raise KeyboardInterrupt

    # The modes: where steps are taken, in slices.

    def _go_on(self, limit: int | None) -> None:
        """Begin, or go on after a pause; for so many steps if there is a limit."""
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
        event_loop = self._own_event_loop() if self.mode == "task" else None
        self._stop_others()
        self._begin_saving(resumes=begins)
        later = begins and self.mode == "block" and not has_front_end()  # a picture for the file: that of the end
        if begins and not later:
            self._show()
        with self._changed:
            if self.status == "running":  # by now; several threads may ask
                return
            self._limit, self.exception, self._asked, self._interrupted, self.unseen_from = limit, None, None, False, None
            self.status, self._turn = "running", self._turn + 1
            self._since = (self.n_steps, self.clock())
            turn = self._turn
        if event_loop is not None and event_loop is running_event_loop():
            self._make_task(turn)
        elif event_loop is not None:
            event_loop.call_soon_threadsafe(self._make_task, turn)
        elif self.mode == "thread":
            atexit.unregister(_pause_threads)  # last in, first out: before recorders end
            atexit.register(_pause_threads)
            # With a copy of the context, or what a step prints finds no cell.
            run = contextvars.copy_context().run
            threading.Thread(target=run, args=(self._run_here, turn), name=f"LiveLoop {self.run.name}", daemon=True).start()
        else:
            self._run_here(turn)
            if later:
                self._show()
            self._raise()

    def _own_event_loop(self) -> asyncio.AbstractEventLoop:
        """The one it was made in runs the task, as long as it runs itself; else the one that runs here."""
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
                with _taking_interrupts():
                    self._run_slice(turn)
                for _ in range(TURNS):
                    if not self._is_on(turn):  # whoever waits for the loop must not find its task at work still
                        return
                    await asyncio.sleep(0)
        except asyncio.CancelledError:  # the event loop ends
            self.pause()
            raise
        finally:
            if gets_signals() and not any(loop.mode == "task" for loop in _loops if loop.status == "running"):
                give_back({signal.SIGINT: signal.SIG_IGN}, _interrupt_tasks)

    def _run_here(self, turn: int, timeout: float | None = None) -> None:
        until = None if timeout is None else self.clock() + timeout
        # A line in a terminal; elsewhere, as in a notebook, none.
        progress = tqdm(
            desc=self.run.name, initial=self.n_steps, unit=" steps", disable=None if self.mode == "block" else True
        )
        with handled(self._handle), progress:
            while self._is_on(turn) and (until is None or self.clock() < until):
                self._run_slice(turn, until)
                losses = self.run.scalars.get("loss")
                if losses is not None and len(losses):
                    progress.set_postfix_str(f"loss {losses.recent()[1][-1]:.4g}", refresh=False)
                progress.update(self.n_steps - progress.n)

    def _run_slice(self, turn: int, until: float | None = None) -> None:
        """Take steps for a moment, as long as this turn is on, or until this time; then let the view follow."""
        end = self.clock() + SLICE
        while self._is_on(turn):
            self._take_step(turn)
            now = self.clock()
            if now >= end or (until is not None and now >= until):
                break
        else:
            return
        if self.recorder is None:
            with self.at_rest():
                self.take_in(wait=False)
        self._draw(turn)
        asked = "stopped" if self._cell_is_gone() else None  # by which nobody has the loop any more
        if self.view is not None and self.view.unseen >= UNSEEN:
            self.unseen_from = self.n_steps if self.unseen_from is None else self.unseen_from
            asked = asked or ("paused" if self._pauses_unseen else None)
        self._asked = self._asked or asked

    async def _wait_for_end(self) -> LiveLoop:
        if self.status == "ready":
            self.start()
        try:
            while not self.has_ended:
                # Again and again: the kernel notes an interrupt, but does not look while its event loop has nothing to do.
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
        if gets_signals():  # where the person is who has interrupted it
            print(f"paused after step {self.n_steps}; loop.resume() goes on")

    def _raise(self) -> None:
        if self.status == "failed" and self.exception is not None:
            raise self.exception

    # Other loops.

    def _replace_earlier(self) -> None:
        """End the loop that an earlier run of this cell has made; without cells, that of the function of this name."""
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
        """End for good."""
        self.remark = "its cell has been run again, and another loop has taken its place"
        self.stop()
        self._is_replaced, self._model = True, []
        self._source = self._iterator = iter(())
        self.snapshots.clear()
        self._left_off.clear()
        if self.exception is not None:
            self.exception.__traceback__ = None  # whose frames have what was trained

    def _stop_others(self) -> None:
        """End running loops that train with this one's trainer, or draw in its view: there is one that steps, the last."""
        mine = {"trainer": self.rate.trainer, "view": None if self.view is None else self.view.of}
        for other in loops():
            its = {"trainer": other.rate.trainer, "view": None if other.view is None else other.view.of}
            shared = next((what for what in mine if mine[what] is not None and mine[what] is its[what]), None)
            if other is not self and other.status == "running" and shared is not None:
                other.remark = f"loop {self.run.name!r} has begun with its {shared}"
                other.stop()
                self.remark = f"loop {other.run.name!r} with the same {shared} was stopped after step {other.n_steps:,}"

    # What is drawn, recorded, saved and gone back to; all but drawing between two steps.

    def _show(self, again: bool = True) -> bool:
        """Show the view where there is a notebook, also where this run of the cell has done so. Whether it is shown."""
        if self.view is None:
            return False
        run = request().get("header", {}).get("msg_id")
        if not again and run is not None and run == self._shown_by:
            return True
        self._shown_by = run
        return show_below_cell(self.view)

    def _draw(self, turn: int | None = None) -> None:
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

    def _note(self, value: Any) -> None:
        """Record what a step has yielded, numbers by name, a loss, or nothing (None, True), and save if it is time."""
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

    def _begin_saving(self, resumes: bool) -> None:
        """Save, and note signals, from now on; before the first step, from where the newest checkpoint leads."""
        manager = self._checkpoint()
        if manager is None or self._saving is not None:
            return
        own = (each() for each in self._stateful)
        with ExitStack() as saving:
            saving.enter_context(saving_with(manager, [each for each in own if each is not manager.net]))
            if resumes:
                self.n_steps = manager.resume().step
            self._saving = saving.pop_all()

    def _end_saving(self) -> None:
        """Save where it stands, unless it has failed, and wait for that."""
        manager, saving, self._saving = self._checkpoint(), self._saving, None
        if manager is None or saving is None:
            return
        with saving:
            if self.status != "failed" and manager.saved_step != manager.trainer.optimizer.num_update:
                manager.save()

    def _keep_model(self) -> None:
        """Keep what is trained, to go on with it.

        Raises:
            RuntimeError: it is gone, or another loop has taken this one's place.
        """
        model = [living() for living in self._living]
        gone = "what this loop has trained is gone. A loop that has ended does not keep it"
        if self._is_replaced or any(each is None for each in model):
            raise RuntimeError(f"there is nothing to go on with: {self.remark if self._is_replaced else gone}")
        self._model = model

    @property
    def _is_closed(self) -> bool:
        """Whether steps come from a generator that has ended."""
        return isinstance(self._iterator, Generator) and inspect.getgeneratorstate(self._iterator) == inspect.GEN_CLOSED

    def _renew(self) -> bool:
        """Make a generator that has ended again, if a function can. Whether there may be steps to come."""
        if self._is_closed and not isinstance(self._source, Iterable):
            self._iterator = _iterator(self._source)
        return not self._is_closed

    def _take_snapshot(self, name: str) -> Snapshot:
        trainer = self.rate.needed("snapshot")
        self.take_in()
        kept = TrainerSnapshot(trainer)
        state = {
            "trainer": kept,
            "gradients": [None if param.grad is None else param.grad.detach().clone() for param in kept.params],
            "stateful": [copy.deepcopy(each().state_dict()) for each in self._stateful],
            "multiplier": self.rate.multiplier,
            "recorded": 0 if self.recorder is None else self.recorder.last_step,
        }
        return Snapshot(name, self.n_steps, self.run.name, state)

    @uninterrupted
    def _restore(self, snapshot: Snapshot, run: Run, left: Snapshot) -> None:
        """Go back to a snapshot, and on in this run. The present one was left here. What has ended is paused then."""
        state = snapshot.state
        for each, own in zip(self._stateful, state["stateful"], strict=True):
            each().load_state_dict(copy.deepcopy(own))
        state["trainer"].restore()  # and last its random numbers, of which the others may have used some
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
    """Loops with what they do in words; in a notebook each has a button that stops it."""

    def __repr__(self) -> str:
        return "\n".join(map(_in_words, self)) or "no loop is running or paused"

    def _ipython_display_(self) -> None:
        if not self or not has_front_end():
            raise NotImplementedError  # by which IPython is told to show the words of `repr`
        import ipywidgets as widgets
        from IPython.display import display

        display(widgets.VBox([_row(widgets, loop) for loop in self]))


def loops() -> Loops:
    """The live loops that are running or paused, in the order in which they were made, whatever still refers to them.

    Example:
        >>> from tristep import viz
        >>> for loop in viz.loops():
        ...     loop.stop()
    """
    found = [loop for loop in _loops if loop.status in ("running", "paused")]
    return Loops(sorted(found, key=lambda loop: loop.number))


def stop_loops(cell: str | None = None) -> None:
    """Stop the loops that this cell has made; None: all."""
    for loop in loops():
        if cell in (None, loop.cell):
            loop.stop()


def _pause_threads() -> None:
    """Pause at the end of the program: a thread that is cut off in a step of torch ends it with an abort."""
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


_interrupts = [0]  # how many have come while tasks take them


def _interrupt_tasks(number: int, frame: Any) -> None:
    """The handler of SIGINT while loops run as tasks: pause them."""
    _interrupts[0] += 1
    broken_off = [loop._interrupt() for loop in list(_loops) if loop.mode == "task"]
    if any(broken_off):
        raise KeyboardInterrupt


@contextmanager
def _taking_interrupts() -> Iterator[None]:
    """Take SIGINT while a slice of a task runs, and after it, too, where nobody else would: a kernel ignores it at rest.

    While a cell runs, the kernel has a handler of its own, and then puts back what was there, SIG_IGN or this one.
    """
    if not gets_signals():
        yield
        return
    count, before = _interrupts[0], signal.signal(signal.SIGINT, _interrupt_tasks)
    try:
        yield
    finally:
        if before is not signal.SIG_IGN and before is not _interrupt_tasks:
            give_back({signal.SIGINT: before}, _interrupt_tasks)
            cell_awaits = callable(before) and before is not signal.default_int_handler and in_notebook()
            if _interrupts[0] != count and cell_awaits:
                signal.raise_signal(signal.SIGINT)  # which the cell is to have as well


def _iterator(steps: Any) -> Iterator[Any]:
    """Training steps, one for each `next`."""
    if isinstance(steps, Iterable):
        return iter(steps)
    return steps() if inspect.isgeneratorfunction(steps) else _called(steps)


def _called(step: Callable[[], Any]) -> Iterator[Any]:
    """What a callable gives, until it is False or StopIteration is raised."""
    try:
        while (value := step()) is not False:
            yield value
    except StopIteration:
        return


def _is_redefined(steps: Any, newer: Any) -> bool:
    """Whether newer steps are a function that has taken the name of this one, as in a cell that is run again."""
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
        if not _is_stateful(each):
            raise TypeError(f"stateful[{i}] is a {type(each).__name__}: it needs state_dict and load_state_dict")
    if not (checkpoint is None or isinstance(checkpoint, CheckpointManager)):
        raise TypeError(f"checkpoint must be a CheckpointManager or None, got {type(checkpoint).__name__}")
    if checkpoint is not None and checkpoint.trainer is not trainer:
        raise ValueError("checkpoint is a CheckpointManager of another trainer than the loop's")
    if not (view is None or view == "live" or isinstance(view, View)):
        raise TypeError(f"view={view!r}: must be 'live', None or a View")
