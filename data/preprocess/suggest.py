"""`preprocess suggest`: proposes a features file for a table, with a reason for each line, from the table's first rows.

The user should review and edit the proposal, because values do not show what a column means.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hostdev.core.errors import UserError
from hostdev.core.progress import counted
from hostdev.data.preprocess import columns as arrow
from hostdev.data.preprocess.columns import MISSING_NUMBERS
from hostdev.data.preprocess.files import TableFile
from hostdev.data.preprocess.naming import listed, short

ROWS = 100_000  # maximum number of rows to examine
_MARKS = ("?", r"\N", "-", "unknown", "Unknown", "UNKNOWN", "missing", "none", "<NA>", "(null)")
_SEPARATORS = ("|", ";", ",", "^", " ")
_LABELS = re.compile(r"(is_)?(label|click(ed)?|target|y|conver(sion|ted)|purchased?|bought|liked?|churn(ed)?)", re.I)
_RATINGS = re.compile(r"(rating|stars?|score|overall)", re.I)
_IDS = re.compile(
    r"(.*[^a-z])?(id|code|no|nr|number|zip|postcode|sku|isbn|asin|category|type|class)(_?\d+)?|C\d+", re.I
)
_TIMES = re.compile(r"(.*[^a-z])?(time|timestamp|date|datetime|day|ts|created_at)", re.I)
_FEW = 100  # up to this many distinct integers may be categories
_RARE = 0.01  # one of _MARKS is a missing-value marker if at least this share of the rows has it
_PADS = 0.5  # a value above this share of a bag's values may be padding
_VECTORS = 0.99  # minimum share of a column's lists that have the same length for it to be a vector
_WEIGHTED = r"^(?s:.+):[0-9]*\.?[0-9]+([eE][+-]?[0-9]+)?$"  # a value with its weight, such as red:0.5
_MARKED = 0.99  # minimum share of a bag's values that must have a weight for all to be read as weighted
_SHARED = 0.5  # a bag shares the ids of a column that has more than this share of the bag's values
_SKEWED = 100.0  # a maximum above this many times the median suggests log scaling


@dataclass
class _Column:
    """A sampled column.

    `type` is its type in the file. `texts` has all values as text, or the lists of a list column; `known` has those
    that are not missing. `marks` has the missing-value markers that occur in the column.
    """

    name: str
    type: pa.DataType
    texts: pa.Array
    known: pa.Array
    marks: list[str]

    @property
    def distinct(self) -> int:
        """Number of distinct values that are not missing."""
        return int(pc.count_distinct(self.known).as_py())

    @property
    def numbers(self) -> Any:
        """The values that are not missing, as float64, or None if some are not numbers."""
        try:
            return self.known.cast(pa.float64()).to_numpy(zero_copy_only=False)
        except pa.ArrowInvalid:
            return None


@dataclass
class Suggestion:
    """Proposed settings of a feature, or None to leave out the column, and the reason for either."""

    name: str
    settings: dict[str, Any] | None
    reason: str
    more: dict[str, str]  # further reasons, by setting


def suggest(file: TableFile, label: str | None) -> tuple[str, list[Suggestion], bool]:
    """Return a features file as text, the suggestion for each column, and whether there is a label.

    Raises UserError if the file has no rows, or no column named `label`.
    """
    table = _sample(file)
    columns = [_column(name, file.get_type(name), table[name]) for name in file.names]
    if label is not None and label not in file.names:
        raise UserError(f"{file.input.name} has no column {label!r} for --label; it has {listed(file.names)}")
    chosen, rule, why = _label(columns, label)
    found = [_suggest(column) for column in columns if column.name != chosen]
    _share(found, {column.name: column for column in columns})
    lines = [f"# Features of {file.input.name}, based on its first {len(table):,} rows; review and edit each line.", ""]
    if chosen is not None:
        lines.append(f"label = {_toml(chosen)}  # {why}")
        if rule is not None:
            kinds = _by_name(columns, chosen).distinct
            lines.append(f"positive = {_toml(rule)}  # the label has {kinds:,} values")
    marks = sorted({mark for column in columns for mark in column.marks})
    if marks:
        lines.append(f"missing = {_toml(marks)}  # these look like missing-value markers")
    for one in found:
        lines += ["", *_lines(one)]
    return "\n".join(lines) + "\n", found, chosen is not None


def _sample(file: TableFile) -> pa.Table:
    """Return the first rows, at most ROWS."""
    batches, rows = [], 0
    for part in file.parts(file.names, 0):
        batches.append(file.parse(part, file.names).batch)
        rows += len(batches[-1])
        if rows >= ROWS:
            break
    if not rows:
        raise UserError(f"{file.input.name}: the file has no rows")
    return pa.Table.from_batches(batches).slice(0, ROWS).combine_chunks()


def _column(name: str, found: pa.DataType, values: pa.ChunkedArray) -> _Column:
    """Return a column with its values as text, and the missing-value markers among them."""
    array = values.combine_chunks()
    array = array.chunk(0) if isinstance(array, pa.ChunkedArray) else array
    if arrow.classify_type(found) in ("list", "nested"):
        return _Column(name, found, array, array.drop_null(), [])
    array = arrow.decoded(array)
    if arrow.classify_type(found) == "text":
        array = arrow.cast_where_possible(array, pa.string())[0]
    texts = pc.utf8_trim_whitespace(pc.fill_null(array.cast(pa.string()), ""))
    counts = {one["values"]: one["counts"] for one in pc.value_counts(texts).to_pylist()}
    marks = [mark for mark in _MARKS if counts.get(mark, 0) >= _RARE * len(texts)]
    none = pa.array([*MISSING_NUMBERS, *marks])
    return _Column(name, found, texts, texts.filter(pc.invert(pc.is_in(texts, value_set=none))), marks)


def _by_name(columns: Sequence[_Column], name: str) -> _Column:
    return next(column for column in columns if column.name == name)


def _label(columns: Sequence[_Column], given: str | None) -> tuple[str | None, str | None, str]:
    """Return the label's column or None, the rule for positive labels (None: 1 and true), and the reason."""
    candidates = [column for column in columns if column.name == given] if given is not None else []
    why = "given"
    if given is None:
        candidates = [column for column in columns if _LABELS.fullmatch(column.name)]
        candidates += [column for column in columns if _RATINGS.fullmatch(column.name)]
        why = "by its name"
    for column in candidates:
        if arrow.classify_type(column.type) in ("list", "nested", "other"):
            continue
        values = set(pc.unique(column.known).to_pylist())
        if {value.lower() for value in values} <= {"0", "1", "0.0", "1.0", "true", "false"}:
            return column.name, None, why
        numbers = column.numbers
        if numbers is not None and len(numbers):
            middle = float(np.quantile(numbers, 0.5, method="lower"))
            above = middle if middle < numbers.max() else float(np.unique(numbers)[-2:][0])
            return column.name, f">{above:g}", f"{why}; the rule selects the larger values: check it"
        if len(values) == 2:
            rare = min(values, key=lambda value: pc.sum(pc.equal(column.known, value)).as_py())
            return column.name, rare, f"{why}; the rule selects the rarer value: check it"
    return (given, None, why) if given is not None else (None, None, "")


