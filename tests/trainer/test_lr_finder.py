"""The learning-rate finder: what it finds on curves whose answer is known, and that it leaves no trace."""

import itertools
import random

import numpy as np
import pytest
import torch

import tristep
from tristep import lr_scheduler


class Net(torch.nn.Module):
    """With running means, and random numbers from torch."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(5, 7)
        self.norm = torch.nn.BatchNorm1d(7)
        self.drop = torch.nn.Dropout(0.2)
        self.last = torch.nn.Linear(7, 1)

    def forward(self, x):
        return self.last(self.drop(torch.relu(self.norm(self.first(x)))))


def _bytes(value):
    """All of a nested structure as something that compares to the bit."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), tuple(value.shape), value.detach().reshape(-1).contiguous().view(torch.uint8).tolist()
    if isinstance(value, dict):
        return {str(key): _bytes(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_bytes(each) for each in value]
    return value.tolist() if isinstance(value, np.ndarray) else value


def _everything(net, source):
    return _bytes(
        [
            dict(net.state_dict()),
            source.state_dict(),
            [parameter.grad for parameter in net.parameters()],
            torch.get_rng_state(),
            list(random.getstate()),
            list(np.random.get_state()),  # noqa: NPY002
            getattr(getattr(source, "optimizer", None), "counts", None),
        ]
    )


class Lookahead(torch.optim.Optimizer):
    """As people write it: around another optimizer, with slow weights of its own, which only `state_dict` shows."""

    def __init__(self, fast, every=3):
        self.fast, self.every, self.steps, self.slow = fast, every, 0, []
        super().__init__([{"params": group["params"]} for group in fast.param_groups], {})
        self.param_groups = fast.param_groups
        self.slow = [parameter.detach().clone() for group in self.param_groups for parameter in group["params"]]

    @torch.no_grad()
    def step(self, closure=None):
        self.fast.step()
        self.steps += 1
        if self.steps % self.every == 0:
            parameters = [parameter for group in self.param_groups for parameter in group["params"]]
            for slow, parameter in zip(self.slow, parameters, strict=True):
                slow.lerp_(parameter, 0.5)
                parameter.copy_(slow)

    def state_dict(self):
        return {"fast": self.fast.state_dict(), "slow": self.slow, "steps": self.steps}

    def load_state_dict(self, state_dict):
        self.fast.load_state_dict(state_dict["fast"])
        self.slow, self.steps = state_dict["slow"], state_dict["steps"]
        self.param_groups = self.fast.param_groups


SOURCES = {
    "trainer": lambda net: tristep.Trainer(net, "adam", {"learning_rate": 0.02}),
    "trainer with a schedule": lambda net: tristep.Trainer(
        net, "sgd", {"momentum": 0.9, "lr_scheduler": lr_scheduler.CosineScheduler(50, base_lr=0.1)}
    ),
    "trainer that carries numbers": lambda net: tristep.Trainer(net, "nadam"),
    "trainer that records": lambda net: tristep.Trainer(net, "adamw", telemetry=True),
    "tristep.optim": lambda net: tristep.optim.NAdam(net.parameters(), lr=0.02),
    "several": lambda net: tristep.optim.MultiOptimizer(net, [("ndim<2", "nadam"), ("*", torch.optim.AdamW)], lr=0.02),
    "around another": lambda net: Lookahead(tristep.optim.AdamW(net.parameters(), lr=0.02)),
    "torch": lambda net: torch.optim.AdamW(
        [{"params": net.first.parameters(), "lr": 0.1}, {"params": [*net.norm.parameters(), *net.last.parameters()]}],
        lr=0.02,
    ),
}


def _loop(net, source, generator=None):
    generator = torch.Generator().manual_seed(3) if generator is None else generator

    def step():
        x = torch.randn(8, 5, generator=generator)
        random.random()
        np.random.rand()  # noqa: NPY002
        loss = (net(x) - x.sum(1, keepdim=True)).square().mean()
        source.zero_grad()
        loss.backward()
        if isinstance(source, tristep.Trainer):
            source.step(1)
        else:
            source.step()
        return loss

    return step


@pytest.mark.sample(4)
@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("kind", SOURCES)
def test_all_is_as_it_was_to_the_bit_and_training_goes_on_as_if_nothing_had_been(kind, steps):
    torch.manual_seed(1)
    net, generator = Net(), torch.Generator().manual_seed(3)
    source = SOURCES[kind](net)
    step = _loop(net, source, generator)
    for _ in range(steps):
        step()
    before = _everything(net, source)
    telemetry = getattr(source, "telemetry", None)
    recorded = None if telemetry is None else telemetry.steps.tolist()
    drawn = generator.get_state()
    found = tristep.lr_find(source, step, low=1e-4, high=1e-2, n=8, stop=None)
    assert len(found.rates) == 8
    assert _everything(net, source) == before
    assert getattr(source, "telemetry", None) is telemetry
    assert recorded is None or telemetry.steps.tolist() == recorded
    generator.set_state(drawn)
    losses = [step().item() for _ in range(4)]
    torch.manual_seed(1)
    other = Net()
    step = _loop(other, SOURCES[kind](other))
    assert [step().item() for _ in range(steps + 4)][steps:] == losses


def test_a_stale_gradient_stays_stale_and_a_fresh_one_fresh():
    net = torch.nn.Linear(2, 1)
    trainer = tristep.Trainer(net, "sgd")
    data = [(torch.ones(4, 2), torch.zeros(4, 1))]
    net(torch.ones(1, 2)).sum().backward()
    trainer.step(1)
    tristep.lr_find(trainer, (net, torch.nn.MSELoss(), data), n=10)
    with pytest.raises(tristep.StaleGradientError):
        trainer.step(1)
    net(torch.ones(1, 2)).sum().backward()
    gradient = net.weight.grad.clone()
    tristep.lr_find(trainer, (net, torch.nn.MSELoss(), data), n=10)
    assert torch.equal(net.weight.grad, gradient)
    trainer.step(1)


def test_an_error_of_the_loop_leaves_no_trace_either():
    torch.manual_seed(2)
    net = Net()
    trainer = tristep.Trainer(net, "adam")
    step = _loop(net, trainer)
    before, calls = _everything(net, trainer), itertools.count()

    def breaks():
        if next(calls) == 5:
            raise OSError("no more disk")
        return step()

    with pytest.raises(OSError, match="no more disk"):
        tristep.lr_find(trainer, breaks)
    assert _everything(net, trainer) == before


def test_rates_reach_the_optimizer_and_groups_keep_their_ratios():
    net, seen = torch.nn.Linear(2, 1), []
    optimizer = torch.optim.SGD([{"params": [net.weight], "lr": 0.1}, {"params": [net.bias], "lr": 0.02}], lr=1.0)

    def step():
        seen.append([group["lr"] for group in optimizer.param_groups])
        return 1.0

    found = tristep.lr_find(optimizer, step, low=1e-3, high=1e-1, n=5, smoothing=0)
    np.testing.assert_allclose(found.rates, [1e-3, 10**-2.5, 1e-2, 10**-1.5, 1e-1])
    np.testing.assert_allclose(seen, np.stack([found.rates, found.rates / 5], axis=1))
    assert found.suggestions == {}
    assert found.name == "SGD"
    with pytest.raises(ValueError, match="no rate to suggest: the loss never fell from 0.001 to 0.1"):
        _ = found.value
    assert tristep.lr_find(optimizer, step, n=5, name="mine").name == "mine"


def _warming_up(rates):
    """An optimizer whose groups have these rates, at the first step of a warm-up from 0."""
    optimizer = torch.optim.SGD([{"params": [torch.nn.Parameter(torch.ones(1))], "lr": rate} for rate in rates])
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: k / 10)
    return optimizer, lambda: [group["lr"] for group in optimizer.param_groups]


