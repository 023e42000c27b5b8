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
# Tutorial 10 used words of Gluon. What has to change in a script that was written for Gluon, and do its numbers stay?
#
# This notebook takes a training script for MXNet Gluon apart and puts the tristep version of each piece below it: imports,
# model and initializer, schedule and trainer, the loop, saving. Layers, losses and gradients become PyTorch's; the trainer,
# its optimizers, schedules and initializers keep their names, defaults and numbers. To check that, it then repeats optimizer
# runs that were recorded from MXNet itself.

# %%
import json
import tempfile
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn

import tristep
from tristep import initializer, lr_scheduler, viz
from tristep.viz.style import line_style, quieten

torch.set_num_threads(1)  # layers this small gain nothing from more

# %% [markdown]
# ## Imports
#
# ```python
# from mxnet import autograd, gluon, init, lr_scheduler, nd      # MXNet
# from mxnet.gluon import nn
# ```
#
# The cell above has what takes their place: `torch` for arrays, gradients and layers, `tristep` for the rest.
#
# ## Data
#
# ```python
# data = gluon.data.ArrayDataset(images[:1347], labels[:1347])      # MXNet
# loader = gluon.data.DataLoader(data, batch_size=64, shuffle=True)
# ```

# %%
images, labels = load_digits(return_X_y=True)
images, labels = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
data = torch.utils.data.TensorDataset(images[:1347], labels[:1347])
loader = torch.utils.data.DataLoader(data, batch_size=64, shuffle=True, generator=torch.Generator().manual_seed(0))

# %% [markdown]
# ## Model and initializer
#
# ```python
# net = nn.HybridSequential()                                       # MXNet
# net.add(nn.Dense(64, activation="relu"), nn.Dense(10))
# net.initialize(init.Xavier(magnitude=2.24))
# ```
#
# Layers of torch are told how many inputs they have, and have values from the start. `initialize` fills them, and gives
# biases zeros, as in Gluon. A parameter's own initializer, an argument of Gluon's layers such as `bias_initializer="ones"`,
# is an attribute: `net[0].bias.init = "ones"`.

# %%
net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
initializer.initialize(net, initializer.Xavier(magnitude=2.24), torch.Generator().manual_seed(0))
biases_start_at_zero = not net[0].bias.any()

# %% [markdown]
# ## Loss, schedule and trainer
#
# ```python
# loss_fn = gluon.loss.SoftmaxCrossEntropyLoss()                    # MXNet
# schedule = lr_scheduler.CosineScheduler(max_update=220, base_lr=0.01, final_lr=0.0001, warmup_steps=22)
# trainer = gluon.Trainer(net.collect_params(), "adam", {"learning_rate": 0.01, "lr_scheduler": schedule, "wd": 1e-4})
# ```
#
# Gluon's losses give one number for each sample, and torch's their mean unless told otherwise: `reduction="none"` is Gluon's
# way. The schedule's line stays as it is, and so does the trainer's but for what it is given: the model itself, whose names
# of parameters it then knows.

# %%
loss_fn = nn.CrossEntropyLoss(reduction="none")
schedule = lr_scheduler.CosineScheduler(max_update=220, base_lr=0.01, final_lr=0.0001, warmup_steps=22)
trainer = tristep.Trainer(net, "adam", {"learning_rate": 0.01, "lr_scheduler": schedule, "wd": 1e-4})

# %% [markdown]
# ## The loop
#
# ```python
# for epoch in range(10):                                           # MXNet
#     for x, y in loader:
#         with autograd.record():
#             loss = loss_fn(net(x), y)
#         loss.backward()
#         trainer.step(x.shape[0])
# ```
#
# Three things differ, all of them torch's ways. It records unless told not to (`torch.no_grad()`), so `record` has no
# counterpart. It adds gradients up, so they are to be forgotten before each backward pass. And it goes back from one number
# only, hence `.sum()`. `step` divides by the batch's size, as ever.

# %%
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
# ## Saving
#
# ```python
# net.save_parameters("net.params")                                 # MXNet
# trainer.save_states("trainer.states")
# net.load_parameters("net.params")
# trainer.load_states("trainer.states")
# ```
#
# Weights are saved as always in torch. `save_states` and `load_states` are still there; the file is no pickle but
# safetensors with JSON, which runs no code when it is read.

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
# ## Are the numbers the same?
#
# The repository has recordings of MXNet 1.9.1 in `tests/golden`: for each optimizer three parameters, 25 random gradients,
# and the weights that MXNet made of them. The next cell gives the same gradients to tristep's optimizers, with the arguments
# that MXNet was given, and compares all weights after all steps. Float32 has about seven digits, and the two programs add in
# different orders, so differences near one in a million are rounding.
#
# *Guess:* how many of these twelve optimizers differ by more than rounding?
#
# <details><summary>Answer</summary>
#
# None: all that differs is rounding.
#
# </details>

