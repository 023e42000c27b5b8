"""Where Triton cannot run kernels: what a user is told, and that steps are right all the same.

Triton's own driver of each version runs in a fresh interpreter, with simulated GPUs and a driver library that takes notes;
see recording_libcuda.py. `make` puts the earlier versions into folders of their own next to the environment's packages.
"""

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch

from tristep.kernels import backends, choose_engine

pytest.importorskip("triton", reason="Triton has builds for Linux only")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.is_available(), reason="with a real GPU none is simulated"),
    pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler"),
]
TESTS = Path(__file__).parents[1]

SCENES = '''
import json, os, sys, tempfile, warnings
from pathlib import Path

import torch
import triton
from recording_libcuda import RecordingLibcuda
from simulated_gpus import SimulatedGpus

import tristep
from tristep.kernels import backends, choose_engine, compress
from tristep.kernels.backends.triton import start

SECOND = torch.device("cuda:1")
folder = Path(sys.argv[1])
result = {"triton": triton.__version__}


def steps(**options):
    """Two steps, what they make of weights of 1, and what is warned of; `clip_norm` is out of reach."""
    start.problem_of.cache_clear()
    backends._warn.cache_clear()
    with SimulatedGpus() as gpus, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        weight = torch.nn.Parameter(torch.ones(3000, device=SECOND))
        trainer = tristep.Trainer([weight], "sgd", {"learning_rate": 0.25, "clip_norm": 1e9}, **options)
        for _ in range(2):
            weight.grad = torch.ones(3000, device=SECOND)
            trainer.step(1)
        with gpus.waits("the test looks"):
            return {
                "weights": sorted(set(weight.detach().cpu().tolist())),
                "told": [text for text in map(str, (each.message for each in caught)) if "TRITON_DEFAULT_FP" not in text],
            }


def error():
    start.problem_of.cache_clear()
    with SimulatedGpus():
        try:
            choose_engine(SECOND, "triton")
        except RuntimeError as refused:
            return str(refused)


result["no library of a driver"], result["refused"] = steps(), error()
library = RecordingLibcuda(folder)
if os.environ.get("CC"):
    print(json.dumps({"a C compiler that fails": steps()}))
    sys.exit()
path = os.environ["PATH"]
os.environ["PATH"] = ""
result["no C compiler"] = steps()
os.environ["PATH"] = path
(folder / "file").touch()
cache = triton.knobs.cache.dir
triton.knobs.cache.dir = str(folder / "file" / "cache")
tempfile.tempdir = str(folder)
result["a cache that cannot be written"] = steps()
result["where the cache is"] = triton.knobs.cache.dir
triton.knobs.cache.dir = cache
result["launches"] = library.launches()
triton.knobs.runtime.jit_cache_hook = triton.knobs.runtime.jit_post_compile_hook = hook = lambda **_: None
result["hooks"] = steps(engine="triton")
with SimulatedGpus():
    code = compress.CODES["2bit"]
    messages = torch.zeros(1, code.size(code.chunk(3000, 1)), dtype=torch.uint8, device=SECOND)
    compress.encode(code, torch.ones(3000, device=SECOND), None, messages, 0.25, "triton")
result["hooks stay"] = triton.knobs.runtime.jit_post_compile_hook is hook
result["launches with hooks"] = library.launches()[len(result["launches"]):]
print(json.dumps(result))
'''

VERSIONS = ("3.5.1", "3.6.0", "3.7.1", "3.8.0", "installed")
STEP = ["sums_kernel", "totals_kernel", "update_kernel"]  # whose kernels are launched and compute nothing


@pytest.mark.sample(0)
@pytest.mark.parametrize("version", VERSIONS)
def test_what_hinders_triton_is_told_once_and_steps_are_right(version, fresh_python, tmp_path):
    folder = Path(sys.prefix) / f"triton-{version}"
    if version != "installed" and not folder.exists():
        pytest.skip(f"{folder} is missing, which `make test` installs")
    found = _play(fresh_python, tmp_path, *([folder] if version != "installed" else []))
    assert version in ("installed", found["triton"])
    for scene, remedies in {
        "no library of a driver": ("TRITON_LIBCUDA_PATH", "libcuda.so"),
        "no C compiler": ("install a C compiler",),
    }.items():
        _check(found[scene], remedies)
    assert found["refused"].startswith("engine='triton' cannot run on cuda:1: ")
    (told,) = found["a cache that cannot be written"]["told"]
    assert "set TRITON_CACHE_DIR to a folder that can be written" in told
    assert Path(found["where the cache is"]).is_relative_to(tmp_path / "scratch")
    assert found["launches"] == ["_nothing", *STEP * 2]
    assert not found["hooks"]["told"]
    assert found["hooks stay"]
    assert found["launches with hooks"] == ["_nothing", *STEP * 2, "_kernel"]


def _play(fresh_python, tmp_path, *folders, **environment):
    folders = [*folders, TESTS.parent / "src", *sys.path]
    environment |= {"PYTHONPATH": os.pathsep.join(map(str, folders)), "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    script, scratch = tmp_path / "scenes.py", tmp_path / "scratch"
    script.write_text(SCENES, encoding="utf-8")
    scratch.mkdir()
    said = fresh_python(script, scratch, unset=("TRITON_INTERPRET", "TRISTEP_ENGINE", "CC"), **environment)
    return json.loads(said.splitlines()[-1])


def _check(scene, remedies):
    (told,) = scene["told"]
    assert told.startswith("Triton cannot run on cuda:1, where torch computes steps instead, more slowly")
    assert any(remedy in told for remedy in remedies), told
    assert scene["weights"] == [0.5]


def test_a_triton_without_a_backend_for_the_gpu_is_left_alone(monkeypatch):
    """As PyPI's next to torch's build for Intel's GPUs."""
    monkeypatch.delenv("TRISTEP_ENGINE", raising=False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    device = torch.device("xpu", 0)
    with pytest.warns(UserWarning, match=r"has no backend named 'intel' \(it has .*nvidia") as caught:
        assert [choose_engine(device), choose_engine(device)] == ["eager"] * 2
    assert len(caught) == 1
    with pytest.raises(RuntimeError, match="engine='triton' cannot run on xpu:0: .* no backend named 'intel'"):
        choose_engine(device, "triton")
    backends._warn.cache_clear()
