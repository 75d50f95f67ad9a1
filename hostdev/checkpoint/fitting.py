"""Loading of the tables that a checkpoint and a program share, even if the checkpoint has fewer rows of them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from hostdev.checkpoint.folder import Chain
from hostdev.checkpoint.keyed import require_kind
from hostdev.checkpoint.loading import load_rows
from hostdev.checkpoint.manifest import Table
from hostdev.core.errors import UserError
from hostdev.core.keys import FormerIds
from hostdev.core.optimizers import can_continue, hyperparameters


class Fit(NamedTuple):
    """The overlap of a checkpoint's and a program's tables.

    Attributes:
        path: The checkpoint.
        taken: For each shared table, by name, its number of rows in the checkpoint and in the program.
        new: Tables that only the program has.
        left: Tables that only the checkpoint has.
    """

    path: Path
    taken: dict[str, tuple[int, int]]
    new: list[str]
    left: list[str]

    def what_is_left(self) -> list[str]:
        """Return a line for each table that is not loaded completely."""
        found = [f"{self.path} has no table {name!r}; the program's table is unchanged" for name in self.new]
        found += [f"table {name!r} of {self.path} is not loaded: the program has no such table" for name in self.left]
        return found + [
            f"table {name!r} has {there:,} rows in {self.path} and {here:,} in the program; other rows are unchanged"
            for name, (there, here) in self.taken.items()
            if there < here
        ]

    def lines(self) -> list[str]:
        """Return a line for each table: how many rows a new run loads, and how many have initial values."""
        found = []
        for name, (there, here) in self.taken.items():
            more = f"; {here - there:,} new rows have their initial values" if here > there else ""
            found.append(f"table {name}: {there:,} rows with their slots{more}")
        found += [f"table {name}: not in the checkpoint; all rows have their initial values" for name in self.new]
        found += [f"table {name}: only in the checkpoint; not loaded" for name in self.left]
        return found


def fit_tables(chain: Chain, tables: Mapping[str, Any]) -> Fit:
    """Return the overlap of a checkpoint's tables and the program's `tables`, each a HostTable or DeviceTable, by name.

    Raises:
        UserError: No table is shared, or a shared table differs in dim, optimizer or dtype, or has fewer rows
            than in the checkpoint.
    """
    newest = chain[-1]
    held = {table.name: table for table in newest.manifest.tables}
    taken = {}
    for name in sorted(held.keys() & tables.keys()):
        there, table = held[name], tables[name]
        if there.keys is not None:
            require_kind(newest.path, there, table)
        if there.dim != table.dim:
            raise UserError(f"{newest.path}: table {name!r} has dim {there.dim}, but {table.dim} in the program")
        if not can_continue(table.optimizer, there.optimizer, there.arguments):
            mine = type(table.optimizer).__name__, hyperparameters(table.optimizer)
            shown = [f"{kind}{_arguments(values)}" for kind, values in ((there.optimizer, there.arguments), mine)]
            raise UserError(f"{newest.path}: table {name!r} has optimizer {shown[0]}, but {shown[1]} in the program")
        for what, field in (("weights", "dtype"), ("slots", "slots_dtype")):
            saved, own = getattr(there, field), getattr(table, field)
            if saved != own:
                raise UserError(f"{newest.path}: the {what} of table {name!r} are {saved}, but {own} in the program")
        if table.capabilities.by_key:
            rows = there.rows if there.keys is None else there.keys.count
            if rows > table.capacity:
                raise UserError(
                    f"table {name!r} has {rows:,} rows in {newest.path}, but a capacity of only {table.capacity:,} in "
                    "the program"
                )
            taken[name] = rows, rows
            continue
        if there.rows > table.total_rows:
            raise UserError(
                f"table {name!r} has {there.rows:,} rows in {newest.path}, but only {table.total_rows:,} in the program"
            )
        taken[name] = there.rows, table.total_rows
    if not taken:
        raise UserError(
            f"{newest.path} has none of the tables {', '.join(sorted(tables))}; it has {', '.join(sorted(held))}"
        )
    _require_own_optimizers(tables, taken, held, newest.path)
    return Fit(newest.path, taken, sorted(tables.keys() - held.keys()), sorted(held.keys() - tables.keys()))


def _require_own_optimizers(
    tables: Mapping[str, Any], taken: Mapping[str, Any], held: Mapping[str, Table], path: Path
) -> None:
    """Raise UserError if a table that is not loaded would change its optimizer's form with one that is."""
    for name in taken:
        optimizer = tables[name].optimizer
        sharing = [other for other in tables.keys() - taken if tables[other].optimizer is optimizer]
        if sharing and {**hyperparameters(optimizer), "lr": None} != {**held[name].arguments, "lr": None}:
            raise UserError(
                f"table {name!r} continues with the optimizer of {path}, Adam(epsilon_hat=True), and table "
                f"{sharing[0]!r}, which is not in it, has the same optimizer object; give each table its own"
            )


def load_shared(
    chain: Chain, tables: Mapping[str, Any], fit: Fit, *, check: bool = False, former: FormerIds | None = None
) -> None:
    """Load rows, optimizer state and steps of the shared tables; learning rates and seeds stay unchanged.

    `former` is as for `load_rows`.
    """
    taken = {name: tables[name] for name in fit.taken}
    load_rows(chain, taken, check=check, former=former)
    for name, table in taken.items():
        table.step = chain[-1].manifest.table(name).step


def _arguments(values: Mapping[str, Any]) -> str:
    shown = ", ".join(f"{name}={value}" for name, value in values.items() if name != "lr")
    return f"({shown})" if shown else ""
