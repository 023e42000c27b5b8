"""A view of one line and its controls, for tests."""

import numpy as np

from tristep.viz.scene import Axis, Control, Line, Panel, Scene
from tristep.viz.views import View

RATE = Control("rate", "learning rate", [0.1, 0.2, 0.3], index=1)
STEP = Control("step", "step", [0, 1, 2, 3], kind="play", seconds=2.0)
PACE = Control("pace", "pace", ["slow", "fast"], kind="choice", remote=True)


class Curve(View):
    """A line that can be changed, with these controls."""

    def __init__(self, controls=(), **settings):
        self.height, self.controls, self.happened, self.n_scenes = 1.0, controls, [], 0
        super().__init__(**settings)

    def scene(self):
        self.n_scenes += 1
        return scene_of(self.height, self.controls)

    def on_control(self, name, value, index):
        self.happened.append((name, value, index))
        self.height = 0.5
        self.refresh()

    def on_button(self, name):
        self.happened.append(name)

    def on_click(self, event, x, y):
        self.happened.append((event, x, y))

    def on_drag(self, event, number, x, y):
        self.happened.append((event, number, x, y))


def scene_of(height=1.0, controls=(), **settings):
    local = tuple(control for control in controls if not control.remote)
    shape = tuple(len(control.values) for control in local)
    y = height * np.linspace(0, 1, int(np.prod(shape)))[:, None] * np.linspace(0, 1, 9)
    line = Line(np.arange(9), y.reshape(*shape, 9), by=[control.name for control in local])
    said = f"It rises to {height}."
    panel = Panel(Axis("step", 0, 8), Axis("loss", 0, 1), [line], click=settings.pop("click", None))
    return Scene([panel], controls=controls, width=3, height=2, description=said, **settings)
