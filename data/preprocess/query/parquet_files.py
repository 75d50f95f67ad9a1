"""Several Parquet files with different types as one table, in which no value becomes another."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from hostdev.data.preprocess.query.engine import Engine
from hostdev.data.preprocess.query.from_clause import (
    described,
    given_options,
    list_files,
    select_all,
    with_files,
    with_options,
)
from hostdev.data.preprocess.query.spelling import identifier, quoted
from hostdev.data.preprocess.query.statement import Node

_EXACT = {"DOUBLE": 53, "FLOAT": 24}  # powers of 2 below which all integers are of a type
_INTEGERS = frozenset(
    ("TINYINT", "SMALLINT", "INTEGER", "BIGINT", "HUGEINT", "UTINYINT", "USMALLINT", "UINTEGER", "UBIGINT", "UHUGEINT")
)
_TIMESTAMPS = frozenset(("TIMESTAMP_S", "TIMESTAMP_MS", "TIMESTAMP", "TIMESTAMP_NS"))
_NULLS = ('"NULL"', '"NULL"[]')  # the types of columns without values
_NUMBER = "[+-]?([0-9]+[.]?[0-9]*|[.][0-9]+)([eE][+-]?[0-9]+)?"


class Mixed(NamedTuple):
    """A column whose types in several files do not fit each other.

    Attributes:
        location: The location of its reader in the query.
        name: The column.
        reason: Why a query that uses it is wrong.
    """

    location: int
    name: str
    reason: str


class _Group(NamedTuple):
    """Files of the same columns, and the types of these."""

    files: list[str]
    types: Mapping[str, str]


def complete_parquet(node: Node, engine: Engine) -> list[Mixed]:
    """Make a reader of several files give all columns types that hold their values; return columns without one."""
    files = list(dict.fromkeys(list_files(node, engine)))
    if len(files) < 2:
        return []
    listed = "[" + ", ".join(map(quoted, files)) + "]"
    schemas = engine.rows(
        "SELECT list(file_name) FROM (SELECT file_name, list((name, duckdb_type, num_children) ORDER BY column_id) "
        f"AS found FROM parquet_schema({listed}) GROUP BY file_name) GROUP BY found"
    )
    places = {file: place for place, file in enumerate(files)}
    sorted_files = sorted(
        (sorted(group, key=places.__getitem__) for (group,) in schemas), key=lambda one: places[one[0]]
    )
    groups = [_Group(one, described(engine, with_files(engine, node, one[:1]))) for one in sorted_files]
    first, *others = groups
    common = {name for name in first.types if all(name in group.types for group in groups)}
    different = [name for name in first.types if name in common and len({group.types[name] for group in groups}) > 1]
    if "union_by_name" not in given_options(node):
        if not different:
            return []  # DuckDB reads the columns of the first file, and names a file that lacks one
        other = next((group for group in others if set(group.types) != set(first.types)), None)
        if other is not None:
            only = ", ".join(sorted(set(first.types) ^ set(other.types)))
            reason = (
                f"it has different types in several files, and only one of {first.files[0]} and {other.files[0]} has "
                f"{only}; give union_by_name = true to read_parquet if missing columns should be null, or read the "
                "files alone, with UNION ALL BY NAME between them"
            )
            return [Mixed(node["query_location"], name, reason) for name in different]
    node.update(with_options(engine, node, union_by_name="true"))
    types = described(engine, node)
    mixed = []
    for name, kind in types.items():
        having = [group for group in groups if group.types.get(name, _NULLS[0]) not in _NULLS]
        change = _find_change(engine, node, name, kind, having)
        if change is not None:
            mixed.append(Mixed(node["query_location"], name, change))
    return mixed


def _find_change(engine: Engine, node: Node, name: str, kind: str, groups: Sequence[_Group]) -> str | None:
    """Return how values of a column change if it gets the type `kind`, or None if they do not."""
    kinds = {group.types[name] for group in groups}
    others, value = kinds - _INTEGERS, identifier(name)
    if len(kinds) < 2 or (not others and kind in _INTEGERS) or kinds <= _TIMESTAMPS:
        return None
    if all(one.startswith("DECIMAL") for one in (*others, kind)) and not kind.startswith("DECIMAL(38"):
        return None
    wrong: tuple[str, str | None] | None = ("", None)
    if others == {"VARCHAR"} and kind == "VARCHAR":  # integers are written in one way
        test = f"regexp_full_match(trim({value}), {quoted(_NUMBER)})"
        test += f" AND trim({value}) IS DISTINCT FROM CAST(TRY_CAST({value} AS HUGEINT) AS VARCHAR)"
        wrong = _find(engine, node, value, test, [group for group in groups if group.types[name] == "VARCHAR"])
    elif others <= set(_EXACT) and kind in _EXACT and not (kind == "FLOAT" and "DOUBLE" in kinds):
        limit = 2 ** _EXACT[kind]
        test = f"{value} NOT BETWEEN -{limit} AND {limit}"
        wrong = _find(engine, node, value, test, [group for group in groups if group.types[name] in _INTEGERS])
    if wrong is None:
        return None
    file, text = wrong
    what = f", which changes {text!r} in {file}" if text is not None else ""
    one = groups[0]
    other = next(group for group in groups if group.types[name] != one.types[name])
    return (
        f"it is of type {one.types[name]} in {one.files[0]} and {other.types[name]} in {other.files[0]}, so that equal "
        f"values would differ, or become others, as {kind}{what}; read the files alone, with UNION ALL BY NAME between "
        f"them, and cast it, such as SELECT * REPLACE ({value}::VARCHAR AS {value}) FROM {quoted(other.files[0])}"
    )


def _find(engine: Engine, node: Node, value: str, test: str, groups: Sequence[_Group]) -> tuple[str, str | None] | None:
    """Return the file and the text of a value that passes a test, or None if no value does."""
    for group in groups:
        rows = select_all(engine, with_files(engine, node, group.files), ', filename AS "hostdev file"')
        found = engine.rows(f'SELECT "hostdev file", CAST({value} AS VARCHAR) FROM ({rows}) WHERE {test} LIMIT 1')
        if found:
            [(file, text)] = found
            return file, text
    return None
