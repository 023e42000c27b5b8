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
# # From MXNet Gluon to tristep
#
# Tutorial 10 used words of Gluon. What do they mean, and does a script that was written for Gluon keep its numbers?
#
# Gluon was the training interface of Apache MXNet, which has been retired. Its `Trainer` decided a few things otherwise than
# PyTorch: what a step divides by, where weight decay goes in, what the learning rate multiplies, from where a schedule
# counts, who updates the weights. So two optimizers of the same name give different numbers. If you have never seen MXNet,
# you learn here where to look for such differences; each is computed in NumPy, next to what tristep and PyTorch do. If you
# have a script for Gluon, it is ported at the end. Nothing but this notebook is needed, and no MXNet.

# %%
import tempfile
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn

import tristep
from tristep import initializer, lr_scheduler, viz
from tristep.viz.style import COLOURS, line_style, quieten

torch.set_num_threads(1)  # layers this small gain nothing from more


def moved(make, gradients, change=None):
    """How far a weight, which starts at 0, goes down in each step with these gradients; `change` is called before each."""
    weight, ways = nn.Parameter(torch.zeros(1)), []
    optimizer = make([weight])
    for n, gradient in enumerate(gradients, start=1):
        if change is not None:
            change(optimizer, n)
        before, weight.grad = weight.item(), torch.full((1,), float(gradient))
        optimizer.step(1) if isinstance(optimizer, tristep.Trainer) else optimizer.step()
        ways.append(before - weight.item())
    return np.array(ways)


# %% [markdown]
# ## A batch is a sum, and `step` divides
#
# Gluon's losses give a number for each sample, and their gradients are added up. `step(batch_size)` divides by the number of
# samples. PyTorch's losses divide at once, by `reduction="mean"`. For one batch this is the same. It no longer is when
# workers have parts of different sizes, or when the last batch of an epoch is small.
#
# *Guess:* eight samples have the gradients 1 to 8. One worker has the first five of them, another the last three. What is
# the mean of the workers' means, and what is right?
#
# <details><summary>Answer</summary>
#
# The means are 3 and 7, and their mean is 5. The mean of all eight is 4.5. Sums have no such trouble: $(15 + 21) / 8 = 4.5$.
# So whoever adds up over workers is better off with sums, and divides once, at the end.
#
# </details>

# %%
samples = np.arange(1.0, 9.0)
parts = samples[:5], samples[5:]
mean_of_means, mean_of_all = np.mean([part.mean() for part in parts]), samples.mean()

workers = tristep.replicate(nn.Linear(1, 1, bias=False), ["cpu", "cpu"])
start = workers[0].weight.item()
trainer = tristep.Trainer(workers, "sgd", {"learning_rate": 1.0}, kvstore="device")
for net, part in zip(workers, parts, strict=True):
    net(torch.tensor(part, dtype=torch.float32)[:, None]).sum().backward()  # the gradient of each is its sample
trainer.step(batch_size=8)
of_workers = start - workers[0].weight.item()
print(f"mean of the means {mean_of_means}, sum over 8 {mean_of_all}; a step of both workers went {of_workers:.4f}")

# %% [markdown]
# ## Where the decay goes in
#
# Weight decay `wd` is added to the gradient *after* the division, so it does not depend on the size of a batch:
#
# $$w \leftarrow w - \eta\,\text{lr\_mult}\,\Big(\frac{1}{n} \sum_i g_i + \text{wd}\; \text{wd\_mult}\; w\Big)$$
#
# A parameter may have two factors of its own. `wd_mult = 0` keeps biases and norms from decaying. `lr_mult` is for layers
# that shall learn more slowly, or not at all. It stands before the bracket, so it slows the decay, too. In PyTorch
# the same is done with parameter groups.
#
# *Guess:* four weights are 2. Each gets a sum of gradients of 1 from 4 samples, `learning_rate=0.1` and `wd=0.5`. Where is
# the one with `lr_mult = 3` and `wd_mult = 0` after a step?
#
# <details><summary>Answer</summary>
#
# At $2 - 0.3 \cdot (0.25 + 0) = 1.925$.
#
# </details>

# %%
factors = {"plain": (1, 1), "wd_mult 0": (1, 0), "lr_mult 3": (3, 1), "lr_mult 3, wd_mult 0": (3, 0)}
decaying = {name: nn.Parameter(torch.full((1,), 2.0)) for name in factors}
for name, (decaying[name].lr_mult, decaying[name].wd_mult) in factors.items():
    decaying[name].grad = torch.ones(1)
