"""BatchStep: one training step on a batch, for `fit`, live loops and rate finders; on a GPU also as a CUDA graph."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from ..step.capture import CapturedStep, has_graphs
from ..trainer import Trainer
from ..utils.random_state import random_state, set_random_state

WARMUP = 3  # steps before a graph is recorded
MOST_CHANGES = 8  # of a model between steps without a recorded step between them, after which it is no longer captured


class BatchStep:
    """One training step on a batch: forward pass, loss, backward pass and update.

    A graph repeats what was recorded, so a step is captured only if nothing shows that a graph would do something else: in
    the step before the recording the model and the loss read no value from the GPU, drew no random numbers on the CPU, and
    changed no number, string or switch that is an attribute of a module. Such an attribute that is changed between steps,
    as by `net.eval()`, leads to another recording. Numbers that a loss computes elsewhere cannot be seen.

    Args:
        loss: a function of (outputs, labels) that returns one loss for each sample, or their mean.
        capture: True records steps as a CUDA graph on a GPU, and raises an error where that cannot be; "auto" takes normal
            steps there; False never records.
    """

    def __init__(
        self,
        source: Trainer | torch.optim.Optimizer,
        net: torch.nn.Module,
        loss: Callable[[Any, Any], torch.Tensor],
        capture: bool | str = False,
    ) -> None:
        self._source, self._net, self._loss, self._asked = source, net, loss, capture
        # `why`: why steps are not captured, in words; "" unless that was asked for and cannot be.
        self.why, self._changes, self._plain = "", 0, _plain(net)
        self._captured: CapturedStep | None = self._new() if capture else None

    def __call__(self, batch: Any) -> tuple[int, torch.Tensor, Any, Any]:
        """Take a step; return the size of the batch, the mean loss, the labels and the outputs.

        If `capture` is True and the step cannot be captured, raise RuntimeError; it has been taken.
        """
        device = device_of(self._net)
        inputs, labels = unpack_batch("data", batch, device)
        if self._captured is None or not has_graphs(device):
            mean, outputs = self._take(inputs, labels)
        else:
            mean, outputs = self._by_graph(self._captured, device, inputs, labels)
            mean, self._plain = mean.clone(), _plain(self._net)  # the next step overwrites the mean
        return len(inputs[0]), mean, labels, outputs

    def _new(self) -> CapturedStep | None:
        try:
            if not hasattr(self._source, "capture"):
                raise ValueError(f"{type(self._source).__name__} of torch: take one of tristep.optim, or a Trainer")
            captured: CapturedStep = self._source.capture(self._take, warmup=WARMUP)
            return captured
        except (TypeError, ValueError, RuntimeError) as error:
            if self._asked is True:
                raise
            self.why = str(error)
            return None

    def _take(self, inputs: tuple[Any, ...], labels: Any) -> tuple[torch.Tensor, Any]:
        outputs = self._net(*inputs)
        size = len(inputs[0])
        mean = step_on(self._source, checked_loss(self._loss(outputs, labels), size), size)
        return mean, outputs.detach() if isinstance(outputs, torch.Tensor) else outputs

    def _by_graph(self, captured: CapturedStep, device: torch.device, inputs: Any, labels: Any) -> Any:
        if _plain(self._net) != self._plain:
            self._changes = 0 if captured.is_recorded else self._changes + 1
            captured.forget()
        if self._changes == MOST_CHANGES:
            result = self._take(inputs, labels)
            self._give_up("attributes of its modules change between steps")
            return result
        if captured.normal_steps == 1:  # the last before the recording
            with _watched(self._net, device) as found:
                result = captured(inputs, labels)
            if found:
                self._give_up(found[0])
            return result
        if captured.is_recorded or captured.normal_steps:
            return captured(inputs, labels)
        numbers, counted = random_state(), _count(self._source)
        try:
            return captured(inputs, labels)
        except Exception as error:  # any kind: whatever the model does that a stream that is recorded cannot
            if _count(self._source) != counted:
                raise
            set_random_state(numbers)
            result = self._take(inputs, labels)
            self._give_up(f"recording it raised {type(error).__name__}: {error}")
            return result

    def _give_up(self, why: str) -> None:
        self._captured, self.why = None, why
        if self._asked is True:
            raise RuntimeError(f"capture=True: this training cannot be a CUDA graph: {why}; capture='auto' goes on without")


def checked_loss(value: Any, size: int) -> torch.Tensor:
    """Return what a loss function has given for a batch of `size`; raise unless it is a loss for each sample, or a mean."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(
            f"loss gave {value!r:.80} ({type(value).__name__}): it must give a tensor, one number for each sample, or their "
            "mean"
        )
    if value.shape not in (torch.Size(), torch.Size([size])):
        raise ValueError(
            f"loss gave shape {tuple(value.shape)} for a batch of {size}: it must give one number for each sample, "
            f"shape ({size},), or their mean, shape ()"
        )
    return value


