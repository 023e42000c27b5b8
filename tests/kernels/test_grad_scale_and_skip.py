"""What only the device knows about a step: a factor for gradients, and whether to leave it out; and gradients made zero."""

import types

import numpy as np
import pytest
import torch

from tristep.kernels import Rule, TensorRule, Update, rules, transforms

F32, F64, F16, BF16 = torch.float32, torch.float64, torch.float16, torch.bfloat16
SHAPES = [(700,), (5, 3), (1500,), (0,), ()]
EAGER = types.SimpleNamespace(engine="eager", device="cuda" if torch.cuda.is_available() else "cpu")
EVERY = [name for name in rules.__all__ if isinstance(getattr(rules, name), Rule | TensorRule)]
SOME = ["adamw", "lamb", "novograd", "group_adagrad"]  # with states, with norms, with per-tensor state, with means


def case(place, rule, factor=1.0, dtype=F32, gradient_dtype=None, masters=None):
    """Weights, states, gradients and masters, always the same but for the factor in the gradients."""
    torch.manual_seed(0)
    shapes = (
        SHAPES if isinstance(rule, Rule) else [(4, 3), (4, 3), (6,)] if rule.name.startswith("ada") else [(4, 3), (4, 3)]
    )
    weights = [torch.randn(shape).to(dtype).to(place.device) for shape in shapes]
    states = [tuple(torch.rand(shape, dtype=F64) + 0.5 for shape in rule.shapes(weight.shape)) for weight in weights]
    kind = F64 if dtype == F64 else F32
    states = [tuple(state.to(kind).to(place.device) for state in row) for row in states]
    gradients = [(torch.randn(shape) * factor).to(gradient_dtype or dtype).to(place.device) for shape in shapes]
    stored = None if masters is None else [torch.zeros_like(weight, dtype=masters) for weight in weights]
    if masters == F32:
        stored = [weight.float() for weight in weights]
    return weights, states, gradients, stored


def run(place, rule, factor=1.0, control=None, zero_grads=False, **kinds):
    """All tensors after a step."""
    weights, states, gradients, masters = case(place, rule, factor, **kinds)
    given = None if control is None else torch.tensor(control, device=place.device)
    update = Update(rule, weights, states, masters, place.engine, grad_scale_and_skip=given, zero_grads=zero_grads)
    update.hyper[:] = [0.5, *(0.001 if "eps" in name else 0.05 for name in rule.hyper)]
    update.bind(gradients)
    update()
    return everything(weights, states, masters), gradients


def everything(weights, states, masters):
    return [*weights, *(state for row in states for state in row), *(masters or [])]


def same(found, expected):
    return all(torch.equal(a.nan_to_num(nan=77.0), b.nan_to_num(nan=77.0)) for a, b in zip(found, expected, strict=True))


def check(place, rule):
    """Factors to the bit, as they are powers of two; a skipped step; and zeros."""
    plain, _ = run(place, rule)
    scaled, gradients = run(place, rule, 1024.0, (1 / 1024, 0.0))
    assert same(scaled, plain)
    assert same(gradients, case(place, rule, 1024.0)[2])

    weights, states, _, _ = case(place, rule)
    before = everything(weights, states, None)
    found, gradients = run(place, rule, float("nan"), (1.0, 1.0))
    assert same(found, before)
    assert all(gradient.isnan().all() for gradient in gradients)
    assert not same(plain, before)

    found, gradients = run(place, rule, zero_grads=True)
    # numba may contract other products where it stores one array more
    torch.testing.assert_close(found, plain, rtol=1e-6, atol=1e-7, equal_nan=True)
    assert not any(gradient.any() for gradient in gradients)
    found, gradients = run(place, rule, float("inf"), (1.0, 1.0), zero_grads=True)
    assert same(found, before)
    assert not any(gradient.any() for gradient in gradients)


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", SOME)
def test_a_factor_a_step_left_out_and_zeros(name, compiled_place):
    check(compiled_place, getattr(rules, name))


@pytest.mark.sample(12)
@pytest.mark.parametrize("name", EVERY)
def test_every_rule_as_torch_operations(name):
    check(EAGER, getattr(rules, name))


