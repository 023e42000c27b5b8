"""Training loops that run while the notebook stays usable."""

from .branches import Snapshot
from .control import loops, stop_loops
from .loop import LiveLoop
from .view import LiveView

__all__ = ["LiveLoop", "LiveView", "Snapshot", "loops", "stop_loops"]
