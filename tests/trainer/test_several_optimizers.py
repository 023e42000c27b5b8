"""Several optimizers in one Trainer, by patterns: torch's optimizers side by side are what they are compared with."""

import copy

import numpy as np
import pytest
import torch
from optimizer_training import ByHand
from rank_training import train, weights_after_steps
from torch import nn

import tristep
from tristep.trainer.loops.snapshot import Snapshot

ADAM, SGD = {"learning_rate": 0.02, "wd": 0.1, "epsilon": 1e-15}, {"learning_rate": 0.01, "momentum": 0.9}
TWO = [("ndim<2", "adam", ADAM), ("*", "sgd", SGD)]


def make_net(dtype=torch.float64):
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(9, 6), nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3)).to(dtype)


def backward(net, step, scale=1.0):
    weight = net[1].weight
    generator = torch.Generator().manual_seed(step)
    tokens, wanted = torch.randint(9, (5,), generator=generator), torch.randn(5, 3, generator=generator)
    net.zero_grad()
    (scale * (net(tokens.to(weight.device)) - wanted.to(weight)).square().sum()).backward()


def trained(trainer, net, steps=5, first=0, batch_size=1):
    for step in range(first, first + steps):
        backward(net, step)
        trainer.step(batch_size)
    return [param.detach().clone() for param in net.parameters()]


def with_torch(steps=5, clip=None, rates=None, momentum=0.9):
    net = make_net()
    vectors = [param for param in net.parameters() if param.ndim < 2]
    matrices = [param for param in net.parameters() if param.ndim >= 2]
    adam = torch.optim.Adam(vectors, lr=0.02, weight_decay=0.1, eps=1e-15)
    sgd = torch.optim.SGD(matrices, lr=0.01, momentum=momentum)
    for step in range(steps):
        backward(net, step)
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(net.parameters(), clip)
        for optimizer, first in ((adam, 0.02), (sgd, 0.01)):
            for group in optimizer.param_groups:
                group["lr"] = first * (1.0 if rates is None else rates[step])
            optimizer.step()
    return [param.detach() for param in net.parameters()]


def close(found, expected, **tolerance):
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, **tolerance)


@pytest.mark.parametrize("clip", [None, 0.5])
def test_each_parameter_is_trained_as_by_its_optimizer_of_torch(clip):
    net = make_net()
    trainer = tristep.Trainer(net, TWO, {} if clip is None else {"clip_norm": clip})
    close(
        trained(trainer, net), with_torch(clip=clip), rtol=0, atol=1e-9 if clip is None else 1e-6
    )  # it is found in float32
    assert trainer.optimizer.num_update == 5
    assert set(trainer.optimizer.counts.values()) == {5}


def test_parts_give_the_bits_of_trainers_of_their_own(device):
    several, alone = make_net(torch.float32).to(device), make_net(torch.float32).to(device)
    entries = [("0.*", "lion", {"learning_rate": 0.01}), ("2.*", "adam", {"clip_norm": 0.5}), ("*", "muon")]
    found = trained(tristep.Trainer(several, entries), several)
    trainers = [
        tristep.Trainer(alone[0], "lion", {"learning_rate": 0.01}),
        tristep.Trainer(alone[2], "adam", {"clip_norm": 0.5}),
        tristep.Trainer([*alone[1].parameters(), *alone[3].parameters()], "muon"),
    ]
    for step in range(5):
        backward(alone, step)
        for trainer in trainers:
            trainer.step(1)
    close(found, [param.detach() for param in alone.parameters()], rtol=0, atol=0)


