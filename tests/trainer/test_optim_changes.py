"""tristep.optim: what is changed between steps takes effect as in torch.optim."""

import copy

import pytest
import torch
from torch_peers import small_net

import tristep

# What may happen to a model and its optimizer between two steps. Each is done to ours and to torch's.


def _freeze(net, optimizer):
    net[0].bias.requires_grad_(False)
    net[0].bias.grad = None


def _move(net, optimizer):
    net[0].weight.data = net[0].weight.data.clone()


def _turn(net, optimizer):
    net[0].weight.data = net[0].weight.data.t().contiguous().t()


def _replace_parameter(net, optimizer):
    net[2].bias = torch.nn.Parameter(torch.full_like(net[2].bias, 0.5))
    optimizer.param_groups[0]["params"][-1] = net[2].bias


def _drop_parameter(net, optimizer):
    del optimizer.param_groups[0]["params"][1]


def _add_group(net, optimizer):
    optimizer.add_param_group({"params": [net.scale], "lr": 0.3})


def _forget(net, optimizer):
    optimizer.state.clear()


def _forget_one(net, optimizer):
    del optimizer.state[net[0].weight]


def _replace_states(net, optimizer):
    for row in optimizer.state.values():
        for key, value in row.items():
            row[key] = value * 0.5 if value.dim() else value


def _change_states(net, optimizer):
    for row in optimizer.state.values():
        for value in row.values():
            if value.dim():
                value.mul_(0.5)


def _move_states(net, optimizer):
    for row in optimizer.state.values():
        for value in row.values():
            if value.dim():
                value.share_memory_()


def _move_states_through_data(net, optimizer):
    for row in optimizer.state.values():
        for value in row.values():
            if value.dim():
                value.data = value.detach() * 0.5


def _replace_steps(net, optimizer):
    for row in optimizer.state.values():
        if "step" in row:
            row["step"] = torch.tensor(50.0)


def _change_one_step(net, optimizer):
    if "step" in optimizer.state[net[0].weight]:
        optimizer.state[net[0].weight]["step"].fill_(50.0)


def _other_options(net, optimizer):
    group = optimizer.param_groups[0]
    group["weight_decay"], group["maximize"] = 0.1, True
    if "momentum" in group:
        group["momentum"], group["nesterov"] = 0.5, False


def _no_momentum(net, optimizer):
    if "momentum" in optimizer.param_groups[0]:
        optimizer.param_groups[0].update(momentum=0.0, nesterov=False)


def _zero_gradients(net, optimizer):
    optimizer.zero_grad(set_to_none=False)
    optimizer.step()


def _no_gradients(net, optimizer):
    optimizer.zero_grad()
    optimizer.step()


def _load(net, optimizer):
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def _average(net, optimizer):
    for parameter in net.parameters():  # as an average of weights is put in their place
        parameter.data.mul_(0.9)


CHANGES = [
    _freeze, _move, _turn, _replace_parameter, _drop_parameter, _add_group, _forget, _forget_one, _replace_states,
    _change_states, _move_states, _move_states_through_data, _replace_steps, _change_one_step, _other_options, _no_momentum,
    _zero_gradients, _no_gradients, _load, _average,
]  # fmt: skip


def _steps(net, optimizer, n):
    for _ in range(n):
        optimizer.zero_grad()
        x = torch.linspace(-1, 1, 15, dtype=net.scale.dtype).view(5, 3)
        (net.scale * net(x) - 1).square().sum().backward()
        optimizer.step()


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__[1:])
@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("SGD", {"momentum": 0.9, "nesterov": True}),
        ("AdamW", {"amsgrad": True}),
        ("NAdam", {"decoupled_weight_decay": True, "weight_decay": 0.1}),
        ("ASGD", {"t0": 2}),
    ],
    ids=["SGD", "AdamW", "NAdam", "ASGD"],
)
def test_changes_between_steps_like_torch(name, arguments, change):
    nets = []
    for library in (tristep.optim, torch.optim):
        net = small_net()
        layers = [*net[0].parameters(), *net[2].parameters()]
        optimizer = getattr(library, name)(layers, lr=0.02, foreach=False, **arguments)
        _steps(net, optimizer, 3)
        change(net, optimizer)
        _steps(net, optimizer, 4)
        nets.append(net)
    # NAdam's and ASGD's own numbers are float32, but torch's are float64 once they have been loaded.
    torch.testing.assert_close(nets[0].state_dict(), nets[1].state_dict(), rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize(("before", "after"), [(torch.float32, torch.float64), (torch.float64, torch.float32)], ids=str)
def test_a_model_converted_between_steps(before, after):
    """torch's own steps fail then, unless the states are converted, which loading them does."""
    nets = []
    for library in (tristep.optim, torch.optim):
        net = small_net(before)
        optimizer = library.Adam(net.parameters(), lr=0.02)
        _steps(net, optimizer, 3)
        net.to(after)
        if library is torch.optim:
            optimizer.load_state_dict(optimizer.state_dict())
        _steps(net, optimizer, 3)
        nets.append(net)
    assert nets[0].scale.dtype == after
    torch.testing.assert_close(nets[0].state_dict(), nets[1].state_dict(), rtol=1e-4, atol=1e-5)


def test_a_model_made_bfloat16_between_steps_keeps_its_states():
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = tristep.optim.Adam([parameter], lr=0.1)
    parameter.grad = torch.full((3,), 1e-3)
    optimizer.step()
    mean = optimizer.state[parameter]["exp_avg"].clone()
    parameter.data = parameter.data.bfloat16()
    parameter.grad = torch.zeros(3, dtype=torch.bfloat16)
    optimizer.step()
    assert optimizer.state[parameter]["exp_avg"].dtype == torch.float32
    torch.testing.assert_close(optimizer.state[parameter]["exp_avg"], 0.9 * mean)


def test_a_parameter_of_another_shape_is_named():
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = tristep.optim.Adam([("layer.weight", parameter)], lr=0.1)
    parameter.grad = torch.ones(3)
    optimizer.step()
    parameter.data = torch.ones(4)
    parameter.grad = torch.ones(4)
    with pytest.raises(ValueError, match=r"'exp_avg' of 'layer.weight' has shape \(3,\), the parameter \(4,\)"):
        optimizer.step()
    assert parameter.tolist() == [1.0] * 4
