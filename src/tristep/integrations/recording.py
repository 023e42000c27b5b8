"""FollowedTraining: the recorder and the view that the callbacks for training libraries share."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch

from ..trainer.validation import instance
from ..viz import Dashboard, Recorder, Run, View
from ..viz.render.notebook import has_front_end, in_notebook

__all__ = ["FollowedTraining"]


class FollowedTraining:
    """Records an optimizer's steps, and shows them in a notebook.

    Args:
        name: the name of the run.
        every: record the parameters at the first step and then at every k-th.
        view: the view in a notebook: "live" for a `Dashboard`, a function or class that makes a `View` of a `Recorder`, or
            None.

    Attributes:
        recorder: the recorder; None before training has begun.
        view: the view in the notebook, or None.

    Raises:
        TypeError: `view` is something else.
    """

    def __init__(self, name: str, every: int, view: Callable[[Recorder], View] | str | None) -> None:
        if view != "live":
            instance("view", view, (Callable, type(None)), "'live', None, or a function of a Recorder", shown=True)
        self._name, self._every = name, every
        self._make = Dashboard if isinstance(view, str) else view
        self._shows_at_end = False
        self.recorder: Recorder | None = None
        self.view: View | None = None

    @property
    def run(self) -> Run:
        """The recorded run.

        Raises:
            RuntimeError: training has not begun.
        """
        if self.recorder is None:
            raise RuntimeError("nothing has been recorded: training has not begun")
        return self.recorder.run

    def begin(
        self,
        optimizer: torch.optim.Optimizer,
        module: torch.nn.Module,
        last_step: int,
        shows: bool,
    ) -> None:
        """Begin to record an optimizer of a module, into a new run.

        Args:
            optimizer: the optimizer.
            module: the model.
            last_step: the number of the last step before this training, 0 for a new one.
            shows: whether this process may show a view.
        """
        self.end()
        self.recorder = Recorder(optimizer, self._name, every=self._every, module=module)
        self.recorder.record_into(self.recorder.run, last_step)
        self.view = self._make(self.recorder) if self._make is not None and shows and in_notebook() else None
        self._shows_at_end = self.view is not None and not has_front_end()  # a notebook run into a file gets one picture
        if not self._shows_at_end:
            self._show()

    def step(self, **scalars: float | torch.Tensor) -> None:
        """Record the step just taken, with these numbers by name, and refresh the view."""
        assert self.recorder is not None
        self.recorder.step(**scalars)
        if self.view is None or self._shows_at_end:
            return
        try:
            self.view.refresh()
        except Exception as error:  # a picture must not end hours of training
            self.view = None
            warnings.warn(f"the view cannot be drawn ({error!r}); training goes on without it", RuntimeWarning, stacklevel=2)

    def end(self) -> None:
        """Stop recording, and let the view show the whole run."""
        if self.recorder is None:
            return
        self.recorder.close()
        if self._shows_at_end:
            self._shows_at_end = False
            self._show()
        elif self.view is not None:
            self.view.catch_up()

    def _show(self) -> None:
        if self.view is not None:
            from IPython.display import display

            display(self.view)
