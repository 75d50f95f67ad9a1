"""Readers of a query's files, completed so that all values of a column, not the first ones, decide its type.

Where DuckDB would guess, CSV is read as by `preprocess table`: `#` begins no comment, and quotes are double quotes.
Types of text come from `spelling`; several Parquet files with different types become one table, in which no value
changes.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from pyarrow import dataset

from hostdev.core.errors import UserError
from hostdev.data.preprocess.inputs import is_empty
from hostdev.data.preprocess.query.engine import Engine, in_one_line
from hostdev.data.preprocess.query.from_clause import (
    FORMATS,
    described,
    given_options,
    is_given,
    list_files,
    readers,
    select_all,
    shown_files,
    with_files,
    with_options,
)
from hostdev.data.preprocess.query.settle import implicit_name
from hostdev.data.preprocess.query.spelling import SpelledColumn, choose, identifier, quoted, usual
from hostdev.data.preprocess.query.statement import Node, parse, table_name, walk

_EXACT = {"DOUBLE": 53, "FLOAT": 24}  # exponents n: the type holds all integers up to 2^n
_INTEGERS = frozenset(
    ("TINYINT", "SMALLINT", "INTEGER", "BIGINT", "HUGEINT", "UTINYINT", "USMALLINT", "UINTEGER", "UBIGINT", "UHUGEINT")
)
_TIMESTAMPS = frozenset(("TIMESTAMP_S", "TIMESTAMP_MS", "TIMESTAMP", "TIMESTAMP_NS"))
_NULLS = ('"NULL"', '"NULL"[]')  # the types of columns without values
_NUMBER = "[+-]?([0-9]+[.]?[0-9]*|[.][0-9]+)([eE][+-]?[0-9]+)?"
_SUFFIXES = {
    **dict.fromkeys((".csv", ".tsv"), "read_csv"),
    **dict.fromkeys((".json", ".jsonl", ".ndjson"), "read_json_auto"),
    ".parquet": "read_parquet",
}
_ARROW = (".arrow", ".feather", ".ipc")
_PACKED = (".gz", ".zst")
_TYPED = frozenset(
    [
        *("auto_type_candidates", "dateformat", "date_format", "timestampformat", "timestamp_format"),
        *("decimal_separator", "thousands"),
    ]
)
"""Options of CSV by which a query chooses types itself."""
_TYPES = ("types", "dtypes", "column_types")
_OF_FILES = frozenset(
    [
        *("filename", "union_by_name", "files_to_sniff", "hive_partitioning", "hive_types", "hive_types_autocast"),
        *("store_rejects", "rejects_table", "rejects_scan", "rejects_limit"),
    ]
)
"""Options of CSV that `sniff_csv` does not have."""
_TEMPORAL = frozenset(("date", "time", "timestamp", "timestamp with time zone"))


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
    """Files with the same columns, and the columns' types."""

    files: list[str]
    types: Mapping[str, str]


def complete_parquet(node: Node, engine: Engine) -> list[Mixed]:
    """Give the columns of several Parquet files types that hold all values; return columns without such a type."""
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
    if others == {"VARCHAR"} and kind == "VARCHAR":  # as text, an integer has one spelling
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


class Text(NamedTuple):
    """Columns of text files that a query sees with other types.

    Attributes:
        node: The reader of the texts.
        columns: The columns by name.
        remedy: Advice for users who want to keep a column's texts; the column's name replaces "{}".
    """

    node: Node
    columns: Mapping[str, SpelledColumn]
    remedy: str


