"""`ReadOnly`: what properties return that show a mapping, but must not be changed through it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class ReadOnly(Mapping[K, V]):
    """A mapping without a way to change it, which unlike `types.MappingProxyType` may be copied and pickled."""

    def __init__(self, values: Mapping[K, V]) -> None:
        self._values = dict(values)

    def __getitem__(self, key: K) -> V:
        return self._values[key]

    def __iter__(self) -> Iterator[K]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return repr(self._values)
