"""Look at all tensors of a step in one compiled pass: gradients, versions, addresses and layouts, and objects in containers.

From Python a property of a tensor takes 50 ns, and lists and comparisons as long again. These loops, compiled by numba, call
CPython's stable ABI and DLPack's C exchange interface by their addresses. They return at the first tensor that they do not
expect; the passes in Python, which `guards` has anyway, then find out what it is.

Whatever a loop reads is alive: lists of the caller hold it, or the loop has a reference. It runs with the GIL.
"""

from __future__ import annotations

import ctypes
import sys
import sysconfig
from array import array
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import numba
import numpy as np
import torch
from llvmlite import ir
from numba.core import cgutils
from numba.extending import intrinsic

from .disk_cache import cached, compiling

# A loop gets a table of int64 numbers: addresses of C functions, of Python objects and of the next number, where there is
# room for what C functions write. The count of objects, and what is known of each, may follow.
_FUNCTIONS = (
    *("PyObject_GetAttr", "PyList_GetItem", "PyList_SetItem", "PyList_Size", "PyObject_CallNoArgs", "PyWeakref_NewRef"),
    *("PyObject_Type", "PyLong_AsLongLong", "Py_DecRef", "PyDict_Next"),
)
GET, ITEM, SET_ITEM, SIZE, CALL, REFER, TYPE, NUMBER, RELEASE, NEXT, DESCRIBE = range(11)
_OBJECTS = (None, True, *map(sys.intern, ("grad", "requires_grad", "_version")), torch.Tensor, torch.nn.Parameter)
NONE, TRUE, GRAD, REQUIRES_GRAD, VERSION, TENSOR, PARAMETER = range(11, 18)
ROOM, DATA, DEVICE, KIND, SIZES, STRIDES, OFFSET, COUNT, FIRST = range(18, 27)  # from DATA on the words of a DLTensor
RECORD, KEEP, COMPARE, COMPARE_PRESENT = range(4)
MOVED, OTHERS = 2, 4


def _calls(result: Any) -> Any:
    @intrinsic
    def call(typingctx, address, arguments):
        """Call the C function at this address with a tuple of int64 numbers; return its result, or 0 if it has none."""

        def codegen(context, builder, signature, args):
            values = cgutils.unpack_tuple(builder, args[1])
            function = ir.FunctionType(result, [value.type for value in values]).as_pointer()
            returned = builder.call(builder.inttoptr(args[0], function), values)
            int64 = ir.IntType(64)
            return ir.Constant(int64, 0) if isinstance(result, ir.VoidType) else builder.sext(returned, int64)

        return numba.types.int64(address, arguments), codegen

    return call


call_void, call_int, call_long = map(_calls, (ir.VoidType(), ir.IntType(32), ir.IntType(64)))


@intrinsic
def load(typingctx, address):
    def codegen(context, builder, signature, args):
        return builder.load(builder.inttoptr(args[0], ir.IntType(64).as_pointer()))

    return numba.types.int64(numba.types.int64), codegen


def _collect(table, parameters, gradients, used, versions_before, versions, n):
    """Fill a list with all gradients, and `versions`; return whether all parameters require grad and were written since."""
    for i in range(n):
        parameter = call_long(table[ITEM], (parameters, i))
        gradient = call_long(table[GET], (parameter, table[GRAD]))
        if gradient == 0:
            return 0
        call_int(table[SET_ITEM], (gradients, i, gradient))  # the list has the reference now
        if gradient == table[NONE]:
            return 0
        requires_grad = call_long(table[GET], (parameter, table[REQUIRES_GRAD]))
        if requires_grad == 0:
            return 0
        call_void(table[RELEASE], (requires_grad,))
        if requires_grad != table[TRUE]:
            return 0
        version = call_long(table[GET], (gradient, table[VERSION]))
        if version == 0:
            return 0
        versions[i] = call_long(table[NUMBER], (version,))
        call_void(table[RELEASE], (version,))
        if versions[i] == versions_before[i]:
            before = call_long(table[CALL], (call_long(table[ITEM], (used, i)),))
            if before == 0:
                return 0
            call_void(table[RELEASE], (before,))
            if before == gradient:
                return 0
    return 1


def _refer(table, tensors, references, n):
    """Put weak references to tensors into a list, where these are not None; return whether all can have one."""
    for i in range(n):
        tensor = call_long(table[ITEM], (tensors, i))
        if tensor != table[NONE]:
            reference = call_long(table[REFER], (tensor, 0))
            if reference == 0:
                return 0
            call_int(table[SET_ITEM], (references, i, reference))
    return 1


