"""tristep.optim: what is changed between steps takes effect as in torch.optim."""

import copy
import pickle
from collections import defaultdict

import pytest
import torch
from torch_peers import small_net

import tristep

# What may happen to a model and its optimizer between two steps. Each is done to one of our optimizers, to a MultiOptimizer
# that has only this one, and to torch's. Those that return an optimizer and its model go on with these.


def _freeze(net, optimizer):
    net[0].bias.requires_grad_(False)
    net[0].bias.grad = None


def _move(net, optimizer):
    net[0].weight.data = net[0].weight.data.clone()


def _turn(net, optimizer):
    net[0].weight.data = net[0].weight.data.t().contiguous().t()


def _replace_parameter(net, optimizer):
    del optimizer.state[net[2].bias]  # or torch cannot save its states
    net[2].bias = torch.nn.Parameter(torch.full_like(net[2].bias, 0.5))
    optimizer.param_groups[0]["params"][-1] = net[2].bias


def _drop_parameter(net, optimizer):
    del optimizer.state[net[0].bias]
    for name in ("params", "param_names"):
        del optimizer.param_groups[0][name][1]


def _add_group(net, optimizer):
    optimizer.add_param_group({"params": [("scale", net.scale)], "lr": 0.3})


def _options_of(optimizer):
    return {name: value for name, value in optimizer.param_groups[0].items() if name not in ("params", "param_names")}


def _append_group(net, optimizer):
    group = optimizer.param_groups[0]
    moved = {name: [group[name].pop(), group[name].pop()] for name in ("params", "param_names")}
    optimizer.param_groups.append({**_options_of(optimizer), **moved, "lr": 0.3})


def _pop_group_and_return_it(net, optimizer):
    _append_group(net, optimizer)
    group = optimizer.param_groups.pop(0)
    _steps(net, optimizer, 1)
    optimizer.param_groups.append(group)


def _assign_groups(net, optimizer):
    group = optimizer.param_groups[0]
    halves = [{name: group[name][part] for name in ("params", "param_names")} for part in (slice(2), slice(2, None))]
    optimizer.param_groups = [{**_options_of(optimizer), **half, "lr": 0.1 * (k + 1)} for k, half in enumerate(halves)]


def _reverse_groups(net, optimizer):
    _append_group(net, optimizer)
    _steps(net, optimizer, 1)
    optimizer.param_groups.reverse()
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


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


def _pop(net, optimizer):
    optimizer.state.pop(net[0].weight)


def _copy_after_pop(net, optimizer):
    optimizer.state.pop(net[0].weight)
    return copy.deepcopy((net, optimizer))


def _pickle_after_append_group(net, optimizer):
    _append_group(net, optimizer)
    return pickle.loads(pickle.dumps((net, optimizer)))


def _replace_states(net, optimizer):
    for row in optimizer.state.values():
        for key, value in row.items():
            row[key] = value * 0.5 if value.dim() else value


def _move_states(net, optimizer):
    for row in optimizer.state.values():
        for value in row.values():
            value.data = value.data.clone()


def _turn_state(net, optimizer):
    for value in optimizer.state[net[0].weight].values():
        if value.dim():
            value.data = value.data.t().contiguous().t()


def _change_states(net, optimizer):
    for row in optimizer.state.values():
        for value in row.values():
            if value.dim():
                value.mul_(0.5)


def _replace_row(net, optimizer):
    row = optimizer.state[net[0].weight]
    optimizer.state[net[0].weight] = {key: value.abs() + 0.5 if value.dim() else value for key, value in row.items()}


def _replace_steps(net, optimizer):
    for row in optimizer.state.values():
        if "step" in row:
            row["step"] = torch.tensor(50.0)


def _change_one_step(net, optimizer):
    if "step" in optimizer.state[net[0].weight]:
        optimizer.state[net[0].weight]["step"].fill_(50.0)


def _state_of_half(net, optimizer):
    optimizer.state = defaultdict(dict, list(optimizer.state.items())[:3])


def _held_state(net, optimizer):
    held = optimizer.state
    held.clear()
    _steps(net, optimizer, 1)
    held.pop(net[0].weight)


def _set_state(net, optimizer):
    groups = [{**group, "lr": 0.5} for group in optimizer.param_groups]
    state = defaultdict(dict, {key: row for key, row in optimizer.state.items() if key.ndim == 2})
    optimizer.__setstate__({"state": state, "param_groups": groups})


def _load(net, optimizer):
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0]["lr"] = 0.5
    del saved["state"][2]
    _steps(net, optimizer, 1)
    optimizer.load_state_dict(saved)


def _load_with_hooks(net, optimizer):
    def before(_, state_dict):
        return {**state_dict, "param_groups": [{**group, "lr": 0.5} for group in state_dict["param_groups"]]}

    def after(loaded):
        assert loaded.param_groups[0]["lr"] == 0.5
        _change_states(net, loaded)
        del loaded.state[net[0].bias]
        loaded.param_groups[0]["weight_decay"] = 0.3

    optimizer.register_load_state_dict_pre_hook(before)
    optimizer.register_load_state_dict_post_hook(after)
    _load(net, optimizer)


