"""The tutorials run, and the notebooks that readers see are the files that we write."""

import importlib.util
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

jupytext = pytest.importorskip("jupytext")  # `make gpu` uses what a machine has
nbformat = pytest.importorskip("nbformat")
for library in ("nbclient", "ipykernel", "sklearn", "matplotlib", "tomllib"):
    pytest.importorskip(library)

FOLDER = Path(__file__).parents[1] / "tutorials"
SOURCES = sorted(FOLDER.glob("[0-9]*.py"))

ADDRESS = "https://github.com/someone/tristep"
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
def test_the_notebook_is_small_and_valid(source):
    notebook = _notebook(source)
    nbformat.validate(notebook)
    assert source.with_suffix(".ipynb").stat().st_size < 550_000
    assert "version" not in notebook.metadata.language_info


@each_tutorial
def test_a_picture_takes_the_place_of_a_widget(source):
    notebook = _notebook(source)
    assert "widgets" not in notebook.metadata
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            assert "application/vnd.jupyter.widget-view+json" not in output.get("data", {})


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


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.stem)
def test_the_course_asks_before_it_answers_and_ends_in_exercises(source):
    cells = _notebook(source).cells
    texts = [cell.source for cell in cells if cell.cell_type == "markdown"]
    folded = [text for text in texts if "<details>" in text]
    assert sum("*Guess:*" in text for text in folded) >= 1
    for text in folded:
        parts = re.split(r"^<details><summary>(?:Answer|Solutions)</summary>\n\n|\n\n</details>$", text, flags=re.MULTILINE)
        assert len(parts) == 1 + 2 * text.count("<details>")  # the blank lines let formulas be formulas
        assert "details>" not in "".join(parts)
    exercises = next(text for text in texts if "## Exercises" in text)
    numbers = re.findall(r"^(\d)\. ", exercises.partition("<details>")[0], re.MULTILINE)
    answers = next(cell for cell in cells if cell.source.startswith("answers = "))
    assert len(numbers) >= 3
    assert answers.outputs[0].text == "".join(f"exercise {number}: open\n" for number in numbers)


@pytest.mark.parametrize("end", ["", "/", ".git"])
def test_a_notebook_links_to_colab_where_the_repository_is_known(end, build):
    without, linked = (build.cells(SOURCES[0], address).cells for address in (None, ADDRESS + end))
    place = f"https://colab.research.google.com/github/someone/tristep/blob/main/tutorials/{SOURCES[0].stem}.ipynb"
    assert linked[0].source == f"{without[0].source}\n\n[Open in Colab]({place})"
    assert "colab" not in without[0].source
    assert [cell.source for cell in linked[2:]] == [cell.source for cell in without[2:]]


@pytest.mark.parametrize(("address", "package"), [(None, "..[demo]"), (ADDRESS, f"tristep[demo] @ git+{ADDRESS}")])
@pytest.mark.parametrize("missing", [None, "tristep", "anywidget"])
def test_the_first_code_installs_what_is_missing_and_else_does_nothing(missing, address, package, build, monkeypatch):
    transformer = pytest.importorskip("IPython.core.inputtransformer2").TransformerManager()
    first = next(cell for cell in build.cells(SOURCES[0], address).cells if cell.cell_type == "code")
    ran = []
    shell = SimpleNamespace(run_line_magic=lambda name, line: ran.append((name, line)))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == missing else object())
    exec(transformer.transform_cell(first.source), {"get_ipython": lambda: shell})
    assert ran == ([] if missing is None else [("pip", f"install --quiet '{package}'")])


def test_outputs_are_kept_where_the_code_is_what_was_run(build, monkeypatch, tmp_path):
    notebook = _notebook(SOURCES[0])
    source = tmp_path / SOURCES[0].name
    text = SOURCES[0].read_text().replace("# # The Trainer", "# # Another title", 1)
    source.write_text(text)
    nbformat.write(notebook, source.with_suffix(".ipynb"))
    renewed = build.renew(source)
    assert renewed.cells[0].source.startswith("# Another title")
    assert [cell.get("outputs") for cell in renewed.cells] == [cell.get("outputs") for cell in notebook.cells]
    source.write_text(text.replace("import torch", "import torch  # again", 1))
    with pytest.raises(ValueError, match=r"01_first_steps.py: the code of cell-1 is not what has been run"):
        build.renew(source)


def _notebook(source):
    return nbformat.read(source.with_suffix(".ipynb"), as_version=4)


def _kinds(cell):
    """What a cell gave: text, pictures; not their contents, which depend on the machine."""
    return [(output.output_type, sorted(output.get("data", {}))) for output in cell.outputs]
