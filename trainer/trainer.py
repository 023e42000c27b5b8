"""Trainer: Gluon's `Trainer`, which applies an optimizer to a model's parameters, on PyTorch.

A step runs `step`, `_step`, `_choose` and `_apply`, for any number of replicas and any synchronization of gradients. With
small models the Python code dominates the time of a step, so the usual case, one replica whose gradients are all fresh,
skips every check that it does not need.
"""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from ..kernels import Rule
from ..kernels.backends import choose_engine
from ..kernels.graphs import current_recording
from ..kernels.messages import listed
from . import serialization
from .checkpoint.content import resume
from .checkpoint.folder import Checkpoint
from .checkpoint.full_precision import float32_weights, load_float32_weights
from .kvstore import KVStore
from .kvstore.create import check_one_reduces, check_store, sync_for
from .kvstore.sync import GradientSync
from .optimizer import MultiOptimizer, Optimizer, RuleOptimizer, Updater, create
from .optimizer.multi import part_of, parts_of
from .optimizer.patterns import layers_of
from .step.accumulation import AccumulationWatch
from .step.capture import CapturedStep, check_capture, record_step
from .step.in_backward import BackwardStep, check_optimizer
from .step.params import (
    check_alike,
    check_distinct,
    check_parameters,
    gluons_order,
    is_lazy,
    modules_of,
    named_parameters,
    replica_of,
)
from .step.replica import DisplacedWeights, Replica
from .step.telemetry import Telemetry, attached
from .utils.dynamo import outside_dynamo
from .utils.errors import UpdateOnKVStoreError
from .utils.interrupts import interrupts_wait, uninterrupted
from .validation import boolean, number


