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
# # What Muon does to a matrix
#
# Tutorial 12 left out optimizers of whole matrices. What can these do that a rule of single elements cannot?
#
# Most optimizers treat a weight matrix as a list of numbers. Muon treats it as a matrix: it takes the momentum
# $M = U S V^T$ and steps along $U V^T$, which has the same singular vectors, but singular values of 1. So directions that
# gradients seldom point to count as much as those that they always point to. This notebook looks at the singular
# values: before and after a step, after each of the known lists of coefficients, and during a small training. At the
# end there is NorMuon, which evens out the rows as well.

# %%
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

import tristep
from tristep import viz
from tristep.kernels.rules.muon import COEFFICIENTS, orthogonalized
from tristep.viz.style import line_style, quieten

torch.set_num_threads(1)  # matrices this small gain nothing from more

# %% [markdown]
# ## A matrix before and after
#
# A random matrix, a gradient of rank 8 with some noise, and what Muon makes of both. There is no singular value
# decomposition in it: the iteration of Newton and Schulz is products of matrices only, $X \leftarrow a X + (b X X^T + c
# (X X^T)^2) X$, which does the polynomial $a x + b x^3 + c x^5$ to each singular value and leaves the vectors alone.
#
# *Guess:* the gradients get ten times as large. How much longer are Muon's steps?
#
# <details><summary>Answer</summary>
#
# Not at all: the matrix is divided by its norm first, and all singular values of the step are about 1. So Muon, as Adam,
# has a rate that says how long steps are.
#
# </details>

# %%
torch.manual_seed(0)
noise = torch.randn(64, 128)
matrices = {"random": noise, "rank 8 and noise": torch.randn(64, 8) @ torch.randn(8, 128) + 0.1 * noise}


def singular_values(matrix):
    return torch.linalg.svdvals(matrix.double())


figure = viz.Figure(8.5, 3.2)
figure.set_layout_engine("constrained")
for axes, (name, matrix) in zip(figure.subplots(1, 2), matrices.items(), strict=True):
    before = singular_values(matrix / matrix.norm())
    after = singular_values(orthogonalized(matrix[None], COEFFICIENTS["quintic"], 1e-7)[0])
    axes.semilogy(before, label="before, over the norm", **line_style(0))
    axes.semilogy(after, label="after 5 steps", **line_style(1))
    axes.set(xlabel="number of the singular value", ylabel="singular value", title=name)
    quieten(axes)
figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False, fontsize=9)
figure

# %% [markdown]
# ## The lists side by side
#
# The coefficients need not be the same in each step. "quintic" is Jordan's original: steep at 0, and content with
# values between about 0.7 and 1.2. "polar_express" (Amsel et al. 2025) chooses each step's polynomial as the best after
# those before. "cubic5" has no fifth powers, which saves a third of the products, and treats small values worse.
# "deepseekv4" takes eight quintic steps and two that converge, and comes to 1 within a thousandth, but for rounding.
# Move the slider to see one step after the other.

# %%
view = viz.OrthogonalizationView()
view

# %%
from IPython.display import Markdown

Markdown(view.table())

# %% [markdown]
# ## In a training
#
# A network on handwritten digits, trained by `Trainer` with Muon for the matrix in the middle. Muon is for hidden
# layers: the first and last layer and the biases have AdamW, in the same Trainer.
#
# *Guess:* AdamW's last step is a matrix, too. How many of its 64 directions get more than a tenth of what the first gets?
#
# <details><summary>Answer</summary>
#
# At most 16. With Muon the 17th still gets more than half.
#
# </details>
#
# The right picture has the singular values of the hidden weight's last step: with AdamW a few directions get nearly all of
# the step, with Muon most have nearly equal shares. The last ones are directions in which there is hardly any gradient, as
# of neurons that are never active.

# %%
images, labels = (torch.tensor(array) for array in load_digits(return_X_y=True))
images = images.float() / 16
shuffle = torch.Generator().manual_seed(0)
batches = [batch for _ in range(6) for batch in torch.randperm(1344, generator=shuffle).split(64)]


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def trained(hidden, arguments):
    net = network()
    rest = ("*", "adamw", {"learning_rate": 0.003})
    trainer = tristep.Trainer(net, [("2.weight", hidden, arguments), rest])
    losses, step = [], None
    for batch in batches:
        before = net[2].weight.detach().clone()
        trainer.zero_grad()
        loss = cross_entropy(net(images[batch]), labels[batch])
        loss.backward()
        trainer.step(1)
        losses.append(loss.item())
        step = net[2].weight.detach() - before
    return losses, step


