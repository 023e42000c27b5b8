"""Times AdamW with packed states as several versions of the code compute it, by turns, on one GPU.

    python benchmarks/packed_turns.py OLD ...            the working tree against each OLD: a commit, or a folder with a
                                                         checkout
    python benchmarks/packed_turns.py OLD --static       only whether their kernels differ, for sm_90; needs no GPU
    python benchmarks/packed_turns.py OLD --dry          all of it without a GPU, to see that it runs: kernels are compiled
                                                         for sm_90 and launched by a driver that runs nothing

Each version has a process of its own. They take turns, the working tree last; a turn's time is the median of its steps, and
the time of a version the median of its turns. Ratios are to the first version.

Before that it compares the machine code of the kernels. A row whose code is equal in all versions is not timed, as a
difference would be noise. Where no row differs it ends with an error.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing_extensions import Self

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "gpu_packed_turns.json"
ELEMENTS = 1 << 29
TURNS, STEPS, WARM_UP = 8, 20, 5  # steps are those of a turn
# By row the type of weights and gradients, the arguments of a Trainer, and those of `compile_for` with types by name.
STOCHASTIC = {"stochastic_rounding": True}
HALF = {"weight_dtype": "bfloat16", "gradient_dtype": "bfloat16", "stochastic": True}
ROWS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "AdamW, bfloat16, states 8-bit, stochastic": (
        "bfloat16",
        {"state_dtype": "8bit", **STOCHASTIC},
        {"state_dtype": "uint8", **HALF},
    ),
    "AdamW, bfloat16, states 4-bit, stochastic": (
        "bfloat16",
        {"state_dtype": "4bit", **STOCHASTIC},
        {"state_dtype": "int8", **HALF},
    ),
    "AdamW, bfloat16, 24-bit master, states 8-bit, stochastic": (
        "bfloat16",
        {"multi_precision": "split8", "state_dtype": "8bit", **STOCHASTIC},
        {"masters": "int8", "state_dtype": "uint8", **HALF},
    ),
    "AdamW, bfloat16, 24-bit master, states 4-bit, stochastic": (
        "bfloat16",
        {"multi_precision": "split8", "state_dtype": "4bit", **STOCHASTIC},
        {"masters": "int8", "state_dtype": "int8", **HALF},
    ),
    "AdamW, bfloat16, split master, states 8-bit, stochastic": (
        "bfloat16",
        {"multi_precision": "remainder", "state_dtype": "8bit", **STOCHASTIC},
        {"masters": "int16", "state_dtype": "uint8", **HALF},
    ),
    "AdamW, float32, states 8-bit": ("float32", {"state_dtype": "8bit"}, {"state_dtype": "uint8"}),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", nargs="+", help="commits, or folders with a checkout")
    parser.add_argument("--static", action="store_true", help="compare the kernels' machine code only")
    parser.add_argument("--dry", action="store_true", help="launch small tensors' kernels with a driver that runs nothing")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--elements", type=int, default=ELEMENTS)
    parser.add_argument("--out", type=Path, help=f"JSON file to write; by default {RESULTS.name}, with --dry none")
    arguments = parser.parse_args()
    out = arguments.out or (None if arguments.dry else RESULTS)
    with ExitStack() as stack:
        trees = {name: _tree(name, stack) for name in arguments.old} | {"new": ROOT}
        workers = {name: stack.enter_context(Worker(tree, arguments.dry)) for name, tree in trees.items()}
        code = {name: {row: worker.ask("code", row) for row in arguments.rows} for name, worker in workers.items()}
        rows = differing(code)
        for row in arguments.rows:
            hashes = " ".join(f"{code[name][row][:12]}" for name in trees)
            print(f"{row:58}{hashes if row in rows else 'equal code: left out'}")
        if not rows:
            raise SystemExit(f"the kernels of {', '.join(trees)} have equal code: nothing to compare")
        if arguments.static:
            return
        results: dict[str, Any] = {
            "old": arguments.old,
            "new": workers["new"].ask("commit"),
            "elements": arguments.elements,
            "rows": {},
        }
        for row in rows:
            results["rows"][row] = found = by_turns(workers, row, 4096 if arguments.dry else arguments.elements)
            times = [found[name]["us"] for name in trees]
            ratios = " ".join(f"{time / times[0]:5.3f}" for time in times[1:])
            print(f"{row:58}{''.join(f'{time:9.1f} µs' for time in times)}  {ratios}", flush=True)
            if out is not None:
                out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")  # whatever comes after
    print(f"written to {out}" if out is not None else "nothing is written")


def differing(code: dict[str, dict[str, str]]) -> list[str]:
    """The rows whose hash differs between two of the versions, in order. `code`: by version, the hash of each row."""
    return [row for row in code["new"] if len({hashes[row] for hashes in code.values()}) > 1]


def _tree(old: str, stack: ExitStack) -> Path:
    """The folder with the old version, made of a commit if it is none."""
    if Path(old).is_dir():
        return Path(old).resolve()
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    archive = subprocess.run(["git", "-C", str(ROOT), "archive", old], check=True, stdout=subprocess.PIPE).stdout
    subprocess.run(["tar", "-x", "-C", str(folder)], input=archive, check=True)
    return folder


def by_turns(workers: dict[str, Worker], row: str, elements: int) -> dict[str, Any]:
    """What each worker's turns took, with the medians in µs, and what ran."""
    found: dict[str, Any] = {name: worker.ask("prepare", row, elements) | {"turns": []} for name, worker in workers.items()}
    for _ in range(TURNS):
        for name, worker in workers.items():
            found[name]["turns"].append(worker.ask("turn"))
    for name, worker in workers.items():
        found[name] |= {"us": statistics.median(found[name]["turns"]), **worker.ask("release")}
    return found


