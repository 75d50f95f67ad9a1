"""A folder of checkpoints: listing, reading chains, committing new ones, and pruning.

A checkpoint is written to a folder with a temporary name, synced to disk, and renamed, so a checkpoint under its final
name is complete. An incremental checkpoint names its parent; `read_chain` finds all checkpoints that a checkpoint
needs.

Files of a checkpoint are mapped into memory, and verified by their checksums.
"""

import contextlib
import functools
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import sha256
from io import FileIO
from pathlib import Path
from typing import IO, Any, NamedTuple
from weakref import WeakValueDictionary

import numpy as np
import pyarrow as pa

from hostdev.checkpoint import manifest
from hostdev.checkpoint.manifest import (
    BrokenCheckpointError,
    CheckpointManifest,
    File,
    SegmentEntry,
    SegmentState,
)
from hostdev.core import locks
from hostdev.core.checksums import hash_stream
from hostdev.core.errors import HostdevError, UserError, raise_if_transient
from hostdev.core.names import inside
from hostdev.core.outputs import sync_folder
from hostdev.kernels import disk_records
from hostdev.kernels.disk_records import GOOD, Format

_NAME = re.compile(r"step-(\d{10,})(?:\.(\d+))?")
# These differ from the hidden names of `core.outputs`, because several ranks write to one folder at once.
_PARTIAL, _LOCK, _REMOVED = ".partial-", ".lock", ".removed-"
FOLDER = "checkpoints"  # a run directory's folder of checkpoints
_PIECE = 1 << 22  # bytes of a segment that are read at once
SOME_BYTES = 1 << 30  # bytes that are verified where verifying everything would take too long


class FolderInUseError(UserError):
    """Another process is writing checkpoints to the folder."""


class Checkpoint(NamedTuple):
    """A checkpoint on disk."""

    path: Path
    manifest: CheckpointManifest

    @property
    def name(self) -> str:
        """The name of the checkpoint's folder."""
        return self.path.name


Chain = list[Checkpoint]  # the full checkpoint first; each parent precedes its increment


class Found(NamedTuple):
    """A valid checkpoint with its parents (`chain`), and the errors of newer, damaged checkpoints (`broken`)."""

    chain: Chain
    broken: list[str]

    def notes(self) -> list[str]:
        """Return a line for each error in `broken`."""
        return [f"{line}; using an older one: {self.chain[-1].path}" for line in self.broken]


def name_of(step: int, number: int = 1) -> str:
    """Return the name of a checkpoint's folder: step-0000000300, or step-0000000300.2 for a second one at the step."""
    return f"step-{step:010d}" + (f".{number}" if number > 1 else "")


def names_in(path: Path) -> list[str]:
    """Return the names of the checkpoints in a folder, oldest first and unreadable ones last; [] if it is missing."""
    try:
        found = [(match, each.name) for each in path.iterdir() if (match := _NAME.fullmatch(each.name))]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    serials = {name: manifest.read_serial(path / name) for _, name in found}
    order = {name: (serials[name] is None, serials[name] or 0, _parse_numbers(match)) for match, name in found}
    return sorted(order, key=order.__getitem__)


def _parse_numbers(match: re.Match[str]) -> tuple[int, int]:
    """Return the step in a checkpoint's name, and the checkpoint's number within that step."""
    return int(match[1]), int(match[2] or 1)


def numbers_of(name: str) -> tuple[int, int]:
    """Return the step in a checkpoint's name, and the checkpoint's number within that step; zeros for another name."""
    match = _NAME.fullmatch(name)
    return (0, 0) if match is None else _parse_numbers(match)


def is_name(name: str) -> bool:
    """Return whether this may be the name of a checkpoint's folder."""
    return _NAME.fullmatch(name) is not None


def is_checkpoint(path: Path) -> bool:
    """Return whether a folder is itself a checkpoint, rather than a folder of checkpoints."""
    return (path / manifest.FILE_NAME).exists() or is_name(path.name)


