"""The checkpoint whose rows are searched: its tables, and the columns whose values have these rows."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa

from hostdev.checkpoint.finding import newest
from hostdev.checkpoint.folder import Chain
from hostdev.checkpoint.layers import Layers
from hostdev.checkpoint.manifest import Table
from hostdev.core.errors import UserError
from hostdev.data.manifest import Manifest
from hostdev.data.preprocess.encoding import Encoding
from hostdev.data.preprocess.naming import listed
from hostdev.data.preprocess.stored_vocabulary import StoredVocabulary
from hostdev.data.schema import Column, Space
from hostdev.ext.checkpoints.export import read_vocabulary
from hostdev.ext.neighbours.search import NamedRows
from hostdev.ext.predict.opening import open_checkpoint, reading


@dataclass(frozen=True)
class Source:
    """An opened checkpoint.

    Attributes:
        chain: The checkpoint and its parents.
        data: The data set's manifest; None for a checkpoint of `Runtime.save`, whose rows have no columns and names.
        data_folder: The folder of the manifest, or None.
        encoding: The data set's encoding, or None.
        why: Why this checkpoint was chosen, or "".
        notes: Lines about damaged checkpoints that were skipped.
    """

    chain: Chain
    data: Manifest | None
    data_folder: Path | None
    encoding: Encoding | None
    why: str
    notes: list[str]

    @property
    def path(self) -> Path:
        """The checkpoint's folder."""
        return self.chain[-1].path

    @cached_property
    def layers(self) -> Layers:
        """The tables."""
        return Layers(self.chain)

    @cached_property
    def vocabulary(self) -> pa.Table | None:
        """The column and value of each id; None if ids are hashed, or there is no data set."""
        return None if self.data is None or self.data.vocabulary is None else read_vocabulary(self.layers)

    @cached_property
    def spaces(self) -> dict[str, Space]:
        """The id spaces by name."""
        if self.data is None:
            return {}
        schema = self.data.schema
        everything = (schema.first_value, schema.rows - schema.first_value)
        is_recorded = any((space.first, space.size) != everything for space in schema.spaces)
        if self.data.vocabulary is None or is_recorded:
            return {space.name: space for space in schema.spaces}
        assert self.data_folder is not None
        return StoredVocabulary(self.data_folder, self.data).spaces  # old manifests do not record the id spaces' ids

    def vector_tables(self) -> list[Table]:
        """Return the tables with more than one value per row; raise UserError if there are none."""
        found = [table for table in self.layers.manifest.tables if table.dim > 1]
        if not found:
            names = listed([table.name for table in self.layers.manifest.tables])
            raise UserError(f"{self.path} has no table with vectors, only with one number per row: {names}")
        return found

    def find_table(self, name: str) -> Table:
        """Return a table with vectors; raise UserError for another name."""
        tables = {table.name: table for table in self.layers.manifest.tables}
        if name not in tables:
            hint = f"; {name!r} is a column: give --column {name}" if name in self._columns else ""
            raise UserError(f"{self.path} has no table {name!r}; it has {listed(list(tables))}{hint}")
        if tables[name].dim == 1:
            with_vectors = listed([table.name for table in self.vector_tables()])
            raise UserError(
                f"table {name!r} has one number per row, and no vectors to compare; tables with vectors: {with_vectors}"
            )
        return tables[name]

    def has_columns(self, table: Table) -> bool:
        """Return whether a table's ids are those of the data set, so that each row belongs to an id space."""
        return self.data is not None and (table.keys is not None or table.rows == self.data.schema.rows)

    @property
    def _columns(self) -> dict[str, Column]:
        return {} if self.data is None else {column.name: column for column in self.data.schema.columns}

    def find_column(self, name: str) -> Column:
        """Return a column of ids; raise UserError if there is none of this name."""
        if self.data is None:
            raise UserError(
                f"--column {name}: {self.path} was written by Runtime.save, which records no columns; leave out "
                "--column, and give the number of the row or its key"
            )
        if name not in self._columns:
            raise UserError(
                f"--column {name}: the data has no column of ids {name!r}; it has {listed([*self._columns])}"
            )
        return self._columns[name]

    def require_columns(self, table: Table, option: str) -> None:
        """Raise UserError unless the rows of a table are those of the data set's values."""
        if not self.has_columns(table) and self.data is not None:
            raise UserError(
                f"{option}: table {table.name!r} has {table.rows:,} rows, which are not the data's "
                f"{self.data.schema.rows:,} ids, so only the model knows which values they are; give --of-id N"
            )

    @property
    def spaces_begin(self) -> int:
        """The first id of a value."""
        return 0 if self.data is None else self.data.schema.first_value

    def make_rows(self, table: Table, space: Space | None) -> NamedRows:
        """Return the rows of an id space, or all rows of a table."""
        return NamedRows(self.layers, table.name, space, self.vocabulary if space is not None else None)


def open_source(path: Path, which: str | None = None) -> Source:
    """Open a checkpoint, or choose one as `predict` does. `Runtime.save` may have written it.

    Raises:
        UserError: There is no checkpoint, or it has no evaluation, by which "best" could choose one.
        BrokenCheckpointError: It is damaged.
    """
    with reading(path):
        found = newest(path)
    state: Any = found.chain[-1].manifest.state
    if isinstance(state, dict) and "more" in state:
        opened = open_checkpoint(path, which)
        about = opened.data, opened.data_folder, opened.encoding, opened.why
        return Source(opened.chain, *about, list(opened.found.notes()))
    if which is not None:
        raise UserError(f"--which {which}: {found.chain[-1].path} was written by Runtime.save; leave out --which")
    return Source(found.chain, None, None, None, "", list(found.notes()))