def test_one_schedule_is_for_all_in_the_ratio_of_their_rates():
    schedule = tristep.lr_scheduler.PolyScheduler(max_update=10, base_lr=1.0, pwr=1)
    rates = [1 - (step + 1) / 10 for step in range(5)]
    entries = [TWO[0], ("*", "sgd", {"learning_rate": 0.01})]  # MXNet's momentum has the rate inside, torch's outside
    net = make_net()
    trainer = tristep.Trainer(net, entries, {"lr_scheduler": schedule})
    close(trained(trainer, net), with_torch(rates=rates, momentum=0.0), rtol=0, atol=1e-9)
    assert [part.lr_scheduler.base_lr for part in trainer.optimizer.optimizers] == [0.02, 0.01]
    assert schedule.base_lr == 1.0  # each has a copy
    assert trainer.optimizer.rate_at(5) == pytest.approx(0.005)  # the last one's
    trainer.optimizer.lr_scheduler = tristep.lr_scheduler.PolyScheduler(max_update=10, base_lr=0.2, pwr=1)
    first, last = trainer.optimizer.optimizers
    assert last.learning_rate == pytest.approx(0.1)
    assert first.learning_rate == pytest.approx(0.2)


def test_a_schedule_of_its_own_is_at_the_update_of_all():
    net, expected = make_net(), make_net()
    schedule = tristep.lr_scheduler.PolyScheduler(max_update=10, base_lr=0.3, pwr=1)
    trainer = tristep.Trainer(net, [("ndim<2", "sgd", {"lr_scheduler": schedule}), ("*", "sgd", {"learning_rate": 0.1})])
    trained(trainer, net)
    for step in range(5):
        backward(expected, step)
        with torch.no_grad():
            for param in expected.parameters():
                param -= (0.3 * (1 - (step + 1) / 10) if param.ndim < 2 else 0.1) * param.grad
    close([param.detach() for param in net.parameters()], list(expected.parameters()), rtol=0, atol=1e-12)


def test_saved_states_resume_bit_for_bit(tmp_path):
    net = make_net()
    entries = [("ndim<2", "adam", ADAM), ("0.*", "muon"), ("*", "sgd", SGD)]
    trainer = tristep.Trainer(net, entries, {"clip_norm": 2.0})
    trained(trainer, net, 3)
    trainer.save_states(tmp_path / "states")
    saved = copy.deepcopy(net.state_dict())
    expected = trained(trainer, net, 3, first=3)
    net.load_state_dict(saved)
    again = tristep.Trainer(net, [(pattern, name) for pattern, name, *_ in entries])
    again.load_states(tmp_path / "states")
    assert again.optimizer.clip_norm == 2.0
    close(trained(again, net, 3, first=3), expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ([("*.bias", "adam"), ("*", "sgd")], "'2.weight' is a parameter of optimizer 'adam', in this trainer of 'sgd'"),
        ([("ndim<2", "adam"), ("0.*", "sgd"), ("*", "sgd")], "of 2 optimizers, this trainer has 3"),
    ],
)
def test_states_of_other_optimizers_are_refused(entries, words):
    net = make_net()
    trainer = tristep.Trainer(net, TWO)
    trained(trainer, net, 1)
    other = tristep.Trainer(net, entries)
    with pytest.raises(ValueError, match=words):
        other.load_state_dict(trainer.state_dict())
    with pytest.raises(ValueError, match="'multioptimizer', this trainer has 'sgd'"):
        tristep.Trainer(net, "sgd").load_state_dict(trainer.state_dict())


def test_multipliers_are_those_of_the_parameters():
    net, expected = make_net(), make_net()
    trainer = tristep.Trainer(net, [("ndim<2", "sgd", {"learning_rate": 0.1}), ("*", "sgd", {"learning_rate": 0.2})])
    trainer.optimizer.set_lr_mult({"1.bias": 0.5, "3.weight": 0.0})
    trained(trainer, net, 1)
    backward(expected, 0)
    factors = {"1.bias": 0.5, "3.weight": 0.0}
    for (name, param), found in zip(expected.named_parameters(), net.parameters(), strict=True):
        rate = (0.1 if param.ndim < 2 else 0.2) * factors.get(name, 1.0)
        torch.testing.assert_close(found.detach(), param.detach() - rate * param.grad)


def test_multipliers_of_parameters_that_another_optimizer_has_are_refused():
    sgd = tristep.optimizer.SGD()
    sgd.set_lr_mult({"0.weight": 0.5})
    with pytest.raises(ValueError, match=r"lr_mult\['0.weight'\] of optimizers\[0\], SGD"):
        tristep.Trainer(make_net(), [("ndim<2", sgd), ("*", "adam")])


