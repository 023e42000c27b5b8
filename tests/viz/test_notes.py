"""Notes: each planted fault is found, with its numbers, and healthy runs get none."""

import doctest

import numpy as np
import pytest
import torch

import tristep

pytest.importorskip("matplotlib")

import sys

from tristep.viz import Recorder, Run, Series, notes

NAMES = [f"layer{i}.weight" for i in range(10)]


def _healthy(steps=400):
    """What a run that goes well looks like: noisy, with a falling loss, and ratios around 1e-3 that differ by layer."""
    generator, run = np.random.default_rng(3), Run("run", NAMES)
    number = np.arange(1, steps + 1)
    run.scalars["loss"] = Series()
    noise = np.exp(0.1 * generator.standard_normal(steps))
    run.scalars["loss"].extend(number, 2.5 / (1 + number / 60) * noise)
    each = 10.0 ** np.linspace(-0.5, 0.5, 10)
    wild = np.exp(0.3 * generator.standard_normal((steps, 10)))
    found = {
        "gradient_norm": each * wild,
        "update_norm": 1e-2 * each * wild,
        "update_ratio": 1e-3 * each * wild,
        "gradient_nonfinite": 0 * wild,
    }
    return run, number, found


def _noted(change=None, loss=None, steps=400):
    run, number, found = _healthy(steps)
    if change is not None:
        change(found)
    if loss is not None:
        run.scalars["loss"] = Series()
        run.scalars["loss"].extend(number, loss(number, np.random.default_rng(5)))
    run.add_tensors(number, found)
    return notes(run)


@pytest.mark.parametrize("steps", [1, 5, 12, 60, 400, 6000])
def test_a_healthy_run_gets_no_notes(steps):
    assert _noted(steps=steps) == []


def test_nothing_recorded_nothing_noted():
    assert notes(Run()) == []


def test_an_update_ratio_far_above_the_others():
    def change(found):
        found["update_ratio"][:, 7] = 0.2
        found["update_ratio"][300, 7] = 0.31
        found["update_norm"][:, 7] *= 200

    (note,) = _noted(change)
    assert note.startswith("layer7.weight: update ratio 0.3 at step 301, then usually 0.2, ")
    assert note.endswith("): its learning rate is too high")
    assert 100 < float(note.split("then usually 0.2, ")[1].split(" times")[0]) < 400


def test_a_small_weight_whose_updates_are_small_too_is_well():
    def change(found):
        found["update_ratio"][:, 7] = 0.2  # a bias near 0

    assert _noted(change) == []


def test_updates_that_are_too_large_or_too_small_everywhere():
    def change(factor):
        return lambda found: found.update(update_ratio=found["update_ratio"] * factor)

    (note,) = _noted(change(300))
    assert note == "updates: half of all tensors change by over 0.3 of themselves each step: the rate is high"
    (note,) = _noted(change(1e-6))
    assert note == "updates: half of all tensors change by under 1e-09 of themselves each step: they hardly move"


def test_gradients_that_are_not_finite():
    def change(found):
        found["gradient_nonfinite"][119, 4], found["gradient_norm"][119, 4] = 12, np.inf
        found["gradient_nonfinite"][150] = 1

    assert _noted(change)[0] == "gradients: not finite first at step 120 in 'layer4.weight' (12 elements)"

    def of_hooks(found):
        del found["gradient_nonfinite"]
        found["gradient_norm"][119, 3:5] = np.nan
        found["gradient_norm"][:, 9] = np.nan  # has no gradient

    assert _noted(of_hooks)[0] == "gradients: not finite first at step 120 in 'layer3.weight' and 1 other tensors"


def test_a_tensor_that_nothing_reaches():
    def change(found):
        found["gradient_norm"][99:, 2] = 0

    assert _noted(change) == ["layer2.weight: its gradient is 0 from step 100 to 400: nothing reaches it"]

    def all_of_them(found):
        found["gradient_norm"][99:] = 0

    assert _noted(all_of_them)[0] == "gradients: all are 0 since step 100"


def test_a_spike_of_the_gradients():
    def change(found):
        found["gradient_norm"][199, 6] = 900.0

    (note,) = _noted(change)
    assert note.startswith("gradients: norm 9e+02 at step 200, ")
    assert note.endswith(" times the median nearby, most of it in 'layer6.weight': a spike")


def _fall(number, generator, noise=0.05):
    return 2.5 * np.exp(-number / 80) * np.exp(noise * generator.standard_normal(len(number)))


def test_losses_that_rise_stand_still_never_fell_or_are_not_finite():
    (note,) = _noted(loss=lambda n, g: _fall(n, g) + np.where(n > 300, (n - 300) / 25, 0))
    assert note.startswith("loss: 3.")
    assert 270 < int(note.split("at step ")[1].split(":")[0]) < 310
    assert note.endswith(": it rises")
    (note,) = _noted(loss=lambda n, g: 0.5 + _fall(n, g, 0.0) * (n < 150) + 0.01 * g.standard_normal(400))
    assert note.startswith("loss: 0.5")
    assert note.endswith(": it stands still")
    (note,) = _noted(loss=lambda n, g: 2.3 + 0.05 * g.standard_normal(400))
    assert note.startswith("loss: 2.")
    assert note.endswith(": it has not fallen")
    (note,) = _noted(loss=lambda n, g: np.where(n == 100, np.nan, _fall(n, g)))
    assert note == "loss: not finite first at step 100, 1 step in all"
    assert _noted(loss=lambda n, g: np.where(n == 100, 1e300, _fall(n, g))) == []  # and does not break what is computed


def test_a_real_net_with_a_layer_whose_rate_is_too_high():
    found = {}
    for kind in ("healthy", "sick"):
        torch.manual_seed(0)
        net = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()) for _ in range(4)])
        trainer = tristep.Trainer(net, "adam", {"learning_rate": 1e-3})
        if kind == "sick":
            net[2][0].weight.lr_mult = 300.0
        with Recorder(trainer) as recorder:
            for _ in range(60):
                x = torch.randn(16, 8)
                loss = (net(x) - x).square().mean()
                trainer.zero_grad()
                loss.backward()
                trainer.step(1)
                recorder.step(loss=loss)
        found[kind] = notes(recorder.run)
    assert found["healthy"] == []
    assert found["sick"][0].startswith("2.0.weight: update ratio ")


def test_docstring_examples():
    assert doctest.testmod(sys.modules["tristep.viz.notes"]).failed == 0
