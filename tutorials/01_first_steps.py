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
# # The Trainer in ten minutes
#
# A `Trainer` applies an optimizer to the parameters of a PyTorch model. This notebook checks a step of it by hand, trains a
# network on handwritten digits while you watch and steer, goes on with another optimizer and another learning rate, and
# saves and resumes. It needs no GPU, takes less than a minute, and uses the `demo` extra: `pip install '.[demo]'`
# in the repository.

# %%
import tempfile
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

import tristep
from tristep import viz

# %% [markdown]
# ## One step by hand
#
# A linear unit with four inputs, and a batch of eight. The loss is the *sum* over the batch, and `backward` leaves its
# gradient in `.grad`. Plain gradient descent then takes the learning rate times the mean gradient off the weight:

# %%
torch.manual_seed(0)
unit = nn.Linear(4, 1)
x, y = torch.rand(8, 4), torch.rand(8, 1)


def loss_of_unit():
    return ((unit(x) - y) ** 2 / 2).sum()


loss_before = loss_of_unit()
loss_before.backward()
expected = unit.weight.detach() - 1.0 / 8 * unit.weight.grad
expected

# %% [markdown]
# A trainer does this for all parameters of a model at once. It is told the model, the optimizer's name, and the optimizer's
# arguments. `step(batch_size)` divides the gradients by the batch's size, as Gluon does. With a loss that is a mean already,
# say `step(1)`.

# %%
trainer = tristep.Trainer(unit, "sgd", {"learning_rate": 1.0})
trainer.step(batch_size=8)
loss_after = loss_of_unit()

assert torch.allclose(unit.weight, expected)
print(f"{unit.weight.data}, and the loss went from {loss_before:.4f} to {loss_after:.4f}")

# %% [markdown]
# *Guess:* now a second `trainer.step(batch_size=8)`, with no `backward` in between. What does it do to the weight?
#
# <details><summary>Answer</summary>
#
# Nothing. It would use the same gradients again, which is nearly always a mistake, so it is an error, and nothing has
# changed when it is raised. torch's own optimizers take the step.
#
# </details>

# %%
try:
    trainer.step(batch_size=8)
except tristep.StaleGradientError as error:
    stale = str(error)
    print(stale)

# %% [markdown]
# ## A training to watch
#
# scikit-learn comes with 1,797 images of 8 × 8 pixels. A quarter of them is kept for testing. The training loop is the usual
# one of PyTorch; the line that is new is the last: after each step it hands out the loss with `yield`.

# %%
images, labels = (torch.tensor(array) for array in load_digits(return_X_y=True))
images = images.float() / 16
order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
training, test = order[:1344], order[1344:]


def network():
    torch.manual_seed(0)  # every training starts at the same weights
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def train(net, trainer, epochs):
    shuffle = torch.Generator().manual_seed(0)
    for _ in range(epochs):
        for batch in training[torch.randperm(len(training), generator=shuffle)].split(64):
            trainer.zero_grad()
            loss = cross_entropy(net(images[batch]), labels[batch], reduction="sum")
            loss.backward()
            trainer.step(batch_size=len(batch))
            yield loss / len(batch)


@torch.no_grad()
def accuracy(net):
    return (net(images[test]).argmax(dim=1) == labels[test]).float().mean().item()


# %% [markdown]
# A `LiveLoop` runs it. In a notebook that you have open the cell returns at once and the picture grows, with buttons to
# pause, resume, stop and branch, and a slider for the learning rate; the stop button of the notebook pauses, too. Where
# nobody watches, as on the machine that made this page, the cell runs to the end and shows the picture then.

# %%
net = network()
trainer = tristep.Trainer(net, "sgd", {"learning_rate": 0.1})
loop = viz.LiveLoop(train(net, trainer, epochs=12), trainer=trainer, name="sgd")
_ = loop.start()

# %% [markdown]
# `wait` takes the steps that are left, if there are any, and returns at once if not. All that was recorded is in `loop.run`.

# %%
loop.wait()
steps, losses = loop.run.scalars["loss"].recent()
sgd_accuracy = accuracy(net)
print(f"{loop.status} after {steps[-1]} steps; loss {losses[-1]:.3f}, test accuracy {sgd_accuracy:.1%}")

# %% [markdown]
# ## Another optimizer
#
# In place of a name a trainer takes an optimizer itself, an instance with its arguments. `tristep.optimizer.registered()`
# lists what there is; arguments have MXNet's names and defaults. To change the optimizer in the midst of a training, make a
# new trainer of the same network: the weights are the network's, and stay. Here Adam goes on where SGD has stopped, and
# next to it Adam starts again.
#
# *Guess:* in its first steps, does the loss of the Adam that goes on jump up, for it knows nothing yet of the gradients?
#
# <details><summary>Answer</summary>
#
# It does not: Adam's averages begin with the first gradient, corrected for being few, and its steps are no longer than
# the rate from the first one on. Tutorial 2 looks at that correction.
#
# </details>

# %%
runs = viz.RunSet([loop.run])


def follow(net, trainer, name):
    """Train, and keep what is to be known of it."""
    recorder = viz.Recorder(trainer, name)
    for loss in train(net, trainer, epochs=12):
        recorder.step(loss=loss)
    recorder.close()
    runs.add(recorder.run)


trainer = tristep.Trainer(net, tristep.optimizer.Adam(learning_rate=0.003))
follow(net, trainer, "adam, after sgd")

fresh = network()
follow(fresh, tristep.Trainer(fresh, tristep.optimizer.Adam(learning_rate=0.003)), "adam")
viz.LossView(runs, smoothing=25)