LIMITS = {
    "clipped": {"clip_norm": 0.5},
    "large": {"skip_norm": 8.0},
}


@pytest.mark.parametrize("by_hand", [False, True], ids=["rules", "by hand"])
@pytest.mark.parametrize("limit", LIMITS)
def test_limits_of_all_are_those_of_one_optimizer(limit, by_hand, tmp_path):
    """Of which all parameters are; also where a part is updated in torch operations, and after states have been loaded."""
    net, expected = make_net(), make_net()
    part = ByHand(learning_rate=0.1) if by_hand else "sgd"
    entries = [("ndim<2", part), ("*", "sgd", {"learning_rate": 0.1})]
    if not by_hand:
        entries[0] = ("ndim<2", "sgd", {"learning_rate": 0.1})
    trainer, whole = tristep.Trainer(net, entries, LIMITS[limit]), tristep.Trainer(expected, "sgd", LIMITS[limit])
    whole.set_learning_rate(0.1)
    trained(trainer, net, 3, batch_size=2), trained(whole, expected, 3, batch_size=2)
    trainer.save_states(tmp_path / "states")
    entries[0] = ("ndim<2", ByHand(learning_rate=0.1)) if by_hand else entries[0]
    again = tristep.Trainer(net, entries, LIMITS[limit])
    again.load_states(tmp_path / "states")
    trained(again, net, 5, batch_size=2), trained(whole, expected, 5, batch_size=2)
    close([param.detach() for param in net.parameters()], list(expected.parameters()), rtol=1e-9, atol=1e-12)


def test_limits_of_all_and_of_a_part_hold_both():
    """The part's is of its gradients after the limit of all."""
    net, expected = make_net(), make_net()
    entries = [("ndim<2", "sgd", {"learning_rate": 0.1, "clip_norm": 0.1}), ("*", "sgd", {"learning_rate": 0.1})]
    trainer = tristep.Trainer(net, entries, {"clip_norm": 0.5})
    vectors, others = ([p for p in expected.parameters() if (p.ndim < 2) == low] for low in (True, False))
    for k in range(3):
        backward(net, k), backward(expected, k)
        trainer.step(1)
        torch.nn.utils.clip_grad_norm_(expected.parameters(), 0.5)
        torch.nn.utils.clip_grad_norm_(vectors, 0.1)
        torch._foreach_add_([p.data for p in vectors + others], [p.grad for p in vectors + others], alpha=-0.1)
    close([param.detach() for param in net.parameters()], list(expected.parameters()), rtol=1e-9, atol=1e-12)


def test_steps_in_backward_and_telemetry():
    net, other = make_net(), make_net()
    entries = [("ndim<2", "adam", ADAM), ("*", "adam")]
    whole = tristep.Trainer(net, entries, telemetry=True)
    expected = trained(whole, net, 3)
    parts = tristep.Trainer(other, entries, telemetry=True)
    for step in range(3):
        other.zero_grad()
        generator = torch.Generator().manual_seed(step)
        tokens, wanted = torch.randint(9, (5,), generator=generator), torch.randn(5, 3, generator=generator)
        with parts.step_in_backward(1):
            (other(tokens) - wanted.double()).square().sum().backward()
    close([param.detach() for param in other.parameters()], expected, rtol=0, atol=0)
    whole.telemetry.flush(), parts.telemetry.flush()
    np.testing.assert_allclose(parts.telemetry["update_norm"], whole.telemetry["update_norm"], rtol=1e-12)
    assert np.isfinite(whole.telemetry["update_norm"]).all()
    whole.optimizer.clip_norm = 1.0
    with pytest.raises(ValueError, match="clip_norm"), whole.step_in_backward(1):
        pass


