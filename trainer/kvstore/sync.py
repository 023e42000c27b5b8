"""GradientSync: what happens to gradients between the backward pass and the update; in one process, or through a store."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

from ...kernels.guards import copy_all
from ...kernels.metrics import MetricsBuffer
from .. import checkpoint
from ..optimizer import Optimizer
from ..optimizer.sparse import is_sparse
from ..params import is_lazy
from ..replica import Replica
from .base import KVStore, renamed

Residuals = dict[str, dict[str, torch.Tensor]]  # by parameter and by source
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # integers by size in bytes
LARGE = 16 * 2**20  # elements; a parameter of more is not updated by a local store


class GradientSync:
    """How replicas of a model, in this process and in others, train as one; this one leaves each to its own gradients.

    A step of the trainer is the following, in this order and in one thread. All processes come to the same calls, since what
    decides about them is the same in all; but one in which a gradient does not fit its weight raises an error before 4.,
    which the others learn of by their time limit.

    1. `start()`, once, and never before the first step, `allreduce_grads`, `update`, or saving or loading of states.
       All parameters exist then.
    2. `count_fresh(fresh)`. Where a parameter that is trained (`requires_grad` of the first replica) is fresh in fewer than
       `num_replicas` replicas, StaleGradientError follows, and nothing else; with ignore_stale_grad=True parameters are
       chosen that are fresh in any replica, so that all processes choose the same.
    3. `follow_weights()`. The optimizer's `rescale_grad` is set for this step. All its attributes are live: learning rate,
       schedule, decay and multipliers may be others at every step; where updates happen elsewhere, they are sent there.
    4. Where it `updates`: `update(chosen, fresh, into)`. Otherwise `reduce(chosen, fresh)`, after which `parameter.grad` of
       every chosen parameter in every replica here is the sum over all replicas, in place, or a view of a larger tensor;
       then the trainer updates the replicas here with these, and calls `end_step()`.

    `allreduce_grads()` of the trainer is 1, 2 without the error, and `reduce`; `update()` is 3 and the update alone. When a
    step that has failed after `reduce` is repeated, that is called without the parameters whose gradients are sums already.

    Gradients that were added up by several backward passes are reduced as they are. One that starts to reduce while backward
    runs has to wait with that in `accumulate()`. It may know better than `fresh` which gradients are fresh, from hooks,
    and ignore that argument.

    Attributes:
        updates: whether it updates the weights of all replicas itself (update_on_kvstore); valid after `start`. Then it has
            the states, and `state_dict` gives them.
        reduces: whether replicas have common gradients. Without, each is updated with its own.
        num_replicas: how many replicas there are in all processes; valid after `start`.
        writes: whether this process is the one that writes files of states; all get what is in them.
        reports_metrics: whether updates can tell what they do to each parameter.
        in_step: whether it is of synchronous processes, whose group of torch.distributed is `group`.
        store: what the replicas meet in, once it is needed; None: nothing.
    """

    updates: bool = False
    reduces: bool = False
    num_replicas: int = 1
    writes: bool = True
    reports_metrics: bool = True
    in_step: bool = False
    group: Any = None
    store: KVStore | None = None
    _compression_params: Mapping[str, Any] | None = None

    def __init__(self, num_replicas: int = 1) -> None:
        self.num_replicas = num_replicas

    def start(self) -> None:
        """Give every replica the first one's weights, in place. Raises where the store cannot do what is asked of it."""

    def count_fresh(self, fresh: Sequence[Sequence[bool]], ignore_stale_grad: bool = False) -> list[int]:
        """Of each parameter in how many replicas it is fresh. No weight is changed.

        Args:
            fresh: by replica in this process and by parameter, whether its gradient has been written to since it was used.
            ignore_stale_grad: whether a parameter that is not fresh in some replicas is no error.
        """
        return list(map(sum, zip(*fresh, strict=True)))

    def follow_weights(self) -> None:
        """Let the weights of the first replica here be those of all: anybody may have written to them since the last step.

        Raises:
            RuntimeError: they have been changed where a store cannot take others; nothing has been changed.
        """

    def reduce(self, chosen: Sequence[bool], fresh: Sequence[Sequence[bool]]) -> None:
        """Make the gradients of the chosen parameters the sums of all fresh ones, in every replica."""

    def update(self, chosen: Sequence[bool], fresh: Sequence[Sequence[bool]], into: MetricsBuffer | None) -> None:
        """Update the chosen parameters in every replica with the sums of all fresh gradients, which stay as they are.

        Where it fails, no weight has changed, if it is in its power. `into` is where the updates are to put what they
        measure, in rows by index of parameter; what is updated elsewhere leaves it.
        """
        raise NotImplementedError

    def end_step(self) -> None:
        """The trainer has updated the replicas here."""

    def accumulate(self) -> AbstractContextManager[None]:
        """A context in which backward passes are only to add up gradients, with nothing sent."""
        return nullcontext()

    def use_control(self, control: torch.Tensor) -> None:
        """Take a loss scaler's control for updates from now on, as `Updater.control`; where the trainer updates, nothing.

        Raises:
            RuntimeError: it cannot do so; nothing has been changed.
        """
        if self.updates:
            raise RuntimeError("a loss scaler with a store that updates elsewhere: use update_on_kvstore=False")

    def _refuse_compressed(self) -> None:
        if self._compression_params is not None:
            raise RuntimeError(
                "a loss scaler with compression_params: what an overflow leaves in the residuals never goes away; leave one "
                "of them out"
            )

    def total(self) -> torch.Tensor | None:
        """Where it updates, `Updater.total()` of the last update, the same in all processes."""
        return None

    def state_dict(self) -> dict[str, Any] | None:
        """Where it updates, what `checkpoint.collect` gives, of whole parameters by their names; otherwise None."""
        return None

    def end_save(self) -> None:
        """The process that writes has written a file of states: let the others wait for that."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Where it updates, take that over, as `checkpoint.restore` does, with all checks first."""
        raise NotImplementedError

    def masters(self, new: Mapping[int, torch.Tensor] | None = None) -> Mapping[Any, torch.Tensor]:
        """Where it updates, the masters of whole parameters, by index; with `new` these are replaced first, and returned.

        Before the first step there are none, but for new ones.

        Raises:
            RuntimeError: they are elsewhere; nothing has been changed.
        """
        raise RuntimeError(
            "the store updates the weights elsewhere, where their masters are: float32 weights can be had and loaded with "
            "update_on_kvstore=False, or with a store that updates in this process, such as 'device' or 'dist_sync'"
        )

    def residuals(self) -> Residuals:
        """What compression has kept back, of whole parameters, by name and source."""
        return {}

    def load_residuals(self, saved: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Take that over; if there are other sources than here, their sum. Those that are not saved become 0."""

    def apply(self, rule: Any, hyper: Mapping[str, float], indices: Collection[int]) -> None:
        """Where it updates, `Updater.apply` with its states, to the weights of all replicas, of the parameters `indices`.

        Raises:
            RuntimeError: the states are elsewhere; nothing has been changed.
        """
        raise RuntimeError("the store keeps the states elsewhere: averaged weights need update_on_kvstore=False")


class KVStoreSync(GradientSync):
    """Replicas in one process with a store, which sums their gradients and may update the weights; any store, also a user's.

    Keys are the parameters' indices. Each comes with one tensor for each replica, of zeros where that has no fresh gradient.
    A store that updates is given the optimizer once; its attributes change from step to step.

    Args:
        make: makes the store, or gives one, when it is needed, and decides whether it updates the weights; called with
            whether there are sparse gradients.
        replicas: of the model.
        optimizer: what is to update the weights.
        compression_params: for the store; None compresses nothing.
        engine: who computes the store's updates, where that is where the replicas are.

    Attributes:
        store: what the replicas meet in, once it is needed.
        inside: whether its optimizer and what it stores are in this process, for a subclass to use.
    """

    reduces = True
    inside = False

    def __init__(
        self,
        make: Callable[[bool], tuple[KVStore, bool]],
        replicas: Sequence[Replica],
        optimizer: Optimizer,
        compression_params: Mapping[str, Any] | None = None,
        engine: str | None = None,
    ) -> None:
        self.num_replicas = len(replicas)
        self._make, self._engine = make, engine
        self._replicas, self._optimizer = list(replicas), optimizer
        self._compression_params = compression_params
        self._control: torch.Tensor | None = None
        # The first replica's weights as a store last gave them that takes no others; to notice those.
        self._given: list[torch.Tensor] | None = None
        self._lazy = [any(map(is_lazy, params)) for params in zip(*(replica.params for replica in replicas), strict=True)]

    def start(self) -> None:
        _refuse_unequal(self._replicas, self._replicas[0].names, self._lazy)
        sparse = any(is_sparse(param.grad) for replica in self._replicas for param in replica.params)
        store, updates = self._make(sparse)
        if self._control is not None and updates and not self.inside:
            self.updates = True
            super().use_control(self._control)  # which refuses
        if self._compression_params is not None:
            store.set_gradient_compression(self._compression_params)
        keys = list(range(len(self._replicas[0].names)))
        if updates:  # first, since a store may keep values otherwise for an optimizer that looks at whole tensors
            store.set_optimizer(self._optimizer)
        weights, everywhere = self._replicas[0].weights(), _everywhere(self._replicas, keys)
        if store.takes_lists:
            store.broadcast(keys, weights, everywhere)
        else:
            for key in keys:
                store.broadcast(key, weights[key], everywhere[key])
        self.store, self.updates = store, updates
        if updates and type(store).replace is KVStore.replace:
            self._given = [weight.clone() for weight in weights]

    @torch.no_grad()
    def follow_weights(self) -> None:
        # Nothing tells of writing through `.data`, so that weights are taken from the first replica at each step.
        weights = self._replicas[0].weights()
        if self._given is not None:
            changed = [i for i, differs in enumerate(_differ(weights, self._given)) if differs]
            if changed:
                self._live.replace(changed, [weights[i] for i in changed])  # which refuses
        elif self.updates:
            self._live.replace(list(range(len(weights))), weights)
        for replica in self._replicas[1:]:
            copy_all(replica.weights(), weights, non_blocking=True)

    def reduce(self, chosen: Sequence[bool], fresh: Sequence[Sequence[bool]]) -> None:
        keys = [i for i, wanted in enumerate(chosen) if wanted]
        pushed = [_values(self._replicas, i, fresh) for i in keys]
        pulled = [
            [_own(replica, i, value) for replica, value in zip(self._replicas, values, strict=True)]
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
        if self._given is not None:
            torch._foreach_copy_([self._given[i] for i in keys], [self._replicas[0].params[i].detach() for i in keys])

    def use_control(self, control: torch.Tensor) -> None:
        self._refuse_compressed()
        if self.updates and not self.inside:
            super().use_control(control)
        self._control = control

    def state_dict(self) -> dict[str, Any] | None:
        if not self.updates:
            return None
        with tempfile.TemporaryDirectory() as folder:  # all that a user-defined store has for its states
            path = Path(folder) / "states"
            self._live.save_optimizer_states(path, dump_optimizer=True)
            return renamed(checkpoint.read(path), self._by_key)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "states"
            checkpoint.write(path, renamed(state, {name: key for key, name in self._by_key.items()}))
            self._live.load_optimizer_states(path)

    @property
    def _by_key(self) -> dict[str, str]:
        """The parameters' names by what files of a store call them."""
        return {str(key): name for key, name in enumerate(self._replicas[0].names)}

    @property
    def _live(self) -> KVStore:
        assert self.store is not None
        return self.store


def updates_on_store(
    kvstore: str | KVStore, capable: bool, update_on_kvstore: bool | None, sparse: bool = False, largest: int = 0
) -> bool:
    """Whether a store that there is updates the weights.

    Args:
        kvstore: what the user asked for: a name in lower case, or the store itself.
        capable: whether it can update what it stores.
        update_on_kvstore: what the user says; None leaves it to the environment variable MXNET_UPDATE_ON_KVSTORE (0 says
            no), and that to what is best for the kind of store.
        sparse: whether there are sparse gradients.
        largest: the number of elements of the largest parameter.

    Raises:
        ValueError: the store cannot do what the user says.

    Source: MXNet 1.9.1, `gluon.Trainer._init_kvstore` and `model._create_kvstore`.
    """
    kind = kvstore if isinstance(kvstore, str) else kvstore.type
    if "dist" in kind and "async" in kind:
        if update_on_kvstore is False:
            raise ValueError(
                f"update_on_kvstore=False with kvstore={kind!r}: without waiting for each other workers have no common "
                "gradients, so only the store can update; leave it out"
            )
        return True
    if update_on_kvstore is not None:
        if update_on_kvstore and not capable:
            raise ValueError(
                f"update_on_kvstore=True with kvstore={kvstore!r}, which cannot hold an optimizer: must be False or None"
            )
        return update_on_kvstore
    if sparse or not capable:
        return "dist" in kind and capable
    text = os.environ.get("MXNET_UPDATE_ON_KVSTORE", "1")
    if text not in ("0", "1"):
        raise ValueError(f"environment variable MXNET_UPDATE_ON_KVSTORE={text!r}: must be 0 or 1")
    return text == "1" and not (kvstore == "local" and largest > LARGE)


def _differ(tensors: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> list[bool]:
    """Whether each differs from the other in a bit. A NaN is equal to itself."""
    found = []
    for tensor, other in zip(tensors, others, strict=True):
        if tensor.shape != other.shape or tensor.dtype != other.dtype or tensor.device != other.device:
            found.append(torch.ones((), dtype=torch.bool))
        else:
            bits = _BITS[tensor.element_size()]
            found.append((tensor.view(bits) != other.view(bits)).any())
    return torch.stack([each.to(found[0].device) for each in found]).tolist()  # waits for the device once


def _refuse_unequal(replicas: Sequence[Replica], names: Sequence[str], lazy: Sequence[bool]) -> None:
    """Replicas that came with weights have equal ones; lazy ones get the first replica's."""
    first = replicas[0].weights()
    for r, replica in enumerate(replicas[1:], 1):
        weights = [weight.to(model.device) for weight, model in zip(replica.weights(), first, strict=True)]
        differ = zip(names, _differ(weights, first), lazy, strict=True)
        if odd := [repr(name) for name, differs, was_lazy in differ if differs and not was_lazy]:
            raise ValueError(
                f"params[{r}] has other weights than params[0] ({len(odd)} of {len(first)}, such as {odd[0]}); "
                "they would be overwritten: replicas of a model begin with equal weights, as tristep.replicate(module, "
                "devices) or load_state_dict gives them; different models need a trainer each"
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
    """The weights of these keys in all replicas."""
    return [[replica.params[key].detach() for replica in replicas] for key in keys]


def _values(replicas: Sequence[Replica], i: int, fresh: Sequence[Sequence[bool]]) -> list[torch.Tensor]:
    """What the replicas have to push for a parameter: all dense, or all sparse."""
    found: list[Any] = [replica.params[i].grad if own[i] else None for replica, own in zip(replicas, fresh, strict=True)]
    there: list[torch.Tensor] = [gradient.detach() for gradient in found if gradient is not None]
    if not all(map(is_sparse, there)):
        there = [gradient.to_dense() if is_sparse(gradient) else gradient for gradient in there]
    values = iter(there)
    return [
        torch.zeros_like(there[0], device=replica.params[i].device) if gradient is None else next(values)
        for replica, gradient in zip(replicas, found, strict=True)
    ]


def _own(replica: Replica, i: int, value: torch.Tensor) -> torch.Tensor:
    """Where a sum is to go: the parameter's gradient, if it is of the kind of what was pushed, else that."""
    gradient = replica.params[i].grad
    if gradient is None or gradient.layout != value.layout or gradient.dtype != value.dtype:
        return value
    return gradient if is_sparse(gradient) else gradient.detach()


def _is_that(gradient: torch.Tensor | None, out: torch.Tensor) -> bool:
    if gradient is None or gradient.layout != out.layout:
        return False
    return gradient is out if is_sparse(gradient) else gradient.data_ptr() == out.data_ptr()
