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
# # Initialisation: why the first weights matter
#
# Tutorial 4 tried its rates at the first weights of a network. How are these to be drawn, that any rate does?
#
# Each layer of a network multiplies the size of what passes through it, and twenty layers multiply it twenty times. This
# notebook derives by how much, measures it for six ways to draw the first weights, forwards and backwards, and compares.
# Then it shows how this changes in the first hundred updates, and how to write your own initializer.

# %%
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

import tristep
from tristep import initializer, viz
from tristep.viz.style import line_style, quieten

DEPTH, WIDTH = 20, 100  # hidden layers, and units in each
UPDATES = 100

torch.set_num_threads(1)  # layers this small gain nothing from more

# %% [markdown]
# ## A deep network, and what passes through it
#
# The data are scikit-learn's images of handwritten digits, scaled so that their mean square is 1. The network is plain:
# twenty layers of a hundred units with ReLU. Nothing in it repairs a bad start, as a norm layer or a shortcut would.
#
# `initializer.initialize` fills all parameters of a module: weights by the initializer that is chosen, biases with zeros. A
# generator makes it repeatable.

# %%
images, labels = (torch.tensor(array) for array in load_digits(return_X_y=True))
images = images.float() - images.float().mean()
images /= images.square().mean().sqrt()


def network(init, activation=nn.ReLU):
    layers = []
    for fan_in in [64] + [WIDTH] * (DEPTH - 1):
        layers += [nn.Linear(fan_in, WIDTH), activation()]
    net = nn.Sequential(*layers, nn.Linear(WIDTH, 10))
    initializer.initialize(net, init, torch.Generator().manual_seed(0))
    return net


def signals(net):
    """What each layer gives before its activation, [images, units], and the loss's gradient with respect to that."""
    sums, x = [], images[:512]
    for layer in net:
        x = layer(x)
        if isinstance(layer, nn.Linear):
            x.retain_grad()
            sums.append(x)
    cross_entropy(x, labels[:512]).backward()
    return [x.detach() for x in sums], [x.grad for x in sums]


# %% [markdown]
# ## One line of theory
#
# A unit adds up $n$ inputs, `WIDTH` of them, each times a weight: $s = \sum_i w_i x_i$. If the weights are independent of
# each other and of the inputs, with mean zero and the variance $v$, all products of different weights are zero in the
# mean:
#
# $$E\,s^2 = \sum_{i,j} E(w_i w_j)\, E(x_i x_j) = \sum_i v\, E\,x_i^2 = n v \cdot \text{mean square of the inputs}$$
#
# The sum is as often positive as negative, and ReLU sets the negative ones to zero: half of the mean square is left. So each
# layer multiplies it by
#
# $$\text{factor} = \tfrac{1}{2}\, n v$$
#
# On the way back the gradient of an input is a sum, too, over the units that it goes to, and half of these were cut off: the
# factor is the same if there are as many units as inputs.
#
# *Guess:* what is left of the mean square behind 20 layers if the factor is 1/2, and if it is 0.9?
#
# <details><summary>Answer</summary>
#
# $0.5^{20}$ is a millionth; $0.9^{20}$ is 0.12. A factor that is a little wrong does little harm in twenty layers, and a
# factor of 2 is the end of it.
#
# </details>
#
# `MSRAPrelu(slope=0)`, which is He's initialisation, takes `v = 2 / width` and has the factor 1. `Xavier` takes
# `v = 1 / width`, which is right without a ReLU, and loses half in each layer with one.
# `Orthogonal` gives rows of length √2 by default. `Uniform(0.07)` is what MXNet takes if nothing is said.

# %%
inits = {
    "MSRAPrelu (He)": (initializer.MSRAPrelu(slope=0), 2 / WIDTH),
    "Orthogonal": (initializer.Orthogonal(), 2 / WIDTH),
    "Xavier": (initializer.Xavier(), 1 / WIDTH),
    "Normal(0.2)": (initializer.Normal(0.2), 0.2**2),
    "Uniform(0.07)": (initializer.Uniform(0.07), 0.07**2 / 3),
    "Zero": (initializer.Zero(), 0),
}


def mean_squares(tensors):
    return [t.double().square().mean().item() for t in tensors]


