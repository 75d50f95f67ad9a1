"""Makes a query's result independent of threads: the rows, their order, and their values.

DuckDB guarantees the order of rows only if a query is a chain of scans, filters and expressions. Otherwise, rows that
tie in an ORDER BY come in the order in which threads finish. So this module adds tie-breaking keys wherever rows are
ordered: in the result, and for a LIMIT, a window or an aggregate.
"""

import copy
from collections.abc import Iterator
from typing import Any, NamedTuple

from hostdev.core.errors import UserError
from hostdev.data.preprocess.query.allowed import AGGREGATES, APPROXIMATE, PICKING, SUMMING, WINDOWS
from hostdev.data.preprocess.query.statement import (
    Node,
    Statement,
    call,
    every_column,
    number,
    ordering,
    own,
    reference,
    selects,
    star_of,
    table_name,
    unpacked,
    walk,
)

_NUMBERING = frozenset(
    ("row_number", "ntile", "lag", "lead", "first_value", "last_value", "nth_value", "first", "last", "fill")
)
# The functions of _NUMBERING whose value depends on the frame.
_OF_FRAMES = frozenset(("first_value", "last_value", "nth_value", "first", "last"))


class Settled(NamedTuple):
    """A query whose result does not depend on threads, as far as its text shows.

    Attributes:
        tree: The parse tree.
        order: Description of the order of the rows.
        keeps_order: Whether the rows are in the order of the files, without any sort.
        doubts: Descriptions of expressions whose value could depend on threads.
        ties: The doubts about rows that tie in a sort; their order could also depend on memory.
    """

    tree: Node
    order: str
    keeps_order: bool
    doubts: list[str]
    ties: list[str]


def settle(statement: Statement, *, windows: bool = True) -> Settled:
    """Add tie-breaking keys wherever a query orders rows, so that its result does not depend on threads.

    Args:
        statement: The query.
        windows: Whether to add keys to windows, too; DuckDB rejects some of the resulting queries.
    """
    tree = copy.deepcopy(statement.tree)
    doubts: list[str] = []
    ties: list[str] = []
    for select in list(selects(tree)):
        _settle_functions(statement, select, doubts, ties, windows=windows)
    ties += [
        f"{statement.place(node)} takes any of the rows that are equally near"
        for node in walk(tree)
        if node.get("type") == "JOIN" and node["ref_type"] == "ASOF"
    ]
    tables = _named_tables(tree)
    outer = tree["statements"][0]["node"]
    keeps = _keeps_order(outer, tables)
    sorted_inside = any(any(_orders(select)) for select in selects(tree))
    is_sorted = any(_orders(outer)) or (keeps and sorted_inside)
    for select in list(selects(tree)):
        limited = any(one["type"] in ("LIMIT_MODIFIER", "LIMIT_PERCENT_MODIFIER") for one in select["modifiers"])
        picked = any(one["type"] == "DISTINCT_MODIFIER" and one["distinct_on_targets"] for one in select["modifiers"])
        is_last = select is outer
        needs_order = (limited or picked or is_last) and not _keeps_order(select, tables)
        if needs_order or any(_orders(select)):
            _order_all(select)
    unsorted = "of their files" if keeps else "of all columns, from left to right"
    order = "of its ORDER BY, then of all columns" if is_sorted else unsorted
    return Settled(tree, order, keeps and not is_sorted, doubts + ties, ties)


