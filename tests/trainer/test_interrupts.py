"""Ctrl-C in the middle of a step: the step is all there afterwards, counts and all, and training goes on."""

import contextlib
import inspect
import json
import os
import signal
import sys
from functools import cache

import pytest
import torch
from interrupting import at_each_line, at_line

import tristep
from tristep import Trainer
from tristep.kernels import Update, launch
from tristep.trainer import Ensemble
from tristep.trainer.loops import snapshot
from tristep.trainer.optim import adapters, base, joined, multi
from tristep.trainer.optimizer import SGD, get_updater
from tristep.trainer.step import replica
from tristep.trainer.utils import interrupts
from tristep.trainer.utils.interrupts import interrupts_wait, uninterrupted

safetensors = pytest.importorskip("safetensors", reason="files need it")

DTYPES = (torch.float64, torch.float32)  # two groups, two launches


@pytest.fixture(autouse=True)
def default_handler():
    """Python's own, which a process that was started in the background has not."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def interrupted(monkeypatch):
    """Lets an interrupt come between the launches of a step."""
    run, calls = launch.Launch.run, []

    def then_interrupt(*args, **kwargs):
        run(*args, **kwargs)
        calls.append(None)
        if len(calls) == 1:
            signal.raise_signal(signal.SIGINT)

    def begin():
        calls.clear()
        monkeypatch.setattr(launch.Launch, "run", then_interrupt)

    return begin


def _params():
    return [torch.nn.Parameter(torch.ones(3, dtype=dtype)) for dtype in DTYPES]


def _trainer(params):
    trainer = Trainer(params, "sgd", {"learning_rate": 0.5})
    return lambda: trainer.step(1), lambda: trainer.optimizer.num_update


def _optim(params):
    optimizer = tristep.optim.Adam(params, lr=0.5, eps=0.0)
    return optimizer.step, lambda: max((int(row["step"]) for row in optimizer.state.values()), default=0)


def _updater(params):
    optimizer = SGD(learning_rate=0.5)
    update = get_updater(optimizer)
    return lambda: update([0, 1], [param.grad for param in params], params), lambda: optimizer.num_update


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("make", [_trainer, _optim, _updater])
def test_a_step_is_all_there_or_not_at_all(make, first, interrupted):
    params = _params()
    step, count = make(params)
    for k in range(1 if first else 2):
        for param in params:
            param.grad = torch.ones_like(param)
        if k == (0 if first else 1):
            interrupted()
            with pytest.raises(KeyboardInterrupt):
                step()
        else:
            step()
        assert count() == k + 1
        for param in params:
            torch.testing.assert_close(param.detach(), torch.full_like(param, 1.0 - 0.5 * (k + 1)))
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_step_in_backward_is_all_there(interrupted):
    params = _params()
    trainer = Trainer(params, "sgd", {"learning_rate": 0.5})
    interrupted()
    with pytest.raises(KeyboardInterrupt), trainer.step_in_backward(1):
        sum(param.sum().float() for param in params).backward()
    assert trainer.optimizer.num_update == 1
    assert all((param == 0.5).all() for param in params)


def test_a_step_of_many_is_all_there(monkeypatch):
    """The trainings of one `Ensemble` that are no copies of each other have launches of their own."""
    made, weights = [SGD(learning_rate=0.5), SGD(learning_rate=0.5, momentum=0.5)], torch.ones(2, 3)
    together, step, calls = Ensemble(made, [weights]), Update.__call__, []

    def then_interrupt(update, into=None):
        step(update, into)
        calls.append(1)
        if len(calls) == 1:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Update, "__call__", then_interrupt)
    with pytest.raises(KeyboardInterrupt):
        together.step([torch.ones(2, 3)])
    assert [each.num_update for each in made] == [1, 1]
    assert weights.tolist() == [[0.5] * 3, [0.5] * 3]


@pytest.mark.parametrize("make", [_trainer, _optim, _updater])
def test_a_gradient_that_dies_calls_nothing_in_python(make):
    """An interrupt in a weak reference's callback would be printed and lost."""
    params, called = _params(), []
    step, _ = make(params)
    for _ in range(2):  # new ones each time, and the same ones again
        for param in params:
            param.grad = torch.ones_like(param)
        step()
    for param in params:
        param.grad.fill_(2.0)
    step()
    sys.setprofile(lambda frame, event, _: called.append(frame.f_code.co_name) if event == "call" else None)
    try:
        for param in params:
            param.grad = None
    finally:
        sys.setprofile(None)
    assert called == []


