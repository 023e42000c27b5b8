"""What a trainer saves: settings, counts, schedule and states of its optimizer; to a dict, and to a safetensors file.

Never pickle. A file is written beside its place, flushed, and then renamed; a loaded one is checked whole before anything
is changed.
"""

from __future__ import annotations

import json
import os
import tempfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch

from ..kernels.table import allocate_states
from . import lr_scheduler
from .optimizer import Optimizer, RuleOptimizer, Updater

__all__ = ["collect", "read", "restore", "write"]

FORMAT = 1
MASTER = "master"
_METADATA_KEY = "tristep"


def collect(updater: Updater, names: Sequence[str], params: Sequence[torch.Tensor]) -> dict[str, Any]:
    """The state of an updater whose parameters have these names: JSON-able data, and tensors under "state".

    Keys: "format", "optimizer" (name of its class), "settings", "lr_scheduler" (None where there is none or it is a plain
    callable), "num_update", "counts", "layout" (nesting of each parameter's state) and "state" (tensors by parameter
    and by slot).
    """
    optimizer = updater.optimizer
    state: dict[str, dict[str, torch.Tensor]] = {}
    layout: dict[str, Any] = {}
    for i, name in enumerate(names):
        if i not in updater.states:
            continue
        if isinstance(optimizer, RuleOptimizer):
            state[name] = dict(zip(optimizer.rule.state, updater.states[i], strict=True))
            if i in updater.masters:
                state[name][MASTER] = updater.masters[i]
        else:
            state[name] = {}
            layout[name] = _flatten(updater.states[i], "", state[name])
    counts = optimizer.counts
    return {
        "format": FORMAT,
        "optimizer": type(optimizer).__name__.lower(),
        "settings": optimizer.settings(),
        "lr_scheduler": _schedule(optimizer),
        "num_update": optimizer.num_update,
        "counts": {name: counts[i] for i, name in enumerate(names) if i in counts},
        "layout": layout,
        "state": state,
    }


def restore(updater: Updater, names: Sequence[str], params: Sequence[torch.Tensor], saved: Mapping[str, Any]) -> None:
    """Put a collected state back. All checks come first.

    Raises:
        ValueError, TypeError: it does not fit; nothing has been changed.
    """
    optimizer = updater.optimizer
    _check(optimizer, names, params, saved)
    schedule = saved["lr_scheduler"]
    scheduler = optimizer.lr_scheduler if schedule is None else lr_scheduler.from_config(schedule)
    if schedule is None and isinstance(scheduler, lr_scheduler.LRScheduler):
        scheduler = None  # it was saved without one, and a plain callable would not be an LRScheduler
    index = {name: i for i, name in enumerate(names)}
    states, masters = dict(updater.states), dict(updater.masters)
    for name, slots in saved["state"].items():
        i = index[name]
        if isinstance(optimizer, RuleOptimizer):
            (state,) = allocate_states([params[i]], len(slots))
            for new, old in zip(state, slots.values(), strict=True):
                new.copy_(old)
            found = dict(zip(slots, state, strict=True))
            if MASTER in found:
                masters[i] = found.pop(MASTER)
            states[i] = tuple(found[slot] for slot in _rule_state(optimizer, saved["settings"]))
        else:
            states[i] = _unflatten(saved["layout"][name], slots, params[i].device)
    for attribute, value in saved["settings"].items():
        setattr(optimizer, attribute, value)
    optimizer.lr_scheduler = scheduler
    optimizer._counts[optimizer.slots([index[name] for name in saved["counts"]])] = list(saved["counts"].values())
    optimizer.num_update = saved["num_update"]
    updater.states, updater.masters = states, masters
    updater.forget_plan()


