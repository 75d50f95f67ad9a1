"""Editable copies of a host table's weights and optimizer state, and the rows that an edit has changed."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hostdev.core.checks import require_finite
from hostdev.core.memory import require_memory
from hostdev.core.writing import ColumnCopies
from hostdev.kernels.arrays import Rows

_PART_BYTES = 1 << 24  # bytes compared or written at a time


class Writing(ColumnCopies):
    """The copies that `HostTable.writing` yields.

    Args:
        table: The table's name, for errors.
        columns: The table's weights and optimizer state by name, each indexed by slices or row ids.
        ids: int32 or int64 [N], all different, or None for all rows.
        rows: V, the number of rows of the table.
    """

    def __init__(self, table: str, columns: Mapping[str, Any], ids: npt.NDArray[Any] | None, rows: int) -> None:
        super().__init__(table, columns)
        self._columns, self._ids = columns, ids
        self._rows = rows if ids is None else len(ids)

    def _copied(self, name: str) -> Rows:
        column = self._columns[name]
        what = f"table {self.table!r}: a copy of {name} for writing"
        require_memory(4 * self._rows * column.shape[1], what, "write fewer rows at a time, with writing(ids)")
        return np.array(column[:] if self._ids is None else column[self._ids], np.float32)

    def changed(self) -> npt.NDArray[np.int64]:
        """Return which rows of the copies differ from the table, as row numbers in the copies, ascending.

        Raises:
            ValueError: A row that differs has a value that is not finite.
        """
        found = []
        width = sum(values.shape[1] for values in self._held.values())
        step = max(1, _PART_BYTES // (4 * max(1, width)))
        for start in range(0, self._rows if self._held else 0, step):
            stop = min(self._rows, start + step)
            differs = np.zeros(stop - start, np.bool_)
            for name, values in self._held.items():
                there = self._columns[name][slice(start, stop) if self._ids is None else self._ids[start:stop]]
                differs |= (np.ascontiguousarray(there).view(np.int32) != values[start:stop].view(np.int32)).any(1)
            rows = np.flatnonzero(differs) + start
            ids = rows if self._ids is None else self._ids[rows]
            require_finite(self.table, ids, *(values[rows] for values in self._held.values()))
            found.append(rows)
        return np.concatenate(found) if found else np.empty(0, np.int64)

    def require_exact(
        self, changed: npt.NDArray[np.int64], planes: Sequence[str], check: Callable[[int, Rows], None]
    ) -> None:
        """Call `check`, which is `Storage.require_exact`, with the changed rows of each plane that has a copy."""
        for plane, name in enumerate(planes):
            held = self._held.get(name)
            step = max(1, _PART_BYTES // held[:1].nbytes) if held is not None else 1
            for start in range(0, len(changed) if held is not None else 0, step):
                assert held is not None
                check(plane, held[changed[start : start + step]])

    def parts(self, changed: npt.NDArray[np.int64]) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[Any]]]:
        """Yield the changed rows in chunks, each as row numbers in the copies and ids in the table."""
        width = sum(column.shape[1] for column in self._columns.values())
        step = max(1, _PART_BYTES // (4 * width))
        for start in range(0, len(changed), step):
            rows = changed[start : start + step]
            yield rows, rows if self._ids is None else self._ids[rows]

    def put(self, name: str, rows: npt.NDArray[np.int64], out: Rows) -> None:
        """If there is a copy of the column `name`, write its rows `rows` to `out`."""
        if name in self._held:
            out[...] = self._held[name][rows]