def test_a_second_interrupt_acts_at_once():
    done = []

    @uninterrupted
    def endless():
        signal.raise_signal(signal.SIGINT)
        done.append(1)
        signal.raise_signal(signal.SIGINT)
        done.append(2)

    with pytest.raises(KeyboardInterrupt):
        endless()
    assert done == [1]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


class _Raised(Exception):
    """By a handler of SIGTERM."""


def _raises(*_):
    raise _Raised


@pytest.fixture(params=["SIGINT", "SIGTERM"])
def raising(request):
    """A signal and the error that its handler raises."""
    number = getattr(signal, request.param)
    if number == signal.SIGINT:
        yield number, KeyboardInterrupt
        return
    before = signal.signal(number, _raises)
    yield number, _Raised
    signal.signal(number, before)


@pytest.mark.cover("raising")
def test_a_signal_at_any_line_leaves_the_guard_as_it_was(raising):
    """Also at those where the guard begins and ends, and the handler from before is in force."""
    number, error = raising
    handlers = [signal.getsignal(each) for each in (signal.SIGINT, number)]
    lines_met = []
    for line in range(300):
        met, done = [], []
        with contextlib.suppress(error), interrupts_wait():
            pass  # whatever is loaded at the first call
        with contextlib.suppress(error), at_line(line, number, lambda code: code.co_filename == interrupts.__file__, met):
            uninterrupted(done.append)(0)
        if not met:
            break
        lines_met += met
        assert [signal.getsignal(each) for each in (signal.SIGINT, number)] == handlers, f"after one at {met}"
        with pytest.raises(error), interrupts_wait():  # noqa: PT012
            signal.raise_signal(number)
            done.append(1)
        assert done[-1:] == [1], f"signals no longer wait after one at {met}"
    assert len(lines_met) > 15


def test_a_handler_of_sigterm_that_raises_waits_for_the_end_of_a_step(monkeypatch):
    params = _params()
    step, count = _trainer(params)
    for param in params:
        param.grad = torch.ones_like(param)
    run = launch.Launch.run

    def then_signal(*args, **kwargs):
        run(*args, **kwargs)
        for _ in range(2):  # only of SIGINT a second one acts at once
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(launch.Launch, "run", then_signal)
    before = signal.signal(signal.SIGTERM, _raises)
    try:
        with pytest.raises(_Raised):
            step()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert count() == 1
    assert all((param == 0.5).all() for param in params)


def test_both_signals_that_came_act_afterwards():
    came = []
    before = signal.signal(signal.SIGTERM, lambda number, _: came.append(number))
    try:
        with pytest.raises(KeyboardInterrupt), interrupts_wait():  # noqa: PT012
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.raise_signal(number)
            assert came == []
        assert came == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


def _bits(value):
    if isinstance(value, torch.Tensor):
        return value.tolist()
    return {key: _bits(item) for key, item in value.items()} if isinstance(value, dict) else repr(value)


@pytest.mark.sample(1)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of a file that was just opened
@pytest.mark.parametrize("load", ["manager", "trainer", "states"])
def test_an_interrupt_at_any_line_of_loading_is_not_lost_and_leaves_nothing_half_done(load, tmp_path):
    """Everything is as before, or all of the newest checkpoint is loaded; it is never passed over for an older one."""
    net = torch.nn.Linear(2, 2)
    trainer = Trainer(net, "sgd", {"learning_rate": 1.0, "momentum": 0.5}, engine="eager")
    manager = tristep.CheckpointManager(tmp_path, trainer, net, asynchronous=False)

    def step():
        for param in net.parameters():
            param.grad = torch.ones_like(param)
        trainer.step(1)

    def look():
        return _bits(trainer.state_dict()), _bits(net.state_dict()) if load != "states" else None

    for _ in range(2):
        step()
        manager.save()
    trainer.save_states(tmp_path / "states")
    newest = look()
    call = {
        "manager": manager.resume,
        "trainer": lambda: trainer.resume(tmp_path, net),
        "states": lambda: trainer.load_states(tmp_path / "states"),
    }[load]
    ours = (
        os.path.dirname(os.path.realpath(interrupts.__file__)),
        os.path.dirname(safetensors.__file__),
        os.path.dirname(json.__file__),
        os.path.dirname(torch.storage.__file__),
    )
    is_ours = cache(lambda code: os.path.realpath(code.co_filename).startswith(ours))
    line, seen = 0, []
    while True:
        call()
        step()
        before, met = look(), []
        with at_line(line, signal.SIGINT, is_ours, met):
            try:
                call()
            except KeyboardInterrupt:
                outcome = "interrupted"
            else:
                outcome = "not interrupted"
        if not met:
            break
        assert outcome == "interrupted", met
        assert look() in (before, newest), met
        seen.append(look() == newest)
        line += 1 + line // 12
    assert {True, False} == set(seen)
    assert len(seen) > 30