def read_chain(path: Path, read: Callable[[Path], CheckpointManifest] = manifest.read) -> Chain:
    """Return a checkpoint with its parents, reading only manifests.

    Args:
        path: The checkpoint's folder.
        read: Returns the manifest of a checkpoint's folder.

    Raises:
        BrokenCheckpointError: A manifest is missing or damaged, or a file is missing or has the wrong size.
        UserError: `path` is a file, or a manifest has an unsupported format version.
    """
    chain = [Checkpoint(path, read(path))]
    while (parent := chain[0].manifest.parent) is not None:
        beside = path.parent / parent.name
        if not (beside / manifest.FILE_NAME).is_file():
            raise BrokenCheckpointError(f"{path} is incomplete: its parent {beside} is missing")
        found = Checkpoint(beside, read(beside))
        if found.manifest.checksum != parent.sha256:
            raise BrokenCheckpointError(f"{path} is incomplete: {beside} is not its parent, but a different checkpoint")
        if len(chain) > 1 << 16:
            raise BrokenCheckpointError(f"{path} is broken (its parents form a cycle)")
        if wrong := _find_difference(found.manifest, chain[0].manifest):
            raise BrokenCheckpointError(f"{chain[0].path} is broken ({wrong} its parent {beside})")
        chain.insert(0, found)
    for checkpoint in chain:
        for file in checkpoint.manifest.files:
            _require_there(checkpoint.path, file)
    return chain


def segments_of(checkpoint: Checkpoint) -> dict[tuple[int, str], Path]:
    """Return the segments that a checkpoint holds, by their size and checksum."""
    states = [table.segments for table in checkpoint.manifest.tables if table.segments is not None]
    return {(file.bytes, file.sha256): checkpoint.path / file.file for state in states for file in state.files}


def chain_of_table(chain: Chain, name: str) -> Chain:
    """Return the part of a chain that a table needs: from the newest checkpoint that has all its rows, to the end."""
    entries = [checkpoint.manifest.table(name) for checkpoint in chain]
    first = max((n for n, table in enumerate(entries) if table.segments is not None or table.whole), default=0)
    return chain[first:]


def _find_difference(parent: CheckpointManifest, child: CheckpointManifest) -> str | None:
    """Return None if a checkpoint's tables agree with its parent's, or else a text to put before the parent's path."""
    if {table.name for table in parent.tables} != {table.name for table in child.tables}:
        return "its tables differ from those of"
    for table in child.tables:
        before = parent.table(table.name)
        if (before.keys is None) != (table.keys is None):
            return f"table {table.name[:80]!r} is by key in only one of it and"
        for what in ("rows", "dim", "slots", "row_slots", "order"):
            if what == "rows" and table.keys is not None:
                continue
            if getattr(before, what) != getattr(table, what):
                return f"table {table.name[:80]!r} differs in {what} from"
    return None


def _require_there(path: Path, file: manifest.File) -> None:
    """Raise BrokenCheckpointError unless a checkpoint's file exists with the right size."""
    try:
        size = inside(path, file.file).stat().st_size
    except OSError:
        raise BrokenCheckpointError(f"{path / file.file} is missing") from None
    except ValueError as error:
        raise BrokenCheckpointError(f"{path} is broken ({error})") from None
    if size != file.bytes:
        raise BrokenCheckpointError(f"{path / file.file} is broken (it has {size} bytes, not {file.bytes})")


@contextlib.contextmanager
def locked(path: Path) -> Iterator[IO[Any]]:
    """Lock a folder against other writers and yield the lock file; raise UserError if the folder cannot be locked."""
    try:
        file = (path / _LOCK).open("a")
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}") from None
    with file, _lock(file, path):
        yield file


def is_locked_here(path: Path, file: IO[Any]) -> bool:
    """Return whether the locked folder still exists and was not replaced by a new folder of the same name."""
    return locks.is_same_file(path / _LOCK, file)


