"""Schedules of settings other than the learning rate: as if set by hand at each step, or by torch's schedulers."""

import copy
from contextlib import nullcontext

import numpy as np
import pytest
import torch

import tristep
from tristep import Trainer, lr_scheduler, optimizer
from tristep.trainer.optimizer.settings import arguments_of

STEPS = 4
TAKES = {
    name: [each for each in arguments_of(klass) if getattr(getattr(klass, each, None), "takes_schedule", False)]
    for name, klass in optimizer.registered().items()
    if klass.__module__.startswith("tristep.")
}
# Values of settings that are 0 or None without a schedule; where they do not fit an optimizer, it refuses them.
VALUES = {"wd": 0.1, "clip_norm": 0.5, "clip_gradient": 0.3, "skip_norm": 50.0, "ema_decay": 0.9, "growth_rate": 1.5}
VALUES |= {"agc": 0.05, "upper_bound": 2.0}


def make_net(name=None):
    torch.manual_seed(0)
    return torch.nn.Linear(4, 3, bias=name != "groupadagrad")  # which takes matrices only


def train(name, arguments, change=lambda made, count: None, steps=STEPS):
    net = make_net(name)
    trainer = Trainer(net, name, arguments, engine="eager")
    inputs = torch.randn(steps, 5, 4, generator=torch.Generator().manual_seed(1))
    for count, x in enumerate(inputs, 1):
        change(trainer.optimizer, count)
        trainer.zero_grad()
        net(x).square().sum().backward()
        trainer.step(5)
    return torch.cat([param.detach().flatten() for param in net.parameters()]), trainer


@pytest.mark.sample(8)
@pytest.mark.parametrize("name", TAKES)
def test_each_number_is_what_is_set_by_hand(name):
    """For all numbers that the optimizer takes, to the bit."""
    plain, _ = train(name, {})
    changed = []
    for setting in TAKES[name]:
        value = vars(tristep.optimizer.create(name)).get(setting) or VALUES.get(setting, 0.5)

        def schedule(count, value=value):
            return value * (1 - 0.02 * count)

        def by_hand(made, count, setting=setting, schedule=schedule):
            setattr(made, setting, schedule(count - getattr(made, "reads_rate_first", False)))

        try:
            expected, by_hand_too = train(name, {setting: schedule(1)}, by_hand)
        except (TypeError, ValueError):  # the optimizer does not take this option
            continue
        found, trainer = train(name, {"schedules": {setting: schedule}})
        assert torch.equal(found, expected), setting
        assert getattr(trainer.optimizer, setting) == getattr(by_hand_too.optimizer, setting)
        changed += [setting] if not torch.equal(found, plain) else []
    assert changed


