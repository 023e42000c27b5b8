"""Optimizers by themselves: the registry, user-defined optimizers in both forms, counts, rates, multipliers, the updater.

The judges are torch.optim and NumPy in float64. MXNet's own numbers are in test_golden_optimizers.py.
"""

import copy
import doctest
import math

import numpy as np
import pytest
import torch
from torch.nn import Parameter

from tristep import Trainer, lr_scheduler, rule
from tristep.kernels import rules, tl
from tristep.trainer import optimizer as optimizers
from tristep.trainer import trainer as trainer_module
from tristep.trainer.optimizer import (
    DCASGD,
    FTML,
    LANS,
    LARS,
    LBSGD,
    NAG,
    SGD,
    SGLD,
    AdaBelief,
    AdaDelta,
    AdaGrad,
    Adam,
    Adamax,
    AdamW,
    Ftrl,
    GroupAdaGrad,
    Nadam,
    Optimizer,
    RMSProp,
    RuleOptimizer,
    Signum,
    base,
    create,
    get_updater,
    register,
    registered,
    rule_optimizer,
)

# Some roundings of float32 apart.
CLOSE = {"rtol": 2e-6, "atol": 1e-6}
LOW_PRECISION = [torch.float16, torch.bfloat16]


pytestmark = pytest.mark.usefixtures("clean_registry")


def _values(*tensors):
    return [tensor.detach().cpu().double().numpy().copy() for tensor in tensors]


def _random(shape, dtype=torch.float32, device="cpu"):
    return torch.randn(shape, device=device).to(dtype)


# ---- the registry ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["adamw", "AdamW", "ADAMW"])
def test_create_takes_the_name_of_a_class_in_any_case(name):
    made = create(name, beta1=0.5)
    assert type(made) is AdamW
    assert made.beta1 == 0.5


def test_create_returns_an_instance_as_it_is():
    made = SGD()
    assert create(made) is made
    with pytest.raises(TypeError, match="arguments beside an optimizer instance: momentum, wd; give them to SGD"):
        create(made, momentum=0.9, wd=0.1)


@pytest.mark.parametrize(("wrong", "near"), [("adamm", "'adam'"), ("RMS_Prop", "'rmsprop'"), ("adgrad", "'adagrad'")])
def test_create_names_the_nearest(wrong, near):
    with pytest.raises(ValueError, match=f"optimizer={wrong!r}: no optimizer is registered.*Did you mean .*{near}"):
        create(wrong)


def test_create_lists_what_there_is():
    with pytest.raises(ValueError, match=f"there are {', '.join(sorted(registered()))}"):
        create("zzz")


@pytest.mark.parametrize("wrong", [None, 3, SGD, torch.optim.SGD])
def test_create_refuses_what_is_no_name(wrong):
    with pytest.raises(TypeError, match="must be a name, such as 'sgd', or an Optimizer"):
        create(wrong)


def test_register_makes_a_class_known_by_its_name():
    @register
    class Sideways(RuleOptimizer):
        rule = rules.sgd

    assert type(create("sideways", wd=0.5)) is Sideways
    assert registered()["sideways"] is Sideways
    assert list(registered()) == sorted(registered())


def test_a_class_defined_again_replaces_the_first_silently_another_with_a_warning():
    def cell():
        @register
        class Sideways(RuleOptimizer):
            rule = rules.sgd

        return Sideways

    first, second = cell(), cell()
    assert registered()["sideways"] is second is not first
    other = type("Sideways", (RuleOptimizer,), {"rule": rules.sgd})
    with pytest.warns(UserWarning, match="optimizer 'sideways' now means .*Sideways.*, before .*cell.*Sideways"):
        register(other)
    assert registered()["sideways"] is other


@pytest.mark.parametrize("wrong", [int, Trainer, lambda: None, SGD(), "sgd"])
def test_register_takes_optimizer_classes_only(wrong):
    before = registered()
    with pytest.raises(TypeError, match="@register takes a subclass of Optimizer, got"):
        register(wrong)
    assert registered() == before


def test_the_base_class_has_a_rate_but_does_not_train():
    """MXNet's test_learning_rate makes it, too."""
    made = Optimizer(learning_rate=0.01)
    made.set_learning_rate(0.2)
    assert made.learning_rate == 0.2
    assert made.create_state(0, torch.ones(1)) is None
    for refused in (lambda: get_updater(made), lambda: Trainer([Parameter(torch.ones(1))], made)):
        with pytest.raises(TypeError, match="Optimizer cannot train: it must define update"):
            refused()


@pytest.mark.parametrize("decorator", [Optimizer.register, register], ids=["class", "module"])
def test_registered_as_mxnets_documents_show(decorator):
    """A user's class takes the place of ours of that name, with a warning, wherever optimizers are made by name."""
    with pytest.warns(UserWarning, match="optimizer 'radam' now means"):

        @decorator
        class RAdam(Optimizer):
            def update(self, index, weight, grad, state):
                self._update_count(index)
                weight -= 7 * grad

    assert Optimizer.opt_registry["radam"] is RAdam
    assert type(Optimizer.create_optimizer("RAdam")) is type(create("radam", wd=0.5)) is RAdam
    weight = Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    Trainer([weight], "radam", {"learning_rate": 0.5}).step(1)
    assert weight.tolist() == [-6.0, -6.0]
    with pytest.raises(TypeError, match="subclass of Optimizer, got <class 'int'>"):
        decorator(int)


def test_repr_and_settings_are_plain_numbers():
    made = RMSProp(centered=True, wd=np.float64(0.5))
    made.gamma1 = np.float32(0.75)
    made.cache = [1, 2]
    settings = made.settings()
    assert settings["gamma1"] == 0.75
    assert {type(value) for value in settings.values()} <= {bool, int, float, str, type(None)}
    assert "cache" not in settings
    assert repr(made).startswith("RMSProp(gamma1=0.75, gamma2=0.9, epsilon=1e-08, centered=True")


