"""Files of states, runs and sweeps: written atomically, and fully checked when they are read. Nothing is unpickled.

Tensors go into safetensors files, which other programs read without NumPy; long series of numbers, which compress well, into
NumPy's npz. Both have a JSON text next to the arrays, and checksums of everything.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
import uuid
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch

fcntl: Any = import_module("fcntl") if os.name == "posix" else None  # on Windows nobody can remove a file that is open
_TEXT, _CHECKSUM = "tristep", "tristep checksum"  # in a safetensors file's metadata; the first also names an array of an npz
_MOST_HEADER = 100_000_000  # bytes of JSON in a safetensors file, as its form allows
_MOST_TEXT = 1 << 24  # bytes of JSON in an npz; parsed, they take some twenty times as much memory
_NAMES_OF_DTYPES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "U32": "uint32", "I32": "int32",
    "U64": "uint64", "I64": "int64", "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64",
    "C64": "complex64", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz",
}  # fmt: skip
_DTYPES = {name: getattr(torch, kind) for name, kind in _NAMES_OF_DTYPES.items() if hasattr(torch, kind)}
SMALL, RATIO = 1 << 26, 128  # what an npz may unpack to: so many bytes, or so many times its size


def replace(argument: str, path: str | os.PathLike[str], write: Callable[[IO[bytes]], Any]) -> None:
    """Let `write` fill a new file and put it where `path` is, only when it is complete and on the disk.

    A symbolic link stays one: the file that it leads to is replaced. The new file has the mode of the old one.
    Temporary files that a killed process has left behind here are removed.

    Args:
        argument: what messages call the path.
        path: where the file is to be.
        write: called with a binary file to be written and read.

    Raises:
        FileNotFoundError: there is no such folder.
        IsADirectoryError, ValueError: the path is one of a folder, or of something else that is no file.
        OSError: the system's own; the old file is as it was.
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
    """Let the names in a folder be on the disk, where the system can do that."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


@contextmanager
def contents(argument: str, path: str | os.PathLike[str], what: str) -> Iterator[None]:
    """Turn whatever a look at bad contents ends in into one ValueError that names the file.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is a folder, or its contents are not as they should be.
        OSError: the system's own, such as PermissionError.
    """
    name = f"{argument}={str(path)!r}"
    if not os.path.exists(path):
        raise FileNotFoundError(f"{name}: there is no such file")
    if not os.path.isfile(path):
        raise ValueError(f"{name}: not {what}, or a damaged one (it is no file)")
    with open(path, "rb"):  # what the system refuses is nothing that the contents are to blame for
        pass
    try:
        yield
    except (
        ArithmeticError, AttributeError, EOFError, LookupError, MemoryError, OSError, RuntimeError, SyntaxError, TypeError,
        ValueError, zipfile.BadZipFile, zlib.error,
    ) as error:  # fmt: skip
        raise ValueError(f"{name}: not {what}, or a damaged one ({error})") from error


def write_tensors(
    argument: str, path: str | os.PathLike[str], header: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]
) -> None:
    """Write a safetensors file with a JSON header, as `replace` does. Tensors are those that `check_writable` takes.

    What the format does not have goes in another way, of which the header tells: complex128, say, as pairs of numbers, and a
    tensor whose name is not allowed under that name's JSON text.
    """
    stored, names, dtypes = dict[str, torch.Tensor](), dict[str, str](), dict[str, str]()
    for key, tensor in tensors.items():
        name = key
        while not _is_name(name) or (name != key and (name in tensors or name in stored)):
            name = json.dumps(name)
        if name != key:
            names[key] = name
        if tensor.dtype not in _DTYPES.values():
            dtypes[key] = str(tensor.dtype).removeprefix("torch.")
        stored[name] = _stored(tensor)
    checksums = {key: _checksum(stored[names.get(key, key)]) for key in tensors}
    more = {"names": names} if names else {}
    more |= {"dtypes": dtypes} if dtypes else {}
    text = json.dumps({**header, **more, "checksums": checksums})
    metadata = {_TEXT: text, _CHECKSUM: str(zlib.crc32(text.encode()))}

    try:
        from safetensors.torch import save  # here, because a training without files does not need it
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{argument}: files need the package safetensors: pip install safetensors", name=error.name
        ) from error

    replace(argument, path, lambda file: file.write(save(stored, metadata)))


def check_writable(what: str, tensor: torch.Tensor) -> None:
    """Refuse a tensor that `write_tensors` has no form for.

    Raises:
        TypeError: it is sparse, quantized, without memory, or of a type that files do not have.
    """
    kind = tensor.dtype
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.device.type == "meta":
        how = "quantized" if tensor.is_quantized else "on the meta device" if tensor.is_meta else str(tensor.layout)
        raise TypeError(f"{what} is a tensor that is {how}: only dense ones with values can be saved")
    if not (kind in _DTYPES.values() or kind.is_complex or kind.is_floating_point):
        raise TypeError(f"{what} is of {kind}, which files of safetensors do not have: convert it before it is saved")


def read_tensors(path: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[str, torch.Tensor]] | None:
    """What `write_tensors` has written, inside of `contents`: the header, and the tensors in the order of writing.

    None of a safetensors file from elsewhere. The file is opened once, so that another one may take its place meanwhile; and
    no library calls back, which would make an error of the file of a handler's KeyboardInterrupt.
    """
    with open(path, "rb") as file:
        text, places = _begin(file)
        if text is None:
            return None
        header = _parsed(text)
        checksums = _checksums_of(header)
        names, dtypes = _texts(header, "names"), _texts(header, "dtypes")
        keys = {names.get(key, key): key for key in checksums}
        if set(keys) != set(places):
            raise ValueError(f"damaged; checksums differ for {_odd(set(keys), set(places))}")
        found = {
            keys[name]: _read_tensor(file, *place) for name, place in sorted(places.items(), key=lambda item: item[1][2])
        }
    _compare(checksums, found)
    return header, {key: _as_written(found[key], dtypes.get(key)) for key in checksums}


def read_header(path: str | os.PathLike[str]) -> dict[str, Any] | None:
    """The header alone of what `read_tensors` reads."""
    with open(path, "rb") as file:
        text, _ = _begin(file)
    if text is None:
        return None
    header = _parsed(text)
    _checksums_of(header)
    _texts(header, "names")
    _texts(header, "dtypes")
    return header


def write_npz(
    argument: str, path: str | os.PathLike[str], kind: str, about: Mapping[str, Any], arrays: Mapping[str, np.ndarray]
) -> None:
    """Write a compressed npz file with a JSON text in the array "tristep", as `replace` does.

    Args:
        argument, path: as for `replace`.
        kind: what it is a file of, to tell it from others.
        about: what JSON has; anything else becomes text.
        arrays: of numbers, by name.

    Raises:
        ValueError: `about` is longer than 16 MiB.
    """
    checksums = {name: _checksum(array) for name, array in arrays.items()}
    text = json.dumps({"kind": kind, "about": about, "checksums": checksums}, default=repr).encode()
    if len(text) > _MOST_TEXT:
        raise ValueError(f"names and values of {kind} take {len(text):,} bytes: a file has at most {_MOST_TEXT:,} of them")
    members = {_TEXT: np.frombuffer(text, dtype=np.uint8), **arrays}
    size = sum(array.nbytes + 1024 for array in members.values())

    def write(file: IO[bytes]) -> None:
        _write_zip(file, members, zipfile.ZIP_DEFLATED)
        if size > _most(file.tell()):  # too good to be read again: nobody could tell it from a file that is to fill memory
            file.seek(0)
            file.truncate()
            _write_zip(file, members, zipfile.ZIP_STORED)

    replace(argument, path, write)


def read_npz(path: str | os.PathLike[str], kind: str) -> tuple[dict[str, Any] | None, dict[str, np.ndarray]]:
    """What `write_npz` has written, inside of `contents`; of other npz files None and their arrays."""
    arrays = {}
    with open(path, "rb") as file, zipfile.ZipFile(file) as archive:  # opened once: another file may take its place
        members = archive.infolist()
        size, most = sum(member.file_size for member in members), _most(os.fstat(file.fileno()).st_size)
        if size > most:
            raise ValueError(f"it would unpack to {size:,} bytes; for its size at most {most:,} are read")
        if len({member.filename for member in members}) < len(members):
            raise ValueError("two of its arrays have one name")
        for member in members:
            if not member.filename.endswith(".npy"):
                raise ValueError(f"{member.filename!r} is no array")
            arrays[member.filename[:-4]] = _read_array(archive, member)
    if _TEXT not in arrays:
        return None, arrays
    header = _parsed(_bytes(arrays.pop(_TEXT)))
    checksums = _checksums_of(header)
    if header["kind"] != kind:
        raise ValueError(f"it is a file of {header['kind']}, not of {kind}")
    if set(arrays) != set(checksums):
        raise ValueError(f"damaged; missing or unexpected: {_odd(set(arrays), set(checksums))}")
    _compare(checksums, arrays)
    about = header["about"]
    if not isinstance(about, dict):
        raise ValueError("what it says about itself is no JSON object")
    return about, arrays


def parse_array(array: np.ndarray) -> Any:
    """The JSON text in an array of bytes, or in one string, as files of earlier versions have it."""
    return _parsed(str(array) if array.dtype.kind == "U" else _bytes(array))


def _remove_stale(target: Path) -> None:
    """Remove temporary files of this target whose writers no longer live, by the lock that a living one holds."""
    own = re.compile(re.escape(f".{target.name}.") + r"[0-9a-f]{32}\.tmp")
    for name in filter(own.fullmatch, os.listdir(target.parent)):
        with suppress(OSError):  # somebody writes it, or it belongs to somebody else: not ours to remove
            if fcntl is None:
                os.unlink(target.parent / name)
                continue
            with open(target.parent / name, "rb+") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(target.parent / name)


def _create(target: Path) -> tuple[IO[bytes], Path]:
    """A new file next to the target, which is locked while it is open."""
    while True:
        temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex}.tmp")
        file = temporary.open("x+b")
        if fcntl is None:
            return file, temporary
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:  # a file system without locks, on which nobody removes it either
            return file, temporary
        if temporary.exists():  # and was not taken for a stale one before it was locked
            return file, temporary
        file.close()


def _write_zip(file: IO[bytes], members: Mapping[str, np.ndarray], compression: int) -> None:
    with zipfile.ZipFile(file, "w", compression) as archive:
        for name, array in members.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, np.asanyarray(array), allow_pickle=False)


def _read_array(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> np.ndarray:
    """One array: no more memory than the archive says, whatever the array's own header says."""
    with archive.open(member) as file:
        version = np.lib.format.read_magic(file)
        if version not in ((1, 0), (2, 0)):
            raise ValueError(f"{member.filename!r} is an array of version {version}")
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = read(file)
        if dtype.kind not in "biufU" or dtype.hasobject or min(shape, default=0) < 0:
            raise ValueError(f"{member.filename!r} has {dtype} {shape}: must be numbers")
        count, size = 1, member.file_size - file.tell()
        for length in shape:
            count *= length
        if count * dtype.itemsize != size:
            raise ValueError(f"{member.filename!r} has {size} bytes for {dtype} {shape}")
        data = file.read()  # to its end, where zipfile compares the checksum
        if len(data) != size:
            raise ValueError(f"{member.filename!r} ends too early")
    array = np.frombuffer(data, dtype) if dtype.itemsize else np.zeros(count, dtype)
    return array.reshape(shape, order="F" if fortran else "C").copy()  # which may be written to


