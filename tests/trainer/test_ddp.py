"""A module in torch's DistributedDataParallel: its gradients are reduced once, and its parameters keep their names."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import tristep
from tristep import kvstore

STEPS = 4


def _net():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2)).double()


def _batch(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(12, 3, dtype=torch.float64, generator=generator)


def _backward(net, x):
    (net(x) ** 2).sum(dim=1).mean().backward()


def _weights(net):
    return {name: parameter.detach().numpy().copy() for name, parameter in net.named_parameters()}


def _of_trainer(view, set_to_none, in_parts):
    net, ranks, rank = _net(), dist.get_world_size(), dist.get_rank()
    ddp = DistributedDataParallel(net, gradient_as_bucket_view=view)
    trainer = tristep.Trainer(ddp, "sgd", {"learning_rate": 0.1, "momentum": 0.9})
    for step in range(STEPS):
        trainer.zero_grad(set_to_none)
        parts = _batch(step).chunk(ranks)[rank].chunk(1 + in_parts)
        for part in parts[:-1]:
            with ddp.no_sync():
                _backward(ddp, part)
        _backward(ddp, parts[-1])
        trainer.step(len(parts))
    return _weights(net), trainer._names


@pytest.mark.parametrize(("view", "set_to_none", "in_parts"), [(False, True, 0), (True, True, 0), (True, False, 1)])
def test_a_trainer_takes_ddps_gradients_as_they_are(processes, view, set_to_none, in_parts):
    alone = _net()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        _backward(alone, _batch(step))
        optimizer.step()
    (first, names), (second, _) = processes(2).run(_of_trainer, view, set_to_none, in_parts)
    assert names == list(_weights(alone))
    for name, weight in _weights(alone).items():
        np.testing.assert_array_equal(first[name], second[name])
        np.testing.assert_allclose(first[name], weight, rtol=1e-12, atol=1e-14)


class Ring(kvstore.LocalStore):
    several_processes = True


class Distinct(kvstore.LocalStore):
    """A store of one process, by its name like those of several."""


def _saved_and_refused(path):
    net, messages = _net(), []
    ddp = DistributedDataParallel(net)
    kvstore.KVStore.kv_registry.update(ring=Ring, distinct=Distinct)
    for store in ("dist_sync", "Dist_Async", "ring", Ring(), kvstore.create("dist_sync")):
        with pytest.raises(ValueError, match=r"reduced twice; use kvstore=None, or give the module inside"):
            tristep.Trainer(ddp, "adam", kvstore=store)
    tristep.Trainer(ddp, "sgd", kvstore="distinct")
    trainer = tristep.Trainer(ddp, "sgd", {"momentum": 0.9}, kvstore=None)
    with (
        pytest.raises(RuntimeError, match=r"step_in_backward\(\) with DistributedDataParallel"),
        trainer.step_in_backward(1),
    ):
        messages.append("inside")
    _backward(ddp, _batch(0))
    trainer.step(1)
    if dist.get_rank() == 0:
        trainer.save_states(path)
    dist.barrier()
    return messages, _weights(net)


def test_states_saved_under_ddp_are_those_of_the_module_inside(processes, tmp_path):
    path = str(tmp_path / "states")
    (messages, weights), (others, _) = processes(2).run(_saved_and_refused, path)
    assert messages == others == []
    alone = _net()
    trainer = tristep.Trainer(alone, "sgd", {"momentum": 0.9})
    trainer.load_states(path)
    with torch.no_grad():
        for name, parameter in alone.named_parameters():
            parameter.copy_(torch.from_numpy(weights[name]))
    _backward(alone, _batch(1))
    trainer.step(1)
    whole = _net()
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.01, momentum=0.9)
    for step in range(2):
        optimizer.zero_grad()
        _backward(whole, _batch(step))
        optimizer.step()
    for name, weight in _weights(whole).items():
        np.testing.assert_allclose(_weights(alone)[name], weight, rtol=1e-10)


def _resumed_with_another_optimizer(folder):
    """The error on each rank where rank 1 has another optimizer than the checkpoint."""
    net = DistributedDataParallel(_net())
    trainer = tristep.Trainer(net, "sgd", {"momentum": 0.9})
    with tristep.CheckpointManager(folder, trainer, net) as manager:
        _backward(net, _batch(0))
        trainer.step(1)
        manager.save()
    dist.barrier()
    other = DistributedDataParallel(_net())
    trainer, before = tristep.Trainer(other, ("sgd", "adam")[dist.get_rank()]), _weights(other)
    with pytest.raises(ValueError, match="of optimizer 'sgd', this trainer has 'adam'") as caught:
        trainer.resume(folder, other)
    for name, weight in _weights(other).items():
        np.testing.assert_array_equal(weight, before[name])
    assert trainer.optimizer.num_update == 0
    return str(caught.value)


def test_a_checkpoint_that_one_rank_refuses_is_resumed_by_none(processes, tmp_path):
    first, second = processes(2).run(_resumed_with_another_optimizer, str(tmp_path))
    assert first.startswith(
        "rank 1 of 2 cannot load, and nothing has been changed on any rank; it says ValueError: saved state"
    )
    assert second.startswith("saved state is of optimizer")
