"""Front ends: Colab's manager of custom widgets, and what marimo is handed."""

import sys
import types

import pytest
from curve_views import RATE, Curve

from tristep.viz import LiveLoop
from tristep.viz.render import notebook
from tristep.viz.render.canvas import SceneWidget
from tristep.viz.render.matplotlib import Figure
from tristep.viz.render.renderers import capabilities, set_renderer
from tristep.viz.views.view import WIDGET

pytestmark = pytest.mark.usefixtures("chosen_renderer")
MANAGER = {"colab": {"custom_widget_manager": {"url": "https://colab.example/manager.js"}}}


@pytest.fixture
def colab(monkeypatch):
    """A stand-in for Colab's module: its function that turns the manager on, and how often it has been called."""
    output = types.ModuleType("google.colab.output")
    output.calls, output.error = 0, None
    output._widgets = types.SimpleNamespace(_installed_url=None)  # where anywidget looks for it

    def enable_custom_widget_manager():
        output.calls += 1
        if output.error is not None:
            raise output.error
        output._widgets._installed_url = MANAGER["colab"]["custom_widget_manager"]["url"]

    output.enable_custom_widget_manager = enable_custom_widget_manager
    for name in ("google", "google.colab"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "google.colab.output", output)
    shell = types.SimpleNamespace(kernel=types.SimpleNamespace(), user_ns={})
    monkeypatch.setattr("IPython.get_ipython", lambda: shell)
    notebook.enable_colab_widgets.cache_clear()
    yield output
    notebook.enable_colab_widgets.cache_clear()


def test_colab_shows_the_canvas_once_its_manager_is_on(colab):
    for _ in range(2):
        found = capabilities()
        assert (found.front_end, found.renderer, found.widget_renderer) == ("Colab", "canvas", "canvas")
    assert "Colab's manager of custom widgets is on" in found.reason
    assert colab.calls == 1
    assert notebook.has_front_end()
    view = Curve([RATE])
    data, about = view._repr_mimebundle_()
    (widget,) = view.display.widgets
    assert isinstance(widget, SceneWidget)
    assert data[WIDGET]["model_id"] == widget.model_id
    assert about[WIDGET] == MANAGER  # Colab's own hook adds it to what `display` shows, not to the value of a cell


@pytest.fixture
def marimo(monkeypatch):
    """A stand-in for the module of marimo, in a notebook that a page has opened."""
    module = types.ModuleType("marimo")
    module.running_in_notebook = lambda: True
    module.shown, module.threads = [], []
    module.output = types.SimpleNamespace(append=module.shown.append)
    module.app_meta = lambda: types.SimpleNamespace(request=module.request)
    module.request = object()

    def thread():
        module.threads.append(types.SimpleNamespace(should_exit=False))
        return module.threads[-1]

    module.Thread = thread
    monkeypatch.setitem(sys.modules, "marimo", module)
    return module


def test_marimo_is_handed_what_it_can_show(marimo):
    view = Curve([RATE])
    assert capabilities().front_end == "marimo"
    assert isinstance(view._display_(), SceneWidget)
    for renderer in ("matplotlib", "ipywidgets"):  # it shows no core widgets
        set_renderer(renderer)
        assert isinstance(view._display_(), Figure)
    set_renderer("text")
    assert view._display_() == "It rises to 1.0."
    assert notebook.has_front_end()
    marimo.request = None  # of an export
    assert not notebook.has_front_end()


def test_a_loop_whose_cell_marimo_has_run_again_is_stopped(marimo):
    def count():
        while True:
            yield {"loss": 1.0}

    first = LiveLoop(count, view=None, mode="thread").start()
    second = LiveLoop(count, mode="block", name="second")
    marimo.threads[0].should_exit = True
    assert first.wait(60)
    assert first.status == "stopped"
    second.step()
    assert marimo.shown == [second.view]
    assert second.status == "paused"
    marimo.threads[1].should_exit = True
    LiveLoop([], mode="block").start()
    assert second.status == "stopped"
