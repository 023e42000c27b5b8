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
# # Learning-rate schedules: how should the rate change while training?
#
# The optimizers of tutorial 2 kept their rates to the end. Should a rate stay, or go down, or first up?
#
# A schedule says which learning rate each update has. This notebook draws MXNet's schedules and those that came after
# them, makes one of its own in three lines, derives why a rate has to come down at all, and lets six of them train the
# same network on handwritten digits. It then looks at the schedule of a training that is under way, and draws PyTorch's
# schedules.
#
# In JupyterLab the pictures are interactive once their cells have been run: the pointer reads values off.
# A page such as a code host's shows the same as a picture.

# %%
import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn

import tristep
from tristep import lr_scheduler, viz

torch.set_num_threads(1)  # layers this small gain nothing from more
UPDATES = 660

# %% [markdown]
# ## One schedule
#
# A schedule is a function from the number of updates, counted from 1, to a rate. Nothing is trained to draw one. MXNet's
# `FactorScheduler` multiplies the rate by a factor every so many updates.

# %%
factor = lr_scheduler.FactorScheduler(step=150, factor=0.5, base_lr=0.2)
print([factor(n) for n in (1, 150, 151, 300, 301)])
viz.ScheduleView(factor, UPDATES)

# %% [markdown]
# ## MXNet's schedules
#
# Factor and multi-factor go down in steps, at equal distances or at the ones given. Polynomial and cosine go down smoothly,
# and need to know how long the training will be. A warm-up, which any of them can have, begins with small rates: that helps
# where the first gradients are large, or say little.

# %%
warm = {"base_lr": 0.2, "warmup_steps": 60, "warmup_begin_lr": 0.01}
mxnet = {
    "factor": factor,
    "multi-factor": lr_scheduler.MultiFactorScheduler(step=[200, 400, 550], factor=0.3, base_lr=0.2),
    "poly": lr_scheduler.PolyScheduler(max_update=UPDATES, base_lr=0.2, pwr=2),
    "cosine, warm-up": lr_scheduler.CosineScheduler(max_update=UPDATES, final_lr=0.002, **warm),
}
viz.ScheduleView(mxnet, UPDATES)

# %% [markdown]
# ## Up and down again
#
# MXNet's page on advanced schedules writes these by hand; here they are classes. Cyclical rates go up and down in triangles.
# Restarts jump back up after each cosine. One cycle goes up once, slowly, and then down to almost nothing. Warm-up, stable,
# decay (WSD) keeps the rate until shortly before the end, so that one need not know the end when one begins. The inverse
# square root never ends; transformers were first trained with it.

# %%
advanced = {
    "cyclical": lr_scheduler.CyclicScheduler(step_up=110, base_lr=0.02, max_lr=0.2),
    "cyclical, halved": lr_scheduler.CyclicScheduler(step_up=110, base_lr=0.02, max_lr=0.2, mode="triangular2"),
    "restarts": lr_scheduler.CosineRestartsScheduler(period=95, period_mult=2, base_lr=0.2, final_lr=0.002),
    "1-cycle": lr_scheduler.OneCycleScheduler(max_update=UPDATES, base_lr=0.2),
    "WSD": lr_scheduler.WarmupStableDecayScheduler(max_update=UPDATES, decay_steps=200, **warm),
    "inverse root": lr_scheduler.InverseSquareRootScheduler(**warm),
}
viz.ScheduleView(advanced, UPDATES)

# %% [markdown]
# ## Your own, in three lines
#
# Anything that can be called with a number of updates is a schedule. `sequence` joins schedules, and each counts from its
# own start. The picture has a log scale, on which each halving is the same way down: the teeth of the saw are all alike.


