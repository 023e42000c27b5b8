"""Compiles kernels for GPUs with the Triton that is installed, and runs a sample of them on the emulator.

    python -m gpu_emulator.sweep --targets sm_75 sm_90

prints a line of JSON. What has more threads or shared memory than the target allows has failed. It is run with each version
of Triton that tristep supports; see tests/kernels/test_triton_versions.py.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tristep.kernels import compress, rules
from tristep.kernels.backends.triton import reduce, symmetric
from tristep.kernels.backends.triton.compile import compile_for, options_of
from tristep.kernels.backends.triton.ops import bind
from tristep.kernels.compress.triton import compile_for as compile_code
from tristep.trainer import Telemetry

from .cases import CodeCase, ProductCase, RuleCase, ShapedCase, cases
from .driver import install

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))
import fake_driver

__all__ = ["TARGETS", "main"]

TARGETS = {f"sm_{n}": GPUTarget("cuda", n, 32) for n in (75, 80, 86, 90, 100, 120)}
TARGETS["gfx942"] = GPUTarget("hip", "gfx942", 64)
# Bytes of shared memory that a block may have there, and threads.
SHARED = dict.fromkeys(("sm_75", "gfx942"), 65_536) | {"sm_80": 166_912} | dict.fromkeys(("sm_86", "sm_120"), 101_376)
SHARED |= dict.fromkeys(("sm_90", "sm_100"), 232_448)
THREADS = 1024
SAMPLE = (
    RuleCase("adamw", "bfloat16", "bfloat16", "int16", "uint8", seed=3),
    RuleCase("adamw", "bfloat16", "bfloat16", "int8", "int8", seed=3),
    RuleCase("lamb", "bfloat16", metrics=True),
    CodeCase("int8", 5000, "bfloat16", ranks=3),
    CodeCase("2bit", 5000, ranks=3),
    ShapedCase("adafactor", "bfloat16", "uint8"),
    ShapedCase("came", "bfloat16"),
    ShapedCase("group_adagrad"),
    ProductCase((256, 64)),
    ProductCase((130, 70), "bfloat16", "tn", True),
)
# Of rules with means, whose kernels depend on the tensors' shapes: these are launched by a driver that runs nothing.
MEANS = (
    ShapedCase("adafactor"),
    ShapedCase("group_adagrad"),
    ShapedCase("came", "bfloat16", "uint8"),
    ShapedCase("adafactor", "float64", offset=1),
)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--targets", nargs="+", choices=TARGETS, required=True)
    arguments = parser.parse_args()
    chosen, compiled, failed = list(_kernels(_compiled_cases())), 0, []
    for target in arguments.targets:
        for name, make in [*chosen, *_products(target)]:
            try:
                found = make(TARGETS[target]).metadata
                compiled += 1
            except Exception as error:  # whatever a compiler raises; all of it is reported
                failed.append(f"{target} {name}: {type(error).__name__}: {_cause(error)}")
                continue
            failed += _too_large(target, name, found.num_warps, found.shared)
        launched: set[str] = set()
        for case in MEANS:
            try:
                kernels = _launched(case, TARGETS[target])
            except Exception as error:
                failed.append(f"{target} {case}: {type(error).__name__}: {_cause(error)}")
                continue
            compiled += len(kernels)
            launched |= {each["name"] for each in kernels}
            for each in kernels:
                failed += _too_large(target, f"{case}, {each['name']}", each["num_warps"], each["shared"])
        wanted = {f"{name}{of}_kernel" for name in ("update", "means", "sums") for of in ("", "_pieces")}
        if missing := (wanted | {"finish_kernel", "means_of_rows_kernel"}) - launched:
            failed.append(f"{target}: rules with means have launched no {', '.join(sorted(missing))}")
    emulator, emulated = install(), 0
    for case in SAMPLE:
        emulator.defects.clear()
        difference, where = case.compare()
        emulated += 1
        failed += [f"emulated {case}: {message}" for message in emulator.defects]
        if difference > case.limit:
            failed.append(f"emulated {case}: {difference:g} at {where}")
    print(json.dumps({"triton": triton.__version__, "compiled": compiled, "emulated": emulated, "failed": failed}))


def _too_large(target: str, name: str, warps: int, shared: int) -> list[str]:
    threads = warps * TARGETS[target].warp_size
    if threads <= THREADS and shared <= SHARED[target]:
        return []
    return [f"{target} {name}: {threads} threads, {shared} bytes of shared memory"]


def _launched(case: ShapedCase, target: GPUTarget) -> list[dict[str, Any]]:
    """The metadata of the kernels that steps of a rule with means launch: compiled for a target, and not run."""
    found: list[dict[str, Any]] = []
    number = 1 + list(TARGETS.values()).index(target)  # for each device Triton compiles once; 0 is the emulator's
    fake_driver.install(target).get_current_device = lambda: number  # type: ignore[method-assign]
    triton.knobs.compilation.listener = lambda *, metadata, **others: found.append(metadata)
    try:
        case.run("triton")
    finally:
        triton.knobs.compilation.listener = None
    return found


def _products(target: str) -> Iterator[tuple[str, Callable[[GPUTarget], Any]]]:
    """A name, and a function that compiles for a target, of the product's kernel with each tile that fits there.

    There are none for GPUs whose products are torch's.
    """
    if target == "sm_75" or (target == "sm_100" and symmetric.UNFENCED):
        return
    for k, tile in enumerate(symmetric.TILES):
        for layout in ("nt", "tn", "nn"):
            case = ProductCase((2, 256, 256), ("float16", "bfloat16")[k % 2], layout, layout == "nn", k)
            if tile.shared <= SHARED[target]:
                yield str(case), partial(compile_product, case)


def compile_product(case: ProductCase, target: GPUTarget) -> Any:
    """Compile for a case's tile, types and layouts, as for rows that are multiples of 16 numbers."""
    pointer = {"bfloat16": "*bf16", "float16": "*fp16"}[case.dtype]
    types = dict.fromkeys(("left", "right", "added", "out"), pointer) | {"alpha": "fp32", "beta": "fp32"}
    constants, options = symmetric.constants_and_options(symmetric.TILES[case.tile], *case.shape[-2:], target)
    constants |= {} if case.added else {"added": None}
    constants |= {"left_column" if case.layout[0] == "n" else "left_row": 1}
    constants |= {"right_column" if case.layout[1] == "n" else "right_row": 1}
    return _compile(symmetric.symmetric_kernel, types, constants, target, 16, **options)


