"""The values and the optimizer of one server, without any network: each worker's push is applied at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ...trainer import checkpoint
from ...trainer.kvstore.base import Key, known_value, optimizer_updater, same_shapes
from ...trainer.kvstore.partition import can_cut
from ...trainer.optimizer import Optimizer, RuleOptimizer, Updater
from ...trainer.optimizer.plan import Plan
from ...trainer.optimizer.settings import check_settings
from ...trainer.validation import number

_MOST_PLANS = 32


@dataclass
class _Worker:
    """What the server knows of a worker.

    Attributes:
        rescale_grad: its own; None: the optimizer's.
        pulled: the count of updates of each key at its last pull.
        weights: by key those that its next gradients are of, where the optimizer asks for them. If it has not pulled yet,
            they are the ones of the time at which the optimizer came.
        delays: how often its gradient of a key was so many updates behind.
    """

    rescale_grad: float | None = None
    pulled: dict[Key, int] = field(default_factory=dict)
    weights: dict[Key, torch.Tensor] = field(default_factory=dict)
    delays: Counter[int] = field(default_factory=Counter)


class ServerCore:
    """Values by key, an updater, and what each worker has pulled.

    Args:
        workers: how many there are; they are numbered from 0.
        device: where values are kept and updated.
        servers: how many there are in all.

    Attributes:
        values: by key.
    """

    def __init__(self, workers: int, device: torch.device | str = "cpu", servers: int = 1) -> None:
        self.device = torch.device(device)
        self.values: dict[Key, torch.Tensor] = {}
        self._servers = servers
        self._cut: set[Key] = set()
        self._updates = Counter[Key]()  # of each key
        self._updater: Callable[..., None] | None = None
        self._plans: dict[tuple[Key, ...], Plan] = {}
        self._rule: Any = None
        self._workers = [_Worker() for _ in range(workers)]

    @property
    def num_update(self) -> int:
        """The optimizer's count of updates; 0 if there is none."""
        return self._updater.optimizer.num_update if isinstance(self._updater, Updater) else 0

    def init(self, values: Mapping[Key, torch.Tensor], cut: Collection[Key] = ()) -> None:
        """Begin with copies of these; those of the keys in `cut` are parts of arrays.

        Raises:
            ValueError: a key is there already, or the optimizer needs a cut one whole; nothing has been changed.
        """
        for key in values:
            if key in self.values:
                raise ValueError(f"key {key!r} has been initialized already: init takes each key once")
        if self._updater is not None:
            check_fits(getattr(self._updater, "optimizer", self._updater), cut, self._servers)
        self._cut.update(cut)
        for key, value in values.items():
            self.values[key] = torch.empty(value.shape, dtype=value.dtype, device=self.device).copy_(value)
        self._keep_weights(values)

    def use(self, updater: Optimizer | Callable[[Key, torch.Tensor, torch.Tensor], None]) -> None:
        """Let this optimizer, with states of its own, or this function `(key, pushed, stored)` update values from now on.

        Raises:
            ValueError: it needs whole what it would get in parts; nothing has been changed.
        """
        check_fits(updater, self._cut, self._servers)
        self._updater = Updater(updater) if isinstance(updater, Optimizer) else updater
        self._plans, self._rule = {}, None
        for worker in self._workers:
            worker.rescale_grad, worker.weights = None, {}
        self._keep_weights(self.values)

    def change(self, worker: int, changes: Mapping[str, Any]) -> None:
        """What this worker has changed of its optimizer since it was last told.

        All of it counts for all workers from then on; but its `rescale_grad`, which follows from the size of its batches,
        counts for its own pushes alone.

        Args:
            worker: its number.
            changes: any of "settings" (by attribute), "lr_scheduler", and "multipliers" (lr_mult and wd_mult by key).

        Raises:
            RuntimeError: there is no optimizer.
            ValueError, TypeError: a setting that the optimizer does not have or its constructor would refuse, or another
                value that does not fit; nothing has been changed.
        """
        optimizer = optimizer_updater(self._updater).optimizer
        settings = dict(changes.get("settings", {}))
        if unknown := set(settings) - set(optimizer.settings()):
            raise ValueError(f"{type(optimizer).__name__} has no settings {sorted(map(str, unknown))}")
        check_settings(optimizer, settings)
        lr_scheduler = changes.get("lr_scheduler")
        if lr_scheduler is not None and not callable(lr_scheduler):
            raise TypeError(f"lr_scheduler={lr_scheduler!r}: must be a schedule or None")
        multipliers = {
            key: (number(f"lr_mult of key {key!r}", lr_mult, low=0), number(f"wd_mult of key {key!r}", wd_mult, low=0))
            for key, (lr_mult, wd_mult) in changes.get("multipliers", {}).items()
        }
        if "rescale_grad" in settings:
            self._workers[worker].rescale_grad = settings.pop("rescale_grad")
        optimizer.set_together(settings)
        if "lr_scheduler" in changes:
            optimizer.lr_scheduler = lr_scheduler
        for key, (lr_mult, wd_mult) in multipliers.items():
            optimizer.lr_mult[key], optimizer.wd_mult[key] = lr_mult, wd_mult

    @torch.no_grad()
    def push(self, worker: int, keys: Sequence[Key], grads: Sequence[torch.Tensor]) -> None:
        """Update the values of these keys with the gradients of a worker, at once.

        Raises:
            RuntimeError: there is no updater.
            ValueError, TypeError: a key or gradient that does not fit; nothing has been changed.
        """
        if self._updater is None:
            raise RuntimeError("nothing says what a push does to the stored values: call set_optimizer() before push()")
        weights, known = self.values_of(keys), self._workers[worker]
        for key, grad, weight in zip(keys, grads, weights, strict=True):
            same_shapes(key, [grad], weight, "value")
        if self.device.type != "cpu":
            grads = [grad.to(self.device) for grad in grads]
        if isinstance(self._updater, Updater):
            self._update(self._updater, known, tuple(keys), grads, weights)
        else:
            for key, grad, weight in zip(keys, grads, weights, strict=True):
                self._updater(key, grad, weight)
        known.delays.update([self._updates[key] - known.pulled.get(key, 0) for key in keys])
        self._updates.update(keys)

    @torch.no_grad()
    def pull(self, worker: int, keys: Sequence[Key], out: Sequence[torch.Tensor]) -> None:
        """Copy the values of these keys to `out`, for a worker that computes its next gradients with them.

        Where the optimizer asks for the weights of the gradient, `out` is kept, unless it is on another device: it must not
        be written to until the worker has pulled again.
        """
        values = self.values_of(keys)
        if values:
            torch._foreach_copy_(list(out), values)
        known = self._workers[worker]
        known.pulled.update((key, self._updates[key]) for key in keys)
        if self.keeps_pulled:
            kept = out if self.device.type == "cpu" else [value.clone() for value in values]
            known.weights.update(zip(keys, kept, strict=True))

    def values_of(self, keys: Sequence[Key]) -> list[torch.Tensor]:
        """The values of these keys themselves, which the next push may change.

        Raises:
            ValueError: there is no such key.
        """
        return [known_value(key, self.values) for key in keys]

    @property
    def keeps_pulled(self) -> bool:
        """Whether the optimizer asks for the weights that a worker computed its gradient with."""
        optimizer = getattr(self._updater, "optimizer", None)
        return isinstance(optimizer, RuleOptimizer) and optimizer.weight_of_gradient is not None

    def delays(self) -> list[Counter[int]]:
        """For each worker, how often its gradient of a key was so many updates behind."""
        return [Counter(worker.delays) for worker in self._workers]

    def states(self) -> dict[str, Any]:
        """As `checkpoint.collect`, with a state for every key.

        Raises:
            RuntimeError: there is no optimizer.
        """
        updater, keys = optimizer_updater(self._updater), list(self.values)
        if new := [key for key in keys if key not in updater.state]:
            updater.make_plan(new, [self.values[key] for key in new])
        return checkpoint.collect(updater, [str(key) for key in keys], list(self.values.values()), keys)

    def load_states(self, saved: Mapping[str, Any]) -> None:
        """Load what `states` returned; the worker's own rescaling stays.

        Raises:
            RuntimeError: there is no optimizer.
            ValueError, TypeError: it does not fit; nothing has been changed.
        """
        updater, keys = optimizer_updater(self._updater), list(self.values)
        rescale_grad = updater.optimizer.rescale_grad
        checkpoint.restore(updater, [str(key) for key in keys], list(self.values.values()), saved, keys)
        updater.optimizer.rescale_grad = rescale_grad
        self._plans = {}

    def _keep_weights(self, keys: Iterable[Key]) -> None:
        """Keep these weights as they are now, for all workers, if the optimizer asks for them."""
        for key in keys if self.keeps_pulled else ():
            weight = self.values[key].clone()
            for worker in self._workers:
                worker.weights[key] = weight

    def _update(
        self,
        updater: Updater,
        known: _Worker,
        keys: tuple[Key, ...],
        grads: Sequence[torch.Tensor],
        weights: list[torch.Tensor],
    ) -> None:
        optimizer = updater.optimizer
        if isinstance(optimizer, RuleOptimizer) and optimizer.composed_rule is not self._rule:
            check_fits(optimizer, self._cut, self._servers)  # an option may have been changed
            self._plans, self._rule = {}, optimizer.composed_rule  # the states may be others
        plan = self._plans.get(keys)
        if plan is None:
            if len(self._plans) >= _MOST_PLANS:
                self._plans = {}
            plan = self._plans[keys] = updater.make_plan(keys, weights)
        if self.keeps_pulled:
            slot = optimizer.weight_of_gradient  # type: ignore[attr-defined]
            pulled = [known.weights[key] for key in keys]
            torch._foreach_copy_([updater.state[key][slot] for key in keys], pulled)
        default = optimizer.rescale_grad
        optimizer.rescale_grad = default if known.rescale_grad is None else known.rescale_grad
        try:
            plan.step(list(grads))
        finally:
            optimizer.rescale_grad = default


