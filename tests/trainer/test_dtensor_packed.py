"""Packed states of DTensors: blocks within a rank's shard, and state_dicts that go to other meshes.

The oracles are the same optimizer on a rank's part of each tensor, as a plain tensor, and float32 states.
"""

import copy

import pytest
import torch
import torch.distributed as dist
from dtensors import sent_by, whole_tensors

import tristep

SHAPES = ((192, 96), (7, 3), (9000,))  # the shards of the first and last are packed, on up to three ranks


def _parameters(*placements):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    wholes = [torch.randn(shape) for shape in SHAPES]
    return [torch.nn.Parameter(distribute_tensor(whole, mesh, placements or [Shard(0)])) for whole in wholes]


def _step(optimizer, params, step, plain=None):
    """With gradients that persist, the same on all meshes."""
    from torch.distributed.tensor import distribute_tensor

    torch.manual_seed(10)
    means = [torch.randn(shape) for shape in SHAPES]
    torch.manual_seed(100 + step)
    for k, (param, mean) in enumerate(zip(params, means, strict=True)):
        param.grad = distribute_tensor(mean + 0.3 * torch.randn(mean.shape), param.device_mesh, param.placements)
        if plain is not None:
            plain[1][k].grad = param.grad.to_local().clone()
    optimizer.step()
    if plain is not None:
        plain[0].step()


def _of_shards(name, arguments):
    make = getattr(tristep.optim, name)
    params, others = _parameters(), _parameters()
    alone = [torch.nn.Parameter(param.to_local().detach().clone()) for param in params]
    optimizer, full, plain = make(params, **arguments), make(others, lr=0.01), make(alone, **arguments)
    start = whole_tensors(params)
    for step in range(5):
        _step(optimizer, params, step, (plain, alone))
        _step(full, others, step)
    state = optimizer.state[params[0]]
    key = next(key for key, value in state.items() if value.dim())
    saved = optimizer.state_dict()["state"][0][key]
    shown = str(saved.dtype), saved.placements == params[0].placements, tuple(saved.shape)
    pairs = zip(whole_tensors(params), whole_tensors(others), start, strict=True)
    distances = [float((a - b).norm() / (b - c).norm()) for a, b, c in pairs]
    bytes_ = [(state[key].dtype, tuple(state[key].shape)), plain.state[alone[0]][key].shape]
    same = [torch.equal(param.to_local(), other) for param, other in zip(params, alone, strict=True)]
    return str(bytes_[0][0]), bytes_[0][1], tuple(bytes_[1]), shown, distances, same


@pytest.mark.parametrize(
    ("name", "state_dtype", "dtype"),
    [("Lion", "8bit", "torch.uint8"), ("Adan", "8bit", "torch.uint8"), ("Lion", "4bit", "torch.int8")],
)
@pytest.mark.parametrize("ranks", [2, 3])
def test_blocks_are_those_of_a_ranks_shard(name, state_dtype, dtype, ranks, processes):
    found = processes(ranks).run(_of_shards, name, {"lr": 0.01, "state_dtype": state_dtype})
    for rank, (kind, shape, expected, shown, distances, same) in enumerate(found):
        assert kind == dtype
        assert shape == expected
        assert shown == ("torch.float32", True, SHAPES[0])
        assert max(distances) < (0.2 if state_dtype == "8bit" else 0.5)
        assert same[1]
        assert all(same) == (rank == 0)  # the others' random numbers are their own


def _resumed(full, path):
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_optimizer_state_dict,
        set_optimizer_state_dict,
    )

    options, arguments = StateDictOptions(full_state_dict=full), {"lr": 0.01, "state_dtype": "8bit"}
    first = _Net()
    optimizer = tristep.optim.Adan(first.parameters(), **arguments)
    for step in range(3):
        _step(optimizer, list(first.parameters()), step)
    saved = copy.deepcopy(get_optimizer_state_dict(first, optimizer, options=options))
    if path is not None and dist.get_rank() == 0:
        torch.save((saved, [param.full_tensor() for param in first.parameters()]), path)
    elif path is not None:
        [param.full_tensor() for param in first.parameters()]
    second = _Net()
    with torch.no_grad():
        for param, old in zip(second.parameters(), first.parameters(), strict=True):
            param.copy_(old)
    other = tristep.optim.Adan(second.parameters(), **arguments)
    set_optimizer_state_dict(second, other, saved, options=options)
    for step in (3, 4):
        _step(optimizer, list(first.parameters()), step)
        _step(other, list(second.parameters()), step)
    kinds = {str(state.dtype) for state in other.state[next(iter(second.parameters()))].values() if state.dim() == 1}
    return kinds, sent_by(list(zip(whole_tensors(first.parameters()), whole_tensors(second.parameters()), strict=True)))


class _Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        for k, param in enumerate(_parameters()):
            setattr(self, f"weight{k}", param)


@pytest.mark.parametrize("full", [False, True])
def test_training_goes_on_to_the_bit_on_the_same_mesh(full, processes):
    for kinds, pairs in processes(2).run(_resumed, full, None):
        assert kinds == {"torch.uint8"}
        for one, other in pairs:
            assert one.tobytes() == other.tobytes()


def _elsewhere(path):
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_optimizer_state_dict

    saved, weights = torch.load(path)
    net = _Net()
    from torch.distributed.tensor import distribute_tensor

    with torch.no_grad():
        for param, weight in zip(net.parameters(), weights, strict=True):
            param.copy_(distribute_tensor(weight, param.device_mesh, param.placements))
    optimizer = tristep.optim.Adan(net.parameters(), lr=0.01, state_dtype="8bit")
    exact = {name: dict(row) for name, row in saved["state"].items()}
    set_optimizer_state_dict(net, optimizer, saved, options=StateDictOptions(full_state_dict=True))
    equal = [
        torch.equal(optimizer.state_dict()["state"][k][key].full_tensor(), value)
        for k, row in enumerate(exact.values())
        for key, value in row.items()
        if value.dim()
    ]
    for step in (3, 4):
        _step(optimizer, list(net.parameters()), step)
    kinds = {str(state.dtype) for state in optimizer.state[net.weight0].values() if state.dim() == 1}
    return all(equal), len(equal), kinds, sent_by(whole_tensors(net.parameters()))


def test_states_are_cut_otherwise_on_another_mesh(processes, tmp_path):
    """Before the next step they are the saved numbers; after two the weights are near those of the first mesh."""
    path = str(tmp_path / "states")
    ((_, pairs), *_) = processes(2).run(_resumed, True, path)
    for equal, count, kinds, weights in processes(3).run(_elsewhere, path):
        assert equal
        assert count == 3 * 4
        assert kinds == {"torch.uint8"}
        for weight, (expected, _) in zip(weights, pairs, strict=True):
            assert abs(weight - expected).max() < 2 * 0.01  # of two steps by a rate of 0.01
