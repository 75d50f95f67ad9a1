"""A source of rows from tables with named columns: CSV, TSV, sparse text, Parquet and Arrow files."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import pyarrow as pa

from hostdev.core.addresses import source_path
from hostdev.core.errors import UserError
from hostdev.core.options import flag_of
from hostdev.core.progress import note
from hostdev.data.preprocess import columns as arrow
from hostdev.data.preprocess.columns import Positive
from hostdev.data.preprocess.delimited import DelimitedFile, TextFormat
from hostdev.data.preprocess.files import (
    ArrowTable,
    FileSource,
    ParquetTable,
    TableFile,
    UnparsedRows,
    find_format,
    is_table,
)
from hostdev.data.preprocess.folders import expand
from hostdev.data.preprocess.forms import INTEGER, NUMBERS, TEXT, WHOLE, Written
from hostdev.data.preprocess.inputs import AnyInput, InputFile, open_input
from hostdev.data.preprocess.lists import can_be_weights, elements
from hostdev.data.preprocess.naming import about_blanks, listed, short
from hostdev.data.preprocess.raw import RawBlock, RawRows
from hostdev.data.preprocess.sparse_text import SparseText, find_kind
from hostdev.data.preprocess.table_options import TableOptions
from hostdev.data.preprocess.table_rows import RowParser, value_type

_FLAGS = {"quotes": "--no-quotes", "skipped_lines": "--skip-lines"}  # flags of `TextFormat` named unlike its fields


def open_file(source: AnyInput, found: str, how: TextFormat) -> TableFile:
    """Open a file of format `found`, a result of `files.find_format`.

    `how` is the format of text; sparse text is recognized only if all fields of `how` have their defaults.
    Raises UserError for a broken file, and for a pipe unless the format is text.
    """
    if found == "text":
        kind = find_kind(source) if how == TextFormat() else None
        return DelimitedFile(source, how) if kind is None else SparseText(source, kind)
    if not isinstance(source, InputFile):
        raise UserError(f"{source.name}: {found} can be read only from a file, not from a pipe")
    return ParquetTable(source) if found == "Parquet" else ArrowTable(source, stream=found == "an Arrow stream")


class TableSource(FileSource):
    """The rows of files, of all tables in folders, or of standard input ("-").

    Args:
        files: Paths, and files that are already open, such as a query's result; open files are read after the paths.
        options: Roles of the columns; may name further files, with test or validation rows.

    Raises UserError for unreadable files and wrong columns, in the constructor or while reading.
    """

    def __init__(self, files: Sequence[Path | TableFile], options: TableOptions) -> None:
        chosen = (list(map(source_path, names)) for names in (options.test_files, options.validation_files))
        self._options = options
        self._positive = None if options.positive is None else Positive.parse(options.positive)
        self.used = options.used()  # names of the columns that are read
        self._owners = dict(options.share)  # for each column that shares another column's ids, the other column
        named = [[file for file in files if isinstance(file, Path)], *chosen]
        paths = [expand(group, is_table) if group else [] for group in named]
        opened: list[list[TableFile]] = [[open_table(path, options.text) for path in group] for group in paths]
        opened[0] += [file for file in files if not isinstance(file, Path)]
        super().__init__([file for group in opened for file in group])
        self._splits = [split for split, group in enumerate(opened) for _ in group]
        self._types: dict[
            str, tuple[str, pa.DataType, TableFile, str]
        ] = {}  # by id space: written form, type, file and column of the first column that has a written form
        for file in self.files:
            self._check_columns(file)
        self.layout, self.has_validation = options.layout(), options.has_validation()
        self._parser = RowParser(options, self.files)

    def options(self) -> dict[str, Any]:
        """Return the manifest's entry about the columns' roles and how their values are read."""
        return {"preset": "table", **self._options.as_json()}

    def content(self, number: int, part: UnparsedRows) -> Any:
        """Return the file, the part, and the number of the file's split; 0 if the split is chosen row by row."""
        return self.files[number], part, self._splits[number]

    def parse(self, block: RawBlock, *, hashed: bool = False) -> RawRows:
        """Parse a block's rows.

        A key is the hash of the value's text if `hashed` is true, otherwise the text's index within the id space.
        """
        file, part, split = block.content
        return self._parser.parse(file, file.parse(part, self.used), hashed=hashed, split=split)

    def kinds(self, forms: Mapping[str, Mapping[int, frozenset[int]]]) -> dict[str, Any]:
        """Return the manifest's entries about columns with ids: their types in the files, and the forms of the values.

        `forms` has the forms of values (see `preprocess.forms`) by column name and file number.
        Prints a note for each column whose integers are written differently in two files.
        """
        found = {}
        for column in self.layout.columns:
            by_file = forms.get(column.name, {})
            found[column.name] = Written(
                frozenset().union(*by_file.values()),
                tuple(
                    dict.fromkeys(_type_name(file.get_type(self._options.column(column.name))) for file in self.files)
                ),
            ).as_json()
            some = {number: each & NUMBERS for number, each in by_file.items() if TEXT not in each}
            plain = next((number for number, each in some.items() if each == {INTEGER}), None)
            point = next((number for number, each in some.items() if WHOLE + 1 in each and INTEGER not in each), None)
            if plain is not None and point is not None:
                names = [self.files[number].input.name for number in (plain, point)]
                note(
                    f"column {column.name!r} has numbers such as '1' in {names[0]} and '1.0' in {names[1]}, which are "
                    "different values; write them the same way if they should be equal"
                )
        return found

    def _check_columns(self, file: TableFile) -> None:
        first = self.files[0]
        if missing := [name for name in self.used if name not in file.names]:
            hint = about_blanks(missing[0], file.names) or self._about_headers(file)
            raise UserError(f"{file.input.name} has no column {missing[0]!r}; it has {listed(file.names)}{hint}")
        if sorted(file.names) != sorted(first.names):
            one = sorted(set(file.names) ^ set(first.names))
            difference = f"not in both files: {listed(one)}" if one else "some names occur twice"
            raise UserError(
                f"{file.input.name} has different columns than {first.input.name}: {difference}; make the columns equal"
            )
        for name in self.used:
            if file.names.count(name) > 1:
                raise UserError(f"{file.input.name} has {file.names.count(name)} columns named {name!r}; keep one")
        columns = {name: self._options.column(name) for name in self._options.roles()}
        for name in (*columns, *self._options.split()):
            column = columns.get(name, name)
            if reason := self._against(name, file.get_type(column)):
                raise UserError(f"{file.input.name}, column {column!r}: {reason}")
            self._check_type(name, column, file)
        for name, separator in self._options.bags:
            weights = self._options.reading(name).weights_column
            if weights is not None and not can_be_weights(found := file.get_type(weights), separator):
                raise UserError(
                    f"{file.input.name}, column {weights!r}: it is of type {short(found)}; the weights of {name!r} "
                    "must be a list of numbers in each row, or text with the separator of the bag"
                )

    def _check_type(self, name: str, column: str, file: TableFile) -> None:
        """Raise UserError if the type of a feature's column would give equal values different ids.

        The type is compared with the column's type in earlier files, and with columns that share its ids.
        """
        found, options = file.get_type(column), self._options
        written = arrow.get_written_form(found)
        owner = self._owners.get(name, name)
        as_text = [*options.categorical, *(bag for bag, _ in options.bags), *(options.test_column or ())[:1]]
        split = (options.validation_column or ())[:1]
        if name in (*as_text, *split) and (reason := file.respelled.get(column)):
            raise UserError(f"{file.input.name}, column {column!r}: {reason}")
        if written is None or name not in as_text:
            return
        first, before, where, other = self._types.setdefault(owner, (written, found, file, column))
        if written != first and other == column:
            raise UserError(
                f"column {column!r} is of type {short(before)} in {where.input.name} and {short(found)} in "
                f"{file.input.name}, so equal values would get different ids; cast it in one of the files"
            )
        if written != first and arrow.TEXT_OR_WHOLE not in (written, first):
            raise UserError(
                f"columns {other!r} and {column!r} share their ids, and are of type {short(before)} in "
                f"{where.input.name} and {short(found)} in {file.input.name}, so equal values would get "
                "different ids; cast one of them"
            )

    def _about_headers(self, file: TableFile) -> str:
        if not isinstance(file, DelimitedFile) or self._options.columns is not None:
            return ""
        if other := file.other_delimiter:
            return f" (a single name, because the first line has no {file.shown}; give --delimiter {other})"
        return " (from its first line; if that is no header, name the columns with --columns)"

    def _against(self, name: str, found: pa.DataType) -> str | None:
        """Return the reason why a column of this type cannot have its role, or None."""
        kind, bags, shown = arrow.classify_type(found), dict(self._options.bags), short(found)
        if kind == "nested":
            return f"it is of type {shown}, which is nested or unknown; only plain values and lists of them can be read"
        if kind == "list" and name in self._options.split():
            return f"it is of type {shown}, a list; choose rows by a column with one value per row"
        if name == self._options.label and kind == "other" and self._positive is not None and self._positive.orders:
            return (
                f"it is of type {shown}, and --positive {self._options.positive} compares numbers; make it a "
                "number, or a column of 0 and 1"
            )
        if name in bags:
            if kind != "list" and bags[name] is None:
                return f"it is of type {shown}, not a list; give the separator of its values, such as --bag '{name}=|'"
            marked = self._options.reading(name).weights
            if marked is not None and arrow.classify_type(value_type(found)) != "text":
                return f"its values are of type {short(value_type(found))}, not text with weights after {marked!r}"
            return None
        if kind == "list" and name not in elements(self._options.vectors):
            return f"it is of type {shown}, a list; only --bag and --vector take lists"
        if name in elements(self._options.vectors) and kind not in ("list", "text"):
            return f"it is of type {shown}, not a list of numbers; name it with --numeric"
        if name in self._options.numeric and kind == "other":
            return f"it is of type {shown}, not numbers; name it with --categorical, or convert it to numbers"
        return None


def _type_name(found: pa.DataType) -> str:
    """Return the manifest's name for the type of a column's values; every text type is "text"."""
    found = value_type(found)
    return "text" if arrow.classify_type(found) == "text" and not pa.types.is_null(found) else str(found)


def open_table(path: Path, how: TextFormat) -> TableFile:
    """Open a file in the format that its first bytes show; raise UserError for options that have no effect on it."""
    source = open_input(path)
    found = find_format(source)
    for one in fields(how):
        if found != "text" and getattr(how, one.name) != one.default:
            flag = _FLAGS.get(one.name, flag_of(one.name))
            raise UserError(f"{flag} has no effect on {source.name}, which is {found}; leave out {flag}")
    return open_file(source, found, how)
