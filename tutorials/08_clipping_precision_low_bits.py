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
# # Clipping, mixed precision, and states of few bits
#
# The rules of tutorial 7 were written as if numbers had no end.
#
# Numbers in a computer have an end, and this notebook shows what that means for training: gradients that are too large, too
# small for float16, or too small to change a weight of 16 bits. For each it shows the option that helps: clipping, a loss
# scale, other rounding, and derives why it does. At the end the memory of six ways to store weights and states is counted
# in bytes, next to what each has learned.

# %%
import argparse
import inspect

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

import tristep
from tristep import amp, lr_scheduler, viz
from tristep.viz.style import COLOURS, GRID, INK, QUIET, line_style, quieten

torch.set_num_threads(1)  # layers this small gain nothing from more

# %% [markdown]
# ## Two ways to clip
#
# `clip_gradient` limits each element of the gradient by itself, which turns it to another direction. `clip_norm` makes all
# gradients of the model shorter by the same factor if their common norm is too large; the direction stays. A gradient of (3,
# 4) has the norm 5; here it is clipped both ways, in a step of SGD with rate 1. As formulas, for the limit $c$:
#
# $$g_i \leftarrow \max(-c, \min(c, g_i)) \qquad\qquad g \leftarrow g \cdot \min\Big(1, \frac{c}{\|g\|}\Big)$$
#
# *Guess:* what do both make of (3, 4) if the limit is 2, and how long are the steps?
#
# <details><summary>Answer</summary>
#
# The first makes (2, 2) of it, of the length 2.83 and at 45 degrees; the second (1.2, 1.6), of the length 2, in the old
# direction.
#
# </details>

# %%
start, gradient = torch.tensor([0.0, 0.0]), torch.tensor([3.0, 4.0])
steps = {}
for name, option in {"plain": {}, "clip_gradient=2": {"clip_gradient": 2.0}, "clip_norm=2": {"clip_norm": 2.0}}.items():
    weight = nn.Parameter(start.clone())
    weight.grad = gradient.clone()
    tristep.Trainer([weight], "sgd", {"learning_rate": 1.0, **option}).step(batch_size=1)
    steps[name] = start - weight.detach()
    print(f"{name:<16} length of the step {steps[name].norm():.4f}, its elements {steps[name].numpy()}")

# %% [markdown]
# ## Where clipping saves a training
#
# A recurrent network multiplies its gradient by the same matrix again and again, 64 times here: if the matrix stretches a
# direction by 1.2, this makes $1.2^{64} = 117{,}000$ of it. So now and then the gradient becomes very large.
# This one reads the source of Python's `argparse`, 64 letters at a time, and predicts the next letter. Its learning rate is
# rather high. `Telemetry` writes down the norm of the gradients before they are clipped.

# %%
text = inspect.getsource(argparse)
letters = sorted(set(text))
codes = torch.tensor([letters.index(letter) for letter in text])


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.letters = nn.Embedding(len(letters), 32)
        self.memory = nn.RNN(32, 64, nonlinearity="relu", batch_first=True)
        self.next = nn.Linear(64, len(letters))

    def forward(self, read):
        return self.next(self.memory(self.letters(read))[0])


def read(**options):
    """The losses of 100 updates, and the norm of all gradients together at each."""
    net, draw, losses = Reader(), torch.Generator().manual_seed(0), []
    telemetry = tristep.Telemetry(metrics=["gradient_norm"])
    trainer = tristep.Trainer(net, "sgd", {"learning_rate": 1.0, "momentum": 0.9, **options}, telemetry=telemetry)
    for _ in range(100):
        pieces = codes[torch.randint(len(codes) - 65, (16, 1), generator=draw) + torch.arange(65)]
        loss = cross_entropy(net(pieces[:, :-1]).flatten(0, 1), pieces[:, 1:].flatten())
        trainer.zero_grad()
        loss.backward()
        trainer.step(batch_size=1)  # the loss is a mean already
        losses.append(loss.item())
    return losses, (telemetry["gradient_norm"] ** 2).sum(axis=1) ** 0.5


