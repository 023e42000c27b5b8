"""Safe reader of the pickles that MXNet writes: an interpreter of the few opcodes that they need.

It builds None, numbers, strings, bytes (as text in Latin-1 in old protocols), tuples, lists, dicts, and `Record`s in place
of objects of the classes listed below, which it neither imports nor calls. All other contents of a pickle are an error.
"""

from __future__ import annotations

import pickletools
import warnings
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import IO, Any

ARRAYS = {
    ("mxnet.ndarray.ndarray", "NDArray"),
    ("mxnet.ndarray.sparse", "RowSparseNDArray"),
    ("mxnet.ndarray.sparse", "CSRNDArray"),
    ("mxnet.numpy.multiarray", "ndarray"),
}
_FOLDERS = ("mxnet.optimizer.optimizer.", "mxnet.optimizer.", "mxnet.lr_scheduler.")  # of classes with plain attributes
_BYTES = {("builtins", "bytearray"), ("__builtin__", "bytearray"), ("_codecs", "encode")}  # what protocols < 5 make bytes by
_NEW = {("copyreg", "_reconstructor"), ("copy_reg", "_reconstructor")}  # what protocols < 2 make objects by
_OBJECT = {("builtins", "object"), ("__builtin__", "object")}
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_LITERALS = {
    *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"),
    *("STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"),
    *("BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8"),
}
_SHARED, _DEEPEST = 16, 100  # values for each opcode, where references are copies; levels of nesting


@dataclass(eq=False)
class Record:
    """A pickled object.

    Attributes:
        module: the module of its class.
        name: the name of its class.
        attributes: its attributes by name.
    """

    module: str
    name: str
    attributes: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class _Global:
    module: str
    name: str


class _Mark:
    """Marks on the stack where the items of a list, tuple or dict begin."""


_CONTAINERS = (Record, dict, list, tuple)


