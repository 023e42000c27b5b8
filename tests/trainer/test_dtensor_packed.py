"""Packed states of DTensors: blocks within a rank's shard, and state_dicts that go to other meshes and to one process.

The oracles are the same optimizer on a rank's part of each tensor, as a plain tensor, float32 states, and torch's AdamW.
"""

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from dtensors import sent_by, whole_tensors

import tristep
from tristep.trainer.optim import shards

SHAPES = ((192, 96), (7, 3), (9000,))  # the shards of the first and last are packed, on up to three ranks


def _parameters(*placements):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return [torch.nn.Parameter(distribute_tensor(whole, mesh, placements or [Shard(0)])) for whole in _wholes()]


def _wholes():
    torch.manual_seed(0)
    return [torch.randn(shape) for shape in SHAPES]


def _step(optimizer, params, step, plain=None):
    """With gradients that persist, the same on all meshes."""
    from torch.distributed.tensor import distribute_tensor

    torch.manual_seed(10)
    means = [torch.randn(shape) for shape in SHAPES]
    torch.manual_seed(100 + step)
    for k, (param, mean) in enumerate(zip(params, means, strict=True)):
        param.grad = mean + 0.3 * torch.randn(mean.shape)
        if shards.is_dtensor(param):
            param.grad = distribute_tensor(param.grad, param.device_mesh, param.placements)
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


@pytest.mark.sample(1)
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
        assert shown == ("torch.bfloat16", True, SHAPES[0])
        assert max(distances) < (0.2 if state_dtype == "8bit" else 0.5)
        assert same[1]
        assert all(same) == (rank == 0)  # the others' random numbers are their own


class _Net(torch.nn.Module):
    def __init__(self, cut=True):
        super().__init__()
        for k, param in enumerate(_parameters() if cut else map(torch.nn.Parameter, _wholes())):
            setattr(self, f"weight{k}", param)


AdamW, Muon = map(tristep.optim.as_torch, (tristep.optimizer.AdamW, tristep.optimizer.Muon))
# By name: how an optimizer is made, and by which part of the way from the first weights on they may differ after two steps,
# since shards have other blocks and random numbers than one process.
STORED = {
    "8 bits": (lambda net: AdamW(net.parameters(), lr=0.01, state_dtype="8bit"), 0.05),
    "4 bits": (lambda net: AdamW(net.parameters(), lr=0.01, state_dtype="4bit"), 0.3),
    "several": (lambda net: tristep.optim.MultiOptimizer(net, [("*", AdamW, {"lr": 0.01, "state_dtype": "8bit"})]), 0.05),
    "Muon": (lambda net: Muon(net.parameters(), lr=0.01, state_dtype="8bit"), 0.05),
}


def _through_dcp(name, cut, folder, loads):
    """What is trained on from step 3, after saving or loading: the states as shown then, and the weights after step 5."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

    net = _Net(cut)
    optimizer = STORED[name][0](net)
    for step in range(0 if loads else 3):
        _step(optimizer, list(net.parameters()), step)
    state = {"net": net.state_dict(), "optimizer": get_optimizer_state_dict(net, optimizer)}
    (dcp.load if loads else dcp.save)(state, checkpoint_id=folder)
    if loads:
        net.load_state_dict(state["net"])
        set_optimizer_state_dict(net, optimizer, state["optimizer"])
    rows = optimizer.state_dict()["state"]
    states = {(k, key): value for k, row in rows.items() for key, value in row.items() if value.dim()}
    states = dict(zip(states, whole_tensors(states.values()), strict=True))
    for step in (3, 4):
        _step(optimizer, list(net.parameters()), step)
    packed = {str(value.dtype) for value in optimizer.state[net.weight0].values() if value.dim() == 1}
    return packed, sent_by(states), sent_by(whole_tensors(net.parameters()))


def _format(folder):
    """By its name what a checkpoint says of each tensor."""
    found = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    return {key: (each.size, each.properties.dtype) for key, each in found.items() if hasattr(each, "size")}


@pytest.mark.sample(1)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")
@pytest.mark.parametrize("name", STORED)
def test_one_process_and_shards_have_one_format(name, processes, tmp_path):
    def run(ranks, *arguments):
        if ranks == 1:
            return _through_dcp(name, False, *arguments)
        return processes(ranks).run(_through_dcp, name, True, *arguments)[0]

    net = _Net(cut=False)
    exact, start = torch.optim.AdamW(net.parameters(), lr=0.01, weight_decay=0.0), sent_by(whole_tensors(net.parameters()))
    for step in range(5):
        _step(exact, list(net.parameters()), step)
    exact = sent_by(whole_tensors(net.parameters()))
    folders = {ranks: str(tmp_path / str(ranks)) for ranks in (1, 2)}
    saved = {ranks: run(ranks, folder, False) for ranks, folder in folders.items()}
    assert _format(folders[1]) == _format(folders[2])
    assert sum(dtype == torch.bfloat16 for _, dtype in _format(folders[1]).values()) == (3 if name == "Muon" else 4)
    for before, folder in folders.items():
        for after in (1, 2):
            packed, states, weights = run(after, folder, True)
            assert packed == {"torch.int8" if name == "4 bits" else "torch.uint8"}
            assert states.keys() == saved[before][1].keys()
            assert all((states[key] == value).all() for key, value in saved[before][1].items())
            for a, b, c, d in zip(weights, saved[before][2], exact, start, strict=True):
                distance = np.linalg.norm(a - b) / np.linalg.norm(b - d)
                assert distance == 0 if before == after else distance < STORED[name][1], (before, after)
                assert name == "Muon" or np.linalg.norm(a - c) / np.linalg.norm(c - d) < 2 * STORED[name][1]


def _uneven():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    torch.manual_seed(0)
    param = distribute_tensor(torch.randn(41, 200), init_device_mesh("cpu", (2,)), [Shard(0)])
    param.grad = distribute_tensor(torch.randn(41, 200), param.device_mesh, param.placements)
    optimizer, whole = tristep.optim.Lion([param], state_dtype="8bit"), param.grad.full_tensor()
    optimizer.step()
    kind, shown = optimizer.state[param]["mean"].dtype, optimizer.state_dict()["state"][0]["mean"]
    return str(kind), str(shown.dtype), sent_by(shown.full_tensor()), sent_by(whole)


def test_ranks_of_which_only_some_pack_show_one_type(processes):
    """4,200 elements on the first rank, 4,000 on the second."""
    found = processes(2).run(_uneven)
    assert [kind for kind, *_ in found] == ["torch.uint8", "torch.float32"]
    for _, shown, state, gradient in found:
        assert shown == "torch.float32"
        np.testing.assert_allclose(state, 0.01 * gradient, rtol=1 / 16, atol=1e-3)
