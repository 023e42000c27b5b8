"""The checkout itself: folders at the root, links next to the public package, one list of packages."""

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
