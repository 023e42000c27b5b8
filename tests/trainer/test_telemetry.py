"""Telemetry of a trainer: its arrays are norms that torch and NumPy find outside, and no weight is another one for it."""

import copy
import math

import numpy as np
import pytest
import torch

import tristep
from tristep.kernels import metric, tl


@metric(gradient_cubes="sum", longest="max")
def extra(w, g, new_w):
    return tl.abs(g * g * g), tl.abs(new_w - w)


def model(device):
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 11), torch.nn.Tanh(), torch.nn.Linear(11, 3)).to(device)


def backward(net, seed, rows=5):
    generator = torch.Generator().manual_seed(seed)
    device = next(net.parameters()).device
    x = torch.randn(rows, 6, generator=generator).to(device)
    net(x).square().sum().backward()


def train(net, trainer, steps, watch=None, first=0):
    for k in range(first, first + steps):
        trainer.zero_grad()
        backward(net, k)
        if watch is not None:
            watch.append(
                [[param.detach().cpu().double().clone(), param.grad.cpu().double() / 5] for param in net.parameters()]
            )
        trainer.step(5)
        if watch is not None:
            for row, param in zip(watch[-1], net.parameters(), strict=True):
                row.append(param.detach().cpu().double().clone())


def norm(x):
    return torch.linalg.vector_norm(x).item()


def cosine(a, b):
    return torch.nn.functional.cosine_similarity(a.flatten(), b.flatten(), dim=0, eps=0.0).item()


EXPECTED = {
    "weight_norm": lambda w, g, d: norm(w),
    "gradient_norm": lambda w, g, d: norm(g),
    "update_norm": lambda w, g, d: norm(d),
    "weight_absmax": lambda w, g, d: w.abs().max().item(),
    "gradient_absmax": lambda w, g, d: g.abs().max().item(),
    "update_absmax": lambda w, g, d: d.abs().max().item(),
    "update_ratio": lambda w, g, d: norm(d) / norm(w),
    "cosine": lambda w, g, d: cosine(g, d),
    "gradient_zeros": lambda w, g, d: (g == 0).double().mean().item(),
    "gradient_nonfinite": lambda w, g, d: (~g.isfinite()).sum().item(),
    "weight_unchanged": lambda w, g, d: (d == 0).double().mean().item(),
}


@pytest.mark.sample(1)
def test_all_quantities_are_those_found_outside(engine, device):
    net, watched = model(device), []
    histograms = ["gradient", "update"] if engine != "triton" else []  # which take long in the interpreter
    measures = [*tristep.Telemetry.QUANTITIES, extra]
    telemetry = tristep.Telemetry(metrics=measures, histograms=histograms)
    trainer = tristep.Trainer(net, "adamw", {"learning_rate": 0.01, "wd": 0.1}, engine=engine, telemetry=telemetry)
    assert trainer.telemetry is telemetry
    assert len(telemetry) == 0
    assert telemetry.latest() == {}
    assert telemetry["update_norm"].shape == (0, 4)
    train(net, trainer, 3, watched)
    telemetry.flush()
    assert telemetry.names == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert telemetry.steps.tolist() == [1, 2, 3]
    assert set(EXPECTED) < set(telemetry.quantities)
    for quantity, judge in EXPECTED.items():
        expected = [[judge(w, g, new - w) for w, g, new in row] for row in watched]
        found = telemetry[quantity]
        assert found.dtype == np.float64
        np.testing.assert_allclose(found, expected, rtol=2e-5, atol=1e-6 if quantity == "cosine" else 0, err_msg=quantity)
    np.testing.assert_allclose(
        telemetry["gradient_cubes"], [[(g.abs() ** 3).sum().item() for _, g, _ in row] for row in watched], rtol=1e-5
    )
    assert np.array_equal(telemetry["longest"], telemetry["update_absmax"])
    if not histograms:
        return
    bins = [-math.inf, *telemetry.edges, math.inf]
    expected = [[np.histogram(g.numpy(), bins)[0] for _, g, _ in row] for row in watched]
    assert np.array_equal(telemetry["gradient_histogram"], expected)
    sizes = [param.numel() for param in net.parameters()]
    assert np.array_equal(telemetry["update_histogram"].sum(axis=2), [sizes] * 3)


