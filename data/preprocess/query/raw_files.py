"""Files of raw rows: describes for the manifest how a query read its files, and reads other files in the same way."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from hostdev.core.errors import UserError
from hostdev.core.machine import available_cpus
from hostdev.core.memory import available_bytes
from hostdev.data.preprocess.encoding import WrongRowError
from hostdev.data.preprocess.files import Chunk, TableFile, UnparsedRows
from hostdev.data.preprocess.inputs import open_input
from hostdev.data.preprocess.query.engine import Engine
from hostdev.data.preprocess.query.from_clause import (
    FORMATS,
    described,
    given_options,
    is_given,
    readers,
    select_all,
    with_options,
)
from hostdev.data.preprocess.query.spelling import identifier, quoted
from hostdev.data.preprocess.query.statement import Node, parse, table_name, walk

if TYPE_CHECKING:
    from hostdev.data.preprocess.query.raw_rows import RawQuery

_FORMATS = {"CSV": r"\.(csv|tsv|tab|txt)", "JSON": r"\.(json|jsonl|ndjson)", "Parquet": r"\.parquet"}
_FUNCTIONS = {"CSV": "read_csv", "JSON": "read_json", "Parquet": "read_parquet"}
_TYPES = ("types", "dtypes", "column_types", "auto_type_candidates", "all_varchar", "sample_size")


def describe_tables(tree: Node, completed: Node, engine: Engine) -> dict[str, Any]:
    """Return the types of the columns of the tables that a query reads, and the formats of dates in CSV files.

    Args:
        tree: The query.
        completed: The same query after `readers.complete`, which has chosen the types.
        engine: Reads the tables.
    """
    columns: dict[str, dict[str, str]] = {}
    found: dict[str, Any] = {"columns": columns}
    for node, typed in zip(readers(tree), readers(completed), strict=True):
        dialect = _sniff(node, engine)
        if dialect is not None:
            found |= {"text": True, "header": bool(dialect["HasHeader"])}
        for name, kind in described(engine, typed).items():
            about = {"type": kind}
            form = None if dialect is None else dialect.get({"DATE": "DateFormat"}.get(kind, "TimestampFormat"))
            if form is not None and kind.startswith(("DATE", "TIMESTAMP")):
                about["format"] = str(form)
            columns.setdefault(name, about)
    return found


def _kind_of(node: Node, name: str | None) -> str | None:
    """Return the format that a FROM element reads: "CSV", "JSON", "Parquet" or None."""
    if node["type"] == "TABLE_FUNCTION":
        return FORMATS.get(node["function"]["function_name"].lower())
    return None if name is None else _format_of(name)


def _format_of(name: str) -> str | None:
    plain = re.sub(r"\.(gz|zst)$", "", name.lower())
    return next((kind for kind, suffix in _FORMATS.items() if re.search(suffix + "$", plain)), None)


def _name_of(node: Node) -> str | None:
    """Return the name or pattern of the first file that a FROM element reads."""
    if node["type"] == "BASE_TABLE":
        return table_name(node)
    texts = [
        one["literal"]["text"]
        for argument in node["function"]["arguments"][:1]
        for one in walk(argument)
        if one.get("class") == "CONSTANT" and one["literal"]["kind"] == "STRING"
    ]
    return texts[0] if texts else None


def _sniff(node: Node, engine: Engine) -> dict[str, Any] | None:
    """Return the dialect that DuckDB detects in the first CSV file of a FROM element; None if this reads no CSV."""
    name = _name_of(node)
    if name is None or (node["type"] == "BASE_TABLE" and is_given(node, engine)) or _kind_of(node, name) != "CSV":
        return None
    files = engine.rows("SELECT file FROM glob(?) ORDER BY file LIMIT 1", name)
    if not files:
        return {"HasHeader": True}
    sniffing = _reader(node, Path(files[0][0]), "sniff_csv", engine)
    try:
        sql = select_all(engine, sniffing)
        rows = engine.rows(f"SELECT HasHeader, DateFormat, TimestampFormat FROM ({sql})")
    except UserError:  # an option that sniff_csv does not know
        return {"HasHeader": True}
    return dict(zip(("HasHeader", "DateFormat", "TimestampFormat"), rows[0], strict=True))


def _reader(node: Node | None, path: Path, function: str, engine: Engine, without: Sequence[str] = ()) -> Node:
    """Return a FROM element that reads a file by a function, with the options of `node` except those in `without`."""
    name = quoted(str(path))
    found: Node = parse(engine.connection, f"SELECT * FROM {function}({name})").select["from_table"]
    if node is not None and node["type"] == "TABLE_FUNCTION":
        found["function"]["arguments"] += node["function"]["arguments"][1:]
    return with_options(engine, found, without)


class RawFile(TableFile):
    """A file of raw rows, from which a statement computes the columns of a data set.

    DuckDB reads it as it read the file of the data set, except that types are not guessed from this file.

    Args:
        path: The file.
        query: Computes the columns.
        optional: Further columns, which are computed or read if possible.

    Raises:
        UserError: The file cannot be read, or a column is not there and cannot be computed.
    """

    def __init__(self, path: Path, query: "RawQuery", optional: Sequence[str], engine: Engine) -> None:
        self.input = open_input(path)
        self._engine = engine
        self._sql = _select(path, query, engine)
        schema = engine.schema(self._sql)
        try:
            self._plan = query.plan(schema.names, optional, typed=True)
        except UserError as error:
            raise UserError(f"{self.input.name}: {error}") from None
        self._empty = self._computed({name: pa.nulls(0, schema.field(name).type) for name in self._plan.columns()})
        self.names = tuple(self._empty.schema.names)

    def get_type(self, name: str) -> pa.DataType:
        """Return a column's type."""
        return self._empty.schema.field(name).type

    def _computed(self, columns: Any) -> pa.RecordBatch:
        found = self._plan.complete(columns, lambda name, values: values, as_arrays=True)
        return pa.RecordBatch.from_arrays(list(found.values()), names=list(found))

    def parts(self, used: Sequence[str], offset: int) -> Iterator[UnparsedRows]:
        """Iterate over the rows; `offset` must be 0."""
        row = 0
        shown = ", ".join(map(identifier, self._plan.columns()))
        for batch in self._engine.stream(f"SELECT {shown} FROM ({self._sql})"):
            row += len(batch)
            yield UnparsedRows(batch, row, batch.nbytes)

    def parse(self, part: UnparsedRows, used: Sequence[str]) -> Chunk:
        """Return a part's rows."""
        first = part.offset - len(part.content)
        try:
            found = self._computed({name: part.content[name] for name in part.content.schema.names})
        except WrongRowError as error:
            raise UserError(f"{self.input.name}, row {first + error.row + 1}, {error.reason}") from None
        except UserError as error:
            raise UserError(f"{self.input.name}: {error}") from None
        return Chunk(found.select(list(used)), size=part.taken)


