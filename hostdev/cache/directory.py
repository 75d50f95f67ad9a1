"""Storage of a planner's per-row data: an array over all ids, or a directory of the rows that currently matter.

A directory is an open-addressing hash table of positions, with linear probing. It holds the rows that have a slot or
occur in an announced batch, and as many other recently used rows as fit. A row keeps its position while it is in the
directory. A forgotten row starts from zero when it returns, even its count of uses with the policy "lfu".
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from hostdev.cache.likeliest import Likeliest, chance_at, chances, likeliest, told
from hostdev.cache.planning import CHANCE, COUNT, ID, LAST, MEMBER, SLOT, WORDS
from hostdev.kernels.arrays import AnyIds, Positions, aligned_empty, interleave, scratch
from hostdev.kernels.hash_table import find_free, find_slot
from hostdev.kernels.jit import inline, kernel, prefetch_to_read, prefetch_to_write
from hostdev.kernels.pool import parallel_for, ranges, run_tasks

ROW = 4 * WORDS  # bytes of a row's data: half a cache line
_EMPTY, _GONE = -1, -2  # hash table entries; a search continues past _GONE (a tombstone)
_LIVE, _USED, _HAND, _DEAD = range(4)  # in `_state`: live rows, positions used, next position to try, tombstones
_AGES = 512  # distinct ages, in batches
_AHEAD, _NEAR = 32, 12  # prefetch distances in ids: the hash table entry, then the row
_GRAIN = 1 << 14
_LEAST_BITS, _LOAD = 10, 0.6  # log2 of the hash table's smallest size, and its largest load without tombstones
_MOST_LOAD = 0.75  # the largest load including tombstones


class AllRows:
    """Planner data of all V rows, indexed by id: 32 bytes per row."""

    def __init__(self, rows: int, capacity: int) -> None:
        self._capacity = capacity
        self.values = interleave(aligned_empty((rows, WORDS), np.float32))
        self.values.fill(0)
        self.rows = self.values.view(np.int32)
        self.rows[:, LAST] = self.rows[:, SLOT] = -1

    @property
    def nbytes(self) -> int:
        """Total size in bytes."""
        return int(self.rows.nbytes)

    @property
    def known(self) -> npt.NDArray[np.int32]:
        """The data of all rows, int32 [V, 8]."""
        rows: npt.NDArray[np.int32] = self.rows
        return rows

    def place(self, ids: AnyIds, planned: int) -> AnyIds:
        """Return the positions of the data of ids [U]; `planned` batches have been planned so far."""
        return ids

    def look(self, ids: Positions) -> tuple[Positions, npt.NDArray[np.int32], npt.NDArray[np.float32]]:
        """Return the positions of the rows' data, and the data as two arrays indexed by position: int32 and float32."""
        return ids, self.rows, self.values

    def ids_of(self, positions: Positions) -> Positions:
        """Return the ids of the rows whose data is at these positions."""
        return positions

    def expect(self, counts: npt.NDArray[Any], per_use: np.float32, *, above: float) -> np.float32:
        """Store each row's probability of use, mark the C likeliest rows, and return the C-th largest probability.

        Args:
            counts: Uses of each row, [V].
            per_use: Uses in a batch divided by the sum of counts.
            above: Only rows with a larger count than this are marked.
        """
        expected = self.values[:, CHANCE]
        weights = np.ascontiguousarray(counts, np.float32)
        parallel_for(chances, len(weights), weights, per_use, expected, grain=_GRAIN)
        least = find_quantile(expected, self._capacity / len(weights))
        member = expected > least
        alike = np.flatnonzero(expected == least)
        member[alike[: self._capacity - np.count_nonzero(member)]] = True
        self.rows[:, MEMBER] = member & (counts > above)
        return least

    def choose(self, counts: npt.NDArray[Any]) -> None:
        """Set the word COUNT of the C rows with the largest counts to 1; among equal counts, the first rows win."""
        self.rows[np.argsort(-np.asarray(counts, np.float64), kind="stable")[: self._capacity], COUNT] = 1


