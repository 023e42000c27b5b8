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
# # Many GPUs, tried on none
#
# The workers of tutorial 9 lived in one process. How do several devices, or processes, share a training so that it stays the
# same training?
#
# Training on several devices means that each sees a part of every batch, and that all end with the same weights. This
# notebook first does it by hand, with four copies of a network: gradients are added up, sent around a ring, and the
# optimizer is cut into four. Then tristep does the same, in one process and in two. Each way must give the weights that one
# device with the whole batch would give. The devices are CPUs that stand in for GPUs, so it runs anywhere, needs no file
# beside it, and shows no speed; what real GPUs send and store is counted at the end.

# %%
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

import tristep
from tristep import viz
from tristep.viz.style import COLOURS, quieten

EPOCHS = 4
OPTIMIZER = {"learning_rate": 0.1, "momentum": 0.9}

torch.set_num_threads(1)  # layers this small gain nothing from more

# %% [markdown]
# ## One device, for comparison
#
# The digits of scikit-learn, in batches of 64. The loss is the sum over a batch, and `step` divides by its size.

# %%
images, labels = (torch.tensor(array) for array in load_digits(return_X_y=True))
images = images.float() / 16
order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
training, test = order[:1344], order[1344:]

shuffle = torch.Generator().manual_seed(0)
batches = [batch for _ in range(EPOCHS) for batch in training[torch.randperm(1344, generator=shuffle)].split(64)]


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


alone = network()
trainer = tristep.Trainer(alone, "sgd", OPTIMIZER)
losses = {"one device": []}
for batch in batches:
    trainer.zero_grad()
    loss = cross_entropy(alone(images[batch]), labels[batch], reduction="sum")
    loss.backward()
    trainer.step(batch_size=len(batch))
    losses["one device"].append(loss.item() / len(batch))

# %% [markdown]
# ## The idea: gradients of parts add up
#
# The loss of a batch is a sum over its images, so its gradient is the sum of the gradients of its parts. Four devices with a
# copy of the network each can therefore take a quarter of the batch each. If they add up their gradients before the step,
# all four make the step that one device would have made with the whole batch.
#
# *Guess:* what becomes of the four copies if they do not add up anything, and each goes on with its own quarters?
#
# <details><summary>Answer</summary>
#
# They drift apart from the first step on, and end as four networks, each trained on a quarter of the images it would have
# seen. Their gradients differ a little at each step, and nothing brings them together again.
#
# </details>


# %%
def furthest(net, other):
    """The largest difference between two models' weights."""
    pairs = zip(net.parameters(), other.parameters(), strict=True)
    return max((a - b).abs().max().item() for a, b in pairs)


