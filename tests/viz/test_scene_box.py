"""The widget that shows pictures of scenes: frames, sliders, axes that stay, and messages to and from the front end."""

import threading

import ipywidgets
import numpy as np
import pytest
from curve_views import PACE, RATE, STEP, scene_of
from matplotlib.backends.backend_agg import FigureCanvasAgg

from tristep.viz.render.ipywidgets import SceneBox
from tristep.viz.render.matplotlib import Picture
from tristep.viz.scene import Axis, Button, Click, Heatmap, Line, Panel, Scene

pytestmark = pytest.mark.usefixtures("chosen_renderer")


def test_one_control_is_a_stack_of_frames_that_the_browser_chooses_from():
    scene = scene_of(controls=[RATE])
    box = SceneBox(scene)
    stack, slider = box.children
    assert isinstance(stack, ipywidgets.Stack)
    assert stack.selected_index == slider.index == 1
    for index, frame in enumerate(stack.children):
        assert frame.value == Picture(scene, {"rate": index}).png()
    (link,) = box.links
    assert (link.source, link.target) == ((slider, "index"), (stack, "selected_index"))
    assert [label for label, _ in slider.options] == ["0.1", "0.2", "0.3"]
    assert (slider.description, slider.tooltip) == ("learning rate", "learning rate")


def test_several_controls_are_answered_by_one_picture(monkeypatch):
    scene = scene_of(controls=[RATE, STEP])
    box = SceneBox(scene, theme="dark")
    picture, slider, row = box.children
    play, steps = row.children
    assert isinstance(picture, ipywidgets.Image)
    assert (play.max, play.interval) == (3, 500)
    assert box.links[0].source == (play, "value")
    slider.index, steps.index = 2, 3
    assert picture.value == Picture(scene, {"rate": 2, "step": 3}, "dark").png()
    # Another scene's picture and its words are sent in one message.
    sent = []
    monkeypatch.setattr(type(picture), "_send", lambda widget, message, buffers=None: sent.append((message, buffers)))
    box.show(scene_of(0.5, controls=[RATE, STEP]))
    ((message, buffers),) = sent
    assert (message["state"], message["buffer_paths"]) == ({"tooltip": "It rises to 0.5."}, [["value"]])
    assert bytes(buffers[0]).startswith(b"\x89PNG")


def test_another_scene_keeps_what_is_set():
    box = SceneBox(scene_of(controls=[RATE]))
    slider = box.children[1]
    slider.index = 2
    box.show(scene_of(0.5, controls=[RATE]))
    assert box.children[1] is slider
    assert box.children[0].tooltip == "It rises to 0.5."
    assert box.children[0].value == Picture(scene_of(0.5, controls=[RATE]), {"rate": 2}).png()
    more = scene_of(0.5, controls=[RATE, STEP])
    box.show(more)
    assert slider.comm is None
    assert box.children[1].index == 2
    box.children[1].index = 0
    assert box.children[0].value == Picture(more, {"rate": 0}).png()


def _after(steps, low=1.0, limits=(1.0, 10.0)):
    """A training so far: a line that gets longer, and an image of it."""
    line = Line(np.arange(1, steps + 1), np.geomspace(10.0, low, steps))
    image = Heatmap(np.linspace(limits[0], limits[1], 4)[None], [0.5, steps + 0.5], [0, 1], limits=limits, label="norm")
    return Scene(
        [
            Panel(Axis.over("step", [1, steps], margin=0.01), Axis("loss", low, 10.0, "log"), [line]),
            Panel(Axis("step", 0.5, steps + 0.5), Axis("", 0, 1), [image], row=1),
        ]
    )


def _ends(box):
    panels = box.picture.figure.axes[:2]
    return [np.round([*each.get_xlim(), *each.get_ylim()], 4).tolist() for each in panels]


def test_axes_of_a_training_are_as_they_were_until_it_leaves_them(monkeypatch):
    box = SceneBox(_after(100))
    assert _ends(box) == [[0.01, 100.99, 1, 10], [0.5, 100.5, 0, 1]]
    box.show(_after(110), live=True)  # beyond its axes, which get 15 % more
    first, second = _ends(box)
    assert first == [0.01, pytest.approx(111.09 + 0.15 * 111.18), 1, 10]
    assert second == [0.5, pytest.approx(110.5 + 0.15 * 110), 0, 1]
    box.show(_after(125, limits=(1.1, 10.2)), live=True)
    drawn, full = [], FigureCanvasAgg.draw
    monkeypatch.setattr(FigureCanvasAgg, "draw", lambda canvas: (drawn.append(canvas), full(canvas)))
    box.show(_after(126, limits=(1.1, 10.2)), live=True)
    assert _ends(box) == [first, second]
    assert not drawn  # pixels of what has not changed are kept
    assert box.picture.scene.panels[1].layers[0].limits == (1.0, 10.0)  # nearly the colours that it had
    line = box.picture.figure.axes[0].lines[0]
    assert len(line.get_xdata()) == 126
    box.show(_after(126, low=0.5, limits=(1.0, 20.0)), live=True)
    assert _ends(box)[0][2:] == pytest.approx([0.5 * 20.0 ** -(np.log10(20) - 1), 10.0], rel=1e-3)
    assert box.picture.scene.panels[1].layers[0].limits == (1.0, 20.0)
    box.show(_after(1000, low=0.5), live=True)  # long after: half of the axis at most
    assert _ends(box)[1][:2] == [0.5, 1500.5]
    box.show(_after(20), live=True)  # another training
    assert _ends(box) == [[0.81, 20.19, 1, 10], [0.5, 20.5, 0, 1]]
    box.show(_after(21))  # a person's doing
    assert _ends(box) == [[0.8, 21.2, 1, 10], [0.5, 21.5, 0, 1]]


def test_a_box_tells_what_python_is_to_know():
    told = []
    scene = scene_of(controls=[PACE], buttons=[Button("go", "Go on")], click=Click(event="start"))
    box = SceneBox(scene, told.append)
    picture, pace, buttons, place = box.children
    assert isinstance(picture, ipywidgets.Image)
    assert picture.tooltip == "It rises to 1.0."
    assert picture.get_state()["description"] == ""  # without one the browser shows an error in the picture's place
    pace.index = 1
    buttons.children[0].click()
    x, y, choose = place.children
    assert [x.description, y.description, buttons.children[0].description] == ["step", "loss", "Go on"]
    x.value, y.value = 3.0, 0.5
    choose.click()
    assert told == [
        {"kind": "control", "name": "pace", "index": 1},
        {"kind": "button", "name": "go"},
        {"kind": "click", "name": "start", "x": 3.0, "y": 0.5},
    ]


def test_of_what_is_wanted_while_a_picture_is_drawn_the_last_is_drawn(monkeypatch):
    scene = scene_of(controls=[RATE, STEP])
    box = SceneBox(scene)
    drawn, busy, go = [], threading.Event(), threading.Event()
    full = Picture.png

    def slow(picture):
        drawn.append(dict(picture.state))
        busy.set()
        assert go.wait(60)
        return full(picture)

    monkeypatch.setattr(Picture, "png", slow)
    picture, slider, row = box.children
    _, steps = row.children
    thread = threading.Thread(target=setattr, args=(slider, "index", 0))
    thread.start()
    assert busy.wait(60)
    for index in (1, 2, 3):
        steps.index = index
    go.set()
    thread.join()
    assert drawn == [{"rate": 0, "step": 0}, {"rate": 0, "step": 3}]
    assert picture.value == full(Picture(scene, {"rate": 0, "step": 3}))
