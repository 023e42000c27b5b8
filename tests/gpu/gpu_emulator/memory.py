"""Global and shared memory: each access is checked, counted, and remembered for the search for races.

Global addresses are those of the host's memory. They are reached through views of the whole address space, but only after
they have been found inside a known range, and aligned as the access must be.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

__all__ = ["PIECE", "SECTOR", "Access", "GlobalMemory", "Range", "Ranges", "SharedMemory", "Threads"]

SECTOR = 32  # bytes, in which memory is read and written
PIECE = 16  # bytes of a matrix in shared memory that stay together
_PENDING = 1 << 62  # an epoch after all others, in which what has been started reads or writes
_SEVERAL = 0xFFFFF  # no thread's number
_LOWEST = 1 << 16  # address
_everything = np.ctypeslib.as_array((ctypes.c_uint8 * ((1 << 47) - _LOWEST)).from_address(_LOWEST))
_VIEWS = {size: _everything.view(f"u{size}") for size in (1, 2, 4, 8)}
_elsewhere = np.zeros(64, dtype=np.uint64)  # where lanes read that may not read where they want to

Defect = Callable[[str, int], None]  # called with a message and the line of the PTX


class Range(NamedTuple):
    """Memory that a kernel may touch: its first address, its bytes, and what messages call it."""

    first: int
    size: int
    name: str


class Threads(NamedTuple):
    """Which threads make an access.

    Attributes:
        ids: of each lane: its thread's number in the launch.
        epochs: how often that has passed bar.sync.
        per_cta: threads of a CTA.
    """

    ids: np.ndarray
    epochs: np.ndarray
    per_cta: int


class Access(NamedTuple):
    """An access of some threads, as it is remembered."""

    address: np.ndarray
    ids: np.ndarray
    epochs: np.ndarray
    size: int
    stores: bool
    line: int

    def places(self, unit: int) -> np.ndarray:
        """The numbers of the units of so many bytes that it touches, of one address after the other."""
        return (self.address[:, None] // unit + np.arange(self.size // unit)).ravel()


class Ranges:
    """Known memory, in order; ranges that overlap are joined."""

    def __init__(self, ranges: Iterable[Range]) -> None:
        firsts, ends, self._names = [], [], []
        for first, size, name in sorted(each for each in ranges if each.size > 0):
            if firsts and first < ends[-1]:
                ends[-1] = max(ends[-1], first + size)
            else:
                firsts.append(first)
                ends.append(first + size)
                self._names.append(name)
        self._firsts, self._ends = (np.array(each or [0], dtype=np.int64) for each in (firsts, ends))

    def contain(self, address: np.ndarray, size: int) -> np.ndarray:
        """For each address whether so many bytes from there are in one range."""
        place = np.searchsorted(self._firsts, address, side="right") - 1
        return (place >= 0) & (address + size <= self._ends[place])

    def describe(self, address: int) -> str:
        """The address by the range that is nearest below."""
        place = max(int(np.searchsorted(self._firsts, address, side="right")) - 1, 0)
        first, end = int(self._firsts[place]), int(self._ends[place])
        return f"byte {address - first} of {self._names[place] if self._names else 'nothing'} ({end - first} bytes)"


class GlobalMemory:
    """Global memory as one launch uses it.

    Attributes:
        bytes: by "load" and "store": what threads ask for.
        sectors: by the same: those that warps touch, summed over their accesses.
    """

    def __init__(self, ranges: Ranges, defect: Defect) -> None:
        self._ranges, self._defect = ranges, defect
        self.bytes, self.sectors = {"load": 0, "store": 0}, {"load": 0, "store": 0}
        self._accesses: list[Access] = []

    def check(self, kind: str, address: np.ndarray, mask: Any, size: int, threads: Threads, line: int) -> Any:
        """The lanes that may make this access, as a mask or None for all; the others are reported."""
        wrong = address & (size - 1) != 0
        wrong = wrong if mask is None else wrong & mask
        if wrong.any():
            self._report(f"misaligned {kind}", wrong, address, size, threads, line)
            mask = ~wrong if mask is None else mask & ~wrong
        used = slice(None) if mask is None else mask
        if not self._ranges.contain(address[used], size).all():
            wrong = ~self._ranges.contain(address, size)
            wrong = wrong if mask is None else wrong & mask
            self._report(f"{kind} out of bounds", wrong, address, size, threads, line)
            mask = ~wrong if mask is None else mask & ~wrong
        self._count(kind, address, mask, size, threads, line)
        return mask

    @staticmethod
    def load(address: np.ndarray, mask: Any, size: int) -> np.ndarray:
        """Unsigned numbers of so many bytes; any number for lanes that are not in the mask."""
        place = (address if mask is None else np.where(mask, address, _elsewhere.ctypes.data)) - _LOWEST
        return _VIEWS[size][place // size]

    @staticmethod
    def store(address: np.ndarray, mask: Any, size: int, value: np.ndarray) -> None:
        used = slice(None) if mask is None else mask
        _VIEWS[size][(address[used] - _LOWEST) // size] = value[used]

    def footprint(self) -> dict[str, int]:
        """By "load" and "store": the bytes of all different sectors, which memory must move at least."""
        found = {}
        for kind in ("load", "store"):
            touched = [each.address // SECTOR for each in self._accesses if each.stores == (kind == "store")]
            found[kind] = SECTOR * len(np.unique(np.concatenate(touched))) if touched else 0
        return found

    def widths(self, first: int, size: int) -> set[int]:
        """The sizes of all accesses to this memory, in bytes."""
        return {each.size for each in self._accesses if ((each.address >= first) & (each.address < first + size)).any()}

    def find_races(self, per_cta: int) -> None:
        """Report a byte that one thread writes and another one touches, with no bar.sync of both between the two."""
        stores = [each for each in self._accesses if each.stores and len(each.ids)]
        if not stores:
            return
        unit = min(each.size for each in self._accesses)
        written = np.unique(np.concatenate([each.places(unit) for each in stores]))
        owner, shared = np.empty(len(written), dtype=np.int64), np.zeros(len(written), dtype=bool)
        for each in stores:
            owner[np.searchsorted(written, each.places(unit))] = np.repeat(each.ids, each.size // unit)
        columns: list[tuple[np.ndarray, ...]] = []
        for each in self._accesses:
            place, ids = each.places(unit), np.repeat(each.ids, each.size // unit)
            which = np.minimum(np.searchsorted(written, place), len(written) - 1)
            known = written[which] == place
            shared[which[known & (owner[which] != ids)]] = True
            columns.append((which, known, ids))
        if not shared.any():
            return
        keep = [known & shared[which] for which, known, _ in columns]  # several threads touch it, and one of them writes
        which, ids = (np.concatenate([column[k][kept] for column, kept in zip(columns, keep, strict=True)]) for k in (0, 2))
        epochs, is_store, lines = (
            np.concatenate([values(each)[kept] for each, kept in zip(self._accesses, keep, strict=True)])
            for values in (
                lambda each: np.repeat(each.epochs, each.size // unit),
                lambda each: np.full(len(each.ids) * (each.size // unit), each.stores),
                lambda each: np.full(len(each.ids) * (each.size // unit), each.line),
            )
        )
        order = np.lexsort((epochs, which))
        which, ids, epochs, is_store, lines = (each[order] for each in (which, ids, epochs, is_store, lines))
        if len(raced := np.flatnonzero(_races(which, ids, epochs, is_store, per_cta))):
            some = which == which[raced[0]]
            where = self._ranges.describe(int(written[which[raced[0]]]) * unit)
            self._report_race(where, ids[some], epochs[some], is_store[some], lines[some], per_cta)

    def _report_race(
        self, where: str, ids: np.ndarray, epochs: np.ndarray, stores: np.ndarray, lines: np.ndarray, per_cta: int
    ) -> None:
        if len(ctas := np.unique(ids // per_cta)) > 1:
            self._defect(f"race of CTAs {ctas[:4].tolist()} at {where}", int(lines[stores][0]))
            return
        for epoch in np.unique(epochs):
            now = epochs == epoch
            if (now & stores).any() and len(threads := np.unique(ids[now])) > 1:
                self._defect(f"race of threads {(threads % per_cta)[:4].tolist()} at {where}", int(lines[now & stores][0]))
                return

    def _count(self, kind: str, address: np.ndarray, mask: Any, size: int, threads: Threads, line: int) -> None:
        # A warp's lanes that touch one sector share its transfer. Lanes that do nothing have the sector -1.
        sectors = address // SECTOR if mask is None else np.where(mask, address // SECTOR, -1)
        sectors = np.sort(sectors.reshape(-1, 32), axis=1)
        self.sectors[kind] += int((np.diff(sectors, axis=1) != 0).sum() + (sectors[:, 0] >= 0).sum())
        used = slice(None) if mask is None else mask
        self.bytes[kind] += len(address[used]) * size
        self._accesses.append(Access(address[used], threads.ids[used], threads.epochs[used], size, kind == "store", line))

    def _report(self, what: str, wrong: np.ndarray, address: np.ndarray, size: int, threads: Threads, line: int) -> None:
        k = int(np.flatnonzero(wrong)[0])
        cta, thread = divmod(int(threads.ids[k]), threads.per_cta)
        where = self._ranges.describe(int(address[k]))
        self._defect(f"{what}, {size} bytes at {where}, by thread {thread} of CTA {cta} and {wrong.sum() - 1} others", line)


def _races(place: np.ndarray, ids: np.ndarray, epochs: np.ndarray, stores: np.ndarray, per_cta: int) -> np.ndarray:
    """Of accesses, sorted by place and epoch, whether each is the first of a place, or of an epoch there, with a race.

    CTAs race at a place that several of them touch, as no barrier is common to them; threads if it is in one epoch.
    """
    raced = np.zeros(len(place), dtype=bool)
    if not len(place):
        return raced
    new_place = np.append(True, np.diff(place) != 0)
    places, both = np.flatnonzero(new_place), np.flatnonzero(new_place | np.append(True, np.diff(epochs) != 0))
    raced[places] = _differ(ids // per_cta, places)
    raced[both] |= _differ(ids, both) & np.logical_or.reduceat(stores, both)
    return raced


def _differ(values: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Whether the values between two of these places are not all the same."""
    return np.minimum.reduceat(values, starts) != np.maximum.reduceat(values, starts)


