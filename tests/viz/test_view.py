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
from tristep.viz.views import FrameBudget

pytestmark = pytest.mark.usefixtures("chosen_renderer")


def test_figure_description_and_state():
    view = Curve([RATE])
    figure = view.figure(rate=2)
    assert isinstance(figure, Figure)
    np.testing.assert_allclose(figure.axes[0].lines[0].get_ydata(), np.linspace(0, 1, 9))
    assert view.describe() == "It rises to 1.0."
    with pytest.raises(ValueError, match="rate=9: must be from 0 to 2"):
        view.figure(rate=9)
    with pytest.raises(ValueError, match="theme='blue'"):
        Curve(theme="blue")
    assert Curve(theme="dark").figure().get_facecolor()[:3] != (1, 1, 1)


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


def test_views_that_nothing_refers_to_leave_nothing_behind():
    set_renderer("matplotlib")
    gc.collect()
    before = sum(type(each) is Figure for each in gc.get_objects())
    views = []
    for _ in range(2):
        view = Curve([RATE, STEP])
        view._repr_mimebundle_()
        view.figure()
        views.append(weakref.ref(view))
    del view
    assert not any(view() for view in views)  # at once, without a search for cycles
    gc.collect()
    assert sum(type(each) is Figure for each in gc.get_objects()) == before
