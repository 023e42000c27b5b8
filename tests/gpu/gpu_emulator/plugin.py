"""A plugin for pytest that runs tests of the triton engine on the emulator instead of Triton's interpreter.

    PYTHONPATH=tests/gpu python -m pytest -p gpu_emulator.plugin -k triton tests/kernels/test_parity.py

Each test also fails if the emulator has found a defect in what it has launched. With GPU_EMULATOR_ERROR=up, down or random,
approximate instructions are as wrong as the manual allows.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

os.environ["TRITON_INTERPRET"] = "0"  # before tests/conftest.py, and before Triton is imported

import pytest


def pytest_collection_finish() -> None:
    """Every module that chooses an engine has been imported by now."""
    from .driver import install

    install().set_error(os.environ.get("GPU_EMULATOR_ERROR"))


@pytest.fixture(autouse=True)
def _no_defects() -> Iterator[None]:
    from .driver import install

    defects = install().defects
    defects.clear()
    yield
    assert not defects, "\n".join(defects)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    from .driver import install

    launches = install().launches
    ctas = sum(launch.ctas for launch in launches)
    terminalreporter.write_line(f"on the emulator: {len(launches)} launches of {ctas} CTAs")
