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
# A schedule says which learning rate each update has. This notebook draws MXNet's schedules and those that came after them,
# makes one of its own in three lines, and lets six of them train the same network on handwritten digits. It then looks at
# the schedule of a training that is under way, bends one by hand and takes it away as code, and draws PyTorch's schedules.
#
# In JupyterLab the pictures are interactive once their cells have been run: the pointer reads values off, knots are dragged.
# A page such as a code host's shows the same as a picture.

# %%
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
# own start. The picture has a log scale, on which a rate that is always multiplied by the same factor is a straight line.


# %%
def saw(n):
    return 0.2 * 0.5 ** (n // 170) * (1 - (n % 170) / 200)


cycle = lr_scheduler.CyclicScheduler(step_up=50, base_lr=0.02, max_lr=0.2)
down = lr_scheduler.PolyScheduler(max_update=460, base_lr=0.2, final_lr=0.002, pwr=1)
joined = lr_scheduler.sequence((cycle, 200), down)
viz.ScheduleView({"saw": saw, "a cycle, then poly": joined}, UPDATES, scale="log")

# %% [markdown]
# ## What they do to a training
#
# A network learns 1,347 images of handwritten digits by SGD with momentum. The batches are small, 16 images, so the
# gradients are noisy. Start and batches are always the same; only the schedule differs. Two trainings have a constant rate,
# the largest one of the schedules and a quarter of that. A `Recorder` notes loss and rate of each update.

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

viz.LossView(recorders.values(), smoothing=20)

# %% [markdown]
# At a rate that stays large the loss stays high: steps of that length jump over what is narrow. It falls as soon as the
# rate does, and one sees it at the steps of multi-factor and in the last third of WSD. The small constant rate needs no
# schedule to come down, but somebody must have known it.

# %%
final = {name: recorder.run.scalars["loss"].curve().mean[-84:].mean() for name, recorder in recorders.items()}
for name in compared:
    print(f"{name:<16} mean loss of the last epoch {final[name]:.4f}   test accuracy {accuracies[name]:.1%}")

# %% [markdown]
# ## The schedule of a training that is under way
#
# A trainer knows what its rate has been and what it will be. This one has made 300 of its updates: what was is solid, what
# is to come dashed, and below is the loss up to now.

# %%
trainer, recorder, _ = training(advanced["WSD"], updates=300)
viz.ScheduleView(trainer, UPDATES, loss=recorder)

# %% [markdown]
# ## By hand
#
# With `knots` a schedule is bent by hand: in JupyterLab they are dragged with the pointer, in code it is `move`. Here the
# rest of this training is to go down at once. The button "use it" gives the schedule to the trainer of the picture, from its
# next update on; `apply` does the same.

# %%
by_hand = viz.ScheduleView({"WSD": trainer}, UPDATES, knots=[(300, 0.2), (400, 0.1), (660, 0.002)], loss=recorder)
by_hand.move(1, update=350, rate=0.05)
by_hand

# %% [markdown]
# What was drawn is code, for a script that has no picture:

# %%
print(by_hand.code())
by_hand.apply(trainer)
print()
print(f"the rate of the trainer's update 350 is now {trainer.optimizer.rate_at(350):.3g}")

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
# What this notebook has said, once more as checks.

# %%
assert final["constant"] > 3 * max(final[name] for name in ("multi-factor", "cosine, warm-up", "1-cycle"))
assert accuracies["cosine, warm-up"] > accuracies["constant"]
rates = recorders["1-cycle"].run.scalars["learning_rate"].curve().mean
assert abs(rates - [advanced["1-cycle"](n) for n in range(1, UPDATES + 1)]).max() < 1e-6
written = {}
exec(by_hand.code(), written)
assert [written["schedule"](n) for n in range(UPDATES)] == [by_hand.schedule(n) for n in range(UPDATES)]
assert by_hand.schedule(350) == trainer.optimizer.rate_at(350) == 0.05
assert (optimizer.param_groups[0]["lr"], warmed.last_epoch) == before
assert abs(ours(330) - mxnet["poly"](329)) < 1e-9  # torch counts from 0
