"""Pictures of a training run: functions of plain data that return a matplotlib figure.

Imports ``tristep.trainer`` and ``tristep.kernels``; nothing imports it. It needs the ``notebook`` extra, and so it is
loaded on first use only.
"""

if not __name__.startswith("tristep."):
    raise ImportError(f"this folder is 'tristep.viz'; import it by that name (imported as {__name__!r})")

try:
    import matplotlib as mpl  # noqa: F401  # asked for here, so that the error can say where it comes from
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "tristep.viz draws with matplotlib, which is missing: pip install 'tristep[notebook]'", name=error.name
    ) from error

from .curves import plot_schedules, plot_training
from .recorder import Recorder
from .runs import Curve, Run, RunSet, Series
from .style import Figure

__all__ = ["Curve", "Figure", "Recorder", "Run", "RunSet", "Series", "plot_schedules", "plot_training"]
