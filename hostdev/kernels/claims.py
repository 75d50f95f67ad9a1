"""Which rows of a batch an earlier, unfinished batch will still update, for every batch in turn.

Each row of the tables remembers the last batch that claimed it, in one byte, so that the rows of a batch are found in
the cache. Batches are numbered 1, 2, 3, ...; their tags repeat after 255, and are forgotten before they do.

U unique ids, V rows.
"""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hostdev.kernels.jit import kernel, prefetch_to_write
from hostdev.kernels.pool import parallel_for

Positions = npt.NDArray[np.int32]

MOST_UNFINISHED = 100  # batches; a tag is forgotten when it is older, and looked for every so many batches
_TAGS = 255
_AHEAD = 16  # rows


class Claimed(NamedTuple):
    """Positions in a batch's unique ids: the rows that are free, and those that come late."""

    free: Positions  # no unfinished batch updates them
    late: Positions
    owner: npt.NDArray[np.int32]  # per late row: the batch after whose update it may be read


def _tag(number: int) -> int:
    return 1 + (number - 1) % _TAGS


@kernel
def _claim(ids: Any, claims: Any, tag: Any, owner_of: Any, free: Any, late: Any, owner: Any) -> Any:
    frees, lates = np.uint64(0), np.uint64(0)
    for u in range(np.uint64(0), np.uint64(len(ids))):
        if u + np.uint64(_AHEAD) < np.uint64(len(ids)):
            prefetch_to_write(claims, ids[u + np.uint64(_AHEAD)], 1)
        row = np.uint64(ids[u])
        before = owner_of[np.uint64(claims[row])]
        claims[row] = tag
        free[frees] = late[lates] = u
        owner[lates] = before
        frees += np.uint64(before == 0)
        lates += np.uint64(before != 0)
    return np.int64(frees)


@kernel
def _forget(start: Any, stop: Any, claims: Any, keep: Any) -> None:
    for row in range(np.uint64(start), np.uint64(stop)):
        claims[row] = keep[np.uint64(claims[row])]


def claim(ids: npt.NDArray[Any], claims: npt.NDArray[np.uint8], number: int, oldest: int, newest: int) -> Claimed:
    """Claim the rows of batch `number` and return which of them an earlier batch has yet to update.

    ids     int32 or int64 [U], unique, each in [0, V)
    claims  uint8 [V], zeros before the first batch, overwritten
    number  one more than at the call before
    oldest  the oldest batch whose update is not finished; at most MOST_UNFINISHED before `number`
    newest  the newest batch that is waited for; a row of a later one waits for this one instead
    """
    oldest = max(oldest, 1)
    if number - oldest > MOST_UNFINISHED:
        raise ValueError(f"batch {number} cannot be claimed while {oldest} is unfinished")
    if number % MOST_UNFINISHED == 0:
        keep = np.zeros(_TAGS + 1, np.uint8)
        recent = [_tag(earlier) for earlier in range(max(1, number - MOST_UNFINISHED), number)]
        keep[recent] = recent
        parallel_for(_forget, len(claims), claims, keep, grain=1 << 16)
    owner_of = np.zeros(_TAGS + 1, np.int32)
    for earlier in range(oldest, number if newest >= oldest else oldest):
        owner_of[_tag(earlier)] = min(earlier, newest)
    U = len(ids)
    free, late, owner = np.empty((3, U + 1), np.int32)  # one more, as a place is written before it is known to count
    frees = _claim(ids, claims, np.uint8(_tag(number)), owner_of, free, late, owner)
    return Claimed(free[:frees], late[: U - frees], owner[: U - frees])


@kernel
def _claimed_by(ids: Any, claims: Any, tag: Any, out: Any) -> Any:
    count = np.uint64(0)
    for u in range(np.uint64(0), np.uint64(len(ids))):
        out[count] = u
        count += np.uint64(claims[np.uint64(ids[u])] == tag)
    return np.int64(count)


def claimed_by(ids: npt.NDArray[Any], claims: npt.NDArray[np.uint8], number: int) -> Positions:
    """Return the positions in ids [U] of the rows that batch `number`, a recent one, claimed last; ascending."""
    out = np.empty(len(ids) + 1, np.int32)
    return out[: _claimed_by(ids, claims, np.uint8(_tag(number)), out)]


@kernel
def _others(marked: Any, out: Any) -> None:
    count = np.uint64(0)
    for i in range(np.uint64(0), np.uint64(len(marked))):
        out[count] = i
        count += np.uint64(not marked[i])


def others(n: int, positions: Positions) -> Positions:
    """Return the positions in range(n) that are not in `positions`, ascending."""
    marked = np.zeros(n, np.bool_)
    marked[positions] = True
    out = np.empty(n - len(positions) + 1, np.int32)
    _others(marked, out)
    return out[:-1]
