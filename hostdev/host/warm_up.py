"""Warm-up: compile a training run's kernels, or load them from numba's cache, before the first step is timed."""

import itertools
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from hostdev.core.optimizers import FTRL, LazyAdam, SparseOptimizer
from hostdev.core.rounding import plane_formats
from hostdev.core.table_dtypes import FP32
from hostdev.host.table import HostTable
from hostdev.kernels.arrays import Strided
from hostdev.kernels.bags import Feature, Uses, pool
from hostdev.kernels.catch_up import unpack_tasks
from hostdev.kernels.claims import Claims, claim, intersect, others
from hostdev.kernels.clip import clipped
from hostdev.kernels.finite import largest
from hostdev.kernels.gather import gather_scaled
from hostdev.kernels.groups import check_groups, drop_padding, offsets_of, unique_groups
from hostdev.kernels.join import join
from hostdev.kernels.pool import run_tasks
from hostdev.kernels.rounding import round_rows
from hostdev.kernels.unique import unique

Optimizers = Iterable[tuple[SparseOptimizer, int]]  # table optimizers, each with its table's dimension
_USUAL = ((FTRL(), 1), (LazyAdam(), 32))


def warm_up(
    id_dtype: npt.DTypeLike,
    table_dtypes: tuple[str, str] = (FP32, FP32),
    optimizers: Optimizers = _USUAL,
    *,
    squares: bool = True,
) -> None:
    """Call every kernel once with ids of this dtype, on tables of a few bytes with these optimizers.

    This compiles the kernels or loads them from the cache. If the table dtypes are not float32, the kernels for float32
    tables are also called, since cached rows are float32.

    Args:
        id_dtype: The dtype of ids.
        table_dtypes: The dtypes of weights and of slots.
        optimizers: Table optimizers, each with its table's dimension.
        squares: Whether to include the kernels that sum the squares of a table's weights.
    """
    for (optimizer, dim), stored in itertools.product(optimizers, sorted({(FP32, FP32), table_dtypes})):
        warm_up_table(id_dtype, stored, optimizer, dim, squares=squares)
    warm_up_ids(id_dtype)
    warm_up_feature(1)
    for bfloat16 in (False, True):
        warm_up_feature(32, weighted=True, bfloat16=bfloat16)


def warm_up_table(
    id_dtype: npt.DTypeLike,
    table_dtypes: tuple[str, str],
    optimizer: SparseOptimizer,
    dim: int,
    *,
    squares: bool = True,
) -> None:
    """Compile the kernels of a table with these properties, or load them from the cache, by calling each once."""
    ids, position = np.zeros(2, id_dtype), np.zeros(1, np.int32)
    dtype, slots = table_dtypes
    table = HostTable(1, dim, optimizer, name="warm-up", dtype=dtype, slots=slots)
    table.may_train = True  # so that one of several processes may update this table
    table.note_changes()
    grads = np.zeros((2, dim), np.float32)
    table.lookup(ids)
    table.apply(ids, grads)
    row = np.zeros((1, 1 + len(optimizer.slots), dim), np.float32), np.empty((1, len(optimizer.row_slots)), np.float32)
    row[1][:] = 0
    for positions in (None, position):
        table.lookup(ids[:1], grads[:1], positions)
        table.update(ids[:1], grads[:1], None, positions)
        table.read_rows(ids[:1], *row, positions)
        table.write_rows(ids[:1], *row, positions)
    if (clock := table.clock()) is not None:
        packed = np.zeros((1, table.fetched_width), np.float32)
        run_tasks(table.fetch_tasks(ids[:1], packed))
        run_tasks(unpack_tasks(packed, clock, grads[:1]))
    if squares:
        table.sum_of_squares()
    if (limit := optimizer.clip_limit(dim)) is not None:  # as a table or cache on the CPU device does
        clipped(grads, limit)
    formats = plane_formats(table.dtype, table.slots_dtype, optimizer)
    if formats is not None:  # as a table or cache on the CPU device does
        for numbers in (ids[:1], position):
            round_rows(row[0], numbers, ids[:1], 0, formats)


def warm_up_ids(id_dtype: npt.DTypeLike) -> None:
    """Compile the kernels that process ids, or load them from the cache, by calling each once."""
    warm_up_deduplication(id_dtype)
    warm_up_batches(id_dtype)


def warm_up_deduplication(id_dtype: npt.DTypeLike) -> None:
    """Compile the kernels that deduplicate ids, or load them from the cache, by calling each once."""
    ids = np.zeros(2, id_dtype)
    far = _spread(id_dtype)
    unique(far)
    unique_groups([[ids], [far[:999]], [far]])


def warm_up_batches(id_dtype: npt.DTypeLike) -> None:
    """Compile the kernels that check or compare batches, or load them from the cache, by calling each once."""
    ids, far = np.zeros(2, id_dtype), _spread(id_dtype)
    check_groups([([far], 1 << 24), ([ids], 1)])  # enough ids to run the parallel kernel
    for lengths in (np.full(1, 2, np.int32), np.full(1, 2, np.int64)):
        offsets_of(lengths)
    for of_uses in (None, np.ones(2, np.float32)):
        drop_padding(ids, np.full(1, 2, np.int32), 0, of_uses)
    largest(np.zeros((1 << 15) + 1, np.float32))  # enough gradients for several threads
    claims = Claims(1)
    for number in (1, 2):
        claim(ids[:1], claims, number, 1, number - 1)
    others(1, intersect(ids[:1], ids[:1], claims, 2))
    join(ids, ids)


def _spread(id_dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Return so many ids, so far apart, that deduplication splits them into parts and hashes them."""
    return np.arange(1 << 16, dtype=id_dtype) << 8


def warm_up_feature(dim: int, *, pooled: bool = False, weighted: bool = False, bfloat16: bool = False) -> None:
    """Compile the kernels of features with these properties, or load them from the cache, by calling each once.

    The feature's table has `dim` columns. Kernels also depend on the current number of host threads.
    """
    rows, inverse = np.zeros((1, dim), np.float32), np.zeros(2, np.int32)
    weights = np.ones(2, np.float32) if weighted else None
    out = np.zeros((2, dim), np.uint16 if bfloat16 else np.float32)
    for mean in (False, True) if pooled else (False,):
        feature = Feature(inverse, np.array([0, 1, 2], np.int32) if pooled else None, weights, mean)
        if pooled:
            pool(rows, feature, out)
        elif weights is not None:
            gather_scaled(rows, inverse, weights, out)
        Uses([feature], 1).sum([Strided(out)], rows)
