"""Columns of raw rows, computed by the statement that computed the data set's columns, or by another statement."""

import copy
import json
import os
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from hostdev.core.errors import UserError
from hostdev.core.memory import available_bytes
from hostdev.data.preprocess.columns import WrongValueError, combined
from hostdev.data.preprocess.encoding import Encoding, WrongRowError
from hostdev.data.preprocess.naming import listed
from hostdev.data.preprocess.query import allowed, by_row
from hostdev.data.preprocess.query.engine import Engine, in_one_line
from hostdev.data.preprocess.query.from_clause import readers, replace_table, select_all
from hostdev.data.preprocess.query.raw_values import RawType, array_of, convert
from hostdev.data.preprocess.query.spelling import identifier
from hostdev.data.preprocess.query.statement import Node, parse, reference, to_sql

ROWS = "rows"  # the table of the rows to predict in a statement of --query
_RAW, _TYPED, _NUMBER = "hostdev raw", "hostdev rows", "hostdev row"  # names of tables and of a column
_MOST_PLANS = 64
_MEMORY_SHARE = 8
_FEW = 1 << 10  # up to this many rows, the encoding reads plain values faster than arrays

AsArray = Callable[[str, Any], pa.Array]


class RawSource(NamedTuple):
    """The manifest's entry about a data set's query.

    Attributes:
        sql: The query.
        columns: For each column of the tables that it reads, the type and the format; empty in older manifests.
        is_text: Whether a table is CSV.
        header: Whether the CSV file has a header; None if the table is not CSV.
    """

    sql: str
    columns: dict[str, tuple[str, str | None]]
    is_text: bool
    header: bool | None


def find_source(sources: Sequence[Mapping[str, Any]]) -> RawSource | None:
    """Return the query that a data set was made by, from its manifest's sources, or None.

    Raises UserError if the entry is invalid.
    """
    entry = next((one for one in sources if isinstance(one, dict) and isinstance(one.get("query"), str)), None)
    if entry is None:
        return None
    try:
        columns = {str(name): (str(one["type"]), one.get("format")) for name, one in entry.get("columns", {}).items()}
        right = all(form is None or isinstance(form, str) for _, form in columns.values())
    except (AttributeError, KeyError, TypeError):
        right = False
    if not right:
        raise UserError(
            "the data set's manifest.json is broken (an invalid value of columns); preprocess the data again"
        )
    return RawSource(entry["query"], columns, bool(entry.get("text")), entry.get("header"))


