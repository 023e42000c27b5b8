"""Sweeps: the numbers of single trainings by `Trainer`, which add up in another order, and what comes out of them."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import tristep
from tristep import Trainer, rule
from tristep.trainer import Sweep
from tristep.trainer.lr_scheduler import CosineScheduler, FactorScheduler


def network():
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3))


def batches(n=3, size=8):
    generator = torch.Generator().manual_seed(3)
    return [(torch.randn(size, 6, generator=generator), torch.randint(0, 3, (size,), generator=generator)) for _ in range(n)]


def single(name, arguments, data, epochs, make=network, seed=0, per_sample=False):
    """Losses and the trained network of one training, as anybody would write it."""
    torch.manual_seed(seed)
    net = make()
    trainer = Trainer(net, name, arguments)
    losses = []
    for _ in range(epochs):
        for inputs, labels in data:
            loss = cross_entropy(net(inputs), labels, reduction="sum" if per_sample else "mean")
            trainer.zero_grad()
            loss.backward()
            trainer.step(len(inputs) if per_sample else 1)
            losses.append(loss.item() / (len(inputs) if per_sample else 1))
    return np.array(losses), net


@pytest.mark.sample(2)
@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("name", ["sgd", "adam", "lamb", "nadam", "muon", "prodigy"])
def test_as_single_trainings(name, together):
    """One by one to the bit; together with gradients that differ in their last bits, which Muon amplifies.

    Rows of this loss's gradient add up to 0, so a direction of the last layer's matrix consists of rounding errors, which
    Muon makes as long as the others. It moves the weights, but not the probabilities.
    """
    data, rates = batches(), [0.02, 0.005]
    found = tristep.sweep(
        network, cross_entropy, data, optimizer=name, grid={"learning_rate": rates, "wd": [0.0, 0.1]}, epochs=1,
        seeds=(0, 7), together=together,
    )  # fmt: skip
    assert found.shape == (2, 2, 2)
    assert found.losses.shape == (2, 2, 2, 3)
    for i, rate in enumerate(rates):
        for j, wd in enumerate((0.0, 0.1)):
            for k, seed in enumerate((0, 7)):
                losses, net = single(name, {"learning_rate": rate, "wd": wd}, data, 1, seed=seed)
                made = found.model(learning_rate=rate, wd=wd, seeds=seed)
                if not together:
                    np.testing.assert_array_equal(found.losses[i, j, k], losses.astype(np.float32))
                    assert all(map(torch.equal, made.parameters(), net.parameters()))
                elif name == "muon":
                    np.testing.assert_allclose(found.losses[i, j, k], losses, rtol=5e-3)
                    for inputs, _ in data:
                        ours, theirs = (each(inputs).softmax(dim=1) for each in (made, net))
                        torch.testing.assert_close(ours, theirs, rtol=0, atol=5e-3)
                else:
                    np.testing.assert_allclose(found.losses[i, j, k], losses, rtol=2e-5)
                    for ours, theirs in zip(made.parameters(), net.parameters(), strict=True):
                        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=2e-5)


def test_per_sample_losses_and_schedules():
    data = batches()
    schedule = CosineScheduler(max_update=10, base_lr=0.5, final_lr=0.01)
    found = tristep.sweep(
        network,
        nn.CrossEntropyLoss(reduction="none"),
        data,
        optimizer="sgd",
        optimizer_params={"lr_scheduler": schedule, "momentum": 0.5},
        grid={"learning_rate": [0.3, 0.03]},
        epochs=2,
    )
    for rate, losses in zip((0.3, 0.03), found.losses[:, 0], strict=True):
        own = CosineScheduler(max_update=10, base_lr=rate, final_lr=0.01)
        expected, _ = single("sgd", {"lr_scheduler": own, "momentum": 0.5}, data, 2, per_sample=True)
        np.testing.assert_allclose(losses, expected, rtol=2e-5)
    assert schedule.base_lr == 0.5


def weighted(outputs, labels):
    return cross_entropy(outputs, labels, torch.tensor([0.5, 1.0, 2.0]), ignore_index=1)


def of_probabilities(outputs, labels):
    chosen = (
        torch.softmax(outputs, -1, torch.float32).log()
        + outputs.softmax(dim=1).log()
        + torch.nn.functional.log_softmax(outputs, 1)
    )
    return torch.nn.functional.nll_loss(chosen, labels, reduction="none")


def of_shares(outputs, labels):
    return cross_entropy(outputs, torch.nn.functional.one_hot(labels, 3).to(outputs.dtype))


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "loss",
    [
        weighted,
        of_probabilities,
        of_shares,
        nn.CrossEntropyLoss(label_smoothing=0.2),
        lambda outputs, labels: cross_entropy(torch.stack([outputs, 2 * outputs], -1), torch.stack([labels, labels], -1)),
        lambda outputs, labels: nn.functional.softmax(outputs, dim=0).square().sum(-1),
    ],
    ids=["weighted", "probabilities", "shares", "smoothed", "two at a time", "over the batch"],
)
def test_losses_of_few_classes(loss):
    """They are taken across another axis than `Trainer` would take them, with the same numbers."""
    arguments = {"optimizer": "sgd", "grid": {"learning_rate": [0.5, 0.1]}, "epochs": 2}
    found = tristep.sweep(network, loss, batches(), **arguments)
    expected = tristep.sweep(network, loss, batches(), together=False, **arguments)
    np.testing.assert_allclose(found.losses, expected.losses, rtol=2e-5)
    assert found.losses[..., 3:].mean() < found.losses[..., :3].mean()


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.last, self.second.weight = nn.Linear(6, 3), self.first.weight

    def forward(self, inputs):
        return self.last(torch.tanh(self.second(torch.tanh(self.first(inputs)))))


def test_a_parameter_of_two_names_is_one():
    found = tristep.sweep(Tied, cross_entropy, batches(), optimizer="sgd", grid={"learning_rate": [0.5, 0.1]}, epochs=2)
    for rate, losses in zip((0.5, 0.1), found.losses[:, 0], strict=True):
        expected, net = single("sgd", {"learning_rate": rate}, batches(), 2, Tied)
        np.testing.assert_allclose(losses, expected, rtol=2e-5)
        assert found.model(learning_rate=rate).state_dict().keys() == net.state_dict().keys()
        torch.testing.assert_close(found.model(learning_rate=rate).second.weight, net.second.weight, rtol=1e-4, atol=2e-5)


def test_optimizers_and_schedules_as_axes():
    data = batches()
    grid = {"optimizer": ["sgd", "adamw"], "lr_scheduler": [None, FactorScheduler(step=3, factor=0.5, base_lr=0.02)]}
    found = tristep.sweep(network, cross_entropy, data, grid=grid, epochs=2)
    for i, name in enumerate(grid["optimizer"]):
        for j, schedule in enumerate([None, FactorScheduler(step=3, factor=0.5, base_lr=0.02)]):
            expected, _ = single(name, {"lr_scheduler": schedule}, data, 2)
            np.testing.assert_allclose(found.losses[i, j, 0], expected, rtol=2e-5)


def test_multipliers_of_parameters_and_frozen_ones():
    def make():
        net = network()
        net[0].weight.requires_grad_(False)
        net[2].bias.lr_mult = 3.0
        return net

    for together in (True, False):
        found = tristep.sweep(
            make, cross_entropy, batches(), optimizer="sgd", grid={"learning_rate": [0.5]}, epochs=2, together=together
        )
        expected, net = single("sgd", {"learning_rate": 0.5}, batches(), 2, make)
        np.testing.assert_allclose(found.losses[0, 0], expected, rtol=2e-5)
        torch.testing.assert_close(found.model()[2].bias, net[2].bias, rtol=1e-4, atol=1e-5)
        kept = found.model()[0].weight
        torch.manual_seed(0)
        assert torch.equal(kept, make()[0].weight)


def normalised():
    return nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9), nn.ReLU(), nn.Linear(9, 3))


def test_batch_norm_keeps_the_statistics_of_each_copy():
    grid = {"learning_rate": [0.1, 0.01]}
    found = tristep.sweep(normalised, cross_entropy, batches(), optimizer="sgd", grid=grid, epochs=2)
    for rate in grid["learning_rate"]:
        _, net = single("sgd", {"learning_rate": rate}, batches(), 2, normalised)
        made = found.model(learning_rate=rate)[1]
        torch.testing.assert_close(made.running_mean, net[1].running_mean, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(made.running_var, net[1].running_var, rtol=1e-4, atol=1e-5)
        assert made.num_batches_tracked == 6


def test_dropout_draws_for_each_copy():
    def make():
        return nn.Sequential(nn.Linear(6, 50), nn.Dropout(0.5), nn.Linear(50, 3))

    found = tristep.sweep(make, cross_entropy, batches(1), optimizer="sgd", grid={"wd": [0.0, 1e-9, 2e-9]}, steps=1)
    assert len(set(found.losses[:, 0, 0].tolist())) == 3


class Branching(nn.Module):
    """A network whose way depends on its numbers."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, inputs):
        outputs = self.layer(inputs)
        return outputs if outputs.sum() > 0 else -outputs


