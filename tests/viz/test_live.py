"""The live loop: training is the same to the bit however it runs, is paused or waited for."""

import asyncio
import functools
import gc
import threading
from functools import partial

import pytest
import torch
from live_training import KINDS, Training, losses, plain, same, sliced

import tristep
from tristep.viz import LiveLoop


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


@pytest.mark.parametrize("mode", ["block", "task", "thread"])
@pytest.mark.parametrize("kind", ["trainer", "torch"])
def test_numbers_that_are_drawn_elsewhere_change_nothing_in_a_loop_and_it_nothing_in_them(kind, mode):
    reference = Training(kind)
    expected_losses = [loss.item() for loss in reference.steps()]
    expected = reference.state(drawn=False)
    training, drawn = Training(kind), []
    loop = sliced(training.loop(training.step, mode=mode))

    async def to(step):
        """Some steps more, with draws wherever somebody else may draw: in a thread that is while it pauses."""
        while loop.n_steps < step:
            loop.step(2)
            while loop.status == "running":
                if mode == "task":
                    drawn.append(torch.rand(3))
                await asyncio.sleep(0)
            drawn.append(torch.rand(3))

    async def steer():
        loop.step(1)
        while loop.status == "running":
            await asyncio.sleep(0)
        torch.manual_seed(7)
        await to(11)
        loop.snapshot("fork")
        await to(21)
        drawn.append(torch.rand(3))
        loop.branch("again", at="fork")
        await to(29)
        loop.step()
        while loop.status == "running":
            await asyncio.sleep(0)

    asyncio.run(steer())
    assert losses(loop.runs["run"]) == expected_losses[:21]
    assert losses(loop.runs["again"]) == expected_losses[11:]
    assert same(training.state(drawn=False), expected)
    others = torch.Generator().manual_seed(7)
    if mode != "thread":  # which shares the numbers while it runs
        assert all(torch.equal(each, torch.rand(3, generator=others)) for each in drawn)


def test_who_waits_for_the_end_finds_the_numbers_of_all_steps(monkeypatch):
    seen, tell = threading.Event(), LiveLoop._tell

    def tell_late(loop):
        assert seen.wait(60)
        tell(loop)

    monkeypatch.setattr(LiveLoop, "_tell", tell_late)
    loop = LiveLoop(({"loss": float(k)} for k in range(30)), mode="thread")

    async def wait():
        loop.start()
        await loop

    asyncio.run(wait())
    found = losses(loop.run)
    seen.set()
    assert found == list(range(30))


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
        loop.clock = lambda: now[0]
        loop.start()
        while loop.status == "running":
            seen.append(loop.n_steps)
            await asyncio.sleep(0)
        assert loop.status == "finished"

    asyncio.run(main())
    assert sorted(set(seen)) == [0, 4, 8]  # 4 steps of 6 ms are the first that reach 20 ms


def test_others_have_several_turns_between_two_slices():
    """As many as a cell of a notebook takes to begin, so that it does not wait for a slice in each."""

    async def main():
        loop = sliced(Training().loop(lambda: None, mode="task")).start()
        await asyncio.sleep(0)
        seen = []
        while len(seen) < 40:
            seen.append(loop.n_steps)
            await asyncio.sleep(0)
        loop.stop()
        return seen

    assert len(set(asyncio.run(main()))) <= 40 / 4


def test_a_task_is_paused_by_the_end_of_its_event_loop_and_goes_on_in_another():
    expected, _ = plain("trainer")
    training, now = Training(), iter(range(10**6))  # a clock on which each step takes more than a slice
    loop = training.loop(mode="task")
    loop.clock = lambda: next(now)

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
        loop.clock = lambda: now[0]
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


@pytest.mark.parametrize("asked", [None, 4], ids=["all steps", "the last one asked for"])
def test_stop_closes_the_generator_after_the_step_at_hand(asked):
    closed = []

    def steps():
        try:
            for i in range(10):
                if i == 3:
                    loop.stop()
                yield i
        finally:
            closed.append(i)

    loop = Training().loop(steps)
    loop.start() if asked is None else loop.step(asked)
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


