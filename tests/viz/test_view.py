"""Views: what a front end gets of them, what a person's doings reach, and when they are redrawn."""

import asyncio
import base64
import gc
import io
import subprocess
import sys
import textwrap
import threading
import types
import weakref

import numpy as np
import pytest

pytest.importorskip("matplotlib")  # `make gpu` uses what a machine has
ipywidgets = pytest.importorskip("ipywidgets")

from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: E402
from PIL import Image as Pixels  # noqa: E402

from tristep.viz.render.ipywidgets import SceneBox  # noqa: E402
from tristep.viz.render.matplotlib import Picture  # noqa: E402
from tristep.viz.render.renderers import capabilities, set_renderer  # noqa: E402
from tristep.viz.scene import Axis, Button, Click, Control, Heatmap, Line, Panel, Scene  # noqa: E402
from tristep.viz.style import Figure  # noqa: E402
from tristep.viz.views import FrameBudget, View  # noqa: E402
from tristep.viz.views.view import WIDGET  # noqa: E402

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
        return _scene(self.height, self.controls)

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


class StandIn(ipywidgets.DOMWidget):
    """In place of the widget that draws in a browser."""

    def __init__(self, payload, on_event):
        super().__init__()
        self.payload, self.on_event = payload, on_event


@pytest.fixture(autouse=True)
def _nothing_is_left(monkeypatch):
    monkeypatch.delenv("TRISTEP_VIZ", raising=False)
    yield
    set_renderer(None)
    ipywidgets.Widget.close_all()


@pytest.fixture
def canvas(monkeypatch):
    pages = types.SimpleNamespace(
        SceneWidget=StandIn, page=lambda payload, title, description: f"{title}: {description} {len(payload)}"
    )
    monkeypatch.setitem(sys.modules, "tristep.viz.render.canvas", pages)
    return pages


def _scene(height=1.0, controls=(), **settings):
    local = tuple(control for control in controls if not control.remote)
    shape = tuple(len(control.values) for control in local)
    y = height * np.linspace(0, 1, int(np.prod(shape)))[:, None] * np.linspace(0, 1, 9)
    line = Line(np.arange(9), y.reshape(*shape, 9), by=[control.name for control in local])
    said = f"It rises to {height}."
    panel = Panel(Axis("step", 0, 8), Axis("loss", 0, 1), [line], click=settings.pop("click", None))
    return Scene([panel], controls=controls, width=3, height=2, description=said, **settings)


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


@pytest.mark.parametrize(
    ("renderer", "kinds"),
    [
        ("text", {"text/plain"}),
        ("matplotlib", {"text/plain", "image/png"}),
        ("ipywidgets", {"text/plain", "image/png", WIDGET}),
        ("canvas", {"text/plain", "image/png", WIDGET}),
    ],
)
def test_an_output_has_its_renderers_data_and_all_below_and_no_html(renderer, kinds, canvas):
    view = Curve([RATE])
    set_renderer(renderer)
    data, about = view._repr_mimebundle_()
    assert set(data) == kinds
    assert data["text/plain"] == "It rises to 1.0."
    assert view.n_scenes == 1
    if renderer != "text":
        picture = Pixels.open(io.BytesIO(base64.b64decode(data["image/png"])))
        assert picture.format == "PNG"
        assert picture.size == ((450, 300) if renderer == "matplotlib" else (300, 200))
        assert about["image/png"] == {"width": 300, "height": 200}
    if WIDGET in kinds:
        (widget,) = view.display.widgets
        assert isinstance(widget, StandIn if renderer == "canvas" else SceneBox)
        assert data[WIDGET]["model_id"] == widget.model_id


