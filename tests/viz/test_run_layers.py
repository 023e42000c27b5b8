"""Views of a recorded run's layers: heat maps of histograms and norms, update ratios, single weights."""

import numpy as np
import pytest
from planted_runs import layers_of, make_run, named_layers

from tristep.viz import Dashboard, Heatmap, Line, Points, Run, TensorHeatmap, Text, UpdateRatioView, WeightsView
from tristep.viz.views.rows import Rows


def test_a_heat_map_shows_each_tensor_in_its_row_and_its_values_at_the_bar():
    view = TensorHeatmap(make_run(100, 3), "weight_norm")
    scene = view.scene()
    heat, bar, _, below = scene.panels
    quantity = scene.controls[0]
    assert quantity.values[quantity.index] == "norm of the weight"
    (image,) = layers_of(scene, Heatmap, 0)
    gradient = scene.state(quantity=quantity.values.index("norm of the gradient"))
    values = image.chosen("values", gradient)
    assert values.shape == (3, 100)
    np.testing.assert_allclose(values, np.array([1.0, 0.5, 0.0])[:, None] * np.ones(100), atol=1e-6)  # 1, 0.1 and 0.01
    for chosen, label in ((gradient, "norm of the gradient"), (scene.state(), "norm of the weight")):
        assert [words.chosen("texts", chosen) for words in bar.layers if isinstance(words, Text)][-1] == label
    texts = [words.chosen("texts", gradient) for words in bar.layers if isinstance(words, Text)]
    assert texts == ["0.01", "1", "norm of the gradient"]
    texts = [str(words.texts) for words in below.layers if isinstance(words, Text)]
    assert texts == ["1", "10,000", "elements of 10,000"]
    # The bars stand in a line right above the map, side by side, and their words end within the picture.
    axes = view.figure().axes
    picture, _, left, right = boxes = [axes[k].get_window_extent() for k in (0, 2, 1, 3)]
    assert not any(box.overlaps(other) for k, box in enumerate(boxes) for other in boxes[k + 1 :])
    for bar, box in ((axes[1], left), (axes[3], right)):
        figure = bar.figure
        assert 0 < (box.y0 - picture.y1) / figure.dpi < 0.3
        assert all(text.get_window_extent().x1 < figure.bbox.x1 for text in bar.texts)
    assert [words for _, words in heat.y.ticks] == ["layer0.weight", "layer1.weight", "layer2.weight"]
    assert not heat.y.upwards
    # A click on the middle of a row is a click on its number, and its histograms are shown.
    assert (heat.click.control, heat.click.along) == ("layer", "y")
    (histogram,) = layers_of(scene, Heatmap, 2)
    rows = histogram.values.shape[-2]
    for layer in range(3):
        shares = histogram.chosen("values", scene.state(layer=layer))
        assert shares.shape == (rows, 10)
        assert set(shares[:, 0]) == {0, 2000, 6000}  # of 10,000
        zeros, positive = np.flatnonzero((shares == 2000).all(axis=1)), np.flatnonzero((shares == 6000).all(axis=1))
        assert len(positive) == 1
        assert len(zeros) > 2  # bars of exact zeros are higher than the others
        ticks = {words: at for at, words in scene.panels[2].y.ticks}
        assert zeros[1] < ticks["0"] < zeros[-1] + 1
        # 2**(layer - 18) to 2**(layer - 17), on the axis as its ticks say.
        at = np.interp(np.log10(1.5 * 2.0 ** (layer - 18)), *zip(*_powers(ticks), strict=True))
        assert abs(at - positive[0] - 0.5) < 0.6


def _powers(ticks):
    """Positive ticks with a number: logarithm and place; two of them are a line."""
    known = sorted((np.log10(float(words)), at) for words, at in ticks.items() if words != "0" and words[0] != "−")
    (a, x), (b, y) = known[0], known[-1]
    slope = (y - x) / (b - a)
    return [(-30.0, x + (-30 - a) * slope), (30.0, x + (30 - a) * slope)]


