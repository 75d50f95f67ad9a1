"""Work that threads share: ranges of a kernel, run by native code, and Python calls.

A kernel is compiled into a loop over ranges. The loop obtains the next range by an atomic addition, so that a thread
needs the GIL only once for many ranges.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numba.core import registry

from hostdev.kernels.jit import address_of, fetch_add, inline, kernel, load

Kernel = Callable[..., Any]
Call = tuple[Kernel, int, int, tuple[Any, ...]]
Times = list[tuple[int, int]]
COMPILED = registry.CPUDispatcher  # the type of functions that `make_loop` can compile into a loop


class KernelTask(NamedTuple):
    """A kernel to run over n items in `pieces` ranges; see `make_loop`.

    Attributes:
        times: A list to which (begin, end), in nanoseconds, is added whenever a thread has run ranges, or None.
    """

    kernel: Kernel
    n: int
    grain: int
    pieces: int
    args: tuple[Any, ...]
    times: Times | None = None


_LOOP = """
def loop(begun, halt, most, n, grain, grains, pieces{args}):
    done = 0
    while done < most and load(halt) == 0:
        at = fetch_add(begun, 1)
        if at >= pieces:
            break
        work(grains * at // pieces * grain, min(n, grains * (at + 1) // pieces * grain){args}{number})
        done += 1
    return done
"""
_WORDS, _AT = 16, 8  # the word that all threads write shares its cache line with no other data
_VISIT_NS = 5_000_000  # target time of the main thread's native calls; Ctrl-C waits up to twice as long, or for a range


def make_loop(work: Any) -> Any:
    """Return the loop over a kernel's ranges: `loop(begun, halt, most, n, grain, grains, pieces, *args)`.

    The loop returns the number of ranges that it ran. Threads that call it with the same `begun` share the ranges.

    Args of the loop:
        begun: Address of an int64, initially 0, to which a thread adds 1 when it begins a range.
        halt: Address of an int64; ranges begin only while this is 0.
        most: Maximum number of ranges that this call runs.
        n: The number of items.
        grain: Ranges begin at multiples of this number of items.
        grains: The number of grains in n items, rounded up.
        pieces: The number of ranges.
        args: The kernel's arguments other than start, stop and `piece`.

    The loop contains the kernel's compiled code, and is cached in place of the kernel.
    """
    loop = getattr(work, "loop", None)
    if loop is None:
        function = work.py_func
        code = function.__code__
        names = code.co_varnames[2 : code.co_argcount]
        numbered = names[-1:] == ("piece",)
        args = "".join(f", arg{i}" for i in range(len(names) - numbered))
        begin = "\n" * (code.co_firstlineno - 2)  # numba's cache reads the source at the function's line
        text = begin + _LOOP.format(args=args, number=", at" if numbered else "")
        given = {"work": inline(function), "fetch_add": fetch_add, "load": load}
        exec(compile(text, code.co_filename, "exec"), given)  # cached next to the kernel's file
        made: Any = given["loop"]
        made.__module__, made.__qualname__ = function.__module__, f"{function.__qualname__}.loop"
        loop = work.loop = kernel(made)
    return loop


def edges(n: int, grain: int, pieces: int) -> list[int]:
    """Split n items into ranges that begin at multiples of `grain`; return where each begins and the last one ends."""
    grains = -(-n // grain)
    return [min(n, grains * at // pieces * grain) for at in range(pieces + 1)]


def _make_counter() -> tuple[Any, int]:
    """Return memory of a counter of begun ranges, int64 [any], and the counter's address."""
    count = np.zeros(_WORDS, np.int64)
    return count, address_of(count) + 8 * _AT


_own = threading.local()  # `counter`: a thread's counter, for kernels that it runs alone


class Flag:
    """A flag in memory, which native loops check before each range."""

    def __init__(self) -> None:
        self.value = np.zeros(1, np.int64)
        self.address = self.value.ctypes.data

    def __bool__(self) -> bool:
        return bool(self.value[0])


NEVER = Flag()


class KernelLoop:
    """The ranges of a kernel, shared by any number of threads. Ranges begin in order."""

    def __init__(self, task: KernelTask) -> None:
        work, n, grain, self.pieces, args, self._times = task
        self._loop, self._args = make_loop(work), (n, grain, -(-n // grain), self.pieces, *args)
        self._begun, self._address = _make_counter()

    def is_left(self) -> bool:
        """Return whether there are ranges that have not begun."""
        return bool(self._begun[_AT] < self.pieces)

    def drop(self) -> None:
        """Prevent further ranges from beginning."""
        self._begun[_AT] = self.pieces

    def work(self, halt: Flag) -> bool:
        """Run ranges until none is left or the flag is set; return whether ranges are left.

        The main thread often returns to Python, for Ctrl-C.
        """
        pieces = most = self.pieces
        if pieces > 1 and threading.current_thread() is threading.main_thread():
            most = 1
        while True:
            begin = time.perf_counter_ns()
            done = self._loop(self._address, halt.address, most, *self._args)
            end = time.perf_counter_ns()
            if done and self._times is not None:
                self._times.append((begin, end))
            if done == pieces:
                return False
            if done < most or self._begun[_AT] >= pieces:  # the flag is set, or no range is left
                return self.is_left()
            if end - begin < _VISIT_NS:
                most *= 2


def run_alone(work: Kernel, n: int, *args: Any) -> None:
    """Run a kernel over n items in this thread. A direct call of the kernel would compile it a second time."""
    run_whole(KernelTask(work, n, n, 1, args))


def run_whole(task: KernelTask) -> None:
    """Run a kernel of one range in this thread."""
    work, n, _, _, args, times = task
    begin = time.perf_counter_ns()
    loop, counter, done = getattr(work, "loop", None) or make_loop(work), getattr(_own, "counter", None), 0
    if counter is None:
        counter = _own.counter = _make_counter()
    begun, address = counter
    while not done:  # a finalizer or a signal's handler may also have run a kernel since the counter was set
        begun[_AT] = 0
        done = loop(address, NEVER.address, 1, n, n or 1, 1, 1, *args)
    if times is not None:
        times.append((begin, time.perf_counter_ns()))


class Calls:
    """Calls, and kernel tasks of one range, shared by any number of threads. They begin in order."""

    def __init__(self, calls: deque[Call | KernelTask]) -> None:
        self._calls = calls

    def drop(self) -> None:
        """Prevent further calls from beginning."""
        self._calls.clear()

    def work(self, halt: Flag) -> bool:
        """Make calls until none is left or the flag is set; return whether calls are left."""
        while not halt.value[0]:
            try:
                task = self._calls.popleft()
            except IndexError:
                return False
            if isinstance(task, KernelTask):
                run_whole(task)
            else:
                call, start, stop, args = task
                call(start, stop, *args)
        return bool(self._calls)