runs = {
    "adamw": trained("adamw", {"learning_rate": 0.003}),
    "muon": trained("muon", {"learning_rate": 0.02}),
    "muon, polar_express": trained("muon", {"learning_rate": 0.02, "coefficients": "polar_express"}),
}

figure = viz.Figure(8.5, 3.2)
figure.set_layout_engine("constrained")
left, right = figure.subplots(1, 2)
smooth = {}
for i, (name, (losses, step)) in enumerate(runs.items()):
    values = singular_values(step)
    smooth[name] = torch.tensor(losses).unfold(0, 10, 1).mean(1)  # of each update and the nine before
    left.semilogy(range(10, 10 + len(smooth[name])), smooth[name], label=name, **line_style(i))
    right.semilogy(values / values[0], **line_style(i))
left.set(xlabel="update", ylabel="loss, mean of the last 10")
right.set(xlabel="number of the singular value", ylabel="last step's singular value,\nover the largest", ylim=(1e-3, 1.5))
for axes in (left, right):
    quieten(axes)
figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=9)
figure

# %% [markdown]
# ## NorMuon's rows
#
# Orthogonal as it is, the step of a matrix with more rows than columns may be long in some rows and short in others:
# that is, some neurons move far and others hardly. NorMuon (Li et al. 2025) keeps an average of each row's mean square,
# divides the row by its root, and gives the matrix the size that it had. The rows of a tall layer's last steps, sorted
# by length:

# %%
torch.manual_seed(0)
strength = torch.linspace(-2, 2, 96).exp()[:, None]  # some neurons have far larger gradients than others
pulled = torch.randn(96, 32) * strength

figure = viz.Figure(8.5, 3.0)
figure.set_layout_engine("constrained")
axes, lengths = figure.subplots(), {}
for i, name in enumerate(("muon", "normuon")):
    weight = nn.Parameter(torch.zeros(96, 32))
    trainer = tristep.Trainer([weight], name, {"learning_rate": 0.02})
    for _ in range(40):
        before = weight.detach().clone()
        weight.grad = pulled + strength * torch.randn(96, 32)
        trainer.step(1)
    rows = (weight.detach() - before).norm(dim=1).sort().values
    lengths[name] = rows / rows.square().mean().sqrt()
    axes.plot(lengths[name], label=name, **line_style(i))
axes.set(xlabel="row, by length", ylabel="length of the step,\nover the root of the mean square", ylim=(0, None))
quieten(axes)
figure.legend(loc="outside right center", frameon=False, fontsize=9)
figure

# %% [markdown]
# ## Which to take
#
# - `Trainer(net, [("*embed*|*head*|ndim<2", "adamw", {...}), ("*", "muon", {...})])` is the usual division.
# - `coefficients="polar_express"` is as fast as the default and nearer to orthogonal; `"deepseekv4"` is orthogonal but
#   for rounding, at twice the products.
# - `match_adamw=True` makes steps as large as AdamW's, so that its rate and decay can be used.
# - `split={"*qkv.weight": 3}` takes the projections of attention, or its heads, as matrices of their own;
#   `flatten=True` also takes the kernels of convolutions.
# - `state_dtype="8bit"` stores the momentum in a byte for each element.

# %% [markdown]
# In the picture AdamW's loss is below Muon's for the first 60 updates, and above it in the last 30: from one start, at rates
# that somebody had chosen. May one say that either is better? Tutorial 14 holds a race.
#
# ## Exercises
#
# 1. What does one step with the coefficients of "quintic", 3.4445, -4.7750 and 2.0315, make of a singular value of 0.1?
# 2. A step $U V^T$ of a matrix of 64 x 128 has singular values of 1. What is its norm, the root of the sum of squares of all
#    elements?
# 3. A gradient of 64 x 128 has the rank 8 exactly. How many singular values of its step are about 1?
#
# Put your answers in place of `None`, and run the cell: it tries them.
#
# <details><summary>Solutions</summary>
#
# 1. $3.4445 \cdot 0.1 - 4.775 \cdot 0.001 + 2.0315 \cdot 0.00001 = 0.3397$.
# 2. $\sqrt{64} = 8$: the sum of squares of the elements is that of the singular values, and there are 64.
# 3. 8: the polynomial has no constant term, so 0 stays 0.
#
# </details>

