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
# # Your own optimizer
#
# An update rule that you type in a cell becomes one fused kernel for whole models: a native loop on the CPU, a Triton
# kernel on a GPU. This notebook types in a formula from a paper, which the library also has as `grams`, checks its first
# steps in NumPy, trains with it, and compares it with Adam. It also looks at what was compiled, and shows which rules are
# refused and why; it runs in less than a minute and needs no GPU.

# %%
import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

import tristep
from tristep import viz
from tristep.kernels import jit, tl

# %% [markdown]
# ## The rule
#
# Grams (Cao, Li & Song 2024, "Gradient Descent with Adaptive Momentum Scaling") takes the *size* of Adam's step, and the
# *direction* of the current gradient: where the average still points the old way, Adam goes on, and Grams turns back.
#
# A rule computes the new weight from `w` and its gradient `g`. Its first lines name the state of each weight,
# `state`, which starts at zero, and the numbers that it needs, `hyper`. `lr` and `decay` (the rate times `wd`) are there for
# every optimizer, `one_minus_beta1` and the bias correction `correction1` are derived from `beta1`, and the others are
# attributes of the class below. What else depends on the update number `t`, its method `hyper` would return. `nonnegative`
# names `var`, which is never negative: 8 bits can make use of that. What several rules need can be a function of its own,
# marked with `jit`.


# %%
@jit
def sign(x):
    return tl.where(x > 0.0, 1.0, tl.where(x < 0.0, -1.0, 0.0))


@tristep.rule(nonnegative=("var",))
def grams(w, g, state, hyper):
    mean, var = state
    lr, decay, beta1, one_minus_beta1, beta2, one_minus_beta2, epsilon, correction1, correction2 = hyper
    mean = beta1 * mean + one_minus_beta1 * g
    var = beta2 * var + one_minus_beta2 * g * g
    size = tl.abs(correction1 * mean) / (tl.sqrt(correction2 * var) + epsilon)
    return w - (lr * sign(g) * size + decay * w), (mean, var)


@tristep.optimizer.register
class MyGrams(tristep.optimizer.RuleOptimizer):
    rule = grams

    def __init__(self, learning_rate=0.001, beta1=0.9, beta2=0.999, epsilon=1e-8, **others):
        if not (0 <= beta1 < 1 and 0 <= beta2 < 1 and epsilon > 0):
            raise ValueError(f"{beta1=}, {beta2=}, {epsilon=}: betas must be in [0, 1), epsilon above 0")
        self.beta1, self.beta2, self.epsilon = beta1, beta2, epsilon
        super().__init__(learning_rate=learning_rate, **others)


# %% [markdown]
# ## Five steps by hand
#
# The same formula in NumPy, with 64 bits. In the first step average and gradient agree, so it is Adam's step, of the length
# of the rate; in the later ones they do not.

# %%
gradients = np.random.default_rng(0).normal(size=(5, 4))
gradients[:, 3] = 0  # a weight without gradient must only decay
weight = nn.Parameter(torch.tensor([1.0, -2.0, 3.0, 1.0]))
trainer = tristep.Trainer([weight], "mygrams", {"learning_rate": 0.1, "wd": 0.01})

w, mean, var, differences = weight.detach().double().numpy(), 0, 0, []
for t, g in enumerate(gradients, start=1):
    weight.grad = torch.tensor(g, dtype=torch.float32)
    trainer.step(batch_size=1)

    mean, var = 0.9 * mean + 0.1 * g, 0.999 * var + 0.001 * g * g
    size = np.abs(mean / (1 - 0.9**t)) / (np.sqrt(var / (1 - 0.999**t)) + 1e-8)
    w = w - 0.1 * np.sign(g) * size - 0.1 * 0.01 * w
    differences.append(np.abs(weight.detach().numpy() - w).max())
    print(f"step {t}: {weight.detach().numpy()}, NumPy {w.round(4)}, largest difference {differences[-1]:.0e}")

