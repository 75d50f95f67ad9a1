"""The description of a preparation, in a file of the work folder, from which each worker builds source and options."""

import contextlib
import fcntl
import io
import json
import os
import pickle
import socket
import tempfile
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import numpy as np
import pyarrow as pa

import hostdev
from hostdev.core.addresses import address_of, is_remote, source_path
from hostdev.core.checksums import Crc32, checksum
from hostdev.core.errors import TransientError
from hostdev.core.outputs import replacing
from hostdev.data.preprocess import places
from hostdev.data.preprocess.criteo import CriteoText
from hostdev.data.preprocess.earlier_vocabulary import NO_EARLIER, Earlier, read_earlier
from hostdev.data.preprocess.first_pass import SplitDraw
from hostdev.data.preprocess.inputs import open_input
from hostdev.data.preprocess.options import Options
from hostdev.data.preprocess.pieces import write_lists
from hostdev.data.preprocess.raw import Source
from hostdev.data.preprocess.stored import StoredVocabulary
from hostdev.data.preprocess.synthetic import Synthetic
from hostdev.data.preprocess.table import TableSource
from hostdev.data.preprocess.vocabulary import HashBuckets
from hostdev.kernels.jit import take_turns
from hostdev.kernels.pool import set_host_threads

_Base: Any = type(Path())


class PlacedPath(_Base):  # type: ignore[misc]
    """A path whose text is the user's, perhaps relative to a folder of the client's; files are opened at `place`.

    Messages and rejected lines thus name the same file on all machines.
    """

    place: str | None = None

    def __fspath__(self) -> str:
        return str(self) if self.place is None else self.place


def placed(shown: str, place: str) -> Path:
    """Return a path with this text that opens the file at `place`."""
    path = PlacedPath(shown)
    path.place = place
    return path


_ATTEMPTS = "attempts"  # files that are not complete yet
FOLDERS = ("rows", "pieces", "spread", "words", "shards", _ATTEMPTS)

Files = dict[str, str]  # CRC-32, or SHA-256 for shards, by name within the job's folder
_SHA_256 = 64  # hexadecimal digits


# What a task gets of its job: the path of the job's file, its checksum, the name of the client's host, and the versions
# there. It is a plain tuple, which a worker with another version can read.
Reference = tuple[str, str, str, tuple[tuple[str, str], ...]]


class Description(NamedTuple):
    """How to build a source anew: its kind, paths (as shown, absolute) by group, and further arguments."""

    kind: str
    groups: list[list[tuple[str, str]]]
    more: Any


@dataclass(frozen=True)
class Job:
    """What a worker needs to know.

    Attributes:
        folder: Absolute path of the job's folder, within the work folder.
        source: How to build the source.
        stamps: Size and modification time of each input; None for rows without files.
        splits: Number of splits.
        earlier: Path of the earlier data set, whether it is frozen, and its identity.
    """

    folder: str
    source: Description
    stamps: list[tuple[int, Any]] | None
    options: Options
    splits: int
    earlier: tuple[str, bool, str] | None


def get_versions() -> dict[str, str]:
    """Return the versions that must be equal on all workers: hostdev's, and the major versions of what writes files."""
    return {
        "hostdev": hostdev.__version__,
        "pyarrow": pa.__version__.partition(".")[0],
        "numpy": np.__version__.partition(".")[0],
    }


def describe(source: Source) -> Description | None:
    """Return how to build a source on another machine, or None if it is bound to this one."""
    if isinstance(source, Synthetic):
        return Description("synthetic", [], (source.total, source.seed))
    if source.stamp() is None:
        return None
    if isinstance(source, CriteoText):
        return Description("criteo", [[_pair(one.path) for one in source.inputs]], source.block_bytes)
    if not isinstance(source, TableSource) or any(str(file.input.path) == "-" for file in source.files):
        return None
    options, groups = source.description
    return Description("table", [[_pair(path) for path in group] for group in groups], options)


def _pair(path: Path) -> tuple[str, str]:
    if (address := address_of(path)) is not None:
        return address, address
    return str(path), os.path.abspath(path)  # noqa: PTH100  (links stay as they are: their targets may differ by host)


def _build(how: Description) -> Source:
    """Build a source; nothing is printed, since the client has printed it already."""
    with contextlib.redirect_stderr(io.StringIO()):
        if how.kind == "synthetic":
            return Synthetic(*how.more)
        groups = [
            [source_path(place) if is_remote(place) else placed(shown, place) for shown, place in group]
            for group in how.groups
        ]
        if how.kind == "criteo":
            inputs = [open_input(path, lambda name: name == "train.txt") for path in groups[0]]
            return CriteoText(inputs=inputs, block_bytes=how.more)
        return TableSource([], how.more, groups)


