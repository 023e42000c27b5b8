"""What is measured: the workloads, tristep's way to step them, and the peers' ways. Nothing is timed here."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

import tristep
from tristep.kernels import Reduction, Rule, Update, rules
from tristep.kernels.engine import hyper_values
from tristep.kernels.table import states_for


@dataclass(frozen=True)
class Workload:
    """Parameter shapes under a name."""

    name: str
    shapes: tuple[tuple[int, ...], ...]

    @property
    def elements(self) -> int:
        return sum(torch.Size(shape).numel() for shape in self.shapes)


def _gpt2() -> tuple[tuple[int, ...], ...]:
    width = 768
    attention = [(width,), (width,), (width, 3 * width), (3 * width,), (width, width), (width,)]
    mlp = [(width,), (width,), (width, 4 * width), (4 * width,), (4 * width, width), (width,)]
    return ((50257, width), (1024, width), *(attention + mlp) * 12, (width,), (width,))


CPU_WORKLOADS = (
    Workload("6 tensors of an MLP", ((64, 2), (32,), (32, 32), (32,), (32, 1), (1,))),
    Workload("148 x 8", ((8,),) * 148),
    Workload("100 x 100,000", ((100_000,),) * 100),
    Workload("1 x 16.8 M", ((16_800_000,),)),
)
GPU_WORKLOADS = (
    Workload("148 x 8", ((8,),) * 148),
    Workload("1,000 x 1,024", ((1024,),) * 1000),
    Workload("GPT-2 124M, 148 tensors", _gpt2()),
    Workload("1 x 2^28", ((2**28,),)),
)
# For rules, a matrix, because some peers treat vectors otherwise; Muon gets smaller ones, because it multiplies them.
RULE_WORKLOAD = {"cpu": Workload("16,800 x 1,000", ((16_800, 1000),)), "cuda": Workload("2^14 x 2^14", ((2**14, 2**14),))}
MUON_WORKLOAD = {
    "cpu": Workload("2 x 1,024 x 1,024", ((1024, 1024),) * 2),
    "cuda": Workload("16 x 2,048 x 2,048", ((2048, 2048),) * 16),
}
MATRIX_WORKLOADS = (
    Workload("48 x 64 x 64", ((64, 64),) * 48),
    Workload("24 x 256 x 1,024", ((256, 1024),) * 24),
    Workload("8 x 1,024 x 1,024", ((1024, 1024),) * 8),
)

HYPER = {
    "lr": 1e-3, "wd": 0.01, "decay": 1e-5, "wd_lh": 0.0, "clip": float("inf"), "clip_weights": float("inf"),
    "beta1": 0.9, "beta2": 0.999, "momentum": 0.9, "gamma1": 0.9, "gamma2": 0.9, "epsilon": 1e-8, "rho": 0.9, "lamda": 0.04,
    "lamda1": 0.01, "beta": 1.0, "eta": 1e-3, "scaled": 1.0, "correction1": 1.1, "correction2": 1.1, "lower_bound": 0.0,
    "upper_bound": float("inf"), "of_gradient": 0.1, "of_mean": 0.9, "scale": 100.0, "one_over_scale": 1.0, "apply": 1.0,
    "key0": 1.0, "key1": 2.0, "share": 0.9, "of_momentum": 1.0, "of_delta": -1e-3, "epsilon_outside": 1e-8, "beta3": 0.999,
    "correction3": 1.1, "alpha": 5.0, "seen": 1.0, "limit": 1.0, "gamma": 0.475, "adaptive": 1.0, "shrink": 0.5, "grow": 1.2,
    "smallest": 1e-6, "largest": 50.0, "new": 0.01, "epsilon1": 1e-7, "epsilon2": 1e-3, "steps": 5.0, "ns_a": 3.4445,
    "ns_b": -4.775, "ns_c": 2.0315, "adam_lr": 1e-3, "adam_decay": 1e-5, "adam_epsilon": 1e-8,
}  # fmt: skip
OWN_HYPER = {
    "ascent": {"rho": 0.05, "adaptive": 0.0},
    "came": {"epsilon1": 1e-30, "epsilon2": 1e-16},
    "muon": {"momentum": 0.95, "scale": 0.0, "of_gradient": 0.05, "of_mean": 0.95},
    "schedule_free_adamw": {"beta": 0.9, "share": 0.01},
    "schedule_free_sgd": {"beta": 0.9, "share": 0.01},
    "sophia": {"rho": 0.04},
}

# Optimizers that do what a rule does: the class, and its arguments beside the rate. Of torch.optim's, `foreach` and, where
# there is one, `fused` are timed; others as they come.
PEERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "adabelief": ("pytorch_optimizer", "AdaBelief", {"weight_decay": 0.01}),
    "adadelta": ("torch.optim", "Adadelta", {"weight_decay": 0.01}),
    "adafactor": ("torch.optim", "Adafactor", {"weight_decay": 0.01}),
    "adagrad": ("torch.optim", "Adagrad", {"weight_decay": 0.01}),
    "adam": ("torch.optim", "Adam", {"weight_decay": 0.01}),
    "adamax": ("torch.optim", "Adamax", {"weight_decay": 0.01}),
    "adamw": ("torch.optim", "AdamW", {"weight_decay": 0.01}),
    "adan": ("pytorch_optimizer", "Adan", {"weight_decay": 0.01}),
    "ademamix": ("pytorch_optimizer", "AdEMAMix", {"weight_decay": 0.01, "weight_decouple": True}),
    "adopt": ("pytorch_optimizer", "ADOPT", {"weight_decay": 0.01, "weight_decouple": True}),
    "amsgrad": ("torch.optim", "Adam", {"weight_decay": 0.01, "amsgrad": True}),
    "asgd": ("torch.optim", "ASGD", {"weight_decay": 0.01, "t0": 0.0}),
    "came": ("pytorch_optimizer", "CAME", {"weight_decay": 0.01}),
    "ftrl": ("pytorch_optimizer", "FTRL", {"beta": 1.0, "lambda_1": 0.01, "lambda_2": 0.01}),
    "heavy_ball": ("torch.optim", "SGD", {"weight_decay": 0.01, "momentum": 0.9}),
    "lamb": ("pytorch_optimizer", "Lamb", {"weight_decay": 0.01, "max_grad_norm": 0.0}),
    "lars": ("pytorch_optimizer", "LARS", {"weight_decay": 0.01, "momentum": 0.0}),
    "lars_momentum": ("pytorch_optimizer", "LARS", {"weight_decay": 0.01}),
    "lion": ("pytorch_optimizer", "Lion", {"weight_decay": 0.01}),
    "mars": ("pytorch_optimizer", "MARS", {"weight_decay": 0.01, "weight_decay_1d": 0.01, "optimize_1d": True}),
    "muon": ("torch.optim", "Muon", {"weight_decay": 0.01}),
    "nadam": ("torch.optim", "NAdam", {"weight_decay": 0.01}),
    "nag": ("torch.optim", "SGD", {"weight_decay": 0.01, "momentum": 0.9, "nesterov": True}),
    "novograd": ("pytorch_optimizer", "NovoGrad", {"weight_decay": 0.01}),
    "radam": ("torch.optim", "RAdam", {"weight_decay": 0.01, "decoupled_weight_decay": True}),
    "rmsprop": ("torch.optim", "RMSprop", {"weight_decay": 0.01}),
    "rmsprop_centered": ("torch.optim", "RMSprop", {"weight_decay": 0.01, "centered": True, "momentum": 0.9}),
    "rmsprop_momentum": ("torch.optim", "RMSprop", {"weight_decay": 0.01, "momentum": 0.9}),
    "rmsprop_variance": ("torch.optim", "RMSprop", {"weight_decay": 0.01, "centered": True}),
    "rprop": ("torch.optim", "Rprop", {}),
    "schedule_free_adamw": ("pytorch_optimizer", "ScheduleFreeAdamW", {"weight_decay": 0.01}),
    "schedule_free_sgd": ("pytorch_optimizer", "ScheduleFreeSGD", {"weight_decay": 0.01}),
    "sgd": ("torch.optim", "SGD", {"weight_decay": 0.01}),
    "sgd_momentum": ("torch.optim", "SGD", {"weight_decay": 0.01, "momentum": 0.9}),
    "sign_sgd": ("pytorch_optimizer", "SignSGD", {"weight_decay": 0.01, "momentum": 0.0}),
    "signum": ("pytorch_optimizer", "SignSGD", {"weight_decay": 0.01}),
    "stable_adamw": ("pytorch_optimizer", "StableAdamW", {"weight_decay": 0.01, "kahan_sum": False}),
}


def rule_workload(name: str, device: str) -> Workload:
    """What a rule is measured on."""
    return (MUON_WORKLOAD if name == "muon" else RULE_WORKLOAD)[device]


def parameters(workload: Workload, device: str) -> list[torch.nn.Parameter]:
    """Random parameters with random gradients, which stay the same tensors from step to step."""
    params = [torch.nn.Parameter(torch.randn(shape, device=device)) for shape in workload.shapes]
    for param in params:
        param.grad = torch.randn_like(param)
    return params


def adamw_steps(
    workload: Workload, device: str, zero: bool = False, only: str | None = None
) -> dict[str, tuple[Callable[[], object], Callable[[], object]]]:
    """By name: what comes before a step, untimed, and one step of AdamW. Each with parameters of its own.

    Before each step gradients count as written anew (no byte of them is touched), or, with `zero`, they are new tensors, as
    after `zero_grad()`. `only` one of them is made, if asked for.
    """
    steps = {}

    def prepared(params: list[torch.nn.Parameter]) -> Callable[[], None]:
        grads = [param.grad for param in params]
        spare = [[torch.randn_like(param) for param in params] for _ in range(2)] if zero else []

        def fresh() -> None:
            if zero:
                spare.reverse()
                for param, grad in zip(params, spare[0], strict=True):
                    param.grad = grad.clone()
            else:
                torch.autograd.graph.increment_version(grads)

        return fresh

    if only in (None, "tristep"):
        params = parameters(workload, device)
        trainer = tristep.Trainer(params, "adamw", {"learning_rate": 1e-3, "wd": 0.01})
        steps["tristep"] = prepared(params), lambda: trainer.step(1)
    for name, options in {"fused": {"fused": True}, "foreach": {"foreach": True}, "loop": {"foreach": False}}.items():
        if only in (None, f"torch {name}"):
            params = parameters(workload, device)
            optimizer = torch.optim.AdamW(params, lr=1e-3, weight_decay=0.01, **options)
            steps[f"torch {name}"] = prepared(params), optimizer.step
    return steps


def muon_steps(workload: Workload, device: str) -> dict[str, tuple[Callable[[], object], Callable[[], object]]]:
    """By name: what comes before a step, untimed, and one step of Muon. Each with parameters of its own."""
    params, others = parameters(workload, device), parameters(workload, device)
    trainer = tristep.Trainer(params, "muon", {"learning_rate": 1e-3, "wd": 0.1})
    grads = [param.grad for param in params]
    fresh = partial(torch.autograd.graph.increment_version, grads)
    return {
        "tristep": (fresh, lambda: trainer.step(1)),
        "torch": (lambda: None, torch.optim.Muon(others, lr=1e-3, weight_decay=0.1).step),
    }


def clip_steps(workload: Workload, device: str) -> dict[str, tuple[Callable[[], object], Callable[[], object]]]:
    """By name: what comes before a step, untimed, and one step of AdamW on gradients clipped by their norm together.

    In one pass with the step, and by functions of their own. The gradients are the same tensors from step to step.
    """

    def prepared(params: list[torch.nn.Parameter]) -> Callable[[], None]:
        grads = [param.grad for param in params]
        return lambda: torch.autograd.graph.increment_version(grads)

    params = parameters(workload, device)
    folded = tristep.Trainer(params, "adamw", {"learning_rate": 1e-3, "wd": 0.01, "clip_norm": 1.0})
    steps = {"tristep": (prepared(params), lambda: folded.step(1))}
    plain = parameters(workload, device)
    trainer = tristep.Trainer(plain, "adamw", {"learning_rate": 1e-3, "wd": 0.01})

    def apart() -> None:
        tristep.optim.clip_grad_norm_(plain, 1.0)
        trainer.step(1)

    steps["tristep, clip apart"] = prepared(plain), apart
    theirs = parameters(workload, device)
    optimizer = torch.optim.AdamW(theirs, lr=1e-3, weight_decay=0.01, fused=True)

    def torchs() -> None:
        torch.nn.utils.clip_grad_norm_(theirs, 1.0)
        optimizer.step()

    steps["torch fused"] = prepared(theirs), torchs
    alone, other = parameters(workload, device), parameters(workload, device)
    steps["clip alone"] = nothing, lambda: tristep.optim.clip_grad_norm_(alone, 1.0)
    steps["torch clip alone"] = nothing, lambda: torch.nn.utils.clip_grad_norm_(other, 1.0)
    return steps


def nothing() -> None:
    """What comes before a step that needs nothing."""


def rule_step(name: str, workload: Workload, device: str) -> tuple[Callable[[], object], int]:
    """One step of a rule on its own, and the bytes that it must move.

    Each array is read once, where it is used, and once more by every reduction that uses it; each output is written once.
    """
    rule = getattr(rules, name)
    weights = [torch.randn(shape, device=device) for shape in workload.shapes]
    gradients = [torch.randn_like(weight) for weight in weights]
    states = states_for(rule, weights)
    update = Update(rule, weights, states)
    update.hyper[:] = [1.0, *hyper_values(rule, HYPER | OWN_HYPER.get(name, {}))]
    update.bind(gradients)

    def step() -> None:
        update.holds(gradients)
        update()

    if isinstance(rule, Rule):
        n_arrays = sum(map(_arrays_read, (rule, *rule.reductions))) + 1 + len(rule.changed)
        return step, 4 * workload.elements * n_arrays
    return step, 4 * (3 * workload.elements + 2 * sum(tensor.numel() for row in states for tensor in row))


def peer_steps(name: str, workload: Workload, device: str) -> dict[str, Callable[[], object]]:
    """By name, a step of each optimizer that does what this rule does; none where its library is not installed."""
    if name not in PEERS or importlib.util.find_spec(PEERS[name][0]) is None:
        return {}
    library, cls, arguments = PEERS[name]
    make = getattr(importlib.import_module(library), cls)
    known = inspect.signature(make).parameters
    ways = [way for way in ("foreach", "fused") if way in known] if library == "torch.optim" else []
    steps = {}
    for way in ways or [""]:
        optimizer = make(parameters(workload, device), lr=HYPER["lr"], **arguments, **({way: True} if way else {}))
        if hasattr(optimizer, "train"):
            optimizer.train()
        steps[f"torch {way}".strip() if library == "torch.optim" else library] = optimizer.step
    return steps


def _arrays_read(function: Rule | Reduction) -> int:
    """How many arrays a rule or reduction reads: what it only unpacks is never loaded."""
    tree = ast.parse(function.source).body[0]
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    w, g = list(tree.args.args)[:2]  # type: ignore[attr-defined]
    states = function.used if isinstance(function, Rule) else function.state
    return sum(name in names for name in (w.arg, g.arg, *states))
