"""Renderers of views: how one is chosen, what an output holds with each, and pages that are written."""

import base64
import io
import types
from pathlib import Path

import ipywidgets
import pytest
from curve_views import RATE, Curve
from PIL import Image as Pixels

from tristep.viz import render
from tristep.viz.render.ipywidgets import SceneBox
from tristep.viz.render.renderers import capabilities, set_renderer
from tristep.viz.views.view import WIDGET

pytestmark = pytest.mark.usefixtures("chosen_renderer")


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
        height = about["image/png"]["height"]
        assert 200 < height < 230  # with the values of the controls
        assert picture.size == ((450, pytest.approx(1.5 * height, abs=1)) if renderer == "matplotlib" else (300, height))
        assert about["image/png"] == {"width": 300, "height": height, "alt": view.scene().alt}
        assert "It rises to 1" in about["image/png"]["alt"]
    if WIDGET in kinds:
        (widget,) = view.display.widgets
        assert isinstance(widget, canvas.SceneWidget if renderer == "canvas" else SceneBox)
        assert data[WIDGET]["model_id"] == widget.model_id


def test_pictures_of_an_exported_notebook_have_their_descriptions(tmp_path):
    nbformat, exporters = pytest.importorskip("nbformat"), pytest.importorskip("nbconvert.exporters")
    (tmp_path / "tristep").symlink_to(Path(render.__file__).parent / "nbconvert", target_is_directory=True)
    set_renderer("matplotlib")
    view = Curve([RATE])
    figure = view.figure()
    figure.alt = 'f("<x>") & more'
    png, about = figure._repr_png_()
    shown = [view._repr_mimebundle_(), ({"image/png": base64.b64encode(png).decode()}, {"image/png": about})]
    outputs = [nbformat.v4.new_output("display_data", data, metadata=metadata) for data, metadata in shown]
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(outputs=outputs)])
    exporter = exporters.HTMLExporter(template_name="tristep", extra_template_basedirs=[str(tmp_path)])
    images = pytest.importorskip("bs4").BeautifulSoup(exporter.from_notebook_node(book)[0], "html.parser").select("img")
    assert [image["alt"] for image in images] == [view.scene().alt, figure.alt]


@pytest.mark.parametrize(
    ("shell", "environment", "front_end", "renderer"),
    [
        (None, {}, "no notebook", "matplotlib"),
        ({}, {}, "a terminal", "text"),
        ({"kernel": True}, {}, "a kernel without a known front end", "canvas"),
        ({"kernel": True}, {"JPY_SESSION_NAME": "a.ipynb"}, "Jupyter", "canvas"),
        ({"kernel": True}, {"VSCODE_PID": "1"}, "VS Code", "canvas"),
        ({"kernel": True}, {"VOILA_PREHEAT": "False", "JPY_SESSION_NAME": "a.ipynb"}, "Voilà", "canvas"),
    ],
)
def test_the_renderer_is_chosen_by_what_is_found(shell, environment, front_end, renderer, monkeypatch):
    for name in ("JPY_SESSION_NAME", "VOILA_PREHEAT", "VSCODE_PID", "KAGGLE_KERNEL_RUN_TYPE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
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
    canvas.page = lambda *_: "text"
    assert [each.name for each in tmp_path.iterdir()] == ["page.html"]
    assert path.read_text() == before
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        view.html(tmp_path / "none" / "page.html")