def test_docstring_examples():
    for module, least in ((base, 2), (rule_optimizer, 2), (trainer_module, 6)):
        failed, attempted = doctest.testmod(module)
        assert attempted >= least
        assert failed == 0


# ---- user-defined optimizers: a rule and a class -------------------------------------------------------------------


@rule
def lion(w, g, state, hyper):
    """c = beta1 m + (1 - beta1) g;  w <- w - lr (sign(c) + wd w);  m <- beta2 m + (1 - beta2) g. Chen et al. (2023)."""
    (mean,) = state
    lr, wd, clip, beta1, one_minus_beta1, beta2, one_minus_beta2 = hyper
    g = tl.minimum(tl.maximum(g, -clip), clip)
    c = beta1 * mean + one_minus_beta1 * g
    c = tl.where(c > 0.0, 1.0, tl.where(c < 0.0, -1.0, 0.0))
    return w - lr * (c + wd * w), (beta2 * mean + one_minus_beta2 * g,)


class MyLion(RuleOptimizer):
    default_learning_rate = 1e-4
    rule = lion

    def __init__(self, learning_rate=None, beta1=0.9, beta2=0.99, **kwargs):
        self.beta1, self.beta2 = beta1, beta2
        super().__init__(learning_rate=learning_rate, **kwargs)


def _lion_in_numpy(w, gradients, lr, wd, beta1, beta2, clip=math.inf):
    mean = np.zeros_like(w)
    for g in gradients:
        g = np.clip(g, -clip, clip)
        w = w - lr * (np.sign(beta1 * mean + (1 - beta1) * g) + wd * w)
        mean = beta2 * mean + (1 - beta2) * g
    return w, mean


def _train(params, optimizer, gradients, engine=None):
    trainer = Trainer(params, optimizer, engine=engine)
    for row in gradients:
        for param, gradient in zip(params, row, strict=True):
            param.grad = gradient.clone()
        trainer.step(1)
    return trainer


SHAPES = [(3, 5), (), (70,), (0, 2)]


def test_a_rule_and_a_class_train_on_every_engine(engine, device):
    register(MyLion)
    params = [Parameter(_random(shape, device=device)) for shape in SHAPES]
    gradients = [[torch.randn_like(param) for param in params] for _ in range(6)]
    before = _values(*params)
    made = create("mylion", learning_rate=0.01, wd=0.1, beta1=0.8, clip_gradient=0.7)
    trainer = _train(params, made, gradients, engine)
    for i, start in enumerate(before):
        rows = [_values(row[i])[0] for row in gradients]
        weight, mean = _lion_in_numpy(start, rows, 0.01, 0.1, 0.8, 0.99, clip=0.7)
        np.testing.assert_allclose(_values(params[i])[0], weight, **CLOSE)
        np.testing.assert_allclose(_values(trainer.state_dict()["state"][str(i)]["mean"])[0], mean, **CLOSE)


@pytest.mark.parametrize("dtype", LOW_PRECISION, ids=str)
def test_a_rule_of_ones_own_with_master_copies(engine, device, dtype):
    params = [Parameter(_random(shape, dtype, device)) for shape in SHAPES]
    gradients = [[torch.randn_like(param) for param in params] for _ in range(6)]
    before = _values(*params)
    trainer = _train(params, MyLion(learning_rate=1e-3, multi_precision=True), gradients, engine)
    for i, start in enumerate(before):
        weight, mean = _lion_in_numpy(start, [_values(row[i])[0] for row in gradients], 1e-3, 0.0, 0.9, 0.99)
        slots = trainer.state_dict()["state"][str(i)]
        np.testing.assert_allclose(_values(slots["master copy"])[0], weight, **CLOSE)
        np.testing.assert_allclose(_values(slots["mean"])[0], mean, **CLOSE)
        assert torch.equal(params[i], slots["master copy"].to(dtype))


@rule
def pull_back(w, g, state, hyper):
    """w <- w - lr (g + strength (w - first)), where `first` is the weight from before training."""
    (first,) = state
    lr, strength = hyper
    return w - lr * (g + strength * (w - first)), (first,)


class PullBack(RuleOptimizer):
    rule = pull_back

    def init_state(self, weight, state):
        state[0].copy_(weight)

    def hyper(self, t, lr, wd):
        return {"strength": 1.0 / t}


def test_a_rule_may_start_from_another_state_and_use_the_number_of_the_update(engine, device):
    weight = Parameter(_random((4, 3), device=device))
    gradients = [[torch.randn_like(weight)] for _ in range(5)]
    (first,) = _values(weight)
    w = first
    for t, (g,) in enumerate(gradients, start=1):
        w = w - 0.1 * (_values(g)[0] + 1 / t * (w - first))
    _train([weight], PullBack(learning_rate=0.1), gradients, engine)
    np.testing.assert_allclose(_values(weight)[0], w, **CLOSE)


def test_a_missing_hyper_parameter_is_named_and_nothing_is_changed():
    class Forgetful(RuleOptimizer):
        rule = lion

    weight = Parameter(torch.ones(3))
    trainer = Trainer([weight], Forgetful())
    weight.grad = torch.ones(3)
    with pytest.raises(TypeError, match=r"rule 'lion' needs 'beta1', which Forgetful lacks: set self.beta1"):
        trainer.step(1)
    assert weight.tolist() == [1.0] * 3
    assert trainer.optimizer.num_update == 0
    assert trainer.state_dict()["state"] == {}


