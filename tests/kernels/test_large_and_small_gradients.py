"""Steps with gradients from denormal numbers to the largest of float32 are those of the oracles, in more digits.

Left out are gradients from which a state follows that float32 cannot hold, such as AdaGrad's sum of squares from 1.8e19 on:
`test_optim_large_gradients.py` compares those with torch, which has the same states.
"""

import math

import numpy as np
import pytest
import torch
from parity_steps import Step
from rule_cases import COMPILED_RULES, RULES

from tristep.kernels import TensorRule, rules

F32 = torch.float32
pytestmark = pytest.mark.usefixtures("small_tiles")
LARGE = (1e15, 1e18, 1e19, 2e19, 4e19, 1e20, 5e20, 1e22, 1e30, 1e36, 6e37)
SMALL = (1e-15, 1e-30, 1e-38, 1e-42)
LARGEST = {  # that the states of a rule can hold; of others the largest is that of `LARGE`
    **dict.fromkeys(("adagrad", "group_adagrad", "ftrl", "novograd"), 1e18),  # these sum up squares without a factor
    **dict.fromkeys(("rmsprop", "rmsprop_momentum", "rmsprop_variance", "rmsprop_centered", "adadelta"), 4e19),
    **dict.fromkeys(("adafactor", "adopt", "dcasgd", "dcasgd_momentum"), 1e19),
    **dict.fromkeys(("came", "adan"), 4e19),
    **dict.fromkeys(("adam", "adamw", "amsgrad", "nadam", "adabelief", "ademamix", "grams", "ftml", "lamb"), 1e20),
    **dict.fromkeys(("schedule_free_adamw", "stable_adamw", "radam"), 1e20),
}
NORMS = ("lars", "lars_momentum", "lans", "ascent")  # of gradients, of float32 squares: below 1e-22 such a norm counts as 0
FOUND_NAN = ("adafactor", "came", "ftml", "ftrl")  # the quotient of two states that have overflowed


def _step(place, rule, *sizes):
    """A step with gradients of these sizes, which are not clipped, and with the bias correction of a first step.

    Sizes are those of rows of two tensors or, if anything is summed up, of tensors: one with each row of hyper-parameters,
    or one with either in turn where kernels are interpreted.
    """
    apart = isinstance(rule, TensorRule) or rule.reductions
    if apart and (len(sizes) == 1 or (place.engine, place.device) != ("triton", "cpu")):
        sizes = [size for size in sizes for _ in range(2)]
    shape = (3, 4) if isinstance(rule, TensorRule) else (12,) if apart else (len(sizes), 12)
    step = Step(place, rule, [shape] * (len(sizes) if apart else 2), F32, F32)
    rng = np.random.default_rng(3)
    for i, gradient in enumerate(step.gradients):
        values = rng.uniform(0.5, 1.0, shape) * rng.choice([-1, 1], shape)
        gradient[...] = place.tensor(values * (sizes[i] if apart else np.array(sizes)[:, None]), F32)
    for i, row in enumerate(step.hyper):
        beta1, beta2 = ((0.9, 0.999), (0.8, 0.99))[i % 2]
        replaced = {"clip": math.inf, "correction1": 1 / (1 - beta1), "correction2": 1 / (1 - beta2), "seen": 1.0}
        row.update({name: float(np.float32(value)) for name, value in replaced.items() if name in row})
    return step


@pytest.mark.sample(12)
@pytest.mark.parametrize("rule", RULES)
def test_an_eager_step_with_large_or_small_gradients_is_the_oracles(eager_place, rule):
    _check_sizes(eager_place, rule)


@pytest.mark.sample(4, "cpu", "triton")
@pytest.mark.parametrize("rule", COMPILED_RULES)
def test_a_compiled_step_with_large_or_small_gradients_is_the_oracles(compiled_place, rule):
    _check_sizes(compiled_place, rule)


def _check_sizes(place, rule):
    largest = LARGEST.get(rule.name, LARGE[-1])
    sizes = [*(size for size in LARGE if size <= largest), *(() if rule.name in NORMS else SMALL)]
    for each in [[size] for size in sizes] if rule is rules.ascent else [sizes]:  # its norm is over all tensors
        step = _step(place, rule, *each)
        step.ulps += 2  # one term is all of a sum here, and that is several products
        step.check(place)
        for tensor in (*step.weights, *(state for row in step.states for state in row)):
            assert bool(tensor.isfinite().all())


@pytest.mark.parametrize("name", ["lars", "lars_momentum", "lans"])
def test_a_norm_below_1e22_counts_as_zero(place, name):
    rule, new = getattr(rules, name), []
    for size in (0.0, 1e-30):
        step = _step(place, rule, size)
        place.run(rule, step.weights, step.gradients, step.states, [[*row.values()] for row in step.hyper])
        new.append(step.weights)
    for zero, small in zip(*new, strict=True):
        assert torch.equal(zero, small)


@pytest.mark.sample(16)
@pytest.mark.sample(3, "cpu", "triton")
@pytest.mark.parametrize("rule", RULES)
def test_where_a_state_overflows_the_weight_is_nan_in_four_rules_only(place, rule):
    """Elsewhere it takes no step, or one of another size."""
    step = _step(place, rule, 1e30)
    place.run(rule, step.weights, step.gradients, step.states, [[*row.values()] for row in step.hyper])
    found_nan = any(bool(weight.isnan().any()) for weight in step.weights)
    assert found_nan == (rule.name in FOUND_NAN)
