"""Generated loops, written to the user's cache folder, which lets numba keep the compiled code there too."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
import tempfile
import types
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numba

from ... import random, storage
from ...language import literals
from .intrinsics import cached

__all__ = ["cache_folder", "engine_text", "entry", "import_generated"]


def cache_folder() -> Path:
    """Where generated loops and their compiled code are kept: NUMBA_CACHE_DIR, or tristep in the user's cache folder."""
    root = os.environ.get("NUMBA_CACHE_DIR")
    if root:
        return Path(root)
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA", "~/AppData/Local")
    elif sys.platform == "darwin":
        base = "~/Library/Caches"
    else:
        base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "tristep"


@cache
def engine_text() -> str:
    """The text of all modules whose functions and constants are compiled into a loop, in addition to the rule."""
    folders = Path(__file__).parent, Path(str(storage.__file__)).parent
    files = [
        Path(literals.__file__),
        Path(str(random.__file__)),
        *(file for folder in folders for file in sorted(folder.glob("*.py"))),
    ]
    return "".join(file.read_text(encoding="utf-8") for file in files)


def entry(*numbers: Any, fastmath: Any = False) -> Any:
    """Make a C function of one that takes the address of int64 numbers, and numbers of these types."""
    signature = numba.types.void(numba.types.CPointer(numba.types.int64), *numbers)
    return cached(numba.cfunc, signature, error_model="numpy", fastmath=fastmath)


def import_generated(name: str, source: str, names: dict[str, Any]) -> types.ModuleType | None:
    folder = cache_folder()
    path = folder / f"{name}.py"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.read_text(encoding="utf-8") != source:
            # Whole or not at all, since several processes may write the same file.
            with tempfile.NamedTemporaryFile("w", dir=folder, suffix=".tmp", delete=False, encoding="utf-8") as file:
                file.write(source)
            os.replace(file.name, path)
    except OSError:
        return None
    spec = importlib.util.spec_from_file_location(f"tristep_generated_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    vars(module).update(names)
    sys.modules[module.__name__] = module
    with _alone(path):
        spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """A context for one process at a time, so that of several ranks one compiles and the others find what it has written.

    It locks the file, where that can be done. A process that ends gives its lock back.
    """
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(ImportError, OSError):
            import fcntl

            fcntl.flock(stack.enter_context(open(path, "rb")), fcntl.LOCK_EX)
        yield
