"""A Triton driver without a GPU: kernels are compiled for a real target, launches are counted, and nothing is run.

With it the triton engine takes CPU tensors, so that what the host pays for a step can be measured on any Linux machine. All
of tristep's part and of the JIT compiler's is what it is on a GPU. Missing are the driver's part of a launch (to take the
arguments apart and queue it, a few µs) and, where something changed, of queueing one copy. The weights stay as they are. It
replaces the driver of the whole process, so use it in one of its own, without TRITON_INTERPRET.

    python benchmarks/fake_driver.py       prints the cost of Adam on 148 small tensors, and of compiling a kernel, as JSON
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget


class FakeDriver:
    """What Triton 3.5 to 3.9 ask of a driver, answered for one GPU of the given kind.

    Attributes:
        launches: of each launch the kernel's name, its grid, and the kernel's arguments.
        loads: the name of each kernel that was loaded, which happens once for each that is compiled.
    """

    def __init__(self, target: GPUTarget | None = None) -> None:
        self.target = target or GPUTarget("cuda", 90, 32)
        self.launches: list[tuple[str, tuple[int, int, int], tuple[Any, ...]]] = []
        self.loads: list[str] = []
        self.utils = self  # Triton asks some of its questions there
        self.launcher_cls = self._launcher

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 2**30}

    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple[int, int, int, int, int]:
        self.loads.append(name)
        return 1, 1, 0, 0, 1024  # module, function, registers, spilled bytes, threads of a block at most

    def unload_module(self, module: int) -> None:
        pass

    def _launcher(self, source: Any, metadata: Any) -> Callable[..., None]:
        name, record = metadata.name, self.launches.append

        def launch(x: int, y: int, z: int, *rest: Any) -> None:
            record((name, (x, y, z), rest[6:]))  # stream, function, two sets of metadata and two hooks come first

        return launch


def install(target: GPUTarget | None = None) -> FakeDriver:
    """Make a fake driver Triton's own, and let the triton engine of tristep take CPU tensors, for this process's lifetime.

    Raises:
        RuntimeError: TRITON_INTERPRET is set; kernels are then not compiled at all.
    """
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise RuntimeError("TRITON_INTERPRET=1: unset it, the interpreter knows no drivers")
    from tristep.kernels import choose_engine as choose

    driver = FakeDriver(target)
    triton.runtime.driver.set_active(driver)

    def choose_engine(device: torch.device, engine: str | None = None) -> str:
        asked = engine or os.environ.get("TRISTEP_ENGINE")
        return "triton" if asked == "triton" else choose(device, asked)

    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").startswith("tristep.") and vars(module).get("choose_engine") is choose:
            vars(module)["choose_engine"] = choose_engine
    return driver


def host_cost(step: Callable[[], None], prepare: Callable[[], None], repeats: int = 2000) -> float:
    """Median time of `step()` in microseconds, each after an untimed `prepare()`."""
    times = []
    for _ in range(repeats):
        prepare()
        start = time.perf_counter_ns()
        step()
        times.append(time.perf_counter_ns() - start)
    return statistics.median(times) / 1000


def measure(n_tensors: int = 148, elements: int = 8, repeats: int = 2000) -> dict[str, float]:
    """Cost of a step of Adam through `tristep.Trainer`: the same gradient tensors written anew, or new ones each time."""
    import tristep

    driver = install()
    parameters = [torch.nn.Parameter(torch.ones(elements)) for _ in range(n_tensors)]
    trainer = tristep.Trainer(parameters, "adam", engine="triton")
    kept = [torch.ones(elements) for _ in parameters]

    def rewrite() -> None:
        torch._foreach_zero_(kept)

    def replace() -> None:
        for parameter in parameters:
            parameter.grad = torch.ones(elements)

    def step() -> None:
        trainer.step(1)

    for parameter, gradient in zip(parameters, kept, strict=True):
        parameter.grad = gradient
    for _ in range(10):
        rewrite()
        step()
    driver.launches.clear()
    stable = host_cost(step, rewrite, repeats)
    launches = len(driver.launches) / repeats
    new = host_cost(step, replace, repeats)
    return {
        "launches_per_step": launches,
        "host_us_per_step_stable_gradients": round(stable, 1),
        "host_us_new_gradients": round(new, 1),
    }


def compiling(names: tuple[str, ...] = ("sgd", "adam", "adamw", "lion", "adan", "rmsprop_centered", "ftrl")) -> float:
    """Median time of the processor to compile these rules' kernels for sm_90, in seconds."""
    from tristep.kernels import rules
    from tristep.kernels.backends.triton.compile import compile_for

    times = []
    with tempfile.TemporaryDirectory() as folder, triton.knobs.cache.scope():
        triton.knobs.cache.dir = folder
        for name in names:
            start = time.process_time()
            compile_for(GPUTarget("cuda", 90, 32), getattr(rules, name))
            times.append(time.process_time() - start)
    return statistics.median(times)


if __name__ == "__main__":
    print(json.dumps(measure() | {"s_to_compile_a_kernel": round(compiling(), 3)}))
