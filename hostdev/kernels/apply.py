"""An optimizer's step on the rows of a table; on the CPU host tables and device tables share it.

An optimizer's kernel is called as `kernel(start, stop, ids, source, grads, block, row_slots, *scalars)` and updates the
rows ids[start:stop] in place:

    ids        int32 or int64 [U], unique, each in [0, V)
    source     int32 [U], the row of `grads` that holds the summed gradient of each id
    grads      float32 [any, D]
    block      float32 [V, 1 + S, D]: a row's weights and its slots in one stretch
    row_slots  float32 [V, R]: slots of one value per row
"""

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from hostdev.kernels.adagrad import adagrad, row_wise_adagrad, sgd
from hostdev.kernels.buffers import scratch
from hostdev.kernels.ftrl import ftrl
from hostdev.kernels.jit import kernel
from hostdev.kernels.lazy_adam import lazy_adam
from hostdev.kernels.pool import Kernel, ranges, run_tasks
from hostdev.kernels.segment import sum_tasks

Rows = npt.NDArray[np.float32]

_GRAIN = 256
_SPLIT_FROM_COLUMNS = 16  # below, a gradient is cheaper to add than to tell apart
_KERNELS: dict[str, Callable[..., tuple[Kernel, tuple[Any, ...]]]] = {
    "FusedSparseAdagrad": adagrad,
    "FusedSparseFtrl": ftrl,
    "FusedSparseLazyAdam": lazy_adam,
    "FusedSparseRowWiseAdagrad": row_wise_adagrad,
    "FusedSparseSGD": sgd,
}


def apply_rows(
    primitive: str, block: Rows, row_slots: Rows, ids: npt.NDArray[Any], grads: Rows, scalars: tuple[Any, ...]
) -> None:
    """Take one optimizer step on unique rows, in place.

    primitive  the optimizer's op, such as "FusedSparseFtrl"
    ids        int32 or int64 [U], unique, each in [0, V)
    grads      float32 [U, D], the summed gradient of each row
    scalars    the optimizer's scalars at this step
    """
    update, scalars = _KERNELS[primitive](*scalars)
    arguments = (ids, identity(len(ids)), grads, block, row_slots, *scalars)
    run_tasks([(update, start, stop, arguments) for start, stop in ranges(len(ids), _GRAIN)])


def apply_uses(
    primitive: str,
    block: Rows,
    row_slots: Rows,
    ids: npt.NDArray[Any],
    inverse: npt.NDArray[np.int32],
    grads: Rows,
    scalars: tuple[Any, ...],
) -> None:
    """Sum the gradients of each unique row in order of occurrence, and take one optimizer step, in place.

    A row used once takes its gradient from where it is, while the sums of the others are made; so neither memory nor
    threads wait.

    ids      int32 or int64 [U], unique, each in [0, V), in order of first occurrence
    inverse  int32 [N], the unique row of each use
    grads    float32 [N, D], one row per use
    """
    update, scalars = _KERNELS[primitive](*scalars)
    U = len(ids)
    if U == 0:
        return
    sums = scratch("sums", (U, grads.shape[1]))
    table = (block, row_slots, *scalars)
    if grads.shape[1] < _SPLIT_FROM_COLUMNS:
        run_tasks(sum_tasks(grads, inverse, sums))
        every = (ids, identity(U), sums, *table)
        run_tasks([(update, start, stop, every) for start, stop in ranges(U, _GRAIN)])
        return
    chosen, source = scratch("ids by uses", (U,), ids.dtype), scratch("rows by uses", (U,), np.int32)
    use, split, once = scratch("only use", (U,), np.int32), threading.Event(), 0

    def split_rows(start: int, stop: int) -> None:
        nonlocal once
        try:
            once = _split(ids, inverse, use, chosen, source)
        finally:
            split.set()

    def update_once(piece: int, pieces: int) -> None:
        split.wait()  # begun before this: tasks begin in order
        update(once * piece // pieces, once * (piece + 1) // pieces, chosen, source, grads, *table)

    pieces = len(ranges(U, _GRAIN))
    run_tasks([
        (split_rows, 0, 1, ()),
        *sum_tasks(grads, inverse, sums),
        *((update_once, piece, pieces, ()) for piece in range(pieces)),
    ])  # fmt: skip
    many = (chosen[once:], source[once:], sums, *table)
    run_tasks([(update, start, stop, many) for start, stop in ranges(U - once, _GRAIN)])


@kernel
def _split(ids: Any, inverse: Any, use: Any, chosen: Any, source: Any) -> Any:
    """Put the rows used once before the others, both in order; return how many are used once.

    use     [U], scratch: the use of each unique row, -1 for a row with several
    chosen  the ids [U] in that order
    source  where the gradient of each is: the use of a row used once, the unique row of another
    """
    seen, one = np.uint64(0), np.uint64(1)
    for i in range(len(inverse)):
        u = np.uint64(inverse[i])
        if u == seen:
            use[u] = i
            seen += one
        else:
            use[u] = -1
    once = np.uint64(0)
    for row in range(len(use)):
        once += np.uint64(use[row] >= 0)
    next_once, next_other = np.uint64(0), once
    for row in range(len(use)):
        if use[row] >= 0:
            chosen[next_once], source[next_once] = ids[row], use[row]
            next_once += one
        else:
            chosen[next_other], source[next_other] = ids[row], row
            next_other += one
    return np.int64(once)


_identity = np.arange(1 << 16, dtype=np.int32)


def identity(n: int) -> npt.NDArray[np.int32]:
    """Return 0, 1, ..., n - 1, read-only."""
    global _identity
    held = _identity
    if len(held) < n:
        held = _identity = np.arange(2 * n, dtype=np.int32)
    part = held[:n]
    part.flags.writeable = False
    return part
