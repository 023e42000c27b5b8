"""The first minutes on a GPU: what can be wrong there and nowhere else, in parts that end.

    python tests/gpu/gpu_smoke.py                        all parts, on cuda
    python tests/gpu/gpu_smoke.py --parts rules graphs   some of them

Results go to benchmarks/results/gpu_smoke.json as soon as a part ends, and parts that have passed for this commit are not
repeated, unless they are named. It needs torch and Triton only: no numba, and no pytest.

    versions      what is installed, and the GPU
    rules         every rule in three types, against the eager engine, which computes in torch's operations
    optimizers    ten steps of tristep.optim against torch.optim
    storage       AdamW with every kind of storage, against the eager engine
    products      symmetric products with every tile, against float64; a step of Muon with them, against whole products
    graphs        captured steps of AdamW and Muon, replayed with other learning rates, against steps without a graph
    waiting       steps in which torch refuses whatever makes the host wait for the GPU
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "src"))

import torch  # noqa: E402

import tristep  # noqa: E402
from tristep.kernels import Rule, Update, rules  # noqa: E402
from tristep.kernels.states import states_for  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "gpu_smoke.json"
SIZES = (1, 127, 1024, 1025, 5000)
# A step is some ten operations of half an ulp each; square roots and quotients are off by up to two more on GPUs. With such
# errors this is tested on the emulator.
ULPS = 32
PLACES: tuple[dict[str, str], ...] = ({}, {"state_device": "cpu"})
HYPER = {"lr": 0.01, "wd": 0.01, "clip": math.inf, "beta1": 0.9, "beta2": 0.99, "beta3": 0.999, "epsilon": 1e-6}


def versions(device: str) -> dict[str, Any]:
    import triton

    found = {"python": platform.python_version(), "torch": torch.__version__, "triton": triton.__version__}
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        found |= {"gpu": properties.name, "cuda": torch.version.cuda, "capability": f"{properties.major}.{properties.minor}"}
    return found


def rules_alone(device: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in rules.__all__:
        rule = getattr(rules, name)
        if isinstance(rule, Rule):
            for dtype in (torch.float32, torch.bfloat16, torch.float16):
                with torch.random.fork_rng():
                    ours, theirs = (_steps_of_rule(rule, dtype, device, engine) for engine in ("triton", "eager"))
                found[f"{name}, {dtype}"] = _largest(ours, theirs)
    _refuse(found)
    return {"cases": len(found), "most_ulps": max(found.values())}


def _steps_of_rule(rule: Rule, dtype: torch.dtype, device: str, engine: str) -> list[torch.Tensor]:
    torch.manual_seed(0)
    guard = Guard()
    weights = [guard.within((torch.rand(n) + 0.5).to(device, dtype)) for n in SIZES]
    states = [tuple(map(guard.within, row)) for row in states_for(rule, weights)]
    for row in states:
        for name, state in zip(rule.slots, row, strict=True):  # averages of squares are above the squares of averages
            state.copy_(torch.rand(state.shape) / 2 + (1.5 if name in rule.nonnegative or name == "n" else 0.5))
    update = Update(rule, weights, states, engine=engine)
    update.hyper[:] = [1.0, *(HYPER.get(name, 0.5) for name in rule.hyper)]
    for _ in range(2 if dtype == torch.float32 else 1):  # weights that are rounded to other 16 bits lead states away
        update.bind([guard.within((torch.rand(n) + 0.25).to(device, dtype)) for n in SIZES])
        update()
    guard.check()
    return [*weights, *(state for row in states for state in row)]


def optimizers(device: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in ("SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop", "Rprop"):
        results = []
        for module in (tristep.optim, torch.optim):
            torch.manual_seed(0)
            net = torch.nn.Sequential(torch.nn.Linear(33, 65), torch.nn.Tanh(), torch.nn.Linear(65, 3)).to(device)
            x, y = torch.randn(16, 33).to(device), torch.randn(16, 3).to(device)
            optimizer = getattr(module, name)(net.parameters(), lr=1e-3)
            for _ in range(10):
                optimizer.zero_grad()
                torch.nn.functional.mse_loss(net(x), y).backward()
                optimizer.step()
            results.append([parameter.detach() for parameter in net.parameters()])
        found[name] = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(*results, strict=True))
    wrong = {name: error for name, error in found.items() if not error < 1e-4}
    if wrong:
        raise AssertionError(f"other weights than torch.optim's: {wrong}")
    return {"cases": len(found), "largest_relative_difference": max(found.values())}


def storage(device: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for dtype in (torch.float32, torch.bfloat16):
        for options in (
            {"state_dtype": "bfloat16", "stochastic_rounding": True},
            {"state_dtype": "8bit"},
            {"state_dtype": "8bit", "stochastic_rounding": True},
            {"multi_precision": True},
            {"multi_precision": "remainder", "state_dtype": "8bit"},
        ):
            if "multi_precision" in options and dtype == torch.float32:
                continue
            ours, theirs = (_train(dtype, device, engine, options) for engine in ("triton", "eager"))
            # Codes of 8 bits, and numbers rounded at random, may differ by one where float32 differs in its last bit.
            found[f"{dtype} {options}"] = max(
                float((a.float() - b.float()).abs().max()) for a, b in zip(ours, theirs, strict=True)
            )
    wrong = {name: error for name, error in found.items() if not error < 0.02}
    if wrong:
        raise AssertionError(f"other weights than the eager engine's: {wrong}")
    return {"cases": len(found), "largest_difference": max(found.values())}


def states_on_host(device: str) -> dict[str, Any]:
    """States in memory of the host: the weights are those with states on the GPU, to the bit; and how fast they move."""
    for options in ({}, {"state_dtype": "8bit"}):
        for a, b in zip(*(_train(torch.float32, device, "triton", options | where) for where in PLACES), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)
    found, n = {}, 2**26
    for where in PLACES:
        weight = torch.nn.Parameter(torch.ones(n, device=device))
        weight.grad = torch.ones_like(weight)
        trainer = tristep.Trainer([weight], "adamw", {"learning_rate": 0.01, **where}, engine="triton")
        trainer.step(1)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(5):
            trainer.step(1)
        torch.cuda.synchronize()
        found["on the host" if where else "on the GPU"] = round((time.perf_counter() - begin) / 5 * 1e3, 3)
        del weight, trainer
    return {"milliseconds_of_adamw": found, "elements": n}


def _train(dtype: torch.dtype, device: str, engine: str, options: dict[str, Any]) -> list[torch.Tensor]:
    torch.manual_seed(0)
    guard = Guard()
    params = [torch.nn.Parameter(guard.within(torch.randn(n).to(device, dtype))) for n in SIZES]
    trainer = tristep.Trainer(params, "adamw", {"learning_rate": 0.01, **options}, engine=engine)
    for _ in range(5):
        for param in params:
            param.grad = guard.within(torch.randn(param.shape).to(device, dtype))
        trainer.step(1)
    guard.check()
    return [param.detach() for param in params]


def products(device: str) -> dict[str, Any]:
    from tristep.kernels.backends.triton import symmetric

    found: dict[str, Any] = {}
    for dtype in (torch.float16, torch.bfloat16):
        for n, rows, depth in ((2, 256, 192), (1, 144, 208), (2, 130, 70)):
            for layout in ("nt", "tn", "nn"):
                torch.manual_seed(0)
                x, y = torch.randn(n, rows, depth).to(device, dtype), torch.randn(n, depth, rows).to(device, dtype)
                x = x.mT.contiguous().mT if layout[0] == "t" else x
                y = y.mT.contiguous().mT if layout[1] == "t" else y
                added = torch.randn(n, rows, rows).to(device, dtype).triu()
                added += added.triu(1).mT
                # The tile that is chosen, by times on a GPU, and then each.
                results = [symmetric.symmetric_product(added, x, y, beta=-0.5, alpha=2.0)]
                for tile in symmetric._tiles_of(x.device):
                    results.append(torch.empty_like(added))
                    symmetric._made(tile, x, y)(x, y, added, results[-1], -0.5, 2.0)
                if not all(torch.equal(results[0], result) for result in results):
                    raise AssertionError(f"other bits with another tile: {dtype}, {n} of {rows} x {depth}, {layout}")
                exact = (2.0 * x.double() @ y.double() - 0.5 * added.double()).triu()
                exact += exact.triu(1).mT
                found[f"{dtype}, {n} of {rows} x {depth}, {layout}"] = _largest([results[0]], [exact.to(dtype)])
    if wrong := {name: ulps for name, ulps in found.items() if not ulps <= 1}:
        raise AssertionError(f"ulps from float64: {wrong}")
    steps = []
    for engine in (None, "eager"):
        torch.manual_seed(0)
        param = torch.nn.Parameter(torch.zeros(512, 1024, device=device))
        param.grad = torch.randn(512, 1024).to(device)
        tristep.Trainer([param], "muon", {"learning_rate": 1.0}, engine=engine).step(1)
        steps.append(param.detach())
    error = float((steps[0] - steps[1]).norm() / steps[1].norm())
    if not error < 0.02:
        raise AssertionError(f"a step of Muon is off by {error} from one with whole products")
    return {"cases": len(found), "most_ulps": max(found.values()), "difference_of_a_step": error}


def graphs(device: str) -> dict[str, Any]:
    found = {
        "adamw": _captured(device, "adamw", {"clip_norm": 0.5}),
        "muon": _captured(device, "muon", {}),
    }
    # A number of Muon's that comes from the device may round the other way, and then its 16 bits.
    if wrong := {name: error for name, error in found.items() if not error < (1e-4 if name == "adamw" else 0.02)}:
        raise AssertionError(f"weights of replayed steps are off by {wrong}")
    return {"largest_relative_differences": found}


def _captured(device: str, name: str, options: dict[str, Any]) -> float:
    """The largest relative difference of weights after steps that are captured and steps that are not."""
    results = []
    for captured in (True, False):
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(33, 65), torch.nn.Tanh(), torch.nn.Linear(65, 3)).to(device)
        trainer = tristep.Trainer(net, name, {"learning_rate": 0.01, **options})

        def train(x: torch.Tensor, y: torch.Tensor, net: Any = net, trainer: Any = trainer) -> torch.Tensor:
            loss = torch.nn.functional.mse_loss(net(x), y)
            trainer.zero_grad(set_to_none=False)
            loss.backward()
            trainer.step(1)
            return loss

        step = trainer.capture(train) if captured else train
        for k in range(12):
            torch.manual_seed(k)
            trainer.set_learning_rate(0.01 / (k + 1))
            step(torch.randn(16, 33).to(device), torch.randn(16, 3).to(device))
        results.append([parameter.detach() for parameter in net.parameters()])
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(*results, strict=True))


def waiting(device: str) -> dict[str, Any]:
    matrices = ((65, 33), (33, 65), (512, 1024), (512, 512))
    _steps_that_do_not_wait(device, [(n,) for n in SIZES], "adamw", {"learning_rate": 0.01, "clip_norm": 1.0})
    _steps_that_do_not_wait(device, matrices, "muon", {"learning_rate": 0.01})
    return {"steps": 2 * 27}


def _steps_that_do_not_wait(device: str, shapes: Any, name: str, options: dict[str, Any]) -> None:
    params = [torch.nn.Parameter(torch.randn(shape, device=device)) for shape in shapes]
    trainer = tristep.Trainer(params, name, options, telemetry=name == "adamw")
    for k in range(30):
        for param in params:
            param.grad = torch.ones_like(param)
        if k == 3:  # the first steps allocate and compile
            torch.cuda.set_sync_debug_mode("error")
        trainer.set_learning_rate(0.01 / (k + 1))
        trainer.step(1)
    torch.cuda.set_sync_debug_mode("default")


class Guard:
    """Memory on both sides of tensors, in which nothing may be written. Of a tensor's own allocation compute-sanitizer sees
    only where it ends, which torch rounds up to 512 bytes."""

    BYTES = 1024

    def __init__(self) -> None:
        self._zones: list[tuple[torch.Tensor, int]] = []

    def within(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor's values, between two zones."""
        n = tensor.numel() * tensor.element_size()
        memory = torch.full((self.BYTES + n + self.BYTES,), 0xA5, dtype=torch.uint8, device=tensor.device)
        self._zones.append((memory, n))
        return memory[self.BYTES : self.BYTES + n].view(tensor.dtype).view(tensor.shape).copy_(tensor)

    def check(self) -> None:
        for memory, n in self._zones:
            if not (torch.all(memory[: self.BYTES] == 0xA5) and torch.all(memory[self.BYTES + n :] == 0xA5)):
                raise AssertionError(f"memory beside a tensor of {n} bytes has been written to")


