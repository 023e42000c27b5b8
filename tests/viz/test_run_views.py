"""Views of recorded runs: that what is drawn is what was planted, for healthy, sick, short and long runs."""

import numpy as np
import pytest
import torch

import tristep

pytest.importorskip("matplotlib")

from tristep.viz import (
    Band,
    Dashboard,
    Heatmap,
    Line,
    LossView,
    Points,
    Recorder,
    RefLine,
    Run,
    RunSet,
    Series,
    TensorHeatmap,
    Text,
    UpdateRatioView,
    WeightsView,
)
from tristep.viz.views.rows import Rows

VIEWS = (LossView, TensorHeatmap, UpdateRatioView, WeightsView, Dashboard)
QUANTITIES = ("weight_norm", "gradient_norm", "update_norm", "update_ratio", "cosine", "gradient_nonfinite")
EDGES = 2.0 ** np.arange(-28, 3)


def _run(steps=120, tensors=4, name="run", names=None, every=1, histograms=True, loss=None):
    """A run whose tensor number i has the gradient norm 10**-i at every step, and a loss of 1 / step."""
    run = Run(name, names or [f"layer{i}.weight" for i in range(tensors)], EDGES)
    number = np.arange(1, steps + 1)
    run.scalars["loss"], run.scalars["learning_rate"] = Series(), Series()
    run.scalars["loss"].extend(number, 1 / number if loss is None else loss)
    run.scalars["learning_rate"].extend(number, 0.1 * number / steps)
    measured = number[::every]
    plane = np.ones((len(measured), tensors))
    levels = plane * 10.0 ** -np.arange(tensors)
    run.add_tensors(
        measured,
        {
            "weight_norm": plane,
            "gradient_norm": levels,
            "update_norm": plane * 1e-3,
            "update_ratio": plane * 1e-3,
            "cosine": plane * -0.5,
            "gradient_nonfinite": plane * 0,
        },
    )
    if histograms:
        counts = np.zeros((len(measured[::10]), tensors, 32))
        for i in range(tensors):
            counts[:, i, 10 + i % 20], counts[:, i, 11 + i % 20] = 75, 25
        run.add_tensors(measured[::10], {"gradient_histogram": counts})
    return run


def _layers(scene, kind, panel=None):
    panels = scene.panels if panel is None else [scene.panels[panel]]
    return [layer for each in panels for layer in each.layers if isinstance(layer, kind)]


def _named(scene, name):
    (found,) = (layer for panel in scene.panels for layer in panel.layers if layer.name == name)
    return found


def test_losses_are_drawn_as_they_were_and_averaged():
    view = LossView(RunSet([_run(name="a"), _run(200, name="b")]), smoothing=5)
    scene = view.scene()
    a, b = _named(scene, "a"), _named(scene, "b")
    control = scene.controls[0]
    assert control.values[control.index] == 5
    raw = [line for line in _layers(scene, Line, 0) if not line.name]
    np.testing.assert_allclose(raw[0].y, 1 / np.arange(1, 121), rtol=1e-6)
    np.testing.assert_array_equal(raw[1].x, np.arange(1, 201))
    np.testing.assert_allclose(a.chosen("y", scene.state(smoothing=control.values.index(0))), raw[0].y, rtol=1e-6)
    # The average is a geometric one of what came before, here by its definition.
    losses, n = 1 / np.arange(1, 121), np.arange(120)
    weights = np.tril(np.exp((n - n[:, None]) / 5))
    np.testing.assert_allclose(a.chosen("y", scene.state()), np.exp(weights @ np.log(losses) / weights.sum(1)), rtol=5e-3)
    assert (a.style, b.style) == (0, 1)
    # Their learning rates below, in the colours of their losses.
    rates = _layers(scene, Line, 1)
    np.testing.assert_allclose(rates[1].y[1::2], 0.1 * np.arange(1, 201) / 200, rtol=1e-6)
    assert [rate.style for rate in rates] == [0, 1]
    assert scene.panels[0].y.scale == "log"
    assert (scene.panels[0].x.low, scene.panels[0].x.high) == (scene.panels[1].x.low, scene.panels[1].x.high)
    assert "a: 120 steps, loss from 1 to 0.00833" in view.describe()


