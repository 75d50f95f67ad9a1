"""Readers of a query's files, completed so that all values of a column, not the first ones, decide its type.

Text (CSV) is read as `preprocess table` reads it where DuckDB would guess: `#` begins no comment, and quotes are double
quotes. Types of text come from `spelling`; several Parquet files must have types that fit each other.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from hostdev.core.errors import UserError
from hostdev.data.preprocess.query.engine import Engine, in_one_line
from hostdev.data.preprocess.query.settle import implicit_name
from hostdev.data.preprocess.query.spelling import Column, choose, identifier, quoted, usual
from hostdev.data.preprocess.query.statement import Node, parse, to_sql, walk

_CSV = frozenset(("read_csv", "read_csv_auto"))
_JSON = frozenset(("read_json", "read_json_auto", "read_ndjson", "read_ndjson_auto"))
_PARQUET = frozenset(("read_parquet", "parquet_scan"))
_LOCAL = frozenset(("range", "generate_series", "unnest", "repeat", "repeat_row"))  # functions that read no files
_SUFFIXES = {
    **dict.fromkeys((".csv", ".tsv"), "read_csv"),
    **dict.fromkeys((".json", ".jsonl", ".ndjson"), "read_json_auto"),
    ".parquet": "read_parquet",
}
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
_EXACT = {"DOUBLE": 53, "FLOAT": 24}  # powers of 2 below which all integers are of a type
_INTEGERS = frozenset(
    ("TINYINT", "SMALLINT", "INTEGER", "BIGINT", "HUGEINT", "UTINYINT", "USMALLINT", "UINTEGER", "UBIGINT", "UHUGEINT")
)
_TIMESTAMPS = frozenset(("TIMESTAMP_S", "TIMESTAMP_MS", "TIMESTAMP", "TIMESTAMP_NS"))


class Text(NamedTuple):
    """Columns of text files that a query sees with other types.

    Attributes:
        node: The reader of the texts.
        columns: The columns by name.
        remedy: What a query writes to keep the texts of a column, whose name replaces "{}".
    """

    node: Node
    columns: Mapping[str, Column]
    remedy: str


def readers(tree: Node) -> Iterator[Node]:
    """Yield the elements of FROM clauses that are files, functions that read files, or tables of this process."""
    named = {one["key"] for node in walk(tree) for one in (node.get("cte_map") or {}).get("map", ())}
    for node in walk(tree):
        is_table = node.get("type") == "BASE_TABLE" and node["table_name"] not in named
        is_function = node.get("type") == "TABLE_FUNCTION"
        if is_table or (is_function and node["function"]["function_name"].lower() not in _LOCAL):
            yield node


def select_all(engine: Engine, node: Node, more: str = "") -> str:
    """Return a query for all columns of an element of a FROM clause, and for `more` expressions."""
    tree = copy.deepcopy(parse(engine.connection, f"SELECT *{more} FROM x").tree)
    alone = copy.deepcopy(node)
    alone.update(alias="", column_name_alias=[], sample=None)
    tree["statements"][0]["node"]["from_table"] = alone
    return to_sql(engine.connection, tree)


def complete(tree: Node, engine: Engine) -> dict[int, Text]:
    """Complete the readers of a query's files; return columns of text with other types, by the reader's location.

    Raises:
        UserError: Files cannot be read, or have types that do not fit each other.
    """
    found: dict[int, Text] = {}
    for node in list(readers(tree)):
        if node["type"] == "BASE_TABLE":
            function = None if node["table_name"] in engine.tables else _function(node["table_name"])
            if function is None:
                continue
            read = parse(engine.connection, f"SELECT * FROM {function}({quoted(node['table_name'])})").select
            read = read["from_table"]
            kept = {key: node[key] for key in ("sample", "query_location", "query_location_length")}
            alias = node["alias"] or implicit_name(node["table_name"])
            read.update(kept, alias=alias, column_name_alias=node.get("column_name_alias", []))
            node.clear()
            node.update(read)
        name = node["function"]["function_name"].lower()
        text = None
        if name in _CSV:
            text = _complete_csv(node, engine)
        elif name in _JSON:
            text = _complete_json(node, engine, keeps_json=_uses_json(tree))
        elif name in _PARQUET:
            _complete_parquet(node, engine)
        if text is not None and text.columns:
            found[node["query_location"]] = text
    return found


def find_changed(engine: Engine, text: Text, name: str) -> str:
    """Describe the first value of a column without a spelling whose text changes, and how to keep it."""
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


def _function(table: str) -> str | None:
    """Return the function that reads a file whose name is written in place of a table's."""
    name = table.lower()
    for suffix in _PACKED:
        name = name.removesuffix(suffix)
    return next((function for suffix, function in _SUFFIXES.items() if name.endswith(suffix)), None)


