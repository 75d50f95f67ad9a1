"""Samples of a table's columns, and the roles that `preprocess suggest` finds for columns other than features.

The roles are label, weight, time, position, and leak.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from hostdev.core.errors import UserError
from hostdev.data.preprocess import columns as arrow
from hostdev.data.preprocess.columns import MISSING_NUMBERS
from hostdev.data.preprocess.files import TableFile
from hostdev.data.preprocess.naming import short
from hostdev.kernels.arrays import Mask

ROWS = 100_000  # maximum number of rows to examine
_MARKS = ("?", r"\N", "-", "unknown", "Unknown", "UNKNOWN", "missing", "none", "<NA>", "(null)")
_RARE = 0.01  # one of _MARKS is a missing-value marker if at least this share of the rows has it
_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
_LABELS = re.compile(
    r"((is|was|has)_)?(label|click(ed|s)?|clk|target|y|conver(sion|t|ted)|purchased?|buy|bought|liked?|churn(ed)?)"
)
_RATINGS = re.compile(r"((book|film|item|movie|product|review|song|user)_)?(ratings?|stars?|score)|overall")
_OUTCOMES = {
    *("label", "target", "click", "clicks", "clicked", "clk", "nonclk", "convert", "converted", "conversion"),
    *("purchase", "purchased", "buy", "bought", "order", "ordered", "reordered", "install", "installed", "like"),
    *("liked", "share", "shared", "follow", "followed", "comment", "commented", "cart", "fav", "favorite", "favourite"),
    *("churn", "churned", "subscribed", "signup", "registered", "watched", "finished", "completed", "skipped", "cvr"),
}
_BEFORE = {"last", "prior", "previous", "prev", "past", "ever", "before", "history", "old"}
_POSITIVE = {"1", "1.0", "true", "t", "yes", "y", "positive", "pos", "click", "clicked", "buy", "bought", "converted"}
_NEGATIVE = ("0", "0.0", "false", "no", "n", "f", "-1", "")
_BINARY = ({"0", "1", "0.0", "1.0", "true", "false"}, {"yes", "no"}, {"y", "n"}, {"t", "f"}, {"-1", "1"}, {"-1", "+1"})
_WEIGHTS = re.compile(
    r"((sample|row|instance|example|case|importance|loss|train|training|ips|inverse_propensity)_weights?|ips|fnlwgt"
    r"|weight_?column)"
)
_MAYBE_WEIGHTS = re.compile(
    r"w|((sampling|class|pos|neg|positive|negative|label|user|event|click|inverse)_)?(weights?|wgt|importance)"
    r"|(.*_)?(propensity|propensity_score|ips_score)"
)
_IDS = re.compile(
    r"(.*[^a-z])?(id|code|no|nr|number|zip|postcode|sku|isbn|asin|category|type|class)(_?\d+)?|C_?\d+"
    r"|(user|item|movie|film|ad|product|session|device|customer|client|article|site|app|book|song|query|shop)_?id"
    r"|([acgipsuv]|gu|uu)id",
    re.I,
)
_CHANCE = 1e-4  # equal labels in some rows suggest a leak if their probability by chance is lower than this
_LEAST = 20  # minimum rows of each label; with fewer, numbers that separate the labels do not suggest a leak
_YEAR, _MONTH, _DAY = r"(?:19|20|21)\d\d", r"(?:0?[1-9]|1[0-2])", r"(?:0?[1-9]|[12]\d|3[01])"
_MONTH_NAME = r"(?i:jan|feb|mar|mär|apr|may|mai|jun|jul|aug|sep|okt|oct|nov|dec|dez)[a-zäé]*\.?"
_WEEKDAY = r"(?:(?i:mon|tue|wed|thu|fri|sat|sun)[a-z]*,? )?"
_DATE = "|".join([
    rf"{_YEAR}[-/.]{_MONTH}[-/.]{_DAY}",
    rf"{_YEAR}-(?:0[1-9]|1[0-2]|W\d\d(?:-\d)?)",
    rf"{_YEAR}(?:0[1-9]|1[0-2])(?:0[1-9]|[12]\d|3[01])",
    rf"\d{{1,2}}([-/]|\. ?)\d{{1,2}}([-/]|\. ?){_YEAR}",
    r"\d\d[-/.]\d\d[-/.]\d\d|\d{1,2}/\d{1,2}/\d\d",
    rf"{_DAY}[-/. ]{{1,2}}{_MONTH_NAME}[-/, ]{{1,2}}(?:{_YEAR}|\d\d)",
    rf"{_MONTH_NAME} {_DAY}(?:st|nd|rd|th)?,? {_YEAR}",
])  # fmt: skip
_CLOCK = r"(?:[01]?\d|2[0-4]):?[0-5]\d(?::?[0-6]\d(?:[.,]\d+)?)?(?: ?[AaPp]\.?[Mm]\.?)?"
_COLONS = r"(?:[01]?\d|2[0-4]):[0-5]\d(?::[0-6]\d(?:[.,]\d+)?)?(?: ?[AaPp]\.?[Mm]\.?)?"
_ZONE = r"(?: ?(?:Z|UTC|GMT|[A-Z]{3,4}|[-+]\d\d(?::?\d\d)?))?(?: ?\[[A-Za-z_/]+\])?(?: \([A-Z]+\))?"
_TIME_TEXT = (
    rf"{_WEEKDAY}(?:{_DATE})(?:(?:[T:_]| at |,? +){_CLOCK}{_ZONE})?"
    rf"|(?:T?{_COLONS}{_ZONE})"
    rf"|{_WEEKDAY}{_MONTH_NAME} {{1,2}}{_DAY} {_COLONS}(?: [A-Z]{{3,4}})? {_YEAR}"
)
_TIME_WORDS = {*("time", "timestamp", "stamp", "date", "datetime", "day", "ts", "dt", "epoch", "unixtime", "when")}
_AT = {"created", "updated", "clicked", "seen", "shown", "viewed", "event", "modified", "posted", "visited", "logged"}
_PERIOD = re.compile(r"(.*_)?(hour|minute|month|weekday|dow|quarter|day_of_(the_)?(week|month|year)|of_day)")
_UNITS = {"seconds": 1.0, "milliseconds": 1e3, "microseconds": 1e6, "nanoseconds": 1e9}
_EPOCH = (1e9, 2.1e9)  # seconds since 1970: from 2001 to 2036
_FEW_ROWS = 100  # in a table with at most this many rows, numbers that increase with every row may be ids
_POSITIONS = {
    "",
    "index",
    "idx",
    "row",
    "rowid",
    "row_id",
    "rownum",
    "row_number",
    "unnamed_0",
    "n",
    "no",
    "nr",
    "line",
}


@dataclass
class SampledColumn:
    """A column, in the first rows of a table.

    `type` is the column's type in the file. `texts` has all values as text, or the lists of a list column; `known` has
    the elements of `texts` that are not missing. `marks` has the missing-value markers that occur often (see `_RARE`).
    """

    name: str
    type: pa.DataType
    texts: pa.Array
    known: pa.Array
    marks: list[str]

    @cached_property
    def kind(self) -> str:
        """The class of the column's type, as `columns.classify_type` names it."""
        return arrow.classify_type(self.type)

    @cached_property
    def words(self) -> tuple[str, ...]:
        """The words of the name, in lower case: user and id of userID, user_id and user_id:token."""
        return tuple(word.lower() for word in _WORDS.findall(self.name.partition(":")[0]))

    @cached_property
    def distinct(self) -> int:
        """Number of distinct values that are not missing."""
        return int(pc.count_distinct(self.known).as_py())

    @cached_property
    def numbers(self) -> Any:
        """The values that are not missing, as float64, or None if some are not numbers."""
        if self.kind not in ("text", "number"):
            return None
        try:
            return self.known.cast(pa.float64()).to_numpy(zero_copy_only=False)
        except pa.ArrowInvalid:
            return None

    @cached_property
    def values(self) -> pa.Array:
        """The values of all rows as text; a missing one is empty. Not for lists."""
        return pc.if_else(pc.is_in(self.texts, value_set=_missing(self.marks)), "", self.texts)

    def matches(self, pattern: str, share: float = 0.99) -> bool:
        """Return whether at least `share` of a text column's known values fully match a regular expression (of RE2)."""
        if self.kind != "text" or not len(self.known):
            return False
        return bool(pc.mean(pc.match_substring_regex(self.known, f"^(?:{pattern})$")).as_py() >= share)


