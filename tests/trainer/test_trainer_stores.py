"""Trainers of several copies of a model, and trainers with a store: in one process, on a device that comes several times."""

import copy
import math

import numpy as np
import pytest
import torch
from torch.nn import Parameter

import tristep
from tristep import StaleGradientError, Telemetry, Trainer, UpdateOnKVStoreError, amp, kvstore, lr_scheduler
from tristep.trainer.kvstore import KVStore, LocalStore
from tristep.trainer.optimizer import SGD, Adam, Optimizer
from tristep.trainer.sync.base import GradientSync
from tristep.trainer.sync.kvstore import updates_on_store


@pytest.fixture(params=[True, False], ids=["store updates", "copies update"])
def update_on_kvstore(request):
    return request.param


def _net(dtype=torch.float64):
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2)).to(dtype)


def _copies(net, count=2):
    return tristep.replicate(net, [next(net.parameters()).device] * count)


def _batches(count, size=6, dtype=torch.float64):
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(size, 3, generator=generator, dtype=dtype) for _ in range(count)]


def _backward(nets, batch):
    """Each copy its part of the batch; the loss is a sum, as Gluon's step wants it."""
    places = [next(net.parameters()).device for net in nets]
    for net, part in zip(nets, tristep.split_and_load(batch, places), strict=True):
        net(part).square().sum().backward()


def _train(trainer, nets, batches, zero_grad=True):
    for batch in batches:
        if zero_grad:
            trainer.zero_grad()
        _backward(nets, batch)
        trainer.step(len(batch))


def _weights(net):
    return [param.detach().clone() for param in net.parameters()]


