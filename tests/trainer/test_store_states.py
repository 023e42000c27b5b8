"""Trainers of several copies of a model: saved states, compression, and synchronization with other processes."""

import copy

import pytest
import torch
from replicas import (
    TWO_BIT,
    Remote,
    assert_close,
    backward_parts,
    copies_of,
    make_batches,
    small_net,
    train_copies,
    weights_of,
    with_loss_scaler,
)

from tristep import Trainer

pytestmark = pytest.mark.usefixtures("loss_scaling")


def _trainer_of(count, updates, **arguments):
    nets = copies_of(small_net(), count)
    choice = {"update_on_kvstore": updates} if count > 1 else {}
    return nets, Trainer(nets, "adam", {"learning_rate": 0.05}, **choice, **arguments)


@pytest.mark.parametrize("saver", [(1, False), (2, True), (2, False)], ids=str)
@pytest.mark.parametrize("loader", [(1, False), (2, True), (3, False), (3, True)], ids=str)
def test_states_go_from_any_number_of_copies_to_any_other(saver, loader, tmp_path):
    nets, trainer = _trainer_of(*saver)
    model, alone = _trainer_of(1, False)
    train_copies(trainer, nets, make_batches(3))
    train_copies(alone, model, make_batches(5))
    trainer.save_states(tmp_path / "states")
    others, loaded = _trainer_of(*loader)
    for net in others:
        net.load_state_dict(nets[0].state_dict())
    loaded.load_states(tmp_path / "states")
    assert loaded.optimizer.num_update == 3
    train_copies(loaded, others, make_batches(5)[3:])
    assert_close(others, model[0], rtol=1e-11)
    assert loaded.optimizer.counts == alone.optimizer.counts


def test_states_before_the_first_step(update_on_kvstore):
    _, trainer = _trainer_of(2, update_on_kvstore)
    assert trainer.state_dict()["state"] == {}
    _, alone = _trainer_of(1, False)
    alone.load_state_dict(trainer.state_dict())


def _compressed(count=2, **arguments):
    nets = copies_of(small_net(torch.float32), count)
    return nets, Trainer(nets, "sgd", {"learning_rate": 0.1}, compression_params=TWO_BIT, **arguments)


def test_gradients_are_what_was_sent_of_them():
    """MXNet's rule for each copy, with a residual of its own; sums of multiples of the threshold."""
    nets, trainer = _compressed(update_on_kvstore=False)
    kept = [[torch.zeros_like(param) for param in net.parameters()] for net in nets]
    for batch in make_batches(4, dtype=torch.float32):
        trainer.zero_grad()
        backward_parts(nets, batch)
        sent = []
        for net, own in zip(nets, kept, strict=True):
            full = [param.grad + residual for param, residual in zip(net.parameters(), own, strict=True)]
            sent.append([0.5 * (each >= 0.5) - 0.5 * (each <= -0.5) for each in full])
            own[:] = [each - out for each, out in zip(full, sent[-1], strict=True)]
        trainer.step(6)
        for net in nets:
            for param, one, other in zip(net.parameters(), *sent, strict=True):
                assert torch.equal(param.grad, one + other)


def test_residuals_are_saved_and_go_on(update_on_kvstore, tmp_path):
    batches = make_batches(6, dtype=torch.float32)
    nets, trainer = _compressed(update_on_kvstore=update_on_kvstore)
    train_copies(trainer, nets, batches[:3])
    trainer.save_states(tmp_path / "states")
    others, loaded = _compressed(update_on_kvstore=update_on_kvstore)
    for net in others:
        net.load_state_dict(nets[0].state_dict())
    train_copies(loaded, others, batches[:1])  # it may have residuals of its own
    for net in others:
        net.load_state_dict(nets[0].state_dict())
    loaded.load_states(tmp_path / "states")
    for each, parts in ((trainer, nets), (loaded, others)):
        train_copies(each, parts, batches[3:])
    assert all(map(torch.equal, weights_of(nets[1]), weights_of(others[1])))
    ours, theirs = loaded.state_dict()["residuals"], trainer.state_dict()["residuals"]
    assert ours.keys() == theirs.keys() == dict(nets[0].named_parameters()).keys()
    assert all(torch.equal(ours[name][r], theirs[name][r]) for name in theirs for r in ("0", "1"))