def sample(file: TableFile) -> list[SampledColumn]:
    """Return the columns of the first rows, at most ROWS.

    Raises UserError if there are no rows, if names are repeated, or if the first line is a JSON object.
    """
    twice = next((name for name in file.names if file.names.count(name) > 1), None)
    if twice is not None:
        raise UserError(
            f"{file.input.name} has several columns named {short(repr(twice))}; if its first line has values and no "
            "names, name all columns with --columns"
        )
    if file.names[0].startswith("{") and file.names[-1].endswith("}"):
        raise UserError(
            f"{file.input.name}: its first line looks like a JSON object; make a table of it first, with preprocess "
            "query and read_json"
        )
    batches, rows = [], 0
    for part in file.parts(file.names, 0):
        batches.append(file.parse(part, file.names).batch)
        rows += len(batches[-1])
        if rows >= ROWS:
            break
    if not rows:
        raise UserError(f"{file.input.name}: the file has no rows")
    table = pa.Table.from_batches(batches).slice(0, ROWS).combine_chunks()
    return [_column(name, file.get_type(name), table[name]) for name in file.names]


def _column(name: str, found: pa.DataType, values: pa.ChunkedArray) -> SampledColumn:
    """Return a column with its values as text, and the missing-value markers among them."""
    array = arrow.combined(values)
    if arrow.classify_type(found) in ("list", "nested"):
        return SampledColumn(name, found, array, array.drop_null(), [])
    array = arrow.decoded(array)
    if arrow.classify_type(found) == "text":
        array = arrow.cast_where_possible(array, pa.string())[0]
    texts = pc.utf8_trim_whitespace(pc.fill_null(array.cast(pa.string()), ""))
    counts = {one["values"]: one["counts"] for one in pc.value_counts(texts).to_pylist()}
    marks = [mark for mark in _MARKS if counts.get(mark, 0) >= _RARE * len(texts)]
    return SampledColumn(name, found, texts, texts.filter(pc.invert(pc.is_in(texts, value_set=_missing(marks)))), marks)


