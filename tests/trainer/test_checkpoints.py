"""CheckpointManager: training resumed bit for bit; what stays; and whole checkpoints whatever happens meanwhile."""

import math
import os
import shutil
import threading

import numpy as np
import pytest
import torch
from torch import nn

import tristep
from tristep import CheckpointManager, Trainer, lr_scheduler
from tristep.trainer.checkpoint import folder as folders

safetensors = pytest.importorskip("safetensors", reason="files need it")
pytest.importorskip("safetensors.torch", reason="files need it")


class Training:
    """A net with dropout and running means, whose batches are random, too."""

    def __init__(self, optimizer="sgd", arguments=None, dtype=torch.float32, replicas=1, **options):
        torch.manual_seed(3)
        np.random.seed(3)  # noqa: NPY002
        self.net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 2)).to(dtype)
        self.nets = tristep.replicate(self.net, [torch.device("cpu")] * replicas) if replicas > 1 else [self.net]
        arguments = {"learning_rate": 0.05} if arguments is None else arguments
        self.trainer = Trainer(self.nets if replicas > 1 else self.net, optimizer, arguments, **options)
        self.dtype = dtype

    @property
    def model(self):
        return self.nets if len(self.nets) > 1 else self.net

    def step(self):
        scale = 1 + np.random.rand()  # noqa: NPY002
        self.trainer.zero_grad()
        for net in self.nets:
            loss = (net(torch.randn(6, 4, dtype=self.dtype)) * scale).float().square().mean()
            loss.backward()
        self.trainer.step(len(self.nets))
        return loss.detach()


def _same(a, b, everything):
    assert everything(a.trainer, []) | {"gradients": None} == everything(b.trainer, []) | {"gradients": None}
    for mine, other in zip(a.nets, b.nets, strict=True):
        for name, tensor in mine.state_dict().items():
            assert torch.equal(tensor, other.state_dict()[name]), name


SCHEDULE = {"lr_scheduler": lr_scheduler.FactorScheduler(2, 0.5, base_lr=0.1, warmup_steps=3), "momentum": 0.9}
TRAININGS = {
    "momentum and schedule": {"arguments": SCHEDULE},
    "average": {"optimizer": "adam", "arguments": {"ema_decay": 0.9, "clip_norm": 1.0, "state_dtype": "8bit"}},
    "replicas": {"replicas": 2, "arguments": {"momentum": 0.9, "learning_rate": 0.05}},
}


@pytest.mark.parametrize("kind", TRAININGS)
def test_a_resumed_training_goes_on_bit_for_bit(kind, tmp_path, everything):
    options = TRAININGS[kind]
    first = Training(**options)
    with CheckpointManager(tmp_path, first.trainer, first.model, save_interval_steps=3, stateful=[]) as manager:
        losses = []
        for _ in range(8):
            losses.append(float(first.step()))
            manager.step({"loss": losses[-1]}, {"losses": losses[:]})
    assert [each.step for each in manager.all_checkpoints()] == [3, 6]
    for folder in (tmp_path, manager.all_checkpoints()[0].path):
        second = Training(**options)
        for _ in range(2):
            second.step()
        found = second.trainer.resume(folder, second.model)
        assert found.metadata["losses"] == losses[: found.step]
        assert found.metrics == {"loss": losses[found.step - 1]}
        assert [float(second.step()) for _ in range(found.step, 8)] == losses[found.step :]
        _same(first, second, everything)


def test_the_files_are_those_that_other_programs_read(tmp_path):
    training = Training("adam")
    training.step()
    manager = CheckpointManager(tmp_path / "new" / "run", training.trainer, training.net, asynchronous=False)
    manager.save()
    (path,) = [each.path for each in manager.all_checkpoints()]
    assert path.name == "step-0000000001"
    found = safetensors.torch.load_file(path / "model.safetensors")
    assert found.keys() == training.net.state_dict().keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in training.net.state_dict().items())
    other = Training("adam")
    other.trainer.load_states(path / "trainer.safetensors")
    assert other.trainer.optimizer.num_update == 1


def test_an_empty_folder_changes_nothing(tmp_path, everything):
    training = Training()
    before = everything(training.trainer, training.net.parameters())
    for folder in (tmp_path, tmp_path / "missing"):
        found = training.trainer.resume(folder, training.net)
        assert (found.step, found.metrics, found.metadata, found.path) == (0, {}, None, None)
    assert everything(training.trainer, training.net.parameters()) == before
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError, match="this is a file, it must be a folder of checkpoints"):
        training.trainer.resume(tmp_path / "file")