def complete(tree: Node, engine: Engine) -> tuple[dict[int, Text], list[Mixed]]:
    """Complete the readers of a query's files.

    Returns columns of text with other types, by the reader's location, and columns with types that do not fit each
    other. Raises UserError if a file cannot be read.
    """
    found: dict[int, Text] = {}
    mixed: list[Mixed] = []
    for node in list(readers(tree)):
        if node["type"] == "BASE_TABLE":
            table, given = table_name(node), is_given(node, engine)
            if table.lower().endswith(_ARROW) and not given:
                _open_arrow(table, engine)
                node["alias"] = node["alias"] or implicit_name(table)
            function = None if given else _function(table)
            if function is None:
                continue
            read = parse(engine.connection, f"SELECT * FROM {function}({quoted(table)})").select["from_table"]
            kept = {key: node[key] for key in ("sample", "query_location", "query_location_length")}
            alias = node["alias"] or implicit_name(table)
            read.update(kept, alias=alias, column_name_alias=node.get("column_name_alias", []))
            node.clear()
            node.update(read)
        format_ = FORMATS.get(node["function"]["function_name"].lower())
        text = None
        if format_ == "CSV":
            text = _complete_csv(node, engine, _named_columns(tree))
        elif format_ == "JSON":
            text = _complete_json(node, engine, keeps_json=_uses_json(tree))
        elif format_ == "Parquet":
            mixed += complete_parquet(node, engine)
        if text is not None and text.columns:
            found[node["query_location"]] = text
    return found, mixed


def find_changed(engine: Engine, text: Text, name: str) -> str:
    """Describe the first value whose text changes in a column without a spelling, and how to keep the text."""
    column, value = text.columns[name], identifier(name)
    rows = select_all(engine, text.node, ', filename AS "hostdev file", row_number() OVER () AS "hostdev row"')
    shown = usual(column)
    [(before, after, file, row)] = engine.rows(
        f'SELECT {value}, {shown}, "hostdev file", "hostdev row" FROM ({rows}) WHERE trim({value}) <> \'\' '
        f"AND trim({value}) IS DISTINCT FROM {shown} ORDER BY 4 LIMIT 1"
    )
    [(start,)] = engine.rows(f'SELECT min("hostdev row") FROM ({rows}) WHERE "hostdev file" = ?', file)
    remedy = text.remedy.replace("{}", quoted(name))
    return (
        f"{before!r} in row {row - start + 1:,} of {file} would become {after!r}; to keep it as it is written, {remedy}"
    )


def _open_arrow(pattern: str, engine: Engine) -> None:
    """Register Arrow files, which DuckDB cannot read, as a table named `pattern`; raise UserError if schemas differ."""
    files = [file for (file,) in engine.rows("SELECT file FROM glob(?) ORDER BY file", pattern)]
    if not files:
        raise UserError(f"the query: no file matches {pattern}")
    with in_one_line():
        schemas = {file: dataset.dataset(file, format="ipc").schema.remove_metadata() for file in files}
        other = next((file for file in files if schemas[file] != schemas[files[0]]), None)
        if other is not None:
            raise UserError(
                f"the query: {files[0]} and {other} have different columns or types; read them alone, with UNION ALL "
                "BY NAME between them"
            )
        engine.connection.register(pattern, dataset.dataset(files, format="ipc"))


def _function(table: str) -> str | None:
    """Return the function that reads a file whose name is written in place of a table's."""
    name = table.lower()
    for suffix in _PACKED:
        name = name.removesuffix(suffix)
    return next((function for suffix, function in _SUFFIXES.items() if name.endswith(suffix)), None)


def _named_columns(tree: Node) -> frozenset[str] | None:
    """Return the lower-case names of the columns that a query mentions; None if it may compute with further columns."""
    names: set[str] = set()
    for node in walk(tree):
        kind = node.get("type")
        if kind in ("SET_OPERATION_NODE", "RECURSIVE_CTE_NODE", "PIVOT") or node.get("class") == "SUBQUERY":
            return None
        if (node.get("class") == "STAR" and node.get("columns")) or node.get("ref_type") in ("NATURAL", "POSITIONAL"):
            return None
        if kind == "DISTINCT_MODIFIER" or node.get("aggregate_handling") == "FORCE_AGGREGATES":
            return None
        if any(node.get(key) for key in ("column_name_alias", "aliases", "rename_list")):
            return None
        keys = [one["expression"] for one in node.get("orders", ())] if kind == "ORDER_MODIFIER" else []
        if any(key.get("class") in ("CONSTANT", "STAR") for key in (*keys, *node.get("group_expressions", ()))):
            return None
        if node.get("class") == "COLUMN_REF":
            names |= {name.lower() for name in node["column_names"]}
        names |= {name.lower() for name in node.get("using_columns", ())}
    return frozenset(names)


