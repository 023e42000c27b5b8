"""Checkpoints of a whole training: written in the background, in a folder where the newest and the best are kept."""

from .folder import Checkpoint
from .manager import CheckpointManager
from .resume import resume

__all__ = ["Checkpoint", "CheckpointManager", "resume"]
