"""FollowedTraining: what the callbacks of training libraries have in common, a recorder and the view that shows it."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch

from ..viz import Dashboard, Recorder, Run, View
from ..viz.render.notebook import has_front_end, in_notebook

__all__ = ["FollowedTraining"]


class FollowedTraining:
    """Records an optimizer's steps, and shows them in a notebook.

    Args:
        name, every: as for `tristep.viz.Recorder`.
        view: what to show of the recorder: "live", a `Dashboard`; a function or class that makes a `View` of it; or None.

    Raises:
        TypeError: `view` is something else.
    """

    def __init__(self, name: str, every: int, view: Callable[[Recorder], View] | str | None) -> None:
        if not (view is None or view == "live" or callable(view)):
            raise TypeError(f"view={view!r}: must be 'live', None, or a function that makes a View of a Recorder")
        self._name, self._every = name, every
        self._make = Dashboard if isinstance(view, str) else view
        self._shows_at_end = False
        self.recorder: Recorder | None = None
        self.view: View | None = None

    @property
    def run(self) -> Run:
        """What has been recorded so far.

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
        """Record this optimizer of the module from now on, into a new run whose steps begin after `last_step`."""
        self.end()
        self.recorder = Recorder(optimizer, self._name, every=self._every, module=module)
        self.recorder.record_into(self.recorder.run, last_step)
        self.view = self._make(self.recorder) if self._make is not None and shows and in_notebook() else None
        self._shows_at_end = self.view is not None and not has_front_end()  # a picture for the file: that of the end
        if not self._shows_at_end:
            self._show()

    def step(self, **scalars: float | torch.Tensor) -> None:
        """Note the step that was taken, and let the view follow."""
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
        """Leave the optimizer as it was, and show all that was recorded."""
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
