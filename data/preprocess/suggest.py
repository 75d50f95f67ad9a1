"""`preprocess suggest`: proposes a features file for a table, with a reason for each line, from the table's first rows.

The user should review and edit the proposal, because values do not show what a column means.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hostdev.core.errors import UserError
from hostdev.core.progress import counted
from hostdev.data.preprocess import columns as arrow
from hostdev.data.preprocess import roles
from hostdev.data.preprocess.files import TableFile
from hostdev.data.preprocess.naming import listed, short
from hostdev.data.preprocess.roles import SampledColumn, sample

_SEPARATORS = ("|", ";", ",", "^", " ")
_DOUBTFUL = (";", ",", " ")  # separators that also occur within a single text
_BAGS = {"tags", "genres", "categories", "keywords", "items", "ids", "history", "list", "seq", "sequence", "topics"}
_TEXTS = {
    *("title", "name", "text", "review", "description", "query", "city", "country", "address", "comment", "headline"),
    *("summary", "body", "author", "artist", "brand", "street", "state", "subject", "message", "question", "sentence"),
}
_FUNCTION_WORDS = "the|a|an|of|and|in|on|to|for|with|is|der|die|das|und|le|la|les|de|du|el|los|y|et"
_CODE = r"[^ ]*[0-9][^ ]*|[A-Z_]{2,}"  # a bag's value that is no word
_FEW = 100  # up to this many distinct integers may be categories
_PADS = 0.5  # a value above this share of a bag's values may be padding
_VECTORS = 0.99  # minimum share of a column's lists that have the same length for it to be a vector
_WEIGHTED = r"^(?s:.+):[0-9]*\.?[0-9]+([eE][+-]?[0-9]+)?$"  # a value with its weight, such as red:0.5
_MARKED = 0.99  # minimum share of a bag's values that must have a weight for all to be read as weighted
_SHARED = 0.5  # a bag shares the ids of a column that has more than this share of the bag's values
_SKEWED = 100.0  # a maximum above this many times the median suggests log scaling
_UNIQUE = 0.9  # above this share of distinct values, a column tells the rows apart
_MIXED = 0.3  # minimum share of parts that occur both first and later in texts, for the parts to be a bag's values
_NUMBER = r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?"
_NUMBERS = rf"\[? *{_NUMBER}((, *|;| +){_NUMBER})* *\]?"  # one or more numbers in a text
_DECIMAL_COMMA = r"[-+]?[0-9]+(,[0-9]+)?"
_WRITTEN_LISTS = r"\[.*\]|\{.*\}|\(.*\)"


@dataclass
class Suggestion:
    """Proposed settings of a feature, or None to leave out the column, and the reason for either."""

    name: str
    settings: dict[str, Any] | None
    reason: str
    more: dict[str, str] = field(default_factory=dict)  # further reasons, by setting
    asks: bool = False  # whether the user must decide, as the values do not show what the column is


@dataclass
class Proposal:
    """A features file as text, suggestions for all columns but the label and the weight, and whether it has a label."""

    text: str
    features: list[Suggestion]
    has_label: bool


def suggest(file: TableFile, given: str | None) -> Proposal:
    """Return a proposal for a table; `given` names the label, None chooses one.

    Raises UserError if the file has no rows, several columns of a name, a JSON object as its first line, or no column
    named `given`.
    """
    columns = sample(file)
    if given is not None and given not in file.names:
        raise UserError(f"{file.input.name} has no column {given!r} for --label; it has {listed(file.names)}")
    label = roles.find_label(columns, given)
    rest = [column for column in columns if column.name != label.name]
    weight = roles.find_weight(rest)
    by_name = {column.name: column for column in columns}
    found = [_suggest(column, label) for column in rest if column.name != weight]
    decimal = _decimal(found, by_name)
    _share(found, by_name)
    rows = f"{len(columns[0].texts):,}"
    lines = [f"# Features of {file.input.name}, based on its first {rows} rows; review and edit each line.", ""]
    if label.name is not None:
        lines.append(f"label = {_toml(label.name)}  # {label.reason}")
        if label.rule is not None:
            lines.append(f"positive = {_toml(label.rule)}  # the label has {by_name[label.name].distinct:,} values")
    if weight is not None:
        lines.append(f"weight = {_toml(weight)}  # of each row in the loss, by its name")
    marks = sorted({mark for column in columns for mark in column.marks})
    if marks:
        lines.append(f"missing = {_toml(marks)}  # these look like missing-value markers")
    if decimal:
        lines.append('decimal = ","  # numbers have decimal commas')
    for one in found:
        lines += ["", *_lines(one)]
    return Proposal("\n".join(lines) + "\n", found, label.name is not None)


def _suggest(column: SampledColumn, label: roles.Label) -> Suggestion:
    """Return the settings for a column, or the reason to leave it out."""
    if column.kind == "nested":
        return Suggestion(column.name, None, f"of type {short(column.type, 40)}: flatten it with `preprocess query`")
    if column.kind == "list" and pa.types.is_floating(column.type.value_type):
        return _vector(column)
    if column.kind == "list":
        return _bag(column, None)
    missing = 1 - len(column.known) / len(column.texts)
    if column.distinct == 0 or (column.distinct == 1 and missing in (0, 1)):
        return Suggestion(column.name, None, "fewer than two distinct values")
    for why in (roles.second_label(column, label), roles.may_be_weight(column)):
        if why is not None:
            return Suggestion(column.name, None, why, asks=True)
    why = roles.time_reason(column) or roles.position_reason(column)
    if why is not None:
        return Suggestion(column.name, None, why)
    if column.distinct == 1:
        return Suggestion(column.name, {"kind": "categorical"}, f"one value, missing in {missing:.0%} of the rows")
    return _text(column) if column.numbers is None else _numeric_or_ids(column)


def _text(column: SampledColumn) -> Suggestion:
    """Return the settings for a column of texts that are not all numbers, or the reason to leave it out."""
    distinct = column.distinct
    if column.matches(_NUMBERS) and pc.mean(pc.match_substring(column.known, ".")).as_py() > 0.5:
        return _vector(column)
    if column.matches(_WRITTEN_LISTS):
        return Suggestion(column.name, None, "lists or objects written as text: convert them with `preprocess query`")
    if column.matches(_DECIMAL_COMMA, 1.0) and not _is_plural(column):
        return Suggestion(column.name, {"kind": "numeric"}, f"numbers with decimal commas, {distinct:,} values")
    separator = _separator(column)
    if separator is not None:
        return _bag(column, separator)
    if _is_unique(column):
        length = pc.mean(pc.utf8_length(column.known)).as_py()
        return Suggestion(column.name, None, f"nearly every row has a different value (of {length:.0f} characters)")
    return Suggestion(column.name, {"kind": "categorical"}, f"text, {distinct:,} values")


def _is_unique(column: SampledColumn) -> bool:
    return column.distinct > _UNIQUE * len(column.texts) and len(column.texts) > 100


def _decimal(found: Sequence[Suggestion], columns: Mapping[str, SampledColumn]) -> bool:
    """Return whether numbers have decimal commas; leave out columns that have them if others have decimal points."""
    numeric = [one for one in found if one.settings is not None and one.settings["kind"] in ("numeric", "vector")]
    commas = [one for one in numeric if one.settings == {"kind": "numeric"} and columns[one.name].numbers is None]
    texts = [one.name for one in numeric if columns[one.name].kind == "text"]
    points = [name for name in texts if pc.any(pc.match_substring(columns[name].known, ".")).as_py()]
    for one in commas if points else ():
        one.settings, one.asks = None, True
        one.reason = (
            f"decimal commas, but {points[0]} has decimal points: convert one of the two with `preprocess query`"
        )
    return bool(commas) and not points


def _numeric_or_ids(column: SampledColumn) -> Suggestion:
    """Return the settings for a column of numbers, or the reason to leave it out."""
    numbers, distinct = column.numbers, column.distinct
    whole = bool((numbers == np.floor(numbers)).all())
    if whole and roles.is_named_like_ids(column):
        if _is_unique(column):
            return Suggestion(column.name, None, "ids of which nearly every row has a different one")
        return Suggestion(column.name, {"kind": "categorical"}, f"integers, named like ids; {distinct:,} values")
    if whole and distinct <= _FEW and numbers.max() - numbers.min() < 2 * _FEW:
        why = f'{distinct} distinct integers; to use them as numbers: kind = "numeric"'
        return Suggestion(column.name, {"kind": "categorical"}, why)
    settings: dict[str, Any] = {"kind": "numeric"}
    reasons: dict[str, str] = {}
    size = np.abs(numbers)
    middle, most = float(np.median(size[size > 0])) if (size > 0).any() else 0.0, float(size.max())
    if middle and most > _SKEWED * middle:
        settings["scaling"] = "log"
        reasons["scaling"] = f"the largest number is {most / middle:,.0f} times the median"
    what, ids = ("integers", '; if they are ids: kind = "categorical"') if whole else ("numbers", "")
    return Suggestion(column.name, settings, f"{what} from {numbers.min():g} to {numbers.max():g}{ids}", reasons)


def _separator(column: SampledColumn) -> str | None:
    """Return a separator that occurs in many texts and splits them into repeating parts, or None.

    Names and titles have blanks, commas and semicolons, too. At these separators, a column is split only if its name
    says that it has several values, if the parts are no words, or if the same parts occur both first and later.
    """
    texts = column.known.slice(0, 10_000)
    for separator in _SEPARATORS:
        having = pc.sum(pc.match_substring(texts, separator)).as_py() or 0
        if having < 0.2 * len(texts) or (separator == " " and having < 0.5 * len(texts)):
            continue
        parts = pc.utf8_trim_whitespace(pc.list_flatten(pc.split_pattern(texts, separator)))
        parts = _without_weights(parts) if _are_weighted(parts) else parts
        if pc.count_distinct(parts).as_py() >= 0.5 * len(parts) or pc.mean(pc.utf8_length(parts)).as_py() >= 30:
            continue
        if separator not in _DOUBTFUL or _is_plural(column) or _splits_into_values(column, separator, parts):
            return separator
    return None


def _is_plural(column: SampledColumn) -> bool:
    """Return whether a column's name says that it has several values."""
    words = {word for word in column.words if not word.isdigit()}
    last = column.words[-1] if column.words else ""
    return bool(words & _BAGS) or bool(re.fullmatch(r".{2,}[^sui]s", last) and last != "news")


