"""A directory that maps any number of 64-bit keys to rows of a table.

Keys are divided into PARTS parts by the highest bits of their hash. Each part is a hash table with linear probing, in
memory of its own, that grows alone; parts begin with different sizes, so that they do not grow in the same batch.
A part has `size` slots at which a search can begin, in the order of the hashes' lowest bits, and a few spare slots
behind them, so that a search never wraps around. When a part grows, its entries nearly keep their order, so memory is
read and written sequentially.

The parts' memory is an arena in huge pages. Parts take ever larger blocks, and give each block back before long. Blocks
are taken one after the other from reserved ranges of addresses, which are larger than what will be in use at once. Each
page of a range goes back to the system once no block in use lies on it. Where neighbouring blocks are given back at
about the same time, hardly any memory is lost. The first range has small pages, since a huge page would be much for an
arena that stays small.

An entry is two int64: the key, and its row, or EMPTY. Shapes: N keys, K keys in the directory.
"""

import math
import mmap
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hostdev.kernels.arrays import HUGE_PAGE, LINE, Keys, RowNumbers, reserve
from hostdev.kernels.counter import hashed
from hostdev.kernels.jit import address_of, array_at, ask_to_read, inline, kernel
from hostdev.kernels.pool import Task, parallel_for, run_tasks, tasks_over

_SMALL_PAGE = 1 << 16
_FIRST_RANGE = 1 << 26  # bytes of addresses; the second range has 4 times as many, then each range doubles
_FREE = getattr(mmap, "MADV_DONTNEED", None)
PARTS = 256
MOST_ROWS = 2**31 - 1
EMPTY = -1
FULL = 0.7  # at most this share of a part's slots is used
GROWTH = 1.25  # factor by which a part grows, so that at least FULL / GROWTH of a large part's slots is used
_LEAST = 16  # slots of the smallest part
_SPARE, _SPARE_A_BIT = 8, 4  # spare slots of a part: 8, and 4 for each bit of its size; the last one stays empty
AHEAD = 32  # prefetch distance in keys; also the size of the ring of addresses, so a power of 2
_GRAIN = 8192  # keys per range
_ADDRESS, _SIZE, SLOTS, COUNT = range(4)  # columns of `parts`


class Block(NamedTuple):
    """A block of memory."""

    values: npt.NDArray[np.uint8]  # [any], all 0 when it is taken
    home: "_Range"
    start: int


