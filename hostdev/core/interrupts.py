"""Ctrl-C that cannot get lost: it ends the imports at once, and comes again where somebody has swallowed it.

KeyboardInterrupt is raised wherever the main thread is, also where nothing that is raised gets any further: in a
finaliser or a callback, below a library's bare `except`, in C code that clears errors or makes an ImportError of them.
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
def leaving(leave: Callable[[], object]) -> Iterator[None]:
    """Call `leave`, which ends the process, at Ctrl-C within the block: there is nothing to clean up in imports."""
    if not (_is_main() and callable(signal.getsignal(signal.SIGINT))):
        yield
        return
    before = signal.signal(signal.SIGINT, lambda number, frame: leave())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class _Interrupt(KeyboardInterrupt):
    """Tells when nobody has it any more."""

    def __init__(self, arriving: "Arriving") -> None:
        super().__init__()
        self._arriving = arriving

    def __del__(self) -> None:
        self._arriving._lost()


class Arriving:
    """Within this context Ctrl-C raises KeyboardInterrupt until `arrived` is called.

    leave     ends the process; what Ctrl-C does after the context, as the interpreter's own end takes seconds
    has_come  there was one
    """

    def __init__(self, leave: Callable[[], object] = lambda: None) -> None:
        self._leave = leave
        self.has_come = self._has_arrived = False
        self._before: dict[int, Any] = {}
        self._hook = sys.unraisablehook

    def __enter__(self) -> "Arriving":
        usual = signal.default_int_handler, signal.SIG_DFL
        if _is_main() and (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGALRM)) == usual:
            self._before[signal.SIGINT] = signal.signal(signal.SIGINT, self._handle)
            self._before[signal.SIGALRM] = signal.signal(signal.SIGALRM, _come_again)
            atexit.register(_ignore)
            sys.unraisablehook = self._unraisable
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.arrived()
        if self._before:
            signal.signal(signal.SIGINT, lambda number, frame: self._leave())
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, self._before[signal.SIGALRM])
            sys.unraisablehook = self._hook

    def arrived(self) -> None:
        """The interrupt has reached who ends the command."""
        self._has_arrived = True

    def _unraisable(self, raised: "sys.UnraisableHookArgs") -> None:
        """Print what was raised where nobody can catch it, but not Ctrl-C, which comes again."""
        if not isinstance(raised.exc_value, _Interrupt):
            self._hook(raised)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.has_come = True
        raise _Interrupt(self)

    def _lost(self) -> None:
        """Raise it again soon: what is raised here, in a finaliser, would get lost as well."""
        if not self._has_arrived and not sys.is_finalizing():
            signal.setitimer(signal.ITIMER_REAL, _AGAIN_SECONDS)  # no thread, which could wait for a lock here


def _ignore() -> None:
    """Ignore Ctrl-C from here, the last of what Python runs at its end: what follows would die of the signal."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _come_again(number: int, frame: FrameType | None) -> None:
    os.kill(os.getpid(), signal.SIGINT)  # with whatever meaning that has now


def _is_main() -> bool:
    """Tell whether this thread gets signals."""
    return threading.current_thread() is threading.main_thread()