def test_several_kinds_of_histograms_can_be_chosen_and_weights_are_shown():
    run = make_run(60, 3)
    counts = np.zeros((6, 3, 65))
    counts[:, :, [20, 50]] = 5
    run.add_tensors(range(1, 61, 10), {"weight_histogram": counts})
    for view in (TensorHeatmap(run), Dashboard(run)):
        scene = view.scene()
        control = next(control for control in scene.controls if control.name == "histogram")
        assert control.values == ["gradient", "weight"]
        (image,) = (layer for layer in layers_of(scene, Heatmap) if layer.by == ("histogram", "layer"))
        shares = image.chosen("values", scene.state(histogram=1, layer=2))
        assert sorted(set(shares.ravel())) == [0, 5000]
        assert set(image.chosen("values", scene.state(histogram=0, layer=2)).ravel()) == {0, 2000, 6000}
    run = make_run(60, 3, histograms=False)
    run.add_tensors(range(1, 61, 10), {"weight_histogram": counts})
    assert [panel.y.label for panel in TensorHeatmap(run).scene().panels if panel.frame][1] == "values in the weight"


def test_without_histograms_a_layer_shows_its_norms():
    scene = TensorHeatmap(make_run(50, 3, histograms=False)).scene()
    gradient = named_layers(scene, "gradient")
    for layer in range(3):
        np.testing.assert_allclose(gradient.chosen("y", scene.state(layer=layer)), 10.0**-layer, rtol=1e-5)


def test_gradients_that_are_not_finite_are_crosses_on_empty_cells():
    run = Run("sick", ["a", "b"])
    norms, bad = np.ones((20, 2)), np.zeros((20, 2))
    norms[7, 1], bad[7, 1] = np.inf, 3
    run.add_tensors(range(1, 21), {"gradient_norm": norms, "gradient_nonfinite": bad})
    scene = TensorHeatmap(run).scene()
    (crosses,) = layers_of(scene, Points, 0)[:1]
    assert crosses.name == "not finite"
    np.testing.assert_allclose([crosses.x, crosses.y], [[8], [1]])
    (image,) = layers_of(scene, Heatmap, 0)
    assert np.argwhere(np.isnan(image.values)).tolist() == [[1, 7]]
    assert len(scene.panels) == 1 + 1  # of one quantity the renderer's own bar, and no histograms but norms


def test_crosses_can_be_told_apart_however_many_cells_they_stand_for():
    bad = np.random.default_rng(4).random((512, 148)) < 0.03
    bad[200:260] = True
    bad[:, 9] = True
    run = Run("sick", [f"layer{i}.weight" for i in range(148)])
    run.add_tensors(range(1, 513), {"gradient_norm": np.where(bad, np.nan, 1.0), "gradient_nonfinite": bad.astype(float)})
    scene = TensorHeatmap(run).scene()
    crosses, rows = layers_of(scene, Points, 0)[0], Rows(run)
    group = [rows.row_of(name) for name in run.parameters]
    n = len(rows.names)
    cells = np.zeros((n, 256), dtype=bool)
    for i in range(148):
        cells[group[i]] |= bad.reshape(256, 2, 148).any(axis=1)[:, i]
    column, row = ((crosses.x - 1.5) / 2).round().astype(int), crosses.y.astype(int)
    assert cells[row, column].all()
    for i in range(n):
        own, there = np.sort(column[row == i]), np.flatnonzero(cells[i])
        assert len(own) <= 32
        assert (np.diff(own) >= 4).mean() > 0.9  # columns, of which a cross takes 3
        assert np.abs(there[:, None] - own).min(axis=1).max() <= 8


def test_the_peak_of_steps_that_share_a_cell_is_seen():
    run = Run("long", ["a"])
    norms = np.ones((10_000, 1))
    norms[5_000:5_100:3] = 100.0
    run.add_tensors(range(1, 10_001), {"gradient_norm": norms})
    scene = TensorHeatmap(run).scene()
    (image,) = layers_of(scene, Heatmap, 0)
    assert image.values.shape == (1, 256)
    np.testing.assert_allclose(np.flatnonzero(image.values[0] > 50) / 256, 0.505, atol=0.008)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ([f"block{i}.{part}" for i in range(50) for part in ("weight", "bias")], [f"block{i}" for i in range(50)]),
        ([f"net.{i // 4}.{i % 4}.weight" for i in range(200)], [f"net.{i}" for i in range(50)]),
        ([f"w{i}" for i in range(100)], [f"w{i} ... w{i + 1}" for i in range(0, 100, 2)]),
    ],
)
def test_many_tensors_are_put_together(names, expected):
    run = Run("many", names)
    norms = np.ones((30, len(names)))
    run.add_tensors(range(1, 31), {"gradient_norm": norms, "cosine": norms * np.linspace(-1, 0, len(names))})
    rows = Rows(run)
    assert rows.names == expected
    each = len(names) // len(expected)
    np.testing.assert_allclose(rows.of("gradient_norm", norms), each**0.5)
    cosine = np.linspace(-1, 0, len(names)).reshape(-1, each).mean(axis=1)
    np.testing.assert_allclose(rows.of("cosine", norms * np.linspace(-1, 0, len(names)))[3], cosine)
    np.testing.assert_allclose(
        rows.of("update_ratio", norms * np.arange(len(names)))[0], np.arange(len(names))[each - 1 :: each]
    )
    assert [words for _, words in TensorHeatmap(run).scene().panels[0].y.ticks] == expected  # all, for what is pointed at