def _largest(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    """The largest difference in ulps of the larger number, or of the root mean square of its tensor."""
    most = 0.0
    for a, b in zip(ours, theirs, strict=True):
        x, y = a.double().cpu(), b.double().cpu()
        size = torch.maximum(x.abs(), y.abs()).clamp(min=float(y.square().mean().sqrt()))
        units = (x - y).abs() / (size * torch.finfo(a.dtype).eps)
        most = max(most, float(torch.where((x == y) | (x.isnan() & y.isnan()), 0.0, units.nan_to_num(math.inf)).max()))
    return most


def _refuse(found: dict[str, float]) -> None:
    if wrong := {name: ulps for name, ulps in found.items() if not ulps <= ULPS}:
        raise AssertionError(f"ulps from the eager engine: {wrong}")


PARTS = {
    "versions": versions,
    "rules": rules_alone,
    "optimizers": optimizers,
    "storage": storage,
    "states_on_host": states_on_host,
    "products": products,
    "graphs": graphs,
    "waiting": waiting,
}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--parts", nargs="+", choices=PARTS)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    command = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    known = json.loads(arguments.out.read_text(encoding="utf-8")) if arguments.out.exists() else {}
    parts = known.get("parts", {}) if known.get("commit") == commit else {}
    failed = 0
    for name in arguments.parts or [name for name in PARTS if not parts.get(name, {}).get("passed")]:
        begin = time.perf_counter()
        try:
            parts[name] = {"passed": True, **PARTS[name](arguments.device)}
        except Exception as error:  # it is the result of this part
            parts[name], failed = {"passed": False, "error": f"{type(error).__name__}: {error}"[:2000]}, failed + 1
        parts[name]["seconds"] = round(time.perf_counter() - begin, 1)
        print(name, json.dumps(parts[name]), flush=True)
        written = arguments.out.with_suffix(".new")
        written.write_text(json.dumps({"commit": commit, "parts": parts}, indent=1) + "\n", encoding="utf-8")
        written.replace(arguments.out)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
