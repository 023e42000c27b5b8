"""Which backend runs a rule: triton on GPUs, cpu (numba) on CPUs, eager torch anywhere. Each is imported on first use."""

from __future__ import annotations

import difflib
import importlib.util
import os
import warnings
from functools import cache
from typing import Any

import torch

from ..language import Rule, TensorRule

__all__ = ["ENGINES", "choose_engine", "engine_for", "has_numba", "has_triton", "launch_class"]

ENGINES = ("triton", "cpu", "eager")
_OTHER_NAMES = {"gpu": "triton", "cuda": "triton", "numba": "cpu", "native": "cpu", "torch": "eager"}


def choose_engine(device: torch.device, engine: str | None = None) -> str:
    """The engine for tensors on `device`.

    Args:
        device: where the tensors are.
        engine: "triton", "cpu", "eager", or None for the environment variable TRISTEP_ENGINE and, without that or where
            that engine does not work on this device, the best there is: triton on a GPU, cpu (numba) on the CPU, eager
            elsewhere or where the library is missing. Where Triton is installed and can run no kernel on the GPU, that is
            eager, with a warning that tells why.

    Raises:
        ValueError: no such engine, or it cannot work on this device.
        ModuleNotFoundError: the engine asked for needs a library that is not installed.
        RuntimeError: engine "triton" was asked for, and Triton can run no kernel on this GPU.
    """
    if engine is not None and not isinstance(engine, str):
        raise TypeError(
            f"engine={engine!r}: must be one of {', '.join(map(repr, ENGINES))}, or None, not {type(engine).__name__}"
        )
    asked = engine or os.environ.get("TRISTEP_ENGINE") or None
    gpu = device.type in ("cuda", "xpu")
    if asked is not None and asked not in ENGINES:
        close = [_OTHER_NAMES[asked]] if asked in _OTHER_NAMES else difflib.get_close_matches(asked, ENGINES, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        what = "engine" if engine else "TRISTEP_ENGINE"
        raise ValueError(f"{what}={asked!r}: must be one of {', '.join(map(repr, ENGINES))}, or None.{hint}")
    # The variable is for a whole process, which may have tensors on a GPU and others on the CPU, as the store "local" has.
    elsewhere = {"triton": not gpu and os.environ.get("TRITON_INTERPRET") != "1", "cpu": device.type != "cpu"}
    if asked is None or (not engine and elsewhere.get(asked)):
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
        if elsewhere["triton"]:
            raise ValueError(
                f"engine='triton' needs tensors on a GPU, these are on {device}: move the model to a GPU, leave engine out, "
                "or set TRITON_INTERPRET=1 before Python starts to run the kernels slowly on the CPU"
            )
        if gpu and (problem := _problem_of_triton(device)):
            raise RuntimeError(f"engine='triton' cannot run on {device}: {problem}; or leave engine out")
    if asked == "cpu":
        if elsewhere["cpu"]:
            raise ValueError(f"engine='cpu' needs tensors on the CPU, these are on {device}: leave engine out")
        if not has_numba():
            raise ModuleNotFoundError("engine='cpu' needs the package numba: pip install numba, or engine='eager'")
    return asked


def _problem_of_triton(device: torch.device) -> str:
    """Why Triton can run no kernel on this GPU, and what to do; nothing if it can."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        return ""
    try:
        from .triton.start import problem_of
    except Exception as error:  # of an older Triton, or one that is there in part
        return f"{type(error).__name__}: {error}; install torch's build for this GPU anew, which brings the Triton for it"
    return problem_of(device)


@cache
def _warn(device: torch.device, problem: str) -> None:
    """Say once why steps are slow."""
    warnings.warn(
        f"Triton cannot run on {device}, where torch computes steps instead, more slowly (engine='eager'): {problem}",
        stacklevel=3,
    )


def engine_for(rule: Rule | TensorRule, device: torch.device, asked: str | None) -> str:
    """The engine for a rule; torch itself computes those of whole tensors, whatever was asked for."""
    chosen = choose_engine(device, asked)
    return "eager" if isinstance(rule, TensorRule) else chosen


def launch_class(engine: str, whole: bool = False) -> Any:
    """The engine's class of `Launch`.

    Args:
        engine: one of `ENGINES`.
        whole: whether for rules of whole tensors.
    """
    # Imported here, so that nobody pays for a backend that is not used.
    if engine == "triton":
        from .triton.launch import TritonLaunch

        return TritonLaunch
    if engine == "cpu":
        from .cpu.launch import CpuLaunch

        return CpuLaunch
    from .eager import EagerLaunch, WholeLaunch

    return WholeLaunch if whole else EagerLaunch


def has_triton() -> bool:
    """Whether triton can be imported here (there is none for macOS and Windows). Does not import it."""
    return importlib.util.find_spec("triton") is not None


def has_numba() -> bool:
    """Whether numba can be imported here. Does not import it."""
    return importlib.util.find_spec("numba") is not None
