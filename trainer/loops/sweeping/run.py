"""sweep: the function that trains all combinations of a grid."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ...optimizer import Optimizer
from ...validation import boolean, instance, integer
from ..ensemble import make_optimizer
from ..fitting import check_batches, check_loss, evaluate
from ..metrics import Metric, checked_metrics
from .result import Sweep
from .train import Batches, start, start_equally, train_separately, train_together


def sweep(
    make_model: Callable[[], torch.nn.Module],
    loss: Callable[[Any, Any], torch.Tensor],
    data: Iterable[Any],
    *,
    optimizer: str | type[Optimizer] = "adam",
    grid: Mapping[str, Sequence[Any]] | None = None,
    optimizer_params: Mapping[str, Any] | None = None,
    epochs: int | None = None,
    steps: int | None = None,
    seeds: Iterable[int] = (0,),
    eval_data: Iterable[Any] | None = None,
    eval_metric: str | Metric | Sequence[str | Metric] | None = None,
    together: bool = True,
    engine: str | None = None,
) -> Sweep:
    """Train copies of a network, one for each combination of settings and each seed, on the same batches.

    Each training starts from the same weights and sees the same batches as alone with a `Trainer`. Losses and gradients
    agree with that up to float32 rounding, because the matrix products of all copies are batched and may sum in another
    order; from equal gradients, updates are equal bit for bit (see `Ensemble`). Muon amplifies rounding differences: it
    orthogonalises in bfloat16, also along directions that a gradient has in its last bits only, so weights may differ
    visibly, and losses in the fourth digit. With `together=False` all numbers equal `Trainer`'s. Dropout draws other random
    numbers for each copy than in a training alone.

    Args:
        make_model: a function that makes the network. It is called once for each seed, after `torch.manual_seed(seed)`, so
            that copies with the same seed start from the same weights.
        loss: a function of (outputs, labels) that returns one loss for each sample, or their mean.
        data: batches (inputs, labels), iterated again in every epoch: a list, say, or a DataLoader.
        optimizer: the name or the class of the optimizer.
        grid: lists of values to try, by argument of the optimizer; "optimizer" may be among the names. With an
            `lr_scheduler`, `learning_rate` sets its `base_lr`.
        optimizer_params: arguments for all optimizers by name. Each training gets a copy of the schedule.
        epochs: the number of epochs, >= 1; None is 1, unless `steps` is given.
        steps: the number of steps, >= 1, instead of `epochs`; the data are iterated again if need be.
        seeds: integers, >= 0, of the networks; they are the last axis of the result.
        eval_data: batches to evaluate once, after training, without gradients and in evaluation mode.
        eval_metric: "accuracy" (or "acc"), "mse", "mae", or a function of (labels, outputs) that returns the mean over a
            batch; or a list of these.
        together: True runs all copies as one; False trains one after the other, each with a `Trainer`, for networks that
            `torch.func.vmap` does not support.
        engine: "triton", "cpu", "eager", or None for the fastest that is available.

    Returns:
        A `Sweep`, with the losses, scores and weights of all trainings.

    Raises:
        TypeError, ValueError: an invalid argument.
        RuntimeError: `torch.func.vmap` cannot run the network; use `together=False`.

    Example:
        >>> import torch, tristep
        >>> data = [(torch.ones(4, 2), torch.zeros(4, 1))]
        >>> grid = {"learning_rate": [0.001, 0.1]}
        >>> make = lambda: torch.nn.Linear(2, 1)
        >>> found = tristep.sweep(make, torch.nn.MSELoss(), data, optimizer="sgd", grid=grid, epochs=20)
        >>> found.losses.shape, found.best()
        ((2, 1, 20), {'learning_rate': 0.1})
    """
    check_loss(loss)
    check_batches("data", data)
    if eval_data is not None:
        check_batches("eval_data", eval_data)
    if epochs is not None and steps is not None:
        raise ValueError(f"epochs={epochs!r} together with steps={steps!r}: give one of them")
    n_epochs = None if steps is not None else integer("epochs", 1 if epochs is None else epochs, low=1)
    n_steps = None if steps is None else integer("steps", steps, low=1)
    metrics = checked_metrics(eval_metric)
    boolean("together", together)
    axes = _axes(grid, seeds)
    points = [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
    optimizers = [_optimizer(optimizer, optimizer_params, point) for point in points]
    starts = {seed: start(make_model, seed) for seed in axes["seeds"]}
    if start_equally(starts.values()):
        warnings.warn(
            f"seeds={tuple(starts)}: make_model gives the same weights for all of them, so they are one training, but for "
            "dropout. Make the network from torch's random numbers, without torch.manual_seed or a generator of its own",
            RuntimeWarning,
            stacklevel=2,
        )
    models = [starts[point["seeds"]] for point in points]
    train = train_together if together else train_separately
    losses, states, per_epoch = train(models, optimizers, loss, Batches(data, n_epochs, n_steps), engine)

    shape = tuple(map(len, axes.values()))
    weights = {name: stacked.unflatten(0, shape) for name, stacked in states.items()}
    result = Sweep(axes, losses.reshape(*shape, -1), per_epoch, {}, weights, make_model)
    if eval_data is not None:
        scores = []
        for i, model in enumerate(models):
            trained = copy.deepcopy(model)
            trained.load_state_dict({name: stacked[i] for name, stacked in states.items()})
            scores.append(evaluate(trained, loss, eval_data, metrics))
        result.scores = {name: np.array([score[name] for score in scores]).reshape(shape) for name in scores[0]}
    return result


def _axes(grid: Mapping[str, Sequence[Any]] | None, seeds: Iterable[int]) -> dict[str, tuple[Any, ...]]:
    axes: dict[str, tuple[Any, ...]] = {}
    instance("grid", grid, (Mapping, type(None)), "a dict of names and lists of the values to try", shown=True)
    if isinstance(seeds, (str, bytes)) or not isinstance(seeds, Iterable):
        raise TypeError(f"seeds={seeds!r}: must be integers, such as range(5), not {type(seeds).__name__}")
    for name, values in (grid or {}).items():
        if name == "seeds":
            raise ValueError("grid has 'seeds': give the seeds of the networks as seeds=...")
        if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
            raise TypeError(f"grid[{name!r}]={values!r}: must be a list of the values to try")
        axes[name] = tuple(value.item() if isinstance(value, np.generic) else value for value in values)
    axes["seeds"] = tuple(integer("seeds", seed, low=0) for seed in seeds)
    for name, values in axes.items():
        if not values:
            raise ValueError(f"{name if name == 'seeds' else f'grid[{name!r}]'} is empty: give one value or more")
    return axes


def _optimizer(kind: Any, params: Mapping[str, Any] | None, point: Mapping[str, Any]) -> Optimizer:
    varied = {name: value for name, value in point.items() if name not in ("seeds", "optimizer")}
    return make_optimizer(point.get("optimizer", kind), {**(params or {}), **varied})
