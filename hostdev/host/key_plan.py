"""The changes of a table's keys in one step, and how to undo them."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Keys = npt.NDArray[np.int64]
Rows = npt.NDArray[np.int32]
Steps = npt.NDArray[np.uint32]

NO_KEYS = np.zeros(0, np.int64)
NO_ROWS = np.zeros(0, np.int32)


class PlannedAheadError(Exception):
    """A step can be planned only once all earlier steps are finished."""


class PlannedKeys(NamedTuple):
    """What a step does to the keys of a table."""

    rows: Rows  # int32 [U], the row of each key; EMPTY for a key without a row
    new: npt.NDArray[np.int64]  # positions of the keys that get a row in this step; its row must be initialized
    evicted: Keys  # keys that lost their rows before this step, in an order that depends on row numbers
    evicted_rows: Rows  # their rows, which keep their values until the step is committed
    guests: Rows = NO_ROWS  # rows for this step alone, which must be initialized: of keys without a row, or one for all


class KeyCount(NamedTuple):
    """The numbers of keys after a step, over all ranks."""

    step: int
    live: int  # keys with a row
    waiting: int  # keys that are counted and wait for a row
    admitted: int  # keys that got a row in this step
    evicted: int  # keys that lost their row before it


@dataclass
class Undo:
    """How to undo a step."""

    step: int
    used: Rows = field(default_factory=lambda: NO_ROWS)  # rows that the step used, or EMPTY
    before: npt.NDArray[np.uint64] = field(default_factory=lambda: np.zeros(0, np.uint64))  # what `use` returned
    new: tuple[Keys, Rows] = (NO_KEYS, NO_ROWS)
    evicted: tuple[Keys, Rows, Steps] = (NO_KEYS, NO_ROWS, np.zeros(0, np.uint32))  # with their last steps
    guests: Rows = field(default_factory=lambda: NO_ROWS)
    waiting: list[tuple[Keys, npt.NDArray[np.int64]]] = field(default_factory=list)  # keys and their former values
    sketched: tuple[Keys, npt.NDArray[Any]] = (NO_KEYS, NO_ROWS)  # keys, and the uses that were added
    undecayed: npt.NDArray[np.uint32] | None = None  # all rows' uses, before they decayed
    decays: int = 0  # how often they have decayed
    counts: KeyCount | None = None  # after the step
