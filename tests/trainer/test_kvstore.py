"""Stores of one process: MXNet's semantics, its recorded compression, and what is refused."""

import doctest

import numpy as np
import pytest
import torch

from tristep.kvstore import create
from tristep.trainer.kvstore import base
from tristep.trainer.optimizer import SGD, Adam
from tristep.trainer.optimizer import create as create_optimizer

NAMES = ("local", "device", "nccl", "local_update_cpu", "local_allreduce_cpu", "local_allreduce_device")


@pytest.fixture(params=NAMES)
def store(request):
    return create(request.param)


def pulled(store, key, like):
    out = torch.full_like(like, float("nan"))
    store.pull(key, out)
    return out


@pytest.mark.parametrize("key", [3, "weight"])
def test_init_copies(store, key):
    value = torch.arange(6.0).view(2, 3)
    store.init(key, value)
    value.zero_()
    assert pulled(store, key, value).tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]


def test_a_push_replaces_what_is_stored_by_the_sum(store):
    store.init(3, torch.ones(2))
    values = [torch.full((2,), float(k)) for k in (1, 2, 4)]
    for _ in range(2):  # it does not add up from push to push
        store.push(3, values)
        assert pulled(store, 3, values[0]).tolist() == [7.0, 7.0]
    assert [value.tolist() for value in values] == [[1.0] * 2, [2.0] * 2, [4.0] * 2]


def test_a_single_pushed_tensor_is_copied(store):
    """In MXNet the store keeps a reference to it."""
    store.init(3, torch.ones(2))
    value = torch.full((2,), 5.0)
    store.push(3, value)
    value.zero_()
    assert pulled(store, 3, value).tolist() == [5.0, 5.0]


def test_lists_of_keys(store):
    keys = [5, 7, 9]
    store.init(keys, [torch.ones(2, 3)] * 3)
    store.push(keys, [[torch.full((2, 3), float(k)), torch.ones(2, 3)] for k in keys])
    outs = [[torch.empty(2, 3), torch.empty(2, 3)] for _ in keys]
    store.pull(keys, outs)
    for k, both in zip(keys, outs, strict=True):
        for out in both:
            assert out.tolist() == [[k + 1.0] * 3] * 2


def test_pushpull_overwrites_what_was_pushed_or_fills_out(store):
    store.init(1, torch.zeros(2))
    values = [torch.ones(2), torch.full((2,), 2.0)]
    out = torch.empty(2)
    store.pushpull(1, values, out)
    assert out.tolist() == [3.0, 3.0]
    assert [value.tolist() for value in values] == [[1.0, 1.0], [2.0, 2.0]]
    store.pushpull(1, values)
    assert [value.tolist() for value in values] == [[3.0, 3.0]] * 2


def test_broadcast(store):
    outs = [torch.empty(2), torch.empty(2)]
    store.broadcast("w", torch.full((2,), 4.0), outs)
    assert [out.tolist() for out in outs] == [[4.0, 4.0]] * 2


def test_an_updater_of_ones_own_sees_key_sum_and_value(store):
    seen = []

    def updater(key, pushed, stored):
        seen.append((key, pushed.tolist()))
        stored += 2 * pushed

    store.init(["a", "b"], [torch.ones(1), torch.ones(1)])
    store.set_updater(updater)
    store.push(["a", "b"], [[torch.ones(1), torch.ones(1)], torch.full((1,), 3.0)])
    assert seen == [("a", [2.0]), ("b", [3.0])]
    assert pulled(store, "a", torch.ones(1)).tolist() == [5.0]
    assert pulled(store, "b", torch.ones(1)).tolist() == [7.0]


def test_an_optimizer_updates_what_is_stored(store):
    """As torch.optim does with the sum of the gradients."""
    weights = [torch.randn(3, 4), torch.randn(5)]
    params = [torch.nn.Parameter(weight.clone()) for weight in weights]
    theirs = torch.optim.SGD(params, lr=0.1, momentum=0.9)
    store.init([0, 1], weights)
    store.set_optimizer(SGD(learning_rate=0.1, momentum=0.9))
    for _ in range(4):
        copies = [[torch.randn_like(weight) for _ in range(3)] for weight in weights]
        store.push([0, 1], copies)
        for param, each in zip(params, copies, strict=True):
            param.grad = sum(each)
        theirs.step()
    for key, param in enumerate(params):
        assert torch.allclose(pulled(store, key, param.detach()), param.detach(), rtol=1e-6, atol=1e-6)


def test_states_are_saved_and_go_on(store, tmp_path):
    weight, gradient = torch.randn(6), torch.randn(6)
    store.init("w", weight)
    store.set_optimizer(Adam(learning_rate=0.05))
    for _ in range(3):
        store.push("w", gradient)
    store.save_optimizer_states(tmp_path / "states")
    other = create("local")
    other.init("w", pulled(store, "w", weight))
    other.set_optimizer(Adam(learning_rate=0.01))
    other.load_optimizer_states(tmp_path / "states")
    for each in (store, other):
        each.push("w", gradient)
    assert torch.equal(pulled(other, "w", weight), pulled(store, "w", weight))


