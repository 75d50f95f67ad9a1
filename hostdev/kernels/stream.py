"""Deduplication, gradient sums and updates of a batch in one pipelined pass, for a few threads.

The ids are split into parts. One thread deduplicates the ids of each part in turn; a second thread follows, and adds
the part's gradients to the sums of their rows. The first thread then orders the rows by the part of their last
occurrence, and updates each row when its sum is complete; a row that occurs once is updated directly with its gradient.
At the end, both threads update the remaining rows. The arithmetic is the same as in separate passes.

Shapes: N occurrences, U unique rows, D columns.
"""

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from hostdev.kernels.arrays import Rows, Strided
from hostdev.kernels.buffers import identity, scratch
from hostdev.kernels.jit import kernel
from hostdev.kernels.pool import Kernel, Task, parallel_for, run_tasks
from hostdev.kernels.segment import sum_part, sum_scalar_part
from hostdev.kernels.unique import id_map

_PART = 32768  # occurrences
_PIECES = 2  # tasks for the rows that one part completes
_ORDER_FROM_COLUMNS = 16  # with fewer columns, ordering the rows costs more than it saves
_GRAIN = 256


class FinishedParts:
    """The number of parts that a task has finished; other tasks can wait until it reaches a given number."""

    def __init__(self) -> None:
        self._done = 0
        self._error: BaseException | None = None
        self._changed = threading.Condition()

    def wait(self, parts: int) -> None:
        """Wait until `parts` parts are finished; if the task has failed, raise the task's exception."""
        if self._done < parts:
            with self._changed:
                self._changed.wait_for(lambda: self._done >= parts or self._error)
        if self._error is not None:
            raise self._error

    def _report(self, done: int, error: BaseException | None = None) -> None:
        with self._changed:
            self._done, self._error = done, error
            self._changed.notify_all()


def _follow(start: int, stop: int, progress: FinishedParts, work: Callable[[int], None]) -> None:
    """Call `work(start)`, ..., `work(stop - 1)`, and report each call's end to `progress`."""
    for part in range(start, stop):
        try:
            work(part)
        except BaseException as error:
            progress._report(part, error)
            raise
        progress._report(part + 1)


def apply_stream(update: Kernel, table: tuple[Any, ...], ids: npt.NDArray[Any], grads: Rows) -> None:
    """Sum the gradients of each id in order of occurrence, and update the id's row with the sum.

    Args:
        update: An optimizer's kernel.
        table: The kernel's arguments from `block` on (see `apply`).
        ids: int32 or int64 [N], at least one, each inside the table.
        grads: float32 [N, D]: grads[i] is a gradient of the row ids[i].
    """
    N, D = grads.shape
    edges = [*range(0, N, _PART), N]
    parts = len(edges) - 1
    inverse, sums = scratch("inverse", (N,), np.int32), scratch("sums", (N, D))
    uses, source = (scratch(name, (N,), np.int32) for name in ("uses", "source"))
    chosen = scratch("ids by last use", (N,), ids.dtype)
    ends = scratch("ends", (parts + 2,), np.int64)
    add_part = sum_scalar_part if D == 1 else sum_part
    in_order = D >= _ORDER_FROM_COLUMNS
    seen, found, added = id_map(ids), FinishedParts(), FinishedParts()
    rows_marked = rows_added = 0

    def find(part: int) -> None:
        nonlocal rows_marked
        if part < parts:
            start, stop = edges[part : part + 2]
            seen.add(ids[start:stop], inverse[start:stop])
            if in_order:
                rows_marked = _mark(start, stop, rows_marked, part, inverse, uses)
        elif in_order:
            _order(seen.ids, uses, ends, chosen, source)

    def add(part: int) -> None:
        nonlocal rows_added
        found.wait(part + 1)
        start, stop = edges[part : part + 2]
        rows_added = add_part(start, stop, rows_added, *Strided(grads), inverse, sums)

    def update_complete(part: int, piece: int) -> None:
        """Update a share of the rows whose sums are complete after `part` parts; in part 0, of rows that occur once."""
        found.wait(parts + 1)
        added.wait(part)
        first, rows = ends[part], ends[part + 1] - ends[part]
        start, stop = (first + rows * share // _PIECES for share in (piece, piece + 1))
        update(start, stop, chosen, source, sums if part else grads, *table)

    tasks: list[Task] = [(_follow, 0, parts + 1, (found, find)), (_follow, 0, parts, (added, add))]
    if in_order:
        tasks += [(update_complete, part, piece, ()) for part in range(parts + 1) for piece in range(_PIECES)]
    run_tasks(tasks)
    if not in_order:
        every = (seen.ids, identity(len(seen.ids)), sums, *table)
        parallel_for(update, len(seen.ids), *every, grain=_GRAIN)


@kernel
def _mark(start, stop, seen, part, inverse, uses):
    """Record in `uses` where rows occur in part `part`, which consists of the occurrences [start, stop).

    Args:
        seen: Number of rows that occur before `start`.
        uses: [N], updated: for each row, the index of its occurrence if it has occurred once so far; else -1 - p, where
            p is the part of its last occurrence so far.

    Returns:
        The number of rows that occur before `stop`.
    """
    seen, one = np.uint64(seen), np.uint64(1)
    for i in range(np.uint64(start), np.uint64(stop)):
        row = np.uint64(inverse[i])
        if row == seen:
            seen += one
            uses[row] = i
        else:
            uses[row] = -1 - part
    return seen


@kernel
def _order(ids, uses, ends, chosen, source):
    """Sort the rows stably: those that occur once, then the others by the part of their last occurrence.

    Args:
        ids: [U].
        uses: [U or more], from `_mark`.
        ends: [parts + 2], written: rows that occur once are at [ends[0], ends[1]) of `chosen`, and those whose last
            occurrence is in part p at [ends[p + 1], ends[p + 2]).
        chosen: [U or more], written: the sorted ids.
        source: [U or more], written: for each sorted id, the index of its occurrence if there is only one, else the
            index of its sum.
    """
    ends[:] = 0
    for row in range(np.uint64(0), np.uint64(len(ids))):
        ends[np.uint64(max(0, -uses[row]) + 1)] += 1
    first = np.int64(0)
    for k in range(1, len(ends)):
        rows = ends[k]
        ends[k] = first
        first += rows
    for row in range(np.uint64(0), np.uint64(len(ids))):
        use = uses[row]
        group = np.uint64(max(0, -use) + 1)
        at = np.uint64(ends[group])
        chosen[at] = ids[row]
        source[at] = use if use >= 0 else row
        ends[group] += 1
