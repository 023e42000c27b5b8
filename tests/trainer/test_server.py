"""The parameter server: what one server does with pushes in a known order, and real workers and servers."""

import os
import socket
import struct
import subprocess
import sys
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tristep import Trainer, kvstore, lr_scheduler, optimizer
from tristep.trainer.kvstore.server import connect, serve
from tristep.trainer.kvstore.server.core import ServerCore, takes_parts
from tristep.trainer.kvstore.server.job import Roles

SECONDS = 60  # until a process that is not heard of counts as lost


# ---- one server, without a network -----------------------------------------------------------------------------------


class Halving(optimizer.Optimizer):
    """A user-defined optimizer, which nobody knows to be elementwise."""

    def create_state(self, index, weight):
        return None

    def update(self, index, weight, grad, state):
        self._update_count(index)
        weight.mul_(0.5).sub_(self._get_lr(index) * self.rescale_grad * grad)


def core_of(values, name=None, workers=2, **settings):
    core = ServerCore(workers)
    core.init(values)
    if name is not None:
        core.set_optimizer(optimizer.create(name, **settings))
    return core


def pulled(core, worker, keys):
    outs = [torch.full_like(core.values[key], float("nan")) for key in keys]
    core.pull(worker, keys, outs)
    return outs


@pytest.mark.parametrize("name", ["sgd", "adam", "lamb", "muon"])
def test_each_push_is_an_update(name):
    """In whatever order pushes come, keys are updated as by an updater that gets them one after the other."""
    start = {"a": torch.randn(4, 3), "b": torch.randn(5, 2)}
    core = core_of(start, name, learning_rate=0.1)
    expected = {key: value.clone() for key, value in start.items()}
    updater = optimizer.get_updater(optimizer.create(name, learning_rate=0.1))
    for worker, keys in [(0, "ab"), (1, "ab"), (1, "a"), (0, "ba"), (1, "b"), (0, "a")]:
        grads = [torch.randn_like(start[key]) for key in keys]
        core.push(worker, list(keys), grads)
        for key, grad in zip(keys, grads, strict=True):
            updater(key, grad, expected[key])
    for key in start:
        assert torch.equal(core.values[key], expected[key])
    assert core.num_update == 5


def test_a_push_needs_an_updater_and_changes_nothing_where_it_does_not_fit():
    core = core_of({3: torch.ones(2)})
    with pytest.raises(RuntimeError, match=r"call set_optimizer\(\) before push\(\)"):
        core.push(0, [3], [torch.ones(2)])
    core.set_optimizer(optimizer.create("sgd", learning_rate=1.0))
    with pytest.raises(ValueError, match=r"value of key 3 is \(3,\), what is stored is \(2,\)"):
        core.push(0, [3], [torch.ones(3)])
    with pytest.raises(ValueError, match=r"key 4 has not been initialized \(there are 3\)"):
        core.push(0, [3, 4], [torch.ones(2), torch.ones(2)])
    with pytest.raises(ValueError, match="key 3 has been initialized already"):
        core.init({4: torch.ones(1), 3: torch.zeros(2)})
    assert list(core.values) == [3]
    assert core.values[3].tolist() == [1.0, 1.0]
    assert sum(map(len, core.delays())) == 0


def test_a_function_may_update():
    core = core_of({"a": torch.ones(2)})
    core.set_updater(lambda key, pushed, stored: stored.add_(pushed, alpha=2.0))
    core.push(0, ["a"], [torch.ones(2)])
    assert core.values["a"].tolist() == [3.0, 3.0]


def test_changes_count_for_all_but_rescaling_for_its_worker():
    core = core_of({0: torch.zeros(1), 1: torch.zeros(1)}, "sgd", learning_rate=1.0)
    core.change(0, {"settings": {"rescale_grad": 0.5}})
    core.change(1, {"settings": {"lr": 0.1}, "multipliers": {1: (10.0, 1.0)}})
    core.push(0, [0, 1], [torch.ones(1), torch.ones(1)])
    assert [value.item() for value in core.values.values()] == pytest.approx([-0.05, -0.5])
    core.push(1, [0, 1], [torch.ones(1), torch.ones(1)])
    assert [value.item() for value in core.values.values()] == pytest.approx([-0.15, -1.5])


def test_delays_are_counted_between_pull_and_push():
    core = core_of({0: torch.zeros(1), 1: torch.zeros(1)}, "sgd", learning_rate=1.0)
    one = torch.ones(1)
    for worker in (0, 1):
        pulled(core, worker, [0, 1])
    core.push(0, [0, 1], [one, one])  # 0 and 0 behind
    core.push(0, [0], [one])  # its own push came between
    core.push(1, [0, 1], [one, one])  # 2 and 1 behind
    pulled(core, 1, [0])
    core.push(1, [0, 1], [one, one])  # 0, and 2 for what was not pulled again
    assert core.delays() == [{0: 2, 1: 1}, {2: 2, 1: 1, 0: 1}]