def test_one_inside_another_is_part_of_it():
    done = []

    @uninterrupted
    def inner():
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt), interrupts_wait():  # noqa: PT012
        inner()
        done.append(1)
    assert done == [1]


def test_a_handler_of_somebody_else_gets_it_afterwards_and_stays():
    came, before = [], signal.getsignal(signal.SIGINT)
    mine = lambda *_: came.append(len(done))  # noqa: E731
    done = []
    signal.signal(signal.SIGINT, mine)
    try:
        with interrupts_wait():
            signal.raise_signal(signal.SIGINT)
            done.append(1)
        assert came == [1]
        assert signal.getsignal(signal.SIGINT) is mine
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with interrupts_wait():
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.sample(0)
@pytest.mark.parametrize("make", ["trainer", "several", "torch"])
def test_lr_find_restores_all_wherever_it_is_interrupted(make):
    net = torch.nn.Linear(2, 2)
    source = {
        "trainer": lambda: Trainer(net, "adam", {"learning_rate": 0.5}),
        "several": lambda: tristep.optim.MultiOptimizer(net, [("*", "adam")], lr=0.5),
        "torch": lambda: torch.optim.Adam(net.parameters(), lr=0.5),
    }[make]()
    net(torch.ones(1, 2)).sum().backward()
    step = (lambda: source.step(1)) if make == "trainer" else source.step
    step()

    def everything():
        return str([net.state_dict(), source.state_dict(), torch.get_rng_state().sum()])

    def search():
        tristep.lr_find(source, (net, torch.nn.MSELoss(), [(torch.ones(1, 2), torch.zeros(1, 2))]), n=4, low=0.1, high=1.0)

    before, lines = everything(), []
    for line in at_each_line(search, tristep.lr_find.__code__, snapshot.__file__, interrupts.__file__):
        lines.append(line)
        assert everything() == before, f"not as before after an interrupt at {line}"
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert len(lines) > 60
    net(torch.ones(1, 2)).sum().backward()
    step()


@pytest.mark.sample(1)
@pytest.mark.parametrize("make", ["trainer", "optim", "several"])
def test_averaged_weights_are_gone_wherever_they_are_interrupted(make):
    net, options = torch.nn.Linear(2, 2), {"ema_decay": 0.5}
    source = {
        "trainer": lambda: Trainer(net, "sgd", {"learning_rate": 1.0, **options}),
        "optim": lambda: tristep.optim.Lion(net.parameters(), lr=1.0, **options),
        "several": lambda: tristep.optim.MultiOptimizer(net, [("*", "lion", options)], lr=1.0),
    }[make]()
    for _ in range(2):
        net(torch.ones(1, 2)).sum().backward()
        source.step(*[1] * (make == "trainer"))

    def show():
        with source.averaged_weights():
            assert str(net.state_dict()) != before

    before, lines = str(net.state_dict()), []
    files = [module.__file__ for module in (replica, interrupts, adapters, multi)]
    for line in at_each_line(show, type(source).averaged_weights.__wrapped__.__code__, *files):
        lines.append(line)
        assert str(net.state_dict()) == before, f"averages in the model after an interrupt at {line}"
        source.state_dict()
    assert len(lines) > 20
    net(torch.ones(1, 2)).sum().backward()
    source.step(*[1] * (make == "trainer"))


@pytest.mark.sample(1)
@pytest.mark.parametrize("several", [False, True])
def test_states_are_loaded_as_a_whole_or_not_at_all(several):
    params = [torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16)) for _ in range(2)]
    make = {
        False: lambda: tristep.optim.AdamW(params, lr=0.5),
        True: lambda: tristep.optim.MultiOptimizer(zip("ab", params, strict=True), [("a", "adamw"), ("b", "lion")], lr=0.5),
    }[several]
    saved = []
    for gradient in (1.0, 2.0):
        optimizer = make()
        for param in params:
            param.grad = torch.full_like(param, gradient)
        optimizer.step()
        optimizer.param_groups[0]["lr"] = gradient
        saved.append(optimizer.state_dict())
    one, other = map(str, saved)
    assert one != other
    files = [*(module.__file__ for module in (base, joined, multi, interrupts)), inspect.getfile(torch.optim.Optimizer)]
    lines = []
    for line in at_each_line(lambda: optimizer.load_state_dict(saved[0]), *files, stride=5):
        lines.append(line)
        assert str(optimizer.state_dict()) in (one, other), f"half of it after an interrupt at {line}"
        optimizer.load_state_dict(saved[1])
        assert str(optimizer.state_dict()) == other
    assert len(lines) > 20
