"""lr_find: a learning-rate range test for any training loop, after which all state is restored."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from .checkpoint.snapshot import Snapshot
from .fitting import device_of, step_on, unpack_batch
from .trainer import Trainer
from .validation import choice, integer, number

SUGGESTERS = ("valley", "slide", "minimum", "steep")
ENOUGH = 40  # losses to tell a fall from noise
NOISE = 6.5  # standard deviations of the averages that these span by themselves, in 49 of 50 tests without any fall


@dataclass(frozen=True)
class LRFinder:
    """What a learning-rate range test has found.

    Attributes:
        name: of what was tried.
        rates: float64 [n], the learning rate of each step.
        losses: float64 [n], of the batches that these steps were taken with.
        smoothed: float64 [n], the losses averaged over their neighbours.
        diverged: whether the test ended early because the loss had become far too large, or not finite.
        suggestions: rates by the names of the rules that suggest them; a rule that finds nothing is missing.
        flat: whether the loss falls by less than 0.5 %, or by no more than it differs from batch to batch, as that of a net
            that is trained already. Then nothing is suggested, since each rule would pick a rate at random.
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
        """The rate to begin with: that of the first of "valley", "slide", "minimum" and "steep" that suggests one.

        Raises:
            ValueError: none does, because the loss never fell, or the curve is flat.
        """
        for rule in SUGGESTERS:
            if rule in self.suggestions:
                return self.suggestions[rule]
        raise ValueError(self.nothing)

    @property
    def nothing(self) -> str:
        """Why no rate is suggested, in a sentence; empty where one is."""
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
        found = ", ".join(f"{rule} {rate:.2g}" for rule, rate in self.suggestions.items()) or "no suggestion"
        found += ", the curve is flat" * self.flat
        return f"LRFinder({self.name!r}, {len(self.rates)} rates up to {self.rates[-1]:.2g}: {found})"


