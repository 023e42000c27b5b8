"""Measures memory and time of saving and loading large states, beside torch.save and safetensors.

    python benchmarks/saving.py                  states of 1 GiB; takes 5 GiB of memory, 3 GiB of disk and a few minutes
    python benchmarks/saving.py --mib 64         smaller ones
    python benchmarks/saving.py --one-tensor     one parameter instead of sixteen
    python benchmarks/saving.py --folder FOLDER  where the files go
    python benchmarks/saving.py --out FILE       where the JSON goes

Each way has a process of its own, which has made everything else before it is watched. The unit of memory is the size of
the file. "allocated" is how much the process's own memory grew at most (RssAnon, read some hundred times a second by
another process). "resident" is how much the peak of all of its memory grew (VmHWM): it counts the pages of mapped files,
too, which the system takes back when it needs memory. Times are the least of some turns with the file in the system's
cache, "seconds" on the clock and "processor" of the process; saving ends when the file is on the disk (fsync), also for the
others, which do not wait for that by themselves. "checksums" is the time to compute the CRC-32 of as many bytes, which only
tristep's files have. "goal" is 1.3 times the time of safetensors plus that of the checksums. One thread; needs Linux.

The states are those of Adam in float32. "into states" copies what is loaded into tensors that exist, "into new ones" makes
them, so that they are in the figures. A checkpoint has the weights, too, and is 1.5 times as large: that is its unit.
"""

from __future__ import annotations

import argparse
import os
import select
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from environment import machine
from timing import write

import tristep

RESULTS = Path(__file__).parent / "results" / "saving_cpu.json"
TURNS = 3
Case = Callable[[], Any]


