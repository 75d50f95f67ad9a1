"""Rows that keys without a row use for one batch, if the table gives each of them its own initial values."""

from collections import deque

from hostdev.kernels.arrays import RowNumbers


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
