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
# # Optimizers compared: which one, and at what rate?
#
# Several optimizers run on functions of two variables, each at its own best learning rate, and curves and maps show how
# they do at other learning rates and from other starts. One of them is then opened up, update by update, next to its rule.
# At the end three of them train a real network on handwritten digits, and their trajectories are drawn on its loss surface.
#
# In JupyterLab the pictures are interactive once their cells have been run: sliders move, a click moves the start. A page
# such as a code host's shows the same as a picture.

# %%
import torch
from sklearn.datasets import load_digits
from torch import nn

import tristep
from tristep import viz

torch.set_num_threads(1)  # layers this small gain nothing from more

# %% [markdown]
# ## A fair comparison
#
# What an optimizer does at one rate says little about it: each has its own scale. So 41 rates are tried for each of these
# four, from 0.0001 to 10 and from nine starts near the ring, and each runs at the one that gave the least loss after 200
# steps.
#
# Rosenbrock's function is a bent valley. Its floor is found at once; to follow it to the minimum, the star, takes long.
#
# The first slider multiplies all rates by one factor, so that one sees who bears a rate that is wrong. A click or a drag of
# the ring lets all of them run from another place.

# %%
candidates = {
    "sgd": {},
    "momentum": {"optimizer": "sgd", "momentum": 0.9},
    "adam": {},
    "lion": {},
}
rosenbrock = viz.TrajectoryView("rosenbrock", candidates, steps=200)
rosenbrock

# %% [markdown]
# Himmelblau's function has four minima, all equally deep. From a start between them the winner is not the question: not all
# arrive at the same. Every view says in words what it shows; here are the words alone.

# %%
himmelblau = viz.TrajectoryView("himmelblau", candidates, start=(-0.3, 0.3), steps=100, factors=(1.0,))
print(himmelblau.describe().replace(". ", ".\n"))

# %% [markdown]
# The gradients of small batches are noisy. In this ravine noise is added to each gradient, the same for all three. At a
# constant rate nobody comes to rest: how far from the minimum one keeps jumping depends on the rate, and on how long
# gradients are averaged.

# %%
ravine = viz.TrajectoryView("noisy_ravine", {name: candidates[name] for name in ("sgd", "momentum", "adam")}, steps=120)
ravine

# %% [markdown]
# ## At what rate?
#
# The same for all rates in one picture. Each curve is the median over 16 starts, the band holds the middle half of them, and
# the star is the best rate. Where a curve ends on the right, half of the starts or more diverged: the best rates of sgd and
# momentum are the last ones before that. Those of the others lie in troughs. A wide trough is worth as much as a deep one,
# because a guess is good enough there.

# %%
sensitivity = viz.SensitivityView("rosenbrock", candidates, steps=200)
print(sensitivity.describe().replace(". ", ".\n"))
rates_of = dict(zip(sensitivity.found.names, sensitivity.found.best.tolist(), strict=True))
sensitivity

# %% [markdown]
# ## From which start?
#
# On Himmelblau's function again, every point of the plane is a start; its colour is the minimum in which it ends, grey if in
# none. At small rates the regions have smooth borders. At large ones points that lie side by side end in different minima,
# and then in none. The choice and the slider show the other optimizer and other rates.

# %%
basins = viz.BasinMap("himmelblau", {"sgd": {}, "adam": {}}, n=96, steps=200)
basins

# %% [markdown]
# ## Inside one update
#
# MXNet's page on optimizers gives each as a formula. For Adam, with the gradient $g$ at step $t$:
#
# $$m = \beta_1 m + (1 - \beta_1)\,g \qquad v = \beta_2 v + (1 - \beta_2)\,g^2 \qquad
# w = w - \eta\,\frac{\sqrt{1 - \beta_2^t}}{1 - \beta_1^t}\,\frac{m}{\sqrt{v} + \epsilon}$$
#
# The text of the rule is shown below; it is what the engines compile, and what ran in the comparisons above. The bowl is a
# hundred times as steep along y as along x. The slider goes through the updates, and arrows show the directions of the
# gradient, of its average, and of the update itself, in which Adam has evened out the steepness. In JupyterLab every
# hyper-parameter has a slider, and function and optimizer can be changed.

# %%
playground = viz.Playground("ill_conditioned_bowl", "adam", against=["sgd"], steps=100)
playground

# %% [markdown]
# The same numbers can be had without a picture. The first update of Adam is $\eta$ times the sign of the gradient, nearly:
# after one step $m$ and $\sqrt{v}$, both corrected, are the gradient and its absolute value.

# %%
trace = viz.trace_updates("ill_conditioned_bowl", {"optimizer": "adam", "learning_rate": 0.1}, steps=1)
print("gradient", trace.gradients[0])
print("update  ", trace.updates[0])
print()
for name in ("sgd", "lion"):
    print(viz.rule_source(name))

