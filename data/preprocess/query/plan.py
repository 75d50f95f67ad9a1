"""Analysis of a query: its files, its sums of floating-point numbers, which depend on the row order, its joins, and the
columns of its files that it returns unchanged.

Only DuckDB's plan has the types of expressions. DuckDB cannot write a plan as JSON if the query reads files, so the
query is planned with empty tables in place of the files.
"""

import copy
import fnmatch
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import duckdb

from hostdev.core.errors import UserError
from hostdev.core.printable import printable
from hostdev.data.preprocess.query.allowed import CHANGING, SUMMING, changing, shown
from hostdev.data.preprocess.query.engine import CLOSED, MACROS, Engine, in_one_line
from hostdev.data.preprocess.query.from_clause import described, is_given, list_texts, readers, replace_table
from hostdev.data.preprocess.query.readers import Text
from hostdev.data.preprocess.query.spelling import PLAIN, SPELLINGS, TAGS, X, identifier
from hostdev.data.preprocess.query.statement import Node, Statement, parse, table_name, to_sql, walk

_FLOATS = ("DOUBLE", "FLOAT")


def patterns(statement: Statement, engine: Engine) -> list[str]:
    """Return the names and patterns of the files that a query reads.

    Raises:
        UserError: A name is unknown before the query runs, or a file is on another machine.
    """
    found: list[str] = []
    for node in readers(statement.tree):
        if node["type"] == "BASE_TABLE":
            if not is_given(node, engine):
                found.append(table_name(node))
            continue
        found += _names(statement, node["function"], engine)
    for name in found:
        if "://" in name and not name.startswith("file://"):
            raise UserError(f"the query: {shown(name)} is not on this machine; copy it here first")
    return list(dict.fromkeys(found))


def reads_tables(statement: Statement, engine: Engine) -> bool:
    """Return whether a query reads tables of this process."""
    return any(node["type"] == "BASE_TABLE" and is_given(node, engine) for node in readers(statement.tree))


def _names(statement: Statement, function: Node, engine: Engine) -> list[str]:
    """Return the file names in a function's first argument; raise UserError if it is not constant, or not names."""
    positional = [
        one["expression"]
        for one in function["arguments"]
        if not one["name"] and one["expression"].get("type") != "COMPARE_EQUAL"  # such as header = true
    ]
    value: Any = None
    if positional and not any(node.get("class") in ("COLUMN_REF", "SUBQUERY") for node in walk(positional[0])):
        alone = copy.deepcopy(parse(engine.connection, "SELECT 1").tree)
        alone["statements"][0]["node"]["select_list"] = [positional[0]]
        [(value,)] = engine.rows(to_sql(engine.connection, alone))
    names = [value] if isinstance(value, str) else value
    is_list = isinstance(names, list) and all(isinstance(name, str) for name in names)
    if not is_list or sorted(names) != sorted(list_texts(positional[0])):
        raise UserError(f"{statement.where(function)}: the first argument must be a file's name, or a list of names")
    return names


def float_sums(tree: Node, engine: Engine) -> list[str]:
    """Describe the aggregates of a query that add floating-point numbers in undefined order.

    If DuckDB cannot show the plan, return a single text that says so.

    Raises:
        UserError: The query is invalid; for example, it names a column that does not exist. Or it has a name, such as
            `localtime`, that is no column but a function whose value changes.
    """
    planner = QueryPlanner(tree, engine)
    with in_one_line():
        text = planner.rows("SELECT json_serialize_plan(?)", planner.sql)[0][0]
    try:
        plan = json.loads(text)
    except ValueError:  # DuckDB writes nothing for a constant of type BIT
        plan = {"error": True, "error_message": "it has a constant that JSON cannot hold"}
    if plan.get("error"):
        message = printable(" ".join(str(plan.get("error_message")).split()), 200)
        engine.schema(to_sql(engine.connection, tree))  # raises if the query is invalid
        if any(node.get("column_names") == ["localtime"] for node in walk(tree)):
            raise changing("the query", "localtime")
        return [f"DuckDB cannot show the query's plan ({message})"]
    found = []
    for node in walk(plan):
        if node.get("expression_class") == "BOUND_FUNCTION" and node["qname"]["path"][-1] in CHANGING:
            raise changing("the query", node["qname"]["path"][-1])
        if node.get("expression_class") not in ("BOUND_AGGREGATE", "BOUND_WINDOW"):
            continue
        name = str(node.get("qname", {}).get("path", [""])[-1])  # functions such as row_number() have no qname
        ordered = (node.get("order_bys") or {}).get("orders") or node.get("arg_orders")
        if name not in SUMMING or ordered:
            continue
        if name == "entropy" or any(one["id"] in _FLOATS for one in node["arguments"]):
            found.append(f"{name}() adds floating-point numbers ({name}(x::DECIMAL(18, 6)) is exact)")
    return list(dict.fromkeys(found))


