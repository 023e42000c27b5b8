"""Small scenes for tests in a browser, and the colours of their pixels."""

from tristep.viz.scene import Axis, Control, Line, Panel, Scene
from tristep.viz.style import THEMES

LEFT, RIGHT, UP, DOWN, ENTER, ESCAPE = "\ue012", "\ue014", "\ue013", "\ue015", "\ue007", "\ue00c"
LIGHT = THEMES["light"]


def one(*layers, x=None, y=None, controls=(), buttons=(), width=5.0, height=4.0, **panel):
    """A scene of one panel."""
    panels = [Panel(x or Axis("x", 0, 10), y or Axis("y", 0, 10), layers, **panel)]
    return Scene(panels, controls=controls, buttons=buttons, width=width, height=height)


def swept(kind="slider", **control):
    """A line that lies as high as the control says."""
    rate = Control("rate", "learning rate", [1, 2, 4, 8], 1, kind=kind, **control)
    return one(Line([0, 10], [[v, v] for v in rate.values], by=("rate",), style=0, width=3, name="loss"), controls=[rate])


def pixel_at(pixels, place):
    return pixels[int(place[1]), int(place[0])]


def colour_at(pixels, place):
    return "#" + "".join(f"{value:02x}" for value in pixel_at(pixels, place))
