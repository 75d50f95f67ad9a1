"""Where a data set is made: a folder beside the one to be, and a journal of what is finished there.

A process that ends at any moment leaves whole pieces, and the same command goes on from them. Files appear under their
names when they are whole; the journal has their checksums, which tell what a loss of power has damaged. Each line of
the journal has a checksum, too: the work begins anew from the first line that is damaged.
"""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import IO, Any

from hostdev.core import locks
from hostdev.core.disk import sync_folder, sync_tree
from hostdev.core.errors import TransientError, UserError, naming
from hostdev.core.memory import format_bytes
from hostdev.core.progress import note

_VERSION = 3  # of what is in the folder
_LOCK, _RECIPE, _JOURNAL, _PIECES, _RESULT = "lock", "recipe.json", "journal.jsonl", "pieces", "result"

_LEFT_OVER = "{out} is whole; what is left in {folder} can be removed"


class Work:
    """The folder of work for a data set; a context of `claim`."""

    def __init__(self, folder: Path, out: Path) -> None:
        self.folder, self._out = folder, out
        self.pieces, self.result = folder / _PIECES, folder / _RESULT
        self.goes_on = True  # what is left, with the same command
        self._journal: Any = None
        self._last = ""  # the mark of the journal's last line

    def begin(self, recipe: Any) -> list[dict[str, Any]]:
        """Return the journal of the same work's earlier part; of other work, or with no recipe, nothing is left.

        recipe  all that the result depends on; None: it cannot be told whether that is the same
        """
        content = json.dumps([_VERSION, recipe], sort_keys=True)
        entries: list[dict[str, Any]] = []
        path = self.folder / _RECIPE
        if recipe is not None and path.is_file() and path.read_bytes() == content.encode():
            entries = _read_journal(self.folder / _JOURNAL)
        if not entries:
            if size := self.left():
                note(
                    f"unfinished work of another command, or on files that have changed, in {self.folder} "
                    f"({format_bytes(size)}) is removed"
                )
            self.clear()
            path.write_text(content)
        self.goes_on = recipe is not None
        for folder in (self.pieces, self.result):
            folder.mkdir(exist_ok=True)
        self.rewrite(entries)
        return entries

    def rewrite(self, entries: list[dict[str, Any]]) -> None:
        """Let the journal have these entries."""
        self._close()
        path = self.folder / _JOURNAL
        partial = path.with_suffix(".partial")
        self._last = ""
        partial.write_text("".join(map(self._line, entries)))
        partial.replace(path)
        self._journal = path.open("a")

    def note(self, **entry: Any) -> None:
        """Add an entry to the journal: what it names is finished."""
        with naming(self.folder / _JOURNAL):
            self._journal.write(self._line(entry))
            self._journal.flush()

    def _line(self, entry: dict[str, Any]) -> str:
        """Return the journal's next line."""
        text = json.dumps(entry)
        self._last = _mark(self._last, text)
        return f"{self._last} {text}\n"

    def finish(self) -> None:
        """Give the result its name, once it is on the disk: the pieces go only when it can no longer be lost."""
        sync_tree(self.result)
        self.result.rename(self._out)
        sync_folder(self._out.parent)

    def is_finished(self) -> bool:
        """Tell whether the result has its name."""
        return not self.result.exists() and os.path.lexists(self._out)

    def clear(self) -> None:
        """Remove all but the lock."""
        self._close()
        for path in self.folder.iterdir():
            if path.name == _LOCK:
                continue
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()

    def _remove(self) -> None:
        self.clear()  # the lock last, which tells whose folder it is
        shutil.rmtree(self.folder, ignore_errors=True)

    def _close(self) -> None:
        if self._journal is not None:
            self._journal.close()
            self._journal = None

    def left(self) -> int:
        """Return the bytes of what is finished, 0 if that is not worth to be kept."""
        self._close()
        if not _read_journal(self.folder / _JOURNAL):
            return 0
        return sum(file.stat().st_size for file in self.folder.rglob("*") if file.is_file())