def _suggest(column: _Column) -> Suggestion:
    """Return the settings for a column, or the reason to leave it out."""
    kind, n = arrow.classify_type(column.type), len(column.texts)
    if kind == "nested":
        return Suggestion(
            column.name, None, f"of type {short(column.type, 40)}: flatten it with `preprocess query`", {}
        )
    if kind == "list" and pa.types.is_floating(column.type.value_type):
        return _vector(column)
    if kind == "list":
        return _bag(column, None)
    distinct = column.distinct
    if distinct <= 1:
        return Suggestion(column.name, None, "fewer than two distinct values", {})
    if kind == "other" or _TIMES.fullmatch(column.name):
        why = "a time: split with --test-after, or extract hour and weekday with `preprocess query`"
        return Suggestion(column.name, None, why, {})
    numbers = column.numbers if kind in ("text", "number") else None
    if numbers is not None:
        return _numeric_or_ids(column, numbers, distinct)
    separator = _separator(column)
    if separator is not None:
        return _bag(column, separator)
    if distinct > 0.9 * n and n > 100:
        length = pc.mean(pc.utf8_length(column.known)).as_py()
        return Suggestion(column.name, None, f"nearly every row has a different value (of {length:.0f} characters)", {})
    return Suggestion(column.name, {"kind": "categorical"}, f"text, {distinct:,} values", {})


def _numeric_or_ids(column: _Column, numbers: Any, distinct: int) -> Suggestion:
    whole = bool((numbers == np.floor(numbers)).all())
    if whole and _IDS.fullmatch(column.name):
        return Suggestion(column.name, {"kind": "categorical"}, f"integers, named like ids; {distinct:,} values", {})
    if whole and distinct <= _FEW and numbers.max() - numbers.min() < 2 * _FEW:
        why = f'{distinct} distinct integers; to use them as numbers: kind = "numeric"'
        return Suggestion(column.name, {"kind": "categorical"}, why, {})
    settings: dict[str, Any] = {"kind": "numeric"}
    reasons: dict[str, str] = {}
    size = np.abs(numbers)
    middle, most = float(np.median(size[size > 0])) if (size > 0).any() else 0.0, float(size.max())
    if middle and most > _SKEWED * middle:
        settings["scaling"] = "log"
        reasons["scaling"] = f"the largest number is {most / middle:,.0f} times the median"
    what = "integers" if whole else "numbers"
    return Suggestion(column.name, settings, f"{what} from {numbers.min():g} to {numbers.max():g}", reasons)


def _separator(column: _Column) -> str | None:
    """Return a separator that occurs in many texts and splits them into repeating parts, or None."""
    texts = column.known.slice(0, 10_000)
    for separator in _SEPARATORS:
        having = pc.sum(pc.match_substring(texts, separator)).as_py() or 0
        if having < 0.2 * len(texts) or (separator == " " and having < 0.5 * len(texts)):
            continue
        parts = pc.list_flatten(pc.split_pattern(texts, separator))
        parts = _without_weights(parts) if _are_weighted(parts) else parts
        if pc.count_distinct(parts).as_py() < 0.5 * len(parts) and pc.mean(pc.utf8_length(parts)).as_py() < 30:
            return separator
    return None


