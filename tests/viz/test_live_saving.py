"""The checkpoints of a live loop."""

import os
import signal

import pytest
import torch
from live_training import Training

from tristep import CheckpointManager
from tristep.trainer.checkpoint import folder as folders
from tristep.viz import LiveLoop


def _loop(folder, epochs=3, **options):
    training = Training()
    rng = torch.Generator().manual_seed(5)
    x = torch.randn(20, 3, generator=rng)
    data = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True)), 4, shuffle=True, generator=rng
    )
    manager = CheckpointManager(folder, training.trainer, training.net, **options)
    loop = LiveLoop.fit(
        training.net,
        torch.nn.MSELoss(),
        data,
        training.trainer,
        epochs=epochs,
        view=None,
        mode="block",
        checkpoint=manager,
    )
    return training, loop, manager


def _equal(training, other):
    return all(torch.equal(tensor, other.net.state_dict()[name]) for name, tensor in training.net.state_dict().items())


@pytest.mark.parametrize("mode", ["block", "thread"])
def test_a_loop_is_saved_and_resumed_in_the_middle_of_an_epoch(mode, tmp_path):
    expected, whole, _ = _loop(tmp_path / "whole")
    whole.start()
    _, loop, manager = _loop(tmp_path / "part", save_interval_steps=4, best="loss")
    loop.step(7)
    loop.stop()
    assert [(each.step, list(each.metrics)) for each in manager.all_checkpoints()] == [(4, ["loss"]), (7, [])]
    resumed, rest, _ = _loop(tmp_path / "part")
    rest.mode = mode
    rest.start()
    rest.wait()
    assert rest.n_steps == whole.n_steps == 15
    assert _equal(resumed, expected)
    assert manager.latest().step == 15


def test_a_loop_reopened_by_a_branch_saves_on(tmp_path):
    _, loop, manager = _loop(tmp_path, save_interval_steps=5, max_to_keep=None)
    loop.step(2)
    loop.snapshot("early")
    loop.resume()
    assert loop.status == "finished"
    loop.branch("again", "early")
    with pytest.warns(UserWarning, match="step-0000000015, of a later step .* resume would go on from that one"):
        loop.step(4)
    assert manager.trainer.optimizer.num_update == 6
    loop.stop()
    assert manager.latest().step == 15  # of the run before
    assert 6 in [each.step for each in manager.all_checkpoints()]


@pytest.mark.skipif(os.name != "posix", reason="needs POSIX signals")
def test_a_signal_saves_a_loop(tmp_path):
    training, loop, _ = _loop(tmp_path)
    came, before = [], signal.signal(signal.SIGTERM, lambda *_: came.append(folders.list_checkpoints(tmp_path)))
    try:
        training.net.register_forward_pre_hook(
            lambda *_: signal.raise_signal(signal.SIGTERM) if training.trainer.optimizer.num_update == 2 else None
        )
        loop.start()
    finally:
        signal.signal(signal.SIGTERM, before)
    ((path,),) = came
    assert path.name == "step-0000000003"


def test_a_checkpoint_that_cannot_be_written_fails_the_loop(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError("the disk is full")

    monkeypatch.setattr("tristep.trainer.loops.manager.write_checkpoint", fail)
    _, loop, _ = _loop(tmp_path)
    with pytest.raises(OSError, match="the disk is full"):
        loop.start()
    assert loop.status == "failed"


def test_the_manager_of_another_trainer_is_refused(tmp_path):
    with pytest.raises(ValueError, match="of another trainer than the loop's"):
        Training().loop(checkpoint=CheckpointManager(tmp_path, Training().trainer))
