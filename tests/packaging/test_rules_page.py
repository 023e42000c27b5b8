"""docs/rules.md, tried: its program runs, and its rules take the steps of the papers' formulas, in NumPy."""

import re
from pathlib import Path

import pytest
from interpreters import run

pytestmark = pytest.mark.packaging

PAGE = (Path(__file__).parents[2] / "docs" / "rules.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
GIVEN = """
    import numpy as np
    import torch
    import rules_page as page
    from tristep import Trainer

    rng = np.random.default_rng(0)

    def parameter(*shape):
        return torch.nn.Parameter(torch.tensor(rng.normal(size=shape)))

    def step(trainer, weight, size=1.0):
        g = size * rng.normal(size=weight.shape)
        weight.grad = torch.tensor(g)
        trainer.step(1)
        return g

    def numbers(tensor):
        return tensor.detach().numpy().copy()
"""
FORMULAS = {
    "AdaGC": """
        weight = parameter(4, 3)
        trainer = Trainer([weight], page.AdaGC(0.1, warmup=3, wd=0.1), engine=engine)
        w, mean, var, gamma, clipped = numbers(weight), 0.0, 0.0, np.inf, 0
        for t, size in enumerate([1.0, 2.0, 0.5, 1.0, 50.0, 1.0, 0.1, 3.0], start=1):
            h = step(trainer, weight, size)
            norm = np.linalg.norm(h)
            if t <= 3:
                gamma = min(gamma, norm)
            else:
                clipped += 1.05 * gamma < norm
                h = h * min(1.05 * gamma / norm, 1)
                gamma = 0.98 * gamma + 0.02 * np.linalg.norm(h)
            mean, var = 0.9 * mean + 0.1 * h, 0.999 * var + 0.001 * h * h
            root = np.sqrt(var / (1 - 0.999**t)) + 1e-8
            w = w - 0.1 * (mean / (1 - 0.9**t) / root + 0.1 * w)
            np.testing.assert_allclose(numbers(weight), w, rtol=1e-10)
        assert 0 < clipped < 5
    """,
    "SCALE": """
        weight = parameter(4, 3)
        trainer = Trainer([weight], page.Scale(0.1, beta1=0.9, wd=0.1), engine=engine)
        w, mean = numbers(weight), 0.0
        for _ in range(4):
            mean = 0.9 * mean + 0.1 * step(trainer, weight)
            w = w - 0.1 * (mean / np.sqrt((mean**2).mean(axis=1, keepdims=True)) + 0.1 * w)
            np.testing.assert_allclose(numbers(weight), w, rtol=1e-10)
    """,
    "PolarGrad": """
        weight = parameter(5, 3)
        trainer = Trainer([weight], page.PolarGrad(wd=0.1), engine=engine)
        w, mean = numbers(weight), 0.0
        for _ in range(4):
            mean = 0.9 * mean + 0.1 * step(trainer, weight)
            squares, vectors = np.linalg.eigh(mean.T @ mean)
            orthogonal = mean @ (vectors / np.sqrt(squares)) @ vectors.T
            w = w - 0.1 * (np.sqrt(squares).sum() * orthogonal + 0.1 * w)
            np.testing.assert_allclose(numbers(weight), w, rtol=1e-8)
    """,
    "NSO": """
        weight = parameter(100, 100)
        trainer = Trainer([weight], page.NSO(0.1, deviation=0.02), engine=engine)
        w, noises = numbers(weight), [0.0]
        for k in range(3):
            np.testing.assert_allclose(numbers(weight), w + noises[-1], rtol=0, atol=1e-12)
            first = step(trainer, weight)
            np.testing.assert_allclose(numbers(weight), w - noises[-1], rtol=0, atol=1e-12)
            w = w - 0.1 * (first + step(trainer, weight)) / 2
            noises.append(numbers(weight) - w)
            assert abs(noises[-1].std() / 0.02 - 1) < 0.03
            assert abs(noises[-1].mean()) < 0.001
        assert abs(np.corrcoef(noises[1].ravel(), noises[2].ravel())[0, 1]) < 0.05
    """,
}


@pytest.mark.parametrize("engine", ["cpu", "eager"])
@pytest.mark.parametrize("name", FORMULAS)
def test_a_rule_of_the_page_takes_the_papers_steps(name, engine, tmp_path):
    if engine == "cpu":
        pytest.importorskip("numba")
    (tmp_path / "rules_page.py").write_text("\n\n".join(BLOCKS[:-1]), encoding="utf-8")
    indented = "\n".join(line.removeprefix("    ") for line in FORMULAS[name].splitlines())
    assert run(f"{GIVEN}\n    engine = {engine!r}\n{indented}", tmp_path) == []


def test_the_race_of_the_page_is_won_by_rules_of_the_page(tmp_path):
    (tmp_path / "rules_page.py").write_text("\n\n".join(BLOCKS), encoding="utf-8")
    text = "\n".join(run("import rules_page", tmp_path))
    for name in ("adamw", "adagc", "scale", "polargrad"):
        assert re.search(rf"^{name} .* 3 of 3 ", text, re.MULTILINE), text