def _frozen(rates):
    optimizer = tristep.optim.SGD([{"params": [torch.nn.Parameter(torch.ones(1))], "lr": rate} for rate in rates])
    return optimizer, lambda: [group["lr"] for group in optimizer.param_groups]


def _of_several_schedules(rates):
    schedules = [tristep.lr_scheduler.PolyScheduler(10, base_lr=rate) for rate in rates]
    entries = [(str(k), "sgd", {"lr_scheduler": schedule}) for k, schedule in enumerate(schedules)]
    trainer = tristep.Trainer([(str(k), torch.nn.Parameter(torch.ones(1))) for k in range(len(rates))], entries)
    return trainer, lambda: [optimizer.learning_rate for optimizer in trainer.optimizer.optimizers]


RATIOS = {
    "a warm-up from 0": (_warming_up, [0.1, 0.02, 0.0]),
    "a first group at 0": (_frozen, [0.0, 0.02, 0.1]),
    "schedules": (_of_several_schedules, [0.1, 0.02]),
}


@pytest.mark.parametrize("name", RATIOS)
def test_ratios_are_those_of_the_training_where_a_rate_is_0_or_scheduled(name):
    make, rates = RATIOS[name]
    source, rates_now = make(rates)
    before, seen = rates_now(), []
    tristep.lr_find(source, lambda: seen.append(rates_now()) or 1.0, n=4)
    expected = np.array(rates) / max(rates)
    np.testing.assert_allclose([np.array(each) / max(each) for each in seen], [expected] * 4)
    assert rates_now() == before


