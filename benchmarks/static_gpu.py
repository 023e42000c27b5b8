"""What the kernels cost by their instructions: read off the machine code for four kinds of GPU, so that none is needed.

    python benchmarks/static_gpu.py                prints a table, and writes benchmarks/results/static_gpu.json
    python benchmarks/static_gpu.py --tritons .venv/triton-*
                                                   the same, and for sm_90 with the Triton in each of these folders, too

For each kernel it follows the path of a full tile through the SASS and counts instructions by the pipe that executes them.
In a cycle an SM issues 4 instructions, each for 32 threads, and executes as many of each kind as `TARGETS` has (NVIDIA,
"CUDA C++ Programming Guide", throughput of native arithmetic instructions). The slowest of these takes the least time that a
kernel can take by its instructions; `margin` is how many times as long its bytes take at the bandwidth of a copy. Below 1,
instructions are what such a kernel waits for.

In flight is what the threads of an SM have asked memory for at a time. The compiler moves loads behind arithmetic and waits
between them, so it is counted in the order of the code: a load is in flight until an instruction waits for its barrier.

These are bounds, not measured times.
"""

from __future__ import annotations

import argparse
import heapq
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from environment import code_hash
from triton.backends.compiler import GPUTarget

from tristep.kernels import Rule, rules, storage
from tristep.kernels.backends.triton.compile import BLOCK, MOST_PACKED, compile_for
from tristep.trainer import Telemetry

SWEPT = "sm_90"  # what other versions of Triton compile for
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


class Target(NamedTuple):
    """What an SM of a compute capability does in a cycle, for so many threads, and how many warps it holds at most."""

    float32: int  # additions, multiplications
    memory: int = 32  # accesses and shuffles
    warps: int = 64
    issue: int = 128
    integer: int = 64  # and comparisons and selections
    multiply: int = 64  # of integers
    special: int = 16  # functions and conversions


class Gpu(NamedTuple):
    """A GPU by its data sheet.

    Attributes:
        target: what is compiled for it.
        clock: in Hz.
        sms: how many it has.
        bandwidth: bytes a second that a copy reads and writes: nine tenths of the memory's.
        in_flight_KiB: what an SM must have in flight for that bandwidth, by what CCCL has found for its transform (its file
            cub/device/dispatch/tuning/tuning_transform.cuh, function arch_to_min_bytes_in_flight).
    """

    target: str
    clock: float
    sms: int
    bandwidth: float
    in_flight_KiB: int


TARGETS = {"sm_75": Target(64, memory=16, warps=32), "sm_80": Target(64), "sm_90": Target(128), "sm_100": Target(128)}
GPUS = {
    "T4": Gpu("sm_75", 1.59e9, 40, 0.288e12, 12),
    "A100": Gpu("sm_80", 1.41e9, 108, 1.84e12, 16),
    "H100": Gpu("sm_90", 1.755e9, 132, 3.0e12, 32),
    "H200": Gpu("sm_90", 1.98e9, 132, 4.3e12, 48),
    "B200": Gpu("sm_100", 1.965e9, 148, 6.9e12, 64),
}
LOAD = re.compile(r"(?:@!?\w+ )?LDG\.E(?:\.(?:[US](8|16)|(64|128)))?\b")
FLOAT = ("FADD", "FMUL", "FFMA")
FLOATS = ("FADD2", "FMUL2", "FFMA2")  # two of them
MULTIPLY = ("IMAD", "IMUL")
MEMORY = ("LDG", "STG", "LDS", "STS", "LDSM", "STSM", "SHFL", "REDUX")
SPECIAL = ("MUFU", "F2I", "I2F", "F2F")
# Some places are given by the number of bytes ahead of them, 16 an instruction; calls that keep no address are branches.
BRANCH = re.compile(r"(@!?\w+ )?(?:BRA|CALL\.REL\.NOINC)(\.\w+ !?\w+,)? (LBB\d+|0x[0-9a-f]+)")
EXIT, LEAVES = re.compile(r"(@!?\w+ )?EXIT\b"), re.compile(r"(EXIT|RET)\b")
UNIFORM = "U"  # the uniform pipe, once for a warp
REGISTERS = 65536  # of an SM


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--tritons", type=Path, nargs="*", default=[], help="folders with other versions of Triton")
    parser.add_argument("--version-only", action="store_true", help="print this Triton's version and counts as JSON")
    arguments = parser.parse_args()
    if arguments.version_only:
        print(json.dumps([triton.__version__, {name: measure(name, SWEPT) for name in KERNELS}]))
        return
    out, found = arguments.out, {}
    print(f"{'':56} instructions  registers  bytes  KiB in flight: {', '.join(TARGETS)}  margins: {', '.join(GPUS)}")
    for name in KERNELS:
        row = found[name] = {target: measure(name, target) for target in TARGETS}
        cost = f"{row['sm_90']['instructions']:12.1f}  {row['sm_90']['registers']:9}  {row['sm_90']['bytes']:5.1f}  "
        cost += "  ".join(f"{each['in_flight_KiB']:4.0f}" for each in row.values())
        margins = "  ".join(f"{row[gpu.target]['margin'][each]:5.2f}" for each, gpu in GPUS.items())
        print(f"{name:56} {cost}  {margins}  {row['sm_90']['bound']}", flush=True)
    versions = dict(map(_with_triton, arguments.tritons)) | {
        triton.__version__: {name: found[name][SWEPT] for name in found}
    }
    for name in KERNELS:
        print(f"{name:56}" + "  ".join(f"{version} {cell(counts[name])}" for version, counts in versions.items()))
    table = {"triton": triton.__version__, "gpus": {name: gpu._asdict() for name, gpu in GPUS.items()}, "kernels": found}
    table["versions"] = {version: {name: counts[name] for name in KERNELS} for version, counts in versions.items()}
    out.write_text(json.dumps(table, indent=1) + "\n")
    print(f"written to {out}", file=sys.stderr)