def test_averaged_weights_are_those_of_the_optimizers_that_keep_some():
    net, expected = make_net(), make_net()
    trainer = tristep.Trainer(net, [("ndim<2", "adam", ADAM | {"ema_decay": 0.5}), ("*", "sgd", SGD)])
    alone = [
        tristep.Trainer([param for param in expected.parameters() if param.ndim < 2], "adam", ADAM | {"ema_decay": 0.5}),
        tristep.Trainer([param for param in expected.parameters() if param.ndim >= 2], "sgd", SGD),
    ]
    trained(trainer, net, 4)
    for step in range(4):
        backward(expected, step)
        for each in alone:
            each.step(1)
    with trainer.averaged_weights(), alone[0].averaged_weights():
        close([param.detach() for param in net.parameters()], list(expected.parameters()), rtol=0, atol=0)
    close([param.detach() for param in net.parameters()], list(expected.parameters()), rtol=0, atol=0)
    with pytest.raises(ValueError, match="Adam and SGD keeps no averaged"), tristep.Trainer(net, TWO).averaged_weights():
        pass


def test_a_loss_scaler_skips_and_divides(monkeypatch):
    monkeypatch.setattr(tristep.trainer.amp, "_target_dtype", None)
    tristep.amp.init()
    net, expected = make_net(torch.float32), make_net(torch.float32)
    trainer = tristep.Trainer(net, TWO, {"clip_norm": 1.0})
    tristep.amp.init_trainer(trainer)
    plain = tristep.Trainer(expected, TWO, {"clip_norm": 1.0})
    for step in range(4):
        backward(expected, step)
        plain.step(1)
        net.zero_grad()
        generator = torch.Generator().manual_seed(step)
        tokens, wanted = torch.randint(9, (5,), generator=generator), torch.randn(5, 3, generator=generator)
        with tristep.amp.scale_loss((net(tokens) - wanted).square().sum(), trainer) as scaled:
            scaled.backward()
        trainer.step(1)
    close([param.detach() for param in net.parameters()], list(expected.parameters()), rtol=1e-5, atol=1e-6)
    before = [param.detach().clone() for param in net.parameters()]
    backward(net, 9, scale=float("inf"))
    trainer.step(1)
    close([param.detach() for param in net.parameters()], before, rtol=0, atol=0)


def test_what_fails_changes_nothing():
    net = make_net()
    schedule = lambda t: 0.1 if t < 3 else -1.0  # noqa: E731
    trainer = tristep.Trainer(net, [("ndim<2", "adam", ADAM), ("*", "sgd", {"lr_scheduler": schedule})])
    before, counts = trained(trainer, net, 2), trainer.optimizer.counts
    backward(net, 2)
    with pytest.raises(ValueError, match="lr_scheduler"):
        trainer.step(1)
    close([param.detach() for param in net.parameters()], before, rtol=0, atol=0)
    assert trainer.optimizer.counts == counts


def test_snapshots_and_copies():
    net = make_net()
    schedule = tristep.lr_scheduler.PolyScheduler(max_update=10, base_lr=1.0)
    trainer = tristep.Trainer(net, TWO, {"lr_scheduler": schedule})
    trained(trainer, net, 2)
    snapshot = Snapshot(trainer)
    expected = trained(trainer, net, 2, first=2)
    snapshot.restore()
    close(trained(trainer, net, 2, first=2), expected, rtol=0, atol=0)
    snapshot.restore()
    both = copy.deepcopy({"net": net, "trainer": trainer})
    close(trained(both["trainer"], both["net"], 2, first=2), expected, rtol=0, atol=0)
    assert trainer.optimizer.num_update == 2


@pytest.mark.parametrize("update_on_kvstore", [True, False])
def test_two_copies_of_the_model(update_on_kvstore):
    copies, single = [make_net(), make_net()], make_net()
    trainer = tristep.Trainer(copies, TWO, {"clip_norm": 1.0}, update_on_kvstore=update_on_kvstore)
    alone = tristep.Trainer(single, TWO, {"clip_norm": 1.0})
    for step in range(3):
        for net in (*copies, single):
            backward(net, step)
        trainer.step(2)
        alone.step(1)
    for net in copies:
        close([param.detach() for param in net.parameters()], list(single.parameters()), rtol=0, atol=1e-12)


def _run(entries, arguments, store):
    return weights_after_steps(entries, arguments, dtype=torch.float64, **store)


