"""Settings of glibc's allocator for training on the CPU."""

import ctypes
import os
import platform

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # malloc.h
_SETTINGS = {"MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES"}  # set by the user


def keep_freed_memory(*, one_arena: bool = False) -> None:
    """Have glibc keep freed memory for the next step instead of returning large blocks to the kernel.

    A step on the CPU allocates its activations anew; page faults on fresh memory would cost a fifth of the step. The
    user's own settings are kept.

    Args:
        one_arena: Let threads that begin after this call allocate from one heap, as far as no thread has a heap of its
            own yet. Such heaps hold 64 MiB each, larger needs are met with fresh pages, and freed memory is returned.
    """
    if platform.libc_ver()[0] != "glibc" or _SETTINGS & os.environ.keys():
        return
    mallopt = ctypes.CDLL(None).mallopt
    mallopt(_M_MMAP_THRESHOLD, 1 << 30)
    mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1)
    if one_arena and "MALLOC_ARENA_MAX" not in os.environ:
        mallopt(_M_ARENA_MAX, 1)
