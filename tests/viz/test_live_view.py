"""The live loop: what its view draws, when, and what its controls do."""

import asyncio
import threading

import numpy as np
import pytest
from live_training import Training, Watching, ended, losses, same, sliced

from tristep import viz
from tristep.viz import LiveLoop, Recorder
from tristep.viz.live.view import MULTIPLIERS
from tristep.viz.scene import Axis, Button, Control, Line, Panel, Scene, Text
from tristep.viz.views import FrameBudget


@pytest.fixture(autouse=True)
def _no_renderer_is_left():
    yield
    viz.set_renderer(None)


def test_a_view_that_cannot_be_drawn_does_not_end_training():
    class Broken(Watching):
        def refresh(self):
            raise ValueError("no ink")

    training = Training()
    loop = training.loop(training.steps(3), view=Broken([0]))
    with pytest.warns(RuntimeWarning, match="no ink"):
        loop.start()
    assert (loop.status, loop.n_steps, loop.view) == ("finished", 3, None)


def _texts(scene):
    return [str(layer.texts) for panel in scene.panels for layer in panel.layers if isinstance(layer, Text)]


def test_the_live_view_shows_losses_rates_and_how_far_it_is():
    training = Training()
    loop = training.loop(training.step, view="live", name="first")
    view = loop.view
    assert "first: ready, step 0" in _texts(view.scene())[0]
    loop.step(20)
    loop.snapshot("fork")
    scene = view.scene()
    assert "first: paused, step 20, learning rate 0.02" in _texts(scene)[0]
    lines = [layer for panel in scene.panels for layer in panel.layers if isinstance(layer, Line)]
    assert any(np.allclose(line.y, losses(loop.run)) for line in lines if line.y.ndim == 1)
    assert any(np.allclose(line.y, 0.02) for line in lines if line.y.ndim == 1)
    loop.branch("second")
    loop.multiplier = 0.5
    loop.step(5)
    scene = view.scene()
    assert "second: paused, step 25, learning rate 0.01 (× 0.5)" in _texts(scene)[0]
    assert {name for name, _ in scene.legend(scene.panels)} >= {"first", "second"}
    assert view.describe().startswith("second: paused, step 25")
    figure = view.figure()
    assert any("second: paused" in text.get_text() for axes in figure.axes for text in axes.texts)


def test_what_the_live_views_controls_do():
    training = Training()
    loop = training.loop(training.step, view="live")
    view = loop.view
    loop.step(3)
    view.on_control("multiplier", 0.25, 8)
    assert loop.multiplier == 0.25
    control = next(control for control in view.scene().controls if control.name == "multiplier")
    assert control.remote
    assert control.values[control.index] == 0.25
    assert 1.0 in control.values  # where it begins: a slider's first value lies on its grid
    view.on_button("one step")
    assert loop.n_steps == 4
    view.on_button("snapshot")
    assert list(loop.snapshots) == ["step 4"]
    view.on_button("branch")
    assert loop.run.name == "branch 1"
    assert "now in 'branch 1'" in _texts(view.scene())[0]
    view.on_button("stop")
    assert loop.status == "stopped"
    view.on_button("resume")
    assert "nothing to go on with" in _texts(view.scene())[0]
    names = {button.name for button in view.scene().buttons}
    assert names == {"pause", "resume", "one step", "stop", "snapshot", "branch", "back", "pick"}


def test_a_dashboard_steers_its_loop_and_shows_the_run_that_it_is_in():
    training = Training()
    recorder = Recorder(training.trainer, "first", every=1)
    dashboard = viz.Dashboard(recorder)
    loop = training.loop(training.step, recorder=recorder, view=dashboard)
    viz.set_renderer("canvas")
    with loop.view as view:
        canvas = view.widget()

        def does(kind, name, **more):
            canvas._handle_custom_msg({"kind": kind, "name": name, **more}, [])

        def chosen(name):
            control = next(control for control in view.scene().controls if control.name == name)
            return [*control.values], control.values[control.index]

        def is_on(name):
            return next(button.enabled for button in view.scene().buttons if button.name == name)

        loop.step(3)
        does("button", "one step")
        assert "first: paused, step 4, learning rate 0.02" in _texts(view.display.shown)[0]
        does("button", "snapshot")
        does("control", "multiplier", index=MULTIPLIERS.index(0.5))
        does("button", "one step")
        does("button", "snapshot")
        before = training.state()
        assert chosen("from") == (["step 4", "step 5"], "step 5")
        assert "with" not in [control.name for control in view.scene().controls]  # there is one run
        does("control", "from", index=0)
        assert chosen("from")[1] == "step 4"
        does("button", "back")
        assert (loop.run.name, loop.n_steps, loop.multiplier) == ("branch 1", 4, 1.0)
        assert "now in 'branch 1', from snapshot 'step 4'" in _texts(view.display.shown)[0]
        does("button", "one step")
        assert dashboard.run is loop.run
        assert loop.run.scalars["loss"].recent()[0].tolist() == [5]
        assert (chosen("with"), is_on("pick")) == ((["first", "branch 1"], "branch 1"), False)
        does("control", "with", index=0)
        assert is_on("pick")
        does("button", "pick")
        assert (loop.run.name, loop.n_steps, dashboard.run) == ("first", 5, loop.run)
        assert same(training.state(), before)
        does("control", "scale", index=1)
        does("button", "one step")
        assert chosen("scale") == (["log", "linear"], "linear")
        names = [control.name for control in view.scene().controls]
        assert {"step", "layer"} < set(names)  # the dashboard's own controls
        assert view.describe().startswith("first: paused, step 6")


