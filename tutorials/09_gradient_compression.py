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
# # Gradient compression: two bits instead of thirty-two
#
# Tutorial 8 stored weights and states in few bits. Can the gradients that travel between workers have few bits, too?
#
# Several workers that train one model send each other their gradients at every step, and on a slow link they wait for that.
# This notebook shows how training changes when less is sent: 2 bits or 1 bit for each number as in MXNet, signs, 8-bit
# integers, or only the largest ones. It shows what each of these codes loses of a gradient, why what is not sent must be
# kept and sent later, and on which links compression can pay.

# %%
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

import tristep
from tristep import kvstore, viz
from tristep.viz.style import COLOURS, GRID, INK, QUIET, quieten

WORKERS, EPOCHS = 4, 5
OPTIMIZER = {"learning_rate": 0.03, "momentum": 0.9}

torch.set_num_threads(1)  # layers this small gain nothing from more

# %% [markdown]
# ## What two bits say
#
# The code "2bit" knows three values: the threshold, its negative, and zero. What it leaves out is the *residual*, which is
# added to the next gradient. Here a worker has the same gradient of three numbers six times. `CompressedAllReduce` is what a
# process sums up its gradients with; alone, as here, it gives back what it would have sent.
#
# *Guess:* the second number, -0.7, is larger than the threshold. What becomes of its residual?
#
# <details><summary>Answer</summary>
#
# Each step sends -0.5 of it and keeps -0.2 more, so it is -1.2 after six steps, and grows for ever: the threshold limits
# how fast anything can be sent.
#
# </details>

# %%
gradient = torch.tensor([0.3, -0.7, 0.1])
reduce = kvstore.CompressedAllReduce({"type": "2bit", "threshold": 0.5}, numel=3)
total = torch.zeros(3)
print("step  sent                  residual")
for step in range(1, 7):
    bucket = gradient.clone()
    reduce.start(bucket).wait()  # the bucket now holds what was sent
    total += bucket
    residual = reduce.state_dict()["worker"]
    print(f"{step:>4}  {[round(value, 2) for value in bucket.tolist()]!s:<20}  {[round(v, 2) for v in residual.tolist()]}")

# %% [markdown]
# The first number is sent in about three steps of five, so on average what is sent is right: at every moment the sum of all
# that was sent and the residual are the sum of all gradients. The second number is larger than the threshold. It can never
# be sent as fast as it comes, and its residual grows: the threshold must not be smaller than gradients usually are.
#
# ## What each code loses
#
# There are other codes. "int8" has 255 values, evenly spaced up to the largest number of a block. "sign" sends signs, and
# one size for all numbers of a block. "1bit" sends +1 or -1. "topk" sends the largest numbers exactly, here five of a
# hundred, and nothing of the others.
#
# In the picture a gradient of a hundred numbers is sorted by size: the grey area. Dots are what is sent, in the upper
# row in a single step. The lower row has the same gradient ten times in a row, and the dots are a tenth of all that has been
# sent: what a code has left over in a step has had nine more chances.
#
# *Guess:* which of the five is wrong by more than the whole gradient in a single step, and yet nearly right over ten?
#
# <details><summary>Answer</summary>
#
# "1bit": most numbers are much smaller than 1, and it sends 1. The residual then has the other sign and is larger
# than the next gradient, so that the number is taken back: over ten steps it comes out nearly right.
#
# </details>

# %%
codes = {
    "int8": {"type": "int8"},
    "2bit": {"type": "2bit", "threshold": 0.5},
    "sign": {"type": "sign"},
    "1bit": {"type": "1bit", "threshold": 0.0},
    "topk 5%": {"type": "topk", "ratio": 0.05},
}
hundred = 0.4 * torch.randn(100, generator=torch.Generator().manual_seed(0)).sort(descending=True).values


def sent_of(values, compression, steps):
    """The mean of what is sent of these values over some steps."""
    reduce, total = kvstore.CompressedAllReduce(compression, len(values)), torch.zeros(len(values))
    for _ in range(steps):
        bucket = values.clone()
        reduce.start(bucket).wait()
        total += bucket
    return total / steps