def _splits_into_values(column: SampledColumn, separator: str, parts: pa.Array) -> bool:
    """Return whether a separator splits texts into values of a bag, instead of names or titles into pieces."""
    if set(column.words) & _TEXTS:
        return False
    lists = pc.split_pattern(pc.unique(column.known.slice(0, 10_000)), separator)
    lists = lists.filter(pc.greater(pc.list_value_length(lists), 1))
    varies = pc.count_distinct(pc.list_value_length(lists)).as_py() > 1
    if pc.mean(pc.match_substring_regex(parts, f"^(?:{_CODE})?$")).as_py() > _UNIQUE:
        return varies or _mixed(lists) >= _MIXED
    if separator == " ":
        words = pc.mean(pc.match_substring_regex(pc.utf8_lower(parts), f"^(?:{_FUNCTION_WORDS})$|[.,!?'\"]$")).as_py()
        capitals = pc.mean(pc.utf8_is_upper(pc.utf8_slice_codeunits(parts, 0, 1))).as_py()
        if not varies or words > 0.02 or 0.1 < capitals < _UNIQUE:
            return False
    return _mixed(lists) >= _MIXED


def _mixed(lists: pa.ListArray) -> float:
    """Return the share of values that occur both first and later in lists."""
    first = pc.utf8_trim_whitespace(pc.list_element(lists, 0))
    later = pc.utf8_trim_whitespace(pc.list_flatten(pc.list_slice(lists, 1)))
    both = [pc.sum(pc.is_in(one, value_set=other)).as_py() or 0 for one, other in ((first, later), (later, first))]
    return float(sum(both) / max(1, len(first) + len(later)))


