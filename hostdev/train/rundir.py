"""The run directory, with the logs, config.json, summary.json and curve.png, and what a run writes while it trains."""

import contextlib
import itertools
import json
import shutil
import threading
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

import torch

from hostdev.checkpoint.folder import FOLDER, names_in
from hostdev.core import locks, run_files
from hostdev.core.errors import UserError, naming
from hostdev.core.outputs import write_json
from hostdev.core.primitive import OpLog
from hostdev.core.progress import note
from hostdev.core.run_files import RotatedFile
from hostdev.core.timeline import Timeline
from hostdev.device.clock import make_clock
from hostdev.distributed.world import World
from hostdev.train.key_log import KeyLog, make_key_log
from hostdev.train.network import Losses
from hostdev.train.quality import Point
from hostdev.train.target_scores import Evaluation

_RUN = (run_files.LOSS_LOG, run_files.CONFIG, run_files.SUMMARY)  # a folder with any of these holds a run
_NAMES = (
    *_RUN,
    *(run_files.EVAL_LOG, run_files.SCORES_LOG, run_files.OPS_LOG, run_files.CURVE, run_files.REPORT),
    *(run_files.KEYS_LOG, run_files.KEYS_PICTURE),
    *(run_files.FILES_LOG, run_files.ASIDE_LOG, run_files.NEEDED, run_files.MLFLOW),
)


class RunDir:
    """The folder of one run, with its open logs.

    Args:
        path: The folder; None to create one in runs/, named after the current time.
        again: Whether the folder may hold a run, which is to be resumed; the run's logs are kept until `restart`.
        ops_log: Limit of ops.log in bytes, as in `RotatedFile`; 0 for no ops.log.

    Raises:
        UserError: The logs cannot be created, or the folder holds another run or is in use.
    """

    def __init__(self, path: Path | None, *, again: bool = False, ops_log: int = 1 << 30) -> None:
        self._lock: IO[str] | None = None
        try:
            if path is None:
                self.path, self._made = _new_folder(Path("runs"), time.strftime("%Y%m%d-%H%M%S")), True
            else:
                self.path, self._made = path, not path.exists()
            if not again:
                self._require_none(_RUN)
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = _locked(self.path)
            self._there = [name for name in (*_NAMES, run_files.TENSORBOARD) if self._is_there(name)]
            if not again:  # another process may have used the folder before it was locked
                self._require_none(name for name in _RUN if name in self._there)
            self.loss = (self.path / run_files.LOSS_LOG).open("a", buffering=1)
            self.eval = (self.path / run_files.EVAL_LOG).open("a", buffering=1)
            self.ops = RotatedFile(self.path / run_files.OPS_LOG, ops_log) if ops_log else None
            if self.ops is not None and not again:
                self.ops.fit()
        except OSError as error:
            if path is None:
                runs = Path("runs").absolute()
                raise UserError(f"cannot create a run in {runs}: {error.strerror}; give a writable --run-dir") from None
            raise UserError(f"--run-dir {path}: {error.strerror}; choose a writable folder") from None
        except UserError:
            self._release()
            raise
        self.curve = self.path / run_files.CURVE

    def _require_none(self, names: Iterable[str]) -> None:
        """Raise UserError if one of these files of a run exists."""
        for name in names:
            if (self.path / name).exists():
                more = ", or resume that run with --resume" if names_in(self.path / FOLDER) else ""
                raise UserError(f"{self.path} already holds a run ({name}); choose another --run-dir{more}")

    def _is_there(self, name: str) -> bool:
        """Return whether an earlier run wrote this file; an empty loss.log may have been created only for the lock."""
        path = self.path / name
        return path.exists() and (
            name != run_files.LOSS_LOG or path.stat().st_size > 0 or (self.path / run_files.CONFIG).exists()
        )

    def restart(self, losses: Iterable[tuple[int, int, float, float]], points: Sequence[Point]) -> None:
        """Restore loss.log, eval.log and scores.jsonl to their content at a checkpoint.

        Args:
            losses: The arguments of `write_losses` for each step.
            points: The evaluations.
        """
        with naming(self.path):
            for file in (self.loss, self.eval):
                file.truncate(0)
            if self.ops is not None:
                self.ops.fit()
            self.loss.write("".join(run_files.loss_line(*each) for each in losses))
        for point in points:
            self.write_evaluation(point)
        self._keep_scores({(point.epoch, point.step) for point in points})

    def write_scores(self, epoch: int, step: int, split: str, labels: Mapping[str, Any]) -> None:
        """Append a line to scores.jsonl.

        Args:
            labels: The result of `ScoreCounts.as_lists`.
        """
        line = {"epoch": epoch, "step": step, "split": split, "labels": labels}
        if not self.has_logs:  # the user has removed the folder; the run reports this at its end
            return
        with naming(self.path), (self.path / run_files.SCORES_LOG).open("a") as file:
            file.write(json.dumps(line) + "\n")

    def _keep_scores(self, kept: Collection[tuple[int, int]]) -> None:
        """Keep only the lines of scores.jsonl whose (epoch, step) is in `kept`."""
        path = self.path / run_files.SCORES_LOG
        with naming(self.path):
            if not path.exists():
                return
            lines = [line for line in run_files.read_json_lines(path) if (line.get("epoch"), line.get("step")) in kept]
            path.write_text("".join(json.dumps(line) + "\n" for line in lines))

    def write_config(self, content: dict[str, Any]) -> None:
        """Write config.json."""
        with naming(self.path):
            write_json(self.path / run_files.CONFIG, content)

    def write_losses(self, epoch: int, step: int, wide: float, deep: float) -> None:
        """Append a line to loss.log; `epoch`, and `step` within the epoch, count from 1."""
        self.loss.write(run_files.loss_line(epoch, step, wide, deep))

    def write_evaluation(self, point: Point) -> None:
        """Append a line to eval.log."""
        training = None if point.training is None else _figures(point.training)
        with naming(self.path):
            self.eval.write(run_files.eval_line(point.epoch, point.step, _figures(point.test), training))

    def discard(self) -> None:
        """Remove the files of a run that failed before its first step, so that the folder can be used again.

        Files that existed before stay, because they belong to an earlier run.
        """
        self._close_logs()
        for name in _NAMES:
            if name not in self._there:
                (self.path / name).unlink(missing_ok=True)
        if run_files.TENSORBOARD not in self._there:
            shutil.rmtree(self.path / run_files.TENSORBOARD, ignore_errors=True)
        if self._made:
            with contextlib.suppress(OSError):  # it may hold other ranks' folders
                self.path.rmdir()
        self._release()

    def close(self, summary: dict[str, Any] | None = None) -> None:
        """Close the logs, write summary.json if `summary` is given, and unlock the folder for other processes."""
        try:
            self._close_logs()
            if summary is not None:
                with naming(self.path):
                    self.path.mkdir(parents=True, exist_ok=True)  # the user may have removed it
                    write_json(self.path / run_files.SUMMARY, summary)
        finally:
            self._release()

    def _close_logs(self) -> None:
        with naming(self.path), ExitStack() as stack:
            for file in (self.loss, self.eval, self.ops):
                if file is not None:
                    stack.callback(file.close)  # closes all of them, even if one fails

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    @property
    def has_logs(self) -> bool:
        """Whether the logs still exist."""
        return (self.path / run_files.LOSS_LOG).exists()


