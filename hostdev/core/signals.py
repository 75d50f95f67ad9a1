"""Ctrl-C: protection of work that must not be interrupted, and reliable handling.

An interrupt ends imports at once, and is raised again if something swallows it. Python raises KeyboardInterrupt
wherever the main thread happens to be, even where it cannot propagate: in a finalizer or callback, within a library's
bare `except`, or in C code that clears errors or turns them into an ImportError.
"""

import atexit
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

_AGAIN_SECONDS = 0.02


@contextmanager
def deferred() -> Iterator[None]:
    """In the main thread, defer a SIGINT or SIGTERM to the end of the block; a second signal is handled at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    before: dict[int, Callable[..., Any]] = {number: call for number, call in handlers.items() if callable(call)}
    held: list[tuple[int, Any]] = []

    def hold(number: int, frame: Any) -> None:
        held.append((number, frame))
        if len(held) > 1:
            before[number](number, frame)

    try:
        for number in before:
            signal.signal(number, hold)
        yield
    finally:
        for number, handler in before.items():  # SIGINT last: its handler may interrupt this loop
            signal.signal(number, handler)
        if len(held) == 1:
            number, frame = held[0]
            before[number](number, frame)


def uninterruptible(call: Callable[[], Any]) -> None:
    """Repeat an interrupted call until it completes; then raise the last interrupt, if there was one."""
    interrupted: BaseException | None = None
    while True:
        try:
            call()
            break
        except (KeyboardInterrupt, SystemExit) as error:
            interrupted = error
    if interrupted is not None:
        raise interrupted


@contextmanager
def leaving(leave: Callable[[], object]) -> Iterator[None]:
    """On Ctrl-C in a block that only imports modules, call `leave`, which must end the process without cleanup."""
    if not (_is_main() and callable(signal.getsignal(signal.SIGINT))):
        yield
        return
    before = signal.signal(signal.SIGINT, lambda number, frame: leave())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class _Interrupt(KeyboardInterrupt):
    """A KeyboardInterrupt that notifies its guard when it is deleted."""

    def __init__(self, guard: "InterruptGuard") -> None:
        super().__init__()
        self._guard = guard

    def __del__(self) -> None:
        self._guard._raise_again()


class InterruptGuard:
    """A context in which Ctrl-C raises KeyboardInterrupt repeatedly until `handled` is called.

    Args:
        leave: Called on Ctrl-C once the context has ended; it should end the process, as Python's exit takes seconds.

    Attributes:
        is_interrupted: Whether Ctrl-C was pressed.
    """

    def __init__(self, leave: Callable[[], object] = lambda: None) -> None:
        self._leave = leave
        self.is_interrupted = self._is_handled = False
        self._before: dict[int, Any] = {}
        self._hook = sys.unraisablehook

    def __enter__(self) -> "InterruptGuard":
        usual = signal.default_int_handler, signal.SIG_DFL
        if _is_main() and (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGALRM)) == usual:
            self._before[signal.SIGINT] = signal.signal(signal.SIGINT, self._handle)
            self._before[signal.SIGALRM] = signal.signal(signal.SIGALRM, _resend)
            atexit.register(_ignore)
            sys.unraisablehook = self._unraisable
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.handled()
        if self._before:
            signal.signal(signal.SIGINT, lambda number, frame: self._leave())
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, self._before[signal.SIGALRM])
            sys.unraisablehook = self._hook

    def handled(self) -> None:
        """Record that the interrupt has reached the code that ends the command."""
        self._is_handled = True

    def _unraisable(self, raised: "sys.UnraisableHookArgs") -> None:
        """Print an unraisable exception, except for Ctrl-C, which is raised again."""
        if not isinstance(raised.exc_value, _Interrupt):
            self._hook(raised)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.is_interrupted = True
        raise _Interrupt(self)

    def _raise_again(self) -> None:
        """Raise the interrupt again after a short delay: at once, in this finalizer, it would get lost again."""
        if not self._is_handled and not sys.is_finalizing():
            signal.setitimer(signal.ITIMER_REAL, _AGAIN_SECONDS)  # not a thread: starting one may wait for a lock


def _ignore() -> None:
    """Ignore Ctrl-C during the rest of Python's exit; otherwise the signal would kill the process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _resend(number: int, frame: FrameType | None) -> None:
    os.kill(os.getpid(), signal.SIGINT)  # runs the current handler of SIGINT


def _is_main() -> bool:
    return threading.current_thread() is threading.main_thread()
