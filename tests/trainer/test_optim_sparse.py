"""tristep.optim: sparse gradients as in torch.optim."""

import copy

import pytest
import torch
from torch_peers import CLOSE, CLOSE_IN_FLOAT32, all_data_of

import tristep

quiet_sparse = pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")  # torch makes them unchecked, too


def _embedding(library, name, arguments, batches, dtype=torch.float64, sparse=True):
    torch.manual_seed(0)
    layer = torch.nn.Embedding(6, 2, sparse=sparse, dtype=dtype)
    optimizer = getattr(library, name)(layer.parameters(), **arguments)
    for batch in batches:
        optimizer.zero_grad()
        layer(torch.tensor(batch, dtype=torch.int64)).square().sum().backward()
        optimizer.step()
    return layer.weight, optimizer


SPARSE = [
    ("SGD", {"lr": 0.1}),
    ("SGD", {"lr": 0.1, "maximize": True}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    ("Adagrad", {"lr": 0.1, "lr_decay": 0.1, "initial_accumulator_value": 0.1}),
    ("SparseAdam", {"lr": 0.1}),
    ("SparseAdam", {"lr": torch.tensor(0.1, dtype=torch.float64), "betas": (0.5, 0.9), "eps": 0.1, "maximize": True}),
]


@quiet_sparse
@pytest.mark.parametrize(("name", "arguments"), SPARSE)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_sparse_gradients_like_torch(name, arguments, dtype):
    batches = [[0, 3, 3], [1], [3, 5, 0, 5], [], [2, 2, 2]]
    ours, optimizer = _embedding(tristep.optim, name, arguments, batches, dtype)
    theirs, peer = _embedding(torch.optim, name, arguments, batches, dtype)
    close = CLOSE if dtype == torch.float64 else CLOSE_IN_FLOAT32
    torch.testing.assert_close(ours, theirs, **close)
    for key, value in peer.state[theirs].items():
        own = optimizer.state_dict()["state"][0][key]
        assert own == value if isinstance(value, int) else torch.allclose(own, value.to_dense(), **close)


@quiet_sparse
def test_sparse_gradients_decayed_by_sgd_like_dense_ones_in_torch():
    batches = [[0, 3, 3], [1], [3, 5, 0, 5]]
    arguments = {"lr": 0.1, "weight_decay": 0.1, "momentum": 0.9}
    ours, _ = _embedding(tristep.optim, "SGD", arguments, batches)
    theirs, _ = _embedding(torch.optim, "SGD", arguments, batches, sparse=False)
    torch.testing.assert_close(ours, theirs, **CLOSE)


@quiet_sparse
def test_sparse_states_of_torch_are_made_dense():
    arguments = {"lr": 0.1, "momentum": 0.9}
    theirs, peer = _embedding(torch.optim, "SGD", arguments, [[0, 3], [1]])
    ours = torch.nn.Parameter(theirs.detach().clone())
    optimizer = tristep.optim.SGD([ours], **arguments)
    optimizer.load_state_dict(copy.deepcopy(peer.state_dict()))
    for parameter, each in ((ours, optimizer), (theirs, peer)):
        parameter.grad = torch.ones(6, 2, dtype=torch.float64).to_sparse(1)
        each.step()
    torch.testing.assert_close(ours, theirs, **CLOSE)
    buffer = optimizer.state[ours]["momentum_buffer"]
    torch.testing.assert_close(buffer, peer.state[theirs]["momentum_buffer"].to_dense(), **CLOSE)


@quiet_sparse
def test_sparse_and_dense_gradients_together_like_torch():
    weights = []
    for library in (tristep.optim, torch.optim):
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Embedding(6, 3, sparse=True), torch.nn.Linear(3, 2)).double()
        optimizer = library.Adagrad([{"params": net[0].parameters()}, {"params": net[1].parameters(), "weight_decay": 0.1}])
        for batch in ([0, 1], [1, 5, 5]):
            optimizer.zero_grad()
            net(torch.tensor(batch)).square().sum().backward()
            optimizer.step()
        weights.append(net.state_dict())
    torch.testing.assert_close(*weights, **CLOSE)


