"""For torture.py: attacks on steps. Each is an endless iterator of attempts, which may raise Wrong or Silent."""

from __future__ import annotations

import hashlib
import os
import random
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torture_process import Child, Silent, Wrong, plain

import tristep
from tristep import Trainer, lr_scheduler

__all__ = ["first", "interrupts", "layouts", "loads", "resumes"]

STEPS = 12
# tristep's against torch's own, with options that use all states
PEERS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01},
    "Adam": {"lr": 0.01, "amsgrad": True},
    "AdamW": {"lr": 0.01, "weight_decay": 0.1},
    "RMSprop": {"lr": 0.01, "momentum": 0.9, "centered": True},
    "Adagrad": {"lr": 0.1},
    "NAdam": {"lr": 0.01},
}


# ---- layouts ---------------------------------------------------------------------------------------------------------


def _laid_out(values: torch.Tensor, how: str) -> torch.Tensor:
    """The values in another order of memory."""
    if how == "transposed" and values.dim() == 2:
        return values.t().contiguous().t()
    if how == "channels last" and values.dim() == 4:
        return values.contiguous(memory_format=torch.channels_last)
    if how == "permuted":
        order = list(range(values.dim()))[::-1]
        return values.permute(order).contiguous().permute(order)
    if how == "every other":
        room = torch.full((*values.shape, 2), float("nan"), dtype=values.dtype)
        room[..., 0] = values
        return room[..., 0]
    if how == "unaligned":
        room = torch.empty(values.numel() + 1, dtype=values.dtype)[1:].view(values.shape)
        return room.copy_(values)
    if how == "expanded" and values.dim():
        return values[:1].expand(values.shape)
    return values.clone(memory_format=torch.contiguous_format)


HOWS = ("plain", "transposed", "channels last", "permuted", "every other", "unaligned")


def _move_weight(param: torch.nn.Parameter, what: str, how: str) -> None:
    if what == "replaced":
        param.data = _laid_out(param.data, how)
    elif what == "turned" and param.dim() == 2 and param.shape[0] == param.shape[1]:
        param.data = param.data.t()  # the same address
    elif what == "turned in place" and param.dim() == 2 and param.shape[0] == param.shape[1]:
        with torch.no_grad():
            param.t_()
    elif what == "written":
        with torch.no_grad():
            param.mul_(0.75)


def _give_gradient(param: torch.nn.Parameter, values: torch.Tensor, what: str, how: str) -> None:
    if what == "none":
        param.grad = None
    elif what == "filled" and param.grad is not None and not (0 in param.grad.stride() and param.grad.numel() > 1):
        param.grad.copy_(values)
    elif what == "turned" and param.grad is not None and param.dim() == 2 and param.shape[0] == param.shape[1]:
        param.grad.t_()
    else:
        param.grad = _laid_out(values, how)


def _trajectory(rng: random.Random) -> None:
    name = rng.choice(list(PEERS))
    dtype, numbers = rng.choice((torch.float32, torch.float64)), torch.Generator().manual_seed(rng.getrandbits(60))
    shapes = [rng.choice(((), (1,), (5,), (4, 4), (3, 7), (6, 6), (2, 3, 4, 4), (70, 70), (1, 9), (0, 3))) for _ in range(4)]
    starts = [torch.randn(shape, dtype=dtype, generator=numbers) for shape in shapes]
    params, theirs = ([torch.nn.Parameter(start.clone()) for start in starts] for _ in range(2))
    engine = rng.choice((None, None, "eager"))
    ours: Any = None
    if name == "SGD" and rng.random() < 0.5:
        ours = Trainer(params, "sgd", {"learning_rate": 0.1, "momentum": 0.9, "wd": 0.01}, engine=engine)
        step: Callable[[], Any] = lambda: ours.step(1, ignore_stale_grad=True)  # noqa: E731
    else:
        step = getattr(tristep.optim, name)(params, **PEERS[name]).step
    peer = getattr(torch.optim, name)(theirs, **PEERS[name], foreach=False)
    history = [name, type(ours).__name__, str(dtype), str(shapes)]
    for _ in range(STEPS):
        for k, both in enumerate(zip(params, theirs, strict=True)):
            weight = rng.choice(("", "", "replaced", "turned", "turned in place", "written")), rng.choice(HOWS)
            gradient = rng.choice(("new", "new", "filled", "filled", "turned", "none")), rng.choice((*HOWS, "expanded"))
            values = torch.randn(shapes[k], dtype=dtype, generator=numbers)
            history.append(f"{k}: {weight} {gradient}")
            for param in both:
                _move_weight(param, *weight)
                _give_gradient(param, values, *gradient)
        history.append("step")
        try:
            step()
        except Exception as error:
            raise Wrong(f"{type(error).__name__}: {error}; {history}") from error
        peer.step()
        tolerance = 1e-9 if dtype == torch.float64 else 1e-4
        for param, their in zip(params, theirs, strict=True):
            if not torch.allclose(param, their, rtol=tolerance, atol=tolerance):
                raise Silent(f"{(param - their).abs().max().item():.2e} off; {history}")


