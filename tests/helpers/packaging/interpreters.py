"""Interpreters in which tristep has not been imported, for tests: forks of one that has imported torch, to save seconds."""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import textwrap
from pathlib import Path


def run(code: str, folder: Path) -> list[str]:
    """The lines that the code prints, run in the folder `folder`, from which it may import.

    Raises:
        AssertionError: the code raised; the message ends in its traceback.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch"])
    with tempfile.TemporaryDirectory() as place:
        out, errors = Path(place, "out"), Path(place, "errors")
        process = context.Process(target=_run, args=(textwrap.dedent(code), folder, out, errors))
        process.start()
        process.join()
        assert process.exitcode == 0, errors.read_text(encoding="utf-8")
        return out.read_text(encoding="utf-8").splitlines()


def _run(code: str, folder: Path, out: Path, errors: Path) -> None:
    for number, path in ((1, out), (2, errors)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", encoding="utf-8", closefd=False) for number in (1, 2))
    assert "tristep" not in sys.modules
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    exec(compile(code, "<code>", "exec"), {"__name__": "__main__"})
