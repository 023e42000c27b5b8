"""Reader of files of arrays, which MXNet's `nd.save` and Gluon's `save_parameters`, `ParameterDict.save`, `export` write."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from ...kernels.messages import listed
from ...trainer.serialization import files
from ...trainer.utils.interrupts import uninterrupted
from .arrays import Cursor, read_array

_MAGIC = 0x112
_RENAMED = {"gamma": "weight", "beta": "bias"}  # of normalization layers: Gluon's name and torch's


def load_mxnet_params(
    fname: str | os.PathLike[str],
    net: torch.nn.Module | None = None,
    names: Mapping[str, str] | Sequence[str] | None = None,
) -> dict[str, torch.Tensor]:
    """Read a file of MXNet's arrays, such as a model's ".params", and copy the arrays into a model if one is given.

    Sparse arrays become sparse tensors. Weights of dense layers, convolutions, embeddings and normalization layers have the
    same layout in MXNet and torch; weights of other layers may have to be rearranged first.

    Args:
        fname: the path of the file.
        net: the model to copy into; None copies nothing.
        names: the parameter or buffer of `net` that each array belongs to: a dict from the file's names to the model's, or a
            list of the model's names in the order of the file. None if the names are the same, as `save_parameters` gives
            them for a `Sequential`; the file's gamma and beta are torch's weight and bias.

    Returns:
        The tensors, on the CPU, by their names in the file without "arg:" and "aux:"; arrays without names are called "0",
        "1", and so on.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is of another kind or damaged, or does not fit the model; nothing has been changed.

    Example:
        tristep.load_mxnet_params("resnet.params", net)

    Source: MXNet 1.9.1, `NDArray::Save` in src/ndarray/ndarray.cc; `gluon.Block.load_parameters`.
    """
    with files.contents("fname", fname, "a file of arrays of MXNet"):
        tensors = _read(Path(fname).read_bytes())
    if net is not None:
        _copy(tensors, net, names)
    return tensors


def _read(data: bytes) -> dict[str, torch.Tensor]:
    cursor = Cursor(data)
    magic, _, count = cursor.numbers("QQQ")
    if magic != _MAGIC:
        raise ValueError("it does not begin like a file of arrays")
    tensors: list[torch.Tensor] = []
    while len(tensors) < count:
        tensor = read_array(cursor)
        if tensor is None:
            raise ValueError(f"array {len(tensors)} has never been given a shape")
        tensors.append(tensor)
    (named,) = cursor.numbers("Q")
    if named not in (0, count):
        raise ValueError(f"it has {named} names for {count} arrays")
    names = [bytes(cursor.take(*cursor.numbers("Q"))).decode() for _ in range(named)] or [str(i) for i in range(count)]
    if cursor.left:
        raise ValueError(f"{cursor.left:,} bytes are left at its end")
    names = [name.removeprefix("arg:").removeprefix("aux:") for name in names]
    if len(set(names)) < len(names):
        raise ValueError("two of its arrays have one name")
    return dict(zip(names, tensors, strict=True))


@uninterrupted
@torch.no_grad()
def _copy(arrays: Mapping[str, torch.Tensor], net: torch.nn.Module, names: Mapping[str, str] | Sequence[str] | None) -> None:
    there = listed(map(repr, arrays))
    targets = {**dict(net.named_parameters()), **dict(net.named_buffers())}
    if isinstance(names, Mapping):
        if unknown := set(names) - set(arrays):
            raise ValueError(f"names: {listed(map(repr, unknown))} not among the file's arrays, which are {there}")
        mapped = [names.get(name, name) for name in arrays]
    elif names is not None:
        mapped = list(names)
    else:
        stems = {name: name.rpartition(".") for name in arrays}
        torchs = {name: f"{stem}{dot}{_RENAMED.get(last, last)}" for name, (stem, dot, last) in stems.items()}
        mapped = [name if name in targets else torchs[name] for name in arrays]
    needed = {name for name in targets if not name.endswith("num_batches_tracked")}
    if len(mapped) != len(arrays) or len(set(mapped)) != len(mapped) or not needed <= set(mapped) <= set(targets):
        raise ValueError(
            f"the file has {len(arrays)} arrays, {there}; net has {len(needed)} parameters and buffers, "
            f"{listed(map(repr, needed))}: give names, a dict from the file's names to the model's, or a list of the "
            "model's in the order of the file"
        )
    for (file_name, tensor), name in zip(arrays.items(), mapped, strict=True):
        target = targets[name]
        if tensor.shape != target.shape or tensor.dtype != target.dtype or tensor.layout != torch.strided:
            raise ValueError(
                f"{file_name!r} is {tensor.dtype} {tuple(tensor.shape)}, {tensor.layout}; {name!r} of net is "
                f"{target.dtype} {tuple(target.shape)}: give names if they belong elsewhere, or convert the model first"
            )
    for tensor, name in zip(arrays.values(), mapped, strict=True):
        targets[name].copy_(tensor)
