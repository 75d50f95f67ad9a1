"""Analysis of a query: the files that it reads, its sums of floating-point numbers, which depend on the row order, and
the columns of its files that it returns unchanged.

Only DuckDB's plan has the types of expressions, and DuckDB cannot write the plan of a query that reads files as JSON.
So the query is planned with empty tables in place of the files.
"""

import copy
import json
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import duckdb

from hostdev.core.printable import printable
from hostdev.data.preprocess.query.engine import MACROS, Engine, in_one_line
from hostdev.data.preprocess.query.from_clause import readers, select_all
from hostdev.data.preprocess.query.readers import Text
from hostdev.data.preprocess.query.settle import SUMMING, implicit_name
from hostdev.data.preprocess.query.spelling import PLAIN, SPELLINGS, TAGS, X, identifier
from hostdev.data.preprocess.query.statement import Node, parse, to_sql, walk

_FLOATS = ("DOUBLE", "FLOAT")


def patterns(tree: Node, engine: Engine) -> list[str] | None:
    """Return the names and patterns of the files that a query reads, or None if it also has other inputs."""
    found: list[str] = []
    for node in readers(tree):
        if node["type"] == "BASE_TABLE":
            if node["table_name"] in engine.tables:
                return None
            found.append(node["table_name"])
            continue
        given = node["function"]["arguments"][:1]
        constants = [one for node in given for one in walk(node) if one.get("class") == "CONSTANT"]
        texts = [one["literal"]["text"] for one in constants if one["literal"]["kind"] == "STRING"]
        if not texts or len(texts) < len(constants):
            return None
        found += texts
    return list(dict.fromkeys(found))


def float_sums(tree: Node, engine: Engine) -> list[str]:
    """Describe the aggregates of a query that add floating-point numbers in undefined order.

    Raises:
        UserError: The query is invalid; for example, it names a column that does not exist.
    """
    planner = Planner(tree, engine)
    with in_one_line():
        plan = json.loads(planner.rows("SELECT json_serialize_plan(?)", planner.sql)[0][0])
    if plan.get("error"):
        message = printable(" ".join(str(plan.get("error_message")).split()), 200)
        engine.schema(to_sql(engine.connection, tree))  # raises if the query is invalid
        return [f"DuckDB cannot show the query's plan ({message})"]
    found = []
    for node in walk(plan):
        if node.get("expression_class") not in ("BOUND_AGGREGATE", "BOUND_WINDOW"):
            continue
        name = str(node.get("qname", {}).get("path", [""])[-1])  # functions such as row_number() have no qname
        ordered = (node.get("order_bys") or {}).get("orders") or node.get("arg_orders")
        if name in SUMMING and not ordered and any(one["id"] in _FLOATS for one in node["arguments"]):
            found.append(f"{name}() adds floating-point numbers ({name}(x::DECIMAL(18, 6)) is exact)")
    return list(dict.fromkeys(found))


class Planner:
    """A query with empty tables, in a database of their own, in place of the tables that it reads.

    Attributes:
        sql: The query.
        tables: The names of the tables that stand for a reader, by its location in the query.
    """

    def __init__(self, tree: Node, engine: Engine) -> None:
        tree = copy.deepcopy(tree)
        self.tables: dict[int, list[str]] = {}
        with in_one_line():
            self._connection = duckdb.connect(":memory:")
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
        """Return whether the query's result has a column of its tables, or is computed from it."""
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
        columns = engine.rows(f"DESCRIBE {select_all(engine, node)}")
        shown = ", ".join(f"{identifier(column)} {kind}" for column, kind, *_ in columns)
        self.rows(f"CREATE TABLE {identifier(name)} ({shown})")
        self.tables.setdefault(node["query_location"], []).append(name)
        is_table = node["type"] == "BASE_TABLE"
        own = implicit_name(node["table_name"]) if is_table else node["function"]["function_name"]
        kept = {"alias": node["alias"] or own, "column_name_alias": node.get("column_name_alias", [])}
        node.clear()
        node.update(parse(self._connection, f"SELECT * FROM {identifier(name)}").select["from_table"])
        node.update(kept)


class Kept(NamedTuple):
    """A column of a query's result with unchanged values of text files' columns, whose type is not text.

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
    planner = Planner(tree, engine)
    before = planner.types({}) or []
    for kind, columns in by_type.items():
        tag = TAGS[kind]
        typed = {i: shown != kind for i, shown in enumerate(before) if shown in (kind, f"{kind}[]")}

        def tagged(
            some: Iterable[tuple[int, str]], typed: Mapping[int, bool] = typed, tag: str = tag
        ) -> set[int] | None:
            """Return which of the columns of this type have values of `some` columns; None if it is unknown."""
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