def layouts(folder: Path, rng: random.Random) -> Iterator[bool]:
    while True:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what is stale, and of gradients that are copied
            _trajectory(rng)
        yield True


# ---- trainings that stop ---------------------------------------------------------------------------------------------


def _setting(rng: random.Random) -> dict[str, Any]:
    """A training: which optimizer, options, types and schedule."""
    name = rng.choice(sorted(tristep.optimizer.registered()))
    options: list[dict[str, Any]] = [{}, {"wd": 0.1}, {"clip_gradient": 0.5}, {"multi_precision": True}]
    options += [{"ema_decay": 0.9}, {"lookahead": 3}, {"state_dtype": "bfloat16"}, {"state_dtype": "8bit"}]
    options += [{"clip_norm": 1.0}, {"skip_nonfinite": True}, {"cautious": True}]
    schedules = [None, None, ["factor", 4, 0.5], ["cosine", 2 * STEPS]]
    return {
        "name": name,
        "params": {**rng.choice(options), "learning_rate": 0.01},
        "schedule": rng.choice(schedules),
        "dtypes": rng.choice((["float32"] * 3, ["float32", "bfloat16", "float32"], ["float64"] * 3, ["float16"] * 3)),
        "engine": rng.choice(("cpu", "cpu", "eager")),
        "seed": rng.getrandbits(30),
    }


class _Training:
    """A training whose gradients follow from the weights and the number of the step."""

    def __init__(self, setting: dict[str, Any]) -> None:
        numbers = torch.Generator().manual_seed(setting["seed"])
        shapes = (7,), (5, 6), (64, 80)
        self.params = {
            str(k): torch.nn.Parameter(torch.randn(shape, generator=numbers).to(getattr(torch, dtype)))
            for k, (shape, dtype) in enumerate(zip(shapes, setting["dtypes"], strict=True))
        }
        params, schedule = dict(setting["params"]), setting["schedule"]
        if schedule is not None:
            kinds: Any = {"factor": lr_scheduler.FactorScheduler, "cosine": lr_scheduler.CosineScheduler}
            params["lr_scheduler"] = kinds[schedule[0]](*schedule[1:], base_lr=params.pop("learning_rate"))
        self.trainer = Trainer(self.params, setting["name"], params, engine=setting["engine"])

    @property
    def count(self) -> int:
        return max(self.trainer.optimizer.counts.values(), default=0)

    def give_gradients(self) -> None:
        for k, param in enumerate(self.params.values()):
            param.grad = torch.cos(param.detach().float() * (self.count + k + 1)).to(param.dtype)

    def train(self, until: int) -> None:
        while self.count < until:
            self.give_gradients()
            self.trainer.step(1)

    def outcome(self) -> str:
        return hashlib.sha256(repr(plain([self.params, self.trainer.state_dict()])).encode()).hexdigest()


def _usable(rng: random.Random) -> dict[str, Any]:
    """A setting that the optimizer and its options allow."""
    while True:
        setting = _setting(rng)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of default learning rates together with a schedule
                training = _Training(setting)
            training.give_gradients()
            training.trainer.step(1)
            training.trainer.state_dict()
        except (TypeError, ValueError):
            continue
        if training.count == 1:
            return setting


def _whole(there: int, setting: dict[str, Any]) -> str:
    training = _Training(setting)
    training.train(STEPS)
    return training.outcome()


