"""The widget that shows pictures of scenes: frames, sliders, axes that stay, and messages to and from the front end."""

import threading

import ipywidgets
import pytest
from curve_views import PACE, RATE, STEP, scene_of

from tristep.viz.render.ipywidgets import SceneBox
from tristep.viz.render.matplotlib import Picture
from tristep.viz.scene import Button, Click

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
