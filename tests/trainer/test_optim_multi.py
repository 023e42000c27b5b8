"""tristep.optim.MultiOptimizer against the optimizers of torch side by side, in torch's own tools."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from tristep import optim
from tristep.viz.views.reprs import to_html

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


def test_averages_and_the_table():
    net = make_net()
    optimizer = optim.MultiOptimizer(net, [("ndim<2", "Lion", {"ema_decay": 0.5}), ("*", torch.optim.SGD)], lr=0.1)
    last = take(optimizer, net, 3)
    with optimizer.averaged_weights():
        for param, now in zip(net.parameters(), last, strict=True):
            assert torch.equal(param, now) == (param.ndim >= 2)
    close([param.detach() for param in net.parameters()], last, rtol=0, atol=0)
    lines = str(optimizer).splitlines()
    assert lines[1].split() == ["0.weight", "(8,", "6)", "SGD", "0.1", "0", "*"]
    assert len(lines) == 7
    assert "ndim&lt;2" in to_html(optimizer)
    with pytest.raises(ValueError, match="none of the optimizers"), optim.MultiOptimizer(net, ENTRIES).averaged_weights():
        pass


@pytest.mark.parametrize(
    ("entries", "kind", "words"),
    [
        ([("nowhere", "Adam"), ("*", "SGD")], ValueError, "'nowhere' gets no parameter"),
        ([("0.*", "Adam")], ValueError, "no pattern takes '1.weight'"),
        ([("*", "Adem")], ValueError, r"entries\[0\].*adam"),
        ([("*", "AdamW", {"lr": -1.0})], ValueError, r"entries\[0\], '\*': "),
        ([("*", nn.Linear)], TypeError, "must be a name"),
        ([], ValueError, "at least one"),
    ],
)
def test_wrong_entries_are_refused(entries, kind, words):
    with pytest.raises(kind, match=words):
        optim.MultiOptimizer(make_net(), entries)
    optimizer = optim.MultiOptimizer(make_net(), ENTRIES)
    with pytest.raises(RuntimeError, match="add_param_group"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
