"""The live loop: what an interrupt does, in a step, between two steps and after the last one."""

import asyncio
import os
import signal

import pytest
from live_training import Training, Watching, ended, plain, same, sliced


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
    """As a kernel does it: while a cell runs it has another handler, and then restores what was there."""
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
    monkeypatch.setattr("tristep.viz.live.loop.in_notebook", lambda: notebook)
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
