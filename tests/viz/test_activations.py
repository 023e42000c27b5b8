"""Outputs of layers: measured as NumPy measures them, at the recorder's steps, and drawn."""

import warnings

import numpy as np
import pytest
import torch
from torch import nn

import tristep
from tristep.viz import ActivationsView, Recorder, Run, RunSet, TensorHeatmap, diagnose
from tristep.viz.record.activations import ACTIVATIONS


def _network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Dropout(0.0), nn.Sequential(nn.Linear(6, 3), nn.Flatten()))


LAYERS = ["0 (Linear)", "1 (ReLU)", "3.0 (Linear)"]


def _source(net, kind):
    if kind == "trainer":
        return tristep.Trainer(net, "sgd", {"learning_rate": 0.001})
    return torch.optim.SGD(net.parameters(), 0.001)


def _expected(net, x):
    """Of each layer, in float64."""
    w0, b0, w1, b1 = (each.detach().double().numpy() for each in net.parameters())
    first = x.double().numpy() @ w0.T + b0
    outputs = first, np.maximum(first, 0), np.maximum(first, 0) @ w1.T + b1
    return np.array([[each.mean(), each.std(), (each == 0).mean()] for each in outputs])


def _train(source, recorder, net, batches, wanted):
    """Train with two forward passes a step, of which the last counts; return what is expected of the steps in `wanted`."""
    expected = []
    for step, x in enumerate(batches, 1):
        if step in wanted:
            expected.append(_expected(net, x))
        net.zero_grad()
        net(x + 1).sum().backward()
        net(x).square().sum().backward()
        with torch.no_grad():
            net.eval()(x - 1)  # a validation is no training
            net.train()
        if isinstance(source, tristep.Trainer):
            source.step(len(x))
        else:
            source.step()
        recorder.step()
    return np.array(expected)


@pytest.mark.parametrize("kind", ["trainer", "torch"])
@pytest.mark.parametrize("every", [1, 3])
def test_outputs_are_measured_at_the_recorders_steps(kind, every):
    net = _network()
    source, batches = _source(net, kind), torch.randn(7, 16, 4)
    wanted = range(1, 8, every)
    with Recorder(source, every=every, activations=net) as recorder:
        expected = _train(source, recorder, net, batches, wanted)
    run = recorder.run
    assert run.layers == LAYERS
    for k, name in enumerate(ACTIVATIONS):
        steps, values = run.activations.tensors[name].recent()
        assert steps.tolist() == list(wanted)
        np.testing.assert_allclose(values, expected[:, :, k], rtol=1e-4, atol=1e-6)
    assert not any(module._forward_hooks for module in net.modules())  # after `close`


def test_nothing_is_hooked_without_activations_or_after_an_error(tmp_path):
    net = _network()
    trainer = _source(net, "trainer")
    recorder = Recorder(trainer)
    assert recorder.run.layers == []
    recorder.close()
    with pytest.raises(TypeError, match="activations must be a module"):
        Recorder(trainer, activations=list(net.parameters()))
    with pytest.raises(ValueError, match="no layer"):
        Recorder(trainer, activations=nn.Sequential(nn.Flatten()))
    with pytest.raises(ValueError, match="log_every"):
        Recorder(trainer, activations=net, to=[tmp_path / "a.csv"], log_every=0)
    assert not any(module._forward_hooks for module in net.modules())
    Recorder(trainer).close()  # the trainer is free again


def test_a_forward_pass_that_is_not_seen_is_said_once():
    net = _network()
    trainer = _source(net, "trainer")
    recorder = Recorder(trainer, activations=net)

    def step(forward):
        trainer.zero_grad()
        forward(torch.ones(2, 4)).sum().backward()
        trainer.step(2)
        recorder.step()

    with pytest.warns(UserWarning, match="no layer was seen before step 1"):
        step(
            lambda x: (
                torch.func.functional_call(nn.Identity(), {}, x) @ net[0].weight.T + sum(p.sum() for p in net.parameters())
            )
        )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(lambda x: x @ net[0].weight.T + sum(p.sum() for p in net.parameters()))
        step(net)
    assert recorder.run.activations.tensors["activation_mean"].recent()[0].tolist() == [3]


