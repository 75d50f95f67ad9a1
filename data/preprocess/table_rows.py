"""Conversion of a table's rows to raw rows: labels, numbers and values, by the columns' roles.

A row is rejected, like a malformed line of text, if a label, a weight, a number, or the value for --test-after or
--validation-after cannot be read.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from hostdev.core.errors import UserError
from hostdev.data.preprocess import columns as arrow
from hostdev.data.preprocess.columns import WrongValueError, reject
from hostdev.data.preprocess.comparing import is_after, is_after_where_readable
from hostdev.data.preprocess.files import Chunk, TableFile
from hostdev.data.preprocess.forms import EMPTY, INTEGER, LARGE_FLOAT, PADDED, TEXT, WHOLES, each_form
from hostdev.data.preprocess.lists import (
    WrongNumberError,
    encode_weighted,
    read_numbers,
    read_weighted,
    require_numbers,
    require_weighted,
)
from hostdev.data.preprocess.naming import short
from hostdev.data.preprocess.raw import InvalidRowError, RawRows, RejectedLines, SourceLayout
from hostdev.data.preprocess.reading import Labels, ReadSettings, WrongLabelError
from hostdev.data.preprocess.serving import large_float
from hostdev.data.preprocess.table_options import TableOptions
from hostdev.data.schema import columns_of
from hostdev.kernels.arrays import Mask
from hostdev.kernels.strings import TextMap, hash_texts

_NOTHING = np.zeros(2, np.int32), np.zeros(0, np.uint8)  # the text "", for a missing value
_INTEGERS = frozenset({INTEGER})
_FLAGS = {1: "--test-after", 2: "--validation-after"}
_SHOWN = 40  # characters per value of a rejected row
_NO_NUMBER = (
    "; a missing number is empty, NA, or a value given by --missing; if the column has other values, name the column "
    "with --categorical"
)


def value_type(found: pa.DataType) -> pa.DataType:
    """Return the type of a column's values; for lists and dictionaries, the type of the values in them."""
    while arrow.classify_type(found) == "list" or pa.types.is_dictionary(found):
        found = found.value_type
    return found


@dataclass
class _Rows:
    """Some rows of a chunk."""

    chunk: Chunk
    batch: pa.RecordBatch
    places: npt.NDArray[np.int64] | None = None  # the rows' indices in the chunk; None for all rows

    def column(self, name: str) -> pa.Array:
        """Return the column with this name."""
        return self.batch.column(self.batch.schema.get_field_index(name))

    def number(self, row: int) -> int:
        """Return the number of the row at index `row`, as `Chunk.number` does."""
        return self.chunk.number(row if self.places is None else int(self.places[row]))

    def take(self, places: npt.NDArray[np.int64]) -> "_Rows":
        """Return the rows at these indices of the chunk."""
        return _Rows(self.chunk, self.batch.take(pa.array(places)), places)


@dataclass
class _Read:
    """The columns that may have unreadable values, and a mask of the rows with such a value, bool [n]."""

    label: npt.NDArray[np.float32]
    numbers: npt.NDArray[np.float64]
    splits: npt.NDArray[np.uint8] | None
    wrong: Mask
    weight: npt.NDArray[np.float32] | None

    def take(self, places: npt.NDArray[np.int64]) -> "_Read":
        """Return the rows at these indices."""
        splits = None if self.splits is None else self.splits[places]
        weight = None if self.weight is None else self.weight[places]
        return _Read(self.label[places], self.numbers[places], splits, self.wrong[places], weight)


