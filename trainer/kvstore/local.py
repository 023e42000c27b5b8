"""Stores of one process, which sum what replicas push on the CPU or on the replicas' device, and their use by a trainer."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from ...kernels.metrics import MetricsBuffer
from .. import serialization
from ..optimizer import Optimizer, Updater, get_updater
from ..optimizer.sparse import is_sparse
from ..validation import instance
from .base import Key, KVStore, known_values, new_values, optimizer_updater, pairs
from .sync import KVStoreSync, Residuals

if TYPE_CHECKING:
    from ..compression import GradientCompression


class LocalStore(KVStore):
    """A store in one process.

    Sparse tensors may be pushed, and their sum is sparse. Without an updater a sparse sum is stored as it is.

    Args:
        type: "nccl" and names that contain "device" store and sum values on the device of each key's first value; other
            names on the CPU.

    Source: MXNet 1.9.1, `KVStoreLocal`; unlike there, pushed tensors are always copied and initial values stored dense.
    """

    takes_lists = True

    @classmethod
    def open(cls, name: str, timeout: float | None = None) -> KVStore:
        return cls(name) if cls is LocalStore and timeout is None else super().open(name, timeout)

    def __init__(self, type: str = "local") -> None:
        self.type = type
        self._values: dict[Key, torch.Tensor] = {}
        self._updater: Callable[..., None] | None = None
        self._compression: GradientCompression | None = None

    def init(self, key: Any, value: Any) -> None:
        """Store a dense copy of the first value of a key, or of each key of a list.

        Raises:
            TypeError: a value is no tensor, or keys of one store are neither all int nor all str; nothing has been changed.
            ValueError: a key has been initialized already, or comes twice; nothing has been changed.
        """
        for name, tensor in new_values(key, value, self._values).items():
            on_cpu = self.type != "nccl" and "device" not in self.type
            self._values[name] = _dense(tensor).to("cpu" if on_cpu else tensor.device, copy=True)

    @torch.no_grad()
    def push(self, key: Any, value: Any, priority: int = 0) -> None:
        """Sum the values of each key, in the order of the list, and store the sum or pass it to the updater.

        Raises:
            TypeError: a key is neither int nor str, or a value is no tensor; nothing has been changed.
            ValueError: a key is not stored or comes twice, or a value has a wrong shape; nothing has been changed.
        """
        entries = known_values(key, value, "value", self._values)
        keys = [name for name, _ in entries]
        if len(set(keys)) < len(keys):
            raise ValueError("a key comes twice in one push: push one after the other")
        totals = self._sums(keys, [tensors for _, tensors in entries])
        if self._updater is None:
            self._values.update(zip(keys, totals, strict=True))
        elif isinstance(self._updater, Updater) and isinstance(key, (list, tuple)):
            self._updater(keys, totals, [self._values[name] for name in keys])
        else:
            for name, total in zip(keys, totals, strict=True):
                self._updater(name, total, self._values[name])

    @torch.no_grad()
    def pull(self, key: Any, out: Any, priority: int = 0, ignore_sparse: bool = True) -> None:
        """Copy stored values to the tensors of `out`.

        Args:
            key: a key or a list of keys.
            out: a tensor or a list of tensors for a single key; for a list of keys a list with one of these for each.
            priority: has no effect.
            ignore_sparse: whether sparse tensors in `out` are left as they are.

        Raises:
            TypeError: a key is neither int nor str, or `out` has something that is no tensor; nothing has been changed.
            ValueError: a key is not stored, or a tensor has another shape; nothing has been changed.
        """
        for name, tensors in known_values(key, out, "out", self._values):
            for tensor in tensors:
                stored = self._values[name]
                if not is_sparse(tensor):
                    tensor.copy_(_dense(stored))
                elif not ignore_sparse:
                    tensor.copy_(stored if is_sparse(stored) else stored.to_sparse(tensor.sparse_dim() or tensor.dim()))

    def pushpull(self, key: Any, value: Any, out: Any = None, priority: int = 0) -> None:
        """Push `value`, then pull into `out`, also into its sparse tensors; None pulls into the pushed tensors."""
        self.push(key, value, priority)
        self.pull(key, value if out is None else out, priority, ignore_sparse=False)

    def broadcast(self, key: Any, value: Any, out: Any, priority: int = 0) -> None:
        """Store the first value of each key, then copy it to `out`, also to its sparse tensors."""
        self.init(key, value)
        self.pull(key, out, priority, ignore_sparse=False)

    @torch.no_grad()
    def row_sparse_pull(self, key: Any, out: Any, row_ids: Any, priority: int = 0) -> None:
        """Copy some rows of stored values to the tensors of `out`.

        The other rows of a dense tensor become zeros; a sparse tensor gets the requested rows only.

        Args:
            key: a key or a list of keys.
            out: a tensor or a list of tensors for a single key; for a list of keys a list with one of these for each.
            row_ids: a tensor of row indices, in any order and with repetitions, for all of a key's tensors in `out`, or a
                list with a tensor for each of them. For a list of keys a list or dict with one of these for each key, or
                one tensor for all keys.
            priority: has no effect.

        Raises:
            TypeError: a key is neither int nor str, `out` has something that is no tensor, or indices are no integers;
                nothing has been changed.
            ValueError: a key is not stored, a tensor has another shape, an index is out of range, or `row_ids` has another
                length than `key` or `out`; nothing has been changed.
        """
        entries = known_values(key, out, "out", self._values)
        keys = [name for name, _ in entries]
        if not isinstance(key, (list, tuple)) and not isinstance(row_ids, Mapping):
            row_ids = [row_ids]
        if isinstance(row_ids, Mapping):
            if missing := [name for name in keys if name not in row_ids]:
                raise ValueError(f"row_ids has no entry for key {missing[0]!r}: a dict must have one for each key")
            row_ids = [row_ids[name] for name in keys]
        elif isinstance(row_ids, torch.Tensor):
            row_ids = [row_ids] * len(keys)
        copies = []
        for (name, tensors), (_, ids) in zip(entries, pairs(keys, row_ids, "row_ids"), strict=True):
            if len(ids) not in (1, len(tensors)):
                raise ValueError(f"{len(ids)} row_ids for {len(tensors)} tensors of key {name!r}: one, or one for each")
            rows = [_row_ids(name, indices, self._values[name]) for indices in ids]
            copies += [(tensor, self._values[name], rows[k % len(rows)]) for k, tensor in enumerate(tensors)]
        for tensor, stored, indices in copies:
            values = _dense(stored.index_select(0, indices)).to(tensor.device, tensor.dtype)
            indices = indices.to(tensor.device)
            if is_sparse(tensor):
                new = torch.sparse_coo_tensor(indices[None], values, tensor.shape, check_invariants=True, is_coalesced=True)
                tensor.copy_(new)
            else:
                tensor.zero_()
                tensor[indices] = values

    @torch.no_grad()
    def replace(self, key: Any, value: Any) -> None:
        """Overwrite stored values, and take over their dtype, without calling the updater.

        Raises:
            TypeError: a key is neither int nor str, or a value is no tensor; nothing has been changed.
            ValueError: a key is not stored, or a value has another shape; nothing has been changed.
        """
        stored, values = [], []
        for name, (tensor, *_) in known_values(key, value, "value", self._values):
            if tensor.dtype == self._values[name].dtype:
                stored.append(self._values[name])
                values.append(tensor.detach())
            else:
                self._values[name] = tensor.detach().to(self._values[name].device, copy=True)
        if stored:
            torch._foreach_copy_(stored, values)

    def set_optimizer(self, optimizer: Optimizer) -> None:
        """Update stored values by this optimizer from now on, with new optimizer states."""
        self._use(get_updater(optimizer))

    def set_updater(self, updater: Callable[[Key, torch.Tensor, torch.Tensor], None]) -> None:
        instance("updater", updater, Callable, "a function (key, pushed, stored)")
        self._use(updater)

    def set_gradient_compression(self, compression_params: Mapping[str, Any]) -> None:
        """Compress pushed gradients from now on, with error feedback for each key and replica.

        Args:
            compression_params: {"type": "2bit" or "1bit", "threshold": 0.5}.

        Raises:
            TypeError: `compression_params` is no dict, or an option has a wrong type.
            ValueError: the type or an option is unknown or out of range, or the store's type has no "device" in it.
        """
        from ..compression import GradientCompression  # few need it

        self.check_compression(compression_params)
        if "device" not in self.type:
            raise ValueError(f"a store of type {self.type!r} does not compress gradients: 'device' does")
        self._compression = GradientCompression(compression_params)

    def save_optimizer_states(self, fname: str | os.PathLike[str], dump_optimizer: bool = False) -> None:
        """Write the optimizer's states and settings to a file, atomically; `dump_optimizer` has no effect.

        Raises:
            RuntimeError: no optimizer has been set.
        """
        updater, keys = optimizer_updater(self._updater), list(self._values)
        serialization.write(fname, serialization.collect(updater, list(map(str, keys)), list(self._values.values()), keys))

    def load_optimizer_states(self, fname: str | os.PathLike[str]) -> None:
        """Load a file that `save_optimizer_states` wrote.

        Raises:
            RuntimeError: no optimizer has been set.
            FileNotFoundError: there is no such file.
            ValueError: the file is damaged, or of other keys, shapes or another optimizer; nothing has been changed.
        """
        updater, keys = optimizer_updater(self._updater), list(self._values)
        with self._all_or_none():
            saved = serialization.read(fname, mapped=True)
        checks = self._all_or_none()
        serialization.restore(updater, list(map(str, keys)), list(self._values.values()), saved, keys, checks)

    def __repr__(self) -> str:
        return f"LocalStore({self.type!r}, {len(self._values)} keys)"

    def _all_or_none(self) -> AbstractContextManager[None]:
        """As `GradientSync.all_or_none`."""
        return nullcontext()

    def _use(self, updater: Callable[..., None]) -> None:
        self._values = {key: _dense(value) for key, value in self._values.items()}  # to be changed in place
        self._updater = updater

    def _sums(self, keys: Sequence[Key], values: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
        """Return the sum of each key's tensors, in the order of their list, after compressing them if that is set."""
        replicas = max(map(len, values), default=0)
        totals: list[torch.Tensor] = []
        for d in range(replicas):
            members = [i for i, tensors in enumerate(values) if d < len(tensors)]
            pushed = [values[i][d].detach() for i in members]
            if self._compression is not None:
                pushed = self._compression.sent([keys[i] for i in members], d, pushed)
            moved = [_moved(tensor, self._values[keys[i]].device) for i, tensor in zip(members, pushed, strict=True)]
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
    """The synchronization of a model's replicas through a `LocalStore`, whose optimizer states are in this process."""

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
        if not isinstance(updater, Updater):  # the user has called `set_updater` since
            super().update(chosen, fresh, into)
            return
        updater.into = into
        if control is not None and updater.control is not None and updater.control is not control:
            updater.control.copy_(control)  # the store is on another device
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

    def state_dict(self) -> dict[str, Any]:
        return serialization.collect(self._updater, self._replicas[0].names, self._weights)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        serialization.restore(self._updater, self._replicas[0].names, self._weights, state)

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

    def sum_state(self) -> dict[str, Any]:
        by_name: Residuals = {}
        for (key, source), residual in self._residuals.items():
            by_name.setdefault(self._replicas[0].names[key], {})[str(source)] = residual
        return {"residuals": by_name} if by_name else {}

    @torch.no_grad()
    def load_sum_state(self, saved: Mapping[str, Any]) -> None:
        if self._compression_params is None:
            return
        live, by_name = self._residuals, saved.get("residuals", {})
        sources = [str(d) for d in range(self.num_replicas)]
        for i, name in enumerate(self._replicas[0].names):
            by_source = by_name.get(name, {})
            if set(by_source) <= set(sources):
                residuals: list[Any] = [by_source.get(source) for source in sources]
            else:  # saved with more replicas: what is still to be sent is their sum
                residuals = [sum(by_source.values()) / self.num_replicas] * self.num_replicas
            for d, (replica, residual) in enumerate(zip(self._replicas, residuals, strict=True)):
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
        """The residuals of compression by key and replica; the store's own dict."""
        return {} if self.store._compression is None else self.store._compression.residuals