def test_what_needs_arrays_whole_gets_no_parts():
    """Whoever set it, and whatever is changed later."""
    core = core_of({0: torch.zeros(4)}, "lamb", learning_rate=0.1)
    with pytest.raises(ValueError, match="LAMB needs arrays whole, and key 1 is cut"):
        core.init({1: torch.zeros(4)}, cut=[1])
    core = ServerCore(1, servers=2)
    core.init({1: torch.zeros(4)}, cut=[1])
    for updater in (core.set_updater, core.set_optimizer):
        with pytest.raises(ValueError, match="needs arrays whole, and key 1 is cut over 2 servers"):
            updater(optimizer.LAMB())
    core.set_optimizer(optimizer.SGD(learning_rate=1.0))
    for setting in ("cautious", "skip_nonfinite"):
        core.change(0, {"settings": {setting: True}})
        with pytest.raises(ValueError, match=r"needs arrays whole|needs the gradients of a step together"):
            core.push(0, [1], [torch.ones(4)])
        core.change(0, {"settings": {setting: False}})
    core.push(0, [1], [torch.ones(4)])
    assert core.values[1].tolist() == [-1.0] * 4


# The delayed quadratic: f(w) = sum of a w^2 / 2, and eight workers in turn, each with the weights of eight updates ago.
CURVATURES, WORKERS = np.linspace(0.25, 1.0, 4), 8


def losses_of(name, steps=200, **settings):
    """The loss after each push; the weights in the end."""
    core = core_of({0: torch.ones(4)}, name, workers=WORKERS, learning_rate=0.2, **settings)
    curvatures, losses = torch.from_numpy(CURVATURES).float(), []
    weights = [pulled(core, worker, [0])[0] for worker in range(WORKERS)]
    for step in range(steps):
        worker = step % WORKERS
        core.push(worker, [0], [curvatures * weights[worker]])
        (weights[worker],) = pulled(core, worker, [0])
        losses.append(float((curvatures * core.values[0] ** 2).sum()) / 2)
    assert core.delays()[WORKERS - 1] == {WORKERS - 1: steps // WORKERS}
    return np.array(losses), core.values[0].numpy()


def losses_by_the_paper(steps=200, lamda=1.0, of_last=False):
    """Zheng et al. (2017), algorithm 2, in float64. `of_last`: one backup for all workers, as in MXNet's servers."""
    w, last, losses = np.ones(4), np.ones(4), []
    backups = [w.copy() for _ in range(WORKERS)]
    for step in range(steps):
        worker = step % WORKERS
        g = CURVATURES * backups[worker]
        backup = last if of_last else backups[worker]
        last, w = w, w - 0.2 * (g + lamda * g * g * (w - backup))
        backups[worker] = w.copy()
        losses.append((CURVATURES * w**2).sum() / 2)
    return np.array(losses), w


def test_dcasgd_compensates_the_delay_of_each_worker():
    """It is the paper's algorithm, and better than without compensation, or with the weights of the last update."""
    losses, weights = losses_of("dcasgd", lamda=1.0)
    expected, of_paper = losses_by_the_paper()
    np.testing.assert_allclose(losses, expected, rtol=1e-4, atol=1e-8)
    np.testing.assert_allclose(weights, of_paper, rtol=1e-4, atol=1e-6)
    plain, _ = losses_of("sgd")
    of_last, _ = losses_by_the_paper(of_last=True)
    assert losses.mean() < 0.25 * plain.mean()
    assert losses.mean() < 0.5 * of_last.mean()


def test_dcasgd_with_momentum_and_half_precision_keeps_what_was_pulled():
    core = core_of({0: torch.ones(3, dtype=torch.bfloat16)}, "dcasgd", learning_rate=0.5, momentum=0.5, multi_precision=True)
    grad = torch.full((3,), 0.5, dtype=torch.bfloat16)
    core.push(0, [0], [grad])  # nobody has pulled: the first weights
    w, mom = 1 - 0.5 * 0.5, -0.5 * 0.5
    assert core.values[0].tolist() == [w] * 3
    pulled(core, 1, [0])
    core.push(0, [0], [grad])
    before, mom = w, 0.5 * mom - 0.5 * (0.5 + 0.04 * 0.25 * (w - 1))
    w += mom
    core.push(1, [0], [grad])
    mom = 0.5 * mom - 0.5 * (0.5 + 0.04 * 0.25 * (w - before))
    w += mom
    (state,) = core.states()["state"].values()
    np.testing.assert_allclose(state["master copy"].numpy(), w, rtol=1e-6)


def test_states_are_there_for_all_keys_and_can_be_loaded():
    start = {0: torch.ones(2), 1: torch.ones(3)}
    core, other = core_of(start, "adam"), core_of(start, "adam")
    core.push(0, [0], [torch.ones(2)])
    saved = core.states()
    assert set(saved["state"]) == {"0", "1"}
    other.load_states(saved)
    for each in (core, other):
        each.push(1, [0, 1], [torch.ones(2), torch.ones(3)])
    assert other.num_update == 2
    assert torch.equal(other.states()["state"]["0"]["mean"], core.states()["state"]["0"]["mean"])


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (optimizer.Adam(), True),
        (optimizer.DCASGD(momentum=0.5), True),
        (optimizer.Adam(ema_decay=0.9, lookahead=3), True),
        (optimizer.LAMB(), False),  # norms of a tensor
        (optimizer.Muon(), False),  # a matrix
        (optimizer.SGLD(), False),  # random numbers by place
        (optimizer.Adam(cautious=True), False),  # a share of the tensor
        (optimizer.Adam(state_dtype="8bit"), False),
        (Halving(), False),
        (print, False),
    ],
)
def test_what_may_be_cut(made, expected):
    assert takes_parts(made) == expected


# ---- processes -------------------------------------------------------------------------------------------------------