def open_raw(path: Path, query: "RawQuery", optional: Sequence[str]) -> RawFile:
    """Open a file of raw rows; see `RawFile`."""
    memory = max(1 << 26, available_bytes() // 4)
    return RawFile(path, query, optional, Engine(available_cpus(), memory, query.spill))


def _select(path: Path, query: "RawQuery", engine: Engine) -> str:
    """Return the SQL that reads a file: all CSV columns as text, and JSON columns as text if they were in training."""
    node = query.file_reader
    kind = _format_of(path.name) or (None if node is None else _kind_of(node, _name_of(node)))
    if kind is None:
        return f"FROM {quoted(str(path))}"
    is_same = node is not None and _kind_of(node, _name_of(node)) == kind
    reader = _reader(node if is_same else None, path, _FUNCTIONS[kind], engine, _TYPES)
    options = given_options(reader)
    if kind == "CSV":
        if "columns" in options:  # which gives names and types
            names = ", ".join(map(quoted, query.raw_columns))
            reader = with_options(engine, reader, ["columns"], names=f"[{names}]")
        elif "header" not in options and query.source is not None and query.source.header is not None and is_same:
            reader = with_options(engine, reader, header=str(query.source.header))
        reader = with_options(engine, reader, all_varchar="true")
    if kind == "JSON" and "columns" not in options:
        there = described(engine, reader).items()
        types = [(name, "VARCHAR" if query.type_of(name).is_text else own) for name, own in there]
        shown = ", ".join(f"{quoted(name)}: {quoted(own)}" for name, own in types)
        reader = with_options(engine, reader, columns=f"{{{shown}}}")
    return select_all(engine, reader)
