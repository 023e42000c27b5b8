"""Sparse gradients, such as those of torch.nn.Embedding(sparse=True): rows that are touched, steps like torch's, refusals.

The judges are torch.optim, and the same training with gradients written out. MXNet's own numbers: test_golden_optimizers.py.
"""

import copy
import warnings

import numpy as np
import pytest
import torch
from torch.nn import Parameter
from trainer_cases import values_of

from tristep import StaleGradientError, Trainer
from tristep.trainer.optimizer import SGD, create, get_updater

CLOSE = {"rtol": 2e-6, "atol": 1e-6}

# Those that take sparse gradients, with decay where they can.
TAKERS = {
    "sgd": ("sgd", {"learning_rate": 0.1, "wd": 0.1}),
    "momentum": ("sgd", {"learning_rate": 0.1, "momentum": 0.9, "wd": 0.1}),
    "ccsgd": ("ccsgd", {"learning_rate": 0.1, "momentum": 0.9}),
    "adam": ("adam", {"learning_rate": 0.01, "wd": 0.1}),
    "adagrad": ("adagrad", {"learning_rate": 0.1}),
    "groupadagrad": ("groupadagrad", {"learning_rate": 0.1}),
    "ftrl": ("ftrl", {"learning_rate": 0.1, "wd": 0.1}),
}

ALL = pytest.mark.parametrize("name", TAKERS)


class Net(torch.nn.Module):
    """An embedding with sparse gradients, and a dense layer."""

    def __init__(self, sparse=True):
        super().__init__()
        self.embedding = torch.nn.Embedding(9, 4, sparse=sparse)
        self.head = torch.nn.Linear(4, 3)

    def forward(self, words):
        return self.head(torch.tanh(self.embedding(words)))


def backward_of(net, words):
    torch.nn.functional.cross_entropy(net(words), words % 3, reduction="sum").backward()


@pytest.fixture(autouse=True)
def _checked():
    """torch would like to be told whether sparse tensors are to be checked."""
    with torch.sparse.check_sparse_tensor_invariants():
        yield


def _make(name, **more):
    optimizer, kwargs = TAKERS[name]
    return create(optimizer, **kwargs | more)


def _sparse(rows, values, shape):
    index = torch.as_tensor(rows, device=values.device)[None]
    return torch.sparse_coo_tensor(index, values, shape)


def _twins(device):
    """A net with sparse gradients and its copy with dense ones."""
    net, other = Net().to(device), Net(sparse=False).to(device)
    other.load_state_dict(net.state_dict())
    return net, other


BATCHES = [[0, 3, 3, 8], [1], [3, 0, 5, 5, 5], [2, 7], [8, 3]]


def _train(net, trainer, device, batches=BATCHES):
    for words in batches:
        net.zero_grad()
        backward_of(net, torch.tensor(words, device=device))
        trainer.step(len(words))


@ALL
def test_only_the_rows_of_the_gradient_are_touched(name, engine, device, monkeypatch):
    """Each row is trained as if it were a weight of its own that skips the steps in which it does not occur."""
    monkeypatch.setenv("TRISTEP_ENGINE", engine)
    weight = torch.randn(6, 3, device=device)
    alone = {row: weight[row : row + 1].clone() for row in range(6)}
    together, apart = get_updater(_make(name)), get_updater(_make(name))
    for step, rows in enumerate(([0, 2], [2], [5, 0, 2], [4])):
        values = torch.randn(len(rows), 3, device=device)
        together(0, _sparse(rows, values, weight.shape), weight)
        for row, value in zip(rows, values, strict=True):
            (slot,) = apart.optimizer.slots([row])
            apart.optimizer.step_counts.values[slot] = step  # Adam's t is that of the whole parameter
            apart(row, value[None], alone[row])
    for row in range(6):
        torch.testing.assert_close(weight[row], alone[row][0], **CLOSE)
    for k, state in enumerate(together.states[0]):
        for row in range(6):
            theirs = apart.states[row][k][0] if row in apart.states else torch.zeros_like(state[row])
            torch.testing.assert_close(state[row], theirs, **CLOSE)
    assert 1 not in apart.states
    assert together.optimizer.counts == {0: 4}


@pytest.mark.parametrize("name", ["sgd", "momentum", "adam"])
def test_without_lazy_update_a_sparse_gradient_is_as_good_as_a_dense_one(name, engine, device):
    net, other = _twins(device)
    for those in (net, other):
        _train(those, Trainer(those, _make(name, lazy_update=False), engine=engine), device)
    for one, two in zip(net.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one, two, **CLOSE)
    assert net.embedding.weight.grad.is_sparse


