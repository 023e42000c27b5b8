"""Races: trainings are those of torch.optim on the same batches, tuning is what it says, and a second call goes on."""

import doctest
import warnings
from importlib import import_module

import numpy as np
import pytest
import torch
from races import LOSS, TWO, batches, network, raced
from torch import nn

import tristep
from tristep.contrib.racing.candidates import candidates_of
from tristep.contrib.racing.training import SeededBatches
from tristep.lr_scheduler import FunctionScheduler
from tristep.trainer import RaceResult

pytestmark = pytest.mark.sample(0)  # the quick tier runs a smoke test


def by_torch(make_optimizer, seed, steps=12, every=4, held_out=None):
    """Losses at the measurements of one training, as anybody would write it."""
    torch.manual_seed(seed)
    net, order = network(), SeededBatches(batches(), seed)
    optimizer = make_optimizer(net.parameters())
    losses, measured, step = [], [], 0

    def measure():
        with torch.no_grad():
            measured.append(sum(len(x) * LOSS(net(x), y).item() for x, y in held_out) / sum(len(x) for x, _ in held_out))

    if held_out:
        measure()
    while step < steps:
        for x, y in order:
            optimizer.zero_grad()
            loss = LOSS(net(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            step += 1
            if held_out and (step % every == 0 or step == steps):
                measure()
            if step == steps:
                break
    return measured or [losses[0], *(np.mean(losses[a : a + every]) for a in range(0, steps, every))]


@pytest.mark.sample(1)
@pytest.mark.parametrize("held_out", [True, False])
@pytest.mark.parametrize("together", [64, 5, 1])
def test_trainings_are_those_of_torch(held_out, together):
    data = [*batches(2, 5, seed=9), *batches(1, 3, seed=10)] if held_out else None
    found = raced(eval_data=data, together=together)
    assert found.losses.shape == (2, 2, 4)
    assert found.tuning.shape == (2, 2, 1, 4)
    assert found.measured.tolist() == [0, 4, 8, 12]
    assert found.samples.tolist() == [[0, 16, 32, 48]] * 2
    for seed in range(2):
        chosen = found.settings("sgd")
        make = lambda own, chosen=chosen: torch.optim.SGD(own, chosen["learning_rate"], weight_decay=chosen["wd"])  # noqa: E731
        np.testing.assert_allclose(found.losses[0, seed], by_torch(make, seed, held_out=data), rtol=2e-4)
        chosen = found.settings("adam")
        betas = (1 - chosen["one_minus_beta1"], 0.999)
        make = lambda own, chosen=chosen, betas=betas: torch.optim.Adam(own, chosen["learning_rate"], betas)  # noqa: E731
        np.testing.assert_allclose(found.losses[1, seed], by_torch(make, seed, held_out=data), rtol=2e-3)


def test_the_winner_has_the_fewest_steps_and_else_the_least_loss():
    low = raced(target=0.0, trials=4, seeds=1)  # which nobody reaches
    assert low.chosen.tolist() == low.tuning[:, :, 0, -1].argmin(axis=1).tolist()
    found = raced(target=1.0, trials=4, seeds=1, every=1)
    steps = np.array([[crossing(row[0], 1.0) for row in own] for own in found.tuning])
    np.testing.assert_allclose([steps[i, k] for i, k in enumerate(found.chosen)], steps.min(axis=1))
    np.testing.assert_allclose(found.needed()[:, 0], [crossing(row[0], 1.0) for row in found.losses])


def crossing(losses, target):
    """Where the straight lines between the losses after 0, 1, ... steps first come to the target."""
    k = next((k for k, loss in enumerate(losses) if loss <= target), None)
    return np.inf if k is None else 0 if k == 0 else np.interp(-target, -losses[k - 1 : k + 1].astype(float), [k - 1, k])


def test_what_is_searched():
    sgd, momentum, adam, lion, fixed, own = candidates_of(
        {
            "sgd": {},
            "momentum": {"optimizer": "sgd", "momentum": 0.9, "learning_rate": 0.5},
            "adam": None,
            "lion": {"learning_rate": (0.001, 0.1), "wd": (0.01, 1.0)},
            "fixed": {"optimizer": "adam", "beta1": 0.8, "wd": 0.1},
            "own": {"optimizer": "sgd", "one_minus_momentum": (0.1, 1.0)},
        }
    )
    assert list(sgd.ranges) == list(momentum.ranges) == ["learning_rate", "wd"]
    assert momentum.ranges["learning_rate"] == (0.5 / 30, 15.0)
    assert adam.ranges == {"learning_rate": (0.001 / 30, 0.03), "one_minus_beta1": (0.02, 0.5)}
    assert lion.ranges == {"learning_rate": (0.001, 0.1), "wd": (0.01, 1.0)}
    assert list(fixed.ranges) == ["learning_rate"]
    points = own.points(64)
    unit = np.log(points / [low for low, _ in own.ranges.values()]) / [np.log(900), np.log(10)]
    assert ((unit > 0) & (unit < 1)).all()
    cells = np.floor(unit * 8).astype(int)
    assert len({tuple(cell) for cell in cells}) == 64  # one in each cell of an 8 x 8 grid: a (0, 6, 2)-net
    np.testing.assert_array_equal(own.points(16), points[:16])
    made = own.make([0.3, 0.25])
    assert (made.lr, made.momentum) == (0.3, 0.75)


def test_several_optimizers_in_one_side_by_side_and_alone():
    """Patterns find their parameters among stacked weights, and all rates are scaled alike."""
    entries = [("*bias|layer==Linear&shape[0]==3", "sgd", {"learning_rate": 0.1}), ("*", "adam", {"learning_rate": 0.01})]
    two = {"adam": {}, "both": {"optimizer": entries}}
    found, alone = (raced(two, seeds=1, steps=6, every=2, together=each) for each in (64, 1))
    np.testing.assert_allclose(found.losses, alone.losses, rtol=1e-3)
    (candidate,) = candidates_of({"both": {"optimizer": entries}})
    assert candidate.ranges["learning_rate"] == (0.01 / 30, 0.3)
    first, second = candidate.make([0.02, 0.001]).optimizers
    assert (first.lr, second.lr, first.wd) == (0.2, 0.02, 0.001)


class Reading(nn.Sequential):
    """A network that vmap refuses, because it looks at a number."""

    def forward(self, x):
        return super().forward(x) * (1.0 if x.sum().item() > -1e9 and self[0].weight.sum().item() < 1e9 else 2.0)


def test_networks_that_cannot_be_stacked_are_trained_alone():
    found = raced(make=lambda: Reading(*network()), seeds=1, steps=4)
    np.testing.assert_array_equal(found.losses, raced(seeds=1, steps=4, together=1).losses)


class Interrupted:
    """A loss that is interrupted at its n-th call."""

    def __init__(self, at=None):
        self.at, self.calls = at, 0

    def __call__(self, outputs, labels):
        self.calls += 1
        if self.calls == self.at:
            raise KeyboardInterrupt
        return LOSS(outputs, labels)


@pytest.mark.parametrize("together", [64, 1])
def test_a_second_call_goes_on(together, tmp_path):
    folder, whole = tmp_path / "race", Interrupted()
    settings = {"together": together, "steps": 8}
    expected = raced(loss=whole, **settings)
    with pytest.raises(KeyboardInterrupt):
        raced(loss=Interrupted(whole.calls * 2 // 3), folder=folder, **settings)
    before = {path.name for path in folder.iterdir()}
    second = Interrupted()
    found = raced(loss=second, folder=folder, **settings)
    assert second.calls < whole.calls
    np.testing.assert_array_equal(found.losses, expected.losses)
    np.testing.assert_array_equal(found.tuning, expected.tuning)
    assert before < {path.name for path in folder.iterdir()}
    third = Interrupted()
    again = raced(loss=third, folder=folder, **settings)
    assert third.calls == 1  # of the first weights, to see whether all is the same
    assert str(again) == str(found)
    more = raced(folder=folder, **settings | {"seeds": 3, "target": 1.0})
    assert more.losses.shape[1] == 3
    np.testing.assert_array_equal(more.tuning, found.tuning)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"steps": 5}, r"steps=4, this one has 5"),
        ({"optimizers": {"sgd": {"learning_rate": 0.2}, "adam": {}}}, r"\['sgd'\]\['searched'\]"),
        ({"eval_data": batches(1)}, "held-out data=False"),
        ({"data": batches(seed=4)}, "loss on data of the first weights"),
        ({"make": lambda: nn.Linear(6, 3)}, "loss on data of the first weights"),
    ],
    ids=["steps", "rate", "eval_data", "data", "network"],
)
def test_a_folder_of_another_race_is_refused(changed, said, tmp_path):
    settings = {"steps": 4, "trials": 1, "seeds": 1, "folder": tmp_path / "race"}
    raced(**settings)
    kept = {path.name: path.read_bytes() for path in settings["folder"].iterdir()}
    with pytest.raises(ValueError, match=said):
        raced(**settings | changed)
    assert {path.name: path.read_bytes() for path in settings["folder"].iterdir()} == kept


