"""The files that a run writes while it trains; of its tables by key, keys.log and keys.png."""

import contextlib
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt
import torch

from hostdev.core import pictures
from hostdev.core.errors import UserError, naming
from hostdev.core.primitive import OpLog
from hostdev.core.progress import note
from hostdev.core.run_files import KEYS_LOG, KEYS_PICTURE
from hostdev.core.timeline import Timeline
from hostdev.device.clock import make_clock
from hostdev.distributed.world import World
from hostdev.host.key_table import KeyTable
from hostdev.train.network import Losses
from hostdev.train.rundir import RunDir

_COLUMNS = ("step", "live", "waiting", "admitted", "evicted")
_MOST_POINTS = 4000


class KeyLog:
    """Writes a line to keys.log for each step of a table by key: its keys, those that wait, and the changes in all.

    Args:
        folder: The run directory.
        table: The table; its steps are noted from now on.
    """

    def __init__(self, folder: Path, table: KeyTable) -> None:
        self.folder, self._table = folder, table
        self.by_step = True  # whether each step has a line; else `write(end=True)` writes the last step's
        table.key_rows.counts = []
        self._admitted = self._evicted = self._written = 0
        self.last: dict[str, int] = {}  # the last line
        with naming(folder):
            earlier = self._read()
            earlier = earlier[earlier[:, 0] <= table.key_rows.index.step]  # of the run that is resumed
            self._file: IO[str] = (folder / KEYS_LOG).open("w", buffering=1)
            self._file.write(",".join(_COLUMNS) + "\n")
        self._write(earlier.tolist())
        if self.last:
            self._admitted, self._evicted = self.last["admitted"], self.last["evicted"]

    def state(self) -> dict[str, Any]:
        """Return what `restore` needs, for a checkpoint."""
        self.write()
        return {"last": self.last, "written": self._written}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on as the log was at a checkpoint, without the lines that were written later."""
        lines = self._read()
        self._file.seek(0)
        self._file.truncate()
        self._file.write(",".join(_COLUMNS) + "\n")
        self._written = 0
        self._write(lines[lines[:, 0] <= state["written"]].tolist())
        self.last = state["last"]
        self._admitted, self._evicted = self.last.get("admitted", 0), self.last.get("evicted", 0)

    def write(self, *, end: bool = False) -> None:
        """Write the steps that have finished since the last call."""
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
    """Return the log of a run's tables by key, or None if it has none."""
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


class RunLogs:
    """The run directory, the log of ops, the timeline, and the log of tables by key.

    Args:
        files: The run directory.
        device: The device whose clock times the ops on it.
        trace: The new file for the timeline, or None.
        rank: This process's rank; None for a single process.

    Attributes:
        lock: Guards the logs, which another thread may complete after a signal.
        keys: The log of tables by key, once `begin` was called; None without such tables.

    Raises:
        UserError: The file of the timeline cannot be created; the files are removed.
    """

    keys: KeyLog | None = None

    def __init__(self, files: RunDir, device: torch.device, trace: Path | None, rank: int | None) -> None:
        self.files, self.timeline, self.trace = files, Timeline(), trace
        self.clock = make_clock(device)
        self.ops = OpLog(clocks={"DEVICE": self.clock})
        self.lock = threading.Lock()
        self._has_noted_ops = False
        if trace is None:
            return
        try:
            self.timeline.write_to(_open_trace(trace), rank=rank)
        except BaseException:
            self.trace = None  # another program's file
            self.discard()
            raise

    def begin(self, tables: Iterable[Any]) -> None:
        """Begin the log of ops and, if there are tables by key, their log."""
        self.keys = make_key_log(self.files.path, tables)
        if self.files.ops is not None:
            self.ops.write_to(self.files.ops)

    def write_step(self, epoch: int, step: int, losses: Losses) -> None:
        """Write a step's losses. The caller holds the lock."""
        self.files.write_losses(epoch, step, losses.wide, losses.deep)
        if self.keys is not None:
            self.keys.write()
        self.ops.check()

    def note_dropped(self, limit: str) -> None:
        """Say once that the oldest lines of ops.log are removed, as it has reached its limit."""
        if self.files.ops is not None and self.files.ops.dropped_bytes and not self._has_noted_ops:
            note(f"the oldest lines of ops.log are removed from now on (--ops-log {limit})")
            self._has_noted_ops = True

    def close(self) -> None:
        """Complete all logs but those of the run directory."""
        try:
            with naming(self.files.path):
                self.ops.close()
        except OSError:
            self.files.close()
            raise
        self.timeline.close()
        if self.keys is not None:
            self.keys.close()

    def discard(self) -> None:
        """Remove the run's files after a failure before the first step, so that their names can be used again."""
        with contextlib.suppress(OSError):
            self.ops.close()
        self.files.discard()
        self.timeline.close()
        if self.trace is not None:
            self.trace.unlink(missing_ok=True)


def get_trace_path(path: Path | None, world: World) -> Path | None:
    """Return the file of a rank's trace: `path` for rank 0, and NAME.rank<k>.SUFFIX in the same folder for rank k.

    Raises:
        UserError: The file exists.
    """
    if path is not None and world.rank:
        path = path.with_name(f"{path.stem}.rank{world.rank}{path.suffix}")
    if path is not None and path.exists():
        raise UserError(f"--trace {path} exists; choose another file")
    return path


def _open_trace(path: Path) -> IO[str]:
    """Open the file of --trace; raise UserError if it cannot be created."""
    try:
        return path.open("x")
    except OSError as error:
        raise UserError(f"--trace {path}: {error.strerror}; choose another file") from None