# %% [markdown]
# ## Digits, on every engine
#
# Nothing else is needed: the rule runs on each engine that the machine has. "eager" computes it with PyTorch's operations,
# one after the other; "cpu" is the compiled loop; "triton" is the GPU kernel, tried where there is a GPU. They must come to
# the same weights, but for rounding.

# %%
images, labels = (torch.tensor(array) for array in load_digits(return_X_y=True))
images = images.float() / 16
order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
training, test = order[:1344], order[1344:]


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def fit(name, options, epochs=8, engine=None, device="cpu"):
    """The trained network, its trainer, and the run that was recorded."""
    net, shuffle = network().to(device), torch.Generator().manual_seed(0)
    trainer = tristep.Trainer(net, name, options, engine=engine)
    recorder = viz.Recorder(trainer, name)
    for _ in range(epochs):
        for batch in training[torch.randperm(len(training), generator=shuffle)].split(64):
            trainer.zero_grad()
            loss = cross_entropy(net(images[batch].to(device)), labels[batch].to(device))
            loss.backward()
            trainer.step(batch_size=1)  # the loss is a mean already
            recorder.step(loss=loss)
    recorder.close()
    return net, trainer, recorder.run


@torch.no_grad()
def accuracy(net):
    return (net(images[test]).argmax(dim=1) == labels[test]).float().mean().item()


places = {"eager": "cpu", "cpu": "cpu"} | ({"triton": "cuda"} if torch.cuda.is_available() else {})
first_steps = {}
for engine, device in places.items():
    net, _, _ = fit("mygrams", {"learning_rate": 0.003}, epochs=1, engine=engine, device=device)
    first_steps[engine] = torch.cat([parameter.detach().cpu().flatten() for parameter in net.parameters()])
    apart = (first_steps[engine] - first_steps["eager"]).abs().max()
    print(f"{engine:<6} after 21 updates: largest difference from eager {apart:.1e}")

# %% [markdown]
# A whole training run, compared with Adam at the same learning rate:

# %%
net, _, grams_run = fit("mygrams", {"learning_rate": 0.003})
_, _, adam_run = fit("adam", {"learning_rate": 0.003})
grams_accuracy = accuracy(net)
print(f"test accuracy with grams {grams_accuracy:.1%}")
viz.LossView([grams_run, adam_run])

# %% [markdown]
# ## What comes for free
#
# Options are put into the kernel around the rule, which knows nothing of them: here the norm of all gradients is clipped, an
# average of the weights is kept, and the states are stored in 8 bits (those of tensors with 4,096 elements or more). The
# docstring of `RuleOptimizer` lists them all.

# %%
options = {"learning_rate": 0.003, "clip_norm": 1.0, "ema_decay": 0.98, "state_dtype": "8bit"}
optioned, trainer, _ = fit("mygrams", options)
optioned_accuracy = accuracy(optioned)
with trainer.averaged_weights():
    averaged_accuracy = accuracy(optioned)
states = trainer.state_dict()["state"]["0.weight"]  # of the first layer, 64 times 128 weights
print(f"test accuracy {optioned_accuracy:.1%}, with averaged weights {averaged_accuracy:.1%}")
for name, state in states.items():
    print(f"{name:<4} in {state.dtype}: {state.nbytes / (64 * 128):.2f} bytes for each weight")

# %% [markdown]
# ## A comparison
#
# The views of tutorial 2 take a class as they take a name. A comparison is fair if each optimizer has its own best rate. So
# here both run at 41 rates from 16 starts on Rosenbrock's function, and the curves show how far from the minimum they are
# after 200 steps: the line is the median, the band the middle half. At their best the two are close; Adam is content with
# more rates.

# %%
rates = viz.SensitivityView("rosenbrock", {"mygrams": MyGrams, "adam": {}})
rates