def _vector(column: _Column) -> Suggestion:
    """Return the settings for lists of floating-point numbers, or the reason to leave them out."""
    lengths = pc.value_counts(pc.list_value_length(column.known)).to_pylist()
    if not lengths:
        return Suggestion(column.name, None, "no values", {})
    most = max(lengths, key=lambda one: one["counts"])
    if most["counts"] < _VECTORS * len(column.known) or not most["values"]:
        shown = f"lists of numbers with {len(lengths):,} different lengths"
        return Suggestion(column.name, None, f"{shown}: average them with `preprocess query`", {})
    return Suggestion(column.name, {"kind": "vector", "length": most["values"]}, "number lists of the same length", {})


def _bag(column: _Column, separator: str | None) -> Suggestion:
    values = _bag_values(column, separator, weighted=False)
    settings: dict[str, Any] = {"kind": "bag"} | ({} if separator is None else {"separator": separator})
    reasons = {}
    if _are_weighted(values):
        settings["weights"] = ":"
        reasons["weights"] = f"the values have the form of {short(repr(values[0].as_py()))}"
        values = _without_weights(values)
    lengths = len(values) / max(1, len(column.known))
    if len(values):
        [most] = sorted(pc.value_counts(values).to_pylist(), key=lambda one: -one["counts"])[:1]
        if most["counts"] > _PADS * len(values) and most["values"] in ("0", "-1", "", "<pad>", "PAD"):
            settings["missing"] = [most["values"]]
            reasons["missing"] = f"{most['counts'] / len(values):.0%} of all values: probably padding"
    return Suggestion(
        column.name, settings, f"{lengths:.1f} values per row, {len(pc.unique(values)):,} distinct", reasons
    )


def _bag_values(column: _Column, separator: str | None, *, weighted: bool) -> pa.Array:
    """Return the values of all rows as text, without their weights if they are weighted."""
    if separator is None:
        values = arrow.as_plain_text(arrow.decoded(pc.list_flatten(column.known)))
    else:
        values = pc.utf8_trim_whitespace(pc.list_flatten(pc.split_pattern(column.known, separator)))
    return _without_weights(values) if weighted else values


def _are_weighted(values: pa.Array) -> bool:
    """Return whether nearly all values have the form of _WEIGHTED."""
    return len(values) > 0 and pc.mean(pc.match_substring_regex(values, _WEIGHTED)).as_py() >= _MARKED


def _without_weights(values: pa.Array) -> pa.Array:
    return pc.replace_substring_regex(values, r":[^:]*$", "")


def _share(found: Sequence[Suggestion], columns: Mapping[str, _Column]) -> None:
    """Let each bag share the ids of a categorical column that has most of the bag's values, if there is one."""
    ids = [one for one in found if one.settings is not None and one.settings["kind"] == "categorical"]
    for one in found:
        if one.settings is None or one.settings["kind"] != "bag":
            continue
        settings = one.settings
        values = _bag_values(columns[one.name], settings.get("separator"), weighted="weights" in settings)
        values = pc.unique(values)
        for other in ids:
            known = pc.unique(columns[other.name].known)
            both = pc.sum(pc.is_in(values, value_set=known.cast(values.type))).as_py() or 0
            if len(values) > 1 and both > _SHARED * len(values) and len(known) > 10:
                one.settings["share"] = other.name
                one.more["share"] = f"{both / len(values):.0%} of its values occur in {other.name}"
                break


def _lines(one: Suggestion) -> Iterator[str]:
    if one.settings is None:
        yield f"# [features.{_key(one.name)}]  # left out: {one.reason}"
        return
    yield f"[features.{_key(one.name)}]"
    for key, value in one.settings.items():
        why = one.reason if key == "kind" else one.more.get(key)
        yield f"{key} = {_toml(value)}" + (f"  # {why}" if why else "")


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _toml(name)


def _toml(value: Any) -> str:
    """Format a string, a number or a list of strings as TOML, which writes them as JSON does."""
    return json.dumps(value)


def write(file: TableFile, label: str | None, out: Path) -> list[str]:
    """Write the proposal to the new file `out`; return lines that describe it."""
    if out.exists():
        raise UserError(f"{out} exists already; give another name with --out, or remove it")
    text, found, has_label = suggest(file, label)
    out.write_text(text, encoding="utf-8")
    counts = Counter("" if one.settings is None else one.settings["kind"] for one in found)
    left = counts.pop("", 0)
    each = ", ".join(f"{count} {kind}" for kind, count in counts.items()) or "no feature"
    more = f", {counted(left, 'column')} left out" if left else ""
    told = [] if has_label else ["no column looks like a label: name the label with --label NAME"]
    return [f"{out}: {each}{more}; review it, then run", *told]
