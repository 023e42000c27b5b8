"""Training several copies of a network: all together, stacked, or one after the other."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.func import functional_call, vmap

from ..ensemble import Ensemble
from ..fitting import device_of, evaluate, unpack_batch
from ..optimizer import MultiOptimizer, Optimizer
from ..optimizer.patterns import layers_of
from ..trainer import Trainer

Look = Callable[[Iterable[Any]], torch.Tensor]  # from batches to the mean loss of each copy on them, [n]
Watch = Callable[[int, Look], None]  # told of the start, as step 0, and of each step


class NotStackableError(RuntimeError):
    """The copies of a network cannot be run as one by `torch.func.vmap`."""


def start(make_model: Callable[[], torch.nn.Module], seed: int) -> torch.nn.Module:
    """The network that a seed begins with.

    Raises:
        TypeError: `make_model` made something else.
    """
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = make_model()
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"make_model must make a torch.nn.Module, it made {type(model).__name__}")
    return model


class Batches:
    """Batches of some epochs, or for some steps."""

    def __init__(self, data: Iterable[Any], epochs: int | None, steps: int | None) -> None:
        self._data, self._epochs, self._steps = data, epochs, steps
        self.per_epoch = 0  # known after the first epoch

    def __iter__(self) -> Iterator[Any]:
        count = 0
        for epoch in itertools.count():
            if epoch == self._epochs:
                return
            before = count
            for batch in self._data:
                if count == self._steps:
                    break
                yield batch
                count += 1
            self.per_epoch = max(self.per_epoch, count - before)
            if count == before and count != self._steps:
                raise ValueError(f"data gave no batch in epoch {epoch + 1}: it must be iterable again in every epoch")
            if count == self._steps:
                return


def train_together(
    models: Sequence[torch.nn.Module],
    optimizers: Sequence[Optimizer],
    loss: Callable[[Any, Any], torch.Tensor],
    batches: Batches,
    engine: str | None,
    watch: Watch | None = None,
) -> tuple[np.ndarray, dict[str, torch.Tensor], int]:
    """Losses [n, steps], the networks' state_dicts, stacked, and the steps of an epoch.

    Raises:
        NotStackableError: before the first step.
    """
    first, place = copy.deepcopy(models[0]), device_of(models[0])
    trained = [name for name, parameter in first.named_parameters() if parameter.requires_grad]
    if any(optimizer.depends_on_order for optimizer in optimizers):
        trained.sort()  # as a Trainer does
    if not trained:
        raise ValueError("make_model made a network without parameters to train")
    of_each = {id(model): dict(model.named_parameters()) | dict(model.named_buffers()) for model in models}
    tensors = [of_each[id(model)] for model in models]  # those of one seed are one object
    weights = {name: _stacked([each[name] for each in tensors]).requires_grad_() for name in trained}
    others = {name: torch.stack([each[name].detach() for each in tensors]) for name in tensors[0] if name not in weights}
    gradients = [_like(stacked) for stacked in weights.values()]
    for model, optimizer in zip(models, optimizers, strict=True):  # whose attributes lr_mult and wd_mult count
        own = of_each[id(model)]
        if isinstance(optimizer, MultiOptimizer):
            optimizer.layers = layers_of(model)
            optimizer.use_parameters([own[name] for name in trained], trained)
        else:
            optimizer.param_dict = {k: own[name] for k, name in enumerate(trained)}
    many = Ensemble(optimizers, list(weights.values()), engine, stacked=True)
    given: Any = gradients

    def one(own: dict[str, torch.Tensor], inputs: tuple[Any, ...], labels: Any) -> torch.Tensor:
        return loss(functional_call(first, own, inputs), labels).mean()

    all_copies = vmap(one, in_dims=(0, None, None), randomness="different")
    losses: list[torch.Tensor] = []

    @contextmanager
    def told_if_refused() -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            if losses:
                raise
            raise NotStackableError(
                f"the copies of {type(first).__name__} cannot be run as one by torch.func.vmap; "
                f"sweep(..., together=False) trains one after the other. What it says: {error}"
            ) from error

    def look(data: Iterable[Any]) -> torch.Tensor:
        total, count, training = torch.zeros(len(models), dtype=torch.float64, device=place), 0, first.training
        first.eval()
        try:
            with torch.no_grad(), told_if_refused():
                for batch in data:
                    inputs, labels = unpack_batch("eval_data", batch, place)
                    total += len(inputs[0]) * all_copies(weights | others, inputs, labels)
                    count += len(inputs[0])
        finally:
            first.train(training)
        return total / count

    if watch is not None:
        watch(0, look)
    for batch in batches:
        inputs, labels = unpack_batch("data", batch, place)
        with told_if_refused():
            values = all_copies(weights | others, inputs, labels)
            found = torch.autograd.grad(values.sum(), list(weights.values()), allow_unused=True, materialize_grads=True)
        torch._foreach_copy_(gradients, list(found))
        many.step(given)
        given = None  # they are the same tensors from now on
        losses.append(values.detach())
        if watch is not None:
            watch(len(losses), look)
    stacked = {name: each.detach().contiguous() for name, each in (weights | others).items()}
    # A tensor that is there by two names is stacked by the first.
    names = {tensor: name for name, tensor in itertools.chain(first.named_parameters(), first.named_buffers())}
    states = {name: stacked[names[tensor]] for name, tensor in first.state_dict(keep_vars=True).items()}
    return torch.stack(losses, dim=1).float().cpu().numpy(), states, batches.per_epoch


def train_separately(
    models: Sequence[torch.nn.Module],
    optimizers: Sequence[Optimizer],
    loss: Callable[[Any, Any], torch.Tensor],
    batches: Batches,
    engine: str | None,
    watch: Watch | None = None,
) -> tuple[np.ndarray, dict[str, torch.Tensor], int]:
    """As `train_together`, by one `Trainer` after the other, of each of which `watch` is told."""
    losses: list[torch.Tensor] = []
    states = []
    for model, optimizer in zip(models, optimizers, strict=True):
        own, place = copy.deepcopy(model), device_of(model)
        for copied, parameter in zip(own.parameters(), model.parameters(), strict=True):
            vars(copied).update(vars(parameter))  # lr_mult and wd_mult
        trainer = Trainer(own, optimizer, engine=engine)
        values: list[torch.Tensor] = []

        def look(data: Iterable[Any], own: torch.nn.Module = own) -> torch.Tensor:
            return torch.tensor([evaluate(own, loss, data, {})["loss"]], dtype=torch.float64)

        if watch is not None:
            watch(0, look)
        for batch in batches:
            inputs, labels = unpack_batch("data", batch, place)
            value = loss(own(*inputs), labels).mean()
            trainer.zero_grad()
            value.backward()
            trainer.step(1)
            values.append(value.detach())
            if watch is not None:
                watch(len(values), look)
        losses.append(torch.stack(values))
        states.append(own.state_dict())
    stacked = {name: torch.stack([state[name] for state in states]) for name in states[0]}
    return torch.stack(losses).float().cpu().numpy(), stacked, batches.per_epoch


def _stacked(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """These in one tensor, each beginning at a multiple of 16 bytes, so that one launch takes all of them."""
    stacked = torch.stack([tensor.detach() for tensor in tensors])
    return _like(stacked).copy_(stacked)


def _like(stacked: torch.Tensor) -> torch.Tensor:
    """Zeros of this shape, each first index of which begins at a multiple of 16 bytes."""
    count = stacked[0].numel()
    step = 16 // stacked.element_size()
    room = torch.zeros(len(stacked), -(-count // step) * step, dtype=stacked.dtype, device=stacked.device)
    return room[:, :count].unflatten(1, stacked.shape[1:]) if stacked.dim() > 1 else room[:, 0]
