"""Scenes describe pictures as plain data, which renderers draw."""

from .controls import Axis, Button, Click, Control, Listing, Note, RunTable
from .layers import Arrows, Band, Heatmap, Layer, Line, Points, RefLine, State, Text
from .scene import Panel, Scene
from .surface import level_lines, surface_layers

__all__ = [
    "Arrows",
    "Axis",
    "Band",
    "Button",
    "Click",
    "Control",
    "Heatmap",
    "Layer",
    "Line",
    "Listing",
    "Note",
    "Panel",
    "Points",
    "RefLine",
    "RunTable",
    "Scene",
    "State",
    "Text",
    "level_lines",
    "surface_layers",
]
