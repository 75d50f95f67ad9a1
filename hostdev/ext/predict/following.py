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

SECONDS = 0.5  # between two looks at a folder
_SETTLE_NS = 2_000_000_000  # a damaged file that has changed since this time is read again


class Replaceable(Protocol):
    """A predictor that one of a newer checkpoint can replace; `Predictor` is one, and its module imports this one."""

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

    A thread looks at the folder. A new checkpoint's files are compared with their checksums, and its model is built
    beside the current one, which predicts meanwhile; then it takes its place at once, so that each call uses one
    checkpoint. Files that both checkpoints have are in memory once. If the new checkpoint is damaged, or is of a model
    with other columns, a warning says so, and the current one goes on. Any number of threads may call it.

    Attributes:
        current: The predictor of the newest checkpoint. A program that makes several calls for one answer keeps it.
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
        self._seen: Any = None  # the folder's content when it was last opened
        self._damaged: Path | None = None  # the file for which the newest checkpoint was refused
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
        """Wait until the current checkpoint is of this training step or a later one; return whether it is."""
        return self._worker.wait_for(lambda: self.step >= step, timeout)

    def close(self, timeout: float | None = None) -> None:
        """Stop looking for checkpoints; predictions go on from the current one.

        Args:
            timeout: The largest number of seconds to wait for a look that has begun; None means without a limit.
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
        """Take the folder's newest checkpoint if it is another one than the current."""
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
                return  # it was removed meanwhile; the next look finds a newer one
            self._damaged = (error.file or self._damaged) if isinstance(error, BrokenCheckpointError) else None
            self._say(f"{error}; predictions are still those of {self.current.path.name}")
        damaged = None if self._damaged is None else _stat(self._damaged)
        is_old = damaged is None or damaged[-1] < begun - _SETTLE_NS  # not written to since it was read
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
    """Return a value that changes when a folder, here or in a store, has another checkpoint."""
    if (address := address_of(path)) is not None:
        return sorted(name for name in Store(address).list() if name.endswith(f"/{FILE_NAME}"))
    if is_checkpoint(path):
        raise UserError(f"{path} is a single checkpoint, which never changes; name its parent folder")
    found = []
    for folder in (path, path / FOLDER):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            found.append((folder.stat().st_mtime_ns, sorted(each.name for each in folder.iterdir())))
    return found
