"""Differences from MXNet in initializers, counts and the interface of optimizers, as docs/differences.md lists them."""

import copy
import inspect

import pytest
import torch
from torch.nn import Parameter

from tristep import Trainer, lr_scheduler, optimizer, replicate
from tristep import init as initializer
from tristep.trainer.optimizer import (
    DCASGD,
    FTML,
    LAMB,
    LANS,
    LARS,
    LBSGD,
    NAG,
    SGD,
    SGLD,
    AdaBelief,
    AdaGrad,
    Adam,
    Adamax,
    AdamW,
    Ftrl,
    GroupAdaGrad,
    Nadam,
    Optimizer,
    RMSProp,
    Signum,
    get_updater,
    settings,
)

# ---- initializers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "expected"),
    [("upsampling0_weight", 7.0), ("stn_loc_weight", 7.0), ("stn_loc_bias", 0.0), ("bn_moving_var", 1.0)],
)
def test_a_plain_name_is_as_good_as_a_description(name, expected):
    """MXNet makes the first bilinear, the second zeros, and the third 1, 0, 0, 0, 1, 0; and warns each time."""
    for given in (name, initializer.InitDesc(name)):
        values = torch.full((6,), 9.0)
        initializer.Constant(7)(given, values)
        assert values.tolist() == [expected] * 6


# ---- counts ----------------------------------------------------------------------------------------------------------


def test_counts_go_with_the_parameter_to_another_device():
    """In MXNet t starts again, and num_update stands still until the new counts overtake it."""
    trainer = Trainer(
        [Parameter(torch.ones(3))], "adam", {"lr_scheduler": lr_scheduler.FactorScheduler(2, 0.5, base_lr=0.1)}
    )
    trainer._params[0].grad = torch.ones(3)
    for _ in range(3):
        trainer._params[0].grad.add_(1.0)
        trainer.step(1)
    other = Trainer([Parameter(torch.ones(3, device="meta"))], "adam")
    other.load_state_dict(trainer.state_dict())
    assert other.state_dict()["state"]["0"]["mean"].device.type == "meta"
    for n in (4, 5):
        other._params[0].grad = torch.ones(3, device="meta")
        other.step(1)
        assert other.optimizer.num_update == n
        assert other.optimizer.counts == {0: n}
    assert other.learning_rate == 0.1 * 0.5**2


# ---- writing optimizers ----------------------------------------------------------------------------------------------


def test_the_first_argument_is_the_learning_rate():
    kin_of_sgd, kin_of_adam = (SGD, NAG, SGLD, Signum, DCASGD), (Adam, AdamW, Adamax, AdaBelief, Nadam, FTML)
    for make in (*kin_of_sgd, *kin_of_adam, AdaGrad, GroupAdaGrad, RMSProp, LARS, LAMB, LANS, LBSGD):
        assert make(0.75).learning_rate == 0.75
    assert Ftrl(0.75).lamda1 == optimizer.AdaDelta(0.75).rho == 0.75  # as in 1.9.1


@pytest.fixture
def warned(monkeypatch):
    """As if nothing had been warned of yet, which is done once in a process."""
    monkeypatch.setattr(settings, "_warned", set())


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (SGD, "momentum"),
        (NAG, "momentum"),
        (DCASGD, "momentum"),
        (LARS, "momentum"),
        (LBSGD, "momentum"),
        (AdaGrad, "eps"),
        (GroupAdaGrad, "eps"),
        (FTML, "beta1"),
    ],
)
def test_a_first_argument_without_a_name_is_warned_of_once(make, name, warned, recwarn):
    with pytest.warns(UserWarning, match=rf"of {make.__name__} is learning_rate; in MXNet 1.9.1 it is {name}: write"):
        make(0.5)
    make(0.5)
    make(learning_rate=0.5)
    make(**{name: 0.5})
    assert not recwarn.list
    assert next(iter(inspect.signature(make).parameters)) == "learning_rate"


@pytest.mark.parametrize("make", [Adam, Adamax, Nadam, RMSProp, Signum, LAMB, AdamW, AdaBelief, LANS])
def test_a_default_rate_that_mxnet_prefers_to_the_schedule_is_warned_of_once(make, warned, recwarn):
    def schedule(rate):
        return lr_scheduler.FactorScheduler(2, 0.5, base_lr=rate)

    own = make().lr
    with pytest.warns(
        UserWarning, match=f"{make.__name__} without a learning_rate keeps base_lr=0.25 .*learning_rate={own} for"
    ):
        assert (
            make(lr_scheduler=type("Own", (lr_scheduler.FactorScheduler,), {})(2, 0.5, base_lr=0.25)).learning_rate == 0.25
        )
    other = type("FactorScheduler", (), {"base_lr": 0.125, "__call__": lambda self, num_update: 0.125})
    make(lr_scheduler=other())  # not MXNet's, whatever its name
    make(lr_scheduler=schedule(0.25))
    make(learning_rate=0.25, lr_scheduler=schedule(0.25))
    make(lr_scheduler=schedule(own))
    make(lr_scheduler=lambda number: 0.25)
    SGD(lr_scheduler=schedule(0.25))
    assert not recwarn.list


