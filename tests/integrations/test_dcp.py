"""torch.distributed.checkpoint asks for states before there are any; its functions are also in test_optim_multi.py."""

import pytest
import torch

import tristep

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")


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
