"""The client's part of the first pass: ranges are parsed in any order, and counted in the order of the source."""

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from hostdev.core.errors import HostdevError, UserError
from hostdev.core.progress import bar
from hostdev.data.preprocess.cluster import ranges
from hostdev.data.preprocess.cluster.first import Result, rows_name
from hostdev.data.preprocess.cluster.job import WorkerJob
from hostdev.data.preprocess.cluster.ranges import InputRange
from hostdev.data.preprocess.cluster.runner import Runner, Task, to_error
from hostdev.data.preprocess.pieces import Facts
from hostdev.data.preprocess.raw import Source
from hostdev.data.preprocess.rejected import Rejected
from hostdev.data.preprocess.row_counts import RowCounts
from hostdev.data.preprocess.synthetic import CHUNK_ROWS

_FIRST = 10  # priority of tasks that free disk space


class ClusterFirstPass:
    """Parses a source into pieces on the workers.

    Attributes:
        names: The names of all pieces, in order.
        facts: The facts of all pieces.
        lines_before: For each piece, what is added to the numbers of its malformed lines.
    """

    def __init__(self, source: Source, job: WorkerJob, runner: Runner) -> None:
        self._source, self._job, self._runner = source, job, runner
        self.names: list[str] = []
        self.facts: list[Facts] = []
        self.lines_before: list[int] = []
        self._counts = RowCounts(source)
        self._blocks: list[Result] = []  # in order, without facts where the piece is under way
        self._before: list[tuple[int, int]] = []  # rows and lines before each block
        self._pieces: dict[str, Result] = {}
        self._parsed: dict[int, Result | HostdevError] = {}  # results that wait for those before them
        self._missing: dict[int, list[Task]] = {}  # pieces whose range is parsed again

    def run(self) -> None:
        """Parse all ranges.

        Raises the error that one machine would report: that of the first range in the source's order.
        """
        self._ranges = list(self._plan())
        waiting = iter([number for number, one in enumerate(self._ranges) if isinstance(one, InputRange)])
        end = next((n for n, one in enumerate(self._ranges) if not isinstance(one, InputRange)), len(self._ranges))
        number, place = next(waiting, None), 0
        with bar(self._source.total, "first pass", self._source.unit, unit_scale=True) as progress:
            while True:
                while place in self._parsed:
                    self._count(self._ranges[place], self._parsed.pop(place), progress)
                    place += 1
                if place == end and end < len(self._ranges) and self._runner.is_idle:
                    raise self._ranges[end]  # type: ignore[misc]
                while number is not None and number < end and self._runner.has_room():
                    task = self._task(number)
                    if (known := self._runner.known(task)) is not None and not self._writes_pieces(known):
                        self._parsed[number] = known
                    else:
                        self._runner.submit(task)
                    number = next(waiting, None)
                if place in self._parsed:
                    continue
                if self._runner.is_idle:
                    break
                end = self._handle(*self._runner.next(), end)
        self._counts.check_rejected(self._counts.rows)
        self._finish()

    def _plan(self) -> Iterator[InputRange | UserError]:
        """Yield the ranges of all inputs; after an error, which ends the source there, nothing."""
        inputs = range(ranges.count_inputs(self._source))
        plans = [ranges.plan(self._source, number) for number in inputs]
        looks = {
            number: [Task(f"look-{number:06d}-{at[1]:06d}", "look", at) for at in ranges.looks(self._source, number)]
            for number in inputs
            if plans[number] is None
        }
        results = self._runner.map(task for some in looks.values() for task in some)
        for number, plan in enumerate(plans):
            error = None
            if plan is None:
                mine = [one for task in looks[number] for one in results[task.key]["looked"]]
                plan, error = ranges.divide(self._source, number, mine)
            yield from plan
            if error is not None:
                yield error
                return

    def _task(self, number: int, *, again: bool = False) -> Task:
        one = self._ranges[number]
        assert isinstance(one, InputRange)
        begin = one.place * CHUNK_ROWS if one.kind == "chunk" else None
        return Task(f"parse-{number:06d}", "parse", (number, list(one), begin), again=again)

    def _writes_pieces(self, parsed: Result) -> bool:
        """Return whether a result of the task `parse` has pieces, whose files must be verified."""
        return any(block["piece"] is not None for block in parsed["blocks"])

    def _handle(self, task: Task, result: Result | HostdevError, end: int) -> int:
        """Take a finished task; return the number of the first range that is not parsed, because one before failed."""
        if task.kind == "parse":
            number = task.arguments[0]
            if task.again:
                self._parse_again(number, result)
                return end
            self._parsed[number] = result
            return min(end, number + 1) if isinstance(result, HostdevError) or result["error"] else end
        if isinstance(result, HostdevError):
            raise result
        name = task.arguments[0]
        if result.get("missing"):  # an earlier command removed the parsed rows, and then the piece was damaged
            number = int(name.partition("-")[0])
            waiting = self._missing.setdefault(number, [])
            waiting.append(task)
            if len(waiting) == 1:
                self._runner.submit(self._task(number, again=True))
            return end
        self._pieces[name] = result["piece"]
        with suppress(OSError):
            self._job.path(rows_name(name)).unlink(missing_ok=True)
        return end

    def _parse_again(self, number: int, result: Result | HostdevError) -> None:
        if isinstance(result, HostdevError):
            raise result
        for task in self._missing.pop(number):
            self._runner.submit(task._replace(again=True))

    def _count(self, of: InputRange | UserError, result: Result | HostdevError, progress: Any) -> None:
        """Count the blocks of the next range, and submit the tasks that write their pieces."""
        if isinstance(result, HostdevError):
            raise result
        counts = self._counts
        for block in result["blocks"]:
            lines, rows = counts.lines_before(block["input"]), counts.rows
            if block["first"] is not None and counts.first is None:
                first = Rejected(*block["first"])
                counts.first = first._replace(line=lines + first.line)
            counts.add(block["input"], block["rows"] + block["rejected"], block["rows"], block["rejected"])
            counts.check_rejected(self._source.most_rows)
            self._blocks.append(block)
            self._before.append((rows, lines))
            if block["piece"] is None:
                self._runner.submit(Task(f"piece-{block['name']}", "piece", (block["name"], rows, lines), 1, _FIRST))
            progress.update(block["size"])
        if (error := result["error"]) is not None:
            if error["kind"] == "row":
                assert isinstance(of, InputRange)
                row = counts.lines_before(of.input) + error["row"]
                raise UserError(f"{error['file']}, row {row}, {error['reason']}")
            raise to_error(error)

    def _finish(self) -> None:
        for block, (_, lines) in zip(self._blocks, self._before, strict=True):
            direct = block["piece"] is not None
            facts = block["piece"] if direct else self._pieces[block["name"]]
            self.names.append(block["name"])
            self.facts.append(Facts.from_json({**facts, "end": [block["input"], 0], "size": block["size"]}))
            self.lines_before.append(lines if direct else 0)