def _vector(column: SampledColumn) -> Suggestion:
    """Return the settings for lists of floating-point numbers, or texts with them, or the reason to leave them out."""
    settings: dict[str, Any] = {"kind": "vector"}
    if column.kind == "list":
        all_lengths = pc.list_value_length(column.known)
    else:
        all_lengths = pc.count_substring_regex(column.known, _NUMBER)
        settings |= {"separator": ";"} if pc.any(pc.match_substring(column.known, ";")).as_py() else {}
    lengths = pc.value_counts(all_lengths).to_pylist()
    if not lengths:
        return Suggestion(column.name, None, "no values")
    most = max(lengths, key=lambda one: one["counts"])
    if most["counts"] < _VECTORS * len(column.known) or not most["values"]:
        shown = f"lists of numbers with {len(lengths):,} different lengths"
        return Suggestion(column.name, None, f"{shown}: average them with `preprocess query`")
    return Suggestion(column.name, settings | {"length": most["values"]}, "number lists of the same length")


def _bag(column: SampledColumn, separator: str | None) -> Suggestion:
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


def _bag_values(column: SampledColumn, separator: str | None, *, weighted: bool) -> pa.Array:
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


def _share(found: Sequence[Suggestion], columns: Mapping[str, SampledColumn]) -> None:
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
    proposal = suggest(file, label)
    out.write_text(proposal.text, encoding="utf-8")
    counts = Counter("" if one.settings is None else one.settings["kind"] for one in proposal.features)
    left = counts.pop("", 0)
    each = ", ".join(f"{count} {kind}" for kind, count in counts.items()) or "no feature"
    more = f", {counted(left, 'column')} left out" if left else ""
    told = [] if proposal.has_label else ["no column looks like a label: name the label with --label NAME"]
    told += [f"check {one.name}: {one.reason}" for one in proposal.features if one.asks]
    return [f"{out}: {each}{more}; review it, then run", *told]
