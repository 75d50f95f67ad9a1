"""Tasks of a preparation: the workspace that they share, and the runner, which submits them and keeps a journal.

A task's entry in the journal has its result, a checksum of its arguments, and the checksums of the files that it has
written. A repeated command does not run the task again if it has the same arguments and the files are intact.
"""

import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property, lru_cache
from hashlib import sha256
from pathlib import Path
from threading import Event, Lock
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar

from hostdev.core.checksums import Crc32, checksum
from hostdev.core.errors import HostdevError, TransientError
from hostdev.core.json_files import parse
from hostdev.core.outputs import replacing
from hostdev.data.preprocess.earlier_vocabulary import Earlier
from hostdev.data.preprocess.options import Options
from hostdev.data.preprocess.pieces import SplitDraw, Survey, write_lists
from hostdev.data.preprocess.raw import InputRange, RawBlock, RawRows, Source
from hostdev.data.preprocess.stored import StoredVocabulary
from hostdev.data.preprocess.vocabulary import CountedValues, HashBuckets
from hostdev.data.preprocess.work import WorkFolder

Files = dict[str, str]  # CRC-32, or SHA-256 for shards, by name within the folder
Result = dict[str, Any]  # a task's result: JSON if the journal records it; "files" has the files that the task wrote
T = TypeVar("T")
_SHA_256 = 64  # hexadecimal digits of a SHA-256

# Names of files: a piece, its survey, and the ids of its dictionaries' values; and a file of the finished data set.
piece_name = "pieces/{}.arrow".format
survey_name = "pieces/{}.survey".format
ids_name = "pieces/{}.ids".format
result_name = "result/{}".format


class Workspace:
    """The state that tasks in threads of this process share; workers of a cluster have a `cluster.job.WorkerJob`.

    Parsed rows, surveys and counted values stay in memory between tasks.

    Args:
        folder: The work folder, which has all files of the preparation.
        splits: The names of the splits.

    Attributes:
        stopping: Set when results are no longer needed; a task that reads all pieces then ends after its current piece.
        advance: Called by tasks after each piece.
        values: By id space, the counted values.
        surveys: By piece, the survey of its values until the client takes it.
    """

    in_memory: ClassVar[bool] = True  # whether one process runs all tasks, so that they can share objects

    def __init__(
        self, folder: Path, source: Source, options: Options, splits: tuple[str, ...], earlier: Earlier
    ) -> None:
        self.folder, self.source, self.options, self.splits, self.earlier = folder, source, options, splits, earlier
        self.draw = SplitDraw(options.seed, (options.test_fraction, options.validation_fraction))
        self.stopping = Event()
        self.advance: Callable[[], object] = lambda: None
        self.values: dict[int, CountedValues] = {}
        self.surveys: dict[str, Survey] = {}
        self._rows: dict[str, RawRows] = {}
        self._made: dict[str, Any] = {}
        self._making = Lock()

    @cached_property
    def hashed(self) -> HashBuckets | None:
        """The hash that maps values to ids; None if a vocabulary does."""
        buckets = self.options.hash_buckets
        return None if buckets is None else HashBuckets(buckets, self.source.layout)

    @property
    def stored(self) -> StoredVocabulary:
        """The earlier data set's vocabulary, which is opened and checked once."""
        return self.once("stored", self._open_stored)

    def _open_stored(self) -> StoredVocabulary:
        return self.earlier.open()

    def once(self, name: str, make: Callable[[], T]) -> T:
        """Return the object with this name, which the first call makes with `make`; thread-safe."""
        with self._making:
            if name not in self._made:
                self._made[name] = make()
            made: T = self._made[name]
            return made

    def check_input(self, number: int) -> None:
        """Do nothing; on a worker, raise TransientError if an input is not the file that the client sees."""

    def blocks(self, one: InputRange) -> Iterator[RawBlock]:
        """Yield the blocks of a range; in one process, the range's place is its only block."""
        yield one.place

    def put_rows(self, name: str, rows: RawRows) -> Files:
        """Keep a block's parsed rows for the task that writes them as a piece; return the file written, if any."""
        self._rows[name] = rows
        return {}

    def take_rows(self, name: str) -> RawRows | None:
        """Return the parsed rows of a block; None if they are no longer kept."""
        return self._rows.pop(name, None)

    def drop_rows(self, name: str) -> None:
        """Do nothing; on a worker, remove the file with the parsed rows of a block whose piece is written."""

    def put_survey(self, name: str, found: Survey) -> Files:
        """Keep the survey of a piece's values; return the file written, if any."""
        self.surveys[name] = found
        return {}

    def path(self, name: str) -> Path:
        """Return the path of a file in the folder."""
        return self.folder / name

    def write_lists(self, name: str, content: Mapping[str, Any]) -> Files:
        """Write arrays to an Arrow file, as `pieces.write_lists` does; return its name and checksum."""
        return {name: write_lists(self.path(name), content)}

    def write_json(self, name: str, content: Any) -> list[str]:
        """Write a file of JSON; return its name and its CRC-32, the arguments of `read_json`."""
        with replacing(self.path(name)) as partial:
            partial.write_text(json.dumps(content))
        return [name, checksum(self.path(name), Crc32)]

    def read_json(self, name: str, crc: str) -> Any:
        """Return the cached content of a file of JSON; raise TransientError if the file is damaged."""
        return _read_json(self.path(name), crc)

    def are_intact(self, files: Files) -> bool:
        """Return whether all files have their checksums."""
        return all(
            self.path(name).is_file() and checksum(self.path(name), sha256 if len(of) == _SHA_256 else Crc32) == of
            for name, of in files.items()
        )