def resumes(folder: Path, rng: random.Random) -> Iterator[bool]:
    states, weights = folder / "states", folder / "weights"

    def begin(there: int, setting: dict[str, Any], stop: int) -> None:
        training = _Training(setting)
        training.train(stop)
        training.trainer.save_states(states)
        torch.save({name: param.detach() for name, param in training.params.items()}, weights)

    def go_on(there: int, setting: dict[str, Any]) -> str:
        training = _Training(setting)
        for name, saved in torch.load(weights).items():
            training.params[name].data.copy_(saved)
        training.trainer.load_states(states)
        training.train(STEPS)
        return training.outcome()

    while True:
        setting, stop = _usable(rng), rng.randrange(STEPS)
        _, expected = Child(_whole, setting).end()
        Child(begin, setting, stop).end()
        _, found = Child(go_on, setting).end()
        if found != expected:
            raise Silent(f"stopped after {stop} steps: {setting}")
        yield stop > 0


def _interrupted(there: int, setting: dict[str, Any]) -> str:
    """Train; each interrupt says at once whether it came in a step, and blocks others until that has been left."""
    inside = False

    def came(*_: Any) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        os.write(there, b"i" if inside else b"o")
        raise KeyboardInterrupt

    training = _Training(setting)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # until it can be caught
    signal.signal(signal.SIGINT, came)
    os.write(there, b"s")
    while True:
        try:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
            inside = False
            while training.count < STEPS:
                training.give_gradients()
                inside = True
                training.trainer.step(1)
                inside = False
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            return training.outcome()
        except KeyboardInterrupt:  # noqa: PERF203
            continue


def _attack(setting: dict[str, Any], rng: random.Random, within: float, most: int) -> list[bool]:
    """Interrupt a training at random moments, whose results are to be the same; for each whether it came in a step."""
    _, expected = Child(_whole, setting).end()
    child, came = Child(_interrupted, setting), []
    child.read()
    for _ in range(most):
        time.sleep(rng.random() * within)
        child.send(signal.SIGINT)
        said = child.read()
        if said not in (b"i", b"o"):
            child.unread = said
            break
        came.append(said == b"i")
    _, found = child.end()
    if found != expected:
        raise Silent(f"after {len(came)} interrupts: {setting}")
    return came


def interrupts(folder: Path, rng: random.Random) -> Iterator[bool]:
    while True:
        yield from _attack(_usable(rng), rng, 3e-3, 8)


def _seconds_of(function: Callable[[], Any]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def loads(folder: Path, rng: random.Random) -> Iterator[bool]:
    """SIGINT at random moments of loading a checkpoint: all of the newest, or nothing, and it is never lost."""
    net = torch.nn.Sequential(*[torch.nn.Linear(20, 20) for _ in range(6)])
    trainer = Trainer(net, "adam", engine="eager")
    manager = tristep.CheckpointManager(folder / "loads", trainer, net, asynchronous=False)

    def step() -> None:
        for param in net.parameters():
            param.grad = torch.cos(param.detach())
        trainer.step(1)

    def look() -> Any:
        return plain([net.state_dict(), trainer.state_dict()])

    def came(*_: Any) -> None:
        nonlocal count
        if loading:  # the alarm may be late
            count += 1
            raise KeyboardInterrupt

    for _ in range(2):
        step()
        manager.save()
    newest, count, loading, before_handler = look(), 0, False, signal.getsignal(signal.SIGINT)
    within = min(_seconds_of(manager.resume) for _ in range(3))
    signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
    while True:
        step()
        before, count, caught, loading = look(), 0, False, True
        signal.signal(signal.SIGINT, came)
        try:
            signal.setitimer(signal.ITIMER_REAL, max(1e-5, rng.random() * within))
            manager.resume()
            loading = inside = False
        except KeyboardInterrupt:
            caught = inside = True
        except ValueError as error:
            raise Wrong(f"an interrupt counts as damage: {error}") from error
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGINT, before_handler)
        if count and not caught and look() not in (newest,):
            raise Silent("an interrupt was lost")
        if look() not in (before, newest):
            raise Silent("neither as before nor as saved")
        yield inside


def first(folder: Path, rng: random.Random) -> Iterator[bool]:
    setting = {"name": "adam", "params": {}, "schedule": None, "dtypes": ["float32"] * 3, "engine": "cpu", "seed": 1}
    while True:
        yield from _attack(setting | {"seed": rng.getrandbits(30)}, rng, 1.5, 1)
