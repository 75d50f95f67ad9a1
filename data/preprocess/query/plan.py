"""Analysis of a query: its files, its sums of floating-point numbers, which depend on the row order, and its joins.

Only DuckDB's plan has the types of expressions, and DuckDB cannot write the plan of a query that reads files as JSON.
So the query is planned with empty tables in place of the files.
"""

import copy
import fnmatch
import json
from collections.abc import Iterator, Sequence
from typing import Any

import duckdb

from hostdev.core.errors import UserError
from hostdev.core.printable import printable
from hostdev.data.preprocess.query.allowed import CHANGING, READERS, SUMMING, changing, shown
from hostdev.data.preprocess.query.engine import CLOSED, MACROS, Engine, in_one_line
from hostdev.data.preprocess.query.settle import implicit_name
from hostdev.data.preprocess.query.statement import Node, Statement, parse, table_name, to_sql, walk

_FLOATS = ("DOUBLE", "FLOAT")


def patterns(statement: Statement, engine: Engine) -> list[str]:
    """Return the names and patterns of the files that a query reads.

    Raises:
        UserError: The names are unknown before the query runs, or are on another machine.
    """
    found: list[str] = []
    for node in _readers(statement.tree):
        if node["type"] == "BASE_TABLE":
            if not _is_given(node, engine):
                found.append(table_name(node))
            continue
        found += _names(statement, node["function"], engine)
    for name in found:
        if "://" in name and not name.startswith("file://"):
            raise UserError(f"the query: {shown(name)} is not on this machine; copy it here first")
    return list(dict.fromkeys(found))


def reads_tables(statement: Statement, engine: Engine) -> bool:
    """Return whether a query reads tables of this process."""
    return any(node["type"] == "BASE_TABLE" and _is_given(node, engine) for node in _readers(statement.tree))


def _is_given(node: Node, engine: Engine) -> bool:
    return node["qualified_name"]["path"][-1].lower() in {name.lower() for name in engine.tables}


def _names(statement: Statement, function: Node, engine: Engine) -> list[str]:
    """Return the file names that are a function's first argument, which may be any expression without columns."""
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
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UserError(
            f"{statement.where(function)}: the first argument must be the name of a file, or a list of names"
        )
    return names


def float_sums(tree: Node, engine: Engine) -> list[str]:
    """Describe the aggregates of a query that add floating-point numbers in undefined order.

    Raises:
        UserError: The query is invalid; for example, it names a column that does not exist. Or it has a name, such as
            `localtime`, that is no column but a function whose value changes.
    """
    tree_before, tree = tree, copy.deepcopy(tree)
    with in_one_line():
        planner = duckdb.connect(":memory:", config=CLOSED)
        for macro in MACROS:
            planner.execute(macro)
        _stand_in(tree, engine, planner)
        text = planner.execute("SELECT json_serialize_plan(?)", [to_sql(planner, tree)]).fetchall()[0][0]
    try:
        plan = json.loads(text)
    except ValueError:  # DuckDB writes nothing for a constant of type BIT
        plan = {"error": True, "error_message": "it has a constant that JSON cannot hold"}
    if plan.get("error"):
        message = printable(" ".join(str(plan.get("error_message")).split()), 200)
        engine.schema(to_sql(engine.connection, tree_before))  # raises if the query is invalid
        if any(node.get("column_names") == ["localtime"] for node in walk(tree_before)):
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
    """Yield the condition of each join that has more rows than its main input, with the rows of its input and its own.

    Args:
        operators: Trees from `Engine.operators`.
        first: The name or pattern of the first file. The main input of a join is the one that reads it, otherwise the
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


def _readers(tree: Node) -> Iterator[Node]:
    """Yield the elements of FROM clauses that are files, functions that read files, or tables of this process."""
    named = {one["key"].lower() for node in walk(tree) for one in (node.get("cte_map") or {}).get("map", ())}
    for node in walk(tree):
        is_table = node.get("type") == "BASE_TABLE" and table_name(node).lower() not in named
        is_function = node.get("type") == "TABLE_FUNCTION"
        if is_table or (is_function and node["function"]["function_name"].lower() in READERS):
            yield node


def _stand_in(tree: Node, engine: Engine, planner: Any) -> None:
    """Replace the tables that a query reads with empty tables of `planner` that have the same columns."""
    for number, node in enumerate(list(_readers(tree))):
        alone = copy.deepcopy(parse(planner, "SELECT * FROM x").tree)
        alone["statements"][0]["node"]["from_table"] = copy.deepcopy(node)
        columns = engine.rows(f"DESCRIBE {to_sql(planner, alone)}")
        shown = ", ".join(f'"{name.replace(chr(34), chr(34) * 2)}" {kind}' for name, kind, *_ in columns)
        name = f"hostdev {number}"
        planner.execute(f'CREATE TABLE "{name}" ({shown})')
        is_table = node["type"] == "BASE_TABLE"
        own = implicit_name(table_name(node)) if is_table else node["function"]["function_name"]
        alias, columns_named = node["alias"] or own, node.get("column_name_alias", [])
        node.clear()
        node.update(parse(planner, f'SELECT * FROM "{name}"').select["from_table"])
        node.update(alias=alias, column_name_alias=columns_named)