def _save_losses(manager, training, losses):
    for loss in losses:
        training.step()
        manager.save(None if loss is None else {"loss": loss, "other": 1})


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("options", "kept", "best"),
    [
        ({"max_to_keep": 2}, [5, 6], None),
        ({"max_to_keep": None}, [1, 2, 3, 4, 5, 6], None),
        ({"max_to_keep": 1, "best": "loss"}, [3, 6], 3),
        ({"max_to_keep": 2, "best": "loss", "mode": "max"}, [4, 5, 6], 4),
    ],
)
def test_the_newest_and_the_best_stay(options, kept, best, tmp_path):
    training = Training()
    manager = CheckpointManager(tmp_path, training.trainer, **options)
    _save_losses(manager, training, [2.0, math.nan, 1.0, torch.tensor([5.0]), None, np.float32(3)])
    assert [each.step for each in manager.all_checkpoints()] == kept
    assert manager.latest().step == 6
    assert manager.saved_step == 6
    if best is not None:
        assert manager.best().step == best
        again = CheckpointManager(tmp_path, training.trainer, **options)  # in another process it would know as much
        assert again.best().step == best
    else:
        with pytest.raises(ValueError, match="no metric says which checkpoint is the best"):
            manager.best()


class _Gate:
    """Lets the thread that writes wait."""

    def __init__(self, monkeypatch):
        self.came, self.open = threading.Event(), threading.Event()
        write = folders.write_checkpoint

        def wait(*arguments):
            self.came.set()
            self.open.wait()
            return write(*arguments)

        monkeypatch.setattr("tristep.trainer.loops.manager.write_checkpoint", wait)


def test_training_goes_on_while_a_checkpoint_is_written_and_the_next_one_waits(tmp_path, monkeypatch):
    gate, training = _Gate(monkeypatch), Training("adam")
    training.step()
    before = {name: tensor.clone() for name, tensor in training.net.state_dict().items()}
    manager = CheckpointManager(tmp_path, training.trainer, training.net)
    manager.save()
    gate.came.wait()
    for _ in range(3):  # in place, while nothing is on the disk yet
        training.step()
    second = threading.Thread(target=manager.save)
    second.start()
    assert len([each for each in threading.enumerate() if each.name.startswith("tristep checkpoint")]) == 1
    assert second.is_alive()
    assert not folders.list_checkpoints(tmp_path)
    gate.open.set()
    second.join()
    manager.close()
    first, last = folders.checkpoints(tmp_path)
    assert (first.step, last.step) == (1, 4)
    assert training.trainer.resume(first.path, training.net).step == 1
    assert all(torch.equal(tensor, before[name]) for name, tensor in training.net.state_dict().items())


def test_errors_of_the_writer_are_raised_at_the_next_call(tmp_path, monkeypatch):
    training = Training()

    def fail(*_):
        raise OSError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr("tristep.trainer.loops.manager.write_checkpoint", fail)
        manager = CheckpointManager(tmp_path, training.trainer)
        for call in (manager.save, manager.wait, manager.close, manager.all_checkpoints, manager.resume):
            manager.save()
            with pytest.raises(OSError, match="the disk is full"):
                call()
        with pytest.raises(OSError, match="the disk is full"):
            CheckpointManager(tmp_path, training.trainer, asynchronous=False).save()
    manager.save()
    assert len(manager.all_checkpoints()) == 1


class _KilledError(BaseException):
    pass


