"""The rows of a table by key that no key has: free ones, and those that keys without a row use for one batch."""

from collections import deque
from collections.abc import Callable

import numpy as np

from hostdev.core.errors import UserError
from hostdev.host.key_plan import NO_ROWS
from hostdev.kernels.arrays import RowNumbers

_CHECKED_ROWS = 1 << 16  # the memory is checked each time that this many rows are used for the first time


class FreeRows:
    """Gives out rows, first those that were used before.

    Args:
        space: V, the most rows.
        require_memory: As for `KeyIndex`.

    Attributes:
        rows: Number of rows that have ever been used.
        returned: Rows that can be used again, from other threads.
    """

    def __init__(self, space: int, require_memory: Callable[[int, int], None]) -> None:
        self.row_space, self.rows = space, 0
        self._require_memory, self._checked_rows = require_memory, 0
        self._free: list[RowNumbers] = []  # rows that can be used again
        self.returned: deque[RowNumbers] = deque()

    def release(self, rows: RowNumbers) -> None:
        """Allow the use of rows whose keys were evicted, and that nothing uses any more."""
        if len(rows):
            self._free.append(rows)

    def _has_rows(self, n: int) -> bool:
        """Return whether there are n rows without keys."""
        while self.returned:
            self.release(self.returned.popleft())
        return n <= sum(map(len, self._free)) + self.row_space - self.rows

    def _take_rows(self, n: int) -> RowNumbers:
        """Return n rows without keys, first those that were used before."""
        taken, missing = [NO_ROWS], n
        while missing and self._free:
            some = self._free.pop()
            if len(some) > missing:
                self._free.append(some[missing:])
            taken.append(some[:missing])
            missing -= len(taken[-1])
        used = np.concatenate(taken)
        first, self.rows = self.rows, self.rows + n - len(used)
        return np.concatenate([used, np.arange(first, self.rows, dtype=np.int32)])

    def _require_memory_for(self, new: int, keys: int) -> None:
        """Raise UserError unless there is memory for `new` more rows, in a table that has `keys` keys."""
        first_used = max(0, new - sum(map(len, self._free)))
        if self.rows + first_used > self._checked_rows:
            step = max(first_used, _CHECKED_ROWS)
            self._require_memory(step, keys)
            self._checked_rows = self.rows + step

    def _find_lack(self, new: int, keys: int) -> UserError | None:
        """Return the error that `_require_memory_for` raises, or None."""
        try:
            self._require_memory_for(new, keys)
        except UserError as error:
            return error
        return None


class GuestRows:
    """Rows of a batch that only reads; they can be used again when the last reference to this object is gone.

    Args:
        rows: int32 [any].
        returned: Gets the rows then, from any thread.
    """

    def __init__(self, rows: RowNumbers, returned: deque[RowNumbers]) -> None:
        self._rows, self._returned = rows, returned

    def take(self) -> RowNumbers:
        """Return the rows; from now on, the caller decides when they can be used again."""
        rows, self._rows = self._rows, self._rows[:0]
        return rows

    def __del__(self) -> None:
        if len(self._rows):
            self._returned.append(self._rows)