# %%
answers = {1: None, 2: None, 3: None}

a, b, c = COEFFICIENTS["quintic"][0]
once = float(
    singular_values((lambda x: a * x + b * x @ x.T @ x + c * x @ x.T @ x @ x.T @ x)(0.1 * torch.eye(3).double()))[0]
)
orthogonal = orthogonalized(matrices["random"][None], COEFFICIENTS["deepseekv4"], 1e-7)[0]
of_rank_8 = orthogonalized((torch.randn(64, 8) @ torch.randn(8, 128))[None], COEFFICIENTS["quintic"], 1e-7)[0]
is_right = {
    1: lambda value: abs(value / once - 1) < 0.01,
    2: lambda norm: abs(norm / orthogonal.norm().item() - 1) < 0.02,
    3: lambda count: count == (singular_values(of_rank_8) > 0.5).sum().item(),
}
hints = {
    1: lambda value: (
        "the linear term alone; the cube of 0.1 counts, too"
        if abs(value - 0.34445) < 1e-4
        else f"{'too large' if value > once else 'too small'}: it is a x + b x^3 + c x^5, at x = 0.1"
    ),
    2: lambda norm: (
        "take the root" if norm > 12 else f"its square would be {norm**2:.3g}: how many singular values of 1 are there?"
    ),
    3: lambda count: (
        "what is 0 stays 0: a polynomial without a constant term makes nothing of nothing"
        if count > 8
        else f"{count} would be a gradient of rank {count}"
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
# - In "A matrix before and after", do a single step of the iteration: `COEFFICIENTS["quintic"][:1]`. What becomes of the
#   small singular values?
#
# <details><summary>What one sees</summary>
#
# They are multiplied by 3.4, the coefficient $a$, as $x^3$ and $x^5$ are nothing for small $x$. A value of 0.001 is at about
# a half after five such steps, which is how many there are.
#
# </details>
#
# - In "NorMuon's rows", let all neurons have gradients of the same size: `strength = torch.ones(96, 1)`. How much is left
#   for NorMuon to do?
#
# <details><summary>What one sees</summary>
#
# Little. Muon's shortest row then has about 0.7 of the usual length, and had less than 0.1. NorMuon pays where some neurons
# get far larger gradients than others.
#
# </details>

# %% [markdown]
# What this notebook has said, once more as checks.

# %%
exercises.prove({1: 0.3397, 2: 8, 3: 8}, wrong={1: (0.34445, 0.1), 2: (64, 1), 3: (64, 1)})
bands = {row.name: row.spectrum for row in view.found}
products = {row.name: row.products for row in view.found}
assert 0.4 < bands["quintic"][0] < bands["quintic"][1] < 1.25
assert 0.8 < bands["polar_express"][0] < bands["polar_express"][1] < 1.15
assert abs(bands["deepseekv4"][0] - 1) < 0.002
assert bands["cubic5"][0] < bands["quintic"][0] / 2  # small values
assert 3 * products["cubic5"] == 2 * products["quintic"] == products["deepseekv4"]
shares = {name: singular_values(step) for name, (_, step) in runs.items()}
assert shares["adamw"][16] < 0.1 * shares["adamw"][0]
assert shares["muon"][16] > 0.5 * shares["muon"][0]
assert all(losses[-1] < 0.5 for losses, _ in runs.values())
assert (smooth["adamw"][:51] < smooth["muon"][:51]).all()  # from update 10 to update 60
assert (smooth["adamw"][-30:] > smooth["muon"][-30:]).all()
assert lengths["normuon"][0] > 0.7
assert lengths["muon"][0] < 0.3
matrix = matrices["rank 8 and noise"]  # of the open exercises
once_more = singular_values(orthogonalized(matrix[None], COEFFICIENTS["quintic"][:1], 1e-7)[0])
assert abs(once_more[-50:] / singular_values(matrix / matrix.norm())[-50:] - a).max() < 0.1
weight, alike = nn.Parameter(torch.zeros(96, 32)), torch.randn(96, 32)
trainer = tristep.Trainer([weight], "muon", {"learning_rate": 0.02})
for _ in range(40):
    before = weight.detach().clone()
    weight.grad = alike + torch.randn(96, 32)
    trainer.step(1)
rows = (weight.detach() - before).norm(dim=1)
assert rows.min() > 0.5 * rows.square().mean().sqrt()
