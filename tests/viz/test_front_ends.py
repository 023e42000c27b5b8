"""Front ends: Colab's manager of custom widgets, what marimo is handed, and what `%viz_doctor` says of each."""

import sys
import types

import pytest

pytest.importorskip("matplotlib")  # `make gpu` uses what a machine has
pytest.importorskip("ipywidgets")
pytest.importorskip("anywidget")

from curve_views import RATE, Curve  # noqa: E402

from tristep.viz import LiveLoop  # noqa: E402
from tristep.viz.render import notebook  # noqa: E402
from tristep.viz.render.canvas import SceneWidget  # noqa: E402
from tristep.viz.render.ipywidgets import SceneBox  # noqa: E402
from tristep.viz.render.renderers import capabilities, set_renderer  # noqa: E402
from tristep.viz.style import Figure  # noqa: E402
from tristep.viz.views.view import WIDGET  # noqa: E402

pytestmark = pytest.mark.usefixtures("chosen_renderer")
MANAGER = {"colab": {"custom_widget_manager": {"url": "https://colab.example/manager.js"}}}


@pytest.fixture
def colab(monkeypatch):
    """What there is of Colab: its function that turns the manager on, with how often it has been called."""
    from anywidget import _util

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
    monkeypatch.setattr(_util.enable_custom_widget_manager_once, "cache_clear", lambda: None, raising=False)
    notebook.enable_colab_widgets.cache_clear()
    yield output
    notebook.enable_colab_widgets.cache_clear()
