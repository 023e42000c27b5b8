"""What a kernel is compiled with: constants and options of the compiler; and `compile_for`, to inspect its code."""

from __future__ import annotations

from typing import Any

import torch
import triton

from ... import storage
from ...language import Metric, Reduction, Rule
from ...metrics import RuleWithMetric, with_metric
from ...states import slot_dtypes
from ...storage import Storage
from .kernels import sums_kernel, update_kernel
from .memory import PACKED_TYPES
from .ops import TYPES, bind
from .tile import Arguments, Layout

BLOCK = 1024  # elements that a program computes at a time
BLOCKS_OF_SUMS = 4  # of a program of a reduction, at least
MANY_SUMS = 16, 64  # of which compilers keep all values of all elements, in twice the registers, unless they are told not to
MOST_BLOCKS = 16  # of a program
ENOUGH = 2048  # programs, twice those that the largest GPUs run at a time


def tile_for(elements: int) -> int:
    """Elements of one program, of this many of all: the more, the less is spent on what is done once for each program."""
    blocks = MOST_BLOCKS
    while blocks > 1 and elements < ENOUGH * blocks * BLOCK:
        blocks //= 2
    return blocks * BLOCK


def launch_options(
    weight_dtype: torch.dtype,
    gradient_dtype: torch.dtype,
    dtype: torch.dtype,
    n_states: int,
    n_sums: int,
    stored: Storage,
) -> dict[str, Any]:
    """Options of the compiler: 8 elements a thread, or 4.

    What is stored in different widths gets 4, or layouts would be exchanged in shared memory, unless none is wider than
    16 bits, of which 8 are one access. So do rules of more than two states, or sums, those that they get or that are found
    of them, which with 8 need 72 registers a thread instead of 48.

    Nothing is fused, as on the CPU: of two products in a sum the compiler would fuse this or that one, and a step with
    a metric would differ in its last bits from one without. Memory, not arithmetic, is what a step waits for.
    """
    kinds = [weight_dtype, gradient_dtype, *stored.states]
    if stored.master == storage.MasterKind.FULL:  # others are no wider than the weight
        kinds.append(dtype)
    widths = {kind.itemsize for kind in kinds}
    mixed = len(widths) > 1 and max(widths) > 2
    return {"num_warps": 8 if mixed or max(n_states, n_sums) > 2 else 4, "enable_fp_fusion": False}


def _gathered_by(function: Rule | Reduction | RuleWithMetric, how: str) -> tuple[int, ...]:
    """Which of its values, if it has any, are gathered in this way."""
    if isinstance(function, Reduction):
        return tuple(range(function.n_values)) if function.op == how else ()
    return tuple(k for k, by in enumerate(function.metric.by) if by == how) if isinstance(function, RuleWithMetric) else ()


def kernel_constants(
    function: Rule | Reduction | RuleWithMetric,
    rule: Rule,
    types: tuple[torch.dtype, torch.dtype, torch.dtype],
    stored: Storage,
    aligned: bool,
    zero_grads: bool,
) -> dict[str, Any]:
    """The constants of a kernel in the order of its arguments; `types` are those of weight, gradient and arithmetic."""
    weight_dtype, gradient_dtype, dtype = types
    layout = Layout(
        weight=TYPES[weight_dtype],
        gradient=TYPES[gradient_dtype],
        compute=TYPES[dtype],
        states=tuple(
            PACKED_TYPES[kind][name in rule.nonnegative] if kind in PACKED_TYPES else TYPES[kind]
            for name, kind in zip(rule.state, stored.states, strict=True)
        ),
        changed=tuple(name in rule.changed for name in rule.state),
        master=int(stored.master),
        stochastic=stored.stochastic + stored.codes_only,
        n_hyper=len(rule.hyper) + 2 * stored.stochastic,
        aligned=aligned,
        block=BLOCK,
        sharing=storage.BLOCK * 32 * options_for(function, types, stored)["num_warps"] // BLOCK,
    )
    arguments = Arguments(
        states=tuple(rule.state.index(name) for name in function.state),
        hyper=tuple(1 + rule.hyper.index(name) for name in function.own_hyper),
        sums=tuple(range(function.n_numbers)),
        takes_index="index" in function.extras,
        counts_unchanged=isinstance(function, RuleWithMetric) and function.metric.counts_unchanged,
    )
    constants = {"FUNCTION": bind(function), "ARGUMENTS": arguments, "LAYOUT": layout}
    constants |= {"SUMMED": _gathered_by(function, "sum"), "MAXIMA": _gathered_by(function, "max")}
    return constants if isinstance(function, Reduction) else constants | {"ZERO": zero_grads}


def options_for(
    function: Rule | Reduction | RuleWithMetric, types: tuple[torch.dtype, torch.dtype, torch.dtype], stored: Storage
) -> dict[str, Any]:
    """The options to compile a kernel of this function with."""
    n_states = len(function.used if isinstance(function, Rule) else function.state)
    n_sums = max(function.n_numbers, len(function.metric.names) if isinstance(function, RuleWithMetric) else 0)
    options = launch_options(*types, n_states, n_sums, stored)
    if MANY_SUMS[0] < n_sums <= MANY_SUMS[1] and torch.version.hip is None:  # Triton has no such option there
        options["maxnreg"] = 128
    return options


def compile_for(
    target: Any,
    rule: Rule,
    weight_dtype: torch.dtype = torch.float32,
    gradient_dtype: torch.dtype = torch.float32,
    masters: bool | torch.dtype = False,
    aligned: bool = True,
    stage: int | None = None,
    state_dtype: torch.dtype | None = None,
    stochastic: bool = False,
    metric: Metric | None = None,
    grad_scale_and_skip: bool = False,
    zero_grads: bool = False,
) -> Any:
    """The compiled kernel of a rule for a `triton.backends.compiler.GPUTarget`; needs no GPU. For inspection.

    With `stage` it is that of the rule's reduction of this number, with `metric` one that also computes that. `masters` may
    be the type of what is stored alongside weights.
    """
    from triton.compiler import ASTSource

    dtype = torch.float64 if weight_dtype == torch.float64 else torch.float32
    real = {torch.float32: "*fp32", torch.float64: "*fp64"}[dtype]
    function: Any = rule if stage is None else rule.reductions[stage]
    function = function if metric is None else with_metric(rule, metric)
    master = (dtype if masters else None) if isinstance(masters, bool) else masters
    states = slot_dtypes(rule, weight_dtype, state_dtype)[: len(rule.state)]
    stored = storage.of_tensors(weight_dtype, states, master, 0 if stochastic else None)
    types = weight_dtype, gradient_dtype, dtype
    constants = kernel_constants(function, rule, types, stored, aligned, zero_grads)
    signature = {"addresses": "*i64", "gradients": "*i64", "hyper": real, "sizes": "*i64", "tiles": "*i32", "sums": real}
    signature["partials"] = real
    signature |= {"n_tensors": "i32", "blocks": "i32", "control": "*fp32"}
    constants |= {} if grad_scale_and_skip else {"control": None}
    signature |= dict.fromkeys(constants, "constexpr")
    kernel = update_kernel if stage is None else sums_kernel
    source = ASTSource(kernel, signature=signature, constexprs=constants)
    return triton.compile(source, target=target, options=options_for(function, types, stored))
