"""Files that earlier versions wrote, which tests/golden/earlier/README.md describes: trainings go on as they did then."""

import json
import shutil

import numpy as np
import pytest
from earlier_trainings import FILES, FOLDER, SAVED, STEPS

from tristep import initializer, lr_scheduler

pytest.importorskip("safetensors", reason="files need it")

RECORDED = np.load(FOLDER / "recorded.npz")
TEXTS = json.loads((FOLDER / "texts.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", FILES)
def test_a_training_goes_on_as_in_the_version_that_saved_it(name, tmp_path, monkeypatch):
    monkeypatch.setenv("TRISTEP_ENGINE", "eager")  # which computed the numbers
    kind, row = FILES[name]
    start, after = np.split(RECORDED[name], [row.size])
    training, file = kind(row, start), tmp_path / name
    (shutil.copytree if (FOLDER / name).is_dir() else shutil.copy)(FOLDER / name, file)
    training.load(file)
    for step, expected in enumerate(np.split(after, STEPS - SAVED), SAVED + 1):
        training.step(step)
        np.testing.assert_allclose(training.numbers(), expected, rtol=row.close, atol=row.close)


@pytest.mark.parametrize("saved", TEXTS["schedules"], ids=lambda saved: saved["config"]["class"])
def test_a_saved_schedule_goes_on(saved):
    schedule = lr_scheduler.from_config(saved["config"])
    np.testing.assert_allclose([schedule(count) for count in range(6, 13)], saved["rates"], rtol=1e-12)


@pytest.mark.parametrize("text", TEXTS["initializers"])
def test_a_saved_initializer_is_made_again(text):
    assert initializer.create(text).dumps() == text