def test_values_that_are_not_finite_and_outputs_of_other_kinds():
    class Two(nn.Module):
        def forward(self, x):
            return [torch.full_like(x, torch.inf), None]

    class Counts(nn.Module):
        def forward(self, pair):
            return pair[0].long().clamp(0, 1)

    net = nn.ModuleDict({"first": nn.Linear(2, 2), "two": Two(), "counts": Counts()})
    trainer = tristep.Trainer(net, "sgd", {"learning_rate": 0.0})
    recorder = Recorder(trainer, activations=net)
    x = net["first"](torch.ones(1, 2))
    net["counts"](net["two"](x))
    x.sum().backward()
    trainer.step(1)
    recorder.step()
    (zeros,) = recorder.run.activations.tensors["activation_zeros"].recent()[1]
    assert zeros[1] == 0
    assert np.isnan(zeros[2])
    assert not np.isfinite(recorder.run.activations.tensors["activation_mean"].recent()[1][0, 1])
    assert diagnose(recorder.run) == []
    ActivationsView(recorder).scene()


def _recorded(shares):
    """A run of three layers, with these shares of zeros of the second."""
    run = Run("run", ["weight"], layers=LAYERS)
    steps = np.arange(1, len(shares) + 1)
    rows = np.stack([0 * shares, shares, 0 * shares], axis=1)
    run.activations.add_tensors(steps, {name: rows if name == "activation_zeros" else 0 * rows + 1 for name in ACTIVATIONS})
    return run


@pytest.mark.parametrize(
    ("shares", "step"),
    [
        (np.where(np.arange(100) < 40, 0.5, 1.0), 41),
        (np.where(np.arange(6000) < 3000, 0.5, 0.9995), 3001),
        (np.where(np.arange(100) < 95, 0.5, 1.0), None),  # of one batch, or too short to tell
        (np.where(np.arange(100) == 50, 0.9, 0.98), None),
    ],
)
def test_a_dead_layer_is_named_with_its_step(shares, step):
    found = diagnose(_recorded(shares))
    if step is None:
        assert found == []
    else:
        (words,) = found
        assert words.startswith("1 (ReLU): ")
        assert "dead" in words
        assert abs(int(words.split("from step ")[1].split()[0].replace(",", "")) - step) <= 8  # a point of a long run
        assert words in TensorHeatmap(_recorded(shares)).describe()


def test_files_have_activations(tmp_path):
    run, other = _recorded(np.linspace(0, 1, 20)), Run("other", ["weight"])
    RunSet([run, other]).save(tmp_path / "runs.safetensors")
    again, without = RunSet.load(tmp_path / "runs.safetensors")
    assert (again.layers, without.activations) == (LAYERS, None)
    for name in ACTIVATIONS:
        for one, two in zip(again.activations.tensors[name].recent(), run.activations.tensors[name].recent(), strict=True):
            assert np.array_equal(one, two)


def test_the_view_has_a_row_for_each_layer_and_the_selected_layers_mean():
    run = _recorded(np.linspace(0, 1, 20))
    view = ActivationsView(run)
    scene = view.scene()
    (heat,) = (panel for panel in scene.panels if panel.click is not None)
    values = np.asarray(heat.layers[0].values)  # of each quantity, [3, n_layers, n_steps]
    assert values.shape == (3, 3, 20)
    assert (np.diff(values[0, 1]) >= 0).all()
    assert [control.name for control in scene.controls] == ["quantity", "layer"]
    assert list(scene.controls[1].values) == LAYERS
    with pytest.raises(ValueError, match="'other' has no activations"):
        ActivationsView([run, Run("other", ["weight"])])
    with pytest.raises(ValueError, match="quantity"):
        ActivationsView(run, "weight_norm")
