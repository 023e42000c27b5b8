"""Trainer: Gluon's way to apply an optimizer to a model's parameters, on PyTorch.

`step` is short on purpose: with small models its Python is what costs. The usual case, where the gradients are the
tensors of the last step with new contents, is decided by a few list comparisons; everything else goes through `_select`.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from ..kernels import Rule, rules
from ..kernels.engine import DTYPES, choose_engine
from ..kernels.measures import Measurements
from ..kernels.table import Recording
from . import checkpoint
from .arguments import choice, did_you_mean, flag, real
from .capture import CapturedStep
from .in_backward import BackwardStep, check_optimizer
from .kvstore.compression import checked
from .optimizer import Optimizer, RuleOptimizer, Updater, create
from .optimizer.updater import Plan
from .telemetry import Telemetry

__all__ = ["StaleGradientError", "Trainer"]

KVSTORES = ("local", "device", "nccl", "dist_sync", "dist_device_sync", "dist", "dist_async", "dist_device_async")


class StaleGradientError(UserWarning, RuntimeError):
    """A parameter has had no backward pass since the last step. (Gluon raises UserWarning, which this is, too.)"""


class Trainer:
    """Applies an optimizer to parameters, from the gradients that `backward` left in them.

    Args:
        params: what to train: a `torch.nn.Module`, an iterable of parameters or of (name, parameter), a dict of them (taken
            in the order of their sorted names, as in Gluon), or torch-style groups, dicts with "params" and, if wanted,
            "lr_mult" and "wd_mult". Parameters with `requires_grad=False` are left alone.
        optimizer: a name, such as "sgd" or "adam", or an `Optimizer`.
        optimizer_params: arguments of the optimizer by name, as a dict or as pairs; none beside an instance.
        kvstore: which store reduces gradients: None, "local", "device" or "nccl". In one process with one copy of the
            model there is nothing to reduce. The dist stores do not exist yet.
        compression_params: gradient compression, {"type": "2bit" or "1bit", "threshold": 0.5}. It acts between copies of a
            model, so here it changes nothing.
        update_on_kvstore: whether the store updates the weights; None or False here, as one process needs no store.
        engine: who computes: "triton", "cpu", "eager", or None for the best there is (see `tristep.kernels`).
        telemetry: a `Telemetry` that is to record what each step does to each parameter, or True for one with its defaults;
            None records nothing. The attribute of this name may be set to another one, or None, between steps.
        zero_grads: let each step fill the gradients that it has used with zeros, in the same pass, so that the next ones
            add up in the same memory. What autograd has not written to since does not count as fresh.

    Raises:
        TypeError, ValueError: an argument that does not fit; the message says which and what is allowed.
        NotImplementedError: a dist store.

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
        params: torch.nn.Module | Iterable[Any] | Mapping[str, torch.nn.Parameter],
        optimizer: str | Optimizer,
        optimizer_params: Mapping[str, Any] | Iterable[tuple[str, Any]] | None = None,
        kvstore: str | None = "device",
        compression_params: Mapping[str, Any] | None = None,
        update_on_kvstore: bool | None = None,
        *,
        engine: str | None = None,
        telemetry: Telemetry | bool | None = None,
        zero_grads: bool = False,
    ) -> None:
        zero_grads = flag("zero_grads", zero_grads)
        named = _named_parameters(params)
        _check_parameters(named)
        _check_store(kvstore, compression_params, update_on_kvstore)
        for _, parameter, _ in named:
            choose_engine(parameter.device, engine)
        self._optimizer = _make_optimizer(optimizer, optimizer_params)
        for _, parameter, own in named:
            for multiplier, value in own.items():
                setattr(parameter, multiplier, value)
        self._names = [name for name, _, _ in named]
        self._params = [parameter for _, parameter, _ in named]
        self._optimizer.param_dict = dict(enumerate(self._params))
        self._scale = self._optimizer.rescale_grad
        self._updater = Updater(self._optimizer, engine)
        self._plan: Plan | None = None
        self._zero_grads = zero_grads
        self._loss_scaler: Any = None  # amp.py puts one here
        # The gradients that the last step used up: which tensors, and how often they had been written to.
        self._used: list[weakref.ref[torch.Tensor] | None] = [None] * len(self._params)
        self._used_versions = np.full(len(self._params), -1, dtype=np.int64)
        self._seen_versions = self._used_versions.copy()
        self._backward: BackwardStep | None = None
        self._below: list[torch.Tensor] | None = None  # the weights from before `ascend`
        self.telemetry = telemetry

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
        wanted._attach(self._names, self._params)
        self._telemetry = wanted

    def set_learning_rate(self, lr: float) -> None:
        """Set the rate. Raises UserWarning where a scheduler decides it, ValueError where it is negative."""
        self._optimizer.set_learning_rate(lr)

    def step(self, batch_size: float, ignore_stale_grad: bool = False) -> None:
        """Reduce gradients and update the weights, with gradients divided by `batch_size`.

        Gradients are fresh once `backward`, or anything else, has written to them since the last step. The gradients
        themselves are not changed, but by a trainer with `zero_grads=True`.

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
                of raising an error.

        Raises:
            StaleGradientError: some parameters have no fresh gradient; nothing has been changed.
            ValueError, TypeError: a batch size or a gradient that does not fit; nothing has been changed.
        """
        self._step(batch_size, ignore_stale_grad)

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
            RuntimeError: after `ascend`, inside another such context, or with a loss scaler, which must see all gradients
                before a step, nothing has been changed; or, from `backward`, a
                second gradient for a parameter, which is not used.
            StaleGradientError: on leaving, some parameters got no gradient; the others have been updated.
        """
        batch_size = real("batch_size", batch_size, above=0)
        ignore_stale_grad = flag("ignore_stale_grad", ignore_stale_grad)
        if self._below is not None:
            raise RuntimeError("ascend() has moved the weights up, and needs all gradients to move them back: use step()")
        if self._loss_scaler is not None:
            raise RuntimeError("a loss scaler must see all gradients before any weight is updated: use step()")
        if self._backward is not None and self._backward.is_open:
            raise RuntimeError("step_in_backward() inside step_in_backward(): one backward pass can only be one step")
        self._refuse_lazy()
        check_optimizer(self._optimizer)
        optimizer, updater = self._optimizer, self._updater
        before = dict(updater.states), dict(updater.masters), optimizer.rescale_grad
        optimizer.rescale_grad = self._scale / batch_size
        step = self._backward = self._backward or BackwardStep(updater, self._params, self._names)
        telemetry = self._telemetry
        into = None if telemetry is None else telemetry._begin()
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

    def allreduce_grads(self) -> None:
        """Reduce gradients over the copies of the model, without updating; here, with one copy, there is nothing to do.

        To be followed by `update`, after clipping, say.
        """

    def update(self, batch_size: float, ignore_stale_grad: bool = False) -> None:
        """As `step`, without reducing: the second half, after `allreduce_grads`."""
        self._step(batch_size, ignore_stale_grad)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients, or fill them with zeros. A gradient that was used up does not become fresh by that."""
        if set_to_none:
            for parameter in self._params:
                parameter.grad = None
            return
        stale = [i for i, parameter in enumerate(self._params) if not self._is_fresh(i, parameter.grad)]
        gradients = [parameter.grad for parameter in self._params if parameter.grad is not None]
        if gradients:
            with torch.no_grad():
                torch._foreach_zero_(gradients)
        for i in stale:
            gradient = self._params[i].grad
            if gradient is not None:
                self._used_versions[i] = gradient._version

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
            RuntimeError: the weights have been moved up already, with no step since.

        Source: Foret et al. (2021), "Sharpness-Aware Minimization"; Kwon et al. (2021), "ASAM".
        """
        rho = real("rho", rho, above=0)
        adaptive = flag("adaptive", adaptive)
        if self._below is not None:
            raise RuntimeError("ascend() has moved the weights up already: take a step() first")
        self._refuse_lazy()
        gradients, versions, _ = self._look(None, False)
        before = [parameter.detach().clone() for parameter in self._params]
        hyper = {"rho": rho, "adaptive": float(adaptive)}
        self._updater.apply(rules.ascent, hyper, range(len(self._params)), self._params, gradients)
        self._below = before
        self._used = [None if gradient is None else weakref.ref(gradient) for gradient in gradients]
        self._used_versions = versions

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """A context in which the model has its averaged weights, for evaluation, where the optimizer keeps an average.

        It does with `ema_decay`, a moving average; some do by themselves.

        Afterwards it has those that it had before, to the bit.

        Raises:
            ValueError: the optimizer keeps no average; nothing has been changed.

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
        before = [parameter.detach().clone() for parameter in self._params]
        self._updater.apply(*found, range(len(self._params)), self._params)
        try:
            yield
        finally:
            self._put_back(before)

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

        Source: `torch.cuda.graph`.
        """
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

        With a loss scaler its state, too.
        """
        state = checkpoint.collect(self._updater, self._names, self._params)
        return state if self._loss_scaler is None else state | {"loss_scaler": self._loss_scaler.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave. Checks all of it first.

        The optimizer's settings, its schedule and its counts become the saved ones, as in Gluon; the multipliers, which
        belong to the parameters, stay.

        Raises:
            ValueError, TypeError: it does not fit this trainer; nothing has been changed.
        """
        scaling = state_dict.get("loss_scaler") if isinstance(state_dict, Mapping) else None
        if scaling is not None:
            if self._loss_scaler is None:
                raise ValueError(
                    "saved state has a loss scaler, this trainer has none: call tristep.amp.init_trainer(trainer) before"
                )
            self._loss_scaler.check(scaling)
        checkpoint.restore(self._updater, self._names, self._params, state_dict)
        if scaling is not None:
            self._loss_scaler.load_state_dict(scaling)
        self._plan = None

    def save_states(self, fname: str | os.PathLike[str]) -> None:
        """Write `state_dict` to a file (safetensors with JSON in its metadata): whole, or not at all."""
        checkpoint.write(fname, self.state_dict())

    def load_states(self, fname: str | os.PathLike[str]) -> None:
        """Read what `save_states` wrote, as `load_state_dict`.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: it is not a state file, is damaged, or does not fit this trainer; nothing has been changed.
        """
        self.load_state_dict(checkpoint.read(fname))

    def __repr__(self) -> str:
        count = sum(parameter.numel() for parameter in self._params if not _is_lazy(parameter))
        return f"Trainer({len(self._params)} parameters, {count:,} elements, {self._optimizer!r})"

    def _step(self, batch_size: float, ignore_stale_grad: bool) -> None:
        if type(batch_size) is not int or batch_size <= 0:
            batch_size = real("batch_size", batch_size, above=0)
        plan = self._plan
        if plan is None:
            self._refuse_lazy()
        addresses = None
        if held := plan is not None and plan.fresh(self._used_versions, self._seen_versions):
            gradients: list[Any] = []
            versions = self._seen_versions
        elif plan is not None and (found := plan.look(self._used, self._seen_versions)) is not None:
            gradients, addresses = found  # after `zero_grad()`, as a rule: all are other tensors
            versions = self._seen_versions
        else:
            gradients, versions, held = self._look(plan, ignore_stale_grad)
        if self._below is not None:
            self._put_back(self._below)
            self._below = None
        scaler = self._loss_scaler
        if scaler is not None:
            scaler.look([parameter.grad for parameter in self._params] if held else gradients)
        before = self._optimizer.rescale_grad
        self._optimizer.rescale_grad = self._scale / batch_size
        into = None if self._telemetry is None else self._telemetry._begin()
        try:
            if plan is None:
                plan = self._first_step(gradients, into)
            else:
                plan.step(gradients, held, addresses, into)
        except BaseException:
            self._optimizer.rescale_grad = before
            raise
        if self._telemetry is not None:
            self._telemetry._end(into, self._optimizer.num_update)
        if not held:
            references = plan.references(gradients)
            if addresses is None:
                for i, reference in enumerate(references):
                    if reference is None:
                        references[i], versions[i] = self._used[i], self._used_versions[i]
            self._used = references
        self._used_versions, self._seen_versions = versions, self._used_versions
        if scaler is not None:
            scaler.end(plan.update.total() if plan.update is not None and plan.update.rule.skips_nonfinite else None)
        if self._zero_grads:
            self._note_zeros()
        if Recording.current is not None:
            self._note_recording(Recording.current, plan, batch_size)

    def _note_zeros(self) -> None:
        """Zeros that the step has written make no gradient fresh."""
        for i, reference in enumerate(self._used):
            if reference is not None and (gradient := reference()) is not None:
                self._used_versions[i] = gradient._version

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

    def _look(self, plan: Plan | None, ignore_stale_grad: bool) -> tuple[list[Any], np.ndarray, bool]:
        """The gradients to use, the versions of all, and whether nothing but these has changed."""
        gradients: list[Any] = [parameter.grad if parameter.requires_grad else None for parameter in self._params]
        found = [-1 if gradient is None else gradient._version for gradient in gradients]
        versions = np.array(found, dtype=np.int64)
        held = plan is not None and plan.holds(gradients) and bool((versions != self._used_versions).all())
        if not (held or self._all_new(gradients)):
            gradients = self._select(gradients, ignore_stale_grad)
        return gradients, versions, held

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

    @torch.no_grad()
    def _put_back(self, weights: Sequence[torch.Tensor]) -> None:
        for parameter, weight in zip(self._params, weights, strict=True):
            parameter.copy_(weight)

    def _refuse_lazy(self) -> None:
        lazy = [repr(name) for name, parameter in zip(self._names, self._params, strict=True) if _is_lazy(parameter)]
        if lazy:
            raise ValueError(f"{_listed(lazy)} of params not initialized yet: run the model once before the first step")

    def _is_fresh(self, i: int, gradient: torch.Tensor | None) -> bool:
        if gradient is None:
            return False
        used = self._used[i]
        return used is None or used() is not gradient or gradient._version != self._used_versions[i]

    def _all_new(self, gradients: list[torch.Tensor | None]) -> bool:
        """Whether each parameter has a gradient that is another tensor than before: the quick case of `_select`."""
        used = [None if reference is None else reference() for reference in self._used]
        return not any(gradient is None or gradient is old for gradient, old in zip(gradients, used, strict=True))

    def _select(self, gradients: list[torch.Tensor | None], ignore_stale_grad: bool) -> list[torch.Tensor | None]:
        """The gradients to use, None for parameters that stay as they are; an error for stale ones."""
        chosen: list[torch.Tensor | None] = []
        stale = []
        for i, gradient in enumerate(gradients):
            if self._params[i].requires_grad and not self._is_fresh(i, gradient):
                stale.append(f"{self._names[i]!r}" + (" (no gradient)" if gradient is None else ""))
                gradient = None
            chosen.append(gradient)
        if stale and not ignore_stale_grad:
            raise StaleGradientError(
                f"no fresh gradient since the last step for {_listed(stale)}: call backward() on a loss that depends on "
                "them before step(), or use step(batch_size, ignore_stale_grad=True) to leave such parameters as they are"
            )
        return chosen


def _is_lazy(parameter: torch.Tensor) -> bool:
    return isinstance(parameter, torch.nn.UninitializedParameter)


def _listed(names: list[str], most: int = 8) -> str:
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")


def _named_parameters(params: Any) -> list[tuple[str, torch.nn.Parameter, dict[str, float]]]:
    """Name, parameter and own multipliers of each, every parameter once."""
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
    once: dict[int, Any] = {}
    for entry in named:
        once.setdefault(id(entry[1]), entry)
    result = list(once.values())
    names = [name for name, _, _ in result]
    if twice := sorted({name for name in names if names.count(name) > 1} if len(set(names)) < len(names) else ()):
        raise ValueError(f"params: the names {_listed(twice)} stand for several parameters: give each its own")
    return result


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
        devices.setdefault(parameter.device, name)
    if len(devices) > 1:
        where = ", ".join(f"{name!r} on {device}" for device, name in devices.items())
        raise ValueError(f"params lie on different devices ({where}): move the model to one device first")


def _check_store(kvstore: Any, compression_params: Any, update_on_kvstore: Any) -> None:
    if kvstore is not None:
        if not isinstance(kvstore, str):
            raise TypeError(f"kvstore={kvstore!r}: must be None or a name, one of {', '.join(map(repr, KVSTORES))}")
        kvstore = choice("kvstore", kvstore, KVSTORES, ignore_case=True)
        if kvstore.startswith("dist"):
            raise NotImplementedError(
                f"kvstore={kvstore!r}: stores of several processes do not exist yet; 'device' trains in one process"
            )
    if update_on_kvstore is not None and flag("update_on_kvstore", update_on_kvstore):
        raise ValueError(
            f"update_on_kvstore=True with kvstore={kvstore!r}: one copy of a model needs no store, so none can update it; "
            "leave it out"
        )
    if compression_params is not None:
        checked(compression_params)


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
