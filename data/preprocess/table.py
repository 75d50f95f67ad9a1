"""Any table: columns by name, from CSV, TSV, Parquet and Arrow files."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from hostdev.data.preprocess import columns as arrow
from hostdev.data.preprocess.columns import Positive, WrongValueError
from hostdev.data.preprocess.delimited import DelimitedFile
from hostdev.data.preprocess.files import ArrowTable, Chunk, ParquetTable, TableFile, format_of
from hostdev.data.preprocess.raw import Layout, RawRows
from hostdev.data.schema import Column

from hostdev.core.errors import UserError
from hostdev.kernels.strings import TextMap, hash_texts


@dataclass(frozen=True, kw_only=True)
class TableOptions:
    """Which columns of a table are what."""

    label: str
    positive: str | None = None  # which labels are positive, such as ">3"; None: they are 0 and 1, or false and true
    numeric: tuple[str, ...] = ()
    categorical: tuple[str, ...] = ()
    bags: tuple[tuple[str, str | None], ...] = ()  # name, and the separator that splits its text
    share: tuple[tuple[str, str], ...] = ()  # a column, and the one whose ids it has
    test_column: tuple[str, str] | None = None  # rows with this value of this column are for testing
    test_after: tuple[str, str] | None = None  # rows with a larger or later value of this column are for testing
    columns: tuple[str, ...] | None = None  # names for text without a header
    delimiter: str | None = None  # of text; None: a comma or a tab
    quotes: bool = True  # text may have values in double quotes

    def __post_init__(self) -> None:
        with_ids = [*self.categorical, *(name for name, _ in self.bags)]
        names = [self.label, *self.numeric, *with_ids]
        for name in names:
            if names.count(name) > 1:
                raise UserError(f"column {name!r} is named twice among --label, --numeric, --categorical and --bag")
        if not with_ids:
            raise UserError("no column has ids; name at least one with --categorical or --bag")
        owners = dict(self.share)
        for name, owner in self.share:
            for one in (name, owner):
                if one not in with_ids:
                    raise UserError(f"--share {name}={owner}: {one!r} is not a column of --categorical or --bag, which "
                                    f"are {_listed(with_ids)}")  # fmt: skip
            if name == owner or owner in owners:
                raise UserError(f"--share {name}={owner}: {owner!r} has no ids of its own; name the column that has")
        if len(owners) < len(self.share):
            raise UserError("--share names a column twice")
        for name, separator in self.bags:
            if separator == "":
                raise UserError(f"--bag {name}=: the separator is empty; leave = out for lists in Parquet and Arrow")
        if self.columns is not None and len(set(self.columns)) < len(self.columns):
            raise UserError("--columns names a column twice")
        for one_of, value in (("--delimiter", self.delimiter), ("--columns", self.columns)):
            if value is not None and not value:
                raise UserError(f"{one_of} is empty")

    def layout(self) -> Layout:
        """Return the columns of the data set."""
        owners = dict(self.share)

        def of(kind: str, names: Iterable[str]) -> tuple[Column, ...]:
            return tuple(Column(name, kind, owners.get(name, name)) for name in names)

        return Layout(self.label, self.numeric, of("id", self.categorical), of("bag", (name for name, _ in self.bags)))

    def used(self) -> tuple[str, ...]:
        """Return the names of all columns that are read."""
        split = [pair[0] for pair in (self.test_column, self.test_after) if pair is not None]
        bags = [name for name, _ in self.bags]
        return tuple(dict.fromkeys([self.label, *self.numeric, *self.categorical, *bags, *split]))

    def as_json(self) -> dict[str, Any]:
        """Return what the manifest records."""
        return {**vars(self), "bags": dict(self.bags), "share": dict(self.share)}


class Table:
    """The rows of one or more files, in the order given.

    Raises UserError for files that cannot be read or do not have the columns, at once or when a row is met.
    """

    unit = "B"
    signed = True

    def __init__(self, files: Sequence[Path], options: TableOptions) -> None:
        self._options = options
        self._positive = None if options.positive is None else Positive.parse(options.positive)
        self._used = options.used()
        self._files = [_open(path, options) for path in files]
        for file in self._files:
            self._check_columns(file)
        self.layout = options.layout()
        self.total = sum(file.path.stat().st_size for file in self._files)
        self.most_rows = sum(file.most_rows for file in self._files)
        self._texts = {space: TextMap() for space in self.layout.spaces}

    def describe(self) -> list[dict[str, Any]]:
        """Return each file's absolute path and size."""
        return [{"file": str(file.path.resolve()), "bytes": file.path.stat().st_size} for file in self._files]

    def options(self) -> dict[str, Any]:
        """Return which columns are what."""
        return {"preset": "table", **self._options.as_json()}

    def text(self, space: str, keys: npt.NDArray[np.int64]) -> pa.Array:
        """Return the values of a space that keys stand for."""
        offsets, data = self._texts[space].take(keys)
        buffers = [None, pa.py_buffer(offsets), pa.py_buffer(data)]
        return pa.Array.from_buffers(pa.large_string(), len(keys), buffers).cast(pa.string())

    def chunks(self, *, hashed: bool = False) -> Iterator[tuple[RawRows, int]]:
        """Iterate over the rows; a key is the number of the value's text in its space, or its hash."""
        for file in self._files:
            for chunk in file.chunks(self._used):
                yield self._rows(file, chunk, hashed), chunk.size

    def _rows(self, file: TableFile, chunk: Chunk, hashed: bool) -> RawRows:
        name = ""

        def column(of: str) -> pa.Array:
            nonlocal name
            name = of
            return chunk.batch.column(chunk.batch.schema.get_field_index(of))

        def keys(space: str, codes: arrow.Codes, texts: pa.StringArray) -> npt.NDArray[np.int64]:
            return self._keys(space, texts, hashed)[codes]

        options, layout, n = self._options, self.layout, len(chunk.batch)
        numbers, ids, bags = np.empty((n, len(layout.dense))), np.empty((n, len(layout.ids)), np.int64), []
        test = None
        try:
            label = arrow.as_labels(column(options.label), self._positive)
            for i, of in enumerate(layout.dense):
                numbers[:, i] = arrow.as_numbers(column(of))
            for i, one in enumerate(layout.ids):
                ids[:, i] = keys(one.space, *arrow.as_text(column(one.name)))
            for bag, (_, separator) in zip(layout.bags, options.bags, strict=True):
                codes, texts, lengths = arrow.as_bags(column(bag.name), separator)
                bags.append((keys(bag.space, codes, texts), lengths))
            if options.test_column is not None:
                codes, texts = arrow.as_text(column(options.test_column[0]))
                test = pc.equal(texts, options.test_column[1]).to_numpy(zero_copy_only=False)[codes]
            if options.test_after is not None:
                test = arrow.is_after(column(options.test_after[0]), options.test_after[1])
        except WrongValueError as error:
            where = f"{file.path}, row {chunk.number(error.row)}, column {name!r}"
            raise UserError(f"{where}: {error}{self._hint(name)}") from None
        return RawRows(label, numbers, ids, tuple(bags), chunk.rejected, test)

    def _keys(self, space: str, texts: pa.StringArray, hashed: bool) -> npt.NDArray[np.int64]:
        """Return a key for each text."""
        _, offsets, data = texts.buffers()
        begin = (
            np.frombuffer(offsets, np.int32, len(texts) + 1, 4 * texts.offset) if len(texts) else np.zeros(1, np.int32)
        )
        content = np.frombuffer(data, np.uint8) if data is not None and data.size else np.zeros(0, np.uint8)
        if hashed:
            return hash_texts(begin, content).view(np.int64)
        return self._texts[space].add(begin, content).astype(np.int64)

    def _hint(self, name: str) -> str:
        """Return what to do about a value that is not what the column's option says."""
        if name in self._options.numeric:
            return "; name the column with --categorical, or mend the value (a missing one is empty or NA)"
        return ""

    def _check_columns(self, file: TableFile) -> None:
        first = self._files[0]
        if missing := [name for name in self._used if name not in file.names]:
            raise UserError(f"{file.path} has no column {missing[0]!r}; it has {_listed(file.names)}"
                            f"{self._about_headers(file)}")  # fmt: skip
        if sorted(file.names) != sorted(first.names):
            one = sorted(set(file.names) ^ set(first.names))
            difference = f"only one of them has {_listed(one)}" if one else "some are there twice"
            raise UserError(f"{file.path} has other columns than {first.path}: {difference}")
        for name in self._used:
            if file.names.count(name) > 1:
                raise UserError(f"{file.path} has {file.names.count(name)} columns of the name {name!r}")
            if reason := self._against(name, file.type_of(name)):
                raise UserError(f"{file.path}, column {name!r}: {reason}")

    def _about_headers(self, file: TableFile) -> str:
        by_header = isinstance(file, DelimitedFile) and self._options.columns is None
        return " (from its first line; if that is a row, give --columns)" if by_header else ""

    def _against(self, name: str, found: pa.DataType) -> str | None:
        """Return why a column of this type cannot be what the options say, or None."""
        kind, bags = arrow.kind_of(found), dict(self._options.bags)
        if kind == "nested":
            return f"it is of type {found}, which is nested or unknown; only plain values and lists of these are read"
        if name in bags:
            if kind != "list" and bags[name] is None:
                return f"it is of type {found}, not a list; say what separates its values, such as --bag '{name}=|'"
            return None
        if kind == "list":
            return f"it is of type {found}, a list; only --bag takes lists"
        if name in self._options.numeric and kind == "other":
            return f"it is of type {found}, not numbers; name it with --categorical, or make it a number"
        return None


def _open(path: Path, options: TableOptions) -> TableFile:
    """Open a file by what it begins with."""
    found = format_of(path)
    if found == "text":
        return DelimitedFile(path, columns=options.columns, delimiter=options.delimiter, quotes=options.quotes)
    for flag, given in (
        ("--columns", options.columns is not None),
        ("--delimiter", options.delimiter is not None),
        ("--no-quotes", not options.quotes),
    ):
        if given:
            raise UserError(f"{flag} has no effect on {path}, which is {found}; leave it out")
    return ParquetTable(path) if found == "Parquet" else ArrowTable(path, stream=found == "an Arrow stream")


def _listed(names: Sequence[str]) -> str:
    """Return names in words, not more than fit."""
    shown = ", ".join(map(str, names[:30]))
    return shown if len(names) <= 30 else f"{shown} and {len(names) - 30} more"