class SharedMemory:
    """Shared memory of several CTAs, with who has touched each byte last, and in which epoch.

    An epoch is the time between two bar.sync: in one epoch, a byte that a thread writes may be touched by no other.
    What cp.async and wgmma have started but not finished is in an epoch after all others.
    """

    def __init__(self, ctas: int, size: int, defect: Defect) -> None:
        self._size, self.defect = size, defect
        shape = ctas, -(-max(size, 1) // PIECE) * PIECE
        self._bytes = np.zeros(shape, dtype=np.uint8)
        self._writer, self._reader = (np.full(shape, -1, dtype=np.int64) for _ in range(2))  # epoch << 20 | thread
        self._unfenced = np.zeros(shape, dtype=bool)  # not ordered before what wgmma reads

    def load(self, address: np.ndarray, mask: Any, size: int, threads: Threads, line: int) -> np.ndarray:
        """uint8 [lanes, size]."""
        lanes, place, now, me = self._places("load", address, mask, size, threads, line)
        writer, reader = self._writer[place], self._reader[place]
        self._check_read("shared load", writer, now, me, line)
        self._reader[place] = np.where((reader >= now) & (reader != me), np.maximum(reader, now | _SEVERAL), me)
        found = np.zeros((len(address), size), dtype=np.uint8)
        found[lanes] = self._bytes[place]
        return found

    def store(self, address: np.ndarray, mask: Any, value: np.ndarray, threads: Threads, line: int) -> None:
        """`value` is uint8 [lanes, size]."""
        lanes, place, now, me = self._places("store", address, mask, value.shape[1], threads, line)
        self._check_write("shared store", place, now, me, line)
        self._write(place, value[lanes], me, line)

    def begin_copy(self, address: np.ndarray, mask: Any, size: int, threads: Threads, line: int) -> None:
        """Note that cp.async will write here."""
        _, place, now, me = self._places("copy", address, mask, size, threads, line)
        self._check_write("cp.async", place, now, me, line)
        self._writer[place] = _PENDING | me & _SEVERAL

    def end_copy(self, address: np.ndarray, mask: Any, value: np.ndarray, threads: Threads, line: int) -> None:
        """Write what cp.async has read; other threads may read it after a barrier."""
        lanes, place, _, me = self._places("copy", address, mask, value.shape[1], threads, line)
        self._write(place, value[lanes], me, line)

    def begin_products(self, pieces: np.ndarray, groups: np.ndarray, threads: Threads, line: int) -> None:
        """Note that wgmma will read pieces, whose addresses are int64 [groups of threads, ...], for these of the groups."""
        place, now = self._places_of_pieces(pieces, groups, threads, line)
        self._check_read("wgmma", self._writer.reshape(-1, PIECE)[place], now, np.int64(-1), line)
        if self._unfenced.reshape(-1, PIECE)[place].any():
            self.defect("wgmma reads what was stored with no fence.proxy.async since", line)
        self._reader.reshape(-1, PIECE)[place] = _PENDING | _SEVERAL

    def end_products(self, pieces: np.ndarray, groups: np.ndarray, threads: Threads) -> np.ndarray:
        """What wgmma reads now: uint8 [groups, ..., 16], zeros for the other groups."""
        place, now = self._places_of_pieces(pieces, groups, threads, 0)
        self._reader.reshape(-1, PIECE)[place] = now | _SEVERAL
        found = np.zeros((*pieces.shape, PIECE), dtype=np.uint8)
        found[groups] = self._bytes.reshape(-1, PIECE)[place].reshape(-1, *found.shape[1:])
        return found

    def fence(self, mask: np.ndarray | None) -> None:
        """Order what has been stored before what wgmma reads, in CTAs all of whose threads are in the mask."""
        ctas = slice(None) if mask is None else mask.reshape(len(self._bytes), -1).all(axis=1)
        self._unfenced[ctas] = False

    def _check_read(self, what: str, writer: np.ndarray, now: Any, me: Any, line: int) -> None:
        if (writer >= _PENDING).any():
            self.defect(f"{what} of what cp.async has not been waited for", line)
        elif ((writer >= now) & (writer != me)).any():
            self.defect(f"{what} races with a store since the last bar.sync", line)
        if (writer < 0).any():
            self.defect(f"{what} of what was never stored", line)

    def _check_write(self, what: str, place: Any, now: Any, me: Any, line: int) -> None:
        writer, reader = self._writer[place], self._reader[place]
        if ((writer >= now) & (writer != me)).any():
            self.defect(f"{what} races with a store since the last bar.sync", line)
        if (reader >= _PENDING).any():
            self.defect(f"{what} to what wgmma reads, which has not been waited for", line)
        elif ((reader >= now) & (reader != me)).any():
            self.defect(f"{what} races with a load since the last bar.sync", line)

    def _write(self, place: Any, value: np.ndarray, me: Any, line: int) -> None:
        self._bytes[place] = value
        if (self._bytes[place] != value).any():
            self.defect("threads store different values to one place of shared memory", line)
        self._writer[place] = np.broadcast_to(me, place[1].shape)
        self._unfenced[place] = True

    def _places_of_pieces(self, pieces: np.ndarray, groups: np.ndarray, threads: Threads, line: int) -> tuple[Any, Any]:
        """Numbers of pieces of all CTAs, and the marks of their epochs."""
        address = pieces[groups].reshape(groups.sum(), -1)
        if ((address < 0) | (address + PIECE > self._size)).any():
            self.defect(f"wgmma reads shared memory out of bounds, {self._size} bytes", line)
            address = np.clip(address, 0, self._size - PIECE)
        first = np.flatnonzero(groups) * (len(threads.ids) // len(groups))  # a thread of each group
        cta = (threads.ids[first] - threads.ids[0]) // threads.per_cta
        return cta[:, None] * (self._bytes.shape[1] // PIECE) + address // PIECE, threads.epochs[first][:, None, None] << 20

    def _places(
        self, kind: str, address: np.ndarray, mask: Any, size: int, threads: Threads, line: int
    ) -> tuple[np.ndarray, tuple[np.ndarray, np.ndarray], np.ndarray, np.ndarray]:
        """The lanes with a valid address, where their bytes are, and the marks of their epoch and of themselves."""
        lanes = np.arange(len(address)) if mask is None else np.flatnonzero(mask)
        address = address[lanes].astype(np.int64)
        wrong = (address % size != 0) | (address < 0) | (address + size > self._size)
        if wrong.any():
            first = int(address[wrong][0])
            self.defect(f"shared {kind}, {size} bytes at {first} of {self._size}: misaligned or out of bounds", line)
            lanes, address = lanes[~wrong], address[~wrong]
        own = threads.ids[lanes] - threads.ids[0]
        place = own[:, None] // threads.per_cta, address[:, None] + np.arange(size)
        now = threads.epochs[lanes][:, None] << 20
        return lanes, place, now, now | (own % threads.per_cta)[:, None]