@pytest.mark.sample(2)
@pytest.mark.parametrize("call", ["os.fsync", "os.rename", "os.replace", "shutil.rmtree"])
def test_a_process_killed_anywhere_leaves_whole_checkpoints_only(call, tmp_path, monkeypatch):
    """At each call of the system in turn the process is gone: nothing is cleaned up."""
    training = Training("adam")
    owner, name = (os, call.split(".")[1]) if call.startswith("os") else (shutil, "rmtree")
    real = getattr(owner, name)
    first = CheckpointManager(tmp_path, training.trainer, training.net, asynchronous=False)
    _save_losses(first, training, [1, 1])
    for k in range(50):
        training.step()
        manager = CheckpointManager(tmp_path, training.trainer, training.net, max_to_keep=2, asynchronous=False)
        calls = []

        def killed(*arguments, calls=calls, last=k, **options):
            calls.append(arguments)
            if len(calls) > last:
                raise _KilledError
            return real(*arguments, **options)

        with monkeypatch.context() as patch:
            patch.setattr(owner, name, killed)
            patch.setattr("pathlib.Path.unlink", lambda *_, **__: None)  # nor does anybody clean up
            if owner is not shutil:
                patch.setattr(shutil, "rmtree", lambda *_, **__: None)
            try:
                manager.save()
            except _KilledError:
                done = False
            else:
                done = True
        for path in folders.list_checkpoints(tmp_path):
            folders.read_checkpoint(path)
        if done:
            break
    assert 1 <= k < 49
    _save_losses(manager, training, [1, 1])
    manager.close()
    assert len(folders.list_checkpoints(tmp_path)) == 2
    assert all(entry.name[:5] in (".lock", "step-") for entry in tmp_path.iterdir())  # and leftovers are gone
    assert training.trainer.resume(tmp_path, training.net).step == training.trainer.optimizer.num_update


@pytest.mark.parametrize("part", ["model", "trainer", "training"])
def test_a_damaged_checkpoint_is_passed_over_with_a_warning(part, tmp_path, everything):
    training = Training("adam")
    manager = CheckpointManager(tmp_path, training.trainer, training.net)
    _save_losses(manager, training, [1, 2])
    first, second = [each.path for each in manager.all_checkpoints()]
    whole = (second / f"{part}.safetensors").read_bytes()
    for damage in (whole[:-9], whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:], b"", None):
        (second / f"{part}.safetensors").unlink()
        if damage is not None:
            (second / f"{part}.safetensors").write_bytes(damage)
        with pytest.warns(UserWarning, match="step-0000000001 is resumed, newer ones cannot be read. step-0000000002: "):
            assert training.trainer.resume(tmp_path, training.net).step == 1
    (first / f"{part}.safetensors").write_bytes(b"nothing")
    before = everything(training.trainer, training.net.parameters())
    with pytest.raises(ValueError, match="none of its 2 checkpoints can be read"):
        training.trainer.resume(tmp_path, training.net)
    assert everything(training.trainer, training.net.parameters()) == before


class _Counter:
    def __init__(self, value=None):
        self.value = value

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


def test_what_does_not_fit_is_refused_and_nothing_changes(tmp_path, everything):
    training = Training("adam")
    training.step()
    CheckpointManager(tmp_path, training.trainer, training.net, asynchronous=False).save()
    for other, net, message in (
        (Training("sgd"), True, "is of optimizer 'adam', this trainer has 'sgd'"),
        (Training("adam"), False, r"the checkpoint has 9 weights and buffers, here are 6: .* give net, the model"),
        (Training("adam", dtype=torch.float64), True, "the checkpoint has '0.weight' as torch.float32"),
    ):
        before = everything(other.trainer, other.net.parameters())
        with pytest.raises(ValueError, match=message):
            other.trainer.resume(tmp_path, other.net if net else None)
        assert everything(other.trainer, other.net.parameters()) == before
    with pytest.raises(ValueError, match=r"the states of 0 other objects \(stateful\), here are 1"):
        CheckpointManager(tmp_path, training.trainer, training.net, stateful=[_Counter()]).resume()


def test_other_objects_are_saved_with_it(tmp_path):
    """Without them, resuming warns."""
    training = Training()
    value = [1, (2.5, None), {"a": torch.ones(2), 3: np.arange(3, dtype=np.uint32)}, True, "text"]
    counter = _Counter(value)
    CheckpointManager(tmp_path, training.trainer, stateful=[counter], asynchronous=False).save()
    counter.value = None
    CheckpointManager(tmp_path, training.trainer, stateful=[counter]).resume()
    with pytest.warns(UserWarning, match="the states of 1 other objects, such as the place in the data of fit"):
        training.trainer.resume(tmp_path)
    assert counter.value[:2] == value[:2]
    assert counter.value[3:] == value[3:]
    assert torch.equal(counter.value[2]["a"], torch.ones(2))
    np.testing.assert_array_equal(counter.value[2][3], value[2][3])


def test_metrics_without_the_one_that_decides_are_refused(tmp_path):
    training = Training()
    manager = CheckpointManager(tmp_path, training.trainer, best="loss")
    with pytest.raises(ValueError, match="metrics lack 'loss'"):
        manager.save({"accuracy": 1})
    assert manager.all_checkpoints() == []
    assert manager.latest() is None
