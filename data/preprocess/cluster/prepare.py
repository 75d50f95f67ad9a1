"""The client's part of a preparation on a cluster: it submits tasks, keeps the journal, and writes the manifest.

Ranges are parsed in any order, and counted in the order of the source.
"""

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

from hostdev.core.errors import HostdevError, UserError
from hostdev.core.progress import bar
from hostdev.data import schema as schemas
from hostdev.data.manifest import SPLITS, Manifest
from hostdev.data.preprocess import second_pass
from hostdev.data.preprocess.build import VOCABULARY_FILE, Learned, ManifestWriter
from hostdev.data.preprocess.cluster.first import InputRange, Result, divide, looks, plan, rows_name
from hostdev.data.preprocess.cluster.job import (
    FOLDERS,
    Job,
    Reference,
    WorkerJob,
    describe,
    stamps,
    write_job,
    write_json,
)
from hostdev.data.preprocess.cluster.learning import Learning
from hostdev.data.preprocess.cluster.runner import Connection, Runner, Task, connect, to_error
from hostdev.data.preprocess.earlier_vocabulary import NO_EARLIER, Earlier
from hostdev.data.preprocess.first_pass import RowCounts
from hostdev.data.preprocess.options import Options
from hostdev.data.preprocess.pieces import Facts
from hostdev.data.preprocess.raw import Rejected, Source
from hostdev.data.preprocess.second_pass import ShardMemory, Shards, shard_name
from hostdev.data.preprocess.synthetic import CHUNK_ROWS
from hostdev.data.preprocess.work import WorkFolder, claim

_FIRST = 10  # priority of tasks that free disk space
_FORMAT = 1  # of the job's folder and of the journal's entries


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
        inputs = range(len(self._source.inputs) or 1)
        plans = [plan(self._source, number) for number in inputs]
        looked = {
            number: [Task(f"look-{number:06d}-{at[1]:06d}", "look", at) for at in looks(self._source, number)]
            for number in inputs
            if plans[number] is None
        }
        results = self._runner.map(task for some in looked.values() for task in some)
        for number, planned in enumerate(plans):
            error = None
            if planned is None:
                mine = [one for task in looked[number] for one in results[task.key]["looked"]]
                planned, error = divide(self._source, number, mine)
            yield from planned
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


def prepare(source: Source, out: Path, options: Options, scheduler: str, earlier: Earlier | None = None) -> Manifest:
    """Write a data set into the new folder `out` with the workers of a Dask scheduler; return its manifest.

    The data set's bytes are those of `build.build`, and `source`, `out`, `options` and `earlier` are its arguments.

    Args:
        scheduler: tcp://HOST:PORT or tls://HOST:PORT of a scheduler, or local:N for N processes on this machine.

    Raises:
        UserError: As `build.build` does; the source can be read only by this machine; Dask is missing, or no scheduler
            answers.
        TransientError: A worker does not see the same files or has other versions; the scheduler is gone; a task ended
            several workers; or a read or write fails. Finished work is kept, and the same call continues.
    """
    how = describe(source)
    if how is None:
        raise UserError(
            "--scheduler: standard input, pipes and queries can be read only on this machine; give files that all "
            "workers see, or leave out --scheduler"
        )
    earlier = earlier or NO_EARLIER
    earlier.require(source, options.dense, options.hash_buckets)
    with connect(scheduler) as connection, claim(out) as work:
        manifest = _Preparation(source, work, options, earlier, connection).run()
        work.finish()
    return manifest


