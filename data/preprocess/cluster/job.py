"""The workers' part of a preparation on a cluster: they read its description in the work folder, and run its tasks."""

import contextlib
import fcntl
import os
import pickle
import socket
import tempfile
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

import hostdev
from hostdev.core.addresses import address_of, shown_place, source_path
from hostdev.core.checksums import Crc32, HashedFile
from hostdev.core.errors import HostdevError, TransientError, UserError, in_words, naming
from hostdev.core.memory import available_bytes
from hostdev.core.outputs import replacing
from hostdev.data.preprocess import places
from hostdev.data.preprocess.earlier_vocabulary import Earlier
from hostdev.data.preprocess.options import Options
from hostdev.data.preprocess.pieces import Survey, merge
from hostdev.data.preprocess.raw import InputRange, InvalidRowError, RawBlock, RawRows, RejectedLines, Source
from hostdev.data.preprocess.runner import Files, Result, Workspace, survey_name
from hostdev.data.preprocess.stored import DamagedError, StoredVocabulary
from hostdev.data.preprocess.tasks import TASKS, run_task
from hostdev.kernels.cardinality import estimate, total
from hostdev.kernels.columns import narrowed
from hostdev.kernels.jit import take_turns
from hostdev.kernels.pool import set_host_threads

rows_name = "rows/{}".format  # name of the file of a block's parsed rows
FOLDERS = ("rows", "pieces", "spread", "words", "result")
_Base: Any = type(Path())


class PlacedPath(_Base):  # type: ignore[misc]
    """A path that opens the file at `place`, and whose text is the path that the user gave on the client's machine.

    Messages and rejected lines thus have the same name for a file on all machines.
    """

    place: str | None = None

    def __fspath__(self) -> str:
        return str(self) if self.place is None else self.place


def placed(shown: str, place: str) -> Path:
    """Return a path with this text that opens the file at `place`."""
    path = PlacedPath(shown)
    path.place = place
    return path


class JobPickler(pickle.Pickler):
    """Writes a job with absolute paths, which open the same files in any current folder.

    Links stay as they are, because their targets may differ by host.
    """

    def reducer_override(self, obj: Any) -> Any:
        """Return how to rebuild a path; NotImplemented for any other object."""
        if not isinstance(obj, Path):
            return NotImplemented
        if (address := address_of(obj)) is not None:
            return source_path, (address,)
        return placed, (str(obj), os.path.abspath(obj))  # noqa: PTH100


# A task's reference to its job: the path of the job's file, the file's checksum, the name of the client's host, and the
# client's versions of packages. It is a plain tuple, which a worker with another version can read.
Reference = tuple[str, str, str, tuple[tuple[str, str], ...]]


@dataclass(frozen=True)
class Job:
    """The description of a preparation for workers.

    Attributes:
        folder: Absolute path of the job's folder, within the work folder.
        source: The rows; its inputs are opened anew on each worker.
        stamps: Size and modification time of each input; None for rows without files.
        splits: The names of the splits.
        earlier: The earlier data set, or `earlier_vocabulary.NO_EARLIER`.
    """

    folder: str
    source: Source
    stamps: list[tuple[int, Any]] | None
    options: Options
    splits: tuple[str, ...]
    earlier: Earlier


def get_versions() -> dict[str, str]:
    """Return versions that must be equal everywhere: hostdev's, and the major versions of pyarrow and numpy."""
    return {
        "hostdev": hostdev.__version__,
        "pyarrow": pa.__version__.partition(".")[0],
        "numpy": np.__version__.partition(".")[0],
    }


