"""The demo and the command line around it: what they print, the picture, and how they refuse."""

import contextlib
import importlib.util
import io

import numpy as np
import pytest
import torch

pytest.importorskip("matplotlib")  # `make gpu` uses what a machine has
if importlib.util.find_spec("sklearn") is None:  # to import it takes seconds, for each process that collects the tests
    pytest.skip("needs scikit-learn", allow_module_level=True)

from PIL import Image

import tristep
from tristep import demo
from tristep.__main__ import main
from tristep.kernels import choose_engine


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """One short run: its exit status, its output, and where the picture is."""
    out, words = tmp_path_factory.mktemp("demo") / "curves.png", io.StringIO()
    with contextlib.redirect_stdout(words):
        status = main(["demo", "--epochs", "1", "--optimizers", "adam", "signum", "--out", str(out)])
    return status, words.getvalue(), out


def test_the_first_step_is_printed_and_matches(shown):
    status, words, _ = shown
    before, gradient, after, expected = (
        np.array(_after(words, start).split(), dtype=float)
        for start in ("weight before", "gradient", "weight after", "w - lr / batch * grad")
    )
    assert status == 0
    assert "They match" in words
    np.testing.assert_allclose(after, before - 1.0 / 8 * gradient, atol=2e-5)  # five digits are printed
    np.testing.assert_array_equal(after, expected)
    assert np.abs(after - before).min() > 0.01


def test_the_table_has_a_row_for_each_optimizer_in_the_order_asked_for(shown, monkeypatch):
    monkeypatch.delenv("TRISTEP_ENGINE", raising=False)  # as when it was shown
    _, words, _ = shown
    head, *rows = words[words.index("optimizer ") :].split("\n\n")[0].splitlines()
    assert head.split() == ["optimizer", "loss", "accuracy", "µs/step", "engine", "learning", "rate"]
    assert [row.split()[0] for row in rows] == ["adam", "signum"]
    for row in rows:
        _, loss, accuracy, microseconds, engine, *_ = row.split()
        assert 0 < float(loss) < np.log(10)  # that of guessing
        assert 0.5 < float(accuracy.rstrip("%")) / 100 <= 1
        assert float(microseconds) > 0
        assert engine == choose_engine(demo.find_device())
    assert rows[0].endswith("0.006, FactorScheduler")


def test_the_picture_is_a_png_with_something_on_it(shown):
    _, words, out = shown
    assert f"Picture: {out}" in words
    image = Image.open(out)
    assert image.format == "PNG"
    assert image.width > 1000
    assert len(set(image.convert("RGB").get_flattened_data())) > 100


def test_every_optimizer_starts_at_the_same_loss_and_lowers_it():
    data, batches = demo.load(demo.find_device()), demo.make_batches(1)
    runs = {name: demo.train(name, settings, data, batches) for name, settings in demo.recipes(len(batches)).items()}
    assert len(runs) >= 5
    assert len({run.losses[0] for run in runs.values()}) == 1
    for name, run in runs.items():
        assert len(run.losses) == len(run.rates) == len(run.seconds) == len(batches)
        assert np.mean(run.losses[-5:]) < run.losses[0], name


def test_the_table_takes_the_last_epoch_and_the_median_step():
    losses = [100.0] * demo.EPOCH + [0.25] * demo.EPOCH
    run = demo.Run(losses, rates=[0.05] * len(losses), seconds=[9.0, 9.0, 5e-5, 5e-5, 5e-5], accuracy=0.5)
    row = demo.table({"adagrad": run}, {"adagrad": {"learning_rate": 0.05}}, "eager").splitlines()[1]
    assert row.split() == ["adagrad", "0.2500", "50.0%", "50", "eager", "0.05,", "constant"]


def test_the_engine_asked_for_does_the_work(tmp_path, capsys, monkeypatch):
    engines = []

    class Watched(tristep.Trainer):
        def __init__(self, *arguments, engine):
            engines.append(engine)
            super().__init__(*arguments, engine=engine)

    monkeypatch.setattr(demo, "Trainer", Watched)
    out = tmp_path / "eager.png"
    assert main(["demo", "--epochs", "1", "--optimizers", "sgd", "--engine", "eager", "--out", str(out)]) == 0
    assert engines == ["eager", "eager"]  # the first step, and the one training
    assert " eager " in capsys.readouterr().out
    assert out.exists()


def test_a_wrong_first_step_ends_the_demo(tmp_path, capsys, monkeypatch):
    class TooFar(tristep.Trainer):
        def step(self, batch_size):
            super().step(batch_size / 2)

    monkeypatch.setattr(demo, "Trainer", TooFar)
    assert main(["demo", "--epochs", "1", "--out", str(tmp_path / "x.png")]) == 1
    printed = capsys.readouterr().out
    assert "These are not the same" in printed
    assert "Handwritten" not in printed


def test_a_gpu_is_used_unless_the_cpu_engine_is_asked_for(monkeypatch):
    monkeypatch.delenv("TRISTEP_ENGINE", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert demo.find_device() == demo.find_device("triton") == torch.device("cuda")
    assert demo.find_device("cpu") == torch.device("cpu")
    monkeypatch.setenv("TRISTEP_ENGINE", "cpu")
    assert demo.find_device() == torch.device("cpu")


def _after(words, start):
    """The rest of the one line that begins so."""
    (line,) = [line.strip() for line in words.splitlines() if line.strip().startswith(start)]
    return line.removeprefix(start)
