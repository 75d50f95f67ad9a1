"""The host's thread pool: runs a kernel over ranges of its items on Python threads.

Kernels release the GIL, so Python threads suffice: no OpenMP runtime is needed, and several threads may use the pool at
once. A caller never has to wait until helpers are free, since it also runs ranges itself. The cost of a call does not
grow with the number of threads: native code hands out the ranges, and each helper wakes further helpers while work
remains.
"""

import atexit
import itertools
import os
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

from hostdev.core.machine import available_cpus
from hostdev.core.signals import uninterruptible
from hostdev.kernels import loops
from hostdev.kernels.loops import Call, Calls, Flag, KernelLoop, Times, run_whole
from hostdev.kernels.loops import Kernel as Kernel
from hostdev.kernels.loops import KernelTask as KernelTask

Task = Call | KernelTask

_RANGES_PER_THREAD = 4  # so that other threads can take over the ranges of threads that the operating system slows down
_RANGE_BYTES, _LINE = 1 << 18, 64  # bytes: 20 to 30 microseconds of work; a cache line, the least that a row costs
_MOST_GRAINS = 16  # grains per range; limits the wait of urgent callers to about half a millisecond
_MAX_RANGE_BITS = 18  # a range has at most about 2 * 2^18 items, which limits how long Ctrl-C waits
_WAKES = 2  # number of helpers that each working thread wakes
_LONGEST_JOIN = 1.0  # seconds to wait for busy helpers when the interpreter exits

_queue: SimpleQueue["_Job | None"] = SimpleQueue()
_workers: list[threading.Thread] = []
_grow = threading.Lock()


_threads = available_cpus()


def set_host_threads(n: int) -> None:
    """Set how many threads a host kernel uses, including the caller's. Results do not depend on the number."""
    global _threads
    if n < 1:
        raise ValueError(f"host threads must be at least 1, not {n}")
    _threads = n


def host_threads() -> int:
    """Return how many threads a host kernel uses; by default, the number of CPUs this process may run on."""
    return _threads


class _Job:
    """One call of `run_tasks`: the tasks that have not begun, and the helpers at work.

    Args:
        helpers: Maximum number of helpers.
    """

    def __init__(self, parts: Sequence[KernelLoop | Calls], helpers: int, *, urgent: bool) -> None:
        self.urgent = urgent
        self.error: BaseException | None = None
        self._parts = parts
        self._first = 0  # parts before this one have all begun
        self._asleep = helpers
        self._helpers = 0
        self._closed = False
        self._changed = threading.Condition()

    def is_left(self) -> bool:
        return self._first < len(self._parts)

    def drop(self) -> None:
        for part in self._parts:
            part.drop()
        self._first = len(self._parts)

    def wake(self) -> None:
        """Wake a few helpers, each of which wakes more, so that no thread has to wake all helpers.

        No helper wakes others once all work has begun.
        """
        with self._changed:
            for _ in range(min(_WAKES, self._asleep)):
                self._asleep -= 1
                _queue.put(self)

    def help(self) -> None:
        """Work on the job in a helper's thread, unless the job has ended."""
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
            uninterruptible(done)

    def work(self) -> None:
        halt = loops.NEVER if self.urgent else _urgent.callers
        while (at := self._first) < len(self._parts):
            try:
                if self._parts[at].work(halt):
                    _urgent.give_way()
                elif at == self._first:  # a race can set `_first` back; an ended part is then tried again
                    self._first = at + 1
            except BaseException as error:  # the caller raises it; tasks that have not begun are dropped
                self.error = error
                self.drop()
                return

    def end(self) -> None:
        """Drop the tasks that have not begun, and wait until no helper is at work, even if interrupted.

        Helpers write to memory that the caller owns, so the caller must not continue before they stop. Then drop the
        tasks' arrays, because a helper that wakes late may refer to the job for longer than the caller.
        """

        def wait() -> None:
            with self._changed:
                self._closed = True
                if self._first < len(self._parts):
                    self.drop()
                while self._helpers:
                    self._changed.wait()
                self._parts = ()

        uninterruptible(wait)

    def raise_error(self) -> None:
        """Raise the error that ended the job, and forget it, since the error's stack frames hold arrays."""
        assert self.error is not None
        try:
            raise self.error
        finally:
            self.error = None


class _Urgent:
    """The number of threads in an `urgent` block, and their latest job, which other threads help to finish.

    Attributes:
        callers: The number of threads in an `urgent` block.
    """

    def __init__(self) -> None:
        self.callers = Flag()
        self.job: _Job | None = None
        self.changed = threading.Condition()

    def give_way(self) -> None:
        """Help the threads that are in an `urgent` block until there are none."""
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
    """Give this thread's kernels priority: until the `with` block ends, other threads help it first.

    Threads at work for other callers finish the ranges that they have begun, and begin no others until the block ends.
    """
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
        uninterruptible(leave)


def _serve() -> None:
    while (job := _queue.get()) is not None:
        job.help()
        del job  # hold no arrays while waiting


