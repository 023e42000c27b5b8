"""Training loops that run while the notebook stays usable."""

from .loop import LiveLoop, Snapshot, loops, stop_loops
from .view import LiveView

__all__ = ["LiveLoop", "LiveView", "Snapshot", "loops", "stop_loops"]
