"""Trainers of several copies of a model: which store is made, who updates, and which mistakes are named."""

import pytest
import torch
from bad_trainer_input import AddingStore
from replicas import TWO_BIT, Remote, assert_close, copies_of, make_batches, small_net, train_copies, weights_of
from torch.nn import Parameter

from tristep import Trainer, kvstore
from tristep.trainer.kvstore import LocalStore
from tristep.trainer.kvstore.sync import updates_on_store
from tristep.trainer.optimizer import SGD, settings

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
    (AddingStore, 1, "local", False, RAISES, False, False),
    (AddingStore, 2, "local", False, RAISES, False, False),
]


@pytest.mark.parametrize("asked", [None, True, False, "environment"])
@pytest.mark.parametrize("row", TABLE, ids=lambda row: f"{getattr(row[0], '__name__', row[0])} {row[1]}")
def test_which_store_is_made_and_who_updates(row, asked, clean_registry, monkeypatch):
    given, count, made, *decided = row
    expected = dict(zip((None, True, False, "environment"), decided, strict=True))[asked]
    kvstore.register(type("Cannot", (AddingStore,), {"__init__": lambda self: LocalStore.__init__(self, "cannot")}))
    if asked == "environment":
        monkeypatch.setenv("MXNET_UPDATE_ON_KVSTORE", "0")
        asked = None
    nets = copies_of(small_net(), count)

    def make():
        return Trainer(nets, "sgd", kvstore=given() if isinstance(given, type) else given, update_on_kvstore=asked)

    if expected is RAISES:
        with pytest.raises(ValueError, match="update_on_kvstore=True with kvstore="):
            make()
        return
    trainer = make()
    train_copies(trainer, nets, make_batches(2))
    store = getattr(trainer._sync, "store", None)
    assert (None if store is None else store.type) == made
    if made is None:
        assert expected is None
    else:
        assert trainer._sync.updates is expected
        assert (store._updater is not None) is expected


def test_an_argument_beats_the_environment(monkeypatch):
    monkeypatch.setenv("MXNET_UPDATE_ON_KVSTORE", "0")
    trainer = Trainer(nets := copies_of(small_net()), "sgd", update_on_kvstore=True)
    train_copies(trainer, nets, make_batches(1))
    assert trainer._sync.updates
    monkeypatch.setenv("MXNET_UPDATE_ON_KVSTORE", "yes")
    with pytest.raises(ValueError, match="MXNET_UPDATE_ON_KVSTORE='yes': must be 0 or 1"):
        Trainer(copies_of(small_net()), "sgd")


def test_a_local_store_does_not_update_large_parameters():
    for asked, expected in (("local", False), ("device", True), (LocalStore("local"), True)):
        assert updates_on_store(asked, LocalStore, None, largest=16 * 2**20 + 1) is expected
        assert updates_on_store(asked, LocalStore, None, largest=16 * 2**20)
        assert updates_on_store(asked, LocalStore, True, largest=16 * 2**20 + 1)


def test_stores_whose_workers_do_not_wait_always_update():
    for name in ("dist_async", "dist_device_async"):
        assert updates_on_store(name, kvstore.KVStore.kv_registry.find(name), None)
        with pytest.raises(ValueError, match=f"update_on_kvstore=False with kvstore='{name}'"):
            Trainer(small_net(), "sgd", kvstore=name, update_on_kvstore=False)


def test_a_store_is_used_as_it_is_given():
    store, model = LocalStore("device"), small_net()
    trainer = Trainer(model, "adam", {"learning_rate": 0.05}, kvstore=store)
    alone = Trainer(other := small_net(), "adam", {"learning_rate": 0.05})
    assert store._values == {}
    train_copies(trainer, [model], make_batches(3))
    train_copies(alone, [other], make_batches(3))
    assert all(map(torch.equal, weights_of(model), weights_of(other)))
    assert all(map(torch.equal, weights_of(model), store._values.values()))
    second = Trainer(small_net(), "sgd", kvstore=store)
    with pytest.raises(ValueError, match="key 0 has been initialized already"):
        second.state_dict()


def test_without_a_store_each_copy_goes_its_own_way():
    """Counts, too, are of each copy: bias corrections differ where updates were left out."""
    nets, others = copies_of(small_net()), copies_of(small_net())
    together = Trainer(nets, "nadam", {"learning_rate": 0.05}, kvstore=None)
    apart = [Trainer(net, "nadam", {"learning_rate": 0.05}) for net in others]
    for step, batch in enumerate(make_batches(5)):
        together.zero_grad()
        for r, (net, other, trainer) in enumerate(zip(nets, others, apart, strict=True)):
            trainer.zero_grad()
            for each in (net, other):
                if step != 2 or r != 1:
                    each(batch[r::2]).square().sum().backward()
            trainer.step(2, ignore_stale_grad=True)
        together.step(2, ignore_stale_grad=True)
        for net, other in zip(nets, others, strict=True):
            assert_close([net], other)
    assert not torch.equal(nets[0][0].weight, nets[1][0].weight)


def test_a_registered_store_is_used(clean_registry, update_on_kvstore):
    kvstore.register(Remote)
    model = small_net()
    nets = copies_of(model)
    together = Trainer(nets, "adam", {"learning_rate": 0.05}, kvstore="Remote", update_on_kvstore=update_on_kvstore)
    assert together._sync.store is None
    alone = Trainer(model, "adam", {"learning_rate": 0.05})
    train_copies(together, nets, make_batches(2))
    train_copies(alone, [model], make_batches(2))
    assert_close(nets, model)
    setting = ["set_optimizer"] if update_on_kvstore else []
    calls = together._sync.store.calls  # key by key, with minus the index as priority, as in MXNet
    assert calls == [*setting, *(("init", "pull") * 4), *(("push", "pull") * 8)]
    assert together._sync.store.priorities == [0, -1, -2, -3] * 2