def _start_workers(n: int) -> None:
    """Start helpers until there are n."""
    with _grow:
        while len(_workers) < n:
            worker = threading.Thread(target=_serve, name=f"hostdev-{len(_workers) + 1}", daemon=True)
            worker.start()
            _workers.append(worker)


def start_helpers() -> None:
    """Start the helpers now: they inherit the priority of the calling thread, and a later caller's may be low."""
    _start_workers(_threads - 1)


@atexit.register
def _end() -> None:
    """End the helpers before the interpreter exits: a helper that frees a tensor during exit would abort the process.

    Later calls of `run_tasks` run without helpers.
    """
    for _worker in _workers:
        _queue.put(None)
    deadline = time.monotonic() + _LONGEST_JOIN
    for worker in _workers:
        worker.join(max(0.0, deadline - time.monotonic()))


def _after_fork() -> None:
    """Let a forked child process start its own pool: threads do not survive a fork."""
    global _queue, _grow, _urgent
    _queue, _urgent = SimpleQueue(), _Urgent()
    _workers.clear()
    _grow = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def get_grain(nbytes: int) -> int:
    """Return how many rows of `nbytes` bytes make a range whose work outweighs the cost of handing it out."""
    return max(1, _RANGE_BYTES // max(nbytes, _LINE))


def ranges(n: int, grain: int = 1) -> list[tuple[int, int]]:
    """Split range(n) into half-open ranges (start, stop), usually several per thread.

    Ranges begin at multiples of `grain`, so there is only one if n is at most `grain`.
    """
    return list(itertools.pairwise(loops.edges(n, grain, count_ranges(n, grain)))) if n > 0 else []


def count_ranges(n: int, grain: int = 1) -> int:
    """Return into how many ranges `ranges` splits n items; 1 for 0 items."""
    if n <= grain:
        return 1
    grains = -(-n // grain)
    pieces = 1 if _threads == 1 else min(grains, max(_threads * _RANGES_PER_THREAD, grains // _MOST_GRAINS))
    return max(pieces, n >> _MAX_RANGE_BITS)


def run_tasks(tasks: Sequence[Task], *, alone: bool = False) -> None:
    """Call `kernel(start, stop, *args)` for each task (kernel, start, stop, args) and each range of a KernelTask.

    Return when all tasks have ended. Tasks begin in the order of the list and may run concurrently, so they must write
    different memory. If a task raises an exception or the caller is interrupted, no more tasks begin, and the exception
    is raised when all tasks that have begun have ended. If `alone`, this thread runs all tasks: for little work, waking
    helpers takes longer.
    """
    if len(tasks) == 1 and isinstance(tasks[0], KernelTask) and tasks[0].pieces == 1:
        run_whole(tasks[0])
        return
    parts: list[KernelLoop | Calls] = []
    calls: deque[Task] | None = None  # tasks of one range since the last task of several ranges
    pieces = 0
    for task in tasks:
        if isinstance(task, KernelTask) and task.pieces != 1:
            pieces += task.pieces
            parts.append(KernelLoop(task))
            calls = None
            continue
        pieces += 1
        if calls is None:
            calls = deque()
            parts.append(Calls(calls))
        calls.append(task)
    helpers = 0 if alone else min(_threads, pieces) - 1
    if helpers < 1:
        for part in parts:
            part.work(loops.NEVER)
        return
    job = _Job(parts, helpers, urgent=getattr(_this, "urgent", False))
    if job.urgent:
        _urgent.offer(job)
    if len(_workers) < helpers:
        _start_workers(helpers)
    try:
        job.wake()
        job.work()
    finally:
        job.end()
    if job.error is not None:
        job.raise_error()


def tasks_over(kernel: Kernel, n: int, *args: Any, grain: int = 1) -> list[Task]:
    """Return the work of `parallel_for` as tasks, so that one `run_tasks` can run it together with other tasks."""
    if n > 0 and isinstance(kernel, loops.COMPILED):
        return [KernelTask(kernel, n, grain, 1 if n <= grain else count_ranges(n, grain), args)]
    return [(kernel, start, stop, args) for start, stop in ranges(n, grain)]


def timed(tasks: Sequence[Task], times: Times) -> list[Task]:
    """Return tasks that also append their (begin, end), in nanoseconds, to `times`.

    A KernelTask appends one pair whenever a thread has run some of its ranges.
    """
    return [
        KernelTask(*task[:-1], times) if isinstance(task, KernelTask) else (_timed, *task[1:3], (times, task))
        for task in tasks
    ]


def _timed(start: int, stop: int, times: Times, call: Call) -> None:
    kernel, _, _, args = call
    begin = time.perf_counter_ns()
    kernel(start, stop, *args)
    times.append((begin, time.perf_counter_ns()))


def parallel_for(kernel: Kernel, n: int, *args: Any, grain: int = 1) -> None:
    """Call `kernel(start, stop, *args)` for each of `ranges(n, grain)`; return when all calls have ended.

    The calls may run at the same time, so each call must write only memory that belongs to its range.
    """
    run_tasks(tasks_over(kernel, n, *args, grain=grain))
