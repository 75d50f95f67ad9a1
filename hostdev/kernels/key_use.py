"""The last step and the uses of each row, in 8 bytes: the step in the low 32 bits, the uses in the high ones."""

import sys
from typing import Any

import numpy as np
import numpy.typing as npt

from hostdev.kernels.jit import kernel, prefetch_to_read
from hostdev.kernels.pool import parallel_for

Rows = npt.NDArray[np.int32]
Packed = npt.NDArray[np.uint64]

_AHEAD = 16  # rows
_GRAIN = 8192
_LOW = 0xFFFFFFFF


@kernel
def _use(start, stop, rows, uses, step, packed, before):
    low, high, most = np.uint64(_LOW), np.uint64(32), np.uint64(_LOW)
    begin, end = np.uint64(start), np.uint64(stop)
    for i in range(begin, end):
        ahead = i + np.uint64(_AHEAD)
        if ahead < end and rows[ahead] >= 0:
            prefetch_to_read(packed, rows[ahead], 8)
        if rows[i] >= 0:
            row = np.uint64(rows[i])
            value = packed[row]
            before[i] = value
            packed[row] = (min((value >> high) + np.uint64(uses[i]), most) << high) | (np.uint64(step) & low)


@kernel
def _restore(start, stop, rows, packed, before):
    for i in range(np.uint64(start), np.uint64(stop)):
        if rows[i] >= 0:
            packed[np.uint64(rows[i])] = before[i]


def use(rows: Rows, uses: Rows, step: int, packed: Packed) -> Packed:
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


def restore(rows: Rows, packed: Packed, before: Packed) -> None:
    """Undo a call of `use`."""
    parallel_for(_restore, len(rows), rows, packed, before, grain=_GRAIN)


def split(packed: Packed) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Return views of the last steps and of the uses, each uint32 [V]."""
    halves = packed.view(np.uint32)
    little = sys.byteorder == "little"
    return halves[1 - little :: 2], halves[little::2]
