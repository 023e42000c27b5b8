"""Synchronization of gradients between the backward pass and the update, in one process or through a store."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

from ...kernels.guards import copy_all
from ...kernels.messages import listed
from ...kernels.metrics import MetricsBuffer
from .. import serialization
from ..optimizer import Optimizer
from ..optimizer.multi import parts_of
from ..optimizer.sparse import is_sparse
from ..step.params import is_lazy
from ..step.replica import Replica, update_together, zero
from ..utils.errors import StaleGradientError
from ..utils.interrupts import uninterrupted
from .base import KVStore, renamed

Residuals = dict[str, dict[str, torch.Tensor]]  # by parameter name, then by source
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # integer dtypes by size in bytes
LARGE = 16 * 2**20  # elements up to which a local store updates a parameter, as in MXNet


class GradientSync:
    """How a model's replicas, here and in other processes, train as one. This class itself: a single replica, and no store.

    A step of the trainer is `choose`, which finds the gradients and changes nothing that a user sees, and then `step` with
    the result, which `Trainer` does not look into.

    Args:
        replicas: the replicas of the model in this process.
        optimizer: their optimizer.

    Attributes:
        updates: whether it updates the weights of all replicas itself (update_on_kvstore), and so holds the optimizer
            states, which `state_dict` returns; valid after `start`.
        reduces: whether replicas share gradients; otherwise each is updated with its own.
        num_replicas: the number of replicas in all processes; valid after `start`.
        writes: whether this process writes files of states; the other processes only read them.
        reports_metrics: whether updates can measure what they do to each parameter.
        in_step: whether it connects synchronous processes, by the process group `group`.
        store: the store through which replicas exchange gradients, once it is needed; None for no store.
        inside: whether the store's values and optimizer are in this process, whole, where a subclass can use them.
    """

    updates: bool = False
    reduces: bool = False
    num_replicas: int = 1
    writes: bool = True
    reports_metrics: bool = True
    in_step: bool = False
    group: Any = None
    store: KVStore | None = None
    inside: bool = False
    _compression_params: Mapping[str, Any] | None = None

    def __init__(self, replicas: Sequence[Replica], optimizer: Optimizer) -> None:
        self._replicas, self._optimizer = list(replicas), optimizer
        self.num_replicas = len(self._replicas)

    def choose(self, ignore_stale_grad: bool, reduced: bool = False) -> Any:
        """Return the gradients of the coming step, for `step`.

        Args:
            ignore_stale_grad: leave out parameters without a fresh gradient.
            reduced: whether `reduce_gradients` has been called.

        Raises:
            StaleGradientError: a gradient is stale and `ignore_stale_grad` is False; nothing has been changed.
        """
        replica = self._replicas[0]
        written = replica.guard.collect_written()
        if written is not None:
            return written
        fresh = replica.fresh()
        if not ignore_stale_grad:
            self._refuse_stale(fresh)
        return replica.gradients(fresh), None

    def step(self, choice: Any, into: MetricsBuffer | None, scaler: Any) -> None:
        """Update the weights. If it fails before any weight has changed, states are unchanged too.

        Args:
            choice: the result of `choose`.
            into: the buffer for what the update measures, with a row for each parameter; None to measure nothing.
            scaler: the trainer's loss scaler, or None.
        """
        (gradients, versions), replica = choice, self._replicas[0]
        restore, plan = None, replica.plan
        try:
            if plan is None:
                restore = replica.undo()
                plan = replica.make_plan()
            plan.prepare(gradients)
            if scaler is not None:
                scaler.detect_overflow(gradients)
            plan.run(into)
        except BaseException:
            if restore is not None:
                restore()
            raise
        if versions is None or replica.zero_grads:
            replica.guard.use(gradients)
        else:
            replica.guard.use(gradients, versions, plan.references)
        if scaler is not None:
            scaler.end(plan.total())

    def reduce_gradients(self) -> None:
        """Replace the gradients by their sums over all replicas, in the first half of a step."""

    def forget_sums(self) -> None:
        """Note that gradients are dropped or filled with zeros, so that none is a sum any more."""

    def start(self) -> None:
        """Copy the first replica's weights to all replicas, in place; raise an error if the store lacks a capability."""

    def follow_weights(self) -> None:
        """Copy the first local replica's weights, which the user may have changed since the last step, to all replicas.

        Raises:
            RuntimeError: weights have changed, but the store cannot take new values; nothing has been changed.
        """

    def accumulate(self) -> AbstractContextManager[None]:
        """Return a context manager inside which backward passes only accumulate gradients, without communication."""
        return nullcontext()

    def use_control(self, control: torch.Tensor) -> None:
        """Use a loss scaler's control tensor in updates from now on; no effect if the trainer updates.

        Raises:
            RuntimeError: this store's updates cannot use it; nothing has been changed.
        """
        if self.updates:
            raise RuntimeError("a loss scaler with a store that updates elsewhere: use update_on_kvstore=False")

    def _refuse_compressed(self) -> None:
        if self._compression_params is not None:
            raise RuntimeError(
                "a loss scaler with compression_params: an overflow would stay in the residuals for ever; leave one of them "
                "out"
            )

    def total(self) -> torch.Tensor | None:
        """Return `Updater.total()` of the last update, equal in all processes; None if `updates` is False."""
        return None

    def check_saves(self) -> None:
        """Raise TypeError if the store has states that it cannot save or load."""

    def collect(self) -> dict[str, Any]:
        """Return all that a training needs to go on: the states of whole parameters by name, and `sum_state`."""
        replica = self._replicas[0]
        states = self.state_dict() if self.updates else serialization.collect(replica.updater, replica.names, replica.params)
        return states | self.sum_state()

    def all_or_none(self) -> AbstractContextManager[None]:
        """Return a context manager for checks of what all processes load: where one refuses it, all raise an error.

        Processes that do not take their steps together only raise their own errors.
        """
        return nullcontext()

    def restore(self, saved: Mapping[str, Any], checks: AbstractContextManager[None]) -> None:
        """Check and load what `collect` returned; without an update by the store, the checks are made inside `checks`."""
        if self.updates:
            self.load_state_dict(saved)
        else:
            for replica in self._replicas:
                serialization.restore(replica.updater, replica.names, replica.params, saved, checks=checks)
        self.load_sum_state(saved)
        for replica in self._replicas:
            replica.counts = replica.host_state = None  # the optimizer's again
            replica.forget_plan()

    def state_dict(self) -> dict[str, Any]:
        """Return the states of whole parameters by name, as `serialization.collect` does; only if `updates` is True."""
        raise NotImplementedError

    def end_save(self) -> None:
        """Wait until the process that writes has written a file of states."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Check and load what `state_dict` returned, as `serialization.restore` does. Called only if `updates` is True."""
        raise NotImplementedError

    def masters(self, new: Mapping[int, torch.Tensor] | None = None) -> Mapping[Any, torch.Tensor]:
        """Return the masters (high-precision copies) of whole parameters by index, after replacing them by `new` if given.

        Before the first step the result is empty unless `new` is given. Called only if `updates` is True.

        Raises:
            RuntimeError: the masters are in another process; nothing has been changed.
        """
        raise RuntimeError(
            "the store keeps the masters of the weights elsewhere: to read or load float32 weights use "
            "update_on_kvstore=False, or a store that updates in this process, such as 'device' or 'dist_sync'"
        )

    def sum_state(self) -> dict[str, Any]:
        """Return the entries of a trainer's state with which later sums of gradients have the same bits.

        "residuals": the residuals of gradient compression, of whole parameters, by parameter name and source. Synchronous
        processes add "buckets" and "reducers", see `bucket_state`. Entries without content are left out.
        """
        return {}

    def load_sum_state(self, saved: Mapping[str, Any]) -> None:
        """Load the entries of `sum_state` from a saved state.

        If residuals have other sources than there are here, each source gets an equal share of the sum. Missing residuals
        become 0.
        """

    def apply_anywhere(self, rule: Any, hyper: Mapping[str, float], indices: Collection[int]) -> None:
        """Apply a rule to the weights of all replicas, with states here or in the store; takes the arguments of `apply`."""
        if self.updates:
            self.apply(rule, hyper, indices)
            return
        for replica in self._replicas:
            replica.updater.apply(rule, hyper, list(indices), [replica.params[i] for i in indices])

    def apply(self, rule: Any, hyper: Mapping[str, float], indices: Collection[int]) -> None:
        """Apply a rule to the weights of all replicas with the store's states. Called only if `updates` is True.

        Args:
            rule: the rule.
            hyper: the rule's hyper-parameters by name.
            indices: the parameters to which it is applied.

        Raises:
            RuntimeError: the states are in another process; nothing has been changed.
        """
        raise RuntimeError("the store keeps the states elsewhere: averaged weights need update_on_kvstore=False")

    def _refuse_stale(self, counts: Sequence[int]) -> None:
        """Raise if a gradient is not fresh in all replicas; `counts` has in how many replicas each one is."""
        n, stale, replica = self.num_replicas, [], self._replicas[0]
        for name, param, count in zip(replica.names, replica.params, counts, strict=True):
            if param.requires_grad and count < n:
                missing = " (no gradient)" if param.grad is None and n == 1 else ""
                stale.append(f"{name!r}" + (f" (fresh in {count} of {n} copies)" if count else missing))
        if stale:
            raise StaleGradientError(
                f"no fresh gradient since the last step for {listed(stale)}: call backward() on a loss that depends on "
                "them before step(), or use step(batch_size, ignore_stale_grad=True) to leave such parameters as they "
                "are; if a CUDA graph or a kernel of your own has written the gradients, tell torch by "
                "torch.autograd.graph.increment_version(gradients)"
            )


