"""A checkpoint's files: mapped into memory, and verified by their checksums."""

import os
from collections.abc import Callable, Mapping
from hashlib import sha256
from io import FileIO
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import pyarrow as pa

from hostdev.checkpoint.manifest import BrokenCheckpointError, File, SegmentEntry, SegmentState
from hostdev.core.checksums import hash_stream
from hostdev.core.errors import raise_if_transient
from hostdev.kernels import disk_records
from hostdev.kernels.disk_records import GOOD, Format

_PIECE = 1 << 22  # bytes
SOME_BYTES = 1 << 30  # that are read again where reading everything would take too long


_mapped: WeakValueDictionary[tuple[int, ...], Any] = WeakValueDictionary()  # by device, inode, size and time


def mapped(path: Path) -> Any:
    """Return a file's memory-mapped content; raise BrokenCheckpointError if it cannot be read.

    A file that is mapped already is not mapped again: checkpoints of a chain share files, and the pages that were read.
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

    Its SHA-256 is that of the blocks' own checksums, so that `hash_stream` does not serve.
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
        states: `Manifest.segment_states`.
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
