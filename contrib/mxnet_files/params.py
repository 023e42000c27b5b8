"""Reader of files of arrays, which MXNet's `nd.save` and Gluon's `save_parameters`, `ParameterDict.save`, `export` write.

MXNet 2 writes NumPy's .npz instead, whose arrays NumPy reads here, without unpickling anything.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from ...kernels.messages import listed
from ...trainer.serialization import files
from ...trainer.utils.interrupts import uninterrupted
from .arrays import Cursor, read_array

_MAGIC = 0x112
_MOST_INFLATED, _MOST_TIMES = 1 << 26, 64  # bytes that any .npz may inflate to, and times its size for a larger one
_RENAMED = {"gamma": "weight", "beta": "bias"}  # of normalization layers: Gluon's name and torch's


def load_mxnet_params(
    fname: str | os.PathLike[str],
    net: torch.nn.Module | None = None,
    names: Mapping[str, str] | Sequence[str] | None = None,
) -> dict[str, torch.Tensor]:
    """Read a file of MXNet's arrays, such as a model's ".params", and copy the arrays into a model if one is given.

    MXNet 2 writes .npz files, under any name; they are known by their contents. Sparse arrays become sparse tensors, and are
    read of MXNet 1.x only. Weights of dense layers, convolutions, embeddings and normalization layers have the same layout
    in MXNet and torch; weights of other layers may have to be rearranged first.

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

    Source: MXNet 1.9.1, `NDArray::Save` in src/ndarray/ndarray.cc; `gluon.Block.load_parameters`. MXNet 2.0,
    src/serialization/cnpy.cc.
    """
    with files.contents("fname", fname, "a file of arrays of MXNet"):
        tensors = _read_npz(Path(fname)) if zipfile.is_zipfile(fname) else _read(Path(fname).read_bytes())
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
    return _named(names, tensors)


def _named(names: Sequence[str], tensors: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    names = [name.removeprefix("arg:").removeprefix("aux:") for name in names]
    if len(set(names)) < len(names):
        raise ValueError("two of its arrays have one name")
    return dict(zip(names, tensors, strict=True))


def _read_npz(path: Path) -> dict[str, torch.Tensor]:
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
            most = max(_MOST_INFLATED, _MOST_TIMES * path.stat().st_size)
            if (size := sum(member.file_size for member in members)) > most:
                raise ValueError(f"it inflates to {size:,} bytes, more than {most:,}")
            tensors = [_npy(archive, member) for member in members]
    except zipfile.BadZipFile as error:
        raise ValueError(str(error)) from error
    names = [member.filename.removesuffix(".npy") for member in members]
    if numbers := [name for name in names if name.startswith("arr_")]:  # of arrays saved without names
        names = [name.removeprefix("arr_") for name in names] if len(numbers) == len(names) else names
    return _named(names, tensors)


def _npy(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> torch.Tensor:
    if "/" in member.filename or not member.filename.endswith(".npy"):
        raise ValueError(
            f"{member.filename!r} is a part of a sparse array, or no array: only dense ones are read of MXNet 2"
        )
    with archive.open(member) as file:
        array = np.lib.format.read_array(file, allow_pickle=False)  # NumPy reads in pieces: memory is what there is
        if file.read(1):
            raise ValueError(f"bytes are left behind {member.filename!r}")
    if array.dtype.names == ("bfloat16",):
        return torch.from_numpy(array["bfloat16"].astype(np.uint16)).view(torch.bfloat16)
    if array.dtype.kind not in "biuf" or array.dtype.itemsize > 8:
        raise ValueError(f"{member.filename!r} has the type {array.dtype}")
    return torch.from_numpy(array.astype(array.dtype.newbyteorder("="), order="C", copy=False))


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
