"""Trainers of several copies of a model: one step of theirs is one step of one model."""

import numpy as np
import pytest
import torch
from replicas import (
    Remote,
    assert_close,
    backward_parts,
    copies_of,
    fill_in_place,
    make_batches,
    replace_data,
    small_net,
    train_copies,
    weights_of,
)

from tristep import Telemetry, Trainer, kvstore, lr_scheduler


def _assert_equal_copies(nets):
    first = weights_of(nets[0])
    assert all(all(map(torch.equal, first, weights_of(net))) for net in nets)


FACTOR = {"class": lr_scheduler.FactorScheduler, "step": 3, "factor": 0.5, "base_lr": 0.05}

OPTIMIZERS = {
    "sgd, clipped": ("sgd", {"learning_rate": 0.1, "momentum": 0.9, "clip_norm": 0.3}),
    "dcasgd": ("dcasgd", {"learning_rate": 0.05}),
    "lars, scheduled": ("lars", {"momentum": 0.9, "lr_scheduler": FACTOR}),
    "lbsgd, scheduled": ("lbsgd", {"lr_scheduler": FACTOR, "batch_scale": 2}),
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
    model = small_net().to(device)
    nets = copies_of(model)
    together = Trainer(nets, optimizer, _arguments(given), kvstore=store, update_on_kvstore=update_on_kvstore)
    alone = Trainer(model, optimizer, _arguments(given))
    for batch in make_batches(5):
        for trainer, parts in ((together, nets), (alone, [model])):
            train_copies(trainer, parts, [batch])
        assert_close(nets, model)
        _assert_equal_copies(nets)
        assert together.learning_rate == alone.learning_rate
    assert together.optimizer.num_update == alone.optimizer.num_update == 5
    assert together.optimizer.counts == alone.optimizer.counts


def test_three_copies_on_every_engine(engine, device, update_on_kvstore):
    model = small_net(torch.float32).to(device)
    nets = copies_of(model, 3)
    together = Trainer(nets, "adam", {"learning_rate": 0.05}, update_on_kvstore=update_on_kvstore, engine=engine)
    alone = Trainer(model, "adam", {"learning_rate": 0.05}, engine=engine)
    batches = make_batches(3, dtype=torch.float32)
    train_copies(together, nets, batches)
    train_copies(alone, [model], batches)
    assert_close(nets, model, rtol=1e-4)
    _assert_equal_copies(nets)


def test_lazy_copies_begin_once_they_exist(update_on_kvstore):
    nets = [torch.nn.LazyLinear(2, dtype=torch.float64) for _ in range(2)]
    trainer = Trainer(nets, "sgd", {"learning_rate": 0.1}, update_on_kvstore=update_on_kvstore)
    with pytest.raises(ValueError, match=r"'weight', 'bias' of params\[0\] not initialized yet"):
        trainer.step(1)
    backward_parts(nets, make_batches(1)[0])
    trainer.step(6)
    _assert_equal_copies(nets)


def test_rates_and_multipliers_are_live(update_on_kvstore):
    model = small_net()
    nets = copies_of(model)
    together = Trainer(nets, "sgd", {"learning_rate": 0.1, "wd": 0.1}, update_on_kvstore=update_on_kvstore)
    alone = Trainer(model, "sgd", {"learning_rate": 0.1, "wd": 0.1})
    for step, batch in enumerate(make_batches(4)):
        for trainer, parts in ((together, nets), (alone, [model])):
            if step == 1:
                trainer.set_learning_rate(0.03)
            if step == 2:
                parts[0][0].weight.lr_mult = 0.25
            if step == 3:
                parts[0][2].bias.wd_mult = 3.0
            train_copies(trainer, parts, [batch])
        assert_close(nets, model)


def test_a_step_is_recorded_as_that_of_one_model(update_on_kvstore):
    model = small_net()
    nets = copies_of(model)
    together = Trainer(nets, "adam", {"learning_rate": 0.05}, update_on_kvstore=update_on_kvstore, telemetry=Telemetry())
    alone = Trainer(model, "adam", {"learning_rate": 0.05}, telemetry=Telemetry())
    train_copies(together, nets, make_batches(3))
    train_copies(alone, [model], make_batches(3))
    ours, theirs = together.telemetry.read(), alone.telemetry.read()
    assert ours["steps"].tolist() == [1, 2, 3]
    for name, values in theirs.items():
        np.testing.assert_allclose(ours[name], values, rtol=1e-6, atol=1e-12, err_msg=name)


@pytest.mark.parametrize("given", [{"ema_decay": 0.5}, {"optimizer": "schedulefreesgd"}], ids=str)
def test_averaged_weights_in_all_copies(given, update_on_kvstore):
    arguments = {"learning_rate": 0.05} | given
    name = arguments.pop("optimizer", "sgd")
    model = small_net()
    nets = copies_of(model)
    together = Trainer(nets, name, dict(arguments), update_on_kvstore=update_on_kvstore)
    alone = Trainer(model, name, dict(arguments))
    for _ in range(2):
        train_copies(together, nets, make_batches(2))
        train_copies(alone, [model], make_batches(2))
        before = weights_of(nets[1])
        with together.averaged_weights(), alone.averaged_weights():
            assert not torch.equal(nets[1][0].weight, before[0])
            assert_close(nets, model)
        assert all(map(torch.equal, weights_of(nets[1]), before))
    assert_close(nets, model)


def test_different_models_are_no_copies(update_on_kvstore):
    """The second would be overwritten by the first. Weights may still become equal before the first step."""
    nets = copies_of(small_net())
    with torch.no_grad():
        nets[1][2].bias += 1e-3
    trainer = Trainer(nets, "adam", {"learning_rate": 0.05}, update_on_kvstore=update_on_kvstore)
    backward_parts(nets, make_batches(1)[0])
    params = [param for net in nets for param in net.parameters()]
    before = [param.detach().clone() for param in params]
    for refused in (lambda: trainer.step(6), trainer.state_dict):
        with pytest.raises(ValueError, match=r"params\[1\] has other weights than params\[0\] \(1 of 4, such as '2.bias'\)"):
            refused()
    assert all(map(torch.equal, params, before))
    nets[1].load_state_dict(nets[0].state_dict())
    trainer.step(6)
    _assert_equal_copies(nets)


@pytest.mark.parametrize("write", [fill_in_place, replace_data])
@pytest.mark.parametrize("in_both", [False, True], ids=["in the first copy", "in both"])
@pytest.mark.parametrize("store", ["device", "local", "nccl", "remote"])
def test_weights_written_through_data_hold_as_with_one_copy(store, in_both, write, update_on_kvstore, clean_registry):
    """Such as the clamp of a WGAN's critic. Writing through `.data` leaves no trace in the version of a parameter."""
    kvstore.register(Remote)
    if store == "remote" and update_on_kvstore:
        store = "device"  # which takes other weights
    model = small_net()
    nets = copies_of(model)
    settings = {"learning_rate": 0.1, "momentum": 0.9}
    together = Trainer(nets, "sgd", dict(settings), kvstore=store, update_on_kvstore=update_on_kvstore)
    alone = Trainer(model, "sgd", dict(settings))
    for i, batch in enumerate(make_batches(4)):
        halves = i == 2 and not update_on_kvstore
        for trainer, copies in ((together, nets), (alone, [model])):
            trainer.zero_grad()
            backward_parts(copies, batch)
            if halves:
                trainer.allreduce_grads()
            if i > 0:
                for net in copies[: 1 + in_both]:
                    for param in net.parameters():
                        write(param)
            (trainer.update if halves else trainer.step)(6)
        assert_close(nets, model)
        _assert_equal_copies(nets)


REFUSED = {
    "step_in_backward": lambda trainer: trainer.step_in_backward(1).__enter__(),
    "capture": lambda trainer: trainer.capture(print),
}


@pytest.mark.parametrize("store", ["device", None])
@pytest.mark.parametrize("method", REFUSED)
def test_what_is_for_one_copy_is_refused(method, store):
    nets = copies_of(small_net())
    trainer = Trainer(nets, "sgd", kvstore=store)
    backward_parts(nets, make_batches(1)[0])
    with pytest.raises(RuntimeError, match=rf"{method}\(\) of a trainer with several copies of the model, or a store"):
        REFUSED[method](trainer)
    trainer.step(1)
