"""The parameter server in several processes: compressed gradients."""

import numpy as np
import pytest
import torch
from sent_bytes import bytes_sent, needs_counters, rows_of_page

from tristep import Trainer, kvstore, optimizer

pytestmark = pytest.mark.sample(0)  # the quick tier runs four tests of servers

COMPRESSIONS = [
    {"type": "2bit", "threshold": 0.75},  # not the default
    {"type": "1bit", "threshold": 0.0},
    *({"type": kind} for kind in ("fp16", "bf16", "int8", "int4", "sign", "wholethirds")),
    {"type": "topk", "ratio": 0.1},
]


@kvstore.register_compressor
class WholeThirds(kvstore.Compressor):
    """A user-defined one: whole thirds, in float64."""

    def encode(self, values):
        return torch.round(values.double() * 3)

    def decode(self, message, n):
        return (message / 3).float()


def _gradients(step, rank):
    generator = torch.Generator().manual_seed(10 * step + rank)
    return [torch.randn(shape, generator=generator) for shape in ((300, 7), (6,), (0, 2))]


def _kept(store):
    return store._compression.residuals


def _compressed(store, params, steps):
    """What all pushes have taken off the weights, and what this worker has kept back, after each step."""
    store.set_gradient_compression(params)
    store.set_optimizer(optimizer.SGD(learning_rate=1.0))
    keys, outs = [0, 1, 2], [torch.zeros(7, 300).t(), torch.zeros(6), torch.zeros(0, 2)]
    store.init(keys, outs)
    found = []
    for step in range(steps):
        gradients = _gradients(step, store.rank)
        gradients[0] = gradients[0].t().contiguous().t()
        store.push(keys[:2], gradients[:2]) if step == 1 else store.push(keys, gradients)  # by another route once
        store.barrier()
        store.pull(keys, outs)
        store.barrier()
        kept = _kept(store)
        found.append([torch.cat([out.flatten() for out in outs]), torch.cat([kept[key].flatten() for key in keys])])
    return [[tensor.numpy() for tensor in pair] for pair in found]


@pytest.mark.parametrize("params", COMPRESSIONS, ids=lambda params: params["type"])
def test_what_is_not_sent_to_the_server_is_kept_back(run_job, params):
    """Weights and residuals together are the sums of the gradients, and the error does not grow."""
    answers = run_job(_compressed, 2, params, 12)
    total = [
        np.concatenate([gradient.double().numpy().ravel() for gradient in _gradients(step, rank)])
        for step in range(12)
        for rank in range(2)
    ]
    (weights, first), (same, second) = (answers[rank][-1] for rank in range(2))
    np.testing.assert_array_equal(weights, same)
    np.testing.assert_allclose(first + second - weights, np.sum(total, axis=0), rtol=0, atol=2e-4)
    assert not np.array_equal(weights, -np.sum(total, axis=0).astype(np.float32))
    assert max(np.abs(first).max(), np.abs(second).max()) < (1e-2 if "16" in params["type"] else 40)


def _types(store):
    """Which gradients can be compressed, and that without error feedback nothing is kept."""
    store.set_gradient_compression({"type": "fp16", "error_feedback": False})
    store.set_optimizer(optimizer.SGD(learning_rate=1.0))
    half, single, double = (torch.zeros(12, dtype=dtype) for dtype in (torch.bfloat16, torch.float32, torch.float64))
    store.init([0, 1, 2], [half, single, double])
    with pytest.raises(TypeError, match="the gradient of key 2 is torch.float64: compression takes torch.float32"):
        store.push([0, 2], [torch.ones_like(half), torch.ones_like(double)])
    store.push([0, 1], [torch.full_like(half, 0.5), torch.full_like(single, 1 / 3)])
    store.pull([0, 1], [half, single])
    return half.tolist(), single.tolist(), len(_kept(store))


def test_types_that_can_be_compressed(run_job):
    ((half, single, kept),) = run_job(_types, 1)
    assert half == [-0.5] * 12
    assert single == [-float(np.float16(1 / 3))] * 12
    assert kept == 0


def _counted(store, params, n, times):
    """The bytes that this worker sends for pushes of n values."""
    if params is not None:
        store.set_gradient_compression(params)
    store.set_optimizer(optimizer.SGD(learning_rate=1.0))
    store.init([0, 1], [torch.zeros(n - 100), torch.zeros(100)])
    values = [torch.randn(n - 100), torch.randn(100)]
    store.push([0, 1], values)
    store.barrier()
    before = bytes_sent()
    for _ in range(times):
        store.push([0, 1], values)
    store.barrier()
    return bytes_sent() - before


@needs_counters
@pytest.mark.parametrize("name", [name for name, row in rows_of_page().items() if row.worker is not None])
def test_a_worker_sends_the_bytes_of_the_table(run_job, name):
    n, times, row = 2_000_000, 3, rows_of_page()[name]
    (counted,) = run_job(_counted, 1, row.params, n, times)
    said = n * row.worker * times
    assert 0.999 * said <= counted <= 1.02 * said + 4000


def _reaches(store, params, path, half):
    """Losses of a trainer that compresses, before and after it is saved; or after it was loaded."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 5, generator=generator)
    y = x @ torch.arange(1.0, 6.0)[:, None] / 5 + 0.1
    torch.manual_seed(1)
    net = torch.nn.Linear(5, 1)
    trainer = Trainer(net, "sgd", {"learning_rate": 0.05}, kvstore=store, compression_params=params)

    def train(first, last):
        for step in range(first, last):
            rows = slice(8 * (step % 8), 8 * (step % 8) + 8)
            trainer.zero_grad()
            ((net(x[rows]) - y[rows]) ** 2).sum().backward()
            trainer.step(8)
        return [param.tolist() for param in net.parameters()]

    own = path.with_name(f"{path.name} {store.rank}")
    if half:
        train(0, 50)
        trainer.save_states(own)
        torch.save(net.state_dict(), str(own) + ".weights")
    else:
        net.load_state_dict(torch.load(str(own) + ".weights"))
        trainer.load_states(own)
    return train(50, 150), ((net(x) - y) ** 2).mean().item()


@pytest.mark.parametrize("params", [{"type": "2bit", "threshold": 8.0}, {"type": "int8"}, {"type": "topk", "ratio": 0.1}])
def test_a_trainer_that_compresses_reaches_the_loss_and_goes_on_where_it_was_saved(run_job, tmp_path, params):
    ((weights, loss),) = run_job(_reaches, 1, params, tmp_path / "states", True)
    assert loss < 1e-2
    assert run_job(_reaches, 1, params, tmp_path / "states", False) == [(weights, loss)]
    for _, other in run_job(_reaches, 2, params, tmp_path / "two", True):
        assert other < 1e-2


def _takes(store, saved):
    """What a worker loads of other workers' residuals."""
    store.set_gradient_compression({"type": "2bit"})
    store.init([0], [torch.zeros(4, 3)])
    theirs = {0: {source: torch.full((4, 3), value) for source, value in saved.items()}}
    store._compression.load_residuals(theirs, store.rank, store.num_workers)
    return _kept(store)[0].tolist()


def test_each_worker_has_its_own_of_what_was_kept_back_and_its_share_of_what_nobody_has(run_job):
    saved = {"0": 1.0, "1": 10.0, "2": 100.0, "server": 2000.0}
    for rank, found in enumerate(run_job(_takes, 2, saved)):
        assert found == [[10.0**rank + 50.0 + 1000.0] * 3] * 4