tristep.Trainer(decaying, "sgd", {"learning_rate": 0.1, "wd": 0.5}).step(batch_size=4)
by_hand = {name: 2 - 0.1 * lr_mult * (1 / 4 + 0.5 * wd_mult * 2) for name, (lr_mult, wd_mult) in factors.items()}
for name, weight in decaying.items():
    print(f"{name:<22} tristep {weight.item():.4f}   by hand {by_hand[name]:.4f}")

# %% [markdown]
# ## The rate is inside the momentum
#
# SGD with momentum is written down in two ways:
#
# $$\text{Gluon:} \quad v \leftarrow \mu v - \eta g, \quad w \leftarrow w + v \qquad\qquad
# \text{PyTorch:} \quad v \leftarrow \mu v + g, \quad w \leftarrow w - \eta v$$
#
# While the rate stays the same, so do the weights: one $v$ is $-\eta$ times the other. When the rate changes, they differ.
#
# *Guess:* the gradient is always 1, and $\mu$ is 0.9. At update 21 the rate goes from 0.1 to 0.01. How long is that step in
# either library?
#
# <details><summary>Answer</summary>
#
# In PyTorch a tenth of the one before: the rate multiplies all of $v$. In Gluon $v$ has the old rate in it and
# shrinks by 0.9 a step: $0.9 \cdot 0.878 + 0.01 = 0.80$. A schedule's drop arrives about $1 / (1 - \mu) = 10$ updates late.
#
# </details>


# %%
def drop(optimizer, n):
    """Divide the rate by ten before update 21."""
    if n == 21 and isinstance(optimizer, tristep.Trainer):
        optimizer.set_learning_rate(0.01)
    elif n == 21:
        optimizer.param_groups[0]["lr"] = 0.01


ones = np.ones(50)
ways = {
    "Trainer, as Gluon": moved(lambda w: tristep.Trainer(w, "sgd", {"learning_rate": 0.1, "momentum": 0.9}), ones, drop),
    "torch.optim": moved(lambda w: torch.optim.SGD(w, lr=0.1, momentum=0.9), ones, drop),
    "tristep.optim": moved(lambda w: tristep.optim.SGD(w, lr=0.1, momentum=0.9), ones, drop),
}
written, v_gluon, v_torch = {"as Gluon": [], "as PyTorch": []}, 0.0, 0.0
for n in range(1, 51):
    rate = 0.1 if n < 21 else 0.01
    v_gluon, v_torch = 0.9 * v_gluon - rate, 0.9 * v_torch + 1
    written["as Gluon"].append(-v_gluon)
    written["as PyTorch"].append(rate * v_torch)

figure = viz.Figure(8.5, 3.0)
figure.set_layout_engine("constrained")
axes = figure.subplots()
for i, (name, lengths) in enumerate(ways.items()):
    axes.plot(range(1, 51), lengths, label=name, **line_style(i))
for name, marker in zip(written, "ox", strict=True):
    axes.plot(range(1, 51, 3), written[name][::3], marker, color=COLOURS[7], markersize=4, label=f"NumPy, {name}")
axes.set(xlabel="update", ylabel="length of the step")
quieten(axes)
figure.legend(loc="outside right center", frameon=False, fontsize=9)
figure

# %% [markdown]
# Until update 20 all lines are one. At update 21 PyTorch's falls at once, and Gluon's comes down over the next thirty.
# `tristep.Trainer` follows Gluon, and `tristep.optim` PyTorch: code keeps the numbers that it had.
#
# ## Where Adam's epsilon stands
#
# Both divide Adam's average by the root of the average square. MXNet adds $\epsilon$ *before* the correction for the first
# steps (tutorial 2), PyTorch after it:
#
# $$\text{MXNet:} \quad \eta\, \frac{\sqrt{1 - \beta_2^t}}{1 - \beta_1^t}\, \frac{m}{\sqrt{v} + \epsilon} \qquad\qquad
# \text{PyTorch:} \quad \frac{\eta}{1 - \beta_1^t}\, \frac{m}{\sqrt{v / (1 - \beta_2^t)} + \epsilon}$$
#
# So at the first step MXNet's $\epsilon$ counts $1 / \sqrt{0.001} = 32$ times as much. One sees it where gradients are tiny,
# as $\epsilon$ is $10^{-8}$, and nowhere else.