@pytest.mark.filterwarnings("ignore:.*has no effect. a single copy")
def test_nothing_that_was_kept_back_is_lost_with_another_number_of_copies():
    nets, trainer = _compressed(3)
    train_copies(trainer, nets, make_batches(2, dtype=torch.float32))
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
    other.load_state_dict(Trainer(small_net(torch.float32), "sgd").state_dict())
    residuals = other.state_dict()["residuals"]
    assert all(tensor.abs().max() == 0 for sources in residuals.values() for tensor in sources.values())


def test_residuals_that_do_not_fit_are_refused():
    nets, trainer = _compressed()
    train_copies(trainer, nets, make_batches(1, dtype=torch.float32))
    state = trainer.state_dict()
    must = r"it must be torch.float32 \(5,\)"
    for residuals, error, message in (
        ({"other": {}}, ValueError, "'other' has residuals, but is not among"),
        ({"0.bias": {"0": torch.zeros(4)}}, ValueError, rf"residual 0 of '0.bias' is torch.float32 \(4,\): {must}"),
        ({"0.bias": {"0": torch.zeros(5).double()}}, ValueError, rf"residual 0 of '0.bias' is torch.float64 \(5,\): {must}"),
    ):
        with pytest.raises(error, match=message):
            trainer.load_state_dict(state | {"residuals": residuals})


def test_compression_with_a_loss_scaler_is_refused():
    _, trainer = _compressed()
    with pytest.raises(RuntimeError, match="a loss scaler with compression_params"):
        with_loss_scaler(trainer)
    assert trainer._loss_scaler is None


def test_compression_takes_float32_only(update_on_kvstore, everything):
    nets = copies_of(small_net())
    trainer = Trainer(nets, "sgd", compression_params=TWO_BIT, update_on_kvstore=update_on_kvstore)
    backward_parts(nets, make_batches(1)[0])
    trainer.state_dict()
    params = [param for net in nets for param in net.parameters()]
    before = everything(trainer, params)
    with pytest.raises(TypeError, match="the gradient of key 0 is torch.float64: compression takes dense torch.float32"):
        trainer.step(6)
    assert everything(trainer, params) == before


def test_states_of_a_store_that_keeps_them_elsewhere():
    nets = copies_of(small_net())
    together = Trainer(nets, "adam", {"learning_rate": 0.05}, kvstore=Remote())
    train_copies(together, nets, make_batches(3))
    state = together.state_dict()
    model = copy.deepcopy(nets[0])
    alone = Trainer(model, "adam")
    alone.load_state_dict(state)
    again = Trainer(others := copies_of(nets[0]), "adam", kvstore=Remote())
    again.load_state_dict(alone.state_dict())
    for trainer, parts in ((together, nets), (alone, [model]), (again, others)):
        train_copies(trainer, parts, make_batches(2))
    assert_close([*nets, *others], model)
    with pytest.raises(RuntimeError, match="loss scaler with a store that updates elsewhere"):
        with_loss_scaler(together)
    assert together._loss_scaler is None
    kept = Trainer(parts := copies_of(small_net()), "schedulefreesgd", kvstore=Remote())
    train_copies(kept, parts, make_batches(1))
    with pytest.raises(RuntimeError, match="averaged weights need update_on_kvstore=False"), kept.averaged_weights():
        pass
    with torch.no_grad():
        nets[0][0].weight.zero_()
    backward_parts(nets, make_batches(1)[0])
    with pytest.raises(RuntimeError, match="'remote' does not take other values"):
        together.step(1)
