"""A whole training step as a CUDA graph: recorded once, then replayed; learning rates, decay and loss scale stay adjustable.

A replay does the host's part of a step (counts, schedule, hyper-parameters), copies changed hyper-parameters to the device,
and launches the graph, whose kernels read them from device memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import _pytree

from ...kernels import Rule, ShapedRule, TensorRule
from ...kernels.backends import choose_engine
from ...kernels.graphs import Recording, for_all_steps
from ...kernels.language import StagedRule
from ..optimizer import RuleOptimizer, Updater
from ..optimizer.multi import parts_of
from ..optimizer.plan import MultiPlan
from ..optimizer.updater import UpdaterPlan
from ..utils.interrupts import interrupts_wait
from ..validation import instance, integer
from .replica import Replica


class CapturedStep:
    """A training function that is recorded as a CUDA graph after some calls; `Trainer.capture` returns it.

    Each call is one training step, the warm-up calls too, of which there are at least 2.

    Attributes:
        is_recorded: whether the graph has been recorded.
    """

    def __init__(self, fn: Callable[..., Any], device: torch.device, warmup: int = 3) -> None:
        instance("fn", fn, Callable, "a function that trains")
        self._fn, self._device = fn, device
        self._warmup, self._calls = integer("warmup", warmup, low=2), 0
        self._graph: Any = None
        self.is_recorded = False
        self._recording = Recording()
        self._inputs: list[Any] = []
        self._form: Any = None
        self._outputs: Any = None

    @property
    def normal_steps(self) -> int:
        """The number of calls that will run normally before the graph is recorded."""
        return 0 if self.is_recorded else max(self._warmup - self._calls, 0)

    def forget(self) -> None:
        """Record the graph anew, after some normal calls."""
        self._graph, self.is_recorded, self._calls = None, False, 0

    def __call__(self, *inputs: Any) -> Any:
        """Take one training step and return the results of the function.

        Returned tensors are detached, and the next call overwrites them: clone those that you keep. Inputs with other shapes
        or dtypes than the recorded ones, such as a last smaller batch, run without the graph.
        """
        if not has_graphs(self._device):
            return self._fn(*inputs)
        with torch.cuda.device(self._device):  # streams and graphs belong to the current device
            return self._step(inputs)

    def _step(self, inputs: tuple[Any, ...]) -> Any:
        leaves, form = _pytree.tree_flatten(inputs)
        leaves = [leaf.to(self._device, non_blocking=True) if _is_tensor(leaf) else leaf for leaf in leaves]
        if self._graph is None or (
            self.is_recorded and not self._is_valid()
        ):  # weights have moved, or states have been loaded
            self._graph, self.is_recorded = _new_graph(), False
            self._calls = max(self._calls - 1, 0)
        if self._calls < self._warmup:
            self._calls += 1
            return self._graph.warm_up(lambda: self._run(leaves, form))
        if not self.is_recorded:
            return self._record(leaves, form)
        if form != self._form or not all(map(_alike, leaves, self._inputs)):
            return self._run(leaves, form)
        with interrupts_wait():
            for _, advance in self._recording.owners:
                advance()
            return self._replay(leaves)

    def _run(self, leaves: list[Any], form: Any) -> Any:
        with _rules_for_all_steps():
            outputs = self._fn(*_pytree.tree_unflatten(leaves, form))
        # Detached, because an autograd graph would keep nodes alive that remember streams.
        return _pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, outputs)

    def _is_valid(self) -> bool:
        recording = self._recording
        plans_are_valid = all(is_valid() for is_valid, _ in recording.owners)
        return plans_are_valid and all(recorded.is_valid() for recorded in recording.updates)

    def _record(self, leaves: list[Any], form: Any) -> Any:
        inputs = [leaf.detach().clone() if _is_tensor(leaf) else leaf for leaf in leaves]
        recording = Recording()
        try:
            with recording.going_on():
                self._outputs = self._graph.record(lambda: self._run(inputs, form))
        except BaseException:
            self._graph = None
            raise
        if not recording.owners:
            raise RuntimeError("the captured function has taken no step: it must call backward() and step(), too")
        updates = [id(recorded.update) for recorded in recording.updates]
        if len(set(updates)) < len(updates):
            raise RuntimeError("the captured function has taken several steps with one optimizer: it must take one")
        self._recording, self._inputs, self._form, self.is_recorded = recording, inputs, form, True
        return self._replay(leaves)  # recording has run the host's part only

    @torch.no_grad()
    def _replay(self, leaves: list[Any]) -> Any:
        for static, leaf in zip(self._inputs, leaves, strict=True):
            if _is_tensor(static):
                static.copy_(leaf, non_blocking=True)
        for recorded in self._recording.updates:
            recorded.upload()
        self._graph.replay()
        return self._outputs


def check_capture(updater: Updater, device: torch.device, telemetry: Any) -> None:
    """Raise ValueError if the optimizer, the engine or the telemetry does not allow `Trainer.capture`."""
    optimizer = updater.optimizer
    for part in parts_of(optimizer):
        rule: Any = part.composed_rule if isinstance(part, RuleOptimizer) else None
        check_rule(part, rule)
        numbers = set(rule.middle[1]) if isinstance(rule, StagedRule) else part.schedules.keys() - {"wd"}
        if isinstance(rule, TensorRule) and (kept := sorted(part.schedules.keys() & numbers)):
            raise ValueError(
                f"capture() with {type(part).__name__} and schedules of {', '.join(kept)}: a graph of whole tensors keeps "
                "these numbers, so that each step would record another: take them out of schedules, or step without a graph"
            )
    check_engine(device, updater.engine)
    if telemetry is not None:
        raise ValueError("capture() of a trainer with telemetry, which writes to other memory at each step: must be None")


def check_engine(device: torch.device, engine: str | None = None) -> None:
    if device.type == "cuda" and choose_engine(device, engine) != "triton":
        raise ValueError("capture() needs engine='triton': operations of other engines contain numbers from the host")


def check_rule(optimizer: Any, rule: Any) -> None:
    """Raise ValueError if a graph cannot record an optimizer's rule, which is torch operations."""
    if not isinstance(rule, (Rule, ShapedRule, StagedRule)):
        raise ValueError(
            f"capture() with {type(optimizer).__name__}: its step is torch operations with numbers from the host, which "
            "a graph would never update; use an optimizer with an elementwise rule, or Muon or NorMuon without options that "
            "change the rule, such as ema_decay"
        )