@contextlib.contextmanager
def _lock(file: IO[Any], path: Path) -> Iterator[None]:
    if not locks.try_lock(file):
        raise FolderInUseError(f"{path} is in use: another process writes checkpoints there; end that process first")
    try:
        yield
    finally:
        locks.unlock(file)


def new_name(path: Path, step: int) -> str:
    """Return an unused name for a checkpoint of this step."""
    matches = [match for name in names_in(path) if (match := _NAME.fullmatch(name))]
    taken = [number for at, number in map(_parse_numbers, matches) if at == step]
    return name_of(step, max(taken, default=0) + 1)


def new_serial(path: Path) -> int:
    """Return the serial number of the next checkpoint."""
    return max((manifest.read_serial(path / name) or 0 for name in names_in(path)), default=0) + 1


def begin(path: Path, name: str) -> Path:
    """Create the temporary folder of a new checkpoint; raise OSError if that fails."""
    path.mkdir(parents=True, exist_ok=True)
    partial = path / f"{_PARTIAL}{name}"
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir()
    return partial


def commit(partial: Path, name: str, content: CheckpointManifest) -> Checkpoint:
    """Write the manifest, sync everything to disk, and rename the folder; raise OSError if that fails."""
    with (partial / manifest.FILE_NAME).open("x") as file:
        file.write(content.to_text())
        file.flush()
        os.fsync(file.fileno())
    for folder, _, _ in os.walk(partial):
        sync_folder(Path(folder))
    path = partial.parent / name
    partial.rename(path)
    sync_folder(path.parent)
    return Checkpoint(path, content)


def still_exists(checkpoint: Checkpoint) -> bool:
    """Return whether this checkpoint, not another checkpoint of the same name, is still on disk."""
    try:
        return manifest.checksum_of(checkpoint.path) == checkpoint.manifest.checksum
    except (OSError, ValueError, KeyError, TypeError):
        return False


def is_parent(path: Path) -> bool:
    """Return whether the checkpoint at `path` is the parent of another checkpoint in the same folder."""
    for name in names_in(path.parent):
        try:
            parent = manifest.read(path.parent / name).parent
        except HostdevError:
            continue
        if parent is not None and parent.name == path.name:
            return True
    return False


def clean(path: Path, but: Path | None = None) -> None:
    """Remove unfinished checkpoints, except `but`, and what is left of checkpoints whose removal was interrupted."""
    for each in path.iterdir() if path.is_dir() else ():
        if each.name.startswith((_PARTIAL, _REMOVED)) and each != but:
            shutil.rmtree(each, ignore_errors=True)


