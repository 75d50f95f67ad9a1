"""Repetition of work that fails for a while, with growing pauses and a limit of time."""

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import wait
from typing import TypeVar

from hostdev.core.errors import StoppedError, StoreError, raise_if_transient, write_stderr
from hostdev.core.workers import run_in_thread

LONGEST_SECONDS = 300.0  # of attempts, unless HOSTDEV_STORE_PATIENCE is set
_PAUSES = 0.5, 30.0  # seconds: the first one, which doubles, and the longest
_POLL_SECONDS = 0.2  # between checks whether the result is still needed

T = TypeVar("T")


class Patience:
    """The pauses between attempts at one piece of work.

    Args:
        where: The thing that fails, for messages.
        is_transient: Returns whether an error may go away.
        describe: Returns an error as text that may be shown.
    """

    def __init__(
        self, where: str, is_transient: Callable[[Exception], bool], describe: Callable[[Exception], str]
    ) -> None:
        self._where, self._is_transient, self._describe = where, is_transient, describe
        self._begin, self._pause = time.monotonic(), _PAUSES[0]

    def wait(self, error: Exception, stop: threading.Event | None = None) -> None:
        """Pause after an error; return early when `stop` is set.

        Raises:
            StoreError: The error is permanent, or attempts have gone on for as long as allowed.
            TransientError: This machine lacks memory or file descriptors.
        """
        raise_if_transient(error)
        where, why = self._where, self._describe(error)
        if not self._is_transient(error):
            raise StoreError(f"{where}: {why}") from None
        seconds = time.monotonic() - self._begin
        remaining = _get_limit() - seconds
        if remaining <= 0:
            raise StoreError(
                f"{where}: {why}; this went on for {seconds:.0f} s; repeat the command when the store can be reached",
                is_transient=True,
            ) from None
        pause = min(self._pause, max(remaining, 0.05))
        if pause > _PAUSES[0]:  # a first failure is usual
            write_stderr(f"{where}: {why}; trying again in {pause:.0f} s, for {remaining:.0f} s at most")
        if stop is None:
            time.sleep(pause)
        else:
            stop.wait(pause)
        self._pause = min(2 * pause, _PAUSES[1])

    def repeat(self, work: Callable[[], T], stop: threading.Event | None = None) -> T:
        """Return the result of `work`, which is called again after each transient error.

        Raises:
            StoppedError: `stop` was set meanwhile.
            Exception: As `wait`.
        """
        while True:
            if stop is not None and stop.is_set():
                raise StoppedError
            try:
                return _call_abandonable(work, stop)
            except StoppedError:
                raise
            except Exception as error:
                self.wait(error, stop)


def _call_abandonable(work: Callable[[], T], stop: threading.Event | None) -> T:
    """Return the result of `work` in a thread of its own, which is abandoned when `stop` is set: it may hang."""
    asked = run_in_thread("hostdev-store", work)
    while not wait([asked], _POLL_SECONDS).done:
        if stop is not None and stop.is_set():
            raise StoppedError
    return asked.result()


def _get_limit() -> float:
    text = os.environ.get("HOSTDEV_STORE_PATIENCE", "")
    try:
        return float(text) if text else LONGEST_SECONDS
    except ValueError:
        raise StoreError(f"HOSTDEV_STORE_PATIENCE must be a number of seconds, not {text!r}") from None
