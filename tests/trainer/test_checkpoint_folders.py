"""The folder of checkpoints: files and folders of others in it, and others who save into it."""

import importlib
import os
import shutil
import signal

import pytest
import torch
from torch import nn

from tristep import CheckpointManager, Trainer

safetensors = pytest.importorskip("safetensors", reason="files need it")
pytest.importorskip("safetensors.torch", reason="files need it")

posix = pytest.mark.skipif(os.name != "posix", reason="needs POSIX processes and locks")
PARTS = ("model", "trainer", "training")


def _training(folder, steps=0, **options):
    net = nn.Linear(2, 2)
    with torch.no_grad():
        net.weight.zero_()
    trainer = Trainer(net, "sgd", {"learning_rate": 1.0, "momentum": 0.5})
    manager = CheckpointManager(folder, trainer, net, **{"asynchronous": False} | options)
    for _ in range(steps):
        _step(manager)
        manager.save()
    return manager


def _step(manager):
    for param in manager.net.parameters():
        param.grad = torch.ones_like(param)
    manager.trainer.step(1)


def _names(folder):
    return sorted(os.listdir(folder))


# ---- files and folders of others -------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", PARTS)
def test_a_file_of_another_checkpoint_is_noticed(part, tmp_path):
    """Of another step, or of the same step of another training."""
    manager = _training(tmp_path, 2)
    first, second = (tmp_path / f"step-000000000{k}" for k in (1, 2))
    shutil.copy(first / f"{part}.safetensors", second)
    mixed = "its files are of different checkpoints"
    message = "step-0000000002: .*of step 1, its folder" if part == "training" else mixed
    with pytest.warns(UserWarning, match=message):
        assert manager.resume().step == 1
    assert manager.trainer.optimizer.num_update == 1
    assert manager.net.weight[0, 0] == -1.0
    _training(tmp_path / "elsewhere", 1)
    shutil.copy(tmp_path / "elsewhere" / first.name / f"{part}.safetensors", first)
    with pytest.raises(ValueError, match=mixed):
        manager.trainer.resume(first, manager.net)


def test_a_checkpoint_with_the_name_of_another_step_is_refused(tmp_path):
    manager = _training(tmp_path, 1)
    (tmp_path / "step-0000000001").rename(tmp_path / "step-0000000007")
    with pytest.raises(ValueError, match="it is of step 1, its folder has the name of another step"):
        manager.resume()
    (tmp_path / "step-0000000007").rename(tmp_path / "good")  # no name of a step, and given as the one to resume
    assert manager.trainer.resume(tmp_path / "good", manager.net).step == 1


def test_only_what_is_certainly_a_checkpoint_is_removed_or_counted(tmp_path):
    (tmp_path / "step-0000000001").mkdir()
    (tmp_path / "step-0000000001" / "thesis.txt").write_text("mine")
    (tmp_path / "step-0000000002").write_text("a file")
    (tmp_path / "step-9999999999").mkdir()
    (tmp_path / "step-9999999999" / "pytorch_model.bin").write_text("mine")
    manager = _training(tmp_path, 3, max_to_keep=1)
    foreign = ["step-0000000001", "step-0000000002", "step-9999999999"]
    assert _names(tmp_path) == [".lock", *foreign[:2], "step-0000000003", foreign[2]]
    assert (tmp_path / "step-0000000001" / "thesis.txt").read_text() == "mine"
    assert manager.resume().step == 3
    (tmp_path / "step-0000000003" / "notes.txt").write_text("the good one")
    for _ in range(3):
        _step(manager)
        manager.save()
    assert _names(tmp_path) == [".lock", *foreign[:2], "step-0000000003", "step-0000000006", foreign[2]]


def test_the_same_step_saved_again_replaces_it_and_leaves_folders_of_others(tmp_path):
    (tmp_path / "step-0000000001").mkdir()
    (tmp_path / "step-0000000001" / "model.safetensors").write_text("not one of ours")
    manager = _training(tmp_path, 1)
    for k in range(2):
        manager.save(metadata=k)
        assert _names(tmp_path) == [".lock", "step-0000000001", f"step-0000000001-{k + 2}"]
    assert (manager.latest().step, manager.latest().metadata) == (1, 1)
    assert manager.resume().metadata == 1


