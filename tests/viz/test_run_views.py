"""Views of recorded runs: losses, rates and dashboards show what was planted, for runs of any kind and length."""

import warnings

import numpy as np
import pytest
import torch
from drawn_scenes import rendered, words_of
from planted_runs import layers_of, make_run, mean_of_last_steps, named_layers

import tristep
from tristep.viz import (
    Axis,
    Band,
    Dashboard,
    Heatmap,
    Line,
    LiveLoop,
    LossView,
    Panel,
    Points,
    Recorder,
    RefLine,
    Run,
    RunSet,
    Scene,
    ScheduleView,
    Series,
    TensorHeatmap,
    Text,
    UpdateRatioView,
    WeightsView,
    draw,
)
from tristep.viz.views.run_view import OneRunView

VIEWS = (LossView, TensorHeatmap, UpdateRatioView, WeightsView, Dashboard)
QUANTITIES = ("weight_norm", "gradient_norm", "update_norm", "update_ratio", "cosine", "gradient_nonfinite")


def test_losses_are_drawn_as_they_were_and_averaged():
    rng = np.random.default_rng(2)
    losses = np.exp(rng.normal(0, 0.3, 120)), np.exp(rng.normal(0, 0.3, 200))
    runs = [make_run(len(loss), name=name, loss=loss) for name, loss in zip("ab", losses, strict=True)]
    view = LossView(RunSet(runs), smoothing=11)
    scene = view.scene()
    a, b = named_layers(scene, "a"), named_layers(scene, "b")
    control = scene.controls[0]
    assert control.values[control.index] == 11
    raw = [line for line in layers_of(scene, Line, 0) if not line.name]
    np.testing.assert_allclose(raw[0].y, losses[0], rtol=1e-6)
    np.testing.assert_array_equal(raw[1].x, np.arange(1, 201))
    np.testing.assert_allclose(a.chosen("y", scene.state(smoothing=control.values.index(0))), raw[0].y, rtol=1e-6)
    np.testing.assert_allclose(a.chosen("y", scene.state()), mean_of_last_steps(losses[0], 11), rtol=1e-6)
    assert (a.style, b.style) == (0, 1)
    # Their learning rates below, in the colours of their losses.
    rates = layers_of(scene, Line, 1)
    np.testing.assert_allclose(rates[1].y[1::2], 0.1 * np.arange(1, 201) / 200, rtol=1e-6)
    assert [rate.style for rate in rates] == [0, 1]
    assert scene.panels[0].y.scale == "log"
    assert (scene.panels[0].x.low, scene.panels[0].x.high) == (scene.panels[1].x.low, scene.panels[1].x.high)
    said = f"loss from {losses[0][0]:.3g} to {losses[0][-1]:.3g} (average of 11 steps: {losses[0][-11:].mean():.3g})"
    assert f"a: 120 steps, {said}" in view.describe()


@pytest.mark.parametrize("own", ["My own words.", None], ids=["own", "the same"])
def test_a_view_of_one_s_own_keeps_its_words_before_those_about_the_run(own):
    class Mine(OneRunView):
        def scene(self):
            words = self.describe() if own is None else own
            return self.said(Scene([Panel(Axis("x", 0, 1), Axis("y", 0, 1), [])], description=words))

    view = Mine(_sick())
    about = OneRunView.description(view).splitlines()
    assert about[0].startswith("run: 120 steps")
    assert len(about) == 1 + len(WARNED)
    expected = about if own is None else [own, *about]
    assert view.describe().splitlines() == view.scene().description.splitlines() == expected


def _strong(scene):
    (line,) = (line for line in layers_of(scene, Line, None) if line.by == ("smoothing",))
    return line


def _averages(scene):
    return np.asarray(_strong(scene).chosen("y", scene.state()))


def _of_losses(losses, number=None):
    run = Run()
    run.scalars["loss"] = Series()
    run.scalars["loss"].extend(range(1, len(losses) + 1) if number is None else number, losses)
    return run