@pytest.mark.parametrize("counted", [True, False], ids=["as on the CPU", "as on a GPU"])
@pytest.mark.parametrize("copies", [1, 2])
def test_a_missing_zero_grad_is_warned_of_once(copies, counted, recwarn, monkeypatch):
    """On a GPU torch counts no writes to lists of tensors."""
    if not counted:
        monkeypatch.setattr(torch, "_foreach_zero_", lambda tensors: [each.data.zero_() for each in tensors])

    def trained(before, grad_req=None, **arguments):
        nets = replicate(torch.nn.Linear(2, 1), ["cpu"] * copies)
        if grad_req is not None:
            for param in nets[0].parameters():
                param.grad_req = grad_req
        trainer = Trainer(nets if copies > 1 else nets[0], "sgd", **arguments)
        for _ in range(4):
            before(trainer, nets)
            for net in nets:
                net(torch.ones(1, 2)).sum().backward()
            trainer.step(1)
            assert len(nets[0].weight._post_accumulate_grad_hooks or ()) <= 1
        assert not nets[0].weight._post_accumulate_grad_hooks

    def by_hand(trainer, nets):
        for net in nets:
            net.zero_grad(set_to_none=False)

    def twice(trainer, nets):
        trainer.zero_grad(set_to_none=False)
        for net in nets:
            net(torch.ones(1, 2)).sum().backward()

    trained(lambda trainer, nets: trainer.zero_grad())
    trained(by_hand)
    trained(twice)
    trained(lambda trainer, nets: None, zero_grads=True)
    trained(lambda trainer, nets: None, grad_req="add")
    assert not recwarn.list
    with pytest.warns(
        UserWarning, match="has added to the gradients of the step before.* in MXNet it replaces them"
    ) as found:
        trained(lambda trainer, nets: None)
    assert len(found) == 1
    assert found[0].filename == __file__


def test_lbsgd_asks_a_schedule_for_all_parameters_before_it_counts():
    """MXNet, which counts parameter by parameter, asks for all but the first one number later."""
    weights = [Parameter(torch.zeros(1)) for _ in range(2)]
    trainer = Trainer(weights, "lbsgd", {"lr_scheduler": lr_scheduler.FactorScheduler(1, 0.5, base_lr=1.0)})
    for rate in (1.0, 1.0, 0.5):  # of the numbers 0, 1, 2
        before = [weight.item() for weight in weights]
        for weight in weights:
            weight.grad = torch.ones(1)
        trainer.step(1)
        assert [old - weight.item() for old, weight in zip(before, weights, strict=True)] == [rate, rate]


def test_arguments_of_the_base_class_are_given_by_name():
    parameters = list(inspect.signature(Optimizer).parameters.values())
    assert {parameter.kind for parameter in parameters} == {inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD}
    with pytest.raises(TypeError, match="positional arguments"):
        SGD(0.1, 0.9, True, 1.0)
    with pytest.raises(TypeError, match="SGD has no argument 'sym'"):
        SGD(sym=None)


def test_states_are_tuples_and_masters_are_kept_apart():
    updater = get_updater(SGD(multi_precision=True))
    other = get_updater(Adam(multi_precision=True))
    for each in (updater, other):
        each(0, torch.ones(2).half(), torch.ones(2).half())
        assert each.masters[0].dtype == torch.float32
    assert updater.states == {0: ()}
    assert [state.tolist() for state in other.states[0]] == [[pytest.approx(0.1)] * 2, [pytest.approx(0.001)] * 2]
    assert list(other.state[0]) == ["mean", "var", "master copy"]
    assert other.state[0]["mean"] is other.states[0][0]
    assert copy.deepcopy(updater.states) == {0: ()}
    with pytest.raises(TypeError, match="does not support item assignment"):
        other.states[0] = ()


def test_an_updater_has_no_pickles():
    updater = get_updater(SGD())
    assert not hasattr(updater, "get_states")
    assert not hasattr(updater, "set_states")
