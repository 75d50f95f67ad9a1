"""The folder of a table on disk: made for one run, locked while it lasts, and removed at its end."""

import os
import re
import shutil
from pathlib import Path
from typing import IO

from hostdev.core.errors import UserError, in_words
from hostdev.core.locks import try_lock

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
            for number in range(1 << 20):
                self.path = parent / f"{_PREFIX}{short}-{self._owner}-{number}"
                try:
                    self.path.mkdir()
                    break
                except FileExistsError:
                    continue
            self._lock: IO[bytes] = (self.path / _LOCK).open("wb")
        except OSError as error:
            raise UserError(
                f"table {name!r}: its folder in {parent} cannot be made ({in_words(error)}); give Disk another folder"
            ) from None
        try_lock(self._lock)

    def remove(self) -> None:
        """Remove the folder with its files, unless this process is a fork of the one that made it."""
        if os.getpid() == self._owner:
            shutil.rmtree(self.path, ignore_errors=True)
            self._lock.close()


def remove_abandoned(parent: Path) -> None:
    """Remove the folders of tables whose processes have ended without removing them."""
    for lock in parent.glob(f"{_PREFIX}*/{_LOCK}"):
        try:
            with lock.open("rb+") as file:
                if try_lock(file):
                    shutil.rmtree(lock.parent, ignore_errors=True)
        except OSError:
            continue  # it belongs to somebody else, or has just gone
