"""Conversion of an arrived file to encoded rows, piece by piece; a file that cannot be read is refused as a whole."""

from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from threading import Event
from typing import NamedTuple

from hostdev.core.errors import HostdevError, TransientError, UserError, in_words
from hostdev.core.progress import counted
from hostdev.data.arrivals.example import Example
from hostdev.data.arrivals.folder import Folder, State
from hostdev.data.arrivals.spool import Spool, SpoolError
from hostdev.data.preprocess import places
from hostdev.data.preprocess.inputs import is_empty
from hostdev.data.preprocess.raw import BEGINNING, WrongRowError
from hostdev.data.preprocess.rejected import Rejected
from hostdev.data.preprocess.row_counts import MAX_REJECTED
from hostdev.stores.address import shown_place
from hostdev.stores.store import StoreError

EMPTY, REFUSED, REPEATED, LATE = "empty", "refused", "repeated", "late"  # why a file is set aside
_AT_ONCE = 1 << 22  # bytes


@dataclass(frozen=True)
class Converted:
    """A file's rows.

    Attributes:
        name: The file's name in its folder.
        sha256: The digest of its bytes.
        rejected: Number of rows that cannot be read; these are left out.
        first: One line about the first of them; None if there are none.
    """

    name: str
    sha256: str
    state: State
    rejected: int
    first: str | None
    spool: Spool

    @property
    def rows(self) -> int:
        """The number of rows."""
        return self.spool.rows

    def close(self) -> None:
        """Remove the rows; those that were read from the spool stay."""
        self.spool.close()


class Refused(NamedTuple):
    """A file that is not trained on: why (one of EMPTY, REFUSED, REPEATED, LATE), and the reason in one line."""

    name: str
    why: str
    reason: str
    sha256: str | None = None


class Again(NamedTuple):
    """A file to be looked at again: it has changed or vanished (`reason` is None), or the system failed to read it."""

    name: str
    reason: str | None


class _StoppedError(Exception):
    """The conversion's result is not needed any more."""


def convert(
    folder: Folder, name: str, state: State, example: Example, spools: Path, stop: Event
) -> Converted | Refused | Again:
    """Return a file's rows, or why there are none.

    Args:
        state: The file's state when it was found complete; a file that has changed since is `Again`.
        example: Encodes the rows.
        spools: The folder for temporary files.
        stop: Ends the conversion early; the result is then `Again`.

    Raises:
        SpoolError: The disk of `spools` is full.
        MemoryError: There is not enough memory.
    """
    found: Converted | Refused | Again
    try:
        path = folder.open(name)
        if is_empty(path):
            found = Refused(name, EMPTY, f"{shown_place(path)}: the file is empty")
        else:
            found = _convert(path, name, state, example, spools, stop)
    except SpoolError:
        raise
    except (_StoppedError, FileNotFoundError):
        return Again(name, None)
    except StoreError as error:  # while a store is away, files wait
        return Again(name, None if error.may_pass else str(error))
    except UserError as error:
        found = Refused(name, REFUSED, str(error))
    except (TransientError, OSError) as error:
        found = Again(name, in_words(error))
    try:
        is_same = folder.state(name) == state
    except OSError:
        is_same = False
    if is_same:
        return found
    if isinstance(found, Converted):
        found.close()
    return Again(name, None)


def _convert(path: Path, name: str, state: State, example: Example, spools: Path, stop: Event) -> Converted | Refused:
    digest = _digest(path, stop)
    source, spool = example.open(path), Spool(spools)
    lines, rejected, first = 0, 0, None
    try:
        for block in source.blocks(BEGINNING):
            if stop.is_set():
                raise _StoppedError
            try:
                rows = source.parse(block, hashed=True)
            except WrongRowError as error:
                raise UserError(f"{error.file}, row {lines + error.row}, {error.reason}") from None
            if len(rows.rejected):
                first = first or rows.rejected.after(lines)[0]
                rejected += len(rows.rejected)
            lines += len(rows) + len(rows.rejected)
            spool.write(example.encode(rows))
        if rejected > MAX_REJECTED * lines:
            assert first is not None
            raise UserError(
                f"{shown_place(path)}: {counted(rejected, 'row')} of {lines:,} cannot be read, more than "
                f"{MAX_REJECTED:.0%}; the first is {_shown(first)}"
            )
        if not spool.rows:
            spool.close()
            return Refused(name, EMPTY, f"{shown_place(path)}: the file has no rows", digest)
    except BaseException as error:
        spool.close()
        if isinstance(error, HostdevError) and not isinstance(error, UserError | TransientError | SpoolError):
            raise UserError(str(error)) from None
        raise
    return Converted(name, digest, state, rejected, None if first is None else _shown(first), spool)


def _shown(line: Rejected) -> str:
    return f"{line.file}:{line.line}: {line.reason}"


def _digest(path: Path, stop: Event) -> str:
    """Return the SHA-256 of a file's bytes."""
    found = sha256()
    with places.open_bytes(path, buffered=False) as file:
        while data := file.read(_AT_ONCE):
            found.update(data)
            if stop.is_set():
                raise _StoppedError
    return found.hexdigest()