def record_step(recording: Recording, replica: Replica, rescale_grad: float) -> None:
    """Add to `recording` the host's part of the step just taken, with gradients multiplied by `rescale_grad`."""
    whole = replica.plan
    plans: list[Any] = [plan for plan, *_ in whole.parts] if isinstance(whole, MultiPlan) else [whole]
    plans.sort(key=lambda plan: not plan.optimizer.reads_rate_first)  # before other plans move the count
    for plan in plans:
        recording.owners.append(_owner(replica, plan, rescale_grad))


def _owner(replica: Replica, plan: UpdaterPlan, rescale_grad: float) -> tuple[Callable[[], bool], Callable[[], None]]:
    """Return two functions: whether one optimizer's recorded step is still valid, and the host's part of a replay."""
    optimizer, whole, update, active = replica.updater.optimizer, replica.plan, plan.update, list(plan.rows.active)

    def is_valid() -> bool:
        if replica.plan is not whole or not plan.is_current(update) or update.rule is not plan.optimizer.composed_rule:
            return False
        plan.look_ahead(update, active)
        return True

    def advance() -> None:
        optimizer.rescale_grad = rescale_grad
        plan.host_step(update, active)

    return is_valid, advance


@contextmanager
def _rules_for_all_steps() -> Iterator[None]:
    """Use the kernels of a graph in warm-up steps, too, so that they have been compiled before recording."""
    before = for_all_steps.set(True)
    try:
        yield
    finally:
        for_all_steps.reset(before)


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor)


def _alike(leaf: Any, recorded: Any) -> bool:
    if _is_tensor(leaf) and _is_tensor(recorded):
        return leaf.shape == recorded.shape and leaf.dtype == recorded.dtype
    return type(leaf) is type(recorded) and leaf == recorded


def has_graphs(device: torch.device) -> bool:
    """Return whether work on this device can be recorded; elsewhere a captured function is simply called."""
    return device.type == "cuda"


class _CudaGraph:
    """A `torch.cuda.CUDAGraph` with its stream."""

    def __init__(self) -> None:
        self._graph, self._stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()

    def warm_up(self, run: Callable[[], Any]) -> Any:
        """Run on the recording's stream, because autograd remembers the stream on which gradients are accumulated."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            outputs = run()
        torch.cuda.current_stream().wait_stream(self._stream)
        return outputs

    def record(self, run: Callable[[], Any]) -> Any:
        # "thread_local": other threads, such as those that pin batches in memory, may call CUDA while this one records.
        with torch.cuda.graph(self._graph, stream=self._stream, capture_error_mode="thread_local"):
            return run()

    def replay(self) -> None:
        self._graph.replay()


_new_graph: Callable[[], Any] = _CudaGraph
