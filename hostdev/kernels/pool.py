"""The host threads: runs a kernel over ranges of its items on a pool of Python threads.

Kernels release the GIL, so plain threads suffice: no OpenMP runtime is needed, several threads may call at once,
and a caller never waits for a busy pool (it works off its own ranges itself). What a call costs does not grow with the
threads: a kernel's ranges are handed out in native code, and each helper wakes the next ones while there is work left.
"""

import atexit
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any, NamedTuple

from hostdev.core.signals import insist
from hostdev.kernels.loops import Call, Calls, Flag, Loop, Times, edges, is_kernel

Kernel = Callable[..., Any]


class KernelTask(NamedTuple):
    """A kernel over range(n), in so many ranges; arguments as `loops.Loop` has them."""

    kernel: Kernel
    n: int
    grain: int
    pieces: int
    args: tuple[Any, ...]
    times: Times | None = None


Task = Call | KernelTask

_RANGES_PER_THREAD = 4  # evens out threads that the operating system slows down
_RANGE_BYTES, _LINE = 1 << 18, 64  # scattered rows cost a line at least; 20 to 30 microseconds
_MOST_GRAINS = 16  # in a range, so that who is urgent need not wait for long: about half a millisecond
_MAX_RANGE_BITS = 18  # so that Ctrl-C need not wait for long
_WAKES = 2  # helpers, by each thread that takes part
_LONGEST_JOIN = 1.0  # seconds; for helpers in somebody's call as the interpreter ends
_NEVER = Flag()

_queue: SimpleQueue["_Job | None"] = SimpleQueue()
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
    """One call of `run_tasks`: the tasks still to begin, and how many helpers are at work on some.

    helpers  at most
    """

    def __init__(self, parts: Sequence[Loop | Calls], helpers: int, *, urgent: bool) -> None:
        self.urgent = urgent
        self.error: BaseException | None = None
        self._parts = parts
        self._asleep = helpers
        self._helpers = 0
        self._closed = False
        self._changed = threading.Condition()

    def is_left(self) -> bool:
        """Tell whether there are tasks that have not begun."""
        return any(part.is_left() for part in self._parts)

    def drop(self) -> None:
        """Let no more begin."""
        for part in self._parts:
            part.drop()

    def wake(self) -> None:
        """Call the next helpers, who call the next: nobody has to call them all, and none comes for nothing."""
        with self._changed:
            for _ in range(min(_WAKES, self._asleep)):
                self._asleep -= 1
                _queue.put(self)

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
                if self._closed or not self.is_left():
                    return
                self._helpers, counted = self._helpers + 1, True
                self.wake()
            self.work()
        finally:
            insist(done)

    def work(self) -> None:
        """Take tasks until none is left."""
        halt = _NEVER if self.urgent else _urgent.callers
        for part in self._parts:
            while part.is_left():
                if halt:
                    _urgent.give_way()
                try:
                    part.work(halt)
                except BaseException as error:  # the caller raises it; what is not begun is dropped
                    self.error = error
                    self.drop()
                    return

    def end(self) -> None:
        """Drop what is not begun, and wait for the helpers, whatever interrupts this thread: they write its memory.

        Then the job holds no arrays: a helper that comes late would keep them, and be the one who frees them.
        """

        def wait() -> None:
            with self._changed:
                self._closed = True
                self.drop()
                self._changed.wait_for(lambda: not self._helpers)
                self._parts = ()

        insist(wait)

    def raise_error(self) -> None:
        """Raise what has ended it; it is not kept, as its frames hold arrays, too."""
        if self.error is not None:
            try:
                raise self.error
            finally:
                self.error = None