def test_momentum_and_decay_are_those_of_torchs_one_cycle():
    """MXNet's momentum contains the rate, so that the rate must be constant for torch's numbers."""
    peer = make_net()
    sgd = torch.optim.SGD(peer.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    cycle = torch.optim.lr_scheduler.OneCycleLR(sgd, 0.1, STEPS + 2, base_momentum=0.7)
    momenta, decay = [], lr_scheduler.CosineScheduler(max_update=6, base_lr=0.1)
    for count, x in enumerate(torch.randn(STEPS, 5, 4, generator=torch.Generator().manual_seed(1)), 1):
        (group,) = sgd.param_groups
        momenta.append(group["momentum"])
        group |= {"lr": 0.1, "weight_decay": 0.1 * (1 + np.cos(np.pi * count / 6)) / 2}
        sgd.zero_grad()
        (peer(x).square().sum() / 5).backward()
        sgd.step()
        cycle.step()
    schedules = {"wd": decay, "momentum": lambda count: momenta[max(count - 1, 0)]}
    found, _ = train("sgd", {"learning_rate": 0.1, "schedules": schedules})
    torch.testing.assert_close(found, torch.cat([param.detach().flatten() for param in peer.parameters()]))


def test_decay_in_proportion_to_the_rate_is_that_of_adamc():
    """Defazio (2025), "Why gradients rapidly increase near the end of training", arXiv 2506.02285, in float64."""
    rate = lr_scheduler.CosineScheduler(max_update=6, base_lr=0.2, warmup_steps=2)
    schedules = {"wd": lr_scheduler.CosineScheduler(max_update=6, warmup_steps=2)}
    net = make_net().double()
    arguments = {"lr_scheduler": rate, "wd": 0.3, "beta2": 0.99, "epsilon": 1e-14, "schedules": schedules}
    trainer = Trainer(net, "adam", {"decoupled_wd": True, **arguments}, engine="eager")
    weight, bias = (param.detach().numpy().copy() for param in net.parameters())
    means = [np.zeros_like(each) for each in (weight, bias, weight, bias)]
    for t in range(1, 7):
        x = torch.randn(5, 4, generator=torch.Generator().manual_seed(t), dtype=torch.float64)
        trainer.zero_grad()
        net(x).square().sum().backward()
        lr = 0.2 * (t / 2 if t < 2 else (1 + np.cos(np.pi * (t - 2) / 4)) / 2)
        for k, (w, param) in enumerate(zip((weight, bias), net.parameters(), strict=True)):
            g = param.grad.numpy()
            means[k] = 0.9 * means[k] + 0.1 * g
            means[2 + k] = 0.99 * means[2 + k] + 0.01 * g**2
            m, v = means[k] / (1 - 0.9**t), means[2 + k] / (1 - 0.99**t)
            w -= lr * m / np.sqrt(v) + lr * (lr / 0.2) * 0.3 * w
        trainer.step(1)
        for w, param in zip((weight, bias), net.parameters(), strict=True):
            np.testing.assert_allclose(param.detach().numpy(), w, rtol=1e-9)


def cosine(**arguments):
    return lr_scheduler.CosineScheduler(max_update=10, **arguments)


@pytest.mark.parametrize(
    ("arguments", "base", "warning"),
    [
        ({"wd": 0.2, "schedules": {"wd": cosine()}}, 0.2, None),
        ({"schedules": {"wd": cosine(base_lr=0.3)}}, 0.3, None),
        ({"schedules": {"beta1": cosine(final_lr=0.8)}}, 0.9, None),
        ({"beta1": 0.95, "schedules": {"beta1": cosine(base_lr=0.85)}}, 0.95, r"beta1=0.95 replaces base_lr=0.85"),
        ({"wd": 0.2, "schedules": {"wd": lambda count: 0.1}}, None, r"wd=0.2 has no effect: .* decides it"),
    ],
    ids=["given setting", "given base", "default setting", "both", "no base"],
)
def test_the_setting_is_where_its_schedule_starts(arguments, base, warning):
    with nullcontext() if warning is None else pytest.warns(UserWarning, match=warning):
        made = optimizer.AdamW(**copy.deepcopy(arguments))
    (schedule,) = made.schedules.values()
    assert getattr(schedule, "base_lr", None) == base


SHARED = cosine(base_lr=0.1)


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("adamw", {"schedules": {"lr": cosine()}}, r"schedules\['lr'\]: the schedule of the learning rate is lr_scheduler"),
        ("adamw", {"schedules": {"learning_rate": cosine()}}, r"the schedule of the learning rate is lr_scheduler"),
        ("adamw", {"schedules": {"weight_decay": cosine()}}, r"Did you mean 'wd'\? A schedule is for beta1, .*, wd"),
        ("adamw", {"schedules": {"state_dtype": cosine()}}, r"no number that each step of AdamW reads.* is for beta1"),
        ("rmsprop", {"schedules": {"centered": cosine()}}, r"no number that each step of RMSProp reads"),
        ("prodigy", {"schedules": {"d0": cosine()}}, r"no number that each step of Prodigy reads"),
        ("adamw", {"schedules": {"wd": 0.1}}, r"schedules\['wd'\]=0.1: must be a scheduler"),
        ("adamw", {"schedules": cosine()}, r"schedules must be a mapping"),
        ("adamw", {"schedules": {"wd": cosine()}}, r"was given no base_lr, and wd is 0.0: give one of them"),
        ("adamw", {"schedules": {"beta1": lambda count: 1.0}}, r"schedules\['beta1'\]\(1\)=1.0: must be .* less than 1"),
        ("adamw", {"lr_scheduler": SHARED, "schedules": {"wd": SHARED}}, r"two settings share a scheduler"),
        ("rprop", {"schedules": {"wd": cosine(base_lr=0.1)}}, r"wd=0.0\d+: the rule of Rprop has no weight decay"),
        ([("*", "adamw")], {"schedules": {"momentum": cosine()}}, r"optimizer\[0\]: schedules\['momentum'\]"),
    ],
)
def test_what_has_no_schedule_is_refused_by_name(name, arguments, message):
    with pytest.raises((TypeError, ValueError), match=message):
        Trainer(make_net(), name, arguments)


