"""Checkpoints when a signal asks a training to end, of `fit`, and of several processes."""

import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import threading

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import tristep
from tristep import CheckpointManager, Trainer, fit
from tristep.trainer.checkpoint import folder as folders

posix = pytest.mark.skipif(os.name != "posix", reason="needs POSIX signals")


def _net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.2), nn.BatchNorm1d(6), nn.Linear(6, 3))


def _data():
    """A loader that shuffles, with a generator of its own."""
    rng = torch.Generator().manual_seed(1)
    x = torch.rand(22, 4, generator=rng)
    return DataLoader(TensorDataset(x, x[:, :3].argmax(1)), batch_size=4, shuffle=True, generator=rng)


def _fit(folder, epochs=3, trained=None, **options):
    """A net after `fit`, the trainer, and what it says."""
    net = _net()
    trainer = Trainer(net, "adam", {"learning_rate": 0.05})
    checkpoint = None if folder is None else CheckpointManager(folder, trainer, net, **options.pop("manager", {}))
    done = fit(
        net,
        nn.CrossEntropyLoss(),
        _data(),
        trainer=trainer,
        epochs=epochs,
        eval_metric="acc",
        progress=False,
        checkpoint=checkpoint,
        **options,
    )
    return net, trainer, done


def _equal(net, other):
    return all(torch.equal(tensor, other.state_dict()[name]) for name, tensor in net.state_dict().items())


PROGRAM = textwrap.dedent("""
    import signal, sys
    sys.path[:0] = [{tests!r}]
    import test_checkpoint_signals as test

    test.torch.set_num_threads({threads})  # sums depend on it

    def wait(told):
        if told.epoch == 1 and told.batch == 1:
            print("here", flush=True)
            sys.stdin.readline()

    test._fit({folder!r}, batch_end_callback=wait)
    print("went on", flush=True)
""")


@posix
def test_a_process_that_gets_a_signal_saves_and_ends(tmp_path):
    """In a step the signal comes; after it a checkpoint is written, and the process ends as by that signal."""
    threads = torch.get_num_threads()
    program = PROGRAM.format(tests=os.path.dirname(__file__), folder=str(tmp_path), threads=threads)
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "here\n"
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate("go on\n")
    assert (process.returncode, out) == (-signal.SIGTERM, "")
    assert [path.name for path in folders.list_checkpoints(tmp_path)] == [f"step-{step:010}" for step in (6, 8)]
    expected, trainer, whole = _fit(None)
    net, resumed, rest = _fit(tmp_path)
    assert _equal(net, expected)
    assert resumed.optimizer.num_update == trainer.optimizer.num_update == 18
    assert rest.losses == whole.losses[8:]
    timeless = [{name: value for name, value in epoch.items() if name != "seconds"} for epoch in whole.epochs]
    assert [{name: epoch[name] for name in timeless[0]} for epoch in rest.epochs] == timeless[1:]


@posix
def test_former_handlers_get_the_signal_after_it_is_saved(tmp_path):
    net = _net()
    trainer, came = Trainer(net, "sgd"), []
    before = signal.signal(signal.SIGTERM, lambda number, _: came.append((number, folders.list_checkpoints(tmp_path))))
    former = signal.getsignal(signal.SIGTERM)
    try:
        with CheckpointManager(tmp_path, trainer, net) as manager:
            assert not manager.step()
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGTERM)
            assert came == []
            assert manager.step()
            ((number, there),) = came
            assert number == signal.SIGTERM
            assert len(there) == 1
            assert not manager.step()
            signal.raise_signal(signal.SIGTERM)  # with no step after it
        assert len(came) == 2
        assert signal.getsignal(signal.SIGTERM) is former
    finally:
        signal.signal(signal.SIGTERM, before)