# %%
first_steps = {}
print("gradient   Trainer   as MXNet   torch.optim   as PyTorch")
for size in (1.0, 1e-6, 1e-8):
    m, v = 0.1 * size, 0.001 * size**2
    as_mxnet = 0.001**0.5 / 0.1 * m / (v**0.5 + 1e-8)
    as_torch = 1 / 0.1 * m / ((v / 0.001) ** 0.5 + 1e-8)
    ours = moved(lambda w: tristep.Trainer(w, "adam", {"learning_rate": 1.0}), [size])[0]
    theirs = moved(lambda w: torch.optim.Adam(w, lr=1.0), [size])[0]
    first_steps[size] = ours, as_mxnet, theirs, as_torch
    print(f"{size:<8} {ours:9.4f} {as_mxnet:10.4f} {theirs:13.4f} {as_torch:12.4f}")

# %% [markdown]
# ## A schedule counts from 1
#
# Gluon counts an update before it makes it, and asks the schedule for the rate of that number: the first rate is
# `schedule(1)`. `FactorScheduler(step=2)` lowers the rate when *more* than 2 updates have been counted, so updates 1 and 2
# have the first rate. PyTorch's `StepLR` counts from 0, and is told by `scheduler.step()`.
#
# *Guess:* which updates have half of the first rate with `FactorScheduler(step=2, factor=0.5)`, and which with
# `StepLR(step_size=2, gamma=0.5)`?
#
# <details><summary>Answer</summary>
#
# Updates 3 and 4 with both. The numbers that they count are 3 and 4 in Gluon, 2 and 3 in PyTorch: whoever writes a schedule
# as a function of the count must know which.
#
# </details>

# %%
asked = []


def constant(n):
    asked.append(n)
    return 0.1


moved(lambda w: tristep.Trainer(w, "sgd", {"lr_scheduler": constant}), np.ones(3))
halving = lr_scheduler.FactorScheduler(step=2, factor=0.5, base_lr=1.0)
optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
stepped, torchs_rates = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5), []
for _ in range(6):
    torchs_rates.append(optimizer.param_groups[0]["lr"])
    optimizer.step()
    stepped.step()
print("a Trainer asks for the rates of updates", asked)
print("FactorScheduler", [halving(n) for n in range(1, 7)])
print("StepLR         ", torchs_rates)

# %% [markdown]
# ## Who updates: `update_on_kvstore`
#
# Gluon's workers put their gradients into a *store*, which adds them up. With `update_on_kvstore=True` the store also has
# the optimizer: it updates the weights, and workers fetch them. Then the states exist once, which is how a parameter server
# works. With False the store hands the sum back, and each worker updates its own copy: states exist once for each
# worker, but between sum and update one may do something with the gradients. So `step` falls into two calls:
# `allreduce_grads()` and `update(batch_size)`. Here two replicas on the CPU play the workers, and the norm of the summed
# gradient is clipped by hand.
#
# *Guess:* what happens to `allreduce_grads()` where the store updates?
#
# <details><summary>Answer</summary>
#
# It is refused: summing and updating are one call there, and there is no moment in between.
#
# </details>

# %%
vector = np.array([3.0, 4.0])  # the gradient of each of two workers; their sum has the norm 10


def two_workers(update_on_kvstore):
    nets = tristep.replicate(nn.Linear(2, 1, bias=False), ["cpu", "cpu"])
    trainer = tristep.Trainer(nets, "sgd", {"learning_rate": 1.0}, kvstore="device", update_on_kvstore=update_on_kvstore)
    for net in nets:
        net(torch.tensor(vector, dtype=torch.float32)[None]).sum().backward()
    return nets, trainer


nets, trainer = two_workers(update_on_kvstore=False)
start = nets[0].weight.detach().numpy().copy()
trainer.allreduce_grads()
summed = [net.weight.grad.numpy().copy() for net in nets]
for net in nets:
    nn.utils.clip_grad_norm_(net.parameters(), max_norm=2.0)