def _settle_functions(statement: Statement, select: Node, doubts: list[str], ties: list[str], *, windows: bool) -> None:
    """Add tie-breaking keys to ORDER BY in a SELECT's aggregates and windows; add to `doubts` and `ties`."""
    listed = {id(node) for item in select.get("select_list", ()) for node in walk(item)}
    for node in list(own(select)):
        name = node.get("function_name", "").lower()
        if node.get("class") not in ("WINDOW", "FUNCTION"):
            continue
        is_window = node["class"] == "WINDOW"
        orders = node.setdefault("arg_orders", []) if is_window else node["order_bys"]["orders"]
        if name == "mode" or (orders and (is_window or name in PICKING | SUMMING | APPROXIMATE)):
            given = [one["expression"] for one in node["arguments"] if one["expression"].get("class") != "CONSTANT"]
            orders += [ordering(copy.deepcopy(one)) for one in given]
        elif name in PICKING and not (is_window and name in _NUMBERING):
            doubts.append(f"{statement.place(node)} has no ORDER BY inside")
        elif name in APPROXIMATE:
            doubts.append(f"{statement.place(node)} is approximate")
        keys = list(_keys_of(select, id(node) in listed)) if windows and is_window else []
        if is_window and not _settle_window(node, keys):
            ties.append(f"{statement.place(node)} numbers rows that may tie in its ORDER BY")


def _settle_window(node: Node, keys: list[Node]) -> bool:
    """Add keys to a window's ORDER BY, without a change of its frames; return whether its value is now defined."""
    name, bounds = node["function_name"].lower(), (str(node["start"]), str(node["end"]))
    by_rows = any(bound.endswith("ROWS") for bound in bounds)
    if not by_rows and (name not in _NUMBERING or (node["arg_orders"] and name in _OF_FRAMES)):
        return True  # tied rows get the same value
    excludes_ties = node["exclude_clause"] in ("TIES", "GROUP")
    is_whole = bounds == ("UNBOUNDED_PRECEDING", "UNBOUNDED_FOLLOWING")
    if not keys or (by_rows and excludes_ties):
        return False
    orders = node["orders"]
    if name in _OF_FRAMES and not by_rows and (excludes_ties or not is_whole):  # with more keys, fewer rows would tie
        orders = node["arg_orders"] = copy.deepcopy(orders)
    elif node["arg_orders"] and name in _NUMBERING - _OF_FRAMES:  # these replace the window's ORDER BY
        orders = node["arg_orders"]
    orders += [ordering(key) for key in keys]
    return True


def _keys_of(select: Node, listed: bool) -> Iterator[Node]:
    """Yield expressions that together identify each row of a SELECT, before its window functions are evaluated.

    Args:
        select: The SELECT.
        listed: Whether the expressions are for the list of columns, where `COLUMNS(*)` is allowed.
    """
    if select.get("group_expressions"):
        if len(select["group_sets"]) == 1:  # ROLLUP has several rows of a group
            yield from _groups(select)
        return
    if select.get("aggregate_handling") == "FORCE_AGGREGATES":  # GROUP BY ALL
        groups = [item for item in select["select_list"] if not _aggregates(item)]
        if not any(map(_is_star, select["select_list"])):
            yield from (copy.deepcopy(item) | {"alias": ""} for item in groups)
        return
    if listed:
        yield call("row", unpacked(every_column()))
        return
    names = [name.lower() for name in _names_in(select.get("from_table") or {})]
    if len(set(names)) == len(names):  # a table's name stands for a struct of its columns, unless a column has it
        yield from (call("struct_values", reference(name)) for name in names)


def _aggregates(item: Node) -> bool:
    """Return whether an item of a select list has aggregates or windows."""
    nodes = [item, *own(item)]
    return any(one.get("class") == "WINDOW" or one.get("function_name", "").lower() in AGGREGATES for one in nodes)


def _groups(select: Node) -> list[Node]:
    """Return the expressions of a GROUP BY, or an empty list if a number in it stands for an unknown column."""
    found, items = [], select["select_list"]
    for group in select["group_expressions"]:
        text = group["literal"]["text"] if group.get("class") == "CONSTANT" else ""
        place = int(text) if text.isdigit() else 0
        if place and (place > len(items) or any(map(_is_star, items))):
            return []
        found.append(copy.deepcopy(items[place - 1] if place else group) | {"alias": ""})
    return found


