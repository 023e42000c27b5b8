"""Reading the pickles that MXNet writes without running them: an interpreter of the few opcodes that they need.

It builds None, numbers, strings, bytes (as text in Latin-1 in old protocols), tuples, lists, dicts, and `Record`s for
objects of the classes listed below, which it neither imports nor calls. Whatever else a pickle asks for is an error.
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
    """An object that was pickled.

    Attributes:
        module, name: of its class.
        attributes: by name.
    """

    module: str
    name: str
    attributes: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class _Global:
    module: str
    name: str


class _Mark:
    """Where a list, tuple or dict begins on the stack."""


_CONTAINERS = (Record, dict, list, tuple)


def read_pickle(file: IO[bytes]) -> Any:
    """What a pickle of MXNet's describes.

    Takes memory in proportion to the file: what it refers to several times is there once. Reading, copying or printing the
    result takes time in proportion to it, too: there are no cycles, and no nesting by which it would be far larger if each
    reference were a copy.

    Raises:
        ValueError: it asks for anything but the above, or is damaged.
        IndexError, KeyError, TypeError: it is no pickle that Python would write.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of escape sequences that Python does not write
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
    """Refuse a cycle, deep nesting, and what would be larger than `most` values if each reference were a copy."""
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
    known = (module, name) in ARRAYS | _BYTES | _NEW | _OBJECT or (
        isinstance(name, str) and name.isidentifier() and module in {folder[:-1] for folder in _FOLDERS}
    )
    if not known:
        raise ValueError(
            f"it refers to {module}.{name}: only arrays, optimizers and schedules of MXNet itself are read. For another "
            "optimizer or schedule, save the states alone in MXNet, with updater.get_states(dump_optimizer=False)"
        )
    return _Global(module, name)


def _to_mark(stack: list[Any]) -> list[Any]:
    """Take what is above the last mark from the stack, and the mark."""
    for place in range(len(stack) - 1, -1, -1):
        if stack[place] is _Mark:
            found = stack[place + 1 :]
            del stack[place:]
            return found
    raise ValueError("a mark is missing")


def _fill(into: Any, pairs: list[Any]) -> None:
    if type(into) is not dict or len(pairs) % 2:
        raise ValueError("items are set in what is no dict")
    for key, value in zip(pairs[::2], pairs[1::2], strict=True):
        if not isinstance(key, (str, int)):
            raise ValueError(f"a dict has a key of type {type(key).__name__}")
        into[key] = value


def _extend(into: Any, items: list[Any]) -> None:
    if type(into) is not list:
        raise ValueError("items are added to what is no list")
    into.extend(items)


def _take(stack: list[Any], n: int) -> list[Any]:
    found = stack[len(stack) - n :] if 0 <= n <= len(stack) else None
    if found is None or _Mark in found:
        raise ValueError("too little is on the stack")
    del stack[len(stack) - n :]
    return found


def _tuple(n: int) -> Callable[[list[Any]], None]:
    return lambda stack: stack.append(tuple(_take(stack, n)))


def _setitems(stack: list[Any]) -> None:
    items = _to_mark(stack)
    _fill(stack[-1], items)


def _setitem(stack: list[Any]) -> None:
    items = _take(stack, 2)
    _fill(stack[-1], items)


def _appends(stack: list[Any]) -> None:
    items = _to_mark(stack)
    _extend(stack[-1], items)


def _append(stack: list[Any]) -> None:
    items = _take(stack, 1)
    _extend(stack[-1], items)


def _dict(stack: list[Any]) -> None:
    made: dict[Any, Any] = {}
    _fill(made, _to_mark(stack))
    stack.append(made)


def _stack_global(stack: list[Any]) -> None:
    stack.append(_global(*_take(stack, 2)))


def _reduce(stack: list[Any]) -> None:
    function, arguments = _take(stack, 2)
    made: Any = None
    if isinstance(function, _Global) and type(arguments) is tuple:
        key = (function.module, function.name)
        if key in _BYTES:
            made = _bytes(*arguments)
        elif key in ARRAYS and arguments == (None,):
            made = Record(*key)
        elif key in _NEW and len(arguments) == 3 and isinstance(arguments[0], _Global):
            made = _record(arguments[0])
    if made is None:
        raise ValueError("it calls what no file of MXNet calls")
    stack.append(made)


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
    """Bytes, or the text of which protocols < 3 make them: encoded here, it could fill memory many times."""
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
    "TUPLE1": _tuple(1),
    "TUPLE2": _tuple(2),
    "TUPLE3": _tuple(3),
    "SETITEM": _setitem,
    "SETITEMS": _setitems,
    "APPEND": _append,
    "APPENDS": _appends,
    "STACK_GLOBAL": _stack_global,
    "REDUCE": _reduce,
    "NEWOBJ": _newobj,
    "BUILD": _build,
}
