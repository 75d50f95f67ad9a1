"""Ctrl-C, SIGTERM and SIGHUP in training: the step in progress ends, or a deadline passes, and logs are complete."""

import os
import signal
import socket
import threading
from collections.abc import Callable
from types import FrameType, TracebackType

from hostdev.core.errors import write_stderr
from hostdev.core.streams import silence, terminals

DEADLINE_SECONDS = 1.2
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(KeyboardInterrupt):
    """Raised when work has ended after a signal; `exit_code` is the shell's: 130 after Ctrl-C, 143 after SIGTERM.

    saved  nothing was lost, and SIGTERM, or SIGHUP of a lost terminal, is no failure: 0
    """

    def __init__(self, number: signal.Signals, message: str, *, saved: bool = False) -> None:
        super().__init__(message)
        self.exit_code = 0 if saved and number in (signal.SIGTERM, signal.SIGHUP) else 128 + number


class GracefulStop:
    """Within this context the signals set `requested` instead of raising.

    A signal handler in Python waits for the main thread to return from native code, and one operation of a large
    batch can take seconds. So a watching thread is woken by the signal itself; where the main thread has not left
    the context by the deadline, the watcher calls `on_deadline` and ends the process, and the main thread gets no
    further than the end of the context. Where it has left before, the watcher is gone: a thread that lives on would
    hold what `on_deadline` holds, and to free a tensor while the interpreter ends aborts the process.

    on_deadline  completes what must not be lost; runs in the watching thread; returns what to tell the user
    seconds      how long the main thread has; None: until a second signal comes
    """

    def __init__(self, on_deadline: Callable[[], str], seconds: float | None = DEADLINE_SECONDS) -> None:
        self.requested: signal.Signals | None = None
        self._seconds = seconds
        self._on_deadline = on_deadline
        self._left = threading.Event()
        self._previous: dict[int, object] = {}
        self._main = threading.current_thread() is threading.main_thread()

    def __enter__(self) -> "GracefulStop":
        if not self._main:  # signals go to the main thread only, which is not ours
            return self
        self._read, self._write = socket.socketpair()
        self._write.setblocking(False)
        self._terminals = terminals()
        for number in _ENDING:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # as under nohup
                self._previous[number] = signal.signal(number, self._handle)
        self._previous_fd = signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False)
        self._watcher = threading.Thread(target=self._watch, name="hostdev-interrupt", daemon=True)
        self._watcher.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._left.set()
        if not self._main:
            return
        signal.set_wakeup_fd(self._previous_fd)
        self._write.close()
        self._watcher.join()  # for ever where it is ending the process
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.requested = signal.Signals(number)
        if number == signal.SIGHUP:
            silence(self._terminals)  # to write there would be an error

    def _next_signal(self) -> bytes:
        """Wait for a signal that asks for the end, and return its number; nothing when the context is left."""
        number = self._read.recv(1)
        while number and number[0] not in self._previous:  # somebody else's
            number = self._read.recv(1)
        return number

    def _watch(self) -> None:
        number = self._next_signal()
        if number and self._seconds is None:
            number = self._next_signal()
            while number and number[0] == signal.SIGHUP:  # shell and system may both send it for one lost terminal
                number = self._next_signal()
        self._read.close()
        if not number or self._left.wait(self._seconds or 0):
            return
        try:
            told = self._on_deadline()
            clear = "\r\x1b[K" if os.isatty(2) else ""  # of the progress bar that the main thread cannot take away
            write_stderr(f"{clear}{told}")
        finally:
            os._exit(128 + number[0])