def _figures(found: Evaluation) -> dict[str, float]:
    """Return an evaluation's metrics and number of rows, by their names in eval.log."""
    return {**{name.lower().replace(" ", ""): value for name, value in found.figures().items()}, "rows": found.rows}


def _locked(path: Path) -> IO[str]:
    """Open and lock a run directory's loss.log; raise UserError if another process has locked it."""
    while True:
        file = (path / run_files.LOSS_LOG).open("a")
        state = locks.lock_state(file.fileno())
        if state == "none" or (state == "locked" and locks.is_same_file(path / run_files.LOSS_LOG, file)):
            return file
        file.close()
        if state == "held":
            raise UserError(
                f"--run-dir {path} is in use: another process trains there; wait for that process, or end it"
            )


def _new_folder(parent: Path, name: str) -> Path:
    """Make a folder of this name, with a number appended if the name is taken."""
    parent.mkdir(parents=True, exist_ok=True)
    for number in itertools.count(1):
        folder = parent / (name if number == 1 else f"{name}-{number}")
        try:
            folder.mkdir()
        except FileExistsError:
            continue
        return folder
    raise AssertionError


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
            self.trace = None  # the file may be another program's, and must stay
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
        """Print once that the oldest lines of ops.log are removed, because the log has reached its limit."""
        if self.files.ops is not None and self.files.ops.dropped_bytes and not self._has_noted_ops:
            note(f"the oldest lines of ops.log are removed from now on (--ops-log {limit})")
            self._has_noted_ops = True

    def close(self) -> None:
        """Complete ops.log, the trace and keys.log; the run directory closes its other logs."""
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