def read_pickle(file: IO[bytes]) -> Any:
    """Read a pickle that MXNet wrote, without importing or running anything.

    Memory use is proportional to the size of the file. So is the time to read, copy or print the result: it has no cycles,
    and no nesting that would make it much larger if each reference were a copy.

    Args:
        file: the file, opened in binary mode.

    Returns:
        The contents, with a `Record` in place of each object.

    Raises:
        ValueError: the pickle has something that no file of MXNet has, or is damaged.
        IndexError, KeyError, TypeError: Python would not write such a pickle.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of invalid escape sequences, which Python does not write
        return _interpreted(file)


def _interpreted(file: IO[bytes]) -> Any:
    stack: list[Any] = []
    memo: dict[int, Any] = {}
    argument: Any
    for count, (opcode, argument, _) in enumerate(pickletools.genops(file), 1):
        name = opcode.name
        if name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name in _LITERALS:
            stack.append(bytes(argument) if isinstance(argument, bytearray) else argument)
        elif name in ("GET", "BINGET", "LONG_BINGET"):
            stack.append(memo[argument])
        elif name in ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"):
            memo[len(memo) if name == "MEMOIZE" else argument] = stack[-1]
        elif name in _ACTIONS:
            _ACTIONS[name](stack)
        elif name == "GLOBAL":
            stack.append(_global(*argument.split(" ", 1)))
        elif name == "STOP":
            (result,) = stack
            _check_extent(result, _SHARED * count)
            return result
        elif name not in ("PROTO", "FRAME"):
            raise ValueError(f"it has the opcode {name}, which no file of MXNet has")
    raise ValueError("it has no end")


def _check_extent(result: Any, most: int) -> None:
    """Raise ValueError for a cycle, deep nesting, or more than `most` values if each reference were a copy."""
    extents: dict[int, tuple[int, int]] = {}  # of containers by id: how many values, and how deep
    entered: set[int] = set()
    path = [result]
    while path:
        container = path[-1]
        items = [item for item in _items(container) if type(item) in _CONTAINERS]
        if id(container) not in entered:
            entered.add(id(container))
            path += (new := [item for item in items if id(item) not in extents])
            if any(id(item) in entered for item in new):
                raise ValueError("it has something that contains itself, as no file of MXNet has")
        else:
            path.pop()
            inner = [extents[id(item)] for item in items]
            size = 1 + len(_items(container)) + sum(size for size, _ in inner)
            depth = 1 + max((depth for _, depth in inner), default=0)
            if size > most or depth > _DEEPEST:
                raise ValueError(f"it nests {size} values {depth} deep, more than any file of MXNet of its size")
            extents[id(container)] = size, depth


def _items(value: Any) -> Collection[Any]:
    if isinstance(value, Record):
        value = value.attributes
    return value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()


def _global(module: Any, name: Any) -> _Global:
    allowed = (module, name) in ARRAYS | _BYTES | _NEW | _OBJECT or (
        isinstance(name, str) and name.isidentifier() and module in {folder[:-1] for folder in _FOLDERS}
    )
    if not allowed:
        raise ValueError(
            f"it refers to {module}.{name}: only arrays, optimizers and schedules of MXNet itself are read. For another "
            "optimizer or schedule, save the states alone in MXNet, with updater.get_states(dump_optimizer=False)"
        )
    return _Global(module, name)


def _to_mark(stack: list[Any]) -> list[Any]:
    """Remove the items above the last mark, and the mark, from the stack, and return the items."""
    for place in range(len(stack) - 1, -1, -1):
        if stack[place] is _Mark:
            items = stack[place + 1 :]
            del stack[place:]
            return items
    raise ValueError("a mark is missing")


def _take(stack: list[Any], n: int) -> list[Any]:
    """Remove the last n items from the stack, and return them."""
    items = stack[len(stack) - n :] if 0 <= n <= len(stack) else None
    if items is None or _Mark in items:
        raise ValueError("too little is on the stack")
    del stack[len(stack) - n :]
    return items


def _set_items(stack: list[Any], pairs: list[Any]) -> None:
    target = stack[-1]
    if type(target) is not dict or len(pairs) % 2:
        raise ValueError("items are set in what is no dict")
    for key, value in zip(pairs[::2], pairs[1::2], strict=True):
        if not isinstance(key, (str, int)):
            raise ValueError(f"a dict has a key of type {type(key).__name__}")
        target[key] = value


def _extend(stack: list[Any], items: list[Any]) -> None:
    if type(stack[-1]) is not list:
        raise ValueError("items are added to what is no list")
    stack[-1].extend(items)


def _dict(stack: list[Any]) -> None:
    pairs = _to_mark(stack)
    stack.append({})
    _set_items(stack, pairs)


def _reduce(stack: list[Any]) -> None:
    function, arguments = _take(stack, 2)
    result: Any = None
    if isinstance(function, _Global) and type(arguments) is tuple:
        key = (function.module, function.name)
        if key in _BYTES:
            result = _bytes(*arguments)
        elif key in ARRAYS and arguments == (None,):
            result = Record(*key)
        elif key in _NEW and len(arguments) == 3 and isinstance(arguments[0], _Global):
            result = _record(arguments[0])
    if result is None:
        raise ValueError("it calls what no file of MXNet calls")
    stack.append(result)


def _newobj(stack: list[Any]) -> None:
    klass, arguments = _take(stack, 2)
    if not isinstance(klass, _Global) or arguments != ():
        raise ValueError("it makes an object of what is no class")
    stack.append(_record(klass))


def _record(klass: _Global) -> Record:
    if not f"{klass.module}.".startswith(_FOLDERS):
        raise ValueError(f"it makes an object of {klass.module}.{klass.name}")
    return Record(klass.module, klass.name)


def _bytes(data: Any = b"", encoding: Any = None) -> bytes | str:
    """Return pickled bytes: as text for protocols < 3, since encoding it here could fill memory many times."""
    if isinstance(data, (bytes, str)) and encoding in (None, "latin1", "latin-1"):
        return data
    raise ValueError("it makes bytes of something else")


def _build(stack: list[Any]) -> None:
    (state,) = _take(stack, 1)
    record = stack[-1]
    if not isinstance(record, Record) or record.attributes or type(state) is not dict:
        raise ValueError("it sets attributes of what has none")
    record.attributes = state


_ACTIONS: dict[str, Callable[[list[Any]], None]] = {
    "MARK": lambda stack: stack.append(_Mark),
    "EMPTY_DICT": lambda stack: stack.append({}),
    "EMPTY_LIST": lambda stack: stack.append([]),
    "DICT": _dict,
    "LIST": lambda stack: stack.append(_to_mark(stack)),
    "TUPLE": lambda stack: stack.append(tuple(_to_mark(stack))),
    "TUPLE1": lambda stack: stack.append(tuple(_take(stack, 1))),
    "TUPLE2": lambda stack: stack.append(tuple(_take(stack, 2))),
    "TUPLE3": lambda stack: stack.append(tuple(_take(stack, 3))),
    "SETITEM": lambda stack: _set_items(stack, _take(stack, 2)),
    "SETITEMS": lambda stack: _set_items(stack, _to_mark(stack)),
    "APPEND": lambda stack: _extend(stack, _take(stack, 1)),
    "APPENDS": lambda stack: _extend(stack, _to_mark(stack)),
    "STACK_GLOBAL": lambda stack: stack.append(_global(*_take(stack, 2))),
    "REDUCE": _reduce,
    "NEWOBJ": _newobj,
    "BUILD": _build,
}
