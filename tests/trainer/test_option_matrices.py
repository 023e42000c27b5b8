"""Options of rules of whole tensors; the judges are torch's clipping and averages, plain steps, and float32 masters."""

import copy

import pytest
import torch

import tristep
from tristep import Trainer, optimizer

NAMES = ("muon", "normuon", "soap", "came")
SHAPES = ((6, 5), (5,), (3, 4, 5), (6, 5), (8, 3), ())  # two of one shape, which are computed as a stack
STEPS = 4
CLOSE = {"rtol": 2e-5, "atol": 1e-6}


def parameters(dtype=torch.float32, shapes=SHAPES):
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes]


def by_trainer(params, name, arguments):
    trainer = Trainer(params, name, {"learning_rate": 0.05, **arguments}, engine="eager")
    return trainer, lambda: trainer.step(1)


def by_torch(params, name, arguments):
    klass = tristep.optim.as_torch(type(optimizer.create(name)))
    made = klass(params, lr=0.05, weight_decay=arguments.pop("wd", 0.0), **arguments)
    return made, made.step


def train(params, name, how=by_trainer, before=None, after=None, steps=STEPS, seed=1, **arguments):
    made, step = how(params, name, dict(arguments))
    torch.manual_seed(seed)
    for k in range(steps):
        for param in params:
            param.grad = torch.randn(param.shape).to(param)
        if before is not None:
            before(k)
        step()
        if after is not None:
            after(k)
    return params, made


def states_of(made, params):
    if isinstance(made, torch.optim.Optimizer):
        return [copy.deepcopy(made.state[param]) for param in params]
    return [row for _, row in sorted(copy.deepcopy(made.state_dict()["state"]).items(), key=lambda each: int(each[0]))]


every_way = pytest.mark.parametrize("how", [by_trainer, by_torch], ids=["Trainer", "as_torch"])


@pytest.mark.cover("name", "how")
@every_way
@pytest.mark.parametrize("name", NAMES)
def test_clip_norm_is_torchs(name, how):
    ours, theirs = parameters(), parameters()
    train(ours, name, how, clip_norm=0.3)
    train(theirs, name, how, before=lambda _: torch.nn.utils.clip_grad_norm_(theirs, 0.3))
    torch.testing.assert_close(ours, theirs, **CLOSE)


@pytest.mark.cover("name", "how")
@every_way
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("spoiled", [0, 1, 4])
def test_a_step_that_is_not_finite_changes_nothing_but_the_count(name, how, spoiled):
    """Whether a matrix spoils it or a vector, nothing of any parameter moves."""
    params, seen = parameters(), {}
    made, step = how(params, name, {"skip_nonfinite": True})
    for k, value in enumerate((1.0, float("nan"), float("-inf"), 2.0)):
        torch.manual_seed(k)
        for param in params:
            param.grad = torch.randn(param.shape)
        params[spoiled].grad.view(-1)[1] = value
        before = [param.detach().clone() for param in params], None if k == 0 else states_of(made, params)
        step()
        seen[k] = [not torch.equal(*pair) for pair in zip(params, before[0], strict=True)]
        if k in (1, 2):
            now = states_of(made, params)
            for old, new in zip(before[1], now, strict=True):
                assert all(torch.equal(old[key], new[key]) for key in old if key != "step")
                assert how is by_trainer or new["step"] == old["step"] + 1
    assert not any(seen[1] + seen[2])
    assert all(seen[3])


@pytest.mark.parametrize("name", NAMES)
def test_a_finite_training_is_as_without(name):
    ours, _ = train(parameters(), name, skip_nonfinite=True)
    theirs, _ = train(parameters(), name)
    assert all(map(torch.equal, ours, theirs))


def test_the_norm_does_not_depend_on_threads():
    @tristep.kernels.tensor_rule
    def plain(w, g, state, hyper):
        (lr,) = hyper
        return w - lr * g, state

    class Plain(optimizer.RuleOptimizer):
        rule = plain

    ends, before = [], torch.get_num_threads()
    for threads in (1, 3):
        params = parameters(shapes=[(3, 50_001)])  # torch shares each row out
        params[0].grad = params[0].detach().clone()
        torch.set_num_threads(threads)
        try:
            Trainer(params, Plain(learning_rate=1.0, clip_norm=1.0), engine="eager").step(1)
        finally:
            torch.set_num_threads(before)
        ends.append(params[0].detach())
    assert torch.equal(*ends)


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


@pytest.mark.cover("name", "how")
@every_way
@pytest.mark.parametrize("name", NAMES)
def test_ema_decay_averages_the_weights(name, how):
    params = parameters()
    averages = [param.detach().double().clone() for param in params]

    def average(_):
        for each, param in zip(averages, params, strict=True):
            each.lerp_(param.detach().double(), 0.1)

    plain, _ = train(parameters(), name, how)
    _, made = train(params, name, how, after=average, ema_decay=0.9)
    assert all(map(torch.equal, params, plain))
    with made.averaged_weights():
        shown = [param.detach().double().clone() for param in params]
    torch.testing.assert_close(shown, averages, **CLOSE)
    assert all(map(torch.equal, params, plain))


@pytest.mark.cover("name", "how")
@every_way
@pytest.mark.parametrize("name", NAMES)
def test_cautious_wd_is_alg_1(name, how):
    """x <- x - lr u - lr wd x where u x >= 0, of u as steps without decay give it."""
    params, others = parameters(), parameters()
    _, step = how(params, name, {"cautious_wd": True, "wd": 0.5})
    _, plain = how(others, name, {})
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


def test_a_rule_of_the_users_takes_them():
    @tristep.kernels.tensor_rule
    def normalized(w, g, state, hyper):
        (lr, decay) = hyper
        return w - lr * g / g.norm() - decay * w, state

    class Normalized(optimizer.RuleOptimizer):
        rule = normalized

    params = parameters()
    trainer = Trainer(
        params, Normalized(learning_rate=0.1, clip_norm=0.5, skip_nonfinite=True, ema_decay=0.5), engine="eager"
    )
    before = [param.detach().clone() for param in params]
    for param in params:
        param.grad = torch.ones_like(param)
    trainer.step(1)
    for param, old in zip(params, before, strict=True):
        torch.testing.assert_close(param.detach(), old - 0.1 / param.numel() ** 0.5, **CLOSE)