def _given(node: Node) -> dict[str, Node]:
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
    return next(iter(_given(alone)), None)


def _with(engine: Engine, node: Node, without: Sequence[str] = (), **options: str) -> Node:
    """Return a function's node without some of its named arguments, and with others, given as SQL."""
    found = copy.deepcopy(node)
    arguments = found["function"]["arguments"]
    arguments[:] = [one for one in arguments if _name(one) not in {*without, *options}]
    if options:
        shown = ", ".join(f"{name} = {value}" for name, value in options.items())
        parsed = parse(engine.connection, f"SELECT * FROM f({shown})").select["from_table"]
        arguments += parsed["function"]["arguments"]
    return found


def _files(node: Node, engine: Engine) -> list[str]:
    """Return the files that a function reads, in its order; empty if its first argument is not constant."""
    arguments = node["function"]["arguments"]
    if not arguments:
        return []
    constants = [one for one in walk(arguments[0]) if one.get("class") == "CONSTANT"]
    texts = [one["literal"]["text"] for one in constants if one["literal"]["kind"] == "STRING"]
    in_order = sorted(zip([one["query_location"] for one in constants], texts, strict=False))
    return [file for _, text in in_order for (file,) in engine.rows("SELECT file FROM glob(?) ORDER BY file", text)]


def _shown_files(node: Node) -> str:
    """Return the first argument of a function that reads files, as a query has it."""
    texts = [one["literal"]["text"] for one in walk(node["function"]["arguments"][0]) if one.get("class") == "CONSTANT"]
    return quoted(texts[0]) if len(texts) == 1 else "[...]"


def _described(engine: Engine, node: Node) -> dict[str, str]:
    """Return the types of a reader's columns."""
    return {name: kind for name, kind, *_ in engine.rows(f"DESCRIBE {select_all(engine, node)}")}


def _complete_csv(node: Node, engine: Engine) -> Text | None:
    given = _given(node)
    plain = {} if "comment" in given else {"comment": "''"}
    files = _files(node, engine)
    if not files or not {"columns", "auto_detect"}.isdisjoint(given):
        node.update(_with(engine, node, **plain))
        return None
    dialect, names, formats = _sniff(node, engine, files[0], plain)
    several = len(files) > 1
    kept = {key: value for key, value in dialect.items() if key not in given and not (several and key in _OF_ONE)}
    read = _with(engine, node, **plain, **kept)
    if "quote" not in given and "quote" in kept and not _reads(engine, read):
        read = _with(engine, node, ("quote", "escape"), **plain, **{k: v for k, v in kept.items() if k not in _QUOTES})
    if "all_varchar" in given:
        node.update(read)
        return None
    if not _TYPED.isdisjoint(given):
        node.update(_with(engine, read, sample_size="-1", files_to_sniff="-1"))
        return None
    own = _own_types(given, names)
    guesses = _described(engine, read)
    hive = {name for name in guesses if any(f"{name}=" in file for file in files)}
    guesses = {name: kind for name, kind in guesses.items() if name not in hive and name != "filename"}
    if "union_by_name" not in given:
        guesses = {name: kind for name, kind in guesses.items() if name in names}
    text = _with(engine, read, _TYPES, all_varchar="true", **({"types": _struct(own)} if own else {}))
    guesses = {name: kind for name, kind in guesses.items() if name not in own}
    chosen = choose(engine, select_all(engine, text), guesses, formats)
    used = {f"{kind.lower()}format": quoted(format_) for kind, format_ in formats.items() if _has(chosen, kind)}
    types = {**own, **{name: column.type if column else "VARCHAR" for name, column in chosen.items()}}
    node.update(_with(engine, read, _TYPES, types=_struct(types), **used))
    columns = {name: column for name, column in chosen.items() if column is not None}
    return Text(text, columns, f"read it with read_csv({_shown_files(node)}, types = {{{{}}: 'VARCHAR'}})")