def _job(name, servers, *args):
    """A worker's part of a test, the function of this name; or a server. What it returns, on all ranks."""
    settings = {"TRISTEP_NUM_SERVERS": str(servers), "MXNET_KVSTORE_BIGARRAY_BOUND": "10", "TRISTEP_ENGINE": "eager"}
    with mock.patch.dict(os.environ, settings):
        if dist.get_rank() >= dist.get_world_size() - servers:
            return serve(timeout=SECONDS)
        store = connect(timeout=SECONDS)
        try:
            return globals()[name](store, *args)
        finally:
            store.close()


@pytest.fixture
def run(processes):
    """A function that runs a worker's function on so many workers, beside so many servers; a list of what they return."""

    def run(function, workers, servers, *args):
        return processes(workers + servers).run(_job, function.__name__, servers, *args)[:workers]

    return run


def _value(store, key, like):
    out = torch.full_like(like, float("nan"))
    store.pull(key, out)
    return out


def _all_in_one(store):
    mine = torch.arange(4.0) + 10 * store.rank
    store.init(["small", "large"], [mine, torch.ones(3, 5) * (store.rank + 1)])
    first = [_value(store, "small", mine).tolist(), _value(store, "large", torch.empty(3, 5)).tolist()]
    with pytest.raises(ValueError, match="key 'small' has been initialized already"):
        store.init("small", mine)
    with pytest.raises(ValueError, match=r"key 'other' has not been initialized \(there are 'small', 'large'\)"):
        store.push("other", mine)
    with pytest.raises(ValueError, match=r"out of key 'small' is \(2,\), what is stored is \(4,\)"):
        store.pull("small", torch.ones(2))
    with pytest.raises(TypeError, match="key 'small' is sparse"):
        store.push("small", mine.to_sparse())
    with pytest.raises(RuntimeError, match=r"server \d: nothing says what a push does"):
        store.push("small", mine)
    with pytest.raises(RuntimeError, match=r"server \d: no optimizer updates what is stored"):
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
    return store.rank, store.num_workers, store.num_servers, store.type, first, own, transposed.tolist(), mine.tolist()


@pytest.mark.parametrize("servers", [1, 2])
def test_init_push_pull_and_barrier(run, servers):
    """The value of rank 0 wins; all pushes arrive; an array of 10 elements or more is cut over all servers."""
    for rank, found in enumerate(run(_all_in_one, 2, servers)):
        *names, first, own, last, small = found
        assert names == [rank, 2, servers, "dist_async"]
        assert first == [[0.0, 1.0, 2.0, 3.0], [[1.0] * 5] * 3]
        assert own in (1.0 - 3.0, 1.0 - 6.0, 1.0 - 5.0)
        assert last == [[1.0 - 6.0] * 5] * 3
        assert small == [0.0, 1.0, 2.0, 3.0]


def _train(store, cases):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 5, generator=generator)
    y = x @ torch.arange(1.0, 6.0)[:, None] + 0.5
    losses, counts = [], []
    for number, (name, settings) in enumerate(cases):
        net = torch.nn.Linear(5, 1)
        keys, params = [2 * number, 2 * number + 1], list(net.parameters())
        made = optimizer.create(name, **settings)
        store.set_optimizer(made)
        store.init(keys, params)
        store.pull(keys, params)
        for step in range(150):
            rows = slice(8 * ((2 * step + store.rank) % 8), None)
            net.zero_grad()
            ((net(x[rows]) - y[rows]) ** 2).mean().backward()
            store.pushpull(keys, [param.grad for param in params], params)
        store.barrier()
        store.pull(keys, params)
        losses.append(((net(x) - y) ** 2).mean().item())
        counts.append(made.num_update)
    return losses, counts, store.staleness()


def test_workers_train_together(run):
    cases = [("sgd", {"learning_rate": 0.05}), ("adam", {"learning_rate": 0.1}), ("dcasgd", {"learning_rate": 0.05})]
    found = run(_train, 2, 1, cases)
    for losses, counts, staleness in found:
        assert max(losses) < 1e-3
        assert max(counts) == 300  # the worker's optimizer knows how many updates there were
        for mean, most, histogram in staleness.values():
            assert sum(histogram.values()) == 3 * 150 * 2
            assert most == max(histogram) >= mean
    assert found[0][0] == found[1][0]


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


def test_a_trainer_with_a_server(run, tmp_path):
    (zero, last, loss, *rest), (one, same, *_) = run(_with_a_trainer, 2, 1, tmp_path / "states")
    assert zero == one  # with a rate of 0 that both have set, nothing moves
    assert last == same
    assert loss < 1e-2
    assert rest == [0.1, True, [("weight", 300), ("bias", 300)]]


def _in_turn(store, name, settings):
    """Each worker in its turn pushes four times, with the weights from before the other's turn."""
    curvatures, weight, losses = torch.from_numpy(CURVATURES).float(), torch.ones(4), []
    store.set_optimizer(optimizer.create(name, **settings))
    store.init(0, weight)
    store.pull(0, weight)
    for turn in range(24):
        store.barrier()
        if turn % 2 == store.rank:
            for _ in range(4):
                store.push(0, curvatures * weight)
            store.pull(0, weight)
            losses.append(float((curvatures * weight**2).sum()) / 2)
    store.barrier()
    return losses, _value(store, 0, weight).tolist(), store.staleness()


