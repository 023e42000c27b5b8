"""User-defined optimizers: a rule and a class, and MXNet's form; the judges are torch.optim and NumPy in float64.

Those that the README and CONTRIBUTING.md show are in test_readme.py and test_howtos.py.
"""

import numpy as np
import pytest
import torch
from optimizer_training import SHAPES, PlainAdam, random_tensor, train_by_hand
from torch.nn import Parameter
from trainer_cases import values_of

from tristep import Trainer, rule
from tristep.kernels import reduction, rule_by_shape, tl
from tristep.trainer.optimizer import RuleOptimizer

# Some roundings of float32 apart.
CLOSE = {"rtol": 2e-6, "atol": 1e-6}

LOW_PRECISION = [torch.float16, torch.bfloat16]


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


def test_a_rule_may_start_from_another_state_and_use_the_update_count(engine, device):
    weight = Parameter(random_tensor((4, 3), device=device))
    gradients = [[torch.randn_like(weight)] for _ in range(5)]
    (first,) = values_of(weight)
    w = first
    for t, (g,) in enumerate(gradients, start=1):
        w = w - 0.1 * (values_of(g)[0] + 1 / t * (w - first))
    train_by_hand([weight], PullBack(learning_rate=0.1), gradients, engine)
    np.testing.assert_allclose(values_of(weight)[0], w, **CLOSE)


@rule
def scaled(w, g, state, hyper):
    lr, scale = hyper
    return w - lr * scale * g, state


class Scaled(RuleOptimizer):
    rule = scaled

    def __init__(self, scale=0.5, **others):
        self.scale = scale
        super().__init__(**others)


class Unfinished(RuleOptimizer):
    rule = scaled

    def __init__(self, scale=0.5):
        self.scale = scale


class ReturnsNothing(Scaled):
    def hyper(self, t, lr, wd):
        self.scale = 1 / t


@reduction(op="mean", scope="row")
def squares_of_rows(w, g, state, hyper):
    return (g * g,)


@rule(reduction=squares_of_rows)
def by_rows(w, g, state, hyper, sums):
    (mean,) = state
    (lr,) = hyper
    (square,) = sums
    mean = 0.5 * mean + g / tl.sqrt(square)
    return w - lr * mean, (mean,)


@rule
def averaged(w, g, state, hyper):
    (mean,) = state
    (lr,) = hyper
    mean = 0.5 * mean + g
    return w - lr * mean, (mean,)


@rule_by_shape(by_rows, averaged, state=("mean",))
def matrices_by_rows(shape):
    return by_rows if len(shape) > 1 else averaged


@rule_by_shape(by_rows, averaged, state=("mean",))
def wrong_for_vectors(shape):
    return by_rows if shape != (2,) else None


class ByShape(RuleOptimizer):
    def __init__(self, rule=matrices_by_rows, **others):
        self.rule = rule
        super().__init__(**others)


# By the options of an optimizer what becomes of the steps of a matrix, whose rows are scaled anyway, and of a vector.
OF_SHAPES = [
    ({}, 1.0, 1.0),
    ({"clip_norm": 1.0}, 1.0, 1 / (60**0.5 + 1e-6)),
    ({"agc": 0.5}, 1.0, 0.0005 / 12**0.5),
    ({"cautious": True}, 1.0, 1.0),
    ({"lookahead": 1, "lookahead_alpha": 0.25}, 0.25, 0.25),
    ({"skip_nonfinite": True}, 1.0, 1.0),
    ({"ema_decay": 0.5}, 1.0, 1.0),
]