def test_a_spike_stays_a_spike_and_changes_nothing_before_it():
    losses = np.exp(0.1 * np.random.default_rng(1).standard_normal(1000))
    averages = []
    for spike in (1.0, 1e4):
        losses[500] = spike
        run = Run()
        for step, loss in enumerate(losses, 1):
            run.add_scalars(step, {"loss": loss})
        scene = LossView(run, smoothing=50).scene()
        averages.append(np.asarray(_named(scene, "loss").chosen("y", scene.state())))
    np.testing.assert_array_equal(averages[0][:500], averages[1][:500])
    raised = averages[1] / averages[0]
    assert raised.max() < 1e4**0.03  # by a fiftieth of its height on this scale
    assert raised[700:].max() < 1.01


@pytest.mark.parametrize(
    ("steps", "each", "width"), [(30, 1, 2), (168, 1, 5), (1000, 1, 20), (5000, 100, 200), (20_000, 1, 500)]
)
def test_the_average_is_wide_enough_for_the_trend_to_be_seen(steps, each, width):
    number = np.arange(each, steps + 1, each)
    loss = np.exp(-number / steps) * np.exp(0.3 * np.random.default_rng(1).standard_normal(len(number)))
    run = Run()
    run.scalars["loss"] = Series()
    run.scalars["loss"].extend(number, loss)
    scene = LossView(run).scene()
    control = scene.controls[0]
    assert control.values[control.index] == width
    raw, strong = _layers(scene, Line)
    middle = np.exp(-raw.x / steps)  # of what the noise is added to
    off = [np.std(np.log(each / middle)) for each in (raw.y, strong.chosen("y", scene.state()))]
    assert off[1] < 0.5 * off[0]
    assert raw.alpha < 0.5 < strong.alpha
    assert raw.width < strong.width


def test_a_rate_holds_until_the_next_one():
    run = Run()
    for step, rate in [(10, 0.1), (20, 0.1), (30, 0.01), (40, 0.01), (50, 0.02)]:
        run.add_scalars(step, {"loss": 1.0, "learning_rate": rate})
    for view, panel in ((LossView(run), 1), (Dashboard(run), 2)):
        (line,) = _layers(view.scene(), Line, panel)
        np.testing.assert_allclose(line.x, [10, 30, 30, 50, 50, 50])
        np.testing.assert_allclose(line.y, [0.1, 0.1, 0.01, 0.01, 0.02, 0.02])


def test_a_point_of_many_steps_shows_how_far_they_reached():
    run = Run()
    number = np.arange(1, 10_001)
    run.scalars["loss"] = Series()
    run.scalars["loss"].extend(number, 2.0 + number % 2)
    scene = LossView(run).scene()
    (band,) = _layers(scene, Band)
    assert 1000 < len(band.x) <= 2048
    assert set(band.low) == {2.0}
    assert set(band.high) == {3.0}
    (strong,) = (line for line in _layers(scene, Line) if line.name)
    np.testing.assert_allclose(strong.chosen("y", scene.state()), 2.5, atol=1e-4)


def test_steps_that_are_not_finite_are_marked_and_leave_gaps():
    loss = 1 / np.arange(1.0, 121)
    loss[[30, 31, 70]] = np.nan, np.inf, 1e300
    scene = LossView(_run(loss=loss)).scene()
    crosses = _named(scene, "not finite")
    assert crosses.marker == "cross"
    assert crosses.x.tolist() == [31, 32]
    assert scene.panels[0].y.low < crosses.y[0] < 1 / 120
    (raw,) = (line for line in _layers(scene, Line, 0) if not line.name)
    assert np.flatnonzero(np.isnan(raw.y)).tolist() == [30, 31, 70]


