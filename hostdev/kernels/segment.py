"""Sums of each row's gradients, always added in order of occurrence, with any number of threads.

An occurrence is one use of a row, which yields one gradient. There are two ways to sum, with the same additions. With
few threads, one thread streams through the gradients in order and adds each to its row's sum: one core reads a stream
at nearly the machine's memory bandwidth, and two would slow each other down. With more threads, the occurrences are
sorted by row, and the threads share the rows.

With few threads, a batch can also be deduplicated, summed and applied in one pipelined pass. The ids are split into
parts. One thread deduplicates the ids of each part in turn; a second thread follows, and adds the part's gradients to
the sums of their rows. The first thread then orders the rows by the part of their last occurrence, and updates each row
when its sum is complete; a row that occurs once is updated directly with its gradient. At the end, both threads update
the remaining rows. The arithmetic is the same as in separate passes.

Shapes: N occurrences, U unique rows, D columns.
"""

import itertools
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from hostdev.kernels.arrays import AnyIds, Counts, Rows, Strided, identity, scratch
from hostdev.kernels.bfloat16 import to_float32
from hostdev.kernels.jit import kernel, prefetch_to_read, prefetch_to_read_once, prefetch_to_write
from hostdev.kernels.pool import Kernel, Task, host_threads, parallel_for, run_tasks
from hostdev.kernels.unique import id_map

_SORT_FROM_THREADS = 4
_SUMS_AHEAD, _GRADS_AHEAD = 12, 24  # prefetch distances in occurrences
_PIECES_PER_THREAD = 4
_NEVER = 1 << 62  # a value of `seen` above all rows: no occurrence counts as a row's first
_PART = 32768  # occurrences per part
_PIECES = 2  # tasks for the rows that one part completes
_ORDER_FROM_COLUMNS = 16  # with fewer columns, ordering the rows costs more than it saves
_GRAIN = 256
_FEW = 1 << 17  # values of gradients, which one thread applies before another would have begun


@kernel
def sum_part(start, stop, seen, grads, first, step, inverse, weights, out):
    """Add the gradients of the occurrences [start, stop), each times its weight, to the sums of their rows.

    The sums must already include all earlier gradients. The gradient of occurrence i is grads[first + i * step]. Rows
    are numbered in order of first occurrence.

    Args:
        seen: Number of rows that occur before `start`.
        grads: float32 [any, D], or bfloat16 as uint16.
        inverse: int32 [N], the row of each occurrence.
        weights: float32 [N], the weight of each occurrence, or None if all weights are 1.
        out: float32 [U, D], updated: the sums; a row's sum begins with its first gradient.

    Returns:
        The number of rows that occur before `stop`.
    """
    first, step = np.uint64(first), np.uint64(step)
    D = grads.shape[1]
    uses, seen, one = np.uint64(stop), np.uint64(seen), np.uint64(1)
    for i in range(np.uint64(start), uses):
        prefetch_to_read_once(grads, first + (i + np.uint64(_GRADS_AHEAD)) * step, grads.strides[0])
        if i + np.uint64(_SUMS_AHEAD) < uses:
            prefetch_to_write(out, inverse[i + np.uint64(_SUMS_AHEAD)], D * 4)
        row = np.uint64(inverse[i])
        weight = np.float32(1) if weights is None else weights[i]
        total, grad = out[row], grads[first + i * step]
        if row == seen:  # the row's first occurrence
            seen += one
            for j in range(D):
                total[j] = to_float32(grad[j]) * weight
        else:
            for j in range(D):
                total[j] += to_float32(grad[j]) * weight
    return seen


@kernel
def sum_scalar_part(start, stop, seen, grads, first, step, inverse, weights, out):
    """Do the same as `sum_part`, for D = 1."""
    first, step = np.uint64(first), np.uint64(step)
    seen, one, column = np.uint64(seen), np.uint64(1), np.uint64(0)
    for i in range(np.uint64(start), np.uint64(stop)):
        row = np.uint64(inverse[i])
        weight = np.float32(1) if weights is None else weights[i]
        term = np.float32(to_float32(grads[first + i * step, column]) * weight)
        if row == seen:
            seen += one
            out[row, column] = term
        else:
            out[row, column] += term
    return seen


def streams() -> bool:
    """Return whether one thread should add all gradients, since there are only a few threads."""
    return host_threads() < _SORT_FROM_THREADS


