"""The how-tos of CONTRIBUTING.md run, and do what they say."""

import importlib.util
import linecache
import math
import re
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import Linear, Parameter

import tristep
from tristep.kernels import rules

TEXT = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text(encoding="utf-8")


def _example(heading):
    """What the Python blocks under this heading define, run as a notebook does."""
    section = re.search(rf"^### {heading}$(.*?)(?=^##|\Z)", TEXT, re.DOTALL | re.MULTILINE)[1]
    blocks = re.findall(r"^( *)```python\n(.*?)^ *```$", section, re.DOTALL | re.MULTILINE)
    text = "\n\n".join(textwrap.dedent(block) for _, block in blocks if not block.lstrip().startswith("@row"))
    filename = f"<CONTRIBUTING, {heading}>"
    linecache.cache[filename] = len(text), None, text.splitlines(keepends=True), filename
    names = {"__name__": "__main__"}
    exec(compile(text, filename, "exec"), names)
    return names


def test_the_optimizer_takes_the_papers_steps_and_checks_its_argument():
    klass = _example("Add an optimizer")["Tiger"]
    weight = Parameter(torch.randn(40, dtype=torch.float64))
    trainer = tristep.Trainer([weight], klass(beta=0.8, wd=0.1, clip_gradient=1.5))
    w, mean = weight.detach().numpy().copy(), np.zeros(40)
    for _ in range(6):
        weight.grad = torch.randn(40, dtype=torch.float64)
        trainer.step(1)
        mean = 0.8 * mean + 0.2 * np.clip(weight.grad.numpy(), -1.5, 1.5)
        w = w - 0.001 * (np.sign(mean) + 0.1 * w)
        np.testing.assert_allclose(weight.detach().numpy(), w, rtol=1e-12)
    for wrong in (1.0, -0.1):
        with pytest.raises(ValueError, match=f"beta={wrong}: must be finite and 0 or more and less than 1"):
            trainer.optimizer.beta = wrong
    with pytest.raises(TypeError, match="beta='a': must be a number, not str"):
        klass(beta="a")


@pytest.mark.parametrize("engine", ["cpu", "eager", "triton"])
def test_the_transform_is_a_projected_step(engine):
    if engine == "cpu":
        pytest.importorskip("numba")
    device = "cuda" if engine == "triton" and torch.cuda.is_available() else "cpu"
    keep_params_nonnegative = _example("Add a transform")["keep_params_nonnegative"]

    class NonnegativeSGD(tristep.optimizer.SGD):
        rule = keep_params_nonnegative(rules.sgd_momentum)

    weight = Parameter(torch.rand(40, device=device))
    like = Parameter(weight.detach().clone())
    trainer = tristep.Trainer([weight], NonnegativeSGD(learning_rate=0.1, momentum=0.9), engine=engine)
    oracle = torch.optim.SGD([like], lr=0.1, momentum=0.9)
    for _ in range(6):
        weight.grad = torch.randn(40, device=device)
        like.grad = weight.grad.clone()
        trainer.step(1)
        oracle.step()
        with torch.no_grad():
            like.clamp_(min=0)
        torch.testing.assert_close(weight, like, rtol=1e-5, atol=1e-6)
    assert (weight == 0).any()
    assert (weight > 0).any()


def test_the_store_averages_the_gradients_of_replicas(clean_stores):
    _example("Add a store")
    net = Linear(3, 2)
    like = Linear(3, 2)
    like.load_state_dict(net.state_dict())
    nets = tristep.replicate(net, ["cpu", "cpu"])
    trainer = tristep.Trainer(nets, "sgd", {"learning_rate": 0.1}, kvstore="meanstore")
    oracle = torch.optim.SGD(like.parameters(), lr=0.1)
    for _ in range(3):
        x = torch.randn(8, 3)
        trainer.zero_grad()
        oracle.zero_grad()
        for each, part in zip(nets, x.chunk(2), strict=True):
            each(part).square().mean().backward()
        like(x).square().mean().backward()  # of parts of equal size the mean of means is the mean
        trainer.step(1)
        oracle.step()
        for each in nets:
            for param, expected in zip(each.parameters(), like.parameters(), strict=True):
                torch.testing.assert_close(param, expected)


@pytest.fixture
def clean_stores():
    registries = (
        tristep.kvstore.KVStore.kv_registry,
        tristep.kvstore.Compressor.registry,
        tristep.initializer.Initializer.registry,
    )
    before = [dict(registry) for registry in registries]
    yield
    for registry, entries in zip(registries, before, strict=True):
        registry.clear()
        registry.update(entries)


def test_the_codec_rounds_to_small_floats(clean_stores):
    _example("Add a codec")
    codec = tristep.kvstore.create_compressor({"type": "e5m2"})
    values = torch.tensor([1.0, 1.3, -3.0, 2.0**-17, math.inf, -math.inf, math.nan])
    message = codec.encode(values)
    assert message.nbytes == len(values)
    rounded = [1.0, 1.25, -3.0, 0.0, math.inf, -math.inf, math.nan]  # two bits after the point; halves go to the even one
    torch.testing.assert_close(codec.decode(message, len(values)), torch.tensor(rounded), rtol=0, atol=0, equal_nan=True)
    residual, total, steps = torch.zeros(1), 0.0, 64
    for _ in range(steps):
        total += codec.decode(codec.encode_with_feedback(torch.tensor([1.3]), residual), 1).item()
    assert total == pytest.approx(1.3 * steps, abs=0.25)  # nothing is lost but the last residual


def test_the_initializer_has_the_papers_variance(clean_stores):
    _example("Add an initializer")
    net = Linear(400, 300)
    tristep.initializer.initialize(net, tristep.initializer.create("lecunnormal", scale=2.0))
    assert net.weight.var().item() == pytest.approx(2.0 / 400, rel=0.03)  # 120,000 numbers: 3 % are 7 standard errors
    assert net.weight.mean().abs().item() < 0.001
    assert not net.bias.any()
    assert tristep.initializer.create(tristep.initializer.create("lecunnormal", scale=2.0).dumps()).scale == 2.0


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="needs matplotlib")
def test_the_view_draws_the_recorded_norms():
    from tristep.viz import Run

    view = _example("Add a view")["GradientNormView"]
    run = Run("adam", ["weight", "bias"])
    run.add_tensors([1, 2], {"gradient_norm": np.array([[3.0, 4.0], [6.0, 8.0]])})
    (line,) = view(run).scene().panels[0].layers
    assert (line.x.tolist(), line.y.tolist()) == ([1, 2], [5, 10])
    (axes,) = view(run).figure().axes
    assert any(each.get_ydata().tolist() == [5, 10] for each in axes.lines)
    assert "adam" in view(run).describe()
    assert view(Run("adam", ["weight"])).figure() is not None  # nothing recorded yet
