"""The first pass: parse a source's blocks on all cores and write them as pieces, in the source's order.

The rows read so far are counted for line numbers, row numbers that draw the splits, and the share of malformed lines.
"""

import re
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hostdev.core.errors import HostdevError, UserError
from hostdev.core.progress import bar, counted
from hostdev.core.workers import Workers
from hostdev.data.preprocess.pieces import Facts, PieceFile, Survey, merge, survey, write_piece
from hostdev.data.preprocess.query import NAME
from hostdev.data.preprocess.raw import BEGINNING, InvalidRowError, RawBlock, RawRows, Rejected, Source
from hostdev.data.preprocess.second_pass import ShardMemory
from hostdev.data.preprocess.vocabulary import HashBuckets, require_memory
from hostdev.data.preprocess.work import WorkFolder
from hostdev.kernels.counter import key64, uniform

MAX_REJECTED = 0.01
_MISSING = re.compile(r"column '(.+)': the value is missing")
_TEXT = ("columns", "delimiter", "skipped_lines")  # options that a query would need in another form
_SOME, _MOST = 10_000, 0.5  # stop early if more than _MOST of at least _SOME rows are malformed
_CHECKED_AT_ONCE = 8  # pieces per memory check, since asking the system for free memory is slow
Written = tuple[dict[str, Any], Survey | None]


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


class FirstPass:
    """Parses a source into pieces; can resume after the pieces that an interrupted process wrote.

    Args:
        fractions: The shares of rows to draw with `seed` for testing and for validation; None to draw none.
        splits: Number of splits.
        hashed: The hash that maps values to ids; None if values are counted for a vocabulary.
        shards: The memory that the second pass needs for shards.
        survey: Estimates for the earlier data set's values, which will be in memory, too; None without such a data set.
    """

    def __init__(
        self,
        source: Source,
        work: WorkFolder,
        *,
        fractions: tuple[float | None, float | None],
        splits: int,
        seed: int,
        hashed: HashBuckets | None,
        shards: ShardMemory,
        survey: Survey | None = None,
    ) -> None:
        self._source, self._work, self._shards = source, work, shards
        self._draw, self._splits, self._hashed = SplitDraw(seed, fractions), splits, hashed
        self.facts: list[Facts] = []  # one for each written piece
        self._counts = RowCounts(source)
        self._surveys = [] if survey is None else [survey]
        self._unchecked: list[Facts] = []  # pieces that the memory check does not include yet

    def path(self, number: int) -> Path:
        """Return the path of a piece's file."""
        return self._work.pieces / f"{number:06d}.arrow"

    def resume(self, facts: list[Facts]) -> None:
        """Resume after the pieces that `facts` describes.

        Raises TransientError if their distinct values or their shards would not fit into memory.
        """
        self._unchecked = list(facts)
        for number, one in enumerate(facts):
            self._counts.add(one.end.input, one.lines, sum(one.rows), one.rejected)
            piece = PieceFile(self.path(number))
            if one.rejected and self._counts.first is None:
                self._counts.first = next(piece.rejected())
            if self._hashed is None:
                self._surveys.append(survey(piece, len(self._source.layout.spaces)))
        self.facts = list(facts)
        self._check_memory()

    def run(self, workers: Workers, threads: int) -> None:
        """Parse the remaining blocks.

        Raises:
            UserError: More than 1% of the lines are malformed, or the input is unreadable.
            TransientError: Values or shards do not fit into memory, or a read fails.
        """
        place = self.facts[-1].end if self.facts else BEGINNING
        done = sum(one.size for one in self.facts)
        parsing: deque[tuple[RawBlock, Future[RawRows]]] = deque()
        writing: deque[tuple[RawBlock, Future[Written]]] = deque()
        with bar(self._source.total, "first pass", self._source.unit, unit_scale=True, begin=done) as progress:
            for block in _until_error(self._source.blocks(place)):
                at_end = not isinstance(block, RawBlock)
                if isinstance(block, RawBlock):
                    parsing.append((block, workers.submit(partial(self._parse, block))))
                while parsing and (at_end or len(parsing) > threads):
                    parsed, future = parsing.popleft()
                    writing.append((parsed, self._write(parsed, future, workers, len(self.facts) + len(writing))))
                while writing and (at_end or len(writing) > threads):
                    written, result = writing.popleft()
                    self._note(written, result.result())
                    progress.update(written.size)
                if isinstance(block, HostdevError):
                    raise block
        self._check_memory()
        self._counts.check_rejected(self._counts.rows)
        self._source.check_unchanged()

    def _parse(self, block: RawBlock) -> RawRows:
        return self._source.parse(block, hashed=self._hashed is not None)

    def _write(self, block: RawBlock, parsed: Future[RawRows], workers: Workers, number: int) -> Future[Written]:
        """Wait until a block is parsed, count its rows, and submit a task that writes them as piece `number`."""
        counts = self._counts
        before = counts.lines_before(block.end.input)
        try:
            rows = parsed.result()
        except InvalidRowError as error:
            raise UserError(f"{error.file}, row {before + error.row}, {error.reason}") from None
        if rows.rejected:
            rows = replace(rows, rejected=rows.rejected.after(before))
            counts.first = counts.first or rows.rejected[0]
        begin = counts.rows
        counts.add(block.end.input, len(rows) + len(rows.rejected), len(rows), len(rows.rejected))
        counts.check_rejected(self._source.most_rows)  # fails as soon as the remaining rows cannot lower it to 1%

        def write() -> Written:
            splits = self._draw.splits(rows.splits, len(rows), begin)
            return write_piece(self.path(number), rows, splits, self._splits, self._source.layout, self._hashed)

        return workers.submit(write)

    def _note(self, block: RawBlock, result: Written) -> None:
        """Record the next finished piece."""
        found, survey = result
        facts = Facts(**found, end=block.end, size=block.size)
        self._work.note(piece=facts.as_json())
        self.facts.append(facts)
        self._unchecked.append(facts)
        self._surveys += [survey] if survey is not None else []
        if len(self._unchecked) == _CHECKED_AT_ONCE:
            self._check_memory()

    def _check_memory(self) -> None:
        """Raise TransientError if the shards or the distinct values would not fit into memory."""
        self._shards.add_pieces(self._unchecked)
        self._unchecked = []
        if self._surveys:
            self._surveys = [merge(self._surveys)]
            require_memory(self._surveys[0].values(), self._surveys[0].text_bytes())


def _until_error(blocks: Iterator[RawBlock]) -> Iterator[RawBlock | HostdevError | None]:
    """Yield the blocks, then the HostdevError that ended the iteration, or None if it ended without one."""
    try:
        yield from blocks
    except HostdevError as error:  # reported after the errors of in-flight blocks
        yield error
        return
    yield None