def _compiled_cases() -> Iterator[RuleCase | CodeCase]:
    """All rules in three types, all storage of those rules that have each, codes in two forms."""
    for case in cases():
        if isinstance(case, ShapedCase | ProductCase):
            continue  # see _launched and _products
        if isinstance(case, CodeCase):
            if case.n == 5000:
                yield case
        elif case.weight == "float64":
            yield case._replace(offset=0)
        elif case.offset == 0 and not case.small:
            yield case


def _kernels(chosen: Iterable[RuleCase | CodeCase]) -> Iterator[tuple[str, Callable[[GPUTarget], Any]]]:
    """A name, and a function that compiles for a target, of each kernel."""
    for case in chosen:
        if isinstance(case, CodeCase):
            yield from _kernels_of_code(case)
            continue
        rule = case.made
        options = _options(case)
        yield str(case), lambda target, rule=rule, options=options: compile_for(target, rule, **options)
        for stage in range(len(rule.reductions)):
            plain = options | {"metric": None, "zero_grads": False, "stage": stage}
            yield f"{case}, reduction {stage}", lambda target, rule=rule, plain=plain: compile_for(target, rule, **plain)
    types = {"partials": "*fp32", "firsts": "*i64", "rows": "*i64", "largest": "*i32"}
    for totals in ("*fp32", "*fp64"):
        given = types | {"totals": totals}, {"BLOCK": 4096}
        yield f"totals of {totals}", lambda target, given=given: _compile(
            reduce.totals_kernel, *given, target, **options_of(256, target)
        )  # fmt: skip
    for rule in (rules.novograd, rules.prodigy):
        (reduction,) = rule.reductions
        columns = tuple(1 + rule.hyper.index(name) for name in reduction.finish_hyper)
        constants = {"FUNCTION": bind(reduction.finished, torch.float32), "HYPER": columns}
        constants |= {"N_VALUES": reduction.n_values, "N_KEPT": len(reduction.kept)}
        constants |= {"N_OWN": reduction.n_own_results, "N_RESULTS": reduction.n_scalar_results}
        constants |= {"N_HYPER": 1 + len(rule.hyper), "OF_ALL": reduction.scope == "global", "COPIES": 256, "BLOCK": 4096}
        tables = types | {"results": "*fp32", "gradients": "*i64", "hyper": "*fp32", "kept": "*i64", "skipped": "*fp32"}
        yield f"finished sums of {rule.name}", lambda target, given=(tables, constants): _compile(
            reduce.finish_sums_kernel, *given, target, **options_of(256, target)
        )  # fmt: skip


def _options(case: RuleCase) -> dict[str, Any]:
    weight, gradient, master, state = (
        None if name is None else getattr(torch, name)
        for name in (case.weight, case.gradient or case.weight, case.master, case.state)
    )
    return {
        "weight_dtype": weight,
        "gradient_dtype": gradient,
        "masters": False if master is None else master,
        "aligned": case.offset == 0,
        "state_dtype": state,
        "stochastic": case.seed is not None,
        "metric": Telemetry()._measure if case.metrics else None,
        "grad_scale_and_skip": case.control is not None,
        "zero_grads": case.zero_grads,
    }


def _kernels_of_code(case: CodeCase) -> Iterator[tuple[str, Callable[[GPUTarget], Any]]]:
    code, dtype = compress.CODES[case.code], getattr(torch, case.dtype)
    ways = [("values", "messages"), ("messages", "values"), ("messages", "messages")]
    ways += [("messages", "votes"), ("votes", "values")] if code.vote is not None else []
    for reads, writes in ways:
        source, target = (torch.empty(2, 2, dtype=dtype if what == "values" else torch.uint8) for what in (reads, writes))
        residual = torch.empty(2) if writes == "messages" and case.residual else None
        job = compress.Job(code, source, residual, target, case.n, 4096, 0.5, case.ranks, reads, writes)
        yield f"{case}, {reads} to {writes}", lambda target, job=job: compile_code(target, job)


def _compile(
    kernel: Any, types: dict[str, str], constants: dict[str, Any], target: GPUTarget, by: int = 1, **options: Any
) -> Any:
    """Compile for pointers and integers that are multiples of `by`."""
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in kernel.arg_names}
    hints = {
        (k,): [["tt.divisibility", by]]
        for k, kind in enumerate(signature.values())
        if by > 1 and kind not in ("constexpr", "fp32")
    }
    source = ASTSource(kernel, signature=signature, constexprs=constants, attrs=hints)
    return triton.compile(source, target=target, options=options)


def _cause(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return " ".join(str(error).split())[-200:]


if __name__ == "__main__":
    torch.set_num_threads(1)
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # only to keep Triton 3.9 from warning
    sys.exit(main())
