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
# # First steps
#
# A `Trainer` applies an optimizer to the parameters of a PyTorch model. This notebook checks its first step by hand,
# compares three optimizers on handwritten digits, draws a learning-rate schedule, trains with an update rule typed in a
# cell, and saves and resumes a training. It needs no GPU, takes less than a minute, and uses the `notebook` extra:
# `pip install '.[notebook]'` in the repository.

# %%
import tempfile
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

import tristep
from tristep import lr_scheduler, viz
from tristep.kernels import tl

EPOCHS = 12  # passes over the images, in every training below

# %% [markdown]
# ## One step by hand
#
# A linear unit with four inputs, and a batch of eight. The loss is the *sum* over the batch; `step(batch_size)` divides the
# gradients by the batch's size, as Gluon does. With a loss that is a mean already, say `step(1)`.

# %%
torch.manual_seed(0)
unit = nn.Linear(4, 1)
trainer = tristep.Trainer(unit, "sgd", {"learning_rate": 1.0})

x, y = torch.rand(8, 4), torch.rand(8, 1)
loss = ((unit(x) - y) ** 2 / 2).sum()
loss.backward()

before = unit.weight.detach().clone()
trainer.step(batch_size=8)
expected = before - 1.0 / 8 * unit.weight.grad

print("after the step       ", unit.weight.data)
print("w - lr / batch * grad", expected)
assert torch.allclose(unit.weight, expected)

# %% [markdown]
# A second `step` without a new `backward` would use the same gradients again. That is nearly always a mistake, so it is an
# error, and nothing has changed when it is raised.

# %%
try:
    trainer.step(batch_size=8)
except tristep.StaleGradientError as error:
    print(error)

# %% [markdown]
# ## Three optimizers on digits
#
# scikit-learn comes with 1,797 images of 8 × 8 pixels. A quarter of them is kept for testing.

# %%
images, labels = (torch.tensor(array) for array in load_digits(return_X_y=True))
images = images.float() / 16
order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
train, test = order[:1347], order[1347:]


def network():
    torch.manual_seed(0)  # every training starts at the same weights
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def batches():
    shuffle = torch.Generator().manual_seed(0)  # and sees the same batches
    for _ in range(EPOCHS):
        yield from train[torch.randperm(len(train), generator=shuffle)].split(64)


def fit(net, trainer):
    """Train for EPOCHS passes; the loss and the learning rate of every update."""
    losses, rates = [], []
    for batch in batches():
        trainer.zero_grad()
        loss = cross_entropy(net(images[batch]), labels[batch], reduction="sum")
        loss.backward()
        trainer.step(batch_size=len(batch))
        losses.append(loss.item() / len(batch))
        rates.append(trainer.learning_rate)
    return losses, rates


@torch.no_grad()
def accuracy(net):
    return (net(images[test]).argmax(dim=1) == labels[test]).float().mean().item()


# %% [markdown]
# An optimizer is chosen by its name; the dict holds its arguments, which have MXNet's names and defaults.
# `tristep.optimizer.registered()` lists what there is. The rates here are first guesses, so the picture shows how such
# curves look and not which optimizer is best.

# %%
choices = {
    "sgd": {"learning_rate": 0.1, "momentum": 0.9},
    "adam": {"learning_rate": 0.003},
    "signum": {"learning_rate": 0.001},
}
losses, rates, notes = {}, {}, {}
for name, arguments in choices.items():
    net = network()
    losses[name], rates[name] = fit(net, tristep.Trainer(net, name, arguments))
    notes[name] = f"test accuracy {accuracy(net):.1%}"

viz.plot_training(losses, rates, notes, title="Three optimizers, one start")

# %% [markdown]
# ## A schedule
#
# A schedule is a function from the number of updates to a learning rate, so it can be drawn before anything is trained.