def stamps(source: Source) -> list[tuple[int, Any]] | None:
    """Return size and modification time of each input of a source; None if it has no files."""
    found = [one.stamp() for one in source.inputs]
    return [(int(stamp[1]), stamp[2]) for stamp in found if stamp is not None] or None


class WorkerJob:
    """A job as a worker sees it."""

    def __init__(self, job: Job) -> None:
        self.job, self.folder = job, Path(job.folder)
        self.options = job.options
        self.draw = SplitDraw(job.options.seed, (job.options.test_fraction, job.options.validation_fraction))
        self._lock = threading.Lock()
        self._source: Source | None = None
        self._earlier: Earlier | None = None

    @property
    def source(self) -> Source:
        """The source, built when it is first needed. Raises TransientError if a file is not the client's."""
        with self._lock:
            if self._source is None:
                for number in range(len(self.job.stamps or ())):
                    self.check_input(number)
                self._source = _build(self.job.source)
            return self._source

    def check_input(self, number: int) -> None:
        """Raise TransientError if an input is not the file that the client sees, or has changed."""
        if self.job.stamps is not None:
            shown, place = [pair for group in self.job.source.groups for pair in group][number]
            _require_file(shown, place, self.job.stamps[number])

    @property
    def hashed(self) -> HashBuckets | None:
        """The hash that maps values to ids, if there is no vocabulary."""
        buckets = self.options.hash_buckets
        return None if buckets is None else HashBuckets(buckets, self.source.layout)

    @property
    def earlier(self) -> Earlier:
        """The earlier data set, or `NO_EARLIER`; raises TransientError if it is not the client's."""
        if self.job.earlier is None:
            return NO_EARLIER
        with self._lock:
            if self._earlier is None:
                folder, frozen, identity = self.job.earlier
                if not Path(folder).is_dir():
                    raise TransientError(f"{worker_name()} does not see {folder}; --vocabulary must be on the share")
                found = read_earlier(Path(folder), frozen=frozen)
                if found.identity != identity:
                    raise TransientError(f"{worker_name()} sees another data set at {folder} than the client")
                self._earlier = found
            return self._earlier

    @cached_property
    def stored(self) -> StoredVocabulary:
        """The vocabulary of the earlier data set, whose checksum is compared once."""
        return self.earlier.open()

    def path(self, name: str) -> Path:
        """Return the path of a file in the job's folder."""
        return self.folder / name

    def write(self, name: str, write: Callable[[Path], str]) -> str:
        """Let `write` make a file, which gets its name once it is complete; return what `write` returns.

        Several workers may write the same file at once: each has a file of its own until then.
        """
        with replacing(self.path(name), self.folder / _ATTEMPTS) as attempt:
            return write(attempt)

    def write_lists(self, name: str, content: Mapping[str, Any]) -> Files:
        """Write arrays to an Arrow file, as `pieces.write_lists` does; return its name and checksum."""
        return {name: self.write(name, lambda path: write_lists(path, content))}

    def are_intact(self, files: Files) -> bool:
        """Return whether files have these checksums."""
        return all(
            self.path(name).is_file() and checksum(self.path(name), sha256 if len(of) == _SHA_256 else Crc32) == of
            for name, of in files.items()
        )

    def read_json(self, name: str, crc: str) -> Any:
        """Return the content of a file of JSON, which is kept in memory."""
        return _read_json(self.path(name), crc)


def _crc(content: bytes) -> str:
    """Return the CRC-32 of bytes, as `Crc32` writes it."""
    return f"{zlib.crc32(content):08x}"


@lru_cache(8)
def _read_json(path: Path, crc: str) -> Any:
    content = path.read_bytes()
    if _crc(content) != crc:
        raise TransientError(f"{worker_name()}: {path} is damaged; the same command writes it again")
    return json.loads(content)


def write_json(work: WorkerJob, name: str, content: Any) -> str:
    """Write a file of JSON; return its CRC-32."""
    text = json.dumps(content).encode()

    def write(path: Path) -> str:
        path.write_bytes(text)
        return _crc(text)

    return work.write(name, write)


def write_job(job: Job, path: Path) -> Reference:
    """Write a job's file, with a random mark that shows a worker whether it sees the same folder."""
    content = pickle.dumps((uuid4().hex, job))
    path.write_bytes(content)
    return str(path), sha256(content).hexdigest(), socket.gethostname(), tuple(get_versions().items())


_opening = threading.Lock()


def open_job(reference: Reference) -> WorkerJob:
    """Return the job that a reference names, after checking this worker.

    Raises TransientError, by the worker's name, if it does not see the work folder or has other versions.
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


_address = threading.local()  # the worker's, where Dask does not know it: outside tasks


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


def _require_file(shown: str, place: str, stamp: tuple[int, Any]) -> None:
    try:
        found = places.stamp(source_path(place))
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
    """Hold a lock of this host and user."""
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