def lr_find(
    source: Trainer | torch.optim.Optimizer,
    step: Callable[[], Any] | Iterator[Any] | tuple[torch.nn.Module, Callable[[Any, Any], torch.Tensor], Iterable[Any]],
    *,
    low: float = 1e-7,
    high: float = 10.0,
    n: int = 100,
    spacing: str = "exponential",
    stop: float | None = 4.0,
    smoothing: float | None = None,
    name: str | None = None,
) -> LRFinder:
    """Train for some steps at rising learning rates, record the losses, and restore all state bit for bit.

    What is restored: weights, gradients, the optimizer's states, counts, settings and schedule, the buffers of all modules
    that are called meanwhile, and the random numbers of Python, NumPy and torch. So two optimizers can be tried on one
    model, one after the other, and see the same random numbers. Batches taken from an iterator are consumed.

    Groups of a torch optimizer keep the ratios of their learning rates to that of the first group.

    The rules, on the smoothed losses over the logarithm of the rate, with fastai's names:

    - "valley": the middle member of the longest subsequence that falls, each time by 1 % of the whole fall or more;
    - "slide": where an interval of 15 % of the points that is slid down from the last rate first has equal slopes at both
      ends, up to 0.5 % of the whole fall for a point;
    - "minimum": a tenth of the rate with the smallest loss;
    - "steep": the rate at which the loss falls fastest.

    None suggests anything where the curve is flat, see `LRFinder.flat`.

    Args:
        source: the `Trainer`, or an optimizer of torch's interface, whose rate is to be found.
        step: does one training step, with `source`, and returns the loss, a number or a tensor of one element; or an
            iterator, such as a generator, that does so each time it is asked for the next loss; or (net, loss, data) as for
            `tristep.fit`. It is to do nothing else: no step of a schedule, no recording.
        low, high: the first and the last rate, 0 < low < high.
        n: how many steps, >= 4.
        spacing: "exponential", with which each rate is the same multiple of the one before, or "linear".
        stop: end when the smoothed loss is larger than this many times its smallest value, > 1; None: only where the loss
            is not finite.
        smoothing: the standard deviation of the average over neighbours, in steps, >= 0; None is a fiftieth of n.
        name: of what is tried; None is the class of the optimizer.

    Raises:
        TypeError, ValueError: an argument that does not fit, or fewer than 4 losses were finite. All is as it was.

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
    if not isinstance(source, (Trainer, torch.optim.Optimizer)):
        raise TypeError(f"source must be a Trainer or a torch.optim.Optimizer, got {type(source).__name__}")
    low = number("low", low, above=0)
    high = number("high", high, above=low)
    n = integer("n", n, low=4)
    choice("spacing", spacing, ("exponential", "linear"))
    stop = None if stop is None else number("stop", stop, above=1)
    width = n / 50 if smoothing is None else number("smoothing", smoothing, low=0)
    take = _stepper(source, step)
    if name is None:
        name = type(source.optimizer if isinstance(source, Trainer) else source).__name__
    rates = np.geomspace(low, high, n) if spacing == "exponential" else np.linspace(low, high, n)
    before = Snapshot(source)
    try:
        try:
            losses, smoothed, diverged = _search(source, take, rates, before, width, stop)
        finally:
            before.restore()
    except KeyboardInterrupt:  # which may have come just before that lets interrupts wait
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
    """Train at these rates: the losses, their averages, and whether the last one was far too large, or not finite."""
    losses: list[float] = []
    smoothed = np.array(losses)
    set_rate = _rate_setter(source)
    for parameter in before.params:
        parameter.grad = None  # those there are must not be written to
    with _keeping_buffers(before):
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
    if not isinstance(net, torch.nn.Module):
        raise TypeError(f"net must be a torch.nn.Module, got {type(net).__name__}")
    if not callable(loss):
        raise TypeError(f"loss must be callable with outputs and labels, got {type(loss).__name__}")
    if not isinstance(data, Iterable):
        raise TypeError(f"data must give batches (inputs, labels), got {type(data).__name__}")
    batches = data if isinstance(data, Iterator) else _again_and_again(data)

    def take() -> torch.Tensor:
        inputs, labels = unpack_batch("data", next(batches), device_of(net))
        value = loss(net(*inputs), labels)
        return step_on(source, value, len(inputs[0]))

    return take


def _again_and_again(data: Iterable[Any]) -> Iterator[Any]:
    while True:
        batch = None
        for batch in data:
            yield batch
        if batch is None:
            raise ValueError("data gave no batch")


def _rate_setter(source: Trainer | torch.optim.Optimizer) -> Callable[[float], None]:
    if isinstance(source, Trainer):
        source.optimizer.lr_scheduler = None
        source.telemetry = None
        return source.set_learning_rate
    groups = source.param_groups
    first = float(groups[0]["lr"])
    ratios = [float(group["lr"]) / first if first else 1.0 for group in groups]

    def set_rate(rate: float) -> None:
        for group, ratio in zip(groups, ratios, strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate * ratio)
            else:
                group["lr"] = rate * ratio

    return set_rate


@contextmanager
def _keeping_buffers(snapshot: Snapshot) -> Iterator[None]:
    """Add the buffers of each module that is called, before its first call."""
    known: set[int] = set()

    def before_call(module: torch.nn.Module, _: Any) -> None:
        if id(module) not in known:
            known.update(map(id, module.modules()))
            snapshot.add_buffers(module)

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
    """Averages around each value, weighted by a bell of this standard deviation."""
    if width == 0:
        return values
    reach = min(math.ceil(3 * width), len(values))
    bell = np.exp(-0.5 * (np.arange(-reach, reach + 1) / width) ** 2)
    inside = slice(reach, reach + len(values))
    averages: np.ndarray = np.convolve(values, bell)[inside] / np.convolve(np.ones(len(values)), bell)[inside]
    return averages


def _fall(losses: np.ndarray) -> float:
    """How far a curve falls, without its rise to the end, which may be of any height."""
    best = int(losses.argmin())
    return float(losses[: best + 1].max() - losses[best])


def _is_flat(losses: np.ndarray, smoothed: np.ndarray, width: float) -> bool:
    fall = _fall(smoothed)
    if 0 < fall < 0.005 * abs(smoothed[0]):
        return True
    if fall == 0 or len(losses) < ENOUGH:
        return False
    # A median, which the rise to the end does not change, of second differences, which a steady fall does not change.
    noise = np.median(np.abs(np.diff(losses, 2))) / (0.6745 * math.sqrt(6))
    alone = np.eye(1, len(losses), len(losses) // 2)[0]
    return bool(fall < NOISE * noise * np.linalg.norm(_smoothed(alone, width)))


def _suggestions(rates: np.ndarray, losses: np.ndarray) -> dict[str, float]:
    best, fall = int(losses.argmin()), _fall(losses)
    if fall == 0:
        return {}
    slopes = np.gradient(losses) / np.gradient(np.log(rates))
    found: dict[str, float] = {}
    members = _longest_fall(losses, 0.01 * fall)
    if len(members) > 1:
        found["valley"] = float(rates[members[len(members) // 2]])
    if (place := _slide(np.gradient(losses) / fall)) is not None:
        found["slide"] = float(rates[place])
    found["minimum"] = float(rates[best]) / 10
    if slopes.min() < 0:
        found["steep"] = float(rates[slopes.argmin()])
    return found


def _longest_fall(losses: np.ndarray, least: float) -> list[int]:
    """The longest subsequence whose members, neighbours or not, fall by more than `least` each."""
    lengths, before = np.ones(len(losses), dtype=np.int64), np.full(len(losses), -1)
    for i in range(1, len(losses)):
        above = np.where(losses[:i] > losses[i] + least, lengths[:i], 0)
        if above.any():
            before[i] = i - 1 - above[::-1].argmax()  # of several the nearest: what is flat before is no part of it
            lengths[i] = above[before[i]] + 1
    members = [int(lengths.argmax())]
    while before[members[-1]] >= 0:
        members.append(int(before[members[-1]]))
    return members[::-1]


def _slide(slopes: np.ndarray) -> int | None:
    """The left end of the first interval, from the right, with nearly equal slopes at both ends."""
    reach = max(round(0.15 * len(slopes)), 1)
    for right in range(len(slopes) - 1, reach - 1, -1):
        if abs(slopes[right] - slopes[right - reach]) <= 0.005:
            return right - reach
    return None
