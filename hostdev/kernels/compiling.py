"""Compilation of kernels by several processes, which share compiled code through numba's cache."""

import os
import pickle
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Lock, Thread
from typing import IO, Any

from numba.core import event

from hostdev.kernels.pool import host_threads, set_host_threads

Call = Callable[[], object]  # must be picklable, such as a `functools.partial` of a module's function
_HELPER = "from hostdev.kernels.compiling import help_main; help_main()"


class Compiled(event.Listener):
    """Counts the kernels that numba compiles rather than loads from its cache."""

    def __init__(self) -> None:
        self.count = 0

    def on_start(self, event: Any) -> None:
        """Count a kernel whose compilation begins."""
        self.count += 1

    def on_end(self, event: Any) -> None:
        """Do nothing."""


def run_calls(calls: Sequence[Call], processes: int) -> int:
    """Run calls that use kernels, with the help of other processes if kernels must be compiled.

    Once a call in this process has compiled a kernel, helper processes take some of the remaining calls, and compile
    the kernels of these calls. This process runs these calls, too, once the helpers have ended; it then loads the
    kernels from the cache. So this process runs every call itself, and an error of any call is raised here. Failures
    of helper processes are ignored.

    Args:
        calls: The calls, the slowest first.
        processes: The maximum number of processes, including this one.

    Returns:
        The number of kernels that this process has compiled.
    """
    left, compiled = deque(calls), Compiled()
    with event.install_listener("numba:compile", compiled):
        while left and not compiled.count:
            left.popleft()()
        with _helping(left, min(processes - 1, len(left) - 1)) as helped:
            while (call := _take(left)) is not None:
                call()
        for call in helped:
            call()
    return compiled.count


def help_main() -> None:
    """Serve as a helper process: run the pickled calls on standard input, and write an empty line after each.

    The first pickled object is not a call but the number of host threads.
    """
    answers = os.dup(1)
    os.dup2(2, 1)  # what calls print goes to standard error, not among the answers
    set_host_threads(pickle.load(sys.stdin.buffer))
    while True:
        try:
            call = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        call()
        os.write(answers, b"\n")


@contextmanager
def _helping(left: deque[Call], helpers: int) -> Iterator[list[Call]]:
    """Start helper processes, which take calls from `left` and run them until none is left.

    Yield the list of the calls that helpers have taken. It is complete when the `with` block has ended.
    """
    taken: list[Call] = []
    processes: list[subprocess.Popen[bytes]] = []
    threads: list[Thread] = []
    lock = Lock()

    def serve(process: "subprocess.Popen[bytes]") -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        while (call := _take(left)) is not None:
            with lock:
                taken.append(call)
            if not _send(process.stdin, call) or not process.stdout.readline():
                return

    try:
        for _ in range(helpers):
            process = _start_helper()
            if process is None:
                break
            processes.append(process)
            threads.append(Thread(target=serve, args=(process,), daemon=True))
            threads[-1].start()
        yield taken
        for thread in threads:
            thread.join()
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def _start_helper() -> "subprocess.Popen[bytes] | None":
    """Start a helper process, or return None if that fails."""
    if not sys.executable:
        return None
    try:
        process = subprocess.Popen(
            [sys.executable, "-c", _HELPER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # the parent process also runs each call, and raises its error
            start_new_session=True,  # only the parent process receives Ctrl-C
        )
    except OSError:
        return None
    assert process.stdin is not None
    _send(process.stdin, host_threads())
    return process


def _send(to: IO[bytes], value: object) -> bool:
    """Write a pickled value; return whether that succeeded."""
    try:
        pickle.dump(value, to)
        to.flush()
    except OSError:
        return False
    return True


def _take(calls: deque[Call]) -> Call | None:
    try:
        return calls.popleft()
    except IndexError:
        return None
