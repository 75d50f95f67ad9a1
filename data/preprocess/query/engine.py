"""DuckDB as configured by hostdev: threads, memory, errors in one line, and SQL functions for recommenders."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa

from hostdev.core.errors import HostdevError, TransientError, UserError
from hostdev.core.printable import printable

_LAST_YEAR = 3000
_LAST_SECOND = 32_503_680_000  # seconds from 1970 to the end of the year 2999


def _checked_time(function: str, kind: str, unit: str, per_second: int, instead: str) -> str:
    """Return a macro that calls DuckDB's function, but fails for a number that is probably in a smaller unit."""
    message = f"{function}() takes {unit}; this is after the year {_LAST_YEAR}; {instead}: "
    return f"""
    CREATE MACRO {function}(x) AS system.main.{function}(
        CASE WHEN x > {_LAST_SECOND * per_second} THEN CAST('{message}' || x AS {kind}) ELSE x END
    )
    """


# last_items: max(x, n) merges rows of equal times in logarithmic time, where a list would copy all of them for
# each row. But max(x, n) allocates n values at once; so histories of more than 1,000 items are cut from a list.
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
    _checked_time(
        "to_timestamp", "DOUBLE", "seconds", 1, "for milliseconds, write epoch_ms(x), or to_timestamp(x / 1000)"
    ),
    _checked_time("make_timestamp_ms", "BIGINT", "milliseconds", 1_000, "for microseconds, write make_timestamp(x)"),
)
CLOSED: dict[str, Any] = {
    "autoinstall_known_extensions": False,
    "autoload_known_extensions": False,
    "allow_community_extensions": False,
    "allow_persistent_secrets": False,
}
"""Settings that keep DuckDB from loading extensions and stored secrets by itself."""
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
                    **CLOSED,
                    "python_enable_replacements": False,
                },
            )
            self.connection.execute("SET TimeZone = 'UTC'")
            self.connection.execute("SET enable_profiling = 'no_output'")  # for `operators`
            for macro in MACROS:
                self.connection.execute(macro)
            for name, table in self.tables.items():
                self.connection.register(name, table)

    def confine(self, names: Sequence[str]) -> None:
        """Allow only these files to be read; forbid writing outside the spill folder, and the network.

        Args:
            names: Names of files and folders, and patterns. All files in a folder are allowed, and for a pattern, all
                files in the folder above its first wildcard.
        """
        names = [str(Path(name).expanduser()) if name.startswith("~") else name for name in names]
        folders = [
            re.split(r"[*?[]", name)[0].rpartition("/")[0] or ("/" if name.startswith("/") else ".")
            if re.search(r"[*?[]", name)
            else name
            for name in names
        ]
        with in_one_line():
            self.connection.execute("SET allowed_paths = $1", [[*names]])
            self.connection.execute("SET allowed_directories = $1", [[f"{folder}/" for folder in folders]])
            self.connection.execute("SET enable_external_access = false")

    def lock(self, threads: int, *, spills: bool) -> None:
        """Set the number of threads, forbid spilling to disk unless `spills` is true, and lock all settings."""
        self.connection.execute(f"SET threads = {threads}")
        if threads == 1:  # otherwise, which file is read first depends on when its blocks arrive
            self.connection.execute("SET async_threads = 0")
        if not spills:
            self.connection.execute("SET max_temp_directory_size = '0KiB'")
        self.connection.execute("SET lock_configuration = true")

    def rows(self, sql: str, *parameters: Any) -> list[tuple[Any, ...]]:
        """Run a query and return all rows, which must be few."""
        with in_one_line():
            found: list[tuple[Any, ...]] = self.connection.execute(sql, list(parameters)).fetchall()
            return found

    @property
    def aggregates(self) -> frozenset[str]:
        """The names of all aggregate functions, in lower case."""
        sql = "SELECT DISTINCT lower(function_name) FROM duckdb_functions() WHERE function_type = 'aggregate'"
        return frozenset(name for (name,) in self.rows(sql))

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

    def operators(self) -> list[dict[str, Any]]:
        """Return the operators of the query that ran last, as trees, each with its number of rows."""
        profile = self.connection.get_profiling_information(format="json")
        found: list[dict[str, Any]] = json.loads(profile).get("operator", []) if profile else []  # none for a constant
        return found

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
    if "max_temp_directory_size" in text and "0 bytes/0 bytes" in text:
        return TransientError(
            "the query needs more memory: its result depends on the order of rows that tie, which could change if they "
            "were written to disk; give it more --query-memory, or an ORDER BY that has no ties"
        )
    if isinstance(error, duckdb.OutOfMemoryException) or "Out of Memory Error" in text:
        return TransientError(
            f"the query needs more memory or disk: {text}; give it more --query-memory, or free disk space"
        )
    if "No space left" in text:
        return TransientError(f"the query needs more disk space: {text}")
    return UserError(f"the query failed: {text}")
