"""Files of states, checkpoints, runs, sweeps and races: written atomically, fully checked when read, never unpickled.

All are safetensors files, which other programs can read, with a JSON text in their metadata and checksums of everything.
They say which format they have, and one of another format is refused.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
import uuid
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import import_module
from mmap import mmap
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch

from ..validation import check_depth
from .mapping import map_file, parts, used

FORMAT = 1  # to be raised by a change after which files of before would be read wrongly, or not at all
fcntl: Any = import_module("fcntl") if os.name == "posix" else None  # on Windows nobody can remove a file that is open
_TEXT, _CHECKSUM = "tristep", "tristep checksum"  # in a file's metadata
_MOST_HEADER = 100_000_000  # bytes of JSON in a file, as safetensors allows
_NAMES_OF_DTYPES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "U32": "uint32", "I32": "int32",
    "U64": "uint64", "I64": "int64", "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64",
    "C64": "complex64", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz",
}  # fmt: skip
_DTYPES = {name: getattr(torch, kind) for name, kind in _NAMES_OF_DTYPES.items() if hasattr(torch, kind)}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_MOST_CHECKSUM = 2**32 - 1


class _FormatError(ValueError):
    """A file has another format than this version reads."""


def check_format(what: str, found: Any) -> None:
    """Raise ValueError if `found`, the number that `what` has, is not `FORMAT`."""
    if found != FORMAT:
        raise ValueError(
            f"{what} has format {found!r:.80}: this version of tristep reads format {FORMAT}; load it with the version that "
            "wrote it"
        )


def replace(argument: str, path: str | os.PathLike[str], write: Callable[[IO[bytes]], Any]) -> None:
    """Write a file atomically: a temporary file gets its name when it is complete and on the disk; an error changes nothing.

    For a symbolic link, the file that it leads to is replaced. The new file has the mode of the old one. Temporary files of
    this name that killed processes left are removed. `write` gets the temporary file, open in binary mode for writing and
    reading. `argument` is the name of `path` in error messages.
    """
    target = Path(os.path.realpath(path))
    if not target.parent.is_dir():
        raise FileNotFoundError(f"{argument}={str(path)!r}: there is no folder {str(target.parent)!r}")
    try:
        mode: int | None = target.stat().st_mode
    except FileNotFoundError:
        mode = None
    if mode is not None and stat.S_ISDIR(mode):
        raise IsADirectoryError(f"{argument}={str(path)!r}: this is a folder, it must be the name of a file")
    if mode is not None and not stat.S_ISREG(mode):
        raise ValueError(f"{argument}={str(path)!r}: this is a device or a pipe, it must be the name of a file")
    _remove_stale(target)
    file, temporary = _create(target)
    try:
        with file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
            if mode is not None:
                os.chmod(temporary, stat.S_IMODE(mode))
            if fcntl is not None:
                os.replace(temporary, target)
        if fcntl is None:  # where an open file cannot be renamed
            os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(target.parent)  # the new name must be on the disk, too


def sync_folder(path: str | os.PathLike[str]) -> None:
    """Wait until the names in a folder are on the disk, if the system can do that."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


@contextmanager
def contents(argument: str, path: str | os.PathLike[str], what: str) -> Iterator[None]:
    """Return a context for reading a file, in which any error of bad contents becomes a ValueError that names the file.

    `what` is the kind of file that is expected, for messages. An OSError, as with PermissionError, stays one.
    """
    name = f"{argument}={str(path)!r}"
    if not os.path.exists(path):
        raise FileNotFoundError(f"{name}: there is no such file")
    if not os.path.isfile(path):
        raise ValueError(f"{name}: not {what}, or a damaged one (it is no file)")
    with open(path, "rb"):  # an OSError here does not mean that the contents are damaged
        pass
    try:
        yield
    except _FormatError as error:
        raise ValueError(f"{name}: {error}") from error
    except (
        ArithmeticError, AttributeError, EOFError, LookupError, MemoryError, OSError, RuntimeError, SyntaxError, TypeError,
        ValueError,
    ) as error:  # fmt: skip
        raise ValueError(f"{name}: not {what}, or a damaged one ({error})") from error