def test_dcasgd_beats_plain_sgd_under_delay(run):
    def expected(name, settings):
        core = core_of({0: torch.ones(4)}, name, **settings)
        curvatures = torch.from_numpy(CURVATURES).float()
        weights = [pulled(core, worker, [0])[0] for worker in (0, 1)]
        for turn in range(24):
            for _ in range(4):
                core.push(turn % 2, [0], [curvatures * weights[turn % 2]])
            (weights[turn % 2],) = pulled(core, turn % 2, [0])
        return core.values[0].tolist()

    means = {}
    for name, settings in {"sgd": {}, "dcasgd": {"lamda": 1.0}}.items():
        settings |= {"learning_rate": 0.2}
        found = run(_in_turn, 2, 1, name, settings)
        means[name] = np.mean([losses for losses, _, _ in found])
        for _, last, staleness in found:
            assert last == expected(name, settings)
            assert staleness[1].histogram == dict.fromkeys(range(4, 8), 12)
            assert staleness[0].max == 7
    assert means["dcasgd"] < 0.5 * means["sgd"]


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
    return done, _value(store, "w", weight).tolist(), store.staleness()


def test_a_slow_worker_holds_nobody_up(run):
    """The fast one takes all its steps while the slow one, which has pulled, waits for it."""
    (fast, last, staleness), (slow, same, _) = run(_one_waits, 2, 1)
    assert fast == [-50.0, -50.0]
    assert slow == [0.0, 0.0]
    assert last == same == [-51.0, -51.0]
    assert staleness[0] == (0.0, 0, {0: 50})
    assert staleness[1] == (50.0, 50, {50: 1})


def _several_servers(store, path, name, settings, grads):
    """Train, save, train on; go back to what was saved, train on again."""
    start = {i: torch.linspace(-1, 1, 4 + 7 * i).reshape(*shape) for i, shape in enumerate([(4,), (11,), (2, 9), (25,)])}
    keys, outs = list(start), [torch.empty_like(value) for value in start.values()]
    made = optimizer.create(name, **settings)
    store.set_optimizer(made)
    store.init(keys, list(start.values()))
    places = [sorted({where for where, _, _ in entry.parts}) for entry in store.placement.entries.values()]
    grads = [[torch.tensor(grad) for grad in step] for step in grads]
    for step in range(3):
        store.pushpull(keys, grads[step], outs)
    before = [out.clone() for out in outs]
    store.save_optimizer_states(path)
    made.set_learning_rate(0.5)
    store.pushpull(keys, grads[3], outs)
    store.load_optimizer_states(path)
    return places, [out.tolist() for out in before], [out.tolist() for out in outs], made.lr, made.num_update


@pytest.mark.parametrize("name", ["adam", "lamb"])
def test_keys_on_two_servers_are_updated_and_saved_as_on_one(run, tmp_path, name):
    shapes, settings = [(4,), (11,), (2, 9), (25,)], {"learning_rate": 0.1, "wd": 0.01}
    grads = [[torch.randn(shape) for shape in shapes] for _ in range(5)]
    plain = [[grad.tolist() for grad in step] for step in grads]
    ((places, before, after, lr, num_update),) = run(_several_servers, 1, 2, tmp_path / "states", name, settings, plain)
    assert places == ([[0], [0, 1], [0, 1], [0, 1]] if name == "adam" else [[0], [1], [0], [1]])
    assert (lr, num_update) == (0.1, 3)

    values = [torch.linspace(-1, 1, 4 + 7 * i).reshape(shape) for i, shape in enumerate(shapes)]
    updater = optimizer.Updater(optimizer.create(name, **settings), "eager")
    for step in range(3):
        updater([0, 1, 2, 3], grads[step], values)
    assert before == [value.tolist() for value in values]
    local = kvstore.create()
    local.init([0, 1, 2, 3], values)
    local.set_optimizer(optimizer.create(name, **settings))
    local.load_optimizer_states(tmp_path / "states")
    states = local._updater.states
    for i in range(4):
        for mine, saved in zip(updater.states[i], states[i], strict=True):
            assert torch.equal(mine, saved)
    updater.optimizer.set_learning_rate(0.5)
    updater([0, 1, 2, 3], grads[3], values)
    assert after == [value.tolist() for value in values]


def _loads(store, path):
    values = [torch.linspace(-1, 1, 4), torch.linspace(-1, 1, 11)]
    store.set_optimizer(optimizer.Adam(learning_rate=0.3))
    store.init([0, 1], values)
    store.pushpull([0, 1], [torch.ones(4), torch.ones(11)], values)
    with pytest.raises(FileNotFoundError, match="there is no such file"):
        store.load_optimizer_states(path.with_name("none"))
    with pytest.raises(ValueError, match="saved state is of 3 parameters"):
        store.load_optimizer_states(path.with_name("other"))
    store.load_optimizer_states(path)
    store.pushpull([0, 1], [torch.ones(4), torch.ones(11)], values)
    again = path.with_name("again")
    store.save_optimizer_states(again)
    return [value.tolist() for value in values]


