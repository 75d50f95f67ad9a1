"""Conversion of an arrived file to encoded rows, piece by piece; a file that cannot be read is refused as a whole.

Between conversion and training, the rows are in an unnamed temporary file, which vanishes with its process: a file of
any size takes the memory of two pieces. Batches are cut from one file after the other.
"""

import pickle
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import IO, NamedTuple

import numpy as np

from hostdev.core.addresses import shown_place
from hostdev.core.checksums import NoDigest, hash_stream
from hostdev.core.errors import HostdevError, StoppedError, StoreError, TransientError, UserError, in_words
from hostdev.core.progress import counted
from hostdev.data.batch import Batch, Range, ShardPiece, ShardRows, gathered
from hostdev.data.preprocess import places
from hostdev.data.preprocess.first_pass import MAX_REJECTED
from hostdev.data.preprocess.inputs import is_empty
from hostdev.data.preprocess.raw import BEGINNING, InvalidRowError, Rejected
from hostdev.ext.streams.example import Example
from hostdev.ext.streams.folder import FileState, Folder, has_end
from hostdev.ext.streams.seen import Taken, digest_bits

EMPTY, REFUSED, REPEATED, LATE = "empty", "refused", "repeated", "late"  # why a file is set aside


class SpoolError(HostdevError):
    """The rows of an arrived file cannot be written to the run's folder, or read from it."""