_QUOTES = frozenset(("quote", "escape"))
_OF_ONE = frozenset(("delim", "skip"))  # of one file; with several files, DuckDB guesses those of each


def _has(chosen: Mapping[str, Column | None], kind: str) -> bool:
    return any(column is not None and column.type == kind for column in chosen.values())


def _reads(engine: Engine, node: Node) -> bool:
    """Return whether all rows of a text can be read."""
    try:
        engine.rows(f"SELECT count(COLUMNS(*)) FROM ({select_all(engine, _with(engine, node, all_varchar='true'))})")
    except UserError:
        return False
    return True


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
    given = set(_given(node))
    asked = _with(engine, _one_file(engine, node, file), sorted(given & _OF_FILES), **plain)
    asked["function"].update(function_name="sniff_csv", qualified_name={"path": ["sniff_csv"]})
    columns = (
        "Delimiter, Quote, Escape, SkipRows, HasHeader, [one.name FOR one IN Columns], DateFormat, TimestampFormat"
    )
    [(delimiter, quote, escape, skip, header, names, date, timestamp)] = engine.rows(
        f"SELECT {columns} FROM ({select_all(engine, asked)})"
    )
    escaped = escape if quote == '"' and len(escape) == 1 else '"'
    dialect = {
        "delim": quoted(delimiter),
        "skip": str(skip),
        "header": str(header).lower(),
        **({} if "quote" in given else {"quote": quoted('"'), "escape": quoted(escaped)}),
    }
    formats = ("DATE", date), ("TIMESTAMP", timestamp)
    return dialect, names, {kind: found for kind, found in formats if found and not found.startswith("%Y-%m-%d")}


def _uses_json(tree: Node) -> bool:
    """Return whether a query has functions or operators of JSON."""
    for node in walk(tree):
        name = node.get("function_name", "").lower()
        if node.get("class") == "FUNCTION" and (name in ("->", "->>") or name.startswith("json")):
            return True
        if node.get("class") == "LAMBDA" and (node.get("expr") or {}).get("class") == "CONSTANT":  # field -> 'name'
            return True
    return False


def _complete_json(node: Node, engine: Engine, *, keeps_json: bool) -> Text | None:
    if "columns" in _given(node):
        return None
    node.update(_with(engine, node, sample_size="-1", maximum_sample_files=str(2**63 - 1)))
    with in_one_line():
        read = engine.connection.sql(select_all(engine, node))
    files = _files(node, engine)
    types = {
        name: kind
        for name, kind in zip(read.columns, read.types, strict=True)
        if name != "filename" and not any(f"{name}=" in file for file in files)
    }
    texts = {name: _as_text(kind, keeps_json=keeps_json) for name, kind in types.items()}
    if texts == {name: str(kind) for name, kind in types.items()}:
        return None
    text = _with(engine, node, columns=_struct(texts))
    guesses = {name: str(kind) for name, kind in types.items() if kind.id in _TEMPORAL}
    chosen = choose(engine, select_all(engine, text), guesses, {})
    columns = {name: column for name, column in chosen.items() if column is not None}
    node.update(_with(engine, node, columns=_struct(texts | {name: one.type for name, one in columns.items()})))
    return Text(text, columns, f"read it with read_json({_shown_files(node)}, columns = {{{{}}: 'VARCHAR', ...}})")