class _Range:
    """A range of addresses.

    Args:
        size: Bytes.
        page: Bytes of a page.

    Attributes:
        used: Bytes taken so far.
        blocks: uint32 [pages], how many blocks in use lie on each page, wholly or in part.
    """

    def __init__(self, size: int, page: int) -> None:
        self.memory, self.values = reserve(size, huge=page == HUGE_PAGE)
        self.used, self._page = 0, page
        self.blocks = np.zeros(-(-size // page), np.uint32)

    def _offset(self) -> int:
        """Return where `values` begin in `memory`."""
        return int(self.values.ctypes.data) - int(np.frombuffer(self.memory, np.uint8).ctypes.data)

    def pages(self, start: int, nbytes: int) -> slice:
        """Return the pages of a block."""
        return slice(start // self._page, -(-(start + nbytes) // self._page))

    def free(self, page: int) -> None:
        """Give a page back to the system, unless later blocks may still lie on it."""
        first = page * self._page
        last = first + self._page
        if last > self.used:
            return
        if _FREE is None:
            self.values[first:last] = 0
        else:
            self.memory.madvise(_FREE, self._offset() + first, last - first)

    @property
    def nbytes(self) -> int:
        """Bytes of the pages on which blocks in use lie, including bytes of other blocks that were given back."""
        pages = np.flatnonzero(self.blocks)
        return int(np.minimum(self.used - pages * self._page, self._page).sum())


class Arena:
    """Memory for blocks. Several threads may take blocks and give them back."""

    def __init__(self) -> None:
        self._ranges: list[_Range] = []
        self._largest = 0  # bytes; the next range has at least twice as many
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Bytes in use."""
        return sum(each.nbytes for each in self._ranges)

    def take(self, nbytes: int) -> Block:
        """Return a block that begins on a cache line; raise MemoryError if the system refuses the addresses."""
        with self._lock:
            size = -(-nbytes // LINE) * LINE
            if not self._ranges or self._ranges[-1].used + size > len(self._ranges[-1].values):
                self._ranges.append(self._next_range(size))
            home = self._ranges[-1]
            start, home.used = home.used, home.used + size
            home.blocks[home.pages(start, size)] += 1
            return Block(home.values[start : start + nbytes], home, start)

    def give_back(self, block: Block) -> None:
        """Give a block back; its memory must not be used any more."""
        home = block.home
        with self._lock:
            pages = home.pages(block.start, len(block.values))
            home.blocks[pages] -= 1
            for page in range(pages.start, pages.stop):
                if not home.blocks[page]:
                    home.free(page)
            self._ranges = [each for each in self._ranges[:-1] if each.blocks.any()] + self._ranges[-1:]

    def _next_range(self, least: int) -> _Range:
        if self._largest == 0 and least <= _FIRST_RANGE:
            self._largest = 2 * _FIRST_RANGE
            return _Range(_FIRST_RANGE, _SMALL_PAGE)
        self._largest = max(2 * self._largest, _FIRST_RANGE * -(-least // _FIRST_RANGE))
        return _Range(self._largest, HUGE_PAGE)


def as_entries(block: Block) -> Any:
    """Return a block as int64 [any, 2]."""
    return block.values.view(np.int64).reshape(-1, 2)


@inline
def find_begin(parts, key):
    """Return a key's part, and the address of the entry at which its search begins."""
    # The part is the hash's highest 8 bits. The lowest 32 bits choose the slot (Lemire, "Fast random integer generation
    # in an interval", 2019): the larger the bits, the higher the slot. The bits are other ones than those that order
    # saved keys, since loading would otherwise fill a part from its beginning on, with ever longer searches.
    found = hashed(0, key)
    part = found >> np.uint64(56)
    bits = found & np.uint64(0xFFFFFFFF)
    slot = (bits * np.uint64(parts[part, np.uint64(_SIZE)])) >> np.uint64(32)
    return part, parts[part, np.uint64(_ADDRESS)] + np.int64(slot << np.uint64(4))


@inline
def _look_ahead(keys, i, parts, ring, owners):
    """Prefetch the entry at which the search for keys[i] begins; keep its address, and the key's part, in the rings."""
    at = i & np.uint64(AHEAD - 1)
    owners[at], address = find_begin(parts, keys[i])
    ask_to_read(address)
    ring[at] = address


@inline
def start_searches(keys, begin, end, parts, ring, owners):
    """Prefetch for the first AHEAD of the keys [begin, end); then `next_search` searches for one key after another."""
    for i in range(begin, min(begin + np.uint64(AHEAD), end)):
        _look_ahead(keys, i, parts, ring, owners)


@inline
def next_search(keys, i, end, parts, ring, owners):
    """Return the address at which `find_entry` ends for keys[i], and the part of keys[i]; prefetch for a later key."""
    at = i & np.uint64(AHEAD - 1)
    address, part = ring[at], owners[at]
    # At the end, this looks at the last key again: after a branch, numba would count references to the arrays.
    _look_ahead(keys, min(i + np.uint64(AHEAD), end - np.uint64(1)), parts, ring, owners)
    return find_entry(address, keys[i]), part


@inline
def find_entry(address, key):
    """Return the address of a key's entry or, if the key has none, of the empty entry that ends its search."""
    entry = array_at(address, 2, np.int64)
    while entry[1] >= 0 and entry[0] != key:
        address += 16
        entry = array_at(address, 2, np.int64)
    return address


@inline
def first_entry(parts, part):
    """Return the address of a part's first entry."""
    return parts[part, np.uint64(_ADDRESS)]


@inline
def last_entry(parts, part):
    """Return the address of a part's last entry, which stays empty."""
    return first_entry(parts, part) + (parts[part, np.uint64(SLOTS)] - 1) * 16


@kernel
def _find(start, stop, keys, parts, rows):
    begin, end = np.uint64(start), np.uint64(stop)
    ring, owners = np.empty(AHEAD, np.int64), np.empty(AHEAD, np.uint64)
    start_searches(keys, begin, end, parts, ring, owners)
    for i in range(begin, end):
        address, _ = next_search(keys, i, end, parts, ring, owners)
        rows[i] = array_at(address, 2, np.int64)[1]


@kernel
def _insert(keys, rows, start, parts):
    """Insert keys[start:], which are distinct and new; return the index of the first key that does not fit, or N."""
    begin, end = np.uint64(start), np.uint64(len(keys))
    ring, owners = np.empty(AHEAD, np.int64), np.empty(AHEAD, np.uint64)
    start_searches(keys, begin, end, parts, ring, owners)
    for i in range(begin, end):
        address, part = next_search(keys, i, end, parts, ring, owners)
        if address >= last_entry(parts, part):
            return np.int64(i)
        entry = array_at(address, 2, np.int64)
        entry[0], entry[1] = keys[i], rows[i]
        parts[part, np.uint64(COUNT)] += 1
    return len(keys)


@kernel
def _move(old, slots, parts, part):
    """Insert the entries of a part's former memory, of `slots` slots, into its new, empty memory.

    Return whether all fit.
    """
    entries = array_at(old, 2 * slots, np.int64)
    for slot in range(np.uint64(0), np.uint64(slots)):
        key, row = entries[np.uint64(2) * slot], entries[np.uint64(2) * slot + np.uint64(1)]
        if row < 0:
            continue
        address = find_entry(find_begin(parts, key)[1], key)
        if address >= last_entry(parts, np.uint64(part)):
            return False
        entry = array_at(address, 2, np.int64)
        entry[0], entry[1] = key, row
    return True


@kernel
def _erase(keys, parts, rows):
    """Erase keys, and write their rows, or EMPTY for a key that is not in the directory."""
    end = np.uint64(len(keys))
    ring, owners = np.empty(AHEAD, np.int64), np.empty(AHEAD, np.uint64)
    start_searches(keys, np.uint64(0), end, parts, ring, owners)
    for i in range(np.uint64(0), end):
        hole, part = next_search(keys, i, end, parts, ring, owners)
        row = array_at(hole, 2, np.int64)[1]
        rows[i] = row
        if row < 0:
            continue
        parts[part, np.uint64(COUNT)] -= 1
        # Fill the hole with a later entry whose search would otherwise end at the hole, and so on (Knuth, TAOCP vol. 3,
        # section 6.4, algorithm R).
        address = hole + 16
        other = array_at(address, 2, np.int64)
        while other[1] >= 0:
            _, first = find_begin(parts, other[0])
            if first <= hole:
                entry = array_at(hole, 2, np.int64)
                entry[0], entry[1] = other[0], other[1]
                hole = address
            address += 16
            other = array_at(address, 2, np.int64)
        entry = array_at(hole, 2, np.int64)
        entry[0], entry[1] = EMPTY, EMPTY


@kernel
def _parts_of(start, stop, keys, numbers):
    for i in range(np.uint64(start), np.uint64(stop)):
        numbers[i] = np.uint8(hashed(0, keys[i]) >> np.uint64(56))


def parts_of(keys: Keys) -> npt.NDArray[np.uint8]:
    """Return the part of each key [N], uint8 [N]: the highest 8 bits of the key's hash, `mix64`."""
    numbers = np.empty(len(keys), np.uint8)
    parallel_for(_parts_of, len(keys), keys, numbers, grain=_GRAIN)
    return numbers


class KeyDirectory:
    """A map from 64-bit keys to rows.

    Several threads may call `find` at once, but not while another thread calls `insert` or `erase`.

    Args:
        expected: Expected number of keys; more are allowed.
    """

    def __init__(self, expected: int = 0) -> None:
        self.parts = np.zeros((PARTS, 4), np.int64)  # for kernels: the address, size, slots and count of each part
        self._arena = Arena()
        self._blocks: list[Block | None] = [None] * PARTS
        for part in range(PARTS):
            self._set_memory(part, _size_of(part, expected / PARTS / FULL), 0)

    def __len__(self) -> int:
        """Return the number of keys, K."""
        return int(self.parts[:, COUNT].sum())

    @property
    def nbytes(self) -> int:
        """Size of the entries in bytes."""
        return self._arena.nbytes

    def find(self, keys: Keys) -> RowNumbers:
        """Return the rows of keys [N], int32 [N]; EMPTY for a key that is not in the directory."""
        rows = np.empty(len(keys), np.int32)
        run_tasks(self.find_tasks(keys, rows))
        return rows

    def find_tasks(self, keys: Keys, rows: npt.NDArray[Any]) -> list[Task]:
        """Return the work of `find` as tasks that write the rows, int32 or int64 [N]."""
        return tasks_over(_find, len(keys), keys, self.parts, rows, grain=_GRAIN)

    def find_values(self, keys: Keys) -> npt.NDArray[np.int64]:
        """Return the rows of keys [N] as `find` does, but as int64 [N], for values that int32 cannot hold."""
        values = np.empty(len(keys), np.int64)
        run_tasks(self.find_tasks(keys, values))
        return values

    def insert(self, keys: Keys, rows: npt.NDArray[Any]) -> None:
        """Insert keys [N], which must be distinct and not in the directory (not checked).

        `rows` has their rows, int32 or int64 [N], which must be at least 0.

        Raises MemoryError, and inserts no key, if there is not enough memory.
        """
        self.reserve(keys)
        done = 0
        while (done := int(_insert(keys, rows, done, self.parts))) < len(keys):
            self.add_spare(keys[done])

    def reserve(self, keys: Keys) -> None:
        """Grow the parts in which there would not be enough memory if all keys [N] were new."""
        new = np.bincount(parts_of(keys), minlength=PARTS)
        wanted = (self.parts[:, COUNT] + new) / FULL
        self._grow(np.flatnonzero(wanted > self.parts[:, _SIZE]).tolist(), wanted)

    def add_spare(self, key: np.int64) -> None:
        """Double the spare slots of a key's part, because the key does not fit at the part's end."""
        part = int(parts_of(np.array([key]))[0])
        self._grow_part(part, int(self.parts[part, _SIZE]), 2 * self._spare(part))

    def erase(self, keys: Keys) -> RowNumbers:
        """Erase keys [N]; return their rows, int32 [N], or EMPTY for a key that was not in the directory."""
        rows = np.empty(len(keys), np.int32)
        _erase(keys, self.parts, rows)
        return rows

    def _spare(self, part: int) -> int:
        """Return the number of slots behind a part's `size` slots."""
        return int(self.parts[part, SLOTS] - self.parts[part, _SIZE])

    def _set_memory(self, part: int, size: int, spare: int) -> None:
        """Give a part new, empty memory of `size` slots and at least `spare` more, without changing its count."""
        slots = size + (spare or _SPARE + _SPARE_A_BIT * size.bit_length())
        block = self._blocks[part] = self._arena.take(16 * slots)
        memory = as_entries(block)
        memory.fill(EMPTY)
        self.parts[part, _ADDRESS], self.parts[part, _SIZE] = address_of(memory), size
        self.parts[part, SLOTS] = slots

    def _grow(self, parts: Sequence[int], wanted: npt.NDArray[np.float64]) -> None:
        """Grow parts to at least the size that is wanted; `wanted` is float64 [PARTS]."""
        run_tasks([(self._grow_part, part, _size_of(part, wanted[part]), (0,)) for part in parts])

    def _grow_part(self, part: int, size: int, spare: int) -> None:
        old, slots, held = self._blocks[part], int(self.parts[part, SLOTS]), self.parts[part].copy()
        assert old is not None
        try:
            self._set_memory(part, size, spare)
            while not _move(address_of(old.values), slots, self.parts, part):
                spare, small = 2 * self._spare(part), self._blocks[part]
                self._set_memory(part, size, spare)
                assert small is not None
                self._arena.give_back(small)
        except BaseException:  # such as MemoryError
            new, self._blocks[part], self.parts[part] = self._blocks[part], old, held
            if new is not None and new is not old:
                self._arena.give_back(new)
            raise
        self._arena.give_back(old)


def _size_of(part: int, wanted: float) -> int:
    """Return the least of a part's possible sizes that is at least `wanted`.

    A part's possible sizes differ by powers of GROWTH. Those of all parts are spread evenly, so that few parts grow in
    the same batch, and parts whose blocks are neighbours grow one after another.
    """
    least = _LEAST * GROWTH ** (part / PARTS)
    steps = max(0, math.ceil(math.log(max(float(wanted), 1.0) / least, GROWTH)))
    return int(least * GROWTH**steps) + 1
