"""Screen: what a loop shows while it runs."""

from __future__ import annotations

import warnings

from ..render.notebook import request, show_below_cell
from ..views import View
from .runner import StepRunner

__all__ = ["Screen"]

UNSEEN = 60.0  # seconds without a page that shows the view, after which that is told


class Screen:
    """Redraws the view of a loop as it goes.

    Args:
        runner: that of the loop.
        pauses_unseen: whether the loop is paused once no page has shown the view for a minute.

    Attributes:
        view: what is redrawn; None: nothing.
        unseen_from: the step after which no page showed the view any more; None while one does.
    """

    def __init__(self, runner: StepRunner, pauses_unseen: bool) -> None:
        self.view: View | None = None
        self.unseen_from: int | None = None
        self._runner, self._pauses_unseen = runner, pauses_unseen
        self._shown_by: str | None = None  # the run of a cell

    def show(self, again: bool = True) -> bool:
        """Show the view, where there is a notebook.

        Args:
            again: also where the run of this cell has shown it before.

        Returns:
            Whether it is shown.
        """
        if self.view is None:
            return False
        run = request().get("header", {}).get("msg_id")
        if not again and run is not None and run == self._shown_by:
            return True
        self._shown_by = run
        return show_below_cell(self.view)

    def refresh(self, turn: int | None = None) -> None:
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
                if self._runner.is_on(turn):
                    view.refresh()
        except Exception as error:  # a picture must not end hours of training
            self.view = None
            warnings.warn(f"the view cannot be drawn ({error!r}); training goes on without it", RuntimeWarning, stacklevel=2)

    def look_around(self) -> None:
        """Whether a page still shows the view."""
        if self.view is None or self.view.unseen < UNSEEN:
            return
        if self.unseen_from is None:
            self.unseen_from = self._runner.n_steps
        if self._pauses_unseen:
            self._runner.ask_later("paused")
