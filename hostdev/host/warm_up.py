"""Compile, or load from numba's cache, the kernels of a training run before its first step is timed."""

import numpy as np
import numpy.typing as npt

from hostdev.core.optimizers import FTRL, LazyAdam, SparseOptimizer
from hostdev.host.table import HostTable
from hostdev.kernels.claims import Claims, claim, intersect, others
from hostdev.kernels.gather import gather_scaled, segment_sum_scaled
from hostdev.kernels.groups import check_groups, drop_padding, offsets_of, unique_groups
from hostdev.kernels.segment import segment_sum
from hostdev.kernels.unique import unique


def warm_up(id_dtype: npt.DTypeLike) -> None:
    """Call every kernel once with ids of this dtype, on tables of a few bytes."""
    ids, position = np.zeros(2, id_dtype), np.zeros(1, np.int32)
    optimizers: list[tuple[SparseOptimizer, int]] = [(FTRL(), 1), (LazyAdam(), 32)]
    for optimizer, dim in optimizers:
        table = HostTable(1, dim, optimizer, name="warm-up")
        grads = np.zeros((2, dim), np.float32)
        table.lookup(ids)
        table.apply(ids, grads)
        row = np.empty((1, *table.block.shape[1:]), np.float32), np.empty((1, 0), np.float32)
        for positions in (None, position):
            table.lookup(ids[:1], grads[:1], positions)
            table.update(ids[:1], grads[:1], None, positions)
            table.read_rows(ids[:1], *row, positions)
            table.write_rows(ids[:1], *row, positions)
        table.sum_of_squares()
    far = np.arange(1 << 16, dtype=id_dtype) << 8  # ids far apart are hashed, and many in parts
    unique(far)
    unique_groups([[ids], [far[:999]], [far]])
    check_groups([([ids], 1)])
    for lengths in (np.full(1, 2, np.int32), np.full(1, 2, np.int64)):
        offsets_of(lengths)
    for weights in (None, np.ones(2, np.float32)):
        drop_padding(ids, np.full(1, 2, np.int32), 0, weights)
    claims = Claims(1)
    for number in (1, 2):
        claim(ids[:1], claims, number, 1, number - 1)
    others(1, intersect(ids[:1], ids[:1], claims, 2))
    rows, weights, inverse = np.zeros((1, 32), np.float32), np.ones(2, np.float32), np.zeros(2, np.int32)
    segment_sum(np.zeros((2, 1), np.float32), inverse, np.empty((1, 1), np.float32))
    for dtype in (np.float32, np.uint16):  # uint16 is bfloat16
        uses = np.empty((2, 32), dtype)
        gather_scaled(rows, inverse, weights, uses)
        segment_sum_scaled(uses, inverse, weights, rows)