dots = {(name, steps): sent_of(hundred, code, steps) for name, code in codes.items() for steps in (1, 10)}
lost = {key: ((each - hundred).square().sum() / hundred.square().sum()).item() for key, each in dots.items()}
for name in codes:
    print(f"{name:<8} lost of the gradient's square: {lost[name, 1]:8.2%} in one step, {lost[name, 10]:7.2%} over ten")

figure = viz.Figure(9.5, 4.2)
figure.set_layout_engine("constrained")
for steps, row in zip((1, 10), figure.subplots(2, 5, sharex=True, sharey=True), strict=True):
    for name, axes in zip(codes, row, strict=True):
        axes.fill_between(range(100), hundred, color=GRID, linewidth=0)
        axes.plot(dots[name, steps], ".", color=COLOURS[0], markersize=3)
        axes.set_title(f"{name}: {lost[name, steps]:.2%} lost", fontsize=9)
        axes.set(xticks=[])
        quieten(axes)
    row[0].set_ylabel("sent in one step" if steps == 1 else "mean of ten steps")
figure

# %% [markdown]
# With "int8" the dots lie on the edge of the grey area. "2bit" has three levels at first; over ten steps what is smaller
# than the threshold comes out nearly right, and what is larger is cut off at it. "sign" has the right signs and one size at
# first. With "topk" the numbers in the middle are still waiting after ten steps: the large ones come first, again and again.
#
# ## As in MXNet
#
# Four copies of a network read handwritten digits, each a quarter of every batch. `compression_params` is all that is new.
# The copies may lie on four GPUs; here all are on the CPU, and nothing is sent over any wire, but the numbers are the same.
# Gradients are sums over a worker's 16 images, and the threshold is compared with these, before `step` divides them.

# %%
images, labels = (torch.tensor(array) for array in load_digits(return_X_y=True))
images = images.float() / 16
order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
training, test = order[:1344], order[1344:]


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def batches():
    shuffle = torch.Generator().manual_seed(0)
    return [batch for _ in range(EPOCHS) for batch in training[torch.randperm(1344, generator=shuffle)].split(64)]


def train_copies(compression):
    devices = ["cpu"] * WORKERS
    nets = tristep.replicate(network(), devices)
    trainer = tristep.Trainer(nets, "sgd", OPTIMIZER, kvstore="device", compression_params=compression)
    losses = []
    for batch in batches():
        trainer.zero_grad()
        loss = 0.0
        for net, own in zip(nets, tristep.split_and_load(batch, devices), strict=True):
            part = cross_entropy(net(images[own]), labels[own], reduction="sum")
            part.backward()
            loss += part.item()
        trainer.step(batch_size=len(batch))
        losses.append(loss / len(batch))
    return losses


as_mxnet = {"not compressed": train_copies(None)}
for threshold in (0.05, 0.5, 5.0):
    as_mxnet[f"2bit, {threshold:g}"] = train_copies({"type": "2bit", "threshold": threshold})

viz.plot_training(as_mxnet, title="The threshold of 2bit")

# %% [markdown]
# Too small a threshold lets residuals pile up, too large a one sends next to nothing for long, and then much at once.
# MXNet's default of 0.5 happens to fit here.
#
# ## With and without the residual
#
# Between processes, with `kvstore="dist_sync"`, there are more types. Their compressors can be used in one process, too: in
# the next cell each of four workers has one of its own, and the sum of what they send becomes the gradient. The other half
# of the experiment throws the residuals away, `error_feedback=False`.
#
# *Guess:* which of "int8", "2bit", "sign", "1bit" and "topk" hardly needs its residual?
#
# <details><summary>Answer</summary>
#
# "int8": it has 255 values, and what it rounds off is small. "2bit", "sign" and "topk" without residuals never send what is
# small in every step, however long it adds up.
#
# </details>


