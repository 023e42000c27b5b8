"""The folder of a race: its settings, and a file for each training that has ended, so that a second call goes on."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ...trainer.checkpoint import files

KIND = "race training"
TOLERANCE = 1e-3  # relative, of losses, which another machine computes a little differently
ABSENT = "(not given)"


class Store:
    """Finished trainings, in memory or in files, by optimizer, trial and seed.

    Args:
        folder: where the files are, which is created; None keeps all in memory.
        settings: what must be as in the call that began it, as JSON has it; where a name begins with "loss", nearly so.

    Raises:
        FileNotFoundError, NotADirectoryError: there is no folder to put it into, or it is a file.
        ValueError: the folder is of a race with other settings, or has a damaged file.
    """

    def __init__(self, folder: str | os.PathLike[str] | None, settings: Mapping[str, Any]) -> None:
        self._folder = None if folder is None else Path(folder)
        self._found: dict[tuple[Any, ...], dict[str, np.ndarray]] = {}
        if self._folder is None:
            return
        if self._folder.exists() and not self._folder.is_dir():
            raise NotADirectoryError(f"folder={str(folder)!r}: this is a file, it must be a folder or not exist")
        if not self._folder.absolute().parent.is_dir():
            raise FileNotFoundError(f"folder={str(folder)!r}: there is no folder {str(self._folder.absolute().parent)!r}")
        self._folder.mkdir(exist_ok=True)
        path = self._path(("race",))
        if not path.exists():
            files.write_arrays("folder", path, "race settings", settings, {})
            return
        with files.contents("folder", path, "the settings of a race"):
            before, _ = files.read_arrays(path, "race settings")
        difference = _difference("", before, settings)
        if difference is not None:
            name, then, now = difference
            raise ValueError(
                f"folder={str(folder)!r} has a race with {name}={then!r}, this one has {now!r}: "
                "repeat the call with the same settings, or give another folder"
            )

    def get(self, *key: Any) -> dict[str, np.ndarray] | None:
        """The arrays of a training, if it has ended."""
        if key not in self._found and self._folder is not None and (path := self._path(key)).exists():
            with files.contents("folder", path, "a training of a race"):
                about, arrays = files.read_arrays(path, KIND)
                if about != {"key": list(key)}:
                    raise ValueError(f"it is of {about}")
            self._found[key] = arrays
        return self._found.get(key)

    def put(self, arrays: Mapping[str, np.ndarray], *key: Any) -> None:
        """Keep what a training gave."""
        if self._folder is not None:
            files.write_arrays("folder", self._path(key), KIND, {"key": list(key)}, arrays)
        self._found[key] = dict(arrays)

    def _path(self, key: tuple[Any, ...]) -> Path:
        """Where the file is: with the name that earlier versions gave it, if they wrote it."""
        assert self._folder is not None
        earlier = self._folder / f"{'-'.join(map(str, key))}.npz"
        return earlier if earlier.exists() else earlier.with_suffix(".safetensors")


def _difference(name: str, one: Any, other: Any) -> tuple[str, Any, Any] | None:
    """The first place where two settings differ: its name and both values."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        for key in [*other, *(key for key in one if key not in other)]:
            found = _difference(f"{name}[{key!r}]" if name else key, one.get(key, ABSENT), other.get(key, ABSENT))
            if found is not None:
                return found
        return None
    if isinstance(one, float) and isinstance(other, float) and name.startswith("loss"):
        same = abs(one - other) <= TOLERANCE * max(abs(one), abs(other)) or (one != one and other != other)
        return None if same else (name, one, other)
    return None if one == other else (name, one, other)
