"""What the tests of kernels share: on which engines they run, rules in files, and fresh interpreters."""

import importlib.util
import os
import subprocess
import sys
from typing import NamedTuple

import numpy as np
import pytest
import torch
from compiling import Compiling

from tristep.kernels import Update
from tristep.kernels.backends import has_numba, has_triton, launch_class

_FAST = "cuda" if torch.cuda.is_available() else "cpu"  # without a GPU, tests/conftest.py has set TRITON_INTERPRET=1


class Place(NamedTuple):
    """An engine, and a device whose tensors it takes."""

    engine: str
    device: str

    @property
    def is_approximate(self) -> bool:
        """Whether quotients and roots are as exact as a GPU's instructions, which the emulator's may be, too."""
        on_gpu = self.device == "cuda" or "GPU_EMULATOR_ERROR" in os.environ
        return self.engine == "triton" and on_gpu

    @property
    def tile(self) -> int:
        """The engine's elements per tile, of few."""
        return launch_class(self.engine).tile_for(0)

    def tensor(self, array, dtype):
        """A tensor with these values, rounded to `dtype`, at the start of memory of its own."""
        return torch.tensor(np.asarray(array, dtype=np.float64), dtype=torch.float64).to(dtype).to(self.device)

    def run(self, rule, weights, gradients, states, hyper, masters=None):
        """One step; `hyper` has a row for each weight, rescale_grad first. Returns the `Update`."""
        update = Update(rule, weights, states, masters, engine=self.engine)
        update.hyper[:] = np.reshape(hyper, update.hyper.shape)  # no rows at all have a shape of their own
        update.bind(gradients)
        update()
        return update


def _places():
    places = [Place("eager", _FAST)]
    if has_numba():
        places.insert(0, Place("cpu", "cpu"))
    if has_triton():
        places.insert(0, Place("triton", _FAST))
    return places


@pytest.fixture(autouse=True)
def eager_in_quick_tier():
    """Tests of kernels say where they run."""


@pytest.fixture(autouse=True)
def _quiet_numpy():
    """Triton's interpreter computes in NumPy, with elements beyond a tensor's end too, which would warn of 0 / 0."""
    with np.errstate(all="ignore"):
        yield


@pytest.fixture(params=_places(), ids=lambda place: place.engine)
def place(request):
    """Each engine that there is here, with the device that it is made for."""
    return request.param


@pytest.fixture(params=_places()[-1:], ids=lambda place: place.engine)
def eager_place(request):
    """As `place`, but only torch's operations, on which rules of whole tensors run whatever engine is asked for."""
    return request.param


@pytest.fixture(params=[p for p in _places() if p.engine == "triton"], ids=lambda place: place.engine)
def triton_place(request):
    return request.param


@pytest.fixture(params=[p for p in _places() if p.engine != "eager"], ids=lambda place: place.engine)
def compiled_place(request):
    """As `place`, but only the engines that compile a rule."""
    return request.param


@pytest.fixture
def small_tiles(monkeypatch):
    """Tiles of 128 elements in Triton's interpreter, which adds up several values at once element by element."""
    if has_triton() and os.environ.get("TRITON_INTERPRET") == "1":
        from tristep.kernels.backends.triton import compile, launch

        for module in (compile, launch):
            monkeypatch.setattr(module, "BLOCK", 128)


def _load(path):
    """The module in this file; it is registered, as pickling and inspecting need."""
    name = f"tests_{path.stem}"
    if name in sys.modules and sys.modules[name].__file__ == str(path):
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def write_rules(tmp_path):
    """A function that puts the text of rules into a file and gives the module; engines read a rule's source."""
    count = 0

    def write(text, name=None):
        nonlocal count
        count += 1
        path = tmp_path / f"{name or f'rules_{count}_{tmp_path.name}'}.py"
        path.write_text(f"from tristep.kernels import jit, reduction, rule, tensor_rule, tl\n\n\n{text}", encoding="utf-8")
        return _load(path)

    return write


def fresh_python(*arguments, unset=(), timeout=280, **environment):
    """What a fresh interpreter printed; its errors, should it fail, become the message."""
    inherited = {name: value for name, value in os.environ.items() if name not in unset}
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=inherited | environment, check=False, timeout=timeout)
    assert done.returncode == 0, f"{command} failed:\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="session", name="fresh_python")
def _fresh_python():
    """The function `fresh_python(*arguments, unset=(), timeout=280, **environment)`."""
    return fresh_python


@pytest.fixture(scope="session")
def compiling():
    """`compiling.run(script, arguments)` runs a script in an interpreter that compiles for GPUs, and gives its `result`."""
    pytest.importorskip("triton", reason="Triton has builds for Linux only")
    started = Compiling()
    yield started
    started.end()