class ReplicasSync(GradientSync):
    """Several replicas, here or in other processes; this class itself: each is updated with its own gradients.

    A step makes the following calls, in this order and in one thread. All processes make the same calls, as they depend only
    on values that are equal in all processes. One exception: if a gradient does not fit its weight, that process raises an
    error before 4., and the others run into their time limit.

    1. `start()`, once: before the first step, or saving or loading of states. All parameters are initialized by then.
    2. `count_fresh(fresh)`. A gradient is fresh if it has been written since its last use. If a trained parameter
       (`requires_grad` in the first replica) is fresh in fewer than `num_replicas` replicas, StaleGradientError is raised.
       With ignore_stale_grad=True the parameters that are fresh in any replica are chosen, so that all processes choose the
       same.
    3. `follow_weights()`. The trainer sets the optimizer's `rescale_grad` for this step. Learning rate, schedule, decay and
       multipliers may change at every step; a store that updates elsewhere has to send them there.
    4. If `updates` is True: `update(chosen, fresh, into)`. Otherwise `reduce(chosen, fresh)`, which sets `parameter.grad` of
       every chosen parameter in every local replica to the sum over all replicas, in place or to a view of a larger tensor;
       then the local replicas are updated, and `end_step()` is called.

    `Trainer.allreduce_grads()` makes the calls 1, 2 (without the error) and `reduce`; its `update()` makes 3 and the update
    only. After a step that failed late some gradients are sums already; the next `reduce` is not given these.

    Gradients that several backward passes have accumulated are reduced as they are. A subclass that reduces while backward
    runs must not do so inside `accumulate()`. It may ignore `fresh` if its hooks know better which gradients are fresh.
    """

    # In how many replicas each gradient was fresh in `reduce_gradients`; and, after a step that failed when gradients had
    # been summed, the marks of the sums.
    _reduced: list[int] | None = None
    _summed: list[list[tuple[int, int]]] | None = None

    @uninterrupted  # processes that sum while others do not would wait for each other
    def choose(self, ignore_stale_grad: bool, reduced: bool = False) -> Any:
        fresh = [replica.fresh() for replica in self._replicas]
        counts = self._counts_after_reduce(fresh) if reduced else self.count_fresh(fresh, ignore_stale_grad)
        if not ignore_stale_grad:
            self._refuse_stale(counts)
        chosen = self._wanted(counts)
        self._check_rate(chosen)
        self.follow_weights()
        return chosen, fresh, reduced

    def step(self, choice: Any, into: MetricsBuffer | None, scaler: Any) -> None:
        chosen, fresh, reduced = choice
        used = [chosen] * len(self._replicas) if self.reduces else fresh
        if self.updates:
            total, gradients = self._step_by_store(chosen, fresh, used, into, scaler)
        else:
            total, gradients = self._step_here(chosen, fresh, used, reduced, into, scaler)
        for replica, grads in zip(self._replicas, gradients, strict=True):
            replica.guard.use(grads)
        if scaler is not None:
            scaler.end(total)
        self._reduced = self._summed = None

    @uninterrupted
    def reduce_gradients(self) -> None:
        fresh = [replica.fresh() for replica in self._replicas]
        counts = self.count_fresh(fresh, True)
        self.reduce(self._not_summed(self._wanted(counts)), fresh)
        self._reduced, self._summed = counts, None

    def forget_sums(self) -> None:
        self._reduced = self._summed = None

    def count_fresh(self, fresh: Sequence[Sequence[bool]], ignore_stale_grad: bool = False) -> list[int]:
        """Return for each parameter the number of replicas, in all processes, in which its gradient is fresh.

        Args:
            fresh: for each local replica and parameter whether its gradient has been written since its last use.
            ignore_stale_grad: whether parameters may be fresh in some replicas only.
        """
        return list(map(sum, zip(*fresh, strict=True)))

    def reduce(self, chosen: Sequence[bool], fresh: Sequence[Sequence[bool]]) -> None:
        """Set the gradients of the chosen parameters, in every replica, to the sums of all fresh gradients."""

    def update(self, chosen: Sequence[bool], fresh: Sequence[Sequence[bool]], into: MetricsBuffer | None) -> None:
        """Update the chosen parameters in every replica with the sums of all fresh gradients, which stay as they are.

        If it fails, no weight should have changed. Called only if `updates` is True.

        Args:
            chosen: for each parameter whether it is updated.
            fresh: for each local replica and parameter whether its gradient is fresh.
            into: the buffer for what the updates measure, with a row for each parameter; None to measure nothing. A store
                that updates elsewhere leaves it unchanged.
        """
        raise NotImplementedError

    def end_step(self) -> None:
        """Note that the trainer has updated the local replicas."""

    def _step_by_store(
        self, chosen: list[bool], fresh: Any, used: Any, into: MetricsBuffer | None, scaler: Any
    ) -> tuple[torch.Tensor | None, list[Any]]:
        if scaler is not None:
            scaler.detect_overflow(*self._gradients_of(fresh))
        self.update(chosen, fresh, into)
        gradients = self._gradients_of(used)
        for replica, grads in zip(self._replicas, gradients, strict=True):
            if replica.zero_grads:
                zero(grads)
        return self.total(), gradients

    def _step_here(
        self, chosen: list[bool], fresh: Any, used: Any, reduced: bool, into: MetricsBuffer | None, scaler: Any
    ) -> tuple[torch.Tensor | None, list[Any]]:
        replicas, reducing = self._replicas, False
        undo = [replica.undo() for replica in replicas if replica.plan is None]
        try:
            gradients = self._prepared(used)
            if self.reduces and not reduced:
                unsummed = self._not_summed(chosen)
                reducing = True
                self.reduce(unsummed, fresh)
                gradients = self._prepared(used)
            if scaler is not None:
                scaler.detect_overflow(*gradients, always=not self.reduces)
            update_together(self._optimizer, replicas, gradients, into)
            if self.reduces:
                self.end_step()
        except BaseException:
            for restore in undo:
                restore()
            if reducing:
                self._summed = [replica.marks() for replica in replicas]
            raise
        plan: Any = replicas[0].plan
        return (plan.total() if self.reduces else None), gradients

    def _prepared(self, used: Sequence[Sequence[bool]]) -> list[list[Any]]:
        gradients = self._gradients_of(used)
        for replica, grads in zip(self._replicas, gradients, strict=True):
            (replica.plan or replica.make_plan()).prepare(grads)
        return gradients

    def _gradients_of(self, used: Sequence[Sequence[bool]]) -> list[list[Any]]:
        """Return the present gradients of each replica; None where [replica][parameter] is not `used`."""
        return [replica.gradients(chosen) for replica, chosen in zip(self._replicas, used, strict=True)]

    def _wanted(self, counts: Sequence[int]) -> list[bool]:
        """Return which parameters a step updates, by the number of replicas in which each gradient is fresh."""
        return [param.requires_grad and count > 0 for param, count in zip(self._replicas[0].params, counts, strict=True)]

    def _counts_after_reduce(self, fresh: Sequence[Sequence[bool]]) -> list[int]:
        """Return in how many replicas each gradient was fresh before `reduce_gradients` wrote the sum to all of them."""
        here = list(map(sum, zip(*fresh, strict=True)))
        if self._reduced is None:
            return [count + self.num_replicas - len(fresh) if count else 0 for count in here]
        return [count if now else 0 for count, now in zip(self._reduced, here, strict=True)]

    def _not_summed(self, chosen: Sequence[bool]) -> list[bool]:
        """Return which chosen parameters have gradients that are no sums yet; a step that failed late leaves sums."""
        if self._summed is None:
            return list(chosen)
        marks = list(zip([replica.marks() for replica in self._replicas], self._summed, strict=True))
        return [wanted and any(now[i] != then[i] for now, then in marks) for i, wanted in enumerate(chosen)]

    def _check_rate(self, chosen: Sequence[bool]) -> None:
        """Raise if a scheduler returns an invalid number, before gradients are summed."""
        optimizer = self._optimizer
        if any(chosen) and any(part.lr_scheduler is not None or part._schedules for part in parts_of(optimizer)):
            counts = optimizer.counts
            reached = [counts.get(i, optimizer.begin_num_update) + 1 for i, wanted in enumerate(chosen) if wanted]
            count = max(optimizer.num_update, *reached)
            optimizer.rate_at(count)
            optimizer.scheduled_at(count)


