"""Trainers of several copies of a model: which gradients are fresh, summed, zeroed and scaled."""

import math

import pytest
import torch
from replicas import (
    UpdatedByHand,
    assert_close,
    backward_parts,
    copies_of,
    make_batches,
    small_net,
    train_copies,
    weights_of,
    with_loss_scaler,
)

import tristep
from tristep import StaleGradientError, Trainer, UpdateOnKVStoreError, amp
from tristep.trainer.kvstore import LocalStore
from tristep.trainer.optimizer import Adam

pytestmark = pytest.mark.usefixtures("loss_scaling")


def _two(value=1.0, **arguments):
    """Two copies of a weight of ones, and a function that writes gradients to them."""
    nets = copies_of(torch.nn.Linear(2, 1, bias=False).double())
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
    model = small_net()
    nets = copies_of(model)
    trainer = Trainer(nets, "adam", {"learning_rate": 0.05}, zero_grads=True, kvstore=store, **choice)
    alone = Trainer(model, "adam", {"learning_rate": 0.05}, zero_grads=True)
    for batch in make_batches(3):
        train_copies(trainer, nets, [batch], zero_grad=False)
        train_copies(alone, [model], [batch], zero_grad=False)
        assert all(param.grad.abs().max() == 0 for net in nets for param in net.parameters())
        with pytest.raises(StaleGradientError):
            trainer.step(1)
    if store:
        assert_close(nets, model)


def test_a_frozen_parameter_is_left_alone_in_all_copies(update_on_kvstore):
    nets = copies_of(small_net())
    trainer = Trainer(nets, "sgd", {"learning_rate": 0.1}, update_on_kvstore=update_on_kvstore)
    train_copies(trainer, nets, make_batches(1))
    before = nets[0][0].weight.detach().clone()
    for net in nets:
        net[0].weight.requires_grad_(False)
    train_copies(trainer, nets, make_batches(2))
    assert all(torch.equal(net[0].weight, before) for net in nets)
    assert trainer.optimizer.counts == {0: 1, 1: 3, 2: 3, 3: 3}


def test_a_step_that_fails_after_adding_up_does_not_add_up_twice(update_on_kvstore):
    model = small_net()
    nets = copies_of(model)
    together = Trainer(nets, "ftrl", {"learning_rate": 0.1}, update_on_kvstore=update_on_kvstore)
    alone = Trainer(model, "ftrl", {"learning_rate": 0.1})
    for batch in make_batches(2):
        together.zero_grad()
        alone.zero_grad()
        backward_parts(nets, batch)
        backward_parts([model], batch)
        together.set_learning_rate(0.0)
        for _ in range(2):
            with pytest.raises(ValueError, match="learning rate|lr"):
                together.step(6)
        together.set_learning_rate(0.1)
        together.step(6)
        alone.step(6)
        assert_close(nets, model)
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
    nets = copies_of(model)
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
        assert_close(nets, model)
    assert together._sync.updates is (asked is True)


@pytest.mark.parametrize("make", [Adam, UpdatedByHand])
@pytest.mark.parametrize("where", [0, 1])
@pytest.mark.parametrize("store", ["device", "local", None])
def test_an_overflow_in_any_copy_leaves_all_as_they_are(make, where, store, update_on_kvstore):
    choice = {"update_on_kvstore": update_on_kvstore} if store else {}
    model = small_net(torch.float32)
    nets = copies_of(model)
    together = with_loss_scaler(Trainer(nets, make(learning_rate=0.05), kvstore=store, **choice))
    alone = with_loss_scaler(Trainer(model, make(learning_rate=0.05)))
    batches = make_batches(4, dtype=torch.float32)
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
            before = [weights_of(net) for net in parts]
            trainer.step(6)
            if step == 1:
                assert all(all(map(torch.equal, weights_of(net), own)) for net, own in zip(parts, before, strict=True))
        if store:
            assert_close(nets, model, rtol=1e-4)
        assert together._loss_scaler.loss_scale == (1024.0 if step < 1 else 512.0)
    assert not torch.equal(nets[1][0].weight, small_net(torch.float32)[0].weight)


def test_unscaled_gradients_of_all_copies(update_on_kvstore):
    nets = copies_of(small_net(torch.float32))
    trainer = with_loss_scaler(Trainer(nets, "sgd", update_on_kvstore=update_on_kvstore))
    with amp.scale_loss([net[0].bias.sum() for net in nets], trainer) as losses:
        for loss in losses:
            loss.backward()
    amp.unscale(trainer)
    assert [net[0].bias.grad.tolist() for net in nets] == [[1.0] * 5] * 2
