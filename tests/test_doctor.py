"""`python -m tristep doctor`: what it says of a sound installation, and of what is wrong."""

import importlib.metadata

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