LocalStore.sync_class = LocalSync


@KVStore.register
class TestStore(KVStore):
    """A store that sums what is pushed and stores nothing, MXNet's example of a user-defined store: "teststore".

    Source: MXNet 1.9.1, `mxnet.kvstore.base.TestStore`.
    """

    __test__ = False  # pytest must not collect it

    @torch.no_grad()
    def broadcast(self, key: Any, value: Any, out: Any, priority: int = 0) -> None:
        values = new_values(key, value, ())
        for name, outs in known_values(key, out, "out", values):
            for tensor in outs:
                tensor.copy_(values[name])

    @torch.no_grad()
    def pushpull(self, key: Any, value: Any, out: Any = None, priority: int = 0) -> None:
        entries = pairs(key, value, "value")
        known_values(key, value, "value", {name: tensors[0] for name, tensors in entries})
        totals = {
            name: sum((_moved(t, tensors[0].device) for t in tensors[1:]), tensors[0].detach()) for name, tensors in entries
        }
        for name, outs in known_values(key, value if out is None else out, "out", totals):
            for tensor in outs:
                tensor.copy_(totals[name])


def _moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    # A non-blocking copy to the CPU could be read before it has arrived.
    return tensor.to(device, non_blocking=device.type != "cpu")


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.layout == torch.strided else tensor.to_dense()


def _row_ids(key: Key, ids: torch.Tensor, stored: torch.Tensor) -> torch.Tensor:
    """Return row indices sorted and without repetitions. Whole floats are allowed: MXNet's index arrays are float32."""
    rows = ids.to(stored.device, torch.int64).unique()
    if ids.dtype == torch.bool or ids.is_complex() or (ids.is_floating_point() and (ids != ids.round()).any()):
        raise TypeError(f"row_ids of key {key!r} must be integers, got {ids.dtype}")
    if stored.dim() == 0 or (len(rows) and not 0 <= rows[0] <= rows[-1] < len(stored)):
        raise ValueError(f"row_ids of key {key!r} must be rows of the stored value, {tuple(stored.shape)}; got {ids}")
    return rows