# %% [markdown]
# ## Your own function, your own rule
#
# A function is an expression in `x` and `y`; as a `Function` it can have a start and known minima. A rule may be a plain
# function from point, gradient, a dict of its own and the rate to the new point. Here is one in two lines: the gradient, but
# never longer than one. It is run point by point, which is slow compared with compiled rules, and its best rate is found
# like that of all others.


# %%
def short_steps(point, gradient, state, lr):
    return point - lr * gradient / max(1.0, float(gradient.norm()))


trough = viz.Function(
    "a trough of your own",
    "log(1 + 20 * x**2 + (y + sin(2 * x))**2)",
    xlim=(-2, 2),
    ylim=(-2, 2),
    start=(-1.5, -1.0),
    minima=[(0, 0, 0)],
)
own = viz.TrajectoryView(trough, {"sgd": {}, "adam": {}, "short steps": short_steps}, steps=60, factors=(0.5, 1.0, 2.0))
own

# %% [markdown]
# ## A real network
#
# Functions of two variables show what an optimizer does, and not which is good for a network. So three of them train one on
# 1,347 images of handwritten digits. Fairness asks for the best rate of each here, too: `tristep.sweep` trains a copy of the
# network at each of eight rates, all at once, and takes the one with the least loss in the last of ten epochs.

# %%
images, labels = (torch.tensor(array) for array in load_digits(return_X_y=True))
images = images.float() / 16
order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
train, test = order[:1347], order[1347:]
batches = [(images[batch], labels[batch]) for batch in train.split(64)]
loss = nn.CrossEntropyLoss()


def network():
    return nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))


rates = {
    "sgd": [0.003, 0.01, 0.03, 0.1, 0.2, 0.3, 0.5, 1.0],
    "adam": [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2],
    "lion": [0.0001, 0.0003, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05],
}
others = {"sgd": {"momentum": 0.9}, "adam": {}, "lion": {}}
best = {}
for name, tried in rates.items():
    found = tristep.sweep(
        network, loss, batches, optimizer=name, optimizer_params=others[name], grid={"learning_rate": tried}, epochs=10
    )
    best[name] = found.best()["learning_rate"]
    print(f"{name:<5} best at {best[name]:<6} loss there {found.final[found.at(**found.best())]:.4f}")

# %% [markdown]
# Now each trains once more, and a `WeightPath` keeps the network's 2,410 weights after every step. `loss_plane` then takes
# the two directions along which all three trainings together moved most, and computes the loss over the plane of these two.
# The slider goes through the steps; what is left out of the plane is said in the words that come with the picture.

# %%
paths, scores = [], {}
for name in best:
    torch.manual_seed(0)  # every training starts at the same weights
    net = network()
    trainer = tristep.Trainer(net, name, {"learning_rate": best[name], **others[name]})
    path = viz.WeightPath(net, name)
    path.step()
    for _ in range(10):
        for inputs, targets in batches:
            trainer.zero_grad()
            loss(net(inputs), targets).backward()
            trainer.step(1)
            path.step()
    paths.append(path)
    scores[name] = (net(images[test]).argmax(dim=1) == labels[test]).float().mean().item()

plane = viz.loss_plane(net, loss, (images[train], labels[train]), paths, n=41)
ways = viz.LossPlaneView(plane, title="Three ways from one start")
print(ways.describe().replace(". ", ".\n"))
ways

# %% [markdown]
# All three find a low loss, at places that lie far from each other and from the start. The lowest loss of the training
# images need not make the best network. These are 450 images that nobody trained on, so that one image is 0.2 %:

# %%
for name, score in scores.items():
    print(f"{name:<5} at rate {best[name]:<6} test accuracy {score:.1%}")

# %% [markdown]
# The short answer: compare optimizers only with each at its own rate, look at how wide the trough is and not only how deep,
# and expect little difference on a task as easy as this one. What this notebook has said, once more as checks.

# %%
assert rates_of["sgd"] == rates_of["momentum"] < rates_of["lion"] < rates_of["adam"]
reached = {tuple(path[-1].round().tolist()) for path in himmelblau.trajectories.paths[:, 0, 0]}
assert len(reached) == 2  # minima
shares = [(found.reached >= 0).mean() for found in basins.basins["sgd"]]
assert shares[6] > 0.99  # at the best rate
assert shares[-1] < 0.01  # at thirty times that
assert abs(trace.updates[0] + 0.1 * torch.tensor(trace.gradients[0]).sign().numpy()).max() < 1e-6
assert set(own.best) == {"sgd", "adam", "short steps"}
assert all(losses[-1] < losses[0] / 10 for losses in plane.losses.values())
assert min(scores.values()) > 0.9
