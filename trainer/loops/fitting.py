"""fit: train a model in one call, as MXNet's `Module.fit` does, with a progress bar and a report for each epoch."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from ..optimizer import Optimizer
from ..trainer import Trainer
from ..utils.interrupts import handled
from ..utils.random_state import check_random_state, random_state, set_random_state
from ..validation import absolute_path, boolean, instance, integer
from .batch_step import BatchStep, check_captures, checked_loss, device_of, unpack_batch
from .manager import CheckpointManager
from .metrics import Metric, checked_metrics


@dataclass(frozen=True)
class Batch:
    """The argument of a `batch_end_callback` of `fit`.

    Attributes:
        epoch: the number of the epoch, from 0.
        batch: the number of the batch in the epoch, from 0.
        loss: the mean loss over the batch.
        trainer: the trainer in use.
    """

    epoch: int
    batch: int
    loss: float
    trainer: Trainer


@dataclass
class Fit:
    """The result of `fit`: the trainer, and the losses and metrics of the training.

    Attributes:
        trainer: the trainer, ready for more steps.
        epochs: one dict for each finished epoch: "epoch", "loss", the metrics by name, with `eval_data` the same names with
            the prefix "eval_", "learning_rate" at the end of the epoch, and "seconds".
        losses: the mean loss of each batch.
        interrupted: whether training was stopped early, by Ctrl-C or a callback.
        not_captured: why steps were not captured as a CUDA graph, in words, if that was asked for; "" otherwise.
    """

    trainer: Trainer
    epochs: list[dict[str, float]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    interrupted: bool = False
    not_captured: str = ""


def fit(
    net: torch.nn.Module,
    loss: Callable[[Any, Any], torch.Tensor],
    data: Iterable[Any],
    *,
    optimizer: str | Optimizer = "sgd",
    optimizer_params: Mapping[str, Any] | Iterable[tuple[str, Any]] | None = None,
    initializer: Any = None,
    lr_scheduler: Callable[[int], float] | None = None,
    epochs: int = 1,
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
    capture: bool | str = False,
) -> Fit:
    """Train a model for some epochs, and return the losses and metrics.

    The first Ctrl-C, or the notebook's stop button, ends training after the current batch, and `fit` returns. A second one
    raises KeyboardInterrupt at once.

    Args:
        net: the model, called with the inputs of a batch.
        loss: a function of (outputs, labels) that returns one loss for each sample, shape [batch_size], or their mean,
            shape [].
        data: batches (inputs, labels), iterated again in every epoch: a DataLoader or a list, say. Inputs may be a tuple of
            tensors, which become several arguments. Tensors are moved to the model's device.
        optimizer: the name of an optimizer, or an `Optimizer`, as for `Trainer`.
        optimizer_params: arguments of the optimizer by name, as for `Trainer`.
        initializer: an initializer for the model's parameters, as for `tristep.initializer.initialize`; None leaves them as
            they are.
        lr_scheduler: a function from the number of updates to the learning rate; it may be in `optimizer_params` instead.
        epochs: the end of the range of epochs, exclusive, > begin_epoch.
        begin_epoch: the number of the first epoch, >= 0; more than 0 to continue a training.
        eval_data: batches to evaluate after each epoch, without gradients and with the model in evaluation mode.
        eval_metric: "accuracy" (or "acc"), "mse", "mae", or a function of (labels, outputs) that returns the mean over a
            batch; or a list of these. Metrics are averaged over samples, during training too.
        batch_end_callback: a function, or a list of functions, called with a `Batch` after each batch; True ends training.
        epoch_end_callback: a function, or a list of functions, called with the `Fit` so far after each epoch; True ends
            training.
        kvstore: the name of a store, or None, as for `Trainer`.
        trainer: an existing trainer, instead of `optimizer`, `optimizer_params`, `lr_scheduler` and `kvstore`.
        checkpoint: a `CheckpointManager` of `trainer` and `net`, or a folder for a manager with defaults. Training resumes
            from the newest checkpoint there, at the next batch, if `data` depends only on the global random-number
            generators and on its own `generator`. Checkpoints are saved after each epoch, with the epoch's means as
            metrics; within an epoch at the manager's intervals, with the batch's loss; and when training ends early.
        recorder: a `viz.Recorder` of a trainer, which is used as `trainer`. It records the loss and the epoch at every step,
            and after each epoch the metrics, and with `eval_data` "val_loss" and the metrics with the prefix "val_".
        progress: whether to show a progress bar, and a line for each epoch.
        capture: "auto" records the steps as a CUDA graph on a GPU, see `Trainer.capture`, for the same numbers in less time
            of the host. Where the model, the loss or the optimizer does what a graph cannot repeat, steps are normal ones,
            and a line says why. True raises an error there. False never records. The loss must not compute numbers in
            Python that change from step to step, such as a weight that grows: a graph keeps those that were recorded.

    Returns:
        A `Fit`, with the trainer, the finished epochs and the loss of each batch.

    Raises:
        TypeError, ValueError: an invalid argument; nothing has been changed.

    Example:
        >>> import torch, tristep
        >>> net = torch.nn.Linear(2, 1)
        >>> data = [(torch.ones(4, 2), torch.zeros(4, 1))]
        >>> done = tristep.fit(net, torch.nn.MSELoss(), data, epochs=3, eval_metric="mse", progress=False)
        >>> len(done.epochs), done.epochs[0]["loss"] > done.epochs[2]["loss"]
        (3, True)

    Source: MXNet 1.9.1, `module.BaseModule.fit`.
    """
    instance("net", net, torch.nn.Module, "a torch.nn.Module")
    check_loss(loss)
    check_batches("data", data)
    if eval_data is not None:
        check_batches("eval_data", eval_data)
    begin_epoch = integer("begin_epoch", begin_epoch, low=0)
    epochs = integer("epochs", epochs, low=begin_epoch + 1)
    metrics = checked_metrics(eval_metric)
    boolean("progress", progress)
    check_captures(capture)
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
        batch_callbacks.insert(0, lambda batch: recorder.step(loss=batch.loss, epoch=batch.epoch))
        trainer = source
    instance("trainer", trainer, (Trainer, type(None)), "a Trainer")
    if trainer is not None and (arguments or initializer is not None):
        raise ValueError("trainer is used as it is: leave out optimizer_params, lr_scheduler and initializer")
    if isinstance(checkpoint, (str, os.PathLike)):
        checkpoint = absolute_path("checkpoint", checkpoint)
    else:
        instance("checkpoint", checkpoint, (CheckpointManager, type(None)), "a CheckpointManager or a folder")
    if isinstance(checkpoint, CheckpointManager):
        if checkpoint.trainer is not trainer:
            raise ValueError("checkpoint is a CheckpointManager of another trainer: give its trainer here, too, or a folder")
        names = {"loss", *metrics, *(f"eval_{name}" for name in ("loss", *metrics) if eval_data is not None)}
        if checkpoint.metric not in {None, *names}:
            raise ValueError(
                f"checkpoint has metric={checkpoint.metric!r}: fit computes {', '.join(sorted(names))}; make the manager "
                "with one of these"
            )
    if trainer is None:
        trainer = Trainer(net, optimizer, arguments or None, kvstore=kvstore)
    step = BatchStep(trainer, net, loss, capture)
    if initializer is not None:
        from ..initializer import initialize

        initialize(net, initializer)
    from tqdm.auto import tqdm  # it looks for widgets when it is imported

    result, position, sums = Fit(trainer), EpochBatches(data, begin_epoch), _Sums(metrics)
    finished = result.epochs
    with _checkpointed(checkpoint, trainer, net, [position, sums]) as manager, _interruptible() as interrupted:
        while position.epoch < epochs:
            if not _one_epoch(result, step, position, sums, epochs, batch_callbacks, interrupted, manager, progress):
                result.interrupted = True
                break
            if eval_data is not None:
                finished[-1] |= {f"eval_{name}": mean for name, mean in evaluate(net, loss, eval_data, metrics).items()}
            if recorder is not None:
                recorder.note(**_of_epoch(finished[-1], metrics))
            if progress:
                tqdm.write(_line(finished[-1], epochs))
            if manager is not None:
                manager.save(finished[-1], {"epoch": position.epoch})
            if _ends(epoch_callbacks, result) or interrupted.is_set():
                result.interrupted = position.epoch < epochs
                break
    return result


def check_loss(loss: Any) -> None:
    if not callable(loss):
        raise TypeError(f"loss must be callable with outputs and labels, got {type(loss).__name__}")


def check_batches(name: str, data: Any) -> None:
    """Raise TypeError if the argument `name` cannot be iterated in every epoch, ValueError if it knows that it is empty."""
    if isinstance(data, Iterator):
        raise TypeError(f"{name} is an iterator, which ends after one epoch: give a DataLoader, a list, or the like")
    if not isinstance(data, Iterable):
        raise TypeError(f"{name} must give batches (inputs, labels), got {type(data).__name__}")
    with suppress(TypeError):  # the length of a DataLoader may be unknown
        if len(data) == 0:  # type: ignore[arg-type]  # not everything has one
            raise ValueError(f"{name} gave no batch: it has length 0")


def evaluate(
    net: torch.nn.Module, loss: Callable[[Any, Any], torch.Tensor], data: Iterable[Any], metrics: Mapping[str, Metric]
) -> dict[str, float]:
    """Return the mean loss and metrics over data, without gradients and with the model in evaluation mode.

    `loss` returns one loss for each sample, or their mean; the metrics, functions of (labels, outputs), their mean.
    """
    sums, place, training = _Sums(metrics), device_of(net), net.training
    net.eval()
    try:
        with torch.no_grad():
            for batch in data:
                inputs, labels = unpack_batch("eval_data", batch, place)
                outputs = net(*inputs)
                size = len(inputs[0])
                sums.add(size, checked_loss(loss(outputs, labels), size).mean(), labels, outputs)
    finally:
        net.train(training)
    if not sums.count:
        raise ValueError("eval_data gave no batch: it must be iterable again for every evaluation")
    return sums.means()


def _one_epoch(
    result: Fit,
    step: BatchStep,
    data: EpochBatches,
    sums: _Sums,
    epochs: int,
    callbacks: Sequence[Callable[[Batch], Any]],
    interrupted: threading.Event,
    manager: CheckpointManager | None,
    progress: bool,
) -> bool:
    """Train for the rest of an epoch; return False if training is to end before the epoch's end."""
    from tqdm.auto import tqdm

    trainer, epoch, start = result.trainer, data.epoch, time.perf_counter()
    bar = {"desc": f"epoch {epoch + 1}/{epochs}", "unit": " batches", "leave": False, "disable": not progress}
    with tqdm(data, total=data.length, initial=data.batch, **bar) as batches:
        for batch in batches:
            size, mean, labels, outputs = step(batch)
            if step.why and not result.not_captured:
                result.not_captured = step.why
                if progress:
                    tqdm.write(f"no CUDA graph: {step.why}")
            sums.add(size, mean, labels, outputs)
            result.losses.append(mean.item())
            batches.set_postfix(loss=f"{result.losses[-1]:.4g}", refresh=False)
            ends = _ends(callbacks, Batch(epoch, data.batch - 1, result.losses[-1], trainer)) or interrupted.is_set()
            if manager is not None:
                saved_metrics = {"loss": result.losses[-1]} if manager.metric in (None, "loss") else None
                if not manager.step(saved_metrics, {"epoch": epoch}) and ends:
                    manager.save(saved_metrics, {"epoch": epoch})
            if ends:
                return False
    means = {"epoch": epoch + 1, **sums.means(), "learning_rate": trainer.learning_rate}
    result.epochs.append(means | {"seconds": time.perf_counter() - start})
    sums.clear()
    return True


