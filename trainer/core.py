"""TrainerCore: what a `Trainer` is made of, and its path of a step."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from ..kernels.backends import choose_engine
from ..kernels.graphs import Recording
from .accumulation import AccumulationWatch
from .ascent import refuse_written
from .capture import record_step
from .displaced import DisplacedWeights
from .in_backward import BackwardStep, check_optimizer
from .interrupts import uninterrupted
from .kvstore import KVStore
from .kvstore.create import check_one_reduces, check_store, sync_for
from .kvstore.sync import GradientSync, KVStoreSync, NoSync
from .optimizer import MultiOptimizer, Optimizer, Updater, create
from .optimizer.patterns import layers_of
from .params import check_distinct, check_parameters, gluons_order, modules_of, named_parameters, replica_of
from .replica import Replica
from .step import Stepper
from .telemetry import Telemetry, attached
from .validation import boolean, number

__all__ = ["TrainerCore"]


class TrainerCore:
    """The parts of a `Trainer`, whose arguments these are: replicas, optimizer, stepper, and what it remembers of steps."""

    def __init__(
        self,
        params: torch.nn.Module | Iterable[Any] | Mapping[str, torch.nn.Parameter] | Sequence[torch.nn.Module],
        optimizer: str | Optimizer | Sequence[Sequence[Any]],
        optimizer_params: Mapping[str, Any] | Iterable[tuple[str, Any]] | None = None,
        kvstore: str | KVStore | None = "device",
        compression_params: Mapping[str, Any] | None = None,
        update_on_kvstore: bool | None = None,
        *,
        engine: str | None = None,
        telemetry: Telemetry | bool | None = None,
        zero_grads: bool = False,
    ) -> None:
        zero_grads = boolean("zero_grads", zero_grads)
        self._reduced_by_torch = isinstance(params, DistributedDataParallel)
        if self._reduced_by_torch:
            check_one_reduces(kvstore)
        modules = modules_of(params)
        named = named_parameters(modules[0] if modules else params)
        check_parameters(named)
        replicas = [[parameter for _, parameter, _ in named]]
        replicas += [replica_of(r, modules[r], named) for r in range(1, len(modules))]
        check_distinct(replicas)
        kvstore = check_store(kvstore, compression_params, update_on_kvstore, len(replicas))
        for parameters in replicas:
            choose_engine(parameters[0].device, engine)
        self._optimizer = _make_optimizer(optimizer, optimizer_params)
        if isinstance(params, torch.nn.Module) or modules:
            order = gluons_order(named, self._optimizer)
            named, replicas = [named[i] for i in order], [[parameters[i] for i in order] for parameters in replicas]
        if isinstance(self._optimizer, MultiOptimizer):
            model = modules[0] if modules else params
            self._optimizer.layers = layers_of(model) if isinstance(model, torch.nn.Module) else None
        self._optimizer.use_parameters(replicas[0], [name for name, _, _ in named])
        for _, parameter, own in named:
            for multiplier, value in own.items():
                setattr(parameter, multiplier, value)
        self._names = [name for name, _, _ in named]
        self._params = replicas[0]
        self._scale = self._optimizer.rescale_grad
        self._updater = Updater(self._optimizer, engine)
        self._zero_grads = zero_grads
        self._loss_scaler: Any = None  # amp.py puts one here
        self._backward: BackwardStep | None = None
        self._watch = AccumulationWatch(self._params)
        self._ascended: DisplacedWeights | None = None  # between `ascend` and the next step
        self._averaging = False  # whether the weights are those of `averaged_weights` now
        self._replaced = False  # whether another trainer has taken the optimizer over
        models = [Replica(self._params, self._names, self._updater, zero_grads)]
        models += [Replica(each, self._names, Updater(self._optimizer, engine), zero_grads) for each in replicas[1:]]
        self._updater.be_that_of(self._optimizer)  # and not the last replica's
        stores = kvstore, models, self._names, self._optimizer, compression_params, update_on_kvstore, engine
        self._stepper = Stepper(models, sync_for(*stores), self._optimizer, zero_grads)
        self.telemetry = telemetry
        _adopt(self._optimizer, self)

    @property
    def telemetry(self) -> Telemetry | None:
        """What records the steps, or None."""
        return self._telemetry

    @telemetry.setter
    def telemetry(self, telemetry: Telemetry | bool | None) -> None:
        self._telemetry = attached(telemetry, self._optimizer, self._sync.reports_metrics, self._names, self._params)

    @property
    def _sync(self) -> GradientSync:
        return self._stepper.sync

    @property
    def _kv_initialized(self) -> bool:
        """Whether the store is there, if one is needed, under the name that tools for MXNet's Trainer read it by."""
        return self._stepper.started

    def _init_kvstore(self) -> None:
        """Make the store, which the first step does otherwise, as tools for MXNet ask for."""
        self._stepper.start()

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles: all but what the next step creates again. A copy's parameters have no gradients yet."""
        if not self._stepper.is_alone:
            raise TypeError(
                "a Trainer of several copies of a model, or with a store, cannot be copied or pickled: use state_dict()"
            )
        if self._averaging or (self._backward is not None and self._backward.is_open):
            raise RuntimeError("a Trainer cannot be copied inside averaged_weights() or step_in_backward(): leave it first")
        without = {k: v for k, v in vars(self).items() if k != "_stepper"}
        before = None if self._ascended is None else self._ascended.before
        recorded = self._telemetry is not None and self._telemetry.is_recorders
        telemetry = None if recorded else self._telemetry
        return without | {"_backward": None, "_watch": None, "_ascended": before, "_telemetry": telemetry}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        replica = Replica(self._params, self._names, self._updater, self._zero_grads)
        self._stepper = Stepper([replica], NoSync(1), self._optimizer, self._zero_grads)
        if self._ascended is not None:
            self._ascended = DisplacedWeights([replica], state["_ascended"])
        self._watch = AccumulationWatch(self._params, is_over=True)
        self._optimizer.trainer = weakref.ref(self)
        self._updater.be_that_of(self._optimizer)
        self.telemetry = self._telemetry

    @uninterrupted
    def _step(self, batch_size: float, ignore_stale_grad: bool, reduce: bool = True) -> None:
        if type(batch_size) is not int or batch_size <= 0:
            batch_size = number("batch_size", batch_size, above=0)
        if ignore_stale_grad is not False:
            ignore_stale_grad = boolean("ignore_stale_grad", ignore_stale_grad)
        if self._averaging or self._replaced:
            self._refuse_step("step()")
        stepper, optimizer, telemetry = self._stepper, self._optimizer, self._telemetry
        stepper.start()
        if self._ascended is not None and (written := self._ascended.written()):
            self._ascended = None
            refuse_written(written)
        choice = stepper.choose(ignore_stale_grad, reduce)
        if self._ascended is not None:
            self._ascended.restore()
            self._ascended = None
        before, optimizer.rescale_grad = optimizer.rescale_grad, self._scale / batch_size
        into = None if telemetry is None else telemetry._begin()
        try:
            stepper.apply(choice, self._loss_scaler, into)
        except BaseException:
            optimizer.rescale_grad = before
            raise
        if telemetry is not None:
            telemetry._end(into, optimizer.num_update)
        if not self._watch.is_over:
            # Where gradients are reduced while backward runs, they are written to the tensors of the last step anyway.
            reduced = self._reduced_by_torch or not isinstance(self._sync, NoSync | KVStoreSync)
            self._watch.after_step(not (self._zero_grads or reduced or Recording.current is not None))
        if Recording.current is not None:
            record_step(Recording.current, self._stepper.replicas[0], self._scale / batch_size)

    def _backward_step(self) -> BackwardStep:
        """What takes steps inside backward, where that can be.

        Raises:
            TypeError, ValueError, RuntimeError: see `Trainer.step_in_backward`; nothing has been changed.
        """
        self._stepper.refuse_together("step_in_backward()")
        if self._ascended is not None:
            raise RuntimeError("ascend() has moved the weights up, and needs all gradients to move them back: use step()")
        self._refuse_step("step_in_backward()")
        if self._loss_scaler is not None:
            raise RuntimeError("a loss scaler must see all gradients before any weight is updated: use step()")
        if self._backward is not None and self._backward.is_open:
            raise RuntimeError("step_in_backward() inside step_in_backward(): one backward pass can only be one step")
        if self._reduced_by_torch:
            raise RuntimeError(
                "step_in_backward() with DistributedDataParallel, which reduces gradients only after they are complete on "
                "each rank: use step()"
            )
        self._stepper.check_initialized()
        check_optimizer(self._optimizer)
        self._backward = self._backward or BackwardStep(self._stepper.replicas[0])
        return self._backward

    def _refuse_averaged(self, what: str, or_ascended: bool = False) -> None:
        if or_ascended and self._ascended is not None:
            raise RuntimeError(f"ascend() has moved the weights up: take a step() before {what}")
        if self._averaging:
            raise RuntimeError(f"{what} inside averaged_weights(), whose weights are restored at its end: leave it first")

    def _refuse_step(self, what: str) -> None:
        self._refuse_averaged(what)
        if self._replaced:
            raise RuntimeError(
                f"the {type(self._optimizer).__name__} of this Trainer has been given to another Trainer since, and an "
                "optimizer counts the updates of one: give each Trainer an optimizer of its own"
            )

    def _use_control(self, control: torch.Tensor) -> None:
        """Take a loss scaler's control for updates from now on. Raises RuntimeError where that cannot be."""
        self._sync.use_control(control)
        for replica in self._stepper.replicas:
            replica.updater.control = control
            replica.forget_plan()  # it works with other kernels from now on


