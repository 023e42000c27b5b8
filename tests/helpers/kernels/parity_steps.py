"""Steps of any rule next to its oracle, for tests: sizes of states, hyper-parameters, and the bounds of errors."""

import math
from types import SimpleNamespace

import numpy as np
import torch
import ulps
from approximations import spread
from optimizer_table import TABLE

from tristep.kernels import Update
from tristep.kernels.layouts import compute_dtype

F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16

# Sizes of weights, gradients and states; a rule's row in the table may have others. None is near 0, and averages outweigh
# what is added to them: so no rule comes near a place where it jumps (the sign of 0) or where nothing but rounding errors is
# left (a variance of 0), and the tolerance can be as small as it is. Zeros, infinities and NaN have tests of their own.
RANGES = dict.fromkeys(
    (
        *("weight", "var", "history", "square", "step_square", "largest", "previous", "total", "copy", "d", "v", "average"),
        *("norm2", "row", "column", "unstable_row", "unstable_column", "unstable_var"),
    ),
    (0.5, 2.0),
)
RANGES |= dict.fromkeys(("mean", "fast", "slow", "change"), (0.25, 0.7))
RANGES |= {"gradient": (0.25, 1.0), "mom": (0.4, 0.8), "delta": (0.2, 0.8), "n": (1.0, 2.0), "z": (0.3, 2.0)}
RANGES |= {"size": (1e-3, 0.1)}
POSITIVE = (
    *("var", "history", "n", "square", "step_square", "largest", "d", "v", "norm2", "size", "row", "column"),
    *("unstable_row", "unstable_column", "unstable_var"),
)
# How far a sum of 65,537 squares may be off: that many roundings, of which most cancel, and some of them made on many lanes.
SUM_ERROR = {F32: 1e-6, F64: 1e-14}

# Two rows of hyper-parameters, for tensors in turn: the first limits gradients and weights, the second does not. Where a
# name means something else in one rule, or that rule would not come to all of its cases, its row in the table has others.
_PAIRS = {
    "rescale_grad": (0.7, 1.0), "lr": (0.02, 0.003), "wd": (0.01, 0.0), "decay": (0.003, 0.0), "clip": (0.5, math.inf),
    "clip_weights": (1.5, math.inf), "momentum": (0.9, 0.8), "beta1": (0.9, 0.8), "beta2": (0.999, 0.99),
    "gamma1": (0.95, 0.9), "gamma2": (0.9, 0.5), "epsilon": (1e-8, 1e-3), "wd_lh": (0.1, 0.0), "rho": (0.9, 0.8),
    "lamda": (0.04, 0.5), "lamda1": (0.01, 0.5), "beta": (1.0, 0.5), "eta": (0.1, 0.001), "scaled": (1.0, 0.0),
    "correction1": (1.25, 1.0), "correction2": (1.6, 1.0), "of_gradient": (0.3, 1.2), "of_mean": (0.9, 0.5),
    "of_momentum": (0.9, 1.0), "of_delta": (1.0, -0.003), "epsilon_outside": (1e-10, 0.01), "share": (0.9, 1.0),
    "lower_bound": (0.0, 3.0), "upper_bound": (2.0, math.inf), "scale": (1.5, 0.8), "one_over_scale": (0.5, 1.0),
    "apply": (1.0, 0.0), "key0": (16_777_215, 0), "key1": (12_345, 7), "beta3": (0.9999, 0.99), "alpha": (5.0, 2.0),
    "correction3": (2.5, 1.0), "seen": (1.0, 0.0), "limit": (0.4, 2.0), "gamma": (0.475, 0.1), "adaptive": (1.0, 0.0),
    "shrink": (0.5, 0.5), "grow": (1.2, 1.2), "smallest": (1e-3, 1e-6), "largest": (0.1, 50.0), "new": (0.25, 0.9),
    "epsilon1": (1e-7, 1e-3), "epsilon2": (1e-3, 2.0), "split": (0, 0), "adam_lr": (0.01, 0.003), "adam_decay": (0.001, 0.0),
    "adam_epsilon": (1e-8, 1e-3), "ratio": (1.5, 1.0), "splitter": (0.0, 65537.0),
}  # fmt: skip
HYPER = [{name: pair[k] for name, pair in _PAIRS.items()} for k in range(2)]


