"""Runs of other programs, written by their own libraries, and files that are damaged."""

import json
import struct
import tracemalloc
from contextlib import nullcontext

import numpy as np
import pytest

pytest.importorskip("matplotlib")

from tristep import viz
from tristep.contrib.imported_runs import read as imports
from tristep.viz import Run, read_run
from tristep.viz.record.probes import QUANTITIES

pytestmark = pytest.mark.sample(0)  # the quick tier runs a smoke test

STEPS = np.arange(0, 300, 10)
LOSSES = np.exp(-STEPS / 100)


def _values(run, name="loss"):
    return {int(step): float(value) for step, value in zip(*run.scalars[name].recent(), strict=True)}


@pytest.mark.sample(0)
def test_a_csv_of_lightning(tmp_path):
    torch = pytest.importorskip("torch")
    logger = pytest.importorskip("lightning.pytorch.loggers").CSVLogger(tmp_path, name="a", version=0)
    for step, loss in zip(STEPS, LOSSES, strict=True):
        logger.log_metrics({"train_loss": torch.tensor(loss)}, step=int(step))
        if step % 100 == 0:
            logger.log_metrics({"val_loss": float(2 * loss)}, step=int(step))
    logger.save()
    run = read_run(tmp_path / "a" / "version_0" / "metrics.csv", "mine", names={"train_loss": "loss"})
    assert run.name == "mine"
    assert _values(run) == dict(zip(STEPS.tolist(), LOSSES.tolist(), strict=True))
    assert list(_values(run, "val_loss")) == [0, 100, 200]


def test_a_state_of_a_hugging_face_trainer(tmp_path):
    """Training and evaluation of one step are two entries, and the last has texts of a run's end."""
    history = [
        {"loss": 2.5, "grad_norm": 1.25, "learning_rate": 1e-3, "epoch": 0.5, "step": 10},
        {"loss": 1.5, "grad_norm": float("nan"), "learning_rate": 5e-4, "epoch": 1.0, "step": 20},
        {"eval_loss": 1.75, "eval_runtime": 0.5, "epoch": 1.0, "step": 20},
        {"train_loss": 2.0, "train_runtime": 3.0, "epoch": 1.0, "step": 20, "note": "the end"},
    ]
    folder = tmp_path / "checkpoint-20"
    folder.mkdir()
    pytest.importorskip("transformers").TrainerState(log_history=history, global_step=20).save_to_json(
        str(folder / "trainer_state.json")
    )
    with pytest.warns(UserWarning, match="left out 1 values that are no numbers"):
        run = read_run(folder)
    assert (run.name, run.notes["source"]) == ("checkpoint-20", "Hugging Face")
    assert _values(run) == {10: 2.5, 20: 1.5}
    assert _values(run, "epoch") == {10: 0.5, 20: 1.0}
    assert (_values(run, "eval_loss"), _values(run, "train_runtime")) == ({20: 1.75}, {20: 3.0})
    assert np.isnan(_values(run, "grad_norm")[20])


@pytest.mark.parametrize("text", ["[1]", '{"log_history": 3}', '{"log_history": [{"loss": 1.0}]}', "{", '{"log_history": ['])
def test_another_file_of_json_is_refused(tmp_path, text):
    (tmp_path / "trainer_state.json").write_text(text)
    with pytest.raises(ValueError, match="Hugging Face file"):
        read_run(tmp_path / "trainer_state.json")


def test_a_csv_of_pandas_with_another_name_for_the_step(tmp_path):
    pandas = pytest.importorskip("pandas")
    path = tmp_path / "a.csv"
    pandas.DataFrame({"t": STEPS, "loss": LOSSES, "who": "me"}).to_csv(path, index=False)
    with pytest.raises(ValueError, match="no column 'step' .* among 't', 'loss', 'who'"):
        read_run(path)
    with pytest.warns(UserWarning, match="left out 30 values that are no numbers"):
        run = read_run(path, step="t")
    assert _values(run) == dict(zip(STEPS.tolist(), LOSSES.tolist(), strict=True))