def _missing(marks: list[str]) -> pa.Array:
    return pa.array([*MISSING_NUMBERS, *marks])


class Label(NamedTuple):
    """A table's label, and its rule.

    Attributes:
        name: The label's column; None if none was found.
        rule: The rule for positive labels, such as ">3"; None if 1 and true are positive.
        reason: Why this column and this rule were chosen.
        positive: Which rows have a positive label [n]; None if the label's values fit no rule.
        known: Which rows have a label [n]; None if the label's values fit no rule.
    """

    name: str | None
    rule: str | None
    reason: str
    positive: Mask | None = None
    known: Mask | None = None


def find_label(columns: Sequence[SampledColumn], given: str | None) -> Label:
    """Choose the label and its rule: the column `given`, or a column with a usual name, preferably a binary one."""
    if given is not None:
        candidates, why = [column for column in columns if column.name == given], "given"
    else:
        named = [column for column in columns if _LABELS.fullmatch("_".join(column.words))]
        candidates = [column for column in named if is_binary(column)]
        candidates += [column for column in named if not is_binary(column)]
        candidates += [column for column in columns if _RATINGS.fullmatch("_".join(column.words))]
        why = "by its name"
    for column in candidates:
        if column.kind in ("list", "nested", "other"):
            continue
        known = pc.not_equal(column.values, "").to_numpy(zero_copy_only=False)
        values = {value.lower() for value in pc.unique(column.known).to_pylist()}
        if values <= _BINARY[0]:
            positive = _is_in(column, ("1", "1.0", "true"))
            return Label(column.name, None, why, positive, known)
        numbers = column.numbers
        if numbers is not None and len(numbers):
            middle = float(np.quantile(numbers, 0.5, method="lower"))
            above = middle if middle < numbers.max() else float(np.unique(numbers)[-2:][0])
            positive = np.zeros(len(known), np.bool_)
            positive[known] = numbers > above
            reason = f"{why}; the rule selects the larger values: check it"
            return Label(column.name, f">{above:g}", reason, positive, known)
        if column.distinct == 2:
            texts = pc.unique(column.known).to_pylist()
            usual = [text for text in texts if text.lower() in _POSITIVE]
            rare = min(texts, key=lambda value: pc.sum(pc.equal(column.known, value)).as_py())
            rule, what = (usual[0], "value that says yes") if len(usual) == 1 else (rare, "rarer value")
            positive = pc.equal(column.values, rule).to_numpy(zero_copy_only=False)
            return Label(column.name, rule, f"{why}; the rule selects the {what}: check it", positive, known)
    return Label(given, None, why if given is not None else "")


