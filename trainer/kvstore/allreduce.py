"""Synchronous processes: a store that sums by all-reduce, and the all-reduce of gradients during backward."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ...kernels import streams
from ..compression import CompressedAllReduce, check_float32, create_compressor, wait_all
from ..optimizer import Optimizer
from ..optimizer.multi import parts_of
from ..optimizer.plan import Plan
from ..step.replica import Replica
from ..utils import distributed
from ..utils.distributed import check_alike, check_same
from .base import Key, KVStore, dense, optimizer_updater
from .buckets import Bucket, GradientBuckets, flags_agree
from .compressed import bucket_state, compressed_sum, load_sums, residuals_of, use_saved_plan
from .local import LocalStore
from .sync import ReplicasSync


class CollectiveStore(LocalStore):
    """A store of synchronous processes, with equal values on all ranks, which sums by all-reduce.

    Every method except `pull` is to be called on all ranks with the same keys. `init` stores rank 0's value. `push` sums
    each rank's list, then the ranks' sums; the total replaces the stored value or goes to the updater, on every rank alike.
    A call with a list of keys sends one message for each dtype. Values stay on the device of each key's first value.
    `load_optimizer_states` changes nothing on any rank if one cannot load its file: the others raise a ValueError that
    names it.

    Args:
        type: "dist", "dist_sync" or "dist_device_sync", which mean the same.
        group: a process group of torch.distributed; None for the group of all ranks, which is initialized from torchrun's
            environment variables if necessary.

    Raises:
        RuntimeError: there is neither a process group nor torchrun's environment.

    Source: MXNet 1.9.1, `KVStoreDist`; there a server keeps the values.
    """

    in_step = several_processes = True

    @classmethod
    def open(cls, name: str, timeout: float | None = None) -> KVStore:
        return cls(name) if cls is CollectiveStore and timeout is None else super().open(name, timeout)

    def __init__(self, type: str = "dist_sync", group: Any = None) -> None:
        super().__init__(type)
        self.group = distributed.process_group(group, type)
        self.rank = dist.get_rank(self.group)
        self.num_workers = dist.get_world_size(self.group)
        self._compression_params: dict[str, Any] | None = None
        self._reducers: dict[Key, CompressedAllReduce] = {}

    @torch.no_grad()
    def init(self, key: Any, value: Any) -> None:
        """Store a copy of rank 0's first value of each key, on every rank.

        Raises:
            TypeError: a value is no tensor, or keys of one store are neither all int nor all str; nothing has been changed.
            ValueError: a key has been initialized already or comes twice, or ranks differ in keys, shapes or dtypes; nothing
                has been changed.
        """
        before = set(self._values)
        super().init(key, value)
        new = {str(name): stored for name, stored in self._values.items() if name not in before}
        try:
            distributed.check_alike("key", new, self.group)
        except ValueError:
            for name in set(self._values) - before:
                del self._values[name]
            raise
        distributed.broadcast_coalesced(list(new.values()), self.group)

    def replace(self, key: Any, value: Any) -> None:
        """Raise RuntimeError, as in MXNet: values are equal on all ranks, and one rank could not change the others'."""
        KVStore.replace(self, key, value)

    def set_gradient_compression(self, compression_params: Mapping[str, Any]) -> None:
        """Compress the sums over the ranks from now on, with error feedback for each key.

        Args:
            compression_params: the type of the compression and its options; see `create_compressor`.

        Raises:
            TypeError: `compression_params` is no dict, or an option has a wrong type.
            ValueError: the type or an option is unknown or out of range.
        """
        create_compressor(compression_params)
        self._compression_params, self._reducers = dict(compression_params), {}

    def save_optimizer_states(self, fname: str | os.PathLike[str], dump_optimizer: bool = False) -> None:
        """Let rank 0 write the optimizer's states, which are equal on all ranks, to a file.

        Raises:
            RuntimeError: no optimizer has been set, or rank 0 could not write the file.
        """
        optimizer_updater(self._updater)
        failure: str | None = None
        if self.rank == 0:
            try:
                super().save_optimizer_states(fname, dump_optimizer)
            except Exception as error:
                failure = f"{type(error).__name__}: {error}"
        failure = distributed.broadcast_object(failure, self.group)
        if failure is not None:
            raise RuntimeError(f"rank 0 could not save the optimizer's states: {failure}")

    def barrier(self) -> None:
        """Wait until every rank has called this method."""
        distributed.barrier(self.group)

    def __repr__(self) -> str:
        return f"CollectiveStore({self.type!r}, rank {self.rank} of {self.num_workers}, {len(self._values)} keys)"

    def _all_or_none(self) -> AbstractContextManager[None]:
        device = next((value.device for value in self._values.values()), torch.device("cpu"))
        return distributed.all_or_none(self.group, device)

    def _sums(self, keys: Sequence[Key], values: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
        for key, tensors in zip(keys, values, strict=True):
            for tensor in tensors:
                dense(key, tensor, "this store adds up dense tensors")
        totals = super()._sums(keys, values)
        order = sorted(range(len(keys)), key=lambda i: keys[i])  # the same on all ranks, however their lists are ordered
        if self._compression_params is not None:
            self._add_compressed([keys[i] for i in order], [totals[i] for i in order])
            return totals
        sums = distributed.all_reduce_coalesced([totals[i] for i in order], self.group)
        return [total for _, total in sorted(zip(order, sums, strict=True), key=lambda pair: pair[0])]

    def _add_compressed(self, keys: Sequence[Key], tensors: Sequence[torch.Tensor]) -> None:
        """Replace these tensors by their sums over all ranks, sent as compressed messages."""
        params: Any = self._compression_params
        for key, tensor in zip(keys, tensors, strict=True):
            check_float32(key, tensor)
            reducer = self._reducers.get(key)
            if reducer is None or reducer.numel != tensor.numel() or reducer.device != tensor.device:
                reducer = CompressedAllReduce(params, tensor.numel(), device=tensor.device, group=self.group)
                self._reducers[key] = reducer
        flats = [tensor.contiguous().view(-1) for tensor in tensors]
        wait_all([self._reducers[key].start(flat) for key, flat in zip(keys, flats, strict=True)])
        for tensor, flat in zip(tensors, flats, strict=True):
            if tensor.data_ptr() != flat.data_ptr():
                tensor.copy_(flat.view(tensor.shape))


class AllReduceSync(ReplicasSync):
    """The synchronization of `dist_sync` with `update_on_kvstore=False`: each rank updates with all-reduced gradients.

    Sums are started in buckets while backward runs, and are complete after `count_fresh`. All ranks have an optimizer with
    equal settings; `compression_params` None means no compression.
    """

    reduces = True
    in_step = True

    def __init__(
        self,
        group: Any,
        replica: Replica,
        optimizer: Optimizer,
        compression_params: Mapping[str, Any] | None,
        engine: str | None,
    ) -> None:
        super().__init__([replica], optimizer)
        self.group, self._replica, self._names, self._engine = group, replica, replica.names, engine
        self._compression_params = compression_params
        if compression_params is not None:
            create_compressor(compression_params)
        self._buckets: GradientBuckets | None = None
        # Gradients that are sums already, when the step failed afterwards: the tensors, their versions, their counts.
        self._sums: dict[int, tuple[torch.Tensor, int, int]] = {}
        self.num_replicas = dist.get_world_size(group)
        self.writes = dist.get_rank(group) == 0
        # The optimizer's settings, `num_update` and a checksum of the hyper-parameters in the last step.
        self._last: tuple[dict[str, Any], int, int] = ({}, 0, 0)
        self._settings_sum = 0  # a checksum of these settings
        # Counts and flags of the last step on the host, the event after which they are there, and which parameters train;
        # None for the last if gradients might be missing.
        self._late: tuple[torch.Tensor, Any, torch.Tensor | None] | None = None

    def start(self) -> None:
        # Ranks are compared first: if they differ, some could fail while the others wait for them.
        optimizer, weights = self._optimizer, dict(zip(self._names, self._replica.params, strict=True))
        check_alike("parameter", weights, self.group, layouts=True)
        settings: dict[str, Any] = {"update_on_kvstore": self.updates, "compression_params": self._compression_params}
        settings["schedules"] = [sorted(part.schedules) for part in parts_of(optimizer)]
        classes = {"optimizer": type(optimizer).__name__, "lr_scheduler": type(optimizer.lr_scheduler).__name__}
        described = _described({**settings, **classes, **_settings(optimizer), "num_update": optimizer.num_update})
        described |= self._multipliers()
        described |= {f"requires_grad of {name}": str(param.requires_grad) for name, param in weights.items()}
        check_same("setting", described, self.group, self._replica.params[0].device)
        reducer, params = None, self._compression_params
        if params is not None:
            for name, param in weights.items():
                if (getattr(param, "grad_dtype", None) or param.dtype) == torch.float64:
                    raise TypeError(
                        f"compression_params={params!r}: the gradient of {name!r} is torch.float64, which cannot be "
                        "compressed; convert the model, or leave it out"
                    )
            reducer = partial(
                compressed_sum, compression_params=params, group=self.group, engine=self._engine, scatter=self.updates
            )
        self._buckets = self._make_buckets(reducer)
        self._buckets.broadcast_weights()

    def use_control(self, control: torch.Tensor) -> None:
        params = self._compression_params
        if params is not None and not create_compressor(params).keeps_nonfinite:
            raise RuntimeError(
                f"a loss scaler with compression_params={dict(params)!r}: this compression hides an overflow from the "
                "scaler; use another type, such as 'bf16', or leave one of them out"
            )

    def _make_buckets(self, reducer: Callable[[Bucket], Any] | None) -> GradientBuckets:
        params: Any = self._replica.params
        return GradientBuckets(params, self._names, self.group, reducer=reducer)

    @property
    def _live(self) -> GradientBuckets:
        assert self._buckets is not None
        return self._buckets

    def count_fresh(self, fresh: Sequence[Sequence[bool]], ignore_stale_grad: bool = False) -> list[int]:
        summed = {
            i: count
            for i, (gradient, version, count) in self._sums.items()
            if self._replica.params[i].grad is gradient and gradient._version == version
        }
        # Sums stay as they are if each rank contributes its part of them, or where all have whole sums rank 0 alone.
        in_parts = bool(summed) and self._live.put_sums_back(summed)
        contributed = [new and (in_parts or i not in summed or self.writes) for i, new in enumerate(fresh[0])]
        counted = self._live.finish(contributed)
        has_gradient = [new or i in summed for i, new in enumerate(contributed)]
        counts = self._counts(has_gradient, counted, self._live.flag_sums, ignore_stale_grad)
        counts = [summed.get(i, count) for i, count in enumerate(counts)]
        if self._compression_params is not None or not self.updates:
            self._sums = {
                i: (param.grad, param.grad._version, counts[i])
                for i, param in enumerate(self._replica.params)
                if counts[i] and param.grad is not None
            }
        if self._late is None:
            self._check_flags(self._live.flag_sums, counted.is_cuda)
        return counts

    def end_step(self) -> None:
        self._end_step(self._step_plan)

    def _end_step(self, plan: Plan | None) -> None:
        """Let ranks compare the numbers of the last step with the next gradients; `plan` is None if nothing was updated."""
        self._sums = {}
        last, _, rows = self._last
        settings = _settings(self._optimizer)
        if settings != last:
            self._settings_sum = zlib.crc32(repr(settings).encode())
        numbers = self._optimizer.num_update, rows if plan is None else plan.checksum()
        self._last = (settings, *numbers)
        self._live.checksum = zlib.crc32(b"%d %d" % numbers, self._settings_sum)

    @property
    def _step_plan(self) -> Plan | None:
        return self._replica.plan

    def accumulate(self) -> AbstractContextManager[None]:
        return super().accumulate() if self._buckets is None else self._buckets.accumulate()

    def end_save(self) -> None:
        distributed.barrier(self.group)

    def all_or_none(self) -> AbstractContextManager[None]:
        return distributed.all_or_none(self.group, self._replica.params[0].device)

    def sum_state(self) -> dict[str, Any]:
        if self._buckets is None or not self._buckets.buckets:
            return {}
        residuals = residuals_of(self._buckets)
        return bucket_state(self._buckets) | ({"residuals": residuals} if residuals else {})

    def load_sum_state(self, saved: Mapping[str, Any]) -> None:
        use_saved_plan(self._live, saved)
        if self._compression_params is not None:
            load_sums(self._live, saved)

    def _counts(
        self, fresh: Sequence[bool], counts: torch.Tensor, flag_sums: torch.Tensor, ignore_stale_grad: bool
    ) -> list[int]:
        """Return the number of ranks on which each gradient was fresh, without waiting for a GPU if this rank had all.

        In that case a gradient missing on another rank is reported there at once, and here one step later.
        """
        if self._late is not None:
            numbers, event, trained = self._late
            self._late = None
            event.synchronize()
            last_counts, sums = numbers[: len(self._names)], numbers[len(self._names) :]
            self._check_flags(sums, counts.is_cuda)
            stale = () if trained is None else torch.nonzero(trained & (last_counts < self.num_replicas)).flatten().tolist()
            if stale:
                missing = [repr(self._names[i]) for i in stale]
                raise RuntimeError(
                    f"in the last step another rank had no fresh gradient for {', '.join(missing[:8])}, so its weights "
                    "differ from this rank's now: load saved states and weights, or start again"
                )
        complete = all(new or not param.requires_grad for new, param in zip(fresh, self._replica.params, strict=True))
        if not (counts.is_cuda and complete):
            return [int(count) for count in counts.tolist()]
        trains = [param.requires_grad for param in self._replica.params]
        numbers = torch.cat([counts, flag_sums])
        host = streams.pinned(*numbers.shape, dtype=numbers.dtype)
        host.copy_(numbers, non_blocking=True)
        self._late = host, streams.record_event(counts.device), None if ignore_stale_grad else torch.tensor(trains)
        return [self.num_replicas] * len(fresh)

    def _check_flags(self, flag_sums: torch.Tensor, late: bool) -> None:
        """Check that all ranks used equal settings in the last step, and train the same parameters now."""
        if flags_agree(flag_sums.tolist(), self.num_replicas):
            return
        if not late:  # all ranks are here
            pairs = zip(self._names, self._live.trained, strict=True)
            device = self._replica.params[0].device
            check_same("parameter", {name: f"requires_grad={trained}" for name, trained in pairs}, self.group, device)
            settings, num_update, _ = self._last
            described = _described({**settings, "num_update": num_update}) | self._multipliers()
            described |= _described(dict(() if self._step_plan is None else self._step_plan.numbers()))
            check_same("setting of the last step", described, self.group, device)
        raise RuntimeError(
            "in the last step batch sizes, learning rates, requires_grad or other settings differed between ranks, so their "
            "weights differ now: load saved states and weights, or start again"
        )

    def _multipliers(self) -> dict[str, str]:
        """Describe the present multipliers of all parameters."""
        described: dict[str, str] = {}
        for i, name in enumerate(self._names):
            try:
                pair: Any = self._optimizer.multipliers(i)
            except (TypeError, ValueError) as error:  # which the step raises
                pair = str(error), ""
            described |= {f"{what} of {name}": repr(value) for what, value in zip(("lr_mult", "wd_mult"), pair, strict=True)}
        return described


def _settings(optimizer: Optimizer) -> dict[str, Any]:
    return optimizer.settings() | optimizer.unsaved_settings()


def _described(settings: Mapping[str, Any]) -> dict[str, str]:
    return {name: repr(value) for name, value in settings.items()}