def test_a_damaged_checkpoint_takes_no_place_of_a_whole_one(tmp_path):
    manager = _training(tmp_path, 2, max_to_keep=2)
    (tmp_path / "step-0000000002" / "training.safetensors").write_bytes(b"nothing")
    _step(manager)
    manager.save()
    assert [each.step for each in manager.all_checkpoints()] == [1, 3]


# ---- others who save, or remove --------------------------------------------------------------------------------------


def test_checkpoints_of_later_steps_are_told_and_the_new_one_stays(tmp_path):
    """A script that is run again from the beginning, without resuming."""
    _training(tmp_path, 4, max_to_keep=2).close()
    again = _training(tmp_path, max_to_keep=2)
    _step(again)
    with pytest.warns(UserWarning, match="has step-0000000004, of a later step than this training, which is at 1"):
        again.step()
    again.save()  # it has been said
    assert [each.step for each in again.all_checkpoints()] == [1, 3, 4]


def test_another_trainer_of_the_process_that_saves_here_too(tmp_path):
    """A cell that is run again makes a new one, which may go on; the old one may not, while the new one does."""
    first = _training(tmp_path, 1)
    second = _training(tmp_path)
    assert second.resume().step == 1
    _step(second)
    second.save()
    _step(first)
    with pytest.raises(RuntimeError, match="another trainer of this process has begun to save here"):
        first.save()
    assert first.saved_step == 1
    assert [each.step for each in second.all_checkpoints()] == [1, 2]
    second.close()
    first.save()
    CheckpointManager(tmp_path, first.trainer, asynchronous=False).save()  # of the same training
    first.save()


class _Process:
    """A forked process that calls a function, and says what it raised; it ends when it is told."""

    def __init__(self, call):
        said, there = os.pipe()
        wait, self._go = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self._go)
            try:
                call()
                answer = "done"
            except BaseException as error:
                answer = f"{type(error).__name__}: {error}"
            os.write(there, answer.encode() + b"\n")
            os.read(wait, 1)
            os._exit(0)
        os.close(there)
        os.close(wait)
        with open(said) as file:
            self.said = file.readline().rstrip("\n")

    def end(self, number=None):
        if number is None:
            os.close(self._go)
        else:
            os.kill(self.pid, number)
        os.waitpid(self.pid, 0)


@posix
def test_another_process_that_saves_here_is_refused(tmp_path):
    """Until the manager is closed, or its process has ended, also if processes that it forked have not."""
    manager = _training(tmp_path, 1)
    other = _Process(lambda: _training(tmp_path).save())
    assert other.said.startswith("RuntimeError: ")
    assert f"process {os.getpid()} on " in other.said
    other.end()
    reading = _Process(lambda: manager.all_checkpoints()[0].step + manager.resume().step)
    assert reading.said == "done"
    reading.end()
    inherited = _Process(lambda: None)  # has all open files of this process
    manager.close()
    wait, go = os.pipe()

    def save_and_fork():
        other = _training(tmp_path)
        other.resume()
        other.save()
        if os.fork() == 0:
            os.close(go)
            os.read(wait, 1)
            os._exit(0)

    owner = _Process(save_and_fork)
    assert owner.said == "done"
    with pytest.raises(RuntimeError, match=f"process {owner.pid} on .* saves checkpoints here"):
        manager.save()
    assert [each.name for each in tmp_path.glob("step-*")] == ["step-0000000001-1"]
    owner.end(signal.SIGKILL)
    manager.save()
    os.close(go)
    os.close(wait)
    inherited.end()
    assert [each.step for each in manager.all_checkpoints()] == [1]


def test_a_checkpoint_that_is_replaced_while_it_is_read_is_not_damaged(tmp_path, monkeypatch):
    """Somebody who saves here removes the one that is read: there is a newer one."""
    resuming = importlib.import_module("tristep.trainer.checkpoint.folder")
    manager, read, calls = _training(tmp_path, 1), resuming.read_checkpoint, []

    def replaced(path):
        calls.append(path)
        if len(calls) == 1:
            manager.save()
        return read(path)

    monkeypatch.setattr(resuming, "read_checkpoint", replaced)
    assert _training(tmp_path).resume().step == 1
    assert [path.name for path in calls] == ["step-0000000001", "step-0000000001-1"]
