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
# # From torch.optim to tristep.optim
#
# Tutorial 11 was for scripts of MXNet. What does a script become that has `torch.optim`, and does it give the same numbers?
#
# `tristep.optim` has torch's optimizers under torch's names, with torch's arguments, and updates all parameters of a model
# in one call. This notebook changes one import, compares the numbers step by step, moves a training from one library to the
# other and back in its middle, and runs torch's schedulers and `GradScaler` on it. At the end it times both on this machine,
# and says when to use a `Trainer` instead.

# %%
import time

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

import tristep
from tristep import viz
from tristep.viz.style import COLOURS, line_style, quieten

torch.set_num_threads(1)  # layers this small gain nothing from more

# %% [markdown]
# ## One import
#
# ```diff
# -from torch.optim import AdamW
# +from tristep.optim import AdamW
# ```
#
# The training loop below knows nothing of the library, and takes it as an argument. There are two parameter groups, as
# usual: weights decay, biases do not.

# %%
images, labels = (torch.tensor(array) for array in load_digits(return_X_y=True))
images = images.float() / 16
order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
training, test = order[:1344], order[1344:]


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def groups(net):
    weights = [parameter for name, parameter in net.named_parameters() if name.endswith("weight")]
    biases = [parameter for name, parameter in net.named_parameters() if name.endswith("bias")]
    return [{"params": weights, "weight_decay": 0.1}, {"params": biases, "weight_decay": 0.0, "lr": 0.006}]


def batches(epochs=4):
    shuffle = torch.Generator().manual_seed(0)
    return [batch for _ in range(epochs) for batch in training[torch.randperm(1344, generator=shuffle)].split(64)]


def step(net, optimizer, batch):
    optimizer.zero_grad()
    loss = cross_entropy(net(images[batch]), labels[batch])
    loss.backward()
    optimizer.step()
    return loss.item()


# %% [markdown]
# ## The same numbers
#
# Six optimizers from both libraries, side by side on the same batches. After each step the weights are compared: the
# largest difference, over the largest weight. A float32 has a relative precision of 6e-8, and rounding adds up over steps.
# (NAdam's decay is decoupled because of pixels that are black in all images: their weights have no gradient but the decay,
# and Adam's kind of step then jumps around zero, where two runs of the same library drift apart by rounding, too.)
#
# *Guess:* after 84 steps, how far apart are the two libraries?
#
# <details><summary>Answer</summary>
#
# By less than one in ten thousand, and most of them by far less: it is the rounding of each step, which the next steps carry
# on. Formulas that differed would show at the first step.
#
# </details>

# %%
choices = {
    "SGD": {"lr": 0.05, "momentum": 0.9, "nesterov": True},
    "Adam": {"lr": 0.003, "amsgrad": True},
    "AdamW": {"lr": 0.003},
    "RMSprop": {"lr": 0.001, "centered": True},
    "Adagrad": {"lr": 0.02},
    "NAdam": {"lr": 0.003, "decoupled_weight_decay": True},
}


def largest_difference(net, other):
    pairs = list(zip(net.parameters(), other.parameters(), strict=True))
    return max((a - b).abs().max().item() for a, b in pairs) / max(a.abs().max().item() for a, _ in pairs)


differences, losses = {}, {}
for name, options in choices.items():
    nets = network(), network()
    theirs = getattr(torch.optim, name)(groups(nets[0]), **options)
    ours = getattr(tristep.optim, name)(groups(nets[1]), **options)
    differences[name], losses[name] = [], []
    for batch in batches():
        step(nets[0], theirs, batch)
        losses[name].append(step(nets[1], ours, batch))
        differences[name].append(largest_difference(*nets))

figure = viz.Figure(8.5, 3.4)
figure.set_layout_engine("constrained")
axes = figure.subplots()
for i, (name, curve) in enumerate(differences.items()):
    axes.semilogy(range(1, len(curve) + 1), [max(value, 1e-9) for value in curve], label=name, **line_style(i))
axes.set(xlabel="update", ylabel="difference of weights,\nover the largest weight")
quieten(axes)
figure.legend(loc="outside right center", frameon=False, fontsize=9)
figure

