"""Recorded runs: what the blocks of a series hold, judged by NumPy on all of its values, and what files give back."""

import numpy as np
import pytest

from tristep.viz import Run, RunSet, Series
from tristep.viz.record.series import POINTS


def _series(values, chunks, rng, shape=()):
    """A series of these values, given in chunks of random sizes; steps have gaps."""
    steps = np.cumsum(rng.integers(1, 4, len(values)))
    series = Series(shape)
    start = 0
    while start < len(values):
        stop = start + int(rng.integers(1, chunks + 1))
        series.extend(steps[start:stop], values[start:stop])
        start = stop
    return series, steps


@pytest.mark.parametrize(
    ("count", "chunks"), [(1, 1), (100, 7), (2048, 100), (2049, 1), (5000, 3), (20_001, 900), (70_000, 70_000)]
)
@pytest.mark.parametrize("shape", [(), (3,)])
def test_blocks_hold_what_numpy_finds_in_all_values(count, chunks, shape):
    rng = np.random.default_rng(count)
    values = rng.normal(size=(count, *shape))
    values[rng.random(values.shape) < 0.1] = np.nan
    values[rng.random(values.shape) < 0.05] = np.inf
    series, steps = _series(values, chunks, rng, shape)
    curve = series.curve()
    assert len(series) == count
    assert len(curve.mean) <= POINTS
    each = -(-count // len(curve.mean))
    each = 1 << (each - 1).bit_length()
    assert each == 1 or len(curve.mean) > POINTS // 2
    assert len(curve.mean) == -(-count // each)
    for i in {*range(0, len(curve.mean), 7), len(curve.mean) - 1}:
        part = values[i * each : (i + 1) * each]
        finite = np.isfinite(part)
        kept = np.where(finite, part, np.nan)
        assert (curve.first[i], curve.last[i]) == (steps[i * each], steps[min((i + 1) * each, count) - 1])
        np.testing.assert_array_equal(curve.nonfinite[i], (~finite).sum(axis=0))
        np.testing.assert_array_equal(curve.low[i], np.fmin.reduce(kept, axis=0))
        np.testing.assert_array_equal(curve.high[i], np.fmax.reduce(kept, axis=0))
        mean = np.ma.masked_invalid(part).mean(axis=0)
        np.testing.assert_allclose(curve.mean[i], np.ma.filled(mean, np.nan), rtol=1e-12)
    kinds = (series.first_nonfinite, ~np.isfinite(values)), (series.first_positive, np.isfinite(values) & (values > 0))
    for first, marked in kinds:
        expected = np.where(marked.any(axis=0), steps[marked.argmax(axis=0)], np.iinfo(np.int64).max)
        np.testing.assert_array_equal(first, expected)


@pytest.mark.parametrize("most", [1, 10, 512, POINTS])
@pytest.mark.parametrize("shape", [(), (3,)])
def test_means_of_a_few_points_follow_a_series_that_grows(most, shape):
    """Also what was found when the series was shorter: only what is new since then is looked at."""
    rng = np.random.default_rng(most)
    values = rng.normal(size=(9000, *shape))
    values[rng.random(values.shape) < 0.3] = np.nan
    series, start, kept = Series(shape), 0, []
    while start < len(values):
        stop = start + int(rng.integers(1, 900))
        series.extend(np.arange(start, min(stop, len(values))) + 1, values[start:stop])
        start = stop
        middle, means = series.means(most)
        curve = series.curve()
        each = -(-len(curve.mean) // most)
        parts = [slice(k, k + each) for k in range(0, len(curve.mean), each)]
        assert len(means) == len(parts) <= most
        assert middle.tolist() == [(curve.first[part][0] + curve.last[part][-1]) / 2 for part in parts]
        for i in {*range(0, len(parts), 37), len(parts) - 1}:
            mean = np.ma.masked_invalid(curve.mean[parts[i]]).mean(axis=0)
            np.testing.assert_allclose(means[i], np.ma.filled(mean, np.nan), rtol=1e-12)
        kept.append((means, means.copy()))
    for means, then in kept[-5:]:
        np.testing.assert_array_equal(means, then)


@pytest.mark.parametrize("count", [5, 63, 2048, 3000, 9000])
def test_the_last_values_are_there_as_they_were(count):
    rng = np.random.default_rng(0)
    values = rng.normal(size=count)
    series, steps = _series(values, 50, rng)
    found, recent = series.recent()
    np.testing.assert_array_equal(found, steps[-POINTS:])
    np.testing.assert_array_equal(recent, values[-POINTS:])


def test_a_long_series_is_summarized_in_blocks():
    series = Series()
    series.extend(np.arange(1, 8193), np.arange(8192.0))  # blocks of 4
    curve = series.curve()
    assert curve.first[1:3].tolist() == [5, 9]
    assert curve.mean[1:3].tolist() == [5.5, 9.5]


def test_a_million_steps_take_the_room_of_a_few_thousand():
    series = Series()
    series.extend(np.arange(1_000_000), np.zeros(1_000_000))
    size = sum(array.nbytes for array in vars(series).values() if isinstance(array, np.ndarray))
    assert size <= POINTS * 8 * 8
    assert len(series.curve().mean) <= POINTS


@pytest.mark.parametrize("steps", [[3, 3], [4, 3], [2], [1, 5]])
def test_steps_must_increase_and_values_have_the_shape_of_the_series(steps):
    series = Series()
    series.extend([1, 2], [0.0, 1.0])
    with pytest.raises(ValueError, match="each must be later"):
        series.extend(steps, np.zeros(len(steps)))
    with pytest.raises(ValueError, match=r"values are \(2, 3\) for steps \(2,\): must be \(2,\)"):
        series.extend([3, 4], np.zeros((2, 3)))
    assert series.curve().mean.tolist() == [0.0, 1.0]


@pytest.fixture
def runs():
    rng = np.random.default_rng(3)
    made = []
    for name, count in (("adam", 3000), ("größer/π", 10)):
        run = Run(name, ["w", "b"], [0.5, 1.0], {"optimizer": "Adam(0.1)"}, ["float32"] * 2 if name == "adam" else [])
        steps = np.arange(1, count + 1)
        for scalar, values in (("loss", rng.normal(size=count)), ("learning_rate", np.full(count, 0.1))):
            run.scalars[scalar] = Series()
            run.scalars[scalar].extend(steps, values)
        run.add_tensors(steps, {"gradient_norm": rng.normal(size=(count, 2))})
        run.add_tensors([7], {"gradient": rng.integers(0, 9, size=(1, 2, 3))})
        made.append(run)
    return RunSet(made)


def test_a_file_gives_back_what_was_saved_and_the_run_goes_on(runs, tmp_path):
    runs.save(tmp_path / "runs.safetensors")
    loaded = RunSet.load(tmp_path / "runs.safetensors")
    assert [run.name for run in loaded] == ["adam", "größer/π"]
    for run in runs:
        other = loaded[run.name]
        assert (other.parameters, other.notes, other.edges.tolist()) == (run.parameters, run.notes, run.edges.tolist())
        assert other.storage == run.storage
        for step in (run.last_step + 1, run.last_step + 5):
            run.add_scalars(step, {"loss": 0.5})
            other.add_scalars(step, {"loss": 0.5})
        for kind in ("scalars", "tensors", "histograms"):
            assert list(getattr(other, kind)) == list(getattr(run, kind))
            for name, series in getattr(run, kind).items():
                again = getattr(other, kind)[name]
                assert len(again) == len(series)
                arrays = [
                    (*each.curve(), *each.recent(), each.first_nonfinite, each.first_positive) for each in (series, again)
                ]
                for ours, theirs in zip(*arrays, strict=True):
                    np.testing.assert_array_equal(theirs, ours)


def test_one_run_is_saved_and_loaded(runs, tmp_path):
    runs["adam"].save(tmp_path / "run.safetensors")
    assert Run.load(tmp_path / "run.safetensors").name == "adam"
    runs.save(tmp_path / "run.safetensors")
    with pytest.raises(ValueError, match=r"has 2 runs: use RunSet\.load"):
        Run.load(tmp_path / "run.safetensors")


def test_a_step_that_was_known_already_changes_nothing():
    run = Run()
    run.add_scalars(2, {"loss": 1.0})
    with pytest.raises(ValueError, match="'loss' has a value of step 2 already"):
        run.add_scalars(2, {"accuracy": 0.5, "loss": 1.0})
    assert list(run.scalars) == ["loss"]


def test_pandas_gets_a_row_for_each_step(runs):
    pd = pytest.importorskip("pandas")
    runs["größer/π"].add_scalars(12, {"accuracy": 0.5})
    frame = runs["größer/π"].to_pandas()
    assert frame.index.tolist() == [*range(1, 11), 12]
    assert list(frame.columns) == ["loss", "learning_rate", "accuracy"]
    assert frame["accuracy"].tolist()[-1] == 0.5
    assert pd.isna(frame["loss"].iloc[-1])
