"""The text of functions: when it is read, and functions of text that is in no file, as compilers read the source."""

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
_written: dict[str, float | None] = {}  # when, of the files of this package that define functions


def _time_of(file: str) -> float | None:
    return os.stat(file).st_mtime if os.path.isfile(file) else None  # None in an archive


class OfText:
    """What has attributes that are read in the text of a function, `fn`, and checked there.

    That is done where the function is defined. Only functions in files of this package, whose tests check them, are read
    once such an attribute is asked for: a program uses few of them.
    """

    fn: Any  # a types.FunctionType; typed so, it would be taken for a method
    _read = False

    def read(self) -> None:
        """Set the attributes. Two threads may do so at once."""
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

    if not TYPE_CHECKING:  # type checkers would take any name for an attribute

        def __getattr__(self, name: str) -> Any:
            if "fn" in vars(self) and not self._read:
                self._read_late()
            return object.__getattribute__(self, name)


def function_of_text(name: str, text: str, names: Mapping[str, Any]) -> types.FunctionType:
    """The function of this name that the text defines, where these names are known; `inspect` finds the text."""
    file = f"<tristep {name} {next(_numbers)}>"
    linecache.cache[file] = len(text), None, text.splitlines(keepends=True), file
    known = dict(names)
    exec(compile(text, file, "exec"), known)
    function = known.pop(name)
    weakref.finalize(function, linecache.cache.pop, file, None)
    return function
