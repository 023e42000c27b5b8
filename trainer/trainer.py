"""Trainer: Gluon's way to apply an optimizer to a model's parameters, on PyTorch.

`step` is short on purpose: with small models its Python is what costs. The usual case, where the gradients are the
tensors of the last step with new contents, is decided by a few list comparisons; everything else goes through `_select`.
"""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch.nn.parallel import DistributedDataParallel

from ..kernels import Rule, rules
from ..kernels.engine import DTYPES, choose_engine
from ..kernels.guards import GradGuard
from ..kernels.measures import Measurements
from ..kernels.table import Recording, is_wrapper
from . import checkpoint
from . import kvstore as stores
from .arguments import choice, did_you_mean, flag, real
from .capture import CapturedStep
from .copies import Copy, update_together
from .in_backward import BackwardStep, check_optimizer
from .interrupts import interrupts_wait, uninterrupted
from .kvstore import KVStore
from .kvstore.compression import checked
from .kvstore.distributed import BucketExchange, ShardExchange, check_compression
from .kvstore.exchange import Apart, Exchange, StoreExchange, check_residuals, updates_on_store
from .kvstore.server import compressor_of
from .optimizer import Optimizer, RuleOptimizer, Updater, create
from .optimizer.updater import Plan
from .telemetry import Telemetry

__all__ = ["StaleGradientError", "Trainer", "UpdateOnKVStoreError"]

KVSTORES = ("local", "device", "nccl", "dist_sync", "dist_device_sync", "dist", "dist_async", "dist_device_async")
P = ParamSpec("P")
T = TypeVar("T")


class StaleGradientError(UserWarning, RuntimeError):
    """A parameter has had no backward pass since the last step. (Gluon raises UserWarning, which this is, too.)"""


class UpdateOnKVStoreError(AssertionError, RuntimeError):
    """Half a step was asked for where the store takes it as a whole. (Gluon raises AssertionError, which this is, too.)"""


def _outside_dynamo(method: Callable[P, T]) -> Callable[P, T]:
    """Run the method as it is where `torch.compile` meets it, as torch does with its own optimizers: a graph ends there."""

    @wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if torch.compiler.is_compiling():  # torch.compiler.disable imports the compiler, so only then
            return torch.compiler.disable(method)(*args, **kwargs)
        return method(*args, **kwargs)

    return call


