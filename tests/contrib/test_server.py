"""The parameter server in several processes: workers train together, and none waits for another."""

import pytest
import torch
import torch.distributed as dist
from server_jobs import pulled_value

from tristep import Trainer, optimizer

pytestmark = pytest.mark.sample(0)  # the quick tier runs four tests of servers


def _all_in_one(store):
    mine = torch.arange(4.0) + 10 * store.rank
    store.init(["small", "large"], [mine, torch.ones(3, 5) * (store.rank + 1)])
    first = [pulled_value(store, "small", mine).tolist(), pulled_value(store, "large", torch.empty(3, 5)).tolist()]
    with pytest.raises(ValueError, match="key 'small' has been initialized already"):
        store.init("small", mine)
    with pytest.raises(ValueError, match=r"key 'other' has not been initialized \(there are 'small', 'large'\)"):
        store.push("other", mine)
    with pytest.raises(ValueError, match=r"out of key 'small' is \(2,\), the stored value is \(4,\)"):
        store.pull("small", torch.ones(2))
    with pytest.raises(TypeError, match="key 'small' is sparse"):
        store.push("small", mine.to_sparse())
    with pytest.raises(RuntimeError, match="server: nothing says what a push does"):
        store.push("small", mine)
    with pytest.raises(RuntimeError, match="server: no optimizer updates what is stored"):
        store.save_optimizer_states("nowhere")
    store.barrier()
    store.set_optimizer(optimizer.SGD(learning_rate=1.0))
    store.barrier()
    store.push("large", [torch.ones(3, 5), torch.ones(3, 5)])  # two devices' gradients add up
    transposed = torch.empty(5, 3).t()
    store.pushpull(["large", "small"], [torch.ones(3, 5), torch.zeros(4)], [transposed, mine])
    own = transposed.max().item()  # its own pushes are in it, those of others may be
    store.barrier()
    store.pull("large", transposed)
    return store.rank, store.num_workers, store.type, first, own, transposed.tolist(), mine.tolist()


@pytest.mark.sample(1)
def test_init_push_pull_and_barrier(run_job):
    """The value of rank 0 wins; all pushes arrive."""
    for rank, found in enumerate(run_job(_all_in_one, 2)):
        *names, first, own, last, small = found
        assert names == [rank, 2, "dist_async"]
        assert first == [[0.0, 1.0, 2.0, 3.0], [[1.0] * 5] * 3]
        assert own in (1.0 - 3.0, 1.0 - 6.0, 1.0 - 5.0)
        assert last == [[1.0 - 6.0] * 5] * 3
        assert small == [0.0, 1.0, 2.0, 3.0]


def _with_a_trainer(store, path):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 5, generator=generator)
    y = x @ torch.arange(1.0, 6.0)[:, None] + 0.5
    torch.manual_seed(store.rank)  # rank 0's weights win
    net = torch.nn.Linear(5, 1)
    trainer = Trainer(net, "adam", {"learning_rate": 0.1}, kvstore=store)

    def train(steps):
        for step in range(steps):
            rows = slice(8 * ((2 * step + store.rank) % 8), None)
            trainer.zero_grad()
            ((net(x[rows]) - y[rows]) ** 2).sum().backward()
            trainer.step(len(x[rows]))

    train(150)
    store.barrier()
    trainer.save_states(path.with_name(f"states {store.rank}"))
    saved = trainer.state_dict()
    store.barrier()
    trainer.set_learning_rate(0.0)
    train(1)
    store.barrier()
    before = net.weight.tolist()
    train(2)
    store.barrier()
    trainer.load_states(path.with_name("states 0"))
    store.barrier()
    same = all(
        torch.equal(tensor, saved["state"][name][slot])
        for name, slots in trainer.state_dict()["state"].items()
        for slot, tensor in slots.items()
    )
    rate = trainer.learning_rate
    store.barrier()
    train(10)
    net.weight.data.clamp_(-0.1, 0.1)  # which a server would not get to know
    trainer.zero_grad()
    net(x).sum().backward()
    with pytest.raises(RuntimeError, match="does not take other values once it is filled"):
        trainer.step(1)
    store.barrier()
    store.pull([0, 1], list(net.parameters()))
    loss = ((net(x) - y) ** 2).mean().item()
    return before, net.weight.tolist(), loss, rate, same, list(saved["counts"].items())


def test_a_trainer_with_a_server(run_job, tmp_path):
    (zero, last, loss, *rest), (one, same, *_) = run_job(_with_a_trainer, 2, tmp_path / "states")
    assert zero == one  # with a rate of 0 that both have set, nothing moves
    assert last == same
    assert loss < 1e-2
    assert rest == [0.1, True, [("weight", 300), ("bias", 300)]]


def _one_waits(store):
    weight = torch.zeros(2)
    store.set_optimizer(optimizer.SGD(learning_rate=1.0))
    store.init("w", weight)
    store.pull("w", weight)
    store.barrier()
    if store.rank == 0:
        for _ in range(50):
            store.pushpull("w", torch.ones(2), weight)
        done = weight.tolist()
        dist.send(torch.ones(1), 1)  # what the other waits for
    else:
        done = weight.tolist()
        dist.recv(torch.ones(1), 0)
        store.push("w", torch.ones(2))
    store.barrier()
    return done, pulled_value(store, "w", weight).tolist(), store.staleness()


def test_a_slow_worker_holds_nobody_up(run_job):
    """The fast one takes all its steps while the slow one, which has pulled, waits for it."""
    (fast, last, staleness), (slow, same, _) = run_job(_one_waits, 2)
    assert fast == [-50.0, -50.0]
    assert slow == [0.0, 0.0]
    assert last == same == [-51.0, -51.0]
    assert staleness[0] == (0.0, 0, {0: 50})
    assert staleness[1] == (50.0, 50, {50: 1})