def _with_triton(folder: Path) -> tuple[str, dict[str, Any]]:
    """The version of the Triton in a folder, and what it makes of each kernel, found in a process of its own."""
    paths = os.pathsep.join([str(folder.resolve()), *filter(None, sys.path)])
    command = [sys.executable, __file__, "--version-only"]
    run = subprocess.run(command, env=os.environ | {"PYTHONPATH": paths}, check=True, stdout=subprocess.PIPE, text=True)
    version, counts = json.loads(run.stdout)
    return version, counts


def cell(counts: dict[str, Any]) -> str:
    """Registers, barriers of a block, KiB in flight and instructions of an element, as tables show them."""
    return f"{counts['registers']} / {counts['barriers']} / {counts['in_flight_KiB']:.0f} / {counts['instructions']:.0f}"


def measure(name: str, target: str = "sm_90") -> dict[str, Any]:
    """Of one kernel, for each element: instructions and bytes; and what follows from these."""
    rule, options = KERNELS[name]
    compiled = compile_for(GPUTarget("cuda", int(target[3:]), 32), rule, **options)
    warps, sass, able = compiled.metadata.num_warps, compiled.asm["sass"], TARGETS[target]
    path, block = [of(line) for line in full_tile(sass)], [of(line) for line in full_block(sass)]
    elements = MOST_PACKED * BLOCK // (32 * warps)  # of a thread
    counts = Counter(pipe for instruction in path for pipe in pipes_of(instruction))
    read, written = bytes_of(rule, **options)
    registers, bytes_ = registers_of(compiled), read + written
    threads = {pipe: counts[pipe] for pipe in ("issue", "float32", "integer", "multiply", "memory", "special")}
    cycles = {pipe: number / elements / getattr(able, pipe) for pipe, number in threads.items()}
    bound = max(cycles, key=lambda pipe: cycles[pipe])
    of_target = {name: gpu for name, gpu in GPUS.items() if gpu.target == target}
    return {
        "instructions": counts["issue"] / elements,
        "by_pipe": {pipe: number / elements for pipe, number in threads.items() if pipe != "issue"},
        "registers": registers,
        "barriers": sum(instruction.startswith("BAR.SYNC") for instruction in block),
        "exchanged": sum(re.match(r"(LDS|STS|LDSM|STSM)\b", instruction) is not None for instruction in block),
        "spilled": len(re.findall(r"\b(?:LDL|STL)\b", sass)),
        "sha256": code_hash(sass),
        "warps": warps,
        "shared": compiled.metadata.shared,
        "bytes": bytes_,
        "bound": bound,
        "in_flight_KiB": in_flight(sass, registers, warps, target) / 1024,
        "margin": {
            name: bytes_ / gpu.bandwidth / (cycles[bound] / (gpu.clock * gpu.sms)) for name, gpu in of_target.items()
        },
    }


