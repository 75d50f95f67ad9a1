"""A file's encoded rows between their conversion and their training, in an unnamed temporary file.

The rows of a file of any size take the memory of two pieces. An unnamed file vanishes with its process.
"""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hostdev.core.errors import HostdevError, in_words
from hostdev.data.rows import Piece

_ONE = ("label", "dense", "ids", "weight")  # arrays of a `Piece`; the others are of its bags


class SpoolError(HostdevError):
    """The rows of an arrived file cannot be written to the run's folder, or read from it."""


class _Stored(NamedTuple):
    """An array in the file."""

    offset: int  # bytes
    dtype: str
    shape: tuple[int, ...]


class Spool:
    """Pieces of encoded rows in a temporary file; one thread writes them, and then another reads them.

    Args:
        folder: A folder on a disk with room for the rows; they take about as much as the shards of a data set.

    Raises:
        SpoolError: The file cannot be created, written or read.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._pieces: list[dict[tuple[str, ...], _Stored]] = []
        self._end = 0
        try:
            self._file: IO[bytes] = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115  (closed by `close`)
        except OSError as error:
            raise self._failed(error) from None
        self.rows = 0

    def write(self, piece: Piece) -> None:
        """Append a piece; an empty one is left out."""
        if not len(piece):
            return
        arrays: dict[tuple[str, ...], npt.NDArray[Any]] = {
            (name,): array for name in _ONE if (array := getattr(piece, name)) is not None
        }
        for name, (values, offsets) in piece.bags.items():
            arrays |= {("bag", name): values, ("offsets", name): offsets}
        arrays |= {("weights", name): values for name, values in piece.bag_weights.items()}
        stored = {}
        try:
            for key, array in arrays.items():
                data = np.ascontiguousarray(array)
                stored[key] = _Stored(self._end, data.dtype.str, data.shape)
                if data.nbytes:
                    self._file.write(data.reshape(-1).view(np.uint8).data)
                self._end += data.nbytes
            self._file.flush()
        except OSError as error:
            raise self._failed(error) from None
        self._pieces.append(stored)
        self.rows += len(piece)

    def read(self, first: int = 0) -> Iterator[tuple[int, Piece]]:
        """Yield the pieces from the one with row `first` on, each with the number of rows before it."""
        before = 0
        for stored in self._pieces:
            rows = stored["label",].shape[0]
            if before + rows > first:
                yield before, self._piece(stored)
            before += rows

    def _piece(self, stored: dict[tuple[str, ...], _Stored]) -> Piece:
        arrays = {key: self._array(one) for key, one in stored.items()}
        bags = {key[1]: (values, arrays["offsets", key[1]]) for key, values in arrays.items() if key[0] == "bag"}
        weights = {key[1]: values for key, values in arrays.items() if key[0] == "weights"}
        label, dense, ids = (arrays[name,] for name in _ONE[:3])
        return Piece(label, dense, ids, bags, arrays.get(("weight",)), weights)

    def _array(self, stored: _Stored) -> npt.NDArray[Any]:
        found = np.empty(stored.shape, stored.dtype)
        view, done = found.reshape(-1).view(np.uint8).data, 0
        try:
            while done < found.nbytes:
                n = os.preadv(self._file.fileno(), [view[done:]], stored.offset + done)
                if not n:
                    raise OSError("the file became shorter")
                done += n
        except OSError as error:
            raise self._failed(error) from None
        return found

    def close(self) -> None:
        """Remove the file."""
        self._file.close()

    def _failed(self, error: OSError) -> SpoolError:
        return SpoolError(
            f"{self._folder}: the rows of an arrived file need room on this disk "
            f"({error.strerror or in_words(error)}); make room, and run the command again with --resume"
        )
