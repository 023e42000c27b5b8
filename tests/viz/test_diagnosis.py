"""Notes: each planted fault is found, with its numbers, and healthy runs get none."""

import re

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
    assert note.startswith("layer7.weight: update ratio 0.3 at step 301, then usually 0.2, ")
    assert note.endswith("): its learning rate is too high")
    assert 100 < float(note.split("then usually 0.2, ")[1].split(" times")[0]) < 400


@pytest.mark.parametrize(
    ("factor", "said"),
    [
        (300, "half of all tensors change by over 0.3 of themselves each step: the rate is high"),
        (1e-6, "half of all tensors change by under 1e-09 of themselves each step: they hardly move"),
        (0, "all are 0: no weight changes"),
    ],
)
def test_updates_that_are_too_large_or_too_small_everywhere(factor, said):
    def change(found):
        found["update_ratio"] *= factor
        if factor == 0:
            found["update_norm"] *= 0

    assert _noted(change) == [f"updates: {said}"]


def test_gradients_that_are_not_finite():
    def change(found):
        found["gradient_nonfinite"][119, 4], found["gradient_norm"][119, 4] = 12, np.inf
        found["gradient_nonfinite"][150] = 1

    assert _noted(change)[0] == "gradients: not finite first at step 120 in 'layer4.weight' (12 elements)"

    def of_hooks(found):
        del found["gradient_nonfinite"]
        found["gradient_norm"][119, 3:5] = np.nan
        found["gradient_norm"][:, 9] = np.nan  # has no gradient

    assert _noted(of_hooks)[0] == "gradients: not finite first at step 120 in 'layer3.weight' and 1 other tensor"


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
    where = "'layer4.weight'" + " and 2 other tensors" * (several == 3)
    assert gradients == f"gradients: not finite first at step {bad[0]:,} in {where}"
    assert loss == f"loss: not finite first at step {bad[0]:,}, {len(bad)} step{'s' * (len(bad) > 1)} in all"


def test_of_tensors_that_are_not_finite_in_one_block_the_first_is_named_but_none_without_a_gradient():
    run, number, losses, found = _bad_at([6004])
    found["gradient_nonfinite"][6002, 1] = 1
    assert diagnose(_added(run, number, losses, found, 9000))[0] == (
        "gradients: not finite first at step 6,003 in 'layer1.weight'"
    )
    run, number, _, found = _bad_at([])
    del found["gradient_nonfinite"]
    found["gradient_norm"][3::8, 2] = np.nan  # once in each block
    found["gradient_norm"][:, 7] = np.nan
    run.add_tensors(number, found)
    assert diagnose(run)[0] == "gradients: not finite first at step 4 in 'layer2.weight'"


def test_tensors_that_nothing_reaches():
    def change(found):
        found["gradient_norm"][99:, 2] = 0

    (note,) = _noted(change)
    assert note == (
        "layer2.weight: its gradient is 0 from step 100 to 400: nothing reaches it; the first behind that gets one is "
        "layer3.weight"
    )

    def groups(found):
        found["gradient_norm"][99:, 0] = 0
        found["gradient_norm"][149:, 1] = 0
        found["gradient_norm"][:, 4:7] = 0
        found["gradient_norm"][:, 7] = np.nan  # has none
        found["gradient_norm"][99:, 9] = 0

    assert _noted(groups) == [
        "layer0.weight and layer1.weight: their gradients are 0 from step 150 to 400: nothing reaches them; the first "
        "behind that gets one is layer2.weight",
        "layer4.weight to layer6.weight, 3 tensors: their gradients are 0 from step 1 to 400: nothing reaches them; the "
        "first behind that gets one is layer8.weight",
        "layer9.weight: its gradient is 0 from step 100 to 400: nothing reaches it",
    ]

    def all_of_them(found):
        found["gradient_norm"][99:] = 0

    assert _noted(all_of_them)[0] == "gradients: all are 0 since step 100"


def test_a_weight_that_grows_beyond_the_others():
    def change(found):
        found["weight_norm"] = np.linspace(2.0, 3.0, 400)[:, None] * np.ones(10)
        found["weight_norm"][:, 1] = np.linspace(0.0, 3.0, 400)  # a bias that begins at 0
        found["weight_norm"][:, 7] = np.minimum(2.0 + np.arange(400.0), 250)

    (note,) = _noted(change)
    assert note == (
        "layer7.weight: its norm grows from 2 at step 1 to 250 at step 249, while half of all tensors grow 1.5 times at "
        "most: it blows up"
    )

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
    assert note == (
        "weights: updates are lost in rounding, in bfloat16: usually 93 % of layer3.weight and 50 % of layer4.weight do not "
        'change at a step, though their gradients are not 0: keep masters (multi_precision=True, "remainder" or "split8"), '
        "round stochastically (stochastic_rounding=True), or raise the learning rate"
    )
    two = noted([0.9, 0.8], 0.0, [*["float32"] * 4, *["float16"] * 6])
    assert [note.split(": ")[1] for note in two] == ["updates are lost in rounding, in float32"] + [
        "updates are lost in rounding, in float16"
    ]
    assert two[0].endswith(": raise the learning rate")
    assert two[1].endswith(": keep masters (multi_precision=True), or raise the learning rate")
    assert noted([0.97, 0.99], [0.96, 0.99]) == []  # rows of embeddings that no token has used
    assert noted([1.0, 1.0], [1.0, 0.9], freeze=True) == []
    assert noted([0.95, 0.95], 0.0, ["bfloat16 with stochastic rounding"] * 10) == []
    assert noted([0.4, 0.4]) == []