@pytest.mark.sample(1)
@pytest.mark.parametrize("makes", ["seeds itself", "has a generator", "loads", "draws"])
def test_seeds_that_start_from_the_same_weights_are_said_to(makes, tmp_path):
    kept = network()

    def make():
        if makes == "seeds itself":
            torch.manual_seed(0)
        net = network()
        if makes == "has a generator":
            tristep.initializer.initialize(net, "xavier", torch.Generator().manual_seed(0))
        elif makes == "loads":
            net.load_state_dict(kept.state_dict())
        return net

    found = raced(make=make, steps=4, trials=1, folder=tmp_path / "race")
    found.save(tmp_path / "race.safetensors")
    for each in (found, RaceResult.load(tmp_path / "race.safetensors")):
        assert ("All seeds start from the same weights" in str(each)) == (makes != "draws")
    swept = {"optimizer": "sgd", "steps": 2, "seeds": (0, 1)}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        tristep.sweep(make, LOSS, batches(), **swept)
    assert [str(each.message)[:52] for each in said] == ["seeds=(0, 1): make_model gives the same weights for "] * (
        makes != "draws"
    )
    assert "same weights" not in str(raced(make=make, steps=4, trials=1, seeds=1))


@pytest.mark.sample(1)
def test_a_schedule_that_cannot_be_saved_races_without_a_folder_only(tmp_path):
    settings, folder = {"steps": 4, "trials": 1, "seeds": 1}, tmp_path / "race"
    unsaved = {"sgd": {"lr_scheduler": FunctionScheduler(lambda n: 0.5)}}
    assert np.isfinite(raced(unsaved, **settings).losses).all()
    with pytest.raises(
        TypeError, match=r"optimizers\['sgd'\] with a folder: function of FunctionScheduler=.* @register above"
    ):
        raced(unsaved, **settings, folder=folder)
    assert not folder.exists()


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"folder=.*there is no folder"):
        raced(folder=tmp_path / "none" / "race")
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match=r"folder=.*this is a file"):
        raced(folder=tmp_path / "file")