trainer.update(batch_size=2)
clipped_step = (start - nets[0].weight.detach().numpy())[0]
in_numpy = 2 * vector * (2.0 / np.linalg.norm(2 * vector)) / 2
print("each worker has the sum", *(each.tolist() for each in summed))
print("the step, clipped:", clipped_step.round(4), "in NumPy:", in_numpy)

_, trainer = two_workers(update_on_kvstore=True)
try:
    trainer.allreduce_grads()
except tristep.UpdateOnKVStoreError as error:
    refused = str(error)
    print("where the store updates:", refused)

# %% [markdown]
# ## Are the numbers MXNet's?
#
# These were recorded from MXNet 1.9.1: three optimizers, ten random gradients of a weight, and the weight after each step.
# The rules are written down in NumPy as MXNet has them, and tristep gets the same gradients. `rescale_grad` is what `step`
# multiplies by before it divides; a gradient is clipped before the decay is added. Ftrl sets weights to
# exactly 0 while their gradients do not add up to more than `lamda1`.
#
# *Guess:* how far are the three from each other after ten steps?
#
# <details><summary>Answer</summary>
#
# By less than one in 100,000: the numbers below have six digits, and float32 about seven. The tests of tristep compare
# MXNet's other optimizers with recordings like these, too.
#
# </details>

# %%
RECORDED = {  # from MXNet 1.9.1: arguments, the weight at first, gradients, and the weight after each step
    "sgd": (
        {"learning_rate": 0.1, "momentum": 0.9, "wd": 0.01, "clip_gradient": 0.5, "rescale_grad": 0.25},
        -1.214919,
        [-0.734991, 1.0171, 1.44925, 0.0259431, 0.314677, -0.69772, -0.518767, 2.6774, 0.958437, 0.485783],
        [-1.19533, -1.20193, -1.2429, -1.27918, -1.31842, -1.33497, -1.33557, -1.38477, -1.45162, -1.52249],
    ),
    "adam": (
        {"max_update": 25, "base_lr": 0.05, "final_lr": 0.002, "warmup_steps": 3, "warmup_begin_lr": 0.005},  # of a cosine
        0.6347842,
        [-0.391392, -1.25182, -0.802601, 0.690421, -0.174856, -0.0897671, 0.021095, -0.500291, -0.751158, -0.962808],
        [0.654784, 0.686639, 0.733318, 0.756171, 0.777866, 0.797405, 0.813591, 0.832869, 0.85574, 0.881256],
    ),
    "ftrl": (
        {"learning_rate": 0.5, "lamda1": 0.5, "beta": 2.0},
        0.5919856,
        [1.52213, 2.26518, 0.974168, -1.0307, 1.0231, -0.797789, 1.07782, 1.25336, -0.862724, 0.733414],
        [-0.0, -0.157023, -0.256474, -0.154939, -0.252539, -0.177812, -0.275658, -0.385123, -0.311051, -0.373276],
    ),
}


def cosine_rate(n):
    """The schedule of the recorded run of Adam: three updates of warm-up, and then half of a cosine."""
    if n < 3:
        return 0.005 + (0.05 - 0.005) * n / 3
    return 0.002 + (0.05 - 0.002) * (1 + np.cos(np.pi * (n - 3) / (25 - 3))) / 2


def sgd(w, g, state, t):
    g = np.clip(0.25 * g, -0.5, 0.5) + 0.01 * w
    state["v"] = 0.9 * state.get("v", 0) - 0.1 * g
    return w + state["v"]


def adam(w, g, state, t):
    state["m"] = 0.9 * state.get("m", 0) + 0.1 * g
    state["v"] = 0.999 * state.get("v", 0) + 0.001 * g**2
    rate = cosine_rate(t) * np.sqrt(1 - 0.999**t) / (1 - 0.9**t)
    return w - rate * state["m"] / (np.sqrt(state["v"]) + 1e-8)


def ftrl(w, g, state, t):
    n = state.get("n", 0)
    state["z"] = state.get("z", 0) + g - (np.sqrt(n + g**2) - np.sqrt(n)) / 0.5 * w
    state["n"] = n + g**2
    return -np.sign(state["z"]) * max(abs(state["z"]) - 0.5, 0) / ((2.0 + np.sqrt(state["n"])) / 0.5)