def test_after_an_exception_a_callable_may_be_gone_on_with_and_a_generator_not():
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
    loop = training.loop(1 / number for number in (1, 0, 2))
    with pytest.raises(ZeroDivisionError):
        loop.start()
    with pytest.raises(RuntimeError, match="its generator has been ended by the exception"):
        loop.resume()


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda: LiveLoop(int, trainer="adam"),
            TypeError,
            "trainer must be a Trainer, a torch.optim.Optimizer or None, got str",
        ),
        (lambda: LiveLoop(int, recorder=1), TypeError, "recorder must be a Recorder or None"),
        (
            lambda: LiveLoop(int, stateful=[3]),
            TypeError,
            "stateful\\[0\\] is a int: it needs state_dict and load_state_dict",
        ),
        (lambda: LiveLoop(int, view="curves"), TypeError, "view='curves': must be 'live', None or a View"),
        (lambda: LiveLoop(int, mode="fiber"), ValueError, "mode='fiber'.*'task'"),
        (lambda: LiveLoop(int, frames_per_second=0), ValueError, "frames_per_second=0"),
        (lambda: LiveLoop(int, stop_at_nan="yes"), TypeError, "stop_at_nan"),
        (lambda: LiveLoop(int, checkpoint="a"), TypeError, "checkpoint must be a CheckpointManager or None, got str"),
        (lambda: LiveLoop(int, mode="task").start(), RuntimeError, "needs a running event loop.*use 'thread' or 'block'"),
        (lambda: LiveLoop(iter([{"a": "high"}]), view=None).start(), TypeError, "a must be a number, got 'high'"),
        (
            lambda: LiveLoop(iter([{1: 2.0}]), view=None).start(),
            TypeError,
            "1 is the name .*: it must be a string",
        ),
        *(
            (partial(call, LiveLoop(int, view=None)), ValueError, "make the loop with trainer=...")
            for call in (
                LiveLoop.snapshot,
                LiveLoop.branch,
                lambda loop: loop.set_learning_rate(1.0),
                lambda loop: setattr(loop, "multiplier", 2.0),
            )
        ),
    ],
)
def test_what_does_not_fit_is_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()
    assert LiveLoop(int, view=None).learning_rate is None  # without a trainer there is none


def test_bad_settings_change_nothing():
    training = Training()
    loop = training.loop(training.step)
    loop.step(2)
    before = training.state()
    for action, message in [
        (lambda: loop.branch("run"), "there is a run of that name already"),
        (lambda: loop.branch("b", "nowhere"), "there is no snapshot of that name"),
        (lambda: loop.branch("b", learning_rate=-1), "learning_rate=-1"),
        (lambda: setattr(loop, "multiplier", float("nan")), "multiplier=nan"),
        (lambda: loop.pick("b"), "there is no run 'b'"),
        (lambda: loop.set_learning_rate(-0.1), "lr=-0.1"),
        (lambda: setattr(loop, "multiplier", -1), "multiplier=-1"),
        (lambda: loop.step(0), "n=0"),
    ]:
        with pytest.raises((ValueError, KeyError), match=message):
            action()
    assert same(training.state(), before)
    assert len(loop.runs) == 1


AGAIN = """
net = torch.nn.Linear(4, 1)
trainer = tristep.Trainer(net, "sgd", engine="eager")
def train():
    while True:
        trainer.zero_grad()
        loss = net(torch.ones(2, 4)).square().mean()
        loss.backward()
        trainer.step(1)
        yield loss
loop = LiveLoop(train, trainer=trainer, mode=mode)
"""


@pytest.mark.parametrize(("mode", "state"), [("task", "running"), ("task", "paused"), ("thread", "paused")])
def test_code_that_is_run_again_stops_the_loop_that_it_has_made_before(mode, state):
    names = {"torch": torch, "tristep": tristep, "LiveLoop": LiveLoop, "mode": mode}

    async def until(condition):
        while not condition():
            await asyncio.sleep(0)

    async def main():
        exec(AGAIN, names)
        first = names["loop"].start()
        await until(lambda: first.n_steps > 3)
        if state == "paused":
            first.pause()
        exec(AGAIN, names)
        second = names["loop"]
        assert first.status == "stopped"
        taken = first.n_steps
        second.start()
        await until(lambda: second.n_steps > 3)
        second.pause()
        assert second.n_steps == names["trainer"].optimizer.num_update
        assert first.n_steps == taken
        assert "another loop has taken its place" in first.view.describe()
        assert f"instead of the loop that this cell has made before, stopped after step {taken:,}" in second.view.describe()
        with pytest.raises(RuntimeError, match="nothing to go on with"):
            first.resume()
        second.stop()

    asyncio.run(main())


MADE = """
net = torch.nn.Linear(4, 1)
trainer = TRAINER
"""
NAMED = """
also, loss_function = net, torch.nn.MSELoss()
def one():
    trainer.zero_grad()
    loss = loss_function(net(torch.ones(2, 4)), torch.zeros(2, 1))
    loss.backward()
    trainer.step(*batch)
    return loss
def train(n=10**6):
    for _ in range(n):
        yield one()
def mine():
    global net, trainer
    for k in range(10**6):
        if k == 1:
            net = torch.nn.Linear(4, 1)
            trainer = TRAINER
        yield one()
class Steps:
    def train(self):
        yield from train()
    def __call__(self):
        return one()
"""
TRAINERS = {
    "trainer": ("tristep.Trainer(net, 'sgd', engine='eager')", "batch = [1]"),
    "torch": ("torch.optim.SGD(net.parameters(), 0.01)", "batch = []"),
}
REBOUND = {
    "all": (MADE, True),
    "net": ("net = torch.nn.Linear(4, 1)", True),
    "trainer": ("trainer = TRAINER", True),
    "gone": ("del trainer", True),
    "loss": ("loss_function = torch.nn.MSELoss()", False),
    "another name": ("also = torch.nn.Linear(4, 1)", False),
}
FORMS = {
    "function": "train",
    "generator": "train()",
    "partial": "functools.partial(train, 10**6)",
    "callable": "one",
    "method": "Steps().train",
    "object": "Steps()",
    "without a trainer": "train, trainer=None",
    "what it binds itself": "mine",
}