@pytest.mark.golden("gradient_compression")
def test_two_bits_as_mxnet_recorded(golden):
    _check_golden(golden)


@pytest.mark.golden("gradient_compression_1bit", version=2)
def test_one_bit_as_mxnet_recorded(golden):
    _check_golden(golden)


def _check_golden(golden):
    config, arrays = golden
    store = create(config["kvstore"])
    store.init(0, torch.from_numpy(arrays["w0"]))
    store.set_gradient_compression({"type": config["type"], "threshold": config["threshold"]})
    if config["optimizer"] is not None:
        store.set_optimizer(create_optimizer(config["optimizer"]["name"], **config["optimizer"]["kwargs"]))
    for step in range(config["steps"]):
        gradients = [torch.from_numpy(each.copy()) for each in arrays["g"][step]]
        before = [gradient.clone() for gradient in gradients]
        store.push(0, gradients)
        assert all(map(torch.equal, gradients, before))
        residuals = [store._compression.residuals[0, d].numpy() for d in range(config["devices"])]
        np.testing.assert_array_equal(residuals, arrays["residual"][step])
        found = pulled(store, 0, torch.from_numpy(arrays["w0"])).numpy()
        if config["optimizer"] is None:
            np.testing.assert_array_equal(found, arrays["pulled"][step])
        else:
            np.testing.assert_allclose(found, arrays["pulled"][step], rtol=1e-5, atol=1e-6)


def test_the_example_of_a_store_is_right(clean_registry):
    failed, attempted = doctest.testmod(base)
    assert attempted > 5
    assert not failed


def test_mxnets_teststore():
    """As in MXNet's test_kvstore_custom.py: sums of four arrays, in place and into others, of one key and of several."""
    store = create("TestStore")
    assert store.type == "teststore"
    assert not store.is_capable("Optimizer")
    with pytest.raises(ValueError, match="capability='fly'"):
        store.is_capable("fly")
    for _ in range(2):  # there is nothing to initialize
        outs = [torch.zeros(4, 4) for _ in range(2)]
        store.broadcast("a", torch.ones(4, 4), out=outs)
        assert [out.sum().item() for out in outs] == [16.0, 16.0]
    values, out = [torch.ones(4, 4) for _ in range(4)], torch.zeros(4, 4)
    store.pushpull("a", values, out=out)
    assert (out == 4).all()
    assert all((value == 1).all() for value in values)
    store.pushpull("a", values)
    assert all((value == 4).all() for value in values)
    one, two = torch.zeros(3), [torch.zeros(2), torch.zeros(2)]
    store.pushpull(["b", "c"], [torch.ones(3), [torch.ones(2), torch.ones(2)]], out=[one, two])
    assert [one.tolist(), *(each.tolist() for each in two)] == [[1.0] * 3, [2.0] * 2, [2.0] * 2]
    with pytest.raises(ValueError, match=r"value of key 'a' is \(3,\)"):
        store.pushpull("a", [torch.ones(2), torch.ones(3)])
    with pytest.raises(NotImplementedError, match="does not define set_optimizer"):
        store.set_optimizer(SGD())


def sparse(dense):
    return dense.to_sparse(1)


MATRIX = torch.tensor([[0.0, 0.0], [1.0, 2.0], [0.0, 3.0], [0.0, 0.0]])


@pytest.mark.parametrize("stored", ["dense", "sparse"])
def test_sparse_arrays_are_pushed_and_pulled_into_dense_ones(store, stored):
    """MXNet's test_single_kv_pair and test_list_kv_pair with row_sparse arrays; sums as those of dense arrays."""
    zeros = torch.zeros(4, 2) if stored == "dense" else sparse(torch.zeros(4, 2))
    store.init([0, 1], [zeros, zeros])
    assert pulled(store, 0, MATRIX).tolist() == [[0.0, 0.0]] * 4
    store.push(0, sparse(MATRIX))
    assert torch.equal(pulled(store, 0, MATRIX), MATRIX)
    pushed = [sparse(MATRIX), MATRIX, torch.stack([sparse(MATRIX)] * 2).sum(0)], [MATRIX, sparse(MATRIX)]
    store.push([0, 1], list(pushed))
    assert torch.equal(pulled(store, 0, MATRIX), MATRIX * 4)
    assert torch.equal(pulled(store, 1, MATRIX), MATRIX * 2)
    store.set_updater(lambda key, pushed, stored: stored.add_(pushed))
    store.push(0, [sparse(MATRIX), sparse(torch.ones(4, 2))])
    assert torch.equal(pulled(store, 0, MATRIX), MATRIX * 5 + 1)