# %%
def train_workers(compression):
    """Losses, bytes that a worker sends in a step, and the residual of the first worker next to its last gradient."""
    net = network()
    trainer = tristep.Trainer(net, "sgd", OPTIMIZER)
    count = sum(parameter.numel() for parameter in net.parameters())
    workers = [kvstore.CompressedAllReduce(compression, count) for _ in range(WORKERS)]
    message = workers[0].compressor.encode(torch.zeros(count))
    losses = []
    for batch in batches():
        total, loss = torch.zeros(count), 0.0
        for k, own in enumerate(batch.chunk(WORKERS)):
            part = cross_entropy(net(images[own]), labels[own], reduction="sum")
            bucket = torch.cat([gradient.flatten() for gradient in torch.autograd.grad(part, list(net.parameters()))])
            if k == 0:
                last = bucket.clone()
            workers[k].start(bucket).wait()
            total += bucket
            loss += part.item()
        pieces = total.split([parameter.numel() for parameter in net.parameters()])
        for parameter, piece in zip(net.parameters(), pieces, strict=True):
            parameter.grad = piece.view_as(parameter)
        trainer.step(batch_size=len(batch))
        losses.append(loss / len(batch))
    return losses, message.numel() * message.itemsize, workers[0].state_dict().get("worker"), last


# %%
types = {
    "int8": {"type": "int8"},
    "2bit": {"type": "2bit", "threshold": 0.5},
    "sign": {"type": "sign"},
    "1bit": {"type": "1bit", "threshold": 0.0},
    "topk 1%": {"type": "topk", "ratio": 0.01},
}
kept, dropped, sent, left_over = {}, {}, {}, {}
for name, compression in types.items():
    losses, sent[name], *left_over[name] = train_workers(compression)
    kept[name] = sum(losses[-20:]) / 20
    losses, *_ = train_workers(compression | {"error_feedback": False})
    dropped[name] = sum(losses[-20:]) / 20
exact = sum(as_mxnet["not compressed"][-20:]) / 20
whole = 4 * sum(parameter.numel() for parameter in network().parameters())

print("             bytes a step   loss with residual   without")
print(f"float32      {whole:>12,}   {exact:18.3f}")
for name in types:
    print(f"{name:<12} {sent[name]:>12,}   {kept[name]:18.3f}   {dropped[name]:7.3f}")

# %%
figure = viz.Figure(8.5, 3.8)
figure.set_layout_engine("constrained")
axes = figure.subplots()
axes.axhline(exact, color=QUIET, linewidth=0.8)
axes.text(whole, 1.1 * exact, "not compressed", color=QUIET, fontsize=9, ha="right", va="bottom")
for name in types:
    axes.plot([sent[name]] * 2, [kept[name], dropped[name]], color=GRID, zorder=1)
    axes.annotate(name, (sent[name], kept[name]), (0, -14), textcoords="offset points", ha="center", fontsize=9, color=INK)
axes.plot(sent.values(), dropped.values(), "o", color=COLOURS[1], markerfacecolor="white", label="residual thrown away")
axes.plot(sent.values(), kept.values(), "o", color=COLOURS[0], label="residual kept")
axes.plot([whole], [exact], "o", color=QUIET)
axes.set(
    xscale="log", yscale="log", xlabel="bytes that a worker sends in a step", ylabel="loss, last 20 updates", ylim=(0.1, 3)
)
axes.set_xticks([300, 1000, 3000, 10000], labels=["300", "1,000", "3,000", "10,000"])
axes.set_yticks([0.1, 0.3, 1, 3], labels=["0.1", "0.3", "1", "3"])
axes.set_yticks([], minor=True)
quieten(axes)
axes.legend(frameon=False, fontsize=9, loc="upper right")
figure

# %% [markdown]
# With their residuals all types stay close to the training that sends everything. Without, "2bit", "sign" and "topk" lose
# most of it: gradients that are small in every step are never sent, although they add up. 8-bit integers leave out
# so little that it does not matter.
#
# "1bit" is a case of its own. It sends +1 or -1 for every number, however small that is. Without residuals this is another
# optimizer, which takes steps of equal length; in this short training it is ahead, since its steps are longer, not because
# its gradients are better.
#
# ## What is kept back
#
# The sizes of a worker's residual at the end, compared with those of one of its gradients. With "int8" the residual is the
# rounding error of a single step. With "2bit" it is about as large as a gradient and, where gradients are small, stays below
# the threshold. With "topk" it is several gradients' worth, which will be sent late. If a training does not bear that, as
# with a high learning rate and much momentum, this is where to look first.

