"""Settings for reading values in training and serving: whitespace, missing-value markers, lists, hash buckets, labels.

This module returns values as text or numbers; other modules turn them into ids and scaled numbers.
"""

import ast
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hostdev.core.errors import UserError
from hostdev.core.progress import note
from hostdev.data import ragged
from hostdev.data.preprocess import columns as arrow
from hostdev.data.preprocess.columns import Codes, Positive, WrongValueError
from hostdev.data.schema import Targets
from hostdev.kernels.arrays import Array, Lengths, Mask, Numbers, Values
from hostdev.kernels.strings import hash_texts

ENDS = ("first", "last")
_QUOTED = "^(?s:'[^']*'|\"[^\"]*\"|[^'\"]*)$"  # one value of a list, quoted or not
GetColumn = Callable[[str], pa.Array]  # from a column's name to the column [n]


@dataclass(frozen=True, kw_only=True)
class ReadSettings:
    """Settings for reading the values of a feature.

    Attributes:
        column: The column's name in the file; None if it equals the feature's name.
        trimmed: Whether surrounding whitespace is removed, and text in square brackets is read as a list. False for
            data sets of earlier versions, which did neither.
        missing: Missing-value markers; bags omit them.
        separator: Separator of a bag's values in text; None if the file has lists.
        length: Maximum number of values in a bag, or None for no limit.
        end: Which values of a longer bag are kept: "first" or "last".
        buckets: Number of hash buckets; each value is replaced with its bucket's number. None to keep the values.
        decimal: Decimal separator of numbers in text.
        weights: Separator between a bag's value and its weight in text, such as ":"; None if the text has no weights.
        weights_column: Name of the column with a bag's weights, in the order of its values, or None.
        element: For a numeric column that is an element of a vector, its index; the vector has `length` numbers.
    """

    column: str | None = None
    trimmed: bool = True
    missing: tuple[str, ...] = ()
    separator: str | None = None
    length: int | None = None
    end: str = "last"
    buckets: int | None = None
    decimal: str = "."
    weights: str | None = None
    weights_column: str | None = None
    element: int | None = None

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "ReadSettings":
        """Return the settings that `as_json` stored; raise TypeError, ValueError or AttributeError if invalid."""
        return cls(**{**content, "missing": tuple(content.get("missing", ()))})

    @property
    def is_weighted(self) -> bool:
        """Whether the values of this bag have weights."""
        return self.weights is not None or self.weights_column is not None

    def as_json(self) -> dict[str, Any]:
        """Return the settings that differ from the defaults, except those that the manifest stores elsewhere."""
        stored = (field for field in fields(self) if field.name not in ("trimmed", "separator", "decimal", "element"))
        found = {
            field.name: getattr(self, field.name) for field in stored if getattr(self, field.name) != field.default
        }
        return {name: list(value) if isinstance(value, tuple) else value for name, value in found.items()}

    def within(self, missing: Iterable[str], decimal: str, separator: str | None, *, trimmed: bool) -> "ReadSettings":
        """Return these settings with those for all columns added; `separator` is a bag's, or None."""
        every = tuple(dict.fromkeys([*missing, *self.missing]))
        return replace(self, trimmed=trimmed, missing=every, separator=separator, decimal=decimal)

    def clean(self, values: pa.Array) -> pa.Array:
        """Return values [N] of any type, with texts trimmed and missing-value markers replaced with null.

        Raises WrongValueError for text that is not UTF-8.
        """
        if arrow.classify_type(values.type) != "text":
            return self._without_marks(values)
        texts = arrow.cast(values, pa.string(), "text in UTF-8")
        if self.trimmed and _may_have_blanks(texts):
            texts = pc.utf8_trim_whitespace(texts)
        if self.missing:
            is_missing = pc.is_in(texts, value_set=pa.array(self.missing, pa.string()))
            texts = pc.if_else(is_missing, pa.scalar(None, pa.string()), texts)
        return texts

    def _without_marks(self, values: pa.Array) -> pa.Array:
        """Return values that are not text, with null for those that equal a missing-value marker."""
        if not self.missing:
            return values
        if pa.types.is_floating(values.type):
            marks = pa.array(self._numbers, pa.float64())
            is_missing = pc.is_in(values.cast(pa.float64()), value_set=marks)
        else:
            is_missing = pc.is_in(values.cast(pa.string()), value_set=pa.array(self.missing, pa.string()))
        return pc.if_else(is_missing, pa.scalar(None, values.type), values)

    @cached_property
    def _numbers(self) -> list[float]:
        """The missing-value markers that are numbers."""
        found = []
        for mark in self.missing:
            try:
                found.append(float(mark))
            except ValueError:
                continue
        return found

    def label(self, array: pa.Array) -> pa.Array:
        """Return labels, with null for missing-value markers."""
        if not self.missing:
            return array
        array, _ = readable(arrow.decoded(array))
        return self.clean(array)

    def numbers(self, array: pa.Array) -> Numbers:
        """Return numbers as `columns.as_numbers` does, with NaN for missing-value markers."""
        return self._known(arrow.as_numbers(self._with_points(array)))

    def numbers_where_readable(self, array: pa.Array) -> tuple[Numbers, Mask]:
        """Return numbers as `columns.numbers_where_readable` does, with NaN for missing-value markers."""
        if self.is_usual:
            return arrow.numbers_where_readable(array)
        array, no_text = readable(arrow.decoded(array))
        numbers, wrong = arrow.numbers_where_readable(self._with_points(array))
        return self._known(numbers), wrong | no_text

    @property
    def is_usual(self) -> bool:
        """Whether numbers have a decimal point, no missing-value markers, and are not elements of a vector."""
        return not self.missing and self.decimal == "." and self.element is None

    def _with_points(self, array: pa.Array) -> pa.Array:
        """Return text with decimal points, and null for missing-value markers; return other types unchanged."""
        if self.is_usual:
            return array
        array = arrow.decoded(array)
        if arrow.classify_type(array.type) != "text":
            return array
        texts = self.clean(array)
        if self.decimal != ".":
            texts = pc.replace_substring(pc.replace_substring(texts, ".", ""), self.decimal, ".")
        return texts

    def _known(self, numbers: Numbers) -> Numbers:
        return np.where(np.isin(numbers, self._numbers), np.nan, numbers) if self._numbers else numbers

    def values(self, array: pa.Array) -> tuple[Codes, pa.StringArray]:
        """Dictionary-encode values as text: codes int32 [n], and the texts, "" for a missing value.

        Raises the same errors as `columns.as_text`.
        """
        return arrow.as_text(array, self.clean)

    def bags(self, array: pa.Array) -> tuple[Codes, pa.StringArray, Codes]:
        """Dictionary-encode the values of bags, from lists or from text with separators; omit missing values.

        Returns codes int32 [N], the texts, and the number of values of each row, int32 [n].
        """
        if arrow.classify_type(array.type) == "list":
            lengths = arrow.list_lengths(array).astype(np.int32)
            with arrow.in_lists(lengths):
                codes, texts = self.values(array.flatten())
        else:
            which, whole = arrow.as_text(array)
            lists = self.split(whole)
            codes, texts = self.values(lists.flatten())
            codes, lengths = ragged.take(
                codes, ragged.offsets_of(pc.list_value_length(lists).to_numpy(zero_copy_only=False)), which
            )
        there = pc.not_equal(texts, "").to_numpy(zero_copy_only=False)[codes]
        codes, lengths = self.known(codes, lengths, there)
        return codes, texts, lengths

    def known(self, values: Array, lengths: Array, there: Mask) -> tuple[Array, Lengths]:
        """Drop missing values, and each row's values beyond `length`; return the kept values and the rows' new lengths.

        Args:
            values: The concatenated values of all rows, [N].
            lengths: The number of values of each row, [n].
            there: Mask of the values that are not missing, [N].
        """
        ends = ragged.offsets_of(there)[ragged.offsets_of(lengths)]
        kept, lengths = values[there], np.diff(ends).astype(np.int32)
        if self.length is None or lengths.max(initial=0) <= self.length:
            return kept, lengths
        short = np.minimum(lengths, self.length)
        starts = ends[:-1] if self.end == "first" else ends[1:] - short
        return kept[ragged.places_of(starts, short)], short

    def flat_values(self, array: pa.Array) -> tuple[pa.Array, Codes]:
        """Return a bag's concatenated values [N], including missing ones, and each row's value count, int32 [n]."""
        if arrow.classify_type(array.type) == "list":
            return array.flatten(), arrow.list_lengths(array).astype(np.int32)
        codes, whole = arrow.as_text(array)
        lists = self.split(whole)
        ends = ragged.offsets_of(pc.list_value_length(lists).to_numpy(zero_copy_only=False))
        values, lengths = ragged.take(np.arange(ends[-1]), ends, codes)
        return lists.flatten().take(pa.array(values)), lengths

    def split(self, texts: pa.StringArray) -> pa.ListArray:
        """Split texts into values; if `trimmed`, a text in square brackets is read as a Python or JSON list."""
        assert self.separator is not None
        if not self.trimmed:
            return pc.split_pattern(texts, self.separator)
        in_brackets = pc.match_substring_regex(texts, r"^(?s:\s*\[.*\]\s*)$").to_numpy(zero_copy_only=False)
        if not in_brackets.any():
            return pc.split_pattern(texts, self.separator)
        inside = pc.replace_substring_regex(texts, r"^(?s:\s*\[(.*)\]\s*)$", r"\1")
        lists = pc.split_pattern(pc.if_else(pa.array(in_brackets), inside, texts), self.separator)
        values, ends = lists.flatten(), ragged.offsets_of(pc.list_value_length(lists).to_numpy(zero_copy_only=False))
        from_list = np.repeat(in_brackets, np.diff(ends))
        stripped = pc.utf8_trim_whitespace(values)
        cut = ~pc.match_substring_regex(stripped, _QUOTED).to_numpy(zero_copy_only=False) & from_list
        plain = pc.replace_substring_regex(stripped, "^(?s:['\"](.*)['\"])$", r"\1")
        values = pc.if_else(pa.array(from_list), plain, values)
        lists = pa.ListArray.from_arrays(pa.array(ends, pa.int32()), values)
        if not cut.any():
            return lists
        rows = lists.to_pylist()  # slow, but a separator inside quotes is rare
        for row in np.unique(np.searchsorted(ends, np.flatnonzero(cut), "right") - 1).tolist():
            rows[row] = _parse_list(texts[row].as_py(), rows[row])
        return pa.array(rows, pa.list_(pa.string()))

    def in_buckets(self, texts: pa.StringArray) -> pa.StringArray:
        """Replace each text except "" with its hash bucket's number as text, if values are hashed."""
        if self.buckets is None or not len(texts):
            return texts
        numbers = pa.array(hash_texts(*arrow.get_buffers(texts)) % np.uint64(self.buckets)).cast(pa.string())
        return pc.if_else(pc.equal(texts, ""), texts, numbers)


