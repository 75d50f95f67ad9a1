"""The schema of a data set: its columns and their ids, and the targets: labels, and weights of samples in the loss.

An id space holds the values of a column, or of several columns that share ids. All id spaces share one range of `rows`
ids: one for each dense column (used only by models that look up dense columns), one out-of-vocabulary id for each id
space, then the ids of the values, id space by id space, in order of first occurrence. If ids are hashed, all id spaces
share the ids of the hash buckets.

A data set that extends an earlier one appends ids for new values, again id space by id space. The ids of an id space
can thus be in several segments.
"""

from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from hostdev.core.json_files import parse

KINDS = ("id", "bag")


@dataclass(frozen=True, kw_only=True)
class Targets:
    """The targets besides the first label; by default there are none, and the first label is 0 or 1.

    Attributes:
        more: Names of further labels.
        numeric: Names of the labels that can be any number; all other labels are 0 or 1.
        weight: Name of the column with the samples' weights, or None.
    """

    more: tuple[str, ...] = ()
    numeric: tuple[str, ...] = ()
    weight: str | None = None

    def labels(self, first: str) -> tuple[str, ...]:
        """Return the names of all labels, given the first."""
        return (first, *self.more)

    def names(self, first: str) -> tuple[str, ...]:
        """Return the names of all labels, given the first, and of the weight if there is one."""
        return (*self.labels(first), *(() if self.weight is None else (self.weight,)))

    def as_json(self) -> dict[str, Any]:
        """Return the values that differ from the defaults."""
        found = {"more": list(self.more), "numeric": list(self.numeric), "weight": self.weight}
        return {name: value for name, value in found.items() if value}


SINGLE_LABEL = Targets()


def columns_of(label: npt.NDArray[np.float32]) -> list[npt.NDArray[np.float32]]:
    """Return a list with each label's values [n], from an array [n] (a single label) or [n, labels]."""
    return [label] if label.ndim == 1 else list(label.T)


def find_wrong_weights(weights: npt.NDArray[np.float32]) -> npt.NDArray[np.int64]:
    """Return the indices of the weights [N], of samples or of a bag's ids, that are not finite or below 0."""
    return np.flatnonzero(~(np.isfinite(weights) & (weights >= 0)))


def find_wrong(
    label: npt.NDArray[np.float32], weight: npt.NDArray[np.float32] | None, labels: tuple[str, ...], targets: Targets
) -> tuple[str, str, npt.NDArray[np.int64], npt.NDArray[np.float32]] | None:
    """Find the first label or weight column that has invalid values in n samples.

    Returns the column's name, what is wrong, the indices of the samples with an invalid value, and all values of the
    column; None if all columns are valid.
    """
    for name, values in zip(labels, columns_of(label), strict=True):
        is_number = name in targets.numeric
        wrong = np.flatnonzero(~np.isfinite(values) if is_number else (values != 0) & (values != 1))
        if len(wrong):
            return name, "not finite" if is_number else "not 0 or 1", wrong, values
    if weight is not None and targets.weight is not None:
        wrong = find_wrong_weights(weight)
        if len(wrong):
            return targets.weight, "not a finite weight of at least 0", wrong, weight
    return None