# %% [markdown]
# ## Another learning rate
#
# `learning_rate` tells the rate, `set_learning_rate` changes it from the next step on. A rate that follows a rule, such as a
# cosine, is a schedule, and is given as `lr_scheduler`; tutorial 3 is about these.

# %%
net = network()
trainer = tristep.Trainer(net, "sgd", {"learning_rate": 0.5})
recorder = viz.Recorder(trainer, "sgd, by hand")
for n, loss in enumerate(train(net, trainer, epochs=12), start=1):
    recorder.step(loss=loss)
    if n == 168:
        trainer.set_learning_rate(trainer.learning_rate / 10)
recorder.close()
by_hand_accuracy = accuracy(net)
print(f"rate {trainer.learning_rate:g} at the end, test accuracy {by_hand_accuracy:.1%}")
viz.LossView(recorder.run)

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
list(train(net, trainer, epochs=3))
torch.save(net.state_dict(), weights_file)
trainer.save_states(states_file)
list(train(net, trainer, epochs=3))

resumed = network()
resumed.load_state_dict(torch.load(weights_file))
trainer = tristep.Trainer(resumed, "adam")
trainer.load_states(states_file)
list(train(resumed, trainer, epochs=3))

same = all(torch.equal(a, b) for a, b in zip(net.parameters(), resumed.parameters(), strict=True))
folder.cleanup()
print("Going on and resuming gave the same weights:", same)

# %% [markdown]
# ## What is open
#
# Adam was ahead of SGD here. But each had one rate, which somebody had chosen. Would SGD have won at another one?
# Tutorial 2 begins with this question.
#
# ## Exercises
#
# 1. Gradients are sums over a batch of 32. The rate is 0.5, and the step is `step(batch_size=32)`. With which rate does
#    `step(batch_size=1)` take the same step?
# 2. The loss is a mean over the batch of 32 already. Which `batch_size` makes a step of the whole learning rate?
# 3. After how many epochs did the rate change by hand above?
#
# Put your answers in place of `None`, and run the cell: it tries them.
#
# <details><summary>Solutions</summary>
#
# 1. $0.5 / 32 = 0.015625$: a step is the rate times the gradient over the batch's size.
# 2. 1: the mean has been divided by 32 before.
# 3. 8: an epoch has $1344 / 64 = 21$ steps, and $168 / 21 = 8$.
#
# </details>

# %%
answers = {1: None, 2: None, 3: None}


def moved(rate, batch_size, gradient=1.0):
    """How far a weight goes in a step."""
    weight = nn.Parameter(torch.zeros(1))
    weight.grad = torch.full((1,), gradient)
    tristep.Trainer([weight], "sgd", {"learning_rate": rate}).step(batch_size=batch_size)
    return -weight.item()


steps_an_epoch = len(training.split(64))
is_right = {
    1: lambda rate: abs(moved(rate, 1) / moved(0.5, 32) - 1) < 1e-3,
    2: lambda size: abs(moved(0.5, size) - 0.5) < 1e-6,
    3: lambda epochs: epochs * steps_an_epoch == 168,
}
hints = {
    1: lambda rate: f"this step is {moved(rate, 1) / moved(0.5, 32):.3g} times as long: what does batch_size divide?",
    2: lambda size: (
        f"with it the mean is divided once more, by {size}, and the step is {moved(0.5, size):.3g} instead of 0.5"
    ),
    3: lambda epochs: f"{epochs} epochs are {epochs * steps_an_epoch} steps; the rate changed after step 168",
}
exercises = viz.Exercises(is_right, hints, kinds={2: "count"})
exercises.check(answers)

# %% [markdown]
# ## Open exercises
#
# There is no number to type here. Each exercise names a cell and a change: predict what you will see, change the cell, run
# it, and look. The last cell checks the notebook as it came.
#
# - In the cell of "A training to watch" that defines `train`, take out `trainer.zero_grad()`, and run it and the cells after
#   it. Does the loss fall faster, more slowly, or not at all?
#
# <details><summary>What one sees</summary>
#
# A warning says that gradients are added to those of the step before. The loss falls faster at first, since the sum of all
# gradients so far pulls like a momentum that forgets nothing. For the same reason nothing ever brakes: the loss turns
# around, and ends higher than it was at the start.
#
# </details>
#
# - In "Another learning rate", let the rate fall at once: `if n == 21`. Where does the loss end, compared with the picture
#   as it is?
#
# <details><summary>What one sees</summary>
#
# About four times as high, near 0.4: with a tenth of the rate the network goes a tenth as far in each of the remaining 231
# steps. A rate should fall when the large one no longer helps, and not before.
#
# </details>

# %% [markdown]
# What this notebook has said, once more as checks.

# %%
exercises.prove({1: 0.015625, 2: 1, 3: 8}, wrong={1: (0.5, 16.0), 2: (32, 2), 3: (12, 168)})
assert torch.allclose(unit.weight, expected)
assert loss_after < loss_before
assert "backward" in stale
assert (loop.status, len(losses)) == ("finished", 12 * 21)
assert sgd_accuracy > 0.85
curves = {run.name: run.scalars["loss"].recent()[1] for run in runs}
assert curves["adam, after sgd"][:20].mean() < curves["adam"][:20].mean() / 2
assert curves["adam, after sgd"][:20].mean() < 1.2 * curves["sgd"][-20:].mean()  # it does not jump up
assert curves["adam, after sgd"][-20:].mean() < curves["sgd"][-20:].mean()
assert curves["adam"][-20:].mean() < curves["sgd"][-20:].mean()
assert abs(trainer.learning_rate - 0.003) < 1e-9  # the file had it
assert recorder.run.scalars["learning_rate"].recent()[1][[0, 167, 168, 251]].round(4).tolist() == [0.5, 0.5, 0.05, 0.05]
assert by_hand_accuracy > 0.9
assert same
