"""What loggers get from a Recorder, read back by the loggers' own libraries and by NumPy, pandas and json."""

import csv
import json
import subprocess
import sys
import threading
import warnings

import numpy as np
import pytest
import torch

import tristep
from tristep.viz import Recorder, Run
from tristep.viz.record import loggers

pytestmark = pytest.mark.usefixtures("few_steps")

STEPS = 7


def _train(to, steps=STEPS, source=None, note=None, **settings):
    """The run and the recorder of a small training; `note` is called after each of its steps."""
    torch.manual_seed(0)
    net = torch.nn.Linear(3, 2)
    trainer = tristep.Trainer(net, "sgd", {"learning_rate": 0.1})
    recorder = Recorder(trainer, to=to, **settings)
    for number in range(1, steps + 1):
        trainer.zero_grad()
        loss = net(torch.randn(4, 3)).square().mean()
        loss.backward()
        trainer.step(1)
        recorder.step(loss=loss)
        if note is not None:
            note(recorder, number)
    recorder.trainer = trainer  # which lives no longer than that otherwise
    return recorder


def _expected(run, every=1, quantities=loggers.LOGGED):
    """Of each step what a logger should have: from the run's own arrays."""
    found = {}
    for name, series in run.scalars.items():
        for step, value in zip(*series.recent(), strict=True):
            found.setdefault(int(step), {})[name] = float(value)
    for quantity in quantities:
        for step, row in zip(*run.tensors[quantity].recent(), strict=True):
            found[int(step)] |= {f"{quantity}/{name}": float(v) for name, v in zip(run.parameters, row, strict=True)}
    return {step: values for step, values in found.items() if (step - 1) % every == 0}


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("quantities", [loggers.LOGGED, ("cosine",)])
def test_a_function_gets_what_the_run_has_in_a_thread_of_its_own(every, quantities):
    got, threads = {}, set()

    def log(step, values):
        got[step] = values
        threads.add(threading.get_ident())

    with _train([log], log_every=every, log_quantities=quantities) as recorder:
        pass
    assert got == _expected(recorder.run, every, quantities)
    assert list(got) == sorted(got)
    assert len(threads) == 1
    assert threads != {threading.get_ident()}


def test_files_hold_all_steps_and_names_that_come_late(tmp_path):
    pandas = pytest.importorskip("pandas")

    def validate(recorder, number):
        recorder.flush()
        if number == 4:
            recorder.run.add_scalars(4, {"validation_loss": 0.25})

    with _train([tmp_path / "a.csv", str(tmp_path / "a.jsonl")], note=validate) as recorder:
        pass
    lines = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    table = pandas.read_csv(tmp_path / "a.csv").groupby("step").max()
    merged = {}
    for line in lines:
        merged.setdefault(line.pop("step"), {}).update(line)
    assert merged == _expected(recorder.run)
    assert {step: row.dropna().to_dict() for step, row in table.iterrows()} == merged


