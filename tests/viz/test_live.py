"""The live loop: training is the same to the bit however it runs; pausing, steering and branching do what they say."""

import asyncio
import gc
import itertools
import os
import signal
import threading

import numpy as np
import pytest
import torch

import tristep

pytest.importorskip("matplotlib")

from tristep import viz
from tristep.viz import LiveLoop, Recorder
from tristep.viz.live import stop_loops
from tristep.viz.live.view import MULTIPLIERS
from tristep.viz.scene import Axis, Line, Panel, Scene, Text
from tristep.viz.views import FrameBudget, View


@pytest.fixture(autouse=True)
def _no_renderer_is_left():
    yield
    viz.set_renderer(None)


KINDS = ("trainer", "trainer with schedule", "torch", "torch with scheduler", "tristep.optim")


class Training:
    """A small net with dropout and batch norm, so that random numbers and buffers matter, and what trains it."""

    def __init__(self, kind="trainer", seed=3):
        torch.manual_seed(seed)
        self.net = torch.nn.Sequential(
            torch.nn.Linear(3, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1)
        )
        self.scheduler, self.stateful = None, [self.net]
        if kind.startswith("trainer"):
            rate = {"learning_rate": 0.02}
            if "schedule" in kind:
                rate = {"lr_scheduler": tristep.lr_scheduler.CosineScheduler(40, base_lr=0.02, warmup_steps=4)}
            self.trainer = tristep.Trainer(self.net, "nadam", rate)
            self.update = lambda: self.trainer.step(1)
        else:
            module = tristep.optim if kind == "tristep.optim" else torch.optim
            self.trainer = module.AdamW(self.net.parameters(), lr=0.02, weight_decay=0.1)
            if "scheduler" in kind:  # one that makes each rate from the one before
                self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.trainer, 0.9)
                self.stateful.append(self.scheduler)
            self.update = self.trainer.step
        self.rates = []

    def step(self):
        x = torch.randn(16, 3)
        self.trainer.zero_grad()
        loss = (self.net(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        self.update()
        if self.scheduler is not None:
            self.scheduler.step()
        return loss

    def steps(self, n=30):
        for _ in range(n):
            yield self.step()

    def loop(self, steps=None, **options):
        options = {"view": None, "mode": "block", "stateful": self.stateful} | options
        return LiveLoop(self.steps if steps is None else steps, trainer=self.trainer, **options)

    def state(self):
        """All numbers: weights, buffers and the optimizer's."""
        tensors = [*self.net.state_dict().values(), torch.get_rng_state()]
        state = self.trainer.state_dict()
        if isinstance(self.trainer, tristep.Trainer):
            tensors += [tensor for own in state["state"].values() for tensor in own.values()]
            plain = [state["num_update"], state["counts"], state["settings"], state["lr_scheduler"]]
        else:
            tensors += [torch.as_tensor(value) for own in state["state"].values() for value in own.values()]
            plain = [{key: value for key, value in group.items() if key != "params"} for group in state["param_groups"]]
        return [tensor.numpy().copy() for tensor in tensors], plain


def same(state, other):
    return len(state[0]) == len(other[0]) and state[1] == other[1] and all(map(np.array_equal, state[0], other[0]))


def plain(kind, n=30):
    """What a for loop makes of it."""
    training = Training(kind)
    losses = [loss.item() for loss in training.steps(n)]
    return training.state(), losses


def losses(run):
    return run.scalars["loss"].recent()[1].tolist()


@pytest.mark.parametrize("mode", ["block", "task", "thread"])
@pytest.mark.parametrize("kind", KINDS)
def test_paused_stepped_and_resumed_is_the_same_to_the_bit(kind, mode):
    expected, expected_losses = plain(kind)
    training = Training(kind)
    loop = training.loop(mode=mode)

    async def steer():
        loop.step(3)  # starts it, too
        while loop.status == "running":
            await asyncio.sleep(0)
        assert (loop.status, loop.n_steps) == ("paused", 3)
        loop.step(4)
        while loop.status == "running":
            await asyncio.sleep(0)
        assert loop.n_steps == 7
        loop.snapshot()
        loop.resume()
        await loop
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(steer())
    assert loop.status == "finished"
    assert same(training.state(), expected)
    assert losses(loop.run) == expected_losses
    assert loop.run.scalars["loss"].recent()[0].tolist() == list(range(1, 31))


@pytest.mark.parametrize("form", ["function", "generator", "callable", "callable that raises"])
def test_forms_of_steps(form):
    expected, _ = plain("trainer", 5)
    training = Training()
    left = iter(range(5))

    def call():
        if form == "callable":
            return {"loss": training.step()} if next(left, None) is not None else False
        next(left)
        training.step()
        return None

    steps = {"function": lambda: training.steps, "generator": lambda: training.steps(5)}.get(form, lambda: call)()
    loop = training.loop(steps)
    if form == "function":
        loop.step(5)
    else:
        loop.start()
        assert loop.status == "finished"
    assert loop.n_steps == 5
    assert same(training.state(), expected)
    assert ("loss" in loop.run.scalars) == (form != "callable that raises")


def test_a_task_lets_others_run_every_20_milliseconds_and_not_more_often():
    training, now, seen = Training(), [0.0], []

    def steps():
        for _ in range(10):
            now[0] += 0.006
            yield None

    async def main():
        loop = training.loop(steps, mode="task")
        loop.runner.clock = lambda: now[0]
        loop.start()
        while loop.status == "running":
            seen.append(loop.n_steps)
            await asyncio.sleep(0)
        assert loop.status == "finished"

    asyncio.run(main())
    assert sorted(set(seen)) == [0, 4, 8]  # 4 steps of 6 ms are the first that reach 20 ms


def test_a_task_is_paused_by_the_end_of_its_event_loop_and_goes_on_in_another():
    expected, _ = plain("trainer")
    training, now = Training(), iter(range(10**6))  # a clock on which each step takes more than a slice
    loop = training.loop(mode="task")
    loop.runner.clock = lambda: next(now)

    async def begin():
        loop.start()
        await asyncio.sleep(0)

    async def go_on():
        loop.resume()
        await loop

    asyncio.run(begin())
    assert loop.status == "paused"
    assert 0 < loop.n_steps < 30
    asyncio.run(go_on())
    assert same(training.state(), expected)


def test_wait_runs_the_rest_of_a_task_where_it_is_called():
    expected, _ = plain("torch")
    training = Training("torch")

    async def main():
        loop = training.loop(mode="task").start()
        assert loop.n_steps == 0
        assert loop.wait()
        assert (loop.status, loop.n_steps) == ("finished", 30)

    asyncio.run(main())
    assert same(training.state(), expected)


def test_wait_ends_with_the_time_or_a_pause():
    training, now = Training(), [0.0]

    def steps():
        while True:
            now[0] += 1.0
            yield

    async def main():
        loop = training.loop(steps, mode="task")
        loop.runner.clock = lambda: now[0]
        loop.start()
        assert not loop.wait(timeout=5.0)
        assert (loop.status, loop.n_steps) == ("running", 5)
        loop.pause()
        assert not loop.wait()
        assert loop.n_steps == 5
        loop.stop()
        assert loop.wait()

    asyncio.run(main())


def test_a_thread_pauses_when_asked_and_not_in_a_step():
    training, inside, go = Training(), threading.Event(), threading.Event()
    done = []

    def steps():
        for i in range(100):
            inside.set()
            assert go.wait(60)
            done.append(i)
            yield

    loop = training.loop(steps, mode="thread").start()
    assert inside.wait(60)
    pauser = threading.Thread(target=loop.pause)
    pauser.start()
    assert loop.status == "running"  # it is in its first step
    go.set()
    pauser.join(60)
    assert loop.status == "paused"
    assert loop.n_steps == len(done) >= 1
    loop.step(2)
    assert not loop.wait(60)
    assert loop.status == "paused"
    loop.stop()
    assert loop.status == "stopped"
    assert loop.n_steps == len(done)


def test_pause_and_resume_at_once_leave_one_thread():
    training, threads = Training(), set()

    def steps():
        for _ in range(200):
            threads.add(threading.get_ident())
            yield

    loop = training.loop(steps, mode="thread").start()
    for _ in range(20):
        loop.pause()
        if loop.status == "paused":
            loop.resume()
    assert loop.wait(60)
    assert loop.n_steps == 200


def test_stop_closes_the_generator_after_the_step_at_hand():
    training, closed = Training(), []

    def steps():
        try:
            for i in range(10):
                if i == 3:
                    loop.stop()
                yield i
        finally:
            closed.append(i)

    loop = training.loop(steps)
    loop.start()
    assert (loop.status, loop.n_steps, closed) == ("stopped", 4, [3])
    with pytest.raises(RuntimeError, match="nothing to go on with: it has ended"):
        loop.resume()


@pytest.mark.parametrize("mode", ["block", "task", "thread"])
def test_what_a_step_raises(mode, capsys):
    training = Training()

    def steps():
        yield 1.0
        raise ZeroDivisionError("by a user")

    async def main():
        loop = training.loop(steps, mode=mode)
        if mode == "block":
            with pytest.raises(ZeroDivisionError, match="by a user"):
                loop.start()
        with pytest.raises(ZeroDivisionError, match="by a user"):
            await loop
        with pytest.raises(ZeroDivisionError, match="by a user") as found:
            loop.wait()
        assert loop.exception is found.value
        assert found.traceback[-1].name == "steps"
        assert (loop.status, loop.n_steps) == ("failed", 1)

    asyncio.run(main())
    assert ("by a user" in capsys.readouterr().err) == (mode == "task")  # where no one may ever ask


def test_a_generator_that_raised_cannot_be_gone_on_with():
    loop = Training().loop(1 / number for number in (1, 0, 2))
    with pytest.raises(ZeroDivisionError):
        loop.start()
    with pytest.raises(RuntimeError, match="its generator has been ended by the exception"):
        loop.resume()


def test_a_callable_that_raised_may_be_mended_and_gone_on_with():
    training, broken = Training(), [True]

    def step():
        if loop.n_steps == 2 and broken[0]:
            raise ValueError("broken")
        return training.step() if loop.n_steps < 5 else False

    loop = training.loop(step)
    with pytest.raises(ValueError, match="broken"):
        loop.start()
    broken[0] = False
    loop.resume()
    assert (loop.status, loop.n_steps, loop.exception) == ("finished", 5, None)
    assert same(training.state(), plain("trainer", 5)[0])


@pytest.mark.parametrize("mode", ["block", "task"])
def test_an_interrupt_pauses_after_the_step_at_hand(mode, capsys):
    expected, _ = plain("trainer")
    training = Training()

    def steps():
        for i, loss in enumerate(training.steps()):
            if i == 9:
                os.kill(os.getpid(), signal.SIGINT)
                for _ in range(1000):  # Python has time to call the handler, which must not raise
                    pass
            yield loss

    before = signal.getsignal(signal.SIGINT)

    async def main():
        loop = training.loop(steps, mode=mode).start()
        while loop.status == "running":
            await asyncio.sleep(0)
        assert (loop.status, loop.n_steps) == ("paused", 10)
        assert capsys.readouterr().out == "paused after step 10; loop.resume() goes on\n"
        loop.resume()
        await loop

    asyncio.run(main())
    assert signal.getsignal(signal.SIGINT) is before
    assert same(training.state(), expected)


def test_a_second_interrupt_breaks_the_step_off(capsys):
    training = Training()

    def step():
        if loop.n_steps == 2:
            os.kill(os.getpid(), signal.SIGINT)
            while True:
                os.kill(os.getpid(), signal.SIGINT)
        return 0.5

    loop = training.loop(step)
    loop.start()
    assert (loop.status, loop.n_steps) == ("paused", 2)
    assert "paused after step 2" in capsys.readouterr().out


def test_a_keyboard_interrupt_of_a_step_pauses_and_the_function_is_called_anew(capsys):
    training, calls = Training(), []

    def steps():
        calls.append(len(calls))
        yield
        if len(calls) == 1:
            raise KeyboardInterrupt
        yield

    loop = training.loop(steps).start()
    assert (loop.status, loop.n_steps) == ("paused", 1)
    loop.resume()
    assert (loop.status, loop.n_steps, calls) == ("finished", 3, [0, 1])


@pytest.fixture
def idle():
    """Python as a kernel at rest has it: an interrupt is ignored."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGINT, before)


async def ended(loop):
    while loop.status == "running" or len(asyncio.all_tasks()) > 1:
        await asyncio.sleep(0)


def sliced(loop):
    """The loop, each step of which is a slice."""
    now = iter(range(10**6))
    loop.runner.clock = lambda: next(now)
    return loop


@pytest.mark.parametrize("interrupts", [1, 2])
def test_an_interrupt_between_two_slices_pauses(interrupts, idle, capsys):
    training = Training()
    loop = sliced(training.loop(mode="task"))

    async def main():
        loop.start()
        while loop.n_steps < 3:
            await asyncio.sleep(0)
        for _ in range(interrupts):
            signal.raise_signal(signal.SIGINT)
        await ended(loop)

    asyncio.run(main())
    assert (loop.status, loop.n_steps) == ("paused", 3)
    assert capsys.readouterr().out == "paused after step 3; loop.resume() goes on\n"
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_an_interrupt_between_two_slices_pauses_after_a_cell_has_had_its_own(idle):
    """As a kernel does it: while a cell runs it has another handler, and then puts back what was there."""
    training, cells = Training(), []
    loop = sliced(training.loop(mode="task"))

    def interrupted(*_):
        cells.append(loop.n_steps)

    async def slices(n):
        until = loop.n_steps + n
        while loop.n_steps < until:
            await asyncio.sleep(0)

    async def main():
        for n in (1, 2):
            before = signal.signal(signal.SIGINT, interrupted)
            if n == 1:
                loop.start()  # in the first cell
            signal.raise_signal(signal.SIGINT)
            await slices(3)  # a cell that awaits something
            signal.raise_signal(signal.SIGINT)
            signal.signal(signal.SIGINT, before)
            await slices(3)
        assert (loop.status, cells) == ("running", [0, 3, 6, 9])
        signal.raise_signal(signal.SIGINT)
        await ended(loop)

    asyncio.run(main())
    assert (loop.status, loop.n_steps) == ("paused", 12)
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


@pytest.mark.parametrize("notebook", [False, True])
def test_an_interrupt_in_a_step_is_for_a_cell_that_awaits_as_well(notebook, idle, monkeypatch):
    monkeypatch.setattr("tristep.viz.live.interrupts.in_notebook", lambda: notebook)
    training, cells = Training(), []

    def steps():
        for i, loss in enumerate(training.steps()):
            if i == 3:
                signal.raise_signal(signal.SIGINT)
            yield loss

    async def main():
        loop = sliced(training.loop(steps, mode="task")).start()
        signal.signal(signal.SIGINT, lambda *_: cells.append(loop.status))
        await ended(loop)
        assert (loop.status, loop.n_steps) == ("paused", 4)

    asyncio.run(main())
    assert cells == ["paused"] * notebook


def test_an_interrupt_pauses_all_loops_in_the_background(idle):
    loops = [sliced(Training().loop(mode="task", name=name)) for name in "ab"]

    async def main():
        for loop in loops:
            loop.start()
        while loops[1].n_steps < 3:
            await asyncio.sleep(0)
        loops[0].pause()
        loops[0].resume()
        await asyncio.sleep(0)
        signal.raise_signal(signal.SIGINT)
        for loop in loops:
            await ended(loop)

    asyncio.run(main())
    assert [loop.status for loop in loops] == ["paused", "paused"]
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_a_second_interrupt_does_not_break_off_what_is_no_step(capsys):
    training = Training()

    class Interrupted(Watching):
        def refresh(self):
            super().refresh()
            if loop.status == "running":
                signal.raise_signal(signal.SIGINT)
                signal.raise_signal(signal.SIGINT)

    loop = sliced(training.loop(view=Interrupted([0])))
    loop.start()
    assert (loop.status, loop.n_steps) == ("paused", 1)
    assert capsys.readouterr().out == "paused after step 1; loop.resume() goes on\n"


def test_an_interrupt_after_the_last_step_is_not_said_to_pause(capsys):
    def steps():
        yield 1.0
        signal.raise_signal(signal.SIGINT)

    assert Training().loop(steps).start().status == "finished"
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("own", ["an event loop of its own", "none"])
@pytest.mark.parametrize("action", ["resume", "step", "start", "button"])
def test_steps_stay_in_their_thread_whoever_asks_for_them(action, own):
    expected, _ = plain("trainer", 30)
    training, threads = Training(), []

    def steps():
        for loss in training.steps():
            threads.append(threading.get_ident())
            yield loss

    async def main():
        mode = "auto" if action == "button" else "task"
        loop = sliced(training.loop(steps, mode=mode, view="live" if action == "button" else None))
        if action in ("resume", "step"):
            loop.step(2)
            await ended(loop)

        def ask():
            if action == "step":
                loop.step(5)
            elif action == "button":
                loop.view.on_button("resume")
            else:
                getattr(loop, action)()

        async def ask_and_stay():
            ask()
            while loop.status == "running":
                await asyncio.sleep(0)

        if own == "none":
            if action == "button":
                loop.mode = "task"
            await asyncio.to_thread(ask)
        else:
            await asyncio.to_thread(asyncio.run, ask_and_stay())
        await ended(loop)
        if action == "step":
            assert (loop.status, loop.n_steps) == ("paused", 7)
            loop.resume()
            await ended(loop)
        assert (loop.status, loop.n_steps, loop.mode) == ("finished", 30, "task")

    asyncio.run(main())
    assert set(threads) == {threading.get_ident()}
    assert same(training.state(), expected)


def test_another_thread_pauses_and_steers_between_two_steps():
    training, now = Training(), iter(range(10**6))
    inside, seen = [], []

    def step():
        inside.append(True)
        loss = training.step()
        inside.pop()
        return loss

    def steer():
        loop.pause()
        seen.append((loop.status, loop.n_steps, list(inside)))
        loop.set_learning_rate(0.005)
        loop.multiplier = 0.5
        loop.snapshot("fork")
        loop.branch("again", "fork")
        loop.step(2)  # does not wait
        assert not loop.wait(60)
        seen.append(loop.n_steps - seen[0][1])
        loop.stop()

    loop = training.loop(step, mode="task")

    async def main():
        loop.runner.clock = lambda: next(now)
        loop.start()
        task = asyncio.create_task(asyncio.to_thread(steer))
        while not task.done():
            await asyncio.sleep(0)
        await task
        await ended(loop)

    asyncio.run(main())
    assert seen == [("paused", seen[0][1], []), 2]
    assert loop.status == "stopped"
    assert loop.runs["again"].scalars["learning_rate"].recent()[1].tolist() == [0.0025, 0.0025]


def test_another_thread_that_asks_often_leaves_one_task():
    training = Training()
    loop = sliced(training.loop(mode="task"))

    async def main():
        loop.step(2)
        await ended(loop)

        def ask():
            for _ in range(5):
                loop.resume()
                loop.pause()
            loop.resume()

        asker = threading.Thread(target=ask)
        asker.start()
        asker.join()  # and the event loop does nothing meanwhile
        await asyncio.sleep(0)
        assert [task.get_name() for task in asyncio.all_tasks() - {asyncio.current_task()}] == ["LiveLoop run"]
        await ended(loop)

    asyncio.run(main())
    assert (loop.status, loop.n_steps) == ("finished", 30)
    assert same(training.state(), plain("trainer")[0])


@pytest.mark.parametrize("kind", KINDS)
def test_the_multiplier_acts_on_each_step_and_leaves_nothing_behind(kind):
    training, expected = Training(kind), Training(kind)
    before = training.trainer.optimizer.lr_scheduler if isinstance(training.trainer, tristep.Trainer) else None
    loop = training.loop()
    loop.step(5)
    loop.multiplier = 0.25
    loop.step(5)
    loop.multiplier = 1
    loop.resume()

    # By hand: the rate that is due, times 0.25.
    torch.manual_seed(3)
    expected = Training(kind)
    rates = []
    for n in range(1, 31):
        factor = 0.25 if 6 <= n <= 10 else 1.0
        if isinstance(expected.trainer, tristep.Trainer):
            optimizer = expected.trainer.optimizer
            schedule, lr = optimizer.lr_scheduler, optimizer.lr
            due = lr if schedule is None else schedule(n)
            optimizer.lr_scheduler, optimizer.lr = None, due * factor
            rates.append(optimizer.lr)
            expected.step()
            optimizer.lr_scheduler, optimizer.lr = schedule, lr
        else:
            group = expected.trainer.param_groups[0]
            scheduler, expected.scheduler = expected.scheduler, None
            due = group["lr"]
            group["lr"] = due * factor
            rates.append(group["lr"])
            expected.step()
            group["lr"], expected.scheduler = due, scheduler
            if scheduler is not None:
                scheduler.step()
    assert same(training.state(), expected.state())
    assert loop.run.scalars["learning_rate"].recent()[1].tolist() == rates
    if isinstance(training.trainer, tristep.Trainer):
        assert training.trainer.optimizer.lr_scheduler is before


def test_a_schedule_can_be_changed_through_the_multiplier():
    training = Training("trainer with schedule")
    schedule = training.trainer.optimizer.lr_scheduler

    def steps():
        yield training.step()
        training.trainer.optimizer.lr_scheduler.base_lr = 0.5
        yield training.step()

    loop = training.loop(steps)
    loop.multiplier = 2
    loop.start()
    assert training.trainer.optimizer.lr_scheduler is schedule
    assert schedule.base_lr == 0.5


def test_a_step_that_sets_the_rate_itself_is_obeyed():
    training = Training()

    def steps():
        yield training.step()
        training.trainer.set_learning_rate(0.5)
        yield training.step()

    loop = training.loop(steps)
    loop.multiplier = 0.5
    loop.start()
    assert training.trainer.learning_rate == 0.5


@pytest.mark.parametrize("kind", KINDS)
def test_setting_the_rate(kind):
    training = Training(kind)
    loop = training.loop()
    loop.step(4)
    rate = loop.learning_rate
    loop.set_learning_rate(rate / 4)
    assert loop.learning_rate == rate / 4
    loop.step(1)
    scheduled = "schedule" in kind
    assert loop.multiplier == (pytest.approx(0.25, rel=0.12) if scheduled else 1.0)
    found = loop.run.scalars["learning_rate"].recent()[1]
    if kind == "trainer with schedule":
        assert found[4] == 0.25 * training.trainer.optimizer.lr_scheduler(5)
    elif scheduled:
        assert found[4] == pytest.approx(rate / 4)
    else:
        assert found[4] == rate / 4
        group = None if kind == "trainer" else training.trainer.param_groups[0]
        assert (training.trainer.learning_rate if group is None else group["lr"]) == rate / 4


def test_groups_keep_their_proportions():
    a, b = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    optimizer = torch.optim.SGD([{"params": [a], "lr": 0.4}, {"params": [b], "lr": 0.1}])
    loop = LiveLoop(lambda: None, trainer=optimizer, view=None)
    loop.set_learning_rate(0.2)
    assert [group["lr"] for group in optimizer.param_groups] == [0.2, 0.05]


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_branch_begins_at_the_snapshot_to_the_bit(kind, recorded):
    expected, expected_losses = plain(kind, 20)
    training = Training(kind)
    recorder = Recorder(training.trainer, "first", every=1) if recorded else None
    loop = training.loop(training.step, recorder=recorder, name="first")
    loop.step(8)
    snapshot = loop.snapshot("fork")
    loop.step(12)
    assert same(training.state(), expected)
    branch = loop.branch("again", "fork")
    assert (loop.n_steps, loop.run, snapshot.step) == (8, branch, 8)
    loop.step(12)
    assert same(training.state(), expected)
    slower = loop.branch("slower", "fork", multiplier=0.5)
    loop.step(12)
    assert not same(training.state(), expected)
    assert [run.name for run in loop.runs] == ["first", "again", "slower"]
    for run in (branch, slower):
        assert run.scalars["loss"].recent()[0].tolist() == list(range(9, 21))
        assert run.notes["branched from"] == "first, step 8"
    assert losses(loop.runs["first"]) == expected_losses
    assert losses(branch) == expected_losses[8:]
    assert losses(slower)[0] == expected_losses[8]  # before the first update that differs
    assert losses(slower)[2:] != expected_losses[10:]
    rates = [run.scalars["learning_rate"].recent()[1][-1] for run in (branch, slower)]
    assert rates[1] == 0.5 * rates[0]
    if recorded:
        recorder.flush()
        first, again = (loop.runs[name].tensors["update_norm"].recent() for name in ("first", "again"))
        assert first[0].tolist() == list(range(1, 21))
        assert again[0].tolist() == list(range(9, 21))
        np.testing.assert_array_equal(again[1], first[1][8:])


def test_a_race_of_two_rates_and_the_pick():
    training = Training()
    loop = training.loop(training.step)
    loop.step(5)
    loop.snapshot("fork")
    ends = {}
    for rate in (0.02, 0.3):
        loop.branch(f"rate {rate}", "fork", learning_rate=rate)
        loop.step(6)
        ends[rate] = training.state()
    loop.pick("rate 0.02")
    assert same(training.state(), ends[0.02])
    assert (loop.n_steps, loop.run.name) == (11, "rate 0.02")
    loop.step(3)
    assert loop.run.scalars["loss"].recent()[0].tolist() == list(range(6, 15))
    assert same(training.state(), plain("trainer", 14)[0])
    loop.pick("rate 0.3")
    assert same(training.state(), ends[0.3])
    assert loop.learning_rate == 0.3


def test_a_snapshot_is_no_view_of_what_trains_on():
    training = Training()
    loop = training.loop(training.step)
    snapshot = loop.snapshot("start")
    loop.step(3)
    loop.branch("one", snapshot)
    loop.step(3)
    first = training.state()
    loop.branch("two", snapshot)
    loop.step(3)
    assert same(training.state(), first)


@pytest.mark.parametrize("kind", ["trainer", "torch"])
@pytest.mark.parametrize("at", [0, 3, 4, 5, 9, 11])
def test_fit_goes_back_in_its_data(kind, at):
    data = torch.utils.data.TensorDataset(torch.randn(20, 3, generator=torch.Generator().manual_seed(1)), torch.zeros(20, 1))
    results = []
    for snapshot_at in (None, at):
        training = Training(kind)
        loader = torch.utils.data.DataLoader(data, batch_size=5, shuffle=True)  # 4 batches an epoch
        loop = LiveLoop.fit(training.net, torch.nn.MSELoss(), loader, training.trainer, num_epoch=3, view=None)
        if snapshot_at is not None:
            if at:
                loop.step(at)
            loop.snapshot("fork")
            loop.start() if loop.status == "ready" else loop.resume()
            loop.branch("again", "fork")
            loop.resume()
        else:
            loop.start()
        assert (loop.status, loop.n_steps) == ("finished", 12)
        results.append((training.state(), losses(loop.run)))
    assert same(results[0][0], results[1][0])
    assert results[1][1] == results[0][1][at:]


def test_fit_trains_as_tristep_fit_does():
    data = [(torch.randn(4, 3, generator=torch.Generator().manual_seed(i)), torch.zeros(4, 1)) for i in range(3)]
    training, other = Training(), Training()
    torch.manual_seed(0)
    loop = LiveLoop.fit(training.net, torch.nn.MSELoss(), data, training.trainer, num_epoch=2, view=None).start()
    torch.manual_seed(0)
    fit = tristep.fit(other.net, torch.nn.MSELoss(), data, trainer=other.trainer, num_epoch=2, progress=False)
    assert losses(loop.run) == fit.losses
    assert same(training.state(), other.state())


class Watching(View):
    """Notes when it is refreshed, and when it is to catch up."""

    def __init__(self, now):
        super().__init__()
        self.now, self.refreshed, self.caught_up = now, [], []

    def scene(self):
        return Scene([Panel(Axis("", 0, 1), Axis("", 0, 1), [])])

    def refresh(self):
        self.refreshed.append(self.now[0])

    def catch_up(self):
        self.caught_up.append(self.now[0])


@pytest.mark.parametrize("mode", ["block", "task", "thread"])
def test_a_view_may_draw_every_20_milliseconds_and_at_each_pause(mode):
    training, now = Training(), [0]
    view = Watching(now)

    def steps():
        for _ in range(100):
            now[0] += 6
            yield

    async def main():
        loop = training.loop(steps, view=view, mode=mode)
        loop.runner.clock = lambda: now[0] / 1000
        loop.step(50)
        while loop.status == "running":
            await asyncio.sleep(0)
        loop.resume()
        await loop

    asyncio.run(main())
    assert view.caught_up == [300, 600]
    # 4 steps of 6 ms are the first that reach 20 ms; a slice begins anew after a pause, which is drawn by itself.
    assert view.refreshed == [*range(24, 300, 24), 300, *range(324, 600, 24), 600]


def test_a_recorder_is_not_looked_at_between_its_own_looks(monkeypatch):
    looks = []

    class Watched(Recorder):
        def look(self):
            looks.append(loop.n_steps)
            super().look()

    monkeypatch.setattr("tristep.viz.record.recorder.SECONDS", float("inf"))
    training = Training()
    loop = training.loop(training.step, recorder=Watched(training.trainer), mode="block")
    now = iter(range(10**6))
    loop.runner.clock = lambda: next(now)  # every step is a slice
    loop.step(20)
    assert looks == [20]
    assert loop.run.scalars["loss"].last_step == 20


@pytest.mark.parametrize("when_unseen", ["go on", "pause"])
def test_a_page_that_has_been_closed_is_noticed(when_unseen, monkeypatch):
    """Pages tell that they got a picture; here the page is closed after 50 steps of a second."""
    pytest.importorskip("anywidget")
    now, ticks = [0.0], itertools.count()

    def steps():
        for step in range(200):
            now[0] += 1.0
            if step < 50:
                widget._handle_custom_msg({"kind": "seen"}, [])
            yield 0.5

    loop = LiveLoop(steps, mode="block", when_unseen=when_unseen)
    loop.runner.clock = lambda: next(ticks)  # every step is a slice
    loop.view.display.clock = loop.view.display.budget.clock = lambda: now[0]
    viz.set_renderer("canvas")
    widget = loop.view.widget()
    loop.start()
    assert loop.status == ("paused" if when_unseen == "pause" else "finished")
    assert "no page showed it after step 110" in loop.view.status()
    if when_unseen == "pause":
        assert loop.n_steps == 110
        widget._handle_custom_msg({"kind": "seen"}, [])
        loop.step(20)
        assert loop.n_steps == 130
        assert "no page" not in loop.view.status()
    widget.close()


def test_a_view_that_cannot_be_drawn_does_not_end_training():
    class Broken(Watching):
        def refresh(self):
            raise ValueError("no ink")

    training = Training()
    loop = training.loop(training.steps(3), view=Broken([0]))
    with pytest.warns(RuntimeWarning, match="no ink"):
        loop.start()
    assert (loop.status, loop.n_steps, loop.view) == ("finished", 3, None)


def _texts(scene):
    return [str(layer.texts) for panel in scene.panels for layer in panel.layers if isinstance(layer, Text)]


def test_the_live_view_shows_losses_rates_and_how_far_it_is():
    training = Training()
    loop = training.loop(training.step, view="live", name="first")
    view = loop.view
    assert "first: ready, step 0" in _texts(view.scene())[0]
    loop.step(20)
    loop.snapshot("fork")
    scene = view.scene()
    assert "first: paused, step 20, learning rate 0.02" in _texts(scene)[0]
    lines = [layer for panel in scene.panels for layer in panel.layers if isinstance(layer, Line)]
    assert any(np.allclose(line.y, losses(loop.run)) for line in lines if line.y.ndim == 1)
    assert any(np.allclose(line.y, 0.02) for line in lines if line.y.ndim == 1)
    loop.branch("second", multiplier=0.5)
    loop.step(5)
    scene = view.scene()
    assert "second: paused, step 25, learning rate 0.01 (× 0.5)" in _texts(scene)[0]
    assert {name for name, _, _ in scene.legend()} >= {"first", "second"}
    assert view.describe().startswith("second: paused, step 25")
    figure = view.figure()
    assert any("second: paused" in text.get_text() for axes in figure.axes for text in axes.texts)


def test_what_the_live_views_controls_do():
    training = Training()
    loop = training.loop(training.step, view="live")
    view = loop.view
    loop.step(3)
    view.on_control("multiplier", 0.25, 8)
    assert loop.multiplier == 0.25
    control = next(control for control in view.scene().controls if control.name == "multiplier")
    assert control.remote
    assert control.values[control.index] == 0.25
    assert 1.0 in control.values  # where it begins: a slider's first value lies on its grid
    view.on_button("step")
    assert loop.n_steps == 4
    view.on_button("snapshot")
    assert list(loop.snapshots) == ["step 4"]
    view.on_button("branch")
    assert loop.run.name == "branch 1"
    assert "now in 'branch 1'" in _texts(view.scene())[0]
    view.on_button("stop")
    assert loop.status == "stopped"
    view.on_button("resume")
    assert "nothing to go on with" in _texts(view.scene())[0]
    assert {button.name for button in view.scene().buttons} == {"pause", "resume", "step", "stop", "snapshot", "branch"}


def test_the_multiplier_is_said_at_once_by_a_loop_that_does_not_run():
    pytest.importorskip("anywidget")
    training = Training()
    loop = training.loop(training.step, view="live", name="first")
    view = loop.view
    with view:
        canvas = view.widget()
        for steps, quarter in ((0, 0.005), (3, 0.005)):
            for index, words in ((8, f"learning rate {quarter:g} (× 0.25)"), (12, "learning rate 0.02, drawing")):
                assert MULTIPLIERS[index] in (0.25, 1.0)
                canvas._handle_custom_msg({"kind": "control", "name": "multiplier", "index": index}, [])
                assert words in canvas.payload.decode(errors="replace")
            if not steps:
                loop.step(3)


def test_the_live_view_says_what_went_wrong():
    def steps():
        yield 1.0
        raise ValueError("out of <range>")

    loop = LiveLoop(steps, mode="block")
    with pytest.raises(ValueError, match="out of"):
        loop.start()
    assert _texts(loop.view.scene())[0] == "run: failed after step 1\nValueError: out of <range>"
    names = {button.name for button in loop.view.scene().buttons}
    assert names == {"pause", "resume", "step", "stop"}  # without a trainer there are no snapshots


def test_a_button_resumes_in_the_background():
    training = Training()

    async def main():
        loop = training.loop(view="live")
        loop.step(2)
        loop.view.on_button("resume")
        assert (loop.status, loop.n_steps) == ("running", 2)
        await loop
        assert loop.n_steps == 30

    asyncio.run(main())


def shown(loop, monkeypatch):
    """A canvas that shows the loop, and its frames to come: what they say, and the thread that sent them."""
    pytest.importorskip("anywidget")
    viz.set_renderer("canvas")
    monkeypatch.setattr(
        loop.view.display, "budget", FrameBudget(most=100.0, clock=lambda: 0.0)
    )  # due once; others are put off
    canvas, frames = loop.view.widget(), []

    def note(_):
        frames.append((_texts(loop.view.display.shown)[0], threading.get_ident()))

    canvas.observe(note, "payload")
    return canvas, frames


def press(canvas, name):
    canvas._handle_custom_msg({"kind": "button", "name": name}, [])


@pytest.mark.parametrize("name", ["pause", "stop"])
def test_nothing_is_drawn_after_the_frame_that_says_it_has_ended(name, monkeypatch):
    training, pressed = Training(), threading.Event()

    def steps():
        for number, loss in enumerate(training.steps(10**6)):
            if number == 3:
                pressing.start()
                pressed.wait()  # while the button waits for the end of this step
            yield loss

    loop = sliced(training.loop(steps, mode="task", view="live"))
    canvas, frames = shown(loop, monkeypatch)
    begin = loop.view.on_button
    monkeypatch.setattr(loop.view, "on_button", lambda name: (pressed.set(), begin(name)))
    pressing = threading.Thread(target=press, args=(canvas, name))

    async def main():
        loop.start()
        await ended(loop)
        pressing.join()

    asyncio.run(main())
    loop.view.catch_up()  # as a timer would
    said = [words for words, _ in frames if ": running" not in words]
    assert len(said) == 1
    assert said == [words for words, _ in frames[-1:]]
    assert f"{loop.status}, step {loop.n_steps}," in said[0]
    loop.view.close()


@pytest.mark.parametrize("mode", ["task", "thread"])
def test_a_step_may_draw_while_a_button_waits_for_its_end(mode, monkeypatch):
    training, pressed = Training(), threading.Event()

    def steps():
        for number, loss in enumerate(training.steps(10**6)):
            if number == 3:
                pressing.start()
                pressed.wait()
                loop.view.refresh()
            yield loss

    loop = training.loop(steps, mode=mode, view="live")
    canvas, frames = shown(loop, monkeypatch)
    rest = loop.runner.gate.at_rest

    def at_rest():
        if threading.current_thread() is pressing:
            pressed.set()
        return rest()

    monkeypatch.setattr(loop.runner.gate, "at_rest", at_rest)
    pressing = threading.Thread(target=press, args=(canvas, "stop"), daemon=True)

    async def main():
        loop.start()
        await ended(loop)

    running = threading.Thread(target=asyncio.run, args=(main(),), daemon=True)
    running.start()
    for thread in (running, pressing):
        thread.join(60)
        assert not thread.is_alive()
    assert [words for words, _ in frames if ": stopped" in words] == [words for words, _ in frames[-1:]]
    loop.view.close()


def test_what_another_thread_puts_off_is_drawn_by_the_event_loop_of_the_steps(monkeypatch):
    training = Training()

    async def main():
        loop = training.loop(training.step, view="live")
        _, frames = shown(loop, monkeypatch)

        async def refresh():
            for loop.view.message in ("first", "second"):
                loop.view.refresh()

        async def drawn():
            while len(frames) < 2:
                await asyncio.sleep(0)

        await asyncio.to_thread(asyncio.run, refresh())
        await asyncio.wait_for(drawn(), 60)
        loop.view.close()
        return [(words.split("\n")[1], thread == threading.get_ident()) for words, thread in frames]

    assert asyncio.run(main()) == [("first", False), ("second", True)]


def test_the_last_picture_has_no_room_for_what_comes_next(monkeypatch):
    pytest.importorskip("ipywidgets")
    viz.set_renderer("ipywidgets")
    training = Training()
    loop = training.loop(view="live")
    box = loop.view.widget()

    def ends(scene):
        return [(axis.low, axis.high) for panel in scene.panels for axis in (panel.x, panel.y)]

    for n_steps in (5, 12):
        loop.step(n_steps)
        assert ends(box.scene) == ends(loop.view.scene())
    loop.resume()
    assert loop.status == "finished"
    assert ends(box.scene) == ends(loop.view.scene())
    loop.view.close()


def test_a_running_loop_that_nothing_refers_to_can_be_stopped():
    training, done = Training(), []

    def steps():
        for _ in range(10**6):
            done.append(training.step())
            yield

    async def main():
        training.loop(steps, mode="task", view=None).start()
        await asyncio.sleep(0)
        gc.collect()
        stop_loops()
        await asyncio.sleep(0)
        return len(done)

    assert asyncio.run(main()) == len(done) > 0


def test_two_loops_do_not_train_with_one_trainer():
    training = Training()

    def steps():
        with pytest.raises(RuntimeError, match="trains with this trainer at this moment: pause or stop it first"):
            training.loop().start()
        yield

    assert training.loop(steps).start().status == "finished"


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"steps": 3}, TypeError, "steps is a int: must be a generator function, an iterator or a callable"),
        ({"trainer": "adam"}, TypeError, "trainer must be a Trainer, a torch.optim.Optimizer or None, got str"),
        ({"recorder": 1}, TypeError, "recorder must be a Recorder or None"),
        ({"stateful": [3]}, TypeError, "stateful\\[0\\] is a int: it needs state_dict and load_state_dict"),
        ({"view": "curves"}, TypeError, "view='curves': must be 'live', None or a View"),
        ({"mode": "fiber"}, ValueError, "mode='fiber'.*'task'"),
        ({"frames_per_second": 0}, ValueError, "frames_per_second=0"),
    ],
)
def test_bad_arguments(options, error, message):
    with pytest.raises(error, match=message):
        LiveLoop(**{"steps": lambda: None} | options)


def test_what_needs_a_trainer_says_so():
    loop = LiveLoop(lambda: None, view=None)
    for action in (lambda: loop.snapshot(), lambda: loop.branch(), lambda: loop.set_learning_rate(1.0)):
        with pytest.raises(ValueError, match="make the loop with trainer=..."):
            action()
    with pytest.raises(ValueError, match="make the loop with trainer=..."):
        loop.multiplier = 2.0
    assert loop.learning_rate is None


def test_bad_settings_change_nothing():
    training = Training()
    loop = training.loop(training.step)
    loop.step(2)
    before = training.state()
    for action, message in [
        (lambda: loop.branch("run"), "there is a run of that name already"),
        (lambda: loop.branch("b", "nowhere"), "there is no snapshot of that name"),
        (lambda: loop.branch("b", learning_rate=-1), "learning_rate=-1"),
        (lambda: loop.branch("b", multiplier=float("nan")), "multiplier=nan"),
        (lambda: loop.pick("b"), "there is no run 'b'"),
        (lambda: loop.set_learning_rate(-0.1), "lr=-0.1"),
        (lambda: setattr(loop, "multiplier", -1), "multiplier=-1"),
        (lambda: loop.step(0), "n=0"),
    ]:
        with pytest.raises((ValueError, KeyError), match=message):
            action()
    assert same(training.state(), before)
    assert len(loop.runs) == 1


def test_a_task_needs_an_event_loop():
    with pytest.raises(RuntimeError, match="needs a running event loop.*use 'thread' or 'block'"):
        LiveLoop(lambda: None, view=None, mode="task").start()


def test_numbers_that_are_none():
    with pytest.raises(TypeError, match="accuracy must be a number, got 'high'"):
        LiveLoop(iter([{"accuracy": "high"}]), view=None).start()
    with pytest.raises(ValueError, match="loss has shape \\(2,\\): must be a single number"):
        LiveLoop(iter([torch.zeros(2)]), view=None).start()
