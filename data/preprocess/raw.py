"""Raw rows, before values become ids and numbers are scaled: the output of parsers and of the synthetic generator.

Malformed lines are stored compactly, because a file in an unexpected format has many of them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hostdev.core.errors import UserError
from hostdev.data import ragged
from hostdev.data.preprocess.scaling import ColumnScaling
from hostdev.data.schema import SINGLE_LABEL, Column, Targets

_AT_ONCE = 4096  # lines held as objects at a time
Bags = tuple[tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]], ...]


class Rejected(NamedTuple):
    """A malformed line: its number in the file (from 1), the reason, and its text."""

    file: str
    line: int
    reason: str
    text: str


class RejectedLines:
    """The malformed lines of a part of a file.

    Args:
        numbers: int64 [n], line numbers within the part, from 1; `after` turns them into line numbers of the file.
        look: Called with i in [0, n) when line i is needed; returns the reason and the text of that line.
    """

    def __init__(
        self, file: str = "", numbers: npt.ArrayLike = (), look: Callable[[int], tuple[str, str]] | None = None
    ) -> None:
        self.file, self.numbers, self._look = file, np.asarray(numbers, np.int64), look

    @classmethod
    def from_columns(cls, columns: Mapping[str, pa.Array]) -> "RejectedLines":
        """Return the lines in `columns`, a result of the method `columns`; a line is read when it is needed."""
        [file] = columns["file"].to_pylist() or [""]
        reasons, texts = columns["reason"], columns["text"]
        return cls(file, columns["line"], lambda i: (reasons[i].as_py(), texts[i].as_py()))

    def __len__(self) -> int:
        """Return n."""
        return len(self.numbers)

    def __getitem__(self, i: int) -> Rejected:
        """Return line `i`; raise IndexError if it does not exist."""
        if not 0 <= i < len(self) or self._look is None:
            raise IndexError(i)
        return Rejected(self.file, int(self.numbers[i]), *self._look(i))

    def __iter__(self) -> Iterator[Rejected]:
        """Iterate lazily over the lines."""
        return (self[i] for i in range(len(self)))

    def after(self, lines: int) -> "RejectedLines":
        """Return these lines with `lines` added to their numbers."""
        return RejectedLines(self.file, self.numbers + lines, self._look)

    def merge(self, other: "RejectedLines") -> "RejectedLines":
        """Return these lines and others from the same part of the file, ordered by line number."""
        first = len(self)
        numbers = np.concatenate([self.numbers, other.numbers])
        order = np.argsort(numbers, kind="stable")

        def look(i: int) -> tuple[str, str]:
            place = int(order[i])
            line = self[place] if place < first else other[place - first]
            return line.reason, line.text

        return RejectedLines(self.file or other.file, numbers[order], look)

    def columns(self) -> dict[str, pa.Array]:
        """Return the columns "file" (one value, or none if there are no lines), "line", "reason" and "text"."""
        parts: dict[str, list[pa.Array]] = {"reason": [], "text": []}
        for start in range(0, len(self), _AT_ONCE):
            lines = [self[i] for i in range(start, min(start + _AT_ONCE, len(self)))]
            for name, some in parts.items():
                some.append(pa.array([getattr(line, name) for line in lines], pa.large_string()))
        texts = {name: pa.concat_arrays(some or [pa.array([], pa.large_string())]) for name, some in parts.items()}
        file = self.file.encode(errors="replace").decode()  # a file's name need not be valid text
        return {"file": pa.array([file][: len(self)], pa.large_string()), "line": pa.array(self.numbers), **texts}


@dataclass(frozen=True)
class SourceLayout:
    """The columns of a source.

    Attributes:
        label: Name of the first label.
        dense: Names of the numeric columns.
        ids: Columns with one id per row.
        bags: Columns with any number of ids per row.
        hashed: For each id space, a key that is hashed with each of the space's values; None to use the spaces' names.
        thresholds: Vocabulary thresholds by id space, which override the default.
        scaling: Scaling settings by numeric column, which override the default.
        targets: Names of the other labels, of the labels that are numbers, and of the weight.
    """

    label: str
    dense: tuple[str, ...]
    ids: tuple[Column, ...]
    bags: tuple[Column, ...] = ()
    hashed: tuple[str | int, ...] | None = None
    thresholds: Mapping[str, int] = field(default_factory=dict)
    scaling: Mapping[str, ColumnScaling] = field(default_factory=dict)
    targets: Targets = SINGLE_LABEL

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of all labels."""
        return self.targets.labels(self.label)

    @property
    def columns(self) -> tuple[Column, ...]:
        """All columns with ids."""
        return self.ids + self.bags

    @property
    def spaces(self) -> tuple[str, ...]:
        """Names of the id spaces, in the order of their first columns."""
        return tuple(dict.fromkeys(column.space for column in self.columns))


class InvalidRowError(Exception):
    """A row has a value that the options do not allow; `row` is the row's number within the block, from 1."""

    def __init__(self, file: str, row: int, reason: str) -> None:
        super().__init__(reason)
        self.file, self.row, self.reason = file, row, reason


