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
# Tutorial 6 has shown that the formula decides how long updates are. How does one try another formula, on whole models and
# without losing speed?
#
# An update rule that you type in a cell becomes one fused kernel for whole models: a native loop on the CPU, a Triton
# kernel on a GPU. This notebook types in a formula from a paper, which the library also has as `grams`, checks its first
# steps in NumPy, trains with it, and compares it with Adam, on paper, too. It also looks at what was compiled, and shows
# which rules are refused and why; it runs in less than a minute and needs no GPU. At the end you write a rule yourself.

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
# With $g$ the gradient, and $\hat m$ and $\hat v$ Adam's corrected averages of $g$ and $g^2$ (tutorial 2 derives the
# correction):
#
# $$w \leftarrow w - \eta\; \text{sign}(g)\, \frac{|\hat m|}{\sqrt{\hat v} + \epsilon} - \eta\,\text{wd}\, w$$
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
# ## What the formula promises, and what it costs
#
# A small update $\Delta$ changes the loss by $\sum_i g_i \Delta_i$, to first order. Each term of Grams is
# $-\eta\, |g_i|\, |\hat m_i| / \sqrt{\hat v_i} \le 0$: **to first order the loss of the batch never rises**. Adam's terms,
# $-\eta\, g_i \hat m_i / \sqrt{\hat v_i}$, are positive where average and gradient disagree.
#
# But the gradient of a batch is noisy. Let it be $s$ plus noise of variance $\sigma^2$. Adam takes the direction from the
# average, whose mean is $s$, and divides by $\sqrt{E\,g^2} = \sqrt{s^2 + \sigma^2}$. So it goes on average
#
# $$\eta\, \frac{s}{\sqrt{s^2 + \sigma^2}}$$
#
# in a step. Grams takes the direction from one gradient, which the noise turns around again and again.
#
# *Guess:* the noise is ten times as large as $s$. How far do both go in a step?
#
# <details><summary>Answer</summary>
#
# Adam goes $0.1\,\eta$, as $0.1 / \sqrt{1.01}$ is nearly that. Grams goes less than half as far: the sign of a single
# gradient is right in 54 of 100 steps only. Part of it comes back because a step is larger where the gradient has just moved
# the average its way. Without noise both go $\eta$.
#
# </details>

# %%
print("s / noise     Adam    theory     Grams")
progress = {}
for signal in (0.03, 0.1, 0.3, 1.0):
    noisy = viz.Function("a noisy slope", f"{signal} * x + {signal} * y", noise=1.0)
    both = {"adam": {"learning_rate": 1.0}, "mygrams": {"optimizer": MyGrams, "learning_rate": 1.0}}
    paths = viz.simulate(noisy, both, np.zeros((100, 2)), 3000).paths[:, 0]  # of a hundred trainings
    progress[signal] = (paths[:, :, 1000] - paths[:, :, -1]).mean(axis=(1, 2)) / 2000
    adam, own = progress[signal]
    print(f"{signal:<9} {adam:8.4f} {signal / (signal**2 + 1) ** 0.5:9.4f} {own:9.4f}")

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
# are its instructions that load and store, for the four elements that one thread takes care of.

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
# On paper a formula has real numbers. In a computer they have an end: what of a gradient that is too large, or too small for
# the weight that it should move? Tutorial 8 is about that.
#
# ## Exercises
#
# 1. Write a rule and its class: the average $m \leftarrow \beta m + (1 - \beta) g$, and then
#    $w \leftarrow w - \eta\, \text{sign}(m)$, with $\beta = 0.9$ as default. Put the class in place of the first `None`.
# 2. The gradient is 0.5 plus noise of variance 1. How far does Adam go in a step on average, in units of the rate?
# 3. Adam keeps `mean` and `var`. How many bytes of state has each weight with `state_dtype="8bit"`, in a large layer?
#
# Run the cell: it tries your answers.
#
# <details><summary>Solutions</summary>
#
# 1. `signum` of the library does the same:
#
#    ```python
#    @tristep.rule
#    def sign_of_mean(w, g, state, hyper):
#        (mean,) = state
#        lr, beta, one_minus_beta = hyper
#        mean = beta * mean + one_minus_beta * g
#        return w - lr * sign(mean), (mean,)
#
#    class SignOfMean(tristep.optimizer.RuleOptimizer):
#        rule = sign_of_mean
#
#        def __init__(self, learning_rate=0.001, beta=0.9, **others):
#            self.beta = beta
#            super().__init__(learning_rate=learning_rate, **others)
#    ```
# 2. $0.5 / \sqrt{0.25 + 1} = 0.447$.
# 3. $2 \cdot (1 + 4 / 128) = 2.06$: one byte for each state, and a float32 for each block of 128.
#
# </details>

# %%
answers = {1: None, 2: None, 3: None}