# %% [markdown]
# ## Changing over in the middle
#
# `state_dict` has torch's form, so that checkpoints go both ways. Here a training starts with torch's AdamW, goes on with
# tristep's after a third, and back to torch's after two thirds. It ends where a training with torch alone ends, but for
# rounding.

# %%
options = {"lr": 0.003}
alone, moved = network(), network()
only_torch = torch.optim.AdamW(groups(alone), **options)
optimizer = torch.optim.AdamW(groups(moved), **options)
used = []
for n, batch in enumerate(batches()):
    if n in (28, 56):
        library = tristep.optim if n == 28 else torch.optim
        saved = optimizer.state_dict()
        optimizer = library.AdamW(groups(moved), **options)
        optimizer.load_state_dict(saved)
    used.append(type(optimizer).__module__.split(".")[0])
    step(alone, only_torch, batch)
    step(moved, optimizer, batch)
counts = [float(state["step"]) for state in optimizer.state_dict()["state"].values()]
print("libraries in use:", *dict.fromkeys(used[:56]), "and", used[-1])
print(f"steps counted: {counts}; difference from torch alone: {largest_difference(alone, moved):.1e}")

# %% [markdown]
# ## Torch's schedulers
#
# They change `lr` in the parameter groups, and `tristep.optim` reads it there at every step. `isinstance(optimizer,
# torch.optim.Optimizer)` is true, so whatever expects one takes it: schedulers, Lightning, Accelerate, Hugging Face's
# Trainer.

# %%
rates, scheduled = {}, {}
for library in (torch.optim, tristep.optim):
    net = network()
    optimizer = library.SGD(net.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=84)
    rates[library], scheduled[library] = [], []
    for batch in batches():
        rates[library].append(optimizer.param_groups[0]["lr"])
        scheduled[library].append(step(net, optimizer, batch))
        schedule.step()

names = {torch.optim: "torch.optim", tristep.optim: "tristep.optim"}
viz.plot_training(
    {names[library]: curve for library, curve in scheduled.items()},
    {names[library]: curve for library, curve in rates.items()},
    title="SGD on OneCycleLR, with both libraries",
)

# %% [markdown]
# ## GradScaler
#
# Float16 wants a loss scale, and torch's `GradScaler` works as ever: here with a first scale that is too high, so that the
# first steps are left out. *Guess:* do both libraries leave out the same steps?
#
# <details><summary>Answer</summary>
#
# Yes. A step is left out where a scaled gradient is infinite in float16, which depends on the weights, and they are the same
# but for rounding.
#
# </details>
#
# If the optimizer was made with `fused=True`, its kernels on a GPU also divide by the scale and
# skip steps by themselves, as torch's fused ones do. Gradients are clipped by `tristep.optim.clip_grad_norm_`, or by
# torch's.

# %%
scales = {}
for library in (torch.optim, tristep.optim):
    net = network()
    optimizer = library.AdamW(net.parameters(), lr=0.003)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**22, growth_interval=20)
    scales[library] = []
    for batch in batches(3):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = cross_entropy(net(images[batch]), labels[batch])
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        tristep.optim.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        scales[library].append(scaler.get_scale())
print("scales after every 9th step:", *(f"{scale:,.0f}" for scale in scales[tristep.optim][::9]))
print("the same with torch.optim:", scales[torch.optim] == scales[tristep.optim])

# %% [markdown]
# ## What is fused, and how long it takes here
#
# Torch's optimizers on the CPU update one tensor after the other unless told otherwise; `fused=True` makes one call of
# native code, for SGD, Adam, AdamW and Adagrad. `tristep.optim` makes one call for all groups, with every optimizer whose
# rule is one of single elements, which are all but those of whole matrices, such as Muon. What that saves depends on the
# model: much where tensors are many and small, little where a few large ones keep the memory busy.
#
# The next cell times whole steps of AdamW and takes the best of several rounds, in turns, so that all see the same machine.
# Both have one thread here. The figures are those of the machine on which this notebook was last run, while other programs
# were running there; the benchmarks in the repository measure with more care.

