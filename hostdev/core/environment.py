"""Settings of the C libraries under torch for a training process; import it before torch, which reads them once.

What the user has set in the environment stays.
"""

import ctypes
import os
import platform

# GNU OpenMP's idle threads spin for milliseconds by default, on the cores that the host's kernels want.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
# Tensors of many MiB on huge pages: torch's CPU allocator then asks the kernel for them.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

# Among several processes one that is gone is told of in words; torch's store has a trace of its own frames.
if {"RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "RANK_TABLE_FILE"} & os.environ.keys():
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # malloc.h


def keep_freed_memory() -> None:
    """Have glibc keep freed memory for the next step, where it would return large blocks to the kernel.

    A step on the CPU allocates its activations anew; as fresh pages they cost a fault per page, a fifth of the step.
    """
    if platform.libc_ver()[0] != "glibc":
        return
    mallopt = ctypes.CDLL(None).mallopt
    mallopt(_M_MMAP_THRESHOLD, 1 << 30)
    mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1)
    mallopt(_M_ARENA_MAX, 1)  # the heaps that other threads get hold 64 MiB; beyond, they map fresh pages


keep_freed_memory()
