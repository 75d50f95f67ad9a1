"""The machine: processors that this process may use, and glibc's allocator settings for training on the CPU."""

import ctypes
import os
import platform

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # parameters of mallopt, from malloc.h
# Environment variables with which users configure glibc's allocator.
_SETTINGS = {"MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES"}


def available_cpus() -> int:
    """Return the number of processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def keep_freed_memory() -> None:
    """Have glibc keep freed memory for the next step instead of returning large blocks to the kernel.

    Each step on the CPU allocates its activations anew, and page faults on fresh memory would take a fifth of the step.
    Nothing is changed if the user has set an allocator variable in the environment.

    Threads that start after this call share one heap, so call it before a thread gets a heap of its own. A thread's own
    heap holds 64 MiB; it serves larger requests with fresh pages, and returns freed memory to the kernel.
    """
    if platform.libc_ver()[0] != "glibc" or _SETTINGS & os.environ.keys():
        return
    mallopt = ctypes.CDLL(None).mallopt
    mallopt(_M_MMAP_THRESHOLD, 1 << 30)
    mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1)
    if "MALLOC_ARENA_MAX" not in os.environ:
        mallopt(_M_ARENA_MAX, 1)
