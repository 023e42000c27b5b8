"""The live loop: learning rates, snapshots, branches and epochs do what they say."""

import numpy as np
import pytest
import torch
from live_training import KINDS, Training, losses, plain, same

import tristep
from tristep.viz import LiveLoop, Recorder


@pytest.mark.sample(2)
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


def test_a_step_that_sets_the_rate_or_its_schedule_itself_is_obeyed():
    training, scheduled = Training(), Training("trainer with schedule")
    schedule = scheduled.trainer.optimizer.lr_scheduler
    changes = {
        training: lambda: training.trainer.set_learning_rate(0.5),
        scheduled: lambda: setattr(schedule, "base_lr", 0.5),
    }
    for trained, change in changes.items():

        def steps(trained=trained, change=change):
            yield trained.step()
            change()
            yield trained.step()

        loop = trained.loop(steps)
        loop.multiplier = 2
        loop.start()
    assert training.trainer.learning_rate == schedule.base_lr == 0.5
    assert scheduled.trainer.optimizer.lr_scheduler is schedule


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


@pytest.mark.sample(2)
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
    slower = loop.branch("slower", "fork")
    loop.multiplier = 0.5
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
    loop.branch("rate 0.02 again", "fork", learning_rate=0.02)  # a snapshot is no view of what trains on
    loop.step(6)
    assert same(training.state(), ends[0.02])


@pytest.mark.sample(3)
@pytest.mark.parametrize("kind", ["trainer", "torch"])
@pytest.mark.parametrize("at", [0, 3, 4, 5, 9, 11])
def test_fit_goes_back_in_its_data(kind, at):
    data = torch.utils.data.TensorDataset(torch.randn(20, 3, generator=torch.Generator().manual_seed(1)), torch.zeros(20, 1))
    results = []
    for snapshot_at in (None, at):
        training = Training(kind)
        loader = torch.utils.data.DataLoader(data, batch_size=5, shuffle=True)  # 4 batches an epoch
        loop = LiveLoop.fit(training.net, torch.nn.MSELoss(), loader, training.trainer, epochs=3, view=None)
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


def test_fit_trains_as_tristep_fit_does_and_goes_back_to_its_end_from_the_middle_of_an_epoch():
    data = [(torch.randn(4, 3, generator=torch.Generator().manual_seed(i)), torch.zeros(4, 1)) for i in range(3)]
    training, other = Training(), Training()
    torch.manual_seed(0)
    loop = LiveLoop.fit(training.net, torch.nn.MSELoss(), data, training.trainer, epochs=2, view=None)
    loop.step(2)
    loop.snapshot("middle")
    loop.resume()
    torch.manual_seed(0)
    fit = tristep.fit(other.net, torch.nn.MSELoss(), data, trainer=other.trainer, epochs=2, progress=False)
    assert losses(loop.run) == fit.losses
    assert same(training.state(), other.state())
    loop.snapshot("end")
    loop.branch("again", "middle")
    loop.step(2)
    loop.branch("over", "end")
    loop.resume()
    assert (loop.status, loop.n_steps, len(loop.runs["again"].scalars["loss"])) == ("finished", 6, 2)
    loop.pick("again")
    loop.resume()
    assert (loop.status, loop.n_steps, len(loop.run.scalars["loss"])) == ("finished", 6, 4)