def test_update_ratios_name_the_worst_of_many_tensors():
    run = Run("many", [f"w{i}" for i in range(20)])
    ratios = 10.0 ** np.random.default_rng(1).normal(-3, 0.1, (60, 20))
    ratios[:, 7] = 0.3
    run.add_tensors(range(1, 61), {"update_ratio": ratios})
    view = UpdateRatioView(run)
    scene = view.scene()
    np.testing.assert_allclose(named_layers(scene, "w7").y, 0.3, rtol=1e-6)
    expected = np.quantile(ratios, [0.1, 0.5, 0.9], axis=1, method="nearest")
    band = named_layers(scene, "80 % of tensors")
    np.testing.assert_allclose([band.low, named_layers(scene, "median").y, band.high], expected, rtol=1e-5)
    assert len([line for line in layers_of(scene, Line) if line.name.startswith("w")]) == 5
    assert "farthest from 1e-3: w7 0.3," in view.describe()
    usual = named_layers(scene, "usual")
    assert usual.low[0] < 1e-3 < usual.high[0]
    few = UpdateRatioView(make_run(20, 3)).scene()
    assert [line.name for line in layers_of(few, Line)] == ["layer0.weight", "layer1.weight", "layer2.weight"]


def test_single_weights_and_the_norms_of_the_chosen_tensor():
    run = make_run(40, 3)
    for step in range(1, 41):
        run.add_weights(step, {"layer1.weight": np.array([step / 10, -1.0])})
    scene = WeightsView(run).scene()
    layer = scene.controls[0]
    assert layer.index == 1  # the one that has some
    first = named_layers(scene, "followed weight 1")
    np.testing.assert_allclose(first.chosen("y", scene.state()), np.arange(1, 41) / 10, rtol=1e-6)
    assert np.isnan(first.chosen("y", scene.state(layer=0))).all()
    np.testing.assert_allclose(named_layers(scene, "gradient").chosen("y", scene.state(layer=2)), 0.01, rtol=1e-5)
    cosine = layers_of(scene, Line, 1)[0]
    np.testing.assert_allclose(cosine.chosen("y", scene.state()), -0.5)


def test_of_many_tensors_each_can_be_chosen():
    names = [f"net.{i // 4}.{i % 4}.weight" for i in range(200)]
    run = make_run(300, 200, names=names)
    rows = Rows(run)
    assert rows.choices == [*rows.names, *names]
    for view in (TensorHeatmap(run), WeightsView(run), Dashboard(run)):
        scene = view.scene()
        layer = next(control for control in scene.controls if control.name == "layer")
        assert layer.values == rows.choices
        assert len(scene.to_bytes()) < 2_000_000
    norms = named_layers(WeightsView(run).scene(), "gradient")
    single, together = layer.values.index("net.0.2.weight"), layer.values.index("net.0")
    np.testing.assert_allclose(norms.y[single], 0.01, rtol=1e-5)
    np.testing.assert_allclose(norms.y[together], np.sqrt(1 + 0.1**2 + 0.01**2 + 0.001**2), rtol=1e-5)
    scene = TensorHeatmap(run).scene()
    (ring,) = (layer for layer in layers_of(scene, Points, 0) if layer.marker == "ring")
    assert [ring.chosen("y", scene.state(layer=k)).tolist() for k in (single, together)] == [[0], [0]]
    histogram = layers_of(scene, Heatmap, 2)[0]
    shares = histogram.chosen("values", scene.state(layer=single))
    assert set(shares[:, 0]) == {0, 2000, 6000}