@contextmanager
def _checkpointed(
    checkpoint: Any, trainer: Trainer, net: torch.nn.Module, stateful: list[Any]
) -> Iterator[CheckpointManager | None]:
    """Resume the training, and save it inside this context; yields the manager, None without `checkpoint`."""
    if checkpoint is None:
        yield None
        return
    manager = checkpoint if isinstance(checkpoint, CheckpointManager) else CheckpointManager(checkpoint, trainer, net)
    with saving_with(manager, stateful):
        manager.resume()
        yield manager


@contextmanager
def saving_with(manager: CheckpointManager, stateful: Iterable[Any]) -> Iterator[None]:
    """Inside this context let `manager` note SIGTERM, and save more objects with a `state_dict`."""
    before, manager.stateful = manager.stateful, [*manager.stateful, *stateful]
    try:
        with manager:
            yield
    finally:
        manager.stateful = before


class EpochBatches:
    """An iterator over the batches of each epoch that can be saved, and resumed in the middle of an epoch.

    To resume, it sets the random-number generators to their states at the beginning of the epoch, and skips batches. So the
    data must depend only on the generators of torch, NumPy and Python and on their own attribute `generator`.
    """

    def __init__(self, data: Iterable[Any], epoch: int = 0) -> None:
        self.epoch, self.batch = epoch, 0  # of the next batch, and the number of batches of this epoch so far
        try:
            self.length: int | None = len(data)  # type: ignore[arg-type]
        except TypeError:  # such as a DataLoader's of an IterableDataset
            self.length = None
        self._data = data
        generator = getattr(data, "generator", None)
        self._generators = [] if generator is None else [generator]
        self._batches: Iterator[Any] | None = None
        self._random: Any = None  # the states of all generators when the epoch began

    def __iter__(self) -> Iterator[Any]:
        """Yield the remaining batches of this epoch, then go to the next epoch; ends early if a state is loaded."""
        if self._batches is None:
            self._random = random_state(), [generator.get_state() for generator in self._generators]
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
        """Return the position in the data, and the states of generators that lead to it."""
        begun = self._batches is not None
        states = [generator.get_state() for generator in self._generators]
        return {"epoch": self.epoch, "batch": self.batch if begun else None, "random": self._random, "own": states}

    def check_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError if no `EpochBatches` of such data can have given this state."""
        if set(state) != {"epoch", "batch", "random", "own"}:
            raise ValueError(f"place in the data: has {sorted(map(str, state))}: must be epoch, batch, random and own")
        try:
            integer("place in the data: epoch", state["epoch"], low=0)
            self._check_generators(state["own"])
            if state["batch"] is not None:
                integer(
                    "place in the data: batch", state["batch"], low=0, high=math.inf if self.length is None else self.length
                )
                everything, own = state["random"]
                check_random_state(everything, with_gpus=False)
                self._check_generators(own)
        except (TypeError, RuntimeError) as error:  # the latter from a generator
            raise ValueError(f"place in the data: {error}") from None

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to the position of a `state_dict`, by iterating over the batches before it."""
        self.epoch, self.batch, self._batches = state["epoch"], 0, None
        if state["batch"] is not None:
            self._random = state["random"]
            set_random_state(self._random[0])
            self._set_generators(self._random[1])
            self._batches = iter(self._data)
            for self.batch in range(1, state["batch"] + 1):
                next(self._batches)
        self._set_generators(state["own"])

    def _check_generators(self, states: Any) -> None:
        if not isinstance(states, (list, tuple)) or len(states) != len(self._generators):
            raise ValueError(f"place in the data: must have the states of {len(self._generators)} generators of the data")
        for generator, state in zip(self._generators, states, strict=True):
            torch.Generator(generator.device).set_state(state)

    def _set_generators(self, states: Sequence[torch.Tensor]) -> None:
        for generator, state in zip(self._generators, states, strict=True):
            generator.set_state(state)