@pytest.mark.parametrize("view", [LossView, Dashboard, lambda run: ScheduleView(lambda n: 0.1, 9, loss=run)])
def test_the_strong_line_is_the_mean_of_the_losses_with_those_of_0(view):
    """As of a hinge loss, on a log scale, without a gap."""
    losses = np.random.default_rng(0).uniform(0.5, 1.5, 1000)
    losses[::10] = 0.0
    run = make_run(1000, loss=losses)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scene = view(run).scene()
        draw(scene, {})
    smoothing = next(control for control in scene.controls if control.name == "smoothing")
    width, steps = smoothing.values[smoothing.index], np.arange(1000)
    np.testing.assert_allclose(_averages(scene), mean_of_last_steps(losses, width), rtol=1e-6)
    rings = named_layers(scene, "0 or below")
    panel = next(panel for panel in scene.panels if any(layer is rings for layer in panel.layers))
    assert panel.y.scale == "log"
    assert rings.marker == "ring"
    assert set(np.asarray(rings.x) - 1) <= set(steps[::10])
    assert np.asarray(rings.x).min() == 1
    assert (np.asarray(rings.y) < np.sqrt(panel.y.low * panel.y.high)).all()


SCATTERED = np.array([*range(1, 40), *range(40, 160, 3), *range(300, 340)])


@pytest.mark.parametrize("width", [0, 1, 7, 50, 1000])
@pytest.mark.parametrize(
    "number", [np.arange(1, 301), np.arange(60, 3000, 60), SCATTERED], ids=["each step", "every 60th", "scattered"]
)
def test_an_average_is_over_steps_however_few_of_them_were_recorded(number, width):
    loss = np.random.default_rng(3).uniform(0.1, 2.0, len(number))
    loss[[0, 7, 20, 21]] = np.nan
    run = _of_losses(loss, number)
    drawn = _averages(LossView(run, smoothing=width, scale="linear").scene())
    expected = np.where(np.isfinite(loss), mean_of_last_steps(loss, max(width, 1), number), np.nan)
    np.testing.assert_allclose(drawn, expected, rtol=1e-6)
    said = f" (average of {width} step{'s' * (width != 1)}: {expected[-1]:.3g})" if width else ""
    words = LossView(run, smoothing=width).describe().splitlines()[0]
    assert words.endswith(f"loss from {loss[1]:.3g} to {loss[-1]:.3g}{said}")