class Worker:
    """A process with the tristep of one tree, and this file's functions below."""

    def __init__(self, tree: Path, dry: bool = False) -> None:
        paths = [str(tree / "src"), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        environment["PYTHONPATH"] = os.pathsep.join(paths)
        command = [sys.executable, "-c", f"import packed_turns; packed_turns.serve({dry})"]
        self._process = subprocess.Popen(
            command, cwd=Path(__file__).parent, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.communicate()

    def ask(self, what: str, *arguments: Any) -> Any:
        """What a function of `Turns` returns there.

        Raises:
            RuntimeError: it raised, and has printed why.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([what, *arguments]) + "\n")
        self._process.stdin.flush()
        if not (line := self._process.stdout.readline()):
            raise RuntimeError(f"{what} of {arguments} has failed in the process of {self._process.args!r}")
        return json.loads(line)


def serve(dry: bool) -> None:
    answers, sys.stdout = sys.stdout, sys.stderr
    turns = Turns(dry)
    for line in sys.stdin:
        what, *arguments = json.loads(line)
        print(json.dumps(getattr(turns, what)(*arguments)), file=answers, flush=True)


class Turns:
    """What a worker does."""

    def __init__(self, dry: bool) -> None:
        import torch

        self._dry, self._device = dry, "cuda" if torch.cuda.is_available() and not dry else "cpu"
        self._step: Any = None
        if dry:
            import fake_driver

            fake_driver.install()

    def commit(self) -> str | None:
        """That of the folder with this file."""
        from environment import commit

        return commit()

    def code(self, row: str) -> str:
        """The hash of a row's update kernel, for this GPU, or for sm_90 where there is none."""
        import torch
        from environment import code_hash
        from triton.backends.compiler import GPUTarget

        from tristep.kernels import rules
        from tristep.kernels.backends.triton.compile import compile_for

        major, minor = torch.cuda.get_device_capability() if self._device == "cuda" else (9, 0)
        options = {key: getattr(torch, value) if isinstance(value, str) else value for key, value in ROWS[row][2].items()}
        compiled = compile_for(GPUTarget("cuda", 10 * major + minor, 32), rules.adamw, **options)
        return code_hash(compiled.asm["sass"])

    def prepare(self, row: str, elements: int) -> dict[str, Any]:
        """Take the first steps; what ran."""
        import torch
        from environment import Kernels, conditions, program_of

        import tristep

        if self._device != "cuda" and not self._dry:
            raise SystemExit("torch sees no GPU here: only --static and --dry work without one")
        dtype, options, _ = ROWS[row]
        kernels = Kernels("cuda")
        param = torch.nn.Parameter(torch.randn(elements, device=self._device, dtype=getattr(torch, dtype)))
        param.grad = torch.randn_like(param)
        given = {"learning_rate": 1e-3, "wd": 0.01, **options}
        trainer = tristep.Trainer([param], "adamw", given, engine="triton")
        self._step = lambda: trainer.step(1, ignore_stale_grad=True), param
        for _ in range(WARM_UP):
            self._take()
        return {"kernels": kernels.compiled, "conditions": conditions(self._device), **program_of(elements, True)}

    def turn(self) -> float:
        """The median µs of the steps of a turn, on the GPU's clock; with --dry on the host's."""
        return statistics.median(self._take() for _ in range(STEPS))

    def release(self) -> dict[str, Any]:
        import torch
        from environment import sm_clock

        clock, self._step = None if self._dry else sm_clock(), None
        torch.cuda.empty_cache()
        return {"SM clock after, MHz": clock}

    def _take(self) -> float:
        import torch

        step, param = self._step
        param.grad.add_(0)  # counts as written
        if self._dry:
            start = time.perf_counter()
            step()
            return (time.perf_counter() - start) * 1e6
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        step()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e3


if __name__ == "__main__":
    main()
