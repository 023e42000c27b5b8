"""FrameBudget: limits how often, and for what share of the time, a view is redrawn."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ...trainer.validation import number

__all__ = ["FrameBudget"]


class FrameBudget:
    """A limit on drawing: at most `most` frames per second, taking at most the fraction `share` of the time.

    Args:
        share: the largest fraction of the time that drawing may take, in (0, 1).
        most: the largest number of frames per second, > 0.
        clock: returns the current time in seconds.

    Raises:
        ValueError: `share` or `most` is out of its range.

    Example:
        >>> now = 0.0
        >>> budget = FrameBudget(share=0.05, clock=lambda: now)
        >>> with budget.frame():
        ...     now += 0.02  # drawing
        >>> round(budget.wait(), 6)  # 0.02 s are a twentieth of 0.4 s
        0.38
    """

    def __init__(self, share: float = 0.05, most: float = 10.0, clock: Callable[[], float] = time.perf_counter) -> None:
        self.share, self.most = number("share", share, above=0, below=1), number("most", most, above=0)
        self.clock = clock
        self._next = float("-inf")
        self._frames: deque[tuple[float, float]] = deque(maxlen=32)  # (start, duration) of each frame, in seconds

    def due(self) -> bool:
        """Return whether a frame may be drawn now."""
        return self.clock() >= self._next

    def wait(self) -> float:
        """Return the seconds until the next frame may be drawn; 0.0 if it may be drawn now."""
        return max(self._next - self.clock(), 0.0)

    @contextmanager
    def frame(self) -> Iterator[None]:
        """Return a context manager that times the frame drawn inside it, and sets when the next one is due."""
        begun = self.clock()
        try:
            yield
        finally:
            ended = self.clock()
            self._frames.append((begun, ended - begun))
            self._next = max(begun + 1 / self.most, begun + (ended - begun) / self.share)

    @property
    def cost(self) -> float:
        """The fraction of the time spent drawing, from 0 to 1, since the first of the last 32 frames began."""
        frames = tuple(self._frames)  # another thread may add one
        if not frames:
            return 0.0
        spent, passed = sum(took for _, took in frames), self.clock() - frames[0][0]
        return min(spent / passed, 1.0) if passed > 0 else 0.0
