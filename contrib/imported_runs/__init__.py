"""Runs that other tools have recorded, as runs of ours: TensorBoard, CSV, JSON."""

from .read import read_run

__all__ = ["read_run"]