def _is_name(name: str) -> bool:
    """Whether a tensor in a safetensors file may have this name."""
    return name != "__metadata__" and not any("\ud800" <= each <= "\udfff" for each in name)


def _stored(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as a file has it."""
    tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
    if tensor.dtype in _DTYPES.values():
        return tensor
    return torch.view_as_real(tensor).contiguous() if tensor.is_complex() else tensor.view(torch.uint8)


def _as_written(tensor: torch.Tensor, kind: str | None) -> torch.Tensor:
    """What `_stored` was given, of a type of this name; None: of the one that it has."""
    if kind is None:
        return tensor
    found = getattr(torch, kind, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"it has a tensor of type {kind!r}, which this torch does not have")
    made = torch.view_as_complex(tensor) if found.is_complex else tensor.view(found)
    if made.dtype != found:
        raise ValueError(f"it has {tensor.dtype} for a tensor of type {kind!r}")
    return made


def _begin(file: IO[bytes]) -> tuple[str | None, dict[str, tuple[torch.dtype, list[int], int, int]]]:
    """The JSON text that is ours, None of a file from elsewhere; and type, shape, place and size in bytes of each tensor.

    The form is that of https://huggingface.co/docs/safetensors: 8 bytes with the length of a JSON text, the text, the bytes.
    """
    size = os.fstat(file.fileno()).st_size
    length = int.from_bytes(file.read(8), "little")
    if not 2 <= length <= min(size - 8, _MOST_HEADER):
        raise ValueError(f"its first 8 bytes are the length {length:,} of a text, of {size:,} bytes in all")
    described = _parsed(file.read(length).decode())
    if not isinstance(described, dict):
        raise ValueError("its text is no JSON object")
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
        return None, places
    if metadata[_CHECKSUM] != str(zlib.crc32(metadata[_TEXT].encode())):
        raise ValueError("damaged; the checksum of its settings differs")
    return metadata[_TEXT], places


def _read_tensor(file: IO[bytes], kind: torch.dtype, shape: list[int], start: int, size: int) -> torch.Tensor:
    if not size:
        return torch.empty(shape, dtype=kind)
    data = bytearray(size)
    file.seek(start)
    if file.readinto(data) != size:  # type: ignore[attr-defined]
        raise ValueError("it ends too early")
    return torch.frombuffer(data, dtype=kind).reshape(shape)


def _texts(header: dict[str, Any], key: str) -> dict[str, str]:
    """Texts by name, that are taken out of a header."""
    found = header.pop(key, {})
    if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
        raise ValueError(f"its {key} are no texts")
    return found


def _most(size: int) -> int:
    return max(SMALL, RATIO * size)


def _parsed(text: str | bytes) -> Any:
    if len(text) > _MOST_TEXT and isinstance(text, bytes):
        raise ValueError(f"its text has {len(text):,} bytes, more than {_MOST_TEXT:,}")
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("its text is nested too deeply") from None


def _bytes(array: np.ndarray) -> bytes:
    if array.dtype != np.uint8 or array.ndim != 1:
        raise ValueError(f"its text is {array.dtype} {array.shape}: must be bytes")
    return array.tobytes()


def _checksums_of(header: Any) -> dict[str, int]:
    """The checksums, that are taken out of a header."""
    found = header.pop("checksums") if isinstance(header, dict) and "checksums" in header else None
    if not isinstance(found, dict) or not all(type(value) is int for value in found.values()):
        raise ValueError("it has no checksums")
    return found


def _compare(checksums: Mapping[str, int], arrays: Mapping[str, Any]) -> None:
    damaged = {key for key, array in arrays.items() if _checksum(array) != checksums[key]}
    if damaged:
        raise ValueError(f"damaged; checksums differ for {_odd(damaged, set())}")


def _odd(a: set[str], b: set[str]) -> str:
    return ", ".join(sorted(a ^ b)[:5])


def _checksum(array: torch.Tensor | np.ndarray) -> int:
    """Of its type, its shape and its bytes."""
    if isinstance(array, np.ndarray):
        flat, start = np.ascontiguousarray(array).reshape(-1), f"{array.dtype.str}{list(array.shape)}"
        data = flat.view(np.uint8) if flat.size else flat
    else:
        tensor = array.detach().cpu().contiguous().reshape(-1)
        start = f"{array.dtype}{list(array.shape)}"
        data = tensor.view(torch.uint8).numpy() if tensor.numel() else np.zeros(0, np.uint8)
    return zlib.crc32(data.data, zlib.crc32(start.encode())) if data.size else zlib.crc32(start.encode())
