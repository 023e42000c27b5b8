"""The settings of an optimizer are checked wherever they are set: constructor, attribute, several together, groups."""

import inspect
import math

import numpy as np
import pytest
import torch

import tristep
from tristep import Trainer, optimizer
from tristep.trainer import validation
from tristep.trainer.optimizer import create, registered
from tristep.trainer.optimizer.settings import Setting, arguments_of

# The words of each form of message: check, its limits, a value, the error, what follows "name=value: ".
FORMS = [
    ("number", {}, math.nan, ValueError, "must be finite"),
    ("number", {"low": 0}, -0.5, ValueError, "must be finite and 0 or more"),
    ("number", {"above": 0, "high": 1}, 0, ValueError, "must be finite and greater than 0 and 1 or less"),
    ("number", {"low": 0, "below": 1}, 1.0, ValueError, "must be finite and 0 or more and less than 1"),
    ("number", {}, "1", TypeError, "must be a number, not str"),
    ("number", {}, np.array([1.0]), TypeError, "must be a number, not ndarray"),
    ("integer", {"low": 1}, 0, ValueError, "must be 1 or more"),
    ("integer", {"high": 1000}, 1001, ValueError, "must be 1,000 or less"),
    ("integer", {}, 0.5, TypeError, "must be an integer, not float"),
    ("boolean", {}, np.True_, TypeError, "must be True or False, not bool"),
    ("choice", {"allowed": ["red", "blue"]}, "rad", ValueError, "Did you mean 'red'? It must be one of 'red', 'blue'"),
    ("choice", {"allowed": ["red", "blue"]}, 3, TypeError, "must be a string, one of 'red', 'blue'"),
    ("instance", {"kinds": int, "allowed": "an int", "shown": True}, [3], TypeError, "must be an int, not list"),
]


@pytest.mark.parametrize(("check", "limits", "value", "error", "words"), FORMS)
def test_messages_have_the_name_the_value_and_what_is_allowed(check, limits, value, error, words):
    with pytest.raises(error) as caught:
        getattr(validation, check)("name", value, **limits)
    assert str(caught.value) == f"name={value!r}: {words}"


SWITCHES = ("boolean", "split_master")
NO_NUMBERS = ["1", True, np.True_, 1j, [], object(), np.array([1.0]), torch.ones(2)]


def settings_of(klass):
    """The public settings of a class of optimizers, its options among them, by name."""
    found = {name: inspect.getattr_static(klass, name) for base in klass.__mro__ for name in vars(base)}
    return {name: value for name, value in found.items() if isinstance(value, Setting) and name[0] != "_"}


def outside(setting):
    """Values just outside of what a setting says that it allows, each with the type of its error."""
    check, limits = setting._check.__name__, setting._limits
    if not setting._optional:
        yield None, TypeError
    if check in ("number", "_carried"):
        yield from ((value, TypeError) for value in NO_NUMBERS if check == "number" or not isinstance(value, np.ndarray))
        yield from ((value, ValueError) for value in (math.nan, math.inf, -math.inf))
    elif check == "integer":
        yield from ((value, TypeError) for value in (*NO_NUMBERS, 0.5))
    elif check in ("choice", "_state_dtype"):
        yield "nothing", ValueError
        yield 3, TypeError
    else:
        yield from ((value, TypeError) for value in (object(), *((1, np.True_) if check in SWITCHES else ())))
    step = (lambda limit, up: limit + up) if check == "integer" else (lambda limit, up: math.nextafter(limit, up * math.inf))
    for limit, up in (("low", -1), ("high", 1)):
        if limit in limits:
            yield step(limits[limit], up), ValueError
    yield from ((limits[limit], ValueError) for limit in ("above", "below") if limit in limits)


@pytest.mark.sample(15)
@pytest.mark.parametrize("name", sorted(registered()))
def test_no_setting_takes_what_is_outside_its_limits(name):
    """Nor does the argument of the constructor; and what is refused changes nothing."""
    klass = registered()[name]
    made, allowed = klass(), arguments_of(klass)
    before = dict(vars(made))
    for attribute, setting in settings_of(klass).items():
        argument = {"lr": "learning_rate"}.get(attribute, attribute)
        for value, error in outside(setting):
            with pytest.raises(error) as caught:
                setattr(made, attribute, value)
            assert str(caught.value).startswith((f"{attribute}={value!r}", f"{attribute} must"))
            if argument in allowed and value is not None:
                with pytest.raises(error) as caught:
                    create(name, **{argument: value})
                assert str(caught.value).startswith(f"{argument}={value!r}")
    assert vars(made) == before


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", sorted(registered()))
def test_nor_does_an_argument_or_a_group_of_torchs_interface(name):
    klass = registered()[name]
    of_torch, param = tristep.optim.as_torch(klass), torch.nn.Parameter(torch.ones(2, 2))
    made = of_torch([param], lr=0.1)
    for attribute, setting in settings_of(klass).items():
        argument = {"lr": "lr", "wd": "weight_decay"}.get(attribute, attribute)
        if argument not in made.param_groups[0]:
            continue
        bad = {error: value for value, error in outside(setting) if value is not None}
        for error, value in bad.items():
            for refused in (
                lambda: of_torch([param], **{argument: value}),  # noqa: B023
                lambda: made.add_param_group({"params": [torch.nn.Parameter(torch.ones(2, 2))], argument: value}),  # noqa: B023
            ):
                with pytest.raises(error) as caught:
                    refused()
                assert str(caught.value).startswith(f"{argument}={value!r}")
    assert len(made.param_groups) == 1


