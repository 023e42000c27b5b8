"""What the kernels cost by their instructions: read off the machine code for sm_90, so that no GPU is needed.

    python benchmarks/static_gpu.py                prints a table, and writes benchmarks/results/static_gpu.json

For each kernel it follows the path of a full tile through the SASS and counts instructions by the pipe that executes them.
In a cycle an SM of compute capability 9.0 issues 4 instructions, each for 32 threads, and executes 128 float32 operations,
64 of integers, comparisons and selections, 64 multiplications of integers, 32 accesses to memory and shuffles, or 16 special
functions and conversions (NVIDIA, "CUDA C++ Programming Guide", throughput of native arithmetic instructions). The slowest
of these takes the least time that a kernel can take by its instructions; `margin` is how many times as long its bytes take
at the bandwidth of a copy. Below 1, instructions are what such a kernel waits for. These are bounds, not measured times.
"""

from __future__ import annotations

import argparse
import heapq
import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget

from tristep.kernels import Rule, rules, storage
from tristep.kernels.backends.triton.compile import BLOCK, MOST_BLOCKS, compile_for
from tristep.trainer import Telemetry

RESULTS = Path(__file__).parent / "results" / "static_gpu.json"
BF16, I16, I8, U8 = torch.bfloat16, torch.int16, torch.int8, torch.uint8
HALF = {"weight_dtype": BF16, "gradient_dtype": BF16}
KERNELS: dict[str, tuple[Rule, dict[str, Any]]] = {
    "AdamW, float32": (rules.adamw, {}),
    "AdamW, float32, states bfloat16, stochastic": (rules.adamw, {"state_dtype": BF16, "stochastic": True}),
    "AdamW, float32, states 8-bit": (rules.adamw, {"state_dtype": U8}),
    "AdamW, float32, states 8-bit, stochastic": (rules.adamw, {"state_dtype": U8, "stochastic": True}),
    "AdamW, bfloat16, master float32": (rules.adamw, {**HALF, "masters": True}),
    "AdamW, bfloat16, split master": (rules.adamw, {**HALF, "masters": I16}),
    "AdamW, bfloat16, states bfloat16": (rules.adamw, {**HALF, "state_dtype": BF16}),
    "AdamW, bfloat16, states bfloat16, stochastic": (rules.adamw, {**HALF, "state_dtype": BF16, "stochastic": True}),
    "AdamW, bfloat16, states 8-bit, stochastic": (rules.adamw, {**HALF, "state_dtype": U8, "stochastic": True}),
    "AdamW, bfloat16, split master, states 8-bit, stochastic": (
        rules.adamw,
        {**HALF, "masters": I16, "state_dtype": U8, "stochastic": True},
    ),
    "AdamW, bfloat16, 24-bit master, stochastic": (rules.adamw, {**HALF, "masters": I8, "stochastic": True}),
    "AdamW, bfloat16, 24-bit master, states 8-bit, stochastic": (
        rules.adamw,
        {**HALF, "masters": I8, "state_dtype": U8, "stochastic": True},
    ),
    "AdamW, bfloat16, states 4-bit, stochastic": (rules.adamw, {**HALF, "state_dtype": I8, "stochastic": True}),
    "AdamW, bfloat16, 24-bit master, states 4-bit, stochastic": (
        rules.adamw,
        {**HALF, "masters": I8, "state_dtype": I8, "stochastic": True},
    ),
    "SGD, float32": (rules.sgd, {}),
    "Lion, float32": (rules.lion, {}),
    "SGLD, float32": (rules.sgld, {}),
    "AdamW, float32, telemetry": (rules.adamw, {"metric": Telemetry()._measure}),
    "AdamW, bfloat16, split master, telemetry": (rules.adamw, {**HALF, "masters": I16, "metric": Telemetry()._measure}),
    "AdamW, float32, telemetry and histograms": (rules.adamw, {"metric": Telemetry(histograms=["gradient"])._measure}),
}


class Gpu(NamedTuple):
    """A GPU: its clock in Hz, bytes a second that a copy reads and writes, and SMs."""

    clock: float
    bandwidth: float
    sms: int = 132


GPUS = {"H100": Gpu(1.755e9, 3.0e12), "H200": Gpu(1.98e9, 4.3e12)}
PER_CYCLE = {"issue": 128, "float": 128, "integer": 64, "multiply": 64, "memory": 32, "special": 16}  # threads of an SM
FLOAT = ("FADD", "FMUL", "FFMA")
MULTIPLY = ("IMAD", "IMUL")
MEMORY = ("LDG", "STG", "LDS", "STS", "LDSM", "STSM", "SHFL", "REDUX")
SPECIAL = ("MUFU", "F2I", "I2F", "F2F")
BRANCH, EXIT = re.compile(r"(@!?\w+ )?BRA (LBB\d+)"), re.compile(r"(@!?\w+ )?EXIT\b")
UNIFORM = "U"  # the uniform pipe, once for a warp
REGISTERS, MOST_WARPS = 65536, 64  # of an SM


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=RESULTS)
    out = parser.parse_args().out
    found = {name: measure(name) for name in KERNELS}
    print(f"{'':56} instructions  registers  bytes  in flight  " + "  ".join(f"margin {gpu}" for gpu in GPUS))
    for name, row in found.items():
        margins = "  ".join(f"{margin:11.2f}" for margin in row["margin"].values())
        cost = f"{row['instructions']:12.1f}  {row['registers']:9}  {row['bytes']:5.1f}  {row['in_flight_KiB']:5.0f} KiB"
        print(f"{name:56} {cost}  {margins}  {row['bound']}")
    out.write_text(json.dumps({"triton": triton.__version__, "target": "sm_90", "kernels": found}, indent=1) + "\n")
    print(f"written to {out}", file=sys.stderr)