def _assert_close(nets, model, rtol=1e-12):
    for net in nets:
        for ours, other in zip(net.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(ours, other, rtol=rtol, atol=rtol)


def _assert_equal_copies(nets):
    first = _weights(nets[0])
    assert all(all(map(torch.equal, first, _weights(net))) for net in nets)


# ---- one step of several copies is one step of one model ---------------------------------------------------------------

FACTOR = {"class": lr_scheduler.FactorScheduler, "step": 3, "factor": 0.5, "base_lr": 0.05}
OPTIMIZERS = {
    "sgd": ("sgd", {"learning_rate": 0.1, "momentum": 0.9, "wd": 0.01}),
    "sgd, clipped": ("sgd", {"learning_rate": 0.1, "momentum": 0.9, "clip_norm": 0.3}),
    "adam": ("adam", {"learning_rate": 0.05}),
    "nadam": ("nadam", {"learning_rate": 0.05}),
    "dcasgd": ("dcasgd", {"learning_rate": 0.05}),
    "ftrl": ("ftrl", {"learning_rate": 0.05}),
    "lars, scheduled": ("lars", {"momentum": 0.9, "lr_scheduler": FACTOR}),
    "lbsgd, scheduled": ("lbsgd", {"lr_scheduler": FACTOR, "batch_scale": 2}),
    "lamb": ("lamb", {"learning_rate": 0.05, "wd": 0.1}),
    "muon": ("muon", {"learning_rate": 0.05}),
    "adamw, lookahead": ("adamw", {"learning_rate": 0.05, "lookahead": 2, "ema_decay": 0.9, "wd": 0.1}),
}


def _arguments(given):
    if isinstance(schedule := given.get("lr_scheduler"), dict):
        kind = {**schedule}.pop("class")
        return given | {"lr_scheduler": kind(**{key: value for key, value in schedule.items() if key != "class"})}
    return dict(given)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("store", ["device", "local"])
def test_parts_of_a_batch_equal_the_whole(name, store, device, update_on_kvstore):
    optimizer, given = OPTIMIZERS[name]
    model = _net().to(device)
    nets = _copies(model)
    together = Trainer(nets, optimizer, _arguments(given), kvstore=store, update_on_kvstore=update_on_kvstore)
    alone = Trainer(model, optimizer, _arguments(given))
    for batch in _batches(5):
        for trainer, parts in ((together, nets), (alone, [model])):
            _train(trainer, parts, [batch])
        _assert_close(nets, model)
        _assert_equal_copies(nets)
        assert together.learning_rate == alone.learning_rate
    assert together.optimizer.num_update == alone.optimizer.num_update == 5
    assert together.optimizer.counts == alone.optimizer.counts


def test_three_copies_on_every_engine(engine, device, update_on_kvstore):
    model = _net(torch.float32).to(device)
    nets = _copies(model, 3)
    together = Trainer(nets, "adam", {"learning_rate": 0.05}, update_on_kvstore=update_on_kvstore, engine=engine)
    alone = Trainer(model, "adam", {"learning_rate": 0.05}, engine=engine)
    batches = _batches(3, dtype=torch.float32)
    _train(together, nets, batches)
    _train(alone, [model], batches)
    _assert_close(nets, model, rtol=1e-4)
    _assert_equal_copies(nets)


class _ByHand(Optimizer):
    def create_state(self, index, weight):
        return torch.zeros_like(weight)

    def update(self, index, weight, grad, state):
        self._update_count(index)
        state.mul_(0.5).add_(grad, alpha=self.rescale_grad)
        weight.sub_(state, alpha=self._get_lr(index) / self.counts[index])


def test_an_optimizer_of_ones_own(update_on_kvstore):
    model = _net()
    nets = _copies(model)
    together = Trainer(nets, _ByHand(learning_rate=0.1), update_on_kvstore=update_on_kvstore)
    alone = Trainer(model, _ByHand(learning_rate=0.1))
    _train(together, nets, _batches(4))
    _train(alone, [model], _batches(4))
    _assert_close(nets, model)
    assert together.optimizer.counts == alone.optimizer.counts


def test_lazy_copies_begin_once_they_exist(update_on_kvstore):
    nets = [torch.nn.LazyLinear(2, dtype=torch.float64) for _ in range(2)]
    trainer = Trainer(nets, "sgd", {"learning_rate": 0.1}, update_on_kvstore=update_on_kvstore)
    with pytest.raises(ValueError, match=r"'weight', 'bias' of params\[0\] not initialized yet"):
        trainer.step(1)
    _backward(nets, _batches(1)[0])
    trainer.step(6)
    _assert_equal_copies(nets)


def test_copies_of_which_one_gets_another_shape_are_refused():
    nets = [torch.nn.LazyLinear(2) for _ in range(2)]
    trainer = Trainer(nets, "sgd")
    nets[0](torch.ones(1, 3)).sum().backward()
    nets[1](torch.ones(1, 4)).sum().backward()
    with pytest.raises(ValueError, match=r"params\[1\] is no copy of params\[0\]: 'weight' is torch.float32 \(2, 4\)"):
        trainer.step(1)


# ---- which store, and who updates ------------------------------------------------------------------------------------


class Cannot(LocalStore):
    """A store that holds no optimizer."""

    @classmethod
    def _capable(cls, capability):
        return False


RAISES = "ValueError"
# kvstore, copies, the store that is made, and who updates with update_on_kvstore None, True, False, and None where the
# environment says no: True, False, or None where there is no store.
TABLE = [
    (None, 1, None, None, RAISES, None, None),
    (None, 2, None, None, RAISES, None, None),
    ("local", 1, None, None, RAISES, None, None),
    ("device", 1, None, None, RAISES, None, None),
    ("nccl", 1, None, None, RAISES, None, None),
    ("cannot", 1, None, None, RAISES, None, None),
    ("local", 2, "local", True, True, False, False),
    ("device", 2, "device", True, True, False, False),
    ("nccl", 2, "nccl", True, True, False, False),
    ("cannot", 2, "cannot", False, RAISES, False, False),
    (LocalStore, 1, "local", True, True, False, False),
    (LocalStore, 2, "local", True, True, False, False),
    (Cannot, 1, "local", False, RAISES, False, False),
    (Cannot, 2, "local", False, RAISES, False, False),
]


@pytest.mark.parametrize("asked", [None, True, False, "environment"])
@pytest.mark.parametrize("row", TABLE, ids=lambda row: f"{getattr(row[0], '__name__', row[0])} {row[1]}")
def test_which_store_is_made_and_who_updates(row, asked, clean_registry, monkeypatch):
    given, count, made, *decided = row
    expected = dict(zip((None, True, False, "environment"), decided, strict=True))[asked]
    kvstore.register(type("Cannot", (Cannot,), {"__init__": lambda self: LocalStore.__init__(self, "cannot")}))
    if asked == "environment":
        monkeypatch.setenv("MXNET_UPDATE_ON_KVSTORE", "0")
        asked = None
    nets = _copies(_net(), count)

    def make():
        return Trainer(nets, "sgd", kvstore=given() if isinstance(given, type) else given, update_on_kvstore=asked)

    if expected is RAISES:
        with pytest.raises(ValueError, match="update_on_kvstore=True with kvstore="):
            make()
        return
    trainer = make()
    _train(trainer, nets, _batches(2))
    store = getattr(trainer._sync, "store", None)
    assert (None if store is None else store.type) == made
    if made is None:
        assert expected is None
    else:
        assert trainer._sync.updates is expected
        assert (store._updater is not None) is expected


def test_an_argument_beats_the_environment(monkeypatch):
    monkeypatch.setenv("MXNET_UPDATE_ON_KVSTORE", "0")
    trainer = Trainer(nets := _copies(_net()), "sgd", update_on_kvstore=True)
    _train(trainer, nets, _batches(1))
    assert trainer._sync.updates
    monkeypatch.setenv("MXNET_UPDATE_ON_KVSTORE", "yes")
    with pytest.raises(ValueError, match="MXNET_UPDATE_ON_KVSTORE='yes': must be 0 or 1"):
        Trainer(_copies(_net()), "sgd")


def test_a_local_store_does_not_update_large_parameters():
    for name, expected in (("local", False), ("device", True), (LocalStore("local"), True)):
        assert updates_on_store(name, True, None, largest=16 * 2**20 + 1) is expected
        assert updates_on_store(name, True, None, largest=16 * 2**20)
        assert updates_on_store(name, True, True, largest=16 * 2**20 + 1)


def test_stores_whose_workers_do_not_wait_always_update():
    for name in ("dist_async", "dist_device_async"):
        assert updates_on_store(name, True, None)
        with pytest.raises(ValueError, match=f"update_on_kvstore=False with kvstore='{name}'"):
            Trainer(_net(), "sgd", kvstore=name, update_on_kvstore=False)


def test_a_store_is_used_as_it_is_given():
    store, model = LocalStore("device"), _net()
    trainer = Trainer(model, "adam", {"learning_rate": 0.05}, kvstore=store)
    alone = Trainer(other := _net(), "adam", {"learning_rate": 0.05})
    assert store._values == {}
    _train(trainer, [model], _batches(3))
    _train(alone, [other], _batches(3))
    assert all(map(torch.equal, _weights(model), _weights(other)))
    assert all(map(torch.equal, _weights(model), store._values.values()))
    second = Trainer(_net(), "sgd", kvstore=store)
    with pytest.raises(ValueError, match="key 0 has been initialized already"):
        second.state_dict()


def test_without_a_store_each_copy_goes_its_own_way():
    """Counts, too, are of each copy: bias corrections differ where updates were left out."""
    nets, others = _copies(_net()), _copies(_net())
    together = Trainer(nets, "nadam", {"learning_rate": 0.05}, kvstore=None)
    apart = [Trainer(net, "nadam", {"learning_rate": 0.05}) for net in others]
    for step, batch in enumerate(_batches(5)):
        together.zero_grad()
        for r, (net, other, trainer) in enumerate(zip(nets, others, apart, strict=True)):
            trainer.zero_grad()
            for each in (net, other):
                if step != 2 or r != 1:
                    each(batch[r::2]).square().sum().backward()
            trainer.step(2, ignore_stale_grad=True)
        together.step(2, ignore_stale_grad=True)
        for net, other in zip(nets, others, strict=True):
            _assert_close([net], other)
    assert not torch.equal(nets[0][0].weight, nets[1][0].weight)


class Remote(KVStore):
    """A store of which a trainer knows the interface only, and which counts what it is asked for."""

    def __init__(self):
        self.type, self.calls, self.priorities, self._inner = "remote", [], [], LocalStore("device")

    def __getattribute__(self, name):
        if name in ("push", "pull", "init", "set_optimizer", "set_gradient_compression"):
            self.calls.append(name)
        return super().__getattribute__(name)

    def init(self, key, value):
        self._inner.init(key, value)

    def push(self, key, value, priority=0):
        self.priorities.append(priority)
        self._inner.push(key, value, priority)

    def pull(self, key, out, priority=0, ignore_sparse=True):
        self._inner.pull(key, out, priority, ignore_sparse)

    def set_optimizer(self, optimizer):
        self._inner.set_optimizer(optimizer)

    def set_updater(self, updater):
        self._inner.set_updater(updater)

    def set_gradient_compression(self, compression_params):
        self._inner.set_gradient_compression(compression_params)

    def save_optimizer_states(self, fname, dump_optimizer=False):
        self._inner.save_optimizer_states(fname, dump_optimizer)

    def load_optimizer_states(self, fname):
        self._inner.load_optimizer_states(fname)


def test_a_registered_store_is_used(clean_registry, update_on_kvstore):
    kvstore.register(Remote)
    model = _net()
    nets = _copies(model)
    together = Trainer(nets, "adam", {"learning_rate": 0.05}, kvstore="Remote", update_on_kvstore=update_on_kvstore)
    assert together._sync.store is None
    alone = Trainer(model, "adam", {"learning_rate": 0.05})
    _train(together, nets, _batches(2))
    _train(alone, [model], _batches(2))
    _assert_close(nets, model)
    setting = ["set_optimizer"] if update_on_kvstore else []
    calls = together._sync.store.calls  # key by key, with minus the index as priority, as in MXNet
    assert calls == [*setting, *(("init", "pull") * 4), *(("push", "pull") * 8)]
    assert together._sync.store.priorities == [0, -1, -2, -3] * 2


def test_a_store_that_only_adds_up_trains_as_mxnets_teststore(clean_registry):
    """MXNet's test_trainer_with_teststore: two copies of a weight, whose gradients of 1 add up; the store cannot update."""

    @kvstore.KVStoreBase.register
    class TestStore(kvstore.KVStoreBase):
        def broadcast(self, key, value, out, priority=0):
            for each in out:
                each.copy_(value)

        def pushpull(self, key, value, out=None, priority=0):
            total = sum(value[1:], value[0])
            for each in value if out is None else out:
                each.copy_(total)

        @staticmethod
        def is_capable(capability):
            return False

    nets = [torch.nn.ParameterDict({"x": Parameter(torch.zeros(10))}) for _ in range(2)]
    trainer = Trainer(nets, "sgd", {"learning_rate": 1.0, "momentum": 0.5}, kvstore="teststore")
    for net in nets:
        net["x"].grad = torch.ones(10)
    trainer.step(1)
    assert type(trainer._sync.store) is TestStore
    assert not trainer._sync.updates
    assert [net["x"].tolist() for net in nets] == [[-2.0] * 10] * 2
    with pytest.raises(ValueError, match="cannot hold an optimizer"):
        Trainer(nets, "sgd", kvstore="teststore", update_on_kvstore=True)


def test_states_of_a_store_that_keeps_them_elsewhere():
    nets = _copies(_net())
    together = Trainer(nets, "adam", {"learning_rate": 0.05}, kvstore=Remote())
    _train(together, nets, _batches(3))
    state = together.state_dict()
    model = copy.deepcopy(nets[0])
    alone = Trainer(model, "adam")
    alone.load_state_dict(state)
    again = Trainer(others := _copies(nets[0]), "adam", kvstore=Remote())
    again.load_state_dict(alone.state_dict())
    for trainer, parts in ((together, nets), (alone, [model]), (again, others)):
        _train(trainer, parts, _batches(2))
    _assert_close([*nets, *others], model)
    with pytest.raises(RuntimeError, match="loss scaler with a store that updates elsewhere"):
        _scaled(together)
    assert together._loss_scaler is None
    kept = Trainer(parts := _copies(_net()), "schedulefreesgd", kvstore=Remote())
    _train(kept, parts, _batches(1))
    with pytest.raises(RuntimeError, match="averaged weights need update_on_kvstore=False"), kept.averaged_weights():
        pass
    with torch.no_grad():
        nets[0][0].weight.zero_()
    _backward(nets, _batches(1)[0])
    with pytest.raises(RuntimeError, match="'remote' does not take other values"):
        together.step(1)
    for write in (_fill, _replace):
        written = Trainer(copies := _copies(_net()), "sgd", {"learning_rate": 0.0}, kvstore=Remote())
        with torch.no_grad():
            for net in copies:
                net[0].bias[0] = math.nan  # which equals itself here
        _train(written, copies, _batches(2))
        write(copies[0][2].bias)
        _backward(copies, _batches(1)[0])
        with pytest.raises(RuntimeError, match="'remote' does not take other values"):
            written.step(1)


# ---- gradients -------------------------------------------------------------------------------------------------------


def _two(value=1.0, **arguments):
    """Two copies of a weight of ones, and a function that writes gradients to them."""
    nets = _copies(torch.nn.Linear(2, 1, bias=False).double())
    with torch.no_grad():
        for net in nets:
            net.weight.fill_(value)
    trainer = Trainer(nets, "sgd", {"learning_rate": 1.0}, **arguments)

    def write(*gradients):
        for net, gradient in zip(nets, gradients, strict=True):
            if gradient is not None:
                net.weight.grad = torch.full((1, 2), gradient, dtype=torch.float64)

    return nets, trainer, write


def _values(nets):
    return [net.weight[0].tolist() for net in nets]


def test_gradients_become_sums_in_place_where_copies_are_updated():
    nets, trainer, write = _two(update_on_kvstore=False)
    write(1.0, 2.0)
    gradients = [net.weight.grad for net in nets]
    trainer.allreduce_grads()
    assert [net.weight.grad for net in nets] == gradients
    assert [gradient[0].tolist() for gradient in gradients] == [[3.0, 3.0]] * 2
    assert _values(nets) == [[1.0, 1.0]] * 2
    trainer.update(1)
    assert _values(nets) == [[-2.0, -2.0]] * 2
    with pytest.raises(StaleGradientError):
        trainer.update(1)


def test_step_after_allreduce_grads_adds_up_once_more():
    nets, trainer, write = _two(update_on_kvstore=False)
    write(1.0, 2.0)
    trainer.allreduce_grads()
    trainer.step(1)
    assert _values(nets) == [[-5.0, -5.0]] * 2


def test_gradients_stay_as_they_are_where_the_store_updates():
    nets, trainer, write = _two(update_on_kvstore=True)
    write(1.0, 2.0)
    trainer.step(3)
    assert [net.weight.grad[0].tolist() for net in nets] == [[1.0, 1.0], [2.0, 2.0]]
    assert _values(nets) == [[0.0, 0.0]] * 2
    for method in (trainer.allreduce_grads, lambda: trainer.update(1)):
        for kind in (AssertionError, RuntimeError, UpdateOnKVStoreError):  # the first is Gluon's
            with pytest.raises(kind, match=r"(allreduce_grads|update)\(\) where the store updates the weights"):
                method()


def test_a_gradient_that_is_stale_in_one_copy_is_stale(update_on_kvstore):
    nets, trainer, write = _two(update_on_kvstore=update_on_kvstore)
    write(1.0, 2.0)
    trainer.step(1)
    write(5.0, None)
    before = [net.weight.grad.clone() for net in nets]
    for _ in range(2):
        with pytest.raises(StaleGradientError, match=r"'weight' \(fresh in 1 of 2 copies\)"):
            trainer.step(1)
    assert _values(nets) == [[-2.0, -2.0]] * 2
    assert all(torch.equal(net.weight.grad, gradient) for net, gradient in zip(nets, before, strict=True))
    assert trainer.optimizer.num_update == 1
    trainer.step(1, ignore_stale_grad=True)
    assert _values(nets) == [[-7.0, -7.0]] * 2
    trainer.step(1, ignore_stale_grad=True)
    assert _values(nets) == [[-7.0, -7.0]] * 2
    assert trainer.optimizer.num_update == 2


def test_a_copy_without_a_gradient_counts_as_zeros_if_that_is_wanted(update_on_kvstore):
    nets, trainer, write = _two(update_on_kvstore=update_on_kvstore)
    write(None, 2.0)
    with pytest.raises(StaleGradientError, match=r"fresh in 1 of 2 copies"):
        trainer.step(1)
    trainer.step(1, ignore_stale_grad=True)
    assert _values(nets) == [[-1.0, -1.0]] * 2
    assert (nets[0].weight.grad is None) is update_on_kvstore


def test_stale_gradients_are_remembered_from_allreduce_grads_to_update():
    nets, trainer, write = _two(update_on_kvstore=False)
    write(1.0, None)
    trainer.allreduce_grads()
    with pytest.raises(StaleGradientError, match="fresh in 1 of 2 copies"):
        trainer.update(1)
    trainer.update(1, ignore_stale_grad=True)
    assert _values(nets) == [[0.0, 0.0]] * 2


def test_zero_grad_reaches_all_copies_and_makes_nothing_fresh(update_on_kvstore):
    nets, trainer, write = _two(update_on_kvstore=update_on_kvstore)
    write(1.0, 2.0)
    trainer.step(1)
    trainer.zero_grad(set_to_none=False)
    assert [net.weight.grad.abs().sum().item() for net in nets] == [0.0, 0.0]
    with pytest.raises(StaleGradientError):
        trainer.step(1)
    trainer.zero_grad()
    assert [net.weight.grad for net in nets] == [None, None]


@pytest.mark.parametrize("store", ["device", None])
def test_gradients_are_zero_after_a_step_where_that_is_asked_for(store, update_on_kvstore):
    choice = {"update_on_kvstore": update_on_kvstore} if store else {}
    model = _net()
    nets = _copies(model)
    trainer = Trainer(nets, "adam", {"learning_rate": 0.05}, zero_grads=True, kvstore=store, **choice)
    alone = Trainer(model, "adam", {"learning_rate": 0.05}, zero_grads=True)
    for batch in _batches(3):
        _train(trainer, nets, [batch], zero_grad=False)
        _train(alone, [model], [batch], zero_grad=False)
        assert all(param.grad.abs().max() == 0 for net in nets for param in net.parameters())
        with pytest.raises(StaleGradientError):
            trainer.step(1)
    if store:
        _assert_close(nets, model)


def test_a_frozen_parameter_is_left_alone_in_all_copies(update_on_kvstore):
    nets = _copies(_net())
    trainer = Trainer(nets, "sgd", {"learning_rate": 0.1}, update_on_kvstore=update_on_kvstore)
    _train(trainer, nets, _batches(1))
    before = nets[0][0].weight.detach().clone()
    for net in nets:
        net[0].weight.requires_grad_(False)
    _train(trainer, nets, _batches(2))
    assert all(torch.equal(net[0].weight, before) for net in nets)
    assert trainer.optimizer.counts == {0: 1, 1: 3, 2: 3, 3: 3}


def test_a_step_that_fails_after_adding_up_does_not_add_up_twice(update_on_kvstore):
    model = _net()
    nets = _copies(model)
    together = Trainer(nets, "ftrl", {"learning_rate": 0.1}, update_on_kvstore=update_on_kvstore)
    alone = Trainer(model, "ftrl", {"learning_rate": 0.1})
    for batch in _batches(2):
        together.zero_grad()
        alone.zero_grad()
        _backward(nets, batch)
        _backward([model], batch)
        together.set_learning_rate(0.0)
        for _ in range(2):
            with pytest.raises(ValueError, match="learning rate|lr"):
                together.step(6)
        together.set_learning_rate(0.1)
        together.step(6)
        alone.step(6)
        _assert_close(nets, model)
    assert together.optimizer.counts == alone.optimizer.counts


def test_a_rate_that_is_none_is_found_out_before_gradients_are_added_up(update_on_kvstore):
    nets, trainer, write = _two(update_on_kvstore=update_on_kvstore)
    trainer.optimizer.lr_scheduler = lambda num_update: math.nan
    write(1.0, 2.0)
    with pytest.raises(ValueError, match=r"lr_scheduler\(1\)=nan"):
        trainer.step(1)
    assert [net.weight.grad[0, 0].item() for net in nets] == [1.0, 2.0]
    assert _values(nets) == [[1.0, 1.0]] * 2


@pytest.mark.parametrize("asked", [None, True, False])
@pytest.mark.parametrize("mixed", [False, True])
def test_sparse_gradients(asked, mixed):
    torch.manual_seed(2)
    model = torch.nn.Embedding(6, 3, sparse=True, dtype=torch.float64)
    nets = _copies(model)
    store = LocalStore("device") if mixed else "device"
    together = Trainer(nets, "adam", {"learning_rate": 0.1}, kvstore=store, update_on_kvstore=asked)
    alone = Trainer(model, "adam", {"learning_rate": 0.1})
    nets[1].sparse = model.sparse = not mixed
    for rows in ([[0, 2, 2], [2, 5]], [[1], [1, 3]], [[4, 0], [3, 3]]):
        for trainer in (together, alone):
            trainer.zero_grad()
        for net, own in zip(nets, rows, strict=True):
            net(torch.tensor(own)).square().sum().backward()
        model(torch.tensor([*rows[0], *rows[1]])).square().sum().backward()
        together.step(4)
        alone.step(4)
        _assert_close(nets, model)
    assert together._sync.updates is (asked is True)


# ---- what else a trainer does ----------------------------------------------------------------------------------------


def test_rates_and_multipliers_are_live(update_on_kvstore):
    model = _net()
    nets = _copies(model)
    together = Trainer(nets, "sgd", {"learning_rate": 0.1, "wd": 0.1}, update_on_kvstore=update_on_kvstore)
    alone = Trainer(model, "sgd", {"learning_rate": 0.1, "wd": 0.1})
    for step, batch in enumerate(_batches(4)):
        for trainer, parts in ((together, nets), (alone, [model])):
            if step == 1:
                trainer.set_learning_rate(0.03)
            if step == 2:
                parts[0][0].weight.lr_mult = 0.25
            if step == 3:
                parts[0][2].bias.wd_mult = 3.0
            _train(trainer, parts, [batch])
        _assert_close(nets, model)


def test_a_step_is_recorded_as_that_of_one_model(update_on_kvstore):
    model = _net()
    nets = _copies(model)
    together = Trainer(nets, "adam", {"learning_rate": 0.05}, update_on_kvstore=update_on_kvstore, telemetry=Telemetry())
    alone = Trainer(model, "adam", {"learning_rate": 0.05}, telemetry=Telemetry())
    _train(together, nets, _batches(3))
    _train(alone, [model], _batches(3))
    ours, theirs = together.telemetry.read(), alone.telemetry.read()
    assert ours["steps"].tolist() == [1, 2, 3]
    for name, values in theirs.items():
        np.testing.assert_allclose(ours[name], values, rtol=1e-6, atol=1e-12, err_msg=name)


@pytest.mark.parametrize("given", [{"ema_decay": 0.5}, {"optimizer": "schedulefreesgd"}], ids=str)
def test_averaged_weights_in_all_copies(given, update_on_kvstore):
    arguments = {"learning_rate": 0.05} | given
    name = arguments.pop("optimizer", "sgd")
    model = _net()
    nets = _copies(model)
    together = Trainer(nets, name, dict(arguments), update_on_kvstore=update_on_kvstore)
    alone = Trainer(model, name, dict(arguments))
    for _ in range(2):
        _train(together, nets, _batches(2))
        _train(alone, [model], _batches(2))
        before = _weights(nets[1])
        with together.averaged_weights(), alone.averaged_weights():
            assert not torch.equal(nets[1][0].weight, before[0])
            _assert_close(nets, model)
        assert all(map(torch.equal, _weights(nets[1]), before))
    _assert_close(nets, model)


@pytest.mark.parametrize("in_both", [True, False])
def test_weights_that_are_loaded_between_steps_are_those_of_all_copies(in_both, update_on_kvstore):
    """Gluon's test of resetting a store: the next step goes from what was loaded. States stay here."""
    model = _net()
    nets = _copies(model)
    together = Trainer(nets, "sgd", {"learning_rate": 0.1, "momentum": 0.9}, update_on_kvstore=update_on_kvstore)
    alone = Trainer(model, "sgd", {"learning_rate": 0.1, "momentum": 0.9})
    first, second = _batches(2)
    _train(together, nets, [first])
    _train(alone, [model], [first])
    together.zero_grad()
    alone.zero_grad()
    _backward(nets, second)
    _backward([model], second)
    loaded = {name: torch.zeros_like(value) for name, value in model.state_dict().items()}
    for net in (model, *nets[: 1 + in_both]):
        net.load_state_dict(loaded)
    together.step(6)
    alone.step(6)
    _assert_close(nets, model)
    _assert_equal_copies(nets)


def test_different_models_are_no_copies(update_on_kvstore):
    """The second would be overwritten by the first. Weights may still become equal before the first step."""
    nets = _copies(_net())
    with torch.no_grad():
        nets[1][2].bias += 1e-3
    trainer = Trainer(nets, "adam", {"learning_rate": 0.05}, update_on_kvstore=update_on_kvstore)
    _backward(nets, _batches(1)[0])
    params = [param for net in nets for param in net.parameters()]
    before = [param.detach().clone() for param in params]
    for refused in (lambda: trainer.step(6), trainer.state_dict):
        with pytest.raises(ValueError, match=r"params\[1\] has other weights than params\[0\] \(1 of 4, such as '2.bias'\)"):
            refused()
    assert all(map(torch.equal, params, before))
    nets[1].load_state_dict(nets[0].state_dict())
    trainer.step(6)
    _assert_equal_copies(nets)


def _clamp(param):
    param.data.clamp_(-0.01, 0.01)


def _fill(param):
    param.data.fill_(0.25)


def _copy(param):
    param.data.copy_(torch.linspace(-1, 1, param.numel(), dtype=param.dtype).view(param.shape))


def _replace(param):
    param.data = torch.full_like(param.data, -0.5)


@pytest.mark.parametrize("write", [_clamp, _fill, _copy, _replace])
@pytest.mark.parametrize("in_both", [False, True], ids=["in the first copy", "in both"])
@pytest.mark.parametrize("store", ["device", "local", "nccl", "remote"])
def test_weights_written_through_data_hold_as_with_one_copy(store, in_both, write, update_on_kvstore, clean_registry):
    """Such as the clamp of a WGAN's critic. Writing through `.data` leaves no trace in the version of a parameter."""
    kvstore.register(Remote)
    if store == "remote" and update_on_kvstore:
        store = "device"  # which takes other weights
    model = _net()
    nets = _copies(model)
    settings = {"learning_rate": 0.1, "momentum": 0.9}
    together = Trainer(nets, "sgd", dict(settings), kvstore=store, update_on_kvstore=update_on_kvstore)
    alone = Trainer(model, "sgd", dict(settings))
    for i, batch in enumerate(_batches(4)):
        halves = i == 2 and not update_on_kvstore
        for trainer, copies in ((together, nets), (alone, [model])):
            trainer.zero_grad()
            _backward(copies, batch)
            if halves:
                trainer.allreduce_grads()
            if i > 0:
                for net in copies[: 1 + in_both]:
                    for param in net.parameters():
                        write(param)
            (trainer.update if halves else trainer.step)(6)
        _assert_close(nets, model)
        _assert_equal_copies(nets)


@pytest.mark.parametrize("store", ["device", "local"])
def test_16_bit_weights_with_master_copies(store, update_on_kvstore):
    model = _net(torch.bfloat16)
    nets = _copies(model)
    given = {"learning_rate": 1e-3, "multi_precision": True}
    together = Trainer(nets, "sgd", dict(given), kvstore=store, update_on_kvstore=update_on_kvstore)
    alone = Trainer(model, "sgd", dict(given))
    for _ in range(6):
        for net in (*nets, model):
            for param in net.parameters():
                param.grad = torch.full_like(param, 0.125 if net is model else 0.0625)
        together.step(1)
        alone.step(1)
    assert all(all(map(torch.equal, _weights(net), _weights(model))) for net in nets)


REFUSED = {
    "step_in_backward": lambda trainer: trainer.step_in_backward(1).__enter__(),
    "ascend": lambda trainer: trainer.ascend(),
    "capture": lambda trainer: trainer.capture(print),
}


@pytest.mark.parametrize("store", ["device", None])
@pytest.mark.parametrize("method", REFUSED)
def test_what_is_for_one_copy_is_refused(method, store):
    nets = _copies(_net())
    trainer = Trainer(nets, "sgd", kvstore=store)
    _backward(nets, _batches(1)[0])
    with pytest.raises(RuntimeError, match=rf"{method}\(\) of a trainer with several copies of the model, or a store"):
        REFUSED[method](trainer)
    trainer.step(1)


def test_the_trainer_says_how_many_copies_it_has():
    assert repr(Trainer(_copies(_net(), 3), "sgd")).startswith("Trainer(3 copies of 4 parameters, 32 elements, SGD(")


def test_one_module_in_a_list_is_one_model():
    model = _net()
    trainer = Trainer([model], "sgd", {"learning_rate": 0.1})
    assert trainer._stepper.is_alone
    _train(trainer, [model], _batches(1))
    assert list(trainer.state_dict()["parameters"]) == [name for name, _ in model.named_parameters()]


# ---- loss scaling ----------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _amp(monkeypatch):
    monkeypatch.setattr(amp, "_target_dtype", None)
    amp.init()


def _scaled(trainer):
    amp.init_trainer(trainer, amp.LossScaler(1024.0))
    return trainer


@pytest.mark.parametrize("make", [Adam, _ByHand])
@pytest.mark.parametrize("where", [0, 1])
@pytest.mark.parametrize("store", ["device", "local", None])
def test_an_overflow_in_any_copy_leaves_all_as_they_are(make, where, store, update_on_kvstore):
    choice = {"update_on_kvstore": update_on_kvstore} if store else {}
    model = _net(torch.float32)
    nets = _copies(model)
    together = _scaled(Trainer(nets, make(learning_rate=0.05), kvstore=store, **choice))
    alone = _scaled(Trainer(model, make(learning_rate=0.05)))
    batches = _batches(4, dtype=torch.float32)
    for step, batch in enumerate(batches):
        for trainer, parts in ((together, nets), (alone, [model])):
            trainer.zero_grad()
            losses = [
                net(part).square().sum()
                for net, part in zip(parts, tristep.split_and_load(batch, ["cpu"] * len(parts)), strict=True)
            ]
            with amp.scale_loss(losses, trainer) as scaled:
                for each in scaled:
                    each.backward()
            if step == 1:
                parts[where % len(parts)][0].bias.grad[2] = math.inf
            before = [_weights(net) for net in parts]
            trainer.step(6)
            if step == 1:
                assert all(all(map(torch.equal, _weights(net), own)) for net, own in zip(parts, before, strict=True))
        if store:
            _assert_close(nets, model, rtol=1e-4)
        assert together._loss_scaler.loss_scale == (1024.0 if step < 1 else 512.0)
    assert not torch.equal(nets[1][0].weight, _net(torch.float32)[0].weight)


def test_unscaled_gradients_of_all_copies(update_on_kvstore):
    nets = _copies(_net(torch.float32))
    trainer = _scaled(Trainer(nets, "sgd", update_on_kvstore=update_on_kvstore))
    with amp.scale_loss([net[0].bias.sum() for net in nets], trainer) as losses:
        for loss in losses:
            loss.backward()
    amp.unscale(trainer)
    assert [net[0].bias.grad.tolist() for net in nets] == [[1.0] * 5] * 2


# ---- saved states ----------------------------------------------------------------------------------------------------


def _trainer_of(count, updates, **arguments):
    nets = _copies(_net(), count)
    choice = {"update_on_kvstore": updates} if count > 1 else {}
    return nets, Trainer(nets, "adam", {"learning_rate": 0.05}, **choice, **arguments)


@pytest.mark.parametrize("saver", [(1, False), (2, True), (2, False)], ids=str)
@pytest.mark.parametrize("loader", [(1, False), (2, True), (3, False), (3, True)], ids=str)
def test_states_go_from_any_number_of_copies_to_any_other(saver, loader, tmp_path):
    nets, trainer = _trainer_of(*saver)
    model, alone = _trainer_of(1, False)
    _train(trainer, nets, _batches(3))
    _train(alone, model, _batches(5))
    trainer.save_states(tmp_path / "states")
    others, loaded = _trainer_of(*loader)
    for net in others:
        net.load_state_dict(nets[0].state_dict())
    loaded.load_states(tmp_path / "states")
    assert loaded.optimizer.num_update == 3
    _train(loaded, others, _batches(5)[3:])
    _assert_close(others, model[0], rtol=1e-11)
    assert loaded.optimizer.counts == alone.optimizer.counts


def test_a_trainer_goes_on_after_loading_its_own_states(update_on_kvstore):
    ends = []
    for back in (True, False):
        nets, trainer = _trainer_of(2, update_on_kvstore)
        _train(trainer, nets, _batches(2))
        if back:
            state = copy.deepcopy(trainer.state_dict())
            weights = copy.deepcopy(nets[0].state_dict())
            _train(trainer, nets, _batches(4))
            for net in nets:
                net.load_state_dict(weights)
            trainer.load_state_dict(state)
        _train(trainer, nets, _batches(3))
        ends.append(_weights(nets[1]))
    assert all(map(torch.equal, *ends))


def test_states_before_the_first_step(update_on_kvstore):
    _, trainer = _trainer_of(2, update_on_kvstore)
    assert trainer.state_dict()["state"] == {}
    _, alone = _trainer_of(1, False)
    alone.load_state_dict(trainer.state_dict())


def test_states_of_another_model_are_refused_by_name(update_on_kvstore):
    nets, trainer = _trainer_of(2, update_on_kvstore)
    _train(trainer, nets, _batches(1))
    wider = torch.nn.Sequential(torch.nn.Linear(3, 6), torch.nn.Tanh(), torch.nn.Linear(6, 2))
    state = Trainer(wider, "adam").state_dict()
    with pytest.raises(ValueError, match=r"'0.weight' has shape \(6, 3\), in this trainer it has \(5, 3\)"):
        trainer.load_state_dict(state)


# ---- compression -----------------------------------------------------------------------------------------------------

TWO_BIT = {"type": "2bit", "threshold": 0.5}


def _compressed(count=2, **arguments):
    nets = _copies(_net(torch.float32), count)
    return nets, Trainer(nets, "sgd", {"learning_rate": 0.1}, compression_params=TWO_BIT, **arguments)


def test_gradients_are_what_was_sent_of_them():
    """MXNet's rule for each copy, with a residual of its own; sums of multiples of the threshold."""
    nets, trainer = _compressed(update_on_kvstore=False)
    kept = [[torch.zeros_like(param) for param in net.parameters()] for net in nets]
    for batch in _batches(4, dtype=torch.float32):
        trainer.zero_grad()
        _backward(nets, batch)
        sent = []
        for net, own in zip(nets, kept, strict=True):
            full = [param.grad + residual for param, residual in zip(net.parameters(), own, strict=True)]
            sent.append([0.5 * (each >= 0.5) - 0.5 * (each <= -0.5) for each in full])
            own[:] = [each - out for each, out in zip(full, sent[-1], strict=True)]
        trainer.step(6)
        for net in nets:
            for param, one, other in zip(net.parameters(), *sent, strict=True):
                assert torch.equal(param.grad, one + other)


def test_compression_of_one_copy_and_without_a_store_has_no_effect():
    for count, store in ((1, "device"), (1, "local"), (2, None)):
        nets, trainer = _compressed(count, kvstore=store)
        _train(trainer, nets, _batches(2, dtype=torch.float32))
        plain = Trainer(others := _copies(_net(torch.float32), count), "sgd", {"learning_rate": 0.1}, kvstore=store)
        _train(plain, others, _batches(2, dtype=torch.float32))
        for net, other in zip(nets, others, strict=True):
            assert all(map(torch.equal, _weights(net), _weights(other)))


def test_residuals_are_saved_and_go_on(update_on_kvstore, tmp_path):
    batches = _batches(6, dtype=torch.float32)
    nets, trainer = _compressed(update_on_kvstore=update_on_kvstore)
    _train(trainer, nets, batches[:3])
    trainer.save_states(tmp_path / "states")
    others, loaded = _compressed(update_on_kvstore=update_on_kvstore)
    for net in others:
        net.load_state_dict(nets[0].state_dict())
    _train(loaded, others, batches[:1])  # it may have residuals of its own
    for net in others:
        net.load_state_dict(nets[0].state_dict())
    loaded.load_states(tmp_path / "states")
    for each, parts in ((trainer, nets), (loaded, others)):
        _train(each, parts, batches[3:])
    assert all(map(torch.equal, _weights(nets[1]), _weights(others[1])))
    ours, theirs = loaded.state_dict()["residuals"], trainer.state_dict()["residuals"]
    assert ours.keys() == theirs.keys() == dict(nets[0].named_parameters()).keys()
    assert all(torch.equal(ours[name][r], theirs[name][r]) for name in theirs for r in ("0", "1"))


def test_nothing_that_was_kept_back_is_lost_with_another_number_of_copies():
    nets, trainer = _compressed(3)
    _train(trainer, nets, _batches(2, dtype=torch.float32))
    state = trainer.state_dict()
    for count in (2, 4):
        _, other = _compressed(count)
        other.load_state_dict(state)
        for name, sources in state["residuals"].items():
            assert sorted(sources) == ["0", "1", "2"]
            found = other.state_dict()["residuals"][name]
            torch.testing.assert_close(sum(found.values()), sum(sources.values()))
    _, one = _compressed(1)
    one.load_state_dict(state)
    assert "residuals" not in one.state_dict()
    other.load_state_dict(Trainer(_net(torch.float32), "sgd").state_dict())
    residuals = other.state_dict()["residuals"]
    assert all(tensor.abs().max() == 0 for sources in residuals.values() for tensor in sources.values())


def test_residuals_that_do_not_fit_are_refused():
    nets, trainer = _compressed()
    _train(trainer, nets, _batches(1, dtype=torch.float32))
    state = trainer.state_dict()
    for residuals, message in (
        ({"other": {}}, "'other' has residuals, but is not among"),
        (
            {"0.bias": {"0": torch.zeros(4)}},
            r"residual 0 of '0.bias' is torch.float32 \(4,\): it must be torch.float32 \(5,\)",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            trainer.load_state_dict(state | {"residuals": residuals})


def test_compression_beside_a_loss_scaler_is_refused():
    _, trainer = _compressed()
    with pytest.raises(RuntimeError, match="a loss scaler with compression_params"):
        _scaled(trainer)
    assert trainer._loss_scaler is None


def test_compression_takes_float32_only(update_on_kvstore, everything):
    nets = _copies(_net())
    trainer = Trainer(nets, "sgd", compression_params=TWO_BIT, update_on_kvstore=update_on_kvstore)
    _backward(nets, _batches(1)[0])
    trainer.state_dict()
    params = [param for net in nets for param in net.parameters()]
    before = everything(trainer, params)
    with pytest.raises(TypeError, match="the gradient of key 0 is torch.float64: compression takes dense torch.float32"):
        trainer.step(6)
    assert everything(trainer, params) == before


# ---- what stores of several processes will need ----------------------------------------------------------------------


class _OtherProcess(GradientSync):
    """Another process with one copy, whose gradients are all `value`, and fresh where `there` says so."""

    num_replicas = 2

    def __init__(self, model, value):
        self._params, self.value, self.there, self.log = list(model.parameters()), value, True, []

    def start(self):
        self.log.append("start")

    def count_fresh(self, fresh, ignore_stale_grad=False):
        self.log.append("count")
        return [int(own) + int(self.there) for own in fresh[0]]

    def reduce(self, chosen, fresh):
        self.log.append("reduce")
        for i, (param, wanted) in enumerate(zip(self._params, chosen, strict=True)):
            if wanted:
                own = param.grad if fresh[0][i] else 0
                param.grad = torch.zeros_like(param) + own + (self.value if self.there else 0)

    def update(self, chosen, fresh, into):
        raise AssertionError

    def end_step(self):
        self.log.append("end")

    def accumulate(self, on):
        self.log.append(on)

    def end_save(self):
        self.log.append("saved")


def test_what_is_stale_in_another_process_is_stale_here():
    model = torch.nn.Linear(2, 1).double()
    trainer = Trainer(model, "sgd", {"learning_rate": 1.0}, kvstore=LocalStore())
    other = trainer._stepper.sync = _OtherProcess(model, 3.0)
    before = model.bias.item()
    model.bias.grad = torch.ones(1, dtype=torch.float64)
    with pytest.raises(StaleGradientError, match=r"'weight' \(fresh in 1 of 2 copies\)"):
        trainer.step(1)
    trainer.step(1, ignore_stale_grad=True)
    assert model.bias.item() == pytest.approx(before - 4)
    assert other.log == ["start", "count", "count", "reduce", "end"]
    assert torch.equal(model.weight.grad, torch.full((1, 2), 3.0, dtype=torch.float64))
    model.bias.grad, model.weight.grad, other.there = torch.ones(1, dtype=torch.float64), None, False
    trainer.allreduce_grads()
    with pytest.raises(StaleGradientError, match=r"'weight', 'bias' \(fresh in 1 of 2 copies\)"):
        trainer.update(1)
    trainer.update(1, ignore_stale_grad=True)
    assert model.bias.item() == pytest.approx(before - 5)


def test_one_process_writes_and_the_others_wait(tmp_path):
    model = _net()
    trainer = Trainer(model, "sgd", kvstore=LocalStore())
    other = trainer._stepper.sync = _OtherProcess(model, 0.0)
    other.writes = False
    trainer.save_states(tmp_path / "states")
    assert not list(tmp_path.iterdir())
    other.writes = True
    trainer.save_states(tmp_path / "states")
    assert other.log == ["start", "saved", "saved"]
    Trainer(_net(), "sgd").load_states(tmp_path / "states")


def test_backward_passes_that_only_add_up_are_announced():
    model = _net()
    trainer = Trainer(model, "sgd", kvstore=LocalStore())
    other = trainer._stepper.sync = _OtherProcess(model, 0.0)
    with trainer.accumulate():
        assert other.log == [True]
    assert other.log == [True, False]
    with pytest.raises(KeyError), trainer.accumulate():
        raise KeyError
    assert other.log == [True, False] * 2
    for nets in ([_net()], _copies(_net())):
        plain = Trainer(nets, "sgd", {"learning_rate": 0.1})
        with plain.accumulate():
            _backward(nets, _batches(2)[0])
        _backward(nets, _batches(2)[1])
        plain.step(12)


# ---- mistakes --------------------------------------------------------------------------------------------------------


def _renamed():
    net = torch.nn.Sequential()
    for name, layer in zip("abc", _net(), strict=True):
        net.add_module(name, layer)
    return net


def _shared():
    nets = _copies(_net())
    nets[1][0].weight = nets[0][0].weight
    return nets


MISTAKES = {
    "other names": (lambda: [_net(), _renamed()], {}, ValueError, r"params\[1\] is no copy of params\[0\]: '0.bias', "),
    "another type": (
        lambda: [_net(), _net(torch.float32)],
        {},
        ValueError,
        r"'0.weight' is torch.float32 \(5, 3\), in params\[0\] it is torch.float64 \(5, 3\)",
    ),
    "another shape": (
        lambda: [torch.nn.Linear(2, 1), torch.nn.Linear(3, 1)], {}, ValueError, r"'weight' is torch.float32 \(1, 3\)",
    ),
    "the same twice": (lambda: [_net()] * 2, {}, ValueError, r"params\[1\] and params\[0\] share parameters"),
    "a shared parameter": (_shared, {}, ValueError, r"params\[1\] and params\[0\] share parameters: .*tristep.replicate"),
    "a module among parameters": (
        lambda: [Parameter(torch.ones(1)), _net()], {}, TypeError, "'1' must be a torch.nn.Parameter, got Sequential",
    ),
    "no parameters": (lambda: [torch.nn.Tanh()] * 2, {}, ValueError, "params is empty"),
    "update without a store": (
        lambda: _copies(_net()),
        {"kvstore": None, "update_on_kvstore": True},
        ValueError,
        "update_on_kvstore=True with kvstore=None: without a store each copy is updated by itself",
    ),
    "compression on the CPU": (
        lambda: _copies(_net()),
        {"kvstore": "local", "compression_params": TWO_BIT},
        ValueError,
        "with kvstore='local', which does not compress gradients: use 'device'",
    ),
    "no store": (lambda: _copies(_net()), {"kvstore": 3}, TypeError, "kvstore=3: must be None or a name, .* or a KVStore"),
    "a class": (lambda: _copies(_net()), {"kvstore": LocalStore}, TypeError, "must be None or a name, .* or a KVStore"),
    "dist": (lambda: _copies(_net()), {"kvstore": "dist_sync"}, ValueError, "params has 2 copies of the model"),
}  # fmt: skip


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_is_named(case):
    make, arguments, error, message = MISTAKES[case]
    with pytest.raises(error, match=message):
        Trainer(make(), "sgd", **arguments)


def test_an_instance_that_was_refused_is_as_before():
    optimizer = SGD(learning_rate=0.1)
    with pytest.raises(ValueError, match="no copy"):
        Trainer([_net(), _renamed()], optimizer)
    assert optimizer.param_dict == {}
