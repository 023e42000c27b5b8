"""The parameter server in several processes: its states and settings."""

import pytest
import torch
from server_jobs import pulled_value

from tristep import kvstore, lr_scheduler, optimizer

pytestmark = pytest.mark.sample(0)  # the quick tier runs four tests of servers


def _saves(store, path, name, settings, grads):
    """Train, save, train on; go back to what was saved, train on again."""
    start = {i: torch.linspace(-1, 1, 4 + 7 * i).reshape(*shape) for i, shape in enumerate([(4,), (11,), (2, 9), (25,)])}
    keys, outs = list(start), [torch.empty_like(value) for value in start.values()]
    made = optimizer.create(name, **settings)
    store.set_optimizer(made)
    store.init(keys, list(start.values()))
    grads = [[torch.tensor(grad) for grad in step] for step in grads]
    for step in range(3):
        store.pushpull(keys, grads[step], outs)
    before = [out.clone() for out in outs]
    store.save_optimizer_states(path)
    made.set_learning_rate(0.5)
    store.pushpull(keys, grads[3], outs)
    store.load_optimizer_states(path)
    return [out.tolist() for out in before], [out.tolist() for out in outs], made.lr, made.num_update


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["adam", "nadam"])
def test_keys_are_updated_and_saved_as_in_one_process(run_job, tmp_path, name):
    shapes, settings = [(4,), (11,), (2, 9), (25,)], {"learning_rate": 0.1, "wd": 0.01}
    grads = [[torch.randn(shape) for shape in shapes] for _ in range(5)]
    plain = [[grad.tolist() for grad in step] for step in grads]
    ((before, after, lr, num_update),) = run_job(_saves, 1, tmp_path / "states", name, settings, plain)
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
    with pytest.raises(TypeError, match="registered, at the top level of a module"):
        off()
    made.lr_scheduler = None
    made.set_learning_rate(0.5)
    found.append(off())
    made.schedules = {"clip_gradient": lr_scheduler.PiecewiseScheduler(step=[10], rates=[0.1], base_lr=0.2)}
    found += [off(), off()]
    return found, made.num_update


def test_what_is_changed_reaches_the_server(run_job):
    ((found, num_update),) = run_job(_follows, 1)
    expected = [[1.0, 3.0], [0.5, 1.5], [1.0, 1.5], [0.25, 0.375], [0.5, 0.75]]
    expected += [[4.0, 12.0], [2.0, 6.0], [40.0, 120.0], [0.25, 0.75]]  # a new base_lr is the next rate, as in MXNet
    expected += [[0.1, 0.3], [0.05, 0.15]]
    assert found == expected
    assert num_update == 11


def _each_its_batch(store):
    weight = torch.zeros(1)
    made = optimizer.SGD(learning_rate=1.0)
    store.set_optimizer(made)  # both call it: the second changes nothing
    store.init(7, weight)
    made.rescale_grad = 1 / (1 + store.rank)
    for _ in range(4):
        store.push(7, torch.ones(1))
    store.barrier()
    for turn in range(2):
        if store.rank == turn:  # the second call keeps the momentum of the push after the first one
            store.set_optimizer(optimizer.SGD(learning_rate=1.0, momentum=0.5))
            store.push(7, torch.full((1,), 100.0))
        store.barrier()
    return pulled_value(store, 7, weight).item()


def test_each_worker_has_its_batch_size_and_calls_meant_for_all_count_once(run_job):
    assert run_job(_each_its_batch, 2) == [-256.0, -256.0]  # -4 - 2 - 100 - (50 + 100)