@pytest.mark.parametrize("new_style", [False, True])
def test_tensorboards_event_files(tmp_path, new_style):
    board = pytest.importorskip("torch.utils.tensorboard")
    with board.SummaryWriter(tmp_path) as writer:
        for step, loss in zip(STEPS[:20], LOSSES, strict=False):
            writer.add_scalar("train/loss", loss, step, new_style=new_style, double_precision=new_style)
        writer.add_text("words", "many", 3)
        writer.add_histogram("weights", LOSSES, 3)
    with board.SummaryWriter(tmp_path, filename_suffix=".later") as writer:  # goes back by two steps
        for step, loss in zip(STEPS[18:], LOSSES[18:], strict=True):
            writer.add_scalar("train/loss", loss, step, new_style=new_style, double_precision=new_style)
    with pytest.warns(
        UserWarning, match="left out 1 values of text, 1 values of histograms, 2 values of steps that come again"
    ):
        run = read_run(tmp_path, names={"train/loss": "loss"})
    expected = LOSSES if new_style else LOSSES.astype(np.float32).astype(float)
    assert _values(run) == dict(zip(STEPS.tolist(), expected.tolist(), strict=True))


@pytest.mark.filterwarnings("error")
def test_event_files_in_tensorboards_order_without_what_a_resumed_program_has_voided(tmp_path):
    """Files of one second are counted, up to 10 and more; TensorBoard drops values from `purge_step` on, of all files."""
    board = pytest.importorskip("torch.utils.tensorboard")
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for k in range(12):
        with board.SummaryWriter(tmp_path, purge_step={4: 2, 11: 9}.get(k)) as writer:
            for step in {4: (2, 3, 4), 11: (9, 10, 11)}.get(k, (k,)):
                writer.add_scalar("loss", 100 * k + step, step)
        (new,) = [file for file in tmp_path.iterdir() if "tfevents.1." not in file.name]
        new.rename(tmp_path / f"events.out.tfevents.1.host.{k + 1}")
    found = _values(read_run(tmp_path))
    joined = tmp_path / "joined"
    joined.mkdir()
    parts = [(tmp_path / f"events.out.tfevents.1.host.{k + 1}").read_bytes() for k in range(12)]
    (joined / "events.out.tfevents.1.host").write_bytes(b"".join(parts))
    judge = events.EventAccumulator(str(joined))
    judge.Reload()
    assert found == {event.step: event.value for event in judge.Scalars("loss")}
    assert list(found) == list(range(12))
    assert [found[2], found[4], found[5], found[9]] == [402, 404, 505, 1109]


@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_large_steps_are_exact_and_no_text_is_taken_for_a_number(tmp_path, suffix):
    path = tmp_path / f"a.{suffix}"
    steps = [2**53, 2**53 + 1, 2**61 - 1]
    lines = {"csv": ["step,loss,date", *(f"{step},{k},20240101_120000" for k, step in enumerate(steps))]}
    lines["jsonl"] = [f'{{"step": {step}, "loss": {k}, "date": "20240101_120000"}}' for k, step in enumerate(steps)]
    path.write_text("\n".join(lines[suffix]) + "\n")
    with pytest.warns(UserWarning, match="left out 3 values that are no numbers"):
        run = read_run(path)
    assert _values(run) == {step: float(k) for k, step in enumerate(steps)}
    assert list(run.scalars) == ["loss"]