def _as_text(kind: Any, *, keeps_json: bool) -> str:
    """Return a type of JSON with text for times and UUIDs, which are texts in JSON, and for mixed values."""
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


def _complete_parquet(node: Node, engine: Engine) -> None:
    """Make several Parquet files with different types one table; raise UserError if a value would change."""
    files = list(dict.fromkeys(_files(node, engine)))
    if len(files) < 2:
        return
    listed = "[" + ", ".join(map(quoted, files)) + "]"
    each = (
        f"SELECT file_name, list((name, duckdb_type, type, num_children)) AS s FROM parquet_schema({listed}) GROUP BY 1"
    )
    firsts = engine.rows(f"SELECT min(file_name) FROM ({each}) GROUP BY s")
    if len(firsts) < 2:
        return
    types = {
        file: _described(engine, _one_file(engine, node, file))
        for (file,) in sorted(firsts, key=lambda one: files.index(one[0]))
    }
    first, *others = types
    names = set(types[first])
    if "union_by_name" not in _given(node):
        if all(types[other].get(name) in (kind, None) for other in others for name, kind in types[first].items()):
            return  # DuckDB names a file without a column; the columns of the first file are read
        for other in others:
            if names != set(types[other]):
                shown = ", ".join(sorted(names ^ set(types[other])))
                raise UserError(
                    f"the query: {first} and {other} have different types, and only one of them has {shown}; give "
                    "union_by_name = true to read_parquet if missing columns should be null, or read the files one by "
                    "one, with UNION ALL BY NAME between them"
                )
    node.update(_with(engine, node, union_by_name="true"))
    for name, kind in _described(engine, node).items():
        found = {file: of[name] for file, of in types.items() if of.get(name, '"NULL"') != '"NULL"'}
        _check_types(engine, node, name, kind, found)


def _one_file(engine: Engine, node: Node, file: str) -> Node:
    found = copy.deepcopy(node)
    found["function"]["arguments"][0] = parse(engine.connection, f"SELECT * FROM f({quoted(file)})").select[
        "from_table"
    ]["function"]["arguments"][0]
    return found


def _check_types(engine: Engine, node: Node, name: str, kind: str, found: Mapping[str, str]) -> None:
    """Raise UserError if values of a column change when types of several files become one type."""
    kinds = set(found.values())
    if len(kinds) < 2:
        return
    numbers = kinds - _INTEGERS
    value = identifier(name)
    if (not numbers and kind in _INTEGERS) or kinds <= _TIMESTAMPS:
        return
    if numbers == {"VARCHAR"} and kind == "VARCHAR":
        return
    if numbers <= set(_EXACT) and kind in _EXACT and not (kind == "FLOAT" and "DOUBLE" in kinds):
        wrong = None
        for file, of in found.items():
            if of in _INTEGERS:
                one = select_all(engine, _one_file(engine, node, file))
                limit = 2 ** _EXACT[kind]
                rows = engine.rows(
                    f"SELECT {value} FROM ({one}) WHERE {value} NOT BETWEEN -{limit} AND {limit} LIMIT 1"
                )
                wrong = (file, rows[0][0]) if rows else wrong
        if wrong is None:
            return
    first = next(iter(found))
    other = next(file for file in found if found[file] != found[first])
    raise UserError(
        f"the query: column {name!r} is of type {found[first]} in {first} and {found[other]} in {other}, and would "
        f"become {kind}, which changes values; read the files alone, with UNION ALL BY NAME between them, and cast "
        f"the column, such as SELECT * REPLACE ({value}::VARCHAR AS {value}) FROM {quoted(other)}"
    )
