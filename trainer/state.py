"""The state of a training: collected from, and loaded into, the replicas, a store and a loss scaler."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from . import checkpoint
from .step import Stepper

__all__ = ["collect_state", "load_file", "load_read", "load_state"]


def collect_state(stepper: Stepper, scaler: Any, ascended: bool) -> dict[str, Any]:
    """See `Trainer.state_dict`; `ascended` is whether the weights are displaced."""
    if ascended:
        raise RuntimeError(
            "between ascend() and step() the weights are not those that training goes on with, and nothing is to be "
            "saved: save after step()"
        )
    if not stepper.is_alone:
        stepper.start()
    state, residuals, first = stepper.sync.state_dict(), stepper.sync.residuals(), stepper.replicas[0]
    if state is None:
        state = checkpoint.collect(first.updater, first.names, first.params)
    if residuals:
        state["residuals"] = residuals
    return state if scaler is None else state | {"loss_scaler": scaler.state_dict()}


def load_file(load: Callable[[dict[str, Any]], None], fname: str | os.PathLike[str]) -> None:
    """Call `load` with what is in a file of states."""
    load_read(load, checkpoint.read(fname), f"fname={str(fname)!r}")


def load_read(load: Callable[[dict[str, Any]], None], state: dict[str, Any], name: str) -> None:
    """Call `load` with what was read; errors of contents of another kind become ValueError with this name."""
    try:
        load(state)
    except (TypeError, LookupError, AttributeError, ArithmeticError) as error:
        raise ValueError(f"{name}: not a state of such a trainer ({error})") from error


def load_state(stepper: Stepper, scaler: Any, saved: Mapping[str, Any]) -> None:
    """See `Trainer.load_state_dict`."""
    saved = checkpoint.with_plain_names(saved)
    scaling = saved.get("loss_scaler") if isinstance(saved, Mapping) else None
    if scaling is not None:
        if scaler is None:
            raise ValueError(
                "saved state has a loss scaler, this trainer has none: call tristep.amp.init_trainer(trainer) before"
            )
        scaler.check(scaling)
    residuals = saved.get("residuals", {}) if isinstance(saved, Mapping) else {}
    _check_residuals(stepper.replicas[0].names, stepper.replicas[0].params, residuals)
    if not stepper.is_alone:
        stepper.start()
    if stepper.sync.updates:
        stepper.sync.load_state_dict(saved)
    else:
        for replica in stepper.replicas:
            checkpoint.restore(replica.updater, replica.names, replica.params, saved)
    stepper.sync.load_residuals(residuals)
    for replica in stepper.replicas:
        replica.forget_counts()
    if scaling is not None:
        scaler.load_state_dict(scaling)


def _check_residuals(names: Sequence[str], params: Sequence[torch.Tensor], saved: Any) -> None:
    """Refuse what no exchange of a trainer with these parameters gave as its residuals.

    Raises:
        TypeError, ValueError: it does not fit.
    """
    if not isinstance(saved, Mapping):
        raise TypeError(f"saved state: residuals must be a dict, got {type(saved).__name__}")
    by_name = dict(zip(names, params, strict=True))
    for name, sources in saved.items():
        if name not in by_name:
            raise ValueError(f"saved state: {name!r} has residuals, but is not among this trainer's parameters")
        for source, tensor in sources.items():
            if not isinstance(tensor, torch.Tensor):
                raise TypeError(f"saved state: residual {source} of {name!r} must be a tensor, got {type(tensor).__name__}")
            shape = checkpoint.shape_of(by_name[name])
            if shape not in (None, list(tensor.shape)) or tensor.dtype != torch.float32:
                raise ValueError(
                    f"saved state: residual {source} of {name!r} is {tensor.dtype} {tuple(tensor.shape)}: it must be "
                    f"torch.float32 {() if shape is None else tuple(shape)}"
                )