# %%
figure = viz.Figure(9.5, 2.6)
figure.set_layout_engine("constrained")
for name, axes in zip(("int8", "2bit", "topk 1%"), figure.subplots(1, 3, sharey=True), strict=True):
    for values, colour, what in zip(left_over[name], COLOURS, ("residual", "gradient"), strict=False):
        sizes = values[values != 0].abs().log10().numpy()
        axes.hist(sizes, bins=60, range=(-6, 2), histtype="stepfilled", color=colour, alpha=0.6, label=what)
    axes.set_title(name, fontsize=10)
    axes.set(xlabel="size", yticks=[], xticks=range(-6, 3, 2), xticklabels=[f"$10^{{{n}}}$" for n in range(-6, 3, 2)])
    quieten(axes)
    axes.spines["left"].set_visible(False)
axes.legend(frameon=False, fontsize=9, loc="upper left")
figure

# %% [markdown]
# ## Does it pay on your link?
#
# Sending less saves time on the wire and costs time to compress. The documentation's page on scaling says what a rank sends
# for each parameter. Divided by the bandwidth of a link, that is the time on the wire, here of 124.4 million parameters on 8
# GPUs. Bandwidths are nominal, from data sheets; none of the times below was measured. Communication hides behind backward;
# let that take 27 ms.

# %%
links = {"NVLink": 360e9, "PCIe 4": 25.2e9, "100 Gb/s Ethernet": 10.6e9, "10 Gb/s Ethernet": 1.1e9}  # bytes per second
r, backward = 7 / 8, 27.0  # the part of 8 GPUs' gradients that a GPU sends; milliseconds
sends = {"all-reduce": 8 * r, "int8": 2.0625 * r, "2bit": 0.875 * r, "sign": 0.3125 * r, "1bit": 0.625 * r, "topk 1%": 0.56}
wire = {link: {name: 124.4e9 * each / speed for name, each in sends.items()} for link, speed in links.items()}
print(f"{'ms on the wire':<20}", *(f"{name:>10}" for name in sends))
for link, times in wire.items():
    print(f"{link:<20}", *(f"{time:10.1f}" for time in times.values()))

# %% [markdown]
# On a fast link backward hides all of it, and compression, which needs the GPU, costs more than it saves. On a slow one it
# saves most of the step. In between measure a step with and without it, and look at the loss afterwards. These are the
# arguments:
#
#     trainer = tristep.Trainer(
#         net, "sgd", {...}, kvstore="dist_sync", update_on_kvstore=False, compression_params={"type": "int8"}
#     )
#
# Here all workers were played by one process. How do several really share a training, and does it stay the same training?
# That is tutorial 10.
#
# ## Exercises
#
# 1. A gradient is 0.03 in every step, and the threshold of "2bit" is 0.5. In which step is it sent for the first time?
# 2. A gradient is 0.8 in every step, with the same threshold. What is its residual after 10 steps?
# 3. How many bytes does a worker send in a step with "2bit", if a model has 1,000,000 parameters?
#
# Put your answers in place of `None`, and run the cell: it tries them.
#
# <details><summary>Solutions</summary>
#
# 1. In the 17th: $17 \cdot 0.03 = 0.51$, and $16 \cdot 0.03 = 0.48$ is not enough.
# 2. $10 \cdot (0.8 - 0.5) = 3$.
# 3. $2 \cdot 1{,}000{,}000 / 8 = 250{,}000$, a sixteenth of float32.
#
# </details>

# %%
answers = {1: None, 2: None, 3: None}


def sent_and_kept(value, steps):
    """What "2bit" sends of a number in each step, and its residual after the last one."""
    reduce = kvstore.CompressedAllReduce({"type": "2bit", "threshold": 0.5}, numel=1)
    buckets = []
    for _ in range(steps):
        bucket = torch.tensor([value])
        reduce.start(bucket).wait()
        buckets.append(bucket.item())
    return buckets, reduce.state_dict()["worker"].item()


