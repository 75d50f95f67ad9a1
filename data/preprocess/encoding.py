"""Encoding of new rows into ids and scaled numbers with a data set's manifest and vocabulary, for prediction.

Nothing is learned: with a vocabulary, a value that was absent or too rare in training gets its id space's
out-of-vocabulary id.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hostdev.core.errors import UserError
from hostdev.data import ragged
from hostdev.data.batch import Batch
from hostdev.data.manifest import Manifest, check_learned
from hostdev.data.preprocess import columns as arrow
from hostdev.data.preprocess import criteo, scaling
from hostdev.data.preprocess.columns import WrongValueError, reject
from hostdev.data.preprocess.forms import EMPTY, TEXT, Written
from hostdev.data.preprocess.known import PlainRows, ValueIds, written_by_space
from hostdev.data.preprocess.lists import (
    WeightedValues,
    WrongNumberError,
    can_be_weights,
    read_numbers,
    read_weighted,
    require_numbers,
    require_weighted,
    vectors_in,
    with_elements,
)
from hostdev.data.preprocess.naming import listed
from hostdev.data.preprocess.raw import SourceLayout
from hostdev.data.preprocess.reading import Labels, all_readings, own_settings
from hostdev.data.preprocess.serving import Texts, WrongTypeError, format_texts, require_type
from hostdev.data.preprocess.vocabulary import HashBuckets
from hostdev.data.schema import Column
from hostdev.kernels.arrays import Array, LongIds, Mask, Values
from hostdev.kernels.strings import hash_texts


class WrongRowError(UserError):
    """A column has an invalid value; `row` is the row's index in the input, from 0; `reason` names the column."""

    def __init__(self, row: int, column: str, reason: str) -> None:
        self.row, self.reason = row, f"column {column!r}: {reason}"
        super().__init__(f"row {row + 1}, {self.reason}")


