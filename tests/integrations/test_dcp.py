"""torch.distributed.checkpoint with tristep.integrations.dcp; torch's own functions are also in test_optim_multi.py."""

import doctest

import pytest
import torch
import torch.distributed.checkpoint as dcp
from rank_training import make_net, train

import tristep
import tristep.integrations.dcp
from tristep.integrations.dcp import TrainerState

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")

OPTIMIZERS = {
    "adam": "adam",
    "several": [("ndim<2", "adamw"), ("*", "muon", {"learning_rate": 0.02})],
    "8bit": "lion",
}


def _made(case):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 2))
    schedule = tristep.lr_scheduler.CosineScheduler(max_update=8, base_lr=0.01)
    options = {"lr_scheduler": schedule} | ({"state_dtype": "8bit"} if case == "8bit" else {})
    return net, tristep.Trainer(net, OPTIMIZERS[case], options)


def _train(net, trainer, steps):
    for step in steps:
        torch.manual_seed(step)
        x = torch.randn(8, 4)
        trainer.zero_grad()
        (net(x) - x[:, :2]).square().mean().backward()
        trainer.step(1)


@pytest.mark.filterwarnings("ignore:.*without a learning_rate:UserWarning")
@pytest.mark.parametrize("case", OPTIMIZERS)
def test_a_fresh_trainer_goes_on_from_a_checkpoint(case, tmp_path):
    net, trainer = _made(case)
    _train(net, trainer, range(3))
    dcp.save({"net": net.state_dict(), "trainer": TrainerState(trainer)}, checkpoint_id=tmp_path)
    _train(net, trainer, range(3, 6))

    other, fresh = _made(case)
    state = {"net": other.state_dict(), "trainer": TrainerState(fresh)}
    dcp.load(state, checkpoint_id=tmp_path)  # into the weights, and by TrainerState.load_state_dict
    assert fresh.optimizer.num_update == 3
    _train(other, fresh, range(3, 6))
    assert all(map(torch.equal, other.parameters(), net.parameters()))


def _resumed_on_rank(update, folder, half):
    """The weights after six steps of a rank, of which three come after the checkpoint is written or read."""
    store = {"kvstore": "dist_sync", "update_on_kvstore": update}
    arguments = {"learning_rate": 0.02, "momentum": 0.9}
    if half:
        _, net, trainer = train("sgd", arguments, 3, torch.float32, spoil=False, **store)
        dcp.save({"net": net.state_dict(), "trainer": TrainerState(trainer)}, checkpoint_id=folder)
    else:
        net = make_net(torch.float32)
        trainer = tristep.Trainer(net, "sgd", dict(arguments), **store)
        dcp.load({"net": net.state_dict(), "trainer": TrainerState(trainer)}, checkpoint_id=folder)
    return train("sgd", arguments, 3, torch.float32, False, 3, net, trainer, **store)[0]


@pytest.mark.sample(0)
@pytest.mark.parametrize("update", [True, False])
def test_several_processes_go_on_from_a_checkpoint(processes, tmp_path, update):
    whole = processes(2).run(_resumed_on_rank, update, tmp_path, True)
    resumed = processes(2).run(_resumed_on_rank, update, tmp_path, False)
    for weights in (*whole, *resumed):
        assert weights.tolist() == whole[0].tolist()


def test_the_docstrings_example():
    result = doctest.testmod(tristep.integrations.dcp)
    assert result.attempted > 0
    assert result.failed == 0


@pytest.mark.sample(8)
@pytest.mark.parametrize("name", [name for name in tristep.optim.__all__ if name[0].isupper() and name != "SparseAdam"])
def test_states_can_be_asked_for_before_the_first_step(name):
    """torch takes a step with a rate of 0 and zeros for gradients then, which must not move weights."""
    from torch.distributed.checkpoint.state_dict import get_state_dict

    if name in ("FusedOptimizer", "MultiOptimizer", "SAM"):
        pytest.skip("no optimizer by itself")
    net = torch.nn.Linear(2, 2, bias=False)
    before = net.weight.detach().clone()
    optimizer = getattr(tristep.optim, name)(net.parameters(), lr=0.1)
    _, saved = get_state_dict(net, optimizer)
    assert torch.equal(net.weight, before)
    net.weight.grad = torch.ones(2, 2)
    optimizer.step()
    _, after = get_state_dict(net, optimizer)
    assert saved["state"].keys() == after["state"].keys()
    for parameter, row in after["state"].items():
        assert saved["state"][parameter].keys() == row.keys()
