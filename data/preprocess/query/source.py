"""Rows selected by a query, as a table without a file."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.compute as pc

from hostdev.core.errors import UserError
from hostdev.core.memory import format_bytes
from hostdev.core.progress import bar, note
from hostdev.core.workers import Worker
from hostdev.data.preprocess.query import NAME, allowed, plan, readers, settle
from hostdev.data.preprocess.query.engine import Engine
from hostdev.data.preprocess.query.raw_files import describe_tables
from hostdev.data.preprocess.query.spelling import identifier
from hostdev.data.preprocess.query.statement import Node, Statement, parse, to_sql
from hostdev.data.preprocess.row_source import RecordBatches

_POLLED = 0.5  # seconds between updates of the query's progress
# By type of column: the expression that removes the quotes of texts in JSON.
_UNQUOTED = {"JSON": "{} ->> '$'", "JSON[]": "[one ->> '$' FOR one IN {}]"}
_DOUBTS = 3  # maximum number of doubts in a note


class QueryRows(RecordBatches):
    """Rows selected by a query, in a deterministic order.

    Args:
        sql: One SELECT statement in DuckDB's dialect.
        engine: Runs the query.
        threads: Maximum number of threads; a query whose result could depend on threads runs on a single one.

    Raises:
        UserError: The query is invalid, or its result could change between runs.
    """

    changed = "a file changed while it was read; run again once nothing writes to it"

    def __init__(self, sql: str, engine: Engine, threads: int) -> None:
        self._engine = engine
        statement = parse(engine.connection, sql)
        allowed.check(statement, engine)
        patterns = plan.patterns(statement, engine)
        engine.confine(patterns)
        has_tables = plan.reads_tables(statement, engine)
        self._first_file = plan.first_file(statement)
        self._noted = False
        before = copy.deepcopy(statement.tree)
        texts, mixed = readers.complete(statement.tree, engine)
        planner = plan.QueryPlanner(statement.tree, engine) if mixed else None
        for one in mixed:
            if planner is not None and planner.uses(one.location, one.name):
                raise UserError(f"{NAME}, column {one.name!r}: {one.reason}")
        found = self._settled(statement)
        self._keeps_order = found.keeps_order
        self._sql = self._with_texts(found.tree, texts)
        self._raw = describe_tables(before, statement.tree, engine)
        self._given, self._patterns = sql.strip(), None if has_tables else patterns
        super().__init__(NAME, engine.schema(self._sql))
        self.order, self.doubts = found.order, found.doubts + plan.float_sums(found.tree, engine)
        engine.lock(1 if self.doubts else threads, spills=not found.ties)

    def _settled(self, statement: Statement) -> settle.Settled:
        found = settle.settle(statement)
        try:
            self._engine.schema(to_sql(self._engine.connection, found.tree))
        except UserError:  # keys of windows use a table's name for all its columns, which is not always valid
            plain = settle.settle(statement, windows=False)
            self._engine.schema(to_sql(self._engine.connection, plain.tree))
            return plain
        return found

    def _with_texts(self, tree: Node, texts: Mapping[int, readers.Text]) -> str:
        """Return the SQL of a query whose columns from text files have the same texts as in the files.

        Set `respelled` to the columns for which this is impossible, with reasons.
        """
        sql = to_sql(self._engine.connection, tree)
        kept = plan.kept_columns(tree, self._engine, texts)
        respelled, values, changes = {}, [], False
        columns = self._engine.rows(f"DESCRIBE {sql}")
        for i, (name, kind, *_) in enumerate(columns):
            value = f"column{i}"
            if i in kept and kept[i].spelling is None:
                respelled[name] = self._about(kept[i].sources, kind, texts)
            elif i in kept:
                value = kept[i].text(value, kind)
            elif kind in _UNQUOTED:
                value = _UNQUOTED[kind].format(value)
            changes = changes or value != f"column{i}"
            values.append(f"{value} AS {identifier(name)}")
        self.respelled = respelled
        names = ", ".join(f"column{i}" for i in range(len(columns)))
        return f"SELECT {', '.join(values)} FROM ({sql}) AS result({names})" if changes else sql

    def _about(self, sources: Sequence[tuple[int, str]], kind: str, texts: Mapping[int, readers.Text]) -> str:
        """Return why the texts of a column of type `kind`, which come from columns of text files, have changed."""
        for at, name in sources:
            if texts[at].columns[name].spelling is None:
                changed = readers.find_changed(self._engine, texts[at], name)
                return f"it has values of {name!r} as {kind}, so that {changed}"
        names = " and ".join(repr(name) for _, name in sources)
        return f"it may have values of {names} as {kind}, which changes how they are written; cast it to VARCHAR"

    def describe(self) -> dict[str, Any]:
        """Return the query, its engine, the files that it reads, and the columns of its tables."""
        stamp = self.input.stamp()
        files = [] if stamp is None else [{"file": name, "bytes": size} for name, size, _ in stamp[2]]
        return {"query": self._given, "engine": f"DuckDB {duckdb.__version__}", "files": files, **self._raw}

    def fingerprint(self) -> list[Any] | None:  # Any: JSON
        """Return the query, DuckDB's version, and each file's path, size and time; None if the files are unknown."""
        found: list[list[Any]] = []
        for pattern in self._patterns or ():
            paths = [Path(name) for (name,) in self._engine.rows("SELECT file FROM glob(?) ORDER BY file", pattern)]
            if not paths or not all(path.is_file() for path in paths):  # such as remote files
                return None
            found += [[str(one.resolve()), one.stat().st_size, one.stat().st_mtime_ns] for one in paths]
        return None if self._patterns is None else [self._given, duckdb.__version__, found]

    def batches(self, columns: Sequence[str], first: int) -> Iterator[pa.RecordBatch]:
        """Yield the rows from number `first` on; the query always runs from its beginning."""
        fields, row = [self.names.index(name) for name in columns], 0
        batches = self._engine.stream(self._sql)
        with _shown(self._engine):
            batch = next(batches, None)
        while batch is not None:
            read = batch.select(fields)
            yield (read if self._keeps_order else _with_one_zero(read)).slice(max(0, first - row))
            row += len(batch)
            batch = next(batches, None)
        self._note_growth()

    def _note_growth(self) -> None:
        """Print a note for each join that repeats rows, once."""
        joins = [] if self._noted else list(plan.grown_joins(self._engine.operators(), self._first_file))
        self._noted = True
        for on, before, after in joins:
            note(
                f"query: the join on {on} makes {after:,} rows from {before:,}, because its other side repeats keys; "
                "to keep one row each, group that side by its key first"
            )


def _with_one_zero(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Replace -0.0 with 0.0: SQL treats the two as equal, so a sort or GROUP BY could return either of them."""
    columns = []
    for column in batch.columns:
        if pa.types.is_floating(column.type):
            columns.append(pc.add(column, pa.scalar(0, column.type)))
        elif pa.types.is_list(column.type) and pa.types.is_floating(column.type.value_type):
            values = pc.add(column.values, pa.scalar(0, column.type.value_type))
            columns.append(pa.ListArray.from_arrays(column.offsets, values, mask=column.is_null()))
        else:
            columns.append(column)
    return pa.RecordBatch.from_arrays(columns, batch.schema.names)