@pytest.mark.packaging
def test_missing_packages_lower_the_renderer(tmp_path):
    code = f"""
        import sys, types
        import IPython
        sys.modules.update(anywidget=None, ipywidgets=None)
        from tristep.viz import Axis, Line, Panel, Scene, View, capabilities, set_renderer

        class Curve(View):
            def scene(self):
                return Scene([Panel(Axis("x", 0, 1), Axis("y", 0, 1), [Line([0, 1], [0, 1])])])

        IPython.get_ipython = lambda: types.SimpleNamespace(kernel=types.SimpleNamespace(), user_ns={{}})
        picture = {{"image/png", "text/plain"}}
        for renderer, kinds in [("matplotlib", picture), ("ipywidgets", picture | {{{WIDGET!r}}})]:
            assert capabilities().renderer == renderer, capabilities()
            data, _ = Curve()._repr_mimebundle_()
            assert set(data) == kinds, set(data)
            for attempt in (lambda: set_renderer("canvas"), lambda: Curve().html("page.html")):
                try:
                    attempt()
                except ModuleNotFoundError as error:
                    assert "tristep[notebook]" in str(error), error
                else:
                    raise AssertionError("no error")
            sys.modules.pop("ipywidgets")  # which is there from now on
    """
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(code)]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("shell", "modules", "environment", "front_end", "renderer"),
    [
        (None, [], {}, "no notebook", "matplotlib"),
        ({}, [], {}, "a terminal", "text"),
        ({"kernel": True}, [], {}, "a kernel without a known front end", "canvas"),
        ({"kernel": True}, [], {"JPY_SESSION_NAME": "a.ipynb"}, "Jupyter", "canvas"),
        ({"kernel": True}, [], {"VSCODE_PID": "1"}, "VS Code", "canvas"),
        ({"kernel": True}, ["google.colab"], {}, "Colab", "ipywidgets"),
    ],
)
def test_the_renderer_is_chosen_by_what_is_found(shell, modules, environment, front_end, renderer, monkeypatch):
    pytest.importorskip("anywidget")
    for name in ("JPY_SESSION_NAME", "VSCODE_PID", "KAGGLE_KERNEL_RUN_TYPE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    for name in modules:
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    found = None if shell is None else types.SimpleNamespace(kernel=shell.get("kernel"), user_ns={})
    monkeypatch.setattr("IPython.get_ipython", lambda: found)
    seen = capabilities()
    assert (seen.front_end, seen.renderer) == (front_end, renderer)
    assert seen.ipywidgets == ipywidgets.__version__
    assert str(seen).startswith(f"{renderer}: ")


def test_the_environment_chooses_until_set_renderer_does(monkeypatch):
    monkeypatch.setenv("TRISTEP_VIZ", "text")
    assert (capabilities().renderer, capabilities().reason) == ("text", "chosen by TRISTEP_VIZ")
    set_renderer("matplotlib")
    assert (capabilities().renderer, capabilities().reason) == ("matplotlib", "chosen by set_renderer()")
    set_renderer("auto")
    assert capabilities().renderer == "matplotlib"  # nothing shows anything here
    with pytest.raises(ValueError, match="renderer='svg': must be one of 'auto', 'canvas', 'ipywidgets', 'matplot"):
        set_renderer("svg")
    set_renderer(None)
    monkeypatch.setenv("TRISTEP_VIZ", "svg")
    with pytest.raises(ValueError, match="TRISTEP_VIZ='svg'"):
        capabilities()


def test_a_page_is_written_whole_or_not_at_all(tmp_path, canvas):
    view, path = Curve(), tmp_path / "page.html"
    assert view.html(path) == path
    assert path.read_text().startswith("Curve: It rises to 1.0.")
    before = path.read_text()

    def fail(*_):
        raise OSError("no room")

    canvas.page = fail
    with pytest.raises(OSError, match="no room"):
        view.html(path)
    canvas.page = lambda *_: "\ud800"  # cannot be written as UTF-8
    with pytest.raises(UnicodeEncodeError):
        view.html(path)
    assert [each.name for each in tmp_path.iterdir()] == ["page.html"]
    assert path.read_text() == before
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        view.html(tmp_path / "none" / "page.html")


def test_events_reach_the_methods_for_them(canvas):
    set_renderer("canvas")
    view = Curve([PACE])
    widget = view.widget()
    for event in (
        {"kind": "control", "name": "pace", "index": 1},
        {"kind": "button", "name": "go"},
        {"kind": "click", "name": "start", "x": 0.25, "y": 4.0},
        {"kind": "drag", "name": "knot", "number": 3, "x": 1.0, "y": 2.0},
        {"kind": "control", "name": "pace", "index": 2},  # of a scene that is no longer shown
        {"kind": "control", "name": "gone", "index": 0},
    ):
        widget.on_event(event)
    assert view.happened == [("pace", "fast", 1), "go", ("start", 0.25, 4.0), ("knot", 3, 1.0, 2.0)]


def test_what_a_person_does_is_shown_at_once(canvas):
    set_renderer("canvas")
    now = [0.0]
    view = Curve([PACE], budget=FrameBudget(clock=lambda: now[0]))
    widget = view.widget()
    view.refresh()
    widget.on_event({"kind": "control", "name": "pace", "index": 1})
    assert widget.payload == _scene(0.5, [PACE]).to_bytes()


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
    assert widget.payload != _scene(view.height).to_bytes()
    view.catch_up()
    assert widget.payload == _scene(view.height).to_bytes()
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

    assert asyncio.run(cell()) == _scene(0.25).to_bytes()


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
        assert second.payload == _scene(0.5).to_bytes()
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
    for _ in range(10):
        view = Curve([RATE])
        view._repr_mimebundle_()
        view.figure()
        views.append(weakref.ref(view))
    del view
    assert not any(view() for view in views)  # at once, without a search for cycles
    gc.collect()
    assert sum(type(each) is Figure for each in gc.get_objects()) == before


def test_closed_boxes_leave_nothing_behind():
    set_renderer("ipywidgets")
    gc.collect()
    before = sum(type(each) is Figure for each in gc.get_objects())
    for _ in range(5):
        view = Curve([RATE, STEP])
        view.widget()
        view.close()
    del view
    gc.collect()
    assert sum(type(each) is Figure for each in gc.get_objects()) == before


def test_one_control_is_a_stack_of_frames_that_the_browser_chooses_from():
    scene = _scene(controls=[RATE])
    box = SceneBox(scene)
    stack, slider = box.children
    assert isinstance(stack, ipywidgets.Stack)
    assert stack.selected_index == slider.index == 1
    for index, frame in enumerate(stack.children):
        assert frame.value == Picture(scene, {"rate": index}, values=False).png()
    (link,) = box.links
    assert (link.source, link.target) == ((slider, "index"), (stack, "selected_index"))
    assert [label for label, _ in slider.options] == ["0.1", "0.2", "0.3"]
    assert (slider.description, slider.tooltip) == ("learning rate", "learning rate")


def test_several_controls_are_answered_by_one_picture():
    scene = _scene(controls=[RATE, STEP])
    box = SceneBox(scene, theme="dark")
    picture, slider, row = box.children
    play, steps = row.children
    assert isinstance(picture, ipywidgets.Image)
    assert (play.max, play.interval) == (3, 500)
    assert box.links[0].source == (play, "value")
    slider.index, steps.index = 2, 3
    assert picture.value == Picture(scene, {"rate": 2, "step": 3}, "dark", values=False).png()


def test_another_scene_keeps_what_is_set():
    box = SceneBox(_scene(controls=[RATE]))
    slider = box.children[1]
    slider.index = 2
    box.show(_scene(0.5, controls=[RATE]))
    assert box.children[1] is slider
    assert box.children[0].tooltip == "It rises to 0.5."
    assert box.children[0].value == Picture(_scene(0.5, controls=[RATE]), {"rate": 2}, values=False).png()
    more = _scene(0.5, controls=[RATE, STEP])
    box.show(more)
    assert slider.comm is None
    assert box.children[1].index == 2
    box.children[1].index = 0
    assert box.children[0].value == Picture(more, {"rate": 0}, values=False).png()


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


def test_a_picture_and_its_words_are_sent_in_one_message(monkeypatch):
    box = SceneBox(_scene(controls=[RATE, STEP]))
    picture, sent = box.children[0], []
    monkeypatch.setattr(type(picture), "_send", lambda widget, message, buffers=None: sent.append((message, buffers)))
    box.show(_scene(0.5, controls=[RATE, STEP]))
    ((message, buffers),) = sent
    assert message["state"] == {"tooltip": "It rises to 0.5."}
    assert message["buffer_paths"] == [["value"]]
    assert bytes(buffers[0]).startswith(b"\x89PNG")


def test_a_box_tells_what_python_is_to_know():
    told = []
    scene = _scene(controls=[PACE], buttons=[Button("go", "Go on")], click=Click(event="start"))
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
    scene = _scene(controls=[RATE, STEP])
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
    assert picture.value == full(Picture(scene, {"rate": 0, "step": 3}, values=False))


@pytest.mark.slow
def test_a_notebook_keeps_widget_picture_and_words(tmp_path):
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    code = textwrap.dedent("""
        from tristep.viz import Axis, Control, Line, Panel, Scene, View, set_renderer

        class Curve(View):
            def scene(self):
                power = Control("power", "power", [1, 2])
                line = Line([0, 1, 2], [[0, 1, 2], [0, 1, 4]], by=("power",))
                panel = Panel(Axis("x", 0, 2), Axis("y", 0, 4), [line])
                return Scene([panel], controls=[power], description="Powers of x.")

        set_renderer("ipywidgets")
        view = Curve()
        view
    """)
    later = textwrap.dedent("""
        from tristep.viz import LiveLoop

        loop = LiveLoop(({"loss": 1 / (step + 1)} for step in range(20)), mode="block")
        loop.start()
        print(loop.view.figure()._repr_png_(1.0)[0].hex())
    """)
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(each) for each in (code, later)])
    nbclient.NotebookClient(notebook, timeout=240, kernel_name="python3").execute()
    output, picture = notebook.cells[0].outputs
    assert set(output.data) == {WIDGET, "text/plain"}
    assert set(picture.data) == {"image/png", "text/plain"}  # what is left where there are no widgets
    assert output.data["text/plain"] == picture.data["text/plain"] == "Powers of x."
    assert base64.b64decode(picture.data["image/png"]).startswith(b"\x89PNG")
    # That of a loop is the last one.
    _, picture, printed = notebook.cells[1].outputs
    assert base64.b64decode(picture.data["image/png"]).hex() == printed.text.strip()
    states = notebook.metadata.widgets["application/vnd.jupyter.widget-state+json"]["state"]
    models = {state["model_name"] for state in states.values()}
    assert {"StackModel", "ImageModel", "LinkModel", "SelectionSliderModel"} <= models
    assert output.data[WIDGET]["model_id"] in states