def test_damaged_event_files(tmp_path):
    board = pytest.importorskip("torch.utils.tensorboard")
    with board.SummaryWriter(tmp_path) as writer:
        for step in range(50):
            writer.add_scalar("loss", 0.5, step)
    (file,) = tmp_path.iterdir()
    data = file.read_bytes()
    file.write_bytes(data[:-3])
    with pytest.warns(UserWarning, match="1 incomplete last records"):
        assert list(_values(read_run(file))) == list(range(49))
    changed, long = data[:700] + bytes([data[700] ^ 1]) + data[701:], data + struct.pack("<Q", 1 << 60) + bytes(100)
    for broken in (changed, long, b"", b"words that are no events at all, but long enough"):
        file.write_bytes(broken)
        with pytest.raises(ValueError, match="not a TensorBoard file, or a damaged one"):
            read_run(file)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.csv", "step,loss\n1,2\n2\n3,4\n", "line 3 has 1 cells, the header 2"),
        ("a.csv", "step,loss\n1.5,2\n", "a step is '1.5': must be an integer"),
        ("a.csv", "step,loss\n1e300,2\n", "a step is '1e300': must be an integer"),
        ("a.csv", "step,loss\n9007199254740993.0,2\n", "a step is '9007199254740993.0': must be an integer"),
        ("a.csv", "step,loss\n9223372036854775808,2\n", "step 9223372036854775808 is too large"),
        ("a.csv", "step,loss\n20240101_120000,2\n", "a step is '20240101_120000': must be an integer"),
        ("a.csv", "step,loss\nnan,2\n", "a step is 'nan': must be an integer"),
        ("a.jsonl", '{"step": true, "loss": 2}\n', "a step is 'True': must be an integer"),
        ("a.csv", "step,loss,loss\n1,2,3\n", "two columns have the same name"),
        ("a.csv", 'step,loss\n1,"2\n', "line 2: unexpected end of data"),
        ("a.csv", "step,loss\n1," + "9" * 200_000 + "\n", "larger than field limit"),
        ("a.csv", b"step,loss\n1,\xff\n", "not a CSV file"),
        ("a.csv", "step," + ",".join(f"c{k}" for k in range(5000)) + "\n1" + ",1" * 5000 + "\n", "more than 4,096 scalars"),
        ("a.jsonl", '{"step": 1, "loss": 2}\n{"step": \n{"step": 3}\n', "not a JSON lines file"),
        ("a.jsonl", "[1, 2]\n", "no object"),
        ("a.jsonl", '{"step": [], "loss": 1}\n', "not a JSON lines file"),
        ("a.jsonl", "[" * 100_000, "not a JSON lines file"),
        ("a.txt", "step,loss\n", "must be a .csv, .jsonl or .safetensors file"),
    ],
)
def test_files_that_are_refused(tmp_path, name, text, message):
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError, match=message):
        read_run(path)


