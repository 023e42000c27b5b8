"""What a release is made of agrees: versions, requirements, and the files about the project."""

import re
import sys
from pathlib import Path

import pytest
import yaml

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
RECIPE = yaml.safe_load((ROOT / "conda" / "recipe.yaml").read_text(encoding="utf-8"))
CITATION = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
CONDA_NAMES = {"torch": "pytorch"}


def test_versions_agree():
    (changes,) = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)[:1]
    assert {PROJECT["version"], CITATION["version"], RECIPE["context"]["version"], changes} == {changes}


def test_the_citation_has_what_its_format_requires():
    """Citation File Format 1.2.0, the schema's required properties, and of `type` and `authors` what is allowed."""
    assert {"cff-version", "message", "title", "authors"} <= set(CITATION)
    assert CITATION["cff-version"] == "1.2.0"
    assert CITATION["type"] in ("software", "dataset")
    assert all(author.get("name") or author.get("family-names") for author in CITATION["authors"])
    assert CITATION["license"] == PROJECT["license"] == RECIPE["about"]["license"]


def test_the_recipe_requires_what_the_package_requires():
    """And, of Triton, no older one than the extra."""
    texts = PROJECT["dependencies"] + PROJECT["optional-dependencies"]["triton"]
    ours = dict(re.fullmatch(r"([\w-]+)(.*?)(?:;.*)?", text).groups() for text in texts)
    requirements = RECIPE["requirements"]
    theirs = dict((text + " ").split(" ", 1) for text in requirements["run"] + requirements["run_constraints"])
    assert theirs.pop("python").strip() == PROJECT["requires-python"]
    assert {name: least.strip() for name, least in theirs.items()} == {CONDA_NAMES.get(n, n): v for n, v in ours.items()}
