"""Threads that read records from a disk: many small reads are in progress at once, and none holds the GIL."""

import itertools
import os
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hostdev.kernels import disk_records
from hostdev.kernels.arrays import reserve
from hostdev.kernels.disk_records import GOOD, Format

THREADS = 32  # reads in progress at once; disks reach their rate of random reads at 16 to 64
_LEAST = 8  # records that are worth waking a thread

_queue: "SimpleQueue[tuple[Read, int, int]]" = SimpleQueue()
_threads: list[threading.Thread] = []
_growing = threading.Lock()


class Planes(NamedTuple):
    """Rows in memory: each plane's address and its bytes per row, int64 [planes]. `arrays` keeps the memory alive."""

    addresses: npt.NDArray[np.int64]
    widths: npt.NDArray[np.int64]
    arrays: list[Any]

    @classmethod
    def of(cls, arrays: list[Any]) -> "Planes":
        """Return the planes of C-contiguous arrays, each [rows, any]."""
        addresses = np.array([each.ctypes.data for each in arrays], np.int64)
        return cls(addresses, np.array([each.strides[0] for each in arrays], np.int64), arrays)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row in all planes."""
        return int(self.widths.sum())


class RecordSource(NamedTuple):
    """Record files, open or memory-mapped.

    Attributes:
        files: int32 [segments], descriptors of open files.
        tags: uint64 [segments], the tag of each segment's first block.
        format: The format of records.
        maps: int64 [segments], addresses of memory-mapped files; 0 for other files.
    """

    files: npt.NDArray[np.int32]
    tags: npt.NDArray[np.uint64]
    format: Format
    maps: npt.NDArray[np.int64]


class Read:
    """A read of records, which begins at once.

    Args:
        source: The files.
        positions: int64 [N], the records' positions (`host.disk.store`).
        keys: int64 [N], the records' keys.
        targets: int32 [N], the row of `planes` for each record.
        planes: Where to put the rows.
        done: Called with this read when it has ended, in any thread.

    Attributes:
        failure: int64 [3], see `disk_records.read`.
    """

    def __init__(
        self,
        source: RecordSource,
        positions: Any,
        keys: Any,
        targets: Any,
        planes: Planes,
        done: Callable[["Read"], None],
    ) -> None:
        order = np.argsort(positions)
        self._source, self._planes, self._done = source, planes, done
        self._records = positions[order], keys[order], targets[order]
        self.failure = np.zeros(3, np.int64)
        self._lock, self._ended = threading.Lock(), threading.Event()
        n = len(positions)
        pieces = max(1, min(2 * THREADS, n // _LEAST))
        edges = np.linspace(0, n, pieces + 1).astype(np.int64).tolist()
        self._left = pieces
        _ensure_threads()
        for start, stop in itertools.pairwise(edges):
            _queue.put((self, start, stop))

    def work(self, start: int, stop: int, words: Any) -> None:
        """Read the records [start, stop), in the order of positions; `words` is a buffer, uint64 [any]."""
        failure = np.zeros(3, np.int64)
        try:
            if self.failure[0] == GOOD:
                source, planes = self._source, self._planes
                shared = source.files, source.maps, source.tags, source.format, planes.addresses, planes.widths
                disk_records.read(start, stop, *self._records, *shared, words, failure)
        finally:
            with self._lock:
                if failure[0] != GOOD:
                    self.failure[:] = failure
                self._left -= 1
                last = not self._left
            if last:
                self._done(self)
                self._ended.set()

    def wait(self) -> None:
        """Wait until the read has ended."""
        self._ended.wait()


def _serve() -> None:
    size, words = 0, None
    while True:
        read, start, stop = _queue.get()
        needed = read._source.format.buffer_bytes
        if needed > size:
            size, words = needed, reserve(needed, huge=False)[1].view(np.uint64)
        read.work(start, stop, words)
        del read  # hold no arrays while waiting


def _ensure_threads() -> None:
    if len(_threads) < THREADS:
        with _growing:
            while len(_threads) < THREADS:
                thread = threading.Thread(target=_serve, name=f"hostdev-read-{len(_threads) + 1}", daemon=True)
                thread.start()
                _threads.append(thread)


def _after_fork() -> None:
    global _queue, _growing
    _queue, _growing = SimpleQueue(), threading.Lock()
    _threads.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