options = {"not clipped": {}, "clip_gradient": {"clip_gradient": 0.01}, "clip_norm": {"clip_norm": 0.5}}
reading = {name: read(**option) for name, option in options.items()}
finite = {name: int(torch.tensor(losses).isfinite().sum()) for name, (losses, _) in reading.items()}
notes = {name: f"largest norm {torch.tensor(norms).nan_to_num(torch.inf).max():.3g}" for name, (_, norms) in reading.items()}
notes["not clipped"] = f"not a number after update {finite['not clipped']}"
viz.plot_training({name: losses for name, (losses, _) in reading.items()}, notes=notes, title="Reading argparse")

# %% [markdown]
# ## What float16 can hold
#
# Mixed precision computes in 16 bits and keeps the weights in 32. bfloat16 has float32's range and few digits; float16 has
# more digits, and a range that ends early. So we look at where gradients lie. The network reads digits, and is trained first
# until it makes hardly a mistake, because gradients get smaller as the loss does.

# %%
images, labels = (torch.tensor(array) for array in load_digits(return_X_y=True))
images = images.float() / 16
order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
training, test = order[:1347], order[1347:]


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))


def batches(epochs, seed=0):
    shuffle = torch.Generator().manual_seed(seed)
    return [batch for _ in range(epochs) for batch in training[torch.randperm(1347, generator=shuffle)].split(64)]


net = network()
trainer = tristep.Trainer(net, "adam", {"learning_rate": 0.003})
for batch in batches(epochs=30):
    trainer.zero_grad()
    cross_entropy(net(images[batch]), labels[batch]).backward()
    trainer.step(batch_size=1)

trainer.zero_grad()
cross_entropy(net(images[training]), labels[training]).backward()
gradients = torch.cat([parameter.grad.flatten() for parameter in net.parameters()])
gradients = gradients[gradients != 0]
lost = {scale: ((gradients * scale).half() == 0).float().mean().item() for scale in (1, 2**16)}

figure = viz.Figure(8.5, 3.2)
figure.set_layout_engine("constrained")
axes = figure.subplots()
for (scale, share), colour in zip(lost.items(), COLOURS, strict=False):
    label = f"loss times {scale:,}: float16 makes {share:.1%} zero"
    axes.hist((gradients * scale).abs().log2().numpy(), bins=120, range=(-60, 20), color=colour, alpha=0.7, label=label)
axes.axvspan(-24, 16, color=GRID, zorder=0)
axes.text(10, 0.97, "float16", color=INK, ha="center", va="top", transform=axes.get_xaxis_transform())
axes.set(xlabel="size of a gradient, as a power of 2", yticks=[], xticks=range(-60, 21, 10))
quieten(axes)
axes.spines["left"].set_visible(False)
axes.legend(frameon=False, fontsize=9, loc="upper left")
figure

# %% [markdown]
# The numbers that float16 knows reach from 2^-24 to 2^16, the grey field. Gradients to the left of it become zero and are
# lost; exactly, those up to half of the least number, 2^-25. If the loss is multiplied by a large number $S$, so are all
# gradients, by the chain rule, and they move into the field: $\nabla (S f) = S\, \nabla f$. The step divides by $S$
# again, in 32 bits. This number is the *loss scale*. bfloat16, which reaches from 2^-133 to 2^128, needs none.
#
# *Guess:* why is $S$ always a power of 2?
#
# <details><summary>Answer</summary>
#
# Then to multiply and to divide changes the exponent only, and no digit is rounded: gradients that are
# neither too small nor too large are the same to the bit with any scale.
#
# </details>
#
# ## The loss scale finds its value
#
# `tristep.amp` multiplies the loss, and the step divides the gradients again. If one of them has overflowed, the step
# changes nothing and the scale is halved; after `scale_window` good steps it is doubled. Here the scale starts far too high,
# and the window is short, so that there is something to see: MXNet's and tristep's default is 2^16, and 2,000 steps.


