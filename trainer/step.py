"""Stepper: the one path of a training step, of any number of replicas and with any gradient synchronization.

With small models its Python is what costs, so that the usual case, one replica whose gradients are all fresh, asks nothing
that it need not ask.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ..kernels.metrics import MetricsBuffer
from .errors import StaleGradientError, UpdateOnKVStoreError
from .kvstore.sync import GradientSync, NoSync
from .optimizer import Optimizer
from .optimizer.multi import parts_of
from .params import check_alike, is_lazy, listed
from .replica import Collected, Replica, update_together

__all__ = ["Choice", "Stepper"]


class Choice(NamedTuple):
    """What a step is to use.

    Attributes:
        collected: the gradients of each replica.
        chosen: for each parameter whether it is updated; None where all are, each replica with all that was collected.
        reduce: whether gradients are yet to be reduced.
    """

    collected: list[Collected]
    chosen: list[bool] | None
    reduce: bool


class Stepper:
    """Steps of a model's replicas.

    Args:
        replicas: in this process, at least one.
        sync: how their gradients, and those of other processes, become one.
        optimizer: what updates them.
        zero_grads: whether updates fill the gradients with zeros.

    Attributes:
        started: whether the synchronization has been started.
    """

    def __init__(self, replicas: Sequence[Replica], sync: GradientSync, optimizer: Optimizer, zero_grads: bool) -> None:
        self.replicas, self.sync = list(replicas), sync
        self._optimizer, self._zero_grads = optimizer, zero_grads
        self._names, self._params = replicas[0].names, replicas[0].params
        self.started = False
        # In how many replicas each gradient was fresh when `allreduce` was called; gradients that are sums already, of a
        # step that failed after that.
        self._reduced: list[int] | None = None
        self._summed: list[list[tuple[int, int]]] | None = None

    @property
    def is_alone(self) -> bool:
        """Whether there is one replica, and no store."""
        return len(self.replicas) == 1 and isinstance(self.sync, NoSync)

    def refuse_together(self, what: str) -> None:
        """An error for what is for one replica without a store, where there are several, or a store."""
        if not self.is_alone:
            raise RuntimeError(
                f"{what} of a trainer with several copies of the model, or a store: it is for one copy without a store; use "
                "step()"
            )

    def start(self, what: str | None = None) -> None:
        """Start the synchronization, once. `what` is what cannot be called where a store updates the weights."""
        if not self.started:
            self.check_initialized()
            self.sync.start()
            self.started = True
        if what is not None and self.sync.updates:
            raise UpdateOnKVStoreError(
                f"{what} where the store updates the weights, which it does with gradients and all in one: call step(), or "
                "make the trainer with update_on_kvstore=False"
            )

    def choose(self, ignore_stale_grad: bool, reduce: bool = True) -> Choice:
        """Which gradients a step uses. An error for stale ones; nothing has been changed then.

        Args:
            ignore_stale_grad: leave parameters without a fresh gradient alone.
            reduce: False where `allreduce` has been called.
        """
        collected = [replica.collect() for replica in self.replicas]
        if self.is_alone and collected[0].versions is not None:
            return Choice(collected, None, reduce)
        fresh = [each.fresh for each in collected]
        counts = self.sync.count_fresh(fresh, ignore_stale_grad) if reduce else self._counts_after_reduce(fresh)
        chosen = self._chosen(counts, collected, ignore_stale_grad)
        if not self.is_alone:
            self._check_rate(chosen)
            self.sync.follow_weights()
        return Choice(collected, chosen, reduce)

    def apply(self, choice: Choice, scaler: Any = None, into: MetricsBuffer | None = None) -> None:
        """Reduce the gradients and update the weights. Where it fails before any weight has changed, so have no states.

        Args:
            choice: what `choose` gave just now.
            scaler: a loss scaler to ask and tell, or None.
            into: where the updates put what they measure.
        """
        replicas, sync, chosen = self.replicas, self.sync, choice.chosen
        undo = [restore for replica in replicas if (restore := replica.undo()) is not None]
        fresh = [each.fresh for each in choice.collected]
        of_replicas = fresh if chosen is None or (len(replicas) > 1 and not sync.reduces) else [chosen] * len(replicas)
        reducing = False
        try:
            if sync.updates:
                gradients = [replica.gradients(own) for replica, own in zip(replicas, fresh, strict=True)]
                if scaler is not None:
                    scaler.look(*gradients)
                sync.update(chosen, fresh, into)  # type: ignore[arg-type]  # only a replica alone has no choice
                total = sync.total()
            else:
                gradients = self._gradients(choice, of_replicas)
                for replica, own in zip(replicas, gradients, strict=True):
                    replica.prepare(own)
                if choice.reduce and sync.reduces:
                    again = self._not_summed(chosen)  # type: ignore[arg-type]  # as above
                    reducing = True
                    sync.reduce(again, fresh)
                    gradients = self._gradients(choice, of_replicas)
                    for replica, own in zip(replicas, gradients, strict=True):
                        replica.prepare(own)
                separate = not sync.reduces and len(replicas) > 1
                if scaler is not None:
                    scaler.look(*gradients, always=separate)
                update_together(self._optimizer, replicas, gradients, into)
                sync.end_step()
                total = None if separate else replicas[0].total()
        except BaseException:
            for restore in undo:
                restore()
            if reducing:
                self._summed = [replica.marks() for replica in replicas]
            raise
        if sync.updates:
            gradients = self._gradients(choice, of_replicas)
            if self._zero_grads:
                for replica, own in zip(replicas, gradients, strict=True):
                    replica.zero(own)
        for replica, collected, own in zip(replicas, choice.collected, gradients, strict=True):
            replica.use(collected if chosen is None and not self._zero_grads else None, own)
        if scaler is not None:
            scaler.end(total)
        self._reduced = self._summed = None

    def allreduce(self) -> None:
        """Replace the gradients by their sums over all replicas."""
        fresh = [replica.collect().fresh for replica in self.replicas]
        counts = self.sync.count_fresh(fresh, True)
        chosen = [param.requires_grad and count > 0 for param, count in zip(self._params, counts, strict=True)]
        self.sync.reduce(self._not_summed(chosen), fresh)
        self._reduced, self._summed = counts, None

    def zero_grad(self, set_to_none: bool) -> None:
        """Forget gradients, or fill them with zeros, which makes none fresh."""
        self._reduced = self._summed = None
        for replica in self.replicas:
            replica.zero_grad(set_to_none)

    def forget_plans(self) -> None:
        """Make the plans again, after states or rules have been replaced."""
        for replica in self.replicas:
            replica.forget_plan()

    def check_initialized(self) -> None:
        """Refuse lazy parameters that have not been initialized."""
        for r, replica in enumerate(self.replicas):
            where = "params" if len(self.replicas) == 1 else f"params[{r}]"
            lazy = [repr(name) for name, parameter in zip(self._names, replica.params, strict=True) if is_lazy(parameter)]
            if lazy:
                raise ValueError(f"{listed(lazy)} of {where} not initialized yet: run the model once before the first step")
            if r > 0:
                check_alike(r, self._names, replica.params, self._params)

    def _gradients(self, choice: Choice, of_replicas: Sequence[Sequence[bool]]) -> list[Any]:
        """The gradients to use, of each replica, as they are now."""
        if choice.chosen is None:
            return [each.gradients for each in choice.collected]
        return [replica.gradients(own) for replica, own in zip(self.replicas, of_replicas, strict=True)]

    def _chosen(self, counts: Sequence[int], collected: Sequence[Collected], ignore_stale_grad: bool) -> list[bool]:
        """Which parameters to update, by in how many replicas each is fresh; an error for stale ones."""
        n, gradients = self.sync.num_replicas, collected[0].gradients
        if not ignore_stale_grad:
            stale = []
            for name, param, gradient, count in zip(self._names, self._params, gradients, counts, strict=True):
                if param.requires_grad and count < n:
                    missing = " (no gradient)" if gradient is None and n == 1 else ""
                    stale.append(f"{name!r}" + (f" (fresh in {count} of {n} copies)" if count else missing))
            if stale:
                raise StaleGradientError(
                    f"no fresh gradient since the last step for {listed(stale)}: call backward() on a loss that depends on "
                    "them before step(), or use step(batch_size, ignore_stale_grad=True) to leave such parameters as they "
                    "are"
                )
        return [param.requires_grad and count > 0 for param, count in zip(self._params, counts, strict=True)]

    def _counts_after_reduce(self, fresh: Sequence[Sequence[bool]]) -> list[int]:
        """In how many replicas each gradient is fresh, where a sum has made it so in all."""
        here = list(map(sum, zip(*fresh, strict=True)))
        if self.is_alone:
            return here
        if self._reduced is None:
            return [count + self.sync.num_replicas - len(fresh) if count else 0 for count in here]
        return [count if now else 0 for count, now in zip(self._reduced, here, strict=True)]

    def _not_summed(self, chosen: Sequence[bool]) -> list[bool]:
        """Of the chosen parameters those whose gradients are not sums already, from a step that failed after that."""
        if self._summed is None:
            return list(chosen)
        now = [replica.marks() for replica in self.replicas]
        same = [all(own[i] == then[i] for own, then in zip(now, self._summed, strict=True)) for i in range(len(chosen))]
        return [wanted and not done for wanted, done in zip(chosen, same, strict=True)]

    def _check_rate(self, chosen: Sequence[bool]) -> None:
        """A learning rate that is not valid must be detected before gradients are summed up."""
        optimizer = self._optimizer
        if any(chosen) and any(part.lr_scheduler is not None for part in parts_of(optimizer)):
            counts = optimizer.counts
            reached = [counts.get(i, optimizer.begin_num_update) + 1 for i, wanted in enumerate(chosen) if wanted]
            optimizer.rate_at(max(optimizer.num_update, *reached))
