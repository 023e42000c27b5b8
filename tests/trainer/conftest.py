"""Fixtures of the trainer's tests: every engine in turn, the device that it works on, and what a trainer consists of."""

import importlib.util

import pytest
import torch
from server_jobs import job

from tristep.initializer import Initializer
from tristep.kvstore import Compressor, KVStore
from tristep.lr_scheduler import LRScheduler
from tristep.optimizer import Optimizer
from tristep.trainer.kvstore.base import updaters
from tristep.trainer.lr_scheduler.config import functions

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


@pytest.fixture
def clean_registry():
    """What a test registers is forgotten after it."""
    stores = [KVStore.kv_registry, Compressor.registry]
    registries = [Optimizer.opt_registry, Initializer.registry, LRScheduler.registry, functions, updaters, *stores]
    before = [dict(registry) for registry in registries]
    yield
    for registry, entries in zip(registries, before, strict=True):
        registry.clear()
        registry.update(entries)


@pytest.fixture(params=[True, False], ids=["store updates", "copies update"])
def update_on_kvstore(request):
    """Who updates several copies of a model, in turn."""
    return request.param


@pytest.fixture
def run_job(processes):
    """A function that runs a worker's function on so many workers, with so many servers; a list of what they return."""

    def run(function, workers, servers, *args):
        path, name = function.__code__.co_filename, function.__name__
        return processes(workers + servers).run(job, path, name, servers, *args)[:workers]

    return run


@pytest.fixture
def params(device):
    """Three parameters of different shapes, and gradients for them."""
    return [torch.nn.Parameter(torch.randn(shape, device=device)) for shape in ((3, 5), (7,), (2, 1, 4))]


@pytest.fixture
def gradients(params):
    return [torch.randn_like(param) for param in params]
