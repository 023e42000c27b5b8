"""The still picture of a dashboard, which a saved notebook shows: data first, legends in a row, one notation for an axis."""

import numpy as np
import pytest
from drawn_scenes import words_of
from every_view import every_view

import tristep
from tristep.viz import Dashboard, Run

NAMES = [f"{i}.{kind}" for i in (0, 2, 4) for kind in ("weight", "bias")]


def _run(steps=60, names=NAMES):
    """A run whose learning rate, and so every update, is 0 at the last step."""
    run = Run("adam", names, tristep.Telemetry().edges)
    rng, number = np.random.default_rng(0), np.arange(1, steps + 1)
    rate = 0.01 * (1 - number / steps) ** 4
    for step in number:
        run.add_scalars(int(step), {"loss": float(1 / step), "learning_rate": float(rate[step - 1])})
    size = (steps, len(NAMES))
    gradients, ratios = rng.lognormal(size=size), rng.lognormal(size=size) * rate[:, None]
    norms = {"gradient_norm": gradients, "weight_norm": np.ones(size), "update_norm": ratios, "update_ratio": ratios}
    run.add_tensors(number, norms)
    run.add_tensors(number[:50], {"gradient_histogram": rng.poisson(1.0, (50, len(NAMES), 65)).astype(float)})
    return run


@pytest.fixture(scope="module")
def drawn():
    view = Dashboard(_run())
    figure = view.figure()
    figure.canvas.draw()
    return figure, [axes for axes, panel in zip(figure.axes, view.scene().panels, strict=True) if panel.frame]


def test_three_fifths_of_the_sheet_are_data(drawn):
    _, panels = drawn
    boxes = [axes.get_position() for axes in panels]
    assert sum(box.width * box.height for box in boxes) >= 0.6
    for k, box in enumerate(boxes):  # what is counted twice would be no data
        assert not any(box.overlaps(other) for other in boxes[k + 1 :])


def test_the_losses_have_the_largest_panel(drawn):
    _, panels = drawn
    first, *others = (box.width * box.height for box in (axes.get_position() for axes in panels))
    assert panels[0].get_ylabel() == "loss"
    assert first > 1.4 * max(others)


def test_long_names_of_tensors_leave_the_map_its_room():
    names = [f"encoder.layers.{i}.attention.query.projection.weight" for i in range(len(NAMES))]
    view = Dashboard(_run(names=names))
    heat = next(axes for axes in view.figure().axes if any("…" in text.get_text() for text in axes.get_yticklabels()))
    assert heat.get_position().width > 0.3
    assert names in [[words for _, words in panel.y.ticks or ()] for panel in view.scene().panels]


@pytest.mark.sample(0)  # the dashboard is looked at above
def test_most_of_every_views_sheet_is_data():
    shares = {}
    for name, view in every_view(_run(), _run()).items():
        figure, scene = view.figure(), view.scene().without_table()
        figure.canvas.draw()
        boxes = [
            axes.get_position() for axes, panel in zip(figure.axes, scene.panels, strict=False) if panel.frame or panel.title
        ]
        shares[name] = sum(box.width * box.height for box in boxes)  # the Playground's numbers have a title
    assert {name: share for name, share in shares.items() if share < 0.6} == {}


def test_the_names_of_six_tensors_stand_in_one_row_unshortened(drawn):
    figure, panels = drawn
    words = {text.get_text(): text.get_window_extent() for text in words_of(figure)}
    ratios = next(axes for axes in panels if axes.get_ylabel() == "update / weight").get_window_extent()
    rows = {round(words[name].y0) for name in NAMES}
    assert len(rows) == 1
    assert ratios.y1 < rows.pop() < ratios.y1 + 0.3 * figure.dpi
    assert {"weight 1", "update 0", "0 or below"} <= words.keys()  # at the last step, without an update
    assert any(word.startswith("norm of the gradient: ") for word in words)


def test_an_axis_has_one_notation(drawn):
    _, panels = drawn
    ratios = next(axes for axes in panels if axes.get_ylabel() == "update / weight")
    low, high = ratios.get_ylim()
    ticks = [text.get_text() for text in ratios.get_yticklabels() if low <= text.get_position()[1] <= high]
    assert len(ticks) > 2
    assert all("e" in tick for tick in ticks)
    shown = [float(tick.replace("−", "-")) for tick in ticks]
    np.testing.assert_allclose(shown, [text for text in ratios.get_yticks() if low <= text <= high])


def test_only_the_last_of_panels_with_the_same_steps_has_their_numbers(drawn):
    _, panels = drawn
    columns = {}
    for axes in panels:
        columns.setdefault(tuple(axes.get_position().intervalx.round(3)), []).append(axes)
    for stacked in columns.values():
        *upper, last = sorted(stacked, key=lambda axes: -axes.get_position().y0)
        assert len({axes.get_xlim() for axes in stacked}) == 1
        assert [text.get_visible() and bool(text.get_text()) for text in last.get_xticklabels()].count(True) > 2
        for axes in upper:
            assert not any(tick.label1.get_visible() for tick in axes.xaxis.get_major_ticks())
    assert sorted(map(len, columns.values())) == [1, 1, 2, 2]  # the losses are wider than what is below them
