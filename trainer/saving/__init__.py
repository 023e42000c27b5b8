"""Checkpoints of a whole training: written in the background, in a folder where the newest and the best are kept."""

from .content import resume
from .folder import Checkpoint
from .manager import CheckpointManager

__all__ = ["Checkpoint", "CheckpointManager", "resume"]
