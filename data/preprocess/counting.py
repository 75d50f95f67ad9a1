"""How often ids are used, counted by several threads at once."""

from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import numpy.typing as npt

from hostdev.core.errors import UserError
from hostdev.core.memory import available_bytes, format_bytes
from hostdev.kernels.pool import host_threads
from hostdev.kernels.unique import tally


def count_bytes(uses: int) -> int:
    """Return the bytes that count up to so many uses: 4, or 8 where they may be too many for that."""
    return 4 if uses < 2**32 else 8


def require_room(folder: Path, ids: int, needed: int) -> None:
    """Raise UserError unless `needed` bytes are free for what the ids of a data set take."""
    if needed > (free := available_bytes()):
        raise UserError(
            f"{folder}: counting its {ids:,} ids needs {needed} bytes ({format_bytes(needed)}) of memory, but {free} "
            f"({format_bytes(free)}) are free; use a machine with more"
        )


class Counter:
    """Uses of each of so many ids. Threads count in arrays of their own, as far as memory and the work are worth it.

    ids   how many there are
    uses  the most that are going to be counted
    """

    def __init__(self, ids: int, uses: int) -> None:
        size = count_bytes(uses)
        most = min(uses // max(1, ids), available_bytes() // (4 * size * max(1, ids)))
        self._arrays = [np.zeros(ids, f"u{size}") for _ in range(max(1, min(host_threads(), most)))]
        self._free: SimpleQueue[npt.NDArray[Any]] = SimpleQueue()
        for array in self._arrays:
            self._free.put(array)

    def add(self, ids: npt.NDArray[Any]) -> None:
        """Count ids [N], all of them in range."""
        array = self._free.get()
        try:
            tally(ids, array)
        finally:
            self._free.put(array)

    def total(self) -> npt.NDArray[Any]:
        """Return the uses of each id, uint32 or uint64 [ids], when all is counted."""
        total = self._arrays[0]
        for other in self._arrays[1:]:
            total += other
        self._arrays = [total]
        return total
