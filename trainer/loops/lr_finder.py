"""lr_find: a learning-rate range test for any training loop, which restores all state afterwards."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..optimizer.multi import parts_of
from ..trainer import Trainer
from ..validation import instance, integer, number
from .batch_step import checked_loss, device_of, step_on, unpack_batch
from .fitting import check_batches
from .snapshot import Snapshot

SUGGESTERS = ("valley", "slide", "minimum", "steep")
ENOUGH = 40  # the number of losses from which a fall can be told from noise
NOISE = 6.5  # in 49 of 50 tests without a fall, noise alone spans less than so many standard deviations of the averages


@dataclass(frozen=True)
class LRFinder:
    """The result of `lr_find`: the losses over the learning rate, and the suggested rates.

    Attributes:
        name: the name of the tested optimizer, for legends.
        rates: the learning rate of each step, float64 [n].
        losses: the loss of each step, before its update, float64 [n].
        smoothed: the losses averaged over neighbouring steps, float64 [n].
        diverged: whether the test ended early because the loss became far too large, or not finite.
        suggestions: learning rates by the names of the rules that suggest them; a rule that finds none is missing.
        flat: whether the loss falls by less than 0.5 %, or by no more than it differs from batch to batch, as with a net
            that is trained already. Then nothing is suggested, because each rule would pick a rate at random.
    """

    name: str
    rates: np.ndarray
    losses: np.ndarray
    smoothed: np.ndarray
    diverged: bool
    suggestions: dict[str, float]
    flat: bool = False

    @property
    def value(self) -> float:
        """The learning rate to begin with, by the first of "valley", "slide", "minimum" and "steep" that suggests one.

        Raises:
            ValueError: no rule suggests a rate, because the loss never fell, or the curve is flat.
        """
        for rule in SUGGESTERS:
            if rule in self.suggestions:
                return self.suggestions[rule]
        raise ValueError(self.nothing)

    @property
    def nothing(self) -> str:
        """A sentence why no rate is suggested; "" if one is."""
        if self.suggestions:
            return ""
        why = (
            "the curve is flat: the loss fell by less than 0.5 %, or than batches differ,"
            if self.flat
            else "the loss never fell"
        )
        tried = f"from {self.rates[0]:.2g} to {self.rates[-1]:.2g}"
        unless = ", unless the net is trained already" * self.flat
        return f"no rate to suggest: {why} {tried}; try other rates, larger batches or more of them (n){unless}"

    def __repr__(self) -> str:
        suggested = ", ".join(f"{rule} {rate:.2g}" for rule, rate in self.suggestions.items()) or "no suggestion"
        suggested += ", the curve is flat" * self.flat
        return f"LRFinder({self.name!r}, {len(self.rates)} rates up to {self.rates[-1]:.2g}: {suggested})"


def lr_find(
    source: Trainer | torch.optim.Optimizer,
    step: Callable[[], Any] | Iterator[Any] | tuple[torch.nn.Module, Callable[[Any, Any], torch.Tensor], Iterable[Any]],
    *refused: Any,
    low: float = 1e-7,
    high: float = 10.0,
    n: int = 100,
    stop: float | None = 4.0,
    smoothing: float | None = None,
    name: str | None = None,
) -> LRFinder:
    """Run a learning-rate range test: train for some steps at rising rates, record the losses, and restore all state.

    Restored bit for bit: weights, the optimizer's states, counts, settings and schedule, the gradients and buffers of all
    modules that are called in between, and the random-number generators of Python, NumPy and torch. So two optimizers can be
    tested on one model, one after the other, with the same random numbers. Batches taken from an iterator are consumed.

    Groups of a torch optimizer keep the ratios of their learning rates to the first group's that is not 0; if all are 0, as
    at the beginning of a schedule's warm-up, those of "initial_lr", the rates that the schedule was given.

    The rules that suggest rates, with fastai's names, use the smoothed losses over the logarithm of the rate:

    - "valley": the middle point of the longest subsequence in which each point is lower than the one before by at least 1 %
      of the whole fall;
    - "slide": an interval of 15 % of the points slides down from the last rate; the rule suggests its left end when the
      slopes at both ends first agree to 0.5 % of the whole fall per point;
    - "minimum": a tenth of the rate with the smallest loss;
    - "steep": the rate at which the loss falls fastest.

    If the curve is flat, no rule suggests a rate, see `LRFinder.flat`.

    Args:
        source: the `Trainer`, or an optimizer with torch's interface, to find a rate for.
        step: a function that takes one training step with `source` and returns the loss, a number or a tensor of one
            element; or an iterator, such as a generator, that takes a step for each loss it yields; or (net, loss, data) as
            for `tristep.fit`. It must not step a schedule or record.
        *refused: nothing; the net, the loss and the data are one tuple.
        low, high: the first and the last rate, 0 < low < high; the ratio of consecutive rates is constant.
        n: the number of steps, >= 4.
        stop: end when the smoothed loss exceeds `stop` times its smallest value, > 1; None: only if a loss is not finite.
        smoothing: the standard deviation of the bell-shaped average over neighbours, in steps, >= 0; None: n / 50.
        name: the name of the result; None: the class of the optimizer.

    Returns:
        An `LRFinder`, whose `value` is the suggested rate.

    Raises:
        TypeError, ValueError: an invalid argument, or fewer than 4 losses were finite. All state has been restored.

    Example:
        >>> import torch, tristep
        >>> net = torch.nn.Linear(2, 1)
        >>> trainer = tristep.Trainer(net, "sgd")
        >>> found = tristep.lr_find(trainer, (net, torch.nn.MSELoss(), [(torch.ones(4, 2), torch.zeros(4, 1))]))
        >>> 0.0001 < found.value < 1
        True

    Source: Smith (2017), "Cyclical Learning Rates for Training Neural Networks", section 3.3, for the test; the stopping
    rule is Gugger's (2018), "How Do You Find A Good Learning Rate"; the suggestions are those of fastai's `lr_find`.
    """
    if refused:
        kinds = ", ".join(type(each).__name__ for each in (source, step, *refused))
        raise TypeError(f"lr_find({kinds}): must be a trainer and what to train with, lr_find(trainer, (net, loss, data))")
    instance("source", source, (Trainer, torch.optim.Optimizer), "a Trainer or a torch.optim.Optimizer")
    low = number("low", low, above=0)
    high = number("high", high, above=low)
    n = integer("n", n, low=4)
    stop = None if stop is None else number("stop", stop, above=1)
    width = n / 50 if smoothing is None else number("smoothing", smoothing, low=0)
    take = _stepper(source, step)
    if name is None:
        name = type(source.optimizer if isinstance(source, Trainer) else source).__name__
    rates = np.geomspace(low, high, n)
    before = Snapshot(source)
    try:
        try:
            losses, smoothed, diverged = _search(source, take, rates, before, width, stop)
        finally:
            before.restore()
    except KeyboardInterrupt:  # it may have come before `restore` let interrupts wait
        before.restore()
        raise
    if len(losses) < 4:
        reason = "the next one was not finite: try a lower rate" if diverged else "step gave no more: it must give n of them"
        raise ValueError(f"only {len(losses)} losses from low={low:g}; {reason}")
    rates = rates[: len(losses)]
    flat = _is_flat(np.array(losses), smoothed, width)
    return LRFinder(name, rates, np.array(losses), smoothed, diverged, {} if flat else _suggestions(rates, smoothed), flat)


def _search(
    source: Trainer | torch.optim.Optimizer,
    take: Callable[[], Any],
    rates: np.ndarray,
    before: Snapshot,
    width: float,
    stop: float | None,
) -> tuple[list[float], np.ndarray, bool]:
    """Train at these rates; return the losses, the smoothed losses, and whether training diverged."""
    losses: list[float] = []
    smoothed = np.array(losses)
    set_rate = _rate_setter(source)
    for parameter in before.params:
        parameter.grad = None  # the snapshot has the gradients themselves: they must not be written to
    with _keeping_modules(before):
        for rate in rates:
            set_rate(float(rate))
            try:
                loss = _number(take())
            except StopIteration:
                break
            if not math.isfinite(loss):
                return losses, smoothed, True
            losses.append(loss)
            smoothed = _smoothed(np.array(losses), width)
            best = smoothed.min()
            if stop is not None and smoothed[-1] > best + (stop - 1) * abs(best):
                return losses, smoothed, True
    return losses, smoothed, False


def _stepper(source: Trainer | torch.optim.Optimizer, step: Any) -> Callable[[], Any]:
    if isinstance(step, tuple):
        if len(step) != 3:
            raise TypeError(f"step is a tuple of {len(step)}: must be (net, loss, data), a callable or an iterator")
        return _train_on(source, *step)
    if isinstance(step, Iterator):
        return step.__next__
    if not callable(step):
        raise TypeError(f"step must be a callable, an iterator or (net, loss, data), got {type(step).__name__}")
    return step


def _train_on(source: Trainer | torch.optim.Optimizer, net: Any, loss: Any, data: Any) -> Callable[[], Any]:
    is_net = isinstance(net, torch.nn.Module)
    trains_loss = is_net and isinstance(loss, torch.nn.Module) and _is_trainable(loss) and not _is_trainable(net)
    if not (is_net and callable(loss) and isinstance(data, Iterable)) or trains_loss:
        got = ", ".join(type(each).__name__ for each in (net, loss, data))
        raise TypeError(
            f"step=({got}): must be (net, loss, data) in this order: the torch.nn.Module to train, a function of outputs "
            "and labels, and batches (inputs, labels)"
        )
    if isinstance(data, Iterator):
        batches = data
    else:
        check_batches("data", data)
        batches = _again_and_again(data)

    def take() -> torch.Tensor:
        inputs, labels = unpack_batch("data", next(batches), device_of(net))
        size = len(inputs[0])
        return step_on(source, checked_loss(loss(net(*inputs), labels), size), size)

    return take


def _is_trainable(module: torch.nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _again_and_again(data: Iterable[Any]) -> Iterator[Any]:
    while True:
        batch = None
        for batch in data:
            yield batch
        if batch is None:
            raise ValueError("data gave no batch")


def _rate_setter(source: Trainer | torch.optim.Optimizer) -> Callable[[float], None]:
    if isinstance(source, Trainer):
        for optimizer in parts_of(source.optimizer):
            base_lr = getattr(optimizer.lr_scheduler, "base_lr", None)
            optimizer.lr_scheduler = None
            if base_lr is not None:
                optimizer.lr = base_lr
        source.telemetry = None
        return source.set_learning_rate
    groups = source.param_groups
    rates = [float(group["lr"]) for group in groups]
    if not any(rates):
        rates = [float(group.get("initial_lr", 0.0)) for group in groups]
    first = next((rate for rate in rates if rate), None)
    ratios = [1.0 if first is None else rate / first for rate in rates]

    def set_rate(rate: float) -> None:
        for group, ratio in zip(groups, ratios, strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate * ratio)
            else:
                group["lr"] = rate * ratio

    return set_rate


@contextmanager
def _keeping_modules(snapshot: Snapshot) -> Iterator[None]:
    """Add each module that is called inside this context to the snapshot, before its first call."""
    seen: set[int] = set()

    def before_call(module: torch.nn.Module, _: Any) -> None:
        if id(module) not in seen:
            seen.update(map(id, module.modules()))
            snapshot.add_buffers(module)
            snapshot.set_gradients_aside(module)

    hook = torch.nn.modules.module.register_module_forward_pre_hook(before_call)
    try:
        yield
    finally:
        hook.remove()


def _number(loss: Any) -> float:
    if isinstance(loss, torch.Tensor):
        if loss.numel() != 1:
            raise ValueError(f"step gave a loss of shape {tuple(loss.shape)}: must be a single number, such as the mean")
        return float(loss.detach())
    try:
        return float(loss)
    except (TypeError, ValueError):
        raise TypeError(f"step gave {loss!r} ({type(loss).__name__}): it must return the loss, a number") from None


def _smoothed(values: np.ndarray, width: float) -> np.ndarray:
    """Return the average around each value, weighted by a Gaussian of standard deviation `width`."""
    if width == 0:
        return values
    reach = min(math.ceil(3 * width), len(values))
    bell = np.exp(-0.5 * (np.arange(-reach, reach + 1) / width) ** 2)
    inside = slice(reach, reach + len(values))
    averages: np.ndarray = np.convolve(values, bell)[inside] / np.convolve(np.ones(len(values)), bell)[inside]
    return averages


def _fall(losses: np.ndarray) -> float:
    """Return how far a curve falls, from its highest point before the minimum; the rise after it does not count."""
    best = int(losses.argmin())
    return float(losses[: best + 1].max() - losses[best])


def _is_flat(losses: np.ndarray, smoothed: np.ndarray, width: float) -> bool:
    fall = _fall(smoothed)
    if 0 < fall < 0.005 * abs(smoothed[0]):
        return True
    if fall == 0 or len(losses) < ENOUGH:
        return False
    # The median is insensitive to the rise at the end, and second differences to a steady fall.
    noise = np.median(np.abs(np.diff(losses, 2))) / (0.6745 * math.sqrt(6))
    impulse = np.eye(1, len(losses), len(losses) // 2)[0]
    return bool(fall < NOISE * noise * np.linalg.norm(_smoothed(impulse, width)))


def _suggestions(rates: np.ndarray, losses: np.ndarray) -> dict[str, float]:
    best, fall = int(losses.argmin()), _fall(losses)
    if fall == 0:
        return {}
    slopes = np.gradient(losses) / np.gradient(np.log(rates))
    suggestions: dict[str, float] = {}
    members = _longest_fall(losses, 0.01 * fall)
    if len(members) > 1:
        suggestions["valley"] = float(rates[members[len(members) // 2]])
    if (place := _slide(np.gradient(losses) / fall)) is not None:
        suggestions["slide"] = float(rates[place])
    suggestions["minimum"] = float(rates[best]) / 10
    if slopes.min() < 0:
        suggestions["steep"] = float(rates[slopes.argmin()])
    return suggestions


def _longest_fall(losses: np.ndarray, least: float) -> list[int]:
    """Return the indices of the longest subsequence in which each loss is lower than the one before by more than `least`."""
    lengths, before = np.ones(len(losses), dtype=np.int64), np.full(len(losses), -1)
    for i in range(1, len(losses)):
        above = np.where(losses[:i] > losses[i] + least, lengths[:i], 0)
        if above.any():
            before[i] = i - 1 - above[::-1].argmax()  # the nearest of several, which leaves out a flat part before
            lengths[i] = above[before[i]] + 1
    members = [int(lengths.argmax())]
    while before[members[-1]] >= 0:
        members.append(int(before[members[-1]]))
    return members[::-1]


def _slide(slopes: np.ndarray) -> int | None:
    """Return the left end of the first interval, from the right, with nearly equal slopes at both ends; None if none has."""
    reach = max(round(0.15 * len(slopes)), 1)
    for right in range(len(slopes) - 1, reach - 1, -1):
        if abs(slopes[right] - slopes[right - reach]) <= 0.005:
            return right - reach
    return None
