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
# Tutorial 1 left a question open: Adam was ahead of SGD, each at a rate that somebody had chosen; is it the better one, or
# the one with the better rate? To compare them one has to know what a rate does.
#
# First three questions that a bowl answers with pencil and paper: how large a rate may be, why some problems take so many
# steps, and what momentum does about it. Then several optimizers run on functions of two variables, each at its own best
# learning rate, and curves show how they do at other learning rates. One of them is opened up, update by update, next to its
# rule. At the end three of them train a real network on handwritten digits, and their trajectories are drawn on its loss
# surface.
#
# In JupyterLab the pictures are interactive once their cells have been run: sliders move, a click moves the start. A page
# such as a code host's shows the same as a picture. Questions have folded answers: guess first, then run the cell, then
# unfold. The exercises at the end are checked by a cell.

# %%
import math

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn

import tristep
from tristep import viz

torch.set_num_threads(1)  # layers this small gain nothing from more

# %% [markdown]
# ## How large may a rate be?
#
# Close to a minimum every smooth function is a bowl: along each of its axes it is $\tfrac{1}{2} \lambda w^2$, with a
# curvature $\lambda$. The gradient is $\lambda w$, so a step of gradient descent with the rate $\eta$ makes of $w$
#
# $$w_{t+1} = w_t - \eta \lambda w_t = (1 - \eta \lambda)\, w_t$$
#
# Each step multiplies by the same factor. The minimum is reached if $|1 - \eta \lambda| < 1$, that is, if
# $0 < \eta < 2 / \lambda$. Beyond $1 / \lambda$ the factor is negative: every step jumps over the minimum. Of several
# curvatures the largest, $L$, sets the limit: **a rate must be below $2 / L$**.
#
# *Guess:* the bowl $(x^2 + 100\,y^2) / 2$ has the curvatures 1 and 100, and $2 / L = 0.02$. What do $x$ and $y$ do in 60
# steps at the rate 0.021?
#
# <details><summary>Answer</summary>
#
# A step multiplies $x$ by $1 - 0.021 = 0.979$, and $y$ by $1 - 2.1 = -1.1$. After 60 steps $x$ is $0.979^{60} = 0.28$ of
# what it was, still on its way, and $y$ has changed its sign 60 times and is $1.1^{60} = 304$ times as large. One steep
# direction is enough to diverge.
#
# </details>

# %%
bowl = viz.ill_conditioned_bowl(100)
few_rates = [0.002, 0.012, 0.019, 0.021]
descents = viz.simulate(bowl, "sgd", (1.0, 1.0), 60, learning_rates=few_rates).paths[0, :, 0]  # [rates, steps + 1, x and y]
print("rate     a step multiplies x and y by     theory            after 60 steps")
for rate, path in zip(few_rates, descents, strict=True):
    x, y = path[1] / path[0]
    print(f"{rate:<8} {x:14.3f} {y:8.3f} {1 - rate:16.3f} {1 - 100 * rate:8.3f} {path[-1, 0]:14.3f} {path[-1, 1]:9.3g}")

# %% [markdown]
# ## The condition number
#
# The steep direction limits the rate, and the flat one, of the least curvature $\mu$, then takes long. The best rate makes
# both equally fast: $1 - \eta \mu = -(1 - \eta L)$ gives $\eta = 2 / (\mu + L)$, and each step multiplies the error by
#
# $$\frac{L - \mu}{L + \mu} = \frac{\kappa - 1}{\kappa + 1} \qquad \text{with the condition number} \quad \kappa = L / \mu$$
#
# For an error of $\epsilon$ it takes $\ln(1 / \epsilon) / \ln\frac{\kappa + 1}{\kappa - 1}$ steps, which is about
# $\tfrac{1}{2} \kappa \ln(1 / \epsilon)$: **the number of steps grows with the condition number**. `settled` of a simulation
# is the number of steps until the loss is a millionth of what it was, so the error a thousandth.