forward, back, measured = {}, {}, {}
print("factor of a layer    theory  forwards  backwards")
for name, (init, variance) in inits.items():
    activations, gradients = signals(network(init))
    forward[name], back[name] = mean_squares(activations), mean_squares(gradients)
    if name == "Zero":
        print(f"{name:<20} {0:7.3f}   nothing gets through")
        continue
    second, last = 1, DEPTH - 1  # the first layer has 64 inputs, and what follows the last one no ReLU
    onwards = (forward[name][last] / forward[name][second]) ** (1 / (last - second))
    backwards = (back[name][second] / back[name][last]) ** (1 / (last - second))
    measured[name] = 0.5 * WIDTH * variance, onwards, backwards
    print("{:<20} {:7.3f}  {:8.3f}  {:9.3f}".format(name, *measured[name]))

# %% [markdown]
# Measured factors differ a little from the theory because a hundred units are few. Over twenty layers the difference between
# 1 and 1/2 is that between 1 and a millionth:

# %%
figure = viz.Figure(9.5, 4)
figure.set_layout_engine("constrained")
for axes, values, what in zip(figure.subplots(1, 2), (forward, back), ("sums of units", "gradients"), strict=True):
    for i, (name, curve) in enumerate(values.items()):
        if name != "Zero":  # a logarithmic axis has no place for it
            axes.semilogy(range(1, DEPTH + 1), curve[:DEPTH], label=name, **line_style(i))
    axes.set(xlabel="layer", ylabel=f"mean square of {what}", xticks=range(2, DEPTH + 1, 3))
    quieten(axes)
figure.legend(*axes.get_legend_handles_labels(), loc="outside right center", frameon=False, fontsize=9)
figure

# %% [markdown]
# ## Histograms at the start
#
# The same in another way: how the sums of layers 1, 7, 14 and 20 are distributed, over all images and units. Each panel has
# its own axis, whose width is the thing to read. With a good start it changes little along a row, here to about a third.
# With `Xavier` it falls to less than a hundredth, and with `Uniform(0.07)` below a billionth.

# %%
shown, at = ["MSRAPrelu (He)", "Xavier", "Uniform(0.07)"], [1, 7, 14, 20]
figure = viz.Figure(9.5, 4.6)
figure.set_layout_engine("constrained")
for name, line in zip(shown, figure.subplots(3, 4), strict=True):
    sums, _ = signals(network(inits[name][0]))
    for layer, axes in zip(at, line, strict=True):
        values = sums[layer - 1].flatten()
        axes.hist(values.numpy(), bins=50, color=line_style(list(inits).index(name))["color"])
        reach = 4 * values.std().item()
        axes.set(xlim=(-reach, reach), yticks=[], xticks=[-reach / 2, 0, reach / 2])
        axes.set_xticklabels([f"{-reach / 2:.1g}", "0", f"{reach / 2:.1g}"])
        axes.set_title(f"{name}, layer {layer}", fontsize=9)
        quieten(axes, 8)
        axes.spines["left"].set_visible(False)
figure

# %% [markdown]
# ## The first hundred updates
#
# A start also decides which learning rates work, so a comparison at one rate would not be fair. Each initialisation is
# trained at five rates, and the one with the lowest loss at the end is kept.


# %%
def first_updates(net, rate):
    """The losses of the first updates of SGD with momentum."""
    trainer = tristep.Trainer(net, "sgd", {"learning_rate": rate, "momentum": 0.9})
    draw, losses = torch.Generator().manual_seed(0), []
    for _ in range(UPDATES):
        batch = torch.randint(len(images), (64,), generator=draw)
        loss = cross_entropy(net(images[batch]), labels[batch])
        trainer.zero_grad()
        loss.backward()
        trainer.step(batch_size=1)  # the loss is a mean already
        losses.append(loss.item())
    return losses


def at_its_best_rate(init):
    runs = {rate: first_updates(network(init), rate) for rate in (0.00001, 0.0001, 0.003, 0.03, 0.1)}
    ends = {rate: torch.tensor(losses[-20:]).mean().nan_to_num(torch.inf).item() for rate, losses in runs.items()}
    rate = min(ends, key=ends.get)
    return runs[rate], rate, ends[rate]


curves, notes, ends = {}, {}, {}
for name in ["MSRAPrelu (He)", "Orthogonal", "Xavier", "Normal(0.2)", "Uniform(0.07)"]:
    curves[name], rate, ends[name] = at_its_best_rate(inits[name][0])
    notes[name] = f"best rate {rate:g}"

viz.plot_training(curves, notes=notes, title="A hundred updates, each start at its own best rate")

