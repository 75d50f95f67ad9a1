"""Handles Ctrl-C, SIGTERM and SIGHUP in training: finishes the step, or exits at a deadline, and completes the logs."""

import os
import signal
import socket
import threading
from collections.abc import Callable
from types import FrameType

from hostdev.core.errors import write_stderr
from hostdev.core.printable import silence, terminals
from hostdev.core.progress import ERASE_LINE

DEADLINE_SECONDS = 1.2
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(KeyboardInterrupt):
    """The work has ended after a signal; `exit_code` is 130 after Ctrl-C, 143 after SIGTERM.

    Args:
        saved: Whether a checkpoint has all steps. If so, SIGTERM and SIGHUP count as success, with `exit_code` 0.
    """

    def __init__(self, number: signal.Signals, message: str, *, saved: bool = False) -> None:
        super().__init__(message)
        self.exit_code = 0 if saved and number in (signal.SIGTERM, signal.SIGHUP) else 128 + number


class GracefulStop:
    """A context in which Ctrl-C, SIGTERM and SIGHUP set `requested` instead of raising an exception.

    Python runs signal handlers only when the main thread returns from native code, and one operation on a large batch
    can take seconds. Therefore the signal itself wakes a watcher thread. If the main thread has not left the context
    by the deadline, the watcher calls `on_deadline` and ends the process; the main thread then never leaves the
    context. Otherwise, the watcher ends with the context: if it lived on, it would keep the objects that `on_deadline`
    references, and freeing a tensor during interpreter shutdown aborts the process.

    Args:
        on_deadline: Saves what must not be lost and returns a message for the user; runs in the watcher thread.
        seconds: Time from a signal to the deadline; None for no deadline until a second signal arrives.
    """

    def __init__(self, on_deadline: Callable[[], str], seconds: float | None = DEADLINE_SECONDS) -> None:
        self.requested: signal.Signals | None = None
        self._seconds = seconds
        self._on_deadline = on_deadline
        self._left = threading.Event()
        self._previous: dict[int, object] = {}
        self._main = threading.current_thread() is threading.main_thread()

    def __enter__(self) -> "GracefulStop":
        if not self._main:  # only the main thread may set signal handlers
            return self
        self._read, self._write = socket.socketpair()
        self._write.setblocking(False)
        self._terminals = terminals()
        for number in _ENDING:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
                self._previous[number] = signal.signal(number, self._handle)
        self._previous_fd = signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False)
        self._watcher = threading.Thread(target=self._watch, name="hostdev-interrupt", daemon=True)
        self._watcher.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._left.set()
        if not self._main:
            return
        signal.set_wakeup_fd(self._previous_fd)
        self._write.close()
        self._watcher.join()  # never returns if the watcher is ending the process
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.requested = signal.Signals(number)
        if number == signal.SIGHUP:
            silence(self._terminals)  # writing to a lost terminal is an error

    def _next_signal(self) -> bytes:
        """Wait for a signal that requests the end, and return its number; return b"" once the context has ended."""
        number = self._read.recv(1)
        while number and number[0] not in self._previous:  # another handler's signal
            number = self._read.recv(1)
        return number

    def _watch(self) -> None:
        number = self._next_signal()
        if number and self._seconds is None:
            number = self._next_signal()
            while number and number[0] == signal.SIGHUP:  # shell and kernel may each send one for a lost terminal
                number = self._next_signal()
        self._read.close()
        if not number or self._left.wait(self._seconds or 0):
            return
        try:
            message = self._on_deadline()
            clear = ERASE_LINE if os.isatty(2) else ""  # the progress bar, which the main thread cannot erase
            write_stderr(f"{clear}{message}")
        finally:
            os._exit(128 + number[0])
