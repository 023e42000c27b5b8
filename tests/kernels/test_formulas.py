"""The formulas of the documentation site, which are made of the rules' source."""

import ast
import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch
from parity_steps import Step

from tristep.kernels import TensorRule, rules
from tristep.kernels.language.shaped_rule import ShapedRule

pytest.importorskip("latex2mathml")
SPEC = importlib.util.spec_from_file_location("formulas", Path(__file__).parents[2] / "docs" / "site" / "formulas.py")
formulas = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(formulas)

RULES = [getattr(rules, name) for name in rules.__all__]
ELEMENTWISE = [rule for rule in RULES if not isinstance(rule, TensorRule)]
PARTS = [part for rule in RULES if isinstance(rule, ShapedRule) for part in rule.rules]
AXES = {"row": -1, "column": -2, "matrix": (-2, -1), "slice": 1}  # of matrices; None for the whole tensor


class Numpy:
    """`tl` on arrays."""

    where, sqrt, abs, maximum, minimum = np.where, np.sqrt, np.abs, np.maximum, np.minimum


def followed(rule, values):
    """The values after the steps of the formula."""
    known = {"tl": Numpy, "sign": np.sign, "clipped": lambda x, limit: np.clip(x, -limit, limit), **values}
    for step in formulas.steps(rule):
        value = np.asarray(eval(ast.unparse(step.value).replace("'", "_new"), dict(known)))
        if step.over is not None:
            op, scope = step.over
            axes = (
                None if scope in ("tensor", "global") else tuple(range(1, value.ndim)) if scope == "slice" else AXES[scope]
            )
            value = np.broadcast_to(value, values["g"].shape) if axes is None else value
            value = getattr(np, op)(value, axis=axes, keepdims=axes is not None)
        known[step.target.replace("'", "_new")] = value
    return known


@pytest.mark.parametrize("case", [0, 1])
@pytest.mark.parametrize("rule", [rule for rule in ELEMENTWISE if rule is not rules.sgld], ids=lambda rule: rule.name)
def test_the_formula_does_what_the_papers_say(rule, case, eager_place):
    """In float64, next to the oracles of `tests/oracles`; SGLD's noise is another one in each step."""
    shared = any(stage.scope == "global" for stage in rule.reductions)  # a formula is of one tensor
    step = Step(eager_place, rule, [(7, 5)] if shared else [(7, 5)] * 2, torch.float64, torch.float64)
    case = 0 if shared else case
    weights, gradients = ([tensor.numpy().copy() for tensor in part] for part in (step.weights, step.gradients))
    expected, states = step.expected(case)
    hyper = step.hyper[case]
    hyper |= {name.removeprefix("one_minus_"): 1.0 - hyper[name] for name in hyper if name.startswith("one_minus_")}
    given = {"w": weights[case], "g": hyper["rescale_grad"] * gradients[case], **hyper}
    got = followed(rule, given | dict(zip(rule.slots, (state.numpy() for state in step.states[case]), strict=True)))
    np.testing.assert_allclose(got["w"], np.asarray(expected.value, np.float64), rtol=1e-9, atol=1e-12)
    for name, state in zip(rule.slots, states, strict=True):
        np.testing.assert_allclose(got[name], np.asarray(state.value, np.float64), rtol=1e-9, atol=1e-12, err_msg=name)


@pytest.mark.parametrize("rule", [*ELEMENTWISE, *PARTS], ids=lambda rule: rule.name)
def test_each_formula_can_be_shown(rule):
    from latex2mathml.converter import convert

    steps = formulas.steps(rule)
    assert all(convert(formulas.latex(step)).startswith("<math") for step in steps)
    names = {name for step in steps for name in (step.target, *formulas.names(step.value))}
    assert len({formulas.symbol(name) for name in names}) == len(names)  # nor do two names look alike


def test_adamw_reads_as_in_its_paper():
    assert [formulas.latex(step) for step in formulas.steps(rules.adamw)] == [
        r"g \leftarrow \operatorname{clip}_{\tau}(g)",
        r"m \leftarrow \beta_{1} \, m + (1 - \beta_{1}) \, g",
        r"v \leftarrow \beta_{2} \, v + (1 - \beta_{2}) \, g^2",
        r"w \leftarrow w - \left( \frac{\eta \, m}{\sqrt{v} + \epsilon} + \delta \, w \right)",
    ]
