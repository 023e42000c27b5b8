"""What the curves show, asked of matplotlib's own objects."""

from itertools import combinations

import numpy as np
import pytest

from tristep import lr_scheduler

pytest.importorskip("matplotlib")  # `make gpu` uses what a machine has

from tristep.viz import plot_schedules, plot_training

NAN, INF = np.nan, np.inf
TWELVE = {f"optimizer number {i}, rate 0.{i}": np.exp(-np.arange(60) / (5 + i)) for i in range(12)}


def test_losses_are_drawn_as_they_are_and_smoothed():
    losses = {"sgd": _noisy(120, seed=1), "adam": _noisy(90, seed=2)}
    axes = plot_training(losses, smoothing=4).axes[0]
    assert len(axes.lines) == 4
    assert axes.get_ylabel() == "training loss, strong: average of 4 updates"
    for name, values in losses.items():
        raw, smoothed = _line(axes, f"_{name}, raw"), _line(axes, name)
        np.testing.assert_array_equal(raw.get_xdata(), np.arange(1, len(values) + 1))
        np.testing.assert_array_equal(raw.get_ydata(), values)
        np.testing.assert_allclose(smoothed.get_ydata(), _average(values, 4), rtol=1e-12)


def test_a_figure_has_its_words():
    _, about = plot_training({"sgd": [4.0, 0.5], "adam": [3.0, 0.25]}, title="Two", smoothing=1)._repr_png_()
    assert about["alt"] == "Two. training loss at the end: sgd 0.5, adam 0.25"
    _, about = plot_schedules({"constant": [0.1, 0.1]})._repr_png_()
    assert about["alt"] == "learning rate at the end: constant 0.1"


def test_without_smoothing_each_loss_is_drawn_once():
    losses = _noisy(100)
    axes = plot_training({"sgd": losses}, smoothing=1).axes[0]
    (line,) = axes.lines
    np.testing.assert_array_equal(line.get_ydata(), losses)


@pytest.mark.parametrize(("updates", "width"), [(39, 1), (200, 10)])
def test_the_default_smoothing_is_a_twentieth_of_the_longest_run(updates, width):
    losses = _noisy(updates)
    line = _line(plot_training({"short": [1.0], "long": losses}).axes[0], "long")
    np.testing.assert_allclose(line.get_ydata(), _average(losses, width), rtol=1e-12)


@pytest.mark.parametrize("gap", [NAN, INF, -INF])
def test_losses_that_are_not_finite_leave_gaps_and_weigh_nothing(gap):
    losses = _noisy(50)
    losses[20:23] = gap
    figure = plot_training({"sgd": losses}, smoothing=3)
    drawn = _line(figure.axes[0], "sgd").get_ydata()
    np.testing.assert_array_equal(np.flatnonzero(np.isnan(drawn)), [20, 21, 22])
    np.testing.assert_allclose(drawn, _average(losses, 3), rtol=1e-12)
    figure.png(dpi=50)


def test_the_scale_is_logarithmic_and_shows_every_smoothed_value():
    axes = plot_training({"sgd": [4.0, 0.5, 0.001], "adam": [3.0, NAN, 0.0]}, smoothing=1).axes[0]
    low, high = axes.get_ylim()
    assert axes.get_yscale() == "log"
    assert 0 < low < 0.001
    assert high > 4.0


def test_a_raw_outlier_does_not_stretch_the_scale():
    losses = np.ones(200)
    losses[100] = 1e-9
    low, _ = plot_training({"sgd": losses}, smoothing=11).axes[0].get_ylim()
    assert low > 1e-3


@pytest.mark.parametrize("losses", [[0.0, 0.0], [-1.0, -2.0], [NAN, NAN]], ids=["zero", "negative", "nan"])
def test_without_a_loss_above_zero_the_scale_is_linear(losses):
    figure = plot_training({"sgd": losses})
    assert figure.axes[0].get_yscale() == "linear"
    figure.png(dpi=50)


@pytest.mark.parametrize("losses", [[2.3, 1.1, 0.7], [0.9, 0.6], [1e-7, 5e4]])
def test_the_axis_has_at_least_two_labelled_losses(losses):
    figure = plot_training({"sgd": losses})
    figure.canvas.draw()
    axes = figure.axes[0]
    low, high = axes.get_ylim()
    ticks = [tick for tick in axes.yaxis.get_major_ticks() if low <= tick.get_loc() <= high]
    assert len(ticks) >= 2
    assert all(float(tick.label1.get_text()) == pytest.approx(tick.get_loc()) for tick in ticks)


