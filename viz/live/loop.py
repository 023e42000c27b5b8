"""LiveLoop: a training loop that runs while the notebook stays usable, and can be paused, steered and branched."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any

import torch

from ...trainer import CheckpointManager, Trainer
from ...trainer.validation import choice, integer, number
from ..record import Recorder, Run
from ..render.notebook import request
from ..views import FrameBudget, View
from .branches import Branches, Snapshot
from .control import LoopControl
from .epochs import Epochs
from .executor import SliceExecutor
from .learning_rates import LearningRate
from .recording import StepRecording
from .runner import StepRunner
from .saving import StepSaving
from .screen import Screen
from .steps import StepSource, is_stateful
from .view import LiveView

__all__ = ["MODES", "LiveLoop"]

MODES = ("auto", "task", "thread", "block")


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
        view: what is redrawn as it goes: a `View`, which has its own `FrameBudget`; "live" makes a `LiveView`, None draws
            nothing.
        mode: as above.
        frames_per_second: how often a "live" view is redrawn at most, > 0; less often where that would take over 5 % of the
            time.
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
        mode = choice("mode", mode, MODES)
        pauses_unseen = choice("when_unseen", when_unseen, ("go on", "pause")) == "pause"
        self.cell: str | None = request().get("metadata", {}).get("cellId")  # the id of the notebook cell that makes it
        self.rate = LearningRate(trainer)
        self.recording = StepRecording(recorder, name)
        source = StepSource(steps)
        own = [*stateful, *([steps] if is_stateful(steps) else [])]
        self.saving = StepSaving(checkpoint, own)
        self.runner = StepRunner(self, source, self.rate, self.recording, self.saving)
        self.executor = SliceExecutor(self.runner, mode, self.run.name)
        self.branches = Branches(self.runner, self.rate, self.recording, own)
        self.runs, self.snapshots, self.recorder = self.branches.runs, self.branches.snapshots, recorder
        self.screen = Screen(self.runner, pauses_unseen)
        self.control = LoopControl(self, source, [each for each in (trainer, checkpoint, *own) if each is not None])
        self.view = LiveView(self, budget=budget) if isinstance(view, str) else view
        self.control.take_place()

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
        steps = Epochs(net, loss, data, trainer, integer("num_epoch", num_epoch, low=1), eval_data, eval_metric)
        stateful = [net, *options.pop("stateful", ())]
        return cls(steps, trainer=trainer, stateful=stateful, **options)

    @property
    def status(self) -> str:
        """As in the attributes above."""
        return self.runner.status

    @property
    def mode(self) -> str:
        """What runs it; "auto" until it has been started."""
        return self.executor.mode

    @mode.setter
    def mode(self, mode: str) -> None:
        self.executor.mode = choice("mode", mode, MODES)

    @property
    def n_steps(self) -> int:
        """How many steps led to where it is."""
        return self.runner.n_steps

    @property
    def exception(self) -> BaseException | None:
        """What ended it, if "failed"."""
        return self.runner.exception

    @property
    def run(self) -> Run:
        """The `Run` being recorded."""
        return self.recording.run

    @property
    def view(self) -> View | None:
        """What is redrawn as it goes."""
        return self.screen.view

    @view.setter
    def view(self, view: View | None) -> None:
        self.screen.view = view

    def start(self) -> LiveLoop:
        """Begin, and show the view where there is a notebook.

        Returns:
            The loop itself.

        Raises:
            RuntimeError: it has been started; or mode="task" where no event loop runs.
            Exception: with mode="block", what a step raised.
        """
        self.control.start()
        return self

    def pause(self) -> None:
        """Pause. When this returns the current step has ended; called in a step, it pauses after it."""
        self.runner.ask("paused")

    def resume(self) -> None:
        """Go on after a pause.

        Raises:
            RuntimeError: there is nothing to go on with.
        """
        self.control.go_on(None)

    def step(self, n: int = 1) -> None:
        """Take some steps and pause again.

        Args:
            n: how many, >= 1.
        """
        self.control.go_on(integer("n", n, low=1))

    def stop(self) -> None:
        """End it. When this returns the current step has ended; a generator has been closed."""
        self.runner.ask("stopped")

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
        return self.control.wait(timeout)

    def __await__(self) -> Generator[Any, None, LiveLoop]:
        """Wait for the end, while the notebook stays usable. Raises what a step raised. Gives the loop."""
        return self.control.wait_for_end().__await__()

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
        with self.runner.gate.at_rest():
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
        with self.runner.gate.at_rest():
            return self.branches.keep(name)

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
        name, snapshot = self.branches.new_name(name), self.branches.find(at)
        if learning_rate is not None:
            number("learning_rate", learning_rate, low=0)
        if multiplier is not None:
            number("multiplier", multiplier, low=0)
        with self.runner.gate.at_rest():
            self.control.keep()
            run = self.branches.begin(name, snapshot)
            self.control.reopen()
            if multiplier is not None:
                self.rate.multiplier = float(multiplier)
            if learning_rate is not None:
                self.rate.set(float(learning_rate))
        self.screen.refresh()
        return run

    def pick(self, name: str) -> Run:
        """Go on with a run that was left by `branch`, or by this, where it was left.

        Raises:
            KeyError: there is no such run.
            RuntimeError: as for `branch`.
        """
        run = self.runs[name]
        if run is not self.run:
            with self.runner.gate.at_rest():
                self.control.keep()
                self.branches.pick(run)
                self.control.reopen()
            self.screen.refresh()
        return run

    @property
    def steps_per_second(self) -> float:
        """Since it began to run, or was resumed."""
        return self.runner.steps_per_second

    def _ipython_display_(self) -> None:
        """Show the view, unless this cell has shown it already in `start`."""
        if not self.screen.show(again=False):
            raise NotImplementedError  # by which IPython is told to show the words of `repr`

    def _display_(self) -> Any:
        """What marimo shows as the value of a cell."""
        return repr(self) if self.view is None else self.view._display_()

    def __repr__(self) -> str:
        return f"LiveLoop({self.run.name!r}, {self.status}, {self.n_steps} steps, mode={self.mode!r})"


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
        if not is_stateful(each):
            raise TypeError(f"stateful[{i}] is a {type(each).__name__}: it needs state_dict and load_state_dict")
    if not (checkpoint is None or isinstance(checkpoint, CheckpointManager)):
        raise TypeError(f"checkpoint must be a CheckpointManager or None, got {type(checkpoint).__name__}")
    if checkpoint is not None and checkpoint.trainer is not trainer:
        raise ValueError("checkpoint is a CheckpointManager of another trainer than the loop's")
    if not (view is None or view == "live" or isinstance(view, View)):
        raise TypeError(f"view={view!r}: must be 'live', None or a View")