def test_a_rules_optimizer_can_be_driven_one_tensor_at_a_time():
    """MXNet's create_state and update, which users of optimizers without a trainer call."""
    one, other = (torch.linspace(-1, 1, 12).reshape(3, 4) for _ in range(2))
    by_hand, by_updater = Adam(wd=0.1), Adam(wd=0.1)
    state, updater = by_hand.create_state(0, one), get_updater(by_updater)
    for _ in range(3):
        gradient = torch.randn(3, 4)
        by_hand.update(0, one, gradient, state)
        updater(0, gradient, other)
    assert torch.equal(one, other)
    assert by_hand.counts == by_updater.counts == {0: 3}


# ---- user-defined optimizers: MXNet's form -------------------------------------------------------------------------


class PlainAdam(Optimizer):
    """Kingma and Ba's algorithm as its page has it, in MXNet's form."""

    def __init__(self, beta1=0.9, beta2=0.999, epsilon=1e-8, **kwargs):
        super().__init__(**kwargs)
        self.beta1, self.beta2, self.epsilon = beta1, beta2, epsilon

    def create_state(self, index, weight):
        assert not torch.is_grad_enabled()
        return torch.zeros_like(weight), torch.zeros_like(weight)

    def update(self, index, weight, grad, state):
        assert not torch.is_grad_enabled()
        self._update_count(index)
        t = self.counts[index]
        mean, var = state
        grad = grad * self.rescale_grad
        if self.clip_gradient is not None:
            grad = grad.clamp(-self.clip_gradient, self.clip_gradient)
        grad = grad + self._get_wd(index) * weight
        mean.mul_(self.beta1).add_(grad, alpha=1 - self.beta1)
        var.mul_(self.beta2).addcmul_(grad, grad, value=1 - self.beta2)
        root = (var / (1 - self.beta2**t)).sqrt() + self.epsilon
        weight.sub_(self._get_lr(index) * mean / (1 - self.beta1**t) / root)


def _torch_adam(starts, rows, multipliers=None, **kwargs):
    """Weights after training with torch.optim.Adam in float64."""
    params = [Parameter(torch.tensor(start)) for start in starts]
    multipliers = multipliers or [1.0] * len(params)
    groups = [{"params": [p], "lr": kwargs["lr"] * m} for p, m in zip(params, multipliers, strict=True)]
    reference = torch.optim.Adam(groups, **kwargs)
    for row in rows:
        for param, gradient in zip(params, row, strict=True):
            param.grad = torch.tensor(_values(gradient)[0])
        reference.step()
    return _values(*params)


def test_mxnets_form_trains_like_torch_optim(engine, device):
    params = [Parameter(_random(shape, device=device)) for shape in SHAPES]
    params[2].lr_mult = 0.5
    gradients = [[torch.randn_like(param) for param in params] for _ in range(8)]
    wanted = _torch_adam(_values(*params), gradients, [1, 1, 0.5, 1], lr=0.01, weight_decay=0.1)
    trainer = _train(params, PlainAdam(learning_rate=0.01, wd=0.1), gradients, engine)
    for param, weight in zip(params, wanted, strict=True):
        np.testing.assert_allclose(_values(param)[0], weight, **CLOSE)
    assert trainer.optimizer.num_update == 8
    assert all(param.grad_fn is None and param.is_leaf for param in params)


@pytest.mark.parametrize("dtype", LOW_PRECISION, ids=str)
def test_mxnets_form_with_master_copies(engine, device, dtype):
    params = [Parameter(_random(shape, dtype, device)) for shape in SHAPES]
    gradients = [[torch.randn_like(param) for param in params] for _ in range(8)]
    wanted = _torch_adam(_values(*params), gradients, lr=1e-3)
    trainer = _train(params, PlainAdam(learning_rate=1e-3, multi_precision=True), gradients, engine)
    for i, weight in enumerate(wanted):
        master, (mean, var) = trainer._updater.states[i]
        assert {master.dtype, mean.dtype, var.dtype} == {torch.float32}
        np.testing.assert_allclose(_values(master)[0], weight, **CLOSE)
        assert torch.equal(params[i], master.to(dtype))


def test_master_copies_of_mxnets_form_come_and_go_with_the_type(device):
    layer = torch.nn.Linear(3, 1).to(device)
    trainer = Trainer(layer, PlainAdam(learning_rate=0.1, multi_precision=True))
    starts, rows = _values(*layer.parameters()), []
    for dtype in (torch.float32, torch.float16, torch.float16, torch.float32):
        layer.to(dtype)
        rows.append([torch.ones_like(param) for param in layer.parameters()])
        for param in layer.parameters():
            param.grad = torch.ones_like(param)
        trainer.step(1)
        assert {len(state) for state in trainer._updater.states.values()} == {2}  # master and state, or mean and var
        assert {state[0].shape for state in trainer._updater.states.values()} == {(1, 3), (1,)}
    for param, weight in zip(layer.parameters(), _torch_adam(starts, rows, lr=0.1), strict=True):
        np.testing.assert_allclose(_values(param)[0], weight, atol=2e-3)  # float16 in between


def test_optimizers_may_keep_master_copies_in_a_form_of_their_own(device):
    """As SGD of MXNet does, which has the state first."""

    class Reversed(PlainAdam):
        def create_state_multi_precision(self, index, weight):
            master = weight.float()
            return [self.create_state(index, master), master]

        def update_multi_precision(self, index, weight, grad, state):
            self.update(index, state[1], grad.float(), state[0])
            weight.copy_(state[1])

    weight = Parameter(_random((5,), torch.float16, device))
    gradients = [[torch.randn_like(weight)] for _ in range(4)]
    wanted = _torch_adam(_values(weight), gradients, lr=0.01)
    trainer = _train([weight], Reversed(learning_rate=0.01, multi_precision=True), gradients)
    np.testing.assert_allclose(_values(trainer._updater.states[0][1])[0], wanted[0], **CLOSE)


def test_mxnets_form_without_master_copies_gets_the_weight_itself(device):
    weight = Parameter(_random((3,), torch.float16, device))
    trainer = _train([weight], PlainAdam(learning_rate=1e-3), [[torch.ones_like(weight)]])
    assert {state.dtype for state in trainer._updater.states[0]} == {torch.float16}


