"""Editable copies of a device table's weights and optimizer state."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hostdev.core.writing import ColumnCopies


class DeviceWriting(ColumnCopies):
    """The copies that `DeviceTable.writing` yields.

    Args:
        table: The table's name, for errors.
        columns: Views of the table's weights and optimizer state by name.
        ids: int64 [N] on the device, all different; None for all rows.
        current: Called with `ids`; returns these rows' columns as of the last step. None if `columns` already are.
    """

    def __init__(
        self,
        table: str,
        columns: Mapping[str, Tensor],
        ids: Tensor | None,
        current: Callable[[Tensor | None], Mapping[str, Tensor]] | None = None,
    ) -> None:
        super().__init__(table, columns)
        self._columns, self._ids = columns, ids
        self._current = None if current is None else current(ids)

    def _copied(self, name: str) -> Tensor:
        if self._current is not None:
            return self._current[name].clone(memory_format=torch.contiguous_format)
        column = self._columns[name]
        there = column if self._ids is None else column.index_select(0, self._ids)
        return there.clone(memory_format=torch.contiguous_format)

    def require_finite(self) -> None:
        """If a value of the copies is not finite, raise a ValueError that names the first row with such a value."""
        for values in self._held.values():
            wrong = ~values.isfinite()
            if wrong.any():
                row = int(wrong.any(1).nonzero()[0])
                value = float(values[row][wrong[row]][0])
                number = row if self._ids is None else int(self._ids[row])
                raise ValueError(
                    f"table {self.table!r}: {value} cannot be written to row {number}: values must be finite; "
                    "nothing was written"
                )

    def require_exact(self, planes: Sequence[str], check: Callable[[int, npt.NDArray[np.float32]], None]) -> None:
        """Call `check` with the number and the new values of each plane that was copied."""
        for plane, name in enumerate(planes):
            if name in self._held:
                check(plane, self._held[name].cpu().numpy())

    def write(self) -> None:
        """Write the copies to the table; only changed rows if the table's steps also change unused rows."""
        if self._current is not None:
            self._write_changed(self._current)
            return
        for name, values in self._held.items():
            if self._ids is None:
                self._columns[name].copy_(values)
            else:
                self._columns[name].index_copy_(0, self._ids, values)

    def _write_changed(self, current: Mapping[str, Tensor]) -> None:
        changed = [
            (values.view(torch.int32) != current[name].contiguous().view(torch.int32)).any(1)
            for name, values in self._held.items()
        ]
        if not changed:
            return
        rows = torch.stack(changed).any(0).nonzero()[:, 0]
        at = rows if self._ids is None else self._ids[rows]
        for name, column in self._columns.items():
            column.index_copy_(0, at, self._held.get(name, current[name])[rows])