def first_file(statement: Statement) -> str:
    """Return the name or pattern of the first file in a query's FROM clause, or "" if it has none."""
    named = {
        one["key"].lower(): one["value"]["query_node"]
        for node in walk(statement.tree)
        for one in (node.get("cte_map") or {}).get("map", ())
    }
    node: Any = statement.select
    while node:
        kind = node.get("type")
        if kind == "BASE_TABLE":
            if (name := table_name(node).lower()) not in named:
                return table_name(node)
            node = named.pop(name)
        elif kind == "TABLE_FUNCTION":
            texts = [one["literal"]["text"] for one in walk(node["function"]["arguments"]) if "literal" in one]
            return str(texts[-1]) if texts else ""
        else:
            inner = (node.get("subquery") or {}).get("node") or node.get("from_table") or node.get("left")
            node = inner or next(iter(node.get("children") or ()), node.get("source"))
    return ""


def grown_joins(operators: Sequence[Node], first: str) -> Iterator[tuple[str, int, int]]:
    """Yield each join that has more rows than its main input: its condition, the input's rows, and the join's rows.

    Args:
        operators: Trees from `Engine.operators`.
        first: The name or pattern of the first file. A join's main input is the one that reads this file, otherwise the
            larger one, because DuckDB may exchange the inputs.
    """
    for operator in operators:
        inputs = operator.get("children") or []
        about = operator.get("extra_info") or {}
        if operator["name"] == "HASH_JOIN" and about.get("Join Type") in ("INNER", "LEFT", "RIGHT", "FULL"):
            main = [one for one in inputs if _reads(one, first)]
            rows = max(one["intermediate_rows"] for one in (main if len(main) == 1 else inputs))
            if operator["intermediate_rows"] > rows:
                conditions = about.get("Conditions", "")
                shown = conditions if isinstance(conditions, str) else " and ".join(conditions)
                yield shown, rows, operator["intermediate_rows"]
        yield from grown_joins(inputs, first)


def _reads(operator: Node, file: str) -> bool:
    """Return whether an operator reads a file, directly or through others."""
    names = (operator.get("extra_info") or {}).get("Filename(s)", "")
    files = names if isinstance(names, list) else names.split(", ")
    matches = any(one == file or one.startswith(f"{file}/") or fnmatch.fnmatchcase(one, file) for one in files)
    return (bool(file) and matches) or any(_reads(one, file) for one in operator.get("children") or ())


class QueryPlanner:
    """A query with empty tables, in a database of their own, in place of the tables that it reads.

    Attributes:
        sql: The query.
        tables: The names of the tables that stand for a reader, by its location in the query.
    """

    def __init__(self, tree: Node, engine: Engine) -> None:
        tree = copy.deepcopy(tree)
        self.tables: dict[int, list[str]] = {}
        with in_one_line():
            self._connection = duckdb.connect(":memory:", config=CLOSED)
            for macro in MACROS:
                self._connection.execute(macro)
            for number, node in enumerate(list(readers(tree))):
                self._stand_in(node, f"hostdev {number}", engine)
            self.sql = to_sql(self._connection, tree)

    def rows(self, sql: str, *parameters: Any) -> list[tuple[Any, ...]]:
        """Run a statement and return all rows."""
        found: list[tuple[Any, ...]] = self._connection.execute(sql, list(parameters)).fetchall()
        return found

    def types(self, changes: Mapping[tuple[int, str], str]) -> list[str] | None:
        """Return the types of the query's columns if columns of its tables, by location and name, had other types.

        None if the query is invalid with these types.
        """
        columns = [(table, name, kind) for (at, name), kind in changes.items() for table in self.tables.get(at, ())]
        self.rows("BEGIN")
        try:
            for table, name, kind in columns:
                self.rows(f"ALTER TABLE {identifier(table)} ALTER {identifier(name)} TYPE {kind}")
            return [kind for _, kind, *_ in self.rows(f"DESCRIBE {self.sql}")]
        except duckdb.Error:
            return None
        finally:
            self.rows("ROLLBACK")

    def uses(self, location: int, name: str) -> bool:
        """Return whether the query uses the column `name` of the reader at `location`."""
        before = len(self.types({}) or ())
        self.rows("BEGIN")
        try:
            for table in self.tables.get(location, ()):
                self.rows(f"ALTER TABLE {identifier(table)} DROP {identifier(name)}")
            return len(self.rows(f"DESCRIBE {self.sql}")) != before
        except duckdb.Error:
            return True
        finally:
            self.rows("ROLLBACK")

    def _stand_in(self, node: Node, name: str, engine: Engine) -> None:
        shown = ", ".join(f"{identifier(column)} {kind}" for column, kind in described(engine, node).items())
        self.rows(f"CREATE TABLE {identifier(name)} ({shown})")
        self.tables.setdefault(node["query_location"], []).append(name)
        replace_table(node, name, self._connection)


