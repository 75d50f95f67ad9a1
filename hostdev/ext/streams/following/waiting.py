"""The line that a waiting run prints: overwritten on a terminal, else one for each reason to wait."""

import shutil
import sys
import time

from hostdev.core.printable import printable
from hostdev.core.progress import interval, note

_QUIET_SECONDS = 2.0  # a shorter wait is not mentioned


class Waiting:
    """Shows why a run waits."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._shown = ""
        self._is_live = sys.stderr.isatty()

    def show(self, text: str) -> None:
        """Show the reason for which the run waits, if it has waited for a while."""
        now = time.monotonic()
        if self._since is None:
            self._since = now
        if now - self._since < _QUIET_SECONDS:
            return
        if self._is_live:
            text = f"({interval(now - self._since)}) {printable(text)}"[: shutil.get_terminal_size().columns - 1]
        if text == self._shown:
            return
        self._shown = text
        if self._is_live:
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
        else:
            print(printable(text), flush=True)

    def note(self, text: str) -> None:
        """Write lines that stay, in place of the line that does not."""
        self._clear()
        note(text)

    def end(self) -> None:
        """Remove the line, as the run goes on."""
        self._clear()
        self._since = None

    def _clear(self) -> None:
        if self._is_live and self._shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
            self._shown = ""