def test_states_of_one_process_go_to_two_servers(run, tmp_path):
    sizes = 4, 11
    stores = {}
    for name, count in {"states": 2, "other": 3}.items():
        stores[name] = store = kvstore.create()
        store.init(list(range(count)), [torch.zeros((*sizes, 3)[i]) for i in range(count)])
        store.set_optimizer(optimizer.Adam(learning_rate=0.1))
        store.push(list(range(count)), [torch.full(((*sizes, 3)[i],), 2.0) for i in range(count)])
        store.save_optimizer_states(tmp_path / name)
    (found,) = run(_loads, 1, 2, tmp_path / "states")
    values = [torch.linspace(-1, 1, size) for size in sizes]
    optimizer.get_updater(optimizer.Adam(learning_rate=0.3))([0, 1], [torch.ones(size) for size in sizes], values)
    stores["states"]._updater([0, 1], [torch.ones(size) for size in sizes], values)
    assert found == [value.tolist() for value in values]
    stores["states"].load_optimizer_states(tmp_path / "again")


def _follows(store):
    """Rates, multipliers and schedules as the worker's optimizer has them now; what each push takes off."""
    params = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    ones = [torch.ones(1), torch.ones(1)]
    made = optimizer.SGD(learning_rate=1.0, param_dict=dict(enumerate(params)), param_idx2name={0: "a", 1: "b"})
    made.set_lr_mult({"b": 3.0})
    store.set_optimizer(made)
    store.init([0, 1], params)

    def off():
        before = [param.item() for param in params]
        store.pushpull([0, 1], ones, params)
        return [round(old - param.item(), 4) for old, param in zip(before, params, strict=True)]

    found = [off()]
    made.set_learning_rate(0.5)
    found.append(off())
    params[0].lr_mult = 2.0
    found.append(off())
    made.rescale_grad = 0.25
    found.append(off())
    made.rescale_grad, made.wd, made.clip_gradient = 1.0, 0.0, 0.5
    found.append(off())
    del params[0].lr_mult
    made.lr_scheduler = lr_scheduler.FactorScheduler(step=6, factor=0.5, base_lr=8.0)
    found += [off(), off()]
    made.lr_scheduler.base_lr = 80.0
    found.append(off())
    made.lr_scheduler = lambda number: 0.1
    with pytest.raises(TypeError, match="known by name at the top level of a module"):
        off()
    made.lr_scheduler = None
    made.set_learning_rate(0.5)
    found.append(off())
    return found, made.num_update


def test_what_is_changed_reaches_the_servers(run):
    ((found, num_update),) = run(_follows, 1, 2)
    expected = [[1.0, 3.0], [0.5, 1.5], [1.0, 1.5], [0.25, 0.375], [0.5, 0.75]]
    expected += [[4.0, 12.0], [2.0, 6.0], [40.0, 120.0], [0.25, 0.75]]  # a new base_lr is the next rate, as in MXNet
    assert found == expected
    assert num_update == 9


def _each_its_batch(store):
    weight = torch.zeros(1)
    made = optimizer.SGD(learning_rate=1.0)
    store.set_optimizer(made)  # both call it: the second changes nothing
    store.init(7, weight)
    made.rescale_grad = 1 / (1 + store.rank)
    for _ in range(4):
        store.push(7, torch.ones(1))
    store.barrier()
    store.set_updater(_adding)  # also only once
    store.barrier()
    store.push(7, torch.full((1,), 100.0))
    store.barrier()
    return _value(store, 7, weight).item()


def _adding(key, pushed, stored):
    stored.add_(pushed + key)


def test_each_worker_has_its_batch_size_and_calls_meant_for_all_count_once(run):
    assert run(_each_its_batch, 2, 1) == [208.0, 208.0]  # -4 - 2 + 2 * 107


def _refused(store):
    with pytest.raises(RuntimeError, match="servers serve one store at a time"):
        connect()
    for params in ({"type": "powersgd"}, {"type": "auto"}):
        with pytest.raises(ValueError, match="'powersgd' and 'auto' are for processes that add up their gradients"):
            store.set_gradient_compression(params)
    with pytest.raises(ValueError, match=r"compression_params\['threshold'\]=0"):
        store.set_gradient_compression({"type": "2bit", "threshold": 0})
    with pytest.raises(TypeError, match="optimizer must be an Optimizer, got str"):
        store.set_optimizer("sgd")
    with pytest.raises(TypeError, match=r"updater must be a function .*, got int"):
        store.set_updater(3)
    with pytest.raises(TypeError, match="known by name at the top level"):
        store.set_updater(lambda key, pushed, stored: None)
    with pytest.raises(RuntimeError, match=r"call set_optimizer\(\) first"):
        store.load_optimizer_states("anything")
    with pytest.raises(ValueError, match=r"clip_norm.*each of 2 servers has some"):
        store.set_optimizer(optimizer.SGD(clip_norm=1.0))
    store.init([1, 2], [torch.zeros(20), torch.zeros(2, dtype=torch.float64)])
    with pytest.raises(TypeError, match="all int or all str"):
        store.init("a", torch.zeros(1))
    with pytest.raises(ValueError, match="a key comes twice"):
        store.push([1, 1], [torch.ones(20), torch.ones(20)])
    with pytest.raises(ValueError, match="LAMB needs arrays whole, and key 1 is cut over 2 servers"):
        store.set_optimizer(optimizer.LAMB())
    store.set_optimizer(optimizer.SGD(learning_rate=1.0, state_dtype="bfloat16", momentum=0.5))
    with pytest.raises(ValueError, match=r"server \d: state_dtype='bfloat16': .* torch.float64"):
        store.pushpull(2, torch.ones(2, dtype=torch.float64))
    store.push(2, torch.ones(2, dtype=torch.float64))  # one that fails later
    with pytest.raises(ValueError, match="server"):
        store.pull(2, torch.ones(2))
    store.push(1, torch.ones(20))  # the servers go on
    last = _value(store, 1, torch.ones(20)).tolist()
    store.close()
    store.close()
    with pytest.raises(RuntimeError, match="this store has been closed"):
        store.barrier()
    return last