@posix
@pytest.mark.parametrize("end", [CheckpointManager.close, lambda manager: manager.__exit__(None, None, None)])
def test_a_signal_that_comes_while_the_last_checkpoint_is_written_waits_for_it(end, tmp_path, monkeypatch):
    """From a signal's handler by default the process would be gone, with half a checkpoint."""
    manager, came = CheckpointManager(tmp_path, Trainer(_net(), "sgd")), []
    write = folders.write_checkpoint

    def signalled(*arguments):
        os.kill(os.getpid(), signal.SIGTERM)
        return write(*arguments)

    monkeypatch.setattr("tristep.trainer.loops.manager.write_checkpoint", signalled)
    before = signal.signal(signal.SIGTERM, lambda *_: came.append(len(folders.list_checkpoints(tmp_path))))
    former = signal.getsignal(signal.SIGTERM)
    try:
        manager.__enter__()
        manager.save()
        end(manager)
        assert came == [1]
        assert signal.getsignal(signal.SIGTERM) is former
    finally:
        signal.signal(signal.SIGTERM, before)


@posix
@pytest.mark.parametrize("first", [0, 1])
def test_two_managers_both_save_before_the_signal_acts_and_end_in_any_order(first, tmp_path):
    """As of a generator and a discriminator, in one loop."""
    came, before = (
        [],
        signal.signal(signal.SIGTERM, lambda *_: came.append([len(each.all_checkpoints()) for each in managers])),
    )
    former = signal.getsignal(signal.SIGTERM)
    managers = [CheckpointManager(tmp_path / name, Trainer(_net(), "sgd")) for name in "ab"]
    try:
        for manager in managers:
            manager.__enter__()
        signal.raise_signal(signal.SIGTERM)
        assert [manager.step() for manager in managers] == [True, True]
        assert came == [[1, 1]]
        managers[first].close()
        signal.raise_signal(signal.SIGTERM)
        assert managers[1 - first].step()
        assert len(came) == 2
        managers[1 - first].close()
        assert signal.getsignal(signal.SIGTERM) is former
    finally:
        signal.signal(signal.SIGTERM, before)


@posix
def test_a_forked_process_can_be_ended(tmp_path):
    """Signals are noted for the process that saves. Others end by SIGTERM, as multiprocessing expects."""
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        with CheckpointManager(tmp_path, Trainer(_net(), "sgd")) as manager:
            process = multiprocessing.get_context("fork").Process(target=threading.Event().wait)
            process.start()
            process.terminate()
            process.join()
            assert process.exitcode == -signal.SIGTERM
            signal.raise_signal(signal.SIGTERM)  # here it is noted, as before
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            manager._stop.arrived = False
    finally:
        signal.signal(signal.SIGTERM, before)


UNWRITTEN = textwrap.dedent("""
    import gc, resource, sys, torch, tristep
    net = torch.nn.Linear(50, 50)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))  # as on a disk that is full
    manager = tristep.CheckpointManager({folder!r}, tristep.Trainer(net, "sgd"), net)
    manager.save()
    {then}
    print("went on")
""")


@pytest.mark.sample(0)
@posix
@pytest.mark.parametrize("then", ["", "del manager; gc.collect()", "raise ValueError('of the script')"])
def test_a_last_checkpoint_that_is_not_written_is_told(then, tmp_path):
    """Nobody waits for it, and the script ends."""
    program = [sys.executable, "-c", UNWRITTEN.format(folder=str(tmp_path), then=then)]
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == ((1, "") if "raise" in then else (0, "went on\n"))
    assert done.stderr.count("The last checkpoint of a CheckpointManager has not been written:") == 1
    assert "File too large" in done.stderr
    assert folders.list_checkpoints(tmp_path) == []


def test_fit_saves_each_epoch_and_resumes_from_a_folder(tmp_path):
    expected, *_ = _fit(None, epochs=4)
    net, _, done = _fit(tmp_path, epochs=2, manager={"best": "accuracy", "mode": "max"})
    assert len(done.epochs) == 2
    other = _net()
    trainer = Trainer(other, "adam", {"learning_rate": 0.05})
    rest = fit(other, nn.CrossEntropyLoss(), _data(), trainer=trainer, epochs=4, eval_metric="acc", progress=False,
               checkpoint=tmp_path)  # fmt: skip
    assert [epoch["epoch"] for epoch in rest.epochs] == [3, 4]
    assert _equal(other, expected)
    assert not _equal(net, expected)
    again = _fit(tmp_path, epochs=4)[2]
    assert again.epochs == again.losses == []
    assert not again.interrupted
    (newest, *_) = reversed(CheckpointManager(tmp_path, trainer).all_checkpoints())
    assert newest.metrics["accuracy"] == rest.epochs[-1]["accuracy"]
    assert newest.metadata == {"epoch": 4}


