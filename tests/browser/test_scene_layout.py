"""On a projector, a small laptop or a zoomed page: panels large enough to be read, and words that are never cut."""

import numpy as np
import pytest
from planted_runs import make_run
from scene_cases import one

from tristep import viz
from tristep.viz.scene import Axis, Control, Heatmap, Line, Panel, RefLine, Scene, Text

LEAST = 105  # pixels of a panel's height in which a curve can be read
LONG = "a name that is as long as only names of tensors in nested modules are: encoder.layers.11.attention.query.weight"


def _sized(stage, width):
    stage.browser.run("document.getElementById('stage').style.width = `${arguments[0]}px`", width)


def _frames(stage, scene):
    """Width and height of the framed panels, in pixels: where the two lines of each frame are."""
    stage.show(scene)
    return [(right - left, bottom - top) for left, top, right, bottom in stage.frames()]


# What JupyterLab leaves for an output at 800 x 600, at 1280 x 900 by its default, and at the same zoomed to 150 %.
@pytest.mark.sample(0)
@pytest.mark.usefixtures("few_steps")
@pytest.mark.parametrize("width", [430, 860, 510])
def test_panels_can_be_read_at_every_width(stage, width):
    run = make_run(name="adam")
    run.add_scalars(run.last_step + 1, {"loss": 0.01, "val_loss": 0.02, "accuracy": 0.9, "learning_rate": 0.1})
    racers = {name: {"learning_rate": 0.01} for name in ("sgd", "nag", "adam", "adagrad", "rmsprop", "lion", "muon", "adan")}
    _sized(stage, width)
    for view in (
        viz.Dashboard(run),
        viz.TrajectoryView("beale", racers, steps=20),
        viz.Playground("beale", "adam", steps=20),
    ):
        scene, name = view.scene(), type(view).__name__
        frames = _frames(stage, scene)
        stage.browser.keep(f"layout-{name}-{width}")
        assert len(frames) == sum(panel.frame for panel in scene.panels)
        assert min(high for _, high in frames) >= LEAST, (name, frames)
        assert min(wide for wide, _ in frames) >= 150, (name, frames)
        stage.words_are_whole()


# What JupyterLab leaves for an output at 800 x 600, at 1280 x 900 by its default, and at the same zoomed to 150 %.


def test_panels_stand_below_each_other_where_columns_would_be_narrow_and_beside_where_not(stage):
    panels = [
        Panel(Axis("x", 0, 1), Axis(f"y{row}{column}", 0, 1), [RefLine([0.5], style=0)], row=row, column=column)
        for row in (0, 1)
        for column in (0, 1)
    ]
    scene = Scene(panels, width=10, height=6)
    _sized(stage, 1000)
    stage.show(scene)
    wide = stage.frames()
    assert len({left for left, *_ in wide}) == len({top for _, top, *_ in wide}) == 2
    _sized(stage, 400)
    stage.browser.until(lambda: stage.browser.pixels().shape[1] == 380, "the narrow picture")
    narrow = stage.frames()
    assert len({left for left, *_ in narrow}) == 1
    tops = [top for _, top, *_ in narrow]
    assert tops == sorted(tops)
    labels = [words for words, *_ in stage.written() if words.startswith("y")]
    assert labels == ["y00", "y01", "y10", "y11"]


def test_long_words_are_wrapped_or_shortened(stage):
    ticks = [(0, LONG), (1, LONG.upper())]
    image = Heatmap(np.ones((2, 2)), [-0.5, 1.5], [-0.5, 1.5], label=LONG)
    blank = Axis("", 0, 1)
    scene = Scene(
        [
            Panel(Axis(LONG, -0.5, 1.5, ticks=ticks), Axis(LONG, -0.5, 1.5, ticks=ticks), [image], title=LONG),
            Panel(Axis("x", 0, 1), Axis("y", 0, 1), [Line([0, 1], [0, 1], name=LONG), RefLine([0.5], label=LONG)], column=1),
            Panel(blank, blank, [Text(LONG, 0.0, 0.5)], row=1, columns=2, frame=False),
        ],
        LONG,
        [Control("a", LONG, [LONG, "b"], kind="choice"), Control("b", LONG, [LONG, "b"])],
        width=10,
        height=5,
        heights=(5, 0.4),
        notes=[LONG],
        message=LONG.replace(" ", "_"),
    )
    for width in (320, 560, 1000):
        _sized(stage, width)
        stage.show(scene)
        stage.browser.keep(f"long-words-{width}")
        stage.words_are_whole()
        together = " ".join(words for words, *_ in stage.written())
        assert [part for part in LONG.split() if part not in together] == []  # it is wrapped, without an ellipsis
        assert all(right - left >= 100 for left, _, right, _ in stage.frames()), width
        # Of the page around nothing is wider than the page.
        wide = stage.browser.run(
            "const edge = document.querySelector('.tristep').getBoundingClientRect().right;"
            "return [...document.querySelectorAll('.tristep *')]"
            ".filter((each) => !each.closest('.tristep-hidden, .tristep-readout'))"
            ".map((each) => [each.className || each.tagName, each.getBoundingClientRect().right - edge])"
        )
        assert [each for each in wide if each[1] > 1] == [], width