class RowParser:
    """Converts the rows of files to raw rows.

    Args:
        files: All files of the table; the types of a column must be compatible.
    """

    def __init__(self, options: TableOptions, files: Sequence[TableFile]) -> None:
        self._options, self._files, self._layout = options, files, options.layout()
        self._readings = options.readings()
        rules = options.positive, options.positives
        self._labels = Labels(options.labels(), options.targets, *rules, self._readings, tells=True)
        self._columns = {name: options.column(name) for name in options.roles()}
        self._owners = dict(options.share)

    def parse(self, file: TableFile, chunk: Chunk, *, hashed: bool, split: int = 0) -> RawRows:
        """Return a chunk's rows; all belong to `split` if it is not 0.

        A key is the hash of the value's text if `hashed` is true, otherwise the text's index within the id space.

        Raises InvalidRowError for an invalid value of a column with ids, and UserError for values of a type that cannot
        be read.
        """
        rows, rejected, column = _Rows(chunk, chunk.batch), chunk.rejected, self._columns[self._options.label]
        layout, keys = self._layout, _Keys(self._layout, hashed=hashed)
        try:
            read = self._read(rows, split)
            if read.wrong.any():
                rejected = rejected.merge(self._rejected(file, rows, np.flatnonzero(read.wrong)))
                kept = np.flatnonzero(~read.wrong)
                rows, read = rows.take(kept), read.take(kept)
            bags: list[tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]] = []
            bag_weights: dict[int, npt.NDArray[np.float32]] = {}
            ids, forms = np.empty((len(layout.ids), len(rows.batch)), np.int64), {}
            for i, of in enumerate(layout.ids):
                column, reading = self._columns[of.name], self._readings[of.name]
                codes, texts = reading.values(rows.column(column))
                forms[of.name] = self._forms(of.name, file, codes, texts)
                ids[i] = keys.find(of.space, codes, reading.in_buckets(texts))
            for i, of in enumerate(layout.bags):
                column, reading = self._columns[of.name], self._readings[of.name]
                if of.weighted:
                    codes, texts, lengths, bag_weights[i] = encode_weighted(reading, of.name, rows.column)
                else:
                    codes, texts, lengths = reading.bags(rows.column(column))
                forms[of.name] = self._forms(of.name, file, None, texts)
                bags.append((keys.find(of.space, codes, reading.in_buckets(texts)), lengths))
        except WrongValueError as error:
            reason = f"column {column!r}: {error}"
            raise InvalidRowError(file.input.name, rows.number(error.row), reason) from None
        except pa.ArrowMemoryError:
            raise
        except pa.ArrowException as error:  # an unforeseen type or value
            raise UserError(
                f"{file.input.name}, column {column!r}: its values, of type {short(file.get_type(column))}, cannot be "
                f"read ({short(error)}); write them as another type, such as text"
            ) from error
        texts_by_space, missing = keys.texts()
        return RawRows(
            *(read.label, read.numbers, ids.T, tuple(bags), rejected, read.splits),
            texts=texts_by_space,
            missing=missing,
            forms=forms,
            weight=read.weight,
            bag_weights=bag_weights,
        )

    def _read(self, rows: _Rows, split: int) -> _Read:
        """Read labels, weights, numbers, and each row's split."""
        options, n = self._options, len(rows.batch)
        label, weight = self._labels.read(rows.column, n), self._labels.weights(rows.column)
        wrong: Mask = np.logical_or.reduce(list(map(np.isnan, columns_of(label))))
        if weight is not None:
            wrong = wrong | np.isnan(weight)
        for of in self._layout.bags:
            if of.weighted:
                with suppress(WrongValueError):  # `parse` reports a column that cannot be read at all
                    wrong = wrong | read_weighted(self._readings[of.name], of.name, rows.column).wrong
        numbers, unread = read_numbers(options.numeric, self._readings, rows.column, n)
        wrong = wrong | unread
        splits = np.full(n, split, np.uint8)
        pairs = (options.validation_column, options.validation_after), (options.test_column, options.test_after)
        for number, (column, after) in zip((2, 1), pairs, strict=True):  # a test row is never a validation row
            if split:
                break
            if column is not None:
                codes, texts = ReadSettings(trimmed=options.trimmed).values(rows.column(column[0]))
                splits[pc.equal(texts, column[1]).to_numpy(zero_copy_only=False)[codes]] = number
            if after is not None:
                later, unread = is_after_where_readable(rows.column(after[0]), after[1], _FLAGS[number])
                splits[later] = number
                wrong = wrong | unread
        chosen = split or options.split() or options.test_files or options.validation_files
        return _Read(label, numbers, splits if chosen else None, wrong, weight)

    def _rejected(self, file: TableFile, rows: _Rows, places: npt.NDArray[np.int64]) -> RejectedLines:
        """Return the rows at these indices as malformed lines."""

        def look(i: int) -> tuple[str, str]:
            row = rows.take(places[i : i + 1])
            shown = (f"{name}={short(value, _SHOWN)}" for name, value in row.batch.to_pylist()[0].items())
            return self._reason(row), ", ".join(shown)

        numbers = [rows.number(place) - rows.chunk.first + file.lines_before for place in places.tolist()]
        return RejectedLines(file.input.name, numbers, look)

    def _reason(self, row: _Rows) -> str:
        """Return why a row cannot be read."""
        options, column = self._options, ""
        try:
            self._labels.require(row.column)
            require_numbers(options.numeric, self._readings, row.column, 1)
            for of in self._layout.bags:
                if of.weighted:
                    column = self._columns[of.name]
                    require_weighted(self._readings[of.name], of.name, row.column)
            for number, after in ((2, options.validation_after), (1, options.test_after)):
                if after is not None:
                    column = after[0]
                    is_after(row.column(column), after[1], _FLAGS[number])
        except WrongLabelError as error:
            return f"column {error.column!r}: {error}"
        except WrongNumberError as error:
            return f"column {error.column!r}: {error}{_NO_NUMBER}"
        except WrongValueError as error:
            return f"column {column!r}: {error}"
        raise AssertionError("all values of the row can be read")

    def _forms(self, name: str, file: TableFile, codes: arrow.Codes | None, texts: pa.StringArray) -> frozenset[int]:
        """Return the forms in which a column's values are written.

        `codes` has the index of each row's text; None for a bag.
        Raises WrongValueError for ambiguous text, and for numbers that may be written differently in another column or
        file with the same ids.
        """
        if pa.types.is_integer(value_type(file.get_type(self._columns[name]))):
            return _INTEGERS if pc.all(pc.not_equal(texts, "")).as_py() else _INTEGERS | {EMPTY}
        each = each_form(texts)
        forms = frozenset(np.unique(each).tolist())
        where = self._typed_numbers.get(self._owners.get(name, name))
        is_text = arrow.classify_type(value_type(file.get_type(self._columns[name]))) == "text"
        try:
            if TEXT not in forms:
                reject(each == LARGE_FLOAT, lambda number: large_float(texts[number].as_py()))
            if where and is_text:
                two = f"{where}, so that one value would get two ids; write equal values the same way"
                reject(
                    np.isin(each, list(PADDED | WHOLES)),
                    lambda number: f"the column has text such as {texts[number].as_py()!r}, but {two}",
                )
        except WrongValueError as error:
            error.row = 0 if codes is None else int(np.flatnonzero(codes == error.row)[0])
            raise
        return forms

    @cached_property
    def _typed_numbers(self) -> dict[str, str]:
        """For each id space with columns of numeric types: the name, type and file of one of them, as text."""
        found = {}
        for file in reversed(self._files):
            for name in self._options.roles():
                column = self._columns[name]
                if arrow.classify_type(of := value_type(file.get_type(column))) == "number":
                    found[self._owners.get(name, name)] = f"column {column!r} is {of} in {file.input.name}"
        return found


class _Keys:
    """Assigns keys to values: indices of distinct texts within an id space, or hashes of the texts."""

    def __init__(self, layout: SourceLayout, *, hashed: bool) -> None:
        self._layout, self._hashed = layout, hashed
        self._seen = {space: TextMap() for space in layout.spaces}

    def find(self, space: str, codes: arrow.Codes, texts: pa.StringArray) -> npt.NDArray[np.int64]:
        """Return the keys, int64 [n], of values; `codes` [n] has the index of each value's text in `texts`."""
        offsets, content = arrow.get_buffers(texts)
        if self._hashed:
            return hash_texts(offsets, content).view(np.int64)[codes]
        return self._seen[space].add(offsets, content).astype(np.int64)[codes]

    def texts(self) -> tuple[dict[str, pa.Array] | None, dict[str, int]]:
        """Return, by id space, the texts of all keys, or None if keys are hashes; and the key of a missing value."""
        if self._hashed:
            return None, dict.fromkeys(self._seen, int(hash_texts(*_NOTHING).view(np.int64)[0]))
        seen = self._seen.items()
        texts = {space: arrow.make_texts(*values.take(np.arange(len(values)))) for space, values in seen}
        return texts, {space: int(values.find(*_NOTHING)[0]) for space, values in seen}
