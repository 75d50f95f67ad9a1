"""The last step and the uses of each row, in 8 bytes: the step in the low 32 bits, the uses in the high ones."""

import sys
from typing import Any

import numpy as np
import numpy.typing as npt

from hostdev.kernels.arrays import RowNumbers
from hostdev.kernels.jit import array_at, inline, kernel, prefetch_to_read
from hostdev.kernels.key_directory import AHEAD, KeyDirectory, find_entry, look_ahead
from hostdev.kernels.pool import parallel_for

Packed = npt.NDArray[np.uint64]

_AHEAD = 16  # rows
_GRAIN = 8192
_LOW = 0xFFFFFFFF


@inline
def _used(value, uses, step):
    """Return a row's state after a step with this many uses."""
    low, high = np.uint64(_LOW), np.uint64(32)
    return (min((value >> high) + np.uint64(uses), low) << high) | (np.uint64(step) & low)


@kernel
def _use(start, stop, rows, uses, step, packed, before):
    begin, end = np.uint64(start), np.uint64(stop)
    for i in range(begin, end):
        ahead = i + np.uint64(_AHEAD)
        if ahead < end and rows[ahead] >= 0:
            prefetch_to_read(packed, rows[ahead], 8)
        if rows[i] >= 0:
            row = np.uint64(rows[i])
            before[i] = packed[row]
            packed[row] = _used(before[i], uses[i], step)


@kernel
def _find_and_use(start, stop, keys, parts, uses, step, packed, rows, before):
    """Find each key's row, and use it some keys later, when its state has arrived."""
    ring, owners = np.empty(AHEAD, np.int64), np.empty(AHEAD, np.uint64)
    begin, end, ahead, behind = np.uint64(start), np.uint64(stop), np.uint64(AHEAD), np.uint64(_AHEAD)
    for i in range(begin, min(begin + ahead, end)):
        look_ahead(keys, i, parts, ring, owners)
    for i in range(begin, end):
        address = ring[i & np.uint64(AHEAD - 1)]
        if i + ahead < end:
            look_ahead(keys, i + ahead, parts, ring, owners)
        found = array_at(find_entry(address, keys[i]), 2, np.int64)[1]
        rows[i] = found
        if found >= 0:
            prefetch_to_read(packed, found, 8)
        if i < begin + behind:
            continue
        j = i - behind
        if rows[j] >= 0:
            row = np.uint64(rows[j])
            before[j] = packed[row]
            packed[row] = _used(before[j], uses[j], step)
    for i in range(max(begin + behind, end) - behind, end):
        if rows[i] >= 0:
            row = np.uint64(rows[i])
            before[i] = packed[row]
            packed[row] = _used(before[i], uses[i], step)


@kernel
def _restore(start, stop, rows, packed, before):
    for i in range(np.uint64(start), np.uint64(stop)):
        if rows[i] >= 0:
            packed[np.uint64(rows[i])] = before[i]


def use(rows: RowNumbers, uses: RowNumbers, step: int, packed: Packed) -> Packed:
    """Set the last step of distinct rows, and add to their uses, at most 2^32 - 1.

    Args:
        rows: int32 [U]; negative numbers are left out.
        uses: int32 [U], how often the step uses each.
        step: The step, at most 2^32 - 1.
        packed: uint64 [V], the state of all rows, changed.

    Returns:
        The former state of each row, uint64 [U], for `restore`.
    """
    before = np.empty(len(rows), np.uint64)
    parallel_for(_use, len(rows), rows, uses, np.uint64(step), packed, before, grain=_GRAIN)
    return before


def find_and_use(
    directory: KeyDirectory, keys: npt.NDArray[np.int64], uses: RowNumbers, step: int, packed: Packed
) -> tuple[RowNumbers, Packed]:
    """Return `directory.find(keys)`, and the result of `use` with these rows; the keys must be distinct."""
    rows, before = np.empty(len(keys), np.int32), np.empty(len(keys), np.uint64)
    arguments = keys, directory.parts, uses, np.uint64(step), packed, rows, before
    parallel_for(_find_and_use, len(keys), *arguments, grain=_GRAIN)
    return rows, before


def restore(rows: RowNumbers, packed: Packed, before: Packed) -> None:
    """Undo a call of `use`."""
    parallel_for(_restore, len(rows), rows, packed, before, grain=_GRAIN)


def split(packed: Packed) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Return views of the last steps and of the uses, each uint32 [V]."""
    halves = packed.view(np.uint32)
    little = sys.byteorder == "little"
    return halves[1 - little :: 2], halves[little::2]
