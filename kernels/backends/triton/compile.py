"""Choose a kernel's constants and compiler options; `compile_for` compiles a kernel to inspect its code."""

from __future__ import annotations

from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

from ... import storage, streams
from ...language import Metric, Reduction, Rule, ShapedRule, TensorRule
from ...messages import instance
from ...metrics import RuleWithMetric, with_metric
from ...states import slot_dtypes
from ...storage import Storage
from .kernels import sums_kernel, update_kernel
from .memory import PACKED_TYPES
from .ops import TYPES, bind
from .pieces import STACKED, WIDEST, Walk
from .tile import PART, ROWS_OF_ONE, SEVERAL, Arguments, Layout

BLOCK = 1024  # elements that a program updates at a time
BLOCKS_OF_SUMS = 4  # fewest blocks per program of a reduction
# With more than 16 and up to 96 sums the registers are capped: compilers would otherwise keep all values of all elements.
MANY_SUMS = 16, 96
# One or two packed states next to a master take a few registers more than the 64 of which an SM has enough for 8 programs of
# 128 threads. Without a master they take fewer without a cap, with which compilers would load later; three would spill.
FOR_MASTERS = 64
WARP = 32  # threads that need no barrier
MOST_BLOCKS, MOST_PACKED = 2, 16  # most blocks per program, without and with packed states
ENOUGH = 2048  # programs: twice as many as the largest GPUs run at a time
SCOPES = {"tensor": 0, "row": 1, "slice": 1, "column": 2, "matrix": 3}  # as `Arguments.scopes` has them
INTERPRETED = GPUTarget("cuda", 90, 32)  # for Triton's interpreter, which ignores it


def tile_for(elements: int, packed: bool = False) -> int:
    """Return the number of elements that one program updates: few blocks, as other programs load and store meanwhile.

    With packed states, where arithmetic takes most of the time, it is many blocks, to repeat less work in each program.
    """
    blocks = MOST_PACKED if packed else MOST_BLOCKS
    while blocks > 1 and elements < ENOUGH * blocks * BLOCK:
        blocks //= 2
    return blocks * BLOCK


def target_of(device: torch.device) -> GPUTarget:
    if triton.knobs.runtime.interpret:
        return INTERPRETED
    with streams.on_device(device):
        return triton.runtime.driver.active.get_current_target()


