"""The rows of an SQL query as a registered source; this module imports little."""

import argparse
from typing import TYPE_CHECKING

from hostdev.core import cli
from hostdev.core.addresses import local_path
from hostdev.core.errors import UserError, in_words
from hostdev.core.memory import available_bytes, format_bytes, parse_bytes
from hostdev.data.preprocess.row_source import RowSource

if TYPE_CHECKING:
    from hostdev.data.preprocess.query.source import QueryRows

_LEAST_MEMORY = 64 << 20  # bytes: with less, DuckDB cannot sort


class Query(RowSource):
    """The rows that a SELECT statement returns."""

    help = "from an SQL query over files"

    def add_options(self, to: argparse.ArgumentParser) -> None:
        """See `RowSource`."""
        to.add_argument("sql", nargs="?", metavar="SQL", help="one SELECT in DuckDB's dialect; quote it for the shell")
        to.add_argument(
            "--query", type=cli.checked(local_path), metavar="FILE", help="a file with the query, instead of SQL"
        )
        to.add_argument(
            "--query-memory",
            metavar="SIZE",
            help="memory of the query, such as 4GiB (default: half of what is available)",
        )

    def open(self, arguments: argparse.Namespace) -> "QueryRows":
        """Open the query that the flags give; raise UserError for wrong flags or an invalid query."""
        if (arguments.sql is None) == (arguments.query is None):
            how = "neither is given" if arguments.sql is None else "both are given"
            raise UserError(f"give the query either as an argument or with --query FILE; {how}")
        sql = arguments.sql
        if sql is None:
            try:
                sql = arguments.query.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise UserError(f"--query {arguments.query}: the file cannot be read ({in_words(error)})") from None
        memory = available_bytes() // 2 if arguments.query_memory is None else parse_bytes(arguments.query_memory)
        if memory < _LEAST_MEMORY:
            raise UserError(
                f"--query-memory must be at least {format_bytes(_LEAST_MEMORY)}, not {format_bytes(memory)}"
            )
        from hostdev.data.preprocess.query.source import QueryOptions, open_query, spill_folder  # imports DuckDB
        from hostdev.kernels.pool import host_threads

        threads = arguments.threads or host_threads()
        return open_query(sql, QueryOptions(threads, memory, spill_folder(arguments.out)))
