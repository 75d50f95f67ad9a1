"""Conversion of texts to 64-bit hashes or positions in order of first occurrence, counts of keys, and a scan of quotes.

N texts are passed in Arrow's layout: their bytes end to end, uint8, and offsets, int32 or int64 [N + 1].

A `Dictionary` numbers keys in order of first occurrence, and counts how often each occurs. It is made for hundreds of
millions of keys: a key with its count takes 16 bytes, and a slot of the hash table takes 4; at most three quarters of
the slots are used. Memory is prefetched for several keys at once, to hide its latency.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from hostdev.kernels.arrays import Keys, Positions
from hostdev.kernels.hash_table import fill, find_key, find_slot
from hostdev.kernels.jit import ask_to_read, inline, kernel, prefetch_to_read

_EMPTY = -1
_AHEAD = 8  # texts between a prefetch and the use of its data
_SPARE_BITS = 1  # the table is at most half full
_MOST_TEXTS = 2**31 - 2
# The most bytes per text in the map: 20 for its hash and end, of which a fifth is spare; 16 for slots, if a quarter of
# them is used; 10 for a count. The bytes of the text itself are added to this, with a quarter more as spare memory.
BYTES_A_TEXT = 46
_FNV_BASIS, _FNV_PRIME = np.uint64(0xCBF29CE484222325), np.uint64(0x100000001B3)
IN_QUOTES = 2  # a state of `scan_quotes`
BYTES_A_VALUE = 31  # most bytes of a key in a `Dictionary`: 20 with count, if 1/5 is unused; 11 of slots, if 3/8 used
_LEAST_BITS = 10
_FULL, _OF = 3, 4  # at most 3 of 4 slots are used
_KEYS_AHEAD = 16  # prefetch distance in keys
_MOST_VALUES = 2**31 - 1


@kernel
def _hash(offsets, data, hashes):
    for i in range(len(hashes)):
        h = _FNV_BASIS
        for at in range(np.uint64(offsets[i]), np.uint64(offsets[i + 1])):
            h = (h ^ np.uint64(data[at])) * _FNV_PRIME
        hashes[i] = h


@kernel
def _same(a, start_a, b, start_b, length):
    for k in range(length):  # noqa: SIM110  (numba has no all())
        if a[np.uint64(start_a + k)] != b[np.uint64(start_b + k)]:
            return False
    return True


@kernel
def _look_for(data, begin, length, h, table, shift, known, ends, texts):
    """Return the slot of a text with hash h, and the text's position; for a new text, an empty slot and -1."""
    mask, one = np.uint64(len(table) - 1), np.uint64(1)
    slot = find_slot(h, shift)
    while True:
        position = table[slot]
        if position < 0:
            return slot, position
        at = ends[position]
        if known[position] == h and ends[position + 1] - at == length and _same(texts, at, data, begin, length):
            return slot, position
        slot = (slot + one) & mask


@inline
def _prefetch(i, hashes, table, shift, ends, places):
    """Prefetch what the lookups of the next texts read: first the slot, later the hash and end, then the bytes.

    `places` has the addresses of table, known, ends and texts.
    """
    n = np.uint64(len(hashes))
    ahead = i + np.uint64(3 * _AHEAD)
    if ahead < n:
        ask_to_read(places[0] + np.int64(find_slot(hashes[ahead], shift)) * 4)
    ahead = i + np.uint64(2 * _AHEAD)
    if ahead < n:
        position = np.maximum(np.int64(table[find_slot(hashes[ahead], shift)]), np.int64(0))
        ask_to_read(places[1] + position * 8)
        ask_to_read(places[2] + position * 8)
    ahead = i + np.uint64(_AHEAD)
    if ahead < n:
        ask_to_read(places[3] + ends[np.maximum(np.int64(table[find_slot(hashes[ahead], shift)]), np.int64(0))])


@kernel
def _add(offsets, data, hashes, start, table, shift, known, ends, texts, places, count, positions):
    """Insert texts from `start` on; stop early at a new text that does not fit.

    Return the index of the first text that was not processed, and the number of distinct texts.
    """
    for i in range(start, len(hashes)):
        _prefetch(np.uint64(i), hashes, table, np.uint64(shift), ends, places)
        h, begin = hashes[i], np.int64(offsets[i])
        length = np.int64(offsets[i + 1]) - begin
        slot, position = _look_for(data, begin, length, h, table, shift, known, ends, texts)
        if position < 0:
            if count == len(known) or ends[count] + length > len(texts):
                return i, count
            for k in range(length):
                texts[np.uint64(ends[count] + k)] = data[np.uint64(begin + k)]
            table[slot], known[count], ends[count + 1] = count, h, ends[count] + length
            position = np.int32(count)
            count += 1
        positions[i] = position
    return len(hashes), count