@lru_cache(8)
def _read_json(path: Path, crc: str) -> Any:
    if checksum(path, Crc32) != crc:
        raise TransientError(f"{path} is damaged; the same command writes it again")
    return json.loads(path.read_text())


class Task(NamedTuple):
    """A task.

    Attributes:
        key: Its name in the journal and, with a mark of this run, on Dask's dashboard.
        kind: A name of `tasks.TASKS`.
        arguments: Its arguments; JSON values if the task is noted.
        size: Its share of the progress bar.
        priority: On a cluster, tasks with a higher priority run first.
        again: Whether the task runs even if the journal has its result.
        noted: Whether its result is recorded in the journal.
    """

    key: str
    kind: str
    arguments: tuple[Any, ...] = ()
    size: int = 1
    priority: int = 0
    again: bool = False
    noted: bool = True


class Executor(Protocol):
    """Runs tasks: in threads of this process (`tasks.Threads`), or on workers (`cluster.prepare.DaskWorkers`)."""

    memory: int | None
    """Bytes of memory for the tasks that share it; None for what is free on this machine."""
    sharing: int
    """Number of tasks that run at once in the same memory."""

    def has_room(self, running: int, parsing: int, pieces: int) -> bool:
        """Return whether another task should be submitted; see `Runner.has_room`."""

    def submit(self, task: Task, known: Files | None) -> None:
        """Submit a task, which is not run if the files `known` are intact."""

    def gather(self) -> list[tuple[Task, dict[str, Any]]]:
        """Wait for tasks; return the finished tasks, each with the result of `tasks.run_task`.

        Raises a task's exception that is no HostdevError, and TransientError if nothing can run tasks any more.
        """

    def stop(self) -> None:
        """Let long tasks end early, because their results are no longer needed."""

    def close_files(self) -> None:
        """Close the files that tasks have left open."""