# %%
GOLDEN = Path("..", "tests", "golden")  # next to the folder of this notebook
GROUPS = ["sgd", "nag", "signum", "adam", "adamax", "nadam", "adagrad", "adadelta", "rmsprop", "ftrl", "ftml", "lamb"]


def replay(run, arrays):
    """The weights after each step that tristep makes of a recorded run's gradients, by parameter."""
    params = [nn.Parameter(torch.tensor(arrays[f"{run['id']}.w0_{i}"])) for i in range(3)]
    arguments = dict(run["kwargs"])
    if run["lr_scheduler"]:
        settings = dict(run["lr_scheduler"]["kwargs"])
        arguments.setdefault("learning_rate", settings["base_lr"])
        settings["base_lr"] = arguments["learning_rate"]  # MXNet was given both, and used this one
        arguments["lr_scheduler"] = lr_scheduler.create(run["lr_scheduler"]["class"], **settings)
    trainer = tristep.Trainer(params, run["optimizer"], arguments)
    weights = [[] for _ in params]
    for step in range(run["steps"]):
        for i, param in enumerate(params):
            param.grad = torch.tensor(arrays[f"{run['id']}.g_{i}"][step])
        trainer.step(batch_size=1)
        for of_one, param in zip(weights, params, strict=True):
            of_one.append(param.detach().numpy().copy())
    return [np.stack(of_one) for of_one in weights]


replayed, largest = {}, {}
if (GOLDEN / "manifest.json").exists():
    manifest = json.loads((GOLDEN / "manifest.json").read_text())
    for group in GROUPS:
        arrays = np.load(GOLDEN / f"{group}.npz")
        plain = [
            run
            for run in manifest["groups"][group]["configs"]
            if run["dtype"] == "float32" and not (run["lr_mult"] or run["wd_mult"] or run["param_idx2name"])
        ]
        for run in plain:
            weights = replay(run, arrays)
            recorded = [arrays[f"{run['id']}.w_{i}"] for i in range(3)]
            replayed[run["id"]] = run, weights[1], recorded[1]
            distance = max(np.abs(a - b).max() for a, b in zip(weights, recorded, strict=True))
            largest[group] = max(largest.get(group, 0.0), float(distance))
        print(f"{group:<9} {len(plain)} runs of 25 steps, largest difference of a weight: {largest[group]:.1e}")
else:
    print("The recordings are not here: this notebook stands outside its repository, so the comparison is left out.")

# %% [markdown]
# Three of these runs as they went: seven weights of one parameter, MXNet's recorded values as points, tristep's as lines.

# %%
figure = viz.Figure(9.5, 3.6)
figure.set_layout_engine("constrained")
if replayed:
    shown = ["adam_02", "ftrl_01", "rmsprop_02"]
    for name, axes in zip(shown, figure.subplots(1, 3), strict=True):
        run, weights, recorded = replayed[name]
        for k in range(7):
            colour = line_style(k)["color"]
            axes.plot(range(1, 26), weights[:, k], color=colour, linewidth=1.2, label="tristep" if k == 0 else None)
            axes.plot(range(1, 26, 2), recorded[::2, k], "o", color=colour, markersize=3, label="MXNet" if k == 0 else None)
        scheduled = f", {run['lr_scheduler']['class']}" if run["lr_scheduler"] else ""
        axes.set_title(run["optimizer"] + scheduled, fontsize=10)
        axes.set(xlabel="update")
        quieten(axes)
    figure.axes[0].set_ylabel("weight")
    figure.axes[0].legend(frameon=False, fontsize=9)
figure

# %% [markdown]
# ## What differs
#
# docs/differences.md lists every difference that a user of MXNet may notice, with the reason and the test that shows it.
# Those that one meets first:
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
# 1. Which rate has update 121 of the schedule above? It is a cosine from 0.01 to 0.0001 behind 22 updates of warm-up.
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
assert not (GOLDEN / "manifest.json").exists() or set(largest) == set(GROUPS)
assert all(distance < 1e-4 for distance in largest.values())
