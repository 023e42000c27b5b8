"""Record training runs as plain arrays of bounded size."""

from .diagnosis import diagnose
from .recorder import Recorder
from .runs import Run, RunSet
from .series import Curve, Series

__all__ = ["Curve", "Recorder", "Run", "RunSet", "Series", "diagnose"]