weights, apart = {}, {}
for (name, (arguments, start, gradients, recorded)), rule in zip(RECORDED.items(), (sgd, adam, ftrl), strict=True):
    if name == "adam":
        arguments = {"learning_rate": 0.05, "lr_scheduler": lr_scheduler.CosineScheduler(**arguments)}
    weight, w, state = nn.Parameter(torch.tensor([start])), start, {}
    trainer = tristep.Trainer([weight], name, arguments)
    weights[name] = {"MXNet": recorded, "NumPy": [], "tristep": []}
    for t, g in enumerate(gradients, start=1):
        weight.grad = torch.tensor([g])
        trainer.step(batch_size=1)
        w = rule(w, g, state, t)
        weights[name]["tristep"].append(weight.item())
        weights[name]["NumPy"].append(w)
    apart[name] = {other: np.abs(np.subtract(weights[name][other], recorded)).max() for other in ("NumPy", "tristep")}
    print(f"{name:<5} largest distance from MXNet: NumPy {apart[name]['NumPy']:.0e}, tristep {apart[name]['tristep']:.0e}")

figure = viz.Figure(9.5, 3.0)
figure.set_layout_engine("constrained")
for (name, each), axes in zip(weights.items(), figure.subplots(1, 3), strict=True):
    axes.plot(range(1, 11), each["tristep"], label="tristep", color=COLOURS[0], linewidth=1.2)
    axes.plot(range(1, 11), each["MXNet"], "o", label="MXNet, recorded", color=COLOURS[1], markersize=4)
    axes.set_title(name, fontsize=10)
    axes.set(xlabel="update")
    quieten(axes)
figure.axes[0].set_ylabel("weight")
figure.axes[0].legend(frameon=False, fontsize=9)
figure

# %% [markdown]
# ## A script, ported
#
# Here is a whole training script for Gluon:
#
# ```python
# from mxnet import autograd, gluon, init, lr_scheduler                                         # MXNet
# from mxnet.gluon import nn
#
# data = gluon.data.ArrayDataset(images[:1347], labels[:1347])
# loader = gluon.data.DataLoader(data, batch_size=64, shuffle=True)
# net = nn.HybridSequential()
# net.add(nn.Dense(64, activation="relu"), nn.Dense(10))
# net.initialize(init.Xavier(magnitude=2.24))
# loss_fn = gluon.loss.SoftmaxCrossEntropyLoss()
# schedule = lr_scheduler.CosineScheduler(max_update=220, base_lr=0.01, final_lr=0.0001, warmup_steps=22)
# trainer = gluon.Trainer(net.collect_params(), "adam", {"learning_rate": 0.01, "lr_scheduler": schedule, "wd": 1e-4})
# for epoch in range(10):
#     for x, y in loader:
#         with autograd.record():
#             loss = loss_fn(net(x), y)
#         loss.backward()
#         trainer.step(x.shape[0])
# ```
#
# Layers, losses and gradients become PyTorch's. The trainer, its optimizers, schedules and initializers keep names, defaults
# and numbers. What differs are PyTorch's ways:
#
# - layers are told how many inputs they have, and have values from the start. `initialize` fills them anew, and gives
#   biases zeros, as in Gluon. A parameter's own initializer is an attribute: `net[0].bias.init = "ones"`;
# - `reduction="none"` gives a loss for each sample, as Gluon does;
# - a backward pass starts from one number, hence `.sum()`, and adds to the gradients that are there, hence `zero_grad`;
# - it records unless told not to (`torch.no_grad()`), so `record` has no counterpart.

# %%
images, labels = load_digits(return_X_y=True)
images, labels = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
data = torch.utils.data.TensorDataset(images[:1347], labels[:1347])
loader = torch.utils.data.DataLoader(data, batch_size=64, shuffle=True, generator=torch.Generator().manual_seed(0))
net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
initializer.initialize(net, initializer.Xavier(magnitude=2.24), torch.Generator().manual_seed(0))
biases_start_at_zero = not net[0].bias.any()
loss_fn = nn.CrossEntropyLoss(reduction="none")
schedule = lr_scheduler.CosineScheduler(max_update=220, base_lr=0.01, final_lr=0.0001, warmup_steps=22)
trainer = tristep.Trainer(net, "adam", {"learning_rate": 0.01, "lr_scheduler": schedule, "wd": 1e-4})

losses, rates = [], []
for _ in range(10):
    for x, y in loader:
        trainer.zero_grad()  # new
        loss = loss_fn(net(x), y)
        loss.sum().backward()  # one number
        trainer.step(x.shape[0])
        losses.append(loss.mean().item())
        rates.append(trainer.learning_rate)