class KVStoreSync(ReplicasSync):
    """The synchronization of replicas in one process through any store, also a user's, which may update the weights.

    The store's keys are the parameters' indices. Each key is pushed with a tensor for each replica: its gradient, or zeros
    if that is not fresh. A store that updates gets the optimizer once; the optimizer's attributes change from step to step.

    Args:
        make: a function that is called when the store is needed, with whether there are sparse gradients; it returns the
            store and whether the store updates the weights.
        replicas: the replicas of the model.
        optimizer: the optimizer that updates the weights.
        compression_params: the compression for the store to use; None for no compression.
        engine: the engine of the store's updates if it stores values on the replicas' device.

    Attributes:
        store: the store, once it is needed.
    """

    reduces = True

    def __init__(
        self,
        make: Callable[[bool], tuple[KVStore, bool]],
        replicas: Sequence[Replica],
        optimizer: Optimizer,
        compression_params: Mapping[str, Any] | None = None,
        engine: str | None = None,
    ) -> None:
        super().__init__(replicas, optimizer)
        self._make, self._engine = make, engine
        self._compression_params = compression_params
        self._control: torch.Tensor | None = None
        # For a store that cannot take new values: the first replica's weights after the last update, to notice changes.
        self._last_weights: list[torch.Tensor] | None = None
        self._lazy = [any(map(is_lazy, params)) for params in zip(*(replica.params for replica in replicas), strict=True)]

    def start(self) -> None:
        _refuse_unequal(self._replicas, self._replicas[0].names, self._lazy)
        sparse = any(is_sparse(param.grad) for replica in self._replicas for param in replica.params)
        store, updates = self._make(sparse)
        if self._control is not None and updates and not self.inside:
            self.updates = True
            super().use_control(self._control)  # raises
        if self._compression_params is not None:
            store.set_gradient_compression(self._compression_params)
        keys = list(range(len(self._replicas[0].names)))
        if updates:  # first, since a store may divide values differently for an optimizer that needs whole tensors
            store.set_optimizer(self._optimizer)
        weights, everywhere = self._replicas[0].weights(), _everywhere(self._replicas, keys)
        if store.takes_lists:
            store.broadcast(keys, weights, everywhere)
        else:
            for key in keys:
                store.broadcast(key, weights[key], everywhere[key])
        self.store, self.updates = store, updates
        if updates and type(store).replace is KVStore.replace:
            self._last_weights = [weight.clone() for weight in weights]

    @torch.no_grad()
    def follow_weights(self) -> None:
        # Writing through `.data` cannot be noticed, so the first replica's weights are copied at each step.
        weights = self._replicas[0].weights()
        if self._last_weights is not None:
            changed = [i for i, differs in enumerate(_differ(weights, self._last_weights)) if differs]
            if changed:
                self._live.replace(changed, [weights[i] for i in changed])  # raises
        elif self.updates:
            self._live.replace(list(range(len(weights))), weights)
        for replica in self._replicas[1:]:
            copy_all(replica.weights(), weights, non_blocking=True)

    def reduce(self, chosen: Sequence[bool], fresh: Sequence[Sequence[bool]]) -> None:
        keys = [i for i, wanted in enumerate(chosen) if wanted]
        pushed = [_values(self._replicas, i, fresh) for i in keys]
        pulled = [
            [_output(replica, i, value) for replica, value in zip(self._replicas, values, strict=True)]
            for i, values in zip(keys, pushed, strict=True)
        ]
        _pushpull(self._live, keys, pushed, pulled)
        for i, outs in zip(keys, pulled, strict=True):
            for replica, out in zip(self._replicas, outs, strict=True):
                if not _is_that(replica.params[i].grad, out):
                    replica.params[i].grad = out

    def update(self, chosen: Sequence[bool], fresh: Sequence[Sequence[bool]], into: MetricsBuffer | None) -> None:
        keys = [i for i, wanted in enumerate(chosen) if wanted]
        pushed = [_values(self._replicas, i, fresh) for i in keys]
        _pushpull(self._live, keys, pushed, _everywhere(self._replicas, keys))
        if self._last_weights is not None:
            torch._foreach_copy_([self._last_weights[i] for i in keys], [self._replicas[0].params[i].detach() for i in keys])

    def use_control(self, control: torch.Tensor) -> None:
        self._refuse_compressed()
        if self.updates and not self.inside:
            super().use_control(control)
        self._control = control

    def check_saves(self) -> None:
        needed = ("save_optimizer_states", "load_optimizer_states") if self.updates else ()
        if missing := [name for name in needed if getattr(type(self.store), name) is getattr(KVStore, name)]:
            raise TypeError(
                f"{type(self.store).__name__} updates, but does not define {' and '.join(missing)}, so its states cannot be "
                "saved: define both, or use update_on_kvstore=False"
            )

    def state_dict(self) -> dict[str, Any]:
        self.check_saves()
        with tempfile.TemporaryDirectory() as folder:  # a user-defined store offers its states only as a file
            path = Path(folder) / "states"
            self._live.save_optimizer_states(path, dump_optimizer=True)
            return renamed(serialization.read(path), self._by_key)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "states"
            serialization.write(path, renamed(state, {name: key for key, name in self._by_key.items()}))
            self._live.load_optimizer_states(path)

    @property
    def _by_key(self) -> dict[str, str]:
        """The parameters' names by the keys that a store uses in its files."""
        return {str(key): name for key, name in enumerate(self._replicas[0].names)}

    @property
    def _live(self) -> KVStore:
        assert self.store is not None
        return self.store