class WorkerJob(Workspace):
    """A job on a worker. Tasks leave data for other tasks in files, because any worker may run the other tasks."""

    in_memory = False

    def __init__(self, job: Job) -> None:
        super().__init__(Path(job.folder), job.source, job.options, job.splits, job.earlier)
        self._stamps = job.stamps

    def check_input(self, number: int) -> None:
        """Raise TransientError if an input is not the file that the client sees, or has changed."""
        if self._stamps is not None:
            _require_file(self.source.inputs[number].path, self._stamps[number])

    def _open_stored(self) -> StoredVocabulary:
        """Open the vocabulary of the earlier data set; raise TransientError if it is not the client's."""
        if not self.earlier.keeps:
            return super()._open_stored()
        earlier = replace(self.earlier, folder=Path(os.fspath(self.earlier.folder)))  # opens it on this worker
        if not earlier.folder.is_dir():
            raise TransientError(f"{worker_name()} does not see {earlier.folder}; --vocabulary must be on the share")
        try:
            return earlier.open()
        except DamagedError as error:
            raise TransientError(
                f"{worker_name()} sees another data set at {earlier.folder} than the client ({error})"
            ) from None

    def blocks(self, one: InputRange) -> Iterator[RawBlock]:
        """Yield the blocks of a range."""
        return self.source.blocks_of(one)

    def put_rows(self, name: str, rows: RawRows) -> Files:
        """See `Workspace`."""
        return {rows_name(name): write_rows(self.path(rows_name(name)), rows)}

    def take_rows(self, name: str) -> RawRows | None:
        """See `Workspace`."""
        path = self.path(rows_name(name))
        return read_rows(path) if path.is_file() else None

    def drop_rows(self, name: str) -> None:
        """See `Workspace`."""
        with contextlib.suppress(OSError):
            self.path(rows_name(name)).unlink(missing_ok=True)

    def put_survey(self, name: str, found: Survey) -> Files:
        """See `Workspace`."""
        return {survey_name(name): _dump(self.path(survey_name(name)), found)}

    def read_json(self, name: str, crc: str) -> Any:
        """See `Workspace`; the error names this worker."""
        try:
            return super().read_json(name, crc)
        except TransientError as error:
            raise TransientError(f"{worker_name()}: {error}") from None


def look(work: Workspace, number: int, start: int, stop: int) -> Result:
    """Return the results of `Source.look` for windows [start, stop) of an input; `Source.ranges` needs them."""
    work.check_input(number)
    return {"looked": [list(one) for one in work.source.look(number, range(start, stop))], "files": {}}


def survey(work: Workspace, names: list[str], out: str) -> Result:
    """Merge surveys into the file `out`; return, by id space, estimates of the number of values and of their bytes.

    The bytes are None if the values are integers.
    """
    merged = merge([_load(work.path(name)) for name in names])
    texts = None if merged.texts is None else list(map(total, merged.texts))
    files = {out: _dump(work.path(out), merged)}
    return {"values": list(map(estimate, merged.registers)), "texts": texts, "files": files}


def write_rows(path: Path, rows: RawRows) -> str:
    """Write rows atomically, for `read_rows`, with numbers in small types; return the file's CRC-32."""
    small = replace(
        rows,
        numbers=narrowed(np.ascontiguousarray(rows.numbers).reshape(-1)).reshape(rows.numbers.shape),
        keys=rows.keys[:0],
        bags=tuple((_narrow(values), lengths) for values, lengths in rows.bags),
        rejected=RejectedLines(),
    )
    keys = [_narrow(np.ascontiguousarray(column)) for column in rows.keys.T]
    return _dump(path, (small, keys, rows.rejected.columns()))


def read_rows(path: Path) -> RawRows:
    """Read the rows that `write_rows` wrote."""
    small, columns, lines = _load(path)
    keys = np.empty((len(columns), len(small.label)), np.int64)
    for i, column in enumerate(columns):
        keys[i] = column
    rows: RawRows = replace(
        small,
        numbers=small.numbers.astype(np.float64),
        keys=keys.T,
        bags=tuple((values.astype(np.int64), lengths) for values, lengths in small.bags),
        rejected=RejectedLines.from_columns(lines),
    )
    return rows