def train_by_hand(add_up):
    """The four copies after training, and how far they were apart after each step."""
    nets = [network() for _ in range(4)]
    trainers = [tristep.Trainer(net, "sgd", OPTIMIZER) for net in nets]
    spread = []
    for batch in batches:
        for net, trainer, part in zip(nets, trainers, batch.chunk(4), strict=True):
            trainer.zero_grad()
            cross_entropy(net(images[part]), labels[part], reduction="sum").backward()
        if add_up:
            for same in zip(*(net.parameters() for net in nets), strict=True):
                total = sum(parameter.grad for parameter in same)
                for parameter in same:
                    parameter.grad.copy_(total)
        for trainer in trainers:
            trainer.step(batch_size=len(batch) if add_up else len(batch) // 4)
        spread.append(max(furthest(nets[0], other) for other in nets[1:]))
    return nets, spread


added, spread_added = train_by_hand(add_up=True)
_, spread_alone = train_by_hand(add_up=False)
print(f"gradients added up: the copies are {spread_added[-1]} apart, and {furthest(alone, added[0]):.1e} from one device")
print(f"each by itself: they are {spread_alone[0]:.2g} apart after 1 step, {spread_alone[-1]:.2g} after {len(batches)}")

# %% [markdown]
# ## A ring adds up
#
# How do $n$ devices add up vectors, so that nobody has to collect them all? Each cuts its vector into $n$ chunks. In round
# after round each sends one chunk to its right-hand neighbour, which adds it to its own. After $n - 1$ rounds each has the
# complete sum of one chunk. In another $n - 1$ rounds the complete chunks go around once more, and all have all of them. A
# chunk is an $n$-th of the vector, so each device sends $2 (n - 1) / n$ vectors, and all wires are used all the time.
#
# *Guess:* how much more does each device send with 400 devices than with 4?
#
# <details><summary>Answer</summary>
#
# A third more: $2 \cdot 399 / 400 = 1.995$ vectors and not $2 \cdot 3 / 4 = 1.5$. That is why rings are used: what a device
# sends hardly depends on how many there are.
#
# </details>


# %%
def ring(vectors):
    """What each device has after a ring, and how many numbers each has sent."""
    n = len(vectors)
    chunks, sent = [[chunk.clone() for chunk in vector.chunk(n)] for vector in vectors], [0] * n
    for turn in range(2 * (n - 1)):
        adding = turn < n - 1
        leaving = [(k - turn) % n for k in range(n)]
        moving = [chunks[k][number].clone() for k, number in enumerate(leaving)]  # all send at the same time
        for k, (number, chunk) in enumerate(zip(leaving, moving, strict=True)):
            right = chunks[(k + 1) % n]
            right[number] = right[number] + chunk if adding else chunk
            sent[k] += len(chunk)
    return [torch.cat(each) for each in chunks], sent


vectors = [torch.randn(1000, generator=torch.Generator().manual_seed(k)) for k in range(4)]
sums, numbers = ring(vectors)
from_sum = max((each - sum(vectors)).abs().max().item() for each in sums)
print(f"each has the sum, but for {from_sum:.0e}; each has sent {numbers} numbers, {numbers[0] / 1000} vectors")

# %% [markdown]
# ## The optimizer in four parts
#
# In the middle of the ring each device has the sum of one chunk only. It may update the weights of this chunk right there,
# and send these around in place of the sums. Then each needs the optimizer's states of its own chunk only: with Adam a
# quarter of two numbers for each weight. This is the idea of ZeRO-1 (Rajbhandari et al. 2020). By hand, with SGD's momentum
# in four parts:

# %%
copy = network()
weights = nn.utils.parameters_to_vector(copy.parameters()).detach()
momenta = [torch.zeros(len(chunk)) for chunk in weights.chunk(4)]  # each device has one of them
for batch in batches:
    nn.utils.vector_to_parameters(weights, copy.parameters())
    gradients = []
    for part in batch.chunk(4):  # each device the gradient of its part
        loss = cross_entropy(copy(images[part]), labels[part], reduction="sum")
        own = torch.autograd.grad(loss, list(copy.parameters()))
        gradients.append(torch.cat([gradient.flatten() for gradient in own]).chunk(4))
    chunks = []
    for k, chunk in enumerate(weights.chunk(4)):  # device k gets all gradients of chunk k, and updates it
        momenta[k] = 0.9 * momenta[k] - 0.1 * sum(own[k] for own in gradients) / len(batch)
        chunks.append(chunk + momenta[k])
    weights = torch.cat(chunks)  # handed out to all
nn.utils.vector_to_parameters(weights, copy.parameters())
print("numbers of the momentum on each device:", [len(momentum) for momentum in momenta], "of", len(weights))
print(f"furthest weight from one device: {furthest(alone, copy):.1e}")

# %% [markdown]
# ## The same with tristep, in one process
#
# As in Gluon: `replicate` makes a copy of the model for each device, `split_and_load` cuts a batch into parts and moves each
# to its device, and the trainer is given all copies. `step` takes the size of the whole batch, for the store adds gradients
# up. On a machine with GPUs only the first line would be another one: `devices = ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]`.
#
# *Guess:* after 84 steps, how far are the four copies from each other, and how far from the one device?
#
# <details><summary>Answer</summary>
#
# From each other not by a bit: all get the same sum. From one device by rounding, some $10^{-7}$: four partial sums are
# added up in another order than one sum of 64.
#
# </details>

# %%
devices = ["cpu"] * 4


def train_copies(**store):
    """The copies after training, and the losses."""
    nets = tristep.replicate(network(), devices)
    trainer = tristep.Trainer(nets, "sgd", OPTIMIZER, **store)
    losses = []
    for batch in batches:
        trainer.zero_grad()
        xs, ys = (tristep.split_and_load(data[batch], devices) for data in (images, labels))
        parts = [cross_entropy(net(x), y, reduction="sum") for net, x, y in zip(nets, xs, ys, strict=True)]
        for part in parts:
            part.backward()
        trainer.step(batch_size=len(batch))
        losses.append(sum(part.item() for part in parts) / len(batch))
    return nets, losses


copies, losses["four copies"] = train_copies(kvstore="device", update_on_kvstore=True)
each, _ = train_copies(kvstore="device", update_on_kvstore=False)
apart = max(furthest(copies[0], other) for other in copies[1:])
print(f"between the four copies:                        {apart}")
print(f"from one device, where the store updates:       {furthest(alone, copies[0]):.1e}")
print(f"from one device, where each copy is updated:    {furthest(alone, each[0]):.1e}")

viz.plot_training(losses, title="The same training, twice")

# %% [markdown]
# The copies are the same to the last bit. From one device they differ by rounding, since sums of four parts are added up in
# another order. `update_on_kvstore` says who updates: the store once, with one momentum, or each copy for itself, with four.
#
# ## Several processes
#
# With more than a few devices each gets a process of its own, which torchrun starts and gives a number. Compared with a
# script for one process three things are new: a store that reaches over processes, each process's own part of a batch, and
# its own device.
#
#     store = tristep.kvstore.create("dist_sync")
#     trainer = tristep.Trainer(net, "adam", {...}, kvstore=store)
#     own = batch[store.rank :: store.num_workers]
#
# There are four ways to share the work:
#
# | | what a process keeps | in the script |
# |---|---|---|
# | ZeRO-1, the default of `dist_sync` | weights, gradients, its share of the optimizer's states | `kvstore="dist_sync"` |
# | all-reduce | all of everything | also `update_on_kvstore=False` |
# | torch's DDP | all of everything; torch reduces the gradients | `Trainer(DistributedDataParallel(net))` |
# | torch's FSDP | its share of everything | `fully_shard(net)`, and a class of `tristep.optim` |
#
# The next cell writes a script that does all four in turn, and has two processes run it. Each takes the mean over its half
# of a batch: the stores of tristep add these up, so that two processes make a step with `batch_size=2`; DDP and FSDP average
# them.
#
# *Guess:* the model has 4,810 weights. How many numbers of SGD's momentum has each of two processes with FSDP?
#
# <details><summary>Answer</summary>
#
# Half of them, 2,405. It is the same with ZeRO-1, which cuts the states only.
#
# </details>

# %%
SCRIPT = """
import sys
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
import tristep

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
task = torch.load(sys.argv[1])

def train(way):
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    net.load_state_dict(task["start"])
    model, batch_size = net, 1
    if way == "FSDP":
        fully_shard(net)
        optimizer = tristep.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    elif way == "DDP":
        model = DistributedDataParallel(net)
        optimizer = tristep.Trainer(model, "sgd", task["optimizer"], kvstore=None)
    else:
        shares, batch_size = way == "ZeRO-1", ranks
        optimizer = tristep.Trainer(net, "sgd", task["optimizer"], kvstore="dist_sync", update_on_kvstore=shares)
    for batch in task["batches"]:
        own = batch[rank::ranks]
        optimizer.zero_grad()
        cross_entropy(model(task["images"][own]), task["labels"][own]).backward()
        optimizer.step() if way == "FSDP" else optimizer.step(batch_size)
    weights = net.state_dict()
    if way == "FSDP":
        states = [state["momentum_buffer"] for state in optimizer.state.values()]
        own = sum(state.to_local().numel() for state in states), sum(state.numel() for state in states)
        dist.all_gather_object(held, own)
        weights = {name: weight.full_tensor() for name, weight in weights.items()}
    return weights

held = [None] * ranks
found = {way: train(way) for way in ("ZeRO-1", "all-reduce", "DDP", "FSDP")}
if rank == 0:
    torch.save((found, held), sys.argv[2])
dist.destroy_process_group()
"""

with tempfile.TemporaryDirectory() as folder:
    script, task, result = (str(Path(folder, name)) for name in ("ways.py", "task.pt", "result.pt"))
    Path(script).write_text(SCRIPT)
    given = {"start": network().state_dict(), "optimizer": OPTIMIZER, "batches": batches, "images": images, "labels": labels}
    torch.save(given, task)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", script, task, result]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr)
    ways, held = torch.load(result)

for rank, (own, whole) in enumerate(held):
    print(f"FSDP: process {rank} has {own} of {whole} numbers of the momentum")
print()
distances = {}
for way, weights in ways.items():
    net = network()
    net.load_state_dict(weights)
    distances[way] = furthest(alone, net)
    print(f"{way:<11} furthest weight from one device: {distances[way]:.1e}")

# %% [markdown]
# ## What GPUs would send and store
#
# This is Adam on 124.4 million parameters in float32, on 8 GPUs; nothing is run. Once around a ring, each sends seven
# eighths of what is gathered or summed. An all-reduce goes around twice, and so does ZeRO-1; FSDP goes around three times,
# as it gathers the weights twice. The documentation's page on scaling has the bytes with compressed gradients.

# %%
whole, gpus = 4 * 124.4e6 / 1e9, 8  # GB of the weights
stored = {  # GB of weights, gradients, Adam's two states, and a buffer for sums
    "FSDP": (whole / gpus, whole / gpus, 2 * whole / gpus, 0.0),
    "ZeRO-1": (whole, whole, 2 * whole / gpus, whole / gpus),
    "all-reduce": (whole, whole, 2 * whole, 0.0),
}
sends = {name: rings * (gpus - 1) / gpus * whole for name, rings in (("FSDP", 3), ("ZeRO-1", 2), ("all-reduce", 2))}
for name, kinds in stored.items():
    print(f"{name:<11} each GPU sends {sends[name]:.2f} GB a step and stores {sum(kinds):.2f} GB")

figure = viz.Figure(8.5, 2.6)
figure.set_layout_engine("constrained")
axes = figure.subplots()
left = [0.0] * len(stored)
for i, kind in enumerate(("weights", "gradients", "states", "buffers")):
    values = [kinds[i] for kinds in stored.values()]
    axes.barh(list(stored), values, left=left, color=COLOURS[i], label=kind)
    left = [a + b for a, b in zip(left, values, strict=True)]
axes.set(xlabel="GB on each of 8 GPUs", xlim=(0, 2.6))
quieten(axes)
axes.legend(frameon=False, fontsize=9, loc="lower right")
figure

# %% [markdown]
# ## On real GPUs
#
# Nothing changes but names of devices: `["cuda:0", "cuda:1", ...]` in one process; `torch.device("cuda", LOCAL_RANK)` and
# the backend `nccl`, which the stores choose by themselves, in several. The page on scaling says how to start on more
# machines than one, and when compressed gradients pay.
#
# `replicate`, `split_and_load`, `kvstore`, `update_on_kvstore`: these words are Gluon's. What does a script become that was
# written for Gluon itself? Tutorial 11 takes one apart.
#
# ## Exercises
#
# 1. Each of four processes takes the *mean* over its 16 images, and the store adds up the four. Which `batch_size` makes a
#    step with the mean over all 64?
# 2. Adam has two float32 states. How many GB of them does each of 8 GPUs keep with ZeRO-1, for 124.4 million parameters?
# 3. How many GB does each of 8 GPUs send in a step with all-reduce, if gradients are float32?
#
# Put your answers in place of `None`, and run the cell: it tries them.
#
# <details><summary>Solutions</summary>
#
# 1. 4: the sum of four means is four times the mean of all.
# 2. $124.4 \cdot 10^6 \cdot 8 / 8 = 0.124$ GB: 8 bytes for each parameter, an eighth on each GPU.
# 3. $2 \cdot \tfrac{7}{8} \cdot 124.4 \cdot 10^6 \cdot 4 = 0.87$ GB: in a ring each sends seven eighths of the gradients
#    once to add them up, and once to hand the sums out.
#
# </details>

# %%
answers = {1: None, 2: None, 3: None}


def step_of_means(batch_size):
    """How far a weight goes, over what it should, if the sum of four means of 1 is its gradient."""
    weight = nn.Parameter(torch.zeros(1))
    weight.grad = torch.full((1,), 4.0)
    tristep.Trainer([weight], "sgd", {"learning_rate": 1.0}).step(batch_size=batch_size)
    return -weight.item()


kept_states, sent = stored["ZeRO-1"][2], sends["all-reduce"]
is_right = {
    1: lambda size: abs(step_of_means(size) - 1) < 1e-6,
    2: lambda count: abs(count / kept_states - 1) < 0.02,
    3: lambda count: abs(count / sent - 1) < 0.02,
}
hints = {
    1: lambda size: f"this step is {step_of_means(size):.3g} times as long as with the mean over all",
    2: lambda count: (
        "all of the states are 0.995 GB; which part has one of 8 GPUs?"
        if count > kept_states
        else f"{count * 8e9 / 124.4e6:.2g} bytes for each parameter would that be, all GPUs together: two float32 have 8"
    ),
    3: lambda count: (
        "the gradients are 0.5 GB, which in a ring go round twice, but for an eighth"
        if count < sent
        else f"that is {count / 0.4976:.2g} times the gradients; a ring sends fewer than 2 times"
    ),
}
exercises = viz.Exercises(is_right, hints, kinds={1: "count"})
exercises.check(answers)

# %% [markdown]
# ## Open exercises
#
# There is no number to type here. Each exercise names a cell and a change: predict what you will see, change the cell, run
# it, and look. The last cell checks the notebook as it came.
#
# - In `train_copies`, forget that the store adds up, and divide by a copy's part only: `trainer.step(batch_size=len(batch)
#   // 4)`. Do the copies stay equal? Does it stay the same training?
#
# <details><summary>What one sees</summary>
#
# The copies stay the same to the bit, but each step is four times as long: it is a training at the rate 0.4, and far from
# the one device. Here its loss even falls faster. So that the copies agree does not tell that the steps are right.
#
# </details>
#
# - Take three devices, `devices = ["cpu"] * 3`. How are 64 images cut into three parts?
#
# <details><summary>What one sees</summary>
#
# Not at all: `split_and_load` raises an error that says so. With `even_split=False` the parts have 22, 21 and 21 images, and
# since sums are added up and divided once, the training is still the same.
#
# </details>

# %% [markdown]
# What this notebook has said, once more as checks.

# %%
exercises.prove({1: 4, 2: 0.1244, 3: 0.87}, wrong={1: (64, 1), 2: (0.995, 0.06), 3: (0.5, 1.0)})
assert apart == 0
assert max(furthest(alone, copies[0]), furthest(alone, each[0])) < 1e-4
assert all(abs(a - b) < 1e-4 for a, b in zip(*losses.values(), strict=True))
assert max(spread_added) == 0
assert furthest(alone, added[0]) < 1e-4
assert 0 < spread_alone[0] < spread_alone[-1] / 10
assert from_sum < 1e-5
assert numbers == [1500] * 4  # 2 (4 - 1) / 4 vectors
assert [len(momentum) for momentum in momenta] == [1203, 1203, 1203, 1201]
assert furthest(alone, copy) < 1e-4
assert held == [(2405, 4810), (2405, 4810)]
assert max(distances.values()) < 1e-4
assert [len(part) for part in tristep.split_and_load(images[:64], ["cpu"] * 3, even_split=False)] == [22, 21, 21]
assert sum(stored["FSDP"]) < sum(stored["ZeRO-1"]) < sum(stored["all-reduce"])
