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
VERSIONS = ("3.5.1", "3.6.0", "3.7.1", "3.8.0", "installed")
TARGETS = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "gfx942")


@pytest.mark.sample(0)  # a slice of the full tier has one of these pairs at most
@pytest.mark.timeout(600)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("version", VERSIONS)
def test_all_kernels_compile(version, target, fresh_python):
    found = _sweep(version, target, fresh_python)
    assert found["compiled"] > 250
    assert found["emulated"] > 3


def _sweep(version, target, fresh_python):
    folder = Path(sys.prefix) / f"triton-{version}"
    if version != "installed" and not folder.exists():
        pytest.skip(f"{folder} is missing, which `make test` installs")
    caches = Path(os.environ["TRITON_CACHE_DIR"]).parent
    folders = [folder] if version != "installed" else []
    folders += [TESTS.parent / "src", *sys.path]
    environment = {"PYTHONPATH": os.pathsep.join(map(str, folders)), "TRITON_CACHE_DIR": str(caches / f"triton-{version}")}
    command = ["-m", "gpu_emulator.sweep", "--targets", target]
    said = fresh_python(*command, unset=("TRITON_INTERPRET",), timeout=580, **environment)
    found = json.loads(said.splitlines()[-1])
    assert not found["failed"], "\n".join(found["failed"])
    assert version in ("installed", found["triton"])
    return found