def _narrow(values: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
    """Return integers in the smallest unsigned type that holds them; unchanged if one is negative or above 32 bits."""
    if not len(values):
        return values
    low, high = int(values.min()), int(values.max())
    return values if low < 0 or high >> 32 else values.astype(np.min_scalar_type(high))


def _dump(path: Path, content: Any) -> str:
    """Write objects atomically, for `_load`; return the file's CRC-32."""
    with naming(path), replacing(path) as partial, closing(HashedFile(partial, Crc32)) as file:
        pickle.dump(content, file, protocol=5)
        return file.finish(to_disk=False)


def _load(path: Path) -> Any:
    with path.open("rb") as file:
        return pickle.load(file)


_opening = threading.Lock()


def open_job(reference: Reference) -> WorkerJob:
    """Return the job that a reference names, after checking this worker.

    Raises TransientError, which names the worker, if it does not see the work folder or has other versions.
    """
    with _opening:
        return _open(reference)


@lru_cache(4)
def _open(reference: Reference) -> WorkerJob:
    path, checksum_there, host, versions = Path(reference[0]), *reference[1:]
    if (mine := get_versions()) != dict(versions):
        raise TransientError(wrong_versions(worker_name(), mine, dict(versions)))
    try:
        content = path.read_bytes()
    except OSError as error:
        raise TransientError(
            f"{worker_name()} does not see the work folder {path.parent} of {host} ({error.strerror}); --out must be "
            "in a folder that all workers share"
        ) from None
    if sha256(content).hexdigest() != checksum_there:
        raise TransientError(
            f"{worker_name()} has another folder at {path.parent} than {host}; --out must be in a folder that all "
            "workers share"
        )
    job: Job = pickle.loads(content)[1]
    set_host_threads(1)  # Dask's own threads run tasks side by side
    take_turns(_compiling)
    return WorkerJob(job)


def wrong_versions(name: str, there: dict[str, str], here: dict[str, str]) -> str:
    """Return the message for a worker with other versions than the client's."""
    package = next(package for package, version in here.items() if there.get(package) != version)
    return (
        f"{name} has {package} {there.get(package, 'of an unknown version')}, and this command has {here[package]}; "
        "install the same versions everywhere"
    )


_address = threading.local()  # the worker's address, which Dask does not provide outside tasks


def name_worker(address: str) -> None:
    """Set the address for `worker_name` in this thread, for code that is not a task."""
    _address.value = address


def worker_name() -> str:
    """Return this worker's name for messages: its address and its host."""
    from distributed import get_worker

    try:
        address = get_worker().address
    except ValueError:
        address = getattr(_address, "value", "on")
    return f"worker {address} ({socket.gethostname()})"


def _require_file(path: Path, stamp: tuple[int, Any]) -> None:
    shown = shown_place(path)
    try:
        found = places.stamp(path)
    except OSError as error:
        raise TransientError(
            f"{worker_name()} cannot read {shown} ({error.strerror}); all workers must see the files, under the same "
            "paths"
        ) from None
    if tuple(found) != tuple(stamp):
        raise TransientError(
            f"{shown} has another size or time of change on {worker_name()} than here: its folder is not shared, or "
            "the file changed; run again once all hosts see the same file"
        )


@contextmanager
def _compiling() -> Iterator[None]:
    """Hold a lock, so that only one of this user's processes on this host compiles kernels at a time."""
    path = Path(tempfile.gettempdir()) / f"hostdev-compiling-{os.getuid()}.lock"
    try:
        file = path.open("w")
    except OSError:  # without the lock, each process may compile
        yield
        return
    with file:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def describe_error(error: BaseException) -> dict[str, Any]:
    """Return an error of a task as JSON, for `to_error`."""
    if isinstance(error, InvalidRowError):
        return {"kind": "row", "file": error.file, "row": error.row, "reason": error.reason}
    return {"kind": type(error).__name__, "message": str(error)}


def to_error(content: dict[str, Any]) -> Exception:
    """Return the error that `describe_error` described, as InvalidRowError, TransientError or UserError."""
    if content["kind"] == "row":
        return InvalidRowError(content["file"], content["row"], content["reason"])
    kind = TransientError if content["kind"] in ("TransientError", "StoreError") else UserError
    return kind(content["message"])


def _describe_failure(error: HostdevError | OSError | MemoryError) -> dict[str, Any]:
    """Return a task's error as JSON, for `to_error`; one of the system becomes transient, and names this worker."""
    if isinstance(error, HostdevError):
        return describe_error(error)
    return {"kind": "TransientError", "message": f"{in_words(error)} ({worker_name()})"}


_TASKS: dict[str, Any] = {**TASKS, "look": look, "survey": survey}


def run(reference: Reference, kind: str, arguments: tuple[Any, ...], known: Files | None) -> dict[str, Any]:
    """Run a task of a job; return the result of `tasks.run_task`, with errors as JSON, as Dask logs raised ones."""
    try:
        outcome = run_task(open_job(reference), _TASKS[kind], arguments, known)
    except (HostdevError, OSError, MemoryError) as error:
        outcome = {"error": _describe_failure(error)}
    for part in (outcome, outcome.get("result", {})):
        if isinstance(part.get("error"), Exception):
            part["error"] = describe_error(part["error"])
    return outcome


def check(reference: Reference, dask_worker: Any = None) -> dict[str, Any]:
    """Check this worker; return its error as JSON, or None, and its bytes of memory per thread."""
    name_worker(dask_worker.address)
    try:
        open_job(reference)
    except (HostdevError, OSError, MemoryError) as error:
        return {"error": _describe_failure(error), "memory": 0}
    free = available_bytes()
    manager = getattr(dask_worker, "memory_manager", None)
    limit = getattr(manager, "memory_limit", None) or free
    return {"error": None, "memory": min(free, limit) // max(1, dask_worker.state.nthreads)}
