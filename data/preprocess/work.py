"""The work folder of a data set under construction, next to its final folder, with a journal of finished work.

If a process is killed, at any moment, its complete pieces remain, and the same command resumes from them. Files are
written atomically. The journal has the files' checksums, which reveal damage by a power loss. Each line of the journal
has a checksum, too; work restarts from the first damaged line.
"""

import errno
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import IO, Any
from uuid import uuid4

from hostdev.core import locks
from hostdev.core.addresses import address_of, shown_place
from hostdev.core.errors import StoreError, TransientError, UserError, in_words, naming
from hostdev.core.memory import format_bytes
from hostdev.core.outputs import remove_partials, replacing, sync_folder, sync_tree
from hostdev.core.progress import note
from hostdev.core.stores import Store
from hostdev.core.sync import list_files, require_new, sync
from hostdev.data.folder import FILE_NAME as _MANIFEST

_VERSION = 6  # version of the folder's format
_LOCK, _RECIPE, _JOURNAL, _PIECES, _RESULT = "lock", "recipe.json", "journal.jsonl", "pieces", "result"
_SENT = "sent"  # lists the files that a store has already

_LEFT_OVER = "{out} is complete; the leftovers in {folder} can be removed"


class WorkFolder:
    """The work folder of a data set; created by `claim`."""

    def __init__(self, folder: Path, out: Path) -> None:
        self.folder, self._out = folder, out
        self.pieces, self.result = folder / _PIECES, folder / _RESULT
        self.resumable = True  # whether the same command can resume
        self._is_sent = False
        self._journal: Any = None
        self._last = ""  # checksum of the journal's last line

    def begin(self, recipe: Any) -> list[dict[str, Any]]:
        """Return the journal entries of earlier work with the same recipe; remove any other work.

        `recipe` has everything that the result depends on; None if that is unknown.
        """
        content = json.dumps([_VERSION, recipe], sort_keys=True)
        entries: list[dict[str, Any]] = []
        path = self.folder / _RECIPE
        if recipe is not None and path.is_file() and path.read_bytes() == content.encode():
            entries = _read_journal(self.folder / _JOURNAL)
        if not entries:
            if size := self.left():
                note(
                    f"unfinished work of another command, or on input files that have since changed, is removed from "
                    f"{self.folder} ({format_bytes(size)})"
                )
            self.clear()
            path.write_text(content)
        self.resumable = recipe is not None
        for folder in (self.pieces, self.result):
            folder.mkdir(exist_ok=True)
            remove_partials(folder)
        self.rewrite(entries)
        return entries

    def rewrite(self, entries: list[dict[str, Any]]) -> None:
        """Replace all entries of the journal."""
        self._close()
        path = self.folder / _JOURNAL
        self._last = ""
        with replacing(path) as partial:
            partial.write_text("".join(map(self._line, entries)))
        self._journal = path.open("a")

    def note(self, **entry: Any) -> None:
        """Append an entry for finished work to the journal."""
        with naming(self.folder / _JOURNAL):
            self._journal.write(self._line(entry))
            self._journal.flush()

    def _line(self, entry: dict[str, Any]) -> str:
        """Format the journal's next line."""
        text = json.dumps(entry)
        self._last = _mark(self._last, text)
        return f"{self._last} {text}\n"

    def finish(self) -> None:
        """Sync the result to disk and rename it to the data set's folder, or copy it to the data set's address."""
        if (address := address_of(self._out)) is not None:
            self._send(Store(address))
            return
        sync_tree(self.result)
        self.result.rename(self._out)
        sync_folder(self._out.parent)

    def _send(self, store: Store) -> None:
        """Copy the files of the result that a store lacks, the manifest last; then remove the result."""
        path = self.folder / _SENT
        lines = path.read_text().splitlines() if path.is_file() else []
        with path.open("a") as sent:

            def line_of(name: str) -> str:
                found = (self.result / name).stat()
                return json.dumps([name, found.st_size, found.st_mtime_ns])

            def note_sent(name: str) -> None:
                sent.write(f"{line_of(name)}\n")
                sent.flush()

            def is_there(name: str) -> bool:
                return line_of(name) in lines and store.compare(name, self.result / name) is not None

            new = [name for name in list_files(self.result) if name == _MANIFEST or not is_there(name)]
            sync(self.result, store, new, _MANIFEST, note_sent)
        shutil.rmtree(self.result)
        self._is_sent = True

    def is_finished(self) -> bool:
        """Return whether the result has been renamed to the data set's folder, or copied to its address."""
        return self._is_sent or (not self.result.exists() and os.path.lexists(self._out))

    def clear(self) -> None:
        """Remove everything except the lock."""
        self._close()
        for path in self.folder.iterdir():
            if path.name == _LOCK:
                continue
            if path.is_dir():  # renamed first: tasks on other machines may still write to it, which now fails
                moved = path.rename(path.with_name(f"{path.name}-{uuid4().hex}"))
                try:
                    shutil.rmtree(moved)
                except OSError as error:
                    if error.errno != errno.ENOTEMPTY:
                        raise
                    shutil.rmtree(moved)  # a file was being made while the folder was renamed
            else:
                path.unlink()

    def _remove(self) -> None:
        self.clear()  # the lock is removed last, because it marks a work folder
        shutil.rmtree(self.folder, ignore_errors=True)

    def _close(self) -> None:
        if self._journal is not None:
            self._journal.close()
            self._journal = None

    def left(self) -> int:
        """Return the bytes of finished work; 0 if the journal has no entries."""
        self._close()
        if not _read_journal(self.folder / _JOURNAL):
            return 0
        return sum(file.stat().st_size for file in self.folder.rglob("*") if file.is_file())