class _Urgent:
    """Who is in an urgent section, and the job of theirs that others are to help with.

    callers  how many they are
    """

    def __init__(self) -> None:
        self.callers = Flag()
        self.job: _Job | None = None
        self.changed = threading.Condition()

    def give_way(self) -> None:
        """Work for urgent callers until there is none."""
        while True:
            with self.changed:
                self.changed.wait_for(lambda: not self.callers or (self.job is not None and self.job.is_left()))
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
                _urgent.callers.value[0], counted = _urgent.callers.value[0] - 1, False
            _urgent.job = None
            _urgent.changed.notify_all()

    try:
        with _urgent.changed:
            _urgent.callers.value[0], counted = _urgent.callers.value[0] + 1, True
        _this.urgent = True
        yield
    finally:
        insist(leave)


def _serve() -> None:
    while (job := _queue.get()) is not None:
        job.help()
        del job  # while it waits for the next


def _ensure_workers(n: int) -> None:
    if len(_workers) >= n:
        return
    with _grow:
        while len(_workers) < n:
            worker = threading.Thread(target=_serve, name=f"hostdev-{len(_workers) + 1}", daemon=True)
            worker.start()
            _workers.append(worker)


@atexit.register
def _end() -> None:
    """Have the helpers end before the interpreter does: who frees a tensor while it ends aborts the process.

    Callers work without them from then on.
    """
    for _worker in _workers:
        _queue.put(None)
    deadline = time.monotonic() + _LONGEST_JOIN
    for worker in _workers:
        worker.join(max(0.0, deadline - time.monotonic()))


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
    return list(itertools.pairwise(edges(n, grain, _pieces(n, grain)))) if n > 0 else []


def _pieces(n: int, grain: int) -> int:
    grains = -(-n // grain)
    pieces = 1 if _threads == 1 else min(grains, max(_threads * _RANGES_PER_THREAD, grains // _MOST_GRAINS))
    return max(pieces, n >> _MAX_RANGE_BITS)


def run_tasks(tasks: Sequence[Task]) -> None:
    """Call `kernel(start, stop, *args)` for every task (kernel, start, stop, args) and for those of kernels, and wait.

    Tasks begin in the order given; they write different memory, so that they may run at once. An exception of one is
    raised here, after those that have begun, and so is one that interrupts the caller: nobody writes afterwards.
    """
    parts: list[Loop | Calls] = []
    for task in tasks:
        if isinstance(task, KernelTask):
            parts.append(Loop(*task))
        elif parts and isinstance(parts[-1], Calls):
            parts[-1].add(task)
        else:
            parts.append(Calls(task))
    helpers = min(_threads, sum(part.pieces for part in parts)) - 1
    if helpers < 1:
        for part in parts:
            part.work(_NEVER)
        return
    job = _Job(parts, helpers, urgent=getattr(_this, "urgent", False))
    if job.urgent:
        _urgent.offer(job)
    _ensure_workers(helpers)
    try:
        job.wake()
        job.work()
    finally:
        job.end()
    job.raise_error()


def tasks_over(kernel: Kernel, n: int, *args: Any, grain: int = 1) -> list[Task]:
    """Return the tasks of `parallel_for`, to be run together with others by one `run_tasks`."""
    if n > 0 and is_kernel(kernel):
        return [KernelTask(kernel, n, grain, _pieces(n, grain), args)]
    return [(kernel, start, stop, args) for start, stop in ranges(n, grain)]


def timed(task: Task, times: Times) -> Task:
    """Return a task that adds to `times` when it began and ended, in nanoseconds: once or, of a kernel's, in pieces."""
    if isinstance(task, KernelTask):
        return task._replace(times=times)
    kernel, start, stop, args = task
    return (_timed, start, stop, (times, kernel, args))


def _timed(start: int, stop: int, times: Times, kernel: Kernel, args: tuple[Any, ...]) -> None:
    begin = time.perf_counter_ns()
    kernel(start, stop, *args)
    times.append((begin, time.perf_counter_ns()))


def parallel_for(kernel: Kernel, n: int, *args: Any, grain: int = 1) -> None:
    """Call `kernel(start, stop, *args)` over ranges that cover range(n), in no particular order, and wait.

    kernel  writes only what its own range owns, so that ranges may run at once
    grain   as in `ranges`
    """
    run_tasks(tasks_over(kernel, n, *args, grain=grain))