@dataclass(frozen=True)
class Space:
    """An id space: its out-of-vocabulary id, and the ids [first, first + size) of its values.

    `more` lists further segments (first, size), ascending, for the values that later data sets added.
    """

    name: str
    oov: int
    first: int
    size: int
    more: tuple[tuple[int, int], ...] = ()

    @property
    def segments(self) -> tuple[tuple[int, int], ...]:
        """The non-empty segments (first, size) of the values' ids, ascending."""
        return (((self.first, self.size),) if self.size else ()) + self.more

    @property
    def values(self) -> int:
        """Number of values."""
        return self.size + sum(size for _, size in self.more)

    def grown(self, first: int, size: int) -> "Space":
        """Return the id space with the ids [first, first + size) added; these must be above its current ids."""
        if not size:
            return self
        if not self.segments:
            return replace(self, first=first, size=size)
        begin, last = self.segments[-1]
        if begin + last < first:
            return replace(self, more=(*self.more, (first, size)))
        if self.more:
            return replace(self, more=(*self.more[:-1], (begin, last + size)))
        return replace(self, size=last + size)

    def has(self, ids: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
        """Return a mask, bool [N]: whether each of the ids [N] is the id of a value of this id space."""
        found = np.zeros(ids.shape, np.bool_)
        for first, size in self.segments:
            found |= (ids >= first) & (ids < first + size)
        return found

    def id_at(self, number: int) -> int:
        """Return the id of the value at index `number`, from 0, in ascending order of ids."""
        for first, size in self.segments:
            if number < size:
                return first + number
            number -= size
        raise IndexError(f"id space {self.name!r} has only {self.values} values")

    def in_words(self) -> str:
        """Return the values' id ranges as text, such as "4..7, 20..22" or ""."""
        return ", ".join(f"{first}..{first + size - 1}" for first, size in self.segments)


@dataclass(frozen=True)
class Column:
    """A column of kind "id" (one id per sample) or "bag" (any number per sample); columns may share an id space.

    `weighted` says whether each id of a bag has a weight.
    """

    name: str
    kind: str
    space: str
    weighted: bool = False


@dataclass(frozen=True)
class Schema:
    """The columns of a data set and its total number of ids.

    Attributes:
        label: Name of the first label.
        dense: Names of the dense columns.
        columns: The id and bag columns.
        spaces: The columns' id spaces.
        rows: Total number of ids, which is the number of rows of a table that all columns share.
        targets: Names of the further labels, of the numeric labels, and of the column with the samples' weights.
    """

    label: str
    dense: tuple[str, ...]
    columns: tuple[Column, ...]
    spaces: tuple[Space, ...]
    rows: int
    targets: Targets = SINGLE_LABEL

    def __post_init__(self) -> None:
        names = [*self.targets.names(self.label), *self.dense, *(column.name for column in self.columns)]
        if unknown := set(self.targets.numeric) - set(self.labels):
            raise ValueError(f"the targets name {min(unknown)!r} as numeric, but {min(unknown)!r} is not a label")
        if twice := _twice(names):
            raise ValueError(f"column {twice!r} occurs twice")
        spaces = [space.name for space in self.spaces]
        if twice := _twice(spaces):
            raise ValueError(f"id space {twice!r} occurs twice")
        for column in self.columns:
            if column.kind not in KINDS:
                raise ValueError(f"column {column.name!r} is of kind {column.kind!r}, not one of {', '.join(KINDS)}")
            if column.weighted and column.kind != "bag":
                raise ValueError(f"column {column.name!r} has weights, but is not a bag")
            if column.space not in spaces:
                raise ValueError(f"column {column.name!r} names an unknown id space {column.space!r}")
        fixed = len(self.dense) + len(self.spaces)
        if self.rows < fixed:
            raise ValueError(f"{self.rows} ids are too few: dense columns and out-of-vocabulary values need {fixed}")
        for space in self.spaces:
            if not (0 <= space.oov < self.rows and space.size >= 0 and 0 <= space.first <= self.rows - space.size):
                raise ValueError(f"id space {space.name!r} has ids outside 0..{self.rows - 1}")
            end = space.first + space.size
            for first, size in space.more:
                if size < 1 or first < end or first + size > self.rows:
                    raise ValueError(
                        f"id space {space.name!r} has segments that overlap, are empty or end outside "
                        f"0..{self.rows - 1}"
                    )
                end = first + size

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of all labels, in the order of `Batch.label`."""
        return self.targets.labels(self.label)

    @property
    def ids(self) -> tuple[str, ...]:
        """Names of the columns with one id per sample, in the order of `Batch.ids`."""
        return tuple(column.name for column in self.columns if column.kind == "id")

    @property
    def bags(self) -> tuple[str, ...]:
        """Names of the columns with any number of ids per sample."""
        return tuple(column.name for column in self.columns if column.kind == "bag")

    @property
    def weighted_bags(self) -> tuple[str, ...]:
        """Names of the bags whose ids have weights."""
        return tuple(column.name for column in self.columns if column.weighted)

    @property
    def id_type(self) -> str:
        """The smallest dtype that can hold all ids: "int32" or "int64"."""
        return "int32" if self.rows <= 2**31 else "int64"

    @property
    def first_value(self) -> int:
        """The first id of a value; lower ids belong to dense columns and out-of-vocabulary values."""
        return len(self.dense) + len(self.spaces)

    def as_json(self) -> dict[str, Any]:
        """Return the schema as manifests store it; `more`, `targets` and `weighted` are omitted if empty or false."""
        content = asdict(self)
        del content["targets"]
        if targets := self.targets.as_json():
            content["targets"] = targets
        for column in content["columns"]:
            if not column["weighted"]:
                del column["weighted"]
        for space in content["spaces"]:
            if not space["more"]:
                del space["more"]
        return content


def from_json(content: Any) -> Schema:
    """Parse the result of `as_json`; raise ValueError if it is invalid."""
    return parse(Schema, content, "schema")


def _twice(names: list[str]) -> str | None:
    """Return a name that occurs twice, or None."""
    seen: set[str] = set()
    return next((name for name in names if name in seen or seen.add(name)), None)  # type: ignore[func-returns-value]