@contextmanager
def _shown(engine: Engine) -> Iterator[None]:
    """Show a query's progress until its first row."""
    shown = 0

    def show() -> None:
        nonlocal shown
        percent = int(engine.progress())
        progress.update(max(0, percent - shown))
        shown = max(shown, percent)

    with bar(100, "query", "%") as progress:
        worker = Worker("hostdev-progress", show, seconds=_POLLED).start()
        try:
            yield
        finally:
            worker.stop()


@dataclass(frozen=True)
class QueryOptions:
    """Settings for running a query.

    Attributes:
        threads: Number of threads.
        memory: Bytes of memory that the query may use.
        spill: Folder for data that does not fit in memory.
        tables: Tables in this process that the query may read, such as pandas or Arrow tables, by name.
    """

    threads: int
    memory: int
    spill: Path
    tables: Mapping[str, Any] | None = None


def open_query(sql: str, options: QueryOptions) -> QueryRows:
    """Open a query for `table.TableSource`; print a note about its row order, threads and memory."""
    found = QueryRows(sql, Engine(options.threads, options.memory, options.spill, options.tables), options.threads)
    lines = [f"query: rows in the order {found.order}; {format_bytes(options.memory)} of memory"]
    if found.doubts and options.threads > 1:
        more = f", and {len(found.doubts) - _DOUBTS} more" if len(found.doubts) > _DOUBTS else ""
        lines.append(
            f"query: one thread, because several could change the result: {'; '.join(found.doubts[:_DOUBTS])}{more}"
        )
    note("\n".join(lines))
    return found


def spill_folder(out: Path) -> Path:
    """Return the folder for data that does not fit in memory. It is inside the work folder, and is removed with it."""
    return out.parent / f".{out.name}.partial" / "query"
