"""The store of several processes: sums over ranks, rank 0's first values, optimizers and their files."""

import os
import socket

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tristep import optimizer
from tristep.kvstore import CollectiveStore
from tristep.trainer.utils.distributed import check_alike, process_group


def _arrays(tensors):
    """What can be sent from one process to another."""
    return [tensor.numpy().copy() for tensor in tensors]


def _push_and_pull(keys):
    rank = dist.get_rank()
    store = CollectiveStore("dist_sync")
    shapes = [(2, 3), (4,), ()]
    dtypes = [torch.float32, torch.float64, torch.float32]
    store.init(keys, [torch.full(s, float(rank + 1), dtype=d) for s, d in zip(shapes, dtypes, strict=True)])
    first = [torch.zeros(s, dtype=d) for s, d in zip(shapes, dtypes, strict=True)]
    store.pull(keys, first)
    values = [
        [torch.full(s, 10.0 * rank + k, dtype=d) for k in range(2)] for s, d in zip(shapes, dtypes, strict=True)
    ]  # a list for each key, as of two copies of a model
    order = range(3) if rank == 0 else (2, 0, 1)  # ranks may name their keys in any order
    store.push([keys[k] for k in order], [values[k] for k in order])
    second = [torch.zeros_like(each) for each in first]
    store.pull(keys, second)
    inout = torch.full((4,), float(rank), dtype=torch.float64)
    store.pushpull(keys[1], inout)
    store.barrier()
    return store.rank, store.num_workers, store.type, _arrays(first), _arrays(second), inout.numpy()


@pytest.mark.parametrize("keys", [[3, 5, 7], ["a", "c", "b"]])
def test_init_takes_rank_0s_values_and_push_sums_up(processes, keys):
    for rank, (own, workers, kind, first, second, inout) in enumerate(processes(3).run(_push_and_pull, keys)):
        assert (own, workers, kind) == (rank, 3, "dist_sync")
        assert all((each == 1).all() for each in first)
        assert all((each == 2 * (0 + 10 + 20) + 3 * 1).all() for each in second)
        assert (inout == 0 + 1 + 2).all()


def _update(by_hand):
    rank = dist.get_rank()
    store = CollectiveStore("dist_device_sync")
    start = torch.linspace(-1, 1, 7, dtype=torch.float64)
    store.init(["w", "v"], [start, start[:3]])
    if by_hand:
        store.set_updater(lambda key, pushed, stored: stored.sub_(0.5 * pushed))
    else:
        store.set_optimizer(optimizer.create("sgd", learning_rate=0.5, momentum=0.9))
    seen = []
    for step in range(3):
        grads = [torch.arange(7.0, dtype=torch.float64) * (rank + 1) + step, torch.full((3,), rank + 0.25).double()]
        store.push(["w", "v"], grads)
        out = [torch.zeros(7, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)]
        store.pull(["w", "v"], out)
        seen.append(_arrays(out))
    return seen


@pytest.mark.parametrize("by_hand", [True, False])
def test_an_updater_gets_the_sum_on_every_rank(processes, by_hand):
    found = processes(2).run(_update, by_hand)
    w = torch.linspace(-1, 1, 7, dtype=torch.float64)
    tensors = [w.clone().requires_grad_(), w[:3].clone().requires_grad_()]
    reference = torch.optim.SGD(tensors, lr=0.5, momentum=0 if by_hand else 0.9)
    for step in range(3):
        tensors[0].grad = torch.arange(7.0, dtype=torch.float64) * 3 + 2 * step
        tensors[1].grad = torch.full((3,), 1.5, dtype=torch.float64)
        reference.step()
        for mine, theirs, expected in zip(found[0][step], found[1][step], tensors, strict=True):
            assert mine.tobytes() == theirs.tobytes()
            np.testing.assert_allclose(mine, expected.detach().numpy(), rtol=0, atol=1e-12)


def _save_and_load(folder):
    def pushed(store, times):
        for step in range(times):
            store.push("w", torch.arange(5.0) * (dist.get_rank() + 1) + step)
        out = torch.zeros(5)
        store.pull("w", out)
        return out

    def made():
        store = CollectiveStore()
        store.init("w", torch.ones(5))
        store.set_optimizer(optimizer.create("adam", learning_rate=0.1))
        return store

    path = os.path.join(folder, "states")
    store, other = made(), made()
    pushed(store, 3)
    store.save_optimizer_states(path)
    weight = torch.zeros(5)
    store.pull("w", weight)
    other._values["w"].copy_(weight)
    other.load_optimizer_states(path)
    messages = []

    def fail(method):
        try:
            method(os.path.join(folder, "missing", "states"))
        except (RuntimeError, FileNotFoundError) as error:
            messages.append(str(error))

    fail(store.save_optimizer_states)
    fail(store.load_optimizer_states)
    return *_arrays([pushed(store, 2), pushed(other, 2)]), messages, sorted(os.listdir(folder))


def test_states_are_written_by_rank_0_and_read_by_all(processes, tmp_path):
    for going_on, loaded, messages, files in processes(2).run(_save_and_load, str(tmp_path)):
        assert going_on.tobytes() == loaded.tobytes()
        assert "rank 0 could not save" in messages[0]
        assert "no such file" in messages[1]
        assert files == ["states"]


def _mistakes():
    rank, messages = dist.get_rank(), []
    store = CollectiveStore()

    def fail(function, *args):
        try:
            function(*args)
        except Exception as error:
            messages.append(f"{type(error).__name__}: {error}")
        else:
            messages.append("")

    fail(store.init, ["a", "b"], [torch.zeros(2), torch.zeros(3 + rank)])
    fail(store.init, "a" if rank == 0 else "c", torch.zeros(2))
    store.init("a", torch.zeros(2))
    fail(store.push, "a", torch.zeros(3))
    fail(store.push, "a", torch.zeros(2).to_sparse())
    fail(store.set_gradient_compression, {"type": "3bit"})
    fail(store.replace, "a", torch.ones(2))
    fail(check_alike, "parameter", {"w": torch.zeros(1)} if rank == 0 else {}, dist.group.WORLD)
    return messages


def test_mistakes_are_named_on_every_rank(processes):
    for messages in processes(2).run(_mistakes):
        assert "key number 1 is 'b' torch.float32 (3,) on rank 0 and 'b' torch.float32 (4,) on rank 1" in messages[0]
        assert "'a' torch.float32 (2,) on rank 0 and 'c'" in messages[1]
        assert "(3,), the stored value is (2,)" in messages[2]
        assert "TypeError" in messages[3]
        assert "compression_params['type']='3bit'" in messages[4]
        assert "RuntimeError: a store of type 'dist_sync' does not take other values" in messages[5]
        assert "on rank 0 and nothing on rank 1 (of 1 and 0)" in messages[6]


def test_a_group_is_made_of_torchruns_environment(monkeypatch):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    variables = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    try:
        store = CollectiveStore("dist")
        assert (store.rank, store.num_workers, dist.get_backend()) == (0, 1, "gloo")
        assert process_group() is process_group(dist.group.WORLD) is None
        assert dist.is_initialized()
        store.init(0, torch.ones(2))
        store.push(0, torch.full((2,), 3.0))
        out = torch.zeros(2)
        store.pull(0, out)
        assert out.tolist() == [3.0, 3.0]
    finally:
        dist.destroy_process_group()
