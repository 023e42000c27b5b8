"""Functions of text that is in no file, as compilers read the source of what they compile."""

from __future__ import annotations

import itertools
import linecache
import types
import weakref
from collections.abc import Mapping
from typing import Any

__all__ = ["function_of_text"]

_numbers = itertools.count()


def function_of_text(name: str, text: str, names: Mapping[str, Any]) -> types.FunctionType:
    """The function of this name that the text defines, where these names are known; `inspect` finds the text."""
    file = f"<tristep {name} {next(_numbers)}>"
    linecache.cache[file] = len(text), None, text.splitlines(keepends=True), file
    known = dict(names)
    exec(compile(text, file, "exec"), known)
    function = known.pop(name)
    weakref.finalize(function, linecache.cache.pop, file, None)
    return function