@contextmanager
def claim(out: Path) -> Iterator[Work]:
    """Give the folder of work for a data set to this process; another one that is at it is waited for.

    After a UserError nothing is left. After another error, a TransientError too, or an interruption what is finished is
    left, and a line says so, but for input that can be read once only. At the end the work is removed.

    Raises UserError where `out` exists.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    folder = out.parent / f".{out.name}.partial"
    unfinished_end = os.path.lexists(out) and folder.is_dir() and not (folder / _RESULT).exists()
    if unfinished_end and _is_work(folder):
        shutil.rmtree(folder, ignore_errors=True)
    _refuse_existing(out)
    with _locked(folder):
        work = Work(folder, out)
        try:
            _refuse_existing(out)  # another process may have made it meanwhile
            yield work
        except BaseException as error:
            wrong = isinstance(error, UserError) and not isinstance(error, TransientError)
            if not wrong and work.is_finished():
                note(_LEFT_OVER.format(out=out, folder=folder))
                raise
            size = 0 if wrong else work.left()
            if size and work.goes_on:
                note(f"{format_bytes(size)} of finished work is kept in {folder}; the same command goes on from there")
                raise
            work._remove()
            if size:
                note(
                    f"the finished work ({format_bytes(size)}) is not kept: standard input and pipes "
                    f"are read once only, and "
                    "the same command begins anew; with a file it would go on"
                )
            raise
        try:
            work._remove()
        except OSError:  # the data set is whole; a process that was started meanwhile may be removing this, too
            if folder.exists():
                note(_LEFT_OVER.format(out=out, folder=folder))
        except BaseException:
            note(_LEFT_OVER.format(out=out, folder=folder))
            raise


def _is_work(folder: Path) -> bool:
    """Tell whether a folder is one of work, or empty or gone: somebody's own has neither of these files."""
    try:
        names = {path.name for path in folder.iterdir()}  # once: another process may be removing it
    except FileNotFoundError:
        return True
    return not names or _LOCK in names or _RECIPE in names


def _refuse_existing(out: Path) -> None:
    if os.path.lexists(out):  # an empty folder too: it may be a mount point, which nothing can be renamed onto
        raise UserError(f"{out} exists already; remove it or choose another --out")


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    lock = None
    while lock is None:  # or the folder was removed when the work of who had it was done
        folder.mkdir(exist_ok=True)
        if not _is_work(folder):
            raise UserError(
                f"{folder} is where the work would be, but has other files; move them, or choose another --out"
            )
        lock = _lock(folder)
    with lock:
        yield


def _lock(folder: Path) -> IO[str] | None:
    """Return the folder's lock, once it is this process's; None where the folder has gone meanwhile."""
    try:
        lock = (folder / _LOCK).open("w")
    except FileNotFoundError:
        return None
    if not locks.try_lock(lock):
        note(f"another process is at work in {folder}; waiting for it")
        locks.await_lock(lock)
    if locks.is_same_file(folder / _LOCK, lock):
        return lock
    lock.close()
    return None


def _mark(last: str, text: str) -> str:
    """Return what a line of the journal begins with: a checksum of it and of the lines before, `last` being theirs."""
    return sha256(f"{last} {text}".encode()).hexdigest()[:16]


def _read_journal(path: Path) -> list[dict[str, Any]]:
    """Return the entries up to the first that is not whole, or was changed since it was written."""
    entries = []
    try:
        lines = path.read_text().splitlines(keepends=True)
    except (FileNotFoundError, UnicodeDecodeError):
        return []
    last = ""
    for line in lines:
        mark, _, text = line.removesuffix("\n").partition(" ")
        last = _mark(last, text)
        if mark != last or not line.endswith("\n"):
            break
        try:
            entry = json.loads(text)
        except (ValueError, RecursionError):
            break
        if not isinstance(entry, dict):
            break
        entries.append(entry)
    return entries
