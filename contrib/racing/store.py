"""The folder of a race: its settings and a file for each finished training, so that a later call can continue."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ...trainer.serialization import files

KIND = "race training"
TOLERANCE = 1e-3  # relative, of losses, which another machine computes a little differently
ABSENT = "(not given)"


class Store:
    """Finished trainings, in memory or in files, by optimizer, trial and seed.

    Args:
        folder: the absolute path of the folder of the files, created if it does not exist; None keeps everything in memory.
        settings: plain data that must equal the settings of the call that created the folder. Numbers whose name begins with
            "loss" may differ by rounding.

    Raises:
        FileNotFoundError: the parent of `folder` does not exist.
        NotADirectoryError: `folder` is a file.
        ValueError: the folder has a race with other settings, or a damaged file.
    """

    def __init__(self, folder: Path | None, settings: Mapping[str, Any]) -> None:
        self._folder = folder
        self._trainings: dict[tuple[Any, ...], dict[str, np.ndarray]] = {}
        if self._folder is None:
            return
        if self._folder.exists() and not self._folder.is_dir():
            raise NotADirectoryError(f"folder={str(folder)!r}: this is a file, it must be a folder or not exist")
        if not self._folder.parent.is_dir():
            raise FileNotFoundError(f"folder={str(folder)!r}: there is no folder {str(self._folder.parent)!r}")
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
        """Return the arrays of a finished training; None if it has not finished."""
        if key not in self._trainings and self._folder is not None and (path := self._path(key)).exists():
            with files.contents("folder", path, "a training of a race"):
                about, arrays = files.read_arrays(path, KIND)
                if about != {"key": list(key)}:
                    raise ValueError(f"it is of {about}")
            self._trainings[key] = arrays
        return self._trainings.get(key)

    def put(self, arrays: Mapping[str, np.ndarray], *key: Any) -> None:
        """Store the arrays of a finished training."""
        if self._folder is not None:
            files.write_arrays("folder", self._path(key), KIND, {"key": list(key)}, arrays)
        self._trainings[key] = dict(arrays)

    def _path(self, key: tuple[Any, ...]) -> Path:
        assert self._folder is not None
        return self._folder / f"{'-'.join(map(str, key))}.safetensors"


def _difference(name: str, one: Any, other: Any) -> tuple[str, Any, Any] | None:
    """Return the name and both values of the first difference between two settings; None if they are equal."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        for key in [*other, *(key for key in one if key not in other)]:
            difference = _difference(f"{name}[{key!r}]" if name else key, one.get(key, ABSENT), other.get(key, ABSENT))
            if difference is not None:
                return difference
        return None
    if isinstance(one, float) and isinstance(other, float) and name.startswith("loss"):
        same = abs(one - other) <= TOLERANCE * max(abs(one), abs(other)) or (one != one and other != other)
        return None if same else (name, one, other)
    return None if one == other else (name, one, other)
