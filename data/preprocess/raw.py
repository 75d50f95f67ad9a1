"""Rows as the source has them, before ids and scaling; what parsers and the generator all produce."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from hostdev.data import ragged
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


@dataclass(frozen=True)
class Rejected:
    """A malformed line: where it stands, what is wrong with it, and the line itself."""

    file: str
    line: int
    reason: str
    text: str


@dataclass(frozen=True)
class RawRows:
    """n rows of a layout's columns, and the malformed lines that were met on the way to them.

    A key is a number that stands for a value of the column's space, such as the value itself or its hash.
    """

    label: npt.NDArray[np.float32]  # [n], 0 or 1
    numbers: npt.NDArray[np.float64]  # [n, numeric columns], NaN where missing
    keys: npt.NDArray[np.int64]  # [n, columns with an id a row]
    bags: Bags = ()  # of each bag the keys of all rows end to end [N], and how many each has [n]
    rejected: list[Rejected] = field(default_factory=list)
    test: npt.NDArray[np.bool_] | None = None  # [n], which rows are for testing; None: they are to be drawn

    def __len__(self) -> int:
        """Return n."""
        return len(self.label)

    def select(self, chosen: npt.NDArray[np.bool_]) -> "RawRows":
        """Return the rows for which `chosen` [n] is true."""
        rows = np.flatnonzero(chosen)
        bags = tuple(ragged.take(keys, ragged.offsets_of(lengths), rows) for keys, lengths in self.bags)
        return RawRows(self.label[rows], self.numbers[rows], self.keys[rows], bags)


class Source(Protocol):
    """Rows in a fixed order, as often as they are asked for."""

    layout: Layout
    total: int
    """The whole's size in `unit`s, for the progress bar."""
    unit: str
    most_rows: int
    """No more well-formed rows than this."""
    signed: bool
    """Whether numbers below 0 are scaled as those above are; Criteo's few are marks."""

    def chunks(self, *, hashed: bool = False) -> Iterator[tuple[RawRows, int]]:
        """Iterate over all rows in chunks, each with its size in `unit`s.

        hashed  keys are only going to be hashed: they need not lead back to the values
        """

    def text(self, space: str, keys: npt.NDArray[np.int64]) -> pa.Array:
        """Return the values of a space that keys stand for, as text; "" for a missing one."""

    def describe(self) -> list[dict[str, Any]]:
        """Return what the manifest records of where the rows come from."""

    def options(self) -> dict[str, Any]:
        """Return what the manifest records of how they were read."""