def test_a_setting_with_a_schedule_is_not_set_until_that_is_taken_away():
    _, trainer = train("adamw", {"wd": 0.2, "schedules": {"wd": cosine()}})
    made = trainer.optimizer
    with pytest.raises(UserWarning, match=r"wd is decided by schedules\['wd'\], CosineScheduler.* cannot be set to 0.5"):
        made.wd = 0.5
    with pytest.raises(TypeError):
        made.schedules["beta1"] = cosine()
    made.schedules["wd"].base_lr = 0.4
    assert made.scheduled_at(STEPS)["wd"] == pytest.approx(0.4 * (1 + np.cos(np.pi * STEPS / 10)) / 2)
    made.schedules = {}
    made.wd = 0.5
    several = Trainer(make_net(), [("bias", "sgd"), ("*", "adamw")], {"wd": 0.2, "schedules": {"wd": cosine()}}).optimizer
    first, second = (part.schedules["wd"] for part in several.optimizers)
    assert first is not second
    assert list(several.scheduled_at(0)) == ["wd of optimizers[0]", "wd of optimizers[1]"]
    with pytest.raises(TypeError, match=r"set optimizer.optimizers\[k\].schedules"):
        several.schedules = {}


@pytest.mark.parametrize("values", [(0.9, 0.0), (0.0, 0.9)], ids=["to 0", "from 0"])
def test_a_schedule_that_would_change_the_rule_fails_before_anything_changes(values):
    net = make_net()
    trainer = Trainer(net, "sgd", {"schedules": {"momentum": lambda count: values[count > 2]}})
    for _ in range(3):
        before = copy.deepcopy(net.state_dict())
        trainer.zero_grad()
        net(torch.ones(1, 4)).sum().backward()
        if trainer.optimizer.num_update == 2:
            with pytest.raises(ValueError, match=r"schedules at update 3: momentum=.* a schedule must stay on one side"):
                trainer.step(1)
            assert all(torch.equal(before[key], value) for key, value in net.state_dict().items())
            assert trainer.optimizer.momentum == values[0]
            assert trainer.optimizer.num_update == 2
        else:
            trainer.step(1)


def test_states_bring_their_schedules_or_leave_the_trainers(tmp_path):
    halved = {"wd": lr_scheduler.FactorScheduler(step=2, factor=0.5)}
    _, trainer = train("adamw", {"wd": 0.2, "schedules": halved})
    trainer.save_states(tmp_path / "states")
    other = Trainer(make_net(), "adamw", {"schedules": {"beta1": cosine(final_lr=0.5)}})
    other.load_states(tmp_path / "states", strict=False, settings="mine")
    assert list(other.optimizer.schedules) == ["beta1"]
    other.load_states(tmp_path / "states")
    assert other.optimizer.schedules == trainer.optimizer.schedules
    assert other.optimizer.wd == trainer.optimizer.wd == 0.1
    plain = Trainer(make_net(), "adamw", {"schedules": {"wd": lambda count: 0.1}})
    state = plain.state_dict()
    with pytest.raises(ValueError, match=r"a plain callable as its schedules\['wd'\]"):
        other.load_state_dict(state)
    plain.load_state_dict(state)
    for wrong, message in (({"d0": None}, r"saved state: schedules\['d0'\]"), ({"wd": None}, "config"), ([], "schedules")):
        with pytest.raises((TypeError, ValueError), match=message):
            other.load_state_dict({**trainer.state_dict(), "schedules": wrong})
    assert other.optimizer.schedules == trainer.optimizer.schedules
    ended = Trainer(make_net(), "adamw", {"schedules": {"wd": cosine(base_lr=0.2)}})
    trainer.optimizer.schedules = {"wd": lr_scheduler.CosineScheduler(max_update=2, base_lr=0.2)}
    with pytest.warns(UserWarning, match=r"so that wd stays at its last value; .* set trainer.optimizer.schedules"):
        ended.load_state_dict(trainer.state_dict())
