"""The first rows of a table's columns, with what `preprocess suggest` derives from their values and names."""

import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from hostdev.core.errors import UserError
from hostdev.data.preprocess import columns as arrow
from hostdev.data.preprocess.columns import MISSING_NUMBERS
from hostdev.data.preprocess.files import TableFile
from hostdev.data.preprocess.naming import short

ROWS = 100_000  # maximum number of rows to examine
_MARKS = ("?", r"\N", "-", "unknown", "Unknown", "UNKNOWN", "missing", "none", "<NA>", "(null)")
_RARE = 0.01  # one of _MARKS is a missing-value marker if at least this share of the rows has it
_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")


@dataclass
class SampledColumn:
    """A sampled column.

    `type` is its type in the file. `texts` has all values as text, or the lists of a list column; `known` has those
    that are not missing. `marks` has the missing-value markers that occur in the column.
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
        """Return whether at least this share of the known texts match the whole regular expression (of RE2)."""
        if self.kind != "text" or not len(self.known):
            return False
        return bool(pc.mean(pc.match_substring_regex(self.known, f"^(?:{pattern})$")).as_py() >= share)


def sample(file: TableFile) -> list[SampledColumn]:
    """Return the columns of the first rows, at most ROWS; raise UserError if there are none, or names are repeated."""
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
    array = values.combine_chunks()
    array = array.chunk(0) if isinstance(array, pa.ChunkedArray) else array
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
