"""Parameter groups as torch has them, and the hyper-parameters of a step that their options and their counts make."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from operator import is_
from typing import Any, ClassVar

import numpy as np
import torch

from ...kernels import Rule, TensorRule, Update, storage
from ...kernels.language import derivations
from ...kernels.layouts import is_wrapper
from ..optimizer.options import STATE_DTYPES
from ..optimizer.plan import Rows, equal_places
from ..validation import choice, number
from . import shards

MASTER_KEYS = ("master", "compensation")  # in a parameter's state; the second is Kahan's
_data_ptr = torch.Tensor.data_ptr
Group = dict[str, Any]
Numbers = MutableMapping[str, Any]


class GroupOptimizer(torch.optim.Optimizer):
    """What a subclass of `FusedOptimizer` says of its groups, by methods; see there."""

    _keys: ClassVar[Mapping[str, str]] = {}  # by the rule's name of a state its key in `state[parameter]`
    _shown: ClassVar[tuple[str, ...]] = ("step",)  # the numbers that are tensors in `state[parameter]`
    _takes_sparse: ClassVar[bool] = False
    _takes_complex: ClassVar[bool] = True
    _state_dtype: str | None = None  # given to the constructor
    _plan: Any = None  # how its parameters are stepped, as long as that is known
    _number_arrays: Sequence[np.ndarray] = ()  # in which the optimizer's own tensors of `_shown` are
    _is_copy = False  # whether `state` is new, copied or loaded, so that nobody has other views of its tensors
    _owners: dict[torch.Tensor, int] | None = None  # the ranks that parameters belong to as wholes
    _control: torch.Tensor | None = None  # float32 [2], what gradients are multiplied by, and whether a step is skipped

    def _rule(self, group: Group) -> Rule | TensorRule:
        """The rule for a group with these options."""
        raise NotImplementedError

    def _hyper(self, group: Group, numbers: Numbers) -> Mapping[str, float]:
        """The rule's hyper-parameters by name, without `clip`, at a step whose number is `numbers["step"]`.

        Numbers that it changes are kept for the next step.
        """
        raise NotImplementedError

    def _row(self, group: Group, numbers: Numbers, rule: Rule | TensorRule, rounds: bool) -> list[float]:
        """What gradients are multiplied by, the hyper-parameters in the order of the group's rule, and the step where it
        rounds at random.
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

    def _only_makes_states(self) -> bool:
        """Whether a step with a rate of 0 and zeros for gradients, as torch.distributed.checkpoint takes it to have states,
        must not run."""
        return False

    def _begin(self, group: Group) -> None:
        """Called before a step for each group that takes part in it."""

    def _end(self, group: Group) -> None:
        """Called for these groups after a step that went well."""

    def _counted(self, group: Group) -> bool:
        """Whether the step counts as one."""
        return True

    def _first_numbers(self, group: Group, parameter: torch.Tensor, state: Mapping[str, Any]) -> dict[str, float]:
        """The numbers of a parameter before its first step; those that are in `state` already replace them."""
        return {"step": 0.0}

    def _first_states(self, group: Group, weight: torch.Tensor, states: Mapping[str, torch.Tensor]) -> None:
        """Fill states, which are zero, where a rule starts otherwise; those that a parameter has already replace them."""

    def _narrow(self, group: Group) -> torch.dtype | None:
        """The type that states are stored in where that is not the arithmetic's."""
        value = group.get("state_dtype")
        return None if value is None else STATE_DTYPES[choice("state_dtype", value, STATE_DTYPES)]

    def _rounding(self, group: Group) -> int | storage.CodesOnly | None:
        """The seed of stochastic rounding, if there is any."""
        return storage.CodesOnly(0) if storage.is_packed(self._narrow(group)) else None

    def _master_dtype(self, group: Group, weight: torch.Tensor) -> torch.dtype | None:
        """The type of a weight's master, if it has one: `state[parameter]["master"]`, or of Kahan's "compensation"."""
        return None

    def _from_torch(self, group: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
        """Options of a saved group of torch's, and names of states, that this optimizer has by other names."""
        return {}, {}

    def _by_row(self, group: Group) -> bool:
        """Whether a sparse gradient updates its rows only; otherwise it is made dense."""
        return True


class GroupRows(Rows):
    """The rows of parameters of some groups.

    Args:
        optimizer: whose parameters they are. Those of its numbers that are shown stand in its `state`.
        rule: the rule of all these groups.
        parameters: in order.
        groups: for each parameter the one that it is in.
    """

    def __init__(
        self,
        optimizer: GroupOptimizer,
        rule: Rule | TensorRule,
        parameters: Sequence[torch.Tensor],
        groups: Sequence[Group],
    ) -> None:
        self._optimizer, self._rule, self._groups = optimizer, rule, groups
        first = [
            optimizer._first_numbers(group, parameter, optimizer.state.get(parameter, {}))
            for group, parameter in zip(groups, parameters, strict=True)
        ]
        shown, self._rounds = optimizer._shown, optimizer._rounding(groups[0]) is not None
        if self._rounds:  # random numbers go on where they were after a load
            shown = (*shown, "step")
        self.tensors = {
            name: NumberTensors(optimizer, parameters, name, [numbers[name] for numbers in first])
            for name in first[0]
            if name in shown
        }
        # By name one for each parameter.
        self._numbers = {
            name: self.tensors[name].array if name in self.tensors else np.array([numbers[name] for numbers in first])
            for name in first[0]
        }
        self.active = [True] * len(groups)
        # Rows of equal hyper-parameters, the first of them, and its group; and the numbers by which these were found.
        self._shared: list[tuple[Any, int, Group]] = []
        self._shared_by: list[bytes] = []
        self._changes: list[tuple[Any, dict[str, Any]]] = []  # new numbers of these rows, after the step
        self._stepping: list[Group] = []

    def rule(self) -> Rule | TensorRule:
        return self._rule

    def forget(self) -> None:
        self._shared = []

    def write(self, update: Update, number: int | None = None) -> bool:
        optimizer = self._optimizer
        for shown in self.tensors.values():
            shown.read()
        if not self._shared or self._shared_by != [array.tobytes() for array in self._numbers.values()]:
            self._share()
        scale = getattr(optimizer, "grad_scale", None) if optimizer._control is None else None
        unscale = 1.0 if scale is None else 1.0 / float(scale)
        self._changes = []
        try:
            for group in self._stepping:
                optimizer._begin(group)
            for rows, first, group in self._shared:
                numbers = {name: array[first] for name, array in self._numbers.items()}
                numbers["step"] += 1
                row = optimizer._row(group, numbers, self._rule, self._rounds)
                if math.isnan(sum(row)) or row.count(math.inf) > 1:  # of clip
                    _check_numbers(optimizer, group)
                row[0] *= -unscale if group.get("maximize") else unscale
                if rows is None:
                    update.broadcast_hyper(row)
                else:
                    update.hyper[rows] = row
                if optimizer._counted(group):
                    self._changes.append((slice(None) if rows is None else rows, numbers))
        except (TypeError, ValueError):
            for group in self._stepping:
                _check_numbers(optimizer, group)
            raise
        return True  # without gradients, too: other ranks may wait for this one's share of a sum

    def count(self) -> None:
        for rows, numbers in self._changes:
            for name, array in self._numbers.items():
                array[rows] = numbers[name]
        self._shared_by = [array.tobytes() for array in self._numbers.values()]
        for name, shown in self.tensors.items():
            if shown.apart:
                shown.write([rows for rows, _ in self._changes], name == "step")
        for group in self._stepping:
            self._optimizer._end(group)

    def _share(self) -> None:
        """Find the parameters that share hyper-parameters: those of one group and of equal numbers."""
        arrays = self._numbers.values()
        places = np.flatnonzero(self.active)
        columns = [[id(self._groups[i]) for i in places.tolist()], *(array[places].tolist() for array in arrays)]
        members = [places[rows] for rows in equal_places(list(zip(*columns, strict=True)))]
        whole = len(members) == 1 and len(places) == len(self.active)
        self._shared = [(None if whole else rows, int(rows[0]), self._groups[rows[0]]) for rows in members]
        self._stepping = list({id(group): group for _, _, group in self._shared}.values())


def _check_numbers(optimizer: GroupOptimizer, group: Group) -> None:
    """Refuse numbers of a group that are none, as they may have been set between steps.

    Raises:
        TypeError, ValueError: there are such.
    """
    for name, default in optimizer.defaults.items():
        value = group.get(name)
        if isinstance(default, (tuple, list)):
            if not isinstance(value, (tuple, list)) or len(value) != len(default):
                raise TypeError(f"{name}={value!r} of a group: must be {len(default)} numbers, as in {default!r}")
            pairs = [(f"{name}[{k}]", each, was) for k, (each, was) in enumerate(zip(value, default, strict=True))]
        else:
            pairs = [(name, value, default)]
        for called, each, was in pairs:
            if isinstance(was, (int, float, torch.Tensor)) and not isinstance(was, bool):
                number(f"{called} of a group", each)


class NumberTensors:
    """One number of each parameter. The tensors in `state` are the truth, whoever made them and wherever they are moved.

    The optimizer's own tensors share an array, which NumPy owns, so a step reads and writes all of them at once. A tensor
    that the user put in, or moved to other memory (`share_memory_`, `set_`, `.data`, a queue), is read and written alone.

    Args:
        optimizer: has the parameters.
        parameters: in order.
        name: the key in `state[parameter]`.
        first: the number of each parameter that has none in its state yet.

    Attributes:
        array: [n], the numbers after `read`.
        apart: places of the tensors that have memory of their own, which `write` is for.
    """

    def __init__(
        self, optimizer: GroupOptimizer, parameters: Sequence[torch.Tensor], name: str, first: Sequence[float]
    ) -> None:
        rows = [optimizer.state[parameter] for parameter in parameters]
        values = [
            number if row.get(name) is None or getattr(row[name], "is_meta", False) else float(row[name])
            for row, number in zip(rows, first, strict=True)
        ]
        ranges = [(array.ctypes.data, array.ctypes.data + array.nbytes) for array in optimizer._number_arrays]
        dtype = np.float64 if torch.get_default_dtype() == torch.float64 else np.float32
        self.array: np.ndarray = np.array(values, dtype=dtype)
        optimizer._number_arrays = [*optimizer._number_arrays, self.array]
        with torch.inference_mode(False):  # they outlive the step
            # Each has a storage of its own, so that it is pickled without the others.
            new = [torch.from_numpy(self.array[i : i + 1].reshape(())) for i in range(len(values))]
        self._own_pointers = self._pointers = list(map(_data_ptr, new))
        for row, own in zip(rows, new, strict=True):
            tensor = row.get(name)
            if not _is_writable(tensor):
                row[name] = own
            elif (optimizer._is_copy and not tensor.is_shared()) or any(a <= tensor.data_ptr() < b for a, b in ranges):
                tensor.data = own
        self._tensors: list[torch.Tensor] = [row[name] for row in rows]
        self.apart: list[int] = []

    def read(self) -> None:
        """Take the numbers from the tensors."""
        pointers = list(map(_data_ptr, self._tensors))
        if pointers != self._pointers:
            self._pointers = pointers
            self.apart = [i for i, own in enumerate(self._own_pointers) if pointers[i] != own]
        if self.apart:
            self.array[self.apart] = [self._tensors[i].item() for i in self.apart]

    def write(self, changed: Sequence[Any], counted: bool) -> None:
        """Write the numbers to the tensors.

        Args:
            changed: indices of `array` that have changed.
            counted: each has grown by 1, which is added to what a tensor has: another process may count in it, too.
        """
        written = np.zeros(len(self.array), dtype=bool)
        for rows in changed:
            written[rows] = True
        places = [i for i in self.apart if written[i]]
        tensors = [self._tensors[i] for i in places]
        if counted and tensors:
            torch._foreach_add_(tensors, 1)
        elif tensors:
            torch._foreach_copy_(tensors, list(torch.from_numpy(self.array[places]).unbind()))


def name_of(group: Group, k: int) -> str:
    """What messages call a group's parameter."""
    return repr(group["param_names"][k]) if "param_names" in group else f"params[{k}]"


def is_evaluated(group: Group) -> bool:
    """Whether its parameters have their averaged values, as between `eval()` and `train()`; libraries share the key."""
    return not group.get("train_mode", True)


def refuse_evaluated(what: str, groups: Iterable[Group]) -> None:
    """Refuse what needs the parameters as they are trained."""
    if any(map(is_evaluated, groups)):
        raise RuntimeError(
            f"{what} where parameters have their averaged values, after eval() or inside averaged_weights(): call train() "
            "of the optimizer, or leave the context, first"
        )


def master_key(weight: torch.Tensor, dtype: torch.dtype) -> tuple[str, str]:
    """The key in a parameter's state of a master of this type, and the key of the other kind of master."""
    master, compensation = MASTER_KEYS
    return (compensation, master) if dtype == weight.dtype else (master, compensation)


def same_objects(a: Sequence[Any], b: Sequence[Any]) -> bool:
    """Whether two lists have the very same objects."""
    return len(a) == len(b) and all(map(is_, a, b))


def as_real(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, or a complex one's real and imaginary parts, which rules take for numbers of their own.

    Of a DTensor it is this rank's shard.
    """
    tensor = shards.local(tensor)
    return torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor


def _is_writable(value: Any) -> bool:
    """Whether a step can count in it. Numbers, and tensors on devices, which a step would wait for, are replaced."""
    return (
        isinstance(value, torch.Tensor)
        and not is_wrapper(value)
        and value.device.type == "cpu"
        and value.layout == torch.strided
        and value.numel() == 1
        and not value.is_inference()
    )
