"""The checkout itself: folders at the root, links next to the public package, one list of packages."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

tomllib = pytest.importorskip("tomllib")  # Python 3.11; the constraints ask for that or later

pytestmark = pytest.mark.packaging

ROOT = Path(__file__).parents[2]
FOLDERS = ("kernels", "trainer", "viz", "contrib")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_every_folder_of_code_is_in_the_list_of_packages():
    folders = {path.parent.relative_to(ROOT) for top in FOLDERS for path in (ROOT / top).rglob("*.py")}
    assert all((ROOT / folder / "__init__.py").exists() for folder in folders)
    expected = {"tristep", "tristep.integrations"} | {".".join(("tristep", *folder.parts)) for folder in folders}
    listed = PROJECT["tool"]["setuptools"]["packages"]
    assert set(listed) == expected
    assert len(listed) == len(expected)


@pytest.mark.parametrize("folder", FOLDERS)
def test_links_in_the_public_package_are_relative(folder):
    link = ROOT / "src" / "tristep" / folder
    if link.is_file():
        pytest.skip("this checkout was made without symbolic links, so only tools are affected")
    assert link.is_symlink()
    assert link.readlink() == Path("..", "..", folder)


def test_the_face_holds_nothing_else():
    """A real folder next to the links, even an empty one, would hide the one at the root."""
    names = {path.name for path in (ROOT / "src" / "tristep").iterdir()}
    modules = {"amp", "init", "initializer", "kv", "kvstore", "lr_scheduler", "optim", "optimizer"}  # of trainer/
    known = {"__pycache__", "__init__.py", "__main__.py", "aliases.py", "demo.py", "doctor.py", "integrations", "py.typed"}
    assert names - known == set(FOLDERS) | {f"{name}.py" for name in modules}


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_refuses_to_be_imported_by_its_bare_name(folder):
    result = subprocess.run(
        [sys.executable, "-c", f"import {folder}"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 1
    assert f"ImportError: this folder is 'tristep.{folder}'; import it by that name" in result.stderr


def test_the_constraints_pin_every_direct_requirement():
    def names(requirements):
        return {re.match(r"[\w.-]+", each).group() for each in requirements if isinstance(each, str)}  # no included group

    project = PROJECT["project"]
    others = [*project["optional-dependencies"].values(), *PROJECT["dependency-groups"].values()]
    asked = names(project["dependencies"]).union(*map(names, others))
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = names(line for line in lines if line and not line.startswith("#"))
    assert asked - pinned == {"tristep"}


def test_the_floor_is_what_the_package_requires():
    """Torch's is not among them: it would be a download of gigabytes."""
    lines = (ROOT / "constraints-floor.txt").read_text(encoding="utf-8").splitlines()
    floor = dict(line.split(" ")[0].split("==") for line in lines if line and not line.startswith("#"))
    least = dict(re.fullmatch(r"([\w-]+)>=([\d.]+)", text).groups() for text in PROJECT["project"]["dependencies"])
    assert floor.keys() - {"llvmlite"} == least.keys() - {"torch"}
    assert all(floor[name].removesuffix(".0") == version for name, version in least.items() if name in floor)