# %% [markdown]
# `Uniform(0.07)` stays at ln 10 = 2.3, the loss of guessing among ten digits: next to no gradient reaches its first layers.
# With zeros everywhere no weight would ever move; only the last bias would learn how frequent each digit is. `Normal(0.2)`
# begins with a loss in the hundreds, and can only be trained at a rate that is small for all that follows.
#
# ## Other activations, other factors
#
# With tanh, which is close to the identity for small values, nothing is set to zero. There `Xavier` has the factor 1 as long
# as values are small. He's initialisation has twice as much and drives some units close to -1 and 1, where tanh passes
# little gradient, and `Normal(0.2)` drives more of them there.

# %%
tanh = {name: signals(network(inits[name][0], nn.Tanh))[0] for name in ("Xavier", "MSRAPrelu (He)", "Normal(0.2)")}
saturated = {name: (sums[-2].tanh().abs() > 0.9).float().mean().item() for name, sums in tanh.items()}
for name, share in saturated.items():
    print(f"{name:<15} share of tanh units beyond 0.9 in layer {DEPTH}: {share:.1%}")

# %% [markdown]
# ## An initializer of your own
#
# It is a class with one method, `_init_weight`, which fills a tensor. This is the sparse start of Martens ("Deep learning
# via Hessian-free optimization", 2010), where each unit listens to a few inputs only, with the variance chosen so that the
# factor is 1. `register` makes it known by its name in lower case, and `name.generator` is the one that `initialize` was
# given.


# %%
@initializer.register
class Sparse(initializer.Initializer):
    def __init__(self, inputs=15):
        self.inputs = inputs
        super().__init__(inputs=inputs)

    def _init_weight(self, name, arr):
        chosen = torch.rand(arr.shape, generator=name.generator).argsort(dim=1)[:, : self.inputs]
        drawn = torch.randn(chosen.shape, generator=name.generator) * (2 / self.inputs) ** 0.5
        arr.zero_().scatter_(1, chosen, drawn)


net = network("sparse")
per_unit = (net[2].weight != 0).sum(dim=1)
curves["Sparse"], rate, ends["Sparse"] = at_its_best_rate("sparse")
print(f"{per_unit.unique().tolist()} weights of each unit are not zero; {initializer.create('sparse', inputs=5).dumps()}")
print(f"loss after {UPDATES} updates at rate {rate:g}: {ends['Sparse']:.3f}")

# %% [markdown]
# ## Different parameters, different starts
#
# `Mixed` chooses by regular expressions, which are held against the beginning of the parameter's name; the first that fits
# decides. A single parameter may also have an initializer of its own, as its attribute `init`.
#
# Here the last layer starts at zero. Then the first outputs are all alike and the first loss is ln 10 exactly, and the first
# update trains the last layer alone; from the second one on the others learn, too.

# %%
last = str(2 * DEPTH)
mixed = initializer.Mixed([last, ".*"], ["zeros", initializer.MSRAPrelu(slope=0)])
net = network(mixed)
first_loss = cross_entropy(net(images), labels)
first_loss.backward()
reached = [name for name, parameter in net.named_parameters() if parameter.grad.any()]
print(f"first loss {first_loss.item():.6f}; gradients that are not zero: {reached}")

net[0].bias.init = initializer.Constant(0.1)
initializer.initialize(net, mixed)
print("biases of the first layer:", net[0].bias[:3].tolist(), "of the second:", net[2].bias[:3].tolist())

# %% [markdown]
# These are the first hundred updates. Much can go wrong in the thousands after them, in one layer of many. How would one see
# it? Tutorial 6 looks into trainings.
#
# ## Exercises
#
# 1. A leaky ReLU multiplies negative sums by 0.2 instead of 0. Which variance of the weights gives the factor 1?
# 2. Dropout sets half of a layer's outputs to zero and doubles the others. Which variance gives the factor 1 with ReLU and
#    dropout?
# 3. Behind how many layers of the factor 1/2 is the mean square for the first time below a thousandth?
#
# All layers have 100 inputs. Put your answers in place of `None`, and run the cell: it tries them.
#
# <details><summary>Solutions</summary>
#
# 1. Of the mean square, $(1 + 0.2^2) / 2$ is left: $v = 2 / (1.04 \cdot 100) = 0.0192$. `MSRAPrelu(slope=0.2)` takes it.
# 2. Dropout multiplies the mean square by $\tfrac{1}{2} \cdot 2^2 = 2$, ReLU by 1/2: $v = 1 / 100$, as `Xavier` has it.
# 3. 10: $2^{10} = 1024$.
#
# </details>

# %%
answers = {1: None, 2: None, 3: None}


