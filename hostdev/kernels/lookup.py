"""Reading and overwriting a table's rows by id, and checking that ids are in range.

Shapes: V table rows of dimension D, S optimizer slots, N ids.
"""

import numpy as np

from hostdev.kernels.arrays import AnyIds, Array, Positions, RowNumbers, Rows, Values, identity
from hostdev.kernels.bfloat16 import as_stored, to_float32
from hostdev.kernels.jit import kernel, prefetch_to_read, prefetch_to_write
from hostdev.kernels.pool import Task, get_grain, parallel_for, run_tasks, tasks_over
from hostdev.kernels.unique import id_range

_AHEAD = 8  # prefetch distance in rows: memory latency / time per row
_GRAIN = 512


@kernel
def _lookup(start, stop, ids, block, out):
    for i in range(np.uint64(start), np.uint64(stop)):
        ahead = i + np.uint64(_AHEAD)
        if ahead < np.uint64(stop):
            prefetch_to_read(block, ids[ahead], block.shape[2] * block.itemsize)
        weights, row = block[np.uint64(ids[i]), 0], out[i]
        for j in range(len(row)):
            row[j] = to_float32(weights[j])


@kernel
def _lookup_into(start, stop, ids, positions, block, out):
    for i in range(np.uint64(start), np.uint64(stop)):
        ahead = i + np.uint64(_AHEAD)
        if ahead < np.uint64(stop):
            prefetch_to_read(block, ids[ahead], block.shape[2] * block.itemsize)
            prefetch_to_write(out, positions[ahead], out.strides[0])  # the hardware prefetches sequential rows only
        weights, row = block[np.uint64(ids[i]), 0], out[np.uint64(positions[i])]
        for j in range(len(row)):
            row[j] = as_stored(row, to_float32(weights[j]))


@kernel
def _first_outside(ids, rows):
    for i in range(len(ids)):
        if ids[i] < 0 or ids[i] >= rows:
            return i
    return -1


def lookup_tasks(block: Array, ids: AnyIds, out: Rows, positions: Positions | None = None) -> list[Task]:
    """Return the work of `lookup` as tasks, so that one `run_tasks` can run it together with other tasks."""
    grain = get_grain(block.itemsize * block.shape[2])
    if positions is None:
        return tasks_over(_lookup, len(ids), ids, block, out, grain=grain)
    return tasks_over(_lookup_into, len(ids), ids, positions, block, out, grain=grain)


def lookup(block: Array, ids: AnyIds, out: Rows, positions: Positions | None = None) -> None:
    """Copy the weights of rows: out[i], or out[positions[i]], becomes block[ids[i], 0].

    Args:
        block: float32 [V, 1 + S, D], weights and slots side by side; or bfloat16 as uint16 [V, 1, D].
        ids: int32 or int64 [N], each in [0, V) (see `first_outside`).
        out: float32 [N, D], written; with `positions`, [any, D].
        positions: int32 [N], distinct: for each id, the row of `out` to write.
    """
    run_tasks(lookup_tasks(block, ids, out, positions))


def store_tasks(rows: Rows, ids: AnyIds, values: Rows, positions: Positions | None = None) -> list[Task]:
    """Return the work of `store` as tasks, so that one `run_tasks` can run it together with other tasks."""
    if positions is None:
        positions = identity(len(ids))
    arguments = (positions, ids, values[:, None], rows)
    return tasks_over(_lookup_into, len(ids), *arguments, grain=get_grain(rows.strides[0]))


def store(rows: Rows, ids: AnyIds, values: Rows, positions: Positions | None = None) -> None:
    """Overwrite rows: rows[ids[i]] becomes values[i], or values[positions[i]].

    Args:
        rows: float32 [V, width].
        ids: int32 or int64 [N], unique, each in [0, V).
        values: float32 [N, width]; with `positions`, [any, width].
        positions: int32 [N]: for each id, the row of `values` that is its new row.
    """
    run_tasks(store_tasks(rows, ids, values, positions))


def first_outside(ids: AnyIds, rows: int) -> int:
    """Return the position of the first id outside [0, rows), or -1 if there is none."""
    low, high = id_range(ids)
    return -1 if low >= 0 and high < rows else int(_first_outside(ids, rows))


@kernel
def _scale(start, stop, rows, inverse, weights, out):
    for i in range(np.uint64(start), np.uint64(stop)):
        row, to, weight = rows[np.uint64(inverse[i])], out[i], weights[i]
        for j in range(len(row)):
            to[j] = as_stored(to, np.float32(row[j] * weight))


def gather_scaled(rows: Rows, inverse: RowNumbers, weights: Values, out: Array) -> None:
    """Write each occurrence's row times its weight: out[i] = rows[inverse[i]] * weights[i].

    Args:
        rows: float32 [U, D].
        inverse: int32 [N], each in [0, U).
        weights: float32 [N].
        out: float32 [N, D], or bfloat16 as uint16 [N, D], written.
    """
    parallel_for(_scale, len(inverse), rows, inverse, weights, out, grain=_GRAIN)
