"""Helpers for training on several devices in one process: replicas of a module, and a batch split into as many parts."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch

from ..validation import boolean, instance, integer


def replicate(module: torch.nn.Module, devices: Sequence[torch.device | str]) -> list[torch.nn.Module]:
    """Return deep copies of a module, one on each device, for `Trainer([copy, copy, ...])`.

    Multipliers and other attributes of parameters are copied, too; gradients are not. The module itself stays as it is.

        nets = tristep.replicate(net, devices)
        trainer = tristep.Trainer(nets, "adam")
        for x, y in data:
            parts = zip(nets, tristep.split_and_load(x, devices), tristep.split_and_load(y, devices))
            for net, x_part, y_part in parts:
                loss(net(x_part), y_part).sum().backward()
            trainer.step(batch_size=len(x))
            trainer.zero_grad()

    Args:
        module: the module to copy; its parameters must be initialized.
        devices: one or more devices, with repetitions if several copies share a device.

    Raises:
        TypeError, ValueError: `module` is no module, a parameter is not initialized, or `devices` is no list of devices.

    Example:
        >>> import torch, tristep
        >>> copies = tristep.replicate(torch.nn.Linear(2, 1), ["cpu", "cpu"])
        >>> torch.equal(copies[0].weight, copies[1].weight)
        True
    """
    instance("module", module, torch.nn.Module, "a torch.nn.Module")
    places = _devices("devices", devices)
    for name, parameter in module.named_parameters():
        if isinstance(parameter, torch.nn.UninitializedParameter):
            raise ValueError(f"module: {name!r} is not initialized yet: run the model once before it is copied")
    copies = [copy.deepcopy(module).to(place) for place in places]
    for replica in copies:
        for new, old in zip(replica.parameters(), module.parameters(), strict=True):
            vars(new).update(vars(old))
    return copies


def split_data(data: torch.Tensor, num_slice: int, batch_axis: int = 0, even_split: bool = True) -> list[torch.Tensor]:
    """Split a batch into parts, and return views of them, in order.

    Args:
        data: a batch, a tensor.
        num_slice: the number of parts, >= 1.
        batch_axis: the axis of the samples.
        even_split: True raises an error if the batch does not divide evenly; False gives the first parts one sample more,
            and the last ones may be empty.

    Raises:
        TypeError: `data` is no tensor, or another argument has the wrong type.
        ValueError: `data` has no such axis, or does not divide evenly.

    Example:
        >>> import torch, tristep
        >>> [len(part) for part in tristep.split_data(torch.zeros(5, 2), 2, even_split=False)]
        [3, 2]

    Source: MXNet 1.9.1, `gluon.utils.split_data`.
    """
    instance("data", data, torch.Tensor, "a tensor")
    num_slice = integer("num_slice", num_slice, low=1)
    axis = integer("batch_axis", batch_axis)
    if not -data.dim() <= axis < data.dim():
        raise ValueError(f"batch_axis={batch_axis!r}: data has {data.dim()} axes, so it must be from 0 to {data.dim() - 1}")
    if boolean("even_split", even_split) and data.shape[axis] % num_slice:
        raise ValueError(
            f"data of shape {tuple(data.shape)} does not divide into {num_slice} equal parts along axis {axis}: take a "
            f"batch size that is a multiple of {num_slice}, or even_split=False"
        )
    return list(torch.tensor_split(data, num_slice, dim=axis))


def split_and_load(
    data: Any, ctx_list: Sequence[torch.device | str], batch_axis: int = 0, even_split: bool = True
) -> list[torch.Tensor]:
    """Split a batch into one part for each device, and return the parts, each on its device.

    Args:
        data: a batch, a tensor or anything that `torch.as_tensor` takes.
        ctx_list: one or more devices, such as `["cuda:0", "cuda:1"]`.
        batch_axis: the axis of the samples.
        even_split: True raises an error if the batch does not divide evenly; False gives the first parts one sample more,
            and the last ones may be empty.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: `data` has no such axis or does not divide evenly, or `ctx_list` has no valid devices.

    Example:
        >>> import torch, tristep
        >>> parts = tristep.split_and_load([[1.0], [2.0]], ["cpu", "cpu"])
        >>> parts[1]
        tensor([[2.]])

    Source: MXNet 1.9.1, `gluon.utils.split_and_load`.
    """
    places = _devices("ctx_list", ctx_list)
    data = torch.as_tensor(data)
    parts = [data] if len(places) == 1 else split_data(data, len(places), batch_axis, even_split)
    # Asynchronously to GPUs only: on the CPU a program could read a part before it has arrived.
    return [part.to(place, non_blocking=place.type != "cpu") for part, place in zip(parts, places, strict=True)]


def _devices(name: str, devices: Any) -> list[torch.device]:
    if isinstance(devices, (str, torch.device)) or not isinstance(devices, Sequence):
        raise TypeError(f"{name}={devices!r}: must be a list of devices, such as ['cuda:0', 'cuda:1']")
    if not devices:
        raise ValueError(f"{name} is empty: must have at least one device")
    for device in devices:
        if not isinstance(device, (str, torch.device)):
            raise TypeError(f"{name} has {device!r}: must be a torch.device or its name, not {type(device).__name__}")
    try:
        return [torch.device(device) for device in devices]
    except RuntimeError as error:
        raise ValueError(f"{name}={devices!r}: {error}") from error
