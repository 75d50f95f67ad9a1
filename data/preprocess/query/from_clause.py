"""The elements of a query's FROM clauses that read files, and changes of their arguments."""

import copy
from collections.abc import Iterator, Sequence
from typing import Any

from hostdev.data.preprocess.query.allowed import READERS
from hostdev.data.preprocess.query.engine import Engine
from hostdev.data.preprocess.query.settle import implicit_name
from hostdev.data.preprocess.query.spelling import identifier, quoted
from hostdev.data.preprocess.query.statement import Node, parse, table_name, to_sql, walk

FORMATS = {
    **dict.fromkeys(("read_csv", "read_csv_auto"), "CSV"),
    **dict.fromkeys(("read_json", "read_json_auto", "read_ndjson", "read_ndjson_auto"), "JSON"),
    **dict.fromkeys(("read_parquet", "parquet_scan"), "Parquet"),
}
"""The format of the files that a function reads as a table."""


def readers(tree: Node) -> Iterator[Node]:
    """Yield the elements of FROM clauses that are files, functions that read files, or tables of this process."""
    named = {one["key"].lower() for node in walk(tree) for one in (node.get("cte_map") or {}).get("map", ())}
    for node in walk(tree):
        is_table = node.get("type") == "BASE_TABLE" and table_name(node).lower() not in named
        is_function = node.get("type") == "TABLE_FUNCTION"
        if is_table or (is_function and node["function"]["function_name"].lower() in READERS):
            yield node


def is_given(node: Node, engine: Engine) -> bool:
    """Return whether an element of a FROM clause is one of `Engine.tables`, the tables of this process."""
    return node["qualified_name"]["path"][-1].lower() in {name.lower() for name in engine.tables}


def select_all(engine: Engine, node: Node, more: str = "") -> str:
    """Return SQL that selects all columns of an element of a FROM clause, then `more`, which begins with a comma."""
    tree = copy.deepcopy(parse(engine.connection, f"SELECT *{more} FROM x").tree)
    alone = copy.deepcopy(node)
    alone.update(alias="", column_name_alias=[], sample=None)
    tree["statements"][0]["node"]["from_table"] = alone
    return to_sql(engine.connection, tree)


def given_options(node: Node) -> dict[str, Node]:
    """Return the named arguments of a function."""
    found = {}
    for one in node["function"]["arguments"]:
        expression = one["expression"]
        if one["name"]:
            found[one["name"].lower()] = expression
        elif expression.get("type") == "COMPARE_EQUAL" and expression["left"].get("class") == "COLUMN_REF":
            found[expression["left"]["column_names"][-1].lower()] = expression["right"]
    return found


def _name(argument: Node) -> str | None:
    """Return the name of an argument, or None if it has none."""
    alone: Node = {"function": {"arguments": [argument]}}
    return next(iter(given_options(alone)), None)


def with_options(engine: Engine, node: Node, without: Sequence[str] = (), **options: str) -> Node:
    """Return a copy of a function's node without the named arguments `without`, and with `options`, given as SQL."""
    found = copy.deepcopy(node)
    arguments = found["function"]["arguments"]
    arguments[:] = [one for one in arguments if _name(one) not in {*without, *options}]
    if options:
        shown = ", ".join(f"{name} = {value}" for name, value in options.items())
        parsed = parse(engine.connection, f"SELECT * FROM f({shown})").select["from_table"]
        arguments += parsed["function"]["arguments"]
    return found


def list_files(node: Node, engine: Engine) -> list[str]:
    """Return the files that a function reads, in its order; empty if its first argument has no constant text."""
    arguments = node["function"]["arguments"]
    if not arguments:
        return []
    texts = list_texts(arguments[0])
    return [file for text in texts for (file,) in engine.rows("SELECT file FROM glob(?) ORDER BY file", text)]


def list_texts(argument: Node) -> list[str]:
    """Return the constant texts in an argument, in their order."""
    constants = [one for one in walk(argument) if one.get("class") == "CONSTANT"]
    texts = [one for one in constants if one["literal"]["kind"] == "STRING"]
    return [text for _, text in sorted((one["query_location"], one["literal"]["text"]) for one in texts)]


def shown_files(node: Node) -> str:
    """Format, for a message, the names of the files that a function reads: one name in quotes, otherwise [...]."""
    texts = [one["literal"]["text"] for one in walk(node["function"]["arguments"][0]) if one.get("class") == "CONSTANT"]
    return quoted(texts[0]) if len(texts) == 1 else "[...]"


def replace_table(node: Node, name: str, connection: Any) -> None:
    """Replace an element of a FROM clause with the table `name`, under the name that the query has for it."""
    is_table = node["type"] == "BASE_TABLE"
    own = implicit_name(table_name(node)) if is_table else node["function"]["function_name"]
    kept = {"alias": node["alias"] or own, "column_name_alias": node.get("column_name_alias", [])}
    node.clear()
    node.update(parse(connection, f"SELECT * FROM {identifier(name)}").select["from_table"])
    node.update(kept)


def described(engine: Engine, node: Node) -> dict[str, str]:
    """Return the types of a reader's columns by name."""
    return {name: kind for name, kind, *_ in engine.rows(f"DESCRIBE {select_all(engine, node)}")}


def with_files(engine: Engine, node: Node, files: Sequence[str]) -> Node:
    """Return a copy of a function's node that reads `files` instead."""
    shown = quoted(files[0]) if len(files) == 1 else f"[{', '.join(map(quoted, files))}]"
    found = copy.deepcopy(node)
    found["function"]["arguments"][0] = parse(engine.connection, f"SELECT * FROM f({shown})").select["from_table"][
        "function"
    ]["arguments"][0]
    return found
