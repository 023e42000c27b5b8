"""Functions of two variables: the literature's minima, torch's gradients, and a grammar that lets nothing else in."""

import math

import numpy as np
import pytest
import torch

from tristep.viz import FUNCTIONS, Function, Minimum, function, ill_conditioned_bowl, noisy_ravine

# f(x, y) as textbooks have them, in NumPy.
TEXTBOOK = {
    "rosenbrock": lambda x, y: (1 - x) ** 2 + 100 * (y - x**2) ** 2,
    "beale": lambda x, y: (1.5 - x + x * y) ** 2 + (2.25 - x + x * y**2) ** 2 + (2.625 - x + x * y**3) ** 2,
    "himmelblau": lambda x, y: (x**2 + y - 11) ** 2 + (x + y**2 - 7) ** 2,
    "saddle": lambda x, y: x**2 - y**2 + y**4 / 4,
    "rastrigin": lambda x, y: 20 + sum(z**2 - 10 * np.cos(2 * np.pi * z) for z in (x, y)),
    "ill_conditioned_bowl": lambda x, y: 0.5 * (x**2 + 100 * y**2),
    "noisy_ravine": lambda x, y: (x**2 + 50 * y**2) / 20,
    "six_hump_camel": lambda x, y: (4 - 2.1 * x**2 + x**4 / 3) * x**2 + x * y + (4 * y**2 - 4) * y**2,
    "ackley": lambda x, y: (
        -20 * np.exp(-0.2 * np.sqrt(0.5 * (x**2 + y**2)))
        - np.exp(0.5 * (np.cos(2 * np.pi * x) + np.cos(2 * np.pi * y)))
        + np.e
        + 20
    ),
    "styblinski_tang": lambda x, y: sum(z**4 - 16 * z**2 + 5 * z for z in (x, y)) / 2,
}
# The global minima as the literature gives them: where, and the value.
LITERATURE = {
    "rosenbrock": [(1, 1, 0)],
    "beale": [(3, 0.5, 0)],
    "himmelblau": [(3, 2, 0), (-2.805118, 3.131312, 0), (-3.779310, -3.283186, 0), (3.584428, -1.848126, 0)],
    "rastrigin": [(0, 0, 0)],
    "six_hump_camel": [(0.0898, -0.7126, -1.0316), (-0.0898, 0.7126, -1.0316)],
    "ackley": [(0, 0, 0)],
    "styblinski_tang": [(-2.903534, -2.903534, -39.16617 * 2)],
}


def points(n=200, scale=4.0):
    return (torch.rand(n, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) - 0.5) * scale


