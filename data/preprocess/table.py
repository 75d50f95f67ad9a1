"""A source of rows from any table: columns by name in CSV, TSV, Parquet and Arrow files."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from hostdev.core.errors import UserError
from hostdev.core.progress import note
from hostdev.data.preprocess import columns as arrow
from hostdev.data.preprocess.columns import Positive, WrongValueError
from hostdev.data.preprocess.comparing import is_after
from hostdev.data.preprocess.delimited import DelimitedFile
from hostdev.data.preprocess.files import ArrowTable, ParquetTable, Part, TableFile, find_format, is_table
from hostdev.data.preprocess.folders import expand
from hostdev.data.preprocess.forms import NUMBERS, PADDED, Written, each_form
from hostdev.data.preprocess.inputs import Input, open_input
from hostdev.data.preprocess.naming import about_blanks, listed, short
from hostdev.data.preprocess.raw import BEGINNING, Block, Layout, Place, RawRows, WrongRowError
from hostdev.data.preprocess.serving import large_float
from hostdev.data.schema import Column
from hostdev.kernels.forms import FRACTION, INTEGER, LARGE_FLOAT, TEXT, WHOLE
from hostdev.kernels.strings import TextMap, hash_texts


@dataclass(frozen=True, kw_only=True)
class TableOptions:
    """The roles of a table's columns."""

    label: str
    positive: str | None = None  # condition for positive labels, such as ">3"; None: labels are 0/1 or false/true
    numeric: tuple[str, ...] = ()
    categorical: tuple[str, ...] = ()
    bags: tuple[tuple[str, str | None], ...] = ()  # name, and the separator of values in its text
    share: tuple[tuple[str, str], ...] = ()  # a column, and the column whose ids it shares
    test_column: tuple[str, str] | None = None  # a column, and its value in test rows
    test_after: tuple[str, str] | None = None  # a column; test rows have a larger or later value
    columns: tuple[str, ...] | None = None  # names for text without a header
    delimiter: str | None = None  # the separator in text files; None: a comma or a tab
    quotes: bool = True  # text files may have values in double quotes

    def __post_init__(self) -> None:
        with_ids = [*self.categorical, *(name for name, _ in self.bags)]
        names = [self.label, *self.numeric, *with_ids]
        for name in names:
            if names.count(name) > 1:
                raise UserError(
                    f"column {name!r} is named twice among --label, --numeric, --categorical and --bag; name it once"
                )
        if not with_ids:
            raise UserError("no column has ids; name at least one with --categorical or --bag")
        owners = dict(self.share)
        for name, owner in self.share:
            for one in (name, owner):
                if one not in with_ids:
                    raise UserError(
                        f"--share {name}={owner}: {one!r} is not a column of --categorical or --bag, which "
                        f"are {listed(with_ids)}"
                    )
            if name == owner:
                raise UserError(f"--share {name}={owner}: a column cannot share its own ids; name another column")
            if owner in owners:
                raise UserError(f"--share {name}={owner}: {owner!r} shares another column's ids; name that column")
        if len(owners) < len(self.share):
            raise UserError("--share names a column twice; name it once")
        for name, separator in self.bags:
            if separator == "":
                raise UserError(f"--bag {name}=: the separator is empty; leave = out for lists in Parquet and Arrow")
        if self.columns is not None and len(set(self.columns)) < len(self.columns):
            raise UserError("--columns names a column twice; give each column its own name")
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
        bags = [name for name, _ in self.bags]
        return tuple(dict.fromkeys([self.label, *self.numeric, *self.categorical, *bags, *self.split()]))

    def split(self) -> tuple[str, ...]:
        """Return the names of the columns that select test rows."""
        return tuple(pair[0] for pair in (self.test_column, self.test_after) if pair is not None)

    def as_json(self) -> dict[str, Any]:
        """Return the entry that the manifest stores."""
        return {**vars(self), "bags": dict(self.bags), "share": dict(self.share)}


_NOTHING = np.zeros(2, np.int32), np.zeros(0, np.uint8)  # the text "", for a missing value


