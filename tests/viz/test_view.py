"""Views: their figures and states, events, redraws within a budget, closing, and running a cell again."""

import asyncio
import gc
import types
import weakref

import numpy as np
import pytest
from curve_views import PACE, RATE, STEP, Curve, scene_of

from tristep.viz.render.matplotlib import Figure
from tristep.viz.render.renderers import set_renderer
from tristep.viz.views import FrameBudget, View

pytestmark = pytest.mark.usefixtures("chosen_renderer")


def test_figure_description_and_state():
    view = Curve([RATE])
    figure = view.figure(rate=2)
    assert isinstance(figure, Figure)
    np.testing.assert_allclose(figure.axes[0].lines[0].get_ydata(), np.linspace(0, 1, 9))
    assert view.describe() == "It rises to 1.0."
    with pytest.raises(ValueError, match="rate=9: must be 2 or less"):
        view.figure(rate=9)
    with pytest.raises(ValueError, match="theme='blue'"):
        Curve(theme="blue")
    assert Curve(theme="dark").figure().get_facecolor()[:3] != (1, 1, 1)


@pytest.mark.parametrize("scene", [None, scene_of().panels[0]])
def test_a_view_must_return_a_scene(scene):
    with pytest.raises(TypeError, match=r"what Wrong.scene\(\) returns must be a Scene, got"):
        type("Wrong", (View,), {"scene": lambda self: scene})().figure()


def test_events_reach_the_methods_for_them(canvas):
    set_renderer("canvas")
    view = Curve([PACE])
    widget = view.widget()
    for event in (
        {"kind": "control", "name": "pace", "index": 1},
        {"kind": "button", "name": "go"},
        {"kind": "click", "name": "start", "x": 0.25, "y": 4.0},
        {"kind": "drag", "name": "start", "number": 3, "x": 1.0, "y": 2.0},
        {"kind": "control", "name": "pace", "index": 2},  # of a scene that is no longer shown
        {"kind": "control", "name": "gone", "index": 0},
    ):
        widget.on_event(event)
    assert view.happened == [("pace", "fast", 1), "go", ("start", 0.25, 4.0), ("start", 3, 1.0, 2.0)]


def test_what_a_person_does_is_shown_at_once(canvas):
    set_renderer("canvas")
    now = [0.0]
    view = Curve([PACE], budget=FrameBudget(clock=lambda: now[0]))
    widget = view.widget()
    view.refresh()
    widget.on_event({"kind": "control", "name": "pace", "index": 1})
    assert widget.payload == scene_of(0.5, [PACE]).to_bytes()


def test_refresh_keeps_to_the_budget_and_the_last_state_is_drawn(canvas):
    set_renderer("canvas")
    now = [0.0]

    class Slow(Curve):
        def scene(self):
            now[0] += 0.01
            return super().scene()

    view = Slow(budget=FrameBudget(share=0.05, most=10, clock=lambda: now[0]))
    view.refresh()
    assert view.n_scenes == 0  # nobody looks
    widget = view.widget()
    begun, before = now[0], view.n_scenes
    for k in range(1000):  # for a second
        view.height = 1 - k / 2000
        view.refresh()
        now[0] += 0.001
    drawn = view.n_scenes - before
    assert 5 <= drawn <= 6  # 0.01 s each, of which a twentieth of the time is one in 0.2 s
    assert view.cost <= 0.06
    assert now[0] - begun == pytest.approx(1 + 0.01 * drawn)
    assert widget.payload != scene_of(view.height).to_bytes()
    view.catch_up()
    assert widget.payload == scene_of(view.height).to_bytes()
    drawn = view.n_scenes
    view.catch_up()
    assert view.n_scenes == drawn


def test_what_was_put_off_is_drawn_when_the_event_loop_is_free(canvas):
    set_renderer("canvas")
    view = Curve(budget=FrameBudget(most=100.0))

    async def cell():
        widget = view.widget()
        view.refresh()
        view.height = 0.25
        view.refresh()
        before = widget.payload
        while widget.payload == before:
            await asyncio.sleep(0)
        return widget.payload

    assert asyncio.run(cell()) == scene_of(0.25).to_bytes()


@pytest.mark.parametrize(("argument", "value"), [("share", 0.0), ("share", 1.0), ("most", 0.0)])
def test_a_budget_must_be_possible(argument, value):
    with pytest.raises(ValueError, match=f"{argument}={value}"):
        FrameBudget(**{argument: value})


def test_closing_releases_widgets_and_the_view_can_be_shown_again(canvas):
    set_renderer("canvas")
    with Curve() as view:
        first, second = view.widget(), view.widget()
        first.close()
        view.height = 0.5
        view.refresh()
        assert second.payload == scene_of(0.5).to_bytes()
    assert second.comm is None
    assert view.widget().comm is not None


def test_a_view_takes_the_place_of_another_of_its_name(canvas):
    set_renderer("canvas")
    first = Curve(name="loss")
    other, widget = Curve(name="rate").widget(), first.widget()
    Curve(name="loss")
    assert widget.comm is None
    assert other.comm is not None


def test_running_a_cell_again_closes_what_it_showed(canvas, monkeypatch):
    parent = {"metadata": {"cellId": "one cell"}, "header": {"msg_id": "1"}}
    kernel = types.SimpleNamespace(get_parent=lambda _: parent)
    monkeypatch.setattr("IPython.get_ipython", lambda: types.SimpleNamespace(kernel=kernel, user_ns={}))
    set_renderer("canvas")
    first, second = Curve(), Curve()
    for view in (first, second):
        view._repr_mimebundle_()
    shown = [view.display.widgets[0] for view in (first, second)]
    parent = {"metadata": {"cellId": "another cell"}, "header": {"msg_id": "2"}}
    first._repr_mimebundle_()
    assert all(widget.comm is not None for widget in shown)  # two in one run, and one of them elsewhere too
    parent = {"metadata": {"cellId": "one cell"}, "header": {"msg_id": "3"}}
    Curve()._repr_mimebundle_()
    assert all(widget.comm is None for widget in shown)
    assert len(first.display.widgets) == 1


@pytest.mark.parametrize("renderer", ["matplotlib", "ipywidgets"])
def test_views_that_nothing_refers_to_and_closed_boxes_leave_nothing_behind(renderer):
    set_renderer(renderer)
    gc.collect()
    before = sum(type(each) is Figure for each in gc.get_objects())
    views = []
    for _ in range(2):
        view = Curve([RATE, STEP])
        if renderer == "matplotlib":
            view._repr_mimebundle_()
            view.figure()
        else:
            view.widget()
            view.close()
        views.append(weakref.ref(view))
    del view
    if renderer == "matplotlib":
        assert not any(view() for view in views)  # at once, without a search for cycles
    gc.collect()
    assert not any(view() for view in views)
    assert sum(type(each) is Figure for each in gc.get_objects()) == before
