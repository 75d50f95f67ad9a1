"""Makes a query's result independent of threads: the rows, their order, and their values.

DuckDB guarantees the order of rows only if a query is a chain of scans, filters and expressions. Otherwise, rows that
tie in an ORDER BY come in the order in which threads finish. So this module adds tie-breaking keys wherever rows are
ordered: in the result, and for a LIMIT, a window or an aggregate.
"""

import copy
from collections.abc import Iterator, Set
from typing import Any, NamedTuple

from hostdev.core.errors import UserError
from hostdev.data.preprocess.query.statement import (
    Node,
    Statement,
    every_column,
    number,
    ordering,
    own,
    reference,
    selects,
    walk,
)

CHANGING = {
    "random": "draw(id, 2020), which maps a value and a seed to a number in [0, 1)",
    **dict.fromkeys(("uuid", "gen_random_uuid", "uuidv4", "uuidv7"), "md5(id)"),
    **dict.fromkeys(
        (
            *("now", "today", "current_date", "current_timestamp", "current_localtimestamp", "get_current_timestamp"),
            *("transaction_timestamp", "get_current_time", "current_localtime", "current_time", "localtimestamp"),
        ),
        "a fixed time, such as TIMESTAMP '2026-01-31 12:00:00'",
    ),
    **dict.fromkeys(("nextval", "currval"), "row_number()"),
    **dict.fromkeys(("setseed", "getenv", "current_setting", "getvariable"), "the value as a constant"),
}
"""Functions whose value changes between runs, and what to write instead."""

PICKING = frozenset(
    [
        *("list", "array_agg", "string_agg", "group_concat", "listagg", "first", "last", "any_value", "arbitrary"),
        *("mode", "arg_min", "arg_max", "argmin", "argmax", "min_by", "max_by", "arg_min_null", "arg_max_null"),
        *("json_group_array", "json_group_object"),
    ]
)
"""Aggregates whose value depends on the order of all rows, including rows that tie in the aggregate's ORDER BY."""

SUMMING = frozenset(
    [
        *("sum", "avg", "mean", "fsum", "favg", "kahan_sum", "sumkahan", "product", "geomean", "geometric_mean"),
        *("stddev", "stddev_pop", "stddev_samp", "variance", "var_pop", "var_samp", "sem", "skewness", "kurtosis"),
        *("kurtosis_pop", "corr", "covar_pop", "covar_samp", "entropy", "regr_avgx", "regr_avgy", "regr_count"),
        *("regr_intercept", "regr_r2", "regr_slope", "regr_sxx", "regr_sxy", "regr_syy"),
    ]
)
"""Aggregates whose value depends on the order in which floating-point numbers are added."""

APPROXIMATE = frozenset(("approx_quantile", "reservoir_quantile", "approx_top_k"))
"""Aggregates whose value depends on how rows are divided among threads."""

WINDOWS = frozenset(["last_items"])
"""Window functions that hostdev adds to DuckDB."""

_NUMBERING = frozenset(
    ("row_number", "ntile", "lag", "lead", "first_value", "last_value", "nth_value", "first", "last", "fill")
)


class Settled(NamedTuple):
    """A query whose result does not depend on threads, as far as its text shows.

    Attributes:
        tree: The parse tree.
        order: Description of the order of the rows.
        doubts: Descriptions of expressions whose value could depend on threads.
    """

    tree: Node
    order: str
    doubts: list[str]


def refuse_changing(statement: Statement) -> None:
    """Raise UserError if a query could have a different result when it is run again."""
    for node in walk(statement.tree):
        name = node.get("function_name", "").lower()
        if node.get("class") == "COLUMN_REF" and len(node["column_names"]) == 1:
            found = node["column_names"][0].lower()
            name = found if found in ("current_date", "current_timestamp", "current_time", "localtimestamp") else name
        if name in CHANGING:
            raise UserError(
                f"the query, {statement.place(node)}: {name}() has a different value in each run, which would change "
                f"the data set; write {CHANGING[name]}"
            )
        if name in WINDOWS and any(one.get("class") == "COLUMN_REF" for one in walk(node["arguments"][3:])):
            raise UserError(f"the query, {statement.place(node)}: {name}() takes the number of items as a constant")
        if node.get("sample") is not None:
            raise UserError(
                "the query: the rows of a sample (USING SAMPLE, TABLESAMPLE) depend on the number of threads; select "
                "rows by a value, such as WHERE draw(id, 2020) < 0.1"
            )