def test_mistakes_are_named_and_servers_go_on(run):
    assert run(_refused, 1, 2) == [[-1.0] * 20]


COMPRESSIONS = [
    {"type": "2bit", "threshold": 0.5},
    {"type": "1bit", "threshold": 0.0},
    *({"type": kind} for kind in ("fp16", "bf16", "int8", "int4", "sign", "wholethirds")),
    {"type": "topk", "ratio": 0.1},
    {"type": "randomk", "ratio": 0.1},
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


def _compressed(store, params, steps):
    """What all pushes have taken off the weights, and what this worker has kept back, after each step."""
    store.set_gradient_compression(params)
    store.set_optimizer(optimizer.SGD(learning_rate=1.0))
    keys, outs = [0, 1, 2], [torch.zeros(7, 300).t(), torch.zeros(6), torch.zeros(0, 2)]  # the first is cut, if it can be
    store.init(keys, outs)
    found = []
    for step in range(steps):
        gradients = _gradients(step, store.rank)
        gradients[0] = gradients[0].t().contiguous().t()
        store.push(keys[:2], gradients[:2]) if step == 1 else store.push(keys, gradients)  # by another route once
        store.barrier()
        store.pull(keys, outs)
        store.barrier()
        kept = store._residuals()
        found.append(
            [torch.cat([out.flatten() for out in outs]), torch.cat([kept[key, store.rank].flatten() for key in keys])]
        )
    return [[tensor.numpy() for tensor in pair] for pair in found]


@pytest.mark.parametrize("servers", [1, 2])
def test_two_bits_to_servers_are_mxnets(run, servers):
    """By NumPy: what passes the threshold is sent as the threshold, and the rest is kept."""
    params, sent = {"type": "2bit", "threshold": 0.5}, np.zeros(2106, dtype=np.float32)
    answers, residuals = run(_compressed, 2, servers, params, 4), [np.zeros(2106, dtype=np.float32) for _ in range(2)]
    for step in range(4):
        for rank in range(2):
            x = residuals[rank] + np.concatenate([gradient.numpy().ravel() for gradient in _gradients(step, rank)])
            values = np.where(x >= 0.5, np.float32(0.5), np.where(x <= -0.5, np.float32(-0.5), np.float32(0)))
            residuals[rank], sent = x - values, sent + values
        for rank in range(2):
            weights, kept = answers[rank][step]
            np.testing.assert_array_equal(weights, -sent)
            np.testing.assert_array_equal(kept, residuals[rank])


@pytest.mark.sample(5)
@pytest.mark.parametrize("params", COMPRESSIONS, ids=lambda params: params["type"])
def test_what_is_not_sent_to_servers_is_kept_back(run, params):
    """Weights and residuals together are the sums of the gradients, and the error does not grow."""
    answers = run(_compressed, 2, 2, params, 12)
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
    return half.tolist(), single.tolist(), len(store._residuals())


def test_types_that_can_be_compressed(run):
    ((half, single, kept),) = run(_types, 1, 2)
    assert half == [-0.5] * 12
    assert single == [-float(np.float16(1 / 3))] * 12
    assert kept == 0


def _counted(store, params, n, times):
    """The bytes that this worker sends for pushes of n values."""
    store.set_gradient_compression(params)
    store.set_optimizer(optimizer.SGD(learning_rate=1.0))
    store.init([0, 1], [torch.zeros(n - 100), torch.zeros(100)])
    values = [torch.randn(n - 100), torch.randn(100)]
    store.push([0, 1], values)
    store.barrier()
    before = _sent()
    for _ in range(times):
        store.push([0, 1], values)
    store.barrier()
    return _sent() - before


def _sent():
    """The bytes that this process has sent over TCP: `tcpi_bytes_sent` less `tcpi_bytes_retrans` of each connection."""
    total = 0
    for name in os.listdir("/proc/self/fd"):
        if not os.path.lexists(f"/proc/self/fd/{name}") or not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
            continue
        with socket.socket(fileno=os.dup(int(name))) as own:
            if own.family in (socket.AF_INET, socket.AF_INET6) and own.type == socket.SOCK_STREAM:
                sent, again = struct.unpack_from("QQ", own.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256), 200)
                total += sent - again
    return total


BITS = {"2bit": 2, "1bit": 1, "fp16": 16, "int8": 8 + 32 / 128, "int4": 4 + 32 / 128, "topk": 6.4, "randomk": 3.2}


@pytest.mark.sample(3)
@pytest.mark.skipif(not hasattr(socket, "TCP_INFO"), reason="needs the counters of Linux")
@pytest.mark.parametrize(
    "params", [each for each in COMPRESSIONS if each["type"] in BITS], ids=lambda params: params["type"]
)
def test_a_worker_sends_the_bytes_of_the_code(run, params):
    n, times = 2_000_000, 3
    (counted,) = run(_counted, 1, 2, params, n, times)
    said = n * BITS[params["type"]] / 8 * times
    assert 0.999 * said <= counted <= 1.02 * said + 4000


