"""Files and folders that get their final names when they are complete: new ones, and files that replace existing ones.

The content is written to a hidden file .NAME.partial or a hidden folder .NAME.unfinished beside the final one. The
process locks the hidden name of a new file or folder, and never overwrites what another process creates meanwhile. The
hidden name of a file that may replace another ends in random digits, so that any number of threads, processes and hosts
may write the file at once. The next process that creates the same file or folder removes what a killed process has
left; `write_json` does so if nothing was written to it for an hour.

Folders of checkpoints have different hidden names (`checkpoint.folder`), because several ranks write to one at once.

Files and folders survive a power failure only after the caller has flushed them to disk.
"""

import errno
import json
import os
import re
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

from hostdev.core import locks
from hostdev.core.errors import UserError

_LONGEST = 240  # maximum bytes of a hidden name, to which random digits may be appended
_PARTIAL = re.compile(r"\.part(ial(-[0-9a-f]{8})?)?$")  # `replacing` appends digits; earlier versions used .part
_ABANDONED_SECONDS = 3600
_TAKEN = (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR)  # errors of a rename to an existing name


@contextmanager
def new_file(out: Path, option: str = "--out", *, wait: bool = False) -> Iterator[Path]:
    """Yield the path of an empty file that becomes `out` at the end of the block, or is removed if the block raises.

    Args:
        option: The command-line option that named the file, for messages.
        wait: If another process is writing `out`, wait for it instead of raising.

    Raises:
        UserError: `out` exists, at the beginning or the end of the block, or another process is writing it.
    """
    with _hidden(_beside(out, "partial"), f"{option} {out}", _make_file, wait) as partial:
        if os.path.lexists(out):
            raise _file_exists_error(out, option)
        yield partial
        try:
            _publish_file(partial, out)
        except FileExistsError:
            raise _file_exists_error(out, option) from None


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Yield the path of an empty folder that becomes `out` at the end of the block, or is removed if the block raises.

    Raises:
        UserError: `out` exists, at the beginning or the end of the block, or another process is writing it.
    """
    with _hidden(_beside(out, "unfinished"), f"--out {out}", _make_folder, False) as partial:
        if os.path.lexists(out):
            raise taken_folder(out)
        yield partial
        try:
            if os.path.lexists(out):  # a rename would replace an empty folder
                raise taken_folder(out)
            partial.rename(out)
        except OSError as error:
            if error.errno in _TAKEN:
                raise taken_folder(out) from None
            raise


@contextmanager
def replacing(path: Path, folder: Path | None = None) -> Iterator[Path]:
    """Yield a hidden path to write to; after the block it atomically replaces `path`, or is removed after an error.

    Args:
        path: The file, which may exist.
        folder: The folder of the hidden path, in the same file system; by default that of `path`.
    """
    partial = _add_digits(_beside(path if folder is None else folder / path.name, "partial"))
    try:
        yield partial
        partial.replace(path)
    finally:
        with suppress(OSError):
            partial.unlink(missing_ok=True)


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file atomically, in place of an existing one; remove what killed writers of it have left."""
    remove_abandoned(path)
    with replacing(path) as partial:
        partial.write_text(json.dumps(content, indent=2) + "\n")


def is_partial(path: Path) -> bool:
    """Return whether this is a hidden file name of `replacing` or `new_file`, of this or an earlier version."""
    return _PARTIAL.search(path.name) is not None


def remove_partials(folder: Path) -> None:
    """Remove the hidden files of killed processes from a folder and its subfolders; no process may be writing there."""
    for path in filter(is_partial, folder.rglob("*")):
        path.unlink(missing_ok=True)


def remove_abandoned(path: Path) -> None:
    """Remove hidden files of `path` whose writers were killed: files that were not written to for an hour."""
    with suppress(OSError):
        for partial in path.parent.iterdir():
            is_own = partial.name.removeprefix(".").startswith(f"{path.name}.")
            if is_own and is_partial(partial) and is_abandoned(partial.stat()):
                partial.unlink(missing_ok=True)


