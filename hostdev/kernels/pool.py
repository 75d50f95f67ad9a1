"""The host threads: runs a kernel over ranges of its items on a pool of Python threads.

Kernels release the GIL, so plain threads suffice: no OpenMP runtime is needed, several threads may call at once,
and a caller never waits for a busy pool (it works off its own ranges itself).
"""

import itertools
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

from hostdev.core.signals import insist

Kernel = Callable[..., Any]
Task = tuple[Kernel, int, int, tuple[Any, ...]]

_RANGES_PER_THREAD = 4  # evens out threads that the operating system slows down
_RANGE_BYTES, _LINE = 1 << 18, 64  # scattered rows cost a line at least; 20 to 30 microseconds
_MOST_GRAINS = 16  # in a range, so that who is urgent need not wait for long: about half a millisecond
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
    """One call of `run_tasks`: the tasks still to begin, and how many helpers are at work on some."""

    def __init__(self, tasks: Sequence[Task], *, urgent: bool) -> None:
        self.tasks = deque(tasks)
        self.urgent = urgent
        self.error: BaseException | None = None
        self._helpers = 0
        self._closed = False
        self._changed = threading.Condition()

    def help(self) -> None:
        """Work in a thread that is not the caller's, unless the job has ended."""
        counted = False

        def done() -> None:
            nonlocal counted
            with self._changed:
                if counted:
                    self._helpers, counted = self._helpers - 1, False
                    self._changed.notify_all()

        try:
            with self._changed:
                if self._closed:
                    return
                self._helpers, counted = self._helpers + 1, True
            self.work()
        finally:
            insist(done)

    def work(self) -> None:
        """Take tasks until none is left."""
        while True:
            if _urgent.callers and not self.urgent and self.tasks:
                _urgent.give_way()
            try:
                kernel, start, stop, args = self.tasks.popleft()
            except IndexError:
                return
            try:
                kernel(start, stop, *args)
            except BaseException as error:  # the caller raises it; what is not begun is dropped
                self.error = error
                self.tasks.clear()
                return

    def end(self) -> None:
        """Drop what is not begun, and wait for the helpers, whatever interrupts this thread: they write its memory."""

        def wait() -> None:
            with self._changed:
                self._closed = True
                self.tasks.clear()
                self._changed.wait_for(lambda: not self._helpers)

        insist(wait)


class _Urgent:
    """Who is in an urgent section, and the job of theirs that others are to help with."""

    def __init__(self) -> None:
        self.callers = 0
        self.job: _Job | None = None
        self.changed = threading.Condition()

    def give_way(self) -> None:
        """Work for urgent callers until there is none."""
        while True:
            with self.changed:
                self.changed.wait_for(lambda: not self.callers or (self.job is not None and self.job.tasks))
                job = self.job
                if not self.callers or job is None:
                    return
            job.help()

    def offer(self, job: _Job) -> None:
        with self.changed:
            self.job = job
            self.changed.notify_all()


_urgent = _Urgent()
_this = threading.local()


@contextmanager
def urgent() -> Iterator[None]:
    """Put this thread's kernels before those of other threads, which begin no task until the section ends."""
    counted = False

    def leave() -> None:
        nonlocal counted
        _this.urgent = False
        with _urgent.changed:
            if counted:
                _urgent.callers, counted = _urgent.callers - 1, False
            _urgent.job = None
            _urgent.changed.notify_all()

    try:
        with _urgent.changed:
            _urgent.callers, counted = _urgent.callers + 1, True
        _this.urgent = True
        yield
    finally:
        insist(leave)


def _serve() -> None:
    while True:
        _queue.get().help()


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
    global _queue, _grow, _urgent
    _queue, _urgent = SimpleQueue(), _Urgent()
    _workers.clear()
    _grow = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def grain_of(nbytes: int) -> int:
    """Return how many rows of `nbytes` are worth a range of their own: less work than handing it over takes is none."""
    return max(1, _RANGE_BYTES // max(nbytes, _LINE))


def ranges(n: int, grain: int = 1) -> list[tuple[int, int]]:
    """Return half-open ranges that cover range(n), as many as suit the threads.

    grain  ranges start at multiples of it; work of less than two grains stays in one range
    """
    if n <= 0:
        return []
    grains = -(-n // grain)
    pieces = 1 if _threads == 1 else min(grains, max(_threads * _RANGES_PER_THREAD, grains // _MOST_GRAINS))
    pieces = max(pieces, n >> _MAX_RANGE_BITS)
    edges = [min(n, grains * i // pieces * grain) for i in range(pieces + 1)]
    return list(itertools.pairwise(edges))


def run_tasks(tasks: Sequence[Task]) -> None:
    """Call `kernel(start, stop, *args)` for every task (kernel, start, stop, args), and wait.

    Tasks begin in the order given; they write different memory, so that they may run at once. An exception of one is
    raised here, after those that have begun, and so is one that interrupts the caller: nobody writes afterwards.
    """
    helpers = min(_threads, len(tasks)) - 1
    if helpers < 1:
        for kernel, start, stop, args in tasks:
            kernel(start, stop, *args)
        return
    job = _Job(tasks, urgent=getattr(_this, "urgent", False))
    if job.urgent:
        _urgent.offer(job)
    _ensure_workers(helpers)
    try:
        for _ in range(helpers):
            _queue.put(job)
        job.work()
    finally:
        job.end()
    if job.error is not None:
        raise job.error


def tasks_over(kernel: Kernel, n: int, *args: Any, grain: int = 1) -> list[Task]:
    """Return the tasks of `parallel_for`, to be run together with others by one `run_tasks`."""
    return [(kernel, start, stop, args) for start, stop in ranges(n, grain)]


def parallel_for(kernel: Kernel, n: int, *args: Any, grain: int = 1) -> None:
    """Call `kernel(start, stop, *args)` over ranges that cover range(n), in no particular order, and wait.

    kernel  writes only what its own range owns, so that ranges may run at once
    grain   as in `ranges`
    """
    run_tasks(tasks_over(kernel, n, *args, grain=grain))
