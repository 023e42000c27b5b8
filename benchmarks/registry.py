"""What is measured: the workloads, tristep's way to step them, and the peers' ways. Nothing is timed here."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass

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
RULE_WORKLOAD = {"cpu": CPU_WORKLOADS[-1], "cuda": GPU_WORKLOADS[-1]}

HYPER = {
    "lr": 1e-3, "wd": 0.01, "decay": 1e-5, "wd_lh": 0.0, "clip": float("inf"), "clip_weights": float("inf"),
    "beta1": 0.9, "beta2": 0.999, "momentum": 0.9, "gamma1": 0.9, "gamma2": 0.9, "epsilon": 1e-8, "rho": 0.9, "lamda": 0.04,
    "lamda1": 0.01, "beta": 1.0, "eta": 1e-3, "scaled": 1.0, "correction1": 1.1, "correction2": 1.1, "lower_bound": 0.0,
    "upper_bound": float("inf"), "of_gradient": 0.1, "of_mean": 0.9, "scale": 100.0, "one_over_scale": 1.0, "apply": 1.0,
    "key0": 1.0, "key1": 2.0, "share": 0.9, "of_momentum": 1.0, "of_delta": -1e-3, "epsilon_outside": 1e-8,
}  # fmt: skip


def parameters(workload: Workload, device: str) -> list[torch.nn.Parameter]:
    """Random parameters with random gradients, which stay the same tensors from step to step."""
    params = [torch.nn.Parameter(torch.randn(shape, device=device)) for shape in workload.shapes]
    for param in params:
        param.grad = torch.randn_like(param)
    return params


def adamw_steps(
    workload: Workload, device: str, zero: bool = False
) -> dict[str, tuple[Callable[[], object], Callable[[], object]]]:
    """By name: what comes before a step, untimed, and one step of AdamW. Each with parameters of its own.

    Before each step gradients count as written anew (no byte of them is touched), or, with `zero`, they are new tensors, as
    after `zero_grad()`.
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

    params = parameters(workload, device)
    trainer = tristep.Trainer(params, "adamw", {"learning_rate": 1e-3, "wd": 0.01})
    steps["tristep"] = prepared(params), lambda: trainer.step(1)
    for name, options in {"fused": {"fused": True}, "foreach": {"foreach": True}, "loop": {"foreach": False}}.items():
        params = parameters(workload, device)
        optimizer = torch.optim.AdamW(params, lr=1e-3, weight_decay=0.01, **options)
        steps[f"torch {name}"] = prepared(params), optimizer.step
    return steps


def rule_step(name: str, workload: Workload, device: str) -> tuple[Callable[[], object], int]:
    """One step of a rule on its own, and the bytes that it must move.

    Each array is read once, where it is used, and once more by every reduction that uses it; each output is written once.
    A rule of whole tensors gets matrices, whose rows it may be about.
    """
    rule = getattr(rules, name)
    weights = [torch.randn(shape, device=device) for shape in workload.shapes]
    if not isinstance(rule, Rule):
        weights = [weight.view(-1, 1000) if weight.numel() % 1000 == 0 else weight for weight in weights]
    gradients = [torch.randn_like(weight) for weight in weights]
    states = states_for(rule, weights)
    update = Update(rule, weights, states)
    update.hyper[:] = [1.0, *hyper_values(rule, HYPER)]
    update.bind(gradients)

    def step() -> None:
        update.holds(gradients)
        update()

    if isinstance(rule, Rule):
        n_arrays = sum(map(_arrays_read, (rule, *rule.reductions))) + 1 + len(rule.state)
        return step, 4 * workload.elements * n_arrays
    return step, 4 * (3 * workload.elements + 2 * sum(tensor.numel() for row in states for tensor in row))


def _arrays_read(function: Rule | Reduction) -> int:
    """How many arrays a rule or reduction reads: what it only unpacks is never loaded."""
    tree = ast.parse(function.source).body[0]
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    w, g = list(tree.args.args)[:2]  # type: ignore[attr-defined]
    return sum(name in names for name in (w.arg, g.arg, *function.state))
