"""The folder of a table on disk: made for one run, locked while it lasts, and removed at its end."""

import itertools
import os
import re
import shutil
from pathlib import Path
from typing import IO

from hostdev.core.errors import UserError, in_words
from hostdev.core.locks import is_same_file, lock_state

_LOCK = "in-use.lock"
_PREFIX = "hostdev-table-"


class TableFolder:
    """A new folder in `parent` for a table's segments.

    Folders that runs have left behind, which were killed, are removed; those of runs that are alive are not.

    Raises:
        UserError: The folder cannot be made or written.
    """

    def __init__(self, parent: Path, name: str) -> None:
        self._owner = os.getpid()
        short = re.sub(r"[^A-Za-z0-9._-]+", "-", name)[:40]
        try:
            parent.mkdir(parents=True, exist_ok=True)
            remove_abandoned(parent)
            self.path, self._lock = self._make(parent, f"{_PREFIX}{short}-{self._owner}")
        except OSError as error:
            raise UserError(
                f"table {name!r}: its folder in {parent} cannot be made ({in_words(error)}); give Disk another folder"
            ) from None

    @staticmethod
    def _make(parent: Path, name: str) -> tuple[Path, IO[bytes]]:
        for number in itertools.count():
            path = parent / f"{name}-{number}"
            try:
                path.mkdir()
                lock = (path / _LOCK).open("wb")
            except (FileExistsError, FileNotFoundError):
                continue
            if lock_state(lock.fileno()) != "held" and is_same_file(path / _LOCK, lock):
                return path, lock
            lock.close()  # another process has taken the folder for abandoned before it was locked
        raise AssertionError

    @property
    def is_own(self) -> bool:
        """Whether this process has made the folder; a fork of it has not."""
        return os.getpid() == self._owner

    def remove(self) -> None:
        """Remove the folder with its files."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()
        shutil.rmtree(self.path, ignore_errors=True)  # network file systems keep files that are open, under other names


def remove_abandoned(parent: Path) -> None:
    """Remove the folders of tables whose processes have ended without removing them, if the file system has locks."""
    for lock in parent.glob(f"{_PREFIX}*/{_LOCK}"):
        try:
            with lock.open("rb+") as file:
                if lock_state(file.fileno()) == "locked":
                    shutil.rmtree(lock.parent, ignore_errors=True)
        except OSError:
            continue  # it belongs to somebody else, or has just gone
