"""CheckpointManager: saves a training now and then, in the background, and when a signal asks it to end."""

from __future__ import annotations

import json
import os
import sys
import traceback
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..interrupts import StopSignals, checked_signals, uninterrupted
from ..validation import boolean, choice, integer, number
from .content import Ranks, Training, resume
from .files import check_writable
from .folder import (
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
from .nesting import pack, unpack

if TYPE_CHECKING:
    from typing_extensions import Self

    from ..trainer import Trainer


class CheckpointManager:
    """Saves checkpoints of a training into a folder, from which `Trainer.resume` continues it bit for bit.

    A checkpoint has the model's weights and buffers, the trainer's states, settings, schedule and counts, the random
    generators of torch (on all devices), NumPy and Python, metrics and metadata. It is a folder of safetensors files,
    `step-0000000100`, say, which is complete as soon as it has this name; nothing is pickled. Names are those of Orbax where
    it has them.

    The training thread only copies tensors: from a GPU into pinned memory, without waiting for the device. Another thread
    writes. One checkpoint is written at a time: a `save` that comes earlier waits for the one before. What goes wrong in
    writing is raised by the next `save`, `wait` or `close`; if there is none, it is printed at the end of the program.

    One training saves into a folder: from its first `step` or `save` to `close`, or to its end, no other process can. It
    warns of checkpoints of later steps, which would be resumed instead of its own. Only what is certainly a checkpoint is
    removed.

    As a context it notes signals, and at its end waits for what is being written. After a signal has come, the next `step`
    saves, waits until that is on the disk, and lets the signal act as it would have without the manager: SIGTERM ends the
    process. Signals reach the main thread only, so it must be entered there.

    Of several synchronous processes ("dist_sync", or DistributedDataParallel) all make the same calls; rank 0 writes, to a
    folder that all ranks can read. A signal that reaches one of them acts on all; to find out, they exchange a number at
    each `step`, unless `signals` is empty.

    Args:
        folder: where to; made if it is not there.
        trainer: what to save.
        net: the model, for its buffers, such as running means, and parameters that are not trained; or the list of the
            trainer's replicas of it. None: the trainer's parameters are the only weights.
        save_interval_steps: `step` saves after each so many updates; None: only `save` does.
        max_to_keep: how many of the newest stay, >= 1; None keeps all.
        best: the name of a metric; the best checkpoint by it stays, too.
        mode: "min" or "max", what is best.
        asynchronous: whether another thread writes; if not, `save` returns when it is written.
        stateful: what else training depends on, objects with `state_dict`, of plain data and tensors, and `load_state_dict`.
        signals: names of those that save and end, such as "SIGTERM", and "SIGUSR1" of Slurm.

    Attributes:
        folder, trainer, net, stateful: as above.
        metric: `best` above.
        saved_step: after how many updates it saved, or resumed, the last checkpoint; None: there is none.

    Raises:
        TypeError, ValueError: an argument that does not fit.

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
        signals: Sequence[str] = ("SIGTERM",),
    ) -> None:
        from ..trainer import Trainer

        if not isinstance(trainer, Trainer):
            raise TypeError(f"trainer must be a Trainer, got {type(trainer).__name__}")
        if best is not None and not isinstance(best, str):
            raise TypeError(f"best={best!r}: must be the name of a metric, or None")
        for i, each in enumerate(stateful):
            if not (callable(getattr(each, "state_dict", None)) and callable(getattr(each, "load_state_dict", None))):
                raise TypeError(f"stateful[{i}] is a {type(each).__name__}: it needs state_dict and load_state_dict")
        self.folder, self.trainer, self.net, self.stateful = Path(folder), trainer, net, list(stateful)
        self._interval = None if save_interval_steps is None else integer("save_interval_steps", save_interval_steps, low=1)
        self._keep = None if max_to_keep is None else integer("max_to_keep", max_to_keep, low=1)
        self.metric, self._mode = best, choice("mode", mode, ("min", "max"))
        self._asynchronous = boolean("asynchronous", asynchronous)
        self._signals = StopSignals(checked_signals(signals))
        for name, same in Training(trainer, net).tensors.items():
            check_writable(f"net's {name!r}", same[0])
        self._claim: Claim | None = None
        self._seen = trainer.optimizer.num_update
        self.saved_step: int | None = None
        self._writing: list[futures.Future[None]] = []  # the last one, until somebody has asked for its outcome
        weakref.finalize(self, _abandon, self._writing)  # also at the end of the interpreter, which waits for the thread

    def step(self, metrics: Mapping[str, Any] | None = None, metadata: Any = None) -> bool:
        """To be called after each training step: save if it is time, or if a signal has come.

        Args:
            metrics, metadata: as for `save`.

        Returns:
            Whether it has saved. After a signal it returns only if that did not end the process.
        """
        step, before = self.trainer.optimizer.num_update, self._seen
        self._seen = step
        ranks = Ranks(self.trainer)
        if self._claim is None and ranks.rank == 0:
            self._take_folder()
        signal = ranks.largest(self._signals.arrived) if self._signals.numbers else self._signals.arrived
        if signal:
            self.save(metrics, metadata)
            self.wait()
            ranks.wait()  # none may end before it is on the disk
            self._signals.deliver(signal)
            return True
        if self._interval is None or step // self._interval <= before // self._interval:
            return False
        self.save(metrics, metadata)
        return True

    def save(self, metrics: Mapping[str, Any] | None = None, metadata: Any = None) -> None:
        """Save a checkpoint of this moment. Another one of the same step is replaced.

        Args:
            metrics: numbers by name, or tensors of one element, for which the training thread does not wait either.
            metadata: anything that JSON has.

        Raises:
            TypeError, ValueError: metrics or metadata of other types, or metrics without the one that decides which is best;
                or something in `stateful` that cannot be saved.
            OSError: writing the one before has failed, or, if it is not asynchronous, this one.
            RuntimeError: between `ascend` and `step` of the trainer; or another process, or another trainer of this one,
                saves into this folder.
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
            found = unpack(packed, copies)
            numbers = {name: float(value) for name, value in found["metrics"].items()}
            about = Checkpoint(step, numbers, metadata)
            with writing:
                new = write_checkpoint(self.folder, Content(about, found["model"], found["states"], found["ranks"]))
                prune(self.folder, self._keep, None if self.metric is None else (self.metric, self._mode), new.path)

        self.saved_step = step
        thread = futures.ThreadPoolExecutor(1, "tristep checkpoint")  # the interpreter waits for it before it ends
        self._writing.append(thread.submit(write))
        thread.shutdown(wait=False)
        if not self._asynchronous:
            self.wait()

    def _take_folder(self) -> Claim:
        """Be the only training that saves here. Warns, once, of checkpoints that would be resumed instead of its own."""
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
        """Wait until what is being written is on the disk.

        Raises:
            OSError: writing has failed.
        """
        while self._writing:
            futures.wait(self._writing)
            self._writing.pop().result()

    @uninterrupted
    def resume(self) -> Checkpoint:
        """As `Trainer.resume`, from this folder, with the model and what else there is."""
        self.wait()
        found = resume(self.trainer, self.folder, self.net, self.stateful)
        self._seen = self.trainer.optimizer.num_update
        self.saved_step = None if found.path is None else found.step
        return found

    def all_checkpoints(self) -> list[Checkpoint]:
        """The checkpoints in the folder, from the oldest to the newest, without damaged ones; waits for the last."""
        self.wait()
        return checkpoints(self.folder)

    def latest(self) -> Checkpoint | None:
        """The newest checkpoint; None: there is none."""
        return next(reversed(self.all_checkpoints()), None)

    def best(self) -> Checkpoint | None:
        """The best checkpoint by the metric; None: there is none that has it.

        Raises:
            ValueError: no metric was named when the manager was made.
        """
        if self.metric is None:
            raise ValueError("no metric says which checkpoint is the best: make the manager with best='loss', say")
        return best_of(self.all_checkpoints(), self.metric, self._mode)

    def close(self) -> None:
        """Wait until what is being written is on the disk, and leave signals and the folder alone.

        Also at the end of a `with` block. A signal that has come, also while it waits, then acts as without the manager.
        """
        try:
            self.wait()
        finally:
            if self._signals.entered <= 1:
                disclaim(self.folder, self.trainer)
                self._claim = None
            self._signals.restore()

    def __enter__(self) -> Self:
        self._signals.install()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        signal = self._signals.arrived if self._signals.entered == 1 else 0
        try:
            if signal and kind is None and Ranks(self.trainer).alone:  # others may not know of it
                if self.saved_step != self.trainer.optimizer.num_update:
                    self.save()
        finally:
            self.close()

    def __repr__(self) -> str:
        interval = "" if self._interval is None else f", save_interval_steps={self._interval}"
        return f"CheckpointManager({str(self.folder)!r}, {type(self.trainer).__name__}{interval}, max_to_keep={self._keep})"


def _host_copies(tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], Callable[[], None]]:
    """Copies of tensors in the host's memory, and what to call, in any thread, before they are read.

    From a GPU they are copied into pinned memory on the current stream: the host waits for nothing, and what the stream does
    next, which may overwrite the tensors, comes after.
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
    """Nobody will ask any more: print what goes wrong."""
    for outcome in writing:
        outcome.add_done_callback(_print_error)


def _print_error(outcome: futures.Future[None]) -> None:
    if (error := outcome.exception()) is not None:
        print("The last checkpoint of a CheckpointManager has not been written:", file=sys.stderr)
        traceback.print_exception(error)


def _checked(metrics: Mapping[str, Any] | None, needed: str | None) -> dict[str, Any]:
    if metrics is not None and not isinstance(metrics, Mapping):
        raise TypeError(f"metrics must be numbers by name, got {type(metrics).__name__}")
    found: dict[str, Any] = {}
    for name, value in (metrics or {}).items():
        if isinstance(value, torch.Tensor):
            if value.numel() != 1:
                raise ValueError(f"metrics[{name!r}] has shape {tuple(value.shape)}: must be one number")
            found[str(name)] = value.detach().reshape(())
        else:
            is_float = isinstance(value, (float, np.floating))  # which may be infinite, or no number
            found[str(name)] = float(value) if is_float else number(f"metrics[{name!r}]", value)
    if metrics is not None and needed is not None and needed not in found:
        raise ValueError(f"metrics lack {needed!r}, which decides which checkpoint is the best: {sorted(found)}")
    return found