def is_abandoned(state: os.stat_result) -> bool:
    """Return whether the writer of a hidden file counts as killed, because it has not written for an hour."""
    return time.time() - state.st_mtime > _ABANDONED_SECONDS


def _add_digits(path: Path) -> Path:
    return path.with_name(f"{path.name}-{os.urandom(4).hex()}")


def _beside(out: Path, suffix: str) -> Path:
    name = os.fsencode(out.name)
    if len(name) + len(suffix) + 2 > _LONGEST:
        name = sha256(name).hexdigest().encode()
    return out.with_name(f".{os.fsdecode(name)}.{suffix}")


def _file_exists_error(out: Path, option: str) -> UserError:
    return UserError(f"{option} {out} exists; choose another file")


def taken_folder(out: Path) -> UserError:
    """Return the error for a new folder whose name is taken."""
    return UserError(f"{out} exists already; remove it or choose another --out")


@contextmanager
def _hidden(path: Path, what: str, make: Callable[[Path], int], wait: bool) -> Iterator[Path]:
    """Create and lock `path` for the block, then remove it; without locks, add random digits if `path` exists."""
    number, path = _claim(path, what, make, wait)
    try:
        yield path
    finally:
        with suppress(OSError):
            _remove(path)
        os.close(number)  # last, since it releases the lock


def _claim(path: Path, what: str, make: Callable[[Path], int], wait: bool) -> tuple[int, Path]:
    """Return a descriptor and the path of a file or folder that this process has created and, if possible, locked."""
    while True:
        try:
            number = make(path)
            made = True
        except FileExistsError:
            made = False
            try:
                number = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            except FileNotFoundError:
                continue
            except OSError:
                raise UserError(f"{what} is first written to {path}, which already exists; remove it") from None
        try:
            state = locks.lock_state(number, wait=wait and not made)
            if state == "none":  # the file system has no locks: use a unique name
                if made:
                    return number, path
                path = _add_digits(path)
            elif state == "held" and not made:
                raise UserError(f"{what} is being written by another process; wait for it, or choose another name")
            elif state == "locked" and _is_still(path, number):
                if made:
                    return number, path
                if not (stat.S_ISREG(mode := os.fstat(number).st_mode) or stat.S_ISDIR(mode)):
                    raise UserError(f"{what} is first written to {path}, which already exists; remove it")
                _remove(path)  # left by a killed process; not reused, as it may have hard links
        except BaseException:
            os.close(number)
            if made:
                with suppress(OSError):
                    _remove(path)
            raise
        os.close(number)


def _is_still(path: Path, number: int) -> bool:
    try:
        return os.path.samestat(path.lstat(), os.fstat(number))
    except OSError:
        return False


def _make_file(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)


def _make_folder(path: Path) -> int:
    path.mkdir()
    return os.open(path, os.O_RDONLY | os.O_NOFOLLOW)


def _publish_file(partial: Path, out: Path) -> None:
    """Give a file its final name; raise FileExistsError if a file of that name exists."""
    try:
        os.link(partial, out)
        return
    except FileExistsError:
        raise
    except OSError:  # no hard links: create the name first
        os.close(os.open(out, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
    partial.replace(out)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def is_text(path: Path | str) -> bool:
    """Return whether a file name is valid text; POSIX also allows other bytes, which Python decodes to surrogates."""
    return not any("\udc80" <= character <= "\udcff" for character in str(path))


def sync_folder(path: Path) -> None:
    """Flush a folder's directory entries to disk."""
    _sync(path)


def sync_tree(path: Path) -> None:
    """Flush a folder's content to disk: all files, and the directory entries of the folder and its subfolders."""
    for folder, _, names in os.walk(path, topdown=False):
        for name in names:
            _sync(Path(folder) / name)
        _sync(Path(folder))


def _sync(path: Path) -> None:
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.ENOTSUP) and path.is_dir():
            return  # some file systems cannot flush folders
        error.filename = str(path)
        raise
    finally:
        os.close(number)
