"""What is typed into a Playground, and what buttons and fields are like in core widgets."""

from functools import partial

import numpy as np
import pytest
import torch
from torch_paths import torch_path

from tristep.viz import Button, Control, Listing, Playground, Scene, search_ranges
from tristep.viz.render.ipywidgets import SceneBox
from tristep.viz.scene import Axis, Line, Panel

PANEL = Panel(Axis("x", 0, 1), Axis("y", 0, 1), [Line([0, 1], [0, 1])])


@pytest.fixture
def playground():
    return Playground("beale", "adam", against=(), steps=20, settings={"learning_rate": 0.1})


def _shown(view, name):
    control = next(control for control in view.scene().controls if control.name == name)
    return control.values[control.index]


def test_typed_numbers_and_functions_are_run(playground):
    for name, text in (
        ("expression", "x**2 + 3 * y**2"),
        ("start x", "1.25"),
        ("start y", "−0.5"),  # as a picture writes it
        ("setting beta1", "0.93"),
        ("setting learning_rate", "0.0123"),
    ):
        playground.on_entry(name, text)
        assert playground.scene().message == ""

    adam = partial(torch.optim.Adam, lr=0.0123, betas=(0.93, 0.999))
    expected = torch_path(adam, lambda point: point[0] ** 2 + 3 * point[1] ** 2, (1.25, -0.5), 20)
    np.testing.assert_allclose(playground.trajectories.paths[0, 0, 0], expected, rtol=1e-4, atol=1e-6)
    assert _shown(playground, "setting beta1") == 0.93  # which is none of the slider's own values
    assert 0.93 not in next(each.values for each in search_ranges("adam") if each.name == "beta1")
    assert _shown(playground, "expression") == "x**2 + 3 * y**2"
    assert (_shown(playground, "start x"), _shown(playground, "start y")) == ("1.25", "-0.5")
    assert _shown(playground, "function") == "x**2 + 3 * y**2"


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("expression", "x + open('file')", "there is no function 'open'"),
        ("expression", "log(x - 5)", "is nan: start where the function has a finite value"),
        ("start y", "here", "start y='here': must be a finite number"),
        ("start x", "inf", "must be a finite number"),
        ("setting beta1", "2", "beta1=2.0: must be finite"),
        ("setting momentum", "0.9", "adam has no momentum"),
    ],
)
def test_what_cannot_be_used_is_said_and_changes_nothing(playground, name, text, why):
    paths, settings = playground.trajectories.paths.copy(), dict(playground.settings)
    playground.on_entry(name, text)
    scene = playground.scene()
    assert why in scene.message
    assert (playground.trajectories.paths == paths).all()
    assert playground.settings == settings
    if not name.startswith("setting"):
        assert _shown(playground, name) == text  # to be corrected
    playground.on_entry("start x", "1.5")
    assert playground.scene().message == ""


def test_fields_listings_and_buttons_in_core_widgets(chosen_renderer):
    events = []
    field = Control("f", "f(x, y) =", ["x**2"], kind="text", remote=True)
    beta = Control("beta", "beta1", [0.5, 0.9, 0.99], 1, remote=True, typed=True)
    scene = Scene(
        [PANEL],
        controls=[field, beta],
        buttons=[Button("go", "Go", enabled=False)],
        listings=[Listing("code", "a = 1\nb = 2")],
        message="a < b",
    )
    box = SceneBox(scene, events.append)
    _, typed, row, buttons, listing, message = box.children
    slider, number = row.children
    assert (typed.value, number.value, buttons.children[0].disabled) == ("x**2", "0.9", True)
    assert (listing.selected_index, listing.get_title(0), listing.children[0].value) == (None, "code", "a = 1\nb = 2")
    assert "a &lt; b" in message.value
    number.value, typed.value = "0.93", "y"
    assert events == [{"kind": "entry", "name": "beta", "text": "0.93"}, {"kind": "entry", "name": "f", "text": "y"}]
    # What may change does so in the same widgets, and tells nobody.
    box.show(Scene([PANEL], controls=[field, beta], buttons=[Button("go", "Go")], listings=scene.listings, message="done"))
    assert (typed.value, number.value, buttons.children[0].disabled) == ("x**2", "0.9", False)
    assert box.children[2].children[0] is slider
    assert "done" in message.value
    assert len(events) == 2