def _saved(entries, path):
    _, net, trainer = train(entries, {}, 3, kvstore="dist_sync", spoil=False)
    trainer.save_states(path)
    return train(entries, {}, 3, first=3, net=net, trainer=trainer, kvstore="dist_sync", spoil=False)[0]


@pytest.mark.parametrize("update_on_kvstore", [True, False])
def test_several_processes(processes, update_on_kvstore, tmp_path):
    entries = [("ndim<2", "adam", ADAM), ("0.*", "muon"), ("*", "sgd", SGD)]
    expected = weights_after_steps(entries, {"clip_norm": 0.5})
    store = {"kvstore": "dist_sync", "update_on_kvstore": update_on_kvstore}
    found = processes(2).run(_run, entries, {"clip_norm": 0.5}, store)
    for weights in found:
        np.testing.assert_array_equal(weights, found[0])
    np.testing.assert_allclose(found[0], expected, rtol=0, atol=1e-6)  # products of bfloat16


def test_states_of_several_processes_are_those_of_one(processes, tmp_path):
    entries = [("ndim<2", "adam", ADAM), ("*", "sgd", SGD)]
    expected = processes(2).run(_saved, entries, tmp_path / "states")[0]
    _, net, _ = train(entries, {}, 3)
    trainer = tristep.Trainer(net, entries)
    trainer.load_states(tmp_path / "states")
    found = train(entries, {}, 3, first=3, net=net, trainer=trainer)[0]
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)


def _of_few(entries, arguments, store):
    torch.manual_seed(5)
    return weights_after_steps(entries, arguments, net=nn.Linear(7, 2).double(), spoil=False, **store)


@pytest.mark.parametrize("arguments", [{}, {"skip_norm": 2.2}, {"clip_norm": 1.1}], ids=str)
@pytest.mark.parametrize(
    "entries",
    [
        [("0.*|weight", "prodigy"), ("*", "adam", {"clip_norm": 0.1, "skip_nonfinite": True})],
        [("ndim<2", "nadam", ADAM), ("*", "schedulefreesgd")],
        [("ndim<2", "lbsgd", {"lr_scheduler": tristep.lr_scheduler.FactorScheduler(1, 0.5)}), ("*", "nadam")],
    ],
    ids=["sums", "states_on_the_host", "rate_first"],
)
def test_what_needs_numbers_of_all_parameters_has_them_where_ranks_update(processes, entries, arguments):
    """Also where a rank has no parameter of an optimizer, or of two parameters none at all."""
    for run in (_run, _of_few):
        expected = run(entries, arguments, {})
        for weights in processes(3).run(run, entries, arguments, {"kvstore": "dist_sync"}):
            np.testing.assert_allclose(weights, expected, rtol=0, atol=1e-9)


def test_an_optional_pattern_may_get_no_parameter(tmp_path):
    """As where a model is trained by adapters, and what the pattern names is frozen."""
    net, expected = make_net(), make_net()
    lora = ("lora_*", "lion", {"learning_rate": 0.5, "optional": True, "ema_decay": 0.5})
    trainer, plain = (
        tristep.Trainer(net, [lora, *TWO], {"clip_norm": 1.0}),
        tristep.Trainer(expected, TWO, {"clip_norm": 1.0}),
    )
    for each, model in ((trainer, net), (plain, expected)):
        trained(each, model, 2)
        each.set_learning_rate(each.learning_rate * 0.5)
        trained(each, model, 2)
    close([param.detach() for param in net.parameters()], list(expected.parameters()), rtol=0, atol=0)
    assert str(trainer.optimizer) == str(plain.optimizer)
    trainer.save_states(tmp_path / "states")
    again = tristep.Trainer(net, [lora, *TWO], {"clip_norm": 1.0})
    again.load_states(tmp_path / "states")
    trained(again, net, 1)
    trained(plain, expected, 1)
    close([param.detach() for param in net.parameters()], list(expected.parameters()), rtol=0, atol=0)
    with again.averaged_weights():
        close([param.detach() for param in net.parameters()], list(expected.parameters()), rtol=0, atol=0)