# %%
def autocast_training(dtype, scaler=None):
    """Losses, scales and whether the weights have changed, of every update; and the test accuracy."""
    net = network()
    trainer = tristep.Trainer(net, "adam", {"learning_rate": 0.002})
    if dtype != torch.float32:
        amp.init(str(dtype).removeprefix("torch."))
        amp.init_trainer(trainer, scaler)
    losses, scales, changed = [], [], []
    for batch in batches(epochs=6):
        trainer.zero_grad()
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            loss = cross_entropy(net(images[batch]), labels[batch])
        if scaler is None:
            loss.backward()
        else:
            scales.append(scaler.loss_scale)
            with amp.scale_loss(loss, trainer) as scaled:
                scaled.backward()
        before = [parameter.detach().clone() for parameter in net.parameters()]
        trainer.step(batch_size=1)
        changed.append(not all(map(torch.equal, before, net.parameters())))
        losses.append(loss.item())
    with torch.no_grad():
        accuracy = (net(images[test]).argmax(dim=1) == labels[test]).float().mean().item()
    return losses, scales, changed, accuracy


scaler = amp.LossScaler(init_scale=2.0**24, scale_window=25)
mixed = {
    "float32": autocast_training(torch.float32),
    "bfloat16": autocast_training(torch.bfloat16),
    "float16": autocast_training(torch.float16, scaler),
}
_, scales, changed, _ = mixed["float16"]
skipped = [n for n, has in enumerate(changed) if not has]

figure = viz.Figure(8.5, 2.8)
figure.set_layout_engine("constrained")
axes = figure.subplots()
axes.step(range(1, len(scales) + 1), scales, where="mid", color=COLOURS[0])
axes.plot(
    [n + 1 for n in skipped], [scales[n] for n in skipped], "x", color=COLOURS[1], label="skipped, as gradients overflowed"
)
axes.set_yscale("log", base=2)
axes.set(xlabel="update", ylabel="loss scale")
quieten(axes)
axes.legend(frameon=False, fontsize=9)
figure

# %% [markdown]
# Every step is a line or a cross: where there is a cross, the weights stayed as they were to the last bit. In the end all
# three types have learned the same.

# %%
for name, (losses, _, has_changed, accuracy) in mixed.items():
    print(
        f"{name:<9} last losses {sum(losses[-20:]) / 20:.3f}, test accuracy {accuracy:.1%}, {sum(has_changed)} steps taken"
    )

# %% [markdown]
# ## Weights of 16 bits, and steps that are too small for them
#
# To save memory, the weights themselves may be bfloat16. It has 8 significant bits, so between 0.5 and 1 its numbers are
# $d = 1/256$ apart, and a step of less than half of that is rounded away, every time. Here the weight is 1, the gradient is
# 1, and each of 500 steps should take off 0.0005. Two options help.
#
# - *Stochastic rounding* goes up or down at random. A number that lies a share $p$ of the way from $a$ to the next one,
#   $a + d$, goes up with the probability $p$, so that on average it is $p (a + d) + (1 - p)\, a = a + p d$, which is
#   right. The price is noise: each rounding has the variance $p (1 - p)\, d^2$.
# - A *master copy* has all 32 bits; of these only the 16 that the weight lacks are stored.
#
# *Guess:* in how many of 100 steps does stochastic rounding change the weight, and by how much?
#
# <details><summary>Answer</summary>
#
# By $1/256$, which is 7.8 steps of 0.0005, or not at all. So it changes in 13 of 100 steps: $0.0005 \cdot 256 = 0.128$.
#
# </details>

# %%
stores = {
    "float32": (torch.float32, {}),
    "to the nearest": (torch.bfloat16, {}),
    "stochastic": (torch.bfloat16, {"stochastic_rounding": True}),
    "remainder": (torch.bfloat16, {"multi_precision": "remainder"}),
}
walks, recorded = {}, []
for name, (dtype, option) in stores.items():
    weight = nn.Parameter(torch.ones(64, dtype=dtype))
    trainer = tristep.Trainer({"weight": weight}, "sgd", {"learning_rate": 0.0005, **option})
    recorder = viz.Recorder(trainer, name)
    walks[name] = []
    for _ in range(500):
        weight.grad = torch.ones_like(weight)
        trainer.step(batch_size=1)
        recorder.step()
        walks[name].append(weight[0].item())
    recorded.append(recorder.run)

