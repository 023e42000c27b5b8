"""Scenes as matplotlib figures."""

from .picture import Picture, draw

__all__ = ["Picture", "draw"]
