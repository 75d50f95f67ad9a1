"""The log of a run's tables by key: keys.log and keys.png."""

from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from hostdev.core import pictures
from hostdev.core.errors import naming
from hostdev.core.run_files import KEYS_LOG, KEYS_PICTURE
from hostdev.host.key_table import KeyTable

_COLUMNS = ("step", "live", "waiting", "admitted", "evicted")
_MOST_POINTS = 4000


class KeyLog:
    """Writes a line to keys.log for each step of a table by key.

    A line has the numbers of keys with a row, of waiting keys, and of keys admitted and evicted so far.

    Args:
        folder: The run directory.
        table: The table; its steps are recorded from now on.
    """

    def __init__(self, folder: Path, table: KeyTable) -> None:
        self.folder, self._table = folder, table
        self.by_step = True  # whether each step has a line; else `write(end=True)` writes the last step's
        table.key_rows.counts = []
        self._admitted = self._evicted = self._written = 0
        self.last: dict[str, int] = {}  # the last line, by column
        with naming(folder):
            earlier = self._read()
            earlier = earlier[earlier[:, 0] <= table.key_rows.index.step]  # if a run is resumed, its earlier lines
            self._file: IO[str] = (folder / KEYS_LOG).open("w", buffering=1)
            self._file.write(",".join(_COLUMNS) + "\n")
        self._write(earlier.tolist())
        if self.last:
            self._admitted, self._evicted = self.last["admitted"], self.last["evicted"]

    def state(self) -> dict[str, Any]:
        """Write the finished steps; return the state for `restore`, which a checkpoint contains."""
        self.write()
        return {"last": self.last, "written": self._written}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore the log to its state at a checkpoint; remove the lines that were written later."""
        lines = self._read()
        self._file.seek(0)
        self._file.truncate()
        self._file.write(",".join(_COLUMNS) + "\n")
        self._written = 0
        self._write(lines[lines[:, 0] <= state["written"]].tolist())
        self.last = state["last"]
        self._admitted, self._evicted = self.last.get("admitted", 0), self.last.get("evicted", 0)

    def write(self, *, end: bool = False) -> None:
        """Write the steps that have finished since the last call.

        If `by_step` is false, write only the last step, and only at the `end`.
        """
        noted, self._table.key_rows.counts = self._table.key_rows.counts or [], []
        lines = []
        for step, live, waiting, admitted, evicted in noted:
            self._admitted, self._evicted = self._admitted + admitted, self._evicted + evicted
            lines.append((step, live, waiting, self._admitted, self._evicted))
        if self.by_step:
            self._write(lines)
            return
        if lines:
            self.last = dict(zip(_COLUMNS, lines[-1], strict=True))
        if end and self.last.get("step", 0) > self._written:
            self._write([self.last.values()])

    def _write(self, lines: Iterable[Iterable[int]]) -> None:
        for line in lines:
            self.last = dict(zip(_COLUMNS, line, strict=True))
            self._written = self.last["step"]
            self._file.write(",".join(map(str, self.last.values())) + "\n")

    def close(self) -> None:
        """Write the last steps, and close the log."""
        if not self._file.closed:
            with naming(self.folder):
                self.write(end=True)
                self._file.close()

    def draw(self) -> None:
        """Write keys.png."""
        lines = self._read()
        if not len(lines):
            return
        lines = lines[:: -(-len(lines) // _MOST_POINTS)]
        figure = pictures.figure(12, 4.6)
        left, right = figure.subplots(1, 2)
        _plot(left, lines, "Keys", {"live": "with a row", "waiting": "waiting for a row"})
        _plot(right, lines, "Changes since the beginning", {"admitted": "got a row", "evicted": "lost their row"})
        figure.savefig(self.folder / KEYS_PICTURE, dpi=100)

    def _read(self) -> npt.NDArray[np.int64]:
        """Return the lines of keys.log, int64 [n, 5]; empty if there is none, or it is not readable."""
        path = self.folder / KEYS_LOG
        try:
            found = np.loadtxt(path, np.int64, delimiter=",", skiprows=1, ndmin=2)
        except (OSError, ValueError):
            found = np.empty((0, len(_COLUMNS)), np.int64)
        return found if found.shape[1] == len(_COLUMNS) else np.empty((0, len(_COLUMNS)), np.int64)


def make_key_log(folder: Path, tables: Iterable[Any]) -> KeyLog | None:
    """Return a log of the run's table by key, the first by name; None if the run has no table by key."""
    found = [table for table in tables if table.capabilities.by_key]
    return KeyLog(folder, min(found, key=lambda table: table.name)) if found else None


def describe(counts: dict[str, int]) -> str:
    """Return the last line of keys.log as text."""
    return (
        f"{counts['live']:,} have a row, {counts['waiting']:,} wait for one; {counts['admitted']:,} got a row, and "
        f"{counts['evicted']:,} lost it"
    )


def _plot(axes: Any, lines: npt.NDArray[np.int64], title: str, series: dict[str, str]) -> None:
    from matplotlib.ticker import StrMethodFormatter

    for name, label in series.items():
        values = lines[:, _COLUMNS.index(name)]
        axes.plot(lines[:, 0], values, label=f"{label}: {values[-1]:,} at the end")
    axes.set(xlabel="step", ylabel="keys", title=title)
    axes.set_ylim(bottom=0)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.grid(alpha=0.3)
    axes.legend(fontsize=9)
