"""sweep: train a small network with every combination of some settings, all copies at once.

Forward and backward of all copies are those of one network by `torch.func.vmap`, over weights that are stacked; `Ensemble`
updates them, in one launch for all optimizers of one rule.
"""

from __future__ import annotations

import copy
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.func import functional_call, vmap
from torch.nn.functional import cross_entropy, log_softmax, nll_loss, softmax
from torch.overrides import TorchFunctionMode

from . import files
from .ensemble import Ensemble, make_optimizer
from .fit import Metric, checked_metrics, device_of, evaluate, unpack_batch
from .optimizer import Optimizer
from .trainer import Trainer
from .validation import boolean, choice, integer

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Sweep", "sweep"]

FORMAT = 1
ONE_THREAD_BELOW = 2e8  # floating-point operations of a step in its products, some 10 ms of one core
FEW = 16  # classes fill no vector of the processor


@dataclass(repr=False)
class Sweep:
    """What `sweep` found. Its arrays have one axis for each entry of `axes`, in this order.

    Attributes:
        axes: what was varied, by name: the values. The last is "seed".
        losses: float32 [*axes, steps], the mean over each batch, before its update.
        steps_per_epoch: updates in an epoch.
        scores: of each metric by name, and "loss", float64 [*axes]: over `eval_data`, after the training; {} without it.
        weights: all that each network has in its state_dict, by name, [*axes, *shape].
        make_model: what makes a network to put weights into.
    """

    axes: dict[str, tuple[Any, ...]]
    losses: np.ndarray
    steps_per_epoch: int
    scores: dict[str, np.ndarray] = field(default_factory=dict)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    make_model: Callable[[], torch.nn.Module] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """How many values each axis has."""
        return tuple(map(len, self.axes.values()))

    @property
    def final(self) -> np.ndarray:
        """float32 [*axes]: the mean loss of the last epoch, or of all steps where there were fewer."""
        return self.losses[..., -self.steps_per_epoch :].mean(axis=-1)

    @property
    def lowest(self) -> np.ndarray:
        """float32 [*axes]: the least loss of a batch; NaN where none is a number."""
        return np.fmin.reduce(self.losses, axis=-1)

    def best(self, by: str = "final") -> dict[str, Any]:
        """The combination with the smallest median over seeds, by the names of the axes, without "seed".

        Args:
            by: "final" or "lowest" loss, or the name of a score. Of "accuracy" the largest is the best.

        Raises:
            ValueError: no such score, or not one finite number among them.
        """
        table = self._table(by)
        worst = -np.inf if by == "accuracy" else np.inf
        table = np.where(np.isfinite(table), table, worst)
        middle = np.sort(table, axis=-1)[..., (table.shape[-1] - 1) // 2]
        found = np.unravel_index(middle.argmax() if by == "accuracy" else middle.argmin(), middle.shape)
        if not np.isfinite(middle[found]):
            raise ValueError(f"by={by!r}: no training has ended with a finite number")
        return {name: values[i] for (name, values), i in zip(self.axes.items(), found, strict=False)}

    def at(self, **point: Any) -> tuple[int, ...]:
        """The indices of a combination, for the arrays here. Axes of one value, and "seed" for its first, may be left out.

        Raises:
            TypeError: no such axis, or one is missing.
            ValueError: no such value.
        """
        for name in point:
            if name not in self.axes:
                raise TypeError(f"no axis {name!r}; there are {', '.join(self.axes)}")
        found = []
        for name, values in self.axes.items():
            if name in point:
                if point[name] not in values:
                    raise ValueError(f"{name}={point[name]!r}: must be one of {', '.join(map(repr, values))}")
                found.append(values.index(point[name]))
            elif name == "seed" or len(values) == 1:
                found.append(0)
            else:
                raise TypeError(f"{name} is missing; it has the values {', '.join(map(repr, values))}")
        return tuple(found)

    def model(self, **point: Any) -> torch.nn.Module:
        """The trained network of a combination, given as for `at`, as a module of its own.

        Raises:
            RuntimeError: this was loaded without `make_model`.
        """
        where = self.at(**point)
        if self.make_model is None:
            raise RuntimeError("there is nothing to put the weights into: Sweep.load(path, make_model=...)")
        model = self.make_model()
        model.load_state_dict({name: stacked[where] for name, stacked in self.weights.items()})
        return model

    def rows(self) -> list[dict[str, Any]]:
        """One dict for each training: its values on the axes, "final", "lowest" and the scores."""
        tables = {"final": self.final, "lowest": self.lowest} | {f"eval_{name}": each for name, each in self.scores.items()}
        return [
            dict(zip(self.axes, point, strict=True)) | {name: float(table[where]) for name, table in tables.items()}
            for where, point in zip(np.ndindex(self.shape), itertools.product(*self.axes.values()), strict=True)
        ]

    def to_pandas(self) -> Any:
        """`rows()` as a pandas DataFrame."""
        import pandas as pd

        return pd.DataFrame(self.rows())

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write all but `make_model` to a NumPy file (.npz), whole or not at all. What JSON lacks becomes text in the axes.

        Raises:
            FileNotFoundError: there is no such folder.
        """
        about = {"format": FORMAT, "steps_per_epoch": self.steps_per_epoch, "scores": list(self.scores)}
        about["axes"] = [[name, list(values)] for name, values in self.axes.items()]
        arrays: dict[str, Any] = {f"score {name}": each for name, each in self.scores.items()}
        arrays |= {f"weight {name}": each.detach().cpu().numpy() for name, each in self.weights.items()}
        files.write_npz("path", path, "sweep", about, {"losses": self.losses, **arrays})

    @classmethod
    def load(cls, path: str | os.PathLike[str], make_model: Callable[[], torch.nn.Module] | None = None) -> Sweep:
        """Read what `save` has written.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: another kind of file, or a damaged one.
        """
        with files.contents("path", path, "a file that was written by Sweep.save"):
            about, arrays = files.read_npz(path, "sweep")
            if about is None:  # as earlier versions have written them
                about = files.parse_array(arrays.pop("about"))
            if about["format"] != FORMAT:
                raise ValueError(f"it has format {about['format']!r}, this version knows {FORMAT}")
            axes = {str(name): tuple(values) for name, values in about["axes"]}
            scores = {str(name): arrays.pop(f"score {name}") for name in about["scores"]}
            losses, per_epoch = arrays.pop("losses"), integer("steps_per_epoch", about["steps_per_epoch"], low=1)
            shape = tuple(map(len, axes.values()))
            if list(axes)[-1:] != ["seed"] or 0 in shape or len(axes) != len(about["axes"]):
                raise ValueError(f"it has the axes {', '.join(axes)}: must be several, the last of them 'seed'")
            if losses.dtype.kind != "f" or losses.ndim != len(shape) + 1 or not losses.shape[-1]:
                raise ValueError(f"losses are {losses.dtype} {losses.shape}")
            for name, each in {"losses": losses, **scores, **arrays}.items():
                fits = each.shape == shape if name in scores else each.shape[: len(shape)] == shape
                if not fits or not (name in scores or name == "losses" or name.startswith("weight ")):
                    raise ValueError(f"{name!r} has shape {each.shape}, the axes {shape}")
            weights = {name.removeprefix("weight "): torch.from_numpy(each) for name, each in arrays.items()}
            return cls(axes, losses, per_epoch, scores, weights, make_model)

    def __repr__(self) -> str:
        axes = ", ".join(f"{name} {len(values)}" for name, values in self.axes.items())
        try:
            point = ", ".join(f"{name}={value!r}" for name, value in self.best().items())
            seeds = np.sort(self.final[self.at(**self.best())[:-1]])
            best = f"best {point or 'loss'}: {seeds[(len(seeds) - 1) // 2]:.4g}"
        except ValueError:
            best = "none has a finite loss"
        return f"<sweep of {self.losses[..., 0].size} trainings ({axes}), {self.losses.shape[-1]} steps; {best}>"

    def _table(self, by: str) -> np.ndarray:
        tables = {"final": self.final, "lowest": self.lowest} | {k: v for k, v in self.scores.items() if k != "final"}
        return tables[choice("by", by, tables)]


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

    Each training starts from the same weights and sees the same batches as it would alone, by `Trainer`. Losses and
    gradients equal those up to float32 rounding, since the matrix products of all copies are batched and may add up in
    another order. From equal gradients the updates are equal to the bit (see `Ensemble`). Muon amplifies such differences:
    it orthogonalises in bfloat16, also along directions that a gradient has in its last bits only, so weights may differ
    visibly there, and losses in their fourth digit. With `together=False` all numbers are those of `Trainer`. Dropout draws
    other numbers for each copy than in a training on its own.

    Args:
        make_model: makes the network. It is called once for each seed, after `torch.manual_seed(seed)`, so that
            copies of one seed begin with the same weights.
        loss: from outputs and labels to one number for each sample, or to their mean.
        data: batches (inputs, labels), iterated anew in every epoch: a list, say, or a DataLoader.
        optimizer: name or class.
        grid: what to vary: arguments of the optimizer by name, each with the values to try; "optimizer" may be among them.
            `learning_rate` beside an `lr_scheduler` becomes its `base_lr`.
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
        raise TypeError(f"data must give batches (inputs, labels) anew in every epoch, got {type(data).__name__}")
    if epochs is not None and steps is not None:
        raise ValueError(f"epochs={epochs!r} beside steps={steps!r}: give one of them")
    n_epochs = None if steps is not None else integer("epochs", 1 if epochs is None else epochs, low=1)
    n_steps = None if steps is None else integer("steps", steps, low=1)
    metrics = checked_metrics(eval_metric)
    boolean("together", together)
    axes = _axes(grid, seeds)
    points = [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
    optimizers = [_optimizer(optimizer, optimizer_params, point) for point in points]
    starts = {seed: _start(make_model, seed) for seed in axes["seed"]}
    models = [starts[point["seed"]] for point in points]
    train = _train_together if together else _train_apart
    losses, states, per_epoch = train(models, optimizers, loss, _Batches(data, n_epochs, n_steps), engine)

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


class _Batches:
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
                raise ValueError(f"data gave no batch in epoch {epoch + 1}: it must be iterable anew in every epoch")
            if count == self._steps:
                return


def _train_together(
    models: Sequence[torch.nn.Module],
    optimizers: Sequence[Optimizer],
    loss: Callable[[Any, Any], torch.Tensor],
    batches: _Batches,
    engine: str | None,
) -> tuple[np.ndarray, dict[str, torch.Tensor], int]:
    """Losses [n, steps], the networks' state_dicts, stacked, and the steps of an epoch."""
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
        optimizer.param_dict = {k: own[name] for k, name in enumerate(trained)}
    many = Ensemble(optimizers, list(weights.values()), engine, stacked=True)
    given: Any = gradients

    def one(own: dict[str, torch.Tensor], inputs: tuple[Any, ...], labels: Any) -> torch.Tensor:
        with _FewClasses() if place.type == "cpu" else nullcontext():
            return loss(functional_call(first, own, inputs), labels).mean()

    all_copies = vmap(one, in_dims=(0, None, None), randomness="different")
    losses: list[torch.Tensor] = []
    with _Threads(place) as threads:
        for batch in batches:
            inputs, labels = unpack_batch("data", batch, place)
            try:
                with threads.counting():
                    values = all_copies(weights | others, inputs, labels)
                    found = torch.autograd.grad(
                        values.sum(), list(weights.values()), allow_unused=True, materialize_grads=True
                    )
            except RuntimeError as error:
                if losses:
                    raise
                raise RuntimeError(
                    f"the copies of {type(first).__name__} cannot be run as one by torch.func.vmap; "
                    f"sweep(..., together=False) trains one after the other. What it says: {error}"
                ) from error
            torch._foreach_copy_(gradients, list(found))
            many.step(given)
            given = None  # they are the same tensors from now on
            losses.append(values.detach())
    stacked = {name: each.detach().contiguous() for name, each in (weights | others).items()}
    # A tensor that is there by two names is stacked by the first.
    names = {tensor: name for name, tensor in itertools.chain(first.named_parameters(), first.named_buffers())}
    states = {name: stacked[names[tensor]] for name, tensor in first.state_dict(keep_vars=True).items()}
    return torch.stack(losses, dim=1).float().cpu().numpy(), states, batches.per_epoch


class _Threads:
    """Lets one thread take the steps of little arithmetic, at which torch's threads only wait for each other.

    That is decided by what the first step multiplies, not by the clock, so that a sweep has the same numbers every time:
    some of torch's operations add up in another order with another number of threads. Afterwards torch has
    as many as before.

    Args:
        device: where the copies are.
    """

    def __init__(self, device: torch.device) -> None:
        self._before, self._counted = torch.get_num_threads(), device.type != "cpu"

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Around forward and backward of a step."""
        if self._counted:
            yield
            return
        from torch.utils.flop_counter import FlopCounterMode  # it imports triton

        with FlopCounterMode(display=False) as counter:
            yield
        self._counted = True
        if counter.get_total_flops() < ONE_THREAD_BELOW:
            torch.set_num_threads(1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        torch.set_num_threads(self._before)


class _FewClasses(TorchFunctionMode):
    """Takes softmax and its logarithm across another axis than the last where that one is short.

    Along a last axis that is shorter than a vector of the processor, torch's softmax on a CPU takes ten times as long as
    across one with others after it, and there are as many others as copies. The values are the same but for rounding.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is cross_entropy:
            return _cross_entropy(*args, **kwargs)
        if func in _SOFTMAX:
            return _softmax(func, *args, **kwargs)
        return func(*args, **kwargs)


_SOFTMAX = {softmax, torch.softmax, torch.Tensor.softmax, log_softmax, torch.log_softmax, torch.Tensor.log_softmax}


def _softmax(
    func: Callable[..., torch.Tensor], input: torch.Tensor, dim: int | None = None, *others: Any, **named: Any
) -> torch.Tensor:
    if input.dim() < 2 or dim not in (-1, input.dim() - 1) or input.shape[-1] >= FEW:
        return func(input, dim, *others, **named)
    return func(input.movedim(-1, 0).contiguous(), 0, *others, **named).movedim(0, -1)


def _cross_entropy(input: torch.Tensor, target: torch.Tensor, *others: Any, **named: Any) -> torch.Tensor:
    smoothed = named.get("label_smoothing", 0.0)
    if others or smoothed or input.dim() != 2 or input.shape[-1] >= FEW or target.is_floating_point():
        return cross_entropy(input, target, *others, **named)
    return nll_loss(_softmax(log_softmax, input, -1), target, **{k: v for k, v in named.items() if k != "label_smoothing"})


def _train_apart(
    models: Sequence[torch.nn.Module],
    optimizers: Sequence[Optimizer],
    loss: Callable[[Any, Any], torch.Tensor],
    batches: _Batches,
    engine: str | None,
) -> tuple[np.ndarray, dict[str, torch.Tensor], int]:
    """As `_train_together`, by one `Trainer` after the other."""
    losses: list[torch.Tensor] = []
    states = []
    for model, optimizer in zip(models, optimizers, strict=True):
        own, place = copy.deepcopy(model), device_of(model)
        for copied, parameter in zip(own.parameters(), model.parameters(), strict=True):
            vars(copied).update(vars(parameter))  # lr_mult and wd_mult
        trainer = Trainer(own, optimizer, engine=engine)
        values = []
        for batch in batches:
            inputs, labels = unpack_batch("data", batch, place)
            value = loss(own(*inputs), labels).mean()
            trainer.zero_grad()
            value.backward()
            trainer.step(1)
            values.append(value.detach())
        losses.append(torch.stack(values))
        states.append(own.state_dict())
    stacked = {name: torch.stack([state[name] for state in states]) for name in states[0]}
    return torch.stack(losses).float().cpu().numpy(), stacked, batches.per_epoch


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


def _start(make_model: Callable[[], torch.nn.Module], seed: int) -> torch.nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = make_model()
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"make_model must make a torch.nn.Module, it made {type(model).__name__}")
    return model


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