def settle(statement: Statement, aggregates: Set[str], *, windows: bool = True) -> Settled:
    """Add tie-breaking keys wherever a query orders rows, so that its result does not depend on threads.

    Args:
        statement: The query.
        aggregates: The names of all aggregate functions.
        windows: Whether to add keys to windows, too; DuckDB rejects some of the resulting queries.
    """
    tree = copy.deepcopy(statement.tree)
    doubts: list[str] = []
    for select in list(selects(tree)):
        _settle_functions(statement, select, doubts, windows=windows)
    tables = _named_tables(tree)
    outer = tree["statements"][0]["node"]
    keeps = _keeps_order(outer, tables, aggregates)
    sorted_inside = any(any(_orders(select)) for select in selects(tree))
    is_sorted = any(_orders(outer)) or (keeps and sorted_inside)
    for select in list(selects(tree)):
        limited = any(one["type"] in ("LIMIT_MODIFIER", "LIMIT_PERCENT_MODIFIER") for one in select["modifiers"])
        picked = any(one["type"] == "DISTINCT_MODIFIER" and one["distinct_on_targets"] for one in select["modifiers"])
        is_last = select is outer
        needs_order = (limited or picked or is_last) and not _keeps_order(select, tables, aggregates)
        if needs_order or any(_orders(select)):
            _order_all(select)
    unsorted = "of their files" if keeps else "of all columns, from left to right"
    return Settled(tree, "of its ORDER BY, then of all columns" if is_sorted else unsorted, doubts)


def _settle_functions(statement: Statement, select: Node, doubts: list[str], *, windows: bool) -> None:
    """Add tie-breaking keys to the ORDER BY clauses inside a SELECT's aggregates and windows."""
    for node in own(select):
        name = node.get("function_name", "").lower()
        if node.get("class") == "WINDOW":
            _settle_window(statement, node, select, doubts, windows=windows)
        elif node.get("class") == "FUNCTION" and name in PICKING | SUMMING | APPROXIMATE:
            orders = node["order_bys"]["orders"]
            if orders:
                orders += [ordering(copy.deepcopy(one["expression"])) for one in node["arguments"]]
            elif name in PICKING:
                doubts.append(f"{statement.place(node)} has no ORDER BY inside")
            elif name in APPROXIMATE:
                doubts.append(f"{statement.place(node)} is approximate")


def _settle_window(statement: Statement, node: Node, select: Node, doubts: list[str], *, windows: bool) -> None:
    name = node["function_name"].lower()
    if node.get("arg_orders"):
        node["arg_orders"] += [ordering(copy.deepcopy(one["expression"])) for one in node["arguments"]]
    elif name in PICKING and name not in _NUMBERING:
        doubts.append(f"{statement.place(node)} has no ORDER BY inside its arguments")
    by_rows = any(str(node[end]).endswith("ROWS") for end in ("start", "end"))
    if name not in _NUMBERING and not by_rows:
        return  # tied rows get the same value
    if node.get("arg_orders") and name in _NUMBERING:
        return
    keys = list(_keys_of(select)) if windows else []
    if keys:
        node["orders"] += [ordering(key) for key in keys]
    else:
        doubts.append(f"{statement.place(node)} numbers rows that may tie in its ORDER BY")


def _keys_of(select: Node) -> Iterator[Node]:
    """Yield expressions that together identify each row of a SELECT, before its window functions are evaluated."""
    if select.get("group_expressions"):
        yield from copy.deepcopy(select["group_expressions"])
        return
    if select.get("aggregate_handling") == "FORCE_AGGREGATES":  # GROUP BY ALL
        return
    names = list(_names_in(select.get("from_table") or {}))
    if len(set(names)) == len(names):
        yield from (reference(name) for name in names)  # the table's name is a struct of its columns


