"""What every test runs under: the engines' environment, seeds, poisoned memory, MXNet's numbers on request.

It is loaded before any test module, and so before anything imports Triton or numba: both read their settings
on import. Child processes inherit the settings through the environment.
"""

import gc
import importlib.util
import json
import os
import random
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

_workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
THREADS = max(1, _cores // _workers)  # so that parallel workers do not fight for the cores
os.environ.setdefault("OMP_NUM_THREADS", str(THREADS))
os.environ.setdefault("NUMBA_NUM_THREADS", str(THREADS))
os.environ.setdefault("MPLBACKEND", "agg")
# Interpreters that tests start need not compile our modules again, nor the next run rewrite all assertions.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# What libraries would keep in the home directory or the temporary folder. Compiled code stays there for the next run: the
# keys of numba's and Triton's caches are made of what was compiled and their versions.
_KEPT = Path(__file__).parents[1] / ".test-cache"
_FOLDERS = {
    "NUMBA_CACHE_DIR": "numba",
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "XDG_CACHE_HOME": "cache",
    "XDG_CONFIG_HOME": "config",
    "XDG_DATA_HOME": "data",
    "MPLCONFIGDIR": "matplotlib",
    "IPYTHONDIR": "ipython",
    "JUPYTER_CONFIG_DIR": "jupyter/config",
    "JUPYTER_DATA_DIR": "jupyter/data",
    "JUPYTER_RUNTIME_DIR": "jupyter/runtime",
}
for _name, _folder in _FOLDERS.items():
    os.environ.setdefault(_name, str(_KEPT / _folder))

import numpy as np  # noqa: E402  # NumPy and torch read the thread counts too
import pytest  # noqa: E402
import torch  # noqa: E402

# Modules that test files share, whose failed assertions are to show values, too.
for _folder in ("gpu", "helpers/*", "oracles"):
    pytest.register_assert_rewrite(*(path.stem for path in Path(__file__).parent.glob(f"{_folder}/*.py")))

torch.set_num_threads(THREADS)

HAS_DEVICE = torch.cuda.is_available()  # true for ROCm too
if not HAS_DEVICE:
    os.environ.setdefault("TRITON_INTERPRET", "1")  # the triton engine then runs on CPU tensors


def _load(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(f"test_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


matrix = _load(Path(__file__).parent / "matrix.py")  # which cases of parametrised tests run

_GOLDEN = Path(__file__).parent / "golden"
_GOLDEN_FOLDERS = {1: _GOLDEN, 2: _GOLDEN / "v2"}


class Golden(NamedTuple):
    """One recorded run of MXNet: what it was given, and the arrays that it gave."""

    config: dict[str, Any]
    arrays: dict[str, np.ndarray]


@cache
def golden_runs(group: str, version: int = 1) -> tuple[Golden, ...]:
    """The recorded runs of a group, such as "adam", of MXNet 1.9.1 (version 1) or 2.0.0b1 (version 2)."""
    folder = _GOLDEN_FOLDERS[version]
    entry = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))["groups"][group]
    stored = np.load(folder / entry["file"]) if "file" in entry else {}
    runs = []
    for config in entry["configs"]:
        names = config.get("arrays", [])  # groups of random draws have none, only statistics
        runs.append(Golden(config, {name: stored[f"{config['id']}.{name}"] for name in names}))
    return tuple(runs)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cases", default="quick", help=matrix.HELP)
    parser.addoption("--bare", action="store_true", help="skip tests that need a package which is missing, and say which")


# What tristep or its tests use, and a machine with torch, Triton and pytest may lack.
_PACKAGES = ("IPython", "matplotlib", "numba", "pytorch_optimizer", "safetensors", "tqdm")


def _skipping_lacking(item: pytest.Item) -> Iterator[Any]:
    try:
        return (yield)
    except ModuleNotFoundError as error:
        if item.config.getoption("--bare") and error.name in _PACKAGES:
            pytest.skip(f"needs {error.name}")
        raise


pytest_runtest_setup = pytest.hookimpl(wrapper=True)(_skipping_lacking)
pytest_runtest_call = pytest.hookimpl(wrapper=True)(_skipping_lacking)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    matrix.select(config, items)


def pytest_collection() -> None:
    """What thousands of tests are collected into stays: Python's garbage collector need not look at it again and again."""
    gc.disable()


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_sessionfinish() -> None:
    gc.unfreeze()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "golden(*groups, version=1, where=None): run the test once for each recorded run of these groups of "
        "MXNet 1.9.1 (version=2: 2.0.0b1) for which where(config) is true; its argument `golden` is the pair "
        "(config, arrays)",
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    marks = list(metafunc.definition.iter_markers("golden"))
    if not marks:
        return
    cases = [case for mark in marks for case in _golden_cases(*mark.args, **mark.kwargs)]
    if not cases:
        raise pytest.UsageError(f"{metafunc.definition.nodeid}: no recorded run fits its golden mark")
    metafunc.parametrize("golden", cases, indirect=True)


def _golden_cases(*groups: str, version: int = 1, where: Any = None) -> list[Any]:
    return [
        pytest.param(run, id=f"{run.config['id']}-v{version}")
        for group in groups
        for run in golden_runs(group, version)
        if where is None or where(run.config)
    ]


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Golden:
    """The recorded run of this case, its arrays the test's own to change; needs the mark of the same name."""
    config, arrays = request.param
    return Golden(config, {name: array.copy() for name, array in arrays.items()})


@pytest.fixture(scope="session")
def processes() -> Iterator[Any]:
    """A function that gives `ranks` processes with a gloo group; `processes(2).run(function, ...)` runs it on each."""
    from processes import Forks, Processes

    running: dict[int, Processes] = {}
    forks = Forks()

    def start(ranks: int) -> Any:
        if ranks not in running or not running[ranks].alive:
            running[ranks] = Processes(ranks, forks)
        return running[ranks]

    yield start
    for members in running.values():
        members.end()
    forks.end()


@pytest.fixture
def run_job(processes):
    """A function that runs a worker's function on so many workers, with a server; a list of what they return."""
    from server_jobs import job

    def run(function, workers, *args):
        path, name = function.__code__.co_filename, function.__name__
        return processes(workers + 1).run(job, path, name, *args)[:workers]

    return run


@pytest.fixture
def clean_registry():
    """What a test registers is forgotten after it."""
    from tristep.initializer import Initializer
    from tristep.kvstore import Compressor, KVStore
    from tristep.lr_scheduler import LRScheduler
    from tristep.optimizer import Optimizer
    from tristep.trainer.lr_scheduler.config import functions

    stores = [KVStore.kv_registry, Compressor.registry]
    registries = [Optimizer.opt_registry, Initializer.registry, LRScheduler.registry, functions, *stores]
    before = [dict(registry) for registry in registries]
    yield
    for registry, entries in zip(registries, before, strict=True):
        registry.clear()
        registry.update(entries)


EMULATED = """
import torch
from gpu_emulator.driver import install
torch.set_num_threads(1)
install()
result = None
"""


@pytest.fixture(scope="session")
def emulated() -> Iterator[Any]:
    """An interpreter whose GPU is the emulator; `emulated.run(script, arguments)` gives the script's `result`."""
    pytest.importorskip("triton", reason="Triton has builds for Linux only")
    from compiling import Compiling

    started = Compiling()
    started.run(EMULATED)
    yield started
    started.end()


@pytest.fixture
def few_steps(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the quick tier, the steps of this test that name no engine are too few to compile for them."""
    if request.config.getoption("--cases") == "quick" and not HAS_DEVICE:
        monkeypatch.setenv("TRISTEP_ENGINE", "eager")


@pytest.fixture(params=["in Python", "compiled"])
def passes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How guards look at tensors: as at the beginning of a process, or by compiled passes."""
    from tristep.kernels import guards

    look = None
    if request.param == "compiled":
        look = pytest.importorskip(
            "tristep.kernels.backends.cpu.look", reason="needs numba, and DLPack's C exchange interface in torch"
        )
    for name, value in {"_look": look, "_SOME": -1, "_MANY": 0}.items():
        monkeypatch.setattr(guards, name, value)
    return str(request.param)


@pytest.fixture(autouse=True)
def eager_in_quick_tier(few_steps: None) -> None:
    """Tests in folders whose `conftest.py` says nothing else take few steps."""


@pytest.fixture(autouse=True)
def _fixed_seeds() -> None:
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002  # for libraries that still draw from the global generator
    if HAS_DEVICE:
        torch.manual_seed(0)
    else:  # torch.manual_seed also notes a traceback for devices that may come
        torch.default_generator.manual_seed(0)


@pytest.fixture(autouse=not HAS_DEVICE)
def poisoned_memory():
    """Memory from torch.empty and its like holds NaN (the largest value, for ints) instead of what lay there.

    On a GPU it works only when asked for by name: torch offers it only together with deterministic
    algorithms, and on a GPU these refuse some operations.
    """
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


@pytest.fixture
def everything():
    """A function that lists all a trainer could change, as plain data: equal lists mean that not a bit has changed."""

    def plain(value):
        if isinstance(value, torch.Tensor):
            value = value.to_dense()
            bits = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            return str(value.dtype), str(value.device), tuple(value.shape), bits.numpy().tobytes()
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items()}
        return repr(value)

    def look(trainer, params):
        params, optimizer = list(params), trainer.optimizer
        state = trainer.state_dict()
        if "rescale_grad" in state["settings"]:  # a step sets it, as MXNet's, whether it fails or not
            state["settings"] = {name: value for name, value in state["settings"].items() if name != "rescale_grad"}
        # Never updated and never counted are the same.
        state["counts"] = {name: count for name, count in state["counts"].items() if count != optimizer.begin_num_update}
        return {
            "weights": [plain(param) for param in params],
            "gradients": [(id(param.grad), plain(param.grad)) for param in params],
            "attributes": [dict(vars(param)) for param in params],
            "optimizer": plain(state),
            "scheduler": repr(optimizer.lr_scheduler),
            "multipliers": plain([optimizer.lr_mult, optimizer.wd_mult]),
        }

    return look