def updates_on_store(
    kvstore: str | KVStore, store: Any, update_on_kvstore: bool | None, sparse: bool = False, largest: int = 0
) -> bool:
    """Return whether the store (`store`, or its class), rather than the trainer, updates the weights.

    `update_on_kvstore` None means the default of the kind of store, unless the environment variable MXNET_UPDATE_ON_KVSTORE
    is 0, which means False. `largest` is the number of elements of the largest parameter.

    Source: MXNet 1.9.1, `gluon.Trainer._init_kvstore` and `model._create_kvstore`.
    """
    capable = store.is_capable("optimizer")
    if store.asynchronous:
        if update_on_kvstore is False:
            raise ValueError(
                f"update_on_kvstore=False with kvstore={kvstore!r}: asynchronous workers have no common gradients, so only "
                "the store can update; leave it out"
            )
        return True
    if update_on_kvstore is not None:
        if update_on_kvstore and not capable:
            raise ValueError(
                f"update_on_kvstore=True with kvstore={kvstore!r}, which cannot hold an optimizer: must be False or None"
            )
        return update_on_kvstore
    if sparse or not capable:
        return store.several_processes and capable
    text = os.environ.get("MXNET_UPDATE_ON_KVSTORE", "1")
    if text not in ("0", "1"):
        raise ValueError(f"environment variable MXNET_UPDATE_ON_KVSTORE={text!r}: must be 0 or 1")
    return text == "1" and not (kvstore == "local" and largest > LARGE)


