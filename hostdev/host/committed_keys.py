"""The keys of a table by key at one moment; results have them in the order of their hashes.

A `KeySnapshot` copies rows on write, for checkpoints that are written during training. Its positions 0 .. P - 1 stand
for the P out-of-vocabulary rows, in the order of their names. The following positions stand for the rows of the
snapshot's keys, in the order of the keys' hashes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from hostdev.core.keys import KeyColumns
from hostdev.host.snapshot import Budget, Copies, Snapshot
from hostdev.kernels.arrays import AnyIds, Keys, reserved
from hostdev.kernels.bits import Bits, bits_of, empty_bits, mark
from hostdev.kernels.key_directory import EMPTY
from hostdev.kernels.key_order import order_of, sorted_rows
from hostdev.kernels.key_use import split

Values = npt.NDArray[np.int64]
Uses = npt.NDArray[np.uint32]


@dataclass(eq=False)
class CommittedKeys:
    """The keys of a table after its last finished step. Nothing is sorted before it is needed.

    Args:
        step: Number of finished steps.
        decays: How often the uses have decayed.
        by_row: int64 [V], the key of each row.
        packed: uint64 [V], the last step and the uses of each row, see `kernels.key_use`; rows without keys have 0 in
            place of the step.
        counted: Keys [any] that have no row and whose uses are counted exactly, with their last steps << 24 | uses;
            later values replace earlier ones, and EMPTY is the value of a key that does not wait.
        waiting_count: Number of keys that wait.
        sketch: uint32 [any], the counts of a sketch.
    """

    step: int
    decays: int
    by_row: Keys
    packed: npt.NDArray[np.uint64]
    counted: list[tuple[Keys, Values]]
    waiting_count: int
    sketch: Uses

    @cached_property
    def live(self) -> Bits:
        """The rows that have a key, one bit per row."""
        return bits_of(split(self.packed)[0] != 0)

    @cached_property
    def rows(self) -> npt.NDArray[np.int32]:
        """The rows that have a key, int32 [K], in the order of the keys' hashes."""
        return sorted_rows(self.by_row, self.live)

    @property
    def keys(self) -> Keys:
        """The keys that have a row, int64 [K], in the order of their hashes."""
        return self.by_row[self.rows]

    @property
    def last(self) -> Uses:
        """The last step that used each key, uint32 [K]."""
        return split(self.packed)[0][self.rows]

    @property
    def uses(self) -> Uses:
        """How often each key was used, after decay, uint32 [K]; see `uses` of `core.key_rules.KeyUse`."""
        return split(self.packed)[1][self.rows]

    @cached_property
    def waiting(self) -> tuple[Keys, Values]:
        """The keys without a row whose uses are counted exactly, int64 [W], and their last steps << 24 | uses."""
        keys, values = newest(self.counted)
        self.counted = []
        keys, values = keys[values != EMPTY], values[values != EMPTY]
        order = order_of(keys)
        return keys[order], values[order]

    def forget_rows(self) -> None:
        """Free the memory of the keys that have a row."""
        self.by_row, self.packed = self.by_row[:0], self.packed[:0]
        for name in ("live", "rows"):
            self.__dict__.pop(name, None)


def newest(parts: list[tuple[Keys, Values]]) -> tuple[Keys, Values]:
    """Return the distinct keys of all parts, ascending; each has its value from the last part that has the key."""
    keys = np.concatenate([keys for keys, _ in parts])[::-1]
    values = np.concatenate([values for _, values in parts])[::-1]
    keys, first = np.unique(keys, return_index=True)
    return keys, values[first]


class KeySnapshot(Snapshot):
    """The rows of a table by key when the snapshot is constructed.

    Args:
        copies: As for `Snapshot`.
        rows: Number of rows that the table can have.
        budget: As for `Snapshot`.
        unknown: The out-of-vocabulary rows by name, in the order of the names.
        found: The table's keys.
        changed: The changed rows, one bit per row, or None for all rows. The snapshot has those of them that have a
            key, and the out-of-vocabulary rows.
        gone: int64 [G], keys that have lost their rows since the last snapshot.
    """

    def __init__(
        self,
        copies: Copies,
        rows: int,
        budget: Budget,
        unknown: Mapping[str, int],
        found: CommittedKeys,
        changed: Bits | None,
        gone: Keys,
    ) -> None:
        self.found, self.gone, self.names = found, gone, list(unknown)
        self._own = np.array(list(unknown.values()), np.int32)
        live = found.live if changed is None else found.live & changed[: len(found.live)]
        self._live: Bits | None = live
        wanted = empty_bits(rows)
        wanted[: len(live)] = live
        mark(self._own, wanted)
        super().__init__(copies, rows, wanted, budget)
        self._rows = self.count
        self._bucket = -(-self.count // 32)

    @cached_property
    def _order(self) -> npt.NDArray[np.int32]:
        """The row of each position; computed at its first use, in the writer's thread, since sorting takes time."""
        live, self._live = self._live, None
        assert live is not None
        return sorted_rows(self.found.by_row, live, self._own)

    @cached_property
    def _positions(self) -> npt.NDArray[np.int32]:
        """The position of each of the snapshot's rows, indexed by row; undefined for other rows."""
        rows = self._order
        found: npt.NDArray[np.int32] = reserved((int(rows.max(initial=0)) + 1,), np.int32)
        found[rows] = np.arange(len(rows), dtype=np.int32)
        return found

    def key_columns(self, first: int, last: int) -> KeyColumns:
        """Return the keys at the positions [first, last), their last steps and their numbers of uses."""
        rows = self._order[first:last]
        used, uses = split(self.found.packed)
        return KeyColumns(self.found.by_row[rows], used[rows], uses[rows])

    def other_keys(self) -> tuple[Any, ...]:
        """Return the keys that wait for a row [W], their last steps << 24 | uses, `gone`, and the sketch's counts."""
        return *self.found.waiting, self.gone, self.found.sketch

    def rows_between(self, first: int, last: int) -> AnyIds:
        """Return the positions [first, last), int64."""
        return np.arange(first, last)

    def _rows_at(self, positions: AnyIds) -> AnyIds:
        return self._order[positions]

    def _positions_of(self, rows: AnyIds) -> AnyIds:
        return self._positions[rows]

    def end(self) -> None:
        """See `Snapshot.end`."""
        super().end()
        self.found.forget_rows()


def gone_since(keys: Sequence[Keys]) -> Keys:
    """Return distinct keys of several arrays, in the order of their hashes."""
    found = np.unique(np.concatenate([np.zeros(0, np.int64), *keys]))
    return found[order_of(found)]