def trained(mib: int, n: int) -> tristep.Trainer:
    """A trainer whose states of Adam take so many MiB."""
    params = {f"w{i}": torch.nn.Parameter(torch.zeros(mib * 2**17 // n)) for i in range(n)}
    trainer = tristep.Trainer(params, "adam")
    for i, param in enumerate(params.values()):
        param.grad = torch.full_like(param, 1.0 + i)
    trainer.step(1)
    trainer.zero_grad()
    return trainer


def states_of(trainer: tristep.Trainer) -> dict[str, torch.Tensor]:
    states = trainer.state_dict()["state"]
    return {f"{name}.{slot}": tensor for name, slots in states.items() for slot, tensor in slots.items()}


def cases(folder: Path, mib: int, n: int) -> dict[str, tuple[str, str, Callable[[], Case]]]:
    """What is measured by name: the table, whose it is, and a function that prepares it and returns it."""
    path = folder / "file"

    def on_disk(save: Case) -> Case:
        def run() -> None:
            save()
            with open(path, "rb") as file:
                os.fsync(file.fileno())

        return run

    def save_ours() -> Case:
        trainer = trained(mib, n)
        return lambda: trainer.save_states(path)

    def save_torch() -> Case:
        states = states_of(trained(mib, n))
        return on_disk(lambda: torch.save(states, path))

    def save_safetensors() -> Case:
        import safetensors.torch

        states = states_of(trained(mib, n))
        return on_disk(lambda: safetensors.torch.save_file(states, path))

    def load_ours(new: bool) -> Case:
        trainer = trained(mib, n)
        trainer.save_states(path)
        if new:
            replica = trainer.replicas[0]
            trainer = tristep.Trainer(dict(zip(replica.names, replica.params, strict=True)), "adam")
        return lambda: trainer.load_states(path)

    def load_theirs(save: Callable[[Any, Path], Any], load: Callable[[Path], dict[str, torch.Tensor]], new: bool) -> Case:
        states = states_of(trained(mib, n))
        save(states, path)
        if new:
            states.clear()

        def run() -> Any:
            loaded = load(path)
            return {name: tensor.clone() if new else states[name].copy_(tensor) for name, tensor in loaded.items()}

        return run

    def load_torch(new: bool) -> Case:
        return load_theirs(torch.save, lambda path: torch.load(path, mmap=True), new)

    def load_safetensors(new: bool) -> Case:
        import safetensors.torch

        return load_theirs(safetensors.torch.save_file, safetensors.torch.load_file, new)

    def checkpoint(resumes: bool) -> Case:
        trainer = trained(mib, n)
        manager = tristep.CheckpointManager(folder / "run", trainer, max_to_keep=1, sigterm=False)
        if resumes:
            manager.save()
            manager.wait()

        def save() -> None:
            manager.save()
            manager.wait()

        return (lambda: trainer.resume(folder / "run")) if resumes else save

    def checksums() -> Case:
        states = states_of(trained(mib, n))
        return lambda: [zlib.crc32(memoryview(tensor.numpy())) for tensor in states.values()]

    found = {
        "checksums": ("checksums", "tristep", checksums),
        "save_file": ("save", "safetensors", save_safetensors),
        "torch.save": ("save", "torch", save_torch),
        "save_states": ("save", "tristep", save_ours),
        "CheckpointManager.save": ("checkpoint", "tristep", lambda: checkpoint(False)),
        "Trainer.resume": ("resume", "tristep", lambda: checkpoint(True)),
    }
    for table, new in (("load into states", False), ("load into new ones", True)):
        found |= {
            f"load_file, {table}": (table, "safetensors", lambda new=new: load_safetensors(new)),
            f"torch.load with mmap, {table}": (table, "torch", lambda new=new: load_torch(new)),
            f"load_states, {table}": (table, "tristep", lambda new=new: load_ours(new)),
        }
    return found


def memory(process: int | str, *names: str) -> list[int]:
    """Entries of the status of a process, in bytes."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    values = {line.split(":")[0]: line.split() for line in lines}
    return [int(values[name][1]) * 1024 for name in names]


def run_one(case: Case) -> None:
    """Run it in some turns, each when asked for; print how much the peak grew, and the seconds."""
    torch.set_num_threads(1)
    for _ in range(TURNS):
        print("ready", flush=True)
        sys.stdin.readline()
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
        (before,) = memory("self", "VmRSS")
        start, processor = time.perf_counter(), time.process_time()
        kept = case()
        seconds, processor = time.perf_counter() - start, time.process_time() - processor
        (peak,) = memory("self", "VmHWM")
        del kept
        print(peak - before, seconds, processor, flush=True)


def measured(name: str, arguments: list[Any]) -> dict[str, float]:
    """The most bytes and the least seconds of all turns."""
    command = [sys.executable, __file__, "--case", name, *map(str, arguments)]
    turns = []
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        for _ in range(TURNS):
            assert child.stdout.readline() == b"ready\n", f"{name} has failed"
            (before,) = memory(child.pid, "RssAnon")
            most = before
            child.stdin.write(b"go\n")
            child.stdin.flush()
            while not select.select([child.stdout], [], [], 0.002)[0]:
                most = max(most, *memory(child.pid, "RssAnon"))
            turns.append((most - before, *map(float, child.stdout.readline().split())))
    allocated, resident, seconds, processor = zip(*turns, strict=True)
    return {"allocated": max(allocated), "resident": max(resident), "seconds": min(seconds), "processor": min(processor)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=1024, help="size of the states")
    parser.add_argument("--one-tensor", action="store_true", help="one parameter instead of sixteen")
    parser.add_argument("--folder", type=Path, help="where the files go; default: a temporary folder")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    given = parser.parse_args()
    n = 1 if given.one_tensor else 16
    if given.case is not None:
        run_one(cases(given.folder, given.mib, n)[given.case][2]())
        return
    rows: dict[str, dict[str, Any]] = {}
    about = machine("cpu").replace(f"{torch.get_num_threads()} threads", "1 thread")
    print(f"{about}\n\n| | allocated | resident | seconds | goal | processor | goal |\n|---|---|---|---|---|---|---|")
    for name, (table, whose, _) in cases(Path(), given.mib, n).items():
        with tempfile.TemporaryDirectory(dir=given.folder) as folder:
            arguments = ["--folder", folder, "--mib", given.mib, *(["--one-tensor"] if given.one_tensor else [])]
            found = measured(name, arguments)
        size = given.mib * 2**20 * (1.5 if table in ("checkpoint", "resume") else 1)
        found = {key: value / (size if key in ("allocated", "resident") else 1) for key, value in found.items()}
        row = rows[name] = {"table": table, "of": whose, **{key: round(value, 3) for key, value in found.items()}}
        for peer in rows.values():
            if (whose, peer["of"], peer["table"]) == ("tristep", "safetensors", table):
                for key in ("seconds", "processor"):
                    row[f"goal of {key}"] = round(1.3 * peer[key] + rows["checksums"][key], 3)
        keys = "allocated", "resident", "seconds", "goal of seconds", "processor", "goal of processor"
        print(f"| {name} | {' | '.join(f'{row[key]:.2f}' if key in row else '' for key in keys)} |", flush=True)
    write(given.out, {"machine": about, "MiB": given.mib, "tensors": 2 * n, "rows": rows})


if __name__ == "__main__":
    main()