def _complete_csv(node: Node, engine: Engine, named: frozenset[str] | None) -> Text | None:
    given = given_options(node)
    plain = {} if "comment" in given else {"comment": "''"}
    files = list_files(node, engine)
    if not files or not {"columns", "auto_detect"}.isdisjoint(given):
        node.update(with_options(engine, node, **plain))
        return None
    if len(full := [file for file in files if not is_empty(Path(file))]) not in (0, len(files)):
        files = full  # Spark writes empty files for empty partitions
        node.update(with_files(engine, node, files))
    dialect, names, formats = _sniff(node, engine, files[0], plain)
    if plain and len(names) == 1 and len(_sniff(node, engine, files[0], {})[1]) > 1:
        raise UserError(
            f"the query: {files[0]} has lines with other numbers of values than its first line; if lines that begin "
            f"with # are comments, read it with read_csv({shown_files(node)}, comment = '#')"
        )
    several = len(files) > 1
    kept = {key: value for key, value in dialect.items() if key not in given and not (several and key in _OF_ONE)}
    read = with_options(engine, node, **plain, **kept)
    if "all_varchar" in given:
        node.update(read)
        return None
    if not _TYPED.isdisjoint(given):
        node.update(with_options(engine, read, sample_size="-1", files_to_sniff="-1"))
        return None
    own = _own_types(given, names)
    with _about_quotes(given, node):
        guesses = described(engine, read)
    hive = {name for name in guesses if any(f"{name}=" in file for file in files)}
    guesses = {name: kind for name, kind in guesses.items() if name not in hive and name != "filename"}
    if "union_by_name" not in given:
        guesses = {name: kind for name, kind in guesses.items() if name in names}
    text = with_options(engine, read, _TYPES, all_varchar="true", **({"types": _struct(own)} if own else {}))
    guesses = {name: kind for name, kind in guesses.items() if name not in own}
    with _about_quotes(given, node):
        chosen = choose(engine, select_all(engine, text), guesses, formats)
    for name, column in chosen.items():
        if column is not None and column.spelling is None and named is not None and name.lower() not in named:
            chosen[name] = None  # as text, it needs no spelling
    used = {f"{kind.lower()}format": quoted(format_) for kind, format_ in formats.items() if _has(chosen, kind)}
    types = {**own, **{name: column.type if column else "VARCHAR" for name, column in chosen.items()}}
    node.update(with_options(engine, read, _TYPES, types=_struct(types), **used))
    columns = {name: column for name, column in chosen.items() if column is not None}
    return Text(text, columns, f"read it with read_csv({shown_files(node)}, types = {{{{}}: 'VARCHAR'}})")


@contextmanager
def _about_quotes(given: Mapping[str, Node], node: Node) -> Iterator[None]:
    """Add a hint about quotes to the error of a CSV file that cannot be read."""
    try:
        yield
    except UserError as error:
        if "quote" in given or "CSV" not in str(error):
            raise
        reason = re.split(r" Possible | The search space| \* ", str(error))[0]
        raise UserError(
            f"{reason.rstrip('.')}; if quotes are ordinary characters, read it with read_csv({shown_files(node)}, "
            "quote = ''), and if a backslash escapes them, with escape = '\\'; otherwise correct the row"
        ) from None


_OF_ONE = frozenset(("delim", "skip"))  # kept for a single file only; with several files, DuckDB detects them in each


def _has(chosen: Mapping[str, SpelledColumn | None], kind: str) -> bool:
    return any(column is not None and column.type == kind for column in chosen.values())


def _struct(values: Mapping[str, str]) -> str:
    return "{" + ", ".join(f"{quoted(name)}: {quoted(value)}" for name, value in values.items()) + "}"