class Directory:
    """Planner data of the rows that currently matter: 32 bytes per row plus 7 to 14 for the index; see `AllRows`.

    There is room for the pinned rows (those that have a slot or occur in an announced batch), for a quarter as many
    other rows, and for the rows of two batches. Unused space takes no memory.

    Args:
        rows: V.
        capacity: Number of slots.
        window: Number of batches announced in addition to the next one.
        least: No row is forgotten while the directory has at most this many rows.
    """

    def __init__(self, rows: int, capacity: int, window: int, least: int = 0) -> None:
        self._rows, self._capacity, self._window, self._least = rows, capacity, window, least
        self._room = 0  # number of rows that the directory may have now
        self._state = np.zeros(4, np.int64)
        self._sound = True  # False: an interruption left the hash table inconsistent with the rows
        self._likeliest: Likeliest | None = None
        self._reserve(0)
        self._index = _empty(_LEAST_BITS)

    def _reserve(self, n: int) -> None:
        """Reserve address space for n rows; memory is allocated when rows are written."""
        values = aligned_empty((n, WORDS), np.float32)
        used = self._state[_USED]
        if used:
            values[:used] = self.values[:used]
        self.values: npt.NDArray[np.float32] = values

    @property
    def rows(self) -> npt.NDArray[np.int32]:
        """The rows' data, indexed by position."""
        return self.values.view(np.int32)

    @property
    def nbytes(self) -> int:
        """Bytes in use."""
        return int(self._state[_USED]) * ROW + self._index.nbytes

    @property
    def known(self) -> npt.NDArray[np.int32]:
        """The data at the n positions used so far, int32 [n, 8]; the word ID is -1 at free positions."""
        return self.rows[: self._state[_USED]]

    @property
    def _shift(self) -> np.uint64:
        return np.uint64(65 - len(self._index).bit_length())

    def place(self, ids: AnyIds, planned: int) -> Positions:
        """Return the positions of rows, int32 [U]. Insert missing rows; to make room, forget unpinned rows."""
        self._make_room(len(ids), planned)
        positions = self._find(ids)
        expected, chosen = self._get_probabilities(ids, positions)
        by_count = self._likeliest is not None and self._likeliest.per_use == 0
        _insert(
            ids,
            positions,
            expected,
            chosen,
            COUNT if by_count else MEMBER,
            self._index,
            self._shift,
            self.rows,
            self.values,
            self._state,
        )
        return positions

    def look(self, ids: Positions) -> tuple[Positions, npt.NDArray[np.int32], npt.NDArray[np.float32]]:
        """Return a copy of the data, with initial data for missing rows; see `AllRows`."""
        positions = self._find(ids)
        found = positions >= 0
        values = np.zeros((len(ids), WORDS), np.float32)
        rows = values.view(np.int32)
        rows[:, LAST] = rows[:, SLOT] = -1
        rows[found] = self.rows[positions[found]]
        expected, chosen = self._get_probabilities(ids, positions)
        values[~found, CHANCE], rows[~found, MEMBER] = expected[~found], chosen[~found]
        return np.arange(len(ids), dtype=np.int32), rows, values

    def ids_of(self, positions: Positions) -> Positions:
        """See `AllRows`."""
        ids: Positions = self.rows[positions, ID]
        return ids

    def expect(self, counts: npt.NDArray[Any], per_use: np.float32, *, above: float) -> np.float32:
        """See `AllRows`; keep a reference to `counts`, which are read when rows are inserted."""
        self._likeliest = likeliest(counts, self._capacity, per_use, above=above)
        ids = self.known[:, ID].copy()
        here = ids >= 0
        expected, chosen = self._get_probabilities(ids[here], np.full(np.count_nonzero(here), -1, np.int32))
        self.values[: len(ids)][here, CHANCE], self.known[here, MEMBER] = expected, chosen
        return chance_at(self._likeliest.key)

    def choose(self, counts: npt.NDArray[Any]) -> None:
        """See `AllRows`. To be called before any row is inserted; `counts` is kept, and read when rows are inserted."""
        if self._capacity:
            self._likeliest = likeliest(counts, self._capacity)

    def _find(self, ids: AnyIds) -> Positions:
        """Return the positions of rows; -1 for missing rows."""
        positions = np.empty(len(ids), np.int32)
        parallel_for(_find, len(ids), ids, self._index, self._shift, self.rows, positions, grain=_GRAIN)
        return positions

    def _get_probabilities(
        self, ids: AnyIds, positions: Positions
    ) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.bool_]]:
        """For rows without a position, return the probability of use by count, and whether they are in `Likeliest`."""
        expected, chosen = scratch("expected", (len(ids),), np.float32), scratch("chosen", (len(ids),), np.bool_)
        if self._likeliest is None:
            expected.fill(0)
            chosen.fill(0)
        else:
            parallel_for(told, len(ids), ids, positions, *self._likeliest, expected, chosen, grain=_GRAIN)
        return expected, chosen

    def _make_room(self, n: int, planned: int) -> None:
        """Make room for n more rows; if necessary, forget the least recently used rows."""
        state = self._state
        if self._sound and self._room - state[_LIVE] >= min(n, self._rows - state[_LIVE]):
            return
        used = int(state[_USED])
        pieces = ranges(used, _GRAIN)
        histograms = np.zeros((len(pieces), _AGES + 1), np.int64)
        run_tasks([(_ages, *edges, (self.rows, planned, histograms, i)) for i, edges in enumerate(pieces)])
        ages = histograms.sum(0)
        pinned, live = int(ages[_AGES]), int(ages.sum())
        wanted = max(pinned + pinned // 4 + 2 * n, min(2 * (live + n), self._least))
        self._room = max(self._room, min(self._rows, wanted))
        if self._room > len(self.rows):
            most = max(self._least, _most(self._capacity, self._window, n + n // 4))
            self._reserve(max(self._room, min(self._rows, most)))
        if self._room - live < min(n, self._rows - live):
            others = (self._room - pinned - n) // 2
            kept = int(np.searchsorted(np.cumsum(ages[:_AGES]), others, side="right"))  # rows of lower age stay
            self._forget(planned - kept)
        self._settle()

    def _forget(self, before: int) -> None:
        """Forget rows that have no slot and that no batch from number `before` on uses."""
        self._sound = False
        pieces = ranges(int(self._state[_USED]), _GRAIN)
        counted = np.zeros((len(pieces), 2), np.int64)
        shared = (self.rows, before, self._index, self._shift, counted)
        run_tasks([(_forget, start, stop, (*shared, i)) for i, (start, stop) in enumerate(pieces)])
        freed, gone = counted.sum(0)
        self._state[_LIVE] -= freed
        self._state[_DEAD] += gone
        self._state[_HAND] = 0
        self._sound = True

    def _settle(self) -> None:
        """Rebuild the hash table if it has the wrong size or too many tombstones."""
        bits = _get_hash_bits(self._room)
        crowded = self._room + self._state[_DEAD] > _MOST_LOAD * len(self._index)
        if self._sound and len(self._index) == 1 << bits and not crowded:
            return
        self._sound = False
        self._index = np.empty(0, np.int32)
        self._index = _empty(bits)
        _rebuild(self._index, self._shift, self.rows, self._state)
        self._sound = True


def _get_hash_bits(room: int) -> int:
    """Return log2 of the size of a hash table for `room` rows."""
    return max(_LEAST_BITS, int(room / _LOAD).bit_length())


def _empty(bits: int) -> Positions:
    index: Positions = aligned_empty((1 << bits,), np.int32)
    index.fill(_EMPTY)
    return index


def _most(capacity: int, window: int, unique: int) -> int:
    """Return the maximum number of rows that a directory has room for, with batches of `unique` ids."""
    pinned = capacity + (window + 1) * unique
    return pinned + pinned // 4 + 2 * unique


def most_bytes(rows: int, capacity: int, window: int, least: int, unique: int) -> int:
    """Return the maximum bytes of a directory if at most `rows` rows occur in total and `unique` per batch."""
    room = min(rows, max(least, _most(capacity, window, unique)))
    return room * ROW + (4 << _get_hash_bits(room))


def find_quantile(chances: npt.NDArray[np.float32], share: float) -> np.float32:
    """Return the largest value that a fraction `share` of `chances` reaches or exceeds."""
    last = min(round(len(chances) * (1 - share)), len(chances) - 1)
    least: np.float32 = np.partition(chances, last)[last]
    return least


@inline
def _is_pinned(rows: Any, p: Any, planned: Any) -> Any:
    """Return whether a row has a slot, or occurs in an announced batch that is not planned yet."""
    return (rows[p, SLOT] >= 0) | (rows[p, LAST] >= planned)


@kernel
def _find(start: Any, stop: Any, ids: Any, index: Any, shift: Any, rows: Any, positions: Any) -> None:
    """Write the positions of ids[start:stop], or -1 if missing; prefetch the rows."""
    mask, one, end = np.uint64(len(index) - 1), np.uint64(1), np.uint64(stop)
    for i in range(np.uint64(start), end):
        if i + np.uint64(_AHEAD) < end:
            prefetch_to_read(index, find_slot(ids[i + np.uint64(_AHEAD)], shift), 1)
        if i + np.uint64(_NEAR) < end:
            prefetch_to_read(rows, max(index[find_slot(ids[i + np.uint64(_NEAR)], shift)], 0), 1)
        slot = find_slot(ids[i], shift)
        position = index[slot]
        while position != _EMPTY and (position < 0 or rows[np.uint64(position), ID] != ids[i]):
            slot = (slot + one) & mask
            position = index[slot]
        positions[i] = position


@kernel
def _insert(
    ids: Any,
    positions: Any,
    chances: Any,
    chosen: Any,
    flag: Any,
    index: Any,
    shift: Any,
    rows: Any,
    values: Any,
    state: Any,
) -> None:
    """Insert the ids that have no position. All ids [U] must be different, and there must be room.

    Args:
        positions: int32 [U], negative for missing ids, whose new positions are written here.
        chances: float32 [U], probabilities of the ids.
        chosen: bool [U], written to word number `flag` of the inserted rows.
    """
    stop = np.uint64(len(ids))
    for i in range(stop):
        if i + np.uint64(_AHEAD) < stop and positions[i + np.uint64(_AHEAD)] < 0:
            prefetch_to_write(index, find_slot(ids[i + np.uint64(_AHEAD)], shift), 1)
        if positions[i] >= 0:
            continue
        while state[_HAND] < state[_USED] and rows[np.uint64(state[_HAND]), ID] >= 0:
            state[_HAND] += 1
        position = np.uint64(state[_HAND])
        state[_HAND] += 1
        state[_USED] = max(state[_USED], state[_HAND])
        slot = find_free(ids[i], index, shift)
        state[_DEAD] -= index[slot] == _GONE
        state[_LIVE] += 1
        index[slot] = position
        rows[position] = 0
        rows[position, LAST] = rows[position, SLOT] = -1
        rows[position, ID], values[position, CHANCE], rows[position, flag] = ids[i], chances[i], chosen[i]
        positions[i] = position


@kernel
def _ages(start: Any, stop: Any, rows: Any, planned: Any, histograms: Any, piece: Any) -> None:
    """Count rows at positions [start, stop) by age: batches planned since the last use, or 512 for a pinned row."""
    for p in range(np.uint64(start), np.uint64(stop)):
        age = np.int64(_AGES) if _is_pinned(rows, p, planned) else min(planned - 1 - rows[p, LAST], _AGES - 1)
        histograms[piece, np.uint64(age)] += rows[p, ID] >= 0


@inline
def _goes(rows: Any, p: Any, before: Any) -> Any:
    return (rows[p, ID] >= 0) & (not _is_pinned(rows, p, before))


@kernel
def _forget(start: Any, stop: Any, rows: Any, before: Any, index: Any, shift: Any, counted: Any, piece: Any) -> None:
    """Forget rows at positions [start, stop) that have no slot and that no batch from number `before` on uses.

    Args:
        counted: Output, int64 [pieces, 2]: number of forgotten rows, and of tombstones that they left.
    """
    mask, one, end = np.uint64(len(index) - 1), np.uint64(1), np.uint64(stop)
    freed = gone = np.int64(0)
    for p in range(np.uint64(start), end):
        ahead = p + np.uint64(_AHEAD)
        if ahead < end and _goes(rows, ahead, before):
            prefetch_to_write(index, find_slot(rows[ahead, ID], shift), 1)
        if not _goes(rows, p, before):
            continue
        slot = find_slot(rows[p, ID], shift)
        while index[slot] != np.int32(p):
            slot = (slot + one) & mask
        last = index[(slot + one) & mask] == _EMPTY  # the end of a run needs no tombstone
        index[slot] = _EMPTY if last else _GONE
        rows[p, ID] = -1
        freed, gone = freed + 1, gone + np.int64(not last)
    counted[piece, 0], counted[piece, 1] = freed, gone


@kernel
def _rebuild(index: Any, shift: Any, rows: Any, state: Any) -> None:
    """Fill an empty hash table with the live rows."""
    end = np.uint64(state[_USED])
    state[_LIVE] = state[_DEAD] = state[_HAND] = 0
    for p in range(end):
        ahead = p + np.uint64(_AHEAD)
        if ahead < end and rows[ahead, ID] >= 0:
            prefetch_to_write(index, find_slot(rows[ahead, ID], shift), 1)
        if rows[p, ID] >= 0:
            index[find_free(rows[p, ID], index, shift)] = p
            state[_LIVE] += 1