@contextmanager
def claim(out: Path) -> Iterator[WorkFolder]:
    """Lock the work folder of a data set for this process; wait while another process uses it.

    The work is removed on success, and after a UserError that is not a StoreError. After all other errors and
    interruptions, a note is printed, and the finished work is kept unless the input can be read only once.

    Raises UserError if `out` exists.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    folder = out.parent / f".{out.name}.partial"
    unfinished_end = os.path.lexists(out) and folder.is_dir() and not (folder / _RESULT).exists()
    if unfinished_end and _is_work(folder):
        shutil.rmtree(folder, ignore_errors=True)
    _refuse_existing(out)
    with _locked(folder):
        work = WorkFolder(folder, out)
        try:
            _refuse_existing(out)  # another process may have created it meanwhile
            yield work
        except BaseException as error:
            wrong = isinstance(error, UserError) and not isinstance(error, TransientError | StoreError)
            if not wrong and work.is_finished():
                note(_LEFT_OVER.format(out=shown_place(out), folder=folder))
                raise
            size = 0 if wrong else work.left()
            if size and work.resumable:
                note(f"{format_bytes(size)} of finished work is kept in {folder}; the same command resumes from there")
                raise
            try:
                work._remove()
            except OSError as left:  # the user needs to know the original error
                note(f"the work folder could not be removed; do that by hand ({in_words(left)}): {folder}")
            if size:
                note(
                    f"the finished work ({format_bytes(size)}) is not kept: standard input and pipes "
                    f"can be read only once, so "
                    "the same command starts over; a command that reads files would resume"
                )
            raise
        try:
            work._remove()
        except OSError:  # the data set is complete; another process may be removing the folder
            if folder.exists():
                note(_LEFT_OVER.format(out=shown_place(out), folder=folder))
        except BaseException:
            note(_LEFT_OVER.format(out=shown_place(out), folder=folder))
            raise


def _is_work(folder: Path) -> bool:
    """Return whether a folder is absent, empty or a work folder, which has a lock or a recipe file."""
    try:
        names = {path.name for path in folder.iterdir()}  # listed once, as another process may be removing the folder
    except FileNotFoundError:
        return True
    return not names or _LOCK in names or _RECIPE in names


def _refuse_existing(out: Path) -> None:
    require_new(out, manifest=_MANIFEST)
    if os.path.lexists(out):  # an empty folder too: it may be a mount point, which nothing can be renamed onto
        raise UserError(f"{out} exists already; remove it or choose another --out")


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    lock = None
    while lock is None:  # retry if the lock's previous holder removed the folder
        folder.mkdir(exist_ok=True)
        if not _is_work(folder):
            raise UserError(
                f"{folder} is needed as the work folder, but has other files; move them, or choose another --out"
            )
        lock = _lock(folder)
    with lock:
        yield


def _lock(folder: Path) -> IO[str] | None:
    """Wait for the folder's lock and return it; None if the folder was removed meanwhile."""
    try:
        lock = (folder / _LOCK).open("w")
    except FileNotFoundError:
        return None
    if not locks.try_lock(lock):
        note(f"another process is using {folder}; waiting for it")
        locks.await_lock(lock)
    if locks.is_same_file(folder / _LOCK, lock):
        return lock
    lock.close()
    return None


def _mark(last: str, text: str) -> str:
    """Return the checksum of a journal line, which includes `last`, the checksum of the previous line."""
    return sha256(f"{last} {text}".encode()).hexdigest()[:16]


def _read_journal(path: Path) -> list[dict[str, Any]]:
    """Return the entries before the first incomplete or damaged one."""
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
