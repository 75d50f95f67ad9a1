"""Table settings that a program may change during training: learning rates and frozen tables."""

from collections.abc import Iterable

from hostdev.runtime.features import Table
from hostdev.runtime.table_optimizer import TableOptimizer


class TableSettings:
    """Learning rates and frozen tables.

    Args:
        tables: The runtime's tables.
    """

    def __init__(self, tables: Iterable[Table]) -> None:
        self._tables = {table.name: table for table in tables}
        self._frozen: set[str] = set()
        self.optimizer: TableOptimizer | None = None  # the tables' torch optimizer, if the program uses it

    def freeze(self, names: Iterable[str]) -> None:
        """Freeze the named tables, or all if no name is given, from the next batch on."""
        self._frozen |= self._check_names(names)

    def unfreeze(self, names: Iterable[str]) -> None:
        """Undo `freeze`."""
        self._frozen -= self._check_names(names)

    def is_frozen(self, table: Table) -> bool:
        """Return whether a table is frozen."""
        return table.name in self._frozen

    def _check_names(self, names: Iterable[str]) -> set[str]:
        given = set(names)
        for name in given - self._tables.keys():
            raise ValueError(f"no table {name!r}; the tables are {', '.join(self._tables)}")
        return given or set(self._tables)

    def learning_rates(self) -> list[float]:
        """Apply the rates that a scheduler has set, and return the tables' learning rates."""
        if self.optimizer is not None:
            self.optimizer.apply()
        return [table.optimizer.lr for table in self._tables.values()]

    def exchange_rates(self, rates: list[float]) -> list[float]:
        """Set the tables' learning rates; return the previous ones."""
        tables = list(self._tables.values())
        before = [table.optimizer.lr for table in tables]  # read all first: tables may share an optimizer
        for table, rate in zip(tables, rates, strict=True):
            if table.optimizer.lr != rate:
                table.optimizer.lr = rate
        return before
