"""Steps inside backward: which gradients are alive meanwhile, what may happen in between, and what is refused."""

import weakref

import pytest
import torch
from optimizer_training import ByHand
from torch.nn import Parameter

from tristep import StaleGradientError, Trainer
from tristep.trainer.step import in_backward


class Net(torch.nn.Module):
    """Matrices, of which one is used twice."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(4, 6, bias=False)
        self.twice = torch.nn.Linear(6, 6, bias=False)
        self.last = torch.nn.Linear(6, 2, bias=False)
        self.scale = Parameter(torch.ones(1, 2))

    def forward(self, x):
        x = torch.tanh(self.twice(torch.tanh(self.first(x))))
        return self.scale * self.last(torch.tanh(self.twice(x)))


def _pair(make, device):
    """Two equal nets, each with what `make` makes for it."""
    nets = [Net().to(device), Net().to(device)]
    nets[1].load_state_dict(nets[0].state_dict())
    return nets, [make(net) for net in nets]


def _loss(net, x):
    return net(x).square().sum()


def _equal(trainers):
    states = [trainer.state_dict() for trainer in trainers]
    plain = [{key: value for key, value in state.items() if key != "state"} for state in states]
    assert plain[0] == plain[1]
    for one, other in zip(*(_tensors(state) for state in states), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def _tensors(value):
    if isinstance(value, torch.Tensor):
        return [value]
    values = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else []
    return [tensor for item in values for tensor in _tensors(item)]


@pytest.mark.parametrize(("together", "most"), [(0, 2), (200, 5)])
def test_few_gradients_are_alive_at_once(monkeypatch, together, most, device):
    """Matrices of 100 bytes and vectors of 20: 200 bytes are four of them at most, while one more is made."""
    monkeypatch.setattr(in_backward, "GROUP_BYTES", together)
    net = torch.nn.Sequential(*(torch.nn.Linear(5, 5) for _ in range(12))).to(device)
    trainer = Trainer(net, "sgd", {"learning_rate": 0.01})
    seen, alive = [], []

    def look(param):
        seen.append(weakref.ref(param.grad))
        alive.append(sum(reference() is not None for reference in seen))

    for param in net.parameters():
        param.register_post_accumulate_grad_hook(look)
    net(torch.ones(3, 5, device=device)).sum().backward()
    assert max(alive) == 24
    trainer.zero_grad()
    seen.clear()
    alive.clear()
    with trainer.step_in_backward(3):
        net(torch.ones(3, 5, device=device)).sum().backward()
    assert len(seen) == 24
    assert max(alive) <= most
    assert not any(reference() is not None for reference in seen)


def test_gradients_of_earlier_backward_passes_count(device):
    nets, trainers = _pair(lambda net: Trainer(net, "adam"), device)
    for _ in range(3):
        micro = [torch.randn(4, 4, device=device) for _ in range(3)]
        for net in nets:
            for x in micro[:-1]:
                _loss(net, x).backward()
        _loss(nets[0], micro[-1]).backward()
        trainers[0].step(12)
        trainers[0].zero_grad()
        with trainers[1].step_in_backward(12):
            _loss(nets[1], micro[-1]).backward()
    _equal(trainers)
    assert all(torch.equal(a, b) for a, b in zip(nets[0].parameters(), nets[1].parameters(), strict=True))


@pytest.mark.parametrize("together", [0, 2**20])
def test_parameters_of_different_counts(monkeypatch, together, device):
    """Lookahead's rule is another one at the update that synchronizes, which is not the same for all here."""
    monkeypatch.setattr(in_backward, "GROUP_BYTES", together)
    pairs = [[Parameter(torch.full((3,), float(i), device=device)) for i in range(3)] for _ in range(2)]
    trainers = [Trainer(params, "adam", {"lookahead": 2, "learning_rate": 0.1}) for params in pairs]
    for k in range(6):
        used = slice(0, 2 if k == 0 else 3)
        trainers[0].zero_grad()
        sum(param.square().sum() for param in pairs[0][used]).backward()
        trainers[0].step(1, ignore_stale_grad=True)
        with trainers[1].step_in_backward(1, ignore_stale_grad=True):
            sum(param.square().sum() for param in pairs[1][used]).backward()
        assert all(torch.equal(a, b) for a, b in zip(*pairs, strict=True))
    _equal(trainers)


def test_parameters_of_optimizers_with_other_rules(device):
    """Gradients of the one come between those of the other, and small ones are not updated together."""
    entries = [("first.*", "adam"), ("scale", "adam"), ("*", "sgd", {"learning_rate": 0.1, "momentum": 0.9})]
    nets, trainers = _pair(lambda net: Trainer(net, entries), device)
    for _ in range(3):
        x = torch.randn(8, 4, device=device)
        trainers[0].zero_grad()
        _loss(nets[0], x).backward()
        trainers[0].step(1)
        with trainers[1].step_in_backward(1):
            _loss(nets[1], x).backward()
    assert all(torch.equal(a, b) for a, b in zip(nets[0].parameters(), nets[1].parameters(), strict=True))
    _equal(trainers)


def test_sparse_gradients_update_their_rows(device):
    tables = [torch.nn.Embedding(9, 3, sparse=True, device=device) for _ in range(2)]
    tables[1].load_state_dict(tables[0].state_dict())
    trainers = [Trainer(table, "adam", {"wd": 0.1}) for table in tables]
    for rows in ([1, 5], [5, 5, 8], [0]):
        rows = torch.tensor(rows, device=device)
        trainers[0].zero_grad()
        tables[0](rows).square().sum().backward()
        trainers[0].step(1)
        with trainers[1].step_in_backward(1):
            tables[1](rows).square().sum().backward()
    assert torch.equal(tables[0].weight, tables[1].weight)
    _equal(trainers)