class Trainer:
    """Applies an optimizer to parameters, from the gradients that `backward` left in them.

    Args:
        params: what to train: a `torch.nn.Module`, an iterable of parameters or of (name, parameter), a dict of them (taken
            in the order of their sorted names, as in Gluon; so are a module's where it changes numbers: with Nadam and
            optimizers that update by hand), or torch-style groups, dicts with "params" and, if wanted,
            "lr_mult" and "wd_mult". Parameters with `requires_grad=False` are left alone. Or a list of modules that are
            copies of one, each on a device of its own (see `tristep.replicate`): they are kept equal, and each gets its part
            of a batch. Names, multipliers and `requires_grad` are those of the first one's parameters. A module in torch's
            DistributedDataParallel, which reduces gradients itself, has the names of the module inside.
        optimizer: a name, such as "sgd" or "adam", or an `Optimizer`.
        optimizer_params: arguments of the optimizer by name, as a dict or as pairs; none beside an instance.
        kvstore: which store adds up the gradients of several copies: "local" (on the CPU), "device" or "nccl" (where the
            copies are), the name of a registered store, or None, with which each copy goes its own way. One copy needs no
            store and gets none, but by a `KVStore` that is given itself. "dist_sync", "dist_device_sync" and "dist" are for
            several processes with one copy each, that torchrun starts, and whose steps are one: all of them are to make the
            same calls. The first step gives all copies the weights of rank 0. With "dist_async" and "dist_device_async" they
            do not wait for each other: the last of them, or as many as TRISTEP_NUM_SERVERS says, are servers, which update
            the weights, and whose program ends here when the others have finished. See docs/scaling.md.
        compression_params: gradient compression, {"type": "2bit" or "1bit", "threshold": 0.5}. It acts where "device"
            adds up several copies' gradients; what is not sent is kept back in a residual for each copy. With "local" it is
            an error, and without a store it has no effect. With "dist_sync" and "dist_async" there are more types, see
            `tristep.kvstore.create_compressor`; with "dist_sync" also "auto": the link is measured at the first step, and
            what pays is taken. With "dist_async" each worker compresses what it pushes, and pulls weights as they are.
        update_on_kvstore: whether the store updates the weights, with one state for all copies, and gives them back; or each
            copy is updated, with a state of its own, from the sum of the gradients, which is then in `.grad`. None means yes
            where the store can, unless there are sparse gradients, the environment variable MXNET_UPDATE_ON_KVSTORE is 0, or
            "local" would update a parameter of more than 2**24 elements. True where there is no store is an error. With
            "dist_sync" it means that each process updates its share of the weights, and has the states of that alone.
        engine: who computes: "triton", "cpu", "eager", or None for the best there is (see `tristep.kernels`).
        telemetry: a `Telemetry` that is to record what each step does to each parameter, or True for one with its defaults;
            None records nothing. The attribute of this name may be set to another one, or None, between steps.
        zero_grads: let each step fill the gradients that it has used with zeros, in the same pass, so that the next ones
            add up in the same memory. What autograd has not written to since does not count as fresh.

    Raises:
        TypeError, ValueError: an argument that does not fit; the message says which and what is allowed.
        RuntimeError: a dist store without several processes.

    Example:
        >>> import torch, tristep
        >>> net = torch.nn.Linear(2, 1)
        >>> trainer = tristep.Trainer(net, "sgd", {"learning_rate": 0.1, "momentum": 0.9})
        >>> loss = net(torch.ones(4, 2)).sum()
        >>> loss.backward()
        >>> trainer.step(batch_size=4)

    Source: MXNet 1.9.1, `gluon.Trainer`.
    """

    def __init__(
        self,
        params: torch.nn.Module | Iterable[Any] | Mapping[str, torch.nn.Parameter] | Sequence[torch.nn.Module],
        optimizer: str | Optimizer,
        optimizer_params: Mapping[str, Any] | Iterable[tuple[str, Any]] | None = None,
        kvstore: str | KVStore | None = "device",
        compression_params: Mapping[str, Any] | None = None,
        update_on_kvstore: bool | None = None,
        *,
        engine: str | None = None,
        telemetry: Telemetry | bool | None = None,
        zero_grads: bool = False,
    ) -> None:
        zero_grads = flag("zero_grads", zero_grads)
        self._reduced_by_torch = isinstance(params, DistributedDataParallel)
        if self._reduced_by_torch:
            _check_one_reduces(kvstore)
        modules = _modules(params)
        named = _named_parameters(modules[0] if modules else params)
        _check_parameters(named)
        replicas = [[parameter for _, parameter, _ in named]]
        replicas += [_replica(r, modules[r], named) for r in range(1, len(modules))]
        _check_distinct(replicas)
        kvstore = _check_store(kvstore, compression_params, update_on_kvstore, len(replicas))
        for parameters in replicas:
            choose_engine(parameters[0].device, engine)
        self._optimizer = _make_optimizer(optimizer, optimizer_params)
        if isinstance(params, torch.nn.Module) or modules:
            order = _gluons_order(named, self._optimizer)
            named, replicas = [named[i] for i in order], [[parameters[i] for i in order] for parameters in replicas]
        self._optimizer.use_parameters(replicas[0], [name for name, _, _ in named])
        for _, parameter, own in named:
            for multiplier, value in own.items():
                setattr(parameter, multiplier, value)
        self._names = [name for name, _, _ in named]
        self._params = replicas[0]
        self._scale = self._optimizer.rescale_grad
        self._updater = Updater(self._optimizer, engine)
        self._plan: Plan | None = None
        self._zero_grads = zero_grads
        self._loss_scaler: Any = None  # amp.py puts one here
        self._guard = GradGuard(self._params, self._names)
        self._backward: BackwardStep | None = None
        # From the first step to the second, to notice a missing zero_grad(); None before, False after it.
        self._accumulation_hook: Any = None
        self._below: list[torch.Tensor] | None = None  # the weights from before `ascend`
        self._raised: list[tuple[int, int]] = []  # what `_marks` gave after that
        self._averaging = False  # whether the weights are those of `averaged_weights` now
        self._replaced = False  # whether another trainer has taken the optimizer over
        # With several copies, or a store: these, what they meet in, whether it has started, of how many copies each gradient
        # is the sum after `allreduce_grads`, and what gradients are sums already after a step that failed.
        self._copies: list[Copy] = []
        self._exchange: Exchange | None = None
        self._started = False
        self._reduced: list[int] | None = None
        self._summed: list[list[tuple[int, int]]] | None = None
        if len(replicas) > 1 or kvstore is not None:
            self._copies = [Copy(self._params, self._names, self._updater, zero_grads)]
            for parameters in replicas[1:]:
                self._copies.append(Copy(parameters, self._names, Updater(self._optimizer, engine), zero_grads))
            if isinstance(self._optimizer, RuleOptimizer):
                self._optimizer._updater = weakref.ref(self._updater)  # and not the last copy's
            self._exchange = _exchange_for(
                kvstore, self._copies, self._names, self._optimizer, compression_params, update_on_kvstore, engine
            )
        self.telemetry = telemetry
        self._take_over()

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer in use."""
        return self._optimizer

    @property
    def learning_rate(self) -> float:
        """The optimizer's present rate, before multipliers."""
        return self._optimizer.learning_rate

    @property
    def telemetry(self) -> Telemetry | None:
        """What records the steps, or None."""
        return self._telemetry

    @telemetry.setter
    def telemetry(self, telemetry: Telemetry | bool | None) -> None:
        wanted: Any = Telemetry() if telemetry is True else telemetry
        if wanted is None or wanted is False:
            self._telemetry: Telemetry | None = None
            return
        if not isinstance(wanted, Telemetry):
            raise TypeError(f"telemetry={wanted!r}: must be True, a Telemetry or None, not {type(wanted).__name__}")
        if not isinstance(self._optimizer, RuleOptimizer):
            raise TypeError(
                f"telemetry={telemetry!r} with {type(self._optimizer).__name__}, which updates by hand: it needs an "
                "optimizer that is a rule, such as tristep's own; leave it out"
            )
        if self._exchange is not None and not self._exchange.measures:
            raise ValueError(
                f"telemetry={telemetry!r} where each process updates its share of the weights, and sees pieces of them: "
                "make the trainer with update_on_kvstore=False"
            )
        wanted._attach(self._names, self._params)
        self._telemetry = wanted

    def set_learning_rate(self, lr: float) -> None:
        """Set the rate. Raises UserWarning where a scheduler decides it, ValueError where it is negative."""
        self._optimizer.set_learning_rate(lr)

    @_outside_dynamo
    def step(self, batch_size: float, ignore_stale_grad: bool = False) -> None:
        """Reduce gradients and update the weights, with gradients divided by `batch_size`.

        Gradients are fresh once `backward`, or anything else, has written to them since the last step. The gradients
        themselves are not changed, but by a trainer with `zero_grads=True`, and where each of several copies of the model is
        updated with their sum, which then takes their place.

        The gradients of several copies are added up, not averaged: `batch_size` is that of all their parts together.

        Gradients of several backward passes add up, and make one step with the number of all their samples. Where
        `zero_grad(set_to_none=False)` follows, the next ones are added up in the same memory. Those of 16-bit parameters add
        up in float32 with `parameter.grad_dtype = torch.float32`, in a torch that has it.

            for x, y in parts:
                loss(net(x), y).backward()
            trainer.step(batch_size=sum(len(x) for x, _ in parts))
            trainer.zero_grad(set_to_none=False)

        Args:
            batch_size: > 0; 1 if the loss is a mean already.
            ignore_stale_grad: leave parameters without a fresh gradient as they are, their state and count too, instead
                of raising an error. One that is fresh in some copies of the model is updated in all, with the sum of those.

        Raises:
            StaleGradientError: some parameters have no fresh gradient; nothing has been changed.
            ValueError, TypeError: a batch size or a gradient that does not fit; nothing has been changed. Of several
                processes, one has other parameters or settings, or had in the last step.
            RuntimeError: of several processes that work in step, one is missing.
        """
        self._step(batch_size, ignore_stale_grad)

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """A context whose backward passes only add up gradients: nothing is sent to other processes before the last one.

        In one process it changes nothing.

            with trainer.accumulate():
                for x, y in parts[:-1]:
                    loss(net(x), y).backward()
            loss(net(x), y).backward()
            trainer.step(batch_size)
        """
        if self._exchange is None:
            yield
            return
        self._exchange.accumulate(True)
        try:
            yield
        finally:
            self._exchange.accumulate(False)

    @contextmanager
    def step_in_backward(self, batch_size: float, ignore_stale_grad: bool = False) -> Iterator[None]:
        """A context whose one backward pass is a step: each parameter is updated as soon as its gradient is complete.

        The gradient is let go then (`grad` becomes None), so that the gradients of a model never need memory all at once;
        small ones are collected, up to 1 MiB, and used together. Numbers, counts and states are those of `step`. To add up
        gradients of several batches, let all backward passes but the last come before the context.

            with trainer.step_in_backward(batch_size):
                loss(net(x), y).backward()

        Args:
            batch_size: > 0; 1 if the loss is a mean already.
            ignore_stale_grad: leave parameters that get no gradient as they are, instead of raising an error in the end. A
                schedule is asked for the rate as if all of them got one.

        Raises:
            TypeError, ValueError: an argument that does not fit, or an optimizer that needs all gradients together, such as
                Prodigy; nothing has been changed.
            RuntimeError: after `ascend`, inside another such context, with several copies of the model or a store, with
                DistributedDataParallel, or with a loss scaler, which must see all gradients before a step, nothing has been
                changed; or, from `backward`, a second gradient for a parameter, which is not used.
            StaleGradientError: on leaving, some parameters got no gradient; the others have been updated.
        """
        batch_size = real("batch_size", batch_size, above=0)
        ignore_stale_grad = flag("ignore_stale_grad", ignore_stale_grad)
        self._refuse_together("step_in_backward()")
        if self._below is not None:
            raise RuntimeError("ascend() has moved the weights up, and needs all gradients to move them back: use step()")
        self._refuse_averaged("step_in_backward()")
        self._refuse_replaced()
        if self._loss_scaler is not None:
            raise RuntimeError("a loss scaler must see all gradients before any weight is updated: use step()")
        if self._backward is not None and self._backward.is_open:
            raise RuntimeError("step_in_backward() inside step_in_backward(): one backward pass can only be one step")
        if self._reduced_by_torch:
            raise RuntimeError(
                "step_in_backward() with DistributedDataParallel, which reduces gradients only after they are complete on "
                "each rank: use step()"
            )
        self._refuse_lazy()
        check_optimizer(self._optimizer)
        optimizer, updater = self._optimizer, self._updater
        before = dict(updater.states), dict(updater.masters), optimizer.rescale_grad
        optimizer.rescale_grad = self._scale / batch_size
        step = self._backward = self._backward or BackwardStep(updater, self._params, self._names)
        telemetry = self._telemetry
        into = None if telemetry is None else telemetry._begin()
        with interrupts_wait():
            try:
                step.begin(ignore_stale_grad, into)
            except BaseException:
                updater.states, updater.masters, optimizer.rescale_grad = before
                raise
            try:
                yield
            finally:
                step.end()
                if any(step.updated):
                    self._plan = None  # counts have moved, and perhaps not all of them
                    if telemetry is not None:
                        telemetry._end(into, optimizer.num_update)
                else:
                    updater.states, updater.masters, optimizer.rescale_grad = before
        pairs = zip(self._params, self._names, step.updated, strict=True)
        missing = [repr(name) for param, name, updated in pairs if param.requires_grad and not updated]
        if missing and not ignore_stale_grad:
            done = "the other parameters have been updated" if any(step.updated) else "nothing has been changed"
            raise StaleGradientError(
                f"step_in_backward() ended with no gradient for {_listed(missing)}; {done}: call backward() inside it, on a "
                "loss that depends on them, or use step_in_backward(batch_size, ignore_stale_grad=True) to leave such "
                "parameters as they are"
            )

    @_outside_dynamo
    def allreduce_grads(self) -> None:
        """Let the sum over all copies of the model take the place of the gradients, without updating.

        To be followed by `update`, after clipping, say; `step` would add them up once more. With one copy there is nothing
        to do.

        Raises:
            UpdateOnKVStoreError: the store updates the weights, so that nothing lies between the two.
        """
        exchange = self._exchange
        if exchange is None:
            return
        self._start("allreduce_grads()")
        fresh = [copy.fresh() for copy in self._copies]
        counts = exchange.count_fresh(fresh, True)
        exchange.reduce(self._not_summed(self._chosen(counts, True)), fresh)
        self._reduced, self._summed = counts, None

    @_outside_dynamo
    def update(self, batch_size: float, ignore_stale_grad: bool = False) -> None:
        """As `step`, without reducing: the second half, after `allreduce_grads`.

        Raises:
            UpdateOnKVStoreError: the store updates the weights.
        """
        self._refuse_averaged("update()")
        self._refuse_replaced()
        if self._exchange is not None:
            self._start("update()")
            self._step_together(batch_size, ignore_stale_grad, reduce=False)
            return
        self._step(batch_size, ignore_stale_grad)

    @_outside_dynamo
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients, or fill them with zeros. A gradient that was used up does not become fresh by that."""
        if self._exchange is not None:
            self._reduced = self._summed = None
            for copy in self._copies:
                copy.zero_grad(set_to_none)
            return
        if set_to_none:
            for parameter in self._params:
                parameter.grad = None
            return
        gradients = self._guard.collect()
        written = self._guard.written(gradients)
        if present := [gradient for gradient in gradients if gradient is not None]:
            with torch.no_grad():
                torch._foreach_zero_(present)
        self._guard.use([None if fresh else gradient for gradient, fresh in zip(gradients, written, strict=True)])

    @_outside_dynamo
    @uninterrupted
    def ascend(self, rho: float = 0.05, *, adaptive: bool = False) -> None:
        """Move the weights up their gradients, for sharpness-aware minimization; the next step first moves them back.

        Between the two, gradients are taken anew, where the weights are then:

            loss(net(x), y).backward()
            trainer.ascend()
            trainer.zero_grad()
            loss(net(x), y).backward()
            trainer.step(batch_size)

        Args:
            rho: how far, in the norm of all weights together, > 0.
            adaptive: measure the distance relative to each weight, as ASAM does; `rho` is then ten times as large or so.

        Raises:
            StaleGradientError: some parameters have no fresh gradient; nothing has been changed.
            RuntimeError: the weights have been moved up already, with no step since; or there are several copies of the
                model, or a store.

        Source: Foret et al. (2021), "Sharpness-Aware Minimization"; Kwon et al. (2021), "ASAM".
        """
        rho = real("rho", rho, above=0)
        adaptive = flag("adaptive", adaptive)
        self._refuse_together("ascend()")
        if self._below is not None:
            raise RuntimeError("ascend() has moved the weights up already: take a step() first")
        self._refuse_averaged("ascend()")
        self._refuse_lazy()
        gradients = self._select(self._guard.collect(), ignore_stale_grad=False)
        before = [parameter.detach().clone() for parameter in self._params]
        hyper = {"rho": rho, "adaptive": float(adaptive)}
        self._updater.apply(rules.ascent, hyper, range(len(self._params)), self._params, gradients)
        self._below, self._raised = before, self._marks()
        self._guard.use(gradients)

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """A context in which the model has its averaged weights, for evaluation, where the optimizer keeps an average.

        It does with `ema_decay`, a moving average; some do by themselves.

        Afterwards it has those that it had before, to the bit. Steps wait until then.

        Raises:
            ValueError: the optimizer keeps no average; nothing has been changed.
            RuntimeError: a store of another process keeps it; or inside another such context, or after `ascend`; or, on
                leaving, the weights have been written to inside, which is undone.

        Example:
            >>> import torch, tristep
            >>> net = torch.nn.Linear(2, 1)
            >>> trainer = tristep.Trainer(net, "schedulefreesgd")
            >>> with trainer.averaged_weights():
            ...     prediction = net(torch.ones(1, 2))
        """
        found = self._optimizer.average_in_use() if isinstance(self._optimizer, RuleOptimizer) else None
        if found is None:
            raise ValueError(f"{type(self._optimizer).__name__} keeps no averaged weights: give it ema_decay=0.999, say")
        self._refuse_averaged("averaged_weights()")
        if self._below is not None:
            raise RuntimeError("ascend() has moved the weights up: take a step() before averaged_weights()")
        if self._exchange is not None:
            self._start()
            self._exchange.follow_weights()
        before = [[parameter.detach().clone() for parameter in params] for params in self._all_params()]
        if self._exchange is not None and self._exchange.updates:
            self._exchange.apply(*found)
        else:
            for updater, params in zip(self._all_updaters(), self._all_params(), strict=True):
                updater.apply(*found, range(len(params)), params)
        marks, self._averaging = self._marks(), True
        try:
            yield
            written = self._written(marks)
        finally:
            self._averaging = False
            self._put_back(*before)
        if written:
            raise RuntimeError(
                f"{_listed(written)} written to inside averaged_weights(), which shows an average and then puts back the "
                "weights from before: these are there again, what was written is gone; write to weights outside"
            )

    def capture(self, fn: Callable[..., Any], *, warmup: int = 3) -> CapturedStep:
        """A function that trains, as a CUDA graph: the same function, called in the same way, without the host's work.

        Each call is one training step. The first ones run as they are; then the graph is recorded, and replayed from then
        on. Learning rate, schedule, decay, multipliers, betas, clipping, update counts and loss scale stay live. On a device
        without such graphs the function is simply called.

            def train(x, y):
                trainer.zero_grad()
                loss = loss_function(net(x), y)
                loss.backward()
                trainer.step(1)
                return loss

            step = trainer.capture(train)
            for x, y in data:
                loss = step(x, y)

        Args:
            fn: takes tensors, which are copied to where the parameters are, and takes one step of this trainer. It must not
                look at values on the host (`loss.item()`), and what it decides by itself is decided once.
            warmup: how many calls run as they are, >= 2.

        Returns:
            A callable. Tensors that it returns are overwritten by the next call; gradients are those of the last one.

        Raises:
            TypeError: `fn` is not callable.
            ValueError: an optimizer whose rule is not elementwise, such as Muon's; an engine other than triton on a GPU; a
                trainer with telemetry.
            RuntimeError: several copies of the model, or a store.

        Source: `torch.cuda.graph`.
        """
        self._refuse_together("capture()")
        optimizer, device = self._optimizer, self._params[0].device
        if not (isinstance(optimizer, RuleOptimizer) and isinstance(optimizer.rule, Rule)):
            raise ValueError(
                f"capture() with {type(optimizer).__name__}: its step is torch operations with numbers from the host, which "
                "a graph would repeat as they were; use an optimizer with an elementwise rule"
            )
        if device.type == "cuda" and choose_engine(device, self._updater.engine) != "triton":
            raise ValueError("capture() needs engine='triton': others have the host's numbers in their operations")
        if self._telemetry is not None:
            raise ValueError("capture() of a trainer with telemetry, which is written elsewhere at every step: must be None")
        return CapturedStep(fn, device, warmup)

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's settings, counts, schedule and states, as plain data and tensors (not copied).

        With a loss scaler its state, too, and with compression what it has kept back. Of several copies of the model it is
        the first one's: it may be loaded where there are more, or fewer.

        Raises:
            RuntimeError: between `ascend` and `step`, when the weights are not those that are to be saved with it.
        """
        if self._below is not None:
            raise RuntimeError(
                "between ascend() and step() the weights are not those that training goes on with, and nothing is to be "
                "saved: save after step()"
            )
        state = None
        residuals: Any = {}
        if self._exchange is not None:
            self._start()
            state, residuals = self._exchange.state_dict(), self._exchange.residuals()
        if state is None:
            state = checkpoint.collect(self._updater, self._names, self._params)
        if residuals:
            state["residuals"] = residuals
        return state if self._loss_scaler is None else state | {"loss_scaler": self._loss_scaler.state_dict()}

    @uninterrupted
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave. Checks all of it first.

        The optimizer's settings, its schedule and its counts become the saved ones, as in Gluon; the multipliers, which
        belong to the parameters, stay. What compression had kept back is lost where there is none now, and goes to all
        copies in equal parts where there are fewer of them.

        Raises:
            ValueError, TypeError: it does not fit this trainer; nothing has been changed.
        """
        state_dict = checkpoint.with_plain_names(state_dict)
        scaling = state_dict.get("loss_scaler") if isinstance(state_dict, Mapping) else None
        if scaling is not None:
            if self._loss_scaler is None:
                raise ValueError(
                    "saved state has a loss scaler, this trainer has none: call tristep.amp.init_trainer(trainer) before"
                )
            self._loss_scaler.check(scaling)
        residuals = state_dict.get("residuals", {}) if isinstance(state_dict, Mapping) else {}
        check_residuals(self._names, self._params, residuals)
        exchange = self._exchange
        if exchange is not None:
            self._start()
        if exchange is not None and exchange.updates:
            exchange.load_state_dict(state_dict)
        else:
            for updater, params in zip(self._all_updaters(), self._all_params(), strict=True):
                checkpoint.restore(updater, self._names, params, state_dict)
        if exchange is not None:
            exchange.load_residuals(residuals)
            for copy in self._copies:
                copy.forget_counts()
                copy.forget_plan()
        if scaling is not None:
            self._loss_scaler.load_state_dict(scaling)
        if self._below is not None:  # weights that have been written since `ascend` are those that were loaded
            if not self._written(self._raised):
                self._put_back(self._below)
            self._below = None
        self._plan = None

    def save_states(self, fname: str | os.PathLike[str]) -> None:
        """Write `state_dict` to a file (safetensors with JSON in its metadata): whole, or not at all."""
        state = self.state_dict()
        if self._exchange is None or self._exchange.writes:
            checkpoint.write(fname, state)
        if self._exchange is not None:
            self._exchange.end_save()

    def load_states(self, fname: str | os.PathLike[str]) -> None:
        """Read what `save_states` wrote, as `load_state_dict`.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: it is not a state file, is damaged, or does not fit this trainer; nothing has been changed.
        """
        state = checkpoint.read(fname)
        try:
            self.load_state_dict(state)
        except (TypeError, LookupError, AttributeError, ArithmeticError) as error:  # contents of another kind
            raise ValueError(f"fname={str(fname)!r}: not a state of such a trainer ({error})") from error

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles: all but what is made anew by the next step. A copy's parameters have no gradients yet."""
        if self._exchange is not None:
            raise TypeError(
                "a Trainer of several copies of a model, or with a store, cannot be copied or pickled: use state_dict()"
            )
        if self._averaging or (self._backward is not None and self._backward.is_open):
            raise RuntimeError("a Trainer cannot be copied inside averaged_weights() or step_in_backward(): leave it first")
        anew = {"_plan": None, "_backward": None, "_accumulation_hook": False}
        return vars(self) | anew | {"_guard": GradGuard(self._params, self._names)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._raised = self._marks()
        self._optimizer.trainer = weakref.ref(self)
        if isinstance(self._optimizer, RuleOptimizer):
            self._optimizer._updater = weakref.ref(self._updater)

    def __repr__(self) -> str:
        count = sum(parameter.numel() for parameter in self._params if not _is_lazy(parameter))
        copies = f"{len(self._copies)} copies of " if len(self._copies) > 1 else ""
        return f"Trainer({copies}{len(self._params)} parameters, {count:,} elements, {self._optimizer!r})"

    @uninterrupted
    def _step(self, batch_size: float, ignore_stale_grad: bool) -> None:
        if type(batch_size) is not int or batch_size <= 0:
            batch_size = real("batch_size", batch_size, above=0)
        if ignore_stale_grad is not False:
            ignore_stale_grad = flag("ignore_stale_grad", ignore_stale_grad)
        if self._averaging or self._replaced:
            self._refuse_averaged("step()")
            self._refuse_replaced()
        if self._exchange is not None:
            self._start()
            self._step_together(batch_size, ignore_stale_grad)
            return
        if self._below is not None and (written := self._written(self._raised)):
            self._below = None
            raise RuntimeError(
                f"{_listed(written)} written to between ascend() and step(), which would put back the weights from before: "
                "they stay as they have been written, and the ascent is forgotten; take gradients there, and step again"
            )
        plan = self._plan
        if plan is None:
            self._refuse_lazy()
        found = self._guard.collect_written()
        if found is not None:
            gradients, versions = found
        else:
            gradients, versions = self._select(self._guard.collect(), ignore_stale_grad), None
        if self._below is not None:
            self._put_back(self._below)
            self._below = None
        scaler = self._loss_scaler
        if scaler is not None:
            scaler.look(gradients)
        before = self._optimizer.rescale_grad
        self._optimizer.rescale_grad = self._scale / batch_size
        into = None if self._telemetry is None else self._telemetry._begin()
        try:
            if plan is None:
                plan = self._first_step(gradients, into)
            else:
                plan.step(gradients, into)
        except BaseException:
            self._optimizer.rescale_grad = before
            raise
        if self._telemetry is not None:
            self._telemetry._end(into, self._optimizer.num_update)
        self._guard.use(gradients, versions, plan.references)
        if scaler is not None:
            scaler.end(plan.update.total() if plan.update is not None and plan.update.rule.skips_nonfinite else None)
        if self._zero_grads:
            self._guard.use_again()
        if self._accumulation_hook is not False:
            self._watch_accumulation()
        if Recording.current is not None:
            self._note_recording(Recording.current, plan, batch_size)

    @uninterrupted
    def _step_together(self, batch_size: float, ignore_stale_grad: bool, reduce: bool = True) -> None:
        """A step of several copies, or through a store; with `reduce=False` gradients are sums already."""
        batch_size = real("batch_size", batch_size, above=0)
        ignore_stale_grad = flag("ignore_stale_grad", ignore_stale_grad)
        exchange: Any = self._exchange
        copies, optimizer, scaler = self._copies, self._optimizer, self._loss_scaler
        fresh = [copy.fresh() for copy in copies]
        counts = exchange.count_fresh(fresh, ignore_stale_grad) if reduce else self._counts_after_reduce(fresh)
        chosen = self._chosen(counts, ignore_stale_grad)
        self._check_rate(chosen)
        exchange.follow_weights()
        of_copies = [chosen if exchange.reduces else own for own in fresh]
        before, put_back = optimizer.rescale_grad, [copy.before() for copy in copies]
        optimizer.rescale_grad = self._scale / batch_size
        into = None if self._telemetry is None else self._telemetry._begin()
        reducing = False
        try:
            if exchange.updates:
                if scaler is not None:
                    scaler.look(*(copy.gradients(own) for copy, own in zip(copies, fresh, strict=True)))
                exchange.update(chosen, fresh, into)
                total = exchange.total()
            else:
                for copy, own in zip(copies, of_copies, strict=True):
                    copy.check(copy.gradients(own))
                if reduce:
                    again = self._not_summed(chosen)
                    reducing = True
                    exchange.reduce(again, fresh)
                gradients = [copy.gradients(own) for copy, own in zip(copies, of_copies, strict=True)]
                apart = not exchange.reduces and len(copies) > 1
                if scaler is not None:
                    scaler.look(*gradients, always=apart)
                update_together(optimizer, copies, gradients, into)
                exchange.end_step()
                total = None if apart else copies[0].total()
        except BaseException:
            optimizer.rescale_grad = before
            for undo in put_back:
                undo()
            if reducing:
                self._summed = [copy.marks() for copy in copies]
            raise
        if self._telemetry is not None:
            self._telemetry._end(into, optimizer.num_update)
        for copy, own in zip(copies, of_copies, strict=True):
            if exchange.updates and self._zero_grads:
                copy.zero(copy.gradients(own))
            copy.note(own)
        if scaler is not None:
            scaler.end(total)
        self._reduced = self._summed = None
        if self._accumulation_hook is not False:
            self._watch_accumulation()

    def _watch_accumulation(self) -> None:
        """Between the first two steps, warn where a backward pass adds to the gradients that the first has used."""
        if self._accumulation_hook is not None:
            self._accumulation_hook.remove()
            self._accumulation_hook = False
            return
        self._accumulation_hook = False
        # Where gradients are reduced while backward runs, they are written to the tensors of the last step anyway.
        reduced = self._reduced_by_torch or not isinstance(self._exchange, Apart | StoreExchange | None)
        if self._zero_grads or reduced or Recording.current is not None:
            return
        candidates = [param for param in self._params if param.requires_grad and param.grad is not None]
        if not candidates or vars(candidates[0]).get("grad_req") == "add":
            return
        gradient: Any = candidates[0].grad
        used, version = weakref.ref(gradient), gradient._version

        def arrived(param: torch.Tensor) -> None:
            now: Any = param.grad
            if now is not None and now._version == version + 1 and now is used():
                warnings.warn(
                    "this backward pass has added to the gradients of the step before, as torch does; in MXNet it replaces "
                    "them (grad_req='write'): call trainer.zero_grad() before each backward(), or set grad_req='add' of the "
                    "parameters if that is meant",
                    stacklevel=2,
                )

        self._accumulation_hook = candidates[0].register_post_accumulate_grad_hook(arrived)

    def _start(self, what: str | None = None) -> None:
        """Make the store and fill it, if that has not been done; `what` is what cannot be called where it updates."""
        exchange: Any = self._exchange
        if not self._started:
            self._refuse_lazy()
            exchange.start()
            self._started = True
        if what is not None and exchange.updates:
            raise UpdateOnKVStoreError(
                f"{what} where the store updates the weights, which it does with gradients and all in one: call step(), or "
                "make the trainer with update_on_kvstore=False"
            )

    def _chosen(self, counts: Sequence[int], ignore_stale_grad: bool) -> list[bool]:
        """Which parameters to update, by in how many copies each is fresh; an error for stale ones."""
        exchange: Any = self._exchange
        if not ignore_stale_grad:
            stale = []
            for name, param, count in zip(self._names, self._params, counts, strict=True):
                if param.requires_grad and count < exchange.num_copies:
                    partly = f" (fresh in {count} of {exchange.num_copies} copies)" if count else ""
                    stale.append(f"{name!r}{partly}")
            if stale:
                raise _stale_error(stale)
        return [param.requires_grad and count > 0 for param, count in zip(self._params, counts, strict=True)]

    def _counts_after_reduce(self, fresh: Sequence[Sequence[bool]]) -> list[int]:
        """In how many copies each gradient is fresh, where a sum has made it so in all."""
        exchange: Any = self._exchange
        here = list(map(sum, zip(*fresh, strict=True)))
        if self._reduced is None:
            return [count + exchange.num_copies - len(fresh) if count else 0 for count in here]
        return [count if now else 0 for count, now in zip(self._reduced, here, strict=True)]

    def _not_summed(self, chosen: Sequence[bool]) -> list[bool]:
        """Of the chosen parameters those whose gradients are not sums already, from a step that failed after that."""
        if self._summed is None:
            return list(chosen)
        now = [copy.marks() for copy in self._copies]
        same = [all(own[i] == then[i] for own, then in zip(now, self._summed, strict=True)) for i in range(len(chosen))]
        return [wanted and not done for wanted, done in zip(chosen, same, strict=True)]

    def _check_rate(self, chosen: Sequence[bool]) -> None:
        """A rate that is none must be found out before gradients are added up."""
        optimizer = self._optimizer
        if optimizer.lr_scheduler is not None and any(chosen):
            counts = optimizer.counts
            reached = [counts.get(i, optimizer.begin_num_update) + 1 for i, wanted in enumerate(chosen) if wanted]
            optimizer.rate_at(max(optimizer.num_update, *reached))

    def _refuse_together(self, what: str) -> None:
        if self._exchange is not None:
            raise RuntimeError(
                f"{what} of a trainer with several copies of the model, or a store: it is for one copy without a store; use "
                "step()"
            )

    def _refuse_averaged(self, what: str) -> None:
        if self._averaging:
            raise RuntimeError(f"{what} inside averaged_weights(), whose weights are put back at its end: leave it first")

    def _take_over(self) -> None:
        """Become the trainer of the optimizer, which counts the updates of one."""
        optimizer = self._optimizer
        before = None if optimizer.trainer is None else optimizer.trainer()
        if before is not None:
            before._replaced = True
        if optimizer.trainer is not None and optimizer.counts:
            warnings.warn(
                f"{type(optimizer).__name__} has counted {optimizer.num_update} updates for another Trainer, and counts on: "
                "bias corrections and schedules go on from there, with states that begin anew; give each Trainer an "
                "optimizer of its own",
                stacklevel=3,
            )
        optimizer.trainer = weakref.ref(self)

    def _refuse_replaced(self) -> None:
        if self._replaced:
            raise RuntimeError(
                f"the {type(self._optimizer).__name__} of this Trainer has been given to another Trainer since, and an "
                "optimizer counts the updates of one: give each Trainer an optimizer of its own"
            )

    def _marks(self) -> list[tuple[int, int]]:
        """Of each parameter of each copy how often it has been written to, and where it is."""
        return [(parameter._version, parameter.data_ptr()) for params in self._all_params() for parameter in params]

    def _written(self, marks: list[tuple[int, int]]) -> list[str]:
        """Names of the parameters that have been written to, or moved, since `_marks` gave that."""
        changed = [now != then for now, then in zip(self._marks(), marks, strict=True)]
        return [repr(name) for i, name in enumerate(self._names) if any(changed[i :: len(self._names)])]

    def _all_params(self) -> list[Any]:
        """The parameters of each copy of the model."""
        return [copy.params for copy in self._copies] if self._copies else [self._params]

    def _all_updaters(self) -> list[Updater]:
        return [copy.updater for copy in self._copies] if self._copies else [self._updater]

    def _use_control(self, control: torch.Tensor) -> None:
        """Take a loss scaler's control for updates from now on. Raises RuntimeError where that cannot be."""
        if self._exchange is not None:
            self._exchange.use_control(control)
            for copy in self._copies:
                copy.updater.control = control
                copy.forget_plan()
        self._updater.control = control
        self._plan = None  # it works with other kernels from now on
        self._updater.forget_plan()

    def _note_recording(self, recording: Recording, plan: Plan, batch_size: float) -> None:
        update: Any = plan.update
        active = list(plan.active)

        def holds() -> bool:
            optimizer: Any = self._optimizer
            return self._plan is plan and plan.is_of_states(update) and update.rule is optimizer.composed_rule

        def advance() -> None:
            before, self._optimizer.rescale_grad = self._optimizer.rescale_grad, self._scale / batch_size
            try:
                plan.advance(update, active)
            except BaseException:
                self._optimizer.rescale_grad = before
                raise

        recording.owners.append((holds, advance))

    def _first_step(self, gradients: list[Any], into: Measurements | None) -> Plan:
        """Make the plan and step; if that fails, leave no state behind: weights may change until the step is repeated."""
        updater = self._updater
        before = dict(updater.states), dict(updater.masters)
        try:
            plan = Plan(updater, range(len(self._params)), self._params, self._names, True, self._zero_grads)
            plan.step(gradients, into=into)
        except BaseException:
            updater.states, updater.masters = before
            raise
        self._plan = plan
        return plan

    @uninterrupted
    @torch.no_grad()
    def _put_back(self, *weights: Sequence[torch.Tensor]) -> None:
        """Give each copy of the model these weights."""
        for params, own in zip(self._all_params(), weights, strict=True):
            for parameter, weight in zip(params, own, strict=True):
                parameter.copy_(weight)

    def _refuse_lazy(self) -> None:
        for r, params in enumerate(self._all_params()):
            where = "params" if len(self._copies) <= 1 else f"params[{r}]"
            lazy = [repr(name) for name, parameter in zip(self._names, params, strict=True) if _is_lazy(parameter)]
            if lazy:
                raise ValueError(f"{_listed(lazy)} of {where} not initialized yet: run the model once before the first step")
            if r > 0:
                _check_alike(r, self._names, params, self._params)

    def _select(self, gradients: list[torch.Tensor | None], ignore_stale_grad: bool) -> list[torch.Tensor | None]:
        """The gradients to use, None for parameters that stay as they are; an error for stale ones."""
        written = self._guard.written(gradients)
        if not ignore_stale_grad:
            rows = zip(self._params, self._names, gradients, written, strict=True)
            stale = [
                f"{name!r}" + (" (no gradient)" if gradient is None else "")
                for parameter, name, gradient, fresh in rows
                if parameter.requires_grad and not fresh
            ]
            if stale:
                raise _stale_error(stale)
        return [gradient if fresh else None for gradient, fresh in zip(gradients, written, strict=True)]


def _stale_error(stale: list[str]) -> StaleGradientError:
    return StaleGradientError(
        f"no fresh gradient since the last step for {_listed(stale)}: call backward() on a loss that depends on "
        "them before step(), or use step(batch_size, ignore_stale_grad=True) to leave such parameters as they are"
    )


def _is_lazy(parameter: torch.Tensor) -> bool:
    return isinstance(parameter, torch.nn.UninitializedParameter)


def _listed(names: list[str], most: int = 8) -> str:
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")


def _modules(params: Any) -> list[torch.nn.Module]:
    """The copies of a model, where `params` is a list of them, else nothing."""
    if isinstance(params, (list, tuple)) and params and all(isinstance(each, torch.nn.Module) for each in params):
        return list(params)
    return []


def _replica(r: int, module: torch.nn.Module, first: list[tuple[str, torch.nn.Parameter, Any]]) -> list[torch.nn.Parameter]:
    """The parameters of a copy, if it is like the first one."""
    named = _named_parameters(module)
    names, others = [name for name, _, _ in first], [name for name, _, _ in named]
    if names != others:
        odd = sorted(set(names) ^ set(others)) or names
        raise ValueError(
            f"params[{r}] is no copy of params[0]: {_listed(list(map(repr, odd)))} of their parameters differ in name or "
            "order; make copies with tristep.replicate(module, devices)"
        )
    _check_parameters(named)
    params = [parameter for _, parameter, _ in named]
    _check_alike(r, names, params, [parameter for _, parameter, _ in first])
    return params


def _check_alike(
    r: int, names: Sequence[str], params: Sequence[torch.nn.Parameter], first: Sequence[torch.nn.Parameter]
) -> None:
    for name, parameter, model in zip(names, params, first, strict=True):
        if _is_lazy(parameter) or _is_lazy(model):
            continue
        if parameter.shape != model.shape or parameter.dtype != model.dtype:
            raise ValueError(
                f"params[{r}] is no copy of params[0]: {name!r} is {parameter.dtype} {tuple(parameter.shape)}, in params[0] "
                f"it is {model.dtype} {tuple(model.shape)}"
            )


def _check_distinct(replicas: Sequence[Sequence[torch.nn.Parameter]]) -> None:
    seen: dict[int, int] = {}
    for r, params in enumerate(replicas):
        for parameter in params:
            if seen.setdefault(id(parameter), r) != r:
                raise ValueError(
                    f"params[{r}] and params[{seen[id(parameter)]}] share parameters: each copy needs its own; make copies "
                    "with tristep.replicate(module, devices)"
                )


def _named_parameters(params: Any) -> list[tuple[str, torch.nn.Parameter, dict[str, float]]]:
    """Name, parameter and own multipliers of each, every parameter once."""
    if isinstance(params, DistributedDataParallel):
        params = params.module
    if isinstance(params, torch.nn.Module):
        entries: list[Any] = list(params.named_parameters())
    elif isinstance(params, Mapping):
        entries = sorted(params.items())
    elif isinstance(params, torch.Tensor) or not isinstance(params, Iterable):
        raise TypeError(
            f"params must be a module, or a list or dict of parameters, got {type(params).__name__}"
            + (": put it into a list" if isinstance(params, torch.Tensor) else "")
        )
    else:
        entries = list(params)
    named: list[tuple[Any, Any, dict[str, float]]] = []
    for i, entry in enumerate(entries):
        if isinstance(entry, Mapping):
            named += _group(i, entry)
        elif isinstance(entry, tuple) and len(entry) == 2:
            named.append((*entry, {}))
        else:
            named.append((str(len(named)), entry, {}))
    for name, parameter, _ in named:
        if not isinstance(name, str):
            raise TypeError(f"params: names must be strings, got {name!r} ({type(name).__name__})")
        if not isinstance(parameter, torch.nn.Parameter):
            hint = "; wrap it in torch.nn.Parameter" if isinstance(parameter, torch.Tensor) else ""
            raise TypeError(f"params: {name!r} must be a torch.nn.Parameter, got {type(parameter).__name__}{hint}")
    named = [(checkpoint.plain_name(name), parameter, own) for name, parameter, own in named]
    once: dict[int, Any] = {}
    for entry in named:
        once.setdefault(id(entry[1]), entry)
    result = list(once.values())
    names = [name for name, _, _ in result]
    if twice := sorted({name for name in names if names.count(name) > 1} if len(set(names)) < len(names) else ()):
        raise ValueError(f"params: the names {_listed(twice)} stand for several parameters: give each its own")
    return result


def _gluons_order(named: Sequence[tuple[str, Any, Any]], optimizer: Optimizer) -> list[int]:
    """The order to update a module's parameters in: that of sorted names, where numbers depend on it, else the module's."""
    places = list(range(len(named)))
    return sorted(places, key=lambda i: named[i][0]) if optimizer.depends_on_order else places


def _group(i: int, group: Mapping[str, Any]) -> list[tuple[str, Any, dict[str, float]]]:
    allowed = ("params", "lr_mult", "wd_mult")
    for key in group:
        if key not in allowed:
            raise ValueError(
                f"params[{i}] has the key {key!r}: a group has {', '.join(map(repr, allowed))}, where the multipliers are "
                f"relative to the optimizer's learning_rate and wd.{did_you_mean(str(key), allowed)}"
            )
    if "params" not in group:
        raise ValueError(f"params[{i}] has no 'params': a group is a dict with 'params' and, if wanted, multipliers")
    own = {key: real(f"params[{i}][{key!r}]", group[key], low=0) for key in allowed[1:] if key in group}
    members = group["params"]
    if isinstance(members, torch.Tensor):
        members = [members]
    if not isinstance(members, Iterable):
        raise TypeError(f"params[{i}]['params'] must be a parameter or a list of such, got {type(members).__name__}")
    named = []
    for j, member in enumerate(members):
        name, parameter = member if isinstance(member, tuple) and len(member) == 2 else (f"{i}.{j}", member)
        named.append((name, parameter, own))
    return named


def _check_parameters(named: list[tuple[str, torch.nn.Parameter, Any]]) -> None:
    if not named:
        raise ValueError(
            "params is empty: there is nothing to train (was a generator used up before, or a model without layers given?)"
        )
    devices: dict[torch.device, str] = {}
    for name, parameter, _ in named:
        if _is_lazy(parameter):
            continue
        if parameter.dtype not in DTYPES:
            kind = "complex weights" if parameter.is_complex() else "weights of this type"
            raise TypeError(
                f"params: {name!r} is {parameter.dtype}: {kind} cannot be trained; allowed are {', '.join(map(str, DTYPES))}"
            )
        if parameter.layout != torch.strided:
            raise TypeError(f"params: {name!r} is sparse ({parameter.layout}): weights must be dense")
        if parameter.is_inference():
            raise ValueError(
                f"params: {name!r} was made under torch.inference_mode(), where autograd is not told of changes: make the "
                "model outside"
            )
        if is_wrapper(parameter):
            raise TypeError(
                f"params: {name!r} is a {type(parameter).__name__}: a Trainer takes plain parameters; the classes of "
                "tristep.optim train those that fully_shard or distribute_tensor has made"
            )
        devices.setdefault(parameter.device, name)
    if len(devices) > 1:
        where = ", ".join(f"{name!r} on {device}" for device, name in devices.items())
        raise ValueError(f"params lie on different devices ({where}): move the model to one device first")


def _check_one_reduces(kvstore: Any) -> None:
    """Refuse a store of several processes beside torch's own reduction."""
    name = kvstore if isinstance(kvstore, str) else getattr(kvstore, "type", None)
    if isinstance(name, str) and name.lower().startswith("dist"):
        raise ValueError(
            f"kvstore={kvstore!r} with a DistributedDataParallel module: gradients would be reduced twice; use "
            "kvstore=None, or give the module inside, ddp.module"
        )


def _check_store(kvstore: Any, compression_params: Any, update_on_kvstore: Any, copies: int) -> str | KVStore | None:
    """The store that is asked for: a name in lower case, the store itself, or None where none is needed."""
    known = [*KVSTORES, *(name for name in stores.registered() if name not in KVSTORES)]
    if kvstore is not None and not isinstance(kvstore, KVStore):
        if not isinstance(kvstore, str):
            listed = ", ".join(map(repr, known))
            raise TypeError(f"kvstore={kvstore!r}: must be None or a name, one of {listed}; or a KVStore")
        kvstore = choice("kvstore", kvstore, known, ignore_case=True)
    if update_on_kvstore is not None:
        flag("update_on_kvstore", update_on_kvstore)
    if compression_params is not None:
        of_servers = (_is_dist(kvstore) and not _is_in_step(kvstore)) or isinstance(kvstore, stores.ServerStore)
        check = compressor_of if of_servers else check_compression if _is_in_step(kvstore) else checked
        check(compression_params)
    is_name = isinstance(kvstore, str)
    dist = _is_dist(kvstore)
    if kvstore is None or (is_name and copies == 1 and not dist):
        if update_on_kvstore:
            several = "without a store each copy is updated by itself, so none"
            why = several if copies > 1 else "one copy of a model needs no store, so none"
            raise ValueError(f"update_on_kvstore=True with kvstore={kvstore!r}: {why} can update it; leave it out")
        return None
    if dist:
        capable = True
    elif is_name:
        capable = stores.registered().get(kvstore, stores.LocalStore).is_capable("optimizer")
    else:
        capable = kvstore.is_capable("optimizer")
    updates_on_store(kvstore, capable, update_on_kvstore)
    if compression_params is not None and kvstore in ("local", "nccl") and kvstore not in stores.registered():
        raise ValueError(
            f"compression_params={compression_params!r} with kvstore={kvstore!r}, which does not compress gradients: use "
            "'device', or leave it out"
        )
    return kvstore


def _is_dist(kvstore: Any) -> bool:
    return isinstance(kvstore, str) and kvstore.startswith("dist") and kvstore not in stores.registered()


def _is_in_step(kvstore: Any) -> bool:
    """Whether the store is one of several processes that work in step."""
    return getattr(kvstore, "in_step", False) or (_is_dist(kvstore) and "async" not in kvstore)


def _exchange_for(
    kvstore: str | KVStore | None,
    copies: list[Copy],
    names: list[str],
    optimizer: Optimizer,
    compression_params: Mapping[str, Any] | None,
    update_on_kvstore: bool | None,
    engine: str | None,
) -> Exchange:
    """What several copies of a model, here or in several processes, or a store that was given, need for a step."""
    if _is_in_step(kvstore):
        if len(copies) > 1:
            raise ValueError(
                f"params has {len(copies)} copies of the model with kvstore={kvstore!r}, which has one in each process: "
                "start more of these, one for each device"
            )
        store: Any = stores.create(kvstore) if isinstance(kvstore, str) else kvstore
        group = store.group
        kind = ShardExchange if updates_on_store(store, True, update_on_kvstore) else BucketExchange
        return kind(group, copies[0], names, optimizer, compression_params, engine)
    if kvstore is None:
        return Apart(copies)
    if _is_dist(kvstore):  # in a server's process this does not come back
        kvstore = stores.create(kvstore)  # type: ignore[arg-type]

    def make() -> KVStore:
        return stores.create(kvstore) if isinstance(kvstore, str) else kvstore

    def decide(store: KVStore, sparse: bool) -> bool:
        largest = max(param.numel() for param in copies[0].params)
        return updates_on_store(kvstore, store.is_capable("optimizer"), update_on_kvstore, sparse, largest)

    return StoreExchange(make, copies, names, optimizer, decide, compression_params, engine)


def _make_optimizer(optimizer: Any, optimizer_params: Any) -> Optimizer:
    if optimizer_params is None:
        optimizer_params = {}
    try:
        arguments = dict(optimizer_params)
    except (TypeError, ValueError):
        raise TypeError(f"optimizer_params={optimizer_params!r}: must be a dict or pairs of name and value") from None
    if isinstance(optimizer, Optimizer) and arguments:
        raise ValueError(
            f"optimizer_params={arguments!r} beside an optimizer that is made already: give them to "
            f"{type(optimizer).__name__}(...), or give optimizer={type(optimizer).__name__.lower()!r} by name"
        )
    return create(optimizer, **arguments)
