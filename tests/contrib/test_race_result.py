"""What follows from a race: steps to the target, ratios with intervals as SciPy computes them, words, and files."""

import math
from unittest import mock

import numpy as np
import pytest
from races import planted

from tristep.contrib.racing import statistics
from tristep.contrib.racing.statistics import mean_interval, ratio_interval, t_quantile
from tristep.trainer import RaceResult

stats = pytest.importorskip("scipy.stats")
pytestmark = pytest.mark.sample(0)  # the quick tier runs smoke tests of races


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 5, 9, 30])
def test_students_quantiles(freedom):
    for p in (0.5, 0.75, 0.975, 0.9999):
        assert t_quantile(p, freedom) == pytest.approx(stats.t.ppf(p, freedom), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize(("n", "level"), [(5, 0.9), (8, 0.95), (40, 0.8)])
def test_intervals_are_percentiles_further_out(n, level):
    values = np.random.default_rng(7).normal(2.0, 3.0, n)
    tail = stats.norm.cdf(-math.sqrt(n / (n - 1)) * stats.t.ppf((1 + level) / 2, n - 1))
    expected = stats.bootstrap(
        (values,), np.mean, n_resamples=200_000, confidence_level=1 - 2 * tail, method="percentile", rng=1
    ).confidence_interval
    # Quantiles of so many means differ by their own chance, which is least in the middle.
    with mock.patch.object(statistics, "RESAMPLES", 200_000):
        found = mean_interval(values, level)
    np.testing.assert_allclose(found, expected, atol=0.05 * values.std())


def test_ratios_are_geometric_means_of_pairs():
    ours, theirs = np.array([80.0, 50, 120, 100]), np.array([100.0, 70, 90, 100])
    ratio, low, high = ratio_interval(ours, theirs)
    assert ratio == pytest.approx(stats.gmean(ours / theirs))
    assert (ours / theirs).min() <= low < ratio < high <= (ours / theirs).max()
    assert ratio_interval(theirs, ours)[0] == pytest.approx(1 / ratio)
    assert ratio_interval(ours, theirs) == ratio_interval(ours, theirs)
    one = ratio_interval([50.0], [100.0])
    assert one[0] == 0.5
    assert np.isnan(one[1:]).all()


def test_steps_samples_and_seconds():
    result = planted([[40, 60, 50], [20, None, 30]])
    steps = np.array([[40, 60, 50], [20, np.inf, 30]])
    np.testing.assert_array_equal(result.needed(), steps)
    np.testing.assert_array_equal(result.needed("samples"), 4 * steps)
    np.testing.assert_allclose(result.needed("seconds"), steps * [[0.01], [0.02]])
    assert result.settings("b") == {"learning_rate": 0.2, "wd": 0.001}


def test_steps_between_measurements_are_on_a_straight_line():
    result = planted([[40, 60, 50, None], [20, 30, 30, 0]], target=1.0)
    result.losses[0, 0, 4], result.losses[0, 1, 6], result.losses[1, 0, 1] = 0.5, 0.0, np.nan
    result.losses[0, 2, 3:6] = 3.0, 1.5, 0.5
    expected = np.array([[30 + 10 / 1.5, 55, 45, np.inf], [20, 30, 30, 0]])
    np.testing.assert_allclose(result.needed(), expected)
    np.testing.assert_allclose(result.needed("samples"), 4 * expected)


def test_verdicts():
    result = planted([[40, 60, 50, 40, 60], [20, 20, 20, 20, 20], [50, 60, 40, 40, 60], [90, 100, 90, 80, 90]])
    lines = result.verdict().splitlines()
    found = result.compare("b")
    assert found.ratio == pytest.approx(stats.gmean(20 / np.array([40, 60, 50, 40, 60])))
    assert lines[0] == f"b needs {found.ratio:.2f} [{found.low:.2f}, {found.high:.2f}] of a's steps: fewer."
    assert lines[1].endswith("of a's steps: no difference is shown.")
    assert lines[2].endswith("of a's steps: more.")
    assert len(lines) == 3
    seconds = result.compare("b", "seconds")
    assert seconds.ratio == pytest.approx(2 * found.ratio)
    assert result.compare("b", "samples").ratio == pytest.approx(found.ratio)
    rows = result.rows()
    assert rows[1]["steps ratio"] == found.ratio
    assert rows[3]["steps"] == 90
    assert all(text in str(result) for text in ("weight decay 0.001", "5 of 5", lines[0], "80"))


def test_who_has_not_reached_the_target_gets_no_ratio():
    result = planted([[40, 60, 50], [20, None, 30]])
    assert result.verdict() == "b reached the target in 2 of 3 seeds: no ratio."
    assert np.isnan(result.compare("b").ratio)
    assert "not reached" not in result.table().splitlines()[1]
    result = planted([[40, None, 50], [20, 20, 30], [None, None, None]])
    lines = result.verdict().splitlines()
    assert lines[0].startswith("a reached the target in 2 of 3 seeds: no ratios.")
    assert lines[1:] == ["b reached the target in all 3 seeds.", "c reached the target in 0 of 3 seeds: no ratio."]
    assert "not reached" in result.table().splitlines()[3]


def test_what_makes_a_comparison_doubtful_is_said():
    assert "reached before the first step" in planted([[0, 0], [20, 30]]).verdict()
    assert planted([[40], [20]]).verdict() == "b needs 0.50 of a's steps, from one seed: no interval."
    assert planted([[40, 60]]).verdict() == "a alone: 50 steps to the target, the median of 2 seeds."
    for chosen, end in ((0, "least"), (2, "greatest")):
        lines = planted([[40, 60], [20, 30]], chosen=chosen).verdict().splitlines()
        assert [line.partition("is the ")[2].partition(" ")[0] for line in lines[1:]] == [end, end]


def test_saved_and_loaded(tmp_path):
    result, path = planted([[40, 60, 50], [20, None, 30]]), tmp_path / "race.safetensors"
    result.save(path)
    found = RaceResult.load(path)
    assert str(found) == str(result)
    assert repr(found) == repr(result) == "<race of a, b to a loss of 1, 3 seeds>"
    np.testing.assert_array_equal(found.losses, result.losses)
    assert found.seeds == result.seeds
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ValueError, match=r"path=.*damaged"):
        RaceResult.load(path)
    result.losses = result.losses[:, :2]
    result.save(path)
    with pytest.raises(ValueError, match="losses has shape"):
        RaceResult.load(path)


def test_bad_questions_are_named():
    result = planted([[40, 60], [20, 30]])
    with pytest.raises(ValueError, match="by='epochs'"):
        result.needed("epochs")
    with pytest.raises(ValueError, match="name='z'"):
        result.compare("z")