def in_flight(sass: str, registers: int, warps: int, target: str = "sm_90", wide: str = "STG") -> int:
    """Bytes that an SM has asked memory for at a time, at most, while its threads are in full tiles.

    `wide` is an access of several elements that the path of such tiles has.
    """
    resident = min(TARGETS[target].warps, REGISTERS // (32 * -(-registers // 8) * 8)) // warps * warps
    waiting: dict[str, int] = {}  # bytes by the barrier that says that they are there
    most = 0
    for line in full_block(sass, wide):
        awaited, _, barrier, *_ = line.partition("\t")[0].split(":")
        if awaited.strip("-"):
            waiting = {each: size for each, size in waiting.items() if not int(awaited) >> int(each) & 1}
        if loaded := LOAD.match(of(line)):
            waiting[barrier] = waiting.get(barrier, 0) + int(loaded[1] or loaded[2] or 32) // 8
            most = max(most, sum(waiting.values()))
    return resident * 32 * most


def full_tile(sass: str) -> list[str]:
    """The lines that a thread executes whose tile is full, block after block.

    Of the paths through the code of a block it is the shortest that stores several elements at once: others have masks, and
    slow cases such as subnormal quotients.
    """
    lines, labels, branches, head = parsed(sass)
    backwards = {i for i, (_, to) in branches.items() if to == head}
    ends = {i for i, line in enumerate(lines) if EXIT.match(of(line))}
    before = shortest(lines, branches, 0, {head})
    block, last = (shortest(lines, branches, head, to, "STG") for to in (backwards, ends))
    code = [*before[:-1], *block * (MOST_PACKED - 1), *last]
    return [lines[i] for i in code if lines[i][:-1] not in labels]


def full_block(sass: str, wide: str = "STG") -> list[str]:
    """The lines of one block of a full tile, with a `wide` access of several elements, which is not the last block."""
    lines, labels, branches, head = parsed(sass)
    backwards = {i for i, (_, to) in branches.items() if to == head}
    return [lines[i] for i in shortest(lines, branches, head, backwards, wide) if lines[i][:-1] not in labels]


def parsed(sass: str) -> tuple[list[str], dict[str, int], dict[int, tuple[str | None, int]], int]:
    """Labels and instructions, which follow a tab; where labels are; branches; and where the code of a block begins."""
    lines = [line for line in sass.splitlines() if "\t" in line or re.fullmatch(r"LBB\d+:", line)]
    labels = {line[:-1]: i for i, line in enumerate(lines) if re.fullmatch(r"LBB\d+:", line)}
    places = [i for i, line in enumerate(lines) if "\t" in line]
    branches = {
        i: (found[1] or found[2], labels[found[3]] if found[3] in labels else places[int(found[3], 16) // 16])
        for i, line in enumerate(lines)
        if (found := BRANCH.match(of(line)))
    }
    (head,) = {to for i, (_, to) in branches.items() if to < i - 1}  # the code ends with a branch to itself
    return lines, labels, branches, head


def of(line: str) -> str:
    """The instruction of a line, without what the scheduler is told: barriers it waits for, and those it sets."""
    return line.rpartition("\t")[2]


def shortest(
    lines: list[str], branches: dict[int, tuple[str | None, int]], start: int, ends: set[int], wide: str | None = None
) -> list[int]:
    """The shortest path from an instruction to one of the ends, with a `wide` access of several elements on it."""
    queue: list[tuple[int, int, bool, tuple[int, ...]]] = [(0, start, wide is None, ())]
    seen = set()
    while queue:
        length, i, found, path = heapq.heappop(queue)
        found = found or re.match(rf"{wide}\.E\.(64|128)", of(lines[i])) is not None
        if i in ends and found:
            return [*path, i]
        if (i, found) in seen:
            continue
        seen.add((i, found))
        guard, to = branches.get(i, (None, i + 1))
        following = {to} if guard is None else {to, i + 1}
        if LEAVES.match(of(lines[i])):
            following = set()
        for each in following:
            heapq.heappush(queue, (length + 1, each, found, (*path, i)))
    raise ValueError("there is no path with wide stores")


def pipes_of(instruction: str) -> tuple[str, ...]:
    """What an instruction takes a part of, as often as it does."""
    name = re.sub(r"^@!?\w+ ", "", instruction).split(" ")[0].split(".")[0].rstrip(";")
    return ("issue", "float32", "float32") if name in FLOATS else ("issue", pipe_of(name))


def pipe_of(name: str) -> str:
    if name in FLOAT:
        return "float32"
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