@pytest.mark.parametrize("each", [1, 5])
def test_an_average_of_a_long_run_is_that_of_its_steps_and_its_words_tell_means_from_losses(each):
    number = np.arange(each, 10_003 * each, each)
    losses = 1 + np.random.default_rng(4).uniform(0, 3, 10_002)
    losses[5::8] = np.inf  # of the values of a block, which has eight
    run = _of_losses(losses, number)
    last, finite = run.scalars["loss"].curve().last, np.where(np.isfinite(losses), losses, np.nan)
    drawn = _averages(LossView(run, smoothing=200 * each).scene())
    expected = mean_of_last_steps(losses, 200 * each, number)[last // each - 1]
    np.testing.assert_allclose(drawn[:-1], expected[:-1], rtol=1e-6)  # of whole blocks; the last one has two values
    first, end = np.nanmean(finite[:8]), np.nanmean(finite[-202:])
    view = LossView(run, smoothing=202 * each)
    assert _averages(view.scene())[-1] == pytest.approx(end, rel=1e-6)
    said = f"{first:.3g} (mean of steps {each} to {8 * each}) to {losses[-1]:.3g} (average of {202 * each} steps: {end:.3g})"
    assert f"run: {number[-1]:,} steps, loss from {said}" in view.describe()


def test_the_end_of_a_line_has_no_more_noise_than_its_middle_and_a_spike_shows_after_its_cause():
    rng, ends = np.random.default_rng(0), []
    for _ in range(20):
        drawn = np.log(_averages(LossView(_of_losses(np.exp(rng.normal(0, 1, 600))), smoothing=50).scene()))
        ends.append((drawn[300], drawn[-1]))
    middle, end = np.std(ends, axis=0)
    assert end < 1.8 * middle
    losses = np.full(600, 1.0)
    losses[500], losses[-13:] = 1e4, 0.3
    drawn = _averages(LossView(_of_losses(losses), smoothing=50).scene())
    np.testing.assert_array_equal(drawn[:500], np.float32(1.0))
    np.testing.assert_allclose(drawn[500:550], np.float32((49 + 1e4) / 50), rtol=1e-6)
    assert drawn[-1] == pytest.approx(losses[-50:].mean(), rel=1e-6)


def test_the_legend_names_the_width_of_the_average():
    run = make_run(1000)
    for view, named in ((LossView(run), "loss ({})"), (Dashboard(run), "smoothing: {}"), (Dashboard(run), "loss ({}) 0.")):
        scene = view.scene()
        smoothing = next(control for control in scene.controls if control.name == "smoothing")
        figure = draw(scene, {"smoothing": 4})
        said = " / ".join(text.get_text() for text in words_of(figure))
        assert named.format(f"average of {smoothing.values[4]:g} steps") in said
        assert named.format("as recorded") in " / ".join(text.get_text() for text in words_of(draw(scene, {"smoothing": 0})))


@pytest.mark.parametrize(
    ("steps", "each", "width"), [(30, 1, 5), (168, 1, 20), (1000, 1, 50), (5000, 100, 1000), (20_000, 1, 1000)]
)
def test_the_average_is_wide_enough_for_the_trend_to_be_seen(steps, each, width):
    number = np.arange(each, steps + 1, each)
    loss = np.exp(-number / steps) * np.exp(0.3 * np.random.default_rng(1).standard_normal(len(number)))
    scene = LossView(_of_losses(loss, number)).scene()
    control = scene.controls[0]
    assert control.values[control.index] == width
    raw, strong = layers_of(scene, Line)
    middle = np.exp(-raw.x / steps)  # of what the noise is added to
    off = [np.std(np.log(each / middle)) for each in (raw.y, strong.chosen("y", scene.state()))]
    assert off[1] < 0.5 * off[0]
    assert raw.alpha < 0.5 < strong.alpha
    assert raw.width < strong.width


def test_a_point_of_many_steps_shows_how_far_they_reached():
    scene = LossView(_of_losses(2.0 + np.arange(1, 10_001) % 2)).scene()
    (band,) = layers_of(scene, Band)
    assert 1000 < len(band.x) <= 2048
    assert (set(band.low), set(band.high)) == ({2.0}, {3.0})
    np.testing.assert_allclose(_averages(scene), 2.5, atol=1e-4)


SMALL = {
    "denormal": np.full(30, 1e-310),
    "below 1e-300": np.logspace(-320, -301, 30),
    "below float32": np.logspace(-60, -46, 30),
    "down to 1e-320": np.logspace(-320, -1, 30),
    "below 0": np.full(30, -1e-310),
}


@pytest.mark.parametrize("losses", SMALL.values(), ids=SMALL)
def test_losses_too_small_for_a_picture_are_drawn_as_0(losses):
    run = make_run(30, loss=losses)
    run.scalars["learning_rate"] = Series()
    run.scalars["learning_rate"].extend(range(1, 31), losses)
    for view in (LossView(run), Dashboard(run), ScheduleView(lambda n: 1e-310, 30, loss=run)):
        scene = view.scene()
        draw(scene, {})._repr_png_()
        raw = next(line for line in layers_of(scene, Line) if line.width == 0.6)
        np.testing.assert_allclose(raw.y, np.where(np.abs(losses) < 1e-37, 0.0, losses), rtol=1e-6)
        panel = next(panel for panel in scene.panels if any(layer is raw for layer in panel.layers))
        assert panel.y.scale == ("log" if (losses > 1e-37).any() else "linear")
        assert panel.y.high > 1e-37
        assert panel.y.low <= 0.0 or panel.y.low > 1e-40


def test_steps_that_are_not_finite_are_marked_and_leave_gaps():
    loss = 1 / np.arange(1.0, 121)
    loss[[30, 31, 70]] = np.nan, np.inf, 1e300
    scene = LossView(make_run(loss=loss)).scene()
    crosses = named_layers(scene, "not finite")
    assert crosses.marker == "cross"
    assert crosses.x.tolist() == [31]  # one for neighbours
    assert scene.panels[0].y.low < crosses.y[0] < 1 / 120
    (raw,) = (line for line in layers_of(scene, Line, 0) if not line.name)
    assert np.flatnonzero(np.isnan(raw.y)).tolist() == [30, 31, 70]


def test_epochs_seconds_and_samples():
    run = make_run(120)
    recorded = {"epoch": np.arange(120) // 40, "seconds": np.arange(120) * 0.5, "samples": np.arange(120) * 32}
    for name, values in recorded.items():
        run.scalars[name] = Series()
        run.scalars[name].extend(np.arange(1, 121), values)
    view = LossView(run)
    scene = view.scene()
    assert named_layers(scene, "epochs").at.tolist() == [41, 81]
    control = next(control for control in scene.controls if control.name == "axis")
    assert control.values == ["step", "epoch", "seconds", "samples"]
    assert control.remote
    assert [panel.y.label for panel in scene.panels] == ["loss", "learning rate"]
    view.on_control("axis", "samples", 3)
    np.testing.assert_allclose(named_layers(view.scene(), "loss").x, np.arange(120) * 32)
    view.on_control("axis", "seconds", 2)
    scene = view.scene()
    assert scene.panels[1].x.label == "seconds"
    np.testing.assert_allclose(named_layers(scene, "loss").x, np.arange(120) * 0.5)
    view.on_control("axis", "epoch", 1)
    np.testing.assert_allclose(named_layers(view.scene(), "loss").x, np.arange(120) / 40)


RATES = {
    "two decades": ([0.1, 0.001], "log"),
    "one rate": ([0.1, 0.1], "linear"),
    "less than a decade": ([0.1, 0.02], "linear"),
    "down to 0": ([0.1, 0.0], "linear"),
    "not finite": ([0.1, np.nan], "linear"),
}


@pytest.mark.parametrize(("rates", "expected"), RATES.values(), ids=RATES)
@pytest.mark.parametrize("kind", [LossView, Dashboard])
def test_losses_and_rates_have_log_axes_where_they_can_and_linear_ones_where_they_shall(kind, rates, expected):
    run = make_run(50)
    run.scalars["learning_rate"] = Series()
    run.scalars["learning_rate"].extend(range(1, 51), np.repeat(rates, 25))
    view = kind(run)

    def axes():
        scene = view.scene()
        (control,) = (control for control in scene.controls if control.name == "scale")
        assert control.remote
        assert control.values[control.index] == view.scale
        return [panel.y for panel in scene.panels if panel.y.label in ("loss", "learning rate")]

    assert [axis.scale for axis in axes()] == ["log", expected]
    assert axes()[1].low <= np.nanmin(rates) <= np.nanmax(rates) < axes()[1].high
    view.on_control("scale", "linear", 1)
    assert [axis.scale for axis in axes()] == ["linear"] * 2
    view.on_control("scale", "log", 0)
    assert axes()[0].scale == "log"


@pytest.mark.parametrize("kind", [Dashboard, UpdateRatioView, WeightsView])
def test_ratios_and_norms_have_the_scale_that_is_chosen(kind):
    view = kind(make_run(50, 4))

    def scales():
        axes = [panel.y for panel in view.scene().panels]
        assert all(axis.low < axis.high for axis in axes)
        return {axis.scale for axis in axes if axis.label in ("norm", "update / weight", "update norm / weight norm")}

    assert scales() == {"log"}
    view.on_control("scale", "linear", 1)
    assert scales() == {"linear"}
    assert kind(make_run(50, 4), scale="linear").scale == "linear"
    with pytest.raises(ValueError, match="scale"):
        kind(make_run(50, 4), scale="cubic")


def test_one_slider_moves_a_line_through_all_panels_of_a_dashboard():
    view = Dashboard(make_run(500, 4))
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
    assert labels == ["loss", "learning rate", "", "update / weight", "values in the gradient", "norm"]
    (readout,) = (text for text in layers_of(scene, Text) if text.by == ("step",))
    at = int(step.values[30])
    said = f"step {at}   recorded: loss {1 / at:.4g}   learning rate {at / 5e3:.4g}"
    assert readout.chosen("texts", scene.state(step=30)) == said
    clicks = [(panel.click.control, panel.click.along) for panel in scene.panels if panel.frame]
    assert clicks == [("step", "x"), ("step", "x"), ("layer", "y"), ("step", "x"), ("step", "x"), ("step", "x")]
    (heat,) = (image for image in layers_of(scene, Heatmap) if image.label == "norm of the gradient")
    np.testing.assert_allclose(heat.values[:, 17], [1, 0.1, 0.01, 0.001], rtol=0.1)  # which colours end at percentiles


@pytest.mark.parametrize("histograms", [1, 3])
def test_a_step_is_as_far_right_in_the_histograms_of_a_dashboard_as_elsewhere(histograms):
    run = make_run(30, 2, histograms=False)
    steps = np.arange(1, 30, 10)[:histograms]
    run.add_tensors(steps, {"gradient_histogram": np.ones((histograms, 2, 65))})
    panels = {panel.y.label: panel for panel in Dashboard(run).scene().panels if panel.frame}
    histogram, loss = panels["values in the gradient"].x, panels["loss"].x
    assert (histogram.low, histogram.high) == (loss.low, loss.high)


def test_a_view_of_a_recorder_takes_what_is_new():
    net = torch.nn.Linear(2, 1)
    trainer = tristep.Trainer(net, "sgd", {"learning_rate": 0.1})
    recorder = Recorder(trainer)
    views = [kind(recorder) for kind in VIEWS]
    assert all(layers_of(view.scene(), Text) for view in views)  # which say that there is nothing yet
    for _ in range(30):
        trainer.zero_grad()
        loss = net(torch.ones(4, 2)).square().mean()
        loss.backward()
        trainer.step(1)
        recorder.step(loss=loss)
    for view in views:
        view.refresh()
    np.testing.assert_array_equal(named_layers(views[0].scene(), "loss").x, np.arange(1, 31))
    image = layers_of(views[1].scene(), Heatmap, 0)[0]
    assert image.values.shape[-2:] == (2, 30)
    assert views[4].scene().controls[0].values[-1] == 30
    # Histograms are kept from frame to frame until there are more.
    assert views[4].describe().startswith("run: 30 steps, loss from ")


def _sick(steps=120):
    """A run whose loss and gradients become NaN at step 101, and whose third tensor gets no gradient from step 31 on."""
    number = np.arange(1, steps + 1)
    run = make_run(steps, 4, histograms=True, loss=np.where(number > 100, np.nan, 1 / number))
    norms = 10.0 ** -np.arange(4.0) * np.ones((steps, 4))
    norms[30:, 2] = 0.0
    norms[100:, [0, 1, 3]] = np.nan
    ones = np.where(np.isnan(norms), np.nan, 1.0)
    bad = np.where(np.isnan(norms), 5.0, 0.0)
    run.tensors.clear()
    measured = {"gradient_norm": norms, "weight_norm": ones, "update_norm": norms * 1e-3, "update_ratio": norms * 1e-3}
    run.add_tensors(number, measured | {"cosine": -ones, "gradient_nonfinite": bad})
    return run


WARNED = {
    "gradients: not finite first at step 101": (0, 101),
    "loss: not finite": (None, 101),
    "layer2.weight: its": (2, 31),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", VIEWS)
def test_what_is_wrong_is_said_below_the_picture_and_leads_to_its_tensor_and_step(kind):
    view = kind(_sick())
    scene = view.scene()
    controls = {control.name: control for control in scene.controls}
    assert len(scene.notes) == len(WARNED)
    for note, (begins, (tensor, step)) in zip(scene.notes, WARNED.items(), strict=True):
        assert note.startswith(begins)
        assert f"- {note}" in view.describe()
        if "layer" in controls and tensor is not None:
            assert controls["layer"].values[note.sets["layer"]] == f"layer{tensor}.weight"
        if "step" in controls:
            assert abs(controls["step"].values[note.sets["step"]] - step) <= 1
        else:
            assert note.x == step
    # In the picture, which is higher by as much; in the words for those who do not see it; and in the page.
    figure = view.figure()
    said = " ".join(text.get_text().replace("\n", " ") for text in words_of(figure))
    assert all(note in said for note in scene.notes)
    assert figure.get_size_inches()[1] > scene.height + 0.5
    _, about = view._repr_mimebundle_()
    assert all(note in about["image/png"]["alt"] for note in scene.notes)
    assert not Dashboard(make_run(50, 4)).scene().notes


def test_of_many_warnings_the_first_are_below_the_picture():
    run = make_run(200, 40)
    zeros = run.tensors["gradient_norm"].curve().mean.copy()
    zeros[50:, ::4] = 0.0
    run.tensors["gradient_norm"] = Series((40,), np.float32)
    run.tensors["gradient_norm"].extend(range(1, 201), zeros)
    runs = [run, make_run(200, 40, name="healthy")]
    notes = TensorHeatmap(runs).scene().notes
    assert len(notes) == 6 + (len(notes) > 6)
    assert all(note.startswith("run: ") for note in notes[:6])


@pytest.mark.parametrize("kind", VIEWS)
def test_every_panel_marks_where_values_become_nan_and_says_so_where_none_is_finite(kind):
    scene = kind(_sick()).scene()
    for panel in scene.panels:
        if not panel.frame or panel.y.label == "learning rate":
            continue
        crosses = [layer for layer in panel.layers if isinstance(layer, Points) and layer.marker == "cross"]
        assert crosses, panel.y.label
        for cross in crosses:
            assert np.nanmin(cross.chosen("x", scene.state())) == pytest.approx(101, abs=1)
            assert panel.y.low <= np.nanmin(cross.y) <= np.nanmax(cross.y) <= panel.y.high
    texts = layers_of(kind(_of_constants(np.nan, 5.0)).scene(), Text)
    assert "no value is finite" in [str(text.texts) for text in texts if text.texts.ndim == 0]


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", [TensorHeatmap, Dashboard])
def test_gradients_of_exactly_0_have_a_colour_and_a_key_of_their_own(kind):
    run = _sick()
    scene = kind(run).scene()
    grey = named_layers(scene, "exactly 0")
    cells = np.isin(grey.chosen("values", scene.state()), 1)
    np.testing.assert_array_equal(cells, run.tensors["gradient_norm"].curve().mean.T == 0)
    figure = kind(run).figure()
    assert "exactly 0" in [text.get_text() for text in words_of(figure)]
    (axes,) = (
        each for each in figure.axes if each.get_yticklabels() and each.get_yticklabels()[0].get_text() == "layer0.weight"
    )
    pixels, (x, y) = rendered(figure), axes.transData.transform((60, 2))
    red, green, blue = pixels[len(pixels) - 1 - int(y), int(x)].astype(int)
    assert max(red, green, blue) - min(red, green, blue) < 12  # grey, which no colour of the scale is
    assert 150 < green < 230
    with pytest.raises(ValueError, match="not enough values"):
        named_layers(kind(make_run(50, 4)).scene(), "exactly 0")


RUNS = {
    "nothing": lambda: Run("nothing"),
    "one step": lambda: make_run(1, 3),
    "one tensor": lambda: make_run(30, 1),
    "nothing finite": lambda: _of_constants(np.nan, 5.0),
    "zeros": lambda: _of_constants(0.0, 0.0),
    "200 tensors": lambda: make_run(30, 200, names=[f"block{i // 8}.sub{i % 8}.weight" for i in range(200)]),
    "100,000 steps": lambda: make_run(100_000, 3, histograms=False),
    "every 16th": lambda: make_run(100, 3, every=16),
    "losses below 0": lambda: make_run(50, 2, loss=-np.arange(50.0)),
}


def _of_constants(value, nonfinite):
    """A run in which all is this value, and so many elements of each gradient are not finite."""
    run = make_run(60, 3, loss=np.full(60, value), histograms=False)
    for name in QUANTITIES:
        run.tensors[name] = Series((3,), np.float32)
        run.tensors[name].extend(range(1, 61), np.full((60, 3), nonfinite if name == "gradient_nonfinite" else value))
    return run


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", RUNS)
def test_all_runs_can_be_drawn_with_few_points(name):
    run = RUNS[name]()
    for kind in VIEWS:
        view = kind(run)
        scene = view.scene()
        assert scene.description.startswith(f"{run.name}: ")
        for layer in layers_of(scene, (Line, Band, Points)):
            assert layer.x.shape[-1] <= 2048
        scene.to_bytes()
        figure = view.figure()
        assert len(figure.axes) >= len(scene.panels)
        figure.canvas.draw()


def test_a_loop_is_shown_by_what_it_records():
    weight = torch.ones(1, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)

    def train():
        for loss in (3.0, 1.0):
            weight.grad = torch.ones(1)
            optimizer.step()
            yield {"loss": loss}

    for recorder in (None, Recorder(optimizer, name="ours")):
        loop = LiveLoop(train, view=None, recorder=recorder, mode="thread").start()
        assert loop.wait()
        for view in (Dashboard(loop), LossView(loop), LossView([loop])):
            assert view.run is loop.run
            assert view.describe() == type(view)(loop.run).describe()
            assert "loss from 3 to 1" in view.describe()
        assert ScheduleView(lambda n: 0.1, 5, loss=loop).scene().panels


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: LossView(3), TypeError, "runs must be a Recorder, a Run, a LiveLoop, a RunSet or several, got int"),
        (lambda: Dashboard({"a": [1.0, 0.5]}), TypeError, "run must be a Recorder, a Run or a LiveLoop, got dict"),
        (lambda: WeightsView(RunSet([Run("a")])), TypeError, r"got RunSet: give one of its runs, such as runs\['a'\]"),
        (lambda: LossView([]), ValueError, "runs is empty"),
        (lambda: LossView(Run(), scalars=()), ValueError, "scalars is empty"),
        (lambda: LossView(Run(), smoothing=-1), ValueError, "smoothing=-1: must be finite and 0 or more"),
        (lambda: LossView(Run(), scale="logarithmic"), ValueError, "scale='logarithmic': must be one of 'log', 'linear'"),
        (lambda: LossView(make_run(), axis="epoch"), ValueError, "axis='epoch': no scalar of this name was recorded"),
        (lambda: TensorHeatmap(Run(), "norm"), ValueError, "quantity='norm': .* must be one of 'gradient_norm'"),
        (lambda: Dashboard(Run(), scale="logarithmic"), ValueError, "scale='logarithmic': must be one of 'log', 'linear'"),
        (lambda: Dashboard(Run(), "norm"), ValueError, "quantity='norm': .* must be one of 'gradient_norm'"),
    ],
)
def test_what_does_not_fit_is_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()