def step_on(source: Trainer | torch.optim.Optimizer, loss: torch.Tensor, size: int) -> torch.Tensor:
    """Take a step and return the mean loss; `loss` has one loss for each of `size` samples, or is their mean."""
    source.zero_grad()
    if isinstance(source, Trainer):
        loss.sum().backward()
        source.step(size if loss.dim() else 1)
    else:
        loss.mean().backward()
        source.step()
    return loss.detach().mean()


def device_of(net: torch.nn.Module) -> torch.device:
    """Return the device of a model's first parameter; the CPU if it has none."""
    return next((parameter.device for parameter in net.parameters()), torch.device("cpu"))


def unpack_batch(name: str, batch: Any, device: torch.device) -> tuple[tuple[Any, ...], Any]:
    """Return the inputs of a batch, as a tuple, and its labels, moved to a device; `name`: the argument of the data."""
    if not (isinstance(batch, (tuple, list)) and len(batch) == 2):
        raise TypeError(f"{name} must give pairs (inputs, labels), got {type(batch).__name__}")
    inputs, labels = batch
    inputs = tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)
    return tuple(_moved(value, device) for value in inputs), _moved(labels, device)


def _moved(value: Any, device: torch.device) -> Any:
    return value.to(device, non_blocking=True) if isinstance(value, torch.Tensor) else value


def check_captures(capture: Any) -> None:
    if not (isinstance(capture, bool) or capture == "auto"):
        raise ValueError(f"capture={capture!r}: must be True, False or 'auto'")


def _count(source: Trainer | torch.optim.Optimizer) -> int:
    return source.optimizer.num_update if isinstance(source, Trainer) else 0


def _plain(net: torch.nn.Module) -> list[tuple[Any, ...]]:
    """Return the attributes of all modules that are numbers, strings or switches, which Python code may depend on."""
    kinds = (bool, int, float, str)
    return [tuple(pair for pair in vars(module).items() if type(pair[1]) in kinds) for module in net.modules()]


def _drawn() -> list[Any]:
    numpy: Any = np.random.get_state()  # noqa: NPY002
    return [random.getstate(), numpy[1].tobytes(), numpy[2], torch.get_rng_state().numpy().tobytes()]


@contextmanager
def _watched(net: torch.nn.Module, device: torch.device) -> Iterator[list[str]]:
    """Yield a list; afterwards it says what has been done in this context that a graph would not repeat."""
    found: list[str] = []
    plain, drawn, on_gpu = _plain(net), _drawn(), device.type == "cuda"
    mode = torch.cuda.get_sync_debug_mode() if on_gpu else 0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            if on_gpu:
                torch.cuda.set_sync_debug_mode("warn")
            yield found
        finally:
            if on_gpu:
                torch.cuda.set_sync_debug_mode(mode)
    for each in caught:
        if "synchroniz" in str(each.message) and on_gpu:
            found.append(f"it reads a value from the GPU ({each.filename.rpartition('/')[2]}, line {each.lineno})")
        else:
            warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)
    if _drawn() != drawn:
        found.append("it draws random numbers on the CPU")
    for module, before in zip(net.modules(), plain, strict=False):
        for name, value in dict(before).items():
            if vars(module).get(name) != value:
                found.append(f"the attribute {name!r} of a {type(module).__name__} changes in a step")
