"""Call a compiled loop on several threads."""

from __future__ import annotations

import ctypes
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import torch

forked: list[bool] = []  # not empty if this process was forked after this module was imported
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: forked.append(True))
PARALLEL_FROM = 100_000  # elements; below, handing work to a thread costs more than it saves


def run_threads(function: int, shared: int, threads: int) -> None:
    """Call the C function at this address with `shared` on that many threads, and wait for all."""
    # OpenMP would wait forever for the parent's threads, which a forked child does not have.
    parallel = None if forked else openmp()
    if parallel is not None:
        parallel(function, shared, threads, 0)
        return
    call = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function)
    pool = _pool(max(threads - 1, 1))
    waiting = [pool.submit(call, shared) for _ in range(threads - 1)]
    call(shared)
    for future in waiting:
        future.result()


@cache
def openmp() -> Any:
    """Return `GOMP_parallel` of the OpenMP library that torch uses, or None if the library has no such function.

    Its threads spin for some milliseconds after torch's operations. Threads of another library would have to share the cores
    with them: on two cores, a quarter of the speed was measured.
    """
    file = "libtorch_cpu.dylib" if sys.platform == "darwin" else "libtorch_cpu.so"
    try:
        parallel: Any = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / file)).GOMP_parallel
    except (OSError, AttributeError):
        return None
    parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    parallel.restype = None
    return parallel


_pools: dict[tuple[int, int], ThreadPoolExecutor] = {}


def _pool(size: int) -> ThreadPoolExecutor:
    # Keyed by process, because a forked child has none of its parent's threads.
    key = (os.getpid(), size)
    if key not in _pools:
        _pools[key] = ThreadPoolExecutor(size, thread_name_prefix="tristep")
    return _pools[key]