def _save_with_hooks(net, optimizer):
    optimizer.register_state_dict_pre_hook(lambda saving: saving.state.pop(net[0].weight))
    optimizer.register_state_dict_post_hook(lambda _, saved: {**saved, "more": 1})
    saved = optimizer.state_dict()
    assert saved["more"] == 1
    assert 0 not in saved["state"]
    _steps(net, optimizer, 1)


CHANGES = [
    *(_freeze, _move, _turn, _replace_parameter, _drop_parameter, _add_group, _append_group),
    *(_pop_group_and_return_it, _assign_groups, _reverse_groups, _other_options, _no_momentum),
    *(_zero_gradients, _no_gradients, _pop, _copy_after_pop, _pickle_after_append_group, _replace_states),
    *(_move_states, _turn_state, _change_states, _replace_row, _replace_steps, _change_one_step, _state_of_half),
    *(_held_state, _set_state, _load, _load_with_hooks, _save_with_hooks),
]


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
def test_changes_between_steps_like_torch(name, arguments, change, passes):
    found = []
    options = {"lr": 0.02, "foreach": False, **arguments}
    for make in (
        lambda named: tristep.optim.MultiOptimizer(named, [("*", name)], **options),
        lambda named: getattr(tristep.optim, name)(named, **options),
        lambda named: getattr(torch.optim, name)(named, **options),
    ):
        net = small_net()
        optimizer = make([pair for pair in net.named_parameters() if pair[0] != "scale"])
        _steps(net, optimizer, 3)
        net, optimizer = change(net, optimizer) or (net, optimizer)
        _steps(net, optimizer, 4)
        found.append((net.state_dict(), optimizer.state_dict()))
    (several, saved_several), (ours, saved), (theirs, torchs) = found
    torch.testing.assert_close(several, ours, rtol=0, atol=0)
    assert str(saved_several) == str(saved)
    # NAdam's and ASGD's own numbers are float32, but torch's are float64 once they have been loaded.
    torch.testing.assert_close(ours, theirs, rtol=1e-7, atol=1e-9)
    assert [group["params"] for group in saved["param_groups"]] == [group["params"] for group in torchs["param_groups"]]
    assert saved["state"].keys() == torchs["state"].keys()


# What may happen to the memory of numbers such as update counts, of which training must see nothing.


def _share(optimizer, numbers):
    for number in numbers:
        number.share_memory_()


def _give_data(optimizer, numbers):
    for number in numbers:
        number.data = number.clone()


def _double(optimizer, numbers):
    for row in optimizer.state.values():
        for key, value in row.items():
            row[key] = value.double() if value.dim() == 0 else value


MOVES = [_share, _give_data, _double]
COUNTING = {
    "Adam": {},
    "NAdam": {},
    "RAdam": {},
    "ASGD": {"t0": 2},
    "Adagrad": {"lr_decay": 0.3},
}


def _numbers(optimizer):
    return [value for row in optimizer.state.values() for value in row.values() if value.dim() == 0]


def _train(optimizer, n):
    for _ in range(n):
        for k, parameter in enumerate(optimizer.param_groups[0]["params"]):
            parameter.grad = torch.full_like(parameter, 0.5 + k)
        optimizer.step()


def _close(optimizer, reference):
    torch.testing.assert_close(optimizer.param_groups[0]["params"], reference.param_groups[0]["params"])
    for row, expected in zip(optimizer.state.values(), reference.state.values(), strict=True):
        torch.testing.assert_close({key: row[key] for key in expected}, dict(expected))


@pytest.mark.parametrize("move", MOVES, ids=lambda move: move.__name__[1:])
@pytest.mark.parametrize("name", COUNTING)
def test_numbers_in_other_memory_go_on_like_torchs(name, move):
    both = []
    for library in (tristep.optim, torch.optim):
        parameters = [torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(3))]
        optimizer = getattr(library, name)(parameters, lr=0.02, **COUNTING[name])
        _train(optimizer, 2)
        move(optimizer, _numbers(optimizer))
        junk = [torch.full((1,), 7e5 + k) for k in range(500)]  # takes the memory that has become free
        numbers = _numbers(optimizer)
        _train(optimizer, 3)
        assert all(a is b for a, b in zip(numbers, _numbers(optimizer), strict=True))
        assert [each.item() for each in junk] == [7e5 + k for k in range(500)]
        both.append(optimizer)
    _close(*both)


@pytest.mark.parametrize("saved_by", [torch.optim, tristep.optim], ids=["torch", "ours"])
def test_a_loaded_state_does_not_count_with_what_it_was_loaded_from(saved_by):
    parameter = torch.nn.Parameter(torch.ones(2))
    source, optimizer = saved_by.NAdam([parameter]), tristep.optim.NAdam([parameter])
    _train(source, 2)
    state = source.state_dict()
    optimizer.load_state_dict(state)
    _train(optimizer, 3)
    assert [row["step"].item() for row in (state["state"][0], source.state[parameter])] == [2.0, 2.0]
    assert optimizer.state[parameter]["step"].item() == 5.0
    _train(source, 1)
    assert optimizer.state[parameter]["step"].item() == 5.0


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
