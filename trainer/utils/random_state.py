"""Save, check and restore the global random-number generators: torch's, on the CPU and on GPUs, NumPy's and Python's."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
import torch

_WORDS = 624  # the words of a Mersenne twister, which all three generators are on the CPU


def random_state() -> dict[str, Any]:
    """Return the states of the global random-number generators of torch, on the CPU and on GPUs in use, NumPy and Python."""
    return torch_state() | {"numpy": np.random.get_state(), "python": random.getstate()}  # noqa: NPY002


def set_random_state(state: Mapping[str, Any]) -> None:
    set_torch_state(state)
    np.random.set_state(state["numpy"])  # noqa: NPY002
    random.setstate(state["python"])


def torch_state() -> dict[str, Any]:
    """Return the states of torch's generators alone, which takes a tenth of the time."""
    gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    return {"torch": torch.get_rng_state(), "gpus": gpus}


def set_torch_state(state: Mapping[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    if state["gpus"] is not None:
        torch.cuda.set_rng_state_all(state["gpus"])


def check_random_state(state: Any, with_gpus: bool = True) -> None:
    """Raise ValueError if `state` is no result of `random_state`, for example from a damaged file.

    Some generators do not check whether the position in a state is among their words, and would read other memory. With
    `with_gpus`, the states of GPUs must be as many as this machine has GPUs, and fit them.
    """
    if not isinstance(state, Mapping) or set(state) != {"torch", "gpus", "numpy", "python"}:
        raise ValueError("random numbers: must be the states of torch, gpus, numpy and python")
    try:
        _check_torch(state["torch"])
        _check_numpy(state["numpy"])
        _check_python(state["python"])
        _check_gpus(state["gpus"], with_gpus)
    except (TypeError, RuntimeError, LookupError, AttributeError, OverflowError) as error:
        raise ValueError(f"random numbers: {error}") from error


def _check_torch(state: torch.Tensor) -> None:
    torch.Generator().set_state(state)  # checks the size and each number, but not whether two numbers fit together
    varying, positions = _torch_positions()
    if state.numpy()[varying].tobytes() not in positions:
        raise ValueError("random numbers of torch have a position that is not among their words")
    for dtype in (torch.float32, torch.float64):
        # The state may have the second normal number of the last pair, which is drawn next.
        if not torch.randn(1, dtype=dtype, generator=torch.Generator().set_state(state)).isfinite():
            raise ValueError("random numbers of torch have a normal number that is not finite")


@cache
def _torch_positions() -> tuple[np.ndarray, set[bytes]]:
    """Return which bytes of a state change when numbers are drawn, as a mask, and all values of these bytes."""
    generator = torch.Generator()
    states = [generator.get_state().numpy()]
    for _ in range(_WORDS):
        torch.rand(1, generator=generator)
        states.append(generator.get_state().numpy())
    varying = (np.stack(states[1:]) != states[1]).any(0)
    return varying, {state[varying].tobytes() for state in states}


def _check_numpy(state: Any) -> None:
    kind, words, position, has_gauss, gauss = state
    np.random.RandomState().set_state(state)  # the words and the kind
    if not (isinstance(words, np.ndarray) and words.dtype == np.uint32 and words.shape == (_WORDS,)):
        raise ValueError(f"random numbers of NumPy ({kind}) must have {_WORDS} words of 32 bits")
    if not (type(position) is int and 0 <= position <= _WORDS):
        raise ValueError(f"random numbers of NumPy have position {position!r}: must be an integer from 0 to {_WORDS}")
    if has_gauss not in (0, 1) or type(has_gauss) is not int or type(gauss) is not float or not math.isfinite(gauss):
        raise ValueError(
            f"random numbers of NumPy have {has_gauss!r} and {gauss!r} of a normal number: must be 0 or 1, a finite float"
        )


def _check_python(state: Any) -> None:
    random.Random().setstate(state)  # the words, their count and the position
    version, words, gauss = state
    if version != 3 or not all(type(word) is int and 0 <= word < 2**32 for word in words[:-1]):
        raise ValueError("random numbers of Python must be of version 3, with words of 32 bits")
    if not (gauss is None or (type(gauss) is float and math.isfinite(gauss))):
        raise ValueError(f"random numbers of Python have {gauss!r} as a normal number: must be a finite float, or None")


def _check_gpus(states: Any, are_here: bool) -> None:
    if states is None:
        return
    if not (isinstance(states, (list, tuple)) and states and all(map(_is_bytes, states))):
        raise ValueError("random numbers of GPUs must be a list with a tensor of bytes for each GPU, or None")
    if not are_here:
        return
    if len(states) != torch.cuda.device_count():
        raise ValueError(f"random numbers are of {len(states)} GPUs, here are {torch.cuda.device_count()}")
    for state in states:
        torch.Generator("cuda").set_state(state)


def _is_bytes(state: Any) -> bool:
    return isinstance(state, torch.Tensor) and state.dtype == torch.uint8 and state.dim() == 1 and state.numel() > 0
