"""What the curves show, asked of matplotlib's own objects."""

from functools import partial
from itertools import pairwise

import numpy as np
import pytest
from drawn_scenes import words_of
from planted_runs import mean_of_last_steps

from tristep.viz import plot_training

NAN, INF = np.nan, np.inf
TWELVE = {f"optimizer number {i}, rate 0.{i}": np.exp(-np.arange(60) / (5 + i)) for i in range(12)}


@pytest.mark.parametrize(("smoothing", "said"), [(4, "average of 4 updates"), (1, "as recorded")])
def test_losses_are_drawn_as_they_are_and_smoothed(smoothing, said):
    losses = {"sgd": _noisy(120, seed=1), "adam": _noisy(90, seed=2)}
    figure = plot_training(losses, smoothing=smoothing)
    assert len(figure.axes[0].lines) == 2 * 2 + 1  # and one that the legend explains
    for (raw, strong), (name, values) in zip(_pairs(figure), losses.items(), strict=True):
        for line in (raw, strong):
            np.testing.assert_array_equal(line.get_xdata(), np.arange(1, len(values) + 1))
        np.testing.assert_allclose(raw.get_ydata(), values, rtol=1e-6)
        np.testing.assert_allclose(strong.get_ydata(), mean_of_last_steps(values, smoothing), rtol=1e-6)
        assert raw.get_linewidth() < strong.get_linewidth()
        assert name in _words(figure)
    assert f"strong lines ({said})" in _words(figure)
    assert f"sgd ({said})" in _words(plot_training({"sgd": losses["sgd"]}, smoothing=smoothing))


def test_words_are_where_they_were_asked_for():
    figure = plot_training({"$a": [1.0], "b": [2.0]}, notes={"b": "$x_1$"}, title="Title", xlabel="step", ylabel="error")
    assert set(_words(figure)) >= {"$a", "b", "strong lines (as recorded)", "b: $x_1$", "Title"}
    assert not any(text.get_parse_math() for text in words_of(figure) if "$" in text.get_text())
    assert (figure.axes[0].get_xlabel(), figure.axes[0].get_ylabel()) == ("step", "error")


def test_a_figure_has_its_words():
    _, about = plot_training({"sgd": [4.0, 0.5], "adam": [3.0, 0.25]}, title="Two", smoothing=1)._repr_png_()
    assert about["alt"] == "Two. training loss at the end: sgd 0.5, adam 0.25"


@pytest.mark.parametrize(("updates", "width"), [(39, 1), (200, 10)])
def test_the_default_smoothing_is_a_twentieth_of_the_longest_run(updates, width):
    losses = _noisy(updates)
    _, (_, strong) = _pairs(plot_training({"short": [1.0], "long": losses}))
    np.testing.assert_allclose(strong.get_ydata(), mean_of_last_steps(losses, width), rtol=1e-6)


def test_the_scale_is_logarithmic_and_shows_every_smoothed_value_but_not_a_raw_outlier():
    axes = plot_training({"sgd": [4.0, 0.5, 0.001], "adam": [3.0, NAN, 0.0]}, smoothing=1).axes[0]
    low, high = axes.get_ylim()
    assert axes.get_yscale() == "log"
    assert 0 < low < 0.001
    assert high > 4.0
    losses = np.ones(200)
    losses[100] = 1e-9
    assert plot_training({"sgd": losses}, smoothing=11).axes[0].get_ylim()[0] > 1e-3


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
    assert all(float(tick.label1.get_text().replace("−", "-")) == pytest.approx(tick.get_loc()) for tick in ticks)


def test_one_update_is_a_dot_and_twelve_runs_have_twelve_looks():
    dots = [_pairs(plot_training({"sgd": losses}))[0][1].get_marker() == "o" for losses in ([0.5], [0.5, 0.4])]
    assert dots == [True, False]
    assert len({_look(strong) for _, strong in _pairs(plot_training(TWELVE))}) == 12


def test_learning_rates_stand_below_in_the_looks_of_their_losses():
    rates = {"adam": [0.0, 0.0, 0.0], "sgd": [0.1, 0.2, 0.0999]}
    figure = plot_training({"sgd": [1.0, 2.0, 3.0], "none": [1.0] * 3, "adam": [1.0, 0.5, 0.2]}, rates)
    (sgd, _, adam), (first, second) = _pairs(figure), figure.axes[1].lines
    assert (_look(first), _look(second)) == (_look(adam[1]), _look(sgd[1]))
    np.testing.assert_allclose(first.get_ydata(), 0.0)
    assert _at(second, [1.5, 2.5, 3.0]) == pytest.approx([0.1, 0.2, 0.0999])  # each holds until the next one
    assert figure.axes[1].get_ylabel().replace("\n", " ") == "learning rate"


@pytest.mark.parametrize(
    ("draw", "arguments", "message"),
    [
        (plot_training, ({},), "losses is empty: there is nothing to draw"),
        (plot_training, ({"a": []},), r"losses\['a'\] has the shape \(0,\): must be one number for each update"),
        (plot_training, ({"a": [[1.0, 2.0]]},), r"losses\['a'\] has the shape \(1, 2\)"),
        (plot_training, ({"a": [1.0]}, {"b": [1.0]}), "learning_rates has 'b': losses has no such run. There are 'a'"),
        (plot_training, ({"a": [1.0]}, {"a": [1.0, 2.0]}), r"rates\['a'\] has 2 values: losses has 1, one an update"),
        (plot_training, ({"a": [1.0]}, None, {"b": "note"}), "notes has 'b': losses has no such run. There are 'a'"),
        (partial(plot_training, smoothing=NAN), ({"a": [1.0]},), "smoothing=nan: must be finite and 1 or more"),
    ],
)
def test_what_does_not_fit_is_refused(draw, arguments, message):
    with pytest.raises(ValueError, match=message):
        draw(*arguments)


def _noisy(updates, seed=0):
    return np.exp(np.random.default_rng(seed).normal(-np.arange(updates) / 30, 0.5))


def _pairs(figure):
    """The faint and the strong line of each run."""
    return [(a, b) for a, b in pairwise(figure.axes[0].lines) if a.get_alpha() == 0.35 and b.get_alpha() != 0.35]


def _at(line, places):
    """The values of a line that goes on level until it rises or falls."""
    return [float(line.get_ydata()[np.flatnonzero(line.get_xdata() <= place)[-1]]) for place in places]


def _look(line):
    return line.get_color(), str(line.get_linestyle()), str(line._dash_pattern)


def _words(figure):
    return [text.get_text() for text in words_of(figure)]