class RawQuery:
    """A statement that computes the columns of raw rows; several threads may use it.

    Args:
        encoding: The data set's encoding, whose columns are needed.
        source: The data set's query, or None.
        given: A statement that is used in place of the data set's query, or None. It reads the rows as the table
            `rows`, which it may join with other tables; the other tables are read once, here. A statement that is row
            by row may give the table any name.

    Raises:
        UserError: There is no statement, or `given` is invalid, or is not row by row.
    """

    def __init__(self, encoding: Encoding, source: RawSource | None, given: str | None = None) -> None:
        self.encoding, self.source, self.is_given = encoding, source, given is not None
        self.spill = Path(tempfile.gettempdir()) / f"hostdev-query-{os.getpid()}"
        self._engine = Engine(1, max(1 << 26, available_bytes() // _MEMORY_SHARE), self.spill)
        self._lock = threading.RLock()
        self._plans: dict[Any, RawPlan] = {}
        self.reader: Node | None = None  # the FROM element that the rows replace, if the statement is row by row
        self._removed: dict[str, str] = {}  # columns that are not row by row, and why
        self._joins = False
        known = {} if source is None else source.columns
        self._sql = given if given is not None else "" if source is None else source.sql
        self._reason = ""  # why the statement is not row by row
        with self._lock:
            self._types: dict[str, RawType] = {}
            self._parse()
            self._engine.connection.execute("SET enable_external_access = false")  # a checkpoint's query is not trusted
            self._engine.connection.execute("SET lock_configuration = true")
            self._types = {name: RawType(*self._kind(kind), form) for name, (kind, form) in known.items()}

    def _kind(self, name: str) -> tuple[str, pa.DataType]:
        return name, self._engine.schema(f"SELECT NULL::{name} AS value").field(0).type

    def _parse(self) -> None:
        """Parse the statement, and put the rows in place of its table."""
        engine, connection = self._engine, self._engine.connection
        statement = parse(connection, self._sql)
        self.tree = tree = copy.deepcopy(statement.tree)
        select = tree["statements"][0]["node"]
        try:
            if self.is_given:
                allowed.check(statement, engine)
                rows = list(by_row.tables_in(select, ROWS))
                if len(rows) == 1 and rows[0] is not (select.get("from_table") or {}):
                    by_row.require_joined(select, engine.aggregates)
                    self._join(rows[0], select)
                    return
            table, self._removed = by_row.strip(tree, engine.aggregates)
            self.reader = copy.deepcopy(table)
            replace_table(table, _TYPED, connection)
        except by_row.NotByRowError as error:
            self._reason = str(error)
            if self.is_given:
                raise UserError(
                    f"--query: the statement is not row by row: it {error}; a row's columns may depend on that row "
                    f"alone, read as the table {ROWS}, and on tables that it joins"
                ) from None

    def _join(self, rows: Node, select: Node) -> None:
        """Read the tables that a statement joins with the rows, and add the row's number to each row of its result."""
        engine = self._engine
        rows["table_name"] = "hostdev marked"
        for number, node in enumerate(list(readers(self.tree))):
            if node is rows:
                continue
            name = f"hostdev table {number}"
            with in_one_line():
                content = select_all(engine, node)
                engine.connection.execute(f"CREATE TABLE {identifier(name)} AS {content}")
            replace_table(node, name, engine.connection)
        rows["table_name"] = ROWS
        replace_table(rows, _TYPED, engine.connection)
        owner = rows["alias"]
        select["select_list"].append(reference(owner, _NUMBER) | {"alias": f"{_NUMBER} of the result"})
        self._joins = True

    @cached_property
    def statement(self) -> str:
        """The statement's SQL, which reads the rows as a table."""
        return to_sql(self._engine.connection, self.tree)

    @property
    def redefined(self) -> list[str]:
        """The columns that a row-by-row statement computes under the name of a column of the raw rows."""
        if self.reader is None:
            return []
        found = self._bind(set())[1]
        select = self.tree["statements"][0]["node"]
        columns = set(self._types)
        return [
            name for name in found if name in columns and by_row.source_of(select, name, columns, cast=True) != name
        ]

    def plan(self, names: Sequence[Any], optional: Sequence[str] = (), *, typed: bool = False) -> "RawPlan":
        """Return how to compute the columns of rows that have the columns `names`.

        Args:
            names: The rows' columns.
            optional: Further columns that are computed, or taken from the rows, if that is possible.
            typed: Whether columns that the statement does not change get their types of training, too, unless they were
                text. This is not needed if the encoding knows the columns' types.

        Raises:
            UserError: A column occurs twice, or is missing and cannot be computed.
        """
        known = self._types.keys() | set(self.encoding.columns()) | set(optional)
        if twice := [name for name in known if names.count(name) > 1]:
            raise UserError(f"the rows have {names.count(twice[0])} columns named {twice[0]!r}; keep one")
        have = frozenset(name for name in names if isinstance(name, str) and (self.is_given or name in known))
        key = have, tuple(optional), typed
        with self._lock:
            if key not in self._plans:
                found = self._make_plan(set(have), optional, typed=typed)
                if len(self._plans) >= _MOST_PLANS:
                    self._plans.clear()
                self._plans[key] = found
            return self._plans[key]

    def _make_plan(self, have: set[str], optional: Sequence[str], *, typed: bool) -> "RawPlan":
        wanted = self.encoding.columns()
        table, outputs = self._bind(have)
        select = self.tree["statements"][0]["node"]
        computed: dict[str, list[str]] = {}
        taken: dict[str, str] = {}
        lacking, missing = [], []
        for name in dict.fromkeys([*wanted, *optional]):
            needs = self._needs(name, table) if name in outputs else None
            unchanged = None
            if needs and self.reader is not None and (not typed or name in self.encoding.text_columns):
                unchanged = by_row.source_of(select, name, set(self._types))
            if unchanged in have and unchanged is not None:
                taken[name] = unchanged
            elif needs is not None and set(needs) <= have:
                computed[name] = needs
            elif name in have:
                taken[name] = name
            elif name in wanted:
                missing.append(name)
                lacking += [one for one in needs or () if one not in have]
        if missing:
            raise UserError(self._cannot(missing, [one for one in dict.fromkeys(lacking) if one not in missing]))
        return RawPlan(self, table, computed, taken)

    def _cannot(self, missing: list[str], lacking: list[str]) -> str:
        """Return the message about columns that cannot be computed."""
        columns = f"column{'s' if len(missing) > 1 else ''} {listed(missing)}"
        how = f"give {'them' if len(missing) > 1 else 'it'} computed, or another statement with --query (query=)"
        if self.source is not None and not self.is_given and not self.source.columns:
            return (
                f"the rows have no {columns}, and an older version of hostdev did not note the types of raw columns "
                f"from which the data set's query computes them; preprocess the data again, or {how}"
            )
        if lacking:
            return (
                f"the rows have no {columns}, and lack {listed(lacking)} to compute {'them' if missing[1:] else 'it'}"
            )
        why = f"the query {self._reason}" if self._reason else ""
        if not why:
            why = "; ".join(f"{name} is {self._removed[name]}" for name in missing if name in self._removed)
        if why:
            return f"the rows have no {columns}, which cannot be computed from single rows ({why}); {how}"
        return f"the rows have no {columns}, which the statement does not compute; {how}"

    @property
    def raw_columns(self) -> list[str]:
        """The columns of the tables that the data set's query reads."""
        return list(self._types)

    @cached_property
    def file_reader(self) -> Node | None:
        """The FROM element that reads files of raw rows, or None if a file's name tells how to read it."""
        if self.reader is not None and not (self.is_given and self.reader.get("table_name") == ROWS):
            return self.reader
        if not self.is_given or self.source is None:
            return None
        try:
            return by_row.strip(parse(self._engine.connection, self.source.sql).tree, self._engine.aggregates)[0]
        except (by_row.NotByRowError, UserError):
            return None

    def type_of(self, name: str) -> RawType:
        """Return a raw column's type; text if the data set's query did not read it."""
        return self._types.get(name) or RawType("VARCHAR", pa.string(), None)

    def _typed(self, columns: Sequence[str], raw: Sequence[str]) -> str:
        """Return the SQL of the rows as a table with the types of training; only the columns `raw` have values."""
        there = set(raw)
        values = (
            f"CAST({identifier(name) if name in there else 'NULL'} AS {self.type_of(name).name}) AS {identifier(name)}"
            for name in columns
        )
        number = [f'"{_NUMBER}"'] if self._joins else []
        return f'"{_TYPED}" AS (SELECT {", ".join([*number, *values])} FROM "{_RAW}")'

    def _register_empty(self, names: Sequence[str]) -> None:
        arrays = {name: pa.nulls(0, self.type_of(name).kind) for name in names}
        self._engine.connection.register(_RAW, pa.table({_NUMBER: pa.nulls(0, pa.int64()), **arrays}))

    def _bind(self, have: set[str]) -> tuple[list[str], list[str]]:
        """Return the statement's table columns and its result columns, for rows that have the columns `have`.

        For the data set's query, the table has the raw columns of training. A column that is not in `have` is null, as
        expressions that predictions do not need may read it. For a given statement, the table has the first of these
        lists of columns for which the statement is valid: `have` without columns that training's query computed;
        `have`; `have` and the raw columns of training. Both results are empty if the statement cannot be used.
        """
        if self._reason:
            return [], []
        plain = sorted(have - (set(self.encoding.columns()) - self._types.keys()))
        tables = [list(self._types)]
        if self.is_given:
            tables = [plain, sorted(have), [*self._types, *sorted(have - self._types.keys())]]
        error: UserError | None = None
        for table in tables:
            self._register_empty(table)
            try:
                names = self._schema(table).names
                return table, list(names)
            except UserError as failure:
                error = error or failure
        assert error is not None
        if self.is_given:
            raise error
        removed = f"fails without the columns {listed(list(self._removed))}"
        self._reason = removed if self._removed else str(error).removeprefix("the query ")
        return [], []

    def _schema(self, table: Sequence[str]) -> pa.Schema:
        return self._engine.schema(f"WITH {self._typed(table, table)} FROM ({self.statement})")

    def result_types(self, table: Sequence[str], outputs: Sequence[str]) -> list[pa.DataType]:
        """Return the types of the result's columns `outputs`; `table` has the columns of the table of rows."""
        with self._lock:
            self._register_empty(table)
            schema = self._schema(table)
        return [schema.field(schema.names.index(name)).type for name in outputs]

    def _needs(self, output: str, names: Sequence[str]) -> list[str]:
        """Return the raw columns that a column of the result depends on; `names` are those of the table of rows."""
        self._register_empty(names)
        sql = f"WITH {self._typed(names, names)} SELECT {identifier(output)} FROM ({self.statement})"
        explained = json.loads(self._engine.rows(f"EXPLAIN (FORMAT json) {sql}")[0][1])
        found: list[str] = []
        waiting = list(explained)
        while waiting:
            node = waiting.pop()
            waiting += node["children"]
            if "ARROW" in node["name"]:
                shown = node["extra_info"].get("Projections", [])
                found += [shown] if isinstance(shown, str) else shown
        return [name for name in found if name != _NUMBER]

    def select(self, outputs: Sequence[str], table: Sequence[str], raw: Sequence[str]) -> Any:
        """Return the parsed statement that computes `outputs` from rows that have the columns `raw` of the table."""
        number = [f"{_NUMBER} of the result"] if self._joins else []
        shown = ", ".join(map(identifier, [*outputs, *number]))
        order = f" ORDER BY {identifier(number[0])}" if number else ""
        sql = f"WITH {self._typed(table, raw)} SELECT {shown} FROM ({self.statement}){order}"
        with self._lock, in_one_line():
            return self._engine.connection.extract_statements(sql)[0]

    def run(self, statement: Any, raw: Mapping[str, Any], as_array: AsArray, *, as_table: bool) -> pa.Table | list[Any]:
        """Return the result of a statement of `select` for rows: a table, or a list of rows.

        Args:
            statement: The statement.
            raw: The raw columns, each with a value per row.
            as_array: Converts a column to an array.
            as_table: Whether a table is returned.

        Raises:
            WrongRowError: A value does not have the type that it had in training.
            UserError: An expression fails, or the number of rows changes.
        """
        with self._lock:
            arrays = {name: self._convert(name, values, as_array) for name, values in raw.items()}
            rows = max(map(len, arrays.values()), default=0)
            number = pa.array(np.arange(rows, dtype=np.int64))
            connection = self._engine.connection
            with in_one_line():
                connection.register(_RAW, pa.table({_NUMBER: number, **arrays}))
                if as_table or self._joins:
                    found = connection.sql(statement.query).to_arrow_table()
                else:
                    return connection.execute(statement).fetchall()
        if not self._joins:
            return found
        given = found[found.schema.names[-1]].fill_null(-1).to_numpy()
        if not np.array_equal(given, np.arange(rows)):
            self._refuse_rows(given, rows)
        found = found.select(found.schema.names[:-1])
        return found if as_table else list(zip(*(column.to_pylist() for column in found.columns), strict=True))

    def _convert(self, name: str, values: Any, as_array: AsArray) -> pa.Array:
        wanted = self.type_of(name)
        is_text = self.source is not None and self.source.is_text
        found = array_of(values, wanted)
        if found is not None:
            return found
        try:
            return convert(self._engine, as_array(name, values), wanted, empty_is_missing=is_text)
        except WrongValueError as error:
            raise WrongRowError(error.row, name, str(error)) from None

    def _refuse_rows(self, given: Any, rows: int) -> None:
        """Raise UserError for a result whose row numbers `given` are not 0 to `rows` - 1, in order."""
        counts = np.bincount(given[given >= 0], minlength=rows)
        wrong = np.flatnonzero(counts != 1)
        if not len(wrong):
            raise UserError("the statement of --query adds rows that are no row to predict; use LEFT JOIN")
        how = "no row; use LEFT JOIN" if counts[wrong[0]] == 0 else f"{counts[wrong[0]]} rows; join unique keys"
        raise UserError(f"row {wrong[0] + 1}: the statement of --query has {how}: each row needs one")


class RawPlan:
    """How the columns of a data set are computed from rows with certain columns.

    It has the methods and properties of `Encoding` that `hostdev.ext.predict.rows` uses, about the columns to read.

    Attributes:
        computed: For each computed column, the raw columns that it depends on.
        taken: For each unchanged column, the rows' column with its values.
        raw: The rows' columns that computed columns depend on.
    """

    def __init__(
        self, query: RawQuery, table: Sequence[str], computed: dict[str, list[str]], taken: dict[str, str]
    ) -> None:
        self._query, self._table, self.computed, self.taken = query, table, computed, taken
        needed = dict.fromkeys(name for names in computed.values() for name in names)
        if computed and not needed:  # all are constants; any column tells the number of rows
            needed = dict.fromkeys([*taken.values()][:1])
        self.raw = list(needed)

    def columns(self) -> list[str]:
        """Return the names of the columns to read."""
        return list(dict.fromkeys([*self.taken.values(), *self.raw]))

    def type_of(self, name: str) -> RawType:
        """Return a raw column's type."""
        return self._query.type_of(name)

    @cached_property
    def separators(self) -> dict[str, str | None]:
        """For each column with lists, the separator of the values in text; None if the column has lists, not text."""
        known = self._query.encoding.separators
        lists: dict[str, str | None] = {name: None for name in self.raw if self.type_of(name).is_list}
        return lists | {source: known[name] for name, source in self.taken.items() if name in known}

    @cached_property
    def numeric_columns(self) -> set[str]:
        """The columns that are used only as numbers, and by no expression."""
        numbers = self._query.encoding.numeric_columns
        others = {source for name, source in self.taken.items() if name not in numbers}
        return {source for name, source in self.taken.items() if name in numbers} - others - set(self.raw)

    def complete(self, rows: Any, as_array: AsArray, *, as_arrays: bool = False) -> dict[str, Any]:
        """Return the data set's columns, computed or taken from `rows`.

        Args:
            rows: The columns to read, by name.
            as_array: Converts a column to an array.
            as_arrays: Whether all computed columns are returned as arrays.
        """
        found = {name: rows[source] for name, source in self.taken.items()}
        if not self.computed:
            return found
        raw = {name: rows[name] for name in self.raw}
        is_few = self._is_plain and not as_arrays and all(len(values) <= _FEW for values in raw.values())
        made = self._query.run(self._statement, raw, as_array, as_table=not is_few)
        if isinstance(made, pa.Table):
            columns: Any = map(combined, made.columns)
        else:
            columns = map(list, zip(*made, strict=True)) if made else ([] for _ in self.computed)
        return found | dict(zip(self.computed, columns, strict=True))

    @cached_property
    def _statement(self) -> Any:
        return self._query.select(list(self.computed), self._table, self.raw)

    @cached_property
    def _is_plain(self) -> bool:
        """Whether the encoding can read all computed columns as plain Python values, which is faster for few rows."""
        tests = (pa.types.is_integer, pa.types.is_string, pa.types.is_float64)
        types = self._query.result_types(self._table, list(self.computed))
        types = [kind.value_type if pa.types.is_list(kind) else kind for kind in types]
        return all(any(test(kind) for test in tests) for kind in types)
