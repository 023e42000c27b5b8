"""Validation losses and accuracies in runs and views, and the names of tensors of torch's optimizers."""

import numpy as np
import pytest
import torch
from planted_runs import layers_of

import tristep
from tristep.viz import Dashboard, Line, LiveLoop, LossView, Recorder, Run, TensorHeatmap

CROSS_ENTROPY = torch.nn.functional.cross_entropy


@pytest.fixture
def data():
    """Four batches of 8; the label is the larger of two inputs."""
    rng = torch.Generator().manual_seed(1)
    batches = [torch.rand(8, 2, generator=rng) for _ in range(4)]
    return [(x, x.argmax(dim=1)) for x in batches]


def _net():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(2, 2))


def _by_hand(data, held_out, epochs):
    """Validation loss and accuracy after each epoch of torch's SGD, and the accuracy while it trains."""
    net = _net()
    optimizer = torch.optim.SGD(net.parameters(), 0.5)
    found = []
    for _ in range(epochs):
        hits = 0
        for x, y in data:
            optimizer.zero_grad()
            outputs = net(x)
            hits += int((outputs.argmax(1) == y).sum())
            CROSS_ENTROPY(outputs, y).backward()
            optimizer.step()
        with torch.no_grad():
            x, y = (torch.cat(each) for each in zip(*held_out, strict=True))
            accuracy = float((net(x).argmax(1) == y).double().mean())
            found.append((float(CROSS_ENTROPY(net(x), y)), accuracy, hits / sum(len(y) for _, y in data)))
    return np.array(found).T


@pytest.mark.parametrize("how", ["fit", "LiveLoop.fit"])
def test_validation_is_recorded_after_each_epoch(how, data):
    net, train, held_out = _net(), data[:3], data[3:]
    trainer = tristep.Trainer(net, "sgd", {"learning_rate": 0.5})
    recorder = Recorder(trainer)
    options = {"eval_data": held_out, "eval_metric": "accuracy", "epochs": 4}
    if how == "fit":
        done = tristep.fit(net, CROSS_ENTROPY, train, recorder=recorder, progress=False, **options)
        assert done.trainer is trainer
    else:
        LiveLoop.fit(net, CROSS_ENTROPY, train, trainer, recorder=recorder, view=None, **options).start()
    losses, accuracies, own = _by_hand(train, held_out, 4)
    run = recorder.run
    for name, expected in (("val_loss", losses), ("val_accuracy", accuracies)):
        steps, values = run.scalars[name].recent()
        assert steps.tolist() == [3, 6, 9, 12]
        np.testing.assert_allclose(values, expected, rtol=1e-5)
    assert len(run.scalars["loss"]) == len(run.tensors["gradient_norm"]) == 12
    if how == "fit":
        np.testing.assert_allclose(run.scalars["accuracy"].recent()[1], own)
        assert run.scalars["epoch"].recent()[1].tolist() == np.repeat(range(4), 3).tolist()


def test_the_recorder_of_another_trainer_is_refused(data):
    net = _net()
    trainer = tristep.Trainer(net, "sgd")
    with pytest.raises(ValueError, match="recorder records another Trainer"):
        tristep.fit(
            net, CROSS_ENTROPY, data, progress=False, recorder=Recorder(trainer), trainer=tristep.Trainer(_net(), "sgd")
        )
    assert trainer.optimizer.num_update == 0


def _run(name, scale=1.0):
    run = Run(name, ["a.weight", "a.bias"])
    for step in range(1, 41):
        numbers = {"loss": 2 / step, "learning_rate": 0.1, "epoch": step // 10}
        if step % 10 == 0:
            numbers |= {"val_loss": 3 / step, "val_accuracy": step / 50, "accuracy": step / 45}
        run.add_scalars(step, numbers)
        run.add_tensors([step], {"gradient_norm": np.array([[scale, 10 * scale]]) * step})
    return run


@pytest.mark.parametrize("view", [LossView, Dashboard])
def test_scalars_have_panels_and_share_them_with_those_of_other_data(view):
    scene = view(_run("a")).scene()
    drawn = [{line.name: line for line in panel.layers if isinstance(line, Line) and line.name} for panel in scene.panels]
    (losses,) = [lines for lines in drawn if "val_loss" in lines]
    (shares,) = [lines for lines in drawn if "val_accuracy" in lines]
    assert "loss" in losses
    assert set(losses) & set(shares) <= {"strong lines"}  # which name the width of the average in both
    assert "accuracy" in shares
    np.testing.assert_array_equal(losses["val_loss"].x, [10, 20, 30, 40])
    assert losses["val_loss"].marker
    assert not losses["loss"].marker
    panels = {panel.y.label.split(",")[0]: panel.y.scale for panel in scene.panels if panel.frame}
    assert (panels["loss"], panels["accuracy"]) == ("log", "linear")
    assert not any("epoch" in label for label in panels)
    if view is LossView:
        raw = scene.drawn(shares["accuracy"], scene.state(smoothing=0))[1]
        np.testing.assert_allclose(raw, np.arange(10, 50, 10) / 45, rtol=1e-6)


def test_heat_maps_of_several_runs_share_their_colours():
    runs = [_run("small"), _run("large", 100.0)]
    scene = TensorHeatmap(runs).scene()
    heats = [panel for panel in scene.panels if panel.title in ("small", "large")]
    assert [(panel.column, panel.columns) for panel in heats] == [(0, 2), (2, 2)]
    small, large = (panel.layers[0] for panel in heats)
    assert small.limits == large.limits
    assert (small.label, large.label) == ("", "norm of the gradient")
    # Both reach from the first to the 99th percentile of all cells of both.
    cells = np.array([[scale * step * each for step in range(1, 41)] for scale in (1.0, 100.0) for each in (1, 10)])
    np.testing.assert_allclose(small.limits, 10 ** np.percentile(np.log10(cells), [1, 99]), rtol=1e-6)
    np.testing.assert_allclose(small.values, np.clip(cells[:2], *small.limits), rtol=1e-5)
    np.testing.assert_allclose(large.values, np.clip(cells[2:], *small.limits), rtol=1e-5)
    details = [panel for panel in scene.panels if panel.row == 1]
    assert [panel.column for panel in details] == [0, 2]
    TensorHeatmap(runs).figure()
    other = Run("other", ["b"])
    with pytest.raises(ValueError, match="runs: 'other' has other tensors than 'small'"):
        TensorHeatmap([runs[0], other])
    assert len(layers_of(TensorHeatmap(runs[0]).scene(), Line, 1)) > 0


@pytest.mark.parametrize("given", ["parameters", "groups", "names"])
def test_tensors_of_an_optimizer_are_named_after_the_module(given):
    net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
    names = [name for name, _ in net.named_parameters()]
    if given == "groups":
        groups = [{"params": list(net[1].parameters())}, {"params": list(net[0].parameters()), "lr": 0.5}]
        optimizer, names = torch.optim.SGD(groups, 0.1), [*names[2:], *names[:2]]
    else:
        optimizer = torch.optim.SGD(net.named_parameters() if given == "names" else net.parameters(), 0.1)
    recorder = Recorder(optimizer, module=None if given == "names" else net)
    assert recorder.run.parameters == names
    net(torch.ones(1, 2)).sum().backward()
    gradients = {name: float(param.grad.norm()) for name, param in net.named_parameters()}
    optimizer.step()
    recorder.step()
    np.testing.assert_allclose(recorder.run.tensors["gradient_norm"].recent()[1][0], [gradients[name] for name in names])