def layer_factor(variance, activation):
    """By how much a layer of 100 inputs, and so many units that chance has no say, multiplies the mean square."""
    draw = torch.Generator().manual_seed(0)
    inputs = torch.randn(1000, 100, generator=draw)
    weights = variance**0.5 * torch.randn(4000, 100, generator=draw)
    return (activation(inputs @ weights.T).square().mean() / inputs.square().mean()).item()


dropped = nn.Sequential(nn.ReLU(), nn.Dropout(0.5))
is_right = {
    1: lambda variance: abs(layer_factor(variance, nn.LeakyReLU(0.2)) - 1) < 0.03,
    2: lambda variance: abs(layer_factor(variance, dropped) - 1) < 0.03,
    3: lambda layers: 0.5**layers < 0.001 <= 0.5 ** (layers - 1),
}
hints = {
    1: lambda variance: (
        f"this variance multiplies the mean square by {layer_factor(variance, nn.LeakyReLU(0.2)):.2f}; of the negative half "
        "0.2 squared is left"
    ),
    2: lambda variance: (
        f"this variance multiplies the mean square by {layer_factor(variance, dropped):.2f}; "
        "what does dropout do to a mean square by itself?"
    ),
    3: lambda layers: (
        f"behind {layers} layers it is {0.5**layers:.2g}, not yet below a thousandth"
        if 0.5**layers >= 0.001
        else f"behind {layers - 1} layers it is {0.5 ** (layers - 1):.2g}, below a thousandth already"
    ),
}
exercises = viz.Exercises(is_right, hints, kinds={3: "count"})
exercises.check(answers)

# %% [markdown]
# ## Open exercises
#
# There is no number to type here. Each exercise names a cell and a change: predict what you will see, change the cell, run
# it, and look. The last cell checks the notebook as it came.
#
# - In the dict `inits`, draw from a wider range: `(initializer.Uniform(0.245), 0.245**2 / 3)`. It is the worst of those that
#   let anything through. Is it still?
#
# <details><summary>What one sees</summary>
#
# It is as good as He's: $0.245^2 / 3 = 0.02 = 2 / 100$, so its factor is 1. The theory asks for the variance alone, and not
# for how weights are distributed.
#
# </details>
#
# - In "Other activations", add `"Uniform(0.07)"` to the names. Which share of its tanh units is close to -1 or 1, and is
#   that a good sign?
#
# <details><summary>What one sees</summary>
#
# None, and it is no good sign. The factor is $n v = 0.16$ a layer, and the last layers say next to nothing: look at
# `mean_squares(tanh["Uniform(0.07)"])`. A start can be too small as well as too large.
#
# </details>

# %% [markdown]
# What this notebook has said, once more as checks.

# %%
exercises.prove({1: 0.0192, 2: 0.01, 3: 10}, wrong={1: (0.01, 0.02), 2: (0.02, 0.04), 3: (9, 12)})
assert all(0.6 < way / theory < 1.5 for theory, *ways in measured.values() for way in ways)
assert forward["Zero"][0] == back["Zero"][0] == 0
assert forward["Xavier"][-2] < 1e-4 * forward["MSRAPrelu (He)"][-2] < 1e-4 * forward["Normal(0.2)"][-2]
assert max(ends["MSRAPrelu (He)"], ends["Orthogonal"]) < 1.2 < 1.4 < min(ends["Xavier"], ends["Normal(0.2)"])
assert ends["Uniform(0.07)"] > 2.25
assert curves["Normal(0.2)"][0] > 100
narrower = {name: (forward[name][0] / forward[name][DEPTH - 1]) ** 0.5 for name in shown}
assert narrower["MSRAPrelu (He)"] < 5
assert narrower["Xavier"] > 100
assert narrower["Uniform(0.07)"] > 1e9
wider, _ = signals(network(initializer.Uniform(0.245)))  # of the open exercises
assert 0.8 < (mean_squares(wider)[DEPTH - 1] / mean_squares(wider)[1]) ** (1 / (DEPTH - 2)) < 1.2
small, _ = signals(network(initializer.Uniform(0.07), nn.Tanh))
assert mean_squares(small)[DEPTH - 1] < 1e-9
assert not (small[-2].tanh().abs() > 0.9).any()
assert saturated["Xavier"] < 0.01 < 0.03 < saturated["MSRAPrelu (He)"] < saturated["Normal(0.2)"]
assert per_unit.unique().tolist() == [15]
assert ends["Sparse"] < 2.1
assert torch.isclose(first_loss, torch.tensor(10.0).log())
assert reached == [f"{last}.weight", f"{last}.bias"]
assert (net[0].bias == 0.1).all()
assert not net[2].bias.any()