# %%
updates = len(list(batches()))
schedules = {
    "cosine": lr_scheduler.CosineScheduler(max_update=updates, base_lr=0.2, final_lr=0.002, warmup_steps=updates // 10),
    "factor": lr_scheduler.FactorScheduler(step=updates // 4, factor=0.5, base_lr=0.2),
    "poly": lr_scheduler.PolyScheduler(max_update=updates, base_lr=0.2, pwr=2),
}
viz.plot_schedules(schedules, updates, title="Three ways down from 0.2")

# %%
net = network()
trainer = tristep.Trainer(net, "sgd", {"momentum": 0.9, "lr_scheduler": schedules["cosine"]})
scheduled, followed = fit(net, trainer)
cosine_accuracy = accuracy(net)

assert followed == [schedules["cosine"](n) for n in range(1, updates + 1)]
print(f"sgd with the cosine schedule: test accuracy {cosine_accuracy:.1%}, last loss {scheduled[-1]:.4f}")

# %% [markdown]
# ## A rule of your own
#
# An update rule says what becomes of one weight `w` with the gradient `g`. It is compiled for whole models: into one native
# loop on the CPU, into a Triton kernel on a GPU. This one stands between SGD with momentum and its signs: where the running
# mean of the gradient is small beside `softness` the step is proportional to it, where it is large the step is `lr`.
#
# The first lines unpack `state`, here one tensor like the weight that starts at zero, and `hyper`. `lr` and `wd` are there
# for every optimizer, `one_minus_beta` is made from `beta`, and everything else is an attribute of the optimizer's class.


# %%
@tristep.rule
def soft_sign(w, g, state, hyper):
    (mean,) = state
    lr, wd, beta, one_minus_beta, softness = hyper
    mean = beta * mean + one_minus_beta * g
    return w - lr * (mean / (tl.abs(mean) + softness) + wd * w), (mean,)


@tristep.optimizer.register
class SoftSign(tristep.optimizer.RuleOptimizer):
    rule = soft_sign

    def __init__(self, beta=0.9, softness=0.002, **others):
        self.beta, self.softness = beta, softness
        super().__init__(**others)


# %% [markdown]
# Its first step by hand, and then the digits.

# %%
weight = nn.Parameter(torch.tensor([1.0, -2.0, 3.0]))
trainer = tristep.Trainer([weight], "softsign", {"learning_rate": 0.1, "wd": 0.01})
weight.grad = torch.tensor([0.5, 0.0, -4.0])
trainer.step(batch_size=1)

start, mean = torch.tensor([1.0, -2.0, 3.0]), 0.1 * weight.grad
expected = start - 0.1 * (mean / (mean.abs() + 0.002) + 0.01 * start)
print(weight.data, expected)
assert torch.allclose(weight, expected)

# %%
net = network()
losses["softsign"], rates["softsign"] = fit(net, tristep.Trainer(net, "softsign", {"learning_rate": 0.003}))
softsign_accuracy = accuracy(net)
notes["softsign"] = f"test accuracy {softsign_accuracy:.1%}"

viz.plot_training(losses, rates, notes, title="With a rule typed above")

# %% [markdown]
# ## Saving and resuming
#
# `save_states` writes what the optimizer needs to go on: its settings, its counts and its states. The weights are the
# model's, and are saved as always in PyTorch.

# %%
folder = tempfile.TemporaryDirectory()
weights_file, states_file = Path(folder.name, "weights.pt"), Path(folder.name, "trainer.states")

net = network()
trainer = tristep.Trainer(net, "adam", {"learning_rate": 0.003})
fit(net, trainer)
torch.save(net.state_dict(), weights_file)
trainer.save_states(states_file)
fit(net, trainer)

resumed = network()
resumed.load_state_dict(torch.load(weights_file))
trainer = tristep.Trainer(resumed, "adam")
trainer.load_states(states_file)
fit(resumed, trainer)

same = all(torch.equal(a, b) for a, b in zip(net.parameters(), resumed.parameters(), strict=True))
folder.cleanup()
print("Going on and resuming gave the same weights:", same)

# %% [markdown]
# What this notebook has said, once more as checks.

# %%
assert same
assert cosine_accuracy > 0.9
assert softsign_accuracy > 0.9
assert all(sum(curve[-20:]) < sum(curve[:20]) / 5 for curve in losses.values())
