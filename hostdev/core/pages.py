"""Advice to the system about the pages of memory-mapped files: read soon, or read in no order."""

import ctypes
import mmap
import sys
from typing import Any

import numpy.typing as npt

_POPULATE_READ = 22  # linux/mman.h, since Linux 5.14
_madvise: Any = None


def populate(array: npt.NDArray[Any]) -> None:
    """Map the pages of a memory-mapped array, and read those that are not in memory from the file.

    Do nothing on systems other than Linux 5.14 or later, or if the array is not C-contiguous.
    """
    if not sys.platform.startswith("linux") or not array.flags.c_contiguous or not array.nbytes:
        return
    _advise(array, _POPULATE_READ)  # harmless error on older kernels


def read_singly(array: npt.NDArray[Any]) -> None:
    """Read each page of a memory-mapped array alone, without those around it; do nothing where that is unknown."""
    if hasattr(mmap, "MADV_RANDOM") and array.nbytes:
        _advise(array, mmap.MADV_RANDOM)


def _advise(array: npt.NDArray[Any], advice: int) -> None:
    global _madvise
    if _madvise is None:
        _madvise = ctypes.CDLL(None).madvise
        _madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    begin = array.ctypes.data // mmap.PAGESIZE * mmap.PAGESIZE
    _madvise(begin, array.ctypes.data + array.nbytes - begin, advice)
