"""Analysis of a query: the files that it reads, and its sums of floating-point numbers, which depend on the row order.

Only DuckDB's plan has the types of expressions, and DuckDB cannot write the plan of a query that reads files as JSON.
So the query is planned with empty tables in place of the files.
"""

import copy
import json
from collections.abc import Iterator
from typing import Any

import duckdb

from hostdev.core.printable import printable
from hostdev.data.preprocess.query.engine import MACROS, Engine, in_one_line
from hostdev.data.preprocess.query.settle import SUMMING, implicit_name
from hostdev.data.preprocess.query.statement import Node, parse, to_sql, walk

_FLOATS = ("DOUBLE", "FLOAT")
_LOCAL = frozenset(("range", "generate_series", "unnest", "repeat", "repeat_row"))  # functions that read no files


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
    tree_before, tree = tree, copy.deepcopy(tree)
    with in_one_line():
        planner = duckdb.connect(":memory:")
        for macro in MACROS:
            planner.execute(macro)
        _stand_in(tree, engine, planner)
        plan = json.loads(planner.execute("SELECT json_serialize_plan(?)", [to_sql(planner, tree)]).fetchall()[0][0])
    if plan.get("error"):
        message = printable(" ".join(str(plan.get("error_message")).split()), 200)
        engine.schema(to_sql(engine.connection, tree_before))  # raises if the query is invalid
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


def readers(tree: Node) -> Iterator[Node]:
    """Yield the elements of FROM clauses that are files, functions that read files, or tables of this process."""
    named = {one["key"] for node in walk(tree) for one in (node.get("cte_map") or {}).get("map", ())}
    for node in walk(tree):
        is_table = node.get("type") == "BASE_TABLE" and node["table_name"] not in named
        is_function = node.get("type") == "TABLE_FUNCTION"
        if is_table or (is_function and node["function"]["function_name"].lower() not in _LOCAL):
            yield node


def _stand_in(tree: Node, engine: Engine, planner: Any) -> None:
    """Replace the tables that a query reads with empty tables of `planner` that have the same columns."""
    for number, node in enumerate(list(readers(tree))):
        name = f"hostdev {number}"
        shown = ", ".join(f'"{column.replace(chr(34), chr(34) * 2)}" {kind}' for column, kind in columns(node, engine))
        planner.execute(f'CREATE TABLE "{name}" ({shown})')
        replace_table(node, name, planner)


def select_all(node: Node, connection: Any) -> str:
    """Return the SQL that selects all columns of an element of a FROM clause."""
    alone = copy.deepcopy(parse(connection, "SELECT * FROM x").tree)
    alone["statements"][0]["node"]["from_table"] = copy.deepcopy(node)
    return to_sql(connection, alone)


def columns(node: Node, engine: Engine) -> list[tuple[str, str]]:
    """Return the names and DuckDB's types of the columns of an element of a FROM clause."""
    return [(name, kind) for name, kind, *_ in engine.rows(f"DESCRIBE {select_all(node, engine.connection)}")]


def replace_table(node: Node, name: str, connection: Any) -> None:
    """Replace an element of a FROM clause with the table `name`, under the name that the query has for it."""
    is_table = node["type"] == "BASE_TABLE"
    own = implicit_name(node["table_name"]) if is_table else node["function"]["function_name"]
    alias, columns_named = node["alias"] or own, node.get("column_name_alias", [])
    node.clear()
    node.update(parse(connection, f'SELECT * FROM "{name}"').select["from_table"])
    node.update(alias=alias, column_name_alias=columns_named)