class Trainer:
    """Updates the parameters of a model with an optimizer, from the gradients in `.grad`, as Gluon's `Trainer` does.

    Args:
        params: the parameters to train: a `torch.nn.Module`; an iterable of parameters or of (name, parameter) pairs; a
            dict of parameters by name, which are updated in the order of their sorted names, as in Gluon; or torch-style
            groups, dicts with "params" and optionally "lr_mult" and "wd_mult". (A module's parameters are sorted by name,
            too, if the order changes numbers: with Nadam and user-defined optimizers.) Parameters with
            `requires_grad=False` are skipped. Or a list of modules, replicas of one model on different devices (see
            `tristep.replicate`): the trainer keeps them equal, and each computes gradients of its part of a batch. The
            first replica determines names, multipliers and `requires_grad`. A module in torch's DistributedDataParallel,
            which reduces gradients itself, has the parameter names of its inner module.
        optimizer: a name, such as "sgd" or "adam", or an `Optimizer`. Or a list of (pattern, optimizer) and (pattern,
            optimizer, arguments): each parameter gets the optimizer of the first pattern that its name matches, see
            `tristep.optimizer.MultiOptimizer`.
        optimizer_params: arguments of the optimizer by name, as a dict or as pairs; None if `optimizer` is an instance.
            With a list of optimizers, defaults for the arguments that an entry does not give.
        kvstore: which store sums the gradients of several replicas: "local" (on the CPU), "device" or "nccl" (on the
            replicas' device; see `tristep.kvstore.create` for MXNet's other names), the name of a registered store, or None
            to update the replicas independently. A single replica needs no store and gets none, unless a `KVStore`
            object is passed. "dist_sync", "dist_device_sync" and "dist" are for several synchronous processes, started by
            torchrun, with one replica each: all of them must make the same calls. The first step broadcasts the weights of
            rank 0. With "dist_async" and "dist_device_async" processes do not wait for each other: the last process is a
            server, which updates the weights; its program ends in this constructor, when all workers have finished. See
            docs/scaling.md.
        compression_params: gradient compression, {"type": "2bit" or "1bit", "threshold": 0.5}, used when the store "device"
            sums the gradients of several replicas; each replica keeps a residual of the unsent part. With "local" it is an
            error, and without a store it has no effect, which a warning says once. "dist_sync" and "dist_async" have more
            types, see `tristep.kvstore.create_compressor`. With "dist_async" each worker compresses its gradients, and
            pulls uncompressed weights.
        update_on_kvstore: True: the store updates the weights, with one state for all replicas, and returns them. False:
            the sum of the gradients is written to `.grad`, and each replica is updated with its own state. None means True
            if the store can update, unless there are sparse gradients, the environment variable MXNET_UPDATE_ON_KVSTORE is
            0, or "local" would update a parameter of more than 2**24 elements. True without a store is an error. With
            "dist_sync" and True each process updates its shard of the weights, and stores the states of that shard only.
        engine: "triton", "cpu", "eager", or None for the fastest that is available (see `tristep.kernels`).
        telemetry: a `Telemetry` that records statistics of each parameter at each step, or True for one with its defaults;
            None records nothing. The attribute `telemetry` may be set to another `Telemetry`, or None, between steps.
        zero_grads: whether each step fills the gradients that it has used with zeros, in the same pass, so that the next
            backward pass accumulates into the same memory. A gradient is stale until autograd writes to it again.

    Raises:
        TypeError, ValueError: an invalid argument; the message says which, and what is allowed.
        RuntimeError: a dist store in a program that is one process.

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
        for _, parameter, multipliers in named:
            for multiplier, value in multipliers.items():
                setattr(parameter, multiplier, value)
        self._names = [name for name, _, _ in named]
        self._params = replicas[0]
        self._scale = self._optimizer.rescale_grad
        self._updater = Updater(self._optimizer, engine)
        self._zero_grads = zero_grads
        self._loss_scaler: Any = None  # amp.py puts one here
        self._backward: BackwardStep | None = None
        self._watch = AccumulationWatch(self._params)
        self._averaging = False  # whether a context of `averaged_weights` is open
        self._replaced = False  # whether the optimizer has been given to another trainer since
        models = [Replica(self._params, self._names, self._updater, zero_grads)]
        models += [Replica(each, self._names, Updater(self._optimizer, engine), zero_grads) for each in replicas[1:]]
        self._updater.register_with(self._optimizer)  # and not the last replica's
        stores = kvstore, models, self._optimizer, compression_params, update_on_kvstore, engine
        self._use_replicas(models, sync_for(*stores))
        self.telemetry = telemetry
        _adopt(self._optimizer, self)

    def _use_replicas(self, replicas: list[Replica], sync: GradientSync) -> None:
        """Set the replicas, and what reduces their gradients with each other and with those of other processes."""
        self._replicas, self._sync = replicas, sync
        self._is_alone = len(replicas) == 1 and not sync.reduces  # one replica, and no store
        self._started = False  # whether `sync` has been started

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer in use."""
        return self._optimizer

    @property
    def learning_rate(self) -> float:
        """The optimizer's current learning rate, before multipliers."""
        return self._optimizer.learning_rate

    @property
    def replicas(self) -> list[Replica]:
        """The replicas of the model in this process."""
        return self._replicas

    @property
    def telemetry(self) -> Telemetry | None:
        """The `Telemetry` that records statistics of each step, or None."""
        return self._telemetry

    @telemetry.setter
    def telemetry(self, telemetry: Telemetry | bool | None) -> None:
        self._telemetry = attached(telemetry, self._optimizer, self._sync.reports_metrics, self._names, self._params)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; refuse settings of the optimizer, which would be attributes that nobody reads.

        Raises:
            AttributeError: `name` is "lr", "learning_rate" or another setting of the optimizer; nothing has been changed.
        """
        if name[0] != "_" and (name == "learning_rate" or not hasattr(type(self), name)):
            if name in ("lr", "learning_rate"):
                raise AttributeError(f"{name} of a Trainer cannot be set: call trainer.set_learning_rate({value!r})")
            optimizer, meant = vars(self).get("_optimizer"), "wd" if name == "weight_decay" else name
            holders = {} if optimizer is None else {"trainer.optimizer": optimizer}
            if isinstance(optimizer, MultiOptimizer):
                holders |= {f"trainer.optimizer.optimizers[{k}]": part for k, part in enumerate(optimizer.optimizers)}
            for where, holder in holders.items():
                if meant in _SETTINGS or meant in holder.settings():
                    raise AttributeError(f"{name} of a Trainer cannot be set: its optimizer has it, {where}.{meant}")
        super().__setattr__(name, value)

    def set_learning_rate(self, lr: float) -> None:
        """Set the optimizer's learning rate, before multipliers.

        Raises:
            UserWarning: a scheduler determines the learning rate.
            ValueError: it is negative.
        """
        self._optimizer.set_learning_rate(lr)

    @outside_dynamo
    def step(self, batch_size: float, ignore_stale_grad: bool = False) -> None:
        """Sum the gradients over all replicas, divide them by `batch_size`, and update the weights.

        A gradient is stale unless `backward`, or anything else, has written to it since the last step. A step leaves
        gradients as they are, with two exceptions: `zero_grads=True` fills them with zeros, and with several replicas whose
        weights the store does not update, the sum replaces them.

        Pass 1 if the loss is a mean over the batch, as torch's losses are by default. With the number of samples it would be
        divided twice, and updates of SGD would be that many times too small. Nothing warns of this: a step sees no loss.

        The gradients of several replicas are summed, not averaged: `batch_size` counts the samples of all of them.

        Gradients of several backward passes accumulate; one step then applies them, with `batch_size` the number of all
        samples. After `zero_grad(set_to_none=False)` the next gradients accumulate in the same memory. With
        `parameter.grad_dtype = torch.float32` gradients of 16-bit parameters accumulate in float32, if torch supports it.

            for x, y in parts:
                loss(net(x), y).backward()
            trainer.step(batch_size=sum(len(x) for x, _ in parts))
            trainer.zero_grad(set_to_none=False)

        Args:
            batch_size: the number of samples, > 0, if the loss is a sum over them; 1 if it is a mean, as torch's losses are.
            ignore_stale_grad: skip parameters with a stale gradient, including their states and counts, instead of raising
                an error. A parameter with a fresh gradient in some replicas is updated in all, with the sum of the fresh
                gradients.

        Raises:
            StaleGradientError: some parameters have a stale gradient, or none; nothing has been changed.
            ValueError, TypeError: an invalid batch size or gradient; nothing has been changed. Or the parameters or
                settings of several processes differ, or differed in the last step.
            RuntimeError: one of several synchronous processes is missing.
        """
        self._step(batch_size, ignore_stale_grad)

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Accumulate gradients without communication inside this context, as DDP's `no_sync()` does.

        In a single process it changes nothing.

            with trainer.accumulate():
                for x, y in parts[:-1]:
                    loss(net(x), y).backward()
            loss(net(x), y).backward()
            trainer.step(batch_size)
        """
        with self._sync.accumulate():
            yield

    @contextmanager
    def step_in_backward(self, batch_size: float, ignore_stale_grad: bool = False) -> Iterator[None]:
        """Take a step inside the one backward pass of this context: update each parameter once its gradient is complete.

        Each gradient is then freed (`grad` becomes None), so that the gradients of a model never need memory all at once;
        small gradients are collected, up to 1 MiB, and applied together. Weights, counts and states become the same as with
        `step`. To accumulate gradients of several batches, run all backward passes but the last before the context.

            with trainer.step_in_backward(batch_size):
                loss(net(x), y).backward()

        Args:
            batch_size: the number of samples, > 0, if the loss is a sum over them; 1 if it is a mean; see `step`.
            ignore_stale_grad: skip parameters that get no gradient, instead of raising an error at the end. A schedule is
                called as if all parameters got a gradient.

        Raises:
            TypeError, ValueError: an invalid argument, or an optimizer that needs all gradients together, such as Prodigy;
                nothing has been changed.
            RuntimeError: inside another `step_in_backward`, with several replicas of the model or a store,
                with DistributedDataParallel, or with a loss scaler, which must see all gradients before a step; nothing has
                been changed. Or, from `backward`, a parameter got a second gradient, which is not applied.
            StaleGradientError: on leaving, some parameters got no gradient; the others have been updated.
        """
        batch_size = number("batch_size", batch_size, above=0)
        ignore_stale_grad = boolean("ignore_stale_grad", ignore_stale_grad)
        with self._backward_step().take(self._scale / batch_size, ignore_stale_grad, self._telemetry):
            yield

    @outside_dynamo
    def allreduce_grads(self) -> None:
        """Replace the gradients by their sums over all replicas, without updating the weights.

        Call `update` next, for example after clipping the sums; `step` would sum them again. With one replica and no store
        it does nothing.

        Raises:
            UpdateOnKVStoreError: the store updates the weights, so that a step cannot be split.
        """
        if self._is_alone:
            return
        self._start("allreduce_grads()")
        if not self._watch.is_over:
            self._watch.before_use()
        self._sync.reduce_gradients()

    @outside_dynamo
    def update(self, batch_size: float, ignore_stale_grad: bool = False) -> None:
        """Update the weights with the gradients as they are: the second half of a step, after `allreduce_grads`.

        Args:
            batch_size: the number of samples, > 0, by which gradients are divided; 1 if the loss is a mean; see `step`.
            ignore_stale_grad: skip parameters with a stale gradient, instead of raising an error.

        Raises:
            StaleGradientError: some parameters have a stale gradient, or none; nothing has been changed.
            ValueError, TypeError: an invalid batch size or gradient; nothing has been changed.
            UpdateOnKVStoreError: the store updates the weights, so that a step cannot be split.
        """
        self._refuse_step("update()")
        self._start("update()")
        self._step(batch_size, ignore_stale_grad, reduced=True)

    @outside_dynamo
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients, or fill them with zeros; a gradient that a step has used stays stale.

        Args:
            set_to_none: True sets `grad` to None; False fills gradients with zeros, so that the next ones accumulate in the
                same memory.
        """
        boolean("set_to_none", set_to_none)
        self._sync.forget_sums()
        for replica in self._replicas:
            replica.zero_grad(set_to_none)

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """Give the model the optimizer's averaged weights inside this context, for evaluation.

        An optimizer keeps a moving average if it has `ema_decay`; some, such as `ScheduleFreeSGD`, always keep an average.
        With several optimizers, parameters whose optimizer keeps no average keep their weights. On leaving, weights are
        restored bit for bit. No step may be taken inside.

        Raises:
            ValueError: no optimizer keeps an average; nothing has been changed.
            RuntimeError: a store in another process keeps the average; or it is called inside another `averaged_weights`;
                or, on leaving, weights were written to inside: they are restored all the same.

        Example:
            >>> import torch, tristep
            >>> net = torch.nn.Linear(2, 1)
            >>> trainer = tristep.Trainer(net, "schedulefreesgd")
            >>> with trainer.averaged_weights():
            ...     prediction = net(torch.ones(1, 2))
        """
        averages = _averages_of(self._optimizer)
        self._refuse_averaged("averaged_weights()")
        displaced = None
        try:
            try:
                self._averaging = True
                self._start()
                self._sync.follow_weights()
                displaced = DisplacedWeights(self._replicas)
                with interrupts_wait():
                    for average in averages:
                        self._sync.apply_anywhere(*average)
                    displaced.mark()
                yield
                written = displaced.written()
            finally:
                self._averaging = False
                if displaced is not None:
                    displaced.restore()
        except KeyboardInterrupt:  # which may have come before `restore` let interrupts wait
            self._averaging = False
            if displaced is not None:
                displaced.restore()
            raise
        if written:
            raise RuntimeError(
                f"{listed(written)} written to inside averaged_weights(): the weights from before have been restored, and "
                "what was written is lost; write to weights outside of it"
            )

    def float32_weights(self) -> dict[str, torch.Tensor]:
        """Return the weights of the first replica by name, in float32, in new tensors.

        A 16-bit parameter with a master has the precision of its master; float64 weights are rounded. With a dist store
        every process must call this, and gets all weights.

        Raises:
            RuntimeError: a store in another process has the masters; or inside `averaged_weights`.
            TypeError: a user-defined optimizer with `multi_precision`.
        """
        self._refuse_averaged("float32_weights()")
        self._check_initialized()
        if not self._is_alone:
            self._start()
        return float32_weights(self._replicas, self._sync, self._optimizer)

    @uninterrupted
    def load_float32_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Set the weights and masters of all replicas, rounded to their dtypes; optimizer states and counts stay.

        With a dist store every process must call this, with the same weights; if one refuses them, all raise an error.

        Args:
            weights: for each parameter's name a floating-point tensor of its shape, as `float32_weights` returns them.

        Raises:
            ValueError, TypeError: `weights` lacks a parameter, or has another name, shape or dtype, or the optimizer is a
                user-defined one with `multi_precision`; nothing has been changed.
            RuntimeError: a store in another process has the masters; or inside `averaged_weights`; nothing has been changed.
        """
        self._refuse_averaged("load_float32_weights()")
        self._check_initialized()
        if not self._is_alone:
            self._start()
        load_float32_weights(self._replicas, self._sync, self._optimizer, weights)

    def capture(self, fn: Callable[..., Any], *, warmup: int = 3) -> CapturedStep:
        """Return a callable that runs a training function as a CUDA graph, which saves its work on the host.

        Each call is one training step. The first calls run normally; then the graph is recorded, and from then on replayed.
        Learning rate, schedule, decay, multipliers, betas, clipping, update counts and loss scale stay adjustable. On a
        device without CUDA graphs the function is simply called.

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
            fn: a function of tensors, which are copied to the parameters' device; it takes one step of this trainer. It must
                not read values on the host (`loss.item()`), and its control flow is recorded once.
            warmup: the number of calls that run normally, >= 2.

        Returns:
            A callable with the arguments and results of `fn`. The next call overwrites the tensors that it returns, and the
            gradients.

        Raises:
            TypeError: `fn` is not callable.
            ValueError: an optimizer with a rule of whole tensors other than Muon and NorMuon, or these with an option that
                changes the rule, such as ema_decay; an engine other than triton on a GPU; a trainer with telemetry.
            RuntimeError: several replicas of the model, or a store.

        Source: `torch.cuda.graph`.
        """
        self._refuse_together("capture()")
        device = self._params[0].device
        check_capture(self._updater, device, self._telemetry)
        return CapturedStep(fn, device, warmup)

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's settings, counts, schedule and states, as plain data and tensors (not copied).

        It includes the state of a loss scaler, and the residuals of gradient compression. With several replicas of the
        model it holds the first one's states, and can be loaded by a trainer with more or fewer replicas.
        """
        if not self._is_alone:
            self._start()
        state = self._sync.collect()
        return state if self._loss_scaler is None else state | {"loss_scaler": self._loss_scaler.state_dict()}

    @uninterrupted
    def load_state_dict(
        self, state_dict: Mapping[str, Any], *, strict: bool = True, settings: str = "file"
    ) -> serialization.Loaded | None:
        """Restore the optimizer's settings, schedule, counts and states from `state_dict`, as Gluon does.

        Multipliers, which belong to the parameters, stay. Residuals of gradient compression are dropped if this trainer does
        not compress, and summed and divided equally if it has fewer replicas.

        With `dist_sync` every process must call this; if one refuses its state, the others raise a ValueError that names it,
        and nothing has been changed in any. In other trainers, with DistributedDataParallel too, a process knows of itself
        only.

        Args:
            state_dict: the result of `state_dict`.
            strict: whether the parameters must be those of the saved state. False: a parameter gets the states and the count
                that are saved under its name, if the shape is the same, too. Others start anew: their states are made by the
                next step, and their count is 0, or `begin_num_update`. What was loaded is printed. The schedule goes on at
                the saved `num_update`.
            settings: with `strict=False`, "file" for the saved settings, schedule and loss scaler, "mine" to keep the
                trainer's.

        Returns:
            With `strict=False` the names of parameters: `loaded`, `anew` and `unused`; otherwise None.

        Raises:
            ValueError, TypeError: `state_dict` does not fit this trainer; everything is checked first, and nothing has been
                changed. With `strict=False`: it is of another optimizer, none of its parameters fits, or some cannot start
                anew, since the optimizer, such as Prodigy, keeps numbers of all parameters together; or a store has the
                states in parts (`dist_sync` with `update_on_kvstore=True`) or elsewhere.
        """
        return self._load(state_dict, strict, settings, self._sync.all_or_none)

    def _load(
        self,
        state_dict: Mapping[str, Any],
        strict: bool,
        settings: str,
        all_or_none: Callable[[], AbstractContextManager[None]],
    ) -> serialization.Loaded | None:
        """Do what `load_state_dict` does, with the checks in contexts that `all_or_none` returns."""
        loaded = None
        if not serialization.check_fit(strict, settings) and not self._is_alone:
            self._start()
        with all_or_none():
            if not strict:
                state_dict, loaded = self._fitted(state_dict, settings)
            scaling = state_dict.get("loss_scaler") if isinstance(state_dict, Mapping) else None
            if scaling is not None:
                if self._loss_scaler is None:
                    raise ValueError(
                        "saved state has a loss scaler, this trainer has none: call tristep.amp.init_trainer(trainer) before"
                    )
                self._loss_scaler.check(scaling)
            if isinstance(state_dict, Mapping):
                serialization.check_residuals(self._names, self._params, state_dict.get("residuals", {}))
                serialization.check_buckets(state_dict)
        if not self._is_alone:
            self._start()
        self._sync.restore(state_dict, all_or_none())
        if scaling is not None:
            self._loss_scaler.load_state_dict(scaling)
        if loaded is not None:
            serialization.announce("states", loaded)
        return loaded

    def _fitted(self, state_dict: Mapping[str, Any], settings: str) -> tuple[dict[str, Any], serialization.Loaded]:
        """Return what of a state fits, for `_load`, and the names; refuse states that are not whole and here."""
        if self._sync.updates and not self._sync.inside:
            raise ValueError(
                "strict=False where the store has the states in parts or in another process: load them with "
                "kvstore=None, save them from there, and load that file here"
            )
        fitting, loaded = serialization.fitted(self._optimizer, self._names, self._params, state_dict, settings)
        if settings == "mine":
            fitting.pop("loss_scaler", None)
        return fitting, loaded

    def save_states(self, fname: str | os.PathLike[str]) -> None:
        """Write `state_dict()` to a file (safetensors, JSON in its metadata), atomically, without a copy of it in memory."""
        state = self.state_dict()
        if self._sync.writes:
            serialization.write(fname, state)
        self._sync.end_save()

    def load_states(
        self, fname: str | os.PathLike[str], *, strict: bool = True, settings: str = "file"
    ) -> serialization.Loaded | None:
        """Restore the optimizer's settings, schedule, counts and states from a file of `save_states`.

        All of the file is checked first. Then states are copied, part by part, from the file into those that exist, if these
        have the same form, so that no second copy of them is needed; tensors of a former `state_dict()` then change, too, as
        they do at a step. No other program may write to the file meanwhile; to replace it by renaming is fine. With several
        processes as `load_state_dict`.

        Args:
            fname: the file.
            strict, settings: as in `load_state_dict`; `strict=False` loads what fits.

        Returns:
            As `load_state_dict`.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: the file is not a state file, is damaged, or does not fit this trainer; nothing has been changed.

        Example:
            >>> import os, tempfile, torch, tristep
            >>> def trainer_of(head):
            ...     params = {name: torch.nn.Parameter(torch.ones(2)) for name in ("body", head)}
            ...     return tristep.Trainer(params, "adam")
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     trainer_of("head").save_states(os.path.join(folder, "states"))
            ...     found = trainer_of("new_head").load_states(os.path.join(folder, "states"), strict=False)
            states: loaded: 1, 'body'; start anew: 1, 'new_head'; saved but not used: 1, 'head'
        """
        with self._sync.all_or_none():
            state = serialization.read(fname, mapped=True)
        load = partial(self.load_state_dict, strict=strict, settings=settings)
        return serialization.load_read(load, state, f"fname={str(fname)!r}")

    @uninterrupted
    def resume(
        self, folder: str | os.PathLike[str], net: Any = None, *, strict: bool = True, settings: str = "file"
    ) -> Checkpoint:
        """Restore the newest complete checkpoint of a `CheckpointManager`, with the states of random-number generators.

        It warns of newer checkpoints that cannot be read. With `dist_sync` and DistributedDataParallel every process must
        call this, and reads the newest that rank 0 can read; if one cannot load it, all raise an error.

        Args:
            folder: a folder of checkpoints, or one checkpoint. If it is empty or missing, nothing is changed.
            net: the model, or the list of its replicas, if the manager was given it.
            strict: whether the checkpoint must be of this model. False: weights and buffers are loaded that have the same
                name and shape, and states as `load_state_dict` says; both are printed.
            settings: as in `load_state_dict`.

        Returns:
            The checkpoint, with the attributes `step`, `metrics`, `metadata` and `path`; its step is 0 if there is none.
            With `strict=False` also `weights` and `states`, the names that were loaded, start anew or were not used.

        Raises:
            ValueError: the checkpoint does not fit this trainer, none can be read, or processes have different ones; nothing
                has been changed.
            RuntimeError: it is called inside `averaged_weights`; nothing has been changed.
        """
        self._refuse_averaged("resume()")
        return resume(self, folder, net, strict=strict, settings=settings)

    def __repr__(self) -> str:
        count = sum(parameter.numel() for parameter in self._params if not is_lazy(parameter))
        copies = f"{len(self.replicas)} copies of " if len(self.replicas) > 1 else ""
        return f"Trainer({copies}{len(self._params)} parameters, {count:,} elements, {self._optimizer!r})"

    # The path of a step.

    def _step(self, batch_size: float, ignore_stale_grad: bool, reduced: bool = False) -> None:
        """Take a step; `reduced`: whether gradients have been summed over replicas by `allreduce_grads`."""
        if type(batch_size) is not int or not 0 < batch_size < _MOST:
            batch_size = number("batch_size", batch_size, above=0)
        if ignore_stale_grad is not False:
            ignore_stale_grad = boolean("ignore_stale_grad", ignore_stale_grad)
        if self._averaging or self._replaced:
            self._refuse_step("step()")
        if not self._started:
            self._start()
        if not self._watch.is_over:
            self._watch.before_use()
        self._take(self._sync.choose(ignore_stale_grad, reduced), self._scale / batch_size)

    @uninterrupted
    def _take(self, choice: Any, rescale_grad: float) -> None:
        """Update the weights with gradients that `GradientSync.choose` has returned, multiplied by `rescale_grad`."""
        optimizer, telemetry = self._optimizer, self._telemetry
        if optimizer.rescale_grad != rescale_grad or isinstance(optimizer, MultiOptimizer):  # which sets it for each part
            optimizer.rescale_grad = rescale_grad
        into = None if telemetry is None else telemetry._begin()
        self._sync.step(choice, into, self._loss_scaler)
        if telemetry is not None:
            telemetry._end(into, optimizer.num_update)
        recording = current_recording.get()
        if not self._watch.is_over:
            # If gradients are reduced while backward runs, every backward pass writes to the same tensors.
            reduced = self._reduced_by_torch or self._sync.in_step
            self._watch.after_step(not (self._zero_grads or reduced or recording is not None))
        if recording is not None:
            record_step(recording, self._replicas[0], rescale_grad)

    # Start and checks.

    @uninterrupted
    def _start(self, what: str | None = None) -> None:
        """Start the synchronization, once. Raise if a store updates the weights and `what`, a method, must not be called."""
        if not self._started:
            self._check_initialized()
            self._sync.start()
            self._started = True
        if what is not None and self._sync.updates:
            raise UpdateOnKVStoreError(
                f"{what} where the store updates the weights: it sums and updates in one call; use step(), or make "
                "the trainer with update_on_kvstore=False"
            )

    def _check_initialized(self) -> None:
        """Raise if a lazy parameter has not been initialized."""
        for r, replica in enumerate(self._replicas):
            where = "params" if len(self._replicas) == 1 else f"params[{r}]"
            lazy = [repr(name) for name, parameter in zip(self._names, replica.params, strict=True) if is_lazy(parameter)]
            if lazy:
                raise ValueError(f"{listed(lazy)} of {where} not initialized yet: run the model once before the first step")
            if r > 0:
                check_alike(r, self._names, replica.params, self._params)

    def _use_control(self, control: torch.Tensor) -> None:
        """Let all updates read a loss scaler's `control`. Raises RuntimeError if the synchronization does not support it."""
        self._sync.use_control(control)
        for replica in self._replicas:
            replica.updater.control = control
            replica.forget_plan()  # updates use other kernels from now on

    def _backward_step(self) -> BackwardStep:
        """Return the object that takes steps inside backward, after all checks; see `step_in_backward`."""
        self._refuse_together("step_in_backward()")
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
        self._check_initialized()
        check_optimizer(self._optimizer)
        self._backward = self._backward or BackwardStep(self._replicas[0])
        return self._backward

    def _refuse_averaged(self, what: str) -> None:
        if self._averaging:
            raise RuntimeError(f"{what} inside averaged_weights(), whose weights are restored at its end: leave it first")

    def _refuse_step(self, what: str) -> None:
        self._refuse_averaged(what)
        if self._replaced:
            raise RuntimeError(
                f"the {type(self._optimizer).__name__} of this Trainer has been given to another Trainer since, and an "
                "optimizer counts the updates of one: give each Trainer an optimizer of its own"
            )

    def _refuse_together(self, what: str) -> None:
        """Raise if there are several replicas or a store; `what`, a method, works with one replica only."""
        if not self._is_alone:
            raise RuntimeError(
                f"{what} of a trainer with several copies of the model, or a store: it is for one copy without a store; use "
                "step()"
            )

    @property
    def _kv_initialized(self) -> bool:
        """Whether synchronization has started; tools for MXNet's Trainer read this name."""
        return self._started

    @property
    def _update_on_kvstore(self) -> bool | None:
        """Whether the store updates the weights; None before it has started, or without one, as MXNet's tests read."""
        return self._sync.updates if self._started and self._sync.reduces else None

    def _init_kvstore(self) -> None:
        """Start the synchronization before the first step; tools for MXNet's Trainer call this name."""
        self._start()

    def __getstate__(self) -> dict[str, Any]:
        """Return everything but what `__setstate__` makes again. Gradients are not copied."""
        if not self._is_alone:
            raise TypeError(
                "a Trainer of several copies of a model, or with a store, cannot be copied or pickled: use state_dict()"
            )
        if self._averaging or (self._backward is not None and self._backward.is_open):
            raise RuntimeError("a Trainer cannot be copied inside averaged_weights() or step_in_backward(): leave it first")
        remade = ("_replicas", "_sync", "_is_alone", "_started")
        state = {name: value for name, value in vars(self).items() if name not in remade}
        recorded = self._telemetry is not None and self._telemetry.is_recorders
        telemetry = None if recorded else self._telemetry
        return state | {"_backward": None, "_watch": None, "_telemetry": telemetry}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        replica = Replica(self._params, self._names, self._updater, self._zero_grads)
        self._use_replicas([replica], GradientSync([replica], self._optimizer))
        self._watch = AccumulationWatch(self._params, is_over=True)
        self._optimizer.trainer = weakref.ref(self)
        self._updater.register_with(self._optimizer)
        self.telemetry = self._telemetry