# %%
shapes = {"148 tensors of 512 numbers": [(512,)] * 148, "4 tensors of 500,000": [(500, 1000)] * 4}
kinds = {
    "torch, as it comes": lambda params: torch.optim.AdamW(params),
    "torch, fused": lambda params: torch.optim.AdamW(params, fused=True),
    "tristep": lambda params: tristep.optim.AdamW(params),
}


def best_times(shape_list, rounds=7, steps=5):
    """Seconds of a step, the best of some rounds."""
    optimizers = {}
    for kind, make in kinds.items():
        params = [nn.Parameter(torch.ones(shape)) for shape in shape_list]
        for param in params:
            param.grad = torch.full_like(param, 0.01)
        optimizers[kind] = make(params)
        optimizers[kind].step()  # the first one makes the states, and compiles
    best = dict.fromkeys(kinds, float("inf"))
    for _ in range(rounds):
        for kind, optimizer in optimizers.items():
            start = time.perf_counter()
            for _ in range(steps):
                optimizer.step()
            best[kind] = min(best[kind], (time.perf_counter() - start) / steps)
    return best


figure = viz.Figure(8.5, 2.4)
figure.set_layout_engine("constrained")
for (name, shape_list), axes in zip(shapes.items(), figure.subplots(1, 2, sharey=True), strict=True):
    best = best_times(shape_list)
    ratios = {kind: seconds / best["tristep"] for kind, seconds in best.items()}
    print(
        f"{name}: tristep {best['tristep'] * 1e6:,.0f} µs;",
        ", ".join(f"{k} {r:.1f} times that" for k, r in ratios.items() if r != 1),
    )
    axes.barh(list(ratios)[::-1], list(ratios.values())[::-1], color=COLOURS[0])
    axes.axvline(1, color=COLOURS[1], linewidth=0.8)
    axes.set_title(name, fontsize=10)
    axes.set(xlabel="time of a step, over tristep's")
    quieten(axes)
figure

# %% [markdown]
# ## When to use a Trainer instead
#
# | you have | take |
# |---|---|
# | a training loop for torch.optim, or a framework that wants an `Optimizer` | `tristep.optim` |
# | weights that `fully_shard` has cut (FSDP) | `tristep.optim` |
# | code or habits from Gluon; MXNet's names, defaults and numbers | `Trainer` |
# | several devices or processes, ZeRO-1, compressed gradients | `Trainer` |
# | telemetry, a check that each gradient is fresh, steps inside the backward pass | `Trainer` |
#
# An update rule is the same for both: `tristep.optim.as_torch` makes a class with torch's interface of any optimizer that is
# a rule, also of your own.

# %%
Ftml = tristep.optim.as_torch(tristep.optimizer.registered()["ftml"])
net = network()
optimizer = Ftml(net.parameters(), lr=0.01)
for batch in batches():
    last_loss = step(net, optimizer, batch)
print(type(optimizer).__mro__[0].__name__, "is a torch optimizer:", isinstance(optimizer, torch.optim.Optimizer))
print(f"its last loss: {last_loss:.3f}")

# %% [markdown]
# One kind of rule was left out: those of whole matrices, such as Muon. What do these do that a rule of single elements
# cannot? Tutorial 13 looks inside.
#
# ## Exercises
#
# 1. A weight is 2 and its gradient 0. What does SGD make of it in a step, with `lr=0.1` and `weight_decay=0.01`?
# 2. A weight is 2 and its first gradient 5. What does AdamW make of it in its first step, with `lr=0.1` and
#    `weight_decay=0.01`?
# 3. Which rate does the first step above have with OneCycleLR, whose `max_lr` is 0.2?
#
# Put your answers in place of `None`, and run the cell: it tries them.
#
# <details><summary>Solutions</summary>
#
# 1. $2 - 0.1 \cdot 0.01 \cdot 2 = 1.998$: in SGD the decay is part of the gradient.
# 2. $2 \cdot (1 - 0.1 \cdot 0.01) - 0.1 = 1.898$: AdamW's decay is apart, and its first step is the rate,
#    whatever the gradient.
# 3. $0.2 / 25 = 0.008$, as `div_factor` is 25.
#
# </details>