figure = viz.Figure(8.5, 3.4)
figure.set_layout_engine("constrained")
panels = figure.subplots(1, 3, sharey=True)
for i, (name, axes) in enumerate(zip(list(walks)[1:], panels, strict=True), start=1):
    axes.plot(walks["float32"], color=QUIET, linewidth=0.8)
    axes.plot(walks[name], linewidth=1.8, color=line_style(i)["color"])
    axes.set_title(name, fontsize=10)
    axes.set(xlabel="update", xticks=[0, 250, 500])
    quieten(axes)
panels[0].set_ylabel("a weight (grey: float32)")
figure

# %% [markdown]
# The step counts how many weights it stores as they were, and `viz.diagnose` tells where those that have a gradient do not
# change. With stochastic rounding most of them stay as they were at a step, too, but the others change by as much more:
# nothing is lost.

# %%
unchanged = {run.name: run.tensors["weight_unchanged"].curve().mean.mean() for run in recorded}
found = {run.name: viz.diagnose(run) for run in recorded}
for name, share in unchanged.items():
    print(f"{name:<15}{share:5.0%} of the weights are stored as they were", *found[name], sep="\n    ")

# %% [markdown]
# ## Bytes and accuracy side by side
#
# Adam keeps two states for every weight: with weights of 4 bytes, $4 + 2 \cdot 4 = 12$ bytes for each.
# `state_dtype="8bit"` stores a state in one byte for each element and one float32 for each block of 128 (states of fewer
# than 4,096 elements stay float32). The bytes below are counted in what the trainer would save, `state_dict()`, and in
# the weights; activations and gradients are not in them. Each is trained twice, from two starts, with a rate that falls
# to zero, where the small steps are.

# %%
ways = {
    "float32": (torch.float32, {}),
    "float32, states 8 bit": (torch.float32, {"state_dtype": "8bit"}),
    "bfloat16, to the nearest": (torch.bfloat16, {}),
    "bfloat16, remainder": (torch.bfloat16, {"multi_precision": "remainder"}),
    "bfloat16, stochastic": (torch.bfloat16, {"stochastic_rounding": True}),
    "bfloat16, stochastic, states 8 bit": (torch.bfloat16, {"stochastic_rounding": True, "state_dtype": "8bit"}),
}


def size(tensors):
    return sum(tensor.numel() * tensor.itemsize for tensor in tensors)


def train(dtype, option, seed, epochs=6):
    """Bytes of weights and of states for each weight, the training loss at the end, and the test accuracy."""
    net, order = network(seed).to(dtype), batches(epochs, seed)
    schedule = lr_scheduler.CosineScheduler(max_update=len(order), base_lr=0.002, final_lr=0.0)
    trainer = tristep.Trainer(net, "adam", {"learning_rate": 0.002, "lr_scheduler": schedule, **option})
    for batch in order:
        trainer.zero_grad()
        cross_entropy(net(images[batch].to(dtype)).float(), labels[batch]).backward()
        trainer.step(batch_size=1)
    states = [state for of_one in trainer.state_dict()["state"].values() for state in of_one.values()]
    with torch.no_grad():
        loss = cross_entropy(net(images[training].to(dtype)).float(), labels[training]).item()
        right = net(images[test].to(dtype)).argmax(dim=1) == labels[test]
    count = sum(parameter.numel() for parameter in net.parameters())
    return torch.tensor([size(net.parameters()) / count, size(states) / count, loss, right.float().mean().item()])


results = {name: torch.stack([train(*way, seed) for seed in (0, 1)]).mean(dim=0).tolist() for name, way in ways.items()}
print(f"{'':<36} bytes a weight: weights  states   training loss  test accuracy")
for name, (weights, states, loss, accuracy) in results.items():
    print(f"{name:<36} {weights + states:14.2f}: {weights:7.2f}  {states:6.2f}   {loss:13.4f}  {accuracy:13.1%}")