def _delayed(store, params):
    """Two workers in turn with DCASGD, both with what they pulled at first; the weights in the end."""
    weight = torch.ones(20)
    if params is not None:
        store.set_gradient_compression(params)
    store.set_optimizer(optimizer.DCASGD(learning_rate=0.5, lamda=1.0))
    store.init(0, weight)
    store.pull(0, weight)
    for turn in range(4):
        store.barrier()
        if turn % 2 == store.rank:
            store.push(0, torch.full((20,), 0.625) * weight)
    store.barrier()
    return _value(store, 0, weight).tolist()


def test_delays_are_compensated_with_what_was_sent(run):
    """The rule gets the gradient that the codes say: of bfloat16, which can say 0.625 exactly, the same as without."""
    exact = run(_delayed, 2, 2, None)
    assert run(_delayed, 2, 2, {"type": "bf16"}) == exact
    w = np.ones(20)
    for _ in range(4):
        w = w - 0.5 * 0.5 * (1 + 0.5 * (w - 1))
    np.testing.assert_allclose(run(_delayed, 2, 2, {"type": "2bit", "threshold": 0.5})[0], w, rtol=1e-6)


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


@pytest.mark.sample(1)
@pytest.mark.parametrize("params", [{"type": "2bit", "threshold": 8.0}, {"type": "int8"}, {"type": "topk", "ratio": 0.1}])
def test_a_trainer_that_compresses_reaches_the_loss_and_goes_on_where_it_was_saved(run, tmp_path, params):
    ((weights, loss),) = run(_reaches, 1, 1, params, tmp_path / "states", True)
    assert loss < 1e-2
    assert run(_reaches, 1, 1, params, tmp_path / "states", False) == [(weights, loss)]
    for _, other in run(_reaches, 2, 1, params, tmp_path / "two", True):
        assert other < 1e-2


def _takes(store, saved):
    """What a worker takes over of residuals of others."""
    store.set_gradient_compression({"type": "2bit"})
    store.init([0], [torch.zeros(4, 3)])
    store._load_residuals({0: {source: torch.full((4, 3), value) for source, value in saved.items()}})
    return store._residuals()[0, store.rank].tolist()


def test_each_worker_has_its_own_of_what_was_kept_back_and_its_share_of_what_nobody_has(run):
    saved = {"0": 1.0, "1": 10.0, "2": 100.0, "server": 2000.0}
    for rank, found in enumerate(run(_takes, 2, 2, saved)):
        assert found == [[10.0**rank + 50.0 + 1000.0] * 3] * 4


def _different_models(store):
    if store.rank:
        with pytest.raises(ValueError, match=r"value of key 'a' is \(3,\), torch.float32; on rank 0 it is \(2,\)"):
            store.init("a", torch.zeros(3))
    else:
        store.init("a", torch.zeros(2))
    store.barrier()
    if store.rank:
        return None
    with pytest.raises(RuntimeError, match="worker 1 has closed its store"):
        store.barrier()
    return "left alone"


def test_workers_must_have_one_model_and_nobody_waits_for_those_who_left(run):
    assert run(_different_models, 2, 1) == ["left alone", None]


def _errors_wait(store):
    """A worker that goes on pushing what a server refuses holds nobody up, and is told in the end."""
    store.set_optimizer(optimizer.SGD(learning_rate=1.0, momentum=0.5, state_dtype="bfloat16"))
    store.init([1, 2], [torch.zeros(1), torch.zeros(1, dtype=torch.float64)])
    if store.rank == 0:
        store.push(1, torch.zeros(1))
        store.push(2, torch.ones(1, dtype=torch.float64))
        store.push(1, torch.ones(1))
        dist.recv(torch.ones(1), 1)
        with pytest.raises(ValueError, match="torch.float64"):
            store.barrier()
        return _value(store, 1, torch.zeros(1)).item()
    for _ in range(20):
        last = _value(store, 1, torch.zeros(1)).item()
    dist.send(torch.ones(1), 0)
    store.barrier()
    return last


def test_a_worker_with_errors_holds_nobody_up(run):
    found = run(_errors_wait, 2, 1)
    assert found[0] == -1.0
    assert found[1] in (0.0, -1.0)


def _hangs(seconds):
    if dist.get_rank() == 2:
        with pytest.raises(TimeoutError, match=r"worker \d has not been heard of for 1 s"):
            serve(timeout=seconds)
        for worker in range(2):
            dist.send(torch.ones(1), worker)
        return True
    store = connect(timeout=SECONDS)
    dist.recv(torch.ones(1), 2)
    with pytest.raises(RuntimeError, match=r"server 0 \(rank 2\) is gone"):
        store.barrier()
    store.close()
    return True


def test_a_server_does_not_wait_for_ever(processes):
    assert processes(3).run(_hangs, 1) == [True] * 3


def _no_server(name):
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError, match=r"rank 0 is a worker: of 3 processes the last 1 \(TRISTEP_NUM_SERVERS\)"):
            serve(name)
        return True
    roles = Roles.of_this_job(SECONDS)
    roles.leave()
    return True


def test_a_worker_does_not_serve(processes):
    assert all(processes(3).run(_no_server, "DIST_ASYNC"))