class Spool:
    """Pieces of encoded rows in a temporary file; one thread writes them, and then another reads them.

    Args:
        folder: A folder on a disk with room for the rows; they take about as much as the shards of a data set.

    Raises:
        SpoolError: The file cannot be created, written or read.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._pieces: list[tuple[int, int]] = []  # of each piece: its offset in bytes, and its number of rows
        try:
            self._file: IO[bytes] = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115  (closed by `close`)
        except OSError as error:
            raise self._failed(error) from None
        self.rows = 0

    def write(self, piece: ShardPiece) -> None:
        """Append a piece; an empty piece is left out."""
        if not len(piece):
            return
        try:
            self._pieces.append((self._file.tell(), len(piece)))
            pickle.dump(_contiguous(piece), self._file, pickle.HIGHEST_PROTOCOL)
            self._file.flush()
        except OSError as error:
            raise self._failed(error) from None
        self.rows += len(piece)

    def read(self, first: int = 0) -> Iterator[tuple[int, ShardPiece]]:
        """Yield the pieces from the one with row `first` on, each with the number of rows before it."""
        before = 0
        for begin, rows in self._pieces:
            if before + rows > first:
                yield before, self._load(begin)
            before += rows

    def _load(self, begin: int) -> ShardPiece:
        try:
            self._file.seek(begin)
            piece: ShardPiece = pickle.load(self._file)
        except (OSError, EOFError, pickle.UnpicklingError) as error:
            raise self._failed(error) from None
        return piece

    def close(self) -> None:
        """Remove the file."""
        self._file.close()

    def _failed(self, error: Exception) -> SpoolError:
        why = getattr(error, "strerror", None) or in_words(error)
        return SpoolError(
            f"{self._folder}: the rows of an arrived file need room on this disk ({why}); make room, and run the "
            "command again with --resume"
        )


def _contiguous(piece: ShardPiece) -> ShardPiece:
    """Return a piece with C-contiguous arrays: those that read pieces need them."""
    plain = np.ascontiguousarray
    return ShardPiece(
        plain(piece.label),
        plain(piece.dense),
        plain(piece.ids),
        {name: (plain(values), plain(offsets)) for name, (values, offsets) in piece.bags.items()},
        None if piece.weight is None else plain(piece.weight),
        {name: plain(weights) for name, weights in piece.bag_weights.items()},
    )


class FilePart(NamedTuple):
    """A part of a file: the rows in its first `nbytes` bytes, or in all (None), without the first `after` rows."""

    nbytes: int | None = None
    after: int = 0


WHOLE = FilePart()


@dataclass(frozen=True)
class Converted:
    """A file's encoded rows, in a spool.

    Attributes:
        name: The file's name in its folder.
        sha256: The digest of the file's first `nbytes` bytes.
        rejected: Number of rows that cannot be read; these are left out.
        first: A line about the first rejected row; None if there is none.
        lines: Number of rows in these bytes, with rejected rows and rows that had been taken before.
        part: Which part of the file this is.
        skipped: Number of rows at the beginning of the spool that had been taken before.
    """

    name: str
    sha256: str
    state: FileState
    rejected: int
    first: str | None
    spool: Spool
    lines: int = 0
    part: FilePart = WHOLE
    skipped: int = 0

    @property
    def rows(self) -> int:
        """The number of rows in the spool that had not been taken before."""
        return self.spool.rows - self.skipped

    @property
    def nbytes(self) -> int:
        """The number of bytes of the file up to the end of these rows."""
        return self.state.size if self.part.nbytes is None else self.part.nbytes

    @property
    def taken(self) -> Taken:
        """What `Seen` remembers of the file once its rows are taken."""
        stamp = self.state.stamp if self.nbytes == self.state.size else 0
        return Taken(self.nbytes, stamp, digest_bits(self.sha256), self.lines)

    def read(self, first: int = 0) -> Iterator[tuple[int, ShardPiece]]:
        """Yield pieces from the one with row `first` on, each with the number of rows before it.

        The number is negative if the piece begins with skipped rows.
        """
        for before, piece in self.spool.read(self.skipped + first):
            yield before - self.skipped, piece

    def close(self) -> None:
        """Remove the spool; pieces that were read from it remain valid."""
        self.spool.close()


class Refused(NamedTuple):
    """A file that is not trained on; `why` is EMPTY, REFUSED, REPEATED, LATE, GROWN or REPLACED, `reason` a message."""

    name: str
    why: str
    reason: str
    sha256: str | None = None
    state: FileState | None = None


class Again(NamedTuple):
    """A file to look at again: it has changed or vanished (`reason` is None), or a read failed (`reason` says how).

    `is_open` says that the file has no end or cannot be read, perhaps because a program is still writing it.
    """

    name: str
    reason: str | None
    is_open: bool = False


def convert(
    folder: Folder,
    name: str,
    state: FileState,
    example: Example,
    spools: Path,
    stop: Event,
    part: FilePart = WHOLE,
    *,
    is_quiet: bool = True,
) -> Converted | Refused | Again:
    """Return a file's rows, or why there are none.

    Args:
        state: The file's state when it was found complete; a file that has changed since is `Again`.
        example: Encodes the rows.
        spools: The folder for temporary files.
        stop: Ends the conversion early; the result is then `Again`.
        part: Which part of the file to convert.
        is_quiet: Whether the file has not changed for so long that it is complete; otherwise, `has_end` must hold.

    Raises:
        SpoolError: The rows cannot be written to `spools`, for example because its disk is full.
        MemoryError: There is not enough memory.
    """
    found: Converted | Refused | Again
    try:
        path = folder.open(name)
        if not (is_quiet or has_end(path)):
            return Again(name, None, is_open=True)
        if is_empty(path):
            digest = _try_digest(path, part.nbytes, stop)
            found = Refused(name, EMPTY, f"{shown_place(path)}: the file is empty", digest, state)
        else:
            with _first_bytes(path, part.nbytes, state, spools) as source:
                found = _convert(source, name, state, example, spools, stop, part)
    except SpoolError:
        raise
    except (StoppedError, FileNotFoundError):
        return Again(name, None)
    except StoreError as error:  # a file waits while its store cannot be reached
        return Again(name, None if error.is_transient else str(error))
    except UserError as error:
        found = Refused(name, REFUSED, str(error), _try_digest(path, part.nbytes, stop), state)
    except (TransientError, OSError) as error:
        found = Again(name, in_words(error))
    try:
        is_same = folder.state(name) == state
    except OSError:
        is_same = False
    if is_same and isinstance(found, Refused) and not is_quiet:
        return Again(name, None, is_open=True)
    if is_same:
        return found
    if isinstance(found, Converted):
        found.close()
    return Again(name, None)


@contextmanager
def _first_bytes(path: Path, nbytes: int | None, state: FileState, spools: Path) -> Iterator[Path]:
    """Yield the path of a file with the first `nbytes` bytes of `path`: a temporary copy if `path` has more."""
    if nbytes is None or nbytes >= state.size:
        yield path
        return
    with tempfile.TemporaryDirectory(dir=spools, prefix=".part-") as folder:
        copy = Path(folder) / path.name
        with places.open_bytes(path, buffered=False) as source, copy.open("wb") as target:
            hash_stream(source, out=target, most=nbytes, digest=NoDigest)
        try:
            yield copy
        except UserError as error:
            raise UserError(str(error).replace(str(copy), shown_place(path))) from None


def _convert(
    path: Path, name: str, state: FileState, example: Example, spools: Path, stop: Event, part: FilePart
) -> Converted | Refused:
    digest = _digest(path, None, stop)
    source, spool = example.open(path), Spool(spools)
    lines, rejected, first, skipped = 0, 0, None, 0
    try:
        for block in source.blocks(BEGINNING):
            if stop.is_set():
                raise StoppedError
            try:
                rows = source.parse(block, hashed=True)
            except InvalidRowError as error:
                raise UserError(f"{error.file}, row {lines + error.row}, {error.reason}") from None
            before, lines = lines, lines + len(rows) + len(rows.rejected)
            if lines <= part.after:
                continue
            old = max(0, part.after - before)  # lines of this block that had been taken before
            old_rejected = int(np.count_nonzero(rows.rejected.numbers <= old))
            if len(rows.rejected) > old_rejected:
                first = first or rows.rejected.after(before)[old_rejected]
                rejected += len(rows.rejected) - old_rejected
            skipped += old - old_rejected
            spool.write(example.encode(rows))
        if rejected > MAX_REJECTED * (lines - part.after):
            assert first is not None
            raise UserError(
                f"{shown_place(path)}: {counted(rejected, 'row')} of {lines - part.after:,} cannot be read, more than "
                f"{MAX_REJECTED:.0%}; the first is {_shown(first)}"
            )
        if spool.rows == skipped:
            spool.close()
            return Refused(name, EMPTY, f"{shown_place(path)}: the file has no rows", digest, state)
    except BaseException as error:
        spool.close()
        if isinstance(error, HostdevError) and not isinstance(error, UserError | TransientError | SpoolError):
            raise UserError(str(error)) from None
        raise
    shown = None if first is None else _shown(first)
    return Converted(name, digest, state, rejected, shown, spool, lines, part, skipped)


def _shown(line: Rejected) -> str:
    return f"{line.file}:{line.line}: {line.reason}"


def _digest(path: Path, nbytes: int | None, stop: Event) -> str:
    """Return the SHA-256 of a file's first `nbytes` bytes, or of all bytes."""
    with places.open_bytes(path, buffered=False) as file:
        return hash_stream(file, most=nbytes, stop=stop)