class Kept(NamedTuple):
    """A column of a query's result that is not of type text, but has unchanged values of columns of text files.

    Attributes:
        is_list: Whether it has lists of such values.
        spelling: The expression for the file's texts, or None if there is none for all of them.
        sources: Without a spelling, the columns that the values may come from, each with its reader's location.
    """

    is_list: bool
    spelling: str | None
    sources: tuple[tuple[int, str], ...] = ()

    def text(self, value: str, kind: str) -> str:
        """Return the expression for the text of `value`, an expression of type `kind`."""
        spelling = self.spelling or X
        if kind.startswith("DOUBLE"):  # a query may compute other numbers from those of the file
            usual = SPELLINGS["DOUBLE"][0]
            spelling = f"CASE WHEN CAST({spelling} AS DOUBLE) = {X} THEN {spelling} ELSE {usual} END"
        return f"[{spelling.replace(X, 'one')} FOR one IN {value}]" if self.is_list else spelling.replace(X, value)


def kept_columns(tree: Node, engine: Engine, texts: Mapping[int, Text]) -> dict[int, Kept]:
    """Return the columns of a query's result, by index, that have values of text files' columns, unchanged.

    The query is planned with another type, which occurs nowhere else, for columns of its files. Columns of its result
    that then have this type, or lists of it, have unchanged values.
    """
    by_type: dict[str, dict[tuple[int, str], str | None]] = {}
    for at, text in texts.items():
        for name, column in text.columns.items():
            if column.type in TAGS:
                by_type.setdefault(column.type, {})[at, name] = column.spelling
    found: dict[int, Kept] = {}
    if not by_type:
        return found
    planner = QueryPlanner(tree, engine)
    before = planner.types({}) or []
    for kind, columns in by_type.items():
        tag = TAGS[kind]
        typed = {i: shown != kind for i, shown in enumerate(before) if shown in (kind, f"{kind}[]")}

        def tagged(
            some: Iterable[tuple[int, str]], typed: Mapping[int, bool] = typed, tag: str = tag
        ) -> set[int] | None:
            """Return which result columns of this type have values of `some` file columns; None if it is unknown."""
            types = planner.types(dict.fromkeys(some, tag))
            return None if types is None else {i for i, is_list in typed.items() if types[i] == tag + "[]" * is_list}

        if not typed:
            continue
        kept = tagged(columns)
        if kept is None:
            kept = set() if set(columns.values()) <= PLAIN else set(typed)
            found |= {i: Kept(typed[i], None, tuple(columns)) for i in kept}
            continue
        spellings: dict[int, set[str | None]] = {i: set() for i in kept}
        for spelling in set(columns.values()):
            for i in tagged(one for one, of in columns.items() if of == spelling) or ():
                spellings[i].add(spelling)
        alone = {one: tagged([one]) or set() for one in columns} if kept else {}
        for i in kept:
            if len(spellings[i]) == 1 and None not in spellings[i]:
                found[i] = Kept(typed[i], next(iter(spellings[i])))
            else:
                sources = tuple(one for one in columns if i in alone[one])
                found[i] = Kept(typed[i], None, sources or tuple(columns))
    return found
