"""The first pass: parse a source and write its rows as pieces.

Rows are counted in the source's order. These counts give the numbers of malformed lines, the row numbers by which rows
are drawn for the splits, and the share of malformed lines.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from hostdev.core.errors import HostdevError, UserError
from hostdev.core.progress import bar, counted
from hostdev.data.preprocess.pieces import Facts, PieceFile, Survey, survey, write_piece
from hostdev.data.preprocess.query import NAME
from hostdev.data.preprocess.raw import (
    BEGINNING,
    InputRange,
    InvalidRowError,
    RawRows,
    Rejected,
    Source,
    SourcePosition,
)
from hostdev.data.preprocess.runner import Files, Result, Runner, Task, Workspace, piece_name
from hostdev.data.preprocess.second_pass import MemoryCheck

MAX_REJECTED = 0.01
_MISSING = re.compile(r"column '(.+)': the value is missing")
_TEXT = ("columns", "delimiter", "skipped_lines")  # with one of these options, no query is suggested
_SOME, _MOST = 10_000, 0.5  # stop early if more than _MOST of at least _SOME rows are malformed
_FIRST = 10  # priority of tasks that free memory or disk space


class RowCounts:
    """Counts of the rows that were read so far, in the source's order.

    Attributes:
        rows: Number of well-formed rows.
        first: The first malformed line so far, with its number in its input; None if there is none.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self.rows = 0
        self.first: Rejected | None = None
        self._input = self._lines = self._rejected = 0  # `_lines` counts only the current input

    def lines_before(self, source: int) -> int:
        """Return the number of lines of input number `source` added so far; 0 unless it is the current input."""
        return self._lines if source == self._input else 0

    def add(self, source: int, rows: int, rejected: int, first: Rejected | None) -> None:
        """Add the next lines of input number `source`: `rows` well-formed and `rejected` malformed ones.

        `first` is the first malformed line, numbered from the first of these lines; None if none is malformed.
        """
        before = self.lines_before(source)
        if self.first is None and first is not None:
            self.first = first._replace(line=before + first.line)
        self._lines, self._input = before + rows + rejected, source
        self.rows += rows
        self._rejected += rejected

    def check_rejected(self, accepted: int) -> None:
        """Raise UserError if more than 1% of all rows, or more than half of at least 10,000 rows so far, are malformed.

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
        """Return how to leave out rows like the first malformed one, or "" if a query cannot read the rows."""
        options = self._source.options()
        return "" if any(options.get(name) for name in _TEXT) else _remedy(first)


def _remedy(first: Rejected) -> str:
    """Return a hint to leave out rows that lack the value that `first` lacks; "" if `first` has another fault."""
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
    """Parses a source into pieces. Ranges are parsed in any order, and counted in the order of the source.

    Attributes:
        names: The names of the pieces counted so far, in order.
        facts: The facts of the pieces that are written, in the same order, up to the first unwritten piece.
        end: The position in the source after the pieces that `resume` has found.
    """

    def __init__(self, work: Workspace, runner: Runner, memory: MemoryCheck) -> None:
        self._source, self._work, self._runner, self._memory = work.source, work, runner, memory
        self.names: list[str] = []
        self.facts: list[Facts] = []
        self.end = BEGINNING
        self._counts = RowCounts(work.source)
        self._ranges: dict[int, InputRange] = {}
        self._parsed: dict[int, Result | HostdevError] = {}  # by range, until all ranges before it are counted
        self._pieces: dict[str, tuple[Facts, Survey | None]] = {}  # by piece, until all pieces before it have facts
        self._missing: dict[int, list[Task]] = {}  # by range that is parsed again: the tasks of its pieces

    def resume(self) -> bool:
        """Take the leading intact pieces that an interrupted process wrote; return whether these are all pieces.

        Raises TransientError if their distinct values or their shards would not fit into memory.
        """
        names: list[str] = []
        while self._runner.find(f"piece-{_make_name(len(names))}", "piece") is not None:
            names.append(_make_name(len(names)))
        results = [self._runner.find(f"piece-{name}", "piece") or {} for name in names]
        verified = self._runner.verify(one["files"] for one in results)
        for name, result, intact in zip(names, results, verified, strict=True):
            facts = Facts.from_json(result["piece"])
            of_journal = _piece_task(name, self._counts.rows, facts.end, facts.size)
            if self._runner.known(of_journal) is None or not intact:
                break
            piece = PieceFile(self._work.path(piece_name(name)))
            if len(piece) != sum(facts.rows):
                break
            self._counts.add(facts.end.input, len(piece), facts.rejected, next(iter(piece.rejected()), None))
            hashed, spaces = self._work.hashed is not None, len(self._source.layout.spaces)
            self.names.append(name)
            self._take(name, facts, None if hashed else survey(piece, spaces))
            self.end = facts.end
        self._memory.check()
        return self._runner.known(_parsed_task(len(self.names))) is not None

    def run(self, ranges: Iterator[InputRange | HostdevError]) -> None:
        """Parse all ranges.

        Raises:
            UserError: More than 1% of the lines are malformed, or the input is unreadable. The first error in the
                source's order is raised; a HostdevError in `ranges` comes last in this order.
            TransientError: Values or shards do not fit into memory, or a read fails.
        """
        place = number = len(self.names)
        done = sum(one.size for one in self.facts)
        has_more = True
        error: HostdevError | None = None
        with bar(self._source.total, "first pass", self._source.unit, unit_scale=True, begin=done) as progress:
            while True:
                while place in self._parsed:
                    self._count(place, self._parsed.pop(place), progress)
                    place += 1
                if has_more and self._runner.has_room(number - place, len(self.names) - len(self.facts)):
                    upcoming = next(ranges, None)
                    if isinstance(upcoming, InputRange):
                        self._submit(number, upcoming)
                        number += 1
                    else:
                        has_more, error = False, upcoming
                elif self._runner.is_idle:
                    break
                else:
                    has_more = self._handle(*self._runner.next()) and has_more
        if error is not None:
            raise error
        self._memory.check()
        self._counts.check_rejected(self._counts.rows)
        self._source.check_unchanged()
        if self._work.in_memory:
            self._runner.note(_parsed_task(len(self.names)), {"files": {}})

    def _submit(self, number: int, one: InputRange) -> None:
        """Submit the task that parses range `number`.

        If the journal has the task's result, and separate tasks write the range's pieces, that result is used instead.
        """
        self._ranges[number] = one
        known = self._runner.known(task := self._parse_task(number))
        if known is not None and all(block["piece"] is None for block in known["blocks"]):
            self._parsed[number] = known
        else:
            self._runner.submit(task)

    def _parse_task(self, number: int, *, again: bool = False) -> Task:
        arguments = number, list(self._ranges[number])
        return Task(f"parse-{number:06d}", "parse", arguments, again=again, noted=not self._work.in_memory)

    def _handle(self, task: Task, result: Result | HostdevError) -> bool:
        """Process a finished task; return False if its range has an error, so that no later ranges are needed."""
        if task.kind == "parse" and not task.again:
            self._parsed[task.arguments[0]] = result
            return not isinstance(result, HostdevError) and result["error"] is None
        if isinstance(result, HostdevError):
            raise result
        if task.kind == "parse":
            for piece_task in self._missing.pop(task.arguments[0]):
                self._runner.submit(piece_task._replace(again=True))
            return True
        name = task.arguments[0]
        if result.get("missing"):  # an earlier command removed the parsed rows, and then the piece was damaged
            number = int(name.partition("-")[0])
            waiting = self._missing.setdefault(number, [])
            waiting.append(task)
            if len(waiting) == 1:
                self._runner.submit(self._parse_task(number, again=True))
            return True
        self._take(name, Facts.from_json(result["piece"]), self._work.surveys.pop(name, None))
        self._work.drop_rows(name)
        return True

    def _count(self, place: int, result: Result | HostdevError, progress: Any) -> None:
        """Count the next range's blocks, and submit the tasks that write missing pieces; raise the range's error."""
        one = self._ranges.pop(place) if self._work.in_memory else self._ranges[place]
        if isinstance(result, HostdevError):
            raise result
        counts = self._counts
        for block in result["blocks"]:
            end, first = SourcePosition(*block["end"]), block["first"] and Rejected(*block["first"])
            # In one process, a repeated command resumes after the leading pieces, and writes all later ones again.
            task = _piece_task(block["name"], counts.rows, end, block["size"])._replace(again=self._work.in_memory)
            counts.add(end.input, block["rows"], block["rejected"], first)
            counts.check_rejected(self._source.most_rows)  # fails once the remaining rows cannot lower the share to 1%
            self.names.append(block["name"])
            if block["piece"] is None:
                self._runner.submit(task)
            else:
                self._take(block["name"], Facts.from_json(block["piece"]), None)
            progress.update(block["size"])
        if (error := result["error"]) is not None:
            if isinstance(error, InvalidRowError):
                row = counts.lines_before(one.input) + error.row
                raise UserError(f"{error.file}, row {row}, {error.reason}")
            raise error

    def _take(self, name: str, facts: Facts, found: Survey | None) -> None:
        """Store a piece's facts and survey; pass all that are next in order to `facts` and the memory check.

        Raises TransientError if memory is too small.
        """
        self._pieces[name] = facts, found
        while len(self.facts) < len(self.names) and (following := self.names[len(self.facts)]) in self._pieces:
            facts, found = self._pieces.pop(following)
            self.facts.append(facts)
            self._memory.add(facts, found)


def _make_name(number: int, block: int = 0) -> str:
    """Return the name of block `block` of range `number`; its piece has the same name."""
    return f"{number:06d}-{block:06d}"


def _parsed_task(pieces: int) -> Task:
    """Return the task whose entry in the journal marks the end of the first pass."""
    return Task("parsed", "parsed", (pieces,))


def _piece_task(name: str, begin: int, end: SourcePosition, size: int) -> Task:
    """Return the task that writes a block as a piece; see `write`."""
    return Task(f"piece-{name}", "piece", (name, begin, list(end), size), priority=_FIRST)


def parse(work: Workspace, number: int, given: list[Any]) -> Result:
    """Parse range `number`.

    Returns the counts of each block, and the error that ended the range, if any.

    The split of a row may depend on the number of rows before the block. If this number is needed but not known yet,
    the parsed rows are kept for the task `write`, which draws the splits. Otherwise, a worker writes the block's piece
    at once. In one process, `write` always writes the piece.
    """
    one = InputRange(*given)
    work.check_input(one.input)
    blocks: list[Result] = []
    files: Files = {}
    error, begin = None, one.begin
    try:
        for k, block in enumerate(work.blocks(one)):
            rows = work.source.parse(block, hashed=work.hashed is not None)
            name = _make_name(number, k)
            found: Result = {
                "name": name,
                "rows": len(rows),
                "rejected": len(rows.rejected),
                "first": list(rows.rejected[0]) if rows.rejected else None,
                "end": list(block.end),
                "size": block.size,
                "piece": None,
            }
            if work.in_memory or (work.draw.draws and begin is None):
                files |= work.put_rows(name, rows)
            else:
                found["piece"], of_piece = _write_piece(work, name, rows, begin or 0, found)
                files |= of_piece
                begin = None if begin is None else begin + len(rows)
            blocks.append(found)
    except (HostdevError, InvalidRowError) as raised:
        error = raised
    work.check_input(one.input)
    return {"blocks": blocks, "error": error, "files": files}


def write(work: Workspace, name: str, begin: int, end: list[int], size: int) -> Result:
    """Write a block's parsed rows as a piece; `begin` rows are before them.

    Returns the facts, or an entry "missing" if the parsed rows are no longer there.
    """
    rows = work.take_rows(name)
    if rows is None:
        return {"missing": True, "files": {}}
    found, files = _write_piece(work, name, rows, begin, {"end": end, "size": size})
    return {"piece": found, "files": files}


def _write_piece(
    work: Workspace, name: str, rows: RawRows, begin: int, block: Mapping[str, Any]
) -> tuple[Result, Files]:
    """Write a piece; return its facts as JSON, and the files."""
    splits = work.draw.splits(rows.splits, len(rows), begin)
    path = work.path(piece_name(name))
    facts, found = write_piece(path, rows, splits, len(work.splits), work.source.layout, work.hashed)
    files = {piece_name(name): str(facts["checksum"])}
    if found is not None:
        files |= work.put_survey(name, found)
    return {**facts, "end": block["end"], "size": block["size"]}, files
