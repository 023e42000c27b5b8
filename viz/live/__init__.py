"""Training loops that run while the notebook stays usable."""

from .branches import Snapshot
from .loop import LiveLoop, stop_loops
from .view import LiveView

__all__ = ["LiveLoop", "LiveView", "Snapshot", "stop_loops"]
