"""Train several copies of a network: all together, with stacked weights, or one after the other."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.func import functional_call, vmap

from ...optimizer import MultiOptimizer, Optimizer
from ...optimizer.patterns import layers_of
from ...trainer import Trainer
from ...validation import instance
from ..batch_step import checked_loss, device_of, unpack_batch
from ..ensemble import Ensemble
from ..fitting import evaluate

Evaluate = Callable[[Iterable[Any]], torch.Tensor]  # from batches to the mean loss of each copy on them, [n]
Watch = Callable[[int, Evaluate], None]  # called before training, with step 0, and after each step


class NotStackableError(RuntimeError):
    """Raised if `torch.func.vmap` cannot run the copies of a network as one."""


def start(make_model: Callable[[], torch.nn.Module], seed: int) -> torch.nn.Module:
    """Return the untrained network of a seed; the global generators of torch keep their states."""
    if not callable(make_model) or isinstance(make_model, torch.nn.Module):
        raise TypeError(f"make_model must be a function that makes a network, got {type(make_model).__name__}")
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = make_model()
    instance("what make_model returns", model, torch.nn.Module, "a torch.nn.Module")
    return model


def start_equally(models: Iterable[torch.nn.Module]) -> bool:
    """Return whether networks of several seeds have the same weights: then what made them does not depend on the seed."""
    first, *others = (model.state_dict() for model in models)
    return bool(others) and all(torch.equal(other[name], first[name]) for other in others for name in first)


class Batches:
    """The batches of a number of epochs (None: as many as `steps` needs), or of a number of steps (None: of all epochs)."""

    def __init__(self, data: Iterable[Any], epochs: int | None, steps: int | None) -> None:
        if epochs is None and steps is None:
            raise ValueError("epochs=None together with steps=None: give one of them, or the batches never end")
        self._data, self._epochs, self._steps = data, epochs, steps
        # Batches in an epoch; for data without a length, of the longest so far, which `steps` may have ended early.
        self.per_epoch = _length(data)

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


def _length(data: Any) -> int:
    """Return `len(data)`, or 0 for data without a length, such as a DataLoader of an IterableDataset."""
    try:
        return len(data)
    except TypeError:
        return 0


def train_together(
    models: Sequence[torch.nn.Module],
    optimizers: Sequence[Optimizer],
    loss: Callable[[Any, Any], torch.Tensor],
    batches: Batches,
    engine: str | None,
    watch: Watch | None = None,
) -> tuple[np.ndarray, dict[str, torch.Tensor], int]:
    """Train all networks at once, each with its optimizer, on the same batches.

    The networks are not changed, and one object may occur several times. `watch` is called with the number of the step and a
    function that evaluates all networks. Raise NotStackableError if `torch.func.vmap` cannot run them; no step was taken.

    Returns:
        The losses, float32 [n, steps]; the entries of the state_dicts by name, each stacked along a first axis of length n;
        and the number of steps in an epoch.
    """
    first, device = copy.deepcopy(models[0]), device_of(models[0])
    trained = [name for name, parameter in first.named_parameters() if parameter.requires_grad]
    if any(optimizer.depends_on_order for optimizer in optimizers):
        trained.sort()  # as a Trainer does
    if not trained:
        raise ValueError("make_model made a network without parameters to train")
    tensors_of = {id(model): dict(model.named_parameters()) | dict(model.named_buffers()) for model in models}
    tensors = [tensors_of[id(model)] for model in models]  # networks of the same seed are one object
    weights = {name: _stacked([by_name[name] for by_name in tensors]).requires_grad_() for name in trained}
    untrained = {
        name: torch.stack([by_name[name].detach() for by_name in tensors]) for name in tensors[0] if name not in weights
    }
    gradients = [_like(stacked) for stacked in weights.values()]
    for model, optimizer in zip(models, optimizers, strict=True):  # it reads lr_mult and wd_mult of the parameters
        by_name = tensors_of[id(model)]
        if isinstance(optimizer, MultiOptimizer):
            optimizer.layers = layers_of(model)
            optimizer.use_parameters([by_name[name] for name in trained], trained)
        else:
            optimizer.param_dict = {k: by_name[name] for k, name in enumerate(trained)}
    ensemble = Ensemble(optimizers, list(weights.values()), engine)
    new_gradients: Any = gradients

    def loss_of_one(tensors: dict[str, torch.Tensor], inputs: tuple[Any, ...], labels: Any) -> torch.Tensor:
        return checked_loss(loss(functional_call(first, tensors, inputs), labels), len(inputs[0])).mean()

    loss_of_all = vmap(loss_of_one, in_dims=(0, None, None), randomness="different")
    losses: list[torch.Tensor] = []

    @contextmanager
    def explain_refusal() -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            if losses:
                raise
            raise NotStackableError(
                f"the copies of {type(first).__name__} cannot be run as one by torch.func.vmap; "
                f"sweep(..., together=False) trains one after the other. torch says: {error}"
            ) from error

    def mean_loss(data: Iterable[Any]) -> torch.Tensor:
        total, count, training = torch.zeros(len(models), dtype=torch.float64, device=device), 0, first.training
        first.eval()
        try:
            with torch.no_grad(), explain_refusal():
                for batch in data:
                    inputs, labels = unpack_batch("eval_data", batch, device)
                    total += len(inputs[0]) * loss_of_all(weights | untrained, inputs, labels)
                    count += len(inputs[0])
        finally:
            first.train(training)
        return total / count

    if watch is not None:
        watch(0, mean_loss)
    for batch in batches:
        inputs, labels = unpack_batch("data", batch, device)
        with explain_refusal():
            values = loss_of_all(weights | untrained, inputs, labels)
            computed = torch.autograd.grad(values.sum(), list(weights.values()), allow_unused=True, materialize_grads=True)
        torch._foreach_copy_(gradients, list(computed))
        ensemble.step(new_gradients)
        new_gradients = None  # the ensemble keeps the same tensors from now on
        losses.append(values.detach())
        if watch is not None:
            watch(len(losses), mean_loss)
    stacked = {name: tensor.detach().contiguous() for name, tensor in (weights | untrained).items()}
    # A tensor with two names is stacked under the first one.
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
    """Train the networks one after the other, each with a `Trainer`; arguments and results are `train_together`'s.

    `watch` is called for each network in turn, with a function that evaluates this network.
    """
    losses: list[torch.Tensor] = []
    states = []
    for model, optimizer in zip(models, optimizers, strict=True):
        net, device = copy.deepcopy(model), device_of(model)
        for copied, parameter in zip(net.parameters(), model.parameters(), strict=True):
            vars(copied).update(vars(parameter))  # lr_mult and wd_mult
        trainer = Trainer(net, optimizer, engine=engine)
        values: list[torch.Tensor] = []

        def mean_loss(data: Iterable[Any], net: torch.nn.Module = net) -> torch.Tensor:
            return torch.tensor([evaluate(net, loss, data, {})["loss"]], dtype=torch.float64)

        if watch is not None:
            watch(0, mean_loss)
        for batch in batches:
            inputs, labels = unpack_batch("data", batch, device)
            value = checked_loss(loss(net(*inputs), labels), len(inputs[0])).mean()
            trainer.zero_grad()
            value.backward()
            trainer.step(1)
            values.append(value.detach())
            if watch is not None:
                watch(len(values), mean_loss)
        losses.append(torch.stack(values))
        states.append(net.state_dict())
    stacked = {name: torch.stack([state[name] for state in states]) for name in states[0]}
    return torch.stack(losses).float().cpu().numpy(), stacked, batches.per_epoch


def _stacked(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Stack tensors, each aligned to 16 bytes, so that one launch updates all of them."""
    stacked = torch.stack([tensor.detach() for tensor in tensors])
    return _like(stacked).copy_(stacked)


def _like(stacked: torch.Tensor) -> torch.Tensor:
    """Return zeros of the same shape and dtype, in which each row along the first axis is aligned to 16 bytes."""
    count = stacked[0].numel()
    step = 16 // stacked.element_size()
    room = torch.zeros(len(stacked), -(-count // step) * step, dtype=stacked.dtype, device=stacked.device)
    return room[:, :count].unflatten(1, stacked.shape[1:]) if stacked.dim() > 1 else room[:, 0]
