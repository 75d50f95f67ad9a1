"""Batches from Arrow shards: background threads open and check files, and host threads gather the rows.

The order of the rows is computed from the seed, the epoch and the width of the shuffle window.
"""

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hostdev.core.errors import UserError
from hostdev.core.workers import Workers
from hostdev.data.batch import Batch, Range, ShardPiece, ShardRows, gathered
from hostdev.data.manifest import Manifest
from hostdev.data.shard_files import ShardFiles
from hostdev.kernels.counter import key64, permutation

_THREADS = 2
_AHEAD = 2  # open whole windows in advance until they have at least this many shards


@dataclass(frozen=True)
class Window:
    """Shards whose rows are shuffled together. They are consecutive in an epoch's order of shards.

    Attributes:
        shards: The shards' numbers in the split, from 0.
        rows: Total number of rows.
        key: Key that determines the permutation of the rows, or None for stored order.
    """

    shards: tuple[int, ...]
    rows: int
    key: int | None

    def order(self) -> npt.NDArray[np.int64] | None:
        """Return the permutation of the concatenated shards' rows, int64 [rows], or None for stored order."""
        return None if self.key is None else permutation(self.rows, self.key)


def windows_of(rows: Sequence[int], seed: int | None, epoch: int, width: int) -> list[Window]:
    """Return the windows of an epoch in the order of reading; each shard is in one window.

    Args:
        rows: Number of rows of each shard.
        seed: Seed for shuffling shards and rows, or None for stored order, in windows of one shard.
        width: Number of shards in a shuffled window; the last window may have fewer.
    """
    if seed is None:
        return [Window((number,), rows[number], None) for number in range(len(rows))]
    order = permutation(len(rows), key64(seed, "shard order", epoch)).tolist()
    if width == 1:
        return [Window((number,), rows[number], key64(seed, "row order", epoch, number)) for number in order]
    mixed = [tuple(order[start : start + width]) for start in range(0, len(order), width)]
    return [
        Window(numbers, sum(rows[number] for number in numbers), key64(seed, "window order", epoch, place))
        for place, numbers in enumerate(mixed)
    ]


class ShardReader:
    """A reader that yields one split of a data set in batches.

    Args:
        root: The data set's folder.
        manifest: The data set's manifest.
        split: "train", "test" or "validation".
        shuffle_window: Number of consecutive shards (in the epoch's order) whose rows are shuffled together.
    """

    def __init__(self, root: Path, manifest: Manifest, split: str, *, shuffle_window: int = 1) -> None:
        if shuffle_window < 1:
            raise ValueError(f"shuffle_window must be at least 1, not {shuffle_window}")
        self._root, self._split = root, split
        self._shards = manifest.shards(split)
        self._window = shuffle_window
        self._files = ShardFiles(root, manifest)
        self.schema = manifest.schema
        self.rows = manifest.rows(split)

    def require(self, batch_size: int) -> None:
        """Raise UserError if the split has fewer than `batch_size` rows."""
        if batch_size > self.rows:
            kind = "training" if self._split == "train" else self._split
            smaller = max(1, min(1000, self.rows // 20))
            raise UserError(
                f"--batch-size {batch_size} is larger than the {self.rows} {kind} rows of {self._root}; use a "
                f"smaller batch size, such as --batch-size {smaller}"
            )

    def steps(self, batch_size: int) -> int:
        """Return the number of batches in an epoch; the last may be smaller."""
        return -(-self.rows // batch_size)

    def batches(
        self, batch_size: int, *, seed: int | None = None, epoch: int = 0, skip: int = 0, part: tuple[int, int] = (0, 1)
    ) -> Iterator[Batch]:
        """Yield the batches of one epoch; the last may be smaller. Closing the iterator ends its reader threads.

        Args:
            seed: Seed for shuffling shards and the rows of each window, or None for stored order.
            skip: Number of batches to skip; windows that contain only skipped rows are not read.
            part: (i, n): divide each batch into n slices and yield only slice i (counted from 0), which may be empty.

        Raises:
            UserError: A shard is missing or does not match the manifest, or an id, label or weight is invalid. The
                batches of earlier windows are yielded first.
        """
        windows = windows_of([shard.rows for shard in self._shards], seed, epoch, self._window)
        passed = skip * batch_size
        left = self.rows - passed
        first = 0
        while first < len(windows) and passed >= windows[first].rows:
            passed -= windows[first].rows
            first += 1
        size, have = min(batch_size, left), 0
        edges = size * part[0] // part[1], size * (part[0] + 1) // part[1]  # the part's edges in the batch
        ranges: list[Range] = []
        coming = _open_ahead(windows[first:], lambda number, stop: self._files.open(self._shards[number], stop))
        with closing(coming):
            for rows in coming:
                start, passed = passed, 0
                while start < len(rows):
                    taken = min(batch_size - have, len(rows) - start)
                    begin, end = (max(0, min(taken, edge - have)) for edge in edges)
                    ranges.append((rows, start + begin, start + end))
                    start += taken
                    have += taken
                    if have == size:
                        yield gathered(ranges, None if part[1] == 1 else size)
                        left -= size
                        size, have, ranges = min(batch_size, left), 0, []
                        edges = size * part[0] // part[1], size * (part[0] + 1) // part[1]


def _open_ahead(
    windows: Sequence[Window], open_shard: Callable[[int, threading.Event], list[ShardPiece]]
) -> Generator[ShardRows, None, None]:
    """Yield the rows of each window. Meanwhile, threads open the next windows, until two or more shards are open.

    Each open shard maps one file and, if shuffled, needs 8 bytes per row for the order of its rows (16 while this order
    is computed). Closing the iterator ends the threads.

    Args:
        open_shard: Called with a shard's number and an event that is set when the iterator is closed. If it fails, its
            error is raised when the shard's window is due.
    """
    if len(windows) == 1 and len(windows[0].shards) == 1:
        [window] = windows
        yield ShardRows(open_shard(window.shards[0], threading.Event()), window.order())
        return
    stop = threading.Event()
    coming: deque[tuple[list[Future[list[ShardPiece]]], Future[Any]]] = deque()
    left = deque(windows)
    with Workers(_THREADS, "hostdev-shards") as workers:
        try:
            while left or coming:
                while left and (not coming or sum(len(shards) for shards, _ in islice(coming, 1, None)) < _AHEAD):
                    window = left.popleft()
                    order = workers.submit(window.order)
                    coming.append(([workers.submit(partial(open_shard, each, stop)) for each in window.shards], order))
                shards, order = coming.popleft()
                yield ShardRows([piece for shard in shards for piece in shard.result()], order.result())
        finally:
            stop.set()