def test_updates_are_integers_and_one_of_them_is_a_dot():
    figure = plot_training({"sgd": [0.5]})
    figure.canvas.draw()
    axes = figure.axes[0]
    assert all(float(tick).is_integer() for tick in axes.get_xticks())
    assert _line(axes, "sgd").get_marker() == "o"
    assert _line(plot_training({"sgd": [0.5, 0.4]}).axes[0], "sgd").get_marker() == ""


def test_twelve_runs_have_twelve_looks_which_their_labels_share():
    figure = plot_training(TWELVE)
    lines = {name: _line(figure.axes[0], name) for name in TWELVE}
    assert len({_look(line) for line in lines.values()}) == 12
    for name, line in lines.items():
        (sample,) = [artist for artist in figure.get_children() if artist.get_label() == name]
        assert _look(sample) == _look(line)
        assert _text(figure, name).get_color() == line.get_color()


def test_labels_stand_in_the_order_in_which_the_curves_end():
    ends = {"middle": 0.5, "never": NAN, "low": 0.01, "high": 2.0, "zero": 0.0}
    figure = plot_training({name: [1.0, end] if name != "never" else [NAN, end] for name, end in ends.items()}, smoothing=1)
    heights = {name: _text(figure, name).get_position()[1] for name in ends}
    # "zero" leaves the logarithmic scale after 1.0; "never" has no end.
    assert sorted(ends, key=heights.get, reverse=True) == ["never", "high", "zero", "middle", "low"]


def test_words_are_where_they_were_asked_for():
    figure = plot_training({"$a": [1.0], "b": [2.0]}, notes={"b": "$x_1$"}, title="Title", xlabel="step", ylabel="error")
    assert {text.get_text() for text in figure.texts} == {"$a", "b", "$x_1$", "Title"}
    assert not any(text.get_parse_math() for text in figure.texts)
    assert figure.axes[0].get_xlabel() == "step"
    assert figure.axes[0].get_ylabel() == "error"
    assert _text(figure, "$x_1$").get_position()[1] < _text(figure, "b").get_position()[1]


def test_each_learning_rate_has_a_small_picture_next_to_its_label():
    rates = {"sgd": [0.1, 0.2, 0.0999], "adam": [0.0, 0.0, 0.0]}
    figure = plot_training({"sgd": [1.0, 2.0, 3.0], "none": [1.0] * 3, "adam": [1.0, 0.5, 0.2]}, rates)
    _, *small = figure.axes
    assert len(small) == 2
    for axes, name in zip(small, ("sgd", "adam"), strict=True):  # in the order of the labels
        np.testing.assert_array_equal(axes.lines[0].get_ydata(), rates[name])
        box, (_, y) = axes.get_position(), _text(figure, name).get_position()
        assert box.y0 < y / figure.get_figheight() < box.y1
    assert [label.get_text() for label in small[0].get_yticklabels()] == ["0", "0.2"]
    assert [label.get_text() for label in small[1].get_yticklabels()] == ["0"]
    assert _text(figure, "learning rate")


def test_a_learning_rate_is_shown_in_three_digits():
    figure = plot_training({"sgd": [1.0, 0.5]}, {"sgd": [0.0797575757, 0.01]})
    assert [label.get_text() for label in figure.axes[1].get_yticklabels()] == ["0", "0.0798"]


@pytest.mark.parametrize("runs", [{"a": [1.0, 0.5]}, TWELVE], ids=["one", "twelve"])
def test_nothing_overlaps_and_nothing_is_cut_off(runs):
    rates = {name: np.full(len(losses), 1.23456e-7) for name, losses in runs.items()}
    notes = dict.fromkeys(runs, "a note that is longer than the name of the run")
    figure = plot_training(runs, rates, notes, title="Title")
    figure.canvas.draw()
    renderer = figure.canvas.get_renderer()
    texts = [text.get_window_extent(renderer) for text in figure.texts]
    panels = [axes.get_tightbbox(renderer) for axes in figure.axes]
    width, height = figure.get_size_inches() * figure.dpi
    for box in texts + panels:
        assert box.x0 >= 0
        assert box.y0 >= 0
        assert box.x1 <= width
        assert box.y1 <= height
    for a, b in combinations(texts + panels, 2):
        assert min(a.x1, b.x1) <= max(a.x0, b.x0) or min(a.y1, b.y1) <= max(a.y0, b.y0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (({},), "losses is empty: there is nothing to draw"),
        (({"a": []},), r"losses\['a'\] has the shape \(0,\): must be one number for each update"),
        (({"a": [[1.0, 2.0]]},), r"losses\['a'\] has the shape \(1, 2\)"),
        (({"a": [1.0]}, {"b": [1.0]}), "learning_rates has 'b': losses has no such run, only 'a'"),
        (({"a": [1.0]}, {"a": [1.0, 2.0]}), r"learning_rates\['a'\] has 2 values: losses has 1, one an update"),
        (({"a": [1.0]}, None, {"b": "note"}), "notes has 'b': losses has no such run, only 'a'"),
    ],
)
def test_losses_that_do_not_fit_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        plot_training(*arguments)