def test_mxnets_form_is_rescaled_by_the_trainer_and_skips_stale_gradients():
    params = [Parameter(torch.randn(4)) for _ in range(2)]
    before = _values(*params)
    trainer = Trainer(params, PlainAdam(learning_rate=0.01, clip_gradient=0.3))
    params[0].grad = torch.tensor([8.0, -4.0, 1.0, -0.4])
    trainer.step(4, ignore_stale_grad=True)
    assert trainer.optimizer.counts == {0: 1, 1: 0}
    assert params[1].tolist() == before[1].astype(np.float32).tolist()
    (wanted,) = _torch_adam(before[:1], [[torch.tensor([0.3, -0.3, 0.25, -0.1])]], lr=0.01)
    np.testing.assert_allclose(_values(params[0])[0], wanted, **CLOSE)


def test_a_state_may_be_a_copy_of_the_weight():
    class Memory(Optimizer):
        def create_state(self, index, weight):
            return weight.clone()

        def update(self, index, weight, grad, state):
            self._update_count(index)
            before = weight.clone()
            weight.sub_(self._get_lr(index) * (grad + (weight - state)))
            state.copy_(before)

    weight = Parameter(torch.tensor([1.0, 2.0]))
    trainer = _train([weight], Memory(learning_rate=0.5), [[torch.ones(2)]] * 2)
    # w1 = w0 - 0.5;  w2 = w1 - 0.5 (1 + (w1 - w0)) = w1 - 0.25
    assert weight.tolist() == [0.25, 1.25]
    state = trainer._updater.states[0]
    assert state.tolist() == [0.5, 1.5]
    assert not state.requires_grad


# ---- counts and rates ------------------------------------------------------------------------------------------------


def test_counts_are_kept_per_index():
    made = SGD()
    updater = get_updater(made)
    weights = {index: torch.zeros(2) for index in (0, 3, "head")}
    for index in (0, 3, 3, "head", 3):
        updater(index, torch.ones(2), weights[index])
    assert made.counts == {0: 1, 3: 3, "head": 1}
    assert made.num_update == 3
    made._update_count([0, "head"])
    made._update_count("new")
    assert made.counts == {0: 2, 3: 3, "head": 2, "new": 1}
    assert made.num_update == 3


def test_begin_num_update_moves_the_schedule_and_the_bias_correction(engine, device):
    asked = []

    def schedule(num_update):
        asked.append(num_update)
        return 0.1 / num_update

    weight = Parameter(torch.full((3,), 2.0, device=device))
    made = Adam(lr_scheduler=schedule, begin_num_update=10, epsilon=1e-3)
    assert made.num_update == 10
    assert made.learning_rate == pytest.approx(0.01)
    asked.clear()
    _train([weight], made, [[torch.ones_like(weight)]] * 2, engine)
    assert asked == [11, 12]
    assert made.counts == {0: 12}
    w, mean, var = 2.0, 0.0, 0.0
    for t in (11, 12):
        mean, var = 0.9 * mean + 0.1, 0.999 * var + 0.001
        w -= 0.1 / t * math.sqrt(1 - 0.999**t) / (1 - 0.9**t) * mean / (math.sqrt(var) + 1e-3)
    np.testing.assert_allclose(_values(weight)[0], w, rtol=1e-6)


def test_the_default_rate_is_the_classes_own_and_no_scheduler_is_overruled():
    rates = {
        0.001: ("adam", "adamw", "adabelief", "nadam", "rmsprop", "lamb", "lans"),
        0.002: ("adamax",),
        0.01: ("sgd", "ccsgd", "nag", "sgld", "signum", "dcasgd", "adagrad", "groupadagrad", "ftml", "lars", "lbsgd"),
        0.1: ("ftrl",),
    }
    for rate, names in rates.items():
        assert {create(name).lr for name in names} == {rate}
    for name in registered():
        assert create(name, lr_scheduler=lr_scheduler.FactorScheduler(10, base_lr=0.7)).learning_rate == 0.7


def test_a_given_rate_becomes_the_schedulers_base_lr_with_a_warning():
    schedule = lr_scheduler.PolyScheduler(100, base_lr=0.4, pwr=1)
    with pytest.warns(
        UserWarning, match=r"learning_rate=0.2 replaces base_lr=0.4 of PolyScheduler\(max_update=100"
    ) as caught:
        made = SGD(learning_rate=0.2, lr_scheduler=schedule)
    assert caught[0].filename == __file__
    assert (schedule.base_lr, made.learning_rate) == (0.2, 0.2)
    assert schedule(50) == pytest.approx(0.1)
    SGD(learning_rate=0.2, lr_scheduler=schedule)  # the same rate: no warning


def test_a_scheduler_of_another_kind_gets_its_base_lr_too():
    """MXNet takes any callable with base_lr."""

    class Schedule:
        base_lr = 0.4

        def __call__(self, num_update):
            return self.base_lr

    with pytest.warns(UserWarning, match=r"learning_rate=0.2 replaces base_lr=0.4"):
        made = SGD(learning_rate=0.2, lr_scheduler=Schedule())
    assert made.learning_rate == 0.2
    with pytest.warns(UserWarning, match=r"learning_rate=0.2 has no effect: .*<lambda>.* decides the rate"):
        made = SGD(learning_rate=0.2, lr_scheduler=lambda num_update: 0.4)
    assert made.learning_rate == 0.4


def test_lbsgd_asks_a_schedule_before_it_counts():
    """As MXNet does, however it is driven."""
    asked = []

    def schedule(num_update):
        asked.append(num_update)
        return 1.0

    updater = get_updater(LBSGD(lr_scheduler=schedule, begin_num_update=5))
    for _ in range(3):
        updater([0, 1], [torch.ones(2)] * 2, [torch.ones(2)] * 2)
    assert asked == [5, 6, 7]
    made, weight = updater.optimizer, torch.ones(2)
    made.update(0, weight, torch.ones(2), made.create_state(0, weight))
    assert asked[3:] == [8]


