"""tristep.optim.MultiOptimizer against the optimizers of torch side by side, in torch's own tools."""

import copy
import functools
import pickle

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from tristep import optim

ENTRIES = [("ndim<2", "AdamW", {"lr": 0.02}), ("*", "SGD", {"lr": 0.01, "momentum": 0.9})]


def make_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3)).double()


def loss_of(net, step):
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(step)).double()
    return (net(x) - x[:, :3]).square().sum()


def take(optimizer, net, steps, first=0, scheduler=None):
    for step in range(first, first + steps):
        optimizer.zero_grad()
        loss_of(net, step).backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return [param.detach().clone() for param in net.parameters()]


def torchs(net):
    vectors, matrices = ([p for p in net.parameters() if (p.ndim < 2) == small] for small in (True, False))
    return [
        torch.optim.AdamW(vectors, lr=0.02, weight_decay=0.1),
        torch.optim.SGD(matrices, lr=0.01, momentum=0.9, weight_decay=0.1),
    ]


def close(found, expected, **tolerance):
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, **tolerance)


def test_schedulers_and_states_are_torchs():
    net, peer = make_net(), make_net()
    optimizer, peers = optim.MultiOptimizer(net, ENTRIES, weight_decay=0.1), torchs(peer)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    schedulers = [torch.optim.lr_scheduler.CosineAnnealingLR(each, 10) for each in peers]
    found = take(optimizer, net, 5, scheduler=scheduler)
    for step in range(5):
        peer.zero_grad()
        loss_of(peer, step).backward()
        for each, schedule in zip(peers, schedulers, strict=True):
            each.step()
            schedule.step()
    close(found, [param.detach() for param in peer.parameters()], rtol=0, atol=1e-12)
    assert scheduler.get_last_lr() == [schedule.get_last_lr()[0] for schedule in schedulers]
    for (_, row), other in zip(optimizer.state.items(), [row for each in peers for row in each.state.values()], strict=True):
        assert {name for name in row if name != "step"} == {name for name in other if name != "step"}


@pytest.mark.parametrize("way", ["state_dict", "checkpoint", "pickle"])
def test_resuming_is_exact(way):
    net = make_net()
    optimizer = optim.MultiOptimizer(net.named_parameters(), ENTRIES)
    take(optimizer, net, 3)
    weights = copy.deepcopy(net.state_dict())
    if way == "pickle":
        net_again, again = pickle.loads(pickle.dumps((net, optimizer)))
        expected = take(optimizer, net, 2, first=3)
        close(take(again, net_again, 2, first=3), expected, rtol=0, atol=0)
        return
    saved = copy.deepcopy(optimizer.state_dict() if way == "state_dict" else get_optimizer_state_dict(net, optimizer))
    expected = take(optimizer, net, 2, first=3)
    other = make_net()
    other.load_state_dict(weights)
    again = optim.MultiOptimizer(other, ENTRIES)
    if way == "state_dict":
        again.load_state_dict(saved)
    else:
        set_optimizer_state_dict(other, again, saved)
    close(take(again, other, 2, first=3), expected, rtol=0, atol=0)


def test_a_state_of_other_groups_is_refused():
    net = make_net()
    optimizer = optim.MultiOptimizer(net, ENTRIES)
    take(optimizer, net, 1)
    other = optim.MultiOptimizer(net, [("*.bias", "AdamW"), ("*", "SGD")])
    with pytest.raises(ValueError, match="groups of"):
        other.load_state_dict(optimizer.state_dict())
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][1]["momentum"] = -1.0
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match="momentum"):
        optimizer.load_state_dict(saved)
    assert str(optimizer.state_dict()) == str(before)


