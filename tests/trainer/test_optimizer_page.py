"""docs/optimizers.md says what the registry says."""

import importlib.util
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def _build():
    spec = importlib.util.spec_from_file_location("build_optimizers", DOCS / "build_optimizers.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_what_the_registry_gives():
    """If not: python docs/build_optimizers.py."""
    assert (DOCS / "optimizers.md").read_text(encoding="utf-8") == _build().page()