@kernel
def _find(offsets, data, hashes, table, shift, known, ends, texts, places, positions):
    for i in range(len(hashes)):
        _prefetch(np.uint64(i), hashes, table, np.uint64(shift), ends, places)
        begin = np.int64(offsets[i])
        length = np.int64(offsets[i + 1]) - begin
        _, positions[i] = _look_for(data, begin, length, hashes[i], table, shift, known, ends, texts)


@kernel
def _take(positions, ends, texts, offsets, out):
    for i in range(len(positions)):
        begin, to = ends[positions[i]], offsets[i]
        for k in range(offsets[i + 1] - to):
            out[np.uint64(to + k)] = texts[np.uint64(begin + k)]


def hash_texts(offsets: npt.NDArray[Any], data: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint64]:
    """Return the 64-bit FNV-1a hash of each text, uint64 [N] (Fowler, Noll & Vo)."""
    hashes = np.empty(len(offsets) - 1, np.uint64)
    _hash(offsets, data, hashes)
    return hashes


class TextMap:
    """A growing map from distinct texts to positions 0, 1, 2, ... in order of first occurrence."""

    def __init__(self) -> None:
        bits = 10
        self._shift = 64 - bits
        self._table = np.full(1 << bits, _EMPTY, np.int32)
        self._known = np.zeros(1 << (bits - _SPARE_BITS), np.uint64)  # the hash of each text
        self._ends = np.zeros(len(self._known) + 1, np.int64)
        self._texts = np.empty(1 << 14, np.uint8)
        self._count = 0

    def __len__(self) -> int:
        """Return the number of distinct texts seen."""
        return self._count

    def add(self, offsets: npt.NDArray[Any], data: npt.NDArray[np.uint8]) -> Positions:
        """Return each text's position, int32 [N]; a new text gets the next free position."""
        hashes = hash_texts(offsets, data)
        positions = np.empty(len(hashes), np.int32)
        done = 0
        while True:
            done, self._count = _add(
                offsets,
                data,
                hashes,
                done,
                self._table,
                self._shift,
                self._known,
                self._ends,
                self._texts,
                self._places(),
                self._count,
                positions,
            )
            if done == len(hashes):
                return positions
            self._grow(int(offsets[done + 1] - offsets[done]))

    def find(self, offsets: npt.NDArray[Any], data: npt.NDArray[np.uint8]) -> Positions:
        """Return each text's position, int32 [N]; -1 for an unknown text. Several threads may call this at once."""
        hashes = hash_texts(offsets, data)
        positions = np.empty(len(hashes), np.int32)
        table = self._table, self._shift, self._known, self._ends, self._texts
        _find(offsets, data, hashes, *table, self._places(), positions)
        return positions

    def _places(self) -> tuple[int, int, int, int]:
        """Return the addresses of the map's arrays."""
        table, known, ends, texts = self._table, self._known, self._ends, self._texts
        return table.ctypes.data, known.ctypes.data, ends.ctypes.data, texts.ctypes.data

    def lengths(self, positions: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        """Return the number of bytes of each text at positions [N], int64 [N]."""
        lengths: npt.NDArray[np.int64] = self._ends[positions + 1] - self._ends[positions]
        return lengths

    def take(self, positions: npt.NDArray[Any]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8]]:
        """Return copies of the texts at positions [N], as offsets [N + 1] and bytes."""
        offsets = np.zeros(len(positions) + 1, np.int64)
        np.cumsum(self.lengths(positions), out=offsets[1:])
        texts = np.empty(int(offsets[-1]), np.uint8)
        _take(positions, self._ends, self._texts, offsets, texts)
        return offsets, texts

    def _grow(self, length: int) -> None:
        if self._count == len(self._known):
            if self._count > _MOST_TEXTS:
                raise OverflowError(f"cannot number more than {self._count} distinct texts")
            if self._count == len(self._table) >> _SPARE_BITS:
                self._shift -= 1
                size = 2 * len(self._table)
                self._table = np.empty(0, np.int32)  # free the old table first
                self._table = np.full(size, _EMPTY, np.int32)
                fill(self._table, self._shift, self._known, self._count)
            room = min(len(self._table) >> _SPARE_BITS, self._count + self._count // 4 + 1024)
            self._known.resize(room, refcheck=False)  # a large array is moved without a copy
            self._ends.resize(room + 1, refcheck=False)
        needed = int(self._ends[self._count]) + length
        if needed > len(self._texts):
            self._texts.resize(max(needed, len(self._texts) + len(self._texts) // 4), refcheck=False)


@kernel
def scan_quotes(text, delimiter, state, lines, opened):
    """Find the quoted fields in the next chunk of a delimited text (RFC 4180).

    Pass 0 for `state`, `lines` and `opened` with the first chunk, and the results of the previous call with each other
    chunk.

    Args:
        text: uint8 [N], the chunk.
        delimiter: The byte between fields.
        state: 0 at the start of a field, 1 in an unquoted field, 2 in quotes, 3 after a quote character within quotes.
        lines: Number of line ends before the chunk.
        opened: Number, counted from 1, of the line on which the last quoted field before the chunk begins.

    Returns:
        The state, lines and opened at the end of the chunk; and the number of bytes up to and including the chunk's
        last line end that is not in quotes.
    """
    end = 0
    for i in range(len(text)):
        c = text[i]
        if c == 10:
            lines += 1
            if state != 2:
                end = i + 1
        if state == 2:
            if c == 34:
                state = 3
        elif c == 34 and state == 3:
            state = 2  # a doubled quote within quotes is one quote
        elif c == 34 and state == 0:
            state, opened = 2, lines + 1
        elif c in (delimiter, 10, 13):
            state = 0
        else:
            state = 1
    return state, lines, opened, end


@kernel
def _add_keys(keys, uses, start, slots, shift, known, counts, count):
    """Count keys[start:]; stop early at a new key that does not fit.

    Return the index of the first key that was not counted, and the number of distinct keys.
    """
    stop = np.uint64(len(keys))
    for i in range(np.uint64(start), stop):
        ahead = i + np.uint64(_KEYS_AHEAD)
        if ahead + np.uint64(_KEYS_AHEAD) < stop:
            prefetch_to_read(slots, find_slot(keys[ahead + np.uint64(_KEYS_AHEAD)], shift), 1)
        if ahead < stop:
            position = slots[find_slot(keys[ahead], shift)]
            prefetch_to_read(known, max(position, np.int32(0)), 1)
            prefetch_to_read(counts, max(position, np.int32(0)), 1)
        slot, position = find_key(keys[i], slots, shift, known)
        if position < 0:
            if count == len(known):
                return np.int64(i), count
            slots[slot] = position = count
            known[np.uint64(count)], counts[np.uint64(count)] = keys[i], 0
            count += 1
        counts[np.uint64(position)] += np.int64(uses[i])
    return np.int64(stop), count


@kernel
def _find_keys(keys, slots, shift, known, positions):
    stop = np.uint64(len(keys))
    for i in range(stop):
        ahead = i + np.uint64(_KEYS_AHEAD)
        if ahead + np.uint64(_KEYS_AHEAD) < stop:
            prefetch_to_read(slots, find_slot(keys[ahead + np.uint64(_KEYS_AHEAD)], shift), 1)
        if ahead < stop:
            prefetch_to_read(known, max(slots[find_slot(keys[ahead], shift)], np.int32(0)), 1)
        _, positions[i] = find_key(keys[i], slots, shift, known)


class Dictionary:
    """A growing map from keys to numbers 0, 1, 2, ... in order of first occurrence, with a count for each key.

    Several threads may call `find` at once.
    """

    def __init__(self) -> None:
        self._shift = 64 - _LEAST_BITS
        self._slots = np.full(1 << _LEAST_BITS, _EMPTY, np.int32)
        room = (1 << _LEAST_BITS) * _FULL // _OF
        self._keys, self._uses = np.empty(room, np.int64), np.empty(room, np.int64)
        self._count = 0

    def __len__(self) -> int:
        """Return the number of distinct keys."""
        return self._count

    @property
    def keys(self) -> Keys:
        """The distinct keys in order of first occurrence, int64 [len(self)]: a view, valid until `count` is called."""
        return self._keys[: self._count]

    @property
    def uses(self) -> Keys:
        """The number of occurrences of each key, int64 [len(self)]: a view, valid until `count` is called."""
        return self._uses[: self._count]

    def count(self, keys: Keys, uses: npt.NDArray[Any]) -> None:
        """Add uses[i] to the count of keys[i] for each i; `keys` is int64 [N]."""
        done = 0
        while True:
            done, self._count = _add_keys(
                keys, uses, done, self._slots, self._shift, self._keys, self._uses, self._count
            )
            if done == len(keys):
                return
            self._grow()

    def find(self, keys: Keys) -> npt.NDArray[np.int64]:
        """Return each key's number, int64 [N]; -1 for an unknown key."""
        positions = np.empty(len(keys), np.int64)
        _find_keys(keys, self._slots, self._shift, self._keys, positions)
        return positions

    def _grow(self) -> None:
        if self._count == _MOST_VALUES:
            raise OverflowError(f"cannot number more than {self._count} distinct values")
        room = min(len(self._slots) * _FULL // _OF, _MOST_VALUES)
        if self._count == room:
            self._shift -= 1
            size = 2 * len(self._slots)
            self._slots = np.empty(0, np.int32)  # free the old slots first
            self._slots = np.full(size, _EMPTY, np.int32)
            fill(self._slots, self._shift, self._keys, self._count)
            room = min(size * _FULL // _OF, _MOST_VALUES)
        size = min(room, self._count + self._count // 4 + 1024)
        for array in (self._keys, self._uses):
            array.resize(size, refcheck=False)  # a large array is moved without a copy
