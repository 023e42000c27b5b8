"""Optimizers of recent papers against `pytorch_optimizer` and `torch.optim`, on every engine, in float64."""

import copy
import importlib
import math
import sys

import pytest
import torch
from optimizer_table import TABLE

from tristep import Trainer

reference = pytest.importorskip("pytorch_optimizer", reason="not installed")

SHAPES = ((5, 3), (7,), (4, 4), ())
STEPS = 25

# By case, the name of our optimizer and its peer.
PEERS = {case: (name.replace("_", ""), peer) for name, row in TABLE.items() for case, peer in row.peers.items()}


def _parameters(device, dimensions=(0, 1, 2)):
    torch.manual_seed(0)
    shapes = [shape for shape in SHAPES if len(shape) in dimensions]
    return [torch.nn.Parameter(torch.randn(shape, dtype=torch.float64).to(device)) for shape in shapes]


def _train(params, step):
    torch.manual_seed(1)
    for _ in range(STEPS):
        for param in params:
            param.grad = torch.randn(param.shape, dtype=torch.float64).to(param.device)
        step()


@pytest.mark.sample(8)
@pytest.mark.sample(0, "cpu", "triton")
@pytest.mark.parametrize("name", PEERS)
def test_many_steps_like_the_reference(name, engine, device):
    ours, peer = PEERS[name]
    params = _parameters(device, peer.dimensions)
    trainer = Trainer(params, ours, peer.arguments, engine=engine)
    _train(params, lambda: trainer.step(1))
    expected = _parameters(device, peer.dimensions)
    reference = getattr(importlib.import_module(peer.library), peer.name)(expected, **peer.their_arguments)
    _train(expected, reference.step)
    rtol, atol = peer.close
    for ours, theirs, start in zip(params, expected, _parameters(device, peer.dimensions), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=rtol, atol=atol)
        assert not torch.equal(ours, start)


@pytest.mark.sample(0, "cpu", "triton")
@pytest.mark.parametrize("theirs", ["ScheduleFreeSGD", "ScheduleFreeAdamW"])
def test_schedule_free_weights_and_their_average_like_the_reference(theirs, engine, device):
    params, expected = _parameters(device), _parameters(device)
    trainer = Trainer(params, theirs, {"learning_rate": 0.05, "wd": 0.1, "warmup": 5}, engine=engine)
    peer = getattr(reference, theirs)(expected, lr=0.05, weight_decay=0.1, warmup_steps=5)
    peer.train()
    _train(params, lambda: trainer.step(1))
    _train(expected, peer.step)
    trained = [param.detach().clone() for param in params]
    torch.testing.assert_close(params, expected, rtol=1e-9, atol=1e-11)
    peer.eval()
    with trainer.averaged_weights():
        torch.testing.assert_close(params, expected, rtol=1e-9, atol=1e-11)
        assert not torch.equal(params[0], trained[0])
    assert all(torch.equal(param, weight) for param, weight in zip(params, trained, strict=True))


@pytest.mark.sample(0, "cpu", "triton")
def test_averaged_weights_leave_master_copies_alone(engine, device):
    param = torch.nn.Parameter(torch.ones(8, dtype=torch.bfloat16, device=device))
    trainer = Trainer([param], "schedulefreesgd", {"learning_rate": 0.1, "multi_precision": True}, engine=engine)
    for _ in range(3):
        param.grad = torch.full_like(param, 0.5)
        trainer.step(1)
    before = trainer.state_dict()["state"]["0"]["master copy"].clone()
    with trainer.averaged_weights():
        pass
    assert torch.equal(trainer.state_dict()["state"]["0"]["master copy"], before)


PRODIGY = {
    "plain": ({}, {}),
    "decay": ({"wd": 0.1}, {"weight_decay": 0.1}),
    "learning rate": ({"learning_rate": 0.3, "d0": 0.01}, {"lr": 0.3, "d0": 0.01}),
    "warm-up": (
        {"learning_rate": 0.3, "safeguard_warmup": True, "d_coef": 2.0},
        {"lr": 0.3, "safeguard_warmup": True, "d_coef": 2.0},
    ),
    "slow": (
        {"use_bias_correction": True, "growth_rate": 1.02, "beta3": 0.9, "d0": 0.001},
        {"bias_correction": True, "growth_rate": 1.02, "beta3": 0.9, "d0": 0.001},
    ),
    "decay in the gradient": ({"wd": 0.3, "decoupled": False}, {}),
}