def test_lines_that_are_too_long_are_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(imports, "MOST_LINE", 100)
    for name in ("a.csv", "a.jsonl"):
        (tmp_path / name).write_text("x" * 101)
        with pytest.raises(ValueError, match="a line has more than 100 characters"):
            read_run(tmp_path / name)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.csv", "step,loss,more\n1,2,3\n2,3,4\n3,1"),
        ("a.jsonl", '{"step": 1, "loss": 2}\n{"step": 2, "loss": 3}\n{"step": 3, "lo'),
    ],
)
def test_the_end_of_a_program_that_was_killed(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    with pytest.warns(UserWarning, match="1 incomplete last lines"):
        assert _values(read_run(tmp_path / name)) == {1: 2.0, 2: 3.0}


def test_a_folder_without_a_run(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_run(tmp_path / "none")
    with pytest.raises(ValueError, match="or a folder of event files"):
        read_run(tmp_path)
    with pytest.raises(ValueError, match="step='t' is for .csv and .jsonl files"):
        read_run(tmp_path, step="t")


def test_numbers_of_parameters_are_those_of_a_recorded_run(tmp_path):
    rows = [{"step": k, "loss": 1 / k, "gradient_norm/a": 1.0 * k, "gradient_norm/b/c": 2.0 * k} for k in range(1, 2000)]
    del rows[0]["gradient_norm/b/c"]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = read_run(tmp_path / "a.jsonl")
    assert run.parameters == ["a", "b/c"]
    steps, values = run.tensors["gradient_norm"].recent()
    assert steps.tolist() == list(range(1, 2000))
    np.testing.assert_array_equal(values, [[1, np.nan]] + [[k, 2 * k] for k in range(2, 2000)])
    assert len(run.scalars["loss"]) == 1999
    run.save(tmp_path / "a.safetensors")
    assert read_run(tmp_path / "a.safetensors").parameters == run.parameters


@pytest.mark.parametrize(
    "show",
    [
        lambda run: viz.LossView([run, Run("other")]),
        lambda run: viz.LossView(run, scalars=["loss", "accuracy"]),
        viz.Dashboard,
        viz.TensorHeatmap,
        viz.UpdateRatioView,
        viz.WeightsView,
        lambda run: viz.ScheduleView(lambda step: 0.1, 300, loss=run),
    ],
    ids=["losses", "scalars", "dashboard", "heatmap", "ratios", "weights", "schedule"],
)
def test_every_view_of_runs_draws_one_with_scalars_only(tmp_path, show):
    columns = np.column_stack([STEPS, LOSSES, LOSSES / 10, 1 - LOSSES])
    np.savetxt(
        tmp_path / "a.csv", columns, ("%d", "%g", "%g", "%g"), ",", header="step,loss,learning_rate,accuracy", comments=""
    )
    run = read_run(tmp_path / "a.csv")
    view = show(run)
    assert view.figure().axes
    assert view.describe()
    assert view.html(tmp_path / "page.html") is not None or (tmp_path / "page.html").exists()
    assert isinstance(viz.diagnose(run), list)
    assert "accuracy" in repr(run)
    assert not run.to_pandas().empty


def _event_file(path):
    """An event of some bytes that claims to have 2**27 numbers."""
    board = pytest.importorskip("torch.utils.tensorboard")
    large = pytest.importorskip("tensorboard.compat.proto.summary_pb2").Summary()
    value = large.value.add(tag="loss")
    value.metadata.plugin_data.plugin_name = "scalars"
    value.tensor.dtype = 1
    value.tensor.tensor_shape.dim.add(size=1 << 27)
    value.tensor.float_val.append(1.0)
    file = board.FileWriter(str(path))
    file.add_summary(large, 1)
    file.close()
    return path


def _json_file(path):
    """Some 2 MB: 65,536 parameters in the first line, and one of them in those that follow."""
    lines = [{"step": 0} | {f"gradient_norm/{i:x}": 0 for i in range(1 << 16)}]
    lines += [{"step": step} | {f"{quantity}/0": 1 for quantity in QUANTITIES} for step in range(1, 50)]
    path = path.with_suffix(".jsonl")
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def _line_of_objects(path):
    """Some 3 MB, of which lists would take 56 bytes for each 3."""
    path = path.with_suffix(".jsonl")
    path.write_text('{"step": 1, "loss": [' + "[]," * (1 << 20) + "1]}\n")
    return path


@pytest.mark.filterwarnings("ignore:path=.*left out")
@pytest.mark.parametrize(
    ("write", "message"),
    [
        (_line_of_objects, "a line has more than 593,920 values"),
        (_event_file, None),
        (_json_file, "65,977 numbers of 65,536 parameters at different steps, .* room for 28,966,912: each"),
    ],
)
def test_memory_is_bounded_by_the_size_of_the_file(tmp_path, write, message):
    path = write(tmp_path / "run")
    (tmp_path / "a.csv").write_text("step,loss\n1,2.0\n")
    read_run(tmp_path / "a.csv")  # what is imported once is in memory then
    tracemalloc.start()
    try:
        with nullcontext() if message is None else pytest.raises(ValueError, match=message):
            assert not read_run(path).scalars
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1 << 26