# ---- what is refused -------------------------------------------------------------------------------------------------


REFUSED = {
    "no rate": (("schedulefreesgd", {"lr_scheduler": lambda n: -1.0}), {"batch_size": 4}, ValueError, "lr_scheduler"),
    "all gradients together": (("prodigy",), {}, ValueError, "Prodigy: its rule sums over all gradients together"),
    "by hand": ((ByHand(),), {}, TypeError, "ByHand updates by hand"),
    "order of parameters": (
        ("nadam",),
        {"ignore_stale_grad": True},
        ValueError,
        "Nadam: must be False, because its hyper-parameters",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused_before_anything_changes(what, device, everything):
    optimizer, arguments, error, message = REFUSED[what]
    net = Net().to(device)
    trainer = Trainer(net, *optimizer)
    before = everything(trainer, net.parameters())
    with pytest.raises(error, match=message), trainer.step_in_backward(**{"batch_size": 1} | arguments):
        pass
    assert everything(trainer, net.parameters()) == before


def test_not_in_itself(device):
    net = Net().to(device)
    trainer = Trainer(net, "sgd")
    with trainer.step_in_backward(1):
        inner = trainer.step_in_backward(1)
        with pytest.raises(RuntimeError, match="one backward pass can only be one step"):
            inner.__enter__()
        _loss(net, torch.ones(1, 4, device=device)).backward()


@pytest.mark.parametrize("together", [0, 2**20])
def test_a_second_backward_is_refused_and_not_used(monkeypatch, together, device):
    monkeypatch.setattr(in_backward, "GROUP_BYTES", together)
    net = Net().to(device)
    trainer = Trainer(net, "sgd")
    x = torch.ones(1, 4, device=device)
    with trainer.step_in_backward(1):
        _loss(net, x).backward()
        before = [param.detach().clone() for param in net.parameters()]
        with pytest.raises(RuntimeError, match="a second gradient for"):
            _loss(net, x).backward()
    assert all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))
    assert set(trainer.optimizer.counts.values()) == {1}


def test_a_gradient_with_a_graph_is_refused(device):
    net = Net().to(device)
    trainer = Trainer(net, "sgd")
    with (
        pytest.warns(UserWarning, match="create_graph"),
        pytest.raises(ValueError, match="has a graph"),
        trainer.step_in_backward(1),
    ):
        _loss(net, torch.ones(1, 4, device=device)).backward(create_graph=True)
    assert trainer.optimizer.num_update == 0


@pytest.mark.parametrize("ignore", [False, True])
def test_parameters_without_a_gradient(ignore, device):
    """As in an ordinary step, except that the error can only come in the end."""
    params = [Parameter(torch.ones(3, device=device)) for _ in range(3)]
    params[2].requires_grad = False
    trainer = Trainer(params, "sgd", {"learning_rate": 0.5})
    if ignore:
        with trainer.step_in_backward(1, ignore_stale_grad=True):
            params[0].sum().backward()
    else:
        message = "no gradient for '1'; the other parameters have been updated"
        with pytest.raises(StaleGradientError, match=message), trainer.step_in_backward(1):
            params[0].sum().backward()
    assert [param[0].item() for param in params] == [0.5, 1.0, 1.0]
    assert {index: count for index, count in trainer.optimizer.counts.items() if count} == {0: 1}
    (params[0] + params[1]).sum().backward()
    trainer.step(1)
    assert [param[0].item() for param in params] == [0.0, 0.5, 1.0]
    assert trainer.optimizer.counts[0] == 2
    assert trainer.optimizer.counts[1] == 1


@pytest.mark.parametrize("name", ["schedulefreesgd", "adam"])
def test_without_backward_nothing_changes(name, device, everything):
    net = Net().to(device)
    trainer = Trainer(net, name)
    before = everything(trainer, net.parameters())
    with trainer.step_in_backward(5, ignore_stale_grad=True):
        pass
    with pytest.raises(StaleGradientError, match="nothing has been changed"), trainer.step_in_backward(5):
        pass
    with pytest.raises(ZeroDivisionError), trainer.step_in_backward(5):
        _ = 1 / 0
    assert everything(trainer, net.parameters()) == before
    _loss(net, torch.ones(1, 4, device=device)).backward()  # no hook is left
    assert all(param.grad is not None for param in net.parameters())


def test_an_error_in_the_middle_of_backward_leaves_the_rest_as_it_was(device):
    params = [Parameter(torch.ones(2, device=device)) for _ in range(2)]
    trainer = Trainer(params, "adam", {"learning_rate": 0.5})

    def fail(gradient):
        raise ZeroDivisionError

    hook = params[0].register_hook(fail)
    with pytest.raises(ZeroDivisionError), trainer.step_in_backward(1):
        (params[0] * 2).exp().mul(params[1]).sum().backward()
    hook.remove()
    assert bool((params[0] == 1).all())
    counts = trainer.optimizer.counts
    for _ in range(2):
        trainer.zero_grad()
        with trainer.step_in_backward(1):
            (params[0] * 2).exp().mul(params[1]).sum().backward()
    assert trainer.optimizer.counts == {index: count + 2 for index, count in counts.items()}