def _names_in(table: Node) -> Iterator[str]:
    """Yield the names of the tables that a FROM clause joins; give each unnamed subquery a name."""
    kind = table.get("type")
    if kind == "JOIN":
        yield from _names_in(table["left"])
        yield from _names_in(table["right"])
    elif table.get("alias"):
        yield table["alias"]
    elif kind == "BASE_TABLE":
        yield implicit_name(table["table_name"])
    elif kind == "TABLE_FUNCTION":
        yield table["function"]["function_name"]
    elif kind == "SUBQUERY":
        table["alias"] = f"hostdev_{table['query_location']}"
        yield table["alias"]
    elif kind not in ("EMPTY", None):
        yield "unnamed"  # no table has this name, so DuckDB rejects the query with keys in its windows


def implicit_name(table: str) -> str:
    """Return the table name that SQL uses for a file: the file's name without folder and suffix."""
    name = table.replace("\\", "/").rpartition("/")[2]
    return name.partition(".")[0] if "." in name else name


def _orders(select: Node) -> Iterator[Node]:
    return (one for one in select["modifiers"] if one["type"] == "ORDER_MODIFIER")


def _order_all(select: Node) -> None:
    """Append tie-breaking keys to a SELECT's ORDER BY."""
    if not any(_orders(select)):
        select["modifiers"].insert(0, {"type": "ORDER_MODIFIER", "orders": []})
    [order, *_] = _orders(select)
    if any(one["expression"].get("class") == "STAR" for one in order["orders"]):  # ORDER BY ALL
        return
    first = select
    while "select_list" not in first and (first.get("children") or first.get("left")):
        first = _children(first)[0]  # a UNION has the columns of its first SELECT
    items = first.get("select_list") or []
    if first is not select and order["orders"] and any(map(_is_star, items)):
        raise UserError("the query: a UNION with ORDER BY needs the names of its columns; write them instead of *")
    if items and not any(map(_is_star, items)):
        keys = [number(i + 1) for i in range(len(items))]
    elif first is not select:
        keys = [every_column()]  # for a UNION, the columns of the result
    else:  # here COLUMNS(*) means the columns of the FROM clause
        keys = [every_column(), *(copy.deepcopy(item) | {"alias": ""} for item in items if not _is_star(item))]
    order["orders"] += [ordering(key) for key in keys]


def _is_star(item: Node) -> bool:
    """Return whether an item of a select list may become several columns."""
    return any(node.get("class") == "STAR" for node in walk(item))


def _named_tables(tree: Node) -> dict[str, Node]:
    """Return the SELECTs of WITH clauses by name."""
    found = {}
    for node in walk(tree):
        for one in (node.get("cte_map") or {}).get("map", ()):
            found[one["key"]] = one["value"]["query_node"]
    return found


def _keeps_order(node: Any, tables: dict[str, Node], aggregates: Set[str]) -> bool:
    """Return whether DuckDB guarantees that a SELECT's rows are in the order of its files for any number of threads."""
    kind = node.get("type")
    if kind == "SET_OPERATION_NODE":
        return (
            node["setop_type"] == "UNION"
            and bool(node["setop_all"])
            and all(_keeps_order(one, tables, aggregates) for one in _children(node))
        )
    if kind == "SELECT_NODE":
        for one in own(node):
            name = one.get("function_name", "").lower()
            if one.get("class") in ("WINDOW", "SUBQUERY") or name in aggregates or name in WINDOWS:
                return False
        return (
            not node["group_expressions"]
            and node["aggregate_handling"] != "FORCE_AGGREGATES"
            and not any(one["type"] == "DISTINCT_MODIFIER" for one in node["modifiers"])
            and _keeps_order(node["from_table"] or {"type": "EMPTY"}, tables, aggregates)
        )
    if kind == "SUBQUERY":
        return _keeps_order(node["subquery"]["node"], tables, aggregates)
    if kind == "BASE_TABLE":
        named = tables.get(node["table_name"])
        return named is None or _keeps_order(named, {k: v for k, v in tables.items() if v is not named}, aggregates)
    return kind in ("TABLE_FUNCTION", "EMPTY")


def _children(node: Node) -> list[Node]:
    return node["children"] if "children" in node else [node["left"], node["right"]]
