"""The next use of each row in the announced batches, for the policy "nearest".

Each announced batch has an array: for each of its ids, the number of the next batch that uses the id. When a batch is
announced, it writes its number for each of its ids into the array of the last announced batch with this id (at the
position in word BEFORE of the row's data) or, if there is none, into word NEXT of the row's data. When a batch is
planned, the values of its array become the words NEXT of its rows. The cost does not depend on the window.
"""

from collections import deque
from typing import Any

import numpy as np
import numpy.typing as npt

from hostdev.cache.planning import BEFORE, COUNT, DECAYS, LAST, NEXT, RECENT, PlanContext
from hostdev.kernels.arrays import AnyIds
from hostdev.kernels.jit import address_of, array_at, kernel, prefetch_to_read
from hostdev.kernels.pool import parallel_for

_AHEAD = 64  # prefetch distance in rows
_GRAIN = 1 << 14


class NextUses:
    """The next uses of the rows of announced batches.

    Args:
        window: Number of batches that may be announced in addition to the next one to plan.
    """

    def __init__(self, window: int) -> None:
        self._following: deque[npt.NDArray[np.int32]] = deque()  # the batches' arrays; 0: no next batch is announced
        self._places = np.zeros((window + 1, 2), np.int64)  # their addresses and lengths, by batch modulo window + 1

    @property
    def nbytes(self) -> int:
        """Memory in bytes."""
        return sum(each.nbytes for each in self._following)

    def announce(self, positions: AnyIds, now: PlanContext, rows: Any, values: Any, decays: Any) -> None:
        """Record that batch `now.latest` uses the rows at these positions [U], all different."""
        following = np.zeros(len(positions), np.int32)
        self._following.append(following)
        self._places[now.latest % len(self._places)] = address_of(following), len(following)
        parallel_for(announce, len(positions), positions, now, rows, values, decays, self._places, grain=_GRAIN)

    def plan(self, positions: AnyIds, rows: Any) -> None:
        """Set the next use of the rows of the earliest announced batch, whose data is at these positions [U]."""
        following = self._following.popleft()
        assert len(following) == len(positions)
        parallel_for(advance, len(positions), positions, following, rows, grain=_GRAIN)

    def clear(self) -> None:
        """Forget all announced batches; the caller must call `forget` before it announces another batch."""
        self._following.clear()
        self._places[:] = 0

    def __len__(self) -> int:
        return len(self._following)

    @staticmethod
    def forget(known: npt.NDArray[np.int32]) -> None:
        """Forget the next use of all rows, whose data is `known`."""
        known[:, NEXT] = 0


@kernel
def announce(start: Any, stop: Any, positions: Any, now: Any, rows: Any, values: Any, decays: Any, places: Any) -> None:
    """Record that batch `now.latest` uses the rows at positions[start:stop]; `now.number` is the next one to plan."""
    end, number = np.uint64(stop), np.int64(now.latest)
    for p in range(np.uint64(start), end):
        if p + np.uint64(_AHEAD) < end:
            prefetch_to_read(rows, positions[p + np.uint64(_AHEAD)], 1)
        row = np.uint64(positions[p])
        last: Any = np.int64(rows[row, LAST])
        if last >= np.int64(now.number):
            before = np.uint64(rows[row, BEFORE])
            place = np.uint64(last) % np.uint64(len(places))
            if before < np.uint64(places[place, 1]):  # not for a batch that an interrupted call has left in `rows`
                array_at(places[place, 0], before + np.uint64(1), np.int32)[before] = number
        else:
            rows[row, NEXT] = number
        rows[row, LAST], rows[row, BEFORE] = number, p
        ago: Any = min(number - last, DECAYS - 1)
        values[row, RECENT] = values[row, RECENT] * decays[np.uint64(ago)] + np.float32(1)
        rows[row, COUNT] += 1


@kernel
def advance(start: Any, stop: Any, positions: Any, following: Any, rows: Any) -> None:
    """Set the next use of the rows at positions[start:stop] to following[start:stop]."""
    end = np.uint64(stop)
    for p in range(np.uint64(start), end):
        if p + np.uint64(_AHEAD) < end:
            prefetch_to_read(rows, positions[p + np.uint64(_AHEAD)], 1)
        rows[np.uint64(positions[p]), NEXT] = following[p]