# %%
figure = viz.Figure(9.5, 3.4)
figure.set_layout_engine("constrained")
left, right = figure.subplots(1, 2, sharey=True)
names = list(results)[::-1]
weights, states, losses, _ = zip(*(results[name] for name in names), strict=True)
left.barh(names, weights, color=COLOURS[0], label="weights")
left.barh(names, states, left=weights, color=COLOURS[5], label="states")
left.set(xlabel="bytes for each weight", xlim=(0, 14.5))
left.legend(frameon=False, fontsize=9, loc="lower right")
right.plot(losses, names, "o", color=COLOURS[1])
right.set(xlabel="training loss at the end")
right.locator_params(axis="x", nbins=4)
right.grid(axis="x", color=GRID)
for axes in (left, right):
    quieten(axes)
figure

# %% [markdown]
# Weights of bfloat16 rounded to the nearest number end above all others. The options end near float32, and the last line has
# a bit more than a third of its bytes. What such a network can tell about larger ones is limited; the repository's
# benchmarks measure more of them.
#
# Weights and states have become small. Gradients that several workers send each other still have 32 bits each: do they need
# them? Tutorial 9 sends two.
#
# ## Exercises
#
# 1. A weight of bfloat16 is 8, and is rounded to the nearest. Which is the largest step down that never changes it?
# 2. What is the least loss scale, a power of 2, at which a gradient of 2^-30 is not lost in float16?
# 3. How many bytes does AdamW keep for each weight, the weight included, if the weight is bfloat16, the missing 16 bits of
#    its master are stored, and both states are float32?
# 4. Three gradients are (2, -1, 2). What is the first element with `clip_norm=1.5`?
#
# Put your answers in place of `None`, and run the cell: it tries them.
#
# <details><summary>Solutions</summary>
#
# 1. Below 8, between 4 and 8, numbers are $8 / 256 = 1/32$ apart; half of that is $1/64 = 0.0156$, which is just rounded
#    back to 8, the even one of the two.
# 2. $2^6$: it makes $2^{-24}$ of it, the least number of float16. $2^5$ would make half of it, which is rounded to the even
#    neighbour, 0.
# 3. $2 + 2 + 4 + 4 = 12$, as much as float32 without a copy.
# 4. 1: the norm is 3, so all are halved.
#
# </details>

# %%
answers = {1: None, 2: None, 3: None, 4: None}


def moves(step):
    weight = nn.Parameter(torch.full((1,), 8.0, dtype=torch.bfloat16))
    weight.grad = torch.ones_like(weight)
    tristep.Trainer([weight], "sgd", {"learning_rate": step}).step(batch_size=1)
    return weight.item() != 8.0


def kept():
    weight = nn.Parameter(torch.ones(64, 128, dtype=torch.bfloat16))
    weight.grad = torch.ones_like(weight)
    trainer = tristep.Trainer({"weight": weight}, "adamw", {"multi_precision": "remainder"})
    trainer.step(batch_size=1)
    return (size([weight]) + size(trainer.state_dict()["state"]["weight"].values())) / weight.numel()


def clipped():
    weight = nn.Parameter(torch.zeros(3))
    weight.grad = torch.tensor([2.0, -1.0, 2.0])
    tristep.Trainer([weight], "sgd", {"learning_rate": 1.0, "clip_norm": 1.5}).step(batch_size=1)
    return -weight[0].item()


tiny = torch.tensor(2.0**-30)
is_right = {
    1: lambda step: moves(1.02 * step) and not moves(0.98 * step),
    2: lambda scale: (tiny * scale).half() > 0 == (tiny * scale / 2).half(),
    3: lambda count: abs(count - kept()) < 0.01,
    4: lambda element: abs(element - clipped()) < 0.01,
}
hints = {
    1: lambda step: (
        "this step changes it: how far from 8 is the next number below, and where is the middle?"
        if moves(step)
        else "longer steps do not change it either: below 8 numbers are 8 / 256 apart"
    ),
    2: lambda scale: (
        f"float16 makes 0 of {tiny.item() * scale:.2g}: its least number is 2^-24"
        if (tiny * scale).half() == 0
        else "half of this scale is enough"
    ),
    3: lambda count: (
        "of the master only the 16 bits are stored that the weight does not have"
        if count > kept()
        else "there are a weight, the missing bits of its master, and two states: 2, 2, 4 and 4 bytes make how many?"
    ),
    4: lambda element: (
        "the norm is 3, so that something must be clipped"
        if element == 2
        else "clip_norm looks at all elements together: it multiplies each by the same number, 1.5 over the norm"
    ),
}
exercises = viz.Exercises(is_right, hints, kinds={4: "number"})
exercises.check(answers)