def net_of(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((4, 3), (2, 2))]


def trained(made, steps=1):
    params = net_of()
    trainer = Trainer(params, made, engine="eager")
    for step in range(steps):
        take(trainer, params, step)
    return trainer, params


def take(trainer, params, step):
    generator = torch.Generator().manual_seed(step)
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator)
    trainer.step(1)


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("lr_mult", 0.5, "lr_mult must map parameter indices or names to numbers, got float"),
        ("lr_mult", {"a": 0.5}, r"lr_mult\['a'\]: no parameter has this name or index"),
        ("wd_mult", {0: -1}, r"wd_mult\[0\]=-1: must be finite and 0 or more"),
        ("decoupled_wd", True, "decoupled_wd=True: AdamW decays the weights apart"),
        (
            "stochastic_rounding",
            True,
            "stochastic_rounding=True after the first step: random numbers would begin anew, so it must stay",
        ),
        ("ema_decay", 0.9, "ema_decay=0.9 after the first step: mean, var would begin anew"),
        ("lookahead", 2, "lookahead=2 after the first step: mean, var would begin anew"),
    ],
)
def test_what_is_refused_of_an_attribute(setting, value, message):
    trainer, _ = trained("adamw")
    before = dict(vars(trainer.optimizer))
    with pytest.raises((TypeError, ValueError), match=f"^{message}"):
        setattr(trainer.optimizer, setting, value)
    assert vars(trainer.optimizer) == before


def test_what_does_not_go_together_is_set_back():
    made = optimizer.Adam(decoupled_wd=True, cautious_wd=True)
    with pytest.raises(ValueError, match="cautious_wd=True: Adam adds its weight decay to the gradient"):
        made.decoupled_wd = False
    assert made.decoupled_wd
    made.set_together({"decoupled_wd": False, "cautious_wd": False, "cautious": True})
    assert made.composed_rule is optimizer.Adam(cautious=True).composed_rule


def test_what_is_set_means_what_it_means_in_the_constructor():
    options = {"clip_norm": 0.5, "cautious": True, "lookahead": 2, "skip_nonfinite": True, "wd": 0.1, "beta1": 0.5}
    made = optimizer.AdamW()
    for name, value in options.items():
        setattr(made, name, value)
    assert repr(made) == repr(optimizer.AdamW(**options))
    assert made.composed_rule is optimizer.AdamW(**options).composed_rule
    (_, found), (_, expected) = trained(made, 4), trained(optimizer.AdamW(**options), 4)
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize(
    ("klass", "option", "bad"),
    [
        ("Lion", "lr", math.nan),
        ("Lion", "lookahead", "x"),
        ("AdamW", "betas", []),
        ("AdamW", "eps", -math.inf),
        ("SGD", "momentum", 1j),
        ("SGD", "weight_decay", torch.ones(2)),
    ],
)
def test_groups_are_checked_when_they_change(klass, option, bad):
    params = net_of()
    made = getattr(tristep.optim, klass)(params, lr=0.1)
    for step in range(2):
        for param in params:
            param.grad = torch.ones_like(param)
        if step == 1:
            before = [param.clone() for param in params]
            made.param_groups[0][option] = bad
            with pytest.raises((TypeError, ValueError), match=option):
                made.step()
            assert all(map(torch.equal, params, before))
        else:
            made.step()


@pytest.mark.parametrize("setting", [{"clip_gradient": 1.0}, {"wd": 0.1}], ids=["clip", "wd"])
def test_what_a_rule_does_not_use_is_refused(setting):
    """It had no effect, silently."""

    @tristep.rule
    def plain(w, g, state, hyper):
        (lr,) = hyper
        return w - lr * g, state

    class Plain(tristep.optimizer.RuleOptimizer):
        rule = plain

    with pytest.raises(ValueError, match=next(iter(setting))):
        Plain(learning_rate=0.1, **setting)
    optimizer = Plain(learning_rate=0.1)
    ((name, value),) = setting.items()
    with pytest.raises(ValueError, match=name):
        setattr(optimizer, name, value)

    class Own(Plain):
        def hyper(self, t, lr, wd):  # may use both
            return {"lr": lr * (1 - wd)}

    assert getattr(Own(learning_rate=0.1, **setting), name) == value