@pytest.mark.sample(0, "cpu", "triton")
def test_reading_in_several_ways(engine, device):
    net = model(device)
    telemetry = tristep.Telemetry(metrics=["update_norm", "gradient_norm"], histograms=["weight"])
    trainer = tristep.Trainer(net, "sgd", engine=engine, telemetry=telemetry)
    train(net, trainer, 2)
    telemetry.flush()
    found = telemetry.read()
    assert list(found) == ["steps", *telemetry.quantities]
    for quantity in telemetry.quantities:
        np.testing.assert_array_equal(found[quantity], telemetry[quantity])
    for after in range(3):
        for name, array in telemetry.read(after=after).items():
            np.testing.assert_array_equal(array, found[name][after:])
            assert array.shape == (2 - after, *found[name].shape[1:])
    latest = telemetry.latest()
    assert list(latest) == telemetry.names
    assert latest["2.bias"]["update_norm"] == found["update_norm"][-1, 3]
    assert isinstance(latest["2.bias"]["update_norm"], float)
    assert latest["0.weight"]["weight_histogram"].tolist() == found["weight_histogram"][-1, 0].tolist()


OPTIMIZERS = {
    "nag": {"learning_rate": 0.1, "momentum": 0.9, "wd": 0.01},
    "adam": {"wd": 0.1},
    "novograd": {},
    "muon": {},
    "adamw": {"clip_norm": 0.5, "ema_decay": 0.9},
}


@pytest.mark.sample(3)
@pytest.mark.sample(0, "cpu", "triton")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_recording_changes_no_bit(name, engine, device, everything):
    if engine == "triton" and name not in ("adam", "muon"):
        pytest.skip("NumPy computes there")
    outcomes = []
    for telemetry in (None, True, tristep.Telemetry(every=2, metrics=[extra])):
        net = model(device)
        trainer = tristep.Trainer(net, name, OPTIMIZERS[name], engine=engine, telemetry=telemetry)
        train(net, trainer, 3)
        look = everything(trainer, net.parameters())
        outcomes.append((look["weights"], look["optimizer"]))
    assert outcomes[0] == outcomes[1] == outcomes[2]


@pytest.mark.sample(0, "cpu", "triton")
def test_some_steps_only_and_the_last_ones(engine, device):
    net, all_of_them = model(device), tristep.Telemetry(metrics=["update_ratio"])
    train(net, tristep.Trainer(net, "adam", engine=engine, telemetry=all_of_them), 8)
    net, some = model(device), tristep.Telemetry(every=3, size=2, metrics=["update_ratio"])
    train(net, tristep.Trainer(net, "adam", engine=engine, telemetry=some), 8)
    all_of_them.flush()
    some.flush()
    assert some.steps.tolist() == [4, 7]
    np.testing.assert_array_equal(some["update_ratio"], all_of_them["update_ratio"][[3, 6]])


@pytest.mark.sample(0, "cpu", "triton")
def test_parameters_left_alone_are_nan(engine, device):
    net = model(device)
    net[0].bias.requires_grad_(False)
    telemetry = tristep.Telemetry()
    trainer = tristep.Trainer(net, "adam", engine=engine, telemetry=telemetry)
    train(net, trainer, 1)
    trainer.zero_grad()
    backward(net, 1)
    net[2].weight.grad = None
    trainer.step(5, ignore_stale_grad=True)
    trainer.step(5, ignore_stale_grad=True)  # nothing is fresh: no step to record
    train(net, trainer, 1, first=2)
    telemetry.flush()
    assert telemetry.steps.tolist() == [1, 2, 3]
    for quantity in telemetry.quantities:
        assert np.isnan(telemetry[quantity]).tolist() == [[False, True, False, False], [False, True, True, False]] + [
            [False, True, False, False]
        ], quantity


@pytest.mark.sample(0, "cpu", "triton")
def test_a_step_that_fails_is_not_recorded(engine, device):
    net, rates = model(device), [0.1, math.nan, 0.1]
    options = {"lr_scheduler": lambda number: rates.pop(0)}
    trainer = tristep.Trainer(net, "adam", options, engine=engine, telemetry=tristep.Telemetry(metrics=["cosine"]))
    train(net, trainer, 1)
    with pytest.raises(tristep.StaleGradientError):
        trainer.step(5)
    with pytest.raises(ValueError, match="nan"):
        train(net, trainer, 1, first=1)
    train(net, trainer, 1, first=1)
    trainer.telemetry.flush()
    assert trainer.telemetry.steps.tolist() == [1, 2]