def test_rows_that_occur_twice_are_added_up_before_anything_else(engine, device):
    weight = Parameter(torch.zeros(4, 2, device=device))
    trainer = Trainer([weight], "sgd", {"learning_rate": 1.0, "clip_gradient": 1.0}, engine=engine)
    values = torch.tensor([[3.0, 0.25], [-2.5, 0.5], [8.0, 8.0]], device=device)
    weight.grad = _sparse([2, 2, 0], values, (4, 2))
    trainer.step(1)
    assert weight.tolist() == [[-1.0, -1.0], [0.0, 0.0], [-0.5, -0.75], [0.0, 0.0]]
    assert not weight.grad.is_coalesced()  # it is left as it was
    assert torch.equal(weight.grad._values(), values)


@pytest.mark.parametrize("shape", [(5,), (4, 3), (3, 2, 2)])
def test_gradients_that_list_elements_count_by_the_row(shape, device):
    weight, dense = torch.ones(shape, device=device), torch.ones(shape, device=device)
    gradient = torch.zeros(shape, device=device)
    gradient[1] = torch.arange(gradient[1].numel(), device=device).reshape(shape[1:]) + 1.0
    updater = get_updater(_make("momentum"))
    updater(0, gradient.to_sparse(), weight)
    get_updater(_make("momentum"))(0, gradient, dense)
    assert torch.equal(weight[1], dense[1])
    assert (weight[[0, 2]] == 1).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("multi_precision", [False, True])
@ALL
def test_weights_of_every_type(name, multi_precision, dtype, device):
    weight = torch.randn(5, 3, device=device).to(dtype)
    dense = weight.clone()
    one, other = (get_updater(_make(name, multi_precision=multi_precision)) for _ in range(2))
    for _ in range(3):
        gradient = torch.randn(5, 3, device=device).to(dtype)
        one(0, _sparse([4, 3, 2, 1, 0], gradient.flip(0), weight.shape), weight)
        other(0, gradient, dense)
    assert torch.equal(weight, dense)
    assert one.masters.keys() == other.masters.keys()
    assert all(torch.equal(one.masters[i], other.masters[i]) for i in one.masters)


def test_weights_of_any_layout(engine, device, monkeypatch):
    monkeypatch.setenv("TRISTEP_ENGINE", engine)
    whole = torch.randn(6, 8, device=device)
    for cut in (lambda t: t.t(), lambda t: t[:, ::2], lambda t: t[1:4]):
        weight, dense = cut(whole.clone()), cut(whole.clone())
        one, other = get_updater(_make("adam")), get_updater(_make("adam"))
        for _ in range(2):
            rows = torch.arange(len(weight), device=device)
            gradient = torch.randn(weight.shape, device=device)
            one(0, _sparse(rows, gradient, weight.shape), weight)
            other(0, gradient, dense)
        torch.testing.assert_close(weight, dense, **CLOSE)


@pytest.mark.parametrize(
    ("optimizer", "options", "peer", "theirs"),
    [
        ("sgd", {}, torch.optim.SGD, {}),  # which takes sparse gradients where there is neither momentum nor decay
        ("adagrad", {"eps": 1e-14}, torch.optim.Adagrad, {"eps": 1e-14}),  # which touches their rows only
        ("adam", {"epsilon": 1e-12}, torch.optim.SparseAdam, {"eps": 1e-12}),
    ],
    ids=["sgd", "adagrad", "adam"],
)
def test_sparse_gradients_like_torch(optimizer, options, peer, theirs, engine, device):
    net = Net().to(device)
    twin = copy.deepcopy(net).double()
    if optimizer == "adam":  # torch's takes no dense ones
        net.head.requires_grad_(False)
        twin.head.requires_grad_(False)
    trainer = Trainer(net, optimizer, {"learning_rate": 0.1, **options}, engine=engine)
    reference = peer([param for param in twin.parameters() if param.requires_grad], lr=0.1, **theirs)
    for step in range(10):
        words = torch.tensor(BATCHES[step % len(BATCHES)], device=device)
        for those in (net, twin):
            those.zero_grad()
            backward_of(those, words)
        trainer.step(1)
        reference.step()
    for one, other in zip(net.parameters(), twin.parameters(), strict=True):
        np.testing.assert_allclose(*values_of(one, other), rtol=2e-5, atol=2e-6)


def test_rates_and_decay_follow_multipliers_and_schedule(device):
    net = Net().to(device)
    net.embedding.weight.lr_mult, net.embedding.weight.wd_mult = 0.5, 2.0
    trainer = Trainer(net, "sgd", {"lr_scheduler": lambda num_update: 1.0 / num_update, "wd": 0.1})
    for t in (1, 2):
        (before,) = values_of(net.embedding.weight)
        net.zero_grad()
        backward_of(net, torch.tensor([4, 4, 6], device=device))
        trainer.step(3)
        (gradient,) = values_of(net.embedding.weight.grad.to_dense())
        wanted = before.copy()
        wanted[[4, 6]] -= 0.5 / t * (gradient / 3 + 0.2 * before)[[4, 6]]
        np.testing.assert_allclose(values_of(net.embedding.weight)[0], wanted, rtol=1e-5, atol=1e-6)


