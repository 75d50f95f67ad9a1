"""Weights and slots of a table on the device as tensors that may be written, and which rows differ in the end."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor


class Slots(Mapping[str, Tensor]):
    """The slots by name, copied when they are first asked for; `slots[name] = values` writes to a copy."""

    def __init__(self, writing: "Writing") -> None:
        self._writing = writing

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._writing.names[1:]:
            raise KeyError(f"no slot {name!r}; there are {', '.join(self._writing.names[1:]) or 'none'}")
        return self._writing.column(name)

    def __setitem__(self, name: str, values: Any) -> None:
        self[name][...] = values

    def __iter__(self) -> Iterator[str]:
        return iter(self._writing.names[1:])

    def __len__(self) -> int:
        return len(self._writing.names) - 1


class Writing:
    """What `DeviceTable.writing` gives.

    table    its name, for errors
    columns  views of its weights and slots by name
    ids      int64 [N] on the device, all different; None for all rows
    """

    def __init__(self, table: str, columns: Mapping[str, Tensor], ids: Tensor | None) -> None:
        self._table, self._columns, self._ids = table, columns, ids
        self._held: dict[str, Tensor] = {}
        self._is_over = False
        self.names = list(columns)

    @property
    def weights(self) -> Tensor:
        """The weights, float32 [V, D] or [N, D], to be written."""
        return self.column("weights")

    @weights.setter
    def weights(self, values: Any) -> None:
        self.column("weights")[...] = values  # `w.weights *= 2` assigns, too

    @property
    def slots(self) -> Slots:
        """The slots by name, float32 [V, D], [N, D] or one column for one value a row, to be written."""
        return Slots(self)

    def column(self, name: str) -> Tensor:
        """Return the copy of a column."""
        if self._is_over:
            raise ValueError(f"table {self._table!r}: this writing() is over; write within its `with`")
        if name not in self._held:
            self._held[name] = self._there(name).clone(memory_format=torch.contiguous_format)
        return self._held[name]

    def _there(self, name: str) -> Tensor:
        column = self._columns[name]
        return column if self._ids is None else column.index_select(0, self._ids)

    def require_finite(self) -> None:
        """ValueError, with the first row, unless all values of the copies are finite."""
        for values in self._held.values():
            wrong = ~values.isfinite()
            if wrong.any():
                row = int(wrong.any(1).nonzero()[0])
                value = float(values[row][wrong[row]][0])
                number = row if self._ids is None else int(self._ids[row])
                raise ValueError(
                    f"table {self._table!r}: {value} is to be written to row {number}, and values must be finite; "
                    "nothing was written"
                )

    def write(self) -> None:
        """Write the copies to the table."""
        for name, values in self._held.items():
            if self._ids is None:
                self._columns[name].copy_(values)
            else:
                self._columns[name].index_copy_(0, self._ids, values)

    def end(self) -> None:
        """Refuse further writing."""
        self._is_over = True
