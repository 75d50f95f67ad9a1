"""Detection of read-after-write hazards: rows of a batch that an earlier, unfinished batch will still update.

A batch claims the rows that it will update. For each table row, one byte holds the tag of the last batch that claimed
the row; the CPU's cache would hold fewer tags if they were larger. Batches are numbered 1, 2, 3, ...; tags repeat after
255 batches, and old tags are cleared before that.

A join finds the ids that two arrays have in common, with a hash table and linear probing.

Shapes: U unique ids, V rows.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hostdev.kernels.arrays import Positions
from hostdev.kernels.hash_table import find_free, find_key, find_slot
from hostdev.kernels.jit import kernel, prefetch_to_read
from hostdev.kernels.pool import KernelTask, parallel_for, ranges, run_tasks
from hostdev.kernels.unique import renumber

MOST_UNFINISHED = 100  # batches; also the interval at which older tags are cleared
_TAGS = 255
_AHEAD = 64  # prefetch distance in rows
_GRAIN = 1 << 14
_FILTER_BITS = 16
_FILTER_SHIFT = 64 - _FILTER_BITS
_LEAST_BITS = 4
_JOIN_FILTER_BITS = 3  # the filter has 2^3 times as many places as the hash table


class Late(NamedTuple):
    """The conflicting rows of a batch: rows that an earlier, unfinished batch will update."""

    rows: Positions  # positions in the batch's unique ids, ascending
    owner: npt.NDArray[np.int32]  # for each of these rows, the batch whose update must precede the read

    def first(self, n: int) -> "Late":
        """Return the conflicting rows among the first n ids of the batch."""
        count = int(np.searchsorted(self.rows, n))
        return Late(self.rows[:count], self.owner[:count])


class Claims:
    """For each row of a table, the last batch that claimed it.

    Attributes:
        tags: uint8 [V], the tag of the last batch that claimed each row; 0 if there is none.

    Args:
        rows: V; memory is taken only for the rows that are claimed.
        get_used: Returns the ranges of rows that may have been claimed; None for all rows.
    """

    def __init__(self, rows: int, get_used: Callable[[], Sequence[tuple[int, int]]] | None = None) -> None:
        self.tags = np.zeros(rows, np.uint8)
        self._get_used = get_used or (lambda: [(0, rows)])
        self._forgotten = 0  # the batch at which old tags were cleared last
        self._made: deque[int] = deque()  # the batches that claimed rows since then, and recent earlier ones

    def begin(self, number: int) -> None:
        """Begin batch `number`, and clear old tags if they were last cleared `MOST_UNFINISHED` or more batches ago.

        Tags are old if they are of batches before number - MOST_UNFINISHED. Numbers may be skipped, since evaluation
        batches claim no rows.
        """
        if number - self._forgotten >= MOST_UNFINISHED:
            while self._made and self._made[0] < number - MOST_UNFINISHED:
                self._made.popleft()
            keep = np.zeros(_TAGS + 1, np.uint8)
            recent = [_tag(earlier) for earlier in self._made]
            keep[recent] = recent
            for start, stop in self._get_used():
                parallel_for(renumber, stop - start, self.tags[start:stop], keep, grain=1 << 16)
            self._forgotten = number
        self._made.append(number)


def _tag(number: int) -> int:
    return 1 + (number - 1) % _TAGS


@kernel
def _claim(start, stop, ids, claims, tag, owner_of, late, owner, counts, piece):
    """Claim the rows ids[start:stop].

    Write the positions of the conflicting rows to late[start:], the batches to wait for to owner[start:], and the
    number of conflicting rows to counts[piece].
    """
    count = np.uint64(start)
    for u in range(np.uint64(start), np.uint64(stop)):
        if u + np.uint64(_AHEAD) < np.uint64(stop):
            prefetch_to_read(claims, ids[u + np.uint64(_AHEAD)], 1)
        row = np.uint64(ids[u])
        before = owner_of[np.uint64(claims[row])]
        claims[row] = tag
        late[count], owner[count] = u, before
        count += np.uint64(before != 0)
    counts[piece] = count - np.uint64(start)


def claim(ids: npt.NDArray[Any], claims: Claims, number: int, oldest: int, newest: int) -> Late:
    """Claim the rows of batch `number`, and return the conflicting rows, which an earlier batch will still update.

    Args:
        ids: int32 or int64 [U], unique, each in [0, V).
        claims: The claims on the table's rows, updated.
        number: The batch's number, larger than in the previous call.
        oldest: The oldest unfinished batch, at most MOST_UNFINISHED before `number`.
        newest: The newest batch to wait for. It is also returned as the owner of rows that a later batch has claimed.
    """
    oldest = max(oldest, 1)
    if number - oldest > MOST_UNFINISHED:
        raise ValueError(
            f"batch {number} cannot claim rows while batch {oldest}, more than {MOST_UNFINISHED} batches earlier, is "
            "unfinished"
        )
    claims.begin(number)
    owner_of = np.zeros(_TAGS + 1, np.int32)
    for earlier in range(oldest, number if newest >= oldest else oldest):
        owner_of[_tag(earlier)] = min(earlier, newest)
    late, owner = np.empty((2, len(ids)), np.int32)
    pieces = ranges(len(ids), _GRAIN)
    counts = np.zeros(len(pieces), np.int64)
    shared = (ids, claims.tags, np.uint8(_tag(number)), owner_of, late, owner, counts)
    run_tasks([KernelTask(_claim, len(ids), _GRAIN, len(pieces), shared)])
    found = [slice(start, start + count) for (start, _), count in zip(pieces, counts.tolist(), strict=True)]
    empty = np.empty(0, np.int32)
    return Late(*(np.concatenate([empty, *(of[part] for part in found)]) for of in (late, owner)))


@kernel
def _intersect(ids, others, maybe, claims, tag, out):
    for i in range(np.uint64(0), np.uint64(len(others))):
        maybe[find_slot(others[i], _FILTER_SHIFT)] = True
    count = np.uint64(0)
    for u in range(np.uint64(0), np.uint64(len(ids))):
        if maybe[find_slot(ids[u], _FILTER_SHIFT)] and claims[np.uint64(ids[u])] == tag:
            out[count] = u
            count += np.uint64(1)
    return np.int64(count)


def intersect(ids: npt.NDArray[Any], others: npt.NDArray[Any], claims: Claims, number: int) -> Positions:
    """Return the positions in `ids` of the ids that are also in `others`, ascending.

    Args:
        ids: int32 or int64 [U], the unique ids of the batch before batch `number`.
        others: The ids of batch `number` whose rows the batch before it will still update.
        claims: The claims on the table's rows; batch `number` must be the last batch that claimed rows.
        number: The number of the later of the two batches.
    """
    maybe = np.zeros(1 << _FILTER_BITS, np.bool_)  # a filter that fits the cache and saves most reads of tags
    out = np.empty(len(ids), np.int32)
    return out[: _intersect(ids, others, maybe, claims.tags, np.uint8(_tag(number)), out)]


@kernel
def _others(marked, out):
    count = np.uint64(0)
    for i in range(np.uint64(0), np.uint64(len(marked))):
        out[count] = i
        count += np.uint64(not marked[i])


def others(n: int, positions: Positions) -> Positions:
    """Return the numbers in range(n) that are not in `positions`, ascending."""
    marked = np.zeros(n, np.bool_)
    marked[positions] = True
    out = np.empty(n - len(positions) + 1, np.int32)
    _others(marked, out)
    return out[:-1]


@kernel
def _join(ids, others, table, maybe, shift, first, second):
    """Write the positions of common ids in `ids` to `first` and in `others` to `second`; return how many there are.

    Args:
        table: int32 [2 ** (64 - shift)], filled with -1: memory for the hash table of `others`.
        maybe: bool, eight times as long, all False: memory for a filter that rejects, without branches, most ids that
            are not in `others`.
    """
    fine = np.uint64(shift) - np.uint64(_JOIN_FILTER_BITS)
    for j in range(np.uint64(len(others))):
        maybe[find_slot(others[j], fine)] = True
        table[find_free(others[j], table, shift)] = j
    candidates = np.uint64(0)
    for i in range(np.uint64(len(ids))):
        first[candidates] = i
        candidates += np.uint64(maybe[find_slot(ids[i], fine)])
    count = np.uint64(0)
    for c in range(candidates):
        at = np.uint64(first[c])
        _, position = find_key(ids[at], table, shift, others)
        if position >= 0:
            first[count], second[count] = at, position
            count += np.uint64(1)
    return np.int64(count)


def join(ids: npt.NDArray[Any], others: npt.NDArray[Any]) -> tuple[Positions, Positions]:
    """Find the ids that two arrays have in common; return their positions in `ids`, ascending, and in `others`.

    Args:
        ids: int32 or int64 [U], unique.
        others: int32 or int64 [M], unique; should be the smaller array, since the hash table is built from it.
    """
    bits = max(_LEAST_BITS, (2 * len(others)).bit_length())
    table, maybe = np.full(1 << bits, -1, np.int32), np.zeros(1 << (bits + _JOIN_FILTER_BITS), np.bool_)
    first, second = np.empty(len(ids) + 1, np.int32), np.empty(min(len(ids), len(others)), np.int32)
    count = _join(ids, others, table, maybe, np.uint64(64 - bits), first, second)
    return first[:count], second[:count]