def _renamed():
    net = torch.nn.Sequential()
    for name, layer in zip("abc", small_net(), strict=True):
        net.add_module(name, layer)
    return net


def _shared():
    nets = copies_of(small_net())
    nets[1][0].weight = nets[0][0].weight
    return nets


MISTAKES = {
    "other names": (lambda: [small_net(), _renamed()], {}, ValueError, r"params\[1\] is no copy of params\[0\]: '0.bias', "),
    "another type": (
        lambda: [small_net(), small_net(torch.float32)],
        {},
        ValueError,
        r"'0.weight' is torch.float32 \(5, 3\), in params\[0\] it is torch.float64 \(5, 3\)",
    ),
    "a shared parameter": (_shared, {}, ValueError, r"params\[1\] and params\[0\] share parameters: .*tristep.replicate"),
    "compression on the CPU, under other names": (
        lambda: copies_of(small_net()),
        {"kvstore": "local_allreduce_cpu", "compression_params": TWO_BIT},
        ValueError,
        "does not compress gradients",
    ),
    "dist": (lambda: copies_of(small_net()), {"kvstore": "dist_sync"}, ValueError, "params has 2 copies of the model"),
}  # fmt: skip


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_is_named(case):
    make, arguments, error, message = MISTAKES[case]
    with pytest.raises(error, match=message):
        Trainer(make(), "sgd", **arguments)


@pytest.mark.parametrize(("copies", "kvstore", "why"), [(1, "device", "a single copy"), (2, None, "without a store each")])
def test_compression_without_a_store_is_said_once_to_have_no_effect(copies, kvstore, why, monkeypatch):
    monkeypatch.setattr(settings, "_warned", set())
    arguments = {"kvstore": kvstore, "compression_params": TWO_BIT}
    with pytest.warns(UserWarning, match=f"with kvstore={kvstore!r} has no effect: {why}"):
        Trainer(copies_of(small_net(), copies), "sgd", **arguments)
    Trainer(copies_of(small_net(), copies), "sgd", **arguments)  # warnings are errors


def test_an_instance_that_was_refused_is_as_before():
    optimizer = SGD(learning_rate=0.1)
    with pytest.raises(ValueError, match="no copy"):
        Trainer([small_net(), _renamed()], optimizer)
    assert optimizer.param_dict == {}


@pytest.mark.parametrize("kvstore", ["device", "local_allreduce_cpu"])
@pytest.mark.parametrize("copies", [1, 2])
def test_a_store_is_made_before_the_first_step_as_mxnets_rate_finder_asks(kvstore, copies):
    nets = [torch.nn.ParameterDict({"x": Parameter(torch.zeros(10))}) for _ in range(copies)]
    trainer = Trainer(nets, "sgd", {"learning_rate": 1.0}, kvstore=kvstore)
    assert not trainer._kv_initialized
    trainer._init_kvstore()
    assert trainer._kv_initialized
    state = trainer.state_dict()
    for net in nets:
        net["x"].grad = torch.ones(10)
    trainer.step(1)
    assert nets[0]["x"].tolist() == [-1.0 * copies] * 10
    trainer.load_state_dict(state)
    assert trainer.optimizer.num_update == 0


# Of MXNet 1.9.1, whose test_trainer_reset_kv this follows, with a momentum of 0.5: `_update_on_kvstore` after a step, and a
# weight after another one from loaded zeros.
@pytest.mark.parametrize(
    ("copies", "kvstore", "argument", "updates", "weight"),
    [
        *[(1, kvstore, argument, None, -0.15) for kvstore in (None, "local", "device") for argument in (None, False)],
        *[(2, None, argument, None, -0.15) for argument in (None, False)],
        *[(2, kvstore, False, False, -0.3) for kvstore in ("local", "device", "teststore")],
        (2, "teststore", None, False, -0.3),
        (1, "object", False, False, -0.15),
        *[(2, kvstore, None, True, -0.2) for kvstore in ("local", "device")],
    ],
)
def test_loaded_parameters_reach_the_store_as_in_mxnet_and_states_stay(copies, kvstore, argument, updates, weight):
    nets = [torch.nn.ParameterDict({"x": Parameter(torch.zeros(10))}) for _ in range(copies)]
    store = LocalStore() if kvstore == "object" else kvstore
    trainer = Trainer(nets, "sgd", {"learning_rate": 0.1, "momentum": 0.5}, kvstore=store, update_on_kvstore=argument)
    zeros = [{"x": net["x"].detach().clone()} for net in nets]
    assert trainer._update_on_kvstore is None

    def step():
        for net in nets:
            net["x"].grad = torch.ones(10)
        trainer.step(1)

    step()
    assert trainer._update_on_kvstore is updates
    for net, state in zip(nets, zeros, strict=True):
        net.load_state_dict(state)
    assert trainer._kv_initialized
    step()
    expected = weight + 0.5 * -0.2 if updates else weight  # MXNet loses the momentum where the store updates
    for net in nets:
        torch.testing.assert_close(net["x"].detach(), torch.full((10,), expected))