def test_the_closure_is_called_once_and_grad_scaler_skips():
    net = make_net().float()
    optimizer, calls = optim.MultiOptimizer(net, ENTRIES), []

    def closure():
        calls.append(1)
        optimizer.zero_grad()
        loss = net(torch.ones(1, 6)).sum()
        loss.backward()
        return loss

    assert torch.is_tensor(optimizer.step(closure))
    assert len(calls) == 1
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    before = [param.detach().clone() for param in net.parameters()]
    optimizer.zero_grad()
    scaler.scale(net(torch.full((1, 6), float("inf"))).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    close([param.detach() for param in net.parameters()], before, rtol=0, atol=0)
    assert scaler.get_scale() == 2.0


def test_averages_of_those_that_keep_some():
    net = make_net()
    optimizer = optim.MultiOptimizer(net, [("ndim<2", "Lion", {"ema_decay": 0.5}), ("*", torch.optim.SGD)], lr=0.1)
    last = take(optimizer, net, 3)
    with optimizer.averaged_weights():
        for param, now in zip(net.parameters(), last, strict=True):
            assert torch.equal(param, now) == (param.ndim >= 2)
    close([param.detach() for param in net.parameters()], last, rtol=0, atol=0)
    with pytest.raises(ValueError, match="none of the optimizers"), optim.MultiOptimizer(net, ENTRIES).averaged_weights():
        pass


def test_eval_and_train_reach_those_that_have_them():
    net = make_net()
    entries = [("ndim<2", "ScheduleFreeSGD", {"lr": 0.1}), ("2.*", "Lion"), ("*", torch.optim.SGD)]
    optimizer = optim.MultiOptimizer(net, entries, lr=0.01)
    trained = take(optimizer, net, 3)
    with optimizer.averaged_weights():
        averages = [parameter.detach().clone() for parameter in net.parameters()]
    optimizer.eval()
    close([parameter.detach() for parameter in net.parameters()], averages, rtol=0, atol=0)
    with pytest.raises(RuntimeError, match=r"step\(\) while parameters have their averaged values"):
        optimizer.step()
    close([parameter.detach() for parameter in net.parameters()], averages, rtol=0, atol=0)  # also SGD's
    other = make_net()
    with torch.no_grad():
        for parameter, average in zip(other.parameters(), averages, strict=True):
            parameter.copy_(average)
    again = optim.MultiOptimizer(other, entries, lr=0.01)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for each, model in ((optimizer, net), (again, other)):
        each.train()
        close([parameter.detach() for parameter in model.parameters()], trained, rtol=0, atol=0)
    close(take(again, other, 2), take(optimizer, net, 2), rtol=0, atol=0)
    optimizer.eval()
    with torch.no_grad():
        net[0].bias.zero_()
    with pytest.raises(RuntimeError, match="written to between"):
        optimizer.train()
    take(optimizer, net, 1)


def test_changes_reach_each_of_several_optimizers():
    net, peer = make_net(), make_net()
    optimizer, (adamw, sgd) = optim.MultiOptimizer(net, ENTRIES, weight_decay=0.1), torchs(peer)

    def both(steps, first):
        close(take(optimizer, net, steps, first), peers(steps, first), rtol=0, atol=1e-12)

    def peers(steps, first):
        for step in range(first, first + steps):
            peer.zero_grad()
            loss_of(peer, step).backward()
            adamw.step()
            sgd.step()
        return [parameter.detach() for parameter in peer.parameters()]

    both(2, 0)
    optimizer.state.clear()
    adamw.state.clear()
    sgd.state.clear()
    both(2, 2)
    optimizer.param_groups.reverse()  # and with new dicts
    optimizer.param_groups = [{**group, "lr": 0.5 * group["lr"]} for group in optimizer.param_groups]
    for each in (adamw, sgd):
        each.param_groups[0]["lr"] *= 0.5
    both(2, 4)
    saved = copy.deepcopy(optimizer.state_dict())
    assert ["momentum" in group for group in saved["param_groups"]] == [True, False]
    del optimizer.state[net[0].weight], optimizer.state[net[0].bias]
    optimizer.load_state_dict(saved)
    both(1, 6)
    optimizer.state[net[0].weight]["momentum_buffer"].zero_()
    sgd.state[peer[0].weight]["momentum_buffer"].zero_()
    both(1, 7)
    optimizer.state.pop(net[0].bias)
    adamw.state.pop(peer[0].bias)
    both(1, 8)
    assert [len(each.state) for each in optimizer.optimizers] == [len(adamw.state), len(sgd.state)]
    optimizer.param_groups.pop(0)
    sgd.param_groups[0]["lr"] = sgd.param_groups[0]["weight_decay"] = 0.0
    both(1, 9)


def test_a_group_of_nobody_is_refused_before_anything_changes():
    net = make_net()
    optimizer = optim.MultiOptimizer(net, ENTRIES)
    take(optimizer, net, 1)
    before = [parameter.detach().clone() for parameter in net.parameters()]
    groups = list(optimizer.param_groups)
    for wrong, words in (
        ({**groups[0], "params": [nn.Parameter(torch.ones(2))]}, r"param_groups\[2\] has parameters of no optimizer"),
        ({**groups[0], "params": list(net.parameters())}, r"param_groups\[2\] has parameters of several optimizers"),
    ):
        optimizer.param_groups.append(wrong)
        for call in (optimizer.step, optimizer.state_dict):
            with pytest.raises(ValueError, match=words):
                call()
        close([parameter.detach() for parameter in net.parameters()], before, rtol=0, atol=0)
        optimizer.param_groups.pop()
    take(optimizer, net, 1)


@pytest.mark.parametrize("schedule", ["OneCycleLR", "CyclicLR"])
@pytest.mark.parametrize(
    "names",
    [("AdamW", "AdamW"), ("SGD", "SGD"), ("AdamW", "SGD"), ("SGD", "AdamW"), ("AdamW", torch.optim.SGD)],
    ids=["betas", "momentum", "both", "both, the other way", "one of torch's"],
)
def test_schedules_of_momentum_are_torchs(schedule, names):
    """As with torch's optimizers, each with its scheduler."""
    arguments = {"total_steps": 9} if schedule == "OneCycleLR" else {"base_lr": 0.001, "step_size_up": 3}
    make = functools.partial(getattr(torch.optim.lr_scheduler, schedule), **arguments)
    options = [
        {"lr": lr} if name == "AdamW" else {"lr": lr, "momentum": 0.9} for name, lr in zip(names, (0.02, 0.01), strict=True)
    ]
    net = make_net()
    optimizer = optim.MultiOptimizer(net, [("ndim<2", names[0], options[0]), ("*", names[1], options[1])])
    weights = take(optimizer, net, 7, scheduler=make(optimizer, max_lr=[0.01, 0.005]))
    net, peers, schedulers = make_net(), [], []
    for name, of, small, max_lr in zip(names, options, (True, False), (0.01, 0.005), strict=True):
        peer = getattr(torch.optim, name) if isinstance(name, str) else name
        peers.append(peer([p for p in net.parameters() if (p.ndim < 2) == small], **of))
        schedulers.append(make(peers[-1], max_lr=max_lr))
    for step in range(7):
        net.zero_grad()
        loss_of(net, step).backward()
        for each in (*peers, *schedulers):
            each.step()
    close(weights, list(net.parameters()), rtol=0, atol=1e-12)


def _step_flattened(net, optimizer, steps):
    """Train as DeepSpeed's ZeRO does: a group has one vector of all its parameters, and each group is stepped alone."""
    vectors = []
    for group in optimizer.param_groups:
        params = group["params"]
        group["params"] = [torch.cat([param.detach().flatten() for param in params]).requires_grad_()]
        vectors.append((params, group["params"][0]))
    groups = optimizer.param_groups
    for step in range(steps):
        net.zero_grad()
        loss_of(net, step).backward()
        for k, (params, vector) in enumerate(vectors):
            vector.grad = torch.cat([param.grad.flatten() for param in params])
            optimizer.param_groups = [groups[k]]
            optimizer.step()
            optimizer.param_groups = groups
            for _, other in vectors:
                optimizer.state[other]  # makes a row, as a defaultdict does
            with torch.no_grad():
                nn.utils.vector_to_parameters(vector, params)
    return [param.detach().clone() for param in net.parameters()]


def test_groups_of_flattened_parameters_are_stepped_in_turns():
    net, peer = make_net(), make_net()
    found = _step_flattened(net, optim.MultiOptimizer(net, ENTRIES, weight_decay=0.1), 4)
    peers = torchs(peer)
    for step in range(4):
        peer.zero_grad()
        loss_of(peer, step).backward()
        for each in peers:
            each.step()
    close(found, list(peer.parameters()), rtol=1e-10, atol=1e-12)