def test_a_table_of_letters_of_equal_width_gets_smaller_until_it_fits(stage):
    numbers = {"gradient": (-43.52, -96.54), "update": (0.1, 0.2)}
    rows = "\n".join(f"{name:<16}{x:>12.4g}{y:>12.4g}" for name, (x, y) in numbers.items())
    scene = one(Text(rows, 0.02, 0.5, fixed=True), width=8, frame=False)
    for width in (760, 320, 240):
        _sized(stage, width)
        stage.show(scene)
        written = stage.words_are_whole()
        assert [words for words, *_ in written] == rows.split("\n")


def test_what_can_be_done_with_the_picture_is_said_below_it(stage):
    """The hint of a function's picture, with Python and without; what it says, other tests do."""
    view = viz.TrajectoryView("beale", ["sgd"], steps=20)
    stage.show(view.scene())
    hint = stage.browser.find(".tristep-hint")
    ways = [
        "click, or arrows and Enter: move the start",
        "drag start: move it",
        "drag elsewhere: zoom",
        "double click: back",
    ]
    assert hint.text == " · ".join(ways)
    places = (hint, stage.browser.find("canvas"))
    box, picture = (stage.browser.run("return arguments[0].getBoundingClientRect()", each) for each in places)
    assert box["top"] == pytest.approx(picture["bottom"], abs=3)
    stage.show(view.scene(), remote=False)
    assert stage.browser.find(".tristep-hint").text == "drag: zoom · double click: back"
    stage.show(viz.Dashboard(make_run(name="adam")).scene())
    assert stage.browser.find(".tristep-hint").text == "click or drag, or arrows and Enter: choose step, tensor"


def test_a_picture_that_is_looked_at_closely_has_a_button_to_the_whole(stage):
    scene = one(Line([0, 10], [0, 10], style=0, width=3))
    stage.show(scene)
    whole = stage.browser.digest()
    assert stage.browser.find_deep(".tristep-hint button") == []
    stage.pointer(
        ("move", *stage.place(scene, 2, 8)), ("down", *stage.place(scene, 2, 8)), ("move", *stage.place(scene, 4, 6)),
        ("move", *stage.place(scene, 5, 5)), ("up", *stage.place(scene, 5, 5)),
    )  # fmt: skip
    assert stage.browser.digest() != whole
    stage.browser.keep("zoomed")
    button = stage.browser.find(".tristep-hint button")
    assert button.text == "Show all again"
    button.click()
    assert stage.browser.digest() == whole
    assert stage.browser.find_deep(".tristep-hint button") == []


def test_notes_below_a_picture_are_seen(stage):
    notes = ["The curve is flat: no rate is suggested.", "The best rate, 0.214, is the greatest that was tried."]
    scene = Scene(one(Line([0, 1], [0, 1])).panels, notes=notes, message="found")
    looks = "const [each] = arguments, look = getComputedStyle(each), box = each.getBoundingClientRect();"
    looks += "const at = document.elementFromPoint(box.x + 20, box.y + 5);"
    looks += "return [look.visibility, look.opacity, look.color, box.height, each.contains(at)]"
    for width in (430, 1000):
        _sized(stage, width)
        stage.show(scene)
        shown = stage.browser.find(".tristep-notes")
        assert shown.text.split("\n") == notes
        assert stage.browser.find(".tristep-message").text == "found"
        visible, opacity, colour, high, on_top = stage.browser.run(looks, shown)
        assert (visible, opacity, on_top) == ("visible", "1", True)
        assert colour == "rgb(34, 36, 44)"  # the colour of normal text, not of quiet text
        assert high >= 2 * 15
        stage.update(Scene(scene.panels, notes=notes[:1]))
        assert shown.text == notes[0]


def test_no_axis_has_one_tick_alone(stage):
    rng = np.random.default_rng(0)
    low = 10 ** rng.uniform(-6, 2, 400)
    high = low * 10 ** rng.uniform(0.01, 3, 400)
    from_0 = np.where(rng.uniform(size=400) < 0.5, 0, low)  # as rates are drawn
    for scale, lows in (("linear", from_0), ("log", low)):
        axes = [{"low": a, "high": b, "scale": scale, "ticks": None} for a, b in zip(lows, high, strict=True)]
        found = stage.browser.run("return arguments[0].map((axis, k) => ticks(axis, 12 + k, 34).major)", axes)
        for axis, major in zip(axes, found, strict=True):
            assert len({tick["words"] + str(tick.get("power")) for tick in major}) >= 2, (axis, major)