@pytest.mark.sample(0, "cpu", "triton")
def test_sparse_gradients_are_not_measured(engine, device):
    table = torch.nn.Embedding(9, 3, sparse=True).to(device)
    head = torch.nn.Linear(3, 1).to(device)
    net = torch.nn.ModuleList([table, head])
    trainer = tristep.Trainer(net, "sgd", engine=engine, telemetry=True)
    for _ in range(2):
        trainer.zero_grad()
        head(table(torch.tensor([1, 4], device=device))).sum().backward()
        trainer.step(2)
    trainer.telemetry.flush()
    for quantity in trainer.telemetry.quantities:
        assert np.isnan(trainer.telemetry[quantity][:, 0]).all(), quantity
    norms = trainer.telemetry["gradient_norm"]
    assert (norms[:, 2] == 1.0).all()


@pytest.mark.sample(0, "cpu", "triton")
def test_inside_backward_what_got_no_gradient_is_nan(engine, device):
    net = model(device)
    trainer = tristep.Trainer(net, "sgd", engine=engine, telemetry=True)
    with trainer.step_in_backward(1, ignore_stale_grad=True):
        net[0](torch.ones(1, 6, device=device)).sum().backward()
    with trainer.step_in_backward(1, ignore_stale_grad=True):
        pass
    trainer.telemetry.flush()
    assert np.isnan(trainer.telemetry["weight_norm"]).tolist() == [[False, False, True, True]]


@pytest.mark.sample(1)
def test_it_goes_on_after_states_are_loaded_and_weights_converted(engine, device):
    net = model(device)
    trainer = tristep.Trainer(net, "adamw", {"multi_precision": True}, engine=engine, telemetry=True)
    train(net, trainer, 2)
    saved = copy.deepcopy(trainer.state_dict())
    train(net, trainer, 1, first=2)
    trainer.load_state_dict(saved)
    train(net, trainer, 1, first=3)
    for dtype in (torch.bfloat16, torch.float64):
        net.to(dtype)
        for param in net.parameters():
            param.grad = torch.ones_like(param)
        trainer.step(1)
    trainer.telemetry.flush()
    assert trainer.telemetry.steps.tolist() == [1, 2, 3, 3, 4, 5]
    expected = [math.sqrt(param.numel()) for param in net.parameters()]
    np.testing.assert_allclose(trainer.telemetry["gradient_norm"][-2:], [expected] * 2, rtol=1e-6)
    assert np.isfinite(trainer.telemetry["update_ratio"][:, 0]).all()


@pytest.mark.sample(0, "cpu", "triton")
def test_it_can_be_switched_between_steps(engine, device):
    net = model(device)
    trainer = tristep.Trainer(net, "sgd", engine=engine)
    assert trainer.telemetry is None
    train(net, trainer, 1)
    first = tristep.Telemetry(metrics=["weight_norm"])
    trainer.telemetry = first
    train(net, trainer, 2, first=1)
    trainer.telemetry = None
    train(net, trainer, 1, first=3)
    trainer.telemetry = True
    train(net, trainer, 1, first=4)
    second = trainer.telemetry
    trainer.telemetry = first
    train(net, trainer, 1, first=5)
    trainer.telemetry = False
    assert trainer.telemetry is None
    first.flush()
    second.flush()
    assert first.steps.tolist() == [2, 3, 6]
    assert second.steps.tolist() == [5]
    assert first.quantities == ("weight_norm",)


@pytest.mark.sample(0, "cpu", "triton")
def test_not_finite_gradients_show(engine, device):
    net = model(device)
    options = {"skip_nonfinite": True}
    trainer = tristep.Trainer(net, "sgd", options, engine=engine, telemetry=True)
    backward(net, 0)
    net[0].bias.grad[3] = math.nan
    net[0].bias.grad[5] = math.inf
    with np.errstate(invalid="ignore"):  # NumPy computes in Triton's interpreter
        trainer.step(5)
    trainer.telemetry.flush()
    latest = trainer.telemetry.latest()
    assert [latest[name]["gradient_nonfinite"] for name in trainer.telemetry.names] == [0, 2, 0, 0]
    assert math.isnan(latest["0.bias"]["gradient_norm"])
    assert [latest[name]["update_norm"] for name in trainer.telemetry.names] == [0, 0, 0, 0]  # the step was skipped


def test_one_for_each_trainer():
    telemetry = tristep.Telemetry()
    net = model("cpu")
    tristep.Trainer(net, "sgd", telemetry=telemetry)
    tristep.Trainer(net, "adam", telemetry=telemetry)  # of the same parameters
    with pytest.raises(ValueError, match=r"belongs to another trainer"):
        tristep.Trainer(model("cpu"), "sgd", telemetry=telemetry)