def remove(path: Path) -> None:
    """Remove a checkpoint; rename it first, so that no reader finds an incomplete checkpoint."""
    hidden = path.with_name(f"{_REMOVED}{path.name}")
    path.rename(hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def prune(
    path: Path, keep: int, best_steps: Sequence[int] = (), check: Callable[[Chain], object] = lambda chain: None
) -> None:
    """Remove all but the newest valid checkpoints and their parents.

    Args:
        path: The folder.
        keep: Number of valid checkpoints to keep.
        best_steps: Steps in order of preference. The newest valid checkpoint of the first step that has one is also
            kept, with its parents.
        check: Called with the chains to keep, newest first; raises BrokenCheckpointError for a damaged one, which does
            not count towards `keep`.
    """
    kept: set[str] = set()
    chains: dict[str, Chain] = {}
    read = functools.cache(manifest.read)  # chains share parents, whose manifests are then read once
    names = list(reversed(names_in(path)))
    for name in names:
        with contextlib.suppress(HostdevError):
            chains[name] = read_chain(path / name, read)
    for step in best_steps:
        of_step = [chain for chain in chains.values() if chain[-1].manifest.step == step]
        if of_step:
            kept |= {checkpoint.name for checkpoint in of_step[0]}
            break
    found = 0
    for name in names:
        if found == keep:
            if name not in kept:
                remove(path / name)
        elif name in chains:
            with contextlib.suppress(BrokenCheckpointError):
                check(chains[name])
                kept |= {checkpoint.name for checkpoint in chains[name]}
                found += 1


_mapped: WeakValueDictionary[tuple[int, ...], Any] = WeakValueDictionary()  # content, by device, inode, size and time


def mapped(path: Path) -> Any:
    """Return a file's memory-mapped content; raise BrokenCheckpointError if it cannot be read.

    A file that checkpoints share by hard links is mapped only once.
    """
    try:
        found = path.stat()
        key = found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
        if (known := _mapped.get(key)) is not None:
            return known
        with pa.memory_map(os.fsencode(path)) as file:
            made = _mapped[key] = file.read_buffer()
            return made
    except OSError as error:
        raise_if_transient(error)
        raise BrokenCheckpointError(f"{path} is broken ({error})") from None


def check_file(path: Path, file: File, content: memoryview | None = None) -> None:
    """Read a file in chunks; raise BrokenCheckpointError unless its size and checksum match the manifest.

    Args:
        path: The file.
        file: The file's entry in the manifest.
        content: Output for the file's content, `file.bytes` bytes; if None, the file is only verified.
    """

    def look(stream: FileIO) -> str | None:
        out = None if content is None else pa.FixedSizeBufferWriter(pa.py_buffer(content))
        digest = hash_stream(stream, out=out, most=file.bytes)
        return None if digest == file.sha256 else "its checksum is wrong"

    _check(path, file, look)


def check_segment(path: Path, file: SegmentEntry, state: SegmentState) -> None:
    """Read a segment; raise BrokenCheckpointError unless its size and the checksums of its blocks are right.

    A segment's SHA-256 is that of its blocks' headers, which hold the blocks' checksums, not that of all bytes.
    """

    def look(stream: FileIO) -> str | None:
        size, found, blocks, failure = state.block_bytes, sha256(), 0, np.zeros(3, np.int64)
        format_ = Format(state.record_bytes, size, 1, 1, 1)
        while data := stream.read(max(1, _PIECE // size) * size):
            words = np.frombuffer(data[: len(data) // size * size], np.uint64).reshape(-1, size >> 3)
            tag = np.uint64((file.number << 32) + blocks)
            disk_records.check(0, len(words), words.reshape(-1), tag, format_, failure)
            if failure[0] != GOOD:
                begin = (blocks + int(failure[1])) * size
                return f"bytes {begin:,} to {begin + size:,}: the checksum is wrong"
            found.update(np.ascontiguousarray(words[:, :2]).data)
            blocks += len(words)
        return None if found.hexdigest() == file.sha256 else "its checksum is wrong"

    _check(path, file, look)


def check_entry(root: Path, file: File, states: Mapping[str, SegmentState]) -> None:
    """Read a file or a segment of the checkpoint at `root`; raise BrokenCheckpointError unless it is intact.

    Args:
        root: The checkpoint's folder, or a folder with a copy of the file.
        file: The file's entry in the manifest.
        states: `CheckpointManifest.segment_states`.
    """
    if isinstance(file, SegmentEntry):
        check_segment(root / file.file, file, states[file.file])
    else:
        check_file(root / file.file, file)


def _check(path: Path, file: File, look: Callable[[FileIO], str | None]) -> None:
    """Raise BrokenCheckpointError unless a file has its size, and `look` returns None for the open file."""
    try:
        with path.open("rb", buffering=0) as stream:
            there = os.fstat(stream.fileno()).st_size
            why = f"it has {there} bytes, not {file.bytes}" if there != file.bytes else look(stream)
            wrong = None if why is None else f"is broken ({why})"
    except FileNotFoundError:
        wrong = "is missing"
    except OSError as error:
        raise_if_transient(error)
        wrong = f"cannot be read ({error.strerror})"
    if wrong is not None:
        broken = BrokenCheckpointError(f"{path} {wrong}")
        broken.file = path
        raise broken
