"""`float32_weights` and `load_float32_weights`: what masters add to weights, by NumPy's integers, and back again."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from low_precision import as_bfloat16, in_24_bits
from rank_training import make_batch, make_net
from replicas import Remote, UpdatedByHand, copies_of, make_batches, small_net, train_copies, weights_of
from stored_training import made, parameters, saved, stepped, train, whole_of

import tristep
from tristep import Trainer

F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
STORED = {
    "float32": (F32, {}),
    "float64": (F64, {}),
    "bfloat16": (BF16, {}),
    "master": (BF16, {"multi_precision": True}),
    "float16, master": (F16, {"multi_precision": True}),
    "remainder": (BF16, {"multi_precision": "remainder"}),
    "24 bits": (BF16, {"multi_precision": "split8"}),
}


@pytest.mark.parametrize("stored", STORED)
def test_weights_are_those_that_the_rule_knows(stored, device):
    dtype, arguments = STORED[stored]
    params, trainer = stepped(device, dtype, arguments)
    found = trainer.float32_weights()
    assert list(found) == ["0", "1", "2", "3"]
    for (name, weight), param in zip(found.items(), params, strict=True):
        assert (weight.dtype, weight.shape) == (F32, param.shape)
        expected = param.detach().float()
        if arguments:
            expected = whole_of(param, saved(trainer, "master copy")[name])
        assert torch.equal(weight, expected)
        weight.zero_()  # a tensor of its own
    assert not any(bool((param == 0).all()) for param in params)


@pytest.mark.parametrize("stored", STORED)
def test_weights_are_stored_as_near_as_they_can_be(stored, device):
    dtype, arguments = STORED[stored]
    _, other = stepped(device, F32, {})
    weights = other.float32_weights()
    params, trainer = made(device, dtype, arguments)
    trainer.load_float32_weights(weights)
    for name, found in trainer.float32_weights().items():
        exact = weights[name].cpu().numpy()
        if stored == "24 bits":
            np.testing.assert_array_equal(found.cpu().numpy(), in_24_bits(exact))
        elif stored == "bfloat16":
            np.testing.assert_array_equal(found.cpu().numpy(), as_bfloat16(exact))
        else:
            np.testing.assert_array_equal(found.cpu().numpy(), exact)
    for param, weight in zip(params, weights.values(), strict=True):  # and the weight itself is the nearest of its type
        nearest = weight.to(dtype)
        if stored in ("24 bits", "remainder"):  # which round ties away from zero
            assert bool(((param - nearest).abs() <= 2.0**-7 * nearest.abs()).all())
        else:
            assert torch.equal(param.detach(), nearest)


@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_what_is_loaded_before_the_first_step_is_saved(name, device):
    """Of weights with a master and of one without; the state of an update that has not been is there, too."""
    kinds, values = [BF16, F32, BF16], [1 + 2.0**-12, 1 + 2.0**-20, -3 - 2.0**-14]

    def new():
        params = [torch.nn.Parameter(torch.ones(3, dtype=dtype, device=device)) for dtype in kinds]
        return params, Trainer(params, name, {"learning_rate": 0.5, "multi_precision": True})

    params, trainer = new()
    trainer.load_float32_weights({str(i): torch.full((3,), value) for i, value in enumerate(values)})
    others, other = new()
    other.load_state_dict(trainer.state_dict())
    for mine, theirs in zip(others, params, strict=True):
        mine.data.copy_(theirs.data)
    for each, members in ((trainer, params), (other, others)):
        assert [weight.tolist() for weight in each.float32_weights().values()] == [[value] * 3 for value in values]
        for param in members:
            param.grad = torch.full_like(param, 0.5)
        each.step(1)
    for mine, theirs in zip(other.float32_weights().values(), trainer.float32_weights().values(), strict=True):
        assert torch.equal(mine, theirs)
    if name == "sgd":
        assert [weight[0].item() for weight in other.float32_weights().values()] == [value - 0.25 for value in values]


@pytest.mark.parametrize("before_first_step", [True, False])
@pytest.mark.parametrize("stored", ["float32", "master", "remainder", "24 bits"])
def test_training_goes_on_from_them_to_the_bit(stored, before_first_step, device):
    dtype, arguments = STORED[stored]
    params, trainer = stepped(device, dtype, arguments, name="sgd")
    others, other = made(device, dtype, arguments, name="sgd")
    if not before_first_step:
        train(others, lambda: other.step(1), 2, seed=5)
    other.load_float32_weights(trainer.float32_weights())
    for each, step in ((params, trainer), (others, other)):
        train(each, lambda step=step: step.step(1), 2, seed=2)
    assert all(map(torch.equal, params, others))
    assert all(map(torch.equal, trainer.float32_weights().values(), other.float32_weights().values()))


@pytest.mark.parametrize("update_on_kvstore", [True, False])
@pytest.mark.parametrize("kvstore", [None, "local", "device"])
@pytest.mark.parametrize("kind", [None, True, "split8"])
def test_all_replicas_get_them(kvstore, update_on_kvstore, kind):
    if kvstore is None and update_on_kvstore:
        return
    arguments = {"learning_rate": 0.01, **({} if kind is None else {"multi_precision": kind})}
    nets, batches = copies_of(small_net(BF16)), make_batches(3, dtype=BF16)
    trainer = Trainer(nets, "adam", arguments, kvstore=kvstore, update_on_kvstore=update_on_kvstore)
    exact = {name: torch.randn(param.shape) for name, param in nets[0].named_parameters()}
    trainer.load_float32_weights(exact)
    for net in nets:
        assert all(torch.equal(param, exact[name].to(BF16)) for name, param in net.named_parameters())
    train_copies(trainer, nets, batches[:1])
    trainer.load_float32_weights(exact)  # once more, now that there are masters
    for name, weight in trainer.float32_weights().items():
        expected = {None: as_bfloat16, True: np.asarray, "split8": in_24_bits}[kind](exact[name].numpy())
        np.testing.assert_array_equal(weight.numpy(), expected)
    train_copies(trainer, nets, batches[1:])
    if kvstore is not None:
        assert all(map(torch.equal, weights_of(nets[0]), weights_of(nets[1])))


def _over_ranks(name, update_on_kvstore, after_a_step):
    arguments, net = {"learning_rate": 0.01, "multi_precision": "split8"}, make_net(BF16)
    trainer = Trainer(net, name, arguments, kvstore="dist_sync", update_on_kvstore=update_on_kvstore)

    def steps(count):
        for step in range(count):
            x, y = make_batch(step, BF16, dist.get_rank(), 2)
            trainer.zero_grad()
            (net(x) - y).square().sum().backward()
            trainer.step(12)

    steps(int(after_a_step))
    generator = torch.Generator().manual_seed(1)
    exact = {key: torch.randn(param.shape, generator=generator) for key, param in net.named_parameters()}
    trainer.load_float32_weights(exact)
    found = [weight.numpy() for weight in trainer.float32_weights().values()]
    steps(2)
    after = [weight.numpy() for weight in trainer.float32_weights().values()]
    return [each.numpy() for each in exact.values()], found, after


@pytest.mark.parametrize("after_a_step", [True, False])
@pytest.mark.parametrize(("name", "update_on_kvstore"), [("adam", True), ("adam", False), ("lamb", True)])
def test_every_process_gets_and_takes_all(name, update_on_kvstore, after_a_step, processes):
    """Where each has the masters of its shard, too."""
    ranks = processes(2).run(_over_ranks, name, update_on_kvstore, after_a_step)
    for exact, found, after in ranks:
        for value, weight, later in zip(exact, found, after, strict=True):
            np.testing.assert_array_equal(weight, in_24_bits(value))
            assert 0 < np.abs(later - weight).max() < 0.05
    for one, other in zip(ranks[0][2], ranks[1][2], strict=True):
        np.testing.assert_array_equal(one, other)


# torch's interface.


@pytest.mark.parametrize("stored", ["float32", "bfloat16", "master", "remainder", "24 bits"])
def test_by_torchs_interface(stored, device):
    dtype, arguments = STORED[stored]
    params, trainer = stepped(device, dtype, arguments, name="lion")
    others = parameters(device, dtype)
    optimizer = tristep.optim.Lion(others, lr=0.01, weight_decay=0.1, **arguments)
    expected = trainer.float32_weights()
    for _ in range(2):  # before the first step, and after one
        optimizer.load_float32_weights(dict(zip(others, expected.values(), strict=True)))
        found = optimizer.float32_weights()
        assert list(map(id, found)) == list(map(id, others))
        assert all(map(torch.equal, found.values(), expected.values()))
        assert all(map(torch.equal, others, params))
        train(others, optimizer.step, 1)


# Refusals.


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda w: {k: v for k, v in w.items() if k != "2"}, ValueError, "weights lacks '2': it must have all"),
        (lambda w: {**w, "3": torch.zeros(2)}, ValueError, r"'3' has shape \(2,\), the parameter has \(\)"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_changes(change, error, message, device, everything):
    params, trainer = stepped(device, BF16, {"multi_precision": "split8"})
    before, weights = everything(trainer, params), trainer.float32_weights()
    with pytest.raises(error, match=message):
        trainer.load_float32_weights(change({name: weight + 1 for name, weight in weights.items()}))
    assert everything(trainer, params) == before


def test_where_weights_are_not_those_of_training(device):
    _, trainer = stepped(device, BF16, {"multi_precision": "split8", "ema_decay": 0.9})
    with trainer.averaged_weights():
        with pytest.raises(RuntimeError, match=r"^float32_weights\(\) inside averaged_weights\(\)"):
            trainer.float32_weights()
        with pytest.raises(RuntimeError, match=r"load_float32_weights\(\) inside averaged_weights\(\)"):
            trainer.load_float32_weights({})


def test_masters_that_are_elsewhere_are_refused():
    for kind in (True, False):
        nets = copies_of(small_net(BF16))
        trainer = Trainer(nets, "sgd", {"multi_precision": kind}, kvstore=Remote())
        before = weights_of(nets[0])
        if kind:
            with pytest.raises(RuntimeError, match="the store keeps the masters of the weights elsewhere"):
                trainer.float32_weights()
        else:
            weights = trainer.float32_weights()
            assert all(map(torch.equal, weights.values(), (weight.float() for weight in before)))
        with pytest.raises(RuntimeError, match="the store keeps the masters of the weights elsewhere"):
            trainer.load_float32_weights({name: param + 1 for name, param in nets[0].named_parameters()})
        assert all(map(torch.equal, weights_of(nets[0]), before))
    net = small_net(BF16)
    trainer = Trainer(net, UpdatedByHand(multi_precision=True))
    with pytest.raises(TypeError, match="UpdatedByHand updates by hand, and keeps float32 copies in states of its own"):
        trainer.float32_weights()