with torch.no_grad():
    accuracy = (net(images[1347:]).argmax(dim=1) == labels[1347:]).float().mean().item()
viz.plot_training({"adam": losses}, {"adam": rates}, {"adam": f"test accuracy {accuracy:.1%}"}, title="The ported script")

# %% [markdown]
# The last batch of each epoch has 3 images. `step(x.shape[0])` divides by 3 there, as in Gluon, so each of them counts 21
# times as much as another one; `step(64)` in all steps would give all the same weight.
#
# ## Saving
#
# `net.save_parameters` becomes `torch.save(net.state_dict(), ...)`. `save_states` and `load_states` of the trainer are still
# there. The file is no pickle but safetensors with JSON, which runs no code when it is read.

# %%
with tempfile.TemporaryDirectory() as folder:
    torch.save(net.state_dict(), Path(folder, "net.pt"))
    trainer.save_states(Path(folder, "trainer.states"))

    again = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    again.load_state_dict(torch.load(Path(folder, "net.pt")))
    resumed = tristep.Trainer(again, "adam")
    resumed.load_states(Path(folder, "trainer.states"))
print("goes on at update", resumed.optimizer.num_update, "with the rate", resumed.learning_rate)

# %% [markdown]
# ## What differs
#
# The documentation has a page with every difference that a user of MXNet may notice, with its reason, "Differences from
# MXNet". Those that one meets first:
#
# | | MXNet | tristep |
# |---|---|---|
# | gradients of a second backward pass | replace the first | are added to them, until `zero_grad` |
# | a parameter that is not to be trained | `grad_req="null"` | `requires_grad=False` |
# | a step without a new gradient | a warning as an error | `StaleGradientError`, and nothing has changed |
# | an unknown `kvstore` | a local store | an error that names the nearest |
# | several GPUs in one process | `ctx=[gpu(0), gpu(1)]` | `tristep.replicate(net, ["cuda:0", "cuda:1"])` |
# | several machines | `launch.py` and `DMLC_ROLE` | torchrun |
# | `amp.init()` | changes operators | torch's `autocast` chooses types; the loss scale is the same |
#
# *Guess:* a second step is asked for, without a backward pass in between. What are the weights afterwards?
#
# <details><summary>Answer</summary>
#
# What they were: it is an error, and nothing has changed when it is raised.
#
# </details>

# %%
before = [parameter.detach().clone() for parameter in net.parameters()]
try:
    trainer.step(64)
except tristep.StaleGradientError as error:
    message = str(error)
    print(message)

# %% [markdown]
# That was for those who come from MXNet. Most scripts have `torch.optim`; what do these become? Tutorial 12 changes one
# import.
#
# ## Exercises
#
# 1. Which rate has update 121 of the script's schedule? It is a cosine from 0.01 to 0.0001 behind 22 updates of warm-up.
# 2. A ported loop forgets `zero_grad`. After three backward passes with the same batch and weights, how many times its
#    gradient is in `.grad`?
# 3. `Xavier(magnitude=2.24)` draws evenly up to $\sqrt{2.24 / n}$, with the mean $n$ of the numbers of inputs and outputs.
#    Up to what for `nn.Dense(64)` with 64 inputs?
#
# Put your answers in place of `None`, and run the cell: it tries them.
#
# <details><summary>Solutions</summary>
#
# 1. $(0.01 + 0.0001) / 2 = 0.00505$: it is 99 of 198 updates behind the warm-up, in the middle of the cosine.
# 2. 3: torch adds gradients up, where Gluon replaces them.
# 3. $\sqrt{2.24 / 64} = 0.187$.
#
# </details>

# %%
answers = {1: None, 2: None, 3: None}


def gradient_after(passes):
    """The gradient after some backward passes, over that of one."""
    weight = nn.Parameter(torch.ones(1))
    for _ in range(passes):
        (3 * weight).sum().backward()
    return weight.grad.item() / 3


