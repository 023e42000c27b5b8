"""Stores of one process, and trainers' use of them. They sum what replicas push, on the CPU or on their device."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ...kernels.metrics import MetricsBuffer
from .. import checkpoint
from ..optimizer import Optimizer, Updater, get_updater
from ..optimizer.sparse import is_sparse
from .base import Key, KVStore, known_values, new_values, optimizer_updater, pairs
from .sync import KVStoreSync, Residuals

if TYPE_CHECKING:
    from ..compression import GradientCompression


class LocalStore(KVStore):
    """Values by key in one process.

    Args:
        type: "nccl", and names with "device", keep and add up values where a key's first value was, others on the CPU.

    Sparse tensors may be pushed, and are added up as such. Without an updater their sum is stored as it is.

    Source: MXNet 1.9.1, `KVStoreLocal`, but that a pushed tensor is always copied, and that initial values are stored dense.
    """

    takes_lists = True

    @classmethod
    def open(cls, name: str, timeout: float | None = None) -> KVStore:
        """As `KVStore.open`; the name is the type."""
        return cls(name) if cls is LocalStore and timeout is None else super().open(name, timeout)

    def __init__(self, type: str = "local") -> None:
        self.type = type
        self._values: dict[Key, torch.Tensor] = {}
        self._updater: Callable[..., None] | None = None
        self._compression: GradientCompression | None = None

    def init(self, key: Any, value: Any) -> None:
        """As `KVStore.init`.

        Raises:
            TypeError, ValueError: a key of another kind than those before, or one that is there already, or a value that is
                no tensor; nothing has been changed.
        """
        for each, tensor in new_values(key, value, self._values).items():
            on_cpu = self.type != "nccl" and "device" not in self.type
            self._values[each] = _dense(tensor).to("cpu" if on_cpu else tensor.device, copy=True)

    @torch.no_grad()
    def push(self, key: Any, value: Any, priority: int = 0) -> None:
        """As `KVStore.push`. Sums are taken in the order of the list.

        Raises:
            TypeError, ValueError: keys or values that do not fit; nothing has been changed.
        """
        found = known_values(key, value, "value", self._values)
        keys = [each for each, _ in found]
        if len(set(keys)) < len(keys):
            raise ValueError("a key comes twice in one push: push one after the other")
        totals = self._sums(keys, [tensors for _, tensors in found])
        if self._updater is None:
            self._values.update(zip(keys, totals, strict=True))
        elif isinstance(self._updater, Updater) and isinstance(key, (list, tuple)):
            self._updater(keys, totals, [self._values[each] for each in keys])
        else:
            for each, total in zip(keys, totals, strict=True):
                self._updater(each, total, self._values[each])

    @torch.no_grad()
    def pull(self, key: Any, out: Any, priority: int = 0, ignore_sparse: bool = True) -> None:
        """As `KVStore.pull`.

        Args:
            key, out, priority: as there.
            ignore_sparse: leave sparse tensors in `out` as they are.

        Raises:
            TypeError, ValueError: keys or tensors that do not fit; nothing has been changed.
        """
        for each, tensors in known_values(key, out, "out", self._values):
            for tensor in tensors:
                stored = self._values[each]
                if not is_sparse(tensor):
                    tensor.copy_(_dense(stored))
                elif not ignore_sparse:
                    tensor.copy_(stored if is_sparse(stored) else stored.to_sparse(tensor.sparse_dim() or tensor.dim()))

    def pushpull(self, key: Any, value: Any, out: Any = None, priority: int = 0) -> None:
        """As `KVStore.pushpull`, into sparse tensors, too."""
        self.push(key, value, priority)
        self.pull(key, value if out is None else out, priority, ignore_sparse=False)

    def broadcast(self, key: Any, value: Any, out: Any, priority: int = 0) -> None:
        """As `KVStore.broadcast`, into sparse tensors, too."""
        self.init(key, value)
        self.pull(key, out, priority, ignore_sparse=False)

    @torch.no_grad()
    def row_sparse_pull(self, key: Any, out: Any, row_ids: Any, priority: int = 0) -> None:
        """Copy these rows of what is stored to `out`; a dense one gets zeros elsewhere, a sparse one lists no others.

        Args:
            key: a key or a list of them.
            out: a tensor for each, or a list of them.
            row_ids: indices of rows, in any order, also several times, as one tensor for all of a key's `out`, or a list
                with one for each. With a list of keys a list with these for each, a dict of them by key, or one tensor.
            priority: has no effect.

        Raises:
            TypeError, ValueError: keys, tensors or indices that do not fit; nothing has been changed.
        """
        found = known_values(key, out, "out", self._values)
        if not isinstance(key, (list, tuple)) and not isinstance(row_ids, Mapping):
            row_ids = [row_ids]
        if isinstance(row_ids, Mapping):
            if missing := [each for each, _ in found if each not in row_ids]:
                raise ValueError(f"row_ids has none of key {missing[0]!r}: with a dict they must be there for each key")
            row_ids = [row_ids[each] for each, _ in found]
        elif isinstance(row_ids, torch.Tensor):
            row_ids = [row_ids] * len(found)
        copies = []
        for (each, tensors), (_, ids) in zip(found, pairs([each for each, _ in found], row_ids, "row_ids"), strict=True):
            if len(ids) not in (1, len(tensors)):
                raise ValueError(f"{len(ids)} row_ids for {len(tensors)} tensors of key {each!r}: one, or one for each")
            rows = [_row_ids(each, those, self._values[each]) for those in ids]
            copies += [(tensor, self._values[each], rows[k % len(rows)]) for k, tensor in enumerate(tensors)]
        for tensor, stored, wanted in copies:
            values = _dense(stored.index_select(0, wanted)).to(tensor.device, tensor.dtype)
            wanted = wanted.to(tensor.device)
            if is_sparse(tensor):
                new = torch.sparse_coo_tensor(wanted[None], values, tensor.shape, check_invariants=True, is_coalesced=True)
                tensor.copy_(new)
            else:
                tensor.zero_()
                tensor[wanted] = values

    @torch.no_grad()
    def replace(self, key: Any, value: Any) -> None:
        """As `KVStore.replace`.

        Raises:
            TypeError, ValueError: keys or values that do not fit; nothing has been changed.
        """
        stored, values = [], []
        for each, (tensor, *_) in known_values(key, value, "value", self._values):
            if tensor.dtype == self._values[each].dtype:
                stored.append(self._values[each])
                values.append(tensor.detach())
            else:
                self._values[each] = tensor.detach().to(self._values[each].device, copy=True)
        if stored:
            torch._foreach_copy_(stored, values)

    def set_optimizer(self, optimizer: Optimizer) -> None:
        """Let this optimizer update what is stored, with states of its own from now on."""
        self._use(get_updater(optimizer))

    def set_updater(self, updater: Callable[[Key, torch.Tensor, torch.Tensor], None]) -> None:
        """As `KVStore.set_updater`."""
        if not callable(updater):
            raise TypeError(f"updater must be a function (key, pushed, stored), got {type(updater).__name__}")
        self._use(updater)

    def set_gradient_compression(self, compression_params: Mapping[str, Any]) -> None:
        """Compress what each copy pushes, with a residual for each key and copy.

        Args:
            compression_params: {"type": "2bit" or "1bit", "threshold": 0.5}.

        Raises:
            TypeError, ValueError: they do not fit, or this kind of store does not compress.
        """
        from ..compression import GradientCompression  # few need it

        self.check_compression(compression_params)
        if "device" not in self.type:
            raise ValueError(f"a store of type {self.type!r} does not compress gradients: 'device' does")
        self._compression = GradientCompression(compression_params)

    def save_optimizer_states(self, fname: str | os.PathLike[str], dump_optimizer: bool = False) -> None:
        """Write the optimizer's states to a file; its settings, too, whatever `dump_optimizer` says.

        Raises:
            RuntimeError: no optimizer updates what is stored.
        """
        updater, keys = optimizer_updater(self._updater), list(self._values)
        checkpoint.write(fname, checkpoint.collect(updater, list(map(str, keys)), list(self._values.values()), keys))

    def load_optimizer_states(self, fname: str | os.PathLike[str]) -> None:
        """Read what `save_optimizer_states` wrote.

        Raises:
            RuntimeError: no optimizer updates what is stored.
            ValueError, FileNotFoundError: there is no such file, or it does not fit; nothing has been changed.
        """
        updater, keys = optimizer_updater(self._updater), list(self._values)
        saved = checkpoint.read(fname)
        checkpoint.restore(updater, list(map(str, keys)), list(self._values.values()), saved, keys)

    def __repr__(self) -> str:
        return f"LocalStore({self.type!r}, {len(self._values)} keys)"

    def _use(self, updater: Callable[..., None]) -> None:
        self._values = {key: _dense(value) for key, value in self._values.items()}  # to be changed in place
        self._updater = updater

    def _sums(self, keys: Sequence[Key], values: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
        """The sum of each key's tensors, compressed first if that is wanted, in the order of their list."""
        copies = max(map(len, values), default=0)
        totals: list[torch.Tensor] = []
        for d in range(copies):
            members = [i for i, tensors in enumerate(values) if d < len(tensors)]
            given = [values[i][d].detach() for i in members]
            if self._compression is not None:
                given = self._compression.sent([keys[i] for i in members], d, given)
            moved = [_moved(tensor, self._values[keys[i]].device) for i, tensor in zip(members, given, strict=True)]
            if d == 0:
                totals = [tensor.clone() for tensor in moved]
                continue
            dense = [k for k, i in enumerate(members) if moved[k].layout == totals[i].layout == torch.strided]
            if dense:
                torch._foreach_add_([totals[members[k]] for k in dense], [moved[k] for k in dense])
            for k in set(range(len(members))).difference(dense):
                total, more = totals[members[k]], moved[k]
                totals[members[k]] = more + total if is_sparse(total) else total + more  # torch adds sparse to dense only
        return totals