def _make_optimizer(optimizer: Any, optimizer_params: Any) -> Optimizer:
    if optimizer_params is None:
        optimizer_params = {}
    try:
        arguments = dict(optimizer_params)
    except (TypeError, ValueError):
        raise TypeError(f"optimizer_params={optimizer_params!r}: must be a dict or pairs of name and value") from None
    if isinstance(optimizer, Optimizer) and arguments:
        raise ValueError(
            f"optimizer_params={arguments!r} together with an optimizer instance: give them to "
            f"{type(optimizer).__name__}(...), or give optimizer={type(optimizer).__name__.lower()!r} by name"
        )
    if isinstance(optimizer, (list, tuple)):
        return MultiOptimizer(optimizer, **arguments)
    return create(optimizer, **arguments)


def _adopt(optimizer: Optimizer, trainer: TrainerCore) -> None:
    """Make this the trainer of the optimizer, which counts the updates of one."""
    before = None if optimizer.trainer is None else optimizer.trainer()
    if before is not None:
        before._replaced = True
    if optimizer.trainer is not None and optimizer.counts:
        warnings.warn(
            f"{type(optimizer).__name__} has counted {optimizer.num_update} updates for another Trainer, and counts on: "
            "bias corrections and schedules go on from there, with states that start again; give each Trainer an "
            "optimizer of its own",
            stacklevel=3,
        )
    optimizer.trainer = weakref.ref(trainer)