def _own_types(given: Mapping[str, Node], names: Sequence[str]) -> dict[str, str]:
    """Return the types that a query gives, by column."""
    for option in _TYPES:
        if option not in given:
            continue
        values = given[option].get("arguments", [])
        texts = [one["expression"].get("literal", {}).get("text", "VARCHAR") for one in values]
        is_named = given[option].get("function_name") == "struct_pack"
        return dict(zip([one["name"] for one in values] if is_named else names, texts, strict=False))
    return {}


def _sniff(
    node: Node, engine: Engine, file: str, plain: Mapping[str, str]
) -> tuple[dict[str, str], list[str], dict[str, str]]:
    """Return the options of CSV that DuckDB finds in a file, its columns, and the formats of dates and times."""
    given = set(given_options(node))
    asked = with_options(engine, with_files(engine, node, [file]), sorted(given & _OF_FILES), **plain)
    asked["function"].update(function_name="sniff_csv", qualified_name={"path": ["sniff_csv"]})
    found = "Delimiter, SkipRows, HasHeader, [one.name FOR one IN Columns], DateFormat, TimestampFormat"
    [(delimiter, skip, header, names, date, timestamp)] = engine.rows(
        f"SELECT {found} FROM ({select_all(engine, asked)})"
    )
    dialect = {
        "delim": quoted(delimiter),
        "skip": str(skip),
        "header": str(header).lower(),
        **({} if "quote" in given else {"quote": quoted('"'), "escape": quoted('"')}),
    }
    formats = ("DATE", date), ("TIMESTAMP", timestamp)
    return dialect, names, {kind: found for kind, found in formats if found and not found.startswith("%Y-%m-%d")}


def _uses_json(tree: Node) -> bool:
    """Return whether a query has functions or operators of JSON."""
    for node in walk(tree):
        name = node.get("function_name", "").lower()
        if node.get("class") == "FUNCTION" and (name in ("->", "->>") or name.startswith("json")):
            return True
        if node.get("class") == "LAMBDA" and (node.get("expr") or {}).get("class") == "CONSTANT":  # such as x -> 'name'
            return True
    return False


def _complete_json(node: Node, engine: Engine, *, keeps_json: bool) -> Text | None:
    if "columns" in given_options(node):
        return None
    node.update(with_options(engine, node, sample_size="-1", maximum_sample_files=str(2**63 - 1)))
    with in_one_line():
        read = engine.connection.sql(select_all(engine, node))
    files = list_files(node, engine)
    types = {
        name: kind
        for name, kind in zip(read.columns, read.types, strict=True)
        if name != "filename" and not any(f"{name}=" in file for file in files)
    }
    texts = {name: _as_text(kind, keeps_json=keeps_json) for name, kind in types.items()}
    if texts == {name: str(kind) for name, kind in types.items()}:
        return None
    text = with_options(engine, node, columns=_struct(texts))
    guesses = {name: str(kind) for name, kind in types.items() if kind.id in _TEMPORAL}
    chosen = choose(engine, select_all(engine, text), guesses, {})
    columns = {name: column for name, column in chosen.items() if column is not None}
    node.update(with_options(engine, node, columns=_struct(texts | {name: one.type for name, one in columns.items()})))
    return Text(text, columns, f"read it with read_json({shown_files(node)}, columns = {{{{}}: 'VARCHAR', ...}})")


def _as_text(kind: Any, *, keeps_json: bool) -> str:
    """Return a JSON column's type, but text for mixed values, and for times and UUIDs, which JSON writes as text."""
    if kind.id == "list":
        return f"{_as_text(kind.children[0][1], keeps_json=keeps_json)}[]"
    if kind.id == "struct":
        fields = (f"{identifier(n)} {_as_text(of, keeps_json=keeps_json)}" for n, of in kind.children)
        return f"STRUCT({', '.join(fields)})"
    if kind.id == "map":
        return f"MAP({', '.join(_as_text(of, keeps_json=keeps_json) for _, of in kind.children)})"
    shown = str(kind)
    if kind.id in _TEMPORAL or kind.id == "uuid" or shown == '"NULL"' or (shown == "JSON" and not keeps_json):
        return "VARCHAR"
    return shown
