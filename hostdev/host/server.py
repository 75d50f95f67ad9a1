"""A parameter server on one host, which holds tables by name."""

from collections.abc import Iterator

import numpy.typing as npt

from hostdev.core.errors import UserError
from hostdev.host.reads import Rows
from hostdev.host.table import HostTable


class ParameterServer:
    """Host tables by name: `pull` looks up rows of a table, and `push` applies gradients to them."""

    def __init__(self) -> None:
        self._tables: dict[str, HostTable] = {}

    def add(self, table: HostTable) -> HostTable:
        """Add a table under its name, and return the table; raise ValueError if there is already one of this name."""
        if table.name in self._tables:
            raise ValueError(f"there is already a table {table.name!r}; give one of the two tables another name")
        self._tables[table.name] = table
        return table

    def __getitem__(self, name: str) -> HostTable:
        """Return a table by name; raise UserError if there is none."""
        try:
            return self._tables[name]
        except KeyError:
            raise UserError(f"no table {name!r}; the tables are {sorted(self._tables)}") from None

    def __contains__(self, name: object) -> bool:
        """Return whether there is a table of this name."""
        return name in self._tables

    def __iter__(self) -> Iterator[str]:
        """Iterate over the tables' names, in alphabetical order."""
        return iter(sorted(self._tables))

    def __len__(self) -> int:
        """Return the number of tables."""
        return len(self._tables)

    def pull(self, name: str, ids: npt.ArrayLike) -> Rows:
        """Return rows, float32 [N, D], of the table `name`, as `HostTable.lookup` does."""
        return self[name].lookup(ids)

    def push(self, name: str, ids: npt.ArrayLike, grads: Rows) -> None:
        """Apply gradients, float32 [N, D], to rows of the table `name`, as `HostTable.apply` does; ids may repeat."""
        self[name].apply(ids, grads)
