"""The files that a run writes while it trains."""

import contextlib
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any

import torch

from hostdev.core.errors import UserError, naming
from hostdev.core.primitive import OpLog
from hostdev.core.progress import note
from hostdev.core.timeline import Timeline
from hostdev.device.clock import make_clock
from hostdev.distributed.world import World
from hostdev.train.key_log import KeyLog, make_key_log
from hostdev.train.losses import Losses
from hostdev.train.rundir import RunDir


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