def _describe(table, tensors, before, how):
    """Record or compare the addresses and layouts of tensors in the table: all addresses, then all layouts.

    A layout is [device, dtype and number of dimensions, *sizes, *strides]. `before`: references to the first tensors of the
    last call. Return 0 if a layout is new, or one of these tensors is there again at another address. Otherwise add up 1,
    MOVED for new addresses, which are recorded, and OTHERS if some tensors are not those of `before`. KEEP allows no new
    address; COMPARE_PRESENT None, at address 0.
    """
    n, known, moved = table[COUNT], call_long(table[SIZE], (before,)), 0
    if call_long(table[SIZE], (tensors,)) != n:
        return 0
    others = OTHERS if known < n else 0
    at = FIRST + n
    for i in range(n):
        tensor, address = call_long(table[ITEM], (tensors, i)), 0
        if how == COMPARE_PRESENT and tensor == table[NONE]:
            at += 2 + 2 * (table[at + 1] & 0xFFFFFFFF)
        else:
            if tensor == 0:
                return 0
            kind = call_long(table[TYPE], (tensor,))
            call_void(table[RELEASE], (kind,))
            if kind != table[TENSOR] and kind != table[PARAMETER]:  # a subclass may be anything
                return 0
            if call_int(table[DESCRIBE], (tensor, table[ROOM])) != 0:
                return 0
            if how == RECORD:
                table[at], table[at + 1] = table[DEVICE], table[KIND]
            elif table[at] != table[DEVICE] or table[at + 1] != table[KIND]:
                return 0
            at += 2
            elements, dims = 1, table[KIND] & 0xFFFFFFFF
            for k in range(dims):
                size, stride = load(table[SIZES] + 8 * k), load(table[STRIDES] + 8 * k)
                elements *= size
                if how == RECORD:
                    table[at], table[at + dims] = size, stride
                elif table[at] != size or table[at + dims] != stride:
                    return 0
                at += 1
            at += dims
            address = table[DATA] + table[OFFSET]
            if address == 0 and elements != 0:
                return 0
        is_new = table[FIRST + i] != address
        if is_new and how == KEEP:
            return 0
        if i < known and (is_new or others == 0):
            tensor_before = call_long(table[CALL], (call_long(table[ITEM], (before, i)),))
            if tensor_before == 0:
                return 0
            call_void(table[RELEASE], (tensor_before,))
            if tensor_before != tensor:
                others = OTHERS
            elif is_new and tensor != table[NONE]:
                return 0
        if is_new:
            table[FIRST + i] = address
            moved = MOVED
    return 1 + moved + others


def _walk(table, containers, n_lists, n_containers, how):
    """Record or compare the items of lists, and then the values of dictionaries; return whether they are as before."""
    at, end = FIRST, FIRST + table[COUNT]
    for c in range(n_containers):
        container, k = call_long(table[ITEM], (containers, c)), 0
        table[DATA] = 0  # the place in a dictionary; its key and value come after it
        while True:
            if c < n_lists:
                if k >= call_long(table[SIZE], (container,)):
                    break
                member = call_long(table[ITEM], (container, k))
                k += 1
            else:
                room = table[ROOM]
                if call_int(table[NEXT], (container, room, room + 8, room + 16)) == 0:
                    break
                member = table[DATA + 2]
            if at == end or (how != RECORD and table[at] != member):
                return 0
            table[at] = member
            at += 1
    return at == end


_int64, _pointer = numba.types.int64, numba.types.CPointer(numba.types.int64)
_list: Any = ctypes.py_object
_NUMBA = {ctypes.c_void_p: _pointer, ctypes.c_int64: _int64, _list: _int64}


def _loop(function: Callable[..., Any], *kinds: Any) -> Callable[..., int]:
    """Compile a loop of a table and of arguments of these kinds; the callable raises what C functions in it raise."""
    kinds = ctypes.c_void_p, *kinds
    compiled = cached(numba.cfunc, _int64(*map(_NUMBA.__getitem__, kinds)), error_model="numpy")(function)
    loop = ctypes.PYFUNCTYPE(ctypes.c_int64, *kinds)(compiled.address)
    vars(loop)["compiled"] = compiled  # keeps the code
    return loop


def _address_of(thing: Any) -> int:
    return ctypes.c_void_p.from_buffer(ctypes.py_object(thing)).value or 0


def _describes() -> int:
    """Return the address of DLPack's function that describes a tensor and takes no reference to it."""
    if sysconfig.get_config_var("Py_GIL_DISABLED") or sys.byteorder != "little" or sys.maxsize < 2**32:
        raise ImportError("needs 64-bit CPython with a GIL")
    capsule = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    if capsule is None or torch.__version__ < "2.10":  # other packages give older versions an interface of theirs
        raise ImportError("needs DLPack's C exchange interface of torch 2.10")
    pointer_of = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)
    pointer = pointer_of(("PyCapsule_GetPointer", ctypes.pythonapi))(capsule, b"dlpack_exchange_api")
    # The version, an older interface, and five functions, of which this is the fourth.
    interface = (ctypes.c_int64 * 7).from_address(pointer)
    if interface[0] & 0xFFFFFFFF != 1 or not interface[5]:
        raise ImportError("needs DLPack's C exchange interface of version 1")
    return interface[5]


