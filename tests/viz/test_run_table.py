"""More than eight runs: a table beside the picture chooses those that are drawn, in pages and in still pictures."""

import numpy as np
import pytest
import torch
from drawn_scenes import words_of

import tristep
from tristep.viz import LossView, Run, RunSet, SweepView

LOSSES = [0.5, 0.1, float("nan"), 0.3, 0.9, 0.2, 0.8, 0.4, 0.7, 0.6, 1.0, 1.1]  # of the last step


def _runs(losses=LOSSES):
    return RunSet([_run(f"run {k}", loss) for k, loss in enumerate(losses)])


def _run(name, loss):
    run = Run(name)
    for step in range(1, 4):
        run.add_scalars(step, {"loss": loss * (4 - step), "learning_rate": 0.1})
    return run


def _names(figure):
    return {text.get_text() for text in words_of(figure)}


def test_eight_runs_have_a_legend_and_nine_a_table():
    few = LossView(_runs([0.1] * 8)).scene()
    assert few.runs is None
    assert {layer.run for panel in few.panels for layer in panel.layers} == {None}
    many = LossView(_runs([0.1] * 9)).scene()
    assert many.runs.names == [f"run {k}" for k in range(9)]
    assert {layer.run for panel in many.panels for layer in panel.layers} == {None, *range(9)}


def test_the_table_has_the_last_values_and_draws_the_best_first():
    runs = LossView(_runs()).scene().runs
    assert runs.columns["steps"] == [3.0] * 12
    np.testing.assert_allclose([each for each in runs.columns["loss"] if each != "not finite"], np.delete(LOSSES, 2))
    assert runs.columns["loss"][2] == "not finite"
    assert [runs.names[k] for k in runs.shown] == [f"run {k}" for k in (0, 1, 3, 5, 6, 7, 8, 9)]


def test_a_still_draws_the_chosen_runs_and_says_how_many():
    view = LossView(_runs())
    words = _names(view.figure())
    assert "run 1" in words
    assert "run 10" not in words
    assert any(word.startswith("8 of 12 runs are drawn") for word in words)
    view.display._receive({"kind": "runs", "shown": [10, 2]})  # as a page tells
    words = _names(view.figure())
    assert {"run 10", "run 2"} <= words
    assert "run 1" not in words
    assert any(word.startswith("2 of 12 runs are drawn") for word in words)


def test_all_trainings_of_a_sweep_are_in_the_table():
    batches = [(torch.randn(8, 2), torch.randint(0, 2, (8,))) for _ in range(3)]
    rates = [0.01, 0.03, 0.1, 0.3, 1.0]
    sweep = tristep.sweep(
        lambda: torch.nn.Linear(2, 2),
        torch.nn.functional.cross_entropy,
        batches,
        grid={"learning_rate": rates, "wd": [0.0, 0.1]},
    )
    scene = SweepView(sweep).scene()
    assert len(scene.runs.names) == sweep.final.size == 10
    np.testing.assert_allclose(scene.runs.columns["final"], sweep.final.ravel())
    curves = {layer.run: layer for layer in scene.panels[1].layers if layer.run is not None}
    for k, (rate, decay) in enumerate((rate, decay) for rate in rates for decay in (0.0, 0.1)):
        row = {heading: entries[k] for heading, entries in scene.runs.columns.items()}
        assert (row["learning rate"], row["weight decay"]) == (rate, decay)
        np.testing.assert_allclose(curves[k].y, sweep.losses.reshape(10, -1)[k], rtol=1e-6)


def test_core_widgets_have_a_list_of_several():
    from tristep.viz.render.ipywidgets import SceneBox

    told = []
    box = SceneBox(LossView(_runs()).scene(), told.append)
    several = next(widget for widget in box._rows.widgets if "run" in widget.description)
    assert several.value == (0, 1, 3, 5, 6, 7, 8, 9)
    assert several.options[2][0].startswith("run 2: steps 3, loss not finite")
    before = box._shown.value
    several.value = (10,)
    assert told == [{"kind": "runs", "shown": [10]}]
    assert box._shown.value != before
    box.close()


@pytest.mark.parametrize("shown", [[0, -1], [1.5], None])
def test_what_no_page_tells_is_ignored(shown):
    from tristep.viz.render.canvas import checked

    assert checked({"kind": "runs", "shown": shown}) is None
    assert checked({"kind": "runs", "shown": [2, 0]}) == {"kind": "runs", "shown": [2, 0]}
