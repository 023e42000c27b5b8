"""torch's classes with gradients from denormal numbers to the largest of float32: where torch's weights move, ours do."""

import pytest
import torch

import tristep.optim

SIZES = (1e15, 1e19, 1e20, 1e30, 3e38, 1e-20, 1e-42)
CASES = {
    "SGD": {},
    "SGD, Nesterov": {"momentum": 0.9, "nesterov": True},
    "Adam": {},
    "Adam, amsgrad": {"amsgrad": True},
    "AdamW": {},
    "NAdam": {},
    "RAdam": {},
    "Adamax": {},
    "Adagrad": {},
    "Adadelta": {},
    "RMSprop": {},
    "RMSprop, momentum": {"momentum": 0.9},
    "RMSprop, centered": {"centered": True},
    "RMSprop, centered, momentum": {"centered": True, "momentum": 0.9},
    "ASGD": {},
    "Rprop": {},
    "Adafactor": {},
}
# torch overflows where states do not: NAdam in the corrected square, Adafactor in a product of two averages.
FARTHER = {"NAdam": (1e20,), "Adafactor": (1e15, 1e19)}


pytestmark = pytest.mark.usefixtures("quiet_numpy")


def _steps(make, size, arguments, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(3, 4, generator=generator).to(dtype))
    optimizer = make([weight], lr=0.01, **arguments)
    weights = []
    for sign in (1.0, 1.0, -0.5):
        weight.grad = ((torch.rand(3, 4, generator=generator) * 0.5 + 0.5) * size * sign).to(dtype)
        optimizer.step()
        weights.append(weight.detach().clone().float())
    return weights


@pytest.mark.sample(1, "cpu")
@pytest.mark.sample(0, "triton")
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("case", CASES)
def test_weights_move_as_torchs(case, size, engine, monkeypatch):
    monkeypatch.setenv("TRISTEP_ENGINE", engine)
    name, arguments = case.split(",")[0], CASES[case]
    dtype = torch.float64 if size in FARTHER.get(name, ()) else torch.float32
    theirs = _steps(getattr(torch.optim, name), size, arguments, dtype)
    ours = _steps(getattr(tristep.optim, name), size, arguments)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("size", SIZES)
def test_muon_moves_as_in_float64(size, engine, monkeypatch):
    """Torch's own step is none from 1.8e19 on, because it divides by an infinite norm."""
    monkeypatch.setenv("TRISTEP_ENGINE", engine)
    arguments = {"weight_decay": 0.0, "eps": 1e-7}
    scale = 1.0 if size > 1 else size  # small norms are divided by eps
    theirs = _steps(torch.optim.Muon, scale, arguments)
    ours = _steps(tristep.optim.Muon, size, arguments)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=2e-3)
