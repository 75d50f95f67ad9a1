"""Counts of the rows that were read so far: line numbers, row numbers that draw the splits, and the share of malformed
lines."""

import re

import numpy as np
import numpy.typing as npt

from hostdev.core.errors import UserError
from hostdev.core.progress import counted
from hostdev.data.preprocess.query import NAME
from hostdev.data.preprocess.raw import Source
from hostdev.data.preprocess.rejected import Rejected
from hostdev.kernels.counter import key64, uniform

MAX_REJECTED = 0.01
_MISSING = re.compile(r"column '(.+)': the value is missing")
_TEXT = ("columns", "delimiter", "skipped_lines")  # options that a query would need in another form
_SOME, _MOST = 10_000, 0.5  # stop early if more than _MOST of at least _SOME rows are malformed


class RowCounts:
    """The rows of a source that were read so far, in order.

    Attributes:
        rows: Number of well-formed rows.
        first: The first malformed line, or None.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self.rows = 0
        self.first: Rejected | None = None
        self._input = self._lines = self._rejected = 0  # `_lines` are those of the current input only

    def lines_before(self, source: int) -> int:
        """Return the number of lines of input number `source` that were read."""
        return self._lines if source == self._input else 0

    def add(self, source: int, lines: int, rows: int, rejected: int) -> None:
        """Add lines of input number `source`."""
        self._lines = lines + self.lines_before(source)
        self._input = source
        self.rows += rows
        self._rejected += rejected

    def check_rejected(self, accepted: int) -> None:
        """Raise UserError if more than 1% of all rows, or half of the rows so far (at least 10,000), are malformed.

        `accepted` is the number of well-formed rows in the source, or an upper bound on it. The second case indicates a
        wrong option, so it is reported early.
        """
        if self.first is None:
            return
        so_far, first = self.rows + self._rejected, self.first
        where = f"the first is {first.file}:{first.line}: {first.reason}"
        if self._rejected > MAX_REJECTED * (accepted + self._rejected):
            raise UserError(
                f"{counted(self._rejected, 'row')} cannot be read, more than {MAX_REJECTED:.0%} of all; {where}"
                f"{self._remedy(first)}"
            )
        if so_far >= _SOME and self._rejected > _MOST * so_far:
            raise UserError(
                f"{self._rejected:,} of the first {so_far:,} rows cannot be read; {where}{self._remedy(first)}"
            )

    def _remedy(self, first: Rejected) -> str:
        """Return how to leave out rows like the first malformed one, or "" if a query over the file cannot."""
        options = self._source.options()
        return "" if any(options.get(name) for name in _TEXT) else _remedy(first)


class SplitDraw:
    """Draws rows for testing and validation by seed and row number.

    Args:
        fractions: The shares of rows for testing and for validation; None to draw none.
    """

    def __init__(self, seed: int, fractions: tuple[float | None, float | None]) -> None:
        self._key, (self._test, self._validation) = key64(seed, "test split"), fractions

    @property
    def draws(self) -> bool:
        """Whether any row is drawn, so that row numbers matter."""
        return self._test is not None or self._validation is not None

    def splits(self, given: npt.NDArray[np.uint8] | None, n: int, begin: int) -> npt.NDArray[np.uint8]:
        """Return the index of the split of each of n rows, uint8 [n]; `begin` is the number of preceding rows.

        `given` has the splits that the source itself assigns; only its training rows are drawn for other splits. The
        validation fraction does not change which rows are test rows.
        """
        splits = np.zeros(n, np.uint8) if given is None else given
        if not self.draws:
            return splits
        drawn = uniform(self._key, np.arange(begin, begin + n, dtype=np.uint64))
        test = self._test or 0.0
        found = (drawn < test) * np.uint8(1)
        if self._validation is not None:
            found[(drawn >= test) & (drawn < test + self._validation)] = 2
        return np.where(splits == 0, found, splits)


def _remedy(first: Rejected) -> str:
    """Return how to leave out rows without a value in the first malformed row's column, or "" if that has a value."""
    found = _MISSING.match(first.reason)
    if found is None:
        return ""
    name, shown = found[1], ", " + first.text
    value = shown.split(f", {name}=", 1)[-1].split(",", 1)[0] if f", {name}=" in shown else ""
    column = '"' + name.replace('"', '""') + '"'
    condition = f"{column} IS NOT NULL"
    if value:
        condition += f" AND {column}::VARCHAR <> {_sql_text(value)}"
    if first.file == NAME:
        return f"; to leave out such rows, add the condition {condition} to the query"
    sql = f"SELECT * FROM {_sql_text(first.file)} WHERE {condition}"
    escaped = re.sub(r'(["\\$`])', r"\\\1", sql)  # for a shell, within double quotes
    return f'; to leave out such rows: hostdev preprocess query "{escaped}"'


def _sql_text(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