@pytest.mark.sample(1)
@pytest.mark.parametrize("step", [pytest.param(1, marks=pytest.mark.sample(0)), 6, 8])
def test_fit_ended_by_a_callback_resumes_with_the_next_batch(step, tmp_path):
    """Step 6 is the last one of an epoch."""
    expected, _, whole = _fit(None)
    count = iter(range(1, 99))
    _, _, done = _fit(tmp_path, batch_end_callback=lambda _: next(count) == step, manager={"save_interval_steps": 4})
    assert done.interrupted
    net, _, rest = _fit(tmp_path)
    assert _equal(net, expected)
    assert rest.losses == whole.losses[step:]
    assert [epoch["loss"] for epoch in rest.epochs] == [epoch["loss"] for epoch in whole.epochs][-len(rest.epochs) :]


def test_fit_refuses_the_manager_of_another_trainer(tmp_path):
    net = _net()
    trainer = Trainer(net, "sgd")
    manager = CheckpointManager(tmp_path, Trainer(_net(), "sgd"))
    with pytest.raises(ValueError, match="of another trainer"):
        fit(net, nn.CrossEntropyLoss(), _data(), trainer=trainer, progress=False, checkpoint=manager)
    assert trainer.optimizer.num_update == 0


def _train_ranks(folder, update_on_kvstore, stop):
    """Train on each rank with its own batches; `stop`: rank 1 gets a signal in step 4, which makes all of them end."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 2))
    if update_on_kvstore == "ddp":
        net = nn.parallel.DistributedDataParallel(net)
        trainer = Trainer(net, "adam", {"learning_rate": 0.05}, kvstore=None)
    else:
        trainer = Trainer(net, "adam", {"learning_rate": 0.05}, "dist_sync", update_on_kvstore=update_on_kvstore)
    torch.manual_seed(10 + rank)
    ended, before = [], signal.signal(signal.SIGTERM, lambda number, _: ended.append(number))
    try:
        with CheckpointManager(folder, trainer, net, save_interval_steps=3) as manager:
            start = manager.resume().step
            for step in range(start, 6):
                trainer.zero_grad()
                net(torch.randn(5, 3)).square().sum().backward()
                if stop and step == 3 and rank == 1:
                    signal.raise_signal(signal.SIGTERM)
                trainer.step(10)
                manager.step()
                if ended:
                    break
    finally:
        signal.signal(signal.SIGTERM, before)
    state = trainer.state_dict()["state"]
    whole = [tensor.numpy().copy() for slots in state.values() for tensor in slots.values()]
    return start, trainer.optimizer.num_update, [tensor.numpy().copy() for tensor in net.state_dict().values()] + whole


@posix
@pytest.mark.parametrize("update", [False, *(pytest.param(each, marks=pytest.mark.sample(0)) for each in (True, "ddp"))])
def test_several_processes_save_and_resume_together(update, processes, tmp_path):
    run = processes(2).run
    expected = run(_train_ranks, str(tmp_path / "whole"), update, False)
    stopped = run(_train_ranks, str(tmp_path / "stopped"), update, True)
    assert [(start, steps) for start, steps, _ in stopped] == [(0, 4)] * 2
    assert [path.name for path in folders.list_checkpoints(tmp_path / "stopped")] == ["step-0000000003", "step-0000000004"]
    resumed = run(_train_ranks, str(tmp_path / "stopped"), update, False)
    for (start, steps, found), (_, _, whole) in zip(resumed, expected, strict=True):
        assert (start, steps) == (4, 6)
        assert all(np.array_equal(a, b) for a, b in zip(found, whole, strict=True))


def test_another_number_of_replicas_warns_of_random_numbers(tmp_path):
    net = _net()
    CheckpointManager(tmp_path, Trainer(net, "sgd"), net, asynchronous=False).save()
    nets = tristep.replicate(net, ["cpu", "cpu"])
    trainer = Trainer(nets, "sgd")
    with pytest.warns(UserWarning, match="1 processes with 1 replicas, here are 1 with 2"):
        trainer.resume(tmp_path, nets)
    assert _equal(nets[1], net)
