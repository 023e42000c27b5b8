"""States of updates that are cut among ranks: their bytes, saved on any number of ranks and loaded on another."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from sharded_training import (
    as_arrays,
    backward,
    equal,
    make_net,
    make_optimizer,
    on_ranks,
    same_state,
    train_on_ranks,
    weights_of,
)
from torch import nn

import tristep
from tristep import optimizer as optimizers
from tristep.kernels import storage


def _count_bytes(name, arguments):
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(300, 300) for _ in range(11)), nn.Linear(300, 10))
    engine = "eager" if dist.get_world_size() > 2 else None
    trainer = on_ranks(net, optimizers.create(name, **arguments), limits={"bucket_bytes": 2**20}, engine=engine)
    net(torch.ones(1, 300)).sum().backward()
    trainer.step(1)
    states = [tensor for state in trainer._sync.updater.states.values() for tensor in state]
    memory = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in states}
    return sum(memory.values()), sum(param.numel() for param in net.parameters())


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.sample(0))])
def test_each_rank_has_its_share_of_the_states_bytes(processes, ranks):
    for held, elements in processes(ranks).run(_count_bytes, "adam", {}):
        assert elements > 990_000
        assert held <= 1.02 * 8 * elements / ranks


FILES = [
    ("adam", {"learning_rate": 0.01, "schedule": True}, torch.float32),
    ("sgd", {"learning_rate": 0.1, "momentum": 0.9, "multi_precision": True}, torch.bfloat16),
    ("lamb", {"learning_rate": 0.01}, torch.float32),
    # In float64 all ranks round the same matrices to bfloat16, whose directions amplify the last bits of a float32.
    ("muon", {"learning_rate": 0.01}, torch.float64),
    ("by hand", {"learning_rate": 0.01}, torch.float32),
]


def _save(name, arguments, dtype, path):
    net = make_net(dtype)
    trainer = on_ranks(net, make_optimizer(name, dict(arguments)))
    for step in range(3):
        net.zero_grad()
        backward(net, step, dist.get_rank(), dist.get_world_size(), None)
        trainer.step(12)
    trainer.save_states(path)
    return weights_of(net)


@pytest.mark.sample(2)
@pytest.mark.parametrize(("name", "arguments", "dtype"), FILES)
def test_saved_on_two_ranks_loaded_on_three_on_one_and_back(processes, tmp_path, name, arguments, dtype):
    path = str(tmp_path / "states")
    weights = processes(2).run(_save, name, arguments, dtype, path)[0]
    on_two = processes(2).run(train_on_ranks, name, arguments, 2, dtype, None, False, (weights, path), 3)
    on_three = processes(3).run(train_on_ranks, name, arguments, 2, dtype, None, False, (weights, path), 3)
    net = make_net(dtype)
    trainer = tristep.Trainer(net, make_optimizer(name, dict(arguments)))
    with torch.no_grad():
        for param, weight in zip(net.parameters(), weights, strict=True):
            param.copy_(torch.from_numpy(weight))
    trainer.load_states(path)
    for step in (3, 4):
        net.zero_grad()
        backward(net, step, 0, 1, None)
        trainer.step(12)
    atol = 2e-2 if name == "sgd" else 1e-6  # of bfloat16 weights
    going_on = processes(2).run(train_on_ranks, name, arguments, 5, dtype)
    equal(on_two[0][0][-1], going_on[0][0][-1])  # as if there had been no file
    same_state(on_two[0][1], going_on[0][1])
    equal(on_three[0][0][-1], on_two[0][0][-1], atol)
    equal(weights_of(net), on_two[0][0][-1], atol)
    # And what a trainer saved is loaded on three ranks.
    again = str(tmp_path / "of a trainer")
    trainer.save_states(again)
    for _, state in processes(3).run(train_on_ranks, name, arguments, 0, dtype, None, False, (weights_of(net), again)):
        same_state(state, as_arrays(trainer.state_dict()))


def _eight_bits(path):
    """Packed states of a net whose pieces are all large enough to be packed."""
    torch.manual_seed(0)
    net = nn.Linear(256, 128, bias=False)
    trainer = on_ranks(net, optimizers.create("adam", learning_rate=0.01, state_dtype="8bit"))
    updater = trainer._sync.updater
    for step in range(3):
        net.zero_grad()
        (net(torch.ones(2, 256) * (step + 1 + dist.get_rank())) ** 2).sum().backward()
        trainer.step(1)
    state, before = trainer.state_dict(), updater.states[0]
    assert {tensor.dtype for tensor in before} == {torch.uint8}
    trainer.save_states(path)
    trainer.load_states(path)
    own, whole = torch.Size([256 * 128 // 2]), torch.Size([256 * 128])

    def numbers(tensors, size):
        """Codes may be others where the largest number of a block has been rounded."""
        return [storage.unpacked(tensor, size, k == 1).numpy().copy() for k, tensor in enumerate(tensors)]

    same = [(a == b).all() for a, b in zip(numbers(before, own), numbers(updater.states[0], own), strict=True)]
    return same, numbers(state["state"]["weight"].values(), whole), numbers(before, own), weights_of(net)


def test_packed_states_are_put_together_and_cut_without_loss(processes, tmp_path):
    found = processes(2).run(_eight_bits, str(tmp_path / "states"))
    for same, together, _, weights in found:
        assert all(same)
        for k in range(2):  # each state
            assert (together[k] == np.concatenate([pieces[k] for _, _, pieces, _ in found])).all()
        equal(weights, found[0][3])
    first, second = (pieces[0] for _, _, pieces, _ in found)
    assert (first != second).any()