def _names_in(table: Node) -> Iterator[str]:
    """Yield the names of the tables that a FROM clause joins; give each unnamed subquery a name."""
    kind = table.get("type")
    if kind == "JOIN":
        yield from _names_in(table["left"])
        if table["join_type"] not in ("SEMI", "ANTI"):
            yield from _names_in(table["right"])
    elif table.get("alias"):
        yield table["alias"]
    elif kind == "BASE_TABLE":
        yield implicit_name(table_name(table))
    elif kind == "TABLE_FUNCTION":
        yield table["function"]["function_name"]
    elif kind == "SUBQUERY":
        table["alias"] = f"hostdev_{table['query_location']}"
        yield table["alias"]
    elif kind not in ("EMPTY", None):
        yield "unnamed"  # no table has this name, so DuckDB rejects the query with keys in its windows


def implicit_name(table: str) -> str:
    """Return the table name that SQL uses for a file: the file's name without its folder, up to the first dot."""
    name = table.replace("\\", "/").rpartition("/")[2]
    return name.partition(".")[0] if "." in name else name


def _orders(select: Node) -> Iterator[Node]:
    return (one for one in select["modifiers"] if one["type"] == "ORDER_MODIFIER")


def _order_all(select: Node) -> None:
    """Append tie-breaking keys to a SELECT's ORDER BY."""
    # A UNION BY NAME may have more columns than its first SELECT.
    if any(one.get("setop_type") == "UNION_BY_NAME" for one in _unions(select)):
        union = dict(select)
        modifiers, union["modifiers"] = union["modifiers"], []
        select.clear()
        select.update(star_of(union), modifiers=modifiers)
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


def _unions(select: Node) -> Iterator[Node]:
    """Yield a set operation and all set operations that it consists of; nothing for another SELECT."""
    if select.get("type") == "SET_OPERATION_NODE":
        yield select
        for one in _children(select):
            yield from _unions(one)


def _is_star(item: Any) -> bool:
    """Return whether an item of a select list may become several columns, unlike `f(*COLUMNS(*))`."""
    if isinstance(item, list):
        return any(map(_is_star, item))
    if not isinstance(item, dict) or item.get("type") == "OPERATOR_UNPACK":
        return False
    return item.get("class") == "STAR" or any(map(_is_star, item.values()))


def _named_tables(tree: Node) -> dict[str, list[Node]]:
    """Return the SELECTs of WITH clauses by name in lower case; the same name may occur in several clauses."""
    found: dict[str, list[Node]] = {}
    for node in walk(tree):
        for one in (node.get("cte_map") or {}).get("map", ()):
            found.setdefault(one["key"].lower(), []).append(one["value"]["query_node"])
    return found


def _keeps_order(node: Any, tables: dict[str, list[Node]]) -> bool:
    """Return whether DuckDB guarantees that a SELECT's rows are in the order of its files for any number of threads."""
    kind = node.get("type")
    if kind == "SET_OPERATION_NODE":
        return (
            node["setop_type"] == "UNION"
            and bool(node["setop_all"])
            and all(_keeps_order(one, tables) for one in _children(node))
        )
    if kind == "SELECT_NODE":
        for one in own(node):
            name = one.get("function_name", "").lower()
            if one.get("class") in ("WINDOW", "SUBQUERY") or name in AGGREGATES or name in WINDOWS:
                return False
        return (
            not node["group_expressions"]
            and node["aggregate_handling"] != "FORCE_AGGREGATES"
            and not any(one["type"] == "DISTINCT_MODIFIER" for one in node["modifiers"])
            and _keeps_order(node["from_table"] or {"type": "EMPTY"}, tables)
        )
    if kind == "SUBQUERY":
        return _keeps_order(node["subquery"]["node"], tables)
    if kind == "BASE_TABLE":
        name = table_name(node).lower()
        others = {key: value for key, value in tables.items() if key != name}
        return all(_keeps_order(named, others) for named in tables.get(name, ()))
    return kind in ("TABLE_FUNCTION", "EMPTY")


def _children(node: Node) -> list[Node]:
    return node["children"] if "children" in node else [node["left"], node["right"]]
