"""Memory for blocks of growing size, each of which is given back before long, in huge pages.

Blocks are taken one after the other from reserved ranges of addresses, which are larger than what will be in use at
once. Each page of a range goes back to the system once none of its blocks is left. Where neighbouring blocks are given
back at about the same time, hardly any memory is lost, and blocks of any size lie in huge pages. The first range has
small pages, since a huge page would be much for an arena that stays small.
"""

import mmap
import threading
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hostdev.kernels.buffers import HUGE_PAGE, LINE, reserve

_SMALL_PAGE = 1 << 16
_FIRST_RANGE = 1 << 26  # bytes of addresses; the next range has 4 times as many, and others twice those of the last one
_FREE = getattr(mmap, "MADV_DONTNEED", None)


class Block(NamedTuple):
    """A block of memory."""

    values: npt.NDArray[np.uint8]  # [any], all 0 when it is taken
    home: "_Range"
    start: int


class _Range:
    """A range of addresses.

    Args:
        size: Bytes.
        page: Bytes of a page.

    Attributes:
        used: Bytes taken so far.
        blocks: uint32 [pages], how many blocks each page has parts of.
    """

    def __init__(self, size: int, page: int) -> None:
        self.memory, self.values = reserve(size, huge=page == HUGE_PAGE)
        self.used, self._page = 0, page
        self.blocks = np.zeros(-(-size // page), np.uint32)

    def _offset(self) -> int:
        """Return where `values` begin in `memory`."""
        return int(self.values.ctypes.data) - int(np.frombuffer(self.memory, np.uint8).ctypes.data)

    def pages(self, start: int, nbytes: int) -> slice:
        """Return the pages of a block."""
        return slice(start // self._page, -(-(start + nbytes) // self._page))

    def free(self, page: int) -> None:
        """Give a page back to the system if it will not be used again."""
        first = page * self._page
        last = first + self._page
        if last > self.used:
            return
        if _FREE is None:
            self.values[first:last] = 0
        else:
            self.memory.madvise(_FREE, self._offset() + first, last - first)

    @property
    def nbytes(self) -> int:
        """Bytes in use, with those of blocks that were given back in pages that other blocks use."""
        pages = np.flatnonzero(self.blocks)
        return int(np.minimum(self.used - pages * self._page, self._page).sum())


class Arena:
    """Memory for blocks. Several threads may take blocks and give them back."""

    def __init__(self) -> None:
        self._ranges: list[_Range] = []
        self._largest = 0  # bytes
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Bytes in use."""
        return sum(each.nbytes for each in self._ranges)

    def take(self, nbytes: int) -> Block:
        """Return a block that begins on a cache line; raise MemoryError if the system refuses the addresses."""
        with self._lock:
            size = -(-nbytes // LINE) * LINE
            if not self._ranges or self._ranges[-1].used + size > len(self._ranges[-1].values):
                self._ranges.append(self._next_range(size))
            home = self._ranges[-1]
            start, home.used = home.used, home.used + size
            home.blocks[home.pages(start, size)] += 1
            return Block(home.values[start : start + nbytes], home, start)

    def give_back(self, block: Block) -> None:
        """Give a block back; its memory must not be used any more."""
        home = block.home
        with self._lock:
            pages = home.pages(block.start, len(block.values))
            home.blocks[pages] -= 1
            for page in range(pages.start, pages.stop):
                if not home.blocks[page]:
                    home.free(page)
            self._ranges = [each for each in self._ranges[:-1] if each.blocks.any()] + self._ranges[-1:]

    def _next_range(self, least: int) -> _Range:
        if self._largest == 0 and least <= _FIRST_RANGE:
            self._largest = 2 * _FIRST_RANGE
            return _Range(_FIRST_RANGE, _SMALL_PAGE)
        self._largest = max(2 * self._largest, _FIRST_RANGE * -(-least // _FIRST_RANGE))
        return _Range(self._largest, HUGE_PAGE)


def as_entries(block: Block) -> Any:
    """Return a block as int64 [any, 2]."""
    return block.values.view(np.int64).reshape(-1, 2)