class Runner:
    """Submits tasks and returns their results.

    Args:
        executor: Runs the tasks; also an attribute.
        entries: The journal's entries.
        is_sound: Called with a kind of task and a result in the journal; returns whether the result is valid for it.
    """

    def __init__(
        self,
        executor: Executor,
        work: WorkFolder,
        entries: Iterable[dict[str, Any]],
        is_sound: Callable[[str, Result], bool],
    ) -> None:
        self.executor, self._work, self._is_sound = executor, work, is_sound
        self._known = {entry["task"]: entry for entry in entries if _is_entry(entry)}
        self._running = 0
        self._ready: list[tuple[Task, Result | HostdevError]] = []
        work.rewrite(list(self._known.values()))

    def known(self, task: Task) -> Result | None:
        """Return the journal's result of a task with the same arguments, or None."""
        found = self.find(task.key, task.kind)
        return None if found is None or self._known[task.key]["arguments"] != _checksum(task) else found

    def find(self, key: str, kind: str) -> Result | None:
        """Return the journal's result of a task with any arguments, or None."""
        entry = self._known.get(key)
        if entry is None or not self._is_sound(kind, entry["result"]):
            return None
        result: Result = entry["result"]
        return result

    def has_room(self, parsing: int = 0, pieces: int = 0) -> bool:
        """Return whether more tasks should be submitted.

        Args:
            parsing: Number of ranges that are being parsed, or are parsed and wait for those before them.
            pieces: Number of pieces that are being written.
        """
        return self.executor.has_room(self._running, parsing, pieces)

    @property
    def is_idle(self) -> bool:
        """Whether no task is under way."""
        return not self._running

    def submit(self, task: Task) -> None:
        """Submit a task."""
        known = None if task.again or not task.noted else self.known(task)
        self._running += 1
        self.executor.submit(task, None if known is None else known["files"])

    def next(self) -> tuple[Task, Result | HostdevError]:
        """Wait for the next finished task; return it with its result, or with the error for the user."""
        try:
            while not self._ready:
                self._ready = [(task, self._take(task, found)) for task, found in self.executor.gather()]
        except BaseException:
            self.executor.stop()
            raise
        task, result = self._ready.pop(0)
        self._running -= 1
        if isinstance(result, HostdevError):
            self.executor.stop()
        return task, result

    def verify(self, given: Iterable[Files]) -> list[bool]:
        """Return for each group of files whether all of them have their checksums."""
        tasks = [Task(f"verify-{i:06d}", "verify", (files,), again=True, noted=False) for i, files in enumerate(given)]
        results = self.map(tasks)
        return [results[task.key]["intact"] for task in tasks]

    def map(self, given: Iterable[Task], done: Callable[[int], object] = lambda n: None) -> dict[str, Result]:
        """Run tasks; return their results by key. Calls `done` with the size of each task that has finished.

        If several tasks fail, raises the error of the first one in their order.
        """
        results: dict[str, Result] = {}
        failed: dict[int, HostdevError] = {}
        order: dict[str, int] = {}
        waiting = iter(given)
        task = next(waiting, None)
        while task is not None or not self.is_idle:
            while task is not None and not failed and self.has_room():
                order[task.key] = len(order)
                self.submit(task)
                task = next(waiting, None)
            if self.is_idle:
                break
            finished, result = self.next()
            if isinstance(result, HostdevError):
                failed[order[finished.key]] = result
            else:
                results[finished.key] = result
                done(finished.size)
        if failed:
            raise failed[min(failed)]
        return results

    def _take(self, task: Task, found: dict[str, Any]) -> Result | HostdevError:
        if "error" in found:
            error: HostdevError = found["error"]
            return error
        if "known" in found:
            known = self.known(task)
            assert known is not None
            return known
        result: Result = found["result"]
        if task.noted and not result.get("missing") and not result.get("error"):
            result = json.loads(json.dumps(result))  # the same as if it was read from the journal
            self.note(task, result)
        return result

    def note(self, task: Task, result: Result) -> None:
        """Record the result of a task in the journal."""
        entry = {"task": task.key, "arguments": _checksum(task), "result": result}
        self._work.note(**entry)
        self._known[task.key] = entry


def _checksum(task: Task) -> int:
    return zlib.crc32(json.dumps([task.kind, task.arguments]).encode())


def _is_entry(entry: dict[str, Any]) -> bool:
    try:
        parse(str, entry["task"])
        parse(dict[str, str], parse(dict[str, Any], entry["result"])["files"])
    except (ValueError, KeyError):
        return False
    return entry.keys() == {"task", "arguments", "result"}
