"""The tutorials run, and the notebooks that readers see are the files that we write."""

import importlib.util
from pathlib import Path

import pytest

jupytext = pytest.importorskip("jupytext")  # `make gpu` uses what a machine has
nbformat = pytest.importorskip("nbformat")
for library in ("nbclient", "ipykernel", "sklearn", "matplotlib", "tomllib"):
    pytest.importorskip(library)

FOLDER = Path(__file__).parents[1] / "tutorials"
SOURCES = sorted(FOLDER.glob("[0-9]*.py"))

each_tutorial = pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.stem)


@pytest.fixture(scope="module")
def build():
    """tutorials/build.py, which is no part of the package."""
    spec = importlib.util.spec_from_file_location("tutorials_build", FOLDER / "build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@each_tutorial
def test_the_notebook_has_the_cells_of_the_source(source, build):
    written, shown = build.cells(source, build.repository()), _notebook(source)
    assert [cell.source for cell in written.cells if cell.id != "install"][1:] == [
        cell.source for cell in jupytext.read(source).cells
    ][1:]
    assert [(cell.cell_type, cell.source) for cell in shown.cells] == [
        (cell.cell_type, cell.source) for cell in written.cells
    ], "run tutorials/build.py"


@each_tutorial
def test_the_notebook_has_been_run_from_top_to_bottom(source):
    code = [cell for cell in _notebook(source).cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell.outputs]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert not any(output.output_type == "error" or output.get("name") == "stderr" for output in outputs)


@each_tutorial
@pytest.mark.slow
@pytest.mark.sample(0)
def test_the_source_runs_and_ends_in_checks(source, build, monkeypatch, tmp_path):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # these tests have it; who reads a tutorial does not
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # where torchrun leaves a folder
    cells = [cell for cell in build.run(source).cells if cell.cell_type == "code"]
    assert any(line.startswith("assert ") for line in cells[-1].source.splitlines())
    assert all(cell.execution_count for cell in cells)
    shown = [cell for cell in _notebook(source).cells if cell.cell_type == "code"]
    assert [_kinds(cell) for cell in cells] == [_kinds(cell) for cell in shown]


def _notebook(source):
    return nbformat.read(source.with_suffix(".ipynb"), as_version=4)


def _kinds(cell):
    """What a cell gave: text, pictures; not their contents, which depend on the machine."""
    return [(output.output_type, sorted(output.get("data", {}))) for output in cell.outputs]
