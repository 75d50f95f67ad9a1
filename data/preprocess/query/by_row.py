"""Tests whether a statement is row by row: whether each row of the result depends on one row of one table.

A row-by-row statement computes the columns of raw rows in the same way as it computed the columns of the data set.
"""

from collections.abc import Iterator, Mapping, Set

from hostdev.data.preprocess.query.allowed import WINDOWS
from hostdev.data.preprocess.query.statement import Node, own, walk

_SEVERAL = frozenset(("unnest", "generate_subscripts"))  # functions that return several rows


class NotByRowError(Exception):
    """A statement is not row by row; the message says what it does."""


def strip(tree: Node, aggregates: Set[str]) -> tuple[Node, dict[str, str]]:
    """Remove from a statement's tree all that selects or orders rows: the result has one row for each row of the table.

    Expressions of the outermost SELECT that depend on other rows are removed, too.

    Returns:
        The FROM element that is the table; and, for each removed expression, its column and what it depends on.

    Raises:
        NotByRowError: The statement is not row by row.
    """
    select = tree["statements"][0]["node"]
    removed = {}
    if select.get("type") == "SELECT_NODE":
        items = select["select_list"]
        reasons = [_other_rows(item, aggregates) for item in items]
        removed = {
            str(item["alias"]): reason
            for item, reason in zip(items, reasons, strict=True)
            if reason is not None and item["alias"]
        }
        kept = [item for item in items if item["alias"] not in removed]
        if kept:
            select["select_list"] = kept
    return _strip(select, {}, aggregates), removed


def _require_all_rows(select: Node) -> None:
    if select.get("type") != "SELECT_NODE":
        raise NotByRowError("combines several SELECTs")
    for modifier in select["modifiers"]:
        if modifier["type"] != "ORDER_MODIFIER":
            raise NotByRowError("has DISTINCT" if "DISTINCT" in modifier["type"] else "has LIMIT")


def _strip(select: Node, named: Mapping[str, Node], aggregates: Set[str]) -> Node:
    """Remove WHERE and ORDER BY from a SELECT and the SELECTs below it; return the FROM element that is their table."""
    _require_all_rows(select)
    if select["qualify"] is not None:
        raise NotByRowError("has QUALIFY")
    is_grouped = select["group_expressions"] or select["having"] is not None
    if is_grouped or select["aggregate_handling"] == "FORCE_AGGREGATES":
        raise NotByRowError("groups rows")
    select["modifiers"], select["where_clause"] = [], None
    for item in select["select_list"]:
        if (reason := _other_rows(item, aggregates)) is not None:
            raise NotByRowError(f"has {reason}")
    named = {
        **named,
        **{one["key"]: one["value"]["query_node"] for one in (select.get("cte_map") or {}).get("map", ())},
    }
    table = select["from_table"] or {}
    if table.get("sample") is not None or select["sample"] is not None:
        raise NotByRowError("takes a sample")
    kind = table.get("type")
    if kind == "SUBQUERY":
        return _strip(table["subquery"]["node"], named, aggregates)
    if kind == "BASE_TABLE" and table["table_name"] in named:
        within = {name: node for name, node in named.items() if name != table["table_name"]}
        return _strip(named[table["table_name"]], within, aggregates)
    if kind == "BASE_TABLE" or (kind == "TABLE_FUNCTION" and table["with_ordinality"] == "WITHOUT_ORDINALITY"):
        return table
    raise NotByRowError({"JOIN": "joins tables", "EMPTY": "reads no table"}.get(str(kind), "reads no plain table"))


def _other_rows(item: Node, aggregates: Set[str]) -> str | None:
    """Return what makes an expression depend on other rows, or None."""
    for node in walk(item):
        name = str(node.get("function_name", "")).lower()
        if node.get("class") == "WINDOW" or name in WINDOWS:
            return "a window over other rows"
        if node.get("class") == "SUBQUERY":
            return "a subquery"
        if name in aggregates:
            return "an aggregate of many rows"
        if name in _SEVERAL:
            return "several rows for one"
    return None


def tables_in(select: Node, name: str) -> Iterator[Node]:
    """Yield the elements named `name` among the tables that the outermost SELECT reads or joins."""
    waiting = [select.get("from_table") or {}]
    while waiting:
        table = waiting.pop()
        if table.get("type") == "JOIN":
            waiting += [table["left"], table["right"]]
        elif table.get("type") == "BASE_TABLE" and table["table_name"] == name:
            yield table


def require_joined(select: Node, aggregates: Set[str]) -> None:
    """Remove ORDER BY from a SELECT with joins; raise NotByRowError for LIMIT, DISTINCT, aggregates and windows."""
    _require_all_rows(select)
    for node in own(select):
        name = str(node.get("function_name", "")).lower()
        if node.get("class") == "WINDOW" or name in WINDOWS:
            raise NotByRowError("has a window over other rows")
        if name in aggregates:
            raise NotByRowError("groups rows")
    select["modifiers"] = []


def source_of(
    select: Node, name: str, columns: Set[str], named: Mapping[str, Node] | None = None, *, cast: bool = False
) -> str | None:
    """Return the table's column that a stripped SELECT returns unchanged as its column `name`, or None.

    If `cast` is true, a column whose type is cast counts as unchanged.
    """
    named = {
        **(named or {}),
        **{one["key"]: one["value"]["query_node"] for one in (select.get("cte_map") or {}).get("map", ())},
    }
    for item in select["select_list"]:
        while cast and item.get("class") == "CAST":
            item = {**item["child"], "alias": item["alias"] or item["child"]["alias"]}
        if item.get("class") == "STAR":
            if item["columns"] or item["expr"] is not None or item["rename_list"] or item["qualified_exclude_list"]:
                return None
            if any(name == one["key"] for one in item["replace_list"]):
                return None
            if name in map(str, item["exclude_list"]):
                continue
            found = _below(select, name, columns, named, cast=cast)
        elif item.get("class") == "COLUMN_REF" and len(item["column_names"]) == 1:
            inner = item["column_names"][0]
            if (item["alias"] or inner) != name:
                continue
            return _below(select, inner, columns, named, cast=cast)
        elif item["alias"] == name or not item["alias"]:
            return None
        else:
            continue
        if found is not None:
            return found
    return None


def _below(select: Node, name: str, columns: Set[str], named: Mapping[str, Node], *, cast: bool) -> str | None:
    table = select["from_table"]
    if table.get("column_name_alias"):
        return None
    if table["type"] == "SUBQUERY":
        return source_of(table["subquery"]["node"], name, columns, named, cast=cast)
    if table["type"] == "BASE_TABLE" and table["table_name"] in named:
        return source_of(named[table["table_name"]], name, columns, named, cast=cast)
    return name if name in columns else None
