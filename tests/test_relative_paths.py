"""A relative path means the file or folder that it meant when it was given, also after `os.chdir`."""

import os
from pathlib import Path

import pytest
import torch
from races import raced

import tristep
from tristep import CheckpointManager, viz
from tristep.viz.record.adapters import adapter

pytest.importorskip("safetensors.torch", reason="files need it")


def training():
    net = torch.nn.Linear(3, 2)
    return net, tristep.Trainer(net, "adam")


def stepped(net, trainer):
    trainer.zero_grad()
    net(torch.ones(1, 3)).sum().backward()
    trainer.step(1)


def managed(leave):
    net, trainer = training()
    with CheckpointManager("kept", trainer, net, save_interval_steps=1) as manager:
        for _ in range(2):
            stepped(net, trainer)
            manager.step()
        leave()
        for _ in range(2):
            stepped(net, trainer)
            manager.step()
        assert [each.step for each in manager.all_checkpoints()] == [2, 3, 4]
        assert manager.resume().step == 4


def fitted(leave):
    net, trainer = training()
    batches = [(torch.ones(2, 3), torch.zeros(2, 2))] * 2
    loss = torch.nn.MSELoss()
    tristep.fit(
        net,
        loss,
        batches,
        trainer=trainer,
        epochs=3,
        checkpoint="kept",
        progress=False,
        epoch_end_callback=lambda _: leave(),
    )
    assert CheckpointManager("../given/kept", trainer, net).latest().step == 6


def resumed(leave):
    """The path of the checkpoint that was resumed, for a later look at it."""
    net, trainer = training()
    manager = CheckpointManager("kept", trainer, net, asynchronous=False)
    stepped(net, trainer)
    manager.save()
    manager.close()
    path = trainer.resume("kept", net).path
    leave()
    assert trainer.resume(path, net).step == 1


def recorded(leave):
    net, trainer = training()
    with viz.Recorder(trainer, to=["kept.csv"]) as recorder:
        for number in range(3):
            stepped(net, trainer)
            recorder.step(loss=1.0)
            recorder.flush()
            if number == 0:
                leave()
            recorder.note(validation=0.5)  # a new column
    assert "validation" in Path("../given/kept.csv").read_text()


def event_file(leave):
    boards = pytest.importorskip("torch.utils.tensorboard")
    with boards.SummaryWriter("kept") as writer:
        target = adapter(writer)
        leave()
        target.log(1, {"loss": 0.5})
        target.close()


def race(leave):
    calls = []

    def loss(output, label):
        calls.append(leave())
        return torch.nn.functional.cross_entropy(output, label)

    raced(loss=loss, folder="kept", together=1)
    calls.clear()
    raced(loss=loss, folder="../given/kept", together=1)
    assert len(calls) == 1  # of the first weights, to see whether all is the same


DOORS = {
    "CheckpointManager": managed,
    "fit": fitted,
    "resume": resumed,
    "Recorder": recorded,
    "SummaryWriter": event_file,
    "race": race,
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", DOORS)
def test_a_relative_path_does_not_follow_chdir(name, tmp_path, monkeypatch):
    given, elsewhere = tmp_path / "given", tmp_path / "elsewhere"
    given.mkdir()
    elsewhere.mkdir()
    monkeypatch.chdir(given)
    DOORS[name](lambda: os.chdir(elsewhere))
    assert os.listdir(elsewhere) == []
    assert os.listdir(given) != []
