"""Dion2 and NorDion2 with torch's interface."""

from ...trainer.optim import as_torch
from . import Dion2 as _Dion2
from . import NorDion2 as _NorDion2

__all__ = ["Dion2", "NorDion2"]

Dion2 = as_torch(_Dion2)
NorDion2 = as_torch(_NorDion2)
