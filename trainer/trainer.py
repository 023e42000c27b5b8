"""Trainer: Gluon's way to apply an optimizer to a model's parameters, on PyTorch."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from . import checkpoint
from .ascent import ascend, averaged_weights
from .capture import CapturedStep, check_capture
from .core import TrainerCore
from .dynamo import outside_dynamo
from .errors import StaleGradientError, UpdateOnKVStoreError
from .interrupts import uninterrupted
from .optimizer import Optimizer, RuleOptimizer
from .params import is_lazy
from .replica import Replica
from .validation import boolean, number

__all__ = ["StaleGradientError", "Trainer", "UpdateOnKVStoreError"]


class Trainer(TrainerCore):
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

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer in use."""
        return self._optimizer

    @property
    def learning_rate(self) -> float:
        """The optimizer's present rate, before multipliers."""
        return self._optimizer.learning_rate

    @property
    def replicas(self) -> list[Replica]:
        """The copies of the model in this process."""
        return self._replicas

    def set_learning_rate(self, lr: float) -> None:
        """Set the rate. Raises UserWarning where a scheduler decides it, ValueError where it is negative."""
        self._optimizer.set_learning_rate(lr)

    @outside_dynamo
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
        with self._backward_step().take(self._scale / batch_size, ignore_stale_grad, self._telemetry):
            yield

    @outside_dynamo
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

    @outside_dynamo
    def update(self, batch_size: float, ignore_stale_grad: bool = False) -> None:
        """As `step`, without reducing: the second half, after `allreduce_grads`.

        Raises:
            UpdateOnKVStoreError: the store updates the weights.
        """
        self._refuse_averaged("update()")
        self._refuse_replaced()
        self._stepper.start("update()")
        self._step(batch_size, ignore_stale_grad, reduce=False)

    @outside_dynamo
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients, or fill them with zeros. A gradient that was used up does not become fresh by that."""
        self._stepper.zero_grad(set_to_none)

    @outside_dynamo
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
        self._ascended = ascend(self._stepper, self._updater, rho, adaptive)

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
        self._averaging = True
        try:
            with averaged_weights(self._stepper, found):
                yield
        finally:
            self._averaging = False

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
        device = self._params[0].device
        check_capture(self._updater, device, self._telemetry)
        return CapturedStep(fn, device, warmup)

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's settings, counts, schedule and states, as plain data and tensors (not copied).

        With a loss scaler its state, too, and with compression what it has kept back. Of several copies of the model it is
        the first one's: it may be loaded where there are more, or fewer.

        Raises:
            RuntimeError: between `ascend` and `step`, when the weights are not those that are to be saved with it.
        """
        return self._state()

    @uninterrupted
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave. Checks all of it first.

        The optimizer's settings, its schedule and its counts become the saved ones, as in Gluon; the multipliers, which
        belong to the parameters, stay. What compression had kept back is lost where there is none now, and goes to all
        copies in equal parts where there are fewer of them.

        Raises:
            ValueError, TypeError: it does not fit this trainer; nothing has been changed.
        """
        self._load_state(state_dict)

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

    def __repr__(self) -> str:
        count = sum(parameter.numel() for parameter in self._params if not is_lazy(parameter))
        copies = f"{len(self._replicas)} copies of " if len(self._replicas) > 1 else ""
        return f"Trainer({copies}{len(self._params)} parameters, {count:,} elements, {self._optimizer!r})"
