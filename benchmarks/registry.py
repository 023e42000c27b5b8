"""What is measured: tristep's way to take a step, and the peers' ways. Nothing is timed here."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import workloads
from workloads import Workload, parameters

import tristep
from tristep.kernels import Reduction, Rule, ShapedRule, TensorRule, Update, compress, rules
from tristep.kernels.functional import hyper_values
from tristep.kernels.states import states_for
from tristep.optimizer import RuleOptimizer, registered


class Step(NamedTuple):
    """Something to be timed: what comes before it, untimed, and how many bytes it must move, if that is known."""

    run: Callable[[], object]
    before: Callable[[], object] | None = None
    moved: float | None = None


Steps = dict[str, Step]

# Of rules that are not those of an optimizer's defaults; others have these defaults.
HYPER = {
    "lr": 1e-3, "wd": 0.01, "decay": 1e-5, "wd_lh": 0.0, "clip": float("inf"), "clip_weights": float("inf"),
    "beta1": 0.9, "beta2": 0.999, "momentum": 0.9, "gamma1": 0.9, "gamma2": 0.9, "epsilon": 1e-8, "rho": 0.05, "lamda": 0.04,
    "eta": 1e-3, "scaled": 1.0, "of_gradient": 0.1, "scale": 100.0, "one_over_scale": 1.0, "apply": 1.0, "share": 0.9,
    "of_momentum": 1.0, "of_delta": -1e-3, "epsilon_outside": 1e-8, "adaptive": 0.0,
}  # fmt: skip

# What the peer of a rule must be told for each group of parameters.
PEERS_GROUPS: dict[str, dict[str, Any]] = {"normuon": {"use_muon": True}}
# Optimizers that do what a rule does: the class, and its arguments other than the learning rate. Other rules have the peer
# that `peer` finds. Of torch.optim's, `foreach` and, where there is one, `fused` are timed; others by default.
PEERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "ademamix": ("pytorch_optimizer", "AdEMAMix", {"weight_decay": 0.01, "weight_decouple": True}),
    "adopt": ("pytorch_optimizer", "ADOPT", {"weight_decay": 0.01, "weight_decouple": True}),
    "amsgrad": ("torch.optim", "Adam", {"weight_decay": 0.01, "amsgrad": True}),
    "asgd": ("torch.optim", "ASGD", {"weight_decay": 0.01, "t0": 0.0}),
    "ftrl": ("pytorch_optimizer", "FTRL", {"beta": 1.0, "lambda_1": 0.01, "lambda_2": 0.01}),
    "heavy_ball": ("torch.optim", "SGD", {"weight_decay": 0.01, "momentum": 0.9}),
    "lamb": ("pytorch_optimizer", "Lamb", {"weight_decay": 0.01, "max_grad_norm": 0.0}),
    "lars": ("pytorch_optimizer", "LARS", {"weight_decay": 0.01, "momentum": 0.0}),
    "lars_momentum": ("pytorch_optimizer", "LARS", {"weight_decay": 0.01}),
    "mars": ("pytorch_optimizer", "MARS", {"weight_decay": 0.01, "weight_decay_1d": 0.01, "optimize_1d": True}),
    "nag": ("torch.optim", "SGD", {"weight_decay": 0.01, "momentum": 0.9, "nesterov": True}),
    "radam": ("torch.optim", "RAdam", {"weight_decay": 0.01, "decoupled_weight_decay": True}),
    "rmsprop_centered": ("torch.optim", "RMSprop", {"weight_decay": 0.01, "centered": True, "momentum": 0.9}),
    "rmsprop_momentum": ("torch.optim", "RMSprop", {"weight_decay": 0.01, "momentum": 0.9}),
    "rmsprop_variance": ("torch.optim", "RMSprop", {"weight_decay": 0.01, "centered": True}),
    "rprop": ("torch.optim", "Rprop", {}),
    "sgd_momentum": ("torch.optim", "SGD", {"weight_decay": 0.01, "momentum": 0.9}),
    "sign_sgd": ("pytorch_optimizer", "SignSGD", {"weight_decay": 0.01, "momentum": 0.0}),
    "signum": ("pytorch_optimizer", "SignSGD", {"weight_decay": 0.01}),
    "stable_adamw": ("pytorch_optimizer", "StableAdamW", {"weight_decay": 0.01, "kahan_sum": False}),
}


# AdamW with weights and states in low precision: the weights' type, options, and bytes that a step moves for each element.
# Peers' states of 8 bits have a scale of 32 for each 256 elements, tristep's of 8 and 4 bits for each 128.
_EIGHT, _PACKED, _FOUR = 2 * 2 * (1 + 4 / 256), 2 * 2 * (1 + 4 / 128), 2 * 2 * (1 / 2 + 4 / 128)
STORED: dict[str, tuple[torch.dtype, dict[str, Any], float]] = {
    "float32": (torch.float32, {}, 28),
    "float32, states bf16": (torch.float32, {"state_dtype": "bfloat16"}, 20),
    "float32, states 8-bit": (torch.float32, {"state_dtype": "8bit"}, 12 + _PACKED),
    "bf16, states bf16": (torch.bfloat16, {"state_dtype": "bfloat16"}, 14),
    "the same, stochastic": (torch.bfloat16, {"state_dtype": "bfloat16", "stochastic_rounding": True}, 14),
    "bf16, states 8-bit, stochastic": (
        torch.bfloat16, {"state_dtype": "8bit", "stochastic_rounding": True}, 6 + _PACKED,
    ),
    "bf16, states 4-bit, stochastic": (
        torch.bfloat16, {"state_dtype": "4bit", "stochastic_rounding": True}, 6 + _FOUR,
    ),
    "bf16 and float32": (torch.bfloat16, {"multi_precision": True}, 28),
    "bf16 and remainder": (torch.bfloat16, {"multi_precision": "remainder"}, 26),
    "bf16 and remainder, states bf16": (torch.bfloat16, {"multi_precision": "remainder", "state_dtype": "bfloat16"}, 18),
    "bf16 and 8 bits": (torch.bfloat16, {"multi_precision": "split8"}, 24),
    "bf16 and 8 bits, states 8-bit": (torch.bfloat16, {"multi_precision": "split8", "state_dtype": "8bit"}, 8 + _PACKED),
    "bf16 and 8 bits, states 4-bit": (torch.bfloat16, {"multi_precision": "split8", "state_dtype": "4bit"}, 8 + _FOUR),
}  # fmt: skip
# Peers for these: library, class (found in its `module`), the weights' type, arguments, bytes, and for which of the above.
STORED_PEERS: dict[str, tuple[str, str, torch.dtype, dict[str, Any], float]] = {
    "torch fused": ("torch.optim", "AdamW", torch.float32, {"fused": True}, 28),
    "torch fused, bf16": ("torch.optim", "AdamW", torch.bfloat16, {"fused": True}, 14),
    "optimi, bf16, Kahan": ("optimi", "AdamW", torch.bfloat16, {}, 18),
    "torchao 8-bit, bf16, stochastic": (
        "torchao.optim", "AdamW8bit", torch.bfloat16, {"bf16_stochastic_round": True}, 6 + _EIGHT,
    ),
    "bitsandbytes 8-bit, bf16": ("bitsandbytes.optim", "AdamW8bit", torch.bfloat16, {}, 6 + _EIGHT),
}  # fmt: skip


def nothing() -> None:
    """A step that does nothing."""


def copy_step(moved: float, device: str, most: float = 8e9) -> tuple[Step, float]:
    """A copy that moves so many bytes, half of them read; and how much of them, which is less than 1 beyond `most`."""
    source = torch.zeros(max(int(min(moved, most) / 2), 1), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return Step(lambda: target.copy_(source), moved=2 * len(source)), min(1.0, most / moved)


def coding_steps(name: str, n: int, device: str) -> Steps:
    """To quantise n gradients, keep the error and pack the codes: in one pass, and, of MXNet's, in torch's operations."""
    code, threshold = compress.CODES[name], 0.5
    gradient, residual = torch.randn(n, device=device), torch.zeros(n, device=device)
    message = torch.empty(1, code.size(code.chunk(n)), dtype=torch.uint8, device=device)
    moved = 12 * n + message.numel()
    own = Step(partial(compress.encode, code, gradient, residual, message, threshold), moved=moved)
    other = residual.clone()

    def two_bit() -> torch.Tensor:
        other.add_(gradient)
        up, down = other >= threshold, other <= -threshold
        other.add_(up, alpha=-threshold).add_(down, alpha=threshold)
        codes = (up.to(torch.uint8) * 3 + down.to(torch.uint8) * 2).view(-1, 4)
        return (codes[:, 0] << 6) | (codes[:, 1] << 4) | (codes[:, 2] << 2) | codes[:, 3]

    shifts = torch.arange(7, -1, -1, device=device, dtype=torch.uint8)

    def one_bit() -> torch.Tensor:
        other.add_(gradient)
        bits = other > threshold
        other.sub_(torch.where(bits, 1.0, -1.0))
        return (bits.view(-1, 8).to(torch.uint8) << shifts).sum(dim=1, dtype=torch.uint8)

    chains: dict[str, Callable[[], torch.Tensor]] = {"2bit": two_bit, "1bit": one_bit}
    return {"tristep": own} | ({"torch": Step(chains[name])} if name in chains else {})


def as_written(params: Sequence[torch.nn.Parameter]) -> Callable[[], None]:
    """A function that makes all gradients count as written anew, without touching a byte of them."""
    return partial(torch.autograd.graph.increment_version, [param.grad for param in params])


def as_new(params: Sequence[torch.nn.Parameter]) -> Callable[[], None]:
    """A function that replaces all gradients by new tensors, as after `zero_grad()`."""
    spare = [torch.randn_like(param) for param in params]

    def replace() -> None:
        for param, gradient in zip(params, spare, strict=True):
            param.grad = gradient.clone()

    return replace


def adamw_steps(params: list[torch.nn.Parameter], names: Sequence[str], new: bool = False) -> Steps:
    """Steps of AdamW by name: "tristep" (a Trainer), "tristep.optim", "torch fused", "torch foreach", "torch loop" and
    "torch compiled".

    All of them work on the same parameters and gradients, so that large ones fit into memory together; states are their own.
    """
    moved = 28 * sum(param.numel() for param in params)
    before = as_new(params) if new else as_written(params)
    ways: dict[str, dict[str, Any]] = {"fused": {"fused": True}, "foreach": {"foreach": True}, "loop": {"foreach": False}}
    steps = {}
    for name in names:
        if name == "tristep":
            trainer = tristep.Trainer(params, "adamw", {"learning_rate": 1e-3, "wd": 0.01})
            run: Callable[[], object] = partial(trainer.step, 1)
        elif name == "tristep.optim":
            run = tristep.optim.AdamW(params, lr=1e-3, weight_decay=0.01).step
        elif name == "torch compiled":
            # On a GPU the rate may be a tensor, so that another one is not compiled again.
            on_gpu = params[0].is_cuda
            lr: Any = torch.tensor(1e-3, device=params[0].device) if on_gpu else 1e-3
            run = torch.compile(torch.optim.AdamW(params, lr=lr, weight_decay=0.01, foreach=True, capturable=on_gpu).step)
        else:
            run = torch.optim.AdamW(params, lr=1e-3, weight_decay=0.01, **ways[name.removeprefix("torch ")]).step
        steps[name] = Step(run, before, moved)
    return steps


def clip_steps(params: list[torch.nn.Parameter]) -> Steps:
    """AdamW on gradients clipped by their norm together: in one pass with the step, by functions of their own, and alone."""
    before = as_written(params)
    folded = tristep.Trainer(params, "adamw", {"learning_rate": 1e-3, "wd": 0.01, "clip_norm": 1.0})
    trainer = tristep.Trainer(params, "adamw", {"learning_rate": 1e-3, "wd": 0.01})
    optimizer = torch.optim.AdamW(params, lr=1e-3, weight_decay=0.01, fused=True)

    def apart() -> None:
        tristep.optim.clip_grad_norm_(params, 1.0)
        trainer.step(1)

    def torchs() -> None:
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()

    n = sum(param.numel() for param in params)
    return {
        "tristep": Step(partial(folded.step, 1), before, 32 * n),
        "tristep, clip apart": Step(apart, before),
        "torch fused": Step(torchs, before),
        "clip alone": Step(lambda: tristep.optim.clip_grad_norm_(params, 1.0)),
        "torch clip alone": Step(lambda: torch.nn.utils.clip_grad_norm_(params, 1.0)),
    }


def telemetry_steps(params: list[torch.nn.Parameter]) -> Steps:
    """AdamW without telemetry, with it at every step and at some, and with a histogram in addition."""
    kinds: dict[str, Any] = {
        "tristep": None,
        "with telemetry": True,
        "every 10th step": tristep.Telemetry(every=10),
        "with a histogram": tristep.Telemetry(histograms=["gradient"]),
    }
    before, steps = as_written(params), {}
    for name, telemetry in kinds.items():
        trainer = tristep.Trainer(params, "adamw", {"learning_rate": 1e-3, "wd": 0.01}, telemetry=telemetry)
        steps[name] = Step(partial(trainer.step, 1), before)
    return steps


def folded_steps(params: list[torch.nn.Parameter], device: str) -> Steps:
    """Gradients of a scaled loss: unscaled, checked for non-finite values, clipped, AdamW, and the weights' average.

    The scale is 1 and stays so, or torch, which unscales the gradients where they lie, would make them smaller every time.
    """
    before, loss = as_written(params), torch.ones((), device=device)
    options = {"learning_rate": 1e-3, "wd": 0.01, "clip_norm": 1.0, "ema_decay": 0.999}
    trainer = tristep.Trainer(params, "adamw", options)
    tristep.amp.init()
    tristep.amp.init_trainer(trainer, tristep.amp.LossScaler(1.0, max_scale=1.0))

    def folded() -> None:
        with tristep.amp.scale_loss(loss, trainer):
            pass
        trainer.step(1)

    optimizer = torch.optim.AdamW(params, lr=1e-3, weight_decay=0.01, fused=True)
    scaler = torch.amp.GradScaler(device, init_scale=1.0, growth_interval=10**9)
    averages = [param.detach().clone() for param in params]

    def chained() -> None:
        scaler.scale(loss)
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        scaler.step(optimizer)
        scaler.update()
        torch._foreach_lerp_(averages, [param.detach() for param in params], 0.001)

    return {"tristep": Step(folded, before, 40 * sum(param.numel() for param in params)), "torch": Step(chained, before)}


def training_steps(device: str) -> Steps:
    """Whole training steps of an MLP, forward and backward too: as a CUDA graph, and as they are."""

    def made(capture: bool, fused: bool) -> Step:
        net = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(20))).to(device)
        x = torch.randn(64, 64, device=device)
        if fused:
            optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, fused=True)
            zero, take = optimizer.zero_grad, optimizer.step
        else:
            trainer = tristep.Trainer(net, "adamw", {"learning_rate": 1e-3})
            zero, take = trainer.zero_grad, partial(trainer.step, 1)  # type: ignore[assignment]

        def train(x: torch.Tensor) -> None:
            zero()
            net(x).square().mean().backward()
            take()

        return Step(partial(trainer.capture(train), x) if capture else partial(train, x))

    return {"tristep, graph": made(True, False), "tristep": made(False, False), "torch fused": made(False, True)}


def stored_steps(workload: Workload, device: str) -> Iterator[tuple[str, Step]]:
    """AdamW with weights and states in low precision, tristep's ways and then the peers' that are installed."""
    params = {dtype: parameters(workload, device, dtype) for dtype in (torch.float32, torch.bfloat16)}
    for name, (dtype, options, moved) in STORED.items():
        trainer = tristep.Trainer(params[dtype], "adamw", {"learning_rate": 1e-3, "wd": 0.01, **options})
        yield name, Step(partial(trainer.step, 1), as_written(params[dtype]), moved * workload.elements)
    for name, (library, cls, dtype, arguments, moved) in STORED_PEERS.items():
        if is_installed(library) and not (library == "bitsandbytes.optim" and device == "cpu"):
            make = getattr(importlib.import_module(library), cls)
            optimizer = make(params[dtype], lr=1e-3, weight_decay=0.01, **arguments)
            yield name, Step(optimizer.step, moved=moved * workload.elements)


def muon_steps(workload: Workload, device: str) -> Steps:
    """Whole steps of Muon, in each way to compute it, and of NorMuon."""
    params = parameters(workload, device)

    def of(name: str, engine: str | None = None, **arguments: Any) -> Step:
        trainer = tristep.Trainer(params, name, {"learning_rate": 1e-3, "wd": 0.1, **arguments}, engine=engine)
        return Step(partial(trainer.step, 1), as_written(params))

    return {
        "tristep": of("muon"),
        "torch": Step(torch.optim.Muon(params, lr=1e-3, weight_decay=0.1).step),
        "Gram form": of("muon", gram=True),
        "no Gram form": of("muon", gram=False),
        "bfloat16": of("muon", iteration_dtype="bfloat16"),
        "whole products": of("muon", engine="eager"),
        "NorMuon": of("normuon"),
    }


def is_installed(module: str) -> bool:
    """Whether the library that this module belongs to is there."""
    return importlib.util.find_spec(module.partition(".")[0]) is not None


def rule_workload(name: str, device: str) -> Workload:
    """What a rule is measured on."""
    return (workloads.MUON if name in ("muon", "normuon") else workloads.RULES)[device]


def rule_step(name: str, workload: Workload, device: str) -> Step:
    """One step of a rule on its own.

    Each array is read once, where it is used, and once more by every reduction that uses it; each output is written once.
    """
    rule = getattr(rules, name)
    weights = [torch.randn(shape, device=device) for shape in workload.shapes]
    gradients = [torch.randn_like(weight) for weight in weights]
    states = states_for(rule, weights)
    update = Update(rule, weights, states)
    update.hyper[:] = _hyper(rule)
    update.bind(gradients)

    def step() -> None:
        update.rebind(gradients)
        update()

    if isinstance(rule, Rule):
        return Step(step, moved=4 * workload.elements * _arrays_moved(rule))
    moved, small = 3 * workload.elements, [each for row in states for each in row]
    if isinstance(rule, ShapedRule):
        of_shapes = [rule.rule_for(each.shape) for each in weights]
        moved = sum(each.numel() * _arrays_moved(of) for each, of in zip(weights, of_shapes, strict=True))
        rows = (dict(zip(rule.state, row, strict=True)) for row in states)
        small = [row[name] for row, of in zip(rows, of_shapes, strict=True) for name in of.kept]
    return Step(step, moved=4 * (moved + 2 * sum(each.numel() for each in small)))


def peer(name: str) -> tuple[str, str, dict[str, Any]] | None:
    """The optimizer that does what this rule does: library, class and arguments.

    If it is not one of `PEERS`, it is the class of the same name, in any case, in torch.optim or else in pytorch_optimizer;
    None where there is no such class or its library is not installed.
    """
    if name in PEERS:
        return PEERS[name] if is_installed(PEERS[name][0]) else None
    for library in filter(is_installed, ("torch.optim", "pytorch_optimizer")):
        for cls in dir(importlib.import_module(library)):
            if cls.lower() == name.replace("_", "") and inspect.isclass(getattr(importlib.import_module(library), cls)):
                return library, cls, {"weight_decay": 0.01}
    return None


def peer_steps(name: str, workload: Workload, device: str) -> Steps:
    """By name, a step of each optimizer that does what this rule does; none where there is no `peer`."""
    found = peer(name)
    if found is None:
        return {}
    library, cls, arguments = found
    make = getattr(importlib.import_module(library), cls)
    known = inspect.signature(make).parameters
    ways = [way for way in ("foreach", "fused") if way in known] if library == "torch.optim" else []
    if cls == "Adagrad" and device == "cuda":  # for which torch has fused it on the CPU alone
        ways.remove("fused")
    steps = {}
    for way in ways or [""]:
        group = {"params": parameters(workload, device), **PEERS_GROUPS.get(name, {})}
        optimizer = make([group], lr=HYPER["lr"], **arguments, **({way: True} if way else {}))
        if hasattr(optimizer, "train"):
            optimizer.train()
        steps[f"torch {way}".strip() if library == "torch.optim" else library] = Step(optimizer.step)
    return steps


def _arrays_moved(rule: Rule) -> int:
    """How many arrays of the weight's size a rule and its reductions read and write."""
    return sum(map(_arrays_read, (rule, *rule.reductions))) + 1 + len(rule.changed)


def _arrays_read(function: Rule | Reduction) -> int:
    """How many arrays a rule or reduction reads: what it only unpacks is never loaded."""
    tree = ast.parse(function.source).body[0]
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    w, g = list(tree.args.args)[:2]  # type: ignore[attr-defined]
    states = function.used if isinstance(function, Rule) else function.state
    return sum(name in names for name in (w.arg, g.arg, *states))


def _hyper(rule: Rule | TensorRule) -> list[float]:
    """What a rule is given, `rescale_grad` first: by the optimizer of this rule at its 100th update, or else `HYPER`."""
    klass = registered().get(rule.name.replace("_", ""))
    if klass is not None:
        optimizer = klass()
        if isinstance(optimizer, RuleOptimizer) and optimizer.rule is rule:
            optimizer.begin_step(HYPER["lr"])
            return optimizer.row(100, HYPER["lr"], HYPER["wd"], 0)
    return [1.0, *hyper_values(rule, HYPER)]