# %% [markdown]
# ## Open exercises
#
# There is no number to type here. Each exercise names a cell and a change: predict what you will see, change the cell, run
# it, and look. The last cell checks the notebook as it came.
#
# - In "The loss scale finds its value", set `scale_window=1000`. What does the picture look like?
#
# <details><summary>What one sees</summary>
#
# A staircase that only goes down: the training is shorter than the window, so that the scale is never doubled. Most of the
# crosses are still there, as they come from the start, which is too high. Should a scale become too small for some
# gradients, it would stay so.
#
# </details>
#
# - In "Weights of 16 bits", let the rate be 0.005. A step is then longer than half of $1/256$. Does the weight that is
#   rounded to the nearest move now, and as fast as float32?
#
# <details><summary>What one sees</summary>
#
# It moves, but by $1/256 = 0.0039$ a step and not by 0.005: each step is rounded to the nearest number that there is. After
# 50 steps it is at 0.80 instead of 0.75. Stochastic rounding is right on average.
#
# </details>

# %% [markdown]
# What this notebook has said, once more as checks.

# %%
exercises.prove({1: 1 / 64, 2: 2**6, 3: 12, 4: 1}, wrong={1: (1 / 256, 1 / 8), 2: (2**4, 2**10), 3: (8, 14), 4: (2, 1.5)})
assert abs(1 - unchanged["stochastic"] - 0.128) < 0.01
assert torch.equal(steps["plain"], gradient)
assert torch.equal(steps["clip_gradient=2"], torch.tensor([2.0, 2.0]))
assert torch.allclose(steps["clip_norm=2"], gradient * 2 / 5)
assert finite["not clipped"] < 100 == finite["clip_gradient"] == finite["clip_norm"]
assert all(sum(reading[name][0][-20:]) / 20 < 2 for name in ("clip_gradient", "clip_norm"))
assert lost[1] > 0.01
assert lost[2**16] < lost[1] / 5
assert all(scales[n + 1] == scales[n] / 2 for n in skipped if n + 1 < len(scales))
assert all(scales[n + 1] >= scales[n] for n in range(len(scales) - 1) if n not in skipped)
assert 1 < len(skipped) < 40
assert all(result[3] > 0.9 for result in mixed.values())
assert all(abs(sum(result[0][-20:]) / sum(mixed["float32"][0][-20:]) - 1) < 0.2 for result in mixed.values())
assert set(walks["to the nearest"]) == {1.0}
coarse = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))  # of the open exercises
trainer = tristep.Trainer([coarse], "sgd", {"learning_rate": 0.005})
for _ in range(50):
    coarse.grad = torch.ones_like(coarse)
    trainer.step(batch_size=1)
assert coarse.item() == 1 - 50 / 256
assert unchanged["to the nearest"] == 1 > unchanged["stochastic"] > 0.8
assert all(unchanged[name] == 0 for name in ("float32", "remainder"))
assert "multi_precision=True" in found.pop("to the nearest")[0]
assert not any(found.values())
assert all(abs(walks[name][-1] - 0.75) < 0.05 for name in ("float32", "stochastic", "remainder"))
assert results["float32"][:2] == [4, 8]
assert sum(results["bfloat16, stochastic, states 8 bit"][:2]) < 0.4 * 12
nearest = results.pop("bfloat16, to the nearest")[2]
assert all(loss < 0.97 * nearest for _, _, loss, _ in results.values())
assert all(abs(loss / results["float32"][2] - 1) < 0.05 for _, _, loss, _ in results.values())