def _functions() -> list[int]:
    return [ctypes.cast(getattr(ctypes.pythonapi, name), ctypes.c_void_p).value or 0 for name in _FUNCTIONS]


_START = [*_functions(), _describes(), *map(_address_of, _OBJECTS)]


def _table(*numbers: int, room: int = 0) -> np.ndarray:
    """Return a table with these numbers after its beginning, and zeros after them."""
    table = np.zeros(COUNT + len(numbers) + room, dtype=np.int64)
    table[: len(_START)] = _START
    table[ROOM] = table.ctypes.data + DATA * table.itemsize
    table[COUNT : COUNT + len(numbers)] = numbers
    return table


_NOTHING: list[Any] = []
_plain_table = _table()
_plain = _plain_table.ctypes.data
with compiling():
    _run_collect = _loop(_collect, _list, _list, _list, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)
    _run_refer = _loop(_refer, _list, _list, ctypes.c_int64)
    _run_describe = _loop(_describe, _list, _list, ctypes.c_int64)
    _run_walk = _loop(_walk, _list, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)


def written_gradients(
    parameters: list[torch.Tensor], used: list[Callable[[], Any]], versions_before: Sequence[int]
) -> tuple[list[Any], Sequence[int]] | None:
    """As `GradGuard.collect_written`, given what it has noted; None also if a property of a tensor raises."""
    n = len(parameters)
    if not isinstance(versions_before, array):
        versions_before = array("q", versions_before)
    gradients, versions = [None] * n, array("q", bytes(8 * n))
    places = versions_before.buffer_info()[0], versions.buffer_info()[0]
    try:
        written = _run_collect(_plain, parameters, gradients, used, *places, n)
    except Exception:  # any kind, as torch's
        return None
    return (gradients, versions) if written else None


def references_to(tensors: Sequence[Any], missing: Callable[[], None]) -> list[Callable[[], Any]]:
    """Return weak references to tensors, and `missing` in place of None."""
    references = [missing] * len(tensors)
    _run_refer(_plain, list(tensors), references, len(tensors))
    return references


class Layouts:
    """The dtypes, devices, sizes, strides and addresses of plain tensors, to recognize others like them. It holds no tensor.

    Raises:
        ValueError: a tensor is sparse, of a subclass, without memory or otherwise special.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        n = len(tensors)
        self._n, self._table = n, _table(n, room=sum(3 + 2 * tensor.dim() for tensor in tensors))
        self._at, self._now = self._table.ctypes.data, self._table[FIRST : FIRST + n]
        try:
            plain = _run_describe(self._at, list(tensors), _NOTHING, RECORD)
        except Exception:
            plain = 0
        if not plain:
            raise ValueError("a tensor is special")
        self._addresses = self._now.copy()

    def addresses(
        self, tensors: Sequence[Any], some: bool = False, before: Sequence[Callable[[], Any]] = ()
    ) -> tuple[np.ndarray, bool] | None:
        """Return the addresses of tensors, int64 [n], the same array while they stay, and whether the tensors are the same.

        `some`: None may stand for a tensor, with the address 0. `before`: references to the tensors of the last call. The
        result is None if a layout differs, or one of these tensors is there again at another address.
        """
        if type(tensors) is not list or type(before) is not list:
            tensors, before = list(tensors), list(before)
        try:
            found = _run_describe(self._at, tensors, before, COMPARE_PRESENT if some else COMPARE)
        except Exception:  # any kind, as torch's
            found = 0
        if not found:
            self._now[:] = self._addresses  # some have been overwritten
            return None
        if found & MOVED:
            self._addresses = self._now.copy()
        return self._addresses, not found & OTHERS

    def are_in_place(self, tensors: Sequence[Any]) -> bool:
        """Return whether these tensors have the layouts and addresses of those that were recorded."""
        try:
            return _run_describe(self._at, tensors if type(tensors) is list else list(tensors), _NOTHING, KEEP) != 0
        except Exception:  # any kind, as torch's
            return False


class Members:
    """The items of lists, and the values of dictionaries, to see whether they are the same objects again. They stay alive.

    Raises:
        ValueError: a container is neither a list nor a dictionary.
    """

    def __init__(self, lists: Sequence[list[Any]], dicts: Sequence[dict[Any, Any]]) -> None:
        self._containers, self._n_lists = [*lists, *dicts], len(lists)
        self._objects = [*chain.from_iterable(lists), *chain.from_iterable(each.values() for each in dicts)]
        self._table = _table(len(self._objects), room=len(self._objects))
        self._at = self._table.ctypes.data
        if not self._walk(RECORD):
            raise ValueError("a container is special")

    def are_same(self) -> bool:
        return self._walk(KEEP)

    def _walk(self, how: int) -> bool:
        try:
            return bool(_run_walk(self._at, self._containers, self._n_lists, len(self._containers), how))
        except SystemError:  # no list
            return False
