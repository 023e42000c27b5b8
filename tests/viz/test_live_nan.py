"""Live loops whose training goes wrong: a loss that is not finite, and functions that lack their `yield`."""

import asyncio
import math

import pytest
import torch
from live_training import sliced

import tristep
from tristep.viz import LiveLoop, Recorder

BAD = 40  # the step whose batch has a NaN


def _batch(step, bad=BAD):
    return torch.full((2, 3), math.nan if step == bad else 1.0 / (step + 10))


def _training(source="trainer", bad=BAD, steps=200, **options):
    torch.manual_seed(0)
    net = torch.nn.Linear(3, 1)
    if source == "trainer":
        trainer = tristep.Trainer(net, "adam", {"learning_rate": 1e-3} | options)
    else:
        trainer = (tristep if source == "tristep" else torch).optim.Adam(net.parameters(), lr=1e-3)
    state = {"step": 0}

    def train():
        for _ in range(steps):
            state["step"] += 1
            trainer.zero_grad()
            loss = net(_batch(state["step"], bad)).square().mean()
            loss.backward()
            trainer.step(1) if source == "trainer" else trainer.step()
            yield loss

    return net, trainer, train


def _ended(loop):
    async def run():
        loop.start()
        await loop

    with pytest.raises(FloatingPointError):
        asyncio.run(run())
    return str(loop.exception)


@pytest.mark.parametrize("mode", ["block", "task", "thread"])
@pytest.mark.parametrize("source", ["trainer", "tristep", "torch"])
@pytest.mark.parametrize("recorded", [False, True])
def test_a_loop_fails_at_nan(source, mode, recorded):
    net, trainer, train = _training(source)
    recorder = Recorder(trainer) if recorded else None
    loop = LiveLoop(train, trainer=trainer, recorder=recorder, mode=mode)
    words = _ended(loop)
    assert words.startswith(f"loss is nan at step {BAD}, and weights are not finite")
    assert "stop_at_nan=False" in words
    assert loop.status == "failed"
    assert not torch.isfinite(net.weight).all()
    assert f"step {BAD}" in loop.view.status()


def test_the_step_that_is_named_is_the_first_also_where_later_losses_arrive_at_the_end(monkeypatch):
    monkeypatch.setattr("tristep.viz.record.recorder.SECONDS", math.inf)
    _, trainer, train = _training()
    recorder = Recorder(trainer)

    def steps():
        for step, loss in enumerate(train(), start=1):
            if step == BAD + 1:
                recorder.poll()  # brings the loss of step 40, and nothing of this one
            yield loss

    loop = sliced(LiveLoop(steps, trainer=trainer, recorder=recorder, view=None, mode="block"))
    assert _ended(loop).startswith(f"loss is nan at step {BAD}, ")


@pytest.mark.parametrize("steps", [BAD, BAD + 3, 200], ids=["the last step", "one of the last steps", "a pause"])
def test_nan_in_the_last_steps_or_before_a_pause_is_told_and_a_branch_trains_on(steps):
    net, trainer, train = _training(steps=steps)
    loop = LiveLoop(train, trainer=trainer, view=None, mode="block")
    if steps == 200:
        loop.step(2)
        loop.snapshot("finite")
    with pytest.raises(FloatingPointError, match=f"step {BAD}"):
        loop.step(BAD - 1) if steps == 200 else loop.start()
    if steps == 200:
        assert loop.can_go_on
        loop.branch(at="finite")
        loop.step(50)  # its batches are those after the bad one
        assert loop.status == "paused"
        assert torch.isfinite(net.weight).all()


def test_a_step_that_the_optimizer_skips_does_not_end_a_training():
    net, trainer, train = _training(skip_nonfinite=True)
    loop = LiveLoop(train, trainer=trainer, view=None, mode="block").start()
    assert (loop.status, loop.n_steps, dict(loop.snapshots)) == ("finished", 200, {})
    assert torch.isfinite(net.weight).all()


def test_nan_is_let_pass_if_asked():
    net, trainer, train = _training()
    loop = LiveLoop(train, trainer=trainer, view=None, mode="block", stop_at_nan=False).start()
    assert (loop.status, loop.n_steps) == ("finished", 200)
    assert torch.isnan(net.weight).all()


def test_without_a_trainer_the_loss_alone_tells():
    loop = LiveLoop(({"train_loss": 1.0 if k < 5 else math.inf} for k in range(10)), view=None, mode="block")
    assert _ended(loop).startswith("train_loss is inf at step 6.")
    other = LiveLoop(({"loss": 1.0, "accuracy": math.nan} for _ in range(10)), view=None, mode="block").start()
    assert other.status == "finished"


@pytest.mark.parametrize("source", ["trainer", "tristep", "torch"])
def test_a_function_without_yield_is_refused_after_its_first_call(source):
    _, trainer, train = _training(source, bad=None, steps=20)
    calls = []

    def training():
        calls.append(1)
        for _ in train():
            pass

    loop = LiveLoop(training, trainer=trainer, view=None, mode="block")
    with pytest.raises(ValueError, match=r"training\(\) has taken 20 steps .*`yield loss`"):
        loop.start()
    assert len(calls) == 1


def test_a_function_that_makes_the_generator_is_taken_for_it():
    _, trainer, train = _training(bad=None, steps=20)
    loop = LiveLoop(lambda: train(), trainer=trainer, view=None, mode="block").start()
    assert (loop.status, loop.n_steps, len(loop.run.scalars["loss"])) == ("finished", 20, 20)