def prepare_sums(out: Rows, in_order: bool) -> int:
    """Prepare `out` [U, D] for sums, and return the argument `seen` for the first call of `sum_part`.

    `in_order` says whether rows are numbered by first occurrence. If not, all sums begin as -0.
    """
    if in_order:
        return 0
    out.fill(-0.0)  # x + -0 is x, even if x is 0
    return _NEVER


@kernel
def sort_uses(inverse, ends, order):
    """Sort the occurrences stably by row (counting sort): row u has the occurrences order[ends[u] : ends[u + 1]].

    Args:
        inverse: int32 [N], the row of each occurrence.
        ends: int64 [U + 2], written; the last item is for this function's own use.
        order: int32 [N], written.
    """
    ends[:] = 0
    for i in range(len(inverse)):
        ends[np.uint64(inverse[i]) + np.uint64(2)] += 1
    for u in range(2, len(ends)):
        ends[u] += ends[u - 1]
    for i in range(len(inverse)):
        slot = np.uint64(inverse[i]) + np.uint64(1)
        order[np.uint64(ends[slot])] = i
        ends[slot] += 1


@kernel
def sum_sorted(start, stop, grads, first, step, order, ends, source, weights, fresh, out):
    """Sum the gradients of the rows [start, stop) over their occurrences.

    Args:
        grads: float32 [any, D], or bfloat16 as uint16.
        first: The row of `grads` that has gradient 0; row first + i * step has gradient i.
        step: The distance between successive gradients, in rows.
        order: int32 [N], from `sort_uses`.
        ends: int64 [U + 1 or more], from `sort_uses`.
        source: int32 [N], the number of each occurrence's gradient, or None if occurrence i has gradient i.
        weights: float32 [N], the weight of each occurrence, or None if all weights are 1.
        fresh: Whether to begin new sums, which are -0 for rows that do not occur; if not, add to the sums in `out`.
        out: float32 [U, D], written: the sums.
    """
    first, step = np.uint64(first), np.uint64(step)
    D = grads.shape[1]
    last = np.uint64(ends[np.uint64(stop)])
    for u in range(np.uint64(start), np.uint64(stop)):
        total = out[u]
        begin, end = np.uint64(ends[u]), np.uint64(ends[u + np.uint64(1)])
        if fresh and begin == end:
            total[:] = np.float32(-0.0)
        for k in range(begin, end):
            if k + np.uint64(_SUMS_AHEAD) < last:
                ahead = np.uint64(order[k + np.uint64(_SUMS_AHEAD)])
                at = ahead if source is None else np.uint64(source[ahead])
                prefetch_to_read(grads, first + at * step, grads.strides[0])
            use = np.uint64(order[k])
            grad = grads[first + (use if source is None else np.uint64(source[use])) * step]
            weight = np.float32(1) if weights is None else weights[use]
            if fresh and k == begin:
                for j in range(D):
                    total[j] = to_float32(grad[j]) * weight
            else:
                for j in range(D):
                    total[j] += to_float32(grad[j]) * weight


def row_ranges(ends: Counts) -> list[tuple[int, int]]:
    """Split the rows into ranges (start, stop), several per thread, with about the same number of occurrences each.

    `ends`, int64 [U + 1], is as in `sort_uses`.
    """
    pieces = host_threads() * _PIECES_PER_THREAD
    edges = np.searchsorted(ends, np.arange(1, pieces) * (ends[-1] // pieces))
    edges = np.concatenate([[0], edges, [len(ends) - 1]])
    return [(int(a), int(b)) for a, b in itertools.pairwise(edges) if a < b]


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


def apply_stream(update: Kernel, table: tuple[Any, ...], ids: AnyIds, grads: Rows) -> None:
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
        rows_added = add_part(start, stop, rows_added, *Strided(grads), inverse, None, sums)

    def update_complete(part: int, piece: int) -> None:
        """Update a share of the rows whose sums are complete after `part` parts; for 0, of rows that occur once."""
        found.wait(parts + 1)
        added.wait(part)
        first, rows = ends[part], ends[part + 1] - ends[part]
        start, stop = (first + rows * share // _PIECES for share in (piece, piece + 1))
        if start < stop:  # a direct call: `run_alone` needs slices, which take 5% longer for few rows
            update(start, stop, chosen, source, sums if part else grads, *table)

    tasks: list[Task] = [(_follow, 0, parts + 1, (found, find)), (_follow, 0, parts, (added, add))]
    if in_order:
        tasks += [(update_complete, part, piece, ()) for part in range(parts + 1) for piece in range(_PIECES)]
    run_tasks(tasks, alone=N * D <= _FEW)
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
