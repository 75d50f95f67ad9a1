"""Counting of id occurrences with several threads."""

from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import numpy.typing as npt

from hostdev.core.errors import UserError
from hostdev.core.memory import available_bytes, format_bytes
from hostdev.kernels.pool import host_threads
from hostdev.kernels.unique import tally

Counted = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]  # distinct ids, and how often each occurs


def count_bytes(uses: int) -> int:
    """Return the size in bytes of a counter of up to `uses` occurrences: 4 or 8."""
    return 4 if uses < 2**32 else 8


def require_room(folder: Path, ids: int, needed: int) -> None:
    """Raise UserError unless `needed` bytes of memory are free for counting the ids of a data set."""
    if needed > (free := available_bytes()):
        raise UserError(
            f"{folder}: counting its {ids:,} ids needs {needed} bytes ({format_bytes(needed)}) of memory, but {free} "
            f"({format_bytes(free)}) are free; use a machine with more memory"
        )


def add_counts(*parts: Counted) -> Counted:
    """Return the distinct ids of all parts, ascending, and how often each occurs in all; both int64 [K]."""
    ids, inverse = np.unique(np.concatenate([ids for ids, _ in parts]), return_inverse=True)
    total = np.bincount(inverse, np.concatenate([counts for _, counts in parts]), len(ids))
    return ids, total.astype(np.int64)


class Counter:
    """A counter of each id's occurrences. Threads use separate arrays if memory and the amount of work allow.

    Args:
        ids: Number of ids.
        uses: Upper bound on the number of occurrences of all ids together.
    """

    def __init__(self, ids: int, uses: int) -> None:
        size = count_bytes(uses)
        most = min(uses // max(1, ids), available_bytes() // (4 * size * max(1, ids)))
        self._arrays = [np.zeros(ids, f"u{size}") for _ in range(max(1, min(host_threads(), most)))]
        self._free: SimpleQueue[npt.NDArray[Any]] = SimpleQueue()
        for array in self._arrays:
            self._free.put(array)

    def add(self, ids: npt.NDArray[Any]) -> None:
        """Count ids [N], each at least 0 and less than the number of ids."""
        array = self._free.get()
        try:
            tally(ids, array)
        finally:
            self._free.put(array)

    def total(self) -> npt.NDArray[Any]:
        """Return the occurrences of each id, uint32 or uint64 [ids]; call this after the last `add`."""
        total = self._arrays[0]
        for other in self._arrays[1:]:
            total += other
        self._arrays = [total]
        return total