@pytest.fixture
def float64_by_default():
    """The reference adds its sums up in torch's default type."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def _descend(params, step, steps=40, decay=0.0, left_out=lambda i, t: False):
    for t in range(steps):
        for i, param in enumerate(params):
            param.grad = None if left_out(i, t) else (2.0 * (param - 1.0) + decay * param).detach()
        step()


@pytest.mark.sample(1)
@pytest.mark.sample(0, "cpu", "triton")
@pytest.mark.parametrize("name", PRODIGY)
@pytest.mark.usefixtures("float64_by_default")
def test_prodigy_and_its_estimate_like_the_reference(name, engine, device):
    """Rounding in the first steps, as small as the first estimate, is what the last digits are lost to."""
    arguments, their_arguments = PRODIGY[name]
    params, expected = _parameters(device), _parameters(device)
    trainer = Trainer(params, "prodigy", arguments, engine=engine)
    assert trainer.optimizer.d == arguments.get("d0", 1e-6)
    _descend(params, lambda: trainer.step(1))
    peer = reference.Prodigy(expected, **their_arguments)
    _descend(expected, peer.step, decay=0.0 if arguments.get("decoupled", True) else arguments["wd"])
    torch.testing.assert_close(params, expected, rtol=1e-8, atol=1e-9)
    assert trainer.optimizer.d == pytest.approx(peer.param_groups[0]["d"], rel=1e-9)
    assert trainer.optimizer.d > 2 * arguments.get("d0", 1e-6)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", PRODIGY)
def test_prodigy_takes_no_step_at_a_rate_of_0(name, engine, device):
    """As the authors' package, which leaves such a step out, even of gradients that are not finite."""
    arguments = PRODIGY[name][0] | {"d0": 0.01}
    rates = [0.0, 0.0, 0.2, 0.0, 0.5, 1.0, 0.25, 0.0]
    found = []
    for left_out in (False, True):
        params = _parameters(device)
        params[1].lr_mult = 0.0
        trainer = Trainer(params, "prodigy", arguments, engine=engine)
        for t, rate in enumerate(rates):
            if left_out and not rate:
                continue
            trainer.set_learning_rate(rate)
            for param in params:
                param.grad = (2.0 * (param - 1.0)).detach() if rate else torch.full_like(param, [math.nan, 1.0][t % 2])
            trainer.step(1)
        states = trainer.state_dict()["state"]
        found.append([*params, *(state[name] for state in states.values() for name in state)])
    assert all(map(torch.equal, *found))
    moved = [not torch.equal(param, start) for param, start in zip(params, _parameters(device), strict=True)]
    assert moved == [True, False, True, True]
    assert all(not states["1"][name].any() for name in ("mean", "var", "s"))


@pytest.mark.sample(1)
@pytest.mark.sample(0, "cpu", "triton")
@pytest.mark.usefixtures("float64_by_default")
def test_prodigys_estimate_is_one_for_parameters_that_are_left_out_at_times(engine, device):
    params, expected = _parameters(device), _parameters(device)
    trainer = Trainer(params, "prodigy", engine=engine)

    def left_out(i, t):
        return i == t % 5 and t > 0

    _descend(params, lambda: trainer.step(1, ignore_stale_grad=True), left_out=left_out)
    _descend(expected, reference.Prodigy(expected).step, left_out=left_out)
    torch.testing.assert_close(params, expected, rtol=1e-8, atol=1e-9)
    assert len(set(trainer.optimizer.kept("d").values())) == 1


@pytest.mark.sample(0, "cpu", "triton")
def test_prodigys_estimate_is_saved_and_not_copied(engine, device, tmp_path):
    params = [torch.nn.Parameter(param.detach().float()) for param in _parameters(device)]
    trainer = Trainer(params, "prodigy", {"d0": 0.01}, engine=engine)
    _descend(params, lambda: trainer.step(1), steps=10)
    trainer.save_states(tmp_path / "states")
    other = Trainer([torch.nn.Parameter(param.detach().clone()) for param in params], "prodigy", engine=engine)
    assert other.optimizer.d == 1e-6
    other.load_states(tmp_path / "states")
    assert other.optimizer.d == trainer.optimizer.d > 0.01
    assert copy.deepcopy(trainer.optimizer).d == 0.01


