"""Tasks as threads take them: ranges of a kernel in native code, calls of anything else through Python.

A kernel is compiled into a loop that claims its next range by an atomic addition, so that a thread needs the
interpreter's lock once for many ranges, and not once for each.
"""

import inspect
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from hostdev.kernels.jit import fetch_add, inline, kernel, load

Words = npt.NDArray[np.int64]
Call = tuple[Callable[..., Any], int, int, tuple[Any, ...]]
Times = list[tuple[int, int]]

_LOOP = """
def loop(shared, halt, most{names}):
    done = 0
    while done < most and not is_set(halt):
        at = claim(shared)
        if at >= shared[PIECES]:
            break
        work(edge(shared, at), edge(shared, at + 1){names})
        done += 1
    return done
"""
_NEXT, _N, _GRAIN, _PIECES = 0, 8, 9, 10  # the first is written all the time: it has a cache line to itself
_WORDS = 16
_VISIT_NS = 5_000_000  # in native code: in the main thread Ctrl-C waits for less than three of these, or for one range


def is_kernel(function: Any) -> bool:
    """Tell whether a loop can be made of it."""
    return isinstance(function, numba.core.registry.CPUDispatcher)  # type: ignore[attr-defined]


def loop_of(work: Any) -> Any:
    """Return the loop over a kernel's ranges: `loop(shared, halt, most, *args)` returns how many it has done.

    shared  int64 [16], written: the number of ranges begun, and what range(n) is cut into; the same for all threads
    halt    int64 [1]; not 0: begin no range
    most    ranges to do

    The kernel is compiled into the loop, and the loop cached in its place: it costs what the kernel alone would.
    """
    loop = getattr(work, "loop", None)
    if loop is None:
        function = work.py_func
        names = "".join(f", {name}" for name in list(inspect.signature(function).parameters)[2:])
        made = {"work": inline(function), "claim": _claim, "is_set": _is_set, "edge": _edge, "PIECES": _PIECES}
        exec(compile(_LOOP.format(names=names), function.__code__.co_filename, "exec"), made)  # cached beside it
        made["loop"].__module__, made["loop"].__qualname__ = function.__module__, f"{function.__qualname__}.loop"
        loop = work.loop = kernel(made["loop"])
    return loop


@inline
def _claim(shared: Any) -> Any:
    """The number of a range that has not begun; of none, if all have."""
    return fetch_add(shared.ctypes.data, 1)


@inline
def _is_set(halt: Any) -> Any:
    return load(halt.ctypes.data) != 0


@inline
def _edge(shared: Any, at: Any) -> Any:
    """Where range `at` begins, as `edges` has it."""
    n, grain = shared[_N], shared[_GRAIN]
    return min(n, -(-n // grain) * at // shared[_PIECES] * grain)


def edges(n: int, grain: int, pieces: int) -> list[int]:
    """Return where ranges begin that cover range(n), and where the last one ends; all at multiples of `grain` but n."""
    grains = -(-n // grain)
    return [min(n, grains * i // pieces * grain) for i in range(pieces + 1)]


class Loop:
    """A kernel's ranges, begun in order by any number of threads.

    times  gets the begin and end, in nanoseconds, of each time that a thread does some
    """

    def __init__(
        self, work: Any, n: int, grain: int, pieces: int, args: tuple[Any, ...], times: Times | None
    ) -> None:  # fmt: skip
        self.pieces = pieces
        self._loop, self._args, self._times = loop_of(work), args, times
        self._shared = np.zeros(_WORDS, np.int64)
        self._shared[_N : _PIECES + 1] = n, grain, pieces

    def is_left(self) -> bool:
        """Tell whether some have not begun."""
        return bool(self._shared[_NEXT] < self.pieces)

    def drop(self) -> None:
        """Let no more begin."""
        self._shared[_NEXT] = self.pieces

    def work(self, halt: Words) -> None:
        """Do ranges until none is left, or halt[0] is not 0; the main thread comes back to Python in between."""
        most = 1 if threading.current_thread() is threading.main_thread() else self.pieces
        while self.is_left() and not halt[0]:
            begin = time.perf_counter_ns()
            done = self._loop(self._shared, halt, most, *self._args)
            end = time.perf_counter_ns()
            if done and self._times is not None:
                self._times.append((begin, end))
            if end - begin < _VISIT_NS:
                most *= 2


class Calls:
    """Calls of Python functions, each of which a thread takes while it holds the interpreter's lock."""

    def __init__(self, calls: Iterable[Call]) -> None:
        self._calls = deque(calls)
        self.pieces = len(self._calls)

    def is_left(self) -> bool:
        """Tell whether some have not begun."""
        return bool(self._calls)

    def drop(self) -> None:
        """Let no more begin."""
        self._calls.clear()

    def work(self, halt: Words) -> None:
        """Make calls until none is left, or halt[0] is not 0."""
        while not halt[0]:
            try:
                call, start, stop, args = self._calls.popleft()
            except IndexError:
                return
            call(start, stop, *args)