@dataclass(frozen=True)
class RawRows:
    """n rows of a layout's columns, and the malformed lines between them.

    A key represents a value of the column's id space: the value itself, its hash, or its index in `texts`.
    """

    label: npt.NDArray[np.float32]  # [n], or [n, labels] if there are several
    numbers: npt.NDArray[np.float64]  # [n, numeric columns], NaN where missing
    keys: npt.NDArray[np.int64]  # [n, columns with one id per row]
    bags: Bags = ()  # for each bag, the concatenated keys of all rows [N] and the number of keys of each row [n]
    rejected: RejectedLines = field(default_factory=RejectedLines)
    splits: npt.NDArray[np.uint8] | None = None  # [n], indices of splits in `manifest.SPLITS`; None to draw later
    texts: Mapping[str, pa.Array] | None = None  # by id space, the values; None if keys are not indices
    missing: Mapping[str, int] = field(default_factory=dict)  # by id space, the key of a missing value
    forms: Mapping[str, frozenset[int]] = field(default_factory=dict)  # value forms (`preprocess.forms`) by column
    weight: npt.NDArray[np.float32] | None = None  # [n]; None: all are 1
    bag_weights: Mapping[int, npt.NDArray[np.float32]] = field(default_factory=dict)  # [N], by index in `bags`

    def __len__(self) -> int:
        """Return n."""
        return len(self.label)

    def take(self, rows: npt.NDArray[np.int64]) -> "RawRows":
        """Return the rows at these indices, without malformed lines, splits and forms."""
        bags = tuple(ragged.take(keys, ragged.offsets_of(lengths), rows) for keys, lengths in self.bags)
        keys = np.empty((self.keys.shape[1], len(rows)), np.int64)
        for i, column in enumerate(keys):
            np.take(self.keys[:, i], rows, out=column)
        return RawRows(
            self.label[rows],
            self.numbers[rows],
            keys.T,
            bags,
            texts=self.texts,
            missing=self.missing,
            bag_weights={
                i: ragged.take(values, ragged.offsets_of(self.bags[i][1]), rows)[0]
                for i, values in self.bag_weights.items()
            },
            weight=None if self.weight is None else self.weight[rows],
        )


class SourcePosition(NamedTuple):
    """A position in a source: the index of an input, and an offset in that input, which only the source interprets."""

    input: int
    offset: int


BEGINNING = SourcePosition(0, 0)


class RawBlock(NamedTuple):
    """Unparsed rows of one input of a source."""

    content: Any
    file: str  # the input's name in error messages
    end: SourcePosition
    size: int  # in the source's `unit`s


class InputRange(NamedTuple):
    """Consecutive blocks of one input.

    Attributes:
        input: The input's number.
        place: Where the blocks are: a place that `Source.ranges` chose, None for the whole input, or a block itself.
        size: In the source's unit, for the progress bar; 0 if unknown.
        begin: The number of rows before the range; None if it is unknown until the ranges before are parsed.
    """

    input: int
    place: Any
    size: int
    begin: int | None = None


class Source:
    """Rows in a fixed order, in blocks; block sizes do not affect results. The base class has no inputs.

    Attributes:
        layout: The columns.
        total: Total size in `unit`s, for the progress bar; 0 if unknown.
        unit: Unit of sizes.
        most_rows: Upper bound on the number of well-formed rows.
        has_validation: Whether the source itself assigns rows to validation.
        signed: Whether negative numbers are scaled symmetrically to positive ones; false for Criteo, where they are
            markers.
        inputs: Files, or standard input (`inputs.AnyInput`); `SourcePosition.input` is an index of these.
    """

    layout: SourceLayout
    total: int
    unit: str
    most_rows: int
    has_validation = False
    signed = True
    inputs: Sequence[Any] = ()

    @property
    def format_keys(self) -> Callable[[npt.NDArray[np.int64]], pa.Array] | None:
        """Function that maps keys to values ("" for a missing one), or None if rows have `texts`."""
        return None

    def blocks(self, start: SourcePosition = BEGINNING) -> Iterator[RawBlock]:
        """Iterate over the blocks from `start` on; `start` must be BEGINNING or the `end` of a block."""
        raise NotImplementedError

    def looks(self, number: int) -> list[range]:
        """Return the windows of an input that `look` must see before `ranges` can divide it; none for most inputs."""
        return []

    def look(self, number: int, windows: range) -> list[Any]:  # Any: JSON
        """Return what `ranges` needs to know of some windows of an input."""
        raise NotImplementedError

    def ranges(self, number: int, looked: Sequence[Any]) -> tuple[list[InputRange], UserError | None]:
        """Divide an input into ranges that can be read alone; also return the error that follows them, if any.

        `looked` has the results of `look` for all windows of `looks`. The ranges' places are JSON values.
        """
        raise NotImplementedError

    def blocks_of(self, one: InputRange) -> Iterator[RawBlock]:
        """Yield the blocks of a range: the rows that `blocks` yields there."""
        raise NotImplementedError

    def parse(self, block: RawBlock, *, hashed: bool = False) -> RawRows:
        """Parse a block's rows; thread-safe.

        If `hashed` is true, keys may be hashes, which cannot be turned back into values.
        Raises InvalidRowError for an invalid value, and UserError for unreadable input.
        """
        raise NotImplementedError

    def kinds(self, forms: Mapping[str, Mapping[int, frozenset[int]]]) -> dict[str, Any]:
        """Return the manifest's entry `kinds`; empty if the source has none.

        `forms` has the forms of the values (see `preprocess.forms`), by column, then by input number.
        """
        return {}

    def describe(self) -> list[dict[str, Any]]:
        """Return the manifest's entry about where the rows come from: each file's absolute path and size."""
        return [source.describe() for source in self.inputs]

    def stamp(self) -> list[Any] | None:
        """Return a fingerprint of the inputs: each file's path, size and time; None if a file can be read only once."""
        stamps = [source.stamp() for source in self.inputs]
        return None if None in stamps else stamps

    def check_unchanged(self) -> None:
        """Raise UserError if an input has changed since the source was opened."""
        for source in self.inputs:
            source.check_unchanged()

    def options(self) -> dict[str, Any]:
        """Return the manifest's entry about how the rows were read."""
        raise NotImplementedError