def follows_the_sign_of_the_mean(optimizer, beta=0.9):
    weight = nn.Parameter(torch.tensor([1.0, -2.0, 3.0]))
    trainer = tristep.Trainer([weight], optimizer(learning_rate=0.1))
    expected, average = weight.detach().double().numpy(), 0.0
    for g in np.random.default_rng(1).normal(size=(20, 3)):
        weight.grad = torch.tensor(g, dtype=torch.float32)
        trainer.step(batch_size=1)
        average = beta * average + (1 - beta) * g
        expected = expected - 0.1 * np.sign(average)
    return np.abs(weight.detach().numpy() - expected).max() < 1e-5


def adams_step(signal):
    noisy = viz.Function("a noisy slope", f"{signal} * x + {signal} * y", noise=1.0)
    paths = viz.simulate(noisy, {"adam": {"learning_rate": 1.0}}, np.zeros((100, 2)), 3000).paths[0, 0]
    return (paths[:, 1000] - paths[:, -1]).mean() / 2000


is_right = {
    1: follows_the_sign_of_the_mean,
    2: lambda length: abs(length / adams_step(0.5) - 1) < 0.02,
    3: lambda size: abs(size - (states["mean"].nbytes + states["var"].nbytes) / (64 * 128)) < 0.01,
}
hints = {
    1: lambda optimizer: (
        "it takes the sign of the gradient: average first, and then take the sign"
        if follows_the_sign_of_the_mean(optimizer, beta=0.0)
        else "its steps are not the rate times the sign of the average: print a few, with gradients of your own"
    ),
    2: lambda length: (
        "Adam divides by the root of the mean *square*, which has the noise and the mean in it"
        if abs(length - 0.5) < 0.02
        else f"{length / 0.447:.2g} times the right one: the mean is 0.5, and the mean square 0.25 + 1"
    ),
    3: lambda size: (
        "the codes alone: each block of 128 has a float32 next to them, in either state"
        if abs(size - 2) < 0.01
        else "a byte for each of the two states, and a float32 for every 128 of these bytes"
    ),
}
exercises = viz.Exercises(is_right, hints, kinds={1: "function"})
exercises.check(answers)

# %% [markdown]
# ## Open exercises
#
# There is no number to type here. Each exercise names a cell and a change: predict what you will see, change the cell, run
# it, and look. The last cell checks the notebook as it came.
#
# - In the rule `grams`, replace `sign(g)` by `sign(mean)`. Which optimizer is that?
#
# <details><summary>What one sees</summary>
#
# Adam: $\text{sign}(\hat m)\, |\hat m| = \hat m$. In "What the formula promises" both columns become the same, but for
# rounding.
#
# </details>
#
# - In "What is refused", write the number itself in `with_a_number_from_outside`: `return w - 0.1 * g, state`. Is it
#   refused, too?
#
# <details><summary>What one sees</summary>
#
# No: `None` is printed for it. A number in the text is the same on all engines. A name of the notebook could change its
# value after the rule has been compiled, and the kernel would not notice.
#
# </details>

# %% [markdown]
# What this notebook has said, once more as checks.


# %%
@tristep.rule
def sign_of_mean(w, g, state, hyper):
    (mean,) = state
    lr, beta, one_minus_beta = hyper
    mean = beta * mean + one_minus_beta * g
    return w - lr * sign(mean), (mean,)


class SignOfMean(tristep.optimizer.RuleOptimizer):
    rule = sign_of_mean

    def __init__(self, learning_rate=0.001, beta=0.9, **others):
        self.beta = beta
        super().__init__(learning_rate=learning_rate, **others)


def with_a_number_in_it(w, g, state, hyper):
    return w - 0.1 * g, state


assert refusal(with_a_number_in_it) is None  # of the open exercises
exercises.prove({1: SignOfMean, 2: 0.447, 3: 2.06}, wrong={2: (0.5, 0.25), 3: (2, 8)})
assert all(abs(progress[s][0] / (s / (s**2 + 1) ** 0.5) - 1) < 0.1 for s in progress)
assert progress[0.1][1] < progress[0.1][0] / 2
assert max(differences) < 1e-6
assert all((weights - first_steps["eager"]).abs().max() < 1e-4 for weights in first_steps.values())
assert grams_accuracy > 0.9
assert adam_run.scalars["loss"].recent()[1][-20:].mean() < grams_run.scalars["loss"].recent()[1][-20:].mean()
assert min(optioned_accuracy, averaged_accuracy) > 0.9
assert states["mean"].dtype == states["var"].dtype == torch.uint8
assert states["mean"].nbytes == 64 * 128 * (1 + 4 / 128)
assert rates.found.names == playground.trajectories.names == ("mygrams", "adam")
median = rates.found.quartiles[:, :, 1]
assert (median.min(axis=1) < 0.02).all()  # both come near the minimum, which is 0
assert (median < 0.1).sum(axis=1)[1] > (median < 0.1).sum(axis=1)[0]
assert (playground.trace.updates * playground.trace.gradients <= 0).all()
assert traffic is None or [line[:2] for line in traffic] == 4 * ["ld"] + 3 * ["st"]
assert all(refused)
assert "tl.where" in refused[0]
