"""The generators of random numbers that training depends on: torch's, on the CPU and on GPUs, NumPy's and Python's."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

__all__ = ["check_random_state", "random_state", "set_random_state"]


def random_state() -> dict[str, Any]:
    """What decides the next random numbers of torch, on the CPU and on GPUs in use, NumPy and Python."""
    gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    return {"torch": torch.get_rng_state(), "gpus": gpus, "numpy": np.random.get_state(), "python": random.getstate()}  # noqa: NPY002


def set_random_state(state: Mapping[str, Any]) -> None:
    """Go back to what `random_state` has given."""
    torch.set_rng_state(state["torch"])
    if state["gpus"] is not None:
        torch.cuda.set_rng_state_all(state["gpus"])
    np.random.set_state(state["numpy"])  # noqa: NPY002
    random.setstate(state["python"])


def check_random_state(state: Mapping[str, Any]) -> None:
    """Refuse what `random_state` has not given, before anything is changed; GPUs must be those that there are.

    Raises:
        TypeError, ValueError, RuntimeError, LookupError: it is no such state.
    """
    torch.Generator().set_state(state["torch"])
    np.random.RandomState().set_state(state["numpy"])
    random.Random().setstate(state["python"])
    if state["gpus"] is not None and len(state["gpus"]) != torch.cuda.device_count():
        raise ValueError(f"random numbers are of {len(state['gpus'])} GPUs, here are {torch.cuda.device_count()}")
