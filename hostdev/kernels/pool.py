"""The host threads: runs a kernel over ranges of its items on a pool of Python threads.

Kernels release the GIL, so plain threads suffice: no OpenMP runtime is needed, several threads may call at once,
and a caller never waits for a busy pool (it works off its own ranges itself).
"""

import itertools
import os
import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

Kernel = Callable[..., Any]

_RANGES_PER_THREAD = 4  # evens out threads that the operating system slows down
_MAX_RANGE_BITS = 18  # so that Ctrl-C need not wait for long

_queue: SimpleQueue["_Job"] = SimpleQueue()
_workers: list[threading.Thread] = []
_grow = threading.Lock()


def _available_cpus() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


_threads = _available_cpus()


def set_host_threads(n: int) -> None:
    """Set how many threads a host kernel uses, the calling one included. The results do not depend on it."""
    global _threads
    if n < 1:
        raise ValueError(f"host threads must be at least 1, not {n}")
    _threads = n


def host_threads() -> int:
    """Return how many threads a host kernel uses; by default, the CPUs this process may run on."""
    return _threads


class _Job:
    """One call of `parallel_for`: the ranges still to do and how many are unfinished."""

    def __init__(self, kernel: Kernel, args: tuple[Any, ...], ranges: list[tuple[int, int]]) -> None:
        self.kernel = kernel
        self.args = args
        self.ranges = deque(ranges)
        self.unfinished = len(ranges)
        self.lock = threading.Lock()
        self.done = threading.Event()
        self.error: BaseException | None = None

    def work(self) -> None:
        """Take ranges until none is left."""
        while True:
            try:
                start, stop = self.ranges.popleft()
            except IndexError:
                return
            try:
                self.kernel(start, stop, *self.args)
                self._finish(1)
            except BaseException as error:  # the caller raises it, Ctrl-C included; what is not begun is dropped
                self.error = error
                dropped = 1
                while self.ranges:
                    try:
                        self.ranges.popleft()
                        dropped += 1
                    except IndexError:
                        break
                self._finish(dropped)

    def _finish(self, ranges: int) -> None:
        with self.lock:
            self.unfinished -= ranges
            if self.unfinished == 0:
                self.done.set()


def _serve() -> None:
    while True:
        _queue.get().work()


def _ensure_workers(n: int) -> None:
    if len(_workers) >= n:
        return
    with _grow:
        while len(_workers) < n:
            worker = threading.Thread(target=_serve, name=f"hostdev-{len(_workers) + 1}", daemon=True)
            worker.start()
            _workers.append(worker)


def _after_fork() -> None:
    """Threads do not survive a fork: the child starts a pool of its own."""
    global _queue, _grow
    _queue = SimpleQueue()
    _workers.clear()
    _grow = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def parallel_for(kernel: Kernel, n: int, *args: Any, grain: int = 1) -> None:
    """Call `kernel(start, stop, *args)` over ranges that cover `range(n)`, in no particular order, and wait.

    kernel  writes only what its own range owns, so that ranges may run at once
    n       number of items
    grain   ranges start at multiples of it; work of less than two grains stays on the calling thread
    """
    if n <= 0:
        return
    grains = -(-n // grain)
    threads = min(_threads, grains)
    if threads == 1:
        kernel(0, n, *args)
        return
    pieces = min(grains, max(threads * _RANGES_PER_THREAD, n >> _MAX_RANGE_BITS))
    edges = [min(n, grains * i // pieces * grain) for i in range(pieces + 1)]
    job = _Job(kernel, args, list(itertools.pairwise(edges)))
    _ensure_workers(threads - 1)
    for _ in range(threads - 1):
        _queue.put(job)
    job.work()
    job.done.wait()
    if job.error is not None:
        raise job.error