class LocalSync(KVStoreSync):
    """Replicas that meet in a `LocalStore`: what updates them is in this process."""

    inside = True
    store: LocalStore

    def start(self) -> None:
        super().start()
        if self.updates and self.store._values[0].device == self._replicas[0].params[0].device:
            self._updater.engine = self._engine
        if self._control is not None:
            self.use_control(self._control)

    def update(self, chosen: Sequence[bool], fresh: Sequence[Sequence[bool]], into: MetricsBuffer | None) -> None:
        updater, control = self.store._updater, self._control
        if not isinstance(updater, Updater):  # the user has set another one since
            super().update(chosen, fresh, into)
            return
        updater.into = into
        if control is not None and updater.control is not None and updater.control is not control:
            updater.control.copy_(control)  # to where the store is, which is another device
        try:
            super().update(chosen, fresh, into)
        finally:
            updater.into = None

    def use_control(self, control: torch.Tensor) -> None:
        super().use_control(control)
        if self.updates:
            self._updater.control = control.to(self.store._values[0].device)
            self._updater.forget_plan()

    def total(self) -> torch.Tensor | None:
        updater = self.store._updater
        return updater.total() if isinstance(updater, Updater) else None

    def state_dict(self) -> dict[str, Any] | None:
        return checkpoint.collect(self._updater, self._replicas[0].names, self._weights) if self.updates else None

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        checkpoint.restore(self._updater, self._replicas[0].names, self._weights, state)

    def masters(self, new: Mapping[int, torch.Tensor] | None = None) -> Mapping[Any, torch.Tensor]:
        if new is not None:  # the weights are replaced at the next step
            self._updater.put_masters(new, self.store._values if new else {})
        return self._updater.masters

    @torch.no_grad()
    def apply(self, rule: Any, hyper: Mapping[str, float], indices: Collection[int]) -> None:
        keys = list(indices)
        averages = [self.store._values[key].clone() for key in keys]
        self._updater.apply(rule, hyper, keys, averages)
        for replica in self._replicas:
            weights = replica.weights()
            for key, average in zip(keys, averages, strict=True):
                weights[key].copy_(average)

    def residuals(self) -> Residuals:
        found: Residuals = {}
        for (key, source), residual in self._residuals.items():
            found.setdefault(self._replicas[0].names[key], {})[str(source)] = residual
        return found

    @torch.no_grad()
    def load_residuals(self, saved: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        if self._compression_params is None:
            return
        live = self._residuals
        sources = [str(d) for d in range(self.num_replicas)]
        for i, name in enumerate(self._replicas[0].names):
            theirs = saved.get(name, {})
            if set(theirs) <= set(sources):
                own: list[Any] = [theirs.get(source) for source in sources]
            else:  # of more replicas: what is still to be sent is their sum
                own = [sum(theirs.values()) / self.num_replicas] * self.num_replicas
            for d, (replica, residual) in enumerate(zip(self._replicas, own, strict=True)):
                device = replica.params[i].device
                old = live.get((i, d))
                if old is not None and old.device == device:
                    old.zero_() if residual is None else old.copy_(residual)
                elif residual is not None:
                    live[i, d] = residual.to(device, copy=True)

    @property
    def _updater(self) -> Updater:
        return optimizer_updater(self.store._updater)

    @property
    def _weights(self) -> list[torch.Tensor]:
        return [self.store._values[key] for key in range(len(self._replicas[0].names))]

    @property
    def _residuals(self) -> dict[tuple[Any, Any], torch.Tensor]:
        """What compression has kept back so far, by key and replica; live."""
        return {} if self.store._compression is None else self.store._compression.residuals


LocalStore.sync_class = LocalSync


@KVStore.register
class TestStore(KVStore):
    """MXNet's example of a store that only adds up what it is given, and keeps nothing: "teststore".

    Source: MXNet 1.9.1, `mxnet.kvstore.base.TestStore`.
    """

    __test__ = False  # it is none of pytest's classes

    @torch.no_grad()
    def broadcast(self, key: Any, value: Any, out: Any, priority: int = 0) -> None:
        """Copy a value to `out`, one tensor or a list of them; with a list of keys that of each."""
        values = new_values(key, value, ())
        for each, outs in known_values(key, out, "out", values):
            for tensor in outs:
                tensor.copy_(values[each])

    @torch.no_grad()
    def pushpull(self, key: Any, value: Any, out: Any = None, priority: int = 0) -> None:
        """Copy the sum of a key's values to `out`, or to these values."""
        found = pairs(key, value, "value")
        known_values(key, value, "value", {each: tensors[0] for each, tensors in found})
        totals = {
            each: sum((_moved(t, tensors[0].device) for t in tensors[1:]), tensors[0].detach()) for each, tensors in found
        }
        for each, outs in known_values(key, value if out is None else out, "out", totals):
            for tensor in outs:
                tensor.copy_(totals[each])

    @classmethod
    def is_capable(cls, capability: str) -> bool:
        """It has no optimizer."""
        return super().is_capable(capability) and capability.lower() != "optimizer"


def _moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    # The CPU would not wait for what comes from a GPU.
    return tensor.to(device, non_blocking=device.type != "cpu")


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.layout == torch.strided else tensor.to_dense()


def _row_ids(key: Key, ids: torch.Tensor, stored: torch.Tensor) -> torch.Tensor:
    """The rows that are asked for, each once and in order. MXNet's arrays of indices are float32."""
    rows = ids.to(stored.device, torch.int64).unique()
    if ids.dtype == torch.bool or ids.is_complex() or (ids.is_floating_point() and (ids != ids.round()).any()):
        raise TypeError(f"row_ids of key {key!r} must be integers, got {ids.dtype}")
    if stored.dim() == 0 or (len(rows) and not 0 <= rows[0] <= rows[-1] < len(stored)):
        raise ValueError(f"row_ids of key {key!r} must be rows of what is stored, which is {tuple(stored.shape)}; got {ids}")
    return rows