def write(
    argument: str,
    path: str | os.PathLike[str],
    kind: str,
    header: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
) -> None:
    """Write a safetensors file with a JSON header, completely or not at all.

    `kind` tells this file from files of other kinds, such as "runs". The header tells what is stored in another form,
    because safetensors cannot represent it: complex128 as pairs of numbers, and a tensor with a name that is not allowed, as
    half of a surrogate pair, under the JSON text of that name. Its names "format", "kind", "names", "dtypes" and "checksums"
    are taken. Names and header may take 100 MB, the most that safetensors reads. `check_writable` must not raise for the
    tensors.
    """
    names, forms = dict[str, str](), dict[str, torch.Tensor]()  # by key; without memory, as they will be stored
    for key, tensor in tensors.items():
        name = key
        while not _is_name(name) or (name != key and (name in tensors or name in names.values())):
            name = json.dumps(name)
        names[key] = name
        forms[key] = _stored(torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"))
    others = {key: name for key, name in names.items() if name != key}
    dtypes = {key: f"{tensor.dtype}".removeprefix("torch.") for key, tensor in tensors.items() if tensor.dtype not in _NAMES}
    header = {
        "format": FORMAT,
        "kind": kind,
        **header,
        **({"names": others} if others else {}),
        **({"dtypes": dtypes} if dtypes else {}),
    }
    in_order = sorted(tensors, key=lambda key: (-tensors[key].itemsize, names[key]))  # so all are aligned
    described, end = dict[str, Any](), 0
    for key in in_order:
        form, start = forms[key], end
        end += form.nbytes
        described[names[key]] = {"dtype": _NAMES[form.dtype], "shape": list(form.shape), "data_offsets": [start, end]}

    def begin(checksums: Mapping[str, int]) -> bytes:
        text = json.dumps({**header, "checksums": checksums})
        metadata = {"__metadata__": {_TEXT: text, _CHECKSUM: f"{zlib.crc32(text.encode())}"}}
        return json.dumps(metadata | described, ensure_ascii=False, separators=(",", ":")).encode()

    # The header comes first, but the checksums in it are known last: room is left for the longest ones.
    checksums = dict.fromkeys(tensors, _MOST_CHECKSUM)
    size = -(-(len(begin(checksums)) + len(str(_MOST_CHECKSUM))) // 16) * 16 + 8  # after 8 bytes, and for complex128
    if size > _MOST_HEADER:
        raise ValueError(
            f"{argument}={str(path)!r}: names and header take {size:,} bytes: a file has at most {_MOST_HEADER:,}"
        )

    # Part by part: safetensors' `save_file` takes all tensors at once, contiguous and on the host, so it needs a copy of all
    # states on a GPU and of all with other strides, before version 0.8 of any, and a second pass for the checksums.
    def save(file: IO[bytes]) -> None:
        file.seek(8 + size)
        for key in in_order:
            checksums[key] = _checksum(tensors[key], forms[key], file.write)
        file.seek(0)
        file.write(size.to_bytes(8, "little") + begin(checksums).ljust(size))

    replace(argument, path, save)


def write_arrays(
    argument: str, path: str | os.PathLike[str], kind: str, about: Mapping[str, Any], arrays: Mapping[str, np.ndarray]
) -> None:
    """Write NumPy arrays to a safetensors file, completely or not at all; `read_arrays` reads it.

    `kind` as in `write`. In `about`, data for the header, the text of an object stands for it if JSON cannot represent it.
    """
    tensors = {name: torch.from_numpy(np.array(array)) for name, array in arrays.items()}  # copies, which may be written to
    write(argument, path, kind, {"about": json.loads(json.dumps(about, default=repr))}, tensors)


def check_writable(what: str, tensor: torch.Tensor) -> None:
    """Raise TypeError if a file cannot store a tensor: it is sparse, quantized, without memory, or of an unknown dtype."""
    kind = tensor.dtype
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.device.type == "meta":
        how = "quantized" if tensor.is_quantized else "on the meta device" if tensor.is_meta else str(tensor.layout)
        raise TypeError(f"{what} is a tensor that is {how}: only dense tensors with values can be saved")
    if not (kind in _NAMES or kind.is_complex or kind.is_floating_point):
        raise TypeError(f"{what} is {kind}, which safetensors files do not support: convert it before saving")


def read(
    path: str | os.PathLike[str], kind: str, with_tensors: bool = True, mapped: bool = False
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return the header and the tensors that `write` wrote. Call it within `contents`.

    `mapped` tensors stay in the file, where all has been checked, until they are copied by `mapping.copy`. They are for
    reading only, and nobody must keep them: what is written over the file would change them.
    """
    # Opened once, so that another process may replace it meanwhile. We read it ourselves, because a library that calls back
    # reports a KeyboardInterrupt from a signal's handler as an error of the file.
    with open(path, "rb") as file:
        return _read(file, kind, with_tensors, mapped)


def read_arrays(path: str | os.PathLike[str], kind: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Return the `about` and the arrays that `write_arrays` wrote. Call it within `contents`."""
    header, tensors = read(path, kind)
    return header["about"], {name: tensor.numpy() for name, tensor in tensors.items()}


def _read(file: IO[bytes], kind: str, with_tensors: bool, mapped: bool) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    text, places = _begin(file)
    header = _parsed(text)
    if not isinstance(header, dict):
        raise ValueError("its settings are no JSON object")
    try:
        check_format("it", header.get("format"))
    except ValueError as error:
        raise _FormatError(error) from None
    if (found := header.pop("kind", None)) != kind:
        raise ValueError(f"it is a file of {found!s:.80}, not of {kind}")
    checksums, names, dtypes = (_section(header, *each) for each in (("checksums", int), ("names", str), ("dtypes", str)))
    keys = {names.get(key, key): key for key in checksums}
    _refuse_damaged(set(keys) ^ set(places))
    if not with_tensors:
        return header, {}
    in_order, view = sorted(places.items(), key=lambda item: item[1][2]), map_file(file) if mapped else None
    tensors = {}
    for name, place in in_order:
        # torch copies complex128, which a file has as pairs of numbers, by instructions that need multiples of 16 bytes.
        multiple = 16 if dtypes.get(keys[name]) == "complex128" else place[0].itemsize
        tensors[keys[name]] = _read_tensor(file, view, multiple, *place)
    _refuse_damaged(key for key, tensor in tensors.items() if _checksum(tensor) != checksums[key])
    return header, {key: _as_written(tensors[key], dtypes.get(key)) for key in checksums}


def _remove_stale(target: Path) -> None:
    """Remove temporary files of this target that killed processes left: a process that writes one holds its lock."""
    pattern = re.compile(re.escape(f".{target.name}.") + r"[0-9a-f]{32}\.tmp")
    for name in filter(pattern.fullmatch, os.listdir(target.parent)):
        with suppress(OSError):  # another process writes it, or another user owns it
            if fcntl is None:
                os.unlink(target.parent / name)
                continue
            with open(target.parent / name, "rb+") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(target.parent / name)


def _create(target: Path) -> tuple[IO[bytes], Path]:
    """Create a file next to the target, which is locked while it is open."""
    while True:
        temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex}.tmp")
        file = temporary.open("x+b")
        if fcntl is None:
            return file, temporary
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:  # a file system without locks, where no process removes the file either
            return file, temporary
        if temporary.exists():  # no process has removed it before it was locked
            return file, temporary
        file.close()


def _is_name(name: str) -> bool:
    """Return whether a tensor in a safetensors file may have this name."""
    return name != "__metadata__" and not any("\ud800" <= each <= "\udfff" for each in name)


def _stored(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor in the form that a file has."""
    tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
    if tensor.dtype in _NAMES:
        return tensor
    return torch.view_as_real(tensor).contiguous() if tensor.is_complex() else tensor.view(torch.uint8)


def _as_written(tensor: torch.Tensor, kind: str | None) -> torch.Tensor:
    """Undo `_stored`, for a tensor whose dtype has the name `kind`; None: it was stored as it was."""
    if kind is None:
        return tensor
    dtype = getattr(torch, kind, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"it has a tensor of type {kind!r}, which this torch does not have")
    viewed = torch.view_as_complex(tensor) if dtype.is_complex else tensor.view(dtype)
    if viewed.dtype != dtype:
        raise ValueError(f"it has {tensor.dtype} for a tensor of type {kind!r}")
    return viewed


def _begin(file: IO[bytes]) -> tuple[str, dict[str, tuple[torch.dtype, list[int], int, int]]]:
    """Read our JSON text, and of each tensor the dtype, shape, place and size in bytes.

    The format is that of https://huggingface.co/docs/safetensors: 8 bytes with the length of a JSON text, the text, data.
    """
    size = os.fstat(file.fileno()).st_size
    length = int.from_bytes(file.read(8), "little")
    if not 2 <= length <= min(size - 8, _MOST_HEADER):
        raise ValueError(f"its header is {length:,} bytes long by its first 8 bytes, the file {size:,} bytes")
    described = _parsed(file.read(length).decode())
    if not isinstance(described, dict):
        raise ValueError("its header is no JSON object")
    metadata = described.pop("__metadata__", {})
    places, end = {}, 8 + length
    for name, about in sorted(described.items(), key=lambda item: item[1]["data_offsets"]):
        kind, shape, (start, stop) = _DTYPES.get(about["dtype"]), about["shape"], about["data_offsets"]
        if not all(type(n) is int and n >= 0 for n in (*shape, start, stop)) or 8 + length + start != end:
            raise ValueError(f"{name!r} has shape {shape} and bytes {start} to {stop}")
        if kind is None or kind.itemsize * math.prod(shape) != stop - start:
            raise ValueError(f"{name!r} has {stop - start} bytes for {about['dtype']} {shape}")
        places[name] = kind, shape, end, stop - start
        end = 8 + length + stop
    if end != size:
        raise ValueError(f"it has {size:,} bytes: must be {end:,}")
    if not isinstance(metadata, dict) or _TEXT not in metadata or _CHECKSUM not in metadata:
        raise ValueError("it is a safetensors file of another program")
    if metadata[_CHECKSUM] != str(zlib.crc32(metadata[_TEXT].encode())):
        raise ValueError("damaged; the checksum of its settings differs")
    return metadata[_TEXT], places


def _read_tensor(
    file: IO[bytes], view: mmap | None, multiple: int, kind: torch.dtype, shape: list[int], start: int, size: int
) -> torch.Tensor:
    """Return a tensor in the mapping `view` if there is one, and its place is a multiple of so many bytes; else read it."""
    if not size:
        return torch.empty(shape, dtype=kind)
    if view is not None and start % multiple == 0:
        return torch.frombuffer(view, dtype=kind, count=size // kind.itemsize, offset=start).reshape(shape)
    data = bytearray(size)
    file.seek(start)
    if file.readinto(data) != size:  # type: ignore[attr-defined]
        raise ValueError("it ends too early")
    return torch.frombuffer(data, dtype=kind).reshape(shape)


def _section(header: dict[str, Any], key: str, kind: type) -> dict[str, Any]:
    """Remove a dict with values of one type from a header, and return it; only "checksums" must be there."""
    section = header.pop(key, {} if key != "checksums" else None)
    if not isinstance(section, dict) or not all(type(value) is kind for value in section.values()):
        raise ValueError(f"it has no {key}")
    return section


def _parsed(text: str) -> Any:
    """Return the data of a JSON text; its objects take little more memory than their text, and are not nested deeply."""
    n_objects = text.count("{") + text.count("[")
    if n_objects > 100_000 and len(text) < 6 * n_objects:  # an empty one takes 64 bytes of memory
        raise ValueError(f"it has {n_objects:,} lists and dicts in {len(text):,} characters")
    try:
        data = json.loads(text)
    except RecursionError:
        raise ValueError("its text is nested too deeply") from None
    check_depth("its text", data)
    return data


def _checksum(tensor: torch.Tensor, form: torch.Tensor | None = None, write: Callable[[Any], Any] | None = None) -> int:
    """Return a checksum of a tensor's dtype, shape and bytes, as in a file; `write` is called with the bytes of each part.

    `form`: a tensor, such as one without memory, of the dtype and shape that a file has; None: the tensor itself is.
    """
    form = tensor if form is None else form
    checksum = zlib.crc32(f"{form.dtype}{list(form.shape)}".encode())
    for part in parts(tensor.detach()):
        if part.numel():
            data = _stored(part.cpu()).reshape(-1).view(torch.uint8).numpy().data
            checksum = zlib.crc32(data, checksum)
            if write is not None:
                write(data)
        used(part)
    return checksum


def _refuse_damaged(names: Iterable[str]) -> None:
    if odd := sorted(names):
        raise ValueError(f"damaged; checksums differ for {', '.join(odd[:5])}")