def test_a_spike_of_the_gradients():
    def change(found):
        found["gradient_norm"][199, 6] = 900.0

    (note,) = _noted(change)
    assert note.startswith("gradients: norm 9e+02 at step 200, ")
    assert note.endswith(" times the median nearby, most of it in 'layer6.weight': a spike")
    run, number, losses, found = _bad_at([])
    found["gradient_norm"][6003, 6] = 900.0
    (note,) = diagnose(_added(run, number, losses, found, 9000))  # whose blocks have 8 steps
    assert note.startswith("gradients: norm 9e+02 at a step from 6,001 to 6,008, ")


def _fall(number, generator, noise=0.05):
    return 2.5 * np.exp(-number / 80) * np.exp(noise * generator.standard_normal(len(number)))


def test_losses_that_rise_stand_still_never_fell_or_are_not_finite():
    (note,) = _noted(loss=lambda n, g: _fall(n, g) + np.where(n > 300, (n - 300) / 25, 0))
    assert note.startswith("loss: 4.0")  # (400 - 300) / 25
    assert 270 < int(note.split("at step ")[1].split(":")[0]) < 310
    assert note.endswith(": it rises")
    (note,) = _noted(loss=lambda n, g: 0.5 + _fall(n, g, 0.0) * (n < 150) + 0.01 * g.standard_normal(400))
    assert note.startswith("loss: 0.5")
    assert note.endswith(": it stands still")
    (note,) = _noted(loss=lambda n, g: 2.3 + 0.05 * g.standard_normal(400))
    assert note.startswith("loss: 2.")
    assert note.endswith(": it has not fallen")
    (note,) = _noted(loss=lambda n, g: np.where(n == 100, np.nan, _fall(n, g)))
    assert note == "loss: not finite first at step 100, 1 step in all"
    assert _noted(loss=lambda n, g: np.where(n == 100, 1e300, _fall(n, g))) == []  # and does not break what is computed


def _train(net, name="adam", settings=None, steps=60, before=lambda: None, after=lambda: None, loss_of=None):
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
            before()
            trainer.step(1)
            after()
            recorder.step(loss=loss)
    return recorder.run


def _layers(bend=torch.nn.Tanh):
    torch.manual_seed(0)
    return torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(8, 8), bend()) for _ in range(4)])


def test_a_real_net_with_a_layer_whose_rate_is_too_high():
    assert diagnose(_train(_layers())) == []
    net = _layers()
    net[2][0].weight.lr_mult = 300.0
    assert diagnose(_train(net))[0].startswith("2.0.weight: update ratio ")


def test_a_real_net_with_a_weight_that_blows_up_until_its_updates_look_small():
    net = _layers()
    sick = net[2][0].weight
    sick.lr_mult = 1000.0
    norms = []
    run = _train(net, steps=200, before=lambda: norms.append(float(sick.detach().norm())))
    ratios = run.tensors["update_ratio"].recent()[1][:, run.parameters.index("2.0.weight")]
    assert np.median(ratios[:5]) > 0.1 > 0.03 > np.median(ratios[100:])
    said = next(note for note in diagnose(run) if "blows up" in note)
    start, end = f"{norms[0]:.2g} at step 1", f"{max(norms):.3g} at step {np.argmax(norms) + 1:,}"
    assert said.startswith(f"2.0.weight: its norm grows from {start} to {end}, while half of all tensors grow ")


LOST = "weights: updates are lost in rounding, in bfloat16: usually "


@pytest.mark.sample(1)
@pytest.mark.usefixtures("few_steps")
@pytest.mark.parametrize("name", ["adam", "sgd", "muon"])
def test_a_real_net_in_bfloat16_whose_learning_rate_is_too_small_for_it(name):
    net = _layers().to(torch.bfloat16)
    bits = []

    def remember():
        bits.append([param.detach().view(torch.int16).clone() for param in net.parameters()])

    run = _train(net, name, {"learning_rate": 2e-2 if name == "sgd" else 1e-4}, before=remember, after=remember)
    steps = zip(bits[60::2], bits[61::2], strict=True)  # the second half
    shares = [[float((a == b).double().mean()) for a, b in zip(*step, strict=True)] for step in steps]
    usual = dict(zip(run.parameters, np.sort(shares, axis=0)[14], strict=True))
    (note,) = [each for each in diagnose(run) if each.startswith(LOST)]
    said = re.findall(r"(\d+) % of ([\w.]+)", note)
    assert [percent for percent, _ in said] == [f"{100 * usual[name]:.0f}" for _, name in said]
    others = re.search(r" % or more of (\d) other tensor", note)
    assert len(said) + (int(others[1]) if others else 0) == sum(share >= 0.5 for share in usual.values())
    assert len(said) > 3


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


def test_a_real_net_with_a_layer_that_lets_nothing_through():
    net = _layers(torch.nn.ReLU)
    torch.nn.init.constant_(net[1][0].bias, -9.0)
    last = {}
    run = _train(net, before=lambda: last.update({name: float(p.grad.abs().max()) for name, p in net.named_parameters()}))
    assert [name for name, largest in last.items() if largest == 0] == list(last)[:5]
    assert diagnose(run)[0] == (
        "0.0.weight to 2.0.weight, 5 tensors: their gradients are 0 from step 1 to 60: nothing reaches them; the first "
        "behind that gets one is 2.0.bias"
    )


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
    assert note == (
        "gradients: not finite in '0.0.weight' and 3 other tensors at each of 60 steps, which were all skipped: no weight "
        "has changed"
    )


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