def test_a_view_of_one_s_own_is_steered_and_gets_what_is_its_own():
    heard = []

    class Own(Watching):
        def scene(self):
            panel = Panel(Axis("", 0, 1), Axis("", 0, 1), [])
            return Scene([panel], controls=[Control("mine", "mine", [1, 2], remote=True)], buttons=[Button("own", "Own")])

        def on_control(self, name, value, index):
            heard.append((name, value, index))

        def on_button(self, name):
            heard.append(name)

        def on_click(self, event, x, y):
            heard.append((event, x, y))

    loop = LiveLoop(iter(range(9)), view=Own([0]))
    loop.view.on_control("mine", 2, 1)
    loop.view.on_button("own")
    loop.view.on_click("place", 0.5, 0.25)
    loop.view.on_button("one step")
    assert heard == [("mine", 2, 1), "own", ("place", 0.5, 0.25)]
    assert loop.n_steps == 1
    assert {button.name for button in loop.view.scene().buttons} == {"own", "pause", "resume", "one step", "stop"}


def test_a_button_resumes_in_the_background():
    training = Training()

    async def main():
        loop = training.loop(view="live")
        loop.step(2)
        loop.view.on_button("resume")
        assert (loop.status, loop.n_steps) == ("running", 2)
        await loop
        assert loop.n_steps == 30

    asyncio.run(main())


def shown(loop, monkeypatch):
    """A canvas that shows the loop, and its frames to come: what they say, and the thread that sent them."""
    viz.set_renderer("canvas")
    monkeypatch.setattr(
        loop.view.display, "budget", FrameBudget(most=100.0, clock=lambda: 0.0)
    )  # due once; others are put off
    canvas, frames = loop.view.widget(), []

    def note(_):
        frames.append((_texts(loop.view.display.shown)[0], threading.get_ident()))

    canvas.observe(note, "payload")
    return canvas, frames


def press(canvas, name):
    canvas._handle_custom_msg({"kind": "button", "name": name}, [])


@pytest.mark.parametrize("name", ["pause", "stop"])
def test_nothing_is_drawn_after_the_frame_that_says_it_has_ended(name, monkeypatch):
    training, pressed = Training(), threading.Event()

    def steps():
        for number, loss in enumerate(training.steps(10**6)):
            if number == 3:
                pressing.start()
                pressed.wait()  # while the button waits for the end of this step
            yield loss

    loop = sliced(training.loop(steps, mode="task", view="live"))
    canvas, frames = shown(loop, monkeypatch)
    begin = loop.view.on_button
    monkeypatch.setattr(loop.view, "on_button", lambda name: (pressed.set(), begin(name)))
    pressing = threading.Thread(target=press, args=(canvas, name))

    async def main():
        loop.start()
        await ended(loop)
        pressing.join()

    asyncio.run(main())
    loop.view.catch_up()  # as a timer would
    said = [words for words, _ in frames if ": running" not in words]
    assert len(said) == 1
    assert said == [words for words, _ in frames[-1:]]
    assert f"{loop.status}, step {loop.n_steps}," in said[0]
    loop.view.close()


@pytest.mark.parametrize("mode", ["task", "thread"])
def test_a_step_may_draw_while_a_button_waits_for_its_end(mode, monkeypatch):
    training, pressed = Training(), threading.Event()

    def steps():
        for number, loss in enumerate(training.steps(10**6)):
            if number == 3:
                pressing.start()
                pressed.wait()
                loop.view.refresh()
            yield loss

    loop = training.loop(steps, mode=mode, view="live")
    canvas, frames = shown(loop, monkeypatch)
    rest = loop.at_rest

    def at_rest():
        if threading.current_thread() is pressing:
            pressed.set()
        return rest()

    monkeypatch.setattr(loop, "at_rest", at_rest)
    pressing = threading.Thread(target=press, args=(canvas, "stop"), daemon=True)

    async def main():
        loop.start()
        await ended(loop)

    running = threading.Thread(target=asyncio.run, args=(main(),), daemon=True)
    running.start()
    for thread in (running, pressing):
        thread.join(60)
        assert not thread.is_alive()
    assert [words for words, _ in frames if ": stopped" in words] == [words for words, _ in frames[-1:]]
    loop.view.close()


def test_what_another_thread_puts_off_is_drawn_by_the_event_loop_of_the_steps(monkeypatch):
    training = Training()

    async def main():
        loop = training.loop(training.step, view="live")
        _, frames = shown(loop, monkeypatch)

        async def refresh():
            for loop.view.message in ("first", "second"):
                loop.view.refresh()

        async def drawn():
            while len(frames) < 2:
                await asyncio.sleep(0)

        await asyncio.to_thread(asyncio.run, refresh())
        await asyncio.wait_for(drawn(), 60)
        loop.view.close()
        return [(words.split("\n")[1], thread == threading.get_ident()) for words, thread in frames]

    assert asyncio.run(main()) == [("first", False), ("second", True)]