def test_tensorboard_reads_scalars_and_histograms(tmp_path):
    board = pytest.importorskip("torch.utils.tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    writer = board.SummaryWriter(tmp_path)
    with _train([writer], histograms=["gradient", "weight"], histogram_every=3) as recorder:
        pass
    writer.add_scalar("mine", 1.0, 3)  # what was given open stays open
    writer.close()
    found = EventAccumulator(str(tmp_path), size_guidance={"scalars": 0, "histograms": 0}).Reload()
    expected = _expected(recorder.run)
    assert set(found.Tags()["scalars"]) == {"mine", *expected[1]}
    for name in expected[1]:
        events = found.Scalars(name)
        assert [each.step for each in events] == list(expected)
        assert [each.value for each in events] == [float(np.float32(row[name])) for row in expected.values()]
    edges = [-8.0, *recorder.run.edges, 8.0]
    assert len(found.Tags()["histograms"]) == 4
    for what in ("gradient_histogram", "weight_histogram"):
        steps, counts = recorder.run.histograms[what].recent()
        for i, parameter in enumerate(recorder.run.parameters):
            events = found.Histograms(f"{what}/{parameter}")
            assert [each.step for each in events] == steps.tolist() == [1, 4, 7]
            for event, row in zip(events, counts[:, i], strict=True):
                assert event.histogram_value.bucket_limit == edges[1:]
                assert event.histogram_value.bucket == row.tolist()
                assert event.histogram_value.num == row.sum()


@pytest.mark.sample(0)  # whose own start takes seconds
def test_wandb_gets_scalars_and_histograms(tmp_path, monkeypatch):
    """W&B's summary has the last step; earlier ones are seen where W&B takes them, for it cannot read an offline run."""
    wandb = pytest.importorskip("wandb")
    rows = {}

    def log(values, step):
        rows.setdefault(step, {}).update(values)
        taken(values, step=step)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the library's own
        run = wandb.init(project="tests", dir=tmp_path, mode="offline", settings=wandb.Settings(silent=True))
    with run:
        taken = run.log
        monkeypatch.setattr(run, "log", log)
        with _train([run], histograms=["gradient"], histogram_every=3) as recorder:
            pass
        taken({"mine": 1}, step=STEPS + 1)  # what was given open stays open; the step before is complete now
        summary, expected = dict(run.summary), _expected(recorder.run)
    assert {name: summary[name] for name in expected[STEPS]} == expected[STEPS]
    _, counts = recorder.run.histograms["gradient_histogram"].recent()
    for i, parameter in enumerate(recorder.run.parameters):
        histogram = summary[f"gradient_histogram/{parameter}"]
        assert histogram["values"] == counts[-1, i].tolist()
        assert histogram["bins"] == [-8.0, *recorder.run.edges, 8.0]
    assert {step: {n: v for n, v in row.items() if n in expected[1]} for step, row in rows.items()} == expected


def test_a_logger_that_fails_is_named_once_and_at_the_end():
    got, seen = {}, threading.Event()

    def log(step, values):
        if step % 2:
            raise OSError("the disk is full")
        got[step] = values
        seen.set()

    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        recorder = _train([log])
        recorder.flush()
        seen.wait(30)  # step 1 has failed before
        recorder.flush()
        recorder.flush()
    assert [str(each.message).partition(";")[0] for each in warned] == [
        f"{log.__qualname__} does not log all steps (OSError: the disk is full)"
    ]
    with pytest.raises(RuntimeError, match=r"log: 4 steps are missing \(OSError: the disk is full\)"):
        recorder.close()
    assert sorted(got) == [2, 4, 6]
    recorder.close()


@pytest.mark.filterwarnings("ignore:.*it is slower than the training")
def test_what_a_slow_logger_misses_is_counted():
    go = threading.Event()
    recorder = _train([lambda step, values: go.wait(60)], steps=1)
    recorder.flush()
    run = recorder.run
    for first in range(2, 30_000, 1000):
        steps = np.arange(first, first + 1000)
        run.scalars["loss"].extend(steps, np.zeros(1000))
        recorder._now.loggers.send(run, int(steps[-1]))
    recorder._now.last = int(steps[-1])
    go.set()
    with pytest.raises(RuntimeError, match=r"\d+ values are missing, because it was slower than the training"):
        recorder.close()


def test_a_logger_that_hangs_is_given_up(monkeypatch):
    monkeypatch.setattr(loggers, "PATIENCE", 0.2)
    go = threading.Event()
    recorder = _train([lambda step, values: go.wait(60)])
    with pytest.raises(RuntimeError, match="has taken nothing for 0.2 s"):
        recorder.close()
    go.set()
    assert recorder.trainer.telemetry is None


def test_a_run_that_goes_back_is_logged_from_where_it_was():
    got = {}
    recorder = _train([got.__setitem__])
    earlier = Run("branch", recorder.run.parameters)
    with pytest.warns(UserWarning, match=f"goes back to step 2, and .* steps up to {STEPS}: it gets none before 8"):
        recorder.record_into(earlier, 2)
    for step in range(3, 11):
        earlier.add_scalars(step, {"loss": -1.0 * step})
    recorder._now.last = 10
    recorder.close()
    assert [got[step]["loss"] for step in (8, 9, 10)] == [-8.0, -9.0, -10.0]
    assert all(got[step]["loss"] > 0 for step in range(1, STEPS + 1))


def test_a_file_that_is_there_is_refused_and_left_alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there.csv").write_text("mine")
    trainer = tristep.Trainer(torch.nn.Linear(3, 2), "sgd")
    with pytest.raises(FileExistsError, match="choose another name"):
        Recorder(trainer, to=["b.jsonl", "there.csv"])
    assert trainer.telemetry is None
    assert (tmp_path / "there.csv").read_text() == "mine"


SCRIPT = """
import sys, torch, tristep
from tristep.viz import Recorder

def main():
    net = torch.nn.Linear(2, 1)
    trainer = tristep.Trainer(net, "sgd", engine="eager")
    recorder = Recorder(trainer, to=[sys.argv[1]])
    for _ in range(40):
        trainer.zero_grad()
        loss = net(torch.ones(4, 2)).sum()
        loss.backward()
        trainer.step(4)
        recorder.step(loss=loss)
    {end}
    return recorder

kept = main()
"""


@pytest.mark.sample(0)
@pytest.mark.parametrize("end", ["return None", "raise ValueError('of the script')"])
def test_a_script_that_does_not_close_its_recorder_has_logged_all(end, tmp_path):
    """Also where the recorder is gone before its end."""
    path = tmp_path / "log.csv"
    done = subprocess.run([sys.executable, "-c", SCRIPT.format(end=end), path], capture_output=True, text=True, check=False)
    assert done.returncode == ("raise" in end), done.stderr
    assert ("of the script" in done.stderr) if "raise" in end else (done.stderr == "")
    with path.open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows] == list(range(1, 41))
    assert all(row["loss"] and row["gradient_norm/weight"] for row in rows)
