"""Notes: each planted fault is found, with its numbers, and healthy runs get none."""

import numpy as np
import pytest
import torch

import tristep
from tristep.viz import Recorder, Run, Series, diagnose, read_run

NAMES = [f"layer{i}.weight" for i in range(10)]


@pytest.fixture(autouse=True)
def _one_thread():
    """Networks as small as these take longer with several."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _healthy(steps=400):
    """What a run that goes well looks like: noisy, with a falling loss, and ratios around 1e-3 that differ by layer."""
    generator, run = np.random.default_rng(3), Run("run", NAMES)
    number = np.arange(1, steps + 1)
    run.scalars["loss"] = Series()
    noise = np.exp(0.1 * generator.standard_normal(steps))
    run.scalars["loss"].extend(number, 2.5 / (1 + number / 60) * noise)
    each = 10.0 ** np.linspace(-0.5, 0.5, 10)
    wild = np.exp(0.3 * generator.standard_normal((steps, 10)))
    found = {
        "gradient_norm": each * wild,
        "update_norm": 1e-2 * each * wild,
        "update_ratio": 1e-3 * each * wild,
        "gradient_nonfinite": 0 * wild,
    }
    return run, number, found


def _noted(change=None, loss=None, steps=400):
    run, number, found = _healthy(steps)
    if change is not None:
        change(found)
    if loss is not None:
        run.scalars["loss"] = Series()
        run.scalars["loss"].extend(number, loss(number, np.random.default_rng(5)))
    run.add_tensors(number, found)
    return diagnose(run)


def _says(note, *facts):
    """What is wrong, where and when; the rest of the sentence is for people."""
    assert all(fact in note for fact in facts), (note, facts)


@pytest.mark.parametrize("steps", [1, 5, 12, 60, 400, 6000])
def test_a_healthy_run_gets_no_notes(steps):
    assert _noted(steps=steps) == diagnose(Run()) == []


def test_an_update_ratio_far_above_the_others():
    def small(found):
        found["update_ratio"][:, 7] = 0.2  # a bias near 0

    def change(found):
        small(found)
        found["update_ratio"][300, 7] = 0.31
        found["update_norm"][:, 7] *= 200

    assert _noted(small) == []
    (note,) = _noted(change)
    _says(note, "layer7.weight: update ratio 0.3 at step 301, then usually 0.2, ", "learning rate is too high")
    assert 100 < float(note.split("then usually 0.2, ")[1].split(" times")[0]) < 400


@pytest.mark.parametrize(
    ("factor", "facts"), [(300, ("over 0.3", "high")), (1e-6, ("under 1e-09", "hardly")), (0, ("all are 0",))]
)
def test_updates_that_are_too_large_or_too_small_everywhere(factor, facts):
    def change(found):
        found["update_ratio"] *= factor
        if factor == 0:
            found["update_norm"] *= 0

    (note,) = _noted(change)
    _says(note, "updates: ", *facts)


def test_gradients_that_are_not_finite():
    def change(found):
        found["gradient_nonfinite"][119, 4], found["gradient_norm"][119, 4] = 12, np.inf
        found["gradient_nonfinite"][150] = 1

    _says(_noted(change)[0], "gradients: not finite first at step 120 ", "layer4.weight", "12 elements")

    def of_hooks(found):
        del found["gradient_nonfinite"]
        found["gradient_norm"][119, 3:5] = np.nan
        found["gradient_norm"][:, 9] = np.nan  # has no gradient

    _says(_noted(of_hooks)[0], "gradients: not finite first at step 120 ", "layer3.weight", "1 other tensor")


def _bad_at(bad, steps=9000, several=1):
    """A healthy run in blocks of 8 steps, with a gradient and a loss that are not finite at the steps `bad`."""
    run, number, found = _healthy(steps)
    del run.scalars["loss"]
    losses = np.where(np.isin(number, bad), np.inf, 2.5 / (1 + number / 60))
    for step in bad:
        found["gradient_nonfinite"][step - 1, 4 : 4 + several] = 12
        found["gradient_norm"][step - 1, 4 : 4 + several] = np.nan
    return run, number, losses, found


def _added(run, number, losses, found, chunk):
    for start in range(0, len(number), chunk):
        part = slice(start, start + chunk)
        run.scalars.setdefault("loss", Series()).extend(number[part], losses[part])
        run.add_tensors(number[part], {name: values[part] for name, values in found.items()})
    return run


def _recorded(run, *values, tmp_path):
    return _added(run, *values, 700)


def _saved(run, *values, tmp_path):
    _added(run, *values, 9000).save(tmp_path / "run.safetensors")
    return Run.load(tmp_path / "run.safetensors")


def _saved_in_the_middle(run, number, losses, found, tmp_path):
    half = len(number) // 2
    _added(run, number[:half], losses[:half], {name: values[:half] for name, values in found.items()}, 100)
    run.save(tmp_path / "run.safetensors")
    again = Run.load(tmp_path / "run.safetensors")
    return _added(again, number[half:], losses[half:], {name: values[half:] for name, values in found.items()}, 100)


def _imported(run, number, losses, found, tmp_path):
    names = [f"gradient_norm/{name}" for name in run.parameters]
    rows = np.column_stack([number, losses, found["gradient_norm"]])
    header = ",".join(["step", "loss", *names])
    np.savetxt(tmp_path / "run.csv", rows, delimiter=",", header=header, comments="", fmt="%.17g")
    return read_run(tmp_path / "run.csv")


def _of_an_optimizer(run, number, losses, found, tmp_path):
    return _added(run, number, losses, {"gradient_norm": found["gradient_norm"]}, 1000)


@pytest.mark.parametrize("bad", [[1], [2049], [6004], [6004, 6005, 7000], [9000]], ids=str)
@pytest.mark.parametrize("several", [1, 3])
@pytest.mark.parametrize("way", [_recorded, _saved, _saved_in_the_middle, _imported, _of_an_optimizer])
def test_a_long_run_names_the_first_step_that_is_not_finite(way, several, bad, tmp_path):
    gradients, loss = diagnose(way(*_bad_at(bad, several=several), tmp_path=tmp_path))[:2]
    others = "2 other tensors" if several == 3 else ""
    _says(gradients, f"gradients: not finite first at step {bad[0]:,} ", "layer4.weight", others)
    _says(loss, f"loss: not finite first at step {bad[0]:,},", f"{len(bad)} step")


def test_of_tensors_that_are_not_finite_in_one_block_the_first_is_named_but_none_without_a_gradient():
    run, number, losses, found = _bad_at([6004])
    found["gradient_nonfinite"][6002, 1] = 1
    _says(diagnose(_added(run, number, losses, found, 9000))[0], "first at step 6,003 in 'layer1.weight'")
    run, number, _, found = _bad_at([])
    del found["gradient_nonfinite"]
    found["gradient_norm"][3::8, 2] = np.nan  # once in each block
    found["gradient_norm"][:, 7] = np.nan
    run.add_tensors(number, found)
    _says(diagnose(run)[0], "first at step 4 in 'layer2.weight'")


def test_tensors_that_nothing_reaches():
    def change(found):
        found["gradient_norm"][99:, 2] = 0

    (note,) = _noted(change)
    _says(note, "layer2.weight: its gradient is 0 from step 100 to 400", "layer3.weight")

    def groups(found):
        found["gradient_norm"][99:, 0] = 0
        found["gradient_norm"][149:, 1] = 0
        found["gradient_norm"][:, 4:7] = 0
        found["gradient_norm"][:, 7] = np.nan  # has none
        found["gradient_norm"][99:, 9] = 0

    first, second, last = _noted(groups)
    _says(first, "layer0.weight and layer1.weight: ", "from step 150 to 400", "layer2.weight")
    _says(second, "layer4.weight to layer6.weight, 3 tensors: ", "from step 1 to 400", "layer8.weight")
    _says(last, "layer9.weight: ", "from step 100 to 400")
    assert last.count("layer") == 1  # there is none behind

    def all_of_them(found):
        found["gradient_norm"][99:] = 0

    _says(_noted(all_of_them)[0], "gradients: all are 0", "step 100")


def test_a_weight_that_grows_beyond_the_others():
    def change(found):
        found["weight_norm"] = np.linspace(2.0, 3.0, 400)[:, None] * np.ones(10)
        found["weight_norm"][:, 1] = np.linspace(0.0, 3.0, 400)  # a bias that begins at 0
        found["weight_norm"][:, 7] = np.minimum(2.0 + np.arange(400.0), 250)

    (note,) = _noted(change)
    _says(note, "layer7.weight: its norm grows from 2 at step 1 to 250 at step 249", "1.5 times", "blows up")

    def all_of_them(found):
        found["weight_norm"] = np.linspace(0.01, 1.0, 400)[:, None] * np.ones(10)  # they began small

    assert _noted(all_of_them) == []


def test_weights_that_are_stored_as_they_were():
    def noted(unchanged, zeros=0.0, storage=(), freeze=False):
        run, number, found = _healthy()
        run.storage = list(storage)
        found |= {"weight_unchanged": np.zeros((400, 10)), "gradient_zeros": np.zeros((400, 10))}
        found["weight_unchanged"][200:, 3:5], found["gradient_zeros"][200:, 3:5] = unchanged, zeros
        if freeze:
            found["update_norm"][:, 3:5] = 0.0
        run.add_tensors(number, found)
        return diagnose(run)

    (note,) = noted([0.95, 0.625], 0.25, ["bfloat16"] * 10)
    _says(note, "weights: ", "rounding", "bfloat16", "93 % of layer3.weight and 50 % of layer4.weight ")
    _says(note, '(multi_precision=True, "remainder" or "split8")', "stochastic_rounding=True", "raise the learning rate")
    plain, half = noted([0.9, 0.8], 0.0, [*["float32"] * 4, *["float16"] * 6])
    _says(plain, "float32", ": raise the learning rate")
    _says(half, "float16", "(multi_precision=True)", "raise the learning rate")
    assert noted([0.97, 0.99], [0.96, 0.99]) == []  # rows of embeddings that no token has used
    assert noted([1.0, 1.0], [1.0, 0.9], freeze=True) == []
    assert noted([0.95, 0.95], 0.0, ["bfloat16 with stochastic rounding"] * 10) == []
    assert noted([0.4, 0.4]) == []


def test_a_spike_of_the_gradients():
    def change(found):
        found["gradient_norm"][199, 6] = 900.0

    (note,) = _noted(change)
    _says(note, "gradients: norm 9e+02 at step 200, ", "layer6.weight", "a spike")
    run, number, losses, found = _bad_at([])
    found["gradient_norm"][6003, 6] = 900.0
    (note,) = diagnose(_added(run, number, losses, found, 9000))  # whose blocks have 8 steps
    _says(note, "norm 9e+02 at a step from 6,001 to 6,008, ")


def _fall(number, generator, noise=0.05):
    return 2.5 * np.exp(-number / 80) * np.exp(noise * generator.standard_normal(len(number)))


def test_losses_that_rise_stand_still_never_fell_or_are_not_finite():
    (note,) = _noted(loss=lambda n, g: _fall(n, g) + np.where(n > 300, (n - 300) / 25, 0))
    _says(note, "loss: 3.2", ": it rises")  # the mean of the last 40: (380.5 - 300) / 25
    assert 270 < int(note.split("at step ")[1].split(":")[0]) < 310
    (note,) = _noted(loss=lambda n, g: 0.5 + _fall(n, g, 0.0) * (n < 150) + 0.01 * g.standard_normal(400))
    _says(note, "loss: 0.5", ": it stands still")
    (note,) = _noted(loss=lambda n, g: 2.3 + 0.05 * g.standard_normal(400))
    _says(note, "loss: 2.", ": it has not fallen")
    (note,) = _noted(loss=lambda n, g: np.where(n == 100, np.nan, _fall(n, g)))
    _says(note, "loss: not finite first at step 100, 1 step ")
    assert _noted(loss=lambda n, g: np.where(n == 100, 1e300, _fall(n, g))) == []  # and does not break what is computed


def _train(net, name="adam", settings=None, steps=60, loss_of=None):
    """A recorded training, by default one to give back what is put in."""
    trainer = tristep.Trainer(net, name, {"learning_rate": 1e-3} if settings is None else settings)

    def given_back():
        x = torch.randn(16, 8).to(next(net.parameters()).dtype)
        return (net(x) - x).square().mean()

    with Recorder(trainer) as recorder:
        for _ in range(steps):
            loss = (loss_of or given_back)()
            trainer.zero_grad()
            loss.backward()
            trainer.step(1)
            recorder.step(loss=loss)
    return recorder.run


def _layers():
    torch.manual_seed(0)
    return torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()) for _ in range(4)])


def test_a_real_net_with_a_layer_whose_rate_is_too_high():
    assert diagnose(_train(_layers())) == []
    net = _layers()
    net[2][0].weight.lr_mult = 300.0
    assert diagnose(_train(net))[0].startswith("2.0.weight: update ratio ")


@pytest.mark.sample(1)
@pytest.mark.parametrize(("name", "rate"), [("adam", 1e-4), ("sgd", 2e-2), ("muon", 1e-4)])
def test_a_real_net_in_bfloat16_whose_learning_rate_is_too_small_for_it(name, rate):
    run = _train(_layers().to(torch.bfloat16), name, {"learning_rate": rate})
    (note,) = (each for each in diagnose(run) if each.startswith("weights: updates are lost in rounding, in bfloat16"))
    assert note.count(".weight") > 1


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("dtype", "settings"),
    [
        (torch.float32, {}),
        (torch.bfloat16, {"multi_precision": True}),
        (torch.bfloat16, {"multi_precision": "remainder"}),
        (torch.bfloat16, {"multi_precision": "split8"}),
        (torch.bfloat16, {"stochastic_rounding": True}),
    ],
    ids=["float32", "master", "remainder", "split8", "stochastic"],
)
def test_a_real_net_whose_storage_is_fine_enough_is_well(dtype, settings):
    run = _train(_layers().to(dtype), settings={"learning_rate": 1e-4} | settings)
    assert not [note for note in diagnose(run) if note.startswith("weights:")]


def test_a_real_net_of_which_all_steps_are_skipped():
    class Root(torch.nn.Module):
        def forward(self, x):
            return torch.where(x > 0, x.sqrt(), 0.0)

    net = _layers()
    net[1][1] = Root()
    before = [param.detach().clone() for param in net.parameters()]
    run = _train(net, settings={"learning_rate": 1e-3, "skip_nonfinite": True})
    assert all(map(torch.equal, before, net.parameters()))
    (note,) = diagnose(run)
    _says(note, "gradients: not finite in '0.0.weight' and 3 other tensors at each of 60 steps", "skipped")


class _Transformer(torch.nn.Module):
    """Predicts each next one of the numbers 0, 1, 2 ... 15, 0, ..., which a few steps teach it."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.tokens = torch.nn.Embedding(16, 16)
        self.layers = torch.nn.TransformerEncoder(
            torch.nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True, norm_first=True),
            2,
            enable_nested_tensor=False,
        )
        self.head = torch.nn.Linear(16, 16)
        for name, param in self.named_parameters():
            if name.endswith("bias"):
                torch.nn.init.zeros_(param)

    def forward(self, x):
        return self.head(self.layers(self.tokens(x)))


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("adam", {"learning_rate": 1e-3}),
        ("sgd", {"learning_rate": 0.1}),
        ("sgd", {"learning_rate": 0.03, "momentum": 0.9}),
    ],
    ids=["adam", "sgd", "momentum"],
)
def test_a_healthy_transformer_gets_no_notes(name, settings):
    net = _Transformer()

    def loss_of():
        x = (torch.randint(16, (8, 1)) + torch.arange(9)) % 16
        return torch.nn.functional.cross_entropy(net(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())

    run = _train(net, name, settings, 100, loss_of=loss_of)
    assert run.scalars["loss"].curve().mean[-1] < 1.0
    assert diagnose(run) == []
