"""State files: a collected state as a safetensors file with JSON in its metadata."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

import torch

from .. import files
from .check import check_form, check_format

_SECTIONS: dict[str, tuple[str, ...]] = {"state": (), "residuals": ("residual",)}  # of tensors, and what marks their keys


def write(path: str | os.PathLike[str], collected: Mapping[str, Any]) -> None:
    """Write a collected state to `path`, replacing what is there only when the new file is complete."""
    tensors = {
        json.dumps([name, slot, *section]): tensor.detach().contiguous()
        for key, section in _SECTIONS.items()
        for name, slots in collected.get(key, {}).items()
        for slot, tensor in slots.items()
    }
    header = {key: value for key, value in collected.items() if key not in _SECTIONS}
    files.write_tensors("fname", path, header | {"states of": list(collected["state"])}, tensors)


def read(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read what `write` wrote.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not such a file, or its contents are damaged.
    """
    with files.contents("fname", path, f"a state file of tristep{_hint(path)}"):
        found = files.read_tensors(path)
        if found is not None:
            return _put_together(*found)
    raise ValueError(f"fname={str(path)!r}: a safetensors file, but not one that Trainer.save_states wrote")


def _hint(path: str | os.PathLike[str]) -> str:
    """For a file of MXNet's Trainer, which is a pickle."""
    if not os.path.isfile(path):
        return ""
    with open(path, "rb") as file:
        begin = file.read(2)
    return " (tristep.load_mxnet_states reads those of MXNet)" if begin[:1] == b"\x80" and begin[1:] <= b"\x05" else ""


def _put_together(header: dict[str, Any], tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """What was collected, from a file's header and tensors, which are there by JSON texts of names."""
    check_format(header)
    state: dict[str, dict[str, torch.Tensor]] = {name: {} for name in header.pop("states of")}
    residuals: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in tensors.items():
        name, slot, *section = json.loads(key)
        if not (isinstance(name, str) and isinstance(slot, str) and section in ([], ["residual"])):
            raise ValueError(f"a tensor has the name {key!r}")
        (residuals.setdefault(name, {}) if section else state[name])[slot] = tensor
    saved = header | {"state": state} | ({"residuals": residuals} if residuals else {})
    check_form(saved)
    return saved