def test_epochs_and_seconds():
    run = _run(120)
    for name, values in (("epoch", np.arange(120) // 40), ("seconds", np.arange(120) * 0.5)):
        run.scalars[name] = Series()
        run.scalars[name].extend(np.arange(1, 121), values)
    view = LossView(run)
    scene = view.scene()
    assert _named(scene, "epochs").at.tolist() == [41, 81]
    control = next(control for control in scene.controls if control.name == "axis")
    assert control.values == ["step", "epoch", "seconds"]
    assert control.remote
    view.on_control("axis", "seconds", 2)
    scene = view.scene()
    assert scene.panels[1].x.label == "seconds"
    np.testing.assert_allclose(_named(scene, "loss").x, np.arange(120) * 0.5)
    view.on_control("axis", "epoch", 1)
    np.testing.assert_allclose(_named(view.scene(), "loss").x, np.arange(120) / 40)
    with pytest.raises(ValueError, match="axis='epoch': no scalar of this name was recorded"):
        LossView(_run(), axis="epoch")


def test_a_heat_map_shows_each_tensor_in_its_row_and_its_values_at_the_bar():
    view = TensorHeatmap(_run(100, 3), "weight_norm")
    scene = view.scene()
    heat, bar, _, below = scene.panels
    quantity = scene.controls[0]
    assert quantity.values[quantity.index] == "norm of the weight"
    (image,) = _layers(scene, Heatmap, 0)
    gradient = scene.state(quantity=quantity.values.index("norm of the gradient"))
    values = image.chosen("values", gradient)
    assert values.shape == (3, 100)
    np.testing.assert_allclose(values, np.array([1.0, 0.5, 0.0])[:, None] * np.ones(100), atol=1e-6)  # 1, 0.1 and 0.01
    for chosen, label in ((gradient, "norm of the gradient"), (scene.state(), "norm of the weight")):
        assert [words.chosen("texts", chosen) for words in bar.layers if isinstance(words, Text)][-1] == label
    texts = [words.chosen("texts", gradient) for words in bar.layers if isinstance(words, Text)]
    assert texts == ["0.01", "0.1", "1", "norm of the gradient"]
    texts = [str(words.texts) for words in below.layers if isinstance(words, Text)]
    assert texts == ["0.0001", "0.01", "1", "share of elements"]
    # The bars are right next to what they explain, and their labels end within the picture.
    axes = view.figure().axes
    for picture, bar in ((axes[0], axes[1]), (axes[2], axes[3])):
        figure = picture.figure
        boxes = [each.get_window_extent() for each in (picture, bar)]
        assert 0 < (boxes[1].x0 - boxes[0].x1) / figure.dpi < 0.5
        assert all(text.get_window_extent().x1 < figure.bbox.x1 for text in bar.texts)
    assert [words for _, words in heat.y.ticks] == ["layer0.weight", "layer1.weight", "layer2.weight"]
    assert not heat.y.upwards
    # A click on the middle of a row is a click on its number, and its histograms are shown.
    assert (heat.click.control, heat.click.along) == ("layer", "y")
    (histogram,) = _layers(scene, Heatmap, 2)
    for layer in range(3):
        shares = histogram.chosen("values", scene.state(layer=layer))
        assert shares.shape == (32, 10)
        np.testing.assert_allclose(shares[10 + layer], 0.75, rtol=1e-6)
        np.testing.assert_allclose(shares[11 + layer], 0.25, rtol=1e-6)
        assert np.isfinite(shares).sum() == 20
    low, high = histogram.y
    np.testing.assert_allclose(low + (high - low) * np.array([1, 31]) / 32, np.log10(EDGES[[0, -1]]), rtol=1e-6)


def test_without_histograms_a_layer_shows_its_norms():
    scene = TensorHeatmap(_run(50, 3, histograms=False)).scene()
    gradient = _named(scene, "norm of the gradient")
    for layer in range(3):
        np.testing.assert_allclose(gradient.chosen("y", scene.state(layer=layer)), 10.0**-layer, rtol=1e-5)


def test_gradients_that_are_not_finite_are_crosses_on_empty_cells():
    run = Run("sick", ["a", "b"])
    norms, bad = np.ones((20, 2)), np.zeros((20, 2))
    norms[7, 1], bad[7, 1] = np.inf, 3
    run.add_tensors(range(1, 21), {"gradient_norm": norms, "gradient_nonfinite": bad})
    scene = TensorHeatmap(run).scene()
    crosses = _named(scene, "not finite")
    np.testing.assert_allclose([crosses.x, crosses.y], [[8], [1]])
    (image,) = _layers(scene, Heatmap, 0)
    assert np.argwhere(np.isnan(image.values)).tolist() == [[1, 7]]
    assert len(scene.panels) == 1 + 1  # of one quantity the renderer's own bar, and no histograms but norms


def test_crosses_can_be_told_apart_however_many_cells_they_stand_for():
    bad = np.random.default_rng(4).random((512, 148)) < 0.03
    bad[200:260] = True
    bad[:, 9] = True
    run = Run("sick", [f"layer{i}.weight" for i in range(148)])
    run.add_tensors(range(1, 513), {"gradient_norm": np.where(bad, np.nan, 1.0), "gradient_nonfinite": bad.astype(float)})
    scene = TensorHeatmap(run).scene()
    crosses, rows = _named(scene, "not finite"), Rows(run)
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
        assert np.abs(there[:, None] - own).min(axis=1).max() < 8


def test_the_peak_of_steps_that_share_a_cell_is_seen():
    run = Run("long", ["a"])
    norms = np.ones((10_000, 1))
    norms[5_000:5_100:3] = 100.0
    run.add_tensors(range(1, 10_001), {"gradient_norm": norms})
    scene = TensorHeatmap(run).scene()
    (image,) = _layers(scene, Heatmap, 0)
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
    assert len(TensorHeatmap(run).scene().panels[0].y.ticks) <= 32


def test_update_ratios_name_the_worst_of_many_tensors():
    run = Run("many", [f"w{i}" for i in range(20)])
    ratios = 10.0 ** np.random.default_rng(1).normal(-3, 0.1, (60, 20))
    ratios[:, 7] = 0.3
    run.add_tensors(range(1, 61), {"update_ratio": ratios})
    view = UpdateRatioView(run)
    scene = view.scene()
    np.testing.assert_allclose(_named(scene, "w7").y, 0.3, rtol=1e-6)
    expected = np.quantile(ratios, [0.1, 0.5, 0.9], axis=1, method="nearest")
    band = _named(scene, "80 % of tensors")
    np.testing.assert_allclose([band.low, _named(scene, "median").y, band.high], expected, rtol=1e-5)
    assert len([line for line in _layers(scene, Line) if line.name.startswith("w")]) == 5
    assert "farthest from 1e-3: w7 0.3," in view.describe()
    usual = _named(scene, "usual")
    assert usual.low[0] < 1e-3 < usual.high[0]
    few = UpdateRatioView(_run(20, 3)).scene()
    assert [line.name for line in _layers(few, Line)] == ["layer0.weight", "layer1.weight", "layer2.weight"]


def test_single_weights_and_the_norms_of_the_chosen_tensor():
    run = _run(40, 3)
    for step in range(1, 41):
        run.add_weights(step, {"layer1.weight": np.array([step / 10, -1.0])})
    scene = WeightsView(run).scene()
    layer = scene.controls[0]
    assert layer.index == 1  # the one that has some
    first = _named(scene, "followed weight 1")
    np.testing.assert_allclose(first.chosen("y", scene.state()), np.arange(1, 41) / 10, rtol=1e-6)
    assert np.isnan(first.chosen("y", scene.state(layer=0))).all()
    np.testing.assert_allclose(_named(scene, "norm of the gradient").chosen("y", scene.state(layer=2)), 0.01, rtol=1e-5)
    cosine = _layers(scene, Line, 1)[0]
    np.testing.assert_allclose(cosine.chosen("y", scene.state()), -0.5)


def test_one_slider_moves_a_line_through_all_panels_of_a_dashboard():
    view = Dashboard(_run(500, 4))
    scene = view.scene()
    step = scene.controls[0]
    assert step.name == "step"
    assert step.index == len(step.values) - 1
    assert step.values[-1] == 500
    for panel in scene.panels:
        if panel.frame:
            marks = [layer for layer in panel.layers if isinstance(layer, RefLine) and layer.by == ("step",)]
            assert [mark.chosen("at", scene.state(step=30)).tolist() for mark in marks] == [[step.values[30]]]
    labels = [panel.y.label for panel in scene.panels if panel.frame]
    assert labels == ["loss", "learning rate", "", "update norm / weight norm", "absolute value in the gradient", "norm"]
    (readout,) = _layers(scene, Text)
    at = int(step.values[30])
    assert readout.chosen("texts", scene.state(step=30)) == f"step {at}   loss {1 / at:.4g}   learning rate {at / 5e3:.4g}"
    clicks = [(panel.click.control, panel.click.along) for panel in scene.panels if panel.frame]
    assert clicks == [("step", "x"), ("step", "x"), ("layer", "y"), ("step", "x"), ("step", "x"), ("step", "x")]
    (heat,) = (image for image in _layers(scene, Heatmap) if image.label == "norm of the gradient")
    np.testing.assert_allclose(heat.values[:, 17], [1, 0.1, 0.01, 0.001], rtol=0.1)  # which colours end at percentiles


@pytest.mark.parametrize("histograms", [1, 3])
def test_a_step_is_as_far_right_in_the_histograms_of_a_dashboard_as_elsewhere(histograms):
    run = _run(30, 2, histograms=False)
    steps = np.arange(1, 30, 10)[:histograms]
    run.edges = 10.0 ** np.arange(-15.0, 16.0)
    run.add_tensors(steps, {"gradient_histogram": np.ones((histograms, 2, 32))})
    panels = {panel.y.label: panel for panel in Dashboard(run).scene().panels if panel.frame}
    histogram, loss = panels["absolute value in the gradient"].x, panels["loss"].x
    assert (histogram.low, histogram.high) == (loss.low, loss.high)


def test_a_view_of_a_recorder_takes_what_is_new():
    net = torch.nn.Linear(2, 1)
    trainer = tristep.Trainer(net, "sgd", {"learning_rate": 0.1})
    recorder = Recorder(trainer)
    views = [kind(recorder) for kind in VIEWS]
    assert all(_layers(view.scene(), Text) for view in views)  # which say that there is nothing yet
    for _ in range(30):
        trainer.zero_grad()
        loss = net(torch.ones(4, 2)).square().mean()
        loss.backward()
        trainer.step(1)
        recorder.step(loss=loss)
    for view in views:
        view.refresh()
    np.testing.assert_array_equal(_named(views[0].scene(), "loss").x, np.arange(1, 31))
    (image,) = _layers(views[1].scene(), Heatmap, 0)
    assert image.values.shape[-2:] == (2, 30)
    assert views[4].scene().controls[0].values[-1] == 30
    # Histograms are kept from frame to frame until there are more.
    assert views[4].describe().startswith("run: 30 steps, loss from ")


RUNS = {
    "nothing": lambda: Run("nothing"),
    "one step": lambda: _run(1, 3),
    "one tensor": lambda: _run(30, 1),
    "nothing finite": lambda: _nowhere_finite(),
    "zeros": lambda: _zeros(),
    "200 tensors": lambda: _run(30, 200, names=[f"block{i // 8}.sub{i % 8}.weight" for i in range(200)]),
    "100,000 steps": lambda: _run(100_000, 3, histograms=False),
    "every 16th": lambda: _run(100, 3, every=16),
    "losses below 0": lambda: _run(50, 2, loss=-np.arange(50.0)),
}


def _nowhere_finite():
    run = _run(60, 3, loss=np.full(60, np.nan), histograms=False)
    for name in QUANTITIES:
        run.tensors[name] = Series((3,), np.float32)
        run.tensors[name].extend(range(1, 61), np.full((60, 3), 5.0 if name == "gradient_nonfinite" else np.nan))
    return run


def _zeros():
    run = _run(60, 3, loss=np.zeros(60), histograms=False)
    for name in QUANTITIES:
        run.tensors[name] = Series((3,), np.float32)
        run.tensors[name].extend(range(1, 61), np.zeros((60, 3)))
    return run


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", RUNS)
def test_all_runs_can_be_drawn_with_few_points(name):
    run = RUNS[name]()
    for kind in VIEWS:
        view = kind(run)
        scene = view.scene()
        assert scene.description.startswith(f"{run.name}: ")
        for layer in _layers(scene, (Line, Band, Points)):
            assert layer.x.shape[-1] <= 2048
        scene.to_bytes()
        figure = view.figure()
        assert len(figure.axes) >= len(scene.panels)
        figure.canvas.draw()


def test_what_is_no_run_is_refused():
    with pytest.raises(TypeError, match="runs must be a Recorder, a Run, a RunSet or several of these, got int"):
        LossView(3)
    for kind in VIEWS[1:]:
        with pytest.raises(TypeError, match="run must be a Recorder or a Run, got int"):
            kind(3)
        with pytest.raises(TypeError, match=r"got RunSet: give one of its runs, such as runs\['a'\]"):
            kind(RunSet([_run(3, name="a")]))
    with pytest.raises(ValueError, match="runs is empty"):
        LossView([])
    with pytest.raises(ValueError, match="scalars is empty"):
        LossView(_run(3), scalars=())
    with pytest.raises(ValueError, match="smoothing=-1: must be a number of steps, 0 or more"):
        LossView(_run(3), smoothing=-1)
    with pytest.raises(ValueError, match="scale='logarithmic': must be one of 'log', 'linear'"):
        LossView(_run(3), scale="logarithmic")
    with pytest.raises(ValueError, match="quantity='norm': must be one of 'gradient_norm'"):
        TensorHeatmap(_run(3), "norm")
    with pytest.raises(ValueError, match="quantity='norm': must be one of 'gradient_norm'"):
        Dashboard(_run(3), "norm")
