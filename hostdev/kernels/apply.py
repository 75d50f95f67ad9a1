"""An optimizer step on the rows of a table, for host tables and for device tables on the CPU.

An optimizer's kernel is called as `kernel(start, stop, ids, source, grads, block, row_slots, *scalars, clock)` and
updates the rows ids[start:stop] in place:

    ids: int32 or int64 [U], unique, each in [0, V), where V is the number of rows of the table.
    source: int32 [U]: the summed gradient of ids[i] is grads[source[i]].
    grads: float32 [any, D].
    block: float32 [V, 1 + S, D], or `rounding.SplitRows`: each row's weights, followed by its S optimizer slots of D
        values each.
    row_slots: float32 [V, R], the R optimizer slots that have one value per row.
    scalars: The optimizer's scalar arguments at this step, such as the learning rate.
    clock: The step history, from which each row's missed steps are applied before its update (see `catch_up`); None if
        a step changes only the rows that it updates.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from hostdev.kernels.adagrad import adagrad, momentum, row_wise_adagrad, sgd
from hostdev.kernels.arrays import Rows, Strided
from hostdev.kernels.buffers import identity, scratch
from hostdev.kernels.clip import clip_rows
from hostdev.kernels.clock import Clock
from hostdev.kernels.ftrl import ftrl
from hostdev.kernels.lazy_adam import lazy_adam, row_wise_adam
from hostdev.kernels.pool import Kernel, Task, get_grain, run_tasks, tasks_over
from hostdev.kernels.rounding import SplitRows
from hostdev.kernels.segment import row_ranges, sort_uses, streams, sum_sorted
from hostdev.kernels.stream import apply_stream
from hostdev.kernels.unique import unique_into

_CLIPPED_BYTES = 1 << 18  # bytes of the rows that a thread clips and updates at a time

_KERNELS: dict[str, Callable[..., tuple[Kernel, tuple[Any, ...]]]] = {
    "FusedSparseAdagrad": adagrad,
    "FusedSparseAdam": lazy_adam,
    "FusedSparseFtrl": ftrl,
    "FusedSparseLazyAdam": lazy_adam,
    "FusedSparseMomentum": momentum,
    "FusedSparseRowWiseAdagrad": row_wise_adagrad,
    "FusedSparseRowWiseAdam": row_wise_adam,
    "FusedSparseSGD": sgd,
}


def apply_tasks(
    primitive: str,
    block: Rows | SplitRows,
    row_slots: Rows,
    ids: npt.NDArray[Any],
    grads: Rows,
    scalars: tuple[Any, ...],
    positions: npt.NDArray[np.int32] | None = None,
    clip: np.float32 | None = None,
    clock: Clock | None = None,
) -> list[Task]:
    """Return the work of `apply_rows` as tasks, so that one `run_tasks` can run it together with other tasks."""
    update, scalars = _KERNELS[primitive](*scalars)
    scalars = (*scalars, clock)
    if positions is None:
        positions = identity(len(ids))
    row = block.strides[0] if isinstance(block, np.ndarray) else block.row_bytes
    if clip is None:
        arguments = (ids, positions, grads, block, row_slots, *scalars)
        return tasks_over(update, len(ids), *arguments, grain=get_grain(row))

    def clip_and_update(start: int, stop: int) -> None:
        n = stop - start
        clipped = scratch("clipped gradients", (n, grads.shape[1]))
        clip_rows(0, n, positions[start:stop], grads, clip, clipped)
        update(0, n, ids[start:stop], identity(n), clipped, block, row_slots, *scalars)

    edges = [*range(0, len(ids), max(1, _CLIPPED_BYTES // row)), len(ids)]
    return [(clip_and_update, start, stop, ()) for start, stop in pairwise(edges)]


def apply_rows(
    primitive: str,
    block: Rows | SplitRows,
    row_slots: Rows,
    ids: npt.NDArray[Any],
    grads: Rows,
    scalars: tuple[Any, ...],
    positions: npt.NDArray[np.int32] | None = None,
    clip: np.float32 | None = None,
    clock: Clock | None = None,
) -> None:
    """Take one optimizer step on unique rows, in place.

    The module's docstring describes `block`, `row_slots`, `ids`, `scalars` and `clock`.

    Args:
        primitive: The name of the optimizer's operation, such as "FusedSparseFtrl".
        grads: float32 [U, D], the summed gradient of each id; with `positions`, [any, D].
        positions: int32 [U]: the gradient of ids[i] is grads[positions[i]]; None if it is grads[i].
        clip: The mean square above which a row's gradient is clipped, or None to never clip.
    """
    run_tasks(apply_tasks(primitive, block, row_slots, ids, grads, scalars, positions, clip, clock))


def apply_occurrences(
    primitive: str,
    block: Rows | SplitRows,
    row_slots: Rows,
    ids: npt.NDArray[Any],
    grads: Rows,
    scalars: tuple[Any, ...],
    clip: np.float32 | None = None,
    clock: Clock | None = None,
) -> None:
    """Sum the gradients of each id in order of occurrence, and update its row as `apply_rows` does.

    The other arguments are those of `apply_rows`.

    Args:
        ids: int32 or int64 [N], each in [0, V), possibly repeated.
        grads: float32 [N, D]: grads[i] is a gradient of the row ids[i].
    """
    if len(ids) == 0:
        return
    update, scalars = _KERNELS[primitive](*scalars)
    scalars = (*scalars, clock)
    table = (block, row_slots, *scalars)
    if clip is None and streams():
        apply_stream(update, table, ids, grads)
        return
    inverse = scratch("inverse", (len(ids),), np.int32)
    rows = unique_into(ids, inverse)
    sums = scratch("sums", (len(rows), grads.shape[1]))
    order, ends = scratch("uses by row", inverse.shape, np.int32), scratch("ends of rows", (len(rows) + 2,), np.int64)
    sort_uses(inverse, ends, order)
    places = identity(len(rows))

    def sum_and_update(start: int, stop: int) -> None:
        sum_sorted(start, stop, *Strided(grads), order, ends, None, None, True, sums)
        if clip is not None:
            clip_rows(start, stop, places, sums, clip, sums)
        update(start, stop, rows, places, sums, *table)

    run_tasks([(sum_and_update, start, stop, ()) for start, stop in row_ranges(ends[:-1])])
