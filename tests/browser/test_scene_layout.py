"""On a projector, a small laptop or a zoomed page words are never cut."""

import numpy as np

from tristep.viz.scene import Axis, Control, Heatmap, Line, Panel, RefLine, Scene, Text

LONG = "a name that is as long as only names of tensors in nested modules are: encoder.layers.11.attention.query.weight"


def _sized(stage, width):
    stage.browser.run("document.getElementById('stage').style.width = `${arguments[0]}px`", width)


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