class _Sums:
    """Sums of loss and metrics over the samples of an epoch, from which `means` computes their means."""

    def __init__(self, metrics: Mapping[str, Metric]) -> None:
        self._metrics = metrics
        self.clear()

    def clear(self) -> None:
        self._totals: dict[str, Any] = dict.fromkeys(("loss", *self._metrics), 0.0)
        self.count = 0

    def state_dict(self) -> dict[str, Any]:
        return {"totals": {name: float(total) for name, total in self._totals.items()}, "count": self.count}

    def check_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError if no `_Sums` of these metrics can have given this state."""
        if set(state) != {"totals", "count"} or not isinstance(state["totals"], dict):
            raise ValueError(
                f"the checkpoint has {sorted(map(str, state))} as sums of the metrics: must be totals and count"
            )
        if set(state["totals"]) != set(self._totals):
            raise ValueError(
                f"the checkpoint has sums of {list(state['totals'])}, eval_metric asks for {list(self._totals)}"
            )
        if not all(type(total) is float for total in state["totals"].values()) or type(state["count"]) is not int:
            raise ValueError(f"the checkpoint has {state!r:.200} as sums of the metrics: must be numbers")
        integer("sums of the metrics: count", state["count"], low=0)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._totals, self.count = dict(state["totals"]), state["count"]

    def add(self, size: int, loss: torch.Tensor, labels: Any, outputs: Any) -> None:
        self.count += size
        self._totals["loss"] += size * loss.detach().double()
        for name, metric in self._metrics.items():
            self._totals[name] += size * metric(labels, outputs)

    def means(self) -> dict[str, float]:
        return {name: float(total) / self.count if self.count else float("nan") for name, total in self._totals.items()}


def _callables(name: str, callbacks: Any) -> list[Callable[..., Any]]:
    callbacks = [callbacks] if callable(callbacks) else list(callbacks)
    for callback in callbacks:
        if not callable(callback):
            raise TypeError(f"{name} must be callable, or a list of callables, got {type(callback).__name__}")
    return callbacks


def _ends(callbacks: Sequence[Callable[[Any], Any]], argument: Any) -> bool:
    """Call all callbacks; return whether one returned True."""
    answers = [callback(argument) for callback in callbacks]
    return any(answer is True for answer in answers)


def _of_epoch(epoch: Mapping[str, float], metrics: Iterable[str]) -> dict[str, float]:
    """Return the numbers that a recorder gets at the end of an epoch."""
    trained = {name: epoch[name] for name in metrics}
    return trained | {f"val_{name}": epoch[f"eval_{name}"] for name in ("loss", *metrics) if f"eval_{name}" in epoch}


def _line(epoch: Mapping[str, float], epochs: int) -> str:
    values = {name: value for name, value in epoch.items() if name not in ("epoch", "seconds")}
    shown = ", ".join(f"{name.replace('_', ' ')} {value:.4g}" for name, value in values.items())
    return f"epoch {epoch['epoch']:.0f}/{epochs}: {shown}; {epoch['seconds']:.1f} s"


@contextmanager
def _interruptible() -> Iterator[threading.Event]:
    """Yield an event that the first Ctrl-C sets, instead of raising; a second one raises KeyboardInterrupt."""
    asked = threading.Event()

    def ask(number: int, frame: Any) -> None:
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()

    with handled(ask):
        yield asked