def readable(array: pa.Array) -> tuple[pa.Array, Mask]:
    """Replace text that is not UTF-8 with null; return the result and the mask of these rows, bool [n]."""
    if arrow.classify_type(array.type) != "text":
        return array, np.zeros(len(array), np.bool_)
    return arrow.cast_where_possible(array, pa.string())


def _may_have_blanks(texts: pa.StringArray) -> bool:
    """Return whether a text begins or ends with a byte that may be whitespace: a control byte, a space or non-ASCII."""
    if texts.null_count:
        texts = pc.fill_null(texts, "")
    offsets, data = arrow.get_buffers(texts)
    filled = np.flatnonzero(np.diff(offsets))
    ends = np.concatenate([data[offsets[:-1][filled]], data[offsets[1:][filled] - 1]])
    return bool(((ends <= ord(" ")) | (ends >= 128)).any())


def _parse_list(text: str, otherwise: list[str]) -> list[str]:
    """Parse a list of numbers and quoted texts; return `otherwise` if the text is not such a list."""
    try:
        found = ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return otherwise
    if not isinstance(found, list) or not all(isinstance(value, str | int | float | None) for value in found):
        return otherwise
    return ["" if value is None else str(value) for value in found]


def own_settings(options: Mapping[str, Any]) -> dict[str, ReadSettings]:
    """Return the per-feature settings in a manifest's options; raise UserError if they are invalid."""
    try:
        features = dict(options.get("features") or {})
        return {name: ReadSettings.from_json(one) for name, one in features.items()}
    except (TypeError, ValueError, AttributeError):
        raise UserError("manifest.json has invalid feature settings; preprocess the data again") from None