def write(path: str | os.PathLike[str], collected: Mapping[str, Any]) -> None:
    """Write a collected state to `path`, replacing what is there only when the new file is complete."""
    path = Path(path)
    tensors = {
        json.dumps([name, slot]): tensor.detach().contiguous()
        for name, slots in collected["state"].items()
        for slot, tensor in slots.items()
    }
    header = {key: value for key, value in collected.items() if key != "state"}
    header["parameters"] = list(collected["state"])
    header["checksums"] = {key: _checksum(tensor) for key, tensor in tensors.items()}
    data = safetensors.torch.save(tensors, metadata={_METADATA_KEY: json.dumps(header)})
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def read(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read what `write` wrote.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not such a file, or its contents are damaged.
    """
    if not Path(path).exists():
        raise FileNotFoundError(f"fname={str(path)!r}: there is no such file")
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118  # it is not a dict
    except (safetensors.SafetensorError, OSError) as error:
        raise ValueError(f"fname={str(path)!r}: not a state file of tristep, or cut short ({error})") from error
    if _METADATA_KEY not in metadata:
        raise ValueError(f"fname={str(path)!r}: a safetensors file, but not one that Trainer.save_states wrote")
    header = json.loads(metadata[_METADATA_KEY])
    _check_format(header)
    checksums = header.pop("checksums")
    damaged = [key for key in checksums if key not in tensors or _checksum(tensors[key]) != checksums[key]]
    if damaged or len(checksums) != len(tensors):
        raise ValueError(f"fname={str(path)!r}: damaged; checksums differ for {', '.join(damaged[:5]) or 'extra tensors'}")
    state: dict[str, dict[str, torch.Tensor]] = {name: {} for name in header.pop("parameters")}
    for key in checksums:  # in the order of writing, which safetensors does not keep
        name, slot = json.loads(key)
        state[name][slot] = tensors[key]
    return header | {"state": state}


def _check_format(saved: Mapping[str, Any]) -> None:
    if saved.get("format") != FORMAT:
        raise ValueError(
            f"saved state has format {saved.get('format')!r}: this version of tristep reads format {FORMAT}; "
            "it may come from a newer version"
        )


def _check(optimizer: Optimizer, names: Sequence[str], params: Sequence[torch.Tensor], saved: Mapping[str, Any]) -> None:
    if not isinstance(saved, Mapping):
        raise TypeError(f"state_dict must be a dict, as Trainer.state_dict gives it, got {type(saved).__name__}")
    _check_format(saved)
    keys = {"format", "optimizer", "settings", "lr_scheduler", "num_update", "counts", "layout", "state"}
    if missing := sorted(keys - set(saved)):
        raise ValueError(f"saved state lacks {', '.join(missing)}: it must be as Trainer.state_dict gave it")
    mine = type(optimizer).__name__.lower()
    if saved["optimizer"] != mine:
        raise ValueError(
            f"saved state is of optimizer {saved['optimizer']!r}, this trainer has {mine!r}: make the trainer with "
            f"Trainer(params, {saved['optimizer']!r}) to load it"
        )
    if unknown := sorted(set(saved["settings"]) - set(optimizer.settings())):
        raise ValueError(f"saved state has settings that {type(optimizer).__name__} does not know: {', '.join(unknown)}")
    if other := sorted((set(saved["counts"]) | set(saved["state"])) - set(names)):
        raise ValueError(
            f"saved state has parameters that this trainer does not: {', '.join(other[:5])}; "
            f"this trainer's are {', '.join(list(names)[:5])}{', ...' if len(names) > 5 else ''}"
        )
    shapes = dict(zip(names, params, strict=True))
    for name, slots in saved["state"].items():
        weight = shapes[name]
        for slot, tensor in slots.items():
            if not isinstance(tensor, torch.Tensor):
                raise TypeError(f"saved state: {slot} of {name!r} must be a tensor, got {type(tensor).__name__}")
            if isinstance(optimizer, RuleOptimizer) and tensor.shape != weight.shape:
                raise ValueError(
                    f"saved state: {slot} of {name!r} has shape {tuple(tensor.shape)}, its parameter {tuple(weight.shape)}"
                )
        if isinstance(optimizer, RuleOptimizer):
            wanted = {*_rule_state(optimizer, saved["settings"])}
            if set(slots) - {MASTER} != wanted:
                raise ValueError(
                    f"saved state: {name!r} has {', '.join(slots) or 'no tensors'}; its rule has {', '.join(sorted(wanted))}"
                )
            (like,) = allocate_states([torch.empty(0, dtype=weight.dtype)], 1)
            for slot, tensor in slots.items():
                if tensor.dtype != like[0].dtype:
                    raise ValueError(
                        f"saved state: {slot} of {name!r} is {tensor.dtype}; for a weight of {weight.dtype} it must be "
                        f"{like[0].dtype}"
                    )


def _rule_state(optimizer: RuleOptimizer, settings: Mapping[str, Any]) -> tuple[str, ...]:
    """The state names of the rule that the optimizer has with these settings, which may decide which rule it is."""
    now = optimizer.settings()
    try:
        for attribute, value in settings.items():
            setattr(optimizer, attribute, value)
        return optimizer.rule.state
    finally:
        for attribute, value in now.items():
            setattr(optimizer, attribute, value)


def _schedule(optimizer: Optimizer) -> dict[str, Any] | None:
    scheduler = optimizer.lr_scheduler
    return scheduler.to_config() if isinstance(scheduler, lr_scheduler.LRScheduler) else None


def _flatten(state: Any, path: str, into: dict[str, torch.Tensor]) -> Any:
    """The nesting of a state that a user's optimizer made; its tensors go `into` a flat dict."""
    if state is None:
        return None
    if isinstance(state, torch.Tensor):
        into[path or "0"] = state
        return path or "0"
    if isinstance(state, (tuple, list)):
        return [_flatten(item, f"{path}.{k}" if path else str(k), into) for k, item in enumerate(state)]
    raise TypeError(f"a state to save is None, a tensor, or a tuple or list of such; got {type(state).__name__}")


def _unflatten(layout: Any, tensors: Mapping[str, torch.Tensor], device: torch.device) -> Any:
    if layout is None:
        return None
    if isinstance(layout, str):
        return tensors[layout].clone().to(device)
    return tuple(_unflatten(item, tensors, device) for item in layout)


def _checksum(tensor: torch.Tensor) -> int:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return zlib.crc32(flat.view(torch.uint8).numpy().data) if flat.numel() else 0
