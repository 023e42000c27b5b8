"""States of DTensors that have owners: saved, loaded on other numbers of ranks, and exchanged with torch's."""

import copy
import re

import pytest
import torch
from dtensors import sent_by, whole_tensors
from owner_training import LARGE, MATRICES, RULES, AnyMuon, Pair, backward, fully_sharded, make_net, placed

import tristep
from tristep.trainer.optim import shards

pytestmark = pytest.mark.sample(0)  # the quick tier runs a smoke test


def _optimizer(name, net):
    if name == "several":
        entries = [("ndim<2", "adamw", {"lr": 0.01}), ("*", "muon", {"lr": 0.02})]
        return tristep.optim.MultiOptimizer(net, entries)
    return RULES[name][0](list(net.parameters()))


def _saved(name, folder):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    net = fully_sharded(make_net())
    optimizer = _optimizer(name, net)
    for step in range(3):
        backward(net, step)
        optimizer.step()
    dcp.save({"net": net.state_dict(), "optimizer": get_optimizer_state_dict(net, optimizer)}, checkpoint_id=folder)
    _continue(net, optimizer)
    return sent_by(whole_tensors(net.parameters()))


def _continue(net, optimizer):
    """A step with gradients that do not depend on the number of ranks."""
    from torch.distributed.tensor import distribute_tensor

    torch.manual_seed(7)
    for p in net.parameters():
        grad = torch.randn(p.shape)
        p.grad = distribute_tensor(grad, p.device_mesh, p.placements) if shards.is_dtensor(p) else grad
    optimizer.step()


def _loaded(name, folder, cut):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

    net = fully_sharded(make_net()) if cut else make_net()
    optimizer = _optimizer(name, net)
    state = {"net": net.state_dict(), "optimizer": get_optimizer_state_dict(net, optimizer)}
    dcp.load(state, checkpoint_id=folder)
    net.load_state_dict(state["net"])
    set_optimizer_state_dict(net, optimizer, state["optimizer"])
    again = optimizer.state_dict()["state"]  # before there has been a step
    assert all(shards.is_dtensor(v) for row in again.values() for v in row.values() if v.dim() and cut)
    _continue(net, optimizer)
    return sent_by(whole_tensors(net.parameters()))


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["several", "muon", "soap", "came", "pulled"])
def test_saved_states_go_to_other_numbers_of_ranks(processes, tmp_path, name):
    want = processes(2).run(_saved, name, str(tmp_path))[0]
    for ranks, cut in ((4, True), (2, False)):
        for found in processes(ranks).run(_loaded, name, str(tmp_path), cut):
            for a, b in zip(found, want, strict=True):
                assert a.tobytes() == b.tobytes(), (ranks, cut)


def _whole_states():
    """A state that was saved by one process, loaded as it is."""
    pair = Pair(RULES["soap"][0], MATRICES[:5])
    pair.step(0)
    pair.step(1)
    again = Pair(RULES["soap"][0], MATRICES[:5])
    with torch.no_grad():
        for p, q, whole in zip(again.cut, again.alone, pair.alone, strict=True):
            q.copy_(whole)
            p.copy_(placed(whole.detach(), p.device_mesh, None).redistribute(placements=p.placements))
    for optimizer in again.optimizers:
        optimizer.load_state_dict(copy.deepcopy(pair.optimizers[1].state_dict()))
    again.step(2)
    wrong = pair.optimizers[1].state_dict()
    wrong["state"][0]["mean"] = torch.zeros(2, 2)
    again.optimizers[0].load_state_dict(wrong)
    before = whole_tensors(again.cut)
    try:
        again.step(3)
    except ValueError as error:
        message = str(error)
    assert all(torch.equal(a, b) for a, b in zip(before, whole_tensors(again.cut), strict=True))
    return message, *sent_by((before, whole_tensors(again.alone)))


def test_states_of_one_process_can_be_loaded(processes):
    for message, cut, alone in processes(2).run(_whole_states):
        assert re.match(r"'mean' of params\[0\] has shape \(2, 2\), the parameter \(7, 4\)", message)
        for a, b in zip(cut, alone, strict=True):
            assert a.tobytes() == b.tobytes()


def _in_few_bits():
    pair = Pair(lambda groups: AnyMuon(groups, lr=0.02, state_dtype="8bit", multi_precision=True), LARGE, torch.bfloat16)
    pair.step(0)
    pair.step(1)
    saved = copy.deepcopy(pair.optimizers[0].state_dict())
    pair.optimizers[0].load_state_dict(saved)
    pair.step(2)
    found = [optimizer.float32_weights() for optimizer in pair.optimizers]
    float32 = [whole_tensors(each.values()) for each in found]
    pair.optimizers[0].load_float32_weights({p: 2 * w for p, w in found[0].items()})
    pair.optimizers[1].load_float32_weights({p: 2 * w for p, w in found[1].items()})
    pair.step(3)
    types = [{key: v.dtype for key, v in row.items() if v.dim()} for row in saved["state"].values()]
    return *pair.results(), sent_by(float32), str(types[0])


def test_packed_states_and_masters_belong_to_owners(processes):
    for (weights, states), (weights_alone, states_alone), (float32, float32_alone), types in processes(2).run(_in_few_bits):
        assert types == "{'mean': torch.bfloat16, 'master': torch.float32}"
        for a, b in zip([*weights, *float32], [*weights_alone, *float32_alone], strict=True):
            assert a.tobytes() == b.tobytes()
        for row, alone in zip(states, states_alone, strict=True):
            assert {key: v.tobytes() for key, v in row.items()} == {key: v.tobytes() for key, v in alone.items()}
