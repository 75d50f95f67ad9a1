"""Distribution of a table's rows over ranks: ids map one-to-one to positions, and each rank has a range of positions.

Position = id * multiplier mod V. The multiplier is coprime to V and near V times the golden ratio's fraction, so that
neighbouring ids, such as the popular ones at a vocabulary's beginning, spread evenly over all ranges (three-distance
theorem; Sos, 1958). Positions do not depend on W, the number of ranks. Rank r's range begins at V * r // W.

The keys of a table by key are divided into 256 parts by the highest 8 bits of their hashes, and each rank owns whole
parts, in order. Nothing depends on the number of ranks: if each rank sorts its keys by hash, the keys of all ranks, one
rank after the other, are sorted, too.
"""

import functools
import math

import numpy as np
import numpy.typing as npt

from hostdev.kernels.arrays import AnyIds, Keys
from hostdev.kernels.jit import inline, kernel
from hostdev.kernels.key_directory import PARTS, parts_of

Places = npt.NDArray[np.int32]

_MOST_PRODUCT = (1 << 63) - 1


@functools.cache
def get_multiplier(rows: int) -> int:
    """Return the multiplier for a table of `rows` rows; its product with any id of the table is below 2**63."""
    wanted = max(1, min(int(rows * 0.6180339887498949), _MOST_PRODUCT // rows))
    return next(
        found
        for distance in range(rows + 1)
        for found in (wanted - distance, wanted + distance)
        if found > 0 and found * (rows - 1) <= _MOST_PRODUCT and math.gcd(found, rows) == 1
    )


def range_of(rows: int, rank: int, ranks: int) -> tuple[int, int]:
    """Return the range (start, stop) of the positions that a rank has in a table of `rows` rows."""
    return rows * rank // ranks, rows * (rank + 1) // ranks


def get_ids_at(rows: int, start: int, stop: int) -> npt.NDArray[np.int64]:
    """Return the ids at the positions [start, stop) of a table of V rows."""
    inverse = get_inverse(rows)
    out = np.empty(stop - start, np.int64)
    _step(start * inverse % rows, inverse, rows, out)
    return out


@kernel
def _step(first, step, modulus, out):
    """Write first + i * step modulo `modulus` for each i, by additions, since products could overflow."""
    value = np.uint64(first)
    for i in range(len(out)):
        out[i] = value
        value += np.uint64(step)
        if value >= np.uint64(modulus):
            value -= np.uint64(modulus)


@kernel
def _locate(ids, multiplier, rows, ranks, owners, local, counts):
    V, W, one = np.uint64(rows), np.uint64(ranks), np.uint64(1)
    for i in range(np.uint64(0), np.uint64(len(ids))):
        position = np.uint64(ids[i]) * np.uint64(multiplier) % V
        owner = ((position + one) * W - one) // V
        owners[i] = owner
        local[i] = position - V * owner // W
        counts[owner] += 1


@kernel
def _sort(owners, local, ends, places, out):
    """Sort local row numbers by owner, stably (counting sort)."""
    for i in range(np.uint64(0), np.uint64(len(owners))):
        owner = np.uint64(owners[i])
        place = ends[owner]
        ends[owner] += 1
        places[i] = place
        out[np.uint64(place)] = local[i]


@kernel
def _positions(ids, multiplier, rows, out):
    for i in range(len(ids)):
        out[i] = np.uint64(ids[i]) * np.uint64(multiplier) % np.uint64(rows)


def get_positions(ids: AnyIds, rows: int) -> npt.NDArray[np.int64]:
    """Return the positions, int64 [N], of ids [N] of a table of V rows."""
    out = np.empty(len(ids), np.int64)
    _positions(ids, get_multiplier(rows), rows, out)
    return out


@inline
def id_at(position, inverse, rows):
    """Return the id at a position: position * inverse mod `rows`, by doubling if the product could overflow."""
    modulus, one = np.uint64(rows), np.uint64(1)
    left, value, total = np.uint64(position), np.uint64(inverse), np.uint64(0)
    if modulus <= np.uint64(1 << 32):
        return left * value % modulus
    while left:
        if left & one:
            total = (total + value) % modulus
        value = (value + value) % modulus
        left >>= one
    return total


@kernel
def _write_ids(positions, inverse, rows, out):
    for i in range(len(positions)):
        out[i] = id_at(positions[i], inverse, rows)


def get_inverse(rows: int) -> int:
    """Return the inverse of the multiplier modulo V, or 0 if V is 1: the id at a position is position * inverse mod V.

    V is `rows`, the number of the table's rows.
    """
    return pow(get_multiplier(rows), -1, rows) if rows > 1 else 0


def ids_of(positions: AnyIds, rows: int) -> npt.NDArray[np.int64]:
    """Return the ids, int64 [N], at positions [N] of a table of V rows."""
    out = np.empty(len(positions), np.int64)
    _write_ids(positions, get_inverse(rows), rows, out)
    return out


def partition(ids: AnyIds, rows: int, ranks: int) -> tuple[AnyIds, Places, npt.NDArray[np.int64]]:
    """Sort unique ids by the rank that holds their rows.

    Args:
        ids: int32 or int64 [U], each in [0, V).
        rows: V, the number of the table's rows.
        ranks: W, the number of ranks.

    Returns:
        Three arrays. The number of each row within its rank, [U], sorted by rank, and for each rank in the order of
        `ids`; the dtype is that of `ids`, or int64 if that is too small. The index of each id in this first array,
        int32 [U]. The number of ids of each rank, int64 [W].
    """
    most = -(-rows // ranks) - 1  # the largest row number within a rank
    dtype = ids.dtype if most <= np.iinfo(ids.dtype).max else np.dtype(np.int64)
    owners, local, counts = np.empty(len(ids), np.int32), np.empty(len(ids), dtype), np.zeros(ranks, np.int64)
    _locate(ids, get_multiplier(rows), rows, ranks, owners, local, counts)
    return (*_sorted(owners, local, counts), counts)


def partition_by_owner(owners: Places, local: AnyIds, ranks: int) -> tuple[AnyIds, Places, npt.NDArray[np.int64]]:
    """Do the same as `partition` for rows whose ranks, and numbers within these ranks, are known.

    Args:
        owners: int32 [U], the rank that holds each row.
        local: Row numbers within these ranks [U].
        ranks: W, the number of ranks.
    """
    counts = np.bincount(owners, minlength=ranks)
    return (*_sorted(owners, local, counts), counts)


def _sorted(owners: Places, local: AnyIds, counts: npt.NDArray[np.int64]) -> tuple[AnyIds, Places]:
    places, out = np.empty(len(local), np.int32), np.empty_like(local)
    _sort(owners, local, np.cumsum(counts) - counts, places, out)
    return out, places


def first_part(rank: int, ranks: int) -> int:
    """Return the first part that a rank owns; `rank` may be `ranks`, for the end of the last rank's parts."""
    return -(-PARTS * rank // ranks)


def owners_of(keys: Keys, ranks: int) -> npt.NDArray[np.int32]:
    """Return the ranks that own keys [N], int32 [N]."""
    found: npt.NDArray[np.int32] = (parts_of(keys).astype(np.int32) * ranks) // PARTS
    return found
