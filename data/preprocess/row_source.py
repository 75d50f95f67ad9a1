"""Sources of rows that packages register; `hostdev preprocess NAME ...` reads the rows of the source NAME.

This module imports little, so that a wrong flag is reported at once.
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:  # slow imports
    import pyarrow as pa

    from hostdev.data.preprocess.files import Chunk, TableFile, UnparsedRows

KIND = "source"


class RowSource:
    """A source of rows with named columns: subclass it, and register it as a `hostdev.source`.

    The class is created without arguments when the command line is parsed. Its module should therefore import little;
    slow imports belong in `open`. The command also has the options of `options.RowFlags`.
    `hostdev.testing.check_source` checks the result of `open`.

    Attributes:
        help: What the rows come from, in a line of `hostdev preprocess --help`.
    """

    help: ClassVar[str] = ""

    def add_options(self, to: argparse.ArgumentParser) -> None:
        """Add the source's own options and arguments; `to` already has --out and the options of `RowFlags`."""

    def open(self, arguments: argparse.Namespace) -> "TableFile":
        """Return the rows as a `RecordBatches`; raise UserError if they cannot be read."""
        raise NotImplementedError


class RecordBatches:
    """Rows in a fixed order, as Arrow record batches: subclass it.

    Args:
        name: The name in messages.
        schema: The columns' names and types: plain values, and lists of them.
    """

    lines_before = 0
    most_rows = 2**62  # an upper bound on the number of rows; unknown here
    respelled: Mapping[str, str] = MappingProxyType({})
    changed = "the rows changed while they were read; run again once nothing writes to them"

    def __init__(self, name: str, schema: "pa.Schema") -> None:
        self.name, self.schema = name, schema
        self.names = tuple(schema.names)
        self.input: Any = _Input(self)

    def batches(self, columns: Sequence[str], first: int) -> "Iterator[pa.RecordBatch]":
        """Yield the rows from number `first` on, counted from 0, with these columns in this order.

        Each call must yield the same rows: a preparation that was killed continues in the middle. Raise UserError if
        the rows cannot be read.
        """
        raise NotImplementedError

    def describe(self) -> dict[str, Any]:  # Any: JSON
        """Return the manifest's entry about where the rows come from: plain values, by name."""
        return {"source": self.name}

    def fingerprint(self) -> list[Any] | None:  # Any: JSON
        """Return values that differ whenever the rows differ, such as versions or times.

        Return None if rows can be read only once. A preparation that was killed resumes only if the fingerprint is
        unchanged.
        """
        return None

    def get_type(self, name: str) -> "pa.DataType":
        """Return a column's type."""
        return self.schema.field(name).type

    def parts(self, used: Sequence[str], offset: int) -> "Iterator[UnparsedRows]":
        """Yield the `used` columns of the rows from `offset` on."""
        from hostdev.data.preprocess.files import split_batch

        row = offset
        for batch in self.batches(used, offset):
            yield from split_batch(batch, row, batch.nbytes / max(1, len(batch)))
            row += len(batch)

    def parse(self, part: "UnparsedRows", used: Sequence[str]) -> "Chunk":
        """Return a part's rows."""
        from hostdev.data.preprocess.files import Chunk

        return Chunk(part.content, size=part.taken)


class _Input:
    """The members of `inputs.InputFile` that a preparation uses, for rows that are not in a file."""

    plain, size, path = False, 0, Path("-")

    def __init__(self, rows: RecordBatches) -> None:
        self._rows, self.name, self.describe = rows, rows.name, rows.describe
        self._seen = rows.fingerprint()

    def stamp(self) -> list[Any] | None:
        return self._seen

    def check_unchanged(self) -> None:
        from hostdev.core.errors import UserError

        if self._rows.fingerprint() != self._seen:
            raise UserError(f"{self.name}: {self._rows.changed}")
