"""Choose the backend of a rule: triton on GPUs, cpu (numba) on CPUs, eager torch anywhere; imported on first use."""

from __future__ import annotations

import importlib.util
import os
import warnings
from collections.abc import Callable
from contextvars import ContextVar
from functools import cache
from typing import Any

import torch

from ..language import Rule, StagedRule, TensorRule
from ..messages import instance, one_of

__all__ = [
    "ENGINES",
    "asked_engine",
    "choose_engine",
    "computed_by",
    "engine_for",
    "has_numba",
    "has_triton",
    "launch_class",
]

ENGINES = ("triton", "cpu", "eager")
_ALLOWED = f"one of {', '.join(map(repr, ENGINES))}, or None"
# The engine that the user of the rule of whole tensors that is being computed has asked for.
asked_engine: ContextVar[str | None] = ContextVar("asked_engine", default=None)
_OTHER_NAMES = {"gpu": "triton", "cuda": "triton", "numba": "cpu", "native": "cpu", "torch": "eager"}


def choose_engine(device: torch.device, engine: str | None = None) -> str:
    """Return the name of the engine that updates tensors on `device`: "triton", "cpu" or "eager".

    Args:
        device: the device of the tensors.
        engine: "triton", "cpu", "eager" or None (default). None means the environment variable TRISTEP_ENGINE. If that is
            not set or does not work on this device, it means triton on a GPU, cpu (numba) on the CPU, and eager elsewhere
            or if the library is missing. If Triton is installed but can run no kernel on the GPU, it means eager, with a
            warning that tells why.

    Raises:
        TypeError: `engine` is neither a string nor None.
        ValueError: there is no engine of this name, or it does not work on this device.
        ModuleNotFoundError: `engine` needs a library that is not installed.
        RuntimeError: `engine` is "triton", and Triton can run no kernel on this GPU.
    """
    instance("engine", engine, (str, type(None)), _ALLOWED, shown=True)
    asked = engine or os.environ.get("TRISTEP_ENGINE") or None
    gpu = device.type in ("cuda", "xpu")
    if asked is not None and asked not in ENGINES:
        what = "engine" if engine else "TRISTEP_ENGINE"
        raise ValueError(f"{what}={asked!r}:{one_of(asked, ENGINES, _OTHER_NAMES)}, or None")
    # The variable is for a whole process, which may have tensors on both a GPU and the CPU, as the store "local" has.
    unsuited = {"triton": not gpu and os.environ.get("TRITON_INTERPRET") != "1", "cpu": device.type != "cpu"}
    if asked is None or (not engine and unsuited.get(asked)):
        if gpu and has_triton():
            if problem := _problem_of_triton(device):
                _warn(device, problem)
            return "eager" if problem else "triton"
        return "cpu" if device.type == "cpu" and has_numba() else "eager"
    if asked == "triton":
        if not has_triton():
            raise ModuleNotFoundError(
                "engine='triton' needs Triton, which is missing: torch's builds for GPUs bring it; otherwise, on Linux, "
                "pip install 'tristep[triton]'; or leave engine out"
            )
        if unsuited["triton"]:
            raise ValueError(
                f"engine='triton' needs tensors on a GPU, these are on {device}: move the model to a GPU, leave engine out, "
                "or set TRITON_INTERPRET=1 before Python starts to run the kernels slowly on the CPU"
            )
        if gpu and (problem := _problem_of_triton(device)):
            raise RuntimeError(f"engine='triton' cannot run on {device}: {problem}; or leave engine out")
    if asked == "cpu":
        if unsuited["cpu"]:
            raise ValueError(f"engine='cpu' needs tensors on the CPU, these are on {device}: leave engine out")
        if not has_numba():
            raise ModuleNotFoundError("engine='cpu' needs the package numba: pip install numba, or engine='eager'")
    return asked


def _problem_of_triton(device: torch.device) -> str:
    """Return why Triton can run no kernel on this GPU, and what to do; "" if it can."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        return ""
    try:
        from .triton.start import problem_of
    except Exception as error:  # an older or incomplete Triton
        return f"{type(error).__name__}: {error}; install torch's build for this GPU anew, which brings the Triton for it"
    return problem_of(device)


@cache
def _warn(device: torch.device, problem: str) -> None:
    warnings.warn(
        f"Triton cannot run on {device}, where torch computes steps instead, more slowly (engine='eager'): {problem}",
        stacklevel=3,
    )


def engine_for(rule: Rule | TensorRule, device: torch.device, asked: str | None, in_order: bool = True) -> str:
    """Return `choose_engine`, but "eager" for a rule of whole tensors and for tensors that are not `in_order`.

    Only torch finds the rows of matrices in any order of elements. Of a staged rule the elementwise parts run on the engine.
    """
    chosen = choose_engine(device, asked)
    whole = isinstance(rule, TensorRule) and not isinstance(rule, StagedRule)
    return "eager" if whole or not in_order else chosen


def computed_by(engine: str | None, function: Callable[..., Any], *arguments: Any) -> Any:
    """Return what the function returns while `engine` is the `asked_engine`."""
    before = asked_engine.set(engine)
    try:
        return function(*arguments)
    finally:
        asked_engine.reset(before)


def launch_class(engine: str, whole: bool = False) -> Any:
    # Imported here, because backends that are not used should cost nothing.
    if whole and engine != "eager":
        from .staged import StagedLaunch

        return StagedLaunch
    if engine == "triton":
        from .triton.launch import TritonLaunch

        return TritonLaunch
    if engine == "cpu":
        from .cpu.launch import CpuLaunch

        return CpuLaunch
    from .eager import EagerLaunch, WholeLaunch

    return WholeLaunch if whole else EagerLaunch


def has_triton() -> bool:
    """Return whether Triton is installed, without importing it."""
    return importlib.util.find_spec("triton") is not None


def has_numba() -> bool:
    """Return whether numba is installed, without importing it."""
    return importlib.util.find_spec("numba") is not None
