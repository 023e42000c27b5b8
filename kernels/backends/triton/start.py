"""Test whether Triton can run kernels on a GPU, by running one; and a context for compiling kernels without hooks."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch
import triton
from triton.backends import backends

from ... import streams
from ..folders import absolute_folder, usable_folder


@cache
def problem_of(device: torch.device) -> str:
    """Return why Triton can run no kernel on this GPU, and what to do; "" if it can. Each device is tried once.

    If Triton's folder for compiled code cannot be written, it gets a temporary one, with a warning.
    """
    if not hasattr(triton, "constexpr_function"):  # which kernels call
        return f"Triton {triton.__version__} is older than 3.5, which torch 2.9 brings: update torch"
    needed = {"cuda": "amd" if torch.version.hip else "nvidia", "xpu": "intel"}[device.type]
    if needed not in backends:
        names = ", ".join(backends) or "none"
        return (
            f"Triton {triton.__version__} has no backend named {needed!r} (it has {names}): install torch's build for "
            "this GPU anew, which brings the Triton that belongs to it"
        )
    wanted = Path(triton.knobs.cache.dir)
    folder = usable_folder(absolute_folder(wanted), "TRITON_CACHE_DIR")
    if folder not in (None, wanted):  # to set it changes the environment, too
        triton.knobs.cache.dir = str(folder)
    try:
        with streams.on_device(device), unhooked():
            _nothing[(1,)](torch.empty(1, device=device), enable_fp_fusion=False)
    except Exception as error:  # of whatever kind: it is what the user is told
        return _explained(error)
    return ""


@contextmanager
def unhooked() -> Iterator[None]:
    """Return a context in which Triton calls none of the process's hooks for compiled kernels.

    For a hook Triton writes the constants as JSON, which fails for types in a tuple and, up to 3.6, for functions.
    """
    knobs = triton.knobs.runtime
    hooks = knobs.jit_cache_hook, knobs.jit_post_compile_hook
    if hooks == (None, None):
        yield
        return
    knobs.jit_cache_hook = knobs.jit_post_compile_hook = None
    try:
        yield
    finally:
        knobs.jit_cache_hook, knobs.jit_post_compile_hook = hooks


def _explained(error: Exception) -> str:
    message = " ".join(f"{type(error).__name__}: {error}".rstrip(".").split())
    if "C compiler" in message:
        remedy = "install a C compiler, such as gcc, with which Triton builds its launcher, or name one in CC"
    elif isinstance(error, subprocess.CalledProcessError):
        message = f"the C compiler that Triton called has failed with status {error.returncode}"
        remedy = "what it printed names what is missing, often the headers of Python (python3-dev), or libcuda.so"
    elif "libcuda" in message:
        remedy = "name the folder of the driver's libcuda.so in TRITON_LIBCUDA_PATH"
    elif "active drivers" in message:
        remedy = "it needs a driver for this GPU, and GPUs of one vendor, or the one to take in TRITON_DEFAULT_BACKEND"
    else:
        remedy = "see whether a kernel of Triton's tutorials runs there"
    return f"{message}; {remedy}"


@triton.jit
def _nothing(pointer):
    pass
