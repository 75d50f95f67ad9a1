"""Ctrl-C and SIGTERM during training: the step in progress ends, or a deadline passes, and the logs are complete."""

import os
import signal
import socket
import threading
from collections.abc import Callable
from types import FrameType, TracebackType

DEADLINE_SECONDS = 1.2


class Interrupted(KeyboardInterrupt):
    """Raised when work has ended after a signal; `exit_code` is the shell's: 130 after Ctrl-C, 143 after SIGTERM."""

    def __init__(self, number: signal.Signals, message: str) -> None:
        super().__init__(message)
        self.exit_code = 128 + number


class GracefulStop:
    """Within this context the signals set `requested` instead of raising.

    A signal handler in Python waits for the main thread to return from native code, and one operation of a large
    batch can take seconds. So a watching thread is woken by the signal itself; where the main thread has not left
    the context by the deadline, the watcher calls `on_deadline` and ends the process.

    on_deadline  completes what must not be lost; runs in the watching thread
    """

    def __init__(self, on_deadline: Callable[[], object]) -> None:
        self.requested: signal.Signals | None = None
        self._on_deadline = on_deadline
        self._left = threading.Event()
        self._previous: dict[int, object] = {}
        self._main = threading.current_thread() is threading.main_thread()

    def __enter__(self) -> "GracefulStop":
        if not self._main:  # signals go to the main thread only, which is not ours
            return self
        self._read, self._write = socket.socketpair()
        self._write.setblocking(False)
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._handle)
        self._previous_fd = signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._watch, name="hostdev-interrupt", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._left.set()
        if not self._main:
            return
        signal.set_wakeup_fd(self._previous_fd)
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._write.close()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.requested = signal.Signals(number)

    def _watch(self) -> None:
        number = self._read.recv(1)  # of the signal; nothing when the context is left
        while number and number[0] not in (signal.SIGINT, signal.SIGTERM):  # somebody else's
            number = self._read.recv(1)
        self._read.close()
        if not number or self._left.wait(DEADLINE_SECONDS):
            return
        try:
            self._on_deadline()
            os.write(2, b"\ninterrupted in the middle of a step; the logs are complete\n")
        finally:
            os._exit(128 + number[0])
