"""Read functions' source text lazily, and define functions from text so that compilers can read their source."""

from __future__ import annotations

import itertools
import linecache
import os
import types
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

_numbers = itertools.count()
_OURS = os.path.dirname(os.path.dirname(__file__)) + os.sep
_written: dict[str, float | None] = {}  # modification times of this package's files, when they were imported


def _time_of(file: str) -> float | None:
    return os.stat(file).st_mtime if os.path.isfile(file) else None  # None in an archive


class OfText:
    """Base of objects that read attributes from the source text of a function, `fn`, and check them.

    A user's function is read when it is defined. The functions of this package, of which a program uses few, are read when
    an attribute is first used; the package's tests check them.
    """

    fn: Any  # a types.FunctionType; typed so, it would be taken for a method
    _read = False

    def read(self) -> None:
        """Set the attributes. Two threads may call this at once."""
        raise NotImplementedError

    def _defined(self) -> None:
        file = self.fn.__code__.co_filename
        if file.startswith(_OURS):
            _written.setdefault(file, _time_of(file))
        else:
            self.read()
            self._read = True

    def _read_late(self) -> None:
        file = self.fn.__code__.co_filename
        if _time_of(file) != _written[file]:
            raise RuntimeError(f"{file} has changed since it was imported: start Python, or the notebook's kernel, again")
        self.read()
        self._read = True

    if not TYPE_CHECKING:  # type checkers would accept any attribute

        def __getattr__(self, name: str) -> Any:
            if "fn" in vars(self) and not self._read:
                self._read_late()
            return object.__getattribute__(self, name)


def function_of_text(name: str, text: str, names: Mapping[str, Any]) -> types.FunctionType:
    """Define a function from source text, with `names` as its globals; `linecache` knows the text, so `inspect` finds it."""
    file = f"<tristep {name} {next(_numbers)}>"
    linecache.cache[file] = len(text), None, text.splitlines(keepends=True), file
    namespace = dict(names)
    exec(compile(text, file, "exec"), namespace)
    function = namespace.pop(name)
    weakref.finalize(function, linecache.cache.pop, file, None)
    return function