def test_what_vmap_refuses_can_be_trained_apart():
    arguments = {"optimizer": "sgd", "grid": {"learning_rate": [0.1, 0.2]}}
    with pytest.raises(RuntimeError, match="together=False"):
        tristep.sweep(Branching, cross_entropy, batches(), **arguments)
    found = tristep.sweep(Branching, cross_entropy, batches(), together=False, **arguments)
    expected, _ = single("sgd", {"learning_rate": 0.2}, batches(), 1, Branching)
    np.testing.assert_allclose(found.losses[1, 0], expected, rtol=1e-6)


def test_steps_go_through_the_data_again():
    found = tristep.sweep(network, cross_entropy, batches(3), steps=8)
    expected, _ = single("adam", {}, batches(3), 3)
    assert found.steps_per_epoch == 3
    np.testing.assert_allclose(found.losses[0], expected[:8], rtol=2e-5)
    np.testing.assert_allclose(found.final[0], expected[5:8].mean(), rtol=2e-5)


@rule
def seeded(w, g, state, hyper):
    lr, seed = hyper
    return w - lr * (g + 0.01 * seed), state


class Seeded(tristep.optimizer.RuleOptimizer):
    rule = seeded

    def __init__(self, learning_rate=0.1, seed=0, **others):
        self.seed = seed
        super().__init__(learning_rate=learning_rate, **others)


