"""Parameter groups as in torch, and the hyper-parameters of a step, from their options and step counts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from itertools import compress, groupby
from operator import attrgetter, is_
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
import torch

from ...kernels import Rule, TensorRule, storage
from ...kernels.language import derivations
from ...kernels.layouts import is_wrapper
from ..optimizer.options import STATE_DTYPES, state_device
from ..optimizer.plan import Rows
from ..validation import choice, number
from . import shards

MASTER_KEY = "master"  # in a parameter's state
STORAGE = ("state_dtype", "state_device")  # options that a group has only if they were given
# A count stays in these types, as in torch; narrower ones, in which it would end below 2^24, become torch's default type.
_COUNTS = {torch.float32: np.float32, torch.float64: np.float64, torch.int32: np.int32, torch.int64: np.int64}
_data_ptr, _dim, _dtype, _layout = torch.Tensor.data_ptr, torch.Tensor.dim, attrgetter("dtype"), attrgetter("layout")
Group = dict[str, Any]
Numbers = MutableMapping[str, Any]


class GroupOptimizer(torch.optim.Optimizer):
    """The methods that a subclass of `FusedOptimizer` defines for its groups; `_rule` and `_hyper` are required."""

    _keys: ClassVar[Mapping[str, str]] = {}  # the key in `state[parameter]` of each state, by the rule's name of it
    _shown: ClassVar[tuple[str, ...]] = ("step",)  # the numbers that are tensors in `state[parameter]`
    _counts_exactly: ClassVar[bool] = False  # whether counts are float64; they end at 2^24 in float32, which torch has
    _takes_sparse: ClassVar[bool] = False
    _takes_complex: ClassVar[bool] = True
    _storage: Mapping[str, str | None] = MappingProxyType({})  # arguments of the constructor, of those in `STORAGE`
    _plan: Any = None  # the `Plans` of the next step; None: make new ones
    _number_arrays: Sequence[np.ndarray] = ()  # the memory of the optimizer's own tensors of `_shown`
    _is_copy = False  # whether `state` is new, copied or loaded, so that a user has no other views of its tensors
    _owners: dict[torch.Tensor, int] | None = None  # the ranks that update whole parameters
    _control: torch.Tensor | None = None  # float32 [2]: the factor of gradients, and whether the step is skipped

    def _rule(self, group: Group) -> Rule | TensorRule:
        """Return the update rule of a group with these options."""
        raise NotImplementedError

    def _hyper(self, group: Group, numbers: Numbers) -> Mapping[str, float]:
        """Return hyper-parameters by name, without `clip`, at step `numbers["step"]`; changes of `numbers` are kept."""
        raise NotImplementedError

    def _row(self, group: Group, numbers: Numbers, rule: Rule | TensorRule, rounds: bool) -> list[float]:
        """Return the factor of gradients, the hyper-parameters in the rule's order, and if `rounds`, which is stochastic
        rounding, the number of the step.
        """
        values = {"clip": math.inf, **self._hyper(group, numbers)}
        row = [1.0]
        for name, derived in derivations(rule.hyper):
            if derived is None or name in values:
                row.append(values[name])
            elif derived.counts:
                row.append(derived.compute(values[derived.source], int(numbers["step"])))
            else:
                row.append(derived.compute(values[derived.source]))
        if rounds:
            row.append(numbers["step"])
        return row

    def rows_by_id(self) -> dict[int, dict[str, Any]]:
        """Return the rows of `state` by the `id` of their parameters; a hash of a tensor is a call of Python."""
        return dict(zip(map(id, self.state), self.state.values(), strict=True))

    def _only_makes_states(self) -> bool:
        """Return whether the present step must only make states: torch.distributed.checkpoint takes one with rate 0 and
        zero gradients for that, which some rules cannot compute."""
        return False

    def _begin(self, group: Group) -> None:
        """Prepare a step of this group."""

    def _end(self, group: Group) -> None:
        """Finish a step of this group that succeeded."""

    def _initial_numbers(self, group: Group, parameters: Sequence[torch.Tensor]) -> Mapping[str, float | Sequence[float]]:
        """Return the numbers of a group's parameters before their first step, one for all or one for each.

        Numbers in `state` take precedence.
        """
        return {"step": 0.0}

    def _initialize_states(self, group: Group, weight: torch.Tensor, states: Mapping[str, torch.Tensor]) -> None:
        """Fill new states, which are zero, if the rule starts from other values."""

    def _starts_from_zeros(self, group: Group) -> bool:
        """Return whether `_initialize_states` does nothing."""
        return type(self)._initialize_states is GroupOptimizer._initialize_states

    def _narrow(self, group: Group) -> torch.dtype | None:
        """Return the storage dtype of states; None: the dtype of the arithmetic."""
        value = group.get("state_dtype")
        return None if value is None else STATE_DTYPES[choice("state_dtype", value, STATE_DTYPES)]

    def _on_host(self, group: Group) -> bool:
        """Return whether states of a GPU's weights are in memory of the host."""
        value = group.get("state_device")
        return value is not None and state_device("state_device", value) == "cpu"

    def _rounding(self, group: Group) -> int | storage.CodesOnly | None:
        """Return the seed of stochastic rounding, or None."""
        return storage.CodesOnly(0) if storage.is_packed(self._narrow(group)) else None

    def _master_dtype(self, group: Group, weight: torch.Tensor) -> torch.dtype | None:
        """Return the dtype of a weight's master, which is `state[parameter]["master"]`, or None."""
        return None

    def _from_torch(self, group: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
        """Return options to add to a group that torch has saved, and this optimizer's names of states by torch's names."""
        return {}, {}

    def _by_row(self, group: Group) -> bool:
        """Return whether a sparse gradient updates its rows only; otherwise it is made dense."""
        return True


class GroupRows(Rows):
    """The hyper-parameters of parameters in groups with one rule; the optimizer's `state` has the numbers of `_shown`."""

    def __init__(
        self,
        optimizer: GroupOptimizer,
        rule: Rule | TensorRule,
        parameters: Sequence[torch.Tensor],
        groups: Sequence[Group],
    ) -> None:
        super().__init__(len(groups), lambda: rule)
        self._optimizer, self._groups = optimizer, groups
        first: dict[str, list[float]] = {}
        for _, members in groupby(range(len(groups)), lambda i: id(groups[i])):
            at = list(members)
            numbers = optimizer._initial_numbers(groups[at[0]], [parameters[i] for i in at])
            for name, each in numbers.items():
                first.setdefault(name, []).extend([each] * len(at) if isinstance(each, float) else each)
        shown, self._rounds = optimizer._shown, optimizer._rounding(groups[0]) is not None
        if self._rounds:  # a saved step continues the sequence of random numbers after loading
            shown = (*shown, "step")
        self.tensors = {
            name: NumberTensors(optimizer, parameters, name, of_each, self._rounds)
            for name, of_each in first.items()
            if name in shown
        }
        # By name, one number for each parameter.
        self._numbers = {
            name: self.tensors[name].array if name in self.tensors else np.array(of_each) for name, of_each in first.items()
        }
        self._stepping: list[Group] = []  # the groups of `_sets`
        self._changes: list[tuple[Any, Numbers]] = []  # the numbers of parameters after the step

    def number_tensors(self) -> list[torch.Tensor]:
        """Return the tensors in `state` whose memory must stay while these rows are used."""
        return [tensor for shown in self.tensors.values() for tensor in shown.tensors]

    def form(self, rule: Any, number: int | None = None) -> list[tuple[Any, list[float]]]:
        optimizer = self._optimizer
        for shown in self.tensors.values():
            if shown.detached:
                shown.read()
        basis = [array.tobytes() for array in self._numbers.values()]
        if basis != self._basis:
            self._compare()
            self._basis = basis
        scale = getattr(optimizer, "grad_scale", None) if optimizer._control is None else None
        unscale = 1.0 if scale is None else 1.0 / float(scale)
        rows, self._changes = [], []
        try:
            for group in self._stepping:
                optimizer._begin(group)
            for where, first, group in self._sets:
                numbers = {name: array[first] for name, array in self._numbers.items()}
                numbers["step"] += 1
                row = optimizer._row(group, numbers, rule, self._rounds)
                if math.isnan(sum(row)) or row.count(math.inf) > 1:  # one inf is clip's
                    _check_numbers(optimizer, group)
                row[0] *= -unscale if group.get("maximize") else unscale
                rows.append((where, row))
                self._changes.append((slice(None) if where is None else where, numbers))
        except (TypeError, ValueError):
            for group in self._stepping:
                _check_numbers(optimizer, group)
            raise
        return rows

    def count(self) -> None:
        for where, numbers in self._changes:
            for name, array in self._numbers.items():
                array[where] = numbers[name]
        self._basis = [array.tobytes() for array in self._numbers.values()]
        for name, shown in self.tensors.items():
            if shown.detached:
                shown.write([where for where, _ in self._changes], name == "step")
        for group in self._stepping:
            self._optimizer._end(group)

    def _compare(self) -> None:
        """Find the sets of active parameters of one group with equal numbers."""
        places = np.flatnonzero(self.active).tolist()
        columns = [list(map(id, self._groups)), *(array.tolist() for array in self._numbers.values())]
        kinds = list(compress(zip(*columns, strict=True), self.active))
        self._share(kinds, lambda at: (places[at[0]], self._groups[places[at[0]]]))  # the first parameter, and its group
        self._stepping = list({id(group): group for _, _, group in self._sets}.values())


def _check_numbers(optimizer: GroupOptimizer, group: Group) -> None:
    """Raise if an option that must be a finite number is not: it may have been set between steps."""
    for name, default in optimizer.defaults.items():
        value = group.get(name)
        if isinstance(default, (tuple, list)):
            if not isinstance(value, (tuple, list)) or len(value) != len(default):
                raise TypeError(f"{name}={value!r} of a group: must be {len(default)} numbers, as in {default!r}")
            entries = [(f"{name}[{k}]", *pair) for k, pair in enumerate(zip(value, default, strict=True))]
        else:
            entries = [(name, value, default)]
        for entry_name, entry, default_entry in entries:
            if isinstance(default_entry, (int, float, torch.Tensor)) and not isinstance(default_entry, bool):
                number(f"{entry_name} of a group", entry)


class NumberTensors:
    """One number for each parameter, such as its step count, as tensors in `state` that users may replace or move.

    The optimizer's own tensors share a NumPy array, so that a step reads and writes all of them at once. A tensor that a
    user has put into `state`, or moved to other memory (`share_memory_`, `set_`, `.data`, a queue), is read and written
    separately; so is one of another type than the array's, where counts were saved in several.

    Args:
        name: the key in `state[parameter]`.
        first: for each parameter the number if its state has none yet.
        rounds: whether random numbers depend on the count, which then must not end at 2^24 as torch's do in float32.
    """

    def __init__(
        self,
        optimizer: GroupOptimizer,
        parameters: Sequence[torch.Tensor],
        name: str,
        first: Sequence[float],
        rounds: bool = False,
    ) -> None:
        rows_by_id = optimizer.rows_by_id()
        rows = [rows_by_id[id(each)] if id(each) in rows_by_id else optimizer.state[each] for each in parameters]
        tensors: list[Any] = [row.get(name) for row in rows]
        exact = name == "step" and (rounds or optimizer._counts_exactly)
        default = torch.float64 if exact or torch.get_default_dtype() == torch.float64 else torch.float32
        kept = _COUNTS if name == "step" else ()
        dtypes: list[Any] = [getattr(tensor, "dtype", None) for tensor in tensors]
        types = {kind: default if kind not in kept or (exact and kind == torch.float32) else kind for kind in set(dtypes)}
        dtype = np.result_type(*map(_COUNTS.__getitem__, types.values()))
        arrays = optimizer._number_arrays if len(types) == 1 else ()
        array = _array_with(tensors, [array for array in arrays if array.dtype == dtype])
        self.detached: list[int] = []  # the indices of tensors with memory of their own
        if array is not None:
            self.array, self.tensors = array, tensors
        else:
            values = [
                number if tensor is None or getattr(tensor, "is_meta", False) else float(tensor)
                for tensor, number in zip(tensors, first, strict=True)
            ]
            self.array = np.array(values, dtype=dtype)
            new = tensors_in(self.array)
            self.tensors = self._put(optimizer, name, rows, new, list(map(types.__getitem__, dtypes)))
            own_pointers = self.array.ctypes.data + self.array.itemsize * np.arange(len(self.array))
            self.detached = np.flatnonzero(own_pointers != list(map(_data_ptr, self.tensors))).tolist()
        optimizer._number_arrays = [*optimizer._number_arrays, self.array]

    @staticmethod
    def _put(
        optimizer: GroupOptimizer, name: str, rows: Sequence[Any], new: Sequence[torch.Tensor], dtypes: Sequence[torch.dtype]
    ) -> list[torch.Tensor]:
        """Put the optimizer's own tensors into rows of `state`, but for those that a user has put there; return all."""
        ranges = [(array.ctypes.data, array.ctypes.data + array.nbytes) for array in optimizer._number_arrays]
        for row, own_tensor, dtype in zip(rows, new, dtypes, strict=True):
            own_tensor = own_tensor if own_tensor.dtype == dtype else own_tensor.to(dtype)
            tensor = row.get(name)
            if not _is_writable(tensor):
                row[name] = own_tensor
            elif (optimizer._is_copy and not tensor.untyped_storage().is_shared()) or any(
                a <= tensor.data_ptr() < b for a, b in ranges
            ):
                tensor.data = own_tensor
        return [row[name] for row in rows]

    def read(self) -> None:
        """Read the numbers from tensors with memory of their own into `array`, [n]."""
        self.array[self.detached] = [self.tensors[i].item() for i in self.detached]

    def write(self, changed: Sequence[Any], counted: bool) -> None:
        """Write changed numbers to the tensors with memory of their own; `changed`: their indices in `array`.

        If `counted`, the change is + 1, which is added to the tensor: another process may add to it, too.
        """
        written = np.zeros(len(self.array), dtype=bool)
        for rows in changed:
            written[rows] = True
        places = [i for i in self.detached if written[i]]
        tensors = [self.tensors[i] for i in places]
        if counted and tensors:
            torch._foreach_add_(tensors, 1)
        elif tensors:
            torch._foreach_copy_(tensors, list(torch.from_numpy(self.array[places]).unbind()))


@torch.inference_mode(False)  # the tensors outlive the step
def tensors_in(array: np.ndarray) -> list[torch.Tensor]:
    """Return a tensor for each number in an array. Each has a storage of its own, so that it is pickled alone."""
    return [torch.from_numpy(array[i, ...]) for i in range(len(array))]


def _array_with(tensors: Sequence[Any], arrays: Sequence[np.ndarray]) -> np.ndarray | None:
    """Return the part of one of these arrays, of one dtype, whose elements are the tensors, in order; None without."""
    if not arrays or set(map(type, tensors)) != {torch.Tensor}:
        return None
    dtype = torch.from_numpy(arrays[0]).dtype
    if [*map(set, (map(_dtype, tensors), map(_dim, tensors), map(_layout, tensors)))] != [{dtype}, {0}, {torch.strided}]:
        return None
    pointers = np.array(list(map(_data_ptr, tensors)))
    for array in arrays:
        start = (int(pointers[0]) - array.ctypes.data) // array.itemsize
        part = array[start : start + len(tensors)] if start >= 0 else array[:0]
        if len(part) == len(tensors) and (pointers == part.ctypes.data + array.itemsize * np.arange(len(part))).all():
            return part
    return None


def copy_numbers(optimizer: GroupOptimizer, name: str, rows: Sequence[dict[str, Any]]) -> None:
    """Copy the tensors of this name in rows of `state`, into an array that steps can use if that is possible."""
    rows = [row for row in rows if isinstance(row.get(name), torch.Tensor)]
    tensors = [row[name].detach() for row in rows]
    if not all(map(_is_writable, tensors)) or {(t.dtype, t.dim()) for t in tensors} not in [{(kind, 0)} for kind in _COUNTS]:
        copies = [tensor.clone() for tensor in tensors]
    else:
        array = torch.stack(tensors).numpy()
        copies = tensors_in(array)
        optimizer._number_arrays = [*optimizer._number_arrays, array]
    for row, tensor in zip(rows, copies, strict=True):
        row[name] = tensor


def name_of(group: Group, k: int) -> str:
    return repr(group["param_names"][k]) if "param_names" in group else f"params[{k}]"


def names_of(group: Group) -> list[str]:
    if "param_names" in group:
        return list(map(repr, group["param_names"]))
    return [f"params[{k}]" for k in range(len(group["params"]))]


def is_evaluated(group: Group) -> bool:
    """Return whether a group's parameters have their averaged values, as after `eval()`; other libraries use this key."""
    return not group.get("train_mode", True)


def refuse_evaluated(what: str, groups: Iterable[Group]) -> None:
    """Raise if parameters have their averaged values; `what`, a method, needs the trained ones."""
    if any(map(is_evaluated, groups)):
        raise RuntimeError(
            f"{what} while parameters have their averaged values, after eval() or inside averaged_weights(): call train() "
            "of the optimizer, or leave the context, first"
        )


def held_master(
    optimizer: GroupOptimizer, group: Group, weight: torch.Tensor, row: Mapping[str, torch.Tensor]
) -> torch.Tensor | None:
    """Return the master in a weight's row of `state`, or this rank's shard of it; None if there is none that fits."""
    master = None if optimizer._master_dtype(group, weight) is None else row.get(MASTER_KEY)
    if master is None or storage.kind_of(weight.dtype, master.dtype) is None:
        return None
    return shards.local(master)


def same_objects(a: Sequence[Any], b: Sequence[Any]) -> bool:
    return len(a) == len(b) and all(map(is_, a, b))


def as_real(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor as rules take it: the shard of a DTensor, and a real view [..., 2] of a complex tensor."""
    tensor = shards.local(tensor)
    return torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor


def _is_writable(value: Any) -> bool:
    """Return whether a step can write its count to this value in `state`: a tensor of one element on the CPU."""
    return (
        isinstance(value, torch.Tensor)
        and not is_wrapper(value)
        and value.device.type == "cpu"
        and value.layout == torch.strided
        and value.numel() == 1
        and not value.is_inference()
    )
