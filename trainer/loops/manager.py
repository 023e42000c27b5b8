"""CheckpointManager: save checkpoints of a training in the background, and when a signal asks the process to end."""

from __future__ import annotations

import json
import os
import sys
import traceback
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..checkpoint.content import Ranks, Training, resume
from ..checkpoint.folder import (
    Checkpoint,
    Claim,
    Content,
    best_of,
    checkpoints,
    claim,
    disclaim,
    list_checkpoints,
    prune,
    step_of,
    write_checkpoint,
)
from ..serialization.files import check_writable
from ..serialization.nesting import pack, unpack
from ..utils.interrupts import StopSignal, uninterrupted
from ..validation import absolute_path, boolean, choice, instance, integer, number

if TYPE_CHECKING:
    from typing_extensions import Self

    from ..trainer import Trainer


class CheckpointManager:
    """Saves checkpoints of a training into a folder, from which `Trainer.resume` continues it bit for bit.

    A checkpoint has the model's weights and buffers; the trainer's states, settings, schedule and counts; the random
    generators of torch on all devices, of NumPy and of Python; metrics and metadata. It is a folder of safetensors files,
    such as `step-0000000100`, and is complete as soon as it has this name. Nothing is pickled. Methods have Orbax's names.

    The training thread only copies tensors, from a GPU into pinned memory without waiting for the device; another thread
    writes. One checkpoint is written at a time: `save` waits for the checkpoint before. An error in writing is raised by the
    next `save`, `wait` or `close`; if nothing is called any more, it is printed at the end of the program.

    One training saves into a folder: from its first `step` or `save` until `close` or the end of the process, other
    processes cannot. The manager warns if the folder has checkpoints of later steps, because `resume` would prefer them. It
    removes only folders that certainly are checkpoints.

    Used as a context manager, it also handles SIGTERM, which asks a process to end. After it has arrived, the next `step`
    saves, waits until the checkpoint is on the disk, and then lets the signal act as it would have without the manager. Only
    the main thread receives signals, so enter the context there. `fit` and `LiveLoop` enter it, and the end of the first
    context is the end of it.

    With several synchronous processes (kvstore="dist_sync", or DistributedDataParallel), all ranks make the same calls, and
    rank 0 writes to a folder that all ranks can read. SIGTERM to one rank acts on all: unless `sigterm` is False, the ranks
    exchange a number at each `step`.

    Args:
        folder: the folder of the checkpoints; made if it does not exist. A relative path is made absolute here, so that a
            later `os.chdir` does not change it.
        trainer: the trainer to save.
        net: the model, or the list of the trainer's replicas of it: its buffers, such as running means, and its parameters
            that are not trained are saved, too. None: only the trainer's parameters are.
        save_interval_steps: number of updates between two checkpoints that `step` saves, >= 1; None: only `save` saves.
        max_to_keep: how many of the newest checkpoints stay, >= 1; None: all.
        best: name of a metric: the checkpoint with its best value stays, too. None: no metric counts.
        mode: "min" if the smallest value of `best` is the best, "max" if the largest is.
        asynchronous: whether another thread writes. If not, `save` returns when the checkpoint is on the disk.
        stateful: other objects to save, with `state_dict`, which returns plain data and tensors, and `load_state_dict`.
        sigterm: whether `step` saves after SIGTERM.

    Attributes:
        folder: the argument, as an absolute path.
        trainer, net, stateful: the arguments.
        metric: the argument `best`.
        saved_step: number of updates at the last checkpoint that was saved or resumed; None: there was none.

    Raises:
        TypeError, ValueError: an argument is of another type or not allowed.

    Example:
        >>> import tempfile, torch, tristep
        >>> net = torch.nn.Linear(2, 1)
        >>> trainer = tristep.Trainer(net, "adam")
        >>> folder = tempfile.mkdtemp()
        >>> with tristep.CheckpointManager(folder, trainer, net, save_interval_steps=2) as checkpoints:
        ...     for step in range(trainer.resume(folder, net).step, 5):
        ...         trainer.zero_grad()
        ...         loss = net(torch.ones(4, 2)).square().mean()
        ...         loss.backward()
        ...         trainer.step(1)
        ...         saved = checkpoints.step({"loss": loss})
        >>> [each.step for each in checkpoints.all_checkpoints()]
        [2, 4]
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        trainer: Trainer,
        net: torch.nn.Module | Sequence[torch.nn.Module] | None = None,
        *,
        save_interval_steps: int | None = None,
        max_to_keep: int | None = 3,
        best: str | None = None,
        mode: str = "min",
        asynchronous: bool = True,
        stateful: Sequence[Any] = (),
        sigterm: bool = True,
    ) -> None:
        from ..trainer import Trainer

        instance("trainer", trainer, Trainer, "a Trainer")
        instance("best", best, (str, type(None)), "the name of a metric, or None", shown=True)
        for i, each in enumerate(stateful):
            if not (callable(getattr(each, "state_dict", None)) and callable(getattr(each, "load_state_dict", None))):
                raise TypeError(f"stateful[{i}] is a {type(each).__name__}: it needs state_dict and load_state_dict")
        self.folder, self.trainer, self.net, self.stateful = absolute_path("folder", folder), trainer, net, list(stateful)
        self._interval = None if save_interval_steps is None else integer("save_interval_steps", save_interval_steps, low=1)
        self._keep = None if max_to_keep is None else integer("max_to_keep", max_to_keep, low=1)
        self.metric, self._mode = best, choice("mode", mode, ("min", "max"))
        self._asynchronous = boolean("asynchronous", asynchronous)
        self._stop = StopSignal() if boolean("sigterm", sigterm) else None
        for name, same in Training(trainer, net).tensors.items():
            check_writable(f"net's {name!r}", same[0])
        self._claim: Claim | None = None
        self._seen = trainer.optimizer.num_update
        self.saved_step: int | None = None
        self._writing: list[futures.Future[None]] = []  # the last save, until `wait` has read its outcome
        weakref.finalize(self, _abandon, self._writing)  # also called at exit, where the interpreter waits for the thread

    def step(self, metrics: Mapping[str, Any] | None = None, metadata: Any = None) -> bool:
        """Save if the interval is over or SIGTERM has arrived. Call it after each training step.

        Args:
            metrics: numbers, or tensors of one element, by name.
            metadata: any data that JSON can represent.

        Returns:
            Whether it has saved. After SIGTERM it returns only if the signal did not end the process.
        """
        step, before = self.trainer.optimizer.num_update, self._seen
        self._seen = step
        ranks = Ranks(self.trainer)
        if self._claim is None and ranks.rank == 0:
            self._take_folder()
        if self._stop is not None and ranks.largest(int(self._stop.arrived)):
            self.save(metrics, metadata)
            self.wait()
            ranks.wait()  # no process ends before the checkpoint is on the disk
            self._stop.deliver()
            return True
        if self._interval is None or step // self._interval <= before // self._interval:
            return False
        self.save(metrics, metadata)
        return True

    def save(self, metrics: Mapping[str, Any] | None = None, metadata: Any = None) -> None:
        """Save a checkpoint now. A checkpoint of the same step is replaced.

        Args:
            metrics: numbers, or tensors of one element, by name; the training thread does not wait for tensors on a GPU.
            metadata: any data that JSON can represent.

        Raises:
            TypeError, ValueError: metrics or metadata have other types, the metric `best` is missing, or an object in
                `stateful` returned something that cannot be saved.
            OSError: writing the checkpoint before has failed, or this one, if the manager is not asynchronous.
            RuntimeError: another process, or another trainer of this process, saves into this folder.
        """
        step = self.trainer.optimizer.num_update
        values = _checked(metrics, self.metric)
        try:
            metadata = json.loads(json.dumps(metadata))
        except (TypeError, ValueError) as error:
            raise TypeError(f"metadata={metadata!r:.200}: must be data that JSON has ({error})") from None
        self.wait()
        states = self.trainer.state_dict()
        ranks, training = Ranks(self.trainer), Training(self.trainer, self.net, self.stateful)
        of_ranks = ranks.gather(training.collect())
        if ranks.rank:
            self.saved_step = step
            return
        writing = self._take_folder().writing
        tensors: dict[str, torch.Tensor] = {}
        model = {name: same[0] for name, same in training.tensors.items()}
        packed = pack({"model": model, "states": states, "ranks": of_ranks, "metrics": values}, tensors, "checkpoint")
        copies, wait = _host_copies(tensors)

        def write() -> None:
            wait()
            saved = unpack(packed, copies)
            numbers = {name: float(value) for name, value in saved["metrics"].items()}
            about = Checkpoint(step, numbers, metadata)
            with writing:
                new = write_checkpoint(self.folder, Content(about, saved["model"], saved["states"], saved["ranks"]))
                prune(self.folder, self._keep, None if self.metric is None else (self.metric, self._mode), new.path)

        self.saved_step = step
        thread = futures.ThreadPoolExecutor(1, "tristep checkpoint")  # at exit the interpreter waits for this thread
        self._writing.append(thread.submit(write))
        thread.shutdown(wait=False)
        if not self._asynchronous:
            self.wait()

    def _take_folder(self) -> Claim:
        """Take the lock of the folder. The first time, warn of checkpoints that `resume` would prefer to new ones."""
        before, self._claim = self._claim, claim(self.folder, self.trainer, self._claim)
        if self._claim is before:
            return before
        step = self.trainer.optimizer.num_update
        later = [path.name for path in list_checkpoints(self.folder) if (step_of(path) or 0) > step]
        if later:
            warnings.warn(
                f"folder={str(self.folder)!r} has {later[-1]}, of a later step than this training, which is at {step}: "
                "resume would go on from that one. Resume from it, remove it, or use another folder",
                stacklevel=3,
            )
        return self._claim

    def wait(self) -> None:
        """Wait until the last checkpoint is on the disk.

        Raises:
            OSError: writing has failed.
        """
        while self._writing:
            futures.wait(self._writing)
            self._writing.pop().result()

    @uninterrupted
    def resume(self, *, strict: bool = True, settings: str = "file") -> Checkpoint:
        """Continue from the newest checkpoint of the folder: load the trainer, the model and the objects in `stateful`.

        Args:
            strict, settings: as in `Trainer.resume`; `strict=False` loads what fits.

        Returns:
            The checkpoint, as `Trainer.resume` does; its step is 0 if the folder has none.

        Raises:
            ValueError: the checkpoint does not fit, or none can be read. Nothing has been changed.
        """
        self.wait()
        checkpoint = resume(self.trainer, self.folder, self.net, self.stateful, strict, settings)
        self._seen = self.trainer.optimizer.num_update
        self.saved_step = None if checkpoint.path is None else checkpoint.step
        return checkpoint

    def all_checkpoints(self) -> list[Checkpoint]:
        """Wait for the last checkpoint, and return all that are not damaged, from the oldest to the newest."""
        self.wait()
        return checkpoints(self.folder)

    def latest(self) -> Checkpoint | None:
        """Return the newest checkpoint; None if there is none."""
        return next(reversed(self.all_checkpoints()), None)

    def best(self) -> Checkpoint | None:
        """Return the checkpoint with the best value of the metric; None if no checkpoint has the metric.

        Raises:
            ValueError: the manager was made without `best`.
        """
        if self.metric is None:
            raise ValueError("no metric says which checkpoint is the best: make the manager with best='loss', say")
        return best_of(self.all_checkpoints(), self.metric, self._mode)

    def close(self) -> None:
        """Wait until the last checkpoint is on the disk, then handle SIGTERM no more and release the folder.

        The end of a `with` block calls it. A SIGTERM that has arrived, also during the wait, acts then.
        """
        try:
            self.wait()
        finally:
            disclaim(self.folder, self.trainer)
            self._claim = None
            if self._stop is not None:
                self._stop.restore()

    def __enter__(self) -> Self:
        if self._stop is not None:
            self._stop.install()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        arrived = self._stop is not None and self._stop.arrived
        try:
            if arrived and kind is None and Ranks(self.trainer).alone:  # other processes may not have the signal
                if self.saved_step != self.trainer.optimizer.num_update:
                    self.save()
        finally:
            self.close()

    def __repr__(self) -> str:
        interval = "" if self._interval is None else f", save_interval_steps={self._interval}"
        return f"CheckpointManager({str(self.folder)!r}, {type(self.trainer).__name__}{interval}, max_to_keep={self._keep})"


def _host_copies(tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], Callable[[], None]]:
    """Return copies of tensors in the host's memory, and a function to call, in any thread, before they are read.

    Tensors on a GPU are copied into pinned memory on the current stream: the host does not wait, and whatever overwrites the
    tensors on that stream comes later.
    """
    copies: dict[str, torch.Tensor] = {}
    devices: set[torch.device] = set()
    for name, tensor in tensors.items():
        tensor = tensor.detach()
        if tensor.device.type == "cuda":
            copies[name] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            copies[name].copy_(tensor, non_blocking=True)
            devices.add(tensor.device)
        else:
            copies[name] = tensor.to("cpu", copy=True)
    events = [torch.cuda.current_stream(device).record_event() for device in devices]

    def wait() -> None:
        for event in events:
            event.synchronize()

    return copies, wait


def _abandon(writing: list[futures.Future[None]]) -> None:
    """Print errors of the writing thread, because nobody will call the manager any more."""
    for outcome in writing:
        outcome.add_done_callback(_print_error)


def _print_error(outcome: futures.Future[None]) -> None:
    if (error := outcome.exception()) is not None:
        print("The last checkpoint of a CheckpointManager has not been written:", file=sys.stderr)
        traceback.print_exception(error)


def _checked(metrics: Mapping[str, Any] | None, needed: str | None) -> dict[str, Any]:
    instance(
        "metrics",
        metrics,
        (Mapping, type(None)),
        "numbers by name, such as {'loss': 0.5}; the step is the trainer's own",
        shown=True,
    )
    values: dict[str, Any] = {}
    for name, value in (metrics or {}).items():
        if isinstance(value, torch.Tensor):
            if value.numel() != 1:
                raise ValueError(f"metrics[{name!r}] has shape {tuple(value.shape)}: must be one number")
            values[str(name)] = value.detach().reshape(())
        else:
            is_float = isinstance(value, (float, np.floating))  # may be infinite or NaN
            values[str(name)] = float(value) if is_float else number(f"metrics[{name!r}]", value)
    if metrics is not None and needed is not None and needed not in values:
        raise ValueError(f"metrics lack {needed!r}, which decides which checkpoint is the best: {sorted(values)}")
    return values
