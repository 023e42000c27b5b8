"""A scene in a browser, Python's side: what a widget takes of a browser's messages, and what a page is made of."""

import base64
import re
import zlib
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from tristep.viz.render import joined
from tristep.viz.render.canvas import SceneWidget, page
from tristep.viz.scene import Axis, Line, Panel, Scene

SCENE = Scene([Panel(Axis("step", 0, 2), Axis("loss", 0, 1), [Line([0, 1, 2], [1, 0.5, 0.2], name="loss")])])


def test_the_joined_module_has_every_module_once_and_every_name_once():
    """Of the text: browsers and Node read it only where they are."""
    text, files = joined.scene_module(), sorted((Path(joined.__file__).parent / "static").glob("*.js"))
    named = re.findall(r"^// (\w+)\.js$", text, re.MULTILINE)
    assert sorted(named) == [file.stem for file in files]
    assert named[-1] == "scene"
    names = re.findall(r"^(?:async )?(?:function|class|const|let) (\w+)", text, re.MULTILINE)
    assert [name for name, n in Counter(names).items() if n > 1] == []
    assert not re.search(r"^\s*(import\b|export (function|class|const)\b)|\bfrom \"\./", text, re.MULTILINE)
    exported = {name for each in re.findall(r"^export \{ (.*) \};$", text, re.MULTILINE) for name in each.split(", ")}
    assert exported == {"decode", "drawn", "mount", "named", "number", "part", "ticks", "unpack", "valueAt", "words"}
    rules = re.search(r"`.*?`", (files[0].parent / "css.js").read_text(encoding="utf-8"), re.DOTALL)[0]
    assert rules in text  # none of its lines was taken for a comment


def test_a_widget_sends_the_module_and_the_bytes_of_the_scene():
    widget = SceneWidget(SCENE.to_bytes())
    state = widget.get_state()
    assert state["payload"] == SCENE.to_bytes()
    assert "export default" in state["_esm"]
    assert widget.keys.count("payload") == 1


@pytest.mark.parametrize(
    ("message", "event"),
    [
        ({"kind": "control", "name": "rate", "index": 3}, {"kind": "control", "name": "rate", "index": 3}),
        ({"kind": "button", "name": "pause", "more": [1]}, {"kind": "button", "name": "pause"}),
        (
            {"kind": "click", "name": "start", "x": 1, "y": -2.5},  # JSON has no difference between 1 and 1.0
            {"kind": "click", "name": "start", "x": 1.0, "y": -2.5},
        ),
        (
            {"kind": "drag", "name": "start", "number": 0, "x": 0.1, "y": 1e-9},
            {"kind": "drag", "name": "start", "number": 0, "x": 0.1, "y": 1e-9},
        ),
    ],
)
def test_what_a_person_does_is_told(message, event):
    told = []
    _receive(SceneWidget(SCENE.to_bytes(), told.append), message)
    assert told == [event]
    assert [type(value) for value in told[0].values()] == [type(value) for value in event.values()]


@pytest.mark.parametrize(
    "message",
    [
        None,
        {"kind": "else"},
        {"kind": "control", "name": "rate", "index": 1.5},
        {"kind": "control", "name": "rate", "index": -1},
        {"kind": "click", "name": "start", "x": float("nan"), "y": 0.0},
        {"kind": "drag", "name": "start", "number": -1, "x": 0.0, "y": 0.0},
    ],
    ids=repr,
)
def test_what_is_not_ours_is_passed_over(message):
    told = []
    _receive(SceneWidget(SCENE.to_bytes(), told.append), message)
    assert told == []


def test_a_page_has_the_module_the_scene_and_the_words_of_it_and_escapes_them():
    text = page(SCENE.to_bytes(), "Loss & <more>", "It falls </noscript>.\nAnd falls.")
    assert "<title>Loss &amp; &lt;more&gt;</title>" in text
    assert "<noscript>It falls &lt;/noscript&gt;.<br>And falls.</noscript>" in text
    assert "export { decode," in text
    assert text.count("</script>") == 2
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text)  # the name of SVG is no address


def test_a_page_keeps_nonfinite_values():
    y = np.linspace(0.1, 1, 300, dtype=np.float32) ** 3
    y[[3, 50, 70]] = np.inf, -np.inf, np.nan
    scene = Scene([Panel(Axis("step", 0, 300), Axis("loss", 0, 1), [Line(np.arange(300), y)])])
    data = zlib.decompress(base64.b64decode(re.search(r'id="payload">([^<]*)<', page(scene.to_bytes(), "t", "d"))[1]))
    start = len(scene.to_bytes()) - 2 * 1200  # two arrays of 300 words
    differences = np.frombuffer(data[start:], np.uint8).reshape(4, -1).T.copy().view(np.uint32).ravel()
    found = np.cumsum(differences, dtype=np.uint32).view(np.float32)[300:]
    assert np.array_equal(np.isfinite(found), np.isfinite(y))
    assert found[[3, 50]].tolist() == [np.inf, -np.inf]
    there = np.isfinite(y)
    np.testing.assert_allclose(found[there], y[there], rtol=0, atol=1 / 50_000)


def _receive(widget, message):
    """As the kernel hands on a message of the front end."""
    widget._handle_custom_msg(message, [])