def takes_parts(optimizer: Any) -> bool:
    """Whether an optimizer updates a part of a weight as it would within the whole."""
    if not can_cut(optimizer) or optimizer.rounding is not None:  # random numbers go by the place in the tensor
        return False
    rule = optimizer.composed_rule
    return not (rule.knows_total or rule.reductions or rule.kept)


def check_fits(updater: Any, cut: Collection[Key], servers: int) -> None:
    """An error if an optimizer, or a function, needs whole what it would get in parts on each of these servers."""
    if cut and not takes_parts(updater):
        name = type(updater).__name__ if isinstance(updater, Optimizer) else "an updater"
        raise ValueError(
            f"{name} needs arrays whole, and key {next(iter(cut))!r} is cut over {servers} servers: let rank 0 set it "
            "before init(), or raise MXNET_KVSTORE_BIGARRAY_BOUND"
        )
    if servers > 1 and isinstance(updater, RuleOptimizer) and getattr(updater.composed_rule, "knows_total", False):
        raise ValueError(
            f"{updater!r} needs the gradients of a step together (clip_norm, zclip, skip_norm, skip_percentile, "
            f"skip_nonfinite), and each of {servers} servers has some of them: leave these out, or use one server "
            "(TRISTEP_NUM_SERVERS=1)"
        )