# %%
print("condition    steps    theory")
needed = {}
for condition in (10, 100, 1000):
    best_rate = 2 / (1 + condition)
    found = viz.simulate(viz.ill_conditioned_bowl(condition), "sgd", steps=4 * condition, learning_rates=[best_rate])
    needed[condition] = int(found.settled[0, 0, 0])
    print(f"{condition:<9} {needed[condition]:8} {math.log(1000) / math.log((condition + 1) / (condition - 1)):9.1f}")

# %% [markdown]
# ## What momentum does
#
# Momentum adds up steps: $v_{t+1} = \beta v_t - \eta \lambda w_t$ and $w_{t+1} = w_t + v_{t+1}$. Without $v$, as $v_t$ is
# $w_t - w_{t-1}$:
#
# $$w_{t+1} = (1 + \beta - \eta \lambda)\, w_t - \beta\, w_{t-1}$$
#
# What is $z$ times as large at each step solves $z^2 - (1 + \beta - \eta \lambda)\, z + \beta = 0$. The product of the two
# solutions is $\beta$, and there are three cases.
#
# - $\eta \lambda < (1 - \sqrt{\beta})^2$: both are real and positive. The path never turns back; the larger one, above
#   $\sqrt{\beta}$, says how fast.
# - Beyond that they are complex. The path oscillates, and both have the absolute value $\sqrt{\beta}$: **the error
#   shrinks by $\sqrt{\beta}$ a step, whatever rate and curvature are**.
# - Above $(1 + \sqrt{\beta})^2$ they are real and negative. One of them is $-1$ at $\eta \lambda = 2 (1 + \beta)$, where it
#   begins to diverge: momentum bears up to twice the rate.
#
# It is best to have all curvatures in the second case with as little $\beta$ as possible. At both ends of the case this
# means $\eta \mu = (1 - \sqrt{\beta})^2$ and $\eta L = (1 + \sqrt{\beta})^2$, with the solution
#
# $$\sqrt{\beta} = \frac{\sqrt{\kappa} - 1}{\sqrt{\kappa} + 1} \qquad \eta = \Big(\frac{2}{\sqrt{L} + \sqrt{\mu}}\Big)^2$$
#
# It is the formula of gradient descent with $\sqrt{\kappa}$ in place of $\kappa$ (Polyak 1964).
#
# *Guess:* how many times fewer steps does momentum need on a bowl of condition 25?
#
# <details><summary>Answer</summary>
#
# Without, a step multiplies the error by $24 / 26 = 0.923$; with the best momentum, $(4 / 6)^2 = 0.44$, by $4 / 6 =
# 0.667$. As $\ln 0.667 / \ln 0.923 = 5.1$, it needs five times fewer: the square root of 25. At the very best point two
# solutions coincide, which costs a few steps more in the beginning.
#
# </details>
#
# The map below is "Why Momentum Really Works" (Goh 2017) with our own rules: each cell is a training with one rate and one
# momentum. It is dark where few steps are needed, and white where the loss grows. A click, or a drag across the map, shows
# the path of a cell at the right.

# %%
map_rates = [round(0.005 * k, 3) for k in range(1, 33)]
map_momenta = [round(0.025 * k, 3) for k in range(40)]
settings = {"learning_rates": map_rates, "sweep": {"momentum": map_momenta}}
over_both = viz.simulate(viz.ill_conditioned_bowl(25), ["momentum", "nag"], (-1.8, 0.3), 100, **settings)
viz.SweepView(over_both)