class Encoding:
    """Encodes new rows in the same way as the rows of a data set.

    Args:
        data: The data set's manifest.
        vocabulary: The vocabulary file, or None if ids are hashed.
    """

    def __init__(self, data: Manifest, vocabulary: Path | None) -> None:
        self._data, self.schema = data, data.schema
        _require_learned(data)
        self.is_criteo = not data.is_table
        scaled = data.options["dense"]
        of = scaled, self.schema.dense, scaling.own(data.options)
        self._scaling = scaling.fixed(*of, data.statistics, signed=not self.is_criteo)
        self._most = scaling.largest(*of, data.statistics)
        names = (*self.schema.labels, *self.schema.dense, *(column.name for column in self.schema.columns))
        options = {} if self.is_criteo else data.options
        readings = all_readings(options, names)
        self._readings = with_elements(readings, vectors_in(options), own_settings(options))
        self._sources = {name: reading.column or name for name, reading in self._readings.items()}
        rules = data.options.get("positive"), data.options.get("positives", {})
        self._labels = Labels(self.schema.labels, self.schema.targets, *rules, self._readings)
        self._spaces = {space.name: space for space in self.schema.spaces}
        self._path = vocabulary
        self._type = np.dtype(data.id_type)

    @cached_property
    def _known(self) -> ValueIds | HashBuckets:
        """The mapping from values to ids, loaded on first use because loading takes time."""
        buckets = self._data.options.get("hash_buckets")
        if buckets is not None:
            columns = self.schema.columns
            ids, bags = (tuple(column for column in columns if column.kind == kind) for kind in ("id", "bag"))
            hashed = criteo.LAYOUT.hashed if self.is_criteo else None
            return HashBuckets(
                buckets,
                SourceLayout(self.schema.label, self.schema.dense, ids, bags, hashed, targets=self.schema.targets),
            )
        assert self._path is not None
        return ValueIds(self._path, self._data)

    @cached_property
    def written(self) -> dict[str, Written]:
        """How the values of each id space were written in training, by the space's name."""
        if self.is_criteo:
            return {space.name: Written(frozenset({TEXT}), ("text",)) for space in self.schema.spaces}
        known = self._known
        return written_by_space(self._data, {} if isinstance(known, HashBuckets) else known.written)

    def prepare(self) -> None:
        """Read the vocabulary now instead of on first use."""
        _ = self._known, self.written

    @property
    def separators(self) -> Mapping[str, str | None]:
        """By column with a bag, a bag's weights or a vector: the separator in its text; None if training read lists."""
        vectors = (name for name in self.schema.dense if self._readings[name].element is not None)
        found = {self._sources[name]: self._readings[name].separator for name in [*self.schema.bags, *vectors]}
        return found | {name: self._readings[bag].separator for bag, name in self._weights_columns.items()}

    @cached_property
    def _weights_columns(self) -> dict[str, str]:
        """For each bag whose weights have a column of their own, that column's name."""
        readings = ((name, self._readings[name].weights_column) for name in self.schema.weighted_bags)
        return {name: column for name, column in readings if column is not None}

    @property
    def numeric_columns(self) -> set[str]:
        """The columns that are used only as numbers, not for ids."""
        ids = {self._sources[column.name] for column in self.schema.columns}
        return {self._sources[name] for name in self.schema.dense} - ids

    @cached_property
    def text_columns(self) -> set[str]:
        """The columns for ids whose values were text in training's files."""
        kinds = {name: kind["types"] for name, kind in self._data.kinds.items()}
        return {self._sources[name] for name in self._sources if kinds.get(name) == ["text"]}

    @property
    def rates(self) -> Mapping[str, float]:
        """By id space, the share of training values that are out of vocabulary; empty if ids are hashed."""
        return {} if isinstance(self._known, HashBuckets) else self._known.rates

    @property
    def label_columns(self) -> list[str]:
        """The names of the columns with labels."""
        return list(map(self._labels.column, self.schema.labels))

    def columns(self) -> list[str]:
        """Return the names of the required columns, without the labels."""
        names = (*self.schema.dense, *(column.name for column in self.schema.columns))
        return list(dict.fromkeys([*(self._sources[name] for name in names), *self._weights_columns.values()]))

    def require(self, have: Sequence[Any]) -> None:
        """Raise UserError unless `have` contains each required column once."""
        known = set(have)
        for name in self.columns():
            if name not in known:
                raise UserError(f"the rows have no column {name!r}; they have {listed(have) or 'none'}")
            if len(known) < len(have) and list(have).count(name) > 1:
                raise UserError(f"the rows have {list(have).count(name)} columns named {name!r}; keep one")

    def encode(self, rows: pa.RecordBatch) -> Batch:
        """Encode rows with named columns as a batch whose labels are all NaN.

        Raises UserError for a missing column or a wrong type, and WrongRowError for an invalid value.
        """
        rows = self._with_lists(rows)
        self._require_types(rows)
        try:
            numbers = require_numbers(
                self.schema.dense, self._readings, lambda name: arrow.combined(rows[name]), len(rows)
            )
        except WrongNumberError as error:
            raise WrongRowError(error.row, error.column, str(error)) from None
        for i, name in enumerate(self.schema.dense):
            if len(large := np.flatnonzero(np.abs(numbers[:, i]) > self._most[i])):
                raise WrongRowError(int(large[0]), self._sources[name], f"{numbers[large[0], i]:g} is too large")
        labels = np.full(
            (len(rows), len(self.schema.labels)) if self.schema.targets.more else len(rows), np.nan, np.float32
        )
        return self._encoded(rows, labels, numbers, self._weighted(rows, checked=True))

    def encode_readable(self, rows: pa.RecordBatch) -> tuple[Batch, LongIds]:
        """Encode the rows whose numbers and weights are valid; return them as a batch, and their indices in `rows` [m].

        Missing or unreadable labels are NaN. Raises the same errors as `encode`, except for numbers and weights.
        """
        rows = self._with_lists(rows)
        self._require_types(rows)
        label = self._labels.read(lambda name: arrow.combined(rows[name]), len(rows), rows.schema.names)
        get = (self.schema.dense, self._readings, lambda name: arrow.combined(rows[name]), len(rows))
        numbers, unreadable = read_numbers(*get)
        large = np.abs(numbers) > self._most
        unreadable |= large.any(axis=1)
        numbers[large] = np.nan
        weighted = self._weighted(rows, checked=False)
        for one in weighted.values():
            unreadable |= one.wrong
        batch = self._encoded(rows, label, numbers, weighted)
        kept = np.flatnonzero(~unreadable)
        return (batch if len(kept) == len(rows) else _take_rows(batch, kept)), kept

    def _with_lists(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """Return the rows with null-typed columns cast to lists, where training read bags or weights from lists."""
        lists = {}
        for column in self.schema.columns:
            if column.kind == "bag" and self._separator(column) is None:
                lists[self._sources[column.name]] = pa.list_(pa.string())
                if (weights := self._weights_columns.get(column.name)) is not None:
                    lists[weights] = pa.list_(pa.float64())
        for name, as_lists in lists.items():
            if name in rows.schema.names and pa.types.is_null(rows[name].type):
                rows = rows.set_column(rows.schema.names.index(name), name, arrow.combined(rows[name]).cast(as_lists))
        return rows

    def _require_types(self, rows: pa.RecordBatch) -> None:
        """Raise UserError unless the required columns are present and of readable types."""
        self.require(rows.schema.names)
        for name in self.schema.dense:
            kind = arrow.classify_type(found := rows.schema.field(self._sources[name]).type)
            if kind == "list" and self._readings[name].element is not None:
                continue
            if kind in ("list", "nested", "other"):
                raise UserError(f"column {self._sources[name]!r} is of type {found}; expected one number per row")
        for column in self.schema.columns:
            name = self._sources[column.name]
            kind, separator = arrow.classify_type(found := rows.schema.field(name).type), self._separator(column)
            if column.kind == "id" and kind in ("list", "nested"):
                raise UserError(f"column {name!r} is of type {found}; expected one value per row")
            if column.kind == "bag" and kind != "list" and (kind == "nested" or not separator):
                raise UserError(f"column {name!r} is of type {found}; expected a list of values per row")
            try:
                if (weights := self._weights_columns.get(column.name)) is not None:
                    of_weights = rows.schema.field(weights).type
                    if not can_be_weights(of_weights, separator):
                        raise UserError(
                            f"column {weights!r} is of type {of_weights}; expected a list of weights per row"
                        )
                require_type(found.value_type if kind == "list" else found, self.written[column.space])
            except WrongTypeError as error:
                raise UserError(f"column {name!r} {error}") from None

    def _weighted(self, rows: pa.RecordBatch, *, checked: bool) -> dict[str, WeightedValues]:
        """Return each weighted bag's values and weights; if `checked`, raise WrongRowError for an invalid weight."""
        read = require_weighted if checked else read_weighted
        found = {}
        for name in self.schema.weighted_bags:
            try:
                found[name] = read(self._readings[name], name, lambda column: arrow.combined(rows[column]))
            except WrongValueError as error:
                raise WrongRowError(error.row, self._sources[name], str(error)) from None
        return found

    def _separator(self, column: Column) -> str | None:
        return self._readings[column.name].separator

    def _encoded(
        self, rows: pa.RecordBatch, label: Values, numbers: Array, weighted: Mapping[str, WeightedValues]
    ) -> Batch:
        """Encode rows with the given labels, [n] or [n, labels], numbers [n, dense columns] and weighted bags."""
        ids = np.empty((len(rows), len(self.schema.ids)), np.int64)
        bags, bag_weights = {}, {}
        place = 0
        for column in self.schema.columns:
            name, reading = self._sources[column.name], self._readings[column.name]
            found = arrow.combined(rows[name])
            try:
                if column.kind == "id":
                    ids[:, place], _ = self._find_ids(column, found)
                    place += 1
                else:
                    given = weighted.get(column.name)
                    values, lengths = reading.flat_values(found) if given is None else given[:2]
                    with arrow.in_lists(lengths):
                        known, missing = self._find_ids(column, values)
                    known, new_lengths = reading.known(known, lengths, ~missing)
                    bags[column.name] = known.astype(self._type), new_lengths
                    if given is not None:
                        kept, _ = reading.known(given.weights, lengths, ~missing)
                        bag_weights[column.name] = kept.astype(np.float32)
            except WrongTypeError as error:
                raise UserError(f"column {name!r} {error}") from None
            except WrongValueError as error:
                raise WrongRowError(error.row, name, str(error)) from None
        dense = self._scaling.transform(numbers)
        return Batch(label, dense, ids.astype(self._type), bags, bag_weights=bag_weights)

    @cached_property
    def plain(self) -> PlainRows | None:
        """The encoder of rows of plain Python values, or None if a column has a setting that it does not support.

        These settings are weights, a column's own hash buckets, missing-value markers, vectors and decimal commas.
        """
        readings = [self._readings[column.name] for column in self.schema.columns]
        if (
            self.schema.weighted_bags
            or not all(self._readings[name].is_usual for name in self.schema.dense)
            or any(reading.missing or reading.buckets is not None for reading in readings)
        ):
            return None
        return PlainRows(self._data, self._readings, self.written, self._known, self._scaling, self._most)

    def encode_criteo(self, rows: Any) -> Batch:
        """Encode the `raw.RawRows` of Criteo's parser as a batch."""
        ids = np.empty(rows.keys.shape, np.int64)
        known = self._known
        if isinstance(known, HashBuckets):
            missing = [rows.missing[column.space] for column in self.schema.columns]
            ids, _ = known.encode(rows.keys, np.arange(len(rows)), missing)
        else:
            for i, column in enumerate(self.schema.columns):
                texts = criteo.hex_text(np.ascontiguousarray(rows.keys[:, i]))
                ids[:, i], _ = self._find_ids(column, texts)
        return Batch(rows.label, self._scaling.transform(rows.numbers), ids.astype(self._type), {})

    def source(self, name: str) -> str:
        """Return the name of the column that the label or feature `name` is read from."""
        return self._sources[name]

    def find_ids(self, name: str, values: pa.Array) -> LongIds:
        """Return the ids of values [N] of the column `name`, int64 [N]; the out-of-vocabulary id for unknown ones.

        Raises UserError for values that cannot be compared with those of the data set.
        """
        [column] = (column for column in self.schema.columns if column.name == name)
        try:
            return self._find_ids(column, values)[0]
        except (WrongTypeError, WrongValueError) as error:
            raise UserError(f"column {name!r}: {error}") from None

    def _find_ids(self, column: Column, values: pa.Array) -> tuple[LongIds, Mask]:
        """Return the ids of values [N] of any type, and a mask of missing values [N]."""
        codes, some = arrow.distinct(arrow.decoded(values))
        try:
            ids, missing = self._find_distinct_ids(column, some)
        except WrongValueError as error:
            raise WrongValueError(int(np.flatnonzero(codes == error.row)[0]), str(error)) from None
        return ids[codes], missing[codes]

    def _find_distinct_ids(self, column: Column, values: pa.Array) -> tuple[LongIds, Mask]:
        """Return the ids of distinct values [N], and a mask of the missing values [N], which are omitted from bags."""
        known, written, reading = self._known, self.written[column.space], self._readings[column.name]
        if column.kind == "bag" or reading.missing:  # EMPTY makes "" the text of missing values
            written = Written(written.forms | {EMPTY}, written.types)
        hashed = isinstance(known, HashBuckets) or reading.buckets is not None
        found = format_texts(reading.clean(values), written, hashed=hashed)
        missing = pc.equal(pc.fill_null(found.texts[0], "-"), "").to_numpy(zero_copy_only=False)
        if hashed:
            texts = reading.in_buckets(pc.coalesce(*found.texts, found.fallback))
        if isinstance(known, HashBuckets):
            keys = _criteo_keys(texts) if self.is_criteo else hash_texts(*arrow.get_buffers(texts)).view(np.int64)
            return known.ids_of(keys, self.schema.columns.index(column)), missing
        ids = known.find(column.space, texts) if hashed else self._look_up(known, column.space, found, values.type)
        return np.where(ids < 0, self._spaces[column.space].oov, ids), missing

    def _look_up(self, known: ValueIds, space: str, found: Texts, of: pa.DataType) -> LongIds:
        """Return the ids of values, found by the texts that they may have had in training; -1 for unknown values.

        Raises WrongValueError for a value that matches several ids, or may have had yet another text.
        """
        ids = np.full(len(found.fallback), -1, np.int64)
        if arrow.classify_type(of) == "text" and found.texts[0] is not found.fallback:
            ids = known.find(space, found.fallback)  # an exact match with training decides
        verbatim = ids >= 0
        several = "was written in several ways in training, each with its own id; give it as text, in one of these ways"
        for texts in found.texts:
            texts = pc.utf8_lower(texts) if self.is_criteo else texts
            these = known.find(space, pc.fill_null(texts, ""))
            these[texts.is_null().to_numpy(zero_copy_only=False)] = -1
            reject((ids >= 0) & (these >= 0) & ~verbatim, lambda row: f"{found.fallback[row]} {several}")
            ids = np.where(ids < 0, these, ids)
        unsure = "may have been written differently in training; give it as the text that it was in training"
        reject(found.doubtful & (ids < 0), lambda row: f"{found.fallback[row]} {unsure}")
        return ids


def _require_learned(data: Manifest) -> None:
    """Raise UserError unless a manifest has every entry needed to encode new rows."""
    shape = len(data.schema.dense), len(data.schema.ids)
    try:
        check_learned(data.options, data.statistics, data.schema, data.id_type, data.vocabulary)
        if not data.is_table and shape != (criteo.DENSE, criteo.CATEGORICAL):
            raise ValueError("an invalid value of preset")
    except ValueError as error:
        raise UserError(f"the data set's manifest.json is broken ({error}); preprocess the data again") from None


def _criteo_keys(texts: pa.Array) -> LongIds:
    """Parse texts as Criteo's 32-bit values; raise UserError for an invalid one."""
    keys, wrong = criteo.hex_values(texts.cast(pa.binary()))
    if wrong.any():
        shown = texts[int(np.flatnonzero(wrong)[0])].as_py()
        raise UserError(f"{shown[:40]!r} is neither 8 hexadecimal digits nor empty")
    return keys


def _take_rows(batch: Batch, rows: LongIds) -> Batch:
    """Return the selected rows of a batch."""
    offsets = {name: ragged.offsets_of(lengths) for name, (_, lengths) in batch.bags.items()}
    return replace(
        batch,
        label=batch.label[rows],
        dense=batch.dense[rows],
        ids=batch.ids[rows],
        bags={name: ragged.take(values, offsets[name], rows) for name, (values, _) in batch.bags.items()},
        bag_weights={name: ragged.take(values, offsets[name], rows)[0] for name, values in batch.bag_weights.items()},
    )