@pytest.mark.parametrize("smoothing", [0, -1, 1001])
def test_a_smoothing_out_of_range_is_refused(smoothing):
    with pytest.raises(ValueError, match=f"smoothing={smoothing}: must be from 1 to 1000 updates"):
        plot_training({"a": [1.0]}, smoothing=smoothing)


def test_schedules_are_asked_for_the_updates_from_1_on():
    cosine = lr_scheduler.CosineScheduler(max_update=80, base_lr=0.5, warmup_steps=10)
    figure = plot_schedules({"cosine": cosine, "halving": lambda n: 0.5**n}, n_updates=100, title="Title")
    axes = figure.axes[0]
    for name, expected in {"cosine": cosine(np.arange(1, 101)), "halving": 0.5 ** np.arange(1, 101)}.items():
        np.testing.assert_array_equal(_line(axes, name).get_xdata(), np.arange(1, 101))
        np.testing.assert_allclose(_line(axes, name).get_ydata(), expected, rtol=1e-12)
    assert axes.get_ylim() == (0, pytest.approx(0.53))
    assert {text.get_text() for text in figure.texts} == {"cosine", "halving", "Title"}


def test_recorded_rates_are_drawn_up_to_n_updates():
    assert list(_line(plot_schedules({"run": [3.0, 2.0, 1.0]}).axes[0], "run").get_ydata()) == [3.0, 2.0, 1.0]
    assert list(_line(plot_schedules({"run": [3.0, 2.0, 1.0]}, 2).axes[0], "run").get_ydata()) == [3.0, 2.0]


@pytest.mark.parametrize("rates", [[0.0, 0.0], [NAN, NAN], [INF, 1.0]], ids=["zero", "nan", "inf"])
def test_schedules_without_a_highest_rate_are_drawn(rates):
    figure = plot_schedules({"run": rates})
    figure.png(dpi=50)
    low, high = figure.axes[0].get_ylim()
    assert low == 0
    assert high >= 1


@pytest.mark.parametrize("ends", [[0.5] * 12, [0.0] * 12, [1.0] * 12, np.linspace(0, 1, 12)])
def test_labels_of_schedules_keep_apart(ends):
    schedules = {f"schedule {i}": [1.0, end] for i, end in enumerate(ends)}
    figure = plot_schedules(schedules, title="Title")
    figure.canvas.draw()
    boxes = [text.get_window_extent(figure.canvas.get_renderer()) for text in figure.texts]
    assert len(boxes) == 13
    assert not any(a.overlaps(b) for a, b in combinations(boxes, 2))
    assert max(box.x1 for box in boxes) <= figure.get_figwidth() * figure.dpi
    assert min(box.y0 for box in boxes) >= 0
    assert max(box.y1 for box in boxes) <= figure.get_figheight() * figure.dpi
    assert len({_look(line) for line in figure.axes[0].lines}) == 12


@pytest.mark.parametrize(
    ("schedules", "n_updates", "message"),
    [
        ({}, 10, "schedules is empty: there is nothing to draw"),
        ({"a": []}, None, r"schedules\['a'\] has the shape \(0,\)"),
        ({"a": lambda n: 1.0}, None, r"n_updates is missing: schedules\['a'\] is a callable, so say how far to draw it"),
        ({"a": lambda n: 1.0}, 0, "n_updates=0: must be 1 or more"),
    ],
)
def test_schedules_that_cannot_be_drawn_are_refused(schedules, n_updates, message):
    with pytest.raises(ValueError, match=message):
        plot_schedules(schedules, n_updates)


def _noisy(updates, seed=0):
    return np.exp(np.random.default_rng(seed).normal(-np.arange(updates) / 30, 0.5))


def _average(losses, width):
    """At each update that of a line fitted by NumPy to the logarithms within half the width."""
    there = np.isfinite(losses)
    logs, updates = np.log(np.where(there, losses, 1.0)), np.arange(len(losses))
    found = np.full(len(losses), NAN)
    for k in np.flatnonzero(there):
        weights = np.sqrt(np.maximum(1 - (2 * (updates - k) / width) ** 2, 0)) * there
        few = np.count_nonzero(weights) == 1
        found[k] = logs[k] if few else np.polyfit(updates - k, logs, 1, w=weights)[1]
    return np.exp(found)


def _line(axes, label):
    (line,) = [line for line in axes.lines if line.get_label() == label]
    return line


def _look(line):
    return line.get_color(), str(line.get_linestyle()), str(line._dash_pattern)


def _text(figure, words):
    (text,) = [text for text in figure.texts if text.get_text() == words]
    return text