def measure(name: str) -> dict[str, Any]:
    """Of one kernel, for each element: instructions and bytes; and what follows from these."""
    rule, options = KERNELS[name]
    compiled = compile_for(GPUTarget("cuda", 90, 32), rule, **options)
    warps, path = compiled.metadata.num_warps, full_tile(compiled.asm["sass"])
    elements = MOST_BLOCKS * BLOCK // (32 * warps)  # of a thread
    counts = Counter(pipe_of(instruction) for instruction in path)
    issued = sum(counts.values())
    read, written = bytes_of(rule, **options)
    registers, bytes_ = registers_of(compiled), read + written
    threads = {"issue": issued, **{pipe: counts[pipe] for pipe in PER_CYCLE if pipe != "issue"}}
    cycles = {pipe: number / elements / PER_CYCLE[pipe] for pipe, number in threads.items()}
    bound = max(cycles, key=lambda pipe: cycles[pipe])
    resident = min(MOST_WARPS, REGISTERS // (32 * -(-registers // 8) * 8)) // warps * warps
    return {
        "instructions": issued / elements,
        "by_pipe": {pipe: number / elements for pipe, number in threads.items() if pipe != "issue"},
        "registers": registers,
        "warps": warps,
        "shared": compiled.metadata.shared,
        "bytes": bytes_,
        "bound": bound,
        "in_flight_KiB": resident // warps * BLOCK * read / 1024,  # a block is read before anything is computed
        "margin": {gpu: bytes_ / each.bandwidth / (cycles[bound] / (each.clock * each.sms)) for gpu, each in GPUS.items()},
    }


def full_tile(sass: str) -> list[str]:
    """The instructions that a thread executes whose tile is full, block after block.

    Of the paths through the code of a block it is the shortest that stores several elements at once: others have masks, and
    slow cases such as subnormal quotients.
    """
    lines = [line.rpartition("\t")[2] for line in sass.splitlines() if "\t" in line or re.fullmatch(r"LBB\d+:", line)]
    labels = {line[:-1]: i for i, line in enumerate(lines) if re.fullmatch(r"LBB\d+:", line)}
    branches = {i: (found[1], labels[found[2]]) for i, line in enumerate(lines) if (found := BRANCH.match(line))}
    (head,) = {to for i, (_, to) in branches.items() if to < i - 1}  # the code ends with a branch to itself
    backwards = {i for i, (_, to) in branches.items() if to == head}
    ends = {i for i, line in enumerate(lines) if EXIT.match(line)}
    before = shortest(lines, branches, 0, {head})
    block, last = (shortest(lines, branches, head, to, "STG") for to in (backwards, ends))
    code = [*before[:-1], *block * (MOST_BLOCKS - 1), *last]
    return [lines[i] for i in code if lines[i][:-1] not in labels]


def shortest(
    lines: list[str], branches: dict[int, tuple[str | None, int]], start: int, ends: set[int], wide: str | None = None
) -> list[int]:
    """The shortest path from an instruction to one of the ends, with a `wide` access of several elements on it."""
    queue: list[tuple[int, int, bool, tuple[int, ...]]] = [(0, start, wide is None, ())]
    seen = set()
    while queue:
        length, i, found, path = heapq.heappop(queue)
        found = found or re.match(rf"{wide}\.E\.(64|128)", lines[i]) is not None
        if i in ends and found:
            return [*path, i]
        if (i, found) in seen:
            continue
        seen.add((i, found))
        guard, to = branches.get(i, (None, i + 1))
        following = {to} if guard is None else {to, i + 1}
        if re.match(r"EXIT\b", lines[i]):
            following = set()
        for each in following:
            heapq.heappush(queue, (length + 1, each, found, (*path, i)))
    raise ValueError("there is no path with wide stores")


def pipe_of(instruction: str) -> str:
    name = re.sub(r"^@!?\w+ ", "", instruction).split(" ")[0].split(".")[0].rstrip(";")
    if name in FLOAT:
        return "float"
    if name in MULTIPLY:
        return "multiply"
    if name in MEMORY:
        return "memory"
    if name in SPECIAL:
        return "special"
    return "uniform" if name.startswith(UNIFORM) or name in ("EXIT", "BRA", "BAR", "NOP", "S2R", "S2UR") else "integer"


def registers_of(compiled: Any) -> int:
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "cubin"
        cubin.write_bytes(compiled.asm["cubin"])
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", cubin]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return int(re.search(r"\bREG:(\d+)", said)[1])  # type: ignore[index]  # it prints one


def bytes_of(
    rule: Rule,
    weight_dtype: torch.dtype = torch.float32,
    gradient_dtype: torch.dtype = torch.float32,
    masters: bool | torch.dtype = False,
    state_dtype: torch.dtype | None = None,
    **others: Any,
) -> tuple[float, float]:
    """Bytes that are read for an element, and those that are written."""
    state = 4.0 if state_dtype is None else float(state_dtype.itemsize)
    if storage.is_packed(state_dtype):
        assert state_dtype is not None
        state = storage.packed_size(BLOCK, state_dtype) / BLOCK
    weight = alongside = 0.0
    if masters is True:  # the weight is written only
        alongside = 4.0
    else:
        weight, alongside = weight_dtype.itemsize, masters.itemsize if masters else 0.0
    read = weight + alongside + gradient_dtype.itemsize + state * len(rule.used)
    return read, weight_dtype.itemsize + alongside + state * len(rule.changed)


if __name__ == "__main__":
    main()
