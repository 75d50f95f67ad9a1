"""state_sha256: a digest of everything that training has learned. Equal digests mean equal models.

It is the SHA-256 of, in order: the line "hostdev state 2"; the tables, sorted by name; the arrays of the dense part.
A table contributes a line with its name and number of steps, then its columns: the weights, then the optimizer state
sorted by name. A column contributes a line with name, dtype and shape, and the 32-byte SHA-256 of each range of its
rows. The number of rows in a range is the largest power of two whose weights take at most 1 MiB, but at least 1. An
array of the dense part contributes such a line and its bytes. Arrays are row-major and little-endian.

A table by key contributes a line that also has its number of keys, its key steps, and the names of its
out-of-vocabulary rows as JSON; then a line with name, dtype and shape, and the bytes, of each array of `KeyArrays`;
then its columns, whose rows are the out-of-vocabulary rows and then the rows of the keys. Keys are in the order of
their hashes.

Several threads hash the ranges. Ranges known to be unchanged are not read again. The operating
system is told which pages of memory-mapped files will be read soon, or in random order.
"""

import ctypes
import json
import mmap
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from hashlib import sha256
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hostdev.core.keys import KeyArrays
from hostdev.core.machine import available_cpus
from hostdev.core.workers import Workers

RANGE_BYTES = 1 << 20  # bytes of weights per range
_PIECE_BYTES = 1 << 24
_COPIED_BYTES = 1 << 18
_TOGETHER = 8  # maximum number of ranges that a thread hashes per call
_QUEUED = 2  # maximum number of queued calls per thread

Digests = npt.NDArray[np.uint8]  # [ranges, 32]
Fetch = Callable[[], Any]  # returns rows, float32
_POPULATE_READ = 22  # MADV_POPULATE_READ in linux/mman.h, since Linux 5.14


class DigestColumn(NamedTuple):
    """A column of a table: weights or optimizer state.

    `ranges` is called with ascending numbers of row ranges. For each number it yields a function that returns the rows
    of that range; another thread may call this function.
    """

    name: str
    shape: tuple[int, int]
    ranges: Callable[[Sequence[int]], Iterable[Fetch]]


class RangeDigests(NamedTuple):
    """SHA-256 digests of a table's row ranges.

    Attributes:
        by_column: Digests, uint8 [ranges, 32], by column.
        known: [ranges], whether the range's digests are valid.
    """

    by_column: dict[str, Digests]
    known: npt.NDArray[np.bool_]