@pytest.mark.sample(2)
@pytest.mark.parametrize(("options", "of_matrix", "of_vector"), OF_SHAPES, ids=str)
def test_a_rule_by_shape_takes_options(engine, device, options, of_matrix, of_vector):
    weights = [Parameter(torch.zeros(3, 4, device=device)), Parameter(torch.zeros(3, device=device))]
    trainer = Trainer(weights, ByShape(learning_rate=0.5, **options), engine=engine)
    for weight in weights:
        weight.grad = torch.full_like(weight, 2.0)
    trainer.step(1)
    np.testing.assert_allclose(values_of(weights[0])[0], np.full((3, 4), -0.5 * of_matrix), rtol=1e-6)
    np.testing.assert_allclose(values_of(weights[1])[0], np.full(3, -of_vector), rtol=1e-6)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (Unfinished, TypeError, r"Unfinished.__init__ did not call super\(\).__init__"),
        (lambda: [("*", Unfinished())], TypeError, r"Unfinished.__init__ did not call super\(\).__init__"),
        (lambda: Scaled(torch.ones(2)), TypeError, r"scale=tensor\(\[1., 1.\]\): must be a number, not Tensor"),
        (lambda: Scaled, TypeError, r"must be a name, such as 'sgd', or an Optimizer, not type; write Scaled\(...\) for"),
        (lambda: ReturnsNothing(), TypeError, r"hyper\(t, lr, wd\) returned None: it must return a dict"),
        (lambda: ByShape(wrong_for_vectors), ValueError, r"chose 'by_rows' for the shape \(3,\): it has means over rows"),
        (lambda: ByShape(wrong_for_vectors), TypeError, r"returned None for the shape \(2,\): it must return one of"),
    ],
)
def test_mistakes_of_a_class_are_named_before_anything_changes(make, error, message):
    weight = Parameter(torch.ones(2 if error is TypeError else 3))
    weight.grad = torch.ones_like(weight)
    with pytest.raises(error, match=message):
        Trainer([weight], make()).step(1)
    assert (weight == 1).all()


def test_a_rule_by_shape_names_elementwise_rules():
    with pytest.raises(ValueError, match="rule_by_shape\\(\\) got no rules"):
        rule_by_shape(state=())
    with pytest.raises(TypeError, match="each rule of @rule_by_shape must be elementwise, made with @rule, got list"):
        rule_by_shape([by_rows, averaged], state=("mean",))


@rule
def recording(w, g, state, hyper):
    seen, correction, correction2, beta3, one_minus_beta3, one_minus_beta2, decay, clip = hyper
    return w - (seen + correction + correction2 + beta3 + one_minus_beta3 + one_minus_beta2 + decay + clip), state


class Derived(RuleOptimizer):
    """Sets what others are derived from, and replaces `beta3` at each update."""

    rule = recording
    beta2 = 0.75  # of the class

    def __init__(self, **others):
        self.beta, self.beta3 = 0.9, 0.125
        super().__init__(**others)

    def hyper(self, t, lr, wd):
        return {"beta3": 0.5 / t}


@pytest.mark.parametrize("t", [8, 9, 20])
def test_hyper_parameters_are_derived_as_the_table_says(t):
    made = Derived(learning_rate=0.1, wd=0.5, begin_num_update=7, clip_gradient=2.0)
    row = dict(zip(("rescale_grad", *recording.hyper), made.row(t, 0.1, 0.5), strict=True))
    assert row["seen"] == (0.0 if t == 8 else 1.0)
    assert row["correction"] == pytest.approx(1 / -np.expm1(t * np.log(0.9)), rel=1e-14)
    assert row["correction2"] == pytest.approx(1 / -np.expm1(t * np.log(0.75)), rel=1e-14)
    assert (row["beta3"], row["one_minus_beta3"]) == (0.5 / t, 1 - 0.5 / t)
    assert row["one_minus_beta2"] == 0.25
    assert (row["decay"], row["clip"]) == (0.05, 2.0)


def test_a_given_value_replaces_a_derived_one():
    class Given(Derived):
        def hyper(self, t, lr, wd):
            return {"correction2": 3.0, "one_minus_beta3": 4.0}

    made = Given()
    made.correction = 5.0
    row = dict(zip(("rescale_grad", *recording.hyper), made.row(2, 0.1, 0.0), strict=True))
    assert (row["correction"], row["correction2"], row["one_minus_beta3"], row["beta3"]) == (5.0, 3.0, 4.0, 0.125)


