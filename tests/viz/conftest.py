"""What tests of views share: the renderer that is chosen, and a stand-in for the widget that draws in a browser."""

import sys
import types

import pytest


@pytest.fixture(autouse=True)
def eager_in_quick_tier():
    """Pictures take long trainings of few rules, which compiled loops make shorter; see `few_steps`."""


@pytest.fixture
def chosen_renderer(monkeypatch):
    """The renderer is the one that is chosen by what is found, and the test leaves no other one and no widgets."""
    import ipywidgets

    from tristep.viz.render.renderers import set_renderer

    monkeypatch.delenv("TRISTEP_VIZ", raising=False)
    yield
    set_renderer(None)
    ipywidgets.Widget.close_all()


@pytest.fixture
def canvas(monkeypatch):
    """In place of the module that draws in a browser: its widget keeps what it is given, its pages say how much that is."""
    import ipywidgets
    import traitlets

    class StandIn(ipywidgets.DOMWidget):
        _view_name = traitlets.Unicode("StandIn").tag(sync=True)

        def __init__(self, payload, on_event):
            super().__init__()
            self.payload, self.on_event = payload, on_event

        def show(self, scene, live):
            self.payload = scene.to_bytes()

        def hide_picture(self):
            self.pictured = True

    pages = types.SimpleNamespace(
        SceneWidget=StandIn, page=lambda payload, title, description: f"{title}: {description} {len(payload)}"
    )
    monkeypatch.setitem(sys.modules, "tristep.viz.render.canvas", pages)
    return pages