def test_gradients_of_parameters_that_another_optimizer_has_are_put_back():
    encoder, head = torch.nn.Linear(2, 3), torch.nn.Linear(3, 1)
    optimizer = tristep.optim.SGD(encoder.parameters(), lr=0.1)
    head.weight.grad = kept = torch.full_like(head.weight, 0.5)
    seen = []

    def step():
        optimizer.zero_grad()
        loss = head(encoder(torch.ones(4, 2))).square().mean()
        loss.backward()
        seen.append(head.weight.grad is kept)
        optimizer.step()
        return loss

    tristep.lr_find(optimizer, step, n=4)
    assert head.weight.grad is kept
    assert kept.tolist() == [[0.5] * 3]
    assert head.bias.grad is None
    assert not any(seen)


def _planted(curve, **arguments):
    """The finder on losses that are a function of the rate's decimal logarithm."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(()))], lr=1.0)
    losses = (curve(np.log10(optimizer.param_groups[0]["lr"])) for _ in itertools.count())
    return tristep.lr_find(optimizer, losses, **arguments)


def test_suggestions_on_a_curve_whose_answers_are_known():
    """Flat up to 1e-4, falling in a straight line to 1e-2 but fastest at 3e-3, and rising from there."""

    def curve(x):
        bend = 0.8 * np.clip((x + 2.6) / 0.2, 0, 1)
        return 4.0 - 1.0 * np.clip(x + 4, 0, 2) - bend + 40 * max(x + 2, 0) ** 2

    found = _planted(curve, low=1e-6, high=1.0, n=121, smoothing=0)
    at = {rule: np.log10(rate) for rule, rate in found.suggestions.items()}
    assert at["steep"] == pytest.approx(-2.5, abs=0.11)
    assert at["minimum"] == pytest.approx(-3.0, abs=0.051)
    assert at["valley"] == pytest.approx(-3.0, abs=0.051)  # between -4 and -2
    assert -4 <= at["slide"] <= -2
    assert found.value == found.suggestions["valley"]
    assert found.diverged
    assert found.losses[-1] > 4 * found.losses.min()
    assert found.losses[-2] <= 4 * found.losses.min()


def test_noise_is_averaged_out():
    generator = np.random.default_rng(5)
    found = _planted(lambda x: 3 - np.clip(x + 4, 0, 2) + 0.05 * generator.standard_normal(), high=1e-1, stop=None)
    assert np.log10(found.value) == pytest.approx(-3.0, abs=0.4)
    assert np.abs(np.diff(found.smoothed)).mean() < 0.5 * np.abs(np.diff(found.losses)).mean()


@pytest.mark.parametrize("draw", ["standard_normal", "standard_exponential"])
def test_a_curve_without_a_fall_suggests_nothing(draw):
    """Of 40 curves of noise alone, with and without a rise to the end, nearly all are known for what they are."""
    flat = 0
    for seed in range(20):
        for rise in (0.0, 50.0):
            generator = np.random.default_rng(seed)
            found = _planted(lambda x: 3 + 0.3 * getattr(generator, draw)() + rise * max(x, 0) ** 2)  # noqa: B023
            flat += not found.suggestions
            if found.flat:
                assert found.suggestions == {}
                assert "the curve is flat" in repr(found)
                with pytest.raises(ValueError, match="no rate to suggest: the curve is flat: .* from 1e-07 to"):
                    _ = found.value
    assert flat >= 36


@pytest.mark.parametrize("seed", range(5))
def test_a_fall_in_noise_is_not_flat(seed):
    generator = np.random.default_rng(seed)
    found = _planted(lambda x: (3 - np.clip(x + 4, 0, 2)) * (1 + 0.3 * generator.standard_normal()), high=1e-1, stop=None)
    assert not found.flat
    assert found.suggestions


def test_a_net_that_is_trained_or_cannot_be_is_flat():
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(64, 32, 8, generator=generator)
    noise = torch.randn(64, 32, 1, generator=generator)
    weights = torch.linspace(-1, 1, 8)[None]
    solved = torch.linalg.lstsq(inputs.flatten(0, 1), (inputs @ weights.T + 0.1 * noise).flatten(0, 1)).solution.T
    data = list(zip(inputs, inputs @ weights.T + 0.1 * noise, strict=True))
    for start, flat in ((solved, True), (torch.zeros(1, 8), False)):
        net = torch.nn.Linear(8, 1, bias=False)
        net.load_state_dict({"weight": start})
        found = tristep.lr_find(tristep.Trainer(net, "adam"), (net, torch.nn.MSELoss(), data))
        assert (found.flat, bool(found.suggestions)) == (flat, not flat)


def test_it_ends_where_the_loss_is_not_finite_and_keeps_what_came_before():
    found = _planted(lambda x: np.nan if x > 0 else 1.0 - 0.1 * x, low=1e-5, high=1e5, n=21)
    assert found.diverged
    assert len(found.rates) == len(found.losses) == len(found.smoothed) == 11
    assert found.rates[-1] == pytest.approx(1.0)
    with pytest.raises(ValueError, match="only 2 losses from low=0.1; the next one was not finite: try a lower rate"):
        _planted(lambda x: np.nan if x > -0.97 else 1.0, low=0.1, n=100)


def test_a_net_a_loss_and_data_train_as_fit_does():
    torch.manual_seed(4)
    data = [(torch.randn(16, 3), torch.randn(16)) for _ in range(3)]
    losses = {}
    for kind in ("mean", "each"):
        torch.manual_seed(5)
        net = torch.nn.Sequential(torch.nn.Linear(3, 1), torch.nn.Flatten(0))
        trainer = tristep.Trainer(net, "sgd")
        loss = torch.nn.MSELoss(reduction="mean" if kind == "mean" else "none")
        losses[kind] = tristep.lr_find(trainer, (net, loss, data), n=30, low=1e-3, high=0.5).losses
        optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
        losses[f"torch, {kind}"] = tristep.lr_find(optimizer, (net, loss, data), n=30, low=1e-3, high=0.5).losses
    for each in losses.values():
        np.testing.assert_allclose(each, losses["mean"], rtol=1e-5)
    assert losses["mean"][-1] < losses["mean"][0]