def _torch_adam(starts, rows, multipliers=None, **kwargs):
    """Weights after training with torch.optim.Adam in float64."""
    params = [Parameter(torch.tensor(start)) for start in starts]
    multipliers = multipliers or [1.0] * len(params)
    groups = [{"params": [p], "lr": kwargs["lr"] * m} for p, m in zip(params, multipliers, strict=True)]
    reference = torch.optim.Adam(groups, **kwargs)
    for row in rows:
        for param, gradient in zip(params, row, strict=True):
            param.grad = torch.tensor(values_of(gradient)[0])
        reference.step()
    return values_of(*params)


def test_mxnets_form_trains_like_torch_optim(engine, device):
    params = [Parameter(random_tensor(shape, device=device)) for shape in SHAPES]
    params[2].lr_mult = 0.5
    gradients = [[torch.randn_like(param) for param in params] for _ in range(8)]
    wanted = _torch_adam(values_of(*params), gradients, [1, 1, 0.5, 1], lr=0.01, weight_decay=0.1)
    trainer = train_by_hand(params, PlainAdam(learning_rate=0.01, wd=0.1), gradients, engine)
    for param, weight in zip(params, wanted, strict=True):
        np.testing.assert_allclose(values_of(param)[0], weight, **CLOSE)
    assert trainer.optimizer.num_update == 8
    assert all(param.grad_fn is None and param.is_leaf for param in params)


@pytest.mark.parametrize("dtype", LOW_PRECISION, ids=str)
def test_mxnets_form_with_master_copies(engine, device, dtype):
    params = [Parameter(random_tensor(shape, dtype, device)) for shape in SHAPES]
    gradients = [[torch.randn_like(param) for param in params] for _ in range(8)]
    wanted = _torch_adam(values_of(*params), gradients, lr=1e-3)
    trainer = train_by_hand(params, PlainAdam(learning_rate=1e-3, multi_precision=True), gradients, engine)
    for i, weight in enumerate(wanted):
        master, (mean, var) = trainer._updater.states[i]
        assert {master.dtype, mean.dtype, var.dtype} == {torch.float32}
        np.testing.assert_allclose(values_of(master)[0], weight, **CLOSE)
        assert torch.equal(params[i], master.to(dtype))


def test_master_copies_of_mxnets_form_come_and_go_with_the_type(device):
    layer = torch.nn.Linear(3, 1).to(device)
    trainer = Trainer(layer, PlainAdam(learning_rate=0.1, multi_precision=True))
    starts, rows = values_of(*layer.parameters()), []
    for dtype in (torch.float32, torch.float16, torch.float16, torch.float32):
        layer.to(dtype)
        rows.append([torch.ones_like(param) for param in layer.parameters()])
        for param in layer.parameters():
            param.grad = torch.ones_like(param)
        trainer.step(1)
        assert {len(state) for state in trainer._updater.states.values()} == {2}  # master and state, or mean and var
        assert {state[0].shape for state in trainer._updater.states.values()} == {(1, 3), (1,)}
    for param, weight in zip(layer.parameters(), _torch_adam(starts, rows, lr=0.1), strict=True):
        np.testing.assert_allclose(values_of(param)[0], weight, atol=2e-3)  # float16 in between


def test_mxnets_form_is_rescaled_by_the_trainer_and_skips_stale_gradients():
    params = [Parameter(torch.randn(4)) for _ in range(2)]
    before = values_of(*params)
    trainer = Trainer(params, PlainAdam(learning_rate=0.01, clip_gradient=0.3))
    params[0].grad = torch.tensor([8.0, -4.0, 1.0, -0.4])
    trainer.step(4, ignore_stale_grad=True)
    assert trainer.optimizer.counts == {0: 1, 1: 0}
    assert params[1].tolist() == before[1].astype(np.float32).tolist()
    (wanted,) = _torch_adam(before[:1], [[torch.tensor([0.3, -0.3, 0.25, -0.1])]], lr=0.01)
    np.testing.assert_allclose(values_of(params[0])[0], wanted, **CLOSE)