def is_binary(column: SampledColumn) -> bool:
    """Return whether a column has 0 and 1, true and false, yes and no, or the like, or only one of the two."""
    if column.kind not in ("text", "number", "bool") or not 1 <= column.distinct <= 2:
        return False
    values = {value.lower() for value in pc.unique(column.known).to_pylist()}
    return any(values <= pair for pair in _BINARY)


def second_label(column: SampledColumn, label: Label) -> str | None:
    """Return a note if a column looks like a second outcome, known only after the event; otherwise None."""
    if label.name is None or column.kind in ("list", "nested"):
        return None
    binary = is_binary(column)
    feature = 'kind = "categorical"' if binary or column.numbers is None else 'kind = "numeric"'
    also = f"; a second label: [labels.NAME]; if it is known before: {feature}"
    if binary and (words := set(column.words)) & _OUTCOMES and not words & _BEFORE:
        return f"named like an outcome, which is known only after the event{also}"
    leak = _leak(column, label, binary=binary)
    return None if leak is None else f"{leak}: is it known only after the event?{also}"


def _leak(column: SampledColumn, label: Label, *, binary: bool) -> str | None:
    """Return how a column's values give the label away, or None."""
    if label.positive is None or label.known is None or not label.known.any():
        return None
    positive, values = label.positive[label.known], column.values.filter(pa.array(label.known))
    share = float(positive.mean())
    if share in (0, 1):
        return None
    encoded = values.dictionary_encode()
    codes = encoded.indices.to_numpy(zero_copy_only=False)
    usual = int(np.bincount(codes).argmax())
    rows = int((codes != usual).sum())
    if rows and positive[codes != usual].all() and share**rows < _CHANCE:
        value = short(repr(encoded.dictionary[usual].as_py()), 30)
        return f"all {rows:,} rows with another value than {value} have a positive label"
    if binary:
        is_no = _is_in(column, _NEGATIVE)[label.known]
        rows = int(is_no.sum())
        if 0 < rows < len(is_no) and not positive[is_no].any() and (1 - share) ** rows < _CHANCE:
            return "every row with a positive label has a positive value here"
    if column.numbers is None or is_named_like_ids(column):
        return None
    has = pc.not_equal(values, "")
    numbers = values.filter(has).cast(pa.float64()).to_numpy(zero_copy_only=False)
    positive = positive[has.to_numpy(zero_copy_only=False)]
    above, below = numbers[positive], numbers[~positive]
    if min(len(above), len(below)) >= _LEAST and (above.min() > below.max() or above.max() < below.min()):
        return "its numbers separate the positive labels from the others"
    return None


def _is_in(column: SampledColumn, values: Sequence[str]) -> Mask:
    """Return which rows have one of these values, in upper or lower case [n]."""
    found: Mask = pc.is_in(pc.utf8_lower(column.values), value_set=pa.array(values)).to_numpy(zero_copy_only=False)
    return found


def is_named_like_ids(column: SampledColumn) -> bool:
    """Return whether a column's name says that its numbers are ids."""
    return bool(_IDS.fullmatch("_".join(column.words)) or _IDS.fullmatch(column.name))


def find_weight(columns: Sequence[SampledColumn]) -> str | None:
    """Return the name of the first column that has a weight's name and values that can be weights; otherwise None."""
    return next((one.name for one in columns if _WEIGHTS.fullmatch("_".join(one.words)) and _can_weigh(one)), None)


