"""The thread that collects segments: it appends their live records again, and removes their files."""

import time
from typing import Any

import numpy as np
import numpy.typing as npt

from hostdev.core.errors import DiskFullError, UserError, in_words
from hostdev.host.disk.segments import get_pages, read_all
from hostdev.kernels import disk_records, frames
from hostdev.kernels.disk_records import GOOD

_RETRIED_AFTER = 0.5  # seconds between tries on a full disk, which never end (unlike `core.stores.Patience`)
_ROWS = 1 << 20  # entries of `where` searched each time that the lock is held


class Collector:
    """Collects segments of which at least half the records are dead, and segments that checkpoints must not have.

    Args:
        store: The `SegmentStore` of the segments.
    """

    def __init__(self, store: Any) -> None:
        self._store, self._segments = store, store.segments

    def run(self) -> None:
        """Collect until the store is closed."""
        store = self._store
        words = get_pages(store.format.chunk_bytes).view(np.uint64)
        while True:
            with store.changed:
                while not store.closed and (segment := self._find()) < 0:
                    store.changed.wait(1.0)
                if store.closed:
                    return
            try:
                self._move_live(segment, words)
            except DiskFullError:  # reported by the calls that append rows
                time.sleep(_RETRIED_AFTER)
            except UserError as error:
                store.fail(error)
                return
            except Exception as error:
                store.fail(
                    UserError(f"table {self._segments.name!r}: segments cannot be collected ({in_words(error)})")
                )
                return

    def _find(self) -> int:
        """Return a segment to collect, or a negative number."""
        closed, waiting = self._segments.closed(), self._store.waiting
        closed = closed[[segment not in waiting for segment in closed.tolist()]] if waiting else closed
        if not len(closed):
            return -1
        tainted = closed[self._segments.tainted[closed]]
        if len(tainted):
            return int(tainted[0])
        segment = int(closed[np.argmin(self._segments.live[closed])])
        return segment if 2 * self._segments.live[segment] <= self._store.format.per_segment else -1

    def _move_live(self, segment: int, words: Any) -> None:
        """Append the live records of a segment again, and free it."""
        store, live, per_chunk = self._store, self._segments.live, self._store.format.per_chunk
        numbers, rows = np.empty(per_chunk + 1, np.int32), np.empty(per_chunk, np.int64)
        adopted = self._find_rows(segment) if segment in self._segments.adopted else None
        for chunk in range(int(self._segments.ends[segment])):
            if not live[segment]:
                break
            self._read_chunk(segment, chunk, words)
            if adopted is None:
                disk_records.record_rows(0, per_chunk, words, store.format, rows)
            else:
                rows = adopted[chunk * per_chunk : (chunk + 1) * per_chunk]
            first = segment * store.format.per_segment + chunk * per_chunk
            while not store.closed:
                with store.changed:
                    found, dropped = disk_records.find_live(rows, first, store.where, store.saved, numbers)
                    live[segment] -= dropped
                    moved = min(int(found), store.room())
                    if moved:
                        chosen = numbers[:moved]
                        store.append_moved(segment, chosen, rows[chosen], words)
                    if moved == found:
                        break
                store.await_room()
        with store.changed:
            if not store.closed:
                assert not live[segment]
                store.release(segment)

    def _find_rows(self, segment: int) -> npt.NDArray[np.int64]:
        """Return the row of each record of an adopted segment, int64 [records]; -1 if the record is dead."""
        store = self._store
        found = np.full(store.format.per_segment, -1, np.int64)
        for start in range(0, len(store.where), _ROWS):
            with store.changed:
                frames.find_records(
                    start,
                    min(len(store.where), start + _ROWS),
                    store.where,
                    store.saved,
                    segment * store.format.per_segment,
                    found,
                )
        return found

    def _read_chunk(self, segment: int, chunk: int, words: Any) -> None:
        format_, source, path = self._store.format, self._segments.source, self._segments.path(segment)
        size, blocks = format_.chunk_bytes, format_.chunk_bytes // format_.block_bytes
        try:
            read_all(int(source.files[segment]), memoryview(words).cast("B"), chunk * size)
        except OSError as error:
            raise UserError(f"table {self._segments.name!r}: {path} cannot be read ({in_words(error)})") from None
        failure = np.zeros(3, np.int64)
        tag = source.tags[segment] + np.uint64(chunk * blocks)
        disk_records.check(0, blocks, words, tag, format_, failure)
        if failure[0] != GOOD:
            raise self._segments.damage(segment, chunk * blocks + int(failure[1]), int(failure[0]))
