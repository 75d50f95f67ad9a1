"""DuckDB as hostdev sets it up: its threads and memory, its errors in one line, and functions for recommenders."""

import re
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa

from hostdev.core.errors import HostdevError, TransientError, UserError
from hostdev.core.printable import printable

MACROS = (
    """
    CREATE MACRO draw(value, seed) AS
        (md5_number_lower(concat_ws(chr(31), value, seed)) >> 11)::DOUBLE / 9007199254740992
    """,
    """
    CREATE MACRO last_items(item, who, moment, n) AS
        coalesce(
            [one.item FOR one IN list_sort(
                list({moment: moment, item: item}) OVER (
                    PARTITION BY who ORDER BY moment GROUPS BETWEEN n PRECEDING AND 1 PRECEDING
                )
            )[-n:]],
            []
        )
    """,
)
_SHOWN = 500  # characters of an error
_ROWS = 1 << 16  # rows of a batch


class Engine:
    """A connection to a new DuckDB in memory.

    Args:
        threads: How many threads a query has.
        memory: Bytes that a query may use before it writes to `spill`.
        spill: The folder for what does not fit, which DuckDB makes if needed.
        tables: By name, tables of this process that a query may read: pandas, Arrow, ...
    """

    def __init__(self, threads: int, memory: int, spill: Path, tables: Mapping[str, Any] | None = None) -> None:
        self.tables = dict(tables or {})
        with in_one_line():
            self.connection = duckdb.connect(
                ":memory:",
                config={
                    "threads": threads,
                    "memory_limit": f"{max(1, memory >> 10)}KiB",
                    "temp_directory": str(spill),
                    "preserve_insertion_order": True,
                    "autoinstall_known_extensions": False,
                    "python_enable_replacements": False,
                },
            )
            self.connection.execute("SET TimeZone = 'UTC'")
            for macro in MACROS:
                self.connection.execute(macro)
            for name, table in self.tables.items():
                self.connection.register(name, table)

    def set_threads(self, threads: int) -> None:
        """Change the number of threads."""
        self.connection.execute(f"SET threads = {threads}")

    def rows(self, sql: str, *parameters: Any) -> list[tuple[Any, ...]]:
        """Return all rows of a small query."""
        with in_one_line():
            found: list[tuple[Any, ...]] = self.connection.execute(sql, list(parameters)).fetchall()
            return found

    @cached_property
    def aggregates(self) -> frozenset[str]:
        """The names of all aggregates."""
        found = self.rows("SELECT DISTINCT function_name FROM duckdb_functions() WHERE function_type = 'aggregate'")
        return frozenset(name for (name,) in found)

    def schema(self, sql: str) -> pa.Schema:
        """Return the columns of a query."""
        with in_one_line():
            return self.connection.sql(f"SELECT * FROM ({sql}) LIMIT 0").to_arrow_table().schema

    def stream(self, sql: str) -> Iterator[pa.RecordBatch]:
        """Run a query; iterate over its rows, the next of which are read meanwhile.

        Ctrl-C ends the query at once: it runs in a thread of its own, so that the caller's is free to notice.
        """
        pool = ThreadPoolExecutor(1, "hostdev-query")
        try:
            reader = pool.submit(self._open, sql).result()
            coming = pool.submit(_read, reader)
            while (batch := coming.result()) is not None:
                coming = pool.submit(_read, reader)
                if len(batch):
                    yield batch
        finally:
            self.connection.interrupt()  # without effect if the query has ended
            pool.shutdown(cancel_futures=True)

    def _open(self, sql: str) -> pa.RecordBatchReader:
        with in_one_line():
            return self.connection.sql(sql).to_arrow_reader(_ROWS)

    def progress(self) -> float:
        """Return how much of the running query is done, in percent; negative if that is unknown."""
        return float(self.connection.query_progress())


def _read(reader: pa.RecordBatchReader) -> pa.RecordBatch | None:
    """Return the next rows; None at the end."""
    with in_one_line():
        try:
            return reader.read_next_batch()
        except StopIteration:
            return None


@contextmanager
def in_one_line() -> Iterator[None]:
    """Raise DuckDB's errors as UserError, or TransientError if memory or disk are short."""
    try:
        yield
    except (duckdb.Error, pa.ArrowException, OSError) as error:
        raise _in_words(error) from None


def _in_words(error: Exception) -> HostdevError:
    text = re.split("Stack Trace:|Possible solutions:", str(error))[0]
    text = printable(" ".join(text.split()), _SHOWN)
    if isinstance(error, duckdb.OutOfMemoryException) or "Out of Memory Error" in text:
        return TransientError(
            f"the query needs more memory or disk: {text}; give more with --query-memory, or free disk space"
        )
    if "No space left" in text:
        return TransientError(f"the query needs more disk space: {text}")
    return UserError(f"the query failed: {text}")