def may_be_weight(column: SampledColumn) -> str | None:
    """Return a question for the user if a column may be the rows' weight; otherwise None."""
    if not (_MAYBE_WEIGHTS.fullmatch("_".join(column.words)) or _WEIGHTS.fullmatch("_".join(column.words))):
        return None
    if not _can_weigh(column) or is_binary(column):
        return None
    weight = f"weight = {json.dumps(column.name)}"
    return f'the weight of each row in the loss? Then {weight} at the top; if it is measured: kind = "numeric"'


def _can_weigh(column: SampledColumn) -> bool:
    numbers = column.numbers
    return numbers is not None and len(numbers) > 0 and bool((numbers >= 0).all() and np.isfinite(numbers).all())


def time_reason(column: SampledColumn) -> str | None:
    """Return a note if a column seems to have times, by its type, texts, numbers or name; otherwise None."""
    what = "split with --test-after, or extract hour and weekday with `preprocess query`"
    if column.kind == "other":
        return f"a time: {what}"
    if column.kind not in ("text", "number"):
        return None
    if column.numbers is None:
        return f"a time: {what}" if column.matches(_TIME_TEXT) else None
    name = "_".join(column.words)
    named = any(word in _TIME_WORDS for word in column.words[-1:]) or name.endswith("_at") or name in _AT
    if is_named_like_ids(column) and not named:
        return None
    if found := _numbers_as_time(column.numbers, named=named or bool(_PERIOD.fullmatch(name))):
        return f"a time: {what} ({found})"
    if _PERIOD.fullmatch(name) and column.numbers.max() <= 366:
        return None
    return f'a time, by its name: {what}; if it is a duration: kind = "numeric"' if named else None


def _numbers_as_time(numbers: Any, *, named: bool) -> str | None:
    """Return what kind of time numbers are, or None."""
    low, high = float(numbers.min()), float(numbers.max())
    for unit, per_second in _UNITS.items():
        if _EPOCH[0] * per_second <= low and high <= _EPOCH[1] * per_second:
            return f"{unit} since 1970"
    if not (numbers == np.floor(numbers)).all() or (len(numbers) < 20 and not named):
        return None
    whole = numbers.astype(np.int64) if high < 2**62 else np.zeros(0, np.int64)
    for digits, form in ((6, "YYYYMM"), (8, "YYYYMMDD"), (10, "YYYYMMDDHH"), (12, "YYYYMMDDHHMM")):
        if len(whole) and 10 ** (digits - 1) <= low and high < 10**digits and _is_calendar(whole, digits):
            return form
    if named and len(whole) and low >= 10**7 and high < 10**8 and _is_calendar(whole + 20 * 10**8, 10):
        return "YYMMDDHH"
    if len(whole) and low >= 10**13 and high < 10**14 and _is_calendar(whole // 100, 12):
        return "YYYYMMDDHHMMSS"
    return None


def _is_calendar(whole: npt.NDArray[np.int64], digits: int) -> bool:
    """Return whether all numbers are a year, a month and so on, written with this many digits."""
    limits = [(1900, 2100), (1, 12), (1, 31), (0, 24), (0, 59)][: digits // 2 - 1]
    for low, high in reversed(limits[1:]):
        part = whole % 100
        if not ((part >= low) & (part <= high)).all():
            return False
        whole = whole // 100
    return bool(((whole >= limits[0][0]) & (whole <= limits[0][1])).all())


def position_reason(column: SampledColumn) -> str | None:
    """Return why a column only numbers the rows, or None."""
    numbers = column.numbers
    if numbers is None or len(numbers) < len(column.texts) or column.distinct < len(numbers):
        return None
    steps, named = np.diff(numbers), "_".join(column.words) in _POSITIONS
    if len(numbers) <= _FEW_ROWS and not named:
        return None
    if (steps == 1).all():
        return "the row's own position"
    if not (numbers == np.floor(numbers)).all():
        return None
    if (steps > 0).all():
        return "it increases with every row: a position or a time"
    return "a number of its own in every row" if named or np.ptp(numbers) == len(numbers) - 1 else None
