"""Trainer: Gluon's way to apply an optimizer to a model's parameters, on PyTorch."""

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
from ..kernels.backends import choose_engine
from ..kernels.graphs import Recording
from . import checkpoint
from .capture import CapturedStep
from .displaced import DisplacedWeights
from .errors import StaleGradientError, UpdateOnKVStoreError
from .in_backward import BackwardStep, check_optimizer
from .interrupts import interrupts_wait, uninterrupted
from .kvstore import KVStore
from .optimizer import Optimizer, RuleOptimizer, Updater, create
from .params import (
    check_distinct,
    check_parameters,
    gluons_order,
    is_lazy,
    listed,
    modules_of,
    named_parameters,
    replica_of,
)
from .replica import Replica
from .step import Stepper
from .sync.base import GradientSync
from .sync.create import check_one_reduces, check_store, sync_for
from .sync.kvstore import KVStoreSync, check_residuals
from .sync.none import NoSync
from .telemetry import Telemetry
from .validation import boolean, number

__all__ = ["StaleGradientError", "Trainer", "UpdateOnKVStoreError"]

P = ParamSpec("P")
T = TypeVar("T")


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
        # From the first step to the second, to notice a missing zero_grad(); None before, False after it.
        self._accumulation_hook: Any = None
        self._ascended: DisplacedWeights | None = None  # between `ascend` and the next step
        self._averaging = False  # whether the weights are those of `averaged_weights` now
        self._replaced = False  # whether another trainer has taken the optimizer over
        self._replicas = [Replica(self._params, self._names, self._updater, zero_grads)]
        for parameters in replicas[1:]:
            self._replicas.append(Replica(parameters, self._names, Updater(self._optimizer, engine), zero_grads))
        if isinstance(self._optimizer, RuleOptimizer):
            self._optimizer._updater = weakref.ref(self._updater)  # and not the last replica's
        stores = kvstore, self._replicas, self._names, self._optimizer, compression_params, update_on_kvstore, engine
        self._stepper = Stepper(self._replicas, sync_for(*stores), self._optimizer, zero_grads)
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
        if not self._sync.reports_metrics:
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
        self._sync.accumulate(True)
        try:
            yield
        finally:
            self._sync.accumulate(False)

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
        batch_size = number("batch_size", batch_size, above=0)
        ignore_stale_grad = boolean("ignore_stale_grad", ignore_stale_grad)
        self._refuse_together("step_in_backward()")
        if self._ascended is not None:
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
        self._stepper.check_initialized()
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
                    self._replicas[0].plan = None  # counts have moved, and perhaps not all of them
                    if telemetry is not None:
                        telemetry._end(into, optimizer.num_update)
                else:
                    updater.states, updater.masters, optimizer.rescale_grad = before
        pairs = zip(self._params, self._names, step.updated, strict=True)
        missing = [repr(name) for param, name, updated in pairs if param.requires_grad and not updated]
        if missing and not ignore_stale_grad:
            done = "the other parameters have been updated" if any(step.updated) else "nothing has been changed"
            raise StaleGradientError(
                f"step_in_backward() ended with no gradient for {listed(missing)}; {done}: call backward() inside it, on a "
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
        if self._stepper.is_alone:
            return
        self._stepper.start("allreduce_grads()")
        self._stepper.allreduce()

    @_outside_dynamo
    def update(self, batch_size: float, ignore_stale_grad: bool = False) -> None:
        """As `step`, without reducing: the second half, after `allreduce_grads`.

        Raises:
            UpdateOnKVStoreError: the store updates the weights.
        """
        self._refuse_averaged("update()")
        self._refuse_replaced()
        self._stepper.start("update()")
        self._step(batch_size, ignore_stale_grad, reduce=False)

    @_outside_dynamo
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients, or fill them with zeros. A gradient that was used up does not become fresh by that."""
        self._stepper.zero_grad(set_to_none)

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
        rho = number("rho", rho, above=0)
        adaptive = boolean("adaptive", adaptive)
        self._refuse_together("ascend()")
        if self._ascended is not None:
            raise RuntimeError("ascend() has moved the weights up already: take a step() first")
        self._refuse_averaged("ascend()")
        self._stepper.check_initialized()
        choice, replica = self._stepper.choose(ignore_stale_grad=False), self._replicas[0]
        gradients = choice.collected[0].gradients if choice.chosen is None else replica.gradients(choice.chosen)
        ascended = DisplacedWeights(self._replicas)
        hyper = {"rho": rho, "adaptive": float(adaptive)}
        self._updater.apply(rules.ascent, hyper, range(len(self._params)), self._params, gradients)
        ascended.mark()
        self._ascended = ascended
        replica.guard.use(gradients)

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
        if self._ascended is not None:
            raise RuntimeError("ascend() has moved the weights up: take a step() before averaged_weights()")
        self._stepper.start()
        self._sync.follow_weights()
        displaced = DisplacedWeights(self._replicas)
        if self._sync.updates:
            self._sync.apply(*found)
        else:
            for replica in self._replicas:
                replica.updater.apply(*found, range(len(replica.params)), replica.params)
        displaced.mark()
        self._averaging = True
        try:
            yield
            written = displaced.written()
        finally:
            self._averaging = False
            displaced.restore()
        if written:
            raise RuntimeError(
                f"{listed(written)} written to inside averaged_weights(), which shows an average and then puts back the "
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
        if self._ascended is not None:
            raise RuntimeError(
                "between ascend() and step() the weights are not those that training goes on with, and nothing is to be "
                "saved: save after step()"
            )
        if not self._stepper.is_alone:
            self._stepper.start()
        state, residuals = self._sync.state_dict(), self._sync.residuals()
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
        if not self._stepper.is_alone:
            self._stepper.start()
        if self._sync.updates:
            self._sync.load_state_dict(state_dict)
        else:
            for replica in self._replicas:
                checkpoint.restore(replica.updater, self._names, replica.params, state_dict)
        self._sync.load_residuals(residuals)
        for replica in self._replicas:
            replica.forget_counts()
        if scaling is not None:
            self._loss_scaler.load_state_dict(scaling)
        if self._ascended is not None:  # weights that have been written since `ascend` are those that were loaded
            if not self._ascended.written():
                self._ascended.restore()
            self._ascended = None
        self._stepper.forget_plans()

    def save_states(self, fname: str | os.PathLike[str]) -> None:
        """Write `state_dict` to a file (safetensors with JSON in its metadata): whole, or not at all."""
        state = self.state_dict()
        if self._sync.writes:
            checkpoint.write(fname, state)
        self._sync.end_save()

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
        if not self._stepper.is_alone:
            raise TypeError(
                "a Trainer of several copies of a model, or with a store, cannot be copied or pickled: use state_dict()"
            )
        if self._averaging or (self._backward is not None and self._backward.is_open):
            raise RuntimeError("a Trainer cannot be copied inside averaged_weights() or step_in_backward(): leave it first")
        without = {k: v for k, v in vars(self).items() if k not in ("_replicas", "_stepper")}
        before = None if self._ascended is None else self._ascended.before
        return without | {"_backward": None, "_accumulation_hook": False, "_ascended": before}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._replicas = [Replica(self._params, self._names, self._updater, self._zero_grads)]
        self._stepper = Stepper(self._replicas, NoSync(1), self._optimizer, self._zero_grads)
        if self._ascended is not None:
            self._ascended = DisplacedWeights(self._replicas, state["_ascended"])
        self._optimizer.trainer = weakref.ref(self)
        if isinstance(self._optimizer, RuleOptimizer):
            self._optimizer._updater = weakref.ref(self._updater)

    def __repr__(self) -> str:
        count = sum(parameter.numel() for parameter in self._params if not is_lazy(parameter))
        copies = f"{len(self._replicas)} copies of " if len(self._replicas) > 1 else ""
        return f"Trainer({copies}{len(self._params)} parameters, {count:,} elements, {self._optimizer!r})"

    @property
    def _sync(self) -> GradientSync:
        return self._stepper.sync

    @property
    def replicas(self) -> list[Replica]:
        """The copies of the model in this process."""
        return self._replicas

    @uninterrupted
    def _step(self, batch_size: float, ignore_stale_grad: bool, reduce: bool = True) -> None:
        if type(batch_size) is not int or batch_size <= 0:
            batch_size = number("batch_size", batch_size, above=0)
        if ignore_stale_grad is not False:
            ignore_stale_grad = boolean("ignore_stale_grad", ignore_stale_grad)
        if self._averaging or self._replaced:
            self._refuse_averaged("step()")
            self._refuse_replaced()
        stepper, optimizer, telemetry = self._stepper, self._optimizer, self._telemetry
        stepper.start()
        if self._ascended is not None and (written := self._ascended.written()):
            self._ascended = None
            raise RuntimeError(
                f"{listed(written)} written to between ascend() and step(), which would put back the weights from before: "
                "they stay as they have been written, and the ascent is forgotten; take gradients there, and step again"
            )
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
        if self._accumulation_hook is not False:
            self._watch_accumulation()
        if Recording.current is not None:
            self._note_recording(Recording.current, batch_size)

    def _watch_accumulation(self) -> None:
        """Between the first two steps, warn where a backward pass adds to the gradients that the first has used."""
        if self._accumulation_hook is not None:
            self._accumulation_hook.remove()
            self._accumulation_hook = False
            return
        self._accumulation_hook = False
        # Where gradients are reduced while backward runs, they are written to the tensors of the last step anyway.
        reduced = self._reduced_by_torch or not isinstance(self._sync, NoSync | KVStoreSync)
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

    def _refuse_together(self, what: str) -> None:
        if not self._stepper.is_alone:
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

    def _use_control(self, control: torch.Tensor) -> None:
        """Take a loss scaler's control for updates from now on. Raises RuntimeError where that cannot be."""
        self._sync.use_control(control)
        for replica in self._replicas:
            replica.updater.control = control
            replica.forget_plan()  # it works with other kernels from now on

    def _note_recording(self, recording: Recording, batch_size: float) -> None:
        replica, plan = self._replicas[0], self._replicas[0].plan
        assert plan is not None
        update: Any = plan.update
        active = list(plan.active)

        def holds() -> bool:
            optimizer: Any = self._optimizer
            return replica.plan is plan and plan.is_of_states(update) and update.rule is optimizer.composed_rule

        def advance() -> None:
            before, self._optimizer.rescale_grad = self._optimizer.rescale_grad, self._scale / batch_size
            try:
                plan.host_step(update, active)
            except BaseException:
                self._optimizer.rescale_grad = before
                raise

        recording.owners.append((holds, advance))


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