# %% [markdown]
# *Guess:* the black line leans to the right: with momentum $\beta$ it is at $2 (1 + \beta) / L$. Choose "nag", Nesterov's
# momentum, which takes the gradient where momentum alone would lead. Does its line lean to the right, too?
#
# <details><summary>Answer</summary>
#
# To the left. The gradient is taken at $w_t + \beta (w_t - w_{t-1})$, so both terms are multiplied by $1 - \eta \lambda$:
# $z^2 - (1 + \beta)(1 - \eta \lambda)\, z + \beta (1 - \eta \lambda) = 0$. The solution $-1$ is at $\eta \lambda = 2 (1 +
# \beta) / (1 + 2 \beta)$, which goes from 2 down to 4/3. In return the absolute value is $\sqrt{\beta (1 - \eta
# \lambda)}$: steep directions are damped more than flat ones, and at high momentum the path swings less.
#
# </details>
#
# ## A fair comparison
#
# What an optimizer does at one rate says little about it: each has its own scale. So 41 rates are tried for each of these
# four, from 0.0001 to 10 and from nine starts near the ring, and each runs at the one that gave the least loss after 200
# steps. "momentum" is SGD with a momentum of 0.9, in all views.
#
# Rosenbrock's function is a bent valley. Its floor is found at once; to follow it to the minimum, the star, takes long.
#
# The first slider multiplies all rates by one factor, so that one sees who bears a rate that is wrong. A click or a drag of
# the ring lets all of them run from another place.

# %%
candidates = ["sgd", "momentum", "adam", "lion"]
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
# gradients are averaged. [Tutorial 3](03_learning_rate_schedules.ipynb) derives how far.

# %%
ravine = viz.TrajectoryView("noisy_ravine", ["sgd", "momentum", "adam"], steps=120)
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
# ## Inside one update
#
# MXNet's page on optimizers gives each as a formula. For Adam, with the gradient $g$ at step $t$:
#
# $$m = \beta_1 m + (1 - \beta_1)\,g \qquad v = \beta_2 v + (1 - \beta_2)\,g^2 \qquad
# w = w - \eta\,\frac{\sqrt{1 - \beta_2^t}}{1 - \beta_1^t}\,\frac{m}{\sqrt{v} + \epsilon}$$
#
# The fraction in the middle corrects a bias. Both averages begin at zero. Written out,
# $m_t = (1 - \beta_1) \sum_{k=1}^{t} \beta_1^{t-k} g_k$. If the gradients have the mean $\bar g$, the mean of $m_t$ is
#
# $$(1 - \beta_1)\,(1 + \beta_1 + \dots + \beta_1^{t-1})\;\bar g = (1 - \beta_1^t)\;\bar g$$
#
# so that dividing by $1 - \beta_1^t$ makes it right, and likewise for $v$.
#
# *Guess:* with 0.9 and 0.999, would the first steps be too short or too long without it?
#
# <details><summary>Answer</summary>
#
# Too long. After one step $m$ is a tenth of what it should be, but $v$ is a thousandth, and its root a 32nd: the step is
# $0.1 / \sqrt{0.001} = 3.2$ times too long. It gets worse at first, up to 6.6 times at step 12, as $m$ fills up sooner
# than $v$.
#
# </details>
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
# after one step $m$ and $\sqrt{v}$, both corrected, are the gradient and its absolute value. On a slope, where the gradient
# is the same everywhere, this holds for all updates; the last column has what they would be without the correction.

# %%
trace = viz.trace_updates("ill_conditioned_bowl", {"optimizer": "adam", "learning_rate": 0.1}, steps=1)
print("gradient", trace.gradients[0])
print("update  ", trace.updates[0])
print()
slope = viz.trace_updates("3 * x + y", {"optimizer": "adam", "learning_rate": 0.1}, steps=200)
uncorrected = 0.1 * slope.states["mean"][1:, 0] / slope.states["var"][1:, 0] ** 0.5
for t in (1, 3, 12, 30, 200):
    print(f"update {t:<4} on a slope {slope.updates[t - 1, 0]:.4f}, without correction {-uncorrected[t - 1]:.4f}")
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
# and expect little difference on a task as easy as this one. That answers tutorial 1: at its own rate each of them does it.
#
# All of these rates were the same from the first update to the last. Should they be? Tutorial 3 asks that.
#
# ## Exercises
#
# 1. A bowl has the curvatures 4 and 50. What is the largest rate at which SGD converges?
# 2. And with a momentum of 0.8?
# 3. A bowl has the curvatures 1 and 100, and the rate is $(2 / 11)^2$. Which momentum is the fastest?
# 4. How many times too long is Adam's first step without correction if $\beta_1$ is 0.5 and $\beta_2$ is 0.9?
#
# Put your answers in place of `None`, and run the cell: it tries them.
#
# <details><summary>Solutions</summary>
#
# 1. $2 / 50 = 0.04$: the larger curvature sets the limit.
# 2. $2 (1 + 0.8) / 50 = 0.072$.
# 3. $((\sqrt{100} - 1) / (\sqrt{100} + 1))^2 = (9 / 11)^2 = 0.669$.
# 4. $(1 - 0.5) / \sqrt{1 - 0.9} = 1.58$.
#
# </details>