class _Preparation:
    """The state of one preparation."""

    def __init__(
        self, source: Source, work: WorkFolder, options: Options, earlier: Earlier, connection: Connection
    ) -> None:
        self._source, self._work, self._options, self._earlier = source, work, options, earlier
        self._connection = connection
        has_validation = source.has_validation or options.validation_fraction is not None
        self._splits = SPLITS if has_validation else SPLITS[:2]

    def run(self) -> Manifest:
        recipe = ["cluster", _FORMAT, self._source.stamp(), self._source.options(), self._options.as_json()]
        recipe += self._earlier.recipe()
        recipe = json.loads(json.dumps(recipe))
        entries = self._work.begin(recipe)
        self._make_job(sha256(json.dumps(recipe).encode()).hexdigest()[:12])
        self._connection.check(self._reference)
        mark = self._reference[1][:8]
        self._runner = Runner(self._connection, self._reference, self._work, mark, entries)
        self._work.rewrite(self._runner.entries())
        first = ClusterFirstPass(self._source, self._job, self._runner)
        first.run()
        self._source.check_unchanged()
        outcome = ManifestWriter(self._source, self._options, self._earlier, self._splits, first.facts)
        rows = outcome.rows()
        self._check_shards(first.facts)
        content = {"names": first.names, "rows": [fact.rows for fact in first.facts]}
        self._index = ["index.json", write_json(self._job, "index.json", content)]
        found = Learning(
            self._source, self._job, self._options, self._earlier, self._runner, self._connection.memory
        ).run(first.names, self._index, rows["train"])
        shards = self._write_shards(first.facts, found)
        self._collect(shards)
        learned = Learned(schemas.from_json(found["schema"]), found["scaling"], found["padded"], found["known_shares"])
        paths = [self._job.path(f"pieces/{name}.arrow") for name in first.names]
        return outcome.write(self._work.result, paths, learned, shards, found["sha256"], first.lines_before)

    def _make_job(self, name: str) -> None:
        """Write the job's file. Its folder has the recipe's name, so that a task of another recipe that is still
        running on a worker writes elsewhere."""
        folder = Path(os.path.abspath(self._work.pieces)) / name  # noqa: PTH100
        shutil.rmtree(folder / "attempts", ignore_errors=True)  # left by killed workers
        for each in FOLDERS:
            (folder / each).mkdir(parents=True, exist_ok=True)
        for split in self._splits:
            (folder / "shards" / split).mkdir(exist_ok=True)
        how = describe(self._source)
        assert how is not None
        job = Job(str(folder), how, stamps(self._source), self._options, len(self._splits), self._earlier.reference)
        self._reference: Reference = write_job(job, folder / "job.pickle")
        self._job = WorkerJob(job)

    def _check_shards(self, facts: Sequence[Facts]) -> None:
        """Raise TransientError unless a shard fits into the memory of a worker's thread."""
        options, layout = self._options, self._source.layout
        hashed = self._job.hashed
        id_type = "int32" if hashed is None else hashed.schema.id_type
        memory = ShardMemory(layout, options.rows_per_shard, 1, id_type, len(self._splits), self._connection.memory)
        memory.add_pieces(facts)

    def _write_shards(self, facts: Sequence[Facts], found: dict[str, Any]) -> Shards:
        """Write all shards."""
        content = {"schema": found["schema"], "scaling": found["scaling"]}
        learned = ["learned.json", write_json(self._job, "learned.json", content)]
        shards = Shards(self._splits, schemas.from_json(found["schema"]), hashed=self._options.hash_buckets is not None)
        order: list[tuple[str, str]] = []

        def tasks() -> Any:
            for i, split in enumerate(self._splits):
                parts = second_pass.split_shards(facts, i, self._options.rows_per_shard)
                for number, ranges in enumerate(parts):
                    key, name = f"shard-{split}-{number:05d}", shard_name(split, number)
                    order.append((split, key))
                    places = [[one.piece, one.start, one.stop] for one in ranges]
                    size = sum(one.stop - one.start for one in ranges)
                    yield Task(key, "shard", (name, i, places, self._index, learned), size)

        total = sum(sum(fact.rows) for fact in facts)
        with bar(total, "second pass", "rows", unit_scale=True) as progress:
            results = self._runner.map(tasks(), progress.update)
        for split, key in order:
            shards.add(split, results[key]["shard"])
        return shards

    def _collect(self, shards: Shards) -> None:
        """Move the vocabulary and the shards to the data set's folder."""
        if self._options.hash_buckets is None:
            self._move(f"words/{VOCABULARY_FILE}", VOCABULARY_FILE)
        for split, found in shards.found.items():
            (self._work.result / split).mkdir(exist_ok=True)
            for one in found:
                self._move(f"shards/{one.file}", one.file)

    def _move(self, name: str, to: str) -> None:
        """Give a file of the job its name in the data set.

        A copy by a hard link leaves the job's file for a command that is repeated after an interruption; a file system
        without links gets a copy.
        """
        path = self._work.result / to
        path.unlink(missing_ok=True)
        try:
            path.hardlink_to(self._job.path(name))
        except OSError:
            shutil.copyfile(self._job.path(name), path)