def test_examples():
    assert doctest.testmod(import_module("tristep.contrib.racing.run")).failed == 0


def test_a_damaged_training_is_named(tmp_path):
    settings = {"steps": 4, "trials": 1, "seeds": 1, "folder": tmp_path / "race"}
    raced(**settings)
    path = settings["folder"] / "1-0-0.safetensors"
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(ValueError, match=r"1-0-0\.safetensors.*damaged"):
        raced(**settings)


class Shuffled(torch.utils.data.Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, i):
        return torch.full((6,), float(i)), i % 3


@pytest.mark.parametrize("generator", [None, torch.Generator()], ids=["torch's", "its own"])
def test_a_loader_gives_the_same_batches_for_a_seed(generator):
    loader = torch.utils.data.DataLoader(Shuffled(), batch_size=5, shuffle=True, generator=generator)

    def order(seed, epochs=2):
        data = SeededBatches(loader, seed)
        found = [x[:, 0].tolist() for _ in range(epochs) for x, _ in data]
        assert data.sizes == [5, 5, 2] * epochs
        return found

    state = torch.get_rng_state()
    first = order(1)
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(3)
    assert order(1) == first
    assert order(2) != first
    assert first[:3] != first[3:]
    assert sorted(np.concatenate(first[:3])) == list(range(12))


def test_lists_are_shuffled_and_functions_are_asked():
    data = [(torch.full((2,), float(i)), i) for i in range(9)]
    orders = {seed: [y for _, y in SeededBatches(data, seed)] for seed in (0, 1)}
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(9))
    assert orders[0] != orders[1]
    assert [y for _, y in SeededBatches(lambda seed: data[seed:], 4)] == [4, 5, 6, 7, 8]


@pytest.mark.parametrize(
    ("settings", "error", "said"),
    [
        ({"optimizers": {}}, ValueError, "optimizers is empty"),
        ({"optimizers": "adam"}, TypeError, "must be a dict of names"),
        ({"optimizers": {"adam": {"learning_rate": (0.1, 0.01)}}}, ValueError, r"\['learning_rate'\]=\(0.1, 0.01\)"),
        ({"optimizers": {"adem": {}}}, ValueError, r"optimizers\['adem'\].*adam"),
        ({"optimizers": {"adam": {"one_minus_beta1": (0.5, 2.0)}}}, ValueError, "1 or less"),
        ({"target": None}, TypeError, "target=None"),
        ({"seeds": [1, 1]}, ValueError, "each once"),
        ({"seeds": [1_000_000]}, ValueError, "seeds=1000000"),
        ({"every": 21}, ValueError, "every=21"),
        ({"baseline": "lion"}, ValueError, "baseline='lion'"),
        ({"level": 1.0}, ValueError, r"level=1\.0"),
        ({"together": 0}, ValueError, "together=0"),
        ({"data": iter(batches())}, TypeError, "data is an iterator"),
        ({"data": []}, ValueError, "data gave no batch"),
        ({"eval_data": []}, ValueError, "eval_data gave no batch"),
        ({"make": network()}, TypeError, "make_model must be a function"),
    ],
)  # fmt: skip
def test_bad_input_is_named(settings, error, said, tmp_path):
    with pytest.raises(error, match=said):
        raced(**{"optimizers": TWO, "folder": tmp_path / "race"} | settings)
    assert not (tmp_path / "race").exists()