def hyper_row(rule, k, dtype):
    """What a rule is given: rescale_grad and its hyper-parameters, by name, rounded once to the arithmetic's type."""
    row, values = {}, HYPER[k] | (TABLE[rule.name].hyper[k] if rule.name in TABLE else {})  # parts of rules have no row
    for name in ("rescale_grad", *rule.hyper):
        value = 1.0 - values[name[10:]] if name.startswith("one_minus_") else values[name]
        row[name] = value if dtype == F64 else float(np.float32(value))
    return row


def draw(rng, rule, name, shape):
    values = rng.uniform(*(RANGES | (TABLE[rule.name].ranges if rule.name in TABLE else {}))[name], shape)
    positive = name in POSITIVE or name in getattr(rule, "nonnegative", ())
    return values if positive else values * rng.choice([-1.0, 1.0], shape)


class Step:
    """One step of a rule on random tensors, done by an engine, and by the oracle on the same numbers."""

    def __init__(self, place, rule, shapes, weight_dtype, gradient_dtype, masters=False, special=None):
        rng = np.random.default_rng(1)
        self.dtype = compute_dtype(weight_dtype)
        self.weights = [place.tensor(draw(rng, rule, "weight", shape), weight_dtype) for shape in shapes]
        self.gradients = [place.tensor(draw(rng, rule, "gradient", shape), gradient_dtype) for shape in shapes]
        self.states = [
            tuple(
                place.tensor(draw(rng, rule, *each), self.dtype)
                for each in zip(rule.slots, rule.shapes(torch.Size(shape)), strict=True)
            )
            for shape in shapes
        ]
        self.masters = [place.tensor(draw(rng, rule, "weight", shape), self.dtype) for shape in shapes] if masters else None
        for weight, master in zip(self.weights, self.masters or (), strict=False):
            weight.copy_(master)
        if special is not None:
            for gradient in self.gradients:
                gradient[:] = torch.tensor(special, dtype=gradient_dtype)
        self.rule, self.ulps = rule, TABLE[rule.name].ulps
        self.hyper = [hyper_row(rule, i % len(HYPER), self.dtype) for i in range(len(shapes))]
        self.before = [tensor.clone() for tensor in [*self.weights, *self.gradients]]

    def read(self, i):
        w = self.weights[i] if self.masters is None else self.masters[i]
        h = SimpleNamespace(**{name: np.longdouble(value) for name, value in self.hyper[i].items()})
        return ulps.numpy_of(w), ulps.numpy_of(self.gradients[i]), h

    def expected(self, i):
        w, g, h = self.read(i)
        h.sum_error = SUM_ERROR[self.dtype]
        h.all = [self.read(k) for k in range(len(self.weights))]
        with np.errstate(all="ignore"):
            return TABLE[self.rule.name].oracle(w, g, [ulps.numpy_of(tensor) for tensor in self.states[i]], h)

    def spreads(self):
        """How far a GPU's quotients and roots may lead each weight and state away, by approximations.py."""
        masters = self.weights if self.masters is None else self.masters

        def step():
            wide = [tensor.detach().cpu().double() for tensor in masters]
            states = [tuple(tensor.detach().cpu().double() for tensor in row) for row in self.states]
            update = Update(self.rule, wide, states, engine="eager")
            update.hyper[:] = np.reshape([[*row.values()] for row in self.hyper], update.hyper.shape)
            update.bind([gradient.cpu().double() for gradient in self.gradients])
            update()
            return [tensor for row in zip(wide, states, strict=True) for tensor in (row[0], *row[1])]

        found = iter(spread(step))
        return [[next(found) for _ in range(1 + len(row))] for row in self.states]

    def check(self, place):
        expected = [self.expected(i) for i in range(len(self.weights))]
        spreads = self.spreads() if place.is_approximate and self.dtype == F32 else None
        place.run(
            self.rule, self.weights, self.gradients, self.states, [[*row.values()] for row in self.hyper], self.masters
        )
        for i, (weight, states) in enumerate(expected):
            shape = tuple(self.weights[i].shape)
            got = [self.weights[i] if self.masters is None else self.masters[i], *self.states[i]]
            for k, (name, tensor, result) in enumerate(
                zip(("weight", *self.rule.slots), got, [weight, *states], strict=True)
            ):
                ulps.assert_close(
                    tensor,
                    result.value,
                    scale=result.scale,
                    slack=result.slack + (0.0 if spreads is None else spreads[i][k].numpy()),
                    arithmetic=self.dtype,
                    ulps=self.ulps,
                    what=f"{name} of tensor {i}, {shape}",
                )
            if self.masters is not None:
                assert torch.equal(self.weights[i], self.masters[i].to(self.weights[i].dtype))