def _differ(tensors: Sequence[torch.Tensor], other_tensors: Sequence[torch.Tensor]) -> list[bool]:
    """Return for each pair of tensors whether they differ in any bit; equal NaNs do not differ."""
    flags = []
    for tensor, other_tensor in zip(tensors, other_tensors, strict=True):
        if tensor.shape != other_tensor.shape or tensor.dtype != other_tensor.dtype or tensor.device != other_tensor.device:
            flags.append(torch.ones((), dtype=torch.bool))
        else:
            bits = _BITS[tensor.element_size()]
            flags.append((tensor.view(bits) != other_tensor.view(bits)).any())
    return torch.stack([flag.to(flags[0].device) for flag in flags]).tolist()  # waits for the device once


def _refuse_unequal(replicas: Sequence[Replica], names: Sequence[str], lazy: Sequence[bool]) -> None:
    """Raise ValueError if replicas have other weights than the first; lazy parameters get the first replica's instead."""
    first = replicas[0].weights()
    for r, replica in enumerate(replicas[1:], 1):
        weights = [weight.to(model.device) for weight, model in zip(replica.weights(), first, strict=True)]
        differ = zip(names, _differ(weights, first), lazy, strict=True)
        if odd := [repr(name) for name, differs, was_lazy in differ if differs and not was_lazy]:
            raise ValueError(
                f"params[{r}] has other weights than params[0] ({len(odd)} of {len(first)}, such as {odd[0]}), which would "
                "overwrite them: begin with equal replicas, as tristep.replicate(module, devices) or load_state_dict makes "
                "them; for different models make a trainer each"
            )


