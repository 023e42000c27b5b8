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


def test_a_row_says_what_adam_keeps_and_moves():
    (row,) = [line for line in _build().page().splitlines() if line.startswith("| Adam |")]
    cells = [cell.strip() for cell in row.split("|")[1:-1]]
    assert cells[2] == "mean, var"
    assert cells[3] == "28"  # weight, gradient and two averages read, all but the gradient written, four bytes each
    assert "Kingma & Ba" in cells[6]
