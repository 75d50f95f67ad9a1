"""Writable copies of a table's weights and slots, which the `with table.writing()` block yields."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any


class Slots(Mapping[str, Any]):
    """Writable copies of the slots by name, each made on first access; `slots[name] = values` overwrites a slot."""

    def __init__(self, copies: "ColumnCopies") -> None:
        self._copies = copies

    def __getitem__(self, name: str) -> Any:
        if name not in self._copies.names[1:]:
            names = ", ".join(self._copies.names[1:]) or "none"
            raise KeyError(f"table {self._copies.table!r}: no slot {name!r}; available slots: {names}")
        return self._copies.column(name)

    def __setitem__(self, name: str, values: Any) -> None:
        self[name][...] = values

    def __iter__(self) -> Iterator[str]:
        return iter(self._copies.names[1:])

    def __len__(self) -> int:
        return len(self._copies.names) - 1


class ColumnCopies:
    """Writable copies of a table's columns, each made on first access and usable until the `with` block ends.

    Args:
        table: The table's name, for messages.
        names: Names of the columns: the weights, then the slots.
    """

    def __init__(self, table: str, names: Iterable[str]) -> None:
        self.table, self.names = table, list(names)
        self._held: dict[str, Any] = {}
        self._is_over = False

    def _copied(self, name: str) -> Any:
        raise NotImplementedError

    @property
    def weights(self) -> Any:
        """The writable weights, float32: [V, D] for all rows or [N, D] for N rows."""
        return self.column("weights")

    @weights.setter
    def weights(self, values: Any) -> None:
        self.column("weights")[...] = values  # `w.weights *= 2` assigns, too

    @property
    def slots(self) -> Slots:
        """The writable slots by name, shaped like the weights; a slot of one value per row has one column."""
        return Slots(self)

    def column(self, name: str) -> Any:
        """Return the copy of a column; raise ValueError after the end of the `with` block."""
        if self._is_over:
            raise ValueError(
                f"table {self.table!r}: the `with table.writing()` block has ended; use its copies only in the block"
            )
        if name not in self._held:
            self._held[name] = self._copied(name)
        return self._held[name]

    def end(self) -> None:
        """Refuse further access to the copies."""
        self._is_over = True