first_sent = next(k for k, value in enumerate(sent_and_kept(0.03, 50)[0], start=1) if value)
in_bytes = kvstore.CompressedAllReduce({"type": "2bit", "threshold": 0.5}, 1_000_000)
in_bytes = in_bytes.compressor.encode(torch.zeros(1_000_000))
in_bytes = in_bytes.numel() * in_bytes.itemsize
is_right = {
    1: lambda step: step == first_sent,
    2: lambda residual: abs(residual - sent_and_kept(0.8, 10)[1]) < 0.01,
    3: lambda count: abs(count / in_bytes - 1) < 0.01,
}
hints = {
    1: lambda step: (
        f"by then {0.03 * step:.2f} have come together: that is {'not yet' if 0.03 * step < 0.5 else 'long'} the threshold"
    ),
    2: lambda residual: (
        "something is left over: a step cannot send more than 0.5"
        if residual < 0.5
        else f"{residual / 10:.2g} a step would have to be left over: how much of 0.8 is sent?"
    ),
    3: lambda count: f"that is {8 * count / 1e6:.3g} bits for each parameter",
}
exercises = viz.Exercises(is_right, hints, kinds={1: "count", 2: "number", 3: "count"})
exercises.check(answers)

# %% [markdown]
# ## Open exercises
#
# There is no number to type here. Each exercise names a cell and a change: predict what you will see, change the cell, run
# it, and look. The last cell checks the notebook as it came.
#
# - In "What two bits say", set the threshold to 1. What becomes of the residual of the second number, and when is the first
#   one sent for the first time?
#
# <details><summary>What one sees</summary>
#
# No residual is ever larger than 1 now: -0.7 is smaller than the threshold, and is sent in two steps of three. The price is
# that small numbers wait for longer: 0.3 is sent in step 4, and was in step 2.
#
# </details>
#
# - In "What each code loses", throw the residuals away: add `"error_feedback": False` to each of `codes`. Which panels of
#   the lower row change?
#
# <details><summary>What one sees</summary>
#
# All but that of "int8" become the upper row once more: each step sends the same and loses the same. That of "int8" does,
# too, but there nobody can see the difference.
#
# </details>

# %% [markdown]
# What this notebook has said, once more as checks.

# %%
exercises.prove({1: 17, 2: 3.0, 3: 250000}, wrong={1: (16, 20), 2: (0.3, 8.0), 3: (4_000_000, 500_000)})
assert torch.allclose(total + residual, 6 * gradient, atol=1e-6)
small = hundred.abs() < 0.5
assert (dots["int8", 1] - hundred).abs().max() < 0.02
assert (dots["2bit", 10] - hundred)[small].abs().max() < 0.06
assert (dots["2bit", 10][~small].abs() == 0.5).all()
assert len(dots["sign", 1].abs().unique()) == 1
assert (dots["sign", 1].sign() == hundred.sign()).all()
assert lost["1bit", 1] > 1 > 20 * lost["1bit", 10]
assert (dots["topk 5%", 1] != 0).sum() == 5
assert not dots["topk 5%", 10][hundred.abs().argsort()[:50]].any()
for name, code in codes.items():  # of the open exercises
    assert torch.allclose(sent_of(hundred, code | {"error_feedback": False}, 10), dots[name, 1], atol=1e-5)
reduce, largest = kvstore.CompressedAllReduce({"type": "2bit", "threshold": 1.0}, numel=3), 0.0
for step in range(1, 7):
    bucket = gradient.clone()
    reduce.start(bucket).wait()
    largest = max(largest, reduce.state_dict()["worker"].abs().max().item())
    assert (bucket[0] != 0) == (step == 4)
assert largest <= 1
ends = {name: sum(losses[-20:]) / 20 for name, losses in as_mxnet.items()}
assert ends["2bit, 0.5"] < min(ends["2bit, 0.05"], ends["2bit, 5"])
assert abs(kept["int8"] / exact - 1) < 0.01
assert all(abs(kept[name] - exact) < 0.25 for name in types)
assert all(dropped[name] > kept[name] + 0.4 for name in ("2bit", "sign", "topk 1%"))
assert all(size < whole / 3 for size in sent.values())
assert left_over["int8"][0].abs().mean() < 0.05 * left_over["int8"][1].abs().mean()
assert 1 / 3 < left_over["2bit"][0].abs().mean() / left_over["2bit"][1].abs().mean() < 3
assert dropped["1bit"] < exact
assert left_over["topk 1%"][0].abs().mean() > 3 * left_over["topk 1%"][1].abs().mean()
assert wire["NVLink"]["all-reduce"] < backward < wire["PCIe 4"]["all-reduce"]
assert wire["10 Gb/s Ethernet"]["all-reduce"] - wire["10 Gb/s Ethernet"]["int8"] > 10 * backward