# %% [markdown]
# `Playground` lets them run at their best rates, and opens one update: the point, what is kept, and the arrows of gradient,
# average and step, and the rule. In a notebook that runs, a click moves the start, and the class's arguments are sliders,
# whose ends are found by asking the constructor, so the check in `__init__` pays. Watch the arrows: the step of Grams never
# climbs against the gradient in any coordinate.

# %%
playground = viz.Playground("rosenbrock", MyGrams, against=("adam",))
playground

# %% [markdown]
# What is good on one function of two variables need not be so for networks: on the digits above, at one rate for both, Adam
# was ahead.
#
# ## What was compiled
#
# `grams.source` is the text that all engines share. The kernel that Triton makes of it can be looked at without a GPU; here
# it is compiled for an H100. What counts for the speed is how often it goes to memory: four arrays are read (weight,
# gradient, mean, var) and three are written, each once, four numbers at a time; all between is done in registers. These
# are its instructions that load and store, for the eight elements that one thread takes care of.

# %%
print(grams.source, "\n")
try:
    from triton.backends.compiler import GPUTarget

    from tristep.kernels.backends.triton.compile import compile_for
except ModuleNotFoundError:  # there is no Triton for macOS and Windows
    traffic = None
    print("no Triton here, so no GPU code to look at")
else:
    code = compile_for(GPUTarget("cuda", 90, 32), grams).asm["ptx"].splitlines()
    traffic = [line.strip() for line in code if "global.v4.b32" in line]
    print(f"{len(code)} lines of PTX, and among them:", *traffic, sep="\n")

# %% [markdown]
# ## What is refused
#
# A rule must mean the same on all engines, so it has arithmetic, comparisons, the functions of `tl` and other functions
# marked with `jit`, and nothing else. What does not fit is refused where it is defined, before anything is trained. Here is
# what one gets for common mistakes:

# %%
rate = 0.1


def with_if(w, g, state, hyper):
    (lr,) = hyper
    if g > 0.0:
        w = w - lr
    return w, state


def with_a_number_from_outside(w, g, state, hyper):
    return w - rate * g, state


def with_torch(w, g, state, hyper):
    (lr,) = hyper
    return w - lr * torch.sign(g), state


def with_a_slip_of_the_pen(w, g, state, hyper):
    (lr,) = hyper
    return w - lr * tl.sqr(g), state


def without_its_state(w, g, state, hyper):
    (mean,) = state
    (lr,) = hyper
    return w - lr * (0.9 * mean + 0.1 * g)


def refusal(function):
    try:
        tristep.rule(function)
    except TypeError as error:
        return str(error)
    return None


wrong = with_if, with_a_number_from_outside, with_torch, with_a_slip_of_the_pen, without_its_state
refused = [refusal(function) for function in wrong]
print(*refused, sep="\n\n")

# %% [markdown]
# The first needs `tl.where(g > 0.0, ...)`, the second an attribute of the class. An attribute that is forgotten is an error
# at the first step, which says its name. For rules that need norms or whole matrices there are `tristep.kernels.reduction`
# and `tensor_rule`.
#
# What this notebook has said, once more as checks.

# %%
assert max(differences) < 1e-6
assert all((weights - first_steps["eager"]).abs().max() < 1e-4 for weights in first_steps.values())
assert grams_accuracy > 0.9
assert min(optioned_accuracy, averaged_accuracy) > 0.9
assert states["mean"].dtype == states["var"].dtype == torch.uint8
assert states["mean"].nbytes == 64 * 128 * (1 + 4 / 128)
assert rates.found.names == playground.trajectories.names == ("mygrams", "adam")
median = rates.found.quartiles[:, :, 1]
assert (median.min(axis=1) < 0.02).all()  # both come near the minimum, which is 0
assert (median < 0.1).sum(axis=1)[1] > (median < 0.1).sum(axis=1)[0]
assert (playground.trace.updates * playground.trace.gradients <= 0).all()
assert traffic is None or [line[:2] for line in traffic] == 8 * ["ld"] + 6 * ["st"]
assert all(refused)
assert "tl.where" in refused[0]
