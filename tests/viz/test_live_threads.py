"""The live loop: other threads, other loops, and loops that nothing refers to."""

import asyncio
import gc
import subprocess
import sys
import threading

import pytest
from live_training import Training, ended, plain, same, sliced

from tristep import viz
from tristep.viz.live import stop_loops


@pytest.mark.sample(2)
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
        loop.clock = lambda: next(now)
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


@pytest.mark.sample(1)
@pytest.mark.parametrize("mode", ["task", "thread", "block"])
@pytest.mark.parametrize("shared", ["trainer", "view"])
def test_a_loop_stops_a_running_one_that_shares_its_trainer_or_its_view(shared, mode):
    """It may have been started in another cell, whose function reads names that are new by now."""
    training, others = Training(), Training()
    view = viz.LossView(viz.RunSet([viz.Run("both")])) if shared == "view" else "live"

    async def main():
        started = []

        def first():
            while True:
                if mode == "block" and not started:
                    started.append(second)
                    second.start()
                yield training.step()

        def some():
            for _ in range(30):
                yield (training if shared == "trainer" else others).step()

        loop = training.loop(first, mode=mode, view=view, name="one")
        second = (training if shared == "trainer" else others).loop(some, mode=mode, view=view, name="two")
        loop.start()
        if mode != "block":
            while loop.n_steps < 3:
                await asyncio.sleep(0)
            assert viz.loops() == [loop]
            second.start()
            await second
        assert (loop.status, second.status) == ("stopped", "finished")
        assert loop.remark == f"loop 'two' has begun with its {shared}"
        assert second.remark.startswith(f"loop 'one' with the same {shared} was stopped after step ")
        if shared == "trainer":
            assert "has begun with its trainer" in loop.view.describe()
            assert training.trainer.optimizer.num_update == loop.n_steps + second.n_steps
            assert "loop 'one' with the same trainer was stopped" in second.view.describe()
        assert repr(viz.loops()) == "no loop is running or paused"

    stop_loops()
    asyncio.run(main())


@pytest.mark.sample(0)
def test_a_program_that_ends_while_a_loop_runs_in_a_thread_ends_well():
    program = """
import torch, tristep
from tristep.viz import LiveLoop, Recorder
net = torch.nn.Linear(64, 64)
trainer = tristep.Trainer(net, "sgd", engine="eager")
recorder = Recorder(trainer, to=[lambda step, values: None])
def train():
    while True:
        trainer.zero_grad()
        loss = net(torch.ones(64, 64)).square().mean()
        loss.backward()
        trainer.step(1)
        yield loss
loop = LiveLoop(train, trainer=trainer, recorder=recorder, mode="thread", view=None).start()
while loop.n_steps < 5:
    pass
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