def test_adagrad_refuses_to_decay_with_sparse_gradients_as_torch_does():
    for library in (torch.optim, tristep.optim):
        with pytest.raises(RuntimeError, match="weight_decay"):
            _embedding(library, "Adagrad", {"weight_decay": 0.1}, [[0]])


def _classes():
    others = ("as_torch", "clip_grad_norm_", "FusedOptimizer", "MultiOptimizer", "SAM")
    return [name for name in tristep.optim.__all__ if name not in others]


@pytest.mark.sample(10)
@pytest.mark.parametrize("steps_before", [0, 2])
@pytest.mark.parametrize("name", sorted(set(_classes()) - {"SGD", "Adagrad", "SparseAdam"}))
def test_sparse_gradients_are_refused_by_the_others_and_nothing_is_changed(name, steps_before):
    parameters = [torch.nn.Parameter(torch.ones(3, 2) * (i + 1)) for i in range(3)]
    named = [(f"layer{i}", parameter) for i, parameter in enumerate(parameters)]
    optimizer = getattr(tristep.optim, name)([{"params": named[:2]}, {"params": named[2:]}], lr=0.01)
    for _ in range(steps_before):
        for parameter in parameters:
            parameter.grad = torch.ones(3, 2)
        optimizer.step()
    for parameter in parameters[:2]:
        parameter.grad = torch.ones(3, 2)
    parameters[2].grad = torch.ones(3, 2).to_sparse(1)
    before = all_data_of(optimizer)
    for _ in range(2):
        with pytest.raises((RuntimeError, TypeError), match=r"gradient of 'layer2' is sparse"):
            optimizer.step()
        assert all_data_of(optimizer) == before
    parameters[2].grad = torch.ones(3, 2)
    optimizer.step()
    assert all_data_of(optimizer)[1]["state"] != before[1]["state"]


def test_dense_gradients_are_refused_by_sparse_adam_and_nothing_is_changed():
    parameters = [torch.nn.Parameter(torch.ones(3, 2)) for _ in range(2)]
    optimizer = tristep.optim.SparseAdam(parameters)
    parameters[0].grad, parameters[1].grad = torch.ones(3, 2).to_sparse(1), torch.ones(3, 2)
    before = all_data_of(optimizer)
    with pytest.raises(RuntimeError, match=r"gradient of params\[1\] is dense"):
        optimizer.step()
    assert all_data_of(optimizer) == before


@quiet_sparse
@pytest.mark.parametrize("shape", [(), (4,), (3, 4), (3, 2, 2)], ids=str)
@pytest.mark.parametrize("name", ["SGD", "Adagrad", "SparseAdam"])
def test_gradients_that_list_elements_like_torch(name, shape):
    """Of any rank: what is not listed stays as it is, in the same row, too."""
    trained = []
    for library in (tristep.optim, torch.optim):
        torch.manual_seed(0)
        parameter = torch.nn.Parameter(torch.randn(shape, dtype=torch.float64))
        if len(shape) == 2:
            parameter.data = parameter.data.t().contiguous().t()
        optimizer = getattr(library, name)([parameter], lr=0.1)
        for step in range(5):
            gradient = torch.randn(shape, dtype=torch.float64)
            mask = torch.full(shape, step != 2) if not shape else torch.rand(shape) < 0.6
            parameter.grad = (gradient * mask).to_sparse(*[2] * (len(shape) == 3))
            optimizer.step()
        trained.append((parameter.detach(), [dict(row) for row in optimizer.state.values()]))
    torch.testing.assert_close(trained[0][0], trained[1][0], **CLOSE)
    for ours, theirs in zip(trained[0][1], trained[1][1], strict=True):
        torch.testing.assert_close(
            {key: value for key, value in ours.items() if key != "step"},
            {key: value for key, value in theirs.items() if key != "step"},
            **CLOSE,
        )