@pytest.mark.parametrize(("size", "factor"), [(1e-4, 0.01), (0.3, 0.3), (1e4, 100.0)])
def test_lbsgds_factor_by_layer_has_mxnets_limits(size, factor, engine, device):
    """sqrt(sum w^2 / (sum g^2 + wd sum w^2 + 1e-18)), between 0.01 and 100 (MXNet 1.9.1, `LBSGD._get_lars`)."""
    weight = torch.nn.Parameter(torch.full((6,), size, device=device))
    trainer = Trainer([weight], "lbsgd", {"learning_rate": 0.5, "warmup_strategy": "lars"}, engine=engine)
    weight.grad = torch.ones(6, device=device)
    trainer.step(1)
    np.testing.assert_allclose(weight.detach().cpu(), size - 0.5 * factor, rtol=1e-5)


def test_reading_the_rate_changes_nothing():
    """MXNet's FactorScheduler drops for good when it is asked for a late update."""
    made = SGD(lr_scheduler=lr_scheduler.FactorScheduler(1, factor=0.5, base_lr=1.0))
    made.num_update = 5
    assert made.learning_rate == 0.0625
    made.num_update = 0
    assert made.learning_rate == 1.0


@pytest.mark.parametrize("given", [-0.5, math.nan, math.inf, "fast", None, True, torch.ones(1)], ids=repr)
def test_a_schedule_must_give_a_rate(given, everything):
    """Else the step changes nothing, in both forms of optimizers; nor does reading the rate."""
    for made in (SGD(momentum=0.5), PlainAdam(), Nadam(), LBSGD()):
        params = [Parameter(torch.ones(3)) for _ in range(2)]
        trainer = _train(params, made, [[torch.ones(3)] * 2])
        made.lr_scheduler = lambda num_update: given if num_update >= 1 else 1.0
        for param in params:
            param.grad = torch.ones(3)
        before = everything(trainer, params)
        asked = 1 if isinstance(made, LBSGD) else 2
        with pytest.raises((ValueError, TypeError)) as caught:
            trainer.step(1)
        assert str(caught.value).startswith(f"lr_scheduler({asked})={given!r}: must be ")
        assert everything(trainer, params) == before
        with pytest.raises(caught.type, match=r"lr_scheduler\(1\)=.*: must be"):
            trainer.learning_rate  # noqa: B018
        made.lr_scheduler = lambda num_update: np.float32(0.5)
        trainer.step(1)
        assert made.num_update == 2


def test_an_index_twice_in_a_list_is_counted_twice():
    """As MXNet's `_update_count`, which takes the indices one after the other."""
    made = optimizers.create("sgd", begin_num_update=3)
    made._update_count([0, 1, 0])
    assert made.counts == {0: 5, 1: 4}
    assert made.num_update == 5


def test_a_copy_of_an_optimizer_counts_by_itself():
    made = optimizers.create("sgd")
    made._update_count(0)
    other = copy.copy(made)
    other._update_count([0, 1])
    assert (made.counts, made.num_update) == ({0: 1}, 1)
    assert (other.counts, other.num_update) == ({0: 2, 1: 1}, 2)


# ---- what is carried from step to step besides states ----------------------------------------------------------------


def test_nadams_schedule_follows_all_parameters():
    """M is multiplied by mu_t once for each parameter, so that later ones see another M. Dozat (2016), as in MXNet."""
    starts, gradients = np.linspace(-1, 1, 12).reshape(3, 4), np.cos(np.arange(36.0)).reshape(3, 3, 4)
    params = [Parameter(torch.tensor(start, dtype=torch.float32)) for start in starts]
    rows = [[torch.tensor(g, dtype=torch.float32) for g in row] for row in gradients]
    trainer = _train(params, Nadam(learning_rate=0.1, epsilon=1e-3), rows)
    w, m, v, product = starts.copy(), np.zeros((3, 4)), np.zeros((3, 4)), 1.0
    for t in (1, 2, 3):
        now, following = (0.9 * (1 - 0.5 * 0.96 ** (n * 0.004)) for n in (t, t + 1))
        for i in range(3):
            product *= now
            g = gradients[t - 1, i]
            m[i], v[i] = 0.9 * m[i] + 0.1 * g, 0.999 * v[i] + 0.001 * g * g
            mean = (1 - now) * g / (1 - product) + following * m[i] / (1 - product * following)
            w[i] -= 0.1 * mean / (np.sqrt(v[i] / (1 - 0.999**t)) + 1e-3)
    for param, weight in zip(params, w, strict=True):
        np.testing.assert_allclose(_values(param)[0], weight, rtol=1e-5, atol=1e-6)
    assert trainer.optimizer.m_schedule == pytest.approx(product, rel=1e-12)


@pytest.mark.parametrize("where", ["multiplier", "schedule", "hyper-parameter", "launch"])
@pytest.mark.parametrize("make", [lambda: Nadam(), lambda: LARS(momentum=0.9)], ids=["Nadam", "LARS"])
def test_a_step_that_fails_carries_nothing_on(make, where, everything, monkeypatch):
    params = [Parameter(torch.linspace(1, 2, 4)) for _ in range(3)]
    made = make()
    made.lr_scheduler = lambda num_update: 0.1 / num_update
    trainer = _train(params, made, [[torch.ones(4)] * 3] * 2)
    for param in params:
        param.grad = torch.full((4,), 0.5)
    before, carried = everything(trainer, params), made.host_state()
    assert carried == ((made.m_schedule,) if isinstance(made, Nadam) else (0.05, 0.5))

    def fail(*_, **__):
        raise RuntimeError("not today")

    with monkeypatch.context() as patch:
        if where == "multiplier":
            patch.setattr(params[2], "lr_mult", math.nan, raising=False)
        elif where == "schedule":
            patch.setattr(made, "lr_scheduler", fail)
        elif where == "launch":
            patch.setattr(type(trainer.replicas[0].plan.update), "__call__", fail)
        else:
            good = made.hyper_of
            patch.setattr(made, "hyper_of", lambda index, *others: fail() if index == 2 else good(index, *others))
        for _ in range(2):
            with pytest.raises((RuntimeError, ValueError), match="not today|lr_mult of parameter '2'=nan"):
                trainer.step(1)
            assert made.host_state() == carried
    assert everything(trainer, params) == before
    trainer.step(1)
    assert made.host_state() != carried


