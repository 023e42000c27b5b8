"""sweep: the function that trains all combinations of a grid."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ..ensemble import make_optimizer
from ..fitting import evaluate
from ..metrics import Metric, checked_metrics
from ..optimizer import Optimizer
from ..validation import boolean, integer
from .result import Sweep
from .train import Batches, start, train_separately, train_together


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
    """Train a copy of a network for each combination of the grid's values and each seed, all on the same batches.

    Each run starts from the same weights and sees the same batches as it would on its own, with a `Trainer`. Losses and
    gradients equal those up to float32 rounding, since the matrix products of all copies are batched and may be summed in
    another order. From equal gradients the updates have equal bits (see `Ensemble`). Muon amplifies such differences:
    it orthogonalises in bfloat16, also along directions that a gradient has in its last bits only, so weights may differ
    visibly there, and losses in their fourth digit. With `together=False` all numbers are those of `Trainer`. Dropout draws
    other numbers for each copy than in a run on its own.

    Args:
        make_model: makes the network. It is called once for each seed, after `torch.manual_seed(seed)`, so that
            copies of one seed begin with the same weights.
        loss: from outputs and labels to one number for each sample, or to their mean.
        data: batches (inputs, labels), iterated again in every epoch: a list, say, or a DataLoader.
        optimizer: name or class.
        grid: what to vary: arguments of the optimizer by name, each with the values to try; "optimizer" may be among them.
            `learning_rate` together with an `lr_scheduler` becomes its `base_lr`.
        optimizer_params: arguments for all of them. Each training has a schedule of its own.
        epochs, steps: how long; one of them may be given, else it is one epoch. Steps go through the data again if need be.
        seeds: integers.
        eval_data, eval_metric: as for `fit`; looked at once, after the training.
        together: whether all copies are run as one. With False they are trained one after the other, by a `Trainer` each:
            for networks that `torch.func.vmap` refuses.
        engine: as for `Trainer`.

    Raises:
        TypeError, ValueError: an argument that does not fit.
        RuntimeError: the network cannot be run as many copies at once; use `together=False`.

    Example:
        >>> import torch, tristep
        >>> data = [(torch.ones(4, 2), torch.zeros(4, 1))]
        >>> grid = {"learning_rate": [0.001, 0.1]}
        >>> make = lambda: torch.nn.Linear(2, 1)
        >>> found = tristep.sweep(make, torch.nn.MSELoss(), data, optimizer="sgd", grid=grid, epochs=20)
        >>> found.losses.shape, found.best()
        ((2, 1, 20), {'learning_rate': 0.1})
    """
    if not callable(make_model) or isinstance(make_model, torch.nn.Module):
        raise TypeError(f"make_model must be a function that makes a network, got {type(make_model).__name__}")
    if not callable(loss):
        raise TypeError(f"loss must be callable with outputs and labels, got {type(loss).__name__}")
    if isinstance(data, Iterator) or not isinstance(data, Iterable):
        raise TypeError(f"data must give batches (inputs, labels) again in every epoch, got {type(data).__name__}")
    if epochs is not None and steps is not None:
        raise ValueError(f"epochs={epochs!r} together with steps={steps!r}: give one of them")
    n_epochs = None if steps is not None else integer("epochs", 1 if epochs is None else epochs, low=1)
    n_steps = None if steps is None else integer("steps", steps, low=1)
    metrics = checked_metrics(eval_metric)
    boolean("together", together)
    axes = _axes(grid, seeds)
    points = [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
    optimizers = [_optimizer(optimizer, optimizer_params, point) for point in points]
    starts = {seed: start(make_model, seed) for seed in axes["seed"]}
    models = [starts[point["seed"]] for point in points]
    train = train_together if together else train_separately
    losses, states, per_epoch = train(models, optimizers, loss, Batches(data, n_epochs, n_steps), engine)

    shape = tuple(map(len, axes.values()))
    weights = {name: each.unflatten(0, shape) for name, each in states.items()}
    done = Sweep(axes, losses.reshape(*shape, -1), per_epoch, {}, weights, make_model)
    if eval_data is not None:
        scores = []
        for i, model in enumerate(models):
            own = copy.deepcopy(model)
            own.load_state_dict({name: each[i] for name, each in states.items()})
            scores.append(evaluate(own, loss, eval_data, metrics))
        done.scores = {name: np.array([score[name] for score in scores]).reshape(shape) for name in scores[0]}
    return done


def _axes(grid: Mapping[str, Sequence[Any]] | None, seeds: Iterable[int]) -> dict[str, tuple[Any, ...]]:
    axes: dict[str, tuple[Any, ...]] = {}
    if grid is not None and not isinstance(grid, Mapping):
        raise TypeError(f"grid={grid!r}: must be a dict of names and lists of the values to try, not {type(grid).__name__}")
    if isinstance(seeds, (str, bytes)) or not isinstance(seeds, Iterable):
        raise TypeError(f"seeds={seeds!r}: must be integers, such as range(5), not {type(seeds).__name__}")
    for name, values in (grid or {}).items():
        if name == "seed":
            raise ValueError("grid has 'seed': give the seeds of the networks as seeds=...")
        if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
            raise TypeError(f"grid[{name!r}]={values!r}: must be a list of the values to try")
        axes[name] = tuple(value.item() if isinstance(value, np.generic) else value for value in values)
    axes["seed"] = tuple(integer("seeds", seed, low=0) for seed in seeds)
    for name, values in axes.items():
        if not values:
            raise ValueError(f"{'seeds' if name == 'seed' else f'grid[{name!r}]'} is empty: give one value or more")
    return axes


def _optimizer(kind: Any, params: Mapping[str, Any] | None, point: Mapping[str, Any]) -> Optimizer:
    own = {name: value for name, value in point.items() if name not in ("seed", "optimizer")}
    return make_optimizer(point.get("optimizer", kind), {**(params or {}), **own})
