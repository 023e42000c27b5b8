"""Times what matters most on a GPU, each part in several processes, within a quarter of an hour.

    python benchmarks/repeated.py              the most important first; what time does not allow is left out
    python benchmarks/repeated.py --dry        without a GPU, to see that it runs: small tensors, and a driver that compiles
                                                kernels for sm_90 and runs nothing; times mean nothing
    python benchmarks/repeated.py --only muon  some of it

Times of equal kernels have differed by 25 % between processes. So each number is the median over processes, with the least
and the most; the file is written after each process. At the end come the smoke tests.
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
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "gpu_processes.json"
SECONDS, PROCESSES, SMOKE = 15 * 60, 5, 180  # SMOKE: seconds kept for the smoke tests
# In order, of run.py: a part, and a pattern for its rows.
PLAN = {
    "muon": ("matrices", "2,048|4,096|24 x 256"),
    "products": ("products", "."),
    "rules": ("rules", "^(adafactor|came|group_adagrad|novograd)$"),
    "steps": ("steps", "ResNet|GPT-2"),
    "loading": ("changes", "after loading"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PLAN, default=list(PLAN))
    parser.add_argument("--processes", type=int, default=PROCESSES)
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("--dry", action="store_true", help="small tensors and a driver that runs nothing")
    parser.add_argument("--out", type=Path, help=f"JSON file to write; by default {RESULTS.name}, with --dry none")
    arguments = parser.parse_args()
    out = arguments.out or (None if arguments.dry else RESULTS)
    end = time.monotonic() + arguments.seconds - (0 if arguments.dry else SMOKE)
    results: dict[str, Any] = {}
    failed = []
    for name in arguments.only:
        runs: list[dict[str, Any]] = []
        for _ in range(arguments.processes):
            left = end - time.monotonic()
            if left > 0 and (run := _run(*PLAN[name], arguments.dry, left)) is not None:
                runs.append(run)
        if len(runs) < arguments.processes:
            failed.append(f"{name}: {len(runs)} of {arguments.processes} processes")
        if runs:
            results[name] = summary(runs)
            if out is not None:
                out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(*failed, sep="\n")
    print(f"written to {out}" if out is not None else "nothing is written")
    if not arguments.dry:
        failed += ["smoke tests"] * bool(subprocess.run([sys.executable, ROOT / "tests/gpu/gpu_smoke.py"]).returncode)
    raise SystemExit(bool(failed))


def _run(part: str, rows: str, dry: bool, seconds: float) -> dict[str, Any] | None:
    """What a process of run.py has found, None if it failed or took more time."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "found.json"
        command = ["--only", part, "--rows", rows, "--out", str(found)]
        start = ["-c", "import repeated; repeated.dry()"] if dry else ["run.py", "--gpu"]
        try:
            subprocess.run(
                [sys.executable, *start, *command], cwd=ROOT / "benchmarks", env=environment, timeout=seconds, check=True
            )
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            print(f"{part}: {error}", file=sys.stderr)
            return None
        result: dict[str, Any] = json.loads(found.read_text(encoding="utf-8"))[part]
        return result


def dry() -> None:
    """run.py in this process with the workloads of a GPU, small, on a driver that runs nothing."""
    import fake_driver
    import run
    import workloads

    os.environ["TRISTEP_ENGINE"] = "triton"
    driver = fake_driver.install()
    for table in map(vars(workloads).get, ("STEPS", "RULES", "MUON", "MATRICES", "STACKS")):
        table["cpu"] = table["cuda"]  # type: ignore[index]
    sys.argv.append("--dry")
    run.main()
    print(f"{len(driver.launches)} launches of {len(driver.loads)} kernels")


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Of runs of a part what all have in common, what differs as a list, and what they found as medians and spreads."""
    common = {key: values[0] if values.count(values[0]) == len(values) else values for key, values in _by_key(runs).items()}
    return {"processes": len(runs), **common, "found": _spread([run["found"] for run in runs])}


def _spread(values: list[Any]) -> Any:
    if isinstance(values[0], dict):
        return {key: _spread(inner) for key, inner in _by_key(values).items()}
    if isinstance(values[0], str):
        return values[0]
    return {"median": statistics.median(values), "least": min(values), "most": max(values)}


def _by_key(dicts: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """Values by key. A time that only some processes have, such as that of the first of ten, has fewer."""
    keys = dict.fromkeys(key for each in dicts for key in each)
    return {key: [each[key] for each in dicts if key in each] for key in keys}


if __name__ == "__main__":
    main()