def test_sparse_and_dense_gradients_may_take_turns(engine, device):
    """The same parameter: in every second step as a sparse gradient with all rows."""
    weight, other = Parameter(torch.randn(4, 3, device=device)), Parameter(torch.randn(2, device=device))
    twins = [Parameter(param.detach().clone()) for param in (weight, other)]
    turning, dense = (Trainer(those, "adam", engine=engine) for those in ((weight, other), twins))
    for step in range(6):
        gradient = torch.randn(4, 3, device=device)
        weight.grad = _sparse([0, 1, 2, 3], gradient.clone(), (4, 3)) if step % 2 else gradient.clone()
        twins[0].grad = gradient
        other.grad = torch.ones(2, device=device)
        twins[1].grad = torch.ones(2, device=device)
        turning.step(1)
        dense.step(1)
    assert torch.equal(weight, twins[0])
    assert torch.equal(other, twins[1])


# ---- which were written since the last step, and which are refused ---------------------------------------------------


def _fails_and_changes_nothing(trainer, net, everything, words):
    before = everything(trainer, net.parameters())
    with pytest.raises(StaleGradientError, match=words):
        trainer.step(1)
    assert everything(trainer, net.parameters()) == before


def test_a_sparse_gradient_is_used_once(device, everything):
    net = Net().to(device)
    trainer = Trainer(net, "adam")
    words = torch.tensor([1, 1, 2], device=device)
    for _ in range(3):
        net.zero_grad()
        backward_of(net, words)
        trainer.step(1)
        _fails_and_changes_nothing(trainer, net, everything, "'embedding.weight', 'head.weight', 'head.bias'")
    backward_of(net, words)  # adds to the gradients, which makes them fresh
    trainer.step(1)
    used = net.embedding.weight.grad
    net.zero_grad()
    backward_of(net, words)
    net.embedding.weight.grad = used
    _fails_and_changes_nothing(trainer, net, everything, "for 'embedding.weight': call")
    assert trainer.optimizer.num_update == 4


def test_a_refused_step_uses_no_sparse_gradient_up(device, everything):
    net = Net().to(device)
    trainer = Trainer(net, "sgd", {"learning_rate": 1.0})
    net.embedding(torch.tensor([2], device=device)).sum().backward()
    before = net.embedding.weight.detach().clone()
    _fails_and_changes_nothing(trainer, net, everything, "for 'head.weight'.*, 'head.bias'")
    trainer.step(1, ignore_stale_grad=True)
    before[2] -= 1
    torch.testing.assert_close(net.embedding.weight.detach(), before)
    assert trainer.optimizer.counts == {0: 1, 1: 0, 2: 0}
    now = everything(trainer, net.parameters())
    trainer.step(1, ignore_stale_grad=True)
    assert everything(trainer, net.parameters()) == now


def test_zeroing_makes_no_sparse_gradient_fresh(device, everything):
    net = Net().to(device)
    trainer = Trainer(net, "sgd")
    backward_of(net, torch.tensor([1], device=device))
    trainer.step(1)
    trainer.zero_grad(set_to_none=False)
    assert not net.embedding.weight.grad.to_dense().any()
    _fails_and_changes_nothing(trainer, net, everything, "'embedding.weight'")
    backward_of(net, torch.tensor([1], device=device))
    trainer.step(1)
    assert trainer.optimizer.num_update == 2


def test_adagrad_decays_no_weights_with_sparse_gradients(everything, device):
    """As in MXNet."""
    net = Net().to(device)
    trainer = Trainer(net, "adagrad", {"wd": 0.1})
    backward_of(net, torch.tensor([1], device=device))
    before = everything(trainer, net.parameters())
    words = r"wd=0.1 for 'embedding.weight', whose gradient is sparse: AdaGrad does not decay such weights"
    with pytest.raises(ValueError, match=words):
        trainer.step(1)
    assert everything(trainer, net.parameters()) == before
    net.embedding.weight.wd_mult = 0.0
    trainer.step(1)
    assert trainer.optimizer.num_update == 1


@pytest.mark.parametrize(
    ("gradient", "error", "message"),
    [
        (torch.ones(3, 3).to_sparse(1), ValueError, r"the gradient of '0' is \(3, 3\) on cpu: its weight is \(4, 3\)"),
        (torch.ones(4, 3, dtype=torch.int64).to_sparse(1), TypeError, "the gradient of '0' is torch.int64: must be one of"),
    ],
)
def test_gradients_that_do_not_fit_are_refused(gradient, error, message):
    weight, updater = torch.ones(4, 3), get_updater(SGD(momentum=0.5))
    with pytest.raises(error, match=message):
        updater(0, gradient, weight)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says, once in a process, that these are in beta
        other_layout = torch.eye(4, 3).to_sparse_csr()
    with pytest.raises(TypeError, match=r"the gradient of '0' is sparse \(torch.sparse_csr\)"):
        updater(0, other_layout, weight)
    assert weight.tolist() == [[1.0] * 3] * 4
    assert updater.optimizer.num_update == 0
