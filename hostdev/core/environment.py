"""Settings of the C libraries under torch for a training process; import it before torch, which reads them once.

Variables that the user has set are kept.
"""

import ctypes
import os
import platform

# GNU OpenMP's idle threads spin for milliseconds by default, on cores that the host kernels need.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
# torch's CPU allocator requests huge pages for tensors of many MiB.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

# hostdev reports a lost process itself; torch's store would print a trace of its own frames.
if {"RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "RANK_TABLE_FILE"} & os.environ.keys():
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # malloc.h


def keep_freed_memory() -> None:
    """Have glibc keep freed memory for the next step instead of returning large blocks to the kernel.

    A step on the CPU allocates its activations anew; page faults on fresh memory would cost a fifth of the step.
    """
    if platform.libc_ver()[0] != "glibc":
        return
    mallopt = ctypes.CDLL(None).mallopt
    mallopt(_M_MMAP_THRESHOLD, 1 << 30)
    mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1)
    mallopt(_M_ARENA_MAX, 1)  # other threads' heaps hold 64 MiB; beyond that, they map fresh pages


keep_freed_memory()
