"""A predictor that takes newer checkpoints of a folder while it predicts."""

import contextlib
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, Protocol, Self, TypeVar

from hostdev.checkpoint.folder import FOLDER, is_checkpoint
from hostdev.checkpoint.loading import verify
from hostdev.checkpoint.manifest import FILE_NAME, BrokenCheckpointError
from hostdev.core.addresses import address_of, shown_place
from hostdev.core.errors import UserError, in_words
from hostdev.core.stores import Store
from hostdev.core.workers import Worker
from hostdev.ext.predict.opening import Opened, open_checkpoint

SECONDS = 0.5  # between two checks of a folder for newer checkpoints
_SETTLE_NS = 2_000_000_000  # a damaged file that changed less than this time before a look is read again at the next


class Replaceable(Protocol):
    """A predictor that one of a newer checkpoint can replace, such as `Predictor`, whose module imports this module."""

    path: Path
    step: int
    checksums: list[str]

    def __call__(self, rows: Any) -> Any:
        """Return predictions."""

    def successor(self, opened: Opened) -> Self:
        """Return the predictor of a newer checkpoint."""


P = TypeVar("P", bound=Replaceable)


class FollowingPredictor(Generic[P]):
    """A `Predictor` that is replaced when its folder has a newer checkpoint; returned by `Predictor.follow`.

    A thread watches the folder. It compares a new checkpoint's files with their checksums, and builds the new model
    while the current one predicts. Then it replaces the current predictor in one step, so that each call uses one
    checkpoint. Files that both checkpoints have are in memory once. If the new checkpoint is damaged, or is of another
    model or data set, `on_problem` is called, and the current predictor stays. Any number of threads may call this
    object.

    Attributes:
        current: The predictor of the newest checkpoint. To make several calls on one checkpoint, keep this predictor.
    """

    def __init__(
        self,
        first: P,
        path: Path,
        which: str | None,
        seconds: float,
        on_change: Callable[[P], object],
        on_problem: Callable[[str], object],
    ) -> None:
        self.current = first
        self._path, self._which = path, which
        self._on_change, self._on_problem = on_change, on_problem
        self._seen: Any = None  # the folder's content and the damaged file's state at the last look
        self._damaged: Path | None = None  # the damaged file because of which the newest checkpoint was refused
        self._said = ""
        self._worker = Worker("hostdev-follow", self._try_look, seconds=seconds)
        self._worker.start()

    @property
    def step(self) -> int:
        """The training step of the current checkpoint."""
        return self.current.step

    def __call__(self, rows: Any) -> Any:
        """Return the same as `Predictor.__call__`, from the current checkpoint."""
        return self.current(rows)

    def wait(self, step: int, timeout: float | None = None) -> bool:
        """Wait until the current checkpoint is of this training step or a later one; return whether it is.

        `timeout` is in seconds; None means without a limit.
        """
        return self._worker.wait_for(lambda: self.step >= step, timeout)

    def close(self, timeout: float | None = None) -> None:
        """Stop looking for checkpoints; later calls use the current one.

        Args:
            timeout: Seconds to wait at most until a look that has begun ends; None for no limit.
        """
        self._worker.close(timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _try_look(self) -> None:
        try:
            self._look()
        except Exception as error:  # a folder that cannot be read now may be readable later
            self._say(f"{shown_place(self._path)} cannot be read ({in_words(error)}); trying again")

    def _look(self) -> None:
        """Switch to the folder's newest or best checkpoint, as chosen, if it is not the current one."""
        begun = time.time_ns()
        there = list_checkpoints(self._path), None if self._damaged is None else _stat(self._damaged)
        if there == self._seen:
            return
        try:
            opened = open_checkpoint(self._path, self._which)
            for line in opened.found.broken:
                self._say(f"{line}; predictions are still those of {self.current.path.name}")
            if opened.chain[-1].manifest.checksum != self.current.checksums[-1]:
                known = self.current.checksums
                verify([each for each in opened.chain if each.manifest.checksum not in known], segments=True)
                self._take(self.current.successor(opened))
            self._damaged = None
        except UserError as error:
            if list_checkpoints(self._path) != there[0]:
                return  # the checkpoint was removed; the next look finds a newer one
            self._damaged = (error.file or self._damaged) if isinstance(error, BrokenCheckpointError) else None
            self._say(f"{error}; predictions are still those of {self.current.path.name}")
        damaged = None if self._damaged is None else _stat(self._damaged)
        is_old = damaged is None or damaged[-1] < begun - _SETTLE_NS  # the file has not changed recently
        self._seen = (there[0], damaged) if is_old else None

    def _take(self, made: P) -> None:
        with self._worker.changed:
            self.current = made
            self._worker.changed.notify_all()
        self._said = ""
        self._on_change(made)

    def _say(self, text: str) -> None:
        """Report a problem, but not twice in a row with the same words."""
        if text != self._said:
            self._said = text
            self._on_problem(text)


def warn(text: str) -> None:
    """Report a problem as a warning."""
    warnings.warn(text, stacklevel=2)


def _stat(path: Path) -> Any:
    """Return a value that changes when a file is written to or replaced."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def list_checkpoints(path: Path) -> Any:
    """Return a value that changes with the checkpoints in a folder, here or in a store.

    Raises UserError if the path is a single checkpoint.
    """
    if (address := address_of(path)) is not None:
        return sorted(name for name in Store(address).list() if name.endswith(f"/{FILE_NAME}"))
    if is_checkpoint(path):
        raise UserError(f"{path} is a single checkpoint, which never changes; name its parent folder")
    found = []
    for folder in (path, path / FOLDER):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            found.append((folder.stat().st_mtime_ns, sorted(each.name for each in folder.iterdir())))
    return found