def test_a_seed_of_the_optimizer_is_not_one_of_the_networks():
    data = batches()
    grid = {"seed": [1, 2]}
    found = tristep.sweep(network, cross_entropy, data, optimizer=Seeded, grid=grid, seeds=(0, 7), together=False)
    assert found.axes == {"seed": (1, 2), "seeds": (0, 7)}
    losses, net = single(Seeded(seed=2), None, data, 1, seed=7)
    np.testing.assert_array_equal(found.losses[1, 1], losses.astype(np.float32))
    assert all(map(torch.equal, found.model(seed=2, seeds=7).parameters(), net.parameters()))


def test_scores_best_and_tables():
    data = batches()
    found = tristep.sweep(
        network, cross_entropy, data, optimizer="sgd", grid={"learning_rate": [1e-5, 0.5, 1e9]}, epochs=4, seeds=(0, 1),
        eval_data=data, eval_metric="accuracy",
    )  # fmt: skip
    assert found.best() == {"learning_rate": 0.5}
    assert found.best("accuracy") == {"learning_rate": 0.5}
    net = found.model(learning_rate=0.5, seeds=1)
    right = torch.cat([net(inputs).argmax(dim=1) == labels for inputs, labels in data]).double().mean()
    assert found.scores["accuracy"][1, 1] == pytest.approx(right.item())
    rows = found.rows()
    assert len(rows) == 6
    assert rows[3] == {
        "learning_rate": 0.5, "seeds": 1, "final": float(found.final[1, 1]), "lowest": float(found.losses[1, 1].min()),
        "eval_loss": found.scores["loss"][1, 1], "eval_accuracy": found.scores["accuracy"][1, 1],
    }  # fmt: skip


def test_files_give_back_what_was_saved(tmp_path):
    grid = {"optimizer": ["sgd", "adam"], "wd": [0.0, 0.5]}
    found = tristep.sweep(normalised, cross_entropy, batches(), grid=grid, eval_data=batches())
    found.save(tmp_path / "sweep.safetensors")
    again = Sweep.load(tmp_path / "sweep.safetensors", make_model=normalised)
    assert again.axes == found.axes
    np.testing.assert_array_equal(again.losses, found.losses)
    np.testing.assert_array_equal(again.scores["loss"], found.scores["loss"])
    point = {"optimizer": "adam", "wd": 0.5}
    for ours, theirs in zip(
        again.model(**point).state_dict().values(), found.model(**point).state_dict().values(), strict=True
    ):
        assert torch.equal(ours, theirs)
    with pytest.raises(RuntimeError, match="make_model"):
        Sweep.load(tmp_path / "sweep.safetensors").model(**point)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"data": iter([])}, TypeError, "data is an iterator"),
        ({"epochs": 1, "steps": 2}, ValueError, "give one of them"),
        ({"grid": {"seeds": [1]}}, ValueError, "seeds="),
    ],
)
def test_bad_input(arguments, error, message):
    usual = {"make_model": network, "loss": cross_entropy, "data": batches(1)}
    with pytest.raises(error, match=message):
        tristep.sweep(**usual | arguments)


class Streamed:
    """Batches without a length."""

    def __init__(self, data):
        self._data = data

    def __iter__(self):
        return iter(self._data)


@pytest.mark.parametrize(
    ("data", "settings", "per_epoch"),
    [
        (batches(5), {"steps": 3}, 5),
        (batches(5), {"steps": 7}, 5),
        (torch.utils.data.DataLoader(batches(10), batch_size=None), {"steps": 3}, 10),
        (Streamed(batches(5)), {"epochs": 1}, 5),
        (Streamed(batches(5)), {"steps": 3}, 3),
    ],
)
@pytest.mark.parametrize("together", [True, False])
def test_steps_per_epoch_are_those_of_the_data(data, settings, per_epoch, together, tmp_path):
    found = tristep.sweep(network, cross_entropy, data, optimizer="sgd", together=together, **settings)
    assert found.steps_per_epoch == per_epoch
    last = found.losses[..., -min(per_epoch, found.losses.shape[-1]) :]
    np.testing.assert_array_equal(found.final, last.mean(axis=-1))
    found.save(tmp_path / "sweep")
    assert Sweep.load(tmp_path / "sweep").steps_per_epoch == per_epoch
