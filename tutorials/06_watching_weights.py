# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Watching weights, and finding a sick layer
#
# Tutorial 5 saw to it that a training begins well. How does one see, later on, that a layer is sick, and which?
#
# This notebook records what every step of a training does to every weight tensor, and shows it: losses, norms, update
# ratios, histograms, single weights. It derives how large Adam's updates are, to know what to expect. Then four networks get
# a fault each, and you see how pictures and notes lead to the layer. It needs no GPU and less than a minute.

# %%
import tempfile
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

import tristep
from tristep import viz

images, labels = (torch.tensor(array) for array in load_digits(return_X_y=True))
images = images.float() / 16
order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
training, test = order[:1344], order[1344:]

# %% [markdown]
# ## A recorder
#
# The network reads handwritten digits of 8 × 8 pixels. Two of its layers add to what they get, so that signals have a way
# around them. A `Recorder` is all that it takes: the update itself measures while it has the numbers at
# hand. After each step it is told the loss. Here it also counts the gradients by their size at each eighth step, and follows
# three single weights.


# %%
class Network(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.third = (nn.Linear(64, 64) for _ in range(3))
        self.last = nn.Linear(64, 10)
        self.bend = torch.relu  # after the third layer

    def forward(self, x):
        x = torch.relu(self.first(x))
        x = x + torch.relu(self.second(x))
        x = x + self.bend(self.third(x))
        return self.last(x)


def fit(net, name, learning_rate=0.001, prepare=lambda number, x: x, **options):
    """Train with Adam for eight passes over the images; the run that was recorded."""
    trainer = tristep.Trainer(net, "adam", {"learning_rate": learning_rate, **options})
    shuffle, number = torch.Generator().manual_seed(0), 0
    with viz.Recorder(
        trainer, name, histograms=["gradient"], histogram_every=8, weights={"second.weight": [0, 1, 2]}
    ) as recorder:
        for _ in range(8):
            for batch in training[torch.randperm(len(training), generator=shuffle)].split(64):
                number += 1
                trainer.zero_grad()
                loss = cross_entropy(net(prepare(number, images[batch])), labels[batch])
                loss.backward()
                trainer.step(batch_size=1)  # the loss is a mean already
                recorder.step(loss=loss)
    return recorder.run


net = Network()
healthy = fit(net, "healthy")
with torch.no_grad():
    accuracy = (net(images[test]).argmax(dim=1) == labels[test]).float().mean().item()
print(f"test accuracy {accuracy:.1%}")
print(healthy)

# %% [markdown]
# ## The whole run in one picture
#
# Rows are tensors, columns steps, and colours the norm of the gradient, or what you choose above. A click on a row, or the
# choice of a tensor, shows the history of its histograms below: how large its gradients were, from step to step. In a
# healthy network colours change slowly. The weights of all layers look alike, and so do their biases.

# %%
viz.TensorHeatmap(healthy)

# %% [markdown]
# ## One tensor in detail
#
# Here are its norms, the cosine between the gradient and the update (-1 where the step goes straight down), and the three
# weights that were followed.

# %%
viz.WeightsView(healthy)

# %% [markdown]
# ## How large are Adam's updates?
#
# The update ratio is the norm of an update over the norm of the weight. For Adam it can be foretold. Its first update moves
# each element that has a gradient by the rate $\eta$, up or down (tutorial 2). If $z$ is the share of gradients that are
# exactly 0, which ReLU makes, and $n$ the number of elements, then
#
# $$\frac{\|\Delta w\|}{\|w\|} = \frac{\eta \sqrt{(1 - z)\, n}}{\sqrt{n}\; \text{rms}(w)}
# = \frac{\eta \sqrt{1 - z}}{\text{rms}(w)}$$
#
# PyTorch draws the weights of a layer of 64 inputs evenly between -1/8 and 1/8, whose root mean square is
# $\frac{1}{8 \sqrt 3} = 0.072$.
#
# Later the gradients change their signs. If they were noise alone, of variance $\sigma^2$, the average
# $m = (1 - \beta_1) \sum_k \beta_1^k g_{t-k}$ would have the variance
#
# $$(1 - \beta_1)^2\, (1 + \beta_1^2 + \beta_1^4 + \dots)\, \sigma^2 = \frac{(1 - \beta_1)^2}{1 - \beta_1^2}\, \sigma^2
# = \frac{1 - \beta_1}{1 + \beta_1}\, \sigma^2$$
#
# while $\sqrt v$ is $\sigma$. So updates are shorter by $\sqrt{0.1 / 1.9} = 0.23$ where noise is all there is, and by less
# where the gradient keeps its direction. **The ratio tells how much of the gradient is signal.**
#
# *Guess:* the weights of this network are 0.09 in the root mean square at the end. Which ratio do you expect there?
#
# <details><summary>Answer</summary>
#
# Between $0.23 \cdot 0.001 / 0.09 = 0.0026$, for noise alone, and $0.001 / 0.09 = 0.011$. It is close to the first: near the
# end of a training the gradients of small batches are nearly all noise.
#
# </details>

# %%
names = ("first.weight", "second.weight", "third.weight")
place = {name: healthy.parameters.index(name) for name in names}
ratio = healthy.tensors["update_ratio"].recent()[1]
zeros = healthy.tensors["gradient_zeros"].recent()[1][0]
noise_alone = (0.1 / 1.9) ** 0.5
foretold = {}
print("                first update   foretold    last 20 updates   of noise alone")
for name, i in place.items():
    weight = net.get_parameter(name)
    foretold[name] = 0.001 * (1 - zeros[i]) ** 0.5 * 8 * 3**0.5
    late = noise_alone * 0.001 / weight.square().mean().sqrt().item()
    print(f"{name:<14} {ratio[0, i]:13.4f} {foretold[name]:10.4f} {ratio[-20:, i].mean():18.4f} {late:16.4f}")

still = viz.Function("noise alone", "0 * x + 0 * y", noise=1.0)
walk = viz.simulate(still, {"adam": {"learning_rate": 1.0}}, steps=20_000).paths[0, 0, 0]
measured_alone = float(((walk[1001:] - walk[1000:-1]) ** 2).mean() ** 0.5)
print(f"\nupdates of noise alone, over the rate: {measured_alone:.3f} measured, {noise_alone:.3f} derived")

# %% [markdown]
# ## All at once
#
# The `Dashboard` puts this on one page. Its slider moves a line through all panels, and the words above them say what was
# there. While a training runs, `dashboard.refresh()` after each step draws what is new, as often as drawing is cheap. `html`
# writes it to one file, which works in any browser without Python and without a network.

# %%
dashboard = viz.Dashboard(healthy)
folder = tempfile.TemporaryDirectory()
page = dashboard.html(Path(folder.name, "healthy.html"))
print(f"{page.name}: {page.stat().st_size / 1000:.0f} kB")
dashboard

# %% [markdown]
# The grey band, "usual", is a rule of thumb: a ratio of 1e-3, within half a decade. This network is healthy, and yet above
# it for more than half of the training. The formulas from before say why. The first updates of such weights have a ratio of
# 0.012 at the rate 0.001, whatever the gradient is, and those of noise alone have 0.0026, just inside the band. So the lines
# come down into it as the signal in the gradients gives way to noise. With larger weights, or a lower rate at the end, they
# would lie deeper in it. A line above the band alone is no fault: look for one that stays a decade above it, or far from the
# other lines, as the first of the sick networks has.

# %%
is_above = (ratio > 3e-3).mean(axis=1) > 0.5  # 3e-3 is half a decade above 1e-3
print(f"most tensors are above the band in {is_above.sum()} of {len(is_above)} steps, {is_above[-40:].sum()} of the last 40")

# %% [markdown]
# ## Four sick networks
#
# Each has one fault. `notes` reads a run and says in sentences what looks wrong, with the numbers; of the healthy run it has
# nothing to say.
#
# - *fast*: the weight of the second layer learns at 100 times the rate of the others, by `lr_mult`.
# - *dead*: the third layer starts with a bias of -5, so that none of its units ever says anything.
# - *spike*: the pixels of one batch, number 100, reach to 255 and not to 1.
# - *root*: instead of a ReLU there is a root. `torch.where` chooses zero for negative numbers, but the gradient of the
#   root that was not chosen is not a number, and gets through. `skip_nonfinite` saves the weights from it.


# %%
def root(x):
    return torch.where(x > 0, x.sqrt(), 0.0)


fast = Network()
fast.second.weight.lr_mult = 100.0
dead = Network()
nn.init.constant_(dead.third.bias, -5.0)
wrong = Network()
wrong.bend = root

runs = viz.RunSet(
    [
        healthy,
        fit(fast, "fast", learning_rate=0.0001),
        fit(dead, "dead"),
        fit(Network(), "spike", prepare=lambda number, x: 255 * x if number == 100 else x),
        fit(wrong, "root", skip_nonfinite=True),
    ]
)
found = {run.name: viz.diagnose(run) for run in runs}
for name, sentences in found.items():
    print(f"{name}:", *(sentences or ["nothing looks wrong"]), sep="\n  ")

# %% [markdown]
# Losses alone do not tell which layer it is, and two of the faults hardly show in them: *fast* and *dead* end a little above
# the healthy run. The runs went through a file on the way to this picture: `save` and `load` keep all that was recorded.

# %%
runs.save(Path(folder.name, "runs.safetensors"))
loaded = viz.RunSet.load(Path(folder.name, "runs.safetensors"))
viz.LossView(loaded)

# %% [markdown]
# ## fast: the line far above the band
#
# How much a step changes says more than the learning rate does. The usual advice is 1e-3, and the band is around it: a
# thousand such steps in one direction would replace a weight. Far above, weights are thrown about; far below they hardly
# move. The note names `second.weight`, and so does the picture.

# %%
viz.UpdateRatioView(loaded["fast"])

# %% [markdown]
# ## dead: grey rows
#
# The two rows of the third layer are grey, which is no colour of the scale: it marks gradients that are exactly zero, here
# from the first step to the last. The layers before it learn nevertheless, because signals go around it.

# %%
viz.TensorHeatmap(loaded["dead"])

# %% [markdown]
# ## spike: one bright column
#
# At step 100 the weights of all layers light up at once. A fault of one layer would be a row; a column is a fault of the
# data. `clip_norm` would have stopped it (tutorial 8).
#
# *Guess:* how long does Adam remember that step?
#
# <details><summary>Answer</summary>
#
# Its average $m$ forgets in about $1 / (1 - \beta_1) = 10$ steps, and then points the right way again. But $v$, the average
# of squares, needs $1 / (1 - \beta_2) = 1000$: until then the divisor of the weights is too large, and their updates end up
# shorter than in the healthy run. The next picture shows it. The gradients of biases are not multiplied by the pixels: their
# divisors stay small, and their updates grow for a while, as they repair what that step has broken.
#
# </details>

# %%
viz.TensorHeatmap(loaded["spike"])

# %%
viz.UpdateRatioView(loaded["spike"])

# %% [markdown]
# ## root: crosses up to the layer
#
# *Guess:* `torch.where(x > 0, x.sqrt(), 0.0)` never gives the root of a negative number. Why is its gradient not a number?
#
# <details><summary>Answer</summary>
#
# The chain rule goes through both branches. `where` passes 0 to the root that was not chosen, and the root's own derivative
# at a negative number is NaN; 0 times NaN is NaN. `x.clamp(min=1e-6).sqrt()` in the branch helps.
#
# </details>
#
# Crosses mean "not finite". Gradients go from the last layer to the first, so the fault lies behind the last row with
# crosses: after the third layer, where the root is. As all steps were skipped, nothing was learned.

# %%
viz.TensorHeatmap(loaded["root"])

# %% [markdown]
# How long an update is was decided by Adam's formula, whatever the network. What if you want another formula? You write it
# down, in tutorial 7.
#
# ## Exercises
#
# 1. A layer `nn.Linear(256, 256)` has fresh weights, and every gradient is not 0. What is the update ratio of its first step
#    with Adam at the rate 0.002?
# 2. Which rate makes that ratio 0.001?
# 3. How long are Adam's updates from noise alone, over the rate, if $\beta_1$ is 0.99?
#
# Put your answers in place of `None`, and run the cell: it tries them.
#
# <details><summary>Solutions</summary>
#
# 1. The weights are even between -1/16 and 1/16, of the root mean square $1 / (16 \sqrt 3) = 0.0361$: $0.002 / 0.0361 =
#    0.055$.
# 2. $0.001 \cdot 0.0361 = 0.000036$.
# 3. $\sqrt{0.01 / 1.99} = 0.071$.
#
# </details>

# %%
answers = {1: None, 2: None, 3: None}


def first_ratio(rate):
    torch.manual_seed(0)
    layer = nn.Linear(256, 256)
    telemetry = tristep.Telemetry(metrics=["update_ratio"])
    trainer = tristep.Trainer(layer, "adam", {"learning_rate": rate}, telemetry=telemetry)
    layer(torch.randn(64, 256)).square().sum().backward()
    trainer.step(batch_size=64)
    return float(telemetry["update_ratio"][0][telemetry.names.index("weight")])


def noise_of(beta1):
    path = viz.simulate(still, {"adam": {"learning_rate": 1.0, "beta1": beta1}}, steps=20_000).paths[0, 0, 0]
    return float(((path[1001:] - path[1000:-1]) ** 2).mean() ** 0.5)


is_right = {
    1: lambda ratio: abs(ratio / first_ratio(0.002) - 1) < 0.03,
    2: lambda rate: abs(first_ratio(rate) / 0.001 - 1) < 0.03,
    3: lambda length: abs(length / noise_of(0.99) - 1) < 0.1,
}
hints = {
    1: lambda ratio: (
        "1/16 is the largest weight: what is the root mean square of numbers that are even between -1/16 and 1/16?"
        if abs(ratio / 0.032 - 1) < 0.03
        else f"{ratio / first_ratio(0.002):.2g} times what is measured: the first step moves every weight by the rate"
    ),
    2: lambda rate: f"this rate gives the ratio {first_ratio(rate):.2g}, and the ratio is proportional to the rate",
    3: lambda length: (
        "shorter: an average over more steps leaves less of the noise"
        if length > noise_of(0.99)
        else "longer: (1 - beta) / (1 + beta) is the mean square, so take its root"
    ),
}
exercises = viz.Exercises(is_right, hints)
exercises.check(answers)

# %% [markdown]
# ## Open exercises
#
# There is no number to type here. Each exercise names a cell and a change: predict what you will see, change the cell, run
# it, and look. The last cell checks the notebook as it came.
#
# - In "A recorder", train `healthy` with `learning_rate=0.0001`. Where do its lines lie in the `Dashboard`, and has it
#   learned better for that?
#
# <details><summary>What one sees</summary>
#
# They begin at a tenth of the ratio, 0.0012, in the middle of the band, and hardly ever leave it. But the loss is at about 2
# at the end: eight epochs are too few for such a rate. A ratio in the band says that steps are of a usual size, and not that
# there are enough of them.
#
# </details>
#
# - In "Four sick networks", start the third layer's bias at -1 in place of -5. What do its rows look like, and what does
#   `diagnose` say?
#
# <details><summary>What one sees</summary>
#
# They are grey for some 35 steps, and then get colours: the layers before it learn, their outputs grow, and some of its
# units speak up. At the end a quarter of the gradients of its weight is not 0. `diagnose` finds nothing wrong: the layer has
# come alive by itself.
#
# </details>

# %% [markdown]
# What this notebook has said, once more as checks.


# %%
def measured(name, quantity):
    """The values of a quantity, [n_steps, n_parameters]."""
    return runs[name].tensors[quantity].recent()[1]


assert all(abs(ratio[0, i] / foretold[name] - 1) < 0.05 for name, i in place.items())
assert abs(measured_alone / noise_alone - 1) < 0.03
assert (measured("spike", "update_ratio")[-1] < 0.8 * measured("healthy", "update_ratio")[-1])[list(place.values())].all()
exercises.prove({1: 0.055, 2: 0.000036, 3: 0.071}, wrong={1: (0.032, 0.002), 2: (0.001, 0.002), 3: (0.005, 0.1)})
row = healthy.parameters.index
norms = measured("healthy", "gradient_norm")
for alike in (norms[:, ::2], norms[:, 1::2]):  # weights, biases
    assert (alike.max(axis=1) < 10 * alike.min(axis=1)).mean() > 0.9
last_losses = {run.name: run.scalars["loss"].recent()[1][-20:].mean() for run in runs}
assert last_losses["healthy"] < min(last_losses["fast"], last_losses["dead"])
assert max(last_losses["fast"], last_losses["dead"]) < 2 * last_losses["healthy"]
assert abs(measured("fast", "update_ratio")[0, row("first.weight")] / foretold["first.weight"] - 0.1) < 0.01
biases = [i for i, name in enumerate(healthy.parameters) if name.endswith("bias")]
assert (measured("spike", "update_ratio")[110] > 2 * measured("healthy", "update_ratio")[110])[biases].all()
assert not measured("root", "update_ratio").any()
assert accuracy > 0.9
assert is_above[:40].all()
assert is_above.mean() > 0.5
assert not is_above[-10:].any()
assert found["healthy"] == []
assert found["fast"][0].startswith("second.weight: update ratio")
assert "rate is too high" in found["fast"][0]
assert measured("fast", "update_ratio").mean(axis=0).argmax() == row("second.weight")
assert found["dead"][0].startswith("third.weight and third.bias: their gradients are 0 from step 1")
assert found["dead"][0].endswith("the first behind that gets one is last.weight")
assert (measured("dead", "gradient_norm") == 0).all(axis=0).nonzero()[0].tolist() == [row("third.weight"), row("third.bias")]
assert "at step 100" in found["spike"][0]
assert (measured("spike", "gradient_norm")[99] > 5 * measured("spike", "gradient_norm")[98])[::2].all()  # of the weights
assert found["root"][0].startswith("gradients: not finite in 'first.weight' and 5 other tensors at each of 168 steps")
assert (measured("root", "gradient_nonfinite") > 0).all(axis=0).tolist() == 6 * [True] + 2 * [False]
assert [run.name for run in loaded] == [run.name for run in runs]
assert all(viz.diagnose(loaded[name]) == sentences for name, sentences in found.items())
assert page.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
folder.cleanup()
