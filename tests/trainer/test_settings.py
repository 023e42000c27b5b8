"""The settings of an optimizer are checked wherever they are set: constructor, attribute, several together, groups."""

import inspect
import math
import pickle

import pytest
import torch

import tristep
from tristep import Trainer, optimizer
from tristep.trainer.optimizer import registered

BAD = {
    "nan": math.nan,
    "inf": math.inf,
    "-inf": -math.inf,
    "text": "x",
    "complex": 1j,
    "list": [],
    "object": object(),
    "tensor": torch.ones(2),
}
NUMBERS = [
    "lr",
    "wd",
    "rescale_grad",
    "clip_gradient",
    "begin_num_update",
    "num_update",
    "clip_norm",
    "ema_decay",
    "lookahead",
]


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


def numbers_of(made):
    """The names of all public numbers and switches."""
    return [name for name, value in vars(made).items() if name[0] != "_" and isinstance(value, (bool, int, float))]


def refusal(use):
    """The message of an error, if there is one."""
    try:
        use()
    except (TypeError, ValueError) as error:
        return str(error)
    return None


@pytest.mark.sample(30)
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("name", sorted(registered()))
def test_no_number_of_an_optimizer_takes_what_is_none(name, bad):
    trainer, params = trained(name, 2)
    _, expected = trained(name, 3)
    before = repr(trainer.optimizer.settings())
    for attribute in (*numbers_of(trainer.optimizer), *NUMBERS):
        with pytest.raises((TypeError, ValueError), match=attribute):
            setattr(trainer.optimizer, attribute, BAD[bad])
    assert repr(trainer.optimizer.settings()) == before
    take(trainer, params, 2)
    assert all(map(torch.equal, params, expected))


@pytest.mark.sample(10)
@pytest.mark.parametrize("name", sorted(registered()))
def test_an_attribute_takes_what_the_constructor_takes_of_a_number(name):
    klass = registered()[name]
    made = klass()
    arguments = [each for each in inspect.signature(klass.__init__).parameters if each in numbers_of(made)]
    for argument in arguments:
        for value in (-1.0, -1, 0, 0.5, 1, 1.0, 2.0, True):
            made = refusal(lambda: klass(**{argument: value}))  # noqa: B023
            assert refusal(lambda: setattr(klass(), argument, value)) == made  # noqa: B023


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("lr_scheduler", 3, "lr_scheduler=3: must be a scheduler"),
        ("lr_mult", 0.5, "lr_mult must map parameter indices or names to numbers, got float"),
        ("lr_mult", {"a": 0.5}, r"lr_mult\['a'\]: no parameter has this name or index"),
        ("wd_mult", {0: -1}, r"wd_mult\[0\]=-1: must be finite and 0 or more"),
        ("multi_precision", "remain", "multi_precision='remain': Did you mean 'remainder'"),
        ("state_dtype", "int8", "state_dtype='int8': Did you mean '8bit'"),
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


def test_copies_have_settings_of_their_own():
    made = optimizer.AdamW(clip_norm=1.0)
    other = pickle.loads(pickle.dumps(made))
    other.clip_norm = None
    assert (made.has_options, other.has_options) == (True, False)


@pytest.mark.parametrize("bad", list(BAD)[:6])
@pytest.mark.parametrize(
    ("klass", "option"),
    [("Lion", each) for each in ("lr", "weight_decay", "beta1", "clip_norm", "lookahead", "cautious")]
    + [("AdamW", each) for each in ("lr", "weight_decay", "betas", "eps")]
    + [("SGD", each) for each in ("lr", "momentum", "weight_decay")],
)
def test_groups_are_checked_when_they_change(klass, option, bad):
    params = net_of()
    made = getattr(tristep.optim, klass)(params, lr=0.1)
    for step in range(2):
        for param in params:
            param.grad = torch.ones_like(param)
        if step == 1:
            before = [param.clone() for param in params]
            made.param_groups[0][option] = BAD[bad]
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
