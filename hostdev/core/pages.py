"""Pages of mapped files: maps many at once, which otherwise are mapped one group at a time, as they are first read."""

import ctypes
import mmap
import sys
from typing import Any

import numpy.typing as npt

_POPULATE_READ = 22  # linux/mman.h, since Linux 5.14
_madvise: Any = None


def populate(array: npt.NDArray[Any]) -> None:
    """Read an array's pages from the file that it maps, if they are not in memory, and map them.

    Nothing happens on systems without this call, and for an array that is not contiguous.
    """
    global _madvise
    if not sys.platform.startswith("linux") or not array.flags.c_contiguous or not array.nbytes:
        return
    if _madvise is None:
        _madvise = ctypes.CDLL(None).madvise
        _madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    begin = array.ctypes.data // mmap.PAGESIZE * mmap.PAGESIZE
    _madvise(begin, array.ctypes.data + array.nbytes - begin, _POPULATE_READ)  # an older kernel refuses: no harm