def _checked(given, where, expected, rtol):
    """Check values against `expected` and gradients against torch's, and return the gradients."""
    value, gradient = given.value_and_gradient(where)
    np.testing.assert_allclose(value, expected, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(given(where), expected, rtol=1e-12, atol=1e-12)
    leaf = where.clone().requires_grad_()
    (by_torch,) = torch.autograd.grad(given(leaf).sum() + 0 * leaf.sum(), leaf)
    torch.testing.assert_close(gradient, by_torch, rtol=rtol, atol=rtol)
    return gradient


@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_and_gradients(name):
    """Values are the textbook's; gradients those of torch, and of finite differences of the textbook's."""
    where, book, h = points(), TEXTBOOK[name], 1e-5
    x, y = where.numpy().T
    gradient = _checked(FUNCTIONS[name], where, book(x, y), 1e-12)
    differences = [(book(x + h, y) - book(x - h, y)) / (2 * h), (book(x, y + h) - book(x, y - h)) / (2 * h)]
    np.testing.assert_allclose(gradient.T, differences, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_minima(name):
    """At each the value is as said and less than all around; those of the literature are among them, and none is lower."""
    given = FUNCTIONS[name]
    assert given.xlim[0] < given.start[0] < given.xlim[1]
    assert given.ylim[0] < given.start[1] < given.ylim[1]
    ring = torch.arange(16, dtype=torch.float64) * (math.pi / 8)
    for minimum in given.minima:
        at = torch.tensor([minimum.x, minimum.y], dtype=torch.float64)
        assert given(at).item() == pytest.approx(minimum.value, abs=1e-6)
        around = given(at + 0.02 * torch.stack([ring.cos(), ring.sin()], dim=-1))
        assert (around > given(at)).all()
        assert given.xlim[0] <= minimum.x <= given.xlim[1]
        assert given.ylim[0] <= minimum.y <= given.ylim[1]
        if name != "ackley":  # whose minimum is a tip
            assert given.value_and_gradient(at)[1].abs().max() < 1e-4
    for x, y, value in LITERATURE.get(name, []):
        assert any(abs(m.x - x) < 1e-4 and abs(m.y - y) < 1e-4 and abs(m.value - value) < 1e-4 for m in given.minima)
    lowest = min(minimum.value for minimum in given.minima)
    assert given(points(20_000, 10.0)).min().item() >= lowest


def test_at_the_tip_of_a_root():
    """The slope there is none; it must not become NaN."""
    _, gradient = function("ackley").value_and_gradient(torch.zeros(2))
    assert gradient.tolist() == [0.0, 0.0]
    assert function("sqrt(x)").value_and_gradient(torch.tensor([4.0, 0.0]))[1].tolist() == [0.25, 0.0]


EXPRESSIONS = {
    "1": lambda x, y: 0 * x + 1,
    "y": lambda x, y: y,
    "-x + +y": lambda x, y: -x + y,
    "x - y - 1": lambda x, y: x - y - 1,
    "x / (y + 9) / 2": lambda x, y: x / (y + 9) / 2,
    "2 / (x**2 + 1)": lambda x, y: 2 / (x**2 + 1),
    "-x**2": lambda x, y: -(x**2),
    "x**3 * y**-2": lambda x, y: x**3 / y**2,
    "(x*x + 2)**1.5 + (y + 9)**0.5": lambda x, y: (x * x + 2) ** 1.5 + (y + 9) ** 0.5,
    "x**0 + x**1 + x**7 + x**20": lambda x, y: 1 + x + x**7 + x**20,
    "sin(x) * cos(y) + tan(x / 9)": lambda x, y: np.sin(x) * np.cos(y) + np.tan(x / 9),
    "exp(-x**2) + log(y + 9) + tanh(x * y)": lambda x, y: np.exp(-(x**2)) + np.log(y + 9) + np.tanh(x * y),
    "sqrt(x**2 + 1) + abs(y)": lambda x, y: np.sqrt(x**2 + 1) + np.abs(y),
    "min(x, y**2) + max(2 * x, 0.5)": lambda x, y: np.minimum(x, y**2) + np.maximum(2 * x, 0.5),
    "pi * x + e**2 * y + 1e-3": lambda x, y: np.pi * x + np.e**2 * y + 1e-3,
    "(x + y) * (x + y) * (x - y)": lambda x, y: (x + y) ** 2 * (x - y),
    "0 * x + y * 1 + 0": lambda x, y: y,
}


@pytest.mark.parametrize("text", EXPRESSIONS)
def test_expressions(text):
    where = points()
    x, y = where.numpy().T
    _checked(function(text), where, EXPRESSIONS[text](x, y) * np.ones_like(x), 1e-10)


def test_room_is_used_again_without_harm():
    given = function("beale")
    evaluate = given.evaluator((50,), np.float64)
    for seed in range(3):
        x, y = np.random.default_rng(seed).normal(size=(2, 50))
        value, dx, dy = evaluate(x, y)
        expected, gradient = given.value_and_gradient(torch.from_numpy(np.stack([x, y], axis=-1)))
        np.testing.assert_array_equal(value, expected)
        np.testing.assert_array_equal(np.stack([dx, dy], axis=-1), gradient)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("__import__('os')", "no function '__import__'"),
        ("x.real", "not allowed"),
        ("x + z", r"no 'z'; there are x, y, pi and e\n  x \+ z\n      \^"),
        ("[x for x in y]", "not allowed"),
        ("x**y", "an exponent must be a number"),
        ("x" + " + x" * 400, "at most 1000"),
        ("-" * 60 + "x", "more than 50 deep"),
    ],
)
def test_what_is_not_allowed(text, message):
    with pytest.raises(ValueError, match=message):
        function(text)


def test_callables_names_and_arguments():
    def ring(points):
        return (points.square().sum(dim=-1) - 1).square()

    given = function(ring)
    assert given.name == "ring"
    value, gradient = given.value_and_gradient(torch.tensor([[2.0, 0.0], [0.0, 1.0]]))
    assert value.tolist() == [9.0, 0.0]
    assert gradient.tolist() == [[24.0, 0.0], [0.0, 0.0]]
    assert function("Six-hump camel") is FUNCTIONS["six_hump_camel"]
    assert function(FUNCTIONS["beale"]) is FUNCTIONS["beale"]
    assert ill_conditioned_bowl(7)(torch.tensor([2.0, 2.0])).item() == 16.0
    assert (noisy_ravine(0.25, 3).noise, noisy_ravine(0.25, 3).seed) == (0.25, 3)
    assert Function("f", "x", minima=[(0, 0, 1)]).minima == (Minimum(0, 0, 1),)