# %%
def saw(n):
    return 0.2 * 0.5 ** (n // 170) * (1 - (n % 170) / 200)


cycle = lr_scheduler.CyclicScheduler(step_up=50, base_lr=0.02, max_lr=0.2)
down = lr_scheduler.PolyScheduler(max_update=460, base_lr=0.2, final_lr=0.002, pwr=1)
joined = lr_scheduler.sequence((cycle, 200), down)
viz.ScheduleView({"saw": saw, "a cycle, then poly": joined}, UPDATES, scale="log")

# %% [markdown]
# ## Why a rate has to come down
#
# The gradient of a batch is the true gradient plus noise. If the gradients of single images have the variance $\sigma^2$,
# the mean of $n$ of them has the variance $\sigma^2 / n$. Near a minimum of curvature $\lambda$, a step of SGD is therefore
#
# $$w_{t+1} = (1 - \eta \lambda)\, w_t - \eta\, \xi_t$$
#
# with noise $\xi_t$ that does not depend on $w_t$. So variances add: $V_{t+1} = (1 - \eta \lambda)^2\, V_t + \eta^2
# \sigma^2 / n$. It comes to rest where $V_{t+1} = V_t$, which is at
#
# $$V = \frac{\eta\, \sigma^2}{n\, \lambda\, (2 - \eta \lambda)} \approx \frac{\eta}{n} \cdot \frac{\sigma^2}{2 \lambda}
# \qquad \text{and a mean loss of} \qquad \tfrac{1}{2} \lambda V \approx \frac{\eta}{n} \cdot \frac{\sigma^2}{4}$$
#
# in each direction. **Below this floor a constant rate does not come**; only a smaller rate, or a larger batch, does. But
# with a small rate the start is forgotten slowly, in some $1 / (\eta \lambda)$ steps. Hence schedules: first large, then
# small.
#
# *Guess:* the batch is made four times as large. What may the rate be, for the same floor?
#
# <details><summary>Answer</summary>
#
# About four times as large, as only $\eta / n$ counts: this is the "linear scaling rule" for large batches. It ends where
# $\eta \lambda$ is no longer small against 2: then the factor $2 - \eta \lambda$ matters, and at $2 / \lambda$ no batch
# is large enough.
#
# </details>
#
# The bowl here has the curvature 1 in both directions and noise of one per image. Each mean is over 200 trainings.


# %%
def floor(rate, batch):
    """The mean loss of 200 trainings after they have come to rest."""
    noisy = viz.Function("a noisy bowl", "(x**2 + y**2) / 2", noise=batch**-0.5)
    found = viz.simulate(noisy, {"sgd": {"learning_rate": rate}}, np.zeros((200, 2)), 400)
    return float(found.losses[..., 200:].mean())


floors = {
    (rate, batch): floor(rate, batch) for rate, batch in [(0.05, 16), (0.1, 16), (0.2, 16), (0.2, 64), (0.8, 64), (1.8, 64)]
}
print("rate   batch   loss in the long run   theory")
for (rate, batch), level in floors.items():
    print(f"{rate:<6} {batch:<7} {level:<22.5f} {rate / batch / (2 - rate):.5f}")

# %% [markdown]
# No schedule does better here than $\eta_t = 1 / (\lambda t)$. Then $t\, w_{t+1} = (t - 1)\, w_t - \xi_t / \lambda$, and
# this can be summed: $w_{t+1} = -\frac{1}{t} \sum_{k=1}^{t} \xi_k / \lambda$. The start is forgotten after one step, and
# what is left is the plain average of the noise, of variance $\sigma^2 / (n \lambda^2 t)$, which is as good as $t$
# measurements can be. Nobody knows $\lambda$, and a network has many; that is why there are so many schedules.

# %%
one_image = viz.Function("noise of one image", "(x**2 + y**2) / 2", noise=1.0)
falling = {"sgd": {"lr_scheduler": lambda n: 1 / n}}
spread = viz.simulate(one_image, falling, np.full((400, 2), 5.0), 1000).paths[0, 0].var(axis=(0, 2))  # of each step
for t in (1, 10, 100, 1000):
    print(f"variance after {t:4} steps {spread[t]:.5f}, theory {1 / t:.5f}")

# %% [markdown]
# ## What they do to a training
#
# A network is no bowl, but the two halves of the derivation should show in it: a constant rate has a floor that is
# proportional to the rate, and what is above a floor comes down soon after the rate does. A network learns 1,347 images of
# handwritten digits by SGD with momentum. The batches are small, 16 images, so the gradients are noisy. Start and batches
# are always the same; only the schedule differs. Two trainings have a constant rate, the largest one of the schedules and a
# quarter of that. A `Recorder` notes loss and rate of each update.
#
# The losses of single batches jump about: that is the noise. The strong lines are means of the last 50 losses. So a line
# tells of a change of the rate with a delay, and has seen the last of the old losses 50 updates after it.
#
# *Guess:* where do the lines of the two constant rates end, 0.2 and 0.05, one compared with the other?
#
# <details><summary>Answer</summary>
#
# The larger rate ends some three or four times as high. Its rate is four times as large, and in a bowl so would be
# its floor.
#
# </details>

# %%
images, labels = (torch.tensor(array) for array in load_digits(return_X_y=True))
images = images.float() / 16
order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
train, test = order[:1347], order[1347:]
loss = nn.CrossEntropyLoss()


def training(schedule, updates=UPDATES, name="run"):
    """Train with a schedule, or a constant rate; the trainer, what was recorded, and the accuracy on other images."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
    how = {"learning_rate": schedule} if isinstance(schedule, float) else {"lr_scheduler": schedule}
    trainer = tristep.Trainer(net, "sgd", {"momentum": 0.9, **how})
    recorder = viz.Recorder(trainer, name, every=50)
    shuffle = torch.Generator().manual_seed(0)
    batches = [batch for _ in range(8) for batch in torch.randperm(1347, generator=shuffle).split(16)]
    for batch in batches[:updates]:
        trainer.zero_grad()
        value = loss(net(images[train[batch]]), labels[train[batch]])
        value.backward()
        trainer.step(1)
        recorder.step(loss=value)
    recorder.flush()
    accuracy = (net(images[test]).argmax(dim=1) == labels[test]).float().mean().item()
    return trainer, recorder, accuracy


compared = {
    "constant": 0.2,
    "small constant": 0.05,
    "multi-factor": mxnet["multi-factor"],
    "cosine, warm-up": mxnet["cosine, warm-up"],
    "1-cycle": advanced["1-cycle"],
    "WSD": advanced["WSD"],
}
recorders, accuracies = {}, {}
for name, schedule in compared.items():
    _, recorders[name], accuracies[name] = training(schedule, name=name)

picture = viz.LossView(recorders.values(), smoothing=50)
picture

# %% [markdown]
# Here are the strong lines as numbers. The last column is no training loss: it is about images that none of them has seen.

# %%
losses = {name: recorder.run.scalars["loss"].recent()[1] for name, recorder in recorders.items()}


def line(name, update):
    """The strong line at an update: the mean of the 50 losses up to it."""
    return losses[name][update - 50 : update].mean()


print("                     the line at update")
print(f"{'':<16}", *(f"{update:>7}" for update in (200, 300, 460, 660)), "  test accuracy")
for name in compared:
    print(f"{name:<16}", *(f"{line(name, n):7.3f}" for n in (200, 300, 460, 660)), f"{accuracies[name]:15.1%}")

# %% [markdown]
# - **constant** comes down for 200 updates and then no further: from there to the end its line goes up and down
#   around 0.25. It is at its floor.
# - **small constant** is above it at update 50, and ends at less than half of it. It needs no schedule for that, but
#   somebody must have known the rate.
# - **multi-factor** has the same losses as *constant* up to update 200, where its rate falls to three tenths. A hundred
#   updates later its line is at less than half of the other.
# - **WSD** is as high as *constant* at update 460, where its rate begins to fall. In the 200 updates after that its line
#   falls by more than half, and it ends below the small constant rate.
# - **multi-factor**, **cosine** and **1-cycle** end lowest. All three have less than an eighth of their largest rate for the
#   last hundred updates. Which of them is the best, one start cannot say.

# %% [markdown]
# ## The schedule of a training that is under way
#
# A trainer knows what its rate has been and what it will be. This one has made 300 of its updates: what was is solid, what
# is to come dashed, and below is the loss up to now.

# %%
trainer, recorder, _ = training(advanced["WSD"], updates=300)
viz.ScheduleView(trainer, UPDATES, loss=recorder)

# %% [markdown]
# ## PyTorch's schedules
#
# A schedule of `torch.optim.lr_scheduler` belongs to its optimizer, and changes it when it is asked for the next rate. The
# view asks a copy, so that neither notices. `lr_scheduler.from_torch` makes one of these a schedule for a `Trainer`, and
# `to_torch` the other way round.

# %%
optimizer = torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=0.2)
warmed = torch.optim.lr_scheduler.SequentialLR(
    optimizer,
    [
        torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.05, total_iters=60),
        torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=600),
    ],
    milestones=[60],
)
before = optimizer.param_groups[0]["lr"], warmed.last_epoch
ours = lr_scheduler.from_torch(torch.optim.lr_scheduler.PolynomialLR, base_lr=0.2, total_iters=660, power=2.0)
torchs = viz.ScheduleView({"torch: linear, then cosine": warmed, "torch: polynomial, as ours": ours}, UPDATES)
torchs

# %% [markdown]
# ## Noise and the size of batches
#
# Is the noise of a network's gradients what the derivation takes it for? At the weights of a new
# network the gradient of a batch is compared with that of all images, for 200 batches of each size, drawn with replacement.
#
# *Guess:* by how much does the mean square of the difference fall from batches of 4 to batches of 64?
#
# <details><summary>Answer</summary>
#
# By 16. Variances of independent images add up, so that of their mean is one $n$-th. The noise itself falls by 4 only, for
# sixteen times the work: a much larger batch pays only where it is computed in parallel.
#
# </details>

# %%
net = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))


def gradient(chosen):
    net.zero_grad()
    loss(net(images[chosen]), labels[chosen]).backward()
    return torch.cat([parameter.grad.flatten() for parameter in net.parameters()])


true_gradient, draw = gradient(train), torch.Generator().manual_seed(0)
noise = {}
for size in (4, 16, 64):
    batches = train[torch.randint(len(train), (200, size), generator=draw)]
    noise[size] = torch.stack([(gradient(batch) - true_gradient).square().sum() for batch in batches]).mean().item()
    print(f"batches of {size:<3} mean square of the noise {noise[size]:.4f}, times the size {size * noise[size]:.3f}")

# %% [markdown]
# One thing all of these schedules had from us: where they begin, 0.2. How does one find that number for another network?
# Tutorial 4 does.
#
# ## Exercises
#
# 1. On the bowl above, batches of 16 at the rate 0.2 leave some loss. Which size of batch leaves a quarter of it?
# 2. After how many steps of the schedule $1 / t$ is the variance on that bowl 0.004?
# 3. Write a schedule that goes up in a straight line from 0.01 at update 1 to 0.1 at update 10, stays there until update
#    100, and is halved at update 101 and every 50 updates after that.
#
# Put your answers in place of `None`, and run the cell: it tries them.
#
# <details><summary>Solutions</summary>
#
# 1. 64: the floor is proportional to $\eta / n$.
# 2. 250, as it is $1 / t$.
# 3. `lambda n: 0.01 * n if n < 10 else 0.1 * 0.5 ** max(0, (n - 51) // 50)`, for example.
#
# </details>

# %%
answers = {1: None, 2: None, 3: None}

# Of exercise 3, some updates and their rates.
asked = {1: 0.01, 5: 0.05, 10: 0.1, 60: 0.1, 100: 0.1, 101: 0.05, 150: 0.05, 151: 0.025, 200: 0.025, 201: 0.0125}
is_right = {
    1: lambda size: abs(floor(0.2, size) / floor(0.2, 16) - 1 / 4) < 0.01,
    2: lambda t: 0 < t < len(spread) and abs(spread[t] / 0.004 - 1) < 0.1,
    3: lambda mine: all(np.isclose(mine(n), rate) for n, rate in asked.items()),
}
hints = {
    1: lambda size: (
        "this batch leaves more than a quarter: the noise of a mean of n images falls as 1 / n"
        if size < 64
        else "this batch leaves less than a quarter: the loss falls as 1 / n, not as its root"
    ),
    2: lambda t: (
        f"the theory says {1 / t:.4f} there: it is later" if 0 < t < 250 else "by then the variance is smaller: it is 1 / t"
    ),
    3: lambda mine: "; ".join(
        f"update {n} has {mine(n):.4g} instead of {rate:.4g}" for n, rate in asked.items() if not np.isclose(mine(n), rate)
    ),
}
exercises = viz.Exercises(is_right, hints, kinds={1: "count", 2: "count", 3: "function"})
exercises.check(answers)

# %% [markdown]
# ## Open exercises
#
# There is no number to type here. Each exercise names a cell and a change: predict what you will see, change the cell, run
# it, and look. The last cell checks the notebook as it came.
#
# - In "What they do to a training", add `"inverse root": advanced["inverse root"]` to `compared`. Its last rate, 0.06, is
#   larger than that of *small constant*. Which of the two lines ends lower?
#
# <details><summary>What one sees</summary>
#
# The inverse root, with us at 0.03, as low as multi-factor. Its rate was larger in the first half, which brought it on, and
# has come down since. What a rate was before counts as well as what it is at the end.
#
# </details>
#
# - In the same section make batches four times as large, and train for as many updates: `split(64)` and `range(32)`. The
#   floor of *constant* should fall to a quarter. Does it?
#
# <details><summary>What one sees</summary>
#
# It falls by far more, with us to 0.006, and below the cosine's. In 30 epochs the network learns all training images by
# heart. Then the gradient of *each* image is nearly zero, and with it the noise: $\sigma^2$ is no constant, as it was in the
# bowl. A network that can fit all of its data needs no schedule to come down. It says nothing about images that it has not
# seen.
#
# </details>

# %% [markdown]
# What this notebook has said, once more as checks.

# %%
assert all(abs(level / (rate / batch / (2 - rate)) - 1) < 0.03 for (rate, batch), level in floors.items())
assert all(abs(spread[t] * t - 1) < 0.1 for t in (1, 10, 100, 1000))
assert all(abs(size * noise[size] / noise[16] / 16 - 1) < 0.15 for size in noise)
exercises.prove(
    {1: 64, 2: 250, 3: lambda n: 0.01 * n if n < 10 else 0.1 * 0.5 ** max(0, (n - 51) // 50)},
    wrong={1: (32, 128), 2: (100, 500), 3: (lambda n: 0.1, lambda n: 0.01 * n)},
)
assert all(abs(saw(n + 170) / saw(n) - 0.5) < 1e-9 for n in range(1, 490))
scene = picture.scene()
width = next(control.index for control in scene.controls if control.name == "smoothing")
strong = [layer.y[width] for layer in scene.panels[0].layers if isinstance(layer, viz.Line) and layer.y.ndim == 2]
for name, drawn in zip(compared, strong, strict=True):
    assert np.allclose(drawn[49:], [line(name, n) for n in range(50, UPDATES + 1)], rtol=1e-4)
assert (losses["constant"][:200] == losses["multi-factor"][:200]).all()
assert 0.6 < losses["constant"][200:430].mean() / losses["constant"][430:].mean() < 1.6
assert all(0.1 < line("constant", n) < 0.5 for n in range(200, UPDATES + 1))
assert line("small constant", 50) > line("constant", 50)
assert 2 < losses["constant"][-84:].mean() / losses["small constant"][-84:].mean() < 6
assert line("small constant", 660) < line("constant", 660) / 2
assert line("multi-factor", 300) < line("constant", 300) / 2
assert line("WSD", 460) > line("constant", 460) / 2
assert line("WSD", 660) < line("WSD", 460) / 2
assert line("WSD", 660) < line("small constant", 660)
lowest = [line(name, 660) for name in ("multi-factor", "cosine, warm-up", "1-cycle")]
assert max(lowest) < min(line(name, 660) for name in ("constant", "small constant", "WSD"))
assert all(compared[name](n) < 0.2 / 8 for name in ("multi-factor", "cosine, warm-up", "1-cycle") for n in range(561, 661))
assert accuracies["cosine, warm-up"] > accuracies["constant"]
rates = recorders["1-cycle"].run.scalars["learning_rate"].curve().mean
assert abs(rates - [advanced["1-cycle"](n) for n in range(1, UPDATES + 1)]).max() < 1e-6
assert (optimizer.param_groups[0]["lr"], warmed.last_epoch) == before
assert abs(ours(330) - mxnet["poly"](329)) < 1e-9  # torch counts from 0
