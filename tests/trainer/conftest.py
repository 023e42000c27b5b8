"""Fixtures of the trainer's tests: every engine in turn, the device that it works on, and parameters."""

import importlib.util

import numpy as np
import pytest
import torch

import tristep

HAS_DEVICE = torch.cuda.is_available()  # true for ROCm too
LIBRARIES = {"triton": "triton", "cpu": "numba", "eager": "torch"}


@pytest.fixture(params=LIBRARIES)
def engine(request):
    """The name of each engine in turn."""
    if importlib.util.find_spec(LIBRARIES[request.param]) is None:
        pytest.skip(f"needs {LIBRARIES[request.param]}")
    return request.param


@pytest.fixture
def device(request):
    """Where the tensors of a test lie: on the GPU if there is one, except for the cpu engine."""
    native = "engine" in request.fixturenames and request.getfixturevalue("engine") == "cpu"
    return torch.device("cuda" if HAS_DEVICE and not native else "cpu")


@pytest.fixture(params=[True, False], ids=["store updates", "copies update"])
def update_on_kvstore(request):
    """Who updates several copies of a model, in turn."""
    return request.param


@pytest.fixture
def params(device):
    """Three parameters of different shapes, and gradients for them."""
    return [torch.nn.Parameter(torch.randn(shape, device=device)) for shape in ((3, 5), (7,), (2, 1, 4))]


@pytest.fixture
def gradients(params):
    return [torch.randn_like(param) for param in params]


@pytest.fixture
def net(device):
    """Two layers, of which a loss may reach one or both."""
    return torch.nn.ModuleDict({"body": torch.nn.Linear(2, 2), "head": torch.nn.Linear(2, 1)}).to(device)


@pytest.fixture
def trainer(net):
    return tristep.Trainer(net, "sgd", {"learning_rate": 0.1, "momentum": 0.9, "wd": 0.1})


@pytest.fixture
def quiet_numpy():
    """Triton's interpreter computes in NumPy, which would warn of overflows and of values that are not finite."""
    with np.errstate(all="ignore"):
        yield


@pytest.fixture
def loss_scaling(monkeypatch):
    """`amp.init()` has been called, for this test alone."""
    monkeypatch.setattr(tristep.trainer.amp, "_target_dtype", None)
    tristep.amp.init()