def all_readings(options: Mapping[str, Any], names: Iterable[str]) -> dict[str, ReadSettings]:
    """Return the reading settings of labels, weights or features by name, from a manifest's options.

    Raises UserError for invalid settings.
    """
    own, found = own_settings(options), {}
    for name in names:
        missing, decimal = options.get("missing") or (), options.get("decimal") or "."
        separator = (options.get("bags") or {}).get(name)
        trimmed = bool(options.get("trimmed", False))
        found[name] = own.get(name, ReadSettings()).within(missing, decimal, separator, trimmed=trimmed)
    return found


class Labels:
    """Reads the labels and weights of rows.

    Args:
        names: Names of all labels.
        targets: Which labels are numbers, and the name of the weight.
        rule: Which values are positive (see `Positive`), for labels that are not in `rules`; None means 1 and true.
        rules: Which values are positive, by label.
        readings: Reading settings by the name of a label or the weight.
        tells: Whether to print a line, once for each label, if a value such as -1 beside 0 and 1 becomes a negative
            label.
    """

    def __init__(
        self,
        names: tuple[str, ...],
        targets: Targets,
        rule: str | None,
        rules: Mapping[str, str],
        readings: Mapping[str, ReadSettings],
        *,
        tells: bool = False,
    ) -> None:
        self._names, self._targets, self._readings = names, targets, readings
        self._rules = {
            name: None if text is None else Positive.parse(text)
            for name in names
            if name not in targets.numeric
            for text in [rules.get(name, rule)]
        }
        self._untold = {name for name, one in self._rules.items() if tells and one is not None and one.op == "="}

    def column(self, name: str) -> str:
        """Return the name of the column from which a label or the weight is read."""
        return self._readings[name].column or name

    def read(self, get: GetColumn, n: int, known: Container[str] | None = None) -> Values:
        """Return the labels of n rows, float32 [n], or [n, labels] if there are several; NaN for unreadable labels.

        Args:
            known: Names of the columns that exist, or None if all do; labels of other columns are NaN.
        """
        each = [
            self._label(name, get) if known is None or self.column(name) in known else np.full(n, np.nan, np.float32)
            for name in self._names
        ]
        return each[0] if len(each) == 1 else np.stack(each, 1)

    def weights(self, get: GetColumn) -> Values | None:
        """Return the weights, float32 [n], or None if there is no weight; NaN for unreadable or negative weights."""
        name = self._targets.weight
        if name is None:
            return None
        return self._numbers(name, get, least=0)

    def require(self, get: GetColumn) -> None:
        """Raise WrongLabelError if a label or the weight of a single row cannot be read; `get` returns columns [1]."""
        for name in self._targets.names(self._names[0]):
            column = self.column(name)
            try:
                if name in self._rules:
                    arrow.as_labels(self._readings[name].label(get(column)), self._rules[name])
                else:
                    self._require_number(name, get)
            except WrongValueError as error:
                raise WrongLabelError(column, error) from None

    def _require_number(self, name: str, get: GetColumn) -> None:
        """Raise WrongValueError unless a numeric label, or the weight, of a single row is a valid number."""
        is_label = name in self._names
        if not np.isnan(self._numbers(name, get, least=-np.inf if is_label else 0)).any():
            return
        self._readings[name].numbers(get(self.column(name)))  # raises for text that is not a number
        raise WrongValueError(
            0, "the value is missing, or too large" if is_label else "the value is missing, negative, or too large"
        )

    def _label(self, name: str, get: GetColumn) -> Values:
        if name not in self._rules:
            return self._numbers(name, get, least=-np.inf)
        found = self._readings[name].label(get(self.column(name)))
        if name in self._untold:
            self._tell(name, found)
        try:
            return arrow.as_labels(found, self._rules[name])
        except WrongValueError:
            return arrow.labels_where_readable(found, self._rules[name])

    def _tell(self, name: str, labels: pa.Array) -> None:
        """Print a note if a number below 0, such as -1, becomes a negative label, and so does 0 or a larger number."""
        rule = self._rules[name]
        assert rule is not None
        values = arrow.decoded(labels)
        if len(values) == 0 or arrow.classify_type(values.type) not in ("text", "number"):
            return
        positive = arrow.parse_exactly(rule.value)
        others = [value for value in arrow.distinct_numbers(values) if value != positive]
        if min(others, default=0) < 0 <= max(others, default=-1) and name in self._untold:
            self._untold.discard(name)
            note(
                f"label {name!r}: --positive {rule.value} makes {min(others):g} a negative label, like "
                f"{max(others):g}; if {min(others):g} means that the label is unknown, give --missing={min(others):g}"
            )

    def _numbers(self, name: str, get: GetColumn, *, least: float) -> Values:
        """Return a column's numbers; NaN where missing, unreadable, less than `least`, or too large for float32."""
        numbers, unread = self._readings[name].numbers_where_readable(get(self.column(name)))
        with np.errstate(over="ignore"):
            found = np.asarray(numbers).astype(np.float32)
        found[unread | ~np.isfinite(found) | (found < least)] = np.nan
        return found


class WrongLabelError(UserError):
    """A label or weight cannot be read."""

    def __init__(self, column: str, error: WrongValueError) -> None:
        self.column = column
        super().__init__(str(error))