def test_the_environment_is_checked(monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(RuntimeError, match="torchrun --nproc_per_node 2"):
        connect()
    with pytest.raises(ValueError, match="did you mean|must be one of"):
        connect("dist_asink")
    with pytest.raises(ValueError, match="timeout=0"):
        connect(timeout=0)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("TRISTEP_NUM_SERVERS", "2")
    with pytest.raises(ValueError, match=r"2 processes are too few for TRISTEP_NUM_SERVERS=2 servers .* --nproc_per_node 3"):
        connect()
    monkeypatch.setenv("TRISTEP_NUM_SERVERS", "none")
    with pytest.raises(ValueError, match="TRISTEP_NUM_SERVERS='none': must be an integer >= 1"):
        connect()


# ---- whole programs --------------------------------------------------------------------------------------------------

PROGRAM = """
import os, sys, warnings
warnings.simplefilter("error")
import torch
import torch.distributed as dist
from tristep import optimizer
from tristep.trainer.kvstore.server import connect

class Mine(optimizer.RuleOptimizer):
    rule = optimizer.SGD().rule

if "own" in sys.argv:
    dist.init_process_group("gloo")
store = connect()
weight = torch.zeros(3)
store.set_optimizer(Mine(learning_rate=1.0))
store.init("w", weight)
for _ in range(5):
    store.pushpull("w", torch.ones(3), weight)
store.barrier()
store.pull("w", weight)
os.write(1, f"worker {store.rank} {weight.tolist()}\\n".encode())  # whole, where print may write word by word
if "own" in sys.argv:
    dist.destroy_process_group()
"""

FAULTS = """
import os, sys, warnings
import torch
from tristep.trainer.kvstore.server import connect

def update(key, pushed, stored):
    if key == "end":
        os._exit(7)
    stored.add_(pushed)

store = connect(timeout=30)
store.set_updater(update)
store.init(["w", "end"], [torch.zeros(1), torch.zeros(1)])
if store.rank == 1:
    os._exit(8)
try:
    store.barrier()
except RuntimeError as error:
    print("barrier:", error)
weight = torch.zeros(1)
store.pushpull("w", torch.ones(1), weight)
print("goes on:", weight.item())
try:
    store.pushpull("end", torch.ones(1), weight)
except RuntimeError as error:
    print("pull:", error)
try:
    store.pull("w", weight)
except RuntimeError as error:
    print("again:", error)
"""


@pytest.mark.sample(0)
def test_a_program_under_torchrun_ends_cleanly(tmp_path):
    """Every process ends by itself with status 0 and without a warning, even if the program destroys its process groups."""
    (tmp_path / "program.py").write_text(PROGRAM, encoding="utf-8")
    options = ["--standalone", "--log-dir", str(tmp_path), "--nproc_per_node", "3"]
    command = [sys.executable, "-m", "torch.distributed.run", *options, "program.py", "own"]
    environment = os.environ | {"TRISTEP_NUM_SERVERS": "1", "TRISTEP_ENGINE": "eager", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split("\n")) == ["", *(f"worker {rank} [-10.0, -10.0, -10.0]" for rank in (0, 1))]
    assert "Warning" not in done.stderr
    assert "terminate" not in done.stderr


@pytest.mark.sample(0)
def test_a_program_without_a_process_group_gets_one(tmp_path):
    codes, outputs, errors = _started(tmp_path, PROGRAM)
    assert codes == [0, 0, 0], errors
    assert outputs == ["worker 0 [-10.0, -10.0, -10.0]\n", "worker 1 [-10.0, -10.0, -10.0]\n", ""]
    assert errors == ["", "", ""]


@pytest.mark.sample(0)
def test_a_lost_worker_and_a_lost_server_are_noticed(tmp_path):
    """The others go on without a worker, but cannot wait for it; without a server there is an error that says so."""
    codes, outputs, errors = _started(tmp_path, FAULTS)
    assert codes == [0, 8, 7], errors
    lines = outputs[0].splitlines()
    assert [line.split(":")[0] for line in lines] == ["barrier", "goes on", "pull", "again"]
    assert "worker 1 is gone" in lines[0]
    assert lines[1] == "goes on: 1.0"
    assert "server 0 (rank 2) is gone" in lines[2]
    assert "server 0 (rank 2) is gone" in lines[3]


def _started(folder, program):
    """Exit statuses, outputs and errors of two workers and a server that run this program."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1]), "WORLD_SIZE": "3"}
    settings = {"TRISTEP_NUM_SERVERS": "1", "TRISTEP_ENGINE": "eager", "OMP_NUM_THREADS": "1"}
    (folder / "program.py").write_text(program, encoding="utf-8")
    running = [
        subprocess.Popen(
            [sys.executable, "program.py"],
            cwd=folder,
            env=os.environ | address | settings | {"RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(3)
    ]
    try:
        texts = [process.communicate(timeout=120) for process in running]
    finally:
        for process in running:
            process.kill()
    outputs, errors = zip(*texts, strict=True)
    return [process.returncode for process in running], list(outputs), list(errors)


def test_the_time_limit_of_a_store_by_name(monkeypatch):
    from tristep.trainer.kvstore import server

    asked = []
    monkeypatch.setattr(server, "connect", lambda *arguments: asked.append(arguments))
    kvstore.create("dist_async")
    kvstore.create("Dist_Device_Async", timeout=300)
    assert asked == [("dist_async",), ("dist_device_async", 300)]
    for name in ("device", "dist_sync"):
        with pytest.raises(ValueError, match="timeout=300 with name=.*: it is for 'dist_async' and 'dist_device_async'"):
            kvstore.create(name, timeout=300)