class Table:
    """The rows of the given files in order, of the tables in folders, or of standard input ("-").

    A file that is open already, such as a query's rows, is taken as it is.

    Raises UserError for unreadable files and wrong columns, in the constructor or while reading.
    """

    unit = "B"
    signed = True
    format_keys = None

    def __init__(self, files: Sequence[Path | TableFile], options: TableOptions) -> None:
        self._options = options
        self._positive = None if options.positive is None else Positive.parse(options.positive)
        self._used = options.used()
        self._owners = dict(options.share)  # columns with the ids of another column
        paths = expand([file for file in files if isinstance(file, Path)], is_table)
        opened = [file for file in files if not isinstance(file, Path)]
        self._files = [*(_open(path, options) for path in paths), *opened]
        self._types: dict[
            str, tuple[str, pa.DataType, TableFile, str]
        ] = {}  # by id space: the first known type and its column
        for file in self._files:
            self._check_columns(file)
        self.layout = options.layout()
        self.total = sum(file.input.size for file in self._files)
        self.most_rows = sum(file.most_rows for file in self._files)

    def describe(self) -> list[dict[str, Any]]:
        """Return each file's absolute path and size."""
        return [file.input.describe() for file in self._files]

    def stamp(self) -> list[Any] | None:
        """Return each file's path, size and modification time; None if an input is readable only once."""
        stamps = [file.input.stamp() for file in self._files]
        return None if None in stamps else stamps

    def check_unchanged(self) -> None:
        """Raise UserError if a file has changed since it was opened."""
        for file in self._files:
            file.input.check_unchanged()

    def options(self) -> dict[str, Any]:
        """Return the manifest's entry on the roles of the columns."""
        return {"preset": "table", **self._options.as_json()}

    def blocks(self, start: Place = BEGINNING) -> Iterator[Block]:
        """Iterate over the rows from `start` on."""
        for number, file in enumerate(self._files[start.input :], start.input):
            for part in file.parts(self._used, start.offset if number == start.input else 0):
                yield Block((file, part), file.input.name, Place(number, part.offset), part.taken)

    def parse(self, block: Block, *, hashed: bool = False) -> RawRows:
        """Parse a block's rows; a key is the number of the value's text within its id space, or the text's hash."""
        file, part = block.content
        return self._rows(file, part, hashed)

    def _rows(self, file: TableFile, part: Part, hashed: bool) -> RawRows:
        chunk, name = file.parse(part, self._used), ""
        seen = {space: TextMap() for space in self.layout.spaces}

        def column(of: str) -> pa.Array:
            nonlocal name
            name = of
            return chunk.batch.column(chunk.batch.schema.get_field_index(of))

        def keys(space: str, codes: arrow.Codes, texts: pa.StringArray) -> npt.NDArray[np.int64]:
            offsets, content = arrow.get_buffers(texts)
            found = hash_texts(offsets, content).view(np.int64) if hashed else seen[space].add(offsets, content)
            return found.astype(np.int64)[codes]

        def look(codes: arrow.Codes | None, texts: pa.StringArray) -> None:
            forms[name] = self._forms(name, file, codes, texts)

        forms: dict[str, frozenset[int]] = {}
        options, layout, n = self._options, self.layout, len(chunk.batch)
        numbers, ids, bags = np.empty((n, len(layout.dense))), np.empty((len(layout.ids), n), np.int64), []
        test = None
        try:
            label = arrow.as_labels(column(options.label), self._positive)
            for i, of in enumerate(layout.dense):
                numbers[:, i] = arrow.as_numbers(column(of))
            for i, one in enumerate(layout.ids):
                codes, texts = arrow.as_text(column(one.name))
                look(codes, texts)
                ids[i] = keys(one.space, codes, texts)
            for bag, (_, separator) in zip(layout.bags, options.bags, strict=True):
                codes, texts, lengths = arrow.as_bags(column(bag.name), separator)
                look(None, texts)
                bags.append((keys(bag.space, codes, texts), lengths))
            if options.test_column is not None:
                codes, texts = arrow.as_text(column(options.test_column[0]))
                test = pc.equal(texts, options.test_column[1]).to_numpy(zero_copy_only=False)[codes]
            if options.test_after is not None:
                test = is_after(column(options.test_after[0]), options.test_after[1])
        except WrongValueError as error:
            reason = f"column {name!r}: {error}{self._hint(name)}"
            raise WrongRowError(file.input.name, chunk.number(error.row), reason) from None
        except pa.ArrowMemoryError:
            raise
        except pa.ArrowException as error:  # an unforeseen type or value
            kind = short(file.get_type(name))
            raise UserError(
                f"{file.input.name}, column {name!r}: its values, of type {kind}, cannot be read "
                f"({short(error)}); write them as another type, such as text"
            ) from error
        if hashed:
            by_space, missing = None, dict.fromkeys(layout.spaces, int(hash_texts(*_NOTHING).view(np.int64)[0]))
        else:
            by_space = {space: arrow.make_texts(*values.take(np.arange(len(values)))) for space, values in seen.items()}
            missing = {space: int(values.find(*_NOTHING)[0]) for space, values in seen.items()}
        return RawRows(
            label, numbers, ids.T, tuple(bags), chunk.rejected, test, texts=by_space, missing=missing, forms=forms
        )

    def _forms(self, name: str, file: TableFile, codes: arrow.Codes | None, texts: pa.StringArray) -> frozenset[int]:
        """Return the forms in which a column's values are written.

        `codes` maps rows to texts; None if unknown.
        Raises WrongValueError for ambiguous text, or text that differs from the same value in another file.
        """
        each = each_form(texts)
        forms = frozenset(np.unique(each).tolist())
        wrong = None
        if LARGE_FLOAT in forms and TEXT not in forms:
            wrong = LARGE_FLOAT
        where = self._typed_numbers.get(self._owners.get(name, name))
        if wrong is None and where and arrow.classify_type(_value_type(file.get_type(name))) == "text":
            wrong = next((form for form in sorted(forms) if form in PADDED or WHOLE < form < FRACTION), None)
        if wrong is not None:
            number = int(np.flatnonzero(each == wrong)[0])
            row = 0 if codes is None else int(np.flatnonzero(codes == number)[0])
            shown = texts[number].as_py()
            raise WrongValueError(
                row,
                large_float(shown)
                if wrong == LARGE_FLOAT
                else f"the column has text such as {shown!r}, but {where}, so that one value would get two ids; "
                "write the values the same way in both",
            )
        return forms

    @cached_property
    def _typed_numbers(self) -> dict[str, str]:
        """By id space, a description of a column with a numeric type: name, type and file."""
        found = {}
        for file in reversed(self._files):
            for name in self._used:
                if arrow.classify_type(of := _value_type(file.get_type(name))) == "number":
                    found[self._owners.get(name, name)] = f"column {name!r} is {of} in {file.input.name}"
        return found

    def kinds(self, forms: Mapping[str, Mapping[int, frozenset[int]]]) -> dict[str, Any]:
        """Return the manifest's entries on columns with ids: the types in the files, and the forms of the values.

        `forms` is by column and file number.
        Prints a note for each column whose whole numbers are written in different ways in two files.
        """
        found = {}
        for column in self.layout.columns:
            by_file = forms.get(column.name, {})
            found[column.name] = Written(
                frozenset().union(*by_file.values()),
                tuple(dict.fromkeys(_type_name(file.get_type(column.name)) for file in self._files)),
            ).as_json()
            some = {number: each & NUMBERS for number, each in by_file.items() if TEXT not in each}
            plain = next((number for number, each in some.items() if each == {INTEGER}), None)
            point = next((number for number, each in some.items() if WHOLE + 1 in each and INTEGER not in each), None)
            if plain is not None and point is not None:
                names = [self._files[number].input.name for number in (plain, point)]
                note(
                    f"column {column.name!r} has numbers such as '1' in {names[0]} and '1.0' in {names[1]}, which are "
                    "different values; write them alike if they mean the same"
                )
        return found

    def _hint(self, name: str) -> str:
        """Return a hint for a value that does not fit the column's role."""
        if name in self._options.numeric:
            return "; name the column with --categorical, or fix the value (a missing one is empty or NA)"
        return ""

    def _check_columns(self, file: TableFile) -> None:
        first = self._files[0]
        if missing := [name for name in self._used if name not in file.names]:
            hint = about_blanks(missing[0], file.names) or self._about_headers(file)
            raise UserError(f"{file.input.name} has no column {missing[0]!r}; it has {listed(file.names)}{hint}")
        if sorted(file.names) != sorted(first.names):
            one = sorted(set(file.names) ^ set(first.names))
            difference = f"only one of them has {listed(one)}" if one else "some names occur twice"
            raise UserError(
                f"{file.input.name} has other columns than {first.input.name}: {difference}; make them equal"
            )
        for name in self._used:
            if file.names.count(name) > 1:
                raise UserError(f"{file.input.name} has {file.names.count(name)} columns named {name!r}; keep one")
            if reason := self._against(name, file.get_type(name)):
                raise UserError(f"{file.input.name}, column {name!r}: {reason}")
            self._check_type(name, file)

    def _check_type(self, name: str, file: TableFile) -> None:
        """Raise UserError if a column's type would give equal values other ids than before.

        The types before are those in earlier files, and those of columns that share the ids.
        """
        found, options = file.get_type(name), self._options
        written = arrow.get_written_form(found)
        owner = self._owners.get(name, name)
        as_text = [*options.categorical, *(bag for bag, _ in options.bags), *(options.test_column or ())[:1]]
        if written is None or name not in as_text:
            return
        first, before, where, column = self._types.setdefault(owner, (written, found, file, name))
        if written != first and column == name:
            raise UserError(
                f"column {name!r} is of type {short(before)} in {where.input.name} and {short(found)} in "
                f"{file.input.name}, so equal values would get different ids; cast it in one of them"
            )
        if written != first and arrow.TEXT_OR_WHOLE not in (written, first):
            raise UserError(
                f"columns {column!r} and {name!r} share their ids, and are of type {short(before)} in "
                f"{where.input.name} and {short(found)} in {file.input.name}, so equal values would get "
                "different ids; cast one of them"
            )

    def _about_headers(self, file: TableFile) -> str:
        if not isinstance(file, DelimitedFile) or self._options.columns is not None:
            return ""
        if other := file.other_delimiter:
            return f" (one name, as its first line has no {file.shown}; give --delimiter {other})"
        return " (from its first line; if that is a row, give --columns)"

    def _against(self, name: str, found: pa.DataType) -> str | None:
        """Return the reason why a column of this type cannot have its role, or None."""
        kind, bags, shown = arrow.classify_type(found), dict(self._options.bags), short(found)
        if kind == "nested":
            return f"it is of type {shown}, which is nested or unknown; only plain values and lists of these are read"
        if kind == "list" and name in self._options.split():
            return f"it is of type {shown}, a list; --test-column and --test-after take a column with one value per row"
        if name == self._options.label and kind == "other" and self._positive is not None and self._positive.orders:
            return (
                f"it is of type {shown}, and --positive {self._options.positive} compares numbers; make it a "
                "number, or a column of 0 and 1"
            )
        if name in bags:
            if kind != "list" and bags[name] is None:
                return f"it is of type {shown}, not a list; say what separates its values, such as --bag '{name}=|'"
            return None
        if kind == "list":
            return f"it is of type {shown}, a list; only --bag takes lists"
        if name in self._options.numeric and kind == "other":
            return f"it is of type {shown}, not numbers; name it with --categorical, or make it a number"
        return None


