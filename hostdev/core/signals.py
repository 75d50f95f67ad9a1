"""Protection from Ctrl-C for work that must not be interrupted."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


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