def rows_per_range(dim: int) -> int:
    """Return the number of rows per range, a power of two, for a table of `dim` columns."""
    return 1 << max(0, (RANGE_BYTES // (4 * dim)).bit_length() - 1)


def in_order(columns: Sequence[DigestColumn]) -> list[DigestColumn]:
    """Return a table's columns in the digest's order: the weights, `columns[0]`, then the other columns by name."""
    return [columns[0], *sorted(columns[1:], key=lambda column: column.name)]


def range_digests(rows: Any, length: int) -> Digests:
    """Return the SHA-256 of each range of `length` rows in an array [n, ...]; the last range may be shorter."""
    found = [_sha256(rows[start : start + length]) for start in range(0, len(rows), length)]
    return np.frombuffer(b"".join(found), np.uint8).reshape(len(found), 32)


class StateDigest:
    """The SHA-256 digest that the module docstring defines.

    Args:
        threads: Number of hashing threads, or None for one per processor.
    """

    def __init__(self, threads: int | None = None) -> None:
        self._digest = sha256(b"hostdev state 2\n")
        self._threads = threads or available_cpus()

    def table(
        self,
        name: str,
        step: int,
        columns: Sequence[DigestColumn],
        known: RangeDigests | None = None,
        keys: KeyArrays | None = None,
    ) -> None:
        """Add a table; tables must be added in the order of their names.

        Args:
            name: The table's name.
            step: Its number of steps.
            columns: The weights, then the optimizer state in any order.
            known: The digests that are known and not computed again, or None to compute all.
            keys: The keys of a table by key.
        """
        if keys is None:
            self._digest.update(f"table {name} step {step}\n".encode())
        else:
            about = f"{len(keys.keys)} keys step {keys.step} unknown {json.dumps(keys.unknown)}"
            self._digest.update(f"table {name} step {step} {about}\n".encode())
            for what, values in keys._asdict().items():
                if isinstance(values, np.ndarray):
                    self.array(f"{name}/{what}", str(values.dtype), values.shape, [values])
        length = rows_per_range(columns[0].shape[1])
        for column in in_order(columns):
            self._digest.update(f"{name}/{column.name} float32 {list(column.shape)}\n".encode())
            self._digest.update(self._column(column, length, known).data)

    def array(self, name: str, dtype: str, shape: Iterable[int], pieces: Iterable[Any]) -> None:
        """Add an array of the dense part, or of a table's keys; `pieces` yields its content in chunks."""
        self._digest.update(f"{name} {dtype} {list(shape)}\n".encode())
        for piece in pieces:
            self._digest.update(np.ascontiguousarray(piece).data)

    def hexdigest(self) -> str:
        """Return the digest so far."""
        return self._digest.hexdigest()

    def _column(self, column: DigestColumn, length: int, known: RangeDigests | None) -> Digests:
        """Return the digests of a column's ranges."""
        count = -(-column.shape[0] // length)
        if known is None:
            digests, numbers = np.empty((count, 32), np.uint8), list(range(count))
        else:
            digests, numbers = known.by_column[column.name].copy(), np.flatnonzero(~known.known).tolist()
        if numbers:
            found = self._hash(column.ranges(numbers), len(numbers))
            for number, digest in zip(numbers, found, strict=True):
                digests[number] = np.frombuffer(digest, np.uint8)
        return digests

    def _hash(self, ranges: Iterable[Fetch], count: int) -> Iterator[bytes]:
        """Yield the SHA-256 of each of `count` ranges."""
        threads = min(self._threads, count)
        if threads < 2:
            yield from (_sha256(fetch()) for fetch in ranges)
            return
        with Workers(threads, "hostdev-digest") as pool, pool.drop_queued_on_error():
            waiting: deque[Future[list[bytes]]] = deque()
            together = max(1, min(_TOGETHER, count // (4 * threads)))
            for fetches in _batched(ranges, together):
                waiting.append(pool.submit(partial(_sha256_of_each, fetches)))
                if len(waiting) > _QUEUED * threads:
                    yield from waiting.popleft().result()
            while waiting:
                yield from waiting.popleft().result()


def ranges_of(rows: Any, length: int, numbers: Sequence[int]) -> Iterator[Fetch]:
    """Yield, for each range number, a function that slices the range out of `rows`; a range has `length` rows."""
    for number in numbers:
        yield partial(rows.__getitem__, slice(number * length, (number + 1) * length))


def ranges_in_order(pieces: Callable[[], Iterable[Any]], length: int, _: Sequence[int]) -> Iterator[Fetch]:
    """Yield, for each range of `length` rows of an array, a function that returns its rows.

    `pieces` yields the array in order, in chunks of any length. Pages of memory-mapped chunks are mapped one range at a
    time.
    """
    parts: list[Any] = []
    have = 0
    for piece in pieces():
        start = 0
        while start < len(piece):
            part = piece[start : start + length - have]
            parts.append(part)
            start, have = start + len(part), have + len(part)
            if have == length:
                yield partial(_joined, parts)
                parts, have = [], 0
    if parts:
        yield partial(_joined, parts)


def pieces_of(rows: Any, fetch: Callable[[Any], Any]) -> Iterator[Any]:
    """Split rows [n, ...] into chunks of up to 16 MiB, and yield fetch(chunk) for each; chunks are never empty."""
    step = max(1, _PIECE_BYTES // max(1, rows[:1].nbytes))
    for start in range(0, len(rows), step):
        yield fetch(rows[start : start + step])


def _joined(parts: list[Any]) -> Any:
    for part in parts:
        populate(part)
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _sha256_of_each(fetches: Sequence[Fetch]) -> list[bytes]:
    return [_sha256(fetch()) for fetch in fetches]


def _batched(items: Iterable[Fetch], n: int) -> Iterator[list[Fetch]]:
    """Yield lists of n items; the last may be shorter."""
    held = iter(items)
    while part := list(islice(held, n)):
        yield part


def _sha256(rows: Any) -> bytes:
    """Return the SHA-256 of rows; if they are not contiguous, copy only a few at a time, to stay in the CPU's cache."""
    values = np.asarray(rows)
    if values.flags.c_contiguous:
        return sha256(values.data).digest()
    digest, step = sha256(), max(1, _COPIED_BYTES // max(1, values[:1].nbytes))
    copy = np.empty((min(step, len(values)), *values.shape[1:]), values.dtype)
    for start in range(0, len(values), step):
        part = copy[: min(step, len(values) - start)]
        np.copyto(part, values[start : start + step])
        digest.update(part.data)
    return digest.digest()


_madvise: Any = None


def populate(array: npt.NDArray[Any]) -> None:
    """Map the pages of a memory-mapped array, and read those that are not in memory from the file.

    Do nothing on systems other than Linux 5.14 or later, or if the array is not C-contiguous.
    """
    if not sys.platform.startswith("linux") or not array.flags.c_contiguous or not array.nbytes:
        return
    _advise(array, _POPULATE_READ)  # fails without effect before Linux 5.14


def read_singly(array: npt.NDArray[Any]) -> None:
    """Turn off read-ahead for the pages of a memory-mapped array; do nothing where mmap has no such hint."""
    if hasattr(mmap, "MADV_RANDOM") and array.nbytes:
        _advise(array, mmap.MADV_RANDOM)


def _advise(array: npt.NDArray[Any], advice: int) -> None:
    global _madvise
    if _madvise is None:
        _madvise = ctypes.CDLL(None).madvise
        _madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    begin = array.ctypes.data // mmap.PAGESIZE * mmap.PAGESIZE
    _madvise(begin, array.ctypes.data + array.nbytes - begin, advice)