def test_what_is_driven_by_hand_and_fails_carries_nothing_on(monkeypatch):
    made, weight = Nadam(), torch.ones(3)
    state = made.create_state(0, weight)
    made.update(0, weight, torch.ones(3), state)
    carried = made.host_state()
    with monkeypatch.context() as patch:
        patch.setattr(made, "beta2", "high")
        with pytest.raises(TypeError):
            made.update(0, weight, torch.ones(3), state)
    assert made.host_state() == carried
    assert made.counts == {0: 1}
    assert made.num_update == 1


@pytest.mark.sample(1)
@pytest.mark.golden("sgld")
@pytest.mark.golden("sgld", version=2)
def test_the_noise_of_sgld_has_mxnets_moments(golden, engine, device, monkeypatch):
    monkeypatch.setenv("TRISTEP_ENGINE", engine)
    config = golden.config
    n = config["draws"]
    weight = torch.full((n,), config["weight"], device=device)
    get_updater(SGLD(**config["kwargs"]))(0, torch.full((n,), config["gradient"], device=device), weight)
    (moved,) = _values(weight)
    moved -= config["weight"]
    error = config["standard_error_of_mean"]
    assert abs(moved.mean() - config["displacement_mean"]) < 5 * math.sqrt(2) * error  # both are estimates
    assert moved.std() == pytest.approx(config["displacement_std"], rel=5 * math.sqrt(1 / n))
    z = (moved - moved.mean()) / moved.std()
    assert abs((z**3).mean()) < 5 * math.sqrt(6 / n)
    assert abs((z**4).mean() - 3) < 5 * math.sqrt(24 / n)
    assert len(np.unique(moved)) > 0.9 * n
    assert abs((z[1:] * z[:-1]).mean()) < 5 / math.sqrt(n)  # neighbours know nothing of each other


def test_layerwise_rates_and_names():
    """LARS scales neither gamma, beta nor bias, and by its rule only weights decay."""
    names = {0: "a_weight", 1: "a_bias", 2: "a_gamma"}
    made = LARS(learning_rate=0.5, eta=0.1, wd=0.2, param_idx2name=names)
    weights = [torch.full((4,), 2.0) for _ in range(3)]
    get_updater(made)([0, 1, 2], [torch.ones(4)] * 3, weights)
    scaled = 2 - 0.5 * 0.1 * 4 / (2 + 0.2 * 4) * (1 + 0.2 * 2)
    assert [weight.tolist() for weight in weights] == [[pytest.approx(x)] * 4 for x in (scaled, 1.5, 1.5)]


def test_lans_is_always_corrected():
    with pytest.raises(TypeError, match=r"LANS has no argument 'bias_correction' \(=False\)"):
        LANS(bias_correction=False)


def test_groupadagrad_keeps_one_number_for_each_row(engine, device, monkeypatch):
    monkeypatch.setenv("TRISTEP_ENGINE", engine)
    weight, updater = torch.zeros(3, 2, device=device), get_updater(GroupAdaGrad(learning_rate=1.0, eps=0.0))
    updater(0, torch.tensor([[1.0, 1.0], [3.0, 1.0], [0.5, 0.5]], device=device), weight)
    (history,) = updater.states[0]
    assert history.tolist() == [[1.0], [5.0], [0.25]]
    root = 5**0.5
    torch.testing.assert_close(weight.cpu(), torch.tensor([[-1.0, -1.0], [-3 / root, -1 / root], [-1.0, -1.0]]))


def test_groupadagrad_names_the_parameter_that_is_no_matrix():
    trainer = Trainer(torch.nn.Linear(2, 3), GroupAdaGrad())
    for param in trainer._params:
        param.grad = torch.ones_like(param)
    with pytest.raises(ValueError, match=r"'bias': GroupAdaGrad updates matrices, got a parameter of shape \(3,\)"):
        trainer.step(1)
    assert trainer.state_dict()["state"] == {}
    assert trainer.optimizer.num_update == 0


def test_states_keep_their_place_when_a_plan_is_made_anew():
    """One at a time, as a store drives them."""
    updater = get_updater(GroupAdaGrad())
    weights = [torch.ones(3, 2) for _ in range(2)]
    for i in (0, 1):
        updater(i, torch.ones(3, 2), weights[i])
    places = [updater.states[i][0].data_ptr() for i in (0, 1)]
    for i in (0, 1):
        updater(i, torch.ones(3, 2), weights[i])
    assert [updater.states[i][0].data_ptr() for i in (0, 1)] == places


def test_ftml_by_its_paper(engine, device):
    """Zheng & Kwok (2017), algorithm 1, in float64."""
    weight = Parameter(_random((5,), device=device))
    gradients = [[torch.randn_like(weight)] for _ in range(6)]
    (w,) = _values(weight)
    _train([weight], FTML(learning_rate=0.1, epsilon=1e-3), gradients, engine)
    d, v, z = 0.0, 0.0, 0.0
    for t, (gradient,) in enumerate(gradients, start=1):
        (g,) = _values(gradient)
        v = 0.999 * v + 0.001 * g * g
        new = (1 - 0.6**t) / 0.1 * (np.sqrt(v / (1 - 0.999**t)) + 1e-3)
        sigma = new - 0.6 * d
        z = 0.6 * z + 0.4 * g - sigma * w
        d, w = new, -z / new
    np.testing.assert_allclose(_values(weight)[0], w, rtol=1e-4, atol=1e-5)


