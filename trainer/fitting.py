"""fit: train a model in one call, in the way of MXNet's `Module.fit`, with progress and a report for each epoch."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from .checkpoint.manager import CheckpointManager
from .interrupts import handled
from .metrics import Metric, checked_metrics
from .optimizer import Optimizer
from .random_state import random_state, set_random_state
from .trainer import Trainer
from .validation import boolean, integer


@dataclass(frozen=True)
class Batch:
    """What callbacks after a batch are told.

    Attributes:
        epoch, batch: their numbers, from 0.
        loss: the mean over the batch.
        trainer: the trainer in use.
    """

    epoch: int
    batch: int
    loss: float
    trainer: Trainer


@dataclass
class Fit:
    """What `fit` did.

    Attributes:
        trainer: the trainer, ready for more steps.
        epochs: for each epoch that was finished a dict of "epoch", "loss", the metrics by name, the same with "eval_" before
            them where there was `eval_data`, "learning_rate" at its end, and "seconds".
        losses: the mean loss of every batch.
        interrupted: whether it was stopped early, by Ctrl-C or a callback.
    """

    trainer: Trainer
    epochs: list[dict[str, float]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    interrupted: bool = False


def fit(
    net: torch.nn.Module,
    loss: Callable[[Any, Any], torch.Tensor],
    data: Iterable[Any],
    *,
    optimizer: str | Optimizer = "sgd",
    optimizer_params: Mapping[str, Any] | Iterable[tuple[str, Any]] | None = None,
    initializer: Any = None,
    lr_scheduler: Callable[[int], float] | None = None,
    num_epoch: int = 1,
    begin_epoch: int = 0,
    eval_data: Iterable[Any] | None = None,
    eval_metric: str | Metric | Sequence[str | Metric] | None = None,
    batch_end_callback: Callable[[Batch], Any] | Sequence[Callable[[Batch], Any]] = (),
    epoch_end_callback: Callable[[Fit], Any] | Sequence[Callable[[Fit], Any]] = (),
    kvstore: str | None = "device",
    trainer: Trainer | None = None,
    checkpoint: CheckpointManager | str | os.PathLike[str] | None = None,
    recorder: Any = None,
    progress: bool = True,
) -> Fit:
    """Train `net` for some epochs.

    A first Ctrl-C, or the notebook's stop button, ends training after the current batch, with model and trainer as after any
    other batch. A second one raises KeyboardInterrupt at once.

    Args:
        net: the model, called with the inputs of a batch.
        loss: from outputs and labels to one number for each sample, shape [batch_size], or to their mean, of no dimension.
        data: batches (inputs, labels), iterated again in every epoch: a DataLoader or a list, say. Inputs may be a tuple of
            tensors, which become several arguments. Tensors are moved to where the model is.
        optimizer, optimizer_params, kvstore: as for `Trainer`.
        initializer: applied to the model first, as `tristep.initializer.initialize` takes it; None leaves it as it is.
        lr_scheduler: from the number of updates to the rate; instead of one in `optimizer_params`.
        num_epoch: which epoch to end before, > begin_epoch.
        begin_epoch: the number of the first epoch, >= 0; for going on.
        eval_data: batches to be evaluated after each epoch, without gradients and with the model in evaluation mode.
        eval_metric: "accuracy" (or "acc"), "mse", "mae", or a callable from labels and outputs to the mean over a batch; or
            several. They are averaged over samples, during training too.
        batch_end_callback: called with a `Batch` after each; one that returns True ends training.
        epoch_end_callback: called with the `Fit` so far after each epoch; one that returns True ends training.
        trainer: one to go on with, instead of `optimizer`, `optimizer_params`, `lr_scheduler` and `kvstore`.
        checkpoint: a `CheckpointManager` of `trainer` and `net`, or a folder for one with its defaults. Training continues
            from the newest checkpoint there, with the batch that comes next, as long as `data` depend on nothing but random
            numbers and the loader's own generator. Checkpoints are saved after each epoch, with its means as metrics, when
            the manager's interval is over, with the batch's loss, and when training ends early.
        recorder: a `viz.Recorder` of the trainer, which is then used: it gets loss and number of the epoch at every step,
            and after each epoch the metrics, and "val_loss" and "val_" with the names of the metrics where there is
            `eval_data`.
        progress: show a progress bar and a line for each epoch.

    Raises:
        TypeError, ValueError: an argument that does not fit; nothing has been changed.

    Example:
        >>> import torch, tristep
        >>> net = torch.nn.Linear(2, 1)
        >>> data = [(torch.ones(4, 2), torch.zeros(4, 1))]
        >>> done = tristep.fit(net, torch.nn.MSELoss(), data, num_epoch=3, eval_metric="mse", progress=False)
        >>> len(done.epochs), done.epochs[0]["loss"] > done.epochs[2]["loss"]
        (3, True)

    Source: MXNet 1.9.1, `module.BaseModule.fit`.
    """
    if not isinstance(net, torch.nn.Module):
        raise TypeError(f"net must be a torch.nn.Module, got {type(net).__name__}")
    if not callable(loss):
        raise TypeError(f"loss must be callable with outputs and labels, got {type(loss).__name__}")
    for name, given in (("data", data), ("eval_data", eval_data)):
        if isinstance(given, Iterator):
            raise TypeError(f"{name} is an iterator, which ends after one epoch: give a DataLoader, a list, or the like")
        if given is not None and not isinstance(given, Iterable):
            raise TypeError(f"{name} must give batches (inputs, labels), got {type(given).__name__}")
    begin_epoch = integer("begin_epoch", begin_epoch, low=0)
    num_epoch = integer("num_epoch", num_epoch, low=begin_epoch + 1)
    metrics = checked_metrics(eval_metric)
    boolean("progress", progress)
    batch_callbacks = _callables("batch_end_callback", batch_end_callback)
    epoch_callbacks = _callables("epoch_end_callback", epoch_end_callback)
    arguments = dict(optimizer_params or {})
    if lr_scheduler is not None:
        if "lr_scheduler" in arguments:
            raise ValueError("lr_scheduler is given twice, by itself and in optimizer_params: leave one out")
        if isinstance(optimizer, Optimizer):
            raise ValueError("lr_scheduler together with an Optimizer: give it to the optimizer itself")
        arguments["lr_scheduler"] = lr_scheduler
    if recorder is not None:
        source = getattr(recorder, "source", None)
        if not isinstance(source, Trainer) or not callable(getattr(recorder, "note", None)):
            raise TypeError(f"recorder must be a viz.Recorder of a Trainer, got {type(recorder).__name__}")
        if trainer is not None and trainer is not source:
            raise ValueError("recorder records another Trainer than trainer: make it of this one, or leave trainer out")
        if taken := {"epoch", "learning_rate"} & metrics.keys():
            raise ValueError(f"eval_metric {min(taken)!r}: recorder has a number of this name at every step")
        batch_callbacks.insert(0, lambda told: recorder.step(loss=told.loss, epoch=told.epoch))
        trainer = source
    if trainer is not None and not isinstance(trainer, Trainer):
        raise TypeError(f"trainer must be a Trainer, got {type(trainer).__name__}")
    if trainer is not None and (arguments or initializer is not None):
        raise ValueError("trainer is used as it is: leave out optimizer_params, lr_scheduler and initializer")
    if not isinstance(checkpoint, (CheckpointManager, str, os.PathLike, type(None))):
        raise TypeError(f"checkpoint must be a CheckpointManager or a folder, got {type(checkpoint).__name__}")
    if isinstance(checkpoint, CheckpointManager):
        if checkpoint.trainer is not trainer:
            raise ValueError("checkpoint is a CheckpointManager of another trainer: give its trainer here, too, or a folder")
        known = {"loss", *metrics, *(f"eval_{name}" for name in ("loss", *metrics) if eval_data is not None)}
        if checkpoint.metric not in {None, *known}:
            raise ValueError(f"checkpoint decides by {checkpoint.metric!r} which is the best: here are {sorted(known)}")
    made = Trainer(net, optimizer, arguments or None, kvstore=kvstore) if trainer is None else trainer
    if initializer is not None:
        from .initializer import initialize

        initialize(net, initializer)
    from tqdm.auto import tqdm  # which looks for widgets when it is imported

    done, batches, sums = Fit(made), EpochBatches(data, begin_epoch), _Sums(metrics)
    with _checkpointed(checkpoint, made, net, [batches, sums]) as manager, _interruptible() as interrupted:
        while batches.epoch < num_epoch:
            if not _one_epoch(done, net, loss, batches, sums, num_epoch, batch_callbacks, interrupted, manager, progress):
                done.interrupted = True
                break
            if eval_data is not None:
                found = evaluate(net, loss, eval_data, metrics)
                done.epochs[-1] |= {f"eval_{name}": value for name, value in found.items()}
            if recorder is not None:
                recorder.note(**_of_epoch(done.epochs[-1], metrics))
            if progress:
                tqdm.write(_line(done.epochs[-1], num_epoch))
            if manager is not None:
                manager.save(done.epochs[-1], {"epoch": batches.epoch})
            if _ends(epoch_callbacks, done) or interrupted.is_set():
                done.interrupted = batches.epoch < num_epoch
                break
    return done


def evaluate(
    net: torch.nn.Module, loss: Callable[[Any, Any], torch.Tensor], data: Iterable[Any], metrics: Mapping[str, Metric]
) -> dict[str, float]:
    """Mean loss and metrics over data, without gradients; the model is in evaluation mode meanwhile.

    Args:
        net, loss, data: as for `fit`.
        metrics: by name, from labels and outputs to the mean over a batch.
    """
    sums, place, training = _Sums(metrics), device_of(net), net.training
    net.eval()
    try:
        with torch.no_grad():
            for batch in data:
                inputs, labels = unpack_batch("eval_data", batch, place)
                outputs = net(*inputs)
                sums.add(len(inputs[0]), loss(outputs, labels).mean(), labels, outputs)
    finally:
        net.train(training)
    return sums.means()


def _one_epoch(
    done: Fit,
    net: torch.nn.Module,
    loss: Callable[[Any, Any], torch.Tensor],
    data: EpochBatches,
    sums: _Sums,
    num_epoch: int,
    callbacks: Sequence[Callable[[Batch], Any]],
    interrupted: threading.Event,
    manager: CheckpointManager | None,
    progress: bool,
) -> bool:
    """Train for an epoch, or what is left of it; whether it came to its end."""
    from tqdm.auto import tqdm

    trainer, epoch, start = done.trainer, data.epoch, time.perf_counter()
    about = {"desc": f"epoch {epoch + 1}/{num_epoch}", "unit": " batches", "leave": False, "disable": not progress}
    with tqdm(data, total=data.length, initial=data.batch, **about) as batches:
        for batch in batches:
            size, mean, labels, outputs = train_on(trainer, net, loss, batch)
            sums.add(size, mean, labels, outputs)
            done.losses.append(mean.item())
            batches.set_postfix(loss=f"{done.losses[-1]:.4g}", refresh=False)
            told = Batch(epoch, data.batch - 1, done.losses[-1], trainer)
            ends = _ends(callbacks, told) or interrupted.is_set()
            if manager is not None:
                about_batch = {"loss": done.losses[-1]} if manager.metric in (None, "loss") else None
                if not manager.step(about_batch, {"epoch": epoch}) and ends:
                    manager.save(about_batch, {"epoch": epoch})
            if ends:
                return False
    found = {"epoch": epoch + 1, **sums.means(), "learning_rate": trainer.learning_rate}
    done.epochs.append(found | {"seconds": time.perf_counter() - start})
    sums.clear()
    return True


@contextmanager
def _checkpointed(given: Any, trainer: Trainer, net: torch.nn.Module, own: list[Any]) -> Iterator[CheckpointManager | None]:
    """A context in which training is saved, and has been resumed; gives the manager."""
    if given is None:
        yield None
        return
    manager = given if isinstance(given, CheckpointManager) else CheckpointManager(given, trainer, net)
    with saving_with(manager, own):
        manager.resume()
        yield manager


@contextmanager
def saving_with(manager: CheckpointManager, stateful: Iterable[Any]) -> Iterator[None]:
    """A context in which `manager` saves, and notes signals, with more that has a state."""
    before, manager.stateful = manager.stateful, [*manager.stateful, *stateful]
    try:
        with manager:
            yield
    finally:
        manager.stateful = before


class EpochBatches:
    """The batches of data, epoch by epoch.

    Its place can be gone back to as long as the data depend on nothing but the random numbers of torch, NumPy and Python,
    and a generator of the loader's own: the epoch is begun again with those that it began with, and batches are skipped.

    Args:
        data: batches, iterated again in every epoch.
        epoch: the number of the first epoch.

    Attributes:
        epoch: the number of the epoch from which the next batch comes.
        batch: how many batches of this epoch there have been.
        length: how many there are in an epoch, None if the data do not say.
    """

    def __init__(self, data: Iterable[Any], epoch: int = 0) -> None:
        self.epoch, self.batch = epoch, 0
        try:
            self.length: int | None = len(data)  # type: ignore[arg-type]
        except TypeError:  # such as a DataLoader's of an IterableDataset
            self.length = None
        self._data = data
        self._generators = [own for own in (getattr(data, "generator", None),) if own is not None]
        self._batches: Iterator[Any] | None = None
        self._random: Any = None  # when the epoch began

    def __iter__(self) -> Iterator[Any]:
        """The batches that are left of this epoch. At their end the next epoch has come, or another place was loaded.

        Raises:
            ValueError: there is no batch in an epoch.
        """
        if self._batches is None:
            self._random = random_state(), [own.get_state() for own in self._generators]
            self._batches, self.batch = iter(self._data), 0
        batches = self._batches
        for batch in batches:
            self.batch += 1
            yield batch
            if self._batches is not batches:
                return
        if not self.batch:
            raise ValueError(f"data gave no batch in epoch {self.epoch + 1}: it must be iterable again in every epoch")
        self._batches, self.epoch, self.batch = None, self.epoch + 1, 0

    def state_dict(self) -> dict[str, Any]:
        begun = self._batches is not None
        own = [generator.get_state() for generator in self._generators]
        return {"epoch": self.epoch, "batch": self.batch if begun else None, "random": self._random, "own": own}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.epoch, self.batch, self._batches = state["epoch"], 0, None
        if state["batch"] is not None:
            self._random = state["random"]
            set_random_state(self._random[0])
            for generator, own in zip(self._generators, self._random[1], strict=True):
                generator.set_state(own)
            self._batches = iter(self._data)
            for self.batch in range(1, state["batch"] + 1):
                next(self._batches)
        for generator, own in zip(self._generators, state["own"], strict=True):
            generator.set_state(own)


class _Sums:
    """Means of loss and metrics over samples, added up batch by batch."""

    def __init__(self, metrics: Mapping[str, Metric]) -> None:
        self._metrics = metrics
        self.clear()

    def clear(self) -> None:
        self._totals: dict[str, Any] = dict.fromkeys(("loss", *self._metrics), 0.0)
        self.count = 0

    def state_dict(self) -> dict[str, Any]:
        return {"totals": {name: float(total) for name, total in self._totals.items()}, "count": self.count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if set(state["totals"]) != set(self._totals):
            raise ValueError(
                f"the checkpoint has sums of {list(state['totals'])}, eval_metric asks for {list(self._totals)}"
            )
        self._totals, self.count = dict(state["totals"]), state["count"]

    def add(self, size: int, loss: torch.Tensor, labels: Any, outputs: Any) -> None:
        self.count += size
        self._totals["loss"] += size * loss.detach().double()
        for name, metric in self._metrics.items():
            self._totals[name] += size * metric(labels, outputs)

    def means(self) -> dict[str, float]:
        return {name: float(total) / self.count if self.count else float("nan") for name, total in self._totals.items()}


def _callables(name: str, given: Any) -> list[Callable[..., Any]]:
    several = [given] if callable(given) else list(given)
    for one in several:
        if not callable(one):
            raise TypeError(f"{name} must be callable, or a list of callables, got {type(one).__name__}")
    return several


def _ends(callbacks: Sequence[Callable[[Any], Any]], told: Any) -> bool:
    """Call all of them; whether one returned True."""
    answers = [callback(told) for callback in callbacks]
    return any(answer is True for answer in answers)


def _of_epoch(epoch: Mapping[str, float], metrics: Iterable[str]) -> dict[str, float]:
    """What a recorder gets at the end of an epoch."""
    found = {name: epoch[name] for name in metrics}
    return found | {f"val_{name}": epoch[f"eval_{name}"] for name in ("loss", *metrics) if f"eval_{name}" in epoch}


def train_on(
    source: Trainer | torch.optim.Optimizer, net: torch.nn.Module, loss: Callable[[Any, Any], torch.Tensor], batch: Any
) -> tuple[int, torch.Tensor, Any, Any]:
    """Train for one step on a batch: its size, the mean loss, the labels and the outputs."""
    inputs, labels = unpack_batch("data", batch, device_of(net))
    outputs = net(*inputs)
    value, size = loss(outputs, labels), len(inputs[0])
    if value.shape not in (torch.Size(), torch.Size([size])):
        raise ValueError(
            f"loss gave shape {tuple(value.shape)} for a batch of {size}: it must give one number for each sample, "
            f"shape ({size},), or their mean, shape ()"
        )
    mean = step_on(source, value, size)
    return size, mean, labels, outputs.detach() if isinstance(outputs, torch.Tensor) else outputs


def step_on(source: Trainer | torch.optim.Optimizer, value: torch.Tensor, size: int) -> torch.Tensor:
    """Take a step by the losses of so many samples, or their mean, which this returns."""
    source.zero_grad()
    if isinstance(source, Trainer):
        value.sum().backward()
        source.step(size if value.dim() else 1)
    else:
        value.mean().backward()
        source.step()
    return value.detach().mean()


def device_of(net: torch.nn.Module) -> torch.device:
    return next((parameter.device for parameter in net.parameters()), torch.device("cpu"))


def unpack_batch(name: str, batch: Any, place: torch.device) -> tuple[tuple[Any, ...], Any]:
    if not (isinstance(batch, (tuple, list)) and len(batch) == 2):
        raise TypeError(f"{name} must give pairs (inputs, labels), got {type(batch).__name__}")
    inputs, labels = batch
    inputs = tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)
    return tuple(_moved(each, place) for each in inputs), _moved(labels, place)


def _moved(value: Any, place: torch.device) -> Any:
    return value.to(place, non_blocking=True) if isinstance(value, torch.Tensor) else value


def _line(epoch: Mapping[str, float], num_epoch: int) -> str:
    values = {name: value for name, value in epoch.items() if name not in ("epoch", "seconds")}
    shown = ", ".join(f"{name.replace('_', ' ')} {value:.4g}" for name, value in values.items())
    return f"epoch {epoch['epoch']:.0f}/{num_epoch}: {shown}; {epoch['seconds']:.1f} s"


@contextmanager
def _interruptible() -> Iterator[threading.Event]:
    """An event that a first Ctrl-C sets, instead of raising in the middle of something; a second one raises."""
    asked = threading.Event()

    def ask(number: int, frame: Any) -> None:
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()

    with handled(ask):
        yield asked