@pytest.mark.parametrize("kind", TRAINERS)
@pytest.mark.parametrize(
    ("form", "rebound"), [*((form, "all") for form in FORMS), *(("function", each) for each in REBOUND)]
)
@pytest.mark.parametrize("how", ["paused", "task", "thread"])
def test_a_loop_ends_before_it_trains_what_a_name_has_been_bound_to_since(form, rebound, kind, how, capsys):
    names = {"torch": torch, "tristep": tristep, "LiveLoop": LiveLoop, "functools": functools}
    made, batch = TRAINERS[kind]
    run = lambda code: exec(code.replace("TRAINER", made), names)  # noqa: E731
    run(f"{MADE}{batch}{NAMED}")
    given = FORMS[form] if "trainer=" in FORMS[form] else f"{FORMS[form]}, trainer=trainer"
    run(f"loop = LiveLoop({given}, view=None, mode={'block' if how == 'paused' else how!r})")
    loop, (code, ends) = names["loop"], REBOUND[rebound]
    ends = ends and form != "what it binds itself"

    async def until(condition):
        while not condition():
            await asyncio.sleep(0)

    async def main():
        if how != "paused":
            loop.start()
        else:
            loop.step(3)
        await until(lambda: loop.n_steps >= 3)
        with loop.at_rest():
            run(code)
            taken, weights = loop.n_steps, [each.clone() for each in names["net"].parameters()]
        if how == "paused" and ends:
            with pytest.raises(
                RuntimeError, match=r"nothing to go on with: '(net|trainer)' is no longer what this loop was given"
            ):
                loop.resume()
        elif ends:
            await until(lambda: loop.has_ended)
        elif rebound != "gone":
            loop.step(2) if how == "paused" else await until(lambda: loop.n_steps > taken + 2 or loop.has_ended)
            loop.stop()
            assert (loop.remark, loop.exception) == ("", None)
        if ends:
            assert (loop.status, loop.n_steps) == ("stopped", taken)
            assert "no longer what this loop was given" in loop.remark
            assert all(map(torch.equal, names["net"].parameters(), weights))

    asyncio.run(main())
    assert ("run: stopped after step" in capsys.readouterr().out) == (ends and how != "paused")


def test_loops_of_one_function_or_of_functions_of_several_names_run_side_by_side():
    def steps():
        while True:
            yield 1.0

    loops = [LiveLoop(each, view=None) for each in (steps, steps, lambda: 2.0, lambda: 2.0)]
    for loop in loops:
        loop.step(2)
    assert [(loop.status, loop.n_steps) for loop in loops] == [("paused", 2)] * 4


@pytest.mark.parametrize("kind", ["trainer", "torch"])
@pytest.mark.parametrize("end", ["finished", "stopped"])
def test_a_loop_that_has_ended_keeps_no_model_and_goes_on_where_there_is_one(kind, end):
    def made():
        torch.manual_seed(0)
        net = torch.nn.Linear(2, 1)
        trainer = tristep.Trainer(net, "adam") if kind == "trainer" else torch.optim.Adam(net.parameters())
        loop = LiveLoop.fit(net, torch.nn.MSELoss(), [(torch.ones(4, 2), torch.ones(4, 1))] * 6, trainer)
        return net, trainer, loop

    loop = made()[2]  # a loop that has not ended needs what it trains
    gc.collect()
    loop.step(4)
    if end == "stopped":
        loop.stop()
    else:
        loop.resume()
    gc.collect()
    assert loop.status == end
    assert len(loop.run.scalars["loss"]) == loop.n_steps
    assert f"{end}" in loop.view.describe()
    assert loop.learning_rate == 0.001
    with pytest.raises(RuntimeError, match="branch needs what this loop has trained, which is gone"):
        loop.branch()
    with pytest.raises(RuntimeError, match="snapshot needs"):
        loop.snapshot()
    kept = made()
    kept[2].step(2)
    kept[2].snapshot("here")
    kept[2].resume()
    assert kept[2].status == "finished"
    kept[2].branch("again", "here")
    kept[2].resume()
    assert (kept[2].status, kept[2].n_steps) == ("finished", 6)


def test_no_task_is_left_once_a_loop_that_was_awaited_has_ended(monkeypatch):
    monkeypatch.setattr("tristep.viz.live.loop.SLICE", 0)  # who awaits it looks as often as there is a turn
    loop = sliced(Training().loop(mode="task"))

    async def main():
        loop.step(3)
        loop.pause()
        loop.resume()
        await loop
        return asyncio.all_tasks() - {asyncio.current_task()}

    assert asyncio.run(main()) == set()
    assert (loop.status, loop.n_steps) == ("finished", 30)