# %%
answers = {1: None, 2: None, 3: None, 4: None}


def grows(rate, momentum=0.0):
    """Whether the loss grows in 2,000 steps on the bowl of exercises 1 and 2."""
    steep = viz.Function("curvatures 4 and 50", "(4 * x**2 + 50 * y**2) / 2")
    sgd = {"optimizer": "sgd", "momentum": momentum, "learning_rate": rate}
    return viz.simulate(steep, {"sgd": sgd}, steps=2000).growth[0, 0, 0] > 1


def fastest_momentum():
    """The one of many that leaves the least loss on the bowl of exercise 3."""
    many = np.arange(0.5, 0.95, 0.005)
    found = viz.simulate(bowl, {"sgd": {"learning_rate": (2 / 11) ** 2}}, steps=150, sweep={"momentum": many.tolist()})
    return many[found.growth[0, :, 0].argmin()]


def too_long(beta1, beta2):
    """Adam's first step without correction, over the one with it."""
    adam = {"optimizer": "adam", "learning_rate": 1.0, "beta1": beta1, "beta2": beta2}
    first = viz.trace_updates("x + y", adam, steps=1)
    return abs(first.states["mean"][1, 0] / first.states["var"][1, 0] ** 0.5 / first.updates[0, 0])


is_right = {
    1: lambda rate: grows(1.02 * rate) and not grows(0.98 * rate),
    2: lambda rate: grows(1.02 * rate, 0.8) and not grows(0.98 * rate, 0.8),
    3: lambda momentum: abs(momentum - fastest_momentum()) < 0.02,  # so many steps are not yet the long run
    4: lambda times: abs(times / too_long(0.5, 0.9) - 1) < 0.01,
}
hints = {
    1: lambda rate: (
        "at this rate the loss grows; which of the two curvatures sets the limit?"
        if grows(rate)
        else "this rate converges, but larger ones do, too: when is the factor 1 - rate * curvature exactly -1?"
    ),
    2: lambda rate: (
        "at this rate the loss grows, also with momentum: how many times larger is the limit with it?"
        if grows(rate, 0.8)
        else "larger rates converge, too: momentum beta moves the limit from 2 / L to 2 (1 + beta) / L"
    ),
    3: lambda momentum: (
        "with less momentum it is faster: put the root of the condition number, 10, into the formula"
        if momentum > fastest_momentum()
        else "with more momentum it is faster: have you squared the quotient once too often, or forgotten the root?"
    ),
    4: lambda times: (
        "longer than 1, for the root of the second average is too small by more than the first average is"
        if times < 1
        else "the averages begin with 0.5 of the gradient and 0.1 of its square: which quotient is the step?"
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
# - In "How large may a rate be?", put 0.02 in place of 0.021 in `few_rates`: exactly $2 / L$. What does $y$ do?
#
# <details><summary>What one sees</summary>
#
# A step multiplies $y$ by exactly $1 - 100 \cdot 0.02 = -1$. It jumps from 1 to -1 and back for ever: it neither converges
# nor diverges.
#
# </details>
#
# - In the cell that follows `playground`, change the slope from `"3 * x + y"` to `"300 * x + 100 * y"`, and then to `"3e-9 *
#   x + 1e-9 * y"`. What becomes of Adam's updates?
#
# <details><summary>What one sees</summary>
#
# With the first nothing changes: Adam divides a gradient by its own size. With the second they are a hundred times shorter
# at first: the root of the average square is smaller than $\epsilon = 10^{-8}$, so that $\epsilon$ alone divides. It depends
# on the unit of the loss whether $\epsilon$ matters.
#
# </details>

# %% [markdown]
# What this notebook has said, once more as checks.

# %%
exercises.prove({1: 0.04, 2: 0.072, 3: 0.669, 4: 1.58}, wrong={1: (0.01, 0.5), 2: (0.04, 0.2), 3: (0.3, 0.9), 4: (0.5, 5.0)})
for rate, path in zip(few_rates, descents, strict=True):
    assert abs(path[1] / path[0] - [1 - rate, 1 - 100 * rate]).max() < 1e-4
assert [round(math.log(1000) / math.log((k + 1) / (k - 1)) + 0.5) for k in needed] == list(needed.values())
converges = (over_both.growth <= 1).reshape(2, len(map_momenta), len(map_rates))
for k, momentum in enumerate(map_momenta[:36]):  # nearly 1, it takes more than 100 steps to tell
    for kind, limit in enumerate((2 * (1 + momentum) / 25, 2 * (1 + momentum) / (1 + 2 * momentum) / 25)):
        assert converges[kind, k, [rate < 0.96 * limit for rate in map_rates]].all()
        assert not converges[kind, k, [rate > 1.04 * limit for rate in map_rates]].any()
fewest = over_both.settled.reshape(2, len(map_momenta), -1)[0]
assert 3.5 < np.nanmin(fewest[0]) / np.nanmin(fewest) < 5
assert abs(slope.updates + 0.1).max() < 1e-5
assert uncorrected.argmax() == 11
assert abs(uncorrected[[0, 11]] / 0.1 - [3.16, 6.57]).max() < 0.01
assert rates_of["sgd"] == rates_of["momentum"] < rates_of["lion"] < rates_of["adam"]
median = sensitivity.found.quartiles[:, :, 1]
for name, row in zip(sensitivity.found.names, median, strict=True):
    best_rate = row.argmin()
    assert np.isfinite(row[best_rate - 1])
    assert np.isfinite(row[best_rate + 1]) == (name in ("adam", "lion"))  # with the others half of the starts diverge there
jumping = ravine.trajectories.paths[:, 20, 0, -20:]  # of 41 factors the one in the middle, 1; the last 20 steps
assert (abs(np.diff(jumping, axis=1)).max(axis=(1, 2)) > 0.01).all()
reached = {tuple(path[-1].round().tolist()) for path in himmelblau.trajectories.paths[:, 0, 0]}
assert len(reached) == 2  # minima
assert abs(trace.updates[0] + 0.1 * torch.tensor(trace.gradients[0]).sign().numpy()).max() < 1e-6
assert set(own.best) == {"sgd", "adam", "short steps"}
assert all(losses[-1] < losses[0] / 10 for losses in plane.losses.values())
ends = [path[-1] for path in plane.paths.values()]
places = [plane.paths["sgd"][0], *ends]  # the start, and where each has ended
assert min(np.linalg.norm(a - b) for i, a in enumerate(places) for b in places[:i]) > 10
assert min(scores.values()) > 0.9
at_the_limit = viz.simulate(bowl, "sgd", (1.0, 1.0), 60, learning_rates=[0.02]).paths[0, 0, 0]
assert abs(abs(at_the_limit[:, 1]) - 1).max() < 1e-3  # of the open exercises
adam = {"optimizer": "adam", "learning_rate": 0.1}
assert abs(viz.trace_updates("300 * x + 100 * y", adam, steps=30).updates + 0.1).max() < 1e-5
assert 0.0005 < -viz.trace_updates("3e-9 * x + 1e-9 * y", adam, steps=1).updates[0, 0] < 0.002
