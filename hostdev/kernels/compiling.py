"""Calls that compile kernels, spread over several processes: numba keeps what one has compiled for the others."""

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

Call = Callable[[], object]  # it can be pickled, such as a `functools.partial` of a function of a module
_HELPER = "from hostdev.kernels.compiling import help_main; help_main()"


class Compiled(event.Listener):
    """Counts the kernels that numba compiles and does not load."""

    def __init__(self) -> None:
        self.count = 0

    def on_start(self, event: Any) -> None:
        """Count a kernel."""
        self.count += 1

    def on_end(self, event: Any) -> None:
        """Do nothing."""


def run_calls(calls: Sequence[Call], processes: int) -> int:
    """Run calls in this process; once one has compiled a kernel, further processes compile those of the next calls.

    At the end, each call was run in this process, which has then compiled or loaded all kernels. A call's error is
    raised here; a helper that fails costs only its help.

    Args:
        calls: The calls, the slowest first.
        processes: How many processes compile at most, with this one.

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
    """Run the calls that another process writes to this one's input, and answer each with a line, until its end."""
    answers = os.dup(1)
    os.dup2(2, 1)  # what a call prints does not belong to the answers
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
    """A context in which helpers take calls from `left`; at its end, the value holds what they took."""
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
    """Start a process that compiles; None if this machine starts none now."""
    if not sys.executable:
        return None
    try:
        process = subprocess.Popen(
            [sys.executable, "-c", _HELPER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # this process runs each call as well, and tells of its error
            start_new_session=True,  # this process alone gets Ctrl-C
        )
    except OSError:
        return None
    assert process.stdin is not None
    _send(process.stdin, host_threads())
    return process


def _send(to: IO[bytes], value: object) -> bool:
    """Write a value; return whether the other end reads it."""
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