# %%
answers = {1: None, 2: None, 3: None}


def stepped(kind, gradient):
    """What tristep.optim makes of a weight of 2 in a step."""
    weight = nn.Parameter(torch.full((1,), 2.0))
    weight.grad = torch.full((1,), gradient)
    kind([weight], lr=0.1, weight_decay=0.01).step()
    return weight.item()


is_right = {
    1: lambda weight: abs(weight - stepped(tristep.optim.SGD, 0.0)) < 1e-4,
    2: lambda weight: abs(weight - stepped(tristep.optim.AdamW, 5.0)) < 1e-4,
    3: lambda rate: abs(rate / rates[tristep.optim][0] - 1) < 0.01,
}
hints = {
    1: lambda weight: (
        "the decay moves it, also without a gradient"
        if weight == 2
        else f"it has moved by {2 - weight:.3g}: the decay, 0.01 of the weight, is a gradient, and meets the rate"
    ),
    2: lambda weight: (
        "that is a step of the rate alone: where is the decay?"
        if abs(weight - 1.9) < 1e-4
        else f"it has moved by {2 - weight:.3g}: Adam divides a first gradient by its own size"
    ),
    3: lambda rate: (
        "that is its largest rate, which comes at three tenths"
        if rate == 0.2
        else f"that is 0.2 / {0.2 / rate:.3g}: see div_factor"
    ),
}
exercises = viz.Exercises(is_right, hints, kinds={1: "number", 2: "number"})
exercises.check(answers)

# %% [markdown]
# ## Open exercises
#
# There is no number to type here. Each exercise names a cell and a change: predict what you will see, change the cell, run
# it, and look. The last cell checks the notebook as it came.
#
# - In "The same numbers", give tristep a rate that is 1 % larger: `getattr(tristep.optim, name)(groups(nets[1]), **options |
#   {"lr": 1.01 * options["lr"]})`. How does the picture tell that from rounding?
#
# <details><summary>What one sees</summary>
#
# At the first update. Rounding begins at $10^{-7}$, and these lines above $10^{-4}$: 1 % of a step, over the largest weight.
# Both grow from there, so look at the left end of such curves.
#
# </details>
#
# - In "Changing over in the middle", leave out `optimizer.load_state_dict(saved)`. What do the counts say at the end, and
#   how far are the weights from torch's?
#
# <details><summary>What one sees</summary>
#
# 28 in place of 84: each of the three optimizers has begun anew, with averages of zero. The weights are off by more than a
# tenth of the largest one. No error tells it, for an optimizer without a past is a legal one.
#
# </details>

# %% [markdown]
# What this notebook has said, once more as checks.

# %%
exercises.prove({1: 1.998, 2: 1.898, 3: 0.008}, wrong={1: (2, 1.98), 2: (1.9, 1.5), 3: (0.2, 0.02)})
assert all(max(curve) < 1e-4 for curve in differences.values())
assert all(sum(curve[-20:]) < 0.8 * sum(curve[:20]) for curve in losses.values())
assert list(dict.fromkeys(used)) == ["torch", "tristep"]
assert used[-1] == "torch"
assert counts == [84.0] * 4
assert largest_difference(alone, moved) < 1e-4
assert rates[torch.optim] == rates[tristep.optim]
assert all(abs(a - b) < 1e-3 for a, b in zip(scheduled[torch.optim], scheduled[tristep.optim], strict=True))
nets = network(), network()  # of the open exercises
step(nets[0], torch.optim.AdamW(nets[0].parameters(), lr=0.003), batches()[0])
step(nets[1], tristep.optim.AdamW(nets[1].parameters(), lr=1.01 * 0.003), batches()[0])
assert largest_difference(*nets) > 1e-4 > 100 * max(curve[0] for curve in differences.values())
assert scales[torch.optim] == scales[tristep.optim]
assert min(scales[tristep.optim]) < 2.0**22
assert isinstance(optimizer, torch.optim.Optimizer)
assert last_loss < 0.8