@pytest.mark.sample(0, "cpu", "triton")
def test_prodigy_without_any_gradient_stays(engine, device):
    param = torch.nn.Parameter(torch.ones(3, device=device))
    trainer = Trainer([param], "prodigy", engine=engine)
    for _ in range(2):
        param.grad = torch.zeros_like(param)
        trainer.step(1)
    assert param.tolist() == [1.0] * 3
    assert trainer.optimizer.d == pytest.approx(1e-6)


class _TorchInFloat64:
    """The module torch, where the reference's step down to float32 stays in float64."""

    float32 = torch.float64

    def __getattr__(self, name):
        return getattr(torch, name)


SOAP = {
    "plain": ({}, {}),
    "often": (
        {"precondition_frequency": 1, "beta1": 0.9, "beta2": 0.8, "shampoo_beta": 0.7, "wd": 0.1},
        {"precondition_frequency": 1, "betas": (0.9, 0.8), "shampoo_beta": 0.7, "weight_decay": 0.1},
    ),
    "of small dimensions": (
        {"max_precondition_dim": 3, "correct_bias": False},
        {"max_precondition_dim": 3, "correct_bias": False},
    ),
    # Not before the vectors' matrices are of full rank: till then some of the coordinates are made of rounding errors.
    "of vectors too": ({"precondition_1d": True}, {"precondition_1d": True}),
}


def _reproducible_eigenvectors(matrices, eigh=torch.linalg.eigh):
    """The same ones from matrices that differ by rounding errors only, those of an eigenvalue that occurs twice as well.

    The first gradient of a matrix that is not square, or of a vector, has such: 0, whose eigenvectors are any that LAPACK
    finds, and not the same ones on each processor.
    """
    found = [eigh(matrix) for matrix in matrices.round(decimals=12).reshape(-1, *matrices.shape[-2:])]
    return [torch.stack(each).view(*matrices.shape[:-2], *each[0].shape) for each in zip(*found, strict=True)]


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", SOAP)
def test_soap_like_the_reference(monkeypatch, name, device):
    arguments, their_arguments = SOAP[name]
    monkeypatch.setattr(torch.linalg, "eigh", _reproducible_eigenvectors)
    monkeypatch.setattr(sys.modules[reference.SOAP.__module__], "torch", _TorchInFloat64())
    monkeypatch.setitem(globals(), "SHAPES", (*SHAPES, (2, 3, 4), (3, 1, 5, 2)))
    params, expected = (_parameters(device, (0, 1, 2, 3, 4)) for _ in range(2))
    trainer = Trainer(params, "soap", {"learning_rate": 0.01} | arguments)
    _train(params, lambda: trainer.step(1))
    _train(expected, reference.SOAP(expected, **{"lr": 0.01, "weight_decay": 0.0} | their_arguments).step)
    torch.testing.assert_close(params, expected, rtol=1e-9, atol=1e-11)


def test_adafactor_moves_weights_near_zero_like_torchs(device):
    """By epsilon2, where their root mean square is less; those of 1 x 1, too, whose rows and columns are elements."""
    params = [torch.nn.Parameter(torch.full(shape, 1e-5, device=device)) for shape in ((1, 1), (3, 1), (2,))]
    others = [torch.nn.Parameter(param.detach().clone()) for param in params]
    trainer = Trainer(params, "adafactor", {"learning_rate": 0.1, "epsilon2": 0.02})
    reference = torch.optim.Adafactor(others, lr=0.1, eps=(None, 0.02), weight_decay=0.0)
    for t in range(2):
        for param, other in zip(params, others, strict=True):
            param.grad = torch.full_like(param, 1.0 + t)
            other.grad = param.grad.clone()
        trainer.step(1)
        reference.step()
    torch.testing.assert_close(params, others, rtol=1e-5, atol=0.0)


@pytest.mark.sample(1)
@pytest.mark.sample(0, "cpu", "triton")
def test_averages_of_asgd_like_torch(engine, device):
    params, expected = _parameters(device), _parameters(device)
    trainer = Trainer(params, "asgd", {"learning_rate": 0.05, "t0": 5}, engine=engine)
    peer = torch.optim.ASGD(expected, lr=0.05, t0=5)
    _train(params, lambda: trainer.step(1))
    _train(expected, peer.step)
    with trainer.averaged_weights():
        torch.testing.assert_close([param.detach() for param in params], [peer.state[param]["ax"] for param in expected])
        assert not torch.equal(params[0], expected[0])
