"""Options of rules of whole tensors; the judges are torch's clipping and averages, plain steps, and float32 masters."""

import pytest
import torch

from tristep import Trainer

NAMES = ("muon", "normuon", "soap", "came")
SHAPES = ((6, 5), (5,), (3, 4, 5), (6, 5), (8, 3), ())  # two of one shape, which are computed as a stack
STEPS = 4
CLOSE = {"rtol": 2e-5, "atol": 1e-6}


def parameters(dtype=torch.float32):
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape).to(dtype)) for shape in SHAPES]


def by_trainer(params, name, arguments):
    trainer = Trainer(params, name, {"learning_rate": 0.05, **arguments}, engine="eager")
    return trainer, lambda: trainer.step(1)


def train(params, name, before=None, steps=STEPS, **arguments):
    trainer, step = by_trainer(params, name, arguments)
    torch.manual_seed(1)
    for _ in range(steps):
        for param in params:
            param.grad = torch.randn(param.shape).to(param)
        if before is not None:
            before()
        step()
    return params, trainer


@pytest.mark.parametrize("name", NAMES)
def test_clip_norm_is_torchs(name):
    ours, theirs = parameters(), parameters()
    train(ours, name, clip_norm=0.3)
    train(theirs, name, before=lambda: torch.nn.utils.clip_grad_norm_(theirs, 0.3))
    torch.testing.assert_close(ours, theirs, **CLOSE)


def test_soap_that_is_skipped_at_first_finds_its_way():
    params = parameters()
    _, step = by_trainer(params, "soap", {"skip_nonfinite": True})
    for k in range(3):
        for param in params:
            param.grad = torch.full(param.shape, float("inf")) if k == 0 else torch.randn(param.shape)
        before = [param.detach().clone() for param in params]
        step()
        moved = [not torch.equal(*pair) for pair in zip(params, before, strict=True)]
        assert moved == [k > 0] * len(params)
    assert all(param.isfinite().all() for param in params)


@pytest.mark.parametrize("name", NAMES)
def test_cautious_wd_is_alg_1(name):
    """x <- x - lr u - lr wd x where u x >= 0, of u as steps without decay give it."""
    params, others = parameters(), parameters()
    _, step = by_trainer(params, name, {"cautious_wd": True, "wd": 0.5})
    _, plain = by_trainer(others, name, {})
    halves = []
    for k in range(STEPS):
        torch.manual_seed(k)
        for param, other in zip(params, others, strict=True):
            other.data.copy_(param.data)
            param.grad = torch.randn(param.shape)
            other.grad = param.grad.clone()
        before = [param.detach().clone() for param in params]
        step()
        plain()
        for param, other, x in zip(params, others, before, strict=True):
            u = (x - other).detach()
            right = torch.where(u * x >= 0, other - 0.05 * 0.5 * x, other).detach()
            torch.testing.assert_close(param.detach(), right, **CLOSE)
            halves.append((u * x >= 0).float().mean())
    assert 0.2 < torch.stack(halves).mean() < 0.95


@pytest.mark.parametrize("kind", ["remainder", "split8"])
@pytest.mark.parametrize("name", NAMES)
def test_masters_follow_those_in_float32(name, kind):
    ours, trainer = train(parameters(torch.bfloat16), name, steps=6, multi_precision=kind)
    theirs, full = train(parameters(torch.bfloat16), name, steps=6, multi_precision=True)
    rtol = {"remainder": 0.0, "split8": 2**-13}[kind]
    for key, value in trainer.float32_weights().items():
        torch.testing.assert_close(value, full.float32_weights()[key], rtol=rtol, atol=rtol)
    if kind == "remainder":
        near = [(a.float() - b.float()).abs() <= b.float().abs() * 2**-7 for a, b in zip(ours, theirs, strict=True)]
        assert all(each.all() for each in near)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["muon", "soap"])
def test_stochastic_rounding_is_unbiased_and_repeats(name):
    options = {"stochastic_rounding": True, "state_dtype": "bfloat16"}
    first, again, other = (
        train(parameters(torch.bfloat16), name, steps=3, rounding_seed=seed, **options)[0] for seed in (3, 3, 4)
    )
    assert all(map(torch.equal, first, again))
    assert not all(map(torch.equal, first, other))
    # Many copies of one matrix, each with random numbers of its own.
    many, one = ([torch.nn.Parameter(parameters(torch.bfloat16)[4].detach()) for _ in range(n)] for n in (200, 1))
    _, step = by_trainer(many, name, {"stochastic_rounding": True})
    full, step_full = by_trainer(one, name, {"multi_precision": True})
    for k in range(2):  # SOAP's first update is none
        gradient = torch.randn(8, 3, generator=torch.Generator().manual_seed(k)).bfloat16()
        for param in (*many, *one):
            param.grad = gradient.clone()
        if k == 0 and name != "soap":
            continue
        step()
        step_full()
    (wide,) = full.float32_weights().values()
    means = torch.stack([param.detach().float() for param in many]).mean(0)
    spacing = 2.0 ** (torch.floor(torch.log2(wide.abs())) - 7)
    errors = (means - wide) / spacing
    assert errors.abs().mean() < 0.05, "of rounding to the nearest it is 1/4"
    assert errors.mean().abs() < 0.02
