"""What a kernel is compiled with: constants and options of the compiler; and `compile_for`, to inspect its code."""

from __future__ import annotations

from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

from ... import storage, streams
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
# Of so many sums compilers keep all values of all elements, in twice the registers, unless they are told not to.
MANY_SUMS = 16, 96
MOST_BLOCKS, MOST_PACKED = 2, 16  # of a program, without and with packed states
ENOUGH = 2048  # programs, twice those that the largest GPUs run at a time
INTERPRETED = GPUTarget("cuda", 90, 32)  # what Triton's interpreter is told, which takes it for nothing


def tile_for(elements: int, packed: bool = False) -> int:
    """Elements of one program, of this many of all.

    Of a few blocks, as what one program waits for others load and store meanwhile; with packed states, whose arithmetic is
    what takes time, of many, for which less is done once for each program. docs/gpu.md has what was measured.
    """
    blocks = MOST_PACKED if packed else MOST_BLOCKS
    while blocks > 1 and elements < ENOUGH * blocks * BLOCK:
        blocks //= 2
    return blocks * BLOCK


def target_of(device: torch.device) -> GPUTarget:
    """What Triton compiles for on this device."""
    if triton.knobs.runtime.interpret:
        return INTERPRETED
    with streams.on_device(device):
        return triton.runtime.driver.active.get_current_target()


def options_of(threads: int, target: GPUTarget) -> dict[str, Any]:
    """The options of a kernel whose programs have so many threads.

    Nothing is fused, as on the CPU: of two products in a sum the compiler would fuse this or that one, and a step with
    a metric would differ in its last bits from one without. Memory, not arithmetic, is what a step waits for.
    """
    return {"num_warps": threads // target.warp_size, "enable_fp_fusion": False}


def threads_for(
    function: Rule | Reduction | RuleWithMetric, types: tuple[torch.dtype, torch.dtype, torch.dtype], stored: Storage
) -> int:
    """Threads of a program: 256, with 4 elements of a block each, or 128 with 8.

    An access has 128 bits at most. Where something has 32 bits a thread gets 4, one access of that: of 8 the compiler would
    load the second half after it has computed with the first, so that less of memory is in flight, and exchange the layouts
    of different widths through shared memory. It gets 8 where nothing stored is wider than 16 bits, so that one access is as
    wide as can be and less is computed for each element; and of weight and gradient alone, if they are equally wide: with 4
    of each a thread has too little in flight. Of more than three states, or of more than two sums, those that it gets or
    that are found of it, it keeps too many values for 8. The numbers are in docs/gpu.md.
    """
    weight_dtype, gradient_dtype, dtype = types
    kinds = [weight_dtype, gradient_dtype, *stored.states]
    if stored.master == storage.MasterKind.FULL:  # others are no wider than the weight
        kinds.append(dtype)
    widths = {kind.itemsize for kind in kinds}
    n_states = len(function.used if isinstance(function, Rule) else function.state)
    wide = max(widths) > 2 and (len(widths) > 1 or n_states > 0)
    return 256 if wide or n_states > 3 or _sums_of(function) > 2 else 128


def _sums_of(function: Rule | Reduction | RuleWithMetric) -> int:
    return max(function.n_numbers, len(function.metric.names) if isinstance(function, RuleWithMetric) else 0)


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
        sharing=storage.BLOCK * threads_for(function, types, stored) // BLOCK,
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
    function: Rule | Reduction | RuleWithMetric,
    types: tuple[torch.dtype, torch.dtype, torch.dtype],
    stored: Storage,
    target: GPUTarget,
) -> dict[str, Any]:
    """The options to compile a kernel of this function with."""
    options = options_of(threads_for(function, types, stored), target)
    if MANY_SUMS[0] < _sums_of(function) <= MANY_SUMS[1] and target.backend == "cuda":  # others have no such option
        options["maxnreg"] = 128
    return options


def compile_for(
    target: GPUTarget,
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
    """The compiled kernel of a rule for a target; needs no GPU. For inspection.

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
    return triton.compile(source, target=target, options=options_for(function, types, stored, target))
