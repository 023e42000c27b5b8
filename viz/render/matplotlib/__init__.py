"""Scenes as matplotlib figures."""

from .figure import Figure
from .picture import Picture, draw

__all__ = ["Figure", "Picture", "draw"]
