"""DuckDB as configured by hostdev: threads, memory, errors in one line, and SQL functions for recommenders."""

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

# last_items: max(x, n) merges rows of equal times in logarithmic time, where a list would copy all of them for
# each row. It allocates n values at once, so that histories of more than 1,000 items are cut from a list.
MACROS = (
    """
    CREATE MACRO draw(value, seed) AS
        (md5_number_lower(concat_ws(chr(31), value, seed)) >> 11)::DOUBLE / 9007199254740992
    """,
    """
    CREATE MACRO last_items(item, who, moment, n) AS
        CASE
            WHEN moment IS NULL OR (typeof(moment) IN ('DOUBLE', 'FLOAT') AND moment::VARCHAR = 'nan') THEN []
            WHEN n <= 1000 THEN coalesce(
                [one.item FOR one IN list_reverse(
                    max({moment: moment, item: item}, least(greatest(n, 1), 1000)::BIGINT) OVER (
                        PARTITION BY who ORDER BY moment NULLS LAST
                        GROUPS BETWEEN (CASE WHEN n <= 1000 THEN n ELSE 0 END) PRECEDING AND 1 PRECEDING
                    )
                )],
                []
            )
            ELSE coalesce(
                [one.item FOR one IN list_sort(
                    list({moment: moment, item: item}) OVER (
                        PARTITION BY who ORDER BY moment NULLS LAST
                        GROUPS BETWEEN (CASE WHEN n <= 1000 THEN 0 ELSE n END) PRECEDING AND 1 PRECEDING
                    )
                )[-n:]],
                []
            )
        END
    """,
)
_SHOWN = 500  # characters of an error
_ROWS = 1 << 16  # rows of a batch


class Engine:
    """A connection to a new DuckDB in memory.

    Args:
        threads: Number of threads per query.
        memory: Bytes that a query may use before it writes to `spill`.
        spill: Folder for data that does not fit in memory; DuckDB creates it if needed.
        tables: Tables in this process that a query may read, such as pandas or Arrow tables, by name.
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
        """Run a query and return all rows, which must be few."""
        with in_one_line():
            found: list[tuple[Any, ...]] = self.connection.execute(sql, list(parameters)).fetchall()
            return found

    @cached_property
    def aggregates(self) -> frozenset[str]:
        """The names of all aggregate functions."""
        found = self.rows("SELECT DISTINCT function_name FROM duckdb_functions() WHERE function_type = 'aggregate'")
        return frozenset(name for (name,) in found)

    def schema(self, sql: str) -> pa.Schema:
        """Return the schema of a query's result."""
        with in_one_line():
            return self.connection.sql(f"SELECT * FROM ({sql}) LIMIT 0").to_arrow_table().schema

    def stream(self, sql: str) -> Iterator[pa.RecordBatch]:
        """Run a query and iterate over its rows in batches; the next batch is read in the background.

        The query runs in another thread, so that Ctrl-C can interrupt it at once.
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
        """Return the progress of the running query in percent, negative if unknown."""
        return float(self.connection.query_progress())


def _read(reader: pa.RecordBatchReader) -> pa.RecordBatch | None:
    """Return the next rows, or None at the end."""
    with in_one_line():
        try:
            return reader.read_next_batch()
        except StopIteration:
            return None


@contextmanager
def in_one_line() -> Iterator[None]:
    """Convert DuckDB's errors to UserError, or to TransientError if memory or disk space is insufficient."""
    try:
        yield
    except (duckdb.Error, pa.ArrowException, OSError) as error:
        raise _in_words(error) from None


def _in_words(error: Exception) -> HostdevError:
    text = re.split("Stack Trace:|Possible solutions:", str(error))[0]
    text = printable(" ".join(text.split()), _SHOWN)
    if isinstance(error, duckdb.OutOfMemoryException) or "Out of Memory Error" in text:
        return TransientError(
            f"the query needs more memory or disk: {text}; give it more --query-memory, or free disk space"
        )
    if "No space left" in text:
        return TransientError(f"the query needs more disk space: {text}")
    return UserError(f"the query failed: {text}")
