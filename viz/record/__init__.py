"""Training runs, recorded as plain arrays of bounded size."""

from .blocks import Curve
from .diagnosis import diagnose
from .imports import read_run
from .recorder import Recorder
from .runs import Run, RunSet
from .series import Series

__all__ = ["Curve", "Recorder", "Run", "RunSet", "Series", "diagnose", "read_run"]
