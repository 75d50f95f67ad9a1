"""Keys of a table by key, as they are saved and as they enter digests."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

RAW = 2**62  # a data set with at least so many ids or hash buckets has raw ids
SHARED, ZEROS, INITIAL = UNKNOWN = "shared", "zeros", "initial"  # values that keys without a row read


class KeyColumns(NamedTuple):
    """Keys, the steps that last used them, and their numbers of uses."""

    keys: npt.NDArray[np.int64]  # [N]
    last: npt.NDArray[np.uint32]  # [N], the last step that used each key
    uses: npt.NDArray[np.uint32]  # [N], how often each key was used

    def at(self, where: Any) -> "KeyColumns":
        """Return the keys, last steps and numbers of uses that the array index `where` selects."""
        return KeyColumns(self.keys[where], self.last[where], self.uses[where])


def join_columns(parts: Sequence[KeyColumns]) -> KeyColumns:
    """Return the keys, last steps and numbers of uses of all parts, concatenated."""
    keys, last, uses = zip(*parts, strict=True)
    return KeyColumns(np.concatenate(keys), np.concatenate(last), np.concatenate(uses))


class FormerIds(NamedTuple):
    """The keys that the rows of a table by id get when a table by key loads them."""

    keys: npt.NDArray[np.int64]  # [V], by row
    known: npt.NDArray[np.bool_]  # [V], whether the row gets a key
    uses: npt.NDArray[np.uint32]  # [V], how often each row's key was used
    unknown: Mapping[str, int]  # by name of an out-of-vocabulary row, the row of the table by id that it loads


class KeyArrays(NamedTuple):
    """The keys of a table by key: K keys with a row, and W keys that wait for one, both in the order of their hashes.

    Attributes:
        step: Number of finished steps of the keys; the table's own number of steps may differ.
        unknown: Names of the out-of-vocabulary rows, ascending.
        keys: int64 [K], the keys with a row.
        last: uint32 [K], the last step that used each key.
        uses: uint32 [K], how often each key was used.
        waiting: int64 [W], the keys that wait for a row.
        counts: int64 [W], for each waiting key, (the last step that used it) * 2^24 + (its number of uses).
        sketch: uint32 [any], the counters of a count-min sketch of the uses of waiting keys; [0] without a sketch.
    """

    step: int
    unknown: list[str]
    keys: npt.NDArray[np.int64]
    last: npt.NDArray[np.uint32]
    uses: npt.NDArray[np.uint32]
    waiting: npt.NDArray[np.int64]
    counts: npt.NDArray[np.int64]
    sketch: npt.NDArray[np.uint32]

    def map(self, change: Callable[[npt.NDArray[Any]], npt.NDArray[Any]]) -> "KeyArrays":
        """Return the keys with `change` applied to each array, in the order of the fields."""
        return KeyArrays(self.step, self.unknown, *map(change, self[2:]))  # type: ignore[arg-type]


def decayed(uses: npt.NDArray[np.uint32], factor: float, times: int = 1) -> npt.NDArray[np.uint32]:
    """Return numbers of uses [N], multiplied by a factor and rounded down `times` times."""
    for _ in range(times):
        if not uses.any():
            break
        uses = np.floor(uses * factor).astype(np.uint32)
    return uses


def is_raw(ids: int) -> bool:
    """Return whether a data set with this number of ids, or of hash buckets, has raw ids."""
    return ids >= RAW
