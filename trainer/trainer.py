"""Trainer: Gluon's `Trainer`, which applies an optimizer to a model's parameters, on PyTorch."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from . import checkpoint
from .ascent import ascend, averaged_weights, averages_of
from .capture import CapturedStep, check_capture
from .core import TrainerCore
from .dynamo import outside_dynamo
from .errors import StaleGradientError, UpdateOnKVStoreError
from .full_precision import float32_weights, load_float32_weights
from .interrupts import uninterrupted
from .optimizer import Optimizer
from .params import is_lazy
from .replica import Replica
from .saving import Checkpoint, resume
from .state import collect_state, load_file, load_state
from .validation import boolean, number

__all__ = ["StaleGradientError", "Trainer", "UpdateOnKVStoreError"]


class Trainer(TrainerCore):
    """Applies an optimizer to parameters, from the gradients that `backward` left in them.

    Args:
        params: what to train: a `torch.nn.Module`, an iterable of parameters or of (name, parameter), a dict of them (in
            the order of their sorted names, as in Gluon; a module's parameters, too, where the order changes numbers: with
            Nadam and user-defined optimizers), or torch-style groups, dicts with "params" and optionally
            "lr_mult" and "wd_mult". Parameters with `requires_grad=False` are skipped. Or a list of modules that are
            replicas of one model on different devices (see `tristep.replicate`): they are kept equal, and each gets its
            part of a batch. Names, multipliers and `requires_grad` are those of the first replica's parameters. For a
            module in torch's DistributedDataParallel, which reduces gradients itself, names are those of the inner module.
        optimizer: a name, such as "sgd" or "adam", or an `Optimizer`. Or a list of (pattern, optimizer) and (pattern,
            optimizer, arguments), by which each parameter gets the optimizer of the first pattern that it matches: see
            `tristep.optimizer.MultiOptimizer`.
        optimizer_params: arguments of the optimizer by name, as a dict or as pairs; None if `optimizer` is an instance. Of
            several optimizers the arguments of each, where its entry does not have them.
        kvstore: which store sums the gradients of several replicas: "local" (on the CPU), "device" or "nccl" (on the
            replicas' device; see `tristep.kvstore.create` for MXNet's other names), the name of a registered store, or None,
            with which replicas are updated independently. A single replica needs no store and gets none, unless a `KVStore`
            object is passed. "dist_sync", "dist_device_sync" and "dist" are for several synchronous processes, started by
            torchrun, with one replica each: all of them must make the same calls. The first step broadcasts the weights of
            rank 0. With "dist_async" and "dist_device_async" they do not wait for each other: the last process, or the last
            TRISTEP_NUM_SERVERS, are servers, which update the weights, and whose program ends here when the others have
            finished. See docs/scaling.md.
        compression_params: gradient compression, {"type": "2bit" or "1bit", "threshold": 0.5}, with which "device"
            sums the gradients of several replicas; what is not sent is stored in a residual per replica. With "local" it is
            an error, and without a store it has no effect. With "dist_sync" and "dist_async" there are more types, see
            `tristep.kvstore.create_compressor`; with "dist_sync" also "auto", which measures the link at the first step and
            chooses what pays off. With "dist_async" each worker compresses what it pushes, and pulls uncompressed weights.
        update_on_kvstore: whether the store updates the weights, with one state for all replicas, and returns them; if
            not, each replica is updated, with its own state, from the sum of the gradients, which is then in `.grad`. None
            means True if the store can update, unless there are sparse gradients, the environment variable
            MXNET_UPDATE_ON_KVSTORE is 0, or "local" would update a parameter of more than 2**24 elements. True without a
            store is an error. With "dist_sync" each process updates its shard of the weights, and stores the states of
            that shard only.
        engine: "triton", "cpu", "eager", or None for the fastest that is available (see `tristep.kernels`).
        telemetry: a `Telemetry` that records what each step does to each parameter, or True for one with its defaults;
            None records nothing. The attribute of this name may be set to another one, or None, between steps.
        zero_grads: let each step fill the gradients that it has used with zeros, in the same pass, so that the next ones
            accumulate in the same memory. A gradient that autograd has not written to since counts as stale.

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
        return self._stepper.replicas

    def set_learning_rate(self, lr: float) -> None:
        """Set the learning rate. Raises UserWarning if a scheduler determines it, ValueError if it is negative."""
        self._optimizer.set_learning_rate(lr)

    @outside_dynamo
    def step(self, batch_size: float, ignore_stale_grad: bool = False) -> None:
        """Reduce gradients and update the weights, with gradients divided by `batch_size`.

        A gradient is stale unless `backward`, or anything else, has written to it since the last step. Gradients are not
        changed, except by a trainer with `zero_grads=True`, or if each of several replicas is updated with their sum, which
        then replaces them.

        The gradients of several replicas are summed, not averaged: `batch_size` is that of all their parts together.

        Gradients of several backward passes accumulate, and make one step with the number of all their samples. After
        `zero_grad(set_to_none=False)` the next ones accumulate in the same memory. Those of 16-bit parameters accumulate in
        float32 with `parameter.grad_dtype = torch.float32`, if torch supports it.

            for x, y in parts:
                loss(net(x), y).backward()
            trainer.step(batch_size=sum(len(x) for x, _ in parts))
            trainer.zero_grad(set_to_none=False)

        Args:
            batch_size: > 0; 1 if the loss is a mean already.
            ignore_stale_grad: skip parameters with a stale gradient, including their state and count, instead of raising
                an error. A parameter with a new gradient in some replicas is updated in all, with the sum of these.

        Raises:
            StaleGradientError: some parameters have a stale gradient, or none; nothing has been changed.
            ValueError, TypeError: an invalid batch size or gradient; nothing has been changed. Of several processes, one
                has other parameters or settings, or had in the last step.
            RuntimeError: of several synchronous processes, one is missing.
        """
        self._step(batch_size, ignore_stale_grad)

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """A context that accumulates gradients locally, without communication, like DDP's `no_sync()`.

        In one process it changes nothing.

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
        """A context whose one backward pass is a step: each parameter is updated as soon as its gradient is complete.

        The gradient is then freed (`grad` becomes None), so that the gradients of a model never need memory all at once;
        small ones are collected, up to 1 MiB, and used together. Results, counts and states are those of `step`. To
        accumulate gradients of several batches, run all backward passes but the last before the context.

            with trainer.step_in_backward(batch_size):
                loss(net(x), y).backward()

        Args:
            batch_size: > 0; 1 if the loss is a mean already.
            ignore_stale_grad: skip parameters that get no gradient, instead of raising an error in the end. A schedule is
                called as if all of them got one.

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
        with self._backward_step().take(self._scale / batch_size, ignore_stale_grad, self._telemetry):
            yield

    @outside_dynamo
    def allreduce_grads(self) -> None:
        """Replace the gradients by their sums over all replicas, without updating.

        To be followed by `update`, for example after clipping; `step` would sum them again. With one replica it does
        nothing.

        Raises:
            UpdateOnKVStoreError: the store updates the weights, so that there are no two halves of a step.
        """
        if not self._stepper.is_alone:
            self._stepper.start("allreduce_grads()")
            self._stepper.allreduce()

    @outside_dynamo
    def update(self, batch_size: float, ignore_stale_grad: bool = False) -> None:
        """As `step`, without reducing: the second half, after `allreduce_grads`.

        Raises:
            UpdateOnKVStoreError: the store updates the weights.
        """
        self._refuse_step("update()")
        self._stepper.start("update()")
        self._step(batch_size, ignore_stale_grad, reduce=False)

    @outside_dynamo
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients, or fill them with zeros. A gradient that a step has used does not count as new after that."""
        self._stepper.zero_grad(set_to_none)

    @outside_dynamo
    @uninterrupted
    def ascend(self, rho: float = 0.05, *, adaptive: bool = False) -> None:
        """Move the weights up their gradients, for sharpness-aware minimization; the next step first moves them back.

        Between the two, compute the gradients again, at the moved weights:

            loss(net(x), y).backward()
            trainer.ascend()
            trainer.zero_grad()
            loss(net(x), y).backward()
            trainer.step(batch_size)

        Args:
            rho: how far, in the norm of all weights together, > 0.
            adaptive: measure the distance relative to each weight, as ASAM does; `rho` is then about ten times as large.

        Raises:
            StaleGradientError: some parameters have a stale gradient, or none; nothing has been changed.
            RuntimeError: the weights have been moved already, with no step since; or there are several replicas of the
                model, or a store.

        Source: Foret et al. (2021), "Sharpness-Aware Minimization"; Kwon et al. (2021), "ASAM".
        """
        rho, adaptive = number("rho", rho, above=0), boolean("adaptive", adaptive)
        self._stepper.refuse_together("ascend()")
        if self._ascended is not None:
            raise RuntimeError("ascend() has moved the weights up already: take a step() first")
        self._refuse_averaged("ascend()")
        self._ascended = ascend(self._stepper, self._updater, rho, adaptive)

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """A context in which the model has its averaged weights, for evaluation, if the optimizer maintains an average.

        It does with `ema_decay`, a moving average; some optimizers do by themselves. Of several optimizers, parameters of
        those that keep none have their weights. Afterwards weights are restored bit for bit. No step may be taken inside.

        Raises:
            ValueError: no optimizer keeps an average; nothing has been changed.
            RuntimeError: a store of another process keeps it; or inside another such context, or after `ascend`; or, on
                leaving, the weights have been written to inside, which is undone.

        Example:
            >>> import torch, tristep
            >>> net = torch.nn.Linear(2, 1)
            >>> trainer = tristep.Trainer(net, "schedulefreesgd")
            >>> with trainer.averaged_weights():
            ...     prediction = net(torch.ones(1, 2))
        """
        found = averages_of(self._optimizer)
        self._refuse_averaged("averaged_weights()", or_ascended=True)
        try:
            try:
                self._averaging = True
                with averaged_weights(self._stepper, found):
                    yield
            finally:
                self._averaging = False
        except KeyboardInterrupt:  # which may have come just before the last line
            self._averaging = False
            raise

    def float32_weights(self) -> dict[str, torch.Tensor]:
        """The weights by name in float32, in new tensors: those of 16 bits with what their masters add, of float64 rounded.

        Of several replicas they are the first one's; with dist stores every process must call this, and gets all of them.

        Raises:
            RuntimeError: a store of another process has the masters; or inside `averaged_weights`, or after `ascend`.
            TypeError: a user-defined optimizer with `multi_precision`.
        """
        self._refuse_averaged("float32_weights()", or_ascended=True)
        return float32_weights(self._stepper, self._optimizer)

    @uninterrupted
    def load_float32_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Set weights and masters to what `float32_weights` returned, as near as they are stored; states and counts stay.

        All replicas get the weights; with dist stores every process must call this, with the same.

        Args:
            weights: by name a floating-point tensor for each parameter, of its shape.

        Raises:
            ValueError, TypeError: it does not fit this trainer; nothing has been changed.
            RuntimeError: as `float32_weights`; nothing has been changed.
        """
        self._refuse_averaged("load_float32_weights()", or_ascended=True)
        load_float32_weights(self._stepper, self._optimizer, weights)

    def capture(self, fn: Callable[..., Any], *, warmup: int = 3) -> CapturedStep:
        """Capture a training function as a CUDA graph: the result is called like the function, without its work on the host.

        Each call is one training step. The first ones run normally; then the graph is recorded, and replayed from then on.
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
            fn: takes tensors, which are copied to the parameters' device, and makes one step of this trainer. It must not
                read values on the host (`loss.item()`), and its control flow is recorded once.
            warmup: how many calls run normally, >= 2.

        Returns:
            A callable. Tensors that it returns are overwritten by the next call; gradients are those of the last one.

        Raises:
            TypeError: `fn` is not callable.
            ValueError: an optimizer whose rule is not elementwise, such as Muon's; an engine other than triton on a GPU; a
                trainer with telemetry.
            RuntimeError: several copies of the model, or a store.

        Source: `torch.cuda.graph`.
        """
        self._stepper.refuse_together("capture()")
        device = self._params[0].device
        check_capture(self._updater, device, self._telemetry)
        return CapturedStep(fn, device, warmup)

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's settings, counts, schedule and states, as plain data and tensors (not copied).

        With a loss scaler it includes its state, and with compression the residuals. Of several replicas of the model it is
        the first one's, and may be loaded with more or fewer. Between `ascend` and `step` it raises RuntimeError.
        """
        return collect_state(self._stepper, self._loss_scaler, self._ascended is not None)

    @uninterrupted
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned. Checks all of it first.

        The optimizer's settings, its schedule and its counts become the saved ones, as in Gluon; the multipliers, which
        belong to the parameters, stay. Residuals of compression are dropped if there is none now, and are divided equally
        among all replicas if there are fewer of them.

        Raises:
            ValueError, TypeError: it does not fit this trainer; nothing has been changed.
        """
        load_state(self._stepper, self._loss_scaler, state_dict)
        if self._ascended is not None:  # weights that have been written since `ascend` are those that were loaded
            if not self._ascended.written():
                self._ascended.restore()
            self._ascended = None
        self._stepper.forget_plans()

    def save_states(self, fname: str | os.PathLike[str]) -> None:
        """Write `state_dict` to a file (safetensors with JSON in its metadata), atomically."""
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
        load_file(self.load_state_dict, fname)

    @uninterrupted
    def resume(self, folder: str | os.PathLike[str], net: Any = None) -> Checkpoint:
        """Continue from the newest complete checkpoint of a `CheckpointManager`; random numbers are restored, too.

        Args:
            folder: of checkpoints, or one of them. One that is empty, or not there, changes nothing.
            net: the model, or the list of its replicas, if it was given to the manager.

        Returns:
            What was saved with it: `step`, `metrics`, `metadata`, `path`; step 0 if there is none.

        Raises:
            ValueError: it does not fit, or all are damaged; nothing has been changed. It warns of newer damaged ones.
        """
        self._refuse_averaged("resume()", or_ascended=True)
        return resume(self, folder, net)

    def __repr__(self) -> str:
        count = sum(parameter.numel() for parameter in self._params if not is_lazy(parameter))
        copies = f"{len(self.replicas)} copies of " if len(self.replicas) > 1 else ""
        return f"Trainer({copies}{len(self._params)} parameters, {count:,} elements, {self._optimizer!r})"
