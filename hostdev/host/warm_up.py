"""Warm-up: compile a training run's kernels, or load them from numba's cache, before the first step is timed."""

import contextlib
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hostdev.core.errors import UserError
from hostdev.core.key_rules import MinCount, Unused
from hostdev.core.optimizers import SGD, SparseOptimizer
from hostdev.core.rounding import plane_formats
from hostdev.host.disk.frame_pool import FRAME_BYTES
from hostdev.host.disk.readers import Planes
from hostdev.host.disk.tier import Tier
from hostdev.host.key_table import KeyTable
from hostdev.host.table import HostTable
from hostdev.kernels.arrays import Strided
from hostdev.kernels.bags import FeatureOccurrences, Uses, pool
from hostdev.kernels.bfloat16 import round_rows
from hostdev.kernels.catch_up import unpack_tasks
from hostdev.kernels.claims import Claims, claim, intersect, join, others
from hostdev.kernels.disk_records import Format
from hostdev.kernels.groups import check_groups, drop_padding, offsets_of, unique_groups
from hostdev.kernels.key_directory import parts_of
from hostdev.kernels.key_order import number_rows
from hostdev.kernels.lookup import gather_scaled
from hostdev.kernels.norm import clipped, largest
from hostdev.kernels.pool import run_tasks
from hostdev.kernels.unique import unique


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
    table.stored.note_changes()
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
        run_tasks(table.storage.fetch_tasks(ids[:1], packed, None, table.history.planes))
        run_tasks(unpack_tasks(packed, clock, grads[:1]))
    if squares:
        table.sum_of_squares()
    if (limit := optimizer.clip_limit(dim)) is not None:  # kernels of a table or cache on the CPU device
        clipped(grads, limit)
    formats = plane_formats(table.dtype, table.slots_dtype, optimizer)
    if formats is not None:  # kernels of a table or cache on the CPU device
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
        feature = FeatureOccurrences(inverse, np.array([0, 1, 2], np.int32) if pooled else None, weights, mean)
        if pooled:
            pool(rows, feature, out)
        elif weights is not None:
            gather_scaled(rows, inverse, weights, out)
        Uses([feature], 1).sum([Strided(out)], rows)


def warm_up_keys() -> None:
    """Call each kernel of the keys' directory and counts, with few keys for one thread, and with many for several."""
    many = np.arange(1 << 14, dtype=np.int64)
    for sketch in (None, "64KiB"):
        admit, evict = MinCount(2, sketch=sketch, expires=None if sketch else 1), Unused(steps=1, every=1)
        table = KeyTable(None, 1, SGD(), name="warm-up", capacity=len(many), admit=admit, evict=evict)
        table.may_train = True  # so that one of several processes may update this table
        for keys in (many[:9], many, many, many[:9], many[:9]):
            table.apply(keys, np.zeros((len(keys), 1), np.float32))
        table.key_rows.plan(many, np.ones(len(many), np.int32), may_read=True)
        table.key_rows.find_rows(many)
        table.key_rows.rollback()
        _ = table.keys
        table.erase(many[:3])
        _, inverse = unique(many)
        number_rows(np.full(len(many), -1, np.int32), inverse, [many], [[0]])
    parts_of(many)


_ROWS, _WIDTH, _FRAMES = 4096, 1024, 512  # rows, bytes of a row, and frames: most rows must leave the memory


def warm_up_disk(id_dtype: npt.DTypeLike) -> None:
    """Call each kernel of tables on disk once with row numbers of this dtype, on a small table in a temporary folder.

    If the table cannot be made, for lack of space, kernels compile when they are needed.
    """
    with contextlib.suppress(UserError, OSError), tempfile.TemporaryDirectory(prefix="hostdev-warm-up-") as folder:
        _use_tier(Path(folder), id_dtype)


def _use_tier(folder: Path, id_dtype: npt.DTypeLike) -> None:
    format_ = Format.of(_WIDTH, 0)
    nbytes = 4 * format_.chunk_bytes + _FRAMES * (_WIDTH + FRAME_BYTES)

    def allocate(count: int, keys: npt.NDArray[np.int64]) -> Planes:
        del keys
        return Planes.of([np.zeros((count, _WIDTH), np.uint8)])

    functions = allocate, lambda rows: rows, lambda frames, keys: None
    tier = Tier("warm-up", folder, _ROWS, nbytes, _WIDTH, *functions, segment_bytes=0)
    planes = allocate(_FRAMES, np.zeros(0, np.int64))
    for turn in range(3):
        for start in range(0, _ROWS, _FRAMES // 4):
            rows = np.arange(start, start + _FRAMES // 4).astype(id_dtype)
            with tier.held(rows, change=turn != 1):
                tier.find(rows)
            tier.let_go(rows[::2])
            tier.keep(rows[:1])
    tier.copy(np.arange(0, _ROWS, 16).astype(id_dtype), planes, lambda frames, keys: None)
    tier.forget(rows)
    tier.close()