def options_of(threads: int, target: GPUTarget) -> dict[str, Any]:
    """Return the compiler options of a kernel with `threads` threads per program.

    Multiplications and additions are not fused, as on the CPU: of two products in a sum the compiler could fuse either, so
    a step with a metric would differ in its last bits from one without. A step waits for memory, not for arithmetic.
    """
    return {"num_warps": max(threads // target.warp_size, 1), "enable_fp_fusion": False}


def threads_for(
    function: Rule | Reduction | RuleWithMetric, types: tuple[torch.dtype, torch.dtype, torch.dtype], stored: Storage
) -> int:
    """Return the threads of a program: 256, with 4 elements of a block each, or 128, with 8.

    A thread accesses at most 128 bits at once, 4 elements of 32 bits. With 8 such elements the compiler would load the
    second half only after computing with the first, so fewer loads would be in flight, and would exchange layouts of
    different widths through shared memory. A thread gets 8 elements if nothing stored is wider than 16 bits, which fills an
    access and takes less arithmetic per element. It also gets 8 if the rule has no states, and weight and gradient are
    equally wide, because 4 of each leave too few loads in flight. With more than three states, or more than two sums as
    arguments or results, 8 would need too many registers.
    """
    weight_dtype, gradient_dtype, dtype = types
    stored_dtypes = [weight_dtype, gradient_dtype, *stored.states]
    if stored.master == storage.MasterKind.FULL:  # other masters are no wider than the weight
        stored_dtypes.append(dtype)
    widths = {stored_dtype.itemsize for stored_dtype in stored_dtypes}
    n_states = len(function.used if isinstance(function, Rule) else function.state)
    wide = max(widths) > 2 and (len(widths) > 1 or n_states > 0)
    return 256 if wide or n_states > 3 or _sums_of(function) > 2 else 128


def unit_for(rule: Rule, types: tuple[torch.dtype, torch.dtype, torch.dtype], stored: Storage) -> int:
    """Return the elements of the narrowest type in 16 bytes, at least the 4 for which random numbers are drawn at once."""
    return max(4, 16 // min(_widths(rule, rule, types, stored)))


def unit_of_means(
    function: Reduction, rule: Rule, types: tuple[torch.dtype, torch.dtype, torch.dtype], stored: Storage
) -> int:
    """Return the elements of the widest type in 16 bytes, of which a thread loads no more from a row at once."""
    return 16 // max(_widths(function, rule, types, stored))


def shape_of_pieces(
    function: Rule | Reduction | RuleWithMetric,
    rule: Rule,
    types: tuple[torch.dtype, torch.dtype, torch.dtype],
    stored: Storage,
    line: int = PART,
) -> tuple[int, int, int]:
    """Return the most elements of a line of a piece, the threads of its program, and the lines that it loads at once.

    A thread has 4 neighbours of a line, or 8 if nothing stored is wider than 16 bits. Means are summed up by programs of one
    warp, in which threads add up a row without a barrier: of 8 elements each, but of 4 if types are of different widths, in
    which compilers would exchange layouts at each row.
    """
    widths = _widths(function, rule, types, stored)
    n_loaded = 2 + len(function.state) + (stored.master != storage.MasterKind.NONE)
    at_once = 1 if _sums_of(function) > MANY_SUMS[0] else 4 if n_loaded < 4 else 2
    if isinstance(function, Reduction) and function.op == "mean":
        return WARP * (8 if len(widths) == 1 else 4), WARP, at_once
    width, at_once = (WIDEST, at_once) if line == PART else (STACKED, 1)
    return width, width // (8 if max(widths) <= 2 else 4), at_once


def _widths(
    function: Rule | Reduction | RuleWithMetric,
    rule: Rule,
    types: tuple[torch.dtype, torch.dtype, torch.dtype],
    stored: Storage,
) -> set[int]:
    """Return the sizes of all types that a function loads, in bytes. Codes and their scales count as their codes."""
    dtypes = {*types[:2], *(stored.states[rule.state.index(name)] for name in function.state)}
    if stored.master != storage.MasterKind.NONE:
        master = {storage.MasterKind.SPLIT: torch.int16, storage.MasterKind.SPLIT8: torch.int8}
        dtypes.add(master.get(stored.master, types[2]))
    return {dtype.itemsize for dtype in dtypes}


def _has_packed(stored: Storage) -> bool:
    return any(map(storage.is_packed, stored.states))


def _sums_of(function: Rule | Reduction | RuleWithMetric) -> int:
    return max(function.n_numbers, len(function.metric.names) if isinstance(function, RuleWithMetric) else 0)


def _reduced_by(function: Rule | Reduction | RuleWithMetric, how: str) -> tuple[int, ...]:
    """Return the indices of the values that are reduced by `how`, "sum" or "max"."""
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
    walk: Walk | None = None,
) -> dict[str, Any]:
    """Return the constants of a kernel, in argument order. `types`: the dtypes of weight, gradient and arithmetic."""
    weight_dtype, gradient_dtype, dtype = types
    threads = threads_for(function, types, stored)
    block, unit, line, group, span = BLOCK, 0, PART, 0, 0
    tail = 4 * threads if isinstance(function, Rule) and _has_packed(stored) else BLOCK
    if walk is not None and walk.unit:
        block, threads, at_once = shape_of_pieces(function, rule, types, stored, walk.line)
        aligned, tail, unit, line = walk.aligned, block, walk.unit, walk.line
        if line in (ROWS_OF_ONE, SEVERAL):
            group = block // threads
            span = 2 + (group - 2) // walk.columns
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
        block=block,
        tail=tail,
        unit=unit,
        line=line,
        group=group,
        span=span,
        parts=2 + len(rule.vectors) if rule.parts else 0,
        first_part=1 + len(stored.states) + (stored.master != 0),
    )
    scopes = tuple(SCOPES[number.scope] for number in function.numbers)
    arguments = Arguments(
        states=tuple(rule.state.index(name) for name in function.state),
        hyper=tuple(1 + rule.hyper.index(name) for name in function.own_hyper),
        sums=tuple(number.place for number in function.numbers),
        n_sums=0 if function.numbers_from is None else rule.reductions[function.numbers_from].n_scalar_results,
        scopes=scopes if any(scopes) else (),
        takes_index="index" in function.extras,
        counts_unchanged=isinstance(function, RuleWithMetric) and function.metric.counts_unchanged,
    )
    constants = {"FUNCTION": bind(function, dtype), "ARGUMENTS": arguments, "LAYOUT": layout}
    constants |= {"SUMMED": _reduced_by(function, "sum"), "MAXIMA": _reduced_by(function, "max")}
    constants |= {"AT_ONCE": at_once} if unit else {}
    return constants if isinstance(function, Reduction) else constants | {"ZERO": zero_grads}


def options_for(
    function: Rule | Reduction | RuleWithMetric,
    types: tuple[torch.dtype, torch.dtype, torch.dtype],
    stored: Storage,
    target: GPUTarget,
    threads_of_pieces: int = 0,
) -> dict[str, Any]:
    threads = threads_of_pieces or threads_for(function, types, stored)
    options = options_of(threads, target)
    if target.backend == "cuda":  # other backends lack the option
        if MANY_SUMS[0] < _sums_of(function) <= MANY_SUMS[1]:
            options["maxnreg"] = 128
        elif threads == 128 and stored.master != storage.MasterKind.NONE and _has_packed(stored) and len(stored.states) < 3:
            options["maxnreg"] = FOR_MASTERS
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
    """Compile a rule's update kernel for a target, without a GPU, to inspect its code.

    `stage` compiles the rule's reduction of this index instead, and `metric` an update that also computes the metric.
    `masters`: True for masters in the arithmetic's dtype, or the dtype of another kind of master.

    Raises:
        TypeError: the rule has no kernel of its own; the message names the rules that have.
        ValueError: there is no such reduction, or its kernels depend on the shapes of tensors, as those of means do.
    """
    from triton.compiler import ASTSource

    _check_has_kernel(rule, stage)
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
    signature |= {"n_tensors": "i32", "n_partials": "i32", "blocks": "i32", "control": "*fp32"}
    constants |= {} if grad_scale_and_skip else {"control": None}
    signature |= dict.fromkeys(constants, "constexpr")
    kernel = update_kernel if stage is None else sums_kernel
    source = ASTSource(kernel, signature=signature, constexprs=constants)
    return triton.compile(source, target=target, options=options_for(function, types, stored, target))


def _check_has_kernel(rule: Any, stage: int | None) -> None:
    if isinstance(rule, ShapedRule):
        names = ", ".join(each.name for each in rule.rules.values())
        raise TypeError(f"rule {rule.name!r} chooses one by shape: compile one of its `rules.values()`, {names}")
    if isinstance(rule, TensorRule):
        inner = rule.elementwise_rule
        hint = "" if inner is None else f"; compile its `elementwise_rule`, {inner.name}, which updates other weights"
        raise TypeError(f"rule {rule.name!r} updates whole tensors by torch's operations and has no kernel of its own{hint}")
    instance("rule", rule, Rule, "elementwise, made with @rule")
    if stage is None:
        return
    if stage not in range(len(rule.reductions)):
        raise ValueError(f"stage={stage!r}: rule {rule.name!r} has {len(rule.reductions)} reductions, counted from 0")
    if rule.reductions[stage].op == "mean":
        name = rule.reductions[stage].name
        raise ValueError(f"stage={stage!r}: kernels of means, as of {name!r}, depend on the tensors' shapes")