def _try_digest(path: Path, nbytes: int | None, stop: Event) -> str | None:
    """Return the digest of a refused file, by which a later change is noticed; None if the file cannot be read."""
    try:
        return _digest(path, nbytes, stop)
    except (StoppedError, StoreError, TransientError, OSError):
        return None


class BatchCutter:
    """Cuts files into batches of `size` rows. One thread at a time may use it."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._ranges: list[Range] = []
        self.waiting = 0  # rows that are not in a batch yet

    def steps(self, rows: int) -> int:
        """Return the number of batches that `cut` makes of a file with this many rows."""
        return (self.waiting + rows) // self._size

    def cut(self, file: Converted, first: int = 0) -> Iterator[Batch]:
        """Yield batches of the waiting rows, then of a file's rows from row `first` on; remaining rows wait."""
        for before, piece in file.read(first):
            rows, start = ShardRows([piece], None), max(0, first - before)
            while start < len(rows):
                taken = min(self._size - self.waiting, len(rows) - start)
                self._ranges.append((rows, start, start + taken))
                start += taken
                self.waiting += taken
                if self.waiting == self._size:
                    yield self.rest()

    def rest(self) -> Batch:
        """Return the rows that wait, at least one, as a batch; none wait afterwards."""
        ranges, self._ranges, self.waiting = self._ranges, [], 0
        return gathered(ranges, None)


def batches_of(file: Converted, size: int) -> Iterator[Batch]:
    """Yield a file's rows in batches; the last may be smaller."""
    cutter = BatchCutter(size)
    yield from cutter.cut(file)
    if cutter.waiting:
        yield cutter.rest()