def _pushpull(
    store: KVStore, keys: Sequence[int], values: Sequence[list[torch.Tensor]], out: Sequence[list[torch.Tensor]]
) -> None:
    if store.takes_lists:
        store.pushpull(keys, values, out=out)
        return
    for key, value, into in zip(keys, values, out, strict=True):
        store.pushpull(key, value, out=into, priority=-key)


def _everywhere(replicas: Sequence[Replica], keys: Sequence[int]) -> list[list[torch.Tensor]]:
    return [[replica.params[key].detach() for replica in replicas] for key in keys]


def _values(replicas: Sequence[Replica], i: int, fresh: Sequence[Sequence[bool]]) -> list[torch.Tensor]:
    """Return what the replicas push for a parameter, fresh gradients or zeros: all dense, or all sparse."""
    gradients: list[Any] = [
        replica.params[i].grad if is_fresh[i] else None for replica, is_fresh in zip(replicas, fresh, strict=True)
    ]
    present: list[torch.Tensor] = [gradient.detach() for gradient in gradients if gradient is not None]
    if not all(map(is_sparse, present)):
        present = [gradient.to_dense() if is_sparse(gradient) else gradient for gradient in present]
    values = iter(present)
    return [
        torch.zeros_like(present[0], device=replica.params[i].device) if gradient is None else next(values)
        for replica, gradient in zip(replicas, gradients, strict=True)
    ]


def _output(replica: Replica, i: int, value: torch.Tensor) -> torch.Tensor:
    """Return the tensor for a sum: the parameter's gradient if it has the layout and dtype of `value`, else `value`."""
    gradient = replica.params[i].grad
    if gradient is None or gradient.layout != value.layout or gradient.dtype != value.dtype:
        return value
    return gradient if is_sparse(gradient) else gradient.detach()


def _is_that(gradient: torch.Tensor | None, out: torch.Tensor) -> bool:
    if gradient is None or gradient.layout != out.layout:
        return False
    return gradient is out if is_sparse(gradient) else gradient.data_ptr() == out.data_ptr()