def test_the_factor_in_numpy(place):
    rule = rules.sgd_momentum
    weight, momentum = torch.linspace(-1, 1, 5).to(place.device), torch.zeros(5, device=place.device)
    control = torch.zeros(2, device=place.device)
    update = Update(rule, [weight], [(momentum,)], engine=place.engine, grad_scale_and_skip=control)
    update.hyper[0] = [0.5, *({"lr": 0.1, "momentum": 0.9, "clip": np.inf}.get(name, 0.0) for name in rule.hyper)]
    w, m = np.linspace(-1, 1, 5), np.zeros(5)
    for t in range(5):
        gradient = torch.full((5,), 1.0 + t, device=place.device)
        control[:] = torch.tensor([0.1 * t, float(t == 2)])
        update.bind([gradient])
        update()
        if t != 2:
            m = 0.9 * m - 0.1 * (0.5 * 0.1 * t * (1.0 + t))
            w = w + m
    torch.testing.assert_close(weight.cpu().double(), torch.from_numpy(w), rtol=1e-5, atol=1e-6)


KINDS = [
    {"dtype": F16, "masters": F32},
    {"dtype": BF16, "masters": torch.int16},
    {"dtype": F32, "gradient_dtype": BF16},
]


@pytest.mark.parametrize("kinds", KINDS, ids=str)
def test_every_kind_of_storage(kinds, place):
    rule = rules.sgd_momentum
    assert same(run(place, rule, 64.0, (1 / 64, 0.0), **kinds)[0], run(place, rule, **kinds)[0])
    weights, states, _, masters = case(place, rule, **kinds)
    found, gradients = run(place, rule, float("nan"), (1.0, 1.0), zero_grads=True, **kinds)
    assert same(found, everything(weights, states, masters))
    assert not any(gradient.any() for gradient in gradients)
    assert not any(gradient.any() for gradient in run(place, rule, zero_grads=True, **kinds)[1])


def test_the_norm_is_that_of_the_unscaled_gradient(place):
    rule = transforms.limited(transforms.cautious(rules.novograd, ()), True)
    plain, _ = run(place, rule)
    assert same(run(place, rule, 4096.0, (1 / 4096, 0.0))[0], plain)
    weights, states, _, _ = case(place, rule)
    assert same(run(place, rule, float("inf"), (1 / 4096, 0.0))[0], everything(weights, states, None))


def test_gradients_with_gaps(place):
    weight, control = torch.ones(4, 3, device=place.device), torch.tensor([0.25, 0.0], device=place.device)
    gradient = torch.full((4, 6), 2.0, device=place.device)
    update = Update(rules.sgd, [weight], [()], engine=place.engine, grad_scale_and_skip=control, zero_grads=True)
    update.hyper[0] = [1.0, *({"lr": 0.5, "clip": np.inf}.get(name, 0.0) for name in rules.sgd.hyper)]
    for left_out in (1.0, 0.0):
        control[1] = left_out
        gradient.fill_(2.0)
        update.bind([every_other := gradient[:, ::2]])
        update()
        assert not every_other.any()
        assert (weight == (1.0 if left_out else 0.75)).all()
        assert (gradient[:, 1::2] == 2.0).all()


def test_several_types_and_missing_gradients(place):
    weights = [torch.ones(3, dtype=kind, device=place.device) for kind in (F32, F64, BF16, F32)]
    control = torch.tensor([0.5, 0.0], device=place.device)
    update = Update(rules.sgd, weights, [()] * 4, engine=place.engine, grad_scale_and_skip=control, zero_grads=True)
    update.hyper[:] = [1.0, *({"lr": 0.5, "clip": np.inf}.get(name, 0.0) for name in rules.sgd.hyper)]
    gradients = [*(torch.ones_like(weight) for weight in weights[:3]), None]
    versions = [gradient._version for gradient in gradients[:3]]
    update.bind(gradients)
    update()
    assert [weight.tolist() for weight in weights] == [[0.75] * 3] * 3 + [[1.0] * 3]
    assert all(gradient._version > version for gradient, version in zip(gradients[:3], versions, strict=True))


@pytest.mark.parametrize("control", [torch.zeros(3), torch.zeros(2, dtype=F64)])
def test_a_control_of_another_form_is_refused(control):
    with pytest.raises(ValueError, match=r"must be torch.float32 \(2,\)"):
        Update(rules.sgd, [torch.ones(1)], [()], grad_scale_and_skip=control)