_MOST = 1 << 53  # a batch size that needs no check; others may be too large for a float
_SETTINGS = ("lr_scheduler", "schedules", "lr_mult", "wd_mult", "num_update")  # which are not in `settings()`


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


def _adopt(optimizer: Optimizer, trainer: Trainer) -> None:
    """Make `trainer` the optimizer's only trainer: a former one can take no more steps, and counts go on with a warning."""
    former = None if optimizer.trainer is None else optimizer.trainer()
    if former is not None:
        former._replaced = True
    if optimizer.trainer is not None and optimizer.counts:
        warnings.warn(
            f"{type(optimizer).__name__} has counted {optimizer.num_update} updates for another Trainer, and counts on: "
            "bias corrections and schedules go on from there, with states that start again; give each Trainer an "
            "optimizer of its own",
            stacklevel=3,
        )
    optimizer.trainer = weakref.ref(trainer)


def _averages_of(optimizer: Optimizer) -> list[tuple[Rule, dict[str, float], list[int]]]:
    """Return the rules that compute averaged weights, each with its hyper-parameters and its parameters' indices."""
    averages: list[Any] = []
    for part in parts_of(optimizer):
        average = part.average_in_use() if isinstance(part, RuleOptimizer) else None
        if average is not None:
            averages.append((*average, [i for i in optimizer.param_names if part_of(optimizer, i) is part]))
    if not averages:
        names = " and ".join(type(part).__name__ for part in parts_of(optimizer))
        raise ValueError(f"{names} keeps no averaged weights: give it ema_decay=0.999, say")
    return averages
