"""Learning-rate schedules as functions of the update count: MXNet 1.9.1's, with its names and numbers, and others.

MXNet's schedulers change as they are called. These are pure functions: the result depends only on the arguments, on
``base_lr`` (and when it was set) and on the update count. For a run that starts at update 0 it equals MXNet's result. So a
schedule accepts an array of update counts (to draw a curve, say), and is restored from its arguments alone.

An optimizer calls its schedule with the count that includes the update it is about to make, so the first update has the
learning rate of count 1. `from_torch` and `to_torch` follow this: torch's epoch 0 is our update 1.
"""

from .base import LRScheduler, create, from_config, register
from .compose import FunctionScheduler, SequenceScheduler, sequence
from .modern import (
    CosineRestartsScheduler,
    CyclicScheduler,
    ExponentialScheduler,
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
