"""Write generated loops to the user's cache folder, so that numba can cache the compiled code there too."""

from __future__ import annotations

import builtins
import contextlib
import importlib.util
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, cast

import numba

from ... import random, storage
from ...language import literals
from ..folders import absolute_folder, usable_folder

_SLOW = 2.0  # seconds of compilation in a process after which a message is printed
_compilation = {"seconds": 0.0}


def wanted_folder() -> Path:
    """Return the preferred folder for compiled code: NUMBA_CACHE_DIR, or "tristep" in the user's cache folder."""
    root = os.environ.get("NUMBA_CACHE_DIR")
    if root:
        return absolute_folder(Path(root))
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA", "~/AppData/Local")
    elif sys.platform == "darwin":
        base = "~/Library/Caches"
    else:
        base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return absolute_folder(Path(base).expanduser() / "tristep")


def cache_folder() -> Path | None:
    """Return the folder for compiled code: `wanted_folder`, else a temporary folder; None if neither can be written."""
    return usable_folder(wanted_folder(), "NUMBA_CACHE_DIR")


def cached(decorator: Any, *arguments: Any, **options: Any) -> Any:
    """Return a numba decorator that caches compiled code in `cache_folder`.

    By default numba caches it next to the source, where it would remain after the package is uninstalled.
    """

    def decorate(fn: Any) -> Any:
        folder, config = cache_folder(), cast("Any", numba.config)
        before, config.CACHE_DIR = config.CACHE_DIR, str(folder)
        try:
            return decorator(*arguments, cache=folder is not None, **options)(fn)
        except RuntimeError:  # numba cannot write to the folder after all
            return decorator(*arguments, **options)(fn)
        finally:
            config.CACHE_DIR = before

    return decorate


@cache
def engine_text() -> str:
    """Return the source of all modules with functions or constants that are compiled into loops, apart from the rules."""
    folders = Path(__file__).parent, Path(str(storage.__file__)).parent
    files = [
        Path(literals.__file__),
        Path(str(random.__file__)),
        *(file for folder in folders for file in sorted(folder.glob("*.py"))),
    ]
    return "".join(file.read_text(encoding="utf-8") for file in files)


def entry(*numbers: Any, fastmath: Any = False) -> Any:
    """Return a decorator that compiles a C function of the address of int64 numbers and of numbers of these types."""
    signature = numba.types.void(numba.types.CPointer(numba.types.int64), *numbers)
    return cached(numba.cfunc, signature, error_model="numpy", fastmath=fastmath)


def import_generated(name: str, source: str, names: dict[str, Any]) -> Any:
    """Run generated source with these globals, from a file in the cache folder if possible, and return its `compute`."""
    folder = cache_folder()
    path = None if folder is None else folder / f"{name}.py"
    if path is None or not _has_text(path, source):  # no folder to write to: compile in memory, every time
        exec(compile(source, f"<tristep {name}>", "exec"), names)
        return names["compute"]
    spec = importlib.util.spec_from_file_location(f"tristep_generated_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    vars(module).update(names)
    sys.modules[module.__name__] = module
    with _alone(path):
        spec.loader.exec_module(module)
    return module.compute


def _has_text(path: Path, text: str) -> bool:
    """Write a text to a file unless it already has it, and return whether it has it now."""
    try:
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            # Atomically, since several processes may write the same file.
            with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", delete=False, encoding="utf-8") as file:
                file.write(text)
            os.replace(file.name, path)
    except OSError:
        return False
    return True


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """A context for compiling or loading code. If it is slow, prints a message, once per process, in interactive use."""
    start, left = time.perf_counter(), _SLOW - _compilation["seconds"]
    note = threading.Timer(max(0.0, left), _tell)
    note.daemon = True
    if left > 0 and (sys.stderr.isatty() or hasattr(builtins, "__IPYTHON__")):
        note.start()
    try:
        yield
    finally:
        note.cancel()
        _compilation["seconds"] += time.perf_counter() - start


def _tell() -> None:
    stream = sys.stderr if sys.stderr.isatty() else sys.stdout  # a notebook shows stderr in red, as if something were wrong
    stream.write(f"tristep: compiling for the CPU; later runs find the code in {cache_folder()}\n")
    stream.flush()


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """A context that one process enters at a time, so that one rank compiles and the others load its code.

    It locks the file, if the system can. The system releases the lock of a process that ends.
    """
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(ImportError, OSError):
            import fcntl

            fcntl.flock(stack.enter_context(open(path, "rb")), fcntl.LOCK_EX)
        yield