@pytest.mark.parametrize("stored", ["dense", "sparse", "sum"])
@pytest.mark.parametrize("into", ["dense", "sparse"])
def test_rows_are_pulled_from_any_into_any(store, stored, into):
    """MXNet's test_row_sparse_pull: rows in any order and several times, as its float32 arrays, for one array or several."""
    store.init("e", {"dense": MATRIX, "sparse": sparse(MATRIX), "sum": torch.ones(4, 2)}[stored])
    if stored == "sum":
        store.push("e", [sparse(MATRIX / 2), sparse(MATRIX / 2)])
    new = torch.full((4, 2), 7.0)
    outs = [new.clone() if into == "dense" else sparse(new) for _ in range(2)]
    store.row_sparse_pull("e", outs, [torch.tensor([[2.0, 0.0], [2.0, 2.0]]), torch.tensor([3, 1])])
    assert outs[0].to_dense().tolist() == [[0.0, 0.0], [0.0, 0.0], [0.0, 3.0], [0.0, 0.0]]
    assert outs[1].to_dense().tolist() == [[0.0, 0.0], [1.0, 2.0], [0.0, 0.0], [0.0, 0.0]]
    if into == "sparse":
        assert [out.coalesce().indices().tolist() for out in outs] == [[[0, 2]], [[1, 3]]]
    store.row_sparse_pull("e", outs, torch.arange(4))
    assert all(torch.equal(out.to_dense(), MATRIX) for out in outs)


def test_rows_of_several_keys_are_pulled(store):
    store.init(["a", "b"], [MATRIX, MATRIX + 1])
    rows, wanted = {"a": torch.tensor([1]), "b": torch.tensor([0])}, [[1.0, 2.0], [1.0, 1.0]]
    for row_ids in (rows, list(rows.values()), [[each] for each in rows.values()]):
        outs = [torch.zeros(4, 2), torch.zeros(4, 2)]
        store.row_sparse_pull(["a", "b"], outs, row_ids)
        assert [outs[0][1].tolist(), outs[1][0].tolist()] == wanted
        assert torch.stack(outs).sum().item() == 5.0
    store.row_sparse_pull(["a", "b"], outs, torch.arange(4))
    assert [out.sum().item() for out in outs] == [6.0, 14.0]


def test_sparse_arrays_are_left_alone_by_a_pull_unless_asked_for(store):
    """MXNet's test_invalid_pull: `ignore_sparse` is True by default."""
    store.init("e", MATRIX)
    two = sparse(torch.full((4, 2), 2.0))
    store.pull("e", two)
    assert (two.to_dense() == 2).all()
    store.pull("e", two, ignore_sparse=False)
    assert torch.equal(two.to_dense(), MATRIX)
    values = [sparse(MATRIX), sparse(MATRIX)]
    store.pushpull("e", values)
    assert all(torch.equal(value.to_dense(), MATRIX * 2) for value in values)


def _ready(name="device"):
    store = create(name)
    store.init([1, 2], [torch.zeros(2), torch.zeros(3)])
    return store


REFUSED = {
    "init twice": (lambda: _ready().init(1, torch.zeros(2)), ValueError, "key 1 has been initialized already"),
    "another shape": (
        lambda: _ready().push(2, torch.zeros(2)), ValueError, r"value of key 2 is \(2,\), the stored value is \(3,\)",
    ),
    "too few values": (lambda: _ready().push([1, 2], [torch.zeros(2)]), ValueError, "2 keys came with 1 for value"),
    "a key twice": (lambda: _ready().push([1, 1], [torch.zeros(2)] * 2), ValueError, "a key comes twice in one push"),
    "a row that is not there": (
        lambda: _ready().row_sparse_pull(1, torch.zeros(2), torch.tensor([1, 2])), ValueError, "row_ids of key 1 must be",
    ),
    "compression of a local store": (
        lambda: _ready("local").set_gradient_compression({"type": "2bit"}),
        ValueError,
        "a store of type 'local' does not compress gradients",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case):
    call, error, message = REFUSED[case]
    with pytest.raises(error, match=message):
        call()


def test_values_are_replaced_whatever_the_updater(store):
    store.init([1, 2], [torch.zeros(2), torch.zeros(3)])
    store.set_optimizer(SGD(learning_rate=1.0, momentum=0.5))
    store.push([1, 2], [torch.ones(2), torch.ones(3)])
    store.replace([1, 2], [torch.full((2,), 5.0), torch.full((3,), 7.0, dtype=torch.float64)])
    store.push([1, 2], [torch.zeros(2), torch.zeros(3, dtype=torch.float64)])
    assert pulled(store, 1, torch.zeros(2)).tolist() == [4.5, 4.5]
    assert pulled(store, 2, torch.zeros(3, dtype=torch.float64)).tolist() == [6.5] * 3
    with pytest.raises(ValueError, match="value of key 2 is"):
        store.replace(2, torch.zeros(4))