drawn = nn.Linear(64, 64)
initializer.initialize(drawn, initializer.Xavier(magnitude=2.24), torch.Generator().manual_seed(1))
end = drawn.weight.abs().max().item()  # of 4,096 even numbers
is_right = {
    1: lambda rate: abs(rate / schedule(121) - 1) < 0.005,
    2: lambda times: times == gradient_after(3),
    3: lambda most: abs(most / end - 1) < 0.01,
}
hints = {
    1: lambda rate: (
        "that is the middle between 0.01 and 0, but it ends at 0.0001"
        if abs(rate - 0.005) < 1e-9
        else f"{rate} comes {'earlier' if rate > schedule(121) else 'later'}: 121 is the middle of what follows the warm-up"
    ),
    2: lambda times: (
        "so it would be in Gluon, which replaces a gradient by the next"
        if times == 1
        else "each of the three adds one gradient"
    ),
    3: lambda most: (
        f"{most:.3g} is the root mean square of such numbers, or a variance: where do they end?"
        if most < end
        else "n is the mean of inputs and outputs, 64, and a root is taken of all"
    ),
}
exercises = viz.Exercises(is_right, hints, kinds={2: "count"})
exercises.check(answers)

# %% [markdown]
# ## Open exercises
#
# There is no number to type here. Each exercise names a cell and a change: predict what you will see, change the cell, run
# it, and look. The last cell checks the notebook as it came.
#
# - In "A batch is a sum", give one worker the first sample and the other the seven others: `samples[:1], samples[1:]`. Which
#   of the printed numbers change?
#
# <details><summary>What one sees</summary>
#
# The mean of the means alone. It is 3.0 now, as the single sample, 1, counts as much as the seven others together. The step
# of both workers remains 4.5.
#
# </details>
#
# - In "The rate is inside the momentum", let the rate rise at update 21: 1 in place of 0.01, in both libraries. Whose step
#   is longer?
#
# <details><summary>What one sees</summary>
#
# PyTorch's, by a factor of five: it is ten times as long as before at once, 8.9. Gluon's is $0.9 \cdot 0.878 + 1 = 1.8$, and
# takes some thirty updates to grow to the same length. A warm-up is softer there.
#
# </details>

# %% [markdown]
# What this notebook has said, once more as checks.

# %%
exercises.prove({1: 0.00505, 2: 3, 3: 0.187}, wrong={1: (0.005, 0.01), 2: (1, 2), 3: (0.035, 1.5)})
assert biases_start_at_zero
assert rates == [schedule(n) for n in range(1, 221)]
assert accuracy > 0.85
assert (resumed.optimizer.num_update, resumed.learning_rate) == (220, trainer.learning_rate)
assert all(map(torch.equal, net.parameters(), again.parameters()))
assert "no fresh gradient" in message
assert all(map(torch.equal, before, net.parameters()))
assert (mean_of_means, mean_of_all) == (5.0, 4.5)
assert abs(of_workers - mean_of_all) < 1e-5
assert all(abs(decaying[name].item() - weight) < 1e-6 for name, weight in by_hand.items())
assert np.allclose(ways["Trainer, as Gluon"], written["as Gluon"], atol=1e-5)
assert all(np.allclose(ways[name], written["as PyTorch"], atol=1e-5) for name in ("torch.optim", "tristep.optim"))
assert np.allclose(written["as Gluon"][:20], written["as PyTorch"][:20])
assert abs(written["as Gluon"][20] - 0.80) < 0.01
assert abs(written["as PyTorch"][20] - 0.089) < 0.001
assert written["as Gluon"][30] > 2 * written["as PyTorch"][30]  # ten updates later
assert abs(written["as Gluon"][49] / written["as PyTorch"][49] - 1) < 0.5  # thirty updates later
assert np.mean([samples[:1].mean(), samples[1:].mean()]) == 3.0  # of the open exercises
assert abs((0.9 * written["as Gluon"][19] + 1) - 1.79) < 0.01
assert abs((0.9 * written["as PyTorch"][19] / 0.1 + 1) - 8.9) < 0.01
for ours, as_mxnet, theirs, as_torch in first_steps.values():
    assert abs(ours - as_mxnet) < 1e-4
    assert abs(theirs - as_torch) < 1e-4
assert asked == [1, 2, 3]
assert [halving(n) for n in range(1, 7)] == torchs_rates == [1, 1, 0.5, 0.5, 0.25, 0.25]
assert np.allclose(summed, 2 * vector)
assert np.allclose(clipped_step, in_numpy, atol=1e-5)
assert "sums and updates in one call" in refused
assert all(max(distances.values()) < 1e-5 for distances in apart.values())
