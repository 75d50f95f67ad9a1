"""The progress of a run without an end: the losses of its last steps, the quality on its last files, and its waits.

Both are held in arrays: a small object for each step that lives as long would keep parts of the heap from reuse.
"""

import shutil
import sys
import time
from array import array
from collections.abc import Mapping, MutableSequence
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from hostdev.core.printable import printable
from hostdev.core.progress import interval, note, overwrite
from hostdev.train.checkpointing import Progress

MOST_STEPS = 1 << 14  # whose losses are kept
MOST_FILES = 1 << 12  # whose quality is kept for the picture
_QUIET_SECONDS = 2.0  # a shorter wait is not mentioned


class RecentProgress(Progress):
    """The number of steps and samples in all, and the losses of at least the last 16,384 steps."""

    def __init__(self) -> None:
        super().__init__()
        self._samples = 0

    def add(self, wide: float, deep: float, rows: int) -> None:
        """Record a step."""
        super().add(wide, deep, rows)
        for values in (self.wide, self.deep, self.rows):
            _shorten(values, MOST_STEPS)
        self._samples += rows

    @property
    def samples(self) -> int:
        """The number of samples in all steps."""
        return self._samples

    def as_values(self) -> dict[str, Any]:
        """Return the progress as values for a checkpoint, with the losses of the last 16,384 steps."""
        values = super().as_values()
        last = {name: values[name][-MOST_STEPS:] for name in ("wide", "deep", "rows")}
        return {**values, **last, "samples": self._samples}

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        """Return the progress that `as_values` converted to these values."""
        made = super().of(values)
        made._samples = values["samples"]
        return made


class RecentQuality:
    """The quality before a file was trained on, on its rows and on those of a window, for the last 4,096 files."""

    def __init__(self) -> None:
        self.metric = "AUC"
        self._last = 0
        self._values = array("d")  # two for each file

    def add(self, number: int, metric: str, file: float, window: float) -> None:
        """Record the next file: its number among all, and the metric's value on its rows and on the window's."""
        self._last, self.metric = number, metric
        self._values.extend((file, window))
        _shorten(self._values, 2 * MOST_FILES)

    def points(self) -> npt.NDArray[np.float64]:
        """Return [files, 3]: each file's number, the value on its rows, and that on the window's."""
        values = np.array(self._values).reshape(-1, 2)[-MOST_FILES:]
        return np.column_stack([np.arange(self._last - len(values), self._last) + 1, values])


def _shorten(values: MutableSequence[Any], most: int) -> None:
    """Remove the first values if there are twice as many as are kept."""
    if len(values) >= 2 * most:
        del values[:most]


class WaitingLine:
    """Shows why a run waits: a line that is overwritten on a terminal, else one line for each reason to wait."""

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
            overwrite(text)
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
            overwrite()
            self._shown = ""
