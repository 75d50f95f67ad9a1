"""Keys of a table by key, as they are saved and as they enter digests."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

RAW = 2**62  # hash buckets of raw ids: so many that values hardly ever share one
SHARED, ZEROS, INITIAL = UNKNOWN = "shared", "zeros", "initial"  # what keys without a row read


class KeyColumns(NamedTuple):
    """Keys, and what is known of their use."""

    keys: npt.NDArray[np.int64]  # [N]
    last: npt.NDArray[np.uint32]  # [N], the last step that used each key
    uses: npt.NDArray[np.uint32]  # [N], how often each key was used

    def at(self, where: Any) -> "KeyColumns":
        """Return the keys that an index of arrays selects."""
        return KeyColumns(self.keys[where], self.last[where], self.uses[where])


def join_columns(parts: Sequence[KeyColumns]) -> KeyColumns:
    """Return the keys of all parts."""
    keys, last, uses = zip(*parts, strict=True)
    return KeyColumns(np.concatenate(keys), np.concatenate(last), np.concatenate(uses))


class FormerIds(NamedTuple):
    """The keys that rows of a table by row get in a table by key."""

    keys: npt.NDArray[np.int64]  # [V], by row
    known: npt.NDArray[np.bool_]  # [V], whether the row has a key
    uses: npt.NDArray[np.uint32]  # [V]
    unknown: Mapping[str, int]  # for names of out-of-vocabulary rows, the rows that become these


class KeyArrays(NamedTuple):
    """The keys of a table by key: K keys with a row, and W that wait for one, each in the order of their hashes.

    Attributes:
        step: Number of the keys' steps.
        unknown: Names of the out-of-vocabulary rows, ascending.
        keys: int64 [K].
        last: uint32 [K], the last step that used each key.
        uses: uint32 [K], how often each key was used.
        waiting: int64 [W].
        counts: int64 [W], the last step times 2^24 plus the uses of each key that waits.
        sketch: uint32 [any], the counters of a sketch of the keys that wait.
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
        """Return these values with each array changed, in order."""
        return KeyArrays(self.step, self.unknown, *map(change, self[2:]))  # type: ignore[arg-type]


def decayed(uses: npt.NDArray[np.uint32], factor: float, times: int = 1) -> npt.NDArray[np.uint32]:
    """Return uses [N], multiplied by a factor and rounded down, as often as `times` says."""
    for _ in range(times):
        if not uses.any():
            break
        uses = np.floor(uses * factor).astype(np.uint32)
    return uses


def is_raw(ids: int) -> bool:
    """Return whether a data set with this number of ids, or of hash buckets, has raw ids."""
    return ids >= RAW
