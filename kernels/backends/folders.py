"""Find a folder for compiled code if the wanted folder cannot be written."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
import warnings
from functools import cache
from pathlib import Path


@cache
def absolute_folder(path: Path) -> Path:
    """Return a path that the environment has, made absolute at its first use: a later `os.chdir` does not change it."""
    return path.absolute()


@cache
def usable_folder(wanted: Path, variable: str) -> Path | None:
    """Return `wanted`, made if missing; else, with a warning that names `variable`, a temporary folder or None."""
    try:
        wanted.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=wanted).close()
        return wanted
    except OSError as error:
        problem = error
    try:
        folder, where = _temporary_folder(), "in {} until that is deleted"
    except OSError:  # there is no temporary folder, either
        folder, where = None, "nowhere, and every process compiles anew"
    warnings.warn(
        f"compiled code cannot be kept in {wanted} ({problem}); it is kept {where.format(folder)}: "
        f"set {variable} to a folder that can be written",
        stacklevel=2,
    )
    return folder


def _temporary_folder() -> Path:
    """Return a folder for all processes of this user, or for this process alone if others own that or can write to it."""
    if not hasattr(os, "getuid"):  # on Windows each user has a temporary folder
        folder = Path(tempfile.gettempdir(), "tristep")
        folder.mkdir(exist_ok=True)
        return folder
    folder = Path(tempfile.gettempdir(), f"tristep-{os.getuid()}")
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    about = folder.lstat()
    if stat.S_ISDIR(about.st_mode) and about.st_uid == os.getuid() and not about.st_mode & 0o022:
        return folder
    return Path(tempfile.mkdtemp(prefix="tristep-"))