# ---- multipliers -----------------------------------------------------------------------------------------------------


def test_multipliers_come_from_the_parameter_then_the_index_then_the_name():
    weight = Parameter(torch.zeros(1))
    made = SGD(param_idx2name={0: "a_weight", 1: "b_weight"}, param_dict={0: weight})
    assert made.multipliers(0) == made.multipliers(1) == made.multipliers(2) == (1.0, 1.0)
    made.set_lr_mult({"a_weight": 2.0, "b_weight": 3.0})
    made.set_wd_mult({"a_weight": 0.2, "b_weight": 0.3})
    assert (made.multipliers(0), made.multipliers(1)) == ((2.0, 0.2), (3.0, 0.3))
    made.set_lr_mult({0: 4.0, "a_weight": 2.0})
    made.set_wd_mult({0: 0.4, "a_weight": 0.2})
    assert (made.multipliers(0), made.multipliers(1)) == ((4.0, 0.4), (1.0, 1.0))
    weight.lr_mult, weight.wd_mult = 5.0, 0.0
    assert made.multipliers(0) == (5.0, 0.0)


def test_multipliers_reach_the_update(engine, device, monkeypatch):
    monkeypatch.setenv("TRISTEP_ENGINE", engine)
    made = SGD(learning_rate=0.5, wd=0.25, param_idx2name={0: "a_weight", 1: "a_bias", 2: "b_weight"})
    made.set_lr_mult({"b_weight": 0.5, 3: 2.0})
    made.set_wd_mult({"b_weight": 2.0})
    weights = [torch.ones(3, device=device) for _ in range(4)]
    get_updater(made)(list(range(4)), [torch.ones(3, device=device) for _ in range(4)], weights)
    # 1 - lr lr_mult (1 + wd wd_mult); the bias does not decay, by its name
    assert [weight.tolist() for weight in weights] == [[x] * 3 for x in (0.375, 0.5, 0.625, -0.25)]


@pytest.mark.parametrize("which", ["lr_mult", "wd_mult"])
@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({0: -1.0}, ValueError, r"{}\[0\]=-1.0: must be finite and 0 or more"),
        ({"a": math.nan}, ValueError, r"{}\['a'\]=nan: must be finite and 0 or more"),
        ({0: "1"}, TypeError, r"{}\[0\]='1': must be a number, not str"),
        ([1.0], TypeError, "{} must map parameter indices or names to numbers, got list"),
    ],
)
def test_bad_multipliers_are_refused_and_the_old_ones_stay(which, given, error, message):
    made = SGD()
    setter = getattr(made, f"set_{which}")
    setter({0: 0.5})
    with pytest.raises(error, match=message.format(which)):
        setter(given)
    assert getattr(made, which) == {0: 0.5}


@pytest.mark.parametrize("which", ["lr_mult", "wd_mult"])
def test_a_bad_multiplier_of_a_parameter_is_named_and_nothing_is_changed(which, everything):
    params = [Parameter(torch.ones(3)) for _ in range(2)]
    trainer = _train(params, SGD(momentum=0.5, wd=0.1), [[torch.ones(3)] * 2])
    setattr(params[1], which, -1.0)
    for param in params:
        param.grad = torch.ones(3)
    before = everything(trainer, params)
    with pytest.raises(ValueError, match=f"{which} of parameter '1'=-1.0: must be finite and 0 or more"):
        trainer.step(1)
    assert everything(trainer, params) == before


# ---- rescaling, clipping, decay: in which order ----------------------------------------------------------------------

W, G = np.linspace(-2, 2, 9), np.array([5.0, -3.0, 0.4, -0.2, 0.0, 1.5, -0.6, 4.0, -8.0])
R, LR, WD = 0.25, 0.5, 0.3


def _clip(x, bound):
    return np.clip(x, -bound, bound)


def _rms(*x):
    return np.sqrt(np.mean(np.square(x)))


def _first_adam(w, g, decay):
    return w - 0.5 * math.sqrt(0.001) / 0.1 * (0.1 * g / (np.sqrt(0.001 * g**2) + 0.1) + decay)


def _first_ftrl(g):
    z = g - np.abs(g) * W / LR
    return np.where(np.abs(z) > 0.1, (np.sign(z) * 0.1 - z) / ((1 + np.abs(g)) / LR + WD), 0.0)


