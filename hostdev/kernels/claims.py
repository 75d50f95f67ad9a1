"""Which rows of a batch an earlier, unfinished batch will still update, for every batch in turn.

Each row of the tables remembers the last batch that claimed it, and where in that batch's unique ids it stands. Batches
are numbered 1, 2, 3, ...; 0 is nobody.

U unique ids, V rows.
"""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hostdev.kernels.jit import kernel, prefetch_to_write

Positions = npt.NDArray[np.int32]

_AHEAD = 16  # rows


class Claimed(NamedTuple):
    """Positions in a batch's unique ids: the rows that are free, and those that come late."""

    free: Positions  # no unfinished batch updates them
    late: Positions
    owner: npt.NDArray[np.int32]  # per late row: the batch after whose update it may be read
    source: Positions  # per late row: its position in that batch


@kernel
def _claim(
    ids: Any, owners: Any, number: Any, oldest: Any, newest: Any, free: Any, late: Any, late_owner: Any, source: Any
) -> Any:
    frees, lates, one = np.uint64(0), np.uint64(0), np.uint64(1)
    for u in range(np.uint64(0), np.uint64(len(ids))):
        if u + np.uint64(_AHEAD) < np.uint64(len(ids)):
            prefetch_to_write(owners, ids[u + np.uint64(_AHEAD)], 8)
        row = np.uint64(ids[u])
        owner = min(owners[row, 0], newest)
        if owner < oldest:
            free[frees] = u
            frees += one
        else:
            late[lates], late_owner[lates], source[lates] = u, owner, owners[row, 1]
            lates += one
        owners[row, 0], owners[row, 1] = number, u
    return np.int64(frees)


def claim(ids: npt.NDArray[Any], owners: npt.NDArray[np.int32], number: int, oldest: int, newest: int) -> Claimed:
    """Claim the rows of batch `number` and return which of them an earlier batch has yet to update.

    ids     int32 or int64 [U], unique, each in [0, V)
    owners  int32 [V, 2], overwritten: the last batch to claim a row, and the row's position there
    oldest  the oldest batch whose update is not finished
    newest  the newest batch that is waited for; a row of a later one waits for this one instead (`source` is then
            its position in the later one)
    """
    U = len(ids)
    free, late, owner, source = np.empty((4, U), np.int32)
    numbers = (np.int32(value) for value in (number, oldest, newest))
    frees = _claim(ids, owners, *numbers, free, late, owner, source)
    lates = U - frees
    return Claimed(free[:frees], late[:lates], owner[:lates], source[:lates])


@kernel
def _others(marked: Any, out: Any) -> None:
    count, one = np.uint64(0), np.uint64(1)
    for i in range(np.uint64(0), np.uint64(len(marked))):
        if not marked[i]:
            out[count] = i
            count += one


def others(n: int, positions: Positions) -> Positions:
    """Return the positions in range(n) that are not in `positions`, ascending."""
    marked = np.zeros(n, np.bool_)
    marked[positions] = True
    out = np.empty(n - len(positions), np.int32)
    _others(marked, out)
    return out