def _value_type(found: pa.DataType) -> pa.DataType:
    """Return the type of a column's values inside lists and dictionaries."""
    while arrow.classify_type(found) == "list" or pa.types.is_dictionary(found):
        found = found.value_type
    return found


def _type_name(found: pa.DataType) -> str:
    """Return the manifest's name of the type of a column's values; all kinds of text are "text"."""
    found = _value_type(found)
    return "text" if arrow.classify_type(found) == "text" and not pa.types.is_null(found) else str(found)


def _open(path: Path, options: TableOptions) -> TableFile:
    """Open a file in the format that its first bytes show."""
    source = open_input(path)
    found = find_format(source)
    if found == "text":
        return DelimitedFile(source, columns=options.columns, delimiter=options.delimiter, quotes=options.quotes)
    for flag, given in (
        ("--columns", options.columns is not None),
        ("--delimiter", options.delimiter is not None),
        ("--no-quotes", not options.quotes),
    ):
        if given:
            raise UserError(f"{flag} has no effect on {source.name}, which is {found}; leave it out")
    if not isinstance(source, Input):
        raise UserError(f"{source.name}: {found} can be read only from a file, not from a pipe")
    return ParquetTable(source) if found == "Parquet" else ArrowTable(source, stream=found == "an Arrow stream")
