"""Rows as the source has them, before ids and scaling; what parsers and the generator all produce."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hostdev.data import ragged
from hostdev.data.preprocess.rejected import RejectedLines
from hostdev.data.schema import Column

Bags = tuple[tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]], ...]


@dataclass(frozen=True)
class Layout:
    """Which columns a source has.

    label    name of the label's column
    dense    names of the numeric columns
    ids      those that become an id a row
    bags     those that become any number of ids a row
    hashed   what stands for each space where values are hashed; None for its name
    """

    label: str
    dense: tuple[str, ...]
    ids: tuple[Column, ...]
    bags: tuple[Column, ...] = ()
    hashed: tuple[str | int, ...] | None = None

    @property
    def columns(self) -> tuple[Column, ...]:
        """All that become ids."""
        return self.ids + self.bags

    @property
    def spaces(self) -> tuple[str, ...]:
        """Names of the columns' spaces, in the order in which columns name them."""
        return tuple(dict.fromkeys(column.space for column in self.columns))


class WrongRowError(Exception):
    """A row with a value that the options do not allow: its file, its number among the block's, and what is wrong."""

    def __init__(self, file: str, row: int, reason: str) -> None:
        super().__init__(reason)
        self.file, self.row, self.reason = file, row, reason


@dataclass(frozen=True)
class RawRows:
    """n rows of a layout's columns, and the malformed lines that were met on the way to them.

    A key is a number that stands for a value of the column's space: the value, its hash, or its number in `texts`.
    """

    label: npt.NDArray[np.float32]  # [n], 0 or 1
    numbers: npt.NDArray[np.float64]  # [n, numeric columns], NaN where missing
    keys: npt.NDArray[np.int64]  # [n, columns with an id a row]
    bags: Bags = ()  # of each bag the keys of all rows end to end [N], and how many each has [n]
    rejected: RejectedLines = field(default_factory=RejectedLines)
    test: npt.NDArray[np.bool_] | None = None  # [n], which rows are for testing; None: they are to be drawn
    texts: Mapping[str, pa.Array] | None = None  # by space, the values of which keys are the numbers
    missing: Mapping[str, int] = field(default_factory=dict)  # by space, the key of a missing value
    forms: Mapping[str, frozenset[int]] = field(default_factory=dict)  # by column with ids, how its values are written

    def __len__(self) -> int:
        """Return n."""
        return len(self.label)

    def take(self, rows: npt.NDArray[np.int64]) -> "RawRows":
        """Return the rows with these numbers; nothing was malformed among them."""
        bags = tuple(ragged.take(keys, ragged.offsets_of(lengths), rows) for keys, lengths in self.bags)
        keys = np.empty((self.keys.shape[1], len(rows)), np.int64)
        for i, column in enumerate(keys):
            np.take(self.keys[:, i], rows, out=column)
        return RawRows(self.label[rows], self.numbers[rows], keys.T, bags, texts=self.texts, missing=self.missing)


class Place(NamedTuple):
    """Where a source's rows go on: the number of the input, and how far into it, in a unit of the source's own."""

    input: int
    offset: int


BEGINNING = Place(0, 0)


class Block(NamedTuple):
    """Some of a source's rows, to be parsed: a piece of one input."""

    content: Any
    file: str  # in errors
    end: Place
    size: int  # in the source's `unit`s


class Source(Protocol):
    """Rows in a fixed order, in blocks; how many there are at once changes nothing."""

    layout: Layout
    total: int
    """The whole's size in `unit`s, for the progress bar; 0 where nobody knows it."""
    unit: str
    most_rows: int
    """No more well-formed rows than this."""
    signed: bool
    """Whether numbers below 0 are scaled as those above are; Criteo's few are marks."""

    @property
    def text_of(self) -> Callable[[npt.NDArray[np.int64]], pa.Array] | None:
        """What returns the values that keys stand for, "" for a missing one; None: rows bring them as `texts`."""

    def blocks(self, start: Place) -> Iterator[Block]:
        """Iterate over the rows from a place on: BEGINNING, or where a block ended."""

    def parse(self, block: Block, *, hashed: bool) -> RawRows:
        """Return a block's rows; several threads may call at once.

        hashed  keys are only going to be hashed: they need not lead back to the values

        Raises WrongRowError, and UserError for what cannot be read at all.
        """

    @property
    def kinds(self) -> Callable[[Mapping[str, Mapping[int, frozenset[int]]]], dict[str, Any]] | None:
        """What returns what the manifest records of forms by column and input; None: all values are of one kind."""

    def describe(self) -> list[dict[str, Any]]:
        """Return what the manifest records of where the rows come from."""

    def stamp(self) -> list[Any] | None:
        """Return what tells whether the rows are the same as another time; None where they can be read once only."""

    def check_unchanged(self) -> None:
        """Raise UserError where an input has changed since this was made."""

    def options(self) -> dict[str, Any]:
        """Return what the manifest records of how they were read."""
