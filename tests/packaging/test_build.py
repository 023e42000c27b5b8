"""Wheel and sdist, built without network from a copy, hold all of the code and work elsewhere."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.packaging

ROOT = Path(__file__).parents[2]
CODE = ("kernels", "trainer", "viz", "contrib")
SOURCES = ["pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "docs", "src", *CODE, "tests"]
FOLDERS = {"src/tristep": "tristep"} | {name: f"tristep/{name}" for name in CODE}


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A folder with one sdist, and one wheel made from it."""
    checkout, out = tmp_path_factory.mktemp("checkout"), tmp_path_factory.mktemp("dist")
    for name in SOURCES:  # a copy, because setuptools would pick up what earlier builds left in the original
        if (ROOT / name).is_dir():
            ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
            shutil.copytree(ROOT / name, checkout / name, symlinks=True, ignore=ignore)
        else:
            shutil.copy(ROOT / name, checkout / name)
    _python("-m", "build", "--no-isolation", "--outdir", out, checkout, cwd=out)
    return out


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory):
    """A folder into which the wheel, and nothing else, is installed."""
    target = tmp_path_factory.mktemp("installed")
    (wheel,) = built.glob("*.whl")
    options = ["--quiet", "--disable-pip-version-check", "--no-index", "--no-deps", "--target", target]
    _python("-m", "pip", "install", *options, wheel, cwd=target)
    return target


@pytest.mark.sample(0)
def test_the_wheel_holds_exactly_the_files_on_disk(built):
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        code = {name: archive.read(name) for name in names if ".dist-info/" not in name}
    on_disk = {
        f"{package}/{path.relative_to(ROOT / folder).as_posix()}": path
        for folder, package in FOLDERS.items()
        for path in _files(ROOT / folder)
    }
    assert sorted(code) == sorted(on_disk)
    assert [name for name, path in on_disk.items() if code[name] != path.read_bytes()] == []
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


@pytest.mark.sample(0)
def test_the_tests_run_against_the_wheel_from_another_folder(installed, tmp_path):
    """Every test module can be collected, and the tests of one pass."""
    probe = "from tristep import kernels, trainer; print(kernels.__file__, trainer.__file__, sep='\\n')"
    places = _python("-c", probe, cwd=tmp_path, path=installed).splitlines()
    assert all(Path(place).is_relative_to(installed) for place in places)
    options = ["-q", "-p", "no:cacheprovider", "-c", ROOT / "pyproject.toml"]
    _python("-m", "pytest", *options, "--collect-only", ROOT / "tests", cwd=tmp_path, path=installed)
    some = ROOT / "tests" / "trainer" / "test_lr_scheduler.py"
    assert " passed" in _python("-m", "pytest", *options, some, cwd=tmp_path, path=installed)


def _files(folder):
    """The files of a folder that belong to the package."""
    return [
        path
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and not _inside_link(path, folder)
    ]


def _inside_link(path, folder):
    return any(parent.is_symlink() for parent in path.parents if parent != folder and folder in parent.parents)


def _python(*arguments, cwd, path=None, **variables):
    """Run this interpreter and return what it printed; `path` goes in front of where it looks for modules."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment |= variables
    if path is not None:
        environment["PYTHONPATH"] = os.fspath(path)
    command = [sys.executable, *map(os.fspath, arguments)]
    result = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout
