"""`python -m tristep doctor`: what it says of a sound installation, and of what is wrong."""

import importlib.metadata
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from tristep import doctor
from tristep.__main__ import main


def test_it_names_versions_engines_and_caches(capsys):
    assert main(["doctor"]) == 0
    printed = capsys.readouterr().out
    assert f"torch          {importlib.metadata.version('torch')}" in printed
    assert "engine 'cpu', a step is right" in printed or "engine 'eager', a step is right" in printed
    assert "for the CPU" in printed
    assert printed.endswith("Nothing is missing.\n")


@pytest.mark.sample(0)
def test_it_ends_without_words_where_nobody_reads_on():
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "tristep", "doctor"]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=120, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")


def test_what_is_missing_comes_with_the_command_that_installs_it(monkeypatch):
    versions = importlib.metadata.version

    def version(name):
        if name in ("anywidget", "safetensors"):
            raise importlib.metadata.PackageNotFoundError(name)
        return "2.7.1+cpu" if name == "torch" else versions(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    lines, works = doctor.report()
    assert not works
    assert "  torch          2.7.1+cpu, older than 2.8" in lines
    assert lines[-3:] == [
        "Error: torch 2.7.1+cpu is too old: pip install -U 'torch>=2.8'",
        "Error: safetensors missing: pip install safetensors",
        "For pictures and widgets, anywidget missing: pip install 'tristep[notebook]'",
    ]


@pytest.mark.parametrize(
    ("engine", "line"),
    [("nope", ": no engine"), ("triton", "Error: TRISTEP_ENGINE='triton' works on none of these devices: unset it")],
)
def test_an_engine_that_cannot_work_is_an_error(engine, line, monkeypatch, capsys):
    monkeypatch.setenv("TRISTEP_ENGINE", engine)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(doctor, "_available", lambda: [(torch.device("cpu"), "2 cores")])
    assert main(["doctor"]) == 1
    printed = capsys.readouterr().out
    assert line in printed
    assert "Error: " in printed


def test_a_step_that_fails_is_an_error_with_what_to_do(monkeypatch):
    def broken(*args, **kwargs):
        raise OSError("cannot write")

    monkeypatch.setattr(doctor.tristep, "Trainer", broken)
    monkeypatch.delenv("TRISTEP_ENGINE", raising=False)
    lines, works = doctor.report()
    assert not works
    assert any("fails: OSError: cannot write" in line for line in lines)


def test_without_metadata_it_still_knows_the_packages(monkeypatch):
    """As of a checkout on PYTHONPATH."""
    tomllib = pytest.importorskip("tomllib")  # Python 3.11
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]

    def requires(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", requires)
    extras = project["optional-dependencies"]
    expected = {(text, "") for text in project["dependencies"]}
    expected |= {(text, extra) for extra in ("notebook", "demo") for text in extras[extra] if "tristep" not in text}
    found = {(f"{name}>={least}" if least else name, extra) for name, least, extra in doctor._requirements()}
    assert found == expected


def test_a_cache_that_cannot_be_written_is_named(monkeypatch, tmp_path):
    pytest.importorskip("numba")
    (tmp_path / "file").touch()
    wanted = tmp_path / "file" / "cache"
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(wanted))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.warns(UserWarning, match="compiled code cannot be kept in"):
        lines, works = doctor.report()
    assert works
    (line,) = [line for line in lines if line.startswith("  for the CPU")]
    assert line.endswith(f"; {wanted} cannot be written: set NUMBA_CACHE_DIR to a folder that can")
    assert str(tmp_path / "tristep") in line
