"""Fixtures of the trainer's tests: every engine in turn, the device that it works on, and parameters."""

import importlib.util

import pytest
import torch

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
