"""Every version of Triton that tristep supports compiles the kernels for every kind of GPU; the emulator runs some of them.

`make` puts the earlier versions into folders of their own next to the environment's packages.
"""

import json
import os
import sys
from pathlib import Path

import pytest

from tristep.kernels.backends import has_numba

pytest.importorskip("triton", reason="Triton has builds for Linux only")

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not has_numba(), reason="needs numba, with which results are compared")]
TESTS = Path(__file__).parents[1]
# Each with the target that the quick tier compiles for; of NVIDIA's the oldest has no bfloat16 of its own.
VERSIONS = {"3.5.1": "sm_75", "3.6.0": "gfx942", "3.7.1": "sm_86", "3.8.0": "sm_120"}
TARGETS = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "gfx942")


@pytest.mark.parametrize("version", VERSIONS)
def test_some_kernels_compile(version, fresh_python):
    found = _sweep(version, fresh_python, VERSIONS[version])
    assert found["compiled"] > 10
    assert found["emulated"] > 3


@pytest.mark.sample(0)
@pytest.mark.timeout(600)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("version", [*VERSIONS, "installed"])
def test_all_kernels_compile(version, target, fresh_python):
    assert _sweep(version, fresh_python, target, "--all")["compiled"] > 250


def _sweep(version, fresh_python, *arguments):
    folder = Path(sys.prefix) / f"triton-{version}"
    if version != "installed" and not folder.exists():
        pytest.skip(f"{folder} is missing, which `make test` installs")
    caches = Path(os.environ["TRITON_CACHE_DIR"]).parent
    folders = [folder] if version != "installed" else []
    folders += [TESTS.parent / "src", *sys.path]
    environment = {"PYTHONPATH": os.pathsep.join(map(str, folders)), "TRITON_CACHE_DIR": str(caches / f"triton-{version}")}
    command = ["-m", "gpu_emulator.sweep", "--targets", *arguments]
    said = fresh_python(*command, unset=("TRITON_INTERPRET",), timeout=580, **environment)
    found = json.loads(said.splitlines()[-1])
    assert not found["failed"], "\n".join(found["failed"])
    assert version in ("installed", found["triton"])
    return found