# The first step of each, as the equations of MXNet 1.9.1 (AdamW: 2.0) have it. The epsilons are large so that the size of
# the gradient matters.
FIRST_STEPS = {
    "sgd": (SGD, {}, lambda c: W - LR * (_clip(R * G, c) + WD * W)),
    "momentum": (SGD, {"momentum": 0.9}, lambda c: W - LR * (_clip(R * G, c) + WD * W)),
    "nag": (NAG, {"momentum": 0.9}, lambda c: W - 1.9 * LR * (_clip(R * G, c) + WD * W)),
    "signum": (Signum, {"wd_lh": 0.1}, lambda c: (1 - LR * 0.1) * W - LR * np.sign(_clip(R * G, c) + WD * W)),
    "signum without momentum": (Signum, {"momentum": 0.0}, lambda c: (1 - LR * WD) * W - LR * np.sign(G)),
    "adam": (Adam, {"epsilon": 0.1}, lambda c: _first_adam(W, _clip(R * G + WD * W, c), 0.0)),
    "adamw": (AdamW, {"epsilon": 0.1}, lambda c: _first_adam(W, _clip(R * G, c), WD * W)),
    "adagrad": (
        AdaGrad,
        {"eps": 0.1},
        lambda c: W - LR * (_clip(R * G, c) / np.sqrt(_clip(R * G, c) ** 2 + 0.1) + WD * W),
    ),
    "rmsprop": (
        RMSProp,
        {"epsilon": 0.1},
        lambda c: W - LR * _clip(R * G + WD * W, c) / np.sqrt(0.1 * _clip(R * G + WD * W, c) ** 2 + 0.1),
    ),
    "rmsprop centered": (
        RMSProp,
        {"epsilon": 0.1, "centered": True},
        lambda c: W - LR * _clip(R * G + WD * W, c) / np.sqrt((0.1 - 0.01) * _clip(R * G + WD * W, c) ** 2 + 0.1),
    ),
    "dcasgd": (DCASGD, {"lamda": 0.5}, lambda c: W - LR * (_clip(R * G, c) + WD * W)),
    "adadelta": (
        AdaDelta,
        {"epsilon": 0.1},
        lambda c: W - (np.sqrt(0.1 / (0.1 * _clip(R * G, c) ** 2 + 0.1)) * _clip(R * G, c) + WD * W),
    ),
    "adamax": (
        Adamax,
        {},
        lambda c: W - LR * np.sign(_clip(R * G + WD * W, c)),
    ),
    "adabelief": (
        AdaBelief,
        {"epsilon": 0.1},
        lambda c: (
            W
            - 0.5
            * math.sqrt(0.001)
            / 0.1
            * (0.1 * _clip(R * G + WD * W, c) / (np.sqrt(0.001 * (0.9 * _clip(R * G + WD * W, c)) ** 2 + 0.1) + 0.1))
        ),
    ),
    "ftrl": (Ftrl, {"lamda1": 0.1}, lambda c: _first_ftrl(_clip(R * G, c))),
    "lars": (
        LARS,
        {"eta": 0.5},
        lambda c: W - LR * 0.5 * _rms(W) / (R * _rms(G) + WD * _rms(W)) * (_clip(R * G, c) + WD * W),
    ),
    "clipped weights": (
        RMSProp,
        {"epsilon": 0.1, "clip_weights": 1.25},
        lambda c: _clip(W - LR * _clip(R * G + WD * W, c) / np.sqrt(0.1 * _clip(R * G + WD * W, c) ** 2 + 0.1), 1.25),
    ),
}


@pytest.mark.parametrize("clip", [0.3, None, 0.0, -0.3])
@pytest.mark.parametrize("name", FIRST_STEPS)
def test_the_order_of_rescaling_clipping_and_decay(name, clip, engine, device, monkeypatch):
    """A clip_gradient of 0 or less is none, as in MXNet's kernels."""
    monkeypatch.setenv("TRISTEP_ENGINE", engine)
    make, kwargs, first_step = FIRST_STEPS[name]
    updater = get_updater(make(learning_rate=LR, wd=WD, rescale_grad=R, clip_gradient=clip, **kwargs))
    weight, gradient = (torch.tensor(x, dtype=torch.float32, device=device) for x in (W, G))
    updater(0, gradient, weight)
    np.testing.assert_allclose(_values(weight)[0], first_step(clip if clip and clip > 0 else math.inf), rtol=1e-5, atol=1e-6)
    assert gradient.tolist() == torch.tensor(G, dtype=torch.float32).tolist()


# ---- the updater -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["sgd", "adam", "rmsprop"])
def test_a_list_is_updated_like_its_members_one_by_one(name, engine, device, monkeypatch):
    monkeypatch.setenv("TRISTEP_ENGINE", engine)
    starts = [_random(shape, device=device) for shape in SHAPES]
    one, other = ([start.clone() for start in starts] for _ in range(2))
    together, apart = (get_updater(create(name, learning_rate=0.1, wd=0.1)) for _ in range(2))
    for _ in range(3):
        gradients = [torch.randn_like(start) for start in starts]
        together(list(range(4)), gradients, one)
        for i in range(4):
            apart(i, gradients[i], other[i])
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert not torch.equal(one[0], starts[0])
    assert together.optimizer.counts == apart.optimizer.counts


def test_states_belong_to_the_index_not_to_the_tensor():
    updater = get_updater(SGD(learning_rate=1.0, momentum=0.5))
    first, second = torch.zeros(2), torch.zeros(2)
    updater(0, torch.ones(2), first)
    updater(0, torch.ones(2), second)
    updater(1, torch.ones(2), first)
    assert second.tolist() == [-1.5] * 2  # momentum from before
    assert first.tolist() == [-2.0] * 2  # none for a new index
    assert set(updater.states) == {0, 1}


def test_the_updater_refuses_what_does_not_fit():
    with pytest.raises(TypeError, match=r"optimizer must be an Optimizer, got str; see optimizer.create\(name\)"):
        get_updater("sgd")
    updater = get_updater(SGD())
    weights = [torch.ones(2), torch.ones(2)]
    with pytest.raises(ValueError, match="2 indices came with 1 gradients and 2 weights"):
        updater([0, 1], [torch.ones(2)], weights)
    with pytest.raises(ValueError, match=r"gradient of '1' is \(3,\) on cpu: its weight is \(2,\) on cpu"):
        updater([0, 1], [torch.ones(2), torch.ones(3)], weights)
    assert [weight.tolist() for weight in weights] == [[1.0, 1.0]] * 2
    assert updater.optimizer.num_update == 0


def test_public_names_of_optimizers():
    of_1_9_1 = "AdaDelta AdaGrad Adam Adamax DCASGD FTML Ftrl GroupAdaGrad LAMB LARS LBSGD NAG Nadam RMSProp SGD SGLD Signum"
    assert {*of_1_9_1.split(), "ccSGD", "Test", "AdamW", "AdaBelief", "LANS"} <= set(optimizers.__all__)
    assert {name.lower() for name in optimizers.__all__} >= set(registered())
