"""A query as DuckDB's JSON parse tree: parsing, searching, and conversion back to SQL."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hostdev.core.errors import UserError
from hostdev.core.printable import printable

Node = dict[str, Any]

SELECTS = ("SELECT_NODE", "SET_OPERATION_NODE", "RECURSIVE_CTE_NODE", "CTE_NODE")
_SHOWN = 60  # characters of a query in an error


@dataclass(frozen=True)
class Statement:
    """One SELECT statement.

    Attributes:
        sql: The text, for messages.
        tree: The parse tree from `json_serialize_sql`.
    """

    sql: str
    tree: Node

    @property
    def select(self) -> Node:
        """The outermost SELECT."""
        node: Node = self.tree["statements"][0]["node"]
        return node

    def place(self, node: Node) -> str:
        """Describe a node's place for messages: its line and its text."""
        start, length = node.get("query_location", -1), node.get("query_location_length", 0)
        if not 0 <= start < len(self.sql.encode()):
            return "the query"
        shown = self.sql.encode()[start : start + (length or _SHOWN)].decode(errors="replace")
        line = self.sql.encode()[:start].count(b"\n") + 1
        return f"line {line}, {printable(' '.join(shown.split()), _SHOWN)!r}"

    def where(self, node: Node) -> str:
        """Return the beginning of an error about a node."""
        place = self.place(node)
        return place if place == "the query" else f"the query, {place}"


def parse(connection: Any, sql: str) -> Statement:
    """Parse one SELECT statement; raise UserError for anything else."""
    tree = json.loads(_call(connection, "json_serialize_sql", sql))
    if tree.get("error"):
        message = printable(str(tree.get("error_message", "it is not a query")), 300)
        if "SELECT" in message and "serialize" in message:
            message = "only SELECT can be read; settings, PIVOT without IN (...) and other statements cannot"
        raise UserError(f"the query cannot be parsed: {message}{_where(sql, tree)}")
    if len(tree["statements"]) != 1:
        how = f"has {len(tree['statements'])} statements" if tree["statements"] else "is empty"
        raise UserError(f"the query {how}; give one SELECT")
    return Statement(sql, tree)


def to_sql(connection: Any, tree: Node) -> str:
    """Return the SQL of a parse tree."""
    return str(_call(connection, "json_deserialize_sql", json.dumps(tree)))


def walk(node: Any) -> Iterator[Node]:
    """Iterate over a node and all nodes below it, including subqueries."""
    waiting = [node]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict):
            yield one
            waiting.extend(one.values())
        elif isinstance(one, list):
            waiting.extend(one)


def own(node: Any) -> Iterator[Node]:
    """Iterate over the nodes below a SELECT, without those of nested SELECTs."""
    waiting = list(node.values())
    while waiting:
        one = waiting.pop()
        if isinstance(one, list):
            waiting.extend(one)
        elif isinstance(one, dict) and one.get("type") not in SELECTS:
            yield one
            waiting.extend(one.values())


def selects(node: Any) -> Iterator[Node]:
    """Iterate over all SELECTs of a tree."""
    return (one for one in walk(node) if one.get("type") in SELECTS)


def table_name(node: Node) -> str:
    """Return the name of a table or file in FROM; the parser takes an unquoted log.csv for table csv in schema log."""
    return ".".join(node["qualified_name"]["path"])


def reference(*names: str) -> Node:
    """Return the node for a column, or for a table as a struct of its columns."""
    return _node("COLUMN_REF", "COLUMN_REF", column_names=list(names))


def every_column() -> Node:
    """Return the node `COLUMNS(*)`."""
    lists = ("exclude_list", "replace_list", "qualified_exclude_list", "rename_list")
    empty: Node = {name: [] for name in lists}
    return _node("STAR", "STAR", relation_name="", columns=True, expr=None, **empty)


def number(n: int) -> Node:
    """Return the node for a number, which in ORDER BY refers to a column of the result."""
    return _node("CONSTANT", "VALUE_CONSTANT", literal={"kind": "INTEGER", "text": str(n)})


def call(function: str, *arguments: Node) -> Node:
    """Return the node for a call of a function."""
    return _node(
        "FUNCTION",
        "FUNCTION",
        function_name=function,
        order_bys={"type": "ORDER_MODIFIER", "orders": []},
        arguments=[{"name": "", "expression": one} for one in arguments],
        qualified_name={"path": [function]},
    )


def unpacked(columns: Node) -> Node:
    """Return the node that passes several columns as the arguments of a function, such as `*COLUMNS(*)`."""
    return _node("OPERATOR", "OPERATOR_UNPACK", children=[columns])


def star_of(query: Node) -> Node:
    """Return the node `SELECT * FROM (query)`."""
    star = every_column() | {"columns": False}
    table = {"type": "SUBQUERY", "alias": "", "sample": None, "subquery": {"node": query, "named_param_map": []}}
    return {
        **{"type": "SELECT_NODE", "modifiers": [], "cte_map": {"map": []}, "select_list": [star]},
        **{"from_table": {**table, "column_name_alias": []}, "where_clause": None, "group_expressions": []},
        **{"group_sets": [], "aggregate_handling": "STANDARD_HANDLING", "having": None, "sample": None},
        "qualify": None,
    }


def _node(kind: str, name: str, **more: Any) -> Node:
    """Return the node for an expression that does not occur in the query's text."""
    return {"class": kind, "type": name, "alias": "", "query_location": 2**64 - 1, "query_location_length": 0, **more}


def ordering(expression: Node) -> Node:
    """Return an element of ORDER BY."""
    return {"type": "ORDER_DEFAULT", "null_order": "ORDER_DEFAULT", "expression": expression}


def _call(connection: Any, function: str, argument: str) -> str:
    found: str = connection.execute(f"SELECT {function}(?)", [argument]).fetchall()[0][0]
    return found


def _where(sql: str, tree: Node) -> str:
    """Return the line of an error, or an empty string if the parser does not report it."""
    try:
        position = int(tree["position"])
    except (KeyError, ValueError):
        return ""
    return f" (line {sql.encode()[:position].count(chr(10).encode()) + 1})"
