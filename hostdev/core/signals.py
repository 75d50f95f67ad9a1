"""Ctrl-C, kept from work that is to happen as a whole."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def deferred() -> Iterator[None]:
    """Let SIGINT and SIGTERM wait for the end of the block, where Python handles them; a second one does not wait.

    For the main thread: no other is interrupted.
    """
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
        for number, handler in before.items():  # SIGINT last: from then on this may be interrupted
            signal.signal(number, handler)
        if len(held) == 1:
            number, frame = held[0]
            before[number](number, frame)


def insist(call: Callable[[], Any]) -> None:
    """Call until it has come to its end, whatever interrupts it; then raise the interruption."""
    interrupted: BaseException | None = None
    while True:
        try:
            call()
            break
        except (KeyboardInterrupt, SystemExit) as error:
            interrupted = error
    if interrupted is not None:
        raise interrupted
