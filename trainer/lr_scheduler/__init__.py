"""Learning-rate schedules, functions of the update count: MXNet 1.9.1's, by name and number, and others.

MXNet's schedulers change as they are called. These are pure functions: the result depends on the arguments, on ``base_lr``
(and when it was set) and on the update count, and equals that of MXNet for a run that asks from update 0 onwards. So an
array of update counts may be asked at once (to draw a schedule, say), and a scheduler is restored from its arguments alone.

An optimizer asks for the update count including the update that it is about to make, so its first update has the learning
rate of count 1. `from_torch` and `to_torch` keep to that: torch's epoch 0 is our update 1.
"""

from .base import LRScheduler, create, from_config, register
from .compose import FunctionScheduler, SequenceScheduler, sequence
from .modern import (
    CosineRestartsScheduler,
    CyclicScheduler,
    ExponentialScheduler,
    InterpolatedScheduler,
    InverseSquareRootScheduler,
    OneCycleScheduler,
    PiecewiseScheduler,
    WarmupStableDecayScheduler,
)
from .mxnet import CosineScheduler, FactorScheduler, MultiFactorScheduler, PolyScheduler
from .torch_bridge import TorchScheduler, from_torch, to_torch

__all__ = [
    "CosineRestartsScheduler",
    "CosineScheduler",
    "CyclicScheduler",
    "ExponentialScheduler",
    "FactorScheduler",
    "FunctionScheduler",
    "InterpolatedScheduler",
    "InverseSquareRootScheduler",
    "LRScheduler",
    "MultiFactorScheduler",
    "OneCycleScheduler",
    "PiecewiseScheduler",
    "PolyScheduler",
    "SequenceScheduler",
    "TorchScheduler",
    "WarmupStableDecayScheduler",
    "create",
    "from_config",
    "from_torch",
    "register",
    "sequence",
    "to_torch",
]
